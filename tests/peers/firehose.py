"""An agent that sends and records bytes: long streams as fast as they are taken, exact messages.

HTTP on bare sockets (JSON-RPC at ``/rpc``, HTTP+JSON at ``/``) and gRPC on grpcio with raw bytes.
Every stream sends what ``POST /control/stream {"events": N, "size": BYTES}`` last said: a task,
then N artifact updates with BYTES of text each, then completed. What it has sent so far is in the
state's ``sent`` (events of all streams). Unary gRPC calls answer ``POST /control/answer
{"message": BASE64}``; ``request`` in the state is the last gRPC request, in base64.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import grpc
import grpc.aio

from tests.peers import common, mini
from tests.peers.grpc_generic import grpc_options

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
IDS = {"taskId": "t-1", "contextId": "c-1"}
TASK = {"id": "t-1", "contextId": "c-1", "status": {"state": "TASK_STATE_WORKING"}}
DONE = {"statusUpdate": {**IDS, "status": {"state": "TASK_STATE_COMPLETED"}}}


class Agent(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Both servers' handlers."""

    def __init__(self) -> None:
        self.seen = common.Seen()
        self.events = 3
        self.size = 10
        self.sent = 0
        self.answer = b""
        self.request = b""

    def state(self) -> dict[str, Any]:
        request = base64.b64encode(self.request).decode()
        return {"sent": self.sent, "request": request, **self.seen.as_json()}

    def stream(self, body: dict[str, int]) -> None:
        self.events, self.size = body["events"], body["size"]

    def set_answer(self, body: dict[str, str]) -> None:
        self.answer = base64.b64decode(body["message"])

    def update(self) -> dict[str, Any]:
        part = {"text": "x" * self.size}
        return {"artifactUpdate": {**IDS, "artifact": {"artifactId": "a", "parts": [part]}}}

    # --- gRPC ---

    def service(self, details: Any) -> Any:
        if details.method.removeprefix(mini.SERVICE) in mini.STREAMING:
            return grpc.unary_stream_rpc_method_handler(self.grpc_stream)
        return grpc.unary_unary_rpc_method_handler(self.grpc_unary)

    async def grpc_unary(self, request: bytes, context: Any) -> bytes:
        self.request = request
        return self.answer

    async def grpc_stream(self, request: bytes, context: Any) -> None:
        self.request = request
        self.seen.open_streams += 1
        try:
            if self.answer:
                await context.write(self.answer)
                return
            await context.write(mini.event_pb({"task": TASK}))
            data = mini.event_pb(self.update())
            for _ in range(self.events):
                await context.write(data)
                self.sent += 1
            await context.write(mini.event_pb(DONE))
        finally:
            self.seen.open_streams -= 1

    # --- HTTP ---

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = common.parse_head(await reader.readuntil(b"\r\n\r\n"))
                request.body = await reader.readexactly(int(request.get("content-length", "0")))
                await self.http_stream(request, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def http_stream(self, request: common.Incoming, writer: asyncio.StreamWriter) -> None:
        rpc = request.path == "/rpc"
        self.seen.open_streams += 1
        try:
            writer.write(SSE_HEAD + sse({"task": TASK}, rpc=rpc))
            data = sse(self.update(), rpc=rpc)
            for _ in range(self.events):
                writer.write(data)
                await writer.drain()
                self.sent += 1
            writer.write(sse(DONE, rpc=rpc) + b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.seen.open_streams -= 1


def sse(event: dict[str, Any], *, rpc: bool) -> bytes:
    """One event in a chunk."""
    body = {"jsonrpc": "2.0", "id": 1, "result": event} if rpc else event
    data = b"data: %b\r\n\r\n" % json.dumps(body).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def main(args: Any) -> None:
    """Serve."""
    agent = Agent()
    sock = common.listen(args.port)
    await asyncio.start_server(agent.serve, sock=sock)
    server = grpc.aio.server(options=grpc_options([]))
    server.add_generic_rpc_handlers((agent,))
    port = server.add_insecure_port(f"{common.HOST}:0")
    await server.start()
    control = common.Control(agent.state)
    control.on("stream", agent.stream)
    control.on("answer", agent.set_answer)
    base = f"http://{common.HOST}:{common.port_of(sock)}"
    common.announce(
        await control.start(args.control_port),
        {"http": common.port_of(sock), "grpc": port},
        urls={"JSONRPC": f"{base}/rpc", "HTTP+JSON": base, "GRPC": f"http://{common.HOST}:{port}"},
    )
    await server.wait_for_termination()


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--port", type=int, default=0)
    common.run(main, options.parse_args())
