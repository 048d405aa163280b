"""httpx on the dialer, against scripted servers on loopback."""

from __future__ import annotations

import gzip
import os
import tracemalloc
import zlib

import httpx
import pytest
import trio
import trio.testing
import trustme

from sidecar.core.types import Break
from sidecar.wire.fetch import FETCH_BYTES, Fetched, FetchError, client, fetch
from sidecar.wire.net import Dialer, DialError, TlsIdentity
from tests.wire.loopback import (
    Asked,
    HttpStub,
    closed_port,
    reply,
    reset,
    serve,
    server_context,
    until,
)

CA = trustme.CA()
CERT = CA.issue_cert("agent.test", "127.0.0.1")
PLAIN = TlsIdentity()


async def to_loopback(_host: str) -> list[str]:
    return ["127.0.0.1"]


def make_client(*, identity=PLAIN, permit=lambda _address: "", proxy=None):
    dialer = Dialer(stall_seconds=5, resolve=to_loopback)
    return client(dialer, identity=identity, permit=permit, proxy=proxy)


async def get(url: str, *, headers=(), timeout=5.0, limit=FETCH_BYTES, **options) -> Fetched:
    async with make_client(**options) as made:
        return await fetch(made, url, headers=list(headers), timeout=timeout, limit=limit)


async def failure(url: str, **options) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await get(url, **options)
    return caught.value


@pytest.fixture
async def stub(nursery):
    made = HttpStub()
    made.port = await serve(nursery, made)  # type: ignore[attr-defined]
    made.base = f"http://127.0.0.1:{made.port}"  # type: ignore[attr-defined]
    return made


# --- a plain fetch ------------------------------------------------------------------------------


async def test_a_reply_of_any_status_is_returned_whole(stub):
    stub.answers["/a/b.json?rev=3"] = reply(418, b"{}", etag='"x"')
    fetched = await get(f"{stub.base}/a/b.json?rev=3", headers=[("x-key", "caf\xe9")])
    assert (fetched.status, fetched.body, fetched.content_type) == (418, b"{}", "application/json")
    assert ("etag", '"x"') in fetched.headers
    assert fetched.url == f"{stub.base}/a/b.json?rev=3"
    assert fetched.peer == "127.0.0.1"
    (asked,) = stub.asked
    assert asked.headers["x-key"] == "caf\xe9"
    assert asked.headers["host"] == f"127.0.0.1:{stub.port}"
    assert asked.headers["user-agent"].startswith("a2a-sidecar/")
    assert "cookie" not in asked.headers


async def test_a_body_that_ends_with_the_connection_is_read_to_its_end(nursery):
    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n{")
        await stream.send_all(b"}")

    port = await serve(nursery, handler)
    assert (await get(f"http://127.0.0.1:{port}/")).body == b"{}"


async def test_https_with_the_private_ca(nursery, tmp_path):
    stub = HttpStub({"/": reply(200, b"{}")})
    port = await serve(nursery, stub, tls=server_context(CERT, "http/1.1"))
    ca_file = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(ca_file)
    identity = TlsIdentity(ca_file=str(ca_file))
    for host in ("127.0.0.1", "agent.test"):
        fetched = await get(f"https://{host}:{port}/", identity=identity)
        assert (fetched.status, fetched.peer) == (200, "127.0.0.1")
    error = await failure(f"https://other.test:{port}/", identity=identity)
    assert "certificate verify failed" in str(error)
    assert "other.test" in str(error)


# --- failures in words --------------------------------------------------------------------------


async def test_the_dialers_word_is_kept():
    port = closed_port()
    error = await failure(f"http://user:secret@127.0.0.1:{port}/x?key=secret#secret")
    assert "REFUSED" in str(error)
    assert f"http://127.0.0.1:{port}/x" in str(error)
    assert "secret" not in str(error)
    assert error.status is None
    assert isinstance(error.__cause__, httpx.ConnectError)
    assert isinstance(error.__cause__.__cause__, DialError)
    assert error.__cause__.__cause__.cause is Break.REFUSED


async def test_the_policy_is_asked(stub):
    error = await failure(f"{stub.base}/", permit=lambda address: f"{address} is not allowed")
    assert "127.0.0.1 is not allowed" in str(error)
    assert stub.asked == []


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/x", "http:///x", "127.0.0.1", "http://127.0.0.1:99999/", "http://[::"]
)
async def test_what_is_no_http_url(url):
    await failure(url)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["nothing", "ssh", "short", "chunks"],
)
async def test_replies_that_break_off(nursery, answer):
    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(answer)

    port = await serve(nursery, handler)
    error = await failure(f"http://127.0.0.1:{port}/card.json")
    assert f"http://127.0.0.1:{port}/card.json could not be fetched" in str(error)


async def test_a_reset_is_a_read_error(nursery):
    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        reset(stream)

    port = await serve(nursery, handler)
    error = await failure(f"http://127.0.0.1:{port}/")
    assert isinstance(error.__cause__, httpx.ReadError)


async def test_the_timeout_covers_a_body_that_drips(nursery):
    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while True:
            await stream.send_all(b"x")
            await trio.sleep(0.02)

    port = await serve(nursery, handler)
    begun = trio.current_time()
    error = await failure(f"http://127.0.0.1:{port}/", timeout=0.2)
    assert "0.2 s" in str(error)
    assert trio.current_time() - begun < 2


async def test_the_clients_own_timeouts_are_httpxs(nursery):
    async def silent(_stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    port = await serve(nursery, silent)
    async with make_client() as made:
        with pytest.raises(httpx.ReadTimeout):
            await made.post(
                f"http://127.0.0.1:{port}/", content=b"x", timeout=httpx.Timeout(5, read=0.05)
            )


async def test_a_dial_that_takes_too_long():
    async def hang(_host: str) -> list[str]:
        await trio.sleep_forever()
        raise AssertionError

    made = client(
        Dialer(stall_seconds=5, resolve=hang),
        identity=TlsIdentity(),
        permit=lambda _address: "",
    )
    with pytest.raises(httpx.ConnectTimeout):
        await made.get("http://agent.test/", timeout=httpx.Timeout(5, connect=0.05))
    await made.aclose()


# --- bounds (D14) -------------------------------------------------------------------------------


async def test_a_declared_length_above_the_limit_is_refused_from_the_head(nursery):
    sent = 0

    async def handler(stream: trio.abc.Stream) -> None:
        nonlocal sent
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5000000000\r\n\r\n")
        while True:
            await stream.send_all(b"x" * 65536)
            sent += 65536

    port = await serve(nursery, handler)
    error = await failure(f"http://127.0.0.1:{port}/")
    assert "too large" in str(error)
    assert error.status == 200
    assert sent < 64 << 20


async def test_a_body_without_a_length_stops_at_the_limit(nursery):
    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send_all(b"x" * 65536)

    port = await serve(nursery, handler)
    assert "too large" in str(await failure(f"http://127.0.0.1:{port}/"))


async def test_a_gzip_bomb_is_stopped_while_it_inflates(stub):
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    stub.answers["/"] = reply(200, bomb, content_encoding="gzip")
    tracemalloc.start()
    try:
        error = await failure(f"{stub.base}/")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "too large" in str(error)
    assert peak < 8 << 20


@pytest.mark.parametrize("extra", [0, 1])
async def test_the_limit_is_exact_and_counts_decoded_bytes(stub, extra):
    body = os.urandom(1000) * 10 + b"x" * extra
    stub.answers["/gzip"] = reply(200, gzip.compress(body, mtime=0), content_encoding="gzip")
    stub.answers["/plain"] = reply(200, body)
    for path in ("/gzip", "/plain"):
        if extra:
            assert "too large" in str(await failure(stub.base + path, limit=10_000))
        else:
            assert (await get(stub.base + path, limit=10_000)).body == body


async def test_endless_empty_gzip_members_are_bounded_too(nursery):
    member = gzip.compress(b"", mtime=0)

    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n")
        while True:
            await stream.send_all(member * 1000)

    port = await serve(nursery, handler)
    assert "too large" in str(await failure(f"http://127.0.0.1:{port}/", limit=10_000))


async def test_gzip_in_several_members(stub):
    body = gzip.compress(b'{"a":', mtime=0) + gzip.compress(b"1}", mtime=0)
    stub.answers["/"] = reply(200, body, content_encoding="GZIP")
    assert (await get(f"{stub.base}/")).body == b'{"a":1}'
    assert "gzip" in stub.asked[0].headers["accept-encoding"]


@pytest.mark.parametrize(
    ("coding", "body", "word"),
    [
        ("gzip", b"not gzip", "damaged"),
        ("gzip", gzip.compress(b"{}" * 500, mtime=0)[:-9], "cut short"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"tail", "damaged"),
        ("deflate", zlib.compress(b"{}"), "deflate"),
        ("br", b"{}", "br"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "gzip, gzip"),
    ],
)
async def test_encodings_that_cannot_be_read(stub, coding, body, word):
    stub.answers["/"] = reply(200, body, content_encoding=coding)
    assert word in str(await failure(f"{stub.base}/"))


async def test_an_empty_body_that_claims_to_be_gzip(stub):
    stub.answers["/"] = reply(304, content_encoding="gzip")
    assert (await get(f"{stub.base}/")).body == b""


# --- redirects (D15) ----------------------------------------------------------------------------


async def test_redirects_within_the_origin_are_followed_with_the_headers(stub):
    stub.answers["/"] = reply(302, location="/other?x=1")
    stub.answers["/other?x=1"] = reply(307, location=f"{stub.base}/last")
    stub.answers["/last"] = reply(200, b"{}")
    fetched = await get(f"{stub.base}/", headers=[("authorization", "Bearer t")])
    assert (fetched.status, fetched.url) == (200, f"{stub.base}/last")
    assert [asked.headers["authorization"] for asked in stub.asked] == ["Bearer t"] * 3


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/?token=secret",
        "https://127.0.0.1:{port}/x",
        "http://localhost:{port}/x",
        "//other.test/x",
        "http://127.0.0.1/x",
        "file:///etc/hostname",
    ],
)
async def test_redirects_to_another_origin_are_not(stub, location):
    stub.answers["/"] = reply(302, location=location.format(port=stub.port))
    error = await failure(f"{stub.base}/", headers=[("authorization", "Bearer t")])
    assert "another origin" in str(error)
    assert "secret" not in str(error)
    assert error.status == 302
    assert len(stub.asked) == 1


async def test_an_endless_redirect_ends_after_five(stub):
    stub.answers["/"] = reply(302, location="/")
    assert "more than 5" in str(await failure(f"{stub.base}/"))
    assert len(stub.asked) == 6


async def test_a_redirect_cannot_bring_credentials_of_its_own(stub):
    stub.answers["/"] = reply(302, location=f"http://evil:login@127.0.0.1:{stub.port}/next")
    stub.answers["/next"] = reply(200, b"{}")
    await get(f"{stub.base}/", headers=[("authorization", "Bearer t")])
    assert stub.asked[1].headers["authorization"] == "Bearer t"
    await get(f"{stub.base}/")
    assert "authorization" not in stub.asked[3].headers


async def test_a_redirect_without_a_place_is_a_reply(stub):
    stub.answers["/"] = reply(302, b"")
    assert (await get(f"{stub.base}/")).status == 302


@pytest.mark.parametrize("location", ["http://[::", "http://127.0.0.1:port/", "\x01"])
async def test_places_that_are_no_urls(stub, location):
    stub.answers["/"] = reply(302, location=location)
    await failure(f"{stub.base}/")


# --- the client ---------------------------------------------------------------------------------


async def test_cookies_are_not_kept(stub):
    stub.answers["/"] = reply(302, location="/next", set_cookie="a=b; Path=/")
    stub.answers["/next"] = reply(200, b"{}", set_cookie="c=d")
    async with make_client() as made:
        for _ in range(2):
            await fetch(made, f"{stub.base}/", headers=[], timeout=5)
        assert list(made.cookies.jar) == []
    assert len(stub.asked) == 4
    assert all("cookie" not in asked.headers for asked in stub.asked)


async def test_the_client_itself_follows_nothing_and_posts(nursery):
    bodies = []

    class Tokens(HttpStub):
        def answer(self, asked: Asked) -> bytes:
            bodies.append((asked.method, asked.raw.partition(b"\r\n\r\n")[2]))
            return reply(307, b"", location="/elsewhere")

    port = await serve(nursery, Tokens())
    async with make_client() as made:
        response = await made.post(f"http://127.0.0.1:{port}/token", content=b"")
    assert response.status_code == 307
    assert bodies == [("POST", b"")]


async def test_every_connection_is_closed(nursery):
    ended = []

    async def handler(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(reply(200, b"{}"))
        assert await stream.receive_some(1) == b""
        ended.append(1)

    port = await serve(nursery, handler)
    async with make_client() as made:
        for _ in range(3):
            await fetch(made, f"http://127.0.0.1:{port}/", headers=[], timeout=5)
        await until(lambda: len(ended) == 3)


async def test_the_proxy_of_the_configuration_is_used(nursery):
    stub = HttpStub({"/": reply(200, b"{}")})
    heads = []

    async def proxy(stream: trio.abc.Stream) -> None:
        heads.append(await stream.receive_some(65536))
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        await stub(stream)

    url = f"http://127.0.0.1:{await serve(nursery, proxy)}"
    by_name = await get("http://agent.test/", proxy=url)
    by_number = await get("http://127.0.0.7/", proxy=url)
    assert [head.split(b" ")[1] for head in heads] == [b"agent.test:80", b"127.0.0.7:80"]
    assert [asked.target for asked in stub.asked] == ["/", "/"]
    assert (by_name.peer, by_number.peer) == ("", "127.0.0.7")


@pytest.mark.parametrize(
    "environment",
    [
        {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"},
        {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "localhost"},
        {
            "NO_PROXY": "10.0.0.0/8,[::1]:80,*.svc,.local, ,localhost",
            "HTTP_PROXY": "http://127.0.0.1:9",
        },
        {"HTTP_PROXY": "127.0.0.1:3128"},
        {"http_proxy": "http://127.0.0.1:9", "no_proxy": "[::1]:80", "all_proxy": "socks5://h"},
        {"REQUESTS_CA_BUNDLE": "/nowhere", "SSL_CERT_FILE": "/nowhere", "SSL_CERT_DIR": "/no"},
    ],
)
async def test_the_environment_is_not_read(stub, monkeypatch, environment):
    """D70, D95."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stub.answers["/"] = reply(200, b"{}")
    assert (await get(f"{stub.base}/")).body == b"{}"


async def test_the_client_is_told_not_to_trust_the_environment():
    async with make_client() as made:
        assert made.trust_env is False


async def test_netrc_and_key_log_are_not_used(nursery, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    ca_file = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(ca_file)
    log = tmp_path / "keys.log"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    stub = HttpStub({"/": reply(200, b"{}")})
    port = await serve(nursery, stub, tls=server_context(CERT))
    await get(f"https://127.0.0.1:{port}/", identity=TlsIdentity(ca_file=str(ca_file)))
    assert "authorization" not in stub.asked[0].headers
    assert not log.exists()


async def test_libraries_log_no_queries(stub, caplog):
    stub.answers["/?key=secret"] = reply(200, b"{}")
    with caplog.at_level("DEBUG"):
        await get(f"{stub.base}/?key=secret", headers=[("authorization", "Bearer secret")])
    assert "secret" not in caplog.text
