"""Accepted connections: told apart by their first bytes, and their requests handed to the door."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from sidecar.core import errors
from sidecar.core.types import Break
from sidecar.doors.grpc import GrpcDoor
from sidecar.doors.http import HttpDoor
from sidecar.listener import is_http2
from sidecar.wire.http1_request import error_head
from sidecar.wire.http1_server import Connections, Http1Limits, serve_http1
from sidecar.wire.http2_server import Http2Limits, Http2ServerConnection
from sidecar.wire.sockets import SocketWire, WireBroken, is_reserved
from sidecar.wire.tls import accept_tls, is_tls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from sidecar.breaker import Breaker
    from sidecar.config import Limits
    from sidecar.core.types import Headers
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry
    from sidecar.wire.http1_server import Http1Request
    from sidecar.wire.sockets import Wire

# A client that connects and says nothing is as idle as one between two requests.
_SILENT_SECONDS = 300.0
# In a drain it may stay so long: its request can be on the way.
_CLOSING_SECONDS = 1.0
# After its calls were broken off, a connection has this long to tell its client so.
_LAST_WORDS_SECONDS = 2.0
_HANDSHAKE_SECONDS = 10.0
# The kernel gives up a client that takes nothing after us: it would not say that this was why.
_KERNEL_LATER_SECONDS = 5.0
_LIMITS_OF_HTTP = {408: "slow_request", 431: "header_bytes"}
_UCRED = struct.Struct("iII")  # unix(7): pid, uid, gid
_SO_PEERGROUPS = 59  # of Linux; the socket module does not name it
_GROUPS_BYTES = 1024


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
        return uid in self.uids or not self.gids.isdisjoint({gid, *_further_groups(sock)})


def _further_groups(sock: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the process at the other end; none when there are too many to tell."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


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
        self.threshold = threshold
        """Of connections that come from now on; may be replaced at any time."""
        self.max_streams = max_streams
        """The same, for the streams of an HTTP/2 connection."""
        self._door = door
        self._stall_seconds = limits.stall_seconds
        self._most = max_connections
        self._telemetry = telemetry
        self._log = log
        self._http1_limits = Http1Limits(
            header_bytes=limits.header_bytes, stall_seconds=limits.stall_seconds
        )
        self._header_bytes = limits.header_bytes
        self._http1 = Connections()
        self._http2: set[Http2ServerConnection] = set()
        self._silent: dict[trio.CancelScope, None] = {}
        """Of connections that have not said anything yet, the longest silent one first."""
        self._open = 0
        self._nursery: trio.Nursery
        self._retired = trio.Event()
        self._last_gone = trio.Event()
        self._patience = trio.CancelScope()
        """Its deadline is the end of the drain."""
        self.ended = trio.Event()
        """It was retired, and its last connection has ended."""

    @property
    def connections(self) -> int:
        """Connections that have not ended."""
        return self._open

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve connections until it is retired and the last one has ended."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await self._retired.wait()
            self._http1.begin_closing()
            self._close_silent(_CLOSING_SECONDS)
            for connection in self._http2:
                connection.drain()
            self._nursery.start_soon(self._end_drain, self._nursery.cancel_scope)
            if self._open:
                await self._last_gone.wait()
            self._nursery.cancel_scope.cancel()
        self.ended.set()

    async def _end_drain(self, scope: trio.CancelScope) -> None:
        with self._patience:
            await trio.sleep_forever()
        scope.deadline = trio.current_time() + _LAST_WORDS_SECONDS
        self._door.breaker.trip()

    def retire(self, drain_seconds: float) -> None:
        """Take nothing new; what is under way has `drain_seconds`, then it is told to end.

        Said again, the earlier end counts.
        """
        self._patience.deadline = min(self._patience.deadline, trio.current_time() + drain_seconds)
        self._retired.set()

    def hurry(self) -> None:
        """After `retire`: tell what is under way to end now, and close what is idle."""
        self._patience.deadline = trio.current_time()
        self._close_silent(0)
        while self._http1.close_longest_idle():
            pass

    def _close_silent(self, seconds: float) -> None:
        end = trio.current_time() + seconds
        for silent in self._silent:
            silent.deadline = min(silent.deadline, end)

    def receive(self, sock: socket.socket) -> None:
        """Serve an accepted connection. At the limit the longest idle one makes room."""
        limit = ""
        if self._open >= self._most:
            limit = "connections"
        elif isinstance(self._door, HttpDoor) and is_reserved(sock.fileno()):
            limit = "descriptors"
        if limit and not self._close_longest_idle():
            self._turn_away(sock, limit)
            return
        self._open += 1
        self._nursery.start_soon(self._connection, sock)

    def _close_longest_idle(self) -> bool:
        """Make room for a new connection; False when every one is in use."""
        for silent in self._silent:
            del self._silent[silent]
            silent.cancel()
            return True
        if self._http1.close_longest_idle():
            return True
        idle = [one for one in self._http2 if one.idle]
        if idle:
            min(idle, key=lambda one: one.idle_since).leave()
        return bool(idle)

    def _turn_away(self, sock: socket.socket, limit: str) -> None:
        """Close a connection that is not served, if possible with a word on why."""
        self._telemetry.limit(limit)
        self._warn(f"the limit of {limit} is reached")
        door = self._door
        with contextlib.suppress(OSError), sock:
            if isinstance(door, HttpDoor) and door.takes_http1_calls and self.threshold.tls is None:
                message = f"the sidecar's limit of {limit} is reached"
                status, headers, body = door.refusal(errors.own("LIMIT_REACHED", message))
                sock.setblocking(False)
                sock.send(error_head(status, headers, body) + body)
                sock.shutdown(socket.SHUT_WR)

    async def _connection(self, sock: socket.socket) -> None:
        wire: SocketWire | None = None
        try:
            if not self.threshold.lets_in(sock):
                self._warn("the caller's user is not one of allow_uids and allow_gids")
                return
            stall_seconds = self._stall_seconds + _KERNEL_LATER_SECONDS
            wire = SocketWire(sock, stall_seconds=stall_seconds, peer="local")
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
        if self.threshold.tls is None:
            return wire
        with self._patient(_HANDSHAKE_SECONDS):
            return await accept_tls(wire, self.threshold.tls)
        raise WireBroken(Break.TIMEOUT, detail="TLS handshake")

    @contextlib.contextmanager
    def _patient(self, seconds: float) -> Iterator[None]:
        """Cancel what is done inside after `seconds`, or soon when the listener is retired."""
        if self._retired.is_set():
            seconds = min(seconds, _CLOSING_SECONDS)
        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            self._silent[scope] = None
            try:
                yield
            finally:
                self._silent.pop(scope, None)

    async def _serve(self, wire: Wire) -> None:
        first = b""
        with self._patient(_SILENT_SECONDS):
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
                render=self._render,
                on_bug=self._bug,
            )

    async def _serve_http2(self, wire: Wire, first: bytes, door: GrpcDoor) -> None:
        limits = Http2Limits(
            max_streams=self.max_streams,
            header_bytes=self._header_bytes,
            stall_seconds=self._stall_seconds,
        )
        connection = Http2ServerConnection(
            wire,
            door.serve_stream,
            limits=limits,
            on_bug=lambda error: self._bug("http2", error),
        )
        if self._retired.is_set():
            connection.drain()
        self._http2.add(connection)
        try:
            await connection.serve(first)
        finally:
            self._http2.discard(connection)

    def _render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """What HTTP/1.1 itself refuses, in the form of the binding."""
        if status in _LIMITS_OF_HTTP:
            self._telemetry.limit(_LIMITS_OF_HTTP[status])
        return self._door.render(status, message)

    def _warn(self, what: str) -> None:
        self._log.limited(what, "warning", "connection closed", reason=what)

    def _bug(self, where: str, error: BaseException) -> None:
        self._telemetry.internal_error(where)
        self._log.error("internal error", where=where, error=repr(error))
