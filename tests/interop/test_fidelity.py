"""Values: moved as bytes between the JSON bindings, exact or refused where protobuf is involved."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness import Peer, http, message, open_stream, peer_sync
from tests.interop.callers import (
    BINDINGS,
    PAIRS,
    Between,
    agent_of,
    between,
    from_pb,
    to_pb,
)
from tests.interop.h2_client import frame, h2_connection
from tests.peers.mini import pb

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

JSON = ("JSONRPC", "HTTP+JSON")
JSON_PAIRS = [(down, up) for down in JSON for up in JSON]
SEND, STREAM = "SendMessage", "SendStreamingMessage"


@dataclass
class Agents:
    """Scripted for JSON; on gRPC one that records requests and answers with given bytes."""

    http: Peer
    grpc: Peer

    async def answer(self, name: str, value: Any) -> None:
        """What the gRPC agent answers from now on."""
        data = value if isinstance(value, bytes) else to_pb(name, value)
        await self.grpc.control("answer", {"message": base64.b64encode(data).decode()})

    async def request(self) -> bytes:
        """The last request of the gRPC agent."""
        return base64.b64decode((await self.grpc.state())["request"])


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with peer_sync("raw_http") as http_peer, peer_sync("firehose") as grpc:
        yield Agents(http_peer, grpc)


@pytest.fixture(scope="module")
def sidecar(agents: Agents) -> Iterator[Between]:
    with between({**agents.http.urls, "GRPC": agents.grpc.urls["GRPC"]}) as running:
        yield running


async def send_text(sidecar: Between, down: str, up: str, method: str, text: str) -> bytes:
    """Send a request, written exactly so, over a JSON binding; the answer's body."""
    port, agent = sidecar.sidecar.port(down), agent_of(up)
    headers = {"content-type": "application/json", "a2a-version": "1.0"}
    if down == "JSONRPC":
        path = f"/agents/{agent}"
        text = f'{{"jsonrpc":"2.0","id":"a","method":"{method}","params":{text}}}'
    else:
        path = f"/agents/{agent}/message:{'send' if method == SEND else 'stream'}"
    if method == SEND:
        reply = await http(port, "POST", path, headers=headers, body=text.encode())
        return reply.body
    async with open_stream(port, "POST", path, headers=headers, body=text.encode()) as events:
        return b"\n".join([event.data.encode() async for event in events])


# --- JSON to JSON: bytes ----------------------------------------------------------------------

DEEP = '{"d":' * 60 + '"x"' + "}" * 60
LISTS = "[" * 250 + "]" * 250
VALUES = (
    '{"z":1,"a":1.0,"m":1e2,"big":9007199254740993,"huge":12345678901234567890123,'
    '"tiny":1E-400,"neg":-0,"s":"\\u00e9\\/\\ud83d\\ude00","e":"","n":null,"z2":[ 1 , 2 ],'
    f'"deep":{DEEP},"lists":{LISTS}}}'
)
REQUEST = (
    '{"message":{"messageId":"m-1","role":"ROLE_USER","parts":[{"data":' + VALUES + "},"
    '{"raw":"_-8","filename":"a.bin","x-part":true}],"x-future":{"a":1.0},'
    '"metadata":' + VALUES + '},"configuration":{"futureFlag":true,"historyLength":0},'
    '"futureTop":1.50,"metadata":{"k":2}}'
)
RESULT = (
    '{"task":{"id":"t-1","contextId":"c-1","status":{"state":"TASK_STATE_PAUSED","x":1},'
    '"artifacts":[{"artifactId":"a","parts":[{"data":' + VALUES + '}]}],"x-unknown":[1.0]}}'
)


def scripted(up: str, method: str, result: str) -> Any:
    """An agent's answer whose result is written exactly so."""
    body = f'{{"jsonrpc":"2.0","id":1,"result":{result}}}' if up == "JSONRPC" else result
    if method == SEND:
        return {"reply": {"body": body}}
    return {"sse": [f"data: {body}\r\n\r\n"]}


@pytest.mark.parametrize(("down", "up"), JSON_PAIRS)
@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_between_json_bindings_bytes_are_moved(
    method: str, down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    await agents.http.script(scripted(up, method, RESULT))
    answer = await send_text(sidecar, down, up, method, REQUEST)
    sent = (await agents.http.state())["requests"][-1]["body"]
    if up == "JSONRPC":
        envelope = '{"jsonrpc":"2.0","id":1,"method":"%s","params":'
        assert sent == (envelope % method) + REQUEST + "}"
    else:
        assert sent == REQUEST
    if down == "JSONRPC":
        assert answer.decode() == '{"jsonrpc":"2.0","id":"a","result":' + RESULT + "}"
    else:
        assert answer.decode() == RESULT


async def test_a_query_keeps_what_it_says(agents: Agents, sidecar: Between) -> None:
    """GetTask over HTTP+JSON to JSON-RPC and back: values get the JSON type of their field."""
    port = sidecar.sidecar.port("HTTP+JSON")
    listing = '{"tasks":[],"nextPageToken":"","pageSize":5,"totalSize":9007199254740993}'
    await agents.http.script({"reply": {"body": f'{{"jsonrpc":"2.0","id":1,"result":{listing}}}'}})
    query = (
        "contextId=a%20b%26c&status=TASK_STATE_WORKING&pageSize=5&pageToken=x%2By%3D"
        "&historyLength=0&includeArtifacts=true&statusTimestampAfter=2025-01-01T00%3A00%3A00Z"
    )
    reply = await http(port, "GET", f"/agents/jsonrpc/tasks?{query}&unknown=1")
    assert reply.body.decode() == listing
    body = json.loads((await agents.http.state())["requests"][-1]["body"])
    assert body["params"] == {
        "contextId": "a b&c",
        "status": "TASK_STATE_WORKING",
        "pageSize": 5,
        "pageToken": "x+y=",
        "historyLength": 0,
        "includeArtifacts": True,
        "statusTimestampAfter": "2025-01-01T00:00:00Z",
    }
    await agents.http.script({"reply": {"body": listing}})
    await sidecar.through("JSONRPC", "HTTP+JSON").call("ListTasks", body["params"])
    assert (await agents.http.state())["requests"][-1]["path"] == f"/tasks?{query}"


@pytest.mark.parametrize("up", JSON)
@pytest.mark.parametrize("body", ["", "{}", "null", "[]", '{"x":1}'])
async def test_void_results_in_every_spelling(
    body: str, up: str, agents: Agents, sidecar: Between
) -> None:
    """Some agents answer 204 without a body, others null or an empty object."""
    request = {"taskId": "t-1", "id": "c-1"}
    for down in BINDINGS:
        reply: dict[str, Any] = {"body": body}
        if up == "JSONRPC":
            reply["body"] = f'{{"jsonrpc":"2.0","id":1,"result":{body or "null"}}}'
        elif not body:
            reply["status"] = 204
        await agents.http.script({"reply": reply})
        got = await sidecar.through(down, up).call("DeleteTaskPushNotificationConfig", request)
        assert got.fault is None
        assert got.result == (None if down == "JSONRPC" else {})
        assert got.status == (0 if down == "GRPC" else 200)


async def test_a_void_result_from_grpc(agents: Agents, sidecar: Between) -> None:
    await agents.answer("Empty", b"")
    for down in BINDINGS:
        got = await sidecar.through(down, "GRPC").call(
            "DeleteTaskPushNotificationConfig", {"taskId": "t-1", "id": "c-1"}
        )
        assert got.result == (None if down == "JSONRPC" else {})


@pytest.mark.parametrize("up", JSON)
@pytest.mark.parametrize("status", [200, 201, 202])
async def test_every_success_is_200(status: int, up: str, agents: Agents, sidecar: Between) -> None:
    result: Any = {"task": {"id": "t-1", "contextId": "c", "status": {"state": 3}}}
    body = {"jsonrpc": "2.0", "id": 1, "result": result} if up == "JSONRPC" else result
    for down in BINDINGS:
        await agents.http.script({"reply": {"status": status, "body": body}})
        got = await sidecar.through(down, up).call(SEND, message())
        assert got.fault is None
        assert got.status == (0 if down == "GRPC" else 200)


IDS = ['"a"', '""', '"\\u00e9"', "0", "-5", "1.5", "1.0", "1e2", "12345678901234567890", "null"]


@pytest.mark.parametrize("up", BINDINGS)
async def test_an_id_comes_back_digit_for_digit(up: str, agents: Agents, sidecar: Between) -> None:
    """Also where the sidecar makes the whole response."""
    port, path = sidecar.sidecar.port(), f"/agents/{agent_of(up)}"
    task = {"id": "t", "status": {"state": "TASK_STATE_WORKING"}}
    await agents.answer("Task", task)
    for id_ in IDS:
        body = f'{{"jsonrpc":"2.0","id":{id_},"method":"GetTask","params":{{"id":"t"}}}}'
        if up != "GRPC":
            reply = json.dumps(task)
            rpc = f'{{"jsonrpc":"2.0","id":1,"result":{reply}}}'
            await agents.http.script({"reply": {"body": rpc if up == "JSONRPC" else reply}})
        answer = (await http(port, "POST", path, body=body.encode())).body
        assert answer.startswith(b'{"jsonrpc":"2.0","id":%b,"result":' % id_.encode())
        refused = await http(port, "POST", path, body=body.replace("GetTask", "Nothing").encode())
        assert refused.body.startswith(b'{"jsonrpc":"2.0","id":%b,"error":' % id_.encode())
    for id_ in ("true", "[]", "{}"):
        body = f'{{"jsonrpc":"2.0","id":{id_},"method":"GetTask","params":{{"id":"t"}}}}'
        wrong = (await http(port, "POST", path, body=body.encode())).json()
        assert (wrong["id"], wrong["error"]["code"]) == (None, -32600)


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_events_in_every_spelling(
    end: str, down: str, agents: Agents, sidecar: Between
) -> None:
    """Lines, comments, ids; an event over several lines; a body that ends without an empty line."""
    event = {"task": {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}}
    data = "".join(f"data: {line}{end}" for line in json.dumps(event, indent=1).split("\n"))
    text = f": hello{end}id: 7{end}{data}retry: 5{end}{end}data:{json.dumps(event)}"
    await agents.http.script({"sse": [text[:9], text[9:40], text[40:]]})
    got = await sidecar.through(down, "HTTP+JSON").call(STREAM, message())
    assert got.fault is None
    assert got.results == [event, event]


@pytest.mark.parametrize("down", BINDINGS)
async def test_a_plain_result_where_a_stream_was_asked_for_is_one_event(
    down: str, agents: Agents, sidecar: Between
) -> None:
    result = {"message": {**message()["message"], "role": "ROLE_AGENT"}}
    for up in JSON:
        body = {"jsonrpc": "2.0", "id": 1, "result": result} if up == "JSONRPC" else result
        await agents.http.script({"reply": {"body": body}})
        got = await sidecar.through(down, up).call(STREAM, message())
        assert got.results == [result]
        kind = "application/grpc" if down == "GRPC" else "text/event-stream"
        assert got.content_type == kind


# --- to gRPC: exact, or refused before anything is sent ---------------------------------------


def with_part(**part: Any) -> dict[str, Any]:
    request = message()
    request["message"]["parts"] = [part]
    return request


EXACT: list[Any] = [
    {"n": 1, "neg": -3, "f": 1.5, "e": 1e300, "k": 2**53, "small": 5e-324},
    [True, False, None, "", "é\U0001f600", {}, []],
    0,
    -0.5,
    "text",
    None,
    {"a": {"b": {"c": [[[{"d": 1}]]]}}},
]


@pytest.mark.parametrize("down", JSON)
@pytest.mark.parametrize("data", EXACT, ids=lambda data: json.dumps(data)[:20])
async def test_data_crosses_grpc_both_ways(
    data: Any, down: str, agents: Agents, sidecar: Between
) -> None:
    request = with_part(data=data, metadata={"k": 2})
    answered = {**request["message"], "role": "ROLE_AGENT"}
    await agents.answer("SendMessageResponse", {"message": answered})
    answer = json.loads(await send_text(sidecar, down, "GRPC", SEND, json.dumps(request)))
    sent = from_pb("SendMessageRequest", await agents.request())
    assert json.dumps(sent, sort_keys=True) == spelled_by_protobuf(request)
    result = answer["result"] if down == "JSONRPC" else answer
    # equal also in type: 1 and not 1.0
    assert json.dumps(result["message"]["parts"], sort_keys=True) == json.dumps(
        answered["parts"], sort_keys=True
    )


def spelled_by_protobuf(request: Any) -> str:
    return json.dumps(
        from_pb("SendMessageRequest", to_pb("SendMessageRequest", request)), sort_keys=True
    )


@pytest.mark.parametrize("down", JSON)
async def test_bytes_cross_grpc_in_every_spelling(
    down: str, agents: Agents, sidecar: Between
) -> None:
    answered = message()["message"] | {"parts": [{"raw": "/+8="}]}
    await agents.answer("SendMessageResponse", {"message": answered})
    expected = to_pb("SendMessageRequest", with_part(raw="/+8="))
    for spelling in ("_-8", "_-8=", "/+8", "/+8="):
        text = json.dumps(with_part(raw=spelling))
        answer = await send_text(sidecar, down, "GRPC", SEND, text)
        assert await agents.request() == expected
        assert b'"raw":"/+8="' in answer.replace(b" ", b"")


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = {"d": value}
    return value


REFUSED = {
    "raw": with_part(raw="not base64!"),
    "2^53+1": with_part(data={"big": 2**53 + 1}),
    "two contents": with_part(text="a", url="https://example.org/"),
    "too deep": with_part(data=nested(40)),
    "role": {"message": {**message()["message"], "role": "user"}},
    "type": {"message": {**message()["message"], "messageId": 5}},
    "parts": {"message": {**message()["message"], "parts": {}}},
}
NAMED = {
    "raw": "message.parts[0].raw",
    "2^53+1": "message.parts[0].data.big",
    "two contents": "message.parts[0]",
    "too deep": "message.parts[0].data",
    "role": "message.role",
    "type": "message.messageId",
    "parts": "message.parts",
}


@pytest.mark.parametrize("down", JSON)
@pytest.mark.parametrize("method", [SEND, STREAM])
@pytest.mark.parametrize("case", REFUSED)
async def test_what_grpc_cannot_hold_is_refused_before_anything_is_sent(
    case: str, method: str, down: str, agents: Agents, sidecar: Between
) -> None:
    before = len((await agents.grpc.state())["requests"])
    got = await sidecar.through(down, "GRPC").call(method, REFUSED[case])
    assert got.fault is not None
    assert got.fault.kind == "INVALID_PARAMS"
    assert got.fault.status == (200 if down == "JSONRPC" else 400)
    assert NAMED[case] in got.fault.message
    assert len((await agents.grpc.state())["requests"]) == before
    own = got.fault.own
    assert own is not None
    assert (own["reason"], own["metadata"]["delivered"]) == ("NOT_REPRESENTABLE", "no")
    for up in JSON:  # which get it: theirs to judge
        assert (await sidecar.through(down, up).call(SEND, REFUSED[case])).fault is None


@pytest.mark.parametrize(("down", "up"), [(down, up) for down in JSON for up in BINDINGS])
@pytest.mark.parametrize("text", ['"\\ud800"', '"\x01"', '"a" "b"', "01"])
async def test_what_parsers_disagree_on_is_refused_here(
    text: str, down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    before = [len((await peer.state())["requests"]) for peer in (agents.http, agents.grpc)]
    request = json.dumps(message("TEXT")).replace('"TEXT"', text)
    answer = json.loads(await send_text(sidecar, down, up, SEND, request))
    code = answer["error"]["code"]
    assert code == (-32700 if down == "JSONRPC" else 400)
    after = [len((await peer.state())["requests"]) for peer in (agents.http, agents.grpc)]
    assert after == before


async def test_unknown_members_of_a_request_are_dropped_for_grpc(
    agents: Agents, sidecar: Between
) -> None:
    plain = message()
    request = {
        "message": {**plain["message"], "x-future": {"a": 1}, "kind": "message"},
        "configuration": {"futureFlag": True, "blocking": True},
        "futureTop": 1,
    }
    await agents.answer("SendMessageResponse", {"message": plain["message"]})
    for down in JSON:
        got = await sidecar.through(down, "GRPC").call(SEND, request)
        assert got.fault is None
        expected = to_pb("SendMessageRequest", {**plain, "configuration": {}})
        assert await agents.request() == expected


# --- from gRPC --------------------------------------------------------------------------------


async def test_list_tasks_from_grpc_has_its_required_members(
    agents: Agents, sidecar: Between
) -> None:
    task = {"id": "t-1", "status": {"state": "TASK_STATE_WORKING"}}
    for down in JSON:
        await agents.answer("ListTasksResponse", b"")
        got = await sidecar.through(down, "GRPC").call("ListTasks", {})
        assert got.result == {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0}
        await agents.answer("ListTasksResponse", {"tasks": [task], "pageSize": 1})
        got = await sidecar.through(down, "GRPC").call("ListTasks", {})
        page = {"nextPageToken": "", "pageSize": 1, "totalSize": 0}
        assert got.result == {"tasks": [task], **page}  # no empty artifacts nor history
        await agents.answer("ListTaskPushNotificationConfigsResponse", b"")
        got = await sidecar.through(down, "GRPC").call(
            "ListTaskPushNotificationConfigs", {"taskId": "t-1"}
        )
        assert got.result.get("configs", []) == []


async def test_presence_crosses(agents: Agents, sidecar: Between) -> None:
    """historyLength 0 is not the same as none: the bytes differ."""
    await agents.answer("Task", {"id": "t", "status": {"state": "TASK_STATE_WORKING"}})
    for down in JSON:
        for request, expected in (
            ({"id": "t", "historyLength": 0}, "1201741800"),
            ({"id": "t"}, "120174"),
        ):
            await sidecar.through(down, "GRPC").call("GetTask", request)
            assert (await agents.request()).hex() == expected
    body = '{"id":"t","status":{"state":"TASK_STATE_WORKING"}}'
    for sent, query in ((b"\x12\x01t\x18\x00", "?historyLength=0"), (b"\x12\x01t", "")):
        await agents.http.script({"reply": {"body": body}})
        async with h2_connection(sidecar.grpc_ports["http-json"]) as connection:
            stream = await connection.call("GetTask", frame(sent))
            await stream.ended()
        assert stream.status == 0
        assert (await agents.http.state())["requests"][-1]["path"] == f"/tasks/t{query}"


@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_grpc_to_grpc_keeps_unknown_fields(
    method: str, agents: Agents, sidecar: Between
) -> None:
    unknown = pb(99, "of a newer version") + pb(100, 7)
    request = pb(2, pb(1, "m") + pb(4, 1) + pb(5, pb(1, "hi")) + unknown) + unknown
    answer = pb(1, pb(1, "t") + pb(2, "c") + pb(3, pb(1, 99)) + unknown) + unknown
    await agents.answer("", answer)
    async with h2_connection(sidecar.grpc_ports["grpc"]) as connection:
        stream = await connection.call(method, frame(request))
        assert await stream.next() == answer
        assert await stream.next() is None
    assert stream.status == 0
    assert await agents.request() == request


@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_unknown_states_from_json_agents(
    method: str, agents: Agents, sidecar: Between
) -> None:
    """JSON to JSON passes a name (above); protobuf has no place for one: a clear error."""
    task = '{"task":{"id":"t","contextId":"c","status":{"state":"TASK_STATE_PAUSED"}}}'
    for up in JSON:
        await agents.http.script(scripted(up, method, task))
        got = await sidecar.through("GRPC", up).call(method, message())
        assert got.fault is not None
        assert (got.fault.status, got.results) == (2, [])
        own = got.fault.own
        assert own is not None
        assert own["metadata"]["delivered"] == "unknown"
        assert "malformed" in own["metadata"]["attempt-1"]


async def test_unknown_numbers_from_grpc_are_printed_as_numbers(
    agents: Agents, sidecar: Between
) -> None:
    await agents.answer("", pb(1, "t") + pb(3, pb(1, 99)))
    for down in JSON:
        got = await sidecar.through(down, "GRPC").call("GetTask", {"id": "t"})
        assert got.result == {"id": "t", "status": {"state": 99}}


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_five_megabytes_both_ways(
    down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    """Above the 4 MiB that gRPC libraries take by default."""
    raw = base64.b64encode(bytes(range(256)) * 20_000).decode()
    task = {
        "id": "t",
        "status": {"state": "TASK_STATE_COMPLETED"},
        "artifacts": [{"artifactId": "a", "parts": [{"raw": raw}]}],
    }
    if up == "GRPC":
        await agents.answer("SendMessageResponse", {"task": task})
    else:
        await agents.http.script(scripted(up, SEND, json.dumps({"task": task})))
    got = await sidecar.through(down, up).call(SEND, with_part(raw=raw))
    assert got.result["task"] == task
    if up == "GRPC":
        assert from_pb("SendMessageRequest", await agents.request()) == with_part(raw=raw)
    else:
        assert (await agents.http.state())["requests"][-1]["body_size"] > 6_800_000
