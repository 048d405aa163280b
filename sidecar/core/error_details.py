"""The details of errors: objects with ``@type``, as JSON texts (A2A sections 9.5, 10.6, 11.6).

Reading what an agent sent, in which nothing may claim the sidecar's own domain; and cutting what
is written to the room there is in gRPC trailers.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sidecar.core import convert, payload, spec

OWN_DOMAIN = "a2a-sidecar"
_FOREIGN_DOMAIN = "a2a-sidecar.upstream"

# Room in trailers: grpcio's default limit is 8 KiB for a whole block, and half of it is ours. The
# message is counted percent-encoded, the details before base64.
MESSAGE_BYTES = 1024
DETAILS_BYTES = 2016


def error_info(reason: str, domain: str, metadata: dict[str, str]) -> bytes:
    """An ErrorInfo as JSON text (google/rpc/error_details.proto)."""
    return msgspec.json.encode(
        {"@type": spec.ERROR_INFO_TYPE, "reason": reason, "domain": domain, "metadata": metadata}
    )


def _spelled(text: str) -> str:
    """A pattern of `text` as a JSON string, with any of its characters escaped."""
    digits = (f"00{ord(c):02x}" for c in text)
    escaped = (re.sub("[a-f]", lambda m: f"[{m[0]}{m[0].upper()}]", d) for d in digits)
    return '"' + "".join(rf"(?:{c}|\\u{d})" for c, d in zip(text, escaped, strict=True)) + '"'


_OUR_DOMAIN = re.compile(
    (_spelled("domain") + r"[ \t\r\n]*:[ \t\r\n]*" + _spelled(OWN_DOMAIN)).encode()
)


def disowned(raw: bytes) -> bytes:
    """JSON text of an agent, with our domain renamed wherever it is claimed."""
    return _OUR_DOMAIN.sub(b'"domain":"%b"' % _FOREIGN_DOMAIN.encode(), raw)


# --- reading -----------------------------------------------------------------------------------


def typed_objects(raw: bytes | None) -> tuple[bytes, ...]:
    """The objects with ``@type`` in a JSON array."""
    try:
        items = payload.split_array(raw or b"[]")
    except payload.PayloadError:
        return ()
    return tuple(item for item in items if isinstance(as_object(item).get("@type"), str))


def as_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a text is; empty for anything else."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_info(detail: bytes) -> bool:
    """Whether a detail is an ErrorInfo."""
    return str(as_object(detail).get("@type")).rpartition("/")[2] == "google.rpc.ErrorInfo"


def infos_of(details: tuple[bytes, ...]) -> list[tuple[str, str]]:
    """Reason and domain of each ErrorInfo."""
    found = []
    for value in map(as_object, filter(is_info, details)):
        reason, domain = value.get("reason"), value.get("domain")
        found.append(
            (
                reason if isinstance(reason, str) else "",
                domain if isinstance(domain, str) else "",
            )
        )
    return found


def told_by(infos: list[tuple[str, str]]) -> tuple[str, str]:
    """The reason and domain that count: of the first A2A one, else of the first."""
    for reason, domain in infos:
        if domain == spec.A2A_DOMAIN or reason in spec.ERROR_BY_REASON:
            return reason, domain
    return infos[0] if infos else ("", "")


def strings_only(detail: bytes) -> bytes:
    """An ErrorInfo with metadata, all strings (its type is map<string, string>); others unchanged."""
    if not is_info(detail):
        return detail
    value = as_object(detail)
    metadata = value.get("metadata")
    if not isinstance(metadata, dict):
        value["metadata"] = {} if metadata is None else {"metadata": convert.as_text(metadata)}
    elif all(isinstance(item, str) for item in metadata.values()):
        return detail
    else:
        value["metadata"] = {key: convert.as_text(item) for key, item in metadata.items()}
    return msgspec.json.encode(value)


# --- cutting -----------------------------------------------------------------------------------


def size_of(message: str, details: list[bytes]) -> int:
    """Bytes of a google.rpc.Status."""
    return len(convert.status_from_json(2, message, details))


def trimmed(detail: bytes, room: int) -> bytes:
    """A detail with no more metadata than there is room for: attempts go first, then the longest."""
    if size_of("", [detail]) <= room or not is_info(detail):
        return detail
    value = as_object(detail)
    metadata: dict[str, str] = value.pop("metadata", None) or {}
    room -= size_of("", [msgspec.json.encode(value | {"metadata": {"left-out": "000000"}})])
    kept = {}
    # Stable: attempts stay in their order, behind everything else.
    for key in sorted(metadata, key=lambda k: (1, 0) if _is_attempt(k) else (0, len(metadata[k]))):
        # A map entry: two strings with their tags and lengths, in an entry with its own.
        size = len(key.encode()) + len(metadata[key].encode()) + 12
        if size <= room:
            room -= size
            kept[key] = metadata[key]
    kept["left-out"] = str(len(metadata) - len(kept))
    return msgspec.json.encode(value | {"metadata": kept})


def _is_attempt(key: str) -> bool:
    return key.startswith("attempt-")


def shortened(message: str) -> str:
    """As much of the text as fits a percent-encoded grpc-message."""
    encoded = message.encode("utf-8", "replace")
    room = MESSAGE_BYTES
    cut = 0
    for place, byte in enumerate(encoded):
        if room >= 9:  # the ellipsis fits behind this place
            cut = place
        room -= 1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3
        if room < 0:
            return encoded[:cut].decode("utf-8", "ignore") + "…"
    return encoded.decode()
