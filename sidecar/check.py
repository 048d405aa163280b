"""Whether an agent's card is backed by what listens: the rules, for an agent's own start-up too.

    listening = probe_bindings(card)
    validate_card_against_bindings(card, listening)  # raises AgentCardBindingError

Nothing here imports protobuf: an agent that was built with another A2A library has that library's
descriptors loaded, and two sets of them do not fit into one process. The probes therefore run in a
process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidecar.core.card import canonical_binding
from sidecar.core.card_json import has_member, is_object, member, shown_text
from sidecar.core.interface_url import same_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "AgentCardBindingError",
    "BindingProbeError",
    "Declared",
    "declared_interfaces",
    "probe_bindings",
    "validate_card_against_bindings",
]

_DEFAULT_HINT = "JSONRPC"
_MOST_ENTRIES = 64


class AgentCardBindingError(RuntimeError):
    """A card declares a binding at an address that does not serve it.

    The text has one sentence for each such declaration, which `problems` holds one by one, and ends
    with the card's preferredTransport and primary url.
    """

    def __init__(self, problems: Iterable[str], hint: str, primary: str) -> None:
        self.problems = tuple(problems)
        context = f"(preferredTransport: {hint or 'not given'}; url: {primary or 'not given'})"
        super().__init__("; ".join(self.problems) + f" {context}")


class BindingProbeError(RuntimeError):
    """The probes could not tell whether a declared binding is served; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One thing that a card says: this transport, at this url."""

    where: str
    """Which member says so: ``supportedInterfaces[0]``, ``url``, ``additionalInterfaces[1]``."""
    transport: str
    """Canonical name of the binding, upper case if it is not one of A2A's; '' when there is none."""
    url: str
    """As written; '' when there is none."""
    tenant: str = ""
    version: str = ""
    """The protocol version as written, '' when there is none."""

    @property
    def is_hint(self) -> bool:
        """Whether it is what ``preferredTransport`` says of the primary ``url``."""
        return self.where == "url"

    @property
    def shown(self) -> str:
        """The url as it may be printed."""
        return shown_text(shown_url(self.url)) or "a url that is missing"


def declared_interfaces(card: Mapping[str, Any]) -> list[Declared]:
    """Everything that a card (parsed JSON) declares, as a client that believes it reads it.

    Of a card of version 0.3 that is `preferredTransport` at `url`, then `additionalInterfaces`; of
    a 1.0 card `supportedInterfaces`; of one with both members, all of it.
    """
    members = dict(card)
    found: list[Declared] = []
    version = _text(member(members, "protocolVersion"))
    if has_member(members, "url") or has_member(members, "preferredTransport"):
        hint = _text(member(members, "preferredTransport")) or _DEFAULT_HINT
        url = _text(member(members, "url"))
        found.append(
            Declared(where="url", transport=canonical_binding(hint), url=url, version=version)
        )
    for where, entry in _entries(members, "additionalInterfaces"):
        found.append(_declared(where, entry, "transport", version))
    for where, entry in _entries(members, "supportedInterfaces"):
        found.append(_declared(where, entry, "protocolBinding", ""))
    return found


def _entries(members: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    value = member(members, name)
    entries = value[:_MOST_ENTRIES] if isinstance(value, list) else []
    return [
        (f"{name}[{number}]", entry if is_object(entry) else {})
        for number, entry in enumerate(entries)
    ]


def _declared(where: str, entry: dict[str, Any], transport: str, version: str) -> Declared:
    return Declared(
        where=where,
        transport=canonical_binding(_text(member(entry, transport))),
        url=_text(member(entry, "url")),
        tenant=_text(member(entry, "tenant")),
        version=_text(member(entry, "protocolVersion")) or version,
    )


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


# --- the rule ---------------------------------------------------------------------------------


def validate_card_against_bindings(
    card: Mapping[str, Any], listening: Mapping[str, Iterable[str]]
) -> None:
    """Raise AgentCardBindingError unless everything that `card` declares is served.

    `card` is the parsed JSON; `listening` maps each url to the transports that are served there
    with a handler registered (``JSONRPC``, ``HTTP+JSON``, ``GRPC``). Urls are compared without
    regard to the case of scheme and host, default ports and a lone trailing slash. A
    `preferredTransport` that is served at an additional interface only misleads clients that
    honour it, and fails.
    """
    declared = declared_interfaces(card)
    served = {id(one): _served_at(one.url, listening) for one in declared}
    problems = []
    for one in declared:
        if not one.url or not one.transport:
            lack = "url" if not one.url else "transport"
            problems.append(f"{one.where} has no {lack}")
        elif one.transport not in served[id(one)]:
            elsewhere = [
                other
                for other in declared
                if other.transport == one.transport and one.transport in served[id(other)]
            ]
            problems.append(not_served_sentence(one, served[id(one)], elsewhere))
    if not declared:
        problems.append("the card declares no interface")
    if problems:
        hint = next((one for one in declared if one.is_hint), None)
        raise AgentCardBindingError(
            problems, hint.transport if hint else "", hint.shown if hint else ""
        )


def not_served_sentence(
    one: Declared, served: Iterable[str], elsewhere: Iterable[Declared] = ()
) -> str:
    """That `one` is not served, what is served there, and which entries serve its transport."""
    there = ", ".join(sorted(served)) or "none"
    if not one.is_hint:
        return f"{one.where} declares {one.transport} at {one.shown}, which serves: {there}"
    sentence = (
        f"preferredTransport says {one.transport}, which is not served at the card's url"
        f" {one.shown}, which serves: {there}"
    )
    return sentence + elsewhere_clause(one, elsewhere)


def elsewhere_clause(one: Declared, elsewhere: Iterable[Declared]) -> str:
    """Where a hint that misleads would have been right; '' if nowhere."""
    entries = " and ".join(f"{other.where} ({other.shown})" for other in elsewhere)
    return f"; {one.transport} is served at {entries} only" if entries else ""


def _served_at(url: str, listening: Mapping[str, Iterable[str]]) -> set[str]:
    if not url:
        return set()
    return {
        canonical_binding(str(name.value if isinstance(name, Enum) else name))
        for place, names in listening.items()
        if same_url(place, url)
        for name in ([names] if isinstance(names, str) else names)
    }


# --- the probes -------------------------------------------------------------------------------


def probe_bindings(
    card: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = 5.0,
    addresses: Mapping[str, str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
) -> dict[str, frozenset[str]]:
    """Ask each url of `card` what is served there, for `validate_card_against_bindings`.

    A probe is a GetTask for an id that cannot exist: nothing is executed. `headers` are sent along
    (credentials that the agent wants). `addresses` says where a public address is really found, as
    ``{"https://agent.example": "http://127.0.0.1:8000"}``; `ca_file` is trusted instead of the
    system's authorities. `timeout_seconds` is for each probe.

    Blocks until all probes have ended: call it from a thread when the agent serves in this one
    (``await asyncio.to_thread(probe_bindings, card)``). Raises BindingProbeError when a declared
    binding is neither proven nor disproved, as by a timeout or an answer that only asks for
    credentials, and when the probes cannot run.
    """
    job = {
        "card": dict(card),
        "headers": dict(headers or {}),
        "timeout_seconds": timeout_seconds,
        "addresses": dict(addresses or {}),
        "ca_file": os.fspath(ca_file) if ca_file is not None else "",
    }
    answer = _in_process_of_its_own(job)
    if answer["undecided"]:
        raise BindingProbeError("; ".join(answer["undecided"]))
    return {url: frozenset(names) for url, names in answer["listening"].items()}


def _in_process_of_its_own(job: Mapping[str, Any]) -> dict[str, Any]:
    # This very package, not whatever is called `sidecar` in the working directory (-P).
    package = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "sidecar.probe_job"],
            input=json.dumps(job).encode(),
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except (OSError, TypeError, ValueError) as error:
        raise BindingProbeError(f"the probes could not be started: {error}") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode != 0 or not isinstance(answer, dict):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise BindingProbeError(f"the probes could not run: {reason}")
    return answer
