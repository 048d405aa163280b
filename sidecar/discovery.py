"""One fetch of one agent's card, from the network or from disk. When to fetch is not decided here."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import msgspec
import trio

from sidecar.core.spec import WELL_KNOWN_CARD
from sidecar.core.types import header
from sidecar.wire.fetch import FETCH_BYTES, FetchError, fetch
from sidecar.wire.sockets import describe

if TYPE_CHECKING:
    import httpx

    from sidecar.core.types import Headers
    from sidecar.wire.fetch import Fetched

CARD_PATH: Final = WELL_KNOWN_CARD
"""Where a card is, below the base of an agent (A2A 8.2)."""

LEGACY_PATH: Final = "/.well-known/agent.json"
"""Where it was before version 0.3."""

_DEFAULT_MAX_AGE: Final = 300.0
_ACCEPT: Final = "application/json, application/a2a+json;q=0.9"
_BOM: Final = b"\xef\xbb\xbf"
_MAX_AGE: Final = re.compile(r'max-age\s*=\s*"?([0-9]+)"?')
_LONGEST_AGE: Final = 2**31
"""What RFC 9111 1.2.2 puts in the place of a number too large to hold."""


class CardFetchError(Exception):
    """No card was had; the text is a sentence for people, without query and credentials.

    `status` is that of the answer, None when none came.
    """

    def __init__(self, sentence: str, *, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a card is. Exactly one of `url` and `path` is set."""

    url: str = ""
    legacy_url: str = ""
    """Tried once when `url` is absent (404, 410); '' when `url` was given as it stands."""
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validators:
    """What makes the next fetch conditional; '' when the last one gave none."""

    etag: str = ""
    last_modified: str = ""


NO_VALIDATORS: Final = Validators()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedCard:
    """What one fetch brought."""

    data: bytes | None
    """A JSON object in UTF-8 without a byte order mark; None when it has not been modified."""
    validators: Validators
    max_age: float
    """Seconds for which it is fresh."""
    url: str
    """Where it came from; a path for files. May hold a query."""
    source_scheme: str
    """``https``, ``http`` or ``file``."""
    source_host: str
    """Lower case; '' for files."""
    peer: str
    """Numeric address that `source_host` resolved to; '' for files and when a proxy resolved it."""
    note: str = ""
    """A sentence for the log, such as that the legacy path was used."""


def resolve_source(card: str, exact: bool = False) -> Source:
    """Read the `card` of a configuration; ValueError says what is wrong, and shows no secrets.

    A URL is taken as written when its path ends in ``.json``, when it has a query, or with `exact`;
    otherwise the well-known path is appended. A path begins with ``/``, ``./`` or ``../``.
    """
    if card.startswith(("/", "./", "../")):
        return Source(path=card)
    try:
        parts = urlsplit(card)
        port = parts.port
    except ValueError:
        raise ValueError("the card's source is not a URL") from None
    match parts.scheme:
        case "file":
            return _file_source(parts)
        case "http" | "https":
            return _url_source(card, parts, exact, port)
        case "":
            raise ValueError(
                "the card's source has no scheme: write https://HOST, or ./FILE for a file"
            )
        case other:
            raise ValueError(
                f"the card's source has the scheme {other!r}: only https, http and file are read"
            )


def _file_source(parts: SplitResult) -> Source:
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise ValueError("a file URL is written file:///ABSOLUTE/PATH")
    return Source(path=unquote(parts.path))


def _url_source(card: str, parts: SplitResult, exact: bool, port: int | None) -> Source:
    if not parts.hostname or port == 0:
        raise ValueError("the card's URL has no usable host and port")
    if "@" in parts.netloc:
        raise ValueError("the card's URL holds credentials: put them into discovery_auth")
    if exact or parts.path.endswith(".json") or parts.query:
        return Source(url=card)
    base = parts.path.rstrip("/")
    return Source(
        url=urlunsplit((parts.scheme, parts.netloc, base + CARD_PATH, "", "")),
        legacy_url=urlunsplit((parts.scheme, parts.netloc, base + LEGACY_PATH, "", "")),
    )


class CardSource:
    """The card of one agent; `fetch` goes and gets it, once."""

    def __init__(
        self, source: Source, client: httpx.AsyncClient, *, timeout_seconds: float = 10.0
    ) -> None:
        """`timeout_seconds` is for a whole fetch, redirects included; the legacy path is another."""
        self._source = source
        self._client = client
        self._timeout_seconds = timeout_seconds

    async def fetch(
        self, validators: Validators = NO_VALIDATORS, *, headers: Headers | None = None
    ) -> FetchedCard:
        """The card as it is now; raises CardFetchError.

        `validators` are those of the card at hand. `headers` are the discovery credentials.
        """
        if self._source.path:
            return await _read_file(self._source.path, validators)
        sent = [("accept", _ACCEPT), *_conditions(validators), *(headers or [])]
        reply = await self._get(self._source.url, sent)
        note = ""
        if reply.status in {404, 410} and self._source.legacy_url:
            first = reply.status
            reply = await self._get(self._source.legacy_url, sent)
            if reply.status in {404, 410}:
                raise CardFetchError(
                    f"there is no card: {self._source.url} answered {first},"
                    f" and {LEGACY_PATH} there {reply.status}"
                )
            note = f"{CARD_PATH} answered {first}; the card came from {LEGACY_PATH}"
        return _card_of(reply, validators, note)

    async def _get(self, url: str, headers: Headers) -> Fetched:
        try:
            return await fetch(self._client, url, headers=headers, timeout=self._timeout_seconds)
        except FetchError as error:
            raise CardFetchError(f"the card: {error}", status=error.status) from error


def _conditions(validators: Validators) -> Headers:
    pairs = [
        ("if-none-match", validators.etag),
        ("if-modified-since", validators.last_modified),
    ]
    return [(name, value) for name, value in pairs if value]


def _card_of(reply: Fetched, validators: Validators, note: str) -> FetchedCard:
    parts = urlsplit(reply.url)
    data: bytes | None = None
    if reply.status != 304 or validators == NO_VALIDATORS:
        data = _card_bytes(reply)
        validators = NO_VALIDATORS
    return FetchedCard(
        data=data,
        validators=Validators(
            etag=header(reply.headers, "etag") or validators.etag,
            last_modified=header(reply.headers, "last-modified") or validators.last_modified,
        ),
        max_age=_max_age(reply.headers),
        url=reply.url,
        source_scheme=parts.scheme,
        source_host=parts.hostname or "",
        peer=reply.peer,
        note=note,
    )


def _card_bytes(reply: Fetched) -> bytes:
    """The body as a JSON object. Its content type does not matter, unless it says HTML."""
    content_type = reply.content_type or "no content type"
    where = f"{without_query(reply.url)} answered {reply.status} with {content_type}"
    if reply.status != 200:
        hint = ": check discovery_auth" if reply.status in {401, 403} else ""
        raise CardFetchError(f"{where}, not with a card{hint}", status=reply.status)
    if "html" in content_type.lower():
        raise CardFetchError(f"{where}: a web page, not a card")
    try:
        return _json_object(reply.body)
    except ValueError as error:
        raise CardFetchError(f"{where}: {error}") from None


def _json_object(data: bytes) -> bytes:
    """`data` without a byte order mark, if it is a JSON object; ValueError if not."""
    data = data.removeprefix(_BOM)
    if data.lstrip()[:1] == b"<":
        raise ValueError("the body is a web page, not a card")
    try:
        data.decode()
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError:
        raise ValueError("the body is not UTF-8") from None
    except msgspec.ValidationError:
        raise ValueError("the body is JSON, but not an object") from None
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("the body is not JSON") from None
    return data


def _max_age(headers: Headers) -> float:
    directives = ",".join(value for name, value in headers if name == "cache-control").lower()
    if "no-store" in directives or "no-cache" in directives:
        return 0.0
    found = _MAX_AGE.search(directives)
    if found is None:
        return _DEFAULT_MAX_AGE
    digits = found[1]
    return float(min(int(digits), _LONGEST_AGE) if len(digits) < 12 else _LONGEST_AGE)


def without_query(url: str) -> str:
    """`url` without its query, where secrets may be."""
    return url.partition("?")[0].partition("#")[0]


# --- files ------------------------------------------------------------------------------------


async def _read_file(path: str, validators: Validators) -> FetchedCard:
    try:
        data = await trio.to_thread.run_sync(_read_bounded, path)
        card = _json_object(data)
    except OSError as error:
        raise CardFetchError(f"the card {path} cannot be read: {describe(error)}") from error
    except ValueError as error:
        raise CardFetchError(f"the card {path}: {error}") from None
    etag = f'"{hashlib.sha256(card).hexdigest()}"'
    return FetchedCard(
        data=None if etag == validators.etag else card,
        validators=Validators(etag=etag),
        max_age=_DEFAULT_MAX_AGE,
        url=path,
        source_scheme="file",
        source_host="",
        peer="",
    )


def _read_bounded(path: str) -> bytes:
    # not blocking: opening a pipe that nobody writes to would hold the thread for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(FETCH_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > FETCH_BYTES:
        raise ValueError(f"the file is too large (more than {FETCH_BYTES} bytes)")
    return data
