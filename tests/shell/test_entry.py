"""Who may come in through a listener: names, loops, the token."""

from __future__ import annotations

import pytest

from sidecar.config import SecretRef
from sidecar.credentials import Secret
from sidecar.doors.entry import Entry
from sidecar.logs import Log

TOKEN = "local-t0ken"
OURS = "a2a-sidecar-0123456789abcdef"


@pytest.fixture
def entry(monkeypatch):
    monkeypatch.setenv("LOCAL_TOKEN", TOKEN)
    log = Log(clock=lambda: 0.0)

    def make(*, token: bool = True, over_tcp: bool = True) -> Entry:
        return Entry(
            over_tcp=over_tcp,
            hosts=frozenset({"sidecar.test"}),
            token=Secret(SecretRef("env", "LOCAL_TOKEN"), log) if token else None,
            pseudonym=OURS,
        )

    yield make
    log.close()


@pytest.mark.parametrize(
    ("headers", "withheld"),
    [
        ([("a2a-sidecar-token", TOKEN)], "a2a-sidecar-token"),
        ([("a2a-sidecar-token", f" {TOKEN} ")], "a2a-sidecar-token"),
        ([("authorization", f"Bearer {TOKEN}")], "authorization"),
        ([("authorization", f"bearer  {TOKEN}")], "authorization"),
        (
            [("authorization", "Bearer the-agents"), ("a2a-sidecar-token", TOKEN)],
            "a2a-sidecar-token",
        ),
    ],
)
def test_the_header_that_carried_the_token_is_withheld(entry, headers, withheld):
    assert entry().authenticate(headers) == (None, frozenset({withheld}))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("a2a-sidecar-token", "")],
        [("a2a-sidecar-token", TOKEN[:-1])],
        [("a2a-sidecar-token", TOKEN + "x")],
        [("a2a-sidecar-token", "caf\xe9")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer")],
        [("authorization", f"Basic {TOKEN}")],
        # The dedicated header decides when it is there.
        [("a2a-sidecar-token", "wrong"), ("authorization", f"Bearer {TOKEN}")],
    ],
)
def test_callers_without_the_token(entry, headers):
    refused, _ = entry().authenticate(headers)
    assert refused is not None
    assert (refused.reason, refused.http_status, refused.grpc_status) == ("LOCAL_TOKEN", 401, 16)
    assert ("www-authenticate", 'Bearer realm="a2a-sidecar"') in refused.headers
    assert refused.delivered == "no"
    assert TOKEN not in repr(refused)


def test_a_listener_without_a_token_leaves_authorization_to_the_agent(entry):
    refused, withheld = entry(token=False).authenticate([("authorization", "Bearer the-agents")])
    assert refused is None
    assert "authorization" not in withheld


def test_a_token_that_cannot_be_read_lets_nobody_in(entry, monkeypatch):
    door = entry()
    monkeypatch.delenv("LOCAL_TOKEN")
    for headers in ([], [("a2a-sidecar-token", "")], [("a2a-sidecar-token", TOKEN)]):
        refused, _ = door.authenticate(headers)
        assert refused is not None
        assert refused.http_status == 401


def test_a_token_may_change(entry, monkeypatch):
    door = entry()
    assert door.authenticate([("a2a-sidecar-token", TOKEN)])[0] is None
    monkeypatch.setenv("LOCAL_TOKEN", "next")
    assert door.authenticate([("a2a-sidecar-token", TOKEN)])[0] is not None
    assert door.authenticate([("a2a-sidecar-token", "next")])[0] is None


def test_names_and_pages_count_on_tcp_only(entry):
    tcp, unix = entry(), entry(over_tcp=False)
    for host, headers in [
        ("evil.test", []),
        ("localhost", [("origin", "http://evil.test")]),
        ("localhost", [("sec-fetch-site", "same-origin")]),
        ("0.0.0.0:7420", []),
    ]:
        refused = tcp.admit(headers, host)
        assert refused is not None
        assert refused.reason == "FORBIDDEN_ORIGIN"
        assert unix.admit(headers, host) is None
    assert tcp.admit([], "sidecar.test:1") is None
    assert unix.admit([], "%2Frun%2Fapp.sock") is None


@pytest.mark.parametrize(
    "via",
    [
        [("via", f"1.1 {OURS}")],
        [("via", f"1.1 other, 1.1 {OURS}, 1.1 third")],
        [("via", "1.1 other"), ("via", f"1.1 {OURS}")],
    ],
)
def test_a_request_that_was_here_before(entry, via):
    for door in (entry(), entry(over_tcp=False)):
        refused = door.admit(via, "localhost")
        assert refused is not None
        assert (refused.reason, refused.http_status, refused.grpc_status) == ("LOOP", 508, 9)
        assert refused.delivered == "no"


def test_other_sidecars_on_the_way_are_fine(entry):
    assert entry().admit([("via", "1.1 a2a-sidecar-fedcba9876543210")], "localhost") is None
