"""Accepted connections: told apart by their first bytes, and their requests handed to the door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

from sidecar.doors.grpc import GrpcDoor
from sidecar.listener import is_http2, is_tls
from sidecar.wire.http1_server import Connections, Http1Limits, serve_http1
from sidecar.wire.http2_server import HTTP2_REFUSAL, Http2Limits, Http2ServerConnection

if TYPE_CHECKING:
    from sidecar.config import Limits
    from sidecar.core.types import Headers
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry
    from sidecar.wire.http1_server import Http1Request
    from sidecar.wire.sockets import SocketWire

# A client that connects and says nothing is as idle as one between two requests.
_SILENT_SECONDS = 300.0


class Door(Protocol):
    """What answers requests."""

    async def serve(self, request: Http1Request) -> None:
        """Answer one HTTP/1.1 request."""
        ...

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Headers and body of what HTTP/1.1 itself refuses."""
        ...


class Reception:
    """The connections of one listener."""

    def __init__(
        self,
        door: Door,
        *,
        limits: Limits,
        max_streams: int,
        telemetry: Telemetry,
        log: Log,
    ) -> None:
        self._door = door
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

    async def serve(self, wire: SocketWire) -> None:
        """Serve one connection to its end."""
        first = b""
        with trio.CancelScope(deadline=trio.current_time() + _SILENT_SECONDS):
            first = await wire.receive()
        if not first:
            return
        if is_tls(first):
            self._warn("a client speaks TLS, this listener does not")
        elif not is_http2(first):
            await serve_http1(
                wire,
                self._door.serve,
                limits=self._http1_limits,
                initial=first,
                connections=self._http1,
                render=self._door.render,
                on_bug=self._bug,
            )
        elif isinstance(self._door, GrpcDoor):
            await self._serve_http2(wire, first, self._door)
        else:
            self._warn("a client speaks HTTP/2, this listener speaks HTTP/1.1")
            await wire.send(HTTP2_REFUSAL)
            await wire.aclose()

    async def _serve_http2(self, wire: SocketWire, first: bytes, door: GrpcDoor) -> None:
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

    def begin_closing(self) -> None:
        """Drain: no new requests after those that are on their way."""
        self._http1.begin_closing()
        for connection in self._http2:
            connection.drain()

    def make_room(self) -> bool:
        """Close the longest idle connection; False when all are in use."""
        return self._http1.close_longest_idle()

    def _warn(self, what: str) -> None:
        self._log.limited(what, "warning", "connection closed", reason=what)

    def _bug(self, where: str, error: BaseException) -> None:
        self._telemetry.internal_error(where)
        self._log.error("internal error", where=where, error=repr(error))
