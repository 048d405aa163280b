"""The most telling cuts once more, over TCP and in real time: what the kernel makes of them."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from sidecar.agent import Agent
from sidecar.config import AgentConfig, Limits
from sidecar.core.spec import SEND_MESSAGE, Binding
from sidecar.core.types import Call, Form, Payload
from sidecar.discovery import NO_VALIDATORS, FetchedCard
from sidecar.forwarder import Forwarder
from sidecar.wire.net import Dialer
from tests.exhaustion.network import GARBAGE, Fault, Way
from tests.exhaustion.peer import ANSWER, Http1Peer, Http2Peer, Ledger, Peer
from tests.exhaustion.rig import first_headers
from tests.support.files import card
from tests.wire.loopback import reset, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sidecar.result import Result
    from tests.exhaustion.rig import World

_MESSAGE: Final = b'{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"x"}]}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What happens once, on one connection of the first agent; `after` is in bytes."""

    way: Way
    after: int
    fault: Fault


@dataclass(slots=True)
class _Server:
    """One agent on a loopback port."""

    ledger: Ledger
    binding: Binding
    cut: _Cut | None = None
    """Of the next connection."""
    silent: bool = False
    """No byte of a reply is sent."""
    connections: int = 0
    streams: list[trio.SocketStream] = field(default_factory=list)
    """Those that are open."""
    request: bytes = b""
    """All that came on the connection that last had a complete request, up to its end."""
    replied: int = 0
    """All that was sent on it."""

    def peer(self) -> Peer:
        if self.binding is Binding.GRPC:
            return Http2Peer(self.ledger, streaming=False)
        return Http1Peer(self.ledger)

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.streams.append(stream)
        try:
            await _Connection(self, stream).run()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.streams.remove(stream)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await trio.aclose_forcefully(stream)


class _Connection:
    def __init__(self, server: _Server, stream: trio.SocketStream) -> None:
        self._server = server
        self._stream = stream
        self._peer = server.peer()
        self._heard = b""
        self._said = 0

    def _room(self, way: Way, passed: int) -> int | None:
        cut = self._server.cut
        return cut.after - passed if cut is not None and cut.way is way else None

    async def run(self) -> None:
        await self._say(self._peer.greet())
        while True:
            room = self._room(Way.REQUEST, len(self._heard))
            if room == 0:
                await self._happen()
                continue
            data = await self._stream.receive_some(min(room or 65536, 65536))
            if not data:
                return
            self._heard += data
            executions = self._server.ledger.executions
            reply = self._peer.receive(data)
            if self._server.ledger.executions > executions:
                self._server.request = self._heard
                self._server.replied = self._said + len(reply)
            await self._say(reply)

    async def _say(self, data: bytes) -> None:
        if not data or self._server.silent:
            return
        room = self._room(Way.REPLY, self._said)
        if room is not None and room <= len(data):
            if data[:room]:
                await self._stream.send_all(data[:room])
            await self._happen()
            data = data[room:]
        if data:
            await self._stream.send_all(data)
            self._said += len(data)

    async def _happen(self) -> None:
        cut, self._server.cut = self._server.cut, None
        assert cut is not None
        match cut.fault:
            case Fault.CLOSE:
                await self._stream.send_eof()
                await _read_to_the_end(self._stream)
            case Fault.RST:
                reset(self._stream)
                raise trio.ClosedResourceError
            case Fault.GARBAGE:
                await self._stream.send_all(GARBAGE)
                await _read_to_the_end(self._stream)
            case Fault.GOAWAY:
                await self._stream.send_all(self._peer.goaway(hasty=False))
                return
            case _:  # silence
                await _read_to_the_end(self._stream)
        raise trio.ClosedResourceError


async def _read_to_the_end(stream: trio.SocketStream) -> None:
    while await stream.receive_some(65536):
        pass


class _Source:
    def __init__(self, fetched: FetchedCard) -> None:
        self._fetched = fetched

    async def fetch(self, *_: object, **__: object) -> FetchedCard:
        return self._fetched


class _Pair:
    """An agent with two interfaces, each a server of its own."""

    def __init__(self, world: World, binding: Binding, nursery: trio.Nursery) -> None:
        self.ledger = Ledger()
        self.binding = binding
        other = Binding.HTTP_JSON if binding is not Binding.HTTP_JSON else Binding.JSONRPC
        self.servers = [_Server(self.ledger, binding), _Server(self.ledger, other)]
        self._world = world
        self._nursery = nursery
        self.agent: Agent
        self._forwarder = Forwarder(telemetry=world.telemetry, log=world.log)

    async def start(self, *, unreachable: bool = False, timeout: float = 10) -> None:
        """`unreachable`: nobody listens at the first interface."""
        entries = []
        paths = {Binding.JSONRPC: "/rpc", Binding.HTTP_JSON: "/v1", Binding.GRPC: ""}
        for server in self.servers:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            port = listener.socket.getsockname()[1]
            if unreachable and server is self.servers[0]:
                await listener.aclose()
            else:
                self._nursery.start_soon(trio.serve_listeners, server.serve, [listener])
            entries.append((str(server.binding), f"http://127.0.0.1:{port}{paths[server.binding]}"))
        self.agent = Agent(
            "a",
            AgentConfig(
                card="http://127.0.0.1",
                connect_timeout_seconds=timeout,
                response_timeout_seconds=timeout,
            ),
            dialer=Dialer(stall_seconds=120),
            limits=Limits(),
            own_addresses=frozenset(),
            telemetry=self._world.telemetry,
            log=self._world.log,
            rng=random.Random(1),
        )
        fetched = FetchedCard(
            data=json.dumps(card(entries)).encode(),
            validators=NO_VALIDATORS,
            max_age=1e9,
            url="http://127.0.0.1/card",
            source_scheme="http",
            source_host="127.0.0.1",
            peer="127.0.0.1",
        )
        self.agent._source = _Source(fetched)  # type: ignore[assignment]
        self._nursery.start_soon(self.agent.run)
        await self.agent.ready()

    async def call(self) -> Result:
        call = Call(
            operation=SEND_MESSAGE,
            binding=Binding.JSONRPC,
            payload=Payload(Form.JSON, _MESSAGE),
            id="call",
        )
        return await self._forwarder.unary(self.agent, call)


@pytest.fixture
async def pairs(world: World) -> AsyncIterator[Callable[[Binding], _Pair]]:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            yield lambda binding: _Pair(world, binding, nursery)
            nursery.cancel_scope.cancel()


def _judge(pair: _Pair, result: Result, earlier: int = 0) -> str:
    """How the first candidate ended; what must always hold is checked."""
    executions = pair.ledger.executions - earlier
    assert executions <= 1
    assert pair.agent.in_flight == 0
    if result.error is None:
        assert result.payload == Payload(Form.JSON, ANSWER)
        assert executions == 1
    elif result.error.delivered == "no":
        assert executions == 0
    return str(pair.agent.attempts[-result.attempts].outcome.kind)


# Kinds that the kernel's timing may lead to. A request that is sent to a connection that is just
# being reset is either refused by the kernel as a whole, or taken and lost.
_LOST = {"ambiguous"}
_EITHER = {"ambiguous", "not_delivered"}
_NEVER = {"not_delivered"}
_DONE = {"answered"}


async def _measure(pair: _Pair, way: Way, at: str) -> int:
    """Where that is, in bytes: a clean exchange with another server tells."""
    await pair.start()
    assert (await pair.call()).error is None
    server = pair.servers[0]
    length = len(server.request) if way is Way.REQUEST else server.replied
    headers = first_headers(server.request) if pair.binding is Binding.GRPC else 0
    named = {"0": 0, "1": 1, "begins+1": (headers or 0) + 1, "end-1": length - 1, "end": length}
    return named[at]


_REQUEST, _REPLY = Way.REQUEST, Way.REPLY
_CUTS = [
    (Binding.JSONRPC, _REQUEST, "0", Fault.RST, _EITHER),
    (Binding.JSONRPC, _REQUEST, "1", Fault.RST, _LOST),
    (Binding.JSONRPC, _REQUEST, "1", Fault.CLOSE, _LOST),
    (Binding.JSONRPC, _REQUEST, "end", Fault.RST, _DONE | _LOST),
    (Binding.JSONRPC, _REPLY, "0", Fault.CLOSE, _LOST),
    (Binding.JSONRPC, _REPLY, "0", Fault.SILENCE, _LOST),
    (Binding.JSONRPC, _REPLY, "1", Fault.GARBAGE, _LOST),
    (Binding.HTTP_JSON, _REPLY, "end-1", Fault.CLOSE, _LOST),
    (Binding.HTTP_JSON, _REPLY, "end-1", Fault.RST, _LOST),
    (Binding.HTTP_JSON, _REPLY, "end", Fault.CLOSE, _DONE),
    (Binding.GRPC, _REPLY, "0", Fault.CLOSE, _NEVER),
    (Binding.GRPC, _REPLY, "0", Fault.RST, _NEVER),
    (Binding.GRPC, _REPLY, "0", Fault.GARBAGE, _NEVER),
    (Binding.GRPC, _REPLY, "0", Fault.SILENCE, _NEVER),
    (Binding.GRPC, _REQUEST, "begins+1", Fault.RST, _LOST),
    (Binding.GRPC, _REQUEST, "begins+1", Fault.GOAWAY, _NEVER),
    (Binding.GRPC, _REQUEST, "end-1", Fault.GOAWAY, _NEVER),
    (Binding.GRPC, _REQUEST, "end", Fault.GOAWAY, _DONE),
    (Binding.GRPC, _REPLY, "end-1", Fault.CLOSE, _LOST),
]


@pytest.mark.parametrize(
    ("binding", "way", "at", "fault", "kinds"),
    _CUTS,
    ids=[f"{b}-{w.value}-{at}-{f.value}" for b, w, at, f, _ in _CUTS],
)
async def test_cut(
    binding: Binding,
    way: Way,
    at: str,
    fault: Fault,
    kinds: set[str],
    pairs: Callable[[Binding], _Pair],
) -> None:
    pair = pairs(binding)
    await pair.start(timeout=0.3 if fault is Fault.SILENCE else 10)
    after = await _measure(pairs(binding), way, at)
    pair.servers[0].cut = _Cut(way=way, after=after, fault=fault)

    result = await pair.call()

    kind = _judge(pair, result)
    assert kind in kinds
    assert result.attempts == (2 if kind == "not_delivered" else 1)
    assert pair.servers[1].connections == result.attempts - 1
    if kind == "ambiguous":
        assert result.error is not None
        assert result.error.delivered == "unknown"
    await wait_all_tasks_blocked(0.01)
    before = pair.ledger.executions
    result = await pair.call()
    assert result.error is None
    assert pair.ledger.executions == before + 1


async def test_an_interface_where_nobody_listens(pairs: Callable[[Binding], _Pair]) -> None:
    pair = pairs(Binding.JSONRPC)
    await pair.start(unreachable=True)
    result = await pair.call()
    assert (_judge(pair, result), result.attempts) == ("not_delivered", 2)
    result = await pair.call()
    assert (_judge(pair, result, 1), result.attempts) == ("answered", 1)


@pytest.mark.parametrize("ending", ["close", "rst"])
@pytest.mark.parametrize("binding", list(Binding), ids=str)
async def test_an_idle_connection_that_ended_is_replaced(
    binding: Binding, ending: str, pairs: Callable[[Binding], _Pair]
) -> None:
    pair = pairs(binding)
    await pair.start()
    server = pair.servers[0]
    assert (await pair.call()).error is None
    (stream,) = server.streams
    if ending == "close":
        stream.socket.shutdown(socket.SHUT_WR)
    else:
        reset(stream)
    await wait_all_tasks_blocked(0.01)
    result = await pair.call()
    assert (_judge(pair, result, 1), result.attempts) == ("answered", 1)
    assert (server.connections, pair.servers[1].connections) == (2, 0)


@pytest.mark.parametrize("binding", list(Binding), ids=str)
async def test_a_caller_who_leaves(binding: Binding, pairs: Callable[[Binding], _Pair]) -> None:
    pair = pairs(binding)
    await pair.start()
    server = pair.servers[0]
    assert (await pair.call()).error is None
    server.silent = True
    with trio.move_on_after(0.05) as scope:
        await pair.call()
    assert scope.cancelled_caught
    server.silent = False
    if binding is not Binding.GRPC:
        await until(lambda: not server.streams)  # only so can the agent know
    result = await pair.call()
    assert (_judge(pair, result, pair.ledger.executions - 1), result.attempts) == ("answered", 1)
    assert pair.ledger.executions == 3
    assert server.connections == (1 if binding is Binding.GRPC else 2)
    assert pair.servers[1].connections == 0
