"""`tidemill status` by default: sources, tables and live clients; other stages only in trouble; the worst decides."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from tidemill.base.limits import STATUS_BLIND_AFTER_MS
from tidemill.base.status.status import DerivedStatus, StageStatus, StatusReport, derive_statuses
from tidemill.cli.cluster.status import ROWS_MAX, group_stages, show_status, warn_if_all_silent

NOW_MS = 1_800_000_000_000


def stuck(name: str) -> StageStatus:
    return StageStatus(name, 0, 1, error="it fails", parked=True, failing_since_ms=NOW_MS - 60_000)


def statuses(*marks: StageStatus) -> dict[str, DerivedStatus]:
    return derive_statuses([StatusReport("node:n1", NOW_MS, marks)], NOW_MS)


def test_stages_are_grouped_and_internal_ones_are_shown_in_trouble_alone() -> None:
    names = ("capture:shop", "capture:shop/topics", "topic:clicks", "shard:orders", "keeper:orphans", "pipeline:p")
    groups = group_stages(statuses(*(StageStatus(name, 0, 0) for name in names)))
    assert {title: list(shown) for title, (shown, _) in groups.items()} == {
        "sources": ["capture:shop", "topic:clicks"], "tables": ["shard:orders"], "in trouble": [],
    }  # fmt: skip
    groups = group_stages(
        statuses(stuck("keeper:orphans"), stuck("capture:shop/topics"), StageStatus("pipeline:p", 0, 0))
    )
    assert list(groups["in trouble"][0]) == ["capture:shop/topics", "keeper:orphans"]


def test_a_group_of_any_size_is_short_with_the_troubled_first() -> None:
    many = [StageStatus(f"shard:t{number:03}", 0, 0) for number in range(100)]
    shown, more = group_stages(statuses(*many, stuck("shard:z")))["tables"]
    assert next(iter(shown)) == "shard:z" and len(shown) == ROWS_MAX and more == 101 - ROWS_MAX


def test_omitted_stages_do_not_count_as_working() -> None:
    many = [stuck(f"shard:t{number:03}") for number in range(100)]
    reports = [StatusReport("node:n1", NOW_MS, tuple(many))]
    out = io.StringIO()
    with redirect_stdout(out):
        show_status(derive_statuses(reports, NOW_MS), reports, every=False)
    assert f"and {100 - ROWS_MAX} more" in out.getvalue() and "; 1 other stages work" in out.getvalue()


def test_live_clients_are_counted_by_node() -> None:
    facts: dict[str, object] = {"shapes": {"shapes": 1200}}
    reports = [StatusReport("node:n1", NOW_MS, (StageStatus("node:n1", 0, 0),), facts)]
    out = io.StringIO()
    with redirect_stdout(out):
        show_status(derive_statuses(reports, NOW_MS), reports, every=False)
    assert "live clients: 1,200 shapes on n1; 2 other stages work" in out.getvalue()


def test_a_stopped_cluster_is_told_in_one_sentence_and_a_silent_process_of_many_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = [StatusReport("node:n1", NOW_MS, ()), StatusReport("pipeline:p", NOW_MS - STATUS_BLIND_AFTER_MS, ())]
    warn_if_all_silent(derive_statuses(reports, NOW_MS + 1))
    assert capsys.readouterr().err == ""
    warn_if_all_silent(derive_statuses(reports, NOW_MS + 90_000))
    assert capsys.readouterr() == (
        "",
        "tidemill: no process has reported for 90 s. Unless the cluster is starting: tidemill up.\n",
    )
