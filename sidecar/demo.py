"""``a2a-sidecar demo``: an agent whose card misleads, a sidecar, and two messages that arrive.

Both run as processes of their own, as they would in earnest, at free ports of 127.0.0.1. They end
with this process, in whatever way it ends, and leave no files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from sidecar.core.sse import SseReader

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT_SECONDS = 10.0
"""For anything to answer, start or end on this machine."""

_EVENT_BYTES = 1024 * 1024
_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)

_CONFIG = """\
[[listeners]]
address = "127.0.0.1:0"
binding = "JSONRPC"
[admin]
address = "127.0.0.1:0"
[agents.demo]
card = {card}
[limits]
drain_seconds = 1.0
[log]
format = "json"
"""

_SHOWN = ("requests", "attempts", "failovers", "selection_changes")
_SAMPLE = re.compile(r"a2a_sidecar_(\w+)_total(\{.*\}) ([0-9.e+]+)")


class _Failure(Exception):
    """Something that the demo is to show did not happen."""


def main() -> int:
    """Run the demo on stdout; returns 0 when everything that it shows has held, else 1."""
    children: list[_Child] = []
    try:
        with contextlib.ExitStack() as running:

            def start(child: _Child) -> _Child:
                children.append(running.enter_context(child))
                return child

            _show(start)
    except (_Failure, OSError, http.client.HTTPException, ValueError, LookupError) as error:
        _say(f"\nThe demo failed: {error if isinstance(error, _Failure) else repr(error)}")
        for child in children:
            _say(
                f"\n--- what the {child.name} wrote ---\n{child.output.decode('utf-8', 'replace')}"
            )
        return 1
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _expect(held: object, what: str) -> None:
    if not held:
        raise _Failure(what)


# --- the tour ---------------------------------------------------------------------------------


def _show(start: Callable[[_Child], _Child]) -> None:
    # Both at once: starting takes most of the time. The sidecar waits for its configuration.
    agent = start(_Child("agent", "sidecar.demo_agent"))
    sidecar = start(_Child("sidecar", "sidecar", "run", "--config", "/dev/stdin"))
    ready = agent.wait_for("card")
    _show_card(ready["card"])
    sidecar.give(_CONFIG.format(card=json.dumps(ready["card"])).encode())
    started = sidecar.wait_for("event", "started")
    listener, admin = f"http://{started['listeners']}", f"http://{started['admin']}"

    messages = [str(uuid.uuid4()), str(uuid.uuid4())]
    _show_unary(sidecar, listener, messages[0])
    _show_stream(listener, messages[1])
    _show_executions(ready["executions"], messages)
    _show_counters(f"{admin}/metrics")
    _say("\nWith an agent of your own: a2a-sidecar run --agent NAME=CARD_URL")


def _show_card(url: str) -> None:
    card = json.loads(_request("GET", url)[1])
    unserved, *others = card["additionalInterfaces"]
    _say(f"1. An agent publishes a card that misleads: {url}")
    _say(f"     preferredTransport is {card['preferredTransport']}, which its url does not speak")
    _say(f"     0  url        {card['url']}")
    _say(f"     1  {_interface(unserved)}  (a gRPC server without the A2A service)")
    for position, other in enumerate(others, 2):
        _say(f"     {position}  {_interface(other)}")


def _interface(entry: dict[str, str]) -> str:
    return f"{entry['transport']:<9}  {entry['url']}"


def _show_unary(sidecar: _Child, url: str, message_id: str) -> None:
    _say(f"\n2. An application sends a message to the sidecar, as JSON-RPC: {url}")
    order = sidecar.wait_for("event", "card")["candidates"].replace(",", ", ")
    _say(f"     the interfaces of the card, in the order in which it tries them: {order}")
    headers, body = _call(url, "SendMessage", message_id, "hello")
    reply = json.loads(body)
    _expect("result" in reply, f"the message was answered with an error: {reply.get('error')}")
    task = reply["result"]["task"]
    failover = sidecar.wait_for("event", "failover")
    _say(
        f"     tried {failover['interface']} at {failover['address']}: {failover['result']},"
        f" delivered={failover['delivered']}"
    )
    _say(f"       ({failover['hint']})")
    answered = headers["a2a-sidecar-interface"]
    text = task["artifacts"][0]["parts"][0]["text"]
    state = task["status"]["state"]
    _say(f"     so the message could go to another one: {answered} answered {text!r}, {state}")
    _expect(text == "hello", "the answer is not the one to this message")
    _expect(answered == failover["to"], "the answer came from another interface")
    _expect(headers["a2a-sidecar-attempts"] == "2", "there were not two attempts")


def _show_stream(url: str, message_id: str) -> None:
    _say("\n3. It sends another one, and asks for a stream")
    headers, body = _call(url, "SendStreamingMessage", message_id, "hello again")
    reader = SseReader(_EVENT_BYTES)
    events = [json.loads(event.data) for event in [*reader.feed(body), *reader.end()]]
    failed = next((event["error"] for event in events if "error" in event), None)
    _expect(failed is None and events, f"the stream ended with an error: {failed}")
    names = ", ".join(next(iter(event["result"])) for event in events)
    state = events[-1]["result"]["statusUpdate"]["status"]["state"]
    interface = headers["a2a-sidecar-interface"]
    _say(f"     it began at {interface}, where the failure had moved it: {names}, {state}")
    _expect(headers["a2a-sidecar-attempts"] == "1", "the stream was not opened at once")
    _expect(state == "TASK_STATE_COMPLETED", "the stream did not end with its task")


def _show_executions(url: str, messages: list[str]) -> None:
    executions = json.loads(_request("GET", url)[1])
    once = executions == dict.fromkeys(messages, 1)
    _expect(once, f"the agent did not execute each message once: {executions}")
    _say(f"\n4. The agent has executed {len(executions)} messages, each of them once")


def _show_counters(url: str) -> None:
    _, body = _request("GET", url)
    _say(f"\n5. The sidecar has counted: {url}")
    sums = dict.fromkeys(_SHOWN, 0.0)
    for name, labels, value in _SAMPLE.findall(body.decode()):
        if name in sums:
            sums[name] += float(value)
            _say(f"     a2a_sidecar_{name}_total{labels} {float(value):g}")
    expected = {"requests": 2, "attempts": 3, "failovers": 1, "selection_changes": 1}
    _expect(sums == expected, f"these are not the expected sums: {expected}")


# --- requests ---------------------------------------------------------------------------------


def _call(url: str, method: str, message_id: str, text: str) -> tuple[dict[str, str], bytes]:
    """Send one message over JSON-RPC; returns the reply's headers and body."""
    message = {"messageId": message_id, "role": "ROLE_USER", "parts": [{"text": text}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}
    return _request("POST", url, json.dumps(call).encode())


def _request(method: str, url: str, body: bytes | None = None) -> tuple[dict[str, str], bytes]:
    """Headers, names in lower case, and body of a reply with status 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_SECONDS)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json", "a2a-version": "1.0"}
        connection.request(method, parts.path or "/", body, headers)
        response = connection.getresponse()
        data = response.read()
        _expect(response.status == 200, f"{method} {url} was answered with {response.status}")
        return {name.lower(): value for name, value in response.getheaders()}, data


# --- processes --------------------------------------------------------------------------------


class _Child:
    """A module of this package in a process of its own, which the `with` block ends."""

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self.output = b""
        """What it has written so far."""
        self._unread = b""
        # Not whatever is called `sidecar` in the working directory (-P), but this very package.
        package = str(Path(__file__).resolve().parent.parent)
        paths = [package, os.environ.get("PYTHONPATH", "")]
        self._popen = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-P", "-m", module, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # Ctrl-C at the terminal is for the demo, which then ends its children.
            start_new_session=True,
            preexec_fn=functools.partial(_end_with, os.getpid()),  # noqa: PLW1509 - no threads here
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.terminate()
        try:
            self._popen.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdout is not None
        with self._popen.stdout as stdout:
            self.output += stdout.read()

    def give(self, data: bytes) -> None:
        """Write all of its standard input."""
        assert self._popen.stdin is not None
        with self._popen.stdin as stdin:
            stdin.write(data)

    def wait_for(self, key: str, value: str | None = None) -> dict[str, Any]:
        """The next line of its output that is a JSON object with `key`, and that value if given."""
        while True:
            found = _json_object(self._read_line())
            if key in found and value in {None, found[key]}:
                return found

    def _read_line(self) -> bytes:
        assert self._popen.stdout is not None
        descriptor = self._popen.stdout.fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([descriptor], [], [], _TIMEOUT_SECONDS)
            data = os.read(descriptor, 65536) if readable else b""
            if not data:
                raise _Failure(f"the {self.name} has ended or says nothing")
            self.output += data
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _end_with(parent: int) -> None:
    """Run in the child before it becomes the program: have the kernel end it with its parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # which has ended in the meantime
        os._exit(1)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
