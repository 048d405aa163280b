"""What goes out in whose name: credentials, certificates, tokens, and what never leaves its origin."""

from __future__ import annotations

import gzip
import json
import re
import ssl
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Process,
    Sidecar,
    card,
    config_text,
    free_port,
    http,
    make_tls,
    peer_sync,
    running,
    toml,
    write_card,
)
from tests.system.sites import Site, connect_proxy, json_answer, result_of, site
from tests.system.world import RemoteAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Peer, TlsFiles
    from tests.system.sites import Answer, Asked, Proxy
    from tests.system.world import Answer as Outcome

pytestmark = pytest.mark.system

BINDINGS = ("JSONRPC", "HTTP+JSON", "GRPC")
SECRETS = {
    "run": "s3cret-run",
    "discovery": "s3cret-discovery",
    "key": "s3cret-key",
    "client": "s3cret-client",
    "caller": "s3cret-caller",
    "query": "s3cret-query",
    "cookie": "s3cret-cookie",
    "netrc": "s3cret-netrc",
}
TOKEN = "s3cret-token"


def is_card_path(path: str) -> bool:
    return path.endswith("/.well-known/agent-card.json")


class Tokens:
    """A token endpoint."""

    def __init__(self) -> None:
        self.count = 0
        self.down = False

    def __call__(self, asked: Asked) -> Answer:
        if self.down:
            return json_answer({"error": "server_error", "hint": SECRETS["client"]}, 503)
        self.count += 1
        body = {"access_token": f"{TOKEN}-{self.count}", "token_type": "Bearer", "expires_in": 600}
        return json_answer(body)


@dataclass(kw_only=True)
class Sites:
    """The servers around the daemon."""

    home: Site
    """127.0.0.1: cards and interfaces."""
    away: Site
    """127.0.0.2: another host."""
    trap: Site
    """What the environment calls a proxy."""
    secure: Site
    """127.0.0.1 over TLS; asks for a client certificate, takes none as well."""
    login: Site
    """127.0.0.2 over TLS, the same."""
    strict: Site
    """127.0.0.1 over TLS; nobody comes in without a certificate."""


@dataclass(kw_only=True)
class World(Sites):
    """One daemon with an agent for each case; its environment is full of traps."""

    daemon: Sidecar
    proxy: Proxy
    tokens: Tokens
    cards: dict[str, dict[str, Any]]
    """By agent, as `home` serves them."""
    key_log: Path
    shown: list[str] = field(default_factory=list)
    """All answers that callers got."""

    def agent(self, name: str) -> RemoteAgent:
        return RemoteAgent(self.daemon, name)

    async def send(
        self, name: str, binding: str = "JSONRPC", headers: dict[str, str] | None = None
    ) -> Outcome:
        answer = await self.agent(name).send(binding, headers=headers)
        self.shown.append(repr(answer))
        return answer

    async def refetch(self, name: str) -> None:
        """Have the daemon fetch a card."""
        await self.agent(name).fetch_card()

    def calls(self, name: str, where: Site | None = None) -> list[Asked]:
        """What came to the interface of an agent."""
        return (where or self.home).at(f"/{name}/rpc")


def client_tls(tls: TlsFiles, verify: ssl.VerifyMode) -> ssl.SSLContext:
    """A server that lets clients show a certificate, or wants one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    context.load_verify_locations(tls.ca)
    context.verify_mode = verify
    return context


@pytest.fixture(scope="module")
def our_tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    names = ("127.0.0.1", "127.0.0.2", "localhost")
    return make_tls(tmp_path_factory.mktemp("tls"), *names)


@pytest.fixture(scope="module")
def named_tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("named"), "agent.internal")


@pytest.fixture(scope="module")
def tls_peers(our_tls: TlsFiles, named_tls: TlsFiles) -> Iterator[dict[str, Peer]]:
    """Agents over TLS; those called `mutual` want a certificate."""
    plain, mutual = our_tls.peer_args, [*our_tls.peer_args, "--tls-ca", str(our_tls.ca)]
    with (
        peer_sync("raw_http", *plain) as http_peer,
        peer_sync("h2_agent", *plain) as grpc_peer,
        peer_sync("h2_agent", *mutual) as mutual_grpc,
        peer_sync("raw_http", *named_tls.peer_args) as named,
    ):
        yield {
            "http": http_peer,
            "grpc": grpc_peer,
            "mutual-grpc": mutual_grpc,
            "named": named,
        }


@pytest.fixture(scope="module")
def world(
    our_tls: TlsFiles, named_tls: TlsFiles, tls_peers: dict[str, Peer], first: Peer
) -> Iterator[World]:
    optional, required = (
        client_tls(our_tls, verify) for verify in (ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)
    )
    with (
        tempfile.TemporaryDirectory(prefix="credentials-") as name,
        site() as home,
        site("127.0.0.2") as away,
        site() as trap,
        site(tls=optional) as secure,
        site("127.0.0.2", tls=optional) as login,
        site(tls=required) as strict,
        connect_proxy() as proxy,
    ):
        sites = Sites(home=home, away=away, trap=trap, secure=secure, login=login, strict=strict)
        directory = Path(name)
        for key, value in SECRETS.items():
            (directory / key).write_text(value + "\n")
        tokens = Tokens()
        cards = cards_of(sites)
        serve(sites, cards, tokens)
        agents = agents_of(directory, sites, proxy, (our_tls, named_tls), tls_peers, first)
        text = config_text(agents, '[log]\nlevel = "debug"\ncalls = true\n')
        (directory / "config.toml").write_text(text)
        key_log = directory / "keys"
        argv = [sys.executable, "-m", "sidecar", "run", "--config", f"{directory}/config.toml"]
        environment = traps(directory, trap.port, key_log, our_tls)
        process = Process("sidecar", argv, cwd=directory, env=environment)
        try:
            daemon = Sidecar(process, text, directory)
            trio.run(until_up, daemon)
            yield World(
                **vars(sites),
                daemon=daemon,
                proxy=proxy,
                tokens=tokens,
                cards=cards,
                key_log=key_log,
            )
            assert "internal error" not in process.log()
        finally:
            process.stop()


def traps(directory: Path, port: int, key_log: Path, tls: TlsFiles) -> dict[str, str]:
    """What an environment may hold, and a program of this kind must not heed (D70, D95)."""
    (directory / ".netrc").write_text(
        f"machine 127.0.0.1 login someone password {SECRETS['netrc']}\n"
    )
    made = {
        "HOME": str(directory),
        "NETRC": str(directory / ".netrc"),
        "NO_PROXY": "10.0.0.0/8,[::1]:80,*.svc,.local, ,localhost",
        "SSL_CERT_FILE": str(tls.ca),
        "REQUESTS_CA_BUNDLE": str(tls.ca),
        "SSLKEYLOGFILE": str(key_log),
    }
    for variable, value in {
        "HTTP_PROXY": f"http://127.0.0.1:{port}",
        "HTTPS_PROXY": f"127.0.0.1:{port}",
        "ALL_PROXY": f"socks5://127.0.0.1:{port}",
    }.items():
        made |= {variable: value, variable.lower(): value}
    return made


async def until_up(daemon: Sidecar) -> None:
    with trio.fail_after(30):
        while daemon.process.alive:
            try:
                if (await http(daemon.admin, "GET", "/healthz")).status == 200:
                    return
            except OSError:
                pass
            await trio.sleep(0.02)
    raise daemon.process.died("not up")


def cards_of(sites: Sites) -> dict[str, dict[str, Any]]:
    """The cards that `home` serves."""
    home, away = sites.home, sites.away
    at_home = {
        name: card([("JSONRPC", f"{home.url}/{name}/rpc")])
        for name in ("static", "oauth", "revoked", "moving", "redirected", "cookies", "proxied")
    }
    closed = f"http://127.0.0.1:{free_port()}/rpc"
    return {
        **at_home,
        "foreign": card([("JSONRPC", closed), ("JSONRPC", f"{away.url}/foreign/rpc")]),
        "trusted": card([("JSONRPC", closed), ("JSONRPC", f"{away.url}/trusted/rpc")]),
        "callers": card([("JSONRPC", closed), ("JSONRPC", f"{away.url}/callers/rpc")]),
    }


def serve(sites: Sites, cards: dict[str, dict[str, Any]], tokens: Tokens) -> None:
    """Give the sites what they answer with."""
    home, secure = sites.home, sites.secure

    def card_for(name: str) -> Any:
        def answer(asked: Asked) -> Answer:
            wanted = f"Bearer {SECRETS['discovery']}"
            if name == "revoked" or (
                name == "static" and asked.headers.get("authorization") != wanted
            ):
                return json_answer({"hint": SECRETS["discovery"]}, 401, www_authenticate="Bearer")
            return json_answer(cards[name], set_cookie=f"card={SECRETS['cookie']}; Path=/")

        return answer

    for name in cards:
        home.routes[f"/{name}/.well-known/agent-card.json"] = card_for(name)
        home.routes[f"/{name}/rpc"] = result_of
        sites.away.routes[f"/{name}/rpc"] = result_of
    home.routes["/token"] = tokens
    sites.login.routes["/token"] = tokens
    secure.routes["/mutual/.well-known/agent-card.json"] = lambda _: json_answer(
        card([("JSONRPC", f"{secure.url}/mutual/rpc")])
    )
    secure.routes["/mutual/rpc"] = result_of
    sites.strict.routes["/strict/rpc"] = result_of


def agents_of(
    directory: Path,
    sites: Sites,
    proxy: Proxy,
    tls: tuple[TlsFiles, TlsFiles],
    peers: dict[str, Peer],
    plain: Peer,
) -> dict[str, Any]:
    """The agents of the configuration."""
    home, secure = sites.home, sites.secure
    run = {"bearer": f"file:{directory}/run"}
    oauth = {
        "token_url": f"{home.url}/token",
        "client_id": f"file:{directory}/key",
        "client_secret": f"file:{directory}/client",
    }
    ours, named = tls
    trust = {"ca_file": ours.ca}
    shows = {"client_cert_file": ours.client_cert, "client_key_file": ours.client_key}

    def at_home(name: str, **keys: Any) -> dict[str, Any]:
        return {"card": f"{home.url}/{name}", **keys}

    def of(name: str, *interfaces: tuple[str, str]) -> Path:
        return write_card(directory, card(interfaces), f"{name}.json")

    every = {
        binding: of(
            f"tls-{binding[0]}",
            (binding, peers["grpc" if binding == "GRPC" else "http"].urls[binding]),
        )
        for binding in BINDINGS
    }
    mutual = {
        "JSONRPC": of("mutual-j", ("JSONRPC", f"{sites.strict.url}/strict/rpc")),
        "GRPC": of("mutual-g", ("GRPC", peers["mutual-grpc"].urls["GRPC"])),
    }
    good = ("JSONRPC", plain.urls["JSONRPC"])
    agents: dict[str, Any] = {
        "static": at_home(
            "static",
            auth={**run, "headers": {"X-Api-Key": f"file:{directory}/key"}},
            discovery_auth={"bearer": f"file:{directory}/discovery"},
        ),
        "oauth": at_home("oauth", auth={"oauth": oauth}),
        "revoked": at_home("revoked", discovery_auth={"bearer": f"file:{directory}/discovery"}),
        "moving": at_home("moving", auth=run),
        "redirected": at_home("redirected", auth=run),
        "cookies": at_home("cookies"),
        "proxied": at_home(
            "proxied",
            proxy=f"http://127.0.0.1:{proxy.port}",
            auth={"oauth": oauth},
            trusted_hosts=["127.0.0.1"],
        ),
        "foreign": at_home("foreign", auth=run),
        "trusted": at_home("trusted", auth=run, trusted_hosts=["127.0.0.2"]),
        "callers": at_home("callers"),
        "query": {"card": f"{home.url}/none.json?key={SECRETS['query']}"},
        "mutual": {
            "card": f"{secure.url}/mutual",
            "tls": {**trust, **shows, "server_name": "localhost"},
            "auth": {"oauth": {**oauth, "token_url": f"{sites.login.url}/token"}},
        },
        "named": {
            "card": of("named", ("JSONRPC", peers["named"].urls["JSONRPC"])),
            "tls": {"ca_file": named.ca, "server_name": "agent.internal"},
        },
        "misnamed": {
            "card": of("misnamed", ("JSONRPC", peers["named"].urls["JSONRPC"])),
            "tls": {"ca_file": named.ca},
        },
        "untrusting-card": {"card": f"{secure.url}/mutual"},
    }
    for binding in BINDINGS:
        agents[f"tls-{binding[0].lower()}"] = {"card": every[binding], "tls": trust}
        agents[f"untrusting-{binding[0].lower()}"] = {"card": every[binding]}
    for binding, file in mutual.items():
        agents[f"mutual-{binding[0].lower()}"] = {"card": file, "tls": {**trust, **shows}}
        agents[f"unshown-{binding[0].lower()}"] = {"card": file, "tls": trust}
    wrong = {
        "http11": peers["http"].urls["JSONRPC"].removesuffix("/rpc"),
        "no-alpn": secure.url,
        "plain": f"https://127.0.0.1:{plain.ports['http']}",
        "tls": peers["grpc"].urls["GRPC"].replace("https", "http"),
    }
    for kind, url in wrong.items():
        agents[f"wrong-{kind}"] = {
            "card": of(f"wrong-{kind}", ("GRPC", url), good),
            "tls": trust,
            "connect_timeout_seconds": 1.0,
        }
    return agents


# --- where credentials go ---------------------------------------------------------------------


async def test_discovery_and_calls_have_their_own(world):
    answer = await world.send("static")
    assert not answer.failed
    for asked in world.home.at("/static/.well-known/agent-card.json"):
        assert asked.headers["authorization"] == f"Bearer {SECRETS['discovery']}"
        assert "x-api-key" not in asked.headers
    (call,) = world.calls("static")
    assert call.headers["authorization"] == f"Bearer {SECRETS['run']}"
    assert call.headers["x-api-key"] == SECRETS["key"]


async def test_what_is_configured_wins_over_the_caller(world):
    await world.send("static", headers={"authorization": "Bearer mine", "x-api-key": "mine"})
    headers = world.calls("static")[-1].headers
    assert headers["authorization"] == f"Bearer {SECRETS['run']}"
    assert headers["x-api-key"] == SECRETS["key"]


async def test_a_changed_secret_is_used_at_once(world):
    file = world.daemon.directory / "key"
    try:
        file.write_text("s3cret-rotated\n")
        await world.send("static")
        assert world.calls("static")[-1].headers["x-api-key"] == "s3cret-rotated"
        file.unlink()
        await world.send("static")
        assert world.calls("static")[-1].headers["x-api-key"] == "s3cret-rotated"
    finally:
        file.write_text(SECRETS["key"] + "\n")


async def test_a_card_that_is_refused(world):
    """D06: one clear condition, paced, and nothing of the token."""
    answer = await world.send("revoked")
    assert (answer.reason, answer.delivered) == ("CARD_UNAVAILABLE", "no")
    assert "401" in answer.message
    assert "discovery_auth" in answer.message
    before = len(world.home.at("/revoked/.well-known/agent-card.json"))
    await trio.sleep(1)
    assert len(world.home.at("/revoked/.well-known/agent-card.json")) <= before + 2
    log = [line for line in world.daemon.log().splitlines() if "agent=revoked" in line]
    assert len([line for line in log if "card not available" in line]) == 1


async def test_interfaces_elsewhere_are_not_eligible_while_credentials_are_configured(world):
    answer = await world.send("foreign")
    assert (answer.reason, answer.delivered) == ("NOT_DELIVERED", "no")
    assert world.calls("foreign", world.away) == []
    (entry,) = (await world.agent("foreign").status())["ineligible"]
    assert "trusted_hosts" in entry["reason"]


async def test_a_trusted_host_gets_them(world):
    answer = await world.send("trusted")
    assert (answer.failed, answer.interface) == (False, "1-jsonrpc")
    (call,) = world.calls("trusted", world.away)
    assert call.headers["authorization"] == f"Bearer {SECRETS['run']}"


CALLERS = {
    "authorization": f"Bearer {SECRETS['caller']}",
    "x-api-key": SECRETS["caller"],
    "cookie": f"c={SECRETS['caller']}",
}


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_failover_does_not_take_the_callers_credentials_elsewhere(world, binding, name):
    """D72: the second interface is on another host, so the call ends and says why."""
    before = len(world.calls("callers", world.away))
    answer = await world.send("callers", binding, {name: CALLERS[name]})
    assert answer.failed
    assert (answer.reason, answer.delivered) == ("NOT_DELIVERED", "no")
    assert "trusted_hosts" in answer.message
    assert len(world.calls("callers", world.away)) == before


async def test_nothing_that_an_application_adds_goes_elsewhere(world):
    harmless = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    secret = {
        "cookie": CALLERS["cookie"],
        "x-session": SECRETS["caller"],
        "api-key": SECRETS["caller"],
        "proxy-authorization": f"Basic {SECRETS['caller']}",
    }
    answer = await world.send("callers", headers={**harmless, **secret})
    assert (answer.failed, answer.interface) == (False, "1-jsonrpc")
    call = world.calls("callers", world.away)[-1]
    assert call.headers.items() >= harmless.items()
    assert SECRETS["caller"] not in repr(call)


async def test_at_home_they_are_relayed(world):
    await world.send("cookies", headers={**CALLERS, "x-session": SECRETS["caller"]})
    headers = world.calls("cookies")[-1].headers
    assert headers["authorization"] == CALLERS["authorization"]
    assert headers["x-session"] == SECRETS["caller"]
    assert "cookie" not in headers


# --- redirects, cards that change, cookies ----------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("place", ["away", "port"])
async def test_a_redirect_of_a_call_takes_nothing_along(world, status, place):
    target = world.away if place == "away" else world.trap
    connections = target.connections
    location = {"location": f"{target.url}/redirected/rpc"}
    world.home.routes["/redirected/rpc"] = lambda _: (status, location, b"")
    answer = await world.send("redirected")
    assert answer.failed
    assert answer.delivered == ("no" if status in {307, 308} else "unknown")
    assert target.connections == connections
    assert "location" not in answer.headers


async def test_a_redirect_of_a_card_takes_nothing_along(world):
    path = "/static/.well-known/agent-card.json"
    serving = world.home.routes[path]
    try:
        for target in (world.away, world.trap):
            location = {"location": f"{target.url}/card.json"}
            world.home.routes[path] = lambda _, location=location: (302, location, b"")
            connections = target.connections
            reply = await world.agent("static").fetch_card()
            assert reply.status == 502
            assert "another origin" in reply.body.decode()
            assert target.connections == connections
        # Within the origin it may.
        world.home.routes["/elsewhere.json"] = serving
        world.home.routes[path] = lambda _: (302, {"location": "/elsewhere.json"}, b"")
        assert (await world.agent("static").fetch_card()).status == 200
        asked = world.home.at("/elsewhere.json")[-1]
        assert asked.headers["authorization"] == f"Bearer {SECRETS['discovery']}"
    finally:
        world.home.routes[path] = serving


async def test_a_card_that_changes_does_not_move_credentials(world):
    assert not (await world.send("moving")).failed
    before = len(world.calls("moving"))
    original = world.cards["moving"]
    try:
        world.cards["moving"] = card([("JSONRPC", f"{world.away.url}/moving/rpc")])
        reply = await world.agent("moving").fetch_card()
        assert reply.status == 502
        # The candidates that were there stay.
        assert not (await world.send("moving")).failed
        both = [("JSONRPC", f"{one.url}/moving/rpc") for one in (world.away, world.home)]
        world.cards["moving"] = card(both)
        assert (await world.agent("moving").fetch_card()).status == 200
        assert (await world.send("moving")).interface == "1-jsonrpc"
    finally:
        world.cards["moving"] = original
    assert len(world.calls("moving")) == before + 2
    assert world.calls("moving", world.away) == []


async def test_cookies_of_an_agent_end_here(world):
    """D69: one client's session is not another's."""

    def with_cookie(asked: Asked) -> Answer:
        status, headers, body = result_of(asked)
        return status, {**headers, "set-cookie": f"sid={SECRETS['cookie']}; Path=/"}, body

    world.home.routes["/cookies/rpc"] = with_cookie
    answer = await world.send("cookies")
    assert "set-cookie" not in answer.headers
    await world.send("cookies")
    await world.refetch("cookies")
    for one in (world.home, world.away, world.secure, world.login):
        assert [asked for asked in one.asked if "cookie" in asked.headers] == []


@pytest.mark.parametrize("accepted", ["gzip", "identity", None])
async def test_bodies_are_what_their_headers_say(world, accepted):
    """D71: nothing is compressed on the way, whatever the client would take; a card may be."""
    headers = {} if accepted is None else {"accept-encoding": accepted}
    answer = await world.send("cookies", headers=headers)
    assert not answer.failed  # read as plain JSON
    assert "content-encoding" not in answer.headers
    assert world.calls("cookies")[-1].headers["accept-encoding"] == "identity"
    path = "/cookies/.well-known/agent-card.json"
    serving = world.home.routes[path]

    def zipped(asked: Asked) -> Answer:
        status, fields, body = serving(asked)
        return status, {**fields, "content-encoding": "gzip"}, gzip.compress(body)

    world.home.routes[path] = zipped
    try:
        reply = await world.agent("cookies").fetch_card()
    finally:
        world.home.routes[path] = serving
    assert (reply.status, reply.get("content-encoding")) == (200, None)
    assert reply.json()["name"] == "agent"


# --- OAuth ------------------------------------------------------------------------------------


async def test_one_token_for_concurrent_calls_and_a_new_one_after_401(world):
    world.home.asked.clear()
    refused: set[str] = set()

    def picky(asked: Asked) -> Answer:
        if asked.headers["authorization"] in refused:
            return json_answer({}, 401, www_authenticate='Bearer error="invalid_token"')
        return result_of(asked)

    world.home.routes["/oauth/rpc"] = picky
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(world.send, "oauth")
    calls = world.calls("oauth")
    used = {asked.headers["authorization"] for asked in calls}
    assert len(calls) == 8
    assert len(used) == 1
    assert len(world.home.at("/token")) == 0  # it was fetched at the start, once
    refused |= used
    answer = await world.send("oauth")
    assert (answer.status, answer.headers["www-authenticate"]) == (
        401,
        'Bearer error="invalid_token"',
    )
    assert answer.headers.get("a2a-sidecar-delivered") is None
    assert not (await world.send("oauth")).failed
    assert len(world.calls("oauth")) == 10  # the refused call was not sent again
    assert len(world.home.at("/token")) == 1


async def test_without_a_token_nothing_is_sent(world, our_tls, tmp_path):
    """A daemon of its own: the token server is down from the beginning."""
    from tests.harness import sidecar  # noqa: PLC0415 - shadowed nowhere else

    down = free_port()
    (tmp_path / "x").write_text(SECRETS["client"])
    reference = f"file:{tmp_path}/x"
    oauth = {
        "token_url": f"http://127.0.0.1:{down}/t",
        "client_id": reference,
        "client_secret": reference,
    }
    world.home.asked.clear()
    keys = {"card": f"{world.home.url}/cookies", "auth": {"oauth": oauth}}
    async with sidecar(agents={"one": keys}, ready=True) as daemon:
        for binding, status in zip(BINDINGS, (200, 503, 14), strict=True):
            answer = await RemoteAgent(daemon, "one").send(binding)
            assert (answer.status, answer.reason) == (status, "CREDENTIALS_UNAVAILABLE")
            assert answer.delivered == "no"
            assert SECRETS["client"] not in repr(answer)
        assert world.calls("cookies") == []
        assert SECRETS["client"] not in daemon.log()


# --- TLS --------------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_private_authority_is_trusted_where_it_is_named(world, binding):
    """D74: the same for every binding, and SSL_CERT_FILE makes no difference."""
    initial = binding[0].lower()
    assert not (await world.send(f"tls-{initial}")).failed
    answer = await world.send(f"untrusting-{initial}")
    assert (answer.reason, answer.delivered) == ("NOT_DELIVERED", "no")
    assert answer.attempts[0].endswith("not_delivered tls")
    assert await world.agent(f"untrusting-{initial}").metric("attempts_total", result="tls") == 1


async def test_a_card_over_tls_is_verified_too(world):
    answer = await world.send("untrusting-card")
    assert answer.reason == "CARD_UNAVAILABLE"
    assert "certificate verify failed" in answer.message
    log = [line for line in world.daemon.log().splitlines() if "certificate verify failed" in line]
    for initial in "jhg":
        assert any(f"agent=untrusting-{initial}" in line and "127.0.0.1" in line for line in log)


@pytest.mark.parametrize("initial", ["j", "g"])
async def test_a_client_certificate(world, initial):
    assert not (await world.send(f"mutual-{initial}")).failed
    answer = await world.send(f"unshown-{initial}")
    # TLS 1.3 tells after the handshake, when bytes were written already: still not delivered.
    assert (answer.reason, answer.delivered) == ("NOT_DELIVERED", "no")


async def test_another_name_is_asked_for_and_verified(world):
    assert not (await world.send("named")).failed
    assert (await world.send("misnamed")).reason == "NOT_DELIVERED"


async def test_the_certificate_is_for_the_agent_alone(world):
    """The token endpoint is on another host: it sees no certificate, and is verified by its own name."""
    assert not (await world.send("mutual")).failed
    (call,) = world.secure.at("/mutual/rpc")
    assert call.headers["authorization"].startswith(f"Bearer {TOKEN}-")
    assert call.certificate
    assert all(one.certificate for one in world.secure.at("/mutual/.well-known/agent-card.json"))
    fetches = world.login.at("/token")
    assert len(fetches) == 1
    assert not fetches[0].certificate


@pytest.mark.parametrize("command", ["explain", "publish"])
async def test_so_it_is_for_the_other_commands(world, our_tls, tmp_path, command):
    """A token for the card's fetch, or for a probe, from an endpoint on another host."""
    (tmp_path / "secret").write_text(SECRETS["client"])
    reference = f"file:{tmp_path}/secret"
    oauth = {
        "token_url": f"{world.login.url}/token",
        "client_id": reference,
        "client_secret": reference,
    }
    keys = {
        "card": f"{world.secure.url}/mutual",
        "tls": {
            "ca_file": our_tls.ca,
            "client_cert_file": our_tls.client_cert,
            "client_key_file": our_tls.client_key,
        },
    }
    if command == "explain":
        text = config_text({"one": {**keys, "discovery_auth": {"oauth": oauth}}})
        arguments = ["explain", "one"]
    else:
        table = {**keys, "auth": {"oauth": oauth}, "address": f"127.0.0.1:{free_port()}"}
        lines = [f"{key} = {toml(value)}" for key, value in table.items()]
        text = "\n".join(["[publish.one]", *lines, ""])
        arguments = ["publish", "one"]
    (tmp_path / "config.toml").write_text(text)
    world.login.asked.clear()
    world.secure.asked.clear()
    argv = [sys.executable, "-m", "sidecar", *arguments, "--config", f"{tmp_path}/config.toml"]
    async with running(Process(command, argv)) as process:
        with trio.fail_after(20):
            while not world.secure.at("/mutual/.well-known/agent-card.json"):
                assert process.alive or command == "explain", process.log()
                await trio.sleep(0.02)
        (fetch, *_) = world.secure.at("/mutual/.well-known/agent-card.json")
        assert fetch.certificate
        assert fetch.headers["authorization"].startswith(f"Bearer {TOKEN}-")
    assert world.login.at("/token")
    assert not any(one.certificate for one in world.login.at("/token"))


@pytest.mark.parametrize(
    ("kind", "results"),
    [
        ("http11", {"tls", "alpn"}),
        ("no-alpn", {"tls", "alpn"}),
        ("plain", {"tls", "dial"}),
        ("tls", {"not_http2", "goaway", "reset", "dial", "tls"}),
    ],
)
async def test_tls_that_does_not_fit_moves_on_at_once(world, kind, results):
    """D73: gRPC needs h2 by ALPN; mixed-up ports are found without waiting, and nothing is sent."""
    begin = trio.current_time()
    answer = await world.send(f"wrong-{kind}")
    assert trio.current_time() - begin < 4  # the connect timeout is 1 s
    assert (answer.failed, answer.interface) == (False, "1-jsonrpc")
    ((_, _, reason),) = (await world.agent(f"wrong-{kind}").failovers()).keys()
    assert reason in results


# --- proxies and the environment --------------------------------------------------------------


async def test_everything_goes_through_the_configured_proxy(world):
    answer = await world.send("proxied")
    assert not answer.failed
    targets = [head.split(" ")[1] for head in world.proxy.asked]
    assert set(targets) == {f"127.0.0.1:{world.home.port}"}
    assert len(targets) >= 3  # the card, the token, the call
    for head in world.proxy.asked:
        assert head.startswith("CONNECT ")
        assert "s3cret" not in head
    world.proxy.refuses = True
    try:
        await world.agent("proxied").fetch_card()
        world.home.routes["/proxied/rpc"] = result_of
        # The kept connection goes on; a new one is refused by the proxy.
        outcomes = [await world.send("proxied") for _ in range(2)]
        assert all(not one.failed or one.delivered == "no" for one in outcomes)
    finally:
        world.proxy.refuses = False


async def test_the_environment_is_not_read(world):
    """D70, D95: all of the above worked, and nothing went where the environment says."""
    assert not (await world.send("static")).failed
    assert world.trap.connections == 0
    assert not world.key_log.exists()
    for one in (world.home, world.away, world.secure, world.login):
        for asked in one.asked:
            assert SECRETS["netrc"] not in repr(asked)
            assert not asked.headers.get("authorization", "").startswith("Basic c29tZW9uZT")


# --- what is shown ----------------------------------------------------------------------------


async def test_nothing_shows_a_secret(world):
    names = [*world.cards, "query", "mutual", "named", "untrusting-card", "unshown-j", "unshown-g"]
    world.tokens.down = True
    for name in names:
        for binding in BINDINGS:
            await world.send(name, binding, CALLERS)
        reply = await world.agent(name).fetch_card()
        world.shown.append(repr(reply))
    metrics = (await http(world.daemon.admin, "GET", "/metrics")).body.decode()
    status = (await http(world.daemon.admin, "GET", "/status")).body.decode()
    readiness = (await http(world.daemon.admin, "GET", "/readyz")).body.decode()
    everything = {
        "answers": "\n".join(world.shown),
        "log": world.daemon.log(),
        "metrics": metrics,
        "status": status,
        "readiness": readiness,
    }
    for place, text in everything.items():
        found = re.findall(r".{0,60}s3cret.{0,30}", text)
        assert found == [], place
    assert json.loads(status)["agents"]["query"]["card"].startswith("http")
    assert len(everything["log"]) > 10_000
