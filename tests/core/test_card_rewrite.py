"""Rewritten cards."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.addresses import AddressKind
from sidecar.core.card import CardError, CardOrigin, CardPolicy, read_card
from sidecar.core.card_rewrite import Served, rewrite_card
from sidecar.core.spec import Binding

HERE = "http://127.0.0.1:7420/agents/stub"
SERVED = (
    Served(Binding.JSONRPC, HERE),
    Served(Binding.HTTP_JSON, "http://127.0.0.1:7421/agents/stub"),
    Served(Binding.GRPC, "127.0.0.1:7422", "stub"),
)
INTERFACES = [
    {"url": HERE, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
    {
        "url": "http://127.0.0.1:7421/agents/stub",
        "protocolBinding": "HTTP+JSON",
        "protocolVersion": "1.0",
    },
    {
        "url": "127.0.0.1:7422",
        "protocolBinding": "GRPC",
        "protocolVersion": "1.0",
        "tenant": "stub",
    },
]
BEARER = {"local": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}}


def rewrite(card, served=SERVED, **options):
    return json.loads(rewrite_card(json.dumps(card).encode(), served, **options))


def upstream(**more):
    interface = {
        "url": "http://10.9.9.9:7101/rpc",
        "protocolBinding": "JSONRPC",
        "protocolVersion": "0.3",
        "tenant": "secret",
    }
    return {"name": "Stub", "supportedInterfaces": [interface], "version": "1.4.2", **more}


def test_interfaces_are_those_of_this_sidecar_in_the_given_order():
    assert rewrite(upstream()) == {
        "name": "Stub",
        "supportedInterfaces": INTERFACES,
        "version": "1.4.2",
    }
    reverse = rewrite(upstream(), SERVED[::-1])
    assert reverse["supportedInterfaces"] == INTERFACES[::-1]
    assert rewrite(upstream(), ())["supportedInterfaces"] == []


def test_the_rewritten_card_reads_back_as_what_is_served():
    """Following the card literally comes to this sidecar, whatever path the agent has."""
    origin = CardOrigin(scheme="http", host="127.0.0.1", kind=AddressKind.LOOPBACK)
    policy = CardPolicy(origin=origin, trusted_hosts=frozenset())
    deep = upstream(url="http://127.0.0.1:7101/deep/agent/rpc/", preferredTransport="GRPC")
    card = read_card(rewrite_card(json.dumps(deep).encode(), SERVED), policy)
    assert [(each.binding, each.url, each.tenant) for each in card.candidates] == [
        (each.binding, each.url, each.tenant) for each in SERVED
    ]
    assert card.ineligible == ()
    assert card.warnings == ()


def test_a_hybrid_card_names_no_upstream_endpoint():
    card = {
        "url": "http://10.9.9.9:7101/rpc",
        "preferredTransport": "JSONRPC",
        "protocolVersion": "0.3.0",
        "additionalInterfaces": [
            {"url": "http://10.9.9.9:7101/rpc", "transport": "JSONRPC"},
            {"url": "10.9.9.9:7103", "transport": "GRPC"},
        ],
        "supportedInterfaces": [
            {"url": "http://10.9.9.9:7101/rpc", "protocolBinding": "JSONRPC"},
            {"url": "http://10.9.9.9:7102", "protocolBinding": "HTTP+JSON"},
            {"url": "10.9.9.9:7103", "protocolBinding": "GRPC"},
            {"url": "slim://10.9.9.9/ws", "protocolBinding": "slimrpc"},
        ],
        "documentationUrl": "https://docs.example/",
        "iconUrl": "https://docs.example/icon.png",
        "provider": {"url": "https://provider.example", "organization": "P"},
    }
    data = rewrite_card(json.dumps(card).encode(), SERVED)
    assert b"10.9.9.9" not in data
    assert json.loads(data) == {
        "url": HERE,
        "preferredTransport": "JSONRPC",
        "protocolVersion": "1.0",
        "additionalInterfaces": [
            {"url": HERE, "transport": "JSONRPC"},
            {"url": "http://127.0.0.1:7421/agents/stub", "transport": "HTTP+JSON"},
        ],
        "supportedInterfaces": INTERFACES,
        "documentationUrl": "https://docs.example/",
        "iconUrl": "https://docs.example/icon.png",
        "provider": {"url": "https://provider.example", "organization": "P"},
    }


def test_a_legacy_card_gets_the_list_too():
    card = rewrite({"url": "http://10.9.9.9:7101/rpc", "name": "Old"}, SERVED[1:])
    assert card == {
        "url": "http://127.0.0.1:7421/agents/stub",
        "name": "Old",
        "preferredTransport": "HTTP+JSON",
        "supportedInterfaces": INTERFACES[1:],
    }


def test_a_hint_alone_gets_its_url():
    card = rewrite({"preferredTransport": "GRPC", "additionalInterfaces": None})
    assert card["url"] == HERE
    assert card["preferredTransport"] == "JSONRPC"
    assert [each["url"] for each in card["additionalInterfaces"]] == [
        HERE,
        "http://127.0.0.1:7421/agents/stub",
    ]


def test_legacy_members_cannot_name_a_tenant():
    """On a listener for several agents, the tenant is what tells them apart."""
    legacy = {"url": "http://10.9.9.9/", "additionalInterfaces": [], "preferredTransport": "GRPC"}
    card = rewrite(legacy, SERVED[::-1])
    assert card["url"] == "http://127.0.0.1:7421/agents/stub"
    assert card["preferredTransport"] == "HTTP+JSON"
    card = rewrite(legacy, SERVED[2:])
    assert card == {"supportedInterfaces": INTERFACES[2:]}


@pytest.mark.parametrize(
    "spelling",
    [
        "supported_interfaces",
        "SupportedInterfaces",
        "supportedinterface\u017f",
        "additional_interfaces",
        "ADDITIONALINTERFACES",
        "URL",
        "Url",
    ],
)
def test_other_spellings_do_not_lead_past_this_sidecar(spelling):
    entries = [{"url": "http://10.9.9.9:7101/rpc", "transport": "JSONRPC"}]
    value = "http://10.9.9.9:7101/rpc" if spelling.lower() == "url" else entries
    data = rewrite_card(json.dumps({**upstream(), spelling: value}).encode(), SERVED)
    assert b"10.9.9.9" not in data
    assert spelling not in json.loads(data)


def test_signatures_are_removed():
    signature = {"protected": "eyJhbGciOiJFUzI1NiIsImtpZCI6ImsxIn0", "signature": "c2ln"}
    assert rewrite(upstream(signatures=[signature])) == rewrite(upstream())
    assert rewrite(upstream(Signatures=[signature])) == rewrite(upstream())


SECURED = {
    "securitySchemes": {"oauth": {"type": "oauth2"}},
    "securityRequirements": [{"schemes": {"oauth": {"list": ["a"]}}}],
    "security": [{"oauth": ["a"]}],
    "skills": [
        {"id": "s1", "securityRequirements": [{"schemes": {"oauth": {}}}], "tags": ["t"]},
        {"security": [{"oauth": []}], "security_requirements": [], "id": "s2"},
        {"id": "s3"},
        None,
        "odd",
    ],
}
OPEN_SKILLS = [{"id": "s1", "tags": ["t"]}, {"id": "s2"}, {"id": "s3"}, None, "odd"]


@pytest.mark.parametrize("schemes", [None, {}])
def test_a_local_side_that_asks_for_nothing(schemes):
    card = rewrite(upstream(**SECURED), security_schemes=schemes)
    assert card == {**rewrite(upstream()), "skills": OPEN_SKILLS}


def test_a_local_side_that_asks_for_a_token():
    card = rewrite(upstream(**SECURED), security_schemes=BEARER)
    assert card == {
        **rewrite(upstream()),
        "securitySchemes": BEARER,
        "securityRequirements": [{"schemes": {"local": {"list": []}}}],
        "security": [{"local": []}],
        "skills": OPEN_SKILLS,
    }
    card = rewrite(upstream(security_schemes={}), security_schemes=BEARER)
    assert card["securitySchemes"] == BEARER
    assert card["securityRequirements"] == [{"schemes": {"local": {"list": []}}}]
    assert "security" not in card
    assert "security_schemes" not in card


@pytest.mark.parametrize("skills", [None, "x", {"security": []}, 7])
def test_odd_skills_stay(skills):
    assert rewrite(upstream(skills=skills))["skills"] == skills


FLAGS = {
    "streaming": "streaming",
    "push_notifications": "pushNotifications",
    "extended_card": "extendedAgentCard",
}


@pytest.mark.parametrize("option", FLAGS)
@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("value", [True, False, None, "absent"])
def test_capabilities_are_never_larger_than_both_sides(option, offered, value):
    capabilities = {"extensions": [{"uri": "u"}]}
    if value != "absent":
        capabilities[FLAGS[option]] = value
    found = rewrite(upstream(capabilities=capabilities), **{option: offered})["capabilities"]
    assert found["extensions"] == [{"uri": "u"}]
    assert found.get(FLAGS[option], "absent") == (
        False if not offered and value != "absent" else value
    )


def test_withdrawn_capabilities_in_every_spelling():
    card = upstream(
        capabilities={"push_notifications": True, "Streaming": True, "streaming": True},
        supportsAuthenticatedExtendedCard=True,
    )
    withdrawn = rewrite(card, streaming=False, push_notifications=False, extended_card=False)
    assert withdrawn["capabilities"] == {"streaming": False, "pushNotifications": False}
    assert withdrawn["supportsAuthenticatedExtendedCard"] is False
    assert rewrite(card)["supportsAuthenticatedExtendedCard"] is True
    assert rewrite(upstream(capabilities="all"), streaming=False)["capabilities"] == "all"


def test_other_members_keep_their_bytes_and_their_order():
    data = (
        b'\xef\xbb\xbf{ "z": {"n": 1.00, "e": 1E+2, "big": 123456789012345678901234567890},\n'
        b'"supportedInterfaces":[],"a":[ 1e999, "\\u00e9\\/" ],'
        b'"capabilities":{ "streaming": true },"skills":[ {"id": "s1"} ],"name":"\xc3\xa9"}\r\n'
    )
    assert rewrite_card(data, ()) == (
        b'{"z":{"n": 1.00, "e": 1E+2, "big": 123456789012345678901234567890},'
        b'"supportedInterfaces":[],"a":[ 1e999, "\\u00e9\\/" ],'
        b'"capabilities":{ "streaming": true },"skills":[ {"id": "s1"} ],"name":"\xc3\xa9"}'
    )


def test_lone_surrogates_are_not_passed_on():
    data = rewrite_card(b'{"url":"u","\\ud800":"\\udfff","ok":"\\ud83d\\ude00"}', ())
    assert data == '{"�":"\\ufffd","ok":"\\ud83d\\ude00","supportedInterfaces":[]}'.encode()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"<html>", b'{"a":"\xff"}', b'{"a":' + b"[" * 100_000, b'{"a":NaN}']
)
def test_what_is_no_card(data):
    with pytest.raises(CardError, match=r"^the card "):
        rewrite_card(data, SERVED)


NAMES = st.sampled_from(
    [
        "url",
        "supportedInterfaces",
        "additional_interfaces",
        "preferredTransport",
        "capabilities",
        "streaming",
        "skills",
        "security",
        "signatures",
    ]
) | st.text(max_size=5)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.just("\ud800")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=15,
)


@given(st.dictionaries(NAMES, VALUES, max_size=8), st.booleans())
def test_any_card_is_rewritten(card, offered):
    data = rewrite_card(
        json.dumps(card).encode(),
        SERVED,
        security_schemes=BEARER,
        streaming=offered,
        push_notifications=offered,
        extended_card=offered,
    )
    found = json.loads(data)
    assert found["supportedInterfaces"] == INTERFACES
    assert found.get("url", HERE) == HERE
    assert "signatures" not in found
    again = rewrite_card(data, SERVED, security_schemes=BEARER, streaming=offered)
    assert json.loads(again) == found


@given(st.binary(max_size=40))
def test_damaged_cards_raise_nothing_but_card_error(junk):
    for data in (junk, b'{"url":' + junk + b"}", b'{"skills":[{"security":' + junk + b"}]}"):
        with contextlib.suppress(CardError):
            json.loads(rewrite_card(data, SERVED))
