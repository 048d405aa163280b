"""What a stream tells of its task, in both forms of its events."""

from __future__ import annotations

import pytest

from sidecar.core.convert import event_state, json_to_proto
from sidecar.core.spec import TASK_STATES
from sidecar.core.stream_state import StreamState
from sidecar.core.types import Form, Payload

SETTLED = {"COMPLETED", "FAILED", "CANCELED", "REJECTED", "INPUT_REQUIRED", "AUTH_REQUIRED"}


def task(state, task_id="t-1"):
    return b'{"task":{"id":"%b","status":{"state":"%b"}}}' % (task_id.encode(), state.encode())


def update(state, task_id="t-1"):
    status = b'"contextId":"c","status":{"state":"%b"}' % state.encode()
    return b'{"statusUpdate":{"taskId":"%b",%b}}' % (task_id.encode(), status)


ARTIFACT = (
    b'{"artifactUpdate":{"taskId":"t-1","artifact":{"artifactId":"a","parts":[{"text":"x"}]}}}'
)
MESSAGE = b'{"message":{"messageId":"m","role":"ROLE_AGENT","parts":[{"text":"x"}]}}'


@pytest.fixture(params=list(Form))
def see(request):
    """Feeds events to a new state, in JSON or in protobuf."""
    state = StreamState()

    def feed(*events):
        for event in events:
            proto = request.param is Form.PROTO
            data = json_to_proto("StreamResponse", event) if proto else event
            state.see(Payload(request.param, data))
        return state.task_id, state.settled

    return feed


@pytest.mark.parametrize("name", TASK_STATES[1:])
@pytest.mark.parametrize("event", [task, update])
def test_a_task_has_settled_when_it_is_over_or_waits_for_someone(see, event, name):
    assert see(event(name)) == ("t-1", name.removeprefix("TASK_STATE_") in SETTLED)


def test_the_last_state_counts(see):
    assert see(task("TASK_STATE_INPUT_REQUIRED"), update("TASK_STATE_WORKING")) == ("t-1", False)
    assert see(update("TASK_STATE_COMPLETED")) == ("t-1", True)


def test_an_artifact_changes_no_state(see):
    assert see(ARTIFACT) == ("t-1", False)
    assert see(update("TASK_STATE_FAILED"), ARTIFACT) == ("t-1", True)


def test_a_message_is_the_whole_answer(see):
    assert see(MESSAGE) == ("", True)


def test_the_id_stays_when_an_event_has_none(see):
    assert see(task("TASK_STATE_WORKING"), b'{"task":{"status":{"state":3}}}') == ("t-1", True)


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"[]",
        b"{",
        b'{"task":5}',
        b'{"task":{"id":7}}',
        b'{"task":{"status":{"state":{}}}}',
        b'{"message":null}',
        b'{"future":{}}',
        b'{"statusUpdate":{"taskId":null,"status":null}}',
    ],
)
def test_an_event_that_cannot_be_read_changes_nothing(event):
    state = StreamState()
    state.see(Payload(Form.JSON, task("TASK_STATE_WORKING")))

    state.see(Payload(Form.JSON, event))

    assert (state.task_id, state.settled) == ("t-1", False)


@pytest.mark.parametrize("state", ["TASK_STATE_PAUSED", "working"])
def test_a_state_that_is_unknown_here_is_not_the_end(state):
    followed = StreamState()
    followed.see(Payload(Form.JSON, task("TASK_STATE_COMPLETED")))

    followed.see(Payload(Form.JSON, update(state)))

    assert not followed.settled


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (task("TASK_STATE_WORKING"), ("t-1", "TASK_STATE_WORKING", False)),
        (update("TASK_STATE_FAILED", "t-2"), ("t-2", "TASK_STATE_FAILED", False)),
        (ARTIFACT, ("t-1", "", False)),
        (MESSAGE, ("", "", True)),
        (b'{"task":{"id":"t-3"}}', ("t-3", "", False)),
    ],
)
def test_the_state_of_an_event_in_protobuf(event, expected):
    assert event_state(json_to_proto("StreamResponse", event)) == expected
