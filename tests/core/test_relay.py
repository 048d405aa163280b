"""Headers and metadata that cross, and those that do not."""

from __future__ import annotations

import pytest

from sidecar.core.relay import fit, reply_headers, request_headers
from sidecar.core.spec import Binding

HOP_BY_HOP = [
    ("connection", "keep-alive, X-Hop"),
    ("x-hop", "1"),
    ("keep-alive", "timeout=5"),
    ("proxy-connection", "keep-alive"),
    ("te", "gzip"),
    ("trailer", "X"),
    ("transfer-encoding", "chunked"),
    ("upgrade", "h2c"),
    ("http2-settings", "AAMAAABk"),
]
EACH_HOPS_OWN = [
    ("host", "a"),
    ("content-length", "5"),
    ("content-type", "a/b"),
    ("content-encoding", "gzip"),
    ("accept", "*/*"),
    ("accept-encoding", "gzip"),
    ("a2a-version", "0.3"),
    ("content-digest", "sha-256=:x:"),
    ("date", "today"),
]
NEVER = [
    (":path", "/x"),
    ("grpc-status", "0"),
    ("grpc-timeout", "1S"),
    ("grpc-foo", "x"),
    ("a2a-sidecar-delivered", "no"),
    ("a2a-sidecar-interface", "0-grpc"),
    ("a2a-sidecar-token", "s"),
]
KEPT = [
    ("authorization", "Bearer x"),
    ("x-api-key", "k"),
    ("traceparent", "00-1"),
    ("tracestate", "a=b"),
    ("baggage", "c=d"),
    ("x-dup", "a"),
    ("x-dup", "b"),
    ("x-a2a-extensions", "https://x.test/d"),
]
# As the door of this side must not let pass.
DOOR = [
    ("cookie", "a=b"),
    ("proxy-authorization", "Basic x"),
    ("origin", "https://x.test"),
    ("sec-fetch-site", "none"),
]


def test_what_goes_to_the_agent():
    assert request_headers(HOP_BY_HOP + EACH_HOPS_OWN + NEVER + DOOR + KEPT) == KEPT


@pytest.mark.parametrize("header", HOP_BY_HOP[2:] + EACH_HOPS_OWN + NEVER, ids=lambda pair: pair[0])
def test_what_never_crosses(header):
    assert request_headers([header]) == []
    assert reply_headers([header]) == []


@pytest.mark.parametrize(
    ("withheld", "kept"),
    [(frozenset(), ["authorization", "x"]), (frozenset({"authorization"}), ["x"])],
)
def test_only_the_header_that_carried_the_local_token_is_withheld(withheld, kept):
    headers = [("authorization", "Bearer x"), ("x", "y")]

    assert [name for name, _ in request_headers(headers, withheld=withheld)] == kept


def test_extensions_become_one_value_in_order():
    headers = [
        ("a2a-extensions", "https://x.test/a/v1"),
        ("x", "y"),
        ("a2a-extensions", "https://x.test/b/v1 , https://x.test/c/v1,"),
    ]

    assert request_headers(headers) == [
        ("x", "y"),
        ("a2a-extensions", "https://x.test/a/v1, https://x.test/b/v1, https://x.test/c/v1"),
    ]
    assert request_headers([("a2a-extensions", " , ")]) == []


@pytest.mark.parametrize(
    "name",
    [
        "set-cookie",
        "alt-svc",
        "location",
        "content-location",
        "refresh",
        "clear-site-data",
        "strict-transport-security",
        "access-control-allow-origin",
        "access-control-expose-headers",
        "server",
        "date",
        "x-r",
    ],
)
def test_what_an_agent_may_not_say_to_the_application(name):
    assert reply_headers([("connection", "close, X-R"), (name, "1")]) == []


def test_what_comes_back():
    headers = [
        ("a2a-extensions", "https://x.test/a"),
        ("retry-after", "3"),
        ("www-authenticate", "Bearer"),
        ("www-authenticate", "Basic"),
        ("traceparent", "00-1"),
        ("x-trace-bin", "AAEC"),
        ("x-request-id", "7"),
    ]

    assert reply_headers(headers) == headers


def test_an_answers_headers_are_bounded_and_one_large_one_costs_no_other():
    headers = [("x-big", "y" * 20_000), ("retry-after", "3")]
    headers += [(f"x-{n}", "v") for n in range(200)]

    kept = reply_headers(headers)

    assert kept[0] == ("retry-after", "3")
    assert kept == headers[1 : 1 + len(kept)]
    assert 0 < sum(len(name) + len(value) + 32 for name, value in kept) <= 4096


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (("x-name", "plain text"), ("x-name", "plain text")),
        (("x_under.1-a", "~"), ("x_under.1-a", "~")),
        (("x-name", "caf\xe9"), None),
        (("x-name", "a\tb"), None),
        (("x-name", "a\x7f"), None),
        (("x!name", "a"), None),
        (("x-empty", ""), ("x-empty", "")),
        (("x-bin", "not base64!"), None),
        (("x-bin", "AAE="), ("x-bin", "AAE")),
        (("x-bin", "AAE"), ("x-bin", "AAE")),
        (("x-bin", "AAE=, AAEC"), ("x-bin", "AAE,AAEC")),
        (("x-bin", "A"), None),
        (("x-bin", "AAE=,!"), None),
    ],
)
def test_what_fits_into_metadata(pair, expected):
    assert fit([pair], Binding.GRPC) == ([] if expected is None else [expected])


@pytest.mark.parametrize("binding", [Binding.JSONRPC, Binding.HTTP_JSON])
@pytest.mark.parametrize(
    ("pair", "fits"),
    [
        (("x-name", "caf\xe9"), True),
        (("x!name", "a"), True),
        (("x-bin", "not base64!"), True),
        (("x-name", "a\r\nb: c"), False),
        (("x-name", "a\0"), False),
        (("x name", "a"), False),
        (("", "a"), False),
        (("x-n\xe9", "a"), False),
    ],
)
def test_what_fits_into_http(binding, pair, fits):
    assert fit([pair], binding) == ([pair] if fits else [])
