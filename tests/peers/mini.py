"""A minimal A2A agent without any A2A library: tasks, counts, and its replies in JSON and protobuf.

The protobuf side writes fields by number (package ``lf.a2a.v1``), so that a peer that uses it
shares no generated code with the program under test.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE = "/lf.a2a.v1.A2AService/"
STREAMING = ("SendStreamingMessage", "SubscribeToTask")
METHODS = (
    "SendMessage",
    "SendStreamingMessage",
    "GetTask",
    "ListTasks",
    "CancelTask",
    "SubscribeToTask",
    "CreateTaskPushNotificationConfig",
    "GetTaskPushNotificationConfig",
    "ListTaskPushNotificationConfigs",
    "DeleteTaskPushNotificationConfig",
    "GetExtendedAgentCard",
)
STATES = {
    "TASK_STATE_SUBMITTED": 1,
    "TASK_STATE_WORKING": 2,
    "TASK_STATE_COMPLETED": 3,
    "TASK_STATE_FAILED": 4,
    "TASK_STATE_CANCELED": 5,
    "TASK_STATE_INPUT_REQUIRED": 6,
}
ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
NOT_FOUND = {
    "@type": ERROR_INFO,
    "reason": "TASK_NOT_FOUND",
    "domain": "a2a-protocol.org",
    "metadata": {},
}


# --- protobuf by hand -------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """A base-128 varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def pb(number: int, value: bytes | str | int) -> bytes:
    """One field: an int as varint, anything else length-delimited."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def pb_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, in order; fixed-width ones as their bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result

    while at < len(data):
        key = number()
        match key & 7:
            case 0:
                yield key >> 3, number()
            case 2:
                length = number()
                yield key >> 3, data[at : at + length]
                at += length
            case wire:
                width = {1: 8, 5: 4}[wire]
                yield key >> 3, data[at : at + width]
                at += width


def pb_get(data: bytes, *path: int) -> bytes:
    """The first length-delimited field at a path of numbers; b'' when there is none."""
    for number in path:
        found = [v for n, v in pb_fields(data) if n == number and isinstance(v, bytes)]
        if not found:
            return b""
        data = found[0]
    return data


def pb_status(code: int, message: str, *details: tuple[str, str]) -> bytes:
    """A google.rpc.Status with ErrorInfo details, each (reason, domain)."""
    out = pb(1, code) + pb(2, message)
    for reason, domain in details:
        out += pb(3, pb(1, ERROR_INFO) + pb(2, pb(1, reason) + pb(2, domain)))
    return out


def status_header(status: bytes) -> str:
    """The value of ``grpc-status-details-bin`` for a serialized Status."""
    return base64.b64encode(status).decode().rstrip("=")


def frame(message: bytes, *, compressed: bool = False) -> bytes:
    """One gRPC length-prefixed message."""
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


def unframe(data: bytes) -> bytes:
    """The first message of a gRPC body."""
    return data[5 : 5 + int.from_bytes(data[1:5], "big")]


def part_pb(part: dict[str, Any]) -> bytes:
    """A Part with text or raw content."""
    if "raw" in part:
        return pb(2, base64.b64decode(part["raw"]))
    return pb(1, part["text"])


def artifact_pb(artifact: dict[str, Any]) -> bytes:
    """An Artifact."""
    return pb(1, artifact["artifactId"]) + b"".join(pb(4, part_pb(p)) for p in artifact["parts"])


def task_pb(task: dict[str, Any]) -> bytes:
    """A Task."""
    out = pb(1, task["id"]) + pb(2, task["contextId"])
    out += pb(3, pb(1, STATES[task["status"]["state"]]))
    return out + b"".join(pb(4, artifact_pb(a)) for a in task.get("artifacts", []))


def event_pb(event: dict[str, Any]) -> bytes:
    """A StreamResponse."""
    match event:
        case {"task": task}:
            return pb(1, task_pb(task))
        case {"statusUpdate": update}:
            ids = pb(1, update["taskId"]) + pb(2, update["contextId"])
            return pb(3, ids + pb(3, pb(1, STATES[update["status"]["state"]])))
        case {"artifactUpdate": update}:
            ids = pb(1, update["taskId"]) + pb(2, update["contextId"])
            return pb(4, ids + pb(3, artifact_pb(update["artifact"])))
        case _:
            raise ValueError(event)


# --- the agent --------------------------------------------------------------------------------


@dataclass
class GrpcAnswer:
    """What a gRPC method answers: messages, then a status."""

    messages: list[bytes] = field(default_factory=list)
    code: int = 0
    message: str = ""
    details: bytes = b""


@dataclass
class MiniAgent:
    """Tasks and the count of executions; the same for every binding."""

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Its part of the control state."""
        return {
            "executions": len(self.order),
            "order": self.order,
            "by_message": Counter(self.order),
            "tasks": {id_: task["status"]["state"] for id_, task in self.tasks.items()},
        }

    def execute(self, message_id: str, text: str) -> dict[str, Any]:
        """Run one message: counts it and returns the completed Task."""
        self.order.append(message_id)
        number = len(self.order)
        task = {
            "id": f"task-{number}",
            "contextId": f"context-{number}",
            "status": {"state": "TASK_STATE_COMPLETED"},
            "artifacts": [{"artifactId": "out", "parts": [{"text": text}]}],
        }
        self.tasks[f"task-{number}"] = task
        return task

    def execute_json(self, request: Any) -> dict[str, Any]:
        """`execute` for a SendMessageRequest in JSON."""
        message = (request or {}).get("message") or {}
        texts = [part["text"] for part in message.get("parts", []) if "text" in part]
        return self.execute(str(message.get("messageId", "?")), "\n".join(texts))

    def execute_pb(self, request: bytes) -> dict[str, Any]:
        """`execute` for a serialized SendMessageRequest."""
        text = pb_get(request, 2, 5, 1).decode()
        return self.execute(pb_get(request, 2, 1).decode() or "?", text)

    @staticmethod
    def events(task: dict[str, Any]) -> list[dict[str, Any]]:
        """The stream of a task that was executed: task, artifact, completed."""
        ids = {"taskId": task["id"], "contextId": task["contextId"]}
        working = {**task, "status": {"state": "TASK_STATE_WORKING"}, "artifacts": []}
        return [
            {"task": working},
            {"artifactUpdate": {**ids, "artifact": task["artifacts"][0]}},
            {"statusUpdate": {**ids, "status": task["status"]}},
        ]

    def json_call(self, method: str, params: Any) -> tuple[list[dict[str, Any]], int]:
        """One call in JSON: (results, 0), or ([], JSON-RPC error code)."""
        match method:
            case "SendMessage":
                return [{"task": self.execute_json(params)}], 0
            case "SendStreamingMessage":
                return self.events(self.execute_json(params)), 0
            case "GetTask":
                task = self.tasks.get(str((params or {}).get("id")))
                return ([task], 0) if task else ([], -32001)
            case "ListTasks":
                tasks = list(self.tasks.values())
                page = {"nextPageToken": "", "pageSize": 50, "totalSize": len(tasks)}
                return [{"tasks": tasks, **page}], 0
            case _:
                return [], -32601

    def grpc_call(self, method: str, request: bytes) -> GrpcAnswer:
        """One call in protobuf."""
        match method:
            case "SendMessage":
                return GrpcAnswer([pb(1, task_pb(self.execute_pb(request)))])
            case "SendStreamingMessage":
                return GrpcAnswer([event_pb(e) for e in self.events(self.execute_pb(request))])
            case "GetTask":
                task = self.tasks.get(pb_get(request, 2).decode())
                if task:
                    return GrpcAnswer([task_pb(task)])
                info = ("TASK_NOT_FOUND", "a2a-protocol.org")
                return GrpcAnswer([], 5, "Task not found", pb_status(5, "Task not found", info))
            case _:
                return GrpcAnswer([], 12, "Method not found")


def rpc_result(id_: Any, result: Any) -> bytes:
    """A JSON-RPC response."""
    return json.dumps({"jsonrpc": "2.0", "id": id_, "result": result}).encode()


def rpc_error(id_: Any, code: int) -> bytes:
    """A JSON-RPC error response, as an agent of version 1.0 sends it."""
    known = {-32001: ("Task not found", [NOT_FOUND]), -32601: ("Method not found", [])}
    message, data = known.get(code, ("Error", []))
    error = {"code": code, "message": message, **({"data": data} if data else {})}
    return json.dumps({"jsonrpc": "2.0", "id": id_, "error": error}).encode()


def rest_error(status: int, name: str, message: str, *details: Any) -> bytes:
    """An HTTP+JSON error body."""
    error = {"code": status, "status": name, "message": message, "details": list(details)}
    return json.dumps({"error": error}).encode()
