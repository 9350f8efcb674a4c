"""A few days of a real node under a simulated date: its storage stays level. `./dev bench calendar` runs thirty."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # its modules import each other


@pytest.fixture(scope="module")
def month() -> ModuleType:
    path = BENCHMARKS / "month.py"
    spec = importlib.util.spec_from_file_location("calendar_month", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["calendar_month"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.extended
@pytest.mark.processes
def test_what_a_node_stores_and_holds_is_level_from_one_day_to_the_next(
    month: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(month, "IDLE_TOPICS", 10)
    monkeypatch.setitem(month.SLACK, "objects", 60)  # metastore files of a morning that is shorter than their grace
    days = month.run_processes(5, 9.0, 100.0, 300)
    # A day's batches stay in L0 until they are moved, so an evening has all of them or none: they are bounded below.
    days = [{**day, "objects": day["objects"] - day["kinds"].get("l0", 0)} for day in days]
    # On a busy machine an object may be collected a moment late and count in one evening, but not in every evening.
    level = {name: min(day[name] for day in days[2:]) for name in days[1] if isinstance(days[1][name], int)}
    assert month.compare([*days[:2], level], settled_day=2) == []
    assert [day["kinds"].get("l0", 0) < 400 and day["kinds"]["l1"] < 100 for day in days] == [True] * 5


def test_a_day_that_kept_everything_would_be_seen(month: ModuleType) -> None:
    day = {"day": 3, "consensus_bytes": 4 << 20, "objects": 400, "bucket_bytes": 1 << 20, "rss_bytes": 200 << 20}
    day["descriptors"] = 40
    for name, value in (
        ("consensus_bytes", 5 << 20),
        ("objects", 450),
        ("bucket_bytes", 2 << 20),
        ("rss_bytes", 230 << 20),
        ("descriptors", 50),
    ):
        assert len(month.compare([day, day, day, {**day, "day": 30, name: value}])) == 1, name
