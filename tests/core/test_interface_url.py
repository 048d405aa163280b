"""The url of an interface."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.interface_url import UrlError, read_url, same_url, shown_url
from sidecar.core.spec import Binding

HTTP_BINDINGS = [Binding.JSONRPC, Binding.HTTP_JSON]


def parts(url, binding):
    endpoint = read_url(url, binding)
    return endpoint.tls, endpoint.host, endpoint.port, endpoint.path


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:7101/deep/agent/rpc/", (False, "127.0.0.1", 7101, "/deep/agent/rpc/")),
        ("https://Agent.Example", (True, "agent.example", 443, "/")),
        ("HTTP://agent.example/", (False, "agent.example", 80, "/")),
        ("http://agent.example:/x", (False, "agent.example", 80, "/x")),
        (
            "http://agent.example.:00080//a/../b;c=%2F",
            (False, "agent.example", 80, "//a/../b;c=%2F"),
        ),
        ("https://[2001:DB8::1]/rpc", (True, "2001:db8::1", 443, "/rpc")),
        ("https://[::ffff:127.0.0.1]:9/rpc", (True, "127.0.0.1", 9, "/rpc")),
        ("http://2130706433/", (False, "127.0.0.1", 80, "/")),
        ("https://bücher.example/añ", (True, "xn--bcher-kva.example", 443, "/a%C3%B1")),
        ("http://h:65535/a:b@c", (False, "h", 65535, "/a:b@c")),
    ],
)
def test_a_jsonrpc_url_is_used_verbatim(url, expected):
    assert parts(url, Binding.JSONRPC) == expected


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h", ""),
        ("http://h/", ""),
        ("http://h/base", "/base"),
        ("http://h/base/", "/base"),
        ("http://h/base//", "/base"),
    ],
)
def test_an_http_json_url_has_no_trailing_slash(url, path):
    assert parts(url, Binding.HTTP_JSON) == (False, "h", 80, path)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/rpc", "not an absolute"),
        ("rpc", "not an absolute"),
        ("//h/rpc", "not an absolute"),
        ("http:/h/rpc", "not an absolute"),
        ("http:h", "not an absolute"),
        ("h:8080", "not an absolute"),
        ("wss://h/ws", "not an absolute"),
        ("grpc://h:1", "not an absolute"),
        ("slim://h:46357/org/ns/x", "not an absolute"),
        ("://h", "not an absolute"),
        ("http://", "no host"),
        ("http:///rpc", "no host"),
        ("http://:80/rpc", "no host"),
        ("http://u:p@h/", "credentials"),
        ("http://@h/", "credentials"),
        ("http://h/?a=1", "query or a fragment"),
        ("http://h/?", "query or a fragment"),
        ("http://h?", "query or a fragment"),
        ("http://h/#x", "query or a fragment"),
        ("http://h#", "query or a fragment"),
        ("http://h:0/", "port"),
        ("http://h:65536/", "port"),
        ("http://h:8x/", "port"),
        ("http://h:-1/", "port"),
        ("http://h:٨/", "port"),
        ("http://h:123456/", "port"),
        ("http://::1/", "brackets"),
        ("http://h:80:80/", "brackets"),
        ("http://[::1/", "IPv6"),
        ("http://[::1]x/", "IPv6"),
        ("http://[fe80::1%25lo]/", "IPv6"),
        ("http://1.2.3.4.5/", "IPv4"),
        ("http://999999999999/", "IPv4"),
        ("http://a%2eb/", "not valid"),
        ("http://a,b/", "not valid"),
        ("http://☃.example/", "internationalized"),
        (" http://h/", "whitespace"),
        ("http://h/ ", "whitespace"),
        ("http://h/a b", "whitespace"),
        ("http://h/\r\nX: y", "whitespace"),
        ("http://h/\x00", "whitespace"),
        ("http://h/\x7f", "whitespace"),
        ("http://h/\x85", "whitespace"),
        ("http://h/\u2028", "whitespace"),
        ("http://h/\ud800", "whitespace"),
        ("http://good\\@evil/", "backslash"),
        ("http://h/" + "x" * 2040, "2048"),
        ("http://h/" + "é" * 1020, "2048"),
    ],
)
@pytest.mark.parametrize("binding", HTTP_BINDINGS)
def test_urls_that_no_http_interface_has(url, reason, binding):
    with pytest.raises(UrlError, match=reason):
        read_url(url, binding)


def test_the_longest_url():
    url = "http://h/" + "x" * 2039
    assert read_url(url, Binding.JSONRPC).path == url[8:]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:7103", (True, "127.0.0.1", 7103, "")),
        ("localhost:7103", (True, "localhost", 7103, "")),
        ("agent.test:443", (True, "agent.test", 443, "")),
        ("agent.test:443/", (True, "agent.test", 443, "")),
        ("[::1]:7103", (True, "::1", 7103, "")),
        ("https://Agent.Test:8443", (True, "agent.test", 8443, "")),
        ("https://agent.test:8443/", (True, "agent.test", 8443, "")),
        ("grpcs://agent.test:8443", (True, "agent.test", 8443, "")),
        ("http://agent.test:8443", (False, "agent.test", 8443, "")),
        ("grpc://agent.test:8443/", (False, "agent.test", 8443, "")),
    ],
)
def test_grpc_addresses(url, expected):
    assert parts(url, Binding.GRPC) == expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("agent.test", "explicit host and port"),
        ("agent.test:", "explicit host and port"),
        ("https://agent.test", "explicit host and port"),
        ("https://grpc.example.com/a2a", "explicit host and port"),
        ("https://agent.test:443/a2a", "alone"),
        ("agent.test:443/a2a", "alone"),
        ("agent.test:443//", "alone"),
        ("agent.test:443?x", "alone"),
        ("agent.test:443#x", "alone"),
        ("u@agent.test:443", "credentials"),
        (":443", "no host"),
        ("/agent", "no host"),
        ("", "no host"),
        ("dns:///agent.test:443", "host:port"),
        ("wss://agent.test:443", "host:port"),
        ("agent.test:0", "port"),
        ("agent.test:http", "port"),
        ("::1:443", "brackets"),
        ("agent test:443", "whitespace"),
    ],
)
def test_urls_that_no_grpc_interface_has(url, reason):
    with pytest.raises(UrlError, match=reason):
        read_url(url, Binding.GRPC)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://X:80", "HTTP://x/", True),
        ("https://x/", "https://X:443", True),
        ("https://x:8443", "x:8443", True),
        ("http://x:8443/", "grpc://x:8443", True),
        ("http://127.1/a", "http://127.0.0.1:80/a", True),
        ("http://x/a", "http://x/a/", False),
        ("http://x/a", "http://x/A", False),
        ("http://x/a?b", "http://x/a?c", False),
        ("http://x", "https://x", False),
        ("http://x:8443", "http://x:9443", False),
        ("http://x:8443", "x:8443", False),
        ("wss://x/a", "WSS://X/a", True),
        ("wss://x/a", "ws://x/a", False),
        ("not a url", "not a url", True),
        ("not a url", "Not a url", False),
    ],
)
def test_same_url(one, other, same):
    assert same_url(one, other) is same
    assert same_url(other, one) is same


def test_shown_urls_keep_secrets():
    assert shown_url("http://user:secret@h/p?key=secret#x") == "http://***@h/p?..."
    assert shown_url("user:secret@h:443") == "***@h:443"
    assert shown_url("http://h/p#secret") == "http://h/p?..."
    assert shown_url("http://h/a@b") == "http://h/a@b"
    assert shown_url("http://h/p?a\nb") == "http://h/p?..."


URLS = st.text("http:/[]@?#.0123456789abx%é \\\x00-", max_size=30) | st.text(max_size=30)


@given(URLS, st.sampled_from(Binding))
def test_any_text_is_read_or_refused(url, binding):
    try:
        endpoint = read_url(url, binding)
    except UrlError as error:
        assert str(error)  # noqa: PT017
    else:
        assert 1 <= endpoint.port <= 65535
        assert endpoint.host.isascii()
        assert endpoint.path.isascii()
        assert "?" not in endpoint.path
    assert same_url(url, url)
    shown_url(url)
