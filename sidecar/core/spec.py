"""What is copied from the A2A specification: operations, errors, header names, versions.

Section numbers are those of specification 1.0.1. Nothing here decides anything.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Binding(StrEnum):
    """How A2A is spoken on an interface (section 5); the spelling is that of the card."""

    JSONRPC = "JSONRPC"
    HTTP_JSON = "HTTP+JSON"
    GRPC = "GRPC"

    @property
    def label(self) -> str:
        """The lower-case name used in interface labels: ``jsonrpc``, ``http_json``, ``grpc``."""
        return _BINDING_LABELS[self]


_BINDING_LABELS = {
    Binding.JSONRPC: "jsonrpc",
    Binding.HTTP_JSON: "http_json",
    Binding.GRPC: "grpc",
}


class Version(Enum):
    """A protocol version this sidecar speaks, as Major.Minor (section 3.6)."""

    V1_0 = (1, 0)

    def __str__(self) -> str:
        return f"{self.value[0]}.{self.value[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One of the eleven A2A operations (sections 3.1, 5.3)."""

    name: str
    """The JSON-RPC method and the gRPC method."""
    request: str
    """Request message, without its package."""
    response: str
    """Response message, without its package; of a stream, of each event."""
    verb: str
    """HTTP+JSON method."""
    path: str
    """HTTP+JSON path below the interface url and the tenant segment."""
    query: tuple[str, ...] = ()
    """Fields of the request that travel in the query string."""
    has_body: bool = False
    """Whether the rest of the request travels as an HTTP+JSON body."""
    streaming: bool = False
    sends: bool = False
    """SendMessage and SendStreamingMessage: a second execution is a second piece of work."""
    names_task: bool = False
    """The request names an existing task, so a 404 may be about that task."""
    void: bool = False
    """The result is google.protobuf.Empty: ``null`` on JSON-RPC, ``{}`` on HTTP+JSON."""

    @property
    def path_fields(self) -> tuple[str, ...]:
        """JSON names of the fields in `path`, in order."""
        return tuple(part[1:].split("}")[0] for part in self.path.split("/") if part[:1] == "{")


SEND_MESSAGE = Operation(
    name="SendMessage",
    request="SendMessageRequest",
    response="SendMessageResponse",
    verb="POST",
    path="/message:send",
    has_body=True,
    sends=True,
)
SEND_STREAMING_MESSAGE = Operation(
    name="SendStreamingMessage",
    request="SendMessageRequest",
    response="StreamResponse",
    verb="POST",
    path="/message:stream",
    has_body=True,
    streaming=True,
    sends=True,
)
GET_TASK = Operation(
    name="GetTask",
    request="GetTaskRequest",
    response="Task",
    verb="GET",
    path="/tasks/{id}",
    query=("historyLength",),
    names_task=True,
)
LIST_TASKS = Operation(
    name="ListTasks",
    request="ListTasksRequest",
    response="ListTasksResponse",
    verb="GET",
    path="/tasks",
    query=(
        "contextId",
        "status",
        "pageSize",
        "pageToken",
        "historyLength",
        "statusTimestampAfter",
        "includeArtifacts",
    ),
)
CANCEL_TASK = Operation(
    name="CancelTask",
    request="CancelTaskRequest",
    response="Task",
    verb="POST",
    path="/tasks/{id}:cancel",
    has_body=True,
    names_task=True,
)
# The proto file says GET, the tables of sections 5.3 and 11.3 and every SDK client say POST.
# We send POST first (405: GET, once, remembered) and serve both.
SUBSCRIBE_TO_TASK = Operation(
    name="SubscribeToTask",
    request="SubscribeToTaskRequest",
    response="StreamResponse",
    verb="POST",
    path="/tasks/{id}:subscribe",
    streaming=True,
    names_task=True,
)
CREATE_PUSH_CONFIG = Operation(
    name="CreateTaskPushNotificationConfig",
    request="TaskPushNotificationConfig",
    response="TaskPushNotificationConfig",
    verb="POST",
    path="/tasks/{taskId}/pushNotificationConfigs",
    has_body=True,
    names_task=True,
)
GET_PUSH_CONFIG = Operation(
    name="GetTaskPushNotificationConfig",
    request="GetTaskPushNotificationConfigRequest",
    response="TaskPushNotificationConfig",
    verb="GET",
    path="/tasks/{taskId}/pushNotificationConfigs/{id}",
    names_task=True,
)
LIST_PUSH_CONFIGS = Operation(
    name="ListTaskPushNotificationConfigs",
    request="ListTaskPushNotificationConfigsRequest",
    response="ListTaskPushNotificationConfigsResponse",
    verb="GET",
    path="/tasks/{taskId}/pushNotificationConfigs",
    query=("pageSize", "pageToken"),
    names_task=True,
)
DELETE_PUSH_CONFIG = Operation(
    name="DeleteTaskPushNotificationConfig",
    request="DeleteTaskPushNotificationConfigRequest",
    response="google.protobuf.Empty",
    verb="DELETE",
    path="/tasks/{taskId}/pushNotificationConfigs/{id}",
    names_task=True,
    void=True,
)
GET_EXTENDED_CARD = Operation(
    name="GetExtendedAgentCard",
    request="GetExtendedAgentCardRequest",
    response="AgentCard",
    verb="GET",
    path="/extendedAgentCard",
)

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        SEND_MESSAGE,
        SEND_STREAMING_MESSAGE,
        GET_TASK,
        LIST_TASKS,
        CANCEL_TASK,
        SUBSCRIBE_TO_TASK,
        CREATE_PUSH_CONFIG,
        GET_PUSH_CONFIG,
        LIST_PUSH_CONFIGS,
        DELETE_PUSH_CONFIG,
        GET_EXTENDED_CARD,
    )
}

# Results that are a oneof: an empty one would be an empty success (A2A 3.1.1, 3.1.2).
WRAPPED = frozenset({"SendMessageResponse", "StreamResponse"})

PROTO_PACKAGE = "lf.a2a.v1"
GRPC_SERVICE = f"{PROTO_PACKAGE}.A2AService"
WELL_KNOWN_CARD = "/.well-known/agent-card.json"

VERSION_HEADER = "a2a-version"
EXTENSIONS_HEADER = "a2a-extensions"

A2A_DOMAIN = "a2a-protocol.org"
"""Domain of the agent's own ErrorInfo (section 9.5, 10.6, 11.6)."""
ERROR_INFO_TYPE = "type.googleapis.com/google.rpc.ErrorInfo"


@dataclass(frozen=True, slots=True)
class ErrorType:
    """One row of the error tables (sections 5.4, 3.3.2): the same error in three bindings."""

    name: str
    code: int
    reason: str
    http_status: int
    grpc_status: int


# A2A errors first (section 5.4, table of 1.0.1), then the JSON-RPC ones the official SDK also names.
ERRORS: tuple[ErrorType, ...] = (
    ErrorType("TaskNotFoundError", -32001, "TASK_NOT_FOUND", 404, 5),
    ErrorType("TaskNotCancelableError", -32002, "TASK_NOT_CANCELABLE", 400, 9),
    ErrorType(
        "PushNotificationNotSupportedError", -32003, "PUSH_NOTIFICATION_NOT_SUPPORTED", 400, 9
    ),
    ErrorType("UnsupportedOperationError", -32004, "UNSUPPORTED_OPERATION", 400, 9),
    ErrorType("ContentTypeNotSupportedError", -32005, "CONTENT_TYPE_NOT_SUPPORTED", 400, 3),
    ErrorType("InvalidAgentResponseError", -32006, "INVALID_AGENT_RESPONSE", 500, 13),
    ErrorType(
        "ExtendedAgentCardNotConfiguredError", -32007, "EXTENDED_AGENT_CARD_NOT_CONFIGURED", 400, 9
    ),
    ErrorType("ExtensionSupportRequiredError", -32008, "EXTENSION_SUPPORT_REQUIRED", 400, 9),
    ErrorType("VersionNotSupportedError", -32009, "VERSION_NOT_SUPPORTED", 400, 9),
    ErrorType("InvalidRequestError", -32600, "INVALID_REQUEST", 400, 3),
    ErrorType("MethodNotFoundError", -32601, "METHOD_NOT_FOUND", 404, 12),
    ErrorType("InvalidParamsError", -32602, "INVALID_PARAMS", 400, 3),
    ErrorType("InternalError", -32603, "INTERNAL_ERROR", 500, 13),
    ErrorType("JSONParseError", -32700, "JSON_PARSE_ERROR", 400, 3),
)

# Spellings of the same reasons in other implementations.
REASON_ALIASES: dict[str, str] = {
    "UNSUPPORTED_CONTENT_TYPE": "CONTENT_TYPE_NOT_SUPPORTED",
    "AUTHENTICATED_EXTENDED_CARD_NOT_CONFIGURED": "EXTENDED_AGENT_CARD_NOT_CONFIGURED",
    "INTERNAL": "INTERNAL_ERROR",
    "JSON_PARSE": "JSON_PARSE_ERROR",
    "PARSE_ERROR": "JSON_PARSE_ERROR",
}

ERROR_BY_CODE: dict[int, ErrorType] = {error.code: error for error in ERRORS}
ERROR_BY_REASON: dict[str, ErrorType] = {error.reason: error for error in ERRORS}
ERROR_BY_REASON.update({alias: ERROR_BY_REASON[reason] for alias, reason in REASON_ALIASES.items()})
ERROR_BY_NAME: dict[str, ErrorType] = {error.name: error for error in ERRORS}

METHOD_NOT_FOUND = ERROR_BY_REASON["METHOD_NOT_FOUND"]
VERSION_NOT_SUPPORTED = ERROR_BY_REASON["VERSION_NOT_SUPPORTED"]
TASK_NOT_FOUND = ERROR_BY_REASON["TASK_NOT_FOUND"]
INVALID_REQUEST = ERROR_BY_REASON["INVALID_REQUEST"]
INVALID_PARAMS = ERROR_BY_REASON["INVALID_PARAMS"]
INTERNAL_ERROR = ERROR_BY_REASON["INTERNAL_ERROR"]
INVALID_AGENT_RESPONSE = ERROR_BY_REASON["INVALID_AGENT_RESPONSE"]
PARSE_ERROR = ERROR_BY_REASON["JSON_PARSE_ERROR"]

# google.rpc.Code and the HTTP status of google.rpc's own mapping.
GRPC_STATUS_NAMES: tuple[str, ...] = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
GRPC_STATUS_BY_NAME: dict[str, int] = {name: n for n, name in enumerate(GRPC_STATUS_NAMES)}
HTTP_STATUS_OF_GRPC: tuple[int, ...] = (
    200,
    499,
    500,
    400,
    504,
    404,
    409,
    403,
    429,
    400,
    409,
    400,
    501,
    500,
    503,
    500,
    401,
)
# The other way: what an HTTP status means as a gRPC status, for an error that is an answer.
GRPC_STATUS_OF_HTTP: dict[int, int] = {
    400: 3,
    401: 16,
    403: 7,
    404: 5,
    408: 4,
    409: 10,
    412: 9,
    413: 8,
    422: 3,
    429: 8,
    499: 1,
    500: 13,
    501: 12,
    503: 14,
    504: 4,
}

# TaskState by number (A2A 4.1.3).
TASK_STATES: tuple[str, ...] = (
    "TASK_STATE_UNSPECIFIED",
    "TASK_STATE_SUBMITTED",
    "TASK_STATE_WORKING",
    "TASK_STATE_COMPLETED",
    "TASK_STATE_FAILED",
    "TASK_STATE_CANCELED",
    "TASK_STATE_INPUT_REQUIRED",
    "TASK_STATE_REJECTED",
    "TASK_STATE_AUTH_REQUIRED",
)


def state_name(number: int) -> str:
    """The name of a task state; '' for the unspecified one, and for numbers that are none."""
    return TASK_STATES[number] if 0 < number < len(TASK_STATES) else ""


TERMINAL_STATES = frozenset(
    {
        "TASK_STATE_COMPLETED",
        "TASK_STATE_FAILED",
        "TASK_STATE_CANCELED",
        "TASK_STATE_REJECTED",
    }
)
INTERRUPTED_STATES = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
