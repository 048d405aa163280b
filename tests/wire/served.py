"""The HTTP/1.1 server over memory, with a client that reads as h11 does."""

from __future__ import annotations

import h11
import trio

from sidecar.wire.http1_server import Connections, Http1Limits, Http1Request, serve_http1
from tests.wire.memory import MemoryWire, memory_wire_pair

LIMITS = Http1Limits(header_bytes=4096)
GET = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"


class Served:
    """One connection to a server over memory: `client` is the other end."""

    def __init__(self, nursery: trio.Nursery, *, limits: Http1Limits = LIMITS, **options) -> None:
        self.client: MemoryWire
        self.ours, self.client = memory_wire_pair(capacity=options.pop("capacity", None))
        self.bugs: list[tuple[str, BaseException]] = []
        self.requests: list[Http1Request] = []
        self.connections = Connections()
        self.handler = options.pop("handler", self.echo)
        self.ended = trio.Event()
        self.buffer = b""
        options.setdefault("connections", self.connections)
        nursery.start_soon(self._serve, limits, options)

    async def _serve(self, limits: Http1Limits, options: dict) -> None:
        await serve_http1(
            self.ours,
            self._handle,
            limits=limits,
            on_bug=lambda where, error: self.bugs.append((where, error)),
            **options,
        )
        self.ended.set()

    async def _handle(self, request: Http1Request) -> None:
        self.requests.append(request)
        await self.handler(request)

    @staticmethod
    async def echo(request: Http1Request) -> None:
        body = await request.body(100_000)
        headers = [("x-target", request.target), ("x-method", request.method)]
        await request.respond(200, headers, body)

    async def send(self, data: bytes) -> None:
        await self.client.send(data)

    async def answer(self, method: bytes = b"GET") -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body, as h11 reads it."""
        peer = h11.Connection(h11.CLIENT)
        peer.send(h11.Request(method=method, target="/", headers=[("host", "h")]))
        peer.send(h11.EndOfMessage())
        if self.buffer:
            peer.receive_data(self.buffer)
        status, headers, body = 0, {}, b""
        while True:
            event = peer.next_event()
            if event is h11.NEED_DATA:
                peer.receive_data(await self.client.receive())
            elif isinstance(event, h11.InformationalResponse):
                continue
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                assert isinstance(event, h11.EndOfMessage)
                self.buffer, _ = peer.trailing_data
                return status, headers, body

    async def closed(self) -> bytes:
        """What still comes until the server closes."""
        data, self.buffer = self.buffer, b""
        while chunk := await self.client.receive():
            data += chunk
        return data


def post(body: bytes, extra: bytes = b"") -> bytes:
    return (
        b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n" % (len(body), extra) + body
    )


class Slow:
    """A handler that works for a while and notes what it learns of the client."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.half_closed: float | None = None
        self.gone: float | None = None

    async def __call__(self, request: Http1Request) -> None:
        request.half_closed.then(self.on_half_closed)
        request.gone.then(self.on_gone)
        await trio.sleep(self.seconds)
        await request.respond(200, [], b"done")

    def on_half_closed(self) -> None:
        self.half_closed = trio.current_time()

    def on_gone(self) -> None:
        self.gone = trio.current_time()
