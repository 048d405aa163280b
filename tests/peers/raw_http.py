"""A scripted HTTP/1.1 agent on bare sockets: JSON-RPC at ``/rpc``, HTTP+JSON at ``/``.

Without a script it is a correct minimal agent. ``POST /control/script`` takes a list of entries,
one for each next request (or connection), used in order:

    {"at": AT, "rpc": METHOD, "steps": [STEP, ...]}      or just [STEP, ...] or a single STEP

``at`` says when the steps run: ``"request"`` (the default: after the whole request was read),
``"head"`` (its body is left unread), ``"accept"`` (a new connection, nothing is read), or a
number N (after exactly N bytes of the request). ``rpc`` lets the entry wait for that operation.
A STEP is one of

    "execute"                 count an execution of this request's message
    "default"                 the correct answer; {"default": {"bytes": N}} only its first N bytes,
                              {"events": N} only the first N events of a stream, and no end,
                              {"surplus": TEXT} that behind it, in one piece
    "close" "reset" "half_close"
    "hang"                    wait until the client leaves
    {"delay": SECONDS}   {"gate": NAME} (until POST /control/open {"gate": NAME})
    {"send": TEXT or {"base64": DATA}}                   raw bytes, also after a reply
    {"interim": STATUS, "headers": [[NAME, VALUE], ..]}
    {"redirect": STATUS, "location": URL}
    {"reply": {"status", "headers", "body" (text, or JSON) or "base64", "length", "cut": N,
               "pause": SECONDS between its two halves, "chunked": true}}
    {"sse": [ITEM, ..], "end": true}   ITEM: text as it is, {"data": JSON}, {"delay"}, {"gate"}

A connection stays open after the steps unless they end it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from typing import Any

from tests.peers import common, mini
from tests.peers.common import HOST, Incoming, plain_response

JSON = [("content-type", "application/json")]
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"cache-control: no-store\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Gone(Exception):
    """The client left, or the script ended the connection."""


class Connection:
    """One accepted connection: bytes are read in the background, so that leaving is seen."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.buffer = bytearray()
        self.left = asyncio.Event()
        self._grew = asyncio.Event()
        self._reader = reader
        self._writer = writer

    async def pump(self) -> None:
        """Read until the client leaves."""
        try:
            while data := await self._reader.read(65536):
                self.buffer += data
                self._grew.set()
        except OSError:
            pass
        finally:
            self.left.set()
            self._grew.set()

    async def need(self, count: int) -> None:
        """Wait until that many bytes are there."""
        while len(self.buffer) < count:
            if self.left.is_set():
                raise Gone
            self._grew.clear()
            await self._grew.wait()

    async def take(self, count: int) -> bytes:
        """Read exactly that many bytes."""
        await self.need(count)
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def take_line(self, end: bytes = b"\r\n") -> bytes:
        """Read up to and with `end`."""
        while (at := self.buffer.find(end)) < 0:
            await self.need(len(self.buffer) + 1)
        return await self.take(at + len(end))

    async def send(self, data: bytes) -> None:
        """Write; a client that left is `Gone`."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise Gone from error

    async def until_left(self, wait: Any) -> None:
        """Wait for an awaitable, but no longer than the client stays."""
        task = asyncio.ensure_future(wait)
        left = asyncio.ensure_future(self.left.wait())
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not task.done():
            task.cancel()
            raise Gone

    def half_close(self) -> None:
        """Send FIN (over TLS: end the connection), go on reading."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        else:
            self._writer.close()

    def reset(self) -> None:
        """End with RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """End with FIN."""
        self._writer.close()


class Agent:
    """The listening side: scripts, connections, answers."""

    def __init__(self, *, idle_close: float | None, max_requests: int | None) -> None:
        self.mini = mini.MiniAgent()
        self.seen = common.Seen()
        self.script: list[dict[str, Any]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.idle_close = idle_close
        self.max_requests = max_requests
        self.card: Any = None

    def state(self) -> dict[str, Any]:
        left = {"script_left": len(self.script)}
        return {**self.mini.as_json(), **self.seen.as_json(), **left}

    # --- control ---

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

    def configure(self, body: dict[str, Any]) -> None:
        for name, value in body.items():
            if name not in ("idle_close", "max_requests", "card"):
                raise ValueError(name)
            setattr(self, name, value)

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    # --- connections ---

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen.connections += 1
        self.seen.open_connections += 1
        connection = Connection(self.seen.connections, reader, writer)
        pump = None
        try:
            if self.script and self.script[0]["at"] == "accept":
                await self.play(connection, None, self.script.pop(0)["steps"])
            pump = asyncio.ensure_future(connection.pump())
            await self.requests(connection)
        except (Gone, TimeoutError):
            pass
        finally:
            self.seen.open_connections -= 1
            if pump:
                pump.cancel()
            connection.close()

    async def requests(self, connection: Connection) -> None:
        count = 0
        while self.max_requests is None or count < self.max_requests:
            async with asyncio.timeout(self.idle_close):
                await connection.need(1)
            if self.script and isinstance(self.script[0]["at"], int):
                entry = self.script.pop(0)
                await connection.need(entry["at"])
                await self.play(connection, None, entry["steps"])
            try:
                request = common.parse_head(await connection.take_line(b"\r\n\r\n"))
            except ValueError as error:
                await connection.send(plain_response(400, b"Bad Request"))
                raise Gone from error
            if self.script and self.script[0]["at"] == "head":
                self.note(connection, request)
                await self.play(connection, request, self.script.pop(0)["steps"])
                raise Gone
            request.body = await self.body(connection, request)
            self.note(connection, request)
            await self.play(connection, request, self.next_steps(request))
            count += 1

    async def body(self, connection: Connection, request: Incoming) -> bytes:
        if request.get("transfer-encoding").lower() != "chunked":
            return await connection.take(int(request.get("content-length", "0")))
        body = bytearray()
        while size := int((await connection.take_line()).split(b";")[0], 16):
            body += await connection.take(size)
            await connection.take(2)
        while await connection.take_line() != b"\r\n":
            pass
        return bytes(body)

    def note(self, connection: Connection, request: Incoming) -> None:
        self.seen.request(
            connection=connection.number,
            method=request.method,
            path=request.target,
            headers=request.headers,
            rpc=operation(request),
            body=request.body[: common.BODY_SHOWN].decode("utf-8", "replace"),
            body_size=len(request.body),
        )

    def next_steps(self, request: Incoming) -> list[Any]:
        rpc = operation(request)
        for at, entry in enumerate(self.script):
            if entry["at"] == "request" and entry.get("rpc", rpc) == rpc:
                steps: list[Any] = self.script.pop(at)["steps"]
                return steps
        return ["default"]

    # --- steps ---

    async def play(
        self, connection: Connection, request: Incoming | None, steps: list[Any]
    ) -> None:
        for step in steps:
            await self.step(connection, request, {step: {}} if isinstance(step, str) else step)

    async def step(
        self, connection: Connection, request: Incoming | None, step: dict[str, Any]
    ) -> None:
        match step:
            case {"execute": _}:
                self.mini.execute_json(send_request(request))
            case {"default": how}:
                assert request is not None, "default needs a request that was read"
                await self.default(connection, request, how)
            case {"close": _}:
                connection.close()
                raise Gone
            case {"reset": _}:
                connection.reset()
                raise Gone
            case {"half_close": _}:
                connection.half_close()
            case {"hang": _}:
                await connection.left.wait()
                raise Gone
            case {"delay": seconds}:
                await connection.until_left(asyncio.sleep(seconds))
            case {"gate": name}:
                await connection.until_left(self.gate(name).wait())
            case {"send": what}:
                await connection.send(raw(what))
            case {"interim": status}:
                head = plain_response(status, b"", step.get("headers", []))
                await connection.send(head.replace(b"content-length: 0\r\n", b""))
            case {"redirect": status, "location": url}:
                await connection.send(plain_response(status, b"", [("location", url)]))
            case {"reply": reply}:
                await self.reply(connection, reply)
            case {"sse": items}:
                await self.sse(connection, items, end=step.get("end", True))
            case _:
                raise ValueError(f"unknown step {step}")

    async def reply(self, connection: Connection, reply: dict[str, Any]) -> None:
        body = reply.get("body", "")
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        if "base64" in reply:
            data = base64.b64decode(reply["base64"])
        headers = [(name, value) for name, value in reply.get("headers", JSON)]
        response = plain_response(reply.get("status", 200), data, headers)
        head, _, _ = response.partition(b"\r\n\r\n")
        length = f"content-length: {len(data)}".encode()
        if reply.get("chunked"):
            head = head.replace(length, b"transfer-encoding: chunked")
            data = chunk(data) + b"0\r\n\r\n"
        elif "length" in reply:
            head = head.replace(length, f"content-length: {reply['length']}".encode())
        data = data[: reply.get("cut", len(data))]
        if pause := reply.get("pause"):
            half = len(data) // 2
            await connection.send(head + b"\r\n\r\n" + data[:half])
            await connection.until_left(asyncio.sleep(pause))
            await connection.send(data[half:])
        else:
            await connection.send(head + b"\r\n\r\n" + data)

    async def sse(self, connection: Connection, items: list[Any], *, end: bool) -> None:
        self.seen.open_streams += 1
        try:
            await connection.send(SSE_HEAD)
            for item in items:
                if isinstance(item, str):
                    await connection.send(chunk(item.encode()))
                elif "data" in item:
                    text = f"data: {json.dumps(item['data'])}\r\n\r\n"
                    await connection.send(chunk(text.encode()))
                else:
                    await self.step(connection, None, item)
                if connection.left.is_set():
                    raise Gone
            if end:
                await connection.send(b"0\r\n\r\n")
        finally:
            self.seen.open_streams -= 1

    async def default(self, connection: Connection, request: Incoming, how: dict[str, Any]) -> None:
        only, events = how.get("bytes"), how.get("events")
        answer = self.answer(request)
        if isinstance(answer, list):
            items = [{"data": event} for event in answer[:events]]
            if only is None:
                await self.sse(connection, items, end=events is None)
                return
            text = [chunk(f"data: {json.dumps(i['data'])}\r\n\r\n".encode()) for i in items]
            answer = SSE_HEAD + b"".join(text) + b"0\r\n\r\n"
        await connection.send(answer[:only] + raw(how.get("surplus", "")))

    # --- the correct agent ---

    def answer(self, request: Incoming) -> bytes | list[Any]:
        """The complete response, or the events of a stream."""
        if request.path == "/.well-known/agent-card.json" and request.method == "GET":
            return plain_response(200, json.dumps(self.card).encode(), JSON)
        rpc = operation(request)
        if request.path in ("/", "/rpc") and request.method == "POST":
            return self.answer_rpc(request.json() or {}, rpc)
        if not rpc:
            return plain_response(404, b"Not Found", [("content-type", "text/plain")])
        params = request.json() or {"id": request.path.rpartition("/")[2]}
        results, code = self.mini.json_call(rpc, params)
        if rpc in mini.STREAMING:
            return results
        if code:
            body = mini.rest_error(404, "NOT_FOUND", "Task not found", mini.NOT_FOUND)
            return plain_response(404, body, JSON)
        return plain_response(200, json.dumps(results[0]).encode(), JSON)

    def answer_rpc(self, body: dict[str, Any], rpc: str) -> bytes | list[Any]:
        results, code = self.mini.json_call(rpc, body.get("params"))
        if code:
            return plain_response(200, mini.rpc_error(body.get("id"), code), JSON)
        if rpc in mini.STREAMING:
            return [{"jsonrpc": "2.0", "id": body.get("id"), "result": r} for r in results]
        return plain_response(200, mini.rpc_result(body.get("id"), results[0]), JSON)


def operation(request: Incoming) -> str:
    """The A2A operation that a request asks for; '' when it is none of those known here."""
    last = request.path.rpartition("/")[2]
    if request.path in ("/", "/rpc"):
        body = request.json()
        return str(body.get("method", "")) if isinstance(body, dict) else ""
    match request.method, last:
        case "POST", "message:send":
            return "SendMessage"
        case "POST", "message:stream":
            return "SendStreamingMessage"
        case "GET", "tasks":
            return "ListTasks"
        case "GET", _ if request.path.rpartition("/")[0].endswith("/tasks"):
            return "GetTask"
        case _:
            return ""


def send_request(request: Incoming | None) -> Any:
    """The SendMessageRequest in a request of either binding; None when it was not read."""
    body = request.json() if request else None
    if isinstance(body, dict) and "jsonrpc" in body:
        return body.get("params")
    return body


def raw(what: Any) -> bytes:
    """The bytes of a ``send`` step."""
    return what.encode("latin-1") if isinstance(what, str) else base64.b64decode(what["base64"])


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; nothing for no data, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def default_card(base: str) -> dict[str, Any]:
    """A card with both bindings of this peer."""
    version = {"protocolVersion": "1.0"}
    return {
        "name": "raw agent",
        "description": "",
        "version": "1",
        "capabilities": {"streaming": True},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": [],
        "supportedInterfaces": [
            {"url": f"{base}/rpc", "protocolBinding": "JSONRPC", **version},
            {"url": base, "protocolBinding": "HTTP+JSON", **version},
        ],
    }


async def main(args: Any) -> None:
    """Serve."""
    agent = Agent(idle_close=args.idle_close, max_requests=args.max_requests)
    sock = common.listen(args.port)
    port = common.port_of(sock)
    tls = common.server_tls(args, "http/1.1")
    base = f"{'https' if tls else 'http'}://{HOST}:{port}"
    agent.card = default_card(base)
    control = common.Control(agent.state)
    control.on("script", agent.add_script)
    control.on("clear", agent.clear)
    control.on("open", agent.open_gate)
    control.on("config", agent.configure)
    await asyncio.start_server(agent.serve, sock=sock, ssl=tls)
    control_port = await control.start(args.control_port)
    common.announce(
        control_port,
        {"http": port},
        urls={"JSONRPC": f"{base}/rpc", "HTTP+JSON": base},
        card=f"{base}/.well-known/agent-card.json",
    )


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--idle-close", type=float, help="close after that many idle seconds")
    options.add_argument("--max-requests", type=int, help="close after that many requests")
    common.run(main, options.parse_args())
