"""HTTP/1.1 as a server: one loop per connection, over any wire.

A connection costs two tasks: the main one here, which reads a request, runs its handler and reads
the next, and the watch beside it (`http1_watch`).
"""

from __future__ import annotations

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
from sidecar.wire.http1_watch import Connections, State, Watch
from sidecar.wire.net import WireBroken
from sidecar.wire.tls import is_tls

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

_GOODBYE_SECONDS: Final = 1.0
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


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
        self._wire = wire
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
        self._watch = Watch(self, limits=limits, connections=connections)

    async def run(self) -> None:
        """Serve requests until one side has had enough."""
        self._connections.count += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_watch)
                await self._serve()
                nursery.cancel_scope.cancel()
        finally:
            self._connections.count -= 1
            self._connections.idle.pop(self._watch, None)

    async def close(self, half_close: Callable[[], None] | None) -> None:
        """Close so that the last answer arrives: unread input would turn it into a reset."""
        if self._cut or self._lost:
            return
        if self._linger and not self._eof:
            with trio.CancelScope(deadline=trio.current_time() + self._limits.linger_seconds):
                try:
                    if half_close is not None:
                        half_close()
                    while await self._wire.receive():
                        await trio.lowlevel.checkpoint()
                except (WireBroken, OSError):
                    return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
            await self._wire.aclose()

    # --- for the request ----------------------------------------------------------------------

    async def send(self, data: bytes | memoryview) -> None:
        """See `Link.send`."""
        if self._cut or self._lost:
            raise self._gone("the connection is broken")
        watch = self._watch
        watch.serial += 1
        watch.sending = self._cut = True
        try:
            await self._wire.send(data)
        except WireBroken as error:
            self._lose()
            raise self._gone(str(error)) from None
        finally:
            watch.sending = False
        self._cut = False

    async def read_body(
        self, request: Http1Request, limit: int, taken: Callable[[int], None] | None
    ) -> bytes:
        """See `Link.read_body`."""
        self._watch.step(State.BODY)
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
                if taken is not None:
                    taken(len(body))
                pieces.append(body)
                self._watch.serial += 1
        finally:
            self._watch.step(State.UNREAD if request.left else State.WORK)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def look(self) -> None:
        """See `Link.look`."""
        if self._watch.state is State.WORK and not self._watch.listening:
            while self.may_listen() and self._wire.has_input():
                await self.receive_ahead()

    def watch_now(self) -> None:
        """See `Link.watch_now`."""
        self._watch.listen_now()

    def persistence(self, request: Http1Request) -> str:
        """See `Link.persistence`."""
        if request.left > 0 and self._ahead and len(self._ahead[0]) >= request.left:
            # a small body nobody wanted has come already: it need not cost the connection
            self._part_of_body(request, self._take_ahead())
        if request.left:
            self._linger = True
        over = self._eof and not self._ahead
        if request.left or over or self._connections.closing:
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
            self._watch.step(State.IDLE)
            self._connections.idle[self._watch] = None
            data = await self._receive()
            self._connections.idle.pop(self._watch, None)
            if not data:
                return b""
        else:
            data = self._take_ahead()
        if is_tls(data):
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
        self._watch.step(State.HEAD)
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
        if self._eof:
            request.half_closed.set()
        self._watch.step(State.UNREAD if request.left else State.WORK)
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
            if not request.ended:
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
            if self._watch.listening:
                await self._watch.release()
            else:
                await self.receive_ahead()

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

    # --- for the watch ------------------------------------------------------------------------

    def may_listen(self) -> bool:
        """See `Watched.may_listen`."""
        ahead = sum(map(len, self._ahead))
        return not self._eof and not self._lost and ahead < self._limits.header_bytes

    async def receive_ahead(self) -> None:
        """See `Watched.receive_ahead`."""
        try:
            data = await self._wire.receive()
        except WireBroken:
            self._lose()
            return
        if data:
            self._ahead.append(data)
            return
        self._eof = True
        if self._request is not None:
            self._request.half_closed.set()

    async def time_out(self) -> None:
        """See `Watched.time_out`."""
        # first of all, so that no handler begins with what might still come
        self._lose()
        headers, body = self._render(408, "the request did not come in time")
        with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_SECONDS):
            try:
                await self._wire.send(error_head(408, headers, body) + body)
                await self._wire.aclose()
            except WireBroken:
                pass

    def stalled(self) -> None:
        """See `Watched.stalled`."""
        self._stalled = True

    def abort(self) -> None:
        """See `Watched.abort`."""
        self._wire.abort()

    async def _run_watch(self) -> None:
        try:
            await self._watch.run()
        except Exception as error:
            self._on_bug("http1 watch", error)
            self.abort()
