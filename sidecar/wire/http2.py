"""An HTTP/2 connection to an upstream: requests as streams, replies as exchanges.

Nothing but preface and SETTINGS is sent before the peer's SETTINGS have come, so that a peer that
does not speak HTTP/2 is known before a request is written, and its limits before the first stream.
A request enters the engine only when the writer takes it: until then it can be withdrawn without a
trace, and the socket call that carries its first byte is known.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import trio

from sidecar.core.types import Break, Phase, ReplyHead
from sidecar.wire.exchange import MAX_INTERIM
from sidecar.wire.h2_engine import H2Engine
from sidecar.wire.http2_engine import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    HTTP_1_1_REQUIRED,
    MAX_STREAM_ID,
    NO_ERROR,
    REFUSED_STREAM,
    Data,
    Failed,
    GoAway,
    Head,
    Interim,
    PeerSettings,
    PingAck,
    Reset,
    Trailers,
    UnsendableHeader,
    Window,
)
from sidecar.wire.http2_link import Flow, Link, Lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.types import Headers, Request
    from sidecar.wire.exchange import ExchangeBroken, Progress
    from sidecar.wire.http2_engine import Event
    from sidecar.wire.sockets import Wire


IDLE_DOUBT_SECONDS: Final = 10.0
"""A connection idle for longer is asked for a sign of life before a request is put on it."""

PROOF_SECONDS: Final = 1.0
IDLE_CLOSE_SECONDS: Final = 300.0
KEEPALIVE_SECONDS: Final = 300.0
"""Between PINGs on silent streams; gRPC servers allow no more (gRFC A8)."""

KEEPALIVE_ANSWER_SECONDS: Final = 20.0

_PROOF: Final = b"a2aproof"
_KEEPALIVE: Final = b"a2aalive"


class NotBegun(Exception):
    """The request was not begun on this connection, which takes no more: another one may.

    `cause` is GOAWAY when the connection is leaving, None when its stream limit was lowered.
    """

    def __init__(self, cause: Break | None, *, code: int | None = None, detail: str = "") -> None:
        super().__init__(detail)
        self.cause = cause
        self.code = code
        self.detail = detail


class Http2Exchange(Flow):
    """Implements `exchange.Exchange`; made by `Http2Connection.open_stream`."""

    __slots__ = (
        "_connection",
        "answered",
        "failure",
        "head",
        "interims",
        "progress",
        "request",
        "trailers",
    )

    head: ReplyHead

    def __init__(self, connection: Http2Connection, request: Request, progress: Progress) -> None:
        super().__init__(connection)
        self._connection = connection
        self.request: Request | None = request
        """Until it is begun: a stream may last for hours, and its request be large."""
        self.progress = progress
        self.trailers: Headers = []
        self.answered = False
        """`head` is set."""
        self.interims = 0
        self.failure: ExchangeBroken | NotBegun | None = None

    def check(self) -> None:
        """Raise its failure, if it has one."""
        if self.failure is not None:
            raise self.failure

    async def aclose(self) -> None:
        """See `Exchange.aclose`."""
        self._connection.cancel(self)


class Http2Connection(Link):
    """One connection, client side. `run` it in a nursery, wait for `settled`, then open streams."""

    def __init__(
        self,
        wire: Wire,
        *,
        scheme: str,
        authority: str,
        header_bytes: int,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        on_change: Callable[[Http2Connection], None] | None = None,
        on_bug: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`on_change` hears when streams became free, and when the connection leaves or is lost."""
        super().__init__(wire, H2Engine(client=True, header_bytes=header_bytes), on_bug=on_bug)
        self.settled = trio.Event()
        """The peer's SETTINGS are here, or the connection is lost."""
        self.leaving = False
        """Takes no new streams; closes when the last one has ended."""
        self.calm_down = False
        """The peer complained about us (ENHANCE_YOUR_CALM)."""
        self.idle_since = trio.current_time()
        """When it last had no stream; holds while `streams` is 0."""
        self._pseudo: Headers = [(":scheme", scheme), (":authority", authority)]
        self._keepalive_seconds = keepalive_seconds
        self._on_change = on_change
        self._gone_away = False
        """No new stream is possible, not even for those who have a place."""
        self._goodbye = ""
        """What the peer's GOAWAY said."""
        self._reserved = 0
        self._opens: deque[Http2Exchange] = deque()
        self._streams: dict[int, Http2Exchange] = {}
        self._begun: list[Http2Exchange] = []
        self._complete: list[Http2Exchange] = []
        self._heard_at = self.idle_since
        self._keepalive_at = self.idle_since
        self._proof: trio.Event | None = None
        self._proof_deadline = 0.0
        self._proven = False

    # --- places -------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """Streams open, about to open or reserved."""
        return self._reserved + len(self._opens) + len(self._streams)

    @property
    def free(self) -> int:
        """How many more streams may be opened now."""
        if self.leaving or not self.settled.is_set():
            return 0
        return max(0, self._engine.max_streams - self.streams)

    @property
    def refusal(self) -> Lost | None:
        """Why it takes no more streams, None while it does."""
        if self.lost is None and self._fault is None and self.leaving:
            return Lost(Break.GOAWAY, self._goodbye)
        return self.lost or self._fault

    def reserve(self) -> None:
        """Keep a place for one `open_stream`, which uses it up."""
        self._reserved += 1

    def release(self) -> None:
        """Give a reserved place back."""
        self._reserved -= 1
        self._changed()

    def leave(self) -> None:
        """Take no new streams, and close when the last has ended."""
        self.leaving = True
        self._changed()

    def abort(self, cause: Break, detail: str) -> None:
        """See `Link.abort`."""
        self.leaving = True
        super().abort(cause, detail)

    def _changed(self) -> None:
        if not self.streams:
            self.idle_since = trio.current_time()
            if self.leaving and not self._closing:
                if self._fault is None:
                    self._engine.send_goaway(0, NO_ERROR)
                self.close()
        if self._on_change is not None:
            self._on_change(self)

    # --- signs of life ------------------------------------------------------------------------

    @property
    def doubtful(self) -> bool:
        """Idle for so long that `prove` should come before the next request.

        Reserved places do not count: those who have one are about to ask.
        """
        if self._proof is not None:
            return True
        idle = not self._opens and not self._streams and not self._proven
        return idle and trio.current_time() - self.idle_since > IDLE_DOUBT_SECONDS

    async def prove(self) -> bool:
        """Whether the peer answers a PING within a second; shared by all who ask meanwhile."""
        if self._proof is None:
            self._proof = trio.Event()
            self._proof_deadline = trio.current_time() + PROOF_SECONDS
            self._engine.send_ping(_PROOF)
            self.wake()
        proof = self._proof
        with trio.CancelScope(deadline=self._proof_deadline):
            await proof.wait()
        if proof.is_set() and self.lost is None:
            return True
        self.abort(Break.TIMEOUT, "no answer to PING")
        return False

    def tick(self, now: float) -> float:
        """Close when idle for long, keep silent streams alive; when to be called again."""
        if not self.streams:
            due = self.idle_since + IDLE_CLOSE_SECONDS
            if now >= due:
                self.leave()
            return due if now < due else now + IDLE_CLOSE_SECONDS
        if self._keepalive_at > self._heard_at:
            due = self._keepalive_at + KEEPALIVE_ANSWER_SECONDS
            if now >= due:
                self.abort(Break.TIMEOUT, "no answer to PING")
            return due if now < due else now + KEEPALIVE_SECONDS
        due = max(self._heard_at, self._keepalive_at) + self._keepalive_seconds
        if now >= due:
            self._keepalive_at = now
            self._engine.send_ping(_KEEPALIVE)
            self.wake()
            return now + KEEPALIVE_ANSWER_SECONDS
        return due

    def _heard(self, now: float) -> None:
        self._heard_at = now

    # --- requests -----------------------------------------------------------------------------

    async def open_stream(self, request: Request, progress: Progress) -> Http2Exchange:
        """Send `request` and return at the final head of its reply.

        Uses up a reserved place, if there is one. Raises ExchangeBroken, or NotBegun when the
        request can still be put on another connection as if nothing had been. A cancelled call is
        withdrawn, or reset when it was begun.
        """
        entitled = self._reserved > 0 and not self._gone_away
        if self._reserved:
            self._reserved -= 1
        exchange = Http2Exchange(self, request, progress)
        lost = self.lost or self._fault
        if lost is not None:
            raise progress.broken(lost.cause, detail=lost.detail)
        if self.leaving and not entitled:
            self._changed()
            raise NotBegun(Break.GOAWAY, detail="the connection is leaving")
        self._opens.append(exchange)
        self.wake()
        try:
            while not exchange.answered:
                exchange.check()
                await exchange.changed()
        except trio.Cancelled:
            self.cancel(exchange)
            raise
        return exchange

    def cancel(self, exchange: Http2Exchange) -> None:
        """End an exchange early; does nothing to one that has ended."""
        if exchange in self._opens:
            self._opens.remove(exchange)
        elif self._streams.get(exchange.id) is exchange:
            self._engine.cancel(exchange.id, CANCEL)
            self._remove(exchange)
            self.wake()
        else:
            return
        exchange.failure = exchange.progress.broken(Break.LOCAL, detail="cancelled")
        self._changed()

    # --- the writer ---------------------------------------------------------------------------

    def _compose(self) -> None:
        engine = self._engine
        while self._opens and self.settled.is_set():
            if engine.open_streams >= engine.max_streams:
                self._eject(NotBegun(None, detail="the stream limit was lowered"))
                return
            exchange = self._opens.popleft()
            request, exchange.request = exchange.request, None
            assert request is not None
            try:
                exchange.id = engine.begin(
                    [
                        (":method", request.method),
                        *self._pseudo,
                        (":path", request.target),
                        *request.headers,
                    ],
                    end=not request.body,
                )
            except UnsendableHeader as error:
                self._fail(exchange, Break.LOCAL, detail=str(error))
                self._changed()
                continue
            self._streams[exchange.id] = exchange
            self._begun.append(exchange)
            self._proven = False
            exchange.progress.phase = Phase.SENDING
            if request.body:
                exchange.outgoing = memoryview(request.body)
                exchange.end = True
                self.enqueue(exchange)
            else:
                self._complete.append(exchange)
            if exchange.id >= MAX_STREAM_ID - 1:
                self.leaving = self._gone_away = True
                self._eject(NotBegun(None, detail="no stream ids are left"))

    def _finished(self, flow: Flow) -> None:
        assert isinstance(flow, Http2Exchange)
        self._complete.append(flow)

    def _sending(self) -> None:
        for exchange in self._begun:
            exchange.progress.written = True

    def _sent(self) -> None:
        self._begun.clear()
        if self._complete:
            complete, self._complete = self._complete, []
            for exchange in complete:
                exchange.progress.sent()

    def _unsent(self) -> None:
        for exchange in self._begun:
            exchange.progress.written = False

    def _deaf(self) -> None:
        self.leaving = True
        fault = self._fault
        assert fault is not None
        while self._opens:
            self._fail(self._opens.popleft(), fault.cause, detail=fault.detail)
        self._changed()

    def _eject(self, why: NotBegun) -> None:
        for exchange in self._opens:
            exchange.failure = why
            exchange.notify()
        self._opens.clear()
        self._changed()

    # --- events -------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Data() | Head() | Trailers() | Reset() | Interim():
                exchange = self._streams.get(event.stream_id)
                if exchange is not None:
                    self._handle_stream(exchange, event)
            case GoAway(last_stream_id, code, detail):
                self._goes_away(last_stream_id, code, detail)
            case PingAck(payload):
                if payload == _PROOF and self._proof is not None:
                    self._proof.set()
                    self._proof = None
                    self._proven = True
            case PeerSettings(first):
                if first:
                    self.settled.set()
                self._changed()
            case Failed() | Window():
                pass  # the link's business

    def _handle_stream(
        self, exchange: Http2Exchange, event: Data | Head | Trailers | Reset | Interim
    ) -> None:
        match event:
            case Data(_, data, end):
                exchange.put(data)
                if end:
                    self._completed(exchange)
            case Head(_, headers, status, end):
                exchange.head = ReplyHead(status, headers)
                exchange.answered = True
                exchange.progress.phase = Phase.RECEIVING
                if end:
                    self._completed(exchange)
                else:
                    exchange.notify()
            case Trailers(_, headers):
                exchange.trailers = headers
                self._completed(exchange)
            case Reset():
                self._was_reset(exchange, event)
            case Interim():
                exchange.interims += 1
                if exchange.interims > MAX_INTERIM:
                    self._engine.cancel(exchange.id, CANCEL)
                    self._fail(exchange, Break.MALFORMED, detail="too many interim replies")
                    self._changed()

    def _completed(self, exchange: Http2Exchange) -> None:
        exchange.ended = True
        if exchange.outgoing:
            # an early answer: the rest of the request is of no use (RFC 9113 8.1)
            self._engine.cancel(exchange.id, NO_ERROR)
        self._remove(exchange)
        exchange.notify()
        self._changed()

    def _was_reset(self, exchange: Http2Exchange, event: Reset) -> None:
        cause = Break.RESET if event.remote else Break.MALFORMED
        if event.remote and not exchange.answered:
            if event.code == REFUSED_STREAM:
                cause = Break.REFUSED_STREAM
            elif event.code == HTTP_1_1_REQUIRED:
                cause = Break.HTTP_1_1_REQUIRED
        self._fail(exchange, cause, code=event.code, detail=event.detail or "RST_STREAM")
        self._changed()

    def _goes_away(self, last_stream_id: int, code: int, detail: str) -> None:
        self.leaving = self._gone_away = True
        self._goodbye = detail
        self.calm_down = self.calm_down or code == ENHANCE_YOUR_CALM
        for exchange in [each for each in self._streams.values() if each.id > last_stream_id]:
            self._fail(exchange, Break.GOAWAY, code=code, detail=detail)
        self._eject(NotBegun(Break.GOAWAY, code=code, detail=detail))

    def _fail(
        self, exchange: Http2Exchange, cause: Break, *, code: int | None = None, detail: str
    ) -> None:
        exchange.failure = exchange.progress.broken(cause, code=code, detail=detail)
        self._remove(exchange)
        exchange.notify()

    def _remove(self, exchange: Http2Exchange) -> None:
        self._streams.pop(exchange.id, None)
        self.give_up(exchange)

    def _ended(self, lost: Lost) -> None:
        self.leaving = self._closing = True
        for exchange in [*self._streams.values(), *self._opens]:
            self._fail(exchange, lost.cause, detail=lost.detail)
        self._opens.clear()
        if self._proof is not None:
            self._proof.set()
        self.settled.set()
        self._changed()
