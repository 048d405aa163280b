"""HTTP+JSON requests as the local application sends them: route, path, query and body to a message.

The counterpart of `http_json.encode_request` (A2A 11.3-11.5). Routes are matched on the raw path
and each segment is decoded exactly once, so that an id may hold anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from sidecar.core import errors, payload, tenant
from sidecar.core.http_common import (
    JSON_TYPE,
    NUMBERS,
    check_id,
    check_params,
    foreign_coding,
    media_type,
    snake_case,
)
from sidecar.core.spec import (
    CANCEL_TASK,
    CREATE_PUSH_CONFIG,
    DELETE_PUSH_CONFIG,
    GET_EXTENDED_CARD,
    GET_PUSH_CONFIG,
    GET_TASK,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LIST_PUSH_CONFIGS,
    LIST_TASKS,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    SEND_MESSAGE,
    SEND_STREAMING_MESSAGE,
    SUBSCRIBE_TO_TASK,
    TASK_STATES,
    Operation,
)
from sidecar.core.types import Form, Payload

if TYPE_CHECKING:
    from sidecar.core.types import ErrorRecord, Headers

_PUSH = "pushNotificationConfigs"
_BODY_TYPES = frozenset({"", JSON_TYPE, "application/a2a+json"})
_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_COLON = re.compile("%3[Aa]")
_INTEGER = re.compile(r"[0-9]{1,10}")
# Another name of the same parameter, in some clients.
_ALIASES = {"lastUpdatedAfter": "statusTimestampAfter"}
_BOOLEANS = frozenset({"includeArtifacts"})


class Refused(Exception):
    """A request that is answered here."""

    def __init__(self, record: ErrorRecord, status: int | None = None) -> None:
        super().__init__(record.message)
        self.record = record
        self.status = status or record.http_status


@dataclass(frozen=True, slots=True)
class Route:
    """Which operation a request means, and what its path says."""

    operation: Operation
    path_values: dict[str, str]
    tenant: str


def route(method: str, path: str) -> Route:
    """The operation at `path` (raw, below the agent's own prefix); raises Refused (404, 405).

    The first segment is a tenant only when the rest is a route.
    """
    segments = path.removeprefix("/").split("/")
    allowed: set[str] = set()
    for tenant_segments in (0, 1):
        rest = segments[tenant_segments:]
        found = _match(method, rest, allowed)
        if found is not None:
            operation, values = found
            decoded = {name: _decoded(name, value) for name, value in values.items()}
            for name, value in decoded.items():
                _check_id(name, value)
            in_path = _decoded("tenant", segments[0]) if tenant_segments else ""
            return Route(operation, decoded, in_path)
    message = f"nothing is served at {path[:100]!r}"
    if allowed:
        record = errors.standard(METHOD_NOT_FOUND, f"{method} is not served at this path")
        record.headers.append(("allow", ", ".join(sorted(allowed))))
        raise Refused(record, 405)
    raise Refused(errors.standard(METHOD_NOT_FOUND, message))


def _match(
    method: str, segments: list[str], allowed: set[str]
) -> tuple[Operation, dict[str, str]] | None:
    """The operation of a path without tenant; the methods that would fit go into `allowed`."""
    match segments:
        case [single]:
            by_method = _single(single)
        case ["tasks", last]:
            return _task(method, _COLON.sub(":", last) if ":" not in last else last, allowed)
        case ["tasks", task_id, config] if config == _PUSH:
            values = {"taskId": task_id}
            by_method = {"POST": CREATE_PUSH_CONFIG, "GET": LIST_PUSH_CONFIGS}
            return _by_method(method, by_method, values, allowed)
        case ["tasks", task_id, config, ""] if config == _PUSH:
            return _by_method(method, {"GET": LIST_PUSH_CONFIGS}, {"taskId": task_id}, allowed)
        case ["tasks", task_id, config, id_] if config == _PUSH:
            values = {"taskId": task_id, "id": id_}
            by_method = {"GET": GET_PUSH_CONFIG, "DELETE": DELETE_PUSH_CONFIG}
            return _by_method(method, by_method, values, allowed)
        case _:
            return None
    return _by_method(method, by_method, {}, allowed)


def _single(segment: str) -> dict[str, Operation]:
    match _COLON.sub(":", segment):
        case "message:send":
            return {"POST": SEND_MESSAGE}
        case "message:stream":
            return {"POST": SEND_STREAMING_MESSAGE}
        case "tasks":
            return {"GET": LIST_TASKS}
        case "extendedAgentCard":
            return {"GET": GET_EXTENDED_CARD}
        case _:
            return {}


def _task(method: str, segment: str, allowed: set[str]) -> tuple[Operation, dict[str, str]] | None:
    """``{id}``, ``{id}:cancel`` or ``{id}:subscribe``: the verb is behind the last colon.

    Only verbs that exist for the method count, so that a GET may name a task called ``a:cancel``.
    """
    task_id, colon, verb = segment.rpartition(":")
    if colon and task_id:
        if verb == "subscribe" and method in {"GET", "POST"}:
            return SUBSCRIBE_TO_TASK, {"id": task_id}
        if verb == "cancel" and method == "POST":
            return CANCEL_TASK, {"id": task_id}
    return _by_method(method, {"GET": GET_TASK}, {"id": segment}, allowed)


def _by_method(
    method: str, operations: dict[str, Operation], values: dict[str, str], allowed: set[str]
) -> tuple[Operation, dict[str, str]] | None:
    allowed.update(operations)
    operation = operations.get(method)
    return (operation, values) if operation is not None else None


def _decoded(name: str, raw: str) -> str:
    """A path segment or query value, decoded once from UTF-8; raises Refused."""
    if _ESCAPE.search(raw):
        raise _invalid(f"{name}: a percent sign must begin an escape of two hex digits")
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise _invalid(f"{name}: not UTF-8") from None


def _check_id(name: str, value: str) -> None:
    try:
        check_id(name, value)
    except ValueError as error:
        raise _invalid(str(error)) from error


def _invalid(message: str) -> Refused:
    return Refused(errors.standard(INVALID_PARAMS, message))


@dataclass(frozen=True, slots=True)
class Inbound:
    """One decoded request."""

    operation: Operation
    payload: Payload
    tenant: str


def check_content_type(headers: Headers) -> None:
    """Refuse a body that is not JSON or that is compressed (415)."""
    if media_type(headers) not in _BODY_TYPES:
        record = errors.standard(
            INVALID_REQUEST, "the body must be application/json or application/a2a+json"
        )
        raise Refused(record, 415)
    if foreign_coding(headers):
        record = errors.standard(INVALID_REQUEST, "compressed bodies are not accepted")
        raise Refused(record, 415)


def decode_request(found: Route, query: str, body: bytes) -> Inbound:
    """The request message from all its places; raises Refused.

    The path wins over the body. Query parameters that the operation does not have are ignored, one
    given twice is refused; ``+`` is itself, not a space (RFC 3986).
    """
    operation = found.operation
    members: dict[str, bytes] = {}
    try:
        if operation.has_body:
            data, members = _body(body)
            if not found.path_values and not found.tenant:
                caller_tenant, message = tenant.take(operation, Payload(Form.JSON, data))
                return Inbound(operation, message, caller_tenant)
        members.update(_query(operation, query))
        for name, value in found.path_values.items():
            members.pop(snake_case(name), None)
            members[name] = payload.json_string(value)
        data = payload.join_object(members)
        caller_tenant, message = tenant.take(operation, Payload(Form.JSON, data))
    except payload.ShapeError as error:
        raise Refused(errors.standard(INVALID_REQUEST, f"the request body: {error}")) from error
    except payload.PayloadError as error:
        raise Refused(errors.standard(PARSE_ERROR, f"the request body: {error}")) from error
    return Inbound(operation, message, found.tenant or caller_tenant)


def _body(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """A request's body and its members; one that says nothing is an empty object."""
    data = body.strip(b" \t\r\n")
    if data in {b"", b"null"}:
        return b"{}", {}
    payload.check_text(data)
    return data, check_params(data)


def _query(operation: Operation, query: str) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for pair in query.split("&"):
        raw_name, _, raw_value = pair.partition("=")
        name = _decoded("query", raw_name)
        name = _ALIASES.get(name, name)
        field = next((one for one in operation.query if name in {one, snake_case(one)}), None)
        if field is None:
            continue
        if field in members:
            raise _invalid(f"{field} is given twice")
        members[field] = _query_value(field, _decoded(field, raw_value))
    return members


def _query_value(field: str, value: str) -> bytes:
    """A query value as the JSON value of its field."""
    if field in NUMBERS:
        digits = value.strip()
        if not _INTEGER.fullmatch(digits) or int(digits) >= 2**31:
            raise _invalid(f"{field} must be a whole number, zero or more")
        return str(int(digits)).encode()
    if field in _BOOLEANS:
        if value not in {"true", "false"}:
            raise _invalid(f"{field} must be true or false")
        return value.encode()
    if field == "status" and value not in TASK_STATES:
        if _INTEGER.fullmatch(value) and int(value) < len(TASK_STATES):
            return payload.json_string(TASK_STATES[int(value)])
        raise _invalid("status must be the name of a task state, such as TASK_STATE_WORKING")
    return payload.json_string(value)


def version_in_query(query: str) -> str:
    """The value of ``A2A-Version`` in a query string, '' without one (A2A 3.6.1)."""
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        if name.lower() == "a2a-version":
            return _decoded("A2A-Version", value)
    return ""
