"""Metrics: what each event adds, what a scrape says, and what goes with an agent."""

import ast
import inspect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.core.spec import OPERATIONS
from sidecar.telemetry import (
    CONTENT_TYPE,
    OPERATION_LABELS,
    Telemetry,
    operation_label,
)


@dataclass
class State:
    """An agent as the gauges see it."""

    in_flight: int = 0
    streams: int = 0
    candidates: list[str] = field(default_factory=list)
    current: str | None = None
    ineligible: int = 0
    card_age: float | None = None
    connections: dict[str, int] = field(default_factory=dict)


def samples(telemetry):
    """Every sample of a scrape: (name, labels without the agent's prefix) -> value."""
    found = {}
    for family in text_string_to_metric_families(telemetry.render().decode()):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(telemetry, name, **labels):
    """The value of one series, None when it is not there."""
    return samples(telemetry).get((f"a2a_sidecar_{name}", *sorted(labels.items())))


EVENTS = [
    (
        lambda t: t.request("w", "GetTask", "jsonrpc", "ok", 0.02),
        "requests_total",
        {"agent": "w", "operation": "GetTask", "binding": "jsonrpc", "outcome": "ok"},
    ),
    (
        lambda t: t.attempt("w", "0-jsonrpc", "http_404"),
        "attempts_total",
        {"agent": "w", "interface": "0-jsonrpc", "result": "http_404"},
    ),
    (
        lambda t: t.failover("w", "2-grpc", "0-jsonrpc", "dial"),
        "failovers_total",
        {
            "agent": "w",
            "from_interface": "2-grpc",
            "to_interface": "0-jsonrpc",
            "reason": "dial",
        },
    ),
    (
        lambda t: t.ambiguous("w", "SendMessage", "2-grpc", "waiting"),
        "ambiguous_errors_total",
        {"agent": "w", "operation": "SendMessage", "interface": "2-grpc", "phase": "waiting"},
    ),
    (
        lambda t: t.selection_change("w", "0-jsonrpc"),
        "selection_changes_total",
        {"agent": "w", "interface": "0-jsonrpc"},
    ),
    (
        lambda t: t.redial("w", "0-jsonrpc"),
        "redials_total",
        {"agent": "w", "interface": "0-jsonrpc"},
    ),
    (
        lambda t: t.card_fetch("w", "not_modified"),
        "card_fetches_total",
        {"agent": "w", "result": "not_modified"},
    ),
    (
        lambda t: t.publish_check("w", "not_served"),
        "publish_checks_total",
        {"agent": "w", "result": "not_served"},
    ),
    (lambda t: t.card_change("w"), "card_changes_total", {"agent": "w"}),
    (lambda t: t.card_contradiction("w"), "card_contradictions_total", {"agent": "w"}),
    (
        lambda t: t.stream_end("w", "unfinished"),
        "stream_ends_total",
        {"agent": "w", "reason": "unfinished"},
    ),
    (lambda t: t.stream_event("w"), "stream_events_total", {"agent": "w"}),
    (
        lambda t: t.request("w", "GetTask", "jsonrpc", "ok", 0.02),
        "request_duration_seconds_count",
        {"agent": "w", "operation": "GetTask"},
    ),
    (
        lambda t: t.overhead("w", "GetTask", 0.0002),
        "overhead_seconds_count",
        {"agent": "w", "operation": "GetTask"},
    ),
    (
        lambda t: t.first_event("w", "SendStreamingMessage", 0.5),
        "time_to_first_event_seconds_count",
        {"agent": "w", "operation": "SendStreamingMessage"},
    ),
    (lambda t: t.limit("max_streams"), "limit_rejections_total", {"limit": "max_streams"}),
    (lambda t: t.internal_error("forwarder"), "internal_errors_total", {"where": "forwarder"}),
    (lambda t: t.log_dropped(1), "log_dropped_total", {}),
    (lambda t: t.loop_lag(0.01), "event_loop_lag_seconds_count", {}),
]


@pytest.mark.parametrize(("event", "name", "labels"), EVENTS, ids=[row[1] for row in EVENTS])
def test_an_event_adds_one(event, name, labels):
    telemetry = Telemetry("1.2.3")
    assert value(telemetry, name, **labels) in {None, 0}
    event(telemetry)
    assert value(telemetry, name, **labels) == 1
    event(telemetry)
    assert value(telemetry, name, **labels) == 2


def test_every_event_has_its_row():
    methods = {
        name
        for name, _ in inspect.getmembers(Telemetry, inspect.isfunction)
        if not name.startswith("_")
    }
    others = {"watch", "unwatch", "render", "read_gauges", "format", "reloaded", "draining"}
    lines = Path(__file__).read_text("utf-8")
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(lines))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert methods - others <= called


def test_a_published_card_is_a_gauge():
    telemetry = Telemetry("1")
    for result, expected in [("served", 1), ("unknown", 0), ("served", 1), ("error", 0)]:
        telemetry.publish_check("w", result)
        assert value(telemetry, "publish_check_success", agent="w") == expected


def test_times_fall_into_buckets_from_a_millisecond_to_ten_minutes():
    telemetry = Telemetry("1")
    for seconds in (0.0009, 0.5, 599, 601):
        telemetry.request("w", "GetTask", "grpc", "ok", seconds)
    labels = {"agent": "w", "operation": "GetTask"}
    assert value(telemetry, "request_duration_seconds_bucket", le="0.001", **labels) == 1
    assert value(telemetry, "request_duration_seconds_bucket", le="1.0", **labels) == 2
    assert value(telemetry, "request_duration_seconds_bucket", le="600.0", **labels) == 3
    assert value(telemetry, "request_duration_seconds_bucket", le="+Inf", **labels) == 4
    assert value(telemetry, "request_duration_seconds_sum", **labels) == pytest.approx(1200.5009)


def test_own_time_falls_into_buckets_from_fifty_microseconds_to_a_second():
    telemetry = Telemetry("1")
    for seconds in (0.00004, 0.9, 1.1):
        telemetry.overhead("w", "GetTask", seconds)
    labels = {"agent": "w", "operation": "GetTask"}
    assert value(telemetry, "overhead_seconds_bucket", le="5e-05", **labels) == 1
    assert value(telemetry, "overhead_seconds_bucket", le="1.0", **labels) == 2


def test_the_process():
    telemetry = Telemetry("1.2.3")
    assert value(telemetry, "build_info", version="1.2.3") == 1
    assert value(telemetry, "config_last_reload_successful") == 1
    assert value(telemetry, "draining") == 0
    assert value(telemetry, "log_dropped_total") == 0
    telemetry.reloaded(successful=False)
    telemetry.draining()
    telemetry.log_dropped(7)
    assert value(telemetry, "config_last_reload_successful") == 0
    assert value(telemetry, "draining") == 1
    assert value(telemetry, "log_dropped_total") == 7
    telemetry.reloaded(successful=True)
    assert value(telemetry, "config_last_reload_successful") == 1


def test_gauges_are_read_at_each_scrape():
    telemetry = Telemetry("1")
    state = State(
        in_flight=3,
        streams=2,
        candidates=["2-grpc", "0-jsonrpc", "other", "other"],
        current="0-jsonrpc",
        ineligible=1,
        card_age=12.5,
        connections={"2-grpc": 1, "0-jsonrpc": 4},
    )
    telemetry.watch("w", state)
    assert value(telemetry, "requests_in_flight", agent="w") == 3
    assert value(telemetry, "streams_active", agent="w") == 2
    assert value(telemetry, "candidates", agent="w") == 4
    assert value(telemetry, "ineligible_interfaces", agent="w") == 1
    assert value(telemetry, "card_age_seconds", agent="w") == 12.5
    assert value(telemetry, "current_interface", agent="w", interface="2-grpc") == 0
    assert value(telemetry, "current_interface", agent="w", interface="0-jsonrpc") == 1
    assert value(telemetry, "current_interface", agent="w", interface="other") == 0
    assert value(telemetry, "upstream_connections", agent="w", interface="0-jsonrpc") == 4

    state.candidates, state.current, state.connections = ["1-http_json"], "1-http_json", {}
    state.card_age = None
    assert value(telemetry, "card_age_seconds", agent="w") is None
    assert value(telemetry, "current_interface", agent="w", interface="1-http_json") == 1
    assert value(telemetry, "current_interface", agent="w", interface="2-grpc") is None
    assert value(telemetry, "upstream_connections", agent="w", interface="0-jsonrpc") is None


def test_a_new_state_takes_the_place_of_the_old():
    telemetry = Telemetry("1")
    telemetry.watch("w", State(in_flight=1))
    telemetry.attempt("w", "0-jsonrpc", "ok")
    telemetry.watch("w", State(in_flight=5))
    assert value(telemetry, "requests_in_flight", agent="w") == 5
    assert value(telemetry, "attempts_total", agent="w", interface="0-jsonrpc", result="ok") == 1


def agents(telemetry):
    """How many series each agent has."""
    return Counter(dict(key[1:]).get("agent") for key in samples(telemetry))


def test_every_series_of_an_agent_goes_with_it():
    telemetry = Telemetry("1")
    telemetry.watch("w", State(candidates=["0-jsonrpc"], connections={"0-jsonrpc": 1}, card_age=1))
    telemetry.watch("x", State())
    for event, _, _ in EVENTS:
        event(telemetry)
    telemetry.attempt("x", "0-jsonrpc", "ok")
    before = agents(telemetry)
    assert before["w"] > 20
    telemetry.unwatch("w")
    after = agents(telemetry)
    assert after["w"] == after["other"] == 0
    assert (after["x"], after[None]) == (before["x"], before[None])


def test_late_reports_of_a_removed_agent_do_not_bring_it_back():
    telemetry = Telemetry("1")
    telemetry.watch("w", State())
    telemetry.attempt("w", "0-jsonrpc", "ok")
    telemetry.unwatch("w")
    telemetry.unwatch("w")
    telemetry.attempt("w", "0-jsonrpc", "ok")
    telemetry.attempt("w", "0-jsonrpc", "reset")
    labels = {"interface": "0-jsonrpc", "result": "ok"}
    assert agents(telemetry)["w"] == 0
    assert value(telemetry, "attempts_total", agent="other", **labels) == 1

    telemetry.watch("w", State())
    telemetry.attempt("w", "0-jsonrpc", "ok")
    assert value(telemetry, "attempts_total", agent="w", **labels) == 1
    assert value(telemetry, "attempts_total", agent="other", **labels) == 1


NAMES = {
    "requests_total",
    "request_duration_seconds",
    "overhead_seconds",
    "time_to_first_event_seconds",
    "requests_in_flight",
    "streams_active",
    "candidates",
    "ineligible_interfaces",
    "card_age_seconds",
    "card_contradictions_total",
    "attempts_total",
    "failovers_total",
    "ambiguous_errors_total",
    "selection_changes_total",
    "current_interface",
    "redials_total",
    "upstream_connections",
    "card_fetches_total",
    "stream_ends_total",
    "stream_events_total",
    "card_changes_total",
    "publish_checks_total",
    "publish_check_success",
    "limit_rejections_total",
    "internal_errors_total",
    "build_info",
    "event_loop_lag_seconds",
    "log_dropped_total",
    "config_last_reload_successful",
    "draining",
}


def test_the_exposition_has_every_metric_once_with_type_and_help():
    telemetry = Telemetry("1")
    telemetry.watch("w", State())
    for event, _, _ in EVENTS:
        event(telemetry)
    text = telemetry.render().decode()
    assert text.endswith("\n")
    families = list(text_string_to_metric_families(text))
    # The parser gives counters without their suffix.
    names = Counter(
        family.name.removeprefix("a2a_sidecar_") + ("_total" if family.type == "counter" else "")
        for family in families
    )
    assert names == dict.fromkeys(NAMES, 1)
    for family in families:
        assert family.name.startswith("a2a_sidecar_")
        assert family.documentation
        assert family.type in {"counter", "gauge", "histogram"}
        assert not any(sample.name.endswith("_created") for sample in family.samples)
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def test_two_have_nothing_in_common():
    one, other = Telemetry("1"), Telemetry("1")
    one.limit("connections")
    assert value(one, "limit_rejections_total", limit="connections") == 1
    assert value(other, "limit_rejections_total", limit="connections") is None


def test_operation_labels_are_a_closed_set():
    assert {*OPERATIONS, "card", "other"} == OPERATION_LABELS
    assert len(OPERATION_LABELS) == 13
    assert operation_label("SendMessage") == "SendMessage"
    assert operation_label("card") == "card"
    assert operation_label("message/send") == "other"
