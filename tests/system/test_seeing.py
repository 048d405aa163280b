"""What an operator sees: metrics and what Prometheus makes of them, the log, the status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import (
    Process,
    Sidecar,
    card,
    connect,
    free_port,
    http,
    legacy_card,
    requires,
    running,
    sidecar,
    write_card,
)
from tests.peers.mini import SERVICE, frame
from tests.system.world import KeepAlive, RemoteAgent, message_id, send_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tests.harness import Peer

pytestmark = pytest.mark.system

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "a2a-sidecar.json"
RULES = DOCS / "prometheus"

WORKING = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
OPENING = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": WORKING}}}

# Every metric, as its family is called in the exposition.
METRICS = {
    "requests",
    "request_duration_seconds",
    "overhead_seconds",
    "time_to_first_event_seconds",
    "requests_in_flight",
    "streams_active",
    "candidates",
    "ineligible_interfaces",
    "card_age_seconds",
    "card_contradictions",
    "attempts",
    "failovers",
    "ambiguous_errors",
    "selection_changes",
    "current_interface",
    "redials",
    "upstream_connections",
    "card_fetches",
    "stream_ends",
    "stream_events",
    "card_changes",
    "limit_rejections",
    "internal_errors",
    "build_info",
    "event_loop_lag_seconds",
    "log_dropped",
    "config_last_reload_successful",
    "draining",
}


def command(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        **more,
    )


def start(argv: list[str], **how: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(argv, **how)


async def scrape(daemon: Sidecar) -> str:
    return (await http(daemon.admin, "GET", "/metrics")).body.decode()


def check_metrics(text: str) -> None:
    """promtool's lint, and its parser."""
    promtool = requires("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@asynccontextmanager
async def seen(
    first: Peer, second: Peer, tmp_path: Path, extra: str = ""
) -> AsyncIterator[tuple[Sidecar, RemoteAgent, RemoteAgent]]:
    """A daemon with two agents: one of two interfaces, one whose card contradicts itself."""
    two = card([("JSONRPC", first.urls["JSONRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    two["supportedInterfaces"].append(
        {"url": "gopher://x", "protocolBinding": "GOPHER", "protocolVersion": "1.0"}
    )
    url = first.urls["JSONRPC"]
    lying = legacy_card(url=url, preferred="HTTP+JSON", additional=[("JSONRPC", url)])
    lying["additionalInterfaces"].append(
        {"transport": "HTTP+JSON", "url": second.urls["HTTP+JSON"]}
    )
    agents = {
        "two": {"card": write_card(tmp_path, two, "two.json"), "max_streams": 1},
        "lying": {"card": write_card(tmp_path, lying, "lying.json")},
    }
    async with sidecar(agents=agents, extra=extra, ready=True) as daemon:
        yield daemon, RemoteAgent(daemon, "two"), RemoteAgent(daemon, "lying")


async def something_of_everything(first: Peer, two: RemoteAgent, lying: RemoteAgent) -> None:
    """A failover, an ambiguous error, a refused stream, a finished one, and calls that are well."""
    await first.script({"reply": {"status": 404, "headers": [], "body": ""}})
    assert (await two.send()).interface == "1-jsonrpc"
    assert (await lying.send("HTTP+JSON")).status == 200
    assert (await lying.send("GRPC")).status == 0
    # The selection of the second agent is at its first candidate, HTTP+JSON: an error there.
    async with two.stream("JSONRPC", "hello") as events:
        async for _ in events:
            pass
    await two.until("stream_ends_total", 1, reason="completed")


# --- metrics ----------------------------------------------------------------------------------


async def test_every_metric_is_there(first: Peer, second: Peer, tmp_path: Path) -> None:
    async with seen(first, second, tmp_path) as (daemon, two, lying):
        await something_of_everything(first, two, lying)
        await second.script(["execute", "close"])
        assert (await two.send()).delivered == "unknown"
        gate = message_id()
        await first.script({"sse": [OPENING, {"gate": gate}]})
        async with two.stream("HTTP+JSON", "hello"):
            refused = await two.send("HTTP+JSON", "hello")
            assert refused.status == 200
            async with two.stream("HTTP+JSON", "hello") as more:
                assert more.status == 503
            await first.control("open", {"gate": gate})
        text = await scrape(daemon)
        check_metrics(text)
        families = {one.name: one for one in text_string_to_metric_families(text)}
        names = {name.removeprefix("a2a_sidecar_") for name in families}
        assert names >= METRICS
        assert all(name.startswith("a2a_sidecar_") for name in families)
        silent = {name for name in METRICS if not families[f"a2a_sidecar_{name}"].samples}
        # What only a defect, or a reused connection that is closed, brings about.
        assert silent <= {"internal_errors", "redials", "card_changes"}
        ambiguous = families["a2a_sidecar_ambiguous_errors"].samples
        assert [(one.labels, one.value) for one in ambiguous] == [
            (
                {
                    "agent": "two",
                    "operation": "SendMessage",
                    "interface": "1-jsonrpc",
                    "phase": "waiting",
                },
                1.0,
            )
        ]
        assert await lying.metric("card_contradictions_total") == 1
        assert await two.metric("ineligible_interfaces") == 1
        assert await daemon.metric("a2a_sidecar_limit_rejections_total", limit="max_streams") == 1


async def pipelined(address: str, requests: list[bytes]) -> int:
    """Send all requests without waiting for answers; returns how many were answered.

    A request that is refused before its body was read ends its connection.
    """
    answered = 0
    while answered < len(requests):
        before = answered
        async with await connect(address) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(write_all, stream, requests[answered:])
            rest = b""
            while answered < len(requests):
                data = await stream.receive_some(1 << 20)
                rest += data
                answered += rest.count(b"HTTP/1.1 ")
                rest = rest[-8:]
                if not data:
                    break
            nursery.cancel_scope.cancel()
        assert answered > before
    return answered


async def write_all(stream: trio.abc.Stream, requests: list[bytes]) -> None:
    with suppress(trio.BrokenResourceError):
        for start in range(0, len(requests), 50):
            await stream.send_all(b"".join(requests[start : start + 50]))


def post(path: str, body: dict[str, Any], host: str = "localhost") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


async def grpc_calls(port: int, calls: Iterable[tuple[str, bytes]]) -> int:
    """Make them on one connection, some at a time; returns how many were answered."""
    engine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    engine.initiate_connection()
    todo, open_streams, answered = list(calls), 0, 0
    async with await connect(port) as stream:
        while todo or open_streams:
            while todo and open_streams < 50:
                path, body = todo.pop()
                number = engine.get_next_available_stream_id()
                headers = [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":authority", "localhost"),
                    (":path", path),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                ]
                engine.send_headers(number, headers)
                engine.send_data(number, frame(body), end_stream=True)
                open_streams += 1
            await stream.send_all(engine.data_to_send())
            data = await stream.receive_some(1 << 16)
            assert data
            for event in engine.receive_data(data):
                if isinstance(event, h2.events.StreamEnded):
                    open_streams -= 1
                    answered += 1
    return answered


def hostile(count: int) -> tuple[str, list[tuple[str, list[bytes]]], list[tuple[str, bytes]]]:
    """Requests by binding in which everything that a caller chooses is another word each time."""
    mark = uuid.uuid4().hex[:12]

    def word(number: int) -> str:
        return f"{mark}x{number}"

    fifth = range(count // 5)
    send = "SendMessage"
    jsonrpc = [
        post("/agents/two", {"jsonrpc": "2.0", "id": word(n), "method": word(n), "params": {}})
        for n in fifth
    ]
    jsonrpc += [
        post(f"/agents/{word(n)}", {"jsonrpc": "2.0", "id": 1, "method": send, "params": {}})
        for n in range(count // 10)
    ]
    hosts = [
        post("/agents/two", {"jsonrpc": "2.0", "id": 1, "method": send}, host=f"{word(n)}.test")
        for n in fifth
    ]
    rest = [get(f"/agents/two/tasks/{word(n)}") for n in range(count // 20)]
    rest += [get(f"/{word(n)}/tasks?{word(n)}={word(n)}") for n in fifth]
    grpc = [(SERVICE + word(n), b"") for n in fifth]
    grpc += [(SERVICE + send, send_pb("x", word(n), word(n))) for n in range(count // 20)]
    return mark, [("JSONRPC", jsonrpc), ("JSONRPC", hosts), ("HTTP+JSON", rest)], grpc


async def test_callers_cannot_make_series(first: Peer, second: Peer, tmp_path: Path) -> None:
    """10,000 requests with other methods, paths, agents, hosts, tenants and ids each time."""
    async with seen(first, second, tmp_path) as (daemon, two, lying):
        await something_of_everything(first, two, lying)

        async def storm(count: int) -> str:
            mark, requests, grpc = hostile(count)
            answered = []

            async def over_http(binding: str, some: list[bytes]) -> None:
                answered.append(await pipelined(daemon.listeners[binding], some))

            async def over_grpc() -> None:
                answered.append(await grpc_calls(daemon.port("GRPC"), grpc))

            async with trio.open_nursery() as nursery:
                for binding, some in requests:
                    nursery.start_soon(over_http, binding, some)
                nursery.start_soon(over_grpc)
            assert sum(answered) == count
            return mark

        await storm(20)
        before = len((await scrape(daemon)).splitlines())
        mark = await storm(10_000)
        text = await scrape(daemon)
        assert mark not in text
        assert len(text.splitlines()) <= before + 20
        check_metrics(text)
        assert mark not in json.dumps(await daemon.status())
        assert len(daemon.log()) < 200_000


# --- Prometheus and Grafana -------------------------------------------------------------------


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [requires("promtool", "prometheus"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=RULES,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_the_alert_rules() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts-test.yml")
    promtool("check", "config", "prometheus.yml")


def queries() -> dict[str, list[str]]:
    """The dashboard's queries by panel, with its variables filled in."""
    found: dict[str, list[str]] = {}
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "4s").replace("$__range", "1m")
            text = re.sub(r"\$(job|instance|agent)\b", ".*", text)
            assert "$" not in text
            found.setdefault(panel["title"], []).append(text)
    return found


# Panels that show something after `something_of_everything`.
SHOWN = {
    "Calls per second",
    "Calls that fail",
    "May have been executed",
    "Agents without an interface",
    "Failed reloads",
    "Sidecars",
    "Calls by how they ended",
    "Calls by agent",
    "Duration of calls",
    "The sidecar's own part of a unary call",
    "Attempts by result",
    "Where calls begin",
    "Streams under way",
    "Candidates and interfaces that are not used",
    "Age of cards",
    "Unary calls under way",
    "Connections to agents",
    "Lag of the event loop",
    "Shutting down",
}


async def test_prometheus_understands_all_of_it(first: Peer, second: Peer, tmp_path: Path) -> None:
    """A real server scrapes the sidecar, evaluates the rules, and answers every panel's queries."""
    prometheus = requires("prometheus", "prometheus")
    async with seen(first, second, tmp_path) as (daemon, two, lying):
        await something_of_everything(first, two, lying)
        port = free_port()
        config = (RULES / "prometheus.yml").read_text("utf-8")
        config = config.replace("127.0.0.1:7429", daemon.admin).replace("15s", "1s")
        (tmp_path / "prometheus.yml").write_text(config, "utf-8")
        (tmp_path / "alerts.yml").write_text((RULES / "alerts.yml").read_text("utf-8"), "utf-8")
        argv = [
            prometheus,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        async with running(Process("prometheus", argv)):
            assert await until_scraped(port, two, lying) >= 3
            rules = (await api(port, "/api/v1/rules"))["groups"][0]["rules"]
            assert len(rules) >= 12
            assert {rule["health"] for rule in rules} == {"ok"}
            assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()
            shown = {
                panel
                for panel, texts in queries().items()
                if any([await query(port, text) for text in texts])
            }
            assert SHOWN - shown == set()
            metrics = {one["__name__"] for one in await series(port)}
        used = re.findall(r"a2a_sidecar_[a-z_]+", DASHBOARD.read_text("utf-8") + rules_text())
        known = {f"a2a_sidecar_{name}" for name in METRICS}
        suffixes = ("", "_total", "_bucket")
        assert {
            name for name in used if not any(name == k + s for k in known for s in suffixes)
        } == (set())
        assert {name for name in metrics if name.startswith("a2a_sidecar_")}


def rules_text() -> str:
    return (RULES / "alerts.yml").read_text("utf-8")


async def api(port: int, path: str) -> Any:
    reply = await http(port, "GET", path)
    body = reply.json()
    assert body["status"] == "success", body
    return body["data"]


async def query(port: int, text: str) -> list[Any]:
    encoded = "".join(c if c.isalnum() else f"%{byte:02x}" for c in text for byte in c.encode())
    result: list[Any] = (await api(port, f"/api/v1/query?query={encoded}"))["result"]
    return result


async def series(port: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = await api(
        port, "/api/v1/series?match%5B%5D=%7Bjob%3D%22a2a-sidecar%22%7D"
    )
    return found


async def until_scraped(port: int, *agents: RemoteAgent) -> float:
    """Make calls until a few scrapes have seen them."""
    with trio.fail_after(40):
        while True:
            for agent in agents:
                await agent.send()
            try:
                found = await query(port, 'count_over_time(up{job="a2a-sidecar"}[1m])')
            except (OSError, ValueError):  # it is not up yet
                found = []
            count = float(found[0]["value"][1]) if found else 0.0
            if count >= 4:
                return count
            await trio.sleep(0.1)


# --- the log ----------------------------------------------------------------------------------


def lines(log: str, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.splitlines()]
    return [line for line in found if line["event"] == event]


async def test_the_log_tells_of_what_happened(first: Peer, second: Peer, tmp_path: Path) -> None:
    """As JSON: one object a line, of which a script can ask."""
    extra = '[log]\nformat = "json"\ncalls = true\n'
    async with seen(first, second, tmp_path, extra) as (daemon, two, lying):
        await something_of_everything(first, two, lying)
        await second.script(["execute", "close"])
        assert (await two.send("GRPC")).delivered == "unknown"
        await two.until("requests_total", 1, outcome="ambiguous")
        daemon.process.signal(signal.SIGTERM)
        await daemon.process.wait()
        log = daemon.log()
    (failover,) = lines(log, "failover")
    address = first.urls["JSONRPC"].removeprefix("http://").partition("/")[0]
    expected = {
        "level": "warning",
        "agent": "two",
        "operation": "SendMessage",
        "interface": "0-jsonrpc",
        "to": "1-jsonrpc",
        "address": address,
        "kind": "wrong_endpoint",
        "result": "http_404",
        "delivered": "no",
        "hint": "the card declares JSONRPC at this address, which does not serve it",
    }
    assert failover.items() >= expected.items()
    (ambiguous,) = lines(log, "ambiguous")
    assert ambiguous["delivered"] == "unknown"
    (advance, second_advance) = lines(log, "advance")
    assert (advance["from"], advance["to"]) == ("0-jsonrpc", "1-jsonrpc")
    assert second_advance["to"] == "0-jsonrpc"
    cards = {line["agent"]: line for line in lines(log, "card")}
    assert cards["two"]["candidates"] == "0-jsonrpc,1-jsonrpc"
    assert cards["two"]["ineligible"] == 1
    (unused,) = [one for one in lines(log, "interface not used") if one["agent"] == "two"]
    assert "GOPHER" in unused["reason"]
    (contradiction,) = lines(log, "card contradicts itself")
    assert contradiction["agent"] == "lying"
    calls = lines(log, "call")
    assert len(calls) == 5
    assert {one["outcome"] for one in calls} == {"ok", "ambiguous"}
    assert (
        calls[0].items()
        >= {"binding": "JSONRPC", "attempts": 2, "operation": "SendMessage"}.items()
    )
    assert calls[0]["call"] == failover["call"]
    assert calls[-1]["seconds"] < 5
    assert lines(log, "stopped")


async def test_a_log_that_nobody_reads_holds_nothing_up(first: Peer, tmp_path: Path) -> None:
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    ports = [free_port() for _ in range(2)]
    (tmp_path / "config.toml").write_text(
        f'[[listeners]]\naddress = "127.0.0.1:{ports[0]}"\nbinding = "JSONRPC"\n'
        f'[admin]\naddress = "127.0.0.1:{ports[1]}"\n[agents.one]\ncard = "{file}"\n'
        "[log]\ncalls = true\n[limits]\ndrain_seconds = 1\n",
        "utf-8",
    )
    argv = [sys.executable, "-m", "sidecar", "run", "--config", str(tmp_path / "config.toml")]
    reading, writing = os.pipe()
    process = start(argv, stderr=writing, cwd=DOCS.parent)
    os.close(writing)
    try:
        with trio.fail_after(20):
            while True:
                try:
                    if (await http(ports[1], "GET", "/readyz")).status == 200:
                        break
                except OSError:
                    pass
                await trio.sleep(0.05)
        client = KeepAlive(f"127.0.0.1:{ports[0]}", "one")
        with trio.fail_after(30):
            for _ in range(500):  # 64 KiB fit into the pipe, 300 lines or so
                assert (await client.send(message_id()))[0] == 200
        await client.aclose()
        process.send_signal(signal.SIGTERM)
        assert await trio.to_thread.run_sync(process.wait, 10) == 0
        assert len(os.read(reading, 1 << 20)) > 60_000
    finally:
        process.kill()
        process.wait()
        os.close(reading)


# --- the status -------------------------------------------------------------------------------


async def test_the_status_of_a_running_sidecar(first: Peer, second: Peer, tmp_path: Path) -> None:
    async with seen(first, second, tmp_path) as (daemon, two, lying):
        await something_of_everything(first, two, lying)

        async def status(*options: str) -> subprocess.CompletedProcess[str]:
            return await trio.to_thread.run_sync(
                lambda: command("status", "--admin", daemon.admin, *options)
            )

        shown = await status()
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("a2a-sidecar 0.1.0: ready\n")
        for expected in (
            f"{daemon.listeners['GRPC']}  GRPC",
            r"two +1-jsonrpc +2 +0 +0 +\d+ s",
            r"  \*  1-jsonrpc +1\.0  http://127",
            r"  -  2-GOPHER",
            r"not_served|wrong_endpoint: http_404",
            "answered: ok",
        ):
            assert re.search(expected, shown.stdout), (expected, shown.stdout)
        data = json.loads((await status("--json")).stdout)
        assert data.keys() == (await daemon.status()).keys()
        found = data["agents"]["two"]
        assert re.fullmatch(r"[0-9a-f]{64}", found["card_sha256"])
        assert "hello" not in json.dumps(data)  # no bodies
        assert (await status("--ready")).returncode == 0
        argv = [sys.executable, "-m", "sidecar", "status", "--admin", daemon.admin]
        argv += ["--watch", "0.1"]
        watching = start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        tables = 0
        while tables < 3:
            line = await trio.to_thread.run_sync(watching.stdout.readline)
            assert line
            tables += line.startswith("a2a-sidecar ")
        watching.send_signal(signal.SIGINT)
        _, errors = await trio.to_thread.run_sync(watching.communicate)
        assert (watching.returncode, errors) == (130, "")
