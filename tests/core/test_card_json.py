"""The JSON of a card."""

import json

import pytest

from sidecar.core.card_json import (
    CardError,
    card_text,
    credential_headers,
    load_object,
    member,
    shown_text,
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the card is empty"),
        (b" \r\n", "the card is empty"),
        (b"<html>sign in</html>", r"the card is not JSON \(it looks like a web page\)"),
        (b"\n <!doctype html>", r"the card is not JSON \(it looks like a web page\)"),
        (b"{", "the card is not JSON$"),
        (b'{"a":NaN}', "the card is not JSON$"),
        (b'{"a":-Infinity}', "the card is not JSON$"),
        (b'{"a":1}x', "the card is not JSON$"),
        (b"[]", "the card is not a JSON object"),
        (b"null", "the card is not a JSON object"),
        ("{}".encode("utf-16-le"), "the card is not JSON$"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "the card is not JSON$"),
        (b'"card"', "the card is not a JSON object"),
        (b'{"a":"\xff"}', "the card is not UTF-8 text"),
        ('{"a":1}'.encode("utf-16"), "the card is not UTF-8 text"),
        (b'{"a":' * 100_000, "nested deeper than 64 levels"),
        (b"[" * 65 + b"]" * 65, "the card is not a JSON object"),
    ],
)
def test_what_is_no_card(data, reason):
    with pytest.raises(CardError, match=reason):
        load_object(data)


@pytest.mark.parametrize(("open_", "close"), [(b"[", b"]"), (b'{"b":', b"}")])
def test_depth_counts_the_card_itself(open_, close):
    inner = b"0" if open_ != b"[" else b""
    deep = b'{"a":' + open_ * 63 + inner + close * 63 + b"}"
    assert load_object(deep)
    deeper = b'{"a":' + open_ * 64 + inner + close * 64 + b"}"
    with pytest.raises(CardError, match="nested deeper than 64"):
        load_object(deeper)


@pytest.mark.parametrize(
    "value",
    ["1e999", "-1e999", "1" * 5000, "-" + "9" * 30, '"\\ud800"', '"\\udc00\\ud800"', '"\x7f"'],
)
def test_odd_values_do_no_harm(value):
    card = load_object(f'{{"a":{value},"b":1}}'.encode())
    assert card["b"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\uD83D"', "\ufffd"),
        (r'"\ude00\ud83d"', "\ufffd\ufffd"),
        (r'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'"\\\ud83d"', "\\\ufffd"),
        (r'"\ud83dx"', "\ufffdx"),
        (r'"\"\ud83d"', '"\ufffd'),
    ],
)
def test_lone_surrogates_are_replaced(text, expected):
    assert json.loads(card_text(text.encode())) == expected


def test_a_byte_order_mark_is_dropped():
    assert load_object(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


def test_members_have_two_spellings():
    assert member({"protocol_binding": 1}, "protocolBinding") == 1
    assert member({"protocol_binding": 1, "protocolBinding": None}, "protocolBinding") is None
    assert member({"ProtocolBinding": 1}, "protocolBinding") is None


def test_shown_text_is_one_short_line():
    assert shown_text("Agent é") == "Agent é"
    assert shown_text("a\r\nb\x1b[1m") == r"a\r\nb\x1b[1m"
    assert shown_text("x" * 300) == "x" * 200 + "..."
    assert shown_text(7) == ""


def test_credential_headers_of_both_forms_of_api_key():
    schemes = {
        "a": {"apiKeySecurityScheme": {"location": "header", "name": "X-API-Key"}},
        "b": {"type": "apiKey", "in": "header", "name": "X-Legacy"},
        "c": {"api_key_security_scheme": {"location": "header", "name": "x-snake"}},
        "query": {"apiKeySecurityScheme": {"location": "query", "name": "key"}},
        "odd": {"apiKeySecurityScheme": {"location": "header", "name": "a b"}},
        "odder": {"type": "apiKey", "in": "header", "name": 7},
        "http": {"httpAuthSecurityScheme": {"scheme": "Bearer"}},
        "no": "object",
    }
    assert credential_headers(schemes) == {"x-api-key", "x-legacy", "x-snake"}
