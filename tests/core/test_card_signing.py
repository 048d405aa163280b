"""What the signatures of a card cover: the canonical forms of the specification and of the SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar._pb import a2a_pb2
from sidecar.core.card import CardError
from sidecar.core.card_signing import MAX_SIGNATURES, SCHEMA, signed_card

ENTRY = {"url": "http://h/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}


def forms(card: Any, **more: Any) -> list[str]:
    data = json.dumps({**card, **more}).encode()
    return [form.decode() for form in signed_card(data).forms]


def spec(card: Any) -> Any:
    return json.loads(forms(card)[0])


def sdk(card: Any) -> Any:
    return json.loads(forms(card)[1])


# --- the schema -------------------------------------------------------------------------------


def json_name(field: Any) -> str:
    return str(field.json_name)


def test_the_schema_has_every_member_of_the_cards_messages():
    """Compared with the descriptors, which know all but what is required."""
    seen, waiting = set(), ["AgentCard"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        descriptor = a2a_pb2.DESCRIPTOR.message_types_by_name[name]
        fields = {json_name(f): f for f in descriptor.fields if f.name != "signatures"}
        assert {member.name for member in SCHEMA[name]} == set(fields), name
        for member in SCHEMA[name]:
            field = fields[member.name]
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            value: Any = field
            if field.message_type is not None and is_map:
                value = field.message_type.fields_by_name["value"]
            message = value.message_type.name if value.message_type is not None else ""
            assert member.mapped == is_map, member
            assert member.repeated == (field.is_repeated and not is_map), member
            assert member.message == ("*" if message == "Struct" else message), member
            scalar = not message and not field.is_repeated
            assert member.presence == (scalar and field.has_presence), member
            if message and message != "Struct":
                waiting.append(message)
    assert seen == set(SCHEMA)


# --- forms ------------------------------------------------------------------------------------

CARD = {
    "name": "n",
    "description": "",
    "supportedInterfaces": [ENTRY],
    "version": "1",
    "capabilities": {"streaming": False},
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": [],
    "skills": [],
}


def test_the_example_of_the_specification():
    """Section 8.4.1, with the one interface that this project asks for."""
    example = {
        "name": "Example Agent",
        "description": "",
        "capabilities": {"streaming": False, "pushNotifications": False, "extensions": []},
        "skills": [],
        "supportedInterfaces": [ENTRY],
    }
    found, plain, _ = forms(example)
    assert found.startswith(
        '{"capabilities":{"pushNotifications":false,"streaming":false},"defaultInputModes":[],'
    )
    assert '"description":"","name":"Example Agent","skills":[],"supportedInterfaces":[' in found
    entry = json.dumps(dict(sorted(ENTRY.items())), separators=(",", ":"))
    assert plain == (
        '{"capabilities":{"pushNotifications":false,"streaming":false},"name":"Example Agent",'
        f'"supportedInterfaces":[{entry}]}}'
    )


def test_required_members_stay_although_they_are_empty_and_are_there_although_they_were_left_out():
    whole, without = dict(CARD), dict(CARD)
    for name in ("description", "skills", "defaultOutputModes"):
        del without[name]
    assert forms(whole)[0] == forms(without)[0]
    assert spec(whole)["skills"] == []
    assert spec(whole)["description"] == ""


def test_the_sdk_removes_all_that_is_empty():
    assert set(sdk(CARD)) == {
        "name",
        "supportedInterfaces",
        "version",
        "capabilities",
        "defaultInputModes",
    }
    assert "capabilities" not in sdk({**CARD, "capabilities": {"extensions": []}})


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ({"iconUrl": ""}, {"iconUrl": ""}),  # has presence: an explicit default counts
        ({"iconUrl": None}, {}),
        ({"securityRequirements": []}, {}),
        ({"securitySchemes": {}}, {}),
        ({"provider": {}}, {"provider": {"url": "", "organization": ""}}),
        ({"unknown": 1, "url": "http://legacy", "security": []}, {}),
        ({"documentation_url": "http://d"}, {"documentationUrl": "http://d"}),
        (
            {"securitySchemes": {"k": {"type": "http", "mtlsSecurityScheme": {}}}},
            {"securitySchemes": {"k": {"mtlsSecurityScheme": {}}}},
        ),
    ],
)
def test_defaults_in_the_form_of_the_specification(members, kept):
    assert spec({**CARD, **members}) == {**spec(CARD), **kept}


def test_parameters_of_extensions_are_any_json():
    params = {"b": [1, 2.50, None, ""], "a": {"A-b": {}, "é": True}, "big": 12345678901234567890}
    extension = {"uri": "u", "required": False, "params": params}
    card = {**CARD, "capabilities": {"extensions": [extension]}}
    assert '{"params":{"a":{"A-b":{},"é":true},"b":[1,2.5,null,""],"big":12345678901234567000},"uri":"u"}' in forms(card)[0]  # fmt: skip
    assert '{"params":{"a":{"é":true},"b":[1,2.5],"big":12345678901234567000},"uri":"u"}' in forms(card)[1]  # fmt: skip


def test_the_third_form_is_the_json_as_it_stands():
    card = {**CARD, "z": 1, "a": [{"y": None, "x": ""}]}
    assert json.loads(forms(card, signatures=[{}])[2]) == card
    assert '"a":[{"x":"","y":null}]' in forms(card)[2]


def test_an_old_card_has_only_the_form_that_covers_its_url():
    """Members of 0.3 are outside of what version 1.0 signs."""
    legacy = {"name": "n", "url": "http://h/rpc", "preferredTransport": "JSONRPC"}
    assert len(forms(legacy)) == 1
    assert len(forms({**legacy, "supportedInterfaces": []})) == 1
    assert "http://h/rpc" in forms(legacy)[0]


def test_every_member_that_leads_somewhere_is_covered_by_every_form():
    for path in ("url", "protocolBinding", "protocolVersion", "tenant"):
        changed = {**CARD, "supportedInterfaces": [{**ENTRY, path: "changed"}]}
        assert not set(forms(changed)) & set(forms(CARD)), path


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"name":"a","name":"b"}', "stands twice"),
        (b'{"supportedInterfaces":[{"url":"a","url":"b"}]}', "stands twice"),
        (b'{"supportedInterfaces":[1],"supported_interfaces":[2]}', "two spellings"),
        (b"[]", "not a JSON object"),
        (b'{"x":1e999}', "no canonical form"),
        (b'{"x":' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
    ],
)
def test_cards_whose_signature_says_nothing(text, words):
    with pytest.raises(CardError, match=words):
        signed_card(text)


@pytest.mark.parametrize("odd", [None, 7, {}, "x"])
def test_odd_signatures_are_none(odd):
    assert signed_card(json.dumps({**CARD, "signatures": odd}).encode()).signatures == ()


def test_odd_entries_are_empty_and_many_are_not_looked_at():
    entries = [
        None,
        {"protected": 1, "signature": "s"},
        *[{"protected": "p", "signature": "s"}] * 9,
    ]
    found = signed_card(json.dumps({**CARD, "signatures": entries}).encode()).signatures
    assert found[:3] == (("", ""), ("", "s"), ("p", "s"))
    assert len(found) == MAX_SIGNATURES


def test_odd_values_do_no_harm():
    odd = {"supportedInterfaces": [1, None], "provider": [], "skills": {}, "capabilities": "x"}
    assert len(forms(odd)) == 3
