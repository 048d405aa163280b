"""The JSON of a card: guards, member names, and text that may be shown."""

from __future__ import annotations

import json
import re
from typing import TypeAlias, TypeGuard, cast

MAX_DEPTH = 64
"""Nested arrays and objects that a card may have, the card itself included."""
MAX_SHOWN = 200
"""Characters of a card's text that are quoted in a reason."""

JsonObject: TypeAlias = dict[str, object]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A pair of surrogates, a lone one, or any other escape: only a lone one is changed.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_MAX_SCHEMES = 64


class CardError(ValueError):
    """A card that cannot be read at all. The text is a sentence, and quotes nothing of the card."""


def card_text(data: bytes) -> bytes:
    """`data` as text that strict parsers take: no byte order mark, lone surrogates replaced.

    Raises CardError for bytes that are not UTF-8.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode()
    except UnicodeDecodeError:
        raise CardError("the card is not UTF-8 text") from None
    if _SURROGATE.search(data) is None:
        return data
    return _ESCAPE.sub(lambda found: b"\\ufffd" if found["lone"] else found[0], data)


def load_object(data: bytes) -> JsonObject:
    """The JSON object that `data` is, nested at most `MAX_DEPTH` deep. Raises CardError."""
    text = card_text(data)
    try:
        # from a str, because bytes would have their encoding guessed
        value = json.loads(text.decode(), parse_int=_small_int, parse_constant=_no_constant)
    except RecursionError:
        raise CardError(f"the card is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise CardError(_not_json(text)) from None
    if not is_object(value):
        raise CardError("the card is not a JSON object")
    # The containers of one level of nesting after another; a hostile card has many.
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if is_object(parent) else cast("list[object]", parent))
            if type(child) is dict or type(child) is list
        ]
    if level:
        raise CardError(f"the card is nested deeper than {MAX_DEPTH} levels")
    return value


def _small_int(digits: str) -> float:
    # int() refuses very long texts, and nothing here needs their value
    return int(digits) if len(digits) < 20 else float(digits)


def _no_constant(name: str) -> object:
    raise ValueError(name)


def _not_json(text: bytes) -> str:
    start = text.lstrip()[:1]
    if not start:
        return "the card is empty"
    return "the card is not JSON" + (" (it looks like a web page)" if start == b"<" else "")


def is_object(value: object) -> TypeGuard[JsonObject]:
    """Whether a decoded value is a JSON object."""
    return isinstance(value, dict)


def as_object(value: object) -> JsonObject:
    """`value` if it is a JSON object, else one without members."""
    return value if is_object(value) else {}


def _snake(name: str) -> str:
    return re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name)


def has_member(members: JsonObject, name: str) -> bool:
    """Whether the member is there in either spelling, its value null or not."""
    return name in members or _snake(name) in members


def member(members: JsonObject, name: str) -> object:
    """The value of the member `name` (lowerCamelCase), else of its snake_case spelling, else None."""
    return members[name] if name in members else members.get(_snake(name))


def shown_text(value: object) -> str:
    """A card's string as it may be shown: on one line, not too long; '' for anything else."""
    if not isinstance(value, str):
        return ""
    text = value if value.isprintable() else ascii(value)[1:-1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def credential_headers(schemes: JsonObject) -> frozenset[str]:
    """Header names of the apiKey schemes, in the form of 1.0 or of OpenAPI (0.3)."""
    names = set()
    for scheme in list(schemes.values())[:_MAX_SCHEMES]:
        members = as_object(scheme)
        api_key = member(members, "apiKeySecurityScheme")
        if is_object(api_key):
            place, name = member(api_key, "location"), member(api_key, "name")
        elif members.get("type") == "apiKey":
            place, name = members.get("in"), members.get("name")
        else:
            continue
        if place == "header" and isinstance(name, str) and _HEADER_NAME.fullmatch(name):
            names.add(name.lower())
    return frozenset(names)
