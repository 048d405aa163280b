"""HTTP/2 header fields: received ones checked and turned into text, ours encoded.

Every field is looked at once. Our header blocks use no dynamic table: a field is encoded the first
time and remembered, which costs some bytes on the wire and saves most of the time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from sidecar.wire.http2_engine import UnsendableHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sidecar.core.types import Headers

_is_name = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_is_bad_value = re.compile(r"[\0\r\n]|\A[ \t]|[ \t]\Z").search
_is_status = re.compile(r"[1-9][0-9][0-9]").fullmatch
_is_length = re.compile(r"[0-9]{1,18}").fullmatch

_CONNECTION_FIELDS: Final = frozenset(
    {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
)
_REQUEST_PSEUDO: Final = frozenset({":method", ":scheme", ":authority", ":path"})
_SECRET: Final = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})

_KEPT_NAMES: Final = 1024
_KEPT_FIELDS: Final = 2048
_KEPT_VALUE: Final = 256


class Malformed(Exception):
    """A message that is not well formed (RFC 9113 8.1.1): its stream ends."""


# --- received ---------------------------------------------------------------------------------

_names: dict[bytes, str] = {}
"""Names that were found good, as text."""


def read_fields(
    fields: Iterable[tuple[bytes, bytes]], *, request: bool, trailers: bool
) -> tuple[Headers, int]:
    """The fields of one header block as text (latin-1), in order, and the status; raises Malformed.

    A request keeps its pseudo headers, in front. A reply has only ``:status``, which is returned
    beside its headers; 101 is malformed, HTTP/2 has no upgrade. The status is 0 for all but replies.
    """
    headers: Headers = []
    pseudo: dict[str, str] = {}
    length = ""
    for raw, octets in fields:
        value = octets.decode("latin-1")
        if _is_bad_value(value):
            raise Malformed(f"value of header {raw!r}")
        if raw[:1] == b":":
            name = raw.decode("latin-1")
            if headers or name in pseudo:
                raise Malformed(f"pseudo header {raw!r} out of place")
            pseudo[name] = value
            continue
        name = _names.get(raw) or _check_name(raw)
        if name == "content-length":
            if not _is_length(value) or (length and length != value):
                raise Malformed("content-length")
            length = value
        elif name == "te" and value.lower() != "trailers":
            raise Malformed("te")
        headers.append((name, value))
    if trailers:
        if pseudo:
            raise Malformed("pseudo headers in trailers")
        return headers, 0
    if request:
        _check_request(pseudo, headers)
        return [*pseudo.items(), *headers], 0
    status = pseudo.get(":status", "")
    if len(pseudo) != 1 or not _is_status(status) or status == "101":
        raise Malformed(f"pseudo headers of a reply: {pseudo}")
    return headers, int(status)


def _check_name(raw: bytes) -> str:
    if not _is_name(raw):
        raise Malformed(f"header name {raw!r}")
    name = raw.decode("ascii")
    if name in _CONNECTION_FIELDS:
        raise Malformed(f"header {name} belongs to HTTP/1.1")
    if len(_names) >= _KEPT_NAMES:
        _names.clear()
    _names[raw] = name
    return name


def _check_request(pseudo: dict[str, str], headers: Headers) -> None:
    method = pseudo.get(":method", "")
    needed = (":authority",) if method == "CONNECT" else (":scheme", ":path")
    if not method or not all(pseudo.get(name) for name in needed):
        raise Malformed(f"pseudo headers {sorted(pseudo)} are not enough")
    if not pseudo.keys() <= _REQUEST_PSEUDO:
        raise Malformed(f"pseudo headers {sorted(pseudo)}")
    hosts = [value for name, value in headers if name == "host"]
    if ":authority" in pseudo:
        hosts.append(pseudo[":authority"])
    if not hosts or any(host != hosts[0] for host in hosts):
        raise Malformed("not one authority")


# --- ours -------------------------------------------------------------------------------------


class FieldEncoder:
    """Encodes header blocks without state, so one serves all connections (RFC 7541)."""

    def __init__(self, static_table: Sequence[tuple[bytes, bytes]]) -> None:
        """`static_table`: RFC 7541 Appendix A, the first entry has index 1."""
        self._indices: dict[tuple[bytes, bytes], int] = {}
        self._name_indices: dict[bytes, int] = {}
        for index, (name, value) in enumerate(static_table, 1):
            self._indices.setdefault((name, value), index)
            self._name_indices.setdefault(name, index)
        self._known: dict[tuple[str, str], bytes] = {}

    def encode(self, headers: Headers) -> bytes:
        """A header block; raises UnsendableHeader."""
        known = self._known
        return b"".join([known.get(field) or self._encode(field) for field in headers])

    def _encode(self, field: tuple[str, str]) -> bytes:
        name, text = field
        try:
            raw, value = name.encode("ascii"), text.strip(" \t").encode("latin-1")
        except UnicodeEncodeError:
            raise UnsendableHeader(f"header {name!r} is not latin-1") from None
        if not _is_name(raw.removeprefix(b":")) or _is_bad_value(value.decode("latin-1")):
            raise UnsendableHeader(f"header {name!r} has octets that are not allowed")
        if name in _CONNECTION_FIELDS:
            raise UnsendableHeader(f"header {name!r} belongs to HTTP/1.1")
        secret = name in _SECRET
        encoded = self._represent(raw, value, secret=secret)
        if not secret and len(value) <= _KEPT_VALUE:
            if len(self._known) >= _KEPT_FIELDS:
                self._known.clear()
            self._known[field] = encoded
        return encoded

    def _represent(self, raw: bytes, value: bytes, *, secret: bool) -> bytes:
        """By index where the static table has it, else a literal without indexing.

        A secret is marked to be never indexed, for the sake of proxies behind us (6.2.3).
        """
        index = self._indices.get((raw, value))
        if index is not None:
            return _integer(index, 7, 0x80)
        index = self._name_indices.get(raw, 0)
        head = _integer(index, 4, 0x10 if secret else 0x00)
        if not index:
            head += _integer(len(raw), 7) + raw
        return head + _integer(len(value), 7) + value


def _integer(number: int, bits: int, flags: int = 0) -> bytes:
    """RFC 7541 5.1."""
    limit = (1 << bits) - 1
    if number < limit:
        return bytes((flags | number,))
    octets = [flags | limit]
    number -= limit
    while number >= 128:
        octets.append(number & 127 | 128)
        number >>= 7
    octets.append(number)
    return bytes(octets)
