"""What the command line asks a running sidecar: one message sent, its status shown."""

from __future__ import annotations

import json
import sys
import uuid
from time import sleep
from typing import TYPE_CHECKING, Any

import httpx

from sidecar.core.sse import SseReader
from sidecar.logs import clean

if TYPE_CHECKING:
    from collections.abc import Callable

_EVENT_BYTES = 64 * 1024 * 1024
_CONNECT_SECONDS = 5.0


def _client(address: str) -> httpx.Client:
    """A client for ``HOST:PORT`` or ``unix:PATH``."""
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    if address.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=address.removeprefix("unix:"))
        return httpx.Client(
            transport=transport, base_url="http://localhost", timeout=timeout, trust_env=False
        )
    return httpx.Client(base_url=f"http://{address}", timeout=timeout, trust_env=False)


def send(
    address: str,
    text: str,
    *,
    agent: str | None,
    stream: bool,
    write: Callable[[str], None],
) -> int:
    """Send `text` to `agent` and write what comes back; returns the exit code."""
    request = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "SendStreamingMessage" if stream else "SendMessage",
        "params": {
            "message": {
                "messageId": str(uuid.uuid4()),
                "role": "ROLE_USER",
                "parts": [{"text": text}],
            }
        },
    }
    path = f"/agents/{agent}" if agent else "/"
    try:
        with _client(address) as client, client.stream("POST", path, json=request) as response:
            failed = _write_reply(response, write)
            _write_origin(response.headers, write)
            return failed
    except httpx.InvalidURL as error:
        print(f"{address} is no address: {error}", file=sys.stderr)
    except httpx.ConnectError:
        print(f"no sidecar listens on {address}", file=sys.stderr)
    except httpx.HTTPError as error:
        print(f"the sidecar at {address} did not answer: {error}", file=sys.stderr)
    return 1


def _write_reply(response: httpx.Response, write: Callable[[str], None]) -> int:
    failed = 0
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        reader = SseReader(_EVENT_BYTES)
        for chunk in response.iter_raw():
            for event in reader.feed(chunk):
                failed |= _write_envelope(event.data, write)
        return failed
    return _write_envelope(response.read(), write)


def _write_envelope(body: bytes, write: Callable[[str], None]) -> int:
    try:
        envelope = json.loads(body)
    except ValueError:
        envelope = None
    if not isinstance(envelope, dict):
        write("the reply is not JSON-RPC: is this a JSON-RPC listener?")
        return 1
    if "error" in envelope:
        write(json.dumps(envelope["error"], indent=2, ensure_ascii=False))
        return 1
    write(json.dumps(envelope.get("result"), indent=2, ensure_ascii=False))
    return 0


def _write_origin(headers: httpx.Headers, write: Callable[[str], None]) -> None:
    interface = headers.get("a2a-sidecar-interface")
    attempts = headers.get("a2a-sidecar-attempts", "0")
    delivered = headers.get("a2a-sidecar-delivered")
    if interface:
        word = "attempt" if attempts == "1" else "attempts"
        write(f"interface {interface}, {attempts} {word}")
    if delivered:
        meaning = "it is safe to send again" if delivered == "no" else "it may have been executed"
        write(f"delivered: {delivered} ({meaning})")


def status(address: str) -> dict[str, Any] | None:
    """What the admin address says; None, and a line on stderr, when it does not answer."""
    try:
        with _client(address) as client:
            answer = client.get("/status")
            if answer.status_code != 200:
                raise ValueError(f"HTTP {answer.status_code}")
            found = answer.json()
            if not isinstance(found, dict):
                raise TypeError("not the status of a sidecar")
            return found
    except (httpx.HTTPError, httpx.InvalidURL, TypeError, ValueError) as error:
        print(f"no status from {address}: {str(error) or type(error).__name__}", file=sys.stderr)
        return None


def ready(address: str, write: Callable[[str], None]) -> int:
    """Write why the sidecar is not ready, if it is not; returns the exit code."""
    try:
        with _client(address) as client:
            answer = client.get("/readyz")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"no answer from {address}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    if answer.status_code == 200:
        return 0
    for line in answer.text.splitlines():
        write(clean(line))
    return 1


def watch(address: str, seconds: float, write: Callable[[str], None]) -> int:
    """Write the status again and again until Ctrl-C; on a terminal in one place."""
    above = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    while True:
        found = status(address)
        if found is not None:
            write(above + status_table(found))
            sys.stdout.flush()
        sleep(seconds)


# --- the status for people --------------------------------------------------------------------

_ATTEMPTS_SHOWN = 5


def status_table(found: dict[str, Any]) -> str:
    """The status for people. What comes from cards cannot act on the terminal."""
    if "agents" not in found:
        return json.dumps(found, indent=2)  # of `a2a-sidecar publish`
    state = "ready" if found["ready"] else "not ready"
    if found["draining"]:
        state = "draining"
    lines = [f"a2a-sidecar {found['version']}: {state}"]
    if found["reload_error"]:
        lines.append(f"the last reload failed: {clean(found['reload_error'])}")
    lines += ["", *_columns([["LISTENER", "BINDING"], *_listener_rows(found)])]
    agents = found["agents"]
    if agents:
        rows = [_agent_row(name, agent) for name, agent in agents.items()]
        header = ["AGENT", "CURRENT", "CANDIDATES", "CALLS", "STREAMS", "CARD AGE"]
        lines += ["", *_columns([header, *rows])]
    for name, agent in agents.items():
        lines += ["", f"{name}: {clean(agent['card'])}", *_agent_details(agent)]
    return "\n".join(lines)


def _listener_rows(found: dict[str, Any]) -> list[list[str]]:
    return [[one["address"], one["binding"]] for one in found["listeners"]]


def _agent_row(name: str, agent: dict[str, Any]) -> list[str]:
    current = agent["current"] or "none"
    if not agent["enabled"]:
        current = "disabled"
    age = agent["card_age_seconds"]
    return [
        name,
        current,
        str(len(agent["candidates"])),
        str(agent["in_flight"]),
        str(agent["streams"]),
        "no card" if age is None else _age(age),
    ]


def _agent_details(agent: dict[str, Any]) -> list[str]:
    """The interfaces of one agent, why some are not used, and what was tried last."""
    lines = []
    if agent["card_error"]:
        lines.append(f"  card error: {clean(agent['card_error'])}")
    if agent["contradiction"]:
        lines.append(f"  {clean(agent['contradiction'])}")
    rows = [
        [
            "  *" if one["interface"] == agent["current"] else "   ",
            one["interface"],
            one["version"],
            clean(one["url"]),
        ]
        for one in agent["candidates"]
    ]
    rows += [
        [
            "  -",
            f"{one['position']}-{clean(one['binding'])}",
            "",
            f"{clean(one['url'])}: {clean(one['reason'])}",
        ]
        for one in agent["ineligible"]
    ]
    lines += _columns(rows)
    attempts = agent["attempts"][-_ATTEMPTS_SHOWN:]
    if attempts:
        lines.append("  last attempts:")
        lines += _columns(
            [
                [
                    f"    {_age(one['seconds_ago'])} ago",
                    one["interface"],
                    clean(one["address"]),
                    one["kind"]
                    if one["kind"] == one["result"]
                    else f"{one['kind']}: {one['result']}",
                ]
                for one in reversed(attempts)
            ]
        )
    return lines


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows as lines, their cells aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
