"""A pipeline whose inputs do not exist yet reports them in its marks, and starts when they do."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.spark.running import mark, started
from support.waiting import eventually
from tidemill.base.clock import Rand
from tidemill.base.status.status import StageState, derive_status
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.spark.ingest.step_planner import STEP_BYTES
from tidemill.spark.merge.mirror import MANIFEST
from tidemill.spark.pipeline import status_report
from tidemill.spark.pipeline.streaming_query import StreamingQuery

PIPELINE = """
def build(p):
    p.table("orders", p.capture("shop").table("orders"))
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""
TABLES = {"public.orders": [("o_id", "bigint", 0), ("status", "text", -1)]}


def test_a_pipeline_waits_for_its_capture_and_its_snapshot_and_says_so(harbour: Any, tmp_path: Path) -> None:
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    try:
        found = eventually(lambda: (m := mark(harbour, "shard:orders")) and "not started" in m.reason and m)
        assert (found.held_by, found.position < found.target) == ("capture:shop", True)
        assert found.budget_ms == 15_000, "a capture that nobody starts leaves the table stuck"
        assert eventually(lambda: mark(harbour, "shard:clicks")).held_by == "topic:clicks"
        assert mark(harbour, "pipeline:p").held_by in ("shard:orders", "shard:clicks")  # type: ignore[union-attr]
        row = harbour.portal.call(harbour.stores.catalogue.get(PipelineRow, "p"))
        assert row.tables == {"orders": "capture:shop:public.orders", "clicks": "topic:clicks"}
        assert row.dead_letters == "p.dead_letters"

        topics = harbour.capture("shop", TABLES, snapshot_done=False)
        eventually(lambda: "snapshot" in mark(harbour, "shard:orders").reason)  # type: ignore[union-attr]
        eventually(lambda: mark(harbour, "shard:orders").budget_ms == 3_600_000)  # type: ignore[union-attr]
        orders = topics["public.orders"]
        harbour.produce(orders, [({"o_id": 1}, {"o_id": 1, "status": "open"})])
        harbour.mint("capture/shop", 1000, orders)
        harbour.finish_snapshot("shop")
        eventually(lambda: runner.tables() and any(t.upper == 1001 for t in runner.tables()))
        assert harbour.contents("orders") == [{"o_id": 1, "status": "open"}]
        eventually(lambda: mark(harbour, "shard:orders").position == 1001)  # type: ignore[union-attr]
        assert mark(harbour, "shard:orders").held_by == "capture:shop"  # type: ignore[union-attr]
        reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
        memory: Any = next(r for r in reports if r.process == "pipeline:p").facts["memory"]
        assert memory["resident"][0] > 1 << 20 and memory["mirrors"][0] > 0
        assert memory["steps"][1] == 6 * STEP_BYTES, "two feeds, three steps' worth each"
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_mirrors_are_saved_before_spark_is_asked_to_stop_however_long_that_takes(harbour: Any, tmp_path: Path) -> None:
    """A supervisor waits for twenty seconds. Queries on a busy machine take longer to stop, and the next start would
    have to rebuild the mirrors."""
    harbour.create_topic("clicks")
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    kept = tmp_path / "scratch" / "mirrors" / "clicks" / MANIFEST
    saw: list[bool] = []

    class Query:
        def stop(self) -> None:
            saw.append(kept.exists())

    try:
        eventually(lambda: runner.tables())
        runner.query = StreamingQuery(runner, (), lambda _: None, lambda: True)
        runner.query.query = Query()
        ended = partial(eventually, lambda: not [t for t in threading.enumerate() if t.name.startswith("table-")])
        runner._start_thread("tables", lambda: runner.ending.wait() and ended())
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()
    assert saw == [True]


def test_f305_a_table_that_the_capture_does_not_have_is_parked_and_the_others_flow(
    harbour: Any, tmp_path: Path
) -> None:
    orders = harbour.capture("shop", TABLES)["public.orders"]
    harbour.produce(orders, [({"o_id": 1}, {"o_id": 1, "status": "open"})])
    harbour.mint("capture/shop", 1000, orders)
    text = """
def build(p):
    p.table("x", p.capture("shop").table("public.nope"))
    p.table("orders", p.capture("shop").table("orders"))
    p.table("late", p.capture("other").table("orders"))
"""
    _, stopping, thread = started(harbour, tmp_path, text)
    try:
        found = eventually(lambda: (m := mark(harbour, "shard:x")) and m.error and m)
        assert "no such table: capture=shop table=public.nope" in found.error
        assert (found.parked, found.held_by) == (True, "operator")
        eventually(lambda: harbour.upper("orders") == 1001)
        eventually(lambda: (m := mark(harbour, "shard:orders")) and m.position == 1001)
        late = mark(harbour, "shard:late")
        assert late is not None and (late.held_by, late.error) == ("capture:other", "")
        harbour.capture("other", {"public.else": TABLES["public.orders"]})
        late = eventually(lambda: (m := mark(harbour, "shard:late")) and m.error and m)
        assert "capture=other table=public.orders" in late.reason
        assert "not started" not in late.reason, "the capture that it waited for has started"
        # The capture takes the table in, and it flows without a restart.
        topics = harbour.capture_more("shop", {"public.nope": TABLES["public.orders"]})
        harbour.produce(topics["public.nope"], [({"o_id": 5}, {"o_id": 5, "status": "new"})])
        harbour.mint("capture/shop", 2000, orders, topics["public.nope"])
        eventually(lambda: harbour.upper("x") == 2001)
        assert harbour.contents("x") == [{"o_id": 5, "status": "new"}]
        eventually(lambda: (m := mark(harbour, "shard:x")) and not m.error)
    finally:
        stopping.set()
        thread.join(30)


def test_what_the_data_does_to_a_table_is_told_under_its_mark_with_an_age_that_a_restart_keeps(
    harbour: Any, tmp_path: Path
) -> None:
    """The fault used here is a binding beyond the end of its topic."""
    orders = harbour.capture("shop", TABLES)["public.orders"]
    harbour.heads[orders.topic_id][0] = 5
    harbour.mint("capture/shop", 1000, orders)
    text = 'def build(p):\n    p.table("orders", p.capture("shop").table("orders"))\n'
    ages = []
    for _ in range(2):
        _, stopping, thread = started(harbour, tmp_path, text)
        try:
            tries = ages[-1][1] if ages else 0
            found = eventually(lambda: (m := mark(harbour, "shard:orders")) and m.tries > tries and m)  # noqa: B023
            assert "above the last stable offset" in found.error
            ages.append((found.failing_since_ms, found.tries))
        finally:
            stopping.set()
            thread.join(30)
        assert not thread.is_alive()
    assert ages[0][0] == ages[1][0] and ages[1][1] > ages[0][1]


def test_a_driver_that_rests_gives_the_memory_of_its_steps_back_once(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(status_report, "IDLE_BEFORE_TRIM_S", 0.0)
    topic = harbour.create_topic("clicks")
    text = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))\n'
    runner, stopping, thread = started(harbour, tmp_path, text)
    monkeypatch.setattr(status_report, "release_freed_memory", lambda: given.append(runner.tables()[0].progress.read))
    try:
        for n in (1, 2):
            harbour.produce(topic, [(b"k", {"click_id": "a"})])
            harbour.mint("topic/clicks", 1000 * n, topic)
            eventually(lambda n=n: given == list(range(1, n + 1)))  # type: ignore[misc]
    finally:
        stopping.set()
        thread.join(30)
    assert given == [1, 2]


def test_a_table_whose_topic_nobody_created_yet_waits_and_is_never_stuck(harbour: Any, tmp_path: Path) -> None:
    text = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))\n'
    _, stopping, thread = started(harbour, tmp_path, text)

    def states_a_day_later() -> dict[str, StageState]:
        reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
        (report,) = [each for each in reports if each.process == "pipeline:p"]
        later_ms = report.at_ms + 86_400_000
        return {m.name: derive_status(m, "pipeline:p", later_ms, later_ms).state for m in report.marks}

    try:
        found = eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.held_by == "topic:clicks" and m)
        assert "topic clicks does not exist yet" in found.reason and "tidemill topic create clicks" in found.reason
        expected = {"shard:clicks": StageState.WAITING, "pipeline:p": StageState.WAITING}
        eventually(lambda: expected.items() <= states_a_day_later().items(), otherwise=states_a_day_later, within_s=30)
        topic = harbour.create_topic("clicks")
        harbour.produce(topic, [(b"a", {"click_id": "a"})])
        harbour.mint("topic/clicks", 1000, topic)
        eventually(lambda: harbour.upper("clicks") == 1001, within_s=30)
        assert harbour.contents("clicks") == [{"click_id": "a"}]
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()
