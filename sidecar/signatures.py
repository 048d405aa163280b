"""Whether a card is the one that its publisher, or the operator, stands for.

`verify_signatures` asks for a signature (RFC 7515) by a key of the publisher: from a file, or from
the JSON Web Key Set that the signature names (`jku`), if that is on the card's own host or a trusted
one. `card_sha256` asks for certain bytes. Both are looked at before anything of the card is used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import trio
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, KeySet, OKPKey, RSAKey

from sidecar.core.addresses import names_host, reaches_loopback, same_host
from sidecar.core.card import CardError
from sidecar.core.card_json import shown_text
from sidecar.core.card_signing import signed_card
from sidecar.discovery import without_query
from sidecar.wire.fetch import FetchError, fetch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import httpx

    from sidecar.config import AgentConfig
    from sidecar.discovery import FetchedCard
    from sidecar.wire.fetch import Fetched

_ALGORITHMS = (
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519"),
    *("PS256", "PS384", "PS512", "RS256", "RS384", "RS512"),
)
"""Signatures by a private key: with a shared secret everybody who verifies could sign."""

_KEY_FILE_BYTES = 1024 * 1024
_KEYS_SECONDS = 10.0
_PEM = "-----BEGIN PUBLIC KEY-----"
_REGISTRY = jws.JWSRegistry(algorithms=list(_ALGORITHMS), strict_check_header=False)


class UntrustedCard(CardError):
    """A card without the signature, or with other bytes, than what is asked for."""


class _Unverified(Exception):
    """Why one signature says nothing."""


def fetched_by(
    client: Callable[[str], httpx.AsyncClient],
) -> Callable[[str], Awaitable[Fetched]]:
    """How `Vetting` gets a key set: with the client that `client` makes for its host."""

    async def get(url: str) -> Fetched:
        host = urlsplit(url).hostname or ""
        return await fetch(client(host), url, headers=[], timeout=_KEYS_SECONDS)

    return get


class Vetting:
    """What one agent's card has to show before it is used."""

    def __init__(self, config: AgentConfig, get: Callable[[str], Awaitable[Fetched]]) -> None:
        """`get` fetches a key set, without credentials; it raises FetchError."""
        self._config = config
        self._get = get
        self._verified = b""
        """The last card whose signature was verified: it need not be again."""
        self.signed_by = ""
        """The key that signed it, for people."""

    async def check(self, fetched: FetchedCard) -> None:
        """Return if the card may be used; raises CardError, UntrustedCard is one."""
        data = fetched.data
        assert data is not None  # only a card that was fetched anew is looked at
        pinned = self._config.card_sha256
        found = hashlib.sha256(data).hexdigest()
        if pinned and found != pinned:
            raise UntrustedCard(f"the card has changed: its SHA-256 is {found}, not card_sha256")
        if self._config.verify_signatures is False or data == self._verified:
            return
        self.signed_by = await self._verify(fetched, data)
        self._verified = data

    async def _verify(self, fetched: FetchedCard, data: bytes) -> str:
        card = signed_card(data)
        if not card.signatures:
            raise UntrustedCard("the card is not signed, and verify_signatures asks for it")
        reasons = []
        for number, (protected, signature) in enumerate(card.signatures):
            try:
                header = _protected_header(protected)
                keys = await self._keys(header, fetched)
                _check_signature(header, protected, signature, card.forms, keys)
            except _Unverified as error:
                reasons.append(f"signature {number}: {error}")
                continue
            return shown_text(header.get("kid")) or "a key without an id"
        raise UntrustedCard("no signature of the card could be verified: " + "; ".join(reasons))

    async def _keys(self, header: dict[str, Any], fetched: FetchedCard) -> KeySet:
        source = self._config.verify_signatures
        if isinstance(source, Path):
            text = await trio.to_thread.run_sync(_read_keys, source)
            return _parse_keys(text, str(source))
        jku = header.get("jku")
        if not isinstance(jku, str) or not jku:
            raise _Unverified("it names no key set (jku), and verify_signatures names no file")
        self._check_jku(jku, fetched)
        try:
            reply = await self._get(jku)
        except FetchError as error:
            raise _Unverified(f"its key set: {error}") from None
        if reply.status != 200:
            raise _Unverified(
                f"its key set {shown_text(without_query(jku))} answered {reply.status}"
            )
        return _parse_keys(reply.body.decode("utf-8", "replace"), shown_text(without_query(jku)))

    def _check_jku(self, jku: str, fetched: FetchedCard) -> None:
        """A key set is as good as where it came from: the card's own host, over TLS."""
        try:
            parts = urlsplit(jku)
            host = parts.hostname or ""
        except ValueError:
            raise _Unverified("its jku is not a URL") from None
        local = parts.scheme == "http" and fetched.source_scheme == "http"
        local = local and reaches_loopback(host) and reaches_loopback(fetched.source_host)
        if not (parts.scheme == "https" or local) or not host or "@" in parts.netloc:
            raise _Unverified("its key set (jku) is not at an https URL")
        own = bool(fetched.source_host) and same_host(host, fetched.source_host)
        if not own and not names_host(frozenset(self._config.trusted_hosts), host):
            raise _Unverified(
                f"its key set is on {shown_text(host)}, which is neither the card's host nor named"
                " in trusted_hosts"
            )


# --- one signature ------------------------------------------------------------------------------


def _protected_header(protected: str) -> dict[str, Any]:
    try:
        raw = base64.urlsafe_b64decode(protected + "=" * (-len(protected) % 4))
        header = json.loads(raw)
    except (binascii.Error, ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _Unverified("its protected header is not JSON in base64url")
    if header.get("alg") not in _ALGORITHMS:
        raise _Unverified(f"the algorithm {shown_text(header.get('alg'))!r} is not accepted")
    if "crit" in header:
        raise _Unverified("it has extensions that must be understood (crit)")
    return header


def _check_signature(
    header: dict[str, Any], protected: str, signature: str, forms: tuple[bytes, ...], keys: KeySet
) -> None:
    """Return if the signature is over one of `forms`, by one of `keys`; raises _Unverified."""
    kid = header.get("kid")
    fitting = [key for key in keys.keys if kid is None or key.kid in {None, kid}]
    if not fitting:
        raise _Unverified(f"there is no key {shown_text(kid)!r}")
    for key in fitting:
        for form in forms:
            encoded = base64.urlsafe_b64encode(form).rstrip(b"=").decode("ascii")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    jws.deserialize_compact(
                        f"{protected}.{encoded}.{signature}", key, registry=_REGISTRY
                    )
            except (JoseError, ValueError, TypeError):
                continue
            return
    raise _Unverified("it does not fit the card")


# --- keys ---------------------------------------------------------------------------------------


def _read_keys(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_KEY_FILE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise _Unverified(f"the keys in {path} cannot be read: {error.strerror}") from None


def _parse_keys(text: str, source: str) -> KeySet:
    """The public keys of a JSON Web Key Set, one JSON Web Key, or PEM."""
    try:
        if _PEM in text:
            blocks = text.split(_PEM)[1:]
            return KeySet(list(map(_pem_key, (_PEM + block for block in blocks))))
        value = json.loads(text)
        entries = value.get("keys", [value])
        keys = [key for key in map(_json_key, entries) if key is not None]
    except (JoseError, ValueError, TypeError, AttributeError, RecursionError):
        keys = []
    if not keys:
        raise _Unverified(f"there are no usable public keys in {source}")
    return KeySet(keys)


def _pem_key(pem: str) -> Key:
    for kind in (ECKey, RSAKey, OKPKey):
        try:
            key: Key = kind.import_key(pem)
        except (JoseError, ValueError, TypeError):
            continue
        return key
    raise ValueError("not a public key")


def _json_key(entry: object) -> Key | None:
    """A key of a set; None for one that is not for signatures or not of a kind known here."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    try:
        match entry.get("kty"):
            case "EC":
                return ECKey.import_key(entry)
            case "RSA":
                return RSAKey.import_key(entry)
            case "OKP":
                return OKPKey.import_key(entry)
            case _:
                return None
    except (JoseError, ValueError, TypeError):
        return None
