"""An HTTP/2 connection of a local application: each request is handled in a task of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break
from sidecar.wire.h2_engine import H2Engine
from sidecar.wire.http2_engine import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INTERNAL_ERROR,
    MAX_STREAM_ID,
    NO_ERROR,
    REFUSED_STREAM,
    Data,
    Failed,
    GoAway,
    Head,
    Interim,
    PeerSettings,
    PingAck,
    RateLimit,
    Reset,
    Trailers,
    Window,
)
from sidecar.wire.http2_link import OUTPUT_BYTES, Flow, Link, Lost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.core.types import Headers
    from sidecar.wire.http2_engine import Event
    from sidecar.wire.sockets import Wire

PREFACE_SECONDS: Final = 10.0
"""For the client's preface and SETTINGS."""

HEADER_SECONDS: Final = 10.0
"""For a header block, from its first frame to its last."""

DRAIN_PING_SECONDS: Final = 1.0
_PING_GAP_SECONDS: Final = 1.0
_KEEPALIVE: Final = b"a2aalive"
_DRAIN: Final = b"a2adrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """Limits of one connection."""

    max_streams: int
    """Announced, and counted by handlers that have not ended."""
    header_bytes: int = 65536
    stall_seconds: float = 120.0
    """A client that takes no byte for so long, with data waiting, is given up."""
    idle_seconds: float = 300.0
    """A connection without a request is left after this time, or up to twice as long."""


class StreamGone(Exception):
    """The stream is over before its time; `code` is the RST_STREAM's, None when the connection died.

    `stalled`: the client took no bytes for too long.
    """

    def __init__(self, code: int | None, detail: str, *, stalled: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.stalled = stalled


class ServerStream(Flow):
    """One request, and the means to answer it. All methods raise StreamGone once it is over."""

    __slots__ = ("_connection", "_why", "gone", "headers", "replied")

    def __init__(self, connection: Http2ServerConnection, event: Head) -> None:
        super().__init__(connection)
        self.id = event.stream_id
        self.ended = event.end
        self.headers: Headers = event.headers
        """Pseudo headers first, all as they came."""
        self.gone = trio.Event()
        """The client reset the stream, the connection died, or `reset` was called."""
        self.replied = False
        """The reply is complete."""
        self._connection = connection
        self._why: StreamGone | None = None

    async def send_headers(self, headers: Headers) -> None:
        """Send the reply's headers, ``:status`` first."""
        await self._connection.send_headers(self, headers, end=False)

    async def send_data(self, data: bytes) -> None:
        """Send bytes of the reply's body; waits until the windows took them.

        After `stall_seconds` without progress the stream is reset.
        """
        await self._connection.send_data(self, data)

    async def send_trailers(self, headers: Headers) -> None:
        """End the reply with these trailers; with ``:status`` first if nothing was sent before."""
        await self._connection.send_headers(self, headers, end=True)

    def keep_alive(self) -> None:
        """Show the client that the connection lives, by a PING; streams share them."""
        self._connection.keep_alive()

    def reset(self, code: int = CANCEL) -> None:
        """Break the stream off."""
        self._connection.reset(self, code)

    def check(self) -> None:
        """Raise StreamGone if it is over."""
        if self._why is not None:
            raise self._why

    def end_early(self, why: StreamGone) -> None:
        """It is over: wake all that wait on it."""
        if self._why is None:
            self._why = why
            self.gone.set()
            self.drain()
            self.notify()


class Http2ServerConnection(Link):
    """One connection, server side."""

    _nursery: trio.Nursery

    def __init__(
        self,
        wire: Wire,
        handler: Callable[[ServerStream], Awaitable[None]],
        *,
        limits: Http2Limits,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`handler` answers one request; what it raises resets the stream and goes to `on_bug`."""
        engine = H2Engine(
            client=False, header_bytes=limits.header_bytes, max_streams=limits.max_streams
        )
        super().__init__(wire, engine, stall_seconds=limits.stall_seconds, on_bug=on_bug)
        self._handler = handler
        self._limits = limits
        self._streams: dict[int, ServerStream] = {}
        """Those whose handlers have not ended, whatever the client did."""
        self._refused = RateLimit(200, 10.0)
        self._pinged_at = -math.inf
        self._greeted = False
        self._in_block = False
        self.idle_since = trio.current_time()
        """When the last request ended, or the connection began."""
        self._draining = trio.Event()
        self._drain_answered = trio.Event()
        self._refusing = False

    @property
    def streams(self) -> int:
        """Requests whose handlers have not ended."""
        return len(self._streams)

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._streams and not self._refusing

    async def serve(self, initial: bytes = b"") -> None:
        """Carry the connection to its end, and then all handlers to theirs.

        `initial` was read already. Handlers are not cancelled when the client leaves: each learns
        it from its stream.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            drainer = trio.CancelScope()
            nursery.start_soon(self._drain, drainer)
            self._limit_reading()
            await self.run(initial)
            drainer.cancel()

    def drain(self) -> None:
        """Leave gracefully: new streams for one more round trip, then none; close after the last."""
        self._draining.set()

    async def _drain(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._until_draining()
            self._engine.send_goaway(MAX_STREAM_ID, NO_ERROR)
            self._engine.send_ping(_DRAIN)
            self.wake()
            with trio.CancelScope(deadline=trio.current_time() + DRAIN_PING_SECONDS):
                await self._drain_answered.wait()
            self._refusing = True
            self._engine.send_goaway(self._engine.last_peer_stream, NO_ERROR)
            self.wake()
            self._close_if_drained()

    async def _until_draining(self) -> None:
        """Until `drain` is called, or there was no request for too long."""
        while not self._draining.is_set():
            now = trio.current_time()
            since = now if self._streams else self.idle_since
            if now - since >= self._limits.idle_seconds:
                return
            with trio.CancelScope(deadline=since + self._limits.idle_seconds):
                await self._draining.wait()

    def leave(self) -> None:
        """End the connection now. No request may be under way on it."""
        self._refusing = True
        self._engine.send_goaway(self._engine.last_peer_stream, NO_ERROR)
        self.close()

    def _close_if_drained(self) -> None:
        if self._refusing and not self._streams:
            self.close()

    # --- for the streams ----------------------------------------------------------------------

    async def send_headers(self, stream: ServerStream, headers: Headers, *, end: bool) -> None:
        """Queue a header block of a reply."""
        await self._settle(stream)
        await self.space()
        stream.check()
        self._engine.write_headers(stream.id, headers, end=end)
        stream.replied = end
        self.wake()

    async def send_data(self, stream: ServerStream, data: bytes) -> None:
        """Queue a piece of a reply's body, at once if the windows allow it."""
        await self._settle(stream)
        engine = self._engine
        if len(data) <= engine.room(stream.id) and engine.pending < OUTPUT_BYTES:
            if data:
                engine.write_data(stream.id, data, end=False)
                self.wake()
            return
        stream.outgoing = memoryview(data)
        self.enqueue(stream)
        await self._settle(stream)

    async def _settle(self, stream: ServerStream) -> None:
        """Wait until the writer has taken `stream.outgoing`, also what a cancelled call left."""
        while stream.outgoing:
            deadline = stream.moved_at + self._limits.stall_seconds
            with trio.CancelScope(deadline=deadline) as scope:
                await stream.drained()
            if scope.cancelled_caught and stream.moved_at + self._limits.stall_seconds <= deadline:
                self._reset(stream, CANCEL, "the client takes no bytes", stalled=True)
        stream.check()

    def keep_alive(self) -> None:
        """Queue a PING, at most one a second."""
        now = trio.current_time()
        if now - self._pinged_at >= _PING_GAP_SECONDS:
            self._pinged_at = now
            self._engine.send_ping(_KEEPALIVE)
            self.wake()

    def reset(self, stream: ServerStream, code: int) -> None:
        """Break a stream off."""
        self._reset(stream, code, "reset here")

    def _reset(
        self, stream: ServerStream, code: int, detail: str, *, stalled: bool = False
    ) -> None:
        self.give_up(stream)
        self._engine.cancel(stream.id, code)
        stream.end_early(StreamGone(code, detail, stalled=stalled))
        self.wake()

    # --- events -------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> int:
        count = super()._feed(data)
        if self._engine.in_header_block is not self._in_block:
            self._in_block = not self._in_block
            self._limit_reading()
        return count

    def _limit_reading(self) -> None:
        """What the client owes us has to come in time: its preface, the rest of a header block."""
        now = trio.current_time()
        if not self._greeted:
            self._read_scope.deadline = now + PREFACE_SECONDS
        elif not self._last_words:
            self._read_scope.deadline = now + HEADER_SECONDS if self._in_block else math.inf

    def _handle(self, event: Event) -> None:
        match event:
            case Head():
                self._admit(event)
            case Data(stream_id, data, end):
                stream = self._streams.get(stream_id)
                if stream is not None:
                    stream.ended = end
                    stream.put(data)
                    if end:
                        stream.notify()
            case Trailers(stream_id, _):
                stream = self._streams.get(stream_id)
                if stream is not None:
                    stream.ended = True
                    stream.notify()
            case Reset(stream_id, code, _, detail):
                stream = self._streams.get(stream_id)
                if stream is not None:
                    self.give_up(stream)
                    stream.end_early(StreamGone(code, detail or "reset by the client"))
            case PeerSettings():
                self._greeted = True
                self._limit_reading()
            case PingAck(payload):
                if payload == _DRAIN:
                    self._drain_answered.set()
            case Failed() | Window() | GoAway() | Interim():
                pass  # the link's business; a client that goes away closes by itself

    def _admit(self, event: Head) -> None:
        if self._refusing or len(self._streams) >= self._limits.max_streams:
            # no handler has seen it, so the client may send it again elsewhere
            self._engine.cancel(event.stream_id, REFUSED_STREAM)
            if not self._refused.hit(trio.current_time()):
                self._engine.send_goaway(self._engine.last_peer_stream, ENHANCE_YOUR_CALM)
                self.close()
            return
        stream = ServerStream(self, event)
        self._streams[event.stream_id] = stream
        self._nursery.start_soon(self._answer, stream)

    async def _answer(self, stream: ServerStream) -> None:
        try:
            await self._handler(stream)
            if not stream.replied:
                stream.check()
                raise RuntimeError("a handler ended without a complete reply")
            if not stream.ended:
                self.reset(stream, NO_ERROR)  # the rest of the request is of no use
        except StreamGone:
            pass
        except Exception as error:
            if not _is_gone(error):
                self.bug(error)
            self.reset(stream, INTERNAL_ERROR)
        finally:
            del self._streams[stream.id]
            self.idle_since = trio.current_time()
            self._close_if_drained()

    def _deaf(self) -> None:
        assert self._fault is not None
        self._ended(self._fault)

    def _ended(self, lost: Lost) -> None:
        for stream in self._streams.values():
            self.give_up(stream)
            stalled = lost.cause is Break.TIMEOUT
            stream.end_early(StreamGone(None, lost.detail, stalled=stalled))


def _is_gone(error: Exception) -> bool:
    """Whether tasks of a handler ended with nothing but StreamGone."""
    return isinstance(error, ExceptionGroup) and error.split(StreamGone)[1] is None
