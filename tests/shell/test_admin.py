"""The admin address: what it answers to whom, and that a large scrape holds nobody up."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from sidecar import admin as module
from sidecar.admin import Admin
from sidecar.telemetry import Telemetry

if TYPE_CHECKING:
    from sidecar.core.types import Headers

LOCAL = [("host", "127.0.0.1:7429")]


class Subject:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def unready(self) -> list[str]:
        return self.reasons

    def status(self) -> dict[str, object]:
        return {"ready": not self.reasons}


class Request:
    """A request, and the answer that it got."""

    def __init__(self, target: str, method: str = "GET", headers: Headers | None = None) -> None:
        self.target = target
        self.method = method
        self.headers = LOCAL if headers is None else headers
        self.status = 0
        self.sent: Headers = []
        self.body = b""

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.status, self.sent, self.body = status, headers, body


async def ask(admin: Admin, *arguments: Any) -> Request:
    request = Request(*arguments)
    await admin.serve(request)  # type: ignore[arg-type]
    return request


@pytest.fixture
def subject() -> Subject:
    return Subject()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("1.2.3")


@pytest.fixture
def admin(subject: Subject, telemetry: Telemetry) -> Admin:
    return Admin(telemetry, subject)


async def test_health_and_readiness(admin: Admin, subject: Subject) -> None:
    assert ((await ask(admin, "/healthz")).status) == 200
    ready = await ask(admin, "/readyz")
    assert (ready.status, ready.body) == (200, b"ready\n")
    subject.reasons = ["no card of a", "no card of b"]
    ready = await ask(admin, "/readyz?verbose")
    assert (ready.status, ready.body) == (503, b"no card of a\nno card of b\n")
    assert (await ask(admin, "/healthz")).status == 200


async def test_the_status_is_json(admin: Admin) -> None:
    status = await ask(admin, "/status")
    assert json.loads(status.body) == {"ready": True}
    assert ("content-type", "application/json") in status.sent


async def test_metrics_are_in_the_text_format(admin: Admin) -> None:
    metrics = await ask(admin, "/metrics")
    assert ("content-type", "text/plain; version=0.0.4; charset=utf-8") in metrics.sent
    families = {one.name for one in text_string_to_metric_families(metrics.body.decode())}
    assert "a2a_sidecar_build_info" in families


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("/",), 404),
        (("/metrics/x",), 404),
        (("/status", "POST"), 405),
        (("/healthz", "HEAD"), 200),
        (("/status", "GET", [("host", "attacker.test")]), 403),
        (("/status", "GET", [*LOCAL, ("origin", "http://localhost")]), 403),
        (("/status", "GET", [*LOCAL, ("sec-fetch-site", "cross-site")]), 403),
        (("/status", "GET", []), 403),
    ],
)
async def test_who_asks_and_what_for(admin: Admin, arguments: tuple[Any, ...], status: int) -> None:
    assert (await ask(admin, *arguments)).status == status


async def test_a_large_scrape_is_made_in_a_thread(
    admin: Admin, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is known that it is large; the state of the agents is read where they live."""
    places: list[tuple[str, threading.Thread]] = []
    gauges, text = telemetry.read_gauges, telemetry.format

    def read_gauges() -> None:
        places.append(("gauges", threading.current_thread()))
        gauges()

    def format_() -> bytes:
        places.append(("text", threading.current_thread()))
        return text()

    monkeypatch.setattr(telemetry, "read_gauges", read_gauges)
    monkeypatch.setattr(telemetry, "format", format_)
    monkeypatch.setattr(module, "_RENDERED_HERE_BYTES", 1000)
    bodies = [(await ask(admin, "/metrics")).body for _ in range(2)]
    here = threading.current_thread()
    assert places[:3] == [("gauges", here), ("text", here), ("gauges", here)]
    assert places[3][0] == "text"
    assert places[3][1] is not here
    assert len(bodies[0]) > 1000
    assert bodies[0] == bodies[1]


async def test_one_scrape_at_a_time(
    admin: Admin, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENDERED_HERE_BYTES", 0)
    await ask(admin, "/metrics")
    busy, most = threading.Semaphore(1), 0
    text = telemetry.format

    def format_() -> bytes:
        nonlocal most
        assert busy.acquire(blocking=False)
        try:
            most += 1
            return text()
        finally:
            busy.release()

    monkeypatch.setattr(telemetry, "format", format_)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask, admin, "/metrics")
    assert most == 5
