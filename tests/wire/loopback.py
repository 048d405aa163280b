"""Servers on loopback for tests: raw bytes, TLS, scripted HTTP/1.1."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    import trustme

Handler = Callable[[trio.abc.Stream], Awaitable[None]]


async def serve(
    nursery: trio.Nursery,
    handler: Handler,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Serve until the nursery ends; returns the port. A peer that leaves ends only its handler."""
    (listener,) = await trio.open_tcp_listeners(port, host=host)

    async def handle(stream: trio.SocketStream) -> None:
        wrapped: trio.abc.Stream = stream
        if tls is not None:
            wrapped = trio.SSLStream(stream, tls, server_side=True)
        try:
            await handler(wrapped)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await trio.aclose_forcefully(wrapped)

    nursery.start_soon(trio.serve_listeners, handle, [listener])
    return int(listener.socket.getsockname()[1])


def reset(stream: trio.abc.Stream) -> None:
    """Close with RST."""
    while isinstance(stream, trio.SSLStream):
        stream = stream.transport_stream
    assert isinstance(stream, trio.SocketStream)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that a peer brings about and that has no event."""
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)


def closed_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def server_context(cert: trustme.LeafCert, *alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    cert.configure_cert(context)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


@dataclass
class Asked:
    """One request as a stub saw it."""

    method: str
    target: str
    headers: dict[str, str]
    raw: bytes


@dataclass
class HttpStub:
    """Answers by target with raw bytes; anything else is 404. Closes after each answer."""

    answers: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    async def __call__(self, stream: trio.abc.Stream) -> None:
        received = bytearray()
        while b"\r\n\r\n" not in received:
            data = await stream.receive_some(65536)
            if not data:
                return
            received += data
        lines = bytes(received).partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        asked = Asked(method, target, headers, bytes(received))
        self.asked.append(asked)
        await stream.send_all(self.answer(asked))

    def answer(self, asked: Asked) -> bytes:
        return self.answers.get(asked.target) or reply(404, b"no", content_type="text/plain")


def reply(
    status: int = 200,
    body: bytes = b"",
    *,
    content_type: str = "application/json",
    length: int | None = None,
    **headers: str,
) -> bytes:
    """A complete HTTP/1.1 reply; underscores in header names become hyphens."""
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-length: {len(body) if length is None else length}",
        *([f"content-type: {content_type}"] if content_type else []),
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
