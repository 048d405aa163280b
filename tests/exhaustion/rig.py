"""One cell of the proof: a real agent and forwarder over a network that is cut once, and the verdict.

What must come of a cell is worked out here from what the network and the peers saw and from the
failure table of the design, never from what the code under test says about itself.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import os
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.agent import Agent
from sidecar.config import AgentConfig, Limits, TlsConfig
from sidecar.core import convert
from sidecar.core.spec import SEND_MESSAGE, SEND_STREAMING_MESSAGE, Binding
from sidecar.core.types import Call, Form, Kind, Payload
from sidecar.discovery import NO_VALIDATORS, FetchedCard
from sidecar.forwarder import Forwarder
from sidecar.logs import Log
from sidecar.telemetry import Telemetry
from sidecar.wire.http1_pool import Http1Pool
from sidecar.wire.http2_pool import Http2Pool
from sidecar.wire.net import Dialer
from sidecar.wire.tls import TlsIdentity, make_context
from tests.exhaustion.network import GOAWAYS, WAITING, Fault, ScriptedWire, Way
from tests.exhaustion.peer import ANSWER, EVENTS, Http1Peer, Http2Peer, Ledger, Peer, TlsPeer
from tests.support.files import card

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from sidecar.forwarder import Result
    from sidecar.wire.net import Origin, Permit
    from tests.support.files import TlsFiles

PATIENCE_SECONDS: Final = 2000.0
"""Longer than any timeout of the configuration, and than two signs of life on HTTP/2."""

DEADLINE_SECONDS: Final = 30.0

_NEXT: Final = {
    Binding.JSONRPC: Binding.HTTP_JSON,
    Binding.HTTP_JSON: Binding.GRPC,
    Binding.GRPC: Binding.JSONRPC,
}
"""The binding of the second candidate."""

_HOSTS: Final = ("one.example", "two.example")
_PORTS: Final = (1001, 1002)


class Shape(enum.Enum):
    """What is exchanged."""

    UNARY = "unary"
    STREAM = "stream"
    LARGE = "large"
    """A unary request of several sends and windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid. `repr` is enough to run it again."""

    binding: Binding
    shape: Shape
    fault: Fault
    way: Way
    offset: int
    """Bytes of this exchange that pass before the fault, in that direction."""
    reused: bool = False
    candidates: int = 1
    tls: bool = False
    dial_failover: bool = False

    @property
    def exchange(self) -> Exchange:
        return Exchange(
            binding=self.binding,
            shape=self.shape,
            reused=self.reused,
            tls=self.tls,
            deadline=self.fault is Fault.DEADLINE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What decides the bytes of a clean exchange."""

    binding: Binding
    shape: Shape
    reused: bool = False
    tls: bool = False
    deadline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A clean exchange; offsets count from its own beginning."""

    request: bytes
    reply: bytes
    begins: int
    """Where in what we send the request itself begins: behind handshake, preface and SETTINGS."""
    head_ends: int
    """HTTP/1.1: where the final head of the reply ends."""


# --- the world --------------------------------------------------------------------------------


@dataclass(slots=True)
class World:
    """What cells share: nothing that changes."""

    telemetry: Telemetry
    log: Log
    tls_files: TlsFiles | None = None
    server_contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    """By ALPN protocol."""
    client_contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    recordings: dict[Exchange, Recording] = field(default_factory=dict)
    cells: int = 0

    @classmethod
    def make(cls) -> World:
        sink = os.open(os.devnull, os.O_WRONLY)
        return cls(Telemetry("0"), Log(level="error", clock=lambda: 0.0, fd=sink))

    def identity(self) -> TlsIdentity:
        assert self.tls_files is not None
        return TlsIdentity(ca_file=str(self.tls_files.ca))

    def client_context(self, alpn: str) -> ssl.SSLContext:
        if alpn not in self.client_contexts:
            self.client_contexts[alpn] = make_context(self.identity(), alpn)
        return self.client_contexts[alpn]


class _ScriptedDialer(Dialer):
    """The real dialer over scripted connections."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(stall_seconds=120)
        self._rig = rig
        if rig.exchange.tls:
            for alpn in ("http/1.1", "h2"):
                self._contexts = _KnownContexts(rig.world)

    async def _connect(self, host: str, port: int, permit: Permit) -> ScriptedWire:  # type: ignore[override]
        return self._rig.connect(port)


class _KnownContexts:
    """Contexts made beforehand: a thread would let the test's clock jump."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def get(self, identity: TlsIdentity, alpn: str) -> ssl.SSLContext:
        return self._world.client_context(alpn)


class _Source:
    """Gives the agent its card."""

    def __init__(self, fetched: FetchedCard) -> None:
        self._fetched = fetched

    async def fetch(self, *_: object, **__: object) -> FetchedCard:
        return self._fetched


class Rig:
    """One agent, its candidates' peers, and the connections between them."""

    def __init__(self, world: World, exchange: Exchange, candidates: int, **config: object) -> None:
        self.world = world
        self.exchange = exchange
        self.ledger = Ledger()
        self.wires: list[ScriptedWire] = []
        self.on_connect: Callable[[ScriptedWire], None] | None = None
        """Told of the next connection to the first candidate, before anything is said on it."""
        self.bindings = (exchange.binding, _NEXT[exchange.binding])[:candidates]
        self.agent = Agent(
            "a",
            _config(exchange.tls and world.tls_files, **config),
            dialer=_ScriptedDialer(self),
            limits=Limits(),
            own_addresses=frozenset(),
            telemetry=world.telemetry,
            log=world.log,
            rng=random.Random(1),
        )
        self.agent._source = _Source(_card(self.bindings, exchange.tls))  # type: ignore[assignment]
        self.forwarder = Forwarder(telemetry=world.telemetry, log=world.log)
        self.events: list[bytes] = []

    def connect(self, port: int) -> ScriptedWire:
        binding = self.bindings[_PORTS.index(port)]
        peer: Peer
        if binding is Binding.GRPC:
            peer = Http2Peer(self.ledger, streaming=self.exchange.shape is Shape.STREAM)
        else:
            peer = Http1Peer(self.ledger)
        if self.exchange.tls:
            alpn = "h2" if binding is Binding.GRPC else "http/1.1"
            peer = TlsPeer(peer, self.world.server_contexts[alpn])
        wire = ScriptedWire(peer, self.ledger, port=port)
        self.wires.append(wire)
        if self.on_connect is not None and port == _PORTS[0]:
            self.on_connect(wire)
            self.on_connect = None
        return wire.open()

    async def call(self, deadline: float | None = None) -> Result:
        """One call from an application with the first candidate's binding."""
        self.events = []
        call = Call(
            operation=_operation(self.exchange.shape),
            binding=self.exchange.binding,
            payload=_request(self.exchange.binding, self.exchange.shape),
            id="call",
            deadline=deadline,
        )
        if self.exchange.shape is not Shape.STREAM:
            return await self.forwarder.unary(self.agent, call)
        return await self.forwarder.stream(self.agent, call, self._deliver)

    async def _deliver(self, event: Result) -> None:
        assert event.payload is not None
        self.events.append(event.payload.data)

    def busy(self) -> list[str]:
        """What has not come back to where it was."""
        found = []
        agent = self.agent
        if agent.in_flight or agent.streams:
            found.append(f"in flight {agent.in_flight}, streams {agent.streams}")
        if agent.breaker._scopes:
            found.append("a call is still registered")
        for pool in agent._connections._pools.values():
            found += _busy_pool(pool)
        return found


def _busy_pool(pool: Http1Pool | Http2Pool) -> list[str]:
    found = []
    if isinstance(pool, Http1Pool):
        if pool.statistics().busy or pool._waiters:
            found.append(f"HTTP/1.1 pool: {pool.statistics()}, {len(pool._waiters)} waiting")
        return found
    statistics = pool.statistics()
    if statistics.streams or statistics.waiting or statistics.dialing or statistics.leaving:
        found.append(f"HTTP/2 pool: {statistics}")
    for connection in pool._connections:
        engine = connection._engine
        if engine.open_streams or engine.pending:
            found.append(f"engine: {engine.open_streams} streams, {engine.pending} bytes pending")
        window = engine._inbound_flow_control_window_manager  # type: ignore[attr-defined]
        owed = window.max_window_size - window.current_window_size - window._bytes_processed
        if owed:
            found.append(f"{owed} bytes of the connection's window are not owned to be returned")
        if connection._turns or connection._blocked or connection._opens or connection._reserved:
            found.append("a request is left in the connection")
    return found


@functools.cache
def _config(tls_files: TlsFiles | None, **config: object) -> AgentConfig:
    tls = TlsConfig(ca_file=str(tls_files.ca)) if tls_files else TlsConfig()
    return AgentConfig.model_validate({"card": "/card.json", "tls": tls, **config})


@functools.cache
def _card(bindings: tuple[Binding, ...], tls: bool) -> FetchedCard:
    scheme = "https" if tls else "http"
    paths = {Binding.JSONRPC: "/rpc", Binding.HTTP_JSON: "/v1", Binding.GRPC: ""}
    entries = [
        (str(binding), f"{scheme}://{host}:{port}{paths[binding]}")
        for binding, host, port in zip(bindings, _HOSTS, _PORTS, strict=False)
    ]
    return FetchedCard(
        data=json.dumps(card(entries)).encode(),
        validators=NO_VALIDATORS,
        max_age=1e9,
        url="/card.json",
        source_scheme="file",
        source_host="",
        peer="",
    )


def _operation(shape: Shape) -> ...:
    return SEND_STREAMING_MESSAGE if shape is Shape.STREAM else SEND_MESSAGE


@functools.cache
def _request(binding: Binding, shape: Shape) -> Payload:
    text = "x" * (400_000 if shape is Shape.LARGE else 1)
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}
    data = json.dumps({"message": message}, separators=(",", ":")).encode()
    if binding is Binding.GRPC:
        return Payload(Form.PROTO, convert.json_to_proto("SendMessageRequest", data))
    return Payload(Form.JSON, data)


@functools.cache
def _answers(binding: Binding, shape: Shape) -> list[bytes]:
    """What the application gets of a clean exchange, in order."""
    if shape is Shape.STREAM:
        type_, texts = "StreamResponse", list(EVENTS)
    else:
        type_, texts = "SendMessageResponse", [ANSWER]
    if binding is Binding.GRPC:
        return [convert.json_to_proto(type_, text) for text in texts]
    return texts
