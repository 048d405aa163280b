"""Secrets where they are kept, and OAuth tokens: when they are fetched, renewed and dropped."""

from __future__ import annotations

import base64
import os
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import httpx
import msgspec
import pytest
import trio
import trio.testing

from sidecar.config import AuthConfig, OAuthConfig, SecretRef
from sidecar.connections import Connections
from sidecar.core.addresses import AddressKind, AddressPolicy
from sidecar.core.card import CardOrigin, CardPolicy, read_card
from sidecar.core.types import Break, Request
from sidecar.credentials import (
    Credentials,
    CredentialsUnavailable,
    Secret,
    check_secrets,
)
from sidecar.logs import Log
from sidecar.wire.exchange import ExchangeBroken, Progress
from sidecar.wire.net import Dialer, TlsIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

TOKEN_URL = "https://login.test/token"


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[tuple[Log, Callable[[], str]]]:
    """A log, and what stands in it."""
    path = tmp_path / "log"
    now = iter(range(10**9))
    with open(path, "wb") as file:
        log = Log(clock=lambda: float(next(now)), fd=file.fileno())

        def text() -> str:
            log.close()
            return path.read_text("utf-8")

        yield log, text
        log.close()


@pytest.fixture
def log(lines: tuple[Log, Callable[[], str]]) -> Log:
    return lines[0]


def ref(scheme: Any, name: object) -> SecretRef:
    return SecretRef(scheme, str(name))


def replace(path: Path, text: str) -> None:
    """As programs do that rotate secrets: a new file takes the place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


# --- secrets ----------------------------------------------------------------------------------


def test_a_file_is_read_again_when_it_changes(tmp_path, log):
    path = tmp_path / "token"
    path.write_text("  one two\n")
    secret = Secret(ref("file", path), log)
    assert secret.read() == "one two"
    replace(path, "three\n")
    assert secret.read() == "three"
    path.write_text("longer")
    assert secret.read() == "longer"


def test_a_file_that_does_not_change_is_not_read_again(tmp_path, log, monkeypatch):
    path = tmp_path / "token"
    path.write_text("one")
    secret = Secret(ref("file", path), log)
    secret.read()
    monkeypatch.setattr("builtins.open", None)
    assert secret.read() == "one"


@pytest.mark.parametrize("bad", ["", "\n", "a\nb", "a\x00b", "caf\xe9", None])
def test_what_cannot_be_read_any_more_is_kept(tmp_path, lines, bad):
    log, text = lines
    path = tmp_path / "token"
    path.write_text("s3cret")
    secret = Secret(ref("file", path), log)
    secret.read()
    if bad is None:
        path.unlink()
    else:
        replace(path, bad)
    assert secret.read() == "s3cret"
    assert secret.read() == "s3cret"
    replace(path, "next")
    assert secret.read() == "next"
    assert "secret kept" in text()
    assert "s3cret" not in text()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"hunter2\nhunter3", "one line"),
        (b"hunter2\x7f", "one line"),
        (b"hunter2\xff", "ASCII"),
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(tmp_path, log, content, why):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(CredentialsUnavailable, match=why) as raised:
        Secret(ref("file", path), log).read()
    assert str(path) in str(raised.value)
    assert "hunter" not in str(raised.value)


def test_a_pipe_is_not_waited_for(tmp_path, log):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(CredentialsUnavailable, match="regular"):
        Secret(ref("file", path), log).read()


def test_an_environment_variable(log, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "from the environment")
    assert Secret(ref("env", "SOME_TOKEN"), log).read() == "from the environment"
    monkeypatch.delenv("SOME_TOKEN")
    with pytest.raises(CredentialsUnavailable, match="env:SOME_TOKEN"):
        Secret(ref("env", "SOME_TOKEN"), log).read()


def test_a_systemd_credential(tmp_path, log, monkeypatch):
    (tmp_path / "agent-token").write_text("passed\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert Secret(ref("credential", "agent-token"), log).read() == "passed"
    with pytest.raises(CredentialsUnavailable, match="credential:other"):
        Secret(ref("credential", "other"), log).read()
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(CredentialsUnavailable, match="systemd"):
        Secret(ref("credential", "other"), log).read()


@pytest.mark.parametrize("missing", ["header", "bearer", "id", "secret"])
def test_every_secret_is_checked_at_the_start(log, monkeypatch, missing):
    names = {name: f"CHECKED_{name.upper()}" for name in ("header", "bearer", "id", "secret")}
    for name, variable in names.items():
        if name != missing:
            monkeypatch.setenv(variable, "x")
    config = AuthConfig(
        headers={"x-key": ref("env", names["header"])},
        bearer=ref("env", names["bearer"]),
        oauth=OAuthConfig(
            token_url=TOKEN_URL,
            client_id=ref("env", names["id"]),
            client_secret=ref("env", names["secret"]),
        ),
    )
    with pytest.raises(CredentialsUnavailable, match=names[missing]):
        check_secrets(config, log)
    monkeypatch.setenv(names[missing], "x")
    check_secrets(config, log)


# --- headers ----------------------------------------------------------------------------------


def no_client(host: str) -> Any:
    raise AssertionError(host)


async def test_headers_and_a_bearer_token(log, monkeypatch):
    monkeypatch.setenv("A_KEY", "k")
    monkeypatch.setenv("A_TOKEN", "t")
    config = AuthConfig(headers={"x-api-key": ref("env", "A_KEY")}, bearer=ref("env", "A_TOKEN"))
    credentials = Credentials(config, client=no_client, log=log, rng=random.Random(1))
    assert credentials.configured
    assert await credentials.headers() == [("x-api-key", "k"), ("authorization", "Bearer t")]
    monkeypatch.setenv("A_TOKEN", "u")
    assert ("authorization", "Bearer u") in await credentials.headers()
    credentials.rejected([("authorization", "Bearer u")])  # what is configured stays
    assert ("authorization", "Bearer u") in await credentials.headers()


async def test_none(log):
    for config in (None, AuthConfig()):
        credentials = Credentials(config, client=no_client, log=log, rng=random.Random(1))
        assert not credentials.configured
        assert await credentials.headers() == []


# --- OAuth ------------------------------------------------------------------------------------


class Issuer:
    """A token endpoint: answers as told, and counts."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self.at: list[float] = []
        self.delay = 0.0
        self.life: Any = 100
        self.status = 200
        self.body: Any = None
        """Instead of a token."""
        self.headers: dict[str, str] = {}

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.at.append(trio.current_time())
        await trio.sleep(self.delay)
        if self.body is not None:
            content = self.body if isinstance(self.body, bytes) else msgspec.json.encode(self.body)
            return httpx.Response(self.status, content=content, headers=self.headers)
        answer: dict[str, Any] = {"token_type": "Bearer", "access_token": f"t-{len(self.requests)}"}
        if self.life is not None:
            answer["expires_in"] = self.life
        return httpx.Response(self.status, json=answer, headers=self.headers)

    @property
    def form(self) -> dict[str, list[str]]:
        return parse_qs(self.requests[-1].content.decode())


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@asynccontextmanager
async def oauth(
    issuer: Issuer, log: Log, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[Credentials]:
    """Running credentials. The jitter is the longest there is, so that times are known."""
    monkeypatch.setenv("CLIENT_ID", "me & you")
    monkeypatch.setenv("CLIENT_SECRET", "hush+hush")
    trusted = options.pop("trusted_hosts", frozenset())
    config = OAuthConfig(
        **{
            "token_url": TOKEN_URL,
            "client_id": ref("env", "CLIENT_ID"),
            "client_secret": ref("env", "CLIENT_SECRET"),
            **options,
        }
    )
    rng = random.Random()
    monkeypatch.setattr(rng, "uniform", lambda _low, high: high)
    asked: list[str] = []

    def client(host: str) -> httpx.AsyncClient:
        asked.append(host)
        return httpx.AsyncClient(transport=httpx.MockTransport(issuer))

    credentials = Credentials(
        AuthConfig(oauth=config), client=client, log=log, rng=rng, trusted_hosts=trusted
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(credentials.run)
        await trio.testing.wait_all_tasks_blocked()
        yield credentials
        nursery.cancel_scope.cancel()
    assert [request.url.host for request in issuer.requests] == asked


async def token(credentials: Credentials) -> str:
    ((name, value),) = await credentials.headers()
    assert name == "authorization"
    return value.removeprefix("Bearer ")


async def test_the_request_is_that_of_the_specification(autojump_clock, issuer, log, monkeypatch):
    options = {"scopes": ("a:read", "b"), "resource": "https://agent.test/"}
    async with oauth(issuer, log, monkeypatch, **options) as credentials:
        assert await token(credentials) == "t-1"
        (request,) = issuer.requests
        assert (request.method, str(request.url)) == ("POST", TOKEN_URL)
        assert request.headers["content-type"] == "application/x-www-form-urlencoded"
        assert issuer.form == {
            "grant_type": ["client_credentials"],
            "scope": ["a:read b"],
            "resource": ["https://agent.test/"],
        }
        # RFC 6749 2.3.1: both are form-encoded before they are joined
        scheme, _, value = request.headers["authorization"].partition(" ")
        assert scheme == "Basic"
        assert base64.b64decode(value) == b"me+%26+you:hush%2Bhush"


async def test_concurrent_calls_share_one_fetch(autojump_clock, issuer, log, monkeypatch):
    issuer.delay = 3
    got: list[str] = []
    async with oauth(issuer, log, monkeypatch) as credentials:

        async def call() -> None:
            got.append(await token(credentials))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(call)
    assert got == ["t-1"] * 50
    assert len(issuer.requests) == 1


async def test_a_token_is_renewed_before_it_expires(autojump_clock, issuer, log, monkeypatch):
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch) as credentials:
        await trio.sleep_until(begin + 79)
        assert await token(credentials) == "t-1"
        issuer.delay = 5
        await trio.sleep_until(begin + 81)
        assert await token(credentials) == "t-1"  # nobody waits for the renewal
        assert trio.current_time() == pytest.approx(begin + 81)
        await trio.sleep_until(begin + 86)
        assert await token(credentials) == "t-2"


async def test_a_failed_renewal_keeps_a_valid_token(autojump_clock, issuer, log, monkeypatch):
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch) as credentials:
        await trio.sleep_until(begin + 70)
        issuer.status, issuer.body = 503, {}
        await trio.sleep_until(begin + 99)
        assert len(issuer.requests) > 1
        assert await token(credentials) == "t-1"
        await trio.sleep_until(begin + 101)
        with pytest.raises(CredentialsUnavailable, match="HTTP 503"):
            await credentials.headers()
        issuer.status, issuer.body = 200, None
        await trio.sleep_until(begin + 170)
        assert (await token(credentials)).startswith("t-")


async def test_failures_are_backed_off_and_answered_at_once(
    autojump_clock, issuer, lines, monkeypatch
):
    log, text = lines
    issuer.status, issuer.body = 400, {"error": "invalid_client", "error_description": "s3cret"}
    async with oauth(issuer, log, monkeypatch) as credentials:
        begin = trio.current_time()
        while trio.current_time() < begin + 400:
            before = trio.current_time()
            with pytest.raises(CredentialsUnavailable, match="invalid_client") as raised:
                await credentials.headers()
            assert trio.current_time() == before
            assert "s3cret" not in str(raised.value)
            await trio.sleep(0.3)
    gaps = [round(b - a) for a, b in zip(issuer.at, issuer.at[1:], strict=False)]
    assert gaps[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert "s3cret" not in text()
    assert "hush" not in text()


async def test_the_wall_clock_does_not_matter(autojump_clock, issuer, log, monkeypatch):
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch) as credentials:
        for day in (86_400.0, -86_400.0):
            monkeypatch.setattr(time, "time", lambda day=day: 1e9 + day)
            await trio.sleep(20)
            assert await token(credentials) == "t-1"
        await trio.sleep_until(begin + 81)
        assert await token(credentials) == "t-2"
    assert len(issuer.requests) == 2


async def test_a_refused_token_is_dropped(autojump_clock, issuer, log, monkeypatch):
    async with oauth(issuer, log, monkeypatch) as credentials:
        assert await token(credentials) == "t-1"
        issuer.delay = 1
        credentials.rejected([("x", "y"), ("authorization", "Bearer t-1")])
        assert await token(credentials) == "t-2"  # the next call waits for the new one
        credentials.rejected([("authorization", "Bearer t-1")])  # a late answer to the old one
        assert await token(credentials) == "t-2"
        credentials.rejected([("authorization", "Bearer t-2")])  # too soon after the last
        assert await token(credentials) == "t-2"
        assert len(issuer.requests) == 2
        await trio.sleep(10)
        credentials.rejected([("authorization", "Bearer t-2")])
        assert await token(credentials) == "t-3"


async def test_a_token_that_is_refused_during_a_back_off_is_not_waited_for(
    autojump_clock, issuer, log, monkeypatch
):
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch) as credentials:
        issuer.status, issuer.body = 500, b"no"
        await trio.sleep_until(begin + 95)
        assert await token(credentials) == "t-1"
        credentials.rejected([("authorization", "Bearer t-1")])
        before = trio.current_time()
        with pytest.raises(CredentialsUnavailable, match="HTTP 500"):
            await credentials.headers()
        assert trio.current_time() == before


@pytest.mark.parametrize(
    ("expires_in", "life"),
    [
        (50, 50),
        (50.5, 50.5),
        ("50", 50),
        (None, 300),
        (0, 300),
        (-5, 300),
        (True, 300),
        ("soon", 300),
        ([], 300),
        (10**9, 86_400),
        ("9" * 400, 86_400),
    ],
)
async def test_how_long_a_token_lives(autojump_clock, issuer, log, monkeypatch, expires_in, life):
    issuer.life = expires_in
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch):
        await trio.sleep_until(begin + life * 0.8 + 1)
    assert issuer.at[1] - begin == pytest.approx(life * 0.8)


async def test_a_short_life_is_no_storm_and_no_expired_token(
    autojump_clock, issuer, log, monkeypatch
):
    issuer.life = 0.5
    begin = trio.current_time()
    async with oauth(issuer, log, monkeypatch) as credentials:
        assert await token(credentials) == "t-1"
        await trio.sleep_until(begin + 0.6)
        assert await token(credentials) == "t-2"
        await trio.sleep_until(begin + 10)
    assert len(issuer.requests) <= 12


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>sign in</html>",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {},
        {"access_token": ""},
        {"access_token": None},
        {"access_token": ["t"]},
        {"access_token": "t\r\nx-injected: 1"},
        {"access_token": "caf\xe9"},
        {"access_token": "t", "token_type": "mac"},
        {"access_token": "t", "token_type": 1},
    ],
)
async def test_answers_that_hold_no_token(autojump_clock, issuer, log, monkeypatch, body):
    issuer.body = body
    async with oauth(issuer, log, monkeypatch) as credentials:
        with pytest.raises(CredentialsUnavailable, match=r"https://login\.test/token"):
            await credentials.headers()
        issuer.body = None
        await trio.sleep(2)
        assert (await token(credentials)).startswith("t-")


async def test_a_slow_endpoint_is_given_up(autojump_clock, issuer, log, monkeypatch):
    issuer.delay = 3600
    async with oauth(issuer, log, monkeypatch) as credentials:
        begin = trio.current_time()
        with pytest.raises(CredentialsUnavailable, match="10 s"):
            await credentials.headers()
        assert trio.current_time() - begin == pytest.approx(10)


async def test_a_bug_ends_one_fetch(autojump_clock, lines, monkeypatch):
    log, text = lines

    class Broken(Issuer):
        async def __call__(self, request: httpx.Request) -> httpx.Response:
            response = await super().__call__(request)
            if len(self.requests) == 1:
                raise RuntimeError(request.headers["authorization"])
            return response

    async with oauth(Broken(), log, monkeypatch) as credentials:
        with pytest.raises(CredentialsUnavailable, match="internal error"):
            await credentials.headers()
        await trio.sleep(2)
        assert await token(credentials) == "t-2"
    assert "RuntimeError" in text()
    assert "Basic" not in text()


async def test_a_redirect_of_the_token_endpoint_is_not_followed(
    autojump_clock, issuer, log, monkeypatch
):
    issuer.status, issuer.body = 307, b""
    issuer.headers = {"location": "https://thief.test/token"}
    async with oauth(issuer, log, monkeypatch) as credentials:
        with pytest.raises(CredentialsUnavailable, match="HTTP 307"):
            await credentials.headers()
    assert {request.url.host for request in issuer.requests} == {"login.test"}


# --- the discovery document -------------------------------------------------------------------

DOCUMENT = "/.well-known/oauth-authorization-server"


class Discovery(Issuer):
    """A token endpoint that a document names."""

    def __init__(self, document: Any) -> None:
        super().__init__()
        self.document = document

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != DOCUMENT:
            return await super().__call__(request)
        self.requests.append(request)
        return httpx.Response(200, json=self.document)


async def test_the_document_names_the_endpoint(autojump_clock, log, monkeypatch):
    discovery = Discovery({"token_endpoint": "https://tokens.test/t?x=1"})
    url = f"https://login.test{DOCUMENT}"
    async with oauth(discovery, log, monkeypatch, token_url=url) as credentials:
        assert await token(credentials) == "t-2"
    asked, posted = discovery.requests
    assert "authorization" not in asked.headers
    assert str(posted.url) == "https://tokens.test/t?x=1"


@pytest.mark.parametrize(
    ("source", "endpoint"),
    [
        ("https://login.test", "http://login.test/t"),
        ("https://login.test", "http://127.0.0.1:1/t"),
        ("https://login.test", "ftp://login.test/t"),
        ("https://login.test", "https://user:pw@login.test/t"),
        ("https://login.test", "https:///t"),
        ("https://login.test", "https://[::1/t"),
        ("https://login.test", "https://login.test:0/t"),
        ("https://login.test", "/t"),
        ("https://login.test", ""),
        ("https://login.test", None),
        ("https://login.test", 7),
        ("http://127.0.0.1", "http://login.test/t"),
    ],
)
async def test_endpoints_that_get_no_secret(autojump_clock, log, monkeypatch, source, endpoint):
    discovery = Discovery({"token_endpoint": endpoint})
    async with oauth(discovery, log, monkeypatch, token_url=source + DOCUMENT) as credentials:
        with pytest.raises(CredentialsUnavailable, match="token_endpoint"):
            await credentials.headers()
    assert {request.url.path for request in discovery.requests} == {DOCUMENT}


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:81/t", "http://login.test/t"])
async def test_plaintext_to_loopback_and_trusted_hosts(autojump_clock, log, monkeypatch, endpoint):
    discovery = Discovery({"token_endpoint": endpoint})
    url, trusted = f"http://127.0.0.1{DOCUMENT}", frozenset({"login.test"})
    async with oauth(
        discovery, log, monkeypatch, token_url=url, trusted_hosts=trusted
    ) as credentials:
        assert await token(credentials) == "t-2"


# --- what is shown ----------------------------------------------------------------------------


async def test_nothing_shows_a_secret(autojump_clock, issuer, lines, monkeypatch):
    log, text = lines
    monkeypatch.setenv("SHOWN", "s3cret-value")
    shown = []
    async with oauth(issuer, log, monkeypatch) as credentials:
        await token(credentials)
        shown += [repr(credentials), repr(vars(credentials)), str(credentials)]
        secret = Secret(ref("env", "SHOWN"), log)
        secret.read()
        shown += [repr(secret), str(secret)]
        config = AuthConfig(bearer=ref("env", "SHOWN"))
        shown += [repr(config), config.model_dump_json()]
        issuer.status, issuer.body = 401, {"error": "hush+hush"}
        credentials.rejected([("authorization", "Bearer t-1")])
        with pytest.raises(CredentialsUnavailable) as raised:
            await credentials.headers()
        shown += [repr(raised.value), str(raised.value), repr(raised.value.__cause__)]
    everything = "\n".join([*shown, text()])
    for hidden in ("s3cret-value", "hush", "t-1", "me & you"):
        assert hidden not in everything


# --- names that re-resolve --------------------------------------------------------------------


@pytest.mark.parametrize("binding", ["JSONRPC", "GRPC"])
@pytest.mark.parametrize(
    ("url", "trusted", "proxy", "refused"),
    [
        ("http://agent.test:7101", (), None, True),
        ("http://agent.test:7101", ("agent.test",), None, False),
        ("https://agent.test:7101", (), None, False),
        ("http://localhost:7101", (), None, True),
        ("http://agent.test:7101", (), "http://127.0.0.1:1", True),
        ("https://agent.test:7101", (), "http://127.0.0.1:1", False),
    ],
)
async def test_credentials_do_not_follow_a_name_in_plaintext(binding, url, trusted, proxy, refused):
    """The card's name was this machine when the card was read; now it is somewhere else."""
    where: list[str] = []

    async def resolve(host: str) -> list[str]:
        where.append(host)
        return ["192.0.2.1"]  # an address that is nobody's (RFC 5737)

    entry = {"url": url, "protocolBinding": binding, "protocolVersion": "1.0"}
    origin = CardOrigin(scheme="http", host="agent.test", kind=AddressKind.LOOPBACK)
    policy = CardPolicy(
        origin=origin,
        trusted_hosts=frozenset({*trusted, "localhost"} if "localhost" in url else trusted),
        credentials_configured=True,
    )
    card = read_card(msgspec.json.encode({"name": "a", "supportedInterfaces": [entry]}), policy)
    (interface,) = card.candidates
    connections = Connections(
        Dialer(stall_seconds=1, resolve=resolve),
        identity=TlsIdentity(),
        header_bytes=4096,
        connect_timeout=0.05,
        proxy=proxy,
        carries_credentials=True,
    )
    async with trio.open_nursery() as nursery:
        connections.start(nursery)
        connections.use(
            card, AddressPolicy(origin.kind, "agent.test", frozenset(trusted), frozenset())
        )
        with pytest.raises(ExchangeBroken) as raised:
            await connections.get(interface).open(Request("POST", "/", [], b""), Progress())
        nursery.cancel_scope.cancel()
    broken = raised.value.broken
    assert not broken.written
    assert (broken.cause is Break.ADDRESS_POLICY) is refused, broken
