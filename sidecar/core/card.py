"""Agent cards: lenient reading into ordered candidates, each refusal with its reason.

A card is remote-controlled input. Only its interfaces are read strictly, one by one, so that a bad
one never hides a good one; everything else in it may be odd.

Binding names are compared without case and surrounding whitespace:

=============  ====================================================================
binding        names
=============  ====================================================================
``JSONRPC``    JSONRPC, JSON-RPC, JSON_RPC
``HTTP+JSON``  HTTP+JSON, HTTP_JSON, HTTP-JSON, HTTP/JSON, HTTPJSON, HTTP+JSON/REST,
               REST
``GRPC``       GRPC
=============  ====================================================================

Member names are taken in lowerCamelCase and, as ProtoJSON allows, in snake_case. A member that is
null counts as absent, except `supportedInterfaces`, whose presence alone decides how a card is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sidecar.core.addresses import (
    AddressKind,
    AddressPolicy,
    names_host,
    reaches_loopback,
    same_host,
)
from sidecar.core.card_json import (
    CardError,
    JsonObject,
    as_object,
    credential_headers,
    has_member,
    is_object,
    load_object,
    member,
    shown_text,
)
from sidecar.core.interface_url import Endpoint, UrlError, read_url, same_url, shown_url
from sidecar.core.spec import Binding, Version
from sidecar.core.types import Ineligible, Interface

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "BINDING_NAMES",
    "Card",
    "CardError",
    "CardOrigin",
    "CardPolicy",
    "canonical_binding",
    "read_card",
    "same_candidates",
]

MAX_CANDIDATES = 16
MAX_ENTRIES = 64
"""Entries that are looked at; a card with more is hostile, and reading it takes time."""
MAX_TENANT_BYTES = 256

BINDING_NAMES: dict[str, Binding] = {
    "JSONRPC": Binding.JSONRPC,
    "JSON-RPC": Binding.JSONRPC,
    "JSON_RPC": Binding.JSONRPC,
    "HTTP+JSON": Binding.HTTP_JSON,
    "HTTP_JSON": Binding.HTTP_JSON,
    "HTTP-JSON": Binding.HTTP_JSON,
    "HTTP/JSON": Binding.HTTP_JSON,
    "HTTPJSON": Binding.HTTP_JSON,
    "HTTP+JSON/REST": Binding.HTTP_JSON,
    "REST": Binding.HTTP_JSON,
    "GRPC": Binding.GRPC,
}

_LEGACY = ("url", "preferredTransport", "additionalInterfaces")
_VERSION = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,6}))?(?:\.[0-9]{1,6})*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class _UnfitError(Exception):
    """Why an entry is not eligible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardOrigin:
    """Where a card came from."""

    scheme: Literal["https", "http", "file"]
    host: str
    """'' for a file."""
    kind: AddressKind | None
    """What `host` resolved to. None for a file, and when it is not known (through a proxy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPolicy:
    """What the operator allows the interfaces of a card to be."""

    origin: CardOrigin
    trusted_hosts: frozenset[str]
    prefer: tuple[Binding, ...] = ()
    """Sorts within equal versions; bindings not named come after those that are."""
    own_addresses: frozenset[tuple[str, int]] = frozenset()
    credentials_configured: bool = False

    @property
    def addresses(self) -> AddressPolicy:
        """The address rule of this card, for reading it and for each dial."""
        kind = self.origin.kind
        if kind is None and self.origin.scheme != "file":
            kind = AddressKind.PUBLIC
        return AddressPolicy(kind, self.origin.host, self.trusted_hosts, self.own_addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as it was read."""

    name: str
    candidates: tuple[Interface, ...]
    """Eligible interfaces, in the order in which they are tried. May be empty."""
    ineligible: tuple[Ineligible, ...]
    """By position."""
    warnings: tuple[str, ...] = ()
    contradiction: str = ""
    """How the card contradicts itself about the binding of its `url`; '' if it does not."""
    streaming: bool = False
    push_notifications: bool = False
    extended_card: bool = False
    signed: bool = False
    credential_headers: frozenset[str] = frozenset()
    """Lower-case header names that the card's apiKey schemes declare."""
    data: bytes
    """As received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """An interface as the card declares it, not yet judged."""

    position: int
    url: object
    binding: object
    version: object
    tenant: object = None
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """All interfaces that a card declares, in card order."""

    entries: Sequence[_Entry | Ineligible]
    preferred: str = ""
    """Canonical name of a legacy card's preferredTransport."""
    contradiction: str = ""
    warnings: tuple[str, ...] = ()


def read_card(data: bytes, policy: CardPolicy) -> Card:
    """Read a card. One without any candidate is returned too, with the reasons.

    Raises CardError when it is not a JSON object or declares no interfaces in any form.
    """
    card = load_object(data)
    if has_member(card, "supportedInterfaces"):
        declared = _read_supported(card)
    elif any(has_member(card, name) for name in _LEGACY):
        declared = _read_legacy(card)
    else:
        raise CardError("the card has neither supportedInterfaces nor url")
    eligible, ineligible, unversioned = _judge_all(declared.entries, policy)
    candidates, surplus = _in_order(eligible, declared.preferred, policy.prefer)
    warnings = declared.warnings
    if unversioned:
        listed = ", ".join(map(str, unversioned))
        warnings = (*warnings, f"no protocolVersion for entry {listed}: 1.0 is assumed")
    capabilities = as_object(member(card, "capabilities"))
    return Card(
        name=shown_text(member(card, "name")),
        candidates=candidates,
        ineligible=tuple(sorted([*ineligible, *surplus], key=lambda entry: entry.position)),
        warnings=warnings,
        contradiction=declared.contradiction,
        streaming=member(capabilities, "streaming") is True,
        push_notifications=member(capabilities, "pushNotifications") is True,
        extended_card=member(capabilities, "extendedAgentCard") is True
        or member(card, "supportsAuthenticatedExtendedCard") is True,
        signed=bool(member(card, "signatures")),
        credential_headers=credential_headers(as_object(member(card, "securitySchemes"))),
        data=data,
    )


def same_candidates(one: Card, other: Card) -> bool:
    """Whether two cards have equal candidates in the same order."""
    return [each.identity for each in one.candidates] == [
        each.identity for each in other.candidates
    ]


# --- what a card declares ---------------------------------------------------------------------


def _items(value: object, name: str, first: int) -> tuple[list[object], list[Ineligible]]:
    """The items of the list `name` that are looked at, and what to say about the rest of it."""
    if not isinstance(value, list):
        return [], [_ineligible(first, reason=f"{name} is not a list")]
    if len(value) > MAX_ENTRIES:
        reason = f"too many: of {len(value)} entries only {MAX_ENTRIES} are looked at"
        return value[:MAX_ENTRIES], [_ineligible(first + MAX_ENTRIES, reason=reason)]
    return value, []


def _read_supported(card: JsonObject) -> _Declared:
    """A card with `supportedInterfaces` (section 4.4.6 of the specification)."""
    items, entries = _items(member(card, "supportedInterfaces"), "supportedInterfaces", 0)
    read: list[_Entry | Ineligible] = [
        _Entry(
            position=position,
            url=member(item, "url"),
            binding=member(item, "protocolBinding"),
            version=member(item, "protocolVersion"),
            tenant=member(item, "tenant"),
        )
        if is_object(item)
        else _ineligible(position, reason="the entry is not an object")
        for position, item in enumerate(items)
    ]
    warnings = () if items or entries else ("supportedInterfaces is empty",)
    return _Declared(entries=[*read, *entries], warnings=warnings)


def _read_legacy(card: JsonObject) -> _Declared:
    """A card with `url`, `preferredTransport` and `additionalInterfaces` (specification 0.3).

    `preferredTransport` is a hint over the declared interfaces. It says nothing about `url` while
    another declared interface has that transport: many published cards name in it a transport
    that listens elsewhere.
    """
    version = member(card, "protocolVersion")
    value = member(card, "additionalInterfaces")
    items, surplus = _items([] if value is None else value, "additionalInterfaces", 1)
    additional: list[_Entry | Ineligible] = [
        _Entry(
            position=position,
            url=member(item, "url"),
            binding=member(item, "transport"),
            version=version,
        )
        if is_object(item)
        else _ineligible(position, reason="the entry is not an object")
        for position, item in enumerate(items, start=1)
    ]
    hint = member(card, "preferredTransport")
    stated = isinstance(hint, str) and bool(hint.strip())
    preferred = canonical_binding(hint) if isinstance(hint, str) and stated else "JSONRPC"
    url = member(card, "url")
    binding, assumed = _binding_of_url(url, preferred, additional)
    primary = _Entry(position=0, url=url, binding=binding, version=version, assumed=assumed)
    contradiction = ""
    if binding != preferred and isinstance(url, str):
        contradiction = _contradiction(url, preferred, binding, stated=stated, assumed=assumed)
    return _Declared(
        entries=[primary, *additional, *surplus],
        preferred=preferred,
        contradiction=contradiction,
    )


def _binding_of_url(
    url: object, preferred: str, additional: Iterable[_Entry | Ineligible]
) -> tuple[str, bool]:
    """The binding of a legacy card's `url`, and whether it is only assumed."""
    here: list[str] = []
    elsewhere: set[str] = set()
    for entry in additional:
        if not isinstance(entry, _Entry) or not isinstance(entry.binding, str):
            continue
        name = canonical_binding(entry.binding)
        if isinstance(url, str) and isinstance(entry.url, str) and same_url(entry.url, url):
            here.append(name)
        else:
            elsewhere.add(name)
    if preferred in here or not (here or preferred in elsewhere):
        return preferred, False
    if here:
        return next((name for name in here if name in BINDING_NAMES), here[0]), False
    return Binding.JSONRPC.value, True


def _contradiction(url: str, preferred: str, binding: str, *, stated: bool, assumed: bool) -> str:
    hint = f"the card's preferredTransport {shown_text(preferred)}" + (
        "" if stated else " (the default)"
    )
    where = shown_text(shown_url(url))
    if assumed:
        return (
            f"{hint} is declared elsewhere and nothing is declared at its url {where} "
            f"({binding} is assumed)"
        )
    return f"{hint} is not what is declared at its url {where} ({shown_text(binding)})"


def canonical_binding(name: str) -> str:
    """The official name of a binding, or `name` in upper case when it is not one of ours."""
    upper = name.strip().upper()
    binding = BINDING_NAMES.get(upper)
    return upper if binding is None else binding.value


# --- judging ----------------------------------------------------------------------------------


def _ineligible(
    position: int, *, reason: str, url: object = "", binding: object = ""
) -> Ineligible:
    shown = shown_text(shown_url(url)) if isinstance(url, str) else ""
    return Ineligible(position=position, binding=shown_text(binding), url=shown, reason=reason)


def _judge_all(
    entries: Iterable[_Entry | Ineligible], policy: CardPolicy
) -> tuple[list[Interface], list[Ineligible], list[int]]:
    """Eligible interfaces, ineligible ones, and the positions whose version was assumed."""
    addresses = policy.addresses
    eligible: dict[tuple[object, ...], Interface] = {}
    ineligible: list[Ineligible] = []
    unversioned: list[int] = []
    for entry in entries:
        if isinstance(entry, Ineligible):
            ineligible.append(entry)
            continue
        try:
            interface = _judge(entry, policy, addresses)
            equal = eligible.setdefault(interface.identity, interface)
            if equal is not interface:
                raise _UnfitError(f"same as entry {equal.position}")
        except (_UnfitError, UrlError) as error:
            ineligible.append(
                _ineligible(entry.position, reason=str(error), url=entry.url, binding=entry.binding)
            )
            continue
        if entry.version in (None, ""):
            unversioned.append(entry.position)
    return list(eligible.values()), ineligible, unversioned


def _judge(entry: _Entry, policy: CardPolicy, addresses: AddressPolicy) -> Interface:
    url = entry.url
    if not isinstance(url, str) or not url:
        raise _UnfitError("there is no url" if url in (None, "") else "the url is not a string")
    binding = _binding(entry.binding)
    version = _version(entry.version)
    endpoint = read_url(url, binding)
    tenant = _tenant(entry.tenant)
    _check_address(endpoint, addresses)
    foreign = _is_foreign(endpoint, policy)
    if foreign and policy.credentials_configured:
        raise _UnfitError(
            f"credentials are configured, and {endpoint.host} is neither the card's host "
            "nor named in trusted_hosts"
        )
    _check_plaintext(endpoint, policy)
    return Interface(
        position=entry.position,
        binding=binding,
        version=version,
        url=url,
        tls=endpoint.tls,
        host=endpoint.host,
        port=endpoint.port,
        path=endpoint.path,
        tenant=tenant,
        assumed=entry.assumed,
        refuses_callers_credentials=foreign,
    )


def _binding(value: object) -> Binding:
    if not isinstance(value, str) or not value.strip():
        raise _UnfitError(
            "there is no protocolBinding" if value in (None, "") else "the binding is not a name"
        )
    binding = BINDING_NAMES.get(value.strip().upper())
    if binding is None:
        raise _UnfitError(f"the binding {shown_text(value)} is not supported")
    return binding


def version_number(text: str) -> tuple[int, int] | None:
    """Major and minor of a protocol version, patch ignored; None for what is none."""
    found = _VERSION.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def _version(value: object) -> Version:
    """Major.Minor, patch ignored (section 3.6 of the specification); a missing one is 1.0."""
    if value in (None, ""):
        return Version.V1_0
    number = version_number(value.strip()) if isinstance(value, str) else None
    if number is None:
        raise _UnfitError("the protocol version is not a version number")
    for version in Version:
        if version.value == number:
            return version
    spoken = ", ".join(str(version) for version in Version)
    raise _UnfitError(
        f"protocol version {number[0]}.{number[1]} is not supported; this sidecar speaks {spoken}"
    )


def _tenant(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _UnfitError("the tenant is not a string")
    if len(value.encode()) > MAX_TENANT_BYTES:
        raise _UnfitError(f"the tenant is longer than {MAX_TENANT_BYTES} bytes")
    if value in (".", "..") or _CONTROL.search(value):
        raise _UnfitError("the tenant is not valid: it is '.' or '..', or has control characters")
    return value


def _check_address(endpoint: Endpoint, addresses: AddressPolicy) -> None:
    """The address rule, as far as it can be said without resolving a name."""
    address = "127.0.0.1" if endpoint.host == "localhost" else endpoint.host
    if endpoint.numeric or endpoint.host == "localhost":
        refusal = addresses.refuses(endpoint.host, endpoint.port, address)
        if refusal:
            raise _UnfitError(refusal)


def _check_plaintext(endpoint: Endpoint, policy: CardPolicy) -> None:
    """A card may move neither the traffic of an agent nor configured credentials to plaintext."""
    if endpoint.tls:
        return
    host, origin = endpoint.host, policy.origin
    trusted = names_host(policy.trusted_hosts, host)
    from_loopback = origin.kind in (AddressKind.LOOPBACK, AddressKind.UNSPECIFIED)
    loopback = reaches_loopback(host) or (from_loopback and same_host(host, origin.host))
    if origin.scheme == "https" and not (loopback and (from_loopback or trusted)):
        raise _UnfitError("a card that came over https cannot name a plaintext endpoint")
    if policy.credentials_configured and not (loopback or trusted):
        raise _UnfitError(
            f"credentials are configured, and they may not go to {host} in plaintext "
            "unless trusted_hosts names it"
        )


def _is_foreign(endpoint: Endpoint, policy: CardPolicy) -> bool:
    """Whether no credentials may go there. A card from a file is the operator's own."""
    return policy.origin.scheme != "file" and not (
        same_host(endpoint.host, policy.origin.host)
        or names_host(policy.trusted_hosts, endpoint.host)
    )


def _in_order(
    interfaces: list[Interface], preferred: str, prefer: tuple[Binding, ...]
) -> tuple[tuple[Interface, ...], list[Ineligible]]:
    """Candidates in the order of trial, and those beyond the limit."""
    rank = {binding: place for place, binding in enumerate(dict.fromkeys(prefer))}

    def key(interface: Interface) -> tuple[object, ...]:
        return (
            tuple(-number for number in interface.version.value),
            interface.assumed,
            rank.get(interface.binding, len(rank)),
            bool(preferred) and interface.binding != preferred,
            interface.position,
        )

    ordered = sorted(interfaces, key=key)
    surplus = [
        _ineligible(
            interface.position,
            reason=f"too many: only the first {MAX_CANDIDATES} candidates are used",
            url=interface.url,
            binding=interface.binding.value,
        )
        for interface in ordered[MAX_CANDIDATES:]
    ]
    return tuple(ordered[:MAX_CANDIDATES]), surplus
