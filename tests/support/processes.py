"""Peers, and other programs, as child processes.

What each peer can do is in the docstring of its script in ``tests/peers``. a2a-sdk is never
imported here: its descriptors clash with ours in one process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from tests.support.http_client import http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from tests.support.files import TlsFiles

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = REPOSITORY / "tests" / "peers"
START_SECONDS = 30
STOP_SECONDS = 5


class ProcessDied(Exception):
    """A process ended, or kept silent, before it was ready."""


class Process:
    """A child process whose stderr goes to a file, printed (for pytest to show) when it ends."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            cwd=cwd or REPOSITORY,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def log(self) -> str:
        """What it wrote to stderr so far."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode("utf-8", "replace")

    def signal(self, signum: int) -> None:
        """Send a signal."""
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._popen.kill()
        self._popen.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    async def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end; returns the exit code, raises trio.TooSlowError after `seconds`."""
        with trio.fail_after(seconds):
            while (code := self._popen.poll()) is None:  # noqa: ASYNC110 - another process ends
                await trio.sleep(0.01)
        return code

    def ready_line(self) -> dict[str, Any]:
        """The JSON line on stdout; raises ProcessDied without one."""
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([fd], [], [], START_SECONDS)
            data = os.read(fd, 65536) if readable else b""
            if not data:
                raise self.died("no ready line")
            line += data
        result: dict[str, Any] = json.loads(line)
        return result

    def died(self, why: str) -> ProcessDied:
        """The exception that tells what became of it."""
        return ProcessDied(f"{self.name}: {why}, exit code {self._popen.poll()}\n{self.log()}")

    def stop(self) -> None:
        """End it: SIGTERM, SIGKILL after STOP_SECONDS."""
        if self.alive:
            self.resume()
            self._popen.terminate()
            try:
                self._popen.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
        if text := self.log():
            print(f"--- {self.name} ({self.pid}) ---\n{text}", file=sys.stderr)
        self._stderr.close()


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    """Stop the process at the end of the block."""
    try:
        yield process
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.stop)


# --- peers ------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A running peer. `ports` and `urls` are keyed as its script says."""

    process: Process
    ready: dict[str, Any]
    ports: dict[str, int] = field(init=False)
    urls: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.ports = self.ready["ports"]
        self.urls = self.ready.get("urls", {})

    @property
    def card_url(self) -> str:
        """Where it serves its card."""
        return str(self.ready["card"])

    async def state(self) -> dict[str, Any]:
        """``GET /control/state``."""
        result: dict[str, Any] = await self._control("GET", "state", None)
        return result

    async def control(self, path: str, body: Any = None) -> Any:
        """``POST /control/<path>``; raises ValueError when the peer refuses it."""
        return await self._control("POST", path, body)

    async def _control(self, method: str, path: str, body: Any) -> Any:
        data = b"" if method == "GET" else json.dumps(body).encode()
        reply = await http(self.ready["control"], method, f"/control/{path}", body=data)
        if reply.status != 200:
            raise ValueError(reply.body.decode())
        return reply.json()

    async def script(self, *entries: Any) -> None:
        """Script the next requests (raw_http, h2_agent)."""
        await self.control("script", list(entries))

    async def until(self, condition: Any, seconds: float = 5) -> dict[str, Any]:
        """Poll the state until `condition`(state); fails with the last state after `seconds`."""
        deadline = trio.current_time() + seconds
        while True:
            state = await self.state()
            if condition(state):
                return state
            assert trio.current_time() < deadline, state
            await trio.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def pause(self) -> None:
        """SIGSTOP."""
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self.process.resume()


def _peer_process(name: str, args: Sequence[str]) -> Process:
    argv = [sys.executable, str(PEERS / f"{name}.py"), "--watch-stdin", *args]
    return Process(name, argv)


@asynccontextmanager
async def peer(name: str, *args: str) -> AsyncIterator[Peer]:
    """Run a peer: ``async with peer("sdk_agent", "--grpc", "off") as p``."""
    async with running(_peer_process(name, args)) as process:
        line = await trio.to_thread.run_sync(process.ready_line, abandon_on_cancel=True)
        yield Peer(process, line)


@contextmanager
def peer_sync(name: str, *args: str) -> Iterator[Peer]:
    """The same without trio, for fixtures that outlive one test."""
    process = _peer_process(name, args)
    try:
        yield Peer(process, process.ready_line())
    finally:
        process.stop()


async def run_sdk_client(
    ops: Sequence[Mapping[str, Any]], *, seconds: float = 60, **job: Any
) -> list[dict[str, Any]]:
    """Run `sdk_client` with one job; returns its lines. See its docstring for the job."""
    argv = [sys.executable, str(PEERS / "sdk_client.py")]
    data = json.dumps({**job, "ops": list(ops)}).encode()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with trio.fail_after(seconds):
        done = await trio.run_process(
            argv, stdin=data, capture_stdout=True, capture_stderr=True, check=False, env=environment
        )
    if done.stderr:
        print(f"--- sdk_client ---\n{done.stderr.decode()}", file=sys.stderr)
    if done.returncode:
        raise ProcessDied(f"sdk_client: exit code {done.returncode}\n{done.stderr.decode()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


@dataclass(frozen=True, kw_only=True)
class GrpcResult:
    """How a gRPC call ended."""

    code: int
    message: str
    messages: list[bytes]
    headers: dict[str, str | bytes]
    trailers: dict[str, str | bytes]


async def grpc_call(
    port: int,
    method: str,
    request: bytes,
    *,
    stream: bool = False,
    metadata: Sequence[tuple[str, str]] = (),
    seconds: float = 10,
    tls: TlsFiles | None = None,
) -> GrpcResult:
    """One call with grpcio on a connection of its own; `method` without its service."""
    return await trio.to_thread.run_sync(
        lambda: _grpc_call_sync(port, method, request, stream, metadata, seconds, tls)
    )


def _grpc_call_sync(
    port: int,
    method: str,
    request: bytes,
    stream: bool,
    metadata: Sequence[tuple[str, str]],
    seconds: float,
    tls: TlsFiles | None,
) -> GrpcResult:
    import grpc  # noqa: PLC0415 - only a few tests need it

    options = [("grpc.max_receive_message_length", -1)]
    target = f"127.0.0.1:{port}"
    if tls is None:
        channel = grpc.insecure_channel(target, options)
    else:
        credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes())
        channel = grpc.secure_channel(target, credentials, options)
    messages: list[bytes] = []
    with channel:
        stub = channel.unary_stream(f"/lf.a2a.v1.A2AService/{method}")
        call = stub(request, timeout=seconds, metadata=tuple(metadata))
        with suppress(grpc.RpcError):
            messages.extend(call)
        assert stream or len(messages) <= 1
        return GrpcResult(
            code=call.code().value[0],
            message=call.details(),
            messages=messages,
            headers=dict(call.initial_metadata()),
            trailers=dict(call.trailing_metadata()),
        )
