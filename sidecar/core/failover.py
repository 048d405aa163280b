"""The failure table, and the machine that it moves.

All rules on when another interface may be tried stay in this file: what each kind of ending means
for the call, the selection and the card (`TABLE`), which evidence is which kind (the dicts and
`classify` below), and how one agent's selection moves (`Selection`, `Turn`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.core import spec
from sidecar.core.types import Break, Facts, Kind, Outcome, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.core.spec import Binding
    from sidecar.core.types import Broken, ErrorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one kind of ending means."""

    kind: Kind
    evidence: str
    next_candidate: bool
    """A unary call goes on with the next candidate."""
    advance: bool
    """The selection moves away from the interface."""
    refresh: str
    counted: str
    """Label `outcome` of requests_total, if the call ends with it."""


TABLE: dict[Kind, Row] = {
    row.kind: row
    for row in (
        Row(
            kind=Kind.NOT_DELIVERED,
            evidence=(
                "DNS; an address refused by policy; connect refused, unreachable or timed out;"
                " TLS or ALPN failure; a certificate alert as the first thing on a fresh"
                " connection; a first HTTP/2 frame that is not SETTINGS; the connection lost before"
                " the request was written; RST_STREAM(REFUSED_STREAM) before response headers;"
                " HTTP_1_1_REQUIRED; GOAWAY with a last stream id below ours"
            ),
            next_candidate=True,
            advance=True,
            refresh="when every candidate is exhausted",
            counted="not_delivered",
        ),
        Row(
            kind=Kind.WRONG_ENDPOINT,
            evidence=(
                "HTTP 404, 405, 410, 415, 421, 426 without an A2A error; 307/308 to another origin,"
                " or a second one"
            ),
            next_candidate=True,
            advance=True,
            refresh="yes",
            counted="not_delivered",
        ),
        Row(
            kind=Kind.NOT_SERVED,
            evidence=(
                "MethodNotFound; gRPC UNIMPLEMENTED without an A2A error; VersionNotSupported"
            ),
            next_candidate=True,
            advance=True,
            refresh="if its HTTP status is one of wrong_endpoint",
            counted="not_delivered",
        ),
        Row(
            kind=Kind.AMBIGUOUS,
            evidence=(
                "HTTP 5xx, 301, 302, 303; a reply that is broken, truncated or not in the"
                " binding's form; reset or EOF after the request was written; response timeout;"
                " gRPC UNAVAILABLE, INTERNAL, UNKNOWN, DATA_LOSS, unasked DEADLINE_EXCEEDED or"
                " CANCELLED; all without an A2A error"
            ),
            next_candidate=False,
            advance=True,  # unless advance_on_ambiguous is off, or the reply was too large
            refresh="no",
            counted="ambiguous",
        ),
        Row(
            kind=Kind.CALLER,
            evidence=(
                "the application cancelled, left, or its deadline passed; DEADLINE_EXCEEDED or 504"
                " from an agent that was told the deadline, with under a second left"
            ),
            next_candidate=False,
            advance=False,
            refresh="no",
            counted="cancelled",
        ),
        Row(
            kind=Kind.LOCAL,
            evidence=(
                "out of descriptors, ports or memory; credentials cannot be had; a limit; a bug of"
                " the sidecar"
            ),
            next_candidate=False,
            advance=False,
            refresh="no",
            counted="rejected",
        ),
        Row(
            kind=Kind.ANSWERED,
            evidence=(
                "success; any other A2A error, whatever its status; authentication (401, 403,"
                " UNAUTHENTICATED, PERMISSION_DENIED), validation, 408, 409, 422, 425, 429,"
                " RESOURCE_EXHAUSTED and every other protocol error"
            ),
            next_candidate=False,
            advance=False,
            refresh="no",
            counted="ok or agent_error",
        ),
    )
}

# --- evidence ---------------------------------------------------------------------------------

# How an exchange broke: (kind if the request was written, kind if not, result). What ends a dial cannot
# end a written request; a fault that claims both is not believed.
_BREAKS: dict[Break, tuple[Kind, Kind, str]] = {
    Break.DNS: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "dial"),
    Break.REFUSED: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "dial"),
    Break.UNREACHABLE: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "dial"),
    Break.CONNECT_TIMEOUT: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "dial"),
    Break.PROXY: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "dial"),
    Break.ADDRESS_POLICY: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "address_policy"),
    Break.TLS: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "tls"),
    Break.ALPN: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "tls"),
    Break.CERTIFICATE_ALERT: (Kind.NOT_DELIVERED, Kind.NOT_DELIVERED, "tls"),
    Break.NOT_HTTP2: (Kind.NOT_DELIVERED, Kind.NOT_DELIVERED, "not_http2"),
    Break.REFUSED_STREAM: (Kind.NOT_DELIVERED, Kind.NOT_DELIVERED, "refused_stream"),
    Break.HTTP_1_1_REQUIRED: (Kind.NOT_DELIVERED, Kind.NOT_DELIVERED, "not_http2"),
    Break.GOAWAY: (Kind.NOT_DELIVERED, Kind.NOT_DELIVERED, "goaway"),
    Break.RESET: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "reset"),
    Break.EOF: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "reset"),
    Break.TIMEOUT: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "timeout"),
    Break.MALFORMED: (Kind.AMBIGUOUS, Kind.NOT_DELIVERED, "malformed"),
    Break.TOO_LARGE: (Kind.AMBIGUOUS, Kind.LOCAL, "too_large"),
    Break.LOCAL: (Kind.LOCAL, Kind.LOCAL, "local"),
}

WRONG_ENDPOINT_STATUSES = frozenset({404, 405, 410, 415, 421, 426})
_AUTH_STATUSES = frozenset({401, 403})
# Those that keep the method: the ones that may be followed were, within the attempt.
_REDIRECTS = frozenset({307, 308})

# The two A2A errors that are no answer, by code or by reason.
_METHOD_NOT_FOUND = frozenset({spec.METHOD_NOT_FOUND.code, spec.METHOD_NOT_FOUND.reason})
_VERSION_NOT_SUPPORTED = frozenset(
    {spec.VERSION_NOT_SUPPORTED.code, spec.VERSION_NOT_SUPPORTED.reason}
)

_GRPC_AMBIGUOUS = frozenset({1, 2, 4, 13, 14, 15})
_GRPC_AUTH = frozenset({7, 16})
_UNIMPLEMENTED = 12
_DEADLINE_EXCEEDED = 4

# A DEADLINE_EXCEEDED is the caller's own deadline when the agent was told it and this little was left.
_DEADLINE_MARGIN_SECONDS = 1.0

RESULTS: frozenset[str] = frozenset(
    {result for _, _, result in _BREAKS.values()}
    | {f"http_{status}" for status in WRONG_ENDPOINT_STATUSES}
    | {f"grpc_{status}" for status in range(1, 17)}
    | {
        "method_not_found",
        "unimplemented",
        "version_not_supported",
        "http_5xx",
        "redirect",
        "malformed",
        "auth",
        "other_status",
        "a2a_error",
        "caller",
        "local",
        "ok",
    }
)


def classify(facts: Facts) -> Outcome:
    """The judgement on one attempt that ended: the evidence column of the table, in its order."""
    if facts.broken is not None:
        return _classify_break(facts.broken)
    kind, result = _classify_reply(facts)
    if facts.started and TABLE[kind].next_candidate:
        # A stream that has had events was taken, whatever its end says.
        kind = Kind.AMBIGUOUS if facts.error is None else Kind.ANSWERED
    refresh = kind is Kind.WRONG_ENDPOINT or (
        kind is Kind.NOT_SERVED and facts.http_status in WRONG_ENDPOINT_STATUSES
    )
    return Outcome(
        kind=kind,
        result=result,
        written=True,
        phase=Phase.RECEIVING,
        refresh=refresh,
        advance=TABLE[kind].advance,
        refusal=kind is Kind.NOT_SERVED,
    )


def _classify_break(broken: Broken) -> Outcome:
    written, unwritten, result = _BREAKS[broken.cause]
    kind = written if broken.written else unwritten
    if kind is Kind.NOT_DELIVERED and broken.written and broken.phase is Phase.RECEIVING:
        kind = Kind.AMBIGUOUS  # no refusal is believed of a peer that had begun to reply
    return Outcome(
        kind=kind,
        result=result,
        written=broken.written,
        phase=broken.phase,
        advance=TABLE[kind].advance and broken.cause is not Break.TOO_LARGE,
    )


def _classify_reply(facts: Facts) -> tuple[Kind, str]:
    if facts.error is not None:
        return _classify_a2a_error(facts.error, facts)
    if facts.malformed:
        return Kind.AMBIGUOUS, "malformed"
    if facts.grpc_status is not None:
        return _classify_grpc(facts.grpc_status, facts.seconds_left)
    return _classify_http(facts)


def _classify_a2a_error(error: ErrorRecord, facts: Facts) -> tuple[Kind, str]:
    named = {error.code, error.reason}
    if named & _METHOD_NOT_FOUND:
        return Kind.NOT_SERVED, "method_not_found"
    if named & _VERSION_NOT_SUPPORTED:
        return Kind.NOT_SERVED, "version_not_supported"
    auth = facts.http_status in _AUTH_STATUSES or facts.grpc_status in _GRPC_AUTH
    return Kind.ANSWERED, "auth" if auth else "a2a_error"


def _classify_grpc(status: int, seconds_left: float | None) -> tuple[Kind, str]:
    if status == 0:
        return Kind.ANSWERED, "ok"
    if status == _UNIMPLEMENTED:
        return Kind.NOT_SERVED, "unimplemented"
    if status == _DEADLINE_EXCEEDED and _deadline_is_callers(seconds_left):
        return Kind.CALLER, "caller"
    if status in _GRPC_AUTH:
        return Kind.ANSWERED, "auth"
    if status in _GRPC_AMBIGUOUS or status >= len(spec.GRPC_STATUS_NAMES):
        return Kind.AMBIGUOUS, f"grpc_{status if status < 17 else 2}"
    return Kind.ANSWERED, f"grpc_{status}"


def _classify_http(facts: Facts) -> tuple[Kind, str]:
    status = facts.http_status
    assert status is not None  # a reply has a status
    if 200 <= status < 300:
        return Kind.ANSWERED, "ok"
    if facts.other_origin or status in _REDIRECTS:
        return Kind.WRONG_ENDPOINT, "redirect"
    if status in WRONG_ENDPOINT_STATUSES:
        return Kind.WRONG_ENDPOINT, f"http_{status}"
    if status < 400:
        return Kind.AMBIGUOUS, "redirect"
    if status == 504 and _deadline_is_callers(facts.seconds_left):
        return Kind.CALLER, "caller"
    if status >= 500:
        return Kind.AMBIGUOUS, "http_5xx"
    return Kind.ANSWERED, "auth" if status in _AUTH_STATUSES else "other_status"


def _deadline_is_callers(seconds_left: float | None) -> bool:
    return seconds_left is not None and seconds_left < _DEADLINE_MARGIN_SECONDS


def ended_by_caller(*, written: bool, phase: Phase) -> Outcome:
    """The application left, or its deadline passed, while an attempt was under way."""
    return Outcome(kind=Kind.CALLER, result="caller", written=written, phase=phase)


def ended_locally(*, written: bool, phase: Phase) -> Outcome:
    """A limit, missing credentials or a bug of ours ended the attempt."""
    return Outcome(kind=Kind.LOCAL, result="local", written=written, phase=phase)


def is_not_served(outcome: Outcome, binding: Binding) -> str:
    """What to tell an operator of a card that promises what its address does not serve; '' if n/a."""
    if outcome.kind not in {Kind.NOT_SERVED, Kind.WRONG_ENDPOINT}:
        return ""
    return f"the card declares {binding} at this address, which does not serve it"


# --- the machine ------------------------------------------------------------------------------


class Selection:
    """Which candidate an agent's calls begin with. Synchronous, without a clock.

    Only a failure moves it, and a burst of failures moves it once: `advance` says which candidate
    failed and what the move count was when that attempt began.
    """

    def __init__(self, count: int, current: int = 0) -> None:
        if not 0 <= current < count:
            raise ValueError(f"there is no candidate {current} of {count}")
        self.count = count
        self.current = current
        self.moves = 0

    def advance(self, failed: int, moves: int) -> bool:
        """Move away from `failed`, if it is current and nothing moved since `moves` was read."""
        if self.count == 1 or failed != self.current or moves != self.moves:
            return False
        self.current = (failed + 1) % self.count
        self.moves += 1
        return True


class Turn:
    """One call's way through the candidates: each at most once, from the current one, around."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._next = selection.current
        self._given = 0
        self.moves = selection.moves
        """The selection's move count when the attempt under way began."""

    def next(self) -> int | None:
        """The next candidate, None when all had their turn."""
        if self._given == self._selection.count:
            return None
        candidate = self._next
        self._next = (candidate + 1) % self._selection.count
        self._given += 1
        self.moves = self._selection.moves
        return candidate


def carried_over(old: Sequence[object], selection: Selection, new: Sequence[object]) -> Selection:
    """The selection of a new card's candidates, given as identities (DESIGN 3.1).

    One at the first candidate starts at the first of the new card, so that a publisher's new order
    takes effect; one that had moved stays with its interface if that is still there.
    """
    current = 0
    if selection.current != 0:
        here = old[selection.current]
        current = next((n for n, identity in enumerate(new) if identity == here), 0)
    return Selection(len(new), current)


def table_as_markdown() -> str:
    """The table for people: `explain --table`, and ``docs/failover.md``."""
    lines = [
        "| kind | evidence | this unary call | selection | refresh | counted as |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE.values():
        call = "next candidate" if row.next_candidate else _ENDS[row.kind]
        move = "advance" if row.advance else "keep"
        if row.kind is Kind.AMBIGUOUS:
            move += " (`advance_on_ambiguous`; a reply that is too large keeps it)"
        lines.append(
            f"| {row.kind} | {row.evidence} | {call} | {move} | {row.refresh} | {row.counted} |"
        )
    return "\n".join(lines) + "\n"


_ENDS: dict[Kind, str] = {
    Kind.AMBIGUOUS: "error returned, never replayed, reads included",
    Kind.CALLER: "stop",
    Kind.LOCAL: "stop; `delivered=no` unless the attempt that it ended was written",
    Kind.ANSWERED: "returned as it is",
}
