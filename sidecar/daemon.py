"""The daemon: everything is made here and handed to each other; signals, reload, drain, watchdog."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import trio

from sidecar import __version__, config
from sidecar.admin import Admin
from sidecar.agent_settings import identity_of
from sidecar.agent_view import view
from sidecar.budget import Budget
from sidecar.config import ConfigError, TcpAddress
from sidecar.core.door import host_of
from sidecar.core.spec import Binding
from sidecar.credentials import CredentialsUnavailable, Secret, check_secrets
from sidecar.doors.cards import CardDesk
from sidecar.doors.entry import Entry
from sidecar.doors.grpc import GrpcDoor
from sidecar.doors.http import House
from sidecar.doors.http_json import HttpJsonDoor
from sidecar.doors.jsonrpc import JsonRpcDoor
from sidecar.forwarder import Forwarder
from sidecar.listener import BindError
from sidecar.listeners import Listeners, place_of
from sidecar.logs import Log, new_call_id
from sidecar.roster import Roster
from sidecar.systemd import Notifier
from sidecar.telemetry import Telemetry
from sidecar.wire.tls import make_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.config import Config, Limits, ListenerConfig
    from sidecar.doors.cards import Place
    from sidecar.listener import Listener
    from sidecar.listeners import Prepared
    from sidecar.reception import Door

_TICK_SECONDS = 0.5
# The manager wants to hear from us once per period; two chances to be late are left.
_WATCHDOG_PART = 3
_TIMES_TO_STOP = 3


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
        self._random = random.SystemRandom()
        self._pseudonym = f"a2a-sidecar-{new_call_id(self._random)}"
        self._forwarder = Forwarder(telemetry=self._telemetry, log=self._log)
        self._budget = Budget(loaded.limits.buffered_bytes)
        self._cards = CardDesk()
        self._roster = Roster(telemetry=self._telemetry, log=self._log, rng=self._random)
        self._listeners = Listeners(make_door=self._door, telemetry=self._telemetry, log=self._log)
        self._changing = trio.Lock()
        """Held while a configuration takes effect, so that no drain begins in the middle."""
        self._draining = False
        self._reload_error: str | None = None
        self._reload_wanted = trio.Event()
        self._stop = trio.Event()
        self._hurry = trio.Event()
        self._stops = 0
        self.interrupted = False
        """SIGINT came again while calls were drained."""
        self._nursery: trio.Nursery

    # --- what the admin address shows ---------------------------------------------------------

    def unready(self) -> list[str]:
        """Why the daemon is not ready; empty when it is."""
        if self._draining:
            return ["draining"]
        agents = self._roster.agents.values()
        reasons = [agent.why_unready for agent in agents if agent.config.enabled]
        return reasons if all(reasons) else []

    def status(self) -> dict[str, Any]:
        """Everything for `/status`."""
        return {
            "version": __version__,
            "ready": not self.unready(),
            "draining": self._draining,
            "reload_error": self._reload_error,
            "listeners": [
                {"address": str(place.address), "binding": str(place.binding)}
                for place in self._listeners.places
            ],
            "agents": {name: view(agent) for name, agent in self._roster.agents.items()},
        }

    # --- life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        A second signal ends the drain: calls are told so and broken off; a third one ends
        everything. Raises BindError and CredentialsUnavailable before anything runs.
        """
        # What comes between our handlers and the end of the process must not kill it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        try:
            with trio.open_signal_receiver(*signals) as received:
                await trio.to_thread.run_sync(self._check_files, self._config)
                await self._serve(received)
        finally:
            self._log.close()

    async def _serve(self, signals: AsyncIterator[int]) -> None:
        prepared = self._listeners.prepare(self._config)
        async with trio.open_nursery() as self._nursery:
            self._listeners.start(self._nursery)
            self._roster.start(self._nursery)
            self._nursery.start_soon(self._watch_signals, signals)
            await self._apply(prepared)
            self._nursery.start_soon(self._keep_time)
            self._nursery.start_soon(self._reload_when_asked)
            self._announce()
            await self._stop.wait()
            await self._drain()
            self._nursery.cancel_scope.cancel()
        self._log.info("stopped")

    def _announce(self) -> None:
        self._log.info(
            "started",
            version=__version__,
            listeners=",".join(str(place.address) for place in self._listeners.places),
            admin=self._listeners.admin_address,
            agents=",".join(self._roster.agents),
        )
        self._notifier.ready(self._summary())

    def _summary(self) -> str:
        """The state in a line, for `systemctl status`."""
        if self._draining:
            return f"draining, {self._listeners.connections} connections left"
        agents = [one for one in self._roster.agents.values() if one.config.enabled]
        usable = sum(1 for agent in agents if agent.generation is not None)
        failed = "; the last reload failed" if self._reload_error else ""
        return f"{usable} of {len(agents)} agents can be called{failed}"

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if number == signal.SIGHUP:
                self._reload_wanted.set()
                continue
            self._stops += 1
            self._stop.set()
            if self._stops > 1:
                self._hurry.set()
                self.interrupted = number == signal.SIGINT
            if self._stops >= _TIMES_TO_STOP:
                self._nursery.cancel_scope.cancel()

    async def _keep_time(self) -> None:
        """Measure how late the loop is, and tell the manager that it turns."""
        watchdog = self._notifier.watchdog_seconds / _WATCHDOG_PART
        tick = min(_TICK_SECONDS, watchdog or _TICK_SECONDS)
        alive_at = trio.current_time()
        while True:
            due = trio.current_time() + tick
            await trio.sleep_until(due)
            now = trio.current_time()
            self._telemetry.loop_lag(max(now - due, 0.0))
            self._log.tick()
            self._notifier.status(self._summary())
            if watchdog and now >= alive_at:
                alive_at = now + watchdog - tick / 2
                self._notifier.alive()

    # --- the end ------------------------------------------------------------------------------

    async def _drain(self) -> None:
        async with self._changing:
            self._draining = True
        self._telemetry.draining()
        self._notifier.stopping(self._summary())
        seconds = self._config.limits.drain_seconds
        self._log.info("draining", seconds=seconds, connections=self._listeners.connections)
        self._listeners.drain(seconds)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hurry_when_told)
            await self._listeners.drained()
            nursery.cancel_scope.cancel()

    async def _hurry_when_told(self) -> None:
        await self._hurry.wait()
        self._log.info("drain cut short", connections=self._listeners.connections)
        self._listeners.hurry()

    # --- configuration ------------------------------------------------------------------------

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reload_wanted.wait()
            # What is asked for from now on is another reload.
            self._reload_wanted = trio.Event()
            if self._path is None:
                self._log.warning("reload ignored", reason="there is no configuration file")
            elif self._stop.is_set():
                self._log.warning("reload ignored", reason="the sidecar is shutting down")
            else:
                self._notifier.reloading()
                await self._reload(self._path)
                if not self._draining:
                    self._notifier.ready(self._summary())

    async def _reload(self, path: str) -> None:
        """Read the configuration again and put it into effect as a whole, or change nothing."""
        try:
            loaded = await trio.to_thread.run_sync(self._read, path, abandon_on_cancel=True)
            async with self._changing:
                if self._draining:
                    return
                await self._apply(self._listeners.prepare(loaded))
        except (ConfigError, BindError, CredentialsUnavailable) as error:
            self._reload_failed(str(error))
        except Exception as error:
            self._telemetry.internal_error("reload")
            self._log.error("internal error", where="reload", error=repr(error))
            self._reload_failed("internal error")
        else:
            self._reload_error = None
            self._telemetry.reloaded(successful=True)
            self._log.info("reloaded", agents=",".join(self._roster.agents))

    def _reload_failed(self, why: str) -> None:
        self._reload_error = why
        self._telemetry.reloaded(successful=False)
        for line in why.splitlines():
            self._log.error("reload failed", problem=line)

    def _read(self, path: str) -> Config:
        """For a thread: files may be slow."""
        loaded = config.load(path)
        self._check_files(loaded)
        return loaded

    def _check_files(self, loaded: Config) -> None:
        """Read every secret and certificate once; raises CredentialsUnavailable."""
        for name, agent in loaded.agents.items():
            try:
                check_secrets(agent.auth, self._log)
                check_secrets(agent.discovery_auth, self._log)
                if agent.tls.ca_file or agent.tls.client_cert_file:
                    make_context(identity_of(agent), "")
            except CredentialsUnavailable as error:
                raise CredentialsUnavailable(f"agents.{name}: {error}") from None
            except OSError as error:
                raise CredentialsUnavailable(
                    f"agents.{name}.tls: {error.strerror or error}"
                ) from None
        for listener in loaded.listeners:
            if listener.token is not None:
                try:
                    Secret(listener.token, self._log).read()
                except CredentialsUnavailable as error:
                    raise CredentialsUnavailable(f"{listener.address}: {error}") from None

    async def _apply(self, prepared: Prepared) -> None:
        """Put a configuration into effect; nothing here can fail because of it."""
        loaded = prepared.loaded
        try:
            await self._listeners.stand_by(prepared)
        except BaseException:
            prepared.close()
            raise
        self._config = loaded
        self._budget.resize(loaded.limits.buffered_bytes)
        self._log.configure(level=loaded.log.level, form=loaded.log.format)
        self._forwarder.log_calls = loaded.log.calls
        self._roster.apply(loaded, self._listeners.own_addresses(prepared))
        self._listeners.apply(prepared)
        self._cards.use(self._listeners.places)

    def _door(
        self, listener_config: ListenerConfig | None, listener: Listener, limits: Limits
    ) -> Door:
        """What answers the requests of one listener; None: of the admin address."""
        if listener_config is None:
            return Admin(self._telemetry, self)
        house = House(
            forwarder=self._forwarder,
            agents=self._roster.agents,
            cards=self._cards,
            limits=limits,
            budget=self._budget,
            new_call_id=lambda: new_call_id(self._random),
            count_limit=self._telemetry.limit,
        )
        place = place_of(listener_config, listener)
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


def _bound_host(place: Place) -> frozenset[str]:
    return frozenset({place.address.host} if isinstance(place.address, TcpAddress) else ())
