"""What applications see of errors: the agent's own as if called directly, ours by their names."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import card, free_port, grpc_call, http, message
from tests.peers.mini import pb, pb_status, rest_error, status_header
from tests.system.world import (
    BINDINGS,
    GRPC_UNAVAILABLE,
    Answer,
    RemoteAgent,
    grpc_answer,
    jsonrpc_answer,
    message_id,
    rest_answer,
    send_pb,
)

if TYPE_CHECKING:
    from tests.harness import Peer
    from tests.system.world import World

pytestmark = pytest.mark.system

A2A = "a2a-protocol.org"
NAMES = {3: "INVALID_ARGUMENT", 5: "NOT_FOUND", 9: "FAILED_PRECONDITION", 12: "UNIMPLEMENTED"}
NAMES |= {13: "INTERNAL"}

# An agent's errors over HTTP+JSON: status, gRPC status, reason, JSON-RPC code. Those beside 400 and
# 404 are what agents of 1.0.0 send.
REST_ERRORS = [
    (404, 5, "TASK_NOT_FOUND", -32001),
    (409, 9, "TASK_NOT_CANCELABLE", -32002),
    (415, 3, "CONTENT_TYPE_NOT_SUPPORTED", -32005),
    (501, 12, "PUSH_NOTIFICATION_NOT_SUPPORTED", -32003),
    (501, 12, "UNSUPPORTED_OPERATION", -32004),
    (502, 13, "INVALID_AGENT_RESPONSE", -32006),
    (400, 9, "EXTENSION_SUPPORT_REQUIRED", -32008),
]

# The same over gRPC: status, reason, code.
GRPC_ERRORS = [
    (5, "TASK_NOT_FOUND", -32001),
    (9, "TASK_NOT_CANCELABLE", -32002),
    (12, "PUSH_NOTIFICATION_NOT_SUPPORTED", -32003),
    (12, "UNSUPPORTED_OPERATION", -32004),
    (13, "INVALID_AGENT_RESPONSE", -32006),
]


async def assert_answered(agent: RemoteAgent, binding: str, second: Peer, id_: str) -> None:
    """No failover, and nobody else was asked."""
    assert id_ not in json.dumps((await second.state())["requests"])
    seen = await agent.until("requests_total", 1, outcome="agent_error", binding=binding)
    assert seen.failovers == {}
    assert seen.total("attempts_total") == 1
    assert seen.total("ambiguous_errors_total") == 0
    ((label,),) = seen.by("current_interface", "interface")
    assert label.startswith("0-")


def assert_same_error(answer: Answer, binding: str, code: int, reason: str) -> None:
    assert answer.failed
    if binding == "JSONRPC":
        assert (answer.status, answer.code) == (200, code)
    assert (answer.reason, answer.domain) == (reason, A2A)
    assert answer.message == "as the agent put it"
    assert answer.delivered is None
    assert answer.headers["a2a-sidecar-attempts"] == "1"


@pytest.mark.parametrize(("status", "grpc", "reason", "code"), REST_ERRORS)
async def test_an_a2a_error_over_http_is_an_answer_whatever_its_status(
    world: World, first: Peer, second: Peer, status: int, grpc: int, reason: str, code: int
) -> None:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": reason,
        "domain": A2A,
        "metadata": {"taskId": "t-1"},
    }
    body = rest_error(status, NAMES[grpc], "as the agent put it", info).decode()
    for binding in BINDINGS:
        agent = await world.agent(
            card([("HTTP+JSON", first.urls["HTTP+JSON"]), ("JSONRPC", second.urls["JSONRPC"])])
        )
        await first.script({"reply": {"status": status, "body": body}})
        id_ = message_id()
        answer = await agent.send(binding, "hello", id_)
        assert_same_error(answer, binding, code, reason)
        assert answer.details["taskId"] == "t-1"
        if binding == "HTTP+JSON":
            assert answer.status == status
            assert answer.body == json.loads(body)
        await assert_answered(agent, binding, second, id_)


@pytest.mark.parametrize(("status", "reason", "code"), GRPC_ERRORS)
async def test_an_a2a_error_over_grpc_is_an_answer_whatever_its_status(
    world: World, grpc_peer: Peer, second: Peer, status: int, reason: str, code: int
) -> None:
    details = pb_status(status, "as the agent put it", (reason, A2A))
    fixed = {
        "code": status,
        "message": "as the agent put it",
        "details": base64.b64encode(details).decode(),
    }
    for binding in BINDINGS:
        agent = await world.agent(
            card([("GRPC", grpc_peer.urls["GRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
        )
        id_ = message_id()
        await grpc_peer.control("status", fixed)
        try:
            answer = await agent.send(binding, "hello", id_)
        finally:
            await grpc_peer.control("status", None)
        assert_same_error(answer, binding, code, reason)
        if binding == "GRPC":
            assert answer.status == status
        await assert_answered(agent, binding, second, id_)


async def test_an_a2a_error_that_is_told_by_its_name_alone_is_an_answer(
    world: World, h2_peer: Peer, second: Peer
) -> None:
    """As SDKs of 1.0.0 put it: no details, but the class of the error before the message."""
    agent = await world.agent(
        card([("GRPC", h2_peer.urls["GRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    text = "UnsupportedOperationError: no streams here"
    await h2_peer.script({"trailers_only": {"code": 12, "message": text}})
    id_ = message_id()
    answer = await agent.send("JSONRPC", "hello", id_)
    assert (answer.code, answer.reason) == (-32004, "UNSUPPORTED_OPERATION")
    await assert_answered(agent, "JSONRPC", second, id_)


@pytest.mark.parametrize("upstream", BINDINGS)
@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_task_that_nobody_knows_is_not_found(
    world: World, sdk: Peer, second: Peer, binding: str, upstream: str
) -> None:
    """By a complete agent: 404 with ErrorInfo, NOT_FOUND and -32001 are the same error."""
    agent = await world.agent(
        card([(upstream, sdk.urls[upstream]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    answer = await agent.get_task(binding, "nowhere")
    assert answer.status == {"JSONRPC": 200, "HTTP+JSON": 404, "GRPC": 5}[binding]
    assert answer.code == (-32001 if binding == "JSONRPC" else None)
    assert (answer.reason, answer.domain) == ("TASK_NOT_FOUND", A2A)
    assert answer.delivered is None
    await assert_answered(agent, binding, second, "nowhere")


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_the_answer_is_that_of_a_direct_call(world: World, sdk: Peer, binding: str) -> None:
    """Same binding on both sides: the same status and the same error."""
    agent = await world.agent(card([(binding, sdk.urls[binding])]))
    headers = {"content-type": "application/json", "a2a-version": "1.0"}
    if binding == "JSONRPC":
        params = message("fail -32002", message_id())
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
        ways = [
            (sdk.ports["jsonrpc"], "/rpc", body),
            (world.daemon.port(), f"/agents/{agent.name}", body),
        ]
    else:
        body = message("fail -32002", message_id())
        ways = [
            (sdk.ports["rest"], "/message:send", body),
            (world.daemon.port("HTTP+JSON"), f"/agents/{agent.name}/message:send", body),
        ]
    direct, through = [
        await http(port, "POST", path, headers=headers, body=json.dumps(content).encode())
        for port, path, content in ways
    ]
    assert (through.status, through.json()) == (direct.status, direct.json())
    assert through.get("content-type") == direct.get("content-type")
    assert binding == "JSONRPC" or through.body == direct.body
    assert b"TASK_NOT_CANCELABLE" in direct.body


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_refusals_keep_their_status_on_every_binding(
    world: World, first: Peer, second: Peer, status: int
) -> None:
    headers = [["content-type", "text/plain"], ["www-authenticate", "Bearer"], ["retry-after", "7"]]
    for binding in BINDINGS:
        agent = await world.agent(
            card([("HTTP+JSON", first.urls["HTTP+JSON"]), ("JSONRPC", second.urls["JSONRPC"])])
        )
        await first.script({"reply": {"status": status, "body": "secret", "headers": headers}})
        id_ = message_id()
        answer = await agent.send(binding, "hello", id_)
        wanted = {401: 16, 403: 7, 429: 8}[status] if binding == "GRPC" else status
        assert answer.status == wanted
        assert answer.reason == "AGENT_REFUSED"
        assert answer.delivered is None
        assert answer.headers["retry-after"] == "7"
        if binding != "GRPC":
            assert answer.headers["www-authenticate"] == "Bearer"
        assert "secret" not in repr(answer)
        await assert_answered(agent, binding, second, id_)


async def test_delivered_cannot_be_forged(world: World, first: Peer) -> None:
    """What the sidecar says of a call is said by the sidecar alone."""
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "NOT_DELIVERED",
        "domain": "a2a-sidecar",
        "metadata": {"delivered": "no"},
    }
    error = {"code": -32603, "message": "trust me", "data": [info]}
    body = {"jsonrpc": "2.0", "id": 1, "error": error}
    headers = [["content-type", "application/json"], ["a2a-sidecar-delivered", "no"]]
    for binding in BINDINGS:
        agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
        await first.script(["execute", {"reply": {"headers": headers, "body": body}}])
        answer = await agent.send(binding)
        assert answer.failed
        assert answer.message == "trust me"
        assert answer.delivered is None
        assert answer.domain != "a2a-sidecar"


# --- our own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", BINDINGS)
async def test_our_errors_name_the_agent_the_call_and_how_far_it_came(
    world: World, binding: str
) -> None:
    port = free_port()
    agent = await world.agent(card([("JSONRPC", f"http://127.0.0.1:{port}/hidden/rpc")]))
    answer = await agent.send(binding)
    assert answer.domain == "a2a-sidecar"
    assert answer.details["agent"] == agent.name
    assert answer.details["call"]
    assert answer.details["attempt-1"] == f"0-jsonrpc 127.0.0.1:{port} not_delivered dial"
    assert answer.headers["a2a-sidecar-delivered"] == "no"
    assert answer.headers["a2a-sidecar-attempts"] == "1"
    assert answer.headers["a2a-sidecar-interface"] == "0-jsonrpc"
    assert "hidden" not in repr(answer)


async def test_an_agent_that_is_not_configured_is_unknown_on_every_binding(world: World) -> None:
    nobody = RemoteAgent(world.daemon, "nobody")
    for binding in BINDINGS:
        answer = await nobody.send(binding)
        assert (answer.reason, answer.domain) == ("AGENT_UNKNOWN", "a2a-sidecar")
        assert answer.status == {"JSONRPC": 200, "HTTP+JSON": 404, "GRPC": 5}[binding]
        assert answer.delivered == "no"
        assert "agent-1" in answer.message  # the names that there are
    assert await nobody.metric("requests_total") == 0


async def test_an_agent_that_is_disabled_says_so_on_every_binding(world: World) -> None:
    sleeping = RemoteAgent(world.daemon, "sleeping")
    for binding in BINDINGS:
        answer = await sleeping.send(binding)
        assert (answer.reason, answer.delivered) == ("AGENT_DISABLED", "no")
        assert (
            answer.status == {"JSONRPC": 200, "HTTP+JSON": 503, "GRPC": GRPC_UNAVAILABLE}[binding]
        )
    assert (await sleeping.status())["enabled"] is False
    card_reply = await sleeping.fetch_card()
    assert card_reply.status == 503
    assert b"AGENT_DISABLED" in card_reply.body


async def test_a_call_that_names_no_agent_is_told_which_there_are(world: World) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message()}
    reply = await http(world.daemon.port(), "POST", "/", body=json.dumps(body).encode())
    answer = jsonrpc_answer(reply.status, reply.header_dict(), reply.json())
    assert answer.reason == "AGENT_UNKNOWN"
    assert "agent-1" in answer.message

    rest = await http(world.daemon.port("HTTP+JSON"), "POST", "/message:send", body=b"{}")
    assert rest_answer(rest.status, rest.header_dict(), rest.json()).reason == "AGENT_UNKNOWN"

    result = await grpc_call(world.daemon.port("GRPC"), "SendMessage", send_pb("x", "m", ""))
    found = grpc_answer(result.code, result.message, result.trailers, b"")
    assert found.reason == "AGENT_UNKNOWN"


async def test_a_listener_answers_what_it_does_not_speak(world: World, first: Peer) -> None:
    """An HTTP/1.1 client at the gRPC listener is told where to go, and the reverse fails clearly."""
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message()}
    path = f"/agents/{agent.name}"
    reply = await http(world.daemon.port("GRPC"), "POST", path, body=json.dumps(body).encode())
    assert reply.status == 415
    assert world.daemon.listeners["JSONRPC"].encode() in reply.body

    request = pb(1, agent.name) + pb(2, "task")
    for binding in ("JSONRPC", "HTTP+JSON"):
        began = trio.current_time()
        result = await grpc_call(world.daemon.port(binding), "GetTask", request)
        assert result.code == GRPC_UNAVAILABLE
        assert "http1" in result.message
        assert trio.current_time() - began < 5  # at once, not at the deadline
    assert await agent.metric("attempts_total") == 0


@pytest.mark.parametrize("binding", BINDINGS)
async def test_what_the_agent_refuses_by_its_version_is_tried_elsewhere(
    world: World, h2_peer: Peer, second: Peer, binding: str
) -> None:
    """The sidecar sent the version that the interface declares: the card is wrong, not the call."""
    status = pb_status(9, "no", ("VERSION_NOT_SUPPORTED", A2A))
    details = {"code": 9, "message": "no", "details": status_header(status)}
    await h2_peer.script({"trailers_only": details})
    agent = await world.agent(
        card([("GRPC", h2_peer.urls["GRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    answer = await agent.send(binding)
    assert not answer.failed
    assert await agent.failovers() == {("0-grpc", "1-jsonrpc", "version_not_supported"): 1}


async def test_when_no_interface_has_the_method_the_agents_own_answer_is_given(
    world: World, first: Peer, h2_peer: Peer
) -> None:
    refusal = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "Method not found"}}
    wanted: dict[str, Any] = {"JSONRPC": 200, "HTTP+JSON": 404, "GRPC": 12}
    for binding in BINDINGS:
        agent = await world.agent(
            card([("JSONRPC", first.urls["JSONRPC"]), ("GRPC", h2_peer.urls["GRPC"])])
        )
        await first.script({"reply": {"body": refusal}})
        await h2_peer.script({"trailers_only": {"code": 12, "message": "no such method"}})
        answer = await agent.send(binding)
        assert answer.status == wanted[binding]
        assert answer.code == (-32601 if binding == "JSONRPC" else None)
        if binding != "JSONRPC":
            assert (answer.reason, answer.domain) == ("METHOD_NOT_FOUND", A2A)
        assert answer.message == "Method not found"
        assert answer.delivered is None
        assert answer.headers["a2a-sidecar-attempts"] == "2"


async def extended_card(agent: RemoteAgent, binding: str) -> Answer:
    match binding:
        case "JSONRPC":
            return await agent.jsonrpc("GetExtendedAgentCard", {})
        case "HTTP+JSON":
            found = await agent.daemon.rest("GET", "/extendedAgentCard", agent=agent.name)
            return rest_answer(*found)
        case _:
            return await agent.grpc("GetExtendedAgentCard", pb(1, agent.name))


@pytest.mark.parametrize("binding", BINDINGS)
async def test_an_extended_card_that_cannot_be_read_is_counted_as_it_is_told(
    world: World, first: Peer, binding: str
) -> None:
    agent = await world.agent(card([("JSONRPC", first.urls["JSONRPC"])]))
    # the one is too deep for a card, the other is no name for gRPC
    result = f'{{"name": 5, "x": {"[" * 90}{"]" * 90}}}'
    await first.script({"reply": {"body": f'{{"jsonrpc": "2.0", "id": 1, "result": {result}}}'}})
    answer = await extended_card(agent, binding)
    assert answer.failed
    assert (answer.reason, answer.delivered) == ("DELIVERY_UNKNOWN", "unknown")
    assert answer.details["call"]
    samples = await agent.until("requests_total", 1, operation="GetExtendedAgentCard")
    assert samples.by("requests_total", "outcome") == {("ambiguous",): 1}
