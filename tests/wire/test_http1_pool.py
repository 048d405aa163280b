"""The HTTP/1.1 pool: what is reused, what is not, and who gets a dial's result."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from sidecar.core.types import Break, Phase, Request
from sidecar.wire.exchange import ExchangeBroken, Progress
from sidecar.wire.http1_pool import Http1Pool
from sidecar.wire.net import DialError
from sidecar.wire.sockets import SocketWire
from tests.wire.loopback import serve
from tests.wire.memory import MemoryWire, memory_wire_pair

if TYPE_CHECKING:
    from sidecar.wire.exchange import Exchange, Pool
    from sidecar.wire.http1 import Http1Exchange

    a_pool: type[Pool] = Http1Pool
    an_exchange: type[Exchange] = Http1Exchange

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def post(number: int = 0) -> Request:
    return Request("POST", f"/{number}", [], b"body")


class Origin:
    """A dial function with its peers: each connection is answered by `serve`, or by the test."""

    def __init__(self, nursery: trio.Nursery, *, answers: bool = True, **options) -> None:
        self.nursery = nursery
        self.answers = answers
        self.delay = 0.0
        self.failure: Exception | None = None
        self.ours: list[MemoryWire] = []
        self.theirs: list[MemoryWire] = []
        self.asked: list[tuple[int, str]] = []
        """(connection, target) of every request that was answered."""
        self.extra = b""
        options.setdefault("connect_timeout", 5)
        self.pool = Http1Pool(
            self.dial, authority="h", header_bytes=4096, nursery=nursery, **options
        )

    async def dial(self) -> MemoryWire:
        await trio.sleep(self.delay)
        if self.failure is not None:
            raise self.failure
        ours, theirs = memory_wire_pair()
        self.ours.append(ours)
        self.theirs.append(theirs)
        if self.answers:
            self.nursery.start_soon(self.serve, len(self.theirs) - 1, theirs)
        return ours

    async def serve(self, number: int, wire: MemoryWire) -> None:
        """Answer each request with its own target."""
        data = b""
        while chunk := await wire.receive():
            data += chunk
            if not data.endswith(b"body"):
                continue
            target = data.split(b" ", 2)[1]
            data = b""
            self.asked.append((number, target.decode()))
            await wire.send(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b"
                % (len(target), self.extra, target)
            )
        await wire.aclose()

    async def call(self, number: int = 0, progress: Progress | None = None) -> bytes:
        exchange = await self.pool.open(post(number), progress or Progress())
        try:
            body = b""
            while chunk := await exchange.receive():
                body += chunk
            return body
        finally:
            await exchange.aclose()

    def counts(self) -> tuple[int, int]:
        statistics = self.pool.statistics()
        return statistics.idle, statistics.busy


@pytest.fixture
async def nursery():
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


# --- reuse ------------------------------------------------------------------------------------


async def test_a_connection_is_used_again(nursery, autojump_clock):
    origin = Origin(nursery)
    assert origin.counts() == (0, 0)
    first, second = Progress(), Progress()
    assert await origin.call(1, first) == b"/1"
    assert origin.counts() == (1, 0)
    assert await origin.call(2, second) == b"/2"
    assert origin.asked == [(0, "/1"), (0, "/2")]
    assert (first.reused, second.reused) == (False, True)
    assert (first.redialled, second.redialled) == ("", "")


async def test_the_most_recently_used_one_goes_first(nursery, autojump_clock):
    origin = Origin(nursery)
    exchanges = [await origin.pool.open(post(n), Progress()) for n in range(3)]
    assert origin.counts() == (0, 3)
    for exchange in (exchanges[1], exchanges[2], exchanges[0]):
        while await exchange.receive():
            pass
        await exchange.aclose()
    assert origin.counts() == (3, 0)
    await origin.call(9)
    assert origin.asked[-1] == (0, "/9")


async def test_nothing_is_reused_after_four_seconds(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(1)
    await trio.sleep(3.9)
    await origin.call(2)
    await trio.sleep(4)
    progress = Progress()
    await origin.call(3, progress)
    assert origin.asked == [(0, "/1"), (0, "/2"), (1, "/3")]
    assert (progress.reused, progress.redialled) == (False, "")
    assert origin.ours[0].closed


async def test_idle_connections_are_closed_without_a_call(nursery, autojump_clock):
    origin = Origin(nursery)
    exchanges = [await origin.pool.open(post(n), Progress()) for n in range(2)]
    for exchange in exchanges:
        while await exchange.receive():
            pass
        await exchange.aclose()
        await trio.sleep(1)
    await trio.sleep(2.1)
    assert [wire.closed for wire in origin.ours] == [True, False]
    await trio.sleep(1)
    assert [wire.closed for wire in origin.ours] == [True, True]
    assert origin.counts() == (0, 0)
    await origin.call()
    await trio.sleep(4.1)
    assert origin.ours[2].closed


@pytest.mark.parametrize(("announced", "idle", "reused"), [(3, 1.9, True), (3, 2, False), (9, 3.9, True), (9, 4, False)])  # fmt: skip
async def test_the_servers_keep_alive_lowers_the_limit(
    nursery, announced, idle, reused, autojump_clock
):
    origin = Origin(nursery)
    origin.extra = b"Keep-Alive: timeout=%d\r\n" % announced
    await origin.call(1)
    await trio.sleep(idle)
    progress = Progress()
    await origin.call(2, progress)
    assert progress.reused == reused


async def test_a_server_that_announces_a_second_is_not_reused_at_all(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.extra = b"Keep-Alive: timeout=1\r\n"
    await origin.call()
    assert origin.counts() == (0, 0)
    assert origin.ours[0].closed


async def test_only_so_many_are_kept_and_the_oldest_goes(nursery, autojump_clock):
    origin = Origin(nursery, max_idle=2)
    exchanges = [await origin.pool.open(post(n), Progress()) for n in range(3)]
    for exchange in exchanges:
        while await exchange.receive():
            pass
        await exchange.aclose()
    assert origin.counts() == (2, 0)
    assert [wire.closed for wire in origin.ours] == [True, False, False]


# --- connections that leave -------------------------------------------------------------------


@pytest.mark.parametrize("unasked", [b"", b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"\r\n"])
async def test_an_idle_connection_with_anything_to_read_is_replaced(
    nursery, unasked, autojump_clock
):
    origin = Origin(nursery)
    await origin.call(1)
    await trio.sleep(1)
    if unasked:
        await origin.theirs[0].send(unasked)
    else:
        origin.theirs[0].cut()
    progress = Progress()
    assert await origin.call(2, progress) == b"/2"
    assert origin.asked == [(0, "/1"), (1, "/2")]
    assert (progress.reused, progress.redialled) == (False, "stale")
    assert origin.ours[0].closed
    assert origin.counts() == (1, 0)


async def test_an_idle_connection_found_closed_halves_the_limit(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(1)
    await trio.sleep(2)
    origin.theirs[0].cut()
    await origin.call(2)
    await trio.sleep(0.9)
    await origin.call(3)
    await trio.sleep(1)
    progress = Progress()
    await origin.call(4, progress)
    assert origin.asked == [(0, "/1"), (1, "/2"), (1, "/3"), (2, "/4")]
    assert progress.redialled == ""
    # it was perhaps a restart: the limit does not stay low for ever
    await trio.sleep(600)
    await origin.call(5)
    await trio.sleep(3.9)
    await origin.call(6)
    assert origin.asked[-2:] == [(3, "/5"), (3, "/6")]


async def test_a_reused_connection_that_takes_nothing_is_replaced_once(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(1)
    origin.ours[0].fail_next_send()
    progress = Progress()
    assert await origin.call(2, progress) == b"/2"
    assert origin.asked == [(0, "/1"), (1, "/2")]
    assert (progress.reused, progress.redialled, progress.written) == (False, "stale", True)
    assert origin.counts() == (1, 0)


async def test_a_reused_connection_that_took_a_byte_is_not_replaced(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(1)
    origin.ours[0].fail_next_send(after=1)
    progress = Progress()
    with pytest.raises(ExchangeBroken) as caught:
        await origin.call(2, progress)
    broken = caught.value.broken
    assert (broken.written, broken.reused, broken.phase) == (True, True, Phase.SENDING)
    assert progress.redialled == ""
    assert len(origin.ours) == 1
    assert origin.counts() == (0, 0)


async def test_a_reply_there_already_is_the_reply_and_nothing_is_sent_again(
    nursery, autojump_clock
):
    origin = Origin(nursery)
    await origin.call(1)
    origin.ours[0].fail_next_send()
    refusal = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 4\r\n\r\nslow"
    open_ = origin.pool.open

    async def late() -> None:
        # not there at the look, there when the write has failed
        await origin.theirs[0].send(refusal)

    nursery.start_soon(late)
    exchange = await open_(post(2), Progress())
    assert exchange.head.status == 408
    await exchange.aclose()
    assert len(origin.ours) == 1


async def test_a_server_that_reads_the_request_and_closes_sees_it_once(nursery, autojump_clock):
    # the request on the reused connection was taken, so nothing is sent again
    origin = Origin(nursery, answers=False)
    executed = 0

    async def server() -> None:
        nonlocal executed
        wire = origin.theirs[0]
        await wire.receive()
        executed += 1
        await wire.send(OK)
        await wire.receive()
        executed += 1
        wire.cut()

    async with trio.open_nursery() as inner:

        async def calls() -> None:
            await origin.call(1)
            with pytest.raises(ExchangeBroken) as caught:
                await origin.call(2)
            broken = caught.value.broken
            assert (broken.cause, broken.written, broken.reused) == (Break.EOF, True, True)

        inner.start_soon(calls)
        await trio.testing.wait_all_tasks_blocked()
        inner.start_soon(server)
    assert executed == 2
    assert len(origin.ours) == 1


async def test_the_fresh_connection_has_the_last_word(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(1)
    origin.theirs[0].cut()
    origin.failure = DialError(Break.REFUSED, "refused")
    progress = Progress()
    with pytest.raises(ExchangeBroken) as caught:
        await origin.call(2, progress)
    broken = caught.value.broken
    assert (broken.cause, broken.phase, broken.written) == (Break.REFUSED, Phase.DIALING, False)
    assert (broken.reused, progress.redialled) == (False, "stale")


async def test_a_fresh_connection_that_takes_nothing_is_not_replaced(nursery, autojump_clock):
    origin = Origin(nursery)
    dial = origin.dial
    dialled = 0

    async def failing() -> MemoryWire:
        nonlocal dialled
        dialled += 1
        wire = await dial()
        wire.fail_next_send()
        return wire

    pool = Http1Pool(failing, authority="h", header_bytes=4096, connect_timeout=5, nursery=nursery)
    with pytest.raises(ExchangeBroken) as caught:
        await pool.open(post(), Progress())
    assert (caught.value.broken.written, caught.value.broken.reused) == (False, False)
    assert dialled == 1


# --- dialling ---------------------------------------------------------------------------------


async def test_a_dial_that_fails(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.failure = DialError(Break.DNS, "no such name")
    with pytest.raises(ExchangeBroken) as caught:
        await origin.call()
    broken = caught.value.broken
    assert (broken.cause, broken.detail) == (Break.DNS, "no such name")
    assert (broken.phase, broken.written) == (Phase.DIALING, False)
    assert origin.counts() == (0, 0)


async def test_a_dial_that_takes_too_long(nursery, autojump_clock):
    origin = Origin(nursery, connect_timeout=3)
    origin.delay = 100
    began = trio.current_time()
    with pytest.raises(ExchangeBroken) as caught:
        await origin.call()
    assert caught.value.broken.cause is Break.CONNECT_TIMEOUT
    assert trio.current_time() - began == pytest.approx(3)


async def test_a_bug_in_dial_costs_the_call_and_not_the_pool(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.failure = ZeroDivisionError("bug")
    with pytest.raises(ZeroDivisionError):
        await origin.call()
    origin.failure = None
    assert await origin.call(1) == b"/1"


async def test_a_waiting_call_takes_a_connection_that_comes_free(nursery, autojump_clock):
    origin = Origin(nursery)
    exchange = await origin.pool.open(post(1), Progress())
    origin.delay = 4
    progress = Progress()

    async def call() -> None:
        assert await origin.call(2, progress) == b"/2"
        assert trio.current_time() - began == pytest.approx(1)

    began = trio.current_time()
    nursery.start_soon(call)
    await trio.sleep(1)
    while await exchange.receive():
        pass
    await exchange.aclose()
    await trio.sleep(0.1)
    assert origin.asked == [(0, "/1"), (0, "/2")]
    assert progress.reused
    assert origin.counts() == (1, 0)
    # the dial's result is kept
    await trio.sleep(3)
    assert origin.counts()[0] == 2
    progress = Progress()
    await origin.call(3, progress)
    assert origin.asked[-1] == (1, "/3")
    assert progress.reused  # it was idle


async def test_waiting_calls_are_served_in_their_order(nursery, autojump_clock):
    origin = Origin(nursery)
    exchange = await origin.pool.open(post(0), Progress())
    origin.delay = 2
    for number in (1, 2, 3):
        nursery.start_soon(origin.call, number)
        await trio.sleep(0.1)
    while await exchange.receive():
        pass
    await exchange.aclose()
    await trio.sleep(1)
    assert origin.asked == [(0, "/0"), (0, "/1"), (0, "/2"), (0, "/3")]


async def test_a_redial_waits_for_its_own_connection(nursery, autojump_clock):
    origin = Origin(nursery)
    stale = await origin.pool.open(post(0), Progress())
    busy = await origin.pool.open(post(1), Progress())
    for _ in range(2):
        await stale.receive()
    await stale.aclose()
    origin.theirs[0].cut()
    origin.delay = 2
    progress = Progress()
    nursery.start_soon(origin.call, 2, progress)
    await trio.sleep(1)
    for _ in range(2):
        await busy.receive()
    await busy.aclose()
    await trio.sleep(1.5)
    assert origin.asked[-1] == (2, "/2")
    assert (progress.redialled, progress.reused) == ("stale", False)


async def test_a_cancelled_call_leaves_its_dial_to_the_next(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.delay = 2
    with trio.move_on_after(1) as scope:
        await origin.call(1)
    assert scope.cancelled_caught
    assert origin.counts() == (0, 0)
    await trio.sleep(1.5)
    assert origin.counts() == (1, 0)
    await origin.call(2)
    assert origin.asked == [(0, "/2")]


async def test_a_call_cancelled_in_the_moment_it_is_served_leaks_nothing(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.delay = 1

    scope = trio.CancelScope()
    dial = origin.dial

    async def dial_and_cancel() -> MemoryWire:
        wire = await dial()
        scope.cancel()
        return wire

    origin.pool._dial = dial_and_cancel
    with scope:
        await origin.call(1)
    await trio.sleep(1)
    assert scope.cancelled_caught
    assert origin.counts() == (1, 0)
    assert origin.asked == []


async def test_a_cancelled_call_closes_its_connection(nursery, autojump_clock):
    origin = Origin(nursery, answers=False)
    with trio.move_on_after(1) as scope:
        await origin.call()
    assert scope.cancelled_caught
    assert origin.ours[0].closed
    assert origin.counts() == (0, 0)


async def test_calls_that_wait_when_the_pools_nursery_ends_are_told(autojump_clock):
    caught: list[Break] = []
    async with trio.open_nursery() as calls:
        async with trio.open_nursery() as pools:
            origin = Origin(pools)
            origin.delay = 100

            async def call() -> None:
                with pytest.raises(ExchangeBroken) as broken:
                    await origin.call()
                caught.append(broken.value.broken.cause)

            calls.start_soon(call)
            await trio.sleep(1)
            pools.cancel_scope.cancel()
    assert caught == [Break.LOCAL]


# --- closing ----------------------------------------------------------------------------------


async def test_close_idle_leaves_busy_ones_alone(nursery, autojump_clock):
    origin = Origin(nursery)
    await origin.call(0)
    busy = await origin.pool.open(post(1), Progress())
    second = await origin.pool.open(post(2), Progress())
    for _ in range(2):
        await second.receive()
    await second.aclose()
    origin.pool.close_idle()
    assert origin.counts() == (0, 1)
    assert [wire.closed for wire in origin.ours] == [False, True]
    for _ in range(2):
        await busy.receive()
    await busy.aclose()
    assert origin.counts() == (1, 0)


async def test_a_closed_pool_keeps_nothing(nursery, autojump_clock):
    origin = Origin(nursery)
    busy = await origin.pool.open(post(0), Progress())
    await origin.pool.aclose()
    for _ in range(2):
        await busy.receive()
    await busy.aclose()
    assert origin.counts() == (0, 0)
    assert origin.ours[0].closed
    # a call under way may still come, for its next attempt
    assert await origin.call(1) == b"/1"
    assert origin.counts() == (0, 0)


# --- many -------------------------------------------------------------------------------------


async def test_a_hundred_calls_at_once_never_mix_their_answers(nursery, autojump_clock):
    origin = Origin(nursery)
    origin.delay = 0.5

    async def calls(start: int) -> None:
        for number in range(start, start + 10):
            assert await origin.call(number) == b"/%d" % number
            await trio.sleep(0.01 * (number % 7))

    async with trio.open_nursery() as inner:
        for start in range(0, 1000, 10):
            inner.start_soon(calls, start)
    assert sorted(int(target[1:]) for _, target in origin.asked) == list(range(1000))
    await trio.sleep(1)
    assert origin.counts()[1] == 0
    assert origin.counts()[0] <= 64
    await trio.sleep(5)
    assert all(wire.closed for wire in origin.ours)


async def test_a_hundred_calls_half_of_them_cancelled_over_sockets():
    answered = 0

    async def server(stream: trio.abc.Stream) -> None:
        nonlocal answered
        while data := await stream.receive_some(65536):
            target = data.split(b" ", 2)[1]
            await trio.sleep(0.001)
            length = b"%d" % len(target)
            await stream.send_all(
                b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n" + target
            )
            answered += 1

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            port = await serve(nursery, server)

            async def dial() -> SocketWire:
                sock = socket.socket()
                sock.setblocking(False)
                stream = trio.socket.from_stdlib_socket(sock)
                await stream.connect(("127.0.0.1", port))
                return SocketWire(socket.socket(fileno=stream.detach()), stall_seconds=5)

            pool = Http1Pool(
                dial, authority="h", header_bytes=4096, connect_timeout=5, nursery=nursery
            )

            async def call(number: int) -> None:
                with trio.move_on_after(0.002 if number % 2 else 10):
                    exchange = await pool.open(post(number), Progress())
                    try:
                        body = b""
                        while chunk := await exchange.receive():
                            body += chunk
                        assert body == b"/%d" % number
                    finally:
                        await exchange.aclose()

            for _ in range(3):
                async with trio.open_nursery() as calls:
                    for number in range(100):
                        calls.start_soon(call, number)
            assert pool.statistics().busy == 0
            await pool.aclose()
            assert pool.statistics().idle == 0
            nursery.cancel_scope.cancel()
    assert answered >= 150
