"""Messages of a gRPC body: the prefix, the limits, gzip."""

from __future__ import annotations

import gzip
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.grpc_frames import GrpcReader, MessageTooLarge, grpc_frame
from sidecar.core.payload import PayloadError

LIMIT = 1 << 20


def packed(message):
    data = gzip.compress(message, mtime=0)
    return b"\x01" + len(data).to_bytes(4, "big") + data


def read(*chunks, limit=LIMIT, encoding=None):
    reader = GrpcReader(limit, encoding)
    messages = [message for chunk in chunks for message in reader.feed(chunk)]
    reader.end()
    return messages


def test_a_frame_is_a_flag_a_length_and_the_message():
    assert grpc_frame(b"abc") == b"\0\0\0\0\x03abc"
    assert grpc_frame(b"") == b"\0\0\0\0\0"
    assert grpc_frame(b"x" * 0x10203)[:5] == b"\0\0\x01\x02\x03"


@given(st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=6), st.data())
def test_chunks_make_no_difference(messages, data):
    body = b"".join(packed(text) if zipped else grpc_frame(text) for text, zipped in messages)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12).map(sorted))
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    wanted = [text for text, _ in messages]
    assert read(*chunks, encoding="gzip") == wanted
    assert read(*(body[i : i + 1] for i in range(len(body))), encoding="gzip") == wanted


def test_a_message_is_delivered_with_its_last_byte():
    reader = GrpcReader(LIMIT, None)
    frame = grpc_frame(b"abc")
    assert reader.feed(frame[:-1]) == []
    assert reader.feed(frame[-1:] + frame[:2]) == [b"abc"]
    assert reader.feed(frame[2:] + grpc_frame(b"")) == [b"abc", b""]
    reader.end()


@given(st.binary(max_size=20), st.data())
def test_a_body_that_ends_inside_a_message_is_malformed(message, data):
    frame = grpc_frame(message)
    cut = data.draw(st.integers(1, len(frame) - 1))
    reader = GrpcReader(LIMIT, None)
    assert reader.feed(grpc_frame(b"before") + frame[:cut]) == [b"before"]
    with pytest.raises(PayloadError, match="inside a message"):
        reader.end()


def test_a_length_that_is_too_small_is_noticed():
    body = b"\0\0\0\0\x01" + b"abcdefgh"
    reader = GrpcReader(LIMIT, None)
    assert reader.feed(body) == [b"a"]
    with pytest.raises(PayloadError, match="flags"):
        reader.feed(b"")


def test_a_length_that_is_too_large_is_noticed():
    with pytest.raises(PayloadError, match="inside a message"):
        read(b"\0\0\0\0\x09" + b"abcdefgh")


@pytest.mark.parametrize("flag", [2, 3, 128, 255])
def test_unknown_flags_are_malformed(flag):
    with pytest.raises(PayloadError, match="flags"):
        read(bytes([flag, 0, 0, 0, 0]), encoding="gzip")


def test_the_limit_is_inclusive_and_judged_by_the_announcement():
    assert read(grpc_frame(b"x" * 100), limit=100) == [b"x" * 100]
    for announced in (101, 0xFFFFFFFF):
        with pytest.raises(MessageTooLarge, match=rf"{announced} bytes .* limit of 100") as caught:
            GrpcReader(100, None).feed(b"\0" + announced.to_bytes(4, "big"))
        assert (caught.value.limit, caught.value.size) == (100, announced)


def test_messages_before_a_fault_are_delivered_first():
    reader = GrpcReader(10, None)
    assert reader.feed(grpc_frame(b"1") + grpc_frame(b"x" * 11)) == [b"1"]
    for _ in range(2):
        with pytest.raises(MessageTooLarge):
            reader.feed(grpc_frame(b"2"))
    with pytest.raises(MessageTooLarge):
        reader.end()


@pytest.mark.parametrize("encoding", [None, "identity", "deflate", "GZIP"])
def test_compression_that_was_not_announced_is_malformed(encoding):
    with pytest.raises(PayloadError, match="not agreed"):
        read(packed(b"abc"), encoding=encoding)


def test_uncompressed_messages_may_be_mixed_in():
    body = packed(b"a") + grpc_frame(b"b") + packed(b"c")
    assert read(body, encoding="gzip") == [b"a", b"b", b"c"]


def framed(data):
    return b"\x01" + len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not gzip at all",
        zlib.compress(b"abc"),
        gzip.compress(b"abc")[:-1],
        gzip.compress(b"abc")[:5],
        gzip.compress(b"abc") + b"x",
        gzip.compress(b"abc") + gzip.compress(b"def"),
        gzip.compress(b"abc")[:-8] + b"\0" * 8,
    ],
    ids=["empty", "text", "zlib", "cut", "head", "garbage", "two", "checksum"],
)
def test_broken_gzip_is_malformed(data):
    with pytest.raises(PayloadError, match="compressed message"):
        read(framed(data), encoding="gzip")


def test_the_limit_holds_for_what_comes_out_of_gzip():
    assert read(packed(b"x" * 100), limit=100, encoding="gzip") == [b"x" * 100]
    with pytest.raises(MessageTooLarge, match=r"compressed .* limit of 100") as caught:
        read(packed(b"x" * 101), limit=100, encoding="gzip")
    assert caught.value.size is None


def test_a_bomb_is_not_unpacked():
    begin = time.perf_counter()
    bomb = packed(b"\0" * 200_000_000)
    made = time.perf_counter()
    with pytest.raises(MessageTooLarge):
        read(bomb, limit=1 << 18, encoding="gzip")
    assert time.perf_counter() - made < (made - begin) / 5


def test_cost_is_linear():
    frame = grpc_frame(b"x" * 3_000_000)
    begin = time.perf_counter()
    chunks = (frame[i : i + 8] for i in range(0, len(frame), 8))
    assert read(*chunks, limit=1 << 24) == [b"x" * 3_000_000]
    assert len(read(grpc_frame(b"x") * 500_000)) == 500_000
    assert time.perf_counter() - begin < 20
