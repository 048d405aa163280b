"""One HTTP/1.1 request as its handler sees it, and the ways to answer it; `http1_server` makes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

import httptools
import trio

from sidecar.core.types import header
from sidecar.wire.http1_message import Incoming, Malformed, encode_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.types import Headers

_SLICE: Final = 65536
"""Bytes of a large answer per send; each counts as progress of the client."""

_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_NO_BODY: Final = frozenset({204, 304})
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True, kw_only=True)
class Http1Limits:
    """What a client may take, in bytes and seconds."""

    header_bytes: int = 65536
    """Of a request head, and of what is read ahead behind a request."""
    head_seconds: float = 10.0
    """From the first byte of a head to its last."""
    body_seconds: float = 30.0
    """Between two reads of a body."""
    stall_seconds: float = 120.0
    """An answer of which the client takes nothing."""
    idle_seconds: float = 300.0
    """Between two requests; longer than any client keeps a connection, and announced."""
    linger_seconds: float = 1.0
    """How long what the client still sends is read after an answer that did not want it."""


class RequestRefused(Exception):
    """A request that is answered with `status` and not carried out."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class BodyTooLarge(RequestRefused):
    """The body has, or will have, more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body is larger than {limit} bytes")
        self.limit = limit


class PeerGone(Exception):
    """The client cannot be answered any more."""


class Stalled(PeerGone):
    """The client took nothing for `stall_seconds` and was disconnected."""


def render_json(status: int, message: str) -> tuple[Headers, bytes]:
    """The default form of the errors that are made here."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return [("content-type", "application/json")], body


def error_head(status: int, headers: Headers, body: bytes) -> bytes:
    """The head of an error to bytes that did not become a request; the connection is closed."""
    start = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
    return encode_head(start, headers, f"content-length: {len(body)}\r\nconnection: close\r\n")


class Fact:
    """Something that happens once, or never: like a trio.Event, and cheap while nobody waits."""

    __slots__ = ("_callbacks", "_event", "_happened")

    def __init__(self) -> None:
        self._happened = False
        self._event: trio.Event | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    async def wait(self) -> None:
        """Return when it has happened."""
        if self._event is None:
            self._event = trio.Event()
            if self._happened:
                self._event.set()
        await self._event.wait()

    def then(self, callback: Callable[[], object]) -> None:
        """Call `callback` when it happens, at once if it has: a cancel scope's `cancel`, say."""
        if self._happened:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def set(self) -> None:
        """It has happened."""
        if not self._happened:
            self._happened = True
            if self._event is not None:
                self._event.set()
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks or ():
                callback()


class Link(Protocol):
    """What a request needs of its connection."""

    async def send(self, data: bytes | memoryview) -> None:
        """Write; raises PeerGone."""
        ...

    async def read_body(
        self, request: Http1Request, limit: int, taken: Callable[[int], None] | None
    ) -> bytes:
        """The body of `request`, which has one."""
        ...

    async def look(self) -> None:
        """Notice what the client has done, without waiting."""
        ...

    def watch_now(self) -> None:
        """From here on notice at once when the client leaves."""
        ...

    def persistence(self, request: Http1Request) -> str:
        """The header lines that say whether another request may follow `request`."""
        ...


def parse_request(link: Link, head: bytes) -> Http1Request:
    """The request of one whole `head`; raises RequestRefused."""
    incoming = Incoming()
    parser = httptools.HttpRequestParser(incoming)
    upgrade = False
    try:
        incoming.read_head(parser, head)
    except httptools.HttpParserUpgrade:
        upgrade = True
    except httptools.HttpParserError as error:
        raise RequestRefused(400, f"not an HTTP/1.1 request: {error}") from None
    http10 = _check_head(incoming, head)
    method = parser.get_method().decode("latin-1")
    try:
        chunked = incoming.is_chunked()
    except Malformed as error:
        raise RequestRefused(400, str(error)) from None
    if chunked:
        if http10:
            raise RequestRefused(400, "Transfer-Encoding in HTTP/1.0")
        if upgrade:
            # it is ignored (RFC 9110 7.8), but that parser takes no body any more
            parser = incoming.restart(_CHUNKED_HEAD)
        incoming.parser = parser
    expect = header(incoming.headers, "expect")
    length = header(incoming.headers, "content-length")
    return Http1Request(
        link,
        method,
        incoming,
        http10=http10,
        content_length=None if chunked else int(length or 0),
        wants_continue=not http10 and expect is not None and expect.lower() == "100-continue",
    )


def _check_head(incoming: Incoming, head: bytes) -> bool:
    """Refuse what llhttp lets through; returns whether it is HTTP/1.0."""
    line_end = head.find(b"\r\n")
    version = head[line_end - 9 : line_end]
    http10 = version == b" HTTP/1.0"
    if not http10 and version != b" HTTP/1.1":
        if version == b" HTTP/2.0":
            raise RequestRefused(505, "only HTTP/1.1 is spoken here")
        raise RequestRefused(400, "not an HTTP/1.1 request")
    if not incoming.target.startswith(b"/") or b"#" in incoming.target:
        raise RequestRefused(400, "the request target must be a path")
    hosts = 0
    for name, _ in incoming.headers:
        if name == "host":
            hosts += 1
    if hosts > 1 or (hosts == 0 and not http10):
        raise RequestRefused(400, "exactly one Host header is required")
    return http10


class Http1Request:
    """A request and the ways to answer it: `respond`, or `start`, `send` and `end`.

    `headers` are as received, hop-by-hop ones included. `half_closed`: the client has ended its
    side and may still read. `gone`: the connection is lost. While a handler works and the body was
    read, both are noticed within half a second, after `start` or `look` at once.
    """

    __slots__ = (
        "_chunked",
        "_link",
        "answered",
        "content_length",
        "ended",
        "gone",
        "half_closed",
        "headers",
        "http10",
        "incoming",
        "keep_alive",
        "left",
        "method",
        "target",
        "wants_continue",
    )

    def __init__(
        self,
        link: Link,
        method: str,
        incoming: Incoming,
        *,
        http10: bool,
        content_length: int | None,
        wants_continue: bool,
    ) -> None:
        self.method = method
        self.target = incoming.target.decode("latin-1")
        """Origin form, as sent."""
        self.headers = incoming.headers
        self.content_length = content_length
        """Of the body; None when it is chunked."""
        self.half_closed = Fact()
        self.gone = Fact()
        # what follows is between the request and its connection
        self.http10 = http10
        self.keep_alive = incoming.keep_alive
        self.answered = False
        """An answer was begun."""
        self.ended = False
        """The answer is complete."""
        self.incoming = incoming
        self.left = -1 if content_length is None else content_length
        """Bytes of the body that were not taken; -1 before the end of a chunked one."""
        self.wants_continue = wants_continue
        self._link = link
        self._chunked = False

    async def body(self, limit: int, taken: Callable[[int], None] | None = None) -> bytes:
        """The whole body; to be called once. `taken` is told the size of each piece of it.

        Raises BodyTooLarge, before anything is read or asked for when the length was declared;
        RequestRefused for chunks that are none; PeerGone. All may be left to pass through.
        """
        if self.left == 0:
            return b""
        if self.left > limit:
            raise BodyTooLarge(limit)
        return await self._link.read_body(self, limit, taken)

    async def look(self) -> None:
        """Bring `half_closed` and `gone` up to date; never waits for the client."""
        await self._link.look()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer, in one send if the body is small.

        Raises PeerGone, and ValueError for a header that would not be one (nothing is sent then).
        """
        has_body = status not in _NO_BODY
        head = self._head(status, headers, f"content-length: {len(body)}\r\n" if has_body else "")
        if self.method == "HEAD" or not has_body:
            body = b""
        await self._link.send(head + body[:_SLICE])
        view = memoryview(body)
        for at in range(_SLICE, len(body), _SLICE):
            await self._link.send(view[at : at + _SLICE])
        self.ended = True

    async def start(self, status: int, headers: Headers, first: bytes = b"") -> None:
        """Begin an answer of unknown length, with its `first` bytes; raises as `respond` does."""
        if self.http10:
            self.keep_alive = False  # its end is the connection's
        self._chunked = not self.http10
        head = self._head(status, headers, "transfer-encoding: chunked\r\n" * self._chunked)
        self._link.watch_now()
        await self._link.send(head + self._chunk(first))

    async def send(self, chunk: bytes) -> None:
        """The next bytes of a started answer; returns when the kernel has them."""
        data = self._chunk(chunk)
        if data:
            await self._link.send(data)

    async def end(self) -> None:
        """The started answer is complete."""
        if self._chunked and self.method != "HEAD":
            await self._link.send(b"0\r\n\r\n")
        self.ended = True

    def _chunk(self, data: bytes) -> bytes:
        if not data or self.method == "HEAD":
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _head(self, status: int, headers: Headers, framing: str) -> bytes:
        if self.answered:
            raise RuntimeError("the request was answered already")
        start = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
        head = encode_head(start, headers, framing + self._link.persistence(self))
        self.answered = True
        return head
