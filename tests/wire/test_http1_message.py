"""HTTP/1.1 messages: what is a reply, where it ends, and that it does not matter how it is cut."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.types import Request
from sidecar.wire.http1_message import Malformed, ReplyReader, encode_head, encode_request

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT = 4096


def read(data: bytes, *, cuts: Iterable[int] = (), method="POST", end=True):
    """All that a reader makes of `data`, cut at the offsets `cuts`."""
    reader = ReplyReader(method, LIMIT)
    body = b""
    places = sorted({cut for cut in cuts if 0 < cut < len(data)})
    for start, stop in zip([0, *places], [*places, len(data)], strict=True):
        body += reader.feed(data[start:stop])
    if end and not reader.complete:
        reader.end()
    return reader, body


def facts(reader: ReplyReader, body: bytes):
    return (reader.head, body, reader.complete, reader.surplus, reader.keep_alive, reader.trailers)


# --- framing ----------------------------------------------------------------------------------


def test_headers_are_lower_case_and_stripped_text():
    reader, body = read(
        b"HTTP/1.1 200 OK\r\nContent-Type:  text/plain \t \r\nX-Odd: \xe9 a  b\r\nX-Empty:\r\n"
        b"Content-Length: 2\r\n\r\nok"
    )
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.head.headers == [
        ("content-type", "text/plain"),
        ("x-odd", "\xe9 a  b"),
        ("x-empty", ""),
        ("content-length", "2"),
    ]
    assert (body, reader.complete, reader.keep_alive, reader.surplus) == (b"ok", True, True, False)


@pytest.mark.parametrize(
    ("head", "rest", "complete", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", b"", True, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n", b"", True, False),
        (b"HTTP/1.1 204 No Content\r\n", b"", True, True),
        (b"HTTP/1.1 204 No Content\r\nConnection: x, Close\r\n", b"", True, False),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n", b"", True, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n", b"0\r\n\r\n", True, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n", False, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n", b"abc", False, True),
        (b"HTTP/1.1 200 OK\r\n", b"to the end", True, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n", b"a", True, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n", b"a", True, True),
        (
            b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n",
            b"0\r\n\r\n",
            True,
            False,
        ),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n", b"", True, True),
    ],
)
def test_the_end_and_what_may_follow(head, rest, complete, keep_alive):
    reader, _ = read(head + b"\r\n" + rest)
    assert (reader.complete, reader.keep_alive, reader.surplus) == (complete, keep_alive, False)


def test_a_reply_to_head_has_no_body():
    reader, _ = read(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", method="HEAD")
    assert reader.complete


def test_trailers_are_apart_from_headers():
    reader, body = read(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;x=y\r\nhello\r\n0\r\nX-T: 1\r\nHost: evil\r\n\r\n"
    )
    assert body == b"hello"
    assert reader.trailers == [("x-t", "1"), ("host", "evil")]
    assert reader.head is not None
    assert reader.head.headers == [("transfer-encoding", "chunked")]


def test_interim_replies_are_skipped():
    reader, body = read(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    )
    assert reader.head is not None
    assert (reader.head.status, body, reader.complete) == (200, b"ab", True)


def test_interim_replies_alone_are_not_the_beginning_of_a_reply():
    reader = ReplyReader("POST", LIMIT)
    reader.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert (reader.head, reader.started, reader.complete) == (None, False, False)
    reader.feed(b"H")
    assert reader.started


def test_sixteen_interim_replies_and_no_more():
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    final = b"HTTP/1.1 204 No Content\r\n\r\n"
    reader, _ = read(interim * 16 + final)
    assert reader.complete
    with pytest.raises(Malformed):
        read(interim * 17 + final)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n\r",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\nzz",
    ],
)
@given(cuts=st.lists(st.integers(1, 120), max_size=4))
@example(cuts=[])
@example(cuts=list(range(120)))
def test_any_byte_behind_a_reply_is_surplus(data, cuts):
    reader, _ = read(data, cuts=cuts)
    assert reader.complete
    assert reader.surplus


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: +3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 99 Low\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"RTSP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"ICE/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_a_reply(data):
    for cuts in (range(0), range(len(data))):
        with pytest.raises(Malformed):
            # bare LF never ends a head: then the next line says so
            read(data + b"\r\n\r\n", cuts=cuts)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # HTTP/2 SETTINGS
        b"\x15\x03\x03\x00\x02\x02\x28",  # a TLS alert
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"H2",
    ],
)
def test_another_protocol_is_told_from_its_first_bytes(data):
    with pytest.raises(Malformed):
        ReplyReader("POST", LIMIT).feed(data)


def test_a_head_is_as_large_as_the_limit_at_most():
    start = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: "
    fits = start + b"x" * (LIMIT - len(start) - 4) + b"\r\n\r\n"
    assert len(fits) == LIMIT
    reader, _ = read(fits + b"surplus is not counted")
    assert reader.complete
    for cuts in (range(0), range(0, LIMIT, 100)):
        with pytest.raises(Malformed):
            read(fits[:-4] + b"x\r\n\r\n", cuts=cuts)
    with pytest.raises(Malformed):
        read(fits[:-4] + b"xyzzy", end=False)


def test_trailers_and_extensions_are_as_large_as_the_limit_at_most():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(Malformed):
        read(head + b"0\r\n" + b"X: yyyyyyyyyyyyyyy\r\n" * 400, cuts=range(0, 9000, 50))
    with pytest.raises(Malformed):
        read(head + b"1;" + b"x" * 5000, cuts=range(0, 9000, 50))
    # a body of many small chunks has more framing than that, and that is fine
    reader, body = read(head + b"1\r\na\r\n" * 4000 + b"0\r\n\r\n", cuts=range(0, 24000, 50))
    assert (reader.complete, len(body)) == (True, 4000)


# --- cutting ----------------------------------------------------------------------------------


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


bodies = st.one_of(
    st.binary(max_size=40), st.text("\r\n0abc;", max_size=40).map(lambda text: text.encode())
)


@given(
    chunks=st.lists(bodies.filter(bool), max_size=6),
    interim=st.integers(0, 2),
    by_length=st.booleans(),
    surplus=st.sampled_from([b"", b"\r\n", b"H", b"0\r\n\r\n"]),
    cuts=st.lists(st.integers(1, 400), max_size=12),
)
@example(chunks=[b"\r\n\r\n0\r\n\r\n"], interim=1, by_length=False, surplus=b"", cuts=range(400))
def test_every_way_of_cutting_the_bytes_gives_the_same(chunks, interim, by_length, surplus, cuts):
    body = b"".join(chunks)
    if by_length:
        tail = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    else:
        tail = b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*chunks)
    data = b"HTTP/1.1 100 Continue\r\n\r\n" * interim + b"HTTP/1.1 200 OK\r\nX-A: b\r\n" + tail
    whole = facts(*read(data + surplus))
    assert facts(*read(data + surplus, cuts=cuts)) == whole
    assert facts(*read(data + surplus, cuts=range(len(data) + 10))) == whole
    assert whole[1:4] == (body, True, bool(surplus))


@given(data=st.binary(max_size=60), head=st.booleans())
def test_any_bytes_are_taken_or_malformed(data, head):
    start = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if head else b""
    with contextlib.suppress(Malformed):
        read(start + data)


# --- against h11 ------------------------------------------------------------------------------


@given(
    chunks=st.lists(bodies.filter(bool), max_size=5),
    status=st.sampled_from([200, 201, 204, 304, 400, 503]),
    framing=st.sampled_from(["length", "chunked", "close"]),
    cuts=st.lists(st.integers(1, 300), max_size=6),
)
def test_what_h11_writes_is_read(chunks, status, framing, cuts):
    if status in {204, 304}:
        chunks = []
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
    server.next_event()
    server.next_event()
    headers: list[tuple[str, str]] = [("x-name", "value")]
    if framing == "length":
        headers.append(("content-length", str(sum(map(len, chunks)))))
    if framing == "close":
        headers.append(("connection", "close"))
    data = server.send(h11.Response(status_code=status, headers=headers, reason=b"R")) or b""
    for chunk in chunks:
        data += server.send(h11.Data(data=chunk)) or b""
    data += server.send(h11.EndOfMessage()) or b""
    reader, body = read(data, cuts=cuts)
    assert reader.head is not None
    assert reader.head.status == status
    assert ("x-name", "value") in reader.head.headers
    assert (body, reader.complete, reader.surplus) == (b"".join(chunks), True, False)
    assert reader.keep_alive == (framing != "close")


# --- writing ----------------------------------------------------------------------------------


def h11_reads(data: bytes):
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(data)
    event = peer.next_event()
    assert isinstance(event, h11.Request)
    body = b""
    while isinstance(part := peer.next_event(), h11.Data):
        body += part.data
    assert isinstance(part, h11.EndOfMessage)
    return event, body


def test_a_request_head():
    request = Request("POST", "/a?b=c", [("content-type", "application/json")], b"{}")
    event, body = h11_reads(encode_request(request, "h:80") + request.body)
    assert (event.method, event.target, body) == (b"POST", b"/a?b=c", b"{}")
    assert list(event.headers) == [
        (b"host", b"h:80"),
        (b"content-type", b"application/json"),
        (b"content-length", b"2"),
    ]


@pytest.mark.parametrize(("method", "said"), [("POST", True), ("GET", False), ("DELETE", False)])
def test_the_length_of_an_empty_body_is_said_where_one_is_expected(method, said):
    event, body = h11_reads(encode_request(Request(method, "/", [], b""), "h"))
    assert body == b""
    assert ((b"content-length", b"0") in list(event.headers)) == said


def test_framing_headers_of_others_are_not_sent():
    headers = [
        ("content-length", "7"),
        ("transfer-encoding", "chunked"),
        ("connection", "x"),
        ("host", "evil"),
        ("upgrade", "h2c"),
        ("a", "b"),
    ]
    event, body = h11_reads(encode_request(Request("POST", "/", headers, b"x"), "h") + b"x")
    assert body == b"x"
    assert list(event.headers) == [(b"host", b"h"), (b"a", b"b"), (b"content-length", b"1")]


@pytest.mark.parametrize(
    "request_",
    [
        Request("POST", "/a b", [], b""),
        Request("POST", "/a\r\nx: y", [], b""),
        Request("POST", "/\xe9", [], b""),
        Request("POST", "", [], b""),
        Request("PO ST", "/", [], b""),
        Request("POST", "/", [("a", "b\r\nc: d")], b""),
        Request("POST", "/", [("a", "b\rc")], b""),
        Request("POST", "/", [("a", "b\nc")], b""),
        Request("POST", "/", [("a", "b\0c")], b""),
        Request("POST", "/", [("a", "\u20ac")], b""),
        Request("POST", "/", [("a:", "b")], b""),
        Request("POST", "/", [("", "b")], b""),
        Request("POST", "/", [("a\r\nb", "c")], b""),
    ],
)
def test_what_would_break_out_of_its_line_is_not_written(request_):
    with pytest.raises(ValueError):
        encode_request(request_, "h")


@given(
    headers=st.lists(st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=12)), max_size=4)
)
def test_headers_are_written_as_they_are_or_not_at_all(headers):
    try:
        head = encode_head("HTTP/1.1 200 OK\r\n", headers, "x-end: 1\r\n")
    except ValueError:
        return
    lines = head.decode("latin-1").split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert lines[-3:] == ["x-end: 1", "", ""]
    assert lines[1:-3] == [f"{name}: {value}" for name, value in headers if name != "host"]
