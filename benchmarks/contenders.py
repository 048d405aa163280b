"""What is measured: the sidecar and its peers, each doing the same work, pinned to one core."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTENDER_CORE, OTHER_CORE = 0, 1
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@dataclass
class Running:
    """A process and its children: their processor time and memory are one figure."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    path: str = "/"
    ports: dict[str, int] = field(default_factory=dict)

    def _pids(self) -> list[int]:
        pids = [self.process.pid]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text()
            pids += [int(pid) for pid in children.split()]
        return pids

    def cpu_seconds(self) -> float:
        total = 0
        for pid in self._pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def rss_bytes(self) -> int:
        return sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE for pid in self._pids()
        )


@contextlib.contextmanager
def _process(command: list[str], core: int, **more: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        **more,  # type: ignore[arg-type]
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(ready: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, urllib.error.URLError):
            if ready():  # type: ignore[operator]
                return
        time.sleep(0.05)
    raise RuntimeError("not ready in time")


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), 1):
        return True


@contextlib.contextmanager
def stub() -> Iterator[dict[str, int]]:
    """The upstream, on the other core."""
    ports = {"http": free_port(), "grpc": free_port()}
    command = [sys.executable, "-m", "benchmarks.stub"]
    command += ["--http", str(ports["http"]), "--grpc", str(ports["grpc"])]
    with _process(command, OTHER_CORE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield ports


@contextlib.contextmanager
def direct(upstream: dict[str, int]) -> Iterator[Running]:
    """No proxy at all: what is subtracted to get an added latency."""
    with _process(["sleep", "3600"], OTHER_CORE) as process:
        yield Running("direct", process, upstream["http"], "/rpc")


@contextlib.contextmanager
def sidecar(upstream: dict[str, int], prefer: str = "JSONRPC") -> Iterator[Running]:
    ports = {binding: free_port() for binding in ("JSONRPC", "HTTP+JSON", "GRPC")}
    admin = free_port()
    listeners = "".join(
        f'[[listeners]]\naddress = "127.0.0.1:{port}"\nbinding = "{binding}"\n'
        for binding, port in ports.items()
    )
    text = (
        f'{listeners}[admin]\naddress = "127.0.0.1:{admin}"\n[agents.stub]\n'
        f'card = "http://127.0.0.1:{upstream["http"]}"\nprefer = ["{prefer}"]\n'
        "max_streams = 4096\n[limits]\nconnections = 4096\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        command = [sys.executable, "-m", "sidecar", "run", "--config", file.name]
        with _process(command, CONTENDER_CORE) as process:
            wait_until(
                lambda: urllib.request.urlopen(f"http://127.0.0.1:{admin}/readyz", timeout=1)
            )
            yield Running("sidecar", process, ports["JSONRPC"], "/", {**ports, "admin": admin})


@contextlib.contextmanager
def nginx(upstream: dict[str, int]) -> Iterator[Running]:
    """nginx with proxy_pass, kept connections and no buffering of streams."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "nginx.conf").write_text(
            f"""
worker_processes 1; daemon off; pid {directory}/pid; error_log /dev/null;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {directory}; proxy_temp_path {directory};
  fastcgi_temp_path {directory}; uwsgi_temp_path {directory}; scgi_temp_path {directory};
  client_max_body_size 32m; client_body_buffer_size 1m; keepalive_requests 10000000;
  upstream stub {{ server 127.0.0.1:{upstream["http"]}; keepalive 512; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://stub; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 3600s;
    }}
  }}
}}
"""
        )
        command = [_program("nginx"), "-p", directory, "-c", f"{directory}/nginx.conf"]
        with _process(command, CONTENDER_CORE) as process:
            wait_until(lambda: _answers(port))
            yield Running("nginx", process, port, "/rpc")


@contextlib.contextmanager
def haproxy(upstream: dict[str, int]) -> Iterator[Running]:
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(
            f"""
global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 3600s
  timeout server 3600s
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
  server s 127.0.0.1:{upstream["http"]}
"""
        )
        file.flush()
        with _process([_program("haproxy"), "-db", "-f", file.name], CONTENDER_CORE) as process:
            wait_until(lambda: _answers(port))
            yield Running("haproxy", process, port, "/rpc")


@contextlib.contextmanager
def hypercorn(upstream: dict[str, int]) -> Iterator[Running]:
    """The same forwarding written with hypercorn and httpx on trio: what one would write first."""
    port = free_port()
    environment = {**os.environ, "STUB": str(upstream["http"])}
    command = [sys.executable, "-m", "hypercorn", "--worker-class", "trio"]
    command += ["--bind", f"127.0.0.1:{port}", "benchmarks.baseline:app"]
    with _process(command, CONTENDER_CORE, env=environment, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: _answers(port))
        yield Running("hypercorn", process, port, "/rpc")


CONTENDERS = {
    "sidecar": sidecar,
    "nginx": nginx,
    "haproxy": haproxy,
    "hypercorn": hypercorn,
}


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise RuntimeError(f"{name} is not installed: apt-get install {name}")
    return found
