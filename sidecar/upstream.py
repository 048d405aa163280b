"""One attempt: a request to one interface, and all that is known of how it ended.

Nothing is judged here: the facts go to `core.failover`. What may be sent again inside an attempt
is what nothing executed: a redial (in the pools), one same-origin 307/308, and
``POST …:subscribe`` answered 405 as ``GET``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, assert_never
from urllib.parse import urljoin, urlsplit

import trio

from sidecar import __version__
from sidecar.core import convert, grpc, http_common, http_json, jsonrpc, relay
from sidecar.core.http_common import SSE_TYPE, media_type
from sidecar.core.interface_url import default_port
from sidecar.core.payload import PayloadError
from sidecar.core.spec import SUBSCRIBE_TO_TASK, Binding, Operation
from sidecar.core.sse import EventTooLarge
from sidecar.core.types import (
    Break,
    Facts,
    Form,
    Headers,
    Payload,
    Phase,
    Reply,
    ReplyHead,
    Request,
    header,
)
from sidecar.wire.exchange import ExchangeBroken, Progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.budget import Reservation
    from sidecar.core.types import Broken, Call, Interface
    from sidecar.wire.exchange import Exchange, Pool

_EventReader = grpc.EventReader | http_common.EventReader
_T = TypeVar("_T")

# Above this, conversion between JSON and protobuf leaves the loop (about 1 ms of work).
_OFF_LOOP_BYTES = 64 * 1024
_CLOSE_SECONDS = 1.0
_USER_AGENT = ("user-agent", f"a2a-sidecar/{__version__}")
# Two cores' worth: pure Python in more threads only competes for the interpreter.
_conversions = trio.CapacityLimiter(2)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; what they cover is said at the keys of the configuration."""

    response: float
    stream_open: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits in bytes on what an agent sends."""

    response: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one attempt, or an opened stream, ended."""

    facts: Facts
    reply: Reply | None = None
    headers: Headers = field(default_factory=list)
    """The agent's headers that may go downstream."""
    detail: str = ""
    """For the log."""


async def _no_credentials() -> Headers:
    return []


class Upstream:
    """Carries out attempts over the pools of one agent."""

    def __init__(
        self,
        pool: Callable[[Interface], Pool],
        *,
        timeouts: Timeouts,
        sizes: Sizes,
        credentials: Callable[[], Awaitable[Headers]] = _no_credentials,
    ) -> None:
        """`credentials` gives the configured ones, and may raise what its owner understands."""
        self._pool = pool
        self._timeouts = timeouts
        self._sizes = sizes
        self._credentials = credentials
        self._subscribes_by_get: set[tuple[object, ...]] = set()

    async def encode(self, call: Call, interface: Interface) -> Request:
        """`call` as a request to `interface`; raises InvalidMessage when it cannot be carried."""
        if interface.refuses_callers_credentials:
            call = replace(call, headers=relay.for_foreign_host(call.headers))
        match interface.binding:
            case Binding.JSONRPC:
                request = await _converted(call, Form.JSON, jsonrpc.encode_request, call, interface)
            case Binding.HTTP_JSON:
                by_get = interface.identity in self._subscribes_by_get
                request = await _converted(
                    call, Form.JSON, _encode_http_json, call, interface, by_get
                )
            case Binding.GRPC:
                request = await _converted(call, Form.PROTO, grpc.encode_request, call, interface)
                if call.deadline is not None:
                    left = call.deadline - trio.current_time()
                    request.headers.append(grpc.timeout_header(left))
            case _:
                assert_never(interface.binding)
        request.headers.append(_USER_AGENT)
        own = await self._credentials()
        if not own:
            return request
        # What is configured wins over what the caller brings.
        names = {name for name, _ in own}
        kept = [pair for pair in request.headers if pair[0] not in names]
        return replace(request, headers=[*kept, *own])

    async def unary(
        self,
        interface: Interface,
        call: Call,
        request: Request,
        progress: Progress,
        held: Reservation | None = None,
    ) -> Ended:
        """Send `request` and read the whole reply, charged to `held`.

        Cancelling it breaks the exchange off.
        """
        attempt = _Attempt(interface, call, progress, held)
        # A request that cannot be sent in the time a reply may take is timed out as well.
        scope = trio.CancelScope(deadline=trio.current_time() + self._timeouts.response)
        progress.on_sent = lambda: _extend(scope, self._timeouts.response)
        try:
            with scope:
                return await self._whole_reply(attempt, request)
        except ExchangeBroken as error:
            return attempt.ended_broken(error.broken)
        return attempt.ended_broken(progress.broken(Break.TIMEOUT).broken)

    async def _whole_reply(self, attempt: _Attempt, request: Request) -> Ended:
        exchange = await self._open(attempt, request)
        try:
            body = await self._read_all(exchange, attempt)
            return await attempt.ended_with(exchange, body, self._sizes)
        finally:
            await exchange.aclose()

    async def open_stream(
        self,
        interface: Interface,
        call: Call,
        request: Request,
        progress: Progress,
        held: Reservation | None = None,
    ) -> UpstreamStream | Ended:
        """Send `request` and wait for the first event; anything else that comes is an `Ended`."""
        attempt = _Attempt(interface, call, progress, held)
        scope = trio.CancelScope()
        if interface.binding is not Binding.GRPC:
            # gRPC servers may hold their headers back until the first message.
            progress.on_sent = lambda: _extend(scope, self._timeouts.stream_open)
        try:
            with scope:
                exchange = await self._open(attempt, request)
            if scope.cancelled_caught:
                return attempt.ended_broken(progress.broken(Break.TIMEOUT).broken)
            return await self._first_event(attempt, exchange)
        except ExchangeBroken as error:
            return attempt.ended_broken(error.broken)

    async def _first_event(self, attempt: _Attempt, exchange: Exchange) -> UpstreamStream | Ended:
        stream: UpstreamStream | None = None
        try:
            if not attempt.is_stream(exchange.head):
                body = await self._read_all(exchange, attempt)
                ended = await attempt.ended_with(exchange, body, self._sizes)
                if ended.reply is None or ended.reply.payload is None:
                    return ended
                # A result where a stream was asked for: one event, then the end.
                stream = UpstreamStream(attempt, exchange, None, self._sizes.event)
                stream.first = [ended.reply]
                return stream
            reader = attempt.event_reader(exchange.head, self._sizes.event)
            opening = UpstreamStream(attempt, exchange, reader, self._sizes.event)
            first = await opening.receive()
            if isinstance(first, Ended):
                return first
            opening.first = first
            stream = opening
            return stream
        finally:
            if stream is None:
                await exchange.aclose()

    async def _open(self, attempt: _Attempt, request: Request) -> Exchange:
        """Open the exchange; a same-origin redirect and a refused POST of a subscription go on."""
        interface, progress = attempt.interface, attempt.progress
        pool = self._pool(interface)
        redirected = False
        while True:
            exchange = await pool.open(request, progress)
            status = exchange.head.status
            if status in {307, 308}:
                target = _same_origin_target(interface, request, exchange.head)
                if target is None or redirected:
                    attempt.other_origin = True
                    return exchange
                redirected = True
                request = replace(request, target=target)
            elif status == 405 and self._may_subscribe_by_get(attempt, request):
                self._subscribes_by_get.add(interface.identity)
                request = Request("GET", request.target, _without_type(request.headers), b"")
            else:
                return exchange
            # The agent's own word that it did not take the request: a new one begins.
            await exchange.aclose()
            progress.phase, progress.written = Phase.DIALING, False

    def _may_subscribe_by_get(self, attempt: _Attempt, request: Request) -> bool:
        return (
            attempt.call.operation is SUBSCRIBE_TO_TASK
            and attempt.interface.binding is Binding.HTTP_JSON
            and request.method == "POST"
        )

    async def _read_all(self, exchange: Exchange, attempt: _Attempt) -> bytes:
        limit = self._sizes.response
        progress = attempt.progress
        declared = header(exchange.head.headers, "content-length") or ""
        if declared.isdigit() and int(declared) > limit:
            raise progress.broken(Break.TOO_LARGE, detail=f"reply above {limit} bytes")
        parts: list[bytes] = []
        size = 0
        while part := await exchange.receive():
            parts.append(part)
            await attempt.hold(len(part))
            size += len(part)
            if size > limit:
                raise progress.broken(Break.TOO_LARGE, detail=f"reply above {limit} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Attempt:
    """One attempt's ends: from what the wire gave to `Ended`."""

    def __init__(
        self,
        interface: Interface,
        call: Call,
        progress: Progress,
        held: Reservation | None,
    ) -> None:
        self._held = held
        self.interface = interface
        self.call = call
        self.progress = progress
        self.other_origin = False

    @property
    def operation(self) -> Operation:
        return self.call.operation

    async def hold(self, size: int) -> None:
        """Charge `size` bytes to the call; waits while there is no room, and nothing is read."""
        if self._held is not None:
            await self._held.take(size)

    def let_go(self, size: int) -> None:
        """`size` bytes are no longer needed."""
        if self._held is not None:
            self._held.give(size)

    def is_stream(self, head: ReplyHead) -> bool:
        if self.interface.binding is Binding.GRPC:
            return True
        return head.status == 200 and media_type(head.headers) == SSE_TYPE

    def event_reader(self, head: ReplyHead, limit: int) -> _EventReader:
        match self.interface.binding:
            case Binding.JSONRPC:
                return jsonrpc.event_reader(self.operation, limit)
            case Binding.HTTP_JSON:
                return http_json.event_reader(self.operation, limit)
            case Binding.GRPC:
                return grpc.event_reader(self.operation, head, limit)

    async def ended_with(self, exchange: Exchange, body: bytes, sizes: Sizes) -> Ended:
        """The end of a complete reply."""
        head = exchange.head
        match self.interface.binding:
            case Binding.JSONRPC:
                reply = jsonrpc.read_reply(self.operation, head, body)
            case Binding.HTTP_JSON:
                reply = http_json.read_reply(self.operation, head, body)
            case Binding.GRPC:
                try:
                    reply = grpc.read_reply(
                        self.operation, head, body, exchange.trailers, limit=sizes.response
                    )
                except grpc.MessageTooLarge as error:
                    raise self.progress.broken(Break.TOO_LARGE, detail=str(error)) from error
        reply = await self.in_callers_form(reply)
        headers = relay.reply_headers([*head.headers, *exchange.trailers])
        return self.ended_replied(reply, headers)

    async def in_callers_form(self, reply: Reply) -> Reply:
        """`reply` with its payload as the caller's binding writes it; malformed if it cannot be."""
        message = reply.payload
        form = self.call.payload.form
        if message is None or message.form is form:
            return reply
        to = convert.proto_to_json if form is Form.JSON else convert.json_to_proto
        try:
            data = await _off_loop_if_large(message.data, to, self.operation.response, message.data)
            if form is Form.PROTO:
                convert.validate_response(self.operation.response, data)
        except (convert.InvalidMessage, PayloadError) as error:
            return replace(reply, payload=None, malformed=str(error))
        return replace(reply, payload=Payload(form, data))

    def ended_replied(self, reply: Reply, headers: Headers, *, started: bool = False) -> Ended:
        deadline = self.call.deadline
        facts = Facts(
            binding=self.interface.binding,
            operation=self.operation,
            http_status=reply.http_status,
            grpc_status=reply.grpc_status,
            other_origin=self.other_origin,
            error=reply.error,
            malformed=reply.malformed,
            seconds_left=self._seconds_left(deadline),
            started=started,
        )
        return Ended(facts=facts, reply=reply, headers=headers, detail=reply.malformed)

    def _seconds_left(self, deadline: float | None) -> float | None:
        if deadline is None or self.interface.binding is not Binding.GRPC:
            return None  # only gRPC tells the agent
        return deadline - trio.current_time()

    def ended_broken(self, broken: Broken) -> Ended:
        facts = Facts(binding=self.interface.binding, operation=self.operation, broken=broken)
        return Ended(facts=facts, detail=broken.detail or broken.cause.name.lower())


class UpstreamStream:
    """An opened stream: its first event is there, the next are pulled one by one."""

    def __init__(
        self, attempt: _Attempt, exchange: Exchange, reader: _EventReader | None, limit: int
    ) -> None:
        self._attempt = attempt
        self._exchange = exchange
        self._reader = reader
        self._limit = limit
        self._charged = 0
        """Bytes read for events, or parts of them, that were not taken yet."""
        self._ended: Ended | None = None
        self._events = 0
        self.first: list[Reply]
        """The events that opened the stream."""
        self.headers = relay.reply_headers(exchange.head.headers)

    async def receive(self) -> list[Reply] | Ended:
        """The next events, those that came in one read; or how the stream ended."""
        if self._charged:
            self._attempt.let_go(self._charged)
            self._charged = 0
        waiting: list[Reply] = []
        while not waiting:
            if self._ended is not None:
                return self._ended
            try:
                waiting = await self._pull()
            except ExchangeBroken as error:
                self._ended = self._attempt.ended_broken(error.broken)
            except (EventTooLarge, grpc.MessageTooLarge) as error:
                broken = self._attempt.progress.broken(Break.TOO_LARGE, detail=str(error)).broken
                self._ended = self._attempt.ended_broken(broken)
        events: list[Reply] = []
        for one in waiting:
            event = await self._attempt.in_callers_form(one)
            if event.payload is None:
                # What came before an error still reaches the caller.
                self._ended = self._ended_replied(event, [])
                return events or self._ended
            events.append(event)
            self._events += 1
        return events

    async def _pull(self) -> list[Reply]:
        """The events of the next read, none when it completes none; at the end, set `_ended`."""
        if self._reader is None:
            self._ended = self._clean_end([])
            return []
        data = await self._exchange.receive()
        if data:
            self._attempt.progress.phase = Phase.RECEIVING
            self._charged += len(data)
            await self._attempt.hold(len(data))
            return self._reader.feed(data)
        trailers = self._exchange.trailers
        if isinstance(self._reader, grpc.EventReader):
            end = self._reader.end(trailers)
            if end.grpc_status == 0 and not end.malformed:
                self._ended = self._clean_end(trailers)
            else:
                self._ended = self._ended_replied(end, relay.reply_headers(trailers))
            return []
        last = self._reader.end()
        if not last:
            self._ended = self._clean_end(trailers)
        return last

    def _clean_end(self, trailers: Headers) -> Ended:
        none = "" if self._events or self._reader is None else "the stream ended before any event"
        grpc_status = 0 if self._attempt.interface.binding is Binding.GRPC else None
        reply = Reply(http_status=200, grpc_status=grpc_status, malformed=none)
        return self._ended_replied(reply, relay.reply_headers(trailers))

    def _ended_replied(self, reply: Reply, headers: Headers) -> Ended:
        return self._attempt.ended_replied(reply, headers, started=self._events > 0)

    async def aclose(self) -> None:
        """Close the upstream stream; the task goes on."""
        # Shielded, so that why a caller is gone is not lost in the cancellation that follows.
        deadline = trio.current_time() + _CLOSE_SECONDS
        with trio.CancelScope(shield=True, deadline=deadline):
            await self._exchange.aclose()


def _encode_http_json(call: Call, interface: Interface, by_get: bool) -> Request:
    return http_json.encode_request(call, interface, subscribe_by_get=by_get)


async def _converted(
    call: Call, form: Form, encode: Callable[..., Request], *arguments: object
) -> Request:
    """`encode(*arguments)`, off the loop when it has to convert a large message."""
    if call.payload.form is form:
        return encode(*arguments)
    return await _off_loop_if_large(call.payload.data, encode, *arguments)


async def _off_loop_if_large(data: bytes, function: Callable[..., _T], *arguments: object) -> _T:
    if len(data) < _OFF_LOOP_BYTES:
        return function(*arguments)
    return await trio.to_thread.run_sync(
        function, *arguments, limiter=_conversions, abandon_on_cancel=True
    )


def _extend(scope: trio.CancelScope, seconds: float) -> None:
    scope.deadline = trio.current_time() + seconds


def _without_type(headers: Headers) -> Headers:
    return [pair for pair in headers if pair[0] != "content-type"]


def _same_origin_target(interface: Interface, request: Request, head: ReplyHead) -> str | None:
    """Where a redirect points, as a request target; None when it leaves the origin."""
    location = header(head.headers, "location")
    if not location or interface.binding is Binding.GRPC:
        return None
    scheme = "https" if interface.tls else "http"
    try:
        url = urlsplit(urljoin(f"{scheme}://{interface.address}{request.target}", location))
        port = url.port or default_port(tls=url.scheme == "https")
    except ValueError:
        return None
    if (url.scheme, (url.hostname or "").lower(), port) != (scheme, interface.host, interface.port):
        return None
    return (url.path or "/") + (f"?{url.query}" if url.query else "")
