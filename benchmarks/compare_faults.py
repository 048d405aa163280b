"""The same faults put to this sidecar and to LiteLLM's A2A gateway: executions, and what is told.

    python benchmarks/compare_faults.py --litellm VENV/bin/litellm

The other gateway is installed apart (``pip install 'litellm[proxy]' a2a-sdk``). Both get the same cards:
a JSON-RPC interface that misbehaves, and an HTTP+JSON one that works. Each call is made once, by a
client that repeats nothing. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tests.harness import (
    Peer,
    Process,
    card,
    config_text,
    free_port,
    http,
    message,
    peer,
    running,
    sidecar,
)

KEY = "sk-comparison"
HTML = {"status": 404, "headers": [["content-type", "text/html"]], "body": "<h1>Not Found</h1>"}
TASK = {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"}}
RESULT = {"jsonrpc": "2.0", "id": 1, "result": {"task": TASK}}


def rpc_error(code: int) -> dict[str, Any]:
    return {
        "reply": {"body": {"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": "no"}}}
    }


# What the first interface does: its script, or that it refuses connections.
FAULTS: dict[str, list[Any] | str] = {
    "connection refused": "closed",
    "404 with HTML": [{"reply": HTML}],
    "415": [{"reply": {"status": 415, "headers": [], "body": ""}}],
    "method not found (-32601)": [rpc_error(-32601)],
    "A2A error (-32002)": [rpc_error(-32002)],
    "429": [{"reply": {"status": 429, "headers": [["retry-after", "1"]], "body": "slow down"}}],
    "307 inside the origin": [{"redirect": 307, "location": "/"}],
    "307 to another origin": [{"redirect": 307, "location": "http://{spare}/rpc"}],
    "runs, then 502": ["execute", {"reply": {"status": 502, "headers": [], "body": "bad gateway"}}],
    "runs, then 503": ["execute", {"reply": {"status": 503, "headers": [], "body": "busy"}}],
    "runs, then closes": ["execute", "close"],
    "runs, then resets": ["execute", "reset"],
    "runs, then half a reply": [{"default": {"bytes": 150}}, "close"],
    "runs, then HTML": ["execute", {"reply": {**HTML, "status": 200}}],
    "17 interim replies": ["execute", *[{"interim": 102}] * 17, {"reply": {"body": RESULT}}],
}


@dataclass
class Seen:
    """What came of one call."""

    executions: int
    told: str


def short(text: str, most: int = 90) -> str:
    """One line for the table."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= most else line[: most - 1] + "…"


async def ask(address: int | str, path: str, id_: str, headers: dict[str, str]) -> tuple[int, Any]:
    """SendMessage by JSON-RPC."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message("hello", id_)}
    head = {"content-type": "application/json", "a2a-version": "1.0", **headers}
    reply = await http(
        address, "POST", path, headers=head, body=json.dumps(body).encode(), seconds=120
    )
    try:
        return reply.status, reply.json()
    except ValueError:
        return reply.status, reply.body.decode("utf-8", "replace")


def told(status: int, body: Any) -> str:
    """What the caller learns."""
    if isinstance(body, dict) and "result" in body:
        return "answered"
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return f"HTTP {status}: {error}"
    data = error.get("data") or [{}]
    metadata = data[0].get("metadata", {}) if isinstance(data, list) else {}
    known = f", delivered={metadata['delivered']}" if "delivered" in metadata else ""
    return f"HTTP {status}, {error.get('code')}{known}: {error.get('message')}"


async def open_agents(agents: Peer, side: str, host: str = "127.0.0.1") -> dict[str, str]:
    """An agent for each fault, at `host`: where their cards are."""
    cards = {}
    bases = {}
    for n, (what, script) in enumerate(FAULTS.items()):
        # the card is at a place of its own: the faulty interface may refuse connections
        names = {role: f"{side}-{n}-{role}" for role in ("card", "first", "spare")}
        speaks = {"card": "http", "first": "http", "spare": "http"}
        if script == "closed":
            speaks["first"] = "closed"
        specs = [{"name": names[role], "speaks": speaks[role], "host": host} for role in names]
        ports = dict(zip(names, await agents.control("open", specs), strict=True))
        cards[names["card"]] = card(
            [
                ("JSONRPC", f"http://{host}:{ports['first']}/rpc"),
                ("HTTP+JSON", f"http://{host}:{ports['spare']}"),
            ],
            name=f"fault-{n}",
            url=f"http://{host}:{ports['first']}/rpc",
        )
        if script != "closed":
            text = json.dumps([script]).replace("{spare}", f"{host}:{ports['spare']}")
            await agents.control("script", {names["first"]: json.loads(text)})
        bases[what] = f"http://{host}:{ports['card']}"
    await agents.control("card", cards)
    return bases


async def executions(agents: Peer, id_: str) -> int:
    """How often a message ran, whoever ran it."""
    state = await agents.state()
    return sum(one.get("by_message", {}).get(id_, 0) for one in state["agents"].values())


async def through_sidecar(agents: Peer) -> dict[str, Seen]:
    """Every fault, through this daemon."""
    bases = await open_agents(agents, "ours")
    names = {what: f"fault-{n}" for n, what in enumerate(bases)}
    seen = {}
    text = config_text({names[what]: {"card": base} for what, base in bases.items()})
    async with sidecar(text) as daemon:
        while (await daemon.metric("a2a_sidecar_candidates")) < 2 * len(bases):
            await trio.sleep(0.1)
        for what, name in names.items():
            id_ = f"ours-{name}"
            reply = await ask(daemon.listeners["JSONRPC"], f"/agents/{name}", id_, {})
            seen[what] = Seen(await executions(agents, id_), told(*reply))
    return seen


async def through_litellm(
    agents: Peer, program: str, directory: Path, host: str
) -> dict[str, Seen]:
    """Every fault, through the other gateway; the agents are at `host`."""
    bases = await open_agents(agents, host, host)
    entries = [
        {
            "agent_name": f"fault-{n}",
            "agent_card_params": {"name": f"fault-{n}", "url": base, "protocolVersion": "1.0"},
            "litellm_params": {"require_trace_id_on_calls_to_agent": False},
        }
        for n, base in enumerate(bases.values())
    ]
    file = directory / "litellm.yaml"  # JSON is YAML
    file.write_text(
        json.dumps({"agents": entries, "general_settings": {"master_key": KEY}}), "utf-8"
    )
    port = free_port()
    argv = [program, "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
    seen = {}
    async with running(Process("litellm", argv, env={"NO_PROXY": "*"}, cwd=directory)) as process:
        with trio.fail_after(180):
            while not await _answers(port):
                assert process.alive, process.log()
                await trio.sleep(0.5)
        for n, what in enumerate(bases):
            id_ = f"{host}-{n}"
            headers = {"authorization": f"Bearer {KEY}"}
            reply = await ask(port, f"/a2a/fault-{n}", id_, headers)
            seen[what] = Seen(await executions(agents, id_), told(*reply))
    return seen


async def _answers(port: int) -> bool:
    try:
        return (await http(port, "GET", "/health/liveliness", seconds=5)).status == 200
    except (OSError, trio.BrokenResourceError, trio.TooSlowError):
        return False


async def main(program: str) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        async with peer("fault_agent") as agents:
            columns = [
                await through_sidecar(agents),
                # it treats agents at the first address as left over from development
                await through_litellm(agents, program, Path(name), "127.0.0.1"),
                await through_litellm(agents, program, Path(name), "127.0.0.2"),
            ]
    heads = ["sidecar", "LiteLLM, agent at 127.0.0.1", "LiteLLM, agent at 127.0.0.2"]
    print("| first interface | " + " | ".join(f"{head}: ran | told" for head in heads) + " |")
    print("|---" * 7 + "|")
    for what in FAULTS:
        cells = [f"{seen[what].executions} | {short(seen[what].told)}" for seen in columns]
        print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--litellm", required=True, help="the program of the other gateway")
    trio.run(main, options.parse_args().litellm)
