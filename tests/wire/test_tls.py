"""TLS on memory buffers, against Python's own server side."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl

import pytest
import trio
import trio.testing
import trustme
from cryptography.hazmat.primitives import serialization

from sidecar.core.types import Break
from sidecar.wire.sockets import SocketWire, WireBroken
from sidecar.wire.tls import Contexts, TlsIdentity, TlsWire, connect_tls, make_context
from tests.wire.loopback import server_context
from tests.wire.memory import MemoryWire, memory_wire_pair

CA = trustme.CA()
CERT = CA.issue_cert("agent.test", "127.0.0.1")


@pytest.fixture
def ca_file(tmp_path) -> str:
    path = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture
def client_cert(tmp_path) -> str:
    path = tmp_path / "client.pem"
    trustme.CA().issue_cert("client.test").private_key_and_cert_chain_pem.write_to_path(path)
    return str(path)


class Server:
    """The server side of TLS on the far end of a memory wire, driven by hand."""

    def __init__(self, wire: MemoryWire, context: ssl.SSLContext) -> None:
        self.wire = wire
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_side=True)

    async def flush(self) -> None:
        if self.outgoing.pending:
            await self.wire.send(self.outgoing.read())

    async def run(self, step) -> object:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self.flush()
                data = await self.wire.receive()
                if data:
                    self.incoming.write(data)
                else:
                    self.incoming.write_eof()
            except ssl.SSLError:
                await self.flush()
                raise
            else:
                await self.flush()
                return result

    async def handshake(self) -> None:
        await self.run(self.ssl.do_handshake)

    async def read(self) -> bytes:
        return await self.run(lambda: self.ssl.read(65536))  # type: ignore[return-value]

    async def write(self, data: bytes) -> None:
        self.ssl.write(data)
        await self.flush()


async def connected(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[TlsWire, Server, MemoryWire]:
    ours, theirs = memory_wire_pair()
    far = Server(theirs, server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.handshake)
        wire = await connect_tls(ours, client, "agent.test")
    return wire, far, ours


@pytest.fixture(params=[ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def server(request) -> ssl.SSLContext:
    context = server_context(CERT, "http/1.1")
    context.maximum_version = request.param
    return context


@pytest.fixture
def client(ca_file) -> ssl.SSLContext:
    return make_context(TlsIdentity(ca_file=ca_file), "http/1.1")


# --- data -------------------------------------------------------------------------------------


async def test_bytes_both_ways_and_the_protocol_chosen(client, server):
    wire, far, _ = await connected(client, server)
    assert wire.alpn == "http/1.1"
    request = os.urandom(300_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.send, request)
        received = b""
        while len(received) < len(request):
            received += await far.read()
    assert received == request
    await far.write(b"answer")
    assert await wire.receive() == b"answer"


async def test_many_small_records_are_received_at_once(client, server):
    wire, far, _ = await connected(client, server)
    for number in range(100):
        far.ssl.write(b"%02d" % number)
    await far.flush()
    assert await wire.receive() == b"".join(b"%02d" % number for number in range(100))


async def test_empty_sends_are_allowed(client, server):
    wire, far, _ = await connected(client, server)
    await wire.send(b"")
    await wire.send(b"x")
    assert await far.read() == b"x"


async def test_records_that_arrive_byte_by_byte(client, server):
    wire, far, _ = await connected(client, server)
    far.ssl.write(b"slowly")
    record = far.outgoing.read()
    async with trio.open_nursery() as nursery:

        async def trickle() -> None:
            for byte in record:
                await far.wire.send(bytes([byte]))

        nursery.start_soon(trickle)
        assert await wire.receive() == b"slowly"


# --- ends -------------------------------------------------------------------------------------


async def test_close_notify_is_a_clean_end_after_the_data(client, server):
    wire, far, _ = await connected(client, server)
    far.ssl.write(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        far.ssl.unwrap()
    await far.flush()
    await far.wire.aclose()
    assert await wire.receive() == b"last"
    assert await wire.receive() == b""
    assert await wire.receive() == b""


async def test_a_bare_fin_is_an_unclean_end(client, server):
    wire, far, _ = await connected(client, server)
    await far.write(b"half an ans")
    await far.wire.aclose()
    assert await wire.receive() == b"half an ans"
    for _ in range(2):
        with pytest.raises(WireBroken) as caught:
            await wire.receive()
        assert caught.value.cause is Break.EOF


async def test_a_reset_stays_a_reset(client, server):
    wire, far, _ = await connected(client, server)
    await far.write(b"some")
    far.wire.reset()
    assert await wire.receive() == b"some"
    with pytest.raises(WireBroken) as caught:
        await wire.receive()
    assert caught.value.cause is Break.RESET


async def test_garbage_between_records_is_a_tls_error(client, server):
    wire, far, _ = await connected(client, server)
    await far.wire.send(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(WireBroken) as caught:
        await wire.receive()
    assert caught.value.cause is Break.TLS


async def test_aclose_says_close_notify(client, server):
    wire, far, ours = await connected(client, server)
    await wire.aclose()
    assert await far.read() == b""
    assert ours.closed


async def test_aclose_says_close_notify_with_input_unread(client, server):
    wire, far, _ = await connected(client, server)
    await far.write(b"nobody reads this")
    assert wire.has_input()
    await far.write(b"nor this")
    wire._feed(wire._inner.receive_nowait() or b"")
    await wire.aclose()
    assert await far.read() == b""


async def test_aclose_is_bounded_when_the_peer_takes_nothing(client, server, autojump_clock):
    wire, _far, ours = await connected(client, server)
    ours.stall()
    begun = trio.current_time()
    await wire.aclose()
    assert trio.current_time() - begun <= 1.5
    assert ours.closed


async def test_abort_closes_without_a_goodbye(client, server):
    wire, far, ours = await connected(client, server)
    far.wire.drain()
    wire.abort()
    assert ours.aborted
    assert far.wire.drain() == b""


# --- a look before reuse ------------------------------------------------------------------------


async def test_session_tickets_are_no_input(client, server):
    wire, far, ours = await connected(client, server)
    if far.ssl.version() == "TLSv1.3":
        assert ours.has_input(), "this server sends no tickets: the test proves nothing"
    assert not wire.has_input()
    await far.write(b"data")
    assert wire.has_input()
    assert wire.has_input()
    assert await wire.receive() == b"data"
    assert not wire.has_input()


@pytest.mark.parametrize("end", ["close_notify", "fin", "reset"])
async def test_every_end_is_input(client, server, end):
    wire, far, _ = await connected(client, server)
    assert not wire.has_input()
    if end == "close_notify":
        with pytest.raises(ssl.SSLWantReadError):
            far.ssl.unwrap()
        await far.flush()
    elif end == "fin":
        far.wire.cut()
    else:
        far.wire.reset()
    assert wire.has_input()
    assert wire.has_input()
    if end == "close_notify":
        assert await wire.receive() == b""
    else:
        with pytest.raises(WireBroken):
            await wire.receive()


# --- what was written ---------------------------------------------------------------------------


async def test_a_failed_first_inner_send_took_nothing_and_reading_goes_on(client, server):
    wire, far, ours = await connected(client, server)
    await far.write(b"early answer")
    ours.fail_next_send()
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"request")
    assert (caught.value.cause, caught.value.taken) == (Break.RESET, False)
    assert await wire.receive() == b"early answer"


async def test_a_send_broken_inside_a_record_was_taken(client, server):
    wire, _far, ours = await connected(client, server)
    ours.fail_next_send(after=4)
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"request")
    assert caught.value.taken


async def test_a_later_chunk_that_fails_whole_was_still_taken(client, server):
    wire, far, ours = await connected(client, server)
    far.wire.drain()
    original = ours.send

    async def fail_second(data: bytes | memoryview) -> None:
        await original(data)
        ours.fail_next_send()

    ours.send = fail_second  # type: ignore[method-assign]
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"x" * 200_000)
    assert caught.value.taken


async def test_nothing_follows_a_cancelled_send(client, server, autojump_clock):
    wire, _far, ours = await connected(client, server)
    ours.stall()
    with trio.move_on_after(1):
        await wire.send(b"request")
    ours.resume()
    before = len(ours.sends)
    with pytest.raises(WireBroken) as caught:
        await wire.send(b"another")
    assert not caught.value.taken
    await wire.aclose()
    assert len(ours.sends) == before


# --- our certificate ----------------------------------------------------------------------------


async def test_a_client_certificate_refused_after_the_handshake(ca_file, client_cert):
    server = server_context(CERT, "http/1.1")
    server.verify_mode = ssl.CERT_REQUIRED
    CA.configure_trust(server)
    for identity in (
        TlsIdentity(ca_file=ca_file),
        TlsIdentity(ca_file=ca_file, client_cert_file=client_cert),
    ):
        ours, theirs = memory_wire_pair()
        far = Server(theirs, server)
        async with trio.open_nursery() as nursery:

            async def refuse(far: Server = far) -> None:
                with pytest.raises(ssl.SSLError):
                    await far.handshake()
                await far.wire.aclose()

            nursery.start_soon(refuse)
            wire = await connect_tls(ours, make_context(identity, "http/1.1"), "agent.test")
        await wire.send(b"request")
        for _ in range(2):
            with pytest.raises(WireBroken) as caught:
                await wire.receive()
            assert caught.value.cause is Break.CERTIFICATE_ALERT


async def test_a_refused_certificate_is_found_after_a_failed_write_on_sockets(ca_file):
    server = server_context(CERT, "http/1.1")
    server.verify_mode = ssl.CERT_REQUIRED
    CA.configure_trust(server)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

    def refuse() -> None:
        with pytest.raises(ssl.SSLError):
            server.wrap_socket(theirs, server_side=True)

    inner = SocketWire(ours, stall_seconds=5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, refuse)
        wire = await connect_tls(
            inner, make_context(TlsIdentity(ca_file=ca_file), "http/1.1"), "agent.test"
        )
    theirs.close()
    with contextlib.suppress(WireBroken):
        for _ in range(3):
            await wire.send(b"request")
        pytest.fail("nothing failed: the test proves nothing")
    with pytest.raises(WireBroken) as caught:
        await wire.receive()
    assert caught.value.cause is Break.CERTIFICATE_ALERT
    wire.abort()


@pytest.mark.parametrize(
    ("fresh", "cause"),
    [(True, Break.CERTIFICATE_ALERT), (False, Break.TLS)],
    ids=["first", "later"],
)
async def test_only_the_first_thing_received_can_be_a_certificate_alert(
    client, server, fresh, cause
):
    wire, far, _ = await connected(client, server)
    if not fresh:
        await far.write(b"data")
        assert await wire.receive() == b"data"
    alert = ssl.SSLError(ssl.SSL_ERROR_SSL, "alert")
    alert.reason = "TLSV1_ALERT_UNKNOWN_CA"

    class Alerted:
        def pending(self) -> int:
            return 1

        def read(self, _size: int) -> bytes:
            raise alert

    wire._ssl = Alerted()  # type: ignore[assignment]
    with pytest.raises(WireBroken) as caught:
        await wire.receive()
    assert caught.value.cause is cause


# --- handshakes ---------------------------------------------------------------------------------


async def failed_handshake(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str = "agent.test"
) -> WireBroken:
    ours, theirs = memory_wire_pair()
    far = Server(theirs, server)
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            with pytest.raises(ssl.SSLError):
                await far.handshake()
            await far.wire.aclose()

        nursery.start_soon(answer)
        with pytest.raises(WireBroken) as caught:
            await connect_tls(ours, client, name)
        ours.abort()
    return caught.value


async def test_a_certificate_for_another_name(client, server):
    error = await failed_handshake(client, server, "other.test")
    assert error.cause is Break.TLS
    assert "certificate verify failed" in error.detail
    assert "other.test" in error.detail


async def test_an_unknown_ca(server, tmp_path):
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    client = make_context(TlsIdentity(ca_file=str(other)), "http/1.1")
    error = await failed_handshake(client, server)
    assert error.cause is Break.TLS
    assert "certificate verify failed" in error.detail


async def test_an_expired_certificate(client):
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    expired = CA.issue_cert("agent.test", not_after=past)
    error = await failed_handshake(client, server_context(expired, "http/1.1"))
    assert error.cause is Break.TLS
    assert "expired" in error.detail


async def test_an_older_tls_is_refused(client):
    server = server_context(CERT)
    server.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        server.maximum_version = ssl.TLSVersion.TLSv1_1
    error = await failed_handshake(client, server)
    assert error.cause is Break.TLS


@pytest.mark.parametrize("name", ["", ".agent.test", "a" * 300 + ".test", "agent\0.test"])
async def test_names_that_cannot_be_verified(client, name):
    ours, _theirs = memory_wire_pair()
    with pytest.raises(WireBroken) as caught:
        await connect_tls(ours, client, name)
    assert caught.value.cause is Break.TLS
    assert ours.sends == []


@pytest.mark.parametrize("end", ["fin", "reset", "plain"])
async def test_a_peer_that_does_not_speak_tls(client, end):
    ours, theirs = memory_wire_pair()
    if end == "fin":
        theirs.cut()
    elif end == "reset":
        theirs.reset()
    else:
        await theirs.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(WireBroken) as caught:
        await connect_tls(ours, client, "agent.test")
    assert caught.value.cause is Break.TLS


# --- contexts -----------------------------------------------------------------------------------


async def test_contexts_are_kept_per_identity_and_protocol(ca_file):
    contexts = Contexts()
    identity = TlsIdentity(ca_file=ca_file)
    first = await contexts.get(identity, "h2")
    assert await contexts.get(TlsIdentity(ca_file=ca_file), "h2") is first
    assert await contexts.get(identity, "http/1.1") is not first


async def test_a_burst_makes_one_context(ca_file, monkeypatch):
    made = []

    def make(identity: TlsIdentity, alpn: str) -> ssl.SSLContext:
        made.append(alpn)
        return make_context(identity, alpn)

    monkeypatch.setattr("sidecar.wire.tls.make_context", make)
    contexts = Contexts()
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(contexts.get, TlsIdentity(ca_file=ca_file), "h2")
    assert made == ["h2"]


async def test_a_changed_file_makes_a_new_context_and_a_bad_one_keeps_the_old(tmp_path):
    path = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(path)
    contexts = Contexts()
    identity = TlsIdentity(ca_file=str(path))
    first = await contexts.get(identity, "h2")
    path.write_bytes(trustme.CA().cert_pem.bytes() + b"\n")
    second = await contexts.get(identity, "h2")
    assert second is not first
    path.write_bytes(b"not PEM")
    assert await contexts.get(identity, "h2") is second
    path.unlink()
    assert await contexts.get(identity, "h2") is second


@pytest.mark.parametrize("content", [None, b"", b"not PEM"])
async def test_files_that_cannot_be_used_are_os_errors(tmp_path, content):
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    for identity in (TlsIdentity(ca_file=str(path)), TlsIdentity(client_cert_file=str(path))):
        with pytest.raises(OSError):
            await Contexts().get(identity, "h2")


async def test_an_encrypted_key_does_not_ask_on_the_terminal(tmp_path, capfd):
    cert = CA.issue_cert("client.test")
    key = serialization.load_pem_private_key(cert.private_key_pem.bytes(), None)
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    identity = TlsIdentity(
        client_cert_file=str(tmp_path / "cert.pem"), client_key_file=str(tmp_path / "key.pem")
    )
    with pytest.raises(OSError):
        make_context(identity, "h2")
    assert capfd.readouterr() == ("", "")


def test_the_environment_adds_no_trust_and_no_key_log(ca_file, tmp_path, monkeypatch):
    log = tmp_path / "keys.log"
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    ours = CA.cert_pem.bytes().decode().strip()
    for identity, trusted in ((TlsIdentity(), False), (TlsIdentity(ca_file=ca_file), True)):
        context = make_context(identity, "h2")
        certificates = context.get_ca_certs(binary_form=True)
        pems = [ssl.DER_cert_to_PEM_cert(der).strip() for der in certificates]
        assert (ours in pems) is trusted
    assert not log.exists()
