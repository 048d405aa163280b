"""The promise, by exhaustion: every cut point of recorded exchanges x every fault.

For each cell: a message is executed at most once, `delivered=no` means that it was not, outcome and
next candidate are those of the failure table, every call ends, and pools, windows, limits and tasks
return to where they were. ``--all-cuts`` cuts at every byte of everything but the large requests.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from sidecar.core.spec import Binding
from tests.exhaustion.cells import Cell
from tests.exhaustion.network import GOAWAYS, WAITING, Fault, Way
from tests.exhaustion.points import boundaries, everywhere, faults, landmarks
from tests.exhaustion.rig import Exchange, Shape

if TYPE_CHECKING:
    from trio.testing import MockClock

    from tests.exhaustion.conftest import Grid

_AT_EVERY_BYTE = {
    Fault.CLOSE,
    Fault.RST,
    Fault.SILENCE,
    Fault.GARBAGE,
    Fault.GOAWAY,
    Fault.LEAVE,
}
_BOTH = (False, True)


def _each(*bindings: Binding, without: frozenset[Fault] = frozenset()) -> pytest.MarkDecorator:
    """Every fault on every binding that can have it."""
    pairs = [
        pytest.param(binding, fault, id=f"{binding}-{fault.value}")
        for binding in bindings
        for fault in Fault
        if fault not in without and (binding is Binding.GRPC or fault not in GOAWAYS)
    ]
    return pytest.mark.parametrize(("binding", "fault"), pairs)


def _ways(fault: Fault) -> list[Way]:
    return [way for way in Way if fault in faults(way)]


@pytest.mark.parametrize("shape", [Shape.UNARY, Shape.STREAM], ids=lambda shape: shape.value)
@_each(*Binding)
async def test_cut(
    binding: Binding, fault: Fault, shape: Shape, grid: Grid, autojump_clock: MockClock
) -> None:
    for reused, way in itertools.product(_BOTH, _ways(fault)):
        exchange = Exchange(
            binding=binding, shape=shape, reused=reused, deadline=fault is Fault.DEADLINE
        )
        recording = await grid.record(exchange)
        for candidates in (1, 2):
            short = shape is Shape.UNARY and fault in _AT_EVERY_BYTE and candidates == 2
            points = everywhere if grid.all_cuts or short else boundaries
            for offset in points(exchange, recording, way, fault):
                await grid.run(
                    Cell(
                        binding=binding,
                        shape=shape,
                        fault=fault,
                        way=way,
                        offset=offset,
                        reused=reused,
                        candidates=candidates,
                    )
                )
    grid.conclude()


@_each(*Binding)
async def test_cut_in_a_large_request(
    binding: Binding, fault: Fault, grid: Grid, autojump_clock: MockClock
) -> None:
    """One that is written in several pieces, while the reply is read."""
    for reused, way in itertools.product(_BOTH, _ways(fault)):
        exchange = Exchange(
            binding=binding, shape=Shape.LARGE, reused=reused, deadline=fault is Fault.DEADLINE
        )
        recording = await grid.record(exchange)
        for offset in landmarks(exchange, recording, way, fault):
            await grid.run(
                Cell(
                    binding=binding,
                    shape=Shape.LARGE,
                    fault=fault,
                    way=way,
                    offset=offset,
                    reused=reused,
                    candidates=2,
                )
            )
    grid.conclude()


@_each(*Binding)
async def test_cut_at_the_second_candidate(
    binding: Binding, fault: Fault, grid: Grid, autojump_clock: MockClock
) -> None:
    """The first one could not be reached."""
    exchange = Exchange(binding=binding, shape=Shape.UNARY, deadline=fault is Fault.DEADLINE)
    recording = await grid.record(exchange)
    for way in _ways(fault):
        for offset in boundaries(exchange, recording, way, fault):
            await grid.run(
                Cell(
                    binding=binding,
                    shape=Shape.UNARY,
                    fault=fault,
                    way=way,
                    offset=offset,
                    candidates=2,
                    cut=1,
                )
            )
    grid.conclude()


@_each(*Binding, without=WAITING)
async def test_every_connection_is_cut(
    binding: Binding, fault: Fault, grid: Grid, autojump_clock: MockClock
) -> None:
    """An agent that never gets further: its calls end all the same."""
    exchange = Exchange(binding=binding, shape=Shape.UNARY)
    recording = await grid.record(exchange)
    for candidates, way in itertools.product((1, 2), _ways(fault)):
        for offset in boundaries(exchange, recording, way, fault):
            await grid.run(
                Cell(
                    binding=binding,
                    shape=Shape.UNARY,
                    fault=fault,
                    way=way,
                    offset=offset,
                    candidates=candidates,
                    always=True,
                )
            )
    grid.conclude()


@_each(*Binding)
async def test_a_stream_that_may_open_elsewhere(
    binding: Binding, fault: Fault, grid: Grid, autojump_clock: MockClock
) -> None:
    """With stream_dial_failover, and only when it provably was not delivered."""
    exchange = Exchange(binding=binding, shape=Shape.STREAM, deadline=fault is Fault.DEADLINE)
    recording = await grid.record(exchange)
    for way in _ways(fault):
        for offset in boundaries(exchange, recording, way, fault):
            await grid.run(
                Cell(
                    binding=binding,
                    shape=Shape.STREAM,
                    fault=fault,
                    way=way,
                    offset=offset,
                    candidates=2,
                    dial_failover=True,
                )
            )
    grid.conclude()


@_each(Binding.JSONRPC, Binding.GRPC)
async def test_cut_inside_tls(
    binding: Binding, fault: Fault, grid: Grid, autojump_clock: MockClock
) -> None:
    """At the records' boundaries, handshake included."""
    for reused, way in itertools.product(_BOTH, _ways(fault)):
        exchange = Exchange(
            binding=binding,
            shape=Shape.UNARY,
            reused=reused,
            tls=True,
            deadline=fault is Fault.DEADLINE,
        )
        recording = await grid.record(exchange)
        points = everywhere if grid.all_cuts else boundaries
        for candidates in (1, 2):
            for offset in points(exchange, recording, way, fault):
                await grid.run(
                    Cell(
                        binding=binding,
                        shape=Shape.UNARY,
                        fault=fault,
                        way=way,
                        offset=offset,
                        reused=reused,
                        candidates=candidates,
                        tls=True,
                    )
                )
    grid.conclude()
