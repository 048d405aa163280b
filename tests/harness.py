"""What tests use to start peers and the sidecar as processes, and to speak to them.

One import for everything: the parts are in ``tests/support``.
"""

from __future__ import annotations

from tests.support.daemon import Sidecar, config_text, sidecar, toml
from tests.support.files import (
    MISSING_PROGRAM,
    TlsFiles,
    card,
    free_port,
    interface,
    legacy_card,
    make_tls,
    message,
    requires,
    write_card,
)
from tests.support.http_client import (
    EventStream,
    Incomplete,
    Response,
    SseEvent,
    connect,
    http,
    open_stream,
)
from tests.support.processes import (
    GrpcResult,
    Peer,
    Process,
    ProcessDied,
    grpc_call,
    peer,
    peer_sync,
    run_sdk_client,
    running,
)

__all__ = [
    "MISSING_PROGRAM",
    "EventStream",
    "GrpcResult",
    "Incomplete",
    "Peer",
    "Process",
    "ProcessDied",
    "Response",
    "Sidecar",
    "SseEvent",
    "TlsFiles",
    "card",
    "config_text",
    "connect",
    "free_port",
    "grpc_call",
    "http",
    "interface",
    "legacy_card",
    "make_tls",
    "message",
    "open_stream",
    "peer",
    "peer_sync",
    "requires",
    "run_sdk_client",
    "running",
    "sidecar",
    "toml",
    "write_card",
]
