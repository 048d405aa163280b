"""The failure table row by row, and the selection against a model of its rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.core.failover import (
    RESULTS,
    TABLE,
    Selection,
    Turn,
    carried_over,
    classify,
    ended_by_caller,
    ended_locally,
    is_not_served,
    table_as_markdown,
)
from sidecar.core.spec import ERRORS, OPERATIONS, Binding
from sidecar.core.types import Break, Broken, ErrorRecord, Facts, Kind, Phase

SEND = OPERATIONS["SendMessage"]
STREAM = OPERATIONS["SendStreamingMessage"]
GET = OPERATIONS["GetTask"]

# kind: (next candidate, advance)
COLUMNS = {
    Kind.NOT_DELIVERED: (True, True),
    Kind.WRONG_ENDPOINT: (True, True),
    Kind.NOT_SERVED: (True, True),
    Kind.AMBIGUOUS: (False, True),
    Kind.CALLER: (False, False),
    Kind.LOCAL: (False, False),
    Kind.ANSWERED: (False, False),
}


def error_record(code=-32000, reason="", http_status=500, grpc_status=2):
    return ErrorRecord(
        code=code, reason=reason, http_status=http_status, grpc_status=grpc_status, message="m"
    )


def judged(facts):
    """The outcome, after what holds for every outcome was looked at."""
    outcome = classify(facts)
    assert outcome.result in RESULTS
    _, advance = COLUMNS[outcome.kind]
    too_large = facts.broken is not None and facts.broken.cause is Break.TOO_LARGE
    assert outcome.advance is (advance and not too_large)
    assert outcome.refusal is (outcome.kind is Kind.NOT_SERVED)
    return outcome


def test_the_columns_of_the_table():
    assert {kind: (row.next_candidate, row.advance) for kind, row in TABLE.items()} == COLUMNS
    assert set(TABLE) == set(Kind)


# --- exchanges that broke ---------------------------------------------------------------------

NEVER_TAKEN = {
    Break.CERTIFICATE_ALERT: "tls",
    Break.NOT_HTTP2: "not_http2",
    Break.HTTP_1_1_REQUIRED: "not_http2",
    Break.REFUSED_STREAM: "refused_stream",
    Break.GOAWAY: "goaway",
}
DEPENDS_ON_WRITTEN = {
    # Dials end before anything is written. One that claims otherwise is not believed.
    Break.DNS: "dial",
    Break.REFUSED: "dial",
    Break.UNREACHABLE: "dial",
    Break.CONNECT_TIMEOUT: "dial",
    Break.PROXY: "dial",
    Break.ADDRESS_POLICY: "address_policy",
    Break.TLS: "tls",
    Break.ALPN: "tls",
    Break.RESET: "reset",
    Break.EOF: "reset",
    Break.TIMEOUT: "timeout",
    Break.MALFORMED: "malformed",
}


def broken(cause, *, written, phase, reused=False):
    return Facts(
        binding=Binding.GRPC,
        operation=GET,  # reads are not replayed either
        broken=Broken(cause=cause, phase=phase, written=written, reused=reused),
    )


def test_every_break_is_in_one_of_the_rows():
    rest = {Break.TOO_LARGE, Break.LOCAL}
    assert set(NEVER_TAKEN) | set(DEPENDS_ON_WRITTEN) | rest == set(Break)


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize(
    ("written", "phase"),
    [(False, Phase.DIALING), (False, Phase.SENDING), (True, Phase.SENDING), (True, Phase.WAITING)],
)
@pytest.mark.parametrize("cause", list(Break))
def test_a_break_before_any_reply(cause, written, phase, reused):
    outcome = judged(broken(cause, written=written, phase=phase, reused=reused))

    if cause in NEVER_TAKEN:
        expected = Kind.NOT_DELIVERED, NEVER_TAKEN[cause]
    elif cause in DEPENDS_ON_WRITTEN:
        kind = Kind.AMBIGUOUS if written else Kind.NOT_DELIVERED
        expected = kind, DEPENDS_ON_WRITTEN[cause]
    elif cause is Break.LOCAL:
        expected = Kind.LOCAL, "local"
    else:
        expected = Kind.AMBIGUOUS if written else Kind.LOCAL, "too_large"
    assert (outcome.kind, outcome.result) == expected
    assert (outcome.written, outcome.phase, outcome.refresh) == (written, phase, False)


@pytest.mark.parametrize("cause", [cause for cause in Break if cause is not Break.LOCAL])
def test_a_break_within_a_reply_is_ambiguous_whatever_the_peer_says_of_it(cause):
    outcome = judged(broken(cause, written=True, phase=Phase.RECEIVING))

    assert outcome.kind is Kind.AMBIGUOUS


# --- complete replies -------------------------------------------------------------------------


def http(status, binding=Binding.HTTP_JSON, **more):
    return Facts(binding=binding, operation=SEND, http_status=status, **more)


def kind_of_http(status):
    if status < 300:
        return Kind.ANSWERED, "ok"
    if status in {307, 308}:
        return Kind.WRONG_ENDPOINT, "redirect"
    if status < 400:  # 301, 302, 303; the others are not in the binding's form either
        return Kind.AMBIGUOUS, "redirect"
    if status in {404, 405, 410, 415, 421, 426}:
        return Kind.WRONG_ENDPOINT, f"http_{status}"
    if status in {401, 403}:
        return Kind.ANSWERED, "auth"
    return (Kind.ANSWERED, "other_status") if status < 500 else (Kind.AMBIGUOUS, "http_5xx")


@pytest.mark.parametrize("binding", list(Binding))  # gRPC: a reply without a gRPC status
def test_an_http_status_without_an_a2a_error(binding):
    for status in range(200, 600):
        outcome = judged(http(status, binding, other_origin=status in {307, 308}))

        assert (outcome.kind, outcome.result) == kind_of_http(status), status
        assert outcome.refresh is (outcome.kind is Kind.WRONG_ENDPOINT)
        assert (outcome.written, outcome.phase) == (True, Phase.RECEIVING)


def test_an_a2a_error_is_an_answer_whatever_its_http_status():
    for status in range(200, 600):
        outcome = judged(http(status, error=error_record(reason="TASK_NOT_CANCELABLE")))

        result = "auth" if status in {401, 403} else "a2a_error"
        assert (outcome.kind, outcome.result, outcome.refresh) == (Kind.ANSWERED, result, False)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
@pytest.mark.parametrize("status", [200, 400, 404, 501])
def test_only_two_a2a_errors_are_no_answers(status, error):
    outcome = judged(http(status, error=error_record(error.code, error.reason)))

    refusals = {"METHOD_NOT_FOUND", "VERSION_NOT_SUPPORTED"}
    if error.reason in refusals:
        assert (outcome.kind, outcome.result) == (Kind.NOT_SERVED, error.reason.lower())
        assert outcome.refresh is (status == 404)
    else:
        assert (outcome.kind, outcome.result) == (Kind.ANSWERED, "a2a_error")


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-32601, ""), (-32099, "METHOD_NOT_FOUND"), (-32009, ""), (-32099, "VERSION_NOT_SUPPORTED")],
)
def test_a_refusal_is_known_by_code_or_by_reason(code, reason):
    assert judged(http(200, error=error_record(code, reason))).kind is Kind.NOT_SERVED


GRPC_KINDS = {
    0: (Kind.ANSWERED, "ok"),
    1: (Kind.AMBIGUOUS, "grpc_1"),  # CANCELLED, which nobody asked for
    2: (Kind.AMBIGUOUS, "grpc_2"),  # UNKNOWN
    3: (Kind.ANSWERED, "grpc_3"),
    4: (Kind.AMBIGUOUS, "grpc_4"),  # DEADLINE_EXCEEDED, unasked
    5: (Kind.ANSWERED, "grpc_5"),
    6: (Kind.ANSWERED, "grpc_6"),
    7: (Kind.ANSWERED, "auth"),
    8: (Kind.ANSWERED, "grpc_8"),
    9: (Kind.ANSWERED, "grpc_9"),
    10: (Kind.ANSWERED, "grpc_10"),
    11: (Kind.ANSWERED, "grpc_11"),
    12: (Kind.NOT_SERVED, "unimplemented"),
    13: (Kind.AMBIGUOUS, "grpc_13"),  # INTERNAL
    14: (Kind.AMBIGUOUS, "grpc_14"),  # UNAVAILABLE
    15: (Kind.AMBIGUOUS, "grpc_15"),  # DATA_LOSS
    16: (Kind.ANSWERED, "auth"),
    17: (Kind.AMBIGUOUS, "grpc_2"),  # unknown codes are UNKNOWN
    999: (Kind.AMBIGUOUS, "grpc_2"),
}


def grpc(status, **more):
    return Facts(binding=Binding.GRPC, operation=SEND, http_status=200, grpc_status=status, **more)


@pytest.mark.parametrize("status", GRPC_KINDS)
def test_a_bare_grpc_status(status):
    outcome = judged(grpc(status))

    assert (outcome.kind, outcome.result) == GRPC_KINDS[status]
    assert not outcome.refresh


@pytest.mark.parametrize("status", [status for status in GRPC_KINDS if status])
def test_a_grpc_status_with_an_a2a_error(status):
    outcome = judged(grpc(status, error=error_record(reason="UNSUPPORTED_OPERATION")))

    result = "auth" if status in {7, 16} else "a2a_error"
    assert (outcome.kind, outcome.result) == (Kind.ANSWERED, result)


def test_unimplemented_behind_a_wrong_http_status_asks_for_a_refresh():
    facts = Facts(binding=Binding.GRPC, operation=SEND, http_status=404, grpc_status=12)

    outcome = judged(facts)

    assert (outcome.kind, outcome.refresh) == (Kind.NOT_SERVED, True)


@pytest.mark.parametrize(
    ("seconds_left", "callers"),
    [(None, False), (5.0, False), (1.0, False), (0.999, True), (0.0, True), (-3.0, True)],
)
@pytest.mark.parametrize(
    "facts", [lambda left: grpc(4, seconds_left=left), lambda left: http(504, seconds_left=left)]
)
def test_a_deadline_is_the_callers_when_the_agent_had_it_and_under_a_second_was_left(
    facts, seconds_left, callers
):
    assert (judged(facts(seconds_left)).kind is Kind.CALLER) is callers


@pytest.mark.parametrize("status", [1, 2, 13, 14])
def test_no_other_status_becomes_the_callers_deadline(status):
    assert judged(grpc(status, seconds_left=0.1)).kind is Kind.AMBIGUOUS


def test_an_a2a_error_at_the_deadline_is_still_an_answer():
    outcome = judged(grpc(4, seconds_left=0.1, error=error_record(reason="TASK_NOT_FOUND")))

    assert outcome.kind is Kind.ANSWERED


@pytest.mark.parametrize("facts", [http(200, malformed="x"), grpc(0, malformed="x")])
def test_a_reply_that_is_not_in_the_bindings_form_is_ambiguous(facts):
    outcome = judged(facts)

    assert (outcome.kind, outcome.result) == (Kind.AMBIGUOUS, "malformed")


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (grpc(12, started=True), Kind.AMBIGUOUS),
        (http(404, started=True), Kind.AMBIGUOUS),
        (http(200, started=True, error=error_record(-32601)), Kind.ANSWERED),
        (grpc(9, started=True, error=error_record(-32009)), Kind.ANSWERED),
        (grpc(0, started=True), Kind.ANSWERED),
    ],
)
def test_a_stream_that_has_had_events_was_delivered(facts, kind):
    outcome = judged(facts)

    assert (outcome.kind, outcome.refresh) == (kind, False)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("ended", "kind"), [(ended_by_caller, Kind.CALLER), (ended_locally, Kind.LOCAL)]
)
def test_what_ends_on_this_side_keeps_the_selection(ended, kind, written):
    outcome = ended(written=written, phase=Phase.WAITING)

    assert (outcome.kind, outcome.written, outcome.phase) == (kind, written, Phase.WAITING)
    assert not outcome.advance
    assert not outcome.refresh
    assert outcome.result in RESULTS


@pytest.mark.parametrize(
    ("facts", "tells"),
    [(grpc(12), True), (http(404), True), (grpc(14), False), (http(200), False)],
)
def test_the_operator_is_told_of_a_card_that_promises_too_much(facts, tells):
    text = is_not_served(classify(facts), Binding.GRPC)

    assert bool(text) is tells
    assert ("GRPC" in text) is tells


def test_the_table_for_people_has_a_row_for_every_kind():
    lines = table_as_markdown().splitlines()

    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == [
        str(kind) for kind in TABLE
    ]
    assert {line.count(" | ") for line in lines} == {5} | {lines[1].count(" | ")}
    assert sum("| next candidate |" in line for line in lines) == 3


# --- the machine ------------------------------------------------------------------------------


def fails(selection, turn):
    """The next attempt of a call fails; whether that moved the selection."""
    failed = turn.next()
    assert failed is not None
    return selection.advance(failed, turn.moves)


class Machine(RuleBasedStateMachine):
    """Calls that overlap in every way, against the rules written down another way.

    The model knows the history of moves: a failure may move the selection only when its candidate
    is the current one, and no move happened since its attempt began.
    """

    @initialize(count=st.integers(1, 4))
    def card(self, count):
        self.count = count
        self.selection = Selection(count)
        self.history = [0]  # current, after each move
        self.calls: list[dict[str, Any]] = []

    @rule()
    def call(self):
        turn = Turn(self.selection)
        first = turn.next()
        assert first == self.history[-1]
        self.calls.append({"turn": turn, "tried": [first], "began": len(self.history)})

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), advances=st.booleans(), goes_on=st.booleans())
    def fail(self, data, advances, goes_on):
        call = data.draw(st.sampled_from(self.calls))
        failed = call["tried"][-1]
        if advances:
            moves = (
                self.count > 1 and failed == self.history[-1] and call["began"] == len(self.history)
            )
            assert self.selection.advance(failed, call["turn"].moves) is moves
            if moves:
                self.history.append((failed + 1) % self.count)
        following = call["turn"].next() if goes_on else None
        if following is None:
            assert not goes_on or len(call["tried"]) == self.count
            self.calls.remove(call)
            return
        assert following == (failed + 1) % self.count
        assert following not in call["tried"]
        call["tried"].append(following)
        call["began"] = len(self.history)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def answer(self, data):
        self.calls.remove(data.draw(st.sampled_from(self.calls)))

    @invariant()
    def same_place(self):
        assert self.selection.current == self.history[-1]
        assert self.selection.moves == len(self.history) - 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_burst_of_failures_moves_the_selection_once():
    selection = Selection(3)
    turns = [Turn(selection) for _ in range(10)]
    assert [turn.next() for turn in turns] == [0] * 10

    moved = [selection.advance(0, turn.moves) for turn in turns]

    assert moved == [True] + [False] * 9
    assert selection.current == 1


def test_a_late_failure_moves_nothing_even_after_a_whole_round():
    selection = Selection(2)
    late = Turn(selection)
    assert late.next() == 0
    for _ in range(2):  # away and back again
        turn = Turn(selection)
        assert fails(selection, turn)

    assert selection.current == 0
    assert not selection.advance(0, late.moves)


def test_each_attempt_takes_the_count_afresh():
    selection = Selection(3)
    turn = Turn(selection)

    assert [fails(selection, turn), fails(selection, turn)] == [True, True]
    assert selection.current == 2


def test_a_call_goes_on_behind_its_own_failure_wherever_the_selection_is():
    selection = Selection(3, current=2)
    turn = Turn(selection)
    assert turn.next() == 2
    selection.advance(2, turn.moves)
    other = Turn(selection)
    fails(selection, other)  # now at 1

    assert [turn.next(), turn.next(), turn.next()] == [0, 1, None]


def test_with_one_candidate_nothing_moves():
    selection = Selection(1)
    turn = Turn(selection)

    assert turn.next() == 0
    assert not selection.advance(0, turn.moves)
    assert turn.next() is None
    assert selection.moves == 0


@pytest.mark.parametrize(("count", "current"), [(0, 0), (2, 2), (2, -1)])
def test_a_selection_is_within_its_candidates(count, current):
    with pytest.raises(ValueError, match="no candidate"):
        Selection(count, current)


@pytest.mark.parametrize(
    ("old", "current", "new", "expected"),
    [
        ("ab", 0, "ba", 0),  # the publisher's new order takes effect
        ("ab", 0, "cab", 0),
        ("ab", 1, "cab", 2),  # had moved: stays with its interface
        ("ab", 1, "ba", 0),
        ("ab", 1, "ac", 0),  # gone: begins at the first
        ("abc", 2, "c", 0),
    ],
)
def test_the_selection_of_a_new_card(old, current, new, expected):
    selection = carried_over(old, Selection(len(old), current), new)

    assert (selection.current, selection.count, selection.moves) == (expected, len(new), 0)


def test_a_selection_that_came_back_to_the_first_starts_at_the_first():
    selection = Selection(2)
    for _ in range(2):
        turn = Turn(selection)
        fails(selection, turn)

    assert carried_over("ab", selection, "ba").current == 0
