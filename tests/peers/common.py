"""What every peer shares: command line, control address, ready line, HTTP/1.1 parsing.

A peer is a script: it prints one JSON line on stdout when it accepts connections, is scripted
and asked over its control address, and ends on SIGTERM or when the process that started it goes
away (``--watch-stdin``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import ssl
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

HOST = "127.0.0.1"
BODY_SHOWN = 64 * 1024

Headers: TypeAlias = list[tuple[str, str]]
ControlHandler: TypeAlias = Callable[[Any], Any] | Callable[[Any], Awaitable[Any]]


# --- command line and process -----------------------------------------------------------------


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every peer takes."""
    result = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    result.add_argument("--control-port", type=int, default=0)
    result.add_argument("--watch-stdin", action="store_true", help="end when stdin ends")
    result.add_argument("--tls-cert", help="PEM chain; TLS is spoken when given")
    result.add_argument("--tls-key")
    result.add_argument("--tls-ca", help="PEM; clients must then show a certificate")
    return result


def server_tls(args: argparse.Namespace, *alpn: str) -> ssl.SSLContext | None:
    """The TLS context of the options, or None for plaintext."""
    if not args.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(args.tls_cert, args.tls_key)
    if args.tls_ca:
        context.load_verify_locations(args.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def listen(port: int, host: str = HOST) -> socket.socket:
    """A bound loopback socket; port 0 takes a free one, a given one may be in TIME_WAIT."""
    # asyncio switches Nagle's algorithm off only where the protocol is named
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    sock.listen(256)
    sock.setblocking(False)
    return sock


def port_of(sock: socket.socket) -> int:
    """The port that a listening socket got."""
    return int(sock.getsockname()[1])


def announce(control: int, ports: dict[str, int], **more: Any) -> None:
    """Print the ready line."""
    line = {"pid": os.getpid(), "control": control, "ports": ports, **more}
    print(json.dumps(line), flush=True)


def run(main: Callable[[argparse.Namespace], Awaitable[None]], args: argparse.Namespace) -> None:
    """Run `main` until SIGTERM; ends at once, so that a test never waits for open streams."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, os._exit, 0)
        if args.watch_stdin:
            threading.Thread(target=_exit_with_stdin, daemon=True).start()
        await main(args)
        await asyncio.Event().wait()

    asyncio.run(body())


def _exit_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


# --- what was seen ----------------------------------------------------------------------------


@dataclass
class Seen:
    """The common part of the answer to ``GET /control/state``."""

    connections: int = 0
    open_connections: int = 0
    open_streams: int = 0
    requests: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=200))

    def request(self, **entry: Any) -> dict[str, Any]:
        """Note one request; the returned entry may be completed later."""
        self.requests.append(entry)
        return entry

    def as_json(self) -> dict[str, Any]:
        """The part as JSON."""
        return {
            "connections": self.connections,
            "open_connections": self.open_connections,
            "open_streams": self.open_streams,
            "requests": list(self.requests),
        }


# --- HTTP/1.1 ---------------------------------------------------------------------------------


@dataclass
class Incoming:
    """One request as it was read; header names in lower case."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""

    def get(self, name: str, default: str = "") -> str:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), default)

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def json(self) -> Any:
        """The body as JSON, or None when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def parse_head(head: bytes) -> Incoming:
    """Parse a request head that ends in an empty line."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _version = first.split(" ", 2)
    headers = []
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            headers.append((name.strip().lower(), value.strip()))
    return Incoming(method, target, headers)


def plain_response(status: int, body: bytes, headers: Headers | None = None) -> bytes:
    """A complete HTTP/1.1 response."""
    lines = [f"HTTP/1.1 {status} {_reason(status)}"]
    lines += [f"{name}: {value}" for name, value in headers or []]
    if status != 304:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _reason(status: int) -> str:
    return {200: "OK", 307: "Temporary Redirect", 404: "Not Found"}.get(status, "Status")


class Control:
    """The control address: JSON in, JSON out, one request per connection."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self._handlers: dict[tuple[str, str], ControlHandler] = {
            ("GET", "/control/state"): lambda _: state()
        }

    def on(self, path: str, handler: ControlHandler) -> None:
        """Answer ``POST /control/<path>`` with `handler`(parsed body)."""
        self._handlers["POST", f"/control/{path}"] = handler

    async def start(self, port: int = 0) -> int:
        """Start listening; returns the port."""
        sock = listen(port)
        await asyncio.start_server(self._serve, sock=sock)
        return port_of(sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = parse_head(await reader.readuntil(b"\r\n\r\n"))
            request.body = await reader.readexactly(int(request.get("content-length", "0")))
            status, answer = await self._answer(request)
            body = json.dumps(answer).encode()
            headers = [("content-type", "application/json"), ("connection", "close")]
            writer.write(plain_response(status, body, headers))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, request: Incoming) -> tuple[int, Any]:
        handler = self._handlers.get((request.method, request.path))
        if handler is None:
            return 404, {"error": f"no {request.method} {request.path} here"}
        try:
            result = handler(json.loads(request.body or b"null"))
            if asyncio.iscoroutine(result):
                result = await result
        except Exception as error:  # the test must see its own mistake
            return 400, {"error": f"{type(error).__name__}: {error}"}
        return 200, result
