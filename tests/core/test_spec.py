"""The copied facts, against the tables of the specification."""

from __future__ import annotations

import re

import pytest

from sidecar._pb import a2a_pb2
from sidecar.core import spec

# name: request, response, verb, path, query, body, streaming
OPERATIONS = {
    "SendMessage": ("SendMessageRequest", "SendMessageResponse", "POST /message:send"),
    "SendStreamingMessage": ("SendMessageRequest", "StreamResponse", "POST /message:stream"),
    "GetTask": ("GetTaskRequest", "Task", "GET /tasks/{id}"),
    "ListTasks": ("ListTasksRequest", "ListTasksResponse", "GET /tasks"),
    "CancelTask": ("CancelTaskRequest", "Task", "POST /tasks/{id}:cancel"),
    "SubscribeToTask": ("SubscribeToTaskRequest", "StreamResponse", "POST /tasks/{id}:subscribe"),
    "CreateTaskPushNotificationConfig": (
        "TaskPushNotificationConfig",
        "TaskPushNotificationConfig",
        "POST /tasks/{taskId}/pushNotificationConfigs",
    ),
    "GetTaskPushNotificationConfig": (
        "GetTaskPushNotificationConfigRequest",
        "TaskPushNotificationConfig",
        "GET /tasks/{taskId}/pushNotificationConfigs/{id}",
    ),
    "ListTaskPushNotificationConfigs": (
        "ListTaskPushNotificationConfigsRequest",
        "ListTaskPushNotificationConfigsResponse",
        "GET /tasks/{taskId}/pushNotificationConfigs",
    ),
    "DeleteTaskPushNotificationConfig": (
        "DeleteTaskPushNotificationConfigRequest",
        "google.protobuf.Empty",
        "DELETE /tasks/{taskId}/pushNotificationConfigs/{id}",
    ),
    "GetExtendedAgentCard": (
        "GetExtendedAgentCardRequest",
        "AgentCard",
        "GET /extendedAgentCard",
    ),
}
ALL = list(spec.OPERATIONS.values())
by_name = pytest.mark.parametrize("operation", ALL, ids=lambda operation: operation.name)


def test_the_eleven_operations():
    assert {
        name: (one.request, one.response, f"{one.verb} {one.path}")
        for name, one in spec.OPERATIONS.items()
    } == OPERATIONS


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("streaming", {"SendStreamingMessage", "SubscribeToTask"}),
        ("sends", {"SendMessage", "SendStreamingMessage"}),
        ("void", {"DeleteTaskPushNotificationConfig"}),
        (
            "names_task",
            {"GetTask", "CancelTask", "SubscribeToTask"}
            | {name for name in OPERATIONS if "PushNotificationConfig" in name},
        ),
        (
            "has_body",
            {"SendMessage", "SendStreamingMessage", "CancelTask"}
            | {"CreateTaskPushNotificationConfig"},
        ),
    ],
)
def test_what_operations_are(flag, names):
    assert {one.name for one in ALL if getattr(one, flag)} == names


@by_name
def test_path_and_query_name_fields_of_the_request(operation):
    fields = {
        field.json_name
        for field in getattr(a2a_pb2, operation.request).DESCRIPTOR.fields_by_name.values()
    }

    assert list(operation.path_fields) == re.findall(r"{(\w+)}", operation.path)
    assert set(operation.path_fields) | set(operation.query) <= fields
    if operation.verb == "GET":  # nothing but the tenant would be lost
        assert fields - {"tenant"} == set(operation.path_fields) | set(operation.query)


@by_name
def test_operations_are_those_of_the_service(operation):
    service = a2a_pb2.DESCRIPTOR.services_by_name["A2AService"]

    assert service.full_name == spec.GRPC_SERVICE
    method = service.methods_by_name[operation.name]
    assert method.input_type.name == operation.request
    assert operation.response in {method.output_type.name, method.output_type.full_name}
    assert method.server_streaming is operation.streaming
    assert len(service.methods) == len(ALL)


# Sections 5.4 and 3.3.2, with the statuses of 1.0.1.
ERRORS = """
TaskNotFoundError                    -32001  404  NOT_FOUND
TaskNotCancelableError               -32002  400  FAILED_PRECONDITION
PushNotificationNotSupportedError    -32003  400  FAILED_PRECONDITION
UnsupportedOperationError            -32004  400  FAILED_PRECONDITION
ContentTypeNotSupportedError         -32005  400  INVALID_ARGUMENT
InvalidAgentResponseError            -32006  500  INTERNAL
ExtendedAgentCardNotConfiguredError  -32007  400  FAILED_PRECONDITION
ExtensionSupportRequiredError        -32008  400  FAILED_PRECONDITION
VersionNotSupportedError             -32009  400  FAILED_PRECONDITION
InvalidRequestError                  -32600  400  INVALID_ARGUMENT
MethodNotFoundError                  -32601  404  UNIMPLEMENTED
InvalidParamsError                   -32602  400  INVALID_ARGUMENT
InternalError                        -32603  500  INTERNAL
JSONParseError                       -32700  400  INVALID_ARGUMENT
"""


def test_the_error_table():
    rows = {
        (error.name, str(error.code), str(error.http_status), name)
        for error in spec.ERRORS
        for name in [spec.GRPC_STATUS_NAMES[error.grpc_status]]
    }

    assert rows == {tuple(line.split()) for line in ERRORS.strip().splitlines()}


@pytest.mark.parametrize("error", spec.ERRORS[:9], ids=lambda error: error.name)
def test_an_a2a_reason_is_the_class_name_in_upper_snake(error):
    words = re.findall("[A-Z][a-z]+", error.name.removesuffix("Error"))

    assert error.reason == "_".join(words).upper()


def test_errors_are_found_by_each_of_their_names():
    for error in spec.ERRORS:
        assert spec.ERROR_BY_CODE[error.code] is error
        assert spec.ERROR_BY_NAME[error.name] is error
        assert spec.ERROR_BY_REASON[error.reason] is error
    assert set(spec.REASON_ALIASES).isdisjoint(error.reason for error in spec.ERRORS)


def test_grpc_statuses_by_name_and_as_http():
    names = {name: number for number, name in enumerate(spec.GRPC_STATUS_NAMES)}

    assert names == spec.GRPC_STATUS_BY_NAME
    assert {name: spec.HTTP_STATUS_OF_GRPC[number] for name, number in names.items()} == {
        "OK": 200,
        "CANCELLED": 499,
        "UNKNOWN": 500,
        "INVALID_ARGUMENT": 400,
        "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404,
        "ALREADY_EXISTS": 409,
        "PERMISSION_DENIED": 403,
        "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 400,
        "ABORTED": 409,
        "OUT_OF_RANGE": 400,
        "UNIMPLEMENTED": 501,
        "INTERNAL": 500,
        "UNAVAILABLE": 503,
        "DATA_LOSS": 500,
        "UNAUTHENTICATED": 401,
    }


@pytest.mark.parametrize(
    ("http", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "NOT_FOUND"),
        (409, "ABORTED"),
        (429, "RESOURCE_EXHAUSTED"),
        (499, "CANCELLED"),
        (500, "INTERNAL"),
        (501, "UNIMPLEMENTED"),
        (503, "UNAVAILABLE"),
        (504, "DEADLINE_EXCEEDED"),
    ],
)
def test_http_statuses_as_grpc(http, name):
    assert spec.GRPC_STATUS_NAMES[spec.GRPC_STATUS_OF_HTTP[http]] == name


def test_task_states_are_numbered_as_in_the_protocol():
    assert dict(a2a_pb2.TaskState.items()) == {
        name: number for number, name in enumerate(spec.TASK_STATES)
    }
    settled = spec.TERMINAL_STATES | spec.INTERRUPTED_STATES
    assert set(spec.TASK_STATES) - settled == {
        "TASK_STATE_UNSPECIFIED",
        "TASK_STATE_SUBMITTED",
        "TASK_STATE_WORKING",
    }
    assert spec.TERMINAL_STATES.isdisjoint(spec.INTERRUPTED_STATES)


def test_names_on_the_wire():
    assert [str(binding) for binding in spec.Binding] == ["JSONRPC", "HTTP+JSON", "GRPC"]
    assert [binding.label for binding in spec.Binding] == ["jsonrpc", "http_json", "grpc"]
    assert str(spec.Version.V1_0) == "1.0"
