"""Hostile input on each listener: a clear error or a closed connection, and nobody else notices."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import connect, http, message, peer, sidecar

if TYPE_CHECKING:
    from tests.harness import Sidecar

pytestmark = pytest.mark.system

MIB = 1 << 20
JSON_HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One HTTP/2 frame (RFC 9113 4.1)."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


SETTINGS = frame(4, 0, 0)
# Two indexed fields and one literal: GET / without authority; enough to open a stream.
BLOCK = b"\x82\x84\x86"

REQUESTS: dict[str, bytes] = {
    "length and chunks": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /second HTTP/1.1\r\nHost: b\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\nab",
    "odd chunk size": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"-1\r\nx\r\n0\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "long head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (128 * 1024) + b"\r\n\r\n",
    "rubbish": bytes(range(256)) * 8,
}
BODIES: dict[str, bytes] = {
    "cut": b'{"jsonrpc":',
    "a batch": b"[" + b",".join([b"{}"] * 10_000) + b"]",
    "5000 digits": b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"GetTask"}',
    "100,000 arrays": b"[" * 100_000,
    "10,000 objects": b'{"a":' * 10_000,
    "NaN": b'{"jsonrpc":"2.0","id":NaN,"method":"GetTask"}',
    "a byte that is no UTF-8": b'{"jsonrpc":"2.0","id":"\xff","method":"GetTask"}',
    "a lone surrogate": b'{"jsonrpc":"2.0","id":"\\ud800","method":"GetTask"}',
    "UTF-16": '{"jsonrpc":"2.0"}'.encode("utf-16-le"),
}
FLOODS: dict[str, bytes] = {
    "rapid reset": b"".join(
        frame(1, 5, stream, BLOCK) + frame(3, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 4001, 2)
    ),
    "pings": frame(6, 0, 0, b"12345678") * 20_000,
    "settings": SETTINGS * 20_000,
    "continuations": frame(1, 0, 1, BLOCK) + frame(9, 0, 1, b"\x84") * 10_000,
    "a length that lies": frame(0, 0, 1, b"\0\xff\xff\xff\xff") + frame(0, 1, 1, b"x"),
    "not HTTP/2 behind the preface": b"GET / HTTP/1.1\r\n\r\n" * 100,
}


async def talk(address: str, data: bytes) -> bytes:
    """What comes back for `data`, to the end of the connection or until it is silent."""
    received = b""
    stream = await connect(address)
    async with stream:
        with trio.move_on_after(1):
            try:
                await stream.send_all(data)
                while part := await stream.receive_some(65536):
                    received += part
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
    return received


def resident(daemon: Sidecar) -> int:
    pages = Path(f"/proc/{daemon.process.pid}/statm").read_text("ascii").split()[1]
    return int(pages) * 4096


async def a_call_is_answered(daemon: Sidecar) -> None:
    status, _, reply = await daemon.jsonrpc("SendMessage", message("hello"))
    assert (status, "result" in reply) == (200, True)


async def test_hostile_input_costs_nobody_else_anything() -> None:
    async with (
        peer("raw_http") as agent,
        sidecar(agents={"a": agent.card_url}, ready=True) as daemon,
    ):
        await a_call_is_answered(daemon)
        before = resident(daemon)
        executed = (await agent.state())["executions"]
        for binding in ("JSONRPC", "HTTP+JSON", "GRPC"):
            for name, data in REQUESTS.items():
                answer = await talk(daemon.listeners[binding], data)
                statuses = answer.count(b"HTTP/1.1 4") + answer.count(b"HTTP/1.1 2")
                assert statuses <= 1, (binding, name, answer)
                assert answer[9:10] in {b"", b"4", b"5"}, (binding, name, answer[:80])
            await a_call_is_answered(daemon)
        for name, body in BODIES.items():
            reply = await http(daemon.listeners["JSONRPC"], "POST", "/", body=body)
            error = reply.json()["error"]
            assert (reply.status, error["code"] in {-32700, -32600}) == (200, True), name
            if name == "5000 digits":
                continue  # an id there; elsewhere an unknown member, which is moved as it is
            reply = await http(
                daemon.listeners["HTTP+JSON"],
                "POST",
                "/message:send",
                headers={"content-type": "application/json"},
                body=body,
            )
            assert reply.status == 400, name
            assert reply.json()["error"]["status"] == "INVALID_ARGUMENT", name
        for name, data in FLOODS.items():
            answer = await talk(daemon.listeners["GRPC"], PREFACE + SETTINGS + data)
            # Our SETTINGS, unless a reset overtook them while the flood was still being sent.
            assert answer[3:4] in {b"", b"\x04"}, name
            await a_call_is_answered(daemon)
        # The good calls ran, and nothing else did.
        assert (await agent.state())["executions"] == executed + 3 + len(FLOODS)
        assert resident(daemon) - before < 48 * MIB
        assert "internal error" not in daemon.log()
        metrics: Any = await daemon.metrics()
        assert not any(name == "a2a_sidecar_internal_errors_total" for name, _ in metrics)
        assert (await daemon.status())["ready"] is True
