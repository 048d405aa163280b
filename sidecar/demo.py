"""``a2a-sidecar demo``: an agent whose card misleads, a sidecar, and two messages that arrive.

Both run as processes of their own, as they would in earnest, at free ports of 127.0.0.1. They end
with this process, in whatever way it ends, and leave no files.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from sidecar.core.sse import SseReader
from sidecar.demo_agent import EXECUTIONS_PATH
from sidecar.discovery import CARD_PATH

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
    agent = start(_Child("agent", "sidecar.demo_agent"))
    agent_url = str(agent.wait_for("url")["url"])
    agent_address = agent_url.removeprefix("http://")
    _show_card(agent_address)

    config = _CONFIG.format(card=json.dumps(agent_url)).encode()
    sidecar = start(_Child("sidecar", "sidecar", "run", "--config", "/dev/stdin", given=config))
    started = sidecar.wait_for("event", "started")
    address, admin = str(started["listeners"]), str(started["admin"])

    messages = [str(uuid.uuid4()), str(uuid.uuid4())]
    _show_unary(sidecar, address, messages[0])
    _show_stream(address, messages[1])
    _show_executions(agent_address, messages)
    _show_counters(admin)


def _show_card(address: str) -> None:
    _, body = _request(address, "GET", CARD_PATH)
    card = json.loads(body)
    unserved, *others = card["additionalInterfaces"]
    _say(f"1. An agent publishes a card that misleads, http://{address}{CARD_PATH}")
    _say(f"     url                   {card['url']}")
    _say(f"     preferredTransport    {card['preferredTransport']}: not what that url speaks")
    note = "a gRPC server, but A2A is not served there"
    _say(f"     additionalInterfaces  {_interface(unserved)}: {note}")
    for other in others:
        _say(f"                           {_interface(other)}")


def _interface(entry: dict[str, str]) -> str:
    return f"{entry['transport']:<10} {entry['url']}"


def _show_unary(sidecar: _Child, address: str, message_id: str) -> None:
    _say(f"\n2. An application sends a message over JSON-RPC to the sidecar at {address}")
    headers, body = _call(address, "SendMessage", message_id, "hello")
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
    _say(f"     so it was safe to go on: {answered} answered {text!r}, {task['status']['state']}")
    _expect(text == "hello", "the answer is not the one to this message")
    _expect(answered == failover["to"], "the answer came from another interface")
    _expect(headers["a2a-sidecar-attempts"] == "2", "there were not two attempts")


def _show_stream(address: str, message_id: str) -> None:
    _say("\n3. It sends another one, as a stream")
    headers, body = _call(address, "SendStreamingMessage", message_id, "hello again")
    reader = SseReader(_EVENT_BYTES)
    events = [json.loads(event.data) for event in [*reader.feed(body), *reader.end()]]
    failed = next((event["error"] for event in events if "error" in event), None)
    _expect(failed is None and events, f"the stream ended with an error: {failed}")
    names = ", ".join(next(iter(event["result"])) for event in events)
    state = events[-1]["result"]["statusUpdate"]["status"]["state"]
    interface = headers["a2a-sidecar-interface"]
    _say(f"     it began at {interface}, without a failure: {names}, {state}")
    _expect(headers["a2a-sidecar-attempts"] == "1", "the stream was not opened at once")
    _expect(state == "TASK_STATE_COMPLETED", "the stream did not end with its task")


def _show_executions(address: str, messages: list[str]) -> None:
    _, body = _request(address, "GET", EXECUTIONS_PATH)
    executions = json.loads(body)
    once = executions == dict.fromkeys(messages, 1)
    _expect(once, f"the agent did not execute each message once: {executions}")
    _say(f"\n4. The agent has executed {len(executions)} messages, each of them once")


def _show_counters(admin: str) -> None:
    _, body = _request(admin, "GET", "/metrics")
    _say(f"\n5. The sidecar has counted, http://{admin}/metrics")
    sums = dict.fromkeys(_SHOWN, 0.0)
    for name, labels, value in _SAMPLE.findall(body.decode()):
        if name in sums:
            sums[name] += float(value)
            _say(f"     a2a_sidecar_{name}_total{labels} {float(value):g}")
    expected = {"requests": 2, "attempts": 3, "failovers": 1, "selection_changes": 1}
    _expect(sums == expected, f"these are not the expected sums: {expected}")


# --- requests ---------------------------------------------------------------------------------


def _call(address: str, method: str, message_id: str, text: str) -> tuple[dict[str, str], bytes]:
    """Send one message over JSON-RPC; returns the reply's headers and body."""
    message = {"messageId": message_id, "role": "ROLE_USER", "parts": [{"text": text}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}
    return _request(address, "POST", "/", json.dumps(call).encode())


def _request(
    address: str, method: str, path: str, body: bytes | None = None
) -> tuple[dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        _expect(response.status == 200, f"{method} {path} was answered with {response.status}")
        return {name.lower(): value for name, value in response.getheaders()}, data


# --- processes --------------------------------------------------------------------------------


class _Child:
    """A module of this package in a process of its own, which the `with` block ends."""

    def __init__(self, name: str, module: str, *arguments: str, given: bytes = b"") -> None:
        """`given` is its standard input."""
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
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are no threads here
        )
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._popen.stdin as stdin:
            stdin.write(given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdout is not None
        with self._popen.stdout as stdout:
            self.output += stdout.read()

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


def _end_with_parent() -> None:
    """Run in the child before it becomes the program: have the kernel end it with its parent."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
