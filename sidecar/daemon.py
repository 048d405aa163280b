"""The daemon: everything is made here and handed to each other; signals, admin, drain."""

from __future__ import annotations

import functools
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
from sidecar.doors.http import House, HttpDoor
from sidecar.doors.http_json import HttpJsonDoor
from sidecar.doors.jsonrpc import JsonRpcDoor
from sidecar.forwarder import Forwarder
from sidecar.listener import Listener, bind, is_http2, is_tls, refuse_http2, sniff
from sidecar.logs import Log, new_call_id
from sidecar.telemetry import Telemetry
from sidecar.wire.http1_server import Connections, Http1Limits, render_json, serve_http1
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from sidecar.config import Config, ListenerConfig
    from sidecar.core.types import Headers
    from sidecar.wire.http1_server import Http1Request
    from sidecar.wire.sockets import SocketWire

_LAG_INTERVAL_SECONDS = 0.5

_DOORS: dict[Binding, type[HttpDoor]] = {
    Binding.JSONRPC: JsonRpcDoor,
    Binding.HTTP_JSON: HttpJsonDoor,
}


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
        self._connections = Connections()

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
                    door = _DOORS[place.binding](house, place)
                    serve = functools.partial(self._connection, door.serve, door.render)
                    accepting.start_soon(listener.serve, connections, serve)
                assert self._admin is not None  # bound with the listeners
                serve = functools.partial(self._connection, admin.serve, render_json)
                accepting.start_soon(self._admin.serve, connections, serve)
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
                self._connections.begin_closing()
            connections.cancel_scope.deadline = (
                trio.current_time() + self._config.limits.drain_seconds
            )
        self._log.info("stopped")

    async def _connection(
        self,
        handler: Callable[[Http1Request], Awaitable[None]],
        render: Callable[[int, str], tuple[Headers, bytes]],
        wire: SocketWire,
        initial: bytes,
    ) -> None:
        with trio.CancelScope(deadline=trio.current_time() + 300):
            initial = await sniff(wire)
        if not initial:
            return
        if is_tls(initial):
            self._log.limited("tls", "warning", "a client speaks TLS to a plaintext listener")
            return
        if is_http2(initial):
            self._log.limited("http2", "warning", "a client speaks HTTP/2 to an HTTP/1.1 listener")
            await refuse_http2(wire)
            return
        limits = Http1Limits(
            header_bytes=self._config.limits.header_bytes,
            stall_seconds=self._config.limits.stall_seconds,
        )
        await serve_http1(
            wire,
            handler,
            limits=limits,
            initial=initial,
            connections=self._connections,
            render=render,
            on_bug=self._bug,
        )

    def _bug(self, where: str, error: BaseException) -> None:
        self._telemetry.internal_error(where)
        self._log.error("internal error", where=where, error=repr(error))

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
