"""What an agent is shown: secrets from files, the environment or systemd, and OAuth 2.0 tokens.

Secrets are read where they are used and read again when they change. They never stand in the
configuration, and nothing here puts one into a log line, an error or a repr.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, urlencode, urlsplit

import httpx
import msgspec
import trio

from sidecar.core.addresses import names_host, reaches_loopback

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from sidecar.config import AuthConfig, OAuthConfig, SecretRef
    from sidecar.core.types import Headers
    from sidecar.logs import Log

_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_SECRET_BYTES = 64 * 1024

# A token is renewed when this part of its life is over; one without a stated life is kept for this.
_RENEW_AT = 0.8
_UNSTATED_LIFE_SECONDS = 300.0
_LONGEST_LIFE_SECONDS = 86_400.0
_LEAST_BETWEEN_SECONDS = 1.0
_BACKOFF_SECONDS = (1.0, 60.0)
# A 401 makes a new token at most this often: an agent that refuses every token is left alone.
_FORCED_RENEWAL_SECONDS = 10.0
_TOKEN_SECONDS = 10.0
_ERROR_CODE = re.compile(r"[a-z_]{1,40}")


class CredentialsUnavailable(Exception):
    """What is configured cannot be had now; the text names the source, never the secret."""


class Secret:
    """One secret."""

    def __init__(self, ref: SecretRef, log: Log) -> None:
        self._ref = ref
        self._log = log
        self._known = ""
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> str:
        """The secret as it is now; raises CredentialsUnavailable. One that cannot be read any more is kept."""
        try:
            self._refresh()
        except CredentialsUnavailable as error:
            if not self._known:
                raise
            self._log.limited(
                ("secret", str(self._ref)), "warning", "secret kept", error=str(error)
            )
        return self._known

    def _refresh(self) -> None:
        if self._ref.scheme == "env":
            self._known = self._checked(os.environ.get(self._ref.name, ""))
            return
        path = self._path()
        try:
            found = os.stat(path)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            if not stat.S_ISREG(found.st_mode):
                # A pipe could hold up everything, and would not give its text twice.
                raise CredentialsUnavailable(f"{self._ref}: not a regular file")
            with open(path, "rb") as file:
                text = file.read(_SECRET_BYTES).decode("ascii")
        except OSError as error:
            raise CredentialsUnavailable(f"{self._ref}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CredentialsUnavailable(f"{self._ref}: not ASCII text") from None
        self._known = self._checked(text)
        self._seen = seen

    def _path(self) -> str:
        if self._ref.scheme == "file":
            return self._ref.name
        directory = os.environ.get("CREDENTIALS_DIRECTORY", "")
        if not directory:
            raise CredentialsUnavailable(f"{self._ref}: not started by systemd with credentials")
        return os.path.join(directory, self._ref.name)

    def _checked(self, text: str) -> str:
        text = text.strip()
        if not text:
            raise CredentialsUnavailable(f"{self._ref}: empty or not set")
        if _VALUE.fullmatch(text) is None:
            raise CredentialsUnavailable(f"{self._ref}: more than one line of printable ASCII")
        return text


class Credentials:
    """What is configured for one purpose: an agent's calls, or the fetches of its card."""

    def __init__(
        self,
        config: AuthConfig | None,
        *,
        client: Callable[[str], httpx.AsyncClient],
        log: Log,
        rng: random.Random,
        trusted_hosts: frozenset[str] = frozenset(),
    ) -> None:
        """`client` makes the HTTP client that asks a host for tokens.

        Those in `trusted_hosts` may be asked without TLS.
        """
        self._headers: list[tuple[str, Secret]] = []
        self._bearer: Secret | None = None
        self._oauth: _OAuth | None = None
        if config is not None:
            self._headers = [
                (name.lower(), Secret(ref, log)) for name, ref in config.headers.items()
            ]
            self._bearer = Secret(config.bearer, log) if config.bearer else None
            if config.oauth is not None:
                self._oauth = _OAuth(
                    config.oauth, client, log=log, rng=rng, trusted_hosts=trusted_hosts
                )

    @property
    def configured(self) -> bool:
        """Whether there are any."""
        return bool(self._headers or self._bearer or self._oauth)

    async def headers(self) -> Headers:
        """The headers to send; raises CredentialsUnavailable."""
        made = [(name, secret.read()) for name, secret in self._headers]
        if self._bearer is not None:
            made.append(("authorization", f"Bearer {self._bearer.read()}"))
        if self._oauth is not None:
            made.append(("authorization", f"Bearer {await self._oauth.token()}"))
        return made

    def rejected(self, headers: Headers) -> None:
        """The agent answered 401 to these headers: the next call has a new token."""
        if self._oauth is not None:
            self._oauth.rejected(headers)

    async def run(self) -> None:
        """Renew tokens until cancelled."""
        if self._oauth is not None:
            await self._oauth.run()


def check_secrets(config: AuthConfig, log: Log) -> None:
    """Read every secret once; raises CredentialsUnavailable. For start and reload."""
    refs = [*config.headers.values(), config.bearer]
    if config.oauth is not None:
        refs += [config.oauth.client_id, config.oauth.client_secret]
    for ref in refs:
        if ref is not None:
            Secret(ref, log).read()


class _OAuth:
    """Tokens by the client credentials grant (RFC 6749 4.4): one fetch at a time, renewed early."""

    def __init__(
        self,
        config: OAuthConfig,
        client: Callable[[str], httpx.AsyncClient],
        *,
        log: Log,
        rng: random.Random,
        trusted_hosts: frozenset[str],
    ) -> None:
        self._config = config
        self._client = client
        self._trusted_hosts = trusted_hosts
        self._id = Secret(config.client_id, log)
        self._secret = Secret(config.client_secret, log)
        self._log = log
        self._rng = rng
        self._token = ""
        self._expires = 0.0
        self._error = "no token has been fetched yet"
        self._wanted = trio.Event()
        self._under_way: trio.Event | None = trio.Event()
        """Set when the fetch under way has ended; None between fetches."""
        self._forced_at = -_FORCED_RENEWAL_SECONDS

    async def token(self) -> str:
        """A valid token; waits for a fetch under way. Raises CredentialsUnavailable."""
        if not self._valid():
            self._ask()
            if self._under_way is not None:
                await self._under_way.wait()
        if not self._valid():
            raise CredentialsUnavailable(f"no OAuth token: {self._error or 'it has expired'}")
        return self._token

    def _valid(self) -> bool:
        return bool(self._token) and trio.current_time() < self._expires

    def _ask(self) -> None:
        """Let a fetch begin now; between failed ones the back-off goes on, and nobody waits for it."""
        if self._under_way is None and not self._error:
            self._under_way = trio.Event()
            self._wanted.set()

    def rejected(self, headers: Headers) -> None:
        """Drop the token that was refused, if it is still the current one."""
        now = trio.current_time()
        refused = ("authorization", f"Bearer {self._token}") in headers
        if refused and now - self._forced_at >= _FORCED_RENEWAL_SECONDS:
            self._forced_at = now
            self._token = ""
            self._ask()

    async def run(self) -> None:
        """Fetch, renew, back off, until cancelled."""
        shortest, longest = _BACKOFF_SECONDS
        backoff = shortest
        while True:
            self._wanted = trio.Event()
            if self._under_way is None:
                self._under_way = trio.Event()
            try:
                life = await self._fetch_in_time()
            except CredentialsUnavailable as error:
                self._error = str(error)
                self._log.warning("no OAuth token", error=self._error)
                delay = backoff * self._rng.uniform(0.75, 1.0)
                backoff = min(backoff * 2, longest)
            else:
                self._error = ""
                backoff = shortest
                delay = life * _RENEW_AT * self._rng.uniform(0.9, 1.0)
                delay = max(delay, _LEAST_BETWEEN_SECONDS)
            self._under_way.set()
            self._under_way = None
            with trio.CancelScope(deadline=trio.current_time() + delay):
                await self._wanted.wait()

    async def _fetch_in_time(self) -> float:
        """Fetch a token; returns its life in seconds. Raises CredentialsUnavailable and no other."""
        url = _shown(self._config.token_url)
        try:
            with trio.fail_after(_TOKEN_SECONDS):
                return await self._fetch()
        except trio.TooSlowError:
            why = f"{url} gave no complete answer in {_TOKEN_SECONDS:g} s"
        except httpx.HTTPError as error:
            why = f"{url}: {str(error) or type(error).__name__}"
        except CredentialsUnavailable as error:
            why = str(error)
        except Exception as error:  # what a server sends must not end this task
            # Its text could hold what was sent.
            self._log.error("internal error", where="oauth", error=type(error).__name__)
            why = "internal error"
        raise CredentialsUnavailable(why)

    async def _fetch(self) -> float:
        url = await self._token_endpoint()
        basic = f"{quote_plus(self._id.read())}:{quote_plus(self._secret.read())}".encode()
        form = {"grant_type": "client_credentials"}
        if self._config.scopes:
            form["scope"] = " ".join(self._config.scopes)
        if self._config.resource:
            form["resource"] = self._config.resource
        asked_at = trio.current_time()
        response = await self._client(_host(url)).post(
            url,
            content=urlencode(form, quote_via=quote).encode(),
            headers={
                "authorization": "Basic " + base64.b64encode(basic).decode(),
                "content-type": "application/x-www-form-urlencoded",
                "accept": "application/json",
            },
            timeout=_TOKEN_SECONDS,
        )
        answer = _json_object(response)
        if response.status_code != 200:
            code = str(answer.get("error", ""))
            shown = f" ({code})" if _ERROR_CODE.fullmatch(code) else ""
            raise CredentialsUnavailable(
                f"{_shown(url)} answered HTTP {response.status_code}{shown}"
            )
        token, kind = answer.get("access_token"), answer.get("token_type", "bearer")
        if not isinstance(token, str) or _VALUE.fullmatch(token) is None:
            raise CredentialsUnavailable(f"{_shown(url)} answered without an access_token")
        if not isinstance(kind, str) or kind.lower() != "bearer":
            # RFC 6749 7.1: a token of an unknown type must not be used.
            raise CredentialsUnavailable(f"{_shown(url)} gave no bearer token")
        life = _life(answer.get("expires_in"))
        self._token, self._expires = token, asked_at + life
        return life

    async def _token_endpoint(self) -> str:
        """The token URL, or what its discovery document names (RFC 8414, OpenID discovery)."""
        url = self._config.token_url
        if "/.well-known/" not in urlsplit(url).path:
            return url
        response = await self._client(_host(url)).get(url, timeout=_TOKEN_SECONDS)
        endpoint = _json_object(response).get("token_endpoint")
        if response.status_code != 200 or not isinstance(endpoint, str):
            raise CredentialsUnavailable(f"{_shown(url)} names no token_endpoint")
        scheme, host = _scheme_and_host(endpoint)
        if scheme not in {"http", "https"} or not host:
            raise CredentialsUnavailable(f"{_shown(url)} names a token_endpoint that is no URL")
        near = reaches_loopback(host) or names_host(self._trusted_hosts, host)
        if scheme == "http" and (urlsplit(url).scheme == "https" or not near):
            raise CredentialsUnavailable(f"{_shown(url)} names a token_endpoint without TLS")
        return endpoint


def _json_object(response: httpx.Response) -> dict[str, object]:
    try:
        answer = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = None
    return answer if isinstance(answer, dict) else {}


def _life(expires_in: object) -> float:
    """Seconds for which a token is valid (RFC 6749 5.1); some servers write the number as a text."""
    if isinstance(expires_in, str) and expires_in.isascii() and expires_in.isdigit():
        expires_in = int(expires_in[:9])
    if not isinstance(expires_in, int | float) or isinstance(expires_in, bool) or expires_in <= 0:
        return _UNSTATED_LIFE_SECONDS
    return float(min(expires_in, _LONGEST_LIFE_SECONDS))


def _scheme_and_host(url: str) -> tuple[str, str]:
    """('', '') for what is no absolute URL, or has credentials in it."""
    try:
        parts = urlsplit(url)
        usable = parts.port != 0 and "@" not in parts.netloc and url.isprintable()
        return (parts.scheme, parts.hostname or "") if usable else ("", "")
    except ValueError:
        return "", ""


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _shown(url: str) -> str:
    """A URL without query or credentials."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
