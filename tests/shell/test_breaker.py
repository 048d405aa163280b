"""Calls that are broken off together."""

from __future__ import annotations

import trio

from sidecar.breaker import Breaker


async def test_calls_under_way_end(autojump_clock):
    breaker = Breaker()
    ended: list[str] = []

    async def call(name: str, seconds: float) -> None:
        with trio.CancelScope() as scope:
            breaker.add(scope)
            try:
                await trio.sleep(seconds)
            finally:
                breaker.discard(scope)
        ended.append(f"{name} {'cut' if scope.cancelled_caught else 'whole'}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, "short", 1)
        nursery.start_soon(call, "long", 3600)
        await trio.sleep(2)
        breaker.trip()
        assert breaker.tripped
        await trio.sleep(1)
        nursery.start_soon(call, "late", 3600)  # begins after the end
    assert ended == ["short whole", "long cut", "late cut"]
    assert trio.current_time() < 3600
