"""The agent of the demo: correct A2A 1.0 in three bindings, behind a card that misleads.

Run as ``python -m sidecar.demo_agent``. When it can be reached it prints one JSON line: the URLs of
its ``card`` and of its count of ``executions`` by message. On the same port are JSON-RPC at ``/rpc``
and HTTP+JSON below ``/rest``. gRPC is served by grpclib, an implementation that shares nothing with
the sidecar's, on a port of its own; on another port nothing but gRPC's "unimplemented" is served, as
by a server that was started without its handlers.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase, StatusDetailsCodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Server

from sidecar.core import convert, door, errors, http_routes, jsonrpc
from sidecar.core.http_common import JSON_TYPE, SSE_TYPE
from sidecar.core.spec import (
    ERROR_BY_REASON,
    GET_TASK,
    GRPC_SERVICE,
    INVALID_PARAMS,
    OPERATIONS,
    SEND_MESSAGE,
    SEND_STREAMING_MESSAGE,
    TASK_NOT_FOUND,
    VERSION_HEADER,
)
from sidecar.core.sse import sse_event
from sidecar.core.types import Form, Payload
from sidecar.wire.http1_server import Http1Limits, Http1Request, serve_http1
from sidecar.wire.sockets import SocketWire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grpclib.server import Stream

    from sidecar.core.spec import Operation
    from sidecar.core.types import ErrorRecord, Headers

HOST = "127.0.0.1"

_CARD_PATH = "/.well-known/agent-card.json"
_EXECUTIONS_PATH = "/executions"
_RPC_PATH = "/rpc"
_REST_PATH = "/rest"
_BODY_BYTES = 1024 * 1024
_STALL_SECONDS = 10.0
_UNSUPPORTED_OPERATION = ERROR_BY_REASON["UNSUPPORTED_OPERATION"]


class Refused(Exception):
    """A call that the agent answers with an A2A error."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


# --- the agent itself -------------------------------------------------------------------------


class DemoAgent:
    """Repeats what it is told, and counts. The same for every binding, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, dict[str, Any]] = {}
        self._executions: Counter[str] = Counter()

    def executions(self) -> dict[str, int]:
        """How often each message was executed, by messageId."""
        with self._lock:
            return dict(self._executions)

    def call(self, operation: Operation, params: bytes) -> list[bytes]:
        """Carry out one call: `params` and results in ProtoJSON, a stream's events one by one.

        Raises Refused.
        """
        request = json.loads(params)
        with self._lock:
            if operation is GET_TASK:
                return [json.dumps(self._task(request.get("id"))).encode()]
            if operation is SEND_MESSAGE:
                return [json.dumps({"task": self._execute(request)}).encode()]
            if operation is SEND_STREAMING_MESSAGE:
                return [json.dumps(event).encode() for event in _events(self._execute(request))]
        text = f"the demo agent does not support {operation.name}"
        raise Refused(errors.standard(_UNSUPPORTED_OPERATION, text))

    def _task(self, task_id: object) -> dict[str, Any]:
        task = self._tasks.get(task_id) if isinstance(task_id, str) else None
        if task is None:
            raise Refused(errors.standard(TASK_NOT_FOUND, "Task not found"))
        return task

    def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        given = request.get("message")
        message: dict[str, Any] = given if isinstance(given, dict) else {}
        message_id, parts = message.get("messageId"), message.get("parts")
        if not (isinstance(message_id, str) and message_id and isinstance(parts, list) and parts):
            text = "message.messageId and message.parts are required"
            raise Refused(errors.standard(INVALID_PARAMS, text))
        if message.get("taskId"):
            self._task(message["taskId"])
            text = "the task has ended and takes no more messages"
            raise Refused(errors.standard(_UNSUPPORTED_OPERATION, text))
        self._executions[message_id] += 1
        number = len(self._tasks) + 1
        task = {
            "id": f"task-{number}",
            "contextId": message.get("contextId") or f"context-{number}",
            "status": {"state": "TASK_STATE_COMPLETED"},
            "artifacts": [{"artifactId": "echo", "parts": parts}],
        }
        self._tasks[f"task-{number}"] = task
        return task


def _events(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream of a task: its beginning, its artifact, its end."""
    ids = {"taskId": task["id"], "contextId": task["contextId"]}
    working = {
        "id": task["id"],
        "contextId": task["contextId"],
        "status": {"state": "TASK_STATE_WORKING"},
    }
    return [
        {"task": working},
        {"artifactUpdate": {**ids, "artifact": task["artifacts"][0], "lastChunk": True}},
        {"statusUpdate": {**ids, "status": task["status"]}},
    ]


def make_card(*, http_port: int, grpc_port: int, unserved_port: int) -> dict[str, Any]:
    """A card of the older form: its preferred transport is not the one of its `url`.

    The first entry that has the preferred transport is a port where no A2A method is served.
    """
    base = f"http://{HOST}:{http_port}"
    return {
        "name": "Demo agent",
        "description": "Repeats what it is told.",
        "version": "1.0.0",
        "protocolVersion": "1.0",
        "url": base + _RPC_PATH,
        "preferredTransport": "GRPC",
        "additionalInterfaces": [
            {"url": f"http://{HOST}:{unserved_port}", "transport": "GRPC"},
            {"url": base + _RPC_PATH, "transport": "JSONRPC"},
            {"url": base + _REST_PATH, "transport": "HTTP+JSON"},
            {"url": f"http://{HOST}:{grpc_port}", "transport": "GRPC"},
        ],
        "capabilities": {"streaming": True},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": [
            {"id": "echo", "name": "Echo", "description": "Repeats a message.", "tags": ["demo"]}
        ],
    }


# --- the card, JSON-RPC and HTTP+JSON -----------------------------------------------------------


class HttpFace:
    """Answers the requests of the HTTP port."""

    def __init__(self, agent: DemoAgent, card: dict[str, Any]) -> None:
        self._agent = agent
        self._card = json.dumps(card).encode()

    async def serve(self, request: Http1Request) -> None:
        """Answer one request."""
        path, _, query = request.target.partition("?")
        match request.method, path:
            case "GET", _ if path == _CARD_PATH:
                await request.respond(200, _type(JSON_TYPE), self._card)
            case "GET", _ if path == _EXECUTIONS_PATH:
                counts = json.dumps(self._agent.executions()).encode()
                await request.respond(200, _type(JSON_TYPE), counts)
            case "POST", _ if path == _RPC_PATH:
                await self._jsonrpc(request)
            case _ if path.startswith(f"{_REST_PATH}/"):
                await self._rest(request, path.removeprefix(_REST_PATH), query)
            case _:
                await request.respond(404, _type("text/plain"), b"Not Found\n")

    async def _jsonrpc(self, request: Http1Request) -> None:
        id_ = b"null"
        try:
            inbound = jsonrpc.decode_request(await request.body(_BODY_BYTES))
            id_ = inbound.id
            results = self._call(inbound.operation, request.headers, inbound.payload)
        except jsonrpc.Notification:
            await request.respond(400, _type("text/plain"), b"the request needs an id\n")
        except jsonrpc.Refused as error:
            body = jsonrpc.encode_error(error.id, error.record)
            await request.respond(200, _type(JSON_TYPE), body)
        except Refused as error:
            body = jsonrpc.encode_error(id_, error.record)
            await request.respond(200, _type(JSON_TYPE), body)
        else:
            wrapped = [
                jsonrpc.encode_result(id_, inbound.operation, Payload(Form.JSON, result))
                for result in results
            ]
            await _answer(request, inbound.operation, wrapped)

    async def _rest(self, request: Http1Request, path: str, query: str) -> None:
        try:
            route = http_routes.route(request.method, path)
            body = await request.body(_BODY_BYTES)
            inbound = http_routes.decode_request(route, query, body)
            results = self._call(inbound.operation, request.headers, inbound.payload)
        except http_routes.Refused as error:
            await _answer_error(request, error.status, error.record)
        except Refused as error:
            await _answer_error(request, error.record.http_status, error.record)
        else:
            await _answer(request, inbound.operation, results)

    def _call(self, operation: Operation, headers: Headers, params: Payload) -> list[bytes]:
        unsupported = door.check_version(headers)
        if unsupported is not None:
            raise Refused(unsupported)
        return self._agent.call(operation, params.data)


def _type(name: str) -> Headers:
    return [("content-type", name)]


async def _answer(request: Http1Request, operation: Operation, results: Sequence[bytes]) -> None:
    if not operation.streaming:
        await request.respond(200, _type(JSON_TYPE), results[0])
        return
    await request.start(200, [*_type(SSE_TYPE), ("cache-control", "no-store")])
    for event in results:
        await request.send(sse_event(event))
    await request.end()


async def _answer_error(request: Http1Request, status: int, record: ErrorRecord) -> None:
    body = errors.http_error_body(record, status)
    await request.respond(status, _type(JSON_TYPE), body)


async def _serve_http(sock: socket.socket, face: HttpFace) -> None:
    sock.setblocking(False)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                connection = sock.accept()[0]
            except OSError:
                continue  # the client has left already
            serve = functools.partial(serve_http1, limits=Http1Limits(), on_bug=_report)
            wire = SocketWire(connection, stall_seconds=_STALL_SECONDS)
            nursery.start_soon(serve, wire, face.serve)


def _report(where: str, error: BaseException) -> None:
    sys.stderr.write(f"demo agent: {where}: {error!r}\n")


# --- gRPC ---------------------------------------------------------------------------------------


class _RawMessages(CodecBase):
    """Messages stay bytes: `core.convert` reads and writes them."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


class _RawDetails(StatusDetailsCodecBase):
    """Details are a google.rpc.Status already."""

    def encode(self, status: Status, message: str | None, details: object) -> bytes:
        assert isinstance(details, bytes)  # from errors.to_grpc
        return details

    def decode(self, status: Status, message: str | None, data: bytes) -> bytes:
        return data


class GrpcFace:
    """The gRPC service, as grpclib takes it."""

    def __init__(self, agent: DemoAgent) -> None:
        self._agent = agent

    def __mapping__(self) -> dict[str, Handler]:
        """All eleven methods, by path."""
        return {
            f"/{GRPC_SERVICE}/{operation.name}": self._handler(operation)
            for operation in OPERATIONS.values()
        }

    def _handler(self, operation: Operation) -> Handler:
        async def serve(stream: Stream[bytes, bytes]) -> None:
            message = await stream.recv_message()
            assert message is not None  # grpclib has checked that there is one
            sent = stream.metadata.get(VERSION_HEADER) if stream.metadata else None
            try:
                results = self._call(operation, str(sent or ""), message)
            except Refused as error:
                code, text, details = errors.to_grpc(error.record)
                raise GRPCError(Status(code), text, details) from error
            for result in results:
                await stream.send_message(convert.json_to_proto(operation.response, result))

        kind = Cardinality.UNARY_STREAM if operation.streaming else Cardinality.UNARY_UNARY
        return Handler(serve, kind, bytes, bytes)

    def _call(self, operation: Operation, version: str, message: bytes) -> list[bytes]:
        unsupported = door.check_version([(VERSION_HEADER, version)])
        if unsupported is not None:
            raise Refused(unsupported)
        try:
            params = convert.proto_to_json(operation.request, message)
        except convert.InvalidMessage as error:
            raise Refused(errors.standard(INVALID_PARAMS, str(error))) from error
        return self._agent.call(operation, params)


async def _serve_grpc(agent: DemoAgent, served: socket.socket, unserved: socket.socket) -> None:
    complete = Server([GrpcFace(agent)], codec=_RawMessages(), status_details_codec=_RawDetails())
    without_handlers = Server([])
    await complete.start(sock=served)
    await without_handlers.start(sock=unserved)
    await asyncio.Event().wait()


def main() -> int:
    """Serve until the process is ended."""
    # Bound before anything runs, so that the card can name the ports and nobody comes too early.
    http, grpc, unserved = (socket.create_server((HOST, 0)) for _ in range(3))
    http_port, grpc_port, unserved_port = (sock.getsockname()[1] for sock in (http, grpc, unserved))
    agent = DemoAgent()
    card = make_card(http_port=http_port, grpc_port=grpc_port, unserved_port=unserved_port)
    # grpclib is made for asyncio, the HTTP/1.1 server for trio: each has a thread.
    threading.Thread(
        target=lambda: asyncio.run(_serve_grpc(agent, grpc, unserved)), name="grpc", daemon=True
    ).start()
    base = f"http://{HOST}:{http_port}"
    ready = {"card": base + _CARD_PATH, "executions": base + _EXECUTIONS_PATH}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    try:
        trio.run(_serve_http, http, HttpFace(agent, card))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
