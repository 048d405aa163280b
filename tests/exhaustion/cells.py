"""One cell of the proof: what happens, and what must come of it.

That is worked out from what the network and the peers saw and from the failure table of the design,
never from what the code under test says about itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.core.types import Kind
from tests.exhaustion.network import GOAWAYS, WAITING, Fault, ScriptedWire, Way
from tests.exhaustion.rig import (
    PORTS,
    Exchange,
    Rig,
    Shape,
    answers,
    first_headers,
    record,
    tls_records,
)

if TYPE_CHECKING:
    from sidecar.core.spec import Binding
    from sidecar.result import Result
    from tests.exhaustion.rig import Recording, World

PATIENCE_SECONDS: Final = 2000.0
"""Longer than any timeout of the configuration, and than two signs of life on HTTP/2."""

_REASONS: Final = {
    Kind.NOT_DELIVERED: "NOT_DELIVERED",
    Kind.AMBIGUOUS: "DELIVERY_UNKNOWN",
    Kind.CALLER: "DEADLINE_EXCEEDED",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid. Its `repr` is enough to run it again."""

    binding: Binding
    shape: Shape
    fault: Fault
    way: Way
    offset: int
    """Bytes of this exchange that pass in that direction before the fault."""
    reused: bool = False
    candidates: int = 1
    cut: int = 0
    """The candidate that is cut; those before it cannot be dialled."""
    always: bool = False
    """Every connection to it is."""
    tls: bool = False
    dial_failover: bool = False

    @property
    def exchange(self) -> Exchange:
        """The clean exchange that is cut."""
        return Exchange(
            binding=self.binding,
            shape=self.shape,
            reused=self.reused,
            tls=self.tls,
            deadline=self.fault is Fault.DEADLINE,
        )


async def run_cell(world: World, cell: Cell) -> list[str]:
    """What is wrong in `cell`; nothing when the promise holds there."""
    recording = await record(world, cell.exchange)
    rig = Rig(
        world,
        cell.exchange,
        candidates=cell.candidates,
        cut=cell.cut,
        dial_failover=cell.dial_failover,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        await wait_all_tasks_blocked()
        verdict = _Verdict(cell, rig, recording)
        try:
            await verdict.run()
        except Exception as error:
            verdict.wrong.append(f"{type(error).__name__}: {error}")
        nursery.cancel_scope.cancel()
    return verdict.wrong


@dataclass(slots=True)
class _Ending:
    """How the faulted call ended, and what was true then of the connection that was cut."""

    result: Result | None
    """None: the caller left."""
    too_long: bool
    """It left because nothing happened any more."""
    answered: bool
    """All bytes of the reply had come."""
    written: bool
    """The kernel may have had a byte of the request."""
    begun: bool
    """The agent had seen the head of the request, and has not refused it."""
    head_came: bool
    """Plain HTTP/1.1: all of the reply's head had come."""


class _Verdict:
    """Carries one cell out."""

    def __init__(self, cell: Cell, rig: Rig, recording: Recording) -> None:
        self.wrong: list[str] = []
        self._cell = cell
        self._rig = rig
        self._recording = recording
        self._tasks = trio.lowlevel.current_statistics().tasks_living
        self._earlier = 0
        """Requests before the one that counts."""
        self._late = cell.fault is Fault.LEAVE and cell.candidates == 2
        """What waits until the caller has left waits for the next call, too."""

    def _check(self, name: str, found: object, expected: object) -> None:
        if found != expected:
            self.wrong.append(f"{name}: {found!r} instead of {expected!r}")

    async def run(self) -> None:
        """Call, judge, call again, and see that nothing is left."""
        cell, rig = self._cell, self._rig
        rig.always = cell.always
        rig.refusing = set(range(cell.cut))
        if cell.reused:
            await rig.warm_up()
            self._earlier = len(rig.ledger.requests)
        ending = await self._faulted_call()
        for wire in rig.wires:
            if cell.fault in WAITING:
                if not self._late:
                    wire.resume()
            elif ending.answered and cell.fault in {Fault.SILENCE, Fault.BLOCK}:
                wire.reset()  # nobody could know; the next call must not be the one to find out
        await wait_all_tasks_blocked()
        if not self._late:
            self.wrong += rig.busy()
        self._judge(ending)
        requests = rig.ledger.requests[self._earlier :]
        await self._next_call()
        await self._rest()
        executions = sum(each.complete and not each.refused for each in requests)
        heads = sum(not each.refused for each in requests)
        if max(executions, heads) > 1:
            self.wrong.append(f"begun {heads} times, executed {executions} times")
        error = ending.result.error if ending.result else None
        if error is not None and error.delivered == "no":
            self._check("delivered=no: begun, executed", (heads, executions), (0, 0))
        if not cell.always:
            later = len(rig.ledger.requests) - self._earlier - len(requests)
            overtaken = self._late and not requests and later == 2
            self._check("requests of the next call", later, 2 if overtaken else 1)

    async def _faulted_call(self) -> _Ending:
        cell, rig, recording = self._cell, self._rig, self._recording
        cut = trio.Event()
        start = said = 0

        def arm(wire: ScriptedWire) -> None:
            if cell.way is Way.REQUEST:
                wire.open()
            wire.cut(cell.way, cell.offset, cell.fault, cut.set)
            if cell.way is Way.REPLY:
                wire.open()

        if cell.reused:
            (wire,) = rig.wires
            start, said = wire.taken, wire.passed
            wire.reply_end = None
            passed = start if cell.way is Way.REQUEST else said
            wire.cut(cell.way, passed + cell.offset, cell.fault, cut.set)
        else:
            rig.on_connect = arm
        result: Result | None = None
        with trio.move_on_after(PATIENCE_SECONDS) as patience:
            async with trio.open_nursery() as helpers:
                with trio.CancelScope() as caller:
                    if cell.fault is Fault.LEAVE:
                        helpers.start_soon(_leave_when, cut, caller)
                    result = await rig.call()
                helpers.cancel_scope.cancel()
        wire = next(each for each in rig.wires if each.port == PORTS[cell.cut])
        begins = self._request_begins(bytes(wire.offered_log[start:]))
        return _Ending(
            result=result,
            too_long=patience.cancelled_caught,
            answered=wire.reply_end is not None and wire.passed >= wire.reply_end,
            written=begins is not None
            and any(sent.taken and sent.stop > start + begins for sent in wire.sends),
            begun=any(not each.refused for each in wire.requests[int(cell.reused) :]),
            head_came=wire.passed - said >= recording.head_ends > 4,
        )

    def _request_begins(self, offered: bytes) -> int | None:
        """Where in what was sent the request begins; None: it was not sent."""
        if self._cell.tls:
            sizes = {at: size for at, _, size in tls_records(self._recording.request)}
            size = sizes[self._recording.begins]
            return next((at for at, _, found in tls_records(offered) if found == size), None)
        if self._cell.exchange.http1:
            return 0 if offered else None
        return first_headers(offered)

    def _expected(self, ending: _Ending) -> Kind:
        """The row of the failure table for the candidate that was cut."""
        cell = self._cell
        if ending.answered:
            return Kind.ANSWERED
        if cell.fault in WAITING:
            return Kind.CALLER
        stream = cell.shape is Shape.STREAM and cell.exchange.http1
        if stream and cell.fault is Fault.SILENCE and ending.head_came:
            return Kind.CALLER  # an agent may be silent for as long as it likes
        if ending.begun if cell.fault in GOAWAYS else ending.written:
            return Kind.AMBIGUOUS
        # a reused connection that was leaving is replaced, which is no failure of the interface
        return Kind.ANSWERED if cell.reused else Kind.NOT_DELIVERED

    def _judge(self, ending: _Ending) -> None:
        cell, rig, result = self._cell, self._rig, ending.result
        kind = self._expected(ending)
        may_go_on = cell.shape is not Shape.STREAM or cell.dial_failover
        others = cell.candidates - 1 - cell.cut
        goes_on = kind is Kind.NOT_DELIVERED and others > 0 and may_go_on
        if goes_on:
            self._check("answer of the next candidate", result and result.error, None)
        elif result is None:
            self._check("kind", Kind.CALLER, kind)
        elif result.error is None:
            self._check("kind", Kind.ANSWERED, kind)
        else:
            taken = kind is Kind.AMBIGUOUS or (kind is Kind.CALLER and ending.written)
            self._check("reason", result.error.reason, _REASONS.get(kind))
            self._check("delivered", result.error.delivered, "unknown" if taken else "no")
        if result is not None:
            self._check("attempts", result.attempts, cell.cut + 1 + goes_on)
            if result.error is None:
                self._check_answer(result)
        whole = answers(cell.binding, cell.shape)
        # garbage may complete an event, and nobody can tell that it did
        seen = rig.events[:-1] if cell.fault is Fault.GARBAGE else rig.events
        self._check("events", seen, whole[: len(seen)])
        asked = {wire.port for wire in rig.wires}
        self._check("next candidate was asked", PORTS[1] in asked, bool(goes_on or cell.cut))
        self._check("dials", len(rig.wires) <= 1 + cell.reused + goes_on, True)
        advances = kind in {Kind.NOT_DELIVERED, Kind.AMBIGUOUS}
        current = rig.agent.generation.selection.current  # type: ignore[union-attr]
        self._check("selection", current, (cell.cut + advances) % cell.candidates)
        self._check("silence", ending.too_long, result is None and cell.fault is Fault.SILENCE)

    def _check_answer(self, result: Result) -> None:
        rig, cell = self._rig, self._cell
        found: list[bytes | None] = [*rig.events]
        if cell.shape is not Shape.STREAM:
            found.append(result.payload.data if result.payload else None)
        self._check("answer", found, answers(cell.binding, cell.shape))
        self._check("executions", rig.ledger.executions - self._earlier, 1)

    async def _next_call(self) -> None:
        """The same agent serves the next call, at the candidate that the selection names."""
        rig = self._rig
        rig.refusing.clear()
        named = rig.agent.current
        executions = rig.ledger.executions
        with trio.move_on_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as helpers:
                if self._late:
                    helpers.start_soon(self._resume)
                result = await rig.call()
                helpers.cancel_scope.cancel()
            for wire in rig.wires:
                wire.resume()
            if not self._cell.always:
                self._check("next call: error", result.error, None)
                self._check("next call: interface", result.interface, named)
                self._check("next call: attempts", result.attempts, 1)
                done = rig.ledger.executions - executions
                overtaken = self._late and executions == self._earlier and done == 2
                self._check("next call: executions", done, 2 if overtaken else 1)
            return
        self.wrong.append("next call: it does not end")

    async def _resume(self) -> None:
        await wait_all_tasks_blocked()
        for wire in self._rig.wires:
            wire.resume()

    async def _rest(self) -> None:
        """Everything comes back, at the latest when idle connections are closed."""
        rig = self._rig
        await trio.sleep(PATIENCE_SECONDS)
        self.wrong += rig.busy()
        self._check("open connections", [each.port for each in rig.wires if not each.closed], [])
        tasks = trio.lowlevel.current_statistics().tasks_living
        self._check("tasks", tasks, self._tasks)


async def _leave_when(cut: trio.Event, caller: trio.CancelScope) -> None:
    await cut.wait()
    await wait_all_tasks_blocked()
    caller.cancel()
