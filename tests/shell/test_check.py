"""The rules of the publish-time check: what a card declares, and what an ending of a probe says."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

import sidecar
from sidecar.card_check import CardReport, Row, Verdict
from sidecar.check import (
    AgentCardBindingError,
    BindingProbeError,
    Declared,
    declared_interfaces,
    probe_bindings,
    validate_card_against_bindings,
)
from sidecar.check_card import as_data, as_junit, as_table
from sidecar.core.errors import standard
from sidecar.core.interface_url import read_url
from sidecar.core.spec import (
    ERROR_BY_REASON,
    GET_EXTENDED_CARD,
    GET_TASK,
    METHOD_NOT_FOUND,
    SUBSCRIBE_TO_TASK,
    TASK_NOT_FOUND,
    VERSION_NOT_SUPPORTED,
    Binding,
    Version,
)
from sidecar.core.types import Break, Broken, Facts, Interface, Phase
from sidecar.probe import Finding, Level, Step, judge, judge_promise, judge_wrong_version
from sidecar.upstream import Ended
from tests.harness import card, free_port, legacy_card

X, Y = "http://127.0.0.1:8443", "http://127.0.0.1:9443"
LYING = legacy_card(url=X, preferred="grpc", additional=[("JSONRPC", X), ("GRPC", Y)])


# --- what a card declares -----------------------------------------------------------------------


def triples(content):
    return [(one.where, one.transport, one.url) for one in declared_interfaces(content)]


def test_a_legacy_card_declares_its_hint_at_its_url():
    assert triples(LYING) == [
        ("url", "GRPC", X),
        ("additionalInterfaces[0]", "JSONRPC", X),
        ("additionalInterfaces[1]", "GRPC", Y),
    ]


def test_an_absent_hint_is_jsonrpc():
    assert triples(legacy_card(url=X)) == [("url", "JSONRPC", X)]


def test_a_1_0_card_declares_its_list():
    content = card([("JSONRPC", X), ("http+json", Y)])
    assert triples(content) == [
        ("supportedInterfaces[0]", "JSONRPC", X),
        ("supportedInterfaces[1]", "HTTP+JSON", Y),
    ]


def test_a_card_with_both_forms_declares_all_of_it():
    content = {**legacy_card(url=X), **card([("GRPC", Y)])}
    assert [one[0] for one in triples(content)] == ["url", "supportedInterfaces[0]"]


def test_versions_and_tenants():
    content = card([{"url": X, "protocolBinding": "GRPC", "tenant": "t", "protocolVersion": "1.0"}])
    (one,) = declared_interfaces(content)
    assert (one.tenant, one.version) == ("t", "1.0")
    (one,) = declared_interfaces(legacy_card(url=X, protocol_version="0.3.0"))
    assert one.version == "0.3.0"


@pytest.mark.parametrize(
    "odd", [{"supportedInterfaces": None}, {"supportedInterfaces": 7}, {"additionalInterfaces": {}}]
)
def test_odd_members_declare_nothing(odd):
    assert declared_interfaces(odd) == []


def test_odd_entries_are_declarations_that_cannot_be_served():
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings({"supportedInterfaces": [None, {"url": X}]}, {})
    assert caught.value.problems == (
        "supportedInterfaces[0] has no url",
        "supportedInterfaces[1] has no transport",
    )


# --- validate_card_against_bindings -------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "listening"),
    [
        (card([("JSONRPC", X)]), {X: {"JSONRPC"}}),
        (card([("JSONRPC", X)]), {X + "/": ["JSONRPC", "HTTP+JSON"]}),
        (card([("JSONRPC", "HTTP://LOCALHOST:80/rpc")]), {"http://localhost/rpc": {"jsonrpc"}}),
        (legacy_card(url=X), {X: {"JSONRPC"}}),
        (
            legacy_card(url=Y, preferred="GRPC", additional=[("JSONRPC", X)]),
            {X: {"JSONRPC"}, Y: {"GRPC"}},
        ),
        (card([("GRPC", "127.0.0.1:7")]), {"127.0.0.1:7": "GRPC"}),
    ],
)
def test_cards_that_are_backed(content, listening):
    validate_card_against_bindings(content, listening)


def test_names_may_be_members_of_an_enum():
    class Transport(str, enum.Enum):  # noqa: UP042 - as older libraries have it
        jsonrpc = "JSONRPC"

    validate_card_against_bindings(card([("JSONRPC", X)]), {X: {Transport.jsonrpc}})


def test_the_error_names_what_a_reader_needs():
    content = legacy_card(url=X, preferred="GRPC")
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings(content, {X: {"JSONRPC", "HTTP+JSON"}})
    assert str(caught.value) == (
        f"preferredTransport says GRPC, which is not served at the card's url {X}, which serves:"
        f" HTTP+JSON, JSONRPC (preferredTransport: GRPC; url: {X})"
    )
    assert isinstance(caught.value, RuntimeError)


def test_nothing_served_is_none():
    with pytest.raises(AgentCardBindingError, match=f"declares GRPC at {Y}, which serves: none"):
        validate_card_against_bindings(card([("GRPC", Y)]), {X: {"GRPC"}})


def test_a_hint_that_is_served_at_another_entry_misleads_and_names_that_entry():
    listening = {X: {"JSONRPC"}, Y: {"GRPC"}}
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings(LYING, listening)
    (problem,) = caught.value.problems
    assert problem.endswith(f"GRPC is served at additionalInterfaces[1] ({Y}) only")


def test_every_problem_is_told():
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings(LYING, {})
    assert len(caught.value.problems) == 3


def test_a_card_that_declares_nothing():
    with pytest.raises(AgentCardBindingError, match="declares no interface"):
        validate_card_against_bindings({"name": "x"}, {})


def test_urls_are_shown_without_secrets():
    url = "http://user:hunter2@127.0.0.1:1/?key=hunter3"
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings(legacy_card(url=url), {})
    assert "hunter" not in str(caught.value)


# --- the import, beside another A2A library -----------------------------------------------------


def test_the_package_re_exports_it():
    assert sidecar.probe_bindings is probe_bindings
    assert sidecar.AgentCardBindingError is AgentCardBindingError
    with pytest.raises(AttributeError):
        _ = sidecar.nothing_like_it


def test_importing_it_loads_neither_protobuf_nor_a_runtime():
    code = (
        "import sys; from sidecar import probe_bindings, validate_card_against_bindings\n"
        "print([m for m in ('google.protobuf', 'sidecar._pb', 'trio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


def test_probes_of_ports_where_nothing_listens():
    url = f"http://127.0.0.1:{free_port()}/rpc"
    assert probe_bindings(card([("JSONRPC", url)])) == {url: frozenset()}


def test_probes_that_cannot_run():
    with pytest.raises(BindingProbeError, match="not an address"):
        probe_bindings(card([("JSONRPC", X)]), addresses={"nowhere": X})


def test_a_binding_that_is_not_known_is_undecided():
    with pytest.raises(BindingProbeError, match="SLIMRPC is no binding"):
        probe_bindings(card([("slimrpc", "slim://127.0.0.1:1/x")]))


# --- what an ending says ------------------------------------------------------------------------


def interface(binding=Binding.JSONRPC, url="http://127.0.0.1:8443") -> Interface:
    endpoint = read_url(url, binding)
    return Interface(
        position=0,
        binding=binding,
        version=Version.V1_0,
        url=url,
        tls=endpoint.tls,
        host=endpoint.host,
        port=endpoint.port,
        path=endpoint.path,
    )


def ended(binding=Binding.JSONRPC, operation=GET_TASK, **facts) -> Ended:
    return Ended(facts=Facts(binding=binding, operation=operation, **facts))


def broke(cause, binding=Binding.JSONRPC) -> Ended:
    broken = Broken(cause=cause, phase=Phase.WAITING, written=True, detail="why")
    return ended(binding, broken=broken)


NOT_FOUND = standard(TASK_NOT_FOUND, "Task not found")


@pytest.mark.parametrize(
    ("binding", "ending", "level", "step"),
    [
        # any A2A answer but two proves the handler
        (Binding.JSONRPC, {"http_status": 200, "error": NOT_FOUND}, "passed", "handler"),
        (Binding.HTTP_JSON, {"http_status": 404, "error": NOT_FOUND}, "passed", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 5, "error": NOT_FOUND}, "passed", "handler"),
        (Binding.JSONRPC, {"http_status": 500, "error": standard(ERROR_BY_REASON["INTERNAL_ERROR"], "x")}, "passed", "handler"),
        (Binding.JSONRPC, {"http_status": 200}, "passed", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 0}, "passed", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 5}, "passed", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 3}, "passed", "handler"),
        # disproved
        (Binding.JSONRPC, {"http_status": 200, "error": standard(METHOD_NOT_FOUND, "x")}, "failed", "handler"),
        (Binding.JSONRPC, {"http_status": 200, "error": standard(VERSION_NOT_SUPPORTED, "x")}, "failed", "version"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 12}, "failed", "handler"),
        (Binding.JSONRPC, {"http_status": 404}, "failed", "handler"),
        (Binding.HTTP_JSON, {"http_status": 405}, "failed", "handler"),
        (Binding.HTTP_JSON, {"http_status": 415}, "failed", "handler"),
        (Binding.HTTP_JSON, {"http_status": 302}, "failed", "handler"),
        (Binding.GRPC, {"http_status": 404}, "failed", "binding"),
        (Binding.JSONRPC, {"http_status": 200, "malformed": "a web page"}, "failed", "binding"),
        # decides nothing
        (Binding.JSONRPC, {"http_status": 401}, "unknown", "handler"),
        (Binding.HTTP_JSON, {"http_status": 403, "error": NOT_FOUND}, "unknown", "handler"),
        (Binding.JSONRPC, {"http_status": 500}, "unknown", "handler"),
        (Binding.JSONRPC, {"http_status": 429}, "unknown", "handler"),
        (Binding.JSONRPC, {"http_status": 400}, "unknown", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 16}, "unknown", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 7}, "unknown", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 14}, "unknown", "handler"),
        (Binding.GRPC, {"http_status": 200, "grpc_status": 99}, "unknown", "handler"),
        (Binding.GRPC, {"http_status": 503}, "unknown", "binding"),
    ],
)  # fmt: skip
def test_replies(binding, ending, level, step):
    found = judge(interface(binding), ended(binding, **ending))
    assert (found.level, found.step) == (level, step)


@pytest.mark.parametrize(
    ("cause", "binding", "level", "step"),
    [
        (Break.DNS, Binding.JSONRPC, "failed", "listens"),
        (Break.REFUSED, Binding.JSONRPC, "failed", "listens"),
        (Break.UNREACHABLE, Binding.JSONRPC, "failed", "listens"),
        (Break.CONNECT_TIMEOUT, Binding.JSONRPC, "unknown", "listens"),
        (Break.TLS, Binding.GRPC, "failed", "tls"),
        (Break.ALPN, Binding.GRPC, "failed", "binding"),
        (Break.NOT_HTTP2, Binding.GRPC, "failed", "binding"),
        (Break.HTTP_1_1_REQUIRED, Binding.GRPC, "failed", "binding"),
        (Break.MALFORMED, Binding.JSONRPC, "failed", "binding"),
        (Break.MALFORMED, Binding.GRPC, "unknown", "handler"),
        (Break.CERTIFICATE_ALERT, Binding.JSONRPC, "unknown", "handler"),
        (Break.RESET, Binding.JSONRPC, "unknown", "binding"),
        (Break.EOF, Binding.GRPC, "unknown", "binding"),
        (Break.TIMEOUT, Binding.GRPC, "unknown", "handler"),
        (Break.TOO_LARGE, Binding.JSONRPC, "unknown", "handler"),
        (Break.LOCAL, Binding.JSONRPC, "unknown", "handler"),
        (Break.GOAWAY, Binding.GRPC, "unknown", "handler"),
        (Break.REFUSED_STREAM, Binding.GRPC, "unknown", "handler"),
    ],
)
def test_broken_exchanges(cause, binding, level, step):
    found = judge(interface(binding), broke(cause, binding))
    assert (found.level, found.step) == (level, step)


@pytest.mark.parametrize(
    "ending",
    [ended(http_status=401), ended(http_status=403), broke(Break.CERTIFICATE_ALERT)],
)
def test_who_asks_for_credentials_is_known_to(ending):
    assert judge(interface(), ending).needs_credentials


STREAM, EXTENDED = SUBSCRIBE_TO_TASK.name, GET_EXTENDED_CARD.name
UNSUPPORTED = standard(ERROR_BY_REASON["UNSUPPORTED_OPERATION"], "no")
NOT_CONFIGURED = standard(ERROR_BY_REASON["EXTENDED_AGENT_CARD_NOT_CONFIGURED"], "no")


@pytest.mark.parametrize(
    ("step", "ending", "level"),
    [
        (Step.STREAMING, {"http_status": 200, "error": NOT_FOUND}, Level.PASSED),
        (Step.STREAMING, {"http_status": 400, "error": UNSUPPORTED}, Level.FAILED),
        (Step.STREAMING, {"http_status": 200, "error": standard(METHOD_NOT_FOUND, "x")}, Level.FAILED),
        (Step.STREAMING, {"http_status": 405}, Level.FAILED),
        (Step.STREAMING, {"http_status": 200, "malformed": "no event"}, Level.NOTE),
        (Step.STREAMING, {"http_status": 401}, Level.UNKNOWN),
        (Step.STREAMING, {"http_status": 502}, Level.UNKNOWN),
        (Step.EXTENDED_CARD, {"http_status": 200}, Level.PASSED),
        (Step.EXTENDED_CARD, {"http_status": 400, "error": NOT_CONFIGURED}, Level.FAILED),
        (Step.EXTENDED_CARD, {"http_status": 200, "malformed": "a web page"}, Level.FAILED),
        (Step.EXTENDED_CARD, {"http_status": 401}, Level.UNKNOWN),
    ],
)  # fmt: skip
def test_promises(step, ending, level):
    found = judge_promise(interface(), step, "Operation", ended(**ending))
    assert (found.step, found.level) == (step, level)


def test_a_wrong_version_should_be_refused():
    refused = judge_wrong_version(ended(http_status=200, error=standard(VERSION_NOT_SUPPORTED, "")))
    assert refused is not None
    assert refused.level is Level.PASSED
    taken = judge_wrong_version(ended(http_status=200, error=NOT_FOUND))
    assert taken is not None
    assert taken.level is Level.NOTE
    assert judge_wrong_version(ended(http_status=503)) is None


# --- the report ---------------------------------------------------------------------------------


def row(*findings: Finding, where="url") -> Row:
    return Row(declared=Declared(where=where, transport="GRPC", url=X), findings=findings)


PASSED = Finding(Step.HANDLER, Level.PASSED, "fine")
FAILED = Finding(Step.BINDING, Level.FAILED, "not HTTP/2 & <more>")
UNKNOWN = Finding(Step.HANDLER, Level.UNKNOWN, "silent", needs_credentials=True)
NOTED = Finding(Step.VERSION, Level.NOTE, "by the way")


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([row(PASSED)], Verdict.SERVED),
        ([row(PASSED, NOTED)], Verdict.SERVED),
        ([row(PASSED), row(UNKNOWN)], Verdict.UNKNOWN),
        ([row(UNKNOWN), row(FAILED)], Verdict.NOT_SERVED),
        ([row(PASSED, FAILED)], Verdict.NOT_SERVED),
    ],
)
def test_verdicts(rows, verdict):
    assert CardReport(name="x", rows=tuple(rows)).verdict is verdict


def test_exit_codes_are_the_documented_ones():
    assert [int(v) for v in (Verdict.SERVED, Verdict.NOT_SERVED, Verdict.UNKNOWN)] == [0, 1, 2]


def test_a_card_without_declarations_is_not_served():
    assert CardReport(name="x", rows=(), problems=("none",)).verdict is Verdict.NOT_SERVED


REPORT = CardReport(
    name="an agent", rows=(row(PASSED, NOTED), row(FAILED), row(PASSED, UNKNOWN)), problems=("odd",)
)


def test_the_table_has_a_line_for_each_thing_that_is_not_right():
    text = as_table(REPORT, "card.json")
    assert "an agent: card.json" in text
    assert "binding: not HTTP/2 & <more>" in text
    assert "version: by the way" in text
    assert "fine" not in text
    assert "1 served, 1 not served, 1 unknown" in text
    assert "--header" in text
    assert "\x1b" not in text
    assert "\x1b[31mNOT SERVED" in as_table(REPORT, "card.json", colour=True)


def test_the_data_is_json():
    data = json.loads(json.dumps(as_data(REPORT, "card.json")))
    assert data["result"] == "not served"
    assert [one["result"] for one in data["interfaces"]] == ["served", "not served", "unknown"]
    assert data["interfaces"][1]["findings"] == [
        {"step": "binding", "result": "failed", "text": "not HTTP/2 & <more>"}
    ]


def test_junit_counts_failures_and_errors():
    suite = ET.fromstring(as_junit(REPORT, "card.json"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("6", "2", "1")
    failure = suite.findall("testcase/failure")[1]
    assert failure.get("message") == "not HTTP/2 & <more>"
