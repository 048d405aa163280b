"""Details of errors: read whatever they hold, renamed where they claim too much, cut to fit."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.error_details import (
    DETAILS_BYTES,
    MESSAGE_BYTES,
    as_object,
    disowned,
    error_info,
    infos_of,
    is_info,
    shortened,
    size_of,
    strings_only,
    told_by,
    trimmed,
    typed_objects,
)

A2A = "a2a-protocol.org"
INFO = error_info("TASK_NOT_FOUND", A2A, {})


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (None, 0),
        (b"null", 0),
        (b"{}", 0),
        (b"[", 0),
        (b'[{"@type":"a"},{"@type":"b","n":1e2}]', 2),
        (b'[{"@type":5},{},7,null,"x",[]]', 0),
        (b'[{"@type":"a","x":"\\ud800"}]', 0),
    ],
)
def test_details_are_objects_with_a_type(raw, count):
    assert len(typed_objects(raw)) == count


def test_details_stay_the_bytes_they_were():
    assert typed_objects(b'[ {"@type":"a", "n":1.50} ]') == (b'{"@type":"a", "n":1.50}',)


@pytest.mark.parametrize(
    ("raw", "expected"), [(b'{"a":1}', {"a": 1}), (b"[]", {}), (b"{", {}), (b"\xff", {})]
)
def test_an_object_or_nothing(raw, expected):
    assert as_object(raw) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("type.googleapis.com/google.rpc.ErrorInfo", True),
        ("google.rpc.ErrorInfo", True),
        ("type.googleapis.com/google.rpc.BadRequest", False),
        ("x/not.google.rpc.ErrorInfo", False),
        ("", False),
    ],
)
def test_an_error_info_is_known_by_its_type(name, expected):
    assert (
        is_info(json.dumps({"@type": name, "reason": "google.rpc.ErrorInfo"}).encode()) is expected
    )


@pytest.mark.parametrize(
    ("infos", "told"),
    [
        ([], ("", "")),
        ([("X", "a"), ("Y", "b")], ("X", "a")),
        ([("X", "a"), ("Y", A2A)], ("Y", A2A)),
        ([("X", "a"), ("TASK_NOT_FOUND", "b")], ("TASK_NOT_FOUND", "b")),
        ([("X", "a"), ("PARSE_ERROR", "")], ("PARSE_ERROR", "")),
    ],
)
def test_the_error_info_that_counts(infos, told):
    details = tuple(error_info(reason, domain, {}) for reason, domain in infos)

    assert infos_of((b'{"@type":"x"}', *details)) == infos
    assert told_by(infos) == told


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("{}", {}),
        ("null", {}),
        ("5", {"metadata": "5"}),
        ('{"a":"b"}', {"a": "b"}),
        (
            '{"a":1,"b":[1,"x"],"c":null,"d":true}',
            {"a": "1", "b": '[1,"x"]', "c": "null", "d": "true"},
        ),
    ],
)
def test_metadata_becomes_strings(metadata, expected):
    raw = INFO.replace(b'"metadata":{}', b'"metadata":' + metadata.encode())

    assert as_object(strings_only(raw))["metadata"] == expected


def test_only_an_error_info_has_metadata():
    assert strings_only(b'{"@type":"x","metadata":5}') == b'{"@type":"x","metadata":5}'


def escaped(text, choices):
    """A JSON string of `text`, some of its characters escaped."""
    forms = ("{}", "\\u{:04x}", "\\u{:04X}")
    return (
        '"'
        + "".join(
            forms[choice].format(c if choice == 0 else ord(c))
            for c, choice in zip(text, choices, strict=False)
        )
        + '"'
    )


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.lists(st.integers(0, 2), min_size=11, max_size=11),
    st.text(" \t\r\n", max_size=2),
    st.text(" \t\r\n", max_size=2),
)
def test_our_domain_is_found_in_every_spelling(name, value, before, after):
    member = f"{escaped('domain', name)}{before}:{after}{escaped('a2a-sidecar', value)}"
    raw = '{"a":[{' + member + '}],"domain":"x"}'
    assert json.loads(raw)["a"][0]["domain"] == "a2a-sidecar"

    assert json.loads(disowned(raw.encode())) == {
        "a": [{"domain": "a2a-sidecar.upstream"}],
        "domain": "x",
    }


@given(st.recursive(st.text() | st.integers(), lambda v: st.dictionaries(st.text(), v)))
def test_everything_else_stays(value):
    raw = json.dumps(value).encode()

    assert disowned(raw) == raw


def on_the_wire(text):
    return len(quote(text, safe="".join(map(chr, range(0x20, 0x7F))).replace("%", "")))


@given(st.text(max_size=85))  # of at most four bytes, each at most three long
def test_a_short_message_stays(text):
    assert shortened(text) == text


@pytest.mark.parametrize("text", ["a" * 1024, "é" * 170, "%" * 341])
def test_a_message_that_just_fits(text):
    assert shortened(text) == text


@pytest.mark.parametrize("text", ["a" * 1025, "é" * 171, "%" * 342, "a€" * 5000])
def test_a_message_that_does_not_fit_is_cut_between_characters(text):
    cut = shortened(text)

    assert cut.endswith("…")
    assert text.startswith(cut[:-1])
    assert on_the_wire(cut) <= MESSAGE_BYTES < on_the_wire(text[: len(cut)] + "…")


def test_a_detail_with_room_stays():
    assert trimmed(INFO, DETAILS_BYTES) is INFO


@given(st.integers(60, 600), st.dictionaries(st.text(max_size=9), st.text(max_size=99)))
def test_a_trimmed_detail_fits_and_tells_what_is_left_out(room, metadata):
    metadata.pop("left-out", None)
    detail = error_info("R", "d", metadata)

    cut = as_object(trimmed(detail, room))["metadata"]

    if size_of("", [detail]) <= room:
        assert cut == metadata
        return
    assert int(cut.pop("left-out")) == len(metadata) - len(cut)
    assert cut.items() <= metadata.items()
    assert size_of("", [trimmed(detail, room)]) <= max(
        room, size_of("", [error_info("R", "d", {"left-out": "000000"})])
    )


def test_what_is_no_error_info_cannot_be_trimmed():
    detail = b'{"@type":"type.googleapis.com/google.rpc.DebugInfo","detail":"%b"}' % (b"x" * 900)

    assert trimmed(detail, 100) is detail
