"""One remote agent: its card, its candidates and their selection, its connections and limits.

Everything that is kept of an agent between calls is here. Calls ask for the present `Generation`
and report what they saw; a background task fetches the card, once at a time and throttled.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from sidecar.agent_settings import card_host, clients, identity_of, policy_of
from sidecar.breaker import Breaker
from sidecar.connections import Connections
from sidecar.core import card as cards
from sidecar.core import failover
from sidecar.core.card import Card, CardError, CardPolicy
from sidecar.credentials import Credentials, CredentialsUnavailable
from sidecar.discovery import NO_VALIDATORS, CardFetchError, CardSource, resolve_source
from sidecar.signatures import Vetting, fetched_by
from sidecar.upstream import Sizes, Timeouts, Upstream

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from sidecar.config import AgentConfig, AuthConfig, Limits
    from sidecar.core.types import Attempt, Headers, Interface
    from sidecar.discovery import FetchedCard
    from sidecar.logs import Log
    from sidecar.telemetry import Telemetry
    from sidecar.wire.net import Dialer

_LONGEST_COOLDOWN_SECONDS = 60.0
_ATTEMPTS_KEPT = 20
_CREDENTIAL_HEADERS = frozenset({"authorization", "x-api-key"})


@dataclass(slots=True)
class Generation:
    """The candidates of one card, with their selection. A call keeps the one it began with."""

    number: int
    card: Card
    selection: failover.Selection

    @property
    def candidates(self) -> tuple[Interface, ...]:
        """The eligible interfaces, in order."""
        return self.card.candidates

    @property
    def current(self) -> Interface:
        """Where the next call begins."""
        return self.candidates[self.selection.current]


class Unavailable(Exception):
    """There is no candidate to begin with; `reason` is one of the sidecar's own."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _Throttle:
    """The wait before the next refresh: doubled by each that brought nothing new."""

    least: float
    wait: float = field(init=False)

    def __post_init__(self) -> None:
        self.wait = self.least

    def reset(self) -> None:
        self.wait = self.least

    def double(self) -> None:
        self.wait = min(self.wait * 2, max(_LONGEST_COOLDOWN_SECONDS, self.least))


class _Ticket:
    """A fetch that has not begun, and those who wait for it."""

    def __init__(self) -> None:
        self.wanted = False
        self.done = trio.Event()


class Agent:
    """The state of one configured agent. `run` must be running for it to be of use."""

    def __init__(
        self,
        name: str,
        config: AgentConfig,
        *,
        dialer: Dialer,
        limits: Limits,
        own_addresses: frozenset[tuple[str, int]],
        telemetry: Telemetry,
        log: Log,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.config = config
        self.generation: Generation | None = None
        self.fetched: FetchedCard | None = None
        """Where the present card came from."""
        self.rejected: Card | None = None
        """The last card that had no eligible interface."""
        self.fetch_error = ""
        self.in_flight = 0
        self.streams = 0
        self.breaker = Breaker()
        """Ends the calls of an agent that was removed or replaced, when its drain is over."""
        self.attempts: deque[Attempt] = deque(maxlen=_ATTEMPTS_KEPT)
        self._own_addresses = own_addresses
        self._telemetry = telemetry
        self._log = log
        self._rng = rng
        client = clients(config, dialer, trusted_hosts=config.trusted_hosts, proxy=config.proxy)

        def credentials(auth: AuthConfig) -> Credentials:
            trusted = frozenset(config.trusted_hosts)
            return Credentials(auth, client=client, log=log, rng=rng, trusted_hosts=trusted)

        self.credentials = credentials(config.auth)
        self._discovery = credentials(config.discovery_auth)
        self._source = CardSource(
            resolve_source(config.card, config.card_exact), client(card_host(config))
        )
        self._vetting = Vetting(config, fetched_by(client))
        self._connections = Connections(
            dialer,
            identity=identity_of(config),
            header_bytes=limits.header_bytes,
            connect_timeout=config.connect_timeout_seconds,
            proxy=config.proxy,
            carries_credentials=config.has_credentials,
            on_bug=lambda error: self._bug("connection", error),
        )
        self.upstream = Upstream(
            self._connections.get,
            timeouts=Timeouts(config.response_timeout_seconds, config.stream_open_timeout_seconds),
            sizes=Sizes(limits.response_bytes, limits.event_bytes),
            credentials=self.credentials.headers,
        )
        self._validators = NO_VALIDATORS
        self._fetched_at = 0.0
        self._fresh_until = 0.0
        self._throttle = _Throttle(config.refresh_cooldown_seconds)
        self._wake = trio.Event()
        self._wanted = False
        """A refresh was asked for; it waits for the throttle."""
        self._next_fetch = _Ticket()
        self._under_way: trio.Event | None = trio.Event()
        """Set when the fetch under way has ended; None between fetches."""
        self._contradiction_logged = ""
        self._retired = False
        self._running = trio.Event()

    # --- what calls ask -----------------------------------------------------------------------

    async def ready(self) -> Generation:
        """The present generation; waits for a first fetch under way. Raises Unavailable."""
        if not self.config.enabled:
            raise Unavailable("AGENT_DISABLED", f"agent {self.name} is disabled")
        if self.generation is None and self._under_way is not None:
            await self._under_way.wait()
        if self.generation is None:
            raise self._unavailable()
        if not self._running.is_set():
            # It has taken over a card, and its connections have nowhere to live yet.
            await self._running.wait()
        if trio.current_time() >= self._fresh_until:
            self.ask_refresh(self.generation)
        return self.generation

    def _unavailable(self) -> Unavailable:
        if self.rejected is not None:
            return Unavailable(
                "NO_ELIGIBLE_INTERFACE",
                f"the card of agent {self.name} has no interface that can be used"
                f" ({_why_none(self.rejected)})",
            )
        return Unavailable(
            "CARD_UNAVAILABLE",
            f"the card of agent {self.name} cannot be had: {self.fetch_error or 'not yet fetched'}",
        )

    def advance(self, generation: Generation, failed: int, moves: int) -> bool:
        """Move the selection away from a candidate that failed; an older generation moves nothing."""
        if generation is not self.generation:
            return False
        before = generation.current
        if not generation.selection.advance(failed, moves):
            return False
        self._telemetry.selection_change(self.name, generation.current.label)
        self._log.limited(
            (self.name, before.label, "advance"),
            "info",
            "advance",
            agent=self.name,
            **{"from": before.label, "to": generation.current.label},
        )
        return True

    def ask_refresh(self, generation: Generation | None) -> None:
        """Fetch the card soon, unless it was replaced meanwhile."""
        if generation is self.generation and not self._wanted:
            self._wanted = True
            self._wake.set()

    async def fresh_card(self) -> bytes:
        """The card as the agent serves it now; raises Unavailable, never gives an older one.

        Requests share a fetch, but not one that began before them.
        """
        if not self.config.enabled:
            raise Unavailable("AGENT_DISABLED", f"agent {self.name} is disabled")
        ticket = self._next_fetch
        ticket.wanted = True
        self._wake.set()
        await ticket.done.wait()
        if self.fetch_error or self.generation is None:
            raise self._unavailable()
        return self.generation.card.data

    @property
    def card_max_age(self) -> float:
        """Seconds for which the card is fresh, as its publisher says."""
        return max(self._fresh_until - self._fetched_at, 0.0)

    @property
    def card_last_modified(self) -> str:
        """The card's Last-Modified, '' without one."""
        return self._validators.last_modified

    def answered(self) -> None:
        """An agent that answers ends the throttling of refreshes."""
        self._throttle.reset()

    @property
    def credential_headers(self) -> frozenset[str]:
        """Lower-case names of the headers in which a caller's own credentials would come."""
        card = self.generation.card if self.generation else None
        return _CREDENTIAL_HEADERS | (card.credential_headers if card else frozenset())

    @property
    def why_unready(self) -> str:
        """Why no call can be served; '' when one can."""
        return "" if self.generation else str(self._unavailable())

    # --- what status and metrics ask ----------------------------------------------------------

    @property
    def candidates(self) -> Sequence[str]:
        """Labels of the candidates, in order."""
        return [i.label for i in self.generation.candidates] if self.generation else []

    @property
    def current(self) -> str | None:
        """Label of the interface that the next call begins with."""
        return self.generation.current.label if self.generation else None

    @property
    def ineligible(self) -> int:
        """How many entries of the card are not used."""
        card = self.generation.card if self.generation else self.rejected
        return len(card.ineligible) if card else 0

    @property
    def card_age(self) -> float | None:
        """Seconds since the card was last fetched or confirmed."""
        return trio.current_time() - self._fetched_at if self.generation else None

    @property
    def connections(self) -> Mapping[str, int]:
        """Open connections by interface label."""
        if self.generation is None:
            return {}
        return {i.label: self._connections.count(i) for i in self.generation.candidates}

    def take_over(self, old: Agent) -> None:
        """Begin with the card of the same agent under an older configuration, if it is the same.

        Read again, since what may be used and in which order can have changed. Another card, or
        other credentials, may mean another agent.
        """
        self.attempts.extend(old.attempts)
        if not self.config.enabled or old.fetched is None or _who(old) != _who(self):
            return
        try:
            card = cards.read_card(old.fetched.data or b"", self._policy(old.fetched))
        except CardError:
            return
        if not card.candidates:
            return
        self._fetched_at, self._fresh_until = old._fetched_at, old._fresh_until
        self.fetched = old.fetched
        self._validators = old._validators
        self._contradiction_logged = old._contradiction_logged
        before = old.generation
        self.generation = _generation_after(before, card)
        if before is None or not cards.same_candidates(before.card, card):
            self._announce(card)

    def retire(self) -> None:
        """Fetch no more cards: calls under way go on with what there is."""
        self._retired = True
        self._wake.set()

    def avoid(self, own_addresses: frozenset[tuple[str, int]]) -> None:
        """No card may point at these from now on."""
        if own_addresses == self._own_addresses:
            return
        self._own_addresses = own_addresses
        if self.generation is not None and self.fetched is not None:
            self._connections.use(self.generation.card, self._policy(self.fetched).addresses)

    # --- the background -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the card and the connections until cancelled."""
        async with trio.open_nursery() as nursery:
            self._connections.start(nursery)
            if self.generation is not None and self.fetched is not None:
                self._connections.use(self.generation.card, self._policy(self.fetched).addresses)
            self._running.set()
            nursery.start_soon(self._keep_card)
            nursery.start_soon(self.credentials.run)
            nursery.start_soon(self._discovery.run)
            # Connections live here, also when there is nothing left to fetch.
            await trio.sleep_forever()

    async def _keep_card(self) -> None:
        while not self._retired or self._next_fetch.wanted:
            self._wanted = False
            ticket, self._next_fetch = self._next_fetch, _Ticket()
            if self._under_way is None:
                self._under_way = trio.Event()
            began_under = self.generation
            try:
                await self._fetch(began_under)
            except Exception as error:
                self.fetch_error = "internal error"
                self._bug("card", error)
            self._under_way.set()
            self._under_way = None
            ticket.done.set()
            await self._pause()

    def _bug(self, where: str, error: BaseException) -> None:
        """Something of ours failed in the background: it costs no more than that."""
        self._telemetry.internal_error(where)
        self._log.error("internal error", where=where, agent=self.name, error=repr(error))

    async def _pause(self) -> None:
        """Until the next fetch: one for a client that waits for it, or one that is due."""
        # Jitter keeps many sidecars from asking one agent in step.
        due = trio.current_time() + self._throttle.wait * self._rng.uniform(0.75, 1.0)
        while not self._next_fetch.wanted and not self._retired:
            soon = self._wanted or self.generation is None
            self._wake = trio.Event()
            with trio.CancelScope(deadline=due if soon else math.inf) as scope:
                await self._wake.wait()
            if scope.cancelled_caught:
                return

    async def _fetch(self, began_under: Generation | None) -> None:
        headers: Headers = []
        try:
            headers = await self._discovery.headers()
            fetched = await self._source.fetch(self._validators, headers=headers)
            if fetched.data is not None:
                await self._vetting.check(fetched)
        except CardError as error:
            self._failed("rejected", str(error))
            return
        except (CardFetchError, CredentialsUnavailable) as error:
            if isinstance(error, CardFetchError) and error.status == 401:
                self._discovery.rejected(headers)
            self._failed("error", str(error))
            return
        if self.generation is not began_under:
            return
        self._fetched_at = trio.current_time()
        self._fresh_until = self._fetched_at + fetched.max_age
        if fetched.data is None:
            self.fetch_error = ""
            self._throttle.double()
            self._telemetry.card_fetch(self.name, "not_modified")
            return
        try:
            card = cards.read_card(fetched.data, self._policy(fetched))
        except CardError as error:
            self._failed("rejected", str(error))
            return
        self._install(card, fetched)

    def _failed(self, result: str, why: str) -> None:
        self._throttle.double()
        self._telemetry.card_fetch(self.name, result)
        if why != self.fetch_error:
            self._log.warning("card not available", agent=self.name, error=why)
        self.fetch_error = why
        # Keep asking at the throttled pace: the card that is known has become stale.
        self._fresh_until = trio.current_time()

    def _policy(self, fetched: FetchedCard) -> CardPolicy:
        return policy_of(self.config, fetched, self._own_addresses)

    def _install(self, card: Card, fetched: FetchedCard) -> None:
        if not card.candidates:
            self.rejected = card
            self._failed("rejected", f"no eligible interface ({_why_none(card) or 'none'})")
            return
        self.fetch_error = ""
        self.rejected = None
        self._validators = fetched.validators
        self.fetched = fetched
        self._telemetry.card_fetch(self.name, "fetched")
        old = self.generation
        if old is not None and cards.same_candidates(old.card, card):
            self._throttle.double()
            old.card = card
            self._connections.use(card, self._policy(fetched).addresses)
            return
        if old is not None:
            self._telemetry.card_change(self.name)
        self._throttle.reset()
        self.generation = _generation_after(old, card)
        self._connections.use(card, self._policy(fetched).addresses)
        self._announce(card)

    def _announce(self, card: Card) -> None:
        self._log.info(
            "card",
            agent=self.name,
            candidates=",".join(i.label for i in card.candidates),
            current=self.current or "",
            ineligible=len(card.ineligible),
        )
        if card.signed:
            # The card that is served leads elsewhere, so that they no longer fit.
            self._log.info(
                "signatures removed from the served card",
                agent=self.name,
                verified_by=self._vetting.signed_by or None,
            )
        for warning in card.warnings:
            self._log.warning("card warning", agent=self.name, warning=warning)
        for entry in card.ineligible:
            self._log.info(
                "interface not used",
                agent=self.name,
                position=entry.position,
                url=entry.url,
                reason=entry.reason,
            )
        if card.contradiction and card.contradiction != self._contradiction_logged:
            self._contradiction_logged = card.contradiction
            self._telemetry.card_contradiction(self.name)
            self._log.warning("card contradicts itself", agent=self.name, how=card.contradiction)


def _generation_after(before: Generation | None, card: Card) -> Generation:
    if before is None:
        return Generation(1, card, failover.Selection(len(card.candidates)))
    selection = failover.carried_over(
        [one.identity for one in before.candidates],
        before.selection,
        [one.identity for one in card.candidates],
    )
    return Generation(before.number + 1, card, selection)


def _why_none(card: Card) -> str:
    return "; ".join(f"{entry.position}: {entry.reason}" for entry in card.ineligible)


def _who(agent: Agent) -> tuple[object, ...]:
    """Whom an agent's card speaks of."""
    config = agent.config
    pins = (config.verify_signatures, config.card_sha256)
    return (config.card, config.card_exact, config.auth, config.discovery_auth, *pins)
