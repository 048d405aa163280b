"""Which headers and metadata cross the sidecar, and in what form (DESIGN 3.9).

End-to-end headers are relayed both ways. What belongs to one connection, to this sidecar or to the
listener's own access control is not; crossing to gRPC, names and values must fit metadata.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

from sidecar.core.spec import EXTENSIONS_HEADER, VERSION_HEADER, Binding
from sidecar.core.types import CONTROLS

if TYPE_CHECKING:
    from sidecar.core.types import Headers

# RFC 9110 7.6.1, and what each hop makes anew.
_PER_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "accept",
        "accept-encoding",
        "accept-charset",
        "expect",
        "date",
        "user-agent",
        "early-data",
        # Digests of a body that is written anew (RFC 9530, RFC 9110 14.4).
        "content-digest",
        "repr-digest",
        "digest",
        "content-md5",
        "content-range",
        VERSION_HEADER,
    }
)
_REQUEST_ONLY_HERE = frozenset(
    {
        "cookie",
        "proxy-authorization",
        "origin",
        "referer",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "if-none-match",
        "if-modified-since",
        "range",
        "cache-control",
        "pragma",
    }
)
_REPLY_ONLY_THERE = frozenset(
    {
        "set-cookie",
        "set-cookie2",
        "alt-svc",
        "location",
        "content-location",
        "refresh",
        "clear-site-data",
        "strict-transport-security",
        "server",
        "proxy-authenticate",
        "etag",
        "last-modified",
        "cache-control",
        "expires",
        "age",
        "vary",
        "pragma",
        "accept-ranges",
        "x-accel-buffering",
        "via",
    }
)
_FOR_ANYBODY = frozenset({EXTENSIONS_HEADER, "traceparent", "tracestate", "x-request-id", "via"})
# An answer's headers may not grow without bound downstream: grpcio's default limit is 8 KiB, of
# which status, message and details have half. A field counts 32 bytes more (RFC 9113 10.5.1).
_REPLY_HEADER_BYTES = 4096
_PER_FIELD = 32

_METADATA_NAME = re.compile(r"[0-9a-z_.\-]+")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")
_FIELD_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")


def _named_by_connection(headers: Headers) -> frozenset[str]:
    named = [
        token.strip().lower()
        for name, value in headers
        if name == "connection"
        for token in value.split(",")
    ]
    return frozenset(named)


def _never(name: str) -> bool:
    return name.startswith((":", "grpc-", "a2a-sidecar-")) or name in _PER_HOP


def request_headers(
    headers: Headers, *, withheld: frozenset[str] = frozenset(), via: str = ""
) -> Headers:
    """The caller's headers that may go upstream, `a2a-extensions` lines joined into one.

    `withheld` names headers that were meant for the sidecar itself, the local token's; `via` is
    the sidecar's own name, added to those of other hops.
    """
    dropped = _named_by_connection(headers) | withheld
    kept: Headers = []
    extensions: list[str] = []
    hops: list[str] = []
    for name, value in headers:
        if _never(name) or name in _REQUEST_ONLY_HERE or name in dropped:
            continue
        if name.startswith("sec-"):
            continue
        if name == "via":
            hops.append(value)
            continue
        if name == EXTENSIONS_HEADER:
            extensions += [part.strip() for part in value.split(",") if part.strip()]
            continue
        kept.append((name, value))
    if extensions:
        kept.append((EXTENSIONS_HEADER, ", ".join(extensions)))
    if via:
        hops.append(f"1.1 {via}")
    if hops:
        kept.append(("via", ", ".join(hops)))
    return kept


def for_foreign_host(headers: Headers) -> Headers:
    """Of the caller's relayed headers those that may go to a host which the card names, not the operator.

    What an application adds is meant for the agent that it calls, and may be a secret under any
    name.
    """
    return [pair for pair in headers if pair[0] in _FOR_ANYBODY]


def reply_headers(headers: Headers) -> Headers:
    """The agent's headers (gRPC: initial metadata, then trailers) that may go downstream."""
    dropped = _named_by_connection(headers)
    kept: Headers = []
    room = _REPLY_HEADER_BYTES
    for name, value in headers:
        if _never(name) or name in _REPLY_ONLY_THERE or name in dropped:
            continue
        if name.startswith("access-control-"):
            continue
        size = len(name) + len(value) + _PER_FIELD
        if size > room:
            continue
        room -= size
        kept.append((name, value))
    return kept


def fit(headers: Headers, binding: Binding) -> Headers:
    """`headers` in the form that `binding` can carry; what does not fit is left out.

    gRPC metadata takes names of ``[0-9a-z_.-]``, visible ASCII and spaces, and base64 under
    ``-bin`` names. HTTP takes any token and no control characters.
    """
    if binding is Binding.GRPC:
        return [pair for pair in map(_as_metadata, headers) if pair is not None]
    return [
        (name, value)
        for name, value in headers
        if _FIELD_NAME.fullmatch(name) and CONTROLS.search(value) is None
    ]


def _as_metadata(pair: tuple[str, str]) -> tuple[str, str] | None:
    name, value = pair
    if not _METADATA_NAME.fullmatch(name):
        return None
    if name.endswith("-bin"):
        try:
            return name, ",".join(_unpadded(part.strip()) for part in value.split(","))
        except (binascii.Error, ValueError):
            return None
    return pair if _METADATA_VALUE.fullmatch(value) else None


def _unpadded(value: str) -> str:
    raw = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    return base64.b64encode(raw).decode("ascii").rstrip("=")
