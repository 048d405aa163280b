"""Public addresses and where they are really found."""

from __future__ import annotations

import pytest

from sidecar.core.address_map import AddressMap
from sidecar.core.interface_url import read_url
from sidecar.core.spec import Binding, Version
from sidecar.core.types import Interface


def interface(url: str, binding: Binding) -> Interface:
    endpoint = read_url(url, binding)
    return Interface(
        position=0,
        binding=binding,
        version=Version.V1_0,
        url=url,
        tls=endpoint.tls,
        host=endpoint.host,
        port=endpoint.port,
        path=endpoint.path,
    )


def located(entries: dict[str, str], url: str, binding: Binding) -> tuple[str, int, bool, str]:
    found = AddressMap(entries).locate(interface(url, binding))
    return found.host, found.port, found.tls, found.path


PUBLIC = "https://agent.example"
LOCAL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("url", "binding", "expected"),
    [
        ("https://agent.example/rpc", Binding.JSONRPC, ("127.0.0.1", 8000, False, "/rpc")),
        ("https://agent.example:443", Binding.JSONRPC, ("127.0.0.1", 8000, False, "/")),
        ("https://AGENT.example/a/", Binding.HTTP_JSON, ("127.0.0.1", 8000, False, "/a")),
        ("agent.example:443", Binding.GRPC, ("127.0.0.1", 8000, False, "")),
        ("https://agent.example:8443/rpc", Binding.JSONRPC, ("agent.example", 8443, True, "/rpc")),
        ("https://other.example/rpc", Binding.JSONRPC, ("other.example", 443, True, "/rpc")),
    ],
)
def test_a_url_maps_its_host_and_port(url, binding, expected):
    assert located({PUBLIC: LOCAL}, url, binding) == expected


def test_an_interface_that_is_not_mapped_is_the_same_object():
    one = interface("https://other.example/rpc", Binding.JSONRPC)
    assert AddressMap({PUBLIC: LOCAL}).locate(one) is one


@pytest.mark.parametrize(
    ("local", "tls"),
    [("127.0.0.1:8000", True), ("http://127.0.0.1:8000", False), ("https://127.0.0.1:8000", True)],
)
def test_a_local_address_without_scheme_is_dialled_as_the_public_one(local, tls):
    assert located({"agent.example:443": local}, "agent.example:443", Binding.GRPC)[2] is tls


@pytest.mark.parametrize(
    ("url", "binding", "path"),
    [
        ("https://agent.example/a2a/rpc", Binding.JSONRPC, "/rpc"),
        ("https://agent.example/a2a", Binding.JSONRPC, "/"),
        ("https://agent.example/a2a", Binding.HTTP_JSON, ""),
        ("https://agent.example/a2a/rpc/", Binding.JSONRPC, "/rpc/"),
    ],
)
def test_a_path_is_replaced(url, binding, path):
    assert located({"https://agent.example/a2a": LOCAL}, url, binding)[3] == path
    onto = {"https://agent.example/a2a": "http://127.0.0.1:8000/in"}
    assert located(onto, url, binding)[3] == ("/in" + path if path != "/" else "/in")


@pytest.mark.parametrize("url", ["https://agent.example/a2ab/rpc", "https://agent.example/rpc"])
def test_a_path_counts_by_whole_segments(url):
    entries = {"https://agent.example/a2a": LOCAL}
    assert located(entries, url, Binding.JSONRPC)[0] == "agent.example"


def test_the_longest_path_wins():
    entries = {
        "https://agent.example": "http://127.0.0.1:1",
        "https://agent.example/a/b": "http://127.0.0.1:3",
        "https://agent.example/a": "http://127.0.0.1:2",
    }
    ports = [
        located(entries, f"https://agent.example{path}", Binding.JSONRPC)[1]
        for path in ("/x", "/a/x", "/a/b/x")
    ]
    assert ports == [1, 2, 3]


@pytest.mark.parametrize(
    "entries",
    [{"agent.example": LOCAL}, {PUBLIC: "nowhere"}, {"ftp://x:1": LOCAL}, {PUBLIC: "http://x/?q"}],
)
def test_what_is_no_address_is_named(entries):
    with pytest.raises(ValueError, match="is not an address"):
        AddressMap(entries)
