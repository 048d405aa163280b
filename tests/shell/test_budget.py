"""One bound on memory: refused, waited for, given back, and never a deadlock."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from sidecar.budget import Budget, Reservation


def test_a_request_takes_what_there_is():
    budget = Budget(100)
    with budget.reserve() as one, budget.reserve() as two:
        assert one.try_take(60)
        assert not two.try_take(41)
        assert two.held == 0
        assert two.try_take(40)
        one.give(10)
        assert (budget.taken, one.held, two.held) == (90, 50, 40)
    assert budget.taken == 0


def test_a_single_request_may_be_larger_than_everything():
    budget = Budget(100)
    with budget.reserve() as one, budget.reserve() as two:
        assert one.try_take(500)
        assert not two.try_take(1)
    assert budget.taken == 0


async def test_what_belongs_to_a_call_waits_in_order(autojump_clock):
    budget = Budget(100)
    order: list[str] = []

    async def call(name: str, size: int) -> None:
        with budget.reserve() as held:
            await held.take(size)
            order.append(name)
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        with budget.reserve() as large:
            assert large.try_take(100)
            for name in ("first", "second", "third"):
                nursery.start_soon(call, name, 60)
                await trio.testing.wait_all_tasks_blocked()
            # One call at a time goes above the total, so that something always ends.
            assert order == ["first"]
            with budget.reserve() as new:
                assert not new.try_take(1)
            await trio.sleep(1.5)
            assert order == ["first", "second"]
    assert order == ["first", "second", "third"]
    assert budget.taken == 0


async def test_calls_that_wait_for_each_other_all_end(autojump_clock):
    """Each has a part of what it needs, and nobody has all: without a rule nothing would end."""
    budget = Budget(100)
    most = 0

    async def call() -> None:
        nonlocal most
        with budget.reserve() as held:
            for _ in range(10):
                await held.take(10)
                most = max(most, budget.taken)
                await trio.sleep(0.1)

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(call)
    assert budget.taken == 0
    assert most <= 200  # the total, and one call's need above it


async def test_a_stream_that_goes_above_the_total_lets_others_in(autojump_clock):
    budget = Budget(100)
    stopped = trio.Event()

    async def stream() -> None:
        with budget.reserve() as held:
            while not stopped.is_set():
                await held.take(80)
                await trio.sleep(1)
                held.give(80)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with budget.reserve() as base:
                assert base.try_take(90)
                nursery.start_soon(stream)
                nursery.start_soon(stream)
                await trio.sleep(0.5)
                with budget.reserve() as held:
                    await held.take(20)
            stopped.set()
    assert budget.taken == 0


@pytest.mark.parametrize("late", [False, True])
async def test_a_call_that_stops_waiting(autojump_clock, late):
    budget = Budget(100)
    got: list[int] = []

    async def call(size: int) -> None:
        with budget.reserve() as held:
            await held.take(size)
            got.append(size)

    with budget.reserve() as favoured:
        assert favoured.try_take(100)
        await favoured.take(1)
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(call, 50)
                    nursery.start_soon(call, 2)
                    await trio.testing.wait_all_tasks_blocked()
                    assert got == []
                    if late:
                        favoured.give(favoured.held)  # it is told, and has not run yet
                    scope.cancel()
            favoured.give(favoured.held)
    assert 2 in got
    assert budget.taken == 0


async def test_more_room_lets_the_waiting_in(autojump_clock):
    budget = Budget(10)
    with budget.reserve() as one, budget.reserve() as two:
        await one.take(10)
        await one.take(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.take, 20)
            await trio.testing.wait_all_tasks_blocked()
            assert two.held == 0
            budget.resize(35)
        assert two.held == 20
        budget.resize(1)
        with budget.reserve() as three:
            assert not three.try_take(1)
    assert budget.taken == 0


@given(st.data())
def test_the_sum_is_always_right(data: st.DataObject):
    budget = Budget(data.draw(st.integers(1, 50)))
    held: list[Reservation] = []
    for _ in range(data.draw(st.integers(0, 30))):
        match data.draw(st.sampled_from(["begin", "take", "give", "end"])):
            case "begin":
                held.append(budget.reserve())
            case "take" if held:
                one = data.draw(st.sampled_from(held))
                before = budget.taken
                size = data.draw(st.integers(0, 60))
                if one.try_take(size):
                    assert budget.taken <= budget.total or before == 0
            case "give" if held:
                one = data.draw(st.sampled_from(held))
                one.give(data.draw(st.integers(0, one.held)))
            case "end" if held:
                held.pop(data.draw(st.integers(0, len(held) - 1))).__exit__(None, None, None)
        assert budget.taken == sum(one.held for one in held)
