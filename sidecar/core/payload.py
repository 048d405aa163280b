"""JSON texts as raw bytes: guards, the members of an object, one member changed.

Values are moved, never re-modelled: what a value looks like in bytes (the spelling of a number, the
order of keys, escapes) is what comes out again. Nothing here knows what A2A is.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")

MAX_DEPTH = 500
"""Nested arrays and objects that a text may have."""

MAX_MEMBERS = 10_000
"""Members that an object which is taken apart may have. No message has a hundred; each one costs
microseconds, and a text of a few megabytes can have a million."""

_BOM = b"\xef\xbb\xbf"


class PayloadError(ValueError):
    """Bytes that are not in the form they claim. The text is for a person, and quotes no values."""


class ShapeError(PayloadError):
    """Not the kind of JSON value that was asked for, though nothing malformed was met."""


class DuplicateMember(ShapeError):
    """An object has two members of one name; parsers disagree on which one counts."""


# --- JSON: guards -----------------------------------------------------------------------------

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def check_text(data: bytes) -> None:
    """Refuse what no JSON parser should be given; well-formedness is not looked at.

    Raises PayloadError for bytes that are not UTF-8 (UTF-16, UTF-32 and a byte order mark are not
    accepted, RFC 8259 section 8.1) and for more than `MAX_DEPTH` nested arrays and objects.
    """
    if not data.isascii():
        if data.startswith(_BOM):
            raise PayloadError("the text begins with a byte order mark")
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise PayloadError(f"the text is not UTF-8 (byte {error.start})") from None
    if b"\0" in data[:4]:
        raise PayloadError("the text is not UTF-8")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise PayloadError(f"the text is nested more than {MAX_DEPTH} levels deep")


def _depth(data: bytes) -> int:
    """Levels of nesting, in a few passes of C over the bytes: a call's text may have millions."""
    if b"\\" in data:
        # Escapes go first, pairs before quotes, so that every quote left is the end of a string.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = data.translate(None, _NOT_STRUCTURE).split(b'"')[::2]
    steps = b"".join(outside_strings).translate(_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


# --- JSON: members ----------------------------------------------------------------------------

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_ENCODER = msgspec.json.Encoder()

# Possessive, so that a name made of a million escapes leaves no million places to come back to.
_NAME = re.compile(rb'[ \t\r\n]*("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_AFTER = re.compile(rb"[ \t\r\n]*([,}])")


def split_object(data: bytes) -> dict[str, bytes]:
    """The members of one JSON object, in order, each value in the bytes it was written in.

    Raises PayloadError when anything in `data` is malformed, ShapeError when it is not an object and
    DuplicateMember when this object (not one inside it) has a member twice. Values are not checked
    to be UTF-8: `check_text` does that.
    """
    return {name: data[start:end] for name, (start, end) in _spans(data).items()}


def get_member(data: bytes, name: str) -> bytes | None:
    """The value of one member of an object, or None. Errors are those of `split_object`."""
    span = _spans(data).get(name)
    return None if span is None else data[span[0] : span[1]]


def with_member(data: bytes, name: str, value: bytes | None) -> bytes:
    """`data` with one member set to `value`, or without it; all other bytes stay as they are.

    A new member comes last. Errors are those of `split_object`.
    """
    spans = _spans(data)
    span = spans.get(name)
    if value is None:
        return data if span is None else _without(data, spans, name)
    if span is not None:
        return b"".join((data[: span[0]], value, data[span[1] :]))
    member = b"%b:%b" % (json_string(name), value)
    if not spans:
        place = data.index(b"{") + 1
        return b"".join((data[:place], member, data[place:]))
    _, place = next(reversed(spans.values()))
    return b"".join((data[:place], b",", member, data[place:]))


def _without(data: bytes, spans: dict[str, tuple[int, int]], name: str) -> bytes:
    """One comma goes with the member: the one before it, or for the first member the one after."""
    begin = data.index(b"{") + 1
    names = list(spans)
    place = names.index(name)
    _, end = spans[name]
    if place > 0:
        _, begin = spans[names[place - 1]]
    elif len(names) > 1:
        end = data.index(b",", end) + 1
    return data[:begin] + data[end:]


def join_object(members: Mapping[str, bytes]) -> bytes:
    """One compact JSON object of these members, in order; `members` maps names to JSON texts."""
    return b"{%b}" % b",".join(
        [b"%b:%b" % (json_string(name), value) for name, value in members.items()]
    )


def split_array(data: bytes) -> list[bytes]:
    """The items of one JSON array as they were written. Errors are those of `split_object`."""
    return [bytes(item) for item in _decode(_ITEMS, data, "an array")]


def json_string(text: str) -> bytes:
    """The JSON text of a string. Raises PayloadError for a lone surrogate, which has no UTF-8."""
    try:
        return _ENCODER.encode(text)
    except UnicodeEncodeError:
        raise PayloadError("the string has a lone surrogate") from None


def parse_string(raw: bytes) -> str:
    """The string that a JSON text is. Raises PayloadError for anything else, lone surrogates too."""
    return _decode(_STRING, raw, "a string")


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes, wanted: str) -> _T:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise ShapeError(f"the JSON value is not {wanted}") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise PayloadError(f"malformed JSON: {reason}") from None
    except RecursionError:
        raise PayloadError("the text is nested too deeply") from None


def _spans(data: bytes) -> dict[str, tuple[int, int]]:
    """Where the value of each member begins and ends.

    The parser gives the values' lengths, and keeps the last of two members of one name. Without
    white space and escaped names the lengths add up to that of `data` exactly when nothing was
    dropped, since every other way of writing the same members, or more of them, is longer. Then the
    places are sums; otherwise the text is walked, a member at a time.
    """
    members = _decode(_MEMBERS, data, "an object")
    if len(members) > MAX_MEMBERS:
        raise PayloadError(f"an object has more than {MAX_MEMBERS} members")
    spans = {}
    end = 0
    for name, value in members.items():
        start = end + len(name) + 4  # a brace or comma, two quotes, a colon
        end = start + len(value)
        spans[name] = (start, end)
    return spans if end + 1 == len(data) else _walk(data, members)


def _walk(data: bytes, members: dict[str, msgspec.Raw]) -> dict[str, tuple[int, int]]:
    """The same for any well-formed text: every member must stand where the dictionary has it."""
    spans: dict[str, tuple[int, int]] = {}
    place = data.index(b"{") + 1
    more = bool(members)
    for name, value in members.items():
        found = _NAME.match(data, place)
        if found is None or (
            found[1] != b'"%b"' % name.encode() and parse_string(found[1]) != name
        ):
            raise _duplicate(data, place)
        start = found.end()
        end = start + len(value)
        after = _AFTER.match(data, end)
        # A number may be the beginning of another, so what follows counts too.
        if after is None or not data.startswith(bytes(value), start):
            raise _duplicate(data, place)
        spans[name] = (start, end)
        place = after.end()
        more = after[1] == b","
    if more:
        raise _duplicate(data, place)
    return spans


def _duplicate(data: bytes, place: int) -> DuplicateMember:
    """The member at `place` is dropped from the dictionary, or has the value of a later one there."""
    found = _NAME.match(data, place)
    name = b"" if found is None else found[1][:100]
    return DuplicateMember(f"the member {name.decode(errors='replace')} appears twice")
