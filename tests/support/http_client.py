"""A small HTTP/1.1 client for tests: h11 on trio sockets, one request per connection.

Independent of the program under test, and with nothing hidden: no retries, no redirects.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11
import trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

MAX_HEAD = 1024 * 1024


class Incomplete(Exception):
    """The connection ended before the response did."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete response; header names in lower case."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""

    def get(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)

    def header_dict(self) -> dict[str, str]:
        """The headers as a dict; the last of equal names wins."""
        return dict(self.headers)

    def json(self) -> Any:
        """The body as JSON; raises ValueError with its text."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise ValueError(f"{self.status} {self.headers} {self.body[:2000]!r}") from None


@dataclass(frozen=True, kw_only=True)
class SseEvent:
    """One server-sent event, and when it arrived (trio's clock)."""

    event: str
    data: str
    at: float

    def json(self) -> Any:
        """The data as JSON."""
        return json.loads(self.data)


async def connect(address: int | str, tls: ssl.SSLContext | None = None) -> trio.abc.Stream:
    """Connect to a port of 127.0.0.1, ``HOST:PORT`` or ``unix:PATH``."""
    if isinstance(address, str) and address.startswith("unix:"):
        return await trio.open_unix_socket(address[5:])
    host, _, port = str(address).rpartition(":")
    stream = await trio.open_tcp_stream(host or "127.0.0.1", int(port))
    if tls is None:
        return stream
    return trio.SSLStream(stream, tls, server_hostname=host or "127.0.0.1", https_compatible=True)


class _Exchange:
    """One request on one connection."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

    async def send(
        self, host: str, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Send the whole request."""
        fields = {"host": host, "connection": "close", "content-length": str(len(body))}
        request = h11.Request(
            method=method, target=path, headers=list({**fields, **headers}.items())
        )
        events = [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]
        await self.stream.send_all(b"".join(self.h11.send(e) or b"" for e in events))

    async def event(self) -> Any:
        """The next event of the response."""
        while (event := self.h11.next_event()) is h11.NEED_DATA:
            try:
                self.h11.receive_data(bytes(await self.stream.receive_some(65536)))
            except h11.RemoteProtocolError as error:
                raise Incomplete(str(error)) from error
        return event

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """The final response's head."""
        try:
            event = await self.event()
            while isinstance(event, h11.InformationalResponse):
                event = await self.event()
        except h11.RemoteProtocolError as error:
            raise Incomplete(str(error)) from error
        if not isinstance(event, h11.Response):
            raise Incomplete(repr(event))
        headers = [(n.decode(), v.decode("latin-1")) for n, v in event.headers]
        return event.status_code, headers

    async def data(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        try:
            event = await self.event()
        except h11.RemoteProtocolError as error:
            raise Incomplete(str(error)) from error
        return bytes(event.data) if isinstance(event, h11.Data) else None


@asynccontextmanager
async def _exchange(
    address: int | str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[_Exchange]:
    stream = await connect(address, tls)
    try:
        exchange = _Exchange(stream)
        host = f"127.0.0.1:{address}" if isinstance(address, int) else address
        await exchange.send(
            "localhost" if host.startswith("unix:") else host, method, path, headers, body
        )
        yield exchange
    finally:
        await trio.aclose_forcefully(stream)


async def http(
    address: int | str,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    tls: ssl.SSLContext | None = None,
    seconds: float = 10,
) -> Response:
    """One request and its complete response; raises `Incomplete`, or trio.TooSlowError."""
    with trio.fail_after(seconds):
        async with _exchange(address, method, path, headers or {}, body, tls) as exchange:
            status, fields = await exchange.head()
            pieces = []
            while (piece := await exchange.data()) is not None:
                pieces.append(piece)
            return Response(status=status, headers=fields, body=b"".join(pieces))


@dataclass
class EventStream:
    """An event-stream response, iterated event by event.

    Raises `Incomplete` when the connection breaks before the body ends. For any other content
    type `body` has the whole answer and there are no events.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    comments: list[float] = field(default_factory=list)
    """When comments (keep-alives) arrived."""
    _exchange: _Exchange | None = None
    _rest: bytearray = field(default_factory=bytearray)
    _looked: int = 0
    _name: str = ""
    _lines: list[str] = field(default_factory=list)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> SseEvent:
        while True:
            at = self._rest.find(b"\n", self._looked)
            if at >= 0:
                line = bytes(self._rest[:at]).removesuffix(b"\r")
                del self._rest[: at + 1]
                self._looked = 0
                if (event := self._line(line.decode())) is not None:
                    return event
                continue
            self._looked = len(self._rest)
            piece = await self._exchange.data() if self._exchange else None
            if piece is None:
                raise StopAsyncIteration
            self._rest += piece

    def _line(self, line: str) -> SseEvent | None:
        now = trio.current_time()
        if line.startswith(":"):
            self.comments.append(now)
        elif line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._name = value
            elif name == "data":
                self._lines.append(value)
        elif self._lines:
            event = SseEvent(event=self._name or "message", data="\n".join(self._lines), at=now)
            self._name, self._lines = "", []
            return event
        return None

    async def next(self, seconds: float = 5) -> SseEvent:
        """The next event, which must come within `seconds`."""
        with trio.fail_after(seconds):
            return await self.__anext__()


@asynccontextmanager
async def open_stream(
    address: int | str,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    tls: ssl.SSLContext | None = None,
    seconds: float = 10,
) -> AsyncIterator[EventStream]:
    """Open an event stream (the head within `seconds`); leaving closes the connection."""
    async with _exchange(address, method, path, headers or {}, body, tls) as exchange:
        with trio.fail_after(seconds):
            status, fields = await exchange.head()
        result = EventStream(status, dict(fields))
        if result.headers.get("content-type", "").startswith("text/event-stream"):
            result._exchange = exchange
        else:
            pieces = []
            with trio.fail_after(seconds):
                while (piece := await exchange.data()) is not None:
                    pieces.append(piece)
            result.body = b"".join(pieces)
        yield result
