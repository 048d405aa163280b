"""Log lines: their form, what peers cannot do with them, bursts, and a reader that is stuck."""

import contextlib
import fcntl
import json
import math
import os
import random
import re
import threading
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.logs import CAPACITY, Log, clean, new_call_id

NOON = datetime(2026, 11, 30, 15, 50, 0, 123999, tzinfo=UTC)


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Sink:
    """A log on a pipe that is read when the log is closed."""

    def __init__(self, **options):
        self.clock = Clock()
        self.dropped = 0
        self._reader, self._writer = os.pipe()
        self.log = Log(
            clock=self.clock, fd=self._writer, on_drop=self._drop, wall=lambda: NOON, **options
        )

    def _drop(self, count):
        self.dropped += count

    def lines(self):
        self.log.close()
        os.close(self._writer)
        with open(self._reader, encoding="utf-8", newline="\n") as file:
            return file.read().splitlines()


@pytest.fixture
def sink():
    return Sink()


def test_a_line_of_text(sink):
    sink.log.info("failover", agent="weather", from_="2-grpc", to="0-jsonrpc")
    assert sink.lines() == [
        "2026-11-30T15:50:00.123Z INFO  failover agent=weather from=2-grpc to=0-jsonrpc"
    ]


def test_levels_are_aligned():
    sink = Sink(level="debug")
    for level in ("debug", "info", "warning", "error"):
        getattr(sink.log, level)("x")
    assert [line[25:] for line in sink.lines()] == ["DEBUG x", "INFO  x", "WARN  x", "ERROR x"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["DEBUG", "INFO", "WARN", "ERROR"]),
        ("info", ["INFO", "WARN", "ERROR"]),
        ("warning", ["WARN", "ERROR"]),
        ("error", ["ERROR"]),
    ],
)
def test_lines_below_the_level_are_left_out(level, expected):
    sink = Sink(level=level)
    for name in ("debug", "info", "warning", "error"):
        getattr(sink.log, name)("x")
        sink.log.limited(name, name, "x")
    lines = [line.split()[1] for line in sink.lines()]
    assert lines == [name for name in expected for _ in range(2)]
    assert sink.dropped == 0


def test_values_of_text(sink):
    sink.log.info(
        "call",
        yes=True,
        no=False,
        none=None,
        whole=7,
        part=0.1 + 0.2,
        words="two words",
        quote='say "hi"',
        equals="a=b",
        empty="",
        dash="-",
        host="127.0.0.1:80",
    )
    (line,) = sink.lines()
    assert line[25:] == (
        'INFO  call yes=true no=false none=- whole=7 part=0.3 words="two words"'
        r' quote="say \"hi\"" equals="a=b" empty="" dash="-" host=127.0.0.1:80'
    )


def test_a_line_of_json():
    sink = Sink(form="json")
    sink.log.warning(
        "ambiguous", agent="weather", from_=None, n=2, t=0.25, bad=math.inf, ok=True, text="é\n"
    )
    (line,) = sink.lines()
    assert json.loads(line) == {
        "time": "2026-11-30T15:50:00.123Z",
        "level": "warning",
        "event": "ambiguous",
        "agent": "weather",
        "from": None,
        "n": 2,
        "t": 0.25,
        "bad": "inf",
        "ok": True,
        "text": "é\\n",
    }


def test_milliseconds_of_the_wall_clock():
    line = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO  x")
    reader, writer = os.pipe()
    before = datetime.now(UTC)
    log = Log(clock=Clock(), fd=writer)
    log.info("x")
    log.close()
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    assert line.fullmatch(text.rstrip("\n"))
    assert abs((datetime.fromisoformat(text[:24]) - before).total_seconds()) < 60


# --- what peers can put into a line -----------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain text é ☂", "plain text é ☂"),
        ("a\r\nb\tc\0", "a\\r\\nb\\tc\\x00"),
        ("\x1b[31mred\x7f\x9b", "\\x1b[31mred\\x7f\\x9b"),
        ("\u202egnp.exe\u2028\u200b", "\\u202egnp.exe\\u2028\\u200b"),
        ("\udc80", "\\udc80"),
        ("C:\\n", "C:\\\\n"),
        (42, "42"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "…"),
        ("\0" * 60, ("\\x00" * 60)[:200] + "…"),
    ],
)
def test_peer_text_is_escaped_and_cut(value, text):
    assert clean(value) == text


@given(st.text(max_size=300), st.sampled_from(["text", "json"]))
def test_no_peer_text_makes_a_second_line_or_a_control(text, form):
    sink = Sink(form=form)
    sink.log.error(text, detail=text)
    (line,) = sink.lines()
    assert line.isprintable()
    assert len(line) < 2000


def test_no_peer_text_makes_a_second_field(sink):
    sink.log.info("x", detail='" delivered=no "', other="\\")
    (line,) = sink.lines()
    fields = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ "]*)', line)
    assert [name for name, _ in fields] == ["detail", "other"]


def test_a_value_without_a_text_costs_its_line_only(sink):
    class Bad:
        def __str__(self):
            raise RuntimeError

    sink.log.info("one", bad=Bad())
    sink.log.info("two")
    assert [line[31:] for line in sink.lines()] == ["two"]
    assert sink.dropped == 1


# --- bursts -----------------------------------------------------------------------------------


def test_one_line_per_key_and_second(sink):
    for number in range(5):
        sink.log.limited(("w", "0"), "warning", "failover", n=number)
        sink.clock.now += 0.1
    sink.log.limited(("w", "1"), "warning", "failover", n="other key")
    sink.clock.now = 1001.0
    sink.log.limited(("w", "0"), "warning", "failover", n=5)
    sink.log.limited(("w", "0"), "warning", "failover", n=6)
    sink.clock.now = 1002.5
    sink.log.limited(("w", "0"), "warning", "failover", n=7)
    sink.clock.now = 1010.0
    sink.log.limited(("w", "0"), "warning", "failover", n=8)
    assert [line.split("failover ")[1] for line in sink.lines()] == [
        "n=0",
        'n="other key"',
        "n=5 left_out=4",
        "n=7 left_out=1",
        "n=8",
    ]


def test_the_end_of_a_burst_is_told_at_the_next_tick(sink):
    for number in range(4):
        sink.log.limited("k", "warning", "failover", n=number)
    sink.clock.now = 1000.9
    sink.log.tick()
    sink.log.info("too early")
    sink.clock.now = 1001.0
    sink.log.tick()
    sink.log.info("told")
    # What the tick wrote is the one line of its second.
    sink.log.limited("k", "warning", "failover", n=4)
    sink.clock.now = 1002.0
    sink.log.tick()
    sink.clock.now = 1003.0
    sink.log.tick()
    sink.log.tick()
    assert [line[31:] for line in sink.lines()] == [
        "failover n=0",
        "too early",
        "failover n=3 left_out=2",
        "told",
        "failover n=4",
    ]


def test_the_end_of_a_burst_is_told_by_another_key_too(sink):
    sink.log.limited("a", "warning", "x", n=1)
    sink.log.limited("a", "warning", "x", n=2)
    sink.clock.now = 1001.5
    sink.log.limited("b", "warning", "x", n=3)
    assert [line[-1] for line in sink.lines()] == ["1", "3", "2"]


def test_closing_tells_the_end_of_a_burst(sink):
    for number in range(3):
        sink.log.limited("k", "error", "x", n=number)
    assert [line[31:] for line in sink.lines()] == ["x n=0", "x n=2 left_out=1"]


def test_quiet_keys_are_forgotten(sink):
    for number in range(1000):
        sink.log.limited(number, "error", "x")
    sink.clock.now += 1.0
    sink.log.tick()
    assert not sink.log._bursts
    sink.log.close()


# --- a reader that is stuck, or gone ----------------------------------------------------------


def fill(fd):
    """Fill a pipe, so that the next write to it blocks."""
    os.set_blocking(fd, False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            count += os.write(fd, b"\n" * 4096)
    os.set_blocking(fd, True)
    return count


def drain(fd, count):
    """Read exactly `count` bytes."""
    while count:
        count -= len(os.read(fd, count))


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stuck_reader_costs_lines_and_never_the_caller(pipe, blocking):
    reader, writer = pipe
    filled = fill(writer)
    os.set_blocking(writer, blocking)
    dropped: list[int] = []
    log = Log(clock=Clock(), fd=writer, capacity=50, on_drop=dropped.append)
    # Nobody reads yet: if this blocked it would block for ever.
    for number in range(2000):
        log.info("x", n=number)
    # The queue, and at most one batch that the writer holds.
    assert 2000 - 50 - 256 <= sum(dropped) <= 2000 - 50

    drain(reader, filled)
    read: list[str] = []

    def collect():
        with open(reader, closefd=False) as file:
            read.extend(file)

    collector = threading.Thread(target=collect)
    collector.start()
    log.close(30)
    os.close(writer)
    collector.join()
    numbers = [int(line.split("n=")[1]) for line in read]
    assert len(numbers) + sum(dropped) == 2000
    assert numbers == sorted(numbers)
    assert numbers[:50] == list(range(50))


def test_closing_does_not_wait_for_a_stuck_reader_for_ever(pipe):
    reader, writer = pipe
    filled = fill(writer)
    log = Log(clock=Clock(), fd=writer)
    log.info("x")
    log.close(0.01)
    log.close(0.01)
    assert log._writer.is_alive()
    drain(reader, filled)
    log._writer.join(30)
    assert not log._writer.is_alive()


def test_a_reader_that_went_is_counted(pipe):
    reader, writer = pipe
    os.close(reader)
    dropped: list[int] = []
    log = Log(clock=Clock(), fd=writer, on_drop=dropped.append)
    for _ in range(10):
        log.info("x")
    log.close()
    assert sum(dropped) == 10


def test_lines_after_closing_are_counted(sink):
    sink.log.info("before")
    sink.log.close()
    sink.log.info("after")
    assert sink.dropped == 1
    assert len(sink.lines()) == 1


def test_the_queue_holds_ten_thousand_lines():
    assert CAPACITY == 10_000


# --- call ids ---------------------------------------------------------------------------------


def test_call_ids_come_from_the_source_given():
    ids = [new_call_id(source) for source in [random.Random(7)] for _ in range(100)]
    again = random.Random(7)
    assert ids == [new_call_id(again) for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)
