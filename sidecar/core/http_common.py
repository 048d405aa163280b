"""What the two JSON bindings share: media types, SSE replies, the shape of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.core import payload
from sidecar.core.sse import SseReader
from sidecar.core.types import header

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.spec import Operation
    from sidecar.core.types import Headers, Reply

JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream"

# Results that are a oneof: an empty one would be an empty success (A2A 3.1.1, 3.1.2).
_WRAPPED = frozenset({"SendMessageResponse", "StreamResponse"})


def media_type(headers: Headers) -> str:
    """The media type without parameters, in lower case; '' when there is none."""
    return (header(headers, "content-type") or "").partition(";")[0].strip().lower()


def check_params(raw: bytes) -> None:
    """Refuse a request that two parsers could read differently: a repeated id of any kind.

    Raises PayloadError for what is no object, and for a member that stands twice in the request or
    in its message.
    """
    members = payload.split_object(raw)
    message = members.get("message", b"")
    if message[:1] == b"{" and message.count(b"askId") + message.count(b"ask_id") > 1:
        payload.split_object(message)


def shaped_result(operation: Operation, result: bytes) -> str:
    """Why `result` cannot be the operation's result; '' when it can.

    Only what no receiver could use is refused: values that cross between JSON bindings are moved,
    not re-modelled.
    """
    if result[:1] != b"{":
        return "its result is not a JSON object"
    if operation.response in _WRAPPED and not payload.split_object(result):
        return f"its {operation.response} is empty"
    return ""


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
