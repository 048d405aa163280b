"""What ``explain`` shows of a card."""

from __future__ import annotations

import json

import pytest
from joserfc.jwk import ECKey

from sidecar.cli import main
from tests.harness import card, interface, legacy_card, write_card
from tests.shell.test_signatures import key_set, signed


@pytest.fixture
def explain(tmp_path, capsys):
    """Run ``explain`` on an agent with these keys; (exit code, data)."""

    def run(content, *, text: bool = False, **keys):
        path = write_card(tmp_path, content)
        lines = ["[agents.a]", f'card = "{path}"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in keys.items()]
        auth = 'headers = { X-Key = "env:K" }\n'
        tail = f"[agents.a.auth]\n{auth}" if keys.pop("with_auth", False) else ""
        lines = [line for line in lines if not line.startswith("with_auth")]
        file = tmp_path / "config.toml"
        file.write_text("\n".join(lines) + "\n" + tail, "utf-8")
        options = [] if text else ["--json"]
        code = main(["explain", "a", "--config", str(file), *options])
        out = capsys.readouterr().out
        return code, out if text else json.loads(out)

    return run


CARD = card(
    [
        interface("slimrpc", "slim://127.0.0.1:1/x"),
        interface("GRPC", "127.0.0.1:7103", tenant="acme"),
        interface("JSONRPC", "http://127.0.0.1:7101/rpc"),
        interface("JSONRPC", "http://127.0.0.1:7420/"),
    ]
)


def test_every_interface_with_order_or_reason(explain):
    code, found = explain(CARD)
    assert code == 0
    first, second = found["candidates"]
    assert first == {
        "interface": "1-grpc",
        "binding": "GRPC",
        "url": "127.0.0.1:7103",
        "address": "127.0.0.1:7103",
        "tls": True,
        "version": "1.0",
        "tenant": "acme",
        "assumed": False,
        "credentials": {"configured": [], "callers": True},
    }
    assert (second["interface"], second["tls"], second["tenant"]) == ("2-jsonrpc", False, None)
    reasons = {one["position"]: one["reason"] for one in found["ineligible"]}
    assert "not supported" in reasons[0]
    assert "one of this sidecar's own listeners" in reasons[3]


def test_the_same_for_people(explain):
    _, text = explain(CARD, text=True)
    lines = text.splitlines()
    (line,) = [line for line in lines if "1-grpc" in line]
    for word in ("1.", "127.0.0.1:7103", "version 1.0", "TLS", "tenant acme", "the caller's"):
        assert word in line
    assert any(line.startswith("sha256 ") for line in lines)


def test_which_credentials_an_interface_gets(explain):
    _, found = explain(CARD, with_auth=True)
    assert found["candidates"][0]["credentials"]["configured"] == ["x-key"]
    _, text = explain(CARD, text=True, with_auth=True)
    assert "gets x-key" in text


def test_contradictions_and_no_candidate(explain):
    code, found = explain(legacy_card(url="http://127.0.0.1:1", preferred="GRPC", additional=[("GRPC", "http://127.0.0.1:2")]))  # fmt: skip
    assert code == 0
    assert "GRPC" in found["contradiction"]
    code, found = explain(card([("slimrpc", "slim://127.0.0.1:1/x")]))
    assert (code, found["candidates"]) == (1, [])


def test_signatures_and_the_pin(explain, tmp_path):
    signer = ECKey.generate_key("P-256", parameters={"kid": "k1"}, private=True)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(key_set(signer)))
    content = signed(CARD, signer)
    _, found = explain(content)
    assert (found["signed"], found["signature_verified_by"]) == (True, None)
    code, found = explain(content, verify_signatures=str(keys))
    assert (code, found["signature_verified_by"], found["rejected"]) == (0, "k1", None)
    code, found = explain(CARD, verify_signatures=str(keys))
    assert code == 1
    assert found["rejected"].startswith("the card is not signed")
    code, found = explain(CARD, card_sha256=found["sha256"])
    assert (code, found["rejected"]) == (0, None)
    code, found = explain(CARD, card_sha256="0" * 64)
    assert code == 1
    assert found["sha256"] in found["rejected"]


def test_a_secret_that_cannot_be_had_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("A2A_TEST_MISSING", raising=False)
    path = write_card(tmp_path, CARD)
    file = tmp_path / "config.toml"
    file.write_text(
        f'[agents.a]\ncard = "{path}"\n'
        '[agents.a.discovery_auth]\nheaders = { X-Key = "env:A2A_TEST_MISSING" }\n',
        "utf-8",
    )
    assert main(["explain", "a", "--config", str(file)]) == 1
    assert capsys.readouterr().err == "a: env:A2A_TEST_MISSING: empty or not set\n"


def test_what_cannot_be_explained(capsys):
    assert main(["explain", "/nowhere/card.json"]) == 1
    assert "is not an agent, a card's URL or a file" in capsys.readouterr().err
    assert main(["explain", "http://127.0.0.1:1/card.json"]) == 1
    assert "could not be fetched" in capsys.readouterr().err
