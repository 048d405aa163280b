"""The daemon and the peers that system tests share: starting a process costs more than a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.harness import peer_sync
from tests.system.world import running_world

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Peer, TlsFiles
    from tests.system.world import World


@pytest.fixture(scope="module")
def world(tls: TlsFiles) -> Iterator[World]:
    """The running daemon, with a fresh agent for whoever asks."""
    with running_world(tls) as result:
        yield result


@pytest.fixture(scope="session")
def sdk() -> Iterator[Peer]:
    """An a2a-sdk agent on all three bindings, over one task store."""
    with peer_sync("sdk_agent") as result:
        yield result


@pytest.fixture(scope="session")
def first() -> Iterator[Peer]:
    """A scripted HTTP/1.1 agent: JSON-RPC at /rpc, HTTP+JSON at /."""
    with peer_sync("raw_http") as result:
        yield result


@pytest.fixture(scope="session")
def second() -> Iterator[Peer]:
    """Another one."""
    with peer_sync("raw_http") as result:
        yield result


@pytest.fixture(scope="session")
def h2_peer() -> Iterator[Peer]:
    """A scripted gRPC agent."""
    with peer_sync("h2_agent") as result:
        yield result


@pytest.fixture(scope="session")
def grpc_peer() -> Iterator[Peer]:
    """A grpcio agent whose status can be set."""
    with peer_sync("grpc_generic") as result:
        yield result
