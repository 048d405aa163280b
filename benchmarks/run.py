"""``python -m benchmarks.run``: one table per target, figures of one run, JSON beside it.

Contender and load have a core each. Contenders take turns over several rounds; what is quoted is the
median, and a comparison is the median of the rounds' own ratios, so that a machine whose speed drifts
moves both sides alike. A cell with a failed request is void.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import contenders, load
from benchmarks.contenders import CONTENDERS, OTHER_CORE, Running

TEXT = "y" * 800


class Report:
    """The rows of all targets."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(
        self,
        target: str,
        what: str,
        figure: str,
        peer: str,
        ratio: float,
        bound: str,
        met: bool,
    ) -> None:
        row = {
            "target": target,
            "what": what,
            "sidecar": figure,
            "peer": peer,
            "ratio": round(ratio, 2),
            "bound": bound,
            "met": met,
        }
        self.rows.append(row)
        mark = "met" if met else "NOT MET"
        print(
            f"{target:<4}{what:<46}{figure:>14} {peer:>22} {ratio:>8.2f}  {bound:<9}{mark}",
            flush=True,
        )


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


@contextlib.contextmanager
def running(names: list[str], upstream: dict[str, int]) -> Iterator[dict[str, Running]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(CONTENDERS[name](upstream)) for name in names}


def rounds(count: int, names: list[str], measure: Callable[[str], float]) -> dict[str, list[float]]:
    """The figures of every contender, taken in turn; the order alternates."""
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        for name in names if number % 2 == 0 else reversed(names):
            figures[name].append(measure(name))
    return figures


def ratio(figures: dict[str, list[float]], one: str, other: str) -> float:
    pairs = zip(figures[one], figures[other], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _checked(figures: load.Figures, name: str) -> load.Figures:
    if figures.failed:
        raise RuntimeError(f"{name}: {figures.failed} failed requests, the cell is void")
    return figures


def cpu_and_throughput(
    report: Report, upstream: dict[str, int], options: argparse.Namespace
) -> None:
    """T1, T2: one core, 16 connections, 1 KB."""
    names = ["sidecar", "nginx", "haproxy", "hypercorn"]
    with running(names, upstream) as all_running:
        for binding, body in (("JSONRPC", load.rpc(TEXT)), ("HTTP+JSON", load.rest(TEXT))):
            throughput: dict[str, list[float]] = {}

            def measure(
                name: str,
                binding: str = binding,
                body: bytes = body,
                throughput: dict[str, list[float]] = throughput,
            ) -> float:
                one = all_running[name]
                port = one.ports.get(binding)
                path = None
                if binding == "HTTP+JSON":
                    path = "/message:send"
                found = _checked(
                    load.requests(
                        one, body, connections=16, seconds=options.seconds, port=port, path=path
                    ),
                    name,
                )
                throughput.setdefault(name, []).append(found.per_second)
                return found.cpu_seconds_each

            chosen = names if binding == "JSONRPC" else ["sidecar", "nginx"]
            cpu = rounds(options.rounds, chosen, measure)
            own, peer = statistics.median(cpu["sidecar"]), statistics.median(cpu["nginx"])
            times = ratio(cpu, "sidecar", "nginx")
            what = f"{binding} -> JSONRPC, CPU per request"
            report.add("T1", what, _micro(own), f"nginx {_micro(peer)}", times, "<= 5", times <= 5)
            if binding != "JSONRPC":
                continue
            own = statistics.median(throughput["sidecar"])
            for other, bound in (("hypercorn", 10.0), ("nginx", 0.2)):
                times = ratio(throughput, "sidecar", other)
                peer = statistics.median(throughput[other])
                report.add(
                    "T2",
                    "JSONRPC -> JSONRPC, requests per second",
                    f"{own:.0f}/s",
                    f"{other} {peer:.0f}/s",
                    times,
                    f">= {bound:g}",
                    times >= bound,
                )


def latency(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T3: what one connection waits longer than without a proxy."""
    with running(["sidecar", "nginx"], upstream) as found, contenders.direct(upstream) as direct:
        found["direct"] = direct

        def measure(name: str) -> float:
            figures = load.requests(
                found[name], load.rpc(TEXT), connections=1, seconds=options.seconds
            )
            return _checked(figures, name).p50_seconds

        p50 = rounds(options.rounds, list(found), measure)
    added = {
        name: [a - b for a, b in zip(p50[name], p50["direct"], strict=True)]
        for name in ("sidecar", "nginx")
    }
    own, peer = (statistics.median(added[name]) for name in ("sidecar", "nginx"))
    times = own / max(peer, 1e-6)
    report.add(
        "T3",
        "latency added at one connection, p50",
        _micro(own),
        f"nginx {_micro(peer)}",
        times,
        "<= 2",
        times <= 2,
    )


def grpc_cpu(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T4: JSON-RPC to a gRPC agent, beside nginx forwarding plain HTTP."""
    with contenders.sidecar(upstream, "GRPC") as own, contenders.nginx(upstream) as peer:
        both = {"sidecar": own, "nginx": peer}

        def measure(name: str) -> float:
            figures = load.requests(
                both[name], load.rpc(TEXT), connections=16, seconds=options.seconds
            )
            return _checked(figures, name).cpu_seconds_each

        cpu = rounds(options.rounds, ["sidecar", "nginx"], measure)
    times = ratio(cpu, "sidecar", "nginx")
    own_cpu, peer_cpu = (statistics.median(cpu[name]) for name in ("sidecar", "nginx"))
    report.add(
        "T4",
        "JSONRPC -> GRPC, CPU per request",
        _micro(own_cpu),
        f"nginx {_micro(peer_cpu)}",
        times,
        "<= 22",
        times <= 22,
    )


def sse(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T5: paced and unpaced events."""
    with running(["sidecar", "nginx"], upstream) as found, contenders.direct(upstream) as direct:
        p50: dict[str, list[float]] = {}

        def paced(name: str) -> float:
            one = found.get(name, direct)
            figures = load.streams(one, "#paced=150,0.01#", 16)
            p50.setdefault(name, []).append(figures.p50_seconds)
            return figures.cpu_seconds_each

        cpu = rounds(options.rounds, ["sidecar", "nginx", "direct"], paced)

        def blast(name: str) -> float:
            figures = load.streams(found[name], "#blast=60000#", 1)
            return figures.events / figures.seconds

        rate = rounds(options.rounds, ["sidecar", "nginx"], blast)
    times = ratio(cpu, "sidecar", "nginx")
    own, peer = (statistics.median(cpu[name]) for name in ("sidecar", "nginx"))
    report.add(
        "T5",
        "SSE, 16 paced streams, CPU per event",
        _micro(own),
        f"nginx {_micro(peer)}",
        times,
        "<= 3.5",
        times <= 3.5,
    )
    base = statistics.median(p50["direct"])
    own, peer = (statistics.median(p50[name]) - base for name in ("sidecar", "nginx"))
    times = own / max(peer, 1e-6)
    report.add(
        "T5",
        "SSE, latency added, p50",
        _micro(own),
        f"nginx {_micro(peer)}",
        times,
        "<= 3",
        times <= 3,
    )
    times = ratio(rate, "sidecar", "nginx")
    own, peer = (statistics.median(rate[name]) for name in ("sidecar", "nginx"))
    report.add(
        "T5",
        "SSE, one stream as fast as it goes",
        f"{own:.0f}/s",
        f"nginx {peer:.0f}/s",
        times,
        ">= 0.4",
        times >= 0.4,
    )


def idle(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T6: memory of idle streams; the price of many upstream connections."""
    with contenders.sidecar(upstream) as own:
        _checked(load.requests(own, load.rpc(TEXT), connections=16, seconds=1), "sidecar")
        before = own.rss_bytes()
        each = asyncio.run(_hold_streams(own, 1000, before))
        report.add(
            "T6",
            "1000 idle streams, memory each",
            f"{each / 1024:.1f} KB",
            "",
            each / 1024,
            "<= 12",
            each <= 12 * 1024,
        )
        few = _checked(
            load.requests(own, load.rpc(TEXT), connections=16, seconds=options.seconds), "s"
        )
        _checked(load.requests(own, load.rpc(TEXT), connections=256, seconds=1), "sidecar")
        many = _checked(
            load.requests(own, load.rpc(TEXT), connections=16, seconds=options.seconds), "s"
        )
    times = many.cpu_seconds_each / few.cpu_seconds_each
    report.add(
        "T6",
        "CPU per request after 256 connections",
        _micro(many.cpu_seconds_each),
        f"before {_micro(few.cpu_seconds_each)}",
        times,
        "<= 1.2",
        times <= 1.2,
    )


async def _hold_streams(own: Running, count: int, before: int) -> float:
    body = load.rpc("#paced=1,30#", "SendStreamingMessage")
    opened = []
    for _ in range(count):
        reader, writer = await load.open_stream(own.port, own.path, body)
        await reader.readuntil(b"\r\n\r\n")
        opened.append(writer)
    held = own.rss_bytes() - before
    for writer in opened:
        writer.close()
    return held / count


def start_up(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T7: to accepting, and memory then."""
    times = []
    memory = 0.0
    for _ in range(options.rounds):
        began = time.monotonic()
        with contenders.sidecar(upstream) as own:
            started = time.monotonic() - began
            memory = own.rss_bytes() / 1e6
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        times.append(started / (time.monotonic() - began))
    found = statistics.median(times)
    report.add(
        "T7",
        "start to ready, beside a bare interpreter",
        f"{found:.0f}x",
        "python -c pass",
        found,
        "<= 25",
        found <= 25,
    )
    report.add("T7", "memory when idle", f"{memory:.0f} MB", "", memory, "<= 60", memory <= 60)


def stall(report: Report, upstream: dict[str, int], options: argparse.Namespace) -> None:
    """T8: how long /healthz waits while 1 MB messages are translated to gRPC."""
    del options
    with contenders.sidecar(upstream, "GRPC") as own:
        body = load.rpc("z" * 1_000_000)
        url = f"http://127.0.0.1:{own.port}/"
        longest = 0.0
        script = (
            "import sys,urllib.request as u\n"
            "body=sys.stdin.buffer.read()\n"
            f"for _ in range(10): u.urlopen(u.Request({url!r},body)).read()\n"
        )
        sender = subprocess.Popen(
            ["taskset", "-c", str(OTHER_CORE), sys.executable, "-c", script],
            stdin=subprocess.PIPE,
        )
        assert sender.stdin is not None
        sender.stdin.write(body)
        sender.stdin.close()
        health = f"http://127.0.0.1:{own.ports['admin']}/healthz"
        while sender.poll() is None:
            began = time.monotonic()
            urllib.request.urlopen(health).read()
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.002)
    report.add(
        "T8",
        "longest stall, 1 MB text to gRPC",
        f"{longest * 1000:.0f} ms",
        "",
        longest * 1000,
        "<= 50",
        longest <= 0.05,
    )


TARGETS: dict[str, Callable[[Report, dict[str, int], argparse.Namespace], None]] = {
    "T1": cpu_and_throughput,
    "T3": latency,
    "T4": grpc_cpu,
    "T5": sse,
    "T6": idle,
    "T7": start_up,
    "T8": stall,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="length of one measurement")
    parser.add_argument("--only", action="append", choices=TARGETS, help="one target; repeatable")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/last-run.json"))
    options = parser.parse_args()
    options.seconds = int(options.seconds)
    os.sched_setaffinity(0, {OTHER_CORE})
    report = Report()
    with contenders.stub() as upstream:
        for name, measure in TARGETS.items():
            if options.only and name not in options.only:
                continue
            try:
                measure(report, upstream, options)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
    options.json.write_text(json.dumps(report.rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
