"""Connections end all the time, by age, count or idleness: no caller notices, nothing runs twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import card, peer
from tests.system.world import LABELS, KeepAlive, message_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.harness import Peer
    from tests.system.world import RemoteAgent, World

pytestmark = pytest.mark.system

CALLS = 1000

# (callers at once, calls of each, seconds that all wait before)
PHASES = [(1, 50, 0.0), (8, 40, 0.5), (32, 10, 0.0), (1, 10, 1.1), (20, 15, 0.5)]

# Where idle connections are closed, every one has been after a wait, and none is left to idle for
# nearly as long while others are in use: a request that meets the closing may have been taken.
IDLE_SECONDS = 1.0
IDLE_PHASES = [
    (1, 400, 0.0),
    (30, 1, 1.3 * IDLE_SECONDS),
    (1, 300, 1.3 * IDLE_SECONDS),
    (20, 1, 1.3 * IDLE_SECONDS),
    (1, 250, 1.3 * IDLE_SECONDS),
]

for phases in (PHASES, IDLE_PHASES):
    assert sum(callers * calls for callers, calls, _ in phases) == CALLS


def peers(state: dict[str, Any]) -> set[str]:
    """The clients' ends of the connections that the last requests came on."""
    return {request["peer"] for request in state["requests"]}


PEERS: dict[str, tuple[str, str, list[str], Callable[[dict[str, Any], dict[str, Any]], bool]]] = {
    # name: binding, peer, its options, whether it ended connections as it should: its states after
    # a first call and after all
    "grpc: GOAWAY after 100 requests": (
        "GRPC",
        "h2_agent",
        ["--max-requests", "100"],
        lambda _, after: after["goaways"] >= 9 and after["connections"] >= 10,
    ),
    "grpc: two GOAWAYs after a second": (
        "GRPC",
        "h2_agent",
        ["--max-age", "1", "--two-step"],
        lambda _, after: after["connections"] >= 3,
    ),
    "grpc: grpcio's maximum age": (
        "GRPC",
        "grpc_generic",
        ["--grpc-option", "grpc.max_connection_age_ms=1000"],
        lambda before, after: not peers(before) & peers(after),
    ),
    "http: closes after an idle second": (
        "JSONRPC",
        "raw_http",
        ["--idle-close", str(IDLE_SECONDS)],
        lambda _, after: after["connections"] >= 5,
    ),
}


@pytest.mark.parametrize("name", PEERS)
async def test_a_thousand_calls_while_connections_end(
    world: World, second: Peer, name: str
) -> None:
    binding, script, options, did_end = PEERS[name]
    async with peer(script, *options) as agent_process:
        agent = await world.agent(
            card([(binding, agent_process.urls[binding]), ("JSONRPC", second.urls["JSONRPC"])])
        )
        ids = [message_id()]
        await agent.send("JSONRPC", "hello", ids[0])
        before = await agent_process.state()
        ids += await call_in_phases(agent, PHASES if binding == "GRPC" else IDLE_PHASES)
        after = await agent_process.state()
    assert did_end(before, after), after
    assert after["executions"] == len(ids) == 1 + CALLS
    assert after["by_message"] == dict.fromkeys(ids, 1)
    seen = await agent.until("requests_total", len(ids), outcome="ok")
    assert seen.failovers == {}
    assert seen.total("ambiguous_errors_total") == 0
    label = f"0-{LABELS[binding]}"
    assert seen.by("attempts_total", "interface", "result") == {(label, "ok"): len(ids)}
    assert await agent.current() == label


async def call_in_phases(agent: RemoteAgent, phases: Sequence[tuple[int, int, float]]) -> list[str]:
    """Make the calls; each must be answered by the first attempt. Returns the message ids."""
    address = agent.daemon.listeners["JSONRPC"]
    ids: list[str] = []

    async def caller(client: KeepAlive, calls: int) -> None:
        for _ in range(calls):
            id_ = message_id()
            ids.append(id_)
            status, headers, body = await client.send(id_)
            assert (status, headers["a2a-sidecar-attempts"]) == (200, "1"), body
            assert "result" in body, body
            assert body["result"]["task"]["artifacts"][0]["parts"] == [{"text": "hello"}], body

    clients = [KeepAlive(address, agent.name) for _ in range(32)]
    try:
        with trio.fail_after(60):
            for callers, calls, wait in phases:
                await trio.sleep(wait)
                async with trio.open_nursery() as nursery:
                    for client in clients[:callers]:
                        nursery.start_soon(caller, client, calls)
    finally:
        for client in clients:
            await client.aclose()
    return ids


async def test_an_agent_that_restarts_between_two_calls_costs_nothing(
    world: World, second: Peer
) -> None:
    """The kept connection is dead and nobody said so: it is replaced, without a failover."""
    async with peer("raw_http") as before:
        port = before.ports["http"]
        agent = await world.agent(
            card([("JSONRPC", before.urls["JSONRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
        )
        assert (await agent.send()).interface == "0-jsonrpc"
    async with peer("raw_http", "--port", str(port)) as after:
        id_ = message_id()
        answer = await agent.send("JSONRPC", "hello", id_)
        assert answer.interface == "0-jsonrpc"
        assert answer.headers["a2a-sidecar-attempts"] == "1"
        assert (await after.state())["by_message"] == {id_: 1}
    assert await agent.failovers() == {}
    assert await agent.metric("redials_total", interface="0-jsonrpc") == 1


async def test_a_stream_refused_by_a_used_connection_is_put_on_a_new_one(
    world: World, second: Peer, h2_peer: Peer
) -> None:
    agent = await world.agent(
        card([("GRPC", h2_peer.urls["GRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    await agent.send()
    connections = (await h2_peer.state())["connections"]
    await h2_peer.script("refuse")
    id_ = message_id()
    answer = await agent.send("JSONRPC", "hello", id_)
    assert answer.interface == "0-grpc"
    assert answer.headers["a2a-sidecar-attempts"] == "1"
    state = await h2_peer.state()
    assert state["by_message"][id_] == 1
    assert state["connections"] == connections + 1
    assert await agent.failovers() == {}
    assert await agent.metric("redials_total", interface="0-grpc") == 1


async def test_a_stream_refused_twice_goes_to_the_next_interface(
    world: World, second: Peer, h2_peer: Peer
) -> None:
    agent = await world.agent(
        card([("GRPC", h2_peer.urls["GRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    await agent.send()
    await h2_peer.script("refuse", "refuse")
    id_ = message_id()
    answer = await agent.send("JSONRPC", "hello", id_)
    assert answer.interface == "1-jsonrpc"
    assert id_ not in (await h2_peer.state())["by_message"]
    assert (await second.state())["by_message"][id_] == 1
    assert await agent.failovers() == {("0-grpc", "1-jsonrpc", "refused_stream"): 1}
