"""ProtoJSON values into protobuf messages: the readers, made from descriptors.

`sidecar.core.convert` is the counterpart that knows bytes and A2A; here are the rules of each field
type, and `sidecar.core.protojson_write` is the other direction. Readers are built once per type. protobuf's own `json_format` is not used
for A2A messages: it unsets enum names that it does not know, makes bytes out of damaged base64,
drops one of two oneof members when the other is null, and prints the 3 of a Struct as 3.0.
"""

from __future__ import annotations

import binascii
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor

MAX_DEPTH = 100
"""Messages within messages that protobuf parsers decode by default, map entries counted."""


_INT32 = range(-(2**31), 2**31)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# 0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z: google/protobuf/timestamp.proto.
_TIMESTAMP_SECONDS = range(-62135596800, 253402300800)
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\dT(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)"
    r"(?:\.(\d{1,9}))?(Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_DECIMAL = re.compile(r"-?\d{1,40}", re.ASCII)
_NUMERIC = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_VALUE = "google.protobuf.Value"
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")

Json: TypeAlias = Any
"""A JSON value as msgspec decodes it: dict, list, str, int, float, bool or None."""
AnyMessage: TypeAlias = Any
"""A protobuf message; typed so, since its fields are found by name."""
Reader: TypeAlias = Callable[[AnyMessage, Json, int], None]
"""``read(message, value, depth)`` puts a value into a message `depth` below the outermost."""
Writer: TypeAlias = Callable[[Any], Json]
"""A message, or the value of one of its fields, as a JSON value."""


class InvalidMessage(ValueError):
    """What is not a message of its type at all: as JSON, as protobuf, or for want of content.

    The text names the field and what is wrong with it, and never quotes its value.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.steps: list[str] = []
        """Where the fault lies, innermost first: ``.raw``, ``[0]``, ``.parts``."""

    @property
    def path(self) -> str:
        """``message.parts[0].raw``; '' for the message itself."""
        return "".join(reversed(self.steps)).removeprefix(".")

    def __str__(self) -> str:
        return f"{self.path or 'the message'} {self.args[0]}"


class NotRepresentable(InvalidMessage):
    """A JSON message that JSON interfaces take, and that protobuf cannot carry."""


def within(error: InvalidMessage | UnicodeEncodeError, step: str) -> InvalidMessage:
    """The error, as one in this member (``.name``) or element (``[0]``)."""
    if isinstance(error, UnicodeEncodeError):
        error = NotRepresentable("has a lone surrogate, which UTF-8 has no bytes for")
    error.steps.append(step)
    return error


def member(key: str) -> str:
    """The step into a member that is the sender's own word: short and printable."""
    return f".{key[:32]}" if key.isidentifier() else f"[{key[:32]!a}]"


def map_value(field: FieldDescriptor) -> FieldDescriptor | None:
    """The field of a map's values; None when the field is no map."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["value"]


def _is_value(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name == _VALUE


# --- JSON to message -----------------------------------------------------------------------------


def read(message: AnyMessage, value: Json) -> None:
    """Fill an empty message from its JSON value. Members that its type does not have are ignored.

    Raises:
        NotRepresentable: protobuf cannot hold it, or its parsers would refuse the result.
        InvalidMessage: it is not such a message.
    """
    _reader(message.DESCRIPTOR)(message, value, 0)


@cache
def _reader(descriptor: Descriptor) -> Reader:
    if descriptor.full_name in _WELL_KNOWN_READERS:
        return _WELL_KNOWN_READERS[descriptor.full_name]
    setters = {field.json_name: _setter(field) for field in descriptor.fields}
    nullable = frozenset(f.json_name for f in descriptor.fields if _is_value(f))
    camel = {f.name: f.json_name for f in descriptor.fields if f.name != f.json_name}
    snake = frozenset(camel)
    oneofs = [[f.json_name for f in o.fields] for o in descriptor.oneofs if len(o.fields) > 1]

    def read_message(message: AnyMessage, value: Json, depth: int) -> None:
        members = _object(value)
        if not snake.isdisjoint(members):
            # Of two spellings of one field the last counts, as in protobuf's own parser.
            members = {camel.get(name, name): item for name, item in members.items()}
        for oneof in oneofs:
            _check_oneof(members, oneof)
        name = ""
        try:
            for name, item in members.items():
                if item is None and name not in nullable:
                    continue  # null is absence; only a Value has a null of its own
                setter = setters.get(name)
                if setter is not None:
                    setter(message, item, depth)
        except (InvalidMessage, UnicodeEncodeError) as error:
            raise within(error, f".{name}") from None

    return read_message


def _object(value: Json) -> dict[str, Json]:
    if type(value) is not dict:
        raise InvalidMessage("must be an object")
    return value


def _array(value: Json) -> list[Json]:
    if type(value) is not list:
        raise InvalidMessage("must be an array")
    return value


def _check_oneof(members: dict[str, Json], oneof: list[str]) -> None:
    given = [name for name in oneof if members.get(name) is not None]
    if len(given) > 1:
        raise NotRepresentable(f"has both {given[0]} and {given[1]}, of which only one can be set")


def _setter(field: FieldDescriptor) -> Reader:
    """Build what puts a JSON value into this field of a message."""
    value_field = map_value(field)
    if value_field is not None:
        return _map_setter(field.name, value_field)
    if field.is_repeated:
        return _repeated_setter(field)
    if field.message_type is not None:
        return _value_setter(field) if _is_value(field) else _message_setter(field)
    name, scalar = field.name, _scalar_reader(field)
    return lambda message, value, _: setattr(message, name, scalar(value))


def _message_setter(field: FieldDescriptor) -> Reader:
    name, read_message = field.name, _reader(field.message_type)

    def put(message: AnyMessage, value: Json, depth: int) -> None:
        child = getattr(message, name)
        child.SetInParent()  # {} is present too
        read_message(child, value, depth + 1)

    return put


def _value_setter(field: FieldDescriptor) -> Reader:
    name, oneof = field.name, field.containing_oneof

    def put(message: AnyMessage, value: Json, depth: int) -> None:
        # A null beside another member is how some writers spell the members that they do not use.
        if value is None and oneof is not None and message.WhichOneof(oneof.name):
            return
        _read_value(getattr(message, name), value, depth + 1)

    return put


def _repeated_setter(field: FieldDescriptor) -> Reader:
    name = field.name
    type_ = field.message_type
    read_element = None if type_ is None else _reader(type_)
    scalar = _scalar_reader(field) if type_ is None else None

    def extend(message: AnyMessage, value: Json, depth: int) -> None:
        elements = _array(value)
        container = getattr(message, name)
        index = 0
        try:
            for index, item in enumerate(elements):  # noqa: B007 - names the element at fault
                if read_element is not None:
                    read_element(container.add(), item, depth + 1)
                elif scalar is not None:
                    container.append(scalar(item))
        except (InvalidMessage, UnicodeEncodeError) as error:
            raise within(error, f"[{index}]") from None

    return extend


def _map_setter(name: str, value_field: FieldDescriptor) -> Reader:
    """Build the setter of a map; the keys are strings in every map of A2A."""
    type_ = value_field.message_type
    read_member = None if type_ is None else _reader(type_)
    scalar = _scalar_reader(value_field) if type_ is None else None

    def put(message: AnyMessage, value: Json, depth: int) -> None:
        members = _object(value)
        container = getattr(message, name)
        key = ""
        try:
            for key, item in members.items():
                if read_member is not None:
                    read_member(container[key], item, depth + 2)
                elif scalar is not None:
                    container[key] = scalar(item)
        except (InvalidMessage, UnicodeEncodeError) as error:
            raise within(error, member(key)) from None

    return put


def _scalar_reader(field: FieldDescriptor) -> Callable[[Json], Any]:
    if field.enum_type is not None:
        return _enum_reader(field.enum_type)
    return _SCALAR_READERS[field.type]


def _read_string(value: Json) -> str:
    if type(value) is not str:
        raise InvalidMessage("must be a string")
    return value


def _read_bool(value: Json) -> bool:
    if type(value) is not bool:
        raise InvalidMessage("must be true or false")
    return value


def _read_int32(value: Json) -> int:
    number = _integer(value)
    if number is None or number not in _INT32:
        raise InvalidMessage("must be an integer of 32 bits")
    return number


def _integer(value: Json) -> int | None:
    """The integer that a JSON value stands for: 10, 10.0, 1e1, "10"; else None."""
    if type(value) is str and _NUMERIC.fullmatch(value):
        value = float(value)  # exact for all of 32 bits
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _enum_reader(enum: EnumDescriptor) -> Callable[[Json], int]:
    """Build the reader of an enum: its names, and any number, known or not, quoted or not."""
    numbers = {value.name: value.number for value in enum.values}

    def read_enum(value: Json) -> int:
        if type(value) is str and value in numbers:
            return numbers[value]
        if type(value) is str and not _DECIMAL.fullmatch(value):
            raise NotRepresentable(f"is not a name of {enum.name}")
        number = _integer(value)
        if number is None or number not in _INT32:
            raise InvalidMessage(f"must be a name or a number of {enum.name}")
        return number

    return read_enum


def _read_bytes(value: Json) -> bytes:
    """Base64 in either alphabet, padded or not; line breaks as in MIME are passed over."""
    try:
        encoded = _read_string(value).encode("ascii").translate(_FROM_URL_SAFE, b"\r\n")
        if not encoded.endswith(b"="):
            encoded += b"=" * (-len(encoded) % 4)
        return binascii.a2b_base64(encoded, strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise InvalidMessage("is not base64") from None


def _read_timestamp(message: AnyMessage, value: Json, _: int) -> None:
    parts = _TIMESTAMP.fullmatch(_read_string(value))
    if parts is None:
        raise InvalidMessage("must be a timestamp like 2025-01-31T10:00:00Z")
    local, fraction, zone = parts.groups()
    try:
        seconds = (datetime.fromisoformat(local + zone) - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        raise InvalidMessage("is not a date of the calendar") from None
    if seconds not in _TIMESTAMP_SECONDS:
        raise InvalidMessage("must lie within the years 1 to 9999")
    message.seconds = seconds
    message.nanos = int((fraction or "").ljust(9, "0"))


def _read_struct(message: AnyMessage, value: Json, depth: int) -> None:
    members = _object(value)
    message.SetInParent()
    fields = message.fields
    key = ""
    try:
        for key, item in members.items():
            _read_value(fields[key], item, depth + 2)  # the map entry is a message too
    except (InvalidMessage, UnicodeEncodeError) as error:
        raise within(error, member(key)) from None


def _read_list(message: AnyMessage, elements: list[Json], depth: int) -> None:
    message.SetInParent()
    add = message.values.add
    index = 0
    try:
        for index, item in enumerate(elements):  # noqa: B007 - names the element at fault
            _read_value(add(), item, depth + 1)
    except (InvalidMessage, UnicodeEncodeError) as error:
        raise within(error, f"[{index}]") from None


def _read_value(message: AnyMessage, value: Json, depth: int) -> None:
    kind = type(value)
    if depth >= MAX_DEPTH and (depth > MAX_DEPTH or kind in (dict, list)):
        raise NotRepresentable("is nested too deeply for protobuf")
    if kind is str:
        message.string_value = value
    elif kind is dict:
        _read_struct(message.struct_value, value, depth + 1)
    elif kind is bool:
        message.bool_value = value
    elif kind is list:
        _read_list(message.list_value, value, depth + 1)
    elif value is None:
        message.null_value = 0
    else:
        message.number_value = _double(value)


def _double(value: float) -> float:
    """The double equal to a JSON number."""
    try:
        double = float(value)
    except OverflowError:
        double = math.inf
    if math.isinf(double):
        raise NotRepresentable("is beyond the range of a double")
    if double != value:
        raise NotRepresentable("is an integer with more digits than a double holds")
    return double


_SCALAR_READERS: dict[int, Callable[[Json], Any]] = {
    FieldDescriptor.TYPE_STRING: _read_string,
    FieldDescriptor.TYPE_BYTES: _read_bytes,
    FieldDescriptor.TYPE_BOOL: _read_bool,
    FieldDescriptor.TYPE_INT32: _read_int32,
}
_WELL_KNOWN_READERS: dict[str, Reader] = {
    "google.protobuf.Timestamp": _read_timestamp,
    "google.protobuf.Struct": _read_struct,
    _VALUE: _read_value,
}
