"""Stage statuses: states are derived, minima name their blocker, and a silent process is blind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tidemill.base.limits import NODE_BLIND_AFTER_MS, STATUS_BLIND_AFTER_MS, STATUS_PUBLISH_INTERVAL_S
from tidemill.base.status.status import (
    RESTARTS_MAX,
    StageState,
    StageStatus,
    StatusReport,
    StatusTracker,
    argmin,
    derive_status,
    derive_statuses,
    lag_of,
    lag_text,
)


def state_of(mark: StageStatus, *, at_ms: int = 10_000, now_ms: int = 10_000) -> StageState:
    return derive_status(mark, "p", at_ms, now_ms).state


def test_a_mark_at_its_target_is_idle_however_long_it_stands() -> None:
    assert state_of(StageStatus("m", 5, 5, since_ms=0), at_ms=99_000, now_ms=99_000) is StageState.IDLE


def test_a_mark_below_its_target_goes_from_moving_to_waiting_to_stuck() -> None:
    mark = StageStatus("m", 4, 5, since_ms=0, budget_ms=5_000)
    states = [state_of(mark, at_ms=now, now_ms=now) for now in (1_000, 3_000, 5_000, 5_001)]
    assert states == [StageState.MOVING, StageState.WAITING, StageState.WAITING, StageState.STUCK]


def test_a_process_without_a_report_is_blind_even_when_its_last_word_was_idle() -> None:
    mark = StageStatus("m", 5, 5)
    assert state_of(mark, at_ms=0, now_ms=STATUS_BLIND_AFTER_MS) is StageState.IDLE
    assert state_of(mark, at_ms=0, now_ms=STATUS_BLIND_AFTER_MS + 1) is StageState.BLIND


def test_the_furthest_of_the_living_speaks_for_a_stage_and_a_peer_in_trouble_stands_beside_it() -> None:
    slow = StatusReport("a", 9_000, (StageStatus("shard:m", 1, 9, since_ms=0),))
    fast = StatusReport("b", 8_000, (StageStatus("shard:m", 8, 9, since_ms=7_000),))
    for order in ([slow, fast], [fast, slow]):
        found = derive_statuses(order, 9_000)
        assert found["shard:m"].process == "b"
        assert found["shard:m@a"].state is StageState.STUCK


def test_a_failure_that_lies_in_the_data_is_the_stages_though_a_peer_has_not_met_it() -> None:
    tracker = StatusTracker()
    tracker.set("shard:m", 9, 9, now_ms=9_000)
    tracker.fail("shard:m", "its newest records are all dead letters", now_ms=9_000, of_data=True)
    met, other = tracker.report("a", 9_000), StatusReport("b", 9_000, (StageStatus("shard:m", 9, 9),))
    for order in ([met, other], [other, met]):
        assert derive_statuses(order, 9_000)["shard:m"].state is StageState.WAITING
    passed = StatusReport("b", 9_000, (StageStatus("shard:m", 10, 10),))
    assert derive_statuses([met, passed], 9_000)["shard:m"].state is StageState.IDLE
    tracker.fail("shard:m", "its own trouble", now_ms=9_000)
    assert derive_statuses([tracker.report("a", 9_000), other], 9_000)["shard:m"].state is StageState.IDLE


def test_a_frozen_process_is_blind_by_its_own_name_though_its_peer_works() -> None:
    now_ms = STATUS_BLIND_AFTER_MS + 9_000
    frozen = StatusReport("pipeline:p:1", 1_000, (StageStatus("shard:m", 8, 9),), pid=7, host="h")
    works = StatusReport("pipeline:p:2", now_ms, (StageStatus("shard:m", 9, 9),), pid=8, host="h")
    found = derive_statuses([frozen, works], now_ms)
    assert (found["shard:m"].state, found["process:pipeline:p:2"].state) == (StageState.IDLE, StageState.IDLE)
    blind = found["process:pipeline:p:1"]
    assert (blind.state, blind.mark.held_by) == (StageState.BLIND, "pid 7 on h")


def test_a_node_is_blind_as_a_process_within_five_seconds_and_its_marks_count_on() -> None:
    assert 3 * STATUS_PUBLISH_INTERVAL_S * 1000 < NODE_BLIND_AFTER_MS < 5_000 < STATUS_BLIND_AFTER_MS
    at_ms, now_ms = 1_000, 1_000 + NODE_BLIND_AFTER_MS
    mark = StageStatus("topic:t", 1, 1)
    reports = [StatusReport(process, at_ms, (mark,), pid=7, host="h") for process in ("node:a", "pipeline:p")]
    left = StatusReport("node:b", at_ms, (), left=True)
    assert {d.state for d in derive_statuses([*reports, left], now_ms).values()} == {StageState.IDLE}
    found = derive_statuses([*reports, left], now_ms + 1)
    assert found["process:node:a"].state is StageState.BLIND
    assert found["process:node:a"].mark.held_by == "pid 7 on h"
    assert {found[name].state for name in ("topic:t", "process:pipeline:p", "process:node:b")} == {StageState.IDLE}


def test_what_a_process_stands_on_is_never_merged_with_what_others_stand_on() -> None:
    reports = [
        StatusReport("a", 9_000, (StageStatus("objects", 1, 1),)),
        StatusReport("b", 9_000, (StageStatus("objects", 0, 1),)),
    ]
    found = derive_statuses(reports, 9_000)
    assert found["objects@a"].state is StageState.IDLE
    assert found["objects@b"].state is StageState.STUCK


def test_a_stage_without_any_time_yet_is_not_behind_by_the_years_since_1970() -> None:
    assert (lag_of(StageStatus("m", 0, 1_795_748_893_662, unit="ms")), lag_of(StageStatus("m", 0, 0, unit="ms"))) == (
        None,
        0,
    )
    assert lag_text(StageStatus("m", 0, 1_795_748_893_662, unit="ms")) == "unknown"
    assert lag_text(StageStatus("m", 1_795_748_893_000, 1_795_748_893_662, unit="ms")) == "662 ms"
    assert (lag_of(StageStatus("m", 0, 7)), lag_text(StageStatus("m", 0, 7)), lag_of(StageStatus("m", 9, 7))) == (
        7,
        "7",
        0,
    )


def test_progress_is_movement_though_the_position_stands() -> None:
    tracker = StatusTracker()
    for now_ms in (1_000, 9_000, 17_000):
        tracker.set("m", 0, 5, now_ms=now_ms, progress=now_ms)
    (mark,) = tracker.report("p", 17_000).marks
    assert state_of(mark, at_ms=17_000, now_ms=18_000) is StageState.MOVING
    assert state_of(mark, at_ms=23_000, now_ms=23_000) is StageState.STUCK


def lives(count: int, position: int) -> StageStatus:
    """Return the last status of `count` processes in sequence. Each shows five seconds of progress at one position and
    dies.
    """
    report = StatusReport("p", 0, ())
    for life in range(count):
        tracker = StatusTracker()
        tracker.adopt_last_report(report)
        for second in range(1, 6):
            tracker.set("m", position, 9, now_ms=life * 6_000 + second * 1_000, progress=second)
        report = tracker.report("p", life * 6_000 + 5_000)
    return report.marks[0]


def test_what_begins_anew_life_after_life_at_one_position_is_stuck_with_an_age_that_restarts_keep() -> None:
    assert lives(1, 3).since_ms == 5_000
    assert lives(RESTARTS_MAX, 3).since_ms == (RESTARTS_MAX - 1) * 6_000 + 5_000, (
        "some restarts in a long step are no failure"
    )
    ages = {lives(count, 3).since_ms for count in (RESTARTS_MAX + 1, RESTARTS_MAX + 2, RESTARTS_MAX + 20)}
    assert ages == {(RESTARTS_MAX - 1) * 6_000 + 5_000}
    last = lives(RESTARTS_MAX + 2, 3)
    assert (last.restarts, state_of(last, at_ms=29_000, now_ms=29_000)) == (RESTARTS_MAX + 1, StageState.STUCK)
    assert last.reason == f"restarted {RESTARTS_MAX + 1} times at this position"


def test_lives_at_one_position_are_counted_through_failures_and_forgotten_when_it_moves() -> None:
    tracker = StatusTracker()
    tracker.adopt_last_report(StatusReport("p", 1_000, (lives(RESTARTS_MAX + 2, 3),)))
    tracker.fail("m", "away", now_ms=40_000)
    tracker.set("m", 3, 9, now_ms=40_000, progress=1)
    tracker.clear_failure("m")
    assert tracker.report("p", 40_000).marks[0].since_ms == (RESTARTS_MAX - 1) * 6_000 + 5_000
    tracker.set("m", 4, 9, now_ms=41_000, progress=2)
    tracker.set("m", 4, 9, now_ms=42_000, progress=3)
    moved = tracker.report("p", 42_000).marks[0]
    assert (moved.since_ms, moved.restarts) == (42_000, 0)


def test_a_restart_makes_neither_a_stage_that_stands_nor_a_unit_that_fails_younger() -> None:
    before = StatusTracker()
    before.set("m", 3, 5, now_ms=1_000)
    before.fail("n", "ValueError: x", now_ms=2_000)
    after = StatusTracker()
    after.adopt_last_report(before.report("p", 3_000))
    after.set("m", 3, 6, now_ms=4_000)
    after.fail("n", "ValueError: y", now_ms=4_000)
    marks = {mark.name: mark for mark in after.report("p", 4_000).marks}
    assert marks["m"].since_ms == 1_000
    assert (marks["n"].failing_since_ms, marks["n"].tries, marks["n"].error) == (2_000, 2, "ValueError: y")
    after.set("m", 4, 6, now_ms=5_000)
    assert after.report("p", 5_000).marks[0].since_ms == 5_000


def test_a_stage_of_a_process_that_was_stopped_in_order_grows_no_older_while_it_is_down() -> None:
    before = StatusTracker()
    before.set("m", 3, 5, now_ms=1_000)
    before.fail("n", "ValueError: x", now_ms=1_000)
    last = before.report("p", 2_000)
    left = replace(last, left=True)
    at_ms = 2_000 + STATUS_BLIND_AFTER_MS
    assert derive_statuses([last], at_ms)["m"].state is StageState.STUCK
    found = derive_statuses([left], at_ms)
    assert (found["m"].state, found["m"].standing_ms) == (StageState.MOVING, 1_000)
    assert derive_statuses([left], at_ms + 1)["m"].state is StageState.BLIND
    after = StatusTracker()
    after.adopt_last_report(left, 60_000)
    after.set("m", 3, 6, now_ms=61_000)
    after.fail("n", "ValueError: y", now_ms=61_000)
    marks = {mark.name: mark for mark in after.report("p", 61_000).marks}
    assert (marks["m"].since_ms, marks["m"].restarts) == (60_000, 0)
    assert marks["n"].failing_since_ms == 1_000


def test_a_share_that_stands_still_is_not_hidden_by_one_that_moves() -> None:
    stuck = StageStatus("topic:t", 3, 5, held_by="upload:x", since_ms=0, share=True)
    moving = StageStatus("topic:t", 10, 11, since_ms=9_900, share=True)
    idle = StageStatus("topic:t", 4, 4, share=True)
    reports = [
        StatusReport("a", 9_000, (stuck,)),
        StatusReport("b", 9_500, (moving,)),
        StatusReport("c", 10_000, (idle,)),
    ]
    for order in (reports, reports[::-1]):
        found = derive_statuses(order, 10_000)["topic:t"]
        assert (found.mark.position, found.mark.target) == (17, 20)
        assert (found.state, found.process, found.mark.held_by) == (StageState.STUCK, "a", "upload:x")


def test_the_share_of_a_process_that_is_gone_counts_no_longer_unless_nobody_else_reports() -> None:
    now_ms = STATUS_BLIND_AFTER_MS + 5_000
    gone = StatusReport("a", 1_000, (StageStatus("topic:t", 3, 5, share=True),))
    there = StatusReport("b", now_ms, (StageStatus("topic:t", 9, 9, share=True),))
    found = derive_statuses([gone, there], now_ms)["topic:t"]
    assert (found.mark.position, found.state) == (9, StageState.IDLE)
    assert derive_statuses([gone], now_ms)["topic:t"].state is StageState.BLIND


@given(st.dictionaries(st.text(max_size=3), st.integers(), min_size=1))
def test_a_minimum_always_names_its_holder(positions: dict[str, int]) -> None:
    name, value = argmin(positions)
    assert positions[name] == value == min(positions.values())


def test_the_minimum_of_nothing_has_no_holder() -> None:
    with pytest.raises(ValueError, match="empty"):
        argmin({})


def test_since_moves_with_the_position_and_when_new_work_arrives_at_an_idle_mark() -> None:
    tracker = StatusTracker()
    since = []
    for now_ms, position, target in ((1, 0, 5), (2, 0, 6), (3, 1, 6), (4, 6, 6), (5, 6, 6), (9, 6, 7), (11, 6, 8)):
        tracker.set("m", position, target, now_ms=now_ms)
        since.append(tracker.report("p", now_ms).marks[0].since_ms)
    assert since == [1, 1, 3, 4, 4, 9, 9]


def test_a_mark_is_known_as_the_predecessor_said_it_until_it_is_set() -> None:
    before, after = StatusTracker(), StatusTracker()
    before.set("m", 5, 9, now_ms=1_000)
    after.adopt_last_report(before.report("p", 3_000))
    earlier = after.mark("m")
    assert earlier is not None and earlier.position == 5
    assert after.mark("other") is None


def test_a_reason_and_the_error_of_the_last_try_are_one_sentence() -> None:
    tracker = StatusTracker()
    tracker.set("node:n", 0, 1, now_ms=1, reason="the node is starting.")
    tracker.fail("node:n", "no answer.", now_ms=1)
    assert tracker.report("p", 1).marks[0].reason == "the node is starting; its last try: no answer."
