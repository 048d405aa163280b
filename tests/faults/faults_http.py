"""Faults of interfaces over HTTP/1.1, and those that no binding is spared."""

from __future__ import annotations

from typing import Any, Final

from tests.faults.faults import (
    A2A,
    ALL,
    GRPC,
    HTTP,
    HTTP_JSON,
    JSONRPC,
    SILENCE_SECONDS,
    Ending,
    Fault,
    ambiguous,
    answered,
    not_delivered,
    not_served,
    reply,
    success,
    wrong_endpoint,
)
from tests.peers.mini import ERROR_INFO, rest_error

# --- no connection ----------------------------------------------------------------------------


def dials() -> list[Fault]:
    """Nobody is reached. An unreachable network has a test of its own, in a namespace."""
    found = []
    for binding in ALL:
        common: dict[str, Any] = {"group": "dial", "binding": binding}
        dial = not_delivered("dial")
        found += [
            Fault(name="no such name", speaks="closed", host="{name}.test", ending=dial, **common),
            Fault(name="refused", speaks="closed", ending=dial, **common),
            Fault(
                name="accept queue full", speaks="full", ending=dial, connect_timeout=0.4, **common
            ),
        ]
    return found


REFUSED: Final = (
    ("no client certificate", "wants client", False),
    ("client certificate refused", "wants other client", True),
)


def tls_dials() -> list[Fault]:
    """Handshakes that come to nothing, and TLS on one side only."""
    found = []
    tls = not_delivered("tls")
    for binding in ALL:
        common: dict[str, Any] = {"group": "tls", "binding": binding, "only": "tls"}
        found += [
            Fault(name=name, tls=name, ending=tls, **common)
            for name in ("expired", "wrong name", "unknown authority")
        ]
        # TLS 1.3: the server refuses after our handshake, when the request may be on its way
        found += [
            Fault(
                name=f"{name}, with an alert",
                speaks="alert",
                tls=server,
                client_certificate=certificate,
                ending=tls,
                **common,
            )
            for name, server, certificate in REFUSED
        ]
        found += [
            Fault(
                name=f"{name}, without a word",
                tls=server,
                client_certificate=certificate,
                # over HTTP/2 nothing was written before SETTINGS; else nobody says that it was that
                ending=not_delivered("reset") if binding == GRPC else ambiguous("reset", "waiting"),
                **common,
            )
            for name, server, certificate in REFUSED
        ]
        found += [
            Fault(
                name="no ALPN",
                tls="no ALPN",
                ending=tls if binding == GRPC else success(),
                **common,
            ),
            Fault(
                name="plaintext where TLS is declared",
                tls="",
                client_tls=True,
                script=() if binding == GRPC else ({"at": 5, "steps": [reply(400), "close"]},),
                ending=tls,
                **common,
            ),
            Fault(
                name="silence where TLS is declared",
                speaks="http",
                tls="",
                client_tls=True,
                connect_timeout=0.4,
                ending=not_delivered("dial"),
                **common,
            ),
        ]
    # OpenSSL's servers let others pass that do not ask for ALPN: as without any
    found.append(
        Fault(
            name="another ALPN",
            group="tls",
            binding=GRPC,
            only="tls",
            tls="wrong ALPN",
            ending=tls,
        )
    )
    plain: dict[str, Any] = {"group": "tls", "only": "plain", "tls": "good", "client_tls": False}
    # an alert, or an end, instead of a reply to what was written in full
    found += [
        Fault(
            name="TLS where plaintext is declared",
            binding=binding,
            ending=ambiguous("reset", "waiting"),
            or_endings=(ambiguous("malformed", "waiting"),),
            **plain,
        )
        for binding in HTTP
    ]
    # over HTTP/2 nothing was written before SETTINGS
    found.append(
        Fault(
            name="TLS where plaintext is declared",
            binding=GRPC,
            ending=not_delivered("not_http2"),
            or_endings=(not_delivered("reset"),),
            **plain,
        )
    )
    return found


# --- connections that end ---------------------------------------------------------------------


def ends() -> list[Fault]:
    """close, reset and silence at each point of an HTTP/1.1 exchange."""
    found: list[Fault] = []
    for binding in HTTP:
        common: dict[str, Any] = {"group": "ends", "binding": binding}
        lost = ambiguous("reset", "waiting")
        for end in ("close", "reset"):
            found.append(
                Fault(
                    name=f"{end} before reading",
                    script=({"at": "accept", "steps": [end]},),
                    ending=lost,
                    # when the end has come before the first byte was written
                    or_endings=(not_delivered("reset"), not_delivered("dial")),
                    **common,
                )
            )
            found.append(
                Fault(
                    name=f"{end} after the head",
                    script=({"at": "head", "steps": [end]},),
                    ending=lost,
                    **common,
                )
            )
            for reused in (False, True):
                found += _ends_after_the_body(end, reused=reused, **common)
        found += _silences(**common)
    return found


def _ends_after_the_body(end: str, *, reused: bool, **common: Any) -> list[Fault]:
    cut = "malformed" if end == "close" else "reset"
    return [
        Fault(
            name=f"{end} after the body",
            reused=reused,
            script=(["execute", end],),
            ending=ambiguous("reset", "waiting", executed=1),
            **common,
        ),
        Fault(
            name=f"{end} in the reply's head",
            reused=reused,
            script=(["execute", {"send": "HTTP/1.1 200 OK\r\ncontent-"}, {"delay": 0.02}, end],),
            ending=ambiguous(cut, executed=1),
            **common,
        ),
        Fault(
            name=f"{end} after half the reply",
            reused=reused,
            # of a stream, half of its first event
            script=([{"default": {"bytes": 200}}, {"delay": 0.02}, end],),
            ending=ambiguous(cut, executed=1),
            **common,
        ),
        Fault(
            name=f"{end} after an event",
            reused=reused,
            no_unary="a unary reply has no events",
            script=([{"default": {"events": 1}}, {"delay": 0.02}, end],),
            ending=ambiguous(cut, executed=1, events=1),
            **common,
        ),
    ]


def _silences(**common: Any) -> list[Fault]:
    opened = "after the reply's head nothing ends a silent stream but its caller and the peer's end"
    late = ambiguous("timeout", "waiting")
    return [
        Fault(
            name="silence before reading",
            script=({"at": "accept", "steps": ["hang"]},),
            timeout=SILENCE_SECONDS,
            ending=late,
            **common,
        ),
        Fault(
            name="silence after the head",
            script=({"at": "head", "steps": ["hang"]},),
            timeout=SILENCE_SECONDS,
            ending=late,
            **common,
        ),
        Fault(
            name="silence after the body",
            script=(["execute", "hang"],),
            timeout=SILENCE_SECONDS,
            ending=ambiguous("timeout", "waiting", executed=1),
            **common,
        ),
        Fault(
            name="silence after half the reply",
            script=([{"default": {"bytes": 200}}, "hang"],),
            timeout=SILENCE_SECONDS,
            ending=ambiguous("timeout", executed=1),
            no_stream=opened,
            **common,
        ),
    ]


# --- statuses ---------------------------------------------------------------------------------

WRONG_ENDPOINT: Final = (404, 405, 410, 415, 421, 426)
SERVER_ERRORS: Final = (500, 501, 502, 503, 504)
REDIRECTS: Final = (301, 302, 303)
REFUSALS: Final = (401, 403)
OTHER: Final = (400, 408, 409, 413, 422, 425, 429, 451)
HTML: Final = "<html><body><h1>It is not here</h1></body></html>"


def bare_http(status: int) -> Ending:
    if status in WRONG_ENDPOINT:
        return wrong_endpoint(f"http_{status}")
    if status in SERVER_ERRORS:
        return ambiguous("http_5xx", status=status)
    if status in REDIRECTS:
        return ambiguous("redirect")
    return answered("auth" if status in REFUSALS else "other_status")


def a2a_info(reason: str) -> dict[str, Any]:
    return {"@type": ERROR_INFO, "reason": reason, "domain": A2A, "metadata": {}}


def a2a_body(binding: str, status: int, reason: str, code: int) -> Any:
    """An A2A error as an agent of that binding puts it."""
    if binding == JSONRPC:
        error = {"code": code, "message": "no", "data": [a2a_info(reason)]}
        return {"jsonrpc": "2.0", "id": 1, "error": error}
    return rest_error(status, "UNKNOWN", "no", a2a_info(reason)).decode()


def statuses() -> list[Fault]:
    """Every status of the table with no body, HTML, text, and an A2A error."""
    found = []
    statuses = (*WRONG_ENDPOINT, *SERVER_ERRORS, *REDIRECTS, *REFUSALS, *OTHER)
    for binding in HTTP:
        for status in statuses:
            error = a2a_body(binding, status, "TASK_NOT_CANCELABLE", -32002)
            bodies = {
                "no body": reply(status),
                "HTML": reply(status, HTML, "text/html"),
                "text": reply(status, "no such thing", "text/plain"),
                "an A2A error": reply(status, error, "application/json"),
            }
            for what, step in bodies.items():
                is_answer = what == "an A2A error"
                result = "auth" if status in REFUSALS else "a2a_error"
                found.append(
                    Fault(
                        name=f"{status} with {what}",
                        group=f"status {status}",
                        binding=binding,
                        script=(step,),
                        ending=answered(result) if is_answer else bare_http(status),
                    )
                )
    return found


def refusals() -> list[Fault]:
    """MethodNotFound and VersionNotSupported: A2A errors that say *not here*."""
    found = []
    for binding in HTTP:
        for reason, code, result in (
            ("METHOD_NOT_FOUND", -32601, "method_not_found"),
            ("VERSION_NOT_SUPPORTED", -32009, "version_not_supported"),
        ):
            for status in (200, 400, 404) if binding == JSONRPC else (400, 404):
                body = a2a_body(binding, status, reason, code)
                found.append(
                    Fault(
                        name=f"{reason} in {status}",
                        group="not served",
                        binding=binding,
                        script=(reply(status, body, "application/json"),),
                        ending=not_served(result, refresh=status == 404, code=code),
                    )
                )
    # the form of google.rpc without details: an answer with 500 and 501, on a Send never with 404
    for status, name, ending in (
        (500, "INTERNAL", answered()),
        (501, "UNIMPLEMENTED", answered()),
        (503, "UNAVAILABLE", ambiguous("http_5xx", status=503)),
        (404, "NOT_FOUND", wrong_endpoint("http_404")),
    ):
        found.append(
            Fault(
                name=f"{status} in the form of google.rpc",
                group="not served",
                binding=HTTP_JSON,
                script=(reply(status, rest_error(status, name, "no").decode()),),
                ending=ending,
            )
        )
    return found
