"""What an agent's configuration means for dialling it and for reading its card."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sidecar.core.addresses import kind_of, names_host, same_host
from sidecar.core.card import CardOrigin, CardPolicy
from sidecar.wire.fetch import client
from sidecar.wire.tls import TlsIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx

    from sidecar.config import AgentConfig, PublishConfig
    from sidecar.discovery import FetchedCard
    from sidecar.wire.net import Dialer


def identity_of(config: AgentConfig | PublishConfig) -> TlsIdentity:
    """How an agent is verified over TLS, and who we are to it."""
    tls = config.tls
    return TlsIdentity(
        ca_file=str(tls.ca_file or ""),
        client_cert_file=str(tls.client_cert_file or ""),
        client_key_file=str(tls.client_key_file or ""),
        server_name=tls.server_name or "",
    )


def card_host(config: AgentConfig | PublishConfig) -> str:
    """Where the card is fetched from, '' for a file."""
    return urlsplit(config.card).hostname or ""


def clients(
    config: AgentConfig | PublishConfig,
    dialer: Dialer,
    *,
    trusted_hosts: Sequence[str] = (),
    proxy: str | None = None,
) -> Callable[[str], httpx.AsyncClient]:
    """Makes the client that fetches a card, keys or tokens from a host.

    Where they are fetched from is the operator's word: no address is refused. Only the agent's own
    hosts see its client certificate and are verified by its `server_name`.
    """
    identity = identity_of(config)
    elsewhere = TlsIdentity(ca_file=identity.ca_file)

    def make(host: str) -> httpx.AsyncClient:
        own = same_host(host, card_host(config)) or names_host(frozenset(trusted_hosts), host)
        who = identity if own else elsewhere
        return client(dialer, identity=who, permit=lambda _: "", proxy=proxy)

    return make


def policy_of(
    config: AgentConfig,
    fetched: FetchedCard,
    own_addresses: frozenset[tuple[str, int]] = frozenset(),
) -> CardPolicy:
    """What the interfaces of a card that came from there may be."""
    origin = CardOrigin(
        scheme=fetched.source_scheme,  # type: ignore[arg-type] # one of the three
        host=fetched.source_host,
        kind=kind_of(fetched.peer) if fetched.peer else None,
    )
    return CardPolicy(
        origin=origin,
        trusted_hosts=frozenset(config.trusted_hosts),
        prefer=config.prefer,
        own_addresses=own_addresses,
        credentials_configured=config.has_credentials,
    )
