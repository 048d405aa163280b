"""Hosts and addresses: which of them a card may point at.

Everything here works on text. Names are not resolved: the dialer resolves them and asks
`AddressPolicy.refuses` again about each address, immediately before it connects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import idna


class AddressKind(Enum):
    """What an address reaches; the value is how a sentence names it."""

    LOOPBACK = "a loopback address"
    LINK_LOCAL = "a link-local address"
    UNSPECIFIED = "an unspecified address"
    MULTICAST = "a multicast or broadcast address"
    PRIVATE = "a private address"
    PUBLIC = "a public address"


# The first network that holds the address decides.
_NETWORKS = tuple(
    (ip_network(network), kind)
    for network, kind in (
        ("127.0.0.0/8", AddressKind.LOOPBACK),
        ("::1/128", AddressKind.LOOPBACK),
        ("0.0.0.0/8", AddressKind.UNSPECIFIED),
        ("::/128", AddressKind.UNSPECIFIED),
        ("169.254.0.0/16", AddressKind.LINK_LOCAL),
        ("fe80::/10", AddressKind.LINK_LOCAL),
        ("224.0.0.0/4", AddressKind.MULTICAST),
        ("255.255.255.255/32", AddressKind.MULTICAST),
        ("ff00::/8", AddressKind.MULTICAST),
        ("10.0.0.0/8", AddressKind.PRIVATE),
        ("172.16.0.0/12", AddressKind.PRIVATE),
        ("192.168.0.0/16", AddressKind.PRIVATE),
        # shared space between a provider and its customers (RFC 6598), used by clouds and overlays
        ("100.64.0.0/10", AddressKind.PRIVATE),
        # reserved (RFC 1112), routed inside some networks
        ("240.0.0.0/4", AddressKind.PRIVATE),
        ("fc00::/7", AddressKind.PRIVATE),
        ("fec0::/10", AddressKind.PRIVATE),
    )
)

# IPv6 networks whose last 32 bits are the IPv4 address that is really reached: mapped (RFC 4291),
# IPv4-compatible, translated (RFC 2765) and NAT64 (RFC 6052).
_EMBEDDING = tuple(
    ip_network(network) for network in ("::ffff:0:0/96", "::/96", "::ffff:0:0:0/96", "64:ff9b::/96")
)

_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})  # noqa: S104
_REACHES_LOOPBACK = frozenset({AddressKind.LOOPBACK, AddressKind.UNSPECIFIED})
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


def kind_of(address: str) -> AddressKind:
    """The kind of a numeric IPv4 or IPv6 address; raises ValueError for anything else.

    An IPv6 address that embeds an IPv4 one (mapped, NAT64, 6to4) has the kind of the latter.
    """
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        parsed = _embedded(parsed) or parsed
    for network, kind in _NETWORKS:
        if parsed in network:
            return kind
    return AddressKind.PUBLIC


def _embedded(address: IPv6Address) -> IPv4Address | None:
    if address.sixtofour is not None:
        return address.sixtofour
    # ::1 and :: are addresses of their own, not 0.0.0.1 and 0.0.0.0
    if int(address) > 1 and any(address in network for network in _EMBEDDING):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


def numeric(host: str) -> str | None:
    """The canonical address that `host` is a spelling of, or None for a name.

    Besides the usual forms: IPv6 in brackets, IPv4-mapped IPv6 (gives the IPv4 address) and what
    resolvers take from `inet_aton`: one to four parts, each decimal, octal or hexadecimal, the
    last filling the rest (``2130706433``, ``0x7f.1``, ``127.1``).
    """
    if host.startswith("[") or ":" in host:
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            address = IPv6Address(host)
        except ValueError:
            return None
        return str(address.ipv4_mapped or address)
    parts = [_number(part) for part in host.removesuffix(".").split(".")]
    if len(parts) > 4:
        return None
    value = 0
    for shift, part in zip((24, 16, 8), parts[:-1], strict=False):
        if part is None or part > 0xFF:
            return None
        value |= part << shift
    last = parts[-1]
    if last is None or last >= 1 << (8 * (5 - len(parts))):
        return None
    return str(IPv4Address(value | last))


def _number(text: str) -> int | None:
    """A part of an `inet_aton` address; None if it is not a number of at most 32 bits."""
    if not text.isascii() or not text[:1].isdigit() or len(text) > 40:
        return None
    digits, base = text, 10
    if text[:2].lower() == "0x":
        digits, base = text[2:], 16
    elif text[0] == "0":
        base = 8
    # int() would also take signs, spaces and underscores
    return int(text, base) if digits.isalnum() and _all_digits(digits, base) else None


def _all_digits(text: str, base: int) -> bool:
    return all(character in "0123456789abcdef"[:base] for character in text.lower())


def normal_host(host: str) -> str:
    """`host` in the one form in which hosts are compared and dialled; raises ValueError.

    Names are lower case, without a trailing dot, non-ASCII ones as IDNA A-labels (RFC 5891);
    numeric spellings are canonical, IPv6 without brackets. The ValueError's text is a reason.
    """
    if host.startswith("["):
        address = numeric(host) if host.endswith("]") else None
        if address is None or "%" in address:
            raise ValueError("the host is not a valid IPv6 address")
        return address
    if len(host) > 253:
        raise ValueError("the host is not valid")
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except UnicodeError as error:
            raise ValueError("the host is not a valid internationalized name") from error
    host = host.lower()
    address = numeric(host)
    if address is not None:
        return address
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("the host is not valid")
    # Parsers disagree on names that end in a number: some take them for addresses.
    if labels[-1].isdigit() or _number(labels[-1]) is not None:
        raise ValueError("the host is not a valid IPv4 address")
    return host


def _comparable(host: str) -> str:
    """`normal_host` for hosts from anywhere: bare IPv6 is taken, what is invalid stays as it is."""
    try:
        return normal_host(f"[{host}]" if ":" in host and host[0] != "[" else host)
    except ValueError:
        return host.lower()


def names_host(hosts: frozenset[str], host: str) -> bool:
    """Whether `host` is one of `hosts` (of `trusted_hosts`), whatever the spelling of either."""
    return bool(hosts) and _comparable(host) in {_comparable(each) for each in hosts}


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are one for credentials: equal, or both a usual name of this machine.

    Local agents publish ``localhost``, ``127.0.0.1`` and their bind address ``0.0.0.0`` alike.
    Other loopback addresses (``127.0.0.2``) are hosts of their own.
    """
    one, other = _comparable(one), _comparable(other)
    return one == other or (one in _THIS_MACHINE and other in _THIS_MACHINE)


def reaches_loopback(host: str) -> bool:
    """Whether `host`, without asking a resolver, is this machine: ``localhost`` or an address."""
    address = numeric(host)
    return host == "localhost" if address is None else kind_of(address) in _REACHES_LOOPBACK


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What the interfaces of one card may point at; asked at reading time and at each dial.

    A card is remote-controlled input: what its own host could not reach without this sidecar, it
    shall not reach through it.
    """

    card_kind: AddressKind | None
    """What the card's host resolved to; None for a card from a file, the operator's own."""
    card_host: str
    """For the reasons; '' for a file."""
    trusted_hosts: frozenset[str]
    """Hosts or addresses that the operator allows."""
    own_addresses: frozenset[tuple[str, int]]
    """Bound ``(host, port)`` of this sidecar's TCP listeners, wildcards as they are."""

    def refuses(self, host: str, port: int, address: str) -> str:
        """Why the dial to `address` (numeric), for the url's `host`, is refused; '' if allowed."""
        address = numeric(address) or address
        kind = kind_of(address)
        if self._is_own(host, port, address, kind):
            return f"{_shown(host, address)}, port {port}, is one of this sidecar's own listeners"
        if names_host(self.trusted_hosts, host) or names_host(self.trusted_hosts, address):
            return ""
        if kind in self._allowed():
            return ""
        origin = f"a card from {self.card_host}" if self.card_host else "a card"
        return (
            f"{_shown(host, address)} is {kind.value}: {origin} cannot point there "
            "unless trusted_hosts names it"
        )

    def _allowed(self) -> frozenset[AddressKind]:
        match self.card_kind:
            case None | AddressKind.LOOPBACK | AddressKind.UNSPECIFIED:
                return frozenset({AddressKind.PUBLIC, AddressKind.PRIVATE}) | _REACHES_LOOPBACK
            case AddressKind.PRIVATE:
                return frozenset({AddressKind.PUBLIC, AddressKind.PRIVATE})
            case _:
                return frozenset({AddressKind.PUBLIC})

    def _is_own(self, host: str, port: int, address: str, kind: AddressKind) -> bool:
        """Whether the dial comes back to a listener; trust does not change that."""
        wildcard = kind is AddressKind.UNSPECIFIED or _comparable(host) == "localhost"
        for own_host, own_port in self.own_addresses:
            if own_port != port:
                continue
            own = _comparable(own_host)
            if own == address:
                return True
            if own == "localhost" or own in ("0.0.0.0", "::"):  # noqa: S104
                if kind in _REACHES_LOOPBACK:
                    return True
            elif wildcard and reaches_loopback(own):
                return True
        return False


def _shown(host: str, address: str) -> str:
    return address if _comparable(host) == address else f"{host} ({address})"
