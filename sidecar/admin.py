"""The admin address: metrics, health, readiness and status over HTTP/1.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from sidecar.breaker import Breaker
from sidecar.core import door
from sidecar.core.http_common import JSON_TYPE
from sidecar.core.types import header
from sidecar.telemetry import CONTENT_TYPE
from sidecar.wire.http1_server import render_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.core.types import Headers
    from sidecar.telemetry import Telemetry
    from sidecar.wire.http1_server import Http1Request

_RENDERED_HERE_BYTES = 1024 * 1024


class Subject(Protocol):
    """What is looked at: the daemon."""

    def unready(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        ...

    def status(self) -> Mapping[str, object]:
        """Everything for people and `a2a-sidecar status`."""
        ...


class Admin:
    """Serves the admin listener's requests."""

    def __init__(self, telemetry: Telemetry, subject: Subject) -> None:
        self._telemetry = telemetry
        self._subject = subject
        self._scraping = trio.Lock()
        self._metrics_bytes = 0
        """Of the last scrape."""
        self.breaker = Breaker()

    def render(self, status: int, message: str) -> tuple[Headers, bytes]:
        """Headers and body of what HTTP/1.1 itself refuses."""
        return render_json(status, message)

    async def serve(self, request: Http1Request) -> None:
        """Answer one request."""
        if (
            door.admit(request.headers, header(request.headers, "host") or "", hosts=frozenset())
            is not None
        ):
            await _text(request, 403, "requests from web pages are refused\n")
            return
        if request.method not in {"GET", "HEAD"}:
            await request.respond(405, [("allow", "GET")], b"")
            return
        match request.target.partition("?")[0]:
            case "/metrics":
                body = await self._metrics()
                await request.respond(200, [("content-type", CONTENT_TYPE)], body)
            case "/healthz":
                await _text(request, 200, "ok\n")
            case "/readyz":
                reasons = self._subject.unready()
                text = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
                await _text(request, 503 if reasons else 200, text)
            case "/status":
                body = msgspec.json.format(msgspec.json.encode(self._subject.status()), indent=2)
                await request.respond(200, [("content-type", JSON_TYPE)], body + b"\n")
            case _:
                await _text(request, 404, "try /metrics, /healthz, /readyz or /status\n")

    async def _metrics(self) -> bytes:
        """One scrape at a time; with so many series that it would be felt, in a thread."""
        async with self._scraping:
            self._telemetry.read_gauges()
            if self._metrics_bytes > _RENDERED_HERE_BYTES:
                body = await trio.to_thread.run_sync(self._telemetry.format)
            else:
                body = self._telemetry.format()
        self._metrics_bytes = len(body)
        return body


async def _text(request: Http1Request, status: int, text: str) -> None:
    await request.respond(status, [("content-type", "text/plain; charset=utf-8")], text.encode())
