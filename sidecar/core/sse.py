"""Server-sent events: a byte stream cut into events, and events written (WHATWG HTML, 9.2)."""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"
_FIELD_ROOM = 16
"""What a line may have beside its value: ``event:``, a space."""

SSE_COMMENT = b": keep-alive\n\n"
"""Ignored by every parser; shows that the connection is alive."""


class EventTooLarge(ValueError):
    """An SSE event above the limit of its reader, in bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"an event is larger than the limit of {limit} bytes")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: its name ('' when it has none) and its data, whose encoding nobody has checked."""

    event: str
    data: bytes


class SseReader:
    """An event stream cut into events, however its bytes arrive (WHATWG HTML, section 9.2).

    Only CR, LF and CRLF end a line. Comments, ``id``, ``retry`` and unknown fields are ignored. An
    event is bounded at `limit` bytes of data; EventTooLarge is raised after the events before it
    have been handed out, and by every call from then on.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head: bytes | None = b""  # what may still become a byte order mark
        self._after_cr = False
        self._line = bytearray()  # the one that has no end yet
        self._name = b""
        self._data: bytes | bytearray | None = None  # of the event that has no end yet
        self._too_large = False

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that `data` completes. Raises EventTooLarge."""
        if self._too_large:
            raise EventTooLarge(self._limit)
        if self._head is not None:
            data = self._head + data
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._head = data
                return []
            self._head = None
            data = data.removeprefix(_BOM)
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return self._result(self._lines(data))

    def end(self) -> list[SseEvent]:
        """The event that the end of the stream left without its empty line, if it has data."""
        return self._result(self._lines(b"\n\n"))

    def _result(self, events: list[SseEvent]) -> list[SseEvent]:
        if self._too_large and not events:
            raise EventTooLarge(self._limit)
        return events

    def _lines(self, data: bytes) -> list[SseEvent]:
        lines = data.split(b"\n")
        rest = lines.pop()
        if not lines:
            self._line += rest
        elif self._line:
            self._line += lines[0]
            lines[0] = bytes(self._line)
            self._line = bytearray(rest)
        elif rest:
            self._line += rest
        events: list[SseEvent] = []
        longest = self._limit + _FIELD_ROOM
        for line in lines:
            if not line:
                if self._data is not None:
                    events.append(SseEvent(self._name.decode(errors="replace"), bytes(self._data)))
                    self._data = None
                self._name = b""
            elif len(line) > longest or not self._field(line):
                self._too_large = True
                return events
        if len(self._line) > longest:
            self._too_large = True
        return events

    def _field(self, line: bytes) -> bool:
        """Whether the event, with this line, is within the limit."""
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            if self._data is None:
                self._data = value
            else:
                if isinstance(self._data, bytes):
                    self._data = bytearray(self._data)
                self._data += b"\n"
                self._data += value
            return len(self._data) <= self._limit
        if field == b"event":
            self._name = value
        return True


# What str.splitlines() takes for the end of a line. JSON has CR and LF between values only.
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
_FALSE_LINE_ENDS = [
    (text.encode(), b"\\u%04x" % ord(text)) for text in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
]
_ASCII_LINE_ENDS = b"\r\n\x0b\x0c\x1c\x1d\x1e"


def sse_event(data: bytes, event: str = "") -> bytes:
    """One event with the JSON text `data` on a single line.

    Line ends of pretty-printed JSON become spaces, and what careless parsers take for a line end is
    escaped; both mean the same JSON.
    """
    if not data.isascii() or len(data.translate(None, _ASCII_LINE_ENDS)) != len(data):
        data = data.translate(_LINE_ENDS_TO_SPACES)
        for raw, escaped in _FALSE_LINE_ENDS:
            data = data.replace(raw, escaped)
    if event:
        return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
    return b"data: %b\n\n" % data
