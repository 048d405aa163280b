"""`a2a-sidecar demo` as a process: what it shows, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio

from tests.harness import Process, grpc_call, http, message, running
from tests.peers import mini

pytestmark = pytest.mark.system

DEMO = [sys.executable, "-P", "-m", "sidecar", "demo"]
SECONDS = 60


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def children(pid: int) -> dict[int, str]:
    """Processes whose parent is `pid`, each with its time of start, which makes it unique."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            fields = stat(int(directory.name))
            if fields and int(fields[1]) == pid:
                found[int(directory.name)] = fields[19]
    return found


def stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat (proc(5)); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int, started: str) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[19] == started and fields[0] != "Z"


async def both_children(process: subprocess.Popen[bytes]) -> dict[int, str]:
    """The agent and the sidecar, once both are there."""
    with trio.fail_after(SECONDS):
        while len(found := children(process.pid)) < 2:
            assert process.poll() is None, "the demo has ended"
            await trio.sleep(0.01)
    return found


async def all_ended(pids: dict[int, str]) -> None:
    with trio.fail_after(10):
        while any(alive(*one) for one in pids.items()):  # noqa: ASYNC110 - other processes
            await trio.sleep(0.01)


def start_demo(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        DEMO, cwd=directory, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


async def test_it_shows_one_failover_and_leaves_nothing(tmp_path):
    # The working directory is not where its modules come from.
    decoy = tmp_path / "sidecar" / "__init__.py"
    decoy.parent.mkdir()
    decoy.write_text("raise RuntimeError('this is not the package')", "utf-8")
    with start_demo(tmp_path) as process:
        assert process.stdout is not None
        seen = await both_children(process)
        with trio.fail_after(SECONDS):
            output = (await trio.to_thread.run_sync(process.stdout.read)).decode()
            code = await trio.to_thread.run_sync(process.wait)
    assert code == 0, output
    assert not any(alive(*one) for one in seen.items())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [decoy]

    assert "preferredTransport is GRPC" in output
    assert re.search(r"tried 1-grpc at 127\.0\.0\.1:\d+: unimplemented, delivered=no", output)
    assert re.search(r"4-grpc answered 'hello', TASK_STATE_COMPLETED", output)
    assert "executed 2 messages, each of them once" in output
    failovers = re.findall(r"a2a_sidecar_failovers_total\{(.*)\} (\S+)", output)
    assert [count for _, count in failovers] == ["1"]
    for label in ('from_interface="1-grpc"', 'to_interface="4-grpc"', 'reason="unimplemented"'):
        assert label in failovers[0][0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_interrupted_it_leaves_nothing(tmp_path, signum):
    with start_demo(tmp_path) as process:
        assert process.stdout is not None
        seen = await both_children(process)
        process.send_signal(signum)
        with trio.fail_after(SECONDS):
            output = (await trio.to_thread.run_sync(process.stdout.read)).decode()
            code = await trio.to_thread.run_sync(process.wait)
    assert code == (130 if signum is signal.SIGINT else -signum), output
    assert "Traceback" not in output
    await all_ended(seen)


async def test_what_does_not_hold_is_a_failure_with_its_reason(tmp_path):
    script = (
        "import sys; from sidecar import demo;"
        " demo._CONFIG = demo._CONFIG.replace('[log]', '[lug]'); sys.exit(demo.main())"
    )
    with trio.fail_after(SECONDS):
        done = await trio.run_process(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=environment(),
            capture_stdout=True,
            check=False,
        )
    output = done.stdout.decode()
    assert done.returncode == 1, output
    assert "The demo failed: the sidecar has ended" in output
    assert "lug: unknown key" in output


# --- the demo's agent, without the sidecar ----------------------------------------------------


def demo_agent() -> Process:
    return Process("demo agent", [sys.executable, "-m", "sidecar.demo_agent"])


async def started(agent: Process) -> tuple[int, dict[str, Any]]:
    """Its HTTP port and its card."""
    ready = await trio.to_thread.run_sync(agent.ready_line, abandon_on_cancel=True)
    url = urlsplit(ready["card"])
    assert url.port is not None
    return url.port, (await http(url.port, "GET", url.path)).json()


def port_of(entry: dict[str, str]) -> int:
    return int(entry["url"].rpartition(":")[2])


def rpc(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).encode()


async def executions(port: int) -> Any:
    return (await http(port, "GET", "/executions")).json()


async def test_the_agent_speaks_three_bindings_over_the_same_tasks():
    async with running(demo_agent()) as agent:
        port, card = await started(agent)
        unserved, _, _, grpc = card["additionalInterfaces"]

        reply = await http(port, "POST", "/rpc", body=rpc("SendMessage", message("one", "m-1")))
        first = reply.json()["result"]["task"]
        body = json.dumps(message("two", "m-2")).encode()
        second = (await http(port, "POST", "/rest/message:send", body=body)).json()["task"]
        sent = mini.pb(2, mini.pb(1, "m-3") + mini.pb(4, 1) + mini.pb(5, mini.pb(1, "three")))
        result = await grpc_call(port_of(grpc), "SendMessage", sent)
        assert result.code == 0
        third = mini.pb_get(result.messages[0], 1, 1).decode()
        assert mini.pb_get(result.messages[0], 1, 4, 4, 1) == b"three"
        assert len({first["id"], second["id"], third}) == 3
        assert await executions(port) == {"m-1": 1, "m-2": 1, "m-3": 1}

        reply = await http(port, "POST", "/rpc", body=rpc("GetTask", {"id": third}))
        assert reply.json()["result"]["artifacts"][0]["parts"] == [{"text": "three"}]
        assert (await http(port, "GET", f"/rest/tasks/{first['id']}")).json() == first
        result = await grpc_call(port_of(grpc), "GetTask", mini.pb(2, second["id"]))
        assert mini.pb_get(result.messages[0], 4, 4, 1) == b"two"

        result = await grpc_call(port_of(unserved), "SendMessage", sent)
        assert result.code == 12
        assert await executions(port) == {"m-1": 1, "m-2": 1, "m-3": 1}


async def test_the_agents_errors_are_those_of_the_specification():
    async with running(demo_agent()) as agent:
        port, card = await started(agent)
        grpc = port_of(card["additionalInterfaces"][3])

        error = (await http(port, "POST", "/rpc", body=rpc("GetTask", {"id": "x"}))).json()["error"]
        assert (error["code"], error["data"][0]["reason"]) == (-32001, "TASK_NOT_FOUND")
        reply = await http(port, "GET", "/rest/tasks/x")
        assert reply.status == 404
        assert reply.json()["error"]["details"][0]["reason"] == "TASK_NOT_FOUND"
        result = await grpc_call(grpc, "GetTask", mini.pb(2, "x"))
        assert result.code == 5
        assert b"TASK_NOT_FOUND" in result.trailers["grpc-status-details-bin"]

        empty = {"message": {"messageId": "m", "role": "ROLE_USER", "parts": []}}
        error = (await http(port, "POST", "/rpc", body=rpc("SendMessage", empty))).json()["error"]
        assert error["code"] == -32602
        error = (await http(port, "POST", "/rpc", body=rpc("CancelTask", {"id": "x"}))).json()
        assert error["error"]["code"] == -32004
        old = {"a2a-version": "0.3"}
        reply = await http(port, "POST", "/rpc", headers=old, body=rpc("GetTask", {"id": "x"}))
        assert reply.json()["error"]["code"] == -32009
        assert await executions(port) == {}
