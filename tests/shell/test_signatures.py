"""Cards that must show whose they are: signatures and the pin."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from joserfc import jws
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from sidecar.config import AgentConfig
from sidecar.core.card import CardError
from sidecar.core.card_signing import signed_card
from sidecar.discovery import FetchedCard, Validators
from sidecar.signatures import UntrustedCard, Vetting
from sidecar.wire.fetch import Fetched, FetchError
from tests.harness import card

if TYPE_CHECKING:
    from pathlib import Path

CARD = card([("JSONRPC", "https://agent.example/rpc")])
HOST = "agent.example"


def key(kid: str | None = "k1", curve: str = "P-256") -> ECKey:
    return ECKey.generate_key(curve, parameters={"kid": kid} if kid else None, private=True)


def signed(content: Any, signer: Any, *, form: int = 0, **header: Any) -> dict[str, Any]:
    """`content` with one more signature, over that canonical form."""
    data = json.dumps(content).encode()
    protected = {"alg": "ES256", "typ": "JOSE", "kid": signer.kid, **header}
    protected = {name: value for name, value in protected.items() if value is not None}
    registry = jws.JWSRegistry(algorithms=[protected["alg"]], strict_check_header=False)
    payload = signed_card(data).forms[form]
    token = jws.serialize_compact(protected, payload, signer, registry=registry)
    first, _, last = token.split(".")
    entry = {"protected": first, "signature": last}
    return {**content, "signatures": [*content.get("signatures", []), entry]}


def key_set(*keys: Any) -> dict[str, Any]:
    return {"keys": [one.as_dict(private=False) for one in keys]}


def fetched(content: Any, host: str = HOST, scheme: str = "https") -> FetchedCard:
    return FetchedCard(
        data=content if isinstance(content, bytes) else json.dumps(content).encode(),
        validators=Validators(),
        max_age=300,
        url=f"{scheme}://{host}/card.json",
        source_scheme=scheme,
        source_host=host,
        peer="",
    )


class Keys:
    """What the key sets of the test answer, and who was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def get(self, url: str) -> Fetched:
        self.asked.append(url)
        answer = self.answers.get(url)
        if answer is None:
            raise FetchError(f"{url} could not be fetched")
        status, body = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
        return Fetched(status=status, headers=[], body=body.encode(), url=url, peer="")


def config(tmp_path: Path, keys: Any = None, **more: Any) -> AgentConfig:
    """`keys` go into a file; None: by jku."""
    verify: Any = True
    if keys is not None:
        file = tmp_path / "keys"
        file.write_text(keys if isinstance(keys, str) else json.dumps(keys), "utf-8")
        verify = str(file)
    return AgentConfig.model_validate(
        {"card": "https://agent.example", "verify_signatures": verify, **more}
    )


async def check(configured: AgentConfig, got: FetchedCard, keys: Keys | None = None) -> Vetting:
    vetting = Vetting(configured, (keys or Keys({})).get)
    await vetting.check(got)
    return vetting


# --- keys from a file -------------------------------------------------------------------------


@pytest.mark.parametrize("form", [0, 1, 2], ids=["specification", "sdk", "as it stands"])
async def test_a_signature_over_any_of_the_forms(tmp_path, form):
    signer = key()
    content = {**CARD, "description": "", "x": 1}
    vetting = await check(
        config(tmp_path, key_set(signer)), fetched(signed(content, signer, form=form))
    )
    assert vetting.signed_by == "k1"


EC256, EC384, EC521 = ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()


@pytest.mark.parametrize(
    ("algorithm", "make"),
    [
        ("ES256", lambda: ECKey.import_key(ec.generate_private_key(EC256))),
        ("ES384", lambda: ECKey.import_key(ec.generate_private_key(EC384))),
        ("ES512", lambda: ECKey.import_key(ec.generate_private_key(EC521))),
        ("EdDSA", lambda: OKPKey.import_key(ed25519.Ed25519PrivateKey.generate())),
        ("RS256", lambda: RSAKey.import_key(rsa.generate_private_key(65537, 2048))),
        ("PS384", lambda: RSAKey.import_key(rsa.generate_private_key(65537, 2048))),
    ],
)
@pytest.mark.filterwarnings("ignore")
async def test_algorithms_and_kinds_of_key_files(tmp_path, algorithm, make):
    signer = make()
    got = fetched(signed(CARD, signer, alg=algorithm, kid=None))
    as_set = key_set(signer)
    pem = signer.as_pem(private=False).decode()
    for keys in (as_set, as_set["keys"][0], pem, key_pem() + pem):
        await check(config(tmp_path, keys), got)


def key_pem() -> str:
    return key(None).as_pem(private=False).decode()


async def test_one_good_signature_is_enough(tmp_path):
    stranger, signer = key("x"), key("k1")
    content = signed(signed(CARD, stranger), signer)
    vetting = await check(config(tmp_path, key_set(key("other"), signer)), fetched(content))
    assert vetting.signed_by == "k1"


def tampered(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "supportedInterfaces": card([("JSONRPC", "https://evil.example")])["supportedInterfaces"]}  # fmt: skip


def with_protected(content: dict[str, Any], header: Any) -> dict[str, Any]:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    protected = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    return {**content, "signatures": [{"protected": protected, "signature": "c2ln"}]}


async def refused(configured: AgentConfig, content: Any, words: str, keys: Keys | None = None):
    with pytest.raises(UntrustedCard) as caught:
        await check(configured, fetched(content), keys)
    assert words in str(caught.value), str(caught.value)


async def test_what_does_not_verify(tmp_path):
    signer = key()
    configured = config(tmp_path, key_set(signer))
    good = signed(CARD, signer)
    await refused(configured, CARD, "the card is not signed")
    await refused(configured, {**CARD, "signatures": []}, "the card is not signed")
    await refused(configured, tampered(good), "signature 0: it does not fit the card")
    await refused(configured, signed(CARD, key("k1")), "it does not fit the card")
    await refused(configured, signed(CARD, key("k2")), "there is no key 'k2'")
    await refused(configured, with_protected(CARD, b"\xff"), "is not JSON in base64url")
    await refused(configured, with_protected(CARD, []), "is not JSON in base64url")
    none = {"alg": "none", "kid": "k1"}
    await refused(configured, with_protected(CARD, none), "the algorithm 'none' is not accepted")
    critical = {"alg": "ES256", "kid": "k1", "crit": ["b64"], "b64": False}
    await refused(configured, with_protected(CARD, critical), "(crit)")


async def test_a_shared_secret_is_no_signature(tmp_path):
    """The public key as an HMAC secret: the classic confusion."""
    signer = key()
    pem = signer.as_pem(private=False)
    secret = OctKey.import_key(base64.urlsafe_b64encode(pem).decode())
    forged = signed(CARD, secret, alg="HS256", kid="k1")
    await refused(config(tmp_path, pem.decode()), forged, "'HS256' is not accepted")
    oct_set = {"keys": [secret.as_dict(private=True)]}
    await refused(config(tmp_path, oct_set), signed(CARD, signer), "no usable public keys")


async def test_legacy_members_are_not_vouched_for_by_a_signature_of_1_0(tmp_path):
    """Without supportedInterfaces the url would be outside of what was signed."""
    signer = key()
    content = signed(CARD, signer)
    stripped = {k: v for k, v in content.items() if k != "supportedInterfaces"}
    await refused(
        config(tmp_path, key_set(signer)),
        {**stripped, "url": "https://evil.example", "preferredTransport": "JSONRPC"},
        "it does not fit",
    )


async def test_members_that_stand_twice(tmp_path):
    signer = key()
    text = json.dumps(signed(CARD, signer))
    twice = text[:-1] + ', "name": "another"}'
    with pytest.raises(CardError, match="stands twice"):
        await check(config(tmp_path, key_set(signer)), fetched(twice.encode()))


@pytest.mark.parametrize(
    "keys", ["", "{}", "[]", '{"keys": [7]}', "-----BEGIN PUBLIC KEY-----\nx\n"]
)
async def test_files_without_keys(tmp_path, keys):
    await refused(config(tmp_path, keys), signed(CARD, key()), "no usable public keys")


async def test_a_key_that_is_for_something_else(tmp_path):
    signer = key()
    keys = key_set(signer)
    keys["keys"][0]["use"] = "enc"
    await refused(config(tmp_path, keys), signed(CARD, signer), "no usable public keys")


async def test_a_file_that_is_gone(tmp_path):
    configured = config(tmp_path, key_set(key()))
    (tmp_path / "keys").unlink()
    await refused(configured, signed(CARD, key()), "cannot be read")


# --- keys by jku ------------------------------------------------------------------------------

JKU = f"https://{HOST}/keys.json?v=1"


async def test_a_key_set_on_the_cards_own_host(tmp_path):
    signer = key()
    keys = Keys({JKU: key_set(signer)})
    content = signed(CARD, signer, jku=JKU)
    vetting = await check(config(tmp_path), fetched(content), keys)
    assert vetting.signed_by == "k1"
    # The same bytes again need no second look, others do.
    await vetting.check(fetched(content))
    assert keys.asked == [JKU]
    await vetting.check(fetched(signed({**CARD, "name": "new"}, signer, jku=JKU)))
    assert keys.asked == [JKU] * 2


@pytest.mark.parametrize(
    ("jku", "words"),
    [
        (None, "names no key set"),
        (7, "names no key set"),
        ("https://evil.example/keys", "evil.example, which is neither the card's host"),
        (f"https://{HOST}.evil.example/keys", "which is neither the card's host"),
        (f"http://{HOST}/keys", "not at an https URL"),
        (f"https://{HOST}@evil.example/keys", "not at an https URL"),
        ("https://user@agent.example/keys", "not at an https URL"),
        ("file:///etc/keys", "not at an https URL"),
        ("https://[::1/", "not a URL"),
        ("http://127.0.0.1/keys", "not at an https URL"),
    ],
)
async def test_key_sets_that_are_not_asked_for(tmp_path, jku, words):
    content = with_protected(CARD, {"alg": "ES256", "kid": "k1", "jku": jku})
    keys = Keys({})
    await refused(config(tmp_path), content, words, keys)
    assert keys.asked == []


async def test_trusted_hosts_and_loopback(tmp_path):
    signer = key()
    elsewhere = "https://keys.example/set"
    content = signed(CARD, signer, jku=elsewhere)
    trusting = config(tmp_path, trusted_hosts=["keys.example"])
    await check(trusting, fetched(content), Keys({elsewhere: key_set(signer)}))
    on_disk = fetched(content, host="", scheme="file")
    await check(trusting, on_disk, Keys({elsewhere: key_set(signer)}))
    local = "http://127.0.0.1:8000/keys"
    content = signed(CARD, signer, jku=local)
    await check(
        config(tmp_path), fetched(content, "localhost", "http"), Keys({local: key_set(signer)})
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "could not be fetched"),
        ((404, ""), "https://agent.example/keys.json answered 404"),
        ((200, "<html>"), "no usable public keys in https://agent.example/keys.json"),
    ],
)
async def test_key_sets_that_cannot_be_had(tmp_path, answer, words):
    await refused(config(tmp_path), signed(CARD, key(), jku=JKU), words, Keys({JKU: answer}))


async def test_the_unprotected_header_names_no_keys(tmp_path):
    signer = key()
    content = signed(CARD, signer)
    content["signatures"][0]["header"] = {"jku": JKU, "kid": "k1"}
    keys = Keys({JKU: key_set(signer)})
    await refused(config(tmp_path), content, "names no key set", keys)
    assert keys.asked == []


# --- the pin, and nothing asked for -----------------------------------------------------------


async def test_the_pin():
    data = json.dumps(CARD).encode()
    pinned = AgentConfig.model_validate(
        {"card": "https://h", "card_sha256": hashlib.sha256(data).hexdigest().upper()}
    )
    await check(pinned, fetched(data))
    changed = data + b" "
    with pytest.raises(UntrustedCard, match=hashlib.sha256(changed).hexdigest()):
        await check(pinned, fetched(changed))


async def test_without_either_key_every_card_will_do():
    plain = AgentConfig.model_validate({"card": "https://h"})
    await check(plain, fetched(b'{"a":1,"a":2}'))
