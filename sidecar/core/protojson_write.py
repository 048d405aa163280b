"""Protobuf messages as ProtoJSON values: the writers, made from descriptors once per type.

`sidecar.core.protojson` is the other direction.
"""

from __future__ import annotations

import binascii
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from sidecar.core.protojson import InvalidMessage, map_value, member, within

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from sidecar.core.protojson import AnyMessage, Json, Writer

# The readers take integers beyond 2**53 only when a double holds them exactly, so that printing
# them in full is right; beyond 64 bits many parsers refuse the digits, and 1e+19 is printed.
_PRINTED_AS_INTEGER = 2.0**63


def write(message: AnyMessage) -> dict[str, Json]:
    """The JSON value of a message: what is set, in the order of field numbers.

    Raises InvalidMessage for what JSON has no word for: NaN, infinity, an impossible timestamp.
    """
    printed: dict[str, Json] = _writer(message.DESCRIPTOR)(message)
    return printed


@cache
def _writer(descriptor: Descriptor) -> Writer:
    if descriptor.full_name in _WELL_KNOWN_WRITERS:
        return _WELL_KNOWN_WRITERS[descriptor.full_name]
    fields = {field.number: (field.json_name, _field_writer(field)) for field in descriptor.fields}

    def write_message(message: AnyMessage) -> dict[str, Json]:
        printed = {}
        name = ""
        try:
            for field, value in message.ListFields():
                name, convert = fields[field.number]
                printed[name] = value if convert is None else convert(value)
        except InvalidMessage as error:
            raise within(error, f".{name}") from None
        return printed

    return write_message


def _field_writer(field: FieldDescriptor) -> Writer | None:
    """Build the writer of a field's value; None when the value is JSON as it is."""
    value_field = map_value(field)
    if value_field is not None:
        of_value = _single_writer(value_field)
        return dict if of_value is None else lambda value: _write_members(value, of_value)
    single = _single_writer(field)
    if not field.is_repeated:
        return single
    return list if single is None else lambda value: _write_elements(value, single)


def _single_writer(field: FieldDescriptor) -> Writer | None:
    if field.message_type is not None:
        return _writer(field.message_type)
    if field.enum_type is not None:
        names = {value.number: value.name for value in field.enum_type.values}
        return lambda number: names.get(number, number)
    return write_bytes if field.type == FieldDescriptor.TYPE_BYTES else None


def write_bytes(value: bytes) -> str:
    """Base64 as ProtoJSON prints it: standard alphabet, padded."""
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def _write_elements(values: Any, convert: Writer) -> list[Json]:  # noqa: ANN401 - a container
    printed: list[Json] = []
    index = 0
    try:
        for index, value in enumerate(values):  # noqa: B007 - names the element at fault
            printed.append(convert(value))
    except InvalidMessage as error:
        raise within(error, f"[{index}]") from None
    return printed


def _write_members(values: Any, convert: Writer) -> dict[str, Json]:  # noqa: ANN401 - a container
    printed = {}
    key = ""
    try:
        for key in values:
            printed[key] = convert(values[key])
    except InvalidMessage as error:
        raise within(error, member(key)) from None
    return printed


def _write_timestamp(message: AnyMessage) -> str:
    try:
        text: str = message.ToJsonString()
    except ValueError:
        raise InvalidMessage("is a timestamp out of range") from None
    return text


def _write_value(message: AnyMessage) -> Json:
    match message.WhichOneof("kind"):
        case "string_value":
            return message.string_value
        case "number_value":
            return _number(message.number_value)
        case "bool_value":
            return message.bool_value
        case "struct_value":
            return _write_members(message.struct_value.fields, _write_value)
        case "list_value":
            return _write_elements(message.list_value.values, _write_value)
        case _:  # a Value without a kind is not valid, and null says the least
            return None


def _number(value: float) -> float:
    if value.is_integer():
        return int(value) if abs(value) < _PRINTED_AS_INTEGER else value
    if not math.isfinite(value):
        raise InvalidMessage("is not a finite number")
    return value


_WELL_KNOWN_WRITERS: dict[str, Writer] = {
    "google.protobuf.Timestamp": _write_timestamp,
    "google.protobuf.Struct": lambda message: _write_members(message.fields, _write_value),
    "google.protobuf.Value": _write_value,
}
