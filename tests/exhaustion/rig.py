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
from sidecar.core.spec import SEND_MESSAGE, SEND_STREAMING_MESSAGE, Binding, Operation
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
    from collections.abc import Awaitable, Callable

    from sidecar.forwarder import Result
    from sidecar.wire.net import Origin, Permit
    from tests.support.files import TlsFiles

PATIENCE_SECONDS: Final = 2000.0
"""Longer than any timeout of the configuration, and than two signs of life on HTTP/2."""

DEADLINE_SECONDS: Final = 3.0

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
        self._contexts = _KnownContexts(rig.world)  # type: ignore[assignment]

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
        self.on_connect: Callable[[ScriptedWire], None] = ScriptedWire.open
        """Opens the next connection to the first candidate."""
        self.bindings = (exchange.binding, _second(exchange))[:candidates]
        self.agent = Agent(
            "a",
            _config(world.tls_files if exchange.tls else None, **config),
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
        if port == _PORTS[0]:
            open_, self.on_connect = self.on_connect, ScriptedWire.open
            open_(wire)
        else:
            wire.open()
        return wire

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

    async def warm_up(self) -> None:
        """One clean call, so that its connection is there to be used again."""
        result = await self.call()
        assert result.error is None, result.error
        await wait_all_tasks_blocked()

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
    return AgentConfig.model_validate({"card": "http://one.example", "tls": tls, **config})


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


def _second(exchange: Exchange) -> Binding:
    """The binding of the second candidate; large messages cross to no other form, in a thread."""
    if exchange.shape is Shape.LARGE:
        return exchange.binding
    return _NEXT[exchange.binding]


def _operation(shape: Shape) -> Operation:
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


# --- recordings -------------------------------------------------------------------------------


async def record(world: World, exchange: Exchange) -> Recording:
    """The bytes of a clean exchange, and where its parts begin."""
    known = world.recordings.get(exchange)
    if known is not None:
        return known
    rig = Rig(world, exchange, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        start, said = 0, 0
        if exchange.reused:
            await rig.warm_up()
            start, said = rig.wires[0].taken, rig.wires[0].passed
        result = await rig.call(_deadline(exchange))
        assert result.error is None, result.error
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    (wire,) = rig.wires
    request, reply = bytes(wire.request_log[start:]), bytes(wire.reply_log[said:])
    assert wire.head_sent_from is not None
    begins = wire.head_sent_from - start
    if exchange.binding is Binding.GRPC and not exchange.tls:
        begins = _first_headers(request) or 0
    known = Recording(
        request=request,
        reply=reply,
        begins=begins,
        head_ends=reply.find(b"\r\n\r\n", reply.find(b"HTTP/1.1 200")) + 4,
    )
    world.recordings[exchange] = known
    return known


def _first_headers(frames: bytes) -> int | None:
    """Where the first HEADERS frame begins."""
    at = len(PREFACE) if frames.startswith(PREFACE) else 0
    while len(frames) - at >= 9:
        if frames[at + 3] == 1:
            return at
        at += 9 + int.from_bytes(frames[at : at + 3], "big")
    return None


def _record_of_size(records: bytes, size: int) -> int | None:
    """Where the first TLS record of application data of that size begins."""
    at = 0
    while len(records) - at >= 5:
        length = int.from_bytes(records[at + 3 : at + 5], "big")
        if records[at] == 23 and length == size:
            return at
        at += 5 + length
    return None


def _deadline(exchange: Exchange) -> float | None:
    return trio.current_time() + DEADLINE_SECONDS if exchange.deadline else None


# --- one cell ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ending:
    """How the faulted call ended, and what was true then."""

    result: Result | None
    """None: the caller left."""
    too_long: bool
    """The caller left because nothing happened any more."""
    answered: bool
    """All bytes of the first candidate's reply had come."""
    written: bool
    """The first connection may have taken a byte of the request."""
    begun: bool
    """The first candidate has seen the head, and has not refused the request."""
    head_came: bool
    """HTTP/1.1: all of the reply's head had come."""


async def run_cell(world: World, cell: Cell) -> list[str]:
    """What is wrong in `cell`; nothing when the promise holds there."""
    world.cells += 1
    recording = await record(world, cell.exchange)
    config = {"stream_dial_failover": True} if cell.dial_failover else {}
    rig = Rig(world, cell.exchange, cell.candidates, **config)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        await wait_all_tasks_blocked()
        verdict = _Verdict(cell, rig, trio.lowlevel.current_statistics().tasks_living)
        try:
            await verdict.run(recording)
        except Exception as error:
            verdict.wrong.append(f"{type(error).__name__}: {error}")
        nursery.cancel_scope.cancel()
    return verdict.wrong


class _Verdict:
    def __init__(self, cell: Cell, rig: Rig, tasks: int) -> None:
        self.wrong: list[str] = []
        self._cell = cell
        self._rig = rig
        self._tasks = tasks

    def _check(self, name: str, found: object, expected: object) -> None:
        if found != expected:
            self.wrong.append(f"{name}: {found!r} instead of {expected!r}")

    async def run(self, recording: Recording) -> None:
        cell, rig = self._cell, self._rig
        earlier = 0
        if cell.reused:
            await rig.warm_up()
            earlier = len(rig.ledger.requests)
        ending = await self._faulted_call(recording)
        wire = rig.wires[0]
        if cell.fault in WAITING:
            wire.resume()
        elif ending.answered and cell.fault in {Fault.SILENCE, Fault.BLOCK}:
            wire.reset()  # nobody could know; the next call must not be the one to find out
        await wait_all_tasks_blocked()
        self.wrong += rig.busy()
        self._judge(ending, earlier)
        await self._next_call()
        await self._rest(earlier, ending)

    async def _faulted_call(self, recording: Recording) -> _Ending:
        cell, rig = self._cell, self._rig
        cut = trio.Event()
        start = said = 0

        def arm(wire: ScriptedWire) -> None:
            if cell.way is Way.REQUEST:
                wire.open()
                wire.cut(cell.way, cell.offset, cell.fault, cut.set)
            else:
                wire.cut(cell.way, cell.offset, cell.fault, cut.set)
                wire.open()

        if cell.reused:
            wire = rig.wires[0]
            start, said = wire.taken, wire.passed
            wire.reply_end = None
            passed = start if cell.way is Way.REQUEST else said
            wire.cut(cell.way, passed + cell.offset, cell.fault, cut.set)
        else:
            rig.on_connect = arm
        result: Result | None = None
        with trio.move_on_after(PATIENCE_SECONDS) as patience:
            async with trio.open_nursery() as helpers:
                with trio.CancelScope() as caller:
                    if cell.fault is Fault.LEAVE:
                        helpers.start_soon(_leave_when, cut, caller)
                    result = await rig.call(_deadline(cell.exchange))
                helpers.cancel_scope.cancel()
        wire = rig.wires[0]
        offered = bytes(wire.offered_log[start:])
        begins = _request_begins(offered, cell.exchange, recording)
        return _Ending(
            result=result,
            too_long=patience.cancelled_caught,
            answered=wire.reply_end is not None and wire.passed >= wire.reply_end,
            written=begins is not None
            and any(sent.taken and sent.stop > start + begins for sent in wire.sends),
            begun=any(not each.refused for each in wire.requests[int(cell.reused) :]),
            head_came=wire.passed - said >= recording.head_ends > 4,
        )

    def _expected(self, ending: _Ending) -> Kind:
        """The row of the failure table for the first candidate."""
        cell = self._cell
        http1_stream = cell.shape is Shape.STREAM and cell.binding is not Binding.GRPC
        if ending.answered:
            return Kind.ANSWERED
        if cell.fault in WAITING:
            return Kind.CALLER
        if http1_stream and cell.fault is Fault.SILENCE and ending.head_came:
            return Kind.CALLER  # an agent may be silent for as long as it likes
        taken = ending.begun if cell.fault in GOAWAYS else ending.written
        if taken:
            return Kind.AMBIGUOUS
        # a reused connection that was leaving is replaced, which is no failure of the interface
        return Kind.ANSWERED if cell.reused else Kind.NOT_DELIVERED

    def _judge(self, ending: _Ending, earlier: int) -> None:
        cell, rig, result = self._cell, self._rig, ending.result
        kind = self._expected(ending)
        may_go_on = cell.shape is not Shape.STREAM or cell.dial_failover
        goes_on = kind is Kind.NOT_DELIVERED and cell.candidates == 2 and may_go_on
        advances = kind in {Kind.NOT_DELIVERED, Kind.AMBIGUOUS} and cell.candidates == 2
        if result is None:
            self._check("kind", Kind.CALLER, kind)
        elif result.error is None:
            self._check("kind", Kind.ANSWERED, Kind.ANSWERED if goes_on else kind)
            self._check("answer", self._answer(result), _answers(cell.binding, cell.shape))
            self._check("executions", rig.ledger.executions - earlier, 1)
        else:
            delivered = kind is Kind.AMBIGUOUS or (kind is Kind.CALLER and ending.written)
            reasons = {
                Kind.NOT_DELIVERED: "NOT_DELIVERED",
                Kind.AMBIGUOUS: "DELIVERY_UNKNOWN",
                Kind.CALLER: "DEADLINE_EXCEEDED",
            }
            self._check("kind", kind in reasons and not goes_on, True)
            self._check("reason", result.error.reason, reasons.get(kind))
            self._check("delivered", result.error.delivered, "unknown" if delivered else "no")
        if result is not None:
            self._check("attempts", result.attempts, 1 + goes_on)
        events = _answers(cell.binding, cell.shape)[: len(rig.events)]
        self._check("events", rig.events, events if cell.shape is Shape.STREAM else [])
        self._check("second candidate was asked", self._asked(1), goes_on)
        current = rig.agent.generation.selection.current  # type: ignore[union-attr]
        self._check("selection", current, int(advances))
        self._check("ended late", ending.too_long, kind is Kind.CALLER and result is None
                    and cell.fault not in WAITING)

    def _answer(self, result: Result) -> list[bytes]:
        if self._cell.shape is Shape.STREAM:
            return self._rig.events
        return [result.payload.data] if result.payload else []

    def _asked(self, candidate: int) -> bool:
        return any(wire.port == _PORTS[candidate] for wire in self._rig.wires)

    async def _next_call(self) -> None:
        """The same agent serves the next call, at the candidate that the selection names."""
        rig = self._rig
        begins_at = rig.agent.current
        executions = rig.ledger.executions
        with trio.move_on_after(PATIENCE_SECONDS):
            result = await rig.call()
            self._check("next call: error", result.error, None)
            self._check("next call: interface", result.interface, begins_at)
            self._check("next call: attempts", result.attempts, 1)
            self._check("next call: executions", rig.ledger.executions - executions, 1)
            return
        self.wrong.append("next call: it does not end")

    async def _rest(self, earlier: int, ending: _Ending) -> None:
        """Nothing comes late, and everything comes back."""
        rig = self._rig
        await trio.sleep(PATIENCE_SECONDS)
        self.wrong += rig.busy()
        self._check("open connections", [w.port for w in rig.wires if not w.closed], [])
        tasks = trio.lowlevel.current_statistics().tasks_living
        self._check("tasks", tasks, self._tasks)
        requests = rig.ledger.requests[earlier:-1]  # without the next call's
        heads = sum(not each.refused for each in requests)
        executions = sum(each.complete and not each.refused for each in requests)
        if executions > 1 or heads > 1:
            self.wrong.append(f"executed {executions} times, begun {heads} times")
        error = ending.result.error if ending.result else None
        if error is not None and error.delivered == "no":
            self._check("delivered=no: executions", executions, 0)
            self._check("delivered=no: begun", heads, 0)


def _request_begins(offered: bytes, exchange: Exchange, recording: Recording) -> int | None:
    """Where in what was sent the request begins; None: it was not sent."""
    if exchange.tls:
        at = recording.begins
        size = int.from_bytes(recording.request[at + 3 : at + 5], "big")
        return _record_of_size(offered, size)
    if exchange.binding is Binding.GRPC:
        return _first_headers(offered)
    return 0 if offered else None


async def _leave_when(cut: trio.Event, caller: trio.CancelScope) -> None:
    await cut.wait()
    await wait_all_tasks_blocked()
    caller.cancel()
