"""A grpcio server with generic handlers on raw bytes; shares no generated code with anyone.

``--grpc-option grpc.max_connection_age_ms=1000`` makes it leave connections (GOAWAY),
``--unimplemented`` leaves every method without a handler. ``POST /control/restart`` with ``{"grace",
"down"}`` ends the server as deployments do (calls under way have `grace` seconds) and starts it again
at the same port after `down` seconds. ``POST /control/status`` with
``{"code", "message", "details" (base64), "trailers": [[NAME, VALUE], ..], "execute": bool}`` is
what every call gets from then on; ``null`` brings the correct agent back.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import grpc
import grpc.aio

from tests.peers import common, mini

CODES = {code.value[0]: code for code in grpc.StatusCode}


class Agent(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handlers for every A2A method, and the fixed status when there is one."""

    def __init__(self, *, unimplemented: bool, fixed: dict[str, Any] | None) -> None:
        self.mini = mini.MiniAgent()
        self.seen = common.Seen()
        self.unimplemented = unimplemented
        self.fixed = fixed

    def state(self) -> dict[str, Any]:
        return {**self.mini.as_json(), **self.seen.as_json()}

    def set_status(self, body: dict[str, Any] | None) -> None:
        self.fixed = body

    def service(self, details: Any) -> Any:
        method = details.method.removeprefix(mini.SERVICE)
        metadata = [
            [k, v if isinstance(v, str) else v.hex()] for k, v in details.invocation_metadata
        ]
        entry = self.seen.request(rpc=method, path=details.method, headers=metadata)
        if self.unimplemented or method not in mini.METHODS:
            return None

        async def unary(request: bytes, context: Any) -> bytes:
            answer = await self.answer(method, entry, request, context)
            return answer.messages[0]

        async def stream(request: bytes, context: Any) -> Any:
            self.seen.open_streams += 1
            try:
                for message in (await self.answer(method, entry, request, context)).messages:
                    yield message
            finally:
                self.seen.open_streams -= 1

        if method in mini.STREAMING:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    async def answer(
        self, method: str, entry: dict[str, Any], request: bytes, context: Any
    ) -> mini.GrpcAnswer:
        entry |= {"peer": context.peer(), "body_size": len(request)}
        fixed = self.fixed
        if fixed is None:
            answer = self.mini.grpc_call(method, request)
            details = base64.b64encode(answer.details).decode()
            fixed = {"code": answer.code, "message": answer.message, "details": details}
            if not answer.code:
                return answer
        elif fixed.get("execute"):
            self.mini.execute_pb(request)
        trailers = [(name, value) for name, value in fixed.get("trailers", [])]
        if fixed.get("details"):
            trailers.append(("grpc-status-details-bin", base64.b64decode(fixed["details"])))
        code = CODES[fixed.get("code", 0)]
        await context.abort(code, fixed.get("message", ""), tuple(trailers))
        raise AssertionError("abort returned")


async def main(args: Any) -> None:
    """Serve."""
    fixed = None
    if args.status is not None:
        fixed = {"code": args.status, "message": args.message, "details": args.details}
    agent = Agent(unimplemented=args.unimplemented, fixed=fixed)
    server = await serve(agent, args, args.port)

    async def restart(body: dict[str, float]) -> None:
        nonlocal server
        stopped, _ = server
        await stopped.stop(body["grace"])
        await asyncio.sleep(body["down"])
        server = await serve(agent, args, port)

    port = server[1]
    control = common.Control(agent.state)
    control.on("status", agent.set_status)
    control.on("restart", restart)
    scheme = "https" if args.tls_cert else "http"
    common.announce(
        await control.start(args.control_port),
        {"grpc": port},
        urls={"GRPC": f"{scheme}://{common.HOST}:{port}"},
    )


async def serve(agent: Agent, args: Any, port: int) -> tuple[Any, int]:
    """Start a server; returns it and its port."""
    server = grpc.aio.server(options=grpc_options(args.grpc_option))
    server.add_generic_rpc_handlers((agent,))
    address = f"{common.HOST}:{port}"
    if args.tls_cert:
        port = server.add_secure_port(address, grpc_tls(args))
    else:
        port = server.add_insecure_port(address)
    await server.start()
    return server, port


def grpc_options(given: list[str]) -> list[tuple[str, int | str]]:
    """Channel arguments ``NAME=VALUE``; message sizes are unlimited unless given."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    for option in given:
        name, _, value = option.partition("=")
        options.append((name, int(value) if value.lstrip("-").isdigit() else value))
    return options


def grpc_tls(args: Any) -> Any:
    """Server credentials of the TLS options."""
    key, cert, ca = (read(path) for path in (args.tls_key, args.tls_cert, args.tls_ca))
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


def read(path: str | None) -> bytes | None:
    """The bytes of a file, None for no path."""
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--grpc-option", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--unimplemented", action="store_true", help="no method has a handler")
    options.add_argument("--status", type=int, help="gRPC status of every call")
    options.add_argument("--message", default="")
    options.add_argument("--details", default="", help="grpc-status-details-bin, base64")
    common.run(main, options.parse_args())
