"""JSON-RPC at both ends: requests told apart, replies read for what they are."""

from __future__ import annotations

import json

import pytest

from sidecar.core import jsonrpc
from sidecar.core.convert import json_to_proto
from sidecar.core.errors import own, standard
from sidecar.core.jsonrpc import (
    Notification,
    Refused,
    decode_request,
    encode_error,
    encode_request,
    encode_result,
    read_reply,
)
from sidecar.core.spec import OPERATIONS, TASK_NOT_FOUND, Binding
from sidecar.core.types import Form, Payload
from tests.core.calls import REQUESTS, call, head, interface, text

GET = OPERATIONS["GetTask"]
SEND = OPERATIONS["SendMessage"]
DELETE = OPERATIONS["DeleteTaskPushNotificationConfig"]


def request(**members):
    """A request with raw JSON texts for members; None leaves one out."""
    whole: dict[str, str | None] = {
        "jsonrpc": '"2.0"',
        "id": "1",
        "method": '"GetTask"',
        "params": '{"id":"t-1"}',
    }
    whole |= members
    kept = (f'"{name}":{value}' for name, value in whole.items() if value is not None)
    return ("{" + ",".join(kept) + "}").encode()


def refusal(body):
    with pytest.raises(Refused) as caught:
        decode_request(body)
    return caught.value.record.code, caught.value.id


# --- requests from the application ----------------------------------------------------------------


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_is_understood(operation):
    params = REQUESTS[operation].decode()

    inbound = decode_request(request(method=f'"{operation}"', params=params))

    assert inbound.operation.name == operation
    assert inbound.payload == Payload(Form.JSON, REQUESTS[operation])
    assert (inbound.id, inbound.tenant) == (b"1", "")


@pytest.mark.parametrize(
    "id_",
    [
        '"a"',
        '""',
        "0",
        "-5",
        "1.5",
        "1.0",
        "12345678901234567890",
        "null",
        '"\\u0061"',
        "1E+2",
        '"é"',
    ],
)
def test_ids_are_echoed_digit_for_digit(id_):
    inbound = decode_request(request(id=id_))

    answer = encode_result(inbound.id, GET, Payload(Form.JSON, b"{}"))
    assert answer == b'{"jsonrpc":"2.0","id":%b,"result":{}}' % id_.encode()


@pytest.mark.parametrize("id_", ["true", "false", "[]", "{}", "[1]", "9" * 5000])
def test_what_is_no_id(id_):
    assert refusal(request(id=id_)) == (-32600, b"null")


@pytest.mark.parametrize(
    ("members", "id_"),
    [
        ({"jsonrpc": None}, b"1"),
        ({"jsonrpc": "2.0"}, b"1"),
        ({"jsonrpc": '"1.0"'}, b"1"),
        ({"jsonrpc": None, "id": None}, b"null"),
        ({"method": None}, b"1"),
        ({"method": "5"}, b"1"),
        ({"method": "5", "id": '"x"'}, b'"x"'),
    ],
)
def test_envelopes_that_are_no_request(members, id_):
    assert refusal(request(**members)) == (-32600, id_)


@pytest.mark.parametrize(
    "method", ["tasks/get", "message/send", "getTask", "GetTask ", "", "SendMessage\u0000"]
)
def test_methods_that_are_none_of_the_eleven(method):
    assert refusal(request(method=json.dumps(method))) == (-32601, b"1")


@pytest.mark.parametrize(
    "body", [b"[]", b"[1]", b"[" + request() + b"]", b" \n[" + request(id=None) + b"]"]
)
def test_batches(body):
    assert refusal(body) == (-32600, b"null")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"jsonrpc":',
        b"[1",
        b'{"id":NaN}',
        rb'{"id":"\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b'{"id":"\xff"}',
        request().decode().encode("utf-16-le"),
        b"\xef\xbb\xbf" + request(),
        request() + b"x",
    ],
)
def test_what_is_no_json(body):
    assert refusal(body) == (-32700, b"null")


@pytest.mark.parametrize("body", [b"1", b'"x"', b"null", b"true"])
def test_json_that_is_no_request(body):
    assert refusal(body) == (-32600, b"null")


@pytest.mark.parametrize(
    "twice", ['"id":1', '"method":"ListTasks"', '"jsonrpc":"2.0"', '"params":{}']
)
def test_a_member_of_the_envelope_twice(twice):
    assert refusal(request()[:-1] + b"," + twice.encode() + b"}") == (-32600, b"null")


@pytest.mark.parametrize("members", [{}, {"method": '"tasks/get"'}, {"params": "[]"}])
def test_a_notification_gets_no_response_and_does_nothing(members):
    with pytest.raises(Notification):
        decode_request(request(id=None, **members))


@pytest.mark.parametrize("params", [None, "null", "{}"])
def test_params_may_be_left_out(params):
    inbound = decode_request(request(method='"GetExtendedAgentCard"', params=params))

    assert inbound.payload.data == b"{}"


@pytest.mark.parametrize(
    ("operation", "params"),
    [
        ("GetExtendedAgentCard", "[]"),
        ("GetExtendedAgentCard", '["a"]'),
        ("GetExtendedAgentCard", "5"),
        ("GetTask", '{"id":"a","id":"b"}'),
        ("GetTask", '{"id":"a","\\u0069d":"b"}'),
        ("GetTask", '{"id":"a","tenant":"x","tenant":"y"}'),
        ("GetTask", '{"id":"a","tenant":5}'),
        ("GetTask", "{}"),
        ("GetTask", '{"id":""}'),
        ("GetTask", '{"id":null}'),
        ("GetTask", '{"id":7}'),
        ("GetTask", '{"id":".."}'),
        ("GetTask", '{"id":"."}'),
        ("GetTask", '{"id":"a\\u0000"}'),
        ("CancelTask", '{"id":"a\\nb"}'),
        ("SubscribeToTask", "{}"),
        ("GetTaskPushNotificationConfig", '{"taskId":"t"}'),
        ("GetTaskPushNotificationConfig", '{"id":"c"}'),
        ("DeleteTaskPushNotificationConfig", '{"id":"c","taskId":"t","task_id":"u"}'),
        ("SendMessage", '{"message":{"taskId":"a","taskId":"b"}}'),
        ("SendMessage", '{"message":{"taskId":"a","task\\u0049d":"b"}}'),
        ("SendMessage", '{"message":{"taskId":"a","task_id":"b"}}'),
    ],
)
def test_params_that_are_refused_before_anything_is_sent(operation, params):
    assert refusal(request(method=f'"{operation}"', params=params)) == (-32602, b"1")


def test_the_refusal_names_the_field():
    with pytest.raises(Refused, match="taskId must not be empty"):
        decode_request(request(method='"ListTaskPushNotificationConfigs"', params="{}"))


def test_the_snake_case_spelling_of_an_id_counts():
    inbound = decode_request(
        request(method='"GetTaskPushNotificationConfig"', params='{"task_id":"t","id":"c"}')
    )

    assert inbound.payload.data == b'{"task_id":"t","id":"c"}'


def test_the_callers_tenant_is_taken_out():
    inbound = decode_request(request(params='{"id":"t-1","tenant":"acme"}'))

    assert (inbound.tenant, inbound.payload.data) == ("acme", b'{"id":"t-1"}')


def test_unknown_members_and_spellings_stay():
    params = '{ "message" : {"x-future":{"a":1.50},"metadata":{"n":9007199254740993}},"top":1 }'

    inbound = decode_request(request(method='"SendMessage"', params=params))

    assert inbound.payload.data == params.encode()


# --- answers to the application ---------------------------------------------------------------------


def test_a_void_result_is_null():
    answer = encode_result(b"1", DELETE, Payload(Form.JSON, b"{}"))

    assert answer == b'{"jsonrpc":"2.0","id":1,"result":null}'


def test_an_error_has_no_result():
    answer = json.loads(encode_error(b'"x"', standard(TASK_NOT_FOUND, "Task not found")))

    assert set(answer) == {"jsonrpc", "id", "error"}
    assert (answer["id"], answer["error"]["code"]) == ("x", -32001)


def test_an_error_of_the_sidecar_is_an_internal_error():
    answer = json.loads(encode_error(b"1", own("NOT_DELIVERED", "m")))

    assert answer["error"]["code"] == -32603
    assert answer["error"]["data"][0]["metadata"]["delivered"] == "no"


# --- requests to an agent ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_is_sent(operation, form):
    data = REQUESTS[operation]
    if form is Form.PROTO:
        data = json_to_proto(OPERATIONS[operation].request, data)

    sent = encode_request(
        call(operation, data, form=form), interface(Binding.JSONRPC, path="/rpc/?a=b")
    )

    body = json.loads(sent.body)
    assert (sent.method, sent.target) == ("POST", "/rpc/?a=b")
    assert body.pop("params") == json.loads(REQUESTS[operation])
    assert body == {"jsonrpc": "2.0", "id": 1, "method": operation}
    headers = dict(sent.headers)
    assert len(headers) == len(sent.headers)
    accept = "text/event-stream" if OPERATIONS[operation].streaming else "application/json"
    assert headers == {
        "content-type": "application/json",
        "accept": accept,
        "accept-encoding": "identity",
        "a2a-version": "1.0",
    }


def test_the_params_are_the_very_bytes_and_the_tenant_is_the_interfaces():
    data = b'{"message": {"n":1.50, "\\u0061":1e2} }'

    plain = encode_request(call("SendMessage", data), interface(Binding.JSONRPC))
    tenanted = encode_request(
        call("SendMessage", data, tenant="evil"), interface(Binding.JSONRPC, tenant="acme-7")
    )

    assert plain.body.endswith(b'"params":' + data + b"}")
    assert json.loads(tenanted.body)["params"]["tenant"] == "acme-7"
    assert b'{"n":1.50, "\\u0061":1e2}' in tenanted.body
    assert b"evil" not in tenanted.body


def test_headers_of_the_call_go_along():
    sent = encode_request(
        call("GetTask", headers=[("authorization", "Bearer x"), ("x-odd", "a\x01b")]),
        interface(Binding.JSONRPC),
    )

    assert ("authorization", "Bearer x") in sent.headers
    assert "x-odd" not in dict(sent.headers)


# --- replies of an agent ------------------------------------------------------------------------------

TASK = b'{"id":"t-1","status":{"state":"TASK_STATE_COMPLETED"}, "x":1.50}'


def reply(operation=GET, status=200, **members):
    kept = (f'"{name}":'.encode() + value for name, value in members.items())
    return read_reply(operation, head(status), b"{" + b",".join(kept) + b"}")


def test_a_result_is_the_very_bytes():
    read = reply(jsonrpc=b'"2.0"', id=b"1", result=TASK)

    assert read.payload == Payload(Form.JSON, TASK)
    assert not read.malformed


@pytest.mark.parametrize("id_", [b"null", b"7", b'"other"', b"{}"])
def test_the_id_of_a_reply_does_not_matter(id_):
    assert reply(id=id_, result=TASK).payload


@pytest.mark.parametrize("result", [b"null", b"{}", b'"x"', b"5"])
def test_a_void_result_may_be_anything(result):
    assert reply(DELETE, result=result).payload == Payload(Form.JSON, b"{}")


@pytest.mark.parametrize("status", [200, 400, 404, 409, 500, 503])
@pytest.mark.parametrize("code", [-32001, -32050, 7])
def test_an_error_is_an_error_at_any_status(status, code):
    read = reply(
        status=status, jsonrpc=b'"2.0"', id=b"1", error=b'{"code":%d,"message":"m"}' % code
    )

    assert read.error is not None
    assert (read.error.code, read.error.message, read.http_status) == (code, "m", status)


@pytest.mark.parametrize(
    ("code", "recognised"),
    [
        (-32768, True),
        (-32000, True),
        (-32001, True),
        (-31999, False),
        (-32769, False),
        (404, False),
    ],
)
def test_without_a_jsonrpc_member_the_code_tells(code, recognised):
    read = reply(status=404, error=b'{"code":%d,"message":"m"}' % code)

    assert (read.error is not None) is recognised
    assert (read.plain is not None) is not recognised


def test_an_error_wins_over_a_result_and_a_null_error_is_none():
    assert reply(result=TASK, jsonrpc=b'"2.0"', error=b'{"code":-32001}').error
    assert reply(result=TASK, error=b"null").payload


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b'{"jsonrpc":"2.0","id":1}',
        b'{"result":null}',
        b'{"result":[]}',
        b'{"result":"x"}',
        b'{"error":"boom"}',
        b'{"jsonrpc":"2.0","error":{"message":"no code"}}',
        b'{"error":{"code":404,"message":"not JSON-RPC"}}',
        b'{"result":{},"result":{}}',
        b'{"result":{"a":"\xff"}}',
        b'{"result":' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"result":{"id":"t-1"}',
        '{"result":{}}'.encode("utf-16"),
    ],
)
def test_what_is_no_reply_is_malformed_or_known_by_its_status(body):
    good, bad = read_reply(GET, head(200), body), read_reply(GET, head(502), body)

    assert good.malformed
    assert good.payload is None
    assert good.error is None
    assert bad.plain is not None
    assert bad.error is None


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("SendMessage", b"{}"),
        ("SendMessage", b'{"task":null}'),
        ("SendMessage", b'{"task":{},"task":{}}'),
        ("SubscribeToTask", b"{}"),
        ("GetTaskPushNotificationConfig", b'{"tenant":"a","tenant":"b"}'),
        ("ListTaskPushNotificationConfigs", b'{"configs":{}}'),
        ("ListTaskPushNotificationConfigs", b'{"configs":[1]}'),
        ("ListTaskPushNotificationConfigs", b'{"configs":[{"tenant":"a","tenant":"b"}]}'),
    ],
)
def test_results_that_nobody_could_use(operation, result):
    assert reply(OPERATIONS[operation], result=result).malformed


@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("SendMessage", b'{"task":{"id":"t"}}'),
        ("SendMessage", b'{"id":"t-1","kind":"task"}'),  # moved, not re-modelled
        ("SendMessage", b'{"future":{}}'),
        ("ListTaskPushNotificationConfigs", b"{}"),
        ("ListTaskPushNotificationConfigs", b'{"configs":null}'),
        ("ListTaskPushNotificationConfigs", b'{"configs":[{"id":"c"}]}'),
    ],
)
def test_results_that_pass(operation, result):
    assert reply(OPERATIONS[operation], result=result).payload == Payload(Form.JSON, result)


@pytest.mark.parametrize(("coding", "read"), [("gzip", False), ("Identity", True), ("br", False)])
def test_a_coding_that_was_not_asked_for(coding, read):
    got = read_reply(GET, head(200, content_encoding=coding), b'{"result":{"id":"t"}}')

    assert bool(got.payload) is read
    assert bool(got.malformed) is not read


@pytest.mark.parametrize(("http", "grpc"), [(401, 16), (403, 7), (429, 8)])
@pytest.mark.parametrize("body", [b"", b'{"jsonrpc":"2.0","error":{"code":-32000,"message":"m"}}'])
def test_authentication_and_limits_keep_their_status(http, grpc, body):
    got = read_reply(GET, head(http, www_authenticate="Bearer"), body)

    record = got.error or got.plain
    assert record is not None
    assert (record.http_status, record.grpc_status) == (http, grpc)
    assert record.headers == [("www-authenticate", "Bearer")]


# --- streams --------------------------------------------------------------------------------------------


def test_events_are_responses():
    reader = jsonrpc.event_reader(OPERATIONS["SendStreamingMessage"], 1000)
    event = b'data: {"jsonrpc":"2.0","id":1,"result":{"task":{"id":"t-1"}}}\r\n\r\n'

    assert reader.feed(event[:20]) == []
    (first,) = reader.feed(event[20:])
    assert first.payload == Payload(Form.JSON, b'{"task":{"id":"t-1"}}')
    assert reader.end() == []


@pytest.mark.parametrize("name", [b"", b"event: error\n"])
def test_an_error_event_is_known_by_its_member(name):
    data = text({"jsonrpc": "2.0", "id": 1, "error": {"code": -32004, "message": "m"}})

    (event,) = jsonrpc.event_reader(SEND, 1000).feed(name + b"data: " + data + b"\n\n")

    assert event.error is not None
    assert event.error.code == -32004


@pytest.mark.parametrize("data", [b"{}", b"x", b'{"result":{}}', b'{"result":{"message":null}}'])
def test_events_that_are_none(data):
    reader = jsonrpc.event_reader(OPERATIONS["SubscribeToTask"], 1000)

    (event,) = reader.feed(b"data: " + data + b"\n\n")

    assert event.malformed
