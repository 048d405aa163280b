"""One daemon for many tests, each with agents of its own, and its three listeners as one interface.

The daemon knows a stock of agents whose cards are files without an interface. A test writes a
card into the next of them and asks the daemon for it, which makes it fetch the file.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import (
    EventStream,
    Process,
    Sidecar,
    config_text,
    connect,
    grpc_call,
    http,
    message,
    open_stream,
    toml,
)
from tests.peers.mini import SERVICE, frame, pb, pb_fields, pb_get

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from tests.harness import TlsFiles

BINDINGS = ("JSONRPC", "HTTP+JSON", "GRPC")
LABELS = {"JSONRPC": "jsonrpc", "HTTP+JSON": "http_json", "GRPC": "grpc"}
GRPC_OK, GRPC_UNKNOWN, GRPC_UNAVAILABLE, GRPC_UNAUTHENTICATED = 0, 2, 14, 16

_STOCK = 96
_HEADERS = {"content-type": "application/json", "a2a-version": "1.0"}
_numbers = itertools.count(1)


def message_id() -> str:
    """A message id that no other test uses: executions are counted by it."""
    return f"message-{next(_numbers)}"


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer in the words that the three bindings share."""

    status: int
    """HTTP status; on gRPC the gRPC status."""
    headers: dict[str, str]
    """On gRPC initial and trailing metadata."""
    body: Any
    """The JSON body, or the gRPC message."""
    code: int | None = None
    """JSON-RPC code of an error; None on success and on the other bindings."""
    message: str = ""
    reason: str = ""
    domain: str = ""
    details: dict[str, str] = field(default_factory=dict)
    """Metadata of the error's ErrorInfo."""
    failed: bool = False

    @property
    def delivered(self) -> str | None:
        """The header ``a2a-sidecar-delivered``."""
        return self.headers.get("a2a-sidecar-delivered")

    @property
    def interface(self) -> str | None:
        """The header ``a2a-sidecar-interface``."""
        return self.headers.get("a2a-sidecar-interface")

    @property
    def attempts(self) -> list[str]:
        """The lines on attempts in the error."""
        known = sorted(key for key in self.details if key.startswith("attempt-"))
        return [self.details[key] for key in known]


def _info(details: Sequence[Any]) -> dict[str, Any]:
    infos = [d for d in details if isinstance(d, dict) and d.get("@type", "").endswith("ErrorInfo")]
    if not infos:
        return {}
    info = infos[0]
    return {
        "reason": info.get("reason", ""),
        "domain": info.get("domain", ""),
        "details": info.get("metadata", {}),
    }


def jsonrpc_answer(status: int, headers: dict[str, str], body: Any) -> Answer:
    """The answer in a JSON-RPC response."""
    error = body.get("error")
    if error is None:
        return Answer(status=status, headers=headers, body=body)
    return Answer(
        status=status,
        headers=headers,
        body=body,
        failed=True,
        code=error["code"],
        message=error["message"],
        **_info(error.get("data") or []),
    )


def rest_answer(status: int, headers: dict[str, str], body: Any) -> Answer:
    """The answer in an HTTP+JSON response."""
    if status < 400:
        return Answer(status=status, headers=headers, body=body)
    error = body["error"]
    return Answer(
        status=status,
        headers=headers,
        body=body,
        failed=True,
        message=error["message"],
        **_info(error["details"]),
    )


def grpc_answer(code: int, text: str, metadata: Mapping[str, str | bytes], body: Any) -> Answer:
    """The answer in a gRPC status and metadata, in which ``-bin`` values are bytes."""
    headers = {key: value for key, value in metadata.items() if isinstance(value, str)}
    status = metadata.get("grpc-status-details-bin", b"")
    assert isinstance(status, bytes)
    return Answer(
        status=code,
        headers=headers,
        body=body,
        failed=code != GRPC_OK,
        message=text,
        **_error_info(status),
    )


def _error_info(status: bytes) -> dict[str, Any]:
    """The first ErrorInfo of a google.rpc.Status."""
    if status:
        # Status: 1 code, 2 message; Any: 1 type, 2 value; ErrorInfo: 1 reason, 2 domain, 3 map
        assert pb_get(status, 2) or pb_get(status, 3), "neither message nor details"
    for number, detail in pb_fields(status):
        if number == 3 and isinstance(detail, bytes) and pb_get(detail, 1).endswith(b"ErrorInfo"):
            info = pb_get(detail, 2)
            entries = [e for n, e in pb_fields(info) if n == 3 and isinstance(e, bytes)]
            return {
                "reason": pb_get(info, 1).decode(),
                "domain": pb_get(info, 2).decode(),
                "details": {pb_get(e, 1).decode(): pb_get(e, 2).decode() for e in entries},
            }
    return {}


def text_of(answer: Answer, *, grpc: bool = False) -> str:
    """The text of the first artifact in the answer to SendMessage."""
    assert not answer.failed, answer
    if grpc:
        return pb_get(answer.body, 1, 4, 4, 1).decode()  # task, artifact, part, text
    body = answer.body.get("result", answer.body)
    return str(body["task"]["artifacts"][0]["parts"][0]["text"])


def send_pb(text: str, id_: str, tenant: str) -> bytes:
    """A SendMessageRequest."""
    content = pb(1, id_) + pb(4, 1) + pb(5, pb(1, text))
    return pb(1, tenant) + pb(2, content)


# --- agents -----------------------------------------------------------------------------------


class Samples:
    """The metrics of one agent at one moment; names without ``a2a_sidecar_``."""

    def __init__(self, found: Sequence[tuple[str, dict[str, str], float]]) -> None:
        self._found = [(name.removeprefix("a2a_sidecar_"), have, v) for name, have, v in found]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric with these labels."""
        return sum(
            value
            for sample, have, value in self._found
            if sample == name and labels.items() <= have.items()
        )

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The samples of a metric that are not 0, keyed by the values of `labels`."""
        return {
            tuple(have[label] for label in labels): value
            for sample, have, value in self._found
            if sample == name and value
        }

    @property
    def failovers(self) -> dict[tuple[str, ...], float]:
        """``failovers_total`` by (from, to, reason)."""
        return self.by("failovers_total", "from_interface", "to_interface", "reason")

    def __repr__(self) -> str:
        return repr([entry for entry in self._found if not entry[0].endswith("_bucket")])


class RemoteAgent:
    """One agent of the daemon, called as applications do and looked at as operators do."""

    def __init__(self, daemon: Sidecar, name: str, file: Path | None = None) -> None:
        self.daemon = daemon
        self.name = name
        self.file = file

    # --- calls ---

    async def send(
        self,
        binding: str = "JSONRPC",
        text: str = "hello",
        id_: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = 20,
    ) -> Answer:
        """SendMessage through the listener of `binding`."""
        id_ = id_ or message_id()
        if binding == "GRPC":
            request = send_pb(text, id_, self.name)
            return await self.grpc("SendMessage", request, headers=headers, seconds=seconds)
        params = message(text, id_)
        if binding == "JSONRPC":
            return await self.jsonrpc("SendMessage", params, headers=headers, seconds=seconds)
        return rest_answer(
            *await self.daemon.rest(
                "POST", "/message:send", params, headers, agent=self.name, seconds=seconds
            )
        )

    async def get_task(self, binding: str, id_: str) -> Answer:
        """GetTask through the listener of `binding`."""
        match binding:
            case "JSONRPC":
                return await self.jsonrpc("GetTask", {"id": id_})
            case "HTTP+JSON":
                return rest_answer(*await self.daemon.rest("GET", f"/tasks/{id_}", agent=self.name))
            case _:
                return await self.grpc("GetTask", pb(1, self.name) + pb(2, id_))

    async def jsonrpc(
        self,
        method: str,
        params: Any,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = 20,
    ) -> Answer:
        """A call through the JSON-RPC listener."""
        return jsonrpc_answer(
            *await self.daemon.jsonrpc(
                method, params, headers=headers, agent=self.name, seconds=seconds
            )
        )

    async def grpc(
        self,
        method: str,
        request: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float = 20,
    ) -> Answer:
        """A unary call through the gRPC listener."""
        metadata = [("a2a-version", "1.0"), *(headers or {}).items()]
        result = await grpc_call(
            self.daemon.port("GRPC"), method, request, metadata=metadata, seconds=seconds
        )
        body = result.messages[0] if result.messages else b""
        return grpc_answer(result.code, result.message, {**result.headers, **result.trailers}, body)

    @asynccontextmanager
    async def stream(
        self, binding: str, text: str, id_: str | None = None
    ) -> AsyncIterator[EventStream]:
        """SendStreamingMessage through one of the HTTP listeners."""
        params = message(text, id_ or message_id())
        body: dict[str, Any] = params
        path = f"/agents/{self.name}"
        if binding == "JSONRPC":
            body = {"jsonrpc": "2.0", "id": 7, "method": "SendStreamingMessage", "params": params}
        else:
            path += "/message:stream"
        async with open_stream(
            self.daemon.listeners[binding],
            "POST",
            path,
            headers={**_HEADERS, "accept": "text/event-stream"},
            body=json.dumps(body).encode(),
            seconds=20,
        ) as events:
            yield events

    @asynccontextmanager
    async def grpc_stream(self, text: str, id_: str | None = None) -> AsyncIterator[GrpcStream]:
        """SendStreamingMessage through the gRPC listener."""
        request = send_pb(text, id_ or message_id(), self.name)
        port = self.daemon.port("GRPC")
        async with grpc_stream(port, "SendStreamingMessage", request) as events:
            yield events

    # --- what is known of it ---

    async def status(self) -> Any:
        """Its part of ``/status``."""
        return (await self.daemon.status())["agents"][self.name]

    async def current(self) -> str | None:
        """Where the next call begins, as ``/status`` says."""
        current: str | None = (await self.status())["current"]
        return current

    async def samples(self) -> Samples:
        """Its metrics as they are now; those of the other agents are not parsed."""
        text = (await http(self.daemon.admin, "GET", "/metrics")).body.decode()
        own = [line for line in text.splitlines() if f'agent="{self.name}"' in line]
        found = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families("\n".join([*own, ""]))
            for sample in family.samples
        ]
        return Samples(found)

    async def metric(self, name: str, **labels: str) -> float:
        """See `Samples.total`."""
        return (await self.samples()).total(name, **labels)

    async def failovers(self) -> dict[tuple[str, ...], float]:
        """See `Samples.failovers`."""
        return (await self.samples()).failovers

    async def until(self, name: str, value: float, seconds: float = 5, **labels: str) -> Samples:
        """Wait until a metric has `value`: a call is counted after its answer has gone out."""
        deadline = trio.current_time() + seconds
        while (samples := await self.samples()).total(name, **labels) != value:
            assert trio.current_time() < deadline, (name, labels, samples)
            await trio.sleep(0.01)
        return samples

    async def publish(self, card: Mapping[str, Any], seconds: float = 10) -> None:
        """Replace its card, and wait until the daemon has it."""
        assert self.file is not None
        self.file.write_text(json.dumps(card), "utf-8")
        reply = await self.fetch_card(seconds)
        assert reply.status == 200, reply

    async def fetch_card(self, seconds: float = 10) -> Any:
        """The card that the JSON-RPC listener serves of it, fetched anew."""
        path = f"/agents/{self.name}/.well-known/agent-card.json"
        return await http(self.daemon.listeners["JSONRPC"], "GET", path, seconds=seconds)


class World:
    """The shared daemon and its stock of agents."""

    def __init__(self, daemon: Sidecar, stock: dict[str, Path]) -> None:
        self.daemon = daemon
        self._stock = stock

    def without_card(self) -> RemoteAgent:
        """An agent that no other test uses; its card has nothing in it."""
        assert self._stock, "no agent is left: make _STOCK larger"
        name, file = self._stock.popitem()
        return RemoteAgent(self.daemon, name, file)

    async def agent(self, card: Mapping[str, Any]) -> RemoteAgent:
        """An agent that no other test uses, with this card."""
        result = self.without_card()
        await result.publish(card)
        return result

    async def secure_agent(self, card: Mapping[str, Any]) -> RemoteAgent:
        """The one agent that trusts the tests' own CA."""
        file = self.daemon.directory / "secure.json"
        result = RemoteAgent(self.daemon, "secure", file)
        await result.publish(card)
        return result


@contextmanager
def running_world(tls: TlsFiles) -> Iterator[World]:
    """Run the daemon without trio, for a fixture that outlives one test."""
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        directory = Path(name)
        stock = {f"agent-{n}": directory / f"agent-{n}.json" for n in range(_STOCK)}
        files = {**stock, "secure": directory / "secure.json", "sleeping": directory / "s.json"}
        for file in files.values():
            file.write_text("{}", "utf-8")
        agents: dict[str, Any] = {name: {"card": file} for name, file in files.items()}
        agents["secure"]["tls"] = {"ca_file": tls.ca}
        agents["sleeping"]["enabled"] = False
        extra = (
            f'[[listeners]]\naddress = {toml(f"unix:{directory}/app.sock")}\nbinding = "JSONRPC"'
        )
        text = config_text(agents, extra)
        (directory / "config.toml").write_text(text, "utf-8")
        argv = [sys.executable, "-m", "sidecar", "run", "--config", str(directory / "config.toml")]
        process = Process("sidecar", argv, cwd=directory)
        try:
            daemon = Sidecar(process, text, directory)
            trio.run(_until_up, daemon)
            yield World(daemon, dict(reversed(stock.items())))
            trio.run(_assert_clean, daemon)
        finally:
            process.stop()


async def _until_up(daemon: Sidecar) -> None:
    with trio.fail_after(30):
        while True:
            if not daemon.process.alive:
                raise daemon.process.died("ended before it was up")
            try:
                if (await http(daemon.admin, "GET", "/healthz")).status == 200:
                    return
            except OSError:
                pass
            await trio.sleep(0.05)


async def _assert_clean(daemon: Sidecar) -> None:
    """After all tests nothing is left under way, and no defect was caught."""
    assert daemon.process.alive, daemon.process.log()
    deadline = trio.current_time() + 5
    gauges = ("requests_in_flight", "streams_active")
    while any([await daemon.metric(f"a2a_sidecar_{gauge}") for gauge in gauges]):
        assert trio.current_time() < deadline, await daemon.status()
        await trio.sleep(0.05)
    defects = [line for line in daemon.log().splitlines() if "internal error" in line]
    assert defects == []
    assert await daemon.metric("a2a_sidecar_internal_errors_total") == 0


# --- clients ----------------------------------------------------------------------------------


class KeepAlive:
    """A JSON-RPC client that keeps its connection and does little per call."""

    def __init__(self, address: str, agent: str) -> None:
        self._address = address
        self._path = f"/agents/{agent}"
        self._stream: trio.abc.Stream | None = None
        self._rest = b""

    async def send(self, id_: str) -> tuple[int, dict[str, str], Any]:
        """SendMessage: (status, headers, body)."""
        if self._stream is None:
            self._stream = await connect(self._address)
        params = message("hello", id_)
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params})
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"a2a-version: 1.0\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        await self._stream.send_all((head + body).encode())
        return await self._reply()

    async def _reply(self) -> tuple[int, dict[str, str], Any]:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            await self._more()
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        whole = end + 4 + int(headers["content-length"])
        while len(self._rest) < whole:
            await self._more()
        body = json.loads(self._rest[end + 4 : whole])
        self._rest = self._rest[whole:]
        return int(first.split()[1]), headers, body

    async def _more(self) -> None:
        assert self._stream is not None
        data = await self._stream.receive_some()
        assert data, "the sidecar closed the connection"
        self._rest += data

    async def aclose(self) -> None:
        """Close the connection."""
        if self._stream is not None:
            await self._stream.aclose()


class GrpcStream:
    """A server-streaming call on a connection of its own; counts the PINGs that come."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._body = b""
        self.headers: dict[str, str] = {}
        """Initial metadata, then trailing metadata as well."""
        self.pings: list[float] = []
        self.ended = False

    async def begin(
        self,
        method: str,
        request: bytes,
        authority: str = "localhost",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Send the request."""
        self._h2.initiate_connection()
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", authority),
            (":path", SERVICE + method),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("a2a-version", "1.0"),
            *headers,
        ]
        self._h2.send_headers(1, fields)
        self._h2.send_data(1, frame(request), end_stream=True)
        await self._stream.send_all(self._h2.data_to_send())

    async def opened(self, seconds: float = 5) -> None:
        """Wait for the first headers, which must come within `seconds`."""
        with trio.fail_after(seconds):
            while not self.headers:
                await self._read()

    async def next(self, seconds: float = 5) -> bytes | None:
        """The next message, which must come within `seconds`; None at the end."""
        with trio.fail_after(seconds):
            while True:
                size = 5 + int.from_bytes(self._body[1:5], "big")
                if len(self._body) >= 5 and len(self._body) >= size:
                    data, self._body = self._body[5:size], self._body[size:]
                    return data
                if self.ended:
                    return None
                await self._read()

    async def _read(self) -> None:
        data = await self._stream.receive_some()
        assert data, "the sidecar closed the connection"
        for event in self._h2.receive_data(data):
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self.headers.update({str(n): str(v) for n, v in event.headers})
                case h2.events.DataReceived():
                    self._body += event.data
                    self._h2.acknowledge_received_data(event.flow_controlled_length, 1)
                case h2.events.PingReceived():
                    self.pings.append(trio.current_time())
                case h2.events.StreamEnded():
                    self.ended = True
                case h2.events.StreamReset():
                    raise AssertionError(f"reset with {event.error_code}")
                case _:
                    pass
        await self._stream.send_all(self._h2.data_to_send())

    def answer(self) -> Answer:
        """How it ended."""
        assert self.ended
        metadata: dict[str, str | bytes] = dict(self.headers)
        if details := self.headers.get("grpc-status-details-bin"):
            padded = details + "=" * (-len(details) % 4)
            metadata["grpc-status-details-bin"] = base64.b64decode(padded)
        text = self.headers.get("grpc-message", "")
        return grpc_answer(int(self.headers["grpc-status"]), text, metadata, b"")


@asynccontextmanager
async def grpc_stream(
    port: int,
    method: str,
    request: bytes,
    *,
    authority: str = "localhost",
    headers: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[GrpcStream]:
    """Begin a server-streaming call; leaving closes the connection."""
    stream = await connect(port)
    try:
        result = GrpcStream(stream)
        await result.begin(method, request, authority, headers)
        yield result
    finally:
        await trio.aclose_forcefully(stream)
