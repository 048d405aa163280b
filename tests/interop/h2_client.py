"""A gRPC client for tests: h2 on trio sockets, one connection, nothing hidden.

Unlike complete clients it shows initial and trailing metadata apart, sends what it is told to, and
gives flow-control credit only for what the test has taken.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import h2.settings
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

SERVICE = "/lf.a2a.v1.A2AService/"
Pairs = list[tuple[str, str]]


def frame(message: bytes, *, compressed: bool = False) -> bytes:
    """One length-prefixed message."""
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


@dataclass
class Stream:
    """One call. `headers` and `trailers` are there once `next` or `ended` says so."""

    connection: Connection
    id: int
    headers: Pairs = field(default_factory=list)
    trailers: Pairs = field(default_factory=list)
    reset: int | None = None
    done: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _owed: int = 0
    """Bytes that were received and not yet credited."""
    _came: trio.Event = field(default_factory=trio.Event)

    async def next(self, seconds: float = 10) -> bytes | None:
        """The next message, None at the end; it must come within `seconds`."""
        with trio.fail_after(seconds):
            while not (message := self._take()):
                if self.done:
                    return None
                await self._wait()
        await self._credit()
        return message[0]

    def _take(self) -> tuple[bytes] | None:
        size = int.from_bytes(self._data[1:5], "big") + 5 if len(self._data) >= 5 else math.inf
        if len(self._data) < size:
            return None
        message = bytes(self._data[5 : int(size)])
        del self._data[: int(size)]
        return (message,)

    async def ended(self, seconds: float = 10) -> None:
        """Wait for the end."""
        with trio.fail_after(seconds):
            while not self.done:
                await self._wait()

    async def opened(self, seconds: float = 10) -> None:
        """Wait for the headers."""
        with trio.fail_after(seconds):
            while not self.headers and not self.done:
                await self._wait()

    async def cancel(self) -> None:
        """RST_STREAM(CANCEL)."""
        self.connection.h2.reset_stream(self.id, 8)
        await self.connection.flush()

    async def _wait(self) -> None:
        came = self._came = trio.Event()
        # Without credit a message that is larger than the window would never come.
        await self._credit()
        await came.wait()

    async def _credit(self) -> None:
        if self._owed and not self.done:
            self.connection.h2.increment_flow_control_window(self._owed, self.id)
            self._owed = 0
            await self.connection.flush()

    @property
    def status(self) -> int:
        """grpc-status; the headers of a trailers-only answer count as trailers."""
        return int(self.get("grpc-status") or -1)

    def get(self, name: str) -> str | None:
        """The first value in the trailers, else in the headers."""
        pairs = [*self.trailers, *self.headers]
        return next((value for key, value in pairs if key == name), None)

    def event(self, event: h2.events.Event) -> None:
        """Take what the connection has for this stream."""
        match event:
            case h2.events.ResponseReceived():
                self.headers = _text(event.headers)
            case h2.events.TrailersReceived():
                self.trailers = _text(event.headers)
            case h2.events.DataReceived():
                self._data += event.data
                self._owed += event.flow_controlled_length
                # The connection's own window never holds a stream up.
                self.connection.h2.increment_flow_control_window(event.flow_controlled_length)
            case h2.events.StreamEnded():
                self.done = True
            case h2.events.StreamReset():
                self.reset, self.done = int(event.error_code), True
            case _:
                return
        self._came.set()


def _text(headers: object) -> Pairs:
    return [(str(name), str(value)) for name, value in headers or ()]  # type: ignore[attr-defined]


class Connection:
    """One HTTP/2 connection; its streams are independent."""

    def __init__(self, wire: trio.SocketStream, authority: str, window: int) -> None:
        self._wire = wire
        self._authority = authority
        config = h2.config.H2Configuration(header_encoding="latin-1")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.h2.local_settings[h2.settings.SettingCodes.ENABLE_PUSH] = 0
        self._streams: dict[int, Stream] = {}
        self._window_grew = trio.Event()
        self._sending = trio.Lock()
        self.pings = 0

    async def start(self) -> None:
        """The preface."""
        self.h2.initiate_connection()
        # Room for every stream's window, so that only the streams' own hold anything up.
        self.h2.increment_flow_control_window(2**24)
        await self.flush()

    async def flush(self) -> None:
        """Send what h2 has."""
        async with self._sending:
            if data := self.h2.data_to_send():
                await self._wire.send_all(data)

    async def run(self) -> None:
        """Read until the connection ends."""
        while data := await self._wire.receive_some(65536):
            for event in self.h2.receive_data(bytes(data)):
                self._event(event)
            await self.flush()
        for stream in self._streams.values():
            stream.done = True
            stream._came.set()

    def _event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.PingReceived):
            self.pings += 1
        if isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
            self._window_grew.set()
        stream = self._streams.get(getattr(event, "stream_id", 0))
        if stream is not None:
            stream.event(event)

    async def call(
        self,
        method: str,
        body: bytes,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        authority: str | None = None,
        content_type: str = "application/grpc",
        host: str | None = None,
    ) -> Stream:
        """Send a whole request; `method` without its service, `body` framed.

        With `host` it has that header and no ``:authority`` (RFC 9113 8.3.1).
        """
        id_ = self.h2.get_next_available_stream_id()
        stream = self._streams[id_] = Stream(self, id_)
        path = method if method.startswith("/") else SERVICE + method
        head = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            ("host", host) if host else (":authority", authority or self._authority),
            ("te", "trailers"),
            ("content-type", content_type),
            *metadata,
        ]
        self.h2.send_headers(id_, head)
        view = memoryview(body)
        while not stream.done:
            window = self.h2.local_flow_control_window(id_)
            size = min(window, self.h2.max_outbound_frame_size, len(view))
            if size < min(1, len(view)):
                self._window_grew = trio.Event()
                await self.flush()
                await self._window_grew.wait()
                continue
            last = size == len(view)
            self.h2.send_data(id_, bytes(view[:size]), end_stream=last)
            view = view[size:]
            await self.flush()
            if last:
                break
        return stream


@asynccontextmanager
async def h2_connection(
    port: int, *, authority: str | None = None, window: int = 65535
) -> AsyncIterator[Connection]:
    """A connection to a port of 127.0.0.1; `window` is what each stream may send uncredited."""
    wire = await trio.open_tcp_stream("127.0.0.1", port)
    connection = Connection(wire, authority or f"127.0.0.1:{port}", window)
    try:
        async with trio.open_nursery() as nursery:
            await connection.start()
            nursery.start_soon(connection.run)
            yield connection
            nursery.cancel_scope.cancel()
    finally:
        wire.socket.close()
