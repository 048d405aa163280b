"""What the two JSON bindings share: media types, ids, SSE replies, the shape of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core import convert, payload
from sidecar.core.spec import WRAPPED
from sidecar.core.sse import SseReader
from sidecar.core.types import CONTROLS, header

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.spec import Operation
    from sidecar.core.types import Headers, Reply

JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream"
# Query parameters that are whole numbers.
NUMBERS = frozenset({"historyLength", "pageSize"})

# Results in which the caller's tenant is put back: they must be fit for it.
_PUSH_CONFIG = "TaskPushNotificationConfig"
_PUSH_CONFIGS = "ListTaskPushNotificationConfigsResponse"


def media_type(headers: Headers) -> str:
    """The media type without parameters, in lower case; '' when there is none."""
    return (header(headers, "content-type") or "").partition(";")[0].strip().lower()


def check_params(raw: bytes) -> dict[str, bytes]:
    """The members of a request; refuses one that two parsers could read differently.

    Raises PayloadError for what is no object, and for a member that stands twice in the request or
    in its message, or an id that does in two spellings.
    """
    members = payload.split_object(raw)
    _one_spelling(members)
    message = members.get("message", b"")
    if message[:1] == b"{" and (
        message.count(b"askId") + message.count(b"ask_id") > 1 or b"\\u" in message
    ):
        _one_spelling(payload.split_object(message))
    return members


def _one_spelling(members: dict[str, bytes]) -> None:
    if "taskId" in members and "task_id" in members:
        raise payload.DuplicateMember("the member taskId appears in two spellings")


def snake_case(name: str) -> str:
    """``taskId`` → ``task_id``: the other spelling that ProtoJSON accepts."""
    return "".join("_" + c.lower() if c.isupper() else c for c in name)


def id_in(members: dict[str, bytes], name: str) -> str:
    """The id of a request that names what it is about; raises InvalidMessage naming the field."""
    raw = members.get(name)
    if raw is None:
        raw = members.get(snake_case(name))
    try:
        value = payload.parse_string(raw) if raw not in (None, b"null") else ""
    except payload.PayloadError as error:
        raise at(name, convert.InvalidMessage("must be a string")) from error
    check_id(name, value)
    return value


def check_id(name: str, value: str) -> None:
    """Refuse an id that could not stand in a path; raises InvalidMessage naming the field."""
    if not value:
        raise at(name, convert.InvalidMessage("must not be empty"))
    if value in {".", ".."} or CONTROLS.search(value) is not None:
        problem = "must not be `.` or `..` nor hold control characters"
        raise at(name, convert.InvalidMessage(problem))


def at(name: str, error: convert.InvalidMessage) -> convert.InvalidMessage:
    """`error` as one in the field `name`."""
    error.steps.append(f".{name}")
    return error


def shaped_result(
    operation: Operation, result: bytes, members: dict[str, bytes] | None = None
) -> str:
    """Why `result` cannot be the operation's result; '' when it can. `members`: of `result`, if known.

    Only what no receiver could use is refused: values that cross between JSON bindings are moved,
    not re-modelled.
    """
    if result[:1] != b"{":
        return "its result is not a JSON object"
    response = operation.response
    try:
        if response in WRAPPED:
            if members is None:
                members = payload.split_object(result)
            if all(value == b"null" for value in members.values()):
                return f"its {response} is empty"
        elif response == _PUSH_CONFIG:
            payload.split_object(result)
        elif response == _PUSH_CONFIGS:
            configs = payload.get_member(result, "configs") or b"null"
            for config in payload.split_array(configs) if configs != b"null" else ():
                payload.split_object(config)
    except payload.PayloadError as error:
        return f"its result: {error}"
    return ""


def foreign_coding(headers: Headers) -> str:
    """The content coding of a reply that was asked for plain; '' for none."""
    coding = (header(headers, "content-encoding") or "identity").strip().lower()
    return "" if coding == "identity" else coding


class EventReader:
    """Bytes of an SSE reply in, one `Reply` per event out."""

    def __init__(self, limit: int, read: Callable[[str, bytes], Reply]) -> None:
        self._sse = SseReader(limit)
        self._read = read

    def feed(self, data: bytes) -> list[Reply]:
        """The events that `data` completes; raises EventTooLarge."""
        return [self._read(event.event, event.data) for event in self._sse.feed(data)]

    def end(self) -> list[Reply]:
        """The event that the end of the body completes, if there is one."""
        return [self._read(event.event, event.data) for event in self._sse.end()]
