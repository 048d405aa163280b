"""A scripted agent: bytes in, bytes out, no tasks. It counts what an agent could have executed.

It speaks HTTP/1.1 (JSON-RPC and HTTP+JSON) or HTTP/2 (gRPC), plain or inside TLS. Its frames are made
by hand, so that nothing here shares code with what is under test.
"""

from __future__ import annotations

import re
import ssl
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from hpack import Encoder

from sidecar.core import convert

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER: Final = b'{"message":{"messageId":"a","role":"ROLE_AGENT","parts":[{"text":"done"}]}}'
EVENTS: Final = (
    b'{"task":{"id":"t","contextId":"c","status":{"state":"TASK_STATE_WORKING"}}}',
    b'{"statusUpdate":{"taskId":"t","contextId":"c","status":{"state":"TASK_STATE_WORKING"}}}',
    b'{"statusUpdate":{"taskId":"t","contextId":"c","status":{"state":"TASK_STATE_COMPLETED"}}}',
)


@dataclass(slots=True)
class Started:
    """A request whose head has arrived: the moment from which a hasty agent may act on it."""

    complete: bool = False
    """All of it has arrived: the moment from which any agent may."""
    refused: bool = False
    """The agent has said that it will not act on it."""
    body: bytes = b""
    """Once it is complete."""


@dataclass(slots=True)
class Ledger:
    """What all peers of one cell have been asked."""

    requests: list[Started] = field(default_factory=list)

    def begin(self) -> Started:
        self.requests.append(Started())
        return self.requests[-1]

    @property
    def executions(self) -> int:
        return sum(each.complete and not each.refused for each in self.requests)

    @property
    def heads(self) -> int:
        return sum(not each.refused for each in self.requests)


class Peer(Protocol):
    """One connection, as the agent sees it."""

    def greet(self) -> bytes:
        """What is said before anything was heard."""
        ...

    def receive(self, data: bytes) -> bytes:
        """What is answered to `data`. A reply is the last that is said."""
        ...

    def goaway(self, *, hasty: bool) -> bytes:
        """No more requests are taken; those not begun are refused. `hasty`: begun with their head."""
        ...


# --- HTTP/1.1 ---------------------------------------------------------------------------------

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Http1Peer:
    """Serves JSON-RPC at /rpc and HTTP+JSON elsewhere."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._buffer = bytearray()
        self._head = b""
        self._length = 0
        self._request: Started | None = None

    def greet(self) -> bytes:
        return b""

    def receive(self, data: bytes) -> bytes:
        buffer = self._buffer
        buffer += data
        said = b""
        while True:
            if self._request is None:
                end = buffer.find(b"\r\n\r\n") + 4
                if end < 4:
                    return said
                self._head = bytes(buffer[:end])
                del buffer[:end]
                length = _LENGTH.search(self._head)
                self._length = int(length[1]) if length else 0
                self._request = self._ledger.begin()
            if len(buffer) < self._length:
                return said
            body = bytes(buffer[: self._length])
            del buffer[: self._length]
            self._request.complete = True
            self._request.body = body
            self._request = None
            said += self._reply(body)

    def _reply(self, body: bytes) -> bytes:
        rpc = self._head.startswith(b"POST /rpc ")
        if b"SendStreamingMessage" in body or b"/message:stream " in self._head:
            return _sse([_rpc(event) if rpc else event for event in EVENTS], interim=not rpc)
        return _whole(_rpc(ANSWER)) if rpc else _chunked(ANSWER)

    def goaway(self, *, hasty: bool) -> bytes:
        raise NotImplementedError("HTTP/1.1 has no such thing")


def _rpc(result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":1,"result":%b}' % result


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _chunked(body: bytes) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + _chunk(body[:20]) + _chunk(body[20:]) + b"0\r\n\r\n"


def _sse(events: Sequence[bytes], *, interim: bool) -> bytes:
    head = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" if interim else b""
    head += (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + b"".join(_chunk(b"data: %b\n\n" % event) for event in events) + b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# --- HTTP/2 -----------------------------------------------------------------------------------

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1


def frame(kind: int, flags: int, stream_id: int, body: bytes = b"") -> bytes:
    """One HTTP/2 frame (RFC 9113 4.1)."""
    return struct.pack(">HBBBL", len(body) >> 8, len(body) & 0xFF, kind, flags, stream_id) + body


def _grpc(type_: str, text: bytes) -> bytes:
    message = convert.json_to_proto(type_, text)
    return b"\0" + len(message).to_bytes(4, "big") + message


_HEAD: Final = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])
_TRAILERS: Final = Encoder().encode([("grpc-status", "0")])
_GRPC_ANSWER: Final = _grpc("SendMessageResponse", ANSWER)
_GRPC_EVENTS: Final = tuple(_grpc("StreamResponse", event) for event in EVENTS)


class Http2Peer:
    """Serves gRPC. A request is complete with the end of its stream."""

    def __init__(self, ledger: Ledger, *, streaming: bool) -> None:
        self._ledger = ledger
        self._streaming = streaming
        first, *rest = _GRPC_EVENTS
        self.bodies = [first[:9], first[9:], *rest] if streaming else [_GRPC_ANSWER]
        """Of the DATA frames of a reply."""
        self._buffer = bytearray()
        self._preface = True
        self._open: dict[int, Started] = {}
        self._highest = 0
        """Stream whose headers came last."""
        self._begun = 0
        """Stream that was complete last."""
        self._last: int | None = None
        """Of our GOAWAY."""

    def greet(self) -> bytes:
        return frame(SETTINGS, 0, 0, struct.pack(">HL", 3, 100))

    def goaway(self, *, hasty: bool) -> bytes:
        self._last = self._highest if hasty else self._begun
        for stream_id, request in self._open.items():
            request.refused = stream_id > self._last
        return frame(GOAWAY, 0, 0, struct.pack(">LL", self._last, 0))

    def receive(self, data: bytes) -> bytes:
        buffer = self._buffer
        buffer += data
        if self._preface:
            if len(buffer) < len(PREFACE):
                return b""
            assert buffer.startswith(PREFACE)
            del buffer[: len(PREFACE)]
            self._preface = False
        said = []
        while len(buffer) >= 9:
            size = int.from_bytes(buffer[:3], "big")
            if len(buffer) < 9 + size:
                break
            kind, flags, stream_id = buffer[3], buffer[4], int.from_bytes(buffer[5:9], "big")
            body = bytes(buffer[9 : 9 + size])
            del buffer[: 9 + size]
            said.append(self._take(kind, flags, stream_id, body))
        return b"".join(said)

    def _take(self, kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
        if kind in {SETTINGS, PING} and not flags & _ACK:
            return frame(kind, _ACK, 0, body if kind == PING else b"")
        if kind == HEADERS and (self._last is None or stream_id <= self._last):
            assert flags & _END_HEADERS
            assert not flags & _END_STREAM
            self._highest = stream_id
            self._open[stream_id] = self._ledger.begin()
        elif kind == RST_STREAM:
            self._open.pop(stream_id, None)
        elif kind == DATA and stream_id in self._open:
            return self._take_data(flags, stream_id, body)
        return b""

    def _take_data(self, flags: int, stream_id: int, body: bytes) -> bytes:
        request = self._open[stream_id]
        if request.refused:
            return b""
        request.body += body
        if not flags & _END_STREAM:
            credit = len(body).to_bytes(4, "big")
            return frame(WINDOW_UPDATE, 0, stream_id, credit) + frame(WINDOW_UPDATE, 0, 0, credit)
        request.complete = True
        self._begun = stream_id
        del self._open[stream_id]
        return self._reply(stream_id)

    def _reply(self, stream_id: int) -> bytes:
        return b"".join(
            (
                frame(PING, 0, 0, b"question") if self._streaming else b"",
                frame(HEADERS, _END_HEADERS, stream_id, _HEAD),
                *(frame(DATA, 0, stream_id, body) for body in self.bodies),
                frame(HEADERS, _END_HEADERS | _END_STREAM, stream_id, _TRAILERS),
            )
        )


# --- TLS --------------------------------------------------------------------------------------


class TlsPeer:
    """Another peer inside TLS."""

    def __init__(self, inner: Peer, context: ssl.SSLContext) -> None:
        self._inner = inner
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._in, self._out, server_side=True)
        self._open = False
        self._failed = False

    def greet(self) -> bytes:
        return b""

    def receive(self, data: bytes) -> bytes:
        self._in.write(data)
        if not self._failed:
            try:
                self._step()
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLError, ssl.SSLZeroReturnError):
                self._failed = True  # what it has to say about that is in the buffer
        return self._out.read()

    def _step(self) -> None:
        if not self._open:
            self._ssl.do_handshake()
            self._open = True
            self._say(self._inner.greet())
        while data := self._ssl.read(65536):
            self._say(self._inner.receive(data))

    def goaway(self, *, hasty: bool) -> bytes:
        if self._open:
            self._say(self._inner.goaway(hasty=hasty))
        return self._out.read()

    def _say(self, data: bytes) -> None:
        if data:
            self._ssl.write(data)
