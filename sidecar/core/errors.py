"""Errors: any binding's form into one record, and one record into any binding's form.

An agent's error crosses with its code, reason, message and details (A2A sections 5.4, 9.5, 10.6,
11.6; the tables are in `spec`). The sidecar's own errors have the domain ``a2a-sidecar``, which is
taken off whatever an agent sends, so that ``delivered`` cannot be forged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from sidecar.core import convert, payload, spec
from sidecar.core.spec import Binding, ErrorType
from sidecar.core.types import Attempt, ErrorRecord, Headers, header

OWN_DOMAIN = "a2a-sidecar"
_FOREIGN_DOMAIN = "a2a-sidecar.upstream"

# Headers of an error that mean something to a client.
_ERROR_HEADERS = ("retry-after", "www-authenticate")
# grpcio's default limit on all metadata of one block is 8 KiB; what we add stays well below.
_MESSAGE_BYTES = 1024
_DETAILS_BYTES = 3072
_MOST_ATTEMPTS = 8

# Our own reasons: HTTP status, gRPC status, JSON-RPC code (DESIGN 3.8).
OWN_REASONS: dict[str, tuple[int, int, int]] = {
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


# --- making our own ---------------------------------------------------------------------------


def own(
    reason: str,
    message: str,
    *,
    agent: str = "",
    call: str = "",
    delivered: str | None = "no",
    attempts: tuple[Attempt, ...] = (),
    kept_status: tuple[Binding, int] | None = None,
    metadata: dict[str, str] | None = None,
    headers: Headers | None = None,
) -> ErrorRecord:
    """An error of the sidecar itself; `reason` is a key of `OWN_REASONS`."""
    http_status, grpc_status, code = OWN_REASONS[reason]
    known = {"agent": agent, "call": call, "delivered": delivered or ""}
    info = {key: value for key, value in known.items() if value}
    info.update(metadata or {})
    for number, attempt in enumerate(attempts[:_MOST_ATTEMPTS], 1):
        info[f"attempt-{number}"] = describe(attempt)
    if len(attempts) > _MOST_ATTEMPTS:
        info["attempts-left-out"] = str(len(attempts) - _MOST_ATTEMPTS)
    headers = list(headers or ())
    if http_status == 503 and header(headers, "retry-after") is None:
        headers.append(("retry-after", "1"))
    return ErrorRecord(
        code=code,
        http_status=http_status,
        grpc_status=grpc_status,
        message=message,
        reason=reason,
        details=(_error_info(reason, OWN_DOMAIN, info),),
        headers=headers,
        delivered=delivered,
        kept_status=kept_status,
    )


def describe(attempt: Attempt) -> str:
    """One attempt in a line: ``1-grpc agent.example:443 not_served unimplemented``."""
    interface, outcome = attempt.interface, attempt.outcome
    return f"{interface.label} {interface.address} {outcome.kind} {outcome.result}"


def standard(
    kind: ErrorType, message: str, *, metadata: dict[str, str] | None = None
) -> ErrorRecord:
    """An error of the specification's tables that this side answers itself."""
    return ErrorRecord(
        code=kind.code,
        http_status=kind.http_status,
        grpc_status=kind.grpc_status,
        message=message,
        reason=kind.reason,
        details=(_error_info(kind.reason, spec.A2A_DOMAIN, metadata or {}),),
    )


def refused(status: int, headers: Headers, *, grpc_status: int | None = None) -> ErrorRecord:
    """An HTTP answer that is no A2A error and ends the call: authentication, limits, conflicts."""
    if grpc_status is None:
        grpc_status = spec.GRPC_STATUS_OF_HTTP.get(status, 9 if status < 500 else 2)
    return ErrorRecord(
        code=-32603,
        http_status=status,
        grpc_status=grpc_status,
        message=f"the agent answered HTTP {status} without an A2A error",
        reason="AGENT_REFUSED",
        details=(_error_info("AGENT_REFUSED", OWN_DOMAIN, {"status": str(status)}),),
        headers=_error_headers(headers),
    )


def _error_info(reason: str, domain: str, metadata: dict[str, str]) -> bytes:
    return msgspec.json.encode(
        {"@type": spec.ERROR_INFO_TYPE, "reason": reason, "domain": domain, "metadata": metadata}
    )


def _error_headers(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] in _ERROR_HEADERS]


# --- reading an agent's -----------------------------------------------------------------------


def read_jsonrpc(raw: bytes, headers: Headers) -> ErrorRecord | None:
    """The record of a JSON-RPC `error` object (section 9.5); None when it has no integer code."""
    try:
        members = payload.split_object(raw)
        code = msgspec.json.decode(members.get("code", b"null"))
    except (payload.PayloadError, msgspec.DecodeError):
        return None
    if not isinstance(code, int) or isinstance(code, bool):
        return None
    data = members.get("data")
    details, forged = _typed_objects(data)
    reason, _ = _first_info(details)
    kind = spec.ERROR_BY_CODE.get(code) or spec.ERROR_BY_REASON.get(reason)
    return ErrorRecord(
        code=code,
        http_status=kind.http_status if kind else 500,
        grpc_status=kind.grpc_status if kind else 2,
        message=_text(members.get("message")),
        reason=kind.reason if kind else reason,
        details=details,
        data=data if data not in (None, b"null") and not details else None,
        headers=_error_headers(headers),
        raw=None if forged else (Binding.JSONRPC, raw),
    )


def read_http(
    status: int, headers: Headers, body: bytes, *, names_task: bool
) -> tuple[ErrorRecord, bool] | None:
    """The record of an HTTP+JSON error body (section 11.6), and whether it is an A2A error.

    Recognised by an ErrorInfo of the specification's domain or reasons; or by the bare
    ``{"error":{"code":N,"status":S}}`` with N the HTTP status and S a gRPC status name, with a
    500/501 or on an operation that names a task. None: the body is not of this form at all.
    """
    try:
        error = payload.split_object(payload.split_object(body)["error"])
    except (payload.PayloadError, KeyError):
        return None
    details, forged = _typed_objects(error.get("details"))
    reason, domain = _first_info(details)
    kind = spec.ERROR_BY_REASON.get(reason)
    status_name = _text(error.get("status"))
    grpc_status = spec.GRPC_STATUS_BY_NAME.get(status_name)
    recognised = kind is not None or (bool(reason) and domain == spec.A2A_DOMAIN)
    if kind is None and error.get("code") == b"%d" % status and grpc_status is not None:
        if names_task and status == 404 and status_name == "NOT_FOUND":
            kind = spec.TASK_NOT_FOUND
        recognised = recognised or names_task or status in {500, 501}
    record = ErrorRecord(
        code=kind.code if kind else _code_of_grpc(grpc_status),
        http_status=status,
        grpc_status=kind.grpc_status if kind else _grpc_or(grpc_status, status),
        message=_text(error.get("message")),
        reason=kind.reason if kind else reason,
        details=details,
        headers=_error_headers(headers),
        raw=None if forged else (Binding.HTTP_JSON, body),
    )
    return record, recognised


def read_grpc(
    status: int, message: str, status_details: bytes | None, headers: Headers
) -> tuple[ErrorRecord, bool]:
    """The record of a gRPC status other than OK (section 10.6), and whether it is an A2A error.

    Recognised by an ErrorInfo in the details, or by a message that begins with the name of an A2A
    error and a colon. Details that cannot be decoded are dropped; the status stays.
    """
    details: tuple[bytes, ...] = ()
    forged = False
    if status_details:
        try:
            _, _, raw_details = convert.status_to_json(status_details)
        except convert.InvalidMessage:
            status_details = None
        else:
            details, forged = _cleaned(raw_details)
    reason, _ = _first_info(details)
    kind = spec.ERROR_BY_REASON.get(reason)
    recognised = bool(reason)
    if not reason:
        name, colon, text = message.partition(":")
        if colon and name in spec.ERROR_BY_NAME:
            kind, recognised, message = spec.ERROR_BY_NAME[name], True, text.strip()
    record = ErrorRecord(
        code=kind.code if kind else _code_of_grpc(status),
        http_status=kind.http_status if kind else spec.HTTP_STATUS_OF_GRPC[_known(status)],
        grpc_status=_known(status),
        message=message,
        reason=kind.reason if kind else reason,
        details=details,
        status_details=None if forged else status_details,
        headers=_error_headers(headers),
    )
    return record, recognised


def _known(status: int) -> int:
    return status if 0 < status < len(spec.GRPC_STATUS_NAMES) else 2


def _grpc_or(grpc_status: int | None, http_status: int) -> int:
    if grpc_status:
        return grpc_status
    return spec.GRPC_STATUS_OF_HTTP.get(http_status, 2)


def _code_of_grpc(status: int | None) -> int:
    """The JSON-RPC code of a gRPC status that says nothing more: never a guessed A2A error."""
    match status:
        case 3:
            return spec.INVALID_PARAMS.code
        case 12:
            return spec.METHOD_NOT_FOUND.code
        case _:
            return spec.INTERNAL_ERROR.code


def _text(raw: bytes | None) -> str:
    try:
        return payload.parse_string(raw) if raw is not None else ""
    except payload.PayloadError:
        return ""


def _typed_objects(raw: bytes | None) -> tuple[tuple[bytes, ...], bool]:
    """The objects with ``@type`` in a JSON array, and whether one claimed our domain."""
    if raw is None:
        return (), False
    try:
        return _cleaned(payload.split_array(raw))
    except payload.PayloadError:
        return (), OWN_DOMAIN.encode() in raw


def _cleaned(objects: list[bytes]) -> tuple[tuple[bytes, ...], bool]:
    kept: list[bytes] = []
    forged = False
    for raw in objects:
        detail = raw
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue
        if not isinstance(value, dict) or not isinstance(value.get("@type"), str):
            continue
        if value.get("domain") == OWN_DOMAIN:
            forged = True
            detail = payload.with_member(raw, "domain", payload.json_string(_FOREIGN_DOMAIN))
        kept.append(detail)
    return tuple(kept), forged


def _first_info(details: tuple[bytes, ...]) -> tuple[str, str]:
    """Reason and domain of the first ErrorInfo."""
    for raw in details:
        value = msgspec.json.decode(raw)
        if value["@type"].endswith("google.rpc.ErrorInfo"):
            reason, domain = value.get("reason"), value.get("domain")
            return (
                reason if isinstance(reason, str) else "",
                domain if isinstance(domain, str) else "",
            )
    return "", ""


# --- writing ----------------------------------------------------------------------------------


def to_jsonrpc(record: ErrorRecord) -> bytes:
    """The JSON-RPC error object."""
    if record.raw and record.raw[0] is Binding.JSONRPC:
        return record.raw[1]
    members = {
        "code": b"%d" % record.code,
        "message": payload.json_string(record.message),
    }
    if record.details:
        members["data"] = b"[" + b",".join(map(_strings_only, _details(record))) + b"]"
    elif record.data is not None:
        members["data"] = record.data
    elif record.code in spec.ERROR_BY_CODE and record.code not in _PLAIN_CODES:
        members["data"] = b"[" + b",".join(_details(record)) + b"]"
    return payload.join_object(members)


# The codes of JSON-RPC itself say all there is; the official SDK sends no `data` with them.
_PLAIN_CODES = frozenset({-32700, -32600, -32601, -32602, -32603})


def to_http(record: ErrorRecord) -> tuple[int, Headers, bytes]:
    """Status, headers and body (``application/json``) of an HTTP+JSON error."""
    status = record.http_status
    if record.kept_status and record.kept_status[0] is Binding.HTTP_JSON:
        status = record.kept_status[1]
    if record.raw and record.raw[0] is Binding.HTTP_JSON:
        return status, record.headers, record.raw[1]
    return status, record.headers, b'{"error":' + http_error_object(record, status) + b"}"


def http_error_object(record: ErrorRecord, status: int) -> bytes:
    """The ``error`` member of an HTTP+JSON error body or error event (section 11.6)."""
    return payload.join_object(
        {
            "code": b"%d" % status,
            "status": payload.json_string(spec.GRPC_STATUS_NAMES[record.grpc_status]),
            "message": payload.json_string(record.message),
            "details": b"[" + b",".join(map(_strings_only, _details(record))) + b"]",
        }
    )


def to_grpc(record: ErrorRecord) -> tuple[int, str, bytes]:
    """Status, message (plain text) and google.rpc.Status bytes whose code and message agree."""
    status = record.grpc_status
    if record.kept_status and record.kept_status[0] is Binding.GRPC:
        status = record.kept_status[1]
    if record.status_details is not None:
        return status, record.message, record.status_details
    message = _shortened(record.message)
    details = [_strings_only(raw) for raw in _details(record)]
    while True:
        encoded = convert.status_from_json(status, message, details)
        if len(encoded) <= _DETAILS_BYTES or not details:
            return status, message, encoded
        details.pop()


def _shortened(message: str) -> str:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= _MESSAGE_BYTES:
        return message
    return encoded[:_MESSAGE_BYTES].decode("utf-8", "ignore") + "…"


def _details(record: ErrorRecord) -> tuple[bytes, ...]:
    """The details with an ErrorInfo first; one is made when the agent sent none."""
    infos = [raw for raw in record.details if b"google.rpc.ErrorInfo" in raw]
    if infos:
        return (infos[0], *(raw for raw in record.details if raw is not infos[0]))
    made: dict[str, str] = {}
    reason = record.reason
    if record.code not in spec.ERROR_BY_CODE:
        made["code"] = str(record.code)
        reason = reason or "UNKNOWN_ERROR"
    if record.data is not None:
        made["data"] = record.data.decode("utf-8", "replace")
    if not reason:
        return record.details
    return (_error_info(reason, spec.A2A_DOMAIN, made), *record.details)


def _strings_only(raw: bytes) -> bytes:
    """An ErrorInfo whose metadata values are all strings: its type is map<string, string>."""
    if b"google.rpc.ErrorInfo" not in raw:
        return raw
    value: dict[str, Any] = msgspec.json.decode(raw)
    metadata = value.get("metadata")
    if not isinstance(metadata, dict):
        return raw
    if all(isinstance(item, str) for item in metadata.values()):
        return raw
    value["metadata"] = {
        key: item if isinstance(item, str) else msgspec.json.encode(item).decode()
        for key, item in metadata.items()
    }
    return msgspec.json.encode(value)


def with_metadata(record: ErrorRecord, **metadata: str) -> ErrorRecord:
    """`record` with more metadata in its own ErrorInfo; for what only the last step knows."""
    value: dict[str, Any] = msgspec.json.decode(record.details[0])
    value["metadata"].update(metadata)
    return replace(record, details=(msgspec.json.encode(value), *record.details[1:]))
