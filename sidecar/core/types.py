"""The words at the boundaries: what the shells hand to the core, and what the core hands back.

Everything here is a value. Headers are lists of ``(name, value)`` with names in lower case and
values as text (latin-1 of the wire's bytes); gRPC metadata has the same form, ``-bin`` values in
base64 as they travel.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sidecar.core.spec import Binding, Operation, Version

Headers: TypeAlias = list[tuple[str, str]]


CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
"""What can stand neither in the value of a header nor in a path."""


def header(headers: Headers, name: str) -> str | None:
    """The first value of the header `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


# --- the wire ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request as it goes out: the same for HTTP/1.1 and HTTP/2.

    `headers` leave out Host/:authority, Content-Length and other framing, which belong to the
    connection.
    """

    method: str
    target: str
    # Not shown: they may hold secrets.
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The final status and headers of a reply (1xx are skipped by the connection)."""

    status: int
    headers: Headers


class Phase(StrEnum):
    """How far an attempt came."""

    DIALING = "dialing"
    SENDING = "sending"
    """Not all of the request was written."""
    WAITING = "waiting"
    """All written, no byte of a final reply yet."""
    RECEIVING = "receiving"


class Break(Enum):
    """What ended an exchange that has no complete reply. Facts, not judgements."""

    DNS = enum.auto()
    REFUSED = enum.auto()
    UNREACHABLE = enum.auto()
    CONNECT_TIMEOUT = enum.auto()
    PROXY = enum.auto()
    """The configured proxy refused CONNECT, or could not be used."""
    ADDRESS_POLICY = enum.auto()
    TLS = enum.auto()
    """The handshake failed, the peer's certificate included."""
    ALPN = enum.auto()
    """TLS came up without the one protocol that was offered."""
    CERTIFICATE_ALERT = enum.auto()
    """A fatal certificate alert as the first thing on a fresh connection (RFC 8446 4.4)."""
    NOT_HTTP2 = enum.auto()
    """The first frame was not SETTINGS."""
    REFUSED_STREAM = enum.auto()
    """RST_STREAM(REFUSED_STREAM) before response headers."""
    HTTP_1_1_REQUIRED = enum.auto()
    GOAWAY = enum.auto()
    """GOAWAY with a last stream id below ours."""
    RESET = enum.auto()
    """TCP reset, or RST_STREAM with any other code or after response headers."""
    EOF = enum.auto()
    TIMEOUT = enum.auto()
    """No reply within the response or stream-open timeout."""
    MALFORMED = enum.auto()
    """Bytes that are not what the protocol allows, or a truncated body."""
    TOO_LARGE = enum.auto()
    LOCAL = enum.auto()
    """Out of descriptors, ports, memory or stream places: our side, not the interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An exchange that ended without a complete reply."""

    cause: Break
    phase: Phase
    written: bool
    """Whether the first byte of this request may have left (DESIGN 3.4, *Written*)."""
    reused: bool = False
    """The connection had carried an earlier request, or had been idle in the pool."""
    code: int | None = None
    """HTTP/2 error code of an RST_STREAM or GOAWAY."""
    detail: str = ""
    """A few words for the log, from the library or the kernel. Never shown to a caller."""


# --- the card ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """An eligible entry of a card."""

    position: int
    """Place in the card; legacy cards: `url` is 0, `additionalInterfaces[i]` is i+1."""
    binding: Binding
    version: Version
    url: str
    """As written in the card."""
    tls: bool
    host: str
    """Lower case; IPv6 without brackets."""
    port: int
    path: str
    """HTTP+JSON: no trailing slash, may be empty. JSONRPC: the request target, verbatim. GRPC: empty."""
    tenant: str = ""
    assumed: bool = False
    """The card does not say the binding of this url; JSONRPC was assumed."""
    refuses_callers_credentials: bool = False
    """Neither on the card's host nor trusted: passed over for calls with their own credentials."""

    @property
    def label(self) -> str:
        """``0-jsonrpc``: the name in metrics, logs and errors."""
        return f"{self.position}-{self.binding.label}" if self.position < 16 else "other"

    @property
    def address(self) -> str:
        """``host:port``; IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def identity(self) -> tuple[object, ...]:
        """Two interfaces are the same across cards when this is equal (DESIGN 3.1)."""
        return (self.tls, self.host, self.port, self.path, self.binding, self.tenant, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ineligible:
    """An entry of a card that is not used, and why."""

    position: int
    binding: str
    url: str
    reason: str
    """A sentence for `explain`, `/status` and errors."""


# --- calls ------------------------------------------------------------------------------------


class Form(Enum):
    """How a message is written down."""

    JSON = "json"
    PROTO = "proto"


@dataclass(frozen=True, slots=True)
class Payload:
    """One A2A message: ProtoJSON text (UTF-8) or protobuf bytes of the same message type."""

    form: Form
    data: bytes


@dataclass(slots=True, kw_only=True)
class Call:
    """One downstream operation, free of its binding."""

    operation: Operation
    binding: Binding
    """The caller's."""
    payload: Payload
    """The request message as the caller gave it, without its `tenant`."""
    tenant: str = ""
    """What the caller put there; goes back into answers, never upstream."""
    headers: Headers = field(default_factory=list, repr=False)
    """End-to-end headers to relay, already cleaned."""
    id: str = ""
    """Names the call in logs and errors."""
    deadline: float | None = None
    """Absolute, on the clock of the shells."""


# --- errors -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """One error, ready to be rendered in any binding.

    An agent's error and the sidecar's own have this one form; `delivered` is set on the latter only.
    """

    code: int
    """JSON-RPC code."""
    http_status: int
    grpc_status: int
    message: str
    reason: str = ""
    """Reason of the first ErrorInfo, '' without one."""
    details: tuple[bytes, ...] = ()
    """JSON texts of objects with ``@type``, an ErrorInfo first when there is one."""
    data: bytes | None = None
    """JSON-RPC `error.data` as received, when it is not an array of such objects."""
    status_details: bytes | None = None
    """google.rpc.Status as received over gRPC."""
    raw: tuple[Binding, bytes] | None = None
    """As received: JSONRPC the error object, HTTP+JSON the body; for the same binding downstream."""
    kept_status: tuple[Binding, int] | None = None
    """The status an agent gave with an ambiguous failure; kept on the same binding (DESIGN 3.8)."""
    headers: Headers = field(default_factory=list)
    """``retry-after`` and ``www-authenticate``."""
    delivered: str | None = None
    """``no`` or ``unknown``: the sidecar's own word on whether the agent may have the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete unary reply, or the end of a stream, as a binding reads it.

    Success has a `payload` (a stream's end has none); an A2A error has `error`. Everything else is
    known by its status alone: `plain` is how to show it, should it count as an answer.
    """

    http_status: int
    grpc_status: int | None = None
    payload: Payload | None = None
    error: ErrorRecord | None = None
    plain: ErrorRecord | None = None
    malformed: str = ""
    """Why the reply is not in the binding's form; '' when it is."""


# --- outcomes ---------------------------------------------------------------------------------


class Kind(StrEnum):
    """How an attempt ended: the first column of the failure table (DESIGN 3.4)."""

    ANSWERED = "answered"
    NOT_DELIVERED = "not_delivered"
    WRONG_ENDPOINT = "wrong_endpoint"
    NOT_SERVED = "not_served"
    AMBIGUOUS = "ambiguous"
    CALLER = "caller"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known of one ended attempt; `failover.classify` judges it.

    Either `broken` is set, or a complete reply came and `http_status` is.
    """

    binding: Binding
    operation: Operation
    broken: Broken | None = None
    http_status: int | None = None
    grpc_status: int | None = None
    """None on HTTP bindings, and for a gRPC reply that carries no gRPC status."""
    other_origin: bool = False
    """A 307/308 to another origin, or a second one."""
    error: ErrorRecord | None = None
    """An A2A error recognised in the reply (`errors.recognise` of the binding)."""
    malformed: str = ""
    """Why a complete reply is not in the binding's form; '' when it is."""
    seconds_left: float | None = None
    """What was left of a deadline that the agent was told, when the reply came."""
    started: bool = False
    """Events of this stream were passed on before it ended: the agent did take the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The judgement on one attempt."""

    kind: Kind
    result: str
    """The finer name: label `result` of `attempts_total`."""
    written: bool
    phase: Phase
    refresh: bool = False
    """The card may be out of date: ask for a refresh."""
    advance: bool = False
    """The selection moves away from this interface."""
    refusal: bool = False
    """An answer that says *not served here*: returned when every candidate gave one (3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One candidate tried once, for errors, logs and `/status`."""

    interface: Interface
    outcome: Outcome
    detail: str = ""
    """For the log only."""
    at: float = 0.0
