"""httpx on our dialer, for cards, tokens and probes: bounded bodies, nothing from the environment.

Each request has a connection of its own: these fetches are rare, and a fresh connection cannot have
been closed by the server in the meantime. Replies are read whole by the transport, which inflates
them itself: the decoders of httpx have no bound.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final

import httpcore
import httpx
import trio

from sidecar import __version__
from sidecar.core.interface_url import default_port
from sidecar.core.types import header
from sidecar.wire.net import DialError, Origin, WireBroken, is_numeric

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from sidecar.core.types import Headers
    from sidecar.wire.net import Dialer, Permit, TlsIdentity, Wire

FETCH_BYTES: Final = 1 << 20
"""The most that a fetched body may have, after decompression."""

_STEP_SECONDS: Final = 10.0
"""Limit of a single dial, read or write when the caller of the client sets none."""

_GOODBYE_SECONDS: Final = 1.0
_GZIP_OVERHEAD: Final = 65536
"""What a compressed body may have more than its limit."""

_GZIP_WINDOW: Final = 31  # zlib's number for "gzip header, largest window"
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})

for _library in ("httpx", "httpcore"):
    # their lines show queries and headers, where secrets may be
    logging.getLogger(_library).setLevel(logging.WARNING)


class FetchError(Exception):
    """A fetch without a usable reply; the text is for people, without query and credentials.

    `status` is that of the reply, None when none came. The cause (httpx.HTTPError, DialError below
    it) is chained.
    """

    def __init__(self, sentence: str, *, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A complete reply of any status."""

    status: int
    headers: Headers
    body: bytes
    """Decompressed."""
    url: str
    """Where it came from, after redirects."""
    peer: str
    """Numeric address that the host of `url` resolved to; '' when a proxy resolved it."""

    @property
    def content_type(self) -> str:
        """As sent, '' without one."""
        return header(self.headers, "content-type") or ""


# --- httpx on the dialer ------------------------------------------------------------------------


def client(
    dialer: Dialer, *, identity: TlsIdentity, permit: Permit, proxy: str | None = None
) -> httpx.AsyncClient:
    """An httpx client that dials as calls do.

    It reads no environment, keeps no cookies and follows no redirects.
    """
    transport = DialerTransport(dialer, identity=identity, permit=permit, proxy=proxy)
    return httpx.AsyncClient(
        transport=transport,
        trust_env=False,
        http2=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        timeout=httpx.Timeout(_STEP_SECONDS),
        headers={
            "user-agent": f"a2a-sidecar/{__version__}",
            "accept-encoding": "identity",
            "connection": "close",
        },
    )


class BodyError(httpx.DecodingError):
    """The body is larger than the limit, or is not in an encoding that was asked for."""

    def __init__(self, reason: str, request: httpx.Request, status: int) -> None:
        super().__init__(reason, request=request)
        self.status = status


class DialerTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 by httpcore over a wire of ours; raises httpx's exceptions and BodyError.

    Responses come complete and decompressed. The request's extension ``limit`` is the most bytes
    that a body may have then (`FETCH_BYTES` without it). The response's extension ``address`` is
    what `Fetched.peer` says.
    """

    def __init__(
        self, dialer: Dialer, *, identity: TlsIdentity, permit: Permit, proxy: str | None
    ) -> None:
        self._dialer = dialer
        self._identity = identity
        self._permit = permit
        self._proxy = proxy

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Dial, send and return at the head of the reply."""
        url = request.url
        if url.scheme not in {"http", "https"} or not url.host:
            raise httpx.UnsupportedProtocol(f"no http or https URL: {_plain(url)}", request=request)
        wire = await self._dial(request)
        try:
            response = await _exchange(request, wire)
        except BaseException:
            wire.abort()
            raise
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
            await wire.aclose()
        response.extensions["address"] = self._address(url.host, wire)
        return response

    def _address(self, host: str, wire: Wire) -> str:
        if self._proxy:
            return host if is_numeric(host) else ""
        return wire.peer.rpartition(":")[0].strip("[]")

    async def _dial(self, request: httpx.Request) -> Wire:
        url = request.url
        seconds = _timeouts(request).get("connect")
        try:
            with trio.fail_after(_STEP_SECONDS if seconds is None else seconds):
                return await self._dialer.dial(
                    Origin(url.host, _port(url), tls=url.scheme == "https"),
                    alpn="http/1.1",
                    identity=self._identity,
                    permit=self._permit,
                    proxy=self._proxy,
                )
        except trio.TooSlowError as error:
            raise httpx.ConnectTimeout("the connection took too long", request=request) from error
        except DialError as error:
            raise httpx.ConnectError(str(error), request=request) from error


class _Stream(httpcore.AsyncNetworkStream):
    """A wire as httpcore wants it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        # httpcore asks for as much as a wire gives, and would take more
        try:
            with _limit(timeout):
                return await self._wire.receive()
        except trio.TooSlowError as error:
            raise httpcore.ReadTimeout("nothing was received in time") from error
        except WireBroken as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            with _limit(timeout):
                await self._wire.send(buffer)
        except trio.TooSlowError as error:
            raise httpcore.WriteTimeout("the request was not taken in time") from error
        except WireBroken as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        await self._wire.aclose()

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as httpcore declares it
        return self._wire.peer if info == "server_addr" else None


_KINDS: Final[tuple[tuple[type[Exception], type[httpx.TransportError]], ...]] = (
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.TimeoutException, httpx.TimeoutException),
    (httpcore.ReadError, httpx.ReadError),
    (httpcore.WriteError, httpx.WriteError),
    (httpcore.NetworkError, httpx.NetworkError),
    (httpcore.LocalProtocolError, httpx.LocalProtocolError),
    (httpcore.RemoteProtocolError, httpx.RemoteProtocolError),
    (httpcore.ProtocolError, httpx.ProtocolError),
)


async def _exchange(request: httpx.Request, wire: Wire) -> httpx.Response:
    url = request.url
    connection = httpcore.AsyncHTTP11Connection(
        origin=httpcore.Origin(url.raw_scheme, url.raw_host, _port(url)),
        stream=_Stream(wire),
    )
    try:
        response = await connection.handle_async_request(_translate(request))
        body = await _read(response, request, wire)
    except tuple(kind for kind, _ in _KINDS) as error:
        ours = next(ours for kind, ours in _KINDS if isinstance(error, kind))
        raise ours(str(error), request=request) from error
    described = {b"content-encoding", b"content-length", b"transfer-encoding"}
    return httpx.Response(
        response.status,
        headers=[
            (name, value) for name, value in response.headers if name.lower() not in described
        ],
        stream=httpx.ByteStream(body),
    )


async def _read(response: httpcore.Response, request: httpx.Request, wire: Wire) -> bytes:
    """The decompressed body, within the limit."""
    limit: int = request.extensions.get("limit", FETCH_BYTES)
    headers = httpx.Headers(response.headers)
    refusal = ""
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit):
        refusal = _too_large(limit)
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in {"", "identity", "gzip", "x-gzip"}:
        refusal = f"content-encoding {coding!r} was not asked for"
    body = _Body(limit, gzipped=coding.endswith("gzip"))
    try:
        # a refused body is read on from a closed wire: the generators below run to their ends,
        # which trio wants, and no more is received
        if refusal:
            wire.abort()
        async for chunk in response.aiter_stream():
            refusal = refusal or body.add(chunk)
            if refusal:
                wire.abort()
        refusal = refusal or body.end()
    except httpcore.NetworkError:
        if not refusal:
            raise
    if refusal:
        raise BodyError(refusal, request, response.status)
    return body.data()


class _Body:
    """Collects a body, plain or gzip of one or more members, and says why it cannot go on."""

    def __init__(self, limit: int, *, gzipped: bool) -> None:
        self._limit = limit
        self._inflate = zlib.decompressobj(_GZIP_WINDOW) if gzipped else None
        self._chunks: list[bytes] = []
        self._raw = 0
        self._size = 0

    def add(self, data: bytes) -> str:
        """'' when `data` was taken, else a reason; holds at most one byte more than the limit."""
        self._raw += len(data)
        try:
            while data and self._size <= self._limit:
                data = self._add_some(data)
        except zlib.error:
            return "its gzip is damaged"
        # empty members inflate to nothing for ever
        if self._size > self._limit or self._raw > self._limit + _GZIP_OVERHEAD:
            return _too_large(self._limit)
        return ""

    def _add_some(self, data: bytes) -> bytes:
        rest = b""
        if self._inflate is not None:
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(_GZIP_WINDOW)
            data = self._inflate.decompress(data, self._limit + 1 - self._size)
            rest = self._inflate.unused_data
        self._chunks.append(data)
        self._size += len(data)
        return rest

    def end(self) -> str:
        """'' when nothing is missing, else a reason. A body without a byte is complete."""
        if self._raw and self._inflate is not None and not self._inflate.eof:
            return "its gzip is cut short"
        return ""

    def data(self) -> bytes:
        return b"".join(self._chunks)


def _too_large(limit: int) -> str:
    return f"the body is too large (more than {limit} bytes)"


def _translate(request: httpx.Request) -> httpcore.Request:
    url = request.url
    return httpcore.Request(
        method=request.method,
        url=httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions={"timeout": _timeouts(request)},
    )


def _timeouts(request: httpx.Request) -> dict[str, float | None]:
    timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
    return timeouts


def _limit(seconds: float | None) -> AbstractContextManager[trio.CancelScope]:
    return trio.fail_after(math.inf if seconds is None else seconds)


def _port(url: httpx.URL) -> int:
    return url.port or default_port(tls=url.scheme == "https")


# --- one bounded fetch --------------------------------------------------------------------------


async def fetch(
    client: httpx.AsyncClient,
    url: str,
    *,
    headers: Headers,
    timeout: float,
    limit: int = FETCH_BYTES,
    max_redirects: int = 5,
) -> Fetched:
    """GET `url` and read the whole reply, of whatever status; raises FetchError.

    `timeout` is for everything, in seconds. `limit` counts bytes after decompression. Redirects are
    followed to the same scheme, host and port only, since `headers` may hold credentials.
    """
    try:
        with trio.fail_after(timeout):
            return await _follow(client, httpx.URL(url), headers, limit, max_redirects)
    except trio.TooSlowError as error:
        raise FetchError(f"{_plain(url)} gave no complete answer in {timeout:g} s") from error
    except BodyError as error:
        sentence = f"{_plain(url)} answered {error.status}: {error}"
        raise FetchError(sentence, status=error.status) from error
    except httpx.InvalidURL as error:
        raise FetchError(f"{_plain(url)} is not a URL: {error}") from error
    except httpx.HTTPError as error:
        raise FetchError(f"{_plain(url)} could not be fetched: {error}") from error


async def _follow(
    client: httpx.AsyncClient, url: httpx.URL, headers: Headers, limit: int, max_redirects: int
) -> Fetched:
    start = url
    sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    sent.append((b"accept-encoding", b"gzip, identity"))
    for _ in range(max_redirects + 1):
        request = client.build_request("GET", url, headers=sent, extensions={"limit": limit})
        response = await client.send(request)
        location = response.headers.get("location")
        if response.status_code not in _REDIRECTS or location is None:
            return Fetched(
                status=response.status_code,
                headers=_plain_headers(response.headers.raw),
                body=response.content,
                url=str(url),
                peer=response.extensions["address"],
            )
        url = _redirect(response, url, location)
    raise FetchError(f"{_plain(start)} redirects more than {max_redirects} times")


def _redirect(response: httpx.Response, url: httpx.URL, location: str) -> httpx.URL:
    target = url.join(location)
    if (target.scheme, target.host, _port(target)) != (url.scheme, url.host, _port(url)):
        sentence = f"{_plain(url)} redirects to another origin ({_plain(target)}): not followed"
        raise FetchError(sentence, status=response.status_code)
    return target.copy_with(userinfo=b"")


def _plain(url: httpx.URL | str) -> str:
    """`url` without credentials, query and fragment, where secrets may be; any text goes."""
    scheme, separator, rest = str(url).partition("://")
    place, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}{separator}{place.rpartition('@')[2]}{slash}{path}"


def _plain_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
