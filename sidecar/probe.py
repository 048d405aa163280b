"""One probe of one interface, and what its ending says: served, not served, or nothing.

A probe is an ordinary call through `upstream`, for a task that cannot exist. Whoever answers it as
an A2A agent has the handler; nobody executes anything.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
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
from sidecar.core.types import Break, Call, Form, Payload
from sidecar.upstream import Ended, Sizes, Timeouts, Upstream
from sidecar.wire.exchange import Progress

if TYPE_CHECKING:
    from sidecar.core.spec import ErrorType, Operation
    from sidecar.core.types import Broken, ErrorRecord, Facts, Headers, Interface
    from sidecar.wire.net import Dialer
    from sidecar.wire.tls import TlsIdentity

_REPLY_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 64 * 1024
_WRONG_VERSION = "99.0"
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
    """What was looked at; in this order, a failure ends the row."""

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
    """A sentence for people, without query and credentials."""
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
        self._upstreams: dict[str, Upstream] = {}

    async def probe(
        self,
        interface: Interface,
        operation: Operation = GET_TASK,
        *,
        headers: Headers,
        server_name: str = "",
        wrong_version: bool = False,
    ) -> Ended | None:
        """Call `operation` for a task that cannot exist; None: a stream of events was opened.

        `server_name` is expected in the certificate instead of the host that is dialled. With
        `wrong_version` the call says a protocol version that nobody speaks.
        """
        upstream = self._upstream(server_name)
        fields = f'{{"id":"{uuid.uuid4()}"}}' if operation.names_task else "{}"
        call = Call(
            operation=operation,
            binding=Binding.JSONRPC,
            payload=Payload(Form.JSON, fields.encode()),
            headers=headers,
        )
        request = await upstream.encode(call, interface)
        if wrong_version:
            kept = [pair for pair in request.headers if pair[0] != VERSION_HEADER]
            request = replace(request, headers=[*kept, (VERSION_HEADER, _WRONG_VERSION)])
        progress = Progress()
        if not operation.streaming:
            return await upstream.unary(interface, call, request, progress)
        ended: Ended | None = None
        with trio.move_on_after(2 * self._timeout_seconds) as scope:
            opened = await upstream.open_stream(interface, call, request, progress)
            if isinstance(opened, Ended):
                ended = opened
            else:
                await opened.aclose()
        if scope.cancelled_caught:
            broken = progress.broken(Break.TIMEOUT, detail="no event, and no end").broken
            return Ended(facts=_facts(interface, operation, broken))
        return ended

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
        # Whoever asks for a check chose the addresses: those of a card from disk are allowed.
        anywhere = AddressPolicy(None, "", frozenset(), frozenset())
        connections.use(Card(name="", candidates=(), ineligible=(), data=b"{}"), anywhere)
        upstream = self._upstreams[server_name] = Upstream(
            connections.get,
            timeouts=Timeouts(self._timeout_seconds, self._timeout_seconds),
            sizes=Sizes(_REPLY_BYTES, _REPLY_BYTES),
        )
        return upstream


def _facts(interface: Interface, operation: Operation, broken: Broken) -> Facts:
    from sidecar.core.types import Facts  # noqa: PLC0415

    return Facts(binding=interface.binding, operation=operation, broken=broken)
