"""Many faulty agents in one process: each has a port, a script, a count and TLS of its own.

``POST /control/open`` takes a list of agents and answers with their ports:

    {"name": NAME, "speaks": "http" | "grpc" | "closed" | "full" | "alert",
     "tls": TLS, "options": {..}, "host": "127.0.0.1"}

``http`` is `raw_http`, ``grpc`` is `h2_agent` (`options` are those of its command line, without
dashes, and ``"accept": "close"`` or ``"reset"`` ends each connection at once); ``closed`` refuses
connections, ``full`` lets none through its accept queue; ``alert`` refuses the client's certificate
and says so, which asyncio's TLS does not. TLS is
``{"cert", "key", "ca" (of clients, then needed), "alpn"}``. ``POST /control/script`` takes
``{NAME: [ENTRY, ..]}`` in the words of the agent's kind, ``/control/card`` ``{NAME: CARD}`` (served by
``http``), ``/control/gate`` a gate's name to open for all, ``/control/restart`` ``{"name", "down"}``
(the port is closed for `down` seconds; HTTP/1.1 is broken off, over HTTP/2 streams come to their end
first), ``/control/close`` a list of names, and answers with what became of each. The state has every
request that any of them saw, in order: ``arrivals`` as ``[NAME, RPC]``.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any

from tests.peers import common, h2_agent, raw_http

OPTIONS: dict[str, Any] = {
    "max_requests": None,
    "max_age": None,
    "two_step": False,
    "no_settings": False,
    "settings_delay": 0.0,
    "first_bytes": None,
    "max_concurrent_streams": None,
    "initial_window_size": None,
    "max_frame_size": None,
    "max_header_list_size": None,
}


class _Arrivals(common.Seen):
    """Notes each request for the whole process too."""

    def __init__(self, name: str, arrivals: list[list[str]]) -> None:
        super().__init__()
        self._name = name
        self._arrivals = arrivals

    def request(self, **entry: Any) -> dict[str, Any]:
        self._arrivals.append([self._name, entry["rpc"]])
        return super().request(**entry)


class Port:
    """One agent on one port."""

    def __init__(self, spec: dict[str, Any], arrivals: list[list[str]]) -> None:
        self.name = spec["name"]
        self.speaks = spec["speaks"]
        self.options = dict(spec.get("options", {}))
        self._at_accept = self.options.pop("accept", None)
        self.tls = spec.get("tls")
        self.host = spec.get("host", common.HOST)
        self.agent: Any = None
        self._server: asyncio.Server | None = None
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        if self.speaks == "http":
            self.agent = raw_http.Agent(
                idle_close=self.options.get("idle_close"),
                max_requests=self.options.get("max_requests"),
            )
        elif self.speaks == "grpc":
            self.agent = h2_agent.Agent(argparse.Namespace(**{**OPTIONS, **self.options}))
        if self.agent is not None:
            self.agent.seen = _Arrivals(self.name, arrivals)

    async def open(self, port: int = 0) -> int:
        """Take a port; returns it."""
        if self.agent is None and self.speaks != "alert":
            return self._open_deaf()
        sock = common.listen(port, self.host)
        port = common.port_of(sock)
        tls = None
        if self.tls:
            args = argparse.Namespace(
                tls_cert=self.tls["cert"], tls_key=self.tls["key"], tls_ca=self.tls.get("ca")
            )
            alpn = self.tls.get("alpn")
            tls = common.server_tls(args, *([alpn] if alpn else []))
        if self.speaks == "alert":
            assert tls is not None
            self._sockets.append(sock)
            sock.setblocking(True)
            threading.Thread(target=_refuse, args=(sock, tls), daemon=True).start()
            return port
        self._server = await asyncio.start_server(self._accept, sock=sock, ssl=tls)
        return port

    def _open_deaf(self) -> int:
        sock = socket.socket()
        sock.bind((common.HOST, 0))
        self._sockets.append(sock)
        port = common.port_of(sock)
        if self.speaks == "full":
            sock.listen(0)
            # one is queued, the next ones' SYNs are dropped
            for _ in range(2):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex((common.HOST, port))
                self._sockets.append(client)
        return port

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._at_accept == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif self._at_accept == "close":
            writer.close()
        else:
            self._serve(reader, writer)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self.agent.serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def restart(self, seconds: float) -> None:
        """End as deployments do, and come back."""
        assert self._server is not None
        port = common.port_of(self._server.sockets[0])
        self._server.close()
        if isinstance(self.agent, h2_agent.Agent):
            await self.agent.leave()
        self.close()
        await asyncio.sleep(seconds)
        await self.open(port)

    def close(self) -> dict[str, Any]:
        """Give the port up; returns the last state."""
        state = self.state()
        if self._server is not None:
            self._server.close()
        for sock in self._sockets:
            # a thread may sit in accept(): closing alone would not wake it
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for task in self._tasks:
            task.cancel()
        return state

    def state(self) -> dict[str, Any]:
        """What the agent has seen."""
        return self.agent.state() if self.agent is not None else {}


def _refuse(sock: socket.socket, tls: ssl.SSLContext) -> None:
    """Fail every handshake, and let the client read the alert."""
    while True:
        try:
            connection = sock.accept()[0]
        except OSError:
            return
        with connection, suppress(OSError):
            secured = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            with secured:
                secured.settimeout(5)
                with suppress(ssl.SSLError):
                    secured.do_handshake()
                bare = socket.socket(fileno=secured.detach())
                with bare:
                    bare.shutdown(socket.SHUT_WR)
                    while bare.recv(65536):
                        pass


class Ports:
    """All agents of the process."""

    def __init__(self) -> None:
        self.arrivals: list[list[str]] = []
        self.ports: dict[str, Port] = {}

    def state(self) -> dict[str, Any]:
        """Of everybody."""
        agents = {name: port.state() for name, port in self.ports.items()}
        return {"arrivals": self.arrivals, "agents": agents}

    async def open(self, specs: list[dict[str, Any]]) -> list[int]:
        """Open ports."""
        opened = []
        for spec in specs:
            port = Port(spec, self.arrivals)
            opened.append(await port.open())
            self.ports[port.name] = port
        return opened

    def script(self, scripts: dict[str, list[Any]]) -> None:
        """Script agents."""
        for name, entries in scripts.items():
            self.ports[name].agent.add_script(entries)

    def card(self, cards: dict[str, Any]) -> None:
        """Give agents their cards."""
        for name, card in cards.items():
            self.ports[name].agent.card = card

    def gate(self, name: str) -> None:
        """Open a gate of everybody."""
        for port in self.ports.values():
            if port.agent is not None:
                port.agent.gate(name).set()

    async def restart(self, body: dict[str, Any]) -> None:
        """Restart one."""
        await self.ports[body["name"]].restart(body["down"])

    def close(self, names: list[str]) -> dict[str, Any]:
        """Close ports; their requests are forgotten."""
        gone = set(names)
        arrivals = [entry for entry in self.arrivals if entry[0] in gone]
        self.arrivals[:] = [entry for entry in self.arrivals if entry[0] not in gone]
        return {
            "arrivals": arrivals,
            "agents": {name: self.ports.pop(name).close() for name in names},
        }


async def main(args: Any) -> None:
    """Serve."""
    ports = Ports()
    control = common.Control(ports.state)
    control.on("open", ports.open)
    control.on("script", ports.script)
    control.on("card", ports.card)
    control.on("gate", ports.gate)
    control.on("restart", ports.restart)
    control.on("close", ports.close)
    common.announce(await control.start(args.control_port), {})


if __name__ == "__main__":
    common.run(main, common.parser(__doc__).parse_args())
