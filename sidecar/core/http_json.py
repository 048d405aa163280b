"""The HTTP+JSON binding (A2A section 11): both ends, bytes in and values out."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import quote

from sidecar.core import convert, errors, payload, relay, tenant
from sidecar.core.http_common import (
    JSON_TYPE,
    NUMBERS,
    SSE_TYPE,
    EventReader,
    at,
    foreign_coding,
    id_in,
    shaped_result,
    snake_case,
)
from sidecar.core.spec import (
    CANCEL_TASK,
    GET_TASK,
    LIST_PUSH_CONFIGS,
    SUBSCRIBE_TO_TASK,
    TASK_STATES,
    VERSION_HEADER,
    Binding,
    Operation,
)
from sidecar.core.types import Call, Form, Headers, Interface, Payload, Reply, ReplyHead, Request

# --- upstream ---------------------------------------------------------------------------------


def encode_request(call: Call, interface: Interface, *, subscribe_by_get: bool = False) -> Request:
    """`call` as it goes to `interface`; raises InvalidMessage when it cannot be expressed.

    Fields of the path are percent-encoded whole, one segment each (RFC 3986); an id that a server
    or proxy would normalise away is refused.
    """
    try:
        return _encode(call, interface, subscribe_by_get)
    except payload.PayloadError as error:
        raise convert.InvalidMessage(f"cannot be taken apart: {error}") from error


def _encode(call: Call, interface: Interface, subscribe_by_get: bool) -> Request:
    operation = call.operation
    message = call.payload
    if message.form is Form.PROTO:
        message = Payload(Form.JSON, convert.proto_to_json(operation.request, message.data))
    message = tenant.put_nested(operation, message, interface.tenant)
    target = [interface.path]
    if interface.tenant:
        target.append("/" + quote(interface.tenant, safe=""))
    body = b""
    verb = operation.verb
    if operation.path_fields or operation.query:
        members = payload.split_object(message.data)
        path = operation.path
        for name in operation.path_fields:
            path = path.replace("{" + name + "}", _segment(operation, name, members))
        target.append(path)
        if operation is CANCEL_TASK:
            body = _without(members, ("id",))
        elif operation.has_body:
            body = message.data
        else:
            target.append(_query(operation, members))
    else:
        target.append(operation.path)
        body = message.data if operation.has_body else b""
    if operation is SUBSCRIBE_TO_TASK and subscribe_by_get:
        verb = "GET"
    headers: Headers = [
        ("accept", SSE_TYPE if operation.streaming else "application/json, application/a2a+json"),
        ("accept-encoding", "identity"),
        (VERSION_HEADER, str(interface.version)),
        *relay.fit(call.headers, Binding.HTTP_JSON),
    ]
    if verb == "POST":
        headers.insert(0, ("content-type", JSON_TYPE))
    return Request(verb, "".join(target), headers, body)


def _segment(operation: Operation, name: str, members: dict[str, bytes]) -> str:
    value = id_in(members, name)
    if operation is GET_TASK and value.endswith(":subscribe"):
        problem = "ends in `:subscribe`: a GET for it would be taken for SubscribeToTask"
        raise at(name, convert.NotRepresentable(problem))
    return quote(value, safe="")


def _without(members: dict[str, bytes], names: tuple[str, ...]) -> bytes:
    rest = {name: raw for name, raw in members.items() if name not in names}
    return payload.join_object(rest) if rest else b"{}"


def _query(operation: Operation, members: dict[str, bytes]) -> str:
    """The fields that travel in the query string (A2A 11.5), camelCase, unset ones left out.

    Unknown scalar members go along: a newer agent may know them.
    """
    known = {spelling: name for name in operation.query for spelling in (name, snake_case(name))}
    in_path = {s for name in operation.path_fields for s in (name, snake_case(name))}
    pairs: list[str] = []
    for name, raw in members.items():
        field = known.get(name, name)
        if name in in_path or raw == b"null":
            continue
        if raw[:1] in b"{[":
            if field in known:
                raise at(field, convert.InvalidMessage("must not be an object or array"))
            continue
        value = payload.parse_string(raw) if raw[:1] == b'"' else raw.decode()
        if field == "status":
            value = _state_name(value)
        elif field in NUMBERS:
            value = _plain_number(value)
        if _is_default(operation, field, value):
            continue
        pairs.append(f"{quote(field, safe='')}={quote(value, safe='')}")
    return "?" + "&".join(pairs) if pairs else ""


_STATE_NUMBER = re.compile("[0-9]")


def _state_name(value: str) -> str:
    """A task state by name, as ProtoJSON allows the number too."""
    if _STATE_NUMBER.fullmatch(value) and int(value) < len(TASK_STATES):
        return TASK_STATES[int(value)]
    return value


def _plain_number(value: str) -> str:
    """``10`` for the other spellings of it that ProtoJSON takes; what is no integer stays."""
    try:
        number = float(value)
    except ValueError:
        return value
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else value


def _is_default(operation: Operation, field: str, value: str) -> bool:
    """Whether a value says no more than leaving it out: its field has no presence."""
    if value == "":
        return field in {"pageToken", "contextId"}
    return value == "0" and field == "pageSize" and operation is LIST_PUSH_CONFIGS


def read_reply(operation: Operation, head: ReplyHead, body: bytes) -> Reply:
    """A complete reply to a unary call, or to a stream that was answered without one."""
    status = head.status
    coding = foreign_coding(head.headers)
    if coding:
        return _unreadable(head, f"it is encoded as {coding}, which was not asked for")
    empty = body.strip() in {b"", b"null"}
    if 200 <= status < 300 and operation.void and (empty or status == 204):
        return Reply(http_status=status, payload=Payload(Form.JSON, b"{}"))
    if empty:
        return _unreadable(head, "its body is empty")
    try:
        payload.check_text(body)
        return _read_text(operation, head, body.strip())
    except payload.PayloadError as error:
        return _unreadable(head, str(error))


def _read_text(operation: Operation, head: ReplyHead, body: bytes) -> Reply:
    status = head.status
    if not 200 <= status < 300:
        return _read_error(operation, head, body)
    if operation is LIST_PUSH_CONFIGS and body[:1] == b"[":
        payload.split_array(body)  # some servers answer the bare array
        body = b'{"configs":' + body + b"}"
    members = payload.split_object(body) if body[:1] == b"{" else None
    if members is not None and "error" in members:
        found = errors.read_http(status, head.headers, body, names_task=False)
        if found is not None and found[1]:
            return Reply(http_status=status, error=found[0])
    if operation.void:
        body = b"{}"
    why = shaped_result(operation, body, members)
    if why:
        return Reply(http_status=status, malformed=why)
    return Reply(http_status=status, payload=Payload(Form.JSON, body))


def _read_error(operation: Operation, head: ReplyHead, body: bytes) -> Reply:
    found = errors.read_http(head.status, head.headers, body, names_task=operation.names_task)
    if found is None:
        return _unreadable(head, "")
    record, recognised = found
    if recognised:
        return Reply(http_status=head.status, error=record)
    return Reply(http_status=head.status, plain=record)


def _unreadable(head: ReplyHead, why: str) -> Reply:
    if 200 <= head.status < 300:
        return Reply(http_status=head.status, malformed=why)
    return Reply(http_status=head.status, plain=errors.refused(head.status, head.headers))


def event_reader(operation: Operation, limit: int) -> EventReader:
    """Reads a stream's SSE events; each is a bare StreamResponse, or an error."""
    return EventReader(limit, lambda event, data: _read_event(operation, event, data))


def _read_event(operation: Operation, event: str, data: bytes) -> Reply:
    try:
        payload.check_text(data)
        members = payload.split_object(data)
    except payload.PayloadError as error:
        return Reply(http_status=200, malformed=str(error))
    if event == "error" or members.get("error", b"null") != b"null":
        return _error_event(operation, members, data)
    why = shaped_result(operation, data, members)
    if why:
        return Reply(http_status=200, malformed=why)
    return Reply(http_status=200, payload=Payload(Form.JSON, data))


def _error_event(operation: Operation, members: dict[str, bytes], data: bytes) -> Reply:
    """An error inside a stream: its status is the one it names itself (A2A 11.7).

    It comes from the agent that has opened the stream, so below 500 it is an answer, recognised or
    not: nothing here says that the endpoint is the wrong one.
    """
    try:
        code = payload.get_member(members.get("error", b"{}"), "code") or b""
    except payload.PayloadError:
        code = b""
    status = int(code) if _ERROR_STATUS.fullmatch(code) else 500
    reply = _read_error(operation, ReplyHead(status, []), data)
    if reply.error is None and status < 500:
        return replace(reply, error=reply.plain, plain=None)
    return reply


_ERROR_STATUS = re.compile(rb"[45][0-9]{2}")
