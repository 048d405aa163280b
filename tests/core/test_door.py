"""Who may come in, and which agent is meant."""

from __future__ import annotations

import pytest

from sidecar.core.door import admit, agent_in_path, check_version, choose_agent, host_of
from sidecar.core.errors import to_jsonrpc
from sidecar.core.types import ErrorRecord

HOSTS = frozenset({"sidecar.test"})


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:7420",
        "127.0.0.1",
        "127.1.2.3:80",
        "localhost",
        "LOCALHOST:7420",
        "weather.localhost:7420",
        "[::1]:7420",
        "[::1]",
        "sidecar.test",
        "Sidecar.Test:443",
    ],
)
def test_expected_names(host):
    assert admit([("host", host), ("sec-fetch-site", "none")], host, hosts=HOSTS) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:7420",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[2001:db8::1]:80",
        "notlocalhost",
        "localhost:80@evil.example",
        "user@localhost",
        "localhost/x",
        "localhost:port",
        "localhost:",
        "[::1",
        "::1",
        "local host",
    ],
)
def test_other_names_may_be_a_page_in_a_browser(host):
    refused = admit([("host", host)], host, hosts=HOSTS)

    assert isinstance(refused, ErrorRecord)
    assert (refused.reason, refused.http_status, refused.grpc_status) == (
        "FORBIDDEN_ORIGIN",
        403,
        7,
    )
    assert refused.delivered == "no"


@pytest.mark.parametrize(
    "headers",
    [
        [("origin", "null")],
        [("origin", "http://localhost:7420")],
        [("sec-fetch-site", "same-origin")],
        [("sec-fetch-site", "cross-site")],
        [("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")],
        [("host", "localhost"), ("host", "localhost")],
        [("host", "localhost"), ("host", "evil.example")],
    ],
)
def test_signs_of_a_page(headers):
    assert admit(headers, "localhost", hosts=HOSTS)


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        ("Agent.example:443", "agent.example"),
        ("agent.example", "agent.example"),
        ("[FE80::1%25eth0]:1", "fe80::1%25eth0"),
        ("127.0.0.1:7422", "127.0.0.1"),
        ("%2Frun%2Fa.sock", "%2frun%2fa.sock"),  # what clients make of a Unix socket
        ("a:b:c", ""),
        ("[a]b", ""),
        ("a b", ""),
        ("", ""),
    ],
)
def test_the_host_of_an_authority(authority, host):
    assert host_of(authority) == host


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/agents/weather", ("weather", "/")),
        ("/agents/weather/", ("weather", "/")),
        ("/agents/weather/tasks/t?x=/agents/b", ("weather", "/tasks/t")),
        ("/agents/weather?x", ("weather", "/")),
        ("/agents/%77eather/tasks", ("%77eather", "/tasks")),  # byte for byte
        ("/agents/weather//tasks", ("weather", "//tasks")),
        ("/agents/", ("", "/agents/")),
        ("/agents", ("", "/agents")),
        ("/Agents/weather", ("", "/Agents/weather")),
        ("/tasks/agents/x", ("", "/tasks/agents/x")),
        ("/?q", ("", "/")),
    ],
)
def test_the_agent_in_a_path(target, expected):
    assert agent_in_path(target) == expected


@pytest.mark.parametrize(
    ("named", "own", "agents", "chosen"),
    [
        ("", "weather", {"weather", "maps"}, "weather"),
        ("weather", "weather", {"weather", "maps"}, "weather"),
        ("maps", None, {"weather", "maps"}, "maps"),
        ("", None, {"weather"}, "weather"),
    ],
)
def test_the_agent_that_is_meant(named, own, agents, chosen):
    assert choose_agent(named, own, agents) == chosen


@pytest.mark.parametrize(
    ("named", "own", "agents", "mentioned"),
    [
        ("maps", "weather", {"weather", "maps"}, ["weather"]),
        ("nosuch", None, {"weather", "maps"}, ["nosuch", "maps, weather"]),
        ("%77eather", None, {"weather"}, ["weather"]),  # nor the only one
        ("", None, {"weather", "maps"}, ["maps, weather", "/agents/NAME"]),
        ("", None, set(), ["none"]),
    ],
)
def test_no_agent_is_guessed(named, own, agents, mentioned):
    refused = choose_agent(named, own, agents)

    assert isinstance(refused, ErrorRecord)
    assert (refused.reason, refused.http_status, refused.grpc_status) == ("AGENT_UNKNOWN", 404, 5)
    assert refused.delivered == "no"
    assert all(text in refused.message for text in mentioned)


@pytest.mark.parametrize(
    "version", [None, "", " ", "1", "1.0", "1.7", "1.0.1", "v1", "V1.0", "1.10"]
)
def test_versions_that_are_1(version):
    headers = [] if version is None else [("a2a-version", version)]

    assert check_version(headers) is None


@pytest.mark.parametrize("version", ["0.3", "2.0", "10.0", "1.x", "1.", "x", "1.0, 0.3", "0.3.0"])
def test_other_versions_are_refused_here(version):
    refused = check_version([("a2a-version", version)])

    assert refused is not None
    assert (refused.code, refused.http_status, refused.grpc_status) == (-32009, 400, 9)
    assert b'"supportedVersions":"1.0"' in to_jsonrpc(refused)


def test_the_first_of_several_versions_counts():
    assert check_version([("a2a-version", "1.0"), ("a2a-version", "0.3")]) is None
    assert check_version([("a2a-version", "0.3"), ("a2a-version", "1.0")])
