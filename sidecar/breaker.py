"""Calls that are broken off together, when the time that a drain gives them is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio


class Breaker:
    """The calls of one door or one agent that are under way."""

    def __init__(self) -> None:
        self.tripped = False
        self._scopes: set[trio.CancelScope] = set()

    def trip(self) -> None:
        """End every call that is under way, and every later one as it begins."""
        self.tripped = True
        for scope in self._scopes:
            scope.cancel()

    def add(self, scope: trio.CancelScope) -> None:
        """A call is under way."""
        self._scopes.add(scope)
        if self.tripped:
            scope.cancel()

    def discard(self, scope: trio.CancelScope) -> None:
        """It has ended."""
        self._scopes.discard(scope)
