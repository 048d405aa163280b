"""What the command line shows of a running sidecar, to people and to scripts."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar import cli, client

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "ready": True,
    "draining": False,
    "reload_error": None,
    "listeners": [
        {"address": "127.0.0.1:7420", "binding": "JSONRPC"},
        {"address": "unix:/run/app.sock", "binding": "GRPC"},
    ],
    "agents": {
        "weather": {
            "card": "https://weather.test",
            "enabled": True,
            "current": "2-grpc",
            "candidates": [
                {"interface": "2-grpc", "version": "1.0", "url": "https://weather.test:9443"},
                {"interface": "0-jsonrpc", "version": "1.0", "url": "https://weather.test/rpc"},
            ],
            "ineligible": [
                {
                    "position": 1,
                    "binding": "SOAP",
                    "url": "https://weather.test/soap",
                    "reason": "the binding SOAP is not supported",
                }
            ],
            "card_age_seconds": 7320.0,
            "card_error": None,
            "contradiction": None,
            "in_flight": 3,
            "streams": 12,
            "attempts": [
                {
                    "interface": "0-jsonrpc",
                    "address": "weather.test:443",
                    "kind": "not_delivered",
                    "result": "dial",
                    "seconds_ago": 45.2,
                },
                {
                    "interface": "2-grpc",
                    "address": "weather.test:9443",
                    "kind": "answered",
                    "result": "ok",
                    "seconds_ago": 1.4,
                },
            ],
        },
        "search": {
            "card": "https://search.test",
            "enabled": False,
            "current": None,
            "candidates": [],
            "ineligible": [],
            "card_age_seconds": None,
            "card_error": None,
            "contradiction": None,
            "in_flight": 0,
            "streams": 0,
            "attempts": [],
        },
    },
}

TABLE = """\
a2a-sidecar 0.1.0: ready

LISTENER            BINDING
127.0.0.1:7420      JSONRPC
unix:/run/app.sock  GRPC

AGENT    CURRENT   CANDIDATES  CALLS  STREAMS  CARD AGE
weather  2-grpc    2           3      12       2 h
search   disabled  0           0      0        no card

weather: https://weather.test
  *  2-grpc     1.0  https://weather.test:9443
     0-jsonrpc  1.0  https://weather.test/rpc
  -  1-SOAP          https://weather.test/soap: the binding SOAP is not supported
  last attempts:
    1 s ago   2-grpc     weather.test:9443  answered: ok
    45 s ago  0-jsonrpc  weather.test:443   not_delivered: dial

search: https://search.test"""


def test_the_readme_has_the_table() -> None:
    """When this fails: put TABLE there."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert f"```text\n{TABLE}\n```" in readme


def changed(**keys: Any) -> dict[str, Any]:
    return {**STATUS, **keys}


def agent_with(**keys: Any) -> dict[str, Any]:
    return changed(agents={"weather": {**STATUS["agents"]["weather"], **keys}})


def test_the_table() -> None:
    assert client.status_table(STATUS) == TABLE


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (changed(ready=False), "a2a-sidecar 0.1.0: not ready"),
        (changed(ready=False, draining=True), "a2a-sidecar 0.1.0: draining"),
        (changed(reload_error="config.toml:3: x"), "the last reload failed: config.toml:3: x"),
        (changed(agents={}), "unix:/run/app.sock  GRPC"),
        (agent_with(card_error="the card: refused"), "  card error: the card: refused"),
        (agent_with(contradiction="url is JSONRPC"), "  url is JSONRPC"),
        (agent_with(current=None), "weather  none "),
        (agent_with(card_age_seconds=59.4), " 59 s"),
        (agent_with(card_age_seconds=61), " 1 min"),
        (agent_with(card_age_seconds=200_000), " 2 d"),
    ],
)
def test_what_else_there_is_to_see(found: dict[str, Any], expected: str) -> None:
    assert expected in client.status_table(found)


def test_only_the_last_attempts_are_shown() -> None:
    attempt = STATUS["agents"]["weather"]["attempts"][0]
    attempts = [{**attempt, "seconds_ago": float(age)} for age in range(20, 0, -1)]
    table = client.status_table(agent_with(attempts=attempts))
    assert [f"{age} s ago" in table for age in (1, 5, 6)] == [True, True, False]


def test_what_others_wrote_does_not_act_on_the_terminal() -> None:
    evil = "http://x/\x1b[2J\r\u202e"
    found = agent_with(
        card=evil,
        card_error=evil,
        contradiction=evil,
        candidates=[{"interface": "0-jsonrpc", "version": "1.0", "url": evil}],
        ineligible=[{"position": 1, "binding": evil, "url": evil, "reason": evil}],
    )
    found["reload_error"] = "one\ntwo\x1b"
    table = client.status_table(found)
    assert all(line.isprintable() for line in table.splitlines())
    assert "\\x1b[2J" in table


# --- over HTTP --------------------------------------------------------------------------------


@contextmanager
def admin_address(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server with these answers by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def status_of(
    capsys: pytest.CaptureFixture[str], address: str, *options: str
) -> tuple[int, str, str]:
    code = cli.main(["status", "--admin", address, *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_status_for_people_and_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_address({"/status": (200, json.dumps(STATUS).encode())}) as address:
        assert status_of(capsys, address) == (0, TABLE + "\n", "")
        code, out, _ = status_of(capsys, address, "--json")
        assert code == 0
        assert json.loads(out) == STATUS


def test_readiness_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    with admin_address({"/readyz": (200, b"ready\n")}) as address:
        assert status_of(capsys, address, "--ready") == (0, "", "")
    with admin_address({"/readyz": (503, b"no card\x1b of a\ndraining\n")}) as address:
        assert status_of(capsys, address, "--ready") == (1, "no card\\x1b of a\ndraining\n", "")
    code, out, err = status_of(capsys, address, "--ready")
    assert (code, out) == (1, "")
    assert err.startswith(f"no answer from {address}: ")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>", b"\xff"])
def test_what_is_no_status(capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    with admin_address({"/status": (200, body)}) as address:
        code, out, err = status_of(capsys, address)
    assert (code, out) == (1, "")
    assert err.startswith(f"no status from {address}: ")


def test_the_status_of_another_kind_of_process_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"version": "0.1.0", "ready": True, "publish": {}}
    with admin_address({"/status": (200, json.dumps(found).encode())}) as address:
        code, out, _ = status_of(capsys, address)
    assert code == 0
    assert json.loads(out) == found


@pytest.mark.parametrize("address", ["", "[::1", "no host:1", "127.0.0.1:99999"])
def test_addresses_where_nobody_is(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, out, err = status_of(capsys, address)
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert cli.main(["send", "hello", "--to", address]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_watching_goes_on_until_ctrl_c(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the sidecar restarts."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        answers["/status"] = (503, b"") if len(waits) == 1 else (200, b'{"ready": false}')
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "sleep", sleep)
    answers = {"/status": (200, json.dumps(STATUS).encode())}
    with admin_address(answers) as address:
        code, out, err = status_of(capsys, address, "--watch", "0.5")
    assert (code, waits) == (130, [0.5, 0.5, 0.5])
    assert out == TABLE + '\n{\n  "ready": false\n}\n'
    assert len(err.splitlines()) == 1


def test_watching_on_a_terminal_stays_in_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "sleep", sleep)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with admin_address({"/status": (200, json.dumps(STATUS).encode())}) as address:
        _, out, _ = status_of(capsys, address, "--watch")
    assert out == "\x1b[H\x1b[2J" + TABLE + "\n"
