"""The gRPC door (A2A section 10): HTTP/2 streams, and cards for those who come with HTTP/1.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from grpclib.metadata import decode_timeout

from sidecar.core import convert, door, errors, grpc, relay, tenant
from sidecar.core.grpc_frames import GrpcReader, MessageTooLarge, grpc_frame
from sidecar.core.http_common import check_id
from sidecar.core.payload import PayloadError
from sidecar.core.spec import (
    GRPC_SERVICE,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    OPERATIONS,
    Binding,
)
from sidecar.core.types import Call, Form, Payload, header
from sidecar.doors.http import COPIES, HttpDoor, error_headers
from sidecar.result import CallerGone
from sidecar.wire.http2_server import StreamGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.agent import Agent
    from sidecar.budget import Reservation
    from sidecar.core.spec import Operation
    from sidecar.core.types import ErrorRecord, Headers
    from sidecar.doors.cards import Place
    from sidecar.doors.entry import Entry
    from sidecar.doors.http import House
    from sidecar.result import Result
    from sidecar.wire.http1_server import Http1Request
    from sidecar.wire.http2_server import ServerStream

_ENCODINGS = ("identity", "gzip")
# Between two pieces of a request; as long as over HTTP/1.1.
_BODY_SECONDS = 30.0
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
_HEAD: Headers = [(":status", "200"), ("content-type", grpc.CONTENT_TYPE)]


class _Refused(Exception):
    """A request that is answered here."""

    def __init__(self, record: ErrorRecord, headers: Headers | None = None) -> None:
        super().__init__(record.message)
        self.record = record
        self.headers = headers or []


class GrpcDoor(HttpDoor):
    """Serves one gRPC listener. What it inherits serves HTTP/1.1 clients: cards, nothing else."""

    takes_http1_calls = False

    def __init__(
        self, house: House, place: Place, entry: Entry, *, is_ready: Callable[[], bool]
    ) -> None:
        super().__init__(house, place, entry)
        self._is_ready = is_ready

    # --- HTTP/1.1 -----------------------------------------------------------------------------

    async def serve_call(
        self,
        request: Http1Request,
        path: str,
        agent: Agent,
        relayed: Headers,
        held: Reservation,
    ) -> None:
        """See `HttpDoor`: calls do not come this way."""
        raise AssertionError("not over HTTP/1.1")

    def refusal(self, record: ErrorRecord) -> tuple[int, Headers, bytes]:
        """See `HttpDoor`."""
        if record.reason == "INVALID_REQUEST":
            return 415, *self.render(415, record.message)
        body = errors.http_error_body(record, record.http_status)
        return record.http_status, error_headers(record), body

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """See `HttpDoor`. The error names the listeners that speak HTTP/1.1."""
        others = self._house.cards.others_than(Binding.GRPC)
        if others:
            message = f"{message}; listeners for HTTP/1.1: {others}"
        record = errors.own("INVALID_REQUEST", message)
        return error_headers(record), errors.http_error_body(record, status)

    # --- HTTP/2 -------------------------------------------------------------------------------

    async def serve_stream(self, stream: ServerStream) -> None:
        """Answer one gRPC request."""
        headers = [pair for pair in stream.headers if pair[0][:1] != ":"]
        pseudo = dict(pair for pair in stream.headers if pair[0][:1] == ":")
        if not _is_grpc(header(headers, "content-type") or ""):
            # What is no gRPC client cannot read a gRPC status either (PROTOCOL-HTTP2, Requests).
            await stream.send_trailers([(":status", "415"), ("accept-post", grpc.CONTENT_TYPE)])
            return
        authority = pseudo.get(":authority") or header(headers, "host") or ""
        reply = _Reply(stream)
        try:
            operation = self._admit(pseudo.get(":path", ""), authority, headers)
            with self._house.budget.reserve() as held:
                if operation is None:
                    await self._check_health(stream, reply, headers, held)
                else:
                    await self._call(stream, reply, operation, authority, headers, held)
        except _Refused as refused:
            await reply.end_with_error(refused.record, refused.headers)

    def _admit(self, path: str, authority: str, headers: Headers) -> Operation | None:
        """The operation of an acceptable request, None for a health check; raises _Refused."""
        refused = self._entry.admit(headers, authority)
        if refused is not None:
            raise _Refused(refused)
        if path == _HEALTH_CHECK:
            return None
        service, _, method = path.removeprefix("/").partition("/")
        operation = OPERATIONS.get(method) if service == GRPC_SERVICE else None
        if operation is None:
            raise _Refused(errors.standard(METHOD_NOT_FOUND, f"Method not found: {path[:100]}"))
        unsupported = door.check_version(headers)
        if unsupported is not None:
            raise _Refused(unsupported)
        return operation

    async def _call(
        self,
        stream: ServerStream,
        reply: _Reply,
        operation: Operation,
        authority: str,
        headers: Headers,
        held: Reservation,
    ) -> None:
        refused, withheld = self._entry.authenticate(headers)
        if refused is not None:
            raise _Refused(refused)
        relayed = relay.request_headers(headers, withheld=withheld, via=self._entry.pseudonym)
        message = Payload(Form.PROTO, await self._read_message(stream, headers, held))
        try:
            caller_tenant, message = tenant.take(operation, message)
            for name in operation.path_fields:
                check_id(name, convert.text_field(operation.request, message.data, name))
        except convert.InvalidMessage as error:
            raise _Refused(errors.standard(INVALID_PARAMS, f"the request {error}")) from error
        agent = self._meant(caller_tenant, authority)
        call = self.call(relayed, operation, message, caller_tenant, _deadline(headers))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, stream.gone, nursery.cancel_scope)
            if operation.streaming:
                await self._stream(nursery, agent, call, reply, held)
            else:
                await reply.unary(await self.ask(agent, call, authority, held))
            nursery.cancel_scope.cancel()

    async def _stream(
        self,
        nursery: trio.Nursery,
        agent: Agent,
        call: Call,
        reply: _Reply,
        held: Reservation,
    ) -> None:
        nursery.start_soon(reply.keep_alive, self._house.limits.keepalive_seconds)
        try:
            result = await self._house.forwarder.stream(
                agent, call, reply.events, held=held, breaker=self.breaker
            )
        except CallerGone:
            return
        await reply.end(result)

    def _meant(self, caller_tenant: str, authority: str) -> Agent:
        """The agent of a call: the listener's own, the tenant, the authority's first label."""
        agents = self._house.agents
        own = self._place.agent
        label = door.host_of(authority).partition(".")[0]
        named = next((name for name in (caller_tenant, label) if name in agents), "")
        chosen = door.choose_agent("" if own else named, own, agents)
        if not isinstance(chosen, str):
            raise _Refused(chosen)
        return agents[chosen]

    async def _read_message(
        self, stream: ServerStream, headers: Headers, held: Reservation
    ) -> bytes:
        """The one message of a request."""
        encoding = header(headers, "grpc-encoding")
        if encoding is not None and encoding not in _ENCODINGS:
            record = errors.standard(METHOD_NOT_FOUND, f"grpc-encoding {encoding[:40]} is unknown")
            raise _Refused(record, [("grpc-accept-encoding", ",".join(_ENCODINGS))])
        limit = self._house.limits.request_bytes
        reader = GrpcReader(limit, encoding)
        messages: list[bytes] = []
        try:
            with trio.CancelScope(deadline=trio.current_time() + _BODY_SECONDS) as scope:
                while data := await stream.receive():
                    if not held.try_take(len(data) * COPIES):
                        raise _Refused(self.no_room())
                    messages += reader.feed(data)
                    if not stream.ended:
                        scope.deadline = trio.current_time() + _BODY_SECONDS
            if scope.cancelled_caught:
                self._house.count_limit("slow_request")
                text = "the request did not come in time"
                raise _Refused(errors.own("INVALID_REQUEST", text))
            reader.end()
        except MessageTooLarge as error:
            raise _Refused(self.too_large()) from error
        except PayloadError as error:
            raise _Refused(errors.own("INVALID_REQUEST", f"the request: {error}")) from error
        if len(messages) != 1:
            text = f"the request has {len(messages)} messages instead of one"
            raise _Refused(errors.own("INVALID_REQUEST", text))
        return messages[0]

    async def _check_health(
        self, stream: ServerStream, reply: _Reply, headers: Headers, held: Reservation
    ) -> None:
        """grpc.health.v1: the whole server, or the A2A service by name."""
        request = await self._read_message(stream, headers, held)
        service = request[2:].decode("utf-8", "replace") if request[:1] == b"\x0a" else ""
        if service not in {"", GRPC_SERVICE}:
            await reply.end_with_status(5, "unknown service", None, [])
            return
        await reply.message(_SERVING if self._is_ready() else _NOT_SERVING, [])
        await reply.end_with_status(0, "", None, [])


def _is_grpc(content_type: str) -> bool:
    """``application/grpc``, ``application/grpc+proto``; not grpc-web, which frames otherwise."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type.partition("+")[0] == grpc.CONTENT_TYPE


async def _cancel_when(gone: trio.Event, scope: trio.CancelScope) -> None:
    await gone.wait()
    scope.cancel()


def _deadline(headers: Headers) -> float | None:
    """The caller's deadline on our clock; a timeout that cannot be read is none."""
    raw = header(headers, "grpc-timeout")
    if raw is None:
        return None
    try:
        seconds: float = decode_timeout(raw)
    except ValueError:
        return None
    return trio.current_time() + seconds


class _Reply:
    """The answer to one request: messages, then a status."""

    def __init__(self, stream: ServerStream) -> None:
        self._stream = stream
        self._started = False
        self._last_write = trio.current_time()

    async def unary(self, result: Result) -> None:
        """A whole answer."""
        if result.payload is not None:
            await self.message(result.payload.data, result.headers)
        await self.end(result)

    async def events(self, payloads: Sequence[Payload], head: Result) -> None:
        """Stream events; raises CallerGone."""
        try:
            for payload in payloads:
                await self.message(payload.data, head.headers)
        except StreamGone as gone:
            raise CallerGone("stalled" if gone.stalled else "cancelled") from gone

    async def message(self, data: bytes, headers: Headers) -> None:
        """One message; `headers` become initial metadata when nothing was sent before."""
        await self._start(headers)
        await self._stream.send_data(grpc_frame(data))
        self._last_write = trio.current_time()

    async def keep_alive(self, seconds: float) -> None:
        """Headers after `seconds`, and a PING whenever nothing was sent for as long."""
        while True:
            due = self._last_write + seconds
            await trio.sleep_until(due)
            if self._last_write + seconds > due:
                continue
            self._last_write = trio.current_time()
            try:
                await self._start([])
                self._stream.keep_alive()
            except StreamGone:
                return

    async def end(self, result: Result) -> None:
        """The status of `result`, and how it was reached."""
        if result.error is not None:
            await self.end_with_error(result.error, [*result.headers, *result.reached])
        else:
            await self._start(result.headers)
            await self.end_with_status(0, "", None, result.reached)

    async def end_with_error(self, record: ErrorRecord, headers: Headers) -> None:
        """An error as status, message and details."""
        status, message, details = errors.to_grpc(record)
        known = {name for name, _ in headers}
        more = [pair for pair in record.headers if pair[0] not in known]
        if record.delivered and "a2a-sidecar-delivered" not in known:
            more.append(("a2a-sidecar-delivered", record.delivered))
        await self.end_with_status(status, message, details, [*headers, *more])

    async def end_with_status(
        self, status: int, message: str, details: bytes | None, headers: Headers
    ) -> None:
        """Trailers; the only HEADERS frame when nothing was sent before."""
        trailers = grpc.status_trailers(status, message, details)
        trailers += relay.fit(headers, Binding.GRPC)
        if not self._started:
            trailers = [*_HEAD, *trailers]
        self._started = True
        await self._stream.send_trailers(trailers)

    async def _start(self, headers: Headers) -> None:
        if not self._started:
            self._started = True
            await self._stream.send_headers([*_HEAD, *relay.fit(headers, Binding.GRPC)])
