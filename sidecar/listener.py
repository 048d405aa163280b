"""Local sockets: bound, accepted from, told apart by their first bytes. Knows no agents.

What a connection speaks is decided by the listener's one binding; anything else is told so in its
own protocol or closed. Each connection runs in a task of its own whose failure costs nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import TYPE_CHECKING, Protocol

import trio

from sidecar.config import SystemdAddress, TcpAddress, UnixAddress
from sidecar.wire.h2_frames import PREFACE

if TYPE_CHECKING:
    from sidecar.config import Address
    from sidecar.logs import Log

_BACKLOG = 1024
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_ACCEPT_PAUSE_SECONDS = 0.1
_TELL_AGAIN_SECONDS = 60.0


class Receiver(Protocol):
    """What takes the accepted connections."""

    def receive(self, sock: socket.socket) -> None:
        """Take one connection; `sock` is the receiver's from now on."""
        ...


def address_of(sock: socket.socket) -> TcpAddress | UnixAddress:
    """Where a socket listens."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return UnixAddress(os.fsdecode(name))
    return TcpAddress(name[0], name[1])


class BindError(Exception):
    """An address that cannot be listened on; the text names it and the mend."""


def bind(address: TcpAddress | UnixAddress, mode: int = 0o660) -> socket.socket:
    """A listening socket; raises BindError.

    A Unix socket is bound under a temporary name and moved into place once its mode is set. A
    file left by a crash is replaced; one that answers belongs to somebody.
    """
    try:
        if isinstance(address, UnixAddress):
            return _bind_unix(address.path, mode)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address.host, address.port))
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        mend = "; is another sidecar running?" if error.errno == errno.EADDRINUSE else ""
        raise BindError(f"cannot listen on {address}: {error.strerror or error}{mend}") from None
    return sock


def _bind_unix(path: str, mode: int) -> socket.socket:
    if _is_live(path):
        raise OSError(errno.EADDRINUSE, "a process is listening there")
    # The shorter of two names: the path itself may be as long as it can be.
    beside = os.path.join(os.path.dirname(path), f".{os.getpid():x}")
    temporary = min(f"{path}.{os.getpid():x}", beside, key=len)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock.bind(temporary)
        os.chmod(temporary, mode)
        sock.listen(_BACKLOG)
        os.rename(temporary, path)
    except BaseException:
        sock.close()
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return sock


def _is_live(path: str) -> bool:
    """Whether somebody listens at `path`; raises OSError for a file that is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "the file there is not a socket")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


class Listener:
    """One listening socket."""

    def __init__(self, sock: socket.socket, address: Address, *, log: Log) -> None:
        """`address` as it is configured; a socket that systemd passed stays its own."""
        sock.setblocking(False)
        self._passed = isinstance(address, SystemdAddress)
        # A Unix socket was bound under another name than the one it has now.
        self.address = address if isinstance(address, UnixAddress) else address_of(sock)
        self.receiver: Receiver
        """Takes connections from now on; may be replaced at any time."""
        self._sock = sock
        self._inode = self._own_inode()
        self._log = log
        self._tell_at = 0.0
        """When the log may hear again that nothing can be accepted."""

    def _own_inode(self) -> int | None:
        if self._passed or not isinstance(self.address, UnixAddress):
            return None
        with contextlib.suppress(OSError):
            return os.stat(self.address.path).st_ino
        return None

    @property
    def reachable(self) -> bool:
        """Whether the file of a Unix socket is still there and ours."""
        return self._inode is None or self._inode == self._own_inode()

    async def run(self) -> None:
        """Accept until cancelled, and close."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._sock)
                try:
                    sock = self._sock.accept()[0]
                except BlockingIOError:
                    continue
                except OSError as error:
                    await self._cannot_accept(error)
                    continue
                self.receiver.receive(sock)
        finally:
            self.close()

    def accept_waiting(self) -> None:
        """Take what has connected already: closing the socket would break it off.

        Sockets of systemd stay open, and the next process takes what waits there.
        """
        if self._passed:
            return
        with contextlib.suppress(OSError):
            for _ in range(_BACKLOG):
                self.receiver.receive(self._sock.accept()[0])

    async def _cannot_accept(self, error: OSError) -> None:
        """A client that is gone again is nothing; without descriptors it is better to wait."""
        now = trio.current_time()
        if error.errno in _OUT_OF_RESOURCES and now >= self._tell_at:
            self._tell_at = now + _TELL_AGAIN_SECONDS
            self._log.error("cannot accept", listener=str(self.address), error=error.strerror)
        await trio.sleep(_ACCEPT_PAUSE_SECONDS)

    def close(self) -> None:
        """Stop listening; a Unix socket's file goes if it is still ours."""
        self._sock.close()
        if isinstance(self.address, UnixAddress) and self._inode is not None:
            with contextlib.suppress(OSError):
                if os.stat(self.address.path).st_ino == self._inode:
                    os.unlink(self.address.path)
        self._inode = None


def is_http2(first: bytes) -> bool:
    """The beginning of the HTTP/2 connection preface (RFC 9113 3.4)."""
    return bool(first) and PREFACE.startswith(first[: len(PREFACE)])
