"""What an HTTP/2 engine is: bytes in, events out, frames queued in one output buffer; no I/O.

`h2_engine` is the one implementation; another must pass the same conformance tests. An engine knows
frames, header compression, stream states, both flow-control windows and the limits on abuse. It
knows neither tasks nor sockets, and what a peer sends never makes it raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from sidecar.core.types import Headers

# Error codes (RFC 9113 7).
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
INTERNAL_ERROR: Final = 0x2
FLOW_CONTROL_ERROR: Final = 0x3
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8
COMPRESSION_ERROR: Final = 0x9
ENHANCE_YOUR_CALM: Final = 0xB
HTTP_1_1_REQUIRED: Final = 0xD

MAX_STREAM_ID: Final = 2**31 - 1
"""In a GOAWAY: a connection that will leave, and refuses nothing yet."""

STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 16 << 20
"""What the peer may send unasked, in bytes."""

MAX_CONTROL_OUTPUT: Final = 1 << 20
"""Bytes of answers to the peer that may wait to be sent."""

MAX_CONTINUATIONS: Final = 64


class RateLimit:
    """At most `limit` hits in `seconds`, counted in windows of that length."""

    __slots__ = ("_count", "_limit", "_seconds", "_since")

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._count = 0
        self._since = float("-inf")

    def hit(self, now: float) -> bool:
        """Count one; False when that is one too many."""
        if now - self._since >= self._seconds:
            self._since = now
            self._count = 0
        self._count += 1
        return self._count <= self._limit

    def forgive(self) -> None:
        """Take one back."""
        if self._count:
            self._count -= 1


# --- events -----------------------------------------------------------------------------------


class PeerSettings(NamedTuple):
    """A SETTINGS frame of the peer took effect; windows and the stream limit may have changed."""

    first: bool


class Head(NamedTuple):
    """The first header block of a request or the final one of a reply.

    `headers` holds the pseudo headers of a request, not those of a reply, whose `status` is set.
    """

    stream_id: int
    headers: Headers
    status: int
    end: bool


class Interim(NamedTuple):
    """A 1xx reply other than 101."""

    stream_id: int


class Data(NamedTuple):
    """Bytes of a body, to be credited with `Engine.credit` when they are taken; may be empty."""

    stream_id: int
    data: bytes
    end: bool


class Trailers(NamedTuple):
    """Trailers, with which the peer's side of the stream ends."""

    stream_id: int
    headers: Headers


class Reset(NamedTuple):
    """The stream is over: by the peer, or, when not `remote`, because its messages are malformed."""

    stream_id: int
    code: int
    remote: bool
    detail: str = ""


class Window(NamedTuple):
    """More may be sent: on one stream, or on all when `stream_id` is 0."""

    stream_id: int


class PingAck(NamedTuple):
    """The answer to `Engine.send_ping`."""

    payload: bytes


class GoAway(NamedTuple):
    """The peer takes no new streams; ours above `last_stream_id` it has not touched."""

    last_stream_id: int
    code: int
    detail: str


class Failed(NamedTuple):
    """The last event: the peer broke the protocol or a limit. A GOAWAY is queued."""

    code: int
    detail: str
    not_http2: bool = False
    """The first frame was not SETTINGS, so nothing is queued either."""


Event: TypeAlias = (
    PeerSettings | Head | Interim | Data | Trailers | Reset | Window | PingAck | GoAway | Failed
)


class UnsendableHeader(ValueError):
    """A name or value of ours that HTTP/2 cannot carry."""


class Engine(Protocol):
    """One side of one HTTP/2 connection.

    Stream ids given to the methods are ones that the engine has named. On a stream that is over,
    all are after `Failed`, they do nothing, and `room` is 0.
    """

    @property
    def pending(self) -> int:
        """Bytes of output that `take_output` would return."""
        ...

    @property
    def max_streams(self) -> int:
        """The peer's limit on streams of ours."""
        ...

    @property
    def open_streams(self) -> int:
        """Streams that are not over on both sides."""
        ...

    @property
    def in_header_block(self) -> bool:
        """Whether the peer has begun a header block and not ended it."""
        ...

    @property
    def last_peer_stream(self) -> int:
        """The highest stream id that the peer has opened."""
        ...

    def start(self) -> None:
        """Queue the preface (client) and our SETTINGS."""
        ...

    def feed(self, data: bytes, now: float) -> list[Event]:
        """Take bytes from the peer, at any boundaries. Nothing follows `Failed`."""
        ...

    def begin(self, headers: Headers, *, end: bool) -> int:
        """Client: queue a request's headers, pseudo headers first; the new stream's id.

        Raises UnsendableHeader and has queued nothing then. The caller keeps to `max_streams`.
        """
        ...

    def write_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """Server: queue the headers of a reply, interim or final, or its trailers.

        Raises UnsendableHeader and has queued nothing then.
        """
        ...

    def room(self, stream_id: int) -> int:
        """How many bytes one `write_data` may carry now; 0 asks about the connection's window."""
        ...

    def write_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """Queue one DATA frame, no longer than `room`."""
        ...

    def credit(self, stream_id: int, count: int) -> None:
        """`count` bytes of the stream's body were taken: let the peer send more on it.

        The connection's window is credited by the engine, on receipt.
        """
        ...

    def cancel(self, stream_id: int, code: int) -> None:
        """End a stream with RST_STREAM; what still comes for it is dropped."""
        ...

    def send_ping(self, payload: bytes) -> None:
        """Queue a PING with these 8 bytes."""
        ...

    def send_goaway(self, last_stream_id: int, code: int) -> None:
        """Queue a GOAWAY. Open streams run on."""
        ...

    def take_output(self) -> bytes:
        """All that is queued."""
        ...
