"""Faults of gRPC interfaces."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Final

from tests.faults.faults import (
    A2A,
    GRPC,
    SILENCE_SECONDS,
    Ending,
    Fault,
    ambiguous,
    answered,
    not_delivered,
    not_served,
    success,
)
from tests.faults.faults_http import bare_http
from tests.peers.mini import frame, pb_status


def ends() -> list[Fault]:
    """The same over HTTP/2, and on gRPC's own points: SETTINGS, headers, messages."""
    common: dict[str, Any] = {"group": "ends", "binding": GRPC}
    found = [
        Fault(
            name="nothing but silence instead of SETTINGS",
            options={"no_settings": True},
            connect_timeout=0.4,
            ending=not_delivered("dial"),
            **common,
        ),
        Fault(
            name="an HTTP/1.1 server",
            speaks="http",
            ending=not_delivered("not_http2"),
            **common,
        ),
        Fault(
            name="a greeting that is not HTTP",
            options={"first_bytes": "220 mail.example ESMTP\\r\\n"},
            ending=not_delivered("not_http2"),
            **common,
        ),
    ]
    for end in ("close", "reset"):
        found.append(
            Fault(
                name=f"{end} before SETTINGS",
                options={"accept": end},
                ending=not_delivered("reset"),
                # when the end has come before the connection was looked at
                or_endings=(not_delivered("dial"),),
                **common,
            )
        )
        for reused in (False, True):
            found += [
                Fault(
                    name=f"{end} after the headers",
                    reused=reused,
                    script=({"at": "headers", "steps": [end]},),
                    ending=ambiguous("reset", "waiting"),
                    or_endings=(ambiguous("reset", "sending"),),
                    **common,
                ),
                Fault(
                    name=f"{end} after the body",
                    reused=reused,
                    script=(["execute", end],),
                    ending=ambiguous("reset", "waiting", executed=1),
                    **common,
                ),
                Fault(
                    name=f"{end} after the reply's headers",
                    reused=reused,
                    script=(["execute", {"headers": None}, {"delay": 0.02}, end],),
                    ending=ambiguous("reset", executed=1),
                    **common,
                ),
                Fault(
                    name=f"{end} after a message",
                    reused=reused,
                    script=([{"default": {"events": 1}}, {"delay": 0.02}, end],),
                    ending=ambiguous("reset", executed=1),
                    stream_ending=ambiguous("reset", executed=1, events=1),
                    **common,
                ),
            ]
    never = "a gRPC stream has no timeout: servers may hold headers back until the first message"
    found += [
        Fault(
            name="silence after the body",
            script=(["execute", "hang"],),
            timeout=SILENCE_SECONDS,
            ending=ambiguous("timeout", "waiting", executed=1),
            no_stream=never,
            **common,
        ),
        Fault(
            name="silence after the reply's headers",
            script=(["execute", {"headers": None}, "hang"],),
            timeout=SILENCE_SECONDS,
            ending=ambiguous("timeout", executed=1),
            no_stream=never,
            **common,
        ),
        Fault(
            name="a window that never opens",
            options={"initial_window_size": 0},
            timeout=SILENCE_SECONDS,
            ending=ambiguous("timeout", "sending"),
            no_stream=never,
            **common,
        ),
        Fault(
            name="no stream allowed",
            options={"max_concurrent_streams": 0},
            connect_timeout=0.4,
            # our own bound on connections and on waiting: nothing was sent, nobody failed
            ending=Ending(kind="local", result="local"),
            **common,
        ),
        Fault(
            name="one stream at a time",
            options={"max_concurrent_streams": 1},
            ending=success(),
            **common,
        ),
    ]
    return found


# --- gRPC -------------------------------------------------------------------------------------

GRPC_AMBIGUOUS: Final = (1, 2, 4, 13, 14, 15)
"""CANCELLED, UNKNOWN, DEADLINE_EXCEEDED (unasked), INTERNAL, UNAVAILABLE, DATA_LOSS."""


def statuses() -> list[Fault]:
    """Every status: bare, with an A2A ErrorInfo, named in the message, behind headers."""
    found = []
    for code in range(1, 17):
        if code == 12:
            bare = not_served("unimplemented")
        elif code in GRPC_AMBIGUOUS:
            bare = ambiguous(f"grpc_{code}", status=code)
        else:
            bare = answered("auth" if code in (7, 16) else f"grpc_{code}")
        ours = answered("auth" if code in (7, 16) else "a2a_error")
        details = base64.b64encode(pb_status(code, "no", ("TASK_NOT_CANCELABLE", A2A))).decode()
        foreign = base64.b64encode(pb_status(code, "no", ("STOCKOUT", "example.com"))).decode()
        named = "TaskNotCancelableError: no"
        common: dict[str, Any] = {"group": f"grpc status {code}", "binding": GRPC}
        found += [
            Fault(
                name=f"{code} alone",
                script=({"trailers_only": {"code": code, "message": "no"}},),
                ending=bare,
                **common,
            ),
            Fault(
                name=f"{code} behind headers",
                script=([{"headers": None}, {"trailers": [["grpc-status", str(code)]]}],),
                ending=bare,
                **common,
            ),
            Fault(
                name=f"{code} with another's details",
                script=({"trailers_only": {"code": code, "message": "no", "details": foreign}},),
                # over gRPC any ErrorInfo is one: the domain is not looked at
                ending=ours,
                **common,
            ),
            Fault(
                name=f"{code} with an A2A ErrorInfo",
                script=({"trailers_only": {"code": code, "message": "no", "details": details}},),
                ending=ours,
                **common,
            ),
            Fault(
                name=f"{code} with an A2A error's name",
                script=({"trailers_only": {"code": code, "message": named}},),
                ending=ours,
                **common,
            ),
            Fault(
                name=f"{code} after an event",
                no_unary="a unary reply has no events",
                script=([{"default": {"events": 1}}, {"trailers": [["grpc-status", str(code)]]}],),
                ending=_after_an_event(bare),
                **common,
            ),
        ]
    return found


def _after_an_event(bare: Ending) -> Ending:
    """An agent that sent an event has taken the request, whatever its status says then."""
    if bare.kind == "answered":
        return Ending(kind="answered", result=bare.result, error=True, executed=1, events=1)
    return ambiguous(bare.result, executed=1, events=1)


def refusals() -> list[Fault]:
    """The two A2A errors that say *not here*, and statuses that are none."""
    found = []
    for reason, code, result in (
        ("METHOD_NOT_FOUND", -32601, "method_not_found"),
        ("VERSION_NOT_SUPPORTED", -32009, "version_not_supported"),
    ):
        details = base64.b64encode(pb_status(12, "no", (reason, A2A))).decode()
        found.append(
            Fault(
                name=reason,
                group="not served",
                binding=GRPC,
                script=({"trailers_only": {"code": 12, "message": "no", "details": details}},),
                ending=not_served(result, code=code),
            )
        )
    return found


def replies() -> list[Fault]:
    """Replies that are not gRPC, or not whole."""
    common: dict[str, Any] = {"group": "replies", "binding": GRPC}
    bad = ambiguous("malformed", executed=1)
    message = {"message": None}
    return [
        Fault(
            name="no trailers",
            script=(["execute", {"headers": None}, "end"],),
            ending=bad,
            **common,
        ),
        Fault(
            name="trailers without a status",
            script=(["execute", {"headers": None}, {"trailers": [["x", "y"]]}],),
            ending=bad,
            **common,
        ),
        Fault(
            name="a status that is no number",
            script=(["execute", {"trailers": [["grpc-status", "fine"]]}],),
            ending=ambiguous("grpc_2", executed=1),
            **common,
        ),
        Fault(
            name="a status that nobody knows",
            script=(["execute", {"trailers": [["grpc-status", "99"]]}],),
            ending=ambiguous("grpc_2", executed=1),
            **common,
        ),
        Fault(
            name="status 0 without a message",
            script=(["execute", {"trailers": [["grpc-status", "0"]]}],),
            ending=bad,
            **common,
        ),
        Fault(
            name="status 0 in trailers alone",
            script=(["execute", {"trailers_only": {"code": 0}}],),
            ending=bad,
            **common,
        ),
        Fault(
            name="two messages",
            script=([message, message, {"trailers": [["grpc-status", "0"]]}],),
            ending=ambiguous("malformed", executed=2),
            no_stream="a stream may have two messages",
            **common,
        ),
        Fault(
            name="half a message",
            script=([{"message": None, "cut": 9}, {"trailers": [["grpc-status", "0"]]}],),
            ending=bad,
            **common,
        ),
        Fault(
            name="a message that is none",
            script=(["execute", {"message": "/////w=="}, {"trailers": [["grpc-status", "0"]]}],),
            ending=bad,
            **common,
        ),
        Fault(
            name="a coding nobody asked for",
            script=(
                [
                    "execute",
                    {"headers": [*_GRPC_HEADERS, ["grpc-encoding", "snappy"]]},
                    {"data": base64.b64encode(frame(b"xx", compressed=True)).decode()},
                    {"trailers": [["grpc-status", "0"]]},
                ],
            ),
            ending=bad,
            **common,
        ),
        Fault(
            name="200 with HTML",
            script=(["execute", {"html": 200}],),
            ending=bad,
            **common,
        ),
        *[
            Fault(
                name=f"{status} with HTML",
                script=({"html": status},),
                # an HTTP status is none of gRPC's that could be kept
                ending=replace(bare_http(status), status=None),
                **common,
            )
            for status in (404, 415, 421, 401, 403, 429, 500, 502, 503, 504, 302)
        ],
        Fault(
            name="502 with a gRPC status all the same",
            script=({"headers": [[":status", "502"], ["grpc-status", "5"]], "end": True},),
            # a gRPC status was given: it is what counts
            ending=answered("grpc_5"),
            **common,
        ),
    ]


_GRPC_HEADERS: Final = [[":status", "200"], ["content-type", "application/grpc"]]

RST_CODES: Final = range(14)
_NOT_TAKEN: Final = {7: "refused_stream", 13: "not_http2"}


def resets() -> list[Fault]:
    """RST_STREAM with each code of RFC 9113 7, before and after the reply's headers."""
    common: dict[str, Any] = {"group": "resets", "binding": GRPC}
    found = []
    for code in RST_CODES:
        refused = _NOT_TAKEN.get(code)
        found += [
            Fault(
                name=f"RST_STREAM {code} before headers",
                script=({"rst": code} if refused else ["execute", {"rst": code}],),
                ending=not_delivered(refused)
                if refused
                else ambiguous("reset", "waiting", executed=1),
                **common,
            ),
            Fault(
                name=f"RST_STREAM {code} after headers",
                script=(["execute", {"headers": None}, {"rst": code}],),
                ending=ambiguous("reset", executed=1),
                **common,
            ),
            Fault(
                name=f"RST_STREAM {code} after a message",
                script=([{"default": {"events": 1}}, {"delay": 0.01}, {"rst": code}],),
                ending=ambiguous("reset", executed=1),
                stream_ending=ambiguous("reset", executed=1, events=1),
                **common,
            ),
        ]
    found.append(
        Fault(
            name="RST_STREAM 7 on a used connection",
            reused=True,
            script=("refuse",),
            ending=success(redials=1),
            **common,
        )
    )
    return found


def goaways() -> list[Fault]:
    """GOAWAY with each code, and the last stream below ours, ours, and above."""
    common: dict[str, Any] = {"group": "goaways", "binding": GRPC}
    found = []
    for code in RST_CODES:
        below = {"goaway": {"last": 0, "code": code}}
        ours = {"goaway": {"code": code}}
        above = {"goaway": {"last": 2**31 - 1, "code": code}}
        found += [
            Fault(
                name=f"GOAWAY {code} below ours",
                script=({"at": "headers", "steps": [below]},),
                ending=not_delivered("goaway"),
                **common,
            ),
            Fault(
                name=f"GOAWAY {code} below ours, closed",
                script=({"at": "headers", "steps": [below, "close"]},),
                ending=not_delivered("goaway"),
                **common,
            ),
            Fault(
                name=f"GOAWAY {code} at ours, served",
                script=([ours, {"delay": 0.01}, "default"],),
                ending=success(),
                **common,
            ),
            Fault(
                name=f"GOAWAY {code} above ours, served",
                script=([above, {"delay": 0.01}, "default"],),
                ending=success(),
                **common,
            ),
            Fault(
                name=f"GOAWAY {code} at ours, closed",
                script=(["execute", ours, {"delay": 0.01}, "close"],),
                ending=ambiguous("reset", "waiting", executed=1),
                **common,
            ),
            Fault(
                name=f"GOAWAY {code} above ours, then below",
                script=([above, {"goaway": {"last": 0, "code": code}}],),
                ending=not_delivered("goaway"),
                **common,
            ),
        ]
    found += [
        Fault(
            name="GOAWAY below ours on a used connection",
            reused=True,
            script=({"at": "headers", "steps": [{"goaway": {"last": 1}}]},),
            ending=success(redials=1),
            **common,
        ),
        Fault(
            name="GOAWAY below ours after an event",
            no_unary="a unary reply has no events",
            script=([{"default": {"events": 1}}, {"delay": 0.01}, {"goaway": {"last": 0}}],),
            # an agent that answered has taken it: its refusal comes too late to be believed
            ending=ambiguous("goaway", executed=1, events=1),
            **common,
        ),
    ]
    return found


def uploads() -> list[Fault]:
    """The same over HTTP/2 (D94): a status, and a reset, before the request's end."""
    early = {"trailers_only": {"code": 3, "message": "too long"}}
    return [
        Fault(
            name="INVALID_ARGUMENT during an upload",
            group="uploads",
            binding=GRPC,
            script=({"at": "headers", "steps": [early, {"rst": 0}]},),
            ending=answered("grpc_3"),
            body_bytes=10_000_000,
        ),
        Fault(
            name="reset during an upload",
            group="uploads",
            binding=GRPC,
            script=({"at": "headers", "steps": [{"delay": 0.02}, {"rst": 2}]},),
            ending=ambiguous("reset", "sending"),
            body_bytes=10_000_000,
        ),
    ]
