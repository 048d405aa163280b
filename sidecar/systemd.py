"""What systemd and the daemon tell each other: sockets, readiness, the watchdog (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket
import time

_FIRST_DESCRIPTOR = 3


def take_sockets() -> dict[str, list[socket.socket]]:
    """The sockets passed by socket activation, by their FileDescriptorName.

    The variables are removed from the environment, so that no child takes them for its own
    (sd_listen_fds(3)). Descriptors that are no sockets are left alone.
    """
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    passed: dict[str, list[socket.socket]] = {}
    given = names.split(":")
    for number in range(min(int(count), os.sysconf("SC_OPEN_MAX"))):
        name = (given[number] if number < len(given) else "") or "unknown"
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=_FIRST_DESCRIPTOR + number)
            sock.set_inheritable(False)
            passed.setdefault(name, []).append(sock)
    return passed


class Notifier:
    """Tells systemd how the daemon is; does nothing where no service manager asked to be told."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        usec = os.environ.pop("WATCHDOG_USEC", "")
        pid = os.environ.pop("WATCHDOG_PID", str(os.getpid()))
        wanted = usec.isdecimal() and pid == str(os.getpid())
        self.watchdog_seconds = int(usec) / 1e6 if wanted else 0.0
        """How often the manager wants to hear from us at the least; 0: never."""
        self._status = ""

    def ready(self, status: str) -> None:
        """Every listener is bound."""
        self._status = status
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, text: str) -> None:
        """A line for `systemctl status`; one that says the same as the last is not sent."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={usec}")

    def stopping(self, status: str = "draining") -> None:
        """A drain has begun."""
        self._status = status
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """The event loop turns."""
        self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        # A manager that does not listen must not stop the daemon.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), address)
