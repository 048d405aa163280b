"""The HTTP/1.1 connections to one origin: looked at before reuse, dialled outside the calls."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break, Phase
from sidecar.wire.exchange import ExchangeBroken
from sidecar.wire.http1 import Http1Connection
from sidecar.wire.net import DialError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.core.types import Request
    from sidecar.wire.exchange import Progress
    from sidecar.wire.http1 import Http1Exchange
    from sidecar.wire.net import Wire

_IDLE_SECONDS: Final = 4.0
"""Common servers (uvicorn, hypercorn) close after 5 s; whoever reuses later than that loses calls."""


_LOWERED_SECONDS: Final = 600.0
"""How long a lowered limit holds: what closed the connection may have been a restart."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Connections of one pool."""

    idle: int
    busy: int

    @property
    def open(self) -> int:
        """Connections, whatever they do."""
        return self.idle + self.busy


class _Waiter:
    """A call that waits for its own dial, or for any connection that comes free before that."""

    __slots__ = ("connection", "failure", "ready", "waiting")

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.waiting = True
        self.connection: Http1Connection | None = None
        self.failure: Exception = DialError(Break.LOCAL, "not dialled")


class Http1Pool:
    """Keep-alive connections to one origin: the most recently used one goes out first.

    `dial` makes a wire or raises DialError; it runs in `nursery`, bounded by `connect_timeout`
    seconds, and its result is kept when the call that asked for it has gone. `authority` is the
    Host of every request. All that happens per request is O(1).
    """

    def __init__(
        self,
        dial: Callable[[], Awaitable[Wire]],
        *,
        authority: str,
        header_bytes: int,
        connect_timeout: float,
        nursery: trio.Nursery,
        max_idle: int = 64,
    ) -> None:
        self._dial = dial
        self._authority = authority
        self._header_bytes = header_bytes
        self._connect_timeout = connect_timeout
        self._nursery = nursery
        self._max_idle = max_idle
        self._idle: deque[Http1Connection] = deque()
        """The longest idle one first."""
        self._busy = 0
        self._idle_seconds = _IDLE_SECONDS
        """How long one may be idle; lowered by what this origin does."""
        self._lowered_at = 0.0
        self._waiters: dict[_Waiter, None] = {}
        """Those that take any connection, in the order of their coming."""
        self._sweeping = False
        self._closed = False

    async def open(self, request: Request, progress: Progress) -> Http1Exchange:
        """Send `request` and return at the final head of its reply; raises ExchangeBroken.

        A reused connection that turns out to be leaving before the first byte was written is
        replaced once, by one that is dialled for it: the server has seen nothing of the request.
        """
        connection, stale = self._take_idle()
        progress.reused = connection is not None
        if connection is None and not stale:
            connection = await self._wait(progress, fresh=False)
            progress.reused = connection.used
        if connection is not None:
            try:
                return await connection.request(request, progress)
            except ExchangeBroken as error:
                unsent = progress.reused and not progress.written
                if not unsent or error.broken.cause is Break.LOCAL:
                    raise
        progress.redialled = "stale"
        progress.phase = Phase.DIALING
        progress.reused = False
        connection = await self._wait(progress, fresh=True)
        return await connection.request(request, progress)

    def statistics(self) -> PoolStatistics:
        """How many connections there are now; those being dialled are not counted."""
        return PoolStatistics(idle=len(self._idle), busy=self._busy)

    def close_idle(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().wire.abort()

    async def aclose(self) -> None:
        """Close idle connections now, busy ones when their exchange ends."""
        self._closed = True
        self.close_idle()
        await trio.lowlevel.checkpoint()

    # --- idle connections ---------------------------------------------------------------------

    def _take_idle(self) -> tuple[Http1Connection | None, bool]:
        """A connection to reuse, marked busy; or None, and whether that is because one was stale."""
        now = trio.current_time()
        if self._idle_seconds < _IDLE_SECONDS and now >= self._lowered_at + _LOWERED_SECONDS:
            self._idle_seconds = _IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            age = now - connection.idle_since
            if age >= self._limit(connection):
                connection.wire.abort()
            elif connection.wire.has_input():
                # the server closes earlier than we thought; being in time is a matter of luck
                connection.wire.abort()
                self._idle_seconds = min(self._idle_seconds, age / 2)
                self._lowered_at = now
                return None, True
            else:
                self._busy += 1
                return connection, False
        return None, False

    def _limit(self, connection: Http1Connection) -> float:
        announced = connection.keep_alive_seconds
        return self._idle_seconds if announced is None else min(self._idle_seconds, announced - 1)

    def _done(self, connection: Http1Connection) -> None:
        """An exchange has ended."""
        self._busy -= 1
        if connection.reusable:
            self._offer(connection)

    def _offer(self, connection: Http1Connection) -> None:
        """Give a free connection to whoever waits, else keep it."""
        if self._waiters and not connection.wire.has_input():
            self._serve(next(iter(self._waiters)), connection)
            return
        if self._waiters or self._closed or self._max_idle < 1 or self._limit(connection) <= 0:
            connection.wire.abort()
            return
        if len(self._idle) >= self._max_idle:
            self._idle.popleft().wire.abort()
        connection.idle_since = trio.current_time()
        self._idle.append(connection)
        if not self._sweeping:
            self._sweeping = True
            self._nursery.start_soon(self._sweep)

    async def _sweep(self) -> None:
        """Close what has been idle too long. Runs while there are idle connections."""
        try:
            while self._idle:
                oldest = self._idle[0]
                left = oldest.idle_since + _IDLE_SECONDS - trio.current_time()
                if left > 0:
                    await trio.sleep(left)
                else:
                    self._idle.popleft().wire.abort()
        except trio.Cancelled:
            # the agent is gone, and nobody else would close them
            self.close_idle()
            raise
        finally:
            self._sweeping = False

    # --- dialling -----------------------------------------------------------------------------

    async def _wait(self, progress: Progress, *, fresh: bool) -> Http1Connection:
        """A connection that was dialled for this call, or came free meanwhile; marked busy."""
        waiter = _Waiter()
        if not fresh:
            self._waiters[waiter] = None
        self._nursery.start_soon(self._dial_for, waiter)
        try:
            await waiter.ready.wait()
        except BaseException:
            self._leave(waiter)
            if waiter.connection is not None:
                self._busy -= 1
                self._offer(waiter.connection)
            raise
        if waiter.connection is not None:
            return waiter.connection
        if isinstance(waiter.failure, DialError):
            raise progress.broken(waiter.failure.cause, detail=waiter.failure.detail) from None
        raise waiter.failure

    async def _dial_for(self, waiter: _Waiter) -> None:
        """Dial; the result is `waiter`'s, or when that has been served, anybody's."""
        seconds = self._connect_timeout
        failure: Exception = DialError(Break.CONNECT_TIMEOUT, f"no connection in {seconds:g} s")
        try:
            with trio.CancelScope(deadline=trio.current_time() + seconds):
                self._dialled(waiter, await self._dial())
        except trio.Cancelled:
            failure = DialError(Break.LOCAL, "the pool ended")
            raise
        except Exception as error:
            failure = error  # raised in the call that waits for it
        finally:
            if waiter.waiting:
                waiter.failure = failure
                self._leave(waiter)

    def _dialled(self, waiter: _Waiter, wire: Wire) -> None:
        connection = Http1Connection(
            wire,
            authority=self._authority,
            header_bytes=self._header_bytes,
            done=self._done,
        )
        if waiter.waiting:
            self._serve(waiter, connection)
        else:
            self._offer(connection)

    def _serve(self, waiter: _Waiter, connection: Http1Connection) -> None:
        self._busy += 1
        waiter.connection = connection
        self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        waiter.waiting = False
        self._waiters.pop(waiter, None)
        waiter.ready.set()
