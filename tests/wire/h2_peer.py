"""The other side of an HTTP/2 connection, on h2 itself, and raw frames to say what h2 would not."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeVar

import trio.testing
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, StreamEnded

from sidecar.wire.sockets import WireBroken

if TYPE_CHECKING:
    from tests.wire.memory import MemoryWire

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "agent"),
    (":path", "/a"),
    ("te", "trailers"),
]

E = TypeVar("E", bound=Event)


def frame(kind: int, flags: int = 0, stream_id: int = 0, body: bytes = b"") -> bytes:
    """One frame as it travels."""
    return struct.pack(">HBBBL", len(body) >> 8, len(body) & 0xFF, kind, flags, stream_id) + body


def settings(**values: int) -> bytes:
    codes = {"header_table": 1, "push": 2, "max_streams": 3, "window": 4, "frame": 5, "headers": 6}
    body = b"".join(struct.pack(">HL", codes[name], value) for name, value in values.items())
    return frame(SETTINGS, 0, 0, body)


def goaway(last: int, code: int = 0, debug: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">LL", last, code) + debug)


def rst(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, struct.pack(">L", code))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">L", increment))


def split(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream id, body) of each frame; the client's preface is skipped."""
    data = data.removeprefix(PREFACE)
    frames = []
    while data:
        high, low, kind, flags, stream_id = struct.unpack_from(">HBBBL", data)
        size = high << 8 | low
        frames.append((kind, flags, stream_id, data[9 : 9 + size]))
        assert len(data) >= 9 + size, "half a frame"
        data = data[9 + size :]
    return frames


class Peer:
    """An h2 connection on a wire; nothing happens unless a test asks."""

    def __init__(self, wire: MemoryWire, *, client: bool = False, **initial: int) -> None:
        self.wire = wire
        self.h2 = H2Connection(H2Configuration(client_side=client, header_encoding="latin-1"))
        self.events: list[Any] = []
        self.bodies: dict[int, bytes] = {}
        """Received bytes of each stream, acknowledged as they come unless `greedy` is False."""
        self.greedy = True
        for name, value in initial.items():
            setattr(self.h2.local_settings, name, value)
        self.h2.local_settings.acknowledge()

    async def start(self) -> Peer:
        self.h2.initiate_connection()
        await self.flush()
        return self

    async def flush(self, extra: bytes = b"") -> None:
        data = self.h2.data_to_send() + extra
        if data:
            await self.wire.send(data)

    async def read(self) -> bool:
        """Take one chunk; False at the end."""
        try:
            data = await self.wire.receive()
        except WireBroken:
            return False
        if not data:
            return False
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                if self.greedy and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        await self.flush()
        return True

    async def expect(self, kind: type[E], stream_id: int | None = None) -> E:
        """The next event of this kind (on this stream); what came before it is kept in `seen`."""
        while True:
            for index, event in enumerate(self.events):
                if isinstance(event, kind) and stream_id in {
                    None,
                    getattr(event, "stream_id", None),
                }:
                    del self.events[index]
                    return event
            assert await self.read(), f"the connection ended before {kind.__name__}"

    async def ended(self, stream_id: int | None = None) -> int:
        """The id of the next stream whose other side has ended."""
        return (await self.expect(StreamEnded, stream_id)).stream_id

    async def pump(self) -> None:
        """Read until the connection ends."""
        while await self.read():
            pass

    async def reply(
        self,
        stream_id: int,
        body: bytes = b"",
        *,
        status: str = "200",
        trailers: list[tuple[str, str]] | None = None,
    ) -> None:
        self.h2.send_headers(stream_id, [(":status", status), ("content-type", "x")])
        if body:
            self.h2.send_data(stream_id, body)
        if trailers is None:
            self.h2.end_stream(stream_id)
        else:
            self.h2.send_headers(stream_id, trailers, end_stream=True)
        await self.flush()


async def settle() -> None:
    """Let every task run until it waits."""
    await trio.testing.wait_all_tasks_blocked()
