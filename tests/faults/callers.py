"""Applications that leave in the middle: callers on bare sockets, one call each."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import h2.config
import h2.connection
import h2.events
import h2.settings
import trio

from tests.faults.faults import GRPC, JSONRPC
from tests.harness import message
from tests.peers.mini import SERVICE, frame
from tests.system.world import send_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CANCEL: Final = 8


class Caller:
    """One call under way."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.received = b""

    async def read(self, mark: bytes = b"") -> None:
        """Read until `mark` has come, or to the end."""
        while not mark or mark not in self.received:
            data = await self.stream.receive_some()
            if not data:
                assert not mark, self.received
                return
            self.take(data)

    def take(self, data: bytes) -> None:
        """What came."""
        self.received += data

    async def half_close(self) -> None:
        """FIN, and go on reading."""
        await self.stream.send_eof()

    async def reset(self) -> None:
        """RST."""
        sock = self.stream.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    async def cancel(self) -> None:
        """What the binding has for leaving one call: here there is only the connection."""
        await self.reset()


class GrpcCaller(Caller):
    """One call over HTTP/2."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.headers: dict[str, str] = {}
        self.ended = False

    async def begin(self, method: str, request: bytes, timeout: str = "") -> None:
        """Send the request, with a ``grpc-timeout`` if there is one."""
        self.h2.initiate_connection()
        headers = _grpc_headers(method)
        if timeout:
            headers.append(("grpc-timeout", timeout))
        self.h2.send_headers(1, headers)
        await self.stream.send_all(self.h2.data_to_send())
        view = memoryview(frame(request))
        while view:
            size = min(self.h2.local_flow_control_window(1), self.h2.max_outbound_frame_size)
            if size <= 0:
                self.take(await self.stream.receive_some())
                continue
            part, view = view[:size], view[size:]
            self.h2.send_data(1, bytes(part), end_stream=not view)
            await self.stream.send_all(self.h2.data_to_send())

    def take(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self.headers.update({str(n): str(v) for n, v in event.headers})
                case h2.events.DataReceived():
                    self.received += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, 1)
                case h2.events.StreamEnded() | h2.events.StreamReset():
                    self.ended = True
                case _:
                    pass

    async def read(self, mark: bytes = b"") -> None:
        while not self.ended and (not mark or mark not in self.received):
            data = await self.stream.receive_some()
            assert data, "the sidecar closed the connection"
            self.take(data)
            await self.stream.send_all(self.h2.data_to_send())

    async def cancel(self) -> None:
        """RST_STREAM; the connection stays."""
        self.h2.reset_stream(1, CANCEL)
        await self.stream.send_all(self.h2.data_to_send())


class StingyClient:
    """Unary calls on one connection whose windows open a little at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1},
        )
        self.sizes: dict[int, int] = {}
        """Bytes received, by stream."""
        self.statuses: dict[int, str] = {}
        self._stream = stream
        self._unpaid = 0

    async def run(self, requests: list[bytes]) -> None:
        """Make the calls at once; the first is reset when a quarter of a megabyte is half there."""
        self.h2.initiate_connection()
        ids = [1 + 2 * n for n in range(len(requests))]
        for stream_id in ids:
            self.sizes[stream_id] = 0
            self.h2.send_headers(stream_id, _grpc_headers("SendMessage"))
        bodies = {id_: memoryview(frame(data)) for id_, data in zip(ids, requests, strict=True)}
        while bodies:
            put = [self._put(bodies, stream_id) for stream_id in list(bodies)]
            await self._exchange(reads=not any(put))
        turns = 0
        while set(ids) - self.statuses.keys():
            await self._exchange(reads=True)
            turns += 1
            self._grant([id_ for id_ in reversed(ids) if id_ not in self.statuses], turns)

    def _put(self, bodies: dict[int, memoryview], stream_id: int) -> bool:
        view = bodies[stream_id]
        size = min(
            self.h2.local_flow_control_window(stream_id),
            self.h2.max_outbound_frame_size,
            len(view),
        )
        if size > 0:
            self.h2.send_data(stream_id, bytes(view[:size]), end_stream=size == len(view))
            bodies[stream_id] = view[size:]
            if size == len(view):
                del bodies[stream_id]
        return size > 0

    def _grant(self, ids: list[int], turns: int) -> None:
        """A byte for each of the first turns, then 16,383; the connection's when it is used up."""
        for stream_id in ids:
            self.h2.increment_flow_control_window(1 if turns < 5 else 16_383, stream_id)
        if self.h2.inbound_flow_control_window < 20_000 and self._unpaid:
            self.h2.increment_flow_control_window(self._unpaid)
            self._unpaid = 0
        if self.sizes[1] > 100_000 and 1 not in self.statuses:
            self.statuses[1] = "reset"
            self.h2.reset_stream(1, CANCEL)

    async def _exchange(self, *, reads: bool) -> None:
        await self._stream.send_all(self.h2.data_to_send())
        if not reads:
            return
        data = await self._stream.receive_some()
        assert data, "the sidecar closed the connection"
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.DataReceived():
                    assert event.stream_id is not None
                    self.sizes[event.stream_id] += event.flow_controlled_length
                    self._unpaid += event.flow_controlled_length
                case h2.events.TrailersReceived():
                    assert event.stream_id is not None
                    trailers = {str(n): str(v) for n, v in event.headers}
                    self.statuses[event.stream_id] = trailers["grpc-status"]
                case h2.events.StreamReset():
                    raise AssertionError(event)
                case _:
                    pass


def _grpc_headers(method: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", SERVICE + method),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("a2a-version", "1.0"),
    ]


def http_request(binding: str, agent: str, params: dict[str, Any], *, streaming: bool) -> bytes:
    """SendMessage or SendStreamingMessage over HTTP/1.1."""
    path = f"/agents/{agent}"
    if binding == JSONRPC:
        method = "SendStreamingMessage" if streaming else "SendMessage"
        params = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    else:
        path += "/message:stream" if streaming else "/message:send"
    body = json.dumps(params).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"a2a-version: 1.0\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def calling(
    address: str,
    binding: str,
    agent: str,
    message_id: str,
    *,
    streaming: bool = False,
    size: int = 0,
    timeout: str = "",
) -> AsyncIterator[Caller]:
    """Begin a call; whatever is left of it at the end is broken off."""
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    text = "x" * size or "hello"
    caller: Caller
    try:
        if binding == GRPC:
            caller = grpc = GrpcCaller(stream)
            method = "SendStreamingMessage" if streaming else "SendMessage"
            await grpc.begin(method, send_pb(text, message_id, agent), timeout)
        else:
            caller = Caller(stream)
            params = message(text, message_id)
            await stream.send_all(http_request(binding, agent, params, streaming=streaming))
        yield caller
    finally:
        await trio.aclose_forcefully(stream)
