"""Listening sockets: bound, taken over from a crash, given back; accepting when it is hard."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from sidecar.config import TcpAddress, UnixAddress
from sidecar.listener import BindError, Listener, address_of, bind, is_http2
from sidecar.logs import Log
from sidecar.wire.tls import is_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[tuple[Log, Callable[[], str]]]:
    with open(tmp_path / "log", "wb") as file:
        log = Log(clock=lambda: 0.0, fd=file.fileno())

        def text() -> str:
            log.close()
            return (tmp_path / "log").read_text("utf-8")

        yield log, text
        log.close()


@pytest.fixture
def log(lines: tuple[Log, Callable[[], str]]) -> Log:
    return lines[0]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.sock")


def stale(path: str) -> None:
    """What a killed process leaves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
        except OSError:
            return False
    return True


# --- binding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_tcp_address(host):
    with bind(TcpAddress(host, 0)) as sock:
        address = address_of(sock)
        assert isinstance(address, TcpAddress)
        assert address.host == host
        assert address.port > 0
        with pytest.raises(BindError, match="another sidecar"):
            bind(address)


def test_an_address_of_another_machine():
    with pytest.raises(BindError, match=r"192\.0\.2\.1:80"):
        bind(TcpAddress("192.0.2.1", 80))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_unix_socket_has_its_mode(path, mode):
    before = os.umask(0o077)
    try:
        with bind(UnixAddress(path), mode):
            assert stat.S_IMODE(os.stat(path).st_mode) == mode
            assert connects(path)
    finally:
        os.umask(before)
    assert os.listdir(os.path.dirname(path)).count("app.sock") == 1


def test_the_file_of_a_crash_is_replaced(path, tmp_path):
    stale(path)
    assert not connects(path)
    with bind(UnixAddress(path)):
        assert connects(path)
    assert [name for name in os.listdir(tmp_path) if name != "log"] == ["app.sock"]


def test_a_socket_that_answers_belongs_to_somebody(path):
    with bind(UnixAddress(path)):
        inode = os.stat(path).st_ino
        with pytest.raises(BindError, match="another sidecar"):
            bind(UnixAddress(path))
        assert os.stat(path).st_ino == inode
        assert connects(path)


def test_a_full_backlog_is_alive(path):
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(path)
        busy.listen(0)
        client.connect(path)
        with pytest.raises(BindError, match="another sidecar"):
            bind(UnixAddress(path))


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_left_alone(path, tmp_path, kind):
    match kind:
        case "file":
            (tmp_path / "app.sock").write_text("precious")
        case "directory":
            os.mkdir(path)
        case _:
            (tmp_path / "precious").write_text("precious")
            os.symlink(tmp_path / "precious", path)
    before = os.lstat(path)
    with pytest.raises(BindError, match="not a socket"):
        bind(UnixAddress(path))
    assert os.lstat(path) == before


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(BindError, match="No such file"):
        bind(UnixAddress(str(tmp_path / "no" / "app.sock")))
    assert os.listdir(tmp_path) == []


def test_the_longest_path(tmp_path):
    path = str(tmp_path / "d")
    os.mkdir(path)
    path += "/" + "s" * (107 - len(path) - 1)
    with bind(UnixAddress(path)):
        assert connects(path)


# --- closing ----------------------------------------------------------------------------------


def test_a_clean_end_removes_the_file(path, log):
    listener = Listener(bind(UnixAddress(path)), UnixAddress(path), log=log)
    assert listener.address == UnixAddress(path)
    listener.close()
    assert not os.path.exists(path)
    listener.close()


def test_the_file_of_a_successor_stays(path, log):
    listener = Listener(bind(UnixAddress(path)), UnixAddress(path), log=log)
    os.unlink(path)
    with bind(UnixAddress(path)):
        listener.close()
        assert connects(path)


# --- accepting --------------------------------------------------------------------------------


class Taker:
    """Keeps what is accepted."""

    def __init__(self) -> None:
        self.taken: list[socket.socket] = []
        self.came = trio.Event()

    def receive(self, sock: socket.socket) -> None:
        self.taken.append(sock)
        self.came.set()
        self.came = trio.Event()

    async def wait(self, count: int) -> None:
        with trio.fail_after(5):
            while len(self.taken) < count:
                await self.came.wait()


@asynccontextmanager
async def accepting(listener: Listener) -> AsyncIterator[Taker]:
    taker = Taker()
    listener.receiver = taker
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            yield taker
            nursery.cancel_scope.cancel()
    finally:
        for sock in taker.taken:
            sock.close()


async def test_connections_are_handed_on(log):
    address = TcpAddress("127.0.0.1", 0)
    listener = Listener(bind(address), address, log=log)
    where = listener.address
    assert isinstance(where, TcpAddress)
    async with accepting(listener) as taker:
        clients = [await trio.open_tcp_stream(where.host, where.port) for _ in range(3)]
        await taker.wait(3)
        for client in clients:
            await client.aclose()
    with pytest.raises(OSError, match="all attempts"):  # the address is free again
        await trio.open_tcp_stream(where.host, where.port)


class Faulty:
    """A listening socket whose `accept` fails at first."""

    def __init__(self, sock: socket.socket, *codes: int) -> None:
        self._sock = sock
        self._codes = list(codes)
        self.tries: list[float] = []

    def accept(self) -> tuple[socket.socket, object]:
        self.tries.append(trio.current_time())
        if self._codes:
            code = self._codes.pop(0)
            raise OSError(code, os.strerror(code))
        return self._sock.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ([errno.EMFILE, errno.EMFILE, errno.EMFILE], 1),
        ([errno.ENFILE, errno.ENOMEM], 1),
        ([errno.ECONNABORTED], 0),
        ([errno.EPERM, errno.EPROTO], 0),
    ],
)
async def test_accepting_goes_on_after_errors(lines, codes, told):
    log, text = lines
    address = TcpAddress("127.0.0.1", 0)
    listener = Listener(bind(address), address, log=log)
    faulty = Faulty(listener._sock, *codes)
    listener._sock = faulty  # type: ignore[assignment]
    where = listener.address
    assert isinstance(where, TcpAddress)
    async with accepting(listener) as taker:
        client = await trio.open_tcp_stream(where.host, where.port)
        await taker.wait(1)
        await client.aclose()
    gaps = [b - a for a, b in zip(faulty.tries, faulty.tries[1:], strict=False)]
    assert len(gaps) == len(codes)
    assert all(gap >= 0.1 for gap in gaps)  # no busy loop
    assert text().count("cannot accept") == told


# --- the first bytes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "tls", "http2"),
    [
        (b"\x16\x03\x01", True, False),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0", False, True),
        (b"PRI ", False, True),
        (b"P", False, True),
        (b"POST / HTTP/1.1\r\n", False, False),
        (b"PRI * HTTP/1.1\r\n", False, False),
        (b"GET", False, False),
        (b"", False, False),
    ],
)
def test_told_apart(first, tls, http2):
    assert (is_tls(first), is_http2(first)) == (tls, http2)
