"""HTTP/1.1 as a server: one loop per connection, over any wire.

A connection costs two tasks. The main one reads a request, runs its handler and reads the next; on
that way there is neither a task switch nor a timer of ours, each of which would cost as much as
parsing the request. The other one, the watch, looks in a few times per second: it enforces the
deadlines, and once a handler takes longer it reads, so that a client that leaves is noticed.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import trio

from sidecar.wire.http1_message import HEAD_END, Malformed
from sidecar.wire.http1_request import (
    BodyTooLarge,
    Fact,
    Http1Limits,
    Http1Request,
    PeerGone,
    RequestRefused,
    Stalled,
    error_head,
    parse_request,
    render_json,
)
from sidecar.wire.net import WireBroken

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from sidecar.core.types import Headers
    from sidecar.wire.net import Wire

    Handler: TypeAlias = Callable[[Http1Request], Awaitable[None]]
    OnBug: TypeAlias = Callable[[str, BaseException], None]
    Render: TypeAlias = Callable[[int, str], tuple[Headers, bytes]]

__all__ = [
    "BodyTooLarge",
    "Connections",
    "Fact",
    "Http1Limits",
    "Http1Request",
    "PeerGone",
    "RequestRefused",
    "Stalled",
    "render_json",
    "serve_http1",
]

_TICK: Final = 0.2
"""Seconds between two looks of the watch at a connection that is in use."""

_LISTEN: Final = 5.0
"""The same while it reads for a handler: a thousand idle streams wake it 200 times per second."""

_GOODBYE_SECONDS: Final = 1.0
_CLOSING_SECONDS: Final = 1.0
"""How long idle connections stay in a drain, for requests that are on their way already."""

_TLS_HANDSHAKE: Final = 0x16
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connections:
    """The HTTP/1.1 connections of one listener."""

    def __init__(self) -> None:
        self.closing = False
        self.close_idle_at = math.inf
        self.idle: dict[_Connection, None] = {}
        """The longest idle one first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def begin_closing(self) -> None:
        """Drain: answers carry `Connection: close`, idle connections close after a second."""
        self.closing = True
        self.close_idle_at = trio.current_time() + _CLOSING_SECONDS
        for connection in self.idle:
            connection.nudge()

    def close_longest_idle(self) -> bool:
        """Make room for a new connection; False when every one is in use."""
        for connection in self.idle:
            del self.idle[connection]
            connection.wire.abort()
            return True
        return False

    def add(self) -> None:
        """One more."""
        self._count += 1

    def discard(self, connection: _Connection) -> None:
        """It has ended."""
        self._count -= 1
        self.idle.pop(connection, None)


async def serve_http1(
    wire: Wire,
    handler: Handler,
    *,
    limits: Http1Limits,
    on_bug: OnBug,
    initial: bytes = b"",
    connections: Connections | None = None,
    render: Render = render_json,
    half_close: Callable[[], None] | None = None,
) -> None:
    """Serve one connection to its end, and close it. Raises nothing but cancellation.

    `handler` answers one request; what it raises is answered with a 500 and told to `on_bug`.
    `initial` was read from the wire already. `render` gives headers and body of an error made here
    (400, 408, 413, 431, 500, 505). `half_close` ends our side of the socket while the other one
    can still be read, which a wire cannot do; without it a client that waits for the end of a
    refused request sees it `linger_seconds` later.
    """
    connection = _Connection(
        wire,
        handler=handler,
        limits=limits,
        on_bug=on_bug,
        initial=initial,
        connections=Connections() if connections is None else connections,
        render=render,
    )
    try:
        await connection.run()
        await connection.close(half_close)
    except Exception as error:
        on_bug("http1 connection", error)
    finally:
        wire.abort()


class _State(Enum):
    IDLE = auto()
    """Nothing of the next request is there."""
    HEAD = auto()
    BODY = auto()
    """A handler waits for the body."""
    UNREAD = auto()
    """A handler runs, and there is a body that it has not read."""
    WORK = auto()
    """A handler runs; what the client sends now belongs to the next request."""


class _Connection:
    """One client."""

    def __init__(
        self,
        wire: Wire,
        *,
        handler: Handler,
        limits: Http1Limits,
        on_bug: OnBug,
        initial: bytes,
        connections: Connections,
        render: Render,
    ) -> None:
        self.wire = wire
        self._handler = handler
        self._limits = limits
        self._on_bug = on_bug
        self._connections = connections
        self._render = render
        self._request: Http1Request | None = None
        self._keep = True
        """Another request may follow."""
        self._linger = False
        """The client may still be sending when this connection closes."""
        # input
        self._ahead: list[bytes] = [initial] if initial else []
        """What was received and not taken."""
        self._eof = False
        self._lost = False
        # output
        self._cut = False
        """A send was broken off: nothing may follow it."""
        self._stalled = False
        # the watch
        self._state = _State.IDLE
        self._serial = 0
        """Changes with every step; by it the watch sees that nothing has happened."""
        self._seen = -1
        self._since = 0.0
        self._sending = False
        self._dozing = False
        """The watch sleeps longer than a tick."""
        self._urgent = False
        self._nudge = trio.Event()
        self._listening: trio.CancelScope | None = None
        """The watch is in `receive`."""
        self._released: trio.Event | None = None
        """The main task waits for the watch to leave `receive`."""

    async def run(self) -> None:
        """Serve requests until one side has had enough."""
        self._connections.add()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                await self._serve()
                nursery.cancel_scope.cancel()
        finally:
            self._connections.discard(self)

    async def close(self, half_close: Callable[[], None] | None) -> None:
        """Close so that the last answer arrives: unread input would turn it into a reset."""
        if self._cut or self._lost:
            return
        if self._linger and not self._eof:
            with trio.CancelScope(deadline=trio.current_time() + self._limits.linger_seconds):
                try:
                    if half_close is not None:
                        half_close()
                    while await self.wire.receive():
                        await trio.lowlevel.checkpoint()
                except (WireBroken, OSError):
                    return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
            await self.wire.aclose()

    # --- for the request ----------------------------------------------------------------------

    async def send(self, data: bytes | memoryview) -> None:
        """See `Link.send`."""
        if self._cut or self._lost:
            raise self._gone("the connection is broken")
        self._serial += 1
        self._sending = self._cut = True
        try:
            await self.wire.send(data)
        except WireBroken as error:
            self._lose()
            raise self._gone(str(error)) from None
        finally:
            self._sending = False
        self._cut = False

    async def read_body(self, request: Http1Request, limit: int) -> bytes:
        """See `Link.read_body`."""
        self._step(_State.BODY)
        try:
            if request.wants_continue and not self._ahead:
                request.wants_continue = False
                await self.send(_CONTINUE)
            pieces: list[bytes] = []
            size = 0
            while request.left:
                data = await self._receive()
                if not data:
                    self._lose()
                    raise PeerGone("the client ended inside its request")
                body = self._part_of_body(request, data)
                size += len(body)
                if size > limit:
                    raise BodyTooLarge(limit)
                pieces.append(body)
                self._serial += 1
        finally:
            self._step(_State.UNREAD if request.left else _State.WORK)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def look(self) -> None:
        """See `Link.look`."""
        if self._state is _State.WORK and self._listening is None:
            while self._may_listen() and self.wire.has_input():
                await self._receive_ahead()

    def watch_now(self) -> None:
        """See `Link.watch_now`."""
        self._urgent = True
        self.nudge()

    def persistence(self, request: Http1Request) -> str:
        """See `Link.persistence`."""
        if request.left > 0 and self._ahead and len(self._ahead[0]) >= request.left:
            # a small body nobody wanted has come already: it need not cost the connection
            self._part_of_body(request, self._take_ahead())
        if request.left:
            self._linger = True
        if request.left or self._eof or self._connections.closing:
            request.keep_alive = False
        if not request.keep_alive:
            return "connection: close\r\n"
        seconds = int(self._limits.idle_seconds)
        return f"connection: keep-alive\r\nkeep-alive: timeout={seconds}\r\n"

    # --- requests -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while self._keep:
                head = await self._read_head()
                if not head:
                    return
                await self._handle(parse_request(self, head))
        except RequestRefused as error:
            await self._refuse(error)
        except PeerGone:
            pass
        except Exception as error:
            self._on_bug("http1 server", error)
            self._cut = True

    async def _read_head(self) -> bytes:
        """A whole head; b'' when the client, or this side, ends instead."""
        if not self._ahead:
            self._step(_State.IDLE)
            self._connections.idle[self] = None
            data = await self._receive()
            self._connections.idle.pop(self, None)
            if self._dozing:
                self.nudge()
            if not data:
                return b""
        else:
            data = self._take_ahead()
        if data[0] == _TLS_HANDSHAKE:
            self._cut = True
            return b""
        found = data.find(HEAD_END)
        if found <= 0 or data[0] in b"\r\n":
            return await self._collect_head(data)
        if found + 4 > self._limits.header_bytes:
            raise RequestRefused(431, "the request head is too large")
        self._put_back(data[found + 4 :])
        return data[: found + 4]

    async def _collect_head(self, data: bytes) -> bytes:
        """The head that begins with `data`, which is not all of it or begins with empty lines."""
        self._step(_State.HEAD)
        buffer = bytearray(data)
        searched = 0
        while True:
            while buffer.startswith(b"\r\n"):  # RFC 9112 2.2
                del buffer[:2]
            found = buffer.find(HEAD_END, searched)
            if max(found + 4, len(buffer) if found < 0 else 0) > self._limits.header_bytes:
                raise RequestRefused(431, "the request head is too large")
            if found >= 0:
                self._put_back(bytes(buffer[found + 4 :]))
                return bytes(buffer[: found + 4])
            line = buffer.find(b"\r\n")
            if line >= 0 and b" HTTP/" not in buffer[:line]:
                raise RequestRefused(400, "not an HTTP/1.1 request")
            searched = max(0, len(buffer) - 3)
            data = await self._receive()
            if not data:
                return b""
            buffer += data

    async def _handle(self, request: Http1Request) -> None:
        self._request = request
        self._step(_State.UNREAD if request.left else _State.WORK)
        try:
            await self._handler(request)
        except Exception as error:
            await self._handler_failed(request, error)
        else:
            if not request.ended and not self._lost:
                await self._handler_failed(request, RuntimeError("the handler gave no answer"))
        self._request = None
        self._keep = request.keep_alive and request.ended

    async def _handler_failed(self, request: Http1Request, error: Exception) -> None:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, PeerGone):
            self._cut = True
        elif request.answered:
            self._on_bug("http1 handler", error)
            self._cut = True  # the client must not take this for the end of the answer
        elif isinstance(error, RequestRefused):
            await self._refuse(error)
        else:
            self._on_bug("http1 handler", error)
            await self._refuse(RequestRefused(500, "internal error"))

    async def _refuse(self, error: RequestRefused) -> None:
        headers, body = self._render(error.status, error.message)
        try:
            if self._request is not None:
                await self._request.respond(error.status, headers, body)
            else:
                self._linger = True
                await self.send(error_head(error.status, headers, body) + body)
        except PeerGone:
            self._cut = True

    # --- input --------------------------------------------------------------------------------

    async def _receive(self) -> bytes:
        """The next bytes, b'' at the end; raises PeerGone. Not while a handler works."""
        while True:
            if self._lost:
                raise self._gone("the connection is broken")
            if self._ahead:
                return self._take_ahead()
            if self._eof:
                return b""
            if self._listening is None:
                await self._receive_ahead()
            else:
                self._listening.cancel()
                self._released = trio.Event()
                await self._released.wait()

    async def _receive_ahead(self) -> None:
        """One read from the wire."""
        try:
            data = await self.wire.receive()
        except WireBroken:
            self._lose()
            return
        if data:
            self._ahead.append(data)
            return
        self._eof = True
        if self._request is not None:
            self._request.half_closed.set()

    def _take_ahead(self) -> bytes:
        ahead, self._ahead = self._ahead, []
        return ahead[0] if len(ahead) == 1 else b"".join(ahead)

    def _put_back(self, data: bytes) -> None:
        if data:
            self._ahead.insert(0, data)

    def _part_of_body(self, request: Http1Request, data: bytes) -> bytes:
        """What of `data` belongs to the body; the rest is put back."""
        if request.left > 0:
            body, rest = data[: request.left], data[request.left :]
            request.left -= len(body)
        else:
            try:
                body, rest = request.incoming.feed_chunked(data, self._limits.header_bytes)
            except Malformed as error:
                raise RequestRefused(400, str(error)) from None
            if request.incoming.ended:
                request.left = 0
        self._put_back(rest)
        return body

    def _lose(self) -> None:
        self._lost = True
        if self._request is not None:
            self._request.gone.set()

    def _gone(self, detail: str) -> PeerGone:
        if self._stalled:
            return Stalled(f"nothing was taken for {self._limits.stall_seconds:g} s")
        return PeerGone(detail)

    # --- the watch ----------------------------------------------------------------------------

    def nudge(self) -> None:
        """Have the watch look in now."""
        self._nudge.set()

    def _step(self, state: _State) -> None:
        self._state = state
        self._serial += 1

    def _waited(self) -> float:
        """Seconds since the watch first saw that the last step was the last."""
        now = trio.current_time()
        if self._serial != self._seen:
            self._seen = self._serial
            self._since = now
        return now - self._since

    async def _watch(self) -> None:
        try:
            while True:
                delay = await self._look_in()
                if delay <= 0:
                    break
                self._dozing = delay > _TICK
                with trio.CancelScope(deadline=trio.current_time() + delay):
                    await self._nudge.wait()
                self._dozing = False
                if self._nudge.is_set():
                    self._nudge = trio.Event()
        except Exception as error:
            self._on_bug("http1 watch", error)
        self.wire.abort()

    async def _look_in(self) -> float:
        """Do what is due; returns the seconds until the next look, 0 to end the connection."""
        seen = self._seen
        waited = self._waited()
        limits = self._limits
        if self._sending and waited >= limits.stall_seconds:
            self._stalled = True
            return 0
        match self._state:
            case _State.IDLE:
                left = limits.idle_seconds - waited
                until_closed = self._connections.close_idle_at - trio.current_time()
                # busy connections pass through here all the time
                return min(left, until_closed, math.inf if seen == self._seen else _TICK)
            case _State.HEAD:
                return await self._time_left(limits.head_seconds - waited)
            case _State.BODY:
                return await self._time_left(limits.body_seconds - waited)
            case _State.WORK if seen == self._seen or self._urgent:
                self._urgent = False
                return await self._listen(min(_LISTEN, limits.stall_seconds / 4))
            case _:
                return _TICK

    async def _time_left(self, left: float) -> float:
        if left > 0:
            return min(left, _TICK)
        self._lose()
        headers, body = self._render(408, "the request did not come in time")
        with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_SECONDS):
            try:
                await self.wire.send(error_head(408, headers, body) + body)
                await self.wire.aclose()
            except WireBroken:
                pass
        return 0

    def _may_listen(self) -> bool:
        ahead = sum(map(len, self._ahead))
        return not self._eof and not self._lost and ahead < self._limits.header_bytes

    async def _listen(self, seconds: float) -> float:
        """Read while the handler works, at most `seconds`; returns until when to look again."""
        if not self._may_listen():
            return seconds
        with trio.CancelScope(deadline=trio.current_time() + seconds) as self._listening:
            while self._may_listen() and self._state is _State.WORK:
                await self._receive_ahead()
        self._listening = None
        if self._released is not None:
            self._released.set()
            self._released = None
        return _TICK
