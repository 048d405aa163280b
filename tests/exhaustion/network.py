"""The network between a connection under test and a scripted peer, cut at one chosen byte.

`ScriptedWire` is our end. What it sends is handed to the peer in the same step, so a cell needs no
tasks but those under test. It behaves like a socket: a small send is taken whole by the kernel even
when the peer is gone, and one that the kernel keeps refusing fails after `KERNEL_SECONDS`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break
from sidecar.wire.sockets import CHUNK, WireBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.exhaustion.peer import Ledger, Peer, Started

KERNEL_SECONDS: Final = 120.0
"""TCP_USER_TIMEOUT: bytes that the other side does not take end the connection."""

GARBAGE: Final = b"\1\0\0\0" + b"\xff\0" * 1024
"""More than any message still lacks, text in no encoding, and no length above a limit."""


class Way(enum.Enum):
    """Which direction's bytes are counted."""

    REQUEST = "request"
    REPLY = "reply"


class Fault(enum.Enum):
    """What happens at the cut.

    Cut in the request, the peer has got no byte more and does nothing more. Cut in the reply, the
    peer still reads, and acts, but no byte of it arrives any more; after a reset it is gone.
    """

    CLOSE = "close"
    RST = "rst"
    RST_ON_SEND = "rst on send"
    """The send that crosses the cut is the one that fails. Request only."""
    SILENCE = "silence"
    BLOCK = "block"
    """As SILENCE, and the kernel takes no more bytes either. Request only."""
    GARBAGE = "garbage"
    GOAWAY = "goaway"
    """Requests that are not complete are refused, the others are seen to. HTTP/2 only."""
    GOAWAY_HASTY = "hasty goaway"
    """As GOAWAY, but a request whose head has come is not refused."""
    GOAWAY_CLOSE = "goaway, close"
    LEAVE = "caller leaves"
    """The bytes wait until the caller has gone, then flow on."""
    DEADLINE = "deadline"
    """The bytes wait until the caller's deadline has passed, then flow on."""


GOAWAYS: Final = frozenset({Fault.GOAWAY, Fault.GOAWAY_HASTY, Fault.GOAWAY_CLOSE})
WAITING: Final = frozenset({Fault.LEAVE, Fault.DEADLINE})


@dataclass(slots=True)
class Sent:
    """One `send`: which bytes it was about, and whether the kernel may have any of them."""

    start: int
    stop: int
    taken: bool = True


class ScriptedWire:
    """Satisfies `sidecar.wire.sockets.RawWire`."""

    def __init__(self, peer: Peer, ledger: Ledger, *, port: int) -> None:
        self.peer = f"memory:{port}"
        self.port = port
        self.sends: list[Sent] = []
        self.offered = 0
        """Bytes given to `send`."""
        self.taken = 0
        """Bytes that the peer has got."""
        self.said = 0
        """Bytes that the peer has sent."""
        self.passed = 0
        """Of these, how many can be received here."""
        self.request_log = bytearray()
        """What the peer has got."""
        self.reply_log = bytearray()
        """What it has sent."""
        self.closed = False
        self.offered_log = bytearray()
        self.head_sent_from: int | None = None
        """Where the `send` began that completed the head of the last request."""
        self.requests: list[Started] = []
        """Of which the peer has seen the head."""
        self.reply_end: int | None = None
        """Where in what the peer sends the last reply ends; None: it was not asked."""
        self._peer = peer
        self._ledger = ledger
        self._cut: tuple[Way, int, Fault] | None = None
        self._happened: Callable[[], None] | None = None
        self._deaf = False
        """The peer gets no more; what is sent disappears."""
        self._blocked = False
        self._mute = False
        """What the peer says disappears."""
        self._holding = False
        self._held = bytearray()
        self._inbox = bytearray()
        self._eof = False
        self._broken = False
        self._moved = trio.Event()

    def open(self) -> None:
        """The connection is made."""
        self._say(self._peer.greet())

    # --- the script ---------------------------------------------------------------------------

    def cut(
        self, way: Way, offset: int, fault: Fault, happened: Callable[[], None] | None = None
    ) -> None:
        """`fault` happens when `offset` bytes of that direction have passed, perhaps now."""
        assert offset >= (self.taken if way is Way.REQUEST else self.passed)
        self._cut = (way, offset, fault)
        self._happened = happened
        if fault is not Fault.RST_ON_SEND and self._room(way) == 0:
            self._happen()

    def resume(self) -> None:
        """What waits flows on."""
        self._blocked = self._holding = False
        held, self._held = bytes(self._held), bytearray()
        self._pass(held)
        self._wake()

    def reset(self) -> None:
        """The connection turns out to be gone."""
        self._broken = self._deaf = True
        self._wake()

    def _room(self, way: Way) -> float:
        """Bytes that may pass before the cut."""
        if self._cut is None or self._cut[0] is not way:
            return math.inf
        return self._cut[1] - (self.taken if way is Way.REQUEST else self.passed)

    def _happen(self) -> None:
        assert self._cut is not None
        way, _, fault = self._cut
        self._cut = None
        if self._happened is not None:
            self._happened()
        ends = fault in {Fault.CLOSE, Fault.SILENCE, Fault.GARBAGE}
        self._deaf = self._deaf or (ends and way is Way.REQUEST)
        self._mute = self._mute or ends
        match fault:
            case Fault.CLOSE:
                self._eof = True
            case Fault.RST | Fault.RST_ON_SEND:
                self._broken = self._deaf = self._mute = True
            case Fault.BLOCK:
                self._blocked = True
            case Fault.GARBAGE:
                self._inbox += GARBAGE
            case Fault.GOAWAY | Fault.GOAWAY_HASTY | Fault.GOAWAY_CLOSE:
                self._inbox += self._peer.goaway(hasty=fault is Fault.GOAWAY_HASTY)
                if fault is Fault.GOAWAY_CLOSE:
                    self._eof = self._deaf = self._mute = True
            case Fault.SILENCE:
                pass
            case Fault.LEAVE | Fault.DEADLINE:
                self._blocked = way is Way.REQUEST
                self._holding = way is Way.REPLY
        self._wake()

    # --- bytes on their way -------------------------------------------------------------------

    def _give(self, data: bytes) -> int:
        """Bytes for the peer; how many the network took."""
        if self._blocked:
            return 0
        if self._deaf:
            return len(data)
        room = self._room(Way.REQUEST)
        lazy = self._cut is not None and self._cut[2] is Fault.RST_ON_SEND
        if room > len(data) or (lazy and room == len(data)):
            self._deliver(data)
            return len(data)
        count = int(room)
        self._deliver(data[:count])
        self._happen()
        return count if lazy else count + self._give(data[count:])

    def _deliver(self, data: bytes) -> None:
        self.taken += len(data)
        self.request_log += data
        ledger = self._ledger
        heads, executions = len(ledger.requests), ledger.executions
        said = self._peer.receive(data)
        if len(ledger.requests) > heads:
            self.head_sent_from = self.sends[-1].start
            self.requests += ledger.requests[heads:]
        if ledger.executions > executions:
            self.reply_end = self.said + len(said)
        self._say(said)

    def _say(self, data: bytes) -> None:
        self.said += len(data)
        self.reply_log += data
        self._pass(data)

    def _pass(self, data: bytes) -> None:
        """Bytes of the peer for our side."""
        if self._holding:
            self._held += data
        elif not self._mute:
            room = self._room(Way.REPLY)
            count = len(data) if room > len(data) else int(room)
            self._inbox += data[:count]
            self.passed += count
            self._wake()
            if room <= len(data):
                self._happen()
                self._pass(data[count:])

    def _wake(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    # --- Wire ---------------------------------------------------------------------------------

    async def send(self, data: bytes | memoryview) -> None:
        data = bytes(data)
        if self.closed:
            raise WireBroken(Break.LOCAL, taken=False, detail="closed here")
        sent = Sent(self.offered, self.offered + len(data))
        self.sends.append(sent)
        self.offered_log += data
        count = 0
        if self._broken or (count := self._give(data)) < len(data):
            await self._finish(data, count, sent)
        self.offered = sent.stop

    async def _finish(self, data: bytes, count: int, sent: Sent) -> None:
        """The kernel did not take all of `data` at once."""
        try:
            with trio.CancelScope(deadline=trio.current_time() + KERNEL_SECONDS) as patience:
                while count < len(data) and not self._is_over():
                    await self._moved.wait()
                    if not self._is_over():
                        count += self._give(data[count:])
        except trio.Cancelled:
            self.offered = sent.stop
            raise
        if patience.cancelled_caught:
            self.reset()
        if self._is_over():
            sent.taken = count > 0
            if not sent.taken:
                sent.stop = sent.start
                del self.offered_log[sent.start :]
            self.offered = sent.stop
            cause = Break.LOCAL if self.closed else Break.RESET
            raise WireBroken(cause, taken=sent.taken, detail="scripted")

    def _is_over(self) -> bool:
        return self._broken or self.closed

    async def receive(self) -> bytes:
        while (data := self.receive_nowait()) is None:
            await self._moved.wait()
        return data

    def receive_nowait(self) -> bytes | None:
        if self.closed:
            raise WireBroken(Break.LOCAL, detail="closed here")
        if self._inbox:
            data = bytes(self._inbox[:CHUNK])
            del self._inbox[:CHUNK]
            return data
        if self._broken:
            raise WireBroken(Break.RESET, detail="scripted")
        return b"" if self._eof else None

    def has_input(self) -> bool:
        return bool(self.closed or self._inbox or self._eof or self._broken)

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.closed = True
        self._wake()
