"""The JSON-RPC door (A2A section 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core import door, errors, jsonrpc
from sidecar.core.http_common import JSON_TYPE
from sidecar.doors.http import HttpDoor, HttpReply, error_headers

if TYPE_CHECKING:
    from sidecar.agent import Agent
    from sidecar.budget import Reservation
    from sidecar.core.jsonrpc import Inbound
    from sidecar.core.types import ErrorRecord, Headers, Payload
    from sidecar.result import Result
    from sidecar.wire.http1_server import Http1Request


class JsonRpcDoor(HttpDoor):
    """Serves the requests of one JSON-RPC listener."""

    async def serve_call(
        self,
        request: Http1Request,
        path: str,
        agent: Agent,
        relayed: Headers,
        held: Reservation,
    ) -> None:
        """See `HttpDoor`. JSON-RPC is served at the agent's prefix itself."""
        if path != "/":
            message = f"nothing is served at {path[:100]!r}; JSON-RPC is at / and /agents/NAME"
            await self._refuse_as(404, request, message)
            return
        if request.method != "POST":
            await self._refuse_as(405, request, "this listener speaks JSON-RPC: POST to it")
            return
        body = await self.read_body(request, held)
        if body is None:
            return
        try:
            inbound = jsonrpc.decode_request(body)
        except jsonrpc.Refused as refused:
            await request.respond(*_refusal(refused.record, refused.id))
            return
        except jsonrpc.Notification:
            explained = b'{"message":"A2A has no notifications: the request needs an id"}'
            await request.respond(400, [("content-type", JSON_TYPE)], explained)
            return
        unsupported = door.check_version(request.headers)
        if unsupported is not None:
            await request.respond(*_refusal(unsupported, inbound.id))
            return
        call = self.call(relayed, inbound.operation, inbound.payload, inbound.tenant)
        await self.forward(request, agent, call, _Reply(inbound), held)

    def refusal(self, record: ErrorRecord) -> tuple[int, Headers, bytes]:
        """See `HttpDoor`."""
        return _refusal(record, b"null")

    async def _refuse_as(self, status: int, request: Http1Request, message: str) -> None:
        _, headers, body = self.refusal(errors.own("INVALID_REQUEST", message))
        if status == 405:
            headers.append(("allow", "POST"))
        await request.respond(status, headers, body)

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """See `HttpDoor`."""
        reason = "TOO_LARGE" if status in {413, 431} else "INVALID_REQUEST"
        return self.refusal(errors.own(reason, message))[1:]


def _refusal(record: ErrorRecord, id_: bytes) -> tuple[int, Headers, bytes]:
    return _status_of(record), error_headers(record), jsonrpc.encode_error(id_, record)


def _status_of(record: ErrorRecord) -> int:
    # Clients drop the body of any other status; these mean something to them (3.8).
    return record.http_status if record.http_status in errors.KEPT_HTTP else 200


class _Reply(HttpReply):
    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound

    def unary(self, result: Result) -> tuple[int, str, bytes]:
        if result.error is not None:
            return _status_of(result.error), JSON_TYPE, self.error_event(result.error)
        assert result.payload is not None  # a unary result is a payload or an error
        return 200, JSON_TYPE, self.event(result.payload)

    def event(self, payload: Payload) -> bytes:
        return jsonrpc.encode_result(self._inbound.id, self._inbound.operation, payload)

    def error_event(self, record: ErrorRecord) -> bytes:
        return jsonrpc.encode_error(self._inbound.id, record)

    def opens_with(self, record: ErrorRecord) -> bool:
        # Some clients lose a plain JSON body where they asked for a stream; an event reaches all.
        return _status_of(record) != 200
