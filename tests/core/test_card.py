"""Cards into candidates."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.addresses import AddressKind
from sidecar.core.card import (
    CardError,
    CardOrigin,
    CardPolicy,
    read_card,
    same_candidates,
)
from sidecar.core.spec import Binding, Version

JSONRPC, HTTP_JSON, GRPC = Binding.JSONRPC, Binding.HTTP_JSON, Binding.GRPC

LOCAL = CardOrigin(scheme="http", host="127.0.0.1", kind=AddressKind.LOOPBACK)
PUBLIC = CardOrigin(scheme="http", host="agent.example", kind=AddressKind.PUBLIC)
SECURE = CardOrigin(scheme="https", host="agent.example", kind=AddressKind.PUBLIC)
FILE = CardOrigin(scheme="file", host="", kind=None)


def policy(origin=LOCAL, *, trusted=(), **options):
    return CardPolicy(origin=origin, trusted_hosts=frozenset(trusted), **options)


def entry(url="http://127.0.0.1:7101/rpc", binding="JSONRPC", version="1.0", **more):
    return {"url": url, "protocolBinding": binding, "protocolVersion": version, **more}


def read(card, rule=None):
    return read_card(json.dumps(card).encode(), rule or policy())


def read_entries(*entries, rule=None):
    return read({"name": "Stub", "supportedInterfaces": list(entries)}, rule)


def labels(card):
    return [interface.label for interface in card.candidates]


def reasons(card):
    return {refused.position: refused.reason for refused in card.ineligible}


def reason_of(declared, rule=None):
    card = read_entries(declared, rule=rule)
    assert card.candidates == ()
    (refused,) = card.ineligible
    return refused.reason


# --- supportedInterfaces ----------------------------------------------------------------------


def test_one_interface():
    card = read_entries(entry("http://127.0.0.1:7101/deep/agent/rpc/", tenant="acme-7"))
    (interface,) = card.candidates
    assert interface.position == 0
    assert interface.binding is JSONRPC
    assert interface.version is Version.V1_0
    assert interface.url == "http://127.0.0.1:7101/deep/agent/rpc/"
    assert (interface.tls, interface.host, interface.port) == (False, "127.0.0.1", 7101)
    assert interface.path == "/deep/agent/rpc/"
    assert interface.tenant == "acme-7"
    assert not interface.assumed
    assert not interface.refuses_callers_credentials
    assert card.name == "Stub"
    assert card.ineligible == ()
    assert card.warnings == ()
    assert card.contradiction == ""


def test_card_order_is_kept():
    card = read_entries(
        entry("http://127.0.0.1:7101/primary"),
        entry("http://127.0.0.1:7104/backup"),
        entry("127.0.0.1:7103", "GRPC"),
        entry("http://127.0.0.1:7102", "HTTP+JSON"),
    )
    assert labels(card) == ["0-jsonrpc", "1-jsonrpc", "2-grpc", "3-http_json"]


def test_prefer_sorts_and_keeps_card_order_within_a_binding():
    declared = [
        entry("http://127.0.0.1:7101/a"),
        entry("http://127.0.0.1:7102", "HTTP+JSON"),
        entry("127.0.0.1:7103", "GRPC"),
        entry("http://127.0.0.1:7101/b"),
    ]
    rule = policy(prefer=(GRPC, JSONRPC, GRPC))
    assert labels(read_entries(*declared, rule=rule)) == [
        "2-grpc",
        "0-jsonrpc",
        "3-jsonrpc",
        "1-http_json",
    ]


@pytest.mark.parametrize(
    ("name", "binding"),
    [
        ("JSONRPC", JSONRPC),
        ("jsonrpc", JSONRPC),
        ("JsonRpc", JSONRPC),
        ("JSON-RPC", JSONRPC),
        ("json_rpc", JSONRPC),
        ("HTTP+JSON", HTTP_JSON),
        ("http+json", HTTP_JSON),
        ("HTTP_JSON", HTTP_JSON),
        ("http-json", HTTP_JSON),
        ("HTTP/JSON", HTTP_JSON),
        ("HttpJson", HTTP_JSON),
        ("HTTP+JSON/REST", HTTP_JSON),
        ("REST", HTTP_JSON),
        (" rest ", HTTP_JSON),
        ("grpc", GRPC),
        ("gRPC", GRPC),
    ],
)
def test_binding_names(name, binding):
    (interface,) = read_entries(entry("http://127.0.0.1:7101", name)).candidates
    assert interface.binding is binding


@pytest.mark.parametrize("name", ["slimrpc", "https://example.test/bindings/ws/v1", "JSONRPC2"])
def test_foreign_bindings(name):
    assert reason_of(entry(binding=name)) == f"the binding {name.strip()} is not supported"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (None, "there is no"),
        ("", "there is no"),
        (" ", "is not a name"),
        (7, "is not a name"),
        (["GRPC"], "is not a name"),
    ],
)
def test_no_binding(name, reason):
    assert reason in reason_of(entry(binding=name))


@pytest.mark.parametrize("version", ["1.0", "1", "1.0.0", "1.0.7", " 1.0", "01.00", "1.0.0.9"])
def test_versions_that_are_1_0(version):
    card = read_entries(entry(version=version))
    assert [interface.version for interface in card.candidates] == [Version.V1_0]
    assert card.warnings == ()


@pytest.mark.parametrize("version", ["0.3", "0.3.0", "0.2.6", "1.1", "1.10", "2.0", "10.0", "10"])
def test_versions_that_are_not_spoken(version):
    shown = ".".join([*version.split("."), "0"][:2])
    assert reason_of(entry(version=version)) == (
        f"protocol version {shown} is not supported; this sidecar speaks 1.0"
    )


@pytest.mark.parametrize(
    "version",
    [
        "v1",
        "1.",
        ".1",
        "1.x",
        "1.0-beta",
        "1,0",
        "\u0661.0",
        "latest",
        1.0,
        1,
        True,
        ["1.0"],
        {},
        "1" * 5000,
    ],
)
def test_versions_that_do_not_parse(version):
    assert reason_of(entry(version=version)) == "the protocol version is not a version number"


@pytest.mark.parametrize("version", [None, ""])
def test_a_missing_version_is_1_0_with_one_warning(version):
    card = read_entries(
        entry(version=version),
        entry("http://127.0.0.1:7104"),
        {**entry("127.0.0.1:1", "GRPC")},
        {"url": "http://127.0.0.1:7105", "protocolBinding": "JSONRPC"},
        {"url": "wss://127.0.0.1:7106", "protocolBinding": "JSONRPC"},
    )
    assert labels(card) == ["0-jsonrpc", "1-jsonrpc", "2-grpc", "3-jsonrpc"]
    assert card.warnings == ("no protocolVersion for entry 0, 3: 1.0 is assumed",)


def test_an_unsupported_version_gives_way_to_the_next_entry():
    card = read_entries(
        entry("http://127.0.0.1:7101/old", version="0.3"),
        entry("http://127.0.0.1:7102", "HTTP+JSON"),
    )
    assert labels(card) == ["1-http_json"]
    assert "0.3 is not supported" in reasons(card)[0]


def test_bad_entries_never_hide_a_good_one():
    card = read_entries(
        entry("slim://127.0.0.1:46357/org/ns/x", "slimrpc"),
        entry("wss://127.0.0.1/ws", "https://example.test/bindings/ws/v1"),
        {"protocolBinding": "JSONRPC"},
        {"url": 7101, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
        None,
        entry("http://127.0.0.1:7101/rpc"),
        [],
        "http://127.0.0.1:7101/rpc",
        entry("/rpc"),
    )
    assert labels(card) == ["5-jsonrpc"]
    assert reasons(card) == {
        0: "the binding slimrpc is not supported",
        1: "the binding https://example.test/bindings/ws/v1 is not supported",
        2: "there is no url",
        3: "the url is not a string",
        4: "the entry is not an object",
        6: "the entry is not an object",
        7: "the entry is not an object",
        8: "the url is not an absolute http or https url",
    }
    assert [refused.url for refused in card.ineligible[:4]] == [
        "slim://127.0.0.1:46357/org/ns/x",
        "wss://127.0.0.1/ws",
        "",
        "",
    ]


def test_reasons_show_no_secrets_and_no_control_characters():
    card = read_entries(entry("http://u:pw@h/?key=1"), entry("http://h/\x1b[2J"))
    assert [refused.url for refused in card.ineligible] == [
        "http://***@h/?...",
        r"http://h/\x1b[2J",
    ]


@pytest.mark.parametrize(
    ("interfaces", "warning", "reason"),
    [
        ([], "supportedInterfaces is empty", None),
        (None, None, "supportedInterfaces is not a list"),
        ({}, None, "supportedInterfaces is not a list"),
        ("x", None, "supportedInterfaces is not a list"),
    ],
)
def test_supported_interfaces_is_read_alone_whatever_it_is(interfaces, warning, reason):
    card = read(
        {
            "supportedInterfaces": interfaces,
            "url": "http://127.0.0.1:7101/rpc",
            "additionalInterfaces": [{"url": "http://127.0.0.1:7101/rpc", "transport": "JSONRPC"}],
        }
    )
    assert card.candidates == ()
    assert card.warnings == ((warning,) if warning else ())
    assert reasons(card) == ({0: reason} if reason else {})


def test_a_hybrid_card_is_read_by_its_list_alone():
    card = read(
        {
            "url": "http://127.0.0.1:7101/old",
            "preferredTransport": "GRPC",
            "protocolVersion": "0.3.0",
            "supportedInterfaces": [entry("http://127.0.0.1:7101/new")],
        }
    )
    assert [interface.path for interface in card.candidates] == ["/new"]
    assert card.contradiction == ""


def test_snake_case_is_taken_too():
    card = read(
        {
            "supported_interfaces": [
                {
                    "url": "http://127.0.0.1:7101",
                    "protocol_binding": "JSONRPC",
                    "protocol_version": "1.0",
                }
            ]
        }
    )
    assert labels(card) == ["0-jsonrpc"]
    assert card.warnings == ()


def test_equal_entries_are_one_candidate():
    card = read_entries(
        entry("http://agent.example/"),
        entry("HTTP://AGENT.example:80", "json-rpc", "1.0.3"),
        entry("http://agent.example", "HTTP+JSON"),
        entry("http://agent.example", tenant="t"),
        entry("http://agent.example/x"),
        entry("http://agent.example/"),
    )
    assert labels(card) == ["0-jsonrpc", "2-http_json", "3-jsonrpc", "4-jsonrpc"]
    assert reasons(card) == {1: "same as entry 0", 5: "same as entry 0"}


def test_at_most_16_candidates():
    good = [entry(f"http://127.0.0.1:{7000 + port}/") for port in range(18)]
    card = read_entries(
        *[None] * 40, *good, entry("127.0.0.1:9", "GRPC"), rule=policy(prefer=(GRPC,))
    )
    assert len(card.candidates) == 16
    assert card.candidates[0].binding is GRPC
    assert card.candidates[0].label == "other"
    surplus = [refused for refused in card.ineligible if "too many" in refused.reason]
    assert [refused.position for refused in surplus] == [55, 56, 57]
    assert [refused.position for refused in card.ineligible] == [*range(40), 55, 56, 57]


def test_a_huge_card_is_not_read_to_its_end():
    card = read_entries(*[None] * 63, entry(), *[entry("http://127.0.0.1:1/")] * 5000)
    assert labels(card) == ["other"]
    assert card.candidates[0].position == 63
    assert len(card.ineligible) == 64
    assert card.ineligible[-1].reason == "too many: of 5064 entries only 64 are looked at"


@pytest.mark.parametrize(
    ("tenant", "reason"),
    [
        (7, "not a string"),
        (["a"], "not a string"),
        (".", "not valid"),
        ("..", "not valid"),
        ("a\nb", "not valid"),
        ("a\x7fb", "not valid"),
        ("a\x9fb", "not valid"),
        ("x" * 257, "longer than 256 bytes"),
        ("é" * 129, "longer than 256 bytes"),
    ],
)
def test_tenants_that_are_refused(tenant, reason):
    assert reason in reason_of(entry(tenant=tenant))


@pytest.mark.parametrize("tenant", ["acme", "a/b c%2F", "...", "é" * 128, " ", "tasks"])
def test_tenants_are_kept_exactly(tenant):
    assert read_entries(entry(tenant=tenant)).candidates[0].tenant == tenant


@pytest.mark.parametrize("tenant", [None, ""])
def test_an_empty_tenant_is_none(tenant):
    assert read_entries(entry(tenant=tenant)).candidates[0].tenant == ""


# --- legacy cards -----------------------------------------------------------------------------

X, Y, Z = "http://127.0.0.1:8443", "http://127.0.0.1:9443", "http://127.0.0.1:9444"


def legacy(url, hint, *additional, **more):
    card = {"protocolVersion": "1.0", **more}
    if url is not None:
        card["url"] = url
    if hint is not None:
        card["preferredTransport"] = hint
    if additional:
        card["additionalInterfaces"] = [
            {"url": where, "transport": transport} for transport, where in additional
        ]
    return card


def test_the_hint_is_not_about_the_primary_url_while_another_interface_has_it():
    card = read(legacy(X, "grpc", ("JSONRPC", X), ("GRPC", Y)))
    assert labels(card) == ["2-grpc", "0-jsonrpc"]
    assert [interface.port for interface in card.candidates] == [9443, 8443]
    assert card.contradiction == (
        "the card's preferredTransport GRPC is not what is declared at its url "
        "http://127.0.0.1:8443 (JSONRPC)"
    )
    assert reasons(card) == {1: "same as entry 0"}


@pytest.mark.parametrize(
    ("card", "expected", "contradicts"),
    [
        # the default transport, and a hint that nobody else has
        (legacy(X, None), ["0-jsonrpc"], False),
        (legacy(X, "GRPC"), ["0-grpc"], False),
        (legacy(X, "HTTP+JSON"), ["0-http_json"], False),
        (legacy(X, ""), ["0-jsonrpc"], False),
        (legacy(X, 7), ["0-jsonrpc"], False),
        (legacy(X, None, ("GRPC", Y)), ["0-jsonrpc", "1-grpc"], False),
        (legacy(X, "REST", ("GRPC", Y)), ["0-http_json", "1-grpc"], False),
        # declared at the url: agrees, or wins over the hint
        (legacy(X, "JSONRPC", ("JSONRPC", X), ("GRPC", Y)), ["0-jsonrpc", "2-grpc"], False),
        (legacy(X, None, ("HTTP+JSON", X)), ["0-http_json"], True),
        (legacy(X, "GRPC", ("JSONRPC", X + "/")), ["0-jsonrpc"], True),
        (legacy(X, "GRPC", ("JSONRPC", X), ("GRPC", X)), ["0-grpc", "1-jsonrpc"], False),
        (legacy(X, "GRPC", ("HTTP+JSON", X), ("JSONRPC", X)), ["0-http_json", "2-jsonrpc"], True),
        # nothing declared at the url, the hint declared elsewhere: JSONRPC is assumed, and last
        (legacy(X, "GRPC", ("GRPC", Y)), ["1-grpc", "0-jsonrpc?"], True),
        (
            legacy(X, "GRPC", ("REST", Z), ("GRPC", Y)),
            ["2-grpc", "1-http_json", "0-jsonrpc?"],
            True,
        ),
        (legacy(X, None, ("JSONRPC", Y)), ["1-jsonrpc", "0-jsonrpc?"], False),
        # those of the preferred transport first, then the primary url, then card order
        (
            legacy(X, "GRPC", ("HTTP+JSON", Z), ("JSONRPC", X), ("GRPC", Y), ("GRPC", Z)),
            ["3-grpc", "4-grpc", "0-jsonrpc", "1-http_json"],
            True,
        ),
        # a foreign hint
        (legacy(X, "slimrpc", ("JSONRPC", Y)), ["1-jsonrpc"], False),
        (
            legacy(X, "slimrpc", ("slimrpc", "slim://h/x"), ("GRPC", Y)),
            ["2-grpc", "0-jsonrpc?"],
            True,
        ),
        # a declared entry that is not eligible still takes the hint
        (legacy(X, "GRPC", ("GRPC", "https://h/no-port")), ["0-jsonrpc?"], True),
        # no primary url
        (legacy(None, "GRPC", ("JSONRPC", X), ("GRPC", Y)), ["2-grpc", "1-jsonrpc"], False),
        (legacy(None, None, ("JSONRPC", X)), ["1-jsonrpc"], False),
        (legacy("/rpc", None, ("JSONRPC", X)), ["1-jsonrpc"], False),
        (legacy(8443, "GRPC", ("GRPC", X)), ["1-grpc"], False),
    ],
)
def test_legacy_cards(card, expected, contradicts):
    found = read(card)
    assert [interface.label + "?" * interface.assumed for interface in found.candidates] == expected
    assert bool(found.contradiction) is contradicts
    assert found.warnings == ()


def test_contradictions_say_what_is_assumed_and_what_is_the_default():
    assert read(legacy(X, "GRPC", ("GRPC", Y))).contradiction == (
        "the card's preferredTransport GRPC is declared elsewhere and nothing is declared at its "
        "url http://127.0.0.1:8443 (JSONRPC is assumed)"
    )
    assert read(legacy(X, None, ("GRPC", X))).contradiction == (
        "the card's preferredTransport JSONRPC (the default) is not what is declared at its url "
        "http://127.0.0.1:8443 (GRPC)"
    )


def test_prefer_does_not_move_an_assumed_interface_up():
    card = read(
        legacy(X, "GRPC", ("GRPC", Y), ("HTTP+JSON", Z)), policy(prefer=(JSONRPC, HTTP_JSON))
    )
    assert labels(card) == ["2-http_json", "1-grpc", "0-jsonrpc"]


@pytest.mark.parametrize(
    ("version", "eligible", "warnings"),
    [
        ("1.0", True, ()),
        ("1", True, ()),
        (None, True, ("no protocolVersion for entry 0, 1: 1.0 is assumed",)),
        ("0.3.0", False, ()),
        ("soon", False, ()),
        (0.3, False, ()),
    ],
)
def test_the_version_of_a_legacy_card_is_that_of_all_its_interfaces(version, eligible, warnings):
    card = read(legacy(X, None, ("GRPC", Y), protocolVersion=version))
    assert labels(card) == (["0-jsonrpc", "1-grpc"] if eligible else [])
    assert card.warnings == warnings
    assert len(card.ineligible) == (0 if eligible else 2)


def test_bad_additional_interfaces_do_no_harm():
    card = read(
        {
            "protocolVersion": "1.0",
            "url": X,
            "additionalInterfaces": [
                None,
                {},
                3,
                {"url": Y},
                {"url": [], "transport": {}},
                {"url": Y, "transport": "GRPC"},
            ],
        }
    )
    assert labels(card) == ["0-jsonrpc", "6-grpc"]
    assert sorted(reasons(card)) == [1, 2, 3, 4, 5]
    card = read({"protocolVersion": "1.0", "url": X, "additionalInterfaces": "none"})
    assert labels(card) == ["0-jsonrpc"]
    assert reasons(card) == {1: "additionalInterfaces is not a list"}


# --- where a card may point -------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:7101/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://localhost:7101/",
        "http://0.0.0.0:7101/",
        "http://[::]:7101/",
        "http://169.254.169.254/latest",
        "http://[fe80::1]/",
        "http://224.0.0.1/",
        "http://10.9.9.9/",
    ],
)
def test_a_public_card_points_at_public_addresses(url):
    assert "unless trusted_hosts names it" in reason_of(entry(url), policy(PUBLIC))
    unknown = CardOrigin(scheme="http", host="agent.example", kind=None)
    assert "unless trusted_hosts names it" in reason_of(entry(url), policy(unknown))


@pytest.mark.parametrize("origin", [LOCAL, FILE])
def test_the_operators_own_cards_point_at_this_machine_and_its_network(origin):
    urls = [
        "http://127.0.0.1:1/",
        "http://0.0.0.0:2/",
        "http://[::]:3/",
        "http://localhost:4/",
        "http://10.9.9.9/",
    ]
    card = read_entries(*map(entry, urls), rule=policy(origin))
    assert [interface.url for interface in card.candidates] == urls
    assert "link-local" in reason_of(entry("http://169.254.169.254/"), policy(origin))


def test_trusted_hosts_allow_an_address():
    urls = ["http://169.254.169.254/", "http://127.1/", "http://localhost/", "http://10.0.0.1/"]
    rule = policy(PUBLIC, trusted=["169.254.169.254", "127.0.0.1", "localhost"])
    card = read_entries(*map(entry, urls), rule=rule)
    assert labels(card) == ["0-jsonrpc", "1-jsonrpc", "2-jsonrpc"]
    assert sorted(reasons(card)) == [3]


def test_names_are_left_to_the_dialer():
    assert labels(read_entries(entry("http://internal.example/"), rule=policy(PUBLIC))) == [
        "0-jsonrpc"
    ]
    assert policy(PUBLIC).addresses.refuses("internal.example", 80, "127.0.0.1")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9100/",
        "http://0.0.0.0:9100/rpc",
        "http://[::]:9100/rpc",
        "http://localhost:9100",
    ],
)
@pytest.mark.parametrize("origin", [LOCAL, FILE])
def test_no_card_points_at_this_sidecar(url, origin):
    rule = policy(
        origin, trusted=["127.0.0.1", "localhost"], own_addresses=frozenset({("127.0.0.1", 9100)})
    )
    assert reason_of(entry(url), rule).endswith("port 9100, is one of this sidecar's own listeners")


@pytest.mark.parametrize(
    ("origin", "url", "trusted", "eligible"),
    [
        (SECURE, "https://agent.example/", [], True),
        (SECURE, "http://agent.example/", [], False),
        (SECURE, "http://agent.example/", ["agent.example"], False),
        (SECURE, "http://127.0.0.1:1/", ["127.0.0.1"], True),
        (SECURE, "http://localhost:1/", ["localhost"], True),
        (SECURE, "http://127.0.0.1:1/", [], False),
        (SECURE, "http://localhost:1/", [], False),
        (
            CardOrigin(scheme="https", host="dev.example", kind=AddressKind.LOOPBACK),
            "http://localhost:1/",
            [],
            True,
        ),
        (
            CardOrigin(scheme="https", host="dev.example", kind=AddressKind.LOOPBACK),
            "http://dev.example:1/",
            [],
            True,
        ),
        (
            CardOrigin(scheme="https", host="dev.example", kind=AddressKind.LOOPBACK),
            "http://agent.example/",
            [],
            False,
        ),
        (
            CardOrigin(scheme="https", host="in.example", kind=AddressKind.PRIVATE),
            "http://10.0.0.1/",
            [],
            False,
        ),
        (PUBLIC, "http://agent.example/", [], True),
        (FILE, "http://agent.example/", [], True),
    ],
)
def test_a_card_over_https_cannot_downgrade(origin, url, trusted, eligible):
    card = read_entries(entry(url), rule=policy(origin, trusted=trusted))
    assert bool(card.candidates) is eligible


def test_a_plaintext_grpc_endpoint_is_a_downgrade_too():
    card = read_entries(
        entry("http://agent.example:50051", "GRPC"),
        entry("agent.example:50051", "GRPC"),
        rule=policy(SECURE),
    )
    assert labels(card) == ["1-grpc"]
    assert reasons(card) == {0: "a card that came over https cannot name a plaintext endpoint"}


# --- credentials ------------------------------------------------------------------------------


def test_callers_credentials_go_to_the_cards_host_and_trusted_hosts():
    card = read_entries(
        entry("https://agent.example:1/"),
        entry("https://AGENT.example.:2/"),
        entry("https://trusted.example/"),
        entry("https://sub.agent.example/"),
        entry("agent.example.evil.example:3", "GRPC"),
        rule=policy(SECURE, trusted=["Trusted.example"]),
    )
    refuses = [interface.refuses_callers_credentials for interface in card.candidates]
    assert refuses == [False, False, False, True, True]


def test_other_hosts_are_not_eligible_while_credentials_are_configured():
    card = read_entries(
        entry("https://agent.example/"),
        entry("https://trusted.example/"),
        entry("https://other.example/"),
        rule=policy(SECURE, trusted=["trusted.example"], credentials_configured=True),
    )
    assert labels(card) == ["0-jsonrpc", "1-jsonrpc"]
    assert reasons(card) == {
        2: "credentials are configured, and other.example is neither the card's host nor named in "
        "trusted_hosts"
    }


def test_another_loopback_address_is_another_host():
    declared = [entry("http://127.0.0.1:7101/rpc"), entry("http://127.0.0.2:7104/rpc")]
    card = read_entries(*declared)
    assert [each.refuses_callers_credentials for each in card.candidates] == [False, True]
    card = read_entries(*declared, rule=policy(credentials_configured=True))
    assert labels(card) == ["0-jsonrpc"]


@pytest.mark.parametrize("url", ["http://localhost:1/", "http://0.0.0.0:1/", "http://[::1]:1/"])
def test_the_usual_names_of_this_machine_are_one_host(url):
    card = read_entries(entry(url), rule=policy(credentials_configured=True))
    assert [each.refuses_callers_credentials for each in card.candidates] == [False]


def test_a_card_from_a_file_is_the_operators_own():
    card = read_entries(
        entry("https://agent.example/"), rule=policy(FILE, credentials_configured=True)
    )
    assert [each.refuses_callers_credentials for each in card.candidates] == [False]


@pytest.mark.parametrize(
    ("origin", "url", "trusted", "eligible"),
    [
        (PUBLIC, "http://agent.example/", [], False),
        (PUBLIC, "http://agent.example/", ["agent.example"], True),
        (PUBLIC, "https://agent.example/", [], True),
        (LOCAL, "http://127.0.0.1:1/", [], True),
        (
            CardOrigin(scheme="http", host="dev.example", kind=AddressKind.LOOPBACK),
            "http://dev.example/",
            [],
            True,
        ),
        (FILE, "http://agent.example/", [], False),
        (FILE, "http://localhost/", [], True),
    ],
)
def test_configured_credentials_do_not_go_over_plaintext(origin, url, trusted, eligible):
    rule = policy(origin, trusted=trusted, credentials_configured=True)
    card = read_entries(entry(url), rule=rule)
    assert bool(card.candidates) is eligible
    assert eligible or "in plaintext unless trusted_hosts names it" in card.ineligible[0].reason
    without = read_entries(entry(url), rule=policy(origin, trusted=trusted))
    assert without.candidates


# --- the rest of the card ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"<html>sign in</html>", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "neither supportedInterfaces nor url"),
        (b'{"name":"x","protocolVersion":"1.0"}', "neither supportedInterfaces nor url"),
    ],
)
def test_what_is_no_card(data, reason):
    with pytest.raises(CardError, match=reason):
        read_card(data, policy())


def test_everything_else_may_be_odd():
    odd = {
        "name": ["x"],
        "capabilities": "all",
        "securitySchemes": [1],
        "signatures": 7,
        "skills": {"a": None},
        "version": 1e400,
        "supportedInterfaces": [entry()],
    }
    card = read_card(
        b"\xef\xbb\xbf" + json.dumps(odd).replace("Infinity", "1e999").encode(), policy()
    )
    assert labels(card) == ["0-jsonrpc"]
    assert card.name == ""
    assert (card.streaming, card.push_notifications, card.extended_card) == (False,) * 3


def test_two_oauth_flows_do_no_harm():
    flows = {"clientCredentials": {"tokenUrl": "u"}, "password": {"tokenUrl": "u"}}
    card = read(
        {
            "url": X,
            "protocolVersion": "1.0",
            "securitySchemes": {"o": {"type": "oauth2", "flows": flows}},
        }
    )
    assert labels(card) == ["0-jsonrpc"]


def test_facts_of_the_card():
    card = read(
        {
            "name": "Agent\n7",
            "supportedInterfaces": [entry()],
            "capabilities": {
                "streaming": True,
                "pushNotifications": True,
                "extendedAgentCard": True,
            },
            "signatures": [{"protected": "eyJhbGciOiJFUzI1NiJ9", "signature": "c2ln"}],
            "securitySchemes": {
                "k": {"apiKeySecurityScheme": {"location": "header", "name": "X-API-Key"}}
            },
        }
    )
    assert card.name == r"Agent\n7"
    assert (card.streaming, card.push_notifications, card.extended_card) == (True, True, True)
    assert card.signed
    assert card.credential_headers == {"x-api-key"}
    old = read(
        {"url": X, "supportsAuthenticatedExtendedCard": True, "capabilities": {"streaming": 1}}
    )
    assert (old.streaming, old.push_notifications, old.extended_card) == (False, False, True)
    assert not old.signed


def test_the_bytes_are_kept():
    data = b' {"supportedInterfaces":[], "x": 1.00}\n'
    assert read_card(data, policy()).data == data


def test_same_candidates():
    one = read_entries(entry("http://127.0.0.1:80/"), entry("http://127.0.0.1:7102", "REST"))
    other = read(
        {
            "name": "renamed",
            "supportedInterfaces": [
                None,
                entry("HTTP://127.1", "json-rpc", "1.0.2"),
                entry("http://127.0.0.1:7102/", "HTTP+JSON"),
            ],
        }
    )
    assert same_candidates(one, other)
    swapped = read_entries(entry("http://127.0.0.1:7102", "REST"), entry("http://127.0.0.1:80/"))
    assert not same_candidates(one, swapped)
    assert not same_candidates(one, read_entries(entry("http://127.0.0.1:80/")))
    assert not same_candidates(read_entries(entry()), read_entries(entry(tenant="t")))


# --- properties -------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(
        [
            "GRPC",
            "JSONRPC",
            "REST",
            "1.0",
            "0.3",
            "h:1",
            "http://h/",
            "http://127.0.0.1:9/",
            "\ud800",
        ]
    )
)
NAMES = (
    st.sampled_from(
        ["url", "protocolBinding", "protocolVersion", "tenant", "transport", "protocol_binding"]
    )
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
MEMBERS = st.dictionaries(
    st.sampled_from(
        [
            "name",
            "capabilities",
            "securitySchemes",
            "skills",
            "signatures",
            "url",
            "preferredTransport",
            "additionalInterfaces",
            "protocolVersion",
        ]
    )
    | st.text(),
    VALUES,
    max_size=6,
)


@given(MEMBERS, st.lists(VALUES, max_size=12), st.integers(0, 12), st.sampled_from([LOCAL, FILE]))
def test_a_good_interface_is_found_whatever_stands_beside_it(members, entries, place, origin):
    good = entry("http://127.0.0.1:7101/good", tenant="the good one")
    interfaces = [*entries[:place], good, *entries[place:]]
    card = read({**members, "supportedInterfaces": interfaces}, policy(origin))
    assert "the good one" in [interface.tenant for interface in card.candidates]
    seen = [each.position for each in (*card.candidates, *card.ineligible)]
    assert sorted(seen) == list(range(len(interfaces)))


@given(MEMBERS, st.lists(VALUES, max_size=8), st.integers(0, 8))
def test_a_good_additional_interface_is_found_too(members, entries, place):
    good = {"url": "http://127.0.0.1:7101/the-good-one", "transport": "HTTP+JSON"}
    additional = [*entries[:place], good, *entries[place:]]
    members.pop("supportedInterfaces", None)
    members.pop("supported_interfaces", None)
    card = read({**members, "protocolVersion": "1.0", "additionalInterfaces": additional})
    assert "/the-good-one" in [interface.path for interface in card.candidates]


BASE = json.dumps(
    {
        "name": "Stub",
        "url": X,
        "preferredTransport": "GRPC",
        "protocolVersion": "1.0",
        "additionalInterfaces": [{"url": Y, "transport": "GRPC"}],
        "supportedInterfaces": [entry(), entry("127.0.0.1:1", "GRPC", tenant="t")],
        "capabilities": {"streaming": True},
    }
).encode()
EDITS = st.lists(
    st.tuples(st.integers(0, len(BASE)), st.integers(0, 12), st.binary(max_size=6)), max_size=4
)


def edited(edits):
    data = BASE
    for start, length, text in edits:
        data = data[:start] + text + data[start + length :]
    return data


@given(EDITS | st.binary().map(lambda junk: [(0, len(BASE), junk)]))
def test_damaged_cards_raise_nothing_but_card_error(edits):
    try:
        card = read_card(edited(edits), policy())
    except CardError as error:
        assert str(error).startswith("the card ")  # noqa: PT017
    else:
        assert len(card.candidates) <= 16
