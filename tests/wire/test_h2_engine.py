"""Conformance of an HTTP/2 engine: what any implementation of `http2_engine.Engine` must do."""

from __future__ import annotations

import itertools
import struct

import h2.connection
import h2.events
import hpack
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sidecar.wire.h2_engine import H2Engine
from sidecar.wire.http2_engine import (
    CANCEL,
    COMPRESSION_ERROR,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    INTERNAL_ERROR,
    NO_ERROR,
    PROTOCOL_ERROR,
    Data,
    Engine,
    Failed,
    GoAway,
    Head,
    Interim,
    PeerSettings,
    PingAck,
    RateLimit,
    Reset,
    Trailers,
    UnsendableHeader,
    Window,
)
from tests.wire.h2_peer import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    goaway,
    rst,
    settings,
    split,
    window_update,
)

OK = [(":status", "200"), ("content-type", "x")]
CHUNK = 16384


def make_client(header_bytes: int = 65536) -> Engine:
    engine = H2Engine(client=True, header_bytes=header_bytes)
    engine.start()
    return engine


def make_server(header_bytes: int = 65536, max_streams: int = 100) -> Engine:
    engine = H2Engine(client=False, header_bytes=header_bytes, max_streams=max_streams)
    engine.start()
    return engine


def client(**peer: int) -> Engine:
    """A client whose handshake is over, its output taken."""
    engine = make_client()
    engine.feed(settings(**peer), 0.0)
    engine.take_output()
    return engine


def server(**peer: int) -> Engine:
    engine = make_server()
    engine.feed(PREFACE + settings(**peer), 0.0)
    engine.take_output()
    return engine


def block(headers) -> bytes:
    return hpack.Encoder().encode(headers)


def pair() -> tuple[Engine, Engine]:
    ours, theirs = make_client(), make_server()
    theirs.feed(ours.take_output(), 0.0)
    ours.feed(theirs.take_output(), 0.0)
    theirs.feed(ours.take_output(), 0.0)
    ours.feed(theirs.take_output(), 0.0)
    return ours, theirs


def kinds(data: bytes) -> list[tuple[int, int]]:
    return [(kind, stream_id) for kind, _, stream_id, _ in split(data)]


# --- the handshake ----------------------------------------------------------------------------


def test_a_client_says_only_preface_and_settings_until_the_peers_settings_came():
    engine = make_client()
    output = engine.take_output()
    assert output.startswith(PREFACE)
    [(kind, flags, stream_id, body)] = split(output)
    assert (kind, flags, stream_id) == (SETTINGS, 0, 0)
    values = dict(struct.iter_unpack(">HL", body))
    assert values[2] == 0  # ENABLE_PUSH
    assert values[4] == 1 << 20
    assert values[6] == 65536
    assert engine.feed(settings(max_streams=7), 0.0) == [PeerSettings(True)]
    assert engine.max_streams == 7
    frames = split(engine.take_output())
    assert (SETTINGS, 1, 0, b"") in frames
    increment = sum(struct.unpack(">L", each[3])[0] for each in frames if each[0] == WINDOW_UPDATE)
    assert 65535 + increment == 16 << 20


def test_a_server_announces_its_limit():
    [(_, _, _, body), *_] = split(make_server(max_streams=23).take_output())
    assert dict(struct.iter_unpack(">HL", body))[3] == 23


@pytest.mark.parametrize(
    "greeting",
    [
        b"H",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        frame(PING, 0, 0, bytes(8)),
        frame(PING, 0, 0, bytes(8))[:4],
        frame(GOAWAY, 0, 0, bytes(8)),
        frame(SETTINGS, 1, 0),
        frame(SETTINGS, 0, 3),
    ],
)
def test_anything_but_settings_first_is_not_http2(greeting):
    engine = make_client()
    engine.take_output()
    [event] = engine.feed(greeting, 0.0)
    assert isinstance(event, Failed)
    assert event.not_http2
    assert engine.pending == 0
    assert engine.feed(settings(), 0.0) == []


def test_a_byte_of_settings_is_waited_with():
    engine = make_client()
    for octet in settings(max_streams=3)[:-1]:
        assert engine.feed(bytes([octet]), 0.0) == []
    assert engine.feed(settings(max_streams=3)[-1:], 0.0) == [PeerSettings(True)]


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", PREFACE + frame(PING, 0, 0, bytes(8))])
def test_a_server_refuses_another_start(start):
    engine = make_server()
    engine.take_output()
    [event] = engine.feed(start, 0.0)
    assert isinstance(event, Failed)
    assert not event.not_http2
    assert split(engine.take_output())[-1][0] == GOAWAY


# --- messages ---------------------------------------------------------------------------------


def exchange_bytes() -> tuple[bytes, bytes]:
    """What a client and a server send in one whole exchange, after the handshake."""
    ours, theirs = pair()
    stream_id = ours.begin([*REQUEST, ("x-a", "1"), ("x-a", "2")], end=False)
    ours.write_data(stream_id, b"hello", end=True)
    request = ours.take_output()
    theirs.feed(request, 0.0)
    theirs.write_headers(stream_id, [(":status", "103")], end=False)
    theirs.write_headers(stream_id, OK, end=False)
    theirs.write_data(stream_id, b"wor", end=False)
    theirs.write_data(stream_id, b"ld", end=False)
    theirs.write_headers(stream_id, [("grpc-status", "0"), ("x-b", "")], end=True)
    return request, theirs.take_output()


REQUEST_BYTES, REPLY_BYTES = exchange_bytes()


def feed_in_pieces(engine: Engine, data: bytes, cuts: list[int]) -> list[object]:
    events: list[object] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        events += engine.feed(data[start:stop], 0.0)
    return events


@given(cuts=st.lists(st.integers(0, 10_000), max_size=60))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts):
    ours, theirs = pair()
    ours.begin(REQUEST, end=True)
    assert feed_in_pieces(theirs, REQUEST_BYTES, cuts) == [
        Head(1, [*REQUEST, ("x-a", "1"), ("x-a", "2")], 0, False),
        Data(1, b"hello", True),
    ]
    assert feed_in_pieces(ours, REPLY_BYTES, cuts) == [
        Interim(1),
        Head(1, [("content-type", "x")], 200, False),
        Data(1, b"wor", False),
        Data(1, b"ld", False),
        Trailers(1, [("grpc-status", "0"), ("x-b", "")]),
    ]
    assert ours.open_streams == 0


def test_octets_above_ascii_come_as_latin_1():
    engine = client()
    engine.begin(REQUEST, end=True)
    [event] = engine.feed(
        frame(HEADERS, 5, 1, block([(b":status", b"200"), (b"x-name", b"caf\xc3\xa9\x80")])), 0.0
    )
    assert event == Head(1, [("x-name", "caf\xc3\xa9\x80")], 200, True)


def test_a_stream_is_over_when_both_sides_have_ended():
    ours, theirs = pair()
    stream_id = ours.begin(REQUEST, end=False)
    theirs.feed(ours.take_output(), 0.0)
    theirs.write_headers(stream_id, OK, end=True)
    ours.feed(theirs.take_output(), 0.0)
    assert ours.open_streams == theirs.open_streams == 1
    ours.write_data(stream_id, b"", end=True)
    theirs.feed(ours.take_output(), 0.0)
    assert ours.open_streams == theirs.open_streams == 0


def test_every_header_block_of_ours_is_read_by_h2():
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    peer.initiate_connection()
    engine = make_client()
    engine.feed(peer.data_to_send(), 0.0)
    headers = [
        *REQUEST,
        ("authorization", "Bearer secret"),
        ("user-agent", "x" * 300),
        ("accept-encoding", "gzip, deflate"),
        ("x-empty", ""),
        ("x-dup", "a"),
        ("x-dup", "b"),
        ("x-high", "\xff"),
    ]
    for _ in range(3):
        engine.begin(headers, end=True)
    events = peer.receive_data(engine.take_output())
    heads = [event for event in events if isinstance(event, h2.events.RequestReceived)]
    assert len(heads) == 3
    for head in heads:
        text = [(name.decode(), value.decode("latin-1")) for name, value in head.headers]
        assert text == headers
    secret = dict(heads[0].headers)  # the field is marked, so that no proxy indexes it
    assert secret[b"authorization"] == b"Bearer secret"
    [marked] = [field for field in heads[0].headers if field[0] == b"authorization"]
    assert isinstance(marked, hpack.NeverIndexedHeaderTuple)


def test_a_long_header_block_is_continued():
    ours, theirs = pair()
    headers = [*REQUEST, *[(f"x-{index}", "v" * 1000) for index in range(40)]]
    ours.begin(headers, end=True)
    output = ours.take_output()
    assert [kind for kind, *_ in split(output)] == [HEADERS, CONTINUATION, CONTINUATION]
    assert theirs.feed(output, 0.0) == [Head(1, headers, 0, True)]


@pytest.mark.parametrize(
    "field",
    [
        ("x", "a\nb"),
        ("x", "a\0"),
        ("X", "a"),
        ("x y", "a"),
        ("x:y", "a"),
        ("", "a"),
        ("x", "\u20ac"),
        ("é", "a"),
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
    ],
)
def test_a_header_that_cannot_travel_queues_nothing(field):
    engine = client()
    with pytest.raises(UnsendableHeader):
        engine.begin([*REQUEST, field], end=True)
    assert engine.pending == 0
    assert engine.begin(REQUEST, end=True) == 1


def test_white_space_around_a_value_is_not_sent():
    ours, theirs = pair()
    ours.begin([*REQUEST, ("x", " a b\t")], end=True)
    [head] = theirs.feed(ours.take_output(), 0.0)
    assert isinstance(head, Head)
    assert head.headers[-1] == ("x", "a b")


# --- malformed messages end their stream, not the connection -----------------------------------

BAD_REPLIES = [
    [(b":status", b"200"), (b"X-Upper", b"1")],
    [(b":status", b"200"), (b"x y", b"1")],
    [(b":status", b"200"), (b"", b"1")],
    [(b":status", b"200"), (b"x", b"a\nb")],
    [(b":status", b"200"), (b"x", b"a\0")],
    [(b":status", b"200"), (b"x", b" a")],
    [(b":status", b"200"), (b"connection", b"close")],
    [(b":status", b"200"), (b"te", b"gzip")],
    [(b":status", b"200"), (b"content-length", b"x")],
    [(b":status", b"200"), (b"content-length", b"1"), (b"content-length", b"2")],
    [(b":status", b"200"), (b":status", b"200")],
    [(b"x", b"a"), (b":status", b"200")],
    [(b":status", b"200"), (b":path", b"/")],
    [(b":status", b"abc")],
    [(b":status", b"101")],
    [(b":status", b"99")],
    [(b"x", b"1")],
    [],
]


@pytest.mark.parametrize("headers", BAD_REPLIES)
@pytest.mark.parametrize("flags", [4, 5])
def test_a_malformed_reply_ends_its_stream(headers, flags):
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.begin(REQUEST, end=True)
    engine.take_output()
    [event] = engine.feed(frame(HEADERS, flags, 1, block(headers)), 0.0)
    assert isinstance(event, Reset)
    assert (event.stream_id, event.code, event.remote) == (1, PROTOCOL_ERROR, False)
    assert kinds(engine.take_output()) == [(RST_STREAM, 1)]
    [head] = engine.feed(frame(HEADERS, 5, 3, block([(":status", "204")])), 0.0)
    assert head == Head(3, [], 204, True)


BAD_REQUESTS = [
    [field for field in REQUEST if field[0] != ":method"],
    [field for field in REQUEST if field[0] != ":path"],
    [field for field in REQUEST if field[0] != ":scheme"],
    [field for field in REQUEST if field[0] != ":authority"],
    [*REQUEST, ("host", "other")],
    [(":status", "200"), *REQUEST],
    [(":protocol", "websocket"), *REQUEST],
    [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "")],
]


@pytest.mark.parametrize("headers", BAD_REQUESTS)
def test_a_malformed_request_ends_its_stream(headers):
    engine = server()
    [event] = engine.feed(frame(HEADERS, 5, 1, block(headers)), 0.0)
    assert isinstance(event, Reset)
    assert not event.remote
    [head] = engine.feed(frame(HEADERS, 5, 3, block(REQUEST)), 0.0)
    assert head == Head(3, REQUEST, 0, True)


def test_a_host_may_stand_for_the_authority():
    headers = [*REQUEST[:2], REQUEST[3], ("host", "agent")]
    [head] = server().feed(frame(HEADERS, 5, 1, block(headers)), 0.0)
    assert head == Head(1, headers, 0, True)


@pytest.mark.parametrize(
    "rest",
    [
        frame(DATA, 1, 1, b"abc"),  # shorter than its Content-Length
        frame(DATA, 0, 1, b"abcdef"),  # longer
        frame(HEADERS, 4, 1, block([("x", "1")])),  # trailers that end nothing
        frame(HEADERS, 5, 1, block([(":status", "200")])),  # pseudo headers in trailers
    ],
)
def test_a_body_that_contradicts_its_head_ends_its_stream(rest):
    engine = client()
    engine.begin(REQUEST, end=True)
    head = frame(HEADERS, 4, 1, block([(":status", "200"), ("content-length", "5")]))
    events = engine.feed(head + rest, 0.0)
    assert isinstance(events[-1], Reset)
    assert not events[-1].remote
    assert engine.open_streams == 0


def test_data_after_the_end_of_a_request_ends_its_stream():
    engine = server()
    engine.feed(frame(HEADERS, 5, 1, block(REQUEST)), 0.0)
    [event] = engine.feed(frame(DATA, 0, 1, b"more"), 0.0)
    assert isinstance(event, Reset)
    assert not event.remote


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 0, 9, b"x"), PROTOCOL_ERROR),
        (frame(DATA, 8, 1, b"\x05abc"), PROTOCOL_ERROR),
        (frame(HEADERS, 4, 9, block(OK)), PROTOCOL_ERROR),
        (frame(HEADERS, 0x24, 1, b"ab"), FRAME_SIZE_ERROR),
        (frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"), COMPRESSION_ERROR),
        (frame(HEADERS, 4, 1, b"\xbe"), COMPRESSION_ERROR),
        (frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (frame(CONTINUATION, 4, 1, b""), PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, 4, 1, bytes(4)), PROTOCOL_ERROR),
        (frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
        (frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
        (frame(SETTINGS, 1, 0, bytes(6)), FRAME_SIZE_ERROR),
        (settings(window=2**31), FLOW_CONTROL_ERROR),
        (settings(frame=1), PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 0, bytes(4)), FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 9, bytes(4)), PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (window_update(0, 0), PROTOCOL_ERROR),
        (window_update(0, 2**31 - 1), FLOW_CONTROL_ERROR),
        (window_update(9, 1), PROTOCOL_ERROR),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", FRAME_SIZE_ERROR),
        (
            frame(HEADERS, 4, 1, block(OK)) + frame(DATA, 0, 1, b"x" * CHUNK) * 65,
            FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_a_broken_protocol_ends_the_connection_with_a_goaway(bad, code):
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.take_output()
    event = engine.feed(bad, 0.0)[-1]
    assert isinstance(event, Failed)
    assert event.code == code
    assert not event.not_http2
    kind, _, _, body = split(engine.take_output())[-1]
    assert kind == GOAWAY
    assert struct.unpack(">LL", body[:8]) == (0, code)
    assert engine.feed(frame(PING, 0, 0, bytes(8)), 0.0) == []


def test_nothing_follows_the_goaway_of_an_error():
    engine = client()
    stream_id = engine.begin(REQUEST, end=False)
    engine.feed(frame(CONTINUATION, 4, 1), 0.0)
    engine.take_output()
    engine.cancel(stream_id, CANCEL)
    engine.credit(stream_id, 1 << 20)
    engine.write_data(stream_id, b"x", end=True)
    assert engine.room(stream_id) == 0
    assert engine.pending == 0


def test_what_came_before_an_error_in_the_same_read_is_not_lost():
    engine = client()
    engine.begin(REQUEST, end=True)
    reply = frame(HEADERS, 4, 1, block(OK)) + frame(DATA, 1, 1, b"all of it")
    events = engine.feed(reply + frame(DATA, 0, 0), 0.0)
    assert events[:2] == [Head(1, [("content-type", "x")], 200, False), Data(1, b"all of it", True)]
    assert isinstance(events[2], Failed)


@given(data=st.binary(max_size=200), position=st.integers(0, 10_000), flip=st.integers(1, 255))
@hypothesis_settings(max_examples=300)
def test_no_bytes_of_a_peer_make_an_engine_raise(data, position, flip):
    ours, theirs = pair()
    ours.begin(REQUEST, end=True)
    ours.take_output()
    for engine, valid in ((ours, REPLY_BYTES), (theirs, REQUEST_BYTES)):
        position %= len(valid)
        damaged = bytearray(valid)
        damaged[position] ^= flip
        events = engine.feed(bytes(damaged[:position]) + data + bytes(damaged[position:]), 0.0)
        events += engine.feed(valid, 0.0)
        failures = [event for event in events if isinstance(event, Failed)]
        assert len(failures) <= 1
        assert all(failure.code != INTERNAL_ERROR for failure in failures)
        assert not failures or events[-1] is failures[0]


# --- GOAWAY -----------------------------------------------------------------------------------


def test_streams_that_a_goaway_covers_run_on():
    ours, theirs = pair()
    first, second, third = (ours.begin(REQUEST, end=False) for _ in range(3))
    theirs.feed(ours.take_output(), 0.0)
    theirs.send_goaway(2**31 - 1, NO_ERROR)
    assert ours.feed(theirs.take_output(), 0.0) == [GoAway(2**31 - 1, 0, "")]
    assert ours.open_streams == 3
    theirs.send_goaway(second, NO_ERROR)
    assert ours.feed(theirs.take_output(), 0.0) == [GoAway(second, 0, "")]
    assert ours.open_streams == 2
    # both directions, windows, PING and RST_STREAM work on
    ours.write_data(first, b"more", end=True)
    ours.send_ping(b"12345678")
    ours.cancel(second, CANCEL)
    events = theirs.feed(ours.take_output(), 0.0)
    assert Data(first, b"more", True) in events
    assert Reset(second, CANCEL, True) in events
    theirs.write_headers(first, OK, end=False)
    theirs.write_data(first, b"x" * CHUNK, end=False)
    events = ours.feed(theirs.take_output(), 0.0)
    assert PingAck(b"12345678") in events
    ours.credit(first, CHUNK)
    theirs.write_headers(first, [("grpc-status", "0")], end=True)
    assert ours.feed(theirs.take_output(), 0.0) == [Trailers(first, [("grpc-status", "0")])]
    assert third > second


def test_a_goaway_and_the_last_reply_in_one_read():
    engine = client()
    engine.begin(REQUEST, end=True)
    reply = frame(HEADERS, 4, 1, block(OK)) + frame(HEADERS, 5, 1, block([("grpc-status", "0")]))
    events = engine.feed(goaway(1, ENHANCE_YOUR_CALM, b"too_many_pings") + reply, 0.0)
    assert events == [
        GoAway(1, ENHANCE_YOUR_CALM, "too_many_pings"),
        Head(1, [("content-type", "x")], 200, False),
        Trailers(1, [("grpc-status", "0")]),
    ]


def test_frames_for_streams_above_a_goaway_are_dropped():
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.begin(REQUEST, end=True)
    engine.feed(goaway(1), 0.0)
    engine.take_output()
    late = frame(HEADERS, 4, 3, block(OK)) + frame(DATA, 1, 3, b"x") + rst(3, 7)
    assert engine.feed(late, 0.0) == []
    assert engine.pending == 0


def test_a_server_serves_on_after_its_own_goaway():
    engine = server()
    engine.feed(frame(HEADERS, 4, 1, block(REQUEST)), 0.0)
    engine.send_goaway(2**31 - 1, NO_ERROR)
    assert split(engine.take_output()) == [(GOAWAY, 0, 0, struct.pack(">LL", 2**31 - 1, 0))]
    events = engine.feed(frame(DATA, 1, 1, b"x") + frame(HEADERS, 5, 3, block(REQUEST)), 0.0)
    assert events == [Data(1, b"x", True), Head(3, REQUEST, 0, True)]
    assert engine.last_peer_stream == 3
    engine.send_goaway(3, NO_ERROR)
    engine.write_headers(1, OK, end=True)
    assert kinds(engine.take_output()) == [(GOAWAY, 0), (HEADERS, 1)]


# --- windows ----------------------------------------------------------------------------------


def test_room_is_the_smallest_of_both_windows_and_a_frame():
    engine = client()
    stream_id = engine.begin(REQUEST, end=False)
    assert engine.room(stream_id) == CHUNK
    assert engine.room(0) == 65535
    for _ in range(3):
        engine.write_data(stream_id, b"x" * CHUNK, end=False)
    assert engine.room(stream_id) == 65535 - 3 * CHUNK
    engine.write_data(stream_id, b"x" * engine.room(stream_id), end=False)
    assert engine.room(stream_id) == engine.room(0) == 0
    assert engine.feed(window_update(stream_id, 5), 0.0) == [Window(stream_id)]
    assert engine.room(stream_id) == 0
    assert engine.feed(window_update(0, 3), 0.0) == [Window(0)]
    assert engine.room(stream_id) == 3


def test_settings_may_shrink_a_window_below_zero():
    engine = client()
    stream_id = engine.begin(REQUEST, end=False)
    engine.write_data(stream_id, b"x" * 1000, end=False)
    assert engine.feed(settings(window=100), 0.0) == [PeerSettings(False)]
    assert engine.room(stream_id) == 0
    engine.feed(window_update(stream_id, 900), 0.0)
    assert engine.room(stream_id) == 0
    engine.feed(window_update(stream_id, 7), 0.0)
    assert engine.room(stream_id) == 7
    assert engine.room(engine.begin(REQUEST, end=False)) == 100


def test_a_window_that_is_opened_too_far_ends_its_stream():
    engine = client()
    stream_id = engine.begin(REQUEST, end=False)
    engine.take_output()
    [event] = engine.feed(window_update(stream_id, 2**31 - 1), 0.0)
    assert isinstance(event, Reset)
    assert event.code == FLOW_CONTROL_ERROR
    assert kinds(engine.take_output()) == [(RST_STREAM, stream_id)]


def test_a_streams_credit_returns_when_its_data_is_taken():
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.feed(frame(HEADERS, 4, 1, block(OK)), 0.0)
    engine.take_output()
    for _ in range(40):
        engine.feed(frame(DATA, 0, 1, b"x" * CHUNK), 0.0)
    assert engine.pending == 0
    engine.credit(1, 40 * CHUNK)
    assert split(engine.take_output()) == [(WINDOW_UPDATE, 0, 1, struct.pack(">L", 40 * CHUNK))]


def test_the_connections_credit_returns_on_receipt_also_for_cancelled_streams():
    engine = client()
    credited = 0
    for stream_id in range(1, 41, 2):  # 20 streams that nobody reads, each with a full window
        engine.begin(REQUEST, end=True)
        engine.feed(frame(HEADERS, 4, stream_id, block(OK)), 0.0)
        if stream_id % 4 == 1:
            engine.cancel(stream_id, CANCEL)
        for _ in range(64):
            assert not any(
                isinstance(event, Failed)
                for event in engine.feed(frame(DATA, 0, stream_id, b"x" * CHUNK), 0.0)
            )
        for kind, _, where, body in split(engine.take_output()):
            if kind == WINDOW_UPDATE:
                assert where == 0
                credited += struct.unpack(">L", body)[0]
    assert 20 * 64 * CHUNK - credited < 16 << 20


def test_padding_is_credited_at_once():
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.feed(frame(HEADERS, 4, 1, block(OK)), 0.0)
    engine.take_output()
    padded = frame(DATA, 8, 1, b"\xff" + b"x" + bytes(255))
    for _ in range(2100):
        assert engine.feed(padded, 0.0) == [Data(1, b"x", False)]
    assert (WINDOW_UPDATE, 1) in kinds(engine.take_output())


# --- streams that are over ---------------------------------------------------------------------


def test_late_frames_of_a_cancelled_stream_are_dropped_in_silence():
    """And its header blocks are still decoded, or the compression state would be lost."""
    encoder = hpack.Encoder()
    engine = client()
    engine.begin(REQUEST, end=True)
    engine.begin(REQUEST, end=True)
    engine.cancel(1, CANCEL)
    engine.take_output()
    late = frame(HEADERS, 4, 1, encoder.encode([(":status", "200"), ("x-long", "value")]))
    late += frame(DATA, 0, 1, b"x") + window_update(1, 5) + rst(1, 8)
    assert engine.feed(late, 0.0) == []
    assert engine.pending == 0
    again = encoder.encode([(":status", "200"), ("x-long", "value")])
    assert engine.feed(frame(HEADERS, 5, 3, again), 0.0) == [
        Head(3, [("x-long", "value")], 200, True)
    ]


def test_a_reset_after_the_end_changes_nothing():
    engine = client()
    engine.begin(REQUEST, end=True)
    events = engine.feed(frame(HEADERS, 5, 1, block(OK)) + rst(1, NO_ERROR), 0.0)
    assert events == [Head(1, [("content-type", "x")], 200, True)]


def test_methods_on_a_stream_that_is_over_do_nothing():
    engine = client()
    stream_id = engine.begin(REQUEST, end=True)
    engine.cancel(stream_id, CANCEL)
    engine.take_output()
    engine.cancel(stream_id, CANCEL)
    engine.credit(stream_id, 10)
    assert engine.room(stream_id) == 0
    assert engine.pending == 0


# --- limits -----------------------------------------------------------------------------------


def calm(engine: Engine, events: list) -> bool:
    """Whether the connection was ended for abuse."""
    if not events or not isinstance(events[-1], Failed):
        return False
    assert events[-1].code == ENHANCE_YOUR_CALM
    kind, _, _, body = split(engine.take_output())[-1]
    assert kind == GOAWAY
    return int.from_bytes(body[4:8], "big") == ENHANCE_YOUR_CALM


NOISE = [
    frame(PING, 0, 0, bytes(8)),
    frame(PING, 1, 0, bytes(8)),
    frame(SETTINGS, 0, 0),
    frame(PRIORITY, 0, 1, bytes(5)),
    frame(DATA, 0, 1),
    frame(0xFA, 0, 0, b"grease"),
]


@pytest.mark.parametrize("noise", NOISE)
def test_frames_without_content_are_limited(noise):
    engine = server()
    engine.feed(frame(HEADERS, 4, 1, block(REQUEST)), 0.0)
    engine.take_output()
    for _ in range(1000):
        assert not calm(engine, engine.feed(noise, 5.0))
    assert calm(engine, engine.feed(noise, 14.9))


def test_the_limit_on_frames_is_one_of_rate():
    engine = client()
    for second in range(100):
        assert not calm(engine, engine.feed(frame(PING, 0, 0, bytes(8)) * 90, float(second)))
        engine.take_output()


def test_pings_that_answer_messages_are_no_abuse():
    """Peers that measure the bandwidth send one for each DATA frame they get."""
    engine = client()
    stream_id = engine.begin(REQUEST, end=False)
    for _ in range(3000):
        engine.write_data(stream_id, b"x", end=False)
        assert not calm(engine, engine.feed(frame(PING, 0, 0, bytes(8)), 0.0))
        engine.take_output()


def test_every_ping_is_answered_with_its_payload():
    engine = client()
    engine.feed(frame(PING, 0, 0, b"abcdefgh"), 0.0)
    assert split(engine.take_output()) == [(PING, 1, 0, b"abcdefgh")]


def test_answers_that_nobody_reads_are_limited():
    engine = client()
    events: list = []
    for round_ in range(70):  # slowly enough for the limit of rate
        events = engine.feed(frame(PING, 0, 0, bytes(8)) * 990, 10.0 * round_)
        if events:
            break
    assert engine.pending < (1 << 20) + 20_000
    assert calm(engine, events)


def test_resets_of_unfinished_streams_are_limited():
    engine = server()
    events: list = []
    for index in range(201):
        assert not calm(engine, events)
        stream_id = 2 * index + 1
        events = engine.feed(frame(HEADERS, 4, stream_id, block(REQUEST)) + rst(stream_id, 8), 0.0)
    assert calm(engine, events)


def test_a_header_block_may_be_as_large_as_announced():
    def feed(size: int) -> list:
        engine = make_server(header_bytes=8192)
        engine.feed(PREFACE + settings(), 0.0)
        headers = [*REQUEST, ("x", "v" * size)]
        return engine.feed(
            frame(HEADERS, 5, 1, hpack.Encoder().encode(headers, huffman=False)), 0.0
        )

    assert isinstance(feed(7000)[0], Head)
    [event] = feed(9000)
    assert isinstance(event, Failed)
    assert event.code == ENHANCE_YOUR_CALM


def test_a_header_block_that_never_ends_is_not_gathered():
    engine = server()
    events = engine.feed(frame(HEADERS, 0, 1, b"x" * CHUNK), 0.0)
    for _ in range(4):
        assert events == []
        events = engine.feed(frame(CONTINUATION, 0, 1, b"x" * CHUNK), 0.0)
    assert calm(engine, events)


def test_continuations_are_counted():
    def feed(count: int) -> list:
        engine = server()
        encoded = block(REQUEST)
        data = frame(HEADERS, 1, 1, encoded[:1])
        data += frame(CONTINUATION, 0, 1, b"") * (count - 1)
        return engine.feed(data + frame(CONTINUATION, 4, 1, encoded[1:]), 0.0)

    assert feed(64) == [Head(1, REQUEST, 0, True)]
    [event] = feed(65)
    assert isinstance(event, Failed)
    assert event.code == ENHANCE_YOUR_CALM


def test_the_peers_header_table_size_is_of_no_use_to_it():
    engine = client(header_table=2**32 - 1)
    for index in range(100):
        engine.begin([*REQUEST, ("x-unique", str(index) * 50)], end=True)
    decoder = hpack.Decoder()
    for _, _, _, body in split(engine.take_output()):
        decoder.decode(body, raw=True)
    assert len(decoder.header_table.dynamic_entries) == 0


def test_a_rate_limit_counts_in_windows():
    limit = RateLimit(2, 10.0)
    assert [limit.hit(now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 12.0)] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    limit.forgive()
    assert not limit.hit(13.0)
    limit.forgive()
    limit.forgive()
    assert limit.hit(14.0)
