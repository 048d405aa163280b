"""HTTP/2 frames (RFC 9113 4, 6): types, flags, and the error that ends a connection."""

from __future__ import annotations

import struct
from typing import Final

from sidecar.wire.http2_engine import PROTOCOL_ERROR

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME: Final = struct.Struct(">HBBBL")
SETTING: Final = struct.Struct(">HL")
MAX_FRAME: Final = 16384
"""The longest frame taken, and the longest DATA frame sent, so that streams take turns."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
LENGTHS: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
ON_CONNECTION: Final = frozenset({SETTINGS, PING, GOAWAY})
ON_STREAM: Final = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})
ACK = END_STREAM = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITISED: Final = 0x20


class PeerError(Exception):
    """The peer broke the protocol or a limit: the connection ends."""

    def __init__(self, code: int, detail: str, *, not_http2: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.not_http2 = not_http2


def unpad(body: bytes) -> bytes:
    """The body of a padded frame without its padding (RFC 9113 6.1); raises PeerError."""
    if not body or body[0] >= len(body):
        raise PeerError(PROTOCOL_ERROR, "padding longer than its frame")
    return body[1 : len(body) - body[0]]
