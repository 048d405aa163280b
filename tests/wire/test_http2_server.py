"""The server side of an HTTP/2 connection, against h2 and against our own client."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from h2.events import (
    ConnectionTerminated,
    PingAckReceived,
    PingReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sidecar.core.types import Request
from sidecar.wire.exchange import Progress
from sidecar.wire.http2 import Http2Connection
from sidecar.wire.http2_server import (
    Http2Limits,
    Http2ServerConnection,
    ServerStream,
    StreamGone,
)
from tests.wire.h2_peer import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    REQUEST,
    Peer,
    frame,
    rst,
    settings,
    settle,
    split,
    window_update,
)
from tests.wire.memory import MemoryWire, memory_wire_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

OK = [(":status", "200"), ("content-type", "application/grpc")]
DONE = [("grpc-status", "0")]


async def echo(stream: ServerStream) -> None:
    body = []
    while data := await stream.receive():
        body.append(data)
    await stream.send_headers(OK)
    await stream.send_data(b"".join(body))
    await stream.send_trailers(DONE)


class Rig:
    def __init__(
        self,
        connection: Http2ServerConnection,
        ours: MemoryWire,
        peer: Peer,
        bugs: list[BaseException],
    ) -> None:
        self.connection = connection
        self.ours = ours
        self.peer = peer
        self.theirs = peer.wire
        self.bugs = bugs
        self.over = trio.Event()

    def ask(self, body: bytes | None = b"", *, end: bool = True) -> int:
        """Queue a request at the client; its stream id."""
        stream_id = self.peer.h2.get_next_available_stream_id()
        self.peer.h2.send_headers(stream_id, REQUEST, end_stream=end and not body)
        if body:
            self.peer.h2.send_data(stream_id, body, end_stream=end)
        return stream_id


@asynccontextmanager
async def rigged(
    handler: Callable[[ServerStream], Awaitable[None]],
    *,
    limits: Http2Limits | None = None,
    start: bool = True,
    capacity: int | None = None,
    **peer: int,
) -> AsyncIterator[Rig]:
    ours, theirs = memory_wire_pair(capacity=capacity)
    bugs: list[BaseException] = []
    async with trio.open_nursery() as nursery:
        connection = Http2ServerConnection(
            ours,
            handler,
            limits=limits or Http2Limits(max_streams=100),
            on_bug=bugs.append,
        )
        rig = Rig(connection, ours, Peer(theirs, client=True, **peer), bugs)

        async def run() -> None:
            await connection.serve()
            rig.over.set()

        nursery.start_soon(run)
        if start:
            await rig.peer.start()
            await rig.peer.expect(RemoteSettingsChanged)
            await settle()
        with trio.fail_after(10_000):
            yield rig
        nursery.cancel_scope.cancel()
    assert rig.bugs == []


# --- requests and replies ---------------------------------------------------------------------


async def test_a_request_and_its_reply(autojump_clock):
    seen = []

    async def handler(stream: ServerStream) -> None:
        seen.append(stream.headers)
        await echo(stream)

    async with rigged(handler) as rig:
        stream_id = rig.ask(b"hello")
        await rig.peer.flush()
        head = await rig.peer.expect(ResponseReceived)
        trailers = await rig.peer.expect(TrailersReceived)
        await rig.peer.ended(stream_id)
        assert seen == [REQUEST]
        fields: Any = (head.headers, trailers.headers)
        assert fields == (OK, DONE)
        assert rig.peer.bodies[stream_id] == b"hello"
        await settle()
        assert rig.connection.streams == 0


async def test_frames_of_one_step_leave_in_one_send(autojump_clock):
    async with rigged(echo) as rig:
        before = len(rig.ours.sends)
        rig.ask(b"a")
        rig.ask(b"b")
        await rig.peer.flush()
        await settle()
        assert len(rig.ours.sends) - before == 1


async def test_bytes_that_were_read_before_are_taken_first(autojump_clock):
    ours, theirs = memory_wire_pair()
    async with trio.open_nursery() as nursery:
        peer = Peer(theirs, client=True)
        peer.h2.initiate_connection()
        peer.h2.send_headers(1, REQUEST, end_stream=True)
        first = peer.h2.data_to_send()
        limits = Http2Limits(max_streams=7)
        nursery.start_soon(lambda: Http2ServerConnection(ours, echo, limits=limits).serve(first))
        changed = await peer.expect(RemoteSettingsChanged)
        assert changed.changed_settings[3].new_value == 7
        await peer.ended(1)
        theirs.cut()


async def test_a_request_is_credited_as_it_is_taken(autojump_clock):
    go = trio.Event()

    async def handler(stream: ServerStream) -> None:
        await go.wait()
        await echo(stream)

    async with rigged(handler) as rig:
        stream_id = rig.ask(end=False)
        for _ in range(64):
            rig.peer.h2.send_data(stream_id, bytes(16384))
        await rig.peer.flush()
        await settle()
        assert rig.peer.h2.local_flow_control_window(stream_id) == 0
        updates = [each for each in rig.peer.events if isinstance(each, WindowUpdated)]
        assert stream_id not in [each.stream_id for each in updates]
        go.set()
        await rig.peer.expect(WindowUpdated, stream_id)
        rig.peer.h2.end_stream(stream_id)
        await rig.peer.flush()
        await rig.peer.ended(stream_id)
        assert len(rig.peer.bodies[stream_id]) == 1 << 20


async def test_an_answer_before_the_end_of_the_request_stops_it(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        await stream.send_trailers([(":status", "200"), ("grpc-status", "8")])

    async with rigged(handler) as rig:
        stream_id = rig.ask(b"part", end=False)
        await rig.peer.flush()
        await rig.peer.expect(ResponseReceived)
        await rig.peer.ended(stream_id)
        assert (await rig.peer.expect(StreamReset)).error_code == 0
        assert rig.bugs == []


# --- windows ----------------------------------------------------------------------------------


async def test_tiny_windows_in_odd_order(autojump_clock):
    """D84: initial window 1, credit byte by byte and in lumps, one stream reset half way."""
    size = 50_000

    async def handler(stream: ServerStream) -> None:
        await stream.send_headers(OK)
        await stream.send_data(bytes([stream.id]) * size)
        await stream.send_trailers(DONE)

    async with rigged(handler, initial_window_size=1) as rig:
        peer = rig.peer
        peer.greedy = False
        streams = [rig.ask() for _ in range(4)]
        await peer.flush()
        choose = random.Random(84)
        got = dict.fromkeys(streams, 0)
        granted = dict.fromkeys(streams, 1)
        unpaid = 0
        ended: set[int] = set()
        victim = streams[1]

        def note() -> None:
            nonlocal unpaid
            for kind, flags, where, body in split(rig.theirs.drain()):
                if kind == DATA:
                    assert body == bytes([where]) * len(body)
                    got[where] += len(body)
                    unpaid += len(body)
                elif kind == 1 and flags & 1:
                    ended.add(where)

        while len(ended) < 3:
            where = choose.choice([each for each in streams if each not in ended])
            if where == victim and got[victim] > size // 2:
                await rig.theirs.send(rst(victim, 8))
                streams.remove(victim)
                continue
            lump = 16383 if granted[where] > 3 else 1
            granted[where] += lump
            await rig.theirs.send(window_update(where, lump))
            if unpaid > 60_000:
                await rig.theirs.send(window_update(0, unpaid))
                unpaid = 0
            sends = len(rig.ours.sends)
            await settle()
            assert len(rig.ours.sends) - sends <= 8  # no busy loop
            note()
            assert all(got[each] <= granted[each] for each in streams)
        assert all(got[each] == size for each in ended)
        assert victim not in ended


async def test_a_slow_reader_does_not_hold_up_another(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        await stream.send_headers(OK)
        await stream.send_data(bytes(40_000))
        await stream.send_trailers(DONE)

    async with rigged(handler, initial_window_size=30_000) as rig:
        rig.peer.greedy = False
        slow = rig.ask()
        await rig.peer.flush()
        await settle()
        fast = rig.ask()
        rig.peer.h2.increment_flow_control_window(10_000, fast)
        rig.peer.h2.increment_flow_control_window(100_000)
        await rig.peer.flush()
        await rig.peer.ended(fast)
        assert len(rig.peer.bodies[fast]) == 40_000
        assert len(rig.peer.bodies[slow]) == 30_000


async def test_a_reader_that_takes_nothing_loses_its_stream(autojump_clock):
    ends = []

    async def handler(stream: ServerStream) -> None:
        try:
            await stream.send_headers(OK)
            await stream.send_data(bytes(200_000))
        except StreamGone as gone:
            ends.append((trio.current_time(), gone.detail))
            raise

    limits = Http2Limits(max_streams=5, stall_seconds=120)
    async with rigged(handler, limits=limits) as rig:
        rig.peer.greedy = False
        rig.ask()
        await rig.peer.flush()
        await settle()
        await trio.sleep(100)
        rig.peer.h2.increment_flow_control_window(1)
        rig.peer.h2.increment_flow_control_window(1, 1)
        await rig.peer.flush()  # a byte is progress
        await settle()
        start = trio.current_time()
        reset = await rig.peer.expect(StreamReset)
        assert reset.error_code == 8
        assert ends[0][1] == "the client takes no bytes"
        assert ends[0][0] - start == pytest.approx(120)
        assert not rig.over.is_set()


async def test_a_client_that_takes_no_byte_is_given_up(autojump_clock):
    limits = Http2Limits(max_streams=5, stall_seconds=120)
    async with rigged(echo, limits=limits, capacity=1000) as rig:
        rig.ask(b"x" * 16_000)
        await rig.theirs.send(rig.peer.h2.data_to_send())
        start = trio.current_time()
        await rig.over.wait()
        assert trio.current_time() - start == pytest.approx(120)
        assert rig.ours.closed


async def test_a_send_that_was_given_up_does_not_mix_with_the_next(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        await stream.send_headers(OK)
        with trio.move_on_after(1):
            await stream.send_data(b"a" * 100_000)
        await stream.send_data(b"b" * 10)
        await stream.send_trailers(DONE)

    async with rigged(handler) as rig:
        rig.peer.greedy = False
        rig.ask()
        await rig.peer.flush()
        await trio.sleep(5)
        rig.peer.h2.increment_flow_control_window(1 << 20)
        rig.peer.h2.increment_flow_control_window(1 << 20, 1)
        await rig.peer.flush()
        await rig.peer.ended(1)
        assert rig.peer.bodies[1] == b"a" * 100_000 + b"b" * 10


# --- endings ----------------------------------------------------------------------------------


async def test_a_handler_learns_that_the_client_has_gone(autojump_clock):
    codes = []

    async def handler(stream: ServerStream) -> None:
        await stream.gone.wait()
        for attempt in (
            stream.receive(),
            stream.send_headers(OK),
            stream.send_data(b"x"),
            stream.send_trailers(DONE),
        ):
            with pytest.raises(StreamGone) as caught:
                await attempt
            codes.append(caught.value.code)

    async with rigged(handler) as rig:
        stream_id = rig.ask(end=False)
        rig.ask(end=False)
        await rig.peer.flush()
        await settle()
        rig.peer.h2.reset_stream(stream_id, 8)
        await rig.peer.flush()
        await settle()
        assert codes == [8, 8, 8, 8]
        del codes[:]
        rig.theirs.cut()
        await rig.over.wait()
        assert codes == [None, None, None, None]


async def test_a_client_that_has_gone_is_no_bug_in_a_handler_of_several_tasks(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive)
            nursery.start_soon(trio.sleep_forever)

    async with rigged(handler) as rig:
        stream_id = rig.ask(end=False)
        await rig.peer.flush()
        await settle()
        rig.peer.h2.reset_stream(stream_id, 8)
        await rig.peer.flush()
        await settle()
        assert rig.connection.streams == 0
        assert rig.bugs == []


async def test_bytes_that_came_before_the_end_are_still_read(autojump_clock):
    got = []

    async def handler(stream: ServerStream) -> None:
        await stream.gone.wait()
        got.append(await stream.receive())
        with pytest.raises(StreamGone):
            await stream.receive()

    async with rigged(handler) as rig:
        stream_id = rig.ask(b"x", end=False)
        rig.peer.h2.reset_stream(stream_id)
        await rig.peer.flush()
        await settle()
        assert got == [b"x"]


@pytest.mark.parametrize("how", ["raises", "returns", "returns half way"])
async def test_a_bug_costs_its_own_stream(autojump_clock, how):
    async def handler(stream: ServerStream) -> None:
        if stream.id == 3:
            await echo(stream)
        elif how == "raises":
            raise ValueError("oops")
        elif how == "returns half way":
            await stream.send_headers(OK)

    async with rigged(handler) as rig:
        rig.ask()
        rig.ask(b"fine")
        await rig.peer.flush()
        reset = await rig.peer.expect(StreamReset)
        assert (reset.stream_id, reset.error_code) == (1, 2)
        await rig.peer.ended(3)
        [bug] = rig.bugs
        assert isinstance(bug, ValueError if how == "raises" else RuntimeError)
        rig.bugs.clear()


async def test_a_stream_that_was_reset_keeps_its_place_until_its_handler_ended(autojump_clock):
    release = trio.Event()
    begun = []

    async def handler(stream: ServerStream) -> None:
        begun.append(stream.id)
        if stream.id <= 3:
            await release.wait()
        else:
            await echo(stream)

    async with rigged(handler, limits=Http2Limits(max_streams=2)) as rig:
        for _ in range(2):
            rig.peer.h2.reset_stream(rig.ask(end=False), 8)
        rig.ask()
        await rig.peer.flush()
        reset = await rig.peer.expect(StreamReset)
        assert (reset.stream_id, reset.error_code) == (5, 7)
        assert sorted(begun) == [1, 3]
        release.set()
        await settle()
        rig.ask()
        await rig.peer.flush()
        await rig.peer.ended(7)


async def test_more_streams_than_announced_are_refused_and_then_the_client_is(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        await stream.gone.wait()

    async with rigged(handler, limits=Http2Limits(max_streams=1)) as rig:
        rig.peer.h2.remote_settings[3] = 1000  # as if it had not read the limit
        rig.peer.h2.remote_settings.acknowledge()
        for _ in range(202):
            rig.ask()
        await rig.theirs.send(rig.peer.h2.data_to_send())
        end = await rig.peer.expect(ConnectionTerminated)
        assert end.error_code == 0xB
        await rig.over.wait()


async def test_rapid_resets_end_the_connection(autojump_clock):
    async with rigged(echo) as rig:
        for _ in range(201):
            rig.peer.h2.reset_stream(rig.ask(end=False), 8)
        await rig.theirs.send(rig.peer.h2.data_to_send())
        assert (await rig.peer.expect(ConnectionTerminated)).error_code == 0xB
        await rig.over.wait()


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", PREFACE + frame(DATA, 0, 1, b"x")])
async def test_a_client_that_breaks_the_protocol_gets_a_goaway(autojump_clock, bad):
    async with rigged(echo, start=False) as rig:
        await rig.theirs.send(bad)
        await rig.over.wait()
        assert split(rig.theirs.drain())[-1][0] == GOAWAY
        assert rig.ours.closed


async def test_a_client_that_does_not_begin_is_not_waited_for(autojump_clock):
    async with rigged(echo, start=False) as rig:
        start = trio.current_time()
        await rig.theirs.send(PREFACE)
        await rig.over.wait()
        assert trio.current_time() - start == pytest.approx(10)


async def test_a_client_that_has_begun_may_be_idle(autojump_clock):
    async with rigged(echo) as rig:
        for stream_id in (1, 3, 5):
            await trio.sleep(299)
            rig.ask(b"still here")
            await rig.peer.flush()
            await rig.peer.ended(stream_id)


async def test_a_client_that_is_idle_for_too_long_is_left(autojump_clock):
    async with rigged(echo) as rig:
        rig.ask(b"last")
        await rig.peer.flush()
        await rig.peer.ended(1)
        start = trio.current_time()
        await rig.over.wait()
        assert 300 <= trio.current_time() - start <= 601
        last = [frame for frame in split(rig.theirs.drain()) if frame[0] == GOAWAY][-1]
        assert last[3] == bytes(3) + b"\1" + bytes(4)  # all was answered, NO_ERROR


async def test_a_silent_stream_is_not_idle(autojump_clock):
    released = trio.Event()

    async def handler(stream: ServerStream) -> None:
        await released.wait()
        await echo(stream)

    async with rigged(handler) as rig:
        rig.ask(b"slow")
        await rig.peer.flush()
        await trio.sleep(3600)
        released.set()
        await rig.peer.ended(1)


@pytest.mark.parametrize("seconds", [9.0, 11.0])
async def test_a_header_block_has_to_come_in_time(autojump_clock, seconds):
    async with rigged(echo) as rig:
        rig.peer.h2.send_headers(1, REQUEST, end_stream=True)
        ((_, _, _, block),) = split(rig.peer.h2.data_to_send())
        await rig.theirs.send(frame(HEADERS, 1, 1, block[:2]))
        await trio.sleep(seconds / 2)
        await rig.theirs.send(frame(CONTINUATION, 0, 1, block[2:4]))
        await trio.sleep(seconds / 2)
        if seconds > 10:
            await rig.over.wait()
            assert rig.ours.closed
            return
        await rig.theirs.send(frame(CONTINUATION, 4, 1, block[4:]))
        await rig.peer.ended(1)
        await trio.sleep(30)  # the limit is off again
        assert not rig.over.is_set()


async def test_an_idle_connection_can_be_left_at_once(autojump_clock):
    async with rigged(echo) as rig:
        assert rig.connection.idle
        start = trio.current_time()
        rig.connection.leave()
        await rig.peer.expect(ConnectionTerminated)
        await rig.over.wait()
        assert trio.current_time() - start < 1


# --- PING and drain ---------------------------------------------------------------------------


async def test_streams_share_their_pings(autojump_clock):
    async def handler(stream: ServerStream) -> None:
        while not stream.gone.is_set():
            stream.keep_alive()
            await trio.sleep(4)

    async with rigged(handler) as rig:
        for _ in range(5):
            rig.ask()
        await rig.peer.flush()
        await trio.sleep(10)
        await settle()
        pings = [kind for kind, *_ in split(rig.theirs.drain()) if kind == PING]
        assert len(pings) == 3
        rig.theirs.cut()
        await rig.over.wait()


async def test_a_drain_serves_what_is_under_way_and_refuses_the_rest(autojump_clock):
    """GOAWAY(2^31-1), a round trip in which a stream is still taken, GOAWAY(its id)."""
    finish = trio.Event()

    async def handler(stream: ServerStream) -> None:
        await finish.wait()
        await echo(stream)

    async with rigged(handler) as rig:
        rig.ask(b"one")
        await rig.peer.flush()
        await settle()
        rig.theirs.drain()
        rig.connection.drain()
        rig.connection.drain()
        await settle()
        [away, ping] = split(rig.theirs.drain())
        assert (away[0], away[3][:4]) == (GOAWAY, b"\x7f\xff\xff\xff")
        assert ping[0] == PING
        rig.ask(b"two")
        await rig.peer.flush(frame(PING, 1, 0, ping[3]))
        await settle()
        frames = [each for each in split(rig.theirs.drain()) if each[0] == GOAWAY]
        assert [each[3] for each in frames] == [b"\0\0\0\3\0\0\0\0"]
        rig.ask(b"three")
        await rig.peer.flush()
        reset = await rig.peer.expect(StreamReset)
        assert (reset.stream_id, reset.error_code) == (5, 7)
        assert not rig.over.is_set()
        finish.set()
        await rig.peer.ended(1)
        await rig.peer.ended(3)
        await rig.over.wait()
        assert rig.ours.closed


async def test_a_drain_does_not_wait_for_a_client_that_does_not_answer(autojump_clock):
    async with rigged(echo) as rig:
        start = trio.current_time()
        rig.connection.drain()
        await rig.over.wait()
        assert trio.current_time() - start == pytest.approx(1)


async def test_a_ping_of_the_client_is_answered(autojump_clock):
    async with rigged(echo) as rig:
        rig.peer.h2.ping(b"abcdefgh")
        await rig.peer.flush()
        assert (await rig.peer.expect(PingAckReceived)).ping_data == b"abcdefgh"
        assert not any(isinstance(each, PingReceived | StreamEnded) for each in rig.peer.events)


# --- our own client ---------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=5), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=15, deadline=None)
def test_both_roles_together_whatever_the_sizes(sizes, seed):
    """Bodies cross both ways over a wire of little capacity, and nothing is left behind."""
    bugs: list[BaseException] = []

    async def main() -> None:
        ours, theirs = memory_wire_pair(capacity=random.Random(seed).choice([100, 1000, 50_000]))
        limits = Http2Limits(max_streams=100)
        server = Http2ServerConnection(theirs, echo, limits=limits, on_bug=bugs.append)
        client = Http2Connection(
            ours, scheme="http", authority="a", header_bytes=65536, on_bug=bugs.append
        )

        async def ask(size: int) -> None:
            body = random.Random(size).randbytes(size)
            progress = Progress()
            exchange = await client.open_stream(Request("POST", "/", [], body), progress)
            got = []
            while data := await exchange.receive():
                got.append(data)
            assert b"".join(got) == body
            assert exchange.trailers == DONE

        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve)
            nursery.start_soon(client.run)
            await client.settled.wait()
            async with trio.open_nursery() as calls:
                for size in sizes:
                    calls.start_soon(ask, size)
            await settle()
            assert client.streams == server.streams == 0
            client.leave()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert bugs == []


async def test_a_caller_who_leaves_is_noticed_by_the_handler(autojump_clock):
    gone = trio.Event()

    async def handler(stream: ServerStream) -> None:
        await stream.gone.wait()
        gone.set()

    ours, theirs = memory_wire_pair()
    async with trio.open_nursery() as nursery:
        limits = Http2Limits(max_streams=100)
        nursery.start_soon(lambda: Http2ServerConnection(theirs, handler, limits=limits).serve())
        client = Http2Connection(ours, scheme="http", authority="a", header_bytes=65536)
        nursery.start_soon(client.run)
        await client.settled.wait()
        with trio.move_on_after(5):
            await client.open_stream(Request("GET", "/", [], b""), Progress())
        await gone.wait()
        assert client.streams == 0
        client.leave()


async def test_settings_change_while_serving(autojump_clock):
    async with rigged(echo) as rig:
        await rig.theirs.send(settings(window=0))
        rig.ask(b"hello")
        await rig.theirs.send(rig.peer.h2.data_to_send())
        await settle()
        assert DATA not in [kind for kind, *_ in split(rig.theirs.drain())]
        await rig.theirs.send(settings(window=100))
        await settle()
        assert DATA in [kind for kind, *_ in split(rig.theirs.drain())]
