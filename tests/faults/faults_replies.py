"""Replies over HTTP/1.1 that lead elsewhere, are broken, or come too early."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from tests.faults.faults import (
    HTTP,
    HTTP_JSON,
    JSONRPC,
    Ending,
    Fault,
    ambiguous,
    reply,
    success,
    wrong_endpoint,
)
from tests.faults.faults_http import HTML, REDIRECTS, a2a_body, bare_http


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
                    name=f"{status} to what is no URL",
                    script=(step("http://["),),
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
