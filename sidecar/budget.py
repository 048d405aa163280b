"""One bound on everything that is held in memory for calls: bodies, replies, events, conversions."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from types import TracebackType


class Budget:
    """`total` bytes for all calls together.

    New requests are refused when there is no room. What belongs to a call under way waits for it,
    in the order of asking, but for one call at a time: the first that had to wait takes what it
    needs. Calls that each hold a part of the room and wait for the rest would otherwise wait for
    each other.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._waiting: deque[tuple[Reservation, int, trio.Event]] = deque()
        self._favoured: Reservation | None = None
        """The call that goes above the total; until it gives something back."""

    def reserve(self) -> Reservation:
        """What one call will hold; to be used as a context manager."""
        return Reservation(self)

    def resize(self, total: int) -> None:
        """`total` bytes from now on."""
        self.total = total
        self._admit()

    def fits(self, size: int) -> bool:
        """Whether a new request may take `size` bytes now."""
        return not self._waiting and self._has_room(size)

    def _has_room(self, size: int) -> bool:
        return self.taken + size <= self.total or self.taken == 0

    async def wait_for(self, asking: Reservation, size: int) -> None:
        """Return when `size` bytes are taken for `asking`."""
        if self._favoured is asking or self.fits(size):
            self.taken += size
            return
        place = (asking, size, trio.Event())
        self._waiting.append(place)
        self._admit()
        try:
            await place[2].wait()
        except trio.Cancelled:
            if place[2].is_set():
                self.give(asking, size)
            else:
                self._waiting.remove(place)
                self._admit()
            raise

    def give(self, giving: Reservation, size: int) -> None:
        """`size` bytes are free again."""
        self.taken -= size
        if giving is self._favoured:
            self._favoured = None
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            asking, size, event = self._waiting[0]
            if not self._has_room(size):
                if self._favoured is not None:
                    return
                self._favoured = asking
            self._waiting.popleft()
            self.taken += size
            event.set()


class Reservation:
    """The bytes that one call holds; all of them are given back at its end."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.give(self.held)

    def try_take(self, size: int) -> bool:
        """Take `size` bytes if there is room for them."""
        if not self._budget.fits(size):
            return False
        self._budget.taken += size
        self.held += size
        return True

    async def take(self, size: int) -> None:
        """Take `size` bytes when there is room for them."""
        await self._budget.wait_for(self, size)
        self.held += size

    def give(self, size: int) -> None:
        """Give `size` bytes back."""
        self.held -= size
        self._budget.give(self, size)
