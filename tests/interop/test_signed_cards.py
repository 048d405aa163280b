"""Cards that the official SDK signed, verified by the daemon before it uses them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from joserfc.jwk import ECKey

from tests.harness import Peer, card, http, interface, peer, peer_sync, sidecar, write_card

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.interop

WELL_KNOWN = "/.well-known/agent-card.json"

SIGN = """
import json, sys
from a2a.types import AgentCard
from a2a.utils.signing import create_agent_card_signer
from google.protobuf.json_format import MessageToDict, ParseDict
job = json.load(sys.stdin)
header = {"alg": "ES256", "typ": "JOSE", "kid": "k1", **job["header"]}
signer = create_agent_card_signer(job["key"], header)
print(json.dumps(MessageToDict(signer(ParseDict(job["card"], AgentCard())))))
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent", "--rest", "off") as running:
        yield running


@pytest.fixture(scope="module")
def signer() -> ECKey:
    return ECKey.generate_key("P-256", parameters={"kid": "k1"}, private=True)


def signed_by_sdk(content: dict[str, Any], signer: ECKey, **header: str) -> dict[str, Any]:
    job = {"card": content, "key": signer.as_pem(private=True).decode(), "header": header}
    done = subprocess.run(
        [sys.executable, "-c", SIGN],
        input=json.dumps(job).encode(),
        capture_output=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def odd_card(agent: Peer) -> dict[str, Any]:
    """With what the canonical forms differ in: empty, unset and explicit defaults, any JSON."""
    params = {"n": 3, "half": 0.5, "é": "ü", "empty": {}, "none": None}
    return card(
        [interface("JSONRPC", agent.urls["JSONRPC"])],
        description="",
        iconUrl="",
        capabilities={
            "streaming": True,
            "pushNotifications": False,
            "extensions": [{"uri": "https://x", "params": params}],
        },
        securitySchemes={"m": {"mtlsSecurityScheme": {}}},
    )


def keys_file(directory: Path, signer: ECKey) -> Path:
    return write_card(directory, {"keys": [signer.as_dict(private=False)]}, "keys.json")


async def test_a_signed_card_is_used_and_a_changed_one_is_not(agent, signer, tmp_path) -> None:
    content = signed_by_sdk(odd_card(agent), signer)
    path = write_card(tmp_path, content)
    table = {"card": str(path), "verify_signatures": str(keys_file(tmp_path, signer))}
    async with sidecar(agents={"a": table}, ready=True) as daemon:
        _, headers, _ = await daemon.jsonrpc("GetTask", {"id": "nowhere"})
        assert headers["a2a-sidecar-interface"] == "0-jsonrpc"
        served = (await http(daemon.port(), "GET", WELL_KNOWN)).json()
        assert "signatures" not in served
        assert "signatures removed from the served card" in daemon.log()
        assert "verified_by=k1" in daemon.log()
        # Somebody else's interface, or no signature at all: the present card stays.
        moved = json.loads(json.dumps(content).replace(agent.urls["JSONRPC"], "http://127.0.0.1:1"))
        for changed in (moved, {**content, "signatures": []}):
            path.write_text(json.dumps(changed))
            refused = await http(daemon.port(), "GET", WELL_KNOWN)
            assert refused.status == 502
            _, headers, answer = await daemon.jsonrpc("GetTask", {"id": "nowhere"})
            assert (headers["a2a-sidecar-interface"], answer["error"]["code"]) == (
                "0-jsonrpc",
                -32001,
            )
        assert await daemon.metric("a2a_sidecar_card_fetches_total", result="rejected") == 2
        error = (await daemon.status())["agents"]["a"]["card_error"]
        assert error == "the card is not signed, and verify_signatures asks for it"
        path.write_text(json.dumps(content))
        assert (await http(daemon.port(), "GET", WELL_KNOWN)).status == 200


async def test_keys_of_the_cards_own_host(agent, signer, tmp_path) -> None:
    async with peer("raw_http") as raw:
        host = f"http://127.0.0.1:{raw.ports['http']}"
        content = signed_by_sdk(odd_card(agent), signer, jku=f"{host}/keys.json")
        await raw.control("config", {"card": content})
        keys = {"reply": {"body": {"keys": [signer.as_dict(private=False)]}}}
        # the card, then the keys that it names
        await raw.script("default", keys)
        table = {"card": raw.card_url, "verify_signatures": True}
        async with sidecar(agents={"a": table}, ready=True) as daemon:
            assert (await http(daemon.port(), "GET", WELL_KNOWN)).status == 200
        paths = [one["path"] for one in (await raw.state())["requests"]]
        assert paths[:2] == [WELL_KNOWN, "/keys.json"]
        assert set(paths[2:]) == {WELL_KNOWN}


async def test_a_pinned_card(agent, tmp_path) -> None:
    content = card([interface("JSONRPC", agent.urls["JSONRPC"])])
    path = write_card(tmp_path, content)
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    async with sidecar(agents={"a": {"card": str(path), "card_sha256": pin}}, ready=True) as daemon:
        assert (await daemon.status())["agents"]["a"]["card_sha256"] == pin
        path.write_text(json.dumps({**content, "name": "another"}))
        refused = await http(daemon.port(), "GET", WELL_KNOWN)
        assert refused.status == 502
        assert "not card_sha256" in refused.json()["error"]["message"]
        _, headers, _ = await daemon.jsonrpc("GetTask", {"id": "nowhere"})
        assert headers["a2a-sidecar-interface"] == "0-jsonrpc"
