"""Two endings that no cut brings about: a refused certificate, and callers who leave data unread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.core.spec import Binding
from sidecar.core.types import Kind
from tests.exhaustion.network import Fault, ScriptedWire, Way
from tests.exhaustion.peer import DATA, SETTINGS, WINDOW_UPDATE, Http2Peer, frame
from tests.exhaustion.rig import Exchange, Rig, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from sidecar.core.types import Payload
    from sidecar.result import Result
    from tests.exhaustion.peer import Peer
    from tests.exhaustion.rig import World


# --- TLS 1.3: our certificate is refused behind the handshake -----------------------------------


async def _refused(
    world: World, binding: Binding, candidates: int, cut: tuple[int, Fault] | None = None
) -> tuple[Rig, Result]:
    """A call whose first candidate wants a certificate, which we do not have."""
    rig = Rig(world, Exchange(binding=binding, shape=Shape.UNARY, tls=True), candidates=candidates)
    rig.server_contexts[0] = world.strict_contexts

    def arm(wire: ScriptedWire) -> None:
        if cut is not None:
            wire.cut(Way.REPLY, *cut)
        wire.open()

    rig.on_connect = arm
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        await wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        with trio.fail_after(1000):
            result = await rig.call()
        await wait_all_tasks_blocked()
        assert rig.busy() == []
        await trio.sleep(1000)
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        nursery.cancel_scope.cancel()
    return rig, result


@pytest.mark.parametrize("fault", [None, Fault.CLOSE, Fault.RST, Fault.SILENCE])
@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.GRPC])
async def test_a_fatal_alert_about_our_certificate_means_not_delivered(
    binding: Binding, fault: Fault | None, world: World, autojump_clock: MockClock
) -> None:
    rig, _ = await _refused(world, binding, 1)
    cut = (rig.wires[0].said, fault) if fault else None

    rig, result = await _refused(world, binding, 1, cut)
    assert result.error is not None
    assert (result.error.reason, result.error.delivered) == ("NOT_DELIVERED", "no")
    assert rig.ledger.requests == []

    rig, result = await _refused(world, binding, 2, cut)
    assert result.error is None
    assert (result.attempts, rig.ledger.executions) == (2, 1)
    first = rig.agent.attempts[0].outcome
    assert (first.kind, first.result) == (Kind.NOT_DELIVERED, "tls")
    # HTTP/2 waits for SETTINGS, which do not come; a connection that is gone takes no byte
    assert first.written is (binding is Binding.JSONRPC and fault is not Fault.RST)


@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.GRPC])
async def test_half_an_alert_proves_nothing(
    binding: Binding, world: World, autojump_clock: MockClock
) -> None:
    rig, _ = await _refused(world, binding, 1)
    rig, result = await _refused(world, binding, 2, (rig.wires[0].said - 1, Fault.CLOSE))
    if binding is Binding.JSONRPC:
        assert result.error is not None
        assert (result.error.delivered, result.attempts) == ("unknown", 1)
    else:
        assert (result.error, result.attempts) == (None, 2)


# --- HTTP/2: the connection's window ------------------------------------------------------------


class _Flood(Http2Peer):
    """Sends an event, and then as much of a larger one as the windows allow, on every stream."""

    def __init__(self, rig: _FloodedRig) -> None:
        super().__init__(rig.ledger, streaming=True)
        self._rig = rig
        self._window = 65535
        self._stream_window = 65535

    def _take(self, kind: int, flags: int, stream_id: int, body: bytes) -> bytes:
        if kind == WINDOW_UPDATE and stream_id == 0:
            self._window += int.from_bytes(body, "big")
        elif kind == SETTINGS:
            for at in range(0, len(body), 6):
                if body[at : at + 2] == b"\0\4":
                    self._stream_window = int.from_bytes(body[at + 2 : at + 6], "big")
        return super()._take(kind, flags, stream_id, body)

    def _reply(self, stream_id: int) -> bytes:
        reply = super()._reply(stream_id)
        if not self._rig.flooding:
            sizes = sum(len(each) for each in self.bodies)
            assert self._window >= sizes, "the connection's window is used up"
            return reply
        first = b"".join(frame(DATA, 0, stream_id, body) for body in self.bodies[:2])
        head = reply[: reply.index(first) + len(first)]
        room = min(self._window, self._stream_window) - len(b"".join(self.bodies[:2]))
        assert room > 65535, "the windows have become small"
        rest = b"\0" + (4_000_000).to_bytes(4, "big")
        rest += b"x" * (room - len(rest))
        self._window -= room + len(b"".join(self.bodies[:2]))
        parts = (rest[at : at + 16384] for at in range(0, len(rest), 16384))
        return head + b"".join(frame(DATA, 0, stream_id, part) for part in parts)


class _FloodedRig(Rig):
    flooding = True

    def peer(self, binding: Binding) -> Peer:
        return _Flood(self)

    async def _deliver(self, payloads: Sequence[Payload], head: Result) -> None:
        await super()._deliver(payloads, head)
        if self.flooding:
            await trio.sleep_forever()  # a caller who does not read on


async def test_data_that_a_leaving_caller_has_not_read_is_given_back(
    world: World, autojump_clock: MockClock
) -> None:
    """Forty windows of a stream are more than two of the connection."""
    rig = _FloodedRig(world, Exchange(binding=Binding.GRPC, shape=Shape.STREAM))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.agent.run)
        for _ in range(40):
            with trio.move_on_after(1):
                await rig.call()
            assert len(rig.events) == 1
            await wait_all_tasks_blocked()
            assert rig.busy() == []
        rig.flooding = False
        with trio.fail_after(1):
            result = await rig.call()
        assert result.error is None
        assert len(rig.wires) == 1
        nursery.cancel_scope.cancel()
