"""What the HTTP/1.1 doors share: who may come in, which agent is meant, SSE replies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from sidecar.breaker import Breaker
from sidecar.core import door, errors, relay
from sidecar.core.http_common import JSON_TYPE, SSE_TYPE
from sidecar.core.spec import GET_EXTENDED_CARD, Binding
from sidecar.core.sse import SSE_COMMENT, sse_event
from sidecar.core.types import Call, header
from sidecar.forwarder import always
from sidecar.result import CallerGone
from sidecar.wire.http1_server import BodyTooLarge, PeerGone, Stalled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from sidecar.agent import Agent
    from sidecar.budget import Budget, Reservation
    from sidecar.config import Limits
    from sidecar.core.spec import Operation
    from sidecar.core.types import ErrorRecord, Headers, Payload
    from sidecar.doors.cards import CardDesk, Place
    from sidecar.doors.entry import Entry
    from sidecar.forwarder import Forwarder
    from sidecar.result import Deliver, Result
    from sidecar.wire.http1_server import Http1Request


COPIES = 2
"""A request is in memory as it came, and as it goes on to an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What every door of the daemon opens to."""

    forwarder: Forwarder
    agents: Mapping[str, Agent]
    cards: CardDesk
    limits: Limits
    budget: Budget
    new_call_id: Callable[[], str]
    count_limit: Callable[[str], None]
    """Called with the name of a limit at which a request is refused."""


class _NoRoom(Exception):
    """The budget has no room for the rest of a body."""


class HttpDoor(ABC):
    """Serves the requests of one HTTP/1.1 listener."""

    takes_http1_calls = True
    """Whether its clients speak HTTP/1.1; cards are served over it at every door."""

    def __init__(self, house: House, place: Place, entry: Entry) -> None:
        self._house = house
        self._place = place
        self._entry = entry
        self.breaker = Breaker()
        """Ends this door's calls when its drain is over."""

    async def serve(self, request: Http1Request) -> None:
        """Answer one request."""
        refused = self._entry.admit(request.headers, header(request.headers, "host") or "")
        if refused is not None:
            await self.refuse(request, refused)
            return
        named, path = door.agent_in_path(request.target)
        agent = door.choose_agent(named, self._place.agent, self._house.agents)
        is_card = self._house.cards.is_card_path(path)
        if not is_card and not self.takes_http1_calls:
            await self.refuse(request, errors.own("INVALID_REQUEST", "this listener speaks gRPC"))
            return
        if not isinstance(agent, str):
            await (self._house.cards if is_card else self).refuse(request, agent)
            return
        if is_card:
            # Without the token: a client reads there how to authenticate.
            await self._house.cards.serve(request, self._house.agents[agent], self._place)
            return
        refused, withheld = self._entry.authenticate(request.headers)
        if refused is not None:
            await self.refuse(request, refused)
            return
        relayed = relay.request_headers(
            request.headers, withheld=withheld, via=self._entry.pseudonym
        )
        with self._house.budget.reserve() as held:
            await self.serve_call(request, path, self._house.agents[agent], relayed, held)

    @abstractmethod
    async def serve_call(
        self,
        request: Http1Request,
        path: str,
        agent: Agent,
        relayed: Headers,
        held: Reservation,
    ) -> None:
        """Answer a request to `agent`.

        `path` is below the agent's own prefix; `relayed` are the headers that go on with the call;
        `held` is what the call holds in memory.
        """

    @abstractmethod
    def refusal(self, record: ErrorRecord) -> tuple[int, Headers, bytes]:
        """Status, headers and body for what never became a call, in the binding's own form."""

    async def refuse(self, request: Http1Request, record: ErrorRecord) -> None:
        """Answer what never became a call."""
        await request.respond(*self.refusal(record))

    @abstractmethod
    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Headers and body of what HTTP/1.1 itself refuses."""

    # --- for the doors ------------------------------------------------------------------------

    async def read_body(self, request: Http1Request, held: Reservation) -> bytes | None:
        """The request's body; None when it was too large, or too much, and has been refused."""
        limit = self._house.limits.request_bytes
        declared = request.content_length

        def hold(size: int) -> None:
            if not held.try_take(size * COPIES):
                raise _NoRoom

        try:
            if declared is None:
                return await request.body(limit, hold)
            if declared <= limit:
                hold(declared)
            return await request.body(limit)
        except _NoRoom:
            await self.refuse(request, self.no_room())
        except BodyTooLarge:
            await self.refuse(request, self.too_large())
        return None

    def no_room(self) -> ErrorRecord:
        """The refusal of a request for which there is no memory."""
        self._house.count_limit("buffered_bytes")
        return errors.own("LIMIT_REACHED", "limits.buffered_bytes is reached")

    def too_large(self) -> ErrorRecord:
        """The refusal of a request that is too large by itself."""
        self._house.count_limit("request_bytes")
        limit = self._house.limits.request_bytes
        return errors.own("TOO_LARGE", f"the request is above limits.request_bytes ({limit})")

    def call(
        self,
        relayed: Headers,
        operation: Operation,
        payload: Payload,
        tenant: str,
        deadline: float | None = None,
    ) -> Call:
        """The call that a request has become."""
        return Call(
            operation=operation,
            binding=self._place.binding,
            payload=payload,
            tenant=tenant,
            headers=relayed,
            id=self._house.new_call_id(),
            deadline=deadline,
        )

    async def ask(
        self,
        agent: Agent,
        call: Call,
        authority: str,
        held: Reservation,
        may_go_on: Callable[[], Awaitable[bool]] = always,
    ) -> Result:
        """What `agent` answers to a unary `call` that came under `authority`."""

        def lead_here(result: Result) -> None:
            self._house.cards.rewrite_answer(result, call, agent.name, self._place, authority)

        return await self._house.forwarder.unary(
            agent,
            call,
            held=held,
            breaker=self.breaker,
            may_go_on=may_go_on,
            amend=lead_here if call.operation is GET_EXTENDED_CARD else None,
        )

    async def forward(
        self,
        request: Http1Request,
        agent: Agent,
        call: Call,
        reply: HttpReply,
        held: Reservation,
    ) -> None:
        """Carry `call` to `agent` and answer with what comes back."""
        if call.operation.streaming:
            forwarder = self._house.forwarder
            stream = _SseStream(request, reply, self._house.limits.keepalive_seconds)
            await stream.run(
                lambda deliver: forwarder.stream(
                    agent, call, deliver, held=held, breaker=self.breaker
                )
            )
            return
        with trio.CancelScope() as scope:
            request.gone.then(scope.cancel)
            authority = header(request.headers, "host") or ""
            result = await self.ask(agent, call, authority, held, lambda: _still_there(request))
            await _respond(request, reply, result)


async def _still_there(request: Http1Request) -> bool:
    """Whether the client still has its side open."""
    await request.look()
    return not request.half_closed.is_set()


class HttpReply(ABC):
    """How one call is answered in an HTTP binding's form."""

    @abstractmethod
    def unary(self, result: Result) -> tuple[int, str, bytes]:
        """Status, content type and body of a whole answer, an error included."""

    @abstractmethod
    def event(self, payload: Payload) -> bytes:
        """The data of a stream event."""

    @abstractmethod
    def error_event(self, record: ErrorRecord) -> bytes:
        """The data of an ``error`` event."""

    @abstractmethod
    def opens_with(self, record: ErrorRecord) -> bool:
        """Whether an error before the first event is a whole answer rather than an event."""


def reply_headers(result: Result) -> Headers:
    """The headers of an answer but for its type, those that an error brings included."""
    headers = relay.fit([*result.headers, *result.reached], Binding.HTTP_JSON)
    if result.error is not None:
        present = {name for name, _ in headers}
        headers += [pair for pair in result.error.headers if pair[0] not in present]
    return headers


async def _respond(request: Http1Request, reply: HttpReply, result: Result) -> None:
    """A whole answer."""
    status, content_type, body = reply.unary(result)
    await request.respond(status, [("content-type", content_type), *reply_headers(result)], body)


def error_headers(record: ErrorRecord) -> Headers:
    """The headers of an error that never became a call."""
    made = [("content-type", JSON_TYPE), *record.headers]
    if record.delivered:
        made.append(("a2a-sidecar-delivered", record.delivered))
    return made


class _SseStream:
    """One SSE reply: head at the first event or after `keepalive` seconds, then events.

    Comments go out between events only: one lock, one writer at a time.
    """

    def __init__(self, request: Http1Request, reply: HttpReply, keepalive: float) -> None:
        self._request = request
        self._reply = reply
        self._keepalive = keepalive
        self._writing = trio.Lock()
        self._last_write = trio.current_time()
        self._started = False

    async def run(self, carry: Callable[[Deliver], Awaitable[Result]]) -> None:
        """Relay the stream that `carry` delivers until it ends or the client leaves."""
        async with trio.open_nursery() as nursery:
            # A client that has sent its request and closed its side has left the stream.
            self._request.half_closed.then(nursery.cancel_scope.cancel)
            self._request.gone.then(nursery.cancel_scope.cancel)
            nursery.start_soon(self._keep_alive)
            with contextlib.suppress(CallerGone, PeerGone):
                await self._finish(await carry(self._events))
            nursery.cancel_scope.cancel()
        if not self._request.ended:
            raise PeerGone("the client has left the stream")

    async def _keep_alive(self) -> None:
        while True:
            due = self._last_write + self._keepalive
            await trio.sleep_until(due)
            if self._last_write + self._keepalive > due:
                continue
            async with self._writing:
                try:
                    await self._start([])
                    await self._send(SSE_COMMENT)
                except PeerGone:
                    return  # the next event, or `gone`, ends the stream

    async def _events(self, payloads: Sequence[Payload], head: Result) -> None:
        async with self._writing:
            try:
                if not self._started:
                    await self._start(reply_headers(head))
                event = self._reply.event
                await self._send(b"".join(sse_event(event(payload)) for payload in payloads))
            except Stalled as stalled:
                raise CallerGone("stalled") from stalled
            except PeerGone as gone:
                raise CallerGone from gone

    async def _finish(self, result: Result) -> None:
        """The end, with an error in the form that fits what has gone out."""
        async with self._writing:
            error = result.error
            if error is not None and not self._started and self._reply.opens_with(error):
                await _respond(self._request, self._reply, result)
                return
            await self._start(reply_headers(result))
            if error is not None:
                await self._send(sse_event(self._reply.error_event(error), "error"))
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
