"""The watch of the HTTP/1.1 server: deadlines, clients that leave, the drain."""

from __future__ import annotations

import pytest
import trio

from sidecar.wire.http1_server import Connections, Http1Request, PeerGone, Stalled
from tests.wire.served import GET, Served, Slow, post


@pytest.fixture
async def nursery():
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


# --- clients that leave -----------------------------------------------------------------------


async def test_a_client_that_ended_its_side_still_gets_its_answer(nursery, autojump_clock):
    slow = Slow(10)
    served = Served(nursery, handler=slow)
    await served.send(GET)
    await trio.sleep(1)
    served.client.cut()
    began = trio.current_time()
    status, headers, body = await served.answer()
    assert (status, body, headers["connection"]) == (200, b"done", "close")
    assert slow.half_closed is not None
    assert slow.half_closed - began < 0.5
    assert slow.gone is None
    assert await served.closed() == b""


async def test_a_reset_is_noticed_while_the_handler_works(nursery, autojump_clock):
    slow = Slow(10)
    served = Served(nursery, handler=slow)
    await served.send(GET)
    await trio.sleep(1)
    served.client.reset()
    began = trio.current_time()
    await served.ended.wait()
    assert slow.gone is not None
    assert slow.gone - began < 0.5
    assert served.bugs == []


async def test_an_early_end_is_noticed_too(nursery, autojump_clock):
    slow = Slow(10)
    served = Served(nursery, handler=slow)
    await served.send(GET)
    served.client.cut()
    began = trio.current_time()
    assert (await served.answer())[2] == b"done"
    assert slow.half_closed is not None
    assert slow.half_closed - began < 0.5


async def test_look_notices_at_once(nursery, autojump_clock):
    facts = []

    async def handler(request: Http1Request) -> None:
        await request.look()
        facts.append(request.half_closed.is_set())
        served.client.cut()
        await request.look()
        facts.append(request.half_closed.is_set())
        await request.respond(200, [], b"")

    served = Served(nursery, handler=handler)
    await served.send(GET + GET)
    await served.answer()
    await served.answer()
    assert facts == [False, True, True, True]


@pytest.mark.parametrize(("age", "within"), [(0.05, 0), (60, 0.2)])
async def test_a_stream_notices_at_once(nursery, age, within, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.start(200, [])
        await request.half_closed.wait()
        ends.append(trio.current_time())
        await request.end()

    ends: list[float] = []
    served = Served(nursery, handler=handler)
    await served.send(GET)
    await trio.sleep(age)
    served.client.cut()
    began = trio.current_time()
    await served.ended.wait()
    assert ends[0] - began <= within


async def test_what_comes_while_the_handler_works_is_the_next_request(nursery, autojump_clock):
    slow = Slow(5)
    served = Served(nursery, handler=slow)
    await served.send(GET)
    await trio.sleep(1)
    for start in range(0, len(GET), 5):
        await served.send(GET[start : start + 5])
        await trio.sleep(0.1)
    assert (await served.answer())[2] == b"done"
    assert (await served.answer())[2] == b"done"
    # and a request after slow ones, when the watch had been reading
    served.handler = served.echo
    await trio.sleep(7)
    await served.send(GET)
    assert (await served.answer())[0] == 200


async def test_no_more_than_header_bytes_are_read_ahead(nursery, autojump_clock):
    slow = Slow(30)
    served = Served(nursery, handler=slow, capacity=1000)
    await served.send(GET)
    await trio.sleep(1)
    with trio.move_on_after(10) as scope:
        await served.send(b"x" * 100_000)
    assert scope.cancelled_caught
    assert served.ours._in.size == 1000  # the client is held back
    assert sum(map(len, served.client.sends)) > 100_000


async def test_a_client_that_is_gone_cannot_be_answered(nursery, autojump_clock):
    caught: list[type] = []

    async def handler(request: Http1Request) -> None:
        served.client.reset()
        for _ in range(2):
            try:
                await request.respond(200, [], b"")
            except PeerGone as error:
                caught.append(type(error))

    served = Served(nursery, handler=handler)
    await served.send(GET)
    await served.ended.wait()
    assert caught[0] is PeerGone
    assert served.requests[0].gone.is_set()


# --- deadlines --------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_after_300_seconds(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(GET)
    await served.answer()
    began = trio.current_time()
    assert await served.closed() == b""
    await served.ended.wait()
    assert trio.current_time() - began == pytest.approx(300, abs=0.5)
    assert len(served.connections) == 0


async def test_a_connection_in_use_is_not_idle(nursery, autojump_clock):
    served = Served(nursery)
    for _ in range(4):
        await trio.sleep(290)
        await served.send(GET)
        assert (await served.answer())[0] == 200


@pytest.mark.parametrize("quiet", [0, 100])
async def test_a_head_has_to_come_within_ten_seconds(nursery, quiet, autojump_clock):
    served = Served(nursery)
    await trio.sleep(quiet)
    began = trio.current_time()

    async def dribble() -> None:
        for start in range(len(GET) - 1):
            await served.send(GET[start : start + 1])
            await trio.sleep(1)

    nursery.start_soon(dribble)
    assert (await served.answer())[0] == 408
    assert trio.current_time() - began == pytest.approx(10, abs=0.5)
    assert await served.closed() == b""
    assert served.requests == []


async def test_a_body_has_to_go_on_within_thirty_seconds(nursery, autojump_clock):
    caught = []

    async def handler(request: Http1Request) -> None:
        try:
            await request.body(100)
        except PeerGone:
            caught.append(trio.current_time())
            raise

    served = Served(nursery, handler=handler)
    data = post(b"abcd")
    await served.send(data[:-4])
    for start in (-4, -3):
        await trio.sleep(25)
        await served.send(data[start : start + 1])
    began = trio.current_time()
    assert (await served.answer())[0] == 408
    assert trio.current_time() - began == pytest.approx(30, abs=0.5)
    assert await served.closed() == b""
    assert len(caught) == 1
    assert served.bugs == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_takes_nothing_is_closed(nursery, streamed, autojump_clock):
    caught = []

    async def handler(request: Http1Request) -> None:
        try:
            if streamed:
                await request.start(200, [])
                while True:
                    await request.send(b"x" * 100)
            else:
                await request.respond(200, [], b"x" * 300_000)
        except Stalled:
            caught.append(trio.current_time())
            raise

    served = Served(nursery, handler=handler, capacity=1000)
    began = trio.current_time()
    await served.send(GET)
    await served.ended.wait()
    assert trio.current_time() - began == pytest.approx(120, abs=6)
    assert len(caught) == 1
    assert served.bugs == []


async def test_a_slow_reader_is_not_stalled(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.respond(200, [], b"x" * 400_000)

    served = Served(nursery, handler=handler, capacity=70_000)
    await served.send(GET)
    received = 0
    while received < 400_000:
        await trio.sleep(100)
        received += len(await served.client.receive())
    assert served.requests[0].ended


# --- many connections -------------------------------------------------------------------------


async def test_a_drain_closes_idle_connections_and_says_so_on_others(nursery, autojump_clock):
    connections = Connections()
    idle = Served(nursery, connections=connections)
    waiting = Served(nursery, connections=connections)
    busy = Served(nursery, connections=connections, handler=Slow(5))
    for served in (idle, waiting, busy):
        await served.send(GET)
    for served in (idle, waiting):
        await served.answer()
    await trio.sleep(100)
    await busy.answer()
    await busy.send(GET)
    await trio.sleep(1)
    assert len(connections) == 3
    connections.begin_closing()
    began = trio.current_time()
    await trio.sleep(0.5)
    await waiting.send(GET)  # was on its way
    assert (await waiting.answer())[1]["connection"] == "close"
    assert await waiting.closed() == b""
    assert await idle.closed() == b""
    assert trio.current_time() - began == pytest.approx(1, abs=0.3)
    status, headers, _ = await busy.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await busy.closed() == b""
    assert len(connections) == 0


async def test_a_drain_closes_what_has_just_become_idle(nursery, autojump_clock):
    served = Served(nursery, handler=Slow(2))
    await served.send(GET)
    await served.answer()
    served.connections.begin_closing()
    began = trio.current_time()
    assert await served.closed() == b""
    assert trio.current_time() - began == pytest.approx(1, abs=0.3)


async def test_room_is_made_by_the_longest_idle_one(nursery, autojump_clock):
    connections = Connections()
    assert not connections.close_longest_idle()
    first = Served(nursery, connections=connections)
    second = Served(nursery, connections=connections)
    busy = Served(nursery, connections=connections, handler=Slow(5))
    await busy.send(GET)
    await second.send(GET)
    await second.answer()
    await first.send(GET)
    await first.answer()
    assert connections.close_longest_idle()
    await second.ended.wait()
    assert len(connections) == 2
    assert connections.close_longest_idle()
    await first.ended.wait()
    assert not connections.close_longest_idle()
    assert (await busy.answer())[0] == 200
