"""Errors: any binding's form into one record, and one record into any binding's form.

An agent's error crosses with its code, reason, message and details (A2A sections 5.4, 9.5, 10.6,
11.6; the tables are in `spec`). The sidecar's own errors have the domain ``a2a-sidecar``, which is
taken off whatever an agent sends, so that ``delivered`` cannot be forged.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sidecar.core import convert, payload, spec
from sidecar.core.error_details import (
    DETAILS_BYTES,
    OWN_DOMAIN,
    as_object,
    disowned,
    error_info,
    infos_of,
    is_info,
    shortened,
    size_of,
    strings_only,
    told_by,
    trimmed,
    typed_objects,
)
from sidecar.core.spec import Binding, ErrorType
from sidecar.core.types import Attempt, ErrorRecord, Facts, Headers, header

# Headers of an error that mean something to a client.
_ERROR_HEADERS = ("retry-after", "www-authenticate")
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
    for number, attempt in enumerate(attempts, 1):
        info[f"attempt-{number}"] = describe(attempt)
    headers = list(headers or ())
    if http_status == 503 and header(headers, "retry-after") is None:
        headers.append(("retry-after", "1"))
    return ErrorRecord(
        code=code,
        http_status=http_status,
        grpc_status=grpc_status,
        message=message,
        reason=reason,
        details=(error_info(reason, OWN_DOMAIN, info),),
        headers=headers,
        delivered=delivered,
        kept_status=kept_status,
    )


def kept_status(facts: Facts) -> tuple[Binding, int] | None:
    """The status that an agent gave with an ambiguous failure: the same binding keeps it."""
    if facts.grpc_status:
        return Binding.GRPC, _known(facts.grpc_status)
    # On gRPC an HTTP status of some proxy is no status that could be kept.
    status = facts.http_status or 0
    if facts.binding is Binding.HTTP_JSON and status >= 500:
        return Binding.HTTP_JSON, status
    return None


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
        details=(error_info(kind.reason, spec.A2A_DOMAIN, metadata or {}),),
    )


def as_invalid_params(record: ErrorRecord) -> ErrorRecord:
    """One of our own, also told as A2A's validation error, which clients know by the first ErrorInfo.

    An agent that was called directly would have answered InvalidParams to the same request.
    """
    info = error_info(spec.INVALID_PARAMS.reason, spec.A2A_DOMAIN, {})
    return replace(record, details=(info, *record.details))


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
        details=(_refusal(str(status)),),
        headers=_error_headers(headers),
    )


def _refusal(status: str) -> bytes:
    return error_info("AGENT_REFUSED", OWN_DOMAIN, {"status": status})


def _error_headers(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] in _ERROR_HEADERS]


# --- reading an agent's -----------------------------------------------------------------------

# These reach every binding as that status, whatever error came with it (DESIGN 3.8).
KEPT_HTTP = {401: 16, 403: 7, 429: 8}
_KEPT_GRPC = {grpc: http for http, grpc in KEPT_HTTP.items()}

_TABLE_REASONS = frozenset(error.reason for error in spec.ERRORS)
# Codes of JSON-RPC itself, which say less than a reason that the agent gives.
_GENERIC_CODES = frozenset({-32700, -32600, -32602, -32603})
# The name of this error before 1.0.
_ERROR_BY_NAME = spec.ERROR_BY_NAME | {
    "AuthenticatedExtendedCardNotConfiguredError": spec.ERROR_BY_NAME[
        "ExtendedAgentCardNotConfiguredError"
    ]
}


def read_jsonrpc(raw: bytes, headers: Headers) -> ErrorRecord | None:
    """The record of a JSON-RPC `error` object (section 9.5); None when it has no integer code."""
    raw = disowned(raw)
    try:
        members = payload.split_object(raw)
        code = msgspec.json.decode(members.get("code", b"null"))
    except (payload.PayloadError, msgspec.DecodeError):
        return None
    if not isinstance(code, int) or isinstance(code, bool):
        return None
    data = members.get("data")
    details = typed_objects(data)
    reason, domain = told_by(infos_of(details))
    kind = spec.ERROR_BY_CODE.get(code) or spec.ERROR_BY_REASON.get(reason)
    its_own = bool(reason) and domain == spec.A2A_DOMAIN and reason not in spec.ERROR_BY_REASON
    if kind and not (its_own and code in _GENERIC_CODES):
        reason = kind.reason
    return ErrorRecord(
        code=code,
        http_status=kind.http_status if kind else 500,
        grpc_status=kind.grpc_status if kind else 2,
        message=_text(members.get("message")),
        reason=reason,
        details=details,
        data=data if data not in (None, b"null") and not details else None,
        headers=_error_headers(headers),
        raw=(Binding.JSONRPC, raw),
    )


def with_http_status(record: ErrorRecord, status: int) -> ErrorRecord:
    """`record` of a JSON-RPC error with the HTTP status of its reply, if that is one to keep."""
    if status not in KEPT_HTTP:
        return record
    return replace(record, http_status=status, grpc_status=KEPT_HTTP[status])


def read_http(
    status: int, headers: Headers, body: bytes, *, names_task: bool
) -> tuple[ErrorRecord, bool] | None:
    """The record of an HTTP+JSON error body (section 11.6), and whether it is an A2A error.

    Recognised by an ErrorInfo of the specification's domain or reasons; or by the bare
    ``{"error":{"code":N,"status":S}}`` with N the HTTP status and S a gRPC status name, with a
    500/501 or on an operation that names a task. None: the body is not of this form at all.
    """
    body = disowned(body)
    try:
        error = payload.split_object(payload.split_object(body)["error"])
    except (payload.PayloadError, KeyError):
        return None
    details = typed_objects(error.get("details"))
    infos = infos_of(details)
    reason, domain = told_by(infos)
    recognised = domain == spec.A2A_DOMAIN or reason in _TABLE_REASONS
    kind = spec.ERROR_BY_REASON.get(reason) if recognised else None
    named = spec.GRPC_STATUS_BY_NAME.get(_text(error.get("status")))
    if not recognised and error.get("code") == b"%d" % status and named is not None:
        recognised = names_task or status in {500, 501}
        if names_task and status == 404 and named == spec.TASK_NOT_FOUND.grpc_status:
            kind = spec.TASK_NOT_FOUND
    grpc_status = KEPT_HTTP.get(status)
    if grpc_status is None:
        grpc_status = kind.grpc_status if kind else _grpc_or(named, status)
    if not recognised and not infos:
        reason, details = "AGENT_REFUSED", (_refusal(str(status)), *details)
    record = ErrorRecord(
        code=kind.code if kind else _code_of_grpc(grpc_status),
        http_status=_error_status(status, kind),
        grpc_status=grpc_status,
        message=_text(error.get("message")),
        reason=kind.reason if kind else reason,
        details=details,
        headers=_error_headers(headers),
        raw=(Binding.HTTP_JSON, body),
    )
    return record, recognised


def read_grpc(
    status: int, message: str, status_details: bytes | None, headers: Headers
) -> tuple[ErrorRecord, bool]:
    """The record of a gRPC status other than OK (section 10.6), and whether it is an A2A error.

    Recognised by an ErrorInfo in the details, or by a message that begins with the name of an A2A
    error and a colon. Details that cannot be decoded are dropped; the status stays. A bare
    UNIMPLEMENTED is no A2A error, and reads as the method not being found.
    """
    # What passes unchanged to a gRPC caller: '' is a bare status.
    as_received: bytes | None = status_details or b""
    details: tuple[bytes, ...] = ()
    if status_details:
        try:
            inner_status, inner_message, received = convert.status_to_json(status_details)
        except convert.InvalidMessage:
            as_received = b""
        else:
            details = tuple(map(disowned, received))
            # Clients refuse details that contradict the status beside them.
            if (inner_status, inner_message, list(details)) != (status, message, received):
                as_received = None
    infos = infos_of(details)
    recognised = bool(infos)
    reason, _ = told_by(infos)
    kind = spec.ERROR_BY_REASON.get(reason)
    if not recognised:
        name, colon, text = message.partition(":")
        if colon and name in _ERROR_BY_NAME:
            kind, recognised, message = _ERROR_BY_NAME[name], True, text.strip()
        elif status == spec.METHOD_NOT_FOUND.grpc_status:
            kind = spec.METHOD_NOT_FOUND
        else:
            reason = "AGENT_REFUSED"
            details = (_refusal(spec.GRPC_STATUS_NAMES[_known(status)]), *details)
        if kind is not None:
            as_received = None
    status = _known(status)
    http_status = _KEPT_GRPC.get(status)
    if http_status is None:
        http_status = kind.http_status if kind else spec.HTTP_STATUS_OF_GRPC[status]
    record = ErrorRecord(
        code=kind.code if kind else _code_of_grpc(status),
        http_status=http_status,
        grpc_status=status,
        message=message,
        reason=kind.reason if kind else reason,
        details=details,
        status_details=as_received,
        headers=_error_headers(headers),
    )
    return record, recognised


def _known(status: int) -> int:
    return status if 0 < status < len(spec.GRPC_STATUS_NAMES) else 2


def _grpc_or(grpc_status: int | None, http_status: int) -> int:
    if grpc_status:
        return grpc_status
    return spec.GRPC_STATUS_OF_HTTP.get(http_status, 2)


def _error_status(status: int, kind: ErrorType | None) -> int:
    """The HTTP status to answer with: the agent's, unless it would not say that this is an error."""
    if status >= 400:
        return status
    return kind.http_status if kind else 500


def _code_of_grpc(status: int) -> int:
    """The JSON-RPC code of a gRPC status that says nothing more: never a guessed A2A error."""
    return spec.INVALID_PARAMS.code if status == 3 else spec.INTERNAL_ERROR.code


def _text(raw: bytes | None) -> str:
    try:
        return payload.parse_string(raw) if raw is not None else ""
    except payload.PayloadError:
        return ""


def _details(record: ErrorRecord) -> list[bytes]:
    """The details to write: first an ErrorInfo by which the other bindings' clients know the error.

    One is made when the agent sent none, or one under another name or domain.
    """
    details = [strings_only(raw) for raw in record.details]
    infos = [raw for raw in details if is_info(raw)]
    told = infos_of(tuple(infos))
    ours = any(domain == OWN_DOMAIN for _, domain in told)
    if (record.reason, spec.A2A_DOMAIN) in told:
        first = infos[told.index((record.reason, spec.A2A_DOMAIN))]
    elif infos and (ours or record.reason not in _TABLE_REASONS):
        first = infos[0]
    else:
        made = _made_info(record, infos)
        return details if made is None else [made, *details]
    return [first, *(raw for raw in details if raw is not first)]


def _made_info(record: ErrorRecord, infos: list[bytes]) -> bytes | None:
    metadata: dict[str, str] = {}
    if infos:
        metadata.update(as_object(infos[0]).get("metadata") or {})
    reason = record.reason
    if record.code not in spec.ERROR_BY_CODE:
        metadata.setdefault("code", str(record.code))
        reason = reason or "UNKNOWN_ERROR"
    if record.data is not None:
        metadata["data"] = record.data.decode("utf-8", "replace")
    return error_info(reason, spec.A2A_DOMAIN, metadata) if reason else None


# --- writing ----------------------------------------------------------------------------------


def to_jsonrpc(record: ErrorRecord) -> bytes:
    """The JSON-RPC error object."""
    if record.raw and record.raw[0] is Binding.JSONRPC:
        return record.raw[1]
    members = {
        "code": b"%d" % record.code,
        "message": payload.json_string(record.message),
    }
    if not record.details and record.data is not None:
        members["data"] = record.data
    elif record.details or record.code not in _PLAIN_CODES:
        members["data"] = b"[" + b",".join(_details(record)) + b"]"
    return payload.join_object(members)


# The codes of JSON-RPC itself say all there is; the official SDK sends no `data` with them.
_PLAIN_CODES = _GENERIC_CODES | {spec.METHOD_NOT_FOUND.code}


def to_http(record: ErrorRecord) -> tuple[int, Headers, bytes]:
    """Status, headers and body (``application/json``) of an HTTP+JSON error."""
    status = record.http_status
    if record.kept_status and record.kept_status[0] is Binding.HTTP_JSON:
        status = record.kept_status[1]
    if record.raw and record.raw[0] is Binding.HTTP_JSON:
        return status, record.headers, record.raw[1]
    return status, record.headers, http_error_body(record, status)


def http_error_body(record: ErrorRecord, status: int) -> bytes:
    """An HTTP+JSON error body or error event (section 11.6)."""
    error = payload.join_object(
        {
            "code": b"%d" % status,
            "status": payload.json_string(spec.GRPC_STATUS_NAMES[record.grpc_status]),
            "message": payload.json_string(record.message),
            "details": b"[" + b",".join(_details(record)) + b"]",
        }
    )
    return b'{"error":' + error + b"}"


def to_grpc(record: ErrorRecord) -> tuple[int, str, bytes]:
    """Status, message (plain text) and google.rpc.Status bytes whose code and message agree.

    No bytes when there are no details. Both are cut to what fits in trailers: whole details first,
    then metadata of the ErrorInfo, which says so.
    """
    status = record.grpc_status
    if record.kept_status and record.kept_status[0] is Binding.GRPC:
        status = _known(record.kept_status[1])
    message = shortened(record.message)
    received = record.status_details
    if received == b"":
        return status, message, b""
    if received and len(received) <= DETAILS_BYTES and message == record.message:
        return status, message, received
    details = _details(record)
    if not details:
        return status, message, b""
    room = DETAILS_BYTES - size_of(message, [])
    kept: list[bytes] = []
    for number, raw in enumerate(details):
        detail = trimmed(raw, room) if number == 0 else raw
        size = size_of("", [detail])
        if size <= room:
            room -= size
            kept.append(detail)
    return status, message, convert.status_from_json(status, message, kept)
