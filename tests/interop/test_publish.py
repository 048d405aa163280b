"""``publish`` in front of agents that are not, not yet, or no longer as their card says."""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from sidecar.cli import main
from tests.harness import (
    Process,
    card,
    free_port,
    http,
    peer,
    requires,
    running,
    toml,
    write_card,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

pytestmark = pytest.mark.interop

WELL_KNOWN = "/.well-known/agent-card.json"
ROOT = Path(__file__).resolve().parents[2]


class Published:
    """A running ``publish`` with one card."""

    def __init__(self, process: Process, address: int | str) -> None:
        self.process = process
        self.address = address

    async def card(self, **headers: str) -> Any:
        return await http(self.address, "GET", WELL_KNOWN, headers=headers)

    async def until(self, status: int, seconds: float = 20) -> Any:
        """Poll the card until it has that status."""
        with trio.fail_after(seconds):
            while (reply := await self.card()).status != status:  # noqa: ASYNC110 - another process
                await trio.sleep(0.05)
        return reply

    async def status(self) -> Any:
        return (await http(self.address, "GET", "/status")).json()["publish"]["echo"]

    async def metric(self, name: str, **labels: str) -> float:
        text = (await http(self.address, "GET", "/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def publish(
    source: Any, *, env: Mapping[str, str] | None = None, extra: str = "", **keys: Any
) -> AsyncIterator[Published]:
    port = free_port()
    table = {
        "card": source,
        "address": f"127.0.0.1:{port}",
        "probe_interval_seconds": 0.3,
        **keys,
    }
    lines = ["[publish.echo]", *(f"{key} = {toml(value)}" for key, value in table.items()), extra]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "config.toml"
        file.write_text("\n".join([*lines, ""]), "utf-8")
        argv = [sys.executable, "-m", "sidecar", "publish", "--config", str(file), "echo"]
        async with running(Process("publish", argv, env=env)) as process:
            address: int | str = port
            if str(table["address"]).startswith("unix:"):
                address = str(table["address"])
            await _up(process, address)
            yield Published(process, address)


async def _up(process: Process, address: int | str) -> None:
    with trio.fail_after(30):
        while True:
            assert process.alive, process.log()
            try:
                await http(address, "GET", "/healthz", seconds=2)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.05)
            else:
                return


async def relay(port: int, to: int, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Lead connections at `port` to the port `to`: an agent's own, that comes up late."""

    async def serve(one: trio.SocketStream) -> None:
        async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            try:
                async for data in source:
                    await sink.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()

        async with await trio.open_tcp_stream("127.0.0.1", to) as other, one:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, one, other)
                nursery.start_soon(copy, other, one)

    await trio.serve_tcp(serve, port, host="127.0.0.1", task_status=task_status)


async def test_a_grpc_port_that_comes_up_two_seconds_late(tmp_path, nursery) -> None:
    late = free_port()
    async with peer("sdk_agent", "--rest", "off") as agent:
        content = card([("JSONRPC", agent.urls["JSONRPC"]), ("GRPC", f"http://127.0.0.1:{late}")])
        path = write_card(tmp_path, content)
        async with publish(path) as published:
            began = trio.current_time()
            refused = await published.until(503)
            message = refused.json()["error"]["message"]
            while "first check" in message:
                message = (await published.card()).json()["error"]["message"]
                await trio.sleep(0.02)
            assert f"GRPC http://127.0.0.1:{late}): nothing listens" in message
            assert refused.get("cache-control") == "no-store"
            await trio.sleep_until(began + 2)
            assert (await published.card()).status == 503
            await nursery.start(relay, late, agent.ports["grpc"])
            served = await published.until(200)
            assert served.body == path.read_bytes()
            assert (await published.status())["reasons"] == []
            assert await published.metric("a2a_sidecar_publish_check_success", agent="echo") == 1
            checks = "a2a_sidecar_publish_checks_total"
            assert await published.metric(checks, agent="echo", result="not_served") >= 1
            assert await published.metric(checks, agent="echo", result="served") >= 1
            assert "card published" in published.process.log()
        assert (await agent.state())["executions"] == 0
        nursery.cancel_scope.cancel()


async def test_a_grpc_handler_that_is_never_registered() -> None:
    async with peer("sdk_agent", "--grpc-unregistered", "--rest", "off") as agent:
        async with publish(agent.card_url) as published:
            checks = "a2a_sidecar_publish_checks_total"
            with trio.fail_after(20):
                while await published.metric(checks, result="not_served") < 3:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            reply = await published.card()
            assert reply.status == 503
            error = reply.json()["error"]
            assert "the A2A service is not registered there (UNIMPLEMENTED)" in error["message"]
            assert error["details"][0]["reason"] == "CARD_UNAVAILABLE"
            assert reply.get("retry-after")
            assert await published.metric("a2a_sidecar_publish_check_success") == 0
            assert (await http(published.address, "GET", "/readyz")).status == 503
            # the same reason again and again is one line
            assert published.process.log().count("UNIMPLEMENTED") == 1


async def test_an_agent_that_goes_and_comes_back(tmp_path) -> None:
    ports = {"jsonrpc": free_port(), "grpc": free_port()}
    options = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    content = card([("GRPC", f"http://127.0.0.1:{ports['grpc']}")])
    async with publish(write_card(tmp_path, content)) as published:
        async with peer("sdk_agent", "--rest", "off", *options):
            await published.until(200)
        await published.until(503)
        async with peer("sdk_agent", "--rest", "off", *options):
            await published.until(200)


async def test_a_card_that_changes_is_served_only_once_it_was_checked(tmp_path) -> None:
    async with peer("sdk_agent", "--rest", "off") as agent:
        good = card([("JSONRPC", agent.urls["JSONRPC"])])
        path = write_card(tmp_path, good)
        async with publish(path) as published:
            first = await published.until(200)
            path.write_text(json.dumps(card([("JSONRPC", f"{agent.urls['JSONRPC']}/no")])))
            refused = await published.until(503)
            assert "HTTP 404" in refused.json()["error"]["message"]
            path.write_text(json.dumps({**good, "name": "another"}))
            second = await published.until(200)
            assert second.json()["name"] == "another"
            assert first.get("etag") != second.get("etag")


async def test_validators_and_methods(tmp_path) -> None:
    async with peer("sdk_agent", "--rest", "off") as agent:
        path = write_card(tmp_path, card([("JSONRPC", agent.urls["JSONRPC"])]))
        async with publish(path, probe_interval_seconds=30) as published:
            served = await published.until(200)
            assert served.get("cache-control") == "max-age=30"
            again = await published.card(**{"if-none-match": served.get("etag")})
            assert (again.status, again.body) == (304, b"")
            assert (await published.card(**{"if-none-match": '"other"'})).status == 200
            legacy = await http(published.address, "GET", "/.well-known/agent.json")
            assert legacy.body == served.body
            posted = await http(published.address, "POST", WELL_KNOWN)
            assert (posted.status, posted.get("allow")) == (405, "GET, HEAD")


async def test_what_is_not_the_card_is_for_this_machine_alone(tmp_path) -> None:
    path = write_card(tmp_path, card([("JSONRPC", "http://127.0.0.1:1")]))
    async with publish(path) as published:
        for page in ("/status", "/metrics", "/readyz", "/healthz"):
            assert (await http(published.address, "GET", page)).status in {200, 503}
            through = {"x-forwarded-for": "203.0.113.9"}
            reply = await http(published.address, "GET", page, headers=through)
            assert reply.status == 404
        assert (await http(published.address, "GET", "/.git/config")).status == 404


async def test_on_a_unix_socket(tmp_path) -> None:
    path = write_card(tmp_path, card([("JSONRPC", "http://127.0.0.1:1")]))
    async with publish(path, address=f"unix:{tmp_path}/card.sock") as published:
        assert (await published.card()).status == 503


async def test_credentials_and_maps(tmp_path) -> None:
    """An agent that wants a token, behind a proxy that is not there yet."""
    async with peer("raw_http") as agent:
        content = card([("JSONRPC", "https://agent.example/rpc")], capabilities={})
        await agent.control("config", {"card": content})
        keys: dict[str, Any] = {
            "map": {"https://agent.example": f"http://127.0.0.1:{agent.ports['http']}"},
            "auth": {"bearer": "env:AGENT_TOKEN"},
        }
        env = {"AGENT_TOKEN": "t0ken"}
        async with publish(agent.card_url, env=env, **keys) as published:
            await published.until(200)
            requests = (await agent.state())["requests"]
            assert all(["authorization", "Bearer t0ken"] in one["headers"] for one in requests)
            assert "t0ken" not in published.process.log()


async def test_a_signal_ends_it_and_systemd_is_told(tmp_path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        path = write_card(tmp_path, card([("JSONRPC", "http://127.0.0.1:1")]))
        async with publish(path, env=env) as published:
            ready = await trio.to_thread.run_sync(manager.recv, 4096)
            assert ready.startswith(b"READY=1\nSTATUS=serving at 127.0.0.1:")
            published.process.signal(signal.SIGTERM)
            assert await published.process.wait() == 0


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("", [], "has no table [publish.NAME]"),
        ("[publish.a]\ncard = 'http://h'\naddress = '127.0.0.1:1'\n", ["b"], "no table [publish.b]"),
        ("[publish.a]\ncard = 'http://h'\n", [], "publish.a.address: is required"),
        ("[publish.a]\ncard = 'http://h'\naddress = '127.0.0.1:1'\nmap = { x = 'y' }\n", [], "not an address"),
        ("[publish.a]\ncard = 'http://h'\naddress = '127.0.0.1:1'\nport = 1\n", [], "unknown key"),
    ],
)  # fmt: skip
def test_what_cannot_start(tmp_path, capsys, text, names, words) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text, "utf-8")
    assert main(["publish", "--config", str(file), *names]) == 1
    assert words in capsys.readouterr().err


def test_an_address_that_is_taken(tmp_path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "config.toml"
        file.write_text(f"[publish.a]\ncard = 'http://h'\naddress = '127.0.0.1:{port}'\n", "utf-8")
        assert main(["publish", "--config", str(file)]) == 1
    assert "cannot listen" in capsys.readouterr().err


async def test_the_unit_is_valid(tmp_path) -> None:
    analyze = requires("systemd-analyze", "systemd")
    text = (ROOT / "systemd" / "a2a-sidecar-publish@.service").read_text("utf-8")
    unit = tmp_path / "a2a-sidecar-publish@echo.service"
    # Its program need not be installed here.
    unit.write_text(text.replace("/usr/local/bin/a2a-sidecar", sys.executable), "utf-8")
    argv = [analyze, "verify", "--man=no", str(unit)]
    done = await trio.run_process(argv, capture_stdout=True, capture_stderr=True, check=False)
    said = [line for line in done.stderr.decode().splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, [])
