"""What tests need on disk and around them: free ports, TLS files, cards, system programs."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import trustme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Interface: TypeAlias = dict[str, Any]


# --- system programs --------------------------------------------------------------------------

MISSING_PROGRAM = re.compile(r"needs (?P<program>\S+) \(Debian package (?P<package>\S+)\)")
"""The reason of a skip for want of a system program."""


def requires(program: str, package: str) -> str:
    """The path of a system program; skips the test when it is not installed.

    Skips are listed at the end of the run. With ``A2A_REQUIRE_PROGRAMS=1`` it fails instead.
    """
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/lib/systemd")
    if path is not None:
        return path
    reason = f"needs {program} (Debian package {package})"
    if os.environ.get("A2A_REQUIRE_PROGRAMS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


# --- ports, files, cards ----------------------------------------------------------------------

_given: set[int] = set()


def free_port() -> int:
    """A free TCP port of 127.0.0.1, below the range that the kernel hands out by itself."""
    while True:
        port = random.randrange(10_000, 32_000)
        if port in _given:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """A private CA and what it signed, as PEM files."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path

    @property
    def peer_args(self) -> list[str]:
        """The options that make a peer speak TLS."""
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]

    def client_context(self) -> ssl.SSLContext:
        """A client's context that trusts the CA."""
        return ssl.create_default_context(cafile=str(self.ca))


def make_tls(directory: Path, *names: str) -> TlsFiles:
    """Write a CA, a certificate for `names` (default: loopback) and a client's."""
    authority = trustme.CA()
    server = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    client = authority.issue_cert("client@example.org")
    files = TlsFiles(
        ca=directory / "ca.pem",
        cert=directory / "server.pem",
        key=directory / "server.key",
        client_cert=directory / "client.pem",
        client_key=directory / "client.key",
    )
    authority.cert_pem.write_to_path(files.ca)
    files.cert.write_bytes(b"".join(blob.bytes() for blob in server.cert_chain_pems))
    server.private_key_pem.write_to_path(files.key)
    files.client_cert.write_bytes(b"".join(blob.bytes() for blob in client.cert_chain_pems))
    client.private_key_pem.write_to_path(files.client_key)
    return files


def interface(
    binding: str, url: str, *, version: str = "1.0", tenant: str | None = None
) -> Interface:
    """An entry of ``supportedInterfaces``."""
    entry = {"url": url, "protocolBinding": binding, "protocolVersion": version}
    return entry if tenant is None else {**entry, "tenant": tenant}


_CARD_BASE: dict[str, Any] = {
    "name": "agent",
    "description": "an agent",
    "version": "1",
    "capabilities": {"streaming": True, "pushNotifications": True, "extendedAgentCard": True},
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": ["text/plain"],
    "skills": [{"id": "s", "name": "s", "description": "s", "tags": ["s"]}],
}


def card(interfaces: Sequence[Interface | tuple[str, str]], **more: Any) -> dict[str, Any]:
    """A 1.0 card; interfaces as entries or as ``(binding, url)``."""
    entries = [interface(*i) if isinstance(i, tuple) else i for i in interfaces]
    return {**_CARD_BASE, "supportedInterfaces": entries, **more}


def legacy_card(
    *,
    url: str,
    preferred: str | None = None,
    additional: Sequence[tuple[str, str]] = (),
    protocol_version: str | None = "1.0",
    **more: Any,
) -> dict[str, Any]:
    """A card of the older form; `additional` as ``(transport, url)``."""
    result = {**_CARD_BASE, "url": url, **more}
    if preferred is not None:
        result["preferredTransport"] = preferred
    if additional:
        result["additionalInterfaces"] = [{"transport": t, "url": u} for t, u in additional]
    if protocol_version is not None:
        result["protocolVersion"] = protocol_version
    return result


def write_card(directory: Path, content: Mapping[str, Any], name: str = "card.json") -> Path:
    """Write a card; returns its path."""
    path = directory / name
    path.write_text(json.dumps(content), "utf-8")
    return path


def message(text: str = "hello", message_id: str = "m-1", **more: Any) -> dict[str, Any]:
    """The params of SendMessage: one text part from the user."""
    parts = [{"text": text}]
    return {"message": {"messageId": message_id, "role": "ROLE_USER", "parts": parts, **more}}
