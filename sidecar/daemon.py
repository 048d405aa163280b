"""The daemon: everything is made here and handed to each other; signals, admin, drain."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import trio

from sidecar import __version__
from sidecar.admin import Admin
from sidecar.agent import Agent
from sidecar.config import TcpAddress
from sidecar.core.spec import Binding
from sidecar.doors.cards import CardDesk, Place
from sidecar.doors.grpc import GrpcDoor
from sidecar.doors.http import House, HttpDoor
from sidecar.doors.http_json import HttpJsonDoor
from sidecar.doors.jsonrpc import JsonRpcDoor
from sidecar.forwarder import Forwarder
from sidecar.listener import Listener, bind
from sidecar.logs import Log, new_call_id
from sidecar.reception import Reception
from sidecar.telemetry import Telemetry
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from sidecar.config import Config, ListenerConfig

_LAG_INTERVAL_SECONDS = 0.5


class Daemon:
    """One running sidecar. `bind` first, so that a bad address is an error before anything runs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._telemetry = Telemetry(__version__)
        self._log = Log(
            level=config.log.level,
            form=config.log.format,
            clock=trio.current_time,
            on_drop=self._telemetry.log_dropped,
        )
        self._random = random.SystemRandom()
        self._draining = False
        self._stop = trio.Event()
        self._listeners: list[tuple[ListenerConfig, Listener]] = []
        self._admin: Listener | None = None
        self._agents: dict[str, Agent] = {}
        self._receptions: list[Reception] = []

    # --- what the admin address shows ---------------------------------------------------------

    def unready(self) -> list[str]:
        """Why the daemon is not ready; empty when it is."""
        if self._draining:
            return ["draining"]
        reasons = [agent.why_unready for agent in self._agents.values() if agent.config.enabled]
        return reasons if all(reasons) else []

    def status(self) -> dict[str, Any]:
        """Everything for `/status`."""
        return {
            "version": __version__,
            "ready": not self.unready(),
            "draining": self._draining,
            "listeners": [
                {"address": str(listener.address), "binding": str(config.binding)}
                for config, listener in self._listeners
            ],
            "agents": {name: agent.status() for name, agent in self._agents.items()},
        }

    # --- life ---------------------------------------------------------------------------------

    async def run(self, *, on_ready: Callable[[Daemon], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain; raises BindError before anything runs."""
        try:
            self._bind()
            async with trio.open_nursery() as background:
                self._start_agents(background)
                background.start_soon(self._watch_signals)
                background.start_soon(self._measure_lag)
                await self._serve(on_ready)
                background.cancel_scope.cancel()
        finally:
            self._log.close()

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does."""
        self._stop.set()

    @property
    def listener_addresses(self) -> list[str]:
        """Where the listeners are bound."""
        return [str(listener.address) for _, listener in self._listeners]

    @property
    def admin_address(self) -> str:
        """Where the admin address is bound."""
        return str(self._admin.address) if self._admin else ""

    def _bind(self) -> None:
        bound: list[socket.socket] = []
        try:
            for config in self._config.listeners:
                sock = bind(config.address, config.mode)
                bound.append(sock)
                listener = Listener(
                    sock,
                    config.address,
                    connections=self._config.limits.connections,
                    stall_seconds=self._config.limits.stall_seconds,
                    telemetry=self._telemetry,
                    log=self._log,
                )
                self._listeners.append((config, listener))
            sock = bind(self._config.admin.address)
            self._admin = Listener(
                sock,
                self._config.admin.address,
                connections=64,
                stall_seconds=self._config.limits.stall_seconds,
                telemetry=self._telemetry,
                log=self._log,
            )
        except BaseException:
            for sock in bound:
                sock.close()
            raise

    def _start_agents(self, nursery: trio.Nursery) -> None:
        dialer = Dialer(stall_seconds=self._config.limits.stall_seconds)
        listeners = [listener for _, listener in self._listeners]
        if self._admin is not None:
            listeners.append(self._admin)
        own_addresses = frozenset(
            (listener.address.host, listener.address.port)
            for listener in listeners
            if isinstance(listener.address, TcpAddress)
        )
        for name, config in self._config.agents.items():
            agent = Agent(
                name,
                config,
                dialer=dialer,
                limits=self._config.limits,
                own_addresses=own_addresses,
                telemetry=self._telemetry,
                log=self._log,
                rng=self._random,
            )
            self._agents[name] = agent
            self._telemetry.watch(name, agent)
            if config.enabled:
                nursery.start_soon(agent.run)

    async def _serve(self, on_ready: Callable[[Daemon], None] | None) -> None:
        places = [
            Place(binding=config.binding, address=listener.address, agent=config.agent)
            for config, listener in self._listeners
        ]
        house = House(
            forwarder=Forwarder(telemetry=self._telemetry, log=self._log),
            agents=self._agents,
            cards=CardDesk(places),
            limits=self._config.limits,
            new_call_id=lambda: new_call_id(self._random),
        )
        admin = Admin(self._telemetry, self)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for place, (_, listener) in zip(places, self._listeners, strict=True):
                    reception = self._reception(self._door(house, place))
                    accepting.start_soon(listener.serve, connections, reception)
                assert self._admin is not None  # bound with the listeners
                accepting.start_soon(self._admin.serve, connections, self._reception(admin))
                self._log.info(
                    "started",
                    version=__version__,
                    listeners=",".join(self.listener_addresses),
                    admin=self.admin_address,
                    agents=",".join(self._agents),
                )
                if on_ready is not None:
                    on_ready(self)
                await self._stop.wait()
                self._draining = True
                self._telemetry.draining()
                self._log.info("draining", seconds=self._config.limits.drain_seconds)
                accepting.cancel_scope.cancel()
                for reception in self._receptions:
                    reception.begin_closing()
            connections.cancel_scope.deadline = (
                trio.current_time() + self._config.limits.drain_seconds
            )
        self._log.info("stopped")

    def _door(self, house: House, place: Place) -> HttpDoor:
        match place.binding:
            case Binding.JSONRPC:
                return JsonRpcDoor(house, place)
            case Binding.HTTP_JSON:
                return HttpJsonDoor(house, place)
            case Binding.GRPC:
                return GrpcDoor(house, place, is_ready=lambda: not self.unready())

    def _reception(self, door: HttpDoor | Admin) -> Reception:
        agents = self._agents.values()
        streams = sum(a.config.max_concurrency + a.config.max_streams for a in agents)
        reception = Reception(
            door,
            limits=self._config.limits,
            max_streams=max(streams, 1),
            telemetry=self._telemetry,
            log=self._log,
        )
        self._receptions.append(reception)
        return reception

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                if self._stop.is_set():
                    raise KeyboardInterrupt  # a second signal ends at once
                self._stop.set()

    async def _measure_lag(self) -> None:
        while True:
            due = trio.current_time() + _LAG_INTERVAL_SECONDS
            await trio.sleep_until(due)
            self._telemetry.loop_lag(max(trio.current_time() - due, 0.0))
            self._log.tick()
