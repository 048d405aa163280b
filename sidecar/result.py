"""What a call comes to, as the forwarder hands it to the doors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sidecar.core.types import ErrorRecord, Headers, Payload


@dataclass(slots=True, kw_only=True)
class Result:
    """What a call comes to: a payload, an error, or (both None) the clean end of a stream."""

    payload: Payload | None = None
    error: ErrorRecord | None = None
    headers: Headers = field(default_factory=list)
    """Of the agent, for the application."""
    interface: str = ""
    """Label of the interface that answered or failed last, '' when none was tried."""
    attempts: int = 0
    outcome: str = "ok"
    """Label `outcome` of requests_total."""

    @property
    def reached(self) -> Headers:
        """Headers that say how the answer was reached."""
        made = [("a2a-sidecar-attempts", str(self.attempts))]
        if self.interface:
            made.append(("a2a-sidecar-interface", self.interface))
        if self.error is not None and self.error.delivered:
            made.append(("a2a-sidecar-delivered", self.error.delivered))
        return made


class CallerGone(Exception):
    """The caller takes no more: raised by `Deliver`."""

    def __init__(self, reason: str = "cancelled") -> None:
        super().__init__(reason)
        self.reason = reason
        """Label `reason` of stream_ends_total: ``cancelled`` or ``stalled``."""


Deliver: TypeAlias = Callable[[Sequence["Payload"], Result], Awaitable[None]]
"""Takes stream events that came together, and how they were reached; returns when they are written.

Raises CallerGone.
"""
