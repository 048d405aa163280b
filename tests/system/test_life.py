"""Start and end of the daemon: signals, drain, exit codes, and what goes wrong around a process."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
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
    running,
    sidecar,
    toml,
    write_card,
)
from tests.peers.mini import SERVICE, frame
from tests.system.world import (
    BINDINGS,
    GRPC_OK,
    GRPC_UNAVAILABLE,
    GRPC_UNKNOWN,
    KeepAlive,
    RemoteAgent,
    message_id,
    send_pb,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.harness import Peer
    from tests.system.world import Answer

pytestmark = pytest.mark.system

HIGHEST_STREAM = 2**31 - 1
WORKING = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
OPENING = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": WORKING}}}


@asynccontextmanager
async def daemon_of(
    peer: Peer, tmp_path: Path, extra: str = "[limits]\ndrain_seconds = 30\n"
) -> AsyncIterator[tuple[Sidecar, RemoteAgent]]:
    """A daemon that knows one agent, the peer's JSON-RPC interface."""
    file = write_card(tmp_path, card([("JSONRPC", peer.urls["JSONRPC"])]))
    async with sidecar(agents={"one": file}, extra=extra, ready=True) as daemon:
        yield daemon, RemoteAgent(daemon, "one", file)


def traceless(process: Process) -> str:
    """Its log, in which nothing may look like a defect."""
    log = process.log()
    assert "Traceback" not in log
    assert "internal error" not in log
    assert "Exception ignored" not in log
    return log


async def until_log(daemon: Sidecar, text: str, seconds: float = 10) -> None:
    with trio.fail_after(seconds):
        while text not in daemon.log():  # noqa: ASYNC110 - another process writes it
            await trio.sleep(0.01)


async def half_a_request(address: str) -> trio.abc.Stream:
    """A connection that a drain has to wait for: its request has begun."""
    stream = await connect(address)
    await stream.send_all(b"POST / HTTP/1.1\r\nhost: localhost\r\n")
    return stream


# --- SIGTERM ----------------------------------------------------------------------------------


async def test_calls_under_way_are_finished(first: Peer, tmp_path: Path) -> None:
    """Readiness goes, listeners close, and what is there is served to its end."""
    async with daemon_of(first, tmp_path) as (daemon, agent):
        gate = message_id()
        await first.script([{"gate": gate}, "default"], [{"sse": [OPENING, {"gate": gate}]}])
        answers: list[tuple[int, dict[str, str], Any]] = []

        async def call() -> None:
            answers.append(await daemon.jsonrpc("SendMessage", message("hello", message_id())))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await agent.until("requests_in_flight", 1)
            async with agent.stream("JSONRPC", "hello") as events:
                assert (await events.next()).json()["result"]["task"]["id"] == "task-9"
                daemon.process.signal(signal.SIGTERM)
                await until_log(daemon, "draining")
                ready = await daemon.readyz()
                assert (ready.status, ready.body) == (503, b"draining\n")
                assert (await http(daemon.admin, "GET", "/healthz")).status == 200
                assert (await daemon.status())["draining"] is True
                assert await daemon.metric("a2a_sidecar_draining") == 1
                for binding in BINDINGS:
                    with pytest.raises(OSError, match="connect"):
                        await connect(daemon.listeners[binding])
                daemon.process.signal(signal.SIGHUP)
                await first.control("open", {"gate": gate})
                with pytest.raises(StopAsyncIteration):
                    await events.next()
        ((status, headers, body),) = answers
        assert (status, headers["connection"]) == (200, "close")
        assert body["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert await daemon.process.wait() == 0
        log = traceless(daemon.process)
        assert "stopped" in log
        assert "reloaded" not in log


async def test_idle_connections_hold_nothing_up(first: Peer, tmp_path: Path) -> None:
    """A request that is already on its way on one of them is served all the same."""
    async with daemon_of(first, tmp_path) as (daemon, agent):
        idle, late = [KeepAlive(daemon.listeners["JSONRPC"], "one") for _ in range(2)]
        silent = [await connect(daemon.listeners[binding]) for binding in BINDINGS]
        for client in (idle, late):
            assert (await client.send(message_id()))[0] == 200
        began = trio.current_time()
        daemon.process.signal(signal.SIGTERM)
        await until_log(daemon, "draining")
        status, headers, _ = await late.send(message_id())
        assert (status, headers["connection"]) == (200, "close")
        assert await daemon.process.wait(10) == 0
        assert trio.current_time() - began < 4
        for client in (idle, late):
            await client.aclose()
        for stream in silent:
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert agent.file is not None


class H2Client:
    """Bare HTTP/2, to see what a drain looks like on it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self.h2.initiate_connection()
        self.goaways: list[int] = []
        self.ended: set[int] = set()
        self.refused: set[int] = set()
        self.fields: dict[int, dict[str, str]] = {}
        """Headers and trailers."""
        self.eof = False
        self._frames = b""

    async def open(self, method: str, body: bytes) -> int:
        number = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "localhost"),
            (":path", SERVICE + method),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        self.h2.send_headers(number, headers)
        self.h2.send_data(number, frame(body), end_stream=True)
        await self.stream.send_all(self.h2.data_to_send())
        return number

    async def read(self) -> None:
        """Take what comes next. GOAWAY is kept from h2, which closes at the first one."""
        data = await self.stream.receive_some()
        self.eof = not data
        self._frames += data
        while len(self._frames) >= 9:
            size = 9 + int.from_bytes(self._frames[:3], "big")
            if len(self._frames) < size:
                break
            one, self._frames = self._frames[:size], self._frames[size:]
            if one[3] == 7:
                self.goaways.append(int.from_bytes(one[9:13], "big"))
                continue
            for event in self.h2.receive_data(one):
                match event:
                    case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                        found = {str(name): str(value) for name, value in event.headers}
                        self.fields.setdefault(event.stream_id, {}).update(found)
                    case h2.events.StreamEnded():
                        self.ended.add(event.stream_id)
                    case h2.events.StreamReset():
                        self.refused.add(event.stream_id)
                    case _:
                        pass
        await self.stream.send_all(self.h2.data_to_send())


async def test_http2_is_told_twice_that_we_leave(first: Peer, tmp_path: Path) -> None:
    """GOAWAY for everything, a round trip in which requests are served, GOAWAY with the last one."""
    async with daemon_of(first, tmp_path) as (daemon, agent):
        gate = message_id()
        await first.script([{"gate": gate}, "default"])
        client = H2Client(await connect(daemon.listeners["GRPC"]))
        early = await client.open("SendMessage", send_pb("hello", message_id(), "one"))
        await agent.until("requests_in_flight", 1)
        daemon.process.signal(signal.SIGTERM)
        await until_log(daemon, "draining")
        # Sent before the PING of the drain is answered.
        between = await client.open("SendMessage", send_pb("hello", message_id(), "one"))
        with trio.fail_after(10):
            while len(client.goaways) < 2:
                await client.read()
            assert client.goaways == [HIGHEST_STREAM, between]
            await first.control("open", {"gate": gate})
            while not client.eof:
                await client.read()
        assert client.ended == {early, between}
        assert client.refused == set()
        await client.stream.aclose()
        assert await daemon.process.wait() == 0
        traceless(daemon.process)


async def test_at_the_end_of_the_drain_calls_are_told(first: Peer, tmp_path: Path) -> None:
    """Streams end with an error event, unary calls with what is known of their delivery."""
    extra = "[limits]\ndrain_seconds = 1\n"
    async with daemon_of(first, tmp_path, extra) as (daemon, agent):
        await first.script(*([[{"sse": [OPENING], "end": False}, "hang"]] * 3), *(["hang"] * 3))
        unary: dict[str, Answer] = {}

        async def call(binding: str) -> None:
            unary[binding] = await agent.send(binding, "hello")

        async with (
            agent.stream("JSONRPC", "hello") as jsonrpc,
            agent.stream("HTTP+JSON", "hello") as rest,
            trio.open_nursery() as nursery,
        ):
            await jsonrpc.next()
            await rest.next()
            grpc = H2Client(await connect(daemon.listeners["GRPC"]))
            await grpc.open("SendStreamingMessage", send_pb("hello", message_id(), "one"))
            await agent.until("stream_events_total", 3)
            for binding in BINDINGS:
                nursery.start_soon(call, binding)
            await agent.until("requests_in_flight", 3)
            # It keeps the daemon for its last words, in which the metrics can be read.
            held = await half_a_request(daemon.listeners["JSONRPC"])
            began = trio.current_time()
            daemon.process.signal(signal.SIGTERM)
            for events, where in ((jsonrpc, "data"), (rest, "details")):
                event = await events.next()
                assert event.event == "error"
                (info,) = event.json()["error"][where]
                assert info["metadata"]["delivered"] == "unknown"
                assert info["metadata"]["task"] == "task-9"
                with pytest.raises(StopAsyncIteration):
                    await events.next()
            while not grpc.ended:
                await grpc.read()
            assert grpc.fields[1]["grpc-status"] == str(GRPC_UNKNOWN)
            assert grpc.fields[1]["a2a-sidecar-delivered"] == "unknown"
            details = base64.b64decode(grpc.fields[1]["grpc-status-details-bin"] + "==")
            assert b"task-9" in details
            await grpc.stream.aclose()
            await agent.until("stream_ends_total", 3, reason="drained")
            await agent.until("requests_total", 6, outcome="rejected")
        assert {answer.reason for answer in unary.values()} == {"DELIVERY_UNKNOWN"}
        assert {answer.delivered for answer in unary.values()} == {"unknown"}
        assert unary["GRPC"].status == GRPC_UNKNOWN
        assert await daemon.process.wait() == 0
        assert 1 <= trio.current_time() - began < 6
        await held.aclose()
        traceless(daemon.process)


async def test_what_was_not_sent_may_be_sent_again() -> None:
    """Calls that wait for a card when the drain is over were not delivered."""
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = silent.socket.getsockname()[1]
    agents = {"one": f"http://127.0.0.1:{port}"}
    async with silent, sidecar(agents=agents, extra="[limits]\ndrain_seconds = 0.5\n") as daemon:
        agent = RemoteAgent(daemon, "one", None)
        answers: dict[str, Answer] = {}

        async def call(binding: str) -> None:
            answers[binding] = await agent.send(binding, "hello")

        async with trio.open_nursery() as nursery:
            for binding in BINDINGS:
                nursery.start_soon(call, binding)
            await agent.until("requests_in_flight", 3)
            daemon.process.signal(signal.SIGTERM)
        assert {answer.reason for answer in answers.values()} == {"DRAINING"}
        assert {answer.delivered for answer in answers.values()} == {"no"}
        assert answers["GRPC"].status == GRPC_UNAVAILABLE
        assert answers["HTTP+JSON"].status == 503
        assert await daemon.process.wait() == 0
        traceless(daemon.process)


# --- more signals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
async def test_a_second_signal_ends_the_drain(
    first: Peer, tmp_path: Path, second: int, code: int
) -> None:
    async with daemon_of(first, tmp_path) as (daemon, agent):
        await first.script([{"sse": [OPENING], "end": False}, "hang"])
        idle = await connect(daemon.listeners["JSONRPC"])
        async with agent.stream("JSONRPC", "hello") as events:
            await events.next()
            daemon.process.signal(signal.SIGTERM)
            await until_log(daemon, "draining")
            began = trio.current_time()
            daemon.process.signal(second)
            assert (await events.next()).event == "error"
            assert await daemon.process.wait() == code
            assert trio.current_time() - began < 4  # 30 s were allowed
        await idle.aclose()
        traceless(daemon.process)


async def test_a_third_signal_waits_for_nobody(first: Peer, tmp_path: Path) -> None:
    async with daemon_of(first, tmp_path) as (daemon, agent):
        held = await half_a_request(daemon.listeners["JSONRPC"])
        for seen in ("draining", "drain cut short"):
            daemon.process.signal(signal.SIGTERM)
            await until_log(daemon, seen)
        began = trio.current_time()
        daemon.process.signal(signal.SIGTERM)
        assert await daemon.process.wait() in {0, -signal.SIGTERM}
        assert trio.current_time() - began < 1.5  # last words may take 2 s
        await held.aclose()
        traceless(daemon.process)
        assert agent.name == "one"


def start_slowly(arguments: Sequence[str], until: str, more: int) -> subprocess.Popen[str]:
    """Start a command that tells of each import, and return `more` imports after `until`."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "sidecar", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    found = False
    for line in process.stderr:
        found = found or line.rpartition("|")[2].strip() == until
        if found:
            more -= 1
            if more < 0:
                break
    assert found
    return process


def test_ctrl_c_while_it_starts_says_nothing() -> None:
    """Wherever it comes: the longest part of a start is imports."""
    arguments = ["run", "--agent", f"one=http://127.0.0.1:{free_port()}"]
    for more in (1, 10, 60, 200, 400):
        process = start_slowly(arguments, "sidecar.cli", more)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        rest = process.stderr.read()
        code = process.wait(20)
        process.stderr.close()
        said = [line for line in rest.splitlines() if not line.startswith("import time:")]
        # Late ones find a daemon, which drains and ends.
        assert code == 130 or (code == 0 and any("stopped" in line for line in said)), said
        assert not [line for line in said if "Traceback" in line or "Error" in line], said


async def test_a_reload_while_it_starts_does_not_kill_it() -> None:
    ports = [free_port() for _ in range(2)]
    text = (
        f'[[listeners]]\naddress = "127.0.0.1:{ports[0]}"\nbinding = "JSONRPC"\n'
        f'[admin]\naddress = "127.0.0.1:{ports[1]}"\n'
    )
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.toml"
        file.write_text(text, "utf-8")
        arguments = ["run", "--config", str(file)]
        process = await trio.to_thread.run_sync(start_slowly, arguments, "trio._util", 0)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        for line in process.stderr:
            if "started" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest = await trio.to_thread.run_sync(process.stderr.read)
        assert process.wait(20) == 0, rest
        process.stderr.close()


# --- what a user can cause --------------------------------------------------------------------


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        **more,
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[agents\n", "config.toml:1: not valid TOML"),
        ('[admin]\naddress = "127.0.0.1:{taken}"\n', "cannot listen on 127.0.0.1:{taken}"),
    ],
    ids=["syntax", "port"],
)
def test_a_start_that_cannot_be_says_why(tmp_path: Path, content: str, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        listener = f'[[listeners]]\naddress = "127.0.0.1:{free_port()}"\nbinding = "JSONRPC"\n'
        file = tmp_path / "config.toml"
        file.write_text(content.replace("{taken}", str(taken)) + listener, "utf-8")
        done = command("run", "--config", str(file))
    assert done.returncode == 1, done
    assert expected.replace("{taken}", str(taken)) in done.stderr
    assert "Traceback" not in done.stderr


async def test_two_sidecars_do_not_take_each_others_sockets(tmp_path: Path) -> None:
    """A Unix socket that a killed one left is replaced; one that is served is not."""
    path = tmp_path / "app.sock"
    extra = f'[[listeners]]\naddress = "unix:{path}"\nbinding = "JSONRPC"\n'
    text = config_text({}, extra, bindings=["JSONRPC"])
    file = tmp_path / "config.toml"
    file.write_text(text, "utf-8")
    async with sidecar(text) as killed:
        killed.process.kill()
        assert path.is_socket()
        async with sidecar(text) as daemon:
            file.write_text(config_text({}, extra, bindings=["JSONRPC"]), "utf-8")
            second = await trio.to_thread.run_sync(command, "run", "--config", str(file))
            assert second.returncode == 1
            assert f"cannot listen on unix:{path}" in second.stderr
            assert "is another sidecar running?" in second.stderr
            assert "Traceback" not in second.stderr
            reply = await http(f"unix:{path}", "GET", "/agents/x")
            assert b"AGENT_UNKNOWN" in reply.body
            daemon.process.signal(signal.SIGTERM)
            assert await daemon.process.wait() == 0
            assert not path.exists()
            assert os.listdir(tmp_path) == [file.name]


PIPED = [
    ["--help"],
    ["explain", "--table"],
    ["check-config", "--agent", "a=http://127.0.0.1:1"],
]


@pytest.mark.parametrize("arguments", PIPED, ids=lambda one: one[0])
def test_output_that_nobody_takes_is_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == b""
    assert done.returncode in {0, 1}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sidecar", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert b"Traceback" not in done.stderr
    assert done.returncode in {0, 1}


async def test_without_standard_streams_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    """Descriptor 2 must not become a connection, into which the log would go."""
    ports = [free_port() for _ in range(2)]
    file = tmp_path / "config.toml"
    file.write_text(
        f'[[listeners]]\naddress = "127.0.0.1:{ports[0]}"\nbinding = "JSONRPC"\n'
        f'[admin]\naddress = "127.0.0.1:{ports[1]}"\n',
        "utf-8",
    )
    script = 'exec "$0" -m sidecar run --config "$1" 0<&- 1>&- 2>&-'
    process = Process("sidecar", ["sh", "-c", script, sys.executable, str(file)])
    async with running(process):
        with trio.fail_after(20):
            while True:
                try:
                    if (await http(ports[1], "GET", "/healthz")).status == 200:
                        break
                except OSError:
                    await trio.sleep(0.05)
        for number in range(3):
            assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
        process.signal(signal.SIGTERM)
        assert await process.wait() == 0


# --- the system around it ---------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_running_out_of_descriptors_is_survived(first: Peer, tmp_path: Path) -> None:
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    text = config_text({"one": file})
    (tmp_path / "config.toml").write_text(text, "utf-8")
    script = 'ulimit -n 64; exec "$0" -m sidecar run --config "$1"'
    argv = ["sh", "-c", script, sys.executable, str(tmp_path / "config.toml")]
    async with running(Process("sidecar", argv)) as process:
        daemon = Sidecar(process, text, tmp_path)
        with trio.fail_after(20):
            while True:
                try:
                    if (await daemon.readyz()).status == 200:
                        break
                except OSError:
                    pass
                await trio.sleep(0.05)
        streams = [await connect(daemon.listeners["JSONRPC"]) for _ in range(100)]
        await until_log(daemon, "cannot accept")
        before, lines = cpu_seconds(process.pid), daemon.log().count("cannot accept")
        await trio.sleep(2)
        assert cpu_seconds(process.pid) - before < 0.7
        assert daemon.log().count("cannot accept") - lines <= 3
        for stream in streams[:80]:
            await trio.aclose_forcefully(stream)
        status, _, body = await daemon.jsonrpc("SendMessage", message("hello", message_id()))
        assert status == 200
        assert "result" in body
        for stream in streams[80:]:
            await trio.aclose_forcefully(stream)
        traceless(process)


JUMPING_CLOCK = """
import itertools, time
real, days = time.time, itertools.cycle((0, 86400, -86400))
time.time = lambda: real() + next(days)
"""


async def test_the_wall_clock_may_jump(sdk: Peer, tmp_path: Path) -> None:
    """No timeout, age or duration is measured by it."""
    (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK, "utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    file = write_card(tmp_path, card([("JSONRPC", sdk.urls["JSONRPC"])]))
    async with sidecar(agents={"one": file}, env={"PYTHONPATH": path}, ready=True) as daemon:
        agent = RemoteAgent(daemon, "one", file)
        for _ in range(3):
            assert (await agent.send("JSONRPC", "hello")).status == 200
        answer = await agent.send("GRPC", "sleep 1", seconds=20)
        assert answer.status == GRPC_OK
        async with agent.stream("HTTP+JSON", "silent 5") as events:
            assert len([event async for event in events]) == 3
            assert len(events.comments) == 1
        for name in ("request_duration_seconds", "overhead_seconds", "event_loop_lag_seconds"):
            assert 0 <= await daemon.metric(f"a2a_sidecar_{name}_sum") < 60
        assert 0 <= await daemon.metric("a2a_sidecar_card_age_seconds") < 60
        assert toml((await agent.status())["card_error"] or "") == '""'
