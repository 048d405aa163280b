"""An agent built on a2a-sdk: JSON-RPC and HTTP+JSON over uvicorn, gRPC over grpc.aio.

Every operation is served, over one task store. The first text part of a message says what
happens: ``hello`` and anything unknown (a completed task that echoes the text), ``message`` (a
Message), ``stream N`` (N artifact chunks, each sent when ``POST /control/next {"n": 1}`` allows
it; ``stream N free`` at once), ``silent S`` (working, S quiet seconds, completed), ``sleep S``
(S seconds before anything), ``big N`` (an artifact of N raw bytes), ``count`` (an artifact with
the number of content bytes received), ``echo`` (parts and metadata of the message in an
artifact), ``fail CODE`` (raises the A2A error of that JSON-RPC code), ``input`` (input required).

``--card`` (JSON or a file, in which ``{jsonrpc}``, ``{rest}`` and ``{grpc}`` stand for ports)
and ``POST /control/card {"card": CARD, "status": 200, "cache_control": ".."}`` change the card.
"""

from __future__ import annotations

from tests.peers import lean  # noqa: F401 - before a2a

# isort: split

import asyncio
import contextlib
import hashlib
import json
import ssl
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import uvicorn
from a2a.helpers.proto_helpers import new_text_message
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler, GrpcHandler
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.server.routes import create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import (
    InMemoryPushNotificationConfigStore,
    InMemoryTaskStore,
    TaskUpdater,
)
from a2a.types import a2a_pb2, a2a_pb2_grpc
from a2a.utils.errors import JSON_RPC_ERROR_CODE_MAP
from google.protobuf.json_format import MessageToDict, ParseDict
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.peers import common
from tests.peers.grpc_generic import grpc_options, grpc_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

BINDINGS = {"jsonrpc": "JSONRPC", "rest": "HTTP+JSON", "grpc": "GRPC"}
ERRORS = {code: error for error, code in JSON_RPC_ERROR_CODE_MAP.items()}
State = a2a_pb2.TaskState


class Executor(AgentExecutor):
    """Does what the message says, and counts how often."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.tasks: dict[str, str] = {}
        self.gate = asyncio.Semaphore(0)

    async def execute(self, context: Any, event_queue: Any) -> None:
        self.order.append(context.message.message_id)
        texts = [part.text for part in context.message.parts if part.HasField("text")]
        text = texts[0] if texts else ""
        word, _, rest = text.partition(" ")
        if word == "message":
            await event_queue.enqueue_event(new_text_message("a plain message"))
            return
        if word == "fail":
            raise ERRORS[int(rest)]
        if word == "sleep":
            await asyncio.sleep(float(rest))
        task = Work(self, context, event_queue)
        await task.start()
        match word:
            case "stream":
                await task.stream(rest)
            case "silent":
                await asyncio.sleep(float(rest))
                await task.status(State.TASK_STATE_COMPLETED)
            case "input":
                await task.status(State.TASK_STATE_INPUT_REQUIRED)
            case _:
                await task.artifact(word, rest, text)
                await task.status(State.TASK_STATE_COMPLETED)

    async def cancel(self, context: Any, event_queue: Any) -> None:
        await Work(self, context, event_queue).status(State.TASK_STATE_CANCELED)


class Work:
    """The events of one task."""

    def __init__(self, executor: Executor, context: Any, event_queue: Any) -> None:
        self.executor = executor
        self.context = context
        self.queue = event_queue
        self.updater = TaskUpdater(event_queue, context.task_id, context.context_id)

    async def start(self) -> None:
        if self.context.current_task is None:
            task = a2a_pb2.Task(id=self.context.task_id, context_id=self.context.context_id)
            task.status.state = State.TASK_STATE_SUBMITTED
            task.status.timestamp.GetCurrentTime()
            task.history.append(self.context.message)
            await self.queue.enqueue_event(task)
        await self.status(State.TASK_STATE_WORKING)

    async def status(self, state: Any) -> None:
        self.executor.tasks[self.context.task_id] = State.Name(state)
        await self.updater.update_status(state)

    async def stream(self, rest: str) -> None:
        count, _, free = rest.partition(" ")
        for number in range(int(count)):
            if not free:
                await self.executor.gate.acquire()
            part = a2a_pb2.Part(text=f"chunk {number}")
            last = number == int(count) - 1
            await self.updater.add_artifact([part], "out", append=number > 0, last_chunk=last)
        await self.status(State.TASK_STATE_COMPLETED)

    async def artifact(self, word: str, rest: str, text: str) -> None:
        message = self.context.message
        parts = [a2a_pb2.Part(text=text)]
        metadata = None
        match word:
            case "big":
                parts = [
                    a2a_pb2.Part(raw=(bytes(range(256)) * (int(rest) // 256 + 1))[: int(rest)])
                ]
            case "count":
                size = sum(len(part.raw) + len(part.text.encode()) for part in message.parts)
                parts = [a2a_pb2.Part(text=str(size))]
            case "echo":
                parts = list(message.parts)
                metadata = MessageToDict(message.metadata)
            case _:
                pass  # the text itself
        await self.updater.add_artifact(parts, "out", metadata=metadata, last_chunk=True)


# --- what was asked ---------------------------------------------------------------------------


class Watch:
    """ASGI around an application: notes each request, counts open event streams."""

    def __init__(self, app: Any, binding: str, seen: common.Seen) -> None:
        self.app = app
        self.binding = binding
        self.seen = seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        target = scope["raw_path"].decode() + ("?" if scope["query_string"] else "")
        entry = self.seen.request(
            binding=self.binding,
            method=scope["method"],
            path=target + scope["query_string"].decode(),
            headers=[[k.decode("latin-1"), v.decode("latin-1")] for k, v in scope["headers"]],
            client=scope["client"][1],
            body="",
            body_size=0,
        )
        streams = 0

        async def receive_noted() -> Any:
            event = await receive()
            body = event.get("body", b"")
            if entry["body_size"] < common.BODY_SHOWN:
                entry["body"] += body.decode("utf-8", "replace")
            entry["body_size"] += len(body)
            return event

        async def send_noted(event: Any) -> None:
            nonlocal streams
            if event["type"] == "http.response.start":
                entry["status"] = event["status"]
                kind = dict(event["headers"]).get(b"content-type", b"")
                if kind.startswith(b"text/event-stream"):
                    streams = 1
                    self.seen.open_streams += 1
            await send(event)

        try:
            await self.app(scope, receive_noted, send_noted)
        finally:
            self.seen.open_streams -= streams


class GrpcWatch(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The same for gRPC."""

    def __init__(self, seen: common.Seen, *, unauthenticated: bool) -> None:
        self.seen = seen
        self.unauthenticated = unauthenticated

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        metadata = [
            [k, v if isinstance(v, str) else v.hex()] for k, v in details.invocation_metadata
        ]
        entry = self.seen.request(binding="grpc", path=details.method, headers=metadata, body="")
        if self.unauthenticated:

            async def refuse(request: Any, context: Any) -> None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")

            return grpc.unary_unary_rpc_method_handler(refuse)
        handler = await continuation(details)
        if handler is None:
            return None

        def note(request: Any, context: Any) -> None:
            entry["client"] = context.peer()
            entry["body_size"] = request.ByteSize()
            if entry["body_size"] < common.BODY_SHOWN:
                entry["body"] = json.dumps(MessageToDict(request))

        async def unary(request: Any, context: Any) -> Any:
            note(request, context)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            note(request, context)
            self.seen.open_streams += 1
            try:
                async for event in handler.unary_stream(request, context):
                    yield event
            finally:
                self.seen.open_streams -= 1

        if handler.response_streaming:
            return handler._replace(unary_stream=stream)
        return handler._replace(unary_unary=unary)


# --- the agent --------------------------------------------------------------------------------


class Card:
    """The served card; may be replaced while running."""

    def __init__(self, own: a2a_pb2.AgentCard, ports: dict[str, int]) -> None:
        self.body = json.dumps(agent_card_to_dict(own)).encode()
        self.ports = ports
        self.status = 200
        self.cache_control = ""
        self.fetches = 0

    def replace(self, card: str) -> None:
        for name, port in self.ports.items():
            card = card.replace(f"{{{name}}}", str(port))
        self.body = card.encode()

    def control(self, body: dict[str, Any]) -> None:
        if body.get("card") is not None:
            self.replace(json.dumps(body["card"]))
        self.status = body.get("status", 200)
        self.cache_control = body.get("cache_control", "")

    async def serve(self, request: Request) -> Response:
        self.fetches += 1
        etag = f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'
        headers = {"etag": etag}
        if self.cache_control:
            headers["cache-control"] = self.cache_control
        if self.status != 200:
            return Response("no card", self.status)
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type="application/json", headers=headers)


def own_card(urls: dict[str, str]) -> a2a_pb2.AgentCard:
    """A 1.0 card with the served interfaces, everything switched on."""
    interfaces = [
        {"url": url, "protocolBinding": binding, "protocolVersion": "1.0"}
        for binding, url in urls.items()
    ]
    card = {
        "name": "sdk agent",
        "description": "Does what the message says",
        "version": "1",
        "supportedInterfaces": interfaces,
        "capabilities": {"streaming": True, "pushNotifications": True, "extendedAgentCard": True},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": [{"id": "do", "name": "do", "description": "do it", "tags": ["test"]}],
    }
    return ParseDict(card, a2a_pb2.AgentCard())


class HttpServer(uvicorn.Server):
    """uvicorn, with the signals left to the peer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def serve_http(app: Any, sock: Any, args: Any) -> asyncio.Task[None]:
    """Start uvicorn on a listening socket."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=args.keep_alive,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
        ssl_ca_certs=args.tls_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if args.tls_ca else ssl.CERT_NONE,
    )
    return asyncio.create_task(HttpServer(config).serve(sockets=[sock]))


def grpc_server(args: Any, seen: common.Seen) -> tuple[Any, int]:
    """A gRPC server, bound but not started, and its port."""
    watch = GrpcWatch(seen, unauthenticated=args.grpc_unauthenticated)
    server = grpc.aio.server(interceptors=[watch], options=grpc_options(args.grpc_option))
    address = f"{common.HOST}:{args.grpc}"
    if args.tls_cert:
        return server, server.add_secure_port(address, grpc_tls(args))
    return server, server.add_insecure_port(address)


async def main(args: Any) -> None:
    """Serve."""
    seen = common.Seen()
    executor = Executor()
    sockets = {
        name: common.listen(port)
        for name, port in (("jsonrpc", args.jsonrpc), ("rest", args.rest))
        if port is not None
    }
    ports = {name: common.port_of(sock) for name, sock in sockets.items()}
    server = None
    if args.grpc is not None:
        server, ports["grpc"] = grpc_server(args, seen)
    scheme = "https" if args.tls_cert else "http"
    bases = {name: f"{scheme}://{common.HOST}:{port}" for name, port in ports.items()}
    urls = {
        BINDINGS[name]: base + ("/rpc" if name == "jsonrpc" else "") for name, base in bases.items()
    }
    public = own_card(urls)
    extended = own_card(urls)
    extended.name = "sdk agent, extended"
    handler = DefaultRequestHandler(
        agent_executor=executor,
        task_store=InMemoryTaskStore(),
        agent_card=public,
        push_config_store=InMemoryPushNotificationConfigStore(),
        extended_agent_card=extended,
    )
    if server is not None:
        if not args.grpc_unregistered:
            a2a_pb2_grpc.add_A2AServiceServicer_to_server(GrpcHandler(handler), server)
        await server.start()
    card = Card(public, ports)
    if args.card:
        card.replace(args.card)
    well_known = Route("/.well-known/agent-card.json", card.serve)
    routes: dict[str, list[Any]] = {
        "jsonrpc": [
            *create_jsonrpc_routes(handler, "/rpc"),
            *create_jsonrpc_routes(handler, "/"),
        ],
        "rest": list(create_rest_routes(handler)),
    }
    running = [
        serve_http(Watch(Starlette(routes=[well_known, *routes[name]]), name, seen), sock, args)
        for name, sock in sockets.items()
    ]

    def state() -> dict[str, Any]:
        order = executor.order
        own = {"executions": len(order), "order": order, "by_message": Counter(order)}
        return {**own, "tasks": executor.tasks, "card_fetches": card.fetches, **seen.as_json()}

    def allow(body: Any) -> None:
        for _ in range((body or {}).get("n", 1)):
            executor.gate.release()

    control = common.Control(state)
    control.on("next", allow)
    control.on("card", card.control)
    web = next((bases[name] for name in ("jsonrpc", "rest") if name in bases), "")
    common.announce(
        await control.start(args.control_port),
        ports,
        urls=urls,
        card=f"{web}/.well-known/agent-card.json",
    )
    await asyncio.gather(*running)


def card_text(given: str) -> str:
    """The JSON of ``--card``."""
    return given if given.lstrip().startswith("{") else Path(given).read_text("utf-8")


def port(text: str) -> int | None:
    """A port, or None for ``off``."""
    return None if text == "off" else int(text)


if __name__ == "__main__":
    options = common.parser(__doc__)
    for binding in BINDINGS:
        options.add_argument(f"--{binding}", type=port, default=0, metavar="PORT|off")
    options.add_argument("--card", type=card_text, help="JSON, or a file with it")
    options.add_argument("--keep-alive", type=int, default=5, help="idle seconds over HTTP")
    options.add_argument("--grpc-option", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--grpc-unregistered", action="store_true", help="all UNIMPLEMENTED")
    options.add_argument("--grpc-unauthenticated", action="store_true", help="all UNAUTHENTICATED")
    common.run(main, options.parse_args())
