"""The JSON-RPC binding (A2A section 9): both ends, bytes in and values out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sidecar.core import convert, errors, payload, relay, tenant
from sidecar.core.http_common import (
    JSON_TYPE,
    SSE_TYPE,
    EventReader,
    check_params,
    foreign_coding,
    id_in,
    shaped_result,
)
from sidecar.core.spec import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    OPERATIONS,
    PARSE_ERROR,
    VERSION_HEADER,
    Binding,
    Operation,
)
from sidecar.core.types import (
    Call,
    ErrorRecord,
    Form,
    Headers,
    Interface,
    Payload,
    Reply,
    ReplyHead,
    Request,
)

# --- upstream ---------------------------------------------------------------------------------


def encode_request(call: Call, interface: Interface) -> Request:
    """`call` as it goes to `interface`; raises InvalidMessage when JSON cannot hold it."""
    message = tenant.put(call.operation, call.payload, interface.tenant)
    params = message.data
    if message.form is Form.PROTO:
        params = convert.proto_to_json(call.operation.request, params)
    # Our own id: a reply belongs to its connection, so it never has to be unique.
    body = (
        b'{"jsonrpc":"2.0","id":1,"method":"'
        + call.operation.name.encode()
        + b'","params":'
        + params
        + b"}"
    )
    headers: Headers = [
        ("content-type", JSON_TYPE),
        ("accept", SSE_TYPE if call.operation.streaming else JSON_TYPE),
        ("accept-encoding", "identity"),
        (VERSION_HEADER, str(interface.version)),
        *relay.fit(call.headers, Binding.JSONRPC),
    ]
    return Request("POST", interface.path, headers, body)


def read_reply(operation: Operation, head: ReplyHead, body: bytes) -> Reply:
    """A complete reply to a unary call, or to a stream that was answered without one."""
    status = head.status
    members = _members(head, body)
    if isinstance(members, str):
        return _not_jsonrpc(head, members)
    error = members.get("error")
    if error is not None and error != b"null":
        record = errors.read_jsonrpc(error, head.headers)
        if record is not None and ("jsonrpc" in members or -32768 <= record.code <= -32000):
            return Reply(http_status=status, error=errors.with_http_status(record, status))
        return _not_jsonrpc(head, "its `error` is not a JSON-RPC error object")
    if not 200 <= status < 300:
        return _not_jsonrpc(head, "")
    result = members.get("result")
    if result is None:
        return _not_jsonrpc(head, "it has neither `result` nor `error`")
    if operation.void:
        result = b"{}"
    why = shaped_result(operation, result)
    if why:
        return _not_jsonrpc(head, why)
    return Reply(http_status=status, payload=Payload(Form.JSON, result))


def _members(head: ReplyHead, body: bytes) -> dict[str, bytes] | str:
    coding = foreign_coding(head.headers)
    if coding:
        return f"it is encoded as {coding}, which was not asked for"
    try:
        payload.check_text(body)
        return payload.split_object(body)
    except payload.PayloadError as error:
        return str(error)


def _not_jsonrpc(head: ReplyHead, why: str) -> Reply:
    if 200 <= head.status < 300:
        return Reply(http_status=head.status, malformed=why or "it is not a JSON-RPC response")
    return Reply(http_status=head.status, plain=errors.refused(head.status, head.headers))


def event_reader(operation: Operation, limit: int) -> EventReader:
    """Reads a stream's SSE events; each is a JSON-RPC response."""
    return EventReader(limit, lambda event, data: _read_event(operation, event, data))


def _read_event(operation: Operation, event: str, data: bytes) -> Reply:
    del event  # an `error` member tells, whatever the event's name
    return read_reply(operation, ReplyHead(200, []), data)


# --- downstream -------------------------------------------------------------------------------


class Refused(Exception):
    """A request that is answered here, before anything is sent anywhere."""

    def __init__(self, record: ErrorRecord, id_: bytes = b"null") -> None:
        super().__init__(record.message)
        self.record = record
        self.id = id_


class Notification(Exception):
    """A request without an id: JSON-RPC allows no response to it, and A2A defines none."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """One decoded request: what to call, and the id to answer with, digit for digit."""

    id: bytes
    operation: Operation
    payload: Payload
    tenant: str


_NUMBER = re.compile(rb"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
# Longer ids are legal numbers, but no client makes them and several parsers refuse them.
_ID_BYTES = 1024


def decode_request(body: bytes) -> Inbound:
    """One JSON-RPC request (sections 9.1-9.4); raises Refused or Notification."""
    try:
        payload.check_text(body)
        if body.lstrip(b" \t\r\n")[:1] == b"[":
            payload.split_array(body)
            raise Refused(errors.standard(INVALID_REQUEST, "batch requests are not supported"))
        members = payload.split_object(body)
    except payload.ShapeError as error:
        raise Refused(errors.standard(INVALID_REQUEST, str(error))) from error
    except payload.PayloadError as error:
        raise Refused(
            errors.standard(PARSE_ERROR, f"the request is not valid JSON: {error}")
        ) from error
    id_ = members.get("id")
    if id_ is not None and not _is_id(id_):
        raise Refused(errors.standard(INVALID_REQUEST, "`id` must be a string, a number or null"))
    answer_id = id_ if id_ is not None else b"null"
    if members.get("jsonrpc") != b'"2.0"':
        raise Refused(errors.standard(INVALID_REQUEST, '`jsonrpc` must be "2.0"'), answer_id)
    try:
        method = payload.parse_string(members.get("method", b"null"))
    except payload.PayloadError as error:
        raise Refused(
            errors.standard(INVALID_REQUEST, "`method` must be a string"), answer_id
        ) from error
    if id_ is None:
        raise Notification(method)
    operation = OPERATIONS.get(method)
    if operation is None:
        raise Refused(errors.standard(METHOD_NOT_FOUND, f"Method not found: {method[:100]}"), id_)
    message, caller_tenant = _params(operation, members.get("params", b"{}"), id_)
    return Inbound(id_, operation, message, caller_tenant)


def _is_id(raw: bytes) -> bool:
    if len(raw) > _ID_BYTES:
        return False
    if raw[:1] == b'"':
        try:
            payload.parse_string(raw)
        except payload.PayloadError:
            return False
        return True
    return raw == b"null" or _NUMBER.fullmatch(raw) is not None


def _params(operation: Operation, raw: bytes, id_: bytes) -> tuple[Payload, str]:
    if raw == b"null":
        raw = b"{}"
    try:
        members = check_params(raw)
        for name in operation.path_fields:
            id_in(members, name)
        caller_tenant, message = tenant.take(operation, Payload(Form.JSON, raw))
    except (payload.PayloadError, convert.InvalidMessage) as error:
        raise Refused(errors.standard(INVALID_PARAMS, f"`params`: {error}"), id_) from error
    return message, caller_tenant


def encode_result(id_: bytes, operation: Operation, result: Payload) -> bytes:
    """A response with `result`; also the data of a stream event."""
    data = b"null" if operation.void else result.data
    return b'{"jsonrpc":"2.0","id":' + id_ + b',"result":' + data + b"}"


def encode_error(id_: bytes, record: ErrorRecord) -> bytes:
    """A response with `error`."""
    return b'{"jsonrpc":"2.0","id":' + id_ + b',"error":' + errors.to_jsonrpc(record) + b"}"
