"""The tables of the configuration, as models: what keys there are, their values and defaults.

A key that is not here is an error.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)

from sidecar import config_values as values
from sidecar.config_values import Address, SecretRef, TcpAddress
from sidecar.core.spec import Binding

_STRING = WithJsonSchema({"type": "string"})
_AS_TEXT = PlainSerializer(str, return_type=str)
_BINDING_SCHEMA = WithJsonSchema({"enum": [str(binding) for binding in Binding]})

Seconds: TypeAlias = Annotated[float, Field(ge=0.001, le=604_800, allow_inf_nan=False)]
Bytes: TypeAlias = Annotated[int, Field(ge=1024, le=2**31 - 1)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
Host: TypeAlias = Annotated[str, PlainValidator(values.host), _STRING]
FilePath: TypeAlias = Annotated[Path, PlainValidator(values.existing_file), _STRING, _AS_TEXT]
Secret: TypeAlias = Annotated[SecretRef, PlainValidator(values.secret), _STRING, _AS_TEXT]
AgentName: TypeAlias = Annotated[str, AfterValidator(values.agent_name)]


class Table(BaseModel):
    """What all tables have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ListenerConfig(Table):
    """One local address and the one binding spoken on it."""

    address: Annotated[Address, PlainValidator(values.address), _STRING, _AS_TEXT]
    binding: Annotated[Binding, PlainValidator(values.binding), _BINDING_SCHEMA, _AS_TEXT]
    agent: str | None = None
    """Every call goes to this agent; None: the call names one."""
    mode: Annotated[
        int,
        PlainValidator(values.mode),
        WithJsonSchema({"type": "string", "pattern": "^0?[0-7]{3}$", "default": "0660"}),
        PlainSerializer(lambda mode: f"{mode:04o}", return_type=str),
    ] = Field(default_factory=lambda: 0o660)
    """Permissions of a Unix socket; without meaning on TCP."""
    allow_uids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Unix socket: users that may connect; with `allow_gids` empty too, everyone who can."""
    allow_gids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    token: Secret | None = None
    """What callers must show, as ``a2a-sidecar-token`` or ``Authorization: Bearer``."""
    allow_remote: bool = False
    """The address may be reached from other machines; needs `token` and a certificate."""
    tls_cert_file: FilePath | None = None
    tls_key_file: FilePath | None = None
    allowed_hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    """Further names under which callers may ask for this listener (``Host``)."""
    advertise: Annotated[str, PlainValidator(values.authority), _STRING] | None = None
    """Authority in the cards that are served, instead of the bound address."""


class AdminConfig(Table):
    """Metrics, health and status."""

    address: Annotated[
        TcpAddress,
        PlainValidator(values.tcp_address),
        WithJsonSchema({"type": "string", "default": "127.0.0.1:7429"}),
        _AS_TEXT,
    ] = Field(default_factory=lambda: TcpAddress("127.0.0.1", 7429))


class TlsConfig(Table):
    """How an agent's interfaces and card are dialled over TLS."""

    ca_file: FilePath | None = None
    """Trusted instead of the system's authorities."""
    client_cert_file: FilePath | None = None
    client_key_file: FilePath | None = None
    server_name: Host | None = None
    """Expected in the certificate instead of the host in the URL."""


HeaderName: TypeAlias = Annotated[str, AfterValidator(values.header_name)]
HttpUrl: TypeAlias = Annotated[str, PlainValidator(values.http_url), _STRING]


class OAuthConfig(Table):
    """OAuth 2.0 client credentials."""

    token_url: HttpUrl
    """The token endpoint, or a discovery document below ``/.well-known/`` that names it."""
    client_id: Secret
    client_secret: Secret
    scopes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    resource: str = ""


class AuthConfig(Table):
    """What is sent along: each value is ``file:PATH``, ``env:NAME`` or ``credential:NAME``."""

    headers: Annotated[
        Mapping[HeaderName, Secret],
        AfterValidator(MappingProxyType),
        PlainSerializer(lambda headers: {name: str(ref) for name, ref in headers.items()}),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    bearer: Secret | None = None
    oauth: OAuthConfig | None = None


class AgentConfig(Table):
    """One remote agent. Two are equal when no key has changed its value."""

    card: Annotated[str, PlainValidator(values.card), _STRING]
    """An http(s) URL as written, or the absolute path of a file."""
    card_exact: bool = False
    """The URL is the card's own, nothing is appended to it."""
    enabled: bool = True
    prefer: Annotated[
        tuple[Annotated[Binding, PlainValidator(values.binding), _BINDING_SCHEMA, _AS_TEXT], ...],
        Field(strict=False),
    ] = ()
    """Order among interfaces of one protocol version."""
    connect_timeout_seconds: Seconds = 5.0
    response_timeout_seconds: Seconds = 600.0
    """Unary: from the last byte of the request to the last of the reply."""
    stream_open_timeout_seconds: Seconds = 60.0
    """HTTP: to the headers of the reply."""
    refresh_cooldown_seconds: Seconds = 1.0
    """Least time between two refreshes of the card."""
    advance_on_ambiguous: bool = True
    stream_dial_failover: bool = False
    trusted_hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    """In lower case, without ports; IPv6 without brackets."""
    max_concurrency: Count = 256
    """Unary calls at once."""
    max_streams: Count = 256
    proxy: Annotated[str, PlainValidator(values.proxy), _STRING] | None = None
    """``http://HOST:PORT``: calls and card fetches go through it by CONNECT."""
    verify_signatures: Annotated[
        bool | Path,
        PlainValidator(values.verification),
        WithJsonSchema({"type": ["boolean", "string"], "default": False}),
        PlainSerializer(lambda value: value if isinstance(value, bool) else str(value)),
    ] = False
    """A card needs a signature by a key of this file; with true, of the key set that it names."""
    card_sha256: Annotated[str, PlainValidator(values.sha256), _STRING] | None = None
    """The only bytes that the card may have."""
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = Field(default_factory=AuthConfig)
    """For calls."""
    discovery_auth: AuthConfig = Field(default_factory=AuthConfig)
    """For fetches of the card."""

    @property
    def has_credentials(self) -> bool:
        """Whether calls carry anything that only the agent may see."""
        auth = self.auth
        return bool(auth.headers or auth.bearer or auth.oauth or self.tls.client_cert_file)


class PublishConfig(Table):
    """A card that `a2a-sidecar publish` serves while its agent is as it says."""

    card: Annotated[str, PlainValidator(values.card), _STRING]
    """An http(s) URL, as in `AgentConfig`, or the absolute path of a file."""
    address: Annotated[Address, PlainValidator(values.address), _STRING, _AS_TEXT]
    """Where the card is served; any address of this machine."""
    probe_interval_seconds: Seconds = 30.0
    map: Annotated[
        Mapping[str, str],
        PlainValidator(values.address_map),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
        PlainSerializer(dict),
    ] = Field(default_factory=lambda: MappingProxyType({}))
    """Public address → where it is really found."""
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = Field(default_factory=AuthConfig)
    """What the agent wants from those who call it."""


class Limits(Table):
    """Bounds that hold for every agent and listener."""

    request_bytes: Bytes = 16 * 1024 * 1024
    response_bytes: Bytes = 64 * 1024 * 1024
    event_bytes: Bytes = 16 * 1024 * 1024
    header_bytes: Annotated[int, Field(ge=4096, le=16 * 1024 * 1024)] = 64 * 1024
    buffered_bytes: Annotated[int, Field(ge=1024 * 1024, le=2**40)] = 256 * 1024 * 1024
    """Everything held for calls: bodies, replies, events, conversions."""
    connections: Count = 1024
    """Per listener."""
    drain_seconds: Seconds = 30.0
    keepalive_seconds: Seconds = 4.0
    stall_seconds: Seconds = 120.0


class LogConfig(Table):
    """What is logged to standard error, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    calls: bool = False
    """A line for every call."""


class Config(Table):
    """The whole configuration."""

    listeners: Annotated[tuple[ListenerConfig, ...], Field(strict=False)] = (
        ListenerConfig(address=TcpAddress("127.0.0.1", 7420), binding=Binding.JSONRPC),
    )
    admin: AdminConfig = AdminConfig()
    agents: Annotated[
        Mapping[AgentName, AgentConfig], AfterValidator(MappingProxyType), PlainSerializer(dict)
    ] = Field(default_factory=lambda: MappingProxyType({}))
    """By name, in the order of the file."""
    publish: Annotated[
        Mapping[AgentName, PublishConfig], AfterValidator(MappingProxyType), PlainSerializer(dict)
    ] = Field(default_factory=lambda: MappingProxyType({}))
    """Read by `a2a-sidecar publish` alone."""
    limits: Limits = Limits()
    log: LogConfig = LogConfig()
