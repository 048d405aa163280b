"""HTTP+JSON towards an agent: requests in their places, replies read for what they are."""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core import http_json
from sidecar.core.convert import InvalidMessage, NotRepresentable, json_to_proto
from sidecar.core.failover import classify
from sidecar.core.http_json import encode_request, read_reply
from sidecar.core.http_routes import decode_request, route
from sidecar.core.spec import OPERATIONS, Binding
from sidecar.core.types import Facts, Form, Kind, Payload
from tests.core.calls import MESSAGE, REQUESTS, call, head, interface, text

GET = OPERATIONS["GetTask"]
SEND = OPERATIONS["SendMessage"]
SUBSCRIBE = OPERATIONS["SubscribeToTask"]
STREAM = OPERATIONS["SendStreamingMessage"]
DELETE = OPERATIONS["DeleteTaskPushNotificationConfig"]
CONFIGS = OPERATIONS["ListTaskPushNotificationConfigs"]


def sent(operation, data=None, *, path="", tenant="", **more):
    by_get = more.pop("by_get", False)
    return encode_request(
        call(operation, data, **more),
        interface(Binding.HTTP_JSON, path=path, tenant=tenant),
        subscribe_by_get=by_get,
    )


# --- requests ----------------------------------------------------------------------------------

LINES = {
    "SendMessage": ("POST /message:send", MESSAGE),
    "SendStreamingMessage": ("POST /message:stream", MESSAGE),
    "GetTask": ("GET /tasks/t-1", b""),
    "ListTasks": ("GET /tasks", b""),
    "CancelTask": ("POST /tasks/t-1:cancel", b"{}"),
    "SubscribeToTask": ("POST /tasks/t-1:subscribe", b""),
    "CreateTaskPushNotificationConfig": (
        "POST /tasks/t-1/pushNotificationConfigs",
        b'{"taskId":"t-1","url":"https://hook.example"}',
    ),
    "GetTaskPushNotificationConfig": ("GET /tasks/t-1/pushNotificationConfigs/c-1", b""),
    "ListTaskPushNotificationConfigs": ("GET /tasks/t-1/pushNotificationConfigs", b""),
    "DeleteTaskPushNotificationConfig": ("DELETE /tasks/t-1/pushNotificationConfigs/c-1", b""),
    "GetExtendedAgentCard": ("GET /extendedAgentCard", b""),
}


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_is_sent(operation, form):
    data = REQUESTS[operation]
    if form is Form.PROTO:
        data = json_to_proto(OPERATIONS[operation].request, data)

    request = sent(operation, data, form=form)

    line, body = LINES[operation]
    assert f"{request.method} {request.target}" == line
    assert (json.loads(request.body) if request.body else None) == (
        json.loads(body) if body else None
    )
    expected = {
        "accept": "application/json, application/a2a+json",
        "accept-encoding": "identity",
        "a2a-version": "1.0",
    }
    if OPERATIONS[operation].streaming:
        expected["accept"] = "text/event-stream"
    if line.startswith("POST"):
        expected["content-type"] = "application/json"
    assert dict(request.headers) == expected
    assert len(request.headers) == len(expected)


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_base_path_and_tenant_come_before_the_path(operation):
    request = sent(operation, path="/base", tenant="acme/7 ü")

    assert request.target.startswith("/base/acme%2F7%20%C3%BC" + LINES[operation][0].split(" ")[1])


@pytest.mark.parametrize("operation", ["SendMessage", "CreateTaskPushNotificationConfig"])
def test_the_body_passes_as_it_is(operation):
    data = b'{ "taskId":"t-1", "message":{"n":1.50,"\\u0061":1e2},"future":[1 ,2] }'

    assert sent(operation, data).body == data


def test_a_nested_push_configuration_gets_the_interfaces_tenant():
    config = b'{"url":"https://hook.example","tenant":"evil"}'
    data = b'{"message":{},"configuration":{"taskPushNotificationConfig":%b}}' % config

    with_tenant = json.loads(sent("SendMessage", data, tenant="acme").body)
    without = json.loads(sent("SendMessage", data).body)

    assert with_tenant["configuration"]["taskPushNotificationConfig"]["tenant"] == "acme"
    assert "tenant" not in with_tenant
    assert "tenant" not in without["configuration"]["taskPushNotificationConfig"]


def test_what_is_left_of_a_cancel_is_its_body():
    request = sent("CancelTask", b'{"metadata":{"n":1.50},"id":"t-1","future":1}')

    assert request.body == b'{"metadata":{"n":1.50},"future":1}'


def test_a_subscription_may_be_asked_for_by_get():
    request = sent("SubscribeToTask", by_get=True)

    assert (request.method, request.target) == ("GET", "/tasks/t-1:subscribe")
    assert "content-type" not in dict(request.headers)


@pytest.mark.parametrize(
    ("id_", "segment"),
    [
        ("a/b", "a%2Fb"),
        ("a%2Fb", "a%252Fb"),
        ("a b", "a%20b"),
        ("é", "%C3%A9"),
        ("100%", "100%25"),
        ("user:42", "user%3A42"),
        ("a?b#c", "a%3Fb%23c"),
        ("a+b&c=d", "a%2Bb%26c%3Dd"),
        ("...", "..."),
        ("job:cancel", "job%3Acancel"),
    ],
)
def test_an_id_is_one_segment(id_, segment):
    assert sent("GetTask", text({"id": id_})).target == f"/tasks/{segment}"
    assert sent("CancelTask", text({"id": id_})).target == f"/tasks/{segment}:cancel"


@pytest.mark.parametrize("id_", ["", ".", "..", "a\0", "a\nb", 5, None, ["x"]])
@pytest.mark.parametrize(
    ("operation", "field"),
    [("GetTask", "id"), ("CancelTask", "id"), ("ListTaskPushNotificationConfigs", "taskId")],
)
def test_ids_that_cannot_stand_in_a_path(operation, field, id_):
    with pytest.raises(InvalidMessage, match=f"^{field} must"):
        sent(operation, text({field: id_}))


def test_a_get_that_would_be_taken_for_a_subscription():
    with pytest.raises(NotRepresentable, match="subscribe"):
        sent("GetTask", b'{"id":"t-1:subscribe"}')
    assert sent("CancelTask", b'{"id":"t-1:subscribe"}').target == "/tasks/t-1%3Asubscribe:cancel"


def query(operation, members):
    target = sent(operation, text(members)).target
    return parse_qsl(target.partition("?")[2], keep_blank_values=True)


@pytest.mark.parametrize(
    ("members", "pairs"),
    [
        ({"historyLength": 0}, [("historyLength", "0")]),
        ({"history_length": 5}, [("historyLength", "5")]),
        ({"historyLength": None}, []),
        ({"pageSize": "10"}, [("pageSize", "10")]),
        ({"pageSize": 10.0}, [("pageSize", "10")]),
        ({"pageSize": 1.5}, [("pageSize", "1.5")]),  # the agent says what is wrong with it
        ({"pageToken": "ab+c/=="}, [("pageToken", "ab+c/==")]),
        ({"pageToken": "", "contextId": ""}, []),
        ({"contextId": "é &"}, [("contextId", "é &")]),
        ({"includeArtifacts": False}, [("includeArtifacts", "false")]),
        ({"includeArtifacts": True}, [("includeArtifacts", "true")]),
        ({"status": "TASK_STATE_WORKING"}, [("status", "TASK_STATE_WORKING")]),
        ({"status": 2}, [("status", "TASK_STATE_WORKING")]),
        ({"status": "3"}, [("status", "TASK_STATE_COMPLETED")]),
        ({"status": -1}, [("status", "-1")]),
        ({"status": 99}, [("status", "99")]),
        ({"status": "²"}, [("status", "²")]),
        ({"status": "--1"}, [("status", "--1")]),
        (
            {"statusTimestampAfter": "2026-01-01T00:00:00+02:00"},
            [("statusTimestampAfter", "2026-01-01T00:00:00+02:00")],
        ),
        ({"future": 1.5, "other": {"a": 1}}, [("future", "1.5")]),
    ],
)
def test_the_query_of_a_list(members, pairs):
    assert query("ListTasks", members) == pairs


def test_plus_and_blank_are_escaped():
    assert sent("ListTasks", b'{"pageToken":"a+b c"}').target == "/tasks?pageToken=a%2Bb%20c"


def test_the_defaults_of_a_push_list_stay_out():
    base = {"taskId": "t"}

    assert query("ListTaskPushNotificationConfigs", base | {"pageSize": 0, "pageToken": ""}) == []
    assert query("ListTaskPushNotificationConfigs", base | {"pageSize": 2}) == [("pageSize", "2")]


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_a_field_that_fits_no_query_is_not_lost_in_silence(value):
    with pytest.raises(InvalidMessage, match="historyLength must not"):
        sent("GetTask", text({"id": "t", "historyLength": value}))


@pytest.mark.parametrize("data", [b'{"id":"t","historyLength":"\\ud800"}', b'{"id":"a","id":"b"}'])
def test_what_cannot_be_taken_apart_cannot_be_sent(data):
    with pytest.raises(InvalidMessage):
        sent("GetTask", data)


ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda value: value not in {".", "..", "tasks"} and not value.endswith(":subscribe")
)


@given(ids, ids, st.integers(0, 2**31 - 1))
def test_what_is_sent_reads_back(task_id, config_id, number):
    messages = {
        "GetTask": {"id": task_id, "historyLength": number},
        "CancelTask": {"id": task_id, "metadata": {"k": number}},
        "SubscribeToTask": {"id": task_id},
        "GetTaskPushNotificationConfig": {"taskId": task_id, "id": config_id},
        "ListTaskPushNotificationConfigs": {"taskId": task_id, "pageToken": config_id},
        "ListTasks": {"contextId": task_id, "pageSize": number, "includeArtifacts": False},
    }
    for operation, message in messages.items():
        for tenant in ("", task_id):
            request = sent(operation, text(message), tenant=tenant)
            path, _, query_string = request.target.partition("?")
            found = route(request.method, path)
            inbound = decode_request(found, query_string, request.body)
            assert found.operation.name == operation
            assert json.loads(inbound.payload.data) == message
            assert inbound.tenant == tenant
            assert unquote(path).count(task_id) >= (1 if operation != "ListTasks" else bool(tenant))


# --- replies -------------------------------------------------------------------------------------

TASK = b'{"id":"t-1","status":{"state":"TASK_STATE_COMPLETED"}, "x":1.50}'
INFO = {
    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
    "reason": "TASK_NOT_FOUND",
    "domain": "a2a-protocol.org",
    "metadata": {},
}


def error_body(code, status, details=(), message="m"):
    return text(
        {"error": {"code": code, "status": status, "message": message, "details": list(details)}}
    )


@pytest.mark.parametrize("status", [200, 201, 202, 203])
@pytest.mark.parametrize("content_type", ["application/a2a+json", "application/json", ""])
def test_a_result_is_the_very_bytes(status, content_type):
    read = read_reply(GET, head(status, content_type), b" \n" + TASK + b"\r\n")

    assert read.payload == Payload(Form.JSON, TASK)


@pytest.mark.parametrize(
    ("status", "body"), [(204, b""), (200, b"{}"), (200, b""), (200, b"null"), (202, b"{}")]
)
def test_every_form_of_a_deletion(status, body):
    assert read_reply(DELETE, head(status), body).payload == Payload(Form.JSON, b"{}")


def test_a_bare_array_of_push_configurations():
    read = read_reply(CONFIGS, head(), b'[{"id":"c"} , {"id":"d"}]')

    assert read.payload is not None
    assert json.loads(read.payload.data) == {"configs": [{"id": "c"}, {"id": "d"}]}


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (GET, b""),
        (GET, b"null"),
        (GET, b"[]"),
        (GET, b"<html>"),
        (GET, b'{"id":"t-1"'),
        (GET, b'{"id":"\xff"}'),
        (GET, b'{"id":"a","id":"b"}'),
        (GET, b"[" * 100_000),
        (SEND, b"{}"),
        (SEND, b'{"task":null,"message":null}'),
        (SEND, b'{"task":{},"task":{}}'),
        (CONFIGS, b"[1]"),
        (CONFIGS, b"[{}"),
        (CONFIGS, b'{"configs":"x"}'),
        (DELETE, b'{"error":'),
    ],
)
def test_a_success_that_is_none(operation, body):
    read = read_reply(operation, head(), body)

    assert read.malformed
    assert (read.payload, read.error, read.plain) == (None, None, None)


def test_a_coding_that_was_not_asked_for():
    assert read_reply(GET, head(content_encoding="gzip"), TASK).malformed
    assert read_reply(GET, head(content_encoding="IDENTITY"), TASK).payload


@pytest.mark.parametrize("status", [200, 400, 404, 409, 415, 501, 502])
def test_an_error_info_makes_it_an_a2a_error_at_any_status(status):
    read = read_reply(SEND, head(status), error_body(status, "X", [INFO]))

    assert read.error is not None
    assert (read.error.code, read.payload, read.http_status) == (-32001, None, status)


def test_a_field_called_error_in_a_result_is_no_error():
    body = b'{"task":{"id":"t"},"error":{"code":1}}'

    assert read_reply(SEND, head(), body).payload == Payload(Form.JSON, body)


@pytest.mark.parametrize("body", [b"Not Found", b"", b"{}", b'{"detail":"Not Found"}', b"\xff"])
def test_a_404_without_an_a2a_error_is_known_by_its_status(body):
    read = read_reply(GET, head(404, "text/plain"), body)

    assert read.error is None
    assert read.plain is not None
    assert read.plain.http_status == 404


def test_the_agents_own_error_object_is_kept_for_the_caller():
    body = error_body(401, "UNAUTHENTICATED", message="who are you")

    read = read_reply(SEND, head(401, www_authenticate="Bearer"), body)

    assert read.plain is not None
    assert (read.plain.message, read.plain.grpc_status) == ("who are you", 16)
    assert read.plain.headers == [("www-authenticate", "Bearer")]


# --- streams --------------------------------------------------------------------------------------


def events(operation, *chunks):
    reader = http_json.event_reader(operation, 10_000)
    found = [reply for chunk in chunks for reply in reader.feed(chunk)]
    return found + reader.end()


def kind_of(reply, operation):
    return classify(
        Facts(
            binding=Binding.HTTP_JSON,
            operation=operation,
            http_status=reply.http_status,
            error=reply.error,
            malformed=reply.malformed,
        )
    ).kind


def test_events_are_bare():
    first, second = events(
        STREAM,
        b': ping\r\n\r\ndata: {"task":{"id":"t-1"}}\r\n',
        b'\r\ndata: {"statusUpdate":\ndata: {}}',
    )

    assert first.payload == Payload(Form.JSON, b'{"task":{"id":"t-1"}}')
    assert second.payload == Payload(Form.JSON, b'{"statusUpdate":\n{}}')


@pytest.mark.parametrize("name", [b"", b"event: error\n"])
def test_an_error_event(name):
    (event,) = events(STREAM, name + b"data: " + error_body(404, "NOT_FOUND", [INFO]) + b"\n\n")

    assert event.error is not None
    assert (event.error.code, event.http_status) == (-32001, 404)


@pytest.mark.parametrize(
    ("operation", "data", "kind"),
    [
        # The agent has opened the stream: no endpoint is wrong any more.
        (STREAM, error_body(404, "NOT_FOUND"), Kind.ANSWERED),
        (STREAM, error_body(405, "UNIMPLEMENTED"), Kind.ANSWERED),
        (STREAM, error_body(429, "RESOURCE_EXHAUSTED"), Kind.ANSWERED),
        (SUBSCRIBE, error_body(404, "NOT_FOUND"), Kind.ANSWERED),
        (STREAM, error_body(500, "INTERNAL"), Kind.ANSWERED),
        (STREAM, error_body(503, "UNAVAILABLE"), Kind.AMBIGUOUS),
        (STREAM, error_body(200, "X"), Kind.AMBIGUOUS),
        (STREAM, b'{"error":"boom"}', Kind.AMBIGUOUS),
        (STREAM, b'{"error":{}}', Kind.AMBIGUOUS),
        (STREAM, b'{"message":"boom"}', Kind.AMBIGUOUS),
        (STREAM, b"boom", Kind.AMBIGUOUS),
        (STREAM, b"[]", Kind.AMBIGUOUS),
    ],
)
def test_an_error_event_of_any_form_ends_the_stream(operation, data, kind):
    (event,) = events(operation, b"event: error\ndata: " + data + b"\n\n")

    assert event.payload is None
    assert kind_of(event, operation) is kind


def test_a_null_error_is_none():
    (event,) = events(STREAM, b'data: {"error":null,"task":{"id":"t"}}\n\n')

    assert event.payload


@pytest.mark.parametrize("data", [b"{}", b'{"task":null}', b"x", b"[]", b'{"task":"\xff"}'])
def test_events_that_are_none(data):
    (event,) = events(STREAM, b"data: " + data + b"\n\n")

    assert event.malformed
