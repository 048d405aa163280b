"""Connections to one HTTP/2 origin: places for streams, shared dials, one redial per attempt.

A call takes a place on the oldest connection that has one, else waits for a dial or for a place.
Dials belong to the pool, so that a caller who leaves neither fails nor owns what others wait for.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break, Phase
from sidecar.wire.exchange import ExchangeBroken
from sidecar.wire.http2 import KEEPALIVE_SECONDS, Http2Connection, NotBegun
from sidecar.wire.http2_link import Lost
from sidecar.wire.net import DialError
from sidecar.wire.sockets import describe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.core.types import Request
    from sidecar.wire.exchange import Exchange, Progress
    from sidecar.wire.sockets import Wire

_log = logging.getLogger(__name__)

_MAX_MOVES: Final = 8
"""How often one call may move on from connections that took nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """What a pool holds at this moment."""

    connections: int
    """Open and taking streams."""
    leaving: int
    """Open for the streams on them only."""
    dialing: int
    streams: int
    """Open, about to open or reserved."""
    waiting: int
    """Calls that wait for a place."""

    @property
    def open(self) -> int:
        """Connections, whatever they do."""
        return self.connections + self.leaving


class _Waiter:
    """A call that waits for a place on a connection."""

    __slots__ = ("connection", "event", "failure", "fresh", "only_fresh")

    def __init__(self, *, only_fresh: bool) -> None:
        self.only_fresh = only_fresh
        """A connection dialled from now on is wanted: an old one has just failed it."""
        self.event = trio.Event()
        self.connection: Http2Connection | None = None
        """Where a place is reserved."""
        self.fresh = False
        """It was dialled while this call waited."""
        self.failure: Lost | None = None


class Http2Pool:
    """Implements `exchange.Pool`."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[Wire]],
        *,
        nursery: trio.Nursery,
        scheme: str,
        authority: str,
        header_bytes: int,
        connect_timeout: float,
        max_connections: int = 8,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`dial` makes a wire to the origin or raises DialError; `connect_timeout` bounds it.

        Dials and connections live in `nursery`. `on_bug` hears of errors that are our own.
        """
        self._dial = dial
        self._nursery = nursery
        self._scheme = scheme
        self._authority = authority
        self._header_bytes = header_bytes
        self._connect_timeout = connect_timeout
        self._max_connections = max_connections
        self._on_bug = on_bug
        self._connections: list[Http2Connection] = []  # oldest first
        self._waiters: deque[_Waiter] = deque()
        self._dialing = False
        self._caring = False
        self._closed = False
        self._keepalive_seconds = KEEPALIVE_SECONDS

    def statistics(self) -> PoolStatistics:
        """Numbers for `/status`, and for tests."""
        leaving = sum(each.leaving for each in self._connections)
        return PoolStatistics(
            connections=len(self._connections) - leaving,
            leaving=leaving,
            dialing=int(self._dialing),
            streams=sum(each.streams for each in self._connections),
            waiting=len(self._waiters),
        )

    async def open(self, request: Request, progress: Progress) -> Exchange:
        """See `Pool.open`.

        A request that a reused connection provably did not take goes out once more, on a connection
        dialled for it, with `progress.redialled` saying why: ``goaway``, ``refused_stream``,
        ``stale`` (lost before anything was written) or ``ping`` (no answer to one).
        """
        only_fresh = False
        last: NotBegun | None = None
        for _ in range(_MAX_MOVES):
            connection, fresh = await self._place(progress, only_fresh=only_fresh)
            progress.reused = not fresh
            try:
                if not fresh and connection.doubtful and not await self._prove(connection):
                    reason = "ping" if connection.lost is None else "stale"
                else:
                    return await connection.open_stream(request, progress)
            except NotBegun as error:
                last = error
                if fresh and error.cause is not None:
                    break
                continue
            except ExchangeBroken as error:
                reason = _reason_to_redial(error)
                if fresh or not reason:
                    raise
                if reason == "refused_stream" and self._full():
                    connection.leave()
            progress.redialled = reason
            progress.phase, progress.written, progress.reused = Phase.DIALING, False, False
            only_fresh = True
        if last is None or last.cause is None:
            raise progress.broken(Break.LOCAL, detail="no connection takes the stream")
        raise progress.broken(last.cause, code=last.code, detail=last.detail)

    async def aclose(self) -> None:
        """See `Pool.aclose`."""
        self._closed = True
        for connection in list(self._connections):
            connection.leave()

    # --- places -------------------------------------------------------------------------------

    def _full(self) -> bool:
        live = sum(not each.leaving for each in self._connections)
        return live >= self._max_connections

    async def _place(self, progress: Progress, *, only_fresh: bool) -> tuple[Http2Connection, bool]:
        """A connection with a place reserved, and whether it was dialled for this request."""
        if self._closed and not only_fresh:
            raise progress.broken(Break.LOCAL, detail="the pool is closed")
        if not only_fresh:
            for connection in self._connections:
                if connection.free:
                    connection.reserve()
                    return connection, False
        waiter = _Waiter(only_fresh=only_fresh)
        self._waiters.append(waiter)
        self._dial_if_useful()
        try:
            await self._wait(waiter)
        except BaseException:
            if waiter.connection is not None:
                waiter.connection.release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.failure is not None:
            raise progress.broken(waiter.failure.cause, detail=waiter.failure.detail)
        if waiter.connection is None:
            raise progress.broken(Break.LOCAL, detail="no stream became free in time")
        return waiter.connection, waiter.fresh

    async def _wait(self, waiter: _Waiter) -> None:
        """Until the waiter has what it waits for; at most the connect timeout if no dial runs."""
        deadline = trio.current_time() + self._connect_timeout
        while True:
            limit = math.inf if self._dialing else deadline
            with trio.CancelScope(deadline=limit) as scope:
                await waiter.event.wait()
            if waiter.connection is not None or waiter.failure is not None:
                return
            if scope.cancelled_caught and not self._dialing:
                return
            waiter.event = trio.Event()

    async def _prove(self, connection: Http2Connection) -> bool:
        """Ask a connection with a place reserved for a sign of life; keeps the place if it gives one."""
        alive = False
        try:
            alive = await connection.prove()
        finally:
            if not alive:
                connection.release()
        return alive

    def _changed(self, connection: Http2Connection) -> None:
        """Places may have become free, or the connection is leaving."""
        if connection.calm_down:
            connection.calm_down = False
            self._keepalive_seconds *= 2
            _log.warning(
                "%s asks for fewer PINGs: one every %d s from now on",
                self._authority,
                self._keepalive_seconds,
            )
        if self._waiters and connection in self._connections:
            self._serve(connection, fresh=False)
            self._dial_if_useful()

    def _serve(self, connection: Http2Connection, *, fresh: bool) -> int:
        """Give places to those that wait longest; how many got one."""
        free = connection.free
        served = 0
        for waiter in [each for each in self._waiters if fresh or not each.only_fresh][:free]:
            connection.reserve()
            waiter.connection = connection
            waiter.fresh = fresh
            waiter.event.set()
            self._waiters.remove(waiter)
            served += 1
        return served

    # --- dials --------------------------------------------------------------------------------

    def _dial_if_useful(self) -> None:
        if self._dialing or not self._waiters:
            return
        if self._full() and not any(waiter.only_fresh for waiter in self._waiters):
            return
        self._dialing = True
        self._nursery.start_soon(self._dial_for_waiters)

    async def _dial_for_waiters(self) -> None:
        """One dial; its result is the result of all that wait."""
        try:
            result = await self._connect()
        finally:
            self._dialing = False
        if isinstance(result, Lost):
            for waiter in self._waiters:
                waiter.failure = result
                waiter.event.set()
            self._waiters.clear()
            return
        self._connections.append(result)
        if not self._caring:
            self._caring = True
            self._nursery.start_soon(self._care)
        if self._serve(result, fresh=True):
            self._dial_if_useful()
        if self._closed:
            result.leave()
        for waiter in self._waiters:
            waiter.event.set()  # to look at the clock again, now that no dial runs

    async def _connect(self) -> Http2Connection | Lost:
        """Dial and wait for the peer's SETTINGS."""
        connection: Http2Connection | None = None
        with trio.CancelScope(deadline=trio.current_time() + self._connect_timeout):
            try:
                wire = await self._dial()
            except DialError as error:
                return Lost(error.cause, error.detail)
            except Exception as error:
                if self._on_bug is not None:
                    self._on_bug(error)
                return Lost(Break.LOCAL, describe(error))
            connection = Http2Connection(
                wire,
                scheme=self._scheme,
                authority=self._authority,
                header_bytes=self._header_bytes,
                keepalive_seconds=self._keepalive_seconds,
                on_change=self._changed,
                on_bug=self._on_bug,
            )
            self._nursery.start_soon(self._carry, connection)
            await connection.settled.wait()
            # one that leaves as it comes has failed those who wait: to dial again might never end
            return connection.refusal or connection
        if connection is not None:
            connection.abort(Break.CONNECT_TIMEOUT, "no SETTINGS in time")
            return Lost(Break.CONNECT_TIMEOUT, "no SETTINGS in time")
        return Lost(Break.CONNECT_TIMEOUT, "no connection in time")

    async def _carry(self, connection: Http2Connection) -> None:
        await connection.run()
        if connection in self._connections:
            self._connections.remove(connection)
            self._dial_if_useful()

    async def _care(self) -> None:
        """Close idle connections and keep silent streams alive, while there are connections."""
        while self._connections:
            now = trio.current_time()
            due = min([each.tick(now) for each in list(self._connections)])
            await trio.sleep_until(due)
        self._caring = False


def _reason_to_redial(error: ExchangeBroken) -> str:
    """Why the connection provably did not take the request, '' if it may have."""
    match error.broken.cause:
        case Break.GOAWAY:
            return "goaway"
        case Break.REFUSED_STREAM:
            return "refused_stream"
        case Break.LOCAL:
            return ""
        case _:
            return "" if error.broken.written else "stale"
