"""The pool of HTTP/2 connections: places, shared dials, and what goes out a second time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from h2.events import PingReceived, RequestReceived, StreamEnded

from sidecar.core.types import Break, Phase, Request
from sidecar.wire.exchange import ExchangeBroken, Progress
from sidecar.wire.http2_pool import Http2Pool, PoolStatistics
from sidecar.wire.net import DialError
from tests.wire.h2_peer import PING, Peer, frame, goaway, rst, settings, settle, split
from tests.wire.memory import MemoryWire, memory_wire_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

CALL = Request("POST", "/call", [], b"x")
HOLD = Request("POST", "/hold", [], b"x")
TIMEOUT = 5.0


class Server(Peer):
    """A peer that answers ``/call`` with the number of its connection, and never ``/hold``."""

    def __init__(self, wire: MemoryWire, number: int, **initial: int) -> None:
        super().__init__(wire, client=False, **initial)
        self.number = number
        self.paths: dict[int, str] = {}
        self.held: list[int] = []
        self.react: Callable[[int], Awaitable[None]] | None = None
        """Instead of an answer, with the id of a stream that has ended."""

    async def run(self) -> None:
        await self.start()
        while await self.read():
            events, self.events = self.events, []
            for event in events:
                if isinstance(event, RequestReceived):
                    fields: Any = event.headers
                    self.paths[event.stream_id] = dict(fields)[":path"]
                elif isinstance(event, StreamEnded):
                    await self._answer(event.stream_id)
                else:
                    self.events.append(event)

    async def _answer(self, stream_id: int) -> None:
        if self.react is not None:
            await self.react(stream_id)
        elif self.paths[stream_id] == "/hold":
            self.held.append(stream_id)
        else:
            await self.reply(stream_id, str(self.number).encode())


class Origin:
    """What the pool dials, and all that was asked of it."""

    def __init__(self, nursery: trio.Nursery, **initial: int) -> None:
        self.nursery = nursery
        self.initial = initial
        self.servers: list[Server] = []
        self.wires: list[MemoryWire] = []
        self.dials = 0
        self.error: Exception | None = None
        self.gate = trio.Event()
        self.gate.set()
        self.prepare: Callable[[Server], None] = lambda server: None

    async def dial(self) -> MemoryWire:
        self.dials += 1
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        ours, theirs = memory_wire_pair()
        server = Server(theirs, len(self.servers), **self.initial)
        self.prepare(server)
        self.servers.append(server)
        self.wires.append(ours)
        self.nursery.start_soon(server.run)
        return ours

    def executed(self) -> list[str]:
        return [path for server in self.servers for path in server.paths.values()]


class Asked:
    def __init__(self, pool: Http2Pool, nursery: trio.Nursery, request: Request = CALL) -> None:
        self.progress = Progress()
        self.exchange: Any = None
        self.error: ExchangeBroken | None = None
        self.answer = b""
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        nursery.start_soon(self._go, pool, request)

    async def _go(self, pool: Http2Pool, request: Request) -> None:
        with self.scope:
            try:
                self.exchange = await pool.open(request, self.progress)
                while data := await self.exchange.receive():
                    self.answer += data
                await self.exchange.aclose()
            except ExchangeBroken as error:
                self.error = error
        self.done.set()

    async def result(self) -> bytes:
        await self.done.wait()
        assert self.error is None, self.error
        return self.answer

    async def broken(self):
        await self.done.wait()
        assert self.error is not None
        return self.error.broken


class Rig:
    def __init__(self, pool: Http2Pool, origin: Origin, nursery: trio.Nursery) -> None:
        self.pool = pool
        self.origin = origin
        self.nursery = nursery
        self.bugs: list[BaseException] = []

    def ask(self, request: Request = CALL) -> Asked:
        return Asked(self.pool, self.nursery, request)

    async def call(self, request: Request = CALL) -> Asked:
        """A call that succeeds."""
        asked = self.ask(request)
        await asked.result()
        return asked

    async def hold(self, count: int = 1) -> list[Asked]:
        """Streams that stay open."""
        held = [self.ask(HOLD) for _ in range(count)]
        await settle()
        return held


@asynccontextmanager
async def rigged(*, max_connections: int = 8, **initial: int) -> AsyncIterator[Rig]:
    bugs: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        origin = Origin(nursery, **initial)
        pool = Http2Pool(
            origin.dial,
            nursery=nursery,
            scheme="https",
            authority="agent",
            header_bytes=65536,
            connect_timeout=TIMEOUT,
            max_connections=max_connections,
            on_bug=bugs.append,
        )
        rig = Rig(pool, origin, nursery)
        rig.bugs = bugs
        with trio.fail_after(10_000):
            yield rig
        nursery.cancel_scope.cancel()
    assert bugs == []


# --- dials ------------------------------------------------------------------------------------


async def test_calls_share_a_connection(autojump_clock):
    async with rigged() as rig:
        first = await rig.call()
        second = await rig.call()
        assert rig.origin.dials == 1
        assert not first.progress.reused
        assert second.progress == Progress(phase=Phase.RECEIVING, written=True, reused=True)
        assert rig.pool.statistics() == PoolStatistics(
            connections=1, leaving=0, dialing=0, streams=0, waiting=0
        )


async def test_a_burst_shares_one_dial(autojump_clock):
    async with rigged() as rig:
        asked = [rig.ask() for _ in range(100)]
        for each in asked:
            assert await each.result() == b"0"
            assert not each.progress.reused
        assert rig.origin.dials == 1


async def test_a_caller_who_leaves_does_not_take_the_dial_along(autojump_clock):
    async with rigged() as rig:
        rig.origin.gate = trio.Event()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await settle()
        first.scope.cancel()
        await first.done.wait()
        assert rig.pool.statistics().waiting == 1
        rig.origin.gate.set()
        assert await second.result() == b"0"
        assert rig.origin.dials == 1


async def test_a_dial_that_nobody_waits_for_any_more_serves_the_next(autojump_clock):
    async with rigged() as rig:
        rig.origin.gate = trio.Event()
        asked = rig.ask()
        await settle()
        asked.scope.cancel()
        await settle()
        rig.origin.gate.set()
        await settle()
        await rig.call()
        assert rig.origin.dials == 1


async def test_a_failed_dial_fails_all_that_wait(autojump_clock):
    async with rigged() as rig:
        rig.origin.error = DialError(Break.REFUSED, "Connection refused")
        asked = [rig.ask() for _ in range(5)]
        for each in asked:
            broken = await each.broken()
            assert (broken.cause, broken.detail) == (Break.REFUSED, "Connection refused")
            assert (broken.written, broken.phase, broken.reused) == (False, Phase.DIALING, False)
        assert rig.origin.dials == 1
        rig.origin.error = None
        await rig.call()
        assert rig.origin.dials == 2


async def test_a_bug_in_the_dialer_is_a_local_fault(autojump_clock):
    async with rigged() as rig:
        rig.origin.error = ValueError("oops")
        assert (await rig.ask().broken()).cause is Break.LOCAL
        assert rig.bugs == [rig.origin.error]
        rig.bugs.clear()


@pytest.mark.parametrize("silent", ["dial", "settings"])
async def test_the_connect_timeout_covers_dial_and_settings(autojump_clock, silent):
    async with rigged() as rig:
        if silent == "dial":
            rig.origin.gate = trio.Event()
        else:
            rig.origin.prepare = lambda server: server.wire.stall()
        before = trio.current_time()
        broken = await rig.ask().broken()
        assert trio.current_time() - before == pytest.approx(TIMEOUT)
        assert (broken.cause, broken.written) == (Break.CONNECT_TIMEOUT, False)
        await settle()
        assert all(wire.aborted for wire in rig.origin.wires)
        assert rig.pool.statistics().connections == 0


@pytest.mark.parametrize(
    ("greeting", "cause"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", Break.NOT_HTTP2), (b"", Break.EOF)],
)
async def test_a_peer_that_does_not_speak_http2_is_not_asked(autojump_clock, greeting, cause):
    async with rigged() as rig:
        ours, theirs = memory_wire_pair()
        await theirs.send(greeting)
        theirs.cut()

        async def dial() -> MemoryWire:
            return ours

        rig.pool._dial = dial
        broken = await rig.ask().broken()
        assert (broken.cause, broken.written) == (cause, False)


# --- places -----------------------------------------------------------------------------------


async def test_long_streams_do_not_starve_calls(autojump_clock):
    """D58: MAX_CONCURRENT_STREAMS=2, two endless streams, five calls."""
    async with rigged(max_concurrent_streams=2) as rig:
        await rig.hold(2)
        asked = [rig.ask() for _ in range(5)]
        for each in asked:
            await each.result()
        assert rig.origin.executed().count("/call") == 5
        assert rig.origin.dials <= 4


async def test_when_all_is_full_a_call_waits_no_longer_than_for_a_connection(autojump_clock):
    async with rigged(max_connections=2, max_concurrent_streams=1) as rig:
        await rig.hold(2)
        assert rig.pool.statistics().streams == 2
        before = trio.current_time()
        asked = rig.ask()
        await settle()
        assert rig.pool.statistics().waiting == 1
        broken = await asked.broken()
        assert trio.current_time() - before == pytest.approx(TIMEOUT)
        assert (broken.cause, broken.written) == (Break.LOCAL, False)
        assert rig.pool.statistics().waiting == 0
        assert rig.origin.dials == 2


async def test_a_place_that_becomes_free_goes_to_the_one_that_waits_longest(autojump_clock):
    async with rigged(max_connections=1, max_concurrent_streams=1) as rig:
        [held] = await rig.hold()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await trio.sleep(3)
        assert not first.done.is_set()
        await rig.origin.servers[0].reply(1)
        await held.result()
        assert await first.result() == b"0"
        assert await second.result() == b"0"
        assert first.progress.reused
        assert rig.origin.dials == 1


async def test_a_waiting_caller_who_leaves_gives_its_place_back(autojump_clock):
    async with rigged(max_connections=1, max_concurrent_streams=1) as rig:
        await rig.hold()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await settle()
        [connection] = rig.pool._connections
        [held] = connection._streams.values()
        first.scope.cancel()
        connection.cancel(held)  # the first gets the place before it knows that it has left
        assert await second.result() == b"0"
        assert rig.pool.statistics().streams == 0


async def test_a_call_may_wait_for_more_than_one_dial(autojump_clock):
    """Each brings one place; together they last longer than one may."""
    async with rigged(max_concurrent_streams=1) as rig:
        dial = rig.origin.dial

        async def slow_dial() -> MemoryWire:
            await trio.sleep(4)
            return await dial()

        rig.pool._dial = slow_dial
        asked = [rig.ask(HOLD) for _ in range(3)]
        await trio.sleep(12.5)
        assert [len(server.held) for server in rig.origin.servers] == [1, 1, 1]
        assert not any(each.done.is_set() for each in asked)


async def test_the_stream_limit_is_obeyed_whenever_it_changes(autojump_clock):
    """D92: slow SETTINGS with a limit of 5, 50 calls at once; later 1, then 0 for 3 s, then 100.

    The peer is h2, which ends the connection at one stream too many.
    """
    async with rigged(max_connections=1, max_concurrent_streams=5) as rig:
        origin = rig.origin
        origin.prepare = lambda server: server.wire.stall()
        asked = [rig.ask() for _ in range(50)]
        await trio.sleep(0.5)
        origin.servers[0].wire.resume()
        for each in asked:
            await each.result()
        [server] = origin.servers

        async def limit(count: int) -> None:
            server.h2.update_settings({3: count})
            await server.flush()
            await settle()

        await limit(1)
        asked = [rig.ask() for _ in range(5)]
        for each in asked:
            await each.result()
        await limit(0)
        asked = [rig.ask() for _ in range(5)]
        await trio.sleep(3)
        assert not any(each.done.is_set() for each in asked)
        await limit(100)
        for each in asked:
            await each.result()
        assert origin.executed() == ["/call"] * 60
        assert origin.dials == 1


async def test_a_limit_of_none_does_not_dial_for_ever(autojump_clock):
    async with rigged(max_concurrent_streams=0) as rig:
        broken = await rig.ask().broken()
        assert (broken.cause, broken.written) == (Break.LOCAL, False)
        assert rig.origin.dials == 1


# --- leaving ----------------------------------------------------------------------------------


async def test_a_drain_notice_costs_nobody_a_call(autojump_clock):
    """D56: GOAWAY(2^31-1), a round trip, GOAWAY(1) with stream 1 open; then 20 calls."""
    async with rigged() as rig:
        [held] = await rig.hold()
        old = rig.origin.servers[0]
        await old.wire.send(goaway(2**31 - 1))
        await old.wire.send(frame(PING, 0, 0, b"roundtri"))
        await settle()
        await old.wire.send(goaway(1))
        await trio.sleep(0.05)
        asked = [rig.ask() for _ in range(20)]
        for each in asked:
            assert await each.result() == b"1"
            assert each.progress.redialled == ""
        assert not held.done.is_set()
        assert rig.pool.statistics().leaving == 1
        await old.reply(1, b"to the end")
        assert await held.result() == b"to the end"
        await settle()
        assert rig.origin.wires[0].closed
        assert rig.origin.executed() == ["/hold"] + ["/call"] * 20
        assert rig.pool.statistics() == PoolStatistics(
            connections=1, leaving=0, dialing=0, streams=0, waiting=0
        )


async def test_a_request_above_a_goaway_goes_out_once_more(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        old = rig.origin.servers[0]

        async def leave(stream_id: int) -> None:
            del old.paths[stream_id]  # it will not be executed
            await old.wire.send(goaway(stream_id - 2))

        old.react = leave
        asked = await rig.call()
        assert asked.answer == b"1"
        assert asked.progress == Progress(phase=Phase.RECEIVING, written=True, redialled="goaway")
        assert rig.origin.executed() == ["/call", "/call"]


async def test_a_request_above_a_goaway_of_a_fresh_connection_is_broken(autojump_clock):
    async with rigged() as rig:

        def prepare(server: Server) -> None:
            async def leave(stream_id: int) -> None:
                await server.wire.send(goaway(0))

            server.react = leave

        rig.origin.prepare = prepare
        broken = await rig.ask().broken()
        assert (broken.cause, broken.reused) == (Break.GOAWAY, False)
        assert rig.origin.dials == 1


def refuse(server: Server) -> None:
    async def react(stream_id: int) -> None:
        server.paths.pop(stream_id)
        await server.wire.send(rst(stream_id, 7))

    server.react = react


async def test_a_refused_stream_is_sent_once_more_and_not_twice(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        refuse(rig.origin.servers[0])
        asked = await rig.call()
        assert (asked.answer, asked.progress.redialled) == (b"1", "refused_stream")
        assert not asked.progress.reused
        refuse(rig.origin.servers[1])
        rig.origin.prepare = refuse
        last = rig.ask()
        broken = await last.broken()
        assert (broken.cause, broken.written, broken.reused) == (Break.REFUSED_STREAM, True, False)
        assert last.progress.redialled == "refused_stream"
        assert rig.origin.dials == 3


async def test_a_fresh_connection_that_refuses_is_believed(autojump_clock):
    async with rigged() as rig:
        rig.origin.prepare = refuse
        broken = await rig.ask().broken()
        assert broken.cause is Break.REFUSED_STREAM
        assert rig.origin.dials == 1


async def test_refusals_do_not_make_connections_without_end(autojump_clock):
    async with rigged(max_connections=2) as rig:
        await rig.call()
        for _ in range(6):
            refuse(rig.origin.servers[-1])
            refuse(rig.origin.servers[0])
            await rig.call()
            await settle()
            assert rig.pool.statistics().connections <= 2


async def test_a_connection_lost_before_a_byte_was_written_is_replaced(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        rig.origin.wires[0].fail_next_send()
        asked = await rig.call()
        assert (asked.answer, asked.progress.redialled) == (b"1", "stale")
        assert rig.origin.executed() == ["/call", "/call"]


async def test_what_the_fresh_connection_says_counts(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        rig.origin.wires[0].fail_next_send()
        rig.origin.error = DialError(Break.REFUSED, "gone")
        asked = rig.ask()
        broken = await asked.broken()
        assert (broken.cause, broken.written, broken.reused) == (Break.REFUSED, False, False)
        assert asked.progress.redialled == "stale"


@pytest.mark.parametrize("ending", ["reset", "eof", "internal_error"])
async def test_a_request_that_may_have_been_taken_never_goes_out_twice(autojump_clock, ending):
    async with rigged() as rig:
        await rig.call()
        server = rig.origin.servers[0]

        async def react(stream_id: int) -> None:
            if ending == "internal_error":
                await server.wire.send(rst(stream_id, 2))
            else:
                server.wire.reset() if ending == "reset" else server.wire.cut()

        server.react = react
        broken = await rig.ask().broken()
        assert broken.written
        assert broken.cause is (Break.EOF if ending == "eof" else Break.RESET)
        assert broken.reused
        assert rig.origin.executed() == ["/call", "/call"]
        assert rig.origin.dials == 1


async def test_a_request_that_waits_on_a_leaving_connection_moves_for_free(autojump_clock):
    async with rigged() as rig:
        await rig.hold()
        wire = rig.origin.wires[0]
        wire.stall()
        stuck = rig.ask(HOLD)
        await settle()
        asked = rig.ask()
        await settle()
        await rig.origin.servers[0].wire.send(goaway(2**31 - 1))
        assert await asked.result() == b"1"
        assert asked.progress.redialled == ""
        assert not stuck.done.is_set()


# --- signs of life ----------------------------------------------------------------------------


def pings(wire: MemoryWire) -> int:
    return sum(kind == PING for kind, *_ in split(b"".join(wire.sends)))


async def test_a_connection_idle_for_ten_seconds_is_asked_first(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        await trio.sleep(9.9)
        await rig.call()
        assert pings(rig.origin.wires[0]) == 0
        await trio.sleep(10.1)
        asked = [rig.ask() for _ in range(3)]
        for each in asked:
            assert await each.result() == b"0"
            assert each.progress.redialled == ""
        assert pings(rig.origin.wires[0]) == 1
        await rig.origin.servers[0].expect(PingReceived)


async def test_a_connection_that_does_not_answer_a_ping_is_replaced(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        await trio.sleep(60)
        rig.origin.servers[0].wire.stall()
        before = trio.current_time()
        asked = [rig.ask() for _ in range(3)]
        for each in asked:
            assert await each.result() == b"1"
            assert each.progress.redialled == "ping"
        assert trio.current_time() - before == pytest.approx(1.0)
        assert rig.origin.executed() == ["/call"] * 4
        assert rig.origin.dials == 2


async def test_a_caller_who_leaves_while_a_ping_is_out_leaves_no_place_behind(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        await trio.sleep(60)
        rig.origin.servers[0].wire.stall()
        asked = rig.ask()
        await trio.sleep(0.5)
        asked.scope.cancel()
        await settle()
        assert rig.pool.statistics().streams == 0
        rig.origin.servers[0].wire.resume()
        await settle()
        assert (await rig.call()).answer == b"0"
        assert pings(rig.origin.wires[0]) == 1


async def test_an_idle_connection_is_closed_without_any_ping(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        await trio.sleep(299)
        assert rig.pool.statistics().connections == 1
        await trio.sleep(2)
        assert rig.pool.statistics().connections == 0
        assert rig.origin.wires[0].closed
        assert pings(rig.origin.wires[0]) == 0


async def test_a_peer_that_complains_gets_half_the_pings(autojump_clock, caplog):
    """D57, with a server that counts two PINGs as too many."""
    async with rigged() as rig:
        await rig.hold()
        await trio.sleep(301)
        assert pings(rig.origin.wires[0]) == 1
        await rig.origin.servers[0].wire.send(goaway(1, 0xB, b"too_many_pings"))
        await settle()
        assert "asks for fewer PINGs" in caplog.text
        await rig.hold()
        await trio.sleep(590)
        assert pings(rig.origin.wires[1]) == 0
        await trio.sleep(20)
        assert pings(rig.origin.wires[1]) == 1


# --- the end ----------------------------------------------------------------------------------


async def test_closing_ends_idle_connections_now_and_busy_ones_later(autojump_clock):
    async with rigged(max_concurrent_streams=1) as rig:
        [held] = await rig.hold()
        await rig.call()
        await rig.pool.aclose()
        await settle()
        assert [wire.closed for wire in rig.origin.wires] == [False, True]
        await rig.origin.servers[0].reply(1, b"x")
        assert await held.result() == b"x"
        await settle()
        assert rig.origin.wires[0].closed
        assert (await rig.ask().broken()).cause is Break.LOCAL


async def test_closing_while_a_call_waits_for_a_dial_serves_that_call(autojump_clock):
    async with rigged() as rig:
        rig.origin.gate = trio.Event()
        asked = rig.ask()
        await settle()
        await rig.pool.aclose()
        rig.origin.gate.set()
        assert await asked.result() == b"0"
        await settle()
        assert rig.origin.wires[0].closed


async def test_a_call_under_way_is_redialled_also_after_closing(autojump_clock):
    async with rigged() as rig:
        await rig.call()
        server = rig.origin.servers[0]

        async def leave(stream_id: int) -> None:
            await rig.pool.aclose()
            await server.wire.send(goaway(stream_id - 2))

        server.react = leave
        asked = await rig.call()
        assert (asked.answer, asked.progress.redialled) == (b"1", "goaway")
        await settle()
        assert rig.origin.wires[1].closed


async def test_settings_alone_disturb_nobody(autojump_clock):
    async with rigged() as rig:
        [held] = await rig.hold()
        await rig.origin.servers[0].wire.send(settings(max_streams=50) * 3)
        await settle()
        assert not held.done.is_set()
        assert rig.origin.dials == 1
