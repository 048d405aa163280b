"""JSON ↔ protobuf: one A2A message in either form, its tenant, and the status of an error.

Messages are named as in `sidecar.core.spec`: ``SendMessageRequest``, ``google.protobuf.Empty``.
JSON is ProtoJSON text in UTF-8, protobuf is the serialised message. A conversion is whole or it
is an error: nothing is dropped but unknown JSON members, as the specification asks (section 5.7).
The rules of single fields are in `sidecar.core.protojson`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Never

import msgspec
from google.protobuf import empty_pb2, json_format
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from sidecar._pb import a2a_pb2
from sidecar.core import protojson, protojson_write
from sidecar.core.protojson import InvalidMessage, NotRepresentable
from sidecar.core.spec import WRAPPED, state_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sidecar.core.protojson import AnyMessage, Json

__all__ = [
    "InvalidMessage",
    "NotRepresentable",
    "answer_tenant",
    "as_text",
    "check",
    "event_state",
    "json_to_proto",
    "proto_to_json",
    "put_tenant",
    "status_from_json",
    "status_to_json",
    "take_tenant",
    "text_field",
    "validate_response",
]

_EMPTY = "google.protobuf.Empty"

# Section 3.1.4: these are always present. All other fields are omitted when they are unset.
_ALWAYS_PRESENT: dict[str, dict[str, Json]] = {
    "ListTasksResponse": {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0}
}


# --- the two conversions, and what is asked of bytes ---------------------------------------------


def json_to_proto(message: str, data: bytes) -> bytes:
    """Serialise the ProtoJSON text `data`. For Empty, ``null`` will do (a JSON-RPC void result).

    Raises:
        NotRepresentable: protobuf cannot hold it, or its parsers would not decode the result.
        InvalidMessage: it is not JSON, or not such a message.
    """
    value = _load(data)
    if value is None and message == _EMPTY:
        return b""
    result = _class(message)()
    protojson.read(result, value)
    serialized: bytes = result.SerializeToString()
    return serialized


def proto_to_json(message: str, data: bytes) -> bytes:
    """Print protobuf bytes as compact ProtoJSON.

    Raises:
        InvalidMessage: they do not decode, or hold what JSON has no word for (NaN, infinity, a
            timestamp that is out of range).
    """
    printed = protojson_write.write(_parse(message, data))
    return msgspec.json.encode(_ALWAYS_PRESENT.get(message, {}) | printed)


def check(message: str, data: bytes) -> None:
    """Raise InvalidMessage when protobuf bytes do not decode."""
    _parse(message, data)


def validate_response(message: str, data: bytes) -> None:
    """Raise InvalidMessage when protobuf bytes do not decode, or are an answer without content.

    A SendMessageResponse or StreamResponse without payload, or with one that is unknown here, would
    be passed on as a success that says nothing.
    """
    answer = _parse(message, data)
    if message in WRAPPED and not answer.WhichOneof("payload"):
        raise InvalidMessage("has no payload")


def event_state(data: bytes) -> tuple[str, str, bool]:
    """What a serialised StreamResponse tells: task id, name of the state, whether it is a message.

    The id and the name are '' where the event has none. Raises InvalidMessage for bytes that do
    not decode.
    """
    event = _parse("StreamResponse", data)
    match event.WhichOneof("payload"):
        case "task":
            return event.task.id, state_name(event.task.status.state), False
        case "status_update":
            update = event.status_update
            return update.task_id, state_name(update.status.state), False
        case "artifact_update":
            return event.artifact_update.task_id, "", False
        case payload:
            return "", "", payload == "message"


# --- tenants -------------------------------------------------------------------------------------


def take_tenant(message: str, data: bytes) -> tuple[str, bytes]:
    """Split the caller's tenant from a request: the tenant, and the bytes without it.

    A push configuration within SendMessageRequest loses its tenant as well. Bytes that hold none
    are returned as they are. Raises InvalidMessage for bytes that do not decode.
    """
    request = _parse(message, data)
    tenant: str = getattr(request, "tenant", "")  # Empty has no such field
    return tenant, _with_tenant(request, _tenant_holders(request), "", data)


def text_field(message: str, data: bytes, name: str) -> str:
    """The string in the top-level field with the JSON name `name`; raises InvalidMessage."""
    parsed = _parse(message, data)
    field = next(one for one in parsed.DESCRIPTOR.fields if one.json_name == name)
    found: str = getattr(parsed, field.name)
    return found


def put_tenant(message: str, data: bytes, tenant: str) -> bytes:
    """Set the tenant of a request, and of a push configuration in it; '' clears both.

    Raises InvalidMessage for bytes that do not decode.
    """
    request = _parse(message, data)
    return _with_tenant(request, _tenant_holders(request), tenant, data)


def answer_tenant(message: str, data: bytes, tenant: str) -> bytes:
    """Set the tenant in the push configurations of an answer; '' clears it.

    Other answers are returned as they are. Raises InvalidMessage for bytes that do not decode.
    """
    match message:
        case "TaskPushNotificationConfig":
            return put_tenant(message, data, tenant)
        case "ListTaskPushNotificationConfigsResponse":
            answer = _parse(message, data)
            return _with_tenant(answer, answer.configs, tenant, data)
        case _:
            return data


def _tenant_holders(request: AnyMessage) -> list[AnyMessage]:
    """What in a request has a tenant: itself, and the push configuration that it brings."""
    holders = [request] if "tenant" in request.DESCRIPTOR.fields_by_name else []
    if isinstance(request, a2a_pb2.SendMessageRequest) and request.configuration.HasField(
        "task_push_notification_config"
    ):
        holders.append(request.configuration.task_push_notification_config)
    return holders


def _with_tenant(
    message: AnyMessage, holders: Iterable[AnyMessage], tenant: str, data: bytes
) -> bytes:
    """The message with this tenant in `holders`: `data` itself when that is what it says."""
    changed = False
    for holder in holders:
        if holder.tenant != tenant:
            holder.tenant = tenant
            changed = True
    # The runtime keeps the fields that it does not know.
    return message.SerializeToString() if changed else data


# --- google.rpc.Status ---------------------------------------------------------------------------

_RPC_TYPES: dict[str, AnyMessage] = {
    descriptor.full_name: getattr(error_details_pb2, name)
    for name, descriptor in error_details_pb2.DESCRIPTOR.message_types_by_name.items()
}


def status_to_json(data: bytes) -> tuple[int, str, list[bytes]]:
    """Read a google.rpc.Status: code, message, and each detail as JSON text with ``@type``.

    Details that are not of google.rpc, or do not decode, become ``{"@type":…,"value":base64}``.
    Raises InvalidMessage for bytes that are no Status.
    """
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        raise InvalidMessage("is not a google.rpc.Status") from None
    return status.code, status.message, [_print_detail(detail) for detail in status.details]


def status_from_json(code: int, message: str, details: Sequence[bytes]) -> bytes:
    """Serialise a google.rpc.Status with details from JSON texts with ``@type``.

    Left out are details that are not of google.rpc, and those that do not parse. Metadata of an
    ErrorInfo is map<string, string>, which agents fill with numbers and lists: values that are no
    strings become their JSON text.
    """
    # An agent's text may hold lone surrogates, which JSON can escape and UTF-8 has no bytes for.
    status = status_pb2.Status(code=code, message=message.encode("utf-8", "replace").decode())
    for detail in details:
        parsed = _parse_detail(detail)
        if parsed is not None:
            status.details.add().Pack(parsed)
    serialized: bytes = status.SerializeToString()
    return serialized


def _print_detail(detail: AnyMessage) -> bytes:
    known = _RPC_TYPES.get(detail.TypeName())
    printed: dict[str, Json] | None = None
    if known is not None:
        try:
            printed = json_format.MessageToDict(known.FromString(detail.value))
        except (DecodeError, json_format.Error):
            printed = None
    if printed is None:
        printed = {"value": protojson_write.write_bytes(detail.value)}
    return msgspec.json.encode({"@type": detail.type_url} | printed)


def _parse_detail(detail: bytes) -> AnyMessage | None:
    """The google.rpc message of a JSON text with ``@type``, or None."""
    try:
        value = _load(detail)
        known = _RPC_TYPES.get(value.pop("@type").rpartition("/")[2])
        if known is None:
            return None
        metadata = value.get("metadata")
        if known is error_details_pb2.ErrorInfo and isinstance(metadata, dict):
            value["metadata"] = {key: as_text(item) for key, item in metadata.items()}
        return json_format.ParseDict(value, known(), ignore_unknown_fields=True)
    except (
        json_format.Error,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ):
        return None  # a detail adds to an error; one that is broken must not replace it


def as_text(value: object) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# --- text and bytes ------------------------------------------------------------------------------


def _class(message: str) -> AnyMessage:
    return empty_pb2.Empty if message == _EMPTY else getattr(a2a_pb2, message)


def _parse(message: str, data: bytes) -> AnyMessage:
    try:
        return _class(message).FromString(data)
    except DecodeError:
        raise InvalidMessage(f"is not a {message} in protobuf") from None


def _load(data: bytes) -> Json:
    """Read JSON text; what protobuf cannot hold is left for the readers to find and name."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidMessage("is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError):
        return _load_again(data)


def _load_again(data: bytes) -> Json:
    """Read what msgspec refuses: lone surrogates, and numbers beyond a double (as infinity)."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InvalidMessage("is not JSON in UTF-8") from None
    except ValueError:  # the interpreter's limit on digits
        raise NotRepresentable("has a number that is beyond the range of a double") from None
    except RecursionError:
        raise InvalidMessage("is nested too deeply") from None


def _refuse_constant(name: str) -> Never:
    raise json.JSONDecodeError(f"{name} is not JSON", "", 0)
