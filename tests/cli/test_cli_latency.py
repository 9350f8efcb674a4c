"""`status --latency`: histograms of all processes added up by source and stage, and drawn to one scale."""

from __future__ import annotations

import json

import pytest

from tidemill.base.status.histogram import SINCE_BOUND, StageHistograms
from tidemill.base.status.status import StatusReport
from tidemill.cli.cluster.status import BAR, latency_bars, show_latency
from tidemill.cli.output.output import JSON, TABLE
from tidemill.console.views.stages import merge_latencies


def report(process: str, source: str, **stages: list[int]) -> StatusReport:
    made = StageHistograms()
    for stage, ages_ms in stages.items():
        made.add(stage.replace("_", " "), [10_000 - age_ms for age_ms in ages_ms], 10_000)
    return StatusReport(process, 0, (), {"latency": {source: made.to_plain()}})


NODE = report("node:a", "capture/shop", bound=[40], durable=[20], received=[10])
DRIVERS = [report(f"pipeline:{n}", "capture/shop", appended=[100, 100], appended_since_bound=[60]) for n in "ab"]
ODD = [StatusReport("old", 0, (), facts) for facts in ({}, {"latency": 3}, {"latency": {"capture/shop": [1]}})]


def test_stages_stand_in_their_order_and_those_of_several_drivers_are_added_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_latency([*DRIVERS, NODE, *ODD, report("node:b", "capture/crm", received=[5])], JSON)
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["capture/crm", "capture/shop"]
    assert list(shown["capture/shop"]) == ["received", "durable", "bound", "appended", SINCE_BOUND]
    assert shown["capture/shop"]["appended"] == {"count": 4, "p50": 100, "p95": 100, "p99": 100, "max": 100}


def test_a_bar_begins_where_the_stage_before_has_its_median() -> None:
    drawn = latency_bars(merge_latencies([NODE, *DRIVERS])["capture/shop"])
    assert drawn == {
        "received": "█" * 4,
        "durable": "·" * 4 + "█" * 4,
        "bound": "·" * 8 + "█" * 8,
        "appended": "·" * 16 + "█" * (BAR - 16),
        SINCE_BOUND: "█" * 24,
    }


def test_where_nothing_was_measured_there_is_an_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_latency(ODD, TABLE)
    assert "stage" in capsys.readouterr().out
