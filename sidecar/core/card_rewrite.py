"""Agent cards, rewritten so that whoever follows them literally comes to this sidecar.

Members that need no change keep their bytes: unknown ones, the order of all, the spelling of
numbers. Readers differ in what they take for a member's name (ProtoJSON also snake_case, some
parsers any case), so every spelling of a rewritten member is replaced or removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sidecar.core.card_json import card_text, load_object
from sidecar.core.spec import Binding, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_VERSION = str(Version.V1_0)
_REQUIREMENTS = ("securityRequirements", "security")


@dataclass(frozen=True, slots=True)
class Served:
    """An interface of this sidecar, as it stands in the cards that it serves."""

    binding: Binding
    url: str
    """Absolute; of a gRPC listener ``HOST:PORT``."""
    tenant: str = ""
    """The agent's name on a gRPC listener that serves several agents."""


def rewrite_card(
    data: bytes,
    served: Sequence[Served],
    *,
    security_schemes: Mapping[str, object] | None = None,
    streaming: bool = True,
    push_notifications: bool = True,
    extended_card: bool = True,
) -> bytes:
    """The card `data` with `served` as its only interfaces, in this order. Raises CardError.

    Legacy members (`url` and its kin) are replaced where the card had them, signatures are removed.
    `security_schemes`, in the form of 1.0, is what the local side asks for: one of them, or nothing
    when there are none. A capability whose flag is False is not offered; True leaves it as it is.
    """
    load_object(data)  # raises for what the decoders here would refuse
    card = _Object(_MEMBERS.decode(card_text(data)))
    card.set("supportedInterfaces", [_interface(each) for each in served])
    _rewrite_legacy(card, [each for each in served if not each.tenant])
    card.remove("signatures")
    _rewrite_security(card, dict(security_schemes or {}))
    offers = {
        "streaming": streaming,
        "pushNotifications": push_notifications,
        "extendedAgentCard": extended_card,
    }
    _rewrite_capabilities(card, [name for name, offered in offers.items() if not offered])
    return msgspec.json.encode(card.members)


class _Object:
    """The members of a JSON object by name, where any spelling of a name is that name."""

    def __init__(self, members: Mapping[str, object]) -> None:
        self.members = dict(members)
        self._spellings: dict[str, list[str]] = {}
        for key in self.members:
            self._spellings.setdefault(_folded(key), []).append(key)

    def has(self, name: str) -> bool:
        return _folded(name) in self._spellings

    def get(self, name: str) -> object:
        spellings = self._spellings.get(_folded(name))
        return self.members[spellings[-1]] if spellings else None

    def set(self, name: str, value: object) -> None:
        """One member `name` with this value; it stands where it stood, else at the end."""
        spellings = self._spellings.get(_folded(name), [])
        for key in spellings:
            if key != name:
                del self.members[key]
        self.members[name] = value
        self._spellings[_folded(name)] = [name]

    def remove(self, name: str) -> bool:
        """Whether there was one."""
        spellings = self._spellings.pop(_folded(name), [])
        for key in spellings:
            del self.members[key]
        return bool(spellings)


def _folded(name: str) -> str:
    return name.replace("_", "").casefold()


def _interface(served: Served) -> dict[str, str]:
    entry = {
        "url": served.url,
        "protocolBinding": served.binding.value,
        "protocolVersion": _VERSION,
    }
    if served.tenant:
        entry["tenant"] = served.tenant
    return entry


def _rewrite_legacy(card: _Object, served: Sequence[Served]) -> None:
    """What 0.3 readers look at. It has no tenants, so `served` has none either."""
    if not served:
        for name in ("url", "preferredTransport", "additionalInterfaces"):
            card.remove(name)
    if card.has("url") or card.has("preferredTransport"):
        # An absent preferredTransport means JSONRPC, so the two go together.
        card.set("url", served[0].url)
        card.set("preferredTransport", served[0].binding.value)
    if card.has("additionalInterfaces"):
        entries = [{"url": each.url, "transport": each.binding.value} for each in served]
        card.set("additionalInterfaces", entries)
    if card.has("protocolVersion"):
        card.set("protocolVersion", _VERSION)


def _rewrite_security(card: _Object, schemes: Mapping[str, object]) -> None:
    """Requirements of skills go too: those of the card hold for all of them."""
    legacy = card.has("security")
    if schemes:
        card.set("securitySchemes", schemes)
        card.set("securityRequirements", [{"schemes": {name: {"list": []}}} for name in schemes])
        if legacy:
            card.set("security", [{name: []} for name in schemes])
    else:
        for name in ("securitySchemes", *_REQUIREMENTS):
            card.remove(name)
    skills = _items(card.get("skills"))
    rewritten = [_without(skill, _REQUIREMENTS) for skill in skills]
    if rewritten != skills:
        card.set("skills", rewritten)


def _rewrite_capabilities(card: _Object, withdrawn: Iterable[str]) -> None:
    capabilities = _members(card.get("capabilities"))
    changed = False
    for name in withdrawn:
        if capabilities.has(name):
            capabilities.set(name, value=False)
            changed = True
        if name == "extendedAgentCard" and card.has("supportsAuthenticatedExtendedCard"):
            card.set("supportsAuthenticatedExtendedCard", value=False)
    if changed:
        card.set("capabilities", capabilities.members)


def _items(raw: object) -> list[object]:
    """The items of a raw array; none for anything else."""
    if not isinstance(raw, msgspec.Raw) or not bytes(raw).startswith(b"["):
        return []
    return list(_ITEMS.decode(raw))


def _members(raw: object) -> _Object:
    """The members of a raw object; none for anything else."""
    if not isinstance(raw, msgspec.Raw) or not bytes(raw).startswith(b"{"):
        return _Object({})
    return _Object(_MEMBERS.decode(raw))


def _without(raw: object, names: Iterable[str]) -> object:
    members = _members(raw)
    removed = [name for name in names if members.remove(name)]
    return members.members if removed else raw
