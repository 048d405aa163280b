"""Two wires joined in memory, with faults on demand.

    ours, theirs = memory_wire_pair()

What one end sends the other receives, in order, with whatever chunk boundaries the sender used
(a receive never joins two sends when `whole` is set). `capacity` bounds the bytes that wait to be
received, so that a sender feels backpressure.

Faults are asked of the end whose *outgoing* direction they concern:

    theirs.cut()                        # ours reads EOF after what it has
    theirs.reset()                      # ours reads RESET after what it has; sends on both ends fail
    theirs.stall()                      # theirs.send waits until theirs.resume()
    ours.fail_next_send()               # the next send raises RESET, taken=False: nothing left
    ours.fail_next_send(after=5)        # five bytes leave first: taken=True
    theirs.fault_after(10, Fault.EOF)   # ten more bytes leave, then the fault; the rest is lost
    theirs.break_input(Break.CERTIFICATE_ALERT)  # ours reads that after what it has

Bytes for an end that has closed are swallowed; a real one answers with a reset, which `reset` is for.
`ours.sends` lists what each `send` call was given. `theirs.drain()` takes what has arrived without
waiting.
"""

from __future__ import annotations

import enum
from collections import deque

import trio

from sidecar.core.types import Break
from sidecar.wire.sockets import CHUNK, WireBroken


class Fault(enum.Enum):
    EOF = enum.auto()
    RESET = enum.auto()
    SILENCE = enum.auto()
    """Bytes are swallowed for ever, and no end is seen."""


class _Pipe:
    """One direction."""

    def __init__(self, capacity: int | None, whole: bool) -> None:
        self.capacity = capacity
        self.whole = whole
        self.chunks: deque[bytes] = deque()
        self.size = 0
        self.eof = False
        self.broken: WireBroken | None = None
        self.changed = trio.lowlevel.ParkingLot()

    def put(self, data: bytes) -> None:
        if data and not self.eof and self.broken is None:
            self.chunks.append(data)
            self.size += len(data)
            self.changed.unpark_all()

    def room(self) -> int:
        if self.capacity is None or self.eof or self.broken is not None:
            return CHUNK * 1024
        return self.capacity - self.size

    def take(self) -> bytes:
        if self.whole:
            data = self.chunks.popleft()
            if len(data) > CHUNK:
                self.chunks.appendleft(data[CHUNK:])
                data = data[:CHUNK]
        else:
            joined = b"".join(self.chunks)
            self.chunks.clear()
            data, rest = joined[:CHUNK], joined[CHUNK:]
            if rest:
                self.chunks.append(rest)
        self.size -= len(data)
        self.changed.unpark_all()
        return data

    def end(self, broken: WireBroken | None = None) -> None:
        if broken is None:
            self.eof = True
        elif self.broken is None:
            self.broken = broken
        self.changed.unpark_all()


class MemoryWire:
    """One end; satisfies `sidecar.wire.sockets.Wire`."""

    def __init__(self, outgoing: _Pipe, incoming: _Pipe, peer: str) -> None:
        self.peer = peer
        self.sends: list[bytes] = []
        self.closed = False
        """aclose() or abort() was called on this end."""
        self.aborted = False
        self._out = outgoing
        self._in = incoming
        self._stalled = False
        self._next_failure: tuple[Break, int] | None = None
        self._fault: tuple[int, Fault] | None = None
        self._send_broken: WireBroken | None = None
        self._sending = False
        self._receiving = False

    # --- Wire ---------------------------------------------------------------------------------

    async def send(self, data: bytes | memoryview) -> None:
        assert not self._sending, "two tasks send on one wire"
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            data = bytes(data)
            self.sends.append(data)
            await self._send(data)
        finally:
            self._sending = False

    async def receive(self) -> bytes:
        assert not self._receiving, "two tasks receive on one wire"
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while (data := self.receive_nowait()) is None:
                await self._in.changed.park()
            return data
        finally:
            self._receiving = False

    def receive_nowait(self) -> bytes | None:
        """What `receive` would return or raise at once; None when it would wait."""
        if self.closed:
            raise WireBroken(Break.LOCAL, detail="closed here")
        if self._in.chunks:
            return self._in.take()
        if self._in.broken is not None:
            raise self._in.broken
        return b"" if self._in.eof else None

    def has_input(self) -> bool:
        pipe = self._in
        return bool(self.closed or pipe.chunks or pipe.eof or pipe.broken is not None)

    async def aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self.aborted = True
        self._close()

    # --- faults -------------------------------------------------------------------------------

    def cut(self) -> None:
        """The other end reads EOF after what it has; what this end sends from now on is lost."""
        self._out.end()

    def reset(self) -> None:
        """The connection is reset: both ends read what they have, then RESET; no send works."""
        self.break_input(Break.RESET)
        self._in.end(WireBroken(Break.RESET, detail="reset by test"))

    def break_input(self, cause: Break) -> None:
        """The other end reads what it has, then WireBroken(cause); RESET ends its sends too."""
        self._out.end(WireBroken(cause, detail="broken by test"))

    def stall(self) -> None:
        """`send` on this end waits until `resume`."""
        self._stalled = True

    def resume(self) -> None:
        self._stalled = False
        self._out.changed.unpark_all()

    def fail_next_send(self, cause: Break = Break.RESET, *, after: int = 0) -> None:
        """The next `send` raises when `after` of its bytes have left; later ones raise at once."""
        self._next_failure = (cause, after)

    def fault_after(self, count: int, fault: Fault) -> None:
        """When this end has sent `count` more bytes the fault happens, in the middle of a send."""
        self._fault = (count, fault)
        if count == 0:
            self._happen(fault)

    def drain(self) -> bytes:
        """All that has arrived here, without waiting and without an end."""
        data = b"".join(self._in.chunks)
        self._in.chunks.clear()
        self._in.size = 0
        self._in.changed.unpark_all()
        return data

    # --- inside -------------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        self._check(taken=False)
        failure, self._next_failure = self._next_failure, None
        if failure is not None:
            cause, after = failure
            self._deliver(data[:after])
            self._send_broken = WireBroken(cause, taken=False, detail="send failed by test")
            raise WireBroken(cause, taken=after > 0, detail="send failed by test")
        offset = 0
        while offset < len(data):
            room = 0 if self._stalled else self._out.room()
            if room <= 0:
                await self._out.changed.park()
            else:
                self._deliver(data[offset : offset + room])
                offset += room
            if offset < len(data):
                self._check(taken=offset > 0)

    def _check(self, *, taken: bool) -> None:
        if self.closed:
            raise WireBroken(Break.LOCAL, taken=taken, detail="closed here")
        if self._send_broken is not None:
            raise WireBroken(self._send_broken.cause, taken=taken, detail="earlier send failed")
        for pipe in (self._in, self._out):
            if pipe.broken is not None and pipe.broken.cause is Break.RESET:
                raise WireBroken(Break.RESET, taken=taken, detail="reset by test")

    def _deliver(self, data: bytes) -> None:
        if self._fault is None:
            self._out.put(data)
            return
        count, fault = self._fault
        self._out.put(data[:count])
        self._fault = (max(0, count - len(data)), fault)
        if count and len(data) >= count:
            self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        if fault is Fault.EOF:
            self.cut()
        elif fault is Fault.RESET:
            self.reset()

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self._out.end()
            self._in.capacity = None
            self._in.changed.unpark_all()
            self._out.changed.unpark_all()


def memory_wire_pair(
    *, capacity: int | None = None, whole: bool = False
) -> tuple[MemoryWire, MemoryWire]:
    """Two joined ends.

    `capacity`: bytes that may wait in each direction before a `send` waits (None: any number).
    `whole`: a `receive` returns what one `send` gave, never two joined.
    """
    forth, back = _Pipe(capacity, whole), _Pipe(capacity, whole)
    return MemoryWire(forth, back, "memory:1"), MemoryWire(back, forth, "memory:2")
