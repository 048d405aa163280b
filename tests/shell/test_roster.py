"""Agents across configurations: a defect in one costs a restart of it, not the daemon."""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import trio

from sidecar.agent import Agent
from sidecar.config import Config
from sidecar.logs import Log
from sidecar.roster import Roster
from sidecar.telemetry import Telemetry
from tests.harness import card, write_card

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

URL = "http://127.0.0.1:1/"


@pytest.fixture
async def roster() -> AsyncIterator[Roster]:
    sink = os.open(os.devnull, os.O_WRONLY)
    log = Log(clock=trio.current_time, fd=sink)
    made = Roster(telemetry=Telemetry("0"), log=log, rng=random.Random(1))
    async with trio.open_nursery() as nursery:
        made.start(nursery)
        yield made
        nursery.cancel_scope.cancel()
    log.close()
    os.close(sink)


def config(**agents: dict[str, Any]) -> Config:
    limits = agents.pop("limits", {})
    return Config.model_validate({"agents": agents, "limits": limits})


def table(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    file = tmp_path / "card.json"
    if not file.exists():
        write_card(tmp_path, card([("JSONRPC", URL)]))
    return {"card": str(file), **keys}


def series(roster: Roster) -> str:
    return roster._telemetry.render().decode()


async def until_ready(agent: Agent) -> None:
    with trio.fail_after(5):
        while agent.generation is None:  # noqa: ASYNC110 - a file is read in a thread
            await trio.sleep(0.01)


async def test_what_has_not_changed_is_the_same_object(roster: Roster, tmp_path: Path) -> None:
    one, two = table(tmp_path), table(tmp_path, max_streams=3)
    roster.apply(config(one=one, two=two), frozenset())
    before = dict(roster.agents)
    limits = {"drain_seconds": 1.0, "buffered_bytes": 2**21, "connections": 7}
    roster.apply(config(two=one, one=one, limits=limits), frozenset())
    assert list(roster.agents) == ["two", "one"]
    assert roster.agents["one"] is before["one"]
    assert roster.agents["two"] is not before["two"]
    roster.apply(config(one=one, limits={"event_bytes": 4096}), frozenset())
    assert list(roster.agents) == ["one"]
    assert roster.agents["one"] is not before["one"]
    assert 'agent="two"' not in series(roster)
    assert 'a2a_sidecar_candidates{agent="one"}' in series(roster)


async def test_no_card_may_point_at_a_new_listener(roster: Roster, tmp_path: Path) -> None:
    """Agents that have not changed learn of it too."""
    roster.apply(config(one=table(tmp_path)), frozenset())
    agent = roster.agents["one"]
    await until_ready(agent)
    policy = agent._connections._policy
    assert policy is not None
    assert policy.refuses("127.0.0.1", 1, "127.0.0.1") == ""
    roster.apply(config(one=table(tmp_path)), frozenset({("127.0.0.1", 1)}))
    assert roster.agents["one"] is agent
    policy = agent._connections._policy
    assert policy is not None
    assert policy.refuses("127.0.0.1", 1, "127.0.0.1") != ""


async def test_a_retired_agent_fetches_no_more(roster: Roster, tmp_path: Path) -> None:
    roster.apply(config(one=table(tmp_path)), frozenset())
    old = roster.agents["one"]
    await until_ready(old)
    old.in_flight = 1  # it has a call to finish
    roster.apply(config(one=table(tmp_path, max_streams=2)), frozenset())
    fetched = old.fetched
    (tmp_path / "card.json").write_text("{}", "utf-8")
    old.ask_refresh(old.generation)
    await trio.sleep(1.5)
    assert old.fetched is fetched
    assert old.fetch_error == ""
    old.in_flight = 0


async def test_a_call_may_come_before_the_new_agent_runs(roster: Roster, tmp_path: Path) -> None:
    """It has its candidates at once; where its connections live it has a moment later."""
    roster.apply(config(one=table(tmp_path)), frozenset())
    await until_ready(roster.agents["one"])
    roster.apply(config(one=table(tmp_path, max_streams=2)), frozenset())
    agent = roster.agents["one"]
    assert agent.generation is not None
    assert agent._connections._nursery is None
    generation = await agent.ready()
    assert agent._connections.get(generation.current) is not None


async def test_a_defect_in_an_agent_costs_a_restart(
    roster: Roster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one goes on with the card; the pauses grow."""
    monkeypatch.setattr("sidecar.roster._RESTART_SECONDS", (0.02, 60.0))
    started: list[float] = []
    run = Agent.run

    async def failing(self: Agent) -> None:
        started.append(trio.current_time())
        if len(started) < 4:
            if len(started) > 1:
                raise RuntimeError("a defect")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run, self)
                await until_ready(self)
                raise RuntimeError("a defect")
        await run(self)

    monkeypatch.setattr(Agent, "run", failing)
    roster.apply(config(one=table(tmp_path), two=table(tmp_path, enabled=False)), frozenset())
    first = roster.agents["one"]
    with trio.fail_after(5):
        while len(started) < 4:  # noqa: ASYNC110 - the tasks of the roster
            await trio.sleep(0.01)
    last = roster.agents["one"]
    assert last is not first
    assert last.generation is not None  # taken over
    assert list(roster.agents) == ["one", "two"]
    pauses = [b - a for a, b in itertools.pairwise(started)]
    assert pauses[1] > 0.035
    assert pauses[2] > 0.075
    assert 'internal_errors_total{where="agent"} 3.0' in series(roster)


async def test_calls_of_a_retired_agent_are_ended_when_their_time_is_over(
    roster: Roster, tmp_path: Path
) -> None:
    limits = {"drain_seconds": 0.05}
    roster.apply(config(one=table(tmp_path), limits=limits), frozenset())
    agent = roster.agents["one"]
    agent.streams = 1
    with trio.CancelScope() as call:
        agent.breaker.add(call)
        roster.apply(config(limits=limits), frozenset())
        with trio.fail_after(5):
            await trio.sleep_forever()
    assert call.cancelled_caught
    assert agent.breaker.tripped
    agent.streams = 0
