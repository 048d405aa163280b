"""The HTTP/2 engine on h2: the only module that knows h2, hpack and hyperframe.

Of h2 it uses settings, stream states, both windows and the header decoder. Frames are split and
dispatched here, because h2 itself closes at the first GOAWAY of either side, loses the events that
came before an error in the same read, answers late frames of cancelled streams with RST_STREAM one
by one, and waits for megabytes before it notices that the peer does not speak HTTP/2.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, H2Connection
from h2.exceptions import InvalidBodyLengthError, ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from h2.stream import StreamInputs, StreamState
from h2.utilities import guard_increment_window
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from sidecar.wire import h2_frames as frames
from sidecar.wire import http2_engine as codes
from sidecar.wire.http2_engine import (
    Data,
    Failed,
    GoAway,
    Head,
    Interim,
    PeerSettings,
    PingAck,
    RateLimit,
    Reset,
    Trailers,
    Window,
)
from sidecar.wire.http2_fields import FieldEncoder, Malformed, read_fields

if TYPE_CHECKING:
    from h2.stream import H2Stream

    from sidecar.core.types import Headers
    from sidecar.wire.http2_engine import Event

_ENCODER: Final = FieldEncoder(HeaderTable.STATIC_TABLE)


class H2Engine(H2Connection):
    """Implements `http2_engine.Engine`."""

    def __init__(self, *, client: bool, header_bytes: int, max_streams: int = 0) -> None:
        """`header_bytes`: limit on one header block; `max_streams`: announced by a server."""
        super().__init__(
            H2Configuration(
                client_side=client,
                # validated once, here, and left as bytes until then
                header_encoding=None,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._client = client
        self.local_settings = Settings(
            client=client,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: codes.STREAM_WINDOW,
                SettingCodes.MAX_HEADER_LIST_SIZE: header_bytes,
                SettingCodes.MAX_CONCURRENT_STREAMS: max_streams,
            },
        )
        self.decoder.max_header_list_size = self._header_bytes = header_bytes
        self._max_streams = int(self.remote_settings.max_concurrent_streams)
        self._magic = b"" if client else frames.PREFACE
        self._rest = b""
        self._first = True
        self._failed = False
        self._now = 0.0
        self._events: list[Event] = []
        self._block: list[bytes] = []
        self._block_id = 0
        self._block_end = False
        self._table_given_up = False
        self._noise = RateLimit(1000, 10.0)
        self._resets = RateLimit(200, 10.0)
        self._handlers = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.CONTINUATION: self._on_continuation,
        }

    # --- state --------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """See `Engine.pending`."""
        return len(self._data_to_send)

    @property
    def max_streams(self) -> int:
        """See `Engine.max_streams`."""
        return self._max_streams

    @property
    def open_streams(self) -> int:
        """See `Engine.open_streams`."""
        return len(self.streams)  # a stream leaves the dictionary the moment it is over

    @property
    def in_header_block(self) -> bool:
        """See `Engine.in_header_block`."""
        return self._block_id != 0

    @property
    def last_peer_stream(self) -> int:
        """See `Engine.last_peer_stream`."""
        return self.highest_inbound_stream_id

    def room(self, stream_id: int) -> int:
        """See `Engine.room`."""
        room = self.outbound_flow_control_window
        if stream_id:
            stream = self.streams.get(stream_id)
            if stream is None:
                return 0
            room = min(room, stream.outbound_flow_control_window, frames.MAX_FRAME)
        return max(0, room)

    # --- output -------------------------------------------------------------------------------

    def start(self) -> None:
        """See `Engine.start`."""
        self.initiate_connection()
        if not self._client:
            self._open_connection_window()

    def begin(self, headers: Headers, *, end: bool) -> int:
        """See `Engine.begin`."""
        block = self._encode(headers)
        stream_id = self.get_next_available_stream_id()
        stream = self._begin_new_stream(stream_id, AllowedStreamIDs.ODD)
        stream.request_method = headers[0][1].encode()
        stream.state_machine.process_input(StreamInputs.SEND_HEADERS)
        self._write_block(stream, block, end=end)
        return stream_id

    def write_headers(self, stream_id: int, headers: Headers, *, end: bool) -> None:
        """See `Engine.write_headers`."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        block = self._encode(headers)
        interim = bool(headers) and headers[0][0] == ":status" and headers[0][1][0] == "1"
        stream.state_machine.process_input(
            StreamInputs.SEND_INFORMATIONAL_HEADERS if interim else StreamInputs.SEND_HEADERS
        )
        self._write_block(stream, block, end=end)

    def write_data(self, stream_id: int, data: bytes | memoryview, *, end: bool) -> None:
        """See `Engine.write_data`."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        size = len(data)
        stream.outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        self._write(frames.DATA, frames.END_STREAM if end else 0, stream_id, data)
        self._noise.forgive()
        if end:
            self._end_ours(stream)

    def credit(self, stream_id: int, count: int) -> None:
        """See `Engine.credit`."""
        stream = self.streams.get(stream_id)
        if stream is None or stream.state_machine.state is StreamState.HALF_CLOSED_REMOTE:
            return
        self._prepare_for_sending(stream.acknowledge_received_data(count))

    def cancel(self, stream_id: int, code: int) -> None:
        """See `Engine.cancel`."""
        if self.streams.pop(stream_id, None) is not None:
            self._write(frames.RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))

    def send_ping(self, payload: bytes) -> None:
        """See `Engine.send_ping`."""
        self._write(frames.PING, 0, 0, payload)

    def send_goaway(self, last_stream_id: int, code: int) -> None:
        """See `Engine.send_goaway`."""
        self._write(frames.GOAWAY, 0, 0, struct.pack(">LL", last_stream_id, code))

    def take_output(self) -> bytes:
        """See `Engine.take_output`."""
        data = bytes(self._data_to_send)
        self._data_to_send.clear()
        return data

    def _write(self, kind: int, flags: int, stream_id: int, body: bytes | memoryview) -> None:
        size = len(body)
        self._data_to_send += frames.FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id)
        self._data_to_send += body

    def _write_block(self, stream: H2Stream, block: bytes, *, end: bool) -> None:
        limit = self.max_outbound_frame_size
        flags = frames.END_STREAM if end else 0
        first, rest = block[:limit], block[limit:]
        self._write(
            frames.HEADERS, flags if rest else flags | frames.END_HEADERS, stream.stream_id, first
        )
        while rest:
            part, rest = rest[:limit], rest[limit:]
            self._write(
                frames.CONTINUATION, 0 if rest else frames.END_HEADERS, stream.stream_id, part
            )
        self._noise.forgive()
        if end:
            self._end_ours(stream)

    def _encode(self, headers: Headers) -> bytes:
        block = _ENCODER.encode(headers)
        if not self._table_given_up:
            self._table_given_up = True
            block = b"\x20" + block  # table size 0, for good (RFC 7541 6.3)
        return block

    def _end_ours(self, stream: H2Stream) -> None:
        stream.state_machine.process_input(StreamInputs.SEND_END_STREAM)
        if stream.closed:
            del self.streams[stream.stream_id]

    def _open_connection_window(self) -> None:
        self.increment_flow_control_window(codes.CONNECTION_WINDOW - 65535)

    # --- input --------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> list[Event]:
        """See `Engine.feed`."""
        events = self._events = []
        if self._failed:
            return events
        self._now = now
        try:
            self._read(self._rest + data if self._rest else data)
            if len(self._data_to_send) > codes.MAX_CONTROL_OUTPUT:
                raise frames.PeerError(codes.ENHANCE_YOUR_CALM, "answers are not read")
        except frames.PeerError as error:
            self._fail(error.code, str(error), not_http2=error.not_http2)
        except ProtocolError as error:
            self._fail(int(error.error_code), str(error))
        except (
            Exception
        ) as error:  # a library's slip over bytes of a peer ends that connection only
            self._fail(codes.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        return events

    def _fail(self, code: int, detail: str, *, not_http2: bool = False) -> None:
        self._failed = True
        self._rest = b""
        self.streams.clear()  # so that nothing can follow the GOAWAY
        if not not_http2:
            self.send_goaway(self.highest_inbound_stream_id, code)
        self._events.append(Failed(code, detail, not_http2))

    def _read(self, data: bytes) -> None:
        position, end = 0, len(data)
        if self._magic:
            position = min(len(self._magic), end)
            if data[:position] != self._magic[:position]:
                raise frames.PeerError(codes.PROTOCOL_ERROR, "no HTTP/2 preface")
            self._magic = self._magic[position:]
        if self._first and position < end:
            self._check_first(data[position : position + 9])
        while end - position >= 9:
            high, low, kind, flags, stream_id = frames.FRAME.unpack_from(data, position)
            length = high << 8 | low
            if length > frames.MAX_FRAME:
                raise frames.PeerError(codes.FRAME_SIZE_ERROR, f"frame of {length} bytes")
            start = position + 9
            if end - start < length:
                break
            position = start + length
            self._take_frame(kind, flags, stream_id & 0x7FFFFFFF, data[start:position])
        self._rest = data[position:]

    def _check_first(self, head: bytes) -> None:
        """SETTINGS must come first (RFC 9113 3.4); told by as few bytes as may be."""
        size = len(head)
        wrong = (
            head[0] != 0
            or (size > 3 and head[3] != frames.SETTINGS)
            or (size > 4 and head[4] & frames.ACK != 0)
            or (size > 8 and head[5:9] != b"\0\0\0\0")
        )
        if wrong:
            raise frames.PeerError(
                codes.PROTOCOL_ERROR,
                f"first bytes {head!r} are not SETTINGS",
                not_http2=self._client,
            )

    def _take_frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> None:
        if self._block_id and (kind != frames.CONTINUATION or stream_id != self._block_id):
            raise frames.PeerError(codes.PROTOCOL_ERROR, "a header block was interrupted")
        if frames.LENGTHS.get(kind, len(body)) != len(body):
            raise frames.PeerError(
                codes.FRAME_SIZE_ERROR, f"frame type {kind} of {len(body)} bytes"
            )
        if kind in (frames.ON_CONNECTION if stream_id else frames.ON_STREAM):
            raise frames.PeerError(codes.PROTOCOL_ERROR, f"frame type {kind} on stream {stream_id}")
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(flags, stream_id, body)
        elif kind == frames.PUSH_PROMISE:
            raise frames.PeerError(codes.PROTOCOL_ERROR, "PUSH_PROMISE")
        else:
            self._count_noise()  # PRIORITY, and types that are to be ignored (RFC 9113 5.5)

    def _count_noise(self) -> None:
        """Frames that cost us work and carry nothing, less one for each that carried something.

        The latter because peers that measure the round trip answer our messages with PINGs.
        """
        if not self._noise.hit(self._now):
            raise frames.PeerError(codes.ENHANCE_YOUR_CALM, "too many frames without content")

    def _count_reset(self) -> None:
        if not self._resets.hit(self._now):
            raise frames.PeerError(codes.ENHANCE_YOUR_CALM, "too many streams were reset")

    def _find(self, stream_id: int) -> H2Stream | None:
        """The stream; None when it is over: frames for it may still be on their way."""
        stream = self.streams.get(stream_id)
        if stream is None:
            ours = (stream_id % 2 == 1) is self._client
            opened = self.highest_outbound_stream_id if ours else self.highest_inbound_stream_id
            if stream_id > opened:
                raise frames.PeerError(codes.PROTOCOL_ERROR, f"stream {stream_id} was not opened")
        return stream

    def _spoil(self, stream_id: int, code: int, detail: str) -> None:
        """End one stream because of what the peer sent on it."""
        self._count_reset()
        self.cancel(stream_id, code)
        self._events.append(Reset(stream_id, code, False, detail))

    # --- connection frames --------------------------------------------------------------------

    def _on_settings(self, flags: int, _: int, body: bytes) -> None:
        if len(body) % 6 or (flags & frames.ACK and body):
            raise frames.PeerError(codes.FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
        first, self._first = self._first, False
        if not first:
            self._count_noise()
        if flags & frames.ACK:
            return  # ours never change
        changes: dict[SettingCodes | int, int] = {}
        for code, value in frames.SETTING.iter_unpack(body):
            if code in _KNOWN_SETTINGS:
                self.remote_settings.validate_received_setting(code, value)
                changes[code] = value
        self.remote_settings.update(changes)
        self._prepare_for_sending(self._acknowledge_settings())
        self._max_streams = int(self.remote_settings.max_concurrent_streams)
        if first and self._client:
            self._open_connection_window()
        self._events.append(PeerSettings(first))

    def _on_ping(self, flags: int, _: int, body: bytes) -> None:
        self._count_noise()
        if flags & frames.ACK:
            self._events.append(PingAck(body))
        else:
            self._write(frames.PING, frames.ACK, 0, body)

    def _on_goaway(self, _flags: int, _: int, body: bytes) -> None:
        if len(body) < 8:
            raise frames.PeerError(codes.FRAME_SIZE_ERROR, f"GOAWAY of {len(body)} bytes")
        self._count_noise()
        last, code = struct.unpack_from(">LL", body)
        last &= 0x7FFFFFFF
        if self._client:
            for stream_id in [each for each in self.streams if each > last]:
                del self.streams[stream_id]
        self._events.append(GoAway(last, code, body[8:208].decode("ascii", "replace")))

    def _on_window_update(self, _flags: int, stream_id: int, body: bytes) -> None:
        increment = int.from_bytes(body, "big") & 0x7FFFFFFF
        stream = self._find(stream_id) if stream_id else None
        if not increment:
            raise frames.PeerError(codes.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if not stream_id:
            self.outbound_flow_control_window = guard_increment_window(
                self.outbound_flow_control_window, increment
            )
        elif stream is None:
            return
        elif stream.outbound_flow_control_window + increment > 0x7FFFFFFF:
            self._spoil(stream_id, codes.FLOW_CONTROL_ERROR, "window above 2^31-1")
            return
        else:
            stream.outbound_flow_control_window += increment
        self._events.append(Window(stream_id))

    # --- stream frames ------------------------------------------------------------------------

    def _on_reset(self, _flags: int, stream_id: int, body: bytes) -> None:
        if self._find(stream_id) is not None:
            self._count_reset()
            del self.streams[stream_id]
            self._events.append(Reset(stream_id, int.from_bytes(body, "big"), True))
        else:
            self._count_noise()

    def _on_data(self, flags: int, stream_id: int, body: bytes) -> None:
        size = len(body)
        if flags & frames.PADDED:
            body = frames.unpad(body)
        end = bool(flags & frames.END_STREAM)
        if body:
            self._noise.forgive()
        elif not end:
            self._count_noise()
        # the connection's credit goes back at once, or a few slow readers would stop all others
        manager = self._inbound_flow_control_window_manager
        manager.window_consumed(size)
        if increment := manager.process_bytes(size):
            self._write(frames.WINDOW_UPDATE, 0, 0, increment.to_bytes(4, "big"))
        stream = self._find(stream_id)
        if stream is None:
            return
        try:
            stream.receive_data(body, end, size)
        except InvalidBodyLengthError as error:
            self._spoil(stream_id, codes.PROTOCOL_ERROR, str(error))
            return
        except StreamClosedError as error:
            self._spoil(stream_id, int(error.error_code), "DATA after the end of the stream")
            return
        if stream.closed:
            del self.streams[stream_id]
        elif len(body) < size:
            self.credit(stream_id, size - len(body))
        self._events.append(Data(stream_id, body, end))

    def _on_headers(self, flags: int, stream_id: int, body: bytes) -> None:
        if flags & frames.PADDED:
            body = frames.unpad(body)
        if flags & frames.PRIORITISED:
            if len(body) < 5:
                raise frames.PeerError(codes.FRAME_SIZE_ERROR, "HEADERS without their priority")
            body = body[5:]
        if flags & frames.END_HEADERS:
            self._take_block(stream_id, body, end=bool(flags & frames.END_STREAM))
        else:
            self._block = [body]
            self._block_id = stream_id
            self._block_end = bool(flags & frames.END_STREAM)

    def _on_continuation(self, flags: int, stream_id: int, body: bytes) -> None:
        if not self._block_id:
            raise frames.PeerError(codes.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(body)
        if len(self._block) > codes.MAX_CONTINUATIONS + 1:
            raise frames.PeerError(codes.ENHANCE_YOUR_CALM, "too many CONTINUATIONs")
        if sum(map(len, self._block)) > self._header_bytes:
            raise frames.PeerError(codes.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            block, self._block, self._block_id = b"".join(self._block), [], 0
            self._take_block(stream_id, block, end=self._block_end)

    def _take_block(self, stream_id: int, block: bytes, *, end: bool) -> None:
        self._noise.forgive()
        try:
            fields = self.decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise frames.PeerError(codes.ENHANCE_YOUR_CALM, str(error)) from None
        except (HPACKError, IndexError) as error:
            raise frames.PeerError(codes.COMPRESSION_ERROR, str(error)) from None
        if not self._client and stream_id > self.highest_inbound_stream_id:
            stream: H2Stream | None = self._begin_new_stream(stream_id, AllowedStreamIDs.ODD)
        else:
            stream = self._find(stream_id)
        if stream is None:
            return
        trailers = bool(stream.state_machine.headers_received)
        try:
            headers, status = read_fields(fields, request=not self._client, trailers=trailers)
            if (trailers and not end) or (end and 0 < status < 200):
                raise Malformed("END_STREAM is missing or out of place")
            stream.receive_headers(fields, end, None)
        except Malformed as error:
            self._spoil(stream_id, codes.PROTOCOL_ERROR, str(error))
            return
        except StreamClosedError as error:
            self._spoil(stream_id, int(error.error_code), "HEADERS after the end of the stream")
            return
        if stream.closed:
            del self.streams[stream_id]
        if trailers:
            self._events.append(Trailers(stream_id, headers))
        elif 0 < status < 200:
            self._events.append(Interim(stream_id))
        else:
            self._events.append(Head(stream_id, headers, status, end))


# the size of the header table is not among them: ours is not used
_KNOWN_SETTINGS: Final = frozenset(
    {
        SettingCodes.ENABLE_PUSH,
        SettingCodes.MAX_CONCURRENT_STREAMS,
        SettingCodes.INITIAL_WINDOW_SIZE,
        SettingCodes.MAX_FRAME_SIZE,
        SettingCodes.MAX_HEADER_LIST_SIZE,
    }
)
