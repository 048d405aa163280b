"""Wires: what holds for sockets and for the double in memory, then sockets alone."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct

import pytest
import trio
import trio.testing

from sidecar.core.types import Break
from sidecar.wire.sockets import CHUNK, SocketWire, Wire, WireBroken, format_address
from tests.wire.loopback import until
from tests.wire.memory import Fault, memory_wire_pair


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture(params=["tcp", "memory"])
async def pair(request):
    if request.param == "memory":
        yield memory_wire_pair(capacity=1 << 16)
    else:
        wires = tuple(SocketWire(sock, stall_seconds=5) for sock in tcp_pair())
        yield wires
        for wire in wires:
            wire.abort()


async def receive_exactly(wire: Wire, count: int) -> bytes:
    chunks = []
    while count > 0:
        chunk = await wire.receive()
        assert 0 < len(chunk) <= CHUNK
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


# --- every wire -------------------------------------------------------------------------------


async def test_large_sends_arrive_whole_in_both_directions_at_once(pair):
    ours, theirs = pair
    forth = bytes(range(256)) * 20000
    back = forth[::-1]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.send, forth)
            nursery.start_soon(theirs.send, memoryview(back))

            async def check() -> None:
                assert await receive_exactly(ours, len(back)) == back

            nursery.start_soon(check)
            assert await receive_exactly(theirs, len(forth)) == forth


async def test_close_is_a_clean_end_after_the_last_bytes(pair):
    ours, theirs = pair
    await theirs.send(b"last")
    await theirs.aclose()
    await until(ours.has_input)
    assert await ours.receive() == b"last"
    assert await ours.receive() == b""
    assert await ours.receive() == b""


async def test_has_input_takes_nothing_and_sees_an_end(pair):
    ours, theirs = pair
    assert not ours.has_input()
    await theirs.send(b"x")
    await until(ours.has_input)
    assert ours.has_input()
    assert await ours.receive() == b"x"
    assert not ours.has_input()
    await theirs.aclose()
    await until(ours.has_input)


async def test_a_send_without_room_waits_for_the_reader(pair):
    ours, theirs = pair
    with trio.move_on_after(0.2) as scope:
        await ours.send(b"x" * (32 << 20))
    assert scope.cancelled_caught
    assert await theirs.receive()


async def test_abort_ends_a_waiting_receive_as_local(pair):
    ours, _theirs = pair
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(WireBroken) as caught:
                    await ours.receive()
                assert caught.value.cause is Break.LOCAL

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            ours.abort()


async def test_abort_ends_a_waiting_send_as_local_and_taken(pair):
    ours, _theirs = pair
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(WireBroken) as caught:
                    await ours.send(b"x" * (32 << 20))
                assert (caught.value.cause, caught.value.taken) == (Break.LOCAL, True)

            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            ours.abort()


async def test_a_closed_wire_refuses_and_closes_again(pair):
    ours, _theirs = pair
    await ours.aclose()
    for call in (ours.receive, lambda: ours.send(b"x")):
        with pytest.raises(WireBroken) as caught:
            await call()
        assert caught.value.cause is Break.LOCAL
    assert ours.has_input()
    await ours.aclose()
    ours.abort()


async def test_a_send_to_a_closed_wire_was_not_taken(pair):
    ours, _theirs = pair
    ours.abort()
    with pytest.raises(WireBroken) as caught:
        await ours.send(b"x")
    assert not caught.value.taken


# --- sockets ----------------------------------------------------------------------------------


async def test_after_a_reset_what_arrived_is_read_first_and_the_send_was_not_taken():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    theirs.sendall(b"why")
    reset(theirs)
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"request")
    assert (caught.value.cause, caught.value.taken) == (Break.RESET, False)
    assert await wire.receive() == b"why"
    wire.abort()


async def test_a_reset_is_read_as_one():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    reset(theirs)
    assert wire.has_input()
    wire.abort()
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    reset(theirs)
    with pytest.raises(WireBroken) as caught:
        await wire.receive()
    assert caught.value.cause is Break.RESET
    wire.abort()


async def test_a_send_that_breaks_half_way_counts_as_taken():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(WireBroken) as caught:
                    await wire.send(b"x" * (32 << 20))
                assert (caught.value.cause, caught.value.taken) == (Break.RESET, True)

            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            reset(theirs)
    wire.abort()


@pytest.mark.parametrize("some_taken", [False, True])
async def test_a_send_that_found_no_room_at_first(some_taken):
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(b"earlier" * 10000)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(WireBroken) as caught:
                    await wire.send(b"x" * (32 << 20))
                assert (caught.value.cause, caught.value.taken) == (Break.RESET, some_taken)

            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked()
            if some_taken:
                arrived = b""
                while b"x" not in arrived:
                    arrived = await trio.to_thread.run_sync(theirs.recv, 1 << 20)
            reset(theirs)
    wire.abort()


async def test_tcp_options_find_dead_and_stalled_peers():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=120)
    tcp = socket.IPPROTO_TCP
    assert ours.getsockopt(tcp, socket.TCP_NODELAY)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert ours.getsockopt(tcp, socket.TCP_KEEPIDLE) == 15
    assert ours.getsockopt(tcp, socket.TCP_KEEPINTVL) == 5
    assert ours.getsockopt(tcp, socket.TCP_KEEPCNT) == 3
    assert ours.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 120_000
    wire.abort()
    theirs.close()


async def test_peer_names_the_other_end():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    assert wire.peer == f"127.0.0.1:{theirs.getsockname()[1]}"
    wire.abort()
    theirs.close()
    assert format_address("::1", 7) == "[::1]:7"


async def test_unix_sockets_are_wires_too():
    left, right = socket.socketpair()
    ours, theirs = SocketWire(left, stall_seconds=5), SocketWire(right, stall_seconds=5)
    await ours.send(b"hello")
    assert await theirs.receive() == b"hello"
    assert ours.peer == "unix"
    ours.abort()
    theirs.abort()


async def test_what_was_put_back_comes_first_and_is_input():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    theirs.sendall(b"second")
    wire.unread(b"first")
    assert wire.has_input()
    assert await wire.receive() == b"first"
    assert await wire.receive() == b"second"
    wire.abort()
    theirs.close()


async def test_a_busy_wire_lets_other_tasks_run():
    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    theirs.sendall(b"x" * 65536)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        for _ in range(100):
            await wire.send(b"y")
            theirs.sendall(b"z")
            await wire.receive()
        nursery.cancel_scope.cancel()
    assert turns > 3
    wire.abort()
    theirs.close()


async def test_faults_of_this_host_are_local(monkeypatch):
    class Full:
        def send(self, _data: object) -> int:
            raise OSError(errno.ENOBUFS, "No buffer space available")

    ours, theirs = tcp_pair()
    wire = SocketWire(ours, stall_seconds=5)
    monkeypatch.setattr(wire, "_sock", Full())
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"x")
    assert (caught.value.cause, caught.value.taken) == (Break.LOCAL, False)
    ours.close()
    theirs.close()


# --- the double -------------------------------------------------------------------------------


async def test_a_failing_first_send_takes_nothing_and_reading_goes_on():
    ours, theirs = memory_wire_pair()
    await theirs.send(b"early answer")
    ours.fail_next_send()
    with pytest.raises(WireBroken) as caught:
        await ours.send(b"request")
    assert not caught.value.taken
    assert theirs.drain() == b""
    assert await ours.receive() == b"early answer"


async def test_a_failing_send_takes_what_left():
    ours, theirs = memory_wire_pair()
    ours.fail_next_send(after=3)
    with pytest.raises(WireBroken) as caught:
        await ours.send(b"request")
    assert caught.value.taken
    assert await theirs.receive() == b"req"


@pytest.mark.parametrize("fault", [Fault.EOF, Fault.RESET, Fault.SILENCE])
async def test_a_fault_after_some_bytes(fault, autojump_clock):
    ours, theirs = memory_wire_pair()
    theirs.fault_after(5, fault)
    if fault is Fault.RESET:
        await theirs.send(b"01234")
        with pytest.raises(WireBroken):
            await theirs.send(b"56789")
    else:
        await theirs.send(b"0123456789")
    assert await ours.receive() == b"01234"
    if fault is Fault.EOF:
        assert await ours.receive() == b""
    elif fault is Fault.RESET:
        with pytest.raises(WireBroken) as caught:
            await ours.receive()
        assert caught.value.cause is Break.RESET
    else:
        with trio.move_on_after(1000) as scope:
            await ours.receive()
        assert scope.cancelled_caught


async def test_a_stalled_send_goes_on_when_resumed(autojump_clock):
    ours, theirs = memory_wire_pair()
    ours.stall()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send, b"late")
        await trio.sleep(10)
        assert not theirs.has_input()
        ours.resume()
    assert await theirs.receive() == b"late"


async def test_a_broken_input_is_read_as_its_cause():
    ours, theirs = memory_wire_pair()
    theirs.break_input(Break.CERTIFICATE_ALERT)
    await ours.send(b"request")
    with pytest.raises(WireBroken) as caught:
        await ours.receive()
    assert caught.value.cause is Break.CERTIFICATE_ALERT
    assert theirs.drain() == b"request"
