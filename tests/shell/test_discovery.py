"""Where a card is, and one fetch of it."""

from __future__ import annotations

import gzip
import os

import pytest
import trio

from sidecar.discovery import (
    NO_VALIDATORS,
    CardFetchError,
    CardSource,
    FetchedCard,
    Source,
    Validators,
    resolve_source,
)
from sidecar.wire.fetch import client
from sidecar.wire.net import Dialer, TlsIdentity
from tests.wire.loopback import Asked, HttpStub, closed_port, reply, serve

CARD = b'{"name":"agent","supportedInterfaces":[]}'
NEW = "/.well-known/agent-card.json"
OLD = "/.well-known/agent.json"


# --- where ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "card",
    [
        "http://127.0.0.1:7100/x/y/my-card.json?rev=3",
        "http://127.0.0.1:7100/x/y/my-card.json",
        "https://agent.test/card?name=a",
        "https://agent.test/.well-known/agent-card.json",
        "HTTPS://Agent.test/a%2Fb/card.json",
    ],
)
def test_complete_urls_are_taken_as_written(card):
    assert resolve_source(card) == Source(url=card)


@pytest.mark.parametrize("card", ["https://agent.test", "https://agent.test/a/b/", "http://h:1/x"])
def test_exact_takes_any_url_as_written(card):
    assert resolve_source(card, exact=True) == Source(url=card)


@pytest.mark.parametrize(
    ("card", "base"),
    [
        ("https://agent.test", "https://agent.test"),
        ("https://agent.test/", "https://agent.test"),
        ("https://agent.test:8443/a/b", "https://agent.test:8443/a/b"),
        ("https://agent.test/a/b/", "https://agent.test/a/b"),
        ("http://[::1]:7100/a//", "http://[::1]:7100/a"),
        ("https://agent.test/v1.json/", "https://agent.test/v1.json"),
        ("https://agent.test/a#top", "https://agent.test/a"),
    ],
)
def test_other_urls_are_bases(card, base):
    assert resolve_source(card) == Source(url=base + NEW, legacy_url=base + OLD)


@pytest.mark.parametrize(
    ("card", "path"),
    [
        ("/etc/agents/card.json", "/etc/agents/card.json"),
        ("./card.json", "./card.json"),
        ("../cards/agent", "../cards/agent"),
        ("file:///etc/agents/a%20card.json", "/etc/agents/a card.json"),
        ("file:/etc/card.json", "/etc/card.json"),
        ("FILE://localhost/etc/card.json", "/etc/card.json"),
    ],
)
def test_files(card, path):
    for exact in (False, True):
        assert resolve_source(card, exact) == Source(path=path)


@pytest.mark.parametrize(
    ("card", "word"),
    [
        ("htp://127.0.0.1/card.json", "'htp'"),
        ("ftp://agent.test/card.json", "'ftp'"),
        ("agent.test:443", "'agent.test'"),
        ("agent.test/card.json", "no scheme"),
        ("", "no scheme"),
        ("card.json", "./FILE"),
        ("https://", "host"),
        ("https:///card.json", "host"),
        ("https://agent.test:99999/", "not a URL"),
        ("https://agent.test:0/", "port"),
        ("https://[::1/", "not a URL"),
        ("file://server/share/card.json", "file:///"),
        ("file:card.json", "file:///"),
        ("https://user:secret@agent.test/", "discovery_auth"),
    ],
)
def test_sources_that_are_none(card, word):
    with pytest.raises(ValueError) as caught:
        resolve_source(card)
    assert word in str(caught.value)
    assert "secret" not in str(caught.value)


# --- one fetch --------------------------------------------------------------------------------


@pytest.fixture
async def stub(nursery):
    made = HttpStub()
    made.base = f"http://127.0.0.1:{await serve(nursery, made)}"  # type: ignore[attr-defined]
    return made


async def fetch(
    card: str, validators: Validators = NO_VALIDATORS, *, exact=False, headers=None
) -> FetchedCard:
    made = client(
        Dialer(stall_seconds=5), identity=TlsIdentity(), permit=lambda _address: "", proxy=None
    )
    async with made:
        source = CardSource(resolve_source(card, exact), made, timeout_seconds=5)
        return await source.fetch(validators, headers=headers)


async def failure(card: str, *args, **kwargs) -> str:
    with pytest.raises(CardFetchError) as caught:
        await fetch(card, *args, **kwargs)
    return str(caught.value)


async def test_a_complete_url_is_asked_for_once_and_verbatim(stub):
    """D03."""
    stub.answers["/x/y/my-card.json?rev=3"] = reply(200, CARD)
    fetched = await fetch(f"{stub.base}/x/y/my-card.json?rev=3")
    assert fetched.data == CARD
    assert [asked.target for asked in stub.asked] == ["/x/y/my-card.json?rev=3"]


async def test_what_a_fetch_brings(stub):
    stub.answers[f"/a{NEW}"] = reply(
        200, CARD, etag='"v1"', last_modified="Mon", cache_control="public, max-age=60"
    )
    fetched = await fetch(f"{stub.base}/a/")
    assert fetched == FetchedCard(
        data=CARD,
        validators=Validators(etag='"v1"', last_modified="Mon"),
        max_age=60.0,
        url=f"{stub.base}/a{NEW}",
        source_scheme="http",
        source_host="127.0.0.1",
        peer="127.0.0.1",
    )


async def test_credentials_and_accept_are_sent(stub):
    stub.answers[NEW] = reply(200, CARD)
    await fetch(stub.base, headers=[("authorization", "Bearer t"), ("x-key", "k")])
    (asked,) = stub.asked
    assert asked.headers["authorization"] == "Bearer t"
    assert asked.headers["x-key"] == "k"
    assert asked.headers["accept"] == "application/json, application/a2a+json;q=0.9"
    assert "if-none-match" not in asked.headers


async def test_an_unchanged_card(stub):
    stub.answers[NEW] = reply(304, cache_control="max-age=7")
    known = Validators(etag='"v1"', last_modified="Mon")
    fetched = await fetch(stub.base, known)
    assert fetched.data is None
    assert fetched.validators == known
    assert fetched.max_age == 7.0
    assert stub.asked[0].headers["if-none-match"] == '"v1"'
    assert stub.asked[0].headers["if-modified-since"] == "Mon"


async def test_an_unchanged_card_with_a_new_validator(stub):
    stub.answers[NEW] = reply(304, etag='"v2"')
    fetched = await fetch(stub.base, Validators(etag='"v1"', last_modified="Mon"))
    assert fetched.validators == Validators(etag='"v2"', last_modified="Mon")


async def test_a_changed_card_forgets_the_old_validators(stub):
    stub.answers[NEW] = reply(200, CARD)
    fetched = await fetch(stub.base, Validators(etag='"v1"', last_modified="Mon"))
    assert fetched.validators == NO_VALIDATORS


async def test_not_modified_without_having_asked_is_no_card(stub):
    stub.answers[NEW] = reply(304)
    assert "304" in await failure(stub.base)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 300.0),
        ("max-age=0", 0.0),
        ("Max-Age=5", 5.0),
        ('max-age="5"', 5.0),
        ("s-maxage=5", 300.0),
        ("no-cache", 0.0),
        ("no-store, max-age=60", 0.0),
        ("max-age=soon", 300.0),
        ("max-age=-5", 300.0),
        ("max-age=" + "9" * 5000, 2.0**31),
        ("public", 300.0),
    ],
)
async def test_how_long_a_card_is_fresh(stub, value, seconds):
    headers = {} if value is None else {"cache_control": value}
    stub.answers[NEW] = reply(200, CARD, **headers)
    assert (await fetch(stub.base)).max_age == seconds


# --- not a card (D18) ---------------------------------------------------------------------------


async def test_a_server_that_needs_accept(nursery):
    class Choosy(HttpStub):
        def answer(self, asked: Asked) -> bytes:
            if "application/json" in asked.headers.get("accept", ""):
                return reply(200, CARD, content_type="text/plain; charset=utf-8")
            return reply(200, b"<html>sign in</html>", content_type="text/html")

    port = await serve(nursery, Choosy())
    assert (await fetch(f"http://127.0.0.1:{port}")).data == CARD


@pytest.mark.parametrize("content_type", ["text/html; charset=utf-8", "application/json", ""])
async def test_a_web_page_is_named_as_one(stub, content_type):
    stub.answers["/?key=secret"] = reply(200, b"\n<html>sign in</html>", content_type=content_type)
    sentence = await failure(f"{stub.base}/?key=secret")
    assert "200" in sentence
    assert (content_type or "no content type") in sentence
    assert f"{stub.base}/" in sentence
    assert "web page" in sentence
    assert "secret" not in sentence


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"sign in", "not JSON"),
        (b'{"name":', "not JSON"),
        (b"[]", "not an object"),
        (b'"card"', "not an object"),
        (b"null", "not an object"),
        (b'{"name":"\xff"}', "UTF-8"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "not JSON"),
    ],
    ids=["empty", "text", "cut", "array", "string", "null", "latin-1", "deep"],
)
async def test_bodies_that_are_no_json_object(stub, body, word):
    stub.answers[NEW] = reply(200, body)
    sentence = await failure(stub.base)
    assert word in sentence
    assert f"{stub.base}{NEW}" in sentence


async def test_a_byte_order_mark_is_taken_off(stub):
    stub.answers[NEW] = reply(200, b"\xef\xbb\xbf" + CARD)
    assert (await fetch(stub.base)).data == CARD


async def test_gzip_and_its_bound(stub):
    """D14."""
    stub.answers[NEW] = reply(200, gzip.compress(CARD), content_encoding="gzip")
    assert (await fetch(stub.base)).data == CARD
    stub.answers[NEW] = reply(200, gzip.compress(bytes(50_000_000)), content_encoding="gzip")
    assert "too large" in await failure(stub.base)


@pytest.mark.parametrize("status", [201, 204, 400, 401, 403, 500, 503])
async def test_other_statuses_are_no_card_even_with_a_json_body(stub, status):
    stub.answers[NEW] = reply(status, b"" if status == 204 else CARD)
    sentence = await failure(stub.base)
    assert str(status) in sentence
    assert ("discovery_auth" in sentence) is (status in {401, 403})


async def test_redirects(stub):
    """D15."""
    stub.answers[NEW] = reply(302, location="/other")
    stub.answers["/other"] = reply(200, CARD)
    assert (await fetch(stub.base)).url == f"{stub.base}/other"
    stub.answers[NEW] = reply(302, location="http://169.254.169.254/latest/")
    assert "another origin" in await failure(stub.base)


async def test_nobody_there():
    assert "REFUSED" in await failure(f"http://127.0.0.1:{closed_port()}")


# --- the legacy path (D85) ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 410])
async def test_the_legacy_path_is_tried_once_when_the_new_one_is_absent(stub, status):
    stub.answers[f"/a{NEW}"] = reply(status, b"no")
    stub.answers[f"/a{OLD}"] = reply(200, CARD)
    fetched = await fetch(f"{stub.base}/a", headers=[("authorization", "Bearer t")])
    assert fetched.data == CARD
    assert fetched.url == f"{stub.base}/a{OLD}"
    assert OLD in fetched.note
    assert str(status) in fetched.note
    assert [asked.headers["authorization"] for asked in stub.asked] == ["Bearer t"] * 2


async def test_neither_path(stub):
    sentence = await failure(stub.base)
    assert NEW in sentence
    assert OLD in sentence
    assert len(stub.asked) == 2


@pytest.mark.parametrize(
    "answer",
    [reply(403, b"no"), reply(500, b""), reply(200, b"<html>", content_type="text/html")],
    ids=["403", "500", "html"],
)
async def test_forbidden_or_garbage_is_not_absent(stub, answer):
    stub.answers[NEW] = answer
    stub.answers[OLD] = reply(200, CARD)
    await failure(stub.base)
    assert [asked.target for asked in stub.asked] == [NEW]


async def test_an_exact_url_has_no_legacy_path(stub):
    stub.answers[f"/a{OLD}"] = reply(200, CARD)
    for card, exact in ((f"{stub.base}/a", True), (f"{stub.base}/a{NEW}", False)):
        assert "404" in await failure(card, exact=exact)
    assert len(stub.asked) == 2


# --- files ------------------------------------------------------------------------------------


async def test_a_card_from_disk(tmp_path):
    path = tmp_path / "card.json"
    path.write_bytes(b"\xef\xbb\xbf" + CARD)
    fetched = await fetch(f"file://{path}")
    assert fetched.data == CARD
    assert (fetched.source_scheme, fetched.source_host, fetched.peer) == ("file", "", "")
    assert fetched.url == str(path)
    assert fetched.max_age == 300.0
    again = await fetch(str(path), fetched.validators)
    assert again.data is None
    assert again.validators == fetched.validators
    path.write_bytes(CARD.replace(b"agent", b"other"))
    assert (await fetch(str(path), fetched.validators)).data == path.read_bytes()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"[]", "not an object"),
        (b" " * (1 << 20) + b"{}", "too large"),
    ],
)
async def test_files_that_are_no_card(tmp_path, content, word):
    path = tmp_path / "card.json"
    if content is not None:
        path.write_bytes(content)
    sentence = await failure(str(path))
    assert word in sentence
    assert str(path) in sentence


async def test_pipes_and_directories_are_not_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with trio.fail_after(5):
        assert "regular file" in await failure(str(pipe))
        assert "regular file" in await failure(str(tmp_path))
