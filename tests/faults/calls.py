"""SendMessage and SendStreamingMessage as an application makes them, and what it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tests.faults.faults import GRPC, JSONRPC
from tests.harness import http, message, open_stream
from tests.system.world import grpc_stream, jsonrpc_answer, rest_answer, send_pb

if TYPE_CHECKING:
    from tests.harness import EventStream
    from tests.system.world import Answer

_HEADERS: Final = {"content-type": "application/json", "a2a-version": "1.0"}
_SECONDS: Final = 60.0
"""Longer than any test waits."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the application was told, in the words that the bindings share."""

    failed: bool
    status: int = 200
    code: int | None = None
    reason: str = ""
    domain: str = ""
    delivered: str | None = None
    lines: list[tuple[str, ...]]
    """Of the error: interface, kind and result of each attempt."""
    attempts: int
    """``a2a-sidecar-attempts``; -1 without it."""
    interface: str = ""
    events: int = 0
    text: str = ""
    """Of the error."""


def _told(answer: Answer, headers: dict[str, str], events: int = 0) -> Told:
    lines = [line.split() for line in answer.attempts]
    # an error inside a stream cannot change the headers that have gone out
    delivered = answer.details.get("delivered") if answer.domain == "a2a-sidecar" else None
    if not events and delivered != headers.get("a2a-sidecar-delivered"):
        delivered = f"{delivered}, but {headers.get('a2a-sidecar-delivered')} in the header"
    return Told(
        failed=answer.failed,
        status=answer.status,
        code=answer.code,
        reason=answer.reason,
        domain=answer.domain,
        delivered=delivered,
        lines=[(line[0], line[2], line[3]) for line in lines],
        attempts=int(headers.get("a2a-sidecar-attempts", -1)),
        interface=headers.get("a2a-sidecar-interface", ""),
        events=events,
        text=answer.message,
    )


def _rest(status: int, headers: dict[str, str], body: Any) -> Answer:
    """As `rest_answer`, for agents' own errors too, which may have no details."""
    if status >= 400:
        body = {"error": {"message": "", "details": [], **body["error"]}}
    return rest_answer(status, headers, body)


async def call(
    address: str,
    binding: str,
    agent: str,
    message_id: str,
    *,
    streaming: bool = False,
    size: int = 0,
) -> Told:
    """One call through a listener; `size` bytes of text if it is to be large."""
    text = "x" * size or "hello"
    if binding == GRPC:
        return await _grpc(address, send_pb(text, message_id, agent), streaming=streaming)
    params = message(text, message_id)
    if not streaming:
        return await _unary(address, binding, agent, params)
    body = _body(binding, "SendStreamingMessage", params)
    path = _path(binding, agent, "message:stream")
    headers = {**_HEADERS, "accept": "text/event-stream"}
    async with open_stream(
        address, "POST", path, headers=headers, body=body, seconds=_SECONDS
    ) as events:
        return await _read(events, binding)


def _path(binding: str, agent: str, verb: str) -> str:
    base = f"/agents/{agent}"
    return base if binding == JSONRPC else f"{base}/{verb}"


def _body(binding: str, method: str, params: Any) -> bytes:
    if binding == JSONRPC:
        params = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    return json.dumps(params).encode()


async def _unary(address: str, binding: str, agent: str, params: Any) -> Told:
    reply = await http(
        address,
        "POST",
        _path(binding, agent, "message:send"),
        headers=_HEADERS,
        body=_body(binding, "SendMessage", params),
        seconds=_SECONDS,
    )
    read = jsonrpc_answer if binding == JSONRPC else _rest
    headers = reply.header_dict()
    return _told(read(reply.status, headers, reply.json()), headers)


async def _read(events: EventStream, binding: str) -> Told:
    read = jsonrpc_answer if binding == JSONRPC else _rest
    if events.body:
        return _told(read(events.status, events.headers, json.loads(events.body)), events.headers)
    count = 0
    async for event in events:
        if event.event == "error":
            body = event.json()
            # over HTTP+JSON the event names the status that the reply can no longer have
            status = 200 if binding == JSONRPC else body["error"]["code"]
            answer = read(status, events.headers, body)
            async for more in events:
                raise AssertionError(f"after the error: {more}")
            return _told(answer, events.headers, count)
        count += 1
    return Told(
        failed=False,
        lines=[],
        attempts=int(events.headers.get("a2a-sidecar-attempts", -1)),
        interface=events.headers.get("a2a-sidecar-interface", ""),
        events=count,
    )


async def _grpc(address: str, request: bytes, *, streaming: bool) -> Told:
    method = "SendStreamingMessage" if streaming else "SendMessage"
    port = int(address.rpartition(":")[2])
    async with grpc_stream(port, method, request) as events:
        count = 0
        while await events.next(_SECONDS) is not None:
            count += 1
        answer = events.answer()
    told = _told(answer, answer.headers, count if streaming else 0)
    return replace(told, status=answer.status)
