"""The tenant: out of requests, into requests, back into answers; in both forms alike."""

from __future__ import annotations

import json

import pytest

from sidecar.core import convert, tenant
from sidecar.core.payload import PayloadError
from sidecar.core.spec import OPERATIONS
from sidecar.core.types import Form, Payload
from tests.core.calls import REQUESTS, text

SEND = OPERATIONS["SendMessage"]
GET = OPERATIONS["GetTask"]
CONFIG = OPERATIONS["GetTaskPushNotificationConfig"]
CONFIGS = OPERATIONS["ListTaskPushNotificationConfigs"]

FORMS = pytest.mark.parametrize("form", list(Form))


def made(message, value, form):
    data = text(value)
    return Payload(form, convert.json_to_proto(message, data) if form is Form.PROTO else data)


def seen(message, payload):
    data = payload.data
    if payload.form is Form.PROTO:
        data = convert.proto_to_json(message, data)
    return json.loads(data)


@FORMS
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_request_loses_and_gets_its_tenant(name, form):
    operation = OPERATIONS[name]
    request = json.loads(REQUESTS[name])
    given = made(operation.request, request | {"tenant": "evil"}, form)

    found, bare = tenant.take(operation, given)
    sent = tenant.put(operation, bare, "acme-7")

    assert found == "evil"
    assert seen(operation.request, bare) == request
    assert seen(operation.request, sent) == request | {"tenant": "acme-7"}
    assert tenant.put(operation, bare, "") is bare


@FORMS
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_a_request_without_a_tenant_is_not_touched(name, form):
    operation = OPERATIONS[name]
    given = made(operation.request, json.loads(REQUESTS[name]), form)

    assert tenant.take(operation, given)[1].data is given.data


def nested(value=None, name="taskPushNotificationConfig"):
    config = {"url": "https://hook.example"} | ({"tenant": value} if value else {})
    return json.loads(REQUESTS["SendMessage"]) | {"configuration": {name: config}}


@FORMS
@pytest.mark.parametrize("name", ["SendMessage", "SendStreamingMessage"])
def test_the_push_configuration_of_a_send_has_the_tenant_of_its_hop(name, form):
    operation = OPERATIONS[name]

    found, bare = tenant.take(operation, made("SendMessageRequest", nested("evil"), form))
    sent = seen("SendMessageRequest", tenant.put(operation, bare, "acme"))

    assert found == ""
    assert seen("SendMessageRequest", bare) == nested()
    assert sent == nested("acme") | {"tenant": "acme"}


@pytest.mark.parametrize(
    "config",
    [
        '{"task_push_notification_config":{"tenant":"evil"}}',
        '{"taskPushNotificationConfig":{"ten\\u0061nt":"evil"}}',
        '{"taskPushNotificationConfig":{"tenant":"evil"},"task_push_notification_config":{"tenant":"evil"}}',
        '{"task\\u0050ushNotificationConfig":{"tenant":"evil"}}',
        '{"taskPushNotificationC\\u006fnfig":{"tenant":"evil"}}',
    ],
)
@pytest.mark.parametrize("member", ['"configuration"', '"c\\u006f\\u006efiguration"'])
def test_no_spelling_hides_a_tenant(member, config):
    data = b'{"message":{},%b:%b}' % (member.encode(), config.encode())

    bare = tenant.take(SEND, Payload(Form.JSON, data))[1]
    sent = tenant.put(SEND, Payload(Form.JSON, data), "acme")
    elsewhere = tenant.put_nested(SEND, Payload(Form.JSON, data), "acme")

    assert "evil" not in str(json.loads(bare.data))
    assert "evil" not in str(json.loads(sent.data))
    assert str(json.loads(elsewhere.data)).count("acme") == config.count("evil")
    assert "tenant" not in json.loads(elsewhere.data)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b'{"id":"t","ten\\u0061nt":"x"}', "x"),
        (b'{"id":"t","tenant":""}', ""),
        (b'{"id":"t","tenant":null}', ""),
        (b'{"id":"t","metadata":{"tenant":"x"}}', ""),
    ],
)
def test_what_counts_as_the_tenant(data, found):
    assert tenant.take(GET, Payload(Form.JSON, data))[0] == found


def test_a_tenant_elsewhere_is_data():
    data = b'{"message":{"metadata":{"tenant":"x"},"parts":[{"data":{"tenant":"y"}}]}}'
    given = Payload(Form.JSON, data)

    assert tenant.take(SEND, given)[1].data == data
    assert tenant.put_nested(SEND, given, "acme") is given


@pytest.mark.parametrize(
    "data",
    [
        b'{"tenant":"a","tenant":"b"}',
        b'{"tenant":5}',
        b'{"tenant":"a"',
        b'["tenant"]',
        b'{"message":{},"configuration":{"taskPushNotificationConfig":{"tenant":"a","tenant":"b"}}}',
    ],
)
def test_a_tenant_that_two_parsers_could_read_differently(data):
    with pytest.raises(PayloadError):
        tenant.take(SEND, Payload(Form.JSON, data))


# --- answers ---------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(
    "name",
    ["CreateTaskPushNotificationConfig", "GetTaskPushNotificationConfig"],
)
def test_an_answer_has_the_callers_tenant(name, form):
    operation = OPERATIONS[name]
    config = {"id": "c", "taskId": "t", "url": "u"}

    given = made(operation.response, config | {"tenant": "acme"}, form)

    assert seen(operation.response, tenant.answer(operation, given, "mine")) == config | {
        "tenant": "mine"
    }
    assert seen(operation.response, tenant.answer(operation, given, "")) == config


@FORMS
def test_every_configuration_of_a_list_has_it(form):
    page = {"configs": [{"id": "c", "url": "u", "tenant": "acme"}, {"id": "d", "url": "u"}]}
    given = made(CONFIGS.response, page | {"nextPageToken": "n"}, form)

    answered = seen(CONFIGS.response, tenant.answer(CONFIGS, given, "mine"))

    assert [config["tenant"] for config in answered["configs"]] == ["mine", "mine"]
    assert answered["nextPageToken"] == "n"
    assert "acme" not in str(seen(CONFIGS.response, tenant.answer(CONFIGS, given, "")))


@pytest.mark.parametrize("data", [b"{}", b'{"configs":null}', b'{"nextPageToken":"x"}'])
def test_a_list_without_configurations(data):
    given = Payload(Form.JSON, data)

    assert tenant.answer(CONFIGS, given, "mine") is given


@pytest.mark.parametrize("name", [n for n, one in OPERATIONS.items() if "Push" not in one.response])
def test_other_answers_are_not_touched(name):
    given = Payload(Form.JSON, b'{"tenant":"x"}')

    assert tenant.answer(OPERATIONS[name], given, "mine") is given
