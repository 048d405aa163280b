"""The connections of one agent: which pool carries the calls to an interface.

Pools belong to (host, port, TLS, protocol), not to a candidate: a new card closes only those that
nobody names any more, and two interfaces at one address share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core.addresses import names_host, reaches_loopback
from sidecar.core.interface_url import default_port
from sidecar.core.spec import Binding
from sidecar.core.types import Break
from sidecar.wire.http1_pool import Http1Pool
from sidecar.wire.http2_pool import Http2Pool
from sidecar.wire.net import DialError, Origin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import trio

    from sidecar.core.addresses import AddressPolicy
    from sidecar.core.card import Card
    from sidecar.core.types import Interface
    from sidecar.wire.net import Dialer, TlsIdentity, Wire

_Key = tuple[Origin, bool]


class Connections:
    """The pools of one agent. `start` gives them the nursery that their dials run in."""

    def __init__(
        self,
        dialer: Dialer,
        *,
        identity: TlsIdentity,
        header_bytes: int,
        connect_timeout: float,
        proxy: str | None = None,
        carries_credentials: bool = False,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`carries_credentials`: calls bring configured ones, which need TLS or a trusted host.

        `on_bug` hears of errors of our own in the background.
        """
        self._dialer = dialer
        self._identity = identity
        self._header_bytes = header_bytes
        self._connect_timeout = connect_timeout
        self._proxy = proxy
        self._carries_credentials = carries_credentials
        self._on_bug = on_bug
        self._nursery: trio.Nursery | None = None
        self._policy: AddressPolicy | None = None
        self._pools: dict[_Key, Http1Pool | Http2Pool] = {}

    def start(self, nursery: trio.Nursery) -> None:
        """Dials and connection tasks run in `nursery` from now on."""
        self._nursery = nursery

    def use(self, card: Card, policy: AddressPolicy) -> None:
        """Dial by `policy` from now on, and close the pools that `card` does not name."""
        self._policy = policy
        named = {_key(interface) for interface in card.candidates}
        for key in [key for key in self._pools if key not in named]:
            pool = self._pools.pop(key)
            assert self._nursery is not None  # a card is used only after the start
            self._nursery.start_soon(pool.aclose)

    def get(self, interface: Interface) -> Http1Pool | Http2Pool:
        """The pool that carries calls to `interface`."""
        key = _key(interface)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._make(*key)
        return pool

    def count(self, interface: Interface) -> int:
        """Open connections to the interface's address."""
        pool = self._pools.get(_key(interface))
        if pool is None:
            return 0
        return pool.statistics().open

    def _make(self, origin: Origin, http2: bool) -> Http1Pool | Http2Pool:
        assert self._nursery is not None  # an agent runs before it is called
        authority = str(origin)
        if origin.port == default_port(tls=origin.tls):
            authority = authority.rpartition(":")[0]
        if http2:
            return Http2Pool(
                self._dial(origin, "h2"),
                nursery=self._nursery,
                scheme="https" if origin.tls else "http",
                authority=authority,
                header_bytes=self._header_bytes,
                connect_timeout=self._connect_timeout,
                on_bug=self._on_bug,
            )
        return Http1Pool(
            self._dial(origin, "http/1.1"),
            nursery=self._nursery,
            authority=authority,
            header_bytes=self._header_bytes,
            connect_timeout=self._connect_timeout,
        )

    def _dial(self, origin: Origin, alpn: str) -> Callable[[], Awaitable[Wire]]:
        def permit(address: str) -> str:
            assert self._policy is not None  # no candidate without a card
            refusal = self._policy.refuses(origin.host, origin.port, address)
            if not refusal and not reaches_loopback(address):
                # The card was read when the name may have had another address.
                refusal = self._refuses_plaintext(origin)
            return refusal

        async def dial() -> Wire:
            if self._proxy and (refusal := self._refuses_plaintext(origin)):
                raise DialError(Break.ADDRESS_POLICY, f"through the proxy: {refusal}")
            return await self._dialer.dial(
                origin, alpn=alpn, identity=self._identity, permit=permit, proxy=self._proxy
            )

        return dial

    def _refuses_plaintext(self, origin: Origin) -> str:
        """Why a connection that leaves this machine may not be made to `origin`, '' if it may."""
        assert self._policy is not None  # no candidate without a card
        if origin.tls or not self._carries_credentials:
            return ""
        if names_host(self._policy.trusted_hosts, origin.host):
            return ""
        return "credentials are configured, and go in plaintext to trusted_hosts only"


def _key(interface: Interface) -> _Key:
    origin = Origin(interface.host, interface.port, interface.tls)
    return origin, interface.binding is Binding.GRPC
