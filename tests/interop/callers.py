"""One A2A call in any binding, and what came back in one form; agents and the sidecar in between.

The callers know nothing of the program under test: HTTP goes over h11, gRPC over h2, and protobuf's
own JSON printer is used with the official schema.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import trio
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from sidecar._pb import a2a_pb2
from tests.harness import Sidecar, card, free_port, http, interface, open_stream, toml, write_card
from tests.interop.h2_client import Connection, Stream, frame, h2_connection
from tests.support.processes import Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

BINDINGS = ("JSONRPC", "HTTP+JSON", "GRPC")
PAIRS = [(down, up) for down in BINDINGS for up in BINDINGS]
A2A_DOMAIN = "a2a-protocol.org"
ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"


# --- the eleven operations, from the specification's tables -----------------------------------


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Names of the messages, and the route of HTTP+JSON."""

    request: str
    response: str
    verb: str
    path: str
    query: bool = False
    body: bool = False

    @property
    def streaming(self) -> bool:
        """Whether it answers with events."""
        return self.response == "StreamResponse"


_CONFIGS = "/tasks/{taskId}/pushNotificationConfigs"
OPERATIONS = {
    "SendMessage": Operation(
        request="SendMessageRequest",
        response="SendMessageResponse",
        verb="POST",
        path="/message:send",
        body=True,
    ),
    "SendStreamingMessage": Operation(
        request="SendMessageRequest",
        response="StreamResponse",
        verb="POST",
        path="/message:stream",
        body=True,
    ),
    "GetTask": Operation(
        request="GetTaskRequest", response="Task", verb="GET", path="/tasks/{id}", query=True
    ),
    "ListTasks": Operation(
        request="ListTasksRequest",
        response="ListTasksResponse",
        verb="GET",
        path="/tasks",
        query=True,
    ),
    "CancelTask": Operation(
        request="CancelTaskRequest",
        response="Task",
        verb="POST",
        path="/tasks/{id}:cancel",
        body=True,
    ),
    "SubscribeToTask": Operation(
        request="SubscribeToTaskRequest",
        response="StreamResponse",
        verb="POST",
        path="/tasks/{id}:subscribe",
    ),
    "CreateTaskPushNotificationConfig": Operation(
        request="TaskPushNotificationConfig",
        response="TaskPushNotificationConfig",
        verb="POST",
        path=_CONFIGS,
        body=True,
    ),
    "GetTaskPushNotificationConfig": Operation(
        request="GetTaskPushNotificationConfigRequest",
        response="TaskPushNotificationConfig",
        verb="GET",
        path=_CONFIGS + "/{id}",
    ),
    "ListTaskPushNotificationConfigs": Operation(
        request="ListTaskPushNotificationConfigsRequest",
        response="ListTaskPushNotificationConfigsResponse",
        verb="GET",
        path=_CONFIGS,
        query=True,
    ),
    "DeleteTaskPushNotificationConfig": Operation(
        request="DeleteTaskPushNotificationConfigRequest",
        response="Empty",
        verb="DELETE",
        path=_CONFIGS + "/{id}",
    ),
    "GetExtendedAgentCard": Operation(
        request="GetExtendedAgentCardRequest",
        response="AgentCard",
        verb="GET",
        path="/extendedAgentCard",
    ),
}


def to_pb(name: str, value: Any) -> bytes:
    """A message in protobuf; members that the schema does not have are an error."""
    message = json_format.ParseDict(value, getattr(a2a_pb2, name)())
    serialized: bytes = message.SerializeToString()
    return serialized


def from_pb(name: str, data: bytes) -> Any:
    """A message as a JSON value."""
    if name == "Empty":
        assert data == b""
        return {}
    return json_format.MessageToDict(getattr(a2a_pb2, name).FromString(data))


def canonical(name: str, value: Any) -> Any:
    """A JSON message in the one spelling that protobuf prints; unknown members are an error."""
    if name == "Empty":
        assert value in (None, {})
        return {}
    return from_pb(name, to_pb(name, value))


# --- how a call ended -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error as its binding says it."""

    kind: str
    """The A2A error by the rules of SDK clients: a reason, or ``HTTP 401``, ``gRPC 16``."""
    status: int
    """HTTP status of the answer; gRPC: the status."""
    message: str
    code: int | None = None
    details: list[Any] = field(default_factory=list)
    raw: Any = None

    @property
    def own(self) -> dict[str, Any] | None:
        """The sidecar's own ErrorInfo."""
        return next((d for d in self.details if d.get("domain") == "a2a-sidecar"), None)


@dataclass(kw_only=True)
class Got:
    """What came of a call: a result or events, and an error or not."""

    results: list[Any] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """The results as they were written, without their envelope."""
    fault: Fault | None = None
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    """Headers, or initial metadata."""
    trailers: list[tuple[str, str]] = field(default_factory=list)
    content_type: str = ""
    event_names: list[str] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    """JSON-RPC: the id of each response."""

    def get(self, name: str) -> str | None:
        """The first value among headers and trailers."""
        pairs = [*self.headers, *self.trailers]
        return next((value for key, value in pairs if key == name), None)

    @property
    def result(self) -> Any:
        """The one result of a call that succeeded."""
        assert self.fault is None, self.fault
        (result,) = self.results
        return result


_REASONS = {
    -32001: "TASK_NOT_FOUND",
    -32002: "TASK_NOT_CANCELABLE",
    -32003: "PUSH_NOTIFICATION_NOT_SUPPORTED",
    -32004: "UNSUPPORTED_OPERATION",
    -32005: "CONTENT_TYPE_NOT_SUPPORTED",
    -32006: "INVALID_AGENT_RESPONSE",
    -32007: "EXTENDED_AGENT_CARD_NOT_CONFIGURED",
    -32008: "EXTENSION_SUPPORT_REQUIRED",
    -32009: "VERSION_NOT_SUPPORTED",
    -32600: "INVALID_REQUEST",
    -32601: "METHOD_NOT_FOUND",
    -32602: "INVALID_PARAMS",
    -32603: "INTERNAL_ERROR",
}


def rpc_fault(error: Any, status: int) -> Fault:
    """A JSON-RPC error object; the code alone tells the class, the status only 401, 403, 429."""
    data = error.get("data")
    details = data if isinstance(data, list) else []
    kind = _REASONS.get(error["code"], str(error["code"]))
    return Fault(
        kind=f"HTTP {status}" if status != 200 else kind,
        status=status,
        message=error["message"],
        code=error["code"],
        details=details,
        raw=error,
    )


def rest_fault(body: Any, status: int) -> Fault:
    """The ``{"error": {..}}`` of HTTP+JSON; the first ErrorInfo's reason tells the class."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    details = error.get("details", [])
    infos = [detail for detail in details if detail.get("@type") == ERROR_INFO]
    reason = infos[0]["reason"] if infos else ""
    return Fault(
        kind=reason if reason in _REASONS.values() else f"HTTP {status}",
        status=status,
        message=error.get("message", ""),
        details=details,
        raw=body,
    )


def grpc_fault(stream: Stream) -> Fault:
    """A gRPC status; an ErrorInfo of A2A's domain tells the class."""
    message = _percent_decoded(stream.get("grpc-message") or "")
    details = []
    kind = f"gRPC {stream.status}"
    if raw := stream.get("grpc-status-details-bin"):
        status = status_pb2.Status.FromString(base64.b64decode(raw + "=" * (-len(raw) % 4)))
        # clients refuse a status that disagrees with its details
        assert (status.code, status.message) == (stream.status, message)
        for packed in status.details:
            kind_of = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
            value = json_format.MessageToDict(kind_of.FromString(packed.value))
            details.append({"@type": packed.type_url, **value})
    for detail in details:
        named = detail["@type"] == ERROR_INFO and detail.get("domain") == A2A_DOMAIN
        if named and detail["reason"] in _REASONS.values():
            kind = detail["reason"]
    return Fault(kind=kind, status=stream.status, message=message, details=details)


def _percent_decoded(text: str) -> str:
    raw = re.sub(r"%([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), text)
    return raw.encode("latin-1").decode()


# --- calling ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to call, and in which binding."""

    binding: str
    port: int
    path: str = ""
    """JSON-RPC: the request target. HTTP+JSON: what comes before the route."""
    authority: str | None = None
    """gRPC: ``:authority``."""

    async def call(
        self,
        method: str,
        request: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
        stop_after: int | None = None,
        id_: Any = 1,
        seconds: float = 20,
    ) -> Got:
        """One call to its end. `meanwhile` runs after a stream's first event; a stream is left
        after `stop_after` events."""
        request = {} if request is None else request
        watch = _Watch(meanwhile, stop_after)
        sent = {"a2a-version": "1.0", **(headers or {})}
        with trio.fail_after(seconds):
            match self.binding:
                case "JSONRPC":
                    return await self._jsonrpc(method, request, sent, watch, id_)
                case "HTTP+JSON":
                    return await self._rest(method, request, sent, watch)
                case _:
                    async with h2_connection(self.port, authority=self.authority) as connection:
                        return await grpc_call(connection, method, request, sent, watch)

    async def _jsonrpc(
        self, method: str, request: Any, headers: Mapping[str, str], watch: _Watch, id_: Any
    ) -> Got:
        body = json.dumps({"jsonrpc": "2.0", "id": id_, "method": method, "params": request})
        streaming = OPERATIONS[method].streaming
        accept = "text/event-stream" if streaming else "application/json"
        sent = {"content-type": "application/json", "accept": accept, **headers}
        if not streaming:
            reply = await http(self.port, "POST", self.path, headers=sent, body=body.encode())
            got = Got(status=reply.status, headers=reply.headers)
            _take_rpc(got, reply.body, "")
        else:
            async with open_stream(
                self.port, "POST", self.path, headers=sent, body=body.encode()
            ) as events:
                got = Got(status=events.status, headers=list(events.headers.items()))
                if events.body:
                    _take_rpc(got, events.body, "")
                async for event in events:
                    _take_rpc(got, event.data.encode(), event.event)
                    if await watch.seen():
                        break
        got.content_type = (got.get("content-type") or "").partition(";")[0]
        return got

    async def _rest(
        self, method: str, request: Any, headers: Mapping[str, str], watch: _Watch
    ) -> Got:
        operation = OPERATIONS[method]
        path, query, body = rest_request(operation, request)
        sent = {"content-type": "application/json", **headers}
        target = self.path + path + query
        if not operation.streaming:
            reply = await http(self.port, operation.verb, target, headers=sent, body=body)
            got = Got(status=reply.status, headers=reply.headers)
            _take_rest(got, reply.body, "", reply.status)
        else:
            async with open_stream(
                self.port, operation.verb, target, headers=sent, body=body
            ) as events:
                got = Got(status=events.status, headers=list(events.headers.items()))
                if events.body or events.status != 200:
                    _take_rest(got, events.body, "", events.status)
                async for event in events:
                    _take_rest(got, event.data.encode(), event.event, 200)
                    if await watch.seen():
                        break
        got.content_type = (got.get("content-type") or "").partition(";")[0]
        return got


@dataclass
class _Watch:
    """What to do while a stream's events come."""

    meanwhile: Callable[[], Awaitable[None]] | None
    stop_after: int | None
    count: int = 0

    async def seen(self) -> bool:
        """An event came; whether to leave."""
        self.count += 1
        if self.count == 1 and self.meanwhile is not None:
            await self.meanwhile()
        return self.count == self.stop_after


def rest_request(operation: Operation, request: Any) -> tuple[str, str, bytes]:
    """Path, query and body of a request."""
    rest = dict(request)
    path = operation.path
    for name in re.findall(r"\{(\w+)\}", path):
        path = path.replace("{" + name + "}", quote(str(rest.pop(name)), safe=""))
    tenant = rest.pop("tenant", "")
    if tenant:
        path = f"/{quote(tenant, safe='')}{path}"
    if operation.body:
        return path, "", json.dumps(rest).encode()
    query = urlencode(
        {k: str(v).lower() if isinstance(v, bool) else v for k, v in rest.items()}, quote_via=quote
    )
    assert not query or operation.query, operation
    return path, f"?{query}" if query else "", b""


def _take_rpc(got: Got, data: bytes, event: str) -> None:
    if event:
        got.event_names.append(event)
    reply = json.loads(data) if data else {}
    if "error" in reply:
        assert "result" not in reply  # some clients take the presence of `error` for one
        got.ids.append(reply["id"])
        got.fault = rpc_fault(reply["error"], got.status)
    elif "result" in reply:
        got.ids.append(reply["id"])
        got.results.append(reply["result"])
        got.raw.append(data[data.index(b'"result"') + 9 :].lstrip(b" ")[:-1])
    else:
        got.fault = Fault(kind=f"HTTP {got.status}", status=got.status, message="", raw=reply)


def _take_rest(got: Got, data: bytes, event: str, status: int) -> None:
    if event:
        got.event_names.append(event)
    value = json.loads(data) if data.strip()[:1] in (b"{", b"[") else None
    if event == "error":
        assert value is not None
        got.fault = rest_fault(value, value["error"]["code"])
    elif status != 200:
        got.fault = rest_fault(value, status)
    else:
        got.results.append(value)
        got.raw.append(data)


async def grpc_call(
    connection: Connection,
    method: str,
    request: Any,
    headers: Mapping[str, str],
    watch: _Watch | None = None,
) -> Got:
    """One call on an open connection; `request` is JSON, or the message's bytes."""
    operation = OPERATIONS[method]
    data = request if isinstance(request, bytes) else to_pb(operation.request, request)
    stream = await connection.call(method, frame(data), metadata=list(headers.items()))
    got = Got()
    while (message := await stream.next()) is not None:
        got.raw.append(message)
        got.results.append(from_pb(operation.response, message))
        if watch is not None and operation.streaming and await watch.seen():
            await stream.cancel()
            break
    got.headers, got.trailers = stream.headers, stream.trailers
    got.content_type = next((v for k, v in got.headers if k == "content-type"), "")
    if stream.done:
        assert stream.reset is None, f"RST_STREAM {stream.reset}"
        got.status = stream.status
        if got.status:
            got.fault = grpc_fault(stream)
    return got


# --- the sidecar in between -------------------------------------------------------------------


def direct(binding: str, url: str) -> Target:
    """The agent's own endpoint."""
    parts = urlsplit(url)
    assert parts.port is not None
    return Target(binding=binding, port=parts.port, path=parts.path if binding != "GRPC" else "")


def agent_of(binding: str) -> str:
    """The name of the agent that is reached over one binding: ``http-json``."""
    return binding.lower().replace("+", "-")


def label(binding: str) -> str:
    """The binding in an interface's label: ``http_json``."""
    return binding.lower().replace("+", "_")


@dataclass
class Between:
    """A sidecar whose agents ``jsonrpc``, ``http-json`` and ``grpc`` have one interface each."""

    sidecar: Sidecar
    grpc_ports: dict[str, int]
    """Listeners that belong to one agent."""

    def through(self, down: str, up: str) -> Target:
        """From `down` to the agent that speaks `up`."""
        name = agent_of(up)
        if down == "GRPC":
            return Target(binding=down, port=self.grpc_ports[name])
        return Target(binding=down, port=self.sidecar.port(down), path=f"/agents/{name}")

    def shared_grpc(self) -> int:
        """The port of the gRPC listener for all agents."""
        return self.sidecar.port("GRPC")


@contextmanager
def between(
    urls: Mapping[str, str],
    *,
    extra: str = "",
    tenants: Mapping[str, str] | None = None,
    agent_keys: Mapping[str, Any] | None = None,
) -> Iterator[Between]:
    """Run a sidecar in front of the agent whose interfaces are at `urls`, by binding."""
    with tempfile.TemporaryDirectory(prefix="between-") as name:
        directory = Path(name)
        ports = {agent_of(binding): free_port() for binding in urls}
        lines = []
        for binding in BINDINGS:
            lines += _table("[[listeners]]", address=f"127.0.0.1:{free_port()}", binding=binding)
        for agent, port in ports.items():
            lines += _table(
                "[[listeners]]", address=f"127.0.0.1:{port}", binding="GRPC", agent=agent
            )
        lines += _table("[admin]", address=f"127.0.0.1:{free_port()}")
        for binding, url in urls.items():
            agent = agent_of(binding)
            tenant = (tenants or {}).get(binding)
            content = card([interface(binding, url, tenant=tenant)])
            path = write_card(directory, content, f"{agent}.json")
            lines += _table(f"[agents.{agent}]", card=str(path), **(agent_keys or {}))
        text = "\n".join([*lines, extra, ""])
        (directory / "config.toml").write_text(text, "utf-8")
        argv = [sys.executable, "-m", "sidecar", "run", "--config", str(directory / "config.toml")]
        process = Process("sidecar", argv, cwd=directory)
        try:
            daemon = Sidecar(process, text, directory)
            trio.run(_up, daemon)
            yield Between(daemon, ports)
            assert process.alive
            assert "internal error" not in process.log()
        finally:
            process.stop()


def _table(head: str, **keys: Any) -> list[str]:
    return [head, *(f"{key} = {toml(value)}" for key, value in keys.items())]


async def _up(daemon: Sidecar) -> None:
    with trio.fail_after(20):
        while True:
            if not daemon.process.alive:
                raise daemon.process.died("ended before it was up")
            try:
                if (await daemon.readyz()).status == 200 and await _all_known(daemon):
                    return
            except (OSError, trio.BrokenResourceError):
                pass
            await trio.sleep(0.02)


async def _all_known(daemon: Sidecar) -> bool:
    status = await daemon.status()
    return all(agent.get("candidates") for agent in status["agents"].values())


# --- ids --------------------------------------------------------------------------------------

_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")


def normalised(value: Any) -> Any:
    """`value` with generated ids as their number of appearance, times and page tokens as such."""
    names: dict[str, str] = {}
    text = json.dumps(value, sort_keys=True)
    text = _UUID.sub(lambda match: names.setdefault(match[0], f"id-{len(names)}"), text)
    text = re.sub(r'"nextPageToken": "[^"]+"', '"nextPageToken": "token"', text)
    return json.loads(_TIME.sub("time", text))
