"""proto/a2a.proto is the official schema: same messages, numbers, names, presence, service.

The official SDK registers the same full names in protobuf's pool, of which a process has one, so
its descriptor is dumped by a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar._pb import a2a_pb2
from sidecar.core.spec import GRPC_SERVICE, OPERATIONS, PROTO_PACKAGE

ROOT = Path(__file__).resolve().parents[2]

# Prints the descriptor of the module argv[1]. Options are not compared: HTTP rules, field behaviour
# and the `deprecated` marks change nothing on the wire.
DUMP = """
import importlib, json, sys

file = importlib.import_module(sys.argv[1]).DESCRIPTOR


def type_name(type_):
    return None if type_ is None else type_.full_name


def field(f):
    return {
        "number": f.number,
        "type": f.type,
        "of": type_name(f.message_type) or type_name(f.enum_type),
        "repeated": f.is_repeated,
        "presence": f.has_presence,
        "map": bool(f.message_type and f.message_type.GetOptions().map_entry),
        "json": f.json_name,
        "oneof": f.containing_oneof and f.containing_oneof.name,
        "default": repr(f.default_value),
    }


def enum(e):
    return {v.name: v.number for v in e.values}


def message(m):
    return {
        "name": m.full_name,
        "fields": {f.name: field(f) for f in m.fields},
        "oneofs": {o.name: [f.name for f in o.fields] for o in m.oneofs},
        "nested": {n.name: message(n) for n in m.nested_types},
        "enums": {e.name: enum(e) for e in m.enum_types},
    }


def method(m):
    return {
        "request": m.input_type.full_name,
        "response": m.output_type.full_name,
        "streams": [m.client_streaming, m.server_streaming],
    }


json.dump(
    {
        "package": file.package,
        "messages": {n: message(m) for n, m in file.message_types_by_name.items()},
        "enums": {n: enum(e) for n, e in file.enum_types_by_name.items()},
        "services": {
            s.full_name: {m.name: method(m) for m in s.methods}
            for s in file.services_by_name.values()
        },
        "extensions": list(file.extensions_by_name),
    },
    sys.stdout,
)
"""


def dump(module):
    done = subprocess.run(
        [sys.executable, "-c", DUMP, module], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def ours():
    return dump("sidecar._pb.a2a_pb2")


@pytest.fixture(scope="module")
def official():
    return dump("a2a.types.a2a_pb2")


@pytest.mark.interop
def test_the_same_messages_exist(ours, official):
    assert sorted(ours["messages"]) == sorted(official["messages"])


@pytest.mark.interop
def test_every_message_is_the_official_one(ours, official):
    for name, expected in official["messages"].items():
        assert ours["messages"][name] == expected, name


@pytest.mark.interop
def test_enums_and_service_are_the_official_ones(ours, official):
    assert ours["enums"] == official["enums"]
    assert ours["services"] == official["services"]


@pytest.mark.interop
def test_nothing_else_differs(ours, official):
    assert ours == official


def test_operations_table_matches_the_service(ours):
    def full(message):
        return message if message.startswith("google.") else f"{PROTO_PACKAGE}.{message}"

    assert ours["package"] == PROTO_PACKAGE
    assert ours["services"] == {
        GRPC_SERVICE: {
            operation.name: {
                "request": full(operation.request),
                "response": full(operation.response),
                "streams": [False, operation.streaming],
            }
            for operation in OPERATIONS.values()
        }
    }


def test_query_and_path_fields_of_the_operations_exist(ours):
    for operation in OPERATIONS.values():
        fields = ours["messages"][operation.request]["fields"].values()
        names = {field["json"] for field in fields}
        assert set(operation.query) | set(operation.path_fields) <= names, operation.name


def test_the_file_is_registered_under_a_name_of_its_own():
    assert a2a_pb2.DESCRIPTOR.name == "sidecar/_pb/a2a.proto"
