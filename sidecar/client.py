"""What the command line asks a running sidecar: one message sent, its status shown."""

from __future__ import annotations

import json
import sys
import uuid
from typing import TYPE_CHECKING, Any

import httpx

from sidecar.core.sse import SseReader

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
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found
    except (httpx.HTTPError, ValueError) as error:
        print(f"no status from {address}: {str(error) or type(error).__name__}", file=sys.stderr)
        return None


def status_table(found: dict[str, Any]) -> str:
    """The status for people."""
    lines = [
        f"a2a-sidecar {found['version']}: {'ready' if found['ready'] else 'not ready'}"
        + (", draining" if found["draining"] else "")
    ]
    lines += [f"  listener {one['address']} {one['binding']}" for one in found["listeners"]]
    for name, agent in found["agents"].items():
        age = agent["card_age_seconds"]
        card = "no card" if age is None else f"card {age:.0f} s old"
        state = card if agent["enabled"] else "disabled"
        lines.append(
            f"agent {name}: {state}, {agent['in_flight']} calls, {agent['streams']} streams"
        )
        if agent["card_error"]:
            lines.append(f"  card error: {agent['card_error']}")
        if agent["contradiction"]:
            lines.append(f"  {agent['contradiction']}")
        for candidate in agent["candidates"]:
            mark = "*" if candidate["interface"] == agent["current"] else " "
            lines.append(f"  {mark} {candidate['interface']:<14} {candidate['url']}")
        lines += [
            f"    not used: {entry['position']} {entry['binding']} {entry['url']}: {entry['reason']}"
            for entry in agent["ineligible"]
        ]
        lines += [
            f"    {attempt['seconds_ago']:>8.0f} s ago  {attempt['interface']:<14}"
            f" {attempt['address']} {attempt['kind']} {attempt['result']}"
            for attempt in agent["attempts"][-5:]
        ]
    return "\n".join(lines)
