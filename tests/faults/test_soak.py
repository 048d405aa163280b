"""10,000 mixed calls with random faults: nothing runs twice, nothing is left behind.

``--soak-seconds N`` goes on for that long. The seed is printed, and taken from A2A_SOAK_SEED.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from sidecar.wire.http1_pool import Http1Pool
from tests.faults.all_faults import all_faults
from tests.faults.callers import calling
from tests.faults.calls import call
from tests.faults.faults import ALL, GRPC, HTTP_JSON, JSONRPC, Fault
from tests.faults.rig import (
    GOOD,
    LABELS,
    PATHS,
    address,
    at_rest,
    counted,
    daemon_agents,
    running,
    samples,
)
from tests.harness import card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.daemon import Daemon
    from tests.harness import Peer

pytestmark = pytest.mark.system

CALLS = 10_000
ROUND = 500
CALLERS = 24
IDLE_SECONDS = 5.0
"""Longer than an HTTP/1.1 connection is kept."""

AGENTS = {"soak-1": JSONRPC, "soak-2": HTTP_JSON, "soak-3": GRPC, "soak-spare": JSONRPC}
"""And whose faults they have. The last is the second candidate of all."""

FAULTY = 0.3
"""Part of the calls that meet a fault; a tenth of all leaves in the middle."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a daemon holds."""

    tasks: int
    descriptors: int
    connections: int
    kilobytes: int
    budget: int

    def __str__(self) -> str:
        return (
            f"{self.tasks} tasks, {self.descriptors} descriptors, {self.connections} upstream"
            f" connections, {self.budget} bytes of the budget, {self.kilobytes // 1024} MiB"
        )


def left(daemon: Daemon) -> Left:
    agents = daemon_agents(daemon).values()
    pools = [pool for agent in agents for pool in agent._connections._pools.values()]
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return Left(
        tasks=trio.lowlevel.current_statistics().tasks_living,
        descriptors=len(os.listdir("/proc/self/fd")),
        connections=sum(pool.statistics().open for pool in pools),
        kilobytes=resident * os.sysconf("SC_PAGE_SIZE") // 1024,
        budget=daemon._budget.taken,
    )


def lost_credit(daemon: Daemon) -> list[str]:
    """Connections to agents whose window is owed bytes."""
    found = []
    for name, agent in daemon_agents(daemon).items():
        for pool in agent._connections._pools.values():
            if isinstance(pool, Http1Pool):
                continue
            for connection in pool._connections:
                window = connection._engine._inbound_flow_control_window_manager  # type: ignore[attr-defined]
                owed = window.max_window_size - window.current_window_size
                if owed - window._bytes_processed:
                    found.append(f"{name}: {owed} bytes")
                if connection._streams or connection._opens or connection._turns:
                    found.append(f"{name}: a request is left in a connection")
    return found


def usable(fault: Fault) -> bool:
    """Whether a fault is one of a script alone, that ends soon and tells no lies.

    A refusal of all streams of a connection, some of which have run, would be one; so is a script that
    runs its message twice itself.
    """
    special = fault.options or fault.tls is not None or fault.client_tls or fault.reused
    lies = "GOAWAY" in fault.name and "below" in fault.name
    lies = lies or any(ending.executed > 1 for ending in fault.ends(streaming=False))
    slow = fault.timeout or fault.body_bytes
    return bool(fault.script) and not special and not slow and not lies


@dataclass
class Soak:
    """Calls at random, and what became of them."""

    daemon: Daemon
    peer: Peer
    rng: random.Random
    faults: dict[str, list[Fault]]
    numbers: Iterator[int]
    outcomes: Counter[str] = field(default_factory=Counter)
    said_no: list[str] = field(default_factory=list)
    """Messages that callers were told had not been delivered."""
    succeeded: list[str] = field(default_factory=list)

    async def round(self, calls: int) -> None:
        """Script the agents anew, and make `calls` calls."""
        await self.peer.control(
            "script", {name: self._entries(binding, calls) for name, binding in AGENTS.items()}
        )
        rest = iter(range(calls))

        async def caller() -> None:
            for _ in rest:
                await self._one()

        async with trio.open_nursery() as nursery:
            for _ in range(CALLERS):
                nursery.start_soon(caller)

    def _entries(self, binding: str, count: int) -> list[Any]:
        entries: list[Any] = []
        for _ in range(count):
            # calls take what comes, streams and unary ones alike
            fault = self.rng.choice(self.faults[binding])
            entries += _aimed(fault) if self.rng.random() < FAULTY else ["default"]
        return entries

    async def _one(self) -> None:
        rng = self.rng
        message = f"m-{next(self.numbers)}"
        upstream, downstream = rng.choice(ALL), rng.choice(ALL)
        streaming = rng.random() < 0.3
        agent = f"to-{LABELS[upstream].replace('_', '-')}"
        where = address(self.daemon, downstream)
        if rng.random() < 0.1:
            deadline = "60m" if downstream == GRPC and rng.random() < 0.5 else ""
            async with calling(
                where, downstream, agent, message, streaming=streaming, timeout=deadline
            ) as caller:
                if deadline:
                    await caller.read()
                    self.outcomes["deadline"] += 1
                else:
                    await trio.sleep(rng.uniform(0, 0.02))
                    await caller.cancel()
                    self.outcomes["left"] += 1
            return
        with trio.fail_after(30):
            told = await call(where, downstream, agent, message, streaming=streaming)
        if told.delivered == "no":
            self.said_no.append(message)
        if not told.failed:
            self.succeeded.append(message)
        if told.delivered:
            self.outcomes[f"delivered={told.delivered}"] += 1
        else:
            self.outcomes["agent's error" if told.failed else "answered"] += 1


def _aimed(fault: Fault) -> list[Any]:
    text = (
        json.dumps(fault.script).replace("{self}", "127.0.0.1:9").replace("{other}", "127.0.0.1:9")
    )
    entries: list[Any] = json.loads(text)
    return entries


def _count(start: int = 0) -> Iterator[int]:
    while True:
        yield start
        start += 1


async def test_ten_thousand_mixed_calls_leave_nothing_behind(
    fault_agent: Peer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    note: Callable[[str], None],
) -> None:
    seed = int(os.environ.get("A2A_SOAK_SEED") or random.randrange(2**32))
    print(f"A2A_SOAK_SEED={seed}")
    names = list(AGENTS)
    specs = [
        {"name": name, "speaks": "grpc" if binding == GRPC else "http"}
        for name, binding in AGENTS.items()
    ]
    ports = await fault_agent.control("open", specs)
    agents = {}
    for binding, port in zip(ALL, ports, strict=False):
        good = GOOD[binding]
        interfaces = [
            (binding, f"http://127.0.0.1:{port}{PATHS[binding]}"),
            (good, f"http://127.0.0.1:{ports[-1]}{PATHS[good]}"),
        ]
        name = f"to-{LABELS[binding].replace('_', '-')}"
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(card(interfaces)), "utf-8")
        agents[name] = {
            "card": file,
            "response_timeout_seconds": 2.0,
            "stream_open_timeout_seconds": 2.0,
        }
    faults = {b: [f for f in all_faults() if f.binding == b and usable(f)] for b in ALL}
    try:
        async with running(tmp_path, agents) as daemon:
            soak = Soak(daemon, fault_agent, random.Random(seed), faults, _count())
            idle = left(daemon)
            # two rounds to fill caches and pools
            await soak.round(ROUND)
            await soak.round(ROUND)
            assert await at_rest(daemon) == []
            begun = left(daemon)
            deadline = trio.current_time() + request.config.getoption("--soak-seconds")
            calls = 2 * ROUND
            while calls < CALLS or trio.current_time() < deadline:
                await soak.round(ROUND)
                calls += ROUND
            assert await at_rest(daemon) == []
            assert lost_credit(daemon) == []
            for agent in daemon_agents(daemon).values():
                for pool in agent._connections._pools.values():
                    if isinstance(pool, Http1Pool):
                        pool.close_idle()
            await trio.sleep(IDLE_SECONDS)
            ended = left(daemon)
            state = await fault_agent.state()
            after = samples(daemon)
    finally:
        with trio.CancelScope(shield=True):
            await fault_agent.control("close", names)
    ran: Counter[str] = Counter()
    for name in names:
        ran += Counter(state["agents"][name]["by_message"])
    kinds = ", ".join(f"{n} {what}" for what, n in sorted(soak.outcomes.items()))
    note(f"soak (seed {seed}): {calls} calls: {kinds}")
    note(f"soak, before: {idle}")
    note(f"soak, after {2 * ROUND}: {begun}")
    note(f"soak, after {calls} and {IDLE_SECONDS:g} s: {ended}")
    twice = {
        message: [name for name in names if state["agents"][name]["by_message"].get(message)]
        for message, count in ran.items()
        if count > 1
    }
    assert twice == {}
    assert [message for message in soak.said_no if ran[message]] == []
    assert not any(after.get("", {}).get("internal_errors_total", {}).values())
    assert sum(soak.outcomes.values()) == calls
    assert _all_counted(after) == calls
    assert ended.budget == 0
    # an HTTP/2 connection is two tasks of its own; the pool that keeps them has one
    assert ended.tasks <= idle.tasks + 3 * ended.connections + len(agents)
    assert ended.descriptors <= idle.descriptors + ended.connections
    assert ended.kilobytes < begun.kilobytes + 64 * 1024
    assert soak.succeeded


def _all_counted(after: dict[str, Any]) -> int:
    return sum(
        sum(counted({}, counters, "requests_total").values())
        for agent, counters in after.items()
        if agent.startswith("to-")
    )
