"""A scripted gRPC agent on h2: the HTTP/2 faults that complete servers never show.

Without a script it is a correct minimal agent. ``--max-requests N`` and ``--max-age SECONDS``
leave each connection gracefully: GOAWAY with the last stream that is served (before the answer to request N, as
nginx does), the streams up to it are finished, later ones are never looked at, then the
connection ends (``--two-step``: a GOAWAY with the highest id comes first, as grpc servers do). ``POST /control/script`` takes a
list of entries, one for each next stream, used in order:

    {"at": "headers" or "request", "rpc": METHOD, "steps": [STEP, ...]}   or [STEP, ...] or STEP

``at`` defaults to ``"request"``, when the whole request was read. A STEP is one of

    "execute"     count an execution of this request's message
    "default"     the correct answer; {"default": {"events": N}} only N messages, and no end
    "hang"        leave the stream alone
    {"rst": CODE}   "refuse" (RST_STREAM with REFUSED_STREAM)
    {"headers": [[NAME, VALUE], ..], "end": false}       default: those of a gRPC reply
    {"message": BASE64 or null for the default answer's, "gzip": false, "cut": N}
    {"data": BASE64, "end": false}                       raw DATA
    {"trailers": [[NAME, VALUE], ..]}                    default: grpc-status 0
    "end"         END_STREAM on an empty DATA frame, without trailers
    {"goaway": {"last": ID (default: this stream), "code": 0}}   later streams are ignored
    "close" "reset"   {"send": BASE64} (raw bytes on the connection)   {"delay": SECONDS}
    {"gate": NAME} (until POST /control/open {"gate": NAME})
    {"settings": {NAME: VALUE}}   new SETTINGS, by their RFC 9113 names
    {"html": STATUS}   an HTML answer, as gateways give
    {"trailers_only": {"code": 12, "message": "", "details": BASE64}}
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from tests.peers import common, mini

if TYPE_CHECKING:
    from tests.peers.common import Headers

REFUSED_STREAM = 7
GRPC_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0"), ("grpc-message", "")]
HTML = b"<html><body>Bad Gateway</body></html>"


@dataclass
class Call:
    """One stream."""

    id: int
    headers: Headers
    body: bytearray = field(default_factory=bytearray)
    entry: dict[str, Any] = field(default_factory=dict)
    steps: list[Any] | None = None
    opened: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def method(self) -> str:
        """The A2A method of its path."""
        path = next((value for name, value in self.headers if name == ":path"), "")
        return path.removeprefix(mini.SERVICE)


class Connection:
    """One accepted connection."""

    def __init__(
        self,
        agent: Agent,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.agent = agent
        self.number = number
        self.reader = reader
        self.writer = writer
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.calls: dict[int, Call] = {}
        self.accepted = 0
        self.last = 0
        self.leaving = False
        self.limit = 2**31 - 1
        self.silent = False
        self.window = asyncio.Event()

    async def run(self) -> None:
        args = self.agent.args
        if args.first_bytes is not None:
            self.writer.write(args.first_bytes.encode().decode("unicode_escape").encode("latin-1"))
        if args.no_settings or args.first_bytes is not None:
            while await self.reader.read(65536):
                pass
            return
        await asyncio.sleep(args.settings_delay)
        # given as an update they would hold only once they are acknowledged, and not be sent
        self.h2.local_settings = Settings(client=False, initial_values=self.agent.settings)
        self.h2.initiate_connection()
        self.flush()
        aged = None
        if args.max_age:
            aged = asyncio.get_running_loop().call_later(args.max_age, self.leave)
        try:
            while data := await self.reader.read(65536):
                for event in self.h2.receive_data(data):
                    self.event(event)
                self.flush()
        except h2.exceptions.ProtocolError:
            self.agent.errors += 1
            self.flush()
        except OSError:
            pass
        finally:
            if aged:
                aged.cancel()
            for call in list(self.calls.values()):
                if call.task:
                    call.task.cancel()

    def flush(self) -> None:
        if not self.silent and not self.writer.is_closing():
            self.writer.write(self.h2.data_to_send())

    # --- events ---

    def event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self.start(Call(event.stream_id, [(str(n), str(v)) for n, v in event.headers]))
            case h2.events.DataReceived():
                size = event.flow_controlled_length
                self.h2.acknowledge_received_data(size, event.stream_id)
                if call := self.calls.get(event.stream_id):
                    call.body += event.data
            case h2.events.StreamEnded():
                if call := self.calls.get(event.stream_id):
                    self.ended(call)
            case h2.events.StreamReset():
                self.agent.resets.append(int(event.error_code))
                if (call := self.calls.get(event.stream_id)) and call.task:
                    call.task.cancel()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self.window.set()
            case h2.events.PingReceived():
                self.agent.pings += 1
            case _:
                pass

    def start(self, call: Call) -> None:
        if self.leaving or call.id > self.limit:
            return
        self.calls[call.id] = call
        self.last = max(self.last, call.id)
        self.agent.seen.open_streams += 1
        call.entry = self.agent.seen.request(
            connection=self.number, stream=call.id, rpc=call.method, headers=call.headers
        )
        entry = self.agent.next_entry(call.method)
        call.steps = entry["steps"]
        if entry["at"] == "headers":
            self.play(call)
        self.accepted += 1
        if self.accepted == self.agent.args.max_requests:
            self.leave()

    def ended(self, call: Call) -> None:
        call.entry["body_size"] = len(call.body)
        if call.task is None:
            self.play(call)

    def play(self, call: Call) -> None:
        call.task = asyncio.get_running_loop().create_task(self.steps(call))
        call.task.add_done_callback(lambda _: self.finished(call))

    def finished(self, call: Call) -> None:
        self.agent.seen.open_streams -= 1
        del self.calls[call.id]
        if self.leaving and not self.calls:
            self.end()

    def leave(self) -> None:
        """GOAWAY; the connection ends when its streams have."""
        if self.leaving or self.writer.is_closing():
            return
        if self.agent.args.two_step:
            self.goaway(2**31 - 1, 0)
        self.goaway(self.last, 0)
        self.leaving = True
        if not self.calls:
            self.end()

    def end(self) -> None:
        """Say no more, but read on for a while: unread bytes would turn the end into a RST."""
        self.flush()
        self.silent = True
        if self.writer.can_write_eof():
            self.writer.write_eof()
            asyncio.get_running_loop().call_later(1, self.writer.close)
        else:
            self.writer.close()

    def goaway(self, last: int, code: int) -> None:
        self.agent.goaways += 1
        self.flush()
        # h2 would refuse every frame after its own GOAWAY
        self.writer.write(GoAwayFrame(0, last_stream_id=last, error_code=code).serialize())

    # --- steps ---

    async def steps(self, call: Call) -> None:
        try:
            for step in call.steps or []:
                await self.step(call, {step: {}} if isinstance(step, str) else step)
        except (OSError, h2.exceptions.ProtocolError):
            pass  # the client left, or reset this stream
        self.flush()

    async def step(self, call: Call, step: dict[str, Any]) -> None:
        match step:
            case {"execute": _}:
                self.agent.mini.execute_pb(mini.unframe(bytes(call.body)))
            case {"default": how}:
                await self.default(call, how.get("events"))
            case {"hang": _}:
                await asyncio.Event().wait()
            case {"refuse": _}:
                self.h2.reset_stream(call.id, REFUSED_STREAM)
            case {"rst": code}:
                self.h2.reset_stream(call.id, code)
            case {"headers": headers}:
                self.headers(call, headers or GRPC_HEADERS, end=step.get("end", False))
            case {"message": message}:
                await self.message(call, message, step)
            case {"data": data}:
                await self.data(call, base64.b64decode(data), end=step.get("end", False))
            case {"trailers": trailers}:
                self.trailers(call, [(n, v) for n, v in trailers] or OK)
            case {"end": _}:
                self.h2.end_stream(call.id)
            case {"goaway": how}:
                self.limit = how.get("last", call.id)
                for other in self.calls.values():
                    if other.id > self.limit and other is not call and other.task:
                        other.task.cancel()  # what was refused must not run
                self.goaway(self.limit, how.get("code", 0))
            case {"close": _}:
                self.flush()
                self.writer.close()
            case {"reset": _}:
                sock = self.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.writer.transport.abort()
            case {"send": data}:
                self.flush()
                self.writer.write(base64.b64decode(data))
            case {"delay": seconds}:
                self.flush()
                await asyncio.sleep(seconds)
            case {"gate": name}:
                self.flush()
                await self.agent.gate(name).wait()
            case {"settings": values}:
                self.h2.update_settings({SettingCodes[name]: n for name, n in values.items()})
                self.flush()
            case {"html": status}:
                headers = [(":status", str(status)), ("content-type", "text/html")]
                self.headers(call, headers, end=False)
                await self.data(call, HTML, end=True)
            case {"trailers_only": how}:
                self.trailers_only(call, how)
            case _:
                raise ValueError(f"unknown step {step}")

    def headers(self, call: Call, headers: Any, *, end: bool) -> None:
        call.opened = True
        self.h2.send_headers(call.id, [(n, v) for n, v in headers], end_stream=end)
        self.flush()

    def trailers(self, call: Call, trailers: Headers) -> None:
        if not call.opened:
            self.headers(call, GRPC_HEADERS, end=False)
        self.h2.send_headers(call.id, trailers, end_stream=True)
        self.flush()

    def trailers_only(self, call: Call, how: dict[str, Any]) -> None:
        headers = [*GRPC_HEADERS, ("grpc-status", str(how.get("code", 12)))]
        headers.append(("grpc-message", how.get("message", "")))
        if how.get("details"):
            headers.append(("grpc-status-details-bin", how["details"].rstrip("=")))
        self.headers(call, headers, end=True)

    async def message(self, call: Call, message: str | None, how: dict[str, Any]) -> None:
        if message is None:
            answer = self.agent.mini.grpc_call(call.method, mini.unframe(bytes(call.body)))
            data = answer.messages[0]
        else:
            data = base64.b64decode(message)
        compressed = bool(how.get("gzip"))
        framed = mini.frame(gzip.compress(data) if compressed else data, compressed=compressed)
        if not call.opened:
            encoding = [("grpc-encoding", "gzip")] if compressed else []
            self.headers(call, [*GRPC_HEADERS, *encoding], end=False)
        await self.data(call, framed[: how.get("cut", len(framed))], end=False)

    async def data(self, call: Call, data: bytes, *, end: bool) -> None:
        """DATA within the peer's windows."""
        view = memoryview(data)
        while view:
            window = self.h2.local_flow_control_window(call.id)
            size = min(window, self.h2.max_outbound_frame_size, len(view))
            if size <= 0:
                self.window.clear()
                self.flush()
                await self.window.wait()
                continue
            self.h2.send_data(call.id, bytes(view[:size]))
            view = view[size:]
            self.flush()
            await self.writer.drain()
        if end:
            self.h2.end_stream(call.id)
            self.flush()

    async def default(self, call: Call, only: int | None) -> None:
        answer = self.agent.mini.grpc_call(call.method, mini.unframe(bytes(call.body)))
        if answer.code and not answer.messages:
            details = base64.b64encode(answer.details).decode()
            how = {"code": answer.code, "message": answer.message, "details": details}
            self.trailers_only(call, how)
            return
        if not call.opened:
            self.headers(call, GRPC_HEADERS, end=False)
        for message in answer.messages[:only]:
            await self.data(call, mini.frame(message), end=False)
        if only is None:
            self.trailers(call, OK)


class Agent:
    """The listening side."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.mini = mini.MiniAgent()
        self.seen = common.Seen()
        self.script: list[dict[str, Any]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.connections: set[Connection] = set()
        self.goaways = 0
        self.errors = 0
        """Connections on which the client broke the protocol."""
        self.pings = 0
        self.resets: list[int] = []
        wanted = {
            SettingCodes.MAX_CONCURRENT_STREAMS: args.max_concurrent_streams,
            SettingCodes.INITIAL_WINDOW_SIZE: args.initial_window_size,
            SettingCodes.MAX_FRAME_SIZE: args.max_frame_size,
            SettingCodes.MAX_HEADER_LIST_SIZE: args.max_header_list_size,
        }
        self.settings: dict[SettingCodes, int] = {
            code: value for code, value in wanted.items() if value is not None
        }

    def state(self) -> dict[str, Any]:
        more = {
            "goaways": self.goaways,
            "pings": self.pings,
            "resets": self.resets,
            "errors": self.errors,
        }
        left = {"script_left": len(self.script)}
        return {**self.mini.as_json(), **self.seen.as_json(), **more, **left}

    def add_script(self, entries: list[Any]) -> dict[str, int]:
        for entry in entries:
            if isinstance(entry, dict) and "steps" in entry:
                self.script.append({"at": "request", **entry})
            else:
                steps = entry if isinstance(entry, list) else [entry]
                self.script.append({"at": "request", "steps": steps})
        return {"script_left": len(self.script)}

    def clear(self, _: Any) -> None:
        self.script.clear()

    def open_gate(self, body: Any) -> None:
        self.gate(body["gate"]).set()

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def leave(self) -> None:
        """Leave every connection, and wait for their streams."""
        for connection in self.connections:
            connection.leave()
        while any(connection.calls for connection in self.connections):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def next_entry(self, rpc: str) -> dict[str, Any]:
        for at, entry in enumerate(self.script):
            if entry.get("rpc", rpc) == rpc:
                return self.script.pop(at)
        return {"at": "request", "steps": ["default"]}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        self.seen.open_connections += 1
        connection = Connection(self, self.seen.connections, reader, writer)
        self.connections.add(connection)
        try:
            await connection.run()
        except OSError:
            pass
        finally:
            self.connections.discard(connection)
            self.seen.open_connections -= 1
            writer.close()


async def main(args: Any) -> None:
    """Serve."""
    agent = Agent(args)
    sock = common.listen(args.port)
    tls = common.server_tls(args, args.alpn)
    await asyncio.start_server(agent.serve, sock=sock, ssl=tls)
    control = common.Control(agent.state)
    control.on("script", agent.add_script)
    control.on("clear", agent.clear)
    control.on("open", agent.open_gate)
    port = common.port_of(sock)
    common.announce(
        await control.start(args.control_port),
        {"grpc": port},
        urls={"GRPC": f"{'https' if tls else 'http'}://{common.HOST}:{port}"},
    )


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--alpn", default="h2")
    options.add_argument("--max-requests", type=int, help="GOAWAY after that many")
    options.add_argument("--max-age", type=float, help="GOAWAY after that many seconds")
    options.add_argument("--two-step", action="store_true")
    options.add_argument("--no-settings", action="store_true", help="accept, say nothing")
    options.add_argument("--settings-delay", type=float, default=0.0, help="seconds before them")
    options.add_argument("--first-bytes", help="say this (with \\r\\n escapes) instead of SETTINGS")
    options.add_argument("--max-concurrent-streams", type=int)
    options.add_argument("--initial-window-size", type=int)
    options.add_argument("--max-frame-size", type=int)
    options.add_argument("--max-header-list-size", type=int)
    common.run(main, options.parse_args())
