"""An a2a-sdk agent that does not start to work with a card that its sockets do not back.

    python agent_startup.py HTTP_PORT GRPC_PORT [--once] [--forget-grpc]

It serves JSON-RPC and gRPC, then asks its own addresses what is served there, and compares that
with its card. ``--forget-grpc`` leaves out the one line that registers the gRPC handler: nothing
else notices, since the port listens and the card is valid.
"""

import asyncio
import contextlib
import sys

import grpc.aio
import uvicorn
from a2a.helpers.proto_helpers import new_text_message
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler, GrpcHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import AgentCard, a2a_pb2_grpc
from google.protobuf.json_format import ParseDict
from starlette.applications import Starlette

from sidecar import AgentCardBindingError, probe_bindings, validate_card_against_bindings

HTTP_PORT, GRPC_PORT = int(sys.argv[1]), int(sys.argv[2])
CARD = {
    "name": "Echo",
    "description": "says what it is told",
    "version": "1.0.0",
    "supportedInterfaces": [
        {
            "url": f"http://127.0.0.1:{HTTP_PORT}/rpc",
            "protocolBinding": "JSONRPC",
            "protocolVersion": "1.0",
        },
        {
            "url": f"http://127.0.0.1:{GRPC_PORT}",
            "protocolBinding": "GRPC",
            "protocolVersion": "1.0",
        },
    ],
    "capabilities": {"streaming": True},
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": ["text/plain"],
    "skills": [{"id": "echo", "name": "echo", "description": "echo", "tags": ["echo"]}],
}


class Echo(AgentExecutor):
    async def execute(self, context, event_queue):
        await event_queue.enqueue_event(new_text_message(context.get_user_input()))

    async def cancel(self, context, event_queue):
        raise NotImplementedError


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: this program ends it."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def check_own_card():
    # In a thread: the probes are answered by this very loop.
    listening = await asyncio.to_thread(probe_bindings, CARD)
    validate_card_against_bindings(CARD, listening)


async def main():
    card = ParseDict(CARD, AgentCard())
    handler = DefaultRequestHandler(
        agent_executor=Echo(), task_store=InMemoryTaskStore(), agent_card=card
    )
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc")]
    config = uvicorn.Config(
        Starlette(routes=routes), host="127.0.0.1", port=HTTP_PORT, log_level="warning"
    )
    web = Server(config)
    serving = asyncio.create_task(web.serve())

    grpc_server = grpc.aio.server()
    if "--forget-grpc" not in sys.argv:
        a2a_pb2_grpc.add_A2AServiceServicer_to_server(GrpcHandler(handler), grpc_server)
    grpc_server.add_insecure_port(f"127.0.0.1:{GRPC_PORT}")
    await grpc_server.start()
    while not web.started:
        await asyncio.sleep(0.01)

    try:
        await check_own_card()
        print("the card is backed by what listens")
        if "--once" not in sys.argv:
            await serving
    finally:
        web.should_exit = True
        await grpc_server.stop(grace=1)
        await serving


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except AgentCardBindingError as error:
        sys.exit(f"not starting: {error}")
