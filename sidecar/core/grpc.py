"""The gRPC binding (A2A section 10): both ends, messages and metadata in and values out."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import replace
from urllib.parse import unquote_to_bytes

from grpclib.metadata import encode_grpc_message, encode_timeout

from sidecar.core import convert, errors, relay, tenant
from sidecar.core.grpc_frames import GrpcReader, MessageTooLarge, grpc_frame
from sidecar.core.payload import PayloadError
from sidecar.core.spec import (
    GRPC_SERVICE,
    VERSION_HEADER,
    Binding,
    Operation,
)
from sidecar.core.types import (
    Call,
    Form,
    Headers,
    Interface,
    Payload,
    Reply,
    ReplyHead,
    Request,
    header,
)

__all__ = [
    "EventReader",
    "MessageTooLarge",
    "decode_details",
    "decode_message",
    "encode_message",
    "encode_request",
    "event_reader",
    "read_reply",
    "status_trailers",
    "timeout_header",
]

CONTENT_TYPE = "application/grpc"
# At most eight digits: beyond three years in seconds there is no timeout.
_LONGEST_TIMEOUT = 99_999_999.0

_UNIMPLEMENTED = 12

# --- upstream ---------------------------------------------------------------------------------


def encode_request(call: Call, interface: Interface) -> Request:
    """`call` as it goes to `interface`; raises InvalidMessage when protobuf cannot hold it."""
    message = tenant.put(call.operation, call.payload, interface.tenant)
    data = message.data
    if message.form is Form.JSON:
        data = convert.json_to_proto(call.operation.request, data)
    headers: Headers = [
        ("te", "trailers"),
        ("content-type", CONTENT_TYPE),
        ("grpc-accept-encoding", "identity,gzip"),
        (VERSION_HEADER, str(interface.version)),
        *relay.fit(call.headers, Binding.GRPC),
    ]
    return Request("POST", f"/{GRPC_SERVICE}/{call.operation.name}", headers, grpc_frame(data))


def timeout_header(seconds: float) -> tuple[str, str]:
    """What is left of a deadline, as it goes upstream."""
    return "grpc-timeout", encode_timeout(min(max(seconds, 0.001), _LONGEST_TIMEOUT))


def read_reply(
    operation: Operation, head: ReplyHead, body: bytes, trailers: Headers, *, limit: int
) -> Reply:
    """A complete reply to a unary call; raises MessageTooLarge."""
    reader = EventReader(operation, head, limit)
    messages = reader.feed(body)
    end = reader.end(trailers)
    if messages and end.error is None and end.grpc_status == _UNIMPLEMENTED:
        return replace(end, plain=None, malformed="it has a message, and is not implemented")
    if end.grpc_status != 0 or end.malformed:
        return end
    if len(messages) != 1:
        count = len(messages)
        return Reply(
            http_status=200, grpc_status=0, malformed=f"it has {count} messages instead of one"
        )
    return messages[0]


def event_reader(operation: Operation, head: ReplyHead, limit: int) -> EventReader:
    """Reads the messages of a stream."""
    return EventReader(operation, head, limit)


class EventReader:
    """Bytes of a gRPC reply in, one `Reply` per message out, and one for the end."""

    def __init__(self, operation: Operation, head: ReplyHead, limit: int) -> None:
        self._head = head
        self._operation = operation
        self._frames: GrpcReader | None = None
        self._broken = ""
        if self.is_grpc:
            self._frames = GrpcReader(limit, header(head.headers, "grpc-encoding"))

    @property
    def is_grpc(self) -> bool:
        """Whether the head is that of a gRPC reply: 200 and an ``application/grpc`` type."""
        content_type = header(self._head.headers, "content-type") or ""
        return self._head.status == 200 and content_type.lower().startswith(CONTENT_TYPE)

    def feed(self, data: bytes) -> list[Reply]:
        """The messages that `data` completes; raises MessageTooLarge."""
        if self._frames is None or self._broken:
            return []
        try:
            return [self._message(message) for message in self._frames.feed(data)]
        except PayloadError as error:
            self._broken = str(error)
            return [Reply(http_status=200, grpc_status=0, malformed=self._broken)]

    def _message(self, data: bytes) -> Reply:
        try:
            convert.validate_response(self._operation.response, data)
        except convert.InvalidMessage as error:
            return Reply(http_status=200, grpc_status=0, malformed=str(error))
        return Reply(http_status=200, grpc_status=0, payload=Payload(Form.PROTO, data))

    def end(self, trailers: Headers) -> Reply:
        """The reply's end: its status, or why it has none."""
        block = trailers if header(trailers, "grpc-status") is not None else self._head.headers
        status = _status(block)
        if status is None:
            return self._without_status()
        if status == 0:
            return self._ended_ok()
        message = decode_message(header(block, "grpc-message") or "")
        details = decode_details(header(block, "grpc-status-details-bin"))
        record, recognised = errors.read_grpc(status, message, details, block)
        return Reply(
            http_status=self._head.status,
            grpc_status=status,
            error=record if recognised else None,
            plain=None if recognised else record,
        )

    def _ended_ok(self) -> Reply:
        why = self._broken
        if not why and self._frames is not None:
            try:
                self._frames.end()
            except PayloadError as error:
                why = str(error)
        if not why and self._frames is None:
            why = "it is not of type application/grpc"
        return Reply(http_status=200, grpc_status=0, malformed=why)

    def _without_status(self) -> Reply:
        head = self._head
        if 200 <= head.status < 300:
            return Reply(http_status=head.status, malformed="it has no grpc-status")
        return Reply(http_status=head.status, plain=errors.refused(head.status, head.headers))


def _status(block: Headers) -> int | None:
    raw = header(block, "grpc-status")
    if raw is None:
        return None
    return int(raw) if _STATUS.fullmatch(raw) else 2


_STATUS = re.compile("[0-9]{1,3}")


def decode_message(raw: str) -> str:
    """The text of a percent-encoded grpc-message; broken escapes are kept, never an error."""
    if "%" not in raw and raw.isascii():
        return raw
    return unquote_to_bytes(raw.encode("latin-1", "replace")).decode("utf-8", "replace")


def decode_details(raw: str | None) -> bytes | None:
    """The bytes of grpc-status-details-bin, padded or not, the first of joined values."""
    if raw is None:
        return None
    first = raw.split(",")[0].strip()
    try:
        return base64.b64decode(first + "=" * (-len(first) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


# --- downstream -------------------------------------------------------------------------------


def status_trailers(status: int, message: str, details: bytes | None) -> Headers:
    """Trailers that end a reply with `status`."""
    trailers: Headers = [("grpc-status", str(status))]
    if message:
        trailers.append(("grpc-message", encode_message(message)))
    if details:
        encoded = base64.b64encode(details).decode("ascii").rstrip("=")
        trailers.append(("grpc-status-details-bin", encoded))
    return trailers


def encode_message(text: str) -> str:
    """A grpc-message. Spaces at its ends are encoded: HTTP/2 would take them off (RFC 9113 8.2.1)."""
    encoded = encode_grpc_message(text)
    inner = encoded.strip(" ")
    if len(inner) == len(encoded):
        return encoded
    before = len(encoded) - len(encoded.lstrip(" "))
    return "%20" * before + inner + "%20" * (len(encoded) - before - len(inner))
