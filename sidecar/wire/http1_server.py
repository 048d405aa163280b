"""HTTP/1.1 as a server: one loop per connection, over any wire.

A connection costs two tasks. The main one reads a request, runs the handler and reads the next; on
its way there is neither a task switch nor a timer of ours. The other one, the watch, looks in a few
times per second: it enforces the deadlines, and once a handler takes longer it reads in its place,
so that a client that leaves is noticed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import httptools
import trio

from sidecar.wire.http1_message import HEAD_END, Incoming, Malformed, encode_head, is_chunked
from sidecar.wire.net import WireBroken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.core.types import Headers
    from sidecar.wire.net import Wire

_TICK: Final = 0.2
"""Seconds between two looks of the watch at a connection that is in use."""

_LISTEN: Final = 5.0
"""The same while it reads for a handler: a thousand idle streams wake it 200 times per second."""

_SLICE: Final = 65536
"""Bytes of a large answer per send; each counts as progress of the client."""

_GOODBYE_SECONDS: Final = 1.0
_DRAIN_IDLE_SECONDS: Final = 1.0
"""Idle connections are kept this long in a drain, for requests that are already on their way."""

_TLS_HANDSHAKE: Final = 0x16

_NO_BODY: Final = frozenset({204, 304})
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


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
        """Call `callback` when it happens, at once if it has; a cancel scope's `cancel`, say."""
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
            for callback in self._callbacks or ():
                callback()
            self._callbacks = None


Render = "Callable[[int, str], tuple[Headers, bytes]]"


def render_json(status: int, message: str) -> tuple[Headers, bytes]:
    """The default form of the errors that are made here."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return [("content-type", "application/json")], body


class Connections:
    """The HTTP/1.1 connections of one listener."""

    def __init__(self) -> None:
        self.closing = False
        self._all: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}
        """The longest idle one first."""

    def __len__(self) -> int:
        return len(self._all)

    def begin_closing(self) -> None:
        """Drain: answers carry `Connection: close`, idle connections close after a second."""
        self.closing = True
        for connection in self._idle:
            connection.nudge()

    def close_longest_idle(self) -> bool:
        """Make room for a new connection; False when every one is in use."""
        for connection in self._idle:
            del self._idle[connection]
            connection.wire.abort()
            return True
        return False

    def add(self, connection: _Connection) -> None:
        """One more."""
        self._all.add(connection)

    def discard(self, connection: _Connection) -> None:
        """It has ended."""
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def set_idle(self, connection: _Connection, idle: bool) -> None:
        """It waits for a request, or does not any more."""
        if idle:
            self._idle[connection] = None
        else:
            self._idle.pop(connection, None)


class _State(Enum):
    IDLE = auto()
    """Between two requests, nothing received of the next."""
    HEAD = auto()
    BODY = auto()
    """A handler waits for the body."""
    UNREAD = auto()
    """A handler runs, and the body has not been read."""
    WORK = auto()
    """A handler runs; what the client sends now belongs to the next request."""


class Http1Request:
    """A request and the ways to answer it, for the handler.

    `headers` are as received, hop-by-hop ones included, names in lower case. `half_closed`: the
    client has ended its side; it may still read. `gone`: the connection is lost. Both are noticed
    within half a second while a handler works and the body was read, at once after `start`.
    """

    __slots__ = (
        "_chunked_answer",
        "_connection",
        "_head_only",
        "_incoming",
        "answered",
        "content_length",
        "ended",
        "gone",
        "half_closed",
        "headers",
        "http10",
        "keep_alive",
        "left",
        "method",
        "target",
        "wants_continue",
    )

    def __init__(
        self,
        connection: _Connection,
        method: str,
        target: str,
        headers: Headers,
        *,
        http10: bool,
        keep_alive: bool,
        content_length: int | None,
        incoming: Incoming | None,
        wants_continue: bool,
    ) -> None:
        self.method = method
        self.target = target
        """Origin form, as sent."""
        self.headers = headers
        self.http10 = http10
        self.keep_alive = keep_alive
        """Whether another request may follow, as far as the client is concerned."""
        self.content_length = content_length
        """None when the body is chunked."""
        self.half_closed = Fact()
        self.gone = Fact()
        self.answered = False
        """An answer was begun."""
        self.ended = False
        """The answer is complete."""
        self.left = -1 if content_length is None else content_length
        """Bytes of the body that were not read, -1 if that is not known."""
        self.wants_continue = wants_continue
        self._incoming = incoming
        self._connection = connection
        self._chunked_answer = False
        self._head_only = method == "HEAD"

    async def body(self, limit: int) -> bytes:
        """The whole body; to be called once.

        Raises BodyTooLarge, before anything is read or asked for when the length was declared,
        RequestRefused for chunks that are none, PeerGone. All may be left to pass through.
        """
        if self.left == 0:
            return b""
        if self.left > limit:
            raise BodyTooLarge(limit)
        return await self._connection.read_body(self, limit)

    def feed_chunked(self, data: bytes, header_bytes: int) -> tuple[bytes, bytes]:
        """Of a chunked body: its bytes in `data`, and what follows it."""
        if self._incoming is None:
            return b"", data
        body, rest = self._incoming.feed_chunked(data, header_bytes)
        if self._incoming.ended:
            self.left = 0
        return body, rest

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer, in one send. Raises PeerGone, and ValueError for headers that are none."""
        framing = "" if status in _NO_BODY else f"content-length: {len(body)}\r\n"
        head = self._head(status, headers, framing)
        if self._head_only or status in _NO_BODY:
            body = b""
        if len(body) <= _SLICE:
            await self._connection.send(head + body)
        else:
            await self._connection.send(head + body[:_SLICE])
            view = memoryview(body)
            for at in range(_SLICE, len(body), _SLICE):
                await self._connection.send(view[at : at + _SLICE])
        self.ended = True

    async def start(self, status: int, headers: Headers, first: bytes = b"") -> None:
        """Begin an answer of unknown length, with its `first` bytes. Raises as `respond` does."""
        self._chunked_answer = not (self.http10 or self._head_only or status in _NO_BODY)
        if self.http10:
            self.keep_alive = False
        framing = "transfer-encoding: chunked\r\n" if self._chunked_answer else ""
        head = self._head(status, headers, framing)
        self._connection.watch_now()
        await self._connection.send(head + self._chunk(first))

    async def send(self, chunk: bytes) -> None:
        """The next bytes of an answer that was started. Returns when the kernel has them."""
        data = self._chunk(chunk)
        if data:
            await self._connection.send(data)

    async def end(self) -> None:
        """The answer that was started is complete."""
        if self._chunked_answer:
            await self._connection.send(b"0\r\n\r\n")
        self.ended = True

    def _chunk(self, data: bytes) -> bytes:
        if not data or self._head_only:
            return b""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked_answer else data

    def _head(self, status: int, headers: Headers, framing: str) -> bytes:
        if self.answered:
            raise RuntimeError("the request was answered already")
        start = f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n"
        head = encode_head(start, headers, framing + self._connection.persistence(self))
        self.answered = True
        return head


async def serve_http1(
    wire: Wire,
    handler: Callable[[Http1Request], Awaitable[None]],
    *,
    limits: Http1Limits,
    on_bug: Callable[[str, BaseException], None],
    initial: bytes = b"",
    connections: Connections | None = None,
    render: Callable[[int, str], tuple[Headers, bytes]] = render_json,
    half_close: Callable[[], None] | None = None,
) -> None:
    """Serve one connection to its end, and close it. Raises nothing but cancellation.

    `handler` answers one request; what it raises is answered with a 500 and told to `on_bug`.
    `initial` was read from the wire already. `render` gives headers and body of an error made here
    (400, 408, 413, 431, 500, 505). `half_close` ends our side of the socket while the other one
    can still be read, which a wire cannot.
    """
    connection = _Connection(
        wire, handler, limits, on_bug, initial, connections or Connections(), render
    )
    try:
        await connection.run()
        await connection.close(half_close)
    except Exception as error:
        on_bug("http1 connection", error)
    finally:
        wire.abort()


class _Connection:
    """One client."""

    __slots__ = (
        "_ahead",
        "_ahead_size",
        "_attending",
        "_broken",
        "_connections",
        "_cut",
        "_dozing",
        "_eof",
        "_handler",
        "_keep",
        "_keep_alive_lines",
        "_limits",
        "_linger",
        "_listening",
        "_nudge",
        "_on_bug",
        "_render",
        "_request",
        "_sending",
        "_serial",
        "_stalled",
        "_state",
        "_urgent",
        "wire",
    )

    def __init__(
        self,
        wire: Wire,
        handler: Callable[[Http1Request], Awaitable[None]],
        limits: Http1Limits,
        on_bug: Callable[[str, BaseException], None],
        initial: bytes,
        connections: Connections,
        render: Callable[[int, str], tuple[Headers, bytes]],
    ) -> None:
        self.wire = wire
        self._handler = handler
        self._limits = limits
        self._on_bug = on_bug
        self._connections = connections
        self._render = render
        self._keep_alive_lines = (
            f"connection: keep-alive\r\nkeep-alive: timeout={limits.idle_seconds:.0f}\r\n"
        )
        self._request: Http1Request | None = None
        self._keep = True
        """Another request may follow."""
        self._linger = False
        """The client may still be sending when this connection closes."""
        # input
        self._ahead: list[bytes] = [initial] if initial else []
        self._ahead_size = len(initial)
        self._eof = False
        self._broken = False
        # output
        self._cut = False
        """A send was broken off: nothing may follow it."""
        self._stalled = False
        # the watch
        self._state = _State.IDLE
        self._serial = 0
        """Changes with every step; the watch sees by it that nothing has happened."""
        self._sending = False
        self._dozing = False
        """The watch sleeps until the idle deadline."""
        self._urgent = False
        self._listening = False
        """The watch is in `receive`."""
        self._nudge = trio.Event()
        self._attending: trio.Event | None = None
        """The main task waits for the watch to read."""

    async def run(self) -> None:
        """Serve requests until one side has had enough."""
        self._connections.add(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                await self._serve()
                nursery.cancel_scope.cancel()
        finally:
            self._connections.discard(self)

    async def close(self, half_close: Callable[[], None] | None) -> None:
        """Close so that the last answer arrives: unread input would turn it into a reset."""
        if self._cut or self._broken:
            return
        deadline = trio.current_time() + _GOODBYE_SECONDS
        if self._linger and not self._eof:
            with trio.CancelScope(deadline=trio.current_time() + self._limits.linger_seconds):
                try:
                    if half_close is not None:
                        half_close()
                    while await self.wire.receive():
                        await trio.lowlevel.checkpoint()
                except (WireBroken, OSError):
                    return
            deadline = trio.current_time() + _GOODBYE_SECONDS
        with trio.CancelScope(shield=True, deadline=deadline):
            await self.wire.aclose()
