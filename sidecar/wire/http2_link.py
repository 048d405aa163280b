"""What both ends of an HTTP/2 connection share: one reader, one writer, streams that take turns.

Only the writer touches the sending side of the wire. Everybody else queues frames in the engine, or
bytes on a stream, and wakes the writer, which then runs once for all that was queued in the same
step. So a cancelled task never owns half a frame.
"""

# ruff: noqa: B027 - what a role may leave out is no abstract method
from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from sidecar.core.types import Break
from sidecar.wire.http2_engine import INTERNAL_ERROR, Failed, PeerSettings, Window
from sidecar.wire.sockets import WireBroken, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.wire.http2_engine import Engine, Event
    from sidecar.wire.sockets import Wire

OUTPUT_BYTES: Final = 65536
"""Output is gathered up to here for one send; senders wait while more is queued."""

FLUSH_SECONDS: Final = 1.0
"""For last words: ours after the peer's error, the peer's after a failed send of ours."""

_NOTHING: Final = memoryview(b"")
_MANY_EVENTS: Final = 256


class Lost(NamedTuple):
    """Why a connection is over."""

    cause: Break
    detail: str


def _lost(error: WireBroken) -> Lost:
    # TLS is not passed on: the handshake was long over, and requests may have been taken since
    return Lost(Break.RESET if error.cause is Break.TLS else error.cause, error.detail)


class Flow(ABC):
    """The two directions of one stream."""

    __slots__ = (
        "_drained",
        "_input",
        "_link",
        "_readable",
        "end",
        "ended",
        "id",
        "in_turn",
        "moved_at",
        "outgoing",
    )

    def __init__(self, link: Link) -> None:
        self._link = link
        self.id = 0
        self.outgoing = _NOTHING
        """Bytes of our body that are not in the engine yet."""
        self.end = False
        """Our side ends with the last of them."""
        self.in_turn = False
        """Among those that the writer serves in turn."""
        self.moved_at = 0.0
        """When `outgoing` was set or last became shorter."""
        self.ended = False
        """The peer's side has ended."""
        self._input: list[bytes] = []
        self._readable: trio.Event | None = None
        self._drained: trio.Event | None = None

    def put(self, data: bytes) -> None:
        """Bytes came in."""
        if data:
            self._input.append(data)
            self.notify()

    def take(self) -> bytes:
        """All that came in since the last time, b'' when nothing did."""
        chunks = self._input
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._input = []
        return data

    @abstractmethod
    def check(self) -> None:
        """Raise if it is over before its time."""

    async def receive(self) -> bytes:
        """The next bytes of the peer's body, b'' at its end; raises as `check` does."""
        while True:
            if data := self.take():
                self._link.credit(self, len(data))
                return data
            if self.ended:
                return b""
            self.check()
            await self.changed()

    def notify(self) -> None:
        """Something changed for the one that waits for input."""
        if self._readable is not None:
            self._readable.set()
            self._readable = None

    async def changed(self) -> None:
        """Wait for `notify`."""
        if self._readable is None:
            self._readable = trio.Event()
        await self._readable.wait()

    def drain(self) -> None:
        """All of `outgoing` is in the engine, or is given up."""
        self.outgoing = _NOTHING
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    async def drained(self) -> None:
        """Wait for `drain`."""
        if self._drained is None:
            self._drained = trio.Event()
        await self._drained.wait()


class Link(ABC):
    """One connection; the roles derive from it."""

    def __init__(
        self,
        wire: Wire,
        engine: Engine,
        *,
        stall_seconds: float = math.inf,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`stall_seconds` bounds one send; `on_bug` hears of errors that are our own."""
        self.lost: Lost | None = None
        self._wire = wire
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._on_bug = on_bug
        self._turns: deque[Flow] = deque()
        self._blocked: dict[int, Flow] = {}
        """Flows whose own window is used up."""
        self._asleep: trio.Event | None = None
        self._space: trio.Event | None = None
        self._closing = False
        self._last_words = False
        """Nothing can be sent any more, the peer is listened to for a moment."""
        self._fault: Lost | None = None
        self._read_scope = trio.CancelScope()
        self._write_scope = trio.CancelScope()

    # --- for the roles ------------------------------------------------------------------------

    @abstractmethod
    def _handle(self, event: Event) -> None:
        """What the peer did; PeerSettings and Window have been seen to."""

    def _heard(self, now: float) -> None:
        """Bytes came in."""

    def _compose(self) -> None:
        """Queue what waits for the writer, just before it looks for output."""

    def _sending(self) -> None:
        """The next socket call carries all that was queued."""

    def _sent(self) -> None:
        """It did."""

    def _unsent(self) -> None:
        """It failed, and the kernel took none of it."""

    def _deaf(self) -> None:
        """No more can be sent; for a moment the peer is still listened to."""

    @abstractmethod
    def _ended(self, lost: Lost) -> None:
        """The connection is over: end what is left on it. May come twice."""

    # --- output -------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something for the writer."""
        if self._asleep is not None:
            self._asleep.set()
            self._asleep = None

    def close(self) -> None:
        """End the connection when all output is sent. No stream may be left."""
        self._closing = True
        self.wake()

    def abort(self, cause: Break, detail: str) -> None:
        """End the connection now; what is left on it breaks with `cause`."""
        if self._fault is None:
            self._fault = Lost(cause, detail)
        self._wire.abort()

    def bug(self, error: BaseException) -> None:
        """Report an error that is our own."""
        if self._on_bug is not None:
            self._on_bug(error)

    async def space(self) -> None:
        """Wait until less than `OUTPUT_BYTES` are queued."""
        while self._engine.pending >= OUTPUT_BYTES and self.lost is None:
            self.wake()
            if self._space is None:
                self._space = trio.Event()
            await self._space.wait()

    def credit(self, flow: Flow, count: int) -> None:
        """`count` bytes of the peer's body were taken."""
        if not flow.ended:
            self._engine.credit(flow.id, count)
            if self._engine.pending:
                self.wake()

    def enqueue(self, flow: Flow) -> None:
        """Let the writer send `flow.outgoing` as the windows allow."""
        flow.in_turn = True
        flow.moved_at = trio.current_time()
        self._turns.append(flow)
        self.wake()

    def give_up(self, flow: Flow) -> None:
        """Send no more of `flow.outgoing`."""
        if flow.in_turn:
            self._turns.remove(flow)
            flow.in_turn = False
        self._blocked.pop(flow.id, None)
        flow.drain()

    def _fill(self) -> None:
        """Move bodies into the engine, a frame from each stream in turn."""
        engine, turns = self._engine, self._turns
        while turns and engine.pending < OUTPUT_BYTES:
            flow = turns[0]
            size = len(flow.outgoing)
            count = min(size, engine.room(flow.id))
            if not count and size:
                if not engine.room(0):
                    return
                turns.popleft()
                flow.in_turn = False
                self._blocked[flow.id] = flow
                continue
            turns.popleft()
            engine.write_data(flow.id, flow.outgoing[:count], end=flow.end and count == size)
            if count < size:
                flow.outgoing = flow.outgoing[count:]
                flow.moved_at = trio.current_time()
                turns.append(flow)
            else:
                flow.in_turn = False
                flow.drain()
                self._finished(flow)

    def _finished(self, flow: Flow) -> None:
        """All of a flow's bytes are in the engine."""

    def _unblock(self, stream_id: int) -> None:
        flow = self._blocked.pop(stream_id, None)
        if flow is not None:
            flow.in_turn = True
            self._turns.append(flow)

    async def _write(self) -> None:
        with self._write_scope:
            try:
                while True:
                    self._compose()
                    self._fill()
                    data = self._engine.take_output()
                    if data:
                        self._sending()
                        await self._send(data)
                        self._sent()
                        if self._space is not None:
                            self._space.set()
                            self._space = None
                    elif self._closing:
                        break
                    else:
                        self._asleep = trio.Event()
                        await self._asleep.wait()
            except WireBroken as error:
                if not error.taken:
                    self._unsent()
                self._fault = self._fault or _lost(error)
                # the peer may have said why, or even answered: listen for a moment
                self._last_words = True
                self._read_scope.deadline = trio.current_time() + FLUSH_SECONDS
                self._deaf()
                return
            except Exception as error:
                self.bug(error)
                self._fault = Lost(Break.LOCAL, describe(error))
        self._read_scope.cancel()

    async def _send(self, data: bytes) -> None:
        if self._stall_seconds == math.inf:
            await self._wire.send(data)
            return
        with trio.CancelScope(deadline=trio.current_time() + self._stall_seconds) as scope:
            await self._wire.send(data)
        if scope.cancelled_caught:
            self._fault = Lost(Break.TIMEOUT, "the peer takes no bytes")
            self._read_scope.cancel()
            await trio.sleep_forever()  # until the reader has ended the connection

    # --- input --------------------------------------------------------------------------------

    async def _read(self, initial: bytes) -> Lost:
        """Read to the end of the connection, and say why it ended."""
        with self._read_scope:
            try:
                if initial:
                    self._feed(initial)
                while self._fault is None or self._last_words:
                    data = await self._wire.receive()
                    if not data:
                        return self._fault or Lost(Break.EOF, "closed by the peer")
                    if self._feed(data) > _MANY_EVENTS:
                        await trio.lowlevel.checkpoint()
            except WireBroken as error:
                if error.cause is not Break.LOCAL or self._fault is None:
                    return _lost(error)
            except Exception as error:
                self.bug(error)
                return Lost(Break.LOCAL, describe(error))
        return self._fault or Lost(Break.LOCAL, "closed here")

    def _feed(self, data: bytes) -> int:
        now = trio.current_time()
        self._heard(now)
        engine = self._engine
        events = engine.feed(data, now)
        for event in events:
            if isinstance(event, Window):
                self._unblock(event.stream_id)
                continue
            if isinstance(event, PeerSettings):
                for stream_id in list(self._blocked):
                    self._unblock(stream_id)
            elif isinstance(event, Failed):
                self._failed(event)
            self._handle(event)
        if engine.pending or self._turns:
            self.wake()
        return len(events)

    def _failed(self, event: Failed) -> None:
        cause = Break.NOT_HTTP2 if event.not_http2 else Break.MALFORMED
        self.lost = self._fault = Lost(cause, event.detail)
        self._ended(self.lost)
        if event.code == INTERNAL_ERROR:
            self.bug(RuntimeError(event.detail))

    # --- life ---------------------------------------------------------------------------------

    async def run(self, initial: bytes = b"") -> None:
        """Carry the connection from its first byte to its end; `initial` was read already."""
        lost = Lost(Break.LOCAL, "cancelled")
        try:
            self._engine.start()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                lost = await self._read(initial)
                if lost.cause is Break.MALFORMED:
                    self._drop_output()
                    self._closing = True
                    self._write_scope.deadline = trio.current_time() + FLUSH_SECONDS
                    self.wake()
                else:
                    self._write_scope.cancel()
        finally:
            self.lost = lost
            self._drop_output()
            self._ended(lost)
            if self._space is not None:
                self._space.set()
            deadline = trio.current_time() + FLUSH_SECONDS
            with trio.CancelScope(shield=True, deadline=deadline) as scope:
                await self._wire.aclose()
            if scope.cancelled_caught:
                self._wire.abort()

    def _drop_output(self) -> None:
        for flow in [*self._turns, *self._blocked.values()]:
            self.give_up(flow)
