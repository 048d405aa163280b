"""Addresses, hosts, cards and names of the configuration, and what is said of wrong ones."""

import pytest

from sidecar import config_values as values
from sidecar.config_values import TcpAddress, UnixAddress, parse_address
from sidecar.core.spec import Binding


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7420", TcpAddress("127.0.0.1", 7420)),
        ("127.8.9.10:1", TcpAddress("127.8.9.10", 1)),
        ("[::1]:7420", TcpAddress("::1", 7420)),
        ("[0:0:0:0:0:0:0:1]:7420", TcpAddress("::1", 7420)),
        ("localhost:7420", TcpAddress("127.0.0.1", 7420)),
        ("LocalHost:7420", TcpAddress("127.0.0.1", 7420)),
        ("127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("127.0.0.1:65535", TcpAddress("127.0.0.1", 65535)),
        ("unix:/run/a2a/app.sock", UnixAddress("/run/a2a/app.sock")),
        ("unix:/run//a2a/../app.sock", UnixAddress("/run/app.sock")),
        ("unix:/" + "x" * 106, UnixAddress("/" + "x" * 106)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (TcpAddress("::1", 7420), "[::1]:7420"),
        (TcpAddress("127.0.0.1", 7420), "127.0.0.1:7420"),
        (UnixAddress("/a"), "unix:/a"),
    ],
)
def test_an_address_prints_as_it_is_written(address, text):
    assert str(address) == text
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        ":7420",
        "*:7420",
        "[::1%lo]:7420",
        "[127.0.0.1]:7420",
        "[localhost]:7420",
        "example.com:7420",
        "127.1:7420",
    ],
)
def test_a_name_is_not_bound(text):
    with pytest.raises(ValueError, match="is not an address; use"):
        parse_address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "192.168.1.7:1", "[fe80::1]:1"])
def test_which_addresses_other_machines_reach(text):
    assert not values.is_loopback(parse_address(text))
    assert values.is_loopback(parse_address("127.0.0.2:1"))
    with pytest.raises(ValueError, match="is not a loopback address"):
        values.tcp_address(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1", "must be HOST:PORT"),
        ("127.0.0.1:", "must be HOST:PORT"),
        ("127.0.0.1:http", "must be HOST:PORT"),
        ("127.0.0.1:-1", "must be HOST:PORT"),
        ("127.0.0.1:٣", "must be HOST:PORT"),
        ("http://127.0.0.1:7420", "must be HOST:PORT"),
        ("7420", "must be HOST:PORT"),
        ("", "must be HOST:PORT"),
        ("127.0.0.1:65536", "above 65535"),
        ("::1:7420", "IPv6 address needs brackets"),
        ("unix:app.sock", "absolute path"),
        ("unix:@abstract", "absolute path"),
        ("unix:/run/", "absolute path of a file"),
        ("unix:/", "absolute path of a file"),
        ("unix:/" + "x" * 107, "at most 107 bytes, this one has 108"),
        ("unix:/" + "é" * 54, "at most 107 bytes, this one has 109"),
        ("systemd:", "is not a FileDescriptorName"),
    ],
)
def test_wrong_addresses(text, words):
    with pytest.raises(ValueError, match=words):
        parse_address(text)


def test_an_address_is_a_string():
    with pytest.raises(ValueError, match="must be a string, not 7420"):
        values.address(7420)
    with pytest.raises(ValueError, match="nothing else is possible here"):
        values.tcp_address("unix:/run/admin.sock")


@pytest.mark.parametrize(("text", "mode"), [("0660", 0o660), ("600", 0o600), ("0777", 0o777)])
def test_modes(text, mode):
    assert values.mode(text) == mode


@pytest.mark.parametrize("value", ["660x", "66", "0o660", "1660", "0668", 0o660, True])
def test_wrong_modes(value):
    with pytest.raises(ValueError, match='octal digits as "0660"'):
        values.mode(value)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Agents.Example.COM", "agents.example.com"),
        ("agents.example.com.", "agents.example.com"),
        ("10.0.0.7", "10.0.0.7"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("2001:db8:0::1", "2001:db8::1"),
        ("localhost", "localhost"),
        ("my_service", "my_service"),
    ],
)
def test_hosts(text, host):
    assert values.host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        "https://a",
        "a:443",
        "a/b",
        "u@a",
        "*.example.com",
        "",
        ".",
        "a b",
        "[::1]:443",
        "-a",
        "a..b",
    ],
)
def test_wrong_hosts(text):
    with pytest.raises(ValueError, match="must be a host alone"):
        values.host(text)


@pytest.mark.parametrize("name", ["weather", "w", "a-1", "1a", "agent-2-b", "a" * 63])
def test_agent_names(name):
    assert values.agent_name(name) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Weather", "a-z, 0-9"),
        ("a_b", "a-z, 0-9"),
        ("a.b", "a-z, 0-9"),
        ("a--b", "a-z, 0-9"),
        ("-a", "a-z, 0-9"),
        ("a-", "a-z, 0-9"),
        ("a\n", "a-z, 0-9"),
        ("é", "a-z, 0-9"),
        ("", "a-z, 0-9"),
        ("a" * 64, "at most 63"),
        ("127", "needs a letter"),
        ("1-2", "needs a letter"),
        ("agents", "reserved"),
        ("tasks", "reserved"),
        ("card", "reserved"),
        ("other", "reserved"),
        ("localhost", "reserved"),
    ],
)
def test_wrong_agent_names(name, words):
    with pytest.raises(ValueError, match=words):
        values.agent_name(name)


@pytest.mark.parametrize("binding", list(Binding))
def test_bindings_as_in_cards(binding):
    assert values.binding(binding.value) is binding


@pytest.mark.parametrize(
    ("word", "mend"),
    [("jsonrpc", "did you mean JSONRPC"), ("HTTP_JSON", "did you mean HTTP"), ("SOAP", None)],
)
def test_the_nearest_binding_is_named(word, mend):
    with pytest.raises(ValueError, match="must be one of") as caught:
        values.binding(word)
    assert ("did you mean" in str(caught.value)) == (mend is not None)
    assert (mend or "") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        ("a\nb", '"a\\nb"'),
        ("x" * 100, '"' + "x" * 80 + '…"'),
        (1.5, "1.5"),
        ([1], "an array"),
        ({}, "a table"),
        (None, "a date or time"),
    ],
)
def test_values_in_messages(value, text):
    assert values.shown(value) == text
