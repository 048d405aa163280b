"""Served cards: whoever follows one literally arrives, and nobody is led past the sidecar."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from tests.harness import (
    Peer,
    Sidecar,
    card,
    free_port,
    grpc_call,
    http,
    interface,
    legacy_card,
    message,
    peer,
    peer_sync,
    run_sdk_client,
    sidecar,
    write_card,
)
from tests.peers.mini import pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.interop

WELL_KNOWN = "/.well-known/agent-card.json"
LEGACY_PATH = "/.well-known/agent.json"
SECRET = "10.9.9.9"
"""Stands in upstream cards only."""


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as running:
        yield running


async def fetch(address: int | str, path: str = WELL_KNOWN, **headers: str) -> Any:
    return await http(address, "GET", path, headers=headers)


async def says_hello(**job: Any) -> None:
    """An official client, sent off with `job`, gets its answer."""
    (line,) = await run_sdk_client([{"op": "SendMessage", "request": message("hello")}], **job)
    assert line["result"]["task"]["artifacts"][0]["parts"] == [{"text": "hello"}], line


# --- every interface of every card --------------------------------------------------------------


@asynccontextmanager
async def forwarded(port: int, path: Path) -> AsyncIterator[None]:
    """Connections to `port` go on to the Unix socket at `path`: what stands at `advertise`."""

    async def serve(client: trio.SocketStream) -> None:
        async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            try:
                async for data in source:
                    await sink.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()

        async with await trio.open_unix_socket(str(path)) as server, client:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, client, server)
                nursery.start_soon(copy, server, client)

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_tcp, serve, port, host="127.0.0.1"))
        yield
        nursery.cancel_scope.cancel()


LISTENER = '[[listeners]]\naddress = "{}"\nbinding = "{}"\n{}\n'
ADMIN = '[admin]\naddress = "127.0.0.1:{}"\n'
BINDINGS = ("JSONRPC", "HTTP+JSON", "GRPC")


def key(entry: dict[str, Any], uds: str | None) -> tuple[str, ...]:
    return (entry["url"], entry["protocolBinding"], entry.get("tenant", ""), uds or "")


async def test_every_interface_of_every_served_card_works(agent: Peer, tmp_path: Path) -> None:
    """Through TCP and Unix sockets, shared and of one agent, and through `advertise`."""
    advertised = {binding: free_port() for binding in BINDINGS}
    shared = {binding: free_port() for binding in BINDINGS}
    own = {binding: free_port() for binding in BINDINGS}
    text = ADMIN.format(free_port())
    for binding in BINDINGS:
        slug = binding.replace("+", "-")
        text += LISTENER.format(f"127.0.0.1:{shared[binding]}", binding, "")
        text += LISTENER.format(f"127.0.0.1:{own[binding]}", binding, 'agent = "echo"')
        text += LISTENER.format(f"unix:{tmp_path}/{slug}", binding, "")
        line = f'advertise = "127.0.0.1:{advertised[binding]}"'
        text += LISTENER.format(f"unix:{tmp_path}/{slug}-advertised", binding, line)
    content = card(list(agent.urls.items()))
    text += f'[agents.echo]\ncard = "{write_card(tmp_path, content)}"\n'
    text += f'[agents.second]\ncard = "{write_card(tmp_path, content, "other.json")}"\n'
    jobs: dict[tuple[str, ...], dict[str, Any]] = {}
    async with sidecar(text) as daemon:
        daemon.agents = ["echo"]
        places: list[tuple[int | str, str]] = [(port, "/agents/echo") for port in shared.values()]
        places += [(port, "") for port in own.values()]
        for binding in BINDINGS:
            slug = binding.replace("+", "-")
            places += [(f"unix:{tmp_path}/{slug}", "/agents/echo")]
            places += [(f"unix:{tmp_path}/{slug}-advertised", "/agents/echo")]
        for address, base in places:
            reply = await fetch(address, base + WELL_KNOWN)
            assert reply.status == 200, reply
            served = reply.json()
            entries = served["supportedInterfaces"]
            uds = str(address).removeprefix("unix:") if str(address).startswith("unix:") else None
            # Of the sockets in the file system only those with `advertise` are in others' cards.
            reached_by_uds = uds is not None and "advertised" not in uds
            assert len(entries) == (10 if reached_by_uds else 9), entries
            for number, entry in enumerate(entries):
                through = uds if reached_by_uds and number == 0 else None
                single = {**served, "supportedInterfaces": [entry]}
                job: dict[str, Any] = {"card": single}
                if through:
                    if entry["protocolBinding"] == "GRPC":
                        continue  # the client's gRPC library dials this address, not the socket
                    job["uds"] = through
                jobs[key(entry, through)] = job
        assert len(jobs) == 9 + 2
        async with (
            forwarded(advertised["JSONRPC"], tmp_path / "JSONRPC-advertised"),
            forwarded(advertised["HTTP+JSON"], tmp_path / "HTTP-JSON-advertised"),
            forwarded(advertised["GRPC"], tmp_path / "GRPC-advertised"),
        ):
            limit = trio.CapacityLimiter(2)

            async def follow(job: dict[str, Any]) -> None:
                async with limit:
                    await says_hello(**job)

            async with trio.open_nursery() as nursery:
                for job in jobs.values():
                    nursery.start_soon(follow, job)


async def test_the_one_asked_through_comes_first_under_the_name_it_was_asked(
    agent: Peer, tmp_path: Path
) -> None:
    path = write_card(tmp_path, card([("JSONRPC", agent.urls["JSONRPC"])]))
    async with sidecar(agents={"echo": path}) as daemon:
        for binding in BINDINGS:
            port = daemon.port(binding)
            reply = await fetch(port, f"/agents/echo{WELL_KNOWN}", host=f"localhost:{port}")
            entries = reply.json()["supportedInterfaces"]
            assert entries[0]["protocolBinding"] == binding
            assert f"localhost:{port}" in entries[0]["url"]
            assert all("127.0.0.1:" in entry["url"] for entry in entries[1:])
            (grpc,) = [entry for entry in entries if entry["protocolBinding"] == "GRPC"]
            assert "/" not in grpc["url"]
            assert grpc["tenant"] == "echo"


async def test_an_old_card_is_followed_too(agent: Peer, tmp_path: Path) -> None:
    """A client that reads `url` and its kin arrives like one that reads the list."""
    url = agent.urls["JSONRPC"]
    lying = legacy_card(
        url=url, preferred="GRPC", additional=[("JSONRPC", url), ("GRPC", agent.urls["GRPC"])]
    )
    async with sidecar(agents={"old": write_card(tmp_path, lying)}) as daemon:
        for path in (WELL_KNOWN, LEGACY_PATH):
            reply = await fetch(daemon.port("HTTP+JSON"), path)
            served = reply.json()
            assert served["preferredTransport"] == "HTTP+JSON"
            assert served["url"] == served["supportedInterfaces"][0]["url"]
            named = {(one["transport"], one["url"]) for one in served["additionalInterfaces"]}
            # 0.3 has no tenants, so that the shared gRPC listener is not in it.
            assert {transport for transport, _ in named} == {"JSONRPC", "HTTP+JSON"}
            listed = {
                (one["protocolBinding"], one["url"])
                for one in served["supportedInterfaces"]
                if "tenant" not in one
            }
            assert named == listed
        await says_hello(card=f"http://127.0.0.1:{daemon.port('HTTP+JSON')}/agents/old")


async def test_the_root_is_a_card_when_one_agent_is_meant(agent: Peer, tmp_path: Path) -> None:
    path = write_card(tmp_path, card([("JSONRPC", agent.urls["JSONRPC"])]))
    async with sidecar(agents={"one": path}) as daemon:
        assert (await fetch(daemon.port())).status == 200
    async with sidecar(agents={"one": path, "two": path}) as daemon:
        reply = await fetch(daemon.port())
        assert reply.status == 404
        assert "one" in reply.body.decode()
        assert (await fetch(daemon.port(), f"/agents/two{LEGACY_PATH}")).status == 200


# --- D01, D02, D16: nothing leads past the sidecar ----------------------------------------------


async def test_d01_the_path_of_the_agent_is_not_doubled() -> None:
    async with peer("raw_http") as raw:
        url = f"http://127.0.0.1:{raw.ports['http']}/deep/agent/rpc/"
        await raw.control("config", {"card": card([("JSONRPC", url)])})
        async with sidecar(agents={"deep": f"{raw.card_url}"}) as daemon:
            reply = await fetch(daemon.port(), f"/agents/deep{WELL_KNOWN}")
            served = reply.json()["supportedInterfaces"][0]["url"]
            assert served == f"http://127.0.0.1:{daemon.port()}/agents/deep"
            await raw.script(TASK)
            path = served.partition(f":{daemon.port()}")[2]
            body = rpc("GetTask", {"id": "t-1"})
            answered = await http(daemon.port(), "POST", path, headers=JSON, body=body)
            assert answered.json()["result"]["id"] == "t-1"
            paths = [one["path"] for one in (await raw.state())["requests"] if one["rpc"] or one["method"] == "POST"]  # fmt: skip
            assert paths == ["/deep/agent/rpc/"]


JSON = {"content-type": "application/json", "a2a-version": "1.0"}
TASK = {
    "reply": {
        "body": {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {"id": "t-1", "status": {"state": "TASK_STATE_COMPLETED"}},
        }
    }
}


def rpc(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def hybrid(url: str) -> dict[str, Any]:
    """A card with the members of both versions, signed, with odd members of its own."""
    inside = f"http://{SECRET}:7101/rpc"
    return {
        **legacy_card(
            url=inside,
            preferred="JSONRPC",
            protocol_version="0.3.0",
            additional=[("JSONRPC", inside), ("GRPC", f"{SECRET}:7103")],
        ),
        **card(
            [
                interface("JSONRPC", url, tenant="inner"),
                interface("HTTP+JSON", f"http://{SECRET}:7102"),
                interface("GRPC", f"{SECRET}:7103"),
                interface("slimrpc", f"slim://{SECRET}:46357/org/ns/x"),
            ]
        ),
        "securitySchemes": {"k": {"apiKeySecurityScheme": {"location": "header", "name": "k"}}},
        "securityRequirements": [{"schemes": {"k": {"list": []}}}],
        "signatures": [{"protected": "eyJhbGciOiJFUzI1NiIsImtpZCI6ImsxIn0", "signature": "c2ln"}],
        "documentationUrl": "https://docs.example/agent",
        "iconUrl": "https://docs.example/icon.png",
        "provider": {"url": "https://provider.example", "organization": "P"},
        "x-odd": {"number": 1.50, "nested": [None, True]},
    }


async def test_d02_d16_d86_a_hybrid_card_loses_addresses_and_signatures_only(
    agent: Peer, tmp_path: Path
) -> None:
    content = hybrid(agent.urls["JSONRPC"])
    async with sidecar(agents={"h": write_card(tmp_path, content)}) as daemon:
        for binding in BINDINGS:
            reply = await fetch(daemon.port(binding), f"/agents/h{WELL_KNOWN}")
            text = reply.body.decode()
            assert SECRET not in text
            assert "slim" not in text
            assert '"inner"' not in text
            served = reply.json()
            assert not {"signatures", "securitySchemes", "securityRequirements"} & set(served)
            for name in ("documentationUrl", "iconUrl", "provider", "x-odd", "skills", "name"):
                assert served[name] == content[name]
            assert '"number":1.5' in text.replace(" ", "")


async def test_a_listener_with_a_token_says_so_in_its_card(agent: Peer, tmp_path: Path) -> None:
    path = write_card(tmp_path, hybrid(agent.urls["JSONRPC"]))
    text = ADMIN.format(free_port())
    port = free_port()
    text += LISTENER.format(f"127.0.0.1:{port}", "JSONRPC", 'token = "env:LOCAL_TOKEN"')
    text += f'[agents.h]\ncard = "{path}"\n'
    async with sidecar(text, env={"LOCAL_TOKEN": "local-t0ken"}):
        reply = await fetch(port)
        assert reply.status == 200  # a client must read here how to authenticate
        (name,) = reply.json()["securitySchemes"]
        scheme = reply.json()["securitySchemes"][name]
        assert scheme == {"httpAuthSecurityScheme": {"scheme": "Bearer"}}
        assert reply.json()["securityRequirements"] == [{"schemes": {name: {"list": []}}}]


# --- D17: validators ----------------------------------------------------------------------------


async def test_d17_own_validators_downstream_and_the_agents_upstream() -> None:
    async with peer("raw_http") as raw:
        content = card([("JSONRPC", raw.urls["JSONRPC"])])
        fresh = {"headers": [["etag", '"u1"'], ["cache-control", "max-age=7"], ["last-modified", LAST]]}  # fmt: skip
        await raw.script(
            {"reply": {"body": content, **fresh}},
            *[{"reply": {"status": 304, "headers": [["etag", '"u1"']]}}] * 3,
            {"reply": {"body": {**content, "name": "new"}, "headers": [["etag", '"u2"']]}},
        )
        async with sidecar(agents={"a": raw.card_url}, ready=True) as daemon:
            first = await fetch(daemon.port())
            assert first.status == 200
            etag = first.get("etag")
            assert etag not in {None, '"u1"'}
            assert first.get("last-modified") == LAST
            assert first.get("cache-control").startswith("max-age=")
            again = await fetch(daemon.port(), WELL_KNOWN, **{"if-none-match": etag})
            assert (again.status, again.body, again.get("etag")) == (304, b"", etag)
            # another listener gives another representation
            other = await fetch(daemon.port("HTTP+JSON"))
            assert other.get("etag") != etag
            new = await fetch(daemon.port(), WELL_KNOWN, **{"if-none-match": etag})
            assert new.status == 200
            assert new.json()["name"] == "new"
            asked = [dict(one["headers"]) for one in (await raw.state())["requests"]]
            assert [one.get("if-none-match") for one in asked] == [None, *['"u1"'] * 4]
            metric = await daemon.metric("a2a_sidecar_card_fetches_total", result="not_modified")
            assert metric == 3


LAST = "Wed, 05 Aug 2026 10:00:00 GMT"


async def test_requests_share_a_fetch_that_began_after_them() -> None:
    async with peer("raw_http") as raw:
        content = card([("JSONRPC", raw.urls["JSONRPC"])])
        await raw.control("config", {"card": content})
        async with sidecar(agents={"a": raw.card_url}, ready=True) as daemon:
            await raw.script([{"gate": "first"}, "default"])
            before = len((await raw.state())["requests"])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch, daemon.port())
                await raw.until(lambda state: len(state["requests"]) > before)
                await raw.control("config", {"card": {**content, "name": "newer"}})
                names: list[str] = []

                async def late() -> None:
                    names.append((await fetch(daemon.port())).json()["name"])

                for _ in range(5):
                    nursery.start_soon(late)
                await trio.sleep(0.2)
                await raw.control("open", {"gate": "first"})
            assert names == ["newer"] * 5
            assert len((await raw.state())["requests"]) == before + 2


async def test_head_and_other_methods(agent: Peer, tmp_path: Path) -> None:
    path = write_card(tmp_path, card([("JSONRPC", agent.urls["JSONRPC"])]))
    async with sidecar(agents={"a": path}) as daemon:
        got = await fetch(daemon.port())
        head = await http(daemon.port(), "HEAD", WELL_KNOWN)
        assert (head.status, head.body) == (200, b"")
        assert head.get("etag") == got.get("etag")
        posted = await http(daemon.port(), "PUT", WELL_KNOWN)
        assert (posted.status, posted.get("allow")) == (405, "GET, HEAD")


# --- no card to be had --------------------------------------------------------------------------


async def error_of(daemon: Sidecar, binding: str, path: str = WELL_KNOWN) -> tuple[int, Any]:
    reply = await fetch(daemon.port(binding), path)
    assert reply.get("content-type") == "application/json"
    assert reply.get("cache-control") == "no-store"
    return reply.status, reply.json()["error"]


async def test_never_a_stale_card_but_an_error_in_json(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        async with sidecar(agents={"a": raw.card_url}, ready=True) as daemon:
            assert (await fetch(daemon.port())).status == 200
            broken = [
                ({"status": 500, "body": "no"}, "answered 500"),
                ({"status": 200, "body": "<html>", "headers": [["content-type", "text/html"]]}, "web page"),
                ({"status": 200, "body": {"supportedInterfaces": []}}, "no interface that can be used"),
            ]  # fmt: skip
            for reply, words in broken:
                await raw.control("clear")
                await raw.script({"reply": reply})
                status, error = await error_of(daemon, BINDINGS[len(words) % 3])
                assert (status, error["code"]) == (502, 502)
                assert words in error["message"]
                (info,) = error["details"]
                assert info["domain"] == "a2a-sidecar"
                assert info["metadata"] == {"agent": "a", "delivered": "no"}
            # calls go on with the card that was known
            _, headers, _ = await daemon.jsonrpc("GetTask", {"id": "nowhere"})
            assert headers["a2a-sidecar-interface"] == "0-jsonrpc"
            assert (await fetch(daemon.port())).status == 200


async def test_disabled_and_unknown_agents_have_no_card(agent: Peer, tmp_path: Path) -> None:
    path = write_card(tmp_path, card([("JSONRPC", agent.urls["JSONRPC"])]))
    agents = {"off": {"card": str(path), "enabled": False}, "on": {"card": str(path)}}
    async with sidecar(agents=agents) as daemon:
        status, error = await error_of(daemon, "JSONRPC", f"/agents/off{WELL_KNOWN}")
        assert (status, error["details"][0]["reason"]) == (503, "AGENT_DISABLED")
        assert (await fetch(daemon.port(), f"/agents/none{WELL_KNOWN}")).status == 404


# --- D19: the extended card ---------------------------------------------------------------------


def extended(skill: str) -> dict[str, Any]:
    result = {
        **hybrid(f"http://{SECRET}:1/rpc"),
        "skills": [{"id": skill, "name": skill, "description": skill, "tags": [skill]}],
    }
    del result["x-odd"]
    return result


def answer(skill: str) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "result": extended(skill)}
    return {"rpc": "GetExtendedAgentCard", "steps": [{"reply": {"body": body}}]}


async def test_d19_each_caller_gets_its_own_rewritten_extended_card(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        path = write_card(tmp_path, card([("JSONRPC", raw.urls["JSONRPC"])]))
        async with sidecar(agents={"a": path}, ready=True) as daemon:
            for token in ("anna", "bert"):
                await raw.script(*[answer(f"for-{token}")] * 3)
                header = {"authorization": f"Bearer {token}"}
                _, _, one = await daemon.jsonrpc("GetExtendedAgentCard", {}, headers=header)
                _, _, two = await daemon.rest("GET", "/extendedAgentCard", headers=header)
                metadata = [("authorization", f"Bearer {token}")]
                three = await grpc_call(
                    daemon.port("GRPC"), "GetExtendedAgentCard", pb(1, "a"), metadata=metadata
                )
                for number, seen in enumerate((one["result"], two)):
                    assert SECRET not in json.dumps(seen)
                    assert seen["skills"][0]["id"] == f"for-{token}"
                    entries = seen["supportedInterfaces"]
                    assert entries[0]["protocolBinding"] == BINDINGS[number]
                    assert "signatures" not in seen
                assert three.code == 0
                (data,) = three.messages
                assert SECRET.encode() not in data
                assert f"for-{token}".encode() in data
            sent = [
                dict(request["headers"])["authorization"]
                for request in (await raw.state())["requests"]
                if request["rpc"] == "GetExtendedAgentCard"
            ]
            assert sent == ["Bearer anna"] * 3 + ["Bearer bert"] * 3


async def test_d19_what_the_agent_answers_instead_of_a_card(tmp_path: Path) -> None:
    async with peer("raw_http") as raw:
        path = write_card(tmp_path, card([("JSONRPC", raw.urls["JSONRPC"])]))
        async with sidecar(agents={"a": path}, ready=True) as daemon:
            for code, http_status in ((-32004, 400), (-32007, 400)):
                error = {"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "no"}}
                await raw.script(*[{"reply": {"body": error}}] * 3)
                _, _, one = await daemon.jsonrpc("GetExtendedAgentCard", {})
                assert one["error"]["code"] == code
                status, _, _ = await daemon.rest("GET", "/extendedAgentCard")
                assert status == http_status
                three = await grpc_call(daemon.port("GRPC"), "GetExtendedAgentCard", pb(1, "a"))
                assert three.code == 9


async def test_an_extended_card_that_cannot_be_read_is_an_error_and_no_leak(tmp_path: Path) -> None:
    deep: Any = SECRET
    for _ in range(80):
        deep = [deep]
    body = {"jsonrpc": "2.0", "id": 1, "result": {"name": "x", "supportedInterfaces": deep}}
    async with peer("raw_http") as raw:
        path = write_card(tmp_path, card([("JSONRPC", raw.urls["JSONRPC"])]))
        async with sidecar(agents={"a": path}, ready=True) as daemon:
            await raw.script({"reply": {"body": body}})
            _, headers, found = await daemon.jsonrpc("GetExtendedAgentCard", {})
            assert found["error"]["code"] == -32603
            assert headers["a2a-sidecar-delivered"] == "unknown"
            assert SECRET not in json.dumps(found)
