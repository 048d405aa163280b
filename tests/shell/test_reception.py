"""Accepted connections: who may come in, what they speak, and who makes room for whom."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import h2.config
import h2.connection
import h2.events
import pytest
import trio

from sidecar.admin import Admin
from sidecar.budget import Budget
from sidecar.config import Limits, TcpAddress
from sidecar.core.spec import Binding
from sidecar.doors.cards import CardDesk, Place
from sidecar.doors.entry import Entry
from sidecar.doors.grpc import GrpcDoor
from sidecar.doors.http import House
from sidecar.doors.http_json import HttpJsonDoor
from sidecar.doors.jsonrpc import JsonRpcDoor
from sidecar.logs import Log
from sidecar.reception import Reception, Threshold
from sidecar.telemetry import Telemetry
from sidecar.wire import sockets
from sidecar.wire.tls import make_server_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from sidecar.agent import Agent
    from sidecar.forwarder import Forwarder
    from tests.harness import TlsFiles

ASK = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Rig:
    """A reception, and the clients' ends of the connections that it was given."""

    def __init__(self, reception: Reception, telemetry: Telemetry) -> None:
        self.reception = reception
        self.clients: list[trio.SocketStream] = []
        self._telemetry = telemetry

    def connect(self) -> trio.SocketStream:
        """A new connection, as a listener would hand it over."""
        ours, theirs = socket.socketpair()
        self.reception.receive(ours)
        self.clients.append(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
        return self.clients[-1]

    def refused(self, limit: str) -> float:
        """How often a limit was counted."""
        text = self._telemetry.render().decode()
        lines = [line for line in text.splitlines() if f'limit="{limit}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if "_created" not in line)


@pytest.fixture
def log() -> Iterator[Log]:
    with open(os.devnull, "wb") as file:
        log = Log(clock=lambda: 0.0, fd=file.fileno())
        yield log
        log.close()


@asynccontextmanager
async def reception(
    log: Log,
    binding: str = "HTTP+JSON",
    *,
    threshold: Threshold | None = None,
    most: int = 100,
    **limits: Any,
) -> AsyncIterator[Rig]:
    telemetry = Telemetry("1")
    agents: dict[str, Agent] = {}
    house = House(
        forwarder=cast("Forwarder", None),
        agents=agents,
        cards=CardDesk(),
        limits=Limits(**limits),
        budget=Budget(1 << 20),
        new_call_id=lambda: "c",
        count_limit=telemetry.limit,
    )
    address = TcpAddress("127.0.0.1", 1)
    entry = Entry(over_tcp=True, hosts=frozenset(), token=None, pseudonym="us")
    door: Any
    match binding:
        case "JSONRPC":
            door = JsonRpcDoor(
                house, Place(binding=Binding.JSONRPC, address=address, agent=None), entry
            )
        case "GRPC":
            place = Place(binding=Binding.GRPC, address=address, agent=None)
            door = GrpcDoor(house, place, entry, is_ready=lambda: True)
        case "admin":
            door = Admin(telemetry, cast("Any", None))
        case _:
            place = Place(binding=Binding.HTTP_JSON, address=address, agent=None)
            door = HttpJsonDoor(house, place, entry)
    made = Reception(
        door,
        limits=house.limits,
        threshold=threshold or Threshold(),
        max_connections=most,
        max_streams=100,
        telemetry=telemetry,
        log=log,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(made.run)
        rig = Rig(made, telemetry)
        try:
            yield rig
        finally:
            for client in rig.clients:
                client.socket.close()
        nursery.cancel_scope.cancel()
    assert "internal_errors_total{" not in telemetry.render().decode()


async def everything(stream: trio.SocketStream, seconds: float = 5) -> bytes:
    """All that comes until the other side closes."""
    got = bytearray()
    with trio.fail_after(seconds):
        try:
            while data := await stream.receive_some():
                got += data
        except trio.BrokenResourceError:
            pass
    return bytes(got)


async def answer(stream: trio.SocketStream) -> tuple[int, dict[str, str], Any]:
    """One response with a length."""
    got = bytearray()
    with trio.fail_after(5):
        while b"\r\n\r\n" not in got:
            data = await stream.receive_some()
            assert data, bytes(got)
            got += data
        head, _, body = bytes(got).partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        while len(body) < int(headers["content-length"]):
            body += await stream.receive_some()
    return int(first.split()[1]), headers, json.loads(body)


async def closed(stream: trio.SocketStream) -> bool:
    """Whether the other side closes soon."""
    with trio.move_on_after(0.5):
        await everything(stream)
        return True
    return False


# --- users ------------------------------------------------------------------------------------


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (Threshold(), True),
        (Threshold(uids=frozenset({os.getuid()})), True),
        (Threshold(uids=frozenset({os.getuid() + 1})), False),
        (Threshold(gids=frozenset({os.getgid()})), True),
        (Threshold(gids=frozenset({os.getgid() + 70_000})), False),
        (Threshold(uids=frozenset({os.getuid() + 1}), gids=frozenset({os.getgid()})), True),
        (Threshold(uids=frozenset({os.getuid()}), gids=frozenset({os.getgid() + 70_000})), True),
    ],
)
def test_users_and_groups(threshold, expected):
    ours, theirs = pair()
    with ours, theirs:
        assert threshold.lets_in(ours) is expected


def test_further_groups_count():
    if os.getuid() != 0:
        pytest.skip("only root may choose its groups")
    before = os.getgroups()
    os.setgroups([*before, 54_321])
    try:
        ours, theirs = pair()
    finally:
        os.setgroups(before)
    with ours, theirs:
        assert Threshold(gids=frozenset({54_321})).lets_in(ours)
        assert not Threshold(gids=frozenset({54_322})).lets_in(ours)


def test_over_tcp_nobody_can_tell():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            with server.accept()[0] as sock:
                assert Threshold().lets_in(sock)
                assert not Threshold(uids=frozenset({os.getuid()})).lets_in(sock)
            del client


async def test_another_user_is_not_listened_to(log):
    threshold = Threshold(uids=frozenset({os.getuid() + 1}))
    async with reception(log, threshold=threshold) as rig:
        stream = rig.connect()
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(ASK)
        assert await everything(stream) == b""


# --- connections ------------------------------------------------------------------------------


async def use(stream: trio.SocketStream) -> None:
    """One request and its answer; the connection is idle then."""
    await stream.send_all(ASK)
    assert (await answer(stream))[0] == 404


async def hold(stream: trio.SocketStream) -> None:
    """Half a request: the connection is in use."""
    await stream.send_all(ASK[:20])
    await trio.testing.wait_all_tasks_blocked(0.01)


async def test_at_the_limit_the_longest_idle_connection_makes_room(log):
    async with reception(log, most=3) as rig:
        busy, first, second = (rig.connect() for _ in range(3))
        await hold(busy)
        await use(first)
        await use(second)
        third = rig.connect()
        await use(third)
        assert await closed(first)
        assert not await closed(second)
        assert rig.refused("connections") == 0


async def test_a_connection_that_said_nothing_makes_room_first(log):
    async with reception(log, most=2) as rig:
        idle, silent = rig.connect(), rig.connect()
        await use(idle)
        await use(rig.connect())
        assert await closed(silent)
        assert not await closed(idle)


async def test_an_idle_http2_connection_makes_room(log):
    async with reception(log, "GRPC", most=1) as rig:
        first = rig.connect()
        client = h2.connection.H2Connection()
        client.initiate_connection()
        await first.send_all(client.data_to_send())
        events = client.receive_data(await first.receive_some())
        assert any(isinstance(event, h2.events.RemoteSettingsChanged) for event in events)
        second = rig.connect()
        ended = client.receive_data(await everything(first))
        (goaway,) = [e for e in ended if isinstance(e, h2.events.ConnectionTerminated)]
        assert goaway.error_code == 0
        assert not await closed(second)


@pytest.mark.parametrize("binding", ["HTTP+JSON", "JSONRPC", "GRPC"])
async def test_without_an_idle_one_the_newcomer_is_turned_away(log, binding):
    async with reception(log, binding, most=2) as rig:
        busy = [rig.connect(), rig.connect()]
        for stream in busy:
            await hold(stream)
        third = rig.connect()
        match binding:
            case "HTTP+JSON":
                status, headers, body = await answer(third)
                assert status == 503
                assert body["error"]["details"][0]["reason"] == "LIMIT_REACHED"
                assert headers["retry-after"] == "1"
                assert headers["a2a-sidecar-delivered"] == "no"
            case "JSONRPC":
                status, headers, body = await answer(third)
                assert (status, body["id"]) == (200, None)
                assert body["error"]["data"][0]["reason"] == "LIMIT_REACHED"
                assert headers["retry-after"] == "1"
            case _:
                assert await everything(third) == b""
        assert await closed(third)
        assert rig.refused("connections") == 1
        await busy[0].aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not await closed(rig.connect())


async def test_the_last_descriptors_are_for_the_admin_address(log, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with reception(log) as rig, reception(log, "admin") as admin:
        kept = rig.connect()
        await use(kept)
        # As if all numbers below the present ones were in use.
        monkeypatch.setattr(resource, "getrlimit", lambda _: (16, hard))
        fresh = rig.connect()
        await use(fresh)  # the idle one makes room
        assert await closed(kept)
        await hold(fresh)
        status, _, body = await answer(rig.connect())
        assert status == 503
        assert "descriptors" in body["error"]["message"]
        assert rig.refused("descriptors") == 1
        stream = admin.connect()
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await stream.receive_some()
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        assert not await closed(rig.connect())


def test_one_descriptor_in_sixteen_is_reserved(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert next(fd for fd in range(70) if sockets.is_reserved(fd)) == 60
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert not sockets.is_reserved(10**6)


# --- slow clients -----------------------------------------------------------------------------


async def test_a_slow_head_is_refused_and_counted(log, monkeypatch):
    monkeypatch.setattr("sidecar.reception.Http1Limits", short)
    async with reception(log) as rig:
        stream = rig.connect()
        await hold(stream)
        status, _, body = await answer(stream)
        assert status == 408
        assert body["error"]["details"][0]["reason"] == "INVALID_REQUEST"
        assert await closed(stream)
        assert rig.refused("slow_request") == 1


def short(**limits: Any) -> Any:
    from sidecar.wire.http1_server import Http1Limits  # noqa: PLC0415 - the one that is replaced

    return Http1Limits(**{**limits, "head_seconds": 0.2})


async def test_a_slow_grpc_request_is_refused_and_counted(log, monkeypatch):
    monkeypatch.setattr("sidecar.doors.grpc._BODY_SECONDS", 0.2)
    async with reception(log, "GRPC") as rig:
        stream = rig.connect()
        client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        client.initiate_connection()
        path = "/lf.a2a.v1.A2AService/SendMessage"
        head = {":method": "POST", ":scheme": "http", ":authority": "localhost", ":path": path}
        client.send_headers(1, [*head.items(), ("content-type", "application/grpc")])
        client.send_data(1, b"\0\0\0\0\x20half of it")
        await stream.send_all(client.data_to_send())
        trailers: dict[str, str] = {}
        with trio.fail_after(5):
            while not trailers:
                for event in client.receive_data(await stream.receive_some()):
                    if isinstance(event, h2.events.ResponseReceived):
                        trailers = {str(name): str(value) for name, value in event.headers}
        assert trailers["grpc-status"] == "3"
        assert "in time" in trailers["grpc-message"]
        assert rig.refused("slow_request") == 1


@pytest.mark.parametrize("binding", ["HTTP+JSON", "JSONRPC"])
async def test_a_head_that_is_too_large_is_refused_and_counted(log, binding):
    async with reception(log, binding, header_bytes=4096) as rig:
        stream = rig.connect()
        await stream.send_all(ASK[:-2] + b"X-Large: " + b"x" * 5000)
        status, _, body = await answer(stream)
        assert status == 431
        assert "error" in body
        assert rig.refused("header_bytes") == 1


async def test_a_silent_connection_does_not_hold_up_a_drain(log):
    async with reception(log) as rig:
        silent = rig.connect()
        await trio.testing.wait_all_tasks_blocked(0.01)
        begin = trio.current_time()
        rig.reception.retire(30)
        with trio.fail_after(5):
            await rig.reception.ended.wait()
        assert trio.current_time() - begin < 3
        assert await closed(silent)


# --- the wrong protocol -----------------------------------------------------------------------


async def test_http2_on_a_json_listener_is_told_in_http1(log):
    async with reception(log) as rig:
        stream = rig.connect()
        await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        assert (await answer(stream))[0] == 505


async def test_tls_where_none_is_spoken_is_closed_at_once(log):
    async with reception(log) as rig:
        stream = rig.connect()
        await stream.send_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        assert await everything(stream) == b""


async def test_plaintext_where_tls_is_spoken_is_closed(log, tls: TlsFiles):
    threshold = Threshold(tls=make_server_context(str(tls.cert), str(tls.key)))
    async with reception(log, threshold=threshold) as rig:
        stream = rig.connect()
        await stream.send_all(ASK)
        assert b"HTTP/1.1 2" not in await everything(stream)


async def test_tls(log, tls: TlsFiles):
    threshold = Threshold(tls=make_server_context(str(tls.cert), str(tls.key)))
    async with reception(log, threshold=threshold) as rig:
        secured = trio.SSLStream(
            rig.connect(), tls.client_context(), server_hostname="localhost", https_compatible=True
        )
        await secured.send_all(ASK)
        assert b" 404 " in await secured.receive_some()
        await trio.aclose_forcefully(secured)
