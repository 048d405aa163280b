"""The daemon: everything is made here and handed to each other; reload, drain, signals."""

from __future__ import annotations

import random
import signal
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from sidecar import __version__, config
from sidecar.admin import Admin
from sidecar.agent import Agent
from sidecar.agent_view import view
from sidecar.budget import Budget
from sidecar.config import ConfigError, SystemdAddress, TcpAddress
from sidecar.core.door import host_of
from sidecar.core.spec import Binding
from sidecar.credentials import CredentialsUnavailable, Secret, check_secrets
from sidecar.doors.cards import CardDesk, Place
from sidecar.doors.entry import Entry
from sidecar.doors.grpc import GrpcDoor
from sidecar.doors.http import House, HttpDoor
from sidecar.doors.http_json import HttpJsonDoor
from sidecar.doors.jsonrpc import JsonRpcDoor
from sidecar.forwarder import Forwarder
from sidecar.listener import BindError, Listener, bind
from sidecar.logs import Log, new_call_id
from sidecar.reception import Reception, Threshold
from sidecar.systemd import Notifier, take_sockets
from sidecar.telemetry import Telemetry
from sidecar.wire.net import Dialer
from sidecar.wire.tls import make_server_context

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from sidecar.config import Address, Config, ListenerConfig

_LAG_INTERVAL_SECONDS = 0.5
_ADMIN_CONNECTIONS = 64
_ADMIN_MODE = 0o600

# Port 0 may stand in a configuration several times, so an address alone is not enough.
_Key: TypeAlias = "tuple[Address, int]"


@dataclass(slots=True)
class _OpenListener:
    """A bound listener, the settings it is served under, and what stops its accepting."""

    config: ListenerConfig | None
    """None for the admin address."""
    listener: Listener
    reception: Reception
    accepting: trio.CancelScope


@dataclass(slots=True)
class _RunningAgent:
    agent: Agent
    background: trio.CancelScope


class Daemon:
    """One running sidecar."""

    def __init__(self, loaded: Config, *, path: str | None = None) -> None:
        """`path`: the file that SIGHUP reads again, None without one."""
        self._config = loaded
        self._path = path
        self._telemetry = Telemetry(__version__)
        self._log = Log(
            level=loaded.log.level,
            form=loaded.log.format,
            clock=trio.current_time,
            on_drop=self._telemetry.log_dropped,
        )
        self._notifier = Notifier()
        self._passed = take_sockets()
        self._random = random.SystemRandom()
        self._pseudonym = f"a2a-sidecar-{new_call_id(self._random)}"
        self._draining = False
        self._stop = trio.Event()
        self._listeners: dict[_Key, _OpenListener] = {}
        self._running: dict[str, _RunningAgent] = {}
        self._agents: dict[str, Agent] = {}
        """The present agents by name; doors look them up here at each request."""
        self._cards = CardDesk()
        self._forwarder = Forwarder(telemetry=self._telemetry, log=self._log)
        self._budget = Budget(loaded.limits.buffered_bytes)
        self._dialer = Dialer(stall_seconds=loaded.limits.stall_seconds)
        self._nursery: trio.Nursery

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
                {"address": str(place.address), "binding": str(place.binding)}
                for place in self._places()
            ],
            "agents": {name: view(agent) for name, agent in self._agents.items()},
        }

    # --- life ---------------------------------------------------------------------------------

    async def run(self, *, on_ready: Callable[[Daemon], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises BindError and CredentialsUnavailable before anything runs.
        """
        try:
            bound = self._prepare(self._config)
            async with trio.open_nursery() as self._nursery:
                await self._apply(self._config, bound)
                self._nursery.start_soon(self._watch_signals)
                self._nursery.start_soon(self._measure_lag)
                self._announce()
                if on_ready is not None:
                    on_ready(self)
                await self._stop.wait()
                await self._drain()
                self._nursery.cancel_scope.cancel()
            self._log.info("stopped")
        finally:
            self._log.close()

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does."""
        self._stop.set()

    @property
    def listener_addresses(self) -> list[str]:
        """Where the listeners are bound."""
        return [str(place.address) for place in self._places()]

    @property
    def admin_address(self) -> str:
        """Where the admin address is bound."""
        admin = next(one for one in self._listeners.values() if one.config is None)
        return str(admin.listener.address)

    def _announce(self) -> None:
        self._log.info(
            "started",
            version=__version__,
            listeners=",".join(self.listener_addresses),
            admin=self.admin_address,
            agents=",".join(self._agents),
        )
        self._notifier.ready(self._summary())

    def _summary(self) -> str:
        agents = self._agents.values()
        usable = sum(1 for agent in agents if agent.generation is not None)
        return f"{usable} of {len(agents)} agents reachable"

    async def _drain(self) -> None:
        self._draining = True
        self._telemetry.draining()
        self._notifier.stopping()
        seconds = self._config.limits.drain_seconds
        self._log.info("draining", seconds=seconds)
        async with trio.open_nursery() as nursery:
            for open_listener in self._listeners.values():
                # The admin address stays to the end: `/readyz` has to say 503.
                if open_listener.config is not None:
                    open_listener.accepting.cancel()
                    open_listener.reception.retire(seconds)
                    nursery.start_soon(open_listener.reception.ended.wait)

    # --- configuration ------------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the configuration again and put it into effect as a whole, or change nothing."""
        if self._path is None:
            self._log.warning("reload ignored", reason="there is no configuration file")
            return
        self._notifier.reloading()
        try:
            loaded = await trio.to_thread.run_sync(config.load, self._path)
            bound = self._prepare(loaded)
        except (ConfigError, BindError, CredentialsUnavailable) as error:
            for line in str(error).splitlines():
                self._log.error("reload failed", problem=line)
            self._telemetry.reloaded(successful=False)
        else:
            await self._apply(loaded, bound)
            self._telemetry.reloaded(successful=True)
            self._log.info("reloaded", agents=",".join(self._agents))
        self._notifier.ready(self._summary())

    def _prepare(self, loaded: Config) -> dict[_Key, Listener]:
        """Do all of `loaded` that can fail, or nothing: read secrets, listen on new addresses.

        Raises CredentialsUnavailable and BindError.
        """
        for agent_config in loaded.agents.values():
            check_secrets(agent_config.auth, self._log)
            check_secrets(agent_config.discovery_auth, self._log)
        for one in loaded.listeners:
            if one.token is not None:
                Secret(one.token, self._log).read()
            try:
                _threshold(one)
            except OSError as error:
                raise BindError(f"{one.address}: its certificate: {error}") from None
        bound: dict[_Key, Listener] = {}
        try:
            for key, listener_config in _wanted(loaded).items():
                if key not in self._listeners:
                    mode = _ADMIN_MODE if listener_config is None else listener_config.mode
                    bound[key] = Listener(self._socket(key[0], mode), key[0], log=self._log)
        except BaseException:
            for listener in bound.values():
                listener.close()
            raise
        return bound

    def _socket(self, address: Address, mode: int) -> socket.socket:
        """A listening socket of our own, or one that systemd passed; raises BindError."""
        if not isinstance(address, SystemdAddress):
            return bind(address, mode)
        passed = self._passed.get(address.name, [])
        if len(passed) != 1:
            raise BindError(
                f"{address}: systemd passed {len(passed)} sockets of that FileDescriptorName"
            )
        # A duplicate: the socket outlives a reload that drops the listener.
        return passed[0].dup()

    async def _apply(self, loaded: Config, bound: dict[_Key, Listener]) -> None:
        """Put `loaded` into effect; nothing here can fail because of it."""
        same_limits = loaded.limits == self._config.limits
        self._budget.total = loaded.limits.buffered_bytes
        self._config = loaded
        self._log.configure(level=loaded.log.level, form=loaded.log.format)
        self._forwarder.log_calls = loaded.log.calls
        wanted = _wanted(loaded)
        for key in [one for one in self._listeners if one not in wanted]:
            closed = self._listeners.pop(key)
            closed.accepting.cancel()
            closed.reception.retire(loaded.limits.drain_seconds)
        kept = self._listeners
        own_addresses = _own_addresses([*(one.listener for one in kept.values()), *bound.values()])
        self._apply_agents(loaded, own_addresses, same_limits=same_limits)
        for key, listener_config in wanted.items():
            present = kept.get(key)
            if present is None:
                await self._open(listener_config, key, bound[key])
            elif present.config != listener_config or not same_limits:
                await self._replace(present, listener_config)
        self._cards.use(self._places())

    def _apply_agents(
        self, loaded: Config, own_addresses: frozenset[tuple[str, int]], *, same_limits: bool
    ) -> None:
        for name in [name for name in self._running if name not in loaded.agents]:
            self._retire(name)
            self._telemetry.unwatch(name)
        for name, agent_config in loaded.agents.items():
            present = self._running.get(name)
            unchanged = present is not None and present.agent.config == agent_config
            if unchanged and same_limits:
                continue
            agent = Agent(
                name,
                agent_config,
                dialer=self._dialer,
                limits=loaded.limits,
                own_addresses=own_addresses,
                telemetry=self._telemetry,
                log=self._log,
                rng=self._random,
            )
            if present is not None:
                agent.take_over(present.agent)
                self._retire(name)
            self._start(agent)
        # The order of the file is the order in status and errors.
        for name in loaded.agents:
            self._agents[name] = self._agents.pop(name)

    def _start(self, agent: Agent) -> None:
        background = trio.CancelScope()

        async def run() -> None:
            with background:
                await agent.run()

        self._running[agent.name] = _RunningAgent(agent, background)
        self._agents[agent.name] = agent
        self._telemetry.watch(agent.name, agent)
        if agent.config.enabled:
            self._nursery.start_soon(run)

    def _retire(self, name: str) -> None:
        """No new calls for this agent; those under way finish, within the drain's time."""
        running = self._running.pop(name)
        self._agents.pop(name, None)
        self._nursery.start_soon(self._end_agent, running, self._config.limits.drain_seconds)

    async def _end_agent(self, running: _RunningAgent, seconds: float) -> None:
        agent = running.agent
        deadline = trio.current_time() + seconds
        while agent.in_flight or agent.streams:
            if trio.current_time() >= deadline:
                agent.breaker.trip()
            await trio.sleep(0.1)
        running.background.cancel()

    # --- listeners ----------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [
            _place(one.config, one.listener)
            for one in self._listeners.values()
            if one.config is not None
        ]

    async def _open(
        self, listener_config: ListenerConfig | None, key: _Key, listener: Listener
    ) -> None:
        accepting = trio.CancelScope()
        reception = await self._reception(listener_config, listener)
        listener.receiver = reception

        async def accept() -> None:
            with accepting:
                await listener.run()

        self._listeners[key] = _OpenListener(listener_config, listener, reception, accepting)
        self._nursery.start_soon(accept)

    async def _replace(
        self, present: _OpenListener, listener_config: ListenerConfig | None
    ) -> None:
        """New connections get the new settings; those there are finish under the old ones."""
        reception = await self._reception(listener_config, present.listener)
        present.listener.receiver = reception
        present.reception.retire(self._config.limits.drain_seconds)
        present.reception, present.config = reception, listener_config

    async def _reception(
        self, listener_config: ListenerConfig | None, listener: Listener
    ) -> Reception:
        limits = self._config.limits
        agents = self._config.agents.values()
        reception = Reception(
            self._door(listener_config, listener),
            limits=limits,
            threshold=_threshold(listener_config),
            max_connections=limits.connections if listener_config else _ADMIN_CONNECTIONS,
            max_streams=max(sum(one.max_concurrency + one.max_streams for one in agents), 1),
            telemetry=self._telemetry,
            log=self._log,
        )
        await self._nursery.start(reception.run)
        return reception

    def _door(self, listener_config: ListenerConfig | None, listener: Listener) -> HttpDoor | Admin:
        if listener_config is None:
            return Admin(self._telemetry, self)
        house = House(
            forwarder=self._forwarder,
            agents=self._agents,
            cards=self._cards,
            limits=self._config.limits,
            budget=self._budget,
            new_call_id=lambda: new_call_id(self._random),
        )
        place = _place(listener_config, listener)
        token = listener_config.token
        advertised = {host_of(place.advertise)} if place.advertise else set()
        entry = Entry(
            over_tcp=isinstance(place.address, TcpAddress),
            hosts=frozenset(listener_config.allowed_hosts) | advertised | _bound_host(place),
            token=Secret(token, self._log) if token else None,
            pseudonym=self._pseudonym,
        )
        match place.binding:
            case Binding.JSONRPC:
                return JsonRpcDoor(house, place, entry)
            case Binding.HTTP_JSON:
                return HttpJsonDoor(house, place, entry)
            case Binding.GRPC:
                return GrpcDoor(house, place, entry, is_ready=lambda: not self.unready())

    # --- background ---------------------------------------------------------------------------

    async def _watch_signals(self) -> None:
        wanted = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        with trio.open_signal_receiver(*wanted) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    if not self._draining:
                        await self.reload()
                elif self._stop.is_set():
                    raise KeyboardInterrupt  # a second signal ends at once
                else:
                    self._stop.set()

    async def _measure_lag(self) -> None:
        """How late the loop is; the watchdog hears of it only while it turns."""
        interval = _LAG_INTERVAL_SECONDS
        if self._notifier.watchdog_seconds:
            interval = min(interval, self._notifier.watchdog_seconds / 2)
        while True:
            due = trio.current_time() + interval
            await trio.sleep_until(due)
            self._telemetry.loop_lag(max(trio.current_time() - due, 0.0))
            self._log.tick()
            if self._notifier.watchdog_seconds:
                self._notifier.alive()


def _place(listener_config: ListenerConfig, listener: Listener) -> Place:
    return Place(
        binding=listener_config.binding,
        address=listener.address,
        agent=listener_config.agent,
        tls=listener_config.tls_cert_file is not None,
        advertise=listener_config.advertise,
        asks_for_token=listener_config.token is not None,
    )


def _bound_host(place: Place) -> frozenset[str]:
    return frozenset({place.address.host} if isinstance(place.address, TcpAddress) else ())


def _threshold(listener_config: ListenerConfig | None) -> Threshold:
    if listener_config is None:
        return Threshold()
    tls = None
    if listener_config.tls_cert_file is not None:
        tls = make_server_context(
            str(listener_config.tls_cert_file), str(listener_config.tls_key_file)
        )
    return Threshold(
        uids=frozenset(listener_config.allow_uids),
        gids=frozenset(listener_config.allow_gids),
        tls=tls,
    )


def _wanted(loaded: Config) -> dict[_Key, ListenerConfig | None]:
    """Everything to listen on, by what identifies it across reloads; None for the admin address."""
    wanted: dict[_Key, ListenerConfig | None] = {}
    seen: Counter[Address] = Counter()
    entries = [(one.address, one) for one in loaded.listeners]
    for address, listener_config in [*entries, (loaded.admin.address, None)]:
        wanted[address, seen[address]] = listener_config
        seen[address] += 1
    return wanted


def _own_addresses(listeners: list[Listener]) -> frozenset[tuple[str, int]]:
    """What no card may point at."""
    return frozenset(
        (one.address.host, one.address.port)
        for one in listeners
        if isinstance(one.address, TcpAddress)
    )
