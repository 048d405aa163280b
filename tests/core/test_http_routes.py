"""HTTP+JSON from the application: what a path, a query and a body mean."""

from __future__ import annotations

import json

import pytest

from sidecar.core.http_routes import (
    Refused,
    check_content_type,
    decode_request,
    route,
    version_in_query,
)
from sidecar.core.spec import OPERATIONS
from sidecar.core.types import Form

# --- routes ------------------------------------------------------------------------------------

ROUTES = [
    ("POST", "/message:send", "SendMessage", {}),
    ("POST", "/message%3Asend", "SendMessage", {}),
    ("POST", "/message:stream", "SendStreamingMessage", {}),
    ("GET", "/tasks", "ListTasks", {}),
    ("GET", "/tasks/t-1", "GetTask", {"id": "t-1"}),
    ("POST", "/tasks/t-1:cancel", "CancelTask", {"id": "t-1"}),
    ("POST", "/tasks/t-1%3acancel", "CancelTask", {"id": "t-1"}),
    ("POST", "/tasks/t-1:subscribe", "SubscribeToTask", {"id": "t-1"}),
    ("GET", "/tasks/t-1:subscribe", "SubscribeToTask", {"id": "t-1"}),
    ("GET", "/extendedAgentCard", "GetExtendedAgentCard", {}),
]
PUSH = "/tasks/t-1/pushNotificationConfigs"
ROUTES += [
    ("POST", PUSH, "CreateTaskPushNotificationConfig", {"taskId": "t-1"}),
    ("GET", PUSH, "ListTaskPushNotificationConfigs", {"taskId": "t-1"}),
    ("GET", PUSH + "/", "ListTaskPushNotificationConfigs", {"taskId": "t-1"}),
    ("GET", PUSH + "/c", "GetTaskPushNotificationConfig", {"taskId": "t-1", "id": "c"}),
    ("DELETE", PUSH + "/c", "DeleteTaskPushNotificationConfig", {"taskId": "t-1", "id": "c"}),
]


@pytest.mark.parametrize(("tenant", "decoded"), [("", ""), ("/acme", "acme"), ("/a%2Fb", "a/b")])
@pytest.mark.parametrize(("method", "path", "operation", "values"), ROUTES)
def test_every_route_with_and_without_a_tenant(method, path, operation, values, tenant, decoded):
    found = route(method, tenant + path)

    assert (found.operation.name, found.path_values, found.tenant) == (operation, values, decoded)


def test_every_operation_has_a_route():
    assert {operation for _, _, operation, _ in ROUTES} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "operation", "id_"),
    [
        ("GET", "/tasks/user:42", "GetTask", "user:42"),
        ("POST", "/tasks/user:42:cancel", "CancelTask", "user:42"),
        ("POST", "/tasks/a:subscribe:cancel", "CancelTask", "a:subscribe"),
        ("GET", "/tasks/job:cancel", "GetTask", "job:cancel"),
        ("GET", "/tasks/:cancel", "GetTask", ":cancel"),
        ("GET", "/tasks/a%2Fb", "GetTask", "a/b"),
        ("GET", "/tasks/a%252Fb", "GetTask", "a%2Fb"),
        ("GET", "/tasks/a%20b", "GetTask", "a b"),
        ("GET", "/tasks/%C3%A9", "GetTask", "é"),
        ("GET", "/tasks/100%25", "GetTask", "100%"),
        ("GET", "/tasks/a+b", "GetTask", "a+b"),
        ("GET", "/tasks/tasks", "GetTask", "tasks"),
        ("POST", "/tasks/a%3Ab:cancel", "CancelTask", "a:b"),
    ],
)
def test_an_id_is_decoded_once_and_may_hold_anything(method, path, operation, id_):
    found = route(method, path)

    assert (found.operation.name, found.path_values) == (operation, {"id": id_})


@pytest.mark.parametrize(
    "path",
    [
        "/tasks/100%",
        "/tasks/%zz",
        "/tasks/a%00b",
        "/tasks/%ff",
        "/tasks/%2E%2e",
        "/tasks/.",
        "/tasks/",
        "/t%/tasks",
        "/tasks/a%0Ab:cancel",
    ],
)
def test_ids_that_are_refused(path):
    method = "POST" if path.endswith(":cancel") else "GET"
    with pytest.raises(Refused) as caught:
        route(method, path)
    assert (caught.value.status, caught.value.record.code) == (400, -32602)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/tasks/x:frobnicate", 405),
        ("POST", "/tasks/:cancel", 405),
        ("DELETE", "/tasks/x", 405),
        ("POST", "/tasks", 405),
        ("GET", "/message:send", 405),
        ("PUT", "/acme/message:send", 405),
        ("DELETE", PUSH, 405),
        ("PUT", PUSH + "/c", 405),
        ("GET", "/", 404),
        ("GET", "", 404),
        ("POST", "/v1/message:send/", 404),
        ("POST", "/a/b/message:send", 404),
        ("GET", "/tasks/a/b", 404),
        ("GET", PUSH + "/c/d", 404),
        ("GET", "/.well-known/agent.json", 404),
    ],
)
def test_what_is_no_route(method, path, status):
    with pytest.raises(Refused) as caught:
        route(method, path)
    assert (caught.value.status, caught.value.record.reason) == (status, "METHOD_NOT_FOUND")


# --- content types --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["application/a2a+json", "application/json; charset=utf-8", "APPLICATION/JSON", None, ""],
)
def test_types_of_bodies(value):
    check_content_type([] if value is None else [("content-type", value)])


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", "text/plain")],
        [("content-type", "application/x-www-form-urlencoded")],
        [("content-type", "application/problem+json")],
        [("content-type", "application/json"), ("content-encoding", "gzip")],
    ],
)
def test_other_bodies_are_415(headers):
    with pytest.raises(Refused) as caught:
        check_content_type(headers)
    assert (caught.value.status, caught.value.record.code) == (415, -32600)


# --- requests ----------------------------------------------------------------------------------------


def decoded(method, target, body=b""):
    path, _, query = target.partition("?")
    inbound = decode_request(route(method, path), query, body)
    assert inbound.payload.form is Form.JSON
    return inbound


def members(method, target, body=b""):
    return json.loads(decoded(method, target, body).payload.data)


def refusal(method, target, body=b""):
    with pytest.raises(Refused) as caught:
        decoded(method, target, body)
    return caught.value.status, caught.value.record.code, str(caught.value)


def test_a_body_passes_as_it_is():
    body = b'{ "message": {"n":1.50,"x-future":{"a":1e2}},"top":[1 ,2] }'

    assert decoded("POST", "/message:send", b" " + body + b"\n").payload.data == body


@pytest.mark.parametrize("body", [b"", b" ", b"null", b"{}"])
def test_an_empty_body_is_an_empty_request(body):
    assert members("POST", "/tasks/t:cancel", body) == {"id": "t"}
    assert members("POST", "/message:send", body) == {}


@pytest.mark.parametrize("body", [b"null", b"{", b'{"id":"other"}'])
@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/tasks/t", {"id": "t"}),
        ("POST", "/tasks/t:subscribe", {"id": "t"}),
        ("DELETE", PUSH + "/c", {"taskId": "t-1", "id": "c"}),
    ],
)
def test_bodies_where_none_belongs_are_ignored(method, path, expected, body):
    assert members(method, path, body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"taskId": "other", "url": "u"}, {"taskId": "t-1", "url": "u"}),
        ({"task_id": "other", "url": "u", "id": "c"}, {"taskId": "t-1", "url": "u", "id": "c"}),
    ],
)
def test_the_path_wins(body, expected):
    assert members("POST", PUSH, json.dumps(body).encode()) == expected


@pytest.mark.parametrize(
    ("target", "body", "tenant"),
    [
        ("/message:send", {"message": {}, "tenant": "b"}, "b"),
        ("/acme/message:send", {"message": {}}, "acme"),
        ("/acme/message:send", {"message": {}, "tenant": "b"}, "acme"),
        ("/message:send", {"message": {}, "tenant": ""}, ""),
    ],
)
def test_the_tenant_is_taken_out(target, body, tenant):
    inbound = decoded("POST", target, json.dumps(body).encode())

    assert (inbound.tenant, json.loads(inbound.payload.data)) == (tenant, {"message": {}})


def test_a_list_with_everything():
    target = (
        "/tasks?historyLength=0&pageSize=1&pageToken=ab%2Bc%2F%3D%3D&status=TASK_STATE_WORKING"
        "&includeArtifacts=true&statusTimestampAfter=2026-01-01T00:00:00%2B02:00"
    )

    assert members("GET", target) == {
        "historyLength": 0,
        "pageSize": 1,
        "pageToken": "ab+c/==",
        "status": "TASK_STATE_WORKING",
        "includeArtifacts": True,
        "statusTimestampAfter": "2026-01-01T00:00:00+02:00",
    }


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("page_size=5", {"pageSize": 5}),
        ("pageSize=007", {"pageSize": 7}),
        ("historyLength=%205", {"historyLength": 5}),
        ("pageToken=a+b", {"pageToken": "a+b"}),
        ("pageToken=", {"pageToken": ""}),
        ("contextId=%C3%A9%26", {"contextId": "é&"}),
        ("includeArtifacts=false", {"includeArtifacts": False}),
        ("status=2", {"status": "TASK_STATE_WORKING"}),
        ("lastUpdatedAfter=x", {"statusTimestampAfter": "x"}),
        ("unknownParam=1&tenant=x&A2A-Version=1.0", {}),
        ("unknownParam=%", {}),
        ("&&", {}),
    ],
)
def test_query_parameters(query, expected):
    assert members("GET", f"/tasks?{query}") == expected


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("pageSize=abc", "pageSize"),
        ("pageSize=", "pageSize"),
        ("pageSize=1.5", "pageSize"),
        ("pageSize=%C2%B2", "pageSize"),
        ("pageSize=2147483648", "pageSize"),
        ("pageSize=99999999999999999999", "pageSize"),
        ("historyLength=-1", "historyLength"),
        ("includeArtifacts=True", "includeArtifacts"),
        ("includeArtifacts=", "includeArtifacts"),
        ("status=working", "status"),
        ("status=", "status"),
        ("status=9", "status"),
        ("status=%C2%B2", "status"),
        ("pageSize=1&pageSize=2", "pageSize"),
        ("pageSize=1&page_size=1", "pageSize"),
        ("pageToken=100%", "pageToken"),
        ("pageToken=%ff", "pageToken"),
    ],
)
def test_query_parameters_that_are_refused_by_name(query, field):
    status, code, message = refusal("GET", f"/tasks?{query}")

    assert (status, code) == (400, -32602)
    assert field in message


def test_the_query_belongs_to_the_operation():
    assert members("GET", "/tasks/t?historyLength=0&pageSize=x") == {"id": "t", "historyLength": 0}
    assert members("POST", "/tasks/t:cancel?historyLength=1") == {"id": "t"}
    assert members("GET", PUSH + "?pageSize=3&pageToken=x") == {
        "taskId": "t-1",
        "pageSize": 3,
        "pageToken": "x",
    }


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"<html>", -32700),
        (b'{"a":"\xff"}', -32700),
        (b"[" * 100_000, -32700),
        (b'{"a":' * 10_000, -32700),
        ("{}".encode("utf-16"), -32700),
        (b'{"a":NaN}', -32700),
        (b"[]", -32600),
        (b"5", -32600),
        (b'{"message":{},"message":{}}', -32600),
        (b'{"tenant":"a","tenant":"b"}', -32600),
        (b'{"message":{"taskId":"a","taskId":"b"}}', -32600),
        (b'{"message":{"taskId":"a","task_id":"b"}}', -32600),
        (b'{"tenant":5}', -32600),
    ],
)
@pytest.mark.parametrize("target", ["/message:send", "/acme/message:stream"])
def test_bodies_that_are_refused(target, body, code):
    status, found, _ = refusal("POST", target, body)

    assert (status, found) == (400, code)


@pytest.mark.parametrize(
    ("query", "version"),
    [
        ("A2A-Version=1.0", "1.0"),
        ("historyLength=2&a2a-version=0.3", "0.3"),
        ("x=A2A-Version", ""),
        ("", ""),
        ("A2A-Version=1%2E0", "1.0"),
    ],
)
def test_the_version_in_the_query(query, version):
    assert version_in_query(query) == version
