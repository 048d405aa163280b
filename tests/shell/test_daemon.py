"""The daemon before it runs: what a configuration can ask for in vain, said without a traceback."""

from __future__ import annotations

import resource
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from sidecar import cli
from tests.harness import free_port, make_tls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AGENT = '[agents.a]\ncard = "https://127.0.0.1:1"\n'
LISTENER = '[[listeners]]\nbinding = "JSONRPC"\naddress = '


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """A start changes what belongs to the whole process."""
    handler = signal.getsignal(signal.SIGHUP)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    signal.signal(signal.SIGHUP, handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, *, listener: bool = True
) -> str:
    """What `run` says of a configuration that it cannot use."""
    if listener:
        content += f'{LISTENER}"127.0.0.1:{free_port()}"\n'
    if "[admin]" not in content:
        content += f'[admin]\naddress = "127.0.0.1:{free_port()}"\n'
    file = tmp_path / "config.toml"
    file.write_text(content, "utf-8")
    assert cli.main(["run", "--config", str(file)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[limits]\ndrain = 1\n", "unknown key"),
        (AGENT + '[agents.a.auth]\nbearer = "env:NOT_SET_AT_ALL"\n', "agents.a: env:NOT_SET"),
        (AGENT + '[agents.a.auth]\nbearer = "credential:x"\n', "agents.a: credential:x"),
        (AGENT + '[agents.a.discovery_auth]\nbearer = "env:NOT_SET_AT_ALL"\n', "agents.a: env:"),
        (AGENT + '[agents.a.tls]\nca_file = "config.toml"\n', "agents.a.tls: "),
    ],
)
def test_what_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, expected: str
) -> None:
    assert expected in refused(tmp_path, capsys, content)


@pytest.mark.parametrize("kind", ["missing", "directory", "bytes"])
def test_a_file_that_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = tmp_path / "config.toml"
    if kind == "directory":
        file.mkdir()
    elif kind == "bytes":
        file.write_bytes(b"\xff\xfe[agents]\n")
    assert cli.main(["run", "--config", str(file)]) == 1
    err = capsys.readouterr().err
    assert str(file) in err
    assert ("not UTF-8" if kind == "bytes" else "cannot be read") in err


def test_an_address_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = refused(tmp_path, capsys, f'{LISTENER}"{address}"\n', listener=False)
        assert f"cannot listen on {address}" in said
        said = refused(tmp_path, capsys, f'[admin]\naddress = "{address}"\n')
        assert f"cannot listen on {address}" in said


def test_a_file_where_a_socket_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is somebody's, and stays."""
    taken = tmp_path / "app.sock"
    taken.write_text("important", "utf-8")
    said = refused(tmp_path, capsys, f'{LISTENER}"unix:{taken}"\n', listener=False)
    assert f"cannot listen on unix:{taken}" in said
    assert taken.read_text("utf-8") == "important"
    said = refused(tmp_path, capsys, f'{LISTENER}"unix:{tmp_path}/no/app.sock"\n', listener=False)
    assert "No such file or directory" in said


def test_a_socket_that_systemd_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(tmp_path, capsys, f'{LISTENER}"systemd:app"\n', listener=False)
    assert "systemd:app: systemd passed 0 sockets" in said


def test_a_certificate_of_another_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = make_tls(tmp_path)
    address = f"127.0.0.1:{free_port()}"
    said = refused(
        tmp_path,
        capsys,
        f'{LISTENER}"{address}"\ntls_cert_file = "{files.cert}"\ntls_key_file = "{files.client_key}"\n',
        listener=False,
    )
    assert f"{address}: tls_cert_file, tls_key_file: " in said


def test_nothing_is_left_bound_when_one_address_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "app.sock"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        content = f'{LISTENER}"unix:{path}"\n{LISTENER}"{taken}"\n'
        assert taken in refused(tmp_path, capsys, content, listener=False)
    assert not path.exists()
