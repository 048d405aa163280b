"""An agent on all three bindings that writes down each execution before it answers.

``--journal FILE`` gets a line with the message's id for each one, so that what it did is known
after it was killed. Everything else is as in ``tests/peers/raw_http.py`` and ``grpc_generic.py``.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import grpc.aio

from tests.peers import common, grpc_generic, mini, raw_http


@dataclass
class Journal(mini.MiniAgent):
    """A `MiniAgent` with a memory that outlives it."""

    fd: int = -1

    def execute(self, message_id: str, text: str) -> dict[str, Any]:
        """See `MiniAgent`."""
        os.write(self.fd, f"{message_id}\n".encode())
        return super().execute(message_id, text)


async def main(args: Any) -> None:
    """Serve."""
    agent = Journal(fd=os.open(args.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    http = raw_http.Agent(idle_close=args.idle_close, max_requests=None)
    http.mini = agent
    await asyncio.start_server(http.serve, sock=common.listen(args.http_port))
    handler = grpc_generic.Agent(unimplemented=False, fixed=None)
    handler.mini = agent
    server = grpc.aio.server(options=grpc_generic.grpc_options(args.grpc_option))
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"{common.HOST}:{args.grpc_port}")
    await server.start()
    control = common.Control(agent.as_json)
    common.announce(
        await control.start(args.control_port), {"http": args.http_port, "grpc": args.grpc_port}
    )
    await server.wait_for_termination()


if __name__ == "__main__":
    options = common.parser(__doc__)
    options.add_argument("--journal", required=True)
    options.add_argument("--http-port", type=int, required=True)
    options.add_argument("--grpc-port", type=int, required=True)
    options.add_argument("--idle-close", type=float)
    options.add_argument("--grpc-option", action="append", default=[])
    common.run(main, options.parse_args())
