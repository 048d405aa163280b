"""Cards as they are found in the world; each test has the number of its case.

The rules of single modules are tested with them (tests/core/test_card*.py, test_discovery.py); here
it is seen that the daemon as a whole lives with such a card.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Peer,
    Sidecar,
    TlsFiles,
    card,
    grpc_call,
    http,
    interface,
    legacy_card,
    peer,
    sidecar,
    write_card,
)
from tests.peers.mini import pb

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.interop

WELL_KNOWN = "/.well-known/agent-card.json"
LEGACY = "/.well-known/agent.json"
TASK_NOT_FOUND = -32001
QUICK = {"refresh_cooldown_seconds": 0.1}


async def ask(daemon: Sidecar, agent: str | None = None, **headers: str) -> tuple[str, int]:
    """GetTask for nobody's task: the interface that answered, and the code of its error."""
    params = {"id": "nowhere"}
    _, fields, body = await daemon.jsonrpc("GetTask", params, headers=headers, agent=agent)
    return fields.get("a2a-sidecar-interface", ""), body["error"]["code"]


async def reasons(daemon: Sidecar) -> dict[int, str]:
    status = await daemon.status()
    (found,) = status["agents"].values()
    return {entry["position"]: entry["reason"] for entry in found["ineligible"]}


async def fetches(raw: Peer) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = (await raw.state())["requests"]
    return [one for one in requests if one["method"] == "GET" and "/tasks/" not in one["path"]]


def reply(body: Any, *headers: tuple[str, str], status: int = 200) -> dict[str, Any]:
    fields = [list(pair) for pair in headers or [("content-type", "application/json")]]
    return {"reply": {"status": status, "body": body, "headers": fields}}


def own_card(raw: Peer) -> dict[str, Any]:
    return card([("JSONRPC", raw.urls["JSONRPC"])])


def host(raw: Peer) -> str:
    return f"http://127.0.0.1:{raw.ports['http']}"


# --- where the card is --------------------------------------------------------------------------


async def test_d03_a_complete_card_url_is_asked_for_as_it_is() -> None:
    async with peer("raw_http") as raw:
        await raw.script(reply(own_card(raw)))
        async with sidecar(agents={"a": f"{host(raw)}/x/y/my-card.json?rev=3"}, ready=True):
            asked = [(one["method"], one["path"]) for one in (await raw.state())["requests"]]
            assert asked == [("GET", "/x/y/my-card.json?rev=3")]


async def test_d85_the_old_path_is_tried_when_the_new_one_is_absent() -> None:
    async with peer("raw_http") as raw:
        old = legacy_card(url=raw.urls["JSONRPC"])
        await raw.script(reply("no", status=404), reply(old))
        async with sidecar(agents={"a": host(raw)}, ready=True) as daemon:
            assert [one["path"] for one in await fetches(raw)] == [WELL_KNOWN, LEGACY]
            assert await ask(daemon) == ("0-jsonrpc", TASK_NOT_FOUND)


@pytest.mark.parametrize(
    "answer",
    [reply("no", status=403), reply("<html>", ("content-type", "text/html"))],
    ids=["403", "web page"],
)
async def test_d85_what_is_forbidden_or_garbage_is_not_absent(answer: dict[str, Any]) -> None:
    async with peer("raw_http") as raw:
        await raw.script(*[answer] * 50)
        async with sidecar(agents={"a": host(raw)}) as daemon:
            await raw.until(lambda state: len(state["requests"]) >= 1)
            assert (await ask(daemon))[1] == -32603
            assert {one["path"] for one in await fetches(raw)} == {WELL_KNOWN}


async def test_d15_redirects_stay_within_the_origin() -> None:
    async with peer("raw_http") as raw, peer("raw_http") as elsewhere:
        await raw.script(
            {"redirect": 302, "location": "/other.json"},
            reply(own_card(raw)),
        )
        async with sidecar(agents={"a": {"card": host(raw), **QUICK}}, ready=True) as daemon:
            away = [f"{host(elsewhere)}/other.json", "http://169.254.169.254/latest/"]
            for location in away:
                await raw.script({"redirect": 302, "location": location})
                answer = await http(daemon.port(), "GET", WELL_KNOWN)
                assert answer.status == 502
                assert "redirects to another origin" in answer.json()["error"]["message"]
            before = len(await fetches(raw))
            await raw.script(*[{"redirect": 302, "location": "/round"}] * 20)
            answer = await http(daemon.port(), "GET", WELL_KNOWN)
            assert "redirects more than" in answer.json()["error"]["message"]
            assert len(await fetches(raw)) - before <= 7
            assert (await elsewhere.state())["requests"] == []


# --- fetching it --------------------------------------------------------------------------------


async def test_d06_the_card_is_fetched_with_its_own_credentials(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        await raw.script(reply(own_card(raw)))
        keys = {"card": host(raw), "discovery_auth": {"bearer": "env:CARD_TOKEN"}, **QUICK}
        env = {"CARD_TOKEN": "card-t0ken"}
        async with sidecar(agents={"a": keys}, env=env, ready=True) as daemon:
            (first,) = await fetches(raw)
            assert ["authorization", "Bearer card-t0ken"] in first["headers"]
            # Calls have credentials of their own, here none.
            await ask(daemon)
            calls = [one for one in (await raw.state())["requests"] if one["rpc"] == "GetTask"]
            assert all("authorization" not in dict(one["headers"]) for one in calls)
            # It is revoked: one clear condition, no storm, and the known card goes on.
            unauthorized = reply("", ("www-authenticate", "Bearer"), status=401)
            await raw.script(*[unauthorized] * 100)
            answer = await http(daemon.port(), "GET", WELL_KNOWN)
            assert "401" in answer.json()["error"]["message"]
            before = len(await fetches(raw))
            await trio.sleep(1)
            assert len(await fetches(raw)) - before <= 4
            assert (await ask(daemon))[0] == "0-jsonrpc"
            metrics = (await http(daemon.admin, "GET", "/metrics")).body.decode()
            status = json.dumps(await daemon.status())
            assert "card-t0ken" not in daemon.log() + metrics + status


async def test_d14_a_body_without_bound_is_not_read() -> None:
    async with peer("raw_http") as raw:
        await raw.script(reply(own_card(raw)))
        async with sidecar(agents={"a": host(raw)}, ready=True) as daemon:
            bomb = base64.b64encode(gzip.compress(b"x" * 50_000_000)).decode()
            huge = "HTTP/1.1 200 OK\r\ncontent-length: 5000000000\r\n\r\n" + "x" * 1000
            packed = {"base64": bomb, "headers": [["content-encoding", "gzip"]]}
            for answer in ([{"send": huge}, "hang"], {"reply": packed}):
                await raw.script(answer)
                refused = await http(daemon.port(), "GET", WELL_KNOWN)
                assert refused.status == 502
                assert "too large" in refused.json()["error"]["message"]
            assert peak_memory(daemon) < 120 * 1024 * 1024
            assert (await ask(daemon))[0] == "0-jsonrpc"


def peak_memory(daemon: Sidecar) -> int:
    """The most that the process had in memory, in bytes."""
    with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024


async def test_d18_json_is_asked_for_and_a_web_page_is_named() -> None:
    async with peer("raw_http") as raw:
        text = json.dumps(own_card(raw))
        await raw.script(reply(text, ("content-type", "text/plain; charset=utf-8")))
        async with sidecar(agents={"a": host(raw)}, ready=True) as daemon:
            (first,) = await fetches(raw)
            accept = dict(first["headers"])["accept"]
            assert accept.startswith("application/json")
            assert "application/a2a+json" in accept
            await raw.script(reply("<html>sign in</html>", ("content-type", "text/html")))
            answer = await http(daemon.port(), "GET", WELL_KNOWN)
            message = answer.json()["error"]["message"]
            for word in ("200", "text/html", f"{host(raw)}{WELL_KNOWN}"):
                assert word in message
            assert (await ask(daemon))[0] == "0-jsonrpc"


# --- addresses ----------------------------------------------------------------------------------


async def test_d04_wildcards_are_dialled_and_this_sidecar_is_not(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        wildcard = card([("JSONRPC", f"http://0.0.0.0:{raw.ports['http']}/rpc")])
        path = write_card(tmp_path, wildcard)
        async with sidecar(agents={"a": {"card": str(path), **QUICK}}, ready=True) as daemon:
            assert await ask(daemon) == ("0-jsonrpc", TASK_NOT_FOUND)
            ipv6_only = card([("JSONRPC", f"http://[::]:{raw.ports['http']}/rpc")])
            path.write_text(json.dumps(ipv6_only))
            assert (await http(daemon.port(), "GET", WELL_KNOWN)).status == 200
            _, headers, body = await daemon.jsonrpc("GetTask", {"id": "x"})
            assert headers["a2a-sidecar-delivered"] == "no"
            assert f"[::]:{raw.ports['http']}" in json.dumps(body)
            # a card that leads back here is not used at all
            for name in ("0.0.0.0", "[::]", "localhost", "127.0.0.1"):
                loop = card([("JSONRPC", f"http://{name}:{daemon.port()}/agents/a")])
                path.write_text(json.dumps(loop))
                refused = await http(daemon.port(), "GET", WELL_KNOWN)
                assert refused.status == 502
                assert "own listeners" in refused.json()["error"]["message"]


async def test_d05_a_relative_url_is_passed_over(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        content = card([("JSONRPC", "/rpc"), ("JSONRPC", raw.urls["JSONRPC"])])
        async with sidecar(agents={"a": write_card(tmp_path, content)}, ready=True) as daemon:
            assert await ask(daemon) == ("1-jsonrpc", TASK_NOT_FOUND)
            assert "not an absolute http or https url" in (await reasons(daemon))[0]
            assert "not an absolute" in daemon.log()


async def test_d12_a_grpc_address_is_host_and_port(tmp_path: Path, tls: TlsFiles) -> None:
    """Without a scheme it is TLS, and that is to be seen."""
    async with peer("grpc_generic", *tls.peer_args) as agent:
        agents: dict[str, Any] = {}
        for name in ("127.0.0.1", "localhost"):
            path = write_card(tmp_path, card([("GRPC", f"{name}:{agent.ports['grpc']}")]), name)
            agents[f"a-{len(name)}"] = {"card": str(path), "tls": {"ca_file": str(tls.ca)}}
        async with sidecar(agents=agents, ready=True) as daemon:
            for name, status in (await daemon.status())["agents"].items():
                assert await ask(daemon, name) == ("0-grpc", TASK_NOT_FOUND)
                assert [one["tls"] for one in status["candidates"]] == [True]


# --- versions and bindings ----------------------------------------------------------------------


async def test_d07_a_missing_version_is_1_0_and_said_once(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        content = own_card(raw)
        del content["supportedInterfaces"][0]["protocolVersion"]
        async with sidecar(agents={"a": write_card(tmp_path, content)}, ready=True) as daemon:
            await http(daemon.port(), "GET", WELL_KNOWN)
            message = {
                "message": {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "hi"}]}
            }
            await daemon.jsonrpc("SendMessage", message)
            state = await raw.state()
            assert state["order"] == ["m-1"]
            versions = [dict(one["headers"]).get("a2a-version") for one in state["requests"]]
            assert versions == ["1.0"]
            assert daemon.log().count("1.0 is assumed") == 1


async def test_d08_patch_numbers_do_not_count(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        agents = {}
        for number, version in enumerate(["1.0.0", "1.0.7", " 1.0", "1"]):
            content = card([interface("JSONRPC", raw.urls["JSONRPC"], version=version)])
            agents[f"a{number}"] = write_card(tmp_path, content, f"{number}.json")
        async with sidecar(agents=agents, ready=True) as daemon:
            for name in agents:
                answer = await ask(daemon, name, **{"a2a-version": "1.0.0"})
                assert answer == ("0-jsonrpc", TASK_NOT_FOUND), name
            requests = (await raw.state())["requests"]
            sent = [[v for n, v in one["headers"] if n == "a2a-version"] for one in requests]
            assert sent == [["1.0"]] * 4


async def test_d09_binding_and_version_are_one_choice(tmp_path: Path) -> None:
    async with peer("raw_http") as old, peer("raw_http") as new:
        entries = [
            interface("JSONRPC", f"{host(old)}/old", version="0.3"),
            interface("HTTP+JSON", host(new)),
        ]
        async with sidecar(agents={"a": write_card(tmp_path, card(entries))}, ready=True) as daemon:
            assert await ask(daemon) == ("1-http_json", TASK_NOT_FOUND)
            assert (await old.state())["requests"] == []
            assert "0.3" in (await reasons(daemon))[0]


async def test_d10_spellings_of_bindings(tmp_path: Path) -> None:
    spellings = {
        "JSONRPC": ["jsonrpc", "JsonRpc", "JSON-RPC"],
        "HTTP+JSON": ["http+json", "HTTP_JSON", "REST"],
    }
    labels = {"JSONRPC": "0-jsonrpc", "HTTP+JSON": "0-http_json"}
    async with peer("raw_http") as raw:
        agents: dict[str, Any] = {}
        expected = {}
        for binding, names in spellings.items():
            for name in names:
                # Whoever does not know the name would use the second.
                content = card([(name, raw.urls[binding]), ("JSONRPC", raw.urls["JSONRPC"])])
                agent = f"a{len(agents)}"
                agents[agent] = write_card(tmp_path, content, f"{agent}.json")
                expected[agent] = labels[binding]
        async with sidecar(agents=agents, ready=True) as daemon:
            for agent, label in expected.items():
                assert await ask(daemon, agent) == (label, TASK_NOT_FOUND), agent
                seen = {"agent": agent, "interface": label, "result": "a2a_error"}
                assert await daemon.metric("a2a_sidecar_attempts_total", **seen) == 1


async def test_d11_the_first_of_equals_is_used_and_duplicates_are_one(tmp_path: Path) -> None:
    async with peer("raw_http") as first, peer("raw_http") as second:
        urls = [first.urls["JSONRPC"], first.urls["JSONRPC"], second.urls["JSONRPC"]]
        content = card([("JSONRPC", url) for url in urls])
        async with sidecar(agents={"a": write_card(tmp_path, content)}, ready=True) as daemon:
            for _ in range(5):
                assert (await ask(daemon))[0] == "0-jsonrpc"
            assert (await second.state())["requests"] == []
            assert await reasons(daemon) == {1: "same as entry 0"}
            first.kill()
            for _ in range(3):
                assert (await ask(daemon))[0] == "2-jsonrpc"
            assert len((await second.state())["requests"]) == 3


async def test_d86_foreign_entries_do_not_hide_a_good_one(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        content = card([])
        content["supportedInterfaces"] = [
            interface("slimrpc", "slim://127.0.0.1:46357/org/ns/x"),
            interface("https://example.test/bindings/ws/v1", "wss://127.0.0.1/ws"),
            {"protocolBinding": "JSONRPC"},
            {"url": 7101, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"},
            None,
            interface("JSONRPC", raw.urls["JSONRPC"]),
        ]
        async with sidecar(agents={"a": write_card(tmp_path, content)}, ready=True) as daemon:
            assert await ask(daemon) == ("5-jsonrpc", TASK_NOT_FOUND)
            assert set(await reasons(daemon)) == {0, 1, 2, 3, 4}
            lines = [line for line in daemon.log().splitlines() if "interface not used" in line]
            assert len(lines) == 5


# --- nothing to use -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        {"name": "x", "supportedInterfaces": []},
        {"name": "x"},
        {"name": "x", "url": "wss://127.0.0.1:7109", "preferredTransport": "https://example.test/ws"},
        card([interface("https://example.test/bindings/ws/v1", "wss://127.0.0.1:7109")]),
    ],
    ids=["empty list", "neither form", "old foreign", "foreign"],
)  # fmt: skip
async def test_d13_no_usable_interface_is_said_at_once_and_ends_with_the_card(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    async with peer("raw_http") as raw:
        path = write_card(tmp_path, content)
        async with sidecar(agents={"a": {"card": str(path), **QUICK}}) as daemon:
            with trio.fail_after(5):
                while (await daemon.status())["agents"]["a"]["card_error"] is None:  # noqa: ASYNC110
                    await trio.sleep(0.02)
            began = trio.current_time()
            _, _, one = await daemon.jsonrpc("GetTask", {"id": "x"})
            status, _, two = await daemon.rest("GET", "/tasks/x")
            three = await grpc_call(daemon.port("GRPC"), "GetTask", pb(1, "a") + pb(2, "x"))
            assert trio.current_time() - began < 3
            assert one["error"]["code"] == -32603
            assert (status, three.code) == (503, 14)
            allowed = {"NO_ELIGIBLE_INTERFACE", "CARD_UNAVAILABLE"}
            assert {
                one["error"]["data"][0]["reason"],
                two["error"]["details"][0]["reason"],
            } <= allowed
            ready = await daemon.readyz()
            assert ready.status == 503
            assert b"agent a" in ready.body
            path.write_text(json.dumps(own_card(raw)))
            await daemon.wait_ready()
            assert await ask(daemon) == ("0-jsonrpc", TASK_NOT_FOUND)
