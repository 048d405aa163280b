"""Runs cells: a daemon in this process, real sockets on both sides, faulty agents in another one.

A cell is one call that meets a fault. What came of it is looked at from all sides (what the agents
saw, what the caller was told, metrics, the selection) and compared with what the failure table says.
"""

from __future__ import annotations

import itertools
import json
import signal
import socket
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio
from prometheus_client.parser import text_string_to_metric_families

from sidecar import config
from sidecar.daemon import Daemon
from sidecar.wire.http1_pool import Http1Pool
from tests.faults.calls import Told, call
from tests.faults.faults import GRPC, HTTP_JSON, JSONRPC
from tests.harness import card, toml

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
    from pathlib import Path

    from sidecar.agent import Agent
    from sidecar.wire.http2_pool import Http2Pool
    from tests.faults.faults import Ending, Fault
    from tests.harness import Peer

LABELS: Final = {JSONRPC: "jsonrpc", HTTP_JSON: "http_json", GRPC: "grpc"}
PATHS: Final = {JSONRPC: "/rpc", HTTP_JSON: "", GRPC: ""}
GOOD: Final = {JSONRPC: HTTP_JSON, HTTP_JSON: JSONRPC, GRPC: JSONRPC}
"""Binding of the candidate without a fault, by that of the faulty one."""

SECONDS: Final = 20.0
"""For one call; more is a hang."""

_TWO_ADDRESSES: Final = ("127.0.0.5", "127.0.0.1")
"""Of a name: nobody listens at the first."""

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One call that meets a fault."""

    fault: Fault
    layout: str
    """The candidates in order: F faulty, G good."""
    streaming: bool = False
    downstream: str = JSONRPC
    tls: bool = False
    dial_failover: bool = False
    """With stream_dial_failover."""

    def __str__(self) -> str:
        shape = "stream" if self.streaming else "unary"
        more = " tls" if self.tls else ""
        more += " stream_dial_failover" if self.dial_failover else ""
        down = "" if self.downstream == JSONRPC else f" from {self.downstream}"
        return f"{self.fault.binding}: {self.fault} / {self.layout} {shape}{more}{down}"


# --- the daemon -------------------------------------------------------------------------------


@contextmanager
def _names_known() -> Iterator[None]:
    """No name below ``.test`` exists, whatever the resolver of the machine does with them."""
    really = socket.getaddrinfo

    def lookup(host: Any, *args: Any, **more: Any) -> Any:
        if host == "two-addresses.test":
            return [found for one in _TWO_ADDRESSES for found in really(one, *args, **more)]
        if str(host).endswith(".test"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(host, *args, **more)

    socket.getaddrinfo = lookup
    try:
        yield
    finally:
        socket.getaddrinfo = really


@asynccontextmanager
async def running(
    directory: Path, agents: Mapping[str, Mapping[str, Any]], extra: str = "", *, wait: bool = True
) -> AsyncIterator[Daemon]:
    """A daemon with three listeners; with `wait`, all agents have their cards."""
    lines = []
    for binding in LABELS:
        lines += ["[[listeners]]", 'address = "127.0.0.1:0"', f"binding = {toml(binding)}"]
    lines += ["[admin]", 'address = "127.0.0.1:0"', "[log]", 'level = "error"']
    for name, keys in agents.items():
        lines.append(f"[agents.{name}]")
        lines += [f"{key} = {toml(value)}" for key, value in keys.items()]
    file = directory / f"config-{next(_numbers)}.toml"
    file.write_text("\n".join([*lines, extra, ""]), "utf-8")
    daemon = Daemon(config.load(file))
    on_hangup = signal.getsignal(signal.SIGHUP)
    try:
        async with trio.open_nursery() as nursery:
            with _names_known():
                nursery.start_soon(daemon.run)
                with trio.fail_after(SECONDS):
                    while not _is_up(daemon, wait=wait):  # noqa: ASYNC110 - no event tells
                        await trio.sleep(0.005)
                yield daemon
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGHUP, on_hangup)


def _is_up(daemon: Daemon, *, wait: bool) -> bool:
    status = daemon.status()
    if len(status["listeners"]) < len(LABELS):
        return False
    return not wait or all(agent.generation for agent in daemon_agents(daemon).values())


def daemon_agents(daemon: Daemon) -> Mapping[str, Agent]:
    """The agents of a daemon, by name."""
    return daemon._roster.agents


def address(daemon: Daemon, binding: str) -> str:
    """Where the listener of a binding is."""
    places = daemon.status()["listeners"]
    return str(next(place["address"] for place in places if place["binding"] == binding))


Samples = dict[str, dict[tuple[str, ...], float]]
"""Metric → label values, in order → value."""


def samples(daemon: Daemon) -> dict[str, Samples]:
    """What is counted of each agent."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(daemon._telemetry.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            agent = labels.pop("agent", "")
            name = sample.name.removeprefix("a2a_sidecar_")
            found.setdefault(agent, {}).setdefault(name, {})[tuple(labels.values())] = sample.value
    return found


def counted(before: Samples, after: Samples, name: str) -> dict[tuple[str, ...], int]:
    """What was added to a counter, without zeroes."""
    old = before.get(name, {})
    added = {key: int(v - old.get(key, 0)) for key, v in after.get(name, {}).items()}
    return {key: value for key, value in added.items() if value}


def busy(daemon: Daemon) -> list[str]:
    """What has not come back to where it was."""
    found = []
    if daemon._budget.taken:
        found.append(f"{daemon._budget.taken} bytes of the budget")
    for name, agent in daemon_agents(daemon).items():
        if agent.in_flight or agent.streams:
            found.append(f"{name}: {agent.in_flight} unary, {agent.streams} streams")
        for pool in agent._connections._pools.values():
            found += [f"{name}: {what}" for what in _busy_pool(pool)]
    return found


def _busy_pool(pool: Http1Pool | Http2Pool) -> list[str]:
    if isinstance(pool, Http1Pool):
        http1 = pool.statistics()
        return [str(http1)] if http1.busy or pool._waiters else []
    http2 = pool.statistics()
    # a dial belongs to the pool, and goes on when those who waited for it have left
    return [str(http2)] if http2.streams or http2.waiting else []


async def at_rest(daemon: Daemon, seconds: float = 3) -> list[str]:
    """Wait until nothing is busy; what still is after `seconds`."""
    deadline = trio.current_time() + seconds
    while (found := busy(daemon)) and trio.current_time() < deadline:  # noqa: ASYNC110
        await trio.sleep(0.01)
    return found


# --- cells ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Placed:
    """A cell with its agent and the agent's ports."""

    cell: Cell
    name: str
    ports: list[str] = field(default_factory=list)
    specs: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""
    told: Told | None = None
    selection: int = 0
    moves: int = 0
    asked: bool = False
    before: Samples = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        fault = self.cell.fault
        good = GOOD[fault.binding]
        return [
            f"{n}-{LABELS[fault.binding if what == 'F' else good]}"
            for n, what in enumerate(self.cell.layout)
        ]


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """TLS of the servers by name, what the daemon trusts, and its own certificate."""

    authority: str
    client: tuple[str, str]
    servers: dict[str, dict[str, str]]

    def server(self, name: str, binding: str) -> dict[str, str] | None:
        """The TLS of a peer; None for ''."""
        if not name:
            return None
        return {"alpn": "h2" if binding == GRPC else "http/1.1", **self.servers[name]}


async def run_cells(
    cells: Iterable[Cell], peer: Peer, certificates: Certificates, directory: Path
) -> list[str]:
    """What is wrong in any of the cells, a line each."""
    placed = [_place(cell, certificates) for cell in cells]
    specs = [spec for one in placed for spec in one.specs]
    ports = await peer.control("open", specs)
    names = [spec["name"] for spec in specs]
    where = dict(zip(names, ports, strict=True))
    try:
        await peer.control("script", dict(_scripts(placed, where)))
        agents = {one.name: _agent(one, where, certificates, directory) for one in placed}
        async with running(directory, agents) as daemon:
            await _warm_up(daemon, placed)
            async with trio.open_nursery() as nursery:
                for one in placed:
                    nursery.start_soon(_call, daemon, one)
            left = await at_rest(daemon)
            after = samples(daemon)
            internal = after.get("", {}).get("internal_errors_total", {})
            wrong = [f"not at rest: {what}" for what in left]
            wrong += [f"internal error: {key}" for key, value in internal.items() if value]
    finally:
        closed = await peer.control("close", names)
    for one in placed:
        wrong += [f"{one.cell}: {what}" for what in _judge(one, after[one.name], closed)]
    return wrong


def _place(cell: Cell, certificates: Certificates) -> _Placed:
    fault = cell.fault
    name = f"c{next(_numbers)}"
    one = _Placed(cell, name, message=f"message-{name}")
    default = "good" if cell.tls else ""
    for n, what in enumerate(cell.layout):
        binding = fault.binding if what == "F" else GOOD[fault.binding]
        spec: dict[str, Any] = {"name": f"{name}-{n}"}
        if what == "F":
            tls = default if fault.tls is None else fault.tls
            spec |= {"speaks": fault.agent, "options": fault.options}
        else:
            tls = default
            spec["speaks"] = "http"
        if spec["speaks"] in ("http", "grpc", "alert"):
            spec["tls"] = certificates.server(tls, binding)
        one.ports.append(spec["name"])
        one.specs.append(spec)
    return one


def _scripts(placed: list[_Placed], where: dict[str, int]) -> Iterable[tuple[str, Any]]:
    for one in placed:
        entries = json.dumps(one.cell.fault.entries(streaming=one.cell.streaming))
        for port, what in zip(one.ports, one.cell.layout, strict=True):
            if what == "F" and entries != "[]":
                others = [where[name] for name in one.ports if name != port]
                text = entries.replace("{self}", f"127.0.0.1:{where[port]}")
                text = text.replace("{other}", f"127.0.0.1:{others[-1] if others else 9}")
                yield port, json.loads(text)


def _agent(
    one: _Placed, where: dict[str, int], certificates: Certificates, directory: Path
) -> dict[str, Any]:
    cell, fault = one.cell, one.cell.fault
    interfaces = []
    for name, what in zip(one.ports, cell.layout, strict=True):
        binding, host, tls = fault.binding, fault.host.format(name=name), cell.tls
        if what == "G":
            binding, host = GOOD[fault.binding], "127.0.0.1"
        elif fault.client_tls is not None:
            tls = fault.client_tls
        scheme = "https" if tls else "http"
        interfaces.append((binding, f"{scheme}://{host}:{where[name]}{PATHS[binding]}"))
    file = directory / f"{one.name}.json"
    file.write_text(json.dumps(card(interfaces)), "utf-8")
    keys: dict[str, Any] = {
        "card": file,
        # a refresh that is asked for stays to be seen
        "refresh_cooldown_seconds": 600.0,
        "stream_dial_failover": cell.dial_failover,
    }
    if fault.connect_timeout is not None:
        keys["connect_timeout_seconds"] = fault.connect_timeout
    if fault.timeout is not None:
        keys["response_timeout_seconds"] = fault.timeout
        keys["stream_open_timeout_seconds"] = fault.timeout
    if cell.tls or fault.client_tls:
        tls_keys: dict[str, Any] = {"ca_file": certificates.authority}
        if fault.client_certificate:
            tls_keys["client_cert_file"], tls_keys["client_key_file"] = certificates.client
            keys["trusted_hosts"] = ["127.0.0.1"]
        keys["tls"] = tls_keys
    return keys


async def _warm_up(daemon: Daemon, placed: list[_Placed]) -> None:
    """A call on the connections that are to be reused."""

    async def warm(one: _Placed) -> None:
        told = await call(address(daemon, JSONRPC), JSONRPC, one.name, f"warm-{one.name}")
        assert not told.failed, (str(one.cell), told)

    reused = [one for one in placed if one.cell.fault.reused]
    async with trio.open_nursery() as nursery:
        for one in reused:
            nursery.start_soon(warm, one)
    if reused:
        before = samples(daemon)
        for one in reused:
            one.before = before[one.name]


async def _call(daemon: Daemon, one: _Placed) -> None:
    cell = one.cell
    agent: Agent = daemon_agents(daemon)[one.name]
    with trio.move_on_after(SECONDS):
        one.told = await call(
            address(daemon, cell.downstream),
            cell.downstream,
            one.name,
            one.message,
            streaming=cell.streaming,
            size=cell.fault.body_bytes,
        )
    generation = agent.generation
    assert generation is not None
    one.selection, one.moves = generation.selection.current, generation.selection.moves
    one.asked = agent._wanted


# --- the judgement ----------------------------------------------------------------------------


def _judge(one: _Placed, after: Samples, closed: dict[str, Any]) -> list[str]:
    """What differs from the table; where two endings may come, from the nearer one."""
    executions = [
        closed["agents"][name].get("by_message", {}).get(one.message, 0) for name in one.ports
    ]
    arrivals = Counter(name for name, _ in closed["arrivals"])
    seen = [arrivals[name] for name in one.ports]
    order = [name for name, _ in closed["arrivals"] if name in one.ports]
    if one.told is None:
        return ["the call never ended"]
    wrong = _promise(one, executions, order)
    ends = one.cell.fault.ends(streaming=one.cell.streaming)
    verdicts = [_Verdict(one, ending, after, executions, seen).wrong() for ending in ends]
    return wrong + min(verdicts, key=len)


def _promise(one: _Placed, executions: list[int], order: list[str]) -> list[str]:
    """What holds for every fault."""
    wrong = []
    told = one.told
    assert told is not None
    # a script may run the message twice itself: then once is twice
    most = max([1, *(end.executed for end in one.cell.fault.ends(streaming=one.cell.streaming))])
    ran = sum(executions)
    if ran > most:
        wrong.append(f"executions {executions}")
    if told.delivered == "no" and ran:
        wrong.append(f"delivered=no, executions {executions}")
    if order != sorted(order):
        wrong.append(f"order of attempts: {order}")
    return wrong


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One cell against one ending."""

    one: _Placed
    ending: Ending
    after: Samples
    executions: list[int]
    seen: list[int]

    @property
    def _moves_on(self) -> bool:
        """Whether the call goes on with the next candidate."""
        cell = self.one.cell
        if not self.ending.row.next_candidate:
            return False
        if not cell.streaming:
            return True
        return cell.dial_failover and self.ending.kind == "not_delivered"

    def wrong(self) -> list[str]:
        """What differs."""
        cell, told, ending = self.one.cell, self.one.told, self.ending
        assert told is not None
        faulty, count = cell.layout.count("F"), len(cell.layout)
        attempts = count if self._moves_on else 1
        well = (self._moves_on and "G" in cell.layout) or (
            ending.kind == "answered" and not ending.error
        )
        wrong: list[str] = []

        def same(what: str, found: object, expected: object) -> None:
            if found != expected:
                wrong.append(f"{what}: {found}, expected {expected}")

        executed = [ending.executed if n < min(attempts, faulty) else 0 for n in range(count)]
        if attempts > faulty:
            executed[-1] = 1
        same("executions", self.executions, executed)
        failed = min(attempts, faulty)
        labels = self.one.labels
        results = {(labels[n], ending.result): 1 for n in range(failed)}
        if attempts > failed:
            results[labels[-1], "ok"] = 1
        same("attempts_total", self._counted("attempts_total"), results)
        failovers = {(labels[n], ending.result, labels[n + 1]): 1 for n in range(attempts - 1)}
        same("failovers_total", self._counted("failovers_total"), failovers)
        moves = failed if count > 1 and ending.row.advance and ending.advance else 0
        same("current", self.one.selection, moves % count)
        same("moves", self.one.moves, moves)
        same("selection_changes", sum(self._counted("selection_changes_total").values()), moves)
        exhausted = ending.kind == "not_delivered" and attempts == count and not well
        same("refresh", self.one.asked, ending.refresh or exhausted)
        ambiguous = {}
        if ending.kind == "ambiguous":
            operation = "SendStreamingMessage" if cell.streaming else "SendMessage"
            ambiguous = {(labels[0], operation, ending.phase): 1}
        same("ambiguous_errors", self._counted("ambiguous_errors_total"), ambiguous)
        same("redials", sum(self._counted("redials_total").values()), ending.redials * failed)
        same(
            "requests_total",
            [key[2] for key in self._counted("requests_total")],
            [self._outcome(well=well, attempts=attempts)],
        )
        same("attempts told", told.attempts, attempts)
        if cell.streaming:
            same("events", told.events, 3 if well else ending.events)
        if well:
            same("failed", told.failed, False)
        else:
            self._error(same, attempts)
        return wrong

    def _counted(self, name: str) -> dict[tuple[str, ...], int]:
        return counted(self.one.before, self.after, name)

    @property
    def _refused_by_all(self) -> bool:
        """Every candidate answered that it does not serve the call: that is the agent's answer."""
        cell = self.one.cell
        everyone = "G" not in cell.layout and (not cell.streaming or len(cell.layout) == 1)
        return self.ending.kind == "not_served" and everyone

    def _outcome(self, *, well: bool, attempts: int) -> str:
        if well:
            return "ok"
        if self.ending.kind == "answered" or self._refused_by_all:
            return "agent_error"
        if self.ending.row.next_candidate:
            return "not_delivered"
        return self.ending.row.counted

    def _error(self, same: Any, attempts: int) -> None:
        """The error that the caller was told of."""
        told, ending, down = self.one.told, self.ending, self.one.cell.downstream
        assert told is not None
        same("failed", told.failed, True)
        if ending.kind == "answered" or self._refused_by_all:
            same("delivered", told.delivered, None)
            if self._refused_by_all and down == JSONRPC:
                same("code", told.code, ending.code)
            return
        unknown = ending.kind == "ambiguous"
        reason = "DELIVERY_UNKNOWN" if unknown else "NOT_DELIVERED"
        if ending.kind == "local":
            reason = "LIMIT_REACHED"
        same("reason", told.reason, reason)
        same("domain", told.domain, "a2a-sidecar")
        same("delivered", told.delivered, "unknown" if unknown else "no")
        lines = [(label, ending.kind, ending.result) for label in self.one.labels[:attempts]]
        same("attempts in the error", told.lines, lines)
        if told.events:
            return  # an error in the stream has no status
        same("status", told.status, self._status(reason))

    def _status(self, reason: str) -> int:
        down, up = self.one.cell.downstream, self.one.cell.fault.binding
        if down == JSONRPC:
            return 200
        kept = self.ending.status
        if kept is not None and down == up:
            return kept
        statuses = {
            "NOT_DELIVERED": {HTTP_JSON: 503, GRPC: 14},
            "DELIVERY_UNKNOWN": {HTTP_JSON: 502, GRPC: 2},
            "LIMIT_REACHED": {HTTP_JSON: 503, GRPC: 8},
        }
        return statuses[reason][down]
