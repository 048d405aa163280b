"""The url of an interface: its forms per binding, and when two urls are one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote

from sidecar.core.addresses import normal_host, numeric
from sidecar.core.spec import Binding

MAX_URL_BYTES = 2048

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_QUERY_OR_FRAGMENT = re.compile(r"[?#]")
_UNPRINTABLE = re.compile(r"[\s\x00-\x20\x7f-\xa0\\\ud800-\udfff]")
_PORT = re.compile(r"[0-9]{1,5}")
_USERINFO = re.compile(r"(^|//)[^/?#]*@")

_TLS_OF_SCHEME = {"": True, "https": True, "grpcs": True, "http": False, "grpc": False}


class UrlError(ValueError):
    """Why a url cannot be that of an interface: a sentence for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an interface is, taken apart as `Interface` wants it."""

    tls: bool
    host: str
    """`addresses.normal_host`."""
    port: int
    path: str

    @property
    def numeric(self) -> bool:
        """Whether `host` is an address."""
        return numeric(self.host) is not None


def read_url(url: str, binding: Binding) -> Endpoint:
    """Take an interface url apart; raises UrlError.

    JSONRPC and HTTP+JSON: an absolute http or https url without credentials, query or fragment.
    The path of a JSONRPC url is the request target as it stands, ``/`` when empty; that of an
    HTTP+JSON url loses its trailing slash. Characters that a request target cannot have are
    percent-encoded as UTF-8 (RFC 3987 section 3.1).

    GRPC: host and port, both explicit, and nothing else but a lone trailing slash. ``host:port``,
    ``https://`` and ``grpcs://`` mean TLS, ``http://`` and ``grpc://`` plaintext.
    """
    _check_characters(url)
    scheme, authority, path, rest = _split(url)
    if binding is Binding.GRPC:
        return _grpc(scheme, authority, path, rest)
    path = _target(path)
    path = path.rstrip("/") if binding is Binding.HTTP_JSON else path or "/"
    return _http(scheme, authority, path, rest)


def same_url(one: str, other: str) -> bool:
    """Whether two urls are one: scheme and host without case, default port, a lone ``/`` dropped."""
    return one == other or _comparable(one) == _comparable(other)


def shown_url(url: str) -> str:
    """`url` as it may be shown and logged: without credentials and query."""
    return _USERINFO.sub(r"\1***@", re.sub(r"[?#].*", "?...", url, count=1, flags=re.DOTALL))


def _split(url: str) -> tuple[str, str, str, str]:
    """Scheme, authority, path, and query or fragment (RFC 3986 section 3).

    Without a scheme the text begins with the authority: the ``host:port`` of gRPC.
    """
    found = _QUERY_OR_FRAGMENT.search(url)
    end = found.start() if found else len(url)
    scheme, separator, after = url[:end].partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        scheme, after = "", url[:end]
    authority, slash, path = after.partition("/")
    return scheme.lower(), authority, slash + path, url[end:]


def _check_characters(url: str) -> None:
    if _UNPRINTABLE.search(url):
        raise UrlError("the url has whitespace, control characters or a backslash")
    if len(url.encode()) > MAX_URL_BYTES:
        raise UrlError(f"the url is longer than {MAX_URL_BYTES} bytes")


def _target(path: str) -> str:
    return path if path.isascii() else "".join(c if c.isascii() else quote(c) for c in path)


def _http(scheme: str, authority: str, path: str, rest: str) -> Endpoint:
    if scheme not in ("http", "https"):
        raise UrlError("the url is not an absolute http or https url")
    if rest:
        raise UrlError("the url has a query or a fragment")
    host, port = _host_and_port(authority)
    tls = scheme == "https"
    return Endpoint(tls=tls, host=host, port=port or default_port(tls=tls), path=path)


def _grpc(scheme: str, authority: str, path: str, rest: str) -> Endpoint:
    tls = _TLS_OF_SCHEME.get(scheme)
    if tls is None:
        raise UrlError("the url of a gRPC interface is host:port, or begins with https or http")
    host, port = _host_and_port(authority)
    if port is None:
        raise UrlError("gRPC interfaces need an explicit host and port")
    if path not in ("", "/") or rest:
        raise UrlError("the url of a gRPC interface is host and port alone, without path or query")
    return Endpoint(tls=tls, host=host, port=port, path="")


def _host_and_port(authority: str) -> tuple[str, int | None]:
    """The host as `normal_host` gives it, and the port if there is one."""
    if "@" in authority:
        raise UrlError("the url carries credentials")
    host, colon, port = authority.rpartition(":")
    if not colon or "]" in port:
        host, port = authority, ""
    if not host:
        raise UrlError("the url has no host")
    if ":" in host and not host.startswith("["):
        raise UrlError("the host is not valid (an IPv6 address needs brackets)")
    try:
        host = normal_host(host)
    except ValueError as error:
        raise UrlError(str(error)) from None
    if not port:
        return host, None
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise UrlError("the port is not a number from 1 to 65535")
    return host, int(port)


def default_port(*, tls: bool) -> int:
    """The port of a URL that names none."""
    return 443 if tls else 80


def _comparable(url: str) -> tuple[object, ...]:
    """What two spellings of one url have in common; of a text that is no url, the text."""
    try:
        _check_characters(url)
        scheme, authority, path, rest = _split(url)
        host, port = _host_and_port(authority)
    except UrlError:
        return (url,)
    tls = _TLS_OF_SCHEME.get(scheme)
    place = (scheme, port) if tls is None else (tls, port or default_port(tls=tls))
    return (*place, host, "" if path == "/" else path, rest)
