"""Run in a network namespace of its own: calls to networks that nothing leads to, as JSON."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from tests.faults.calls import call
from tests.faults.faults import JSONRPC
from tests.faults.rig import GOOD, LABELS, PATHS, address, running
from tests.harness import card, peer

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_NOWHERE = "192.0.2.1"


def loopback_up() -> None:
    """What ``ip link set lo up`` does."""
    with socket.socket() as sock:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP))


async def main() -> dict[str, Any]:
    """What callers are told, by binding and layout."""
    found: dict[str, Any] = {}
    async with peer("raw_http") as good:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            agents = {}
            for binding, label in LABELS.items():
                bad = (binding, f"http://{_NOWHERE}:7{PATHS[binding]}")
                backup = (GOOD[binding], good.urls[GOOD[binding]])
                for layout, interfaces in (("F", [bad]), ("FG", [bad, backup])):
                    agent = f"{label.replace('_', '-')}-{layout.lower()}"
                    file = directory / f"{agent}.json"
                    file.write_text(json.dumps(card(interfaces)), "utf-8")
                    agents[agent] = (f"{binding} {layout}", {"card": file})
            configs = {agent: keys for agent, (_, keys) in agents.items()}
            async with running(directory, configs) as daemon:
                for agent, (key, _) in agents.items():
                    told = await call(address(daemon, JSONRPC), JSONRPC, agent, f"m-{agent}")
                    found[key] = asdict(told)
    return found


if __name__ == "__main__":
    loopback_up()
    print(json.dumps(trio.run(main)))
    sys.exit(0)
