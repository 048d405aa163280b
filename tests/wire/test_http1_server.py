"""The HTTP/1.1 server: requests, answers, refusals; `test_http1_watch` has what takes time."""

from __future__ import annotations

import contextlib
import json
import socket

import h11
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from sidecar.wire.http1_server import (
    BodyTooLarge,
    Http1Request,
    PeerGone,
    RequestRefused,
    serve_http1,
)
from sidecar.wire.sockets import SocketWire
from tests.wire.loopback import until
from tests.wire.memory import memory_wire_pair
from tests.wire.served import GET, LIMITS, Served, Slow, post


@pytest.fixture
async def nursery():
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


# --- requests and answers ---------------------------------------------------------------------


async def test_a_request_and_its_answer(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(
        b"POST /a?b=%20c HTTP/1.1\r\nHost: h\r\nX-Name:  v \r\nContent-Length: 2\r\n\r\nhi"
    )
    status, headers, body = await served.answer()
    assert (status, body) == (200, b"hi")
    assert headers["x-target"] == "/a?b=%20c"
    assert headers["content-length"] == "2"
    assert headers["connection"] == "keep-alive"
    assert headers["keep-alive"] == "timeout=300"
    (request,) = served.requests
    assert request.method == "POST"
    assert request.content_length == 2
    assert request.headers == [("host", "h"), ("x-name", "v"), ("content-length", "2")]
    assert len(served.ours.sends) == 1


async def test_bytes_that_were_read_before_count(nursery, autojump_clock):
    served = Served(nursery, initial=GET[:7])
    await served.send(GET[7:])
    assert (await served.answer())[1]["x-target"] == "/a"


async def test_requests_follow_each_other_pipelined_or_not(nursery, autojump_clock):
    served = Served(nursery)
    chunked = b"POST /2 HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: y\r\n\r\n"
    await served.send(GET + chunked + post(b"three") + GET[:10])
    assert (await served.answer())[2] == b""
    assert (await served.answer())[2] == b"hi"
    assert (await served.answer())[2] == b"three"
    await served.send(GET[10:])
    assert (await served.answer())[1]["x-target"] == "/a"
    assert served.bugs == []


async def test_a_streamed_answer(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.start(200, [("content-type", "text/event-stream")], b"first")
        await request.send(b"")
        await request.send(b"second")
        await request.end()

    served = Served(nursery, handler=handler)
    for _ in range(2):
        await served.send(GET)
        status, headers, body = await served.answer()
        assert (status, body) == (200, b"firstsecond")
        assert headers["transfer-encoding"] == "chunked"
    # head and first bytes leave in one send
    assert len(served.ours.sends) == 6


async def test_http10_gets_no_chunks(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.start(200, [], b"first")
        await request.send(b"second")
        await request.end()

    served = Served(nursery, handler=handler)
    await served.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head, _, body = (await served.closed()).partition(b"\r\n\r\n")
    assert body == b"firstsecond"
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head


async def test_http10_is_closed_unless_it_asks_otherwise(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert (await served.answer())[1]["connection"] == "keep-alive"
    await served.send(b"GET / HTTP/1.0\r\n\r\n")
    assert (await served.answer())[1]["connection"] == "close"
    assert await served.closed() == b""


async def test_a_client_that_asks_for_it_is_closed(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: x, Close\r\n\r\n")
    assert (await served.answer())[1]["connection"] == "close"
    assert await served.closed() == b""
    await served.ended.wait()
    assert len(served.connections) == 0


async def test_head_has_the_length_and_no_body(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.respond(200, [], b"hello")

    served = Served(nursery, handler=handler)
    await served.send(GET.replace(b"GET", b"HEAD") + GET)
    status, headers, body = await served.answer(b"HEAD")
    assert (status, headers["content-length"], body) == (200, "5", b"")
    assert (await served.answer())[2] == b"hello"


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(nursery, status, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.respond(status, [], b"")

    served = Served(nursery, handler=handler)
    await served.send(GET)
    answer = await served.answer()
    assert answer[0] == status
    assert "content-length" not in answer[1]


async def test_an_upgrade_is_ignored_and_bodies_are_read_all_the_same(nursery, autojump_clock):
    served = Served(nursery)
    upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n"
    await served.send(GET[:-2] + upgrade + b"\r\n" + post(b"hello", upgrade))
    await served.send(
        b"POST /c HTTP/1.1\r\nHost: h\r\n" + upgrade + b"Transfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nX: y\r\n\r\n" + GET
    )
    answers = [await served.answer() for _ in range(4)]
    assert [answer[2] for answer in answers] == [b"", b"hello", b"abc", b""]
    assert [answer[1]["x-target"] for answer in answers] == ["/a", "/p", "/c", "/a"]
    assert answers[2][1]["x-method"] == "POST"


async def test_a_large_answer_arrives_whole(nursery, autojump_clock):
    large = bytes(range(256)) * 2000

    async def handler(request: Http1Request) -> None:
        await request.respond(200, [], large)

    served = Served(nursery, handler=handler, capacity=10000)
    await served.send(GET)
    assert (await served.answer())[2] == large


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET /\r\n", 400),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
        (b"GET / RTSP/1.0\r\nHost: a\r\n\r\n", 400),
        (b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://a/b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 408),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4, 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
            400,
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000, 431),
        (b"GET /" + b"y" * 5000, 431),
    ],
)
async def test_what_is_refused_is_answered_and_the_connection_closed(
    nursery, data, status, autojump_clock
):
    served = Served(nursery)
    await served.send(data)
    answer = await served.answer()
    assert answer[0] == status
    assert answer[1]["connection"] == "close"
    assert json.loads(answer[2])["error"]["code"] == status
    await served.send(GET)  # whatever comes now is not a request
    assert await served.closed() == b""
    assert served.bugs == []
    assert all(not request.target.startswith("/a") for request in served.requests)


async def test_content_length_beside_chunks_smuggles_nothing(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /.well-known/agent-card.json HTTP/1.1\r\nHost: b\r\n\r\n"
    )
    assert (await served.answer())[0] == 400
    assert await served.closed() == b""
    assert served.requests == []


async def test_tls_is_closed_without_an_answer(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500)
    assert await served.closed() == b""
    assert served.ours.sends == []


async def test_empty_lines_before_a_request_are_skipped(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"\r\n\r\n" + GET + b"\r\n" + GET)
    assert (await served.answer())[0] == 200
    assert (await served.answer())[0] == 200


async def test_the_callers_form_of_an_error(nursery, autojump_clock):
    served = Served(
        nursery, render=lambda status, text: ([("content-type", "text/plain")], b"%d" % status)
    )
    await served.send(b"GET / HTTP/1.1\r\n\r\n")
    status, headers, body = await served.answer()
    assert (status, headers["content-type"], body) == (400, "text/plain", b"400")


# --- bodies -----------------------------------------------------------------------------------


async def test_100_is_sent_when_the_body_is_wanted(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(post(b"", b"Expect: 100-Continue\r\n").replace(b": 0", b": 2"))
    assert await served.client.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await served.send(b"hi")
    assert (await served.answer())[2] == b"hi"


async def test_no_100_for_a_body_that_comes_unasked(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(post(b"hi", b"Expect: 100-continue\r\n"))
    await served.answer()
    assert len(served.ours.sends) == 1


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
async def test_a_body_that_is_declared_too_large_is_not_read(nursery, expect, autojump_clock):
    served = Served(nursery)
    await served.send(post(b"", expect).replace(b": 0", b": 100001"))
    status, headers, _ = await served.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert len(served.ours.sends) == 1
    assert await served.closed() == b""
    assert served.bugs == []


async def test_a_chunked_body_that_grows_too_large(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(11):
        await served.send(b"2710\r\n" + b"x" * 10000 + b"\r\n")
    assert (await served.answer())[0] == 413


async def test_a_handler_can_answer_a_body_that_is_too_large_itself(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        with pytest.raises(BodyTooLarge) as caught:
            await request.body(3)
        assert (caught.value.status, caught.value.limit) == (413, 3)
        await request.respond(418, [], b"")

    served = Served(nursery, handler=handler)
    await served.send(post(b"four"))
    status, headers, _ = await served.answer()
    # the body was here already: it need not cost the connection
    assert (status, headers["connection"]) == (418, "keep-alive")
    await served.send(post(b"none"))
    assert (await served.answer())[0] == 418
    assert served.bugs == []


async def test_an_answer_without_the_body_closes_after_a_while(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.respond(401, [], b"who?")

    served = Served(nursery, handler=handler, capacity=1000)
    async with trio.open_nursery() as inner:

        async def upload() -> None:
            await served.send(post(b"x" * 200_000))

        inner.start_soon(upload)
        status, headers, _ = await served.answer()
        assert (status, headers["connection"]) == (401, "close")
    # all of it was read and thrown away, so that no reset could overtake the answer
    began = trio.current_time()
    assert await served.closed() == b""
    assert trio.current_time() - began == pytest.approx(1, abs=0.3)


async def test_half_close_comes_before_the_lingering(nursery, autojump_clock):
    halves = []
    served = Served(nursery, half_close=lambda: halves.append(trio.current_time()))
    await served.send(b"GET / HTTP/1.1\r\n\r\n")
    await served.answer()
    began = trio.current_time()
    await served.closed()
    assert halves == [began]
    assert trio.current_time() - began == pytest.approx(1)


async def test_the_lingering_ends_with_the_client(nursery, autojump_clock):
    served = Served(nursery)
    await served.send(b"GET / HTTP/1.1\r\n\r\n")
    await served.answer()
    served.client.cut()
    began = trio.current_time()
    await served.closed()
    assert trio.current_time() == began


async def test_a_client_that_ends_inside_its_body(nursery, autojump_clock):
    seen = []

    async def handler(request: Http1Request) -> None:
        with pytest.raises(PeerGone):
            await request.body(100)
        seen.append(request.gone.is_set())

    served = Served(nursery, handler=handler)
    await served.send(post(b"abc")[:-1])
    served.client.cut()
    assert await served.closed() == b""
    await served.ended.wait()
    assert seen == [True]
    assert served.bugs == []


# --- handlers that fail -----------------------------------------------------------------------


async def test_a_bug_is_a_500_and_the_next_request_is_served(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        raise ZeroDivisionError("secret")

    served = Served(nursery, handler=handler)
    await served.send(GET)
    status, _, body = await served.answer()
    assert status == 500
    assert b"secret" not in body
    served.handler = served.echo
    await served.send(GET)
    assert (await served.answer())[0] == 200
    ((where, error),) = served.bugs
    assert (where, type(error)) == ("http1 handler", ZeroDivisionError)


async def test_a_bug_after_the_answer_began_cuts_it_off(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.start(200, [], b"first")
        raise ZeroDivisionError

    served = Served(nursery, handler=handler)
    await served.send(GET)
    assert (await served.closed()).endswith(b"first\r\n")
    assert len(served.bugs) == 1


async def test_a_handler_without_an_answer_is_a_bug(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        pass

    served = Served(nursery, handler=handler)
    await served.send(GET)
    assert (await served.answer())[0] == 500
    assert len(served.bugs) == 1


async def test_a_handler_may_refuse_also_out_of_a_nursery(nursery, autojump_clock):
    async def handler(request: Http1Request) -> None:
        async with trio.open_nursery():
            raise RequestRefused(403, "no")

    served = Served(nursery, handler=handler)
    await served.send(GET)
    status, headers, _ = await served.answer()
    assert (status, headers["connection"]) == (403, "keep-alive")
    assert served.bugs == []


@pytest.mark.parametrize(
    "header", [("a", "b\r\nc: d"), ("a", "b\0"), ("a b", "c"), ("a", "\u20ac")]
)
async def test_a_header_that_is_none_is_not_sent(nursery, header, autojump_clock):
    async def handler(request: Http1Request) -> None:
        await request.respond(200, [header], b"")

    served = Served(nursery, handler=handler)
    await served.send(GET)
    assert (await served.answer())[0] == 500
    assert isinstance(served.bugs[0][1], ValueError)


async def test_nothing_follows_a_send_that_was_cancelled(nursery, autojump_clock):
    seen = []

    async def handler(request: Http1Request) -> None:
        await request.start(200, [], b"first")
        with trio.move_on_after(1):
            await request.send(b"x" * 100_000)
        with trio.fail_after(1), pytest.raises(PeerGone):
            await request.send(b"after")
        seen.append(True)

    served = Served(nursery, handler=handler, capacity=1000)
    await served.send(GET)
    await served.ended.wait()
    assert seen == [True]
    assert b"after" not in served.client.drain()


async def test_a_cancelled_server_closes_its_connection(autojump_clock):
    async with trio.open_nursery() as nursery:
        served = Served(nursery, handler=Slow(100))
        await served.send(GET)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert served.ours.closed
    assert len(served.connections) == 0


# --- against h11, cut anyhow ------------------------------------------------------------------


@given(
    messages=st.lists(
        st.tuples(
            st.lists(
                st.one_of(
                    st.binary(min_size=1, max_size=30),
                    st.text("\r\n0a", min_size=1, max_size=20).map(lambda text: text.encode()),
                ),
                max_size=3,
            ),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    cuts=st.lists(st.integers(1, 600), max_size=10),
)
async def test_requests_written_by_h11_are_read_however_they_are_cut(messages, cuts):
    peer = h11.Connection(h11.CLIENT)
    data = b""
    bodies = []
    for chunks, chunked in messages:
        bodies.append(b"".join(chunks))
        framing = (
            ("transfer-encoding", "chunked")
            if chunked
            else ("content-length", str(len(bodies[-1])))
        )
        request = h11.Request(method="POST", target="/", headers=[("host", "h"), framing])
        data += peer.send(request) or b""
        for chunk in chunks:
            data += peer.send(h11.Data(data=chunk)) or b""
        data += peer.send(h11.EndOfMessage()) or b""
        peer = h11.Connection(h11.CLIENT)
    received = []

    async def handler(request: Http1Request) -> None:
        received.append(await request.body(1000))
        await request.respond(200, [], b"")

    ours, client = memory_wire_pair(whole=True)
    places = sorted({cut for cut in cuts if cut < len(data)})
    for start, stop in zip([0, *places], [*places, len(data)], strict=True):
        await client.send(data[start:stop])
    client.cut()
    bugs: list[BaseException] = []
    await serve_http1(ours, handler, limits=LIMITS, on_bug=lambda _, error: bugs.append(error))
    assert (received, bugs) == (bodies, [])


@given(data=st.binary(max_size=80), start=st.sampled_from([b"", GET[:20], GET, post(b"abc")[:-5]]))
async def test_any_bytes_are_answered_or_closed(data, start):
    ours, client = memory_wire_pair()
    await client.send(start + data)
    client.cut()
    bugs: list[BaseException] = []
    await serve_http1(
        ours, Served.echo, limits=LIMITS, on_bug=lambda where, error: bugs.append(error)
    )
    assert bugs == []
    assert ours.closed


# --- sockets ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(handler):
    """The server on a real socket; yields its port."""
    bugs = []
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = trio.socket.from_stdlib_socket(listener)

    async def serve_one(sock: socket.socket) -> None:
        await serve_http1(
            SocketWire(sock, stall_seconds=5),
            handler,
            limits=LIMITS,
            on_bug=lambda where, error: bugs.append(error),
            half_close=lambda: sock.shutdown(socket.SHUT_WR),
        )

    async def accept() -> None:
        while True:
            stream, _ = await accepting.accept()
            tasks.start_soon(serve_one, socket.socket(fileno=stream.detach()))

    with trio.fail_after(20):
        async with trio.open_nursery() as tasks:
            tasks.start_soon(accept)
            yield listener.getsockname()[1]
            tasks.cancel_scope.cancel()
    accepting.close()
    assert bugs == []


async def test_an_upload_nobody_wants_gets_its_answer_over_a_socket():
    async def handler(request: Http1Request) -> None:
        await request.body(1000)

    async with listening(handler) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, trio.open_nursery() as nursery:

            async def upload() -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(post(b"x" * 5_000_000))

            nursery.start_soon(upload)
            answer = b""
            async for chunk in stream:
                answer += chunk
            nursery.cancel_scope.cancel()
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_half_closed_client_gets_its_answer_over_a_socket():
    noticed = trio.Event()

    async def handler(request: Http1Request) -> None:
        request.half_closed.then(noticed.set)
        await noticed.wait()
        await request.respond(200, [], b"done")

    async with listening(handler) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(GET)
            await stream.send_eof()
            answer = b""
            async for chunk in stream:
                answer += chunk
    assert answer.endswith(b"\r\n\r\ndone")


async def test_a_hundred_clients_over_sockets():
    ended = 0

    async def handler(request: Http1Request) -> None:
        body = await request.body(1_000_000)
        await trio.sleep(0.001)
        await request.respond(200, [], body)

    async def client(port: int, number: int) -> None:
        nonlocal ended
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            peer = h11.Connection(h11.CLIENT)
            for turn in range(3):
                body = b"%d-%d" % (number, turn) * 100 * (turn + 1)
                headers = [("host", "h"), ("content-length", str(len(body)))]
                await stream.send_all(
                    (peer.send(h11.Request(method="POST", target="/", headers=headers)) or b"")
                    + (peer.send(h11.Data(data=body)) or b"")
                    + (peer.send(h11.EndOfMessage()) or b"")
                )
                received = b""
                while not isinstance(event := peer.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        peer.receive_data(await stream.receive_some())
                    elif isinstance(event, h11.Data):
                        received += event.data
                assert received == body
                peer.start_next_cycle()
        ended += 1

    async with listening(handler) as port:
        async with trio.open_nursery() as clients:
            for number in range(100):
                clients.start_soon(client, port, number)
    await until(lambda: ended == 100)
