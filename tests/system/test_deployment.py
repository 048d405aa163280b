"""What the pages on deployment say: their configurations work, the tutorial's leads to an answer."""

from __future__ import annotations

import re
import ssl
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from sidecar import config
from tests.harness import Process, card, free_port, http, requires, running, sidecar
from tests.system.sites import json_answer, result_of, site
from tests.system.world import RemoteAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import TlsFiles
    from tests.system.sites import Answer, Asked

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PAGES = ["tutorial", "systemd", "kubernetes", "envoy", "operations"]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def manifest(name: str) -> str:
    """A file of the manifest's ConfigMap."""
    lines = page("kubernetes").partition(f"  {name}: |\n")[2].splitlines()
    found: list[str] = []
    for line in lines:
        if line and not line.startswith("    "):
            break
        found.append(line.removeprefix("    "))
    return "\n".join([*found, ""])


def configurations() -> Iterator[tuple[str, str]]:
    for name in PAGES:
        for number, text in enumerate(blocks(page(name), "toml")):
            yield f"{name}-{number}", text
    yield "kubernetes", manifest("config.toml")


@pytest.mark.parametrize(("name", "text"), list(configurations()), ids=lambda one: one[:20])
def test_every_configuration_is_one(tmp_path: Path, name: str, text: str) -> None:
    """Pieces of one are completed; the files that they name are made."""
    for path in re.findall(r'"(?:file:)?(/(?:etc|run)/[^"]+)"', text):
        local = tmp_path / path.replace("/", "_")
        local.write_text("x", "utf-8")
        text = text.replace(path, str(local))
    agents = tomllib.loads(text).get("agents", {})
    if any("card" not in agent for agent in agents.values()):
        text = '[agents.weather]\ncard = "https://weather.test"\n' + text
    file = tmp_path / f"{name}.toml"
    file.write_text(text, "utf-8")
    loaded = config.load(file)
    assert loaded.agents or loaded.listeners


async def test_the_tutorial_leads_to_an_answer(tmp_path: Path, tls: TlsFiles) -> None:
    """OAuth for the token, mTLS to the agent: the page's configuration with other hosts and files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    wants_ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wants_ours.load_cert_chain(tls.cert, tls.key)
    wants_ours.load_verify_locations(tls.ca)
    wants_ours.verify_mode = ssl.CERT_REQUIRED
    (text,) = blocks(page("tutorial").partition("<!-- the tutorial's configuration -->")[2], "toml")
    (tmp_path / "weather-client-id").write_text("my-client-id\n", "utf-8")
    (tmp_path / "weather-client-secret").write_text("s3cret\n", "utf-8")
    files = {"weather-ca.pem": tls.ca, "client.pem": tls.client_cert, "client.key": tls.client_key}
    for name, file in files.items():
        (tmp_path / name).write_bytes(file.read_bytes())

    def token(asked: Asked) -> Answer:
        assert b"scope=weather.read" in asked.body
        return json_answer({"access_token": "t0ken", "token_type": "Bearer", "expires_in": 3600})

    with site(tls=context) as login, site("localhost", tls=wants_ours) as agent:
        login.routes["/oauth/token"] = token
        content = card([("JSONRPC", f"{agent.url}/rpc")])
        agent.routes["/.well-known/agent-card.json"] = lambda _: json_answer(content)
        agent.routes["/rpc"] = result_of
        for old, new in {
            "https://weather.example.com": agent.url,
            "https://login.example.com": login.url,
            "/etc/a2a-sidecar": str(tmp_path),
            "127.0.0.1:7420": f"127.0.0.1:{free_port()}",
        }.items():
            assert old in text
            text = text.replace(old, new)
        admin = f'[admin]\naddress = "127.0.0.1:{free_port()}"\n'
        async with sidecar(text + admin, ready=True) as daemon:
            answer = await RemoteAgent(daemon, "weather").send()
            assert answer.interface == "0-jsonrpc"
            assert answer.body["result"]["message"]["parts"] == [{"text": "ok"}]
        (call,) = agent.at("/rpc")
        assert call.headers["authorization"] == "Bearer t0ken"
        assert call.certificate["subjectAltName"] == (("email", "client@example.org"),)
        assert all(one.certificate for one in agent.asked)
        assert not any(one.certificate for one in login.asked)


async def test_the_manifests_relay_passes_metrics_on(tmp_path: Path) -> None:
    """Prometheus asks under the pod's address, which the admin address would refuse."""
    nginx = requires("nginx", "nginx-light")
    port = free_port()
    async with sidecar(agents={}) as daemon:
        text = manifest("nginx.conf")
        for old, new in {
            "127.0.0.1:7429": daemon.admin,
            "listen 9429": f"listen 127.0.0.1:{port}",
            "/tmp/nginx.pid": f"{tmp_path}/nginx.pid",
        }.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "nginx.conf").write_text(text, "utf-8")
        argv = [nginx, "-p", str(tmp_path), "-c", f"{tmp_path}/nginx.conf", "-g", "daemon off;"]
        async with running(Process("nginx", argv)):
            reply = 0
            with trio.fail_after(10):
                while not reply:
                    try:
                        reply = await ask(port, "/metrics")
                    except OSError:
                        await trio.sleep(0.05)
            assert reply == 200
            assert await ask(port, "/readyz") == 200
            assert await ask(port, "/status") == 404
        assert (await http(daemon.admin, "GET", "/metrics", headers=POD)).status == 403


POD = {"host": "10.1.2.3:9429"}


async def ask(port: int, path: str) -> int:
    return (await http(port, "GET", path, headers=POD)).status
