"""HTTP/1.1 as a client: one connection, and the exchange it carries.

`http1_message` has the bytes, `http1_pool` keeps the connections, `http1_server` is the other role.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break, Phase, header
from sidecar.wire.exchange import ExchangeBroken
from sidecar.wire.http1_message import Malformed, ReplyReader, encode_request
from sidecar.wire.net import WireBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.core.types import Headers, ReplyHead, Request
    from sidecar.wire.exchange import Progress
    from sidecar.wire.net import Wire

_ONE_SEND: Final = 65536
"""A body up to this size leaves with its head; a larger one is written while the reply is read."""

_SLICE: Final = 262144
"""Bytes of a larger body per send."""

_EARLY_BODY: Final = 1048576
"""Bytes of a reply that are held while the request is still being written."""

_DRAIN_SECONDS: Final = 1.0
"""How long a reply is looked for after a failed write."""

_REASONS: Final = frozenset({Break.CERTIFICATE_ALERT, Break.MALFORMED})
"""What reading may find out that explains a failed write better than the write itself."""


class Http1Connection:
    """One connection to a server; carries one request at a time.

    `authority` is the Host of every request. `done` is called once for each request, when its
    exchange has ended; `reusable` then says whether another request may follow.
    """

    __slots__ = (
        "_authority",
        "_done",
        "_early",
        "_failure",
        "_header_bytes",
        "_progress",
        "_reply",
        "_sent",
        "idle_since",
        "keep_alive_seconds",
        "reusable",
        "used",
        "wire",
    )

    _progress: Progress
    _reply: ReplyReader

    def __init__(
        self,
        wire: Wire,
        *,
        authority: str,
        header_bytes: int,
        done: Callable[[Http1Connection], None] | None = None,
    ) -> None:
        self.wire = wire
        self.used = False
        """It has carried a request."""
        self.reusable = True
        self.keep_alive_seconds: float | None = None
        """The server's `Keep-Alive: timeout`."""
        self.idle_since = 0.0
        """The pool's note."""
        self._authority = authority
        self._header_bytes = header_bytes
        self._done = done
        self._sent = False
        self._failure: WireBroken | None = None
        """Why the larger request could not be written."""
        self._early: list[bytes] = []
        """Body that came before `request` returned."""

    async def request(self, request: Request, progress: Progress) -> Http1Exchange:
        """Send `request` and return at the final head of its reply; raises ExchangeBroken.

        The connection is closed when this raises, for a cancellation too.
        """
        self.reusable = False
        self.used = True
        self._sent = False
        self._failure = None
        self._progress = progress
        self._reply = ReplyReader(request.method, self._header_bytes)
        progress.phase = Phase.SENDING
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            try:
                start = encode_request(request, self._authority)
            except ValueError as error:
                raise progress.broken(Break.LOCAL, detail=str(error)) from None
            if len(request.body) <= _ONE_SEND:
                failure = await self._write((start + request.body,))
                if failure is not None:
                    await self._drain(failure)
            else:
                await self._write_and_read(start, request.body)
            head = self._reply.head
            while head is None:
                self._keep(await self.read())
                head = self._reply.head
        except BaseException:
            self.close()
            raise
        early, self._early = self._early, []
        return Http1Exchange(head, self, self._reply, early)

    async def read(self) -> bytes:
        """One read from the wire: the body bytes in it; raises ExchangeBroken.

        Cancelling it loses nothing.
        """
        progress, reply = self._progress, self._reply
        try:
            data = await self.wire.receive()
        except WireBroken as error:
            raise self._read_failed(error) from None
        if not data:
            reply.end()
            if not reply.complete:
                raise self._truncated("")
            return b""
        try:
            body = reply.feed(data)
        except Malformed as error:
            raise progress.broken(Break.MALFORMED, detail=str(error)) from None
        if progress.phase is not Phase.SENDING:
            progress.phase = Phase.RECEIVING if reply.started else Phase.WAITING
        return body

    async def finish(self) -> None:
        """The exchange is over: keep the connection if its reply allows that, else close it."""
        reply = self._reply
        if not reply.complete:
            self.close()
            return
        self.reusable = self._sent and reply.keep_alive and not reply.surplus
        if self.reusable and reply.head is not None:
            announced = header(reply.head.headers, "keep-alive")
            self.keep_alive_seconds = _timeout_of(announced) if announced else None
        try:
            if not self.reusable:
                await self.wire.aclose()
        finally:
            self._tell()

    def close(self) -> None:
        """Break off whatever is under way."""
        self.reusable = False
        self.wire.abort()
        self._tell()

    # --- inside -------------------------------------------------------------------------------

    def _tell(self) -> None:
        if self._done is not None:
            self._done(self)

    def _keep(self, body: bytes) -> None:
        if body:
            self._early.append(body)

    async def _write(self, slices: Iterable[bytes | memoryview]) -> WireBroken | None:
        """Send the request; returns what broke it, which reading may explain."""
        progress = self._progress
        first = True
        # from here on a cancellation counts as having sent everything
        progress.written = True
        for part in slices:
            try:
                await self.wire.send(part)
            except WireBroken as error:
                if first and not error.taken:
                    progress.written = False
                return error
            first = False
        self._sent = True
        progress.sent()
        if self._reply.started:
            progress.phase = Phase.RECEIVING
        return None

    async def _drain(self, failure: WireBroken) -> None:
        """Look for a complete reply after a failed write (RFC 9112 9.6); raises ExchangeBroken."""
        with trio.CancelScope(deadline=trio.current_time() + _DRAIN_SECONDS):
            try:
                await self._read_early()
            except ExchangeBroken as end:
                if end.broken.cause in _REASONS:
                    raise
        if not self._reply.complete:
            raise self._write_failed(failure)

    async def _read_early(self) -> None:
        """Read on while the request is being written, or could not be."""
        reply = self._reply
        size = 0
        while not reply.complete and size < _EARLY_BODY:
            if self._sent and reply.head is not None:
                return
            body = await self.read()
            self._keep(body)
            size += len(body)

    async def _write_and_read(self, head: bytes, body: bytes) -> None:
        """Send a large body and read at the same time.

        Ends when the request is out, or with a complete reply; raises ExchangeBroken.
        """
        broken: ExchangeBroken | None = None
        reply = self._reply
        reader = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_beside, head, body, reader)
            with reader:
                try:
                    await self._read_early()
                except ExchangeBroken as error:
                    broken = error
            if broken is not None or reply.complete:
                nursery.cancel_scope.cancel()
        if reply.complete:
            return
        failure = self._failure
        if failure is not None and (broken is None or broken.broken.cause not in _REASONS):
            raise self._write_failed(failure)
        if broken is not None:
            # made anew: the writer may have learned since that nothing was taken
            raise self._progress.broken(broken.broken.cause, detail=broken.broken.detail)

    async def _write_beside(self, head: bytes, body: bytes, reader: trio.CancelScope) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()  # the reader may have found the end already
        view = memoryview(body)
        rest = (view[at : at + _SLICE] for at in range(_ONE_SEND, len(body), _SLICE))
        self._failure = await self._write(itertools.chain((head + body[:_ONE_SEND],), rest))
        if self._failure is not None:
            reader.deadline = trio.current_time() + _DRAIN_SECONDS
        elif self._reply.head is not None:
            reader.cancel()

    def _read_failed(self, error: WireBroken) -> ExchangeBroken:
        if error.cause is Break.EOF:
            return self._truncated(error.detail)
        # TLS is not passed on: the handshake was long over, so this is not about it
        passed = error.cause in {Break.CERTIFICATE_ALERT, Break.LOCAL}
        cause = error.cause if passed else Break.RESET
        return self._progress.broken(cause, detail=error.detail)

    def _write_failed(self, error: WireBroken) -> ExchangeBroken:
        cause = Break.LOCAL if error.cause is Break.LOCAL else Break.RESET
        return self._progress.broken(cause, detail=error.detail)

    def _truncated(self, detail: str) -> ExchangeBroken:
        if not self._reply.started:
            return self._progress.broken(Break.EOF, detail=detail)
        return self._progress.broken(Break.MALFORMED, detail=detail or "truncated")


@functools.lru_cache(maxsize=64)
def _timeout_of(keep_alive: str) -> float | None:
    """The seconds in ``timeout=5, max=1000``."""
    found = re.search(r"timeout\s*=\s*\"?([0-9]{1,9})", keep_alive, re.IGNORECASE)
    return float(found[1]) if found is not None else None


class Http1Exchange:
    """A reply under way over HTTP/1.1. Must be closed, also when it was read to its end."""

    __slots__ = ("_connection", "_early", "_open", "_reply", "head", "trailers")

    def __init__(
        self,
        head: ReplyHead,
        connection: Http1Connection,
        reply: ReplyReader,
        early: list[bytes],
    ) -> None:
        self.head = head
        self.trailers: Headers = []
        self._connection = connection
        self._reply = reply
        self._early = early
        self._open = True

    async def receive(self) -> bytes:
        """See `Exchange.receive`. Reads from the wire only when asked; cancelling loses nothing."""
        if self._early:
            early, self._early = self._early, []
            return early[0] if len(early) == 1 else b"".join(early)
        reply = self._reply
        while not reply.complete:
            if not self._open:
                raise trio.ClosedResourceError("the exchange was closed before its end")
            body = await self._connection.read()
            if body:
                return body
        self.trailers = reply.trailers
        return b""

    async def aclose(self) -> None:
        """See `Exchange.aclose`."""
        if self._open:
            self._open = False
            await self._connection.finish()
