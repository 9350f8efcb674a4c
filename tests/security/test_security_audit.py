"""Audit lines: the first of a kind is written immediately, the others are counted, and memory is bounded."""

from __future__ import annotations

import structlog

from tidemill.base.clock import ManualClock
from tidemill.security.audit import LOG_INTERVAL_S, REMEMBERED_MAX, TEXT_CHARS_MAX, Audit


def test_a_refusal_that_repeats_is_one_line_with_the_count_of_the_rest() -> None:
    clock = ManualClock()
    audit = Audit(clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(50):
            audit.log_refusal("e", ("a",), who="a")
        audit.log_refusal("e", ("b",), who="b")
        clock.advance(int(LOG_INTERVAL_S * 1000))
        audit.log_refusal("e", ("a",), who="a")
    assert [(line["who"], line["untold"]) for line in logs] == [("a", 0), ("b", 0), ("a", 49)]
    assert all(line["audit"] for line in logs)


def test_what_strangers_write_is_bounded_in_number_and_length() -> None:
    clock = ManualClock()
    audit = Audit(clock)
    with structlog.testing.capture_logs() as logs:
        for i in range(REMEMBERED_MAX * 3):
            audit.log_refusal("e", (f"{i:05}" + "x" * 50_000,), name="x" * 50_000)
    assert len(audit._logged_s) <= REMEMBERED_MAX + 1
    assert len(logs) <= REMEMBERED_MAX + 1
    assert {len(line["name"]) for line in logs} == {TEXT_CHARS_MAX}
    clock.advance(int(LOG_INTERVAL_S * 1000))
    with structlog.testing.capture_logs() as logs:
        audit.log_refusal("e", ("new",), name="n")
    assert len(logs) == 1
