"""The exchanges that are cut are sound: other implementations read them as they were meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, TrailersReceived

from sidecar.core.spec import Binding
from tests.exhaustion.rig import Exchange, Shape, record

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.exhaustion.rig import World


def _h11_events(connection: h11.Connection, data: bytes) -> list[h11.Event]:
    connection.receive_data(data)
    events: list[h11.Event] = []
    while not events or not isinstance(events[-1], h11.EndOfMessage):
        event = connection.next_event()
        assert isinstance(event, h11.Event)
        events.append(event)
    assert connection.trailing_data[0] == b""
    return events


@pytest.mark.parametrize("shape", list(Shape), ids=lambda shape: shape.value)
@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.HTTP_JSON])
async def test_http1(
    binding: Binding, shape: Shape, world: World, autojump_clock: MockClock
) -> None:
    recording = await record(world, Exchange(binding=binding, shape=shape))
    request, *_ = _h11_events(h11.Connection(h11.SERVER), recording.request)
    assert isinstance(request, h11.Request)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    replies = _h11_events(client, recording.reply)
    body = b"".join(bytes(each.data) for each in replies if isinstance(each, h11.Data))
    assert (b"COMPLETED" if shape is Shape.STREAM else b"done") in body
    assert (recording.begins, recording.reply[: recording.head_ends][-4:]) == (0, b"\r\n\r\n")


@pytest.mark.parametrize("shape", list(Shape), ids=lambda shape: shape.value)
async def test_http2(shape: Shape, world: World, autojump_clock: MockClock) -> None:
    recording = await record(world, Exchange(binding=Binding.GRPC, shape=shape))
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    server.increment_flow_control_window(1 << 20)
    server.local_settings.initial_window_size = 1 << 20
    server.local_settings.acknowledge()
    before = server.receive_data(recording.request[: recording.begins])
    assert not any(isinstance(event, RequestReceived) for event in before)
    events = server.receive_data(recording.request[recording.begins :])
    assert isinstance(events[0], RequestReceived)
    assert any(isinstance(event, StreamEnded) for event in events)
    client = H2Connection(H2Configuration())
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    )
    if shape is not Shape.LARGE:  # that has credit for data that this client has not sent
        replies = client.receive_data(recording.reply)
        messages = sum(isinstance(event, DataReceived) for event in replies)
        assert messages == (4 if shape is Shape.STREAM else 1)
        assert isinstance(replies[-2], TrailersReceived)
        assert isinstance(replies[-1], StreamEnded)


@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.GRPC])
async def test_tls_is_as_long_each_time(
    binding: Binding, world: World, autojump_clock: MockClock
) -> None:
    exchange = Exchange(binding=binding, shape=Shape.UNARY, tls=True)
    lengths = set()
    for _ in range(3):
        world.recordings.pop(exchange, None)
        recording = await record(world, exchange)
        lengths.add((len(recording.request), len(recording.reply), recording.begins))
    assert len(lengths) == 1
