"""The upstream of every cell: a minimal agent that costs little, in a process of its own.

``python -m benchmarks.stub --http PORT --grpc PORT`` answers JSON-RPC and HTTP+JSON calls with one
fixed task, streams SSE events (paced, each with the time it was sent, or as fast as they go), and
serves the same over gRPC. It keeps nothing and checks nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

TEXT_BYTES = 800


def task(size: int = TEXT_BYTES) -> dict:
    return {
        "id": "t-1",
        "contextId": "c-1",
        "status": {"state": "TASK_STATE_COMPLETED"},
        "artifacts": [{"artifactId": "a", "parts": [{"text": "x" * size}]}],
    }


def card(http: int, grpc: int) -> bytes:
    entries = [
        (f"http://127.0.0.1:{http}/rpc", "JSONRPC"),
        (f"http://127.0.0.1:{http}", "HTTP+JSON"),
        (f"http://127.0.0.1:{grpc}", "GRPC"),
    ]
    interfaces = [
        {"url": url, "protocolBinding": binding, "protocolVersion": "1.0"}
        for url, binding in entries
    ]
    return json.dumps({"name": "stub", "supportedInterfaces": interfaces}).encode()


class Http(asyncio.Protocol):
    """HTTP/1.1 by hand: the stub must not be what is measured."""

    def __init__(self, served_card: bytes) -> None:
        self._card = _response(served_card)
        self._unary = _response(
            json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"task": task()}}).encode()
        )
        self._rest = _response(json.dumps({"task": task()}).encode())
        self._buffer = b""
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /.well-known"):
            self._transport.write(self._card)
        elif b"Streaming" in body:
            self._streaming = asyncio.ensure_future(self._stream(body))
        elif b"#size=" in body:
            size = int(body.split(b"#size=", 1)[1].split(b"#", 1)[0])
            result = {"jsonrpc": "2.0", "id": 1, "result": {"task": task(size)}}
            self._transport.write(_response(json.dumps(result).encode()))
        else:
            self._transport.write(self._unary if head.startswith(b"post /rpc") else self._rest)

    async def _stream(self, body: bytes) -> None:
        """``#paced=N,SECONDS#`` or ``#blast=N#`` in the message says what to send."""
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        if b"#paced=" in body:
            count, seconds = body.split(b"#paced=", 1)[1].split(b"#", 1)[0].split(b",")
            for _ in range(int(count)):
                self._transport.write(_event(str(time.monotonic_ns())))
                await asyncio.sleep(float(seconds))
        else:
            event = _event("x" * 100)
            left = int(body.split(b"#blast=", 1)[1].split(b"#", 1)[0])
            while left > 0:
                self._transport.write(event * min(left, 500))
                left -= 500
                await asyncio.sleep(0)
        self._transport.close()


def _event(text: str) -> bytes:
    update = {
        "artifactUpdate": {
            "taskId": "t-1",
            "contextId": "c-1",
            "artifact": {"artifactId": "a", "parts": [{"text": text}]},
        }
    }
    return b"data: " + json.dumps({"jsonrpc": "2.0", "id": 1, "result": update}).encode() + b"\n\n"


def _response(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
    ) + body


class Raw:
    """A codec that leaves messages as they are."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


class Grpc:
    """The A2A service over grpclib, on bytes."""

    def __init__(self) -> None:
        from sidecar.core import convert  # noqa: PLC0415

        self._unary = convert.json_to_proto(
            "SendMessageResponse", json.dumps({"task": task()}).encode()
        )
        update = json.loads(_event("x" * 8000)[6:])["result"]
        self._event = convert.json_to_proto("StreamResponse", json.dumps(update).encode())

    def __mapping__(self) -> dict[str, Handler]:
        service = "/lf.a2a.v1.A2AService/"
        return {
            service + "SendMessage": Handler(self._send, Cardinality.UNARY_UNARY, bytes, bytes),
            service + "SendStreamingMessage": Handler(
                self._stream, Cardinality.UNARY_STREAM, bytes, bytes
            ),
        }

    async def _send(self, stream: Stream) -> None:
        await stream.recv_message()
        await stream.send_message(self._unary)

    async def _stream(self, stream: Stream) -> None:
        request = await stream.recv_message()
        count = int(request.split(b"#blast=", 1)[1].split(b"#", 1)[0])
        for _ in range(count):
            await stream.send_message(self._event)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    options = parser.parse_args()
    served = card(options.http, options.grpc)
    loop = asyncio.get_running_loop()
    http = await loop.create_server(lambda: Http(served), "127.0.0.1", options.http, backlog=2048)
    grpc = Server([Grpc()], codec=Raw())  # type: ignore[list-item, arg-type]
    await grpc.start("127.0.0.1", options.grpc)
    print("ready", flush=True)
    await http.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
