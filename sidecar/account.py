"""One call in metrics and log lines. What is counted is said where the metrics are defined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from sidecar.core import failover
from sidecar.core.types import Kind

if TYPE_CHECKING:
    from sidecar.core.types import Attempt, Call, Interface
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry


class Account:
    """What one call to one agent is counted and logged under."""

    def __init__(
        self, telemetry: Telemetry, log: Log, agent: str, call: Call, *, log_calls: bool
    ) -> None:
        self._telemetry = telemetry
        self._log = log
        self._agent = agent
        self._call = call
        self._log_calls = log_calls
        self._began = trio.current_time()
        self._upstream_seconds = 0.0
        self._attempt_began = self._began
        self._events = 0

    def attempt_began(self, interface: Interface, failed: Attempt | None) -> None:
        """An attempt begins; after a failed one it is a failover."""
        if failed is not None:
            self._telemetry.failover(
                self._agent, failed.interface.label, interface.label, failed.outcome.result
            )
            self._log_ending("failover", failed, to=interface.label)
        self._attempt_began = trio.current_time()

    def attempt_ended(self, attempt: Attempt, *, redialled: bool) -> None:
        """The attempt under way has ended."""
        label = attempt.interface.label
        self._upstream_seconds += trio.current_time() - self._attempt_began
        self._telemetry.attempt(self._agent, label, attempt.outcome.result)
        if redialled:
            self._telemetry.redial(self._agent, label)
        if attempt.outcome.kind is Kind.AMBIGUOUS:
            phase = str(attempt.outcome.phase)
            self._telemetry.ambiguous(self._agent, self._call.operation.name, label, phase)
            self._log_ending("ambiguous", attempt)

    def event(self) -> None:
        """A stream event is handed on."""
        if not self._events:
            seconds = trio.current_time() - self._began
            self._telemetry.first_event(self._agent, self._call.operation.name, seconds)
        self._events += 1
        self._telemetry.stream_event(self._agent)

    def call_ended(
        self, outcome: str, *, interface: str = "", attempts: int = 0, error: str = ""
    ) -> None:
        """The call has ended; `outcome` is the label of requests_total."""
        call = self._call
        seconds = trio.current_time() - self._began
        self._telemetry.request(
            self._agent, call.operation.name, str(call.binding), outcome, seconds
        )
        if not call.operation.streaming:
            own = max(seconds - self._upstream_seconds, 0.0)
            self._telemetry.overhead(self._agent, call.operation.name, own)
        if self._log_calls:
            self._log.info(
                "call",
                agent=self._agent,
                call=call.id,
                operation=call.operation.name,
                binding=str(call.binding),
                outcome=outcome,
                interface=interface,
                attempts=attempts,
                error=error,
                seconds=round(seconds, 4),
            )

    def stream_ended(self, reason: str) -> None:
        """A stream has ended; `reason` is the label of stream_ends_total."""
        self._telemetry.stream_end(self._agent, reason)

    def not_delivered(self, last: Attempt) -> None:
        """No candidate took the call."""
        self._log_ending("not delivered", last)

    def limit(self, limit: str) -> None:
        """The call was refused at a limit."""
        self._telemetry.limit(limit)

    def bug(self, error: BaseException) -> None:
        """A bug of ours ended the call."""
        self._telemetry.internal_error("forwarder")
        self._log.error("internal error", where="forwarder", call=self._call.id, error=repr(error))

    def _log_ending(self, event: str, attempt: Attempt, **more: str) -> None:
        interface, outcome = attempt.interface, attempt.outcome
        hint = failover.is_not_served(outcome, interface.binding)
        if hint:
            more["hint"] = hint
        if attempt.detail:
            more["detail"] = attempt.detail
        self._log.limited(
            (self._agent, interface.label, event, outcome.kind),
            "warning",
            event,
            agent=self._agent,
            call=self._call.id,
            operation=self._call.operation.name,
            interface=interface.label,
            address=interface.address,
            kind=str(outcome.kind),
            result=outcome.result,
            delivered="unknown" if outcome.kind is Kind.AMBIGUOUS else "no",
            **more,
        )
