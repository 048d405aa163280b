"""SIGHUP: a new configuration takes effect as a whole or not at all, and disturbs nothing else."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Sidecar,
    card,
    connect,
    free_port,
    http,
    make_tls,
    message,
    sidecar,
    toml,
    write_card,
)
from tests.peers.mini import frame
from tests.system.world import KeepAlive, RemoteAgent, message_id, send_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.harness import Peer

pytestmark = pytest.mark.system

WORKING = {"id": "task-9", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
OPENING = {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": WORKING}}}


class Config:
    """A configuration that a test changes piece by piece."""

    def __init__(self, listeners: Sequence[str] = ("JSONRPC",)) -> None:
        self.listeners: list[dict[str, Any]] = [
            {"address": f"127.0.0.1:{free_port()}", "binding": binding} for binding in listeners
        ]
        self.admin = f"127.0.0.1:{free_port()}"
        self.agents: dict[str, dict[str, Any]] = {}
        self.limits: dict[str, Any] = {}
        self.log: dict[str, Any] = {}

    @property
    def text(self) -> str:
        lines = []
        for header, table in [
            *(("[[listeners]]", one) for one in self.listeners),
            ("[admin]", {"address": self.admin}),
            *((f"[agents.{name}]", table) for name, table in self.agents.items()),
            ("[limits]", self.limits),
            ("[log]", self.log),
        ]:
            lines += [header, *(f"{key} = {toml(value)}" for key, value in table.items())]
        return "\n".join([*lines, ""])


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Sidecar]:
    async with sidecar(config.text, ready=True) as daemon:
        yield daemon
        log = daemon.log()
        assert "Traceback" not in log
        assert "internal error" not in log


async def reload(daemon: Sidecar, config: Config | str, outcome: str = "reloaded") -> None:
    """Replace the file, send SIGHUP, wait for what the log says of it."""
    text = config if isinstance(config, str) else config.text
    before = daemon.log().count(f" {outcome} ")
    daemon.reload(text)
    await logged(daemon, f" {outcome} ", before + 1)


def replace(daemon: Sidecar, text: str) -> None:
    """Replace the file in one step, as one that may be read at any time has to be."""
    new = daemon.config_file.with_suffix(".new")
    new.write_text(text, "utf-8")
    new.rename(daemon.config_file)
    daemon.process.signal(signal.SIGHUP)


async def logged(daemon: Sidecar, text: str, times: int = 1) -> None:
    deadline = trio.current_time() + 10
    while daemon.log().count(text) < times:
        assert trio.current_time() < deadline, daemon.log()
        await trio.sleep(0.01)


async def succeeded(daemon: Sidecar) -> float:
    return await daemon.metric("a2a_sidecar_config_last_reload_successful")


def two_interfaces(one: Peer, other: Peer) -> dict[str, Any]:
    return card([("JSONRPC", one.urls["JSONRPC"]), ("JSONRPC", other.urls["JSONRPC"])])


async def until_gone(address: str) -> None:
    """Wait until nobody listens there any more."""
    with trio.fail_after(5), suppress(OSError):
        while True:
            await trio.aclose_forcefully(await connect(address))
            await trio.sleep(0.01)


# --- what does not work changes nothing -------------------------------------------------------


async def test_a_configuration_that_fails_changes_nothing(first: Peer, tmp_path: Path) -> None:
    config = Config()
    config.agents["one"] = {
        "card": write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])])),
        "auth": {"bearer": f"file:{tmp_path}/secret"},
    }
    (tmp_path / "secret").write_text("s3cret", "utf-8")
    good = config.text
    async with running(config) as daemon:
        agent = RemoteAgent(daemon, "one")
        gate = message_id()
        await first.script({"sse": [OPENING, {"gate": gate}, OPENING]})
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = f"127.0.0.1:{server.getsockname()[1]}"
            free = f"127.0.0.1:{free_port()}"
            listener = f'[[listeners]]\naddress = "{free}"\nbinding = "GRPC"\n'
            bad = {
                "[agents\n" + good: "not valid TOML",
                good.replace("[limits]", "[limits]\ndrain = 1"): "unknown key",
                good + "\x00": "TOML",
                listener + listener.replace(free, taken) + good: f"cannot listen on {taken}",
                good.replace(f"file:{tmp_path}/secret", "credential:x"): "agents.one: ",
                good.replace("bearer", "oauth"): "oauth",
                listener + good.replace("auth", 'tls = {ca_file = "card.json"}\nauth'): "tls",
            }
            async with agent.stream("JSONRPC", "hello") as events:
                await events.next()
                for text, reason in bad.items():
                    await reload(daemon, text, "reload failed")
                    assert reason in daemon.log().splitlines()[-1]
                    assert await succeeded(daemon) == 0
                    with pytest.raises(OSError, match="connect"):
                        await connect(free)
                daemon.config_file.unlink()
                daemon.config_file.mkdir()
                daemon.process.signal(signal.SIGHUP)
                await logged(daemon, "cannot be read")
                daemon.config_file.rmdir()
                assert "cannot be read" in (await daemon.status())["reload_error"]
                assert "reloaded" not in daemon.log()
                assert (await daemon.readyz()).status == 200
                assert (await agent.send()).status == 200
                await first.control("open", {"gate": gate})
                assert (await events.next()).event == "message"
        await reload(daemon, good)
        assert await succeeded(daemon) == 1
        assert (await daemon.status())["reload_error"] is None
        assert (await agent.send()).status == 200


async def test_signals_at_once_end_with_the_last_configuration(first: Peer, tmp_path: Path) -> None:
    """However many come, and whatever is in the file on the way."""
    config = Config()
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    config.agents["one"] = {"card": file}
    async with running(config) as daemon:
        for number in range(20):
            config.agents = {"one": {"card": file}, f"other-{number}": {"card": file}}
            replace(daemon, config.text if number % 3 else "broken")
        config.agents = {"one": {"card": file}, "last": {"card": file}}
        replace(daemon, config.text)
        with trio.fail_after(10):
            while list((await daemon.status())["agents"]) != ["one", "last"]:  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert await succeeded(daemon) == 1
        assert 1 <= daemon.log().count(" reloaded ") <= 21
        assert (await RemoteAgent(daemon, "last").send()).status == 200
        for _ in range(3):
            daemon.process.signal(signal.SIGHUP)
        daemon.process.signal(signal.SIGTERM)
        assert await daemon.process.wait() == 0


# --- agents -----------------------------------------------------------------------------------


async def test_agents_that_have_not_changed_are_left_alone(
    first: Peer, second: Peer, tmp_path: Path
) -> None:
    """Their selection, connections and streams stay, whatever else changes."""
    config = Config()
    config.agents["one"] = {"card": write_card(tmp_path, two_interfaces(first, second))}
    async with running(config) as daemon:
        agent = RemoteAgent(daemon, "one")
        await first.script({"reply": {"status": 404, "headers": [], "body": ""}})
        assert (await agent.send()).interface == "1-jsonrpc"
        assert await agent.current() == "1-jsonrpc"
        gate = message_id()
        await second.script({"sse": [OPENING, {"gate": gate}, OPENING]})
        async with agent.stream("JSONRPC", "hello") as events:
            await events.next()
            assert (await agent.send()).interface == "1-jsonrpc"
            connections = (await second.state())["connections"]
            other = {"card": tmp_path / "card.json", "max_streams": 1}
            config.agents = {"zero": other, **config.agents}
            config.limits = {"drain_seconds": 0.1, "buffered_bytes": 2**24}
            config.log = {"level": "debug"}
            config.listeners.append({"address": f"unix:{tmp_path}/s", "binding": "JSONRPC"})
            await reload(daemon, config)
            assert list((await daemon.status())["agents"]) == ["zero", "one"]
            assert await agent.current() == "1-jsonrpc"
            assert (await agent.send()).interface == "1-jsonrpc"
            assert (await second.state())["connections"] == connections
            await first.control("open", {"gate": gate})
            await second.control("open", {"gate": gate})
            assert (await events.next()).event == "message"
            with pytest.raises(StopAsyncIteration):
                await events.next()
        assert await agent.metric("requests_total", outcome="ok") == 4


async def test_a_changed_agent_goes_on_where_the_old_one_was(
    first: Peer, second: Peer, tmp_path: Path
) -> None:
    """With its candidates and selection, even when the card cannot be had any more."""
    config = Config()
    file = write_card(tmp_path, two_interfaces(first, second))
    config.agents["one"] = {"card": file}
    async with running(config) as daemon:
        agent = RemoteAgent(daemon, "one")
        await first.script({"reply": {"status": 404, "headers": [], "body": ""}})
        assert (await agent.send()).interface == "1-jsonrpc"
        gate = message_id()
        await second.script({"sse": [OPENING, {"gate": gate}, OPENING]})
        async with agent.stream("JSONRPC", "hello") as events:
            await events.next()
            file.write_text("no card", "utf-8")
            config.agents["one"]["max_concurrency"] = 7
            await reload(daemon, config)
            assert await agent.current() == "1-jsonrpc"
            assert (await agent.send()).interface == "1-jsonrpc"
            assert len((await agent.status())["attempts"]) == 3
            # The stream goes on under the old configuration.
            await second.control("open", {"gate": gate})
            assert (await events.next()).event == "message"
            with pytest.raises(StopAsyncIteration):
                await events.next()
        assert await agent.metric("stream_ends_total", reason="unfinished") == 1
        # Other credentials may show another card: nothing is taken over.
        config.agents["one"]["auth"] = {"bearer": "env:PATH"}
        await reload(daemon, config)
        assert (await agent.send()).reason == "CARD_UNAVAILABLE"


async def test_agents_that_were_removed_or_disabled(
    first: Peer, second: Peer, tmp_path: Path
) -> None:
    """They take no new calls and serve no card; what is under way ends, or is ended."""
    config = Config()
    config.limits = {"drain_seconds": 1}
    for name, peer in (("gone", first), ("off", second)):
        file = write_card(tmp_path, card([("JSONRPC", peer.urls["JSONRPC"])]), f"{name}.json")
        config.agents[name] = {"card": file}
    config.agents["kept"] = {"card": tmp_path / "gone.json"}
    async with running(config) as daemon:
        gone, off = (RemoteAgent(daemon, name) for name in ("gone", "off"))
        gate = message_id()
        await first.script([{"sse": [OPENING], "end": False}, "hang"])
        await second.script([{"gate": gate}, "default"])
        answers = []

        async def call() -> None:
            answers.append(await off.send())

        async with gone.stream("JSONRPC", "hello") as events, trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await events.next()
            await off.until("requests_in_flight", 1)
            del config.agents["gone"]
            config.agents["off"]["enabled"] = False
            await reload(daemon, config)
            assert (await gone.send()).reason == "AGENT_UNKNOWN"
            assert (await off.send()).reason == "AGENT_DISABLED"
            assert (await gone.fetch_card()).status in {404, 200}
            assert b"AGENT_UNKNOWN" in (await gone.fetch_card()).body
            assert (await off.fetch_card()).status == 503
            assert (await daemon.readyz()).status == 200
            await second.control("open", {"gate": gate})
            event = await events.next()
            assert event.event == "error"
            (info,) = event.json()["error"]["data"]
            assert info["metadata"]["task"] == "task-9"
        assert [answer.status for answer in answers] == [200]
        assert "result" in answers[0].body
        # What a removed agent's last calls have to say is counted, but not under its name.
        samples = await daemon.metrics()
        assert not [labels for _, labels in samples if ("agent", "gone") in labels]
        ended = await daemon.metric("a2a_sidecar_stream_ends_total", agent="other")
        assert ended == await daemon.metric("a2a_sidecar_stream_ends_total", reason="drained") == 1


# --- listeners --------------------------------------------------------------------------------


async def test_a_listener_keeps_its_socket_and_gets_new_settings(
    first: Peer, tmp_path: Path
) -> None:
    """Connections that are there are served as before, once more; new ones by the new rules."""
    config = Config()
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    config.agents["one"] = {"card": file}
    path = tmp_path / "app.sock"
    config.listeners.append({"address": f"unix:{path}", "binding": "JSONRPC"})
    async with running(config) as daemon:
        address = daemon.listeners["JSONRPC"]
        old = KeepAlive(address, "one")
        assert (await old.send(message_id()))[0] == 200
        inode = os.stat(path).st_ino
        gate = message_id()
        await first.script([{"gate": gate}, "default"])
        answers = []

        async def call() -> None:
            answers.append(await daemon.jsonrpc("SendMessage", message("hello", message_id())))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await RemoteAgent(daemon, "one").until("requests_in_flight", 1)
            config.listeners[0]["binding"] = "HTTP+JSON"
            config.listeners[0]["token"] = "env:TOKEN_OF_TEST"
            config.listeners[1]["mode"] = "0600"
            await reload(daemon, config, "reload failed")
            assert os.stat(path).st_mode & 0o777 == 0o660
            config.listeners[0]["token"] = f"file:{tmp_path}/token"
            (tmp_path / "token").write_text("t0ken", "utf-8")
            await reload(daemon, config)
            status, headers, _ = await old.send(message_id())
            assert (status, headers["connection"]) == (200, "close")
            await first.control("open", {"gate": gate})
        ((status, headers, body),) = answers
        assert (status, headers["connection"]) == (200, "close")
        assert "result" in body
        daemon.listeners["HTTP+JSON"] = address
        content = message("hello", message_id())
        assert (await daemon.rest("POST", "/message:send", content))[0] == 401
        token = {"a2a-sidecar-token": "t0ken"}
        assert (await daemon.rest("POST", "/message:send", content, token))[0] == 200
        # A Unix socket is not bound anew, only its mode changes.
        assert os.stat(path).st_ino == inode
        assert os.stat(path).st_mode & 0o777 == 0o600
        await old.aclose()
        # Unless somebody has removed its file.
        path.unlink()
        await reload(daemon, config)
        reply = await http(f"unix:{path}", "GET", "/.well-known/agent-card.json")
        assert reply.status == 200
        daemon.process.signal(signal.SIGTERM)
        assert await daemon.process.wait() == 0
        assert not path.exists()


async def test_a_listener_that_goes_drains(first: Peer, tmp_path: Path) -> None:
    """On both protocols, and at the end of the time with an error."""
    config = Config(["JSONRPC", "GRPC", "HTTP+JSON"])
    config.limits = {"drain_seconds": 1}
    config.agents["one"] = {
        "card": write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    }
    async with running(config) as daemon:
        agent = RemoteAgent(daemon, "one")
        addresses = [one["address"] for one in config.listeners]
        await first.script(*([[{"sse": [OPENING], "end": False}, "hang"]] * 2))
        grpc = await connect(addresses[1])
        async with agent.stream("JSONRPC", "hello") as events:
            await events.next()
            await grpc.send_all(h2_request(send_pb("hello", message_id(), "one")))
            await agent.until("stream_events_total", 2)
            config.listeners = config.listeners[2:]
            await reload(daemon, config)
            for address in addresses[:2]:
                await until_gone(address)
            assert (await agent.send("HTTP+JSON")).status == 200
            assert (await daemon.readyz()).status == 200
            assert (await events.next()).event == "error"
            received = b""
            with trio.fail_after(10):
                while data := await grpc.receive_some():
                    received += data
        await grpc.aclose()
        goaways = [frame for kind, frame in frames(received) if kind == 7]
        assert [int.from_bytes(one[:4], "big") for one in goaways] == [2**31 - 1, 1]
        await agent.until("stream_ends_total", 2, reason="drained")
        assert len((await daemon.status())["listeners"]) == 1


def h2_request(body: bytes) -> bytes:
    """SendStreamingMessage as the first bytes of an HTTP/2 connection, without Huffman coding."""

    def literal(name: str, value: str) -> bytes:
        return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    headers = b"".join(
        literal(name, value)
        for name, value in {
            ":method": "POST",
            ":scheme": "http",
            ":authority": "localhost",
            ":path": "/lf.a2a.v1.A2AService/SendStreamingMessage",
            "te": "trailers",
            "content-type": "application/grpc",
        }.items()
    )
    data = frame(body)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        + len(headers).to_bytes(3, "big")
        + bytes([1, 4, 0, 0, 0, 1])
        + headers
        + len(data).to_bytes(3, "big")
        + bytes([0, 1, 0, 0, 0, 1])
        + data
    )


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """Kind and payload of each HTTP/2 frame."""
    found = []
    while data:
        size = 9 + int.from_bytes(data[:3], "big")
        found.append((data[3], data[9:size]))
        data = data[size:]
    return found


async def test_a_renewed_certificate_is_for_new_connections(first: Peer, tmp_path: Path) -> None:
    """The configuration names the same files; a certificate that cannot be used changes nothing."""
    old = make_tls(tmp_path)
    config = Config()
    config.listeners[0] |= {"tls_cert_file": old.cert, "tls_key_file": old.key}
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    config.agents["one"] = {"card": file}
    async with running(config) as daemon:
        address = daemon.listeners["JSONRPC"]

        async def shown() -> bytes:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            stream = await connect(address, context)
            assert isinstance(stream, trio.SSLStream)
            await stream.do_handshake()
            found: bytes | None = stream.getpeercert(binary_form=True)
            await trio.aclose_forcefully(stream)
            assert found is not None
            return found

        before = await shown()
        assert before == ssl.PEM_cert_to_DER_cert(old.cert.read_text("ascii"))
        good = old.cert.read_bytes()
        old.cert.write_text("not a certificate", "utf-8")
        await reload(daemon, config, "reload failed")
        assert await shown() == before
        old.cert.write_bytes(good)
        new = make_tls(tmp_path)
        assert new.cert == old.cert
        await reload(daemon, config)
        assert await shown() == ssl.PEM_cert_to_DER_cert(new.cert.read_text("ascii")) != before


async def test_logging_changes_with_the_next_line(first: Peer, tmp_path: Path) -> None:
    config = Config()
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    config.agents["one"] = {"card": file}
    async with running(config) as daemon:
        agent = RemoteAgent(daemon, "one")
        await agent.send()
        config.log = {"format": "json", "calls": True}
        daemon.reload(config.text)
        await logged(daemon, '"event": "reloaded"')
        assert '"event": "call"' not in daemon.log()
        await agent.send()
        await logged(daemon, '"event": "call"')
        config.log = {"level": "error"}
        daemon.reload(config.text)
        with trio.fail_after(10):
            while (await agent.status())["attempts"]:
                if daemon.log().count('"event": "call"') < await made(agent):
                    break
                await agent.send()
                await trio.sleep(0.02)
        assert daemon.log().count("reloaded") == 1


async def made(agent: RemoteAgent) -> float:
    """Calls that were made since a line for each was asked for."""
    return await agent.metric("requests_total") - 1
