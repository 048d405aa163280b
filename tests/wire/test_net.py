"""The dialer, on loopback and with a resolver that the test scripts."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import resource
import socket
import ssl

import pytest
import trio
import trio.testing
import trustme

from sidecar.core.types import Break
from sidecar.wire import net
from sidecar.wire.net import Dialer, DialError, Origin, TlsIdentity, Wire, WireBroken, is_numeric
from tests.wire.loopback import closed_port, reset, serve, server_context, until

CA = trustme.CA()
CERT = CA.issue_cert("agent.test", "127.0.0.1", "::1")
PLAIN = TlsIdentity()


def anywhere(_address: str) -> str:
    return ""


class Names:
    """A resolver that knows only what it was told, and counts."""

    def __init__(self, **known: list[str] | Exception) -> None:
        self.known = {name.replace("_", "."): found for name, found in known.items()}
        self.asked: list[str] = []
        self.gate: trio.Event | None = None

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if self.gate is not None:
            await self.gate.wait()
        found = self.known.get(host)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if isinstance(found, Exception):
            raise found
        return found


def make_dialer(**names: list[str] | Exception) -> Dialer:
    return Dialer(stall_seconds=5, resolve=Names(**names))


async def dial(
    dialer: Dialer, origin: Origin, *, alpn="http/1.1", identity=PLAIN, permit=anywhere, proxy=None
) -> Wire:
    with trio.fail_after(10):
        return await dialer.dial(origin, alpn=alpn, identity=identity, permit=permit, proxy=proxy)


async def failure(*args, **kwargs) -> DialError:
    with pytest.raises(DialError) as caught:
        await dial(*args, **kwargs)
    return caught.value


async def echo(stream: trio.abc.Stream) -> None:
    while data := await stream.receive_some(65536):
        await stream.send_all(data)
    await stream.aclose()


async def check_echo(wire: Wire) -> None:
    with trio.fail_after(5):
        await wire.send(b"hello")
        assert await wire.receive() == b"hello"
    wire.abort()


@pytest.fixture
def ca_file(tmp_path) -> str:
    path = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(path)
    return str(path)


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_numeric_hosts_are_not_looked_up(nursery, host):
    port = await serve(nursery, echo, host=host)
    wire = await dial(make_dialer(), Origin(host, port, False))
    assert wire.peer == (f"127.0.0.1:{port}" if host == "127.0.0.1" else f"[::1]:{port}")
    await check_echo(wire)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_closed_port_is_refused(host):
    error = await failure(make_dialer(), Origin(host, closed_port(host), False))
    assert error.cause is Break.REFUSED
    assert host in error.detail


async def test_the_system_resolver_finds_localhost(nursery):
    port = await serve(nursery, echo)
    await check_echo(await dial(Dialer(stall_seconds=5), Origin("localhost", port, False)))


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Break.DNS),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), Break.DNS),
        (UnicodeError("label too long"), Break.DNS),
        ([], Break.DNS),
        (socket.gaierror(socket.EAI_MEMORY, "Memory allocation failure"), Break.LOCAL),
        (OSError(errno.EMFILE, "Too many open files"), Break.LOCAL),
    ],
    ids=["unknown", "later", "odd", "empty", "memory", "descriptors"],
)
async def test_names_that_do_not_resolve(found, cause):
    error = await failure(make_dialer(agent_invalid=found), Origin("agent.invalid", 80, False))
    assert error.cause is cause
    assert "agent.invalid" in error.detail


@pytest.mark.parametrize("host", ["a" * 70 + ".invalid", "nul\0.invalid", "..", ""])
async def test_names_that_the_system_cannot_even_look_up(host):
    error = await failure(Dialer(stall_seconds=5), Origin(host, 80, False))
    assert error.cause is Break.DNS


async def test_an_address_that_is_refused_by_policy_is_never_connected_to(nursery):
    met = []

    async def handler(_stream: trio.abc.Stream) -> None:
        met.append(1)

    port = await serve(nursery, handler)
    asked = []

    def forbid(address: str) -> str:
        asked.append(address)
        return "loopback is not allowed"

    for host in ("127.0.0.1", "evil.test"):
        error = await failure(
            make_dialer(evil_test=["127.0.0.1"]), Origin(host, port, False), permit=forbid
        )
        assert error.cause is Break.ADDRESS_POLICY
        assert "loopback is not allowed" in error.detail
    assert asked == ["127.0.0.1", "127.0.0.1"]
    await trio.testing.wait_all_tasks_blocked()
    assert met == []


async def test_numeric_spellings_that_only_the_system_knows_reach_the_policy():
    asked = []

    def forbid(address: str) -> str:
        asked.append(address)
        return "no"

    for host in ("2130706433", "127.1", "0x7f000001"):
        assert not is_numeric(host)
        error = await failure(Dialer(stall_seconds=5), Origin(host, 80, False), permit=forbid)
        assert error.cause is Break.ADDRESS_POLICY
    assert asked == ["127.0.0.1"] * 3


async def test_the_policy_leaves_the_other_addresses(nursery):
    port = await serve(nursery, echo, host="127.0.0.2")
    dialer = make_dialer(agent_test=["127.0.0.1", "127.0.0.2"])
    wire = await dial(
        dialer,
        Origin("agent.test", port, False),
        permit=lambda address: "no" if address == "127.0.0.1" else "",
    )
    assert wire.peer == f"127.0.0.2:{port}"
    wire.abort()


# --- names ------------------------------------------------------------------------------------


async def test_one_lookup_serves_many_and_outlives_the_caller_that_asked_first(nursery):
    port = await serve(nursery, echo)
    names = Names(agent_test=["127.0.0.1"])
    names.gate = trio.Event()
    dialer = Dialer(stall_seconds=5, resolve=names)
    origin = Origin("agent.test", port, False)
    first = trio.CancelScope()

    async def leave_early() -> None:
        with first:
            await dial(dialer, origin)

    async def stay() -> None:
        await check_echo(await dial(dialer, origin))

    async with trio.open_nursery() as callers:
        callers.start_soon(leave_early)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            callers.start_soon(stay)
        await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        await trio.testing.wait_all_tasks_blocked()
        names.gate.set()
    assert names.asked == ["agent.test"]


async def test_names_are_kept_for_five_seconds_and_failures_are_not(autojump_clock):
    names = Names(agent_test=["127.0.0.1"])
    kept = net._Names(names)
    assert await kept.get("agent.test") == ["127.0.0.1"]
    await trio.sleep(4.9)
    await kept.get("agent.test")
    assert names.asked == ["agent.test"]
    await trio.sleep(0.2)
    await kept.get("agent.test")
    assert names.asked == ["agent.test"] * 2
    for _ in range(2):
        with pytest.raises(DialError):
            await kept.get("other.test")
    assert names.asked == ["agent.test"] * 2 + ["other.test"] * 2


async def test_the_number_of_kept_names_is_bounded(monkeypatch, autojump_clock):
    monkeypatch.setattr(net, "_NAMES_KEPT", 3)

    async def resolve(_host: str) -> list[str]:
        return ["127.0.0.1"]

    kept = net._Names(resolve)
    for number in range(10):
        await kept.get(f"{number}.test")
    assert len(kept._kept) == 3
    await trio.sleep(6)
    await kept.get("late.test")
    assert list(kept._kept) == ["late.test"]


# --- happy eyeballs -----------------------------------------------------------------------------


async def test_a_refusing_address_gives_way_at_once(nursery):
    port = await serve(nursery, echo, host="127.0.0.2")
    dialer = make_dialer(agent_test=["127.0.0.1", "127.0.0.2"])
    begun = trio.current_time()
    wire = await dial(dialer, Origin("agent.test", port, False))
    assert wire.peer == f"127.0.0.2:{port}"
    assert trio.current_time() - begun < 0.2
    await check_echo(wire)


async def test_a_silent_address_is_overtaken_after_250_ms(nursery, monkeypatch, autojump_clock):
    left, right = socket.socketpair()
    begun: list[tuple[float, str]] = []
    start = trio.current_time()

    async def connect(address: str, _port: int) -> socket.socket:
        begun.append((round(trio.current_time() - start, 3), address))
        if address != "127.0.0.3":
            await trio.sleep_forever()
        return left

    monkeypatch.setattr(net, "_connect", connect)
    race = net._Race(80, anywhere)
    assert await race.run(["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]) is left
    assert begun == [(0.0, "127.0.0.1"), (0.25, "127.0.0.2"), (0.5, "127.0.0.3")]
    left.close()
    right.close()


async def test_losers_are_closed_unused(monkeypatch, autojump_clock):
    pairs = [socket.socketpair() for _ in range(2)]

    async def connect(address: str, _port: int) -> socket.socket:
        # the second one connects in the same instant, too late to be cancelled
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
        return pairs[0 if address == "127.0.0.1" else 1][0]

    monkeypatch.setattr(net, "_connect", connect)
    monkeypatch.setattr(net, "_STAGGER_SECONDS", 0.0)
    winner = await net._Race(80, anywhere).run(["127.0.0.1", "127.0.0.2"])
    assert winner is not None
    for ours, theirs in pairs:
        if ours is not winner:
            assert theirs.recv(1) == b""
            assert ours.fileno() == -1
    for pair in pairs:
        for sock in pair:
            sock.close()


async def test_all_addresses_are_tried_and_named(nursery):
    dialer = make_dialer(agent_test=["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    error = await failure(dialer, Origin("agent.test", closed_port(), False))
    assert error.cause is Break.REFUSED
    assert all(f"127.0.0.{number}" in error.detail for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ([errno.ECONNREFUSED, errno.ENETUNREACH], Break.REFUSED),
        ([errno.EHOSTUNREACH, errno.ECONNREFUSED], Break.REFUSED),
        ([errno.EHOSTUNREACH, errno.ENETUNREACH], Break.UNREACHABLE),
        ([errno.ETIMEDOUT, errno.ENETUNREACH], Break.CONNECT_TIMEOUT),
        ([errno.EAFNOSUPPORT], Break.UNREACHABLE),
        ([errno.EACCES], Break.UNREACHABLE),
        ([errno.EMFILE], Break.LOCAL),
        ([errno.ECONNREFUSED, errno.ENFILE], Break.LOCAL),
        ([errno.ENOMEM], Break.LOCAL),
        ([errno.EADDRNOTAVAIL], Break.LOCAL),
    ],
)
async def test_what_several_failures_are_called(monkeypatch, codes, cause):
    failures = iter(codes)

    async def connect(_address: str, _port: int) -> socket.socket:
        code = next(failures)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(net, "_connect", connect)
    addresses = [f"127.0.0.{number + 1}" for number in range(len(codes))]
    error = await failure(make_dialer(agent_test=addresses), Origin("agent.test", 80, False))
    assert error.cause is cause


async def test_an_address_that_this_host_does_not_have_is_unreachable(monkeypatch):
    # without IPv6, ::1 gives EADDRNOTAVAIL to TCP and UDP alike; out of ports only to TCP
    monkeypatch.setattr(net, "_has_route", lambda _address: False)
    error = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    assert net._cause_of_connect(error, "::1") is Break.UNREACHABLE


def test_families_take_turns_beginning_with_the_best():
    assert net._interleave(["::1", "::2", "127.0.0.1", "::3", "127.0.0.2"]) == [
        "::1",
        "127.0.0.1",
        "::2",
        "127.0.0.2",
        "::3",
    ]
    assert net._interleave(["127.0.0.1", "::1"]) == ["127.0.0.1", "::1"]


async def test_a_connection_to_itself_is_refused(monkeypatch):
    # a closed port that is also the port that the kernel picks for our end
    port = closed_port()
    real = socket.socket

    class Bound(real):  # type: ignore[valid-type, misc]
        def connect(self, address: object) -> None:
            self.bind(address)
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Bound)
    error = await failure(make_dialer(), Origin("127.0.0.1", port, False))
    assert error.cause is Break.REFUSED


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
async def test_ports_that_do_not_exist(port):
    assert (await failure(make_dialer(), Origin("127.0.0.1", port, False))).cause is (
        Break.UNREACHABLE
    )


async def test_out_of_descriptors_is_local():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    dialer = make_dialer(agent_test=socket.gaierror(socket.EAI_NONAME, "Name not known"))
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        numeric = await failure(dialer, Origin("127.0.0.1", 9, False))
        named = await failure(dialer, Origin("agent.test", 9, False))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert numeric.cause is Break.LOCAL
    assert named.cause is Break.LOCAL


async def test_a_cancelled_dial_leaves_no_socket_behind(nursery, monkeypatch):
    opened = []
    real = socket.socket

    class Silent(real):  # type: ignore[valid-type, misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self)

        def connect(self, _address: object) -> None:
            raise BlockingIOError

    async def never(_sock: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(socket, "socket", Silent)
    monkeypatch.setattr(trio.lowlevel, "wait_writable", never)
    dialer = make_dialer(agent_test=["127.0.0.1", "127.0.0.2"])
    for host in ("127.0.0.1", "agent.test"):
        with trio.move_on_after(0.3) as scope:
            await dialer.dial(Origin(host, 80, False), alpn="h2", identity=PLAIN, permit=anywhere)
        assert scope.cancelled_caught
    assert len(opened) == 3
    assert all(sock.fileno() == -1 for sock in opened)


# --- TLS ----------------------------------------------------------------------------------------


async def test_tls_with_the_private_ca(nursery, ca_file):
    identity = TlsIdentity(ca_file=ca_file)
    for alpn in ("http/1.1", "h2"):
        port = await serve(nursery, echo, tls=server_context(CERT, alpn))
        dialer = make_dialer(agent_test=["127.0.0.1"])
        wire = await dial(dialer, Origin("agent.test", port, True), alpn=alpn, identity=identity)
        assert wire.peer == f"127.0.0.1:{port}"
        await check_echo(wire)


async def test_tls_to_addresses_and_absolute_names(nursery, ca_file):
    identity = TlsIdentity(ca_file=ca_file)
    port = await serve(nursery, echo, tls=server_context(CERT, "http/1.1"))
    await check_echo(await dial(make_dialer(), Origin("127.0.0.1", port, True), identity=identity))
    dialer = Dialer(stall_seconds=5, resolve=lambda _host: make_addresses("127.0.0.1"))
    await check_echo(await dial(dialer, Origin("agent.test.", port, True), identity=identity))


async def make_addresses(*addresses: str) -> list[str]:
    return list(addresses)


async def test_server_name_replaces_the_host(nursery, ca_file):
    names = []
    context = server_context(CERT, "http/1.1")
    context.sni_callback = lambda _ssl, name, _context: names.append(name)
    port = await serve(nursery, echo, tls=context)
    dialer = make_dialer(internal_test=["127.0.0.1"])
    origin = Origin("internal.test", port, True)
    error = await failure(dialer, origin, identity=TlsIdentity(ca_file=ca_file))
    assert error.cause is Break.TLS
    assert "internal.test" in error.detail
    assert "certificate verify failed" in error.detail
    identity = TlsIdentity(ca_file=ca_file, server_name="agent.test")
    await check_echo(await dial(dialer, origin, identity=identity))
    assert names == ["internal.test", "agent.test"]


async def test_the_private_ca_only_by_its_own_option(nursery, ca_file, monkeypatch):
    """D74: the environment decides nothing, for neither protocol."""
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", ca_file)
    monkeypatch.setenv("CURL_CA_BUNDLE", ca_file)
    for alpn in ("http/1.1", "h2"):
        port = await serve(nursery, echo, tls=server_context(CERT, alpn))
        error = await failure(make_dialer(), Origin("127.0.0.1", port, True), alpn=alpn)
        assert error.cause is Break.TLS
        assert "certificate verify failed" in error.detail
        assert f"127.0.0.1:{port}" in error.detail


@pytest.mark.parametrize(
    ("offered", "served", "works"),
    [
        ("h2", ["h2", "http/1.1"], True),
        ("h2", ["http/1.1"], False),
        ("h2", [], False),
        ("http/1.1", ["h2", "http/1.1"], True),
        ("http/1.1", [], True),
        ("http/1.1", ["h2"], True),  # Python's server then chooses none
    ],
)
async def test_the_protocol_must_be_chosen(nursery, ca_file, offered, served, works):
    port = await serve(nursery, echo, tls=server_context(CERT, *served))
    identity = TlsIdentity(ca_file=ca_file)
    origin = Origin("127.0.0.1", port, True)
    if works:
        await check_echo(await dial(make_dialer(), origin, alpn=offered, identity=identity))
    else:
        error = await failure(make_dialer(), origin, alpn=offered, identity=identity)
        assert error.cause is Break.ALPN


async def test_a_server_that_refuses_the_protocol_by_alert(nursery, ca_file):
    async def refuse(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(bytes.fromhex("15 0303 0002 02 78"))  # fatal, 120 (RFC 7301 3.2)

    port = await serve(nursery, refuse)
    identity = TlsIdentity(ca_file=ca_file)
    origin = Origin("127.0.0.1", port, True)
    error = await failure(make_dialer(), origin, alpn="h2", identity=identity)
    assert error.cause is Break.ALPN


async def test_a_server_that_chooses_what_was_not_offered(nursery, ca_file, monkeypatch):
    monkeypatch.setattr("sidecar.wire.tls.TlsWire.alpn", "h2")
    port = await serve(nursery, echo, tls=server_context(CERT))
    identity = TlsIdentity(ca_file=ca_file)
    error = await failure(make_dialer(), Origin("127.0.0.1", port, True), identity=identity)
    assert error.cause is Break.ALPN


async def test_plaintext_where_tls_was_declared(nursery, ca_file):
    async def plain(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    port = await serve(nursery, plain)
    identity = TlsIdentity(ca_file=ca_file)
    error = await failure(make_dialer(), Origin("127.0.0.1", port, True), identity=identity)
    assert error.cause is Break.TLS


async def test_a_connection_lost_in_the_handshake(nursery, ca_file):
    async def leave(stream: trio.abc.Stream) -> None:
        await stream.receive_some(65536)
        reset(stream)

    port = await serve(nursery, leave)
    identity = TlsIdentity(ca_file=ca_file)
    error = await failure(make_dialer(), Origin("127.0.0.1", port, True), identity=identity)
    assert error.cause is Break.TLS
    assert "handshake" in error.detail


async def test_our_own_files_that_cannot_be_read_are_local(nursery, tmp_path):
    port = await serve(nursery, echo, tls=server_context(CERT))
    missing = str(tmp_path / "client.pem")
    error = await failure(
        make_dialer(),
        Origin("127.0.0.1", port, True),
        identity=TlsIdentity(client_cert_file=missing),
    )
    assert error.cause is Break.LOCAL
    assert missing in error.detail


@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
async def test_mutual_tls(nursery, ca_file, tmp_path, alpn):
    context = server_context(CERT, alpn)
    context.verify_mode = ssl.CERT_REQUIRED
    CA.configure_trust(context)
    port = await serve(nursery, echo, tls=context)
    ours = tmp_path / "client.pem"
    CA.issue_cert("client.test").private_key_and_cert_chain_pem.write_to_path(ours)
    identity = TlsIdentity(ca_file=ca_file, client_cert_file=str(ours))
    wire = await dial(make_dialer(), Origin("127.0.0.1", port, True), alpn=alpn, identity=identity)
    await check_echo(wire)


@pytest.mark.parametrize("alpn", ["http/1.1", "h2"])
async def test_a_missing_client_certificate_is_refused_after_the_handshake(nursery, ca_file, alpn):
    context = server_context(CERT, alpn)
    context.verify_mode = ssl.CERT_REQUIRED
    CA.configure_trust(context)
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:  # by OpenSSL on the socket: trio's streams do not send their alert
        with listener, listener.accept()[0] as sock, pytest.raises(ssl.SSLError):
            context.wrap_socket(sock, server_side=True)

    nursery.start_soon(trio.to_thread.run_sync, refuse)
    origin = Origin("127.0.0.1", listener.getsockname()[1], True)
    wire = await dial(make_dialer(), origin, alpn=alpn, identity=TlsIdentity(ca_file=ca_file))
    with trio.fail_after(5):
        with contextlib.suppress(WireBroken):
            await wire.send(b"request")
        with pytest.raises(WireBroken) as caught:
            await wire.receive()
    assert caught.value.cause is Break.CERTIFICATE_ALERT
    wire.abort()


async def test_a_look_at_an_idle_tls_connection(nursery, ca_file):
    leave = trio.Event()

    async def wait(stream: trio.abc.Stream) -> None:
        await stream.receive_some(1)
        await stream.send_all(b"answer")
        await leave.wait()
        await stream.aclose()

    port = await serve(nursery, wait, tls=server_context(CERT, "http/1.1"))
    identity = TlsIdentity(ca_file=ca_file)
    wire = await dial(make_dialer(), Origin("127.0.0.1", port, True), identity=identity)
    await wire.send(b"x")
    assert await wire.receive() == b"answer"
    assert not wire.has_input()
    leave.set()
    await until(wire.has_input)
    assert await wire.receive() == b""
    wire.abort()


# --- proxies ------------------------------------------------------------------------------------


class Proxy:
    """CONNECT to one place, whatever is asked."""

    def __init__(self, target: int, answer: bytes = b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n") -> None:
        self.target = target
        self.answer = answer
        self.heads: list[str] = []

    async def __call__(self, stream: trio.abc.Stream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some(65536)
            if not data:
                return
            head += data
        self.heads.append(head.decode())
        if self.answer:
            await stream.send_all(self.answer)
        if b" 200" not in self.answer.split(b"\r\n")[0]:
            return
        behind = await trio.open_tcp_stream("127.0.0.1", self.target)

        async def copy(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
            async for data in source:
                await sink.send_all(data)
            nursery.cancel_scope.cancel()

        async with behind, trio.open_nursery() as nursery:
            nursery.start_soon(copy, stream, behind)
            nursery.start_soon(copy, behind, stream)


async def test_everything_goes_through_the_proxy_and_names_are_its_business(nursery, ca_file):
    names = Names()
    dialer = Dialer(stall_seconds=5, resolve=names)
    for tls in (False, True):
        port = await serve(nursery, echo, tls=server_context(CERT, "h2") if tls else None)
        proxy = Proxy(port)
        proxy_port = await serve(nursery, proxy)
        wire = await dial(
            dialer,
            Origin("agent.test", 7101, tls),
            alpn="h2",
            identity=TlsIdentity(ca_file=ca_file),
            permit=lambda _address: "never asked about a name or the proxy",
            proxy=f"http://us%40er:p%3Aw@127.0.0.1:{proxy_port}",
        )
        await check_echo(wire)
        login = base64.b64encode(b"us@er:p:w").decode()
        authorization = f"Proxy-Authorization: Basic {login}\r\n"
        assert proxy.heads == [
            f"CONNECT agent.test:7101 HTTP/1.1\r\nHost: agent.test:7101\r\n{authorization}\r\n"
        ]
    assert names.asked == []


async def test_a_numeric_target_behind_a_proxy_is_still_judged(nursery):
    proxy = Proxy(1)
    proxy_port = await serve(nursery, proxy)
    error = await failure(
        make_dialer(),
        Origin("169.254.169.254", 80, False),
        permit=lambda _address: "link-local",
        proxy=f"http://127.0.0.1:{proxy_port}",
    )
    assert error.cause is Break.ADDRESS_POLICY
    assert proxy.heads == []


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\n\r\n",
        b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"",
        b"x" * 20000,
    ],
    ids=["403", "407", "ssh", "100", "closed", "endless"],
)
async def test_a_proxy_that_refuses(nursery, answer):
    proxy_port = await serve(nursery, Proxy(1, answer))
    error = await failure(
        make_dialer(),
        Origin("agent.test", 80, False),
        proxy=f"http://user:secret@127.0.0.1:{proxy_port}",
    )
    assert error.cause is Break.PROXY
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    "proxy",
    ["socks5://127.0.0.1:9", "https://127.0.0.1:9", "127.0.0.1:3128", "http://h:port", "http://"],
)
async def test_proxies_that_are_none(proxy):
    error = await failure(make_dialer(), Origin("agent.test", 80, False), proxy=proxy)
    assert error.cause is Break.PROXY


async def test_a_proxy_that_is_not_there():
    error = await failure(
        make_dialer(), Origin("agent.test", 80, False), proxy=f"http://127.0.0.1:{closed_port()}"
    )
    assert error.cause is Break.PROXY
    assert "refused" in error.detail


async def test_what_follows_the_proxys_answer_belongs_to_the_tunnel(nursery):
    port = await serve(nursery, echo)
    proxy_port = await serve(nursery, Proxy(port, b"HTTP/1.0 200 Ok\r\n\r\nSETTINGS"))
    wire = await dial(
        make_dialer(), Origin("agent.test", 80, False), proxy=f"http://127.0.0.1:{proxy_port}"
    )
    assert wire.has_input()
    assert await wire.receive() == b"SETTINGS"
    await check_echo(wire)


async def test_a_host_cannot_smuggle_headers_to_the_proxy(nursery):
    proxy = Proxy(1)
    proxy_port = await serve(nursery, proxy)
    error = await failure(
        make_dialer(),
        Origin("agent.test\r\nX-Evil: 1", 80, False),
        proxy=f"http://127.0.0.1:{proxy_port}",
    )
    assert error.cause is Break.DNS
    assert proxy.heads == []


async def test_the_environments_proxies_are_not_used(nursery, monkeypatch):
    """D70, D95."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    port = await serve(nursery, echo)
    await check_echo(await dial(make_dialer(), Origin("127.0.0.1", port, False)))
