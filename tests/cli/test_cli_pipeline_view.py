"""The lag, the rows and the blocker of tables that `pipeline list` and `pipeline describe` print."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidemill.base.status.status import (
    DerivedStatus,
    StageStatus,
    StatusReport,
    derive_status,
    status_row,
    this_process,
)
from tidemill.cli.cluster.status import status_lines
from tidemill.cli.cluster.why import format_stage
from tidemill.cli.pipeline.view import format_driver_note, format_lag, known_row_count
from tidemill.console.views.pipelines import PipelineView, instance_row, table_row
from tidemill.shards.api import Batch, Column, Part, ShardSchema
from tidemill.shards.state.state import ShardState

NOW_MS = 1_000_000_000


def reported(age_ms: int) -> DerivedStatus:
    return derive_status(StageStatus("shard:orders", position=500, target=900), "pipeline:p", NOW_MS - age_ms, NOW_MS)


@pytest.mark.parametrize(
    ("mark", "lag_ms"),
    [(reported(10), 400), (reported(3_600_000), None), (None, None)],
    ids=["live", "silent", "never"],
)
def test_a_lag_that_no_live_driver_tells_is_unknown_and_not_zero(
    mark: DerivedStatus | None, lag_ms: int | None
) -> None:
    current = table_row(
        "stock", "captured", 900, 1, derive_status(StageStatus("shard:stock", 900, 900), "p", NOW_MS, NOW_MS), []
    )
    row = table_row("orders", "captured", 100, 1, mark, [])
    assert (row["lag_ms"], current["lag_ms"]) == (lag_ms, 0)
    assert PipelineView("p", tables=[current, row]).summary()["lag_ms"] == lag_ms
    assert format_lag(lag_ms) == ("unknown" if lag_ms is None else "400 ms")


def test_a_table_without_any_time_yet_says_so_and_not_the_years_since_1970() -> None:
    mark = derive_status(StageStatus("shard:orders", 0, 1_795_748_893_662, unit="ms"), "pipeline:p", NOW_MS, NOW_MS)
    assert ", delay unknown" in format_stage(mark) and "behind" not in format_stage(mark)
    assert table_row("orders", "captured", 0, 0, mark, [])["lag_ms"] is None
    late = derive_status(StageStatus("shard:orders", 5, 905, unit="ms"), "pipeline:p", NOW_MS, NOW_MS)
    assert ", 900 ms behind" in format_stage(late)


def test_an_idle_stage_is_shown_without_the_source_of_its_next_input_as_its_blocker() -> None:
    idle, late = (StageStatus("shard:orders", 9, target, "capture:shop", since_ms=0) for target in (9, 10))
    for mark, blocker in ((idle, ""), (late, "capture:shop")):
        derived = derive_status(mark, "pipeline:p", NOW_MS, NOW_MS)
        assert ("blocked by" in format_stage(derived)) is bool(blocker)
        assert status_lines({mark.name: derived})[0]["blocked by"] == status_row(derived)["held_by"] == blocker
        assert table_row("orders", "captured", 9, 1, derived, [])["held_by"] == blocker


def state_of(*batches: Batch, key: tuple[str, ...] = ("k",)) -> ShardState:
    return ShardState("orders", "s1", ShardSchema((Column("k", "int32"),), key), batches=batches, upper=9)


def test_the_rows_of_a_merged_table_are_known_without_a_read() -> None:
    part, merged = Part(7, 100, object_key="shards/x/a"), replace(Batch(0, 9, ()), summed_to=8)
    assert known_row_count(state_of(replace(merged, parts=(part, part)))) == 14
    assert known_row_count(state_of(replace(merged, parts=(part,)), key=())) is None, "a row may occur several times"
    assert known_row_count(state_of(replace(merged, parts=(part,), summed_to=7))) is None
    assert known_row_count(state_of(replace(merged, parts=(part,)), Batch(9, 10, (part,)))) is None


@pytest.mark.parametrize(("changed_ms", "here", "older"), [(500, True, True), (300, True, False), (500, False, False)])
def test_a_driver_that_began_before_its_file_was_changed_is_told_as_older(
    changed_ms: int, here: bool, older: bool
) -> None:
    host = this_process()[1] if here else "elsewhere"
    report = StatusReport("pipeline:p", 1000, (), {"began_ms": 400}, pid=7, host=host)
    found = instance_row(report, "p", [report], 1000, changed_ms)
    assert found["older_than_file"] is older
    assert ("older than its file" in format_driver_note(found)) is older
