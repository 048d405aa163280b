"""Errors of agents across the bindings, and the sidecar's own; read back as clients read them."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core import errors
from sidecar.core.error_details import OWN_DOMAIN
from sidecar.core.errors import read_grpc, read_http, read_jsonrpc, to_grpc, to_http, to_jsonrpc
from sidecar.core.failover import classify
from sidecar.core.spec import (
    ERROR_BY_CODE,
    ERROR_BY_NAME,
    ERRORS,
    GRPC_STATUS_NAMES,
    OPERATIONS,
    Binding,
    Version,
)
from sidecar.core.types import Attempt, Facts, Interface, Kind, Outcome, Phase

A2A = "a2a-protocol.org"
INFO = "type.googleapis.com/google.rpc.ErrorInfo"
BINDINGS = list(Binding)
PAIRS = [(upstream, downstream) for upstream in BINDINGS for downstream in BINDINGS]
REASON_OF_CODE = {error.code: error.reason for error in ERRORS}


def jsonrpc_error(raw, headers):
    record = read_jsonrpc(raw, headers)
    assert record is not None
    return record


def http_error(status, headers, body, *, names_task):
    found = read_http(status, headers, body, names_task=names_task)
    assert found is not None
    return found


def info(reason, domain=A2A, metadata=None):
    return {"@type": INFO, "reason": reason, "domain": domain, "metadata": metadata or {}}


def dumps(value):
    return json.dumps(value).encode()


def grpc_details(status, message, *infos):
    made = status_pb2.Status(code=status, message=message)
    for one in infos:
        made.details.add().Pack(
            error_details_pb2.ErrorInfo(
                reason=one["reason"], domain=one["domain"], metadata=one["metadata"]
            )
        )
    return made.SerializeToString()


def http_body(status, name, message="text", details=()):
    return dumps(
        {"error": {"code": status, "status": name, "message": message, "details": list(details)}}
    )


def read(binding, error, *, message="text", metadata=None, details=(), http=None, grpc=None):
    """An agent's error of the table, as the official SDK writes it, and whether it is one."""
    every = [info(error.reason, metadata=metadata), *details]
    http, grpc = http or error.http_status, error.grpc_status if grpc is None else grpc
    if binding is Binding.JSONRPC:
        raw = dumps({"code": error.code, "message": message, "data": every})
        return jsonrpc_error(raw, []), True
    if binding is Binding.HTTP_JSON:
        body = http_body(http, GRPC_STATUS_NAMES[grpc], message, every)
        return http_error(http, [], body, names_task=False)
    return read_grpc(grpc, message, grpc_details(grpc, message, *every), [])


def seen_by(binding, record):
    """(class, message, metadata) as the clients of facts 3.3 tell them, strictest of each."""
    if binding is Binding.JSONRPC:
        error = json.loads(to_jsonrpc(record))
        data = error.get("data") or [{}]
        return REASON_OF_CODE.get(error["code"]), error["message"], data[0].get("metadata", {})
    if binding is Binding.HTTP_JSON:
        status, _, body = to_http(record)
        error = json.loads(body)["error"]
        assert error["code"] == status
        first = error["details"][0]
        assert first["@type"] == INFO
        assert all(isinstance(value, str) for value in first["metadata"].values())
        return first["reason"], error["message"], first["metadata"]
    status, message, encoded = to_grpc(record)
    decoded = status_pb2.Status.FromString(encoded)
    assert (decoded.code, decoded.message) == (status, message)
    first = error_details_pb2.ErrorInfo()
    assert decoded.details[0].Unpack(first)
    assert first.domain == A2A
    return first.reason, message, dict(first.metadata)


# --- the table through every pair of bindings ------------------------------------------------


@pytest.mark.parametrize(("upstream", "downstream"), PAIRS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_an_error_is_the_same_error_on_every_binding(error, upstream, downstream):
    record, recognised = read(upstream, error, metadata={"task": "t-1"})

    assert recognised
    assert (record.code, record.reason) == (error.code, error.reason)
    assert seen_by(downstream, record) == (error.reason, "text", {"task": "t-1"})
    assert (record.http_status, record.grpc_status) == (error.http_status, error.grpc_status)


# Specification 1.0.0 and implementations of its time.
OLDER = [
    ("TASK_NOT_CANCELABLE", 409, 9),
    ("PUSH_NOTIFICATION_NOT_SUPPORTED", 501, 12),
    ("UNSUPPORTED_OPERATION", 501, 12),
    ("CONTENT_TYPE_NOT_SUPPORTED", 415, 3),
    ("INVALID_AGENT_RESPONSE", 502, 13),
    ("VERSION_NOT_SUPPORTED", 501, 12),
    ("METHOD_NOT_FOUND", 404, 5),
]


@pytest.mark.parametrize(("upstream", "downstream"), PAIRS)
@pytest.mark.parametrize(("reason", "http", "grpc"), OLDER)
def test_the_reason_decides_not_the_status(reason, http, grpc, upstream, downstream):
    error = next(error for error in ERRORS if error.reason == reason)

    record, recognised = read(upstream, error, http=http, grpc=grpc)

    assert recognised
    assert seen_by(downstream, record)[0] == reason
    status = {
        Binding.JSONRPC: None,
        Binding.HTTP_JSON: to_http(record)[0],
        Binding.GRPC: to_grpc(record)[0],
    }[downstream]
    if downstream is not upstream:  # what this side makes is the table of 1.0.1
        assert status in {None, error.http_status, error.grpc_status}


@pytest.mark.parametrize("downstream", BINDINGS)
@pytest.mark.parametrize(
    ("alias", "reason"),
    [
        ("UNSUPPORTED_CONTENT_TYPE", "CONTENT_TYPE_NOT_SUPPORTED"),
        ("AUTHENTICATED_EXTENDED_CARD_NOT_CONFIGURED", "EXTENDED_AGENT_CARD_NOT_CONFIGURED"),
        ("INTERNAL", "INTERNAL_ERROR"),
        ("JSON_PARSE", "JSON_PARSE_ERROR"),
        ("PARSE_ERROR", "JSON_PARSE_ERROR"),
    ],
)
def test_other_spellings_of_a_reason_cross_as_the_specifications(alias, reason, downstream):
    upstream = Binding.GRPC if downstream is Binding.HTTP_JSON else Binding.HTTP_JSON
    if upstream is Binding.GRPC:
        details = grpc_details(13, "m", info(alias, metadata={"k": "v"}))
        record, recognised = read_grpc(13, "m", details, [])
    else:
        body = http_body(400, "X", details=[info(alias, metadata={"k": "v"})])
        record, recognised = http_error(400, [], body, names_task=False)

    assert recognised
    seen, _, metadata = seen_by(downstream, record)
    assert (seen, metadata) == (reason, {"k": "v"})


@pytest.mark.parametrize("downstream", BINDINGS)
def test_a_known_code_is_understood_without_any_data(downstream):
    record = jsonrpc_error(b'{"code":-32001,"message":"Task not found"}', [])

    assert seen_by(downstream, record)[:2] == ("TASK_NOT_FOUND", "Task not found")


@pytest.mark.parametrize("downstream", [Binding.HTTP_JSON, Binding.GRPC])
def test_a_known_code_wins_over_a_foreign_error_info(downstream):
    data = [info("GONE", "agent.example", {"id": "7"})]
    record = jsonrpc_error(dumps({"code": -32001, "message": "m", "data": data}), [])

    assert seen_by(downstream, record) == ("TASK_NOT_FOUND", "m", {"id": "7"})
    assert b"GONE" in (
        to_http(record)[2] if downstream is Binding.HTTP_JSON else to_grpc(record)[2]
    )


@pytest.mark.parametrize("downstream", BINDINGS)
def test_a_reason_of_the_agents_own_survives(downstream):
    for upstream in BINDINGS:
        own = type(ERRORS[0])("X", -32603, "AGENT_ON_FIRE", 500, 13)
        record, recognised = read(upstream, own, metadata={"k": "v"})

        assert recognised
        if downstream is Binding.JSONRPC:
            data = json.loads(to_jsonrpc(record))["data"][0]
            seen = data["reason"], data["metadata"]
        else:
            seen = seen_by(downstream, record)[::2]
        assert seen == ("AGENT_ON_FIRE", {"k": "v"})


def test_an_unknown_code_passes_unchanged_and_is_told_to_the_others():
    raw = b'{"code":-32050,"message":"m","data":{"n":1.50}}'
    record = jsonrpc_error(raw, [])

    assert to_jsonrpc(record) == raw
    assert (record.http_status, record.grpc_status) == (500, 2)
    for downstream in (Binding.HTTP_JSON, Binding.GRPC):
        seen = seen_by(downstream, record)
        assert seen == ("UNKNOWN_ERROR", "m", {"code": "-32050", "data": '{"n":1.50}'})


def test_a_reason_explains_an_unknown_code():
    raw = dumps({"code": -32050, "message": "m", "data": [info("TASK_NOT_FOUND")]})

    record = jsonrpc_error(raw, [])

    assert (record.code, record.reason) == (-32050, "TASK_NOT_FOUND")
    assert to_http(record)[0] == 404


@pytest.mark.parametrize(("upstream", "downstream"), PAIRS)
def test_other_details_survive_behind_the_error_info(upstream, downstream):
    violations = [{"field": "message.message_id", "description": "google.rpc.ErrorInfo needed"}]
    bad = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
    error = ERROR_BY_CODE[-32602]
    if upstream is Binding.GRPC:
        status = status_pb2.Status(code=3, message="text")
        packed = error_details_pb2.BadRequest()
        packed.field_violations.add(**violations[0])
        status.details.add().Pack(packed)  # before the ErrorInfo: it must come out behind
        made = error_details_pb2.ErrorInfo(reason=error.reason, domain=A2A)
        status.details.add().Pack(made)
        record, _ = read_grpc(3, "text", status.SerializeToString(), [])
        if downstream is Binding.GRPC:
            assert to_grpc(record)[2] == status.SerializeToString()
            return
    else:
        record, _ = read(upstream, error, details=[bad])

    assert seen_by(downstream, record)[0] == "INVALID_PARAMS"
    if downstream is Binding.GRPC:
        decoded = error_details_pb2.BadRequest()
        assert status_pb2.Status.FromString(to_grpc(record)[2]).details[1].Unpack(decoded)
        assert decoded.field_violations[0].field == "message.message_id"
    else:
        body = to_jsonrpc(record) if downstream is Binding.JSONRPC else to_http(record)[2]
        error = json.loads(body).get("error") or json.loads(body)
        assert (error.get("details") or error["data"])[1] == bad


@pytest.mark.parametrize("upstream", [Binding.JSONRPC, Binding.HTTP_JSON])
@pytest.mark.parametrize("downstream", BINDINGS)
def test_metadata_crosses_as_strings_only(upstream, downstream):
    if upstream is downstream:
        return  # passes as it is
    metadata = {"s": "x", "n": 5, "list": [{"field": "id"}], "none": None}

    record, _ = read(upstream, ERROR_BY_CODE[-32602], metadata=metadata)

    assert seen_by(downstream, record)[2] == {
        "s": "x",
        "n": "5",
        "list": '[{"field":"id"}]',
        "none": "null",
    }


@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.HTTP_JSON])
def test_the_same_binding_gets_the_very_bytes(binding):
    texts = {
        Binding.JSONRPC: b'{ "message":"\\u0061", "code":-32004,"data":[{"@type":"t","n":1e2}] }',
        Binding.HTTP_JSON: b'{"error": {"code":400,"status":"X","details":[{"@type":"t"},7]}}',
    }
    if binding is Binding.JSONRPC:
        assert to_jsonrpc(jsonrpc_error(texts[binding], [])) == texts[binding]
    else:
        record, _ = http_error(400, [], texts[binding], names_task=False)
        assert to_http(record)[2] == texts[binding]


# --- recognition, binding by binding -----------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'"text"',
        b"null",
        b"5",
        b'{"code":"-32001"}',
        b'{"code":1.5}',
        b'{"code":true}',
        b'{"code":null}',
        b'{"code":1,"code":2}',
        b'{"code":',
    ],
)
def test_a_jsonrpc_error_has_an_integer_code(raw):
    assert read_jsonrpc(raw, []) is None


@pytest.mark.parametrize("code", [-32001, -32768, 0, 7, 401, -1, 10**30])
def test_any_integer_is_a_code(code):
    record = jsonrpc_error(b'{"code":%d,"message":5}' % code, [])

    assert (record.code, record.message) == (code, "")


NAMES_TASK = {"names_task": True}
NO_TASK = {"names_task": False}


@pytest.mark.parametrize(
    ("status", "details", "recognised"),
    [
        (503, [info("TASK_NOT_FOUND")], True),
        (404, [info("TASK_NOT_FOUND", "")], True),  # a reason of the table is enough
        (404, [info("SOMETHING_ELSE")], True),  # the domain is enough
        (404, [info("")], True),
        (404, [info("SOMETHING_ELSE", "googleapis.com")], False),
        (404, [info("INTERNAL", "googleapis.com")], False),
        (404, [info("X", "googleapis.com"), info("TASK_NOT_FOUND")], True),
        (404, [{"@type": INFO, "reason": 5, "domain": None}], False),
        (404, [{"reason": "TASK_NOT_FOUND", "domain": A2A}], False),  # no @type, no ErrorInfo
        (404, [7, None, "x"], False),
        (404, [], False),
    ],
)
def test_an_http_error_is_recognised_by_its_error_info(status, details, recognised):
    body = http_body(0, "UNAVAILABLE", details=details)

    assert http_error(status, [], body, **NO_TASK)[1] is recognised


@pytest.mark.parametrize(
    ("status", "code", "name", "operation", "recognised", "crosses_as"),
    [
        (404, 404, "NOT_FOUND", "GetTask", True, "TASK_NOT_FOUND"),
        (404, 404, "NOT_FOUND", "CancelTask", True, "TASK_NOT_FOUND"),
        (404, 404, "NOT_FOUND", "SubscribeToTask", True, "TASK_NOT_FOUND"),
        (404, 404, "NOT_FOUND", "DeleteTaskPushNotificationConfig", True, "TASK_NOT_FOUND"),
        (404, 404, "NOT_FOUND", "SendMessage", False, None),
        (404, 404, "NOT_FOUND", "SendStreamingMessage", False, None),
        (404, 404, "NOT_FOUND", "ListTasks", False, None),
        (404, 404, "NOT_FOUND", "GetExtendedAgentCard", False, None),
        (409, 409, "ABORTED", "CancelTask", True, None),
        (409, 409, "ABORTED", "SendMessage", False, None),
        (501, 501, "UNIMPLEMENTED", "SendMessage", True, None),
        (500, 500, "INTERNAL", "SendMessage", True, None),
        (502, 502, "UNAVAILABLE", "SendMessage", False, None),
        (503, 503, "UNAVAILABLE", "SendMessage", False, None),
        (503, 503, "UNAVAILABLE", "GetTask", True, None),
        (404, 5, "NOT_FOUND", "GetTask", False, None),  # the code is the HTTP status
        (404, 404, "no such thing", "GetTask", False, None),
        (404, 404, None, "GetTask", False, None),
    ],
)
def test_the_bare_form_of_an_http_error(status, code, name, operation, recognised, crosses_as):
    error = {"code": code, "message": "m"} | ({"status": name} if name else {})
    names_task = OPERATIONS[operation].names_task

    record, is_error = http_error(status, [], dumps({"error": error}), names_task=names_task)

    assert is_error is recognised
    if crosses_as:
        assert record.code == -32001
        assert seen_by(Binding.GRPC, record)[0] == crosses_as
    elif recognised:
        assert to_grpc(record)[0] == GRPC_STATUS_NAMES.index(name)


@pytest.mark.parametrize(
    ("status", "name"), [(501, "UNIMPLEMENTED"), (500, "INTERNAL"), (400, "INVALID_ARGUMENT")]
)
def test_a_bare_http_error_is_never_taken_for_a_refusal_to_serve(status, name):
    record, _ = http_error(status, [], http_body(status, name), **NAMES_TASK)
    facts = Facts(
        binding=Binding.HTTP_JSON,
        operation=OPERATIONS["CancelTask"],
        http_status=status,
        error=record,
    )

    assert classify(facts).kind is Kind.ANSWERED


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"error":"no"}',
        b'{"error":null}',
        b"<html>",
        b'{"error":{}',
        b'{"detail":1}',
        b'{"type":"https://a2a-protocol.org/errors/version-not-supported"}',
    ],
)
def test_other_bodies_are_no_http_errors(body):
    assert read_http(404, [], body, **NAMES_TASK) is None


@pytest.mark.parametrize(
    ("message", "infos", "recognised", "code"),
    [
        ("m", [info("TASK_NOT_FOUND")], True, -32001),
        ("m", [info("ELSE", "agent.example")], True, -32603),  # any ErrorInfo makes it an answer
        ("m", [info("")], True, -32603),
        ("TaskNotFoundError: gone", [], True, -32001),
        ("UnsupportedOperationError:no", [], True, -32004),
        ("AuthenticatedExtendedCardNotConfiguredError: no", [], True, -32007),
        ("NoSuchError: gone", [], False, -32603),
        ("a TaskNotFoundError: gone", [], False, -32603),
        ("TaskNotFoundError", [], False, -32603),
        ("", [], False, -32603),
    ],
)
def test_a_grpc_error_is_recognised_by_error_info_or_by_name(message, infos, recognised, code):
    details = grpc_details(9, message, *infos) if infos else None

    record, is_error = read_grpc(9, message, details, [])

    assert (is_error, record.code) == (recognised, code)


@pytest.mark.parametrize("downstream", BINDINGS)
def test_a_class_name_before_a_message_is_the_class(downstream):
    record, _ = read_grpc(12, "TaskNotCancelableError: it is done", None, [])

    assert seen_by(downstream, record)[:2] == ("TASK_NOT_CANCELABLE", "it is done")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_every_class_name_is_known(error):
    assert read_grpc(2, f"{error.name}: m", None, [])[0].code == error.code
    assert ERROR_BY_NAME[error.name] is error


def test_a_bare_unimplemented_reads_as_method_not_found():
    record, recognised = read_grpc(12, "unknown service", None, [])

    assert not recognised
    assert json.loads(to_jsonrpc(record)) == {"code": -32601, "message": "unknown service"}
    assert to_http(record)[0] == 404
    for downstream in (Binding.HTTP_JSON, Binding.GRPC):
        assert seen_by(downstream, record)[0] == "METHOD_NOT_FOUND"
    assert to_grpc(record)[0] == 12


@pytest.mark.parametrize("reason", ["UNSUPPORTED_OPERATION", "SOMETHING_NEW"])
def test_unimplemented_with_another_error_is_an_answer(reason):
    record, recognised = read_grpc(12, "m", grpc_details(12, "m", info(reason)), [])
    facts = Facts(
        binding=Binding.GRPC,
        operation=OPERATIONS["SendMessage"],
        http_status=200,
        grpc_status=12,
        error=record,
    )

    assert recognised
    assert classify(facts).kind is Kind.ANSWERED


@pytest.mark.parametrize("status", [3, 5, 6, 9, 10, 11, 16, 99])
def test_a_bare_grpc_status_is_no_guessed_error(status):
    record, recognised = read_grpc(status, "m", None, [])

    assert not recognised
    assert record.code == (-32602 if status == 3 else -32603)
    known = status if status < 17 else 2
    assert to_grpc(record) == (known, "m", b"")  # as bare as it came
    assert json.loads(to_jsonrpc(record))["data"][0]["reason"] == "AGENT_REFUSED"


@pytest.mark.parametrize("details", [b"\xff\xff", b"\x0a\x05ab"])
def test_details_that_do_not_decode_leave_the_status(details):
    record, recognised = read_grpc(9, "m", details, [])

    assert not recognised
    assert to_grpc(record) == (9, "m", b"")


# --- statuses that are kept ----------------------------------------------------------------------

KEPT = [(401, 16), (403, 7), (429, 8)]


@pytest.mark.parametrize(("http", "grpc"), KEPT)
def test_authentication_and_limits_reach_every_binding_as_that_status(http, grpc):
    headers = [("www-authenticate", "Bearer"), ("retry-after", "7"), ("x", "y")]
    invalid = info("INVALID_REQUEST")
    jsonrpc = jsonrpc_error(dumps({"code": -32600, "message": "m", "data": [invalid]}), headers)
    records = [
        errors.with_http_status(jsonrpc, http),
        http_error(http, headers, http_body(http, "X", details=[invalid]), **NO_TASK)[0],
        read_grpc(grpc, "m", grpc_details(grpc, "m", invalid), headers)[0],
        http_error(http, headers, http_body(http, "X"), **NO_TASK)[0],
        read_grpc(grpc, "m", None, headers)[0],
        errors.refused(http, headers),
    ]
    for record in records:
        assert (to_http(record)[0], to_grpc(record)[0]) == (http, grpc)
        assert record.headers == headers[:2]
        assert record.delivered is None


def test_no_other_status_changes_a_jsonrpc_error():
    record = jsonrpc_error(b'{"code":-32001,"message":"m"}', [])

    assert errors.with_http_status(record, 500) == record


def test_a_refusal_without_an_error_object():
    record = errors.refused(409, [])

    assert (record.code, record.reason, record.delivered) == (-32603, "AGENT_REFUSED", None)
    assert record.grpc_status == 10
    assert json.loads(to_jsonrpc(record))["data"][0]["domain"] == OWN_DOMAIN


@pytest.mark.parametrize(("reason", "expected"), [("TASK_NOT_FOUND", 404), ("AGENT_ON_FIRE", 500)])
@pytest.mark.parametrize("status", [200, 302])
def test_an_error_behind_a_status_that_is_none_gets_one(status, reason, expected):
    record, recognised = http_error(
        status, [], http_body(5, "X", details=[info(reason)]), **NO_TASK
    )

    assert recognised
    assert to_http(record)[0] == expected


# --- forged ---------------------------------------------------------------------------------------

FORGERIES = [
    text.replace("INFO", f'"{INFO}"')
    for text in (
        '{"@type":INFO,"reason":"NOT_DELIVERED","domain":"a2a-sidecar","metadata":{"delivered":"no"}}',
        '{"@type":INFO,"reason":"NOT_DELIVERED","domain" :\n"a2a\\u002dsidecar"}',
        '{"@type":INFO,"reason":"NOT_DELIVERED","dom\\u0061in":"\\u0061\\u0032a\\u002Dsidecar"}',
        '{"@type":INFO,"domain":"x","domain":"a2a-sidecar"}',
        '{"@type":INFO,"domain":"a2a-sidecar","domain":"x"}',
        '{"reason":"NOT_DELIVERED","domain":"a2a-sidecar"}',
        '[[{"domain":"a2a-sidecar"}]]',
    )
]


def claims_ours(text):
    """Whether any object, also one of two members of a name, says our domain."""
    found: list[object] = []

    def look(pairs):
        found.extend(value for name, value in pairs if name == "domain")
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return "a2a-sidecar" in found


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_agent_speaks_in_our_domain(forgery):
    assert claims_ours(forgery)
    records = [
        jsonrpc_error(b'{"code":-32603,"message":"m","data":[%b]}' % forgery.encode(), []),
        jsonrpc_error(b'{"code":-32603,"message":"m","data":%b}' % forgery.encode(), []),
        http_error(
            400, [], b'{"error":{"details":[%b]},"x":%b}' % ((forgery.encode(),) * 2), **NO_TASK
        )[0],
    ]
    for record in records:
        assert not claims_ours(to_jsonrpc(record)) or record.reason == "AGENT_REFUSED"
        assert record.delivered is None
    assert not claims_ours(to_jsonrpc(records[0]))
    assert not claims_ours(to_jsonrpc(records[1]))
    assert not claims_ours(to_http(records[2])[2])
    assert not claims_ours(to_http(records[1])[2])


@pytest.mark.parametrize("downstream", BINDINGS)
def test_nor_in_grpc_details(downstream):
    forged = info("NOT_DELIVERED", "a2a-sidecar", {"delivered": "no"})
    record, _ = read_grpc(14, "m", grpc_details(14, "m", forged), [])

    if downstream is Binding.GRPC:
        first = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(to_grpc(record)[2]).details[0].Unpack(first)
        assert first.domain == "a2a-sidecar.upstream"
    else:
        text = to_jsonrpc(record) if downstream is Binding.JSONRPC else to_http(record)[2]
        assert not claims_ours(text)
        assert b'"a2a-sidecar.upstream"' in text


def test_only_the_domain_is_renamed():
    raw = rb'{"code":-32000,"message":"see \"domain\":\"a2a-sidecar\"","data":"a2a-sidecar"}'

    assert to_jsonrpc(jsonrpc_error(raw, [])) == raw


# --- gRPC trailers ---------------------------------------------------------------------------------


def test_details_pass_to_grpc_as_they_came():
    details = grpc_details(5, "Task not found", info("TASK_NOT_FOUND"))

    record, _ = read_grpc(5, "Task not found", details, [])

    assert to_grpc(record) == (5, "Task not found", details)


@pytest.mark.parametrize(("code", "message"), [(5, "another"), (13, "m"), (0, "")])
def test_details_that_contradict_the_status_are_put_right(code, message):
    record, _ = read_grpc(5, "m", grpc_details(code, message, info("TASK_NOT_FOUND")), [])

    assert seen_by(Binding.GRPC, record)[:2] == ("TASK_NOT_FOUND", "m")
    assert to_grpc(record)[0] == 5


def attempts(count, host="agent.example"):
    outcome = Outcome(
        kind=Kind.NOT_DELIVERED, result="dial", written=False, phase=Phase.DIALING, advance=True
    )
    return tuple(
        Attempt(
            interface=Interface(
                position=n,
                binding=Binding.GRPC,
                version=Version.V1_0,
                url="",
                tls=True,
                host=host,
                port=443,
                path="",
            ),
            outcome=outcome,
        )
        for n in range(count)
    )


BIG = [
    errors.own(
        "NOT_DELIVERED",
        "m" * 9000,
        agent="weather",
        call="c",
        attempts=attempts(16, "h" * 250),
        metadata={"task": "t" * 300},
    ),
    errors.own("DELIVERY_UNKNOWN", "é%\n" * 700, delivered="unknown", attempts=attempts(16)),
    jsonrpc_error(
        dumps(
            {"code": -32602, "message": "x" * 65536}
            | {"data": [info("INVALID_PARAMS", metadata={"a": "b" * 9999, "c": "d"})]}
        ),
        [],
    ),
    jsonrpc_error(
        dumps({"code": -32001, "message": "m", "data": [info("X", "y" * 9000), {"@type": "z"}]}), []
    ),
    read_grpc(5, "m" * 1500, grpc_details(5, "m" * 1500, info("TASK_NOT_FOUND")), [])[0],
    read_grpc(5, "m" * 9000, grpc_details(5, "m" * 9000, info("TASK_NOT_FOUND")), [])[0],
    read_grpc(5, "m", grpc_details(5, "m", info("TASK_NOT_FOUND", metadata={"k": "v" * 9000})), [])[
        0
    ],
]


@pytest.mark.parametrize("record", BIG)
def test_what_goes_into_trailers_stays_below_4_kib(record):
    status, message, encoded = to_grpc(record)

    size = len(quote(message, safe="".join(map(chr, set(range(0x20, 0x7F)) - {0x25}))))
    assert size + len(base64.b64encode(encoded)) < 4096 - 200  # room for the names, and our headers
    decoded = status_pb2.Status.FromString(encoded)
    assert (decoded.code, decoded.message) == (status, message)
    first = error_details_pb2.ErrorInfo()
    assert decoded.details[0].Unpack(first)
    assert first.reason == record.reason
    if record.delivered:
        assert first.metadata["delivered"] == record.delivered


def test_attempts_are_cut_first_and_the_error_says_so():
    record = BIG[0]
    first = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(to_grpc(record)[2]).details[0].Unpack(first)

    kept = [key for key in first.metadata if key.startswith("attempt-")]
    assert {"agent", "call", "delivered", "task"} < set(first.metadata)
    assert kept == [f"attempt-{n}" for n in range(1, len(kept) + 1)]
    assert int(first.metadata["left-out"]) == 16 - len(kept)
    whole = json.loads(to_jsonrpc(record))["data"][0]["metadata"]
    assert sum(key.startswith("attempt-") for key in whole) == 16
    assert whole["attempt-2"] == f"1-grpc {'h' * 250}:443 not_delivered dial"


def test_of_an_agents_metadata_the_longest_goes_first():
    metadata = {"a": "x" * 1500, "b": "x" * 1000, "c": "x" * 600}
    record, _ = read(Binding.HTTP_JSON, ERROR_BY_CODE[-32602], metadata=metadata)

    del metadata["a"]
    assert seen_by(Binding.GRPC, record)[2] == metadata | {"left-out": "1"}


@given(st.text(max_size=1500))
def test_a_message_of_any_text_agrees_with_its_details(text):
    record = errors.own("NOT_DELIVERED", text)

    _, message, encoded = to_grpc(record)

    assert status_pb2.Status.FromString(encoded).message == message
    assert text.startswith(message.removesuffix("…")) or message == text
    assert len(quote(message, safe=" ")) <= 3 * 1024


# --- the sidecar's own -----------------------------------------------------------------------------

OWN = {
    "NOT_DELIVERED": (503, 14, -32603),
    "CARD_UNAVAILABLE": (503, 14, -32603),
    "NO_ELIGIBLE_INTERFACE": (503, 14, -32603),
    "AGENT_DISABLED": (503, 14, -32603),
    "CREDENTIALS_UNAVAILABLE": (503, 14, -32603),
    "DRAINING": (503, 14, -32603),
    "DELIVERY_UNKNOWN": (502, 2, -32603),
    "LIMIT_REACHED": (503, 8, -32603),
    "TOO_LARGE": (413, 8, -32603),
    "INVALID_REQUEST": (400, 3, -32602),
    "NOT_REPRESENTABLE": (400, 3, -32602),
    "AGENT_UNKNOWN": (404, 5, -32603),
    "LOCAL_TOKEN": (401, 16, -32603),
    "FORBIDDEN_ORIGIN": (403, 7, -32603),
    "LOOP": (508, 9, -32603),
    "DEADLINE_EXCEEDED": (504, 4, -32603),
    "INTERNAL": (500, 13, -32603),
}


def test_the_reasons_are_a_closed_set():
    assert errors.OWN_REASONS == OWN


@pytest.mark.parametrize("reason", OWN)
def test_an_own_error_says_the_same_on_every_binding(reason):
    http, grpc, code = OWN[reason]
    record = errors.own(
        reason, "m", agent="weather", call="c-1", attempts=attempts(2), metadata={"task": "t"}
    )

    metadata = {
        "agent": "weather",
        "call": "c-1",
        "delivered": "no",
        "task": "t",
        "attempt-1": "0-grpc agent.example:443 not_delivered dial",
        "attempt-2": "1-grpc agent.example:443 not_delivered dial",
    }
    expected = info(reason, "a2a-sidecar", metadata)
    error = json.loads(to_jsonrpc(record))
    assert error == {"code": code, "message": "m", "data": [expected]}
    status, headers, body = to_http(record)
    assert (status, json.loads(body)["error"]["details"]) == (http, [expected])
    assert (("retry-after", "1") in headers) is (http == 503)
    status, _, encoded = to_grpc(record)
    first = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(encoded).details[0].Unpack(first)
    assert (status, first.reason, first.domain) == (grpc, reason, "a2a-sidecar")
    assert dict(first.metadata) == metadata


@pytest.mark.parametrize(
    ("kept", "http", "grpc"),
    [
        (None, 502, 2),
        ((Binding.HTTP_JSON, 503), 503, 2),
        ((Binding.GRPC, 14), 502, 14),
        ((Binding.GRPC, 99), 502, 2),
        ((Binding.JSONRPC, 503), 502, 2),
    ],
)
def test_an_ambiguous_failure_keeps_its_status_on_the_same_binding_only(kept, http, grpc):
    record = errors.own("DELIVERY_UNKNOWN", "m", delivered="unknown", kept_status=kept)

    status, _, body = to_http(record)
    assert (status, json.loads(body)["error"]["code"]) == (http, http)
    status, _, encoded = to_grpc(record)
    assert (status, status_pb2.Status.FromString(encoded).code) == (grpc, grpc)


@pytest.mark.parametrize(
    ("binding", "http", "grpc", "kept"),
    [
        (Binding.GRPC, 200, 14, (Binding.GRPC, 14)),
        (Binding.GRPC, 200, 99, (Binding.GRPC, 2)),
        (Binding.GRPC, 503, None, None),
        (Binding.GRPC, 200, 0, None),
        (Binding.HTTP_JSON, 503, None, (Binding.HTTP_JSON, 503)),
        (Binding.HTTP_JSON, 302, None, None),
        (Binding.HTTP_JSON, 200, None, None),
        (Binding.JSONRPC, 503, None, None),
        (Binding.HTTP_JSON, None, None, None),
    ],
)
def test_the_status_that_is_kept(binding, http, grpc, kept):
    facts = Facts(
        binding=binding, operation=OPERATIONS["SendMessage"], http_status=http, grpc_status=grpc
    )

    assert errors.kept_status(facts) == kept


def test_an_errors_wait_is_the_callers_to_say():
    record = errors.own("LIMIT_REACHED", "m", headers=[("retry-after", "9")])

    assert record.headers == [("retry-after", "9")]


def test_without_delivered_nothing_is_claimed():
    record = errors.own("INTERNAL", "m", delivered=None)

    assert b"delivered" not in to_jsonrpc(record)


def test_a_standard_error_is_the_specifications():
    record = errors.standard(ERROR_BY_CODE[-32009], "m", metadata={"supportedVersions": "1.0"})

    for binding in BINDINGS:
        seen = seen_by(binding, record)
        assert seen == ("VERSION_NOT_SUPPORTED", "m", {"supportedVersions": "1.0"})
    assert record.delivered is None


# --- vectors of the wire facts ----------------------------------------------------------------------

STATUS_DETAILS = (
    "CAUSDlRhc2sgbm90IGZvdW5kGk4KKHR5cGUuZ29vZ2xlYXBpcy5jb20vZ29vZ2xlLnJwYy5FcnJvckluZm8SIgoO"
    "VEFTS19OT1RfRk9VTkQSEGEyYS1wcm90b2NvbC5vcmc="
)
JSONRPC_ERROR = (
    b'{"code":-32001,"message":"Task not found","data":[{"@type":"type.googleapis.com/google.rpc'
    b'.ErrorInfo","reason":"TASK_NOT_FOUND","domain":"a2a-protocol.org","metadata":{}}]}'
)


def test_the_captured_status_details():
    made = errors.standard(ERROR_BY_CODE[-32001], "Task not found")

    assert to_grpc(made) == (5, "Task not found", base64.b64decode(STATUS_DETAILS))
    record, _ = read_grpc(5, "Task not found", base64.b64decode(STATUS_DETAILS), [])
    assert json.loads(to_jsonrpc(record))["code"] == -32001


def test_the_captured_jsonrpc_error():
    record = jsonrpc_error(JSONRPC_ERROR, [])

    assert to_jsonrpc(errors.standard(ERROR_BY_CODE[-32001], "Task not found")) == JSONRPC_ERROR
    assert to_grpc(record)[2] == base64.b64decode(STATUS_DETAILS)
    status, _, body = to_http(record)
    assert (status, json.loads(body)) == (
        404,
        {
            "error": {
                "code": 404,
                "status": "NOT_FOUND",
                "message": "Task not found",
                "details": [info("TASK_NOT_FOUND")],
            }
        },
    )
