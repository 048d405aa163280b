"""One probe of one interface, and what its ending says: served, not served, or nothing.

A probe is an ordinary call through `upstream`, for a task that cannot exist. Whoever answers it as
an A2A agent has the handler; nobody executes anything.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import trio

from sidecar.connections import Connections
from sidecar.core.addresses import AddressPolicy
from sidecar.core.card import Card
from sidecar.core.failover import WRONG_ENDPOINT_STATUSES
from sidecar.core.spec import (
    GET_TASK,
    GRPC_STATUS_NAMES,
    METHOD_NOT_FOUND,
    VERSION_HEADER,
    VERSION_NOT_SUPPORTED,
    Binding,
)
from sidecar.core.types import Break, Call, Facts, Form, Payload
from sidecar.upstream import Ended, Sizes, Timeouts, Upstream
from sidecar.wire.exchange import Progress

if TYPE_CHECKING:
    from sidecar.core.spec import ErrorType, Operation
    from sidecar.core.types import Broken, ErrorRecord, Headers, Interface
    from sidecar.wire.net import Dialer
    from sidecar.wire.tls import TlsIdentity

_REPLY_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 64 * 1024
_WRONG_VERSION = "99.0"
_NO_CARD = Card(name="", candidates=(), ineligible=(), data=b"{}")
# Whoever asks for a check chose the addresses: what a card from disk may name is allowed.
_ANYWHERE = AddressPolicy(None, "", frozenset(), frozenset())
_UNIMPLEMENTED = 12
_GRPC_AUTH = frozenset({7, 16})
_GRPC_UNDECIDED = frozenset({1, 2, 4, 8, 13, 14, 15})
_HTTP_AUTH = frozenset({401, 403, 407})


class Level(StrEnum):
    """What a finding means."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"
    NOTE = "note"
    """Worth knowing, and no reason to fail."""


class Step(StrEnum):
    """What was looked at."""

    LISTENS = "listens"
    TLS = "tls"
    BINDING = "binding"
    HANDLER = "handler"
    VERSION = "version"
    TENANT = "tenant"
    STREAMING = "streaming"
    EXTENDED_CARD = "extended card"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a probe showed."""

    step: Step
    level: Level
    text: str
    """A clause for people, without query and credentials."""
    needs_credentials: bool = False


class Prober:
    """Sends probes; `nursery` runs the connections, which its end closes."""

    def __init__(
        self, nursery: trio.Nursery, dialer: Dialer, identity: TlsIdentity, timeout_seconds: float
    ) -> None:
        """`timeout_seconds` bounds each probe: the dial, and again the reply."""
        self._nursery = nursery
        self._dialer = dialer
        self._identity = identity
        self._timeout_seconds = timeout_seconds
        self._connections: list[Connections] = []
        self._upstreams: dict[str, Upstream] = {}

    async def call(
        self,
        interface: Interface,
        operation: Operation = GET_TASK,
        *,
        headers: Headers,
        server_name: str = "",
        wrong_version: bool = False,
    ) -> Ended:
        """Call a unary `operation`, for a task that cannot exist if it names one.

        `server_name` is expected in the certificate instead of the host that is dialled. With
        `wrong_version` the call says a protocol version that nobody speaks.
        """
        upstream = self._upstream(server_name)
        call = _call(operation, headers)
        request = await upstream.encode(call, interface)
        if wrong_version:
            kept = [pair for pair in request.headers if pair[0] != VERSION_HEADER]
            request = replace(request, headers=[*kept, (VERSION_HEADER, _WRONG_VERSION)])
        return await upstream.unary(interface, call, request, Progress())

    async def open_stream(
        self,
        interface: Interface,
        operation: Operation,
        *,
        headers: Headers,
        server_name: str = "",
    ) -> Ended | None:
        """The same for a streaming `operation`; None when a stream of events was opened."""
        upstream = self._upstream(server_name)
        call = _call(operation, headers)
        request = await upstream.encode(call, interface)
        progress = Progress()
        with trio.move_on_after(2 * self._timeout_seconds):
            opened = await upstream.open_stream(interface, call, request, progress)
            if isinstance(opened, Ended):
                return opened
            await opened.aclose()
            return None
        broken = progress.broken(Break.TIMEOUT).broken
        return Ended(facts=Facts(binding=interface.binding, operation=operation, broken=broken))

    def close(self) -> None:
        """Close every connection; the nursery ends when they are closed."""
        for connections in self._connections:
            connections.use(_NO_CARD, _ANYWHERE)

    def _upstream(self, server_name: str) -> Upstream:
        upstream = self._upstreams.get(server_name)
        if upstream is not None:
            return upstream
        identity = self._identity
        if server_name and not identity.server_name:
            identity = replace(identity, server_name=server_name)
        connections = Connections(
            self._dialer,
            identity=identity,
            header_bytes=_HEADER_BYTES,
            connect_timeout=self._timeout_seconds,
        )
        connections.start(self._nursery)
        connections.use(_NO_CARD, _ANYWHERE)
        self._connections.append(connections)
        upstream = self._upstreams[server_name] = Upstream(
            connections.get,
            timeouts=Timeouts(self._timeout_seconds, self._timeout_seconds),
            sizes=Sizes(_REPLY_BYTES, _REPLY_BYTES),
        )
        return upstream


def _call(operation: Operation, headers: Headers) -> Call:
    fields = f'{{"id":"{uuid.uuid4()}"}}' if operation.names_task else "{}"
    return Call(
        operation=operation,
        binding=Binding.JSONRPC,
        payload=Payload(Form.JSON, fields.encode()),
        headers=headers,
    )


# --- what an ending says ------------------------------------------------------------------------


def judge(interface: Interface, ended: Ended) -> Finding:
    """What the ending of a GetTask says about the handler of `interface`.

    Any A2A answer but MethodNotFound and VersionNotSupported proves it. A bare UNIMPLEMENTED or
    404, a refused connection and the like disprove it; authentication, UNAVAILABLE, a 5xx status
    and a timeout decide nothing.
    """
    facts = ended.facts
    if facts.broken is not None:
        return _judge_break(interface, facts.broken)
    if facts.error is not None:
        return _judge_a2a_error(interface, facts, facts.error)
    if facts.malformed:
        text = f"{interface.address} answers, but not in {interface.binding}: {facts.malformed}"
        return Finding(Step.BINDING, Level.FAILED, text)
    if facts.grpc_status is not None:
        return _judge_grpc(interface, facts.grpc_status)
    return _judge_http(interface, facts)


_PASSED = Finding(Step.HANDLER, Level.PASSED, "GetTask is answered")


def _judge_break(interface: Interface, broken: Broken) -> Finding:
    place, binding = interface.address, interface.binding
    match broken.cause:
        case Break.DNS:
            text = f"the name {interface.host} cannot be resolved"
            return Finding(Step.LISTENS, Level.FAILED, text)
        case Break.REFUSED:
            text = f"nothing listens at {place} (connection refused)"
            return Finding(Step.LISTENS, Level.FAILED, text)
        case Break.UNREACHABLE | Break.ADDRESS_POLICY:
            text = f"{place} cannot be reached: {broken.detail}"
            return Finding(Step.LISTENS, Level.FAILED, text)
        case Break.CONNECT_TIMEOUT:
            return Finding(Step.LISTENS, Level.UNKNOWN, f"{place} takes no connection in time")
        case Break.TLS:
            return Finding(Step.TLS, Level.FAILED, f"no TLS with {place}: {broken.detail}")
        case Break.ALPN:
            wanted = "HTTP/2, which gRPC needs" if binding is Binding.GRPC else "HTTP/1.1"
            return Finding(Step.BINDING, Level.FAILED, f"{place} does not offer {wanted}, over TLS")
        case Break.CERTIFICATE_ALERT:
            text = f"{place} asks for a client certificate"
            return Finding(Step.HANDLER, Level.UNKNOWN, text, needs_credentials=True)
        case Break.NOT_HTTP2 | Break.HTTP_1_1_REQUIRED:
            return Finding(
                Step.BINDING, Level.FAILED, f"{place} does not speak HTTP/2, which gRPC needs"
            )
        case Break.MALFORMED if binding is not Binding.GRPC:
            return Finding(Step.BINDING, Level.FAILED, f"{place} does not speak HTTP/1.1")
        case Break.TIMEOUT:
            return Finding(Step.HANDLER, Level.UNKNOWN, f"{place} gives no answer in time")
        case Break.RESET | Break.EOF:
            return Finding(Step.BINDING, Level.UNKNOWN, f"{place} closes without an answer")
        case cause:
            text = f"the probe of {place} failed: {broken.detail or cause.name.lower()}"
            return Finding(Step.HANDLER, Level.UNKNOWN, text)


def _judge_a2a_error(interface: Interface, facts: Facts, error: ErrorRecord) -> Finding:
    place = interface.address
    if _is(error, METHOD_NOT_FOUND):
        text = (
            f"{place} speaks {interface.binding}, but has no handler for GetTask (method not found)"
        )
        return Finding(Step.HANDLER, Level.FAILED, text)
    if _is(error, VERSION_NOT_SUPPORTED):
        text = f"{place} refuses version {interface.version}, which the card declares"
        return Finding(Step.VERSION, Level.FAILED, text)
    if facts.http_status in _HTTP_AUTH or facts.grpc_status in _GRPC_AUTH:
        return _credentials(place)
    return _PASSED


def _judge_grpc(interface: Interface, status: int) -> Finding:
    place = interface.address
    if status == _UNIMPLEMENTED:
        text = (
            f"a gRPC server listens at {place}, but the A2A service is not registered there"
            " (UNIMPLEMENTED)"
        )
        return Finding(Step.HANDLER, Level.FAILED, text)
    if status in _GRPC_AUTH:
        return _credentials(place)
    if status in _GRPC_UNDECIDED or status >= len(GRPC_STATUS_NAMES):
        known = status < len(GRPC_STATUS_NAMES)
        name = GRPC_STATUS_NAMES[status] if known else f"status {status}"
        text = f"{place} answers {name}, which decides nothing"
        return Finding(Step.HANDLER, Level.UNKNOWN, text)
    return _PASSED


def _judge_http(interface: Interface, facts: Facts) -> Finding:
    place, status = interface.address, facts.http_status
    assert status is not None  # a complete reply has one
    if facts.other_origin or 300 <= status < 400:
        text = f"{place} answers with a redirect (HTTP {status}), which is not followed"
        return Finding(Step.HANDLER, Level.FAILED, text)
    if interface.binding is Binding.GRPC:
        if status in _HTTP_AUTH:
            return _credentials(place)
        level = Level.UNKNOWN if status >= 500 or status == 429 else Level.FAILED
        text = f"{place} speaks HTTP/2, but answers HTTP {status} where gRPC was asked for"
        return Finding(Step.BINDING, level, text)
    if status in WRONG_ENDPOINT_STATUSES:
        text = f"{place} answers HTTP {status} at {interface.path or '/'}: no {interface.binding} there"
        return Finding(Step.HANDLER, Level.FAILED, text)
    if status in _HTTP_AUTH:
        return _credentials(place)
    if 200 <= status < 300:
        return _PASSED
    text = f"{place} answers HTTP {status} without an A2A error, which decides nothing"
    return Finding(Step.HANDLER, Level.UNKNOWN, text)


def _credentials(place: str) -> Finding:
    text = f"{place} asks for credentials, so that nothing is known of its handler"
    return Finding(Step.HANDLER, Level.UNKNOWN, text, needs_credentials=True)


def _is(error: ErrorRecord, kind: ErrorType) -> bool:
    return error.code == kind.code or error.reason == kind.reason


# --- what more the card promises ----------------------------------------------------------------


def judge_promise(interface: Interface, step: Step, operation: str, ended: Ended) -> Finding:
    """What the ending of a call says of a capability that the card claims."""
    error = ended.facts.error
    if error is not None and error.reason in {
        "UNSUPPORTED_OPERATION",
        "EXTENDED_AGENT_CARD_NOT_CONFIGURED",
    }:
        text = f"the card claims it, and {operation} is answered {error.reason}"
        return Finding(step, Level.FAILED, text)
    if ended.facts.malformed:
        if step is Step.STREAMING and ended.facts.http_status == 200:
            text = f"{operation} for an unknown task should be an error: {ended.facts.malformed}"
            return Finding(step, Level.NOTE, text)
        text = f"{operation} is answered, but not in {interface.binding}: {ended.facts.malformed}"
        return Finding(step, Level.FAILED, text)
    found = judge(interface, ended)
    match found.level:
        case Level.PASSED:
            return Finding(step, Level.PASSED, f"{operation} is answered")
        case Level.FAILED:
            text = f"the card claims it, and {operation} is not served: {_result(ended)}"
            return Finding(step, Level.FAILED, text)
        case _:
            text = f"{operation}: {found.text}"
            return Finding(step, found.level, text, found.needs_credentials)


def judge_wrong_version(ended: Ended) -> Finding | None:
    """Whether a version that nobody speaks is refused, as section 3.6.2 asks; None: cannot be told."""
    error = ended.facts.error
    if error is not None and _is(error, VERSION_NOT_SUPPORTED):
        return Finding(Step.VERSION, Level.PASSED, "another version is refused")
    if error is None and ended.facts.grpc_status != 0 and ended.facts.http_status != 200:
        return None
    text = f"A2A-Version {_WRONG_VERSION} is not refused: calls in another version are misread"
    return Finding(Step.VERSION, Level.NOTE, text)


def _result(ended: Ended) -> str:
    facts = ended.facts
    if facts.broken is not None:
        return facts.broken.detail or facts.broken.cause.name.lower()
    if facts.error is not None:
        return facts.error.reason or str(facts.error.code)
    if facts.grpc_status is not None:
        known = facts.grpc_status < len(GRPC_STATUS_NAMES)
        return GRPC_STATUS_NAMES[facts.grpc_status] if known else str(facts.grpc_status)
    return f"HTTP {facts.http_status}"
