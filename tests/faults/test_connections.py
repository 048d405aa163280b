"""Connections that serve many calls at once, and those that are kept: who of them is lost, and how.

Also what needs a machine of its own: an unreachable network, no descriptors.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.faults.bench import Bench, open_bench
from tests.faults.callers import Caller, http_request
from tests.faults.calls import call
from tests.faults.faults import GRPC, HTTP_JSON, JSONRPC
from tests.faults.rig import LABELS
from tests.harness import card, config_text, free_port, message, requires, sidecar

if TYPE_CHECKING:
    from tests.faults.calls import Told
    from tests.harness import Peer

pytestmark = pytest.mark.system

CALLS = 50


async def many(made: Bench, count: int, **more: Any) -> list[Told]:
    """That many calls at once, each with a message of its own: ``m-0``, ``m-1``, .."""
    told: dict[int, Told] = {}

    async def one(n: int) -> None:
        told[n] = await made.call(f"m-{n}", **more)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for n in range(count):
                nursery.start_soon(one, n)
    return [told[n] for n in range(count)]


# --- GOAWAY while 50 calls are open -----------------------------------------------------------


@pytest.mark.parametrize("code", range(14))
@pytest.mark.parametrize("share", ["none", "half", "all"])
async def test_goaway_while_50_calls_are_open(
    fault_agent: Peer, tmp_path: Path, code: int, share: str
) -> None:
    """Streams above the last id were not taken and go on, those below are served (D56)."""
    served = {"none": 0, "half": CALLS // 2, "all": CALLS}[share]
    async with open_bench(fault_agent, tmp_path, ["grpc", "http"]) as made:
        last = 2 * served - 1 if served else 0
        leave = {"goaway": {"last": last, "code": code}}
        waiting = [{"gate": "go"}, "default"]
        last_call = [leave, *(waiting if share == "all" else ["hang"])]
        await made.script(0, *[waiting] * (CALLS - 1), last_call)
        told: list[Told] = []

        async def calls() -> None:
            told.extend(await many(made, CALLS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(calls)
            await made.until(0, lambda state: len(state["requests"]) >= CALLS)
            # those that were refused have been served by somebody else before the others may end
            await made.until_executed(CALLS - served)
            await made.open_gate("go")
        assert not any(one.failed for one in told), [one for one in told if one.failed]
        first, second = await made.executions()
        assert first + second == dict.fromkeys((f"m-{n}" for n in range(CALLS)), 1)
        # those that had found the connection there are put on another one to the same candidate,
        # those for whom it was dialled go to the next
        redials = sum(made.counted("redials_total").values())
        failovers = made.counted("failovers_total")
        assert set(failovers) <= {("0-grpc", "goaway", "1-jsonrpc")}
        assert second.total() == sum(failovers.values())
        assert redials + second.total() == CALLS - served
        # a burst of failures moves the selection once
        assert made.agent.generation is not None
        assert made.agent.generation.selection.moves == bool(second)


async def test_two_goaways_lose_nobody(fault_agent: Peer, tmp_path: Path) -> None:
    """The highest id first, then the real one (D56): one stream stays, 20 new calls move."""
    async with open_bench(fault_agent, tmp_path, ["grpc"]) as made:
        await made.script(
            0,
            {
                "rpc": "SendStreamingMessage",
                "steps": [
                    {"default": {"events": 1}},
                    {"goaway": {"last": 2**31 - 1}},
                    {"delay": 0.02},
                    {"goaway": {"last": 1}},
                    {"gate": "go"},
                    {"message": None},
                    {"trailers": []},
                ],
            },
        )
        stream: list[Told] = []

        async def streaming() -> None:
            stream.append(await made.call("stream", streaming=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(streaming)
            await made.until(0, lambda state: state["goaways"] == 2)
            told = await many(made, 20)
            await made.open_gate("go")
        assert [one.failed for one in (*stream, *told)] == [False] * 21
        assert stream[0].events == 2
        state = await made.state(0)
        assert state["connections"] == 2
        assert {request["connection"] for request in state["requests"][1:]} == {2}
        assert made.counted("attempts_total") == {("0-grpc", "ok"): 21}
        # the old connection ends with its stream
        await made.until(0, lambda state: state["open_connections"] == 1)


@pytest.mark.parametrize("code", [0, 2, 11])
async def test_open_streams_are_cut_when_the_connection_dies(
    fault_agent: Peer, tmp_path: Path, code: int
) -> None:
    """GOAWAY that covers 50 calls, then the end: each may have run, each is told so, once."""
    async with open_bench(fault_agent, tmp_path, ["grpc", "http"]) as made:
        entries: list[Any] = [["execute", "hang"]] * (CALLS - 1)
        await made.script(0, *entries, ["execute", {"goaway": {"code": code}}, "close"])
        told = await many(made, CALLS)
        assert {one.delivered for one in told} == {"unknown"}
        first, second = await made.executions()
        assert first == dict.fromkeys((f"m-{n}" for n in range(CALLS)), 1)
        assert not second
        assert made.counted("ambiguous_errors_total") == {
            ("0-grpc", "SendMessage", "waiting"): CALLS
        }
        assert made.agent.generation is not None
        assert made.agent.generation.selection.moves == 1


# --- stream limits ----------------------------------------------------------------------------


async def test_endless_streams_do_not_starve_calls(fault_agent: Peer, tmp_path: Path) -> None:
    """D58: two streams per connection, both taken by subscriptions that never end."""
    limited = {"max_concurrent_streams": 2}
    async with open_bench(fault_agent, tmp_path, ["grpc"], options=limited) as made:
        endless = {
            "rpc": "SendStreamingMessage",
            "steps": [{"default": {"events": 1}}, "hang"],
        }
        await made.script(0, endless, endless)
        async with trio.open_nursery() as nursery:
            for n in range(2):
                nursery.start_soon(partial(made.call, f"stream-{n}", streaming=True))
            await made.until(0, lambda state: state["open_streams"] == 2)
            told = await many(made, 5)
            nursery.cancel_scope.cancel()
        assert [one.failed for one in told] == [False] * 5
        assert (await made.state(0))["connections"] >= 2


async def test_a_stream_limit_that_comes_late_and_changes_is_kept(
    fault_agent: Peer, tmp_path: Path
) -> None:
    """D92: SETTINGS after 0.3 s; 50 calls at once; then 1, 0 for a while, and 100."""
    options = {"settings_delay": 0.3, "max_concurrent_streams": 5}
    async with open_bench(fault_agent, tmp_path, ["grpc"], options=options) as made:
        told = await many(made, CALLS)
        assert not any(one.failed for one in told), [one for one in told if one.failed]
        limits = ([{"settings": {"MAX_CONCURRENT_STREAMS": n}}, "default"] for n in (1, 0))
        for limit in limits:
            await made.script(0, limit)
            assert not (await made.call("changed")).failed
            # the next ones wait, or dial: nobody fails
            told = await many(made, 10)
            assert not any(one.failed for one in told), [one for one in told if one.failed]
        state = await made.state(0)
        assert state["errors"] == 0
        assert made.counted("attempts_total") == {("0-grpc", "ok"): CALLS + 22}


# --- kept connections -------------------------------------------------------------------------


@pytest.mark.parametrize("binding", [JSONRPC, HTTP_JSON])
@pytest.mark.parametrize("end", ["close", "reset", {"send": "HTTP/1.1 408 Request Timeout\r\n"}])
async def test_a_kept_connection_that_ended_meanwhile_is_replaced(
    fault_agent: Peer, tmp_path: Path, binding: str, end: Any
) -> None:
    """D62, variant: nothing was written, so the same candidate is asked on a new connection."""
    async with open_bench(fault_agent, tmp_path, ["http", "http"], binding=binding) as made:
        await made.script(0, ["default", {"gate": "idle"}, end])
        await made.call("first")
        await made.open_gate("idle")
        if end in ("close", "reset"):
            await made.until(0, lambda state: state["open_connections"] == 0)
        else:
            await trio.sleep(0.05)  # until its bytes have arrived
        told = await made.call("second")
        assert (told.failed, told.attempts, told.interface[:1]) == (False, 1, "0")
        assert (await made.executions())[0] == {"first": 1, "second": 1}
        assert made.counted("redials_total") == {(f"0-{LABELS[binding]}",): 1}
        assert made.counted("failovers_total") == {}


@pytest.mark.parametrize("binding", [JSONRPC, HTTP_JSON])
async def test_connections_that_end_as_they_are_reused(
    fault_agent: Peer, tmp_path: Path, binding: str
) -> None:
    """The race itself, 200 times: closed a moment after the reply, reused in that moment (D62)."""
    calls = 200
    async with open_bench(fault_agent, tmp_path, ["http"], binding=binding) as made:
        waits = [n * 0.00005 for n in range(20)]
        await made.script(
            0, *[["default", {"delay": waits[n % 20]}, "close"] for n in range(calls)]
        )
        told = [await made.call(f"m-{n}") for n in range(calls)]
        ran = (await made.executions())[0]
        assert max(ran.values()) == 1
        for n, one in enumerate(told):
            if one.failed:
                assert one.delivered in {"no", "unknown"}
                assert one.delivered == "unknown" or not ran[f"m-{n}"]
            else:
                assert ran[f"m-{n}"] == 1
                assert one.attempts == 1
        assert sum(not one.failed for one in told) > calls / 2


@pytest.mark.parametrize("surplus", ["surplus", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"])
@pytest.mark.parametrize("binding", [JSONRPC, HTTP_JSON])
async def test_nobody_gets_the_reply_of_another(
    fault_agent: Peer, tmp_path: Path, binding: str, surplus: str
) -> None:
    """Bytes behind a reply are nobody's: the connection is not used again."""
    async with open_bench(fault_agent, tmp_path, ["http"], binding=binding) as made:
        await made.script(0, {"default": {"surplus": surplus}})
        assert not (await made.call("first")).failed
        assert not (await made.call("second")).failed
        state = await made.state(0)
        assert state["connections"] == 2
        assert state["by_message"] == {"first": 1, "second": 1}


async def test_the_second_address_of_a_name_is_part_of_the_same_attempt(
    fault_agent: Peer, tmp_path: Path
) -> None:
    """D75: a name with two addresses of which the first refuses."""
    async with open_bench(
        fault_agent, tmp_path, ["http", "http"], host="two-addresses.test"
    ) as made:
        began = trio.current_time()
        told = await made.call("first")
        assert trio.current_time() - began < 2
        assert (told.failed, told.attempts) == (False, 1)
        assert made.counted("failovers_total") == {}


async def test_reads_are_not_repeated_either(fault_agent: Peer, tmp_path: Path) -> None:
    """An ambiguous GetTask is an error, and is not asked of the next candidate."""
    async with open_bench(fault_agent, tmp_path, ["http", "http"]) as made:
        await made.script(0, {"reply": {"status": 502, "body": "no"}})
        answer = await made.jsonrpc("GetTask", {"id": "t-1"})
        assert (answer.reason, answer.delivered) == ("DELIVERY_UNKNOWN", "unknown")
        assert [len((await made.state(n))["requests"]) for n in range(2)] == [1, 0]


# --- the machine ------------------------------------------------------------------------------


def test_an_unreachable_network_costs_a_failover() -> None:
    """In a network namespace whose only interface is loopback."""
    unshare = requires("unshare", "util-linux")
    probe = [unshare, "--user", "--map-root-user", "--net", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    script = Path(__file__).with_name("in_namespace.py")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [*probe[:-1], sys.executable, str(script)],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    for binding in (JSONRPC, HTTP_JSON, GRPC):
        label = LABELS[binding]
        alone, backed = found[f"{binding} F"], found[f"{binding} FG"]
        assert (alone["reason"], alone["delivered"]) == ("NOT_DELIVERED", "no")
        assert alone["lines"] == [[f"0-{label}", "not_delivered", "dial"]]
        assert (backed["failed"], backed["attempts"]) == (False, 2)


async def settled_descriptors(pid: int) -> set[int]:
    """The descriptors of a process that has had the same ones for a while."""
    before: set[int] = set()
    while True:
        now = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        if now == before:
            return now
        before = now
        await trio.sleep(0.2)


async def test_no_descriptors_is_nobodys_fault(fault_agent: Peer, tmp_path: Path) -> None:
    """D79: connect() fails with EMFILE: an error of ours, and no interface is left for it."""
    spec = {"name": "descriptors", "speaks": "http"}
    (port,) = await fault_agent.control("open", [spec])
    other = f"http://127.0.0.1:{free_port()}"
    file = tmp_path / "card.json"
    interfaces = [("JSONRPC", f"http://127.0.0.1:{port}/rpc"), ("HTTP+JSON", other)]
    file.write_text(json.dumps(card(interfaces)), "utf-8")
    text = config_text({"a": file})
    try:
        async with sidecar(text, ready=True) as daemon:
            pid = daemon.process.pid
            host, _, listener = daemon.listeners["JSONRPC"].rpartition(":")
            async with await trio.open_tcp_stream(host, int(listener)) as stream:
                used = await settled_descriptors(pid)
                hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
                # not one more than there are
                limit = next(n for n in itertools.count() if n not in used)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
                caller = Caller(stream)
                request = http_request(JSONRPC, "a", message("hello", "m-1"), streaming=False)
                await stream.send_all(request)
                with trio.fail_after(10):
                    await caller.read(b"LIMIT_REACHED")
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert b"a2a-sidecar-delivered: no" in caller.received
            assert b" local local" in caller.received
            status = (await daemon.status())["agents"]["a"]
            assert status["current"] == "0-jsonrpc"
            told = await call(daemon.listeners["JSONRPC"], JSONRPC, "a", "m-2")
            assert (told.failed, told.interface) == (False, "0-jsonrpc")
    finally:
        closed = await fault_agent.control("close", ["descriptors"])
    assert closed["agents"]["descriptors"]["by_message"] == {"m-2": 1}
