"""Bounds: each refusal in the binding's own form and counted, and a daemon that goes on under load."""

from __future__ import annotations

import json
import os
import resource
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Response,
    Sidecar,
    card,
    connect,
    http,
    message,
    peer,
    peer_sync,
    sidecar,
    write_card,
)
from tests.support.daemon import BINDINGS
from tests.system.world import RemoteAgent, message_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.harness import Peer
    from tests.system.world import Answer

pytestmark = pytest.mark.system

LIMITS = """[limits]
request_bytes = 400000
response_bytes = 400000
event_bytes = 100000
header_bytes = 8192
buffered_bytes = 1048576
"""
STATUS = {"JSONRPC": 200, "HTTP+JSON": 503, "GRPC": 8}
TOO_LARGE = {"JSONRPC": 200, "HTTP+JSON": 413, "GRPC": 8}
LATER = {"JSONRPC": 200, "HTTP+JSON": 200, "GRPC": 0}
HEADERS = {"content-type": "application/json", "a2a-version": "1.0"}


@dataclass
class Bounded:
    """A daemon with low limits in front of a scripted agent."""

    daemon: Sidecar
    agent: RemoteAgent
    peer: Peer

    async def refusals(self, limit: str) -> float:
        """How often a limit was counted."""
        return await self.daemon.metric("a2a_sidecar_limit_rejections_total", limit=limit)

    async def executed(self) -> int:
        """How many calls the agent has seen."""
        return len([one for one in (await self.peer.state())["requests"] if one["rpc"]])


@pytest.fixture(scope="module")
def scripted() -> Iterator[Peer]:
    """An agent that only this file's tests script."""
    with peer_sync("raw_http") as result:
        yield result


@asynccontextmanager
async def bounded(scripted: Peer, directory: Path, **keys: Any) -> AsyncIterator[Bounded]:
    await scripted.control("clear")
    file = write_card(directory, card([("JSONRPC", scripted.urls["JSONRPC"])]))
    async with sidecar(agents={"one": {"card": file, **keys}}, extra=LIMITS, ready=True) as daemon:
        yield Bounded(daemon, RemoteAgent(daemon, "one"), scripted)
        assert "internal error" not in daemon.log()


def check(answer: Answer, binding: str, statuses: dict[str, int], reason: str) -> None:
    """One of our own refusals, in the binding's form."""
    assert (answer.status, answer.reason, answer.domain) == (
        statuses[binding],
        reason,
        "a2a-sidecar",
    )
    assert answer.delivered == "no"
    if reason == "LIMIT_REACHED":
        assert answer.headers["retry-after"] == "1"


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Wait for what another process does."""
    with trio.fail_after(seconds):
        while not await condition():  # noqa: ASYNC110 - another process
            await trio.sleep(0.02)


# --- sizes ------------------------------------------------------------------------------------


async def test_sizes(scripted, tmp_path):
    async with bounded(scripted, tmp_path) as it:
        before = await it.executed()
        for binding in BINDINGS:
            refused = await it.refusals("request_bytes")
            check(await it.agent.send(binding, "x" * 500_000), binding, TOO_LARGE, "TOO_LARGE")
            assert await it.refusals("request_bytes") == refused + 1
        for binding in ("JSONRPC", "HTTP+JSON"):
            reply = await chunked(it.daemon, binding, 500_000)
            assert reply.status == TOO_LARGE[binding]
            assert b"TOO_LARGE" in reply.body
            headers = {**HEADERS, "x-large": "x" * 10_000}
            reply = await http(it.daemon.listeners[binding], "POST", "/", headers=headers)
            assert reply.status == 431
            assert reply.json()["error"]
        assert await it.refusals("header_bytes") == 2
        assert await it.executed() == before

        large = {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": "y" * 500_000}]}
        for binding in BINDINGS:
            body = {"jsonrpc": "2.0", "id": 1, "result": {"message": large}}
            await scripted.script({"reply": {"body": body}})
            answer = await it.agent.send(binding)
            assert (answer.reason, answer.delivered) == ("DELIVERY_UNKNOWN", "unknown")
            assert "limits.response_bytes" in answer.message
        assert await it.refusals("response_bytes") == 3
        event = {"jsonrpc": "2.0", "id": 1, "result": {"message": large}}
        await scripted.script({"sse": [{"data": event}], "end": True})
        async with it.agent.stream("HTTP+JSON", "hello") as events:
            assert "limits.event_bytes" in events.body.decode()
        assert await it.refusals("event_bytes") == 1


async def chunked(daemon: Sidecar, binding: str, size: int) -> Response:
    """A request whose length nobody knows before its end."""
    path = "/" if binding == "JSONRPC" else "/message:send"
    stream = await connect(daemon.listeners[binding])
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    await stream.send_all(f"{head}\r\n{size:x}\r\n".encode() + b" " * size + b"\r\n")
    return await answer_on(stream)


async def answer_on(stream: trio.abc.Stream) -> Response:
    """The response on a connection that is closed then, or has a length."""
    got = bytearray()
    with trio.fail_after(10):
        try:
            while True:
                head, end, body = bytes(got).partition(b"\r\n\r\n")
                length = next(
                    (
                        int(line[15:])
                        for line in head.split(b"\r\n")
                        if line[:15] == b"content-length:"
                    ),
                    None,
                )
                if end and length is not None and len(body) >= length:
                    break
                data = await stream.receive_some()
                if not data:
                    break
                got += data
        except trio.BrokenResourceError:
            pass
    await trio.aclose_forcefully(stream)
    head, _, body = bytes(got).partition(b"\r\n\r\n")
    assert head, "no answer"
    first, *lines = head.decode().split("\r\n")
    fields = [(name, value) for name, value in (line.split(": ", 1) for line in lines)]
    return Response(status=int(first.split()[1]), headers=fields, body=body)


# --- calls at once ----------------------------------------------------------------------------


@asynccontextmanager
async def under_way(it: Bounded, count: int, *, streams: bool = False) -> AsyncIterator[None]:
    """Calls that the agent does not answer before the end of the block."""
    gate = message_id()
    await it.peer.script(*[[{"gate": gate}, "default"]] * count)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        for _ in range(count):
            if streams:
                call = stack.enter_async_context(it.agent.grpc_stream("hello"))
                await call
            else:
                nursery.start_soon(it.agent.send)
        name = "a2a_sidecar_streams_active" if streams else "a2a_sidecar_requests_in_flight"

        async def all_there() -> bool:
            return await it.daemon.metric(name) == count

        await until(all_there)
        yield
        await it.peer.control("open", {"gate": gate})


async def test_calls_at_once(scripted, tmp_path):
    async with bounded(scripted, tmp_path, max_concurrency=2, max_streams=2) as it:
        async with under_way(it, 2):
            for binding in BINDINGS:
                check(await it.agent.send(binding), binding, STATUS, "LIMIT_REACHED")
            assert await it.refusals("max_concurrency") == 3
            # Streams have places of their own.
            async with it.agent.stream("HTTP+JSON", "hello") as events:
                assert len([event async for event in events]) > 1
        for binding in BINDINGS:
            assert (await it.agent.send(binding)).status == LATER[binding]

        async with under_way(it, 2, streams=True):
            async with it.agent.stream("HTTP+JSON", "hello") as events:
                assert (events.status, events.headers["retry-after"]) == (503, "1")
                assert b"LIMIT_REACHED" in events.body
            async with it.agent.stream("JSONRPC", "hello") as events:
                event = await events.next()
                assert (event.event, "LIMIT_REACHED" in event.data) == ("error", True)
            async with it.agent.grpc_stream("hello") as stream:
                assert await stream.next() is None
                check(stream.answer(), "GRPC", STATUS, "LIMIT_REACHED")
            assert await it.refusals("max_streams") == 3
            assert not (await it.agent.send()).failed
        assert await it.agent.current() == "0-jsonrpc"


# --- memory -----------------------------------------------------------------------------------


async def test_one_budget_for_everything_that_is_held(scripted, tmp_path):
    async with bounded(scripted, tmp_path) as it:
        gate = message_id()
        await scripted.script(*[[{"gate": gate}, "default"]] * 2)
        text = "x" * 200_000
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(it.agent.send, "JSONRPC", text)

            async def both_wait() -> bool:
                left: int = (await scripted.state())["script_left"]
                return left == 0

            await until(both_wait)
            for binding in BINDINGS:
                answer = await it.agent.send(binding, text)
                check(answer, binding, STATUS, "LIMIT_REACHED")
                assert "limits.buffered_bytes" in answer.message
            # What comes in pieces is refused when the piece comes for which there is no room.
            reply = await chunked(it.daemon, "HTTP+JSON", 390_000)
            assert reply.status == 503
            assert await it.refusals("buffered_bytes") == 4
            await scripted.control("open", {"gate": gate})
        for binding in BINDINGS:
            assert (await it.agent.send(binding, text)).status == LATER[binding]


async def test_replies_that_do_not_fit_together_all_arrive(scripted, tmp_path):
    """Together they need more than there is; each waits for its turn, and none for ever."""
    async with bounded(scripted, tmp_path) as it:
        reply = {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": "y" * 390_000}]}
        body = {"jsonrpc": "2.0", "id": 1, "result": {"message": reply}}
        await scripted.script(*[{"reply": {"body": body, "pause": 0.3}}] * 12)
        failed: list[bool] = []

        async def call() -> None:
            failed.append((await it.agent.send()).failed)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(call)
        assert failed == [False] * 12


# --- descriptors ------------------------------------------------------------------------------


def descriptors(daemon: Sidecar) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def cpu_seconds(daemon: Sidecar) -> float:
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def allow(daemon: Sidecar, count: int) -> None:
    """Set the limit on descriptors of the running daemon."""
    _, most = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (count, most))


async def test_descriptors_used_up(scripted, tmp_path):
    """D79: busy connections take all there are; the daemon says so, goes on, and recovers."""
    async with bounded(scripted, tmp_path) as it, AsyncExitStack() as stack:
        allow(it.daemon, 64)
        address = it.daemon.listeners["JSONRPC"]
        streams = []
        for _ in range(100):
            stream = await connect(address)
            stack.push_async_callback(trio.aclose_forcefully, stream)
            streams.append(stream)
            await stream.send_all(b"POST / HTTP/1.1\r\nhost: local")  # busy: a request has begun

        async def turned_away() -> bool:
            return await it.refusals("descriptors") > 0

        async def four_of_64_are_left() -> bool:
            # The scrape that looked at the refusals has one of the four until it is closed.
            return 50 < descriptors(it.daemon) <= 60

        await until(turned_away)
        await until(four_of_64_are_left)
        used, begin = cpu_seconds(it.daemon), trio.current_time()
        for _ in range(10):
            assert (await http(it.daemon.admin, "GET", "/healthz", seconds=2)).status == 200
            await trio.sleep(0.1)
        assert cpu_seconds(it.daemon) - used < (trio.current_time() - begin) / 2
        assert len(it.daemon.log().splitlines()) < 40
        reply = await http(address, "GET", "/")
        assert (reply.status, reply.get("retry-after")) == (200, "1")
        assert reply.json()["error"]["data"][0]["reason"] == "LIMIT_REACHED"
        for stream in streams[:80]:
            await trio.aclose_forcefully(stream)

        async def served() -> bool:
            return not (await it.agent.send()).failed

        await until(served)


async def test_no_descriptor_for_an_upstream_connection(scripted, tmp_path):
    """D79: that is ours alone: nothing was sent, and the interface is not to blame."""
    async with bounded(scripted, tmp_path) as it, AsyncExitStack() as stack:
        stream = await connect(it.daemon.listeners["JSONRPC"])
        stack.push_async_callback(trio.aclose_forcefully, stream)
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message()}
        ).encode()
        head = (
            "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"a2a-version: 1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        await stream.send_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"405" in await stream.receive_some()
        before = await it.executed()
        allow(it.daemon, descriptors(it.daemon))
        await stream.send_all(head.encode() + body)
        reply = await answer_on(stream)
        error = reply.json()["error"]["data"][0]
        assert (error["reason"], error["metadata"]["delivered"]) == ("LIMIT_REACHED", "no")
        allow(it.daemon, 4096)
        assert await it.executed() == before
        assert not (await it.agent.send()).failed
        assert await it.agent.metric("selection_changes_total") == 0


# --- load -------------------------------------------------------------------------------------

IDLE, STREAMS = 2000, 1000


async def test_two_thousand_idle_connections_and_a_thousand_streams(tmp_path):
    extra = f"[limits]\nconnections = {IDLE + STREAMS + 100}\n"
    async with peer("h2_agent", "--max-concurrent-streams", "400") as agent:
        file = write_card(tmp_path, card([("GRPC", agent.urls["GRPC"])]))
        await agent.script(*[[{"default": {"events": 1}}, "hang"]] * STREAMS)
        keys = {"card": file, "max_streams": STREAMS + 10}
        async with sidecar(agents={"one": keys}, extra=extra, ready=True) as daemon:
            async with AsyncExitStack() as stack:
                await load(daemon, stack)
                await lively(daemon)
                assert await daemon.metric("a2a_sidecar_streams_active") == STREAMS
                # Descriptors run out on top of it: idle connections make room for calls.
                used = descriptors(daemon)
                assert used > IDLE + STREAMS
                allow(daemon, used + used // 15)
                await lively(daemon, calls=50)
                assert await daemon.metric("a2a_sidecar_streams_active") == STREAMS
            await until_quiet(daemon)
            await lively(daemon)
            assert "internal error" not in daemon.log()


async def load(daemon: Sidecar, stack: AsyncExitStack) -> None:
    for number in range(IDLE):
        stream = await connect(daemon.listeners[("JSONRPC", "HTTP+JSON")[number % 2]])
        stack.push_async_callback(trio.aclose_forcefully, stream)
    params = message("hello")
    body = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": params}
    )
    request = (
        "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"a2a-version: 1.0\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    opened = 0

    async def open_one() -> None:
        nonlocal opened
        stream = await connect(daemon.listeners["JSONRPC"])
        stack.push_async_callback(trio.aclose_forcefully, stream)
        await stream.send_all(request)
        got = b""
        while b"data:" not in got:
            data = await stream.receive_some()
            assert data, got
            got += data
        opened += 1

    with trio.fail_after(60):
        for _ in range(STREAMS // 50):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(open_one)
    assert opened == STREAMS


async def lively(daemon: Sidecar, calls: int = 5) -> None:
    """It answers, and does its work."""
    begin = trio.current_time()
    assert (await http(daemon.admin, "GET", "/healthz", seconds=5)).status == 200
    assert trio.current_time() - begin < 3
    for _ in range(calls):
        for binding in BINDINGS:
            assert not (await RemoteAgent(daemon, "one").send(binding)).failed


async def until_quiet(daemon: Sidecar) -> None:
    """Everything that was held is given back."""

    async def quiet() -> bool:
        streams = await daemon.metric("a2a_sidecar_streams_active")
        return streams == 0 and descriptors(daemon) < 100

    await until(quiet, 30)


# --- clients that take nothing ----------------------------------------------------------------


async def test_a_client_that_takes_nothing_is_given_up(scripted, tmp_path):
    event = {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": "y" * 90_000}]}
    body = {"jsonrpc": "2.0", "id": 1, "result": {"message": event}}
    extra = "[limits]\nkeepalive_seconds = 0.5\nstall_seconds = 1.0\n"
    file = write_card(tmp_path, card([("JSONRPC", scripted.urls["JSONRPC"])]))
    await scripted.control("clear")
    async with sidecar(agents={"one": file}, extra=extra, ready=True) as daemon:
        agent = RemoteAgent(daemon, "one")
        await scripted.script(*[{"sse": [{"data": body}] * 300, "end": True}] * 3)
        async with (
            agent.stream("JSONRPC", "hello"),
            agent.stream("HTTP+JSON", "hello"),
            agent.grpc_stream("hello"),
        ):
            await agent.until("stream_ends_total", 3, seconds=20, reason="stalled")
            await agent.until("streams_active", 0)
            # The agents' side was held back, and let go then.
            await scripted.until(lambda state: state["open_streams"] == 0)
            assert not (await agent.send()).failed


# --- slow clients -----------------------------------------------------------------------------


async def test_slow_clients_cost_nobody_else_anything(scripted, tmp_path):
    """Heads, bodies and header blocks that do not end: given up after ten seconds, thirty a body."""
    async with bounded(scripted, tmp_path) as it, AsyncExitStack() as stack:
        slow = []
        for number in range(60):
            stream = await connect(it.daemon.listeners[BINDINGS[number % 3]])
            stack.push_async_callback(trio.aclose_forcefully, stream)
            if BINDINGS[number % 3] == "GRPC":
                await stream.send_all(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
                )
                await stream.send_all(b"\0\0\1\1\0\0\0\0\1\x82")  # HEADERS, to be continued
            else:
                await stream.send_all(b"POST / HTTP/1.1\r\nhost: localhost\r\n")
            slow.append(stream)
        begin = trio.current_time()
        ends: list[float] = []

        async def drip(stream: trio.abc.Stream) -> None:
            with trio.move_on_after(20):
                try:
                    while data := await stream.receive_some():
                        assert b" 200 " not in data
                except trio.BrokenResourceError:
                    pass
                ends.append(trio.current_time() - begin)

        async with trio.open_nursery() as nursery:
            for stream in slow:
                nursery.start_soon(drip, stream)
            while trio.current_time() < begin + 8:
                started = trio.current_time()
                for binding in BINDINGS:
                    assert not (await it.agent.send(binding)).failed
                assert trio.current_time() - started < 3
                await trio.sleep(0.5)
        assert len(ends) == len(slow)
        assert min(ends) > 9
        assert await it.refusals("slow_request") == 40
