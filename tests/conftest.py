"""Hypothesis profiles, TLS files, and the list of system programs that tests could not find."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import harness

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

settings.register_profile(
    "fast", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", parent=settings.get_profile("fast"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--all-cuts` is for tests/exhaustion, `--soak-seconds` for tests/faults.

    An option has to be known here.
    """
    parser.addoption(
        "--all-cuts",
        action="store_true",
        help="cut recorded exchanges at every byte, not only at boundaries (half an hour)",
    )
    parser.addoption(
        "--soak-seconds",
        type=float,
        default=0.0,
        help="how long the soak goes on after its 10,000 calls",
    )


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> harness.TlsFiles:
    """A private CA with a certificate for 127.0.0.1 and localhost, as files."""
    return harness.make_tls(tmp_path_factory.mktemp("tls"))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """List the programs whose absence left tests out."""
    # From the reports: the tests may have run in other processes.
    reasons = {
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    }
    found = [harness.MISSING_PROGRAM.fullmatch(reason) for reason in reasons]
    missing = sorted((one["program"], one["package"]) for one in found if one is not None)
    if not missing:
        return
    terminalreporter.section("programs that tests need and did not find")
    for program, package in missing:
        terminalreporter.line(f"{program}: apt-get install {package}")
