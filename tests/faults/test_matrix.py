"""Each fault, on each upstream binding, against the failure table.

Reduced cells: every fault is met by callers on JSON-RPC, unary and as a stream, with 1, 2 and 3
candidates, and with 2 over TLS. Callers on HTTP+JSON and gRPC meet one fault of each (upstream
binding, kind, result) with 1 and 2 candidates: what an ending means does not depend on who asked, only
how it is told does. The codes of RST_STREAM and GOAWAY and the gRPC statuses lie above TLS: they are
met over plaintext only, and streams meet the codes with 2 candidates only. Cells that cannot occur
are named in the table, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.all_faults import all_faults
from tests.faults.faults import GRPC, HTTP_JSON, Fault
from tests.faults.rig import Cell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.conftest import Matrix

pytestmark = pytest.mark.system

FAULTS = all_faults()
SETS = list(dict.fromkeys((fault.binding, fault.group) for fault in FAULTS))
UNARY = ("F", "FG", "FF", "FFG")
STREAMS = ("F", "FG", "FFG")
FEW = ("F", "FG")
CODES = ("resets", "goaways")
ABOVE_TLS = ("grpc status", *CODES)


def cells(
    fault: Fault, *, tls: bool, unary: tuple[str, ...], streams: tuple[str, ...]
) -> Iterator[Cell]:
    if fault.only == ("plain" if tls else "tls"):
        return
    if fault.group in CODES:
        streams = FEW[1:]
    if fault.body_bytes or fault.or_endings:
        # large requests are dear; of two faulty candidates each would end by its own luck
        unary, streams = FEW, FEW[1:]
    if not fault.no_unary:
        for layout in unary:
            yield Cell(fault=fault, layout=layout, tls=tls)
    if not fault.no_stream:
        for layout in streams:
            yield Cell(fault=fault, layout=layout, tls=tls, streaming=True)


@pytest.mark.parametrize(("binding", "group"), SETS)
async def test_over_plaintext(matrix: Matrix, binding: str, group: str) -> None:
    faults = [fault for fault in FAULTS if (fault.binding, fault.group) == (binding, group)]
    await matrix.run(c for f in faults for c in cells(f, tls=False, unary=UNARY, streams=STREAMS))


@pytest.mark.parametrize(
    ("binding", "group"), [pair for pair in SETS if not pair[1].startswith(ABOVE_TLS)]
)
async def test_over_tls(matrix: Matrix, binding: str, group: str) -> None:
    faults = [fault for fault in FAULTS if (fault.binding, fault.group) == (binding, group)]
    both = FEW if group == "tls" else FEW[1:]
    await matrix.run(c for f in faults for c in cells(f, tls=True, unary=both, streams=FEW[1:]))


def representatives() -> dict[tuple[str, ...], Fault]:
    """One fault of each kind and result that an upstream binding has."""
    found: dict[tuple[str, ...], Fault] = {}
    for fault in FAULTS:
        if fault.only != "tls" and not fault.or_endings and not fault.body_bytes:
            for streaming in (False, True):
                end = fault.ends(streaming=streaming)[0]
                key = (fault.binding, end.kind, end.result, str(end.status), str(end.events))
                found.setdefault(key, fault)
    return found


@pytest.mark.parametrize("downstream", [HTTP_JSON, GRPC])
@pytest.mark.parametrize("upstream", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_as_told_to_callers_of(matrix: Matrix, downstream: str, upstream: str) -> None:
    faults = {id(f): f for key, f in representatives().items() if key[0] == upstream}
    await matrix.run(
        Cell(
            fault=cell.fault,
            layout=cell.layout,
            streaming=cell.streaming,
            downstream=downstream,
        )
        for fault in faults.values()
        for cell in cells(fault, tls=False, unary=FEW, streams=FEW)
    )


async def test_a_stream_that_was_not_delivered_may_open_elsewhere(matrix: Matrix) -> None:
    """stream_dial_failover: only what was provably not delivered."""
    faults = {id(f): f for f in representatives().values() if not f.no_stream}
    await matrix.run(
        Cell(fault=fault, layout=layout, streaming=True, dial_failover=True)
        for fault in faults.values()
        for layout in ("FG", "FFG")
    )


def test_what_is_left_out_says_why(note: Callable[[str], None]) -> None:
    """Shapes of a call that a fault cannot meet; each leaves the other one."""
    reasons: dict[str, list[str]] = {}
    for fault in FAULTS:
        assert not (fault.no_stream and fault.no_unary), fault
        if reason := fault.no_stream or fault.no_unary:
            reasons.setdefault(reason, []).append(str(fault))
    for reason, names in reasons.items():
        note(f"{len(names)} faults in one shape only: {reason}")
