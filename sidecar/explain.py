"""``a2a-sidecar explain``: how a card is read: candidates in order, the rest with reasons."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import trio

from sidecar.agent import identity_of, policy_of
from sidecar.config import AgentConfig
from sidecar.core.card import Card, CardError, read_card
from sidecar.discovery import CardFetchError, CardSource, resolve_source
from sidecar.wire.fetch import client
from sidecar.wire.net import Dialer

if TYPE_CHECKING:
    from sidecar.config import Config
    from sidecar.discovery import FetchedCard


def explain(source: str, config: Config | None, *, raw: bool, as_json: bool) -> int:
    """Fetch the card of `source` (an agent of `config`, a URL or a file) and print how it is read."""
    agent = (config.agents.get(source) if config else None) or _unconfigured(source)
    if agent is None:
        known = ", ".join(config.agents) if config else ""
        hint = f"; agents of the configuration: {known}" if known else ""
        print(f"{source!r} is not an agent, a card's URL or a file{hint}", file=sys.stderr)
        return 1
    try:
        fetched = trio.run(_fetch, agent)
        assert fetched.data is not None  # a fetch without validators brings a card
        if raw:
            sys.stdout.write(fetched.data.decode("utf-8", "replace") + "\n")
            return 0
        card = read_card(fetched.data, policy_of(agent, fetched))
    except (CardFetchError, CardError) as error:
        print(f"{source}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(_as_data(card), indent=2) if as_json else _as_text(card, fetched))
    return 0 if card.candidates else 1


def _unconfigured(source: str) -> AgentConfig | None:
    try:
        return AgentConfig.model_validate({"card": source})
    except ValueError:
        return None


async def _fetch(agent: AgentConfig) -> FetchedCard:
    http = client(Dialer(stall_seconds=10), identity=identity_of(agent), permit=lambda _: "")
    return await CardSource(resolve_source(agent.card, agent.card_exact), http).fetch()


def _as_data(card: Card) -> dict[str, Any]:
    return {
        "name": card.name,
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
    }


def _as_text(card: Card, fetched: FetchedCard) -> str:
    lines = [f"{card.name or 'unnamed agent'}, card from {fetched.source_scheme} {fetched.url}"]
    if card.candidates:
        lines.append("candidates, in the order in which they are tried:")
    else:
        lines.append("no interface of this card can be used")
    for number, one in enumerate(card.candidates, 1):
        extra = [f"version {one.version}", "TLS" if one.tls else "plaintext"]
        if one.tenant:
            extra.append(f"tenant {one.tenant}")
        if one.assumed:
            extra.append("binding assumed")
        if one.refuses_callers_credentials:
            extra.append("not for calls with credentials of their own")
        lines.append(f"  {number}. {one.label:<14} {one.address:<28} {', '.join(extra)}")
    if card.ineligible:
        lines.append("not used:")
        lines += [
            f"  {one.position}  {one.binding or '?'} {one.url or '?'}: {one.reason}"
            for one in card.ineligible
        ]
    lines += [f"warning: {warning}" for warning in card.warnings]
    if card.contradiction:
        lines.append(f"the card contradicts itself: {card.contradiction}")
    if card.signed:
        lines.append("the card is signed; signatures are not verified")
    return "\n".join(lines)
