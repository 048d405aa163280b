"""HTTP/1.1 messages without sockets: what both roles read and write.

The framing is decided here and llhttp is its guard: it gets exactly one head at a time, and after
that only chunked bodies. It refuses what is ambiguous (Content-Length beside Transfer-Encoding,
bare LF, folded lines, odd lengths and chunk sizes), but it cannot say where a message ended inside
a read, nor does it know that an interim reply is not the final one.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final, TypeAlias

import httptools

from sidecar.core.types import ReplyHead, header
from sidecar.wire.exchange import MAX_INTERIM

if TYPE_CHECKING:
    from sidecar.core.types import Headers, Request

HEAD_END: Final = b"\r\n\r\n"

_VERSION: Final = b"HTTP/1."
"""llhttp also takes 0.9 and 2.0, RTSP and ICE."""

_FRAMING: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "upgrade"}
)
"""Belongs to the connection, whoever else names it."""

_SENDS_A_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
"""Methods that say Content-Length: 0 when they have none (RFC 9110 8.6)."""

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_VISIBLE: Final = re.compile(r"[!-~]+").fullmatch


Parser: TypeAlias = httptools.HttpRequestParser | httptools.HttpResponseParser


class Malformed(Exception):
    """Bytes that HTTP/1.1 does not allow."""


# --- writing ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _is_token(name: str) -> bool:
    return _TOKEN(name) is not None


def encode_head(start: str, headers: Headers, framing: str) -> bytes:
    """The bytes of a head: `start`, `headers` without those of framing, `framing`, the empty line.

    `start` and `framing` are whole lines with their CRLF, known to be sound. Raises ValueError for
    a name or value that would break out of its line, or is not latin-1.
    """
    lines = []
    for name, value in headers:
        if not _is_token(name):
            raise ValueError("a header name is not a token")
        if name not in _FRAMING:
            lines.append(f"{name}: {value}\r\n")
    text = "".join(lines)
    if text.count("\r") != len(lines) or text.count("\n") != len(lines) or "\0" in text:
        raise ValueError("a header value has CR, LF or NUL")
    return f"{start}{text}{framing}\r\n".encode("latin-1")


def encode_request(request: Request, authority: str) -> bytes:
    """The head of `request`; raises ValueError when it would not be one."""
    if not (_VISIBLE(request.target) and _VISIBLE(authority) and _is_token(request.method)):
        raise ValueError("the request line would not be one")
    body = len(request.body)
    length = f"content-length: {body}\r\n" if body or request.method in _SENDS_A_BODY else ""
    start = f"{request.method} {request.target} HTTP/1.1\r\nhost: {authority}\r\n"
    return encode_head(start, request.headers, length)


# --- reading ----------------------------------------------------------------------------------


class Incoming:
    """One message as llhttp reports it: the head, then, if it is chunked, the body.

    `read_head` comes first; `feed_chunked` needs the same parser in `parser`.
    """

    __slots__ = (
        "_dry",
        "_pieces",
        "_tail",
        "ended",
        "headers",
        "keep_alive",
        "parser",
        "target",
        "trailers",
    )

    def __init__(self) -> None:
        self.parser: Parser | None = None
        self.target = b""
        self.headers: Headers = []
        self.trailers: Headers | None = None
        """None before the end of the head."""
        self.keep_alive = False
        self.ended = False
        self._pieces: list[bytes] = []
        self._tail = b""
        self._dry = 0

    # llhttp's callbacks

    def on_url(self, url: bytes) -> None:
        """Of a request."""
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Names in lower case; llhttp leaves white space at the end of values."""
        line = (name.decode("latin-1").lower(), value.strip(b" \t").decode("latin-1"))
        (self.headers if self.trailers is None else self.trailers).append(line)

    def on_headers_complete(self) -> None:
        """What follows are trailers."""
        self.trailers = []
        if self.parser is not None:
            # not later: llhttp forgets its flags with the end of the message
            self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Of chunked messages only: no other body is given to llhttp."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Fires for an interim reply and for a head without a body, too."""
        self.ended = True

    # the message

    def read_head(self, parser: Parser, head: bytes) -> None:
        """Have `parser`, which was made with this object, take the whole head in one piece.

        Raises what `feed_data` raises.
        """
        self.parser = parser
        try:
            parser.feed_data(head)
        finally:
            # the two refer to each other, which only the garbage collector could undo
            self.parser = None

    def restart(self, head: bytes) -> httptools.HttpRequestParser:
        """A parser that takes a chunked body, for a request whose own parser does not any more."""
        target = self.target
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(head)
        self.target = target
        self.ended = False
        return parser

    def is_chunked(self) -> bool:
        """Whether the body is; raises Malformed for any other Transfer-Encoding."""
        codings = [value.lower() for name, value in self.headers if name == "transfer-encoding"]
        if codings and codings != ["chunked"]:
            raise Malformed("Transfer-Encoding other than chunked")
        return bool(codings)

    def feed_chunked(self, data: bytes, header_bytes: int) -> tuple[bytes, bytes]:
        """The body bytes in `data`, and what follows the message when `ended`.

        Trailers and chunk extensions may have `header_bytes` without a byte of body.

        llhttp does not say how far it came, but a chunked body can only end with CRLF CRLF: it is
        fed in pieces that end there.
        """
        parser = self.parser
        if parser is None:
            return b"", data
        view = memoryview(data)
        start, size = 0, len(data)
        crossing = (self._tail + data[:3]).find(HEAD_END) if self._tail else -1
        stop = crossing + 4 - len(self._tail) if crossing >= 0 else 0
        try:
            while start < size and not self.ended:
                if stop <= start:
                    found = data.find(HEAD_END, start)
                    stop = found + 4 if found >= 0 else size
                parser.feed_data(view[start:stop])
                start = stop
        except httptools.HttpParserError as error:
            raise Malformed(str(error)) from None
        rest = b""
        if self.ended:
            self.parser = None
            rest = data[start:]
        self._tail = data[-3:] if len(data) > 2 else (self._tail + data)[-3:]
        pieces = self._pieces
        if pieces:
            self._dry = 0
            self._pieces = []
            return pieces[0] if len(pieces) == 1 else b"".join(pieces), rest
        self._dry += len(data)
        if self._dry > header_bytes:
            raise Malformed("trailers or chunk extensions above header_bytes")
        return b"", rest


class ReplyReader:
    """The reply to one request, fed as it comes. Pure: bytes in, facts out.

    Every way of cutting the bytes gives the same head, body and facts.
    """

    __slots__ = (
        "_buffer",
        "_header_bytes",
        "_incoming",
        "_interim",
        "_left",
        "_method",
        "complete",
        "head",
        "keep_alive",
        "started",
        "surplus",
    )

    def __init__(self, method: str, header_bytes: int) -> None:
        self.head: ReplyHead | None = None
        """Of the final reply."""
        self.started = False
        """A byte came that may belong to the final reply."""
        self.complete = False
        self.surplus = False
        """Bytes came behind the complete reply."""
        self.keep_alive = False
        self._method = method
        self._header_bytes = header_bytes
        self._buffer = bytearray()
        self._interim = 0
        self._left: int | None = None
        """Bytes of the body to come, None when its end is not known by a length."""
        self._incoming: Incoming | None = None
        """Of a chunked reply."""

    @property
    def trailers(self) -> Headers:
        """Of a chunked reply that is complete."""
        return (self._incoming.trailers or []) if self._incoming is not None else []

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`; raises Malformed."""
        if not data:
            return data
        if self.head is not None:
            return self._body(data)
        rest = self._heads(data)
        return self._body(rest) if rest else b""

    def end(self) -> None:
        """The peer has ended the connection cleanly; `complete` says what that means."""
        if self.head is not None and self._left is None and self._incoming is None:
            self.complete = True

    def _heads(self, data: bytes) -> bytes:
        """Read heads up to the final one; returns what follows that, b'' while it is not there."""
        self.started = True
        buffer: bytearray | bytes = data
        searched = 0
        if self._buffer:
            searched = max(0, len(self._buffer) - 3)
            self._buffer += data
            buffer = self._buffer
        while True:
            found = buffer.find(HEAD_END, searched)
            if found + 4 > self._header_bytes or (found < 0 and len(buffer) > self._header_bytes):
                raise Malformed("reply head above header_bytes")
            if found < 0:
                # told at once, not when the peer gives up: it may wait for us
                if buffer[:7] != _VERSION[: len(buffer)]:
                    raise Malformed("not an HTTP/1.x reply")
                if not self._buffer:
                    self._buffer += buffer
                return b""
            self._one_head(bytes(buffer[: found + 4]))
            rest = bytes(buffer[found + 4 :])
            self._buffer.clear()
            if self.head is not None:
                return rest
            if not rest:
                self.started = False
                return b""
            buffer = rest
            searched = 0

    def _one_head(self, head: bytes) -> None:
        incoming = Incoming()
        parser = httptools.HttpResponseParser(incoming)
        if not head.startswith(_VERSION):
            raise Malformed("not an HTTP/1.x reply")
        try:
            incoming.read_head(parser, head)
        except httptools.HttpParserUpgrade:
            raise Malformed("101 that nobody asked for") from None
        except httptools.HttpParserError as error:
            raise Malformed(str(error)) from None
        status = parser.get_status_code()
        if status == 101 or incoming.trailers is None:
            raise Malformed("101 that nobody asked for" if status == 101 else "no end of the head")
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM:
                raise Malformed(f"more than {MAX_INTERIM} interim replies")
            return
        self.keep_alive = incoming.keep_alive
        self.head = ReplyHead(status, incoming.headers)
        self._frame(status, incoming, parser, http10=head[7:8] == b"0")

    def _frame(
        self,
        status: int,
        incoming: Incoming,
        parser: httptools.HttpResponseParser,
        *,
        http10: bool,
    ) -> None:
        """How long the body is (RFC 9112 6.3); llhttp has refused contradictions."""
        chunked = incoming.is_chunked()
        length = header(incoming.headers, "content-length")
        if self._method == "HEAD" or status in {204, 304}:
            self._left, self.complete = 0, True
        elif chunked:
            incoming.parser = parser
            self._incoming = incoming
            self.keep_alive = self.keep_alive and not http10
        elif length is not None:
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self.keep_alive = False

    def _body(self, data: bytes) -> bytes:
        if self.complete:
            self.surplus = True
            return b""
        if self._incoming is not None:
            body, rest = self._incoming.feed_chunked(data, self._header_bytes)
            self.complete = self._incoming.ended
            self.surplus = bool(rest)
            return body
        left = self._left
        if left is None:
            return data
        self._left = max(0, left - len(data))
        self.complete = self._left == 0
        self.surplus = len(data) > left
        return data[:left] if self.surplus else data
