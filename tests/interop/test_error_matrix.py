"""Errors of scripted agents over all nine pairs: unary, before a stream's first event, and in it.

What an agent of each binding sends is written here by the specification's tables (5.4, 9.5, 10.6,
11.6), and so is what the caller must get.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import trio
from google.protobuf import any_pb2, json_format
from google.rpc import error_details_pb2, status_pb2

from tests.harness import Peer, message, peer_sync
from tests.interop.callers import (
    A2A_DOMAIN,
    BINDINGS,
    ERROR_INFO,
    OPERATIONS,
    PAIRS,
    Between,
    Fault,
    Got,
    Target,
    between,
    direct,
    to_pb,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

GRPC_NAMES = {
    3: "INVALID_ARGUMENT",
    5: "NOT_FOUND",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    16: "UNAUTHENTICATED",
}
BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"


@dataclass
class Agents:
    """The scripted agents: one for the JSON bindings, one for gRPC."""

    http: Peer
    grpc: Peer
    urls: dict[str, str]

    def of(self, binding: str) -> Peer:
        return self.grpc if binding == "GRPC" else self.http


@pytest.fixture(scope="module")
def agents() -> Iterator[Agents]:
    with peer_sync("raw_http") as http, peer_sync("h2_agent") as grpc:
        yield Agents(http, grpc, {**http.urls, **grpc.urls})


@pytest.fixture(scope="module")
def sidecar(agents: Agents) -> Iterator[Between]:
    with between(agents.urls) as running:
        yield running
        for peer in (agents.http, agents.grpc):
            assert trio.run(peer.state)["script_left"] == 0  # every script was played


# --- what agents send -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Error:
    """One A2A error, in all bindings."""

    code: int
    reason: str
    http: int
    grpc: int
    message: str = "it is so: 50% of “π”"
    metadata: dict[str, str] = field(default_factory=lambda: {"k": "v", "ü": "1"})
    more: tuple[dict[str, Any], ...] = ()

    @property
    def details(self) -> list[dict[str, Any]]:
        info = {
            "@type": ERROR_INFO,
            "reason": self.reason,
            "domain": A2A_DOMAIN,
            "metadata": self.metadata,
        }
        return [info, *self.more]

    def rpc(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "data": self.details}

    def rest(self) -> dict[str, Any]:
        name = GRPC_NAMES[self.grpc]
        error = {"code": self.http, "status": name, "message": self.message}
        return {"error": {**error, "details": self.details}}

    def status(self) -> str:
        """grpc-status-details-bin."""
        return status_details(self.grpc, self.message, self.details)


def status_details(code: int, text: str, details: list[dict[str, Any]]) -> str:
    status = status_pb2.Status(code=code, message=text)
    for detail in details:
        value = {key: item for key, item in detail.items() if key != "@type"}
        kind = getattr(error_details_pb2, detail["@type"].rpartition(".")[2])
        packed = any_pb2.Any()
        packed.Pack(json_format.ParseDict(value, kind()))
        status.details.append(packed)
    return base64.b64encode(status.SerializeToString()).decode()


ERRORS = [
    Error(code=-32001, reason="TASK_NOT_FOUND", http=404, grpc=5),
    Error(code=-32002, reason="TASK_NOT_CANCELABLE", http=400, grpc=9),
    Error(code=-32003, reason="PUSH_NOTIFICATION_NOT_SUPPORTED", http=400, grpc=9),
    Error(code=-32004, reason="UNSUPPORTED_OPERATION", http=400, grpc=9),
    Error(code=-32005, reason="CONTENT_TYPE_NOT_SUPPORTED", http=400, grpc=3),
    Error(code=-32006, reason="INVALID_AGENT_RESPONSE", http=500, grpc=13),
    Error(code=-32007, reason="EXTENDED_AGENT_CARD_NOT_CONFIGURED", http=400, grpc=9),
    Error(code=-32008, reason="EXTENSION_SUPPORT_REQUIRED", http=400, grpc=9),
    Error(code=-32600, reason="INVALID_REQUEST", http=400, grpc=3),
    Error(
        code=-32602,
        reason="INVALID_PARAMS",
        http=400,
        grpc=3,
        more=(
            {
                "@type": BAD_REQUEST,
                "fieldViolations": [{"field": "message.message_id", "description": "required"}],
            },
        ),
    ),
    Error(code=-32603, reason="INTERNAL_ERROR", http=500, grpc=13),
]
# These two say that the interface does not serve the call; of the only interface they are the answer.
NOT_SERVED = [
    Error(code=-32601, reason="METHOD_NOT_FOUND", http=404, grpc=12),
    Error(code=-32009, reason="VERSION_NOT_SUPPORTED", http=400, grpc=9),
]
FIRST_EVENT = {"task": {"id": "t-1", "contextId": "c-1", "status": {"state": "TASK_STATE_WORKING"}}}


def unary_steps(binding: str, error: Error) -> list[Any]:
    """An agent's answer with an error; also to a stream, before any event."""
    match binding:
        case "JSONRPC":
            body = {"jsonrpc": "2.0", "id": 1, "error": error.rpc()}
            return [{"reply": {"status": 200, "body": body}}]
        case "HTTP+JSON":
            return [{"reply": {"status": error.http, "body": error.rest()}}]
        case _:
            text = quote(error.message, safe=" :")
            how = {"code": error.grpc, "message": text, "details": error.status()}
            return [{"trailers_only": how}]


def sse_error(data: Any) -> str:
    return f"event: error\r\ndata: {json.dumps(data)}\r\n\r\n"


def stream_steps(binding: str, error: Error, events: list[Any]) -> list[Any]:
    """A stream that ends with an error."""
    match binding:
        case "JSONRPC":
            made = [{"data": {"jsonrpc": "2.0", "id": 1, "result": event}} for event in events]
            last = sse_error({"jsonrpc": "2.0", "id": 1, "error": error.rpc()})
            return [{"sse": [*made, last]}]
        case "HTTP+JSON":
            return [{"sse": [*({"data": event} for event in events), sse_error(error.rest())]}]
        case _:
            trailers = [
                ["grpc-status", str(error.grpc)],
                ["grpc-message", quote(error.message, safe=" :")],
                ["grpc-status-details-bin", error.status().rstrip("=")],
            ]
            return [*grpc_messages(events), {"trailers": trailers}]


def grpc_messages(events: list[Any]) -> list[Any]:
    encoded = [base64.b64encode(to_pb("StreamResponse", event)).decode() for event in events]
    return [{"headers": []}, *({"message": message} for message in encoded)]


# --- calling ----------------------------------------------------------------------------------

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


async def call(target: Target, peer: Peer, method: str, steps: list[Any]) -> Got:
    await peer.script(steps)
    return await target.call(method, REQUESTS[method])


def check(got: Got, error: Error, down: str, up: str) -> None:
    fault = got.fault
    assert fault is not None
    assert fault.kind == error.reason
    assert fault.message == error.message
    assert fault.status == {"JSONRPC": 200, "HTTP+JSON": error.http, "GRPC": error.grpc}[down]
    if down == "JSONRPC":
        assert fault.code == error.code
    assert fault.details == error.details, up
    assert fault.own is None
    assert got.get("a2a-sidecar-delivered") is None


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
async def test_an_error_crosses_whole(
    error: Error, down: str, agents: Agents, sidecar: Between
) -> None:
    for up in BINDINGS:
        target, agent = sidecar.through(down, up), agents.of(up)
        check(await call(target, agent, "SendMessage", unary_steps(up, error)), error, down, up)
        for steps in (unary_steps(up, error), stream_steps(up, error, [])):
            opened = await call(target, agent, "SendStreamingMessage", steps)
            check(opened, error, down, up)
            assert opened.results == []
            check_open_form(opened, down, error)
        steps = stream_steps(up, error, [FIRST_EVENT])
        broken = await call(target, agent, "SendStreamingMessage", steps)
        check(broken, error, down, up)
        assert broken.results == [FIRST_EVENT]
        assert broken.ids == ([1, 1] if down == "JSONRPC" else [])
        assert broken.event_names[1:] == ([] if down == "GRPC" else ["error"])


def check_open_form(got: Got, down: str, error: Error) -> None:
    """The form of an error before any event."""
    match down:
        case "JSONRPC":  # some clients lose a plain body where they asked for a stream
            assert (got.status, got.content_type) == (200, "text/event-stream")
            assert (got.event_names, got.ids) == (["error"], [1])
        case "HTTP+JSON":
            assert (got.status, got.content_type) == (error.http, "application/json")
        case _:
            assert got.trailers == []  # trailers-only


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("method", OPERATIONS)
async def test_every_operation_brings_an_error_back(
    method: str, down: str, agents: Agents, sidecar: Between
) -> None:
    error = ERRORS[list(OPERATIONS).index(method)]
    for up in BINDINGS:
        got = await call(sidecar.through(down, up), agents.of(up), method, unary_steps(up, error))
        check(got, error, down, up)
        assert got.get("a2a-sidecar-attempts") == "1"


@pytest.mark.parametrize("method", ["SendMessage", "SendStreamingMessage"])
@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("error", NOT_SERVED, ids=lambda error: error.reason)
async def test_of_the_only_interface_not_served_is_the_answer(
    error: Error, down: str, method: str, agents: Agents, sidecar: Between
) -> None:
    for up in BINDINGS:
        target, agent = sidecar.through(down, up), agents.of(up)
        check(await call(target, agent, method, unary_steps(up, error)), error, down, up)


# --- spellings of other agents ----------------------------------------------------------------

OLD_STATUSES = [
    (Error(code=-32002, reason="TASK_NOT_CANCELABLE", http=409, grpc=9), 400),
    (Error(code=-32003, reason="PUSH_NOTIFICATION_NOT_SUPPORTED", http=501, grpc=12), 400),
    (Error(code=-32004, reason="UNSUPPORTED_OPERATION", http=501, grpc=12), 400),
    (Error(code=-32005, reason="CONTENT_TYPE_NOT_SUPPORTED", http=415, grpc=3), 400),
    (Error(code=-32006, reason="INVALID_AGENT_RESPONSE", http=502, grpc=13), 500),
]


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("old", OLD_STATUSES, ids=lambda old: old[0].reason)
async def test_errors_with_the_statuses_of_1_0_0_are_known_by_their_reason(
    old: tuple[Error, int], down: str, agents: Agents, sidecar: Between
) -> None:
    error, _ = old
    for up in ("HTTP+JSON", "GRPC"):
        target, agent = sidecar.through(down, up), agents.of(up)
        got = await call(target, agent, "GetTask", unary_steps(up, error))
        assert got.fault is not None
        assert got.fault.kind == error.reason
        assert got.fault.details == error.details
        assert got.fault.own is None
        if down == up:  # as it was sent
            assert got.fault.status == (error.grpc if down == "GRPC" else error.http)


@pytest.mark.parametrize("down", BINDINGS)
async def test_an_unknown_code_stays_what_it_is(
    down: str, agents: Agents, sidecar: Between
) -> None:
    error = {"code": -32050, "message": "own", "data": {"any": [1.0, 2], "thing": None}}
    for method in ("GetTask", "SendStreamingMessage"):
        steps = [{"reply": {"body": {"jsonrpc": "2.0", "id": 1, "error": error}}}]
        got = await call(sidecar.through(down, "JSONRPC"), agents.http, method, steps)
        assert got.fault is not None
        assert got.fault.message == "own"
        assert got.fault.own is None
        match down:
            case "JSONRPC":
                assert got.fault.raw == error
            case "HTTP+JSON":
                assert got.fault.status == 500
                assert got.fault.details[0]["metadata"]["code"] == "-32050"
            case _:
                assert got.fault.status == 2
                assert got.fault.details[0]["metadata"]["code"] == "-32050"


@pytest.mark.parametrize("down", BINDINGS)
async def test_a_status_without_details_is_no_guessed_a2a_error(
    down: str, agents: Agents, sidecar: Between
) -> None:
    steps = [{"trailers_only": {"code": 9, "message": "not now"}}]
    got = await call(sidecar.through(down, "GRPC"), agents.grpc, "CancelTask", steps)
    assert got.fault is not None
    assert got.fault.message == "not now"
    expected = {"JSONRPC": ("INTERNAL_ERROR", 200), "HTTP+JSON": ("HTTP 400", 400)}
    assert (got.fault.kind, got.fault.status) == expected.get(down, ("gRPC 9", 9))


@pytest.mark.parametrize("down", BINDINGS)
async def test_metadata_that_is_not_strings_becomes_strings_elsewhere(
    down: str, agents: Agents, sidecar: Between
) -> None:
    """The type is map<string, string>; some receivers drop the ErrorInfo otherwise."""
    errors = [{"field": "f", "message": "m"}]
    info = {"reason": "INVALID_PARAMS", "domain": A2A_DOMAIN, "metadata": {"errors": errors}}
    error = {"code": -32602, "message": "no", "data": [{"@type": ERROR_INFO, **info}]}
    steps = [{"reply": {"body": {"jsonrpc": "2.0", "id": 1, "error": error}}}]
    got = await call(sidecar.through(down, "JSONRPC"), agents.http, "GetTask", steps)
    assert got.fault is not None
    assert got.fault.kind == "INVALID_PARAMS"
    seen = got.fault.details[0]["metadata"]["errors"]
    assert seen == errors if down == "JSONRPC" else json.loads(seen) == errors


# --- authentication and limits ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An answer that is no A2A error and ends the call."""

    http: int
    grpc: int
    header: tuple[str, str] = ("www-authenticate", 'Bearer realm="agents", error="invalid_token"')

    def steps(self, binding: str, body: str) -> list[Any]:
        headers = [["content-type", "application/json"], list(self.header)]
        match binding, body:
            case "GRPC", "own":
                details = [{"@type": ERROR_INFO, "reason": "NO", "domain": "example.org"}]
                trailers = status_details(self.grpc, "no", details).rstrip("=")
                more = [["grpc-status-details-bin", trailers]]
                return self.trailers(more)
            case "GRPC", _:
                return self.trailers([])
            case "JSONRPC", "own":
                reply: Any = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32000, "message": "no"}}
            case "HTTP+JSON", "own":
                name = GRPC_NAMES[self.grpc]
                reply = {"error": {"code": self.http, "status": name, "message": "no"}}
            case _:
                headers[0][1] = "text/html"
                reply = "<h1>no</h1>"
        return [{"reply": {"status": self.http, "headers": headers, "body": reply}}]

    def trailers(self, more: list[list[str]]) -> list[Any]:
        head = [[":status", "200"], ["content-type", "application/grpc"]]
        status = [["grpc-status", str(self.grpc)], ["grpc-message", "no"], list(self.header)]
        return [{"headers": [*head, *status, *more], "end": True}]


REFUSALS = [
    Refusal(http=401, grpc=16),
    Refusal(http=403, grpc=7),
    Refusal(http=429, grpc=8, header=("retry-after", "7")),
]


# Every operation with one of them, and what sends and streams with all.
REFUSED = [(REFUSALS[n % 3], method) for n, method in enumerate(OPERATIONS)]
REFUSED += [
    (refusal, method)
    for method in list(OPERATIONS)[:2]
    for refusal in REFUSALS
    if (refusal, method) not in REFUSED
]


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize(("refusal", "method"), REFUSED, ids=lambda x: str(getattr(x, "http", x)))
async def test_authentication_and_limits_are_told_as_such(
    refusal: Refusal, method: str, down: str, agents: Agents, sidecar: Between
) -> None:
    steps = refusal.steps(down, "own")
    expected = await call(direct(down, agents.urls[down]), agents.of(down), method, steps)
    assert expected.fault is not None
    for up in BINDINGS:
        for body in ("own", "other"):
            got = await call(
                sidecar.through(down, up), agents.of(up), method, refusal.steps(up, body)
            )
            fault = got.fault
            assert fault is not None
            assert fault.kind == expected.fault.kind, (up, body)
            assert fault.status == expected.fault.status == got.status
            assert got.get(refusal.header[0]) == refusal.header[1]
            assert got.get("a2a-sidecar-delivered") is None
            assert got.get("a2a-sidecar-attempts") == "1"
            if body == "own" and up != "JSONRPC":
                assert fault.message == "no"
            if down == "JSONRPC":
                assert got.content_type == "application/json"
                assert fault.code == (-32000 if (up, body) == ("JSONRPC", "own") else -32603)


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal.http))
async def test_authentication_that_ends_in_the_middle_of_a_stream(
    refusal: Refusal, down: str, agents: Agents, sidecar: Between
) -> None:
    status = {"code": refusal.http, "status": GRPC_NAMES[refusal.grpc], "message": "no"}
    endings = {
        "HTTP+JSON": [{"sse": [{"data": FIRST_EVENT}, sse_error({"error": status})]}],
        "GRPC": [
            *grpc_messages([FIRST_EVENT]),
            {"trailers": [["grpc-status", str(refusal.grpc)], ["grpc-message", "no"]]},
        ],
    }
    for up, steps in endings.items():
        got = await call(sidecar.through(down, up), agents.of(up), "SendStreamingMessage", steps)
        assert got.results == [FIRST_EVENT]
        fault = got.fault
        assert isinstance(fault, Fault)
        assert fault.message == "no"
        match down:
            case "JSONRPC":
                assert (fault.code, fault.details[0]["reason"]) == (-32603, "AGENT_REFUSED")
            case "HTTP+JSON":
                assert fault.kind == f"HTTP {refusal.http}"
            case _:
                assert fault.kind == f"gRPC {refusal.grpc}"


@pytest.mark.parametrize("down", BINDINGS)
@pytest.mark.parametrize("error", NOT_SERVED, ids=lambda error: error.reason)
async def test_once_events_have_come_every_error_is_an_answer(
    error: Error, down: str, agents: Agents, sidecar: Between
) -> None:
    for up in BINDINGS:
        target, agent = sidecar.through(down, up), agents.of(up)
        steps = stream_steps(up, error, [FIRST_EVENT])
        got = await call(target, agent, "SendStreamingMessage", steps)
        check(got, error, down, up)
        assert got.results == [FIRST_EVENT]


@pytest.mark.parametrize("down", BINDINGS)
async def test_gzipped_messages_are_read(down: str, agents: Agents, sidecar: Between) -> None:
    encoded = base64.b64encode(to_pb("StreamResponse", FIRST_EVENT)).decode()
    zipped = {"message": encoded, "gzip": True}
    target = sidecar.through(down, "GRPC")
    steps: list[Any] = [zipped, {"trailers": []}]
    got = await call(target, agents.grpc, "SendMessage", steps)
    assert got.results == [FIRST_EVENT]
    got = await call(target, agents.grpc, "SendStreamingMessage", [zipped, *steps])
    assert got.results == [FIRST_EVENT, FIRST_EVENT]


async def test_many_calls_at_once_keep_their_answers_apart(sidecar: Between) -> None:
    async def one(down: str, up: str, number: int) -> None:
        text = f"{down} {up} {number}"
        target = sidecar.through(down, up)
        got = await target.call("SendMessage", message(text, text), seconds=30)
        assert got.result["task"]["artifacts"][0]["parts"] == [{"text": text}]

    async with trio.open_nursery() as nursery:
        for down, up in PAIRS:
            for number in range(20):
                nursery.start_soon(one, down, up, number)
