"""The JSON-RPC listener's side of a call: HTTP request → Call → forwarder → HTTP response."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import trio

from sidecar.core import door, errors, jsonrpc, relay
from sidecar.core.http_common import JSON_TYPE, SSE_TYPE
from sidecar.core.spec import Binding
from sidecar.core.sse import SSE_COMMENT, sse_event
from sidecar.core.types import Call
from sidecar.forwarder import CallerGone
from sidecar.wire.http1_server import BodyTooLarge, PeerGone, Stalled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sidecar.agent import Agent
    from sidecar.config import Limits
    from sidecar.core.jsonrpc import Inbound
    from sidecar.core.types import ErrorRecord, Headers
    from sidecar.forwarder import Forwarder, Result
    from sidecar.wire.http1_server import Http1Request

# JSON-RPC clients drop the body of any other status; these three mean something to them (3.8).
_HTTP_STATUSES = frozenset({401, 403, 429})


class JsonRpcDoor:
    """Serves requests of one JSON-RPC listener."""

    def __init__(
        self,
        forwarder: Forwarder,
        agents: Mapping[str, Agent],
        *,
        agent: str | None,
        over_tcp: bool,
        limits: Limits,
        new_call_id: Callable[[], str],
    ) -> None:
        self._forwarder = forwarder
        self._agents = agents
        self._agent = agent
        self._over_tcp = over_tcp
        self._limits = limits
        self._new_call_id = new_call_id

    async def serve(self, request: Http1Request) -> None:
        """Answer one request."""
        if self._over_tcp:
            forbidden = door.admit(request.headers, hosts=frozenset())
            if forbidden is not None:
                await self._refuse(request, forbidden)
                return
        named, path = door.agent_in_path(request.target)
        if path != "/":
            await self._refuse(request, _no_such_path(path), status=404)
            return
        if request.method != "POST":
            message = "this listener speaks JSON-RPC: POST to it"
            record = errors.own("INVALID_REQUEST", message)
            await self._refuse(request, record, status=405, headers=[("allow", "POST")])
            return
        agent = door.choose_agent(named, self._agent, self._agents)
        if not isinstance(agent, str):
            await self._refuse(request, agent)
            return
        await self._serve_call(request, self._agents[agent])

    async def _serve_call(self, request: Http1Request, agent: Agent) -> None:
        unsupported = door.check_version(request.headers)
        try:
            body = await request.body(self._limits.request_bytes)
        except BodyTooLarge:
            limit = self._limits.request_bytes
            record = errors.own("TOO_LARGE", f"the request is above limits.request_bytes ({limit})")
            await self._refuse(request, record)
            return
        try:
            inbound = jsonrpc.decode_request(body)
        except jsonrpc.Refused as refused:
            await self._refuse(request, refused.record, id_=refused.id)
            return
        except jsonrpc.Notification:
            message = b'{"message":"A2A has no notifications: the request needs an id"}'
            await request.respond(400, [("content-type", JSON_TYPE)], message)
            return
        if unsupported is not None:
            await self._refuse(request, unsupported, id_=inbound.id)
            return
        call = Call(
            operation=inbound.operation,
            binding=Binding.JSONRPC,
            payload=inbound.payload,
            tenant=inbound.tenant,
            headers=relay.request_headers(request.headers),
            id=self._new_call_id(),
        )
        if call.operation.streaming:
            await _Stream(request, inbound, self._limits.keepalive_seconds).run(
                self._forwarder, agent, call
            )
            return
        with trio.CancelScope() as scope:
            request.gone.then(scope.cancel)
            result = await self._forwarder.unary(
                agent, call, may_go_on=lambda: not request.half_closed.is_set()
            )
            await _respond(request, inbound, result)

    async def _refuse(
        self,
        request: Http1Request,
        record: ErrorRecord,
        *,
        id_: bytes = b"null",
        status: int | None = None,
        headers: Headers | None = None,
    ) -> None:
        """Answer what never became a call."""
        if status is None:
            status = _status_of(record)
        if record.delivered:
            headers = [*(headers or ()), ("a2a-sidecar-delivered", record.delivered)]
        body = jsonrpc.encode_error(id_, record)
        await request.respond(status, [("content-type", JSON_TYPE), *(headers or ())], body)


def _no_such_path(path: str) -> ErrorRecord:
    return errors.own(
        "AGENT_UNKNOWN", f"nothing is served at {path[:100]!r}; JSON-RPC is at / and /agents/NAME"
    )


def _status_of(record: ErrorRecord) -> int:
    return record.http_status if record.http_status in _HTTP_STATUSES else 200


def _reply_headers(result: Result, content_type: str) -> Headers:
    headers = [("content-type", content_type), *relay.fit(result.all_headers, Binding.JSONRPC)]
    if result.error is not None:
        present = {name for name, _ in headers}
        headers += [pair for pair in result.error.headers if pair[0] not in present]
    return headers


async def _respond(request: Http1Request, inbound: Inbound, result: Result) -> None:
    if result.error is not None:
        body = jsonrpc.encode_error(inbound.id, result.error)
        status = _status_of(result.error)
    else:
        assert result.payload is not None  # a unary result is a payload or an error
        body = jsonrpc.encode_result(inbound.id, inbound.operation, result.payload)
        status = 200
    await request.respond(status, _reply_headers(result, JSON_TYPE), body)


class _Stream:
    """One SSE response: head at the first event or after `keepalive` seconds, then events.

    Comments go out between events only: one lock, one writer at a time.
    """

    def __init__(self, request: Http1Request, inbound: Inbound, keepalive: float) -> None:
        self._request = request
        self._inbound = inbound
        self._keepalive = keepalive
        self._writing = trio.Lock()
        self._last_write = trio.current_time()
        self._started = False

    async def run(self, forwarder: Forwarder, agent: Agent, call: Call) -> None:
        """Relay the stream until it ends or the client leaves."""
        async with trio.open_nursery() as nursery:
            # A client that has sent its request and closed its side has left the stream.
            self._request.half_closed.then(nursery.cancel_scope.cancel)
            self._request.gone.then(nursery.cancel_scope.cancel)
            nursery.start_soon(self._keep_alive)
            with contextlib.suppress(CallerGone, PeerGone):
                await self._finish(await forwarder.stream(agent, call, self._event))
            nursery.cancel_scope.cancel()

    async def _keep_alive(self) -> None:
        while True:
            await trio.sleep_until(self._last_write + self._keepalive)
            if trio.current_time() < self._last_write + self._keepalive:
                continue
            async with self._writing:
                try:
                    await self._start([])
                    await self._send(SSE_COMMENT)
                except PeerGone:
                    return  # the next event, or `gone`, ends the stream

    async def _event(self, event: Result) -> None:
        assert event.payload is not None  # the forwarder delivers events only
        data = jsonrpc.encode_result(self._inbound.id, self._inbound.operation, event.payload)
        async with self._writing:
            try:
                await self._start(_reply_headers(event, SSE_TYPE)[1:])
                await self._send(sse_event(data))
            except Stalled as stalled:
                raise CallerGone("stalled") from stalled
            except PeerGone as gone:
                raise CallerGone from gone

    async def _finish(self, result: Result) -> None:
        """The end, with an error in the form that fits what has gone out."""
        async with self._writing:
            error = result.error
            if error is None:
                await self._start(_reply_headers(result, SSE_TYPE)[1:])
                await self._request.end()
                return
            data = jsonrpc.encode_error(self._inbound.id, error)
            if not self._started and _status_of(error) != 200:
                headers = _reply_headers(result, JSON_TYPE)
                await self._request.respond(_status_of(error), headers, data)
                return
            # Some clients lose a plain JSON body here: an event is understood by all.
            await self._start(_reply_headers(result, SSE_TYPE)[1:])
            await self._send(sse_event(data, "error"))
            await self._request.end()

    async def _start(self, headers: Headers) -> None:
        if self._started:
            return
        self._started = True
        fixed = [
            ("content-type", SSE_TYPE),
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),
        ]
        await self._request.start(200, [*fixed, *headers])

    async def _send(self, data: bytes) -> None:
        await self._request.send(data)
        self._last_write = trio.current_time()
