"""Calls, interfaces and replies for the tests of the bindings."""

from __future__ import annotations

import json
from typing import Any

from sidecar.core.spec import OPERATIONS, Binding, Version
from sidecar.core.types import Call, Form, Interface, Payload, ReplyHead

MESSAGE = b'{"message":{"messageId":"m-1","role":"ROLE_USER","parts":[{"text":"hi"}]}}'

# A smallest request of each operation.
REQUESTS: dict[str, bytes] = {
    "SendMessage": MESSAGE,
    "SendStreamingMessage": MESSAGE,
    "GetTask": b'{"id":"t-1"}',
    "ListTasks": b"{}",
    "CancelTask": b'{"id":"t-1"}',
    "SubscribeToTask": b'{"id":"t-1"}',
    "CreateTaskPushNotificationConfig": b'{"taskId":"t-1","url":"https://hook.example"}',
    "GetTaskPushNotificationConfig": b'{"taskId":"t-1","id":"c-1"}',
    "ListTaskPushNotificationConfigs": b'{"taskId":"t-1"}',
    "DeleteTaskPushNotificationConfig": b'{"taskId":"t-1","id":"c-1"}',
    "GetExtendedAgentCard": b"{}",
}


def call(operation: str, data: bytes | None = None, **more: Any) -> Call:
    return Call(
        operation=OPERATIONS[operation],
        binding=more.pop("binding", Binding.JSONRPC),
        payload=Payload(more.pop("form", Form.JSON), REQUESTS[operation] if data is None else data),
        **more,
    )


def interface(binding: Binding, path: str = "", tenant: str = "", **more: Any) -> Interface:
    return Interface(
        position=0,
        binding=binding,
        version=Version.V1_0,
        url="https://agent.example",
        tls=True,
        host="agent.example",
        port=443,
        path=path,
        tenant=tenant,
        **more,
    )


def head(status: int = 200, content_type: str = "", **headers: str) -> ReplyHead:
    found = [(name.replace("_", "-"), value) for name, value in headers.items()]
    if content_type:
        found.insert(0, ("content-type", content_type))
    return ReplyHead(status, found)


def text(value: object) -> bytes:
    return json.dumps(value).encode()
