"""Hosts and addresses."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.addresses import (
    AddressKind,
    AddressPolicy,
    kind_of,
    names_host,
    normal_host,
    numeric,
    reaches_loopback,
    same_host,
)

LOOPBACK, LINK_LOCAL, UNSPECIFIED = (
    AddressKind.LOOPBACK,
    AddressKind.LINK_LOCAL,
    AddressKind.UNSPECIFIED,
)
MULTICAST, PRIVATE, PUBLIC = AddressKind.MULTICAST, AddressKind.PRIVATE, AddressKind.PUBLIC


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", LOOPBACK),
        ("127.255.0.9", LOOPBACK),
        ("::1", LOOPBACK),
        ("::ffff:127.0.0.1", LOOPBACK),
        ("::127.0.0.1", LOOPBACK),
        ("64:ff9b::7f00:1", LOOPBACK),
        ("2002:7f00:1::1", LOOPBACK),
        ("0.0.0.0", UNSPECIFIED),
        ("0.1.2.3", UNSPECIFIED),
        ("::", UNSPECIFIED),
        ("::ffff:0.0.0.0", UNSPECIFIED),
        ("169.254.169.254", LINK_LOCAL),
        ("::ffff:169.254.169.254", LINK_LOCAL),
        ("fe80::1", LINK_LOCAL),
        ("fe80::1%lo", LINK_LOCAL),
        ("febf::1", LINK_LOCAL),
        ("224.0.0.1", MULTICAST),
        ("239.1.2.3", MULTICAST),
        ("255.255.255.255", MULTICAST),
        ("ff02::1", MULTICAST),
        ("10.0.0.1", PRIVATE),
        ("172.16.0.1", PRIVATE),
        ("172.31.255.255", PRIVATE),
        ("192.168.1.1", PRIVATE),
        ("100.64.0.1", PRIVATE),
        ("100.100.100.200", PRIVATE),
        ("240.0.0.1", PRIVATE),
        ("fd00:ec2::254", PRIVATE),
        ("fec0::1", PRIVATE),
        ("2002:a00:1::", PRIVATE),
        ("172.15.0.1", PUBLIC),
        ("172.32.0.1", PUBLIC),
        ("100.128.0.1", PUBLIC),
        ("128.0.0.1", PUBLIC),
        ("192.0.2.7", PUBLIC),
        ("198.51.100.1", PUBLIC),
        ("::ffff:192.0.2.7", PUBLIC),
        ("2001:db8::1", PUBLIC),
        ("2606:4700::1111", PUBLIC),
    ],
)
def test_kind_of(address, kind):
    assert kind_of(address) is kind


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "1.2.3", "[::1]", "127.0.0.1:80"])
def test_kind_of_takes_addresses_only(text):
    with pytest.raises(ValueError, match=r"."):
        kind_of(text)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.1", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("0X7F.0.0.0x1", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("017700000001", "127.0.0.1"),
        ("0177.0.0.01", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("1", "0.0.0.1"),
        ("127.65535", "127.0.255.255"),
        ("1.2.65535", "1.2.255.255"),
        ("4294967295", "255.255.255.255"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("[::FFFF:127.0.0.1]", "127.0.0.1"),
        ("::ffff:7f00:1", "127.0.0.1"),
        ("[2001:DB8:0:0::1]", "2001:db8::1"),
    ],
)
def test_numeric_spellings(host, address):
    assert numeric(host) == address


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "localhost",
        "example.com",
        "1.2.3.4.5",
        "256.1.1.1",
        "1.2.3.256",
        "1.2.65536",
        "127.16777216",
        "4294967296",
        "1..2",
        ".1",
        "08",
        "0x",
        "0xg",
        "1_0.1",
        "+1",
        " 1",
        "1 ",
        "-1",
        "\u0661\u0662\u0667.0.0.1",
        "[127.0.0.1]",
        "[::1",
        "1::2::3",
        "9" * 5000,
    ],
)
def test_not_numeric(host):
    assert numeric(host) is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from(["d", "o", "x"]))
def test_every_inet_aton_form_of_an_address_is_recognised(value, parts, base):
    split = [(value >> shift) & 0xFF for shift in (24, 16, 8)][: parts - 1]
    numbers = [*split, value & ((1 << (8 * (5 - parts))) - 1)]
    write = {"d": "{}", "o": "0{:o}", "x": "0x{:x}"}[base]
    spelling = ".".join(write.format(number) for number in numbers)
    assert numeric(spelling) == str(ipaddress.IPv4Address(value))


@given(st.text(max_size=20))
def test_any_text_is_a_host_or_not(text):
    address = numeric(text)
    if address is not None:
        assert isinstance(kind_of(address), AddressKind)
    try:
        host = normal_host(text)
    except ValueError as error:
        assert str(error).startswith("the host is not")  # noqa: PT017
    else:
        assert host.isascii()
        assert host == host.lower()
        assert normal_host(f"[{host}]" if ":" in host else host) == host


@pytest.mark.parametrize(
    ("host", "normal"),
    [
        ("Agent.Example", "agent.example"),
        ("agent.example.", "agent.example"),
        ("my_host-1", "my_host-1"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("127。0。0。1", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("[::1]", "::1"),
        ("[2001:DB8::1]", "2001:db8::1"),
    ],
)
def test_normal_host(host, normal):
    assert normal_host(host) == normal


@pytest.mark.parametrize(
    "host",
    [
        "",
        ".",
        "a..b",
        "a b",
        "127%2e0.0.1",
        "a,b",
        "x" * 64,
        "a." * 150,
        "1.2.3.4.5",
        "300.0.0.1",
        "host.08",
        "host.0x1f",
        "[fe80::1%25eth0]",
        "[fe80::1%eth0]",
        "[]",
        "[::1",
        "[v1.x]",
        "☃.example",
        "\ud800.example",
        "é" * 250,
    ],
)
def test_normal_host_refuses(host):
    with pytest.raises(ValueError, match=r"^the host is not"):
        normal_host(host)


def test_names_host_compares_what_is_meant():
    hosts = frozenset({"Agent.Example.", "0x7f.1", "::1"})
    assert names_host(hosts, "agent.example")
    assert names_host(hosts, "127.0.0.1")
    assert names_host(hosts, "[::1]")
    assert not names_host(hosts, "sub.agent.example")
    assert not names_host(hosts, "localhost")
    assert not names_host(frozenset(), "localhost")
    assert names_host(frozenset({"not a host"}), "NOT A HOST")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("agent.example", "AGENT.example.", True),
        ("agent.example", "other.example", False),
        ("localhost", "127.0.0.1", True),
        ("0.0.0.0", "localhost", True),
        ("::", "::1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("10.0.0.1", "localhost", False),
        ("", "agent.example", False),
    ],
)
def test_same_host(one, other, same):
    assert same_host(one, other) is same
    assert same_host(other, one) is same


@pytest.mark.parametrize(
    ("host", "reaches"),
    [
        ("localhost", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("agent.example", False),
        ("agent.localhost", False),
    ],
)
def test_reaches_loopback(host, reaches):
    assert reaches_loopback(host) is reaches


# --- the rule ---------------------------------------------------------------------------------

ADDRESS = {
    LOOPBACK: "127.0.0.1",
    UNSPECIFIED: "0.0.0.0",
    LINK_LOCAL: "169.254.169.254",
    MULTICAST: "224.0.0.1",
    PRIVATE: "10.9.9.9",
    PUBLIC: "192.0.2.7",
}
ALLOWED = {
    None: {LOOPBACK, UNSPECIFIED, PRIVATE, PUBLIC},
    LOOPBACK: {LOOPBACK, UNSPECIFIED, PRIVATE, PUBLIC},
    UNSPECIFIED: {LOOPBACK, UNSPECIFIED, PRIVATE, PUBLIC},
    PRIVATE: {PRIVATE, PUBLIC},
    PUBLIC: {PUBLIC},
    LINK_LOCAL: {PUBLIC},
    MULTICAST: {PUBLIC},
}


def policy(card_kind, *, trusted=(), own=()):
    return AddressPolicy(
        card_kind=card_kind,
        card_host="card.example",
        trusted_hosts=frozenset(trusted),
        own_addresses=frozenset(own),
    )


@pytest.mark.parametrize("card_kind", ALLOWED)
@pytest.mark.parametrize("kind", AddressKind)
def test_which_cards_may_point_where(card_kind, kind):
    reason = policy(card_kind).refuses("agent.example", 80, ADDRESS[kind])
    assert (reason == "") is (kind in ALLOWED[card_kind]), reason


@pytest.mark.parametrize("kind", AddressKind)
@pytest.mark.parametrize("named", ["host", "address"])
def test_trusted_hosts_allow_what_they_name(kind, named):
    trusted = "Agent.Example" if named == "host" else ADDRESS[kind]
    assert policy(PUBLIC, trusted=[trusted]).refuses("agent.example", 80, ADDRESS[kind]) == ""
    other = policy(PUBLIC, trusted=["other.example"])
    assert (other.refuses("agent.example", 80, ADDRESS[kind]) == "") is (kind is PUBLIC)


@pytest.mark.parametrize(
    "address", ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::1", "fe80::1%lo"]
)
def test_other_forms_of_a_refused_address_are_refused(address):
    assert policy(PUBLIC).refuses("agent.example", 80, address)


def test_the_reason_names_the_address_and_the_way_out():
    reason = policy(PUBLIC).refuses("evil.example", 80, "127.0.0.1")
    assert reason == (
        "evil.example (127.0.0.1) is a loopback address: a card from card.example cannot point "
        "there unless trusted_hosts names it"
    )


@pytest.mark.parametrize(
    ("own", "host", "address", "refused"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "agent.example", "127.0.0.1", True),
        ("127.0.0.1", "::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", "0.0.0.0", True),
        ("127.0.0.1", "::", "::", True),
        ("127.0.0.1", "localhost", "::1", True),
        ("127.0.0.1", "127.0.0.2", "127.0.0.2", False),
        ("::1", "::1", "::1", True),
        ("::1", "0.0.0.0", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.2", "127.0.0.2", True),
        ("::", "localhost", "127.0.0.1", True),
        ("0.0.0.0", "agent.example", "192.0.2.7", False),
        ("localhost", "127.0.0.1", "127.0.0.1", True),
        ("10.0.0.5", "10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "0.0.0.0", "0.0.0.0", False),
        ("10.0.0.5", "127.0.0.1", "127.0.0.1", False),
    ],
)
@pytest.mark.parametrize("card_kind", [None, LOOPBACK])
def test_own_listeners(own, host, address, refused, card_kind):
    rule = policy(card_kind, trusted=[host, address], own=[(own, 7420), ("127.0.0.1", 7429)])
    reason = rule.refuses(host, 7420, address)
    assert bool(reason) is refused
    assert not refused or "own listeners" in reason
    assert rule.refuses(host, 7421, address) == ""
