"""Headers and metadata over all nine pairs: what crosses, what does not, what is set per hop."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
import trio

from tests.harness import Peer, http, message, peer_sync
from tests.interop.callers import (
    BINDINGS,
    OPERATIONS,
    PAIRS,
    Between,
    Got,
    Target,
    agent_of,
    between,
    canonical,
    label,
    to_pb,
)
from tests.interop.h2_client import frame, h2_connection
from tests.peers.mini import event_pb, pb_status, status_header

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

TASK = {"id": "t-1", "contextId": "c-1", "status": {"state": "TASK_STATE_COMPLETED"}}
SEND, STREAM = "SendMessage", "SendStreamingMessage"


@dataclass
class Agents:
    """The scripted agents: one for the JSON bindings, one for gRPC."""

    http: Peer
    grpc: Peer

    def of(self, binding: str) -> Peer:
        return self.grpc if binding == "GRPC" else self.http


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with peer_sync("raw_http") as http_peer, peer_sync("h2_agent") as grpc:
        yield Agents(http_peer, grpc)


@pytest.fixture(scope="module")
def sidecar(agents: Agents) -> Iterator[Between]:
    with between({**agents.http.urls, **agents.grpc.urls}) as running:
        yield running


async def last_request(agent: Peer) -> list[tuple[str, str]]:
    request = (await agent.state())["requests"][-1]
    return [(name, value) for name, value in request["headers"]]


def values(headers: list[tuple[str, str]], name: str) -> list[str]:
    return [value for key, value in headers if key == name]


# --- from the application ---------------------------------------------------------------------

CROSSING = {
    "a2a-extensions": "https://example.org/ext/1, urn:two",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "a=1,b=2",
    "baggage": "user=x;p=1",
    "idempotency-key": "k-1",
    "x-request-id": "r 1",
    "x-api-key": "secret",
    "authorization": "Bearer of-the-caller",
    "x-data-bin": base64.b64encode(b"\x00\xff\x10").decode().rstrip("="),
}
STAYING = {
    "cookie": "a=b",
    "proxy-authorization": "Basic eA==",
    "a2a-sidecar-token": "t",
    "a2a-sidecar-anything": "x",
    "accept-language-of-nobody": "x",
}
HTTP_ONLY_STAYING = {
    "connection": "close, x-hop",
    "x-hop": "1",
    "keep-alive": "timeout=5",
    "te": "trailers",
    "upgrade": "h2c",
    "proxy-connection": "keep-alive",
    "grpc-timeout": "5S",
}
del STAYING["accept-language-of-nobody"]


@pytest.mark.parametrize(("down", "up"), PAIRS)
@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_end_to_end_headers_cross_and_others_do_not(
    method: str, down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    more = {} if down == "GRPC" else HTTP_ONLY_STAYING
    sent = {**CROSSING, **STAYING, **more}
    got = await sidecar.through(down, up).call(method, message(), headers=sent)
    assert got.fault is None
    seen = await last_request(agents.of(up))
    for name, value in CROSSING.items():
        assert values(seen, name) == [value], name
    for name in {**STAYING, **more}:
        if name != "connection" and (name, up) != ("te", "GRPC"):
            assert values(seen, name) == [], name
    assert values(seen, "a2a-version") == ["1.0"]
    agent = agents.of(up)
    authority = f"127.0.0.1:{next(iter(agent.ports.values()))}"
    assert values(seen, "host" if up != "GRPC" else ":authority") == [authority]
    assert not any(name.startswith("a2a-sidecar-") for name, _ in seen)
    if up == "GRPC":
        assert values(seen, "te") == ["trailers"]
        assert values(seen, "content-type") == ["application/grpc"]
        assert values(seen, "accept") == []
    else:
        assert values(seen, "accept-encoding") == ["identity"]
        assert values(seen, "content-type") == ["application/json"]
        assert values(seen, "te") == []


async def test_repeated_extensions_become_one_line(agents: Agents, sidecar: Between) -> None:
    """Some clients send a line for each URI; metadata should have them joined (section 3.2.6)."""
    for up in BINDINGS:
        async with h2_connection(sidecar.grpc_ports[agent_of(up)]) as connection:
            stream = await connection.call(
                SEND,
                frame(to_pb("SendMessageRequest", message())),
                metadata=[("a2a-extensions", "urn:a"), ("x-m", "1"), ("a2a-extensions", "urn:b")],
            )
            await stream.ended()
            assert stream.status == 0
        seen = await last_request(agents.of(up))
        assert values(seen, "a2a-extensions") == ["urn:a, urn:b"]
        assert values(seen, "x-m") == ["1"]


async def test_what_metadata_cannot_hold_is_left_out(agents: Agents, sidecar: Between) -> None:
    headers: dict[str, Any] = {"x-ok": "1", "x!odd": "1", "x-no-bin": "not base64!"}
    headers["x-note"] = "caf\u00e9".encode("latin-1")
    got = await sidecar.through("JSONRPC", "GRPC").call(SEND, message(), headers=headers)
    assert got.fault is None
    seen = await last_request(agents.grpc)
    assert values(seen, "x-ok") == ["1"]
    assert [name for name, _ in seen if name in headers] == ["x-ok"]


# --- from the agent ---------------------------------------------------------------------------

ANSWERED = {
    "a2a-extensions": "urn:active",
    "x-request-id": "r-9",
    "retry-after": "3",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}
WITHHELD = {
    "set-cookie": "a=b",
    "alt-svc": 'h2=":1"',
    "strict-transport-security": "max-age=1",
    "access-control-allow-origin": "*",
    "server": "agent",
    "location": "/x",
    "clear-site-data": "*",
    "a2a-version": "9.9",
    "a2a-sidecar-delivered": "no",
    "a2a-sidecar-interface": "7-forged",
    "a2a-sidecar-attempts": "99",
    "a2a-sidecar-new": "x",
}


def answer_steps(up: str, method: str, headers: dict[str, str]) -> list[Any]:
    """A successful answer with more headers."""
    more = [list(pair) for pair in headers.items()]
    result = {"task": TASK}
    if up == "GRPC":
        grpc = [[":status", "200"], ["content-type", "application/grpc"], *more]
        encoded = base64.b64encode(event_pb(result)).decode()
        return [{"headers": grpc}, {"message": encoded}, {"trailers": []}]
    body = {"jsonrpc": "2.0", "id": 1, "result": result} if up == "JSONRPC" else result
    if method == SEND:
        typed = [["content-type", "application/json"], *more]
        return [{"reply": {"headers": typed, "body": body}}]
    typed = [["content-type", "text/event-stream"], *more]
    return [{"reply": {"headers": typed, "body": f"data: {json.dumps(body)}\n\n"}}]


@pytest.mark.parametrize(("down", "up"), PAIRS)
@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_the_agents_headers_come_back_and_forged_ones_do_not(
    method: str, down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    agent = agents.of(up)
    await agent.script(answer_steps(up, method, {**ANSWERED, **WITHHELD}))
    got = await sidecar.through(down, up).call(method, message())
    assert got.fault is None
    pairs = [*got.headers, *got.trailers]
    for name, value in ANSWERED.items():
        assert values(pairs, name) == [value], name
    for name in WITHHELD:
        if name not in ("a2a-sidecar-interface", "a2a-sidecar-attempts"):
            assert values(pairs, name) == [], name
    assert values(pairs, "a2a-sidecar-interface") == [f"0-{label(up)}"]
    assert values(pairs, "a2a-sidecar-attempts") == ["1"]
    if down == "GRPC":
        names = [name for name, _ in got.trailers]
        assert {"a2a-sidecar-interface", "a2a-sidecar-attempts", "grpc-status"} <= set(names)
        assert values(got.headers, "a2a-extensions") == ["urn:active"]  # initial metadata


@pytest.mark.parametrize("down", BINDINGS)
async def test_trailing_metadata_comes_back_too(
    down: str, agents: Agents, sidecar: Between
) -> None:
    encoded = base64.b64encode(event_pb({"task": TASK})).decode()
    trailers = [["grpc-status", "0"], ["x-cost", "5"], ["a2a-sidecar-delivered", "no"]]
    await agents.grpc.script([{"headers": []}, {"message": encoded}, {"trailers": trailers}])
    got = await sidecar.through(down, "GRPC").call(SEND, message())
    assert got.result["task"]["id"] == "t-1"
    assert got.get("x-cost") == "5"
    assert got.get("a2a-sidecar-delivered") is None


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_delivered_cannot_be_forged(
    down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "NOT_DELIVERED",
        "domain": "a2a-sidecar",
        "metadata": {"delivered": "no"},
    }
    status = pb_status(9, "forged", ("NOT_DELIVERED", "a2a-sidecar"))
    headers = [["content-type", "application/json"], ["a2a-sidecar-delivered", "no"]]
    rpc = {"code": -32050, "message": "forged", "data": [info]}
    rest = {"code": 400, "status": "FAILED_PRECONDITION", "message": "forged", "details": [info]}
    trailers = [
        [":status", "200"],
        ["content-type", "application/grpc"],
        ["grpc-status", "9"],
        ["grpc-message", "forged"],
        ["grpc-status-details-bin", status_header(status)],
        ["a2a-sidecar-delivered", "no"],
    ]
    steps: dict[str, list[Any]] = {
        "JSONRPC": [
            {"reply": {"headers": headers, "body": {"jsonrpc": "2.0", "id": 1, "error": rpc}}}
        ],
        "HTTP+JSON": [{"reply": {"status": 400, "headers": headers, "body": {"error": rest}}}],
        "GRPC": [{"headers": trailers, "end": True}],
    }
    await agents.of(up).script(steps[up])
    got = await sidecar.through(down, up).call("GetTask", {"id": "t-1"})
    assert got.fault is not None
    assert got.fault.message == "forged"
    assert got.fault.own is None
    assert '"a2a-sidecar"' not in json.dumps(got.fault.raw or got.fault.details)
    assert got.get("a2a-sidecar-delivered") is None


# --- the version, per hop ---------------------------------------------------------------------

REQUESTS: dict[str, Any] = {
    "SendMessage": message(),
    "SendStreamingMessage": message(),
    "GetTask": {"id": "t-1"},
    "ListTasks": {"contextId": "c-1"},
    "CancelTask": {"id": "t-1"},
    "SubscribeToTask": {"id": "t-1"},
    "CreateTaskPushNotificationConfig": {"taskId": "t-1", "url": "https://example.org/"},
    "GetTaskPushNotificationConfig": {"taskId": "t-1", "id": "p-1"},
    "ListTaskPushNotificationConfigs": {"taskId": "t-1"},
    "DeleteTaskPushNotificationConfig": {"taskId": "t-1", "id": "p-1"},
    "GetExtendedAgentCard": {},
}
VERSIONS: list[dict[str, str]] = [{}, {"a2a-version": "1.0"}, {"a2a-version": "1.7"}]


async def call_with(target: Target, method: str, headers: dict[str, str]) -> Got:
    """A call without the version that the caller adds by itself, unless given."""
    sent = {"a2a-version": "", **headers}
    return await target.call(method, REQUESTS[method], headers=sent)


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_every_request_has_the_interfaces_version_once(
    down: str, up: str, agents: Agents, sidecar: Between
) -> None:
    agent = agents.of(up)
    target = sidecar.through(down, up)
    for number, method in enumerate(OPERATIONS):
        await call_with(target, method, VERSIONS[number % 3])
        assert values(await last_request(agent), "a2a-version") == ["1.0"], method


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("version", ["0.3", "2.0", "0.3.0", "x"])
async def test_another_version_is_refused_here(
    version: str, down: str, agents: Agents, sidecar: Between
) -> None:
    before = len((await agents.http.state())["requests"])
    for method in (SEND, STREAM):
        got = await call_with(sidecar.through(down, "JSONRPC"), method, {"a2a-version": version})
        assert got.fault is not None
        assert got.fault.kind == "VERSION_NOT_SUPPORTED"
    assert len((await agents.http.state())["requests"]) == before


async def test_the_version_in_a_query_goes_no_further(agents: Agents, sidecar: Between) -> None:
    port = sidecar.sidecar.port("HTTP+JSON")
    for up in BINDINGS:
        path = f"/agents/{agent_of(up)}/tasks/t-1?A2A-Version=1.0&historyLength=2"
        assert (await http(port, "GET", path)).status == 404  # no such task there
        request = (await agents.of(up).state())["requests"][-1]
        assert "ersion" not in request.get("path", "") + request.get("body", "")
        if up == "HTTP+JSON":
            assert request["path"] == "/tasks/t-1?historyLength=2"
        old = path.replace("1.0", "0.3")
        refused = await http(port, "GET", old)
        assert refused.status == 400
        assert refused.json()["error"]["details"][0]["reason"] == "VERSION_NOT_SUPPORTED"
        # where both are given the header wins
        wins = await http(port, "GET", old, headers={"a2a-version": "1.0"})
        assert wins.status == 404


# --- tenants ----------------------------------------------------------------------------------


# Servers that decode a path before they route it cannot be asked for one with a slash.
TENANTS = {"JSONRPC": "acme 7/ü", "HTTP+JSON": "acme 7ü", "GRPC": "acme 7/ü"}


@pytest.fixture(scope="module")
def tenants() -> Iterator[tuple[Peer, Between]]:
    """An agent whose interfaces have a tenant each; it shows the requests that it got."""
    with peer_sync("sdk_agent") as agent:
        with between(agent.urls, tenants=TENANTS) as running:
            yield agent, running


@pytest.fixture(scope="module")
def no_tenants(tenants: tuple[Peer, Between]) -> Iterator[Between]:
    """The same agent, without tenants in its card."""
    with between(tenants[0].urls) as running:
        yield running


HOOK = {"url": "https://example.org/hook", "tenant": "nested"}
WITH_TENANT: list[tuple[str, Any]] = [
    (SEND, {**message(), "configuration": {"taskPushNotificationConfig": HOOK}}),
    (STREAM, {**message(), "configuration": {"taskPushNotificationConfig": HOOK}}),
    *((method, REQUESTS[method]) for method in list(OPERATIONS)[2:]),
]


def tenants_seen(request: dict[str, Any], up: str) -> set[Any]:
    """Every tenant in a request that the agent got; None where a place has none."""
    body = json.loads(request["body"]) if request["body"] else {}
    found = set()
    if up == "HTTP+JSON":
        first = request["path"].removeprefix("/").split("/")[0].partition("?")[0]
        own = {"tasks", "message:send", "message:stream", "extendedAgentCard"}
        found.add(None if first in own else unquote(first))
        assert "tenant=" not in request["path"]
        assert body.get("tenant") in (None, unquote(first))
    else:
        params = body.get("params", {}) if up == "JSONRPC" else body
        found.add(params.get("tenant"))
        body = params
    nested = body.get("configuration", {}).get("taskPushNotificationConfig")
    if nested is not None:
        found.add(nested.get("tenant"))
    return found


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_the_interfaces_tenant_is_sent_whatever_the_caller_says(
    down: str, up: str, tenants: tuple[Peer, Between]
) -> None:
    agent, sidecar = tenants
    for number, (method, request) in enumerate(WITH_TENANT):
        given = ("evil", None, "")[number % 3]
        sent = request if given is None else {**request, "tenant": given}
        await sidecar.through(down, up).call(method, sent)
        seen = (await agent.state())["requests"][-1]
        assert tenants_seen(seen, up) == {TENANTS[up]}, method


def test_a_tenant_is_one_segment_of_the_path(agents: Agents) -> None:
    with between(agents.http.urls, tenants={"HTTP+JSON": "a/b?c#d%"}) as running:

        async def path() -> str:
            await running.through("JSONRPC", "HTTP+JSON").call("GetTask", {"id": "t:1/é"})
            return str((await agents.http.state())["requests"][-1]["path"])

        assert trio.run(path) == "/a%2Fb%3Fc%23d%25/tasks/t%3A1%2F%C3%A9"


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_without_a_tenant_in_the_card_none_is_sent(
    down: str, up: str, tenants: tuple[Peer, Between], no_tenants: Between
) -> None:
    agent = tenants[0]
    for method, request in WITH_TENANT:
        await no_tenants.through(down, up).call(method, {**request, "tenant": "x"})
        seen = (await agent.state())["requests"][-1]
        assert tenants_seen(seen, up) == {None}, method


@pytest.mark.parametrize(("down", "up"), PAIRS)
async def test_answers_have_the_callers_tenant(
    down: str, up: str, tenants: tuple[Peer, Between]
) -> None:
    target = tenants[1].through(down, up)
    task = (await target.call(SEND, message("input"))).result["task"]["id"]
    config = {"taskId": task, "id": "c", "url": HOOK["url"]}
    for given in ("mine", ""):
        sent = {"tenant": given} if given else {}
        made = await target.call("CreateTaskPushNotificationConfig", {**config, **sent})
        got = await target.call(
            "GetTaskPushNotificationConfig", {"taskId": task, "id": "c", **sent}
        )
        listed = await target.call("ListTaskPushNotificationConfigs", {"taskId": task, **sent})
        for one in (made.result, got.result, *listed.result["configs"]):
            shown = canonical("TaskPushNotificationConfig", one)
            assert shown.get("tenant", "") == given


async def test_on_a_shared_grpc_listener_the_tenant_or_the_authority_names_the_agent(
    agents: Agents, sidecar: Between
) -> None:
    port = sidecar.shared_grpc()
    plain = to_pb("SendMessageRequest", {**message(), "tenant": "of no agent"})
    for up in BINDINGS:
        name = agent_of(up)
        request = to_pb("SendMessageRequest", {**message(), "tenant": name})
        named = f"{name}.localhost:{port}"
        for body, authority, host in (
            (request, None, None),
            (plain, named, None),
            (plain, None, named),
        ):
            async with h2_connection(port) as connection:
                stream = await connection.call(SEND, frame(body), authority=authority, host=host)
                assert await stream.next() is not None
                await stream.ended()
            assert stream.status == 0
            assert stream.get("a2a-sidecar-interface") == f"0-{label(up)}"
    async with h2_connection(port) as connection:
        stream = await connection.call(SEND, frame(plain))
        await stream.ended()
        assert stream.status == 5
        assert "grpc, http-json, jsonrpc" in (stream.get("grpc-message") or "")


# --- deadlines --------------------------------------------------------------------------------


def milliseconds(timeout: str) -> float:
    units = {"H": 3.6e6, "M": 6e4, "S": 1e3, "m": 1, "u": 1e-3, "n": 1e-6}
    return int(timeout[:-1]) * units[timeout[-1]]


@pytest.mark.parametrize("up", BINDINGS)
@pytest.mark.parametrize("method", [SEND, STREAM])
async def test_a_deadline_ends_the_call_here_and_at_the_agent(
    method: str, up: str, agents: Agents, sidecar: Between
) -> None:
    agent = agents.of(up)
    before = await agent.state()
    steps: list[Any] = ["execute", "hang"]
    if method == STREAM:
        encoded = base64.b64encode(event_pb({"task": TASK})).decode()
        rest = {"jsonrpc": "2.0", "id": 1, "result": {"task": TASK}}
        rest = rest if up == "JSONRPC" else {"task": TASK}
        sse = {"sse": [{"data": rest}, {"gate": "never"}]}
        grpc = [{"headers": []}, {"message": encoded}, "hang"]
        steps = ["execute", *(grpc if up == "GRPC" else [sse])]
    await agent.script(steps)
    started = trio.current_time()
    got = await sidecar.through("GRPC", up).call(
        method, message(), headers={"grpc-timeout": "700m"}
    )
    assert 0.65 < trio.current_time() - started < 1.5
    assert got.fault is not None
    assert got.fault.status == 4
    assert len(got.results) == (method == STREAM)
    own = got.fault.own
    assert own is not None
    assert (own["reason"], own["metadata"]["delivered"]) == ("DEADLINE_EXCEEDED", "unknown")
    assert got.get("a2a-sidecar-delivered") == "unknown"
    timeouts = values(await last_request(agent), "grpc-timeout")
    if up == "GRPC":
        assert len(timeouts) == 1
        assert 400 < milliseconds(timeouts[0]) <= 700
        await agent.until(lambda state: state["resets"][len(before["resets"]) :] == [8])
    else:
        assert timeouts == []
        await agent.until(lambda state: state["open_connections"] <= before["open_connections"])
    after = await agent.state()
    assert after["executions"] == before["executions"] + 1


async def test_without_a_deadline_none_is_made(agents: Agents, sidecar: Between) -> None:
    for down in BINDINGS:
        await sidecar.through(down, "GRPC").call(SEND, message())
        assert values(await last_request(agents.grpc), "grpc-timeout") == []


async def test_a_deadline_that_has_passed_sends_nothing(agents: Agents, sidecar: Between) -> None:
    for up in BINDINGS:
        before = (await agents.of(up).state())["executions"]
        got = await sidecar.through("GRPC", up).call(
            SEND, message(), headers={"grpc-timeout": "1m"}
        )
        assert got.fault is not None
        assert got.fault.status == 4
        assert got.get("a2a-sidecar-delivered") == "no"
        assert (await agents.of(up).state())["executions"] == before
