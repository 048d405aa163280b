"""One call through the candidates: turn → attempt → classify → next, surface or relay.

The forwarder sees no bytes and knows no protocol. What an ending means stands in
`core.failover`; here it is carried out: the selection moved, the refresh asked, the ending counted
and logged, the caller told.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from sidecar.account import Account
from sidecar.agent import Unavailable
from sidecar.core import errors, failover, tenant
from sidecar.core.convert import InvalidMessage
from sidecar.core.stream_state import StreamState
from sidecar.core.types import Attempt, Kind
from sidecar.credentials import CredentialsUnavailable
from sidecar.result import CallerGone, Result
from sidecar.upstream import Ended
from sidecar.wire.exchange import Progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.agent import Agent, Generation
    from sidecar.breaker import Breaker
    from sidecar.budget import Reservation
    from sidecar.core.spec import Binding
    from sidecar.core.types import (
        Call,
        ErrorRecord,
        Headers,
        Interface,
        Outcome,
        Payload,
        Reply,
        Request,
    )
    from sidecar.logs import Log
    from sidecar.result import Deliver
    from sidecar.telemetry import Telemetry
    from sidecar.upstream import UpstreamStream

# No attempt begins this close to the caller's deadline.
_DEADLINE_MARGIN_SECONDS = 0.05
_UNAUTHENTICATED = 16


async def always() -> bool:
    """The caller is not asked whether it is still there."""
    return True


class Forwarder:
    """Carries calls to agents. One for the whole daemon."""

    def __init__(self, *, telemetry: Telemetry, log: Log) -> None:
        self.telemetry = telemetry
        self.log = log
        self.log_calls = False
        """Whether each call gets a line."""

    async def unary(
        self,
        agent: Agent,
        call: Call,
        *,
        held: Reservation | None = None,
        breaker: Breaker | None = None,
        may_go_on: Callable[[], Awaitable[bool]] = always,
        amend: Callable[[Result], None] | None = None,
    ) -> Result:
        """The answer to a unary call. `may_go_on` is asked before each further attempt.

        `amend` may change the result before it is counted. `held` is what the call holds in memory: the reply is charged to it.

        Cancelling it means that the caller has left: the attempt under way is broken off.
        """
        passage = _Passage(agent, call, held, may_go_on, self)
        if agent.in_flight >= agent.config.max_concurrency:
            return passage.finish(passage.limit_reached("max_concurrency"))
        agent.in_flight += 1
        try:
            return await passage.run(lambda: passage.unary(amend), breaker)
        finally:
            agent.in_flight -= 1

    async def stream(
        self,
        agent: Agent,
        call: Call,
        deliver: Deliver,
        *,
        held: Reservation | None = None,
        breaker: Breaker | None = None,
        may_go_on: Callable[[], Awaitable[bool]] = always,
    ) -> Result:
        """Hand each event to `deliver`, and only then take the next; returns how it ended.

        Cancelling it means that the caller has left: the upstream stream is closed, the task is
        not cancelled.
        """
        passage = _Passage(agent, call, held, may_go_on, self)
        if agent.streams >= agent.config.max_streams:
            return passage.finish(passage.limit_reached("max_streams"))
        agent.streams += 1
        try:
            return await passage.run(lambda: passage.stream(deliver), breaker)
        finally:
            agent.streams -= 1


class _Passage:
    """One call on its way: the attempts made, the one under way, and what comes of them."""

    def __init__(
        self,
        agent: Agent,
        call: Call,
        held: Reservation | None,
        may_go_on: Callable[[], Awaitable[bool]],
        forwarder: Forwarder,
    ) -> None:
        self.agent = agent
        self.call = call
        self.attempts: list[Attempt] = []
        self._held = held
        self._may_go_on = may_go_on
        self._account = Account(
            forwarder.telemetry, forwarder.log, agent.name, call, log_calls=forwarder.log_calls
        )
        self._sent_headers: Headers = []
        self._interface: Interface | None = None
        """Of the attempt under way."""
        self._progress = Progress()
        self._passed_over: list[str] = []
        self._invalid = 0
        """Of those, how many cannot carry the message itself."""
        self._refusals: list[Result] = []
        self._state: StreamState | None = None
        self._was_drained = False

    async def run(self, carry: Callable[[], Awaitable[Result]], breaker: Breaker | None) -> Result:
        """Carry the call until it ends, its time is over or its caller leaves; count it."""
        deadline = self.call.deadline
        scope = trio.CancelScope(deadline=math.inf if deadline is None else deadline)
        breakers = [one for one in (breaker, self.agent.breaker) if one is not None]
        for one in breakers:
            one.add(scope)
        try:
            with scope:
                return self.finish(await carry())
            if any(one.tripped for one in breakers):
                return self.finish(self._drained())
            return self.finish(self._caller_ended("the caller's deadline passed"))
        except CredentialsUnavailable as error:
            return self.finish(self._own_error("CREDENTIALS_UNAVAILABLE", str(error)))
        except CallerGone as gone:
            self._gone(gone.reason)
            raise
        except Exception as error:
            self._account.bug(error)
            return self.finish(self._ended_by_bug())
        except BaseException:
            # cancelled; what comes out of a nursery is a group of that
            self._gone("cancelled")
            raise
        finally:
            for one in breakers:
                one.discard(scope)

    # --- through the candidates ---------------------------------------------------------------

    async def unary(self, amend: Callable[[Result], None] | None) -> Result:
        """Try the candidates until one answers or an ending stops the call."""

        async def attempt(interface: Interface, request: Request) -> Ended:
            return await self.agent.upstream.unary(
                interface, self.call, request, self._progress, self._held
            )

        result = await self._through(attempt, lambda kind: failover.TABLE[kind].next_candidate)
        if amend is not None:
            amend(result)
        return result

    async def stream(self, deliver: Deliver) -> Result:
        """Open the stream on the current candidate and relay it; never replayed.

        Only when the agent's configuration says so, one that provably was not delivered opens on
        the next candidate.
        """
        self._state = StreamState()

        async def attempt(interface: Interface, request: Request) -> Ended:
            opened = await self.agent.upstream.open_stream(
                interface, self.call, request, self._progress, self._held
            )
            return opened if isinstance(opened, Ended) else await self._relay(opened, deliver)

        dial_failover = self.agent.config.stream_dial_failover
        return await self._through(
            attempt, lambda kind: dial_failover and kind is Kind.NOT_DELIVERED
        )

    async def _through(
        self,
        attempt: Callable[[Interface, Request], Awaitable[Ended]],
        goes_on: Callable[[Kind], bool],
    ) -> Result:
        """One attempt after another, as long as their endings say that the call goes on."""
        try:
            generation = await self.agent.ready()
        except Unavailable as error:
            return self._own_error(error.reason, str(error))
        turn = failover.Turn(generation.selection)
        while (index := turn.next()) is not None:
            interface = generation.candidates[index]
            request = await self._encoded(interface)
            if request is None:
                continue
            if not await self._may_begin():
                return self._caller_ended("the caller left, or its deadline passed")
            self._begin(interface, request)
            ended = await attempt(interface, request)
            outcome = self._settle(generation, index, turn.moves, ended)
            if outcome.kind is Kind.ANSWERED:
                return self._answer(ended)
            if outcome.refusal:
                self._refusals.append(self._answer(ended))
            if not goes_on(outcome.kind):
                return self._surface(generation, ended, outcome)
        return self._exhausted(generation)

    async def _relay(self, stream: UpstreamStream, deliver: Deliver) -> Ended:
        assert self._state is not None  # set where the stream begins
        try:
            head = self._result(headers=stream.headers)
            events: list[Reply] | Ended = stream.first
            while not isinstance(events, Ended):
                payloads = [event.payload for event in events if event.payload is not None]
                for payload in payloads:
                    self._state.see(payload)
                    self._account.event()
                await deliver(payloads, head)
                events = await stream.receive()
            return events
        finally:
            await stream.aclose()

    # --- attempts -----------------------------------------------------------------------------

    async def _encoded(self, interface: Interface) -> Request | None:
        """The request, or None when this candidate cannot carry the call: no attempt, no move."""
        if interface.refuses_callers_credentials and self._brings_credentials():
            self._passed_over.append(
                f"{interface.label} is on another host than the card; the caller's credentials go"
                " there only if trusted_hosts names it"
            )
            return None
        try:
            return await self.agent.upstream.encode(self.call, interface)
        except InvalidMessage as error:
            self._passed_over.append(f"{interface.label}: {error}")
            self._invalid += 1
            return None

    def _brings_credentials(self) -> bool:
        names = self.agent.credential_headers
        return any(name in names for name, _ in self.call.headers)

    async def _may_begin(self) -> bool:
        """Whether another attempt may begin; the first one always may, for a caller that listens."""
        deadline = self.call.deadline
        if deadline is not None and deadline - trio.current_time() < _DEADLINE_MARGIN_SECONDS:
            return False
        return not self.attempts or await self._may_go_on()

    def _begin(self, interface: Interface, request: Request) -> None:
        self._account.attempt_began(interface, self.attempts[-1] if self.attempts else None)
        self._interface = interface
        self._progress = Progress()
        self._sent_headers = request.headers

    def _record(self, outcome: Outcome, detail: str = "") -> None:
        """The attempt under way has ended."""
        assert self._interface is not None  # an attempt was begun
        now = trio.current_time()
        attempt = Attempt(interface=self._interface, outcome=outcome, detail=detail, at=now)
        self.attempts.append(attempt)
        self.agent.attempts.append(attempt)
        self._account.attempt_ended(attempt, redialled=bool(self._progress.redialled))
        self._interface = None

    def _settle(self, generation: Generation, index: int, moves: int, ended: Ended) -> Outcome:
        """Judge how the attempt ended, and do what that means for everything but this call."""
        outcome = failover.classify(ended.facts)
        self._record(outcome, ended.detail)
        advance = outcome.advance
        if outcome.kind is Kind.AMBIGUOUS:
            advance = advance and self.agent.config.advance_on_ambiguous
        elif outcome.kind is Kind.ANSWERED:
            self.agent.answered()
            if ended.facts.http_status == 401 or ended.facts.grpc_status == _UNAUTHENTICATED:
                self.agent.credentials.rejected(self._sent_headers)
        if advance:
            self.agent.advance(generation, index, moves)
        if outcome.refresh:
            self.agent.ask_refresh(generation)
        return outcome

    # --- what the caller gets -----------------------------------------------------------------

    def _result(
        self,
        *,
        payload: Payload | None = None,
        error: ErrorRecord | None = None,
        headers: Headers | None = None,
        outcome: str = "ok",
    ) -> Result:
        under_way = self._interface is not None
        last = self._interface or (self.attempts[-1].interface if self.attempts else None)
        return Result(
            payload=payload,
            error=error,
            headers=headers or [],
            interface=last.label if last else "",
            attempts=len(self.attempts) + under_way,
            outcome=outcome,
        )

    def _answer(self, ended: Ended) -> Result:
        """The agent's own answer, as it is."""
        reply = ended.reply
        if reply is None or reply.payload is None:
            error = (reply.error or reply.plain) if reply else None
            outcome = "agent_error" if error else "ok"
            return self._result(error=error, headers=ended.headers, outcome=outcome)
        payload = tenant.answer(self.call.operation, reply.payload, self.call.tenant)
        return self._result(payload=payload, headers=ended.headers)

    def _surface(self, generation: Generation, ended: Ended, outcome: Outcome) -> Result:
        """The error of a call that ends without an answer, at its last attempt."""
        if outcome.kind is Kind.CALLER:
            return self._own_error(
                "DEADLINE_EXCEEDED", "the caller's deadline passed", outcome=outcome
            )
        if outcome.kind is Kind.LOCAL:
            return self._own_error(
                "LIMIT_REACHED", "the sidecar is out of connections or descriptors", outcome=outcome
            )
        if failover.TABLE[outcome.kind].next_candidate:  # a stream that may not move
            return self._not_delivered(generation)
        message = (
            f"agent {self.agent.name} may have taken the call, but no answer came"
            f" ({errors.describe(self.attempts[-1])})"
        )
        if outcome.result == "too_large":
            self._account.limit("event_bytes" if self._state is not None else "response_bytes")
            message = f"{ended.detail}: see limits.response_bytes and limits.event_bytes"
        elif self._state is not None and self._state.task_id:
            tried = errors.describe(self.attempts[-1])
            message = f"the stream of task {self._state.task_id} broke off ({tried})"
        return self._own_error(
            "DELIVERY_UNKNOWN",
            message,
            outcome=outcome,
            kept_status=errors.kept_status(ended.facts),
        )

    def _exhausted(self, generation: Generation) -> Result:
        """Every candidate had its turn, and none answered."""
        if not self.attempts:
            result = self._own_error(
                "NOT_REPRESENTABLE",
                "no interface of the agent can carry this call: " + "; ".join(self._passed_over),
            )
            if result.error is not None and self._invalid == len(self._passed_over):
                result.error = errors.as_invalid_params(result.error)
            return result
        return self._not_delivered(generation)

    def _not_delivered(self, generation: Generation) -> Result:
        """None of the candidates that were tried took the call.

        What every interface says is the agent's own answer: the first one's is returned.
        """
        if len(self._refusals) == len(generation.candidates):
            first = self._refusals[0]
            first.attempts = len(self.attempts)
            return first
        exhausted = len(self.attempts) == len(generation.candidates)
        if exhausted and any(one.outcome.kind is Kind.NOT_DELIVERED for one in self.attempts):
            self.agent.ask_refresh(generation)
        self._account.not_delivered(self.attempts[-1])
        tried = "; ".join([*map(errors.describe, self.attempts), *self._passed_over])
        return self._own_error(
            "NOT_DELIVERED", f"agent {self.agent.name} did not take the call ({tried})"
        )

    def _caller_ended(self, message: str) -> Result:
        """The caller left, or its deadline passed, whether or not an attempt was under way."""
        ended = self._end_under_way(failover.ended_by_caller)
        return self._own_error("DEADLINE_EXCEEDED", message, outcome=ended)

    def _ended_by_bug(self) -> Result:
        ended = self._end_under_way(failover.ended_locally)
        return self._own_error("INTERNAL", "internal error of the sidecar", outcome=ended)

    def _drained(self) -> Result:
        """The time that a stopping daemon, listener or agent gives its calls is over."""
        ended = self._end_under_way(failover.ended_locally)
        reason = "DELIVERY_UNKNOWN" if ended.written else "DRAINING"
        self._was_drained = True
        return self._own_error(reason, "the sidecar stops serving this call", outcome=ended)

    def _end_under_way(self, ended_by: Callable[..., Outcome]) -> Outcome:
        """How the call ended on our side; so did the attempt under way, if there is one."""
        under_way = self._interface is not None
        progress = self._progress
        ended = ended_by(written=under_way and progress.written, phase=progress.phase)
        if under_way:
            self._record(ended)
        return ended

    def limit_reached(self, limit: str) -> Result:
        """The refusal of a call above one of the agent's limits."""
        self._account.limit(limit)
        return self._own_error(
            "LIMIT_REACHED",
            f"agent {self.agent.name} has as many calls under way as agents.{self.agent.name}"
            f".{limit} allows",
        )

    def _own_error(
        self,
        reason: str,
        message: str,
        *,
        outcome: Outcome | None = None,
        kept_status: tuple[Binding, int] | None = None,
    ) -> Result:
        error = errors.own(
            reason,
            message,
            agent=self.agent.name,
            call=self.call.id,
            delivered="unknown" if outcome and outcome.written else "no",
            attempts=tuple(self.attempts),
            kept_status=kept_status,
            metadata={"task": self._state.task_id} if self._state and self._state.task_id else None,
        )
        if outcome is not None:
            counted = failover.TABLE[outcome.kind].counted
        else:
            counted = _COUNTED_REASONS.get(reason, "rejected")
        return self._result(error=error, outcome=counted)

    # --- the end ------------------------------------------------------------------------------

    def finish(self, result: Result) -> Result:
        """Count the call by its result."""
        self._account.call_ended(
            result.outcome,
            interface=result.interface,
            attempts=result.attempts,
            error=result.error.reason if result.error else "",
        )
        if self._state is not None:
            self._account.stream_ended(self._stream_end(result))
        return result

    def _stream_end(self, result: Result) -> str:
        assert self._state is not None  # only asked of streams
        if result.error is None:
            return "completed" if self._state.settled else "unfinished"
        if self._was_drained:
            return "drained"
        if result.outcome == "cancelled":
            return "cancelled"
        return "broken" if result.outcome == "ambiguous" else "error"

    def _gone(self, reason: str) -> None:
        """Nobody is left to be answered."""
        self._caller_ended("the caller left")
        self._account.call_ended("cancelled", attempts=len(self.attempts))
        if self._state is not None:
            self._account.stream_ended(reason)


# How calls are counted whose error comes from no attempt's ending.
_COUNTED_REASONS: dict[str, str] = {
    "NOT_DELIVERED": "not_delivered",
    "CARD_UNAVAILABLE": "not_delivered",
    "NO_ELIGIBLE_INTERFACE": "not_delivered",
}
