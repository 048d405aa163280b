"""An a2a-sdk client: runs a list of operations and prints one JSON line per result or event.

Standard input is one JSON object:

    {"card": URL of the card's base, or a card as an object,
     or "url": ENDPOINT and "binding": BINDING, with "tenant" if any,
     "bindings": ["JSONRPC", ..] (which of the card's to speak; default: all three),
     "uds": PATH of a Unix socket for HTTP, "tls_ca": PEM file, "timeout": SECONDS,
     "ops": [{"op": METHOD, "request": PROTOJSON, "headers": {..}, "stop_after": EVENTS}, ..]}

Each line is ``{"op": INDEX, ..}`` with ``"result"``, ``"event"``, ``"end": true`` (of a stream)
or ``"error": {"class", "message", "data"}``, and ``"at"``, seconds since the start. ``stop_after``
closes a stream after that many events. In a request ``"$0.task.id"`` stands for that member of
the result of operation 0.
"""

from __future__ import annotations

from tests.peers import lean  # noqa: F401 - before a2a

# isort: split

import asyncio
import json
import sys
from typing import Any

import grpc
import grpc.aio
import httpx
from a2a.client import ClientConfig, ClientFactory
from a2a.client.client import ClientCallContext
from a2a.types import a2a_pb2
from google.protobuf.json_format import MessageToDict, ParseDict

METHODS = {
    "GetTask": ("get_task", a2a_pb2.GetTaskRequest),
    "ListTasks": ("list_tasks", a2a_pb2.ListTasksRequest),
    "CancelTask": ("cancel_task", a2a_pb2.CancelTaskRequest),
    "CreateTaskPushNotificationConfig": (
        "create_task_push_notification_config",
        a2a_pb2.TaskPushNotificationConfig,
    ),
    "GetTaskPushNotificationConfig": (
        "get_task_push_notification_config",
        a2a_pb2.GetTaskPushNotificationConfigRequest,
    ),
    "ListTaskPushNotificationConfigs": (
        "list_task_push_notification_configs",
        a2a_pb2.ListTaskPushNotificationConfigsRequest,
    ),
    "DeleteTaskPushNotificationConfig": (
        "delete_task_push_notification_config",
        a2a_pb2.DeleteTaskPushNotificationConfigRequest,
    ),
    "GetExtendedAgentCard": ("get_extended_agent_card", a2a_pb2.GetExtendedAgentCardRequest),
}
BINDINGS = ["JSONRPC", "HTTP+JSON", "GRPC"]


class Run:
    """One run: two clients (streaming and not), and the printed lines."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.results: dict[int, Any] = {}
        self.started = asyncio.get_running_loop().time()

    def print(self, op: int, **line: Any) -> None:
        if "result" in line:
            self.results[op] = line["result"]
        at = round(asyncio.get_running_loop().time() - self.started, 4)
        print(json.dumps({"op": op, **line, "at": at}), flush=True)

    async def client(self, *, streaming: bool) -> Any:
        job = self.job
        transport = httpx.AsyncHTTPTransport(uds=job["uds"]) if "uds" in job else None
        verify = job.get("tls_ca", True)
        http = httpx.AsyncClient(
            transport=transport,
            verify=verify,
            timeout=job.get("timeout", 20),
            trust_env=False,
        )
        config = ClientConfig(
            streaming=streaming,
            httpx_client=http,
            grpc_channel_factory=self.channel,
            supported_protocol_bindings=job.get("bindings", BINDINGS),
        )
        factory = ClientFactory(config)
        match job:
            case {"card": str(url)}:
                return await factory.create_from_url(url)
            case {"card": card}:
                return factory.create(ParseDict(card, a2a_pb2.AgentCard()))
            case _:
                return factory.create(endpoint_card(job))

    def channel(self, url: str) -> Any:
        target = url.partition("://")[2] or url
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if "tls_ca" in self.job:
            with open(self.job["tls_ca"], "rb") as file:
                credentials = grpc.ssl_channel_credentials(file.read())
            return grpc.aio.secure_channel(target, credentials, options)
        return grpc.aio.insecure_channel(target if url[:5] != "unix:" else url, options)

    async def run(self) -> None:
        unary = await self.client(streaming=False)
        streaming = await self.client(streaming=True)
        for number, op in enumerate(self.job["ops"]):
            try:
                await self.op(number, op, unary, streaming)
            except Exception as error:  # the result of the operation
                data = getattr(error, "data", None)
                shown = {"class": type(error).__name__, "message": str(error), "data": data}
                self.print(number, error=shown)
        for client in (unary, streaming):
            await client.close()

    async def op(self, number: int, op: dict[str, Any], unary: Any, streaming: Any) -> None:
        context = ClientCallContext(
            service_parameters=op.get("headers"), timeout=self.job.get("timeout", 20)
        )
        request = self.filled(op.get("request", {}))
        match op["op"]:
            case "SendMessage":
                message = ParseDict(request, a2a_pb2.SendMessageRequest())
                async for event in unary.send_message(message, context=context):
                    self.print(number, result=MessageToDict(event))
            case "SendStreamingMessage":
                message = ParseDict(request, a2a_pb2.SendMessageRequest())
                events = streaming.send_message(message, context=context)
                await self.events(number, events, op.get("stop_after"))
            case "SubscribeToTask":
                task = ParseDict(request, a2a_pb2.SubscribeToTaskRequest())
                events = streaming.subscribe(task, context=context)
                await self.events(number, events, op.get("stop_after"))
            case method:
                name, kind = METHODS[method]
                result = await getattr(unary, name)(ParseDict(request, kind()), context=context)
                self.print(number, result=None if result is None else MessageToDict(result))

    def filled(self, value: Any) -> Any:
        """The request with every ``"$N.name.."`` replaced by that member of result N."""
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("$"):
            number, *names = value[1:].split(".")
            found = self.results[int(number)]
            for name in names:
                found = found[name]
            return found
        return value

    async def events(self, number: int, events: Any, stop_after: int | None) -> None:
        count = 0
        async for event in events:
            self.print(number, event=MessageToDict(event))
            count += 1
            if count == stop_after:
                await events.aclose()
                break
        self.print(number, end=True)


def endpoint_card(job: dict[str, Any]) -> Any:
    """A card with the one interface of ``url`` and ``binding``."""
    interface = {"url": job["url"], "protocolBinding": job["binding"], "protocolVersion": "1.0"}
    if "tenant" in job:
        interface["tenant"] = job["tenant"]
    card = {
        "name": "endpoint",
        "description": "an endpoint",
        "version": "1",
        "supportedInterfaces": [interface],
        "capabilities": {"streaming": True, "pushNotifications": True, "extendedAgentCard": True},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": [{"id": "s", "name": "s", "description": "s", "tags": ["s"]}],
    }
    return ParseDict(card, a2a_pb2.AgentCard())


async def main() -> None:
    """Run the job of standard input."""
    await Run(json.load(sys.stdin)).run()


if __name__ == "__main__":
    asyncio.run(main())
