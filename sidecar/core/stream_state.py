"""What a stream of events tells about its task: the id, and whether the work has settled."""

from __future__ import annotations

import msgspec

from sidecar.core import convert
from sidecar.core.spec import INTERRUPTED_STATES, TERMINAL_STATES, state_name
from sidecar.core.types import Form, Payload


class _Status(msgspec.Struct):
    state: str | int | None = None


class _Task(msgspec.Struct):
    id: str | None = None
    status: _Status | None = None


class _Update(msgspec.Struct):
    task_id: str | None = msgspec.field(default=None, name="taskId")
    status: _Status | None = None


class _Event(msgspec.Struct):
    task: _Task | None = None
    status_update: _Update | None = msgspec.field(default=None, name="statusUpdate")
    artifact_update: _Update | None = msgspec.field(default=None, name="artifactUpdate")
    message: dict[str, msgspec.Raw] | None = None


_decoder = msgspec.json.Decoder(_Event)


class StreamState:
    """Follows one stream; an event that cannot be read changes nothing."""

    def __init__(self) -> None:
        self.task_id = ""
        self.settled = False
        """The last state was terminal or interrupted, or a message was the answer (A2A 3.1.2)."""

    def see(self, event: Payload) -> None:
        """Take note of a StreamResponse."""
        if event.form is Form.PROTO:
            task_id, state, is_message = convert.event_state(event.data)
        else:
            try:
                task_id, state, is_message = _json_state(_decoder.decode(event.data))
            except (msgspec.DecodeError, RecursionError):
                return
        self.task_id = task_id or self.task_id
        if state:
            self.settled = state in TERMINAL_STATES or state in INTERRUPTED_STATES
        self.settled = self.settled or is_message


def _json_state(event: _Event) -> tuple[str, str, bool]:
    if event.task is not None:
        return event.task.id or "", _state(event.task.status), False
    if event.status_update is not None:
        return event.status_update.task_id or "", _state(event.status_update.status), False
    if event.artifact_update is not None:
        return event.artifact_update.task_id or "", "", False
    return "", "", event.message is not None


def _state(status: _Status | None) -> str:
    """The name of a state, '' for none; ProtoJSON allows the number too."""
    state = status.state if status is not None else None
    if isinstance(state, int):
        return state_name(state)
    return state or ""
