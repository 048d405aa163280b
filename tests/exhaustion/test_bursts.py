"""Calls that share a connection when it is cut: the promise holds for each, and they move on once."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.core.spec import Binding
from tests.exhaustion.network import GOAWAYS, Fault, ScriptedWire, Way
from tests.exhaustion.points import faults
from tests.exhaustion.rig import Exchange, Rig, Shape, http2_frames

if TYPE_CHECKING:
    from trio.testing import MockClock

    from sidecar.result import Result
    from tests.exhaustion.conftest import Grid

_CALLS = [f"message-{number}" for number in range(4)]
_FAULTS = [fault for fault in Fault if fault not in {Fault.LEAVE, Fault.DEADLINE}]


class _Burst:
    """Four calls at once on one HTTP/2 connection, which is cut."""

    def __init__(self, grid: Grid, *, reused: bool, candidates: int) -> None:
        exchange = Exchange(binding=Binding.GRPC, shape=Shape.UNARY, reused=reused)
        self.rig = Rig(grid.world, exchange, candidates=candidates)
        self.results: dict[str, Result] = {}
        self.wrong: list[str] = []

    async def run(self, cut: tuple[Way, int, Fault] | None) -> tuple[bytes, bytes]:
        """What was sent and received on the connection from the burst on."""
        rig = self.rig
        start = said = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.agent.run)
            await wait_all_tasks_blocked()
            tasks = trio.lowlevel.current_statistics().tasks_living
            if rig.exchange.reused:
                wire = await rig.warm_up()
                start, said = wire.taken, wire.passed
                if cut is not None:
                    way, offset, fault = cut
                    wire.cut(way, offset + (start if way is Way.REQUEST else said), fault)
            elif cut is not None:
                rig.on_connect = functools.partial(_arm, cut)
            with trio.move_on_after(1000) as patience:
                async with trio.open_nursery() as callers:
                    for message_id in _CALLS:
                        callers.start_soon(self._call, message_id)
            if patience.cancelled_caught:
                self.wrong.append("calls do not end")
            wire = rig.wires[0]
            logs = bytes(wire.request_log[start:]), bytes(wire.reply_log[said:])
            if cut is not None and cut[2] in {Fault.SILENCE, Fault.BLOCK}:
                wire.reset()
            await wait_all_tasks_blocked()
            self.wrong += rig.busy()
            self._judge()
            await trio.sleep(1000)
            self.wrong += rig.busy()
            if trio.lowlevel.current_statistics().tasks_living != tasks:
                self.wrong.append("tasks are left")
            nursery.cancel_scope.cancel()
        return logs

    async def _call(self, message_id: str) -> None:
        self.results[message_id] = await self.rig.call(message_id)

    def _judge(self) -> None:
        rig, wrong = self.rig, self.wrong
        for message_id, result in self.results.items():
            name = message_id.encode()
            executed = sum(
                name in each.body and each.complete and not each.refused
                for each in rig.ledger.requests
            )
            if executed > 1:
                wrong.append(f"{message_id}: executed {executed} times")
            if result.error is None and executed != 1:
                wrong.append(f"{message_id}: answered, but executed {executed} times")
            if result.error is not None and result.error.delivered == "no" and executed:
                wrong.append(f"{message_id}: delivered=no, but executed")
            if result.error is not None and result.error.reason == "INTERNAL":
                wrong.append(f"{message_id}: internal error")
        generation = rig.agent.generation
        assert generation is not None
        # those that failed on the first candidate move it once, however many they are
        if generation.selection.moves > 1:
            wrong.append(f"the selection moved {generation.selection.moves} times")


def _arm(cut: tuple[Way, int, Fault], wire: ScriptedWire) -> None:
    if cut[0] is Way.REQUEST:
        wire.open()
    wire.cut(*cut)
    if cut[0] is Way.REPLY:
        wire.open()


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.value)
async def test_burst(fault: Fault, grid: Grid, autojump_clock: MockClock) -> None:
    for reused, candidates in itertools.product((False, True), (1, 2)):
        burst = _Burst(grid, reused=reused, candidates=candidates)
        logs = await burst.run(None)
        assert burst.wrong == []
        assert [result.error for result in burst.results.values()] == [None] * len(_CALLS)
        for way, log in zip(Way, logs, strict=True):
            if fault not in faults(way):
                continue
            heads = [at for at, _, _ in http2_frames(log)]
            sides = (0,) if fault in GOAWAYS and way is Way.REPLY else (-1, 0, 1, 9)
            near = {at + side for at in (*heads, len(log)) for side in sides}
            for offset in sorted(at for at in near if 0 <= at <= len(log)):
                burst = _Burst(grid, reused=reused, candidates=candidates)
                await burst.run((way, offset, fault))
                grid.note((way, offset, fault, reused, candidates), burst.wrong)
    grid.conclude()
