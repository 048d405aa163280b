"""Who may reach the local side: users, tokens, names, web pages, loops, other machines."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from sidecar.core import convert
from tests.harness import (
    Incomplete,
    Process,
    Response,
    Sidecar,
    card,
    free_port,
    grpc_call,
    http,
    message,
    requires,
    running,
    sidecar,
    toml,
    write_card,
)
from tests.system.world import (
    GRPC_OK,
    GRPC_UNAUTHENTICATED,
    grpc_answer,
    grpc_stream,
    send_pb,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.harness import Peer, TlsFiles

pytestmark = pytest.mark.system

TOKEN = "local-t0ken-c0ffee"
JSON = {"content-type": "application/json", "a2a-version": "1.0"}
GRPC_PERMISSION_DENIED, GRPC_FAILED_PRECONDITION = 7, 9


def listener(address: str, binding: str, **keys: Any) -> str:
    """A table of the configuration."""
    lines = ["[[listeners]]", f"address = {toml(address)}", f"binding = {toml(binding)}"]
    return "\n".join([*lines, *(f"{key} = {toml(value)}" for key, value in keys.items()), ""])


def rpc(id_: str = "m-1", method: str = "SendMessage") -> bytes:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": message("hello", id_)}
    return json.dumps(request).encode()


@dataclass
class Door:
    """One daemon with many listeners, in front of one agent."""

    daemon: Sidecar
    agent: Peer
    plain: dict[str, int]
    """Port by binding."""
    guarded: dict[str, int]
    """The same, with the token."""
    secured: dict[str, int]
    """The same, with the token and TLS."""
    unix: str
    """Socket for everybody."""
    others: str
    """Socket for another user."""
    log: str = ""

    async def seen(self) -> int:
        """How many requests the agent has seen."""
        return len((await self.agent.state())["requests"])

    async def call(
        self, binding: str, where: int | str, headers: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, str, dict[str, str]]:
        """SendMessage: (HTTP or gRPC status, our reason, headers)."""
        headers = headers or {}
        tls: TlsFiles | None = options.get("tls")
        if binding == "GRPC":
            assert isinstance(where, int)
            made = [("a2a-version", "1.0"), *headers.items()]
            request = send_pb("hello", "m-1", "")
            result = await grpc_call(where, "SendMessage", request, metadata=made, tls=tls)
            metadata = {**result.headers, **result.trailers}
            answer = grpc_answer(result.code, result.message, metadata, b"")
            return result.code, answer.reason, answer.headers
        path = "/" if binding == "JSONRPC" else "/message:send"
        body = rpc() if binding == "JSONRPC" else json.dumps(message("hello", "m-1")).encode()
        context = tls.client_context() if tls else None
        reply = await http(where, "POST", path, headers={**JSON, **headers}, body=body, tls=context)
        return reply.status, reason_of(reply), reply.header_dict()


def reason_of(reply: Response) -> str:
    """The reason of our error in a reply, '' without one."""
    error = reply.json().get("error") or {}
    details = error.get("data") or error.get("details") or [{}]
    return str(details[0].get("reason", ""))


@pytest.fixture(scope="module")
def door(first: Peer, tls: TlsFiles) -> Iterator[Door]:
    bindings = ("JSONRPC", "HTTP+JSON", "GRPC")
    plain = {binding: free_port() for binding in bindings}
    guarded = {binding: free_port() for binding in bindings}
    secured = {binding: free_port() for binding in bindings}
    admin = free_port()
    with tempfile.TemporaryDirectory(prefix="door-") as name:
        directory = Path(name)
        (directory / "token").write_text(TOKEN + "\n")
        file = write_card(
            directory,
            card([("JSONRPC", first.urls["JSONRPC"]), ("HTTP+JSON", first.urls["HTTP+JSON"])]),
        )
        token = {"token": f"file:{directory}/token"}
        files = {"tls_cert_file": tls.cert, "tls_key_file": tls.key}
        unix, others = f"{directory}/app.sock", f"{directory}/other.sock"
        text = "".join(
            [
                *(listener(f"127.0.0.1:{plain[one]}", one, **named(one)) for one in bindings),
                *(listener(f"127.0.0.1:{guarded[one]}", one, **token) for one in bindings),
                *(listener(f"127.0.0.1:{secured[one]}", one, **token, **files) for one in bindings),
                listener(f"unix:{unix}", "JSONRPC", mode="0640"),
                listener(f"unix:{others}", "JSONRPC", allow_uids=[os.getuid() + 1]),
                f'[admin]\naddress = "127.0.0.1:{admin}"\n',
                f"[agents.one]\ncard = {toml(file)}\n",
            ]
        )
        (directory / "config.toml").write_text(text)
        argv = [sys.executable, "-m", "sidecar", "run", "--config", f"{directory}/config.toml"]
        process = Process("sidecar", argv, cwd=directory)
        try:
            daemon = Sidecar(process, text, directory)
            trio.run(partial(_until_ready, daemon))
            yield Door(daemon, first, plain, guarded, secured, unix, others)
            log = process.log()
            assert TOKEN not in log
            assert "internal error" not in log
        finally:
            process.stop()


def named(binding: str) -> dict[str, Any]:
    return {"allowed_hosts": ["sidecar.test"]} if binding == "JSONRPC" else {}


async def _until_ready(daemon: Sidecar) -> None:
    with trio.fail_after(30):
        while daemon.process.alive:
            try:
                await daemon.wait_ready()
            except OSError:
                await trio.sleep(0.02)
            else:
                return
    raise daemon.process.died("not ready")


# --- Unix sockets -----------------------------------------------------------------------------


async def test_a_unix_socket(door):
    assert stat.S_IMODE(os.stat(door.unix).st_mode) == 0o640
    assert (await door.call("JSONRPC", f"unix:{door.unix}"))[:2] == (200, "")
    # Nobody but the file system decides who comes this way: no page reaches it, any name is right.
    headers = {
        "host": "whatever.test",
        "origin": "http://evil.test",
        "sec-fetch-site": "cross-site",
    }
    assert (await door.call("JSONRPC", f"unix:{door.unix}", headers))[:2] == (200, "")


async def test_another_users_socket(door):
    before = await door.seen()
    with pytest.raises((trio.BrokenResourceError, Incomplete)):
        await door.call("JSONRPC", f"unix:{door.others}")
    assert await door.seen() == before
    assert "allow_uids" in door.daemon.log()


@asynccontextmanager
async def instance(directory: Path, name: str, **keys: Any) -> AsyncIterator[Process]:
    """A daemon of its own at ``app.sock``."""
    file = write_card(directory, card([("JSONRPC", "http://127.0.0.1:9/")]))
    path = directory / f"{name}.toml"
    path.write_text(
        listener(f"unix:{directory}/app.sock", "JSONRPC", **keys)
        + f'[admin]\naddress = "127.0.0.1:{free_port()}"\n[agents.a]\ncard = {toml(file)}\n'
    )
    argv = [sys.executable, "-m", "sidecar", "run", "--config", str(path)]
    async with running(Process(name, argv, cwd=directory)) as process:
        yield process


async def listening(path: Path) -> None:
    with trio.fail_after(20):
        while True:
            try:
                stream = await trio.open_unix_socket(str(path))
            except OSError:
                await trio.sleep(0.02)
            else:
                await stream.aclose()
                return


async def test_a_crash_leaves_no_obstacle_and_nobody_loses_a_socket(tmp_path):
    path = tmp_path / "app.sock"
    async with instance(tmp_path, "first") as first:
        await listening(path)
        first.kill()
    assert path.exists()
    async with instance(tmp_path, "second") as second:
        await listening(path)
        inode = path.stat().st_ino
        async with instance(tmp_path, "third") as third:
            assert await third.wait(20) != 0
            assert str(path) in third.log()
            assert "another sidecar" in third.log()
            assert "Traceback" not in third.log()
        assert path.stat().st_ino == inode
        await listening(path)
        second.signal(signal.SIGTERM)
        assert await second.wait(10) == 0
    assert not path.exists()
    assert [one.name for one in tmp_path.iterdir() if one.suffix not in (".toml", ".json")] == []


# --- the token --------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_the_token(door, binding):
    port = door.guarded[binding]
    ok = GRPC_OK if binding == "GRPC" else 200
    refused = GRPC_UNAUTHENTICATED if binding == "GRPC" else 401
    before = await door.seen()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"a2a-sidecar-token": TOKEN[:-1]}):
        status, reason, shown = await door.call(binding, port, headers)
        assert (status, reason) == (refused, "LOCAL_TOKEN")
        assert shown["www-authenticate"].startswith("Bearer")
        assert shown["a2a-sidecar-delivered"] == "no"
    assert await door.seen() == before
    for headers in (
        {"a2a-sidecar-token": TOKEN, "authorization": "Bearer the-agents"},
        {"authorization": f"Bearer {TOKEN}"},
    ):
        assert (await door.call(binding, port, headers))[:2] == (ok, "")
    with_own, without = [
        dict(request["headers"]) for request in (await door.agent.state())["requests"][-2:]
    ]
    assert with_own["authorization"] == "Bearer the-agents"
    assert "authorization" not in without
    assert TOKEN not in json.dumps(await door.agent.state())


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_the_card_is_there_without_the_token_and_says_how_to_come_in(door, binding):
    port = door.guarded[binding]
    reply = await http(port, "GET", "/.well-known/agent-card.json")
    assert reply.status == 200
    body = reply.json()
    schemes = list(body["securitySchemes"].values())
    assert schemes == [{"httpAuthSecurityScheme": {"scheme": "Bearer"}}]
    (name,) = body["securitySchemes"]
    assert body["securityRequirements"] == [{"schemes": {name: {"list": []}}}]
    assert str(port) in body["supportedInterfaces"][0]["url"]
    plain = (await http(door.plain[binding], "GET", "/.well-known/agent-card.json")).json()
    assert "securitySchemes" not in plain
    assert "securityRequirements" not in plain


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_the_extended_card_asks_for_what_this_side_asks_for(door, binding):
    inside = {
        **card([("JSONRPC", "http://10.9.9.9:7101/rpc")]),
        "securitySchemes": {"corp": {"mtlsSecurityScheme": {}}},
        "securityRequirements": [{"schemes": {"corp": {"list": []}}}],
    }
    body = {"jsonrpc": "2.0", "id": 1, "result": inside}
    entry = {"rpc": "GetExtendedAgentCard", "steps": [{"reply": {"body": body}}]}
    await door.agent.script(entry, entry)
    for port, schemes in ((door.guarded[binding], ["sidecarToken"]), (door.plain[binding], [])):
        found = await extended_card(binding, port)
        assert list(found.get("securitySchemes", {})) == schemes
        assert [list(one["schemes"]) for one in found.get("securityRequirements", [])] == (
            [schemes] if schemes else []
        )
        assert str(port) in found["supportedInterfaces"][0]["url"]
        assert "10.9.9.9" not in json.dumps(found)


async def extended_card(binding: str, port: int) -> Any:
    headers = {**JSON, "a2a-sidecar-token": TOKEN}
    match binding:
        case "JSONRPC":
            request = {"jsonrpc": "2.0", "id": 1, "method": "GetExtendedAgentCard", "params": {}}
            reply = await http(
                port, "POST", "/", headers=headers, body=json.dumps(request).encode()
            )
            return reply.json()["result"]
        case "HTTP+JSON":
            return (await http(port, "GET", "/extendedAgentCard", headers=headers)).json()
        case _:
            metadata = [("a2a-version", "1.0"), ("a2a-sidecar-token", TOKEN)]
            result = await grpc_call(port, "GetExtendedAgentCard", b"", metadata=metadata)
            return json.loads(convert.proto_to_json("AgentCard", result.messages[0]))


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_tls(door, binding, tls):
    ok = GRPC_OK if binding == "GRPC" else 200
    headers = {"a2a-sidecar-token": TOKEN}
    port = door.secured[binding]
    assert (await door.call(binding, port, headers, tls=tls))[:2] == (ok, "")
    refused = GRPC_UNAUTHENTICATED if binding == "GRPC" else 401
    assert (await door.call(binding, port, tls=tls))[:2] == (refused, "LOCAL_TOKEN")
    context = tls.client_context()
    body = (await http(port, "GET", "/.well-known/agent-card.json", tls=context)).json()
    url = body["supportedInterfaces"][0]["url"]
    assert url == (
        f"127.0.0.1:{port}" if binding == "GRPC" else f"https://127.0.0.1:{port}"
    ) or url.startswith(f"https://127.0.0.1:{port}/")


# --- names and web pages ----------------------------------------------------------------------

PAGES: list[dict[str, str]] = [
    {"host": "evil.test"},
    {"host": "127.0.0.1.evil.test"},
    {"host": "0.0.0.0"},
    {"host": "[::]"},
    {"host": ""},
    {"origin": "http://evil.test"},
    {"origin": "null"},
    {"origin": "http://localhost"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_what_a_page_would_send_is_refused(door, binding):
    before = await door.seen()
    for headers in PAGES:
        status, reason, shown = await door.call(binding, door.plain[binding], headers)
        assert (status, reason) == (403, "FORBIDDEN_ORIGIN"), headers
        assert shown["a2a-sidecar-delivered"] == "no"
        assert not any(name.startswith("access-control-") for name in shown)
    # Cards and preflights are no exception, on any listener.
    for port in (door.plain[binding], door.plain["GRPC"], door.guarded[binding]):
        for method, path in (("GET", "/.well-known/agent-card.json"), ("OPTIONS", "/")):
            reply = await http(port, method, path, headers={"origin": "http://evil.test"})
            assert (reply.status, reason_of(reply)) == (403, "FORBIDDEN_ORIGIN")
    assert await door.seen() == before


@pytest.mark.parametrize(
    "headers",
    [{":authority": "evil.test"}, {"origin": "http://evil.test"}, {"sec-fetch-site": "cross-site"}],
)
async def test_grpc_from_a_page_is_refused(door, headers):
    authority = headers.get(":authority", "localhost")
    more = [pair for pair in headers.items() if pair[0][0] != ":"]
    request = send_pb("hello", "m-1", "")
    before = await door.seen()
    async with grpc_stream(
        door.plain["GRPC"], "SendMessage", request, authority=authority, headers=more
    ) as stream:
        assert await stream.next() is None
        answer = stream.answer()
    assert (answer.status, answer.reason) == (GRPC_PERMISSION_DENIED, "FORBIDDEN_ORIGIN")
    assert await door.seen() == before


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1:1", "[::1]:9", "one.localhost:80", "sidecar.test", "SIDECAR.test:80"],
)
async def test_expected_names(door, host):
    headers = {"host": host, "sec-fetch-site": "none"}
    assert (await door.call("JSONRPC", door.plain["JSONRPC"], headers))[:2] == (200, "")


async def test_a_name_counts_at_the_listener_that_allows_it(door):
    call = door.call("HTTP+JSON", door.plain["HTTP+JSON"], {"host": "sidecar.test"})
    assert (await call)[:2] == (403, "FORBIDDEN_ORIGIN")


async def test_the_admin_address_is_not_for_pages(door):
    for path in ("/metrics", "/healthz", "/readyz", "/status"):
        assert (await http(door.daemon.admin, "GET", path)).status == 200
        for headers in PAGES:
            reply = await http(door.daemon.admin, "GET", path, headers=headers)
            assert reply.status == 403, headers
            assert b"a2a_sidecar" not in reply.body


# --- loops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON", "GRPC"])
async def test_a_loop_ends(door, binding):
    assert (await door.call(binding, door.plain[binding], {"via": "1.1 other"}))[1] == ""
    via = dict((await door.agent.state())["requests"][-1]["headers"])["via"]
    assert via.startswith("1.1 other, 1.1 a2a-sidecar-")
    before = await door.seen()
    status, reason, shown = await door.call(binding, door.plain[binding], {"via": via})
    expected = {"JSONRPC": 200, "HTTP+JSON": 508, "GRPC": GRPC_FAILED_PRECONDITION}[binding]
    assert (status, reason) == (expected, "LOOP")
    assert shown["a2a-sidecar-delivered"] == "no"
    assert await door.seen() == before


async def test_a_card_cannot_point_at_the_sidecar(door, tmp_path):
    port = free_port()
    interfaces = [("JSONRPC", f"http://{host}:{port}/") for host in ("127.0.0.1", "localhost")]
    file = write_card(tmp_path, card(interfaces))
    text = listener(f"127.0.0.1:{port}", "JSONRPC") + f"[agents.a]\ncard = {toml(file)}\n"
    async with sidecar(text + f'[admin]\naddress = "127.0.0.1:{free_port()}"\n') as daemon:
        _, headers, body = await daemon.jsonrpc("SendMessage", message())
        assert body["error"]["data"][0]["reason"] == "NO_ELIGIBLE_INTERFACE"
        assert headers["a2a-sidecar-delivered"] == "no"
        assert "own listeners" in body["error"]["message"]


# --- other machines ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check-config", "run"])
async def test_other_machines_need_a_token_and_a_certificate(tmp_path, command):
    (tmp_path / "token").write_text(TOKEN)
    token = f"file:{tmp_path}/token"
    addresses = ("0.0.0.0:0", "[::]:0", "192.0.2.1:80")
    ways: list[dict[str, Any]] = [
        {},
        {"allow_remote": True},
        {"allow_remote": True, "token": token},
        {"token": token},
    ]
    tables = [listener(one, "JSONRPC", **keys) for one in addresses for keys in ways]
    (tmp_path / "c.toml").write_text("".join(tables))
    argv = [sys.executable, "-m", "sidecar", command, "--config", f"{tmp_path}/c.toml"]
    done = await trio.run_process(argv, check=False, capture_stdout=True, capture_stderr=True)
    assert done.returncode == 1
    said = (done.stdout + done.stderr).decode()
    for number in range(len(tables)):
        assert f"listeners[{number}]" in said
    assert "Traceback" not in said
    assert TOKEN not in said


async def test_other_machines_with_a_token_and_a_certificate(tmp_path, tls, first):
    (tmp_path / "token").write_text(TOKEN)
    file = write_card(tmp_path, card([("JSONRPC", first.urls["JSONRPC"])]))
    port = free_port()
    files = {"tls_cert_file": tls.cert, "tls_key_file": tls.key}
    keys = {"allow_remote": True, "token": f"file:{tmp_path}/token", **files}
    text = (
        listener(f"0.0.0.0:{port}", "JSONRPC", advertise="sidecar.test:443", **keys)
        + f'[admin]\naddress = "127.0.0.1:{free_port()}"\n[agents.a]\ncard = {toml(file)}\n'
    )
    async with sidecar(text, ready=True):
        context = tls.client_context()
        send = partial(http, port, "POST", "/", body=rpc(), tls=context)
        assert (await send(headers=JSON)).status == 401
        headers = {**JSON, "a2a-sidecar-token": TOKEN}
        for host in ("127.0.0.1", "sidecar.test", "0.0.0.0"):
            reply = await send(headers={**headers, "host": host})
            assert (reply.status, reason_of(reply)) == (200, "")
        assert (await send(headers={**headers, "host": "evil.test"})).status == 403
        reply = await http(port, "GET", "/.well-known/agent-card.json", tls=context)
        url = reply.json()["supportedInterfaces"][0]["url"]
        assert url == "https://sidecar.test:443/agents/a"


# --- a real browser ---------------------------------------------------------------------------

PAGE = """<!doctype html><title>page</title><body><script>
const RPC = %(rpc)s, BASES = %(bases)s, REPORT = [];
const settle = (name, promise) => promise.then(
  async r => REPORT.push([name, r.type, r.status, r.type === "opaque" ? "" : await r.text()]),
  e => REPORT.push([name, "error", 0, ""]));
const soon = ms => new Promise(resolve => setTimeout(resolve, ms));
function form(url) {
  const frame = Object.assign(document.createElement("iframe"), {name: "f" + Math.random()});
  const form = Object.assign(document.createElement("form"),
    {action: url, method: "POST", enctype: "text/plain", target: frame.name});
  const field = Object.assign(document.createElement("input"),
    {name: RPC.slice(0, -1) + ',"x":"', value: '"}'});
  form.append(field); document.body.append(frame, form); form.submit();
}
function element(kind, key, url) {
  return new Promise(resolve => {
    const it = document.createElement(kind);
    it.onload = () => { REPORT.push([kind + " " + url, "loaded", 0, ""]); resolve(); };
    it.onerror = () => resolve();
    it[key] = url; document.body.append(it); setTimeout(resolve, 1500);
  });
}
async function attack(base) {
  const type = {"content-type": "application/json", "a2a-version": "1.0"};
  const all = [
    settle(base + " card", fetch(base + "/.well-known/agent-card.json")),
    settle(base + " opaque card", fetch(base + "/.well-known/agent-card.json", {mode: "no-cors"})),
    settle(base + " task", fetch(base + "/tasks/t-1", {mode: "no-cors"})),
    settle(base + " simple post",
      fetch(base + "/", {method: "POST", mode: "no-cors", body: RPC})),
    settle(base + " post", fetch(base + "/", {method: "POST", headers: type, body: RPC})),
    element("img", "src", base + "/tasks/t-1"),
    element("script", "src", base + "/.well-known/agent-card.json"),
    element("iframe", "src", base + "/tasks/t-1"),
  ];
  navigator.sendBeacon(base + "/", RPC);
  form(base + "/");
  try { new EventSource(base + "/tasks/t-1:subscribe"); } catch (e) {}
  try { new WebSocket(base.replace("http", "ws") + "/"); } catch (e) {}
  await Promise.all(all);
}
(async () => {
  for (const base of BASES) await attack(base);
  await soon(300);
  await fetch("/report", {method: "POST", body: JSON.stringify(REPORT)});
})();
</script>"""


class Web:
    """A web server of somebody else: it serves the page, and is attacked itself as a witness."""

    def __init__(self) -> None:
        self.page = b""
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.report: list[list[Any]] | None = None
        self.done = trio.Event()

    async def serve(self, stream: trio.abc.Stream) -> None:
        try:
            with trio.move_on_after(30):
                await self._answer(stream)
        except trio.BrokenResourceError:
            pass
        finally:
            await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.abc.Stream) -> None:
        data = bytearray()
        while b"\r\n\r\n" not in data:
            more = await stream.receive_some()
            if not more:
                return
            data += more
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(body) < int(headers.get("content-length", 0)):
            body += await stream.receive_some()
        method, path, _ = first.split(" ")
        if path == "/report":
            self.report = json.loads(body)
            self.done.set()
        elif path != "/page":
            self.seen.append((method, path, headers))
        content = self.page if path == "/page" else b"{}"
        kind = "text/html" if path == "/page" else "application/json"
        allowed = "access-control-allow-origin: *\r\naccess-control-allow-headers: *\r\n"
        reply = (
            f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n"
            f"{allowed}connection: close\r\n\r\n"
        )
        await stream.send_all(reply.encode() + content)


@asynccontextmanager
async def chromium(*arguments: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A headless browser, in which every name under ``.test`` is this machine."""
    program = requires("chromium", "chromium")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        argv = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP *.test 127.0.0.1, EXCLUDE localhost, EXCLUDE 127.0.0.1",
            *arguments,
        ]
        environment = {**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile}

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

        browser = await trio.to_thread.run_sync(start)
        try:
            yield browser
        finally:
            # Its helpers are in its session, which is ours alone.
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
            assert browser.stdout is not None
            browser.stdout.close()


async def test_a_page_in_a_real_browser_reaches_nothing(door):
    web = Web()
    before = await door.seen()
    async with trio.open_nursery() as nursery:
        (sock,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = sock.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, web.serve, [sock])
        witness = f"http://127.0.0.1:{port}"
        targets = [
            f"http://{host}:{door.plain[binding]}"
            for host in ("127.0.0.1", "localhost")
            for binding in ("JSONRPC", "HTTP+JSON")
        ]
        targets.append(f"http://one.localhost:{door.plain['JSONRPC']}")
        targets.append(f"http://0.0.0.0:{door.plain['HTTP+JSON']}")
        targets.append(f"http://127.0.0.1:{door.plain['GRPC']}")
        values = {"rpc": json.dumps(rpc().decode()), "bases": json.dumps([witness, *targets])}
        web.page = (PAGE % values).encode()
        async with chromium(f"http://evil.test:{port}/page"):
            with trio.fail_after(60):
                await web.done.wait()
        nursery.cancel_scope.cancel()
    # The page did what it could: the witness, which lets pages in, has heard all of it.
    heard = {(method, path) for method, path, _ in web.seen}
    assert heard >= {
        ("GET", "/.well-known/agent-card.json"),
        ("GET", "/tasks/t-1"),
        ("POST", "/"),
        ("GET", "/tasks/t-1:subscribe"),
    }
    assert any(headers.get("upgrade") == "websocket" for _, _, headers in web.seen)
    assert web.report is not None
    readable = [name for name, kind, _, _ in web.report if kind in ("basic", "cors", "loaded")]
    assert any(name.startswith(witness) for name in readable)
    # Of the sidecar it could read nothing, and the agent has not heard of it.
    assert [name for name in readable if witness not in name and "iframe" not in name] == []
    assert await door.seen() == before
    assert (await door.call("JSONRPC", door.plain["JSONRPC"]))[:2] == (200, "")
    assert await door.seen() == before + 1


async def test_a_name_that_comes_to_mean_this_machine(door):
    """DNS rebinding: for the browser page and sidecar have one origin, so only Host tells."""
    port = door.plain["HTTP+JSON"]
    async with chromium(
        "--dump-dom", f"http://evil.test:{port}/.well-known/agent-card.json"
    ) as browser:
        with trio.fail_after(60):
            output = await trio.to_thread.run_sync(browser.communicate, abandon_on_cancel=True)
    shown = output[0].decode()
    assert "FORBIDDEN_ORIGIN" in shown
    assert "supportedInterfaces" not in shown
