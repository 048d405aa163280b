"""Deployments and proxies end connections all day long; under load nobody may notice, or run twice."""

from __future__ import annotations

import base64
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.faults.faults import JSONRPC
from tests.faults.rig import address, at_rest, counted, running, samples
from tests.harness import Process, card, free_port, peer, requires
from tests.harness import running as process_running
from tests.peers.mini import pb
from tests.system.world import KeepAlive

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.faults.rig import Samples
    from tests.harness import Peer

pytestmark = pytest.mark.system

CALLERS = 16


@dataclass
class Load:
    """What became of many calls."""

    answered: list[str] = field(default_factory=list)
    """Message ids."""
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Message id → metadata of the error."""
    counters: Samples = field(default_factory=dict)

    def counted(self, name: str) -> dict[tuple[str, ...], int]:
        return counted({}, self.counters, name)

    @property
    def ids(self) -> set[str]:
        return {*self.answered, *self.failed}


@asynccontextmanager
async def load(
    directory: Path, interfaces: list[tuple[str, str]], calls: int, **keys: Any
) -> AsyncIterator[Load]:
    """Make `calls` calls from `CALLERS` clients, while the block runs and to their end."""
    file = directory / "card.json"
    file.write_text(json.dumps(card(interfaces)), "utf-8")
    result = Load()
    rest = iter(range(calls))
    async with running(directory, {"a": {"card": file, **keys}}) as daemon:

        async def caller() -> None:
            client = KeepAlive(address(daemon, JSONRPC), "a")
            try:
                for n in rest:
                    status, _, body = await client.send(f"m-{n}")
                    assert status == 200
                    if "error" in body:
                        result.failed[f"m-{n}"] = body["error"]["data"][0]["metadata"]
                    else:
                        result.answered.append(f"m-{n}")
            finally:
                await client.aclose()

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(CALLERS):
                    nursery.start_soon(caller)
                yield result
        assert await at_rest(daemon) == []
        result.counters = samples(daemon)["a"]


async def executions(*agents: Peer) -> Counter[str]:
    """By message, whoever ran it."""
    total: Counter[str] = Counter()
    for agent in agents:
        total += Counter((await agent.state())["by_message"])
    return total


# --- nginx ------------------------------------------------------------------------------------

_NGINX = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    keepalive_requests 100;
    server {{
        listen 127.0.0.1:{http};
        location / {{ proxy_pass http://127.0.0.1:{http_agent}; }}
    }}
    server {{
        listen 127.0.0.1:{grpc} http2;
        location / {{ grpc_pass grpc://127.0.0.1:{grpc_agent}; }}
    }}
}}
"""


@asynccontextmanager
async def nginx(directory: Path, http_agent: int, grpc_agent: int) -> AsyncIterator[dict[str, int]]:
    """nginx in front of two agents: its ports by what is spoken there."""
    program = requires("nginx", "nginx")
    ports = {"http": free_port(), "grpc": free_port()}
    file = directory / "nginx.conf"
    file.write_text(
        _NGINX.format(directory=directory, http_agent=http_agent, grpc_agent=grpc_agent, **ports)
    )
    argv = [program, "-p", str(directory), "-c", str(file)]
    async with process_running(Process("nginx", argv)) as process:
        with trio.fail_after(10):
            while not await _listens(ports["grpc"]):
                assert process.alive, process.log()
                await trio.sleep(0.02)
        yield ports


async def _listens(port: int) -> bool:
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return False
    await trio.aclose_forcefully(stream)
    return True


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_nginx_ends_each_connection_after_100_requests(
    tmp_path: Path, binding: str, note: Callable[[str], None]
) -> None:
    """Zero errors, zero failovers, though GOAWAY and ``Connection: close`` race with requests."""
    calls = 1500
    async with peer("raw_http") as http, peer("h2_agent") as grpc, peer("raw_http") as spare:
        async with nginx(tmp_path, http.ports["http"], grpc.ports["grpc"]) as ports:
            paths = {"JSONRPC": "/rpc", "HTTP+JSON": "", "GRPC": ""}
            port = ports["grpc" if binding == "GRPC" else "http"]
            url = f"http://127.0.0.1:{port}{paths[binding]}"
            interfaces = [(binding, url), ("JSONRPC", spare.urls["JSONRPC"])]
            async with load(tmp_path, interfaces, calls) as result:
                pass
        ran = await executions(http, grpc)
        assert result.failed == {}
        assert ran == dict.fromkeys(result.ids, 1)
        assert len(ran) == calls
        assert (await spare.state())["executions"] == 0
    redials = sum(result.counted("redials_total").values())
    assert result.counted("failovers_total") == {}
    assert list(result.counted("attempts_total").values()) == [calls]
    note(f"nginx, keepalive_requests 100, {binding}: {calls} calls, 0 errors, {redials} redials")


# --- age --------------------------------------------------------------------------------------


async def test_grpcio_ends_connections_by_age(tmp_path: Path, note: Callable[[str], None]) -> None:
    """A maximum age of a second, under load.

    Not less: a fresh connection that is leaving before its first call speaks for the interface, and
    that call rightly fails over.
    """
    calls = 4000
    options = ["grpc.max_connection_age_ms=1000", "grpc.max_connection_age_grace_ms=2000"]
    arguments = [part for option in options for part in ("--grpc-option", option)]
    async with peer("grpc_generic", *arguments) as agent, peer("raw_http") as spare:
        interfaces = [("GRPC", agent.urls["GRPC"]), ("JSONRPC", spare.urls["JSONRPC"])]
        connections: set[str] = set()
        async with load(tmp_path, interfaces, calls) as result:
            for _ in range(20):  # the agent remembers its last requests only
                state = await agent.state()
                connections |= {
                    request["peer"] for request in state["requests"] if "peer" in request
                }
                await trio.sleep(0.1)
        state = await agent.state()
        assert result.failed == {}
        assert state["by_message"] == dict.fromkeys(result.ids, 1)
        assert (await spare.state())["executions"] == 0
    assert len(connections) >= 2
    assert result.counted("failovers_total") == {}
    redials = sum(result.counted("redials_total").values())
    note(f"grpcio, maximum age 1 s: {calls} calls, 0 errors, {redials} redials")


# --- restarts ---------------------------------------------------------------------------------


async def test_a_grpc_agent_that_restarts_gracefully_costs_no_error(
    fault_agent: Peer, tmp_path: Path, note: Callable[[str], None]
) -> None:
    """Each in turn: GOAWAY, its calls end, refused for 0.3 s, back; the other one serves meanwhile."""
    calls = 2000
    names = ["one", "two"]
    specs = [{"name": name, "speaks": "grpc", "options": {"two_step": True}} for name in names]
    ports = await fault_agent.control("open", specs)
    slow = ["execute", {"delay": 0.01}, {"message": _RESPONSE}, {"trailers": []}]
    await fault_agent.control("script", {name: [slow] * calls for name in names})
    try:
        interfaces = [("GRPC", f"http://127.0.0.1:{port}") for port in ports]
        async with load(tmp_path, interfaces, calls) as result:
            for name in names:
                await trio.sleep(0.3)
                await fault_agent.control("restart", {"name": name, "down": 0.3})
        agents = (await fault_agent.state())["agents"]
    finally:
        with trio.CancelScope(shield=True):
            await fault_agent.control("close", names)
    ran = sum((Counter(agents[name]["by_message"]) for name in names), Counter())
    assert result.failed == {}
    assert ran == dict.fromkeys(result.ids, 1)
    assert len(ran) == calls
    assert all(agents[name]["executions"] for name in names)
    assert sum(result.counted("selection_changes_total").values()) >= 1
    failovers = sum(result.counted("failovers_total").values())
    redials = sum(result.counted("redials_total").values())
    note(
        f"gRPC agents restarted gracefully: {calls} calls, 0 errors,"
        f" {failovers} failovers, {redials} redials"
    )


async def test_grpcios_own_stop_may_leave_doubt_but_nothing_twice(
    tmp_path: Path, note: Callable[[str], None]
) -> None:
    """It answers calls that arrive as it stops with CANCELLED, of which nobody knows what it means."""
    calls = 2000
    async with peer("grpc_generic") as first, peer("grpc_generic") as second:
        interfaces = [("GRPC", first.urls["GRPC"]), ("GRPC", second.urls["GRPC"])]
        async with load(tmp_path, interfaces, calls) as result:
            for agent in (first, second):
                await trio.sleep(0.3)
                await agent.control("restart", {"grace": 5.0, "down": 0.3})
        ran = await executions(first, second)
    assert max(ran.values()) == 1
    assert all(ran[id_] == 1 for id_ in result.answered)
    assert len(result.ids) == calls
    # no more than there were callers at each of the two stops
    assert len(result.failed) <= 2 * CALLERS
    for error in result.failed.values():
        assert error["delivered"] == "unknown"
        assert error["attempt-1"].endswith("ambiguous grpc_1")
    lost = sum(ran[id_] for id_ in result.failed)
    note(
        f"grpcio's server.stop(): {calls} calls, {len(result.failed)} errors with"
        f" delivered=unknown, of which {lost} had run"
    )


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_an_http_agent_that_restarts_may_leave_doubt_but_nothing_twice(
    fault_agent: Peer, tmp_path: Path, binding: str, note: Callable[[str], None]
) -> None:
    """HTTP/1.1 has no GOAWAY: what was being answered as it died is said to be unknown."""
    calls = 2000
    names = ["restarted", "spare"]
    specs = [{"name": name, "speaks": "http"} for name in names]
    ports = await fault_agent.control("open", specs)
    slow = ["execute", {"delay": 0.01}, {"reply": {"body": _task(binding)}}]
    await fault_agent.control("script", {"restarted": [slow] * calls})
    try:
        path = "/rpc" if binding == "JSONRPC" else ""
        interfaces = [
            (binding, f"http://127.0.0.1:{ports[0]}{path}"),
            ("JSONRPC", f"http://127.0.0.1:{ports[1]}/rpc"),
        ]
        async with load(tmp_path, interfaces, calls) as result:
            await trio.sleep(0.3)
            await fault_agent.control("restart", {"name": "restarted", "down": 0.3})
        agents = (await fault_agent.state())["agents"]
    finally:
        with trio.CancelScope(shield=True):
            await fault_agent.control("close", names)
    ran = Counter(agents["restarted"]["by_message"]) + Counter(agents["spare"]["by_message"])
    assert max(ran.values()) == 1
    assert all(ran[id_] == 1 for id_ in result.answered)
    assert {error["delivered"] for error in result.failed.values()} <= {"unknown"}
    # no more than were under way when it died
    assert len(result.failed) <= CALLERS
    assert len(result.ids) == calls
    assert agents["spare"]["executions"] > 0
    lost = sum(ran[id_] for id_ in result.failed)
    note(
        f"{binding} agent restarted abruptly: {calls} calls, {len(result.failed)} errors with"
        f" delivered=unknown, of which {lost} had run"
    )


_RESPONSE = base64.b64encode(pb(1, pb(1, "t") + pb(2, "c") + pb(3, pb(1, 3)))).decode()
"""A SendMessageResponse with a task that is completed."""


def _task(binding: str) -> dict[str, Any]:
    task = {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"}}
    if binding == "JSONRPC":
        return {"jsonrpc": "2.0", "id": 1, "result": {"task": task}}
    return {"task": task}
