"""The client side of one HTTP/2 connection, against h2 itself."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import hpack
import pytest
import trio
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingReceived,
    RequestReceived,
    StreamReset,
    WindowUpdated,
)

from sidecar.core.types import Break, Phase, ReplyHead, Request
from sidecar.wire.exchange import ExchangeBroken, Progress
from sidecar.wire.http2 import Http2Connection, NotBegun
from sidecar.wire.http2_link import Lost
from tests.wire.h2_peer import (
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    Peer,
    frame,
    goaway,
    rst,
    settings,
    settle,
    split,
)
from tests.wire.memory import Fault, MemoryWire, memory_wire_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from sidecar.core.types import Headers

ASK = Request("POST", "/a2a.v1.A2AService/SendMessage", [("te", "trailers")], b"hello")
BARE = Request("GET", "/card", [], b"")


def text(headers: Iterable[tuple[Any, Any]]) -> Headers:
    return [(str(name), str(value)) for name, value in headers]


class Rig:
    """A connection, its wire and the peer at the other end."""

    def __init__(self, nursery: trio.Nursery, peer: Peer, ours: MemoryWire, **options) -> None:
        self.nursery = nursery
        self.peer = peer
        self.ours = ours
        self.theirs = peer.wire
        self.bugs: list[BaseException] = []
        self.connection = Http2Connection(
            ours,
            scheme="http",
            authority="agent:50051",
            header_bytes=65536,
            on_bug=self.bugs.append,
            **options,
        )
        self.over = trio.Event()
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        await self.connection.run()
        self.over.set()

    def ask(self, request: Request = ASK) -> Asked:
        return Asked(self, request)


class Asked:
    """A request under way in a task of its own."""

    def __init__(self, rig: Rig, request: Request) -> None:
        self.progress = Progress()
        self.exchange: Any = None
        self.error: ExchangeBroken | NotBegun | None = None
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self._rig = rig
        rig.nursery.start_soon(self._go, request)

    async def _go(self, request: Request) -> None:
        with self.scope:
            try:
                self.exchange = await self._rig.connection.open_stream(request, self.progress)
            except (ExchangeBroken, NotBegun) as error:
                self.error = error
        self.done.set()

    async def head(self) -> ReplyHead:
        await self.done.wait()
        assert self.error is None, self.error
        head: ReplyHead = self.exchange.head
        return head

    async def body(self) -> bytes:
        await self.head()
        chunks = []
        while data := await self.exchange.receive():
            chunks.append(data)
        return b"".join(chunks)

    async def broken(self):
        """The facts of a failure, at the head or in the body."""
        await self.done.wait()
        if self.error is None:
            with pytest.raises(ExchangeBroken) as caught:
                await self.body()
            return caught.value.broken
        assert isinstance(self.error, ExchangeBroken)
        return self.error.broken


@asynccontextmanager
async def rigged(*, start: bool = True, peer: dict | None = None, **options) -> AsyncIterator[Rig]:
    ours, theirs = memory_wire_pair()
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery, Peer(theirs, **(peer or {})), ours, **options)
        if start:
            await rig.peer.start()
            await rig.connection.settled.wait()
            await settle()
        with trio.fail_after(3000):
            yield rig
        assert rig.bugs == []
        nursery.cancel_scope.cancel()


# --- the beginning ----------------------------------------------------------------------------


async def test_a_request_and_its_reply(autojump_clock):
    async with rigged() as rig:
        sent: list[Phase] = []
        asked = rig.ask()
        asked.progress.on_sent = lambda: sent.append(asked.progress.phase)
        event = await rig.peer.expect(RequestReceived)
        assert text(event.headers) == [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "agent:50051"),
            (":path", "/a2a.v1.A2AService/SendMessage"),
            ("te", "trailers"),
        ]
        await rig.peer.ended()
        assert rig.peer.bodies[1] == b"hello"
        assert asked.progress == Progress(phase=Phase.WAITING, written=True)
        assert sent == [Phase.WAITING]
        rig.peer.h2.send_headers(
            1, [(":status", "200"), ("x-dup", "b"), ("x", "1"), ("x-dup", "a")]
        )
        rig.peer.h2.send_data(1, b"wor")
        rig.peer.h2.send_data(1, b"ld")
        rig.peer.h2.send_headers(1, [("grpc-status", "0"), ("x-t", "1")], end_stream=True)
        await rig.peer.flush()
        assert await asked.head() == ReplyHead(200, [("x-dup", "b"), ("x", "1"), ("x-dup", "a")])
        assert asked.progress.phase is Phase.RECEIVING
        assert await asked.body() == b"world"
        assert asked.exchange.trailers == [("grpc-status", "0"), ("x-t", "1")]
        assert await asked.exchange.receive() == b""
        assert rig.connection.streams == 0


async def test_a_reply_that_is_only_trailers_is_a_head(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        rig.peer.h2.send_headers(1, [(":status", "200"), ("grpc-status", "12")], end_stream=True)
        await rig.peer.flush()
        assert await asked.head() == ReplyHead(200, [("grpc-status", "12")])
        assert await asked.body() == b""
        assert asked.exchange.trailers == []


async def test_nothing_is_asked_before_the_peers_settings(autojump_clock):
    async with rigged(start=False) as rig:
        asked = rig.ask()
        await settle()
        assert [kind for kind, *_ in split(rig.theirs.drain())] == [4]
        assert not asked.progress.written
        await rig.theirs.send(settings())
        await settle()
        assert HEADERS in [kind for kind, *_ in split(rig.theirs.drain())]
        assert asked.progress.written


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"H", frame(PING, 0, 0, bytes(8))]
)
async def test_a_peer_without_http2_is_noticed_at_once(autojump_clock, greeting):
    async with rigged(start=False) as rig:
        asked = rig.ask()
        await settle()
        before = trio.current_time()
        await rig.theirs.send(greeting)
        await rig.connection.settled.wait()
        assert trio.current_time() == before
        assert rig.connection.lost is not None
        assert rig.connection.lost.cause is Break.NOT_HTTP2
        broken = await asked.broken()
        assert (broken.cause, broken.written) == (Break.NOT_HTTP2, False)


@pytest.mark.parametrize("cause", [Break.CERTIFICATE_ALERT, Break.RESET])
async def test_what_the_wire_knows_of_its_end_is_passed_on(autojump_clock, cause):
    async with rigged(start=False) as rig:
        rig.theirs.break_input(cause)
        await rig.connection.settled.wait()
        assert rig.connection.lost == Lost(cause, "broken by test")


# --- written ----------------------------------------------------------------------------------


async def test_the_first_send_of_a_request_fails_before_the_kernel_took_any(autojump_clock):
    async with rigged() as rig:
        rig.ours.fail_next_send()
        asked = rig.ask()
        broken = await asked.broken()
        assert (broken.cause, broken.written, broken.phase) == (Break.RESET, False, Phase.SENDING)
        assert rig.theirs.drain() != b""  # the handshake, and no request
        await rig.over.wait()


async def test_a_send_that_fails_later_counts_as_sent(autojump_clock):
    async with rigged() as rig:
        rig.ours.fail_next_send(after=1)
        broken = await rig.ask().broken()
        assert (broken.cause, broken.written) == (Break.RESET, True)


async def test_a_request_behind_a_stuck_send_is_not_written(autojump_clock):
    async with rigged() as rig:
        await settle()
        rig.ours.stall()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await settle()
        assert (first.progress.written, second.progress.written) == (True, False)
        assert second.progress.phase is Phase.DIALING
        rig.theirs.cut()
        broken = await first.broken()
        assert (broken.cause, broken.written) == (Break.EOF, True)
        broken = await second.broken()
        assert (broken.cause, broken.written) == (Break.EOF, False)


async def test_a_call_that_leaves_before_its_turn_leaves_no_trace(autojump_clock):
    async with rigged() as rig:
        await settle()
        rig.ours.stall()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await settle()
        second.scope.cancel()
        await second.done.wait()
        assert rig.connection.streams == 1
        rig.ours.resume()
        await rig.peer.ended(1)
        assert not second.progress.written
        await rig.peer.reply(1, b"x")
        assert await first.body() == b"x"
        assert len([event for event in rig.peer.events if isinstance(event, RequestReceived)]) == 1


async def test_a_call_that_leaves_later_resets_its_stream(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        asked.scope.cancel()
        event = await rig.peer.expect(StreamReset)
        assert (event.stream_id, event.error_code) == (1, 8)
        assert rig.connection.streams == 0
        other = rig.ask()
        await rig.peer.ended(3)
        await rig.peer.reply(3, b"fine")
        assert await other.body() == b"fine"


async def test_a_cancelled_call_leaves_no_half_frame(autojump_clock):
    """Its DATA frame is half sent when it leaves; the connection stays usable."""
    ours, theirs = memory_wire_pair(capacity=5000)
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery, Peer(theirs), ours)
        await rig.peer.start()
        asked = rig.ask(Request("POST", "/", [], b"x" * 60_000))
        await settle()
        asked.scope.cancel()
        await asked.done.wait()
        other = rig.ask()
        await rig.peer.expect(StreamReset, 1)
        await rig.peer.ended(3)
        await rig.peer.reply(3, b"fine")
        assert await other.body() == b"fine"
        nursery.cancel_scope.cancel()


async def test_after_a_failed_write_the_answer_is_still_read(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask(Request("POST", "/", [], b"x" * 200_000))
        await rig.peer.expect(RequestReceived)
        await settle()
        rig.ours.fail_next_send(after=10)
        await rig.peer.read()  # gives credit, so that more is sent, which fails
        await settle()
        assert not asked.done.is_set()
        late = rig.ask()
        broken = await late.broken()
        assert (broken.cause, broken.written) == (Break.RESET, False)
        rig.peer.h2.send_headers(1, [(":status", "413")])
        await rig.peer.flush()
        assert (await asked.head()).status == 413
        await rig.peer.flush(frame(DATA, 1, 1, b"too large"))
        assert await asked.body() == b"too large"


async def test_after_a_failed_write_the_peer_has_a_second_to_say_why(autojump_clock):
    async with rigged() as rig:
        rig.ours.fail_next_send(after=3)
        asked = rig.ask()
        await settle()
        before = trio.current_time()
        broken = await asked.broken()
        assert trio.current_time() - before == pytest.approx(1.0)
        assert (broken.cause, broken.written) == (Break.RESET, True)


# --- bodies -----------------------------------------------------------------------------------


async def test_a_large_body_obeys_the_windows(autojump_clock):
    async with rigged() as rig:
        rig.peer.greedy = False
        asked = rig.ask(Request("POST", "/", [], bytes(200_000)))
        await settle()
        while rig.theirs.has_input():
            await rig.peer.read()
            await settle()
        assert len(rig.peer.bodies[1]) == 65535
        assert asked.progress == Progress(phase=Phase.SENDING, written=True)
        sends = len(rig.ours.sends)
        await trio.sleep(100)
        assert len(rig.ours.sends) == sends  # waiting is not polling
        rig.peer.h2.acknowledge_received_data(65535, 1)
        rig.peer.greedy = True
        await rig.peer.flush()
        await rig.peer.ended()
        assert len(rig.peer.bodies[1]) == 200_000
        assert asked.progress.phase is Phase.WAITING


async def test_ten_megabytes_are_not_copied_again_and_again(autojump_clock):
    async with rigged(peer={"initial_window_size": 1 << 24}) as rig:
        body = bytes(range(256)) * 40960
        asked = rig.ask(Request("POST", "/", [], body))
        chunks = []
        size = 0
        rig.peer.h2.increment_flow_control_window((1 << 24) - 65535)
        await rig.peer.flush()
        while size < len(body):
            data = await rig.theirs.receive()
            for event in rig.peer.h2.receive_data(data):
                if isinstance(event, DataReceived):
                    chunks.append(event.data)
                    size += len(event.data)
        assert b"".join(chunks) == body
        assert max(map(len, rig.ours.sends)) < 100_000
        assert asked.progress.phase is Phase.WAITING


async def test_large_bodies_take_turns(autojump_clock):
    async with rigged(peer={"initial_window_size": 1 << 20}) as rig:
        rig.peer.h2.increment_flow_control_window(1 << 20)
        await rig.peer.flush()
        for letter in (b"a", b"b"):
            rig.ask(Request("POST", "/", [], letter * 300_000))
        rig.ask(Request("POST", "/", [], b"small"))
        await settle()
        order = [where for kind, _, where, _ in split(b"".join(rig.ours.sends)) if kind == DATA]
        assert set(order[:3]) == {1, 3, 5}
        assert all(one != other for one, other in itertools.pairwise(order[:20]))


async def test_a_reply_is_credited_as_it_is_taken(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        rig.peer.h2.send_headers(1, [(":status", "200")])
        await rig.peer.flush()
        await asked.head()
        for _ in range(64):
            rig.peer.h2.send_data(1, bytes(16384))
            await rig.peer.flush()
        assert rig.peer.h2.local_flow_control_window(1) == 0
        await settle()
        await asked.exchange.receive()
        await rig.peer.expect(WindowUpdated, 1)
        assert rig.peer.h2.local_flow_control_window(1) == 1 << 20


async def test_settings_that_shrink_the_window_below_zero(autojump_clock):
    async with rigged() as rig:
        rig.peer.greedy = False
        rig.ask(Request("POST", "/", [], bytes(70_000)))
        await settle()
        await rig.theirs.send(settings(window=10))
        rig.theirs.drain()
        await rig.theirs.send(frame(8, 0, 0, (100_000).to_bytes(4, "big")))
        await settle()
        assert DATA not in [kind for kind, *_ in split(rig.theirs.drain())]
        await rig.theirs.send(frame(8, 0, 1, (65535).to_bytes(4, "big")))
        await settle()
        [body] = [body for kind, _, _, body in split(rig.theirs.drain()) if kind == DATA]
        assert len(body) == 10


# --- endings ----------------------------------------------------------------------------------


async def test_an_early_answer_ends_the_request(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask(Request("POST", "/", [], bytes(10_000_000)))
        await rig.peer.expect(RequestReceived)
        await rig.peer.reply(1, b"no", status="415")
        assert (await asked.head()).status == 415
        assert await asked.body() == b"no"
        event = await rig.peer.expect(StreamReset)
        assert event.error_code == 0
        assert len(rig.peer.bodies[1]) <= 200_000
        assert rig.connection.streams == 0
        other = rig.ask()
        await rig.peer.ended(3)
        await rig.peer.reply(3)
        assert await other.body() == b""


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (7, Break.REFUSED_STREAM),
        (0xD, Break.HTTP_1_1_REQUIRED),
        (0, Break.RESET),
        (2, Break.RESET),
        (8, Break.RESET),
        (99, Break.RESET),
    ],
)
async def test_a_reset_before_the_head(autojump_clock, code, cause):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        await rig.theirs.send(rst(1, code))
        broken = await asked.broken()
        assert (broken.cause, broken.code, broken.phase) == (cause, code, Phase.WAITING)
        assert broken.written


@pytest.mark.parametrize("code", [7, 0xD, 2])
async def test_a_reset_after_the_head_is_a_reset(autojump_clock, code):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        rig.peer.h2.send_headers(1, [(":status", "200")])
        rig.peer.h2.send_data(1, b"part")
        await rig.peer.flush(rst(1, code))
        await asked.head()
        assert await asked.exchange.receive() == b"part"  # what came is not withheld
        broken = await asked.broken()
        assert (broken.cause, broken.code) == (Break.RESET, code)
        assert broken.phase is Phase.RECEIVING


async def test_a_reset_without_error_after_a_complete_reply_is_success(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask(Request("POST", "/", [], bytes(100_000)))
        await rig.peer.expect(RequestReceived)
        rig.peer.h2.send_headers(1, [(":status", "200")])
        rig.peer.h2.send_data(1, b"done", end_stream=True)
        await rig.peer.flush(rst(1, 0))
        assert await asked.body() == b"done"


async def test_interim_replies_are_skipped(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        for _ in range(16):
            rig.peer.h2.send_headers(1, [(":status", "103"), ("link", "x")])
        await rig.peer.reply(1, b"x")
        assert (await asked.head()).status == 200
        asked = rig.ask()
        await rig.peer.ended(3)
        for _ in range(17):
            rig.peer.h2.send_headers(3, [(":status", "100")])
        await rig.peer.flush()
        assert (await asked.broken()).cause is Break.MALFORMED


async def test_a_malformed_reply_breaks_its_exchange_only(autojump_clock):
    async with rigged() as rig:
        bad = rig.ask()
        await settle()
        good = rig.ask()
        await rig.peer.ended(3)
        block = hpack.Encoder().encode([(":status", "200"), ("X-Upper", "1")])
        await rig.theirs.send(frame(HEADERS, 4, 1, block))
        broken = await bad.broken()
        assert (broken.cause, broken.written) == (Break.MALFORMED, True)
        await rig.theirs.send(frame(HEADERS, 5, 3, hpack.Encoder().encode([(":status", "204")])))
        assert (await good.head()).status == 204


async def test_a_broken_protocol_breaks_all_and_says_goodbye(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        await rig.theirs.send(frame(CONTINUATION, 4, 1))
        assert (await asked.broken()).cause is Break.MALFORMED
        assert (await rig.peer.expect(ConnectionTerminated)).error_code == 1
        await rig.over.wait()
        assert rig.ours.closed


@pytest.mark.parametrize(("fault", "cause"), [(Fault.EOF, Break.EOF), (Fault.RESET, Break.RESET)])
async def test_a_lost_connection_breaks_what_is_on_it(autojump_clock, fault, cause):
    async with rigged() as rig:
        first = rig.ask()
        await settle()
        second = rig.ask()
        await rig.peer.ended(3)
        await rig.peer.reply(1, b"whole")
        rig.theirs.fault_after(0, fault)
        assert await first.body() == b"whole"
        broken = await second.broken()
        assert (broken.cause, broken.written, broken.phase) == (cause, True, Phase.WAITING)
        await rig.over.wait()


async def test_streams_that_a_goaway_covers_run_on(autojump_clock):
    """D56: GOAWAY(2^31-1), then GOAWAY(last id), with a stream open."""
    async with rigged() as rig:
        first = rig.ask()
        await settle()
        second = rig.ask()
        await rig.peer.ended(3)
        await rig.theirs.send(goaway(2**31 - 1))
        await settle()
        assert not second.done.is_set()
        assert rig.connection.free == 0
        await rig.theirs.send(goaway(1, 0, b"drain"))
        broken = await second.broken()
        assert (broken.cause, broken.code, broken.detail) == (Break.GOAWAY, 0, "drain")
        late = rig.ask()
        await late.done.wait()
        assert isinstance(late.error, NotBegun)
        await rig.peer.reply(1, b"to the end")
        assert await first.body() == b"to the end"
        await rig.over.wait()  # nothing is left on it


async def test_a_goaway_and_the_answer_in_one_read(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        rig.peer.h2.send_headers(1, [(":status", "200")])
        rig.peer.h2.send_headers(1, [("grpc-status", "0")], end_stream=True)
        reply = rig.peer.h2.data_to_send()
        await rig.theirs.send(goaway(1) + reply)
        rig.theirs.cut()
        assert await asked.body() == b""
        assert asked.exchange.trailers == [("grpc-status", "0")]


async def test_a_request_that_waits_when_the_connection_leaves_has_not_begun(autojump_clock):
    async with rigged() as rig:
        await settle()
        rig.ours.stall()
        first = rig.ask()
        await settle()
        second = rig.ask()
        await settle()
        await rig.theirs.send(goaway(1))
        await second.done.wait()
        assert isinstance(second.error, NotBegun)
        assert second.error.cause is Break.GOAWAY
        assert not second.progress.written
        assert not first.done.is_set()


async def test_a_lowered_stream_limit_puts_waiting_requests_back(autojump_clock):
    async with rigged() as rig:
        await settle()
        rig.ours.stall()
        rig.ask()
        await settle()
        second = rig.ask()
        await rig.theirs.send(settings(max_streams=1))
        await settle()
        rig.ours.resume()
        await second.done.wait()
        assert isinstance(second.error, NotBegun)
        assert second.error.cause is None
        assert rig.connection.free == 0


async def test_when_stream_ids_are_used_up_the_connection_leaves(autojump_clock):
    async with rigged() as rig:
        engine: Any = rig.connection._engine
        engine.highest_outbound_stream_id = 2**31 - 3
        first = rig.ask(BARE)
        await settle()
        second = rig.ask(BARE)
        await second.done.wait()
        assert isinstance(second.error, NotBegun)
        await rig.peer.ended(2**31 - 1)
        await rig.peer.reply(2**31 - 1, b"last")
        assert await first.body() == b"last"
        await rig.over.wait()


async def test_a_header_that_cannot_travel_is_a_local_fault(autojump_clock):
    async with rigged() as rig:
        broken = await rig.ask(Request("POST", "/", [("x", "a\nb")], b"")).broken()
        assert (broken.cause, broken.written) == (Break.LOCAL, False)
        asked = rig.ask(BARE)
        await rig.peer.ended(1)
        await rig.peer.reply(1)
        assert (await asked.head()).status == 200


async def test_a_header_that_cannot_travel_holds_up_no_connection_that_leaves(autojump_clock):
    async with rigged(start=False) as rig:
        asked = rig.ask(Request("POST", "/", [("x", "a\nb")], b""))
        await settle()
        rig.connection.leave()
        await rig.peer.start()
        assert (await asked.broken()).cause is Break.LOCAL
        with trio.fail_after(1):
            await rig.over.wait()


async def test_closing_an_exchange_early_resets_it(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        rig.peer.h2.send_headers(1, [(":status", "200")])
        await rig.peer.flush()
        await asked.head()
        await asked.exchange.aclose()
        assert (await rig.peer.expect(StreamReset)).error_code == 8
        with pytest.raises(ExchangeBroken):
            await asked.exchange.receive()


async def test_closing_a_complete_exchange_does_nothing(autojump_clock):
    async with rigged() as rig:
        asked = rig.ask()
        await rig.peer.ended()
        await rig.peer.reply(1, b"x")
        assert await asked.body() == b"x"
        sends = len(rig.ours.sends)
        await asked.exchange.aclose()
        await settle()
        assert len(rig.ours.sends) == sends


# --- PING -------------------------------------------------------------------------------------


async def test_a_ping_is_answered_at_once(autojump_clock):
    async with rigged() as rig:
        await settle()
        rig.theirs.drain()
        await rig.theirs.send(frame(PING, 0, 0, b"abcdefgh"))
        await settle()
        assert split(rig.theirs.drain()) == [(PING, 1, 0, b"abcdefgh")]


async def test_an_idle_connection_is_doubtful_and_can_prove_itself(autojump_clock):
    async with rigged() as rig:
        rig.nursery.start_soon(rig.peer.pump)
        await trio.sleep(10)
        assert not rig.connection.doubtful
        await trio.sleep(1)
        assert await rig.connection.prove()
        assert not rig.connection.doubtful  # not again until a request has followed
        await trio.sleep(100)
        assert not rig.connection.doubtful
        asked = rig.ask()
        await settle()
        await rig.peer.reply(1)
        assert await asked.body() == b""
        await trio.sleep(11)
        assert rig.connection.doubtful


async def test_no_sign_of_life_within_a_second_ends_the_connection(autojump_clock):
    async with rigged() as rig:
        await trio.sleep(11)
        results = []

        async def prove() -> None:
            results.append((await rig.connection.prove(), trio.current_time()))

        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prove)
            await trio.sleep(0.5)
            nursery.start_soon(prove)  # shares the PING
        assert [alive for alive, _ in results] == [False, False]
        assert [at - before for _, at in results] == pytest.approx([1.0, 1.0])
        await rig.over.wait()
        pings = [kind for kind, *_ in split(b"".join(rig.ours.sends)) if kind == PING]
        assert len(pings) == 1


async def test_a_silent_stream_is_kept_alive_with_few_pings(autojump_clock):
    """D57: none when idle, none more often than every 300 s."""
    async with rigged() as rig:
        connection = rig.connection
        asked = rig.ask()
        await rig.peer.ended()
        start = trio.current_time()
        assert connection.tick(start + 299) == pytest.approx(start + 300)
        await trio.sleep(300)
        due = connection.tick(trio.current_time())
        await rig.peer.expect(PingReceived)
        await settle()
        assert due == pytest.approx(trio.current_time() + 20)
        await trio.sleep(20)
        assert connection.tick(trio.current_time()) == pytest.approx(start + 600)
        assert not asked.done.is_set()
        await trio.sleep(280)
        connection.tick(trio.current_time())
        await trio.sleep(20)
        connection.tick(trio.current_time())  # this one was not answered
        assert (await asked.broken()).cause is Break.TIMEOUT


async def test_an_idle_connection_is_closed_after_300_seconds(autojump_clock):
    async with rigged() as rig:
        due = rig.connection.tick(trio.current_time())
        assert due == pytest.approx(trio.current_time() + 300)
        await trio.sleep(300)
        rig.connection.tick(trio.current_time())
        await rig.over.wait()
        assert PING not in [kind for kind, *_ in split(b"".join(rig.ours.sends))]
        assert (await rig.peer.expect(ConnectionTerminated)).error_code == 0
