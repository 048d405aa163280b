"""Looks after the HTTP/1.1 connections of a listener: deadlines, clients that leave, the drain.

Each connection has one `Watch`, which runs beside its main task and looks in a few times per second.
The main task pays for that with an attribute or two: timers and task switches of its own would cost
as much as parsing the request.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

import trio

if TYPE_CHECKING:
    from sidecar.wire.http1_request import Http1Limits

_TICK: Final = 0.2
"""Seconds between two looks at a connection that is in use."""

_LISTEN: Final = 5.0
"""The same while it reads for a handler: a thousand idle streams wake it 200 times per second."""

_CLOSING_SECONDS: Final = 1.0
"""How long idle connections stay in a drain, for requests that are on their way already."""


class State(Enum):
    """What the main task of a connection does."""

    IDLE = auto()
    """Nothing of the next request is there."""
    HEAD = auto()
    BODY = auto()
    """A handler waits for the body."""
    UNREAD = auto()
    """A handler runs, and there is a body that it has not read."""
    WORK = auto()
    """A handler runs; what the client sends now belongs to the next request."""


class Watched(Protocol):
    """What a watch needs of its connection."""

    def may_listen(self) -> bool:
        """Whether there is room for input, and may be some."""
        ...

    async def receive_ahead(self) -> None:
        """Keep what the next read from the wire brings."""
        ...

    async def time_out(self) -> None:
        """The client was too slow with its request: say so."""
        ...

    def stalled(self) -> None:
        """The client takes nothing of its answer."""
        ...

    def abort(self) -> None:
        """Close at once; the main task finds out."""
        ...


class Connections:
    """The HTTP/1.1 connections of one listener."""

    def __init__(self) -> None:
        self.closing = False
        self.close_idle_at = math.inf
        self.count = 0
        self.idle: dict[Watch, None] = {}
        """The longest idle one first."""

    def __len__(self) -> int:
        return self.count

    def begin_closing(self) -> None:
        """Drain: answers carry `Connection: close`, idle connections close after a second."""
        self.closing = True
        self.close_idle_at = trio.current_time() + _CLOSING_SECONDS
        for watch in self.idle:
            watch.nudge()

    def close_longest_idle(self) -> bool:
        """Make room for a new connection; False when every one is in use."""
        for watch in self.idle:
            del self.idle[watch]
            watch.connection.abort()
            return True
        return False


class Watch:
    """The watch of one connection. The main task keeps `state`, `serial` and `sending` true."""

    def __init__(
        self, connection: Watched, *, limits: Http1Limits, connections: Connections
    ) -> None:
        self.connection = connection
        self.state = State.IDLE
        self.serial = 0
        """Changes with every step; by it the watch sees that nothing has happened."""
        self.sending = False
        self._limits = limits
        self._connections = connections
        self._seen = -1
        self._since = 0.0
        """When it was first seen that `_seen` is the last step."""
        self._dozing = False
        """Sleeps longer than a tick."""
        self._urgent = False
        self._nudge = trio.Event()
        self._listening: trio.CancelScope | None = None
        """Set while the watch is in `receive_ahead`."""
        self._released: trio.Event | None = None

    # --- for the main task --------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        """Whether the watch is reading: then nobody else may."""
        return self._listening is not None

    def step(self, state: State) -> None:
        """The main task does something else now."""
        if self.state is State.IDLE and self._dozing:
            self._nudge.set()
        self.state = state
        self.serial += 1

    def nudge(self) -> None:
        """Look in now."""
        self._nudge.set()

    def listen_now(self) -> None:
        """Begin at once to look out for a client that leaves."""
        self._urgent = True
        self._nudge.set()

    async def release(self) -> None:
        """Take over from a watch that is listening; nothing it has read is lost."""
        if self._listening is not None:
            self._listening.cancel()
            self._released = trio.Event()
            await self._released.wait()

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until the connection has to end; it is aborted then."""
        while (delay := await self._look_in()) > 0:
            self._dozing = delay > _TICK
            with trio.CancelScope(deadline=trio.current_time() + delay):
                await self._nudge.wait()
            self._dozing = False
            if self._nudge.is_set():
                self._nudge = trio.Event()
        self.connection.abort()

    async def _look_in(self) -> float:
        """Do what is due; returns the seconds until the next look, 0 to end the connection."""
        now = trio.current_time()
        moved = self.serial != self._seen
        if moved:
            self._seen = self.serial
            self._since = now
        waited = now - self._since
        limits = self._limits
        if self.sending and waited >= limits.stall_seconds:
            self.connection.stalled()
            return 0
        match self.state:
            case State.IDLE:
                left = min(limits.idle_seconds - waited, self._connections.close_idle_at - now)
                # a busy connection is seen here between two requests: do not sleep on it
                return min(left, _TICK) if moved else left
            case State.HEAD:
                return await self._time_left(limits.head_seconds - waited)
            case State.BODY:
                return await self._time_left(limits.body_seconds - waited)
            case State.WORK if self._urgent or not moved:
                self._urgent = False
                until_stalled = limits.stall_seconds - waited if self.sending else math.inf
                return await self._listen(min(_LISTEN, limits.stall_seconds / 4, until_stalled))
            case _:
                return _TICK

    async def _time_left(self, left: float) -> float:
        if left > 0:
            return min(left, _TICK)
        await self.connection.time_out()
        return 0

    async def _listen(self, seconds: float) -> float:
        """Read while the handler works, at most `seconds`."""
        connection = self.connection
        if not connection.may_listen():
            return seconds
        with trio.CancelScope(deadline=trio.current_time() + seconds) as self._listening:
            while self.state is State.WORK and connection.may_listen():
                await connection.receive_ahead()
        self._listening = None
        if self._released is not None:
            self._released.set()
            self._released = None
        return _TICK
