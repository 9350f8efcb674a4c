"""States of stages and processes while clocks are set back, or differ between machines."""

from __future__ import annotations

import pytest

from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.drivers import is_silent
from tidemill.base.status.status import (
    CLOCK_AHEAD_MS,
    StageState,
    StatusReport,
    StatusTracker,
    derive_process,
    derive_status,
)

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


def report(at_ms: int, process: str = "node:a") -> StatusReport:
    tracker = StatusTracker()
    tracker.set("capture:shop", 1, 1, now_ms=at_ms)
    return tracker.report(process, at_ms)


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, CLOCK_AHEAD_MS + 1])
def test_a_report_from_the_future_is_blind_and_names_the_clock(ahead_ms: int) -> None:
    """A process that is dead, and whose clock was ahead, looked idle until the time of its last report."""
    found = report(NOW_MS + ahead_ms)
    process = derive_process(found, NOW_MS)
    assert process.state is StageState.BLIND and "its clock, or that of this process" in process.mark.reason
    (mark,) = found.marks
    assert derive_status(mark, "node:a", found.at_ms, NOW_MS).state is StageState.BLIND
    assert not is_silent(report(NOW_MS + ahead_ms, "pipeline:p"), NOW_MS), "a driver that may run is not forgotten"


@pytest.mark.parametrize("ahead_ms", [0, 1_000, CLOCK_AHEAD_MS])
def test_a_clock_that_is_a_little_ahead_is_no_silence(ahead_ms: int) -> None:
    found = report(NOW_MS + ahead_ms)
    assert derive_process(found, NOW_MS).state is StageState.IDLE
    assert not is_silent(report(NOW_MS + ahead_ms, "pipeline:p"), NOW_MS)
    assert derive_process(found, NOW_MS + ahead_ms + STATUS_BLIND_AFTER_MS + 1).state is StageState.BLIND


def test_a_stage_that_stands_still_is_stuck_again_its_budget_after_the_clock_was_set_back() -> None:
    tracker = StatusTracker(budget_ms=5_000)

    def state(now_ms: int) -> dict[str, StageState]:
        tracker.set("still", 1, 9, now_ms=now_ms)
        tracker.fail("failing", "it does not work", now_ms=now_ms)
        marks = tracker.report("node:a", now_ms).marks
        return {mark.name: derive_status(mark, "node:a", now_ms, now_ms).state for mark in marks}

    state(NOW_MS)
    assert set(state(NOW_MS + 6_000).values()) == {StageState.STUCK}
    state(NOW_MS - HOUR_MS)
    assert set(state(NOW_MS - HOUR_MS + 6_000).values()) == {StageState.STUCK}
