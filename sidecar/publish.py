"""``a2a-sidecar publish``: a card that is served only while its agent is as the card says.

A process of its own: it faces the public and holds no credentials but those for its own probes. The
card goes out byte for byte as it was probed, so that its signatures stay valid.
"""

from __future__ import annotations

import hashlib
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from sidecar import __version__
from sidecar.admin import Admin
from sidecar.agent_settings import card_host, clients, identity_of
from sidecar.card_check import CheckOptions, Verdict, check_card
from sidecar.config import SystemdAddress, TcpAddress, UnixAddress
from sidecar.config_values import is_loopback
from sidecar.core import errors
from sidecar.core.address_map import AddressMap
from sidecar.core.card import CardError
from sidecar.core.card_json import load_object
from sidecar.core.http_common import JSON_TYPE
from sidecar.core.types import header
from sidecar.credentials import Credentials, CredentialsUnavailable, check_secrets
from sidecar.discovery import (
    CARD_PATH,
    LEGACY_PATH,
    NO_VALIDATORS,
    CardFetchError,
    CardSource,
    resolve_source,
)
from sidecar.doors.cards import is_current
from sidecar.listener import BindError, Listener, bind
from sidecar.logs import Log
from sidecar.reception import Reception, Threshold
from sidecar.systemd import Notifier, take_sockets
from sidecar.telemetry import Telemetry
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.config import Address, Config, PublishConfig
    from sidecar.core.types import Headers
    from sidecar.wire.http1_server import Http1Request

_CARD_PATHS = frozenset({CARD_PATH, LEGACY_PATH})
_PROBE_SECONDS = 5.0
_FIRST_RETRY_SECONDS = 0.5
_MODE = 0o660
# What a proxy adds: who comes through one is not the operator of this machine.
_FORWARDED = frozenset({"forwarded", "x-forwarded-for", "via"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A card that passed its check."""

    data: bytes
    etag: str


class Guard:
    """One card: checked again and again, served or not."""

    def __init__(
        self,
        name: str,
        config: PublishConfig,
        *,
        dialer: Dialer,
        telemetry: Telemetry,
        log: Log,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.config = config
        self.published: Published | None = None
        self.reasons: list[str] = ["the first check has not ended yet"]
        """Why it is not served; empty when it is."""
        self._dialer = dialer
        self._telemetry = telemetry
        self._log = log
        self._identity = identity_of(config)
        http = clients(config, dialer)
        self._credentials = Credentials(config.auth, client=http, log=log, rng=rng)
        self._source = CardSource(resolve_source(config.card), http(card_host(config)))
        self._addresses = AddressMap(config.map)
        self._checked_at: float | None = None
        self._last: Verdict | None = None

    def status(self) -> dict[str, Any]:
        """For ``/status``."""
        age = None if self._checked_at is None else trio.current_time() - self._checked_at
        return {
            "card": self.config.card.partition("?")[0],
            "published": self.published is not None,
            "reasons": self.reasons,
            "checked_seconds_ago": None if age is None else round(age, 3),
            "card_sha256": (
                hashlib.sha256(self.published.data).hexdigest() if self.published else None
            ),
        }

    async def run(self) -> None:
        """Check until cancelled: at the configured interval, soon again while something fails."""
        retry = _FIRST_RETRY_SECONDS
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._credentials.run)
            while True:
                await self._check()
                interval = self.config.probe_interval_seconds
                if self.published is None:
                    await trio.sleep(min(retry, interval))
                    retry = min(retry * 2, interval)
                else:
                    retry = _FIRST_RETRY_SECONDS
                    await trio.sleep(interval)

    async def _check(self) -> None:
        try:
            data, verdict, reasons = await self._look()
        except (CardFetchError, CardError, CredentialsUnavailable) as error:
            data, verdict, reasons = b"", None, [str(error)]
        except Exception as error:
            self._telemetry.internal_error("publish")
            self._log.error("internal error", where="publish", card=self.name, error=repr(error))
            data, verdict, reasons = b"", None, ["internal error"]
        self._checked_at = trio.current_time()
        served = verdict is Verdict.SERVED
        result = "error" if verdict is None else verdict.words.replace(" ", "_")
        self._telemetry.publish_check(self.name, result)
        self._tell(served=served, reasons=reasons)
        self.reasons = reasons
        self.published = None
        if served:
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            self.published = Published(data=data, etag=etag)

    async def _look(self) -> tuple[bytes, Verdict, list[str]]:
        headers = await self._credentials.headers()
        fetched = await self._source.fetch(NO_VALIDATORS, headers=headers)
        assert fetched.data is not None  # a fetch without validators brings a card
        options = CheckOptions(
            addresses=self._addresses,
            identity=self._identity,
            headers=headers,
            card_host=fetched.source_host,
            timeout_seconds=_PROBE_SECONDS,
        )
        report = await check_card(load_object(fetched.data), options, self._dialer)
        return fetched.data, report.verdict, report.reasons

    def _tell(self, *, served: bool, reasons: list[str]) -> None:
        """Log what has changed."""
        if served and self.published is None:
            self._log.info("card published", card=self.name)
        elif not served and reasons != self.reasons:
            for reason in reasons:
                self._log.warning("card not published", card=self.name, reason=reason)


class PublishDoor(Admin):
    """Serves a card to everybody, and to those on this machine how it is checked."""

    def __init__(self, telemetry: Telemetry, subject: Publisher, guard: Guard) -> None:
        super().__init__(telemetry, subject)
        self._guard = guard

    async def serve(self, request: Http1Request) -> None:
        """Answer one request."""
        if request.target.partition("?")[0] in _CARD_PATHS:
            await self._serve_card(request)
        elif self._is_local(request):
            await super().serve(request)
        else:
            await request.respond(404, [], b"")

    def _is_local(self, request: Http1Request) -> bool:
        address = self._guard.config.address
        return is_local_address(address) and not any(
            name in _FORWARDED for name, _ in request.headers
        )

    async def _serve_card(self, request: Http1Request) -> None:
        if request.method not in {"GET", "HEAD"}:
            await request.respond(405, [("allow", "GET, HEAD")], b"")
            return
        published = self._guard.published
        if published is None:
            await self._refuse(request)
            return
        seconds = self._guard.config.probe_interval_seconds
        headers: Headers = [
            ("etag", published.etag),
            ("cache-control", f"max-age={int(seconds)}"),
        ]
        if is_current(header(request.headers, "if-none-match"), published.etag):
            await request.respond(304, headers, b"")
        else:
            await request.respond(200, [("content-type", JSON_TYPE), *headers], published.data)

    async def _refuse(self, request: Http1Request) -> None:
        text = "the card is not published: " + "; ".join(self._guard.reasons)
        record = errors.own("CARD_UNAVAILABLE", text, delivered=None)
        status, headers, body = errors.to_http(record)
        headers = [*headers, ("content-type", JSON_TYPE), ("cache-control", "no-store")]
        await request.respond(status, headers, body)


class Publisher:
    """The process: every configured card at its own address."""

    def __init__(self, loaded: Config, names: list[str]) -> None:
        """`names`: the tables that are served; all of them when there are none."""
        self._config = loaded
        self._telemetry = Telemetry(__version__)
        self._log = Log(
            level=loaded.log.level,
            form=loaded.log.format,
            clock=trio.current_time,
            on_drop=self._telemetry.log_dropped,
        )
        self._notifier = Notifier()
        self._passed = take_sockets()
        dialer = Dialer(stall_seconds=loaded.limits.stall_seconds)
        self.guards = [
            Guard(
                name,
                config,
                dialer=dialer,
                telemetry=self._telemetry,
                log=self._log,
                rng=random.SystemRandom(),
            )
            for name, config in loaded.publish.items()
            if name in names or not names
        ]

    def unready(self) -> list[str]:
        """Why not every card is served."""
        return [f"{guard.name}: {reason}" for guard in self.guards for reason in guard.reasons]

    def status(self) -> Mapping[str, object]:
        """Everything for ``/status``."""
        return {
            "version": __version__,
            "ready": not self.unready(),
            "publish": {guard.name: guard.status() for guard in self.guards},
        }

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises BindError and CredentialsUnavailable at once."""
        try:
            for guard in self.guards:
                check_secrets(guard.config.auth, self._log)
            listeners = self._bind()
            async with trio.open_nursery() as nursery:
                for guard, listener in zip(self.guards, listeners, strict=True):
                    listener.receiver = await self._reception(nursery, guard)
                    nursery.start_soon(listener.run)
                    nursery.start_soon(guard.run)
                places = [str(listener.address) for listener in listeners]
                self._log.info("started", version=__version__, publish=",".join(places))
                self._notifier.ready(f"serving at {', '.join(places)}")
                await self._end()
                nursery.cancel_scope.cancel()
            self._log.info("stopped")
        finally:
            self._log.close()

    def _bind(self) -> list[Listener]:
        bound: list[Listener] = []
        try:
            for guard in self.guards:
                address = guard.config.address
                if isinstance(address, SystemdAddress):
                    passed = self._passed.get(address.name, [])
                    if len(passed) != 1:
                        raise BindError(f"{address}: systemd passed {len(passed)} such sockets")
                    bound.append(Listener(passed[0], address, log=self._log))
                else:
                    bound.append(Listener(bind(address, _MODE), address, log=self._log))
        except BaseException:
            for listener in bound:
                listener.close()
            raise
        return bound

    async def _reception(self, nursery: trio.Nursery, guard: Guard) -> Reception:
        reception = Reception(
            PublishDoor(self._telemetry, self, guard),
            limits=self._config.limits,
            threshold=Threshold(),
            max_connections=self._config.limits.connections,
            max_streams=1,
            telemetry=self._telemetry,
            log=self._log,
        )
        await nursery.start(reception.run)
        return reception

    async def _end(self) -> None:
        """Until a signal; tells systemd meanwhile that the loop turns."""
        pulse = self._notifier.watchdog_seconds / 2
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                if pulse:
                    nursery.start_soon(self._pulse, pulse)
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    break
        self._notifier.stopping()

    async def _pulse(self, seconds: float) -> None:
        while True:
            self._notifier.alive()
            await trio.sleep(seconds)


def is_local_address(address: Address) -> bool:
    """Whether only this machine reaches a configured address."""
    if isinstance(address, UnixAddress):
        return True
    return isinstance(address, TcpAddress) and is_loopback(address)
