"""The peers themselves, spoken to directly: what they promise to other tests is true."""

from __future__ import annotations

import base64
import json
import sys
import tomllib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from tests.harness import (
    MISSING_PROGRAM,
    Incomplete,
    Peer,
    ProcessDied,
    Sidecar,
    TlsFiles,
    card,
    config_text,
    connect,
    free_port,
    grpc_call,
    http,
    legacy_card,
    message,
    open_stream,
    peer,
    peer_sync,
    requires,
    run_sdk_client,
    sidecar,
)
from tests.peers.mini import (
    STATES,
    event_pb,
    frame,
    pb,
    pb_fields,
    pb_get,
    pb_status,
    status_header,
    task_pb,
    unframe,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.interop

JSON = {"content-type": "application/json", "a2a-version": "1.0"}
HELLO = pb(2, pb(1, "m-1") + pb(4, 1) + pb(5, pb(1, "hello")))


def test_the_peers_library_stays_out_of_this_process() -> None:
    assert "a2a" not in sys.modules


async def rpc(port: int, method: str, params: Any, path: str = "/rpc") -> Any:
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    reply = await http(port, "POST", path, headers=JSON, body=json.dumps(body).encode())
    assert reply.status == 200
    return reply.json()


def rpc_stream(port: int, method: str, params: Any) -> Any:
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).encode()
    return open_stream(port, "POST", "/rpc", headers=JSON, body=body)


def artifact_text(task: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in task["artifacts"][0]["parts"])


# --- a2a-sdk ----------------------------------------------------------------------------------

TASK = {"taskId": "$2.task.id"}
CONFIG = {**TASK, "id": "c-1", "url": "http://127.0.0.1:1/hook"}
ALL_OPS: list[dict[str, Any]] = [
    {"op": "SendMessage", "request": message("hello", "m-1")},
    {"op": "SendStreamingMessage", "request": message("stream 2 free", "m-2")},
    {"op": "SendMessage", "request": message("input", "m-3")},
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


@pytest.fixture(scope="module")
def sdk_agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as agent:
        yield agent


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_sdk_agent_serves_the_eleven_operations(sdk_agent: Peer, binding: str) -> None:
    before = await sdk_agent.state()
    lines = await run_sdk_client(ALL_OPS, url=sdk_agent.urls[binding], binding=binding)
    results = {line["op"]: line["result"] for line in lines if "result" in line}
    events = [line["event"] for line in lines if "event" in line]
    hello, parked = results[0]["task"], results[2]["task"]
    assert artifact_text(hello) == "hello"
    kinds = [next(iter(event)) for event in events]
    assert kinds[:-1] == [
        "task",
        "statusUpdate",
        "artifactUpdate",
        "artifactUpdate",
        "statusUpdate",
    ]
    assert parked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    assert len(results[3]["tasks"]) == len(before["tasks"]) + 3
    assert results[4]["name"] == "sdk agent, extended"
    assert results[5] == hello
    assert results[6]["url"] == results[7]["url"] == CONFIG["url"]
    assert [config["id"] for config in results[8]["configs"]] == ["c-1"]
    assert results[9] is None
    assert events[-1]["task"]["id"] == parked["id"]
    assert results[11]["status"]["state"] == "TASK_STATE_CANCELED"
    assert lines[-1]["error"]["class"] == "TaskNotFoundError"

    state = await sdk_agent.until(lambda state: state["open_streams"] == 0)
    assert state["order"][len(before["order"]) :] == ["m-1", "m-2", "m-3"]
    assert state["executions"] == before["executions"] + 3
    assert state["tasks"][parked["id"]] == "TASK_STATE_CANCELED"
    requests = state["requests"][len(before["requests"]) :]
    assert len(requests) == len(ALL_OPS)
    assert {dict(request["headers"]).get("a2a-version") for request in requests} == {"1.0"}
    wanted = {"JSONRPC": "jsonrpc", "HTTP+JSON": "rest", "GRPC": "grpc"}[binding]
    assert {request["binding"] for request in requests} == {wanted}


async def test_sdk_agent_sends_the_next_chunk_when_allowed_and_outlives_its_client(
    sdk_agent: Peer,
) -> None:
    agent = sdk_agent
    port = agent.ports["jsonrpc"]
    before = (await agent.state())["executions"]
    async with rpc_stream(port, "SendStreamingMessage", message("stream 3")) as events:
        task = (await events.next()).json()["result"]["task"]["id"]
        assert "statusUpdate" in (await events.next()).json()["result"]
        with pytest.raises(trio.TooSlowError):
            await events.next(seconds=0.2)
        await agent.control("next", {"n": 1})
        update = (await events.next()).json()["result"]["artifactUpdate"]
        assert update["artifact"]["parts"] == [{"text": "chunk 0"}]
        assert (await agent.state())["open_streams"] == 1
    await agent.until(lambda state: state["open_streams"] == 0, seconds=1)
    await agent.control("next", {"n": 2})
    done = await agent.until(lambda state: state["tasks"][task] == "TASK_STATE_COMPLETED")
    assert done["executions"] == before + 1


async def test_sdk_agent_behaves_as_the_text_says(sdk_agent: Peer) -> None:
    port = sdk_agent.ports["jsonrpc"]
    reply = await rpc(port, "SendMessage", message("message"))
    assert reply["result"]["message"]["parts"] == [{"text": "a plain message"}]
    reply = await rpc(port, "SendMessage", message("big 100000"))
    raw = reply["result"]["task"]["artifacts"][0]["parts"][0]["raw"]
    assert base64.b64decode(raw) == (bytes(range(256)) * 391)[:100000]
    parts = [{"text": "count"}, {"raw": base64.b64encode(b"x" * 5000).decode()}]
    params = message()
    params["message"] |= {"parts": parts}
    reply = await rpc(port, "SendMessage", params)
    assert artifact_text(reply["result"]["task"]) == "5005"
    params["message"] |= {
        "parts": [{"text": "echo"}, {"data": {"a": [1, None]}, "mediaType": "x/y"}],
        "metadata": {"k": "v"},
    }
    reply = await rpc(port, "SendMessage", params)
    echoed = reply["result"]["task"]["artifacts"][0]
    assert echoed["parts"] == params["message"]["parts"]
    assert echoed["metadata"] == {"k": "v"}
    for code in (-32001, -32004, -32005, -32603):
        reply = await rpc(port, "SendMessage", message(f"fail {code}"))
        assert reply["error"]["code"] == code
    started = trio.current_time()
    await rpc(port, "SendMessage", message("sleep 0.3"))
    async with rpc_stream(port, "SendStreamingMessage", message("silent 0.3")) as events:
        kinds = [next(iter(event.json()["result"])) async for event in events]
    assert kinds == ["task", "statusUpdate", "statusUpdate"]
    assert trio.current_time() - started >= 0.6


async def test_sdk_agent_serves_any_card_and_counts_fetches() -> None:
    wanted = legacy_card(
        url="http://127.0.0.1:{jsonrpc}/rpc",
        preferred="GRPC",
        additional=[("GRPC", "http://127.0.0.1:{grpc}")],
    )
    args = ("--rest", "off", "--grpc-unregistered", "--card", json.dumps(wanted))
    async with peer("sdk_agent", *args) as agent:
        port = agent.ports["jsonrpc"]
        well_known = "/.well-known/agent-card.json"
        first = await http(port, "GET", well_known)
        assert first.json()["url"] == agent.urls["JSONRPC"]
        assert first.json()["additionalInterfaces"][0]["url"] == agent.urls["GRPC"]
        again = await http(
            port, "GET", well_known, headers={"if-none-match": first.get("etag") or ""}
        )
        assert (again.status, again.body) == (304, b"")
        changed = card([("JSONRPC", "http://127.0.0.1:{jsonrpc}/rpc")])
        await agent.control("card", {"card": changed, "cache_control": "max-age=5"})
        third = await http(port, "GET", well_known)
        assert third.json()["supportedInterfaces"][0]["url"] == agent.urls["JSONRPC"]
        assert third.get("cache-control") == "max-age=5"
        await agent.control("card", {"status": 503})
        assert (await http(port, "GET", well_known)).status == 503
        assert (await agent.state())["card_fetches"] == 4

        ended = await grpc_call(agent.ports["grpc"], "SendMessage", HELLO)
        assert ended.code == 12
        state = await agent.state()
        assert state["executions"] == 0
        assert state["requests"][-1]["path"] == "/lf.a2a.v1.A2AService/SendMessage"


async def test_sdk_agent_over_tls_refuses_everyone_on_grpc_when_told(tls: TlsFiles) -> None:
    args = (*tls.peer_args, "--rest", "off", "--grpc-unauthenticated")
    async with peer("sdk_agent", *args) as agent:
        body = json.dumps(
            {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message()}
        ).encode()
        reply = await http(
            agent.ports["jsonrpc"],
            "POST",
            "/rpc",
            headers=JSON,
            body=body,
            tls=tls.client_context(),
        )
        assert artifact_text(reply.json()["result"]["task"]) == "hello"
        for method, stream in (("GetTask", False), ("SendStreamingMessage", True)):
            ended = await grpc_call(agent.ports["grpc"], method, HELLO, stream=stream, tls=tls)
            assert (ended.code, ended.messages) == (16, [])
        assert (await agent.state())["executions"] == 1


# --- raw_http ---------------------------------------------------------------------------------


async def test_raw_agent_is_correct_on_both_bindings_without_a_script() -> None:
    async with peer("raw_http") as agent:
        port = agent.ports["http"]
        sent = (await rpc(port, "SendMessage", message("hi", "a")))["result"]["task"]
        assert artifact_text(sent) == "hi"
        assert (await rpc(port, "GetTask", {"id": sent["id"]}))["result"] == sent
        missing = await rpc(port, "GetTask", {"id": "nowhere"})
        assert (missing["id"], missing["error"]["code"]) == (7, -32001)
        body = json.dumps(message("ho", "b")).encode()
        reply = await http(port, "POST", "/message:send", body=body)
        task = reply.json()["task"]
        assert (await http(port, "GET", f"/tenant/tasks/{task['id']}")).json() == task
        reply = await http(port, "GET", "/tasks/nowhere")
        assert reply.status == 404
        assert reply.json()["error"]["details"][0]["reason"] == "TASK_NOT_FOUND"
        assert (await http(port, "GET", "/elsewhere")).status == 404
        async with open_stream(port, "POST", "/message:stream", body=body) as events:
            kinds = [next(iter(event.json())) async for event in events]
        assert kinds == ["task", "artifactUpdate", "statusUpdate"]
        async with rpc_stream(port, "SendStreamingMessage", message("x", "c")) as events:
            ids = [event.json()["id"] async for event in events]
        assert ids == [7, 7, 7]
        state = await agent.state()
        assert state["order"] == ["a", "b", "b", "c"]
        assert state["by_message"] == {"a": 1, "b": 2, "c": 1}
        assert state["open_streams"] == 0
        rpcs = [request["rpc"] for request in state["requests"]]
        assert rpcs[:3] == ["SendMessage", "GetTask", "GetTask"]


async def broken(agent: Peer, *steps: Any, at: Any = "request") -> BaseException:
    """Script one request, send it, and return how it broke."""
    await agent.script({"at": at, "steps": list(steps)})
    with pytest.raises((Incomplete, trio.BrokenResourceError)) as caught:
        await rpc(agent.ports["http"], "SendMessage", message())
    return caught.value


async def test_raw_agent_ends_connections_as_scripted() -> None:
    async with peer("raw_http") as agent:
        await broken(agent, "execute", "close")
        assert (await agent.state())["executions"] == 1
        await broken(agent, "close", at="accept")
        assert isinstance(await broken(agent, "reset"), trio.BrokenResourceError)
        await broken(agent, "reset", at="head")
        await broken(agent, "close", at=20)
        await broken(agent, {"reply": {"body": {"jsonrpc": "2.0"}, "cut": 5}}, "close")
        await broken(agent, {"default": {"bytes": 60}}, "close")
        state = await agent.state()
        assert state["executions"] == 2
        assert state["script_left"] == 0
        assert state["connections"] == 7
        await agent.until(lambda state: state["open_connections"] == 0)


async def test_raw_agent_answers_as_scripted() -> None:
    async with peer("raw_http") as agent:
        port = agent.ports["http"]
        await agent.script({"reply": {"status": 415, "headers": [["x-a", "b"]], "body": "no"}})
        reply = await http(port, "POST", "/rpc")
        assert (reply.status, reply.get("x-a"), reply.body) == (415, "b", b"no")
        await agent.script([{"interim": 103}, {"reply": {"body": [1], "pause": 0.2}}])
        started = trio.current_time()
        assert (await http(port, "POST", "/rpc")).json() == [1]
        assert trio.current_time() - started >= 0.2
        await agent.script({"redirect": 307, "location": "/rpc2"})
        assert (await http(port, "POST", "/rpc")).get("location") == "/rpc2"
        await agent.script({"reply": {"body": "whole", "chunked": True}})
        assert (await http(port, "POST", "/rpc")).body == b"whole"
        await agent.script({"rpc": "GetTask", "steps": [{"reply": {"status": 501}}]})
        assert "result" in await rpc(port, "SendMessage", message())
        assert (await http(port, "GET", "/tasks/x")).status == 501
        await agent.script("hang")
        with pytest.raises(trio.TooSlowError):
            await http(port, "POST", "/rpc", seconds=0.2)
        with pytest.raises(ValueError, match="NotThere"):
            await agent.control("config", {"NotThere": 1})


async def test_raw_agent_streams_behind_gates_and_sees_clients_leave() -> None:
    async with peer("raw_http") as agent:
        items = [
            {"data": {"n": 1}},
            {"gate": "go"},
            ": quiet\n\n",
            {"data": {"n": 2}},
            {"gate": "x"},
        ]
        await agent.script({"sse": items})
        async with open_stream(agent.ports["http"], "POST", "/message:stream") as events:
            assert (await events.next()).json() == {"n": 1}
            with pytest.raises(trio.TooSlowError):
                await events.next(seconds=0.2)
            await agent.control("open", {"gate": "go"})
            assert (await events.next()).json() == {"n": 2}
            assert len(events.comments) == 1
            assert (await agent.state())["open_streams"] == 1
        await agent.until(lambda state: state["open_streams"] == 0, seconds=1)


async def read_response(stream: trio.abc.Stream) -> bytes:
    """One response with a Content-Length, without its head."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive_some()
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += await stream.receive_some()
    return body


async def test_raw_agent_keeps_connections_until_idle_or_counted_out(tls: TlsFiles) -> None:
    request = b"GET /tasks/x HTTP/1.1\r\nHost: x\r\n\r\n"
    async with peer("raw_http", "--idle-close", "0.3", *tls.peer_args) as agent:
        with trio.fail_after(5):
            stream = await connect(agent.ports["http"], tls.client_context())
            await stream.send_all(request)
            await read_response(stream)
            await stream.send_all(request)
            await read_response(stream)
            started = trio.current_time()
            assert await stream.receive_some() == b""
            assert trio.current_time() - started >= 0.25
            await agent.control("config", {"idle_close": None, "max_requests": 1})
            await agent.script([{"reply": {"body": "a"}}, {"send": "surplus"}])
            other = await connect(agent.ports["http"], tls.client_context())
            await other.send_all(request)
            body = await read_response(other)
            while data := await other.receive_some():
                body += data
            assert body == b"asurplus"
        state = await agent.state()
        assert [request["connection"] for request in state["requests"]] == [1, 1, 2]
        for ended in (stream, other):
            await trio.aclose_forcefully(ended)


# --- gRPC without a2a-sdk ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpc_generic", "grpclib_agent", "h2_agent"])
async def test_grpc_agents_are_correct_without_a_script(name: str) -> None:
    async with peer(name) as agent:
        port = agent.ports["grpc"]
        sent = await grpc_call(port, "SendMessage", HELLO, metadata=[("a2a-version", "1.0")])
        assert sent.code == 0
        task = pb_get(sent.messages[0], 1)
        assert pb_get(task, 4, 4, 1) == b"hello"
        got = await grpc_call(port, "GetTask", pb(2, pb_get(task, 1)))
        assert got.messages == [task]
        missing = await grpc_call(port, "GetTask", pb(2, "nowhere"))
        assert (missing.code, missing.message) == (5, "Task not found")
        details = missing.trailers["grpc-status-details-bin"]
        assert isinstance(details, bytes)
        assert pb_get(details, 3, 2, 1) == b"TASK_NOT_FOUND"
        events = await grpc_call(port, "SendStreamingMessage", HELLO, stream=True)
        assert events.code == 0
        assert [next(iter(pb_fields(event)))[0] for event in events.messages] == [1, 4, 3]
        assert (await grpc_call(port, "ListTasks", b"")).code == 12
        state = await agent.state()
        assert state["by_message"] == {"m-1": 2}
        assert state["open_streams"] == 0
        assert ["a2a-version", "1.0"] in state["requests"][0]["headers"]


async def test_generic_agent_gives_any_status_and_leaves_methods_out() -> None:
    details = pb_status(9, "no", ("TASK_NOT_CANCELABLE", "a2a-protocol.org"))
    async with peer("grpc_generic", "--status", "9", "--message", "no") as agent:
        port = agent.ports["grpc"]
        plain = await grpc_call(port, "SendMessage", HELLO)
        assert (plain.code, plain.message) == (9, "no")
        assert "grpc-status-details-bin" not in plain.trailers
        status = {
            "code": 9,
            "message": "no",
            "details": base64.b64encode(details).decode(),
            "trailers": [["x-a", "b"]],
            "execute": True,
        }
        await agent.control("status", status)
        detailed = await grpc_call(port, "SendMessage", HELLO)
        assert detailed.trailers["grpc-status-details-bin"] == details
        assert detailed.trailers["x-a"] == "b"
        assert (await agent.state())["executions"] == 1
        await agent.control("status", None)
        assert (await grpc_call(port, "SendMessage", HELLO)).code == 0
    async with peer("grpc_generic", "--unimplemented") as agent:
        assert (await grpc_call(agent.ports["grpc"], "SendMessage", HELLO)).code == 12
        assert (await agent.state())["executions"] == 0


async def test_h2_agent_breaks_streams_as_scripted() -> None:
    async with peer("h2_agent") as agent:
        port = agent.ports["grpc"]

        async def ended(*steps: Any, at: str = "request") -> Any:
            await agent.script({"at": at, "steps": list(steps)})
            return await grpc_call(port, "SendMessage", HELLO)

        assert (await ended({"trailers_only": {"code": 12, "message": "gone"}})).code == 12
        assert (await ended({"rst": 11}, at="headers")).code == 8
        assert (await ended({"headers": []}, {"rst": 2})).code == 13
        assert (await ended({"html": 502})).code == 14
        zipped = await ended({"message": None, "gzip": True}, {"trailers": []})
        assert (zipped.code, pb_get(zipped.messages[0], 1, 4, 4, 1)) == (0, b"hello")
        assert (await ended({"message": None}, "end")).code != 0
        assert (await ended({"message": None, "cut": 9}, {"trailers": []})).messages == []
        assert (await ended({"goaway": {}}, {"delay": 0.1}, "default")).code == 0
        assert (await ended({"headers": []}, "reset")).code == 14
        assert (await ended("execute", "close")).code == 14
        assert (await ended({"headers": []}, {"trailers": [["grpc-status", "7"]]})).code == 7
        state = await agent.state()
        assert state["executions"] == 5
        assert state["script_left"] == 0


async def test_h2_agent_refuses_streams_and_leaves_connections() -> None:
    async with peer("h2_agent", "--max-requests", "1", "--two-step") as agent:
        await agent.script("refuse")
        refused = await grpc_call(agent.ports["grpc"], "SendMessage", HELLO)
        assert (refused.code, refused.messages) == (14, [])
        assert (await grpc_call(agent.ports["grpc"], "SendMessage", HELLO)).code == 0
        state = await agent.until(lambda state: state["open_connections"] == 0)
        assert state["executions"] == 1
        assert state["goaways"] == 4
        assert [request["rpc"] for request in state["requests"]] == ["SendMessage"] * 2


async def test_h2_agent_leaves_every_connection_after_its_requests() -> None:
    async with peer("h2_agent", "--max-requests", "100") as agent:
        port = agent.ports["grpc"]
        assert await trio.to_thread.run_sync(unary_calls, port, 250) == {0}
        state = await agent.state()
        assert (state["executions"], state["connections"], state["goaways"]) == (250, 3, 2)


def unary_calls(port: int, count: int) -> set[int]:
    """The status codes of calls one after the other on one channel."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/lf.a2a.v1.A2AService/SendMessage")
        return {call.with_call(HELLO, timeout=5)[1].code().value[0] for _ in range(count)}


async def test_generic_agent_leaves_connections_by_age() -> None:
    async with peer("grpc_generic", "--grpc-option", "grpc.max_connection_age_ms=300") as agent:
        stream = await connect(agent.ports["grpc"])
        await stream.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
        seen = b""
        with trio.fail_after(5):
            while bytes([7, 0, 0, 0, 0, 0]) not in seen:  # GOAWAY on stream 0
                seen += (await stream.receive_some()) or pytest.fail(f"{seen!r}")
        await stream.aclose()


async def test_h2_agent_can_say_nothing_or_something_else() -> None:
    async with peer("h2_agent", "--no-settings") as agent:
        stream = await connect(agent.ports["grpc"])
        with trio.move_on_after(0.2) as silence:
            await stream.receive_some()
        assert silence.cancelled_caught
        await stream.aclose()
    async with peer("h2_agent", "--first-bytes", "HTTP/1.1 400 Bad\\r\\n\\r\\n") as agent:
        stream = await connect(agent.ports["grpc"])
        assert await stream.receive_some() == b"HTTP/1.1 400 Bad\r\n\r\n"
        await stream.aclose()
    async with peer("h2_agent", "--max-age", "0.3") as agent:
        stream = await connect(agent.ports["grpc"])
        started = trio.current_time()
        with trio.fail_after(5):
            while await stream.receive_some():
                pass
        assert 0.25 <= trio.current_time() - started < 3
        await stream.aclose()
        assert (await agent.state())["goaways"] == 1


# --- the harness ------------------------------------------------------------------------------


async def test_a_peer_comes_back_on_its_port_and_can_be_paused() -> None:
    port = free_port()
    async with peer("raw_http", "--port", str(port)) as agent:
        await rpc(port, "SendMessage", message())
        agent.pause()
        with pytest.raises(trio.TooSlowError):
            await http(port, "GET", "/tasks/x", seconds=0.2)
        agent.resume()
        assert (await http(port, "GET", "/tasks/x")).status == 404
        agent.kill()
        with pytest.raises(OSError, match="all attempts to connect"):
            await http(port, "GET", "/tasks/x")
    async with peer("raw_http", "--port", str(port)):
        await rpc(port, "SendMessage", message())


async def test_a_peer_that_cannot_start_says_why() -> None:
    with pytest.raises(ProcessDied, match="unrecognized arguments: --nonsense"):
        async with peer("raw_http", "--nonsense"):
            pass


async def test_the_sidecar_is_asked_over_the_addresses_of_its_configuration(
    tmp_path: Path,
) -> None:
    async with peer("raw_http") as agent:
        address = f"127.0.0.1:{agent.ports['http']}"
        config = f"""
            [[listeners]]
            address = "{address}"
            binding = "JSONRPC"
            [[listeners]]
            address = "{address}"
            binding = "HTTP+JSON"
            [admin]
            address = "{address}"
        """
        daemon = Sidecar(agent.process, config, tmp_path)
        assert daemon.port("HTTP+JSON") == agent.ports["http"]
        status, headers, reply = await daemon.jsonrpc("SendMessage", message(), id="x")
        assert (status, headers["content-type"], reply["id"]) == (200, "application/json", "x")
        status, _, reply = await daemon.rest("GET", "/tasks/task-1")
        assert (status, reply["id"]) == (200, "task-1")
        async with daemon.stream("SendStreamingMessage", message()) as events:
            assert [event.event async for event in events] == ["message"] * 3
        text = 'a_total{x="1",y="2"} 3\na_total{x="2",y="2"} 4\n'
        await agent.script(*[{"reply": {"headers": [], "body": text}}] * 2)
        assert (await daemon.metrics())["a_total", frozenset({("x", "1"), ("y", "2")})] == 3
        assert await daemon.metric("a_total", y="2") == 7


def test_a_configuration_is_made_of_agents() -> None:
    keys = {"card": "http://127.0.0.1:1/", "prefer": ["GRPC"], "auth": {"bearer": "env:X"}}
    text = config_text({"one": "http://127.0.0.1:2/", "two": keys}, "[limits]\ndrain_seconds = 1")
    parsed = tomllib.loads(text)
    assert [entry["binding"] for entry in parsed["listeners"]] == ["JSONRPC", "HTTP+JSON", "GRPC"]
    assert parsed["agents"] == {"one": {"card": "http://127.0.0.1:2/"}, "two": keys}
    assert parsed["limits"] == {"drain_seconds": 1}


async def test_a_sidecar_that_cannot_start_says_so() -> None:
    with pytest.raises(ProcessDied, match="ended before it was up"):
        async with sidecar("no_such_key = 1"):
            pass


def test_a_missing_program_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A2A_REQUIRE_PROGRAMS", raising=False)
    assert requires("sh", "dash").endswith("/sh")
    with pytest.raises(pytest.skip.Exception) as skipped:
        requires("no-such-program", "no-such-package")
    # What the list at the end of the run is made from.
    found = MISSING_PROGRAM.fullmatch(str(skipped.value))
    assert found is not None
    assert found.groups() == ("no-such-program", "no-such-package")
    monkeypatch.setenv("A2A_REQUIRE_PROGRAMS", "1")
    with pytest.raises(pytest.fail.Exception, match="needs no-such-program"):
        requires("no-such-program", "no-such-package")


def test_protobuf_by_hand_agrees_with_the_known_bytes() -> None:
    """The vectors are the specification's messages as other implementations write them."""
    request = pb(2, pb(1, "m") + pb(4, 1) + pb(5, pb(1, "hi")))
    assert request.hex() == "120b0a016d20012a040a026869"
    assert (pb(1, "t") + pb(4, "x")).hex() == "0a0174220178"
    status = pb_status(5, "Task not found", ("TASK_NOT_FOUND", "a2a-protocol.org"))
    assert status_header(status) == (
        "CAUSDlRhc2sgbm90IGZvdW5kGk4KKHR5cGUuZ29vZ2xlYXBpcy5jb20vZ29vZ2xlLnJwYy5FcnJvckluZm8S"
        "IgoOVEFTS19OT1RfRk9VTkQSEGEyYS1wcm90b2NvbC5vcmc"
    )
    assert unframe(frame(b"abc") + b"more") == b"abc"
    task = {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
    assert pb_get(event_pb({"task": task}), 1) == task_pb(task)
    assert list(pb_fields(pb(1, STATES["TASK_STATE_CANCELED"]))) == [(1, 5)]
