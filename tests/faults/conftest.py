"""The process of the faulty agents, TLS of every sort, and the count of cells."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import pytest
import trustme

from tests.faults.rig import Certificates, run_cells
from tests.harness import peer_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from _pytest.terminal import TerminalReporter

    from tests.faults.rig import Cell
    from tests.harness import Peer

_CELLS = pytest.StashKey[dict[str, int]]()
_NOTES = pytest.StashKey[list[str]]()
_MOST_AT_ONCE = 64


@pytest.fixture(scope="session")
def fault_agent() -> Iterator[Peer]:
    """Faulty agents on ports of their own, in one process."""
    with peer_sync("fault_agent") as result:
        yield result


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Good certificates, and those that a client must refuse."""
    directory = tmp_path_factory.mktemp("certificates")
    ours, foreign = trustme.CA(), trustme.CA()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    issued = {
        "good": ours.issue_cert("127.0.0.1"),
        "expired": ours.issue_cert(
            "127.0.0.1", not_before=past, not_after=past + datetime.timedelta(days=1)
        ),
        "wrong name": ours.issue_cert("other.example"),
        "unknown authority": foreign.issue_cert("127.0.0.1"),
    }
    files = {}
    for name, certificate in issued.items():
        file = directory / f"{name}.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(file)
        files[name] = {"cert": str(file), "key": str(file)}
    authorities = {}
    for name, authority in (("ours", ours), ("foreign", foreign)):
        authorities[name] = str(directory / f"{name}.pem")
        authority.cert_pem.write_to_path(authorities[name])
    client = directory / "client.pem"
    ours.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(client)
    return Certificates(
        authority=authorities["ours"],
        client=(str(client), str(client)),
        servers={
            **files,
            "wrong ALPN": {**files["good"], "alpn": "http/1.1"},
            "no ALPN": {**files["good"], "alpn": ""},
            "wants client": {**files["good"], "ca": authorities["ours"]},
            "wants other client": {**files["good"], "ca": authorities["foreign"]},
        },
    )


class Matrix:
    """Runs the cells of one test, and fails with all that were red."""

    def __init__(
        self, peer: Peer, certificates: Certificates, directory: Path, count: dict[str, int]
    ) -> None:
        self._peer = peer
        self._certificates = certificates
        self._directory = directory
        self._count = count

    async def run(self, cells: Iterable[Cell]) -> None:
        """Run `cells`, many at once."""
        rest = list(cells)
        assert rest
        wrong: list[str] = []
        for cell in rest:
            for end in cell.fault.ends(streaming=cell.streaming)[:1]:
                key = f"{cell.fault.binding} {end.kind}"
                self._count[key] = self._count.get(key, 0) + 1
        total = len(rest)
        while rest:
            batch, rest = rest[:_MOST_AT_ONCE], rest[_MOST_AT_ONCE:]
            wrong += await run_cells(batch, self._peer, self._certificates, self._directory)
        if wrong:
            shown = "\n".join(wrong[:60])
            pytest.fail(f"{len(wrong)} findings in {total} cells:\n{shown}", pytrace=False)


@pytest.fixture
def matrix(
    fault_agent: Peer,
    certificates: Certificates,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Matrix:
    """For one test."""
    count = request.config.stash.setdefault(_CELLS, {})
    return Matrix(fault_agent, certificates, tmp_path, count)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at the end of the run."""
    return request.config.stash.setdefault(_NOTES, []).append


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """How large the matrix was, and what was counted."""
    count = terminalreporter.config.stash.get(_CELLS, {})
    if count:
        terminalreporter.write_line(f"faults: {sum(count.values())} cells")
        for key in sorted(count):
            terminalreporter.write_line(f"    {count[key]:5} {key}")
    for line in terminalreporter.config.stash.get(_NOTES, []):
        terminalreporter.write_line(f"faults: {line}")
