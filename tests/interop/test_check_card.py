"""``check-card`` and the start-up check against agents of other people, whose counters stay still."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
import trio

from sidecar.check import (
    AgentCardBindingError,
    BindingProbeError,
    probe_bindings,
    validate_card_against_bindings,
)
from sidecar.cli import main
from tests.harness import (
    Peer,
    TlsFiles,
    card,
    free_port,
    interface,
    legacy_card,
    make_tls,
    peer_sync,
    write_card,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

QUICK = ["--timeout-seconds", "2"]


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as started:
        yield started


@pytest.fixture(scope="module")
def unregistered() -> Iterator[Peer]:
    """An a2a-sdk agent whose gRPC server was started without its handlers."""
    with peer_sync("sdk_agent", "--grpc-unregistered", "--rest", "off") as started:
        yield started


@pytest.fixture
def check(tmp_path, capsys):
    """Run ``check-card`` on a card; (exit code, report as data)."""

    def run(content: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
        source = content if isinstance(content, str) else str(write_card(tmp_path, content))
        code = main(["check-card", source, "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def executions(agent: Peer) -> int:
    state = trio.run(agent.state)
    return int(state["executions"])


def texts(report: dict[str, Any], where: str, level: str = "failed") -> list[str]:
    (row,) = [row for row in report["interfaces"] if row["where"] == where]
    return [one["text"] for one in row["findings"] if one["result"] == level]


def results(report: dict[str, Any]) -> list[str]:
    return [row["result"] for row in report["interfaces"]]


# --- a correct agent ----------------------------------------------------------------------------


def test_a_correct_agent_passes_and_executes_nothing(agent, check):
    before = executions(agent)
    code, report = check(agent.card_url)
    assert (code, report["result"], report["agent"]) == (0, "served", "sdk agent")
    assert results(report) == ["served"] * 3
    for row in report["interfaces"]:
        steps = {one["step"] for one in row["findings"] if one["result"] == "passed"}
        wanted = {"listens", "binding", "handler", "version", "streaming", "extended card"}
        assert wanted <= steps, row
    assert executions(agent) == before
    sent = {r["path"].rpartition("/")[2] for r in trio.run(agent.state)["requests"]}
    assert not sent & {"SendMessage", "message:send", "SendStreamingMessage", "message:stream"}


def test_a_base_url_a_card_url_and_a_file(agent, check, tmp_path):
    base = agent.card_url.removesuffix("/.well-known/agent-card.json")
    content = card([("JSONRPC", agent.urls["JSONRPC"])])
    sources = [base, agent.card_url, str(write_card(tmp_path, content))]
    assert [check(source)[0] for source in sources] == [0, 0, 0]


def test_a_wrong_version_is_refused_over_http_and_noted_over_grpc(agent, check):
    _, report = check(agent.card_url)
    refused = [texts(report, f"supportedInterfaces[{n}]", "passed") for n in (0, 1)]
    assert all("another version is refused" in found for found in refused)
    (note,) = texts(report, "supportedInterfaces[2]", "note")
    assert "99.0 is not refused" in note


# --- the lying card -----------------------------------------------------------------------------


def root(agent: Peer) -> str:
    return f"http://127.0.0.1:{agent.ports['jsonrpc']}"


def test_a_hint_that_is_not_served_at_url(agent, check):
    url, grpc = root(agent), agent.urls["GRPC"]
    lying = legacy_card(url=url, preferred="GRPC", additional=[("JSONRPC", url), ("GRPC", grpc)])
    code, report = check(lying)
    assert code == 1
    assert results(report) == ["not served", "served", "served"]
    assert texts(report, "url") == [
        (
            f"preferredTransport says GRPC, but 127.0.0.1:{agent.ports['jsonrpc']} does not speak"
            " HTTP/2, which gRPC needs; served there: JSONRPC; GRPC is served at"
            f" additionalInterfaces[1] ({grpc}) only"
        )
    ]


def test_a_grpc_server_without_its_handler(unregistered, check):
    url, grpc = root(unregistered), unregistered.urls["GRPC"]
    lying = legacy_card(url=grpc, preferred="GRPC", additional=[("JSONRPC", url)])
    code, report = check(lying)
    assert code == 1
    assert results(report) == ["not served", "served"]
    assert texts(report, "url") == [
        (
            f"preferredTransport says GRPC, but a gRPC server listens at"
            f" 127.0.0.1:{unregistered.ports['grpc']}, but the A2A service is not registered there"
            " (UNIMPLEMENTED)"
        )
    ]


def test_both_at_once(unregistered, check):
    url, grpc = root(unregistered), unregistered.urls["GRPC"]
    lying = legacy_card(url=url, preferred="GRPC", additional=[("JSONRPC", url), ("GRPC", grpc)])
    code, report = check(lying)
    assert code == 1
    assert results(report) == ["not served", "served", "not served"]
    (hint,) = texts(report, "url")
    assert "does not speak HTTP/2" in hint
    assert hint.endswith("; neither is it at additionalInterfaces[1]")
    (entry,) = texts(report, "additionalInterfaces[1]")
    assert "not registered there (UNIMPLEMENTED)" in entry


def test_people_get_one_line_for_each_failure(unregistered, tmp_path, capsys):
    url, grpc = root(unregistered), unregistered.urls["GRPC"]
    lying = legacy_card(url=url, preferred="GRPC", additional=[("JSONRPC", url), ("GRPC", grpc)])
    assert main(["check-card", str(write_card(tmp_path, lying))]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "does not speak HTTP/2" in line]) == 1
    assert len([line for line in lines if "UNIMPLEMENTED" in line]) == 1
    assert lines[-1] == "1 served, 2 not served"


# --- other ways to be wrong ---------------------------------------------------------------------


def test_bindings_at_each_others_ports(agent, check):
    grpc, port = agent.urls["GRPC"], agent.ports["grpc"]
    content = card(
        [("JSONRPC", f"{grpc}/rpc"), ("HTTP+JSON", agent.urls["JSONRPC"]), ("GRPC", root(agent))]
    )
    code, report = check(content)
    assert code == 1
    assert results(report) == ["not served"] * 3
    assert [row["served_there"] for row in report["interfaces"]] == [
        ["GRPC"],
        ["JSONRPC"],
        ["JSONRPC"],
    ]
    (first,) = texts(report, "supportedInterfaces[0]")
    assert first.startswith(f"127.0.0.1:{port} does not speak HTTP/1.1")


def test_nothing_listens(check):
    port = free_port()
    content = card([("JSONRPC", f"http://127.0.0.1:{port}"), ("GRPC", f"http://127.0.0.1:{port}")])
    code, report = check(content)
    assert code == 1
    for row in report["interfaces"]:
        (found,) = row["findings"]
        assert (found["step"], found["result"]) == ("listens", "failed")
        assert found["text"] == f"nothing listens at 127.0.0.1:{port} (connection refused)"


def test_a_grpc_url_without_scheme_means_tls(agent, check):
    code, report = check(card([("GRPC", f"127.0.0.1:{agent.ports['grpc']}")]))
    assert code == 1
    (text,) = texts(report, "supportedInterfaces[0]")
    assert text.endswith("it answers GRPC in plaintext, which the url does not say")


def test_a_url_that_the_binding_cannot_have(agent, check):
    code, report = check(legacy_card(url=agent.urls["JSONRPC"], preferred="GRPC"))
    assert code == 1
    (text,) = texts(report, "url")
    assert "a gRPC interface is host and port alone" in text
    assert "served there: JSONRPC" in text


def test_other_versions_and_bindings_are_not_checked(agent, check):
    entries = [
        interface("JSONRPC", agent.urls["JSONRPC"], version="0.3"),
        interface("slimrpc", "slim://127.0.0.1:1/x"),
    ]
    code, report = check(card(entries))
    assert code == 2
    assert results(report) == ["unknown", "unknown"]


@pytest.mark.parametrize("binding", ["JSONRPC", "GRPC", "HTTP+JSON"])
def test_tenants_are_sent_along(agent, check, binding):
    content = card([interface(binding, agent.urls[binding], tenant="acme")])
    code, report = check(content)
    assert code == 0
    assert "tenant 'acme' is accepted" in texts(report, "supportedInterfaces[0]", "passed")


def test_a_tenant_that_is_not_accepted(check):
    """An HTTP+JSON server that does not know the path segment of a tenant."""
    with peer_sync("raw_http") as raw:
        trio.run(raw.script, *[NO_ROUTE, {"rpc": "GetTask", "steps": ["default"]}])
        entry = interface("HTTP+JSON", raw.urls["HTTP+JSON"], tenant="acme")
        code, report = check(card([entry]), *QUICK)
    assert code == 1
    (text,) = texts(report, "supportedInterfaces[0]")
    assert text.endswith("but not with the tenant 'acme'")


NO_ROUTE = {
    "reply": {"status": 404, "body": "Not Found", "headers": [["content-type", "text/plain"]]}
}


@pytest.mark.parametrize(
    ("reply", "code", "word"),
    [
        ({"status": 415, "body": ""}, 1, "HTTP 415"),
        ({"status": 405, "body": ""}, 1, "HTTP 405"),
        ({"status": 200, "body": "<html>", "headers": [["content-type", "text/html"]]}, 1, "not in JSONRPC"),
        ({"status": 503, "body": ""}, 2, "HTTP 503"),
        ({"status": 429, "body": ""}, 2, "HTTP 429"),
        ({"status": 401, "body": ""}, 2, "asks for credentials"),
        ({"status": 403, "body": ""}, 2, "asks for credentials"),
    ],
)  # fmt: skip
def test_answers_that_are_no_a2a_answers(check, reply, code, word):
    with peer_sync("raw_http") as raw:
        trio.run(raw.script, *[{"reply": reply}] * 3)
        found, report = check(card([("JSONRPC", raw.urls["JSONRPC"])]), *QUICK)
    assert found == code
    level = "failed" if code == 1 else "unknown"
    assert word in texts(report, "supportedInterfaces[0]", level)[0]


@pytest.mark.parametrize("step", ["close", "reset", "hang"])
def test_silence_decides_nothing(check, step):
    with peer_sync("raw_http") as raw:
        trio.run(raw.script, *[step] * 5)
        code, report = check(card([("JSONRPC", raw.urls["JSONRPC"])]), "--timeout-seconds", "0.5")
    assert code == 2
    assert results(report) == ["unknown"]


def test_claims_that_are_not_kept(check):
    """The scripted peer serves neither SubscribeToTask nor an extended card."""
    with peer_sync("raw_http") as raw:
        content = card([("JSONRPC", raw.urls["JSONRPC"])])
        code, report = check(content, *QUICK)
        found = texts(report, "supportedInterfaces[0]")
        modest = {**content, "capabilities": {"streaming": False}}
        assert check(modest, *QUICK)[0] == 0
    assert code == 1
    assert found == [
        "the card claims it, and SubscribeToTask is not served: METHOD_NOT_FOUND",
        "the card claims it, and GetExtendedAgentCard is not served: METHOD_NOT_FOUND",
    ]


def test_a_card_that_declares_nothing(check):
    code, report = check({"name": "x", "supportedInterfaces": []})
    assert (code, report["problems"]) == (1, ["the card declares no interface"])


# --- credentials --------------------------------------------------------------------------------


def test_an_agent_that_wants_credentials(check, monkeypatch):
    unauthenticated = ["--grpc-unauthenticated", "--rest", "off"]
    with peer_sync("sdk_agent", *unauthenticated) as strict:
        code, report = check(card([("GRPC", strict.urls["GRPC"])]))
        assert code == 2
        (row,) = report["interfaces"]
        assert row["needs_credentials"] is True


def test_with_a_header_the_check_goes_on(check, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_TOKEN", "Bearer t0ken")
    with peer_sync("raw_http") as raw:
        content = card([("JSONRPC", raw.urls["JSONRPC"])], capabilities={})
        code, _ = check(content, "--header", "Authorization=env:AGENT_TOKEN", *QUICK)
        assert code == 0
        requests = trio.run(raw.state)["requests"]
        assert all(["authorization", "Bearer t0ken"] in one["headers"] for one in requests)


def test_credentials_go_to_the_cards_own_host_only(check, monkeypatch):
    monkeypatch.setenv("AGENT_TOKEN", "t0ken")
    with peer_sync("raw_http") as raw:
        port = raw.ports["http"]
        content = card([("JSONRPC", f"http://127.0.0.2:{port}/rpc")], capabilities={})
        trio.run(raw.control, "config", {"card": content})
        check(raw.card_url, "--header", "x-api-key=env:AGENT_TOKEN", *QUICK)
        sent = [dict(one["headers"]) for one in trio.run(raw.state)["requests"]]
    assert [("x-api-key" in headers) for headers in sent if "accept" in headers][:1] == [True]
    assert not any("x-api-key" in headers for headers in sent if "a2a-version" in headers)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--header", "Authorization"],
        ["--header", "Authorization=secret-itself"],
        ["--header", "Authorization=env:NOT_SET_ANYWHERE"],
        ["--map", "nowhere"],
        ["--map", "https://a.example=nowhere"],
    ],
)
def test_what_cannot_run_is_2_and_shows_no_secret(tmp_path, capsys, arguments):
    source = str(write_card(tmp_path, card([("JSONRPC", "http://127.0.0.1:1")])))
    assert main(["check-card", source, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("a2a-sidecar check-card: ")
    assert "secret-itself" not in said


@pytest.mark.parametrize("source", ["nofile.json", "ftp://x/card.json", "http://127.0.0.1:1"])
def test_a_source_that_gives_no_card_is_2(capsys, source):
    assert main(["check-card", source]) == 2
    assert capsys.readouterr().err.startswith("a2a-sidecar check-card: the card")


# --- TLS and maps -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(tmp_path_factory) -> Iterator[tuple[Peer, TlsFiles]]:
    """An agent whose certificate is for agent.example."""
    files = make_tls(tmp_path_factory.mktemp("tls"), "agent.example")
    with peer_sync("sdk_agent", *files.peer_args) as started:
        yield started, files


def public_card(agent: Peer) -> dict[str, Any]:
    urls = {
        binding: url.replace("127.0.0.1", "agent.example") for binding, url in agent.urls.items()
    }
    return card(list(urls.items()))


def test_a_map_leads_to_the_agent_and_the_certificate_is_the_public_names(secure, check):
    agent, files = secure
    maps = []
    for port in agent.ports.values():
        maps += ["--map", f"agent.example:{port}=127.0.0.1:{port}"]
    code, report = check(public_card(agent), "--ca-file", str(files.ca), *maps)
    assert code == 0
    for row in report["interfaces"]:
        passed = [one["text"] for one in row["findings"] if one["step"] == "tls"]
        assert passed == ["its certificate is valid for agent.example"]


def test_a_certificate_for_another_name(secure, check):
    agent, files = secure
    content = card(list(agent.urls.items()))
    code, report = check(content, "--ca-file", str(files.ca))
    assert code == 1
    for row in report["interfaces"]:
        (found,) = row["findings"]
        assert (found["step"], found["result"]) == ("tls", "failed")
        assert "certificate" in found["text"]


def test_a_plaintext_agent_behind_a_proxy(agent, check):
    content = card([("JSONRPC", "https://agent.example/a2a/rpc")])
    local = f"https://agent.example/a2a=http://127.0.0.1:{agent.ports['jsonrpc']}"
    code, report = check(content, "--map", local)
    assert code == 0
    assert report["interfaces"][0]["dialled"] == f"127.0.0.1:{agent.ports['jsonrpc']}"


# --- reports and terminals ----------------------------------------------------------------------


def test_junit(agent, check, tmp_path):
    path = tmp_path / "report.xml"
    check(agent.card_url, "--junit", str(path))
    suite = ET.fromstring(path.read_bytes())
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    assert len(suite.findall("testcase")) == int(suite.get("tests", "0")) > 15


def test_progress_on_a_terminal_and_nowhere_else(agent):
    argv = [sys.executable, "-m", "sidecar", "check-card", agent.card_url]
    reader, writer = pty.openpty()
    try:
        on_terminal = subprocess.run(argv, stdout=subprocess.PIPE, stderr=writer, check=True)
        shown = os.read(reader, 65536).decode()
    finally:
        os.close(reader)
        os.close(writer)
    assert "checking: 3 of 3" in shown
    assert shown.endswith("\r\x1b[K")
    elsewhere = subprocess.run(argv, capture_output=True, check=True)
    assert elsewhere.stderr == b""
    assert elsewhere.stdout == on_terminal.stdout


def test_waiting_until_everything_is_served(tmp_path):
    """As in ExecStartPost=: the agent is still starting when the check begins."""
    ports = {name: free_port() for name in ("jsonrpc", "rest", "grpc")}
    content = card(
        [("JSONRPC", f"http://127.0.0.1:{ports['jsonrpc']}/rpc"), ("GRPC", f"http://127.0.0.1:{ports['grpc']}")]
    )  # fmt: skip
    source = str(write_card(tmp_path, content))
    argv = [sys.executable, "-m", "sidecar", "check-card", source, "--wait-seconds", "60"]
    arguments = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as checking:
        with peer_sync("sdk_agent", *arguments):
            assert checking.wait(60) == 0
    argv[-1] = "1"
    assert subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode == 1


DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("unknown_passes", [False, True])
def test_the_example_for_systemd_by_its_exit_codes(agent, unregistered, unknown_passes):
    """What is not 0 fails the unit (systemd.service(5))."""
    text = (DOCS / "check-card.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if line.startswith("ExecStartPost=")]
    command = lines[unknown_passes].removeprefix("ExecStartPost=")
    command = command.replace("/usr/local/bin/a2a-sidecar", f"{sys.executable} -m sidecar")
    command = command.replace("--wait-seconds 30", "--wait-seconds 0.5")

    def exit_code(url: str) -> int:
        argv = shlex.split(command.replace("http://127.0.0.1:8000", url))
        return subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode

    with peer_sync("sdk_agent", "--grpc-unauthenticated", "--rest", "off") as strict:
        codes = [exit_code(one.card_url) for one in (agent, unregistered, strict)]
    assert codes == ([0, 1, 0] if unknown_passes else [0, 1, 2])


# --- the Python side ----------------------------------------------------------------------------


def test_probe_bindings_says_what_is_served(agent):
    content = card(list(agent.urls.items()))
    before = executions(agent)
    listening = probe_bindings(content)
    assert listening == {url: frozenset({binding}) for binding, url in agent.urls.items()}
    validate_card_against_bindings(content, listening)
    assert executions(agent) == before


def test_probe_bindings_of_a_lying_card(unregistered):
    url, grpc = root(unregistered), unregistered.urls["GRPC"]
    lying = legacy_card(url=url, preferred="GRPC", additional=[("JSONRPC", url), ("GRPC", grpc)])
    listening = probe_bindings(lying)
    assert listening == {url: frozenset({"JSONRPC"}), grpc: frozenset()}
    with pytest.raises(AgentCardBindingError) as caught:
        validate_card_against_bindings(lying, listening)
    assert len(caught.value.problems) == 2


def test_probe_bindings_does_not_guess():
    with peer_sync("sdk_agent", "--grpc-unauthenticated", "--rest", "off") as strict:
        with pytest.raises(BindingProbeError, match="asks for credentials"):
            probe_bindings(card([("GRPC", strict.urls["GRPC"])]))


EXAMPLE = DOCS / "examples" / "agent_startup.py"


@pytest.mark.parametrize(("registered", "expected"), [(True, 0), (False, 1)])
def test_the_example_of_an_agents_own_start_up(registered, expected):
    """An a2a-sdk agent, its library loaded in the same process, that checks itself."""
    ports = [str(free_port()), str(free_port())]
    options = [] if registered else ["--forget-grpc"]
    argv = [sys.executable, str(EXAMPLE), *ports, "--once", *options]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == expected, said
    if registered:
        assert "the card is backed by what listens" in said
    else:
        assert f"declares GRPC at http://127.0.0.1:{ports[1]}, which serves: none" in said
