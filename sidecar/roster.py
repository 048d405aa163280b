"""The agents that run: started, replaced and retired as the configuration changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from sidecar.agent import Agent
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    import random

    from sidecar.config import AgentConfig, Config, Limits
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry

_RESTART_SECONDS = (1.0, 60.0)
_END_TICK_SECONDS = 0.1


@dataclass(slots=True)
class _Running:
    agent: Agent
    limits: tuple[object, ...]
    crashes: int = 0
    """In a row, each soon after the last."""
    background: trio.CancelScope = field(default_factory=trio.CancelScope)


class Roster:
    """Every configured agent under the present configuration."""

    def __init__(self, *, telemetry: Telemetry, log: Log, rng: random.Random) -> None:
        self.agents: dict[str, Agent] = {}
        """By name, in the order of the configuration; doors look them up here at each request."""
        self._telemetry = telemetry
        self._log = log
        self._rng = rng
        self._limits: Limits
        self._dialer: Dialer
        self._own_addresses: frozenset[tuple[str, int]] = frozenset()
        self._stall_seconds = 0.0
        self._running: dict[str, _Running] = {}
        self._nursery: trio.Nursery

    def start(self, nursery: trio.Nursery) -> None:
        """Everything runs in `nursery` from now on."""
        self._nursery = nursery

    def apply(self, loaded: Config, own_addresses: frozenset[tuple[str, int]]) -> None:
        """Put the agents of `loaded` into effect; those that have not changed are left alone.

        `own_addresses` are what no card may point at.
        """
        self._limits = loaded.limits
        self._own_addresses = own_addresses
        if self._stall_seconds != loaded.limits.stall_seconds:
            self._stall_seconds = loaded.limits.stall_seconds
            self._dialer = Dialer(stall_seconds=self._stall_seconds)
        for name in [name for name in self._running if name not in loaded.agents]:
            self._retire(name)
            del self.agents[name]
            self._telemetry.unwatch(name)
        for name, config in loaded.agents.items():
            present = self._running.get(name)
            if present is None:
                self._start(name, config, None)
            elif (present.agent.config, present.limits) != (config, _limits_of(loaded.limits)):
                self._retire(name)
                self._start(name, config, present.agent)
            else:
                present.agent.avoid(own_addresses)
        for name in loaded.agents:
            self.agents[name] = self.agents.pop(name)

    def _start(
        self, name: str, config: AgentConfig, old: Agent | None, *, crashes: int = 0
    ) -> None:
        agent = Agent(
            name,
            config,
            dialer=self._dialer,
            limits=self._limits,
            own_addresses=self._own_addresses,
            telemetry=self._telemetry,
            log=self._log,
            rng=self._rng,
        )
        if old is not None:
            agent.take_over(old)
        running = _Running(agent, _limits_of(self._limits), crashes)
        self._running[name] = running
        self.agents[name] = agent
        self._telemetry.watch(name, agent)
        if config.enabled:
            self._nursery.start_soon(self._run, running)

    async def _run(self, running: _Running) -> None:
        """Run an agent's background; a bug in it costs one restart, not the daemon."""
        agent = running.agent
        first, longest = _RESTART_SECONDS
        began = trio.current_time()
        with running.background:
            try:
                await agent.run()
            except Exception as error:
                self._telemetry.internal_error("agent")
                self._log.error(
                    "internal error", where="agent", agent=agent.name, error=repr(error)
                )
            crashes = running.crashes + 1 if trio.current_time() - began < longest else 1
            await trio.sleep(min(first * 2 ** (crashes - 1), longest))
            if self._running.get(agent.name) is running:
                self._retire(agent.name)
                self._start(agent.name, agent.config, agent, crashes=crashes)

    def _retire(self, name: str) -> None:
        """No new calls for this agent; those under way finish, within the drain's time."""
        running = self._running.pop(name)
        running.agent.retire()
        self._nursery.start_soon(self._end, running, self._limits.drain_seconds)

    async def _end(self, running: _Running, seconds: float) -> None:
        agent = running.agent
        deadline = trio.current_time() + seconds
        while agent.in_flight or agent.streams:
            if trio.current_time() >= deadline:
                agent.breaker.trip()
            await trio.sleep(_END_TICK_SECONDS)
        running.background.cancel()


def _limits_of(limits: Limits) -> tuple[object, ...]:
    """The limits that an agent is reached under."""
    return (limits.header_bytes, limits.response_bytes, limits.event_bytes, limits.stall_seconds)
