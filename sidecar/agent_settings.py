"""What an agent's configuration means for dialling it and for reading its card."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sidecar.core.addresses import kind_of, names_host, same_host
from sidecar.core.card import CardOrigin, CardPolicy
from sidecar.wire.tls import TlsIdentity

if TYPE_CHECKING:
    from sidecar.config import AgentConfig, PublishConfig
    from sidecar.discovery import FetchedCard


def identity_of(config: AgentConfig | PublishConfig) -> TlsIdentity:
    """How an agent is verified over TLS, and who we are to it."""
    tls = config.tls
    return TlsIdentity(
        ca_file=str(tls.ca_file or ""),
        client_cert_file=str(tls.client_cert_file or ""),
        client_key_file=str(tls.client_key_file or ""),
        server_name=tls.server_name or "",
    )


def card_host(config: AgentConfig) -> str:
    """Where the card is fetched from, '' for a file."""
    return urlsplit(config.card).hostname or ""


def is_of_agent(config: AgentConfig, host: str) -> bool:
    """Whether what is meant for the agent alone may be shown to `host`."""
    return same_host(host, card_host(config)) or names_host(frozenset(config.trusted_hosts), host)


def only_verifying(identity: TlsIdentity) -> TlsIdentity:
    """For a token endpoint elsewhere: the agent's certificate and name are not its business."""
    return TlsIdentity(ca_file=identity.ca_file)


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
