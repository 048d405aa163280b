"""A wire: bytes to and from one peer, with the fact whether the kernel took any of them.

The connections of `http1` and `http2` speak through a `Wire` and nothing else, so that TLS, plain
sockets and the memory double of the tests are the same to them.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from typing import Final, Protocol

import trio

from sidecar.core.types import Break

CHUNK: Final = 65536
"""The most that one `receive` returns, in bytes."""

LOCAL_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Faults of this host and not of the peer."""

_IMMEDIATE: Final = 16
"""Calls in a row that need not wait before one lets other tasks run."""

_KEEPALIVE_IDLE: Final = 15
_KEEPALIVE_INTERVAL: Final = 5
_KEEPALIVE_PROBES: Final = 3


class WireBroken(Exception):
    """The connection ended other than cleanly, or is not usable any more.

    `cause` is RESET, EOF (TLS ended without close_notify), CERTIFICATE_ALERT, TLS or LOCAL (closed
    on this side, or out of memory). `detail` is for the log.

    `taken` is about the `send` that raised: False only when its very first socket call raised an
    error, so that the kernel has none of its bytes.
    """

    def __init__(self, cause: Break, *, taken: bool = True, detail: str = "") -> None:
        super().__init__(f"{cause.name}: {detail}" if detail else cause.name)
        self.cause = cause
        self.taken = taken
        self.detail = detail


class Wire(Protocol):
    """A byte stream to one peer. One task may send while another one receives."""

    @property
    def peer(self) -> str:
        """``127.0.0.1:7101``, for logs."""
        ...

    async def send(self, data: bytes | memoryview) -> None:
        """Hand all of `data` to the kernel; raises WireBroken.

        A cancelled `send` may have sent any part of it: the wire can then only be read and closed.
        """
        ...

    async def receive(self) -> bytes:
        """The next bytes, at most `CHUNK`, b'' at a clean end; raises WireBroken.

        Works on after a failed `send`: what the peer said last may explain it.
        """
        ...

    def has_input(self) -> bool:
        """Whether `receive` would return or raise at once; never blocks.

        For a look at an idle connection; not while another task is in `receive`.
        """
        ...

    async def aclose(self) -> None:
        """Say goodbye (FIN, close_notify) and close, within about a second."""
        ...

    def abort(self) -> None:
        """Close at once, without a goodbye. Tasks in `send` or `receive` get WireBroken LOCAL."""
        ...


class RawWire(Wire, Protocol):
    """A wire that can also be read without waiting; what TLS runs on."""

    def receive_nowait(self) -> bytes | None:
        """What `receive` would return or raise at once, None when it would wait."""
        ...


def is_reserved(descriptor: int) -> bool:
    """Whether a new descriptor is one of the last sixteenth, which is kept for the admin address.

    New descriptors have the lowest free number (POSIX), so that one this high tells that nearly
    all are in use.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and descriptor >= limit - limit // 16


def describe(error: BaseException) -> str:
    """``Connection refused`` for an OSError, else the class and its text: for `detail`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def format_address(host: str, port: int) -> str:
    """``host:port``; IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket, stall_seconds: float) -> None:
    """Set the options of a TCP connection; other sockets are left alone.

    Small writes leave at once; a peer that is gone, or takes no byte for `stall_seconds`, is found
    out without any traffic of ours.
    """
    if sock.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000))


class SocketWire:
    """A Wire over a connected stream socket, which it owns.

    `sock` is a plain `socket.socket`; it is made non-blocking. System calls are tried before
    waiting, because trio's own sockets cost twice as much per message.
    """

    __slots__ = ("_ahead", "_closed", "_immediate", "_sock", "peer")

    def __init__(self, sock: socket.socket, *, stall_seconds: float, peer: str = "") -> None:
        """`peer`: what logs call the other end; by default its address."""
        sock.setblocking(False)
        tune(sock, stall_seconds)
        self._sock = sock
        self._closed = False
        self._immediate = 0
        self._ahead = b""
        self.peer = peer or _peer_of(sock)

    async def send(self, data: bytes | memoryview) -> None:
        """See `Wire.send`."""
        try:
            count = self._sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise self._broken(error, taken=False) from None
        if count == len(data):
            self._immediate += 1
            if self._immediate >= _IMMEDIATE:
                await self._let_others_run()
            return
        self._immediate = 0
        taken = count > 0
        rest = memoryview(data)[count:]
        while rest:
            try:
                await trio.lowlevel.wait_writable(self._sock)
                count = self._sock.send(rest)
            except BlockingIOError:
                continue
            except (OSError, ValueError, trio.ClosedResourceError) as error:
                raise self._broken(error, taken=taken) from None
            taken = True
            rest = rest[count:]

    async def receive(self) -> bytes:
        """See `Wire.receive`."""
        while True:
            data = self.receive_nowait()
            if data is not None:
                break
            self._immediate = 0
            try:
                await trio.lowlevel.wait_readable(self._sock)
            except (OSError, ValueError, trio.ClosedResourceError) as error:
                raise self._broken(error) from None
        self._immediate += 1
        if self._immediate >= _IMMEDIATE:
            await self._let_others_run()
        return data

    def receive_nowait(self) -> bytes | None:
        """See `RawWire.receive_nowait`."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            return self._sock.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._broken(error) from None

    def unread(self, data: bytes) -> None:
        """Put back what was received too much; the next `receive` returns it."""
        self._ahead = data + self._ahead

    def has_input(self) -> bool:
        """See `Wire.has_input`."""
        if self._ahead:
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def aclose(self) -> None:
        """See `Wire.aclose`: FIN after what was sent; nothing is waited for."""
        if not self._closed:
            with contextlib.suppress(OSError):  # not connected any more
                self._sock.shutdown(socket.SHUT_WR)
            self.abort()

    def half_close(self) -> None:
        """End our side; the other one can still be read. Raises OSError when it is not connected."""
        if not self._closed:
            self._sock.shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """See `Wire.abort`."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    async def _let_others_run(self) -> None:
        """Run other tasks, but do not turn what was done already into a cancellation."""
        self._immediate = 0
        await trio.lowlevel.cancel_shielded_checkpoint()

    def _broken(self, error: Exception, *, taken: bool = True) -> WireBroken:
        if self._closed:
            return WireBroken(Break.LOCAL, taken=taken, detail="closed here")
        local = isinstance(error, OSError) and error.errno in LOCAL_ERRORS
        cause = Break.LOCAL if local else Break.RESET
        return WireBroken(cause, taken=taken, detail=describe(error))


def _peer_of(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "unknown"
    if isinstance(address, tuple):
        return format_address(address[0], address[1])
    return str(address) or "unix"
