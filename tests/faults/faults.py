"""The faults, and what each must come to: the failure table of the design, written out as data.

An `Ending` names the row, the label and the phase that the table and the metrics give to the
evidence that a script makes. Nothing here was read off the program under test.

Cells that cannot occur are named where they would stand, with the reason (`Fault.no_stream`,
`Fault.no_unary`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

JSONRPC: Final = "JSONRPC"
HTTP_JSON: Final = "HTTP+JSON"
GRPC: Final = "GRPC"
HTTP: Final = (JSONRPC, HTTP_JSON)
ALL: Final = (JSONRPC, HTTP_JSON, GRPC)

A2A: Final = "a2a-protocol.org"

SILENCE_SECONDS: Final = 1.5
"""Time for replies that do not come: more than a loaded machine needs for a connection."""


# --- the table --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the failure table: what a kind of ending means."""

    next_candidate: bool
    advance: bool
    counted: str
    """Of a call that ends with it."""


ROWS: Final[dict[str, Row]] = {
    "not_delivered": Row(next_candidate=True, advance=True, counted="not_delivered"),
    "wrong_endpoint": Row(next_candidate=True, advance=True, counted="not_delivered"),
    "not_served": Row(next_candidate=True, advance=True, counted="agent_error"),
    "ambiguous": Row(next_candidate=False, advance=True, counted="ambiguous"),
    "local": Row(next_candidate=False, advance=False, counted="rejected"),
    "answered": Row(next_candidate=False, advance=False, counted="ok"),
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ends that meets the fault."""

    kind: str
    """A row of the table."""
    result: str
    """Label of attempts_total."""
    phase: str = "receiving"
    """Label of ambiguous_errors_total."""
    executed: int = 0
    """How often the faulty agent ran the message."""
    refresh: bool = False
    """Asked for whatever comes after; `not_delivered` asks when all are exhausted."""
    error: bool = False
    """Answered with an error of the agent."""
    code: int = -32601
    """JSON-RPC code of an agent's answer that is handed on when all candidates gave it."""
    events: int = 0
    """Of a stream, before its end."""
    advance: bool = True
    """A reply that is too large keeps the selection."""
    redials: int = 0
    status: int | None = None
    """That the agent gave with an ambiguous failure: kept on the same binding, not on JSON-RPC."""

    @property
    def row(self) -> Row:
        return ROWS[self.kind]


def not_delivered(result: str) -> Ending:
    return Ending(kind="not_delivered", result=result)


def wrong_endpoint(result: str) -> Ending:
    return Ending(kind="wrong_endpoint", result=result, refresh=True)


def not_served(result: str, *, refresh: bool = False, code: int = -32601) -> Ending:
    return Ending(kind="not_served", result=result, refresh=refresh, code=code)


def ambiguous(
    result: str,
    phase: str = "receiving",
    *,
    executed: int = 0,
    events: int = 0,
    status: int | None = None,
) -> Ending:
    return Ending(
        kind="ambiguous",
        result=result,
        phase=phase,
        executed=executed,
        events=events,
        status=status,
    )


def answered(result: str = "a2a_error") -> Ending:
    return Ending(kind="answered", result=result, error=True)


def success(*, redials: int = 0) -> Ending:
    return Ending(kind="answered", result="ok", executed=1, redials=redials)


# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a faulty agent does to the request, and what comes of it."""

    name: str
    group: str
    binding: str
    """Of the interface that is faulty."""
    ending: Ending
    script: tuple[Any, ...] = ()
    """Entries for `raw_http` or `h2_agent`; ``{self}`` is the agent's address, ``{other}`` another."""
    stream_script: tuple[Any, ...] | None = None
    """When a stream needs another."""
    stream_ending: Ending | None = None
    or_endings: tuple[Ending, ...] = ()
    """Where it is the network's luck which comes."""
    speaks: str = ""
    """What the agent is; by default what its binding asks for."""
    options: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    tls: str | None = None
    """Name of the server's TLS; None: as the transport of the test says."""
    client_tls: bool | None = None
    """Whether the interface says TLS; None: as the transport of the test says."""
    client_certificate: bool = False
    only: str = ""
    """``plain`` or ``tls``: where it makes sense."""
    reused: bool = False
    """On a connection that has carried a call."""
    body_bytes: int = 0
    """Of a request made large."""
    timeout: float | None = None
    """Seconds for the agent's reply, where it is about that."""
    connect_timeout: float | None = None
    """Seconds for a connection, where it is about that."""
    no_stream: str = ""
    """Why a stream cannot meet it."""
    no_unary: str = ""
    """Why a unary call cannot."""

    def ends(self, *, streaming: bool) -> tuple[Ending, ...]:
        first = self.stream_ending if streaming and self.stream_ending else self.ending
        return first, *self.or_endings

    def entries(self, *, streaming: bool) -> tuple[Any, ...]:
        entries = self.stream_script if streaming and self.stream_script else self.script
        return ("default", *entries) if self.reused else entries

    @property
    def agent(self) -> str:
        return self.speaks or ("grpc" if self.binding == GRPC else "http")

    def __str__(self) -> str:
        return f"{self.name}{' (reused)' if self.reused else ''}"


def reply(status: int, body: Any = "", content_type: str = "", **more: Any) -> dict[str, Any]:
    headers = [["content-type", content_type]] if content_type else []
    return {"reply": {"status": status, "body": body, "headers": headers, **more}}
