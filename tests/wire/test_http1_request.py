"""Requests of the HTTP/1.1 server by themselves: what is one, what it says, how it is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from sidecar.wire.http1_request import Fact, Http1Request, RequestRefused, parse_request

if TYPE_CHECKING:
    from collections.abc import Callable


class Recorder:
    """Stands for the connection."""

    def __init__(self) -> None:
        self.sent = b""
        self.sends = 0
        self.watched = 0

    async def send(self, data: bytes | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += data
        self.sends += 1

    async def read_body(
        self, request: Http1Request, limit: int, taken: Callable[[int], None] | None
    ) -> bytes:
        await trio.lowlevel.checkpoint()
        return b"x" * limit

    async def look(self) -> None:
        await trio.lowlevel.checkpoint()

    def watch_now(self) -> None:
        self.watched += 1

    def persistence(self, request: Http1Request) -> str:
        return "connection: x\r\n"


def parse(head: bytes) -> Http1Request:
    return parse_request(Recorder(), head)


@pytest.mark.parametrize(
    ("lines", "length", "wants_continue"),
    [
        (b"", 0, False),
        (b"Content-Length: 12\r\n", 12, False),
        (b"Transfer-Encoding: CHUNKED\r\n", None, False),
        (b"Content-Length: 12\r\nExpect: 100-CONTINUE\r\n", 12, True),
        (b"Content-Length: 12\r\nExpect: something-else\r\n", 12, False),
    ],
)
def test_what_a_head_says_of_the_body(lines, length, wants_continue):
    request = parse(b"POST / HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n")
    assert (request.content_length, request.wants_continue) == (length, wants_continue)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"close", False),
        (b"1.1", b"a, CLOSE , b", False),
        (b"1.1", b"keep-alive", True),
        (b"1.0", b"", False),
        (b"1.0", b"keep-alive", True),
    ],
)
@pytest.mark.parametrize("length", [b"", b"Content-Length: 3\r\n"])
def test_whether_the_client_keeps_the_connection(version, connection, keep_alive, length):
    head = b"GET / HTTP/" + version + b"\r\nHost: h\r\n" + length
    if connection:
        head += b"Connection: " + connection + b"\r\n"
    request = parse(head + b"\r\n")
    assert request.keep_alive == keep_alive
    assert request.http10 == (version == b"1.0")


def test_expect_of_http10_is_ignored():
    head = b"POST / HTTP/1.0\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n"
    assert not parse(head).wants_continue


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/2.0", 505),
        (b"GET / HTTP/0.9", 400),
        (b"GET http://h/ HTTP/1.1", 400),
        (b"GET * HTTP/1.1", 400),
        (b"CONNECT h:1 HTTP/1.1", 400),
    ],
)
def test_first_lines_that_are_refused(line, status):
    with pytest.raises(RequestRefused) as caught:
        parse(line + b"\r\nHost: h\r\n\r\n")
    assert caught.value.status == status


async def test_a_request_is_answered_once():
    request = parse(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await request.respond(200, [], b"")
    with pytest.raises(RuntimeError):
        await request.respond(200, [], b"")
    with pytest.raises(RuntimeError):
        await request.start(200, [])


async def test_the_lines_of_an_answer():
    recorder = Recorder()
    request = parse_request(recorder, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    headers = [("a", "b"), ("content-length", "99"), ("connection", "y"), ("c", "\xe9")]
    await request.respond(404, headers, b"no")
    assert recorder.sent == (
        b"HTTP/1.1 404 Not Found\r\na: b\r\nc: \xe9\r\ncontent-length: 2\r\nconnection: x\r\n\r\nno"
    )
    assert (recorder.sends, recorder.watched) == (1, 0)


async def test_an_odd_status_has_no_reason():
    recorder = Recorder()
    request = parse_request(recorder, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await request.start(599, [])
    assert recorder.sent.startswith(b"HTTP/1.1 599 \r\n")
    assert recorder.watched == 1


async def test_a_request_without_a_body_reads_nothing():
    assert await parse(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").body(5) == b""


async def test_a_fact_wakes_and_calls_once(autojump_clock):
    fact = Fact()
    calls = []
    fact.then(lambda: calls.append(1))
    fact.then(lambda: calls.append(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fact.wait)
        nursery.start_soon(fact.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not fact.is_set()
        assert calls == []
        fact.set()
        fact.set()
    assert fact.is_set()
    assert calls == [1, 2]
    fact.then(lambda: calls.append(3))
    assert calls == [1, 2, 3]
    with trio.fail_after(1):
        await fact.wait()


async def test_waiting_for_a_fact_that_has_happened():
    fact = Fact()
    fact.set()
    with trio.fail_after(1):
        await fact.wait()
