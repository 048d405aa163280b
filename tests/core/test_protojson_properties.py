"""All message types, with protobuf's own json_format as the judge of what both can hold."""

import json
import struct

import pytest
from google.protobuf import json_format, struct_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sidecar._pb import a2a_pb2 as pb
from sidecar.core.convert import (
    InvalidMessage,
    check,
    json_to_proto,
    proto_to_json,
    put_tenant,
    take_tenant,
)
from sidecar.core.spec import OPERATIONS

MESSAGES = sorted(pb.DESCRIPTOR.message_types_by_name)
REQUESTS = sorted({operation.request for operation in OPERATIONS.values()})

texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\x00\u2028é😀")),
    max_size=6,
)
# -0.0 is printed as 0, so it does not come back as it was: adding 0.0 makes it 0.0.
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**53), 2**53).map(float),
).map(lambda n: n + 0.0)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def filled_value(value):
    result = struct_pb2.Value()
    json_format.ParseDict(value, result)
    return result


def filled_struct(value):
    result = struct_pb2.Struct()
    json_format.ParseDict(value, result)
    return result


SCALARS = {
    FieldDescriptor.TYPE_STRING: texts,
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=5),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 12),
}
WELL_KNOWN = {
    "google.protobuf.Value": json_values.map(filled_value),
    "google.protobuf.Struct": st.dictionaries(texts, json_values, max_size=3).map(filled_struct),
    "google.protobuf.Timestamp": st.builds(
        timestamp_pb2.Timestamp,
        seconds=st.integers(-62135596800, 253402300799),
        nanos=st.sampled_from([0, 5_000_000, 5000, 5]) | st.integers(0, 999_999_999),
    ),
}


def of_field(field):
    if field.message_type is None:
        return SCALARS[field.type]
    known = WELL_KNOWN.get(field.message_type.full_name)
    return messages(field.message_type.name) if known is None else known


@st.composite
def messages(draw, name):
    """A message of this type; about half of its fields are set, of a oneof at most one."""
    message = getattr(pb, name)()
    descriptor = message.DESCRIPTOR
    chosen = [
        draw(st.sampled_from([None, *oneof.fields]))
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    ]
    for field in descriptor.fields:
        if field.containing_oneof and len(field.containing_oneof.fields) > 1:
            if field not in chosen:
                continue
        elif not draw(st.booleans()):
            continue
        put(draw, message, field)
    return message


def put(draw, message, field):
    entry = field.message_type and field.message_type.GetOptions().map_entry
    if entry:
        container = getattr(message, field.name)
        value_field = field.message_type.fields_by_name["value"]
        for key, value in draw(st.dictionaries(texts, of_field(value_field), max_size=2)).items():
            if value_field.message_type:
                container[key].CopyFrom(value)
            else:
                container[key] = value
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(of_field(field), max_size=2)))
    elif field.message_type:
        getattr(message, field.name).CopyFrom(draw(of_field(field)))
    else:
        setattr(message, field.name, draw(of_field(field)))


any_message = st.sampled_from(MESSAGES).flatmap(messages)
thorough = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def expected_json(message):
    """What protobuf's own printer says, with the four fields that ListTasks always has."""
    printed = json_format.MessageToDict(message)
    if message.DESCRIPTOR.name == "ListTasksResponse":
        printed = {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0} | printed
    return printed


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
@settings(thorough, max_examples=12)
def test_every_message_type_round_trips(name, data):
    message = data.draw(messages(name))
    text = proto_to_json(name, message.SerializeToString())
    assert json.loads(text) == expected_json(message)
    assert type(message).FromString(json_to_proto(name, text)) == message


@given(any_message, st.booleans(), st.booleans(), st.booleans())
@thorough
def test_reads_what_the_official_printer_writes(message, snake, numbers, ascii_only):
    text = json_format.MessageToJson(
        message,
        preserving_proto_field_name=snake,
        use_integers_for_enums=numbers,
        ensure_ascii=ascii_only,
    )
    name = message.DESCRIPTOR.name
    assert type(message).FromString(json_to_proto(name, text.encode())) == message


def places(value, found):
    """Every (container, key) within a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(pairs):
        found.append((value, key))
        if isinstance(item, (dict, list)):
            places(item, found)
    return found


def official(name, text):
    message = getattr(pb, name)()
    return json_format.Parse(text, message, ignore_unknown_fields=True)


odd = st.one_of(
    json_values,
    st.integers(-(2**70), 2**70),
    st.sampled_from(["ROLE_USER", "2", "1e1", "AAA=", "_-8", "a b", "2025-01-01T00:00:00Z", 2, {}]),
)


@given(any_message, st.data())
@thorough
def test_what_is_accepted_is_what_the_official_parser_reads(message, data):
    """One value of a valid message is replaced by anything; json_format is the judge.

    It is the more lenient one, so nothing is said of what is refused here, but for the kind of
    error. It reads {"text":"a","data":null} as null data, which is left out.
    """
    name = message.DESCRIPTOR.name
    value = json_format.MessageToDict(message)
    found = places(value, [])
    if found:
        container, key = data.draw(st.sampled_from(found))
        replacement = data.draw(odd)
        if key == "data" and replacement is None:
            replacement = 1
        container[key] = replacement
    text = json.dumps(value)
    try:
        read = getattr(pb, name).FromString(json_to_proto(name, text.encode()))
    except InvalidMessage:
        return
    assert read == official(name, text)


@given(st.sampled_from(MESSAGES), st.binary(max_size=80))
@example("Task", struct.pack("<BBd", 0x32, 9, 1.0))
@thorough
def test_any_bytes_print_as_json_or_are_refused(name, data):
    try:
        text = proto_to_json(name, data)
    except InvalidMessage:
        return
    assert isinstance(json.loads(text), dict)
    json_to_proto(name, text)


@given(st.sampled_from(MESSAGES), st.binary(max_size=40) | texts.map(str.encode))
@thorough
def test_any_text_is_read_or_refused(name, text):
    try:
        data = json_to_proto(name, text)
    except InvalidMessage:
        return
    check(name, data)


@given(st.sampled_from(REQUESTS).flatmap(messages), texts)
@thorough
def test_tenants_of_any_request(message, tenant):
    name = message.DESCRIPTOR.name
    original = message.SerializeToString()
    taken, rest = take_tenant(name, original)
    assert taken == message.tenant
    assert take_tenant(name, rest) == ("", rest)
    set_again = type(message).FromString(put_tenant(name, rest, tenant))
    assert set_again.tenant == tenant
    message.tenant = tenant
    if name == "SendMessageRequest" and message.configuration.HasField(
        "task_push_notification_config"
    ):
        message.configuration.task_push_notification_config.tenant = tenant
    assert set_again == message
