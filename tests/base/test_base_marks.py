"""Marks: states are derived, minima name their holder, and a silent process is blind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.limits import MARK_BLIND_AFTER_MS
from tidemill.base.marks import Mark, Report, State, Tracker, argmin, derive, derive_all, why


def state_of(mark: Mark, *, at_ms: int = 10_000, now_ms: int = 10_000) -> State:
    return derive(mark, "p", at_ms, now_ms).state


def test_a_mark_at_its_target_is_idle_however_long_it_stands() -> None:
    assert state_of(Mark("m", 5, 5, since_ms=0), at_ms=99_000, now_ms=99_000) is State.IDLE


def test_a_mark_below_its_target_goes_from_moving_to_waiting_to_stuck() -> None:
    mark = Mark("m", 4, 5, since_ms=0, budget_ms=5_000)
    states = [state_of(mark, at_ms=now, now_ms=now) for now in (1_000, 3_000, 5_000, 5_001)]
    assert states == [State.MOVING, State.WAITING, State.WAITING, State.STUCK]


def test_a_process_without_a_report_is_blind_even_when_its_last_word_was_idle() -> None:
    mark = Mark("m", 5, 5)
    assert state_of(mark, at_ms=0, now_ms=MARK_BLIND_AFTER_MS) is State.IDLE
    assert state_of(mark, at_ms=0, now_ms=MARK_BLIND_AFTER_MS + 1) is State.BLIND


def test_the_newest_report_of_a_name_wins_whatever_the_order_they_arrive_in() -> None:
    old = Report("a", 1_000, (Mark("m", 1, 9),))
    new = Report("b", 2_000, (Mark("m", 8, 9),))
    for order in ([old, new], [new, old]):
        assert derive_all(order, 2_000)["m"].process == "b"


def test_a_share_that_stands_still_is_not_hidden_by_one_that_moves() -> None:
    stuck = Mark("topic:t", 3, 5, held_by="upload:x", since_ms=0, share=True)
    moving = Mark("topic:t", 10, 11, since_ms=9_900, share=True)
    idle = Mark("topic:t", 4, 4, share=True)
    reports = [Report("a", 9_000, (stuck,)), Report("b", 9_500, (moving,)), Report("c", 10_000, (idle,))]
    for order in (reports, reports[::-1]):
        found = derive_all(order, 10_000)["topic:t"]
        assert (found.mark.position, found.mark.target) == (17, 20)
        assert (found.state, found.process, found.mark.held_by) == (State.STUCK, "a", "upload:x")


def test_the_share_of_a_process_that_is_gone_counts_no_longer_unless_nobody_else_reports() -> None:
    now_ms = MARK_BLIND_AFTER_MS + 5_000
    gone = Report("a", 1_000, (Mark("topic:t", 3, 5, share=True),))
    there = Report("b", now_ms, (Mark("topic:t", 9, 9, share=True),))
    found = derive_all([gone, there], now_ms)["topic:t"]
    assert (found.mark.position, found.state) == (9, State.IDLE)
    assert derive_all([gone], now_ms)["topic:t"].state is State.BLIND


def test_why_walks_to_the_root_and_ends_in_a_cycle() -> None:
    marks = {
        name: derive(Mark(name, 0, 1, held_by=held_by), "p", 0, 0)
        for name, held_by in (("a", "b"), ("b", "c"), ("c", "pid 7"), ("x", "y"), ("y", "x"))
    }
    assert [d.mark.name for d in why(marks, "a")] == ["a", "b", "c"]
    assert why(marks, "a")[-1].mark.held_by == "pid 7"
    assert [d.mark.name for d in why(marks, "x")] == ["x", "y"]


@given(st.dictionaries(st.text(max_size=3), st.integers(), min_size=1))
def test_a_minimum_always_names_its_holder(positions: dict[str, int]) -> None:
    name, value = argmin(positions)
    assert positions[name] == value == min(positions.values())


def test_the_minimum_of_nothing_has_no_holder() -> None:
    with pytest.raises(ValueError, match="empty"):
        argmin({})


def test_since_moves_with_the_position_and_when_new_work_arrives_at_an_idle_mark() -> None:
    tracker = Tracker()
    since = []
    for now_ms, position, target in ((1, 0, 5), (2, 0, 6), (3, 1, 6), (4, 6, 6), (5, 6, 6), (9, 6, 7), (11, 6, 8)):
        tracker.set("m", position, target, now_ms=now_ms)
        since.append(tracker.report("p", now_ms).marks[0].since_ms)
    assert since == [1, 1, 3, 4, 4, 9, 9]
