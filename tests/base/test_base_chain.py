"""The verdict on a table: the worst stage between it and its source, and the blocker."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.freshness import resolve_status_name, verdict_of
from tidemill.base.status.status import DerivedStatus, StageState, StageStatus, StatusReport, derive_statuses

NOW_MS = 100_000


def cluster(**changed: StageStatus | int) -> dict[str, DerivedStatus]:
    """Return a table fed by a captured database in which everything is healthy except `changed`: statuses by key, ages
    of reports by key.
    """
    marks = {
        "shard": StageStatus("shard:orders", 9, 9, upstream="capture:shop/topics"),
        "topics": StageStatus("capture:shop/topics", 9, 9, upstream="capture:shop"),
        "capture": StageStatus("capture:shop", 9, 9),
        "objects": StageStatus("objects", 1, 1),
    } | {key: value for key, value in changed.items() if isinstance(value, StageStatus)}
    ages = {key: value for key, value in changed.items() if isinstance(value, int)}
    driver = StatusReport("pipeline:p", NOW_MS - ages.get("driver_age", 0), (marks["shard"],), pid=7, host="h")
    node = StatusReport("node:n", NOW_MS - ages.get("node_age", 0), tuple(marks[k] for k in marks if k != "shard"))
    return derive_statuses([driver, node], NOW_MS)


def reported(marks: dict[str, DerivedStatus]) -> tuple[int, str, str]:
    found = verdict_of(marks, resolve_status_name(marks, "orders"))
    return found.exit_code, found.worst.mark.name, found.root


def test_a_table_whose_whole_way_is_well_is_fresh() -> None:
    assert reported(cluster())[0] == 0


def test_a_table_at_its_target_is_as_sick_as_its_source() -> None:
    down = StageStatus("capture:shop", 9, 10, "PostgreSQL at db:5432", "it does not answer", since_ms=0)
    assert reported(cluster(capture=down)) == (3, "capture:shop", "PostgreSQL at db:5432")


def test_the_chain_of_a_table_at_its_target_follows_the_data_and_not_the_source_of_its_next_input() -> None:
    fresh = StageStatus("shard:orders", 9, 9, "capture:shop", upstream="capture:shop/topics")
    found = verdict_of(cluster(shard=fresh), "shard:orders")
    assert [each.mark.name for each in found.chain] == ["shard:orders", "capture:shop/topics", "capture:shop"]


def test_the_holder_nearest_to_the_source_is_named_when_several_stand() -> None:
    shard = StageStatus("shard:orders", 8, 9, upstream="capture:shop/topics", since_ms=0)
    down = StageStatus("capture:shop", 9, 10, "pid 4711 holds the slot", since_ms=0)
    assert reported(cluster(shard=shard, capture=down)) == (3, "capture:shop", "pid 4711 holds the slot")


def test_a_frozen_driver_is_named_with_its_pid() -> None:
    exit_code, worst, root = reported(cluster(driver_age=STATUS_BLIND_AFTER_MS + 1))
    assert (exit_code, worst, root) == (3, "process:pipeline:p", "pid 7 on h")


def test_a_driver_that_cannot_run_is_named_by_the_error_that_its_supervisor_reports() -> None:
    broken = StageStatus("pipeline:p", 0, 1, "operator", "its file", error="its file", failing_since_ms=1, parked=True)
    driver = StatusReport("pipeline:p", NOW_MS - STATUS_BLIND_AFTER_MS - 1, (StageStatus("shard:orders", 9, 9),), pid=7)
    marks = derive_statuses([driver, StatusReport("up:n", NOW_MS, (broken,))], NOW_MS)
    assert reported(marks) == (3, "pipeline:p", "operator")
    killed = replace(broken, parked=False, failing_since_ms=NOW_MS - 10)
    marks = derive_statuses([driver, StatusReport("up:n", NOW_MS, (killed,))], NOW_MS)
    assert reported(marks)[1] == "process:pipeline:p", "its supervisor starts it again"


def test_what_the_process_of_a_stage_stands_on_is_on_the_way() -> None:
    full = StageStatus("objects", 0, 1, "bucket s3://b", "it is read-only", since_ms=0)
    assert reported(cluster(objects=full)) == (3, "objects@node:n", "bucket s3://b")


def test_a_cycle_of_holders_ends() -> None:
    marks = derive_statuses([StatusReport("p", 0, (StageStatus("a", 0, 1, "b"), StageStatus("b", 0, 1, "a")))], 0)
    found = verdict_of(marks, "a")
    assert [derived.mark.name for derived in found.chain] == ["a", "b"]


def test_a_name_that_nobody_reports_is_an_error() -> None:
    with pytest.raises(KeyError):
        resolve_status_name({}, "orders")


def test_a_moving_table_is_not_late() -> None:
    moving = StageStatus("shard:orders", 8, 9, upstream="capture:shop", since_ms=NOW_MS - 100)
    found = verdict_of(cluster(shard=moving), "shard:orders")
    assert (found.exit_code, found.worst.state) == (0, StageState.MOVING)


def test_a_captured_table_that_flows_is_where_its_capture_is_and_a_parked_one_says_so() -> None:
    shard = StageStatus("shard:orders", 9, 9, upstream="table:shop/public.orders")
    down = StageStatus("capture:shop", 9, 10, "PostgreSQL at db:5432", "it does not answer", since_ms=0)
    assert reported(cluster(shard=shard))[0] == 0
    assert reported(cluster(shard=shard, capture=down)) == (3, "capture:shop", "PostgreSQL at db:5432")
    paused = StageStatus(
        "table:shop/public.orders", 5, 6, "operator", "column 'x' is new", error="column 'x' is new", parked=True,
        failing_since_ms=NOW_MS - 10, upstream="capture:shop/topics",
    )  # fmt: skip
    marks = cluster(shard=shard, parked=paused)
    assert reported(marks) == (3, "table:shop/public.orders", "operator")
    for name in ("table:shop/public.orders", "shop/public.orders"):
        assert resolve_status_name(marks, name) == "table:shop/public.orders"
    alone = {name: mark for name, mark in marks.items() if not name.startswith("shard:")}
    assert (
        resolve_status_name(alone, "orders")
        == resolve_status_name(alone, "public.orders")
        == "table:shop/public.orders"
    )


def test_a_binding_that_is_parked_is_on_the_way_of_a_stream_table() -> None:
    paused = StageStatus("binding:topic/x", 0, 1, error="it cannot be read", failing_since_ms=1, parked=True)
    marks = (StageStatus("shard:t", 9, 9, upstream="topic:x"), StageStatus("topic:x", 9, 9), paused)
    found = verdict_of(derive_statuses([StatusReport("p", NOW_MS, marks)], NOW_MS), "shard:t")
    assert (found.exit_code, found.worst.mark.name) == (3, "binding:topic/x")


def test_a_driver_that_dies_again_and_again_is_told_by_who_restarts_it() -> None:
    driver = StatusReport("pipeline:s", NOW_MS, (StageStatus("shard:t", 0, 9, since_ms=NOW_MS - 100),))
    again = StageStatus("pipeline:s", 0, 1, error="killed by SIGKILL", failing_since_ms=1)
    parent = StatusReport("up:n", NOW_MS, (again,))
    found = verdict_of(derive_statuses([driver, parent], NOW_MS), "shard:t")
    assert (found.exit_code, found.worst.mark.reason) == (3, "")
    assert found.worst.mark.name.startswith("pipeline:s")


def test_a_table_that_its_pipeline_may_not_keep_is_told_by_that_where_nobody_keeps_it() -> None:
    """A healthy topic of the same name does not hide the refusal."""
    refused = StageStatus(
        "pipeline:p:table/clicks", 0, 1, "operator", error="fed by another", failing_since_ms=1, parked=True
    )
    waits = StageStatus("shard:by_page", 3, 4, "shard:clicks", since_ms=0, upstream="shard:clicks")
    marks = derive_statuses(
        [StatusReport("pipeline:p", NOW_MS, (refused, StageStatus("topic:clicks", 9, 9), waits))], NOW_MS
    )
    for name in ("clicks", "by_page"):
        found = verdict_of(marks, resolve_status_name(marks, name))
        assert (found.exit_code, found.worst.mark.name, found.root) == (3, "pipeline:p:table/clicks", "operator")
    kept = derive_statuses([StatusReport("pipeline:q", NOW_MS, (refused, StageStatus("shard:clicks", 9, 9)))], NOW_MS)
    assert verdict_of(kept, resolve_status_name(kept, "clicks")).exit_code == 0, "who keeps it tells how it is"
