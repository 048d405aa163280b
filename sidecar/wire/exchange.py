"""One request and its reply over any HTTP version: what the connections offer to `upstream`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from sidecar.core.types import Broken, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.types import Break, Headers, ReplyHead, Request


MAX_INTERIM: Final = 16
"""Interim replies (1xx) to one request; more are malformed."""


@dataclass(slots=True)
class Progress:
    """How far one request came; kept up to date by the connection that carries it.

    The caller owns it, so that a timeout or a cancellation still finds the facts.
    """

    phase: Phase = Phase.DIALING
    written: bool = False
    reused: bool = False
    redialled: str = ""
    """Why a reused connection was replaced by a fresh one; '' when none was."""
    on_sent: Callable[[], None] | None = None
    """Called once, when the last byte of the request has been handed to the kernel."""

    def sent(self) -> None:
        """The whole request is out."""
        if self.phase is Phase.SENDING:
            self.phase = Phase.WAITING
        if self.on_sent is not None:
            self.on_sent()
            self.on_sent = None

    def broken(self, cause: Break, *, code: int | None = None, detail: str = "") -> ExchangeBroken:
        """The exception that says this exchange ended here."""
        return ExchangeBroken(
            Broken(
                cause=cause,
                phase=self.phase,
                written=self.written,
                reused=self.reused,
                code=code,
                detail=detail,
            )
        )


class ExchangeBroken(Exception):
    """An exchange ended without a complete reply; `broken` has the facts."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(f"{broken.cause.name} while {broken.phase}: {broken.detail}")
        self.broken = broken


class Exchange(Protocol):
    """A reply under way: its head is there, its body is pulled."""

    head: ReplyHead
    trailers: Headers
    """Filled when `receive` has returned b''."""

    async def receive(self) -> bytes:
        """The next bytes of the body, b'' at its complete end; raises ExchangeBroken.

        Flow-control credit returns to the peer as the bytes are taken.
        """
        ...

    async def aclose(self) -> None:
        """Give the connection back after a complete reply; break the exchange off before that."""
        ...


class Pool(Protocol):
    """Connections to one origin."""

    async def open(self, request: Request, progress: Progress) -> Exchange:
        """Send `request` and return at the final head of its reply; raises ExchangeBroken."""
        ...

    async def aclose(self) -> None:
        """Close idle connections now, busy ones when their exchange ends."""
        ...
