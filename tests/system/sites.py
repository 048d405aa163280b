"""HTTP servers and a CONNECT proxy in threads of the test process, which note all that comes."""

from __future__ import annotations

import json
import select
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    certificate: Any = None
    """What the client showed over TLS."""

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def json_answer(body: Any, status: int = 200, **headers: str) -> Answer:
    """An answer with a JSON body; underscores in header names become hyphens."""
    made = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, {"content-type": "application/json", **made}, json.dumps(body).encode()


def result_of(asked: Asked) -> Answer:
    """The answer of a correct agent to SendMessage over JSON-RPC."""
    reply = {"messageId": "r-1", "role": "ROLE_AGENT", "parts": [{"text": "ok"}]}
    id_ = asked.json()["id"]
    return json_answer({"jsonrpc": "2.0", "id": id_, "result": {"message": reply}})


@dataclass
class Site:
    """One server; `routes` by path, anything else is 404."""

    port: int
    host: str
    scheme: str
    routes: dict[str, Callable[[Asked], Answer]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        """``http://HOST:PORT``."""
        return f"{self.scheme}://{self.host}:{self.port}"

    def at(self, path: str) -> list[Asked]:
        """The requests for one path."""
        return [one for one in self.asked if one.path == path]

    def answer(self, asked: Asked) -> Answer:
        """What it says."""
        self.asked.append(asked)
        route = self.routes.get(asked.path)
        return route(asked) if route else (404, {}, b"nothing here")


@contextmanager
def site(host: str = "127.0.0.1", *, tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Run a server."""
    result = Site(0, host, "https" if tls else "http")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            result.connections += 1
            if tls is not None:
                self.request.settimeout(5)
                plain = self.request
                self.request = tls.wrap_socket(
                    plain, server_side=True, do_handshake_on_connect=False
                )
                try:
                    self.request.do_handshake()
                except OSError:
                    self.request.close()
                    raise
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.close()

        def serve(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            asked = Asked(
                method=self.command,
                path=self.path,
                headers={name.lower(): value for name, value in self.headers.items()},
                body=self.rfile.read(length),
                certificate=self.request.getpeercert() if tls is not None else None,
            )
            status, headers, body = result.answer(asked)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_CONNECT = serve

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # handshakes that fail, clients that leave

    with Server((host, 0), Handler) as server:
        result.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield result
        finally:
            server.shutdown()
            thread.join()


@dataclass
class Proxy:
    """A proxy for CONNECT."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    """Heads as they came."""
    refuses: bool = False


@contextmanager
def connect_proxy() -> Iterator[Proxy]:
    """Run one."""
    result = Proxy()

    class Handler(BaseRequestHandler):
        request: socket.socket

        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                data = self.request.recv(4096)
                if not data:
                    return
                head += data
            result.asked.append(head.decode())
            target = head.split(b" ", 2)[1].decode()
            if result.refuses:
                self.request.sendall(b"HTTP/1.1 403 No\r\n\r\n")
                return
            host, _, port = target.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port))) as other:
                self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                self._pipe(other)

        def _pipe(self, other: socket.socket) -> None:
            while True:
                readable, _, _ = select.select([self.request, other], [], [])
                for one in readable:
                    data = one.recv(65536)
                    if not data:
                        return
                    (other if one is self.request else self.request).sendall(data)

    class Server(ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        result.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield result
        finally:
            server.shutdown()
            thread.join()
