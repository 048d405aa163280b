"""httpx on our dialer, for cards, tokens and probes: bounded bodies, nothing from the environment.

Each request has a connection of its own: these fetches are rare, and a fresh connection cannot have
been closed by the server in the meantime.
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

import httpcore
import httpx
import trio

from sidecar import __version__
from sidecar.wire.net import DialError, Origin, WireBroken, is_numeric

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractContextManager

    from sidecar.core.types import Headers
    from sidecar.wire.net import Dialer, Permit, TlsIdentity, Wire

FETCH_BYTES: Final = 1 << 20
"""The most that a fetched body may have, after decompression."""

_STEP_SECONDS: Final = 10.0
"""Limit of a single dial, read or write when the caller of the client sets none."""

_GOODBYE_SECONDS: Final = 1.0
_GZIP_OVERHEAD: Final = 65536
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
        return next((value for name, value in self.headers if name == "content-type"), "")


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


class DialerTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 by httpcore over a wire of ours; raises httpx's exceptions.

    The response's extension ``address`` is what `Fetched.peer` says.
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
            connection = httpcore.AsyncHTTP11Connection(
                origin=httpcore.Origin(url.raw_scheme, url.raw_host, _port(url)),
                stream=_Stream(wire),
            )
            response = await connection.handle_async_request(_translate(request))
        except Exception as error:
            wire.abort()
            raise _map(error, request) from error
        except BaseException:
            wire.abort()
            raise
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response, wire, request),
            extensions={**response.extensions, "address": self._address(url.host, wire)},
        )

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


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, wire: Wire, request: httpx.Request) -> None:
        self._response = response
        self._wire = wire
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_stream():
                yield chunk
        except Exception as error:
            raise _map(error, self._request) from error

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
            await self._response.aclose()
        self._wire.abort()


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


def _map(error: Exception, request: httpx.Request) -> Exception:
    for kind, ours in _KINDS:
        if isinstance(error, kind):
            return ours(str(error), request=request)
    return error


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
    return url.port or (443 if url.scheme == "https" else 80)


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
        request = client.build_request("GET", url, headers=sent)
        response = await client.send(request, stream=True)
        try:
            location = response.headers.get("location")
            if response.status_code not in _REDIRECTS or location is None:
                return Fetched(
                    status=response.status_code,
                    headers=_plain_headers(response.headers.raw),
                    body=await _read(response, limit),
                    url=str(url),
                    peer=response.extensions["address"],
                )
            url = _redirect(response, url, location)
        finally:
            await response.aclose()
    raise FetchError(f"{_plain(start)} redirects more than {max_redirects} times")


def _redirect(response: httpx.Response, url: httpx.URL, location: str) -> httpx.URL:
    target = url.join(location)
    if (target.scheme, target.host, _port(target)) != (url.scheme, url.host, _port(url)):
        sentence = f"{_plain(url)} redirects to another origin ({_plain(target)}): not followed"
        raise FetchError(sentence, status=response.status_code)
    return target.copy_with(userinfo=b"")


async def _read(response: httpx.Response, limit: int) -> bytes:
    """The decompressed body. httpx's own decoders would inflate without a bound."""
    length = response.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit):
        raise _too_large(response, limit)
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in {"", "identity", "gzip", "x-gzip"}:
        raise _unreadable(response, f"content-encoding {coding!r} was not asked for")
    gunzip = _Gunzip(limit) if coding.endswith("gzip") else None
    chunks: list[bytes] = []
    size = raw = 0
    async for chunk in response.aiter_raw():
        raw += len(chunk)
        try:
            data = chunk if gunzip is None else gunzip.feed(chunk)
        except zlib.error:
            raise _unreadable(response, "its gzip is damaged") from None
        size += len(data)
        if size > limit or raw > limit + _GZIP_OVERHEAD:
            raise _too_large(response, limit)
        chunks.append(data)
    if gunzip is not None and not gunzip.complete:
        raise _unreadable(response, "its gzip is cut short")
    return b"".join(chunks)


class _Gunzip:
    """gzip, several members too, which gives at most one byte more than `limit` per feed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inflate = zlib.decompressobj(_GZIP_WINDOW)
        self._begun = False

    @property
    def complete(self) -> bool:
        """Nothing is missing at the end; an empty body is complete."""
        return self._inflate.eof or not self._begun

    def feed(self, data: bytes) -> bytes:
        chunks: list[bytes] = []
        room = self._limit + 1
        while data and room:
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(_GZIP_WINDOW)
            self._begun = True
            chunk = self._inflate.decompress(data, room)
            chunks.append(chunk)
            room -= len(chunk)
            data = self._inflate.unused_data
        return b"".join(chunks)


def _too_large(response: httpx.Response, limit: int) -> FetchError:
    return _unreadable(response, f"the body is too large (more than {limit} bytes)")


def _unreadable(response: httpx.Response, reason: str) -> FetchError:
    sentence = f"{_plain(response.request.url)} answered {response.status_code}: {reason}"
    return FetchError(sentence, status=response.status_code)


def _plain(url: httpx.URL | str) -> str:
    """`url` without credentials, query and fragment, where secrets may be."""
    parts = urlsplit(str(url))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _plain_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
