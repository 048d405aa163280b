"""``a2a-sidecar explain``: how a card is read: candidates in order, the rest with reasons."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from sidecar.agent_settings import card_host, clients, policy_of
from sidecar.config import AgentConfig, TcpAddress
from sidecar.core.card import Card, CardError, read_card
from sidecar.credentials import Credentials, CredentialsUnavailable
from sidecar.discovery import CardFetchError, CardSource, resolve_source
from sidecar.logs import Log
from sidecar.signatures import UntrustedCard, Vetting, fetched_by
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    from sidecar.config import Config
    from sidecar.core.types import Headers, Interface
    from sidecar.discovery import FetchedCard

_STALL_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A card as it was fetched and looked at."""

    agent: AgentConfig
    fetched: FetchedCard
    data: bytes
    distrust: str
    """Why the card would be rejected whatever is in it; '' if it would not."""
    signed_by: str
    """The key whose signature was verified, '' for none."""


def explain(source: str, config: Config | None, *, raw: bool, as_json: bool) -> int:
    """Fetch the card of `source` (an agent of `config`, a URL or a file) and print how it is read."""
    agent = (config.agents.get(source) if config else None) or _unconfigured(source)
    if agent is None:
        known = ", ".join(config.agents) if config else ""
        hint = f"; agents of the configuration: {known}" if known else ""
        print(f"{source!r} is not an agent, a card's URL or a file{hint}", file=sys.stderr)
        return 1
    try:
        found = trio.run(_look, agent)
        if raw:
            sys.stdout.write(found.data.decode("utf-8", "replace") + "\n")
            return 0
        card = read_card(found.data, policy_of(agent, found.fetched, _own_addresses(config)))
    except (CardFetchError, CardError, CredentialsUnavailable) as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_as_data(card, found), indent=2) if as_json else _as_text(card, found))
    return 0 if card.candidates and not found.distrust else 1


def _unconfigured(source: str) -> AgentConfig | None:
    try:
        return AgentConfig.model_validate({"card": source})
    except ValueError:
        return None


def _own_addresses(config: Config | None) -> frozenset[tuple[str, int]]:
    """Where the sidecar itself would listen."""
    if config is None:
        return frozenset()
    addresses = [config.admin.address, *(one.address for one in config.listeners)]
    return frozenset((one.host, one.port) for one in addresses if isinstance(one, TcpAddress))


async def _look(agent: AgentConfig) -> _Found:
    """Fetch the card as the daemon would, and ask of it what the daemon would."""
    dialer = Dialer(stall_seconds=_STALL_SECONDS)

    http = clients(agent, dialer, trusted_hosts=agent.trusted_hosts, proxy=agent.proxy)

    log = Log(level="error", form="text", clock=trio.current_time)
    try:
        credentials = Credentials(
            agent.discovery_auth,
            client=http,
            log=log,
            rng=random.SystemRandom(),
            trusted_hosts=frozenset(agent.trusted_hosts),
        )
        headers: Headers = []
        unavailable: CredentialsUnavailable | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(credentials.run)
            try:
                headers = await credentials.headers()
            except CredentialsUnavailable as error:
                unavailable = error  # raised outside: a nursery would wrap it in a group
            nursery.cancel_scope.cancel()
        if unavailable is not None:
            raise unavailable
    finally:
        log.close()
    source = CardSource(resolve_source(agent.card, agent.card_exact), http(card_host(agent)))
    fetched = await source.fetch(headers=headers)
    assert fetched.data is not None  # a fetch without validators brings a card
    vetting, distrust = Vetting(agent, fetched_by(http)), ""
    try:
        await vetting.check(fetched)
    except UntrustedCard as error:
        distrust = str(error)
    return _Found(
        agent=agent,
        fetched=fetched,
        data=fetched.data,
        distrust=distrust,
        signed_by=vetting.signed_by,
    )


def _configured_credentials(agent: AgentConfig) -> list[str]:
    """The names of what calls carry."""
    names = [*agent.auth.headers, *(["authorization"] if agent.auth.bearer else [])]
    if agent.auth.oauth is not None:
        names.append("authorization (OAuth)")
    if agent.tls.client_cert_file is not None:
        names.append("client certificate")
    return names


def _as_data(card: Card, found: _Found) -> dict[str, Any]:
    return {
        "name": card.name,
        "sha256": hashlib.sha256(found.data).hexdigest(),
        "rejected": found.distrust or None,
        "candidates": [
            {
                "interface": one.label,
                "binding": str(one.binding),
                "url": one.url,
                "address": one.address,
                "tls": one.tls,
                "version": str(one.version),
                "tenant": one.tenant or None,
                "assumed": one.assumed,
                "credentials": {
                    "configured": _configured_credentials(found.agent),
                    "callers": not one.refuses_callers_credentials,
                },
            }
            for one in card.candidates
        ],
        "ineligible": [
            {"position": one.position, "binding": one.binding, "url": one.url, "reason": one.reason}
            for one in card.ineligible
        ],
        "warnings": list(card.warnings),
        "contradiction": card.contradiction or None,
        "signed": card.signed,
        "signature_verified_by": found.signed_by or None,
    }


def _as_text(card: Card, found: _Found) -> str:
    fetched = found.fetched
    url = fetched.url.partition("?")[0]
    lines = [
        f"{card.name or 'unnamed agent'}, card from {fetched.source_scheme} {url}",
        f"sha256 {hashlib.sha256(found.data).hexdigest()}",
    ]
    if found.distrust:
        lines.append(f"rejected: {found.distrust}")
    if card.candidates:
        lines.append("candidates, in the order in which they are tried:")
    else:
        lines.append("no interface of this card can be used")
    lines += [
        f"  {number}. {one.label:<14} {one.address:<28} {_details(one, found.agent)}"
        for number, one in enumerate(card.candidates, 1)
    ]
    if card.ineligible:
        lines.append("not used:")
        lines += [
            f"  {one.position}  {one.binding or '?'} {one.url or '?'}: {one.reason}"
            for one in card.ineligible
        ]
    lines += [f"warning: {warning}" for warning in card.warnings]
    if card.contradiction:
        lines.append(f"the card contradicts itself: {card.contradiction}")
    if found.signed_by:
        lines.append(f"the card is signed, verified with {found.signed_by}")
    elif card.signed and not found.distrust:
        lines.append("the card is signed; verify_signatures is off")
    return "\n".join(lines)


def _details(one: Interface, agent: AgentConfig) -> str:
    """What is known of a candidate besides its address."""
    known = [f"version {one.version}", "TLS" if one.tls else "plaintext"]
    if one.tenant:
        known.append(f"tenant {one.tenant}")
    if one.assumed:
        known.append("binding assumed")
    configured = _configured_credentials(agent)
    if configured:
        known.append(f"gets {' and '.join(configured)}")
    if one.refuses_callers_credentials:
        known.append("not for calls with credentials of their own")
    elif not configured:
        known.append("gets the caller's credentials")
    return ", ".join(known)
