"""A grpclib server on raw bytes: a third HTTP/2 stack beside grpcio's and h2 under trio.

It never leaves a connection by itself (grpclib cannot); `h2_agent` does that.
"""

from __future__ import annotations

import asyncio
from typing import Any

from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase, StatusDetailsCodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Server

from tests.peers import common, mini


class Bytes(CodecBase):
    """Messages are bytes already."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: Any) -> bytes:
        return message

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return bytes(data)


class Details(StatusDetailsCodecBase):
    """Status details are a serialized google.rpc.Status already."""

    def encode(self, status: Status, message: str | None, details: Any) -> bytes:
        return bytes(details)

    def decode(self, status: Status, message: str | None, data: bytes) -> Any:
        return data


class Agent:
    """The handlers."""

    def __init__(self) -> None:
        self.mini = mini.MiniAgent()
        self.seen = common.Seen()

    def state(self) -> dict[str, Any]:
        return {**self.mini.as_json(), **self.seen.as_json()}

    def __mapping__(self) -> dict[str, Handler]:
        return {mini.SERVICE + name: self.handler(name) for name in mini.METHODS}

    def handler(self, method: str) -> Handler:
        async def call(stream: Any) -> None:
            metadata = [
                [k, v if isinstance(v, str) else v.hex()] for k, v in stream.metadata.items()
            ]
            request = await stream.recv_message()
            peer = stream.peer.addr()
            self.seen.request(rpc=method, headers=metadata, peer=peer, body_size=len(request))
            answer = self.mini.grpc_call(method, request)
            self.seen.open_streams += 1
            try:
                for message in answer.messages:
                    await stream.send_message(message)
            finally:
                self.seen.open_streams -= 1
            if answer.code:
                raise GRPCError(Status(answer.code), answer.message, answer.details or None)

        streaming = method in mini.STREAMING
        kind = Cardinality.UNARY_STREAM if streaming else Cardinality.UNARY_UNARY
        return Handler(call, kind, bytes, bytes)


async def main(args: Any) -> None:
    """Serve."""
    agent = Agent()
    server = Server([agent], codec=Bytes(), status_details_codec=Details())
    sock = common.listen(args.port)
    await server.start(sock=sock, ssl=common.server_tls(args, "h2"))
    control = common.Control(agent.state)
    port = common.port_of(sock)
    scheme = "https" if args.tls_cert else "http"
    common.announce(
        await control.start(args.control_port),
        {"grpc": port},
        urls={"GRPC": f"{scheme}://{common.HOST}:{port}"},
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--port", type=int, default=0)
    common.run(main, options.parse_args())
