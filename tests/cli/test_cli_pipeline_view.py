"""The lag of tables that `pipeline list` and `pipeline describe` print."""

from __future__ import annotations

import pytest

from tidemill.base.status.status import DerivedStatus, StageStatus, StatusReport, derive_status, this_process
from tidemill.cli.cluster.why import format_stage
from tidemill.cli.pipeline.view import format_instance, format_lag
from tidemill.console.views.pipelines import PipelineView, instance_row, table_row

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
    assert ", no time yet" in format_stage(mark) and "behind" not in format_stage(mark)
    assert table_row("orders", "captured", 0, 0, mark, [])["lag_ms"] is None
    late = derive_status(StageStatus("shard:orders", 5, 905, unit="ms"), "pipeline:p", NOW_MS, NOW_MS)
    assert ", 900 ms behind" in format_stage(late)


@pytest.mark.parametrize(("changed_ms", "here", "older"), [(500, True, True), (300, True, False), (500, False, False)])
def test_a_driver_that_began_before_its_file_was_changed_is_told_as_older(
    changed_ms: int, here: bool, older: bool
) -> None:
    host = this_process()[1] if here else "elsewhere"
    report = StatusReport("pipeline:p", 1000, (), {"began_ms": 400}, pid=7, host=host)
    found = instance_row(report, "p", [report], 1000, changed_ms)
    assert found["older_than_file"] is older
    assert ("older than its file" in format_instance(found)) is older
