"""The main job: a call arrives on an interface that is served, and never runs twice."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import card, free_port, legacy_card, peer, peer_sync
from tests.system.world import (
    BINDINGS,
    GRPC_UNAUTHENTICATED,
    GRPC_UNAVAILABLE,
    GRPC_UNKNOWN,
    Answer,
    message_id,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.harness import Peer, TlsFiles
    from tests.system.world import World

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def without_handlers() -> Iterator[Peer]:
    """A gRPC server on which the A2A service was never registered."""
    with peer_sync("grpc_generic", "--unimplemented") as result:
        yield result


@asynccontextmanager
async def every_call_ends_with(agent: Peer, code: int, text: str) -> AsyncIterator[None]:
    await agent.control("status", {"code": code, "message": text})
    try:
        yield
    finally:
        await agent.control("status", None)


async def executions(id_: str, *agents: Peer) -> int:
    """How often a message ran, wherever."""
    states = [await agent.state() for agent in agents]
    return sum(state["by_message"].get(id_, 0) for state in states)


def mentions(state: dict[str, Any], id_: str) -> list[dict[str, Any]]:
    """The requests that carried a message."""
    return [request for request in state["requests"] if f'"{id_}"' in request.get("body", "")]


def misleading_card(jsonrpc: Peer, grpc: Peer) -> dict[str, Any]:
    """`preferredTransport` names a transport that is not served at `url`."""
    primary = jsonrpc.urls["JSONRPC"]
    return legacy_card(
        url=primary,
        preferred="grpc",
        additional=[("JSONRPC", primary), ("GRPC", grpc.urls["GRPC"])],
    )


def assert_tells(answer: Answer, binding: str, *, delivered: str, reason: str) -> None:
    """An error of the sidecar in the form of `binding` (the table of reasons)."""
    unknown = delivered == "unknown"
    assert answer.failed
    assert answer.delivered == answer.details["delivered"] == delivered
    assert (answer.reason, answer.domain) == (reason, "a2a-sidecar")
    match binding:
        case "JSONRPC":
            assert (answer.status, answer.code) == (200, -32603)
        case "HTTP+JSON":
            assert answer.status == (502 if unknown else 503)
        case _:
            assert answer.status == (GRPC_UNKNOWN if unknown else GRPC_UNAVAILABLE)


# --- a transport that the card names and nobody serves ----------------------------------------


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_call_survives_a_preferred_transport_without_handlers(
    world: World, first: Peer, without_handlers: Peer, binding: str
) -> None:
    agent = await world.agent(misleading_card(first, without_handlers))
    status = await agent.status()
    assert [c["interface"] for c in status["candidates"]] == ["2-grpc", "0-jsonrpc"]
    asked = len((await without_handlers.state())["requests"])

    id_ = message_id()
    answer = await agent.send(binding, "survives", id_)
    assert text_of(answer, grpc=binding == "GRPC") == "survives"
    assert answer.interface == "0-jsonrpc"
    assert answer.headers["a2a-sidecar-attempts"] == "2"
    assert answer.delivered is None
    assert await executions(id_, first, without_handlers) == 1
    assert await agent.failovers() == {("2-grpc", "0-jsonrpc", "unimplemented"): 1}
    assert await agent.current() == "0-jsonrpc"
    assert len((await without_handlers.state())["requests"]) == asked + 1

    again = await agent.send(binding)
    assert again.headers["a2a-sidecar-attempts"] == "1"
    assert again.interface == "0-jsonrpc"
    assert len((await without_handlers.state())["requests"]) == asked + 1
    seen = await agent.until("requests_total", 2, outcome="ok", binding=binding)
    assert seen.total("requests_total") == 2
    assert seen.total("failovers_total") == 1


async def test_the_primary_url_is_never_spoken_to_in_the_hinted_transport(
    world: World, without_handlers: Peer
) -> None:
    async with peer("raw_http") as primary:
        agent = await world.agent(misleading_card(primary, without_handlers))
        for binding in BINDINGS:
            await agent.send(binding)
        state = await primary.state()
    assert {request["method"] for request in state["requests"]} == {"POST"}  # never PRI
    assert state["connections"] == 1
    assert len(state["requests"]) == state["executions"] == 3


async def test_it_is_told_what_the_card_promises_and_does_not_keep(
    world: World, first: Peer, without_handlers: Peer
) -> None:
    agent = await world.agent(misleading_card(first, without_handlers))
    id_ = message_id()
    await agent.send("JSONRPC", "hello", id_)
    address = f"127.0.0.1:{without_handlers.ports['grpc']}"
    lines = [line for line in world.daemon.log().splitlines() if f"agent={agent.name} " in line]
    (failover,) = [line for line in lines if "failover" in line]
    for part in ("2-grpc", "0-jsonrpc", "SendMessage", address, "not_served", "delivered=no"):
        assert part in failover, part
    assert "does not serve it" in failover
    assert [line for line in lines if "contradicts itself" in line]
    attempts = (await agent.status())["attempts"]
    assert [(a["interface"], a["kind"]) for a in attempts] == [
        ("2-grpc", "not_served"),
        ("0-jsonrpc", "answered"),
    ]


async def test_a_call_survives_the_same_over_tls(world: World, tls: TlsFiles) -> None:
    async with (
        peer("raw_http", *tls.peer_args) as primary,
        peer("grpc_generic", "--unimplemented", *tls.peer_args) as grpc,
    ):
        grpc.urls["GRPC"] = f"127.0.0.1:{grpc.ports['grpc']}"  # without a scheme it means TLS
        agent = await world.secure_agent(misleading_card(primary, grpc))
        answer = await agent.send("JSONRPC", "survives")
        assert text_of(answer) == "survives"
        assert await agent.failovers() == {("2-grpc", "0-jsonrpc", "unimplemented"): 1}
        assert (await primary.state())["executions"] == 1


@pytest.mark.parametrize("binding", BINDINGS)
async def test_an_agent_that_wants_to_know_who_asks_has_answered(
    world: World, first: Peer, grpc_peer: Peer, binding: str
) -> None:
    agent = await world.agent(misleading_card(first, grpc_peer))
    id_ = message_id()
    async with every_call_ends_with(grpc_peer, GRPC_UNAUTHENTICATED, "who are you"):
        answer = await agent.send(binding, "hello", id_)
    assert answer.failed
    assert answer.status == (GRPC_UNAUTHENTICATED if binding == "GRPC" else 401)
    assert answer.delivered is None
    assert answer.interface == "2-grpc"
    assert answer.headers["a2a-sidecar-attempts"] == "1"
    if binding == "JSONRPC":
        assert answer.code == -32603
        assert answer.reason == "AGENT_REFUSED"
    assert mentions(await first.state(), id_) == []
    assert await executions(id_, first, grpc_peer) == 0
    seen = await agent.until("requests_total", 1, outcome="agent_error", binding=binding)
    assert seen.failovers == {}
    assert seen.total("attempts_total", result="auth") == 1
    assert await agent.current() == "2-grpc"

    # it stays where it was: with credentials the same interface would do
    assert (await agent.send(binding)).interface == "2-grpc"


# --- nobody there, and nobody knows -----------------------------------------------------------

ENDINGS: dict[str, tuple[list[Any], str]] = {
    "close": (["execute", "close"], "waiting"),
    "reset": (["execute", "reset"], "waiting"),
    "half a head": (["execute", {"send": "HTTP/1.1 200 OK\r\ncontent-"}, "close"], "receiving"),
    "half a reply": ([{"default": {"bytes": 150}}, "close"], "receiving"),
    "not http": (["execute", {"send": "220 mail.example ESMTP\r\n"}, "close"], "waiting"),
    "a gateway's error": (["execute", {"reply": {"status": 503, "body": "busy"}}], "receiving"),
}


@pytest.mark.parametrize("connection", ["fresh", "reused"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_may_have_run_is_not_run_again(
    world: World, first: Peer, second: Peer, ending: str, connection: str
) -> None:
    """Whatever the caller speaks: one execution, `delivered=unknown`, and the next call moves."""
    steps, phase = ENDINGS[ending]
    for binding in BINDINGS if connection == "fresh" else BINDINGS[:1]:
        agent = await world.agent(
            card([("JSONRPC", first.urls["JSONRPC"]), ("HTTP+JSON", second.urls["HTTP+JSON"])])
        )
        if connection == "reused":
            assert (await agent.send(binding)).interface == "0-jsonrpc"
        await first.script(steps)
        id_ = message_id()
        answer = await agent.send(binding, "hello", id_)
        assert_tells(answer, binding, delivered="unknown", reason="DELIVERY_UNKNOWN")
        assert answer.interface == "0-jsonrpc"
        assert answer.headers["a2a-sidecar-attempts"] == "1"
        assert await executions(id_, first, second) == 1
        assert len(mentions(await first.state(), id_)) == 1
        assert mentions(await second.state(), id_) == []
        seen = await agent.until("requests_total", 1, outcome="ambiguous")
        assert seen.failovers == {}
        where = seen.by("ambiguous_errors_total", "operation", "interface", "phase")
        assert where == {("SendMessage", "0-jsonrpc", phase): 1}

        moved = await agent.send(binding, "hello")
        assert moved.interface == "1-http_json"
        assert moved.headers["a2a-sidecar-attempts"] == "1"
        assert not moved.failed


GRPC_ENDINGS: dict[str, list[Any]] = {
    "close": ["execute", "close"],
    "reset": ["execute", "reset"],
    "stream reset": ["execute", {"rst": 2}],
    "unavailable": ["execute", {"trailers_only": {"code": 14, "message": "try again"}}],
    "a gateway's page": ["execute", {"html": 502}],
    "half a message": [{"message": None, "cut": 7}, {"trailers": []}],
}


@pytest.mark.parametrize("ending", GRPC_ENDINGS)
async def test_what_may_have_run_over_grpc_is_not_run_again(
    world: World, first: Peer, h2_peer: Peer, ending: str
) -> None:
    for binding in BINDINGS:
        agent = await world.agent(
            card([("GRPC", h2_peer.urls["GRPC"]), ("JSONRPC", first.urls["JSONRPC"])])
        )
        assert (await agent.send(binding)).interface == "0-grpc"
        await h2_peer.script(GRPC_ENDINGS[ending])
        id_ = message_id()
        answer = await agent.send(binding, "hello", id_)
        if ending == "unavailable" and binding == "GRPC":
            assert answer.status == GRPC_UNAVAILABLE  # the agent's own word on the same binding
            assert answer.delivered == answer.details["delivered"] == "unknown"
        else:
            assert_tells(answer, binding, delivered="unknown", reason="DELIVERY_UNKNOWN")
        assert await executions(id_, first, h2_peer) == 1
        seen = await agent.until("requests_total", 1, outcome="ambiguous")
        assert seen.total("ambiguous_errors_total") == 1
        assert seen.failovers == {}
        assert (await agent.send(binding)).interface == "1-jsonrpc"


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_refused_connection_costs_the_caller_nothing(
    world: World, second: Peer, binding: str
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}/rpc"
    agent = await world.agent(card([("JSONRPC", nobody), ("HTTP+JSON", second.urls["HTTP+JSON"])]))
    id_ = message_id()
    answer = await agent.send(binding, "hello", id_)
    assert text_of(answer, grpc=binding == "GRPC") == "hello"
    assert answer.interface == "1-http_json"
    assert answer.headers["a2a-sidecar-attempts"] == "2"
    assert await executions(id_, second) == 1
    assert await agent.failovers() == {("0-jsonrpc", "1-http_json", "dial"): 1}
    assert await agent.metric("ambiguous_errors_total") == 0
    assert await agent.current() == "1-http_json"


@pytest.mark.parametrize("status", [404, 405, 410, 415, 421, 426])
async def test_a_wrong_endpoint_is_left_for_the_next(
    world: World, first: Peer, second: Peer, status: int
) -> None:
    """What a web server says that does not know the address, as HTML: nobody took the call."""
    for binding, url in (
        ("JSONRPC", first.urls["JSONRPC"]),
        ("HTTP+JSON", first.urls["HTTP+JSON"]),
    ):
        page = {"status": status, "headers": [["content-type", "text/html"]], "body": "<html>"}
        await first.script({"reply": page})
        agent = await world.agent(card([(binding, url), ("JSONRPC", second.urls["JSONRPC"])]))
        id_ = message_id()
        answer = await agent.send("JSONRPC", "hello", id_)
        assert text_of(answer) == "hello"
        assert answer.interface == "1-jsonrpc"
        assert await executions(id_, first, second) == 1
        reasons = [reason for _, _, reason in await agent.failovers()]
        assert reasons == [f"http_{status}"]


async def test_a_method_that_is_not_served_is_asked_elsewhere(
    world: World, first: Peer, second: Peer
) -> None:
    error = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "Method not found"}}
    await first.script({"reply": {"body": error}})
    agent = await world.agent(
        card([("JSONRPC", first.urls["JSONRPC"]), ("JSONRPC", second.urls["JSONRPC"])])
    )
    id_ = message_id()
    assert text_of(await agent.send("HTTP+JSON", "hello", id_)) == "hello"
    assert await executions(id_, first, second) == 1
    assert await agent.failovers() == {("0-jsonrpc", "1-jsonrpc", "method_not_found"): 1}


async def test_concurrent_failures_move_the_selection_once(
    world: World, first: Peer, second: Peer
) -> None:
    """Twenty calls that fail together advance by one, not by twenty."""
    await first.script(*([["execute", {"gate": "burst"}, "close"]] * 20))
    third = f"http://127.0.0.1:{free_port()}"
    agent = await world.agent(
        card(
            [
                ("JSONRPC", first.urls["JSONRPC"]),
                ("JSONRPC", second.urls["JSONRPC"]),
                ("HTTP+JSON", third),
            ]
        )
    )
    ids = [message_id() for _ in range(20)]
    answers: list[Answer] = []

    async def call(id_: str) -> None:
        answers.append(await agent.send("JSONRPC", "hello", id_))

    async with trio.open_nursery() as nursery:
        for id_ in ids:
            nursery.start_soon(call, id_)
        await first.until(lambda state: all(state["by_message"].get(id_) for id_ in ids))
        await first.control("open", {"gate": "burst"})
    assert {answer.delivered for answer in answers} == {"unknown"}
    assert await agent.current() == "1-jsonrpc"
    seen = await agent.until("requests_total", 20, outcome="ambiguous")
    assert seen.total("selection_changes_total") == 1
    assert seen.total("ambiguous_errors_total") == 20
    assert [await executions(id_, first, second) for id_ in ids] == [1] * 20


# --- nobody at all ----------------------------------------------------------------------------


@pytest.mark.parametrize("binding", BINDINGS)
async def test_when_all_are_down_the_error_tells_of_each_attempt(
    world: World, binding: str
) -> None:
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    agent = await world.agent(card(list(zip(BINDINGS, urls, strict=True))))
    answer = await agent.send(binding)
    assert_tells(answer, binding, delivered="no", reason="NOT_DELIVERED")
    labels = ["0-jsonrpc", "1-http_json", "2-grpc"]
    assert answer.attempts == [
        f"{label} 127.0.0.1:{port} not_delivered dial"
        for label, port in zip(labels, ports, strict=True)
    ]
    for line in answer.attempts:
        assert line in answer.message
    assert answer.details["agent"] == agent.name
    assert answer.headers["a2a-sidecar-attempts"] == "3"
    seen = await agent.until("requests_total", 1, outcome="not_delivered", binding=binding)
    assert seen.total("attempts_total", result="dial") == 3
    assert seen.total("failovers_total") == 2


async def test_an_interface_that_comes_back_is_reached_after_the_last(world: World) -> None:
    port = free_port()
    async with peer("raw_http") as backup:
        agent = await world.agent(
            card(
                [
                    ("JSONRPC", f"http://127.0.0.1:{port}/rpc"),
                    ("HTTP+JSON", backup.urls["HTTP+JSON"]),
                ]
            )
        )
        assert (await agent.send()).interface == "1-http_json"
    down = await agent.send()  # begins at the second, and ends at the first
    assert_tells(down, "JSONRPC", delivered="no", reason="NOT_DELIVERED")
    assert [line.split()[0] for line in down.attempts] == ["1-http_json", "0-jsonrpc"]
    assert await agent.current() == "1-http_json"

    async with peer("raw_http", "--port", str(port)) as back:
        id_ = message_id()
        answer = await agent.send("JSONRPC", "hello", id_)
        assert text_of(answer) == "hello"
        assert answer.interface == "0-jsonrpc"
        assert await executions(id_, back) == 1
        assert await agent.current() == "0-jsonrpc"
        assert (await agent.send()).headers["a2a-sidecar-attempts"] == "1"
