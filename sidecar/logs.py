"""Log lines: structured, escaped, rate-limited, and written by a thread of their own.

A call to the log costs a tuple and a queue; standard error may block for as long as it likes. What
does not fit in the queue is dropped and counted.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from random import Random

Level: TypeAlias = Literal["debug", "info", "warning", "error"]

CAPACITY = 10_000
"""Lines that wait to be written."""
VALUE_CHARACTERS = 200
"""What is kept of one value, after escaping."""
LIMIT_SECONDS = 1.0
"""One line per key and this time, for `Log.limited`."""

_BATCH = 256
_RANK: dict[Level, int] = {"debug": 0, "info": 1, "warning": 2, "error": 3}
_TEXT_LEVEL: dict[Level, str] = {
    "debug": "DEBUG",
    "info": "INFO ",
    "warning": "WARN ",
    "error": "ERROR",
}


def new_call_id(random: Random) -> str:
    """16 hexadecimal digits that name a call in logs and errors."""
    return f"{random.getrandbits(64):016x}"


def clean(value: object) -> str:
    """`value` as text without anything that acts on a terminal or a line, cut to a fixed length.

    Controls, line separators, bidirectional marks, surrogates and backslashes become escapes.
    """
    text = str(value)
    cut = len(text) > VALUE_CHARACTERS
    text = text[:VALUE_CHARACTERS]
    if not text.isprintable() or "\\" in text:
        text = "".join(
            char
            if char.isprintable() and char != "\\"
            else char.encode("unicode_escape").decode("ascii")
            for char in text
        )
        cut = cut or len(text) > VALUE_CHARACTERS
    return text[:VALUE_CHARACTERS] + "…" if cut else text


@dataclass(frozen=True, slots=True)
class _Record:
    at: datetime
    level: Level
    event: str
    fields: dict[str, object]

    def stamp(self) -> str:
        return f"{self.at:%Y-%m-%dT%H:%M:%S}.{self.at.microsecond // 1000:03d}Z"


def _text_line(record: _Record) -> str:
    parts = [record.stamp(), _TEXT_LEVEL[record.level], clean(record.event)]
    for name, value in record.fields.items():
        match value:
            case bool():
                text = "true" if value else "false"
            case float():
                text = f"{value:.6g}"
            case None:
                text = "-"
            case _:
                text = clean(value)
                if not text or text == "-" or any(mark in text for mark in ' "='):
                    text = '"' + text.replace('"', '\\"') + '"'
        parts.append(f"{name.removesuffix('_')}={text}")
    return " ".join(parts)


def _json_line(record: _Record) -> str:
    line: dict[str, object] = {
        "time": record.stamp(),
        "level": record.level,
        "event": clean(record.event),
    }
    for name, value in record.fields.items():
        plain = value is None or isinstance(value, bool | int)
        if isinstance(value, float):
            plain = math.isfinite(value)
        line[name.removesuffix("_")] = value if plain else clean(value)
    return json.dumps(line, ensure_ascii=False)


class _Burst:
    """What `limited` keeps of one key."""

    __slots__ = ("held", "left_out", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.left_out = 0
        self.held: _Record | None = None
        """The last line that was left out."""


class Log:
    """Structured log lines to a file descriptor.

    `debug`, `info`, `warning` and `error` may be called from any thread, `limited` and `tick` from
    one. Fields are written as they are after the call returns, so pass values, not things that
    change. A field whose name is a Python keyword takes a trailing underscore (``from_``).
    """

    def __init__(
        self,
        *,
        level: Level = "info",
        form: Literal["text", "json"] = "text",
        clock: Callable[[], float],
        fd: int = 2,
        capacity: int = CAPACITY,
        on_drop: Callable[[int], None] | None = None,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Start the writer.

        `clock` gives seconds for the rate limit, `wall` the time in UTC that is printed. `on_drop`
        is told how many lines were dropped, from whichever thread it was.
        """
        self._threshold = _RANK[level]
        self._line = _json_line if form == "json" else _text_line
        self._clock = clock
        self._fd = fd
        self._capacity = capacity
        self._on_drop = on_drop
        self._wall = wall
        self._bursts: dict[Hashable, _Burst] = {}
        self._next_sweep = -math.inf
        self._queue: SimpleQueue[_Record | None] = SimpleQueue()
        self._open = True
        # A daemon thread: one that is stuck in a write must not keep the process.
        self._writer = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._writer.start()

    def configure(self, *, level: Level, form: Literal["text", "json"]) -> None:
        """Change what is logged, and how, from the next line on."""
        self._threshold = _RANK[level]
        self._line = _json_line if form == "json" else _text_line

    def debug(self, event: str, /, **fields: object) -> None:
        """A line for people who look for a defect."""
        self._log("debug", event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """A line on normal operation."""
        self._log("info", event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """A line on what an operator may want to mend."""
        self._log("warning", event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """A line on what an operator must mend."""
        self._log("error", event, fields)

    def limited(self, key: Hashable, level: Level, event: str, /, **fields: object) -> None:
        """At most one line per `key` and second; the next one says how many were left out."""
        if _RANK[level] < self._threshold:
            return
        now = self._clock()
        record = _Record(self._wall(), level, event, fields)
        burst = self._bursts.get(key)
        if burst is None:
            self._bursts[key] = _Burst(now)
            self._put(record)
        elif now - burst.since < LIMIT_SECONDS:
            burst.left_out += burst.held is not None
            burst.held = record
        else:
            if burst.held is not None:
                fields["left_out"] = burst.left_out + 1
            burst.since, burst.left_out, burst.held = now, 0, None
            self._put(record)
        if now >= self._next_sweep:
            self._sweep(now)

    def tick(self) -> None:
        """Write the last line of every burst that is over; call it about once a second."""
        self._sweep(self._clock())

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Write what is queued, within `timeout_seconds`; later lines are dropped and counted."""
        if not self._open:
            return
        self._sweep(math.inf)
        self._open = False
        self._queue.put(None)
        self._writer.join(timeout_seconds)

    def _log(self, level: Level, event: str, fields: dict[str, object]) -> None:
        if _RANK[level] >= self._threshold:
            self._put(_Record(self._wall(), level, event, fields))

    def _put(self, record: _Record) -> None:
        if self._open and self._queue.qsize() < self._capacity:
            self._queue.put(record)
        else:
            self._dropped(1)

    def _dropped(self, count: int) -> None:
        if self._on_drop is not None:
            self._on_drop(count)

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + LIMIT_SECONDS
        for key, burst in list(self._bursts.items()):
            if now - burst.since < LIMIT_SECONDS:
                continue
            if burst.held is None:
                del self._bursts[key]
                continue
            if burst.left_out:
                burst.held.fields["left_out"] = burst.left_out
            self._put(burst.held)
            burst.since, burst.left_out, burst.held = now, 0, None

    # --- the writer's thread ------------------------------------------------------------------

    def _write_all(self) -> None:
        last = False
        while not last:
            batch = [self._queue.get()]
            while len(batch) < _BATCH:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            last = None in batch
            self._write([record for record in batch if record is not None])

    def _write(self, records: list[_Record]) -> None:
        lines: list[str] = []
        for record in records:
            try:
                lines.append(self._line(record) + "\n")
            except Exception:  # the text of a field is its owner's code
                self._dropped(1)
        rest = memoryview("".join(lines).encode("utf-8", "backslashreplace"))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                # Someone who shares the descriptor made it non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                # Nobody reads any more. There is no other place to complain in.
                self._dropped(bytes(rest).count(b"\n"))
                return
