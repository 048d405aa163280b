"""Every rule of ProtoJSON, field type by field type, and where protobuf cannot follow JSON."""

import json
import math

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar._pb import a2a_pb2 as pb
from sidecar.core.convert import (
    InvalidMessage,
    NotRepresentable,
    json_to_proto,
    proto_to_json,
)


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


# --- field names, null, unknown fields, defaults --------------------------------------------------


def test_both_spellings_of_names_are_read():
    camel = {"message": {"messageId": "m", "referenceTaskIds": ["t"]}}
    snake = {"message": {"message_id": "m", "reference_task_ids": ["t"]}}
    assert to_proto("SendMessageRequest", camel) == to_proto("SendMessageRequest", snake)


@pytest.mark.parametrize(
    ("text", "task_id"),
    [
        ('{"taskId":"a","task_id":"b"}', "b"),
        ('{"task_id":"b","taskId":"a"}', "a"),
        ('{"taskId":"a","task_id":null}', ""),
    ],
)
def test_of_two_spellings_the_last_counts(text, task_id):
    config = pb.TaskPushNotificationConfig.FromString(
        json_to_proto("TaskPushNotificationConfig", text.encode())
    )
    assert config.task_id == task_id


def test_two_spellings_of_a_message_field_are_not_merged():
    text = b'{"statusUpdate":{"taskId":"a"},"status_update":{"contextId":"b"}}'
    event = pb.StreamResponse.FromString(json_to_proto("StreamResponse", text))
    assert (event.status_update.task_id, event.status_update.context_id) == ("", "b")


@pytest.mark.parametrize(
    "value",
    [
        {"id": None},
        {"artifacts": None},
        {"status": None},
        {"metadata": None},
        {"status": {"state": None, "timestamp": None, "message": None}},
    ],
)
def test_null_is_absence(value):
    assert to_json(parse("Task", value)) == ({"status": {}} if value.get("status") else {})


def test_null_elements_and_map_values_are_refused():
    assert refusal(InvalidMessage, "Task", '{"history":[{},null]}').path == "history[1]"
    assert refusal(InvalidMessage, "Message", '{"extensions":["a",null]}').path == "extensions[1]"
    card = '{"securitySchemes":{"s":null}}'
    assert refusal(InvalidMessage, "AgentCard", card).path == "securitySchemes.s"
    flow = '{"scopes":{"read":null}}'
    assert refusal(InvalidMessage, "ClientCredentialsOAuthFlow", flow).path == "scopes.read"


def test_null_data_is_a_value_and_round_trips():
    part = parse("Part", {"data": None})
    assert part.WhichOneof("content") == "data"
    assert part.data.WhichOneof("kind") == "null_value"
    assert to_json(part) == {"data": None}
    assert to_json(parse("Part", {"data": [None, {"a": None}]})) == {"data": [None, {"a": None}]}


def test_unknown_members_are_ignored():
    value = {"id": "t", "kind": "task", "x": {"deep": [1e308, {"a": None}]}, "[ext]": 1}
    assert to_proto("Task", value) == to_proto("Task", {"id": "t"})


def test_presence_of_optional_fields_is_kept():
    value = {"pageSize": 0, "historyLength": 0, "includeArtifacts": False}
    request = parse("ListTasksRequest", value)
    assert all(request.HasField(n) for n in ("page_size", "history_length", "include_artifacts"))
    assert to_json(request) == value
    assert to_json(parse("AgentCapabilities", {"streaming": False})) == {"streaming": False}
    assert to_json(parse("AgentCard", {"iconUrl": ""})) == {"iconUrl": ""}


def test_fields_without_presence_are_omitted_at_their_default():
    value = {"taskId": "", "append": False, "lastChunk": False, "artifact": {"name": ""}}
    assert to_json(parse("TaskArtifactUpdateEvent", value)) == {"artifact": {}}
    config = {"returnImmediately": False, "acceptedOutputModes": []}
    assert to_json(parse("SendMessageConfiguration", config)) == {}


def test_empty_messages_are_present():
    value: dict[str, object] = {"message": {}, "configuration": {}, "metadata": {}}
    assert to_json(parse("SendMessageRequest", value)) == value


def test_list_tasks_response_always_has_its_four_fields_and_no_more():
    everything = {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0}
    assert to_json(pb.ListTasksResponse()) == everything
    filled = pb.ListTasksResponse(tasks=[pb.Task(id="t")], page_size=50, total_size=1)
    assert to_json(filled) == everything | {"tasks": [{"id": "t"}], "pageSize": 50, "totalSize": 1}
    assert to_json(pb.ListTaskPushNotificationConfigsResponse()) == {}


def test_printing_defaults_leaves_no_trace():
    to_json(pb.ListTasksResponse(tasks=[pb.Task(id="t")], total_size=1))
    assert to_json(pb.ListTasksResponse())["tasks"] == []


def test_empty():
    for text in (b"{}", b"null", b' {"unknown":1} '):
        assert json_to_proto("google.protobuf.Empty", text) == b""
    assert proto_to_json("google.protobuf.Empty", b"") == b"{}"
    assert refusal(InvalidMessage, "google.protobuf.Empty", "[]").path == ""


def test_output_is_compact_utf8_in_the_order_of_fields():
    part = pb.Part(text="é\u2028\u0085\x7f😀", filename="f", media_type="text/plain")
    expected = '{"text":"é\u2028\u0085\x7f😀","filename":"f","mediaType":"text/plain"}'
    assert proto_to_json("Part", part.SerializeToString()) == expected.encode()


# --- scalars --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["TASK_STATE_WORKING", 2, 2.0, "2"])
def test_enum_by_name_number_and_numeric_string(state):
    assert to_json(parse("TaskStatus", {"state": state})) == {"state": "TASK_STATE_WORKING"}


def test_unknown_enum_numbers_are_kept():
    assert to_json(parse("TaskStatus", {"state": 99})) == {"state": 99}
    assert to_json(parse("TaskStatus", {"state": -1})) == {"state": -1}


@pytest.mark.parametrize(
    "state", ["working", "task_state_working", "TASK_STATE_PAUSED", "", "2.0", "1e1"]
)
def test_unknown_enum_names_are_refused_and_never_unset(state):
    fault = refusal(NotRepresentable, "ListTasksRequest", json.dumps({"status": state}))
    assert fault.path == "status"
    assert str(fault) == "status is not a name of TaskState"


@pytest.mark.parametrize("state", [True, 2.5, [], {}, 2**31, "2147483648", 1e300])
def test_what_is_no_enum_at_all(state):
    text = json.dumps({"status": {"state": state}})
    assert refusal(InvalidMessage, "Task", text).path == "status.state"


@pytest.mark.parametrize("length", [10, 10.0, "10", "10.0", "1e1"])
def test_int32_spellings(length):
    assert to_json(parse("GetTaskRequest", {"historyLength": length})) == {"historyLength": 10}


@pytest.mark.parametrize("length", [2**31 - 1, -(2**31), str(2**31 - 1), -0.0])
def test_int32_range(length):
    got = to_json(parse("GetTaskRequest", {"historyLength": length}))
    assert got == {"historyLength": int(float(length))}


@pytest.mark.parametrize(
    "length",
    [
        10.5,
        "10.5",
        "ten",
        "",
        " 10",
        "1_0",
        "\u0661",
        "0x10",
        True,
        [],
        {},
        2**31,
        -(2**31) - 1,
        1e300,
        "1e999",
        "NaN",
        10**300,
        "9" * 50,
    ],
)
def test_what_is_no_int32(length):
    text = json.dumps({"historyLength": length})
    assert refusal(InvalidMessage, "GetTaskRequest", text).path == "historyLength"


@pytest.mark.parametrize("flag", ["true", 1, 0, "", [], {}])
def test_bool_is_only_true_or_false(flag):
    text = json.dumps({"returnImmediately": flag})
    assert refusal(InvalidMessage, "SendMessageConfiguration", text).path == "returnImmediately"


@pytest.mark.parametrize("word", [1, 1.5, True, [], {}])
def test_strings_are_strings(word):
    text = json.dumps({"message": {"messageId": word}})
    fault = refusal(InvalidMessage, "SendMessageRequest", text)
    assert str(fault) == "message.messageId must be a string"


@pytest.mark.parametrize(
    ("raw", "decoded", "printed"),
    [
        ("_-8", "ffef", "/+8="),
        ("_-8=", "ffef", "/+8="),
        ("/+8", "ffef", "/+8="),
        ("/+8=", "ffef", "/+8="),
        ("/-8=", "ffef", "/+8="),
        ("AP8=", "00ff", "AP8="),
        ("QQ", "41", "QQ=="),
        ("QUJD\r\nQQ==\n", "41424341", "QUJDQQ=="),
        ("", "", ""),
    ],
)
def test_bytes_spellings(raw, decoded, printed):
    part = parse("Part", {"raw": raw})
    assert part.WhichOneof("content") == "raw"
    assert part.raw.hex() == decoded
    assert to_json(part) == {"raw": printed}


@pytest.mark.parametrize(
    "raw",
    [
        "not base64!",
        "A",
        "AAAAA",
        "QQ=",
        "QQ===",
        "=",
        "====",
        "QQ==QQ==",
        "QU=D",
        "Q Q==",
        "é===",
        "QQ\x00=",
        "%%%%",
        "QQ==x",
        "\ud800===",
        5,
        [],
        {},
        True,
    ],
)
def test_damaged_base64_is_refused(raw):
    text = json.dumps({"message": {"parts": [{"text": ""}, {"raw": raw}]}})
    assert refusal(InvalidMessage, "SendMessageRequest", text).path == "message.parts[1].raw"


@pytest.mark.parametrize(
    ("text", "seconds", "nanos", "printed"),
    [
        ("1970-01-01T00:00:01Z", 1, 0, "1970-01-01T00:00:01Z"),
        ("1970-01-01T02:00:00+02:00", 0, 0, "1970-01-01T00:00:00Z"),
        ("1969-12-31T23:59:59.5-00:00", -1, 500_000_000, "1969-12-31T23:59:59.500Z"),
        ("1970-01-01T00:00:00.000001Z", 0, 1000, "1970-01-01T00:00:00.000001Z"),
        ("1970-01-01T00:00:00.000000001Z", 0, 1, "1970-01-01T00:00:00.000000001Z"),
        ("1970-01-01T00:00:00.1234567Z", 0, 123_456_700, "1970-01-01T00:00:00.123456700Z"),
        ("0001-01-01T00:00:00Z", -62135596800, 0, "0001-01-01T00:00:00Z"),
        ("9999-12-31T23:59:59.999999999Z", 253402300799, 999_999_999, None),
        ("0001-01-01T00:00:00-10:00", -62135560800, 0, "0001-01-01T10:00:00Z"),
        ("2024-02-29T12:00:00Z", 1709208000, 0, "2024-02-29T12:00:00Z"),
    ],
)
def test_timestamps(text, seconds, nanos, printed):
    status = parse("TaskStatus", {"timestamp": text})
    assert (status.timestamp.seconds, status.timestamp.nanos) == (seconds, nanos)
    assert to_json(status) == {"timestamp": printed or text}


@pytest.mark.parametrize(
    "value",
    [
        "2025-01-01T00:00:00",
        "2025-01-01 00:00:00Z",
        "2025-01-01",
        "",
        "now",
        0,
        1.5,
        True,
        [],
        {},
        "2025-01-01t00:00:00z",
        "2025-1-1T0:0:0Z",
        "2025-01-01T00:00:00.Z",
        "2025-02-30T00:00:00Z",
        "2025-01-01T24:00:00Z",
        "2025-01-01T00:00:60Z",
        "2025-01-01T00:00:00.0123456789Z",
        "2025-01-01T00:00:00+0200",
        "2025-01-01T00:00:00+24:00",
        "2025-01-01T00:00:00Z\n",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "\u0662025-01-01T00:00:00Z",
        "10000-01-01T00:00:00Z",
        "2025-01-01T00:00:00Z+01:00",
    ],
)
def test_what_is_no_timestamp(value):
    text = json.dumps({"statusTimestampAfter": value})
    assert refusal(InvalidMessage, "ListTasksRequest", text).path == "statusTimestampAfter"


# --- oneofs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "value", "path"),
    [
        ("Part", {"text": "a", "url": "b"}, ""),
        ("Part", {"text": "", "raw": ""}, ""),
        ("Part", {"text": "a", "data": False}, ""),
        ("SendMessageResponse", {"task": {}, "message": {}}, ""),
        ("StreamResponse", {"statusUpdate": {}, "artifact_update": {}}, ""),
        (
            "AgentCard",
            {
                "securitySchemes": {
                    "o": {
                        "oauth2SecurityScheme": {"flows": {"implicit": {}, "authorizationCode": {}}}
                    }
                }
            },
            "securitySchemes.o.oauth2SecurityScheme.flows",
        ),
        (
            "SendMessageRequest",
            {"message": {"parts": [{"text": "a"}, {"text": "a", "raw": "AA=="}]}},
            "message.parts[1]",
        ),
    ],
)
def test_two_oneof_members_are_not_representable(message, value, path):
    assert refusal(NotRepresentable, message, json.dumps(value)).path == path


def test_the_refusal_of_two_members_names_them():
    fault = refusal(NotRepresentable, "Part", '{"url":"b","text":"a"}')
    assert str(fault) == "the message has both text and url, of which only one can be set"


@pytest.mark.parametrize(
    "text",
    [
        '{"text":"a","raw":null,"url":null,"data":null}',
        '{"data":null,"url":null,"raw":null,"text":"a"}',
    ],
)
def test_null_members_of_a_oneof_are_ignored_beside_a_set_one(text):
    part = pb.Part.FromString(json_to_proto("Part", text.encode()))
    assert to_json(part) == {"text": "a"}


def test_an_empty_string_sets_a_oneof_member():
    assert to_json(parse("Part", {"text": ""})) == {"text": ""}


# --- Struct and Value -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("1", "1"),
        ("-3", "-3"),
        ("3.0", "3"),
        ("1e2", "100"),
        ("1.5", "1.5"),
        ("0.1", "0.1"),
        ("-0.0", "0"),
        ("5e-324", "5e-324"),
        ("1e300", "1e300"),
        ("9007199254740992", "9007199254740992"),
        ("-9007199254740992", "-9007199254740992"),
        # Larger ones are taken when they are exact, and then the digits come back.
        ("9007199254740994", "9007199254740994"),
        ("1152921504606846976", "1152921504606846976"),
    ],
)
def test_numbers_of_a_value(text, printed):
    data = json_to_proto("Part", f'{{"data":{{"n":[{text}]}}}}'.encode())
    assert proto_to_json("Part", data) == f'{{"data":{{"n":[{printed}]}}}}'.encode()


@pytest.mark.parametrize("power", [63, 64, 70, 100, 1023])
def test_integers_beyond_64_bits_come_back_equal(power):
    data = json_to_proto("Part", json.dumps({"data": 2**power}).encode())
    assert json.loads(proto_to_json("Part", data))["data"] == 2**power


@pytest.mark.parametrize(
    "text",
    [
        "9007199254740993",
        "-9007199254740993",
        "18446744073709551617",
        "1e400",
        "-1e400",
        "1" + "0" * 400,
        "1" + "0" * 4200,
        str(2**64 + 1),
    ],
)
def test_numbers_that_no_double_holds(text):
    document = f'{{"metadata":{{"a b":[0,{text}]}}}}'
    assert refusal(NotRepresentable, "Task", document).path == "metadata['a b'][1]"


def test_a_number_beyond_the_interpreter_is_not_representable():
    refusal(NotRepresentable, "Task", '{"metadata":{"n":' + "9" * 5000 + "}}")


def test_numbers_out_of_range_in_unknown_members_do_no_harm():
    assert json_to_proto("Task", b'{"x":1e400,"id":"t"}') == to_proto("Task", {"id": "t"})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_without_json_spelling(number):
    part = pb.Part(data=struct_pb2.Value(list_value=struct_pb2.ListValue()))
    part.data.list_value.values.add().struct_value.fields["n"].number_value = number
    message = pb.Message(parts=[pb.Part(text=""), part])
    with pytest.raises(InvalidMessage) as caught:
        proto_to_json("Message", message.SerializeToString())
    assert caught.value.path == "parts[1].data[0].n"


def test_large_doubles_print_as_the_same_double():
    for number in (2.0**63, 1.7976931348623157e308, -(2.0**80), 123456789012345680000.0):
        part = pb.Part(data=struct_pb2.Value(number_value=number))
        assert float(json.loads(proto_to_json("Part", part.SerializeToString()))["data"]) == number


def test_values_of_every_kind_round_trip():
    value = {"s": "é", "t": True, "f": False, "n": None, "o": {}, "l": [], "": [[{}], "x", 1.25]}
    assert to_json(parse("Part", {"data": value})) == {"data": value}
    assert to_json(parse("Task", {"metadata": value})) == {"metadata": value}
    assert to_json(parse("Part", {"data": "x"})) == {"data": "x"}


@pytest.mark.parametrize("value", ["x", 1, [], True])
def test_metadata_is_an_object(value):
    text = json.dumps({"metadata": value})
    fault = refusal(InvalidMessage, "Task", text)
    assert str(fault) == "metadata must be an object"


def test_a_value_without_kind_is_null():
    assert to_json(pb.Part(data=struct_pb2.Value())) == {"data": None}


# --- depth ----------------------------------------------------------------------------------------


def nested(shape, leaf):
    """A JSON value of nested objects ("o") and arrays ("a"), outermost first, around a leaf."""
    value = leaf
    for kind in reversed(shape):
        value = {"k": value} if kind == "o" else [value]
    return value


def fill(target, shape, leaf):
    """The same in a google.protobuf.Value."""
    for kind in shape:
        into_object = kind == "o"
        target = target.struct_value.fields["k"] if into_object else target.list_value.values.add()
    if leaf == 1:
        target.number_value = 1
    else:
        (target.struct_value if leaf == {} else target.list_value).SetInParent()


# The messages are built in place: putting one into another copies it by way of its bytes.


def in_part(shape, leaf=1):
    part = pb.Part()
    fill(part.data, shape, leaf)
    return part, {"data": nested(shape, leaf)}


def in_request(shape, leaf=1):
    request = pb.SendMessageRequest()
    fill(request.message.parts.add().data, shape, leaf)
    return request, {"message": {"parts": [{"data": nested(shape, leaf)}]}}


def in_event(shape, leaf=1):
    event = pb.StreamResponse()
    fill(event.artifact_update.artifact.parts.add().data, shape, leaf)
    return event, {"artifactUpdate": {"artifact": {"parts": [{"data": nested(shape, leaf)}]}}}


def in_history(shape, leaf=1):
    tasks = pb.ListTasksResponse()
    fill(tasks.tasks.add().history.add().parts.add().data, shape, leaf)
    return tasks, {"tasks": [{"history": [{"parts": [{"data": nested(shape, leaf)}]}]}]}


def in_metadata(shape, leaf=1):
    task = pb.Task()
    fill(task.metadata.fields["k"], shape, leaf)
    return task, {"metadata": {"k": nested(shape, leaf)}}


def decodes(message):
    try:
        type(message).FromString(message.SerializeToString())
    except DecodeError:
        return False
    return True


PLACES = [in_part, in_request, in_event, in_history, in_metadata]


def check_depth(place, shape, leaf):
    message, value = place(shape, leaf)
    if decodes(message):
        assert parse(message.DESCRIPTOR.name, value) == message
        assert to_json(message) == to_json(type(message)()) | value
    else:
        refusal(NotRepresentable, message.DESCRIPTOR.name, json.dumps(value))


# An array is two messages deeper and an object three: with up to two objects every depth is met.
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("leaf", [1, {}, []], ids=repr)
def test_depth_is_refused_exactly_where_protobuf_stops_decoding(place, leaf):
    for objects in range(3):
        for arrays in range(40, 54):
            check_depth(place, "o" * objects + "a" * arrays, leaf)


@given(st.sampled_from(PLACES), st.text(alphabet="oa", min_size=28, max_size=45))
@settings(deadline=None)
def test_depth_of_any_mixture(place, shape):
    check_depth(place, shape, 1)


@pytest.mark.parametrize(
    ("place", "deepest"), [(in_part, 33), (in_request, 32), (in_event, 32), (in_metadata, 32)]
)
def test_the_deepest_objects(place, deepest):
    message, value = place("o" * deepest)
    name = message.DESCRIPTOR.name
    assert parse(name, value) == message
    fault = refusal(NotRepresentable, name, json.dumps(place("o" * (deepest + 1))[1]))
    assert fault.path.endswith(".k.k.k")


@pytest.mark.parametrize("depth", [500, 900, 100_000])
def test_very_deep_text(depth):
    text = '{"parts":[{"data":' + "[" * depth + "]" * depth + "}]}"
    with pytest.raises(InvalidMessage):
        json_to_proto("Message", text.encode())
    with pytest.raises(InvalidMessage):
        json_to_proto("Message", b'{"a":' * depth)
    with pytest.raises(InvalidMessage):
        json_to_proto("Message", b'{"a":1e400,"b":' + b"[" * depth)


def test_depth_in_unknown_members_does_no_harm():
    text = '{"id":"t","x":' + "[" * 400 + "]" * 400 + "}"
    assert json_to_proto("Task", text.encode()) == to_proto("Task", {"id": "t"})
