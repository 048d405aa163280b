"""What the two JSON bindings share."""

from __future__ import annotations

import pytest

from sidecar.core.convert import InvalidMessage
from sidecar.core.http_common import (
    EventReader,
    check_id,
    check_params,
    foreign_coding,
    id_in,
    media_type,
    shaped_result,
    snake_case,
)
from sidecar.core.payload import PayloadError
from sidecar.core.spec import OPERATIONS
from sidecar.core.sse import EventTooLarge
from sidecar.core.types import Reply


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("application/json", "application/json"),
        ("APPLICATION/JSON; charset=utf-8", "application/json"),
        (" text/event-stream ;x", "text/event-stream"),
        ("", ""),
    ],
)
def test_a_media_type_without_its_parameters(value, expected):
    assert media_type([("content-type", value)]) == expected


def test_no_media_type():
    assert media_type([("accept", "text/html")]) == ""


@pytest.mark.parametrize(
    ("headers", "coding"),
    [
        ([], ""),
        ([("content-encoding", "identity")], ""),
        ([("content-encoding", " Identity ")], ""),
        ([("content-encoding", "")], ""),
        ([("content-encoding", "GZIP")], "gzip"),
        ([("content-encoding", "br, gzip")], "br, gzip"),
    ],
)
def test_codings(headers, coding):
    assert foreign_coding(headers) == coding


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"message":{"taskId":"a","referenceTaskIds":["b"]}}',
        b'{"message":{"parts":[{"text":"taskId taskId task_id"}],"taskId":"a"}}',
        b'{"message":{"parts":[{"text":"\\u00e9"}]}}',
        b'{"message":"x"}',
        b'{"task_id":"a","id":"b"}',
    ],
)
def test_requests_that_every_parser_reads_alike(raw):
    check_params(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"5",
        b"{",
        b'{"id":1,"id":1}',
        b'{"tenant":"a","tenant":"b"}',
        b'{"taskId":"a","task_id":"b"}',
        b'{"message":{},"message":{}}',
        b'{"message":{"taskId":"a","taskId":"b"}}',
        b'{"message":{"taskId":"a","task_id":"b"}}',
        b'{"message":{"taskId":"a","t\\u0061skId":"b"}}',
    ],
)
def test_requests_that_two_parsers_could_read_differently(raw):
    with pytest.raises(PayloadError):
        check_params(raw)


@pytest.mark.parametrize("value", ["a", "...", "a/b", "é", " ", "%", "a:cancel", "\x80"])
def test_ids(value):
    check_id("id", value)


@pytest.mark.parametrize("value", ["", ".", "..", "\0", "a\nb", "\x7f", "\x1f"])
def test_ids_that_cannot_stand_in_a_path(value):
    with pytest.raises(InvalidMessage, match="taskId must not"):
        check_id("taskId", value)


@pytest.mark.parametrize(
    ("members", "value"),
    [
        ({"taskId": b'"a"'}, "a"),
        ({"task_id": b'"a"'}, "a"),
        ({"taskId": b'"\\u00e9"', "id": b'"c"'}, "é"),
    ],
)
def test_an_id_in_either_spelling(members, value):
    assert id_in(members, "taskId") == value


@pytest.mark.parametrize("raw", [None, b"null", b'""', b"5", b"[]", b'"\\ud800"'])
def test_an_id_that_is_missing_or_none(raw):
    with pytest.raises(InvalidMessage, match=r"^id must"):
        id_in({} if raw is None else {"id": raw}, "id")


def test_snake_case():
    assert [snake_case(name) for name in ("id", "taskId", "statusTimestampAfter")] == [
        "id",
        "task_id",
        "status_timestamp_after",
    ]


def test_a_result_is_an_object():
    for result in (b"[]", b"null", b'"{}"', b""):
        assert shaped_result(OPERATIONS["GetTask"], result)
    assert not shaped_result(OPERATIONS["GetTask"], b'{"anything":1}')


def test_the_reader_hands_every_event_on_and_bounds_it():
    seen = []

    def read(event, data):
        seen.append((event, data))
        return Reply(http_status=200)

    reader = EventReader(20, read)
    assert (
        reader.feed(b"event: error\ndata: 1\n\ndata: 2\n\ndata: 3") == [Reply(http_status=200)] * 2
    )
    assert reader.end() == [Reply(http_status=200)]
    assert seen == [("error", b"1"), ("", b"2"), ("", b"3")]
    with pytest.raises(EventTooLarge):
        EventReader(20, read).feed(b"data: " + b"x" * 21 + b"\n\n")
