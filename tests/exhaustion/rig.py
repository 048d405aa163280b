"""A real agent and forwarder over scripted connections, and recordings of clean exchanges."""

from __future__ import annotations

import enum
import functools
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.agent import Agent
from sidecar.budget import Budget
from sidecar.config import AgentConfig, Limits, TlsConfig
from sidecar.core import convert
from sidecar.core.spec import SEND_MESSAGE, SEND_STREAMING_MESSAGE, Binding
from sidecar.core.types import Break, Call, Form, Payload
from sidecar.discovery import NO_VALIDATORS, FetchedCard
from sidecar.forwarder import Forwarder
from sidecar.logs import Log
from sidecar.telemetry import Telemetry
from sidecar.wire.http1_pool import Http1Pool
from sidecar.wire.net import Dialer, DialError
from tests.exhaustion.network import ScriptedWire
from tests.exhaustion.peer import (
    ANSWER,
    EVENTS,
    PREFACE,
    Http1Peer,
    Http2Peer,
    Ledger,
    Peer,
    TlsPeer,
)
from tests.support.files import card

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from sidecar.core.spec import Operation
    from sidecar.result import Result
    from sidecar.wire.http2_pool import Http2Pool
    from sidecar.wire.net import Permit
    from sidecar.wire.tls import TlsIdentity

DEADLINE_SECONDS: Final = 3.0
"""Less than any timeout of the configuration."""

MOST_CONNECTIONS: Final = 10
"""More than any cell may need: no time passes while connections come and go."""

HOSTS: Final = ("one.example", "two.example")
PORTS: Final = (1001, 1002)
"""Of the first candidate and the second."""


class Shape(enum.Enum):
    """What is exchanged."""

    UNARY = "unary"
    STREAM = "stream"
    LARGE = "large"
    """A unary request of several sends, and of more bytes than a window has."""


_OTHER: Final = {
    Binding.JSONRPC: Binding.HTTP_JSON,
    Binding.HTTP_JSON: Binding.GRPC,
    Binding.GRPC: Binding.JSONRPC,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What decides the bytes of a clean exchange."""

    binding: Binding
    shape: Shape
    reused: bool = False
    """On a connection that has carried another one."""
    tls: bool = False
    deadline: bool = False

    @property
    def http1(self) -> bool:
        return self.binding is not Binding.GRPC

    @property
    def other_binding(self) -> Binding:
        """Of the other candidate; a large message would cross to another form in a thread."""
        return self.binding if self.shape is Shape.LARGE else _OTHER[self.binding]


@dataclass(slots=True)
class World:
    """What all cells share."""

    telemetry: Telemetry
    log: Log
    ca_file: str = ""
    server_contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    strict_contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    """Of a server that wants our certificate."""
    client_contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)
    """By ALPN protocol."""
    recordings: dict[Exchange, Recording] = field(default_factory=dict)

    sink: int = -1

    @classmethod
    def make(cls) -> World:
        """One that logs to nowhere."""
        sink = os.open(os.devnull, os.O_WRONLY)
        log = Log(level="error", clock=lambda: 0.0, fd=sink)
        return cls(Telemetry("0"), log, sink=sink)

    def close(self) -> None:
        """After the last cell."""
        self.log.close()
        os.close(self.sink)


class _ScriptedDialer(Dialer):
    """The real dialer, TLS included, over scripted connections."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(stall_seconds=120)
        self._rig = rig
        self._contexts = _KnownContexts(rig.world)  # type: ignore[assignment]

    async def _connect(self, host: str, port: int, permit: Permit) -> Any:
        return self._rig.connect(port)


class _KnownContexts:
    """Contexts made beforehand: a thread would let the test's clock jump."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def get(self, _: TlsIdentity, alpn: str) -> ssl.SSLContext:
        return self._world.client_contexts[alpn]


class _Source:
    """Gives the agent its card."""

    def __init__(self, fetched: FetchedCard) -> None:
        self._fetched = fetched

    async def fetch(self, *_: object, **__: object) -> FetchedCard:
        return self._fetched


class Rig:
    """One agent, its candidates' peers, and the connections between them."""

    def __init__(
        self,
        world: World,
        exchange: Exchange,
        *,
        candidates: int = 1,
        cut: int = 0,
        dial_failover: bool = False,
    ) -> None:
        """`cut` is the candidate that `on_connect` concerns and that has the exchange's binding."""
        self.world = world
        self.exchange = exchange
        self.ledger = Ledger()
        self.wires: list[ScriptedWire] = []
        """All connections there were."""
        self.on_connect: Callable[[ScriptedWire], None] = ScriptedWire.open
        """Opens the next connection to candidate `cut`; the others open without incident."""
        self.always = False
        """`on_connect` is for every connection to it."""
        self.refusing: set[int] = set()
        """Candidates that cannot be dialled."""
        self.server_contexts = [world.server_contexts] * candidates
        self._cut = cut
        bindings = [exchange.other_binding] * candidates
        bindings[cut] = exchange.binding
        self.bindings = tuple(bindings)
        self.agent = Agent(
            "a",
            _config(world.ca_file if exchange.tls else "", dial_failover),
            dialer=_ScriptedDialer(self),
            limits=Limits(),
            own_addresses=frozenset(),
            telemetry=world.telemetry,
            log=world.log,
            rng=random.Random(1),
        )
        self.agent._source = _Source(_card(self.bindings, exchange.tls))  # type: ignore[assignment]
        self.forwarder = Forwarder(telemetry=world.telemetry, log=world.log)
        self.budget = Budget(1 << 24)
        self.events: list[bytes] = []
        """Of the last call, as the application got them."""

    def connect(self, port: int) -> ScriptedWire:
        """What the dialer gets instead of a connected socket."""
        if len(self.wires) == MOST_CONNECTIONS:
            raise RuntimeError("one connection after the other")
        candidate = PORTS.index(port)
        if candidate in self.refusing:
            raise DialError(Break.REFUSED, "scripted")
        binding = self.bindings[candidate]
        peer = self.peer(binding)
        if self.exchange.tls:
            alpn = "h2" if binding is Binding.GRPC else "http/1.1"
            peer = TlsPeer(peer, self.server_contexts[candidate][alpn])
        wire = ScriptedWire(peer, self.ledger, port=port)
        self.wires.append(wire)
        if candidate != self._cut:
            wire.open()
            return wire
        opens = self.on_connect
        if not self.always:
            self.on_connect = ScriptedWire.open
        opens(wire)
        return wire

    def peer(self, binding: Binding) -> Peer:
        """The agent's side of a new connection."""
        if binding is Binding.GRPC:
            return Http2Peer(self.ledger, streaming=self.exchange.shape is Shape.STREAM)
        return Http1Peer(self.ledger)

    async def call(self, message_id: str = "m") -> Result:
        """One call, in the form of the exchange's binding."""
        exchange = self.exchange
        self.events = []
        payload = _request(exchange.binding, exchange.shape, message_id)
        deadline = trio.current_time() + DEADLINE_SECONDS if exchange.deadline else None
        call = Call(
            operation=_operation(exchange.shape),
            binding=exchange.binding,
            payload=payload,
            id="call",
            deadline=deadline,
        )
        with self.budget.reserve() as held:
            assert held.try_take(len(payload.data))
            if exchange.shape is Shape.STREAM:
                return await self.forwarder.stream(self.agent, call, self._deliver, held=held)
            return await self.forwarder.unary(self.agent, call, held=held)

    async def _deliver(self, payloads: Sequence[Payload], _: Result) -> None:
        self.events += [payload.data for payload in payloads]

    async def warm_up(self) -> ScriptedWire:
        """One clean call; the connection that it leaves behind."""
        result = await self.call()
        assert result.error is None, result.error
        await wait_all_tasks_blocked()
        return self.wires[-1]

    def busy(self) -> list[str]:
        """What has not come back to where it was."""
        agent = self.agent
        found = []
        if agent.in_flight or agent.streams or agent.breaker._scopes:
            found.append(f"calls: {agent.in_flight} unary, {agent.streams} streams")
        if self.budget.taken or self.budget._waiting:
            found.append(f"budget: {self.budget.taken} bytes, {len(self.budget._waiting)} waiting")
        for pool in agent._connections._pools.values():
            found += _busy_http1(pool) if isinstance(pool, Http1Pool) else _busy_http2(pool)
        return found


def _busy_http1(pool: Http1Pool) -> list[str]:
    if pool.statistics().busy or pool._waiters:
        return [f"HTTP/1.1 pool: {pool.statistics()}, {len(pool._waiters)} waiting"]
    return []


def _busy_http2(pool: Http2Pool) -> list[str]:
    found = []
    statistics = pool.statistics()
    if statistics.streams or statistics.waiting or statistics.dialing or statistics.leaving:
        found.append(f"HTTP/2 pool: {statistics}")
    for connection in pool._connections:
        engine = connection._engine
        if engine.open_streams or engine.pending:
            found.append(f"engine: {engine.open_streams} streams, {engine.pending} bytes to send")
        window = engine._inbound_flow_control_window_manager  # type: ignore[attr-defined]
        lost = window.max_window_size - window.current_window_size - window._bytes_processed
        if lost:
            found.append(f"the connection's window has lost {lost} bytes")
        if connection._turns or connection._blocked or connection._opens or connection._streams:
            found.append("a request is left in the connection")
    return found


@functools.cache
def _config(ca_file: str, dial_failover: bool) -> AgentConfig:
    tls = TlsConfig(ca_file=Path(ca_file)) if ca_file else TlsConfig()
    return AgentConfig(card="http://one.example", tls=tls, stream_dial_failover=dial_failover)


@functools.cache
def _card(bindings: tuple[Binding, ...], tls: bool) -> FetchedCard:
    scheme = "https" if tls else "http"
    paths = {Binding.JSONRPC: "/rpc", Binding.HTTP_JSON: "/v1", Binding.GRPC: ""}
    entries = [
        (str(binding), f"{scheme}://{host}:{port}{paths[binding]}")
        for binding, host, port in zip(bindings, HOSTS, PORTS, strict=False)
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


def _operation(shape: Shape) -> Operation:
    return SEND_STREAMING_MESSAGE if shape is Shape.STREAM else SEND_MESSAGE


@functools.cache
def _request(binding: Binding, shape: Shape, message_id: str) -> Payload:
    text = "x" * (400_000 if shape is Shape.LARGE else 1)
    message = {"messageId": message_id, "role": "ROLE_USER", "parts": [{"text": text}]}
    data = json.dumps({"message": message}, separators=(",", ":")).encode()
    if binding is Binding.GRPC:
        return Payload(Form.PROTO, convert.json_to_proto("SendMessageRequest", data))
    return Payload(Form.JSON, data)


@functools.cache
def answers(binding: Binding, shape: Shape) -> list[bytes]:
    """What the application gets of a clean exchange, in order."""
    streaming = shape is Shape.STREAM
    texts = list(EVENTS) if streaming else [ANSWER]
    if binding is not Binding.GRPC:
        return texts
    type_ = "StreamResponse" if streaming else "SendMessageResponse"
    return [convert.json_to_proto(type_, text) for text in texts]


# --- recordings -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A clean exchange; offsets count from its own beginning."""

    request: bytes
    reply: bytes
    begins: int
    """Where in what we send the request itself begins: behind handshake, preface and SETTINGS."""
    head_ends: int
    """Plain HTTP/1.1: where the final head of the reply ends."""


async def record(world: World, exchange: Exchange) -> Recording:
    """Run `exchange` without a fault, once."""
    known = world.recordings.get(exchange)
    if known is None:
        known = world.recordings[exchange] = await _record(world, exchange)
    return known


async def _record(world: World, exchange: Exchange) -> Recording:
    rig = Rig(world, exchange)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        start = said = 0
        if exchange.reused:
            wire = await rig.warm_up()
            start, said = wire.taken, wire.passed
        wire = await rig.warm_up()
        request, reply = bytes(wire.request_log[start:]), bytes(wire.reply_log[said:])
        nursery.cancel_scope.cancel()
    assert wire.head_sent_from is not None
    begins = wire.head_sent_from - start
    if not exchange.http1 and not exchange.tls:
        begins = first_headers(request) or 0
    head_ends = reply.find(b"\r\n\r\n", reply.find(b"HTTP/1.1 200")) + 4
    return Recording(request=request, reply=reply, begins=begins, head_ends=head_ends)


def first_headers(frames: bytes) -> int | None:
    """Where the first HEADERS frame begins."""
    return next((at for at, kind, _ in http2_frames(frames) if kind == 1), None)


def http2_frames(data: bytes) -> list[tuple[int, int, int]]:
    """Where each frame begins, its type, and its size with its head; the last may be incomplete."""
    at = len(PREFACE) if data.startswith(PREFACE) else 0
    frames = []
    while len(data) - at >= 9:
        size = 9 + int.from_bytes(data[at : at + 3], "big")
        frames.append((at, data[at + 3], size))
        at += size
    return frames


def tls_records(data: bytes) -> list[tuple[int, int, int]]:
    """Where each record begins, its type, and its size with its head."""
    at = 0
    records = []
    while len(data) - at >= 5:
        size = 5 + int.from_bytes(data[at + 3 : at + 5], "big")
        records.append((at, data[at], size))
        at += size
    return records
