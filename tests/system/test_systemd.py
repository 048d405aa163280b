"""The units, and the daemon as systemd runs it: sockets, readiness, watchdog, credentials."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.harness import (
    Process,
    Sidecar,
    card,
    config_text,
    connect,
    free_port,
    http,
    message,
    requires,
    running,
    write_card,
)
from tests.system.world import RemoteAgent, message_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness import Peer

pytestmark = pytest.mark.system

UNITS = Path(__file__).parents[2] / "systemd"
SERVICES = ["a2a-sidecar.service", "a2a-sidecar@.service"]
COMMAND = Path(sys.executable).with_name("a2a-sidecar")


# --- the units --------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copies that name the installed command; templates get an instance."""
    assert COMMAND.exists()
    for unit in UNITS.iterdir():
        text = re.sub(r"/usr/(local/)?bin/a2a-sidecar", str(COMMAND), unit.read_text("utf-8"))
        (tmp_path / unit.name.replace("@.", "@weather.")).write_text(text, "utf-8")
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [requires("systemd-analyze", "systemd"), "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_units_are_what_systemd_expects(units: Path) -> None:
    files = [str(unit) for unit in sorted(units.iterdir())]
    assert len(files) >= len(SERVICES) + 3
    done = analyze("verify", "--man=no", "--recursive-errors=yes", *files)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", SERVICES)
def test_the_services_may_do_little(units: Path, name: str) -> None:
    unit = units / name.replace("@.", "@weather.")
    done = analyze("security", "--offline=true", "--threshold=15", str(unit))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout
    assert "\nPrivateUsers=yes" not in unit.read_text("utf-8")  # allow_uids needs to see them


@pytest.mark.parametrize("name", SERVICES)
def test_the_services_stop_after_the_drain(name: str) -> None:
    """TimeoutStopSec is the default of limits.drain_seconds and ten more."""
    lines = (UNITS / name).read_text("utf-8").splitlines()
    assert "TimeoutStopSec=40" in lines
    assert "Type=notify" in lines  # notify-reload is newer than Debian 12
    assert [line.partition("=")[2].split()[0] for line in lines if "ExecReload=" in line] == [
        "/usr/local/bin/a2a-sidecar",
        "/bin/kill",
    ]


def test_the_services_differ_in_what_they_are_for() -> None:
    """The long list of what is forbidden is the same."""
    one, many = [(UNITS / name).read_text("utf-8").splitlines() for name in SERVICES]
    assert (
        one[one.index("UMask=0077") : one.index("[Install]") - 1]
        == many[many.index("UMask=0077") :]
    )


def syscall_sets() -> dict[str, set[str]]:
    """What each group of system calls holds, by systemd's own lists."""
    sets: dict[str, set[str]] = {}
    name = ""
    for line in analyze("syscall-filter").stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            name = word
            sets[name] = set()
        elif word and not word.startswith("#") and line.startswith(" "):
            sets.get(name, set()).add(word)
    assert "@system-service" in sets
    return sets


def allowed(unit: Path) -> set[str]:
    """The system calls that the unit's filter lets through."""
    sets = syscall_sets()

    def flat(word: str) -> set[str]:
        if not word.startswith("@"):
            return {word}
        return set().union(*(flat(one) for one in sets[word]))

    result: set[str] = flat("@default")
    for line in unit.read_text("utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "SystemCallFilter":
            words = set().union(*(flat(word) for word in value.removeprefix("~").split()))
            result = result - words if value.startswith("~") else result | words
    return result


async def test_the_filter_lets_through_what_is_used(first: Peer, tmp_path: Path) -> None:
    """A call that it refuses would be an error that only shows under systemd."""
    strace = requires("strace", "strace")
    tried = subprocess.run([strace, "-qq", "true"], capture_output=True, check=False, timeout=30)  # noqa: ASYNC221
    if tried.returncode:
        pytest.skip("strace may not trace here")
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    text = config_text({"one": file})
    (tmp_path / "config.toml").write_text(text, "utf-8")
    output = tmp_path / "calls"
    argv = [strace, "-f", "-qq", "-o", str(output), sys.executable, "-m", "sidecar", "run"]
    argv += ["--config", str(tmp_path / "config.toml")]
    async with running(Process("sidecar", argv)) as process:
        daemon = Sidecar(process, text, tmp_path)
        await until_up(daemon)
        await daemon.wait_ready()
        agent = RemoteAgent(daemon, "one")
        for binding in ("JSONRPC", "HTTP+JSON", "GRPC"):
            assert (await agent.send(binding)).interface == "0-jsonrpc"
        before = daemon.log().count("reloaded")
        traced = traced_by(process.pid)
        os.kill(traced, signal.SIGHUP)
        with trio.fail_after(10):
            while daemon.log().count("reloaded") == before:  # noqa: ASYNC110
                await trio.sleep(0.05)
        os.kill(traced, signal.SIGTERM)
        assert await process.wait(20) == 0
    lines = [line.split(None, 1)[-1] for line in output.read_text("utf-8").splitlines()]
    used = {line.partition("(")[0] for line in lines if "(" in line}
    used = {name for name in used if name.isidentifier()}
    assert {"epoll_wait", "accept4", "connect", "sendto"} <= used | {"epoll_pwait"}
    assert used - allowed(UNITS / SERVICES[0]) == set()


def traced_by(pid: int) -> int:
    """The process that strace has started."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()[0])


async def until_up(daemon: Sidecar) -> None:
    with trio.fail_after(30):
        while True:
            assert daemon.process.alive, daemon.log()
            try:
                if (await http(daemon.admin, "GET", "/healthz")).status == 200:
                    return
            except OSError:
                pass
            await trio.sleep(0.05)


# --- notifications ----------------------------------------------------------------------------


class Manager:
    """What the daemon said to the service manager, and when."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self.messages: list[tuple[float, dict[str, str]]] = []

    async def listen(self) -> None:
        while True:
            text = (await self._sock.recv(4096)).decode()
            pairs = dict(line.split("=", 1) for line in text.splitlines())
            self.messages.append((trio.current_time(), pairs))

    async def until(self, name: str, value: str | None = None, seconds: float = 15) -> str:
        """Wait for a message that has not been seen; drops it and those before."""
        with trio.fail_after(seconds):
            while True:
                for at, (_, pairs) in enumerate(self.messages):
                    if name in pairs and value in {None, pairs[name]}:
                        del self.messages[: at + 1]
                        return pairs.get("STATUS", "")
                await trio.sleep(0.01)


@asynccontextmanager
async def manager(path: Path) -> AsyncIterator[Manager]:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        await sock.bind(str(path))
        found = Manager(sock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.listen)
            yield found
            nursery.cancel_scope.cancel()


async def test_the_manager_hears_of_everything(first: Peer, tmp_path: Path) -> None:
    """Readiness, the state in a line, reloads, the watchdog, and the end."""
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    late = f"http://127.0.0.1:{free_port()}"
    text = config_text({"one": {"card": file}, "late": late}, bindings=["JSONRPC"])
    config = tmp_path / "config.toml"
    config.write_text(text, "utf-8")
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "900000"}
    argv = [sys.executable, "-m", "sidecar", "run", "--config", str(config)]
    async with (
        manager(tmp_path / "notify") as told,
        running(Process("sidecar", argv, env=environment)) as process,
    ):
        status = await told.until("READY", "1")
        daemon = Sidecar(process, text, tmp_path)
        assert (await http(daemon.admin, "GET", "/healthz")).status == 200
        assert status.endswith("of 2 agents can be called")
        if not status.startswith("1"):
            await told.until("STATUS", "1 of 2 agents can be called")

        began = len(told.messages)
        await trio.sleep(1.5)
        beats = [at for at, pairs in told.messages[began:] if "WATCHDOG" in pairs]
        assert 3 <= len(beats) <= 7  # every 0.3 s

        process.signal(signal.SIGHUP)
        await told.until("RELOADING", "1")
        assert await told.until("READY", "1") == "1 of 2 agents can be called"
        config.write_text("broken", "utf-8")
        process.signal(signal.SIGHUP)
        await told.until("RELOADING", "1")
        failed = "1 of 2 agents can be called; the last reload failed"
        assert await told.until("READY", "1") == failed

        gate = message_id()
        await first.script([{"gate": gate}, "default"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(RemoteAgent(daemon, "one").send)
            await RemoteAgent(daemon, "one").until("requests_in_flight", 1)
            process.signal(signal.SIGTERM)
            assert (await told.until("STOPPING", "1")).startswith("draining, ")
            await told.until("WATCHDOG", "1")
            await told.until("WATCHDOG", "1")
            await first.control("open", {"gate": gate})
        assert await process.wait() == 0
        assert not any("READY" in pairs for _, pairs in told.messages)


async def test_a_daemon_that_stands_still_is_not_alive(tmp_path: Path) -> None:
    text = config_text({}, bindings=["JSONRPC"])
    (tmp_path / "config.toml").write_text(text, "utf-8")
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
    argv = [sys.executable, "-m", "sidecar", "run", "--config", str(tmp_path / "config.toml")]
    async with (
        manager(tmp_path / "notify") as told,
        running(Process("sidecar", argv, env=environment)) as process,
    ):
        await told.until("WATCHDOG", "1")
        process.pause()
        await trio.sleep(0.1)
        told.messages.clear()
        await trio.sleep(1)
        assert told.messages == []
        process.resume()
        await told.until("WATCHDOG", "1")


# --- sockets ----------------------------------------------------------------------------------

NAMED = """
[[listeners]]
address = "systemd:tcp"
binding = "JSONRPC"
[[listeners]]
address = "systemd:app"
binding = "HTTP+JSON"
"""


async def test_sockets_are_taken_by_name(first: Peer, tmp_path: Path) -> None:
    """As systemd does it: a Unix and a TCP socket, and a first connection that starts the daemon."""
    activate = requires("systemd-socket-activate", "systemd")
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    text = config_text({"one": file}, NAMED, bindings=[])
    (tmp_path / "config.toml").write_text(text, "utf-8")
    port, path = free_port(), tmp_path / "app.sock"
    argv = [activate, "--fdname=app:tcp", f"--listen={path}", f"--listen=127.0.0.1:{port}"]
    root = Path(__file__).parents[2]
    argv += [f"--setenv=PYTHONPATH={root}", sys.executable, "-m", "sidecar", "run"]
    argv += ["--config", str(tmp_path / "config.toml")]
    async with running(Process("sidecar", argv)) as process:
        with trio.fail_after(10):
            while not path.exists():  # noqa: ASYNC110 - another process makes it
                await trio.sleep(0.02)
        daemon = Sidecar(process, text, tmp_path)
        daemon.listeners = {"JSONRPC": f"127.0.0.1:{port}", "HTTP+JSON": f"unix:{path}"}
        _, _, body = await daemon.jsonrpc("SendMessage", message("hello", message_id()))
        assert "result" in body
        status, _, body = await daemon.rest("POST", "/message:send", message("hello", message_id()))
        assert (status, "task" in body) == (200, True)
        shown = {(one["address"], one["binding"]) for one in (await daemon.status())["listeners"]}
        assert shown == {(f"127.0.0.1:{port}", "JSONRPC"), (f"unix:{path}", "HTTP+JSON")}
        # A reload that drops a listener and takes it up again finds its socket.
        for extra in (NAMED.partition('[[listeners]]\naddress = "systemd:app"')[0], NAMED):
            before = daemon.log().count("reloaded")
            admin = text.partition("[admin]")[2].partition("[[")[0]
            daemon.reload(f"[admin]{admin}\n{extra}")
            with trio.fail_after(10):
                while daemon.log().count("reloaded") == before:  # noqa: ASYNC110
                    await trio.sleep(0.02)
        assert (await http(f"unix:{path}", "GET", "/agents/x/")).status == 404
        process.signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert path.is_socket()  # it is not ours


class Activated(Process):
    """The daemon, to which one socket is passed as systemd does it."""

    def __init__(self, sock: socket.socket, name: str, config: Path) -> None:
        self.name = "sidecar"
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        words = [sys.executable, "-m", "sidecar", "run", "--config", str(config)]
        self._popen = subprocess.Popen(
            ["bash", "-c", f"LISTEN_PID=$$ exec {shlex.join(words)} 3<&{sock.fileno()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=[sock.fileno()],
            env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": name},
            cwd=UNITS.parent,
        )


async def test_connections_wait_while_it_restarts(tmp_path: Path) -> None:
    """A socket of systemd is not closed in a drain, nor is what waits on it broken off."""
    extra = '[[listeners]]\naddress = "systemd:app"\nbinding = "JSONRPC"\n'
    text = config_text({}, extra, bindings=[])
    config = tmp_path / "config.toml"
    config.write_text(text, "utf-8")
    path = tmp_path / "app.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        async with running(Activated(sock, "app", config)) as process:
            await until_up(Sidecar(process, text, tmp_path))
            assert b"AGENT_UNKNOWN" in (await http(f"unix:{path}", "GET", "/x")).body
            process.signal(signal.SIGTERM)
            assert await process.wait() == 0
        waiting = await connect(f"unix:{path}")
        await waiting.send_all(b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with running(Activated(sock, "app", config)) as process:
            with trio.fail_after(20):
                assert (await waiting.receive_some()).startswith(b"HTTP/1.1 200")
            await waiting.aclose()


async def test_secrets_are_credentials(first: Peer) -> None:
    """LoadCredential= gives files in a directory that is told of in the environment."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "weather-token").write_text("s3cret\n", "utf-8")
        file = write_card(directory, card([("JSONRPC", first.urls["JSONRPC"])]))
        agents = {"one": {"card": file, "auth": {"bearer": "credential:weather-token"}}}
        text = config_text(agents, bindings=["JSONRPC"])
        (directory / "config.toml").write_text(text, "utf-8")
        argv = [sys.executable, "-m", "sidecar", "run", "--config", str(directory / "config.toml")]
        environment = {"CREDENTIALS_DIRECTORY": name}
        async with running(Process("sidecar", argv, env=environment)) as process:
            daemon = Sidecar(process, text, directory)
            await until_up(daemon)
            assert (await RemoteAgent(daemon, "one").send()).status == 200
            request = (await first.state())["requests"][-1]
            assert ["authorization", "Bearer s3cret"] in request["headers"]
            assert "s3cret" not in daemon.log()
            assert b"s3cret" not in (await http(daemon.admin, "GET", "/status")).body
