"""The HTTP/1.1 client: what goes out, what comes back, and the facts when it does not."""

from __future__ import annotations

import socket

import h11
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.types import Break, Broken, Phase, Request
from sidecar.wire.exchange import ExchangeBroken, Progress
from sidecar.wire.http1 import Http1Connection, Http1Exchange
from sidecar.wire.sockets import SocketWire
from tests.wire.loopback import reset, serve
from tests.wire.memory import Fault, MemoryWire, memory_wire_pair

POST = Request("POST", "/rpc", [("content-type", "application/json")], b'{"a":1}')
GET = Request("GET", "/card", [], b"")
LARGE = Request("POST", "/rpc", [], bytes(range(256)) * 4096)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TOO_LARGE = b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig"


class Client:
    """A connection over memory, its peer and what it reported."""

    def __init__(self, *, capacity: int | None = None) -> None:
        ours, theirs = memory_wire_pair(capacity=capacity)
        self.ours: MemoryWire = ours
        self.theirs: MemoryWire = theirs
        self.done: list[bool] = []
        self.sent = 0
        self.progress = Progress(on_sent=self.on_sent)
        self.connection = Http1Connection(
            ours, authority="agent:80", header_bytes=4096, done=self.on_done
        )

    def on_done(self, connection: Http1Connection) -> None:
        self.done.append(connection.reusable)

    def on_sent(self) -> None:
        self.sent += 1

    async def request(self, request: Request = POST) -> Http1Exchange:
        return await self.connection.request(request, self.progress)

    async def answer(self, data: bytes, request: Request = POST) -> Http1Exchange:
        """The exchange when the peer's answer is there already."""
        await self.theirs.send(data)
        return await self.request(request)

    async def whole(self) -> bytes:
        """The body of the reply to a request."""
        exchange = await self.request()
        try:
            return await read(exchange)
        finally:
            await exchange.aclose()

    async def broken(self, request: Request = POST) -> Broken:
        with pytest.raises(ExchangeBroken) as caught:
            await self.request(request)
        assert self.ours.closed
        assert self.done == [False]
        return caught.value.broken


async def read(exchange: Http1Exchange) -> bytes:
    chunks = []
    while chunk := await exchange.receive():
        chunks.append(chunk)
    return b"".join(chunks)


# --- a request and its reply ------------------------------------------------------------------


async def test_head_and_small_body_leave_in_one_send():
    client = Client()
    exchange = await client.answer(OK)
    assert client.ours.sends == [
        b"POST /rpc HTTP/1.1\r\nhost: agent:80\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n"
        + POST.body
    ]
    assert exchange.head.status == 200
    assert await read(exchange) == b"ok"
    assert await exchange.receive() == b""
    assert (client.progress.phase, client.progress.written) == (Phase.RECEIVING, True)
    assert client.sent == 1
    await exchange.aclose()
    assert client.done == [True]
    assert not client.ours.closed


async def test_one_connection_carries_request_after_request():
    client = Client()
    for number in range(3):
        body = b"%d" % number
        exchange = await client.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + body)
        assert await read(exchange) == body
        await exchange.aclose()
    assert client.done == [True] * 3
    assert len(client.ours.sends) == 3


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"\r\n",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_a_connection_with_anything_behind_the_reply_or_without_keep_alive_is_closed(answer):
    client = Client()
    exchange = await client.answer(answer)
    await read(exchange)
    await exchange.aclose()
    assert client.done == [False]
    assert client.ours.closed


async def test_a_reply_that_was_not_read_to_its_end_closes_the_connection():
    client = Client()
    exchange = await client.answer(OK[:-1])
    assert await exchange.receive() == b"o"
    await exchange.aclose()
    assert client.done == [False]
    assert client.ours.aborted
    with pytest.raises(trio.ClosedResourceError):
        await exchange.receive()
    await exchange.aclose()
    assert client.done == [False]


async def test_a_stream_is_read_only_when_asked_and_each_read_is_joined():
    client = Client()
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    exchange = await client.answer(head)
    await client.theirs.send(b"3\r\none\r\n3\r\ntwo\r\n")
    assert client.ours.has_input()
    assert await exchange.receive() == b"onetwo"
    await client.theirs.send(b"5\r\nthree\r\n0\r\nX-End: yes\r\n\r\n")
    assert await exchange.receive() == b"three"
    assert await exchange.receive() == b""
    assert exchange.trailers == [("x-end", "yes")]
    await exchange.aclose()
    assert client.done == [True]


async def test_a_cancelled_receive_loses_nothing(autojump_clock):
    client = Client()
    exchange = await client.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
    with trio.move_on_after(1):
        await exchange.receive()
    await client.theirs.send(b"late")
    assert await read(exchange) == b"late"
    await exchange.aclose()
    assert client.done == [True]


async def test_a_body_to_the_end_of_the_connection_is_complete_on_a_clean_end_only():
    client = Client()
    exchange = await client.answer(b"HTTP/1.1 200 OK\r\n\r\npart")
    assert await exchange.receive() == b"part"
    client.theirs.cut()
    assert await exchange.receive() == b""
    await exchange.aclose()
    assert client.done == [False]

    client = Client()
    exchange = await client.answer(b"HTTP/1.1 200 OK\r\n\r\npart")
    client.theirs.break_input(Break.EOF)
    assert await exchange.receive() == b"part"
    with pytest.raises(ExchangeBroken) as caught:
        await exchange.receive()
    assert caught.value.broken.cause is Break.MALFORMED


async def test_interim_replies_do_not_begin_a_reply(autojump_clock):
    client = Client()
    async with trio.open_nursery() as nursery:
        exchanges = []

        async def go() -> None:
            exchanges.append(await client.request())

        nursery.start_soon(go)
        await trio.testing.wait_all_tasks_blocked()
        assert client.progress.phase is Phase.WAITING
        await client.theirs.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 P")
        await trio.testing.wait_all_tasks_blocked()
        await client.theirs.send(b"rocessing\r\n\r\n")
        await trio.testing.wait_all_tasks_blocked()
        assert client.progress.phase is Phase.WAITING
        await client.theirs.send(OK)
    assert exchanges[0].head.status == 200
    assert client.progress == Progress(phase=Phase.RECEIVING, written=True)


async def test_the_servers_keep_alive_time_is_noted():
    client = Client()
    reply = b"HTTP/1.1 200 OK\r\nKeep-Alive: max=3, timeout=2\r\nContent-Length: 0\r\n\r\n"
    exchange = await client.answer(reply)
    await exchange.aclose()
    assert client.connection.keep_alive_seconds == 2


# --- what breaks ------------------------------------------------------------------------------


async def test_the_end_before_any_reply():
    client = Client()
    client.theirs.cut()
    broken = await client.broken()
    assert (broken.cause, broken.phase, broken.written) == (Break.EOF, Phase.WAITING, True)


async def test_the_end_after_interim_replies_only():
    client = Client()
    await client.theirs.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    client.theirs.cut()
    broken = await client.broken()
    assert (broken.cause, broken.phase) == (Break.EOF, Phase.WAITING)


async def test_the_end_inside_the_head():
    client = Client()
    await client.theirs.send(b"HTTP/1.1 200 OK\r\nConte")
    client.theirs.cut()
    broken = await client.broken()
    assert (broken.cause, broken.phase) == (Break.MALFORMED, Phase.RECEIVING)


async def test_a_reset_while_waiting():
    client = Client()

    async def reset_later() -> None:
        await trio.testing.wait_all_tasks_blocked()
        client.theirs.reset()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reset_later)
        broken = await client.broken()
    assert (broken.cause, broken.phase, broken.written) == (Break.RESET, Phase.WAITING, True)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
    ],
)
async def test_a_truncated_body(data):
    client = Client()
    exchange = await client.answer(data)
    client.theirs.cut()
    assert await exchange.receive() == b"abc"
    with pytest.raises(ExchangeBroken) as caught:
        await exchange.receive()
    assert caught.value.broken.cause is Break.MALFORMED
    assert caught.value.broken.phase is Phase.RECEIVING
    await exchange.aclose()
    assert client.done == [False]


async def test_a_reset_inside_the_body():
    client = Client()
    exchange = await client.answer(OK[:-1])
    client.theirs.reset()
    assert await exchange.receive() == b"o"
    with pytest.raises(ExchangeBroken) as caught:
        await exchange.receive()
    assert caught.value.broken.cause is Break.RESET


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 5000,
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"<html>",
    ],
)
async def test_bytes_that_are_no_reply(data):
    client = Client()
    await client.theirs.send(data)
    broken = await client.broken()
    assert (broken.cause, broken.written) == (Break.MALFORMED, True)


async def test_a_certificate_alert_passes_through():
    client = Client()
    client.theirs.break_input(Break.CERTIFICATE_ALERT)
    broken = await client.broken()
    assert (broken.cause, broken.written) == (Break.CERTIFICATE_ALERT, True)


async def test_tls_trouble_after_the_handshake_is_not_a_handshake_failure():
    client = Client()
    client.theirs.break_input(Break.TLS)
    assert (await client.broken()).cause is Break.RESET


async def test_a_header_that_is_none_is_our_own_fault_and_nothing_is_sent():
    client = Client()
    broken = await client.broken(Request("GET", "/", [("a", "b\r\nc: d")], b""))
    assert (broken.cause, broken.written) == (Break.LOCAL, False)
    assert client.ours.sends == []


# --- writing fails ----------------------------------------------------------------------------


async def test_nothing_taken_is_not_written():
    client = Client()
    client.ours.fail_next_send()
    client.theirs.cut()
    broken = await client.broken()
    assert (broken.cause, broken.phase, broken.written) == (Break.RESET, Phase.SENDING, False)
    assert client.sent == 0


async def test_a_byte_taken_is_written():
    client = Client()
    client.ours.fail_next_send(after=1)
    client.theirs.cut()
    broken = await client.broken()
    assert (broken.cause, broken.phase, broken.written) == (Break.RESET, Phase.SENDING, True)


@pytest.mark.parametrize("after", [0, 5])
async def test_a_complete_reply_explains_a_failed_write(after):
    client = Client()
    client.ours.fail_next_send(after=after)
    exchange = await client.answer(TOO_LARGE)
    assert exchange.head.status == 413
    assert await read(exchange) == b"big"
    assert client.progress.written == (after > 0)
    assert client.progress.phase is Phase.SENDING
    await exchange.aclose()
    assert client.done == [False]


async def test_a_reply_that_comes_soon_after_the_failed_write_is_found(autojump_clock):
    client = Client()
    client.ours.fail_next_send(after=5)

    async def answer() -> None:
        await trio.sleep(0.9)
        await client.theirs.send(TOO_LARGE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        exchange = await client.request()
    assert exchange.head.status == 413


async def test_the_search_for_a_reply_is_bounded(autojump_clock):
    client = Client()
    client.ours.fail_next_send(after=5)
    await client.theirs.send(TOO_LARGE[:-1])
    began = trio.current_time()
    broken = await client.broken()
    assert trio.current_time() - began == pytest.approx(1)
    assert (broken.cause, broken.written) == (Break.RESET, True)


async def test_a_certificate_alert_explains_a_failed_write():
    client = Client()
    client.ours.fail_next_send(after=5)
    client.theirs.break_input(Break.CERTIFICATE_ALERT)
    assert (await client.broken()).cause is Break.CERTIFICATE_ALERT


# --- large bodies -----------------------------------------------------------------------------


async def take(client: Client, count: int) -> bytes:
    """Read `count` bytes and more of the request, as the peer."""
    data = b""
    while len(data) < count:
        data += await client.theirs.receive()
    return data


async def take_whole(client: Client, request: Request) -> bytes:
    """Read the whole request, as the peer; returns its body."""
    data = await take(client, 1)
    while b"\r\n\r\n" not in data:
        data += await client.theirs.receive()
    body = data.partition(b"\r\n\r\n")[2]
    return body + await take(client, len(request.body) - len(body))


async def test_a_large_body_arrives_whole(autojump_clock):
    client = Client(capacity=10000)
    received = []

    async def peer() -> None:
        received.append(await take_whole(client, LARGE))
        await client.theirs.send(OK)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        exchange = await client.request(LARGE)
    assert received == [LARGE.body]
    assert await read(exchange) == b"ok"
    await exchange.aclose()
    assert client.done == [True]
    assert client.sent == 1
    assert client.progress.phase is Phase.RECEIVING


@pytest.mark.parametrize("closes", [False, True])
async def test_an_early_refusal_stops_the_request(closes, autojump_clock):
    client = Client(capacity=10000)

    async def peer() -> None:
        await take(client, 20000)
        await client.theirs.send(TOO_LARGE)
        if closes:
            client.theirs.cut()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        exchange = await client.request(LARGE)
    assert exchange.head.status == 413
    assert await read(exchange) == b"big"
    assert (client.progress.phase, client.progress.written) == (Phase.SENDING, True)
    assert client.sent == 0
    await exchange.aclose()
    assert client.done == [False]


async def test_an_early_head_does_not_stop_the_request(autojump_clock):
    client = Client(capacity=10000)
    received = []

    async def peer() -> None:
        await client.theirs.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nea")
        received.append(await take_whole(client, LARGE))
        await trio.sleep(1)
        await client.theirs.send(b"rl")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        exchange = await client.request(LARGE)
        assert trio.current_time() < 1  # the head is there, and the request is out
        assert await read(exchange) == b"earl"
    assert received == [LARGE.body]
    await exchange.aclose()
    assert client.done == [True]
    assert client.progress.phase is Phase.RECEIVING


async def test_a_server_that_answers_much_before_it_reads_is_not_read_without_bound(autojump_clock):
    client = Client(capacity=100_000)
    body = b"x" * 3_000_000

    async def peer() -> None:
        with trio.move_on_after(5) as scope:
            await client.theirs.send(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
        assert scope.cancelled_caught

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        with trio.move_on_after(10) as scope:
            await client.request(LARGE)
        assert scope.cancelled_caught
    assert client.done == [False]


async def test_a_large_body_that_cannot_be_written_waits_a_second_for_the_reason(autojump_clock):
    client = Client(capacity=10000)
    client.ours.fault_after(50000, Fault.RESET)

    async def peer() -> None:
        await take(client, 40000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer)
        broken = await client.broken(LARGE)
        nursery.cancel_scope.cancel()
    assert (broken.cause, broken.phase, broken.written) == (Break.RESET, Phase.SENDING, True)


async def test_a_large_body_of_which_nothing_was_taken_is_not_written(autojump_clock):
    client = Client()
    client.ours.fail_next_send()
    began = trio.current_time()
    broken = await client.broken(LARGE)
    assert trio.current_time() - began == pytest.approx(1)
    assert (broken.cause, broken.phase, broken.written) == (Break.RESET, Phase.SENDING, False)


async def test_the_end_while_a_large_body_is_written(autojump_clock):
    client = Client(capacity=10000)
    client.theirs.cut()
    broken = await client.broken(LARGE)
    assert (broken.cause, broken.phase) == (Break.EOF, Phase.SENDING)


class Eager(MemoryWire):
    """A wire that never lets other tasks run when it need not, as one over a socket."""

    async def receive(self) -> bytes:
        data = self.receive_nowait()
        return await super().receive() if data is None else data

    async def send(self, data: bytes | memoryview) -> None:
        self.sends.append(bytes(data))


async def test_an_end_that_is_found_before_writing_began_leaves_the_request_unwritten():
    client = Client()
    client.theirs.cut()
    client.ours.__class__ = Eager
    broken = await client.broken(LARGE)
    assert (broken.cause, broken.phase, broken.written) == (Break.EOF, Phase.SENDING, False)
    assert client.ours.sends == []


# --- cancellation -----------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [POST, LARGE])
async def test_a_cancelled_request_closes_the_connection_and_counts_as_written(
    request_, autojump_clock
):
    client = Client(capacity=100000)
    with trio.move_on_after(1) as scope:
        await client.request(request_)
    assert scope.cancelled_caught
    assert client.ours.closed
    assert client.done == [False]
    assert client.progress.written


async def test_a_call_that_was_cancelled_before_sends_nothing():
    client = Client()
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.request()
    assert scope.cancelled_caught
    assert client.ours.sends == []
    assert not client.progress.written


# --- every cut point --------------------------------------------------------------------------

REPLY = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("fault", [Fault.EOF, Fault.RESET])
async def test_a_reply_cut_at_any_byte_is_broken_and_the_connection_closed(fault):
    interim_ends = REPLY.index(b"HTTP", 1)
    for cut in range(len(REPLY)):
        client = Client()
        await client.theirs.send(REPLY[:cut])
        if fault is Fault.EOF:
            client.theirs.cut()
        else:
            client.theirs.break_input(Break.TLS)  # as RESET, but our sends still work
        with pytest.raises(ExchangeBroken) as caught:
            await client.whole()
        assert client.done == [False]
        assert client.ours.closed
        broken = caught.value.broken
        assert broken.written
        if fault is Fault.RESET:
            assert broken.cause is Break.RESET
        else:
            assert broken.cause is (Break.EOF if cut in {0, interim_ends} else Break.MALFORMED)
        assert broken.phase is (Phase.WAITING if cut in {0, interim_ends} else Phase.RECEIVING)


# --- against h11 ------------------------------------------------------------------------------


@given(
    requests=st.lists(
        st.tuples(st.binary(max_size=50), st.lists(st.binary(min_size=1, max_size=30), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    chunked=st.booleans(),
)
async def test_a_talk_with_h11(requests, chunked):
    ours, theirs = memory_wire_pair(whole=True)
    done = []
    connection = Http1Connection(
        ours, authority="h", header_bytes=4096, done=lambda c: done.append(c.reusable)
    )
    peer = h11.Connection(h11.SERVER)

    async def serve() -> None:
        for body, chunks in requests:
            received = b""
            while True:
                event = peer.next_event()
                if event is h11.NEED_DATA:
                    peer.receive_data(await theirs.receive())
                elif isinstance(event, h11.Data):
                    received += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
            assert received == body
            length = str(sum(map(len, chunks)))
            headers = [] if chunked else [("content-length", length)]
            await theirs.send(peer.send(h11.Response(status_code=200, headers=headers)) or b"")
            for chunk in chunks:
                await theirs.send(peer.send(h11.Data(data=chunk)) or b"")
            await theirs.send(peer.send(h11.EndOfMessage()) or b"")
            peer.start_next_cycle()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        for body, chunks in requests:
            exchange = await connection.request(Request("POST", "/", [], body), Progress())
            assert await read(exchange) == b"".join(chunks)
            await exchange.aclose()
    assert done == [True] * len(requests)


# --- sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["half-close", "keeps reading", "reset after a while"])
async def test_an_early_413_during_an_upload_of_10_mb(ending):
    upload = Request("POST", "/rpc", [], b"x" * 10_000_000)
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 15\r\n\r\n" + b'{"error":"big"}'
    answered = trio.Event()
    leave = trio.Event()

    async def server(stream: trio.abc.Stream) -> None:
        assert isinstance(stream, trio.SocketStream)
        await stream.receive_some(65536)
        await stream.send_all(refusal)
        if ending == "half-close":
            await stream.send_eof()
        if ending == "keeps reading":
            async for _ in stream:
                pass
            return
        await answered.wait()
        reset(stream)
        leave.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            port = await serve(nursery, server)
            sock = socket.create_connection(("127.0.0.1", port))
            connection = Http1Connection(
                SocketWire(sock, stall_seconds=5), authority="h", header_bytes=4096
            )
            progress = Progress()
            exchange = await connection.request(upload, progress)
            assert exchange.head.status == 413
            answered.set()
            assert await read(exchange) == b'{"error":"big"}'
            assert (progress.phase, progress.written) == (Phase.SENDING, True)
            await exchange.aclose()
            assert not connection.reusable
            if ending != "keeps reading":
                await leave.wait()
            nursery.cancel_scope.cancel()


async def test_a_server_that_reads_the_request_and_closes_without_a_byte():
    async def server(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            port = await serve(nursery, server)
            sock = socket.create_connection(("127.0.0.1", port))
            connection = Http1Connection(
                SocketWire(sock, stall_seconds=5), authority="h", header_bytes=4096
            )
            with pytest.raises(ExchangeBroken) as caught:
                await connection.request(POST, Progress())
            nursery.cancel_scope.cancel()
    broken = caught.value.broken
    assert (broken.cause, broken.phase, broken.written) == (Break.EOF, Phase.WAITING, True)
