"""gRPC towards an agent: messages and metadata out, replies with their status in."""

from __future__ import annotations

import base64
import gzip
import json
from urllib.parse import unquote

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core import grpc
from sidecar.core.convert import InvalidMessage, json_to_proto, proto_to_json
from sidecar.core.errors import own, to_grpc
from sidecar.core.failover import classify
from sidecar.core.grpc import (
    MessageTooLarge,
    decode_details,
    decode_message,
    encode_message,
    encode_request,
    status_trailers,
    timeout_header,
)
from sidecar.core.grpc_frames import GrpcReader, grpc_frame
from sidecar.core.spec import OPERATIONS, Binding
from sidecar.core.types import Facts, Form, Kind, Payload, ReplyHead
from tests.core.calls import REQUESTS, call, interface

GET = OPERATIONS["GetTask"]
SEND = OPERATIONS["SendMessage"]
STREAM = OPERATIONS["SendStreamingMessage"]
OK = [("grpc-status", "0")]
HEAD = ReplyHead(200, [("content-type", "application/grpc")])
TASK = json_to_proto("Task", b'{"id":"t-1","status":{"state":"TASK_STATE_WORKING"}}')
EVENT = json_to_proto("StreamResponse", b'{"task":{"id":"t-1"}}')


def details(code=5, message="no task", reason="TASK_NOT_FOUND"):
    status = status_pb2.Status(code=code, message=message)
    packed = error_details_pb2.ErrorInfo(reason=reason, domain="a2a-protocol.org")
    status.details.add().Pack(packed)
    return status.SerializeToString()


def b64(data, padded=False):
    text = base64.b64encode(data).decode()
    return text if padded else text.rstrip("=")


def read(body=b"", trailers=(), head=HEAD, operation=GET, limit=10_000):
    return grpc.read_reply(operation, head, body, list(trailers), limit=limit)


def kind_of(reply, operation=GET):
    return classify(
        Facts(
            binding=Binding.GRPC,
            operation=operation,
            http_status=reply.http_status,
            grpc_status=reply.grpc_status,
            error=reply.error,
            malformed=reply.malformed,
        )
    ).kind


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_every_operation_is_sent(operation, form):
    request_type = OPERATIONS[operation].request
    data = REQUESTS[operation]
    if form is Form.PROTO:
        data = json_to_proto(request_type, data)

    sent = encode_request(call(operation, data, form=form), interface(Binding.GRPC))

    assert (sent.method, sent.target) == ("POST", f"/lf.a2a.v1.A2AService/{operation}")
    (message,) = GrpcReader(10_000, None).feed(sent.body)
    assert json.loads(proto_to_json(request_type, message)) == json.loads(REQUESTS[operation])
    assert sent.headers == [
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-accept-encoding", "identity,gzip"),
        ("a2a-version", "1.0"),
    ]


@pytest.mark.parametrize(
    ("operation", "data", "tenant", "wire"),
    [
        ("GetTask", b'{"id":"t","historyLength":0}', "", "1201741800"),
        ("GetTask", b'{"id":"t"}', "", "120174"),
        ("ListTaskPushNotificationConfigs", b'{"taskId":"t"}', "x", "0a0174220178"),
        (
            "SendMessage",
            b'{"message":{"messageId":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}',
            "",
            "120b0a016d20012a040a026869",
        ),
    ],
)
def test_captured_messages(operation, data, tenant, wire):
    sent = encode_request(call(operation, data), interface(Binding.GRPC, tenant=tenant))

    assert sent.body == grpc_frame(bytes.fromhex(wire))


def test_unknown_fields_survive_from_grpc_to_grpc():
    data = bytes.fromhex("120174") + b"\xfa\x3e\x01x"  # field 1007, a string

    sent = encode_request(
        call("GetTask", data, form=Form.PROTO), interface(Binding.GRPC, tenant="acme")
    )

    assert b"\xfa\x3e\x01x" in sent.body
    assert b"acme" in sent.body


@pytest.mark.parametrize(
    "data",
    [
        b'{"message":{"parts":[{"text":"a","url":"b"}]}}',
        b'{"message":{"role":"user"}}',
        b'{"message":{"metadata":' + b'{"a":' * 40 + b"1" + b"}" * 42,
        b'{"message":{"parts":[{"raw":"not base64!"}]}}',
    ],
)
def test_what_protobuf_cannot_hold_is_not_sent(data):
    with pytest.raises(InvalidMessage):
        encode_request(call("SendMessage", data), interface(Binding.GRPC))


@pytest.mark.parametrize(
    ("seconds", "value"),
    [(60, "60S"), (1.5, "1500m"), (0.0005, "1000u"), (-3, "1000u"), (1e12, "99999999S")],
)
def test_the_deadline_in_at_most_eight_digits(seconds, value):
    name, sent = timeout_header(seconds)

    assert (name, sent) == ("grpc-timeout", value)


# --- replies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content_type", ["application/grpc", "application/grpc+proto", "Application/gRPC;x=y"]
)
def test_a_message_and_ok(content_type):
    reply = read(grpc_frame(TASK), OK, ReplyHead(200, [("content-type", content_type)]))

    assert reply.payload == Payload(Form.PROTO, TASK)
    assert (reply.grpc_status, reply.malformed) == (0, "")


def test_a_compressed_message():
    packed = gzip.compress(TASK)
    body = b"\1" + len(packed).to_bytes(4, "big") + packed
    head = ReplyHead(200, [*HEAD.headers, ("grpc-encoding", "gzip")])

    assert read(body, OK, head).payload == Payload(Form.PROTO, TASK)
    assert read(body, OK).malformed  # nobody said which coding


@pytest.mark.parametrize("head_has_it", [True, False], ids=["trailers-only", "trailers"])
@pytest.mark.parametrize("padded", [True, False])
def test_an_error_with_details(head_has_it, padded):
    block = [
        ("grpc-status", "5"),
        ("grpc-message", "no%20task"),
        ("grpc-status-details-bin", b64(details(), padded)),
    ]
    head = ReplyHead(200, HEAD.headers + block) if head_has_it else HEAD

    reply = read(b"", () if head_has_it else block, head)

    assert reply.error is not None
    assert (reply.error.code, reply.error.message, reply.grpc_status) == (-32001, "no task", 5)
    assert to_grpc(reply.error) == (5, "no task", details())


@pytest.mark.parametrize("value", ["!!!", "AAA\xe9", "A", b64(b"\xff\xff")])
def test_details_that_cannot_be_read_leave_the_status(value):
    reply = read(b"", [("grpc-status", "9"), ("grpc-status-details-bin", value)])

    assert reply.plain is not None
    assert (reply.plain.grpc_status, reply.grpc_status) == (9, 9)


@pytest.mark.parametrize(
    ("body", "trailers"),
    [
        (b"", OK),
        (grpc_frame(TASK) * 2, OK),
        (grpc_frame(TASK)[:-1], OK),
        (grpc_frame(TASK) + b"\0", OK),
        (b"\2" + grpc_frame(TASK)[1:], OK),
        (grpc_frame(b"\xff\xff"), OK),
        (grpc_frame(TASK), []),
        (grpc_frame(TASK), [("x", "y")]),
    ],
)
def test_a_success_that_is_none(body, trailers):
    reply = read(body, trailers)

    assert reply.malformed
    assert reply.payload is None
    assert kind_of(reply) is Kind.AMBIGUOUS


@pytest.mark.parametrize("data", [b"", b"\xfa\x3e\x01x"])
def test_an_answer_without_content_is_no_success(data):
    assert read(grpc_frame(data), OK, operation=SEND).malformed


@pytest.mark.parametrize("raw", ["", "x", "-1", "1.5", "\xb2", "9999", " 5"])
def test_a_status_that_is_no_number_is_unknown(raw):
    assert read(b"", [("grpc-status", raw)]).grpc_status == 2


def test_the_first_of_two_statuses_counts():
    reply = read(b"", [("grpc-status", "3"), ("grpc-message", "a"), ("grpc-message", "b")])

    assert reply.plain is not None
    assert (reply.grpc_status, reply.plain.message) == (3, "a")


def test_an_unimplemented_that_has_answered_is_no_refusal():
    reply = read(grpc_frame(TASK), [("grpc-status", "12")])

    assert kind_of(reply) is Kind.AMBIGUOUS
    assert kind_of(read(b"", [("grpc-status", "12")])) is Kind.NOT_SERVED


@pytest.mark.parametrize(
    ("status", "content_type", "kind"),
    [
        (200, "text/html", Kind.AMBIGUOUS),
        (204, "", Kind.AMBIGUOUS),
        (301, "text/html", Kind.AMBIGUOUS),
        (400, "text/html", Kind.ANSWERED),
        (401, "text/html", Kind.ANSWERED),
        (403, "application/json", Kind.ANSWERED),
        (404, "text/html", Kind.WRONG_ENDPOINT),
        (415, "text/plain", Kind.WRONG_ENDPOINT),
        (429, "", Kind.ANSWERED),
        (502, "text/html", Kind.AMBIGUOUS),
        (503, "application/grpc", Kind.AMBIGUOUS),
    ],
)
def test_a_reply_without_a_grpc_status_is_classified_as_http(status, content_type, kind):
    head = ReplyHead(status, [("content-type", content_type), ("retry-after", "3")])

    reply = read(b"<html>", [], head)

    assert kind_of(reply) is kind
    assert (reply.grpc_status, reply.http_status) == (None, status)
    if kind is Kind.ANSWERED:
        assert reply.plain is not None
        assert reply.plain.http_status == status
        assert reply.plain.headers == [("retry-after", "3")]


def test_ok_without_the_type_is_malformed():
    assert read(b"", OK, ReplyHead(200, [("content-type", "text/html")])).malformed
    assert read(b"", OK, ReplyHead(503, HEAD.headers)).malformed


@pytest.mark.parametrize("body", [grpc_frame(b"x" * 101), b"\0\0\0\1\0"])
def test_a_message_above_the_limit(body):
    with pytest.raises(MessageTooLarge):
        read(body, OK, limit=100)


# --- streams ------------------------------------------------------------------------------------------


def test_a_stream_is_read_as_it_comes():
    reader = grpc.event_reader(STREAM, HEAD, 1000)
    body = grpc_frame(EVENT) * 2

    assert reader.feed(body[:3]) == []
    assert [reply.payload for reply in reader.feed(body[3:])] == [Payload(Form.PROTO, EVENT)] * 2
    end = reader.end(OK)
    assert (end.grpc_status, end.malformed, end.payload) == (0, "", None)


def test_a_stream_that_ends_inside_a_message():
    reader = grpc.event_reader(STREAM, HEAD, 1000)
    reader.feed(grpc_frame(EVENT)[:-1])

    assert reader.end(OK).malformed


def test_a_stream_that_breaks_tells_it_once_and_at_its_end():
    reader = grpc.event_reader(STREAM, HEAD, 1000)

    (event,) = reader.feed(b"\7\0\0\0\0")

    assert event.malformed
    assert reader.feed(grpc_frame(EVENT)) == []
    assert reader.end(OK).malformed
    assert reader.end([("grpc-status", "13")]).grpc_status == 13


def test_an_event_without_content_is_malformed():
    (event,) = grpc.event_reader(STREAM, HEAD, 1000).feed(grpc_frame(b""))

    assert event.malformed


# --- texts of trailers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("no%20task", "no task"),
        ("caf%C3%A9", "café"),
        ("100%", "100%"),
        ("%zz", "%zz"),
        ("%C3", "\ufffd"),
        ("\xe9", "\ufffd"),
        ("", ""),
        ("%0D%0A", "\r\n"),
        ("x" * 10_000, "x" * 10_000),
    ],
)
def test_a_message_is_never_lost(raw, text):
    assert decode_message(raw) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_message_is_printable_ascii_and_survives(text):
    encoded = encode_message(text)

    assert all(" " <= c <= "~" for c in encoded)
    assert encoded == encoded.strip()  # HTTP/2 takes spaces off the ends of values
    assert unquote(encoded) == decode_message(encoded) == text


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, None),
        ("", b""),
        ("AAEC", b"\0\1\2"),
        ("AAE", b"\0\1"),
        ("AAE=", b"\0\1"),
        ("AAE,AAEC", b"\0\1"),
        ("AAE= , AAEC", b"\0\1"),
        ("A", None),
        ("!", None),
    ],
)
def test_details_in_all_encodings(raw, expected):
    assert decode_details(raw) == expected


def test_trailers_of_a_success():
    assert status_trailers(0, "", None) == [("grpc-status", "0")]


def test_trailers_of_an_error_agree_with_each_other():
    record = own("NOT_DELIVERED", " café 100%\nline2\0 ")

    trailers = dict(status_trailers(*to_grpc(record)))

    assert trailers["grpc-status"] == "14"
    assert trailers["grpc-message"] == "%20caf%C3%A9 100%25%0Aline2%00%20"
    assert "=" not in trailers["grpc-status-details-bin"]
    found = decode_details(trailers["grpc-status-details-bin"])
    assert found is not None
    status = status_pb2.Status.FromString(found)
    assert (status.code, status.message) == (14, decode_message(trailers["grpc-message"]))
