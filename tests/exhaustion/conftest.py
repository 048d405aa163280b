"""The grid of the proof: runs cells, counts them, and tells which were red."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest
import trustme

from sidecar.wire.http2_link import Link
from sidecar.wire.tls import TlsIdentity, make_context
from tests.exhaustion.cells import run_cell
from tests.exhaustion.rig import HOSTS, World, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from _pytest.terminal import TerminalReporter

    from tests.exhaustion.cells import Cell
    from tests.exhaustion.rig import Exchange, Recording

_ALPN = ("h2", "http/1.1")


class Grid:
    """The cells of one test."""

    def __init__(
        self, world: World, *, all_cuts: bool, report: Callable[[str, object], None]
    ) -> None:
        self.world = world
        self._report = report
        self.all_cuts = all_cuts
        self.bugs: list[str] = []
        """What connections report as errors of their own."""
        self.cells = 0
        self._failures: list[str] = []

    async def record(self, exchange: Exchange) -> Recording:
        """A clean exchange."""
        return await record(self.world, exchange)

    async def run(self, cell: Cell) -> None:
        """Run one cell, and keep what is wrong with it."""
        self.note(cell, await run_cell(self.world, cell))

    def note(self, cell: object, wrong: list[str]) -> None:
        """Count a cell that was run."""
        self.cells += 1
        wrong = [*wrong, *self.bugs]
        self.bugs.clear()
        if wrong:
            self._failures.append("\n    ".join((repr(cell), *wrong)))

    def conclude(self) -> None:
        """Fail if a cell was red."""
        self._report("cells", self.cells)
        assert self.cells > 0
        assert b"internal_errors_total{" not in self.world.telemetry.render()
        if self._failures:
            shown = "\n".join(self._failures[:10])
            pytest.fail(f"{len(self._failures)} of {self.cells} cells:\n{shown}", pytrace=False)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """What all cells share. Keys are RSA, whose signatures have one length."""
    made = World.make()
    directory: Path = tmp_path_factory.mktemp("exhaustion")
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    certificate = authority.issue_cert(*HOSTS, key_type=trustme.KeyType.RSA)
    made.ca_file = str(directory / "ca.pem")
    authority.cert_pem.write_to_path(made.ca_file)
    for alpn in _ALPN:
        made.server_contexts[alpn] = _server_context(certificate, alpn)
        strict = made.strict_contexts[alpn] = _server_context(certificate, alpn)
        strict.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(strict)
        made.client_contexts[alpn] = make_context(TlsIdentity(ca_file=made.ca_file), alpn)
    yield made
    made.close()


def _server_context(certificate: trustme.LeafCert, alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    context.set_alpn_protocols([alpn])
    return context


@pytest.fixture
def grid(
    world: World,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> Grid:
    """For one test."""
    all_cuts = pytestconfig.getoption("--all-cuts")
    made = Grid(world, all_cuts=all_cuts, report=record_property)
    monkeypatch.setattr(Link, "bug", lambda _, error: made.bugs.append(f"bug: {error!r}"))
    return made


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """How large the proof was."""
    # from the reports: the tests may have run in other processes
    reports = (each for kind in ("passed", "failed") for each in terminalreporter.getreports(kind))
    cells = sum(
        int(str(value))
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == "cells"
    )
    if cells:
        terminalreporter.write_line(f"exhaustion: {cells} cells")
