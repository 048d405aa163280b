"""What is read from systemd's environment, and said to it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sidecar.systemd import Notifier, take_sockets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Descriptors begin at 3, so they are looked at by a process of its own.
LIST_SOCKETS = """
import os, socket, sys
own = os.open(sys.executable, os.O_RDONLY)      # takes a number after those that were passed
from sidecar.systemd import take_sockets
os.environ["LISTEN_PID"] = os.environ["LISTEN_PID"].replace("own", str(os.getpid()))
for name, found in take_sockets().items():
    for one in found:
        print(name, one.family.name, one.fileno(), os.get_inheritable(one.fileno()))
print([name for name in os.environ if name.startswith("LISTEN_")])
"""


def passed(count: int, names: str | None, fds: str, pid: str = "own") -> list[str]:
    """What a process sees to which `count` sockets, a TCP one first, and then a file are passed."""
    environment = {**os.environ, "LISTEN_PID": pid, "LISTEN_FDS": fds}
    if names is not None:
        environment["LISTEN_FDNAMES"] = names
    sockets = [socket.socket(socket.AF_INET if not n else socket.AF_UNIX) for n in range(count)]
    numbers = [one.fileno() for one in sockets]
    file = os.open(os.devnull, os.O_RDONLY)
    moves = " ".join(f"{3 + at}<&{number}" for at, number in enumerate([*numbers, file]))
    shut = " ".join(f"{number}<&-" for number in [*numbers, file] if number > 3 + count)
    try:
        done = subprocess.run(
            ["bash", "-c", f'exec "$0" -c "$1" {moves} {shut}', sys.executable, LIST_SOCKETS],
            pass_fds=[*numbers, file],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    finally:
        for one in sockets:
            one.close()
        os.close(file)
    *lines, left = done.stdout.splitlines()
    assert left == "[]"  # a child must not take them for its own
    return lines


def test_sockets_are_known_by_their_names() -> None:
    assert passed(2, "tcp:app", "2") == ["tcp AF_INET 3 False", "app AF_UNIX 4 False"]


@pytest.mark.parametrize("names", [None, ""])
def test_sockets_without_names(names: str | None) -> None:
    assert passed(1, names, "1") == ["unknown AF_INET 3 False"]


def test_two_of_one_name() -> None:
    assert passed(2, "app:app", "2") == ["app AF_INET 3 False", "app AF_UNIX 4 False"]


def test_what_is_no_socket_is_left_out() -> None:
    assert passed(1, "tcp:file:more", "9") == ["tcp AF_INET 3 False"]


def test_sockets_of_another_process_are_left_alone() -> None:
    assert passed(1, "tcp", "1", pid="1") == []


@pytest.mark.parametrize("count", ["", "x", "-1", "²"])
def test_counts_that_are_none(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    assert take_sockets() == {}
    assert "LISTEN_FDS" not in os.environ


# --- notifications ----------------------------------------------------------------------------


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The service manager's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = str(tmp_path / "notify")
        sock.bind(path)
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield sock


def test_every_message_in_the_managers_words(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready("1 of 2")
    assert manager.recv(4096) == b"READY=1\nSTATUS=1 of 2"
    notifier.reloading()
    first, second = manager.recv(4096).split(b"\n")
    assert first == b"RELOADING=1"
    name, _, value = second.partition(b"=")
    assert name == b"MONOTONIC_USEC"
    assert int(value) > 0
    notifier.alive()
    assert manager.recv(4096) == b"WATCHDOG=1"
    notifier.stopping("draining")
    assert manager.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_a_status_is_sent_when_it_changes(manager: socket.socket) -> None:
    notifier = Notifier()
    notifier.ready("one")
    for text in ("one", "two", "two", "one"):
        notifier.status(text)
    notifier.alive()
    sent = [manager.recv(4096) for _ in range(4)]
    assert sent[1:] == [b"STATUS=two", b"STATUS=one", b"WATCHDOG=1"]


def test_an_abstract_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        name = f"sidecar-notify-{os.getpid()}"
        sock.bind("\0" + name)
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        Notifier().alive()
        assert sock.recv(4096) == b"WATCHDOG=1"


def test_the_environment_is_not_handed_on(manager: socket.socket) -> None:
    assert manager.fileno() >= 0
    Notifier()
    assert "NOTIFY_SOCKET" not in os.environ


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "@nobody-listens-here", "vsock:2:1"])
def test_nobody_who_listens_is_no_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    Notifier().ready("fine")


def test_a_manager_that_does_not_read_holds_nothing_up(manager: socket.socket) -> None:
    notifier = Notifier()
    for _ in range(2000):
        notifier.alive()
    assert manager.recv(4096) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 30.0),
        ("30000000", "own", 30.0),
        ("30000000", "1", 0.0),
        ("", None, 0.0),
        ("x", None, 0.0),
        ("-5", None, 0.0),
    ],
)
def test_the_watchdog_is_for_one_process(
    usec: str, pid: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert Notifier().watchdog_seconds == seconds
    assert "WATCHDOG_USEC" not in os.environ
    assert "WATCHDOG_PID" not in os.environ
