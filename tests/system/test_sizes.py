"""Large messages cross every binding; those above the limit are refused before anything is sent."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from tests.harness import card
from tests.peers.mini import pb, pb_get
from tests.system.world import BINDINGS, message_id, text_of

if TYPE_CHECKING:
    from tests.harness import Peer
    from tests.system.world import World

pytestmark = pytest.mark.system

TEN_MIB = 10 * 1024 * 1024
CONTENT = (bytes(range(256)) * (TEN_MIB // 256 + 1))[:TEN_MIB]
GRPC_RESOURCE_EXHAUSTED = 8


@pytest.mark.parametrize("upstream", BINDINGS)
async def test_ten_mebibytes_cross_both_ways(world: World, sdk: Peer, upstream: str) -> None:
    """A message of that size, whose task holds it as history, and then an artifact."""
    agent = await world.agent(card([(upstream, sdk.urls[upstream])]))
    id_ = message_id()
    parts = [{"text": "count"}, {"raw": base64.b64encode(CONTENT).decode()}]
    params = {"message": {"messageId": id_, "role": "ROLE_USER", "parts": parts}}
    answer = await agent.jsonrpc("SendMessage", params, seconds=60)
    assert text_of(answer) == str(len("count") + TEN_MIB)
    history = answer.body["result"]["task"]["history"][0]
    assert base64.b64decode(history["parts"][1]["raw"]) == CONTENT
    assert (await sdk.state())["by_message"][id_] == 1

    async with agent.stream("JSONRPC", f"big {TEN_MIB}") as events:
        found = [event.json()["result"] async for event in events]
    (artifact,) = [
        event["artifactUpdate"]["artifact"] for event in found if "artifactUpdate" in event
    ]
    assert base64.b64decode(artifact["parts"][0]["raw"]) == CONTENT


@pytest.mark.parametrize("upstream", ["HTTP+JSON", "GRPC"])
async def test_ten_mebibytes_cross_from_grpc(world: World, sdk: Peer, upstream: str) -> None:
    agent = await world.agent(card([(upstream, sdk.urls[upstream])]))
    content = pb(1, message_id()) + pb(4, 1) + pb(5, pb(1, "count")) + pb(5, pb(2, CONTENT))
    request = pb(1, agent.name) + pb(2, content)
    answer = await agent.grpc("SendMessage", request, seconds=60)
    assert text_of(answer, grpc=True) == str(len("count") + TEN_MIB)

    async with agent.grpc_stream(f"big {TEN_MIB}") as events:
        sizes = []
        while (event := await events.next(20)) is not None:
            sizes.append(len(pb_get(event, 4, 3, 4, 2)))  # artifactUpdate, artifact, part, raw
    assert max(sizes) == TEN_MIB


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_request_above_the_limit_is_refused_here(
    world: World, first: Peer, binding: str
) -> None:
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    before = await first.state()
    answer = await agent.send(binding, "x" * (16 * 1024 * 1024))  # and its envelope
    assert answer.failed
    assert (answer.reason, answer.domain) == ("TOO_LARGE", "a2a-sidecar")
    assert answer.delivered == "no"
    assert "request_bytes" in answer.message
    wanted = {"JSONRPC": 200, "HTTP+JSON": 413, "GRPC": GRPC_RESOURCE_EXHAUSTED}
    assert answer.status == wanted[binding]
    state = await first.state()
    assert len(state["requests"]) == len(before["requests"])
    assert state["connections"] == before["connections"]
    assert await agent.metric("attempts_total") == 0

    assert not (await agent.send(binding)).failed


async def test_a_reply_above_the_limit_keeps_the_interface(
    world: World, first: Peer, second: Peer
) -> None:
    """The agent has run it, so the caller is told; another interface would answer no less."""
    agent = await world.agent(
        card([("JSONRPC", first.urls["JSONRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    id_ = message_id()
    await first.script(["execute", {"reply": {"body": "{", "length": 65 * 1024 * 1024}}])
    answer = await agent.send("HTTP+JSON", "hello", id_)
    assert (answer.status, answer.delivered) == (502, "unknown")
    assert "response_bytes" in answer.message
    assert await agent.metric("attempts_total", result="too_large") == 1
    assert (await first.state())["by_message"][id_] == 1
    assert await agent.current() == "0-jsonrpc"
