"""The card is fetched again when it may be out of date: once at a time, not too often, to some end."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.faults.calls import call
from tests.faults.faults import JSONRPC
from tests.faults.rig import address, counted, daemon_agents, running, samples
from tests.harness import card

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from sidecar.agent import Agent
    from sidecar.daemon import Daemon
    from tests.faults.calls import Told
    from tests.harness import Peer

pytestmark = pytest.mark.system

JITTER = 0.75
"""Least part of a wait; the most is all of it."""

SLACK_SECONDS = 1.0
"""What a loaded machine may add to a wait."""


@dataclass
class Publisher:
    """Serves a card over HTTP, and notes who asked when."""

    port: int = 0
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    gate: trio.Event | None = None
    """Replies wait for it."""
    at: list[float] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    """Requests at once, ever."""

    async def serve(self, stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some()
            if not data:
                return
            head += data
        lines = head.decode().split("\r\n")[1:]
        self.asked.append(dict(line.lower().split(": ", 1) for line in lines if line))
        self.at.append(trio.current_time())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.gate is not None:
                await self.gate.wait()
            conditional = self.asked[-1].get("if-none-match")
            same = conditional is not None and conditional == self.headers.get("etag", "").lower()
            status, body = (304, b"") if same else (self.status, self.body)
            fields = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **self.headers,
            }
            text = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            await stream.send_all(f"HTTP/1.1 {status} x\r\n{text}\r\n".encode() + body)
        except trio.BrokenResourceError:
            pass
        finally:
            self.under_way -= 1

    async def until(self, count: int, seconds: float = 5) -> None:
        """Wait for that many requests."""
        with trio.fail_after(seconds):
            while len(self.at) < count:  # noqa: ASYNC110 - no event tells
                await trio.sleep(0.005)

    @property
    def gaps(self) -> list[float]:
        """Seconds between requests."""
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]


@dataclass
class Desk:
    """An agent with a publisher."""

    publisher: Publisher
    daemon: Daemon
    ports: list[int]

    @property
    def agent(self) -> Agent:
        return daemon_agents(self.daemon)["a"]

    def publish(self, *candidates: int, **headers: str) -> None:
        """A card with these of the ports, in this order."""
        self.publisher.body = card_of(self.ports, *candidates)
        self.publisher.headers = headers

    async def call(self, message: str = "m") -> Told:
        return await call(address(self.daemon, JSONRPC), JSONRPC, "a", message)

    def fetches(self) -> dict[tuple[str, ...], int]:
        return counted({}, samples(self.daemon)["a"], "card_fetches_total")

    async def until_fetched(self, result: str, count: int, seconds: float = 5) -> None:
        """Make calls, which ask for what is stale, until that many fetches ended so."""
        with trio.fail_after(seconds):
            while self.fetches().get((result,), 0) < count:
                await self.call()
                await trio.sleep(0.01)


def card_of(ports: list[int], *candidates: int) -> bytes:
    interfaces = [("JSONRPC", f"http://127.0.0.1:{ports[n]}/rpc") for n in candidates]
    return json.dumps(card(interfaces)).encode()


@asynccontextmanager
async def desk(
    peer: Peer,
    directory: Path,
    *,
    candidates: tuple[int, ...] = (0, 1),
    wait: bool = True,
    status: int = 200,
    headers: dict[str, str] | None = None,
    **keys: Any,
) -> AsyncIterator[Desk]:
    """An agent of two scripted peers whose card is at a publisher; `keys` are its configuration."""
    names = ["first", "second"]
    ports = await peer.control("open", [{"name": name, "speaks": "http"} for name in names])
    publisher = Publisher(status=status, headers=headers or {})
    publisher.body = card_of(ports, *candidates)
    try:
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, publisher.serve, 0, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            publisher.port = listener.socket.getsockname()[1]
            agents = {"a": {"card": f"http://127.0.0.1:{publisher.port}/card.json", **keys}}
            async with running(directory, agents, wait=wait) as daemon:
                yield Desk(publisher, daemon, ports)
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await peer.control("close", names)


def current(made: Desk) -> int:
    """The port where the next call begins."""
    generation = made.agent.generation
    assert generation is not None
    return generation.current.port


# --- when -------------------------------------------------------------------------------------


async def test_a_card_is_fresh_for_its_max_age(fault_agent: Peer, tmp_path: Path) -> None:
    fresh = {"cache-control": "max-age=1"}
    async with desk(fault_agent, tmp_path, headers=fresh, refresh_cooldown_seconds=0.01) as made:
        for _ in range(10):
            await made.call()
        assert len(made.publisher.at) == 1
        await trio.sleep_until(made.publisher.at[0] + 1.1)
        began = trio.current_time()
        assert not (await made.call()).failed  # with the old card, at once
        await made.publisher.until(2)
        assert made.publisher.at[1] >= began


@pytest.mark.parametrize("directive", ["no-store", "no-cache", "max-age=0"])
async def test_a_card_that_may_not_be_kept_is_asked_for_at_the_pace_of_the_cooldown(
    fault_agent: Peer, tmp_path: Path, directive: str
) -> None:
    """It changes nothing, so the pace halves each time; an answer makes it fast again."""
    headers = {"cache-control": directive}
    async with desk(fault_agent, tmp_path, headers=headers, refresh_cooldown_seconds=0.2) as made:
        with trio.move_on_after(1.0):
            while True:
                await made.call()
        # an answered call resets the throttle each time: never faster than the cool-down
        assert len(made.publisher.at) >= 3
        assert all(gap >= 0.2 * JITTER for gap in made.publisher.gaps)


async def test_failures_do_not_make_a_storm(fault_agent: Peer, tmp_path: Path) -> None:
    """Calls that fail for a stale endpoint: one fetch at a time, each after twice the wait."""
    gone = {"reply": {"status": 404, "body": "no"}}
    async with desk(fault_agent, tmp_path, candidates=(0,), refresh_cooldown_seconds=0.1) as made:
        await fault_agent.control("script", {"first": [gone] * 2000})
        asked = 0
        with trio.move_on_after(1.6):
            while True:
                async with trio.open_nursery() as nursery:
                    for _ in range(5):
                        nursery.start_soon(made.call)
                asked += 5
        gaps = made.publisher.gaps
        assert asked > 20
        assert made.publisher.most == 1
        assert 2 <= len(gaps) <= 5
        for n, gap in enumerate(gaps):
            wait = 0.1 * 2**n
            assert JITTER * wait <= gap <= wait + SLACK_SECONDS * (n + 1), gaps


async def test_a_fetch_is_shared(fault_agent: Peer, tmp_path: Path) -> None:
    """While one is under way there is no other, and nobody waits for it."""
    stale = {"cache-control": "max-age=0"}
    async with desk(fault_agent, tmp_path, headers=stale, refresh_cooldown_seconds=0.01) as made:
        made.publisher.gate = trio.Event()
        await made.call()
        await made.publisher.until(2)
        for n in range(30):
            assert not (await made.call(f"m-{n}")).failed
        assert (len(made.publisher.at), made.publisher.most) == (2, 1)
        made.publisher.gate.set()
        await made.until_fetched("fetched", 2)


async def test_the_first_fetch_is_waited_for(fault_agent: Peer, tmp_path: Path) -> None:
    """Twenty calls before there is a card: one fetch, and all are answered when it ends."""
    told: list[Told] = []
    async with desk(fault_agent, tmp_path, wait=False, status=200) as made:
        made.publisher.gate = trio.Event()

        async def one(n: int) -> None:
            told.append(await made.call(f"m-{n}"))

        # the fetch of the start may be over already: ask for the card, and find it under way
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(one, n)
            await made.publisher.until(1)
            made.publisher.gate.set()
        assert [one.failed for one in told] == [False] * 20
        assert made.publisher.most == 1


async def test_without_a_card_the_waits_grow_with_jitter(fault_agent: Peer, tmp_path: Path) -> None:
    """And a call between two fetches is answered at once."""
    async with desk(
        fault_agent, tmp_path, wait=False, status=503, refresh_cooldown_seconds=0.1
    ) as made:
        await made.publisher.until(2)
        began = trio.current_time()
        told = await made.call()
        assert trio.current_time() - began < 1
        assert (told.reason, told.delivered) == ("CARD_UNAVAILABLE", "no")
        await made.publisher.until(4)
        gaps = made.publisher.gaps
        for n, gap in enumerate(gaps):
            wait = 0.1 * 2 ** (n + 1)
            assert JITTER * wait <= gap <= wait + SLACK_SECONDS, gaps
        parts = {round(gap / (0.1 * 2 ** (n + 1)), 2) for n, gap in enumerate(gaps)}
        assert len(parts) > 1
        made.publisher.status = 200
        await made.until_fetched("fetched", 1)
        assert not (await made.call()).failed


# --- what it brings ---------------------------------------------------------------------------


async def test_validators_are_sent_and_a_304_confirms_the_card(
    fault_agent: Peer, tmp_path: Path
) -> None:
    headers = {
        "etag": '"v1"',
        "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        "cache-control": "max-age=0",
    }
    async with desk(fault_agent, tmp_path, headers=headers, refresh_cooldown_seconds=0.01) as made:
        before = made.agent.generation
        await made.call()
        await made.until_fetched("not_modified", 1)
        assert "if-none-match" not in made.publisher.asked[0]
        assert made.publisher.asked[1]["if-none-match"] == '"v1"'
        assert made.publisher.asked[1]["if-modified-since"] == headers["last-modified"].lower()
        assert made.agent.generation is before
        assert not (await made.call()).failed
        # a new card under a new validator
        made.publish(1, 0, etag='"v2"')
        await made.until_fetched("fetched", 2)
        assert current(made) == made.ports[1]


BAD: dict[str, tuple[int, bytes, str]] = {
    "server error": (500, b"no", "error"),
    "not found": (404, b"no", "error"),
    "a web page": (200, b"<html></html>", "error"),
    "half a card": (200, b'{"name": "a"', "error"),
    "no interface at all": (200, json.dumps(card([])).encode(), "rejected"),
    "only interfaces of no use": (
        200,
        json.dumps(card([("SOAP", "http://127.0.0.1:1/"), ("JSONRPC", "ftp://x/")])).encode(),
        "rejected",
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_refresh_that_fails_changes_nothing(
    fault_agent: Peer, tmp_path: Path, what: str
) -> None:
    """Nor does a card that has lost its interfaces: calls go on where they went."""
    status, body, result = BAD[what]
    stale = {"cache-control": "max-age=0"}
    async with desk(fault_agent, tmp_path, headers=stale, refresh_cooldown_seconds=0.02) as made:
        before = made.agent.generation
        made.publisher.status, made.publisher.body = status, body
        await made.call()
        await made.until_fetched(result, 1)
        for n in range(3):
            told = await made.call(f"m-{n}")
            assert (told.failed, told.interface) == (False, "0-jsonrpc")
        assert made.agent.generation is before
        assert made.daemon.unready() == []
        # and it is asked for until it is good again
        made.publisher.status = 200
        made.publish(1, 0)
        await made.until_fetched("fetched", 2)
        assert (await made.call("last")).interface == "0-jsonrpc"
        assert current(made) == made.ports[1]


async def test_a_publishers_new_order_takes_effect(fault_agent: Peer, tmp_path: Path) -> None:
    """For a selection that stands at the first."""
    stale = {"cache-control": "max-age=0"}
    async with desk(fault_agent, tmp_path, headers=stale, refresh_cooldown_seconds=0.02) as made:
        assert current(made) == made.ports[0]
        made.publish(1, 0)
        await made.call()
        await made.until_fetched("fetched", 2)
        assert current(made) == made.ports[1]
        assert counted({}, samples(made.daemon)["a"], "card_changes_total") == {(): 1}


@pytest.mark.parametrize("stays", [True, False])
async def test_a_selection_that_moved_stays_with_its_interface(
    fault_agent: Peer, tmp_path: Path, stays: bool
) -> None:
    """As long as the card has it; else it starts at the first."""
    stale = {"cache-control": "max-age=0"}
    gone = {"reply": {"status": 404, "body": "no"}}
    async with desk(fault_agent, tmp_path, headers=stale, refresh_cooldown_seconds=600.0) as made:
        await fault_agent.control("script", {"first": [gone]})
        await made.call()
        assert current(made) == made.ports[1]
        if stays:
            third = json.loads(card_of(made.ports, 0, 1))
            extra = {**third["supportedInterfaces"][0], "url": "http://127.0.0.1:9/rpc"}
            third["supportedInterfaces"].insert(0, extra)
            made.publisher.body = json.dumps(third).encode()
        else:
            made.publish(0)
        await made.agent.fresh_card()
        assert current(made) == made.ports[1 if stays else 0]
