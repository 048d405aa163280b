"""Faults of interfaces over HTTP/1.1, and those that no binding is spared."""

from __future__ import annotations

import base64
import json
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


def redirects() -> list[Fault]:
    """307 and 308: followed once inside the origin, never to another one."""
    found = []
    for binding in HTTP:
        path = "/" if binding == JSONRPC else "/moved/message:send"
        stream = "/" if binding == JSONRPC else "/moved/message:stream"
        elsewhere = wrong_endpoint("redirect")
        for status in (307, 308):
            common: dict[str, Any] = {"group": "redirects", "binding": binding}

            def step(location: str, status: int = status) -> dict[str, Any]:
                return {"redirect": status, "location": location}

            found += [
                Fault(
                    name=f"{status} inside the origin",
                    script=(step(path),),
                    stream_script=(step(stream),),
                    ending=success(),
                    **common,
                ),
                Fault(
                    name=f"{status} inside the origin, twice",
                    script=(step(path), step(path)),
                    stream_script=(step(stream), step(stream)),
                    ending=elsewhere,
                    **common,
                ),
                Fault(
                    name=f"{status} to another origin",
                    script=(step(f"http://{{other}}{path}"),),
                    ending=elsewhere,
                    **common,
                ),
                Fault(
                    name=f"{status} to plaintext",
                    only="tls",
                    script=(step(f"http://{{self}}{path}"),),
                    ending=elsewhere,
                    **common,
                ),
                Fault(
                    name=f"{status} without a location",
                    script=(reply(status),),
                    ending=elsewhere,
                    **common,
                ),
            ]
        found += [
            Fault(
                name=f"{status} to {where}",
                group="redirects",
                binding=binding,
                script=({"redirect": status, "location": location},),
                ending=ambiguous("redirect"),
            )
            for status in REDIRECTS
            for where, location in (("the origin", path), ("another", "http://{other}/"))
        ]
    return found


# --- replies that are not what they should be -------------------------------------------------


def replies() -> list[Fault]:
    """Broken framing, interim answers, surplus bytes, and success that is none."""
    found = []
    for binding in HTTP:
        common: dict[str, Any] = {"group": "replies", "binding": binding}

        def bad(name: str, *steps: Any, common: Any = common, **more: Any) -> Fault:
            # a stream's head was a success all the same: what follows is no event
            ending = ambiguous("malformed", executed=1)
            return Fault(
                name=name, script=(["execute", *steps],), ending=ending, **{**common, **more}
            )

        def unreadable(name: str, step: Any, common: Any = common) -> Fault:
            # without a head there is no reply that could be called received
            ending = ambiguous("malformed", "waiting", executed=1)
            return Fault(name=name, script=(["execute", step],), ending=ending, **common)

        found += [
            bad("200 without a body", reply(200)),
            bad("200 with HTML", reply(200, HTML, "text/html")),
            bad("200 with text", reply(200, "fine", "text/plain")),
            bad("200 with half an object", reply(200, '{"jsonrpc": "2.0", "id"')),
            bad("200 with an array", reply(200, "[]")),
            bad("200 with an empty result", reply(200, '{"jsonrpc":"2.0","id":1,"result":{}}'))
            if binding == JSONRPC
            else bad("200 with an empty result", reply(200, "{}")),
            bad("204", reply(204)),
            bad("invalid UTF-8", reply(200, base64=base64.b64encode(b'{"a":"\xff"}').decode())),
            bad("a coding nobody asked for", _coded()),
            bad("less than it promised", reply(200, "{}", length=100), {"delay": 0.02}, "close"),
            unreadable("a transfer coding nobody knows", {"send": _TRANSFER}),
            unreadable("two lengths", {"send": _TWO_LENGTHS}),
            unreadable("101", {"send": "HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"}),
            Fault(
                name="17 interim replies",
                script=(["execute", *[{"interim": 102}] * 17, "hang"],),
                ending=ambiguous("malformed", "waiting", executed=1),
                **common,
            ),
            Fault(
                name="interim replies",
                script=(
                    [
                        {"interim": 103, "headers": [["link", "</a>"]]},
                        {"interim": 102},
                        "default",
                    ],
                ),
                ending=success(),
                **common,
            ),
            Fault(
                name="surplus bytes",
                script=({"default": {"surplus": "surplus"}},),
                ending=success(),
                **common,
            ),
            Fault(
                name="two replies",
                script=({"default": {"surplus": _SECOND}},),
                ending=success(),
                **common,
            ),
            Fault(
                name="not HTTP",
                script=(
                    ["execute", {"send": "220 mail.example ESMTP\r\n"}, {"delay": 0.02}, "close"],
                ),
                ending=ambiguous("malformed", "waiting", executed=1),
                **common,
            ),
            Fault(
                name="an HTTP/2 server",
                speaks="grpc",
                ending=ambiguous("malformed", "waiting"),
                only="plain",
                **common,
            ),
        ]
    found += [
        Fault(
            name="a stream that ends before any event",
            group="replies",
            binding=binding,
            no_unary="a unary reply has no events",
            script=(["execute", {"sse": []}],),
            ending=ambiguous("malformed", executed=1),
        )
        for binding in HTTP
    ]
    found += [
        Fault(
            name="an event that is none",
            group="replies",
            binding=binding,
            no_unary="a unary reply has no events",
            script=(["execute", {"sse": ["data: nonsense\n\n"]}],),
            ending=ambiguous("malformed", executed=1),
        )
        for binding in HTTP
    ]
    found += [
        Fault(
            name=f"{reason} after an event",
            group="replies",
            binding=binding,
            no_unary="a unary reply has no events",
            script=([{"sse": [_EVENT[binding], _error_event(binding, reason, code)]}],),
            # an agent that sent an event has taken the request: this is its answer
            ending=Ending(kind="answered", result=result, error=True, events=1),
        )
        for binding in HTTP
        for reason, code, result in (
            ("METHOD_NOT_FOUND", -32601, "method_not_found"),
            ("TASK_NOT_CANCELABLE", -32002, "a2a_error"),
        )
    ]
    return found


def _error_event(binding: str, reason: str, code: int) -> str:
    body = a2a_body(binding, 400, reason, code)
    return f"event: error\ndata: {body if isinstance(body, str) else json.dumps(body)}\n\n"


_WORKING: Final = {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
_EVENT: Final = {
    JSONRPC: {"data": {"jsonrpc": "2.0", "id": 1, "result": {"task": _WORKING}}},
    HTTP_JSON: {"data": {"task": _WORKING}},
}
_SECOND: Final = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_TRANSFER: Final = (
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: gzip\r\n\r\n{}"
)
_TWO_LENGTHS: Final = (
    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    "content-length: 3\r\n\r\n{} "
)


def _coded() -> dict[str, Any]:
    headers = [["content-type", "application/json"], ["content-encoding", "gzip"]]
    return {"reply": {"status": 200, "headers": headers, "body": "{}"}}


def uploads() -> list[Fault]:
    """A reply while 10 MB of the request are still to come (D94)."""
    found = []
    for binding in HTTP:
        found += [
            Fault(
                name=f"{status} during an upload",
                group="uploads",
                binding=binding,
                script=({"at": "head", "steps": [_early(status), "half_close", "hang"]},),
                ending=bare_http(status),
                body_bytes=10_000_000,
            )
            for status in (413, 415, 401)
        ]
        found.append(
            Fault(
                name="reset during an upload",
                group="uploads",
                binding=binding,
                script=({"at": "head", "steps": [{"delay": 0.02}, "reset"]},),
                ending=ambiguous("reset", "sending"),
                # when the kernel had taken everything
                or_endings=(ambiguous("reset", "waiting"),),
                body_bytes=10_000_000,
            )
        )
    return found


def _early(status: int) -> dict[str, Any]:
    headers = [["content-type", "text/plain"], ["connection", "close"]]
    return {"reply": {"status": status, "headers": headers, "body": "no"}}
