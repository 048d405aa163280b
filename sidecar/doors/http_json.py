"""The HTTP+JSON door (A2A section 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core import door, errors, http_routes
from sidecar.core.http_common import JSON_TYPE
from sidecar.doors.http import HttpDoor, HttpReply, error_headers

if TYPE_CHECKING:
    from sidecar.agent import Agent
    from sidecar.budget import Reservation
    from sidecar.core.types import ErrorRecord, Headers, Payload
    from sidecar.result import Result
    from sidecar.wire.http1_server import Http1Request

# Section 11.1 of 1.0.1; errors stay application/json, the only type that all clients decode.
_RESULT_TYPE = "application/a2a+json"


class HttpJsonDoor(HttpDoor):
    """Serves the requests of one HTTP+JSON listener."""

    async def serve_call(
        self,
        request: Http1Request,
        path: str,
        agent: Agent,
        relayed: Headers,
        held: Reservation,
    ) -> None:
        """See `HttpDoor`."""
        query = request.target.partition("?")[2]
        try:
            found = http_routes.route(request.method, path)
            headers = request.headers
            in_query = http_routes.version_in_query(query)
            if in_query:
                # The header wins where both are given.
                headers = [*headers, ("a2a-version", in_query)]
            unsupported = door.check_version(headers)
            if unsupported is not None:
                await self.refuse(request, unsupported)
                return
            if found.operation.has_body:
                http_routes.check_content_type(request.headers)
            body = await self.read_body(request, held)
            if body is None:
                return
            inbound = http_routes.decode_request(found, query, body)
        except http_routes.Refused as refused:
            await request.respond(*_refusal(refused.status, refused.record))
            return
        call = self.call(relayed, inbound.operation, inbound.payload, inbound.tenant)
        await self.forward(request, agent, call, _Reply(), held)

    def refusal(self, record: ErrorRecord) -> tuple[int, Headers, bytes]:
        """See `HttpDoor`."""
        return _refusal(record.http_status, record)

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """See `HttpDoor`."""
        return _refusal(status, errors.own("INVALID_REQUEST", message))[1:]


def _refusal(status: int, record: ErrorRecord) -> tuple[int, Headers, bytes]:
    body = errors.http_error_body(record, status)
    return status, error_headers(record), body


class _Reply(HttpReply):
    def unary(self, result: Result) -> tuple[int, str, bytes]:
        if result.error is not None:
            status, _, body = errors.to_http(result.error)
            return status, JSON_TYPE, body
        assert result.payload is not None  # a unary result is a payload or an error
        return 200, _RESULT_TYPE, result.payload.data

    def event(self, payload: Payload) -> bytes:
        return payload.data

    def error_event(self, record: ErrorRecord) -> bytes:
        return errors.to_http(record)[2]

    def opens_with(self, record: ErrorRecord) -> bool:
        del record
        return True
