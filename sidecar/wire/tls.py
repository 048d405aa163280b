"""TLS over any wire, on memory buffers; nothing about it is read from the environment.

What the peer sends is decrypted only in `receive` and `has_input`, what we send is encrypted only in
`send`, so that the inner wire has one sender and one receiver at a time, like every wire. An answer
that TLS itself owes (KeyUpdate) leaves with the next `send`, as RFC 8446 4.6.3 allows.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break
from sidecar.wire.sockets import CHUNK, WireBroken

if TYPE_CHECKING:
    from sidecar.wire.sockets import RawWire

_RECORDS: Final = 65536
"""Plain bytes that are encrypted before the inner wire gets them."""

_GOODBYE_SECONDS: Final = 1.0

_CERTIFICATE_ALERTS: Final = frozenset(
    {
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_ACCESS_DENIED",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "TLSV1_BAD_CERTIFICATE_STATUS_RESPONSE",
        "TLSV1_BAD_CERTIFICATE_HASH_VALUE",
        "TLSV1_CERTIFICATE_UNOBTAINABLE",
    }
)
"""Alerts that are about our certificate (RFC 8446 6.2), as OpenSSL names them."""


def is_tls(first: bytes) -> bool:
    """Whether what a peer sends begins with a TLS handshake record (RFC 8446 5.1)."""
    return first[:1] == b"\x16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentity:
    """How one agent is verified and who we are to it. '' leaves a member out.

    Files are PEM. With `ca_file` the system's store is not used. `server_name` replaces the host
    for SNI and verification.
    """

    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    """'' when the key is in `client_cert_file`."""
    server_name: str = ""


# --- contexts ---------------------------------------------------------------------------------


def make_context(identity: TlsIdentity, alpn: str) -> ssl.SSLContext:
    """A client context that offers `alpn` alone; reads files, so it belongs in a thread.

    Raises OSError (ssl.SSLError is one) for files that cannot be read or used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    if alpn:
        context.set_alpn_protocols([alpn])
    if identity.ca_file:
        context.load_verify_locations(cafile=identity.ca_file)
    else:
        _load_system_store(context)
    if identity.client_cert_file:
        # an empty password: an encrypted key fails here, and does not ask on the terminal
        context.load_cert_chain(
            identity.client_cert_file, identity.client_key_file or None, password=""
        )
    return context


def _load_system_store(context: ssl.SSLContext) -> None:
    """Trust what the system trusts: the places compiled into OpenSSL.

    `SSLContext.load_default_certs` would let SSL_CERT_FILE and SSL_CERT_DIR replace them.
    """
    paths = ssl.get_default_verify_paths()
    if os.path.isfile(paths.openssl_cafile):
        context.load_verify_locations(cafile=paths.openssl_cafile)
    if os.path.isdir(paths.openssl_capath):
        context.load_verify_locations(capath=paths.openssl_capath)


def make_server_context(cert_file: str, key_file: str) -> ssl.SSLContext:
    """A server context for HTTP/2 and HTTP/1.1; raises OSError as `make_context` does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.load_cert_chain(cert_file, key_file, password="")
    return context


class Contexts:
    """One context per (identity, ALPN protocol), made in a thread, again when its files change."""

    def __init__(self) -> None:
        self._made: dict[tuple[TlsIdentity, str], tuple[object, ssl.SSLContext]] = {}
        self._making = trio.Lock()

    async def get(self, identity: TlsIdentity, alpn: str) -> ssl.SSLContext:
        """Raises OSError as `make_context` does; changed files that fail keep the old context."""
        state = _state_of(identity)
        context = self._find(identity, alpn, state)
        if context is None:
            async with self._making:  # a burst of dials makes one
                context = self._find(identity, alpn, state)
                if context is None:
                    context = await self._make(identity, alpn, state)
        return context

    def _find(self, identity: TlsIdentity, alpn: str, state: object) -> ssl.SSLContext | None:
        known = self._made.get((identity, alpn))
        return known[1] if known is not None and known[0] == state else None

    async def _make(self, identity: TlsIdentity, alpn: str, state: object) -> ssl.SSLContext:
        try:
            context = await trio.to_thread.run_sync(make_context, identity, alpn)
        except OSError:
            known = self._made.get((identity, alpn))
            if known is None:
                raise
            return known[1]
        self._made[identity, alpn] = (state, context)
        return context


def _state_of(identity: TlsIdentity) -> tuple[object, ...]:
    """What changes when a file of `identity` is replaced or written to."""
    state: list[object] = []
    for name in (identity.ca_file, identity.client_cert_file, identity.client_key_file):
        if name:
            with contextlib.suppress(OSError):
                found = os.stat(name)
                state += (name, found.st_mtime_ns, found.st_size, found.st_ino)
    return tuple(state)


# --- the wire ---------------------------------------------------------------------------------


async def connect_tls(inner: RawWire, context: ssl.SSLContext, server_name: str) -> TlsWire:
    """Shake hands as the client; `inner` is the caller's to close when this raises.

    Raises WireBroken TLS for every failure, a lost connection included. The caller bounds it.
    """
    try:
        wire = TlsWire(inner, context, server_name)
    except (TypeError, ValueError, OSError) as error:  # not a name: too long, empty, with a NUL
        raise WireBroken(Break.TLS, detail=f"{server_name!r} cannot be verified: {error}") from None
    await wire.handshake()
    return wire


async def accept_tls(inner: RawWire, context: ssl.SSLContext) -> TlsWire:
    """Shake hands as the server; otherwise as `connect_tls`."""
    wire = TlsWire(inner, context, None)
    await wire.handshake()
    return wire


class TlsWire:
    """A Wire that encrypts."""

    __slots__ = (
        "_ahead",
        "_end",
        "_fresh",
        "_incoming",
        "_inner",
        "_outgoing",
        "_ssl",
        "_unsendable",
        "peer",
    )

    def __init__(self, inner: RawWire, context: ssl.SSLContext, server_name: str | None) -> None:
        """`server_name`: whom a client expects; None for a server."""
        self.peer = inner.peer
        self._inner = inner
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._ahead = b""
        self._end: WireBroken | bool = False
        """Set when nothing more can be read: True after close_notify, else why."""
        self._fresh = True
        """No application data was received yet."""
        self._unsendable = False
        """A send was broken off, perhaps inside a record: nothing may follow it."""

    @property
    def alpn(self) -> str:
        """The protocol that the server chose, '' for none."""
        return self._ssl.selected_alpn_protocol() or ""

    async def handshake(self) -> None:
        """See `connect_tls`."""
        try:
            while not self._handshake_step():
                await self._flush()
                self._feed(await self._inner.receive())
            await self._flush()
        except ssl.SSLError as error:
            with contextlib.suppress(WireBroken):
                await self._flush()  # the alert that tells the server why
            raise _handshake_failure(error) from None
        except WireBroken as error:
            if error.cause is Break.LOCAL:
                raise
            detail = f"connection lost during the handshake: {error.detail}"
            raise WireBroken(Break.TLS, detail=detail) from None

    async def send(self, data: bytes | memoryview) -> None:
        """See `Wire.send`."""
        if self._unsendable:
            raise WireBroken(Break.LOCAL, taken=False, detail="an earlier send was broken off")
        self._unsendable = True
        if len(data) <= _RECORDS:
            if data:
                await self._send_records(data, taken=False)
        else:
            view = memoryview(data)
            for offset in range(0, len(view), _RECORDS):
                await self._send_records(view[offset : offset + _RECORDS], taken=offset > 0)
        self._unsendable = False

    async def receive(self) -> bytes:
        """See `Wire.receive`."""
        while True:
            data = self.receive_nowait()
            if data is not None:
                return data
            try:
                self._feed(await self._inner.receive())
            except WireBroken as error:
                self._end = error

    def receive_nowait(self) -> bytes | None:
        """See `RawWire.receive_nowait`; looks only at what the inner wire has given already."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        return self._decrypt()

    def has_input(self) -> bool:
        """See `Wire.has_input`. Session tickets and the like are taken in and do not count."""
        while not self._ahead:
            try:
                data = self._decrypt()
                if data is None:
                    more = self._inner.receive_nowait()
                    if more is None:
                        return False
                    self._feed(more)
                    continue
            except WireBroken as error:
                self._end = error
                return True
            if not data:
                return True
            self._ahead = data
        return True

    async def aclose(self) -> None:
        """See `Wire.aclose`: close_notify, then the inner wire's goodbye."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _GOODBYE_SECONDS):
            if not self._unsendable:
                self._unsendable = True
                # raises for want of the peer's goodbye, or for data that nobody has read
                with contextlib.suppress(ssl.SSLError):
                    self._ssl.unwrap()
                with contextlib.suppress(WireBroken):
                    await self._flush()
            await self._inner.aclose()
        self._inner.abort()

    def abort(self) -> None:
        """See `Wire.abort`."""
        self._unsendable = True
        self._inner.abort()

    # --- inside -------------------------------------------------------------------------------

    def _handshake_step(self) -> bool:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    async def _send_records(self, data: bytes | memoryview, *, taken: bool) -> None:
        try:
            self._ssl.write(data)
            await self._inner.send(self._outgoing.read())
        except ssl.SSLError as error:  # the peer's alert has ended the connection
            raise WireBroken(Break.TLS, taken=taken, detail=_reason(error)) from None
        except WireBroken as error:
            error.taken = error.taken or taken
            raise

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._inner.send(self._outgoing.read())

    def _feed(self, data: bytes) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _decrypt(self) -> bytes | None:
        """All plain bytes up to `CHUNK`, b'' after close_notify, None if more input is needed."""
        chunks: list[bytes] = []
        size = 0
        while size < CHUNK and self._end is False and self._has_records():
            try:
                data = self._ssl.read(CHUNK - size)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                self._end = True
            except ssl.SSLError as error:
                self._end = self._judge(error)
            else:
                if data:
                    self._fresh = False
                    chunks.append(data)
                    size += len(data)
                else:
                    self._end = True
        if chunks:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if isinstance(self._end, WireBroken):
            raise self._end
        return b"" if self._end else None

    def _has_records(self) -> bool:
        """Whether a read has something to work on: asking OpenSSL in vain costs an exception."""
        incoming = self._incoming
        return bool(incoming.pending or incoming.eof or self._ssl.pending())

    def _judge(self, error: ssl.SSLError) -> WireBroken:
        if _is_eof(error):
            return WireBroken(Break.EOF, detail="the connection ended without close_notify")
        if self._fresh and _name(error) in _CERTIFICATE_ALERTS:
            return WireBroken(Break.CERTIFICATE_ALERT, detail=_reason(error))
        return WireBroken(Break.TLS, detail=_reason(error))


def _name(error: ssl.SSLError) -> str:
    """OpenSSL's name of the error, ``TLSV1_ALERT_NO_APPLICATION_PROTOCOL``.

    Python knows the codes of some older OpenSSL. For the others `reason` is not set, and OpenSSL's
    own words stand in the text: ``[SSL] tlsv1 alert no application protocol (_ssl.c:1006)``.
    """
    if error.reason:
        return error.reason
    words = str(error).partition("] ")[2].partition(" (")[0]
    return words.replace(" ", "_").upper()


def _is_eof(error: ssl.SSLError) -> bool:
    return isinstance(error, ssl.SSLEOFError) or _name(error) == "UNEXPECTED_EOF_WHILE_READING"


def _reason(error: ssl.SSLError) -> str:
    """``tlsv13 alert certificate required``; for a certificate also what is wrong with it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return _name(error).replace("_", " ").lower() or str(error)


def _handshake_failure(error: ssl.SSLError) -> WireBroken:
    if _is_eof(error):
        return WireBroken(Break.TLS, detail="connection closed during the handshake")
    if _name(error) == "TLSV1_ALERT_NO_APPLICATION_PROTOCOL":
        return WireBroken(Break.ALPN, detail="the server refused the protocol that was offered")
    return WireBroken(Break.TLS, detail=_reason(error))
