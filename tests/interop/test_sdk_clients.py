"""Clients that know nothing of the sidecar: given its card's address, everything works.

The official SDK's client on each transport, grpcio's and grpclib's on gRPC; each agent behind the
sidecar is reached over one binding.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from tests.harness import Peer, grpc_call, http, message, peer_sync, run_sdk_client
from tests.interop.callers import (
    BINDINGS,
    PAIRS,
    Between,
    agent_of,
    between,
    from_pb,
    normalised,
    to_pb,
)
from tests.interop.h2_client import frame, h2_connection
from tests.support.processes import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

WELL_KNOWN = "/.well-known/agent-card.json"


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(agent: Peer) -> Iterator[Between]:
    with between(agent.urls) as running:
        yield running


# --- the official client ----------------------------------------------------------------------

TASK = {"taskId": "$2.task.id"}
CONFIG = {**TASK, "id": "c-1", "url": "http://127.0.0.1:1/hook", "token": "t"}
OPS: list[dict[str, Any]] = [
    {"op": "SendMessage", "request": message("hello", "m-1")},
    {"op": "SendStreamingMessage", "request": message("stream 2 free", "m-2")},
    {"op": "SendMessage", "request": message("input", "m-3")},
    {"op": "ListTasks", "request": {"contextId": "$2.task.contextId", "pageSize": 10}},
    {"op": "GetExtendedAgentCard"},
    {"op": "GetTask", "request": {"id": "$0.task.id"}},
    {"op": "CreateTaskPushNotificationConfig", "request": CONFIG},
    {"op": "GetTaskPushNotificationConfig", "request": {**TASK, "id": "c-1"}},
    {"op": "ListTaskPushNotificationConfigs", "request": TASK},
    {"op": "DeleteTaskPushNotificationConfig", "request": {**TASK, "id": "c-1"}},
    {"op": "SubscribeToTask", "request": {"id": "$2.task.id"}, "stop_after": 1},
    {"op": "CancelTask", "request": {"id": "$2.task.id"}},
    {"op": "GetTask", "request": {"id": "nowhere"}},
    {"op": "SendMessage", "request": message("fail -32004", "m-4")},
    {"op": "SendStreamingMessage", "request": message("fail -32005", "m-5")},
    {"op": "SendMessage", "request": {"message": {"messageId": "m-6", "role": "ROLE_USER"}}},
    {"op": "CancelTask", "request": {"id": "$0.task.id"}},
]


def summary(lines: list[dict[str, Any]], tenant: str) -> Any:
    """What an application saw; the extended card is looked at apart."""
    seen = []
    for line in lines:
        if line["op"] == 4:
            continue
        kept = {key: value for key, value in line.items() if key != "at"}
        if "error" in kept:
            kept["error"] = kept["error"]["class"]
        seen.append(_without_tenant(kept, tenant))
    return normalised(seen)


def _without_tenant(value: Any, tenant: str) -> Any:
    """The tenant that the sidecar's card told the client to send comes back in configurations."""
    match value:
        case dict():
            items = value.items()
            return {k: _without_tenant(v, tenant) for k, v in items if (k, v) != ("tenant", tenant)}
        case list():
            return [_without_tenant(item, tenant) for item in value]
        case _:
            return value


@pytest.mark.parametrize("down", BINDINGS)
async def test_the_official_client_completes_every_operation(
    down: str, agent: Peer, sidecar: Between
) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}

    async def run(up: str) -> None:
        # A card tells of every listener, whichever it was asked of.
        base = f"http://127.0.0.1:{sidecar.sidecar.port()}/agents/{agent_of(up)}"
        lines[up] = await run_sdk_client(OPS, card=base, bindings=[down])

    async with trio.open_nursery() as nursery:
        for up in BINDINGS:
            nursery.start_soon(run, up)
    first = summary(lines["JSONRPC"], "jsonrpc")
    for up in BINDINGS:
        seen = summary(lines[up], agent_of(up))
        assert seen == first, up
        extended = next(line["result"] for line in lines[up] if line["op"] == 4)
        assert extended["name"] == "sdk agent, extended"
        check_addresses(extended, sidecar, agent)
        check_results(lines[up])


def check_results(lines: list[dict[str, Any]]) -> None:
    results = {line["op"]: line["result"] for line in lines if "result" in line}
    events = [line["event"] for line in lines if "event" in line]
    hello, parked = results[0]["task"], results[2]["task"]
    assert hello["artifacts"][0]["parts"] == [{"text": "hello"}]
    assert parked["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    chunks = ["artifactUpdate"] * 2
    kinds = ["task", "statusUpdate", *chunks, "statusUpdate", "task"]
    assert [next(iter(event)) for event in events] == kinds
    assert [task["id"] for task in results[3]["tasks"]] == [parked["id"]]
    assert results[5] == hello
    for number in (6, 7):
        assert (results[number]["url"], results[number]["token"]) == (CONFIG["url"], "t")
    assert [config["id"] for config in results[8]["configs"]] == ["c-1"]
    assert results[9] is None
    assert events[-1]["task"]["id"] == parked["id"]
    assert results[11]["status"]["state"] == "TASK_STATE_CANCELED"
    assert {line["op"]: line["error"]["class"] for line in lines if "error" in line} == {
        12: "TaskNotFoundError",
        13: "UnsupportedOperationError",
        14: "ContentTypeNotSupportedError",
        15: "InvalidParamsError",
        16: "TaskNotCancelableError",
    }


# --- cards ------------------------------------------------------------------------------------


def check_addresses(card: Any, sidecar: Between, agent: Peer) -> None:
    """Nothing in a card leads anywhere but to the sidecar."""
    text = json.dumps(card)
    for port in agent.ports.values():
        assert str(port) not in text
    own = {sidecar.sidecar.port(binding) for binding in BINDINGS} | set(sidecar.grpc_ports.values())
    interfaces = card["supportedInterfaces"]
    ports = [
        int(i["url"].removeprefix("http://").partition(":")[2].partition("/")[0])
        for i in interfaces
    ]
    assert set(ports) <= own
    assert len({i["protocolBinding"] for i in interfaces}) == 3
    assert "signatures" not in card
    for name in ("url", "preferredTransport", "additionalInterfaces"):
        assert name not in card


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_cards_lead_to_the_sidecar_the_listener_asked_first(
    down: str, up: str, agent: Peer, sidecar: Between
) -> None:
    port = sidecar.sidecar.port(down)
    path = f"/agents/{agent_of(up)}{WELL_KNOWN}"
    host = {"host": f"localhost:{port}"}
    reply = await http(port, "GET", path, headers=host)
    assert reply.status == 200
    card = reply.json()
    check_addresses(card, sidecar, agent)
    first = card["supportedInterfaces"][0]
    assert first["protocolBinding"] == down
    assert first["protocolVersion"] == "1.0"
    assert f"localhost:{port}" in first["url"]
    if down == "GRPC":
        assert (first["url"], first["tenant"]) == (f"localhost:{port}", agent_of(up))
    extended = await sidecar.through(down, up).call("GetExtendedAgentCard")
    check_addresses(extended.result, sidecar, agent)
    tag = {"if-none-match": reply.get("etag") or ""}
    again = await http(port, "GET", path, headers={**host, **tag})
    assert (again.status, again.body) == (304, b"")


# --- gRPC clients -----------------------------------------------------------------------------


def request_pb(text: str = "hello", **more: Any) -> bytes:
    return to_pb("SendMessageRequest", {**message(text), **more})


@pytest.mark.parametrize("up", BINDINGS)
async def test_grpcio_calls_streams_and_keeps_its_deadline(up: str, sidecar: Between) -> None:
    port = sidecar.grpc_ports[agent_of(up)]
    sent = await grpc_call(port, "SendMessage", request_pb())
    assert sent.code == 0
    task = from_pb("SendMessageResponse", sent.messages[0])["task"]
    assert task["artifacts"][0]["parts"] == [{"text": "hello"}]
    events = await grpc_call(port, "SendStreamingMessage", request_pb("stream 2 free"), stream=True)
    assert events.code == 0
    kinds = [next(iter(from_pb("StreamResponse", event))) for event in events.messages]
    assert kinds == ["task", "statusUpdate", "artifactUpdate", "artifactUpdate", "statusUpdate"]
    started = trio.current_time()
    late = await grpc_call(port, "SendMessage", request_pb("sleep 5"), seconds=0.6)
    assert late.code == 4
    assert 0.5 < trio.current_time() - started < 2
    late = await grpc_call(
        port, "SendStreamingMessage", request_pb("silent 5"), seconds=0.6, stream=True
    )
    assert late.code == 4
    assert len(late.messages) == 2


@pytest.mark.parametrize("up", BINDINGS)
async def test_a_gzipped_request_is_read(up: str, agent: Peer, sidecar: Between) -> None:
    port = sidecar.grpc_ports[agent_of(up)]

    def compressed() -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = channel.unary_unary("/lf.a2a.v1.A2AService/SendMessage")
            answer: bytes = stub(
                request_pb("x" * 20_000), timeout=10, compression=grpc.Compression.Gzip
            )
            return answer

    answer = await trio.to_thread.run_sync(compressed)
    task = from_pb("SendMessageResponse", answer)["task"]
    assert task["artifacts"][0]["parts"] == [{"text": "x" * 20_000}]


async def test_grpc_encodings_are_announced_and_others_refused(sidecar: Between) -> None:
    async with h2_connection(sidecar.grpc_ports["grpc"]) as connection:
        zipped = frame(gzip.compress(request_pb()), compressed=True)
        stream = await connection.call("SendMessage", zipped, metadata=[("grpc-encoding", "gzip")])
        assert await stream.next() is not None
        await stream.ended()
        assert stream.status == 0
        assert dict(stream.headers).get("grpc-encoding", "identity") == "identity"
        stream = await connection.call(
            "SendMessage", frame(b"x", compressed=True), metadata=[("grpc-encoding", "snappy")]
        )
        await stream.ended()
        assert stream.status == 12
        assert stream.get("grpc-accept-encoding") == "identity,gzip"
        # a compressed message without an announced encoding is an error of the client's
        stream = await connection.call("SendMessage", zipped)
        await stream.ended()
        assert stream.status in (3, 13)


@pytest.mark.parametrize("up", BINDINGS)
async def test_grpclib_calls_and_streams(up: str, sidecar: Between) -> None:
    """grpclib needs asyncio: a process of its own."""
    code = f"""
import asyncio, sys
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import GRPCError
sys.path.insert(0, {str(PEERS.parents[1])!r})
from tests.peers.grpclib_agent import Bytes
async def main():
    channel = Channel("127.0.0.1", {sidecar.grpc_ports[agent_of(up)]}, codec=Bytes())
    name = "/lf.a2a.v1.A2AService/"
    request = {request_pb("stream 1 free")!r}
    send = UnaryUnaryMethod(channel, name + "SendMessage", bytes, bytes)
    stream = UnaryStreamMethod(channel, name + "SendStreamingMessage", bytes, bytes)
    get = UnaryUnaryMethod(channel, name + "GetTask", bytes, bytes)
    whole = await send(request, timeout=10)
    events = await stream(request, timeout=10)
    try:
        await get({to_pb("GetTaskRequest", {"id": "nowhere"})!r})
        code = 0
    except GRPCError as error:
        code = error.status.value
    try:
        await send({request_pb("sleep 5")!r}, timeout=0.3)
    except asyncio.TimeoutError:
        code += 100
    channel.close()
    print(len(whole), len(events), code)
asyncio.run(main())
"""
    done = await trio.run_process(
        [sys.executable, "-c", code], capture_stdout=True, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()
    size, events, code_seen = done.stdout.split()[-3:]
    assert int(size) > 50
    assert (int(events), int(code_seen)) == (4, 105)


async def test_health_is_checked(sidecar: Between) -> None:
    async with h2_connection(sidecar.shared_grpc()) as connection:
        path = "/grpc.health.v1.Health/Check"
        for request in (b"", b"\x0a\x14lf.a2a.v1.A2AService"):
            stream = await connection.call(path, frame(request))
            assert await stream.next() == b"\x08\x01"
            await stream.ended()
            assert stream.status == 0
        stream = await connection.call(path, frame(b"\x0a\x05other"))
        await stream.ended()
        assert stream.status == 5
        stream = await connection.call("/grpc.health.v1.Health/Watch", frame(b""))
        await stream.ended()
        assert stream.status == 12


async def test_other_methods_are_unimplemented_and_a_bad_message_is_invalid(
    sidecar: Between,
) -> None:
    async with h2_connection(sidecar.grpc_ports["grpc"]) as connection:
        for kind, expected in (("application/grpc+proto", "200"), ("application/json", "415")):
            stream = await connection.call("SendMessage", frame(request_pb()), content_type=kind)
            await stream.ended()
            assert stream.get(":status") == expected
        for path in ("NoSuchMethod", "/a2a.v1.A2AService/SendMessage", "/x"):
            stream = await connection.call(path, frame(b""))
            await stream.ended()
            assert stream.status == 12
        for body in (frame(b"\xff\xff"), b"", frame(b"") + frame(b""), frame(request_pb())[:-3]):
            stream = await connection.call("SendMessage", body)
            await stream.ended()
            assert stream.status == 3, body
