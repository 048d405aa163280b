"""The contract tester a2a-proof sees no difference between an agent and the same through the sidecar."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tests.harness import Peer, peer_sync
from tests.interop.callers import Between, agent_of, between

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.interop

CONTRACT = """
version: 1
agent:
  url: AGENT
  grpc_tls: false
  allow_cross_origin_interfaces: true
  timeout: 20
scenarios:
  - name: text
    message: hello
    expect:
      state: completed
      text: {equals: hello}
      states: {contains_in_order: [submitted, working, completed]}
  - name: message
    message: message
    expect: {state: message, text: {equals: a plain message}}
  - name: chunks
    message: stream 3 free
    expect: {state: completed}
  - name: data and files
    turns:
      - message: echo
        data: [{"a": [1, 2.5, null, "x"], "b": {}}]
        files: [{path: file.bin, media_type: application/octet-stream}]
        expect:
          state: completed
          data: [{path: "", equals: {"a": [1, 2.5, null, "x"], "b": {}}}]
          files: [{size_bytes: 1000, kind: raw}]
  - name: get and cancel
    turns:
      - {message: silent 30, return_immediately: true, expect: {}}
      - {action: get_task, history_length: 0, expect: {state: working}}
      - {action: cancel, expect: {state: canceled}}
  - name: resume
    turns:
      - {message: silent 0.5, return_immediately: true, expect: {}}
      - {action: subscribe, expect: {state: completed}}
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[Peer]:
    with peer_sync("sdk_agent") as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(agent: Peer) -> Iterator[Between]:
    with between(agent.urls) as running:
        yield running


@pytest.mark.parametrize(
    ("down", "up"), [("JSONRPC", "HTTP+JSON"), ("HTTP+JSON", "GRPC"), ("GRPC", "JSONRPC")]
)
async def test_no_difference_is_found(
    down: str, up: str, agent: Peer, sidecar: Between, tmp_path: Path
) -> None:
    program = Path(sys.executable).parent / "a2a-proof"
    (tmp_path / "file.bin").write_bytes(bytes(range(250)) * 4)
    contract = CONTRACT.replace("AGENT", f"http://127.0.0.1:{agent.ports['jsonrpc']}")
    (tmp_path / "contract.yaml").write_text(contract)
    through = f"http://127.0.0.1:{sidecar.sidecar.port()}/agents/{agent_of(up)}"
    options = ["--against", through, "--transport", down, "--format", "json"]
    done = await trio.run_process(
        [str(program), "diff", "contract.yaml", *options],
        cwd=tmp_path,
        capture_stdout=True,
        check=False,
    )
    assert json.loads(done.stdout)["passed"], done.stdout.decode()
    assert done.returncode == 0
