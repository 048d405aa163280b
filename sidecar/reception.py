"""Accepted connections: told apart by their first bytes, and their requests handed to the door."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from sidecar.core.types import Break
from sidecar.doors.grpc import GrpcDoor
from sidecar.listener import is_http2, is_tls
from sidecar.wire.http1_server import Connections, Http1Limits, serve_http1
from sidecar.wire.http2_server import Http2Limits, Http2ServerConnection
from sidecar.wire.sockets import SocketWire, WireBroken
from sidecar.wire.tls import accept_tls

if TYPE_CHECKING:
    import ssl

    from sidecar.breaker import Breaker
    from sidecar.config import Limits
    from sidecar.core.types import Headers
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry
    from sidecar.wire.http1_server import Http1Request
    from sidecar.wire.sockets import Wire

# A client that connects and says nothing is as idle as one between two requests.
_SILENT_SECONDS = 300.0
# After its calls were broken off, a connection has this long to tell its client so.
_LAST_WORDS_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
_UCRED = struct.Struct("3i")  # unix(7): pid, uid, gid


class Door(Protocol):
    """What answers requests."""

    breaker: Breaker

    async def serve(self, request: Http1Request) -> None:
        """Answer one HTTP/1.1 request."""
        ...

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Headers and body of what HTTP/1.1 itself refuses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Who may connect at all, and how."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    """Users and groups at the other end of a Unix socket; both empty: everyone."""
    tls: ssl.SSLContext | None = None

    def lets_in(self, sock: socket.socket) -> bool:
        """Whether the process at the other end may connect."""
        if not self.uids and not self.gids:
            return True
        if sock.family != socket.AF_UNIX:
            return False
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, gid = _UCRED.unpack(credentials)
        return uid in self.uids or gid in self.gids


class Reception:
    """The connections that one listener accepts under one configuration."""

    def __init__(
        self,
        door: Door,
        *,
        limits: Limits,
        threshold: Threshold,
        max_connections: int,
        max_streams: int,
        telemetry: Telemetry,
        log: Log,
    ) -> None:
        self._door = door
        self._threshold = threshold
        self._stall_seconds = limits.stall_seconds
        self._most = max_connections
        self._telemetry = telemetry
        self._log = log
        self._http1_limits = Http1Limits(
            header_bytes=limits.header_bytes, stall_seconds=limits.stall_seconds
        )
        self._http2_limits = Http2Limits(
            max_streams=max_streams,
            header_bytes=limits.header_bytes,
            stall_seconds=limits.stall_seconds,
        )
        self._http1 = Connections()
        self._http2: set[Http2ServerConnection] = set()
        self._open = 0
        self._nursery: trio.Nursery
        self._retired = trio.Event()
        self._last_gone = trio.Event()
        self.ended = trio.Event()
        """It was retired, and its last connection has ended."""
        self._drain_seconds = 0.0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve connections until it is retired and the last one has ended."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await self._retired.wait()
            self._http1.begin_closing()
            for connection in self._http2:
                connection.drain()
            self._nursery.start_soon(self._end_drain, self._nursery.cancel_scope)
            if self._open:
                await self._last_gone.wait()
            self._nursery.cancel_scope.cancel()
        self.ended.set()

    async def _end_drain(self, scope: trio.CancelScope) -> None:
        await trio.sleep(self._drain_seconds)
        self._door.breaker.trip()
        scope.deadline = trio.current_time() + _LAST_WORDS_SECONDS

    def retire(self, drain_seconds: float) -> None:
        """Take nothing new; what is under way has `drain_seconds`, then it is told to end."""
        self._drain_seconds = drain_seconds
        self._retired.set()

    def receive(self, sock: socket.socket) -> None:
        """Serve an accepted connection. At the limit the longest idle one makes room."""
        if self._open >= self._most and not self._http1.close_longest_idle():
            sock.close()
            self._telemetry.limit("connections")
            self._warn(f"limits.connections ({self._most}) is reached")
            return
        self._open += 1
        self._nursery.start_soon(self._connection, sock)

    async def _connection(self, sock: socket.socket) -> None:
        wire: SocketWire | None = None
        try:
            if not self._threshold.lets_in(sock):
                self._warn("the caller's user is not one of allow_uids and allow_gids")
                return
            wire = SocketWire(sock, stall_seconds=self._stall_seconds, peer="local")
            await self._serve(await self._secured(wire))
        except (OSError, WireBroken, trio.BrokenResourceError):
            pass  # the peer is gone, which is its right
        except Exception as error:
            self._bug("connection", error)
        finally:
            self._open -= 1
            if not self._open and self._retired.is_set():
                self._last_gone.set()
            if wire is None:
                sock.close()
            else:
                wire.abort()

    async def _secured(self, wire: SocketWire) -> Wire:
        """The wire itself, or TLS on it; raises WireBroken."""
        if self._threshold.tls is None:
            return wire
        with trio.CancelScope(deadline=trio.current_time() + _HANDSHAKE_SECONDS):
            return await accept_tls(wire, self._threshold.tls)
        raise WireBroken(Break.TIMEOUT, detail="TLS handshake")

    async def _serve(self, wire: Wire) -> None:
        first = b""
        with trio.CancelScope(deadline=trio.current_time() + _SILENT_SECONDS):
            first = await wire.receive()
        if not first:
            return
        if is_tls(first):
            self._warn("a client speaks TLS, this listener does not")
        elif is_http2(first) and isinstance(self._door, GrpcDoor):
            await self._serve_http2(wire, first, self._door)
        else:
            if is_http2(first):
                # Answered in HTTP/1.1: gRPC clients report that at once, and would dial again and
                # again after a GOAWAY that says nothing was taken.
                self._warn("a client speaks HTTP/2, this listener speaks HTTP/1.1")
            await serve_http1(
                wire,
                self._door.serve,
                limits=self._http1_limits,
                initial=first,
                connections=self._http1,
                render=self._door.render,
                on_bug=self._bug,
            )

    async def _serve_http2(self, wire: Wire, first: bytes, door: GrpcDoor) -> None:
        connection = Http2ServerConnection(
            wire,
            door.serve_stream,
            limits=self._http2_limits,
            on_bug=lambda error: self._bug("http2", error),
        )
        self._http2.add(connection)
        try:
            await connection.serve(first)
        finally:
            self._http2.discard(connection)

    def _warn(self, what: str) -> None:
        self._log.limited(what, "warning", "connection closed", reason=what)

    def _bug(self, where: str, error: BaseException) -> None:
        self._telemetry.internal_error(where)
        self._log.error("internal error", where=where, error=repr(error))
