"""The sidecar as a process, spoken to as an application and an operator would."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.files import free_port
from tests.support.http_client import EventStream, Response, http, open_stream
from tests.support.processes import START_SECONDS, Process, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

BINDINGS = ("JSONRPC", "HTTP+JSON", "GRPC")


def toml(value: Any) -> str:
    """A value in TOML (inline)."""
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case Path():
            return json.dumps(str(value))
        case _:
            return json.dumps(value)


def config_text(
    agents: Mapping[str, Any], extra: str = "", *, bindings: Sequence[str] = BINDINGS
) -> str:
    """A configuration: a listener for each of `bindings` and the admin address on free ports.

    An agent is its card (URL or path) or a mapping of the keys of its table.
    """
    lines = []
    for binding in bindings:
        lines += [
            "[[listeners]]",
            f'address = "127.0.0.1:{free_port()}"',
            f"binding = {toml(binding)}",
        ]
    lines += ["[admin]", f'address = "127.0.0.1:{free_port()}"']
    for name, keys in agents.items():
        table = keys if isinstance(keys, dict) else {"card": keys}
        lines.append(f"[agents.{name}]")
        lines += [f"{key} = {toml(value)}" for key, value in table.items()]
    return "\n".join([*lines, extra, ""])


class Sidecar:
    """The running daemon, spoken to as an application would."""

    def __init__(self, process: Process, config: str, directory: Path) -> None:
        self.process = process
        self.directory = directory
        self.config_file = directory / "config.toml"
        parsed = tomllib.loads(config)
        self.listeners: dict[str, str] = {}
        for entry in parsed.get("listeners", []):
            self.listeners.setdefault(entry["binding"], entry["address"])
        self.admin = parsed.get("admin", {}).get("address", "127.0.0.1:7429")
        self.agents = list(parsed.get("agents", {}))

    def port(self, binding: str = "JSONRPC") -> int:
        """The TCP port of the first listener with that binding."""
        return int(self.listeners[binding].rpartition(":")[2])

    def path(self, agent: str | None) -> str:
        """``/agents/NAME``, by default of the first agent."""
        name = agent or (self.agents[0] if self.agents else None)
        return f"/agents/{name}" if name else ""

    async def jsonrpc(
        self,
        method: str,
        params: Any,
        id: Any = 1,  # noqa: A002 - JSON-RPC's word
        headers: Mapping[str, str] | None = None,
        *,
        agent: str | None = None,
        seconds: float = 30,
    ) -> tuple[int, dict[str, str], Any]:
        """One JSON-RPC call: (status, headers, body as JSON)."""
        reply = await http(
            self.listeners["JSONRPC"],
            "POST",
            self.path(agent) or "/",
            headers=_rpc_headers(headers),
            body=_rpc_body(method, params, id),
            seconds=seconds,
        )
        return reply.status, reply.header_dict(), reply.json()

    async def rest(
        self,
        verb: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        agent: str | None = None,
        seconds: float = 30,
    ) -> tuple[int, dict[str, str], Any]:
        """One HTTP+JSON call; `path` as after the agent's base."""
        reply = await http(
            self.listeners["HTTP+JSON"],
            verb,
            self.path(agent) + path,
            headers=_rpc_headers(headers),
            body=b"" if body is None else json.dumps(body).encode(),
            seconds=seconds,
        )
        return reply.status, reply.header_dict(), reply.json()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        params: Any,
        id: Any = 1,  # noqa: A002 - JSON-RPC's word
        headers: Mapping[str, str] | None = None,
        *,
        agent: str | None = None,
    ) -> AsyncIterator[EventStream]:
        """A JSON-RPC stream: ``async with s.stream(..) as events: async for event in events``.

        Leaving the block closes the connection.
        """
        async with open_stream(
            self.listeners["JSONRPC"],
            "POST",
            self.path(agent) or "/",
            headers=_rpc_headers({"accept": "text/event-stream", **(headers or {})}),
            body=_rpc_body(method, params, id),
        ) as events:
            yield events

    async def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """``/metrics``: (sample name, labels) → value."""
        text = (await http(self.admin, "GET", "/metrics")).body.decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name which have these labels."""
        wanted = set(labels.items())
        samples = await self.metrics()
        return sum(v for (n, have), v in samples.items() if n == name and wanted <= have)

    async def status(self) -> Any:
        """``/status``."""
        return (await http(self.admin, "GET", "/status")).json()

    async def readyz(self) -> Response:
        """``/readyz``."""
        return await http(self.admin, "GET", "/readyz")

    async def wait_ready(self, seconds: float = 10) -> None:
        """Wait until ``/readyz`` is 200: an agent has a candidate."""
        with trio.fail_after(seconds):
            while (await self.readyz()).status != 200:  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)

    def log(self) -> str:
        """What it logged so far."""
        return self.process.log()

    def reload(self, config: str) -> None:
        """Replace the configuration and send SIGHUP; addresses must stay the same."""
        self.config_file.write_text(config, "utf-8")
        self.process.signal(signal.SIGHUP)


def _rpc_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {"content-type": "application/json", "a2a-version": "1.0", **(headers or {})}


def _rpc_body(method: str, params: Any, id_: Any) -> bytes:
    body = {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}
    return json.dumps(body).encode()


@asynccontextmanager
async def sidecar(
    config: str | None = None,
    *,
    agents: Mapping[str, Any] | None = None,
    extra: str = "",
    bindings: Sequence[str] = BINDINGS,
    env: Mapping[str, str] | None = None,
    ready: bool = False,
) -> AsyncIterator[Sidecar]:
    """Run the daemon with a configuration, or one made of `agents` (see `config_text`).

    It is up when its ``/healthz`` answers 200; with `ready`, when ``/readyz`` does.
    """
    text = config if config is not None else config_text(agents or {}, extra, bindings=bindings)
    with tempfile.TemporaryDirectory(prefix="sidecar-") as name:
        directory = Path(name)
        (directory / "config.toml").write_text(text, "utf-8")
        argv = [sys.executable, "-m", "sidecar", "run", "--config", str(directory / "config.toml")]
        async with running(Process("sidecar", argv, env=env, cwd=directory)) as process:
            result = Sidecar(process, text, directory)
            with trio.move_on_after(START_SECONDS) as scope:
                while not await _healthy(result):
                    if not process.alive:
                        raise process.died("ended before it was up")
                    await trio.sleep(0.02)
            if scope.cancelled_caught:
                raise process.died("not up in time")
            if ready:
                await result.wait_ready()
            yield result


async def _healthy(daemon: Sidecar) -> bool:
    try:
        return (await http(daemon.admin, "GET", "/healthz", seconds=2)).status == 200
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False
