"""JSON taken apart and put together: against the json module as the oracle of what a text means."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.payload import (
    MAX_DEPTH,
    MAX_MEMBERS,
    DuplicateMember,
    PayloadError,
    ShapeError,
    check_text,
    get_member,
    join_object,
    json_string,
    parse_string,
    split_array,
    split_object,
    with_member,
)

# --- texts ------------------------------------------------------------------------------------

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
spaces = st.text(" \t\r\n", max_size=2).map(str.encode)
numbers = st.sampled_from(
    [b"0", b"-0", b"1", b"12", b"1.0", b"1.50", b"1e999", b"-2E+07", b"12345678901234567890"]
)


def utf_16_units(text):
    data = text.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


@st.composite
def string_text(draw, text=unicode_text):
    """A JSON string in one of its spellings: raw, escaped, or mixed."""
    value = draw(text)
    return draw(
        st.sampled_from(
            [
                json.dumps(value, ensure_ascii=False).encode(),
                json.dumps(value).encode(),
                b'"%b"' % b"".join(b"\\u%04X" % unit for unit in utf_16_units(value)),
            ]
        )
    )


def containers(values):
    @st.composite
    def array(draw):
        items = draw(st.lists(values, max_size=4))
        return b"[" + b",".join(draw(spaces) + item + draw(spaces) for item in items) + b"]"

    return array() | object_text(values)


@st.composite
def object_text(draw, values, names=unicode_text, unique=True):
    pairs = draw(
        st.lists(
            st.tuples(names, values), max_size=5, unique_by=(lambda p: p[0]) if unique else None
        )
    )
    members = [
        draw(spaces)
        + draw(string_text(st.just(name)))
        + draw(spaces)
        + b":"
        + draw(spaces)
        + value
        + draw(spaces)
        for name, value in pairs
    ]
    return draw(spaces) + b"{" + b",".join(members) + draw(spaces) + b"}" + draw(spaces)


json_text = st.recursive(
    st.sampled_from([b"null", b"true", b"false"]) | numbers | string_text(),
    containers,
    max_leaves=12,
)


# A member's value begins and ends with the value itself.
value_text = json_text.map(lambda text: text.strip(b" \t\r\n"))


def pairs_of(data):
    """Top-level members by the json module, numbers as they are spelled."""
    found: list[tuple[str, object]] = []

    def hook(pairs):
        found[:] = pairs
        return dict(pairs)

    json.loads(data, object_pairs_hook=hook, parse_int=str, parse_float=str)
    return list(found)


def meaning(data):
    return json.loads(data, parse_int=lambda n: ("number", n), parse_float=lambda n: ("number", n))


# --- guards -----------------------------------------------------------------------------------


@given(json_text)
def test_every_json_text_of_ordinary_depth_passes(text):
    check_text(text)


@pytest.mark.parametrize(
    "text",
    [
        b'"\xff"',
        b'{"a":"\xed\xa0\x80"}',
        b'"\xc3',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-16-be"),
        '{"a":1}'.encode("utf-32-le"),
    ],
)
def test_only_utf_8_passes(text):
    with pytest.raises(PayloadError):
        check_text(text)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_bounded(opening, closing):
    def nested(depth):
        return opening * depth + b"1" + closing * depth

    check_text(nested(MAX_DEPTH))
    with pytest.raises(PayloadError, match="500 levels"):
        check_text(nested(MAX_DEPTH + 1))
    with pytest.raises(PayloadError):
        check_text(opening * 100_000)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[],{}," * 1000 + b"1]",
        b'["' + b"[{" * 1000 + b'"]',
        b'["' + b'\\"[' * 1000 + b'"]',
        b'["\\\\",' + b"[]," * 1000 + b'"' + b'[\\\\\\"{' * 1000 + b'"]',
    ],
    ids=["wide", "in a string", "after escaped quotes", "after escaped backslashes"],
)
def test_brackets_that_do_not_nest_are_not_counted(text):
    json.loads(text)
    check_text(text)


def test_depth_after_a_string_that_ends_in_a_backslash_is_counted():
    text = b'["\\\\",' + b"[" * 600 + b"]" * 600 + b"]"
    json.loads(text)
    with pytest.raises(PayloadError):
        check_text(text)


@given(json_text, st.integers(0, 3))
def test_depth_is_that_of_the_parsed_value(text, short):
    def depth(value):
        if isinstance(value, dict):
            return 1 + max(map(depth, value.values()), default=0)
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    wrapped = MAX_DEPTH - depth(json.loads(text)) + 1 - short
    text = b"[" * wrapped + text + b"]" * wrapped
    if short:
        check_text(text)
    else:
        with pytest.raises(PayloadError):
            check_text(text)


# --- taking apart -----------------------------------------------------------------------------


@given(object_text(json_text))
def test_split_gives_the_members_in_their_own_bytes(text):
    members = split_object(text)
    assert list(members) == [name for name, _ in pairs_of(text)]
    assert all(value in text for value in members.values())
    assert {name: meaning(value) for name, value in members.items()} == meaning(text)
    # Taken in order, the values leave only names and punctuation behind.
    place = 0
    for value in members.values():
        place = text.index(value, place)
    assert all(value.strip() == value for value in members.values())


@given(st.dictionaries(unicode_text, value_text, max_size=6))
def test_join_then_split_is_the_same(members):
    joined = join_object(members)
    assert split_object(joined) == members
    assert list(split_object(joined)) == list(members)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"id":12345678901234567890}', b"12345678901234567890"),
        (b'{"id":1.0}', b"1.0"),
        (b'{ "id" : 1e999 }', b"1e999"),
        (b'{"id":{"b":1,"a" :2}}', b'{"b":1,"a" :2}'),
        (b'{"id":"\\u0061\\/"}', b'"\\u0061\\/"'),
        (b'{"\\u0069d":-0}', b"-0"),
    ],
)
def test_spelling_is_kept(text, value):
    assert split_object(text) == {"id": value}
    assert get_member(text, "id") == value
    assert get_member(text, "other") is None


@given(object_text(json_text, names=st.sampled_from(["a", "b", "ab", "é", ""]), unique=False))
def test_a_repeated_member_is_refused_and_nothing_else(text):
    names = [name for name, _ in pairs_of(text)]
    repeated = {name for name in names if names.count(name) > 1}
    if not repeated:
        assert list(split_object(text)) == names
        return
    with pytest.raises(DuplicateMember) as caught:
        split_object(text)
    told = str(caught.value).removeprefix("the member ").removesuffix(" appears twice")
    assert json.loads(told) in repeated


@pytest.mark.parametrize(
    "text",
    [
        b'{"tenant":1,"tenant":1}',
        b'{"tenant":1,"tenant":12}',
        b'{"tenant":12,"tenant":1}',
        b'{"tenant":1,"\\u0074enant":2}',
        b'{"tenant":1, "b":2, "tenant":3}',
        b'{"tenant":1, "tenant":1, "b":1}',
        b'{"b":2,"tenant":{"b":1},"tenant":{"b":1}}',
        # the last value looks like the beginning of the first one
        b'{"tenant":{"q": 1, "b": 2}, "b": 3, "tenant":1234567}',
    ],
)
def test_duplicates_are_named(text):
    with pytest.raises(DuplicateMember, match=r'"(t|\\u0074)enant" appears twice'):
        split_object(text)
    with pytest.raises(DuplicateMember):
        get_member(text, "b")
    with pytest.raises(DuplicateMember):
        with_member(text, "tenant", None)


def test_duplicates_inside_values_are_not_looked_at():
    assert split_object(b'{"a":{"x":1,"x":2}}') == {"a": b'{"x":1,"x":2}'}


MALFORMED = [
    b"",
    b" ",
    b"{",
    b'{"jsonrpc":',
    b'{"a":1}}',
    b'{"a":1}x',
    b'{"a":1,}',
    b"{,}",
    b'{"a"}',
    b'{"a":01}',
    b'{"a":1.}',
    b'{"a":.5}',
    b'{"a":+1}',
    b'{"a":-}',
    b'{"a":1e}',
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":tru}',
    b'{"a":"\x01"}',
    b'{"a":"\n"}',
    b'{"a":"\\x"}',
    b'{"a":"\\u12"}',
    b'{"a":[1,]}',
    b'{"a":{"b":1,}}',
    b'{"a":{b:1}}',
    b"{'a':1}",
    b'{"a":1 2}',
    b'{"a":\x0c1}',
    b'{"a":1}\x00',
    b'{"\xff":1}',
    b"\xef\xbb\xbf{}",
    b'{"a":' + b"[" * 100_000,
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_objects_are_refused(text):
    with pytest.raises(PayloadError) as caught:
        split_object(text)
    assert not isinstance(caught.value, ShapeError)


@pytest.mark.parametrize("text", [b"[]", b"[1]", b"1", b'"a"', b"null", b"true"])
def test_other_values_than_objects_are_told_apart_from_malformed_text(text):
    with pytest.raises(ShapeError, match="not an object"):
        split_object(text)


def test_numbers_of_any_length_are_moved():
    digits = b"9" * 5000
    assert split_object(b'{"id":' + digits + b"}") == {"id": digits}


def test_errors_quote_no_values():
    with pytest.raises(PayloadError) as caught:
        split_object(b'{"bearer":"secret-value",}')
    assert "secret" not in str(caught.value)


@given(st.binary(max_size=40) | json_text.map(lambda text: text[:-1]))
def test_whatever_is_accepted_is_json(data):
    try:
        members = split_object(data)
    except PayloadError:
        return
    assert isinstance(json.loads(data.decode(errors="replace")), dict)
    for value in members.values():
        json.loads(value.decode(errors="replace"))


@given(st.lists(st.tuples(spaces, json_text, spaces), max_size=5), spaces)
def test_split_array_gives_the_items_in_their_own_bytes(items, space):
    text = space + b"[" + b",".join(b"".join(item) for item in items) + b"]" + space
    assert split_array(text) == [item.strip(b" \t\r\n") for _, item, _ in items]


@pytest.mark.parametrize("text", [b"{}", b"1", b"[1", b"[1,]", b"", b"[" * 100_000])
def test_split_array_refuses_other_text(text):
    with pytest.raises(PayloadError):
        split_array(text)


# --- changing one member ----------------------------------------------------------------------


@given(object_text(json_text, names=st.sampled_from(["tenant", "a", "é", "tenan"])), value_text)
def test_setting_a_member_changes_only_that(text, value):
    before = split_object(text)
    changed = with_member(text, "tenant", value)
    after = split_object(changed)
    assert after == before | {"tenant": value}
    assert list(after) == list(before | {"tenant": value})
    if "tenant" in before:
        assert with_member(changed, "tenant", before["tenant"]) == text
    else:
        assert with_member(changed, "tenant", None) == text


@given(object_text(json_text, names=st.sampled_from(["tenant", "a", "é", "tenan"])))
def test_removing_a_member_changes_only_that(text):
    before = split_object(text)
    changed = with_member(text, "tenant", None)
    assert list(split_object(changed).items()) == [
        (name, value) for name, value in before.items() if name != "tenant"
    ]
    if "tenant" not in before:
        assert changed == text


@pytest.mark.parametrize(
    ("text", "value", "result"),
    [
        (b"{}", b"1", b'{"t":1}'),
        (b" { } ", b"1", b' {"t":1 } '),
        (b'{ "a" : 1.0 }', b"2", b'{ "a" : 1.0,"t":2 }'),
        (b'{"t" : 1 , "a": 2}', b"3", b'{"t" : 3 , "a": 2}'),
        (b'{"t":1}', None, b"{}"),
        (b'{"t":1,"a":2}', None, b'{"a":2}'),
        (b'{"a":2,"t":1}', None, b'{"a":2}'),
        (b'{"a":2, "t":1 , "b" :3}', None, b'{"a":2 , "b" :3}'),
        (b'{"\\u0074":1,"a":2}', b"3", b'{"\\u0074":3,"a":2}'),
        (b'{"a":"t","b":{"t":1}}', None, b'{"a":"t","b":{"t":1}}'),
    ],
)
def test_with_member_byte_for_byte(text, value, result):
    assert with_member(text, "t", value) == result


# --- strings ----------------------------------------------------------------------------------


@given(unicode_text)
def test_strings_round_trip(text):
    assert json.loads(json_string(text)) == text
    assert parse_string(json_string(text)) == text
    assert parse_string(json.dumps(text).encode()) == text


@pytest.mark.parametrize(
    "raw",
    [
        *(b"1", b"null", b"", b'"', b"a", b'"a" "b"', b'"\n"', b'["a"]', b'"\xff"'),
        *(b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\u0041"', b'"\xed\xa0\x80"'),
    ],
)
def test_what_is_not_a_string_is_refused(raw):
    with pytest.raises(PayloadError):
        parse_string(raw)


def test_a_surrogate_pair_is_one_character():
    assert parse_string(b'"\\ud83d\\ude00"') == "\U0001f600"


def test_a_lone_surrogate_cannot_be_written():
    with pytest.raises(PayloadError, match="surrogate"):
        json_string("\ud800")
    with pytest.raises(PayloadError, match="surrogate"):
        join_object({"\ud800": b"1"})


# --- cost -------------------------------------------------------------------------------------


def test_objects_have_a_bound_on_their_members():
    def text(count):
        return b"{" + b", ".join(b'"%d": 1' % n for n in range(count)) + b"}"

    assert len(split_object(text(MAX_MEMBERS))) == MAX_MEMBERS
    with pytest.raises(PayloadError, match="more than 10000 members"):
        split_object(text(MAX_MEMBERS + 1))


@pytest.mark.parametrize(
    "text",
    [
        b'{ "a":"' + b"\\n[" * 4_000_000 + b'"}',
        b'{ "' + b"\\n" * 4_000_000 + b'":1}',
        b'{ "a":[' + b"[]," * 1_000_000 + b"1]}",
        b"[" * 2_000_000,
    ],
    ids=["long value", "long name", "many brackets", "deep"],
)
def test_cost_is_linear(text):
    """Megabytes in seconds on any machine; anything quadratic would take hours."""
    begin = time.perf_counter()
    for function in (check_text, split_object):
        try:
            function(text)
        except PayloadError:
            assert text.startswith(b"[")
    assert time.perf_counter() - begin < 20
