"""One agent and its candidates, for tests of many calls."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from tests.faults.calls import call
from tests.faults.faults import GRPC, HTTP_JSON, JSONRPC
from tests.faults.rig import PATHS, address, at_rest, counted, daemon_agents, running, samples
from tests.harness import card, http
from tests.system.world import jsonrpc_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from sidecar.agent import Agent
    from sidecar.daemon import Daemon
    from tests.faults.calls import Told
    from tests.harness import Peer
    from tests.system.world import Answer

_numbers = itertools.count(1)


@dataclass
class Bench:
    """The agent ``a`` of a daemon in this process, and the ports that its card names."""

    peer: Peer
    daemon: Daemon
    ports: list[str]
    """Their names in the fault agent."""

    @property
    def agent(self) -> Agent:
        """The agent's state."""
        return daemon_agents(self.daemon)["a"]

    def address(self, binding: str) -> str:
        """The listener of a binding."""
        return address(self.daemon, binding)

    async def call(
        self, message: str, *, streaming: bool = False, binding: str = JSONRPC, size: int = 0
    ) -> Told:
        """One call."""
        where = self.address(binding)
        return await call(where, binding, "a", message, streaming=streaming, size=size)

    async def jsonrpc(self, method: str, params: Any) -> Answer:
        """Any unary operation."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = {"content-type": "application/json", "a2a-version": "1.0"}
        reply = await http(
            self.address(JSONRPC),
            "POST",
            "/agents/a",
            headers=headers,
            body=json.dumps(body).encode(),
        )
        return jsonrpc_answer(reply.status, reply.header_dict(), reply.json())

    async def script(self, candidate: int, *entries: Any) -> None:
        """Script a candidate."""
        if not entries:
            return
        await self.peer.control("script", {self.ports[candidate]: list(entries)})

    async def open_gate(self, name: str) -> None:
        """Open a gate."""
        await self.peer.control("gate", name)

    async def state(self, candidate: int) -> dict[str, Any]:
        """What a candidate saw."""
        state: dict[str, Any] = (await self.peer.state())["agents"][self.ports[candidate]]
        return state

    async def until(
        self, candidate: int, condition: Callable[[dict[str, Any]], bool], seconds: float = 10
    ) -> dict[str, Any]:
        """Wait for a candidate to be in a state."""
        name = self.ports[candidate]
        state = await self.peer.until(lambda all_: condition(all_["agents"][name]), seconds)
        found: dict[str, Any] = state["agents"][name]
        return found

    async def executions(self) -> list[Counter[str]]:
        """By message, for each candidate."""
        agents = (await self.peer.state())["agents"]
        return [Counter(agents[name].get("by_message", {})) for name in self.ports]

    async def until_executed(self, count: int, seconds: float = 10) -> None:
        """Wait until that many messages have run."""

        def enough(state: dict[str, Any]) -> bool:
            ran: int = sum(state["agents"][name].get("executions", 0) for name in self.ports)
            return ran >= count

        await self.peer.until(enough, seconds)

    def counted(self, name: str) -> dict[tuple[str, ...], int]:
        """A counter of the agent."""
        return counted({}, samples(self.daemon)["a"], name)


@asynccontextmanager
async def open_bench(
    peer: Peer,
    directory: Path,
    speaks: list[str],
    *,
    binding: str = JSONRPC,
    options: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    extra: str = "",
    **keys: Any,
) -> AsyncIterator[Bench]:
    """An agent whose candidates speak ``grpc`` or ``http`` (then in turn `binding` and the other).

    `options` are those of the first one, `keys` of the agent's configuration, `extra` more of its
    text. At the end nothing may be left under way.
    """
    number = next(_numbers)
    names = [f"bench-{number}-{n}" for n in range(len(speaks))]
    specs: list[dict[str, Any]] = [
        {"name": name, "speaks": what} for name, what in zip(names, speaks, strict=True)
    ]
    specs[0]["options"] = options or {}
    ports = await peer.control("open", specs)
    other = HTTP_JSON if binding == JSONRPC else JSONRPC
    interfaces = []
    for n, (what, port) in enumerate(zip(speaks, ports, strict=True)):
        spoken = GRPC if what == "grpc" else other if n % 2 and speaks[0] == "http" else binding
        interfaces.append((spoken, f"http://{host}:{port}{PATHS[spoken]}"))
    file = directory / f"bench-{number}.json"
    file.write_text(json.dumps(card(interfaces)), "utf-8")
    try:
        async with running(directory, {"a": {"card": file, **keys}}, extra) as daemon:
            yield Bench(peer, daemon, names)
            assert await at_rest(daemon) == []
            internal = samples(daemon).get("", {}).get("internal_errors_total", {})
            assert not any(internal.values()), internal
    finally:
        with trio.CancelScope(shield=True):
            await peer.control("close", names)
