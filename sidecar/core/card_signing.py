"""What the signatures of a card cover (A2A 8.4): its canonical forms, ready to be verified.

The specification and the official SDK disagree on one thing: what becomes of members that are
required and empty. The specification keeps them, the SDK (1.3) removes everything that is empty, at
any depth. Others sign the JSON as it stands. All three are forms of one card, and a signature over
any of them covers every member that a client may act on: members that version 1.0 does not have are
outside of the first two.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import rfc8785

from sidecar.core.card_json import CardError, card_text, load_object

MAX_SIGNATURES = 8
"""Signatures of a card that are looked at."""

# Section 4.4 of the specification: members by message. `!` is required, `?` has presence (an
# explicit default counts), `[]` is a list, `{}` a map; after the colon the message of the value,
# `*` for any JSON.
_MESSAGES = {
    "AgentCard": (
        "name! description! supportedInterfaces[]!:AgentInterface provider:AgentProvider version!"
        " documentationUrl? capabilities!:AgentCapabilities securitySchemes{}:SecurityScheme"
        " securityRequirements[]:SecurityRequirement defaultInputModes[]! defaultOutputModes[]!"
        " skills[]!:AgentSkill iconUrl?"
    ),
    "AgentInterface": "url! protocolBinding! tenant protocolVersion!",
    "AgentProvider": "url! organization!",
    "AgentCapabilities": (
        "streaming? pushNotifications? extensions[]:AgentExtension extendedAgentCard?"
    ),
    "AgentExtension": "uri description required params:*",
    "AgentSkill": (
        "id! name! description! tags[]! examples[] inputModes[] outputModes[]"
        " securityRequirements[]:SecurityRequirement"
    ),
    "SecurityRequirement": "schemes{}:StringList",
    "StringList": "list[]",
    "SecurityScheme": (
        "apiKeySecurityScheme:APIKeySecurityScheme httpAuthSecurityScheme:HTTPAuthSecurityScheme"
        " oauth2SecurityScheme:OAuth2SecurityScheme"
        " openIdConnectSecurityScheme:OpenIdConnectSecurityScheme"
        " mtlsSecurityScheme:MutualTlsSecurityScheme"
    ),
    "APIKeySecurityScheme": "description location! name!",
    "HTTPAuthSecurityScheme": "description scheme! bearerFormat",
    "OAuth2SecurityScheme": "description flows!:OAuthFlows oauth2MetadataUrl",
    "OpenIdConnectSecurityScheme": "description openIdConnectUrl!",
    "MutualTlsSecurityScheme": "description",
    "OAuthFlows": (
        "authorizationCode:AuthorizationCodeOAuthFlow clientCredentials:ClientCredentialsOAuthFlow"
        " implicit:ImplicitOAuthFlow password:PasswordOAuthFlow deviceCode:DeviceCodeOAuthFlow"
    ),
    "AuthorizationCodeOAuthFlow": "authorizationUrl! tokenUrl! refreshUrl scopes{}! pkceRequired",
    "ClientCredentialsOAuthFlow": "tokenUrl! refreshUrl scopes{}!",
    "ImplicitOAuthFlow": "authorizationUrl refreshUrl scopes{}",
    "PasswordOAuthFlow": "tokenUrl refreshUrl scopes{}",
    "DeviceCodeOAuthFlow": "deviceAuthorizationUrl! tokenUrl! refreshUrl scopes{}!",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of a message of the card."""

    name: str
    message: str
    """Of the value or its items; '' for plain values, ``*`` for any JSON."""
    repeated: bool
    mapped: bool
    required: bool
    presence: bool


_MEMBER = re.compile(r"(\w+?)(\[\]|\{\})?([!?])?(?::(\S+))?")


def _member(text: str) -> Member:
    found = _MEMBER.fullmatch(text)
    assert found is not None  # the table above
    name, shape, mark, message = found.groups()
    return Member(
        name=name,
        message=message or "",
        repeated=shape == "[]",
        mapped=shape == "{}",
        required=mark == "!",
        presence=mark == "?",
    )


SCHEMA: dict[str, tuple[Member, ...]] = {
    message: tuple(_member(text) for text in members.split())
    for message, members in _MESSAGES.items()
}
"""The messages of a 1.0 card, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCard:
    """A card's signatures, and the bytes that they may be over."""

    signatures: tuple[tuple[str, str], ...]
    """``(protected, signature)`` each, in base64url as they stand; '' for what is no string."""
    forms: tuple[bytes, ...]
    """Canonical forms (RFC 8785): the specification's, the SDK's, the JSON as it stands."""


def signed_card(data: bytes) -> SignedCard:
    """Read the signatures of the card `data` and what they cover; raises CardError.

    A card in which a member stands twice, or in two spellings, is refused: readers would differ on
    what was signed. One without `supportedInterfaces` has only the form that covers all of it.
    """
    load_object(data)  # raises for what is no card, and for what is nested too deeply
    card = json.loads(card_text(data).decode(), object_pairs_hook=_unique, parse_int=float)
    signatures = card.pop("signatures", None)
    entries = signatures[:MAX_SIGNATURES] if isinstance(signatures, list) else []
    forms: list[bytes] = []
    if card.get("supportedInterfaces") or card.get("supported_interfaces"):
        forms.append(_canonical(_message("AgentCard", card, keep_required=True)))
        plain = _without_empty(_message("AgentCard", card, keep_required=False))
        forms.append(_canonical(plain if plain is not None else {}))
    forms.append(_canonical(card))
    return SignedCard(
        signatures=tuple(_signature(entry) for entry in entries), forms=tuple(dict.fromkeys(forms))
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CardError("a member of the card stands twice, so that its signature says nothing")
    return members


def _signature(entry: object) -> tuple[str, str]:
    if not isinstance(entry, dict):
        return "", ""
    protected, signature = entry.get("protected"), entry.get("signature")
    return (
        protected if isinstance(protected, str) else "",
        signature if isinstance(signature, str) else "",
    )


def _canonical(value: object) -> bytes:
    try:
        return rfc8785.dumps(value)  # type: ignore[arg-type] # JSON, as it was read
    except rfc8785.CanonicalizationError as error:
        raise CardError(f"the card has no canonical form: {error}") from None


# --- the members of version 1.0 -----------------------------------------------------------------


def _message(name: str, value: Any, *, keep_required: bool) -> Any:  # noqa: ANN401 - JSON
    """`value` with the members that message `name` has, defaults left out (section 8.4.1)."""
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for member in SCHEMA[name]:
        found = _found(value, member.name)
        if found is None:
            if keep_required and member.required and not _is_single_message(member):
                kept[member.name] = [] if member.repeated else {} if member.mapped else ""
            continue
        converted = _value(member, found, keep_required=keep_required)
        counts = member.presence or _is_single_message(member)
        if counts or (keep_required and member.required) or not _is_default(converted):
            kept[member.name] = converted
    return kept


def _found(members: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - JSON
    """The member in either spelling that ProtoJSON takes; null is absent."""
    snake = re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name)
    if snake != name and name in members and snake in members:
        raise CardError(f"{name} stands in two spellings, so that the signature says nothing")
    return members[name] if name in members else members.get(snake)


def _is_single_message(member: Member) -> bool:
    return bool(member.message) and not member.repeated and not member.mapped


def _value(member: Member, value: Any, *, keep_required: bool) -> Any:  # noqa: ANN401 - JSON
    if member.message in {"", "*"}:
        return value
    if member.repeated and isinstance(value, list):
        return [_message(member.message, item, keep_required=keep_required) for item in value]
    if member.mapped and isinstance(value, dict):
        return {
            key: _message(member.message, item, keep_required=keep_required)
            for key, item in value.items()
        }
    return _message(member.message, value, keep_required=keep_required)


def _is_default(value: object) -> bool:
    return value is False or value in ("", [], {})


def _without_empty(value: Any) -> Any:  # noqa: ANN401 - JSON
    """`value` without empty strings, lists and objects, and null: None when nothing is left."""
    match value:
        case dict():
            members = {key: _without_empty(item) for key, item in value.items()}
            return {key: item for key, item in members.items() if item is not None} or None
        case list():
            items = [_without_empty(item) for item in value]
            return [item for item in items if item is not None] or None
        case "":
            return None
        case _:
            return value
