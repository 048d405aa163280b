"""The one dialer: resolve, address rule, happy eyeballs, proxy, TLS with one ALPN protocol.

Calls, cards, OAuth and probes all come through here. Nothing is read from the environment.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote, urlsplit

import trio

from sidecar.core.types import Break
from sidecar.wire.sockets import (
    LOCAL_ERRORS,
    SocketWire,
    Wire,
    WireBroken,
    describe,
    format_address,
    is_reserved,
)
from sidecar.wire.tls import Contexts, TlsIdentity, connect_tls

if TYPE_CHECKING:
    from sidecar.wire.tls import TlsWire

__all__ = [
    "DialError",
    "Dialer",
    "Origin",
    "Permit",
    "Resolve",
    "TlsIdentity",
    "Wire",
    "WireBroken",
    "is_numeric",
]

Permit: TypeAlias = Callable[[str], str]
"""Numeric address to the reason why it may not be dialled, '' when it may."""

Resolve: TypeAlias = Callable[[str], Awaitable[list[str]]]
"""Host name to numeric addresses, best first; raises OSError (socket.gaierror is one)."""

_STAGGER_SECONDS: Final = 0.25
"""Connection Attempt Delay (RFC 8305 5)."""

_NAMES_KEPT_SECONDS: Final = 5.0
_NAMES_KEPT: Final = 1024
_LOOKUPS: Final = 16
_PROXY_HEAD_BYTES: Final = 16384

_HOST: Final = re.compile(r"[A-Za-z0-9._:%~-]+")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?\r\n")

_TELLING: Final = (
    Break.LOCAL,
    Break.REFUSED,
    Break.CONNECT_TIMEOUT,
    Break.UNREACHABLE,
    Break.ADDRESS_POLICY,
)
"""Of several failed addresses the first of these that occurred names the whole."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection goes: `host` in lower case, IPv6 without brackets."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return format_address(self.host, self.port)


class DialError(Exception):
    """No connection came about, and nothing of a request has left.

    `cause` is DNS, REFUSED, UNREACHABLE, CONNECT_TIMEOUT, PROXY, ADDRESS_POLICY, TLS, ALPN, or LOCAL
    (out of descriptors, ports or memory, or our own certificates cannot be read). `detail` is for
    the log.
    """

    def __init__(self, cause: Break, detail: str) -> None:
        super().__init__(f"{cause.name}: {detail}")
        self.cause = cause
        self.detail = detail


class Dialer:
    """Makes connections; one for the whole process, so that lookups and contexts are shared."""

    def __init__(self, *, stall_seconds: float, resolve: Resolve | None = None) -> None:
        """`stall_seconds`: a peer that takes no byte for so long is given up (TCP_USER_TIMEOUT)."""
        self._stall_seconds = stall_seconds
        self._names = _Names(resolve or _system_resolver())
        self._contexts = Contexts()

    async def dial(
        self,
        origin: Origin,
        *,
        alpn: str,
        identity: TlsIdentity,
        permit: Permit,
        proxy: str | None = None,
    ) -> Wire:
        """Connect to `origin`; raises DialError. The caller bounds it with a cancel scope.

        `alpn` is offered alone under TLS (``h2``, ``http/1.1``). `permit` judges each address just
        before it is connected to. With `proxy` (``http://user:password@host:port``) the proxy
        resolves the name, so `permit` sees the target only when it is numeric; the proxy itself is
        the operator's word and is not asked about.
        """
        if not 0 < origin.port < 65536:
            raise DialError(Break.UNREACHABLE, f"{origin}: there is no such port")
        if proxy:
            wire = await self._tunnel(proxy, origin, permit)
        else:
            wire = await self._connect(origin.host, origin.port, permit)
        if not origin.tls:
            return wire
        try:
            return await self._secure(wire, origin, alpn, identity)
        except BaseException:
            wire.abort()
            raise

    # --- TCP ----------------------------------------------------------------------------------

    async def _connect(self, host: str, port: int, permit: Permit) -> SocketWire:
        addresses = [host] if is_numeric(host) else await self._names.get(host)
        race = _Race(port, permit)
        sock = await race.run(_interleave(addresses))
        if sock is None:
            raise _all_failed(race.failures, port)
        return SocketWire(sock, stall_seconds=self._stall_seconds)

    # --- the proxy ----------------------------------------------------------------------------

    async def _tunnel(self, proxy: str, origin: Origin, permit: Permit) -> SocketWire:
        if is_numeric(origin.host) and (reason := permit(origin.host)):
            raise DialError(Break.ADDRESS_POLICY, f"{origin.host}: {reason}")
        if not _HOST.fullmatch(origin.host):
            raise DialError(Break.DNS, f"{origin.host!r} is not a host name")
        host, port, authorization = _parse_proxy(proxy)
        try:
            wire = await self._connect(host, port, _anywhere)
        except DialError as error:
            if error.cause is Break.LOCAL:
                raise
            raise DialError(Break.PROXY, f"proxy {host}: {error.detail}") from None
        try:
            head = f"CONNECT {origin} HTTP/1.1\r\nHost: {origin}\r\n{authorization}\r\n"
            await wire.send(head.encode("ascii"))
            await _read_proxy_reply(wire, host)
        except WireBroken as error:
            wire.abort()
            raise DialError(Break.PROXY, f"proxy {host}: {error.detail}") from None
        except BaseException:
            wire.abort()
            raise
        return wire

    # --- TLS ----------------------------------------------------------------------------------

    async def _secure(
        self, wire: SocketWire, origin: Origin, alpn: str, identity: TlsIdentity
    ) -> TlsWire:
        name = identity.server_name or origin.host.removesuffix(".")
        try:
            context = await self._contexts.get(identity, alpn)
        except OSError as error:
            names = (identity.ca_file, identity.client_cert_file, identity.client_key_file)
            files = ", ".join(name for name in names if name) or "the system's store"
            raise DialError(Break.LOCAL, f"{describe(error)} ({files})") from None
        try:
            secured = await connect_tls(wire, context, name)
        except WireBroken as error:
            raise DialError(error.cause, f"{origin}: {error.detail}") from None
        if secured.alpn != alpn and (secured.alpn or alpn != "http/1.1"):
            chosen = secured.alpn or "none"
            raise DialError(Break.ALPN, f"{origin}: {alpn} was offered, {chosen} chosen")
        return secured


# --- names ------------------------------------------------------------------------------------


def is_numeric(host: str) -> bool:
    """Whether `host` is an IP address as `ipaddress` reads it; ``127.1`` is left to the resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _system_resolver() -> Resolve:
    # its own places: hung name servers must not hold up file reads and conversions
    limiter = trio.CapacityLimiter(_LOOKUPS)

    def look_up(host: str) -> list[str]:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def resolve(host: str) -> list[str]:
        return await trio.to_thread.run_sync(look_up, host, limiter=limiter, abandon_on_cancel=True)

    return resolve


@dataclass(slots=True)
class _Lookup:
    addresses: list[str] = field(default_factory=list)
    failure: tuple[Break, str] = (Break.DNS, "the lookup was given up")
    done: trio.Event = field(default_factory=trio.Event)


class _Names:
    """Looked-up names: one lookup under way per name, results kept for five seconds."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._kept: dict[str, tuple[float, list[str]]] = {}
        self._under_way: dict[str, _Lookup] = {}

    async def get(self, host: str) -> list[str]:
        """At least one address; raises DialError DNS or LOCAL."""
        kept = self._kept.get(host)
        if kept is not None and kept[0] > trio.current_time():
            return kept[1]
        lookup = self._under_way.get(host)
        if lookup is None:
            lookup = self._under_way[host] = _Lookup()
            # no caller's: the first one may leave while others wait for the same name
            trio.lowlevel.spawn_system_task(self._look_up, host, lookup)
        await lookup.done.wait()
        if not lookup.addresses:
            raise DialError(*lookup.failure)
        return lookup.addresses

    async def _look_up(self, host: str, lookup: _Lookup) -> None:
        try:
            lookup.addresses = await self._resolve(host)
            lookup.failure = (Break.DNS, f"{host}: no address")
        except Exception as error:  # an exception from a system task would end the process
            lookup.failure = (_cause_of_lookup(error), f"{host}: {describe(error)}")
        else:
            self._keep(host, lookup.addresses)
        finally:
            del self._under_way[host]
            lookup.done.set()

    def _keep(self, host: str, addresses: list[str]) -> None:
        now = trio.current_time()
        if len(self._kept) >= _NAMES_KEPT:
            self._kept = {name: kept for name, kept in self._kept.items() if kept[0] > now}
        if addresses and len(self._kept) < _NAMES_KEPT:
            self._kept[host] = (now + _NAMES_KEPT_SECONDS, addresses)


def _cause_of_lookup(error: Exception) -> Break:
    if isinstance(error, socket.gaierror):
        local = error.errno == socket.EAI_MEMORY
    else:
        local = isinstance(error, OSError) and error.errno in LOCAL_ERRORS
    return Break.LOCAL if local or _no_socket_left() else Break.DNS


def _no_socket_left() -> bool:
    """Whether descriptors are used up, which the resolver reports as a name that is not there."""
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError as error:
        return error.errno in LOCAL_ERRORS
    return False


# --- connecting -------------------------------------------------------------------------------


class _Race:
    """Happy eyeballs (RFC 8305): addresses started one after the other, the first to connect wins."""

    def __init__(self, port: int, permit: Permit) -> None:
        self.failures: list[tuple[Break, str]] = []
        self._port = port
        self._permit = permit
        self._winner: socket.socket | None = None

    async def run(self, addresses: list[str]) -> socket.socket | None:
        """The connected socket, or None when all have failed."""
        if len(addresses) == 1:
            await self._try(addresses[0])
            return self._winner
        try:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    ended = trio.Event()
                    nursery.start_soon(self._start, address, ended, nursery.cancel_scope)
                    with trio.CancelScope(deadline=trio.current_time() + _STAGGER_SECONDS):
                        await ended.wait()
                    if self._winner is not None:
                        break
        except BaseException:
            if self._winner is not None:
                self._winner.close()
            raise
        return self._winner

    async def _start(self, address: str, ended: trio.Event, race: trio.CancelScope) -> None:
        await self._try(address)
        ended.set()
        if self._winner is not None:
            race.cancel()

    async def _try(self, address: str) -> None:
        reason = self._permit(address)
        if reason:
            self.failures.append((Break.ADDRESS_POLICY, f"{address}: {reason}"))
            return
        try:
            sock = await _connect(address, self._port)
        except OSError as error:
            cause = _cause_of_connect(error, address)
            self.failures.append((cause, f"{address}: {describe(error)}"))
            return
        if self._winner is None:
            self._winner = sock
        else:
            sock.close()


async def _connect(address: str, port: int) -> socket.socket:
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        if is_reserved(sock.fileno()):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        sock.setblocking(False)
        try:
            sock.connect((address, port))
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not error and sock.getsockname() == sock.getpeername():
            # a closed port in the ephemeral range can be met by our own end of the connection
            error = errno.ECONNREFUSED
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def _cause_of_connect(error: OSError, address: str) -> Break:
    code = error.errno
    if code in LOCAL_ERRORS:
        return Break.LOCAL
    if code in {errno.ECONNREFUSED, errno.ECONNRESET}:
        return Break.REFUSED
    if code == errno.ETIMEDOUT:
        return Break.CONNECT_TIMEOUT
    if code == errno.EADDRNOTAVAIL and _has_route(address):
        return Break.LOCAL
    return Break.UNREACHABLE


def _has_route(address: str) -> bool:
    """Tells "out of ports" from "no such address here", for which TCP has the same errno."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interleave(addresses: list[str]) -> list[str]:
    """Families in turn, beginning with that of the best address (RFC 8305 4)."""
    first = [address for address in addresses if _family(address) == _family(addresses[0])]
    second = [address for address in addresses if _family(address) != _family(addresses[0])]
    return [address for address in chain(*zip_longest(first, second)) if address]


def _all_failed(failures: list[tuple[Break, str]], port: int) -> DialError:
    causes = {cause for cause, _ in failures}
    cause = next(cause for cause in _TELLING if cause in causes)
    return DialError(cause, f"port {port}: " + "; ".join(detail for _, detail in failures))


# --- proxies ----------------------------------------------------------------------------------


def _anywhere(_address: str) -> str:
    return ""


def _parse_proxy(proxy: str) -> tuple[str, int, str]:
    """Host, port and the Proxy-Authorization line of ``http://user:password@host:port``."""
    try:
        parts = urlsplit(proxy)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise DialError(Break.PROXY, "the proxy's address is not a URL") from None
    if parts.scheme != "http" or not host:
        raise DialError(Break.PROXY, "a proxy is written http://HOST:PORT")
    if parts.username is None:
        return host, port, ""
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    encoded = base64.b64encode(login.encode()).decode()
    return host, port, f"Proxy-Authorization: Basic {encoded}\r\n"


async def _read_proxy_reply(wire: SocketWire, host: str) -> None:
    """Wait for a 2xx to CONNECT; what follows its head belongs to the tunnel and is put back."""
    received = bytearray()
    while (end := received.find(b"\r\n\r\n")) < 0:
        data = await wire.receive()
        if not data:
            raise DialError(Break.PROXY, f"proxy {host}: closed without an answer")
        received += data
        if len(received) > _PROXY_HEAD_BYTES:
            raise DialError(Break.PROXY, f"proxy {host}: the answer is too long")
    status = _STATUS_LINE.match(received)
    if status is None:
        raise DialError(Break.PROXY, f"proxy {host}: the answer is not HTTP/1.1")
    code = int(status[1])
    if not 200 <= code < 300:
        raise DialError(Break.PROXY, f"proxy {host}: CONNECT was answered with status {code}")
    if rest := bytes(received[end + 4 :]):
        wire.unread(rest)
