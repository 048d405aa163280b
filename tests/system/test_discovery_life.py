"""Cards come, change and lie; agents start late; the daemon is reached, and ends as it should."""

from __future__ import annotations

import json
import os
import signal
import stat
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Sidecar,
    card,
    free_port,
    http,
    interface,
    legacy_card,
    message,
    peer,
    run_sdk_client,
    sidecar,
    write_card,
)
from tests.system.world import (
    BINDINGS,
    GRPC_UNAVAILABLE,
    LABELS,
    KeepAlive,
    RemoteAgent,
    jsonrpc_answer,
    message_id,
    text_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness import Peer
    from tests.system.world import Answer, World

pytestmark = pytest.mark.system

UNAVAILABLE = {"JSONRPC": 200, "HTTP+JSON": 503, "GRPC": GRPC_UNAVAILABLE}

INELIGIBLE = card(
    [
        interface("CARRIER-PIGEON", "http://127.0.0.1:9/"),
        interface("JSONRPC", "http://127.0.0.1:9/", version="7.0"),
        interface("JSONRPC", "http://user:secret@127.0.0.1:9/"),
        interface("GRPC", "127.0.0.1"),
    ]
)


async def has(check: Any, seconds: float = 5) -> Any:
    """Wait until an awaited `check` gives something true."""
    deadline = trio.current_time() + seconds
    while not (found := await check()):
        assert trio.current_time() < deadline
        await trio.sleep(0.02)
    return found


# --- cards that are not there yet -------------------------------------------------------------


async def test_agents_may_start_after_the_sidecar(tmp_path: Path) -> None:
    """One that is down, one without a usable interface, one that is slow with its card."""
    port = free_port()
    hopeless = write_card(tmp_path, INELIGIBLE)
    async with peer("raw_http") as slow:
        await slow.script([{"gate": "card"}, "default"])
        agents = {
            "late": {"card": f"http://127.0.0.1:{port}", "refresh_cooldown_seconds": 0.1},
            "hopeless": hopeless,
            "slow": slow.card_url,
        }
        async with sidecar(agents=agents) as daemon:
            late = RemoteAgent(daemon, "late")
            await assert_not_there(daemon, late)
            await assert_waits_for_its_card(RemoteAgent(daemon, "slow"), slow)
            assert (await daemon.readyz()).status == 200
            pid = daemon.process.pid
            async with peer("raw_http", "--port", str(port)) as agent:
                answer = await until_served(late)
                assert text_of(answer) == "hello"
                state = await agent.state()
                assert state["executions"] == 1  # nothing of what was sent before
            assert (daemon.process.pid, daemon.process.alive) == (pid, True)
            assert (await daemon.status())["agents"]["late"]["card_error"] is None


async def assert_not_there(daemon: Sidecar, late: RemoteAgent) -> None:
    async def card_error() -> Any:
        return (await late.status())["card_error"]

    await has(card_error)
    for binding in BINDINGS:
        began = trio.current_time()
        answer = await late.send(binding)
        assert trio.current_time() - began < 2
        assert answer.status == UNAVAILABLE[binding]
        assert (answer.reason, answer.domain) == ("CARD_UNAVAILABLE", "a2a-sidecar")
        assert answer.delivered == "no"
        assert answer.headers["a2a-sidecar-attempts"] == "0"
    await late.until("requests_total", 3, outcome="not_delivered")

    reply = await daemon.readyz()
    assert reply.status == 503
    lines = reply.body.decode().splitlines()
    (why,) = [line for line in lines if "late" in line]
    assert "refused" in why
    (why,) = [line for line in lines if "hopeless" in line]
    assert "no interface that can be used" in why
    assert [line for line in lines if "slow" in line]


async def assert_waits_for_its_card(agent: RemoteAgent, slow: Peer) -> None:
    """A call that comes during the first fetch is answered by the agent, not by an error."""
    await slow.until(lambda state: len(state["requests"]) == 1)
    answers: list[Answer] = []

    async def call() -> None:
        answers.append(await agent.send())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked(0.2)
        assert answers == []
        await slow.control("open", {"gate": "card"})
    assert text_of(answers[0]) == "hello"


async def until_served(agent: RemoteAgent) -> Answer:
    """Call until it is served; until then each call is told that nothing was sent."""
    with trio.fail_after(10):
        while True:
            answer = await agent.send()
            if not answer.failed:
                return answer
            assert (answer.reason, answer.delivered) == ("CARD_UNAVAILABLE", "no")
            await trio.sleep(0.02)


async def test_a_card_without_a_usable_interface_says_why(world: World) -> None:
    empty = world.without_card()
    assert empty.file is not None
    empty.file.write_text(json.dumps(INELIGIBLE), "utf-8")
    assert (await empty.fetch_card()).status == 502
    for binding in BINDINGS:
        answer = await empty.send(binding)
        assert answer.status == UNAVAILABLE[binding]
        assert (answer.reason, answer.delivered) == ("NO_ELIGIBLE_INTERFACE", "no")
        for position in range(4):
            assert f"{position}: " in answer.message
        assert "secret" not in answer.message
    status = await empty.status()
    assert status["candidates"] == []
    assert [entry["position"] for entry in status["ineligible"]] == [0, 1, 2, 3]
    assert all(entry["reason"] for entry in status["ineligible"])
    assert await empty.metric("ineligible_interfaces") == 4
    assert await empty.metric("candidates") == 0
    assert await empty.metric("attempts_total") == 0


# --- cards that change ------------------------------------------------------------------------


async def test_a_card_without_a_usable_interface_replaces_nothing(
    world: World, first: Peer
) -> None:
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    assert agent.file is not None
    agent.file.write_text(json.dumps(INELIGIBLE), "utf-8")
    assert (await agent.fetch_card()).status == 502  # never an older card
    assert await agent.metric("card_fetches_total", result="rejected") >= 1
    assert text_of(await agent.send()) == "hello"
    assert "no eligible interface" in (await agent.status())["card_error"]


async def test_a_new_card_is_for_new_calls(world: World, first: Peer, second: Peer) -> None:
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    gate, old, new = message_id(), message_id(), message_id()
    await first.script([{"gate": gate}, "default"])
    answers: dict[str, Answer] = {}

    async def call(id_: str) -> None:
        answers[id_] = await agent.send("JSONRPC", "hello", id_)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, old)
        await first.until(
            lambda state: f'"{old}"' in json.dumps(state["requests"][-1:]).replace("\\", "")
        )
        await agent.publish(card([("HTTP+JSON", second.urls["HTTP+JSON"])]))
        await call(new)
        assert answers.keys() == {new}
        await first.control("open", {"gate": gate})
    assert answers[old].interface == "0-jsonrpc"
    assert answers[new].interface == "0-http_json"
    assert (await first.state())["by_message"][old] == 1
    assert (await second.state())["by_message"][new] == 1
    assert await agent.metric("card_changes_total") == 1
    assert await agent.failovers() == {}


async def test_a_stale_endpoint_brings_the_new_card(
    world: World, first: Peer, second: Peer
) -> None:
    """The agent has moved, its card says so, and the old address knows nothing of it."""
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    assert agent.file is not None
    moved = card([("JSONRPC", second.urls["JSONRPC"])])
    agent.file.write_text(json.dumps(moved), "utf-8")
    await first.script({"reply": {"status": 404, "body": "gone", "headers": []}})
    lost = await agent.send("HTTP+JSON")
    assert (lost.status, lost.delivered) == (503, "no")
    assert lost.attempts[0].endswith("wrong_endpoint http_404")

    async def changed() -> bool:
        return await agent.metric("card_changes_total") == 1

    await has(changed)
    id_ = message_id()
    assert text_of(await agent.send("JSONRPC", "hello", id_)) == "hello"
    assert (await second.state())["by_message"][id_] == 1


async def test_a_card_that_contradicts_itself_is_counted_once(world: World, first: Peer) -> None:
    url = first.urls["JSONRPC"]
    content = legacy_card(
        url=url,
        preferred="HTTP+JSON",
        additional=[("JSONRPC", url), ("HTTP+JSON", first.urls["HTTP+JSON"])],
    )
    agent = await world.agent(content)
    for number in range(3):
        await agent.publish({**content, "description": f"edition {number}"})
    for _ in range(3):
        await agent.send()
    assert await agent.metric("card_contradictions_total") == 1
    assert await agent.metric("card_changes_total") == 0
    lines = [line for line in world.daemon.log().splitlines() if f"agent={agent.name} " in line]
    assert len([line for line in lines if "contradicts itself" in line]) == 1
    assert (await agent.status())["contradiction"]
    assert await agent.current() == "2-http_json"


# --- ways in ----------------------------------------------------------------------------------


async def test_a_unix_socket_is_a_listener_like_any_other(world: World, first: Peer) -> None:
    path = world.daemon.directory / "app.sock"
    mode = os.stat(path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o660
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    body = {"jsonrpc": "2.0", "id": "é", "method": "SendMessage", "params": message()}
    reply = await http(
        f"unix:{path}", "POST", f"/agents/{agent.name}", body=json.dumps(body).encode()
    )
    answer = jsonrpc_answer(reply.status, reply.header_dict(), reply.json())
    assert text_of(answer) == "hello"
    assert answer.body["id"] == "é"


TASK = {"taskId": "$2.task.id"}
CONFIG = {**TASK, "id": "c-1", "url": "http://127.0.0.1:1/hook"}


def every_operation() -> list[dict[str, Any]]:
    """All eleven, and an error."""
    return [
        {"op": "SendMessage", "request": message("hello", message_id())},
        {"op": "SendStreamingMessage", "request": message("stream 2 free", message_id())},
        {"op": "SendMessage", "request": message("input", message_id())},
        {"op": "ListTasks", "request": {}},
        {"op": "GetExtendedAgentCard"},
        {"op": "GetTask", "request": {"id": "$0.task.id"}},
        {"op": "CreateTaskPushNotificationConfig", "request": CONFIG},
        {"op": "GetTaskPushNotificationConfig", "request": {**TASK, "id": "c-1"}},
        {"op": "ListTaskPushNotificationConfigs", "request": TASK},
        {"op": "DeleteTaskPushNotificationConfig", "request": {**TASK, "id": "c-1"}},
        {"op": "SubscribeToTask", "request": {"id": "$2.task.id"}, "stop_after": 1},
        {"op": "CancelTask", "request": {"id": "$2.task.id"}},
        {"op": "GetTask", "request": {"id": "nowhere"}},
    ]


async def test_an_sdk_client_completes_every_operation(world: World, sdk: Peer) -> None:
    """By the card that the sidecar serves; the agent is reached over one binding after the other."""

    async def client(upstream: str, uds: bool) -> None:
        agent = await world.agent(card([(upstream, sdk.urls[upstream])]))
        base = f"http://{world.daemon.listeners['JSONRPC']}/agents/{agent.name}"
        job: dict[str, Any] = {"card": base}
        if uds:
            job = {"url": f"http://localhost/agents/{agent.name}", "binding": "JSONRPC"}
            job["uds"] = str(world.daemon.directory / "app.sock")
        ops = every_operation()
        lines = await run_sdk_client(ops, bindings=["JSONRPC"], **job)
        await assert_complete(agent, upstream, sdk, ops, lines)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client, "JSONRPC", False)
        nursery.start_soon(client, "HTTP+JSON", True)
        nursery.start_soon(client, "GRPC", False)


async def assert_complete(
    agent: RemoteAgent,
    upstream: str,
    sdk: Peer,
    ops: list[dict[str, Any]],
    lines: list[dict[str, Any]],
) -> None:
    errors = [line for line in lines if "error" in line]
    assert [(line["op"], line["error"]["class"]) for line in errors] == [(12, "TaskNotFoundError")]
    results = {line["op"]: line["result"] for line in lines if "result" in line}
    events = {
        n: [line["event"] for line in lines if line["op"] == n and "event" in line] for n in (1, 10)
    }
    assert results[0]["task"]["artifacts"][0]["parts"] == [{"text": "hello"}]
    kinds = [next(iter(event)) for event in events[1]]
    assert kinds == ["task", "statusUpdate", "artifactUpdate", "artifactUpdate", "statusUpdate"]
    parked = results[2]["task"]
    assert parked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    known = {task["id"] for task in results[3]["tasks"]}
    assert {results[0]["task"]["id"], parked["id"]} <= known
    (served,) = results[4]["supportedInterfaces"][:1]
    assert (served["protocolBinding"], served["url"].rpartition("/")[2]) == ("JSONRPC", agent.name)
    assert results[4]["name"] == "sdk agent, extended"
    assert results[5] == results[0]["task"]
    assert results[6]["url"] == results[7]["url"] == CONFIG["url"]
    assert [config["id"] for config in results[8]["configs"]] == ["c-1"]
    assert results[9] is None
    assert events[10][0]["task"]["id"] == parked["id"]
    assert results[11]["status"]["state"] == "TASK_STATE_CANCELED"
    state = await sdk.state()
    sent = [op["request"]["message"]["messageId"] for op in ops[:3]]
    assert [state["by_message"][id_] for id_ in sent] == [1, 1, 1]
    operations = {op["op"] for op in ops}
    assert len(operations) == 11
    seen = await agent.samples()
    counted = seen.by("requests_total", "operation")
    assert counted.keys() == {(operation,) for operation in operations}
    assert seen.by("current_interface", "interface") == {(f"0-{LABELS[upstream]}",): 1}
    assert seen.failovers == {}


# --- the end ----------------------------------------------------------------------------------


async def test_sigterm_lets_a_running_call_finish(first: Peer) -> None:
    """And takes no new ones: `/readyz` says so, listeners are gone, kept connections close."""
    agents = {"agent": first.card_url}
    async with sidecar(agents=agents, ready=True) as daemon:
        agent = RemoteAgent(daemon, "agent")
        kept = KeepAlive(daemon.listeners["JSONRPC"], "agent")
        status, headers, _ = await kept.send(message_id())
        assert (status, headers["connection"]) == (200, "keep-alive")
        gate, ids = message_id(), [message_id(), message_id()]
        await first.script(*([[{"gate": gate}, "default"]] * 2))
        answers: list[tuple[int, dict[str, str], Any]] = []
        grpc_answers: list[Answer] = []

        async def call() -> None:
            answers.append(await kept.send(ids[0]))

        async def call_grpc() -> None:
            grpc_answers.append(await agent.send("GRPC", "hello", ids[1]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(call_grpc)

            async def in_flight() -> bool:
                return await agent.metric("requests_in_flight") == 2

            await has(in_flight)
            daemon.process.signal(signal.SIGTERM)

            async def draining() -> bool:
                reply = await daemon.readyz()
                return reply.status == 503 and b"draining" in reply.body

            await has(draining)

            async def refused() -> bool:
                try:
                    await http(daemon.listeners["JSONRPC"], "GET", "/", seconds=1)
                except OSError:
                    return True
                return False

            await has(refused)
            assert not answers
            assert not grpc_answers
            assert daemon.process.alive
            await first.control("open", {"gate": gate})
        status, headers, body = answers[0]
        assert (status, headers["connection"]) == (200, "close")
        assert body["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert text_of(grpc_answers[0], grpc=True) == "hello"
        await kept.aclose()
        assert await daemon.process.wait(5) == 0
    by_message = (await first.state())["by_message"]
    assert [by_message[id_] for id_ in ids] == [1, 1]


async def test_a_stream_that_outlives_the_drain_is_told(first: Peer) -> None:
    task = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
    opening = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": task}}}
    extra = "[limits]\ndrain_seconds = 0.3"
    async with sidecar(agents={"agent": first.card_url}, extra=extra, ready=True) as daemon:
        await first.script([{"sse": [opening], "end": False}, "hang"])
        async with daemon.stream("SendStreamingMessage", message("hello", message_id())) as events:
            assert (await events.next()).json()["result"]["task"]["id"] == "task-9"
            daemon.process.signal(signal.SIGTERM)
            last = await events.next()
            assert last.event == "error"
            error = last.json()["error"]
            assert error["data"][0]["metadata"]["delivered"] == "unknown"
            assert error["data"][0]["metadata"]["task"] == "task-9"
            assert "stops" in error["message"]
            with pytest.raises(StopAsyncIteration):
                await events.next()
        assert await daemon.process.wait(5) == 0
