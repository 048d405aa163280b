"""Whole messages: vectors, text and bytes that are none, tenants, google.rpc.Status."""

import base64
import json

import pytest
from google.protobuf import any_pb2, duration_pb2, json_format, timestamp_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from sidecar._pb import a2a_pb2 as pb
from sidecar.core.convert import (
    InvalidMessage,
    NotRepresentable,
    answer_tenant,
    check,
    json_to_proto,
    proto_to_json,
    put_tenant,
    status_from_json,
    status_to_json,
    take_tenant,
    validate_response,
)
from sidecar.core.spec import OPERATIONS

# A field that no message of A2A has: number 1000, length-delimited, b"new".
UNKNOWN_FIELD = bytes.fromhex("c23e036e6577")


def to_proto(message, value):
    return json_to_proto(message, json.dumps(value, ensure_ascii=False).encode())


def parse(message, value):
    """The message object of a JSON value."""
    return getattr(pb, message).FromString(to_proto(message, value))


def to_json(message):
    return json.loads(proto_to_json(message.DESCRIPTOR.name, message.SerializeToString()))


def refusal(kind, message, text):
    """The exception of exactly this kind that a JSON text is refused with."""
    data = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(InvalidMessage) as caught:
        json_to_proto(message, data)
    assert type(caught.value) is kind, caught.value
    return caught.value


# --- vectors --------------------------------------------------------------------------------------

TASK_NOT_FOUND = base64.b64decode(
    "CAUSDlRhc2sgbm90IGZvdW5kGk4KKHR5cGUuZ29vZ2xlYXBpcy5jb20vZ29vZ2xlLnJwYy5FcnJvckluZm8SIgoO"
    "VEFTS19OT1RfRk9VTkQSEGEyYS1wcm90b2NvbC5vcmc="
)
TASK_NOT_FOUND_DETAIL = {
    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
    "reason": "TASK_NOT_FOUND",
    "domain": "a2a-protocol.org",
}


@pytest.mark.parametrize(
    ("message", "value", "encoded"),
    [
        (
            "SendMessageRequest",
            {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}},
            "120b0a016d20012a040a026869",
        ),
        ("ListTaskPushNotificationConfigsRequest", {"taskId": "t", "tenant": "x"}, "0a0174220178"),
        ("GetTaskRequest", {"id": "t", "historyLength": 0}, "1201741800"),
        ("GetTaskRequest", {"id": "t"}, "120174"),
        ("Part", {"raw": "AP8="}, "120200ff"),
    ],
)
def test_vectors_both_ways(message, value, encoded):
    assert to_proto(message, value).hex() == encoded
    assert json.loads(proto_to_json(message, bytes.fromhex(encoded))) == value


def test_status_vector_both_ways():
    code, text, details = status_to_json(TASK_NOT_FOUND)
    assert (code, text) == (5, "Task not found")
    assert [json.loads(detail) for detail in details] == [TASK_NOT_FOUND_DETAIL]
    detail = json.dumps(TASK_NOT_FOUND_DETAIL | {"metadata": {}}).encode()
    assert status_from_json(5, "Task not found", [detail]) == TASK_NOT_FOUND


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"{}x",
        b'{"id":"\xff"}',
        b'{"x":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"{'id':1}",
        b'{"metadata":{"n":NaN}}',
        b'{"metadata":{"n":Infinity}}',
        b'{"x":-Infinity}',
        '{"id":"t"}'.encode("utf-16-le"),
        b'{"id":"a\nb"}',
        b'{"id":01}',
        b'{"id":"\\x"}',
        b"{,}",
    ],
)
def test_what_is_not_json(text):
    assert str(refusal(InvalidMessage, "Task", text)) == "the message is not JSON in UTF-8"


@pytest.mark.parametrize("text", ["null", "[]", '"x"', "1", "true"])
def test_the_message_is_an_object(text):
    assert str(refusal(InvalidMessage, "Task", text)) == "the message must be an object"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (r'{"id":"\ud800"}', "id"),
        (r'{"id":"\udc00\ud800"}', "id"),
        (r'{"metadata":{"a":["x","\ud800"]}}', "metadata.a[1]"),
        (r'{"metadata":{"\ud800":1}}', r"metadata['\ud800']"),
        (r'{"history":[{"extensions":["a","\udfff"]}]}', "history[0].extensions[1]"),
        (r'{"history":[{"parts":[{"data":"\udfff"}]}]}', "history[0].parts[0].data"),
    ],
)
def test_lone_surrogates(text, path):
    fault = refusal(NotRepresentable, "Task", text)
    assert fault.path == path
    str(fault).encode()


def test_surrogate_pairs_and_nul_are_text():
    assert parse("Task", {"id": "\U0001f600\x00"}).id == "\U0001f600\x00"
    assert json_to_proto("Task", rb'{"id":"\ud83d\ude00"}') == to_proto("Task", {"id": "😀"})
    surrogate_in_unknown = rb'{"x":"\ud800","id":"t"}'
    assert json_to_proto("Task", surrogate_in_unknown) == to_proto("Task", {"id": "t"})


def test_lists_where_objects_belong_and_the_reverse():
    assert refusal(InvalidMessage, "Task", '{"history":{}}').path == "history"
    assert refusal(InvalidMessage, "Task", '{"status":[]}').path == "status"
    assert refusal(InvalidMessage, "Message", '{"parts":["hi"]}').path == "parts[0]"
    assert refusal(InvalidMessage, "Message", '{"extensions":"hi"}').path == "extensions"
    assert refusal(InvalidMessage, "AgentCard", '{"securitySchemes":[]}').path == "securitySchemes"


def test_paths_of_the_senders_own_words_are_short_and_printable():
    key = "\x1b[31m" + "k" * 1000
    fault = refusal(NotRepresentable, "Task", json.dumps({"metadata": {key: {"b": 2**53 + 1}}}))
    assert fault.path.isprintable()
    assert len(fault.path) < 80


def test_errors_do_not_quote_values():
    for value in ({"id": 123456789}, {"status": {"state": "sesame"}}, {"metadata": "sesame"}):
        with pytest.raises(InvalidMessage) as caught:
            to_proto("Task", value)
        assert "sesame" not in str(caught.value)
        assert "123456789" not in str(caught.value)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a", b"\x0a\x02\xff\xff", b"\x80" * 20])
def test_bytes_that_do_not_decode(data):
    for call in (proto_to_json, check, validate_response, take_tenant):
        with pytest.raises(InvalidMessage):
            call("SendMessageRequest", data)
    with pytest.raises(InvalidMessage):
        put_tenant("GetTaskRequest", data, "x")
    with pytest.raises(InvalidMessage):
        answer_tenant("TaskPushNotificationConfig", data, "x")


def test_check_accepts_what_decodes():
    check("Task", b"")
    check("Task", UNKNOWN_FIELD)
    check("google.protobuf.Empty", b"")


@pytest.mark.parametrize(("seconds", "nanos"), [(253402300800, 0), (-(2**62), 0), (0, -1)])
def test_timestamps_out_of_range_do_not_print(seconds, nanos):
    status = pb.TaskStatus(timestamp=timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos))
    with pytest.raises(InvalidMessage) as caught:
        proto_to_json("Task", pb.Task(status=status).SerializeToString())
    assert caught.value.path == "status.timestamp"


@pytest.mark.parametrize("message", ["SendMessageResponse", "StreamResponse"])
def test_an_empty_success_is_not_valid(message):
    for data in (b"", UNKNOWN_FIELD, to_proto(message, {})):
        with pytest.raises(InvalidMessage):
            validate_response(message, data)
    validate_response(message, to_proto(message, {"task": {}}))
    validate_response(message, to_proto(message, {"message": {"messageId": "m"}}))


@pytest.mark.parametrize("message", ["Task", "ListTasksResponse", "google.protobuf.Empty"])
def test_other_responses_may_be_empty(message):
    validate_response(message, b"")


# --- tenants --------------------------------------------------------------------------------------

REQUESTS = sorted({operation.request for operation in OPERATIONS.values()})
TENANT_NUMBERS = dict.fromkeys(REQUESTS, 1) | {"ListTaskPushNotificationConfigsRequest": 4}


def tenant_field(message, tenant):
    """The bytes of the tenant field of a request, from the field numbers of the specification."""
    return bytes([TENANT_NUMBERS[message] << 3 | 2, len(tenant)]) + tenant.encode()


@pytest.mark.parametrize("message", REQUESTS)
def test_tenant_of_every_request(message):
    bare = getattr(pb, message)()
    if "id" in bare.DESCRIPTOR.fields_by_name:
        bare.id = "t"
    with_tenant = bare.SerializeToString() + tenant_field(message, "acme")
    tenant, rest = take_tenant(message, with_tenant)
    assert tenant == "acme"
    assert rest == bare.SerializeToString()
    put = put_tenant(message, rest, "acme")
    assert getattr(pb, message).FromString(put) == getattr(pb, message).FromString(with_tenant)
    assert put_tenant(message, with_tenant, "") == bare.SerializeToString()
    assert take_tenant(message, put_tenant(message, with_tenant, "other"))[0] == "other"


@pytest.mark.parametrize("message", REQUESTS)
def test_unknown_fields_survive_tenants(message):
    data = tenant_field(message, "a") + UNKNOWN_FIELD
    assert take_tenant(message, data) == ("a", UNKNOWN_FIELD)
    assert UNKNOWN_FIELD in put_tenant(message, data, "b")


def test_nothing_to_change_returns_the_bytes_as_they_are():
    # An order of fields, and an explicit default, that the runtime would not write.
    data = bytes.fromhex("1801120174") + b"\x0a\x00"
    assert take_tenant("GetTaskRequest", data) == ("", data)
    assert put_tenant("GetTaskRequest", data, "") is data
    assert put_tenant("GetTaskRequest", data + b"\x0a\x01x", "x").endswith(b"\x0a\x00\x0a\x01x")


def nested_request(tenant, nested_tenant):
    config = pb.TaskPushNotificationConfig(tenant=nested_tenant, url="u")
    return pb.SendMessageRequest(
        tenant=tenant,
        message=pb.Message(message_id="m"),
        configuration=pb.SendMessageConfiguration(task_push_notification_config=config),
    ).SerializeToString()


@pytest.mark.parametrize(("outer", "inner"), [("a", "b"), ("", "b"), ("a", "")])
def test_the_nested_push_configuration_loses_its_tenant_too(outer, inner):
    data = nested_request(outer, inner)
    assert take_tenant("SendMessageRequest", data) == (outer, nested_request("", ""))
    assert put_tenant("SendMessageRequest", data, "x") == nested_request("x", "x")
    assert put_tenant("SendMessageRequest", data, "") == nested_request("", "")


@pytest.mark.parametrize("value", [{}, {"configuration": {}}, {"configuration": {"tenant": "x"}}])
def test_no_push_configuration_is_made_for_a_tenant(value):
    put = put_tenant("SendMessageRequest", to_proto("SendMessageRequest", value), "x")
    request = pb.SendMessageRequest.FromString(put)
    assert request.HasField("configuration") == bool(value)
    assert not request.configuration.HasField("task_push_notification_config")


def test_tenant_in_answers():
    single = pb.TaskPushNotificationConfig(tenant="up", id="c", url="u")
    listed = pb.ListTaskPushNotificationConfigsResponse(
        configs=[single, pb.TaskPushNotificationConfig(id="d")], next_page_token="n"
    )
    put = answer_tenant("TaskPushNotificationConfig", single.SerializeToString(), "mine")
    assert pb.TaskPushNotificationConfig.FromString(put).tenant == "mine"
    name = "ListTaskPushNotificationConfigsResponse"
    answer = pb.ListTaskPushNotificationConfigsResponse.FromString(
        answer_tenant(name, listed.SerializeToString() + UNKNOWN_FIELD, "mine")
    )
    assert [(config.id, config.tenant) for config in answer.configs] == [
        ("c", "mine"),
        ("d", "mine"),
    ]
    assert answer.next_page_token == "n"
    assert answer.SerializeToString().endswith(UNKNOWN_FIELD)
    cleared = answer_tenant(name, listed.SerializeToString(), "")
    assert b"up" not in cleared


def test_tenant_leaves_other_answers_alone():
    card = pb.AgentCard(supported_interfaces=[pb.AgentInterface(tenant="t")]).SerializeToString()
    assert answer_tenant("AgentCard", card, "x") is card
    assert answer_tenant("Task", b"\xff", "x") == b"\xff"
    assert answer_tenant("google.protobuf.Empty", b"", "x") == b""
    assert take_tenant("google.protobuf.Empty", b"") == ("", b"")


# --- google.rpc.Status ----------------------------------------------------------------------------

DETAILS = [
    error_details_pb2.ErrorInfo(reason="R", domain="d", metadata={"k": "v"}),
    error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
    error_details_pb2.DebugInfo(stack_entries=["a"], detail="b"),
    error_details_pb2.QuotaFailure(
        violations=[error_details_pb2.QuotaFailure.Violation(subject="s", quota_value=2**60)]
    ),
    error_details_pb2.PreconditionFailure(
        violations=[error_details_pb2.PreconditionFailure.Violation(type="t")]
    ),
    error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field="f", description="d")]
    ),
    error_details_pb2.RequestInfo(request_id="r"),
    error_details_pb2.ResourceInfo(resource_name="n"),
    error_details_pb2.Help(links=[error_details_pb2.Help.Link(url="u")]),
    error_details_pb2.LocalizedMessage(locale="en", message="m"),
]


@pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.DESCRIPTOR.name)
def test_details_of_google_rpc_round_trip(detail):
    status = status_pb2.Status(code=9, message="é")
    status.details.add().Pack(detail)
    code, message, texts = status_to_json(status.SerializeToString())
    assert (code, message) == (9, "é")
    value = json.loads(texts[0])
    assert next(iter(value)) == "@type"
    assert value["@type"] == f"type.googleapis.com/google.rpc.{detail.DESCRIPTOR.name}"
    assert value == {"@type": value["@type"]} | json_format.MessageToDict(detail)
    assert status_pb2.Status.FromString(status_from_json(code, message, texts)) == status


@pytest.mark.parametrize(
    ("type_url", "value"),
    [
        ("type.googleapis.com/example.Thing", b"\x00\xff"),
        ("type.googleapis.com/google.rpc.ErrorInfo", b"\xff"),  # known, and does not decode
        ("type.googleapis.com/google.protobuf.Empty", b""),
        ("", b"x"),
    ],
)
def test_other_details_become_base64(type_url, value):
    status = status_pb2.Status(details=[any_pb2.Any(type_url=type_url, value=value)])
    _, _, texts = status_to_json(status.SerializeToString())
    expected = {"@type": type_url, "value": base64.b64encode(value).decode()}
    assert [json.loads(text) for text in texts] == [expected]


def test_a_detail_without_json_spelling_becomes_base64():
    endless = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2**62))
    status = status_pb2.Status()
    status.details.add().Pack(endless)
    _, _, texts = status_to_json(status.SerializeToString())
    assert set(json.loads(texts[0])) == {"@type", "value"}


def test_details_keep_their_order():
    status = status_pb2.Status(details=[any_pb2.Any(type_url="x/y", value=b"1")])
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id="r"))
    _, _, texts = status_to_json(status.SerializeToString())
    assert [json.loads(text)["@type"] for text in texts] == [
        "x/y",
        "type.googleapis.com/google.rpc.RequestInfo",
    ]


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05a", b"\x12\x01\xff"])
def test_garbage_is_no_status(data):
    with pytest.raises(InvalidMessage):
        status_to_json(data)


def test_metadata_values_become_strings():
    info = TASK_NOT_FOUND_DETAIL | {
        "metadata": {"s": "x", "n": 1, "f": 1.5, "l": [{"field": "é"}], "z": None, "b": True}
    }
    status = status_pb2.Status.FromString(status_from_json(5, "m", [json.dumps(info).encode()]))
    unpacked = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(unpacked)
    assert unpacked.reason == "TASK_NOT_FOUND"
    assert dict(unpacked.metadata) == {
        "s": "x",
        "n": "1",
        "f": "1.5",
        "l": '[{"field":"é"}]',
        "z": "null",
        "b": "true",
    }


@pytest.mark.parametrize(
    "detail",
    [
        b'{"@type":"type.googleapis.com/example.Thing","value":"AP8="}',
        b'{"@type":"type.googleapis.com/google.protobuf.Struct","value":{}}',
        b'{"@type":5}',
        b'{"@type":null}',
        b"{}",
        b"[]",
        b'"x"',
        b"null",
        b"not json",
        b"\xff",
        b"[" * 5000,
        b'{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":5}',
        b'{"@type":"type.googleapis.com/google.rpc.ErrorInfo","metadata":[]}',
        b'{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"\\ud800"}',
        b'{"@type":"type.googleapis.com/google.rpc.ErrorInfo","metadata":{"a":"\\ud800"}}',
        b'{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"soon"}',
    ],
)
def test_details_that_cannot_be_packed_are_left_out(detail):
    good = json.dumps(TASK_NOT_FOUND_DETAIL).encode()
    assert status_from_json(5, "Task not found", [detail, good]) == TASK_NOT_FOUND


@pytest.mark.parametrize("depth", [100, 400, 2000])
def test_deep_metadata_is_text_or_left_out(depth):
    deep = b"[" * depth + b"]" * depth
    detail = b'{"@type":"type.googleapis.com/google.rpc.ErrorInfo","metadata":{"d":' + deep + b"}}"
    status = status_pb2.Status.FromString(status_from_json(5, "m", [detail]))
    assert len(status.details) == (depth < 1000)


def test_unknown_members_of_details_are_ignored():
    detail = json.dumps(TASK_NOT_FOUND_DETAIL | {"extra": [1]}).encode()
    assert status_from_json(5, "Task not found", [detail]) == TASK_NOT_FOUND


def test_a_message_that_utf8_cannot_say():
    status = status_pb2.Status.FromString(status_from_json(5, "a\ud800b", []))
    assert (status.code, status.message) == (5, "a?b")


@given(st.binary(max_size=60))
def test_status_from_any_bytes(data):
    try:
        _, _, details = status_to_json(data)
    except InvalidMessage:
        return
    assert all("@type" in json.loads(detail) for detail in details)
