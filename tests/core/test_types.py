"""The few rules that values of the vocabulary have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sidecar.core.spec import Binding
from sidecar.core.types import header
from tests.core.calls import interface


@pytest.mark.parametrize(
    ("position", "binding", "label"),
    [
        (0, Binding.JSONRPC, "0-jsonrpc"),
        (2, Binding.HTTP_JSON, "2-http_json"),
        (15, Binding.GRPC, "15-grpc"),
        (16, Binding.GRPC, "other"),  # labels are a closed set
    ],
)
def test_the_label_is_position_and_binding(position, binding, label):
    assert replace(interface(binding), position=position).label == label


@pytest.mark.parametrize(
    ("host", "address"),
    [("agent.example", "agent.example:443"), ("::1", "[::1]:443"), ("10.0.0.1", "10.0.0.1:443")],
)
def test_the_address_is_as_urls_have_it(host, address):
    assert replace(interface(Binding.GRPC), host=host).address == address


@pytest.mark.parametrize(
    "change",
    [
        {"tls": False},
        {"host": "b.example"},
        {"port": 8443},
        {"path": "/a"},
        {"binding": Binding.JSONRPC},
        {"tenant": "t"},
    ],
)
def test_what_makes_another_interface(change):
    one = interface(Binding.GRPC)

    assert replace(one, **change).identity != one.identity


@pytest.mark.parametrize(
    "change",
    [
        {"position": 3},
        {"url": "AGENT.example:443"},
        {"assumed": True},
        {"refuses_callers_credentials": True},
    ],
)
def test_what_leaves_an_interface_the_same(change):
    one = interface(Binding.GRPC)

    assert replace(one, **change).identity == one.identity


def test_a_header_is_the_first_of_its_name():
    headers = [("b", "1"), ("a", "2"), ("a", "3")]

    assert header(headers, "a") == "2"
    assert header(headers, "c") is None
