"""Metrics: one method per thing that happens, on a registry of its own.

Counters and histograms are told of events; gauges are read from the state of the agents when
somebody asks. Label values come from closed sets: agents by configured name, interfaces by position
and binding, never a URL or a peer's text.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sidecar.core.spec import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `Telemetry.render` gives (the Prometheus text exposition format)."""

PREFIX = "a2a_sidecar_"

OTHER = "other"

OPERATION_LABELS: frozenset[str] = frozenset({*OPERATIONS, "card", OTHER})
OUTCOMES: frozenset[str] = frozenset(
    {"ok", "agent_error", "not_delivered", "ambiguous", "cancelled", "rejected"}
)
CARD_RESULTS: frozenset[str] = frozenset({"fetched", "not_modified", "error", "rejected"})
PUBLISH_RESULTS: frozenset[str] = frozenset({"served", "not_served", "unknown", "error"})
STREAM_ENDS: frozenset[str] = frozenset(
    {"completed", "unfinished", "cancelled", "broken", "error", "stalled", "drained"}
)

# From the answer of a local agent to the default response timeout of a slow one.
_CALL_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
# Forwarding takes tenths of a millisecond; what holds the loop longer than 50 ms is a defect.
_OWN_BUCKETS = (
    5e-05,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1,
)


def operation_label(name: str) -> str:
    """`name` when it may be an operation label, else ``other``."""
    return name if name in OPERATION_LABELS else OTHER


class AgentState(Protocol):
    """What the gauges of one agent are read from, at each scrape."""

    @property
    def in_flight(self) -> int:
        """Unary calls under way."""
        ...

    @property
    def streams(self) -> int:
        """Streams under way."""
        ...

    @property
    def candidates(self) -> Sequence[str]:
        """Labels of the eligible interfaces, in order."""
        ...

    @property
    def current(self) -> str | None:
        """The label of the interface where the next call starts."""
        ...

    @property
    def ineligible(self) -> int:
        """Interfaces of the card that are not used."""
        ...

    @property
    def card_age(self) -> float | None:
        """Seconds since the card was fetched or confirmed, None without one."""
        ...

    @property
    def connections(self) -> Mapping[str, int]:
        """Open upstream connections by interface label."""
        ...


_M = TypeVar("_M", Counter, Histogram)


class _Children(dict[tuple[str, ...], _M], Generic[_M]):
    """The labelled children of one metric, looked up in prometheus-client once and kept.

    The first label is the agent's where there is one.
    """

    def __init__(self, metric: _M, gone: set[str]) -> None:
        super().__init__()
        self._metric: _M = metric
        self._gone = gone

    def __missing__(self, labels: tuple[str, ...]) -> _M:
        # A call of an agent that was removed may still be on its way out.
        used = (OTHER, *labels[1:]) if labels[0] in self._gone else labels
        child: _M = self._metric.labels(*used)
        self[labels] = child
        return child

    def forget(self, agent: str) -> None:
        """Drop every series of `agent`."""
        for labels in [labels for labels in self if labels[0] == agent]:
            del self[labels]
            self._metric.remove(*labels)


class Telemetry:
    """Every metric of the sidecar. One per process; not for use by several threads at once.

    `agent` is a configured name or ``other``, `interface` a label as ``0-jsonrpc``, `operation` one
    of `OPERATION_LABELS`. Times are seconds.
    """

    def __init__(self, version: str) -> None:
        # Creation times double the series, and no query of ours needs them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._gone: set[str] = set()
        self._by_agent: list[_Children[Counter] | _Children[Histogram]] = []
        self._states: dict[str, AgentState] = {}

        counter, histogram = self._counter, self._histogram
        self._requests = counter(
            "requests", "Calls by how they ended.", "agent", "operation", "binding", "outcome"
        )
        self._durations = histogram(
            "request_duration_seconds", "From the request to the last byte of its answer."
        )
        self._overheads = histogram(
            "overhead_seconds", "The sidecar's own part of a unary call.", _OWN_BUCKETS
        )
        self._first_events = histogram(
            "time_to_first_event_seconds", "From the request to the first event of a stream."
        )
        self._contradictions = counter(
            "card_contradictions", "Cards whose preferredTransport is not that of url.", "agent"
        )
        self._attempts = counter(
            "attempts", "Attempts by how they ended.", "agent", "interface", "result"
        )
        self._failovers = counter(
            "failovers",
            "Attempts on a next interface.",
            *("agent", "from_interface", "to_interface", "reason"),
        )
        self._ambiguous = counter(
            "ambiguous_errors",
            "Calls that failed and that the agent may have executed.",
            *("agent", "operation", "interface", "phase"),
        )
        self._changes = counter(
            "selection_changes", "Moves of the selection to an interface.", "agent", "interface"
        )
        self._redials = counter(
            "redials", "Reused connections that were replaced.", "agent", "interface"
        )
        self._card_fetches = counter("card_fetches", "Fetches of cards.", "agent", "result")
        self._card_changes = counter("card_changes", "Cards with other candidates.", "agent")
        self._stream_ends = counter("stream_ends", "Streams by how they ended.", "agent", "reason")
        self._stream_events = counter("stream_events", "Events forwarded.", "agent")

        self._publish_checks = counter(
            "publish_checks", "Checks of published cards.", "agent", "result"
        )
        self._published = Gauge(
            f"{PREFIX}publish_check_success",
            "1 while the card is served, else 0.",
            ["agent"],
            registry=self._registry,
        )

        self._limits = self._unlabelled_agent("limit_rejections", "Refused at a limit.", "limit")
        self._internal = self._unlabelled_agent("internal_errors", "Defects caught.", "where")
        self._log_dropped = Counter(
            PREFIX + "log_dropped", "Log lines dropped.", registry=self._registry
        )
        self._lag = Histogram(
            PREFIX + "event_loop_lag_seconds",
            "How late a timer of the event loop fired.",
            buckets=_OWN_BUCKETS,
            registry=self._registry,
        )
        self._reload = self._gauge(
            "config_last_reload_successful", "1 when the last configuration was taken."
        )
        self._reload.set(1)
        self._draining = self._gauge("draining", "1 while the sidecar is shutting down.")
        build = Gauge(
            f"{PREFIX}build_info", "1, with the version.", ["version"], registry=self._registry
        )
        build.labels(version).set(1)
        self._gauges = _AgentGauges(self._states)
        self._registry.register(self._gauges)

    def _counter(self, name: str, text: str, *labels: str) -> _Children[Counter]:
        metric = Counter(PREFIX + name, text, labels, registry=self._registry)
        children = _Children(metric, self._gone)
        self._by_agent.append(children)
        return children

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = _CALL_BUCKETS
    ) -> _Children[Histogram]:
        metric = Histogram(
            PREFIX + name,
            text,
            ("agent", "operation"),
            buckets=buckets,
            registry=self._registry,
        )
        children = _Children(metric, self._gone)
        self._by_agent.append(children)
        return children

    def _unlabelled_agent(self, name: str, text: str, label: str) -> _Children[Counter]:
        return _Children(Counter(PREFIX + name, text, [label], registry=self._registry), set())

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self._registry)

    # --- calls --------------------------------------------------------------------------------

    def request(
        self, agent: str, operation: str, binding: str, outcome: str, seconds: float
    ) -> None:
        """A call has ended; `binding` is the downstream one, `outcome` one of `OUTCOMES`."""
        self._requests[agent, operation, binding, outcome].inc()
        self._durations[agent, operation].observe(seconds)

    def overhead(self, agent: str, operation: str, seconds: float) -> None:
        """What a unary call took apart from waiting for the agent."""
        self._overheads[agent, operation].observe(seconds)

    def first_event(self, agent: str, operation: str, seconds: float) -> None:
        """The first event of a stream went downstream, so long after the request came."""
        self._first_events[agent, operation].observe(seconds)

    def attempt(self, agent: str, interface: str, result: str) -> None:
        """An attempt has ended; `result` is the finer name of its kind."""
        self._attempts[agent, interface, result].inc()

    def failover(self, agent: str, from_: str, to: str, reason: str) -> None:
        """The attempt on the interface `to` starts, after `reason` on `from_`."""
        self._failovers[agent, from_, to, reason].inc()

    def ambiguous(self, agent: str, operation: str, interface: str, phase: str) -> None:
        """A call failed that the agent may have executed, in `phase` of its attempt."""
        self._ambiguous[agent, operation, interface, phase].inc()

    def selection_change(self, agent: str, interface: str) -> None:
        """Later calls of the agent start at `interface`."""
        self._changes[agent, interface].inc()

    def redial(self, agent: str, interface: str) -> None:
        """A reused connection turned out to be leaving and was replaced within an attempt."""
        self._redials[agent, interface].inc()

    # --- streams ------------------------------------------------------------------------------

    def stream_event(self, agent: str) -> None:
        """An event went downstream."""
        self._stream_events[agent,].inc()

    def stream_end(self, agent: str, reason: str) -> None:
        """A stream has ended; `reason` is one of `STREAM_ENDS`."""
        self._stream_ends[agent, reason].inc()

    # --- cards --------------------------------------------------------------------------------

    def card_fetch(self, agent: str, result: str) -> None:
        """A fetch of the card has ended; `result` is one of `CARD_RESULTS`."""
        self._card_fetches[agent, result].inc()

    def card_change(self, agent: str) -> None:
        """A card with other candidates has replaced the last one."""
        self._card_changes[agent,].inc()

    def card_contradiction(self, agent: str) -> None:
        """A card contradicts itself on the binding of its url."""
        self._contradictions[agent,].inc()

    def publish_check(self, agent: str, result: str) -> None:
        """A check of a published card has ended; `result` is one of `PUBLISH_RESULTS`."""
        self._publish_checks[agent, result].inc()
        self._published.labels(agent).set(result == "served")

    # --- the process --------------------------------------------------------------------------

    def limit(self, limit: str) -> None:
        """A request was refused; `limit` is the configuration key of the bound."""
        self._limits[limit,].inc()

    def internal_error(self, where: str) -> None:
        """An exception was caught that nothing should raise; `where` is a module's name."""
        self._internal[where,].inc()

    def loop_lag(self, seconds: float) -> None:
        """A timer of the event loop fired so much late."""
        self._lag.observe(seconds)

    def log_dropped(self, count: int) -> None:
        """Log lines were dropped. From any thread."""
        self._log_dropped.inc(count)

    def reloaded(self, *, successful: bool) -> None:
        """A new configuration was taken, or refused."""
        self._reload.set(successful)

    def draining(self) -> None:
        """The process has begun to shut down."""
        self._draining.set(1)

    # --- agents and scrapes -------------------------------------------------------------------

    def watch(self, agent: str, state: AgentState) -> None:
        """Read the gauges of `agent` from `state`, in place of an earlier state."""
        if agent in self._gone:
            self._gone.discard(agent)
            # Children that were looked up in the meantime count as `other`.
            for children in self._by_agent:
                for labels in [labels for labels in children if labels[0] == agent]:
                    del children[labels]
        self._states[agent] = state

    def unwatch(self, agent: str) -> None:
        """Remove every series of `agent`; what its last calls still report counts as ``other``."""
        if agent in self._gone:
            return
        self._states.pop(agent, None)
        self._gone.add(agent)
        for children in self._by_agent:
            children.forget(agent)
        with contextlib.suppress(KeyError):
            self._published.remove(agent)

    def render(self) -> bytes:
        """Everything in the text exposition format, `CONTENT_TYPE`."""
        self.read_gauges()
        return self.format()

    def read_gauges(self) -> None:
        """Take the state of the agents down for the next `format`."""
        self._gauges.read()

    def format(self) -> bytes:
        """What `render` gives, with the gauges as last read. From any thread."""
        return prometheus_client.generate_latest(self._registry)


class _AgentGauges(Collector):
    """Gauges computed at each scrape, so that none outlives what it tells of."""

    def __init__(self, states: Mapping[str, AgentState]) -> None:
        self._states = states
        self._families: list[GaugeMetricFamily] = []

    def collect(self) -> Iterator[Metric]:
        """What was read."""
        return iter(self._families)

    def read(self) -> None:
        """Make all families, also those without a sample."""
        by_agent = ["agent"]
        by_interface = ["agent", "interface"]
        in_flight = _family("requests_in_flight", "Unary calls under way.", by_agent)
        streams = _family("streams_active", "Streams under way.", by_agent)
        candidates = _family("candidates", "Eligible interfaces.", by_agent)
        ineligible = _family("ineligible_interfaces", "Interfaces not used.", by_agent)
        age = _family("card_age_seconds", "Since the card was fetched or confirmed.", by_agent)
        current = _family("current_interface", "1 where calls start, else 0.", by_interface)
        connections = _family("upstream_connections", "Open connections.", by_interface)
        for agent, state in list(self._states.items()):
            labels = list(state.candidates)
            in_flight.add_metric([agent], state.in_flight)
            streams.add_metric([agent], state.streams)
            candidates.add_metric([agent], len(labels))
            ineligible.add_metric([agent], state.ineligible)
            if (seconds := state.card_age) is not None:
                age.add_metric([agent], seconds)
            # Interfaces far down a card share the label `other`.
            for label in dict.fromkeys(labels):
                current.add_metric([agent, label], float(label == state.current))
            for label, count in state.connections.items():
                connections.add_metric([agent, label], count)
        self._families = [in_flight, streams, candidates, ineligible, age, current, connections]

    def describe(self) -> Iterator[Metric]:
        """The same without agents, for the registry's check of names."""
        empty = _AgentGauges({})
        empty.read()
        return empty.collect()


def _family(name: str, text: str, labels: Sequence[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)
