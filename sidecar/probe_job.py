"""The process that `sidecar.check.probe_bindings` starts: a job in on stdin, what is served out."""

from __future__ import annotations

import json
import sys
from typing import Any

import trio

from sidecar.card_check import CheckOptions, Verdict, check_card
from sidecar.core.address_map import AddressMap
from sidecar.wire.net import Dialer
from sidecar.wire.tls import TlsIdentity

_STALL_SECONDS = 10.0


def main() -> int:
    """Run one job; returns the exit code."""
    job = json.load(sys.stdin)
    json.dump(trio.run(_probe, job), sys.stdout)
    return 0


async def _probe(job: dict[str, Any]) -> dict[str, Any]:
    options = CheckOptions(
        addresses=AddressMap(job["addresses"]),
        identity=TlsIdentity(ca_file=job["ca_file"]),
        headers=[(name.lower(), value) for name, value in job["headers"].items()],
        timeout_seconds=job["timeout_seconds"],
        promises=False,
    )
    report = await check_card(job["card"], options, Dialer(stall_seconds=_STALL_SECONDS))
    listening: dict[str, set[str]] = {}
    for row in report.rows:
        listening.setdefault(row.declared.url, set()).update(row.served)
    undecided = [
        f"{row.declared.where} ({row.declared.transport} {row.declared.shown}): {finding.text}"
        for row in report.rows
        if row.verdict is Verdict.UNKNOWN
        for finding in row.findings
    ]
    return {
        "listening": {url: sorted(served) for url, served in listening.items() if url},
        "undecided": undecided,
    }


if __name__ == "__main__":
    sys.exit(main())
