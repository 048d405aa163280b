"""Load and what it costs: wrk for requests, an own client for streams; CPU from the kernel."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass

from benchmarks.contenders import OTHER_CORE, Running

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def rpc(text: str, method: str = "SendMessage") -> bytes:
    message = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}
    return json.dumps(call).encode()


def rest(text: str) -> bytes:
    message = {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}]}
    return json.dumps({"message": message}).encode()


@dataclass
class Figures:
    """One cell of one contender. A cell with failed requests is void."""

    per_second: float
    p50_seconds: float
    cpu_seconds_each: float
    failed: int


def requests(
    running: Running,
    body: bytes,
    *,
    connections: int,
    seconds: float,
    port: int | None = None,
    path: str | None = None,
) -> Figures:
    """POST `body` over and over; wrk runs on the core that the contender does not have."""
    script = (
        'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
        f"wrk.body = [==[{body.decode()}]==]\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        url = f"http://127.0.0.1:{port or running.port}{path or running.path}"
        command = ["taskset", "-c", str(OTHER_CORE), "wrk", "-t1", f"-c{connections}"]
        command += [f"-d{seconds}s", "--latency", "-s", file.name, url]
        before = running.cpu_seconds()
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cpu = running.cpu_seconds() - before
    count = int(_find(r"(\d+) requests in", output))
    value, unit = re.search(r"50%\s+([\d.]+)(us|ms|s)", output).groups()  # type: ignore[union-attr]
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    broken = re.search(
        r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output
    )
    return Figures(
        per_second=float(_find(r"Requests/sec:\s+([\d.]+)", output)),
        p50_seconds=float(value) * _UNITS[unit],
        cpu_seconds_each=cpu / max(count, 1),
        failed=(int(failed[1]) if failed else 0)
        + (sum(map(int, broken.groups())) if broken else 0),
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"wrk printed no {pattern!r}:\n{text}")
    return found[1]


@dataclass
class StreamFigures:
    events: int
    seconds: float
    cpu_seconds_each: float
    p50_seconds: float
    """From the agent's clock in the event to its arrival; 0 for a blast."""


def streams(running: Running, text: str, count: int) -> StreamFigures:
    """Open `count` streams at once and read them to their ends."""
    before, began = running.cpu_seconds(), time.monotonic()
    body = rpc(text, "SendStreamingMessage")
    found = asyncio.run(_read_streams(running.port, running.path, body, count))
    events = sum(events for events, _ in found)
    latencies = [latency for _, each in found for latency in each]
    return StreamFigures(
        events=events,
        seconds=time.monotonic() - began,
        cpu_seconds_each=(running.cpu_seconds() - before) / max(events, 1),
        p50_seconds=statistics.median(latencies) if latencies else 0.0,
    )


async def _read_streams(
    port: int, path: str, body: bytes, count: int
) -> list[tuple[int, list[float]]]:
    return await asyncio.gather(*(_read_stream(port, path, body) for _ in range(count)))


async def open_stream(
    port: int, path: str, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return reader, writer


async def _read_stream(port: int, path: str, body: bytes) -> tuple[int, list[float]]:
    reader, writer = await open_stream(port, path, body)
    paced = b"#paced=" in body
    events = 0
    latencies: list[float] = []
    carry = b""
    while data := await reader.read(1 << 18):
        now = time.monotonic_ns()
        if not paced:
            joined = carry + data
            events += joined.count(b"\ndata: ")
            carry = joined[-6:] if b"\ndata: " not in joined[-12:] else b""
            if data.endswith(b"0\r\n\r\n"):
                break
            continue
        for sent in re.findall(rb'"text": ?"(\d{10,})"', data):
            events += 1
            latencies.append((now - int(sent)) / 1e9)
        if data.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return events, latencies
