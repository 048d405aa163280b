"""Streams over all nine pairs: live, in order, at the reader's pace, and alone with their troubles."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import Peer, message, open_stream, peer_sync
from tests.interop.callers import (
    BINDINGS,
    OPERATIONS,
    PAIRS,
    Between,
    Target,
    between,
    from_pb,
    rest_request,
    to_pb,
)
from tests.interop.h2_client import Connection, Stream, frame, h2_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.harness import EventStream

pytestmark = pytest.mark.interop

STREAM = "SendStreamingMessage"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(agent: Peer) -> Iterator[Between]:
    with between(agent.urls, extra="[limits]\nkeepalive_seconds = 0.5") as running:
        yield running


@pytest.fixture(scope="module")
def firehose() -> Iterator[Peer]:
    with peer_sync("firehose") as running:
        yield running


@pytest.fixture(scope="module")
def flooded(firehose: Peer) -> Iterator[Between]:
    with between(firehose.urls) as running:
        yield running


# --- reading event by event -------------------------------------------------------------------


class Reader:
    """An open stream in any binding."""

    def __init__(self, binding: str, events: EventStream | Stream) -> None:
        self.binding = binding
        self.events = events

    async def next(self, seconds: float = 5) -> Any:
        """The next event; None at the end."""
        if isinstance(self.events, Stream):
            data = await self.events.next(seconds)
            return None if data is None else from_pb("StreamResponse", data)
        try:
            event = await self.events.next(seconds)
        except StopAsyncIteration:
            return None
        value = event.json()
        return value["result"] if self.binding == "JSONRPC" else value

    async def kinds(self) -> list[str]:
        """What is left, to the end."""
        found = []
        while (event := await self.next(30)) is not None:
            found.append(next(iter(event)))
        return found


@asynccontextmanager
async def reading(
    target: Target, request: Any, method: str = STREAM, *, seconds: float = 5
) -> AsyncIterator[Reader]:
    """Open a stream; leaving the block closes the connection."""
    headers = {"content-type": "application/json", "a2a-version": "1.0"}
    if target.binding == "GRPC":
        async with h2_connection(target.port) as connection:
            yield Reader("GRPC", await begin(connection, request, method))
        return
    path, body = target.path, b""
    if target.binding == "JSONRPC":
        rpc = {"jsonrpc": "2.0", "id": 1, "method": method, "params": request}
        body = json.dumps(rpc).encode()
    else:
        route, _, body = rest_request(OPERATIONS[method], request)
        path += route
    async with open_stream(
        target.port, "POST", path, headers=headers, body=body, seconds=seconds
    ) as events:
        yield Reader(target.binding, events)


async def begin(connection: Connection, request: Any, method: str = STREAM) -> Stream:
    return await connection.call(method, frame(to_pb(OPERATIONS[method].request, request)))


# --- live -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_each_event_arrives_before_the_next_is_made(
    down: str, up: str, agent: Peer, sidecar: Between
) -> None:
    async with reading(sidecar.through(down, up), message("stream 3")) as reader:
        task = (await reader.next())["task"]["id"]
        assert "statusUpdate" in await reader.next()
        for number in range(3):
            await agent.control("next", {"n": 1})
            update = (await reader.next())["artifactUpdate"]
            assert update["taskId"] == task
            assert update["artifact"]["parts"] == [{"text": f"chunk {number}"}]
        done = (await reader.next())["statusUpdate"]
        assert done["status"]["state"] == "TASK_STATE_COMPLETED"
        assert await reader.next() is None


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_a_reader_that_leaves_ends_the_stream_and_not_the_task(
    down: str, up: str, agent: Peer, sidecar: Between
) -> None:
    before = (await agent.state())["open_streams"]
    async with reading(sidecar.through(down, up), message("stream 1")) as reader:
        task = (await reader.next())["task"]["id"]
        assert "statusUpdate" in await reader.next()
        # a second reader of the same task is not disturbed when the first leaves
        subscribed = reading(sidecar.through(down, up), {"id": task}, "SubscribeToTask")
        async with subscribed as other:
            assert (await other.next())["task"]["id"] == task
            await agent.until(lambda state: state["open_streams"] == before + 2)
        await agent.until(lambda state: state["open_streams"] == before + 1)
    await agent.until(lambda state: state["open_streams"] == before, seconds=2)
    assert (await agent.state())["tasks"][task] == "TASK_STATE_WORKING"
    await agent.control("next", {"n": 1})
    await agent.until(lambda state: state["tasks"][task] == "TASK_STATE_COMPLETED")


@pytest.mark.parametrize("down", BINDINGS)
async def test_silence_is_filled(down: str, sidecar: Between) -> None:
    """Headers without an event, and signs of life; some clients give up after five seconds."""

    async def one(up: str) -> None:
        target = sidecar.through(down, up)
        started = trio.current_time()
        async with reading(target, message("sleep 1.2"), seconds=1) as reader:
            if isinstance(reader.events, Stream):
                await reader.events.opened(1)
            assert 0.4 < trio.current_time() - started < 1.1
            assert "task" in await reader.next()
            assert len(await reader.kinds()) == 3
            if isinstance(reader.events, Stream):
                assert reader.events.connection.pings >= 1
                assert reader.events.status == 0
            else:
                assert len(reader.events.comments) >= 1

    async with trio.open_nursery() as nursery:
        for up in BINDINGS:
            nursery.start_soon(one, up)


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_many_events_keep_their_order_and_number(
    down: str, up: str, firehose: Peer, flooded: Between
) -> None:
    await firehose.control("stream", {"events": 500, "size": 100})
    async with reading(flooded.through(down, up), message()) as reader:
        assert await reader.kinds() == ["task", *["artifactUpdate"] * 500, "statusUpdate"]


# --- at the reader's pace ---------------------------------------------------------------------


def memory(sidecar: Between, field: str) -> int:
    """VmRSS or VmHWM of the sidecar, in bytes."""
    text = Path(f"/proc/{sidecar.sidecar.process.pid}/status").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) * 1024


async def stopped(firehose: Peer, before: int) -> int:
    """Wait until the agent sends no more; how many events it has sent."""
    last, since = -1, trio.current_time()
    with trio.fail_after(10):
        while trio.current_time() - since < 0.4 or last <= before:
            sent = (await firehose.state())["sent"]
            if sent != last:
                last, since = sent, trio.current_time()
            await trio.sleep(0.05)
    return last - before


# 200 MiB once for each kind of connection.
FLOODS = [(down, up, 200 if down == up != "HTTP+JSON" else 30) for down, up in PAIRS]


@pytest.mark.parametrize(("down", "up", "count"), FLOODS)
async def test_a_slow_reader_stops_the_agent(
    down: str, up: str, count: int, firehose: Peer, flooded: Between
) -> None:
    await firehose.control("stream", {"events": count, "size": MIB})
    target = flooded.through(down, up)
    before = (await firehose.state())["sent"]
    rss = memory(flooded, "VmRSS")
    async with reading(target, message()) as reader:
        assert "task" in await reader.next()
        assert "artifactUpdate" in await reader.next()
        sent = await stopped(firehose, before)
        assert sent < 20, "the agent went on sending"
        assert memory(flooded, "VmRSS") - rss < 24 * MIB
        rest = await reader.kinds()
    assert rest == [*["artifactUpdate"] * (count - 1), "statusUpdate"]
    assert (await firehose.state())["sent"] == before + count
    assert memory(flooded, "VmHWM") - rss < 40 * MIB


@pytest.mark.parametrize("up", BINDINGS)
async def test_stalled_streams_do_not_hold_up_their_connection(
    up: str, firehose: Peer, flooded: Between
) -> None:
    """More of them than the windows of one HTTP/2 connection would have room for."""
    await firehose.control("stream", {"events": 20, "size": MIB})
    before = (await firehose.state())["open_streams"]
    async with h2_connection(flooded.through("GRPC", up).port) as connection:
        stalled = [await begin(connection, message()) for _ in range(20)]
        for stream in stalled:
            assert await stream.next() is not None
        await firehose.control("stream", {"events": 50, "size": 1000})
        started = trio.current_time()
        reader = Reader("GRPC", await begin(connection, message()))
        assert len(await reader.kinds()) == 52
        assert trio.current_time() - started < 5
        assert (await firehose.state())["open_streams"] == before + 20
        for stream in stalled[1:]:
            await stream.cancel()
        await firehose.until(lambda state: state["open_streams"] == before + 1)
        # the one that was held up goes on, and a new one has its way
        assert len(await Reader("GRPC", await begin(connection, message())).kinds()) == 52
        assert len(await Reader("GRPC", stalled[0]).kinds()) == 21


@pytest.mark.parametrize("down", ["JSONRPC", "HTTP+JSON"])
async def test_stalled_streams_share_a_connection_to_the_agent_with_others(
    down: str, firehose: Peer, flooded: Between
) -> None:
    await firehose.control("stream", {"events": 20, "size": MIB})
    target = flooded.through(down, "GRPC")

    async def stall(task_status: trio.TaskStatus[None]) -> None:
        async with reading(target, message()) as reader:
            assert "task" in await reader.next()
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            await nursery.start(stall)
        await firehose.control("stream", {"events": 50, "size": 1000})
        started = trio.current_time()
        async with reading(target, message()) as reader:
            assert len(await reader.kinds()) == 52
        assert trio.current_time() - started < 5
        shared = await flooded.sidecar.metric("a2a_sidecar_upstream_connections", agent="grpc")
        assert shared == 1
        nursery.cancel_scope.cancel()
    await firehose.until(lambda state: state["open_streams"] == 0)
