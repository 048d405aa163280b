"""Callers that leave, or run out of time, in each phase of a call: nothing is sent on for them."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.faults.bench import Bench, open_bench
from tests.faults.callers import CANCEL, GrpcCaller, StingyClient, calling
from tests.faults.faults import ALL, GRPC, HTTP, HTTP_JSON, JSONRPC
from tests.faults.rig import LABELS, at_rest, busy, counted, samples
from tests.system.world import send_pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.faults.callers import Caller
    from tests.harness import Peer

pytestmark = pytest.mark.system

SPEAKS = {JSONRPC: "http", HTTP_JSON: "http", GRPC: "grpc"}
PHASES = ("dialing", "sending", "waiting", "receiving")
LARGE = 8_000_000

WAYS: dict[str, Callable[[Caller], Awaitable[None]]] = {
    "reset": lambda caller: caller.reset(),
    "cancel": lambda caller: caller.cancel(),
}


def _script(upstream: str, phase: str, *, streaming: bool) -> list[Any]:
    match phase:
        case "waiting":
            return [["execute", "hang"]]
        case "receiving" if streaming:
            return [[{"default": {"events": 1}}, "hang"]]
        case "receiving" if upstream == GRPC:
            return [["execute", {"headers": None}, "hang"]]
        case "receiving":
            return [[{"default": {"bytes": 200}}, "hang"]]
        case "sending" if upstream != GRPC:
            return [{"at": "accept", "steps": ["hang"]}]
        case _:
            return []


async def _reach(made: Bench, caller: Caller, phase: str, *, streaming: bool, number: int) -> None:
    """Wait until the call, the `number`-th of its test, is in `phase`."""
    with trio.fail_after(5):
        agent = made.agent
        while not (agent.in_flight or agent.streams):  # noqa: ASYNC110 - no event tells
            await trio.sleep(0.005)
        if phase in ("waiting", "receiving"):
            await made.until_executed(number)
        if phase == "receiving" and streaming:
            await caller.read(b"task-")
            return
        if phase == "sending":
            # over HTTP/2 one connection is enough for all
            wanted = 1 if "grpc" in str(made.agent.current) else number
            await made.until(0, lambda state: state["connections"] >= wanted)
    await trio.sleep(0.03)  # until what was sent has been seen


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("upstream", ALL)
async def test_a_caller_that_leaves_costs_the_agent_its_attempt(
    fault_agent: Peer, tmp_path: Path, upstream: str, phase: str, streaming: bool
) -> None:
    """On each binding, by RST of the connection and (gRPC) of the stream (D76, D77)."""
    speaks = ["full" if phase == "dialing" else SPEAKS[upstream], "http"]
    options = {"initial_window_size": 0} if phase == "sending" and upstream == GRPC else {}
    async with open_bench(
        fault_agent,
        tmp_path,
        speaks,
        binding=upstream,
        options=options,
        connect_timeout_seconds=60.0,
    ) as made:
        label = f"0-{LABELS[upstream]}"
        number = 0
        for downstream in ALL:
            for way in ("reset", "cancel") if downstream == GRPC else ("reset",):
                number += 1
                await made.script(0, *_script(upstream, phase, streaming=streaming))
                before = samples(made.daemon)["a"]
                async with calling(
                    made.address(downstream),
                    downstream,
                    "a",
                    f"{downstream}-{way}",
                    streaming=streaming,
                    size=LARGE if phase == "sending" and upstream != GRPC else 0,
                ) as caller:
                    await _reach(made, caller, phase, streaming=streaming, number=number)
                    await WAYS[way](caller)
                    assert await at_rest(made.daemon, 1) == []
                after = samples(made.daemon)["a"]
                assert counted(before, after, "attempts_total") == {(label, "caller"): 1}
                assert counted(before, after, "failovers_total") == {}
                assert counted(before, after, "ambiguous_errors_total") == {}
                (outcome,) = counted(before, after, "requests_total")
                assert outcome[-1] == "cancelled"
                if streaming:
                    assert counted(before, after, "stream_ends_total") == {("cancelled",): 1}
        first, second = await made.executions()
        assert set(first.values()) <= {1}
        assert first.total() == (number if phase in ("waiting", "receiving") else 0)
        assert not second
        assert made.agent.generation is not None
        assert made.agent.generation.selection.moves == 0
        await _assert_broken_off(made, upstream, phase)


async def _assert_broken_off(made: Bench, upstream: str, phase: str) -> None:
    """The agent has seen that nobody waits any more, and was asked for nothing else."""
    if phase == "dialing":
        return
    if upstream == GRPC:
        state = await made.until(0, lambda state: len(state["resets"]) == 4)
        assert set(state["resets"]) == {CANCEL}
        assert state["connections"] == 1
    elif phase != "sending":  # an agent that does not read does not notice
        state = await made.until(0, lambda state: state["open_connections"] == 0)
    else:
        return
    operations = {request["rpc"] for request in state["requests"]}
    assert operations in ({"SendMessage"}, {"SendStreamingMessage"})


# --- half-closed ------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", ALL)
@pytest.mark.parametrize("downstream", HTTP)
async def test_a_caller_that_has_closed_its_side_gets_its_answer(
    fault_agent: Peer, tmp_path: Path, downstream: str, upstream: str
) -> None:
    """D67: FIN after the request does not cancel a unary call."""
    async with open_bench(fault_agent, tmp_path, [SPEAKS[upstream]], binding=upstream) as made:
        await made.script(0, [{"gate": "go"}, "default"])
        async with calling(made.address(downstream), downstream, "a", "m-1") as caller:
            await caller.half_close()
            await made.until(0, lambda state: len(state["requests"]) == 1)
            await made.open_gate("go")
            with trio.fail_after(5):
                await caller.read()
        assert caller.received.startswith(b"HTTP/1.1 200 ")
        assert b"hello" in caller.received
        assert (await made.executions())[0] == {"m-1": 1}


@pytest.mark.parametrize("upstream", ALL)
@pytest.mark.parametrize("downstream", HTTP)
async def test_a_caller_that_has_closed_its_side_gets_no_new_attempt(
    fault_agent: Peer, tmp_path: Path, downstream: str, upstream: str
) -> None:
    """It may have left: what was not taken is not sent elsewhere on its behalf."""
    refusal = {"rst": 7} if upstream == GRPC else {"reply": {"status": 404, "body": "no"}}
    async with open_bench(
        fault_agent, tmp_path, [SPEAKS[upstream], "http"], binding=upstream
    ) as made:
        await made.script(0, [{"gate": "go"}, refusal])
        async with calling(made.address(downstream), downstream, "a", "m-1") as caller:
            await caller.half_close()
            await made.until(0, lambda state: len(state["requests"]) == 1)
            await made.open_gate("go")
            with trio.fail_after(5):
                await caller.read()
        assert b"a2a-sidecar-delivered: no" in caller.received.lower()
        assert [ran.total() for ran in await made.executions()] == [0, 0]
        assert made.counted("failovers_total") == {}
        assert made.counted("attempts_total").keys() == {
            (f"0-{LABELS[upstream]}", "refused_stream" if upstream == GRPC else "http_404")
        }


@pytest.mark.parametrize("upstream", ALL)
@pytest.mark.parametrize("downstream", HTTP)
async def test_a_stream_ends_when_its_caller_closes_its_side(
    fault_agent: Peer, tmp_path: Path, downstream: str, upstream: str
) -> None:
    """As documented: nobody reads a stream with its own side closed."""
    async with open_bench(fault_agent, tmp_path, [SPEAKS[upstream]], binding=upstream) as made:
        await made.script(0, [{"default": {"events": 1}}, "hang"])
        async with calling(
            made.address(downstream), downstream, "a", "m-1", streaming=True
        ) as caller:
            await caller.read(b"task-")
            await caller.half_close()
            assert await at_rest(made.daemon, 1) == []
        assert made.counted("stream_ends_total") == {("cancelled",): 1}


# --- deadlines --------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("upstream", ALL)
async def test_a_deadline_ends_the_call_in_each_phase(
    fault_agent: Peer, tmp_path: Path, upstream: str, phase: str, streaming: bool
) -> None:
    """D59: DEADLINE_EXCEEDED in time, said by the sidecar; nobody else is asked afterwards."""
    speaks = ["full" if phase == "dialing" else SPEAKS[upstream], "http"]
    options = {"initial_window_size": 0} if phase == "sending" and upstream == GRPC else {}
    async with open_bench(
        fault_agent,
        tmp_path,
        speaks,
        binding=upstream,
        options=options,
        connect_timeout_seconds=60.0,
    ) as made:
        # a large request takes its time to where it is sent
        milliseconds = 1500 if phase == "sending" else 600
        await made.script(0, *_script(upstream, phase, streaming=streaming))
        began = trio.current_time()
        async with calling(
            made.address(GRPC),
            GRPC,
            "a",
            "m-1",
            streaming=streaming,
            size=LARGE if phase == "sending" and upstream != GRPC else 0,
            timeout=f"{milliseconds}m",
        ) as caller:
            assert isinstance(caller, GrpcCaller)
            with trio.fail_after(10):
                await caller.read()
        took = trio.current_time() - began
        assert milliseconds / 1000 - 0.1 < took < 4
        assert caller.headers["grpc-status"] == "4"
        written = phase != "dialing"
        delivered = caller.headers["a2a-sidecar-delivered"]
        assert delivered == ("unknown" if written else "no")
        assert made.counted("attempts_total") == {(f"0-{LABELS[upstream]}", "caller"): 1}
        assert [key[2] for key in made.counted("requests_total")] == ["cancelled"]
        first, second = await made.executions()
        assert first.total() <= 1
        assert not second
        if upstream == GRPC and phase in ("waiting", "receiving"):
            state = await made.until(0, lambda state: state["resets"] != [])
            assert state["resets"] == [CANCEL]
            headers = dict(map(tuple, state["requests"][0]["headers"]))
            assert headers["grpc-timeout"].endswith("m")
            assert 0 < int(headers["grpc-timeout"][:-1]) <= milliseconds


async def test_a_deadline_covers_all_candidates_together(fault_agent: Peer, tmp_path: Path) -> None:
    """One that has nearly passed begins no further attempt."""
    async with open_bench(fault_agent, tmp_path, ["http", "http"]) as made:
        await made.script(0, [{"delay": 0.97}, {"reply": {"status": 404, "body": "no"}}])
        async with calling(made.address(GRPC), GRPC, "a", "m-1", timeout="1000m") as caller:
            assert isinstance(caller, GrpcCaller)
            with trio.fail_after(10):
                await caller.read()
        assert caller.headers["grpc-status"] == "4"
        assert [ran.total() for ran in await made.executions()] == [0, 0]
        assert len((await made.state(1))["requests"]) == 0


async def test_an_agents_own_deadline_exceeded_at_the_end_is_the_callers(
    fault_agent: Peer, tmp_path: Path
) -> None:
    """An agent that was told the deadline and ends a moment before it: not its fault."""
    async with open_bench(fault_agent, tmp_path, ["grpc", "http"], binding=GRPC) as made:
        early = {"trailers_only": {"code": 4, "message": "deadline"}}
        await made.script(0, ["execute", {"delay": 0.6}, early])
        async with calling(made.address(GRPC), GRPC, "a", "m-1", timeout="1000m") as caller:
            assert isinstance(caller, GrpcCaller)
            with trio.fail_after(10):
                await caller.read()
        assert caller.headers["grpc-status"] == "4"
        assert made.counted("attempts_total") == {("0-grpc", "caller"): 1}
        assert made.counted("ambiguous_errors_total") == {}
        assert made.agent.generation is not None
        assert made.agent.generation.selection.moves == 0


# --- crowds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [JSONRPC, GRPC])
async def test_callers_that_leave_at_random_leave_nothing_behind(
    fault_agent: Peer, tmp_path: Path, upstream: str
) -> None:
    """D76: 400 callers that leave within 0 to 60 ms; then 50 that stay are served as ever."""
    rng = random.Random(76)
    async with open_bench(fault_agent, tmp_path, [SPEAKS[upstream]], binding=upstream) as made:
        steps = [{"delay": 0.02}, "default"]
        await made.script(0, *[steps] * 400)

        async def leave(n: int, seconds: float, downstream: str) -> None:
            streaming = n % 3 == 0
            async with calling(
                made.address(downstream), downstream, "a", f"gone-{n}", streaming=streaming
            ) as caller:
                await trio.sleep(seconds)
                await caller.cancel()

        for start in range(0, 400, 40):
            async with trio.open_nursery() as nursery:
                for n in range(start, start + 40):
                    nursery.start_soon(leave, n, rng.uniform(0, 0.06), ALL[n % 3])
        assert await at_rest(made.daemon) == []
        began = time.perf_counter()
        for n in range(50):
            told = await made.call(f"stays-{n}")
            assert not told.failed
        assert time.perf_counter() - began < 10
        ran = (await made.executions())[0]
        assert max(ran.values()) == 1
        assert all(ran[f"stays-{n}"] == 1 for n in range(50))
        assert busy(made.daemon) == []


async def test_a_client_with_the_smallest_windows_gets_everything(
    fault_agent: Peer, tmp_path: Path
) -> None:
    """D84: windows of one byte, granted in odd steps, one stream reset half way."""
    text = "y" * 200_000
    async with open_bench(fault_agent, tmp_path, ["http"]) as made:
        host, _, port = made.address(GRPC).rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            client = StingyClient(stream)
            with trio.fail_after(20):
                await client.run([send_pb(text, f"m-{n}", "a") for n in range(4)])
        assert 0 < client.sizes[1] < 200_000  # the one that was reset
        for stream_id in (3, 5, 7):
            assert client.sizes[stream_id] > 200_000
            assert client.statuses[stream_id] == "0"
        assert (await made.executions())[0].total() == 4
