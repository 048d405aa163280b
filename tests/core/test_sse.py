"""Event streams, checked against a plain reading of the WHATWG rules and the traps met in the field."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.sse import SSE_COMMENT, EventTooLarge, SseEvent, SseReader, sse_event

LIMIT = 1 << 20


def read(*chunks, limit=LIMIT):
    reader = SseReader(limit)
    events = [event for chunk in chunks for event in reader.feed(chunk)]
    return events + reader.end()


def oracle(stream):
    """The same by the letter of the standard, on the whole stream at once; flushed at the end."""
    lines = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    events: list[SseEvent] = []
    name, data = b"", list[bytes]()
    for line in [*lines, b""]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                events.append(SseEvent(name.decode(errors="replace"), b"\n".join(data)))
            name, data = b"", list[bytes]()
        elif field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    return events


def chunked(data, sizes):
    place = 0
    chunks = []
    for size in sizes:
        chunks.append(data[place : place + size])
        place += size
    return [*chunks, data[place:]]


pieces = st.sampled_from(
    [
        *(
            b"data",
            b"event",
            b"id",
            b"retry",
            b":",
            b": ",
            b" ",
            b"\r",
            b"\n",
            b"\r\n",
            b"\r\n\r\n",
        ),
        *(b"\n\n", b"{}", b"x", "é🌍\u2028\x85".encode(), b"\x0b\x1c", b"\xff", b"\xef\xbb\xbf"),
    ]
)
streams = st.lists(pieces, max_size=40).map(b"".join)
sizes = st.lists(st.integers(0, 7), max_size=60)


@given(streams)
def test_reads_what_the_standard_says(stream):
    assert read(stream) == oracle(stream)


@given(streams, sizes)
def test_chunks_make_no_difference(stream, sizes):
    assert read(*chunked(stream, sizes)) == oracle(stream)


@given(streams)
def test_one_byte_at_a_time(stream):
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == oracle(stream)


@given(streams, sizes, st.integers(0, 12))
def test_limit_and_events_before_it_do_not_depend_on_chunks(stream, sizes, limit):
    def outcome(chunks):
        reader = SseReader(limit)
        events = []
        try:
            for chunk in chunks:
                events += reader.feed(chunk)
            return events + reader.end(), "end"
        except EventTooLarge as error:
            return events, error.limit

    def patient(chunks):
        """An error waits for the events before it, so ask again."""
        return outcome([*chunks, b""])

    assert patient([stream]) == patient(chunked(stream, sizes))
    events, _ = patient([stream])
    assert events == oracle(stream)[: len(events)]
    assert all(len(event.data) <= limit for event in events)


def test_comments_are_not_events():
    stream = (
        b':\n\n: ping\n\ndata: {"task":{}}\n\n:keepalive\n\n: {"task":1}\n\n'
        b'data: {"statusUpdate":{}}\n\n'
    )
    assert read(stream + SSE_COMMENT) == [
        SseEvent("", b'{"task":{}}'),
        SseEvent("", b'{"statusUpdate":{}}'),
    ]


def test_several_data_lines_and_other_fields():
    stream = (
        b'event: message\nid: 7\nretry: 10\ndata: {\ndata:  "task": {"id":"t-1",\n'
        b'data:  "status":{"state":"TASK_STATE_WORKING"}}\ndata: }\n\ndata:{"statusUpdate":{}}\n\n'
    )
    first, second = read(stream)
    assert first.event == "message"
    assert first.data.split(b"\n")[1] == b' "task": {"id":"t-1",'
    assert json.loads(first.data)["task"]["status"] == {"state": "TASK_STATE_WORKING"}
    assert second == SseEvent("", b'{"statusUpdate":{}}')


def test_a_name_belongs_to_one_event():
    assert read(b"event: error\n\ndata: 1\n\nevent: error\ndata: 2\n\ndata: 3\n\n") == [
        SseEvent("", b"1"),
        SseEvent("error", b"2"),
        SseEvent("", b"3"),
    ]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_event_is_delivered_at_its_empty_line(end):
    """At the CR already: whether an LF follows may show only with the next event, minutes later."""
    reader = SseReader(LIMIT)
    stream = b"data: 1" + end + end[:1]
    assert reader.feed(stream[:-1]) == []
    assert reader.feed(stream[-1:]) == [SseEvent("", b"1")]
    assert reader.feed(end[1:]) == []
    assert reader.feed(b"data: 2" + end + end) == [SseEvent("", b"2")]


def test_characters_split_between_chunks_stay_whole():
    data = '{"text":"你好🌍ñ"}'.encode()
    stream = b"data: " + data + b"\r\n\r\n"
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == [SseEvent("", data)]


def test_invalid_utf_8_is_handed_on_as_it_is():
    assert read(b"event: \xff\ndata: \xff\n\n") == [SseEvent("\ufffd", b"\xff")]


def test_only_cr_and_lf_end_lines():
    data = b'{"text":"a\xe2\x80\xa8b\xc2\x85c\x0bd\x1ce\xe2\x80\xa9"}'
    assert read(b"data: " + data + b"\n\n") == [SseEvent("", data)]


@pytest.mark.parametrize("tail", [b"", b"\n", b"\r\n", b"\r"])
def test_the_last_event_needs_no_empty_line(tail):
    assert read(b"data: 1\n\ndata: 2" + tail) == [SseEvent("", b"1"), SseEvent("", b"2")]


@pytest.mark.parametrize("tail", [b"", b"event: error\n", b": ping", b"id: 4\n", b"\xef\xbb"])
def test_the_end_makes_no_event_without_data(tail):
    assert read(tail) == []


def test_a_byte_order_mark_counts_at_the_start_only():
    assert read(b"\xef", b"\xbb", b"\xbf", b"data: 1\n\n\xef\xbb\xbfdata: 2\n\ndata: 3\n\n") == [
        SseEvent("", b"1"),
        SseEvent("", b"3"),
    ]


def test_data_at_the_limit_passes():
    assert read(b"data: " + b"x" * 100 + b"\n\n", limit=100) == [SseEvent("", b"x" * 100)]
    half = b"data: " + b"x" * 50 + b"\n"
    assert len(read(half + half[:-2] + b"\n\n", limit=100)[0].data) == 100


@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + b"x" * 101 + b"\n\n",
        b"data: " + b"x" * 200,
        b"data: " + b"x" * 50 + b"\ndata: " + b"x" * 50 + b"\n",
        b"data\n" * 200,
        b": " + b"x" * 200,
        b"x" * 200,
    ],
    ids=["line", "no line end", "two lines", "empty lines", "comment", "field"],
)
def test_larger_events_are_refused_with_the_limit(stream):
    with pytest.raises(EventTooLarge, match="limit of 100 bytes") as caught:
        read(stream, limit=100)
    assert caught.value.limit == 100


def test_events_before_a_large_one_are_delivered_first():
    reader = SseReader(10)
    assert reader.feed(b"data: 1\n\ndata: " + b"x" * 50) == [SseEvent("", b"1")]
    for _ in range(2):
        with pytest.raises(EventTooLarge):
            reader.feed(b"")
    with pytest.raises(EventTooLarge):
        reader.end()


def test_large_events_in_small_chunks_take_linear_time():
    line = b"data: " + b"x" * 3_000_000 + b"\n\n"
    begin = time.perf_counter()
    whole = read(*(line[i : i + 8] for i in range(0, len(line), 8)), limit=1 << 24)
    assert len(whole[0].data) == 3_000_000
    many = read(b"data\n" * 600_000 + b"\n", limit=1 << 24)
    assert len(many[0].data) == 599_999
    assert time.perf_counter() - begin < 20


# --- writing ----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85"))
values = st.dictionaries(texts, texts | st.lists(texts | st.integers()), max_size=4)


@given(values, st.sampled_from(["", "error"]), st.sampled_from([None, 2]), st.booleans())
def test_what_is_written_is_read_again(value, name, indent, crlf):
    data = json.dumps(value, ensure_ascii=False, indent=indent).encode()
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    written = sse_event(data, name)
    (event,) = read(written + SSE_COMMENT)
    assert event.event == name
    assert json.loads(event.data) == value
    # A careless client: str.splitlines, each data line JSON of its own.
    lines = written.decode().splitlines()
    assert json.loads(lines[-2].removeprefix("data: ")) == value
    assert lines == [*([f"event: {name}"] if name else []), lines[-2], ""]


def test_compact_json_is_written_unchanged():
    data = '{"text":"é\\n","n":1.0}'.encode()
    assert sse_event(data) == b"data: " + data + b"\n\n"
    assert sse_event(data, "error") == b"event: error\ndata: " + data + b"\n\n"


@pytest.mark.parametrize("character", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_false_line_ends_are_escaped(character):
    written = sse_event(f'{{"a":"x{character}y"}}'.encode())
    assert written == b'data: {"a":"x\\u%04xy"}\n\n' % ord(character)
    assert len(written.decode().splitlines()) == 2
