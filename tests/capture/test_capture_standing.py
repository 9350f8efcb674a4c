"""Reasons that the table states report for a table without a stream."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidemill.capture.tables.table_reasons import MAX_RETRY_AFTER_S, unavailability_of
from tidemill.metastore.catalogue import CaptureTableRow

NOW_MS = 1_000_000
ROW = CaptureTableRow("c", "public.t", state="parked", reason="its columns changed.", paused_lsn=7)


def test_a_parked_table_says_why_and_when_it_is_worth_asking_again() -> None:
    for_good = unavailability_of(ROW, NOW_MS)
    soon = unavailability_of(replace(ROW, again_ms=NOW_MS + 2_500), NOW_MS)
    late = unavailability_of(replace(ROW, again_ms=NOW_MS + 300_000), NOW_MS)
    due = unavailability_of(replace(ROW, again_ms=NOW_MS - 1), NOW_MS)
    asked = unavailability_of(replace(ROW, recopy=True), NOW_MS)
    found = [for_good, soon, late, due, asked]
    assert all(each is not None and "its columns changed." in each.reason and not each.passing for each in found)
    assert [each.retry_after_s for each in found if each is not None] == [MAX_RETRY_AFTER_S, 3, MAX_RETRY_AFTER_S, 1, 1]
    assert for_good is not None and "an operator" in for_good.reason
    assert late is not None and "an operator" not in late.reason


@pytest.mark.parametrize(("state", "verb"), [("refused", "refused"), ("left", "skipped")])
def test_a_table_that_is_not_captured_says_why_and_is_worth_asking_for_again(state: str, verb: str) -> None:
    refused = unavailability_of(replace(ROW, state=state, paused_lsn=0, reason="a publication holds it."), NOW_MS)
    assert refused is not None and f"the table is {verb} by its capture: a publication holds it." in refused.reason
    assert (refused.retry_after_s, refused.passing) == (MAX_RETRY_AFTER_S, False)


def test_a_table_that_is_being_added_passes_and_one_that_is_gone_has_no_reason() -> None:
    passing = unavailability_of(replace(ROW, state="captured", paused_lsn=0), NOW_MS)
    assert passing is not None and passing.passing
    assert unavailability_of(replace(ROW, state="dropped"), NOW_MS) is None
    assert unavailability_of(None, NOW_MS) is None
