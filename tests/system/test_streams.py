"""Streams: event by event and in order, given up when the caller leaves, patient with silence."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import EventStream, card, free_port
from tests.peers.mini import pb_fields, pb_get
from tests.system.world import (
    BINDINGS,
    GRPC_OK,
    GRPC_UNAVAILABLE,
    GRPC_UNKNOWN,
    LABELS,
    GrpcStream,
    message_id,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness import Peer, SseEvent
    from tests.system.world import RemoteAgent, World

pytestmark = pytest.mark.system

COMPLETED, WORKING = 3, 2


class Events:
    """The events of one stream, whatever it is spoken in."""

    def __init__(self, binding: str, source: EventStream | GrpcStream) -> None:
        self.binding = binding
        self.source = source

    async def next(self, seconds: float = 5) -> tuple[str, str] | None:
        """What the next event is: ("chunk", its text), ("state", its name) or ("task", its id)."""
        if isinstance(self.source, GrpcStream):
            data = await self.source.next(seconds)
            return None if data is None else from_pb(data)
        try:
            event = await self.source.next(seconds)
        except StopAsyncIteration:
            return None
        body = event.json()
        assert event.event == "message"
        return from_json(body["result"] if self.binding == "JSONRPC" else body)

    async def state(self, name: str) -> None:
        """The next event must be this state."""
        assert await self.next() == ("state", name)


def from_json(event: dict[str, Any]) -> tuple[str, str]:
    match event:
        case {"task": task}:
            return "task", task["id"]
        case {"artifactUpdate": {"artifact": artifact}}:
            return "chunk", artifact["parts"][0]["text"]
        case {"statusUpdate": {"status": {"state": state}}}:
            return "state", state
        case _:
            raise ValueError(event)


def from_pb(event: bytes) -> tuple[str, str]:
    ((number, body),) = pb_fields(event)
    assert isinstance(body, bytes)
    match number:
        case 1:
            return "task", pb_get(body, 1).decode()
        case 4:
            return "chunk", pb_get(body, 3, 4, 1).decode()
        case _:
            (state,) = [value for field, value in pb_fields(pb_get(body, 3)) if field == 1]
            names = {COMPLETED: "TASK_STATE_COMPLETED", WORKING: "TASK_STATE_WORKING"}
            assert isinstance(state, int)
            return "state", names[state]


@asynccontextmanager
async def streaming(
    agent: RemoteAgent, binding: str, text: str, id_: str | None = None
) -> AsyncIterator[Events]:
    if binding == "GRPC":
        async with agent.grpc_stream(text, id_) as grpc:
            yield Events(binding, grpc)
    else:
        async with agent.stream(binding, text, id_) as sse:
            assert sse.status == 200
            yield Events(binding, sse)


async def agent_over(world: World, sdk: Peer, upstream: str) -> RemoteAgent:
    """The SDK's agent, reached over one binding only."""
    return await world.agent(card([(upstream, sdk.urls[upstream])]))


# --- events -----------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", BINDINGS)
@pytest.mark.parametrize("binding", BINDINGS)
async def test_each_event_arrives_before_the_next_is_sent(
    world: World, sdk: Peer, binding: str, upstream: str
) -> None:
    """The agent sends an event when it is allowed to, which it is when the last has been seen."""
    count = 100 if binding in {"JSONRPC", upstream} else 10
    agent = await agent_over(world, sdk, upstream)
    id_ = message_id()
    async with streaming(agent, binding, f"stream {count}", id_) as events:
        first = await events.next()
        assert first is not None
        assert first[0] == "task"
        await events.state("TASK_STATE_WORKING")
        for number in range(count):
            await sdk.control("next", {"n": 1})
            assert await events.next() == ("chunk", f"chunk {number}")
        await events.state("TASK_STATE_COMPLETED")
        assert await events.next() is None
    if isinstance(events.source, GrpcStream):
        answer = events.source.answer()
        assert answer.status == GRPC_OK
        headers = answer.headers
    else:
        headers = events.source.headers
    assert headers["a2a-sidecar-interface"] == f"0-{LABELS[upstream]}"
    assert headers["a2a-sidecar-attempts"] == "1"
    assert (await sdk.state())["by_message"][id_] == 1
    assert await agent.metric("stream_events_total") == count + 3
    await agent.until("stream_ends_total", 1, reason="completed")
    await agent.until("requests_total", 1, outcome="ok", binding=binding)


async def test_jsonrpc_events_carry_the_callers_id(world: World, sdk: Peer) -> None:
    agent = await agent_over(world, sdk, "GRPC")
    async with agent.stream("JSONRPC", "stream 2 free") as events:
        bodies = [event.json() async for event in events]
    assert len(bodies) == 5
    assert {(body["jsonrpc"], body["id"]) for body in bodies} == {("2.0", 7)}


@pytest.mark.parametrize("upstream", BINDINGS)
@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_caller_that_leaves_ends_the_stream_and_not_the_task(
    world: World, sdk: Peer, binding: str, upstream: str
) -> None:
    agent = await agent_over(world, sdk, upstream)
    before = (await sdk.state())["open_streams"]
    async with streaming(agent, binding, "stream 2") as events:
        found = await events.next()
        assert found is not None
        kind, task = found
        assert kind == "task"
        await events.state("TASK_STATE_WORKING")
        await sdk.until(lambda state: state["open_streams"] == before + 1)
        assert await agent.metric("streams_active") == 1
    await sdk.until(lambda state: state["open_streams"] == before, seconds=1)
    await agent.until("stream_ends_total", 1, reason="cancelled", seconds=1)
    assert await agent.metric("streams_active") == 0
    assert (await sdk.state())["tasks"][task] == "TASK_STATE_WORKING"

    await sdk.control("next", {"n": 2})
    await sdk.until(lambda state: state["tasks"][task] == "TASK_STATE_COMPLETED")
    answer = await agent.get_task("JSONRPC", task)
    assert answer.body["result"]["status"]["state"] == "TASK_STATE_COMPLETED"
    await agent.until("requests_total", 1, outcome="cancelled", binding=binding)


# --- silence ----------------------------------------------------------------------------------


async def test_a_minute_of_silence_is_no_reason_to_end(world: World, sdk: Peer) -> None:
    """On every binding at once; downstream there is a sign of life every four seconds."""
    pairs = [("JSONRPC", upstream) for upstream in BINDINGS]
    pairs += [("HTTP+JSON", "JSONRPC"), ("GRPC", "HTTP+JSON"), ("GRPC", "GRPC")]
    done: list[tuple[str, str]] = []

    async def silent(binding: str, upstream: str) -> None:
        agent = await agent_over(world, sdk, upstream)
        began = trio.current_time()
        async with streaming(agent, binding, "silent 60") as events:
            assert await events.next(10) is not None
            await events.state("TASK_STATE_WORKING")
            quiet = trio.current_time()
            assert await events.next(75) == ("state", "TASK_STATE_COMPLETED")
            ended = trio.current_time()
            assert ended - quiet > 59
            assert await events.next() is None
            source = events.source
            signs = source.pings if isinstance(source, GrpcStream) else source.comments
        gaps = [b - a for a, b in zip([quiet, *signs], [*signs, ended], strict=True)]
        assert max(gaps) < 5, gaps  # a common client gives up after five seconds
        assert 12 <= len(signs) <= 17, signs
        await agent.until("stream_ends_total", 1, reason="completed")
        assert await agent.metric("attempts_total") == 1
        assert began < quiet
        done.append((binding, upstream))

    async with trio.open_nursery() as nursery:
        for pair in pairs:
            nursery.start_soon(silent, *pair)
    assert sorted(done) == sorted(pairs)


async def test_a_stream_that_does_not_open_is_kept_alive_as_well(world: World, first: Peer) -> None:
    """Headers come after `keepalive_seconds`, whether or not the agent has answered."""
    gate = message_id()
    await first.script(*([[{"gate": gate}, "default"]] * len(BINDINGS)))
    opened: list[str] = []

    async def call(binding: str) -> None:
        agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
        began = trio.current_time()
        async with streaming(agent, binding, "hello") as events:
            if isinstance(events.source, GrpcStream):
                await events.source.opened()
            assert 3.5 < trio.current_time() - began < 5
            opened.append(binding)
            found = await events.next()
            assert found is not None
            assert found[0] == "task"
            assert await events.next() == ("chunk", "hello")
            await events.state("TASK_STATE_COMPLETED")
            assert await events.next() is None

    async with trio.open_nursery() as nursery:
        for binding in BINDINGS:
            nursery.start_soon(call, binding)
        with trio.fail_after(10):
            while len(opened) < len(BINDINGS):  # noqa: ASYNC110 - the tasks above
                await trio.sleep(0.02)
        await first.control("open", {"gate": gate})


# --- streams that fail ------------------------------------------------------------------------


async def rest_of(events: EventStream) -> list[SseEvent]:
    with trio.fail_after(10):
        return [event async for event in events]


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_stream_is_not_tried_elsewhere(world: World, second: Peer, binding: str) -> None:
    """Not even when nobody was there to take it; but the next call knows."""
    nobody = f"http://127.0.0.1:{free_port()}"
    agent = await world.agent(card([("JSONRPC", nobody), ("JSONRPC", second.urls["JSONRPC"])]))
    executed = (await second.state())["executions"]
    if binding == "GRPC":
        async with agent.grpc_stream("hello") as events:
            assert await events.next() is None
            answer = events.answer()
            assert answer.status == GRPC_UNAVAILABLE
            assert answer.reason == "NOT_DELIVERED"
            assert answer.delivered == answer.details["delivered"] == "no"
            assert len(answer.attempts) == 1
    elif binding == "JSONRPC":
        async with agent.stream(binding, "hello") as sse:
            assert (sse.status, sse.headers["content-type"]) == (200, "text/event-stream")
            (event,) = await rest_of(sse)
        assert event.event == "error"
        assert (event.json()["id"], event.json()["error"]["code"]) == (7, -32603)
        assert event.json()["error"]["data"][0]["reason"] == "NOT_DELIVERED"
    else:
        async with agent.stream(binding, "hello") as sse:
            assert (sse.status, sse.headers["content-type"]) == (503, "application/json")
            assert sse.headers["a2a-sidecar-delivered"] == "no"
        assert json.loads(sse.body)["error"]["details"][0]["reason"] == "NOT_DELIVERED"
    assert (await second.state())["executions"] == executed
    assert await agent.failovers() == {}
    await agent.until("stream_ends_total", 1, reason="error")

    async with streaming(agent, binding, "hello") as again:
        found = await again.next()
    assert found is not None
    assert found[0] == "task"
    assert (await second.state())["executions"] == executed + 1


BROKEN: dict[str, list[Any]] = {
    "closed": ["close"],
    "reset": ["reset"],
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_stream_that_breaks_ends_with_an_error_that_names_the_task(
    world: World, first: Peer, how: str
) -> None:
    ids = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
    opening = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": ids}}}
    for binding in BINDINGS:
        agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
        await first.script([{"sse": [opening], "end": False}, {"delay": 0.05}, *BROKEN[how]])
        if binding == "GRPC":
            async with agent.grpc_stream("hello") as grpc:
                assert await grpc.next() is not None
                assert await grpc.next() is None
                answer = grpc.answer()
                assert answer.status == GRPC_UNKNOWN
                details, message = answer.details, answer.message
                assert answer.delivered == "unknown"
        else:
            async with agent.stream(binding, "hello") as sse:
                begun, event = await rest_of(sse)
            assert begun.event == "message"
            assert event.event == "error"
            error = event.json()["error"]
            (info,) = error["data" if binding == "JSONRPC" else "details"]
            details, message = info["metadata"], error["message"]
            assert info["reason"] == "DELIVERY_UNKNOWN"
        assert details["delivered"] == "unknown"
        assert details["task"] == "task-9"
        assert "task-9" in message
        await agent.until("stream_ends_total", 1, reason="broken")
        assert await agent.metric("ambiguous_errors_total", phase="receiving") == 1


async def test_a_clean_end_before_the_task_ended_is_an_end(world: World, first: Peer) -> None:
    ids = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
    opening = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": ids}}}
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    await first.script({"sse": [opening]})
    async with agent.stream("HTTP+JSON", "hello") as sse:
        (event,) = await rest_of(sse)
    assert event.event == "message"
    await agent.until("stream_ends_total", 1, reason="unfinished")
    assert await agent.metric("ambiguous_errors_total") == 0


async def test_a_stream_without_events_may_have_run(world: World, first: Peer) -> None:
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    await first.script(["execute", {"sse": []}])
    async with agent.stream("HTTP+JSON", "hello") as sse:
        assert sse.status == 502
        assert sse.headers["a2a-sidecar-delivered"] == "unknown"
    assert await agent.metric("attempts_total", result="malformed") == 1


@pytest.mark.parametrize("upstream", BINDINGS)
async def test_an_answer_to_a_stream_that_is_an_error_is_passed_on(
    world: World, sdk: Peer, upstream: str
) -> None:
    """SubscribeToTask of a task that nobody knows: the agent's own word, before any event."""
    agent = await world.agent(
        card([(upstream, sdk.urls[upstream]), ("JSONRPC", sdk.urls["JSONRPC"])])
    )
    params = {"jsonrpc": "2.0", "id": 3, "method": "SubscribeToTask", "params": {"id": "nowhere"}}
    async with world.daemon.stream(
        "SubscribeToTask", {"id": "nowhere"}, 3, agent=agent.name
    ) as sse:
        (event,) = await rest_of(sse)
    assert params["id"] == event.json()["id"]
    assert event.json()["error"]["code"] == -32001
    assert sse.headers.get("a2a-sidecar-delivered") is None
    assert await agent.failovers() == {}
    assert await agent.current() == f"0-{LABELS[upstream]}"
