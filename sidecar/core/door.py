"""Who may come in: rules on the local side's requests (DESIGN 3.7), and which agent they mean."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from sidecar.core import errors
from sidecar.core.addresses import AddressKind, kind_of, numeric
from sidecar.core.spec import VERSION_HEADER, VERSION_NOT_SUPPORTED
from sidecar.core.types import header

if TYPE_CHECKING:
    from collections.abc import Collection

    from sidecar.core.types import ErrorRecord, Headers

_AGENT_PATH = re.compile(r"/agents/([^/]+)(/.*)?")
_AUTHORITY = re.compile(r"(?:\[([0-9A-Za-z:.%]+)\]|([^\[\]:/?#@\s]+))(?::[0-9]{1,5})?")
_VERSION = re.compile(r"[vV]?1(\.[0-9]+)*")


def admit(headers: Headers, host: str, *, hosts: frozenset[str]) -> ErrorRecord | None:
    """The refusal of a request that a web page may have sent to a TCP listener; None: welcome.

    A loopback service is within reach of every page in a browser on this machine, by itself or
    through a name that resolves to 127.0.0.1. `host` is the request's Host or ``:authority``,
    `hosts` are further names that are expected.
    """
    if any(name == "origin" for name, _ in headers):
        return _forbidden("requests with an Origin header come from web pages")
    if any(name == "sec-fetch-site" and value != "none" for name, value in headers):
        return _forbidden("requests with Sec-Fetch-Site come from web pages")
    if sum(name == "host" for name, _ in headers) > 1:
        return _forbidden("the request has more than one Host")
    if _is_local(host) or host_of(host) in hosts:
        return None
    return _forbidden(f"Host {host[:100]!r} is not a name of this listener")


@lru_cache(maxsize=64)  # asked for every request, and always the same few
def _is_local(host: str) -> bool:
    named = host_of(host)
    address = numeric(named)
    if address is not None:
        # Not 0.0.0.0: it reaches this machine, and browsers send no Sec-Fetch headers there.
        return kind_of(address) is AddressKind.LOOPBACK
    return named == "localhost" or named.endswith(".localhost")


def _forbidden(message: str) -> ErrorRecord:
    return errors.own("FORBIDDEN_ORIGIN", message, delivered="no")


def host_of(authority: str) -> str:
    """The host of ``host:port``, lower case, IPv6 without brackets; '' for what is no authority."""
    match = _AUTHORITY.fullmatch(authority)
    return (match[1] or match[2]).lower() if match else ""


def agent_in_path(target: str) -> tuple[str, str]:
    """The agent's name in a request target, and the path behind it.

    ``/agents/weather/tasks`` is ``("weather", "/tasks")``; a path that names none is ``("", path)``.
    The name counts byte for byte: nothing is decoded.
    """
    path = target.partition("?")[0]
    match = _AGENT_PATH.fullmatch(path)
    if match is None:
        return "", path
    return match[1], match[2] or "/"


def choose_agent(named: str, own: str | None, agents: Collection[str]) -> str | ErrorRecord:
    """The agent that a request means: the listener's own, the one named, or the only one."""
    if own is not None:
        if named and named != own:
            return errors.own(
                "AGENT_UNKNOWN", f"this listener serves agent {own} only", delivered="no"
            )
        return own
    if named:
        if named in agents:
            return named
        known = ", ".join(sorted(agents)) or "none"
        return errors.own(
            "AGENT_UNKNOWN", f"there is no agent {named[:100]!r}; agents: {known}", delivered="no"
        )
    if len(agents) == 1:
        return next(iter(agents))
    known = ", ".join(sorted(agents)) or "none"
    return errors.own(
        "AGENT_UNKNOWN",
        "the request names no agent; use /agents/NAME, on gRPC the tenant NAME, with one of:"
        f" {known}",
        delivered="no",
    )


def check_version(headers: Headers) -> ErrorRecord | None:
    """The refusal of an explicit protocol version other than 1.x (A2A 3.6.2).

    No version counts as 1.0: the operations of 0.3 have other names, so none is taken for another.
    """
    version = (header(headers, VERSION_HEADER) or "").strip()
    if not version or _VERSION.fullmatch(version):
        return None
    return errors.standard(
        VERSION_NOT_SUPPORTED,
        f"protocol version {version[:20]} is not supported; this sidecar speaks 1.0",
        metadata={"supportedVersions": "1.0"},
    )
