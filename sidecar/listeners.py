"""All listeners of the daemon: what can fail is done before anything changes; kept across reloads."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import trio

from sidecar.config import SystemdAddress, TcpAddress, UnixAddress
from sidecar.config_values import is_loopback
from sidecar.doors.cards import Place
from sidecar.listener import BindError, Listener, address_of, bind
from sidecar.reception import Reception, Threshold
from sidecar.systemd import take_sockets
from sidecar.wire.tls import make_server_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.config import Address, Config, Limits, ListenerConfig
    from sidecar.logs import Log
    from sidecar.reception import Door
    from sidecar.telemetry import Telemetry

    MakeDoor: TypeAlias = Callable[[ListenerConfig | None, Listener, Limits], Door]

_ADMIN_CONNECTIONS = 64
_ADMIN_MODE = 0o600
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)

# Port 0 may stand in a configuration several times, so an address alone is not enough.
_Key: TypeAlias = "tuple[Address, int]"


@dataclass(slots=True)
class _Open:
    """A bound listener, and the settings it is served under."""

    config: ListenerConfig | None
    """None for the admin address."""
    limits: tuple[object, ...]
    listener: Listener
    reception: Reception
    accepting: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a configuration needs of the system, had before it takes effect."""

    loaded: Config
    bound: dict[_Key, Listener]
    thresholds: dict[_Key, Threshold]
    receptions: dict[_Key, Reception] = field(default_factory=dict)

    def close(self) -> None:
        """Give it back: the configuration does not take effect."""
        for listener in self.bound.values():
            listener.close()
        for reception in self.receptions.values():
            reception.retire(0)


class Listeners:
    """Every listener and the admin address, under the present configuration."""

    def __init__(self, *, make_door: MakeDoor, telemetry: Telemetry, log: Log) -> None:
        """`make_door` gets None instead of a listener's settings for the admin address."""
        self._make_door = make_door
        self._telemetry = telemetry
        self._log = log
        self._passed = take_sockets()
        self._open: dict[_Key, _Open] = {}
        self._receptions: set[Reception] = set()
        """All that have not ended, those of earlier configurations too."""
        self._nursery: trio.Nursery

    def start(self, nursery: trio.Nursery) -> None:
        """Everything runs in `nursery` from now on."""
        self._nursery = nursery

    # --- what is there ------------------------------------------------------------------------

    @property
    def places(self) -> list[Place]:
        """The listeners for applications, in the order of the configuration."""
        return [
            place_of(one.config, one.listener)
            for one in self._open.values()
            if one.config is not None
        ]

    @property
    def admin_address(self) -> str:
        """Where the admin address is bound."""
        admin = next(one for one in self._open.values() if one.config is None)
        return str(admin.listener.address)

    @property
    def connections(self) -> int:
        """Connections of applications that have not ended."""
        admin = [one.reception for one in self._open.values() if one.config is None]
        return sum(one.connections for one in self._receptions if one not in admin)

    # --- a configuration ----------------------------------------------------------------------

    def prepare(self, loaded: Config) -> Prepared:
        """Listen on every new address and read every certificate, or nothing; raises BindError."""
        wanted = _wanted(loaded)
        thresholds = {key: _threshold(config) for key, config in wanted.items()}
        bound: dict[_Key, Listener] = {}
        try:
            for key, config in wanted.items():
                present = self._open.get(key)
                if present is None or not present.listener.reachable:
                    sock = self._socket(key[0], config)
                    bound[key] = Listener(sock, key[0], log=self._log)
        except BaseException:
            for listener in bound.values():
                listener.close()
            raise
        return Prepared(loaded=loaded, bound=bound, thresholds=thresholds)

    def own_addresses(self, prepared: Prepared) -> frozenset[tuple[str, int]]:
        """What no card may point at once the configuration is in effect."""
        kept = [one.listener for key, one in self._open.items() if key in prepared.thresholds]
        return frozenset(
            (one.address.host, one.address.port)
            for one in [*kept, *prepared.bound.values()]
            if isinstance(one.address, TcpAddress)
        )

    async def stand_by(self, prepared: Prepared) -> None:
        """Start what will take connections, so that `apply` changes everything at once."""
        limits = _limits_of(prepared.loaded)
        for key, config in _wanted(prepared.loaded).items():
            present = self._open.get(key)
            if present is None or (present.config, present.limits) != (config, limits):
                listener = prepared.bound.get(key) or self._open[key].listener
                reception = self._reception(config, listener, prepared, key)
                prepared.receptions[key] = reception
                await self._nursery.start(self._run, reception)

    def apply(self, prepared: Prepared) -> None:
        """Put the configuration into effect. Connections that are there keep their settings."""
        loaded = prepared.loaded
        wanted = _wanted(loaded)
        for key in [key for key in self._open if key not in wanted]:
            gone = self._open.pop(key)
            self._close(gone)
            gone.reception.retire(loaded.limits.drain_seconds)
        for key, config in wanted.items():
            present = self._open.pop(key, None)
            reception = prepared.receptions.get(key)
            listener = prepared.bound.get(key)
            if present is None:
                assert reception is not None
                assert listener is not None
                present = _Open(config, _limits_of(loaded), listener, reception)
                self._listen(present)
            else:
                self._change(present, config, loaded, listener, reception)
            present.reception.threshold = prepared.thresholds[key]
            present.reception.max_streams = _streams(loaded)
            # The order of the file is the order in status and errors.
            self._open[key] = present

    def _change(
        self,
        present: _Open,
        config: ListenerConfig | None,
        loaded: Config,
        listener: Listener | None,
        reception: Reception | None,
    ) -> None:
        """New settings for a listener whose address stays; it keeps its socket."""
        if listener is not None:
            # Somebody removed the file of the Unix socket.
            present.accepting.cancel()
            present.listener, present.accepting = listener, trio.CancelScope()
            self._listen(present)
        _set_mode(present, config, self._log)
        if reception is not None:
            present.reception.retire(loaded.limits.drain_seconds)
            present.config, present.limits = config, _limits_of(loaded)
            present.reception = reception
        present.listener.receiver = present.reception

    def _reception(
        self,
        config: ListenerConfig | None,
        listener: Listener,
        prepared: Prepared,
        key: _Key,
    ) -> Reception:
        limits = prepared.loaded.limits
        return Reception(
            self._make_door(config, listener, limits),
            limits=limits,
            threshold=prepared.thresholds[key],
            max_connections=limits.connections if config else _ADMIN_CONNECTIONS,
            max_streams=_streams(prepared.loaded),
            telemetry=self._telemetry,
            log=self._log,
        )

    async def _run(self, reception: Reception, task_status: trio.TaskStatus[None]) -> None:
        self._receptions.add(reception)
        try:
            await reception.run(task_status)
        finally:
            self._receptions.discard(reception)

    def _listen(self, opened: _Open) -> None:
        listener, accepting = opened.listener, opened.accepting
        listener.receiver = opened.reception

        async def accept() -> None:
            with accepting:
                await listener.run()

        self._nursery.start_soon(accept)

    def _close(self, opened: _Open) -> None:
        opened.listener.accept_waiting()
        opened.accepting.cancel()

    def _socket(self, address: Address, config: ListenerConfig | None) -> socket.socket:
        """A listening socket of our own, or one that systemd passed; raises BindError."""
        if isinstance(address, SystemdAddress):
            return self._take(address, config)
        return bind(address, _ADMIN_MODE if config is None else config.mode)

    def _take(self, address: SystemdAddress, config: ListenerConfig | None) -> socket.socket:
        passed = self._passed.get(address.name, [])
        if len(passed) != 1:
            names = ", ".join(sorted(self._passed)) or "none"
            raise BindError(
                f"{address}: systemd passed {len(passed)} sockets of that FileDescriptorName;"
                f" names that it passed: {names}"
            )
        sock = passed[0]
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.type != socket.SOCK_STREAM or sock.family not in _FAMILIES or not listens:
            raise BindError(f"{address}: not a listening stream socket")
        bound = address_of(sock)
        if isinstance(bound, TcpAddress) and not is_loopback(bound) and not _may_be_remote(config):
            raise BindError(
                f"{address}: other machines reach {bound}; that needs allow_remote = true, token"
                " and tls_cert_file"
            )
        # A duplicate: the socket outlives a reload that drops the listener.
        return sock.dup()

    # --- the end ------------------------------------------------------------------------------

    def drain(self, seconds: float) -> None:
        """Take no new connections; calls under way have `seconds`.

        The admin address stays, so that `/readyz` can say 503.
        """
        for one in self._open.values():
            if one.config is not None:
                self._close(one)
        for reception in self._applications():
            reception.retire(seconds)

    def hurry(self) -> None:
        """After `drain`: calls under way are told to end now."""
        for reception in self._applications():
            reception.hurry()

    async def drained(self) -> None:
        """Wait until the last connection of an application has ended."""
        for reception in self._applications():
            await reception.ended.wait()

    def _applications(self) -> list[Reception]:
        admin = [one.reception for one in self._open.values() if one.config is None]
        return [one for one in self._receptions if one not in admin]


def place_of(config: ListenerConfig, listener: Listener) -> Place:
    """What cards and errors say of a listener."""
    return Place(
        binding=config.binding,
        address=listener.address,
        agent=config.agent,
        tls=config.tls_cert_file is not None,
        advertise=config.advertise,
        asks_for_token=config.token is not None,
    )


def _wanted(loaded: Config) -> dict[_Key, ListenerConfig | None]:
    """Everything to listen on, by what identifies it across reloads; None for the admin address."""
    entries: Iterable[tuple[Address, ListenerConfig | None]] = [
        *((one.address, one) for one in loaded.listeners),
        (loaded.admin.address, None),
    ]
    wanted: dict[_Key, ListenerConfig | None] = {}
    seen: Counter[Address] = Counter()
    for address, config in entries:
        wanted[address, seen[address]] = config
        seen[address] += 1
    return wanted


def _limits_of(loaded: Config) -> tuple[object, ...]:
    """The limits that a listener is served under."""
    limits = loaded.limits
    return (
        limits.request_bytes,
        limits.header_bytes,
        limits.connections,
        limits.keepalive_seconds,
        limits.stall_seconds,
    )


def _streams(loaded: Config) -> int:
    """Streams of one HTTP/2 connection: what all agents may have under way."""
    agents = loaded.agents.values()
    return max(sum(one.max_concurrency + one.max_streams for one in agents), 1)


def _threshold(config: ListenerConfig | None) -> Threshold:
    """Raises BindError for a certificate that cannot be used."""
    if config is None:
        return Threshold()
    tls = None
    if config.tls_cert_file is not None:
        try:
            tls = make_server_context(str(config.tls_cert_file), str(config.tls_key_file))
        except OSError as error:
            raise BindError(
                f"{config.address}: tls_cert_file, tls_key_file: {error.strerror or error}"
            ) from None
    return Threshold(uids=frozenset(config.allow_uids), gids=frozenset(config.allow_gids), tls=tls)


def _may_be_remote(config: ListenerConfig | None) -> bool:
    return (
        config is not None
        and config.allow_remote
        and config.token is not None
        and config.tls_cert_file is not None
    )


def _set_mode(present: _Open, config: ListenerConfig | None, log: Log) -> None:
    address = present.listener.address
    if config is None or present.config is None or not isinstance(address, UnixAddress):
        return
    if config.mode != present.config.mode and isinstance(config.address, UnixAddress):
        try:
            os.chmod(address.path, config.mode)
        except OSError as error:
            log.warning("mode not changed", socket=address.path, error=error.strerror or error)
