"""What is shown of an agent: candidates with reasons, the card's age, the last attempts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from sidecar.agent import Agent
    from sidecar.core.types import Attempt, Interface


def view(agent: Agent) -> dict[str, Any]:
    """`agent` for `/status` and people."""
    card = agent.generation.card if agent.generation else agent.rejected
    age = agent.card_age
    return {
        "card": agent.config.card.partition("?")[0],
        "enabled": agent.config.enabled,
        "current": agent.current,
        "candidates": [_shown(interface) for interface in card.candidates] if card else [],
        "ineligible": [
            {
                "position": entry.position,
                "binding": entry.binding,
                "url": entry.url,
                "reason": entry.reason,
            }
            for entry in (card.ineligible if card else ())
        ],
        "card_age_seconds": None if age is None else round(age, 3),
        "card_sha256": hashlib.sha256(card.data).hexdigest() if card else None,
        "card_error": agent.fetch_error or None,
        "contradiction": (card.contradiction or None) if card else None,
        "in_flight": agent.in_flight,
        "streams": agent.streams,
        "attempts": [_attempt(attempt) for attempt in agent.attempts],
    }


def _shown(interface: Interface) -> dict[str, Any]:
    return {
        "interface": interface.label,
        "binding": str(interface.binding),
        "url": interface.url,
        "version": str(interface.version),
        "tenant": interface.tenant or None,
        "tls": interface.tls,
        "assumed": interface.assumed,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "interface": attempt.interface.label,
        "address": attempt.interface.address,
        "kind": str(attempt.outcome.kind),
        "result": attempt.outcome.result,
        "seconds_ago": round(trio.current_time() - attempt.at, 3),
    }
