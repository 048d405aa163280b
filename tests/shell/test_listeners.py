"""Listeners across configurations, and what sockets of systemd must be."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.config import (
    Config,
    ListenerConfig,
    SystemdAddress,
    TcpAddress,
    UnixAddress,
    parse_address,
)
from sidecar.core.spec import Binding
from sidecar.listener import BindError
from sidecar.listeners import Listeners
from sidecar.logs import Log
from sidecar.telemetry import Telemetry
from tests.harness import make_tls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    sink = os.open(os.devnull, os.O_WRONLY)
    log = Log(clock=lambda: 0.0, fd=sink)

    def make_door(*_: object) -> Any:
        raise AssertionError("nothing is served here")

    yield Listeners(make_door=make_door, telemetry=Telemetry("0"), log=log)
    log.close()
    os.close(sink)


def config(*listeners: dict[str, Any]) -> Config:
    plain = [{"binding": "JSONRPC", **one} for one in listeners]
    return Config.model_validate({"listeners": plain, "admin": {"address": "127.0.0.1:0"}})


def passed(sock: socket.socket, **keys: Any) -> tuple[Config, dict[str, list[socket.socket]]]:
    return config({"address": "systemd:app", **keys}), {"app": [sock]}


def refusal(listeners: Listeners, found: tuple[Config, dict[str, list[socket.socket]]]) -> str:
    loaded, listeners._passed = found
    with pytest.raises(BindError) as error:
        listeners.prepare(loaded)
    return str(error.value)


def test_a_passed_socket_is_duplicated(listeners: Listeners) -> None:
    """It outlives the listener."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        loaded, listeners._passed = passed(sock)
        prepared = listeners.prepare(loaded)
        (app, admin) = prepared.bound.values()
        assert app.address == TcpAddress(*sock.getsockname())
        assert (app.address.host, app.address.port) in listeners.own_addresses(prepared)
        prepared.close()
        socket.create_connection(sock.getsockname()).close()
        assert isinstance(admin.address, TcpAddress)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((admin.address.host, admin.address.port))


def test_a_passed_socket_must_listen(listeners: Listeners) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert "not a listening stream socket" in refusal(listeners, passed(sock))


def test_a_passed_socket_must_be_of_streams(listeners: Listeners) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind("")
        sock.listen()
        assert "not a listening stream socket" in refusal(listeners, passed(sock))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert "not a listening stream socket" in refusal(listeners, passed(sock))


def test_a_passed_socket_that_others_reach_needs_what_an_address_does(
    listeners: Listeners, tmp_path: Path
) -> None:
    """The configuration does not know where it is bound."""
    files = make_tls(tmp_path)
    (tmp_path / "token").write_text("t", "utf-8")
    keys = {
        "allow_remote": True,
        "token": f"file:{tmp_path}/token",
        "tls_cert_file": str(files.cert),
        "tls_key_file": str(files.key),
    }
    with socket.create_server(("0.0.0.0", 0)) as sock:
        assert "other machines reach 0.0.0.0" in refusal(listeners, passed(sock))
        for missing in ("allow_remote", "token"):
            some = {key: value for key, value in keys.items() if key != missing}
            assert "allow_remote" in refusal(listeners, passed(sock, **some))
        loaded, listeners._passed = passed(sock, **keys)
        prepared = listeners.prepare(loaded)
        assert prepared.thresholds[SystemdAddress("app"), 0].tls is not None
        prepared.close()


def test_names_must_be_clear(listeners: Listeners) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        loaded, _ = passed(one)
        said = refusal(listeners, (loaded, {"app": [one, one], "tcp": [one]}))
        assert "passed 2 sockets" in said
        assert "names that it passed: app, tcp" in said
        said = refusal(listeners, (loaded, {}))
        assert "passed 0 sockets" in said
        assert "names that it passed: none" in said


def test_addresses_are_bound_together_or_not_at_all(listeners: Listeners, tmp_path: Path) -> None:
    path = tmp_path / "app.sock"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        loaded = config({"address": f"unix:{path}", "mode": "0600"}, {"address": address})
        said = refusal(listeners, (loaded, {}))
        assert f"cannot listen on {address}" in said
    assert not path.exists()
    prepared = listeners.prepare(loaded)
    assert path.stat().st_mode & 0o777 == 0o600
    prepared.close()
    assert not path.exists()


def test_port_0_may_stand_there_several_times(listeners: Listeners) -> None:
    loaded = config(*[{"address": "127.0.0.1:0"}] * 3)
    prepared = listeners.prepare(loaded)
    assert len(prepared.bound) == 4  # the admin address is another
    assert len(listeners.own_addresses(prepared)) == 4
    prepared.close()


def test_a_listener_config_says_where_it_is() -> None:
    one = ListenerConfig(address=parse_address("unix:/x"), binding=Binding.GRPC)
    assert one.address == UnixAddress("/x")
