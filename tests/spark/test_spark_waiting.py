"""A pipeline whose inputs do not exist yet says so in its marks, and starts when they do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.base.clock import Rand
from tidemill.base.errors import Invalid, TidemillError
from tidemill.base.marks import Mark
from tidemill.consensus.board import Board
from tidemill.metastore.catalogue import PipelineRow
from tidemill.spark.host import Settings
from tidemill.spark.runner import Runner

PIPELINE = """
def build(p):
    p.table("orders", p.capture("shop").table("orders"))
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string, product_id long"))
"""
TABLES = {"public.orders": [("o_id", "bigint", 0), ("status", "text", -1)]}


def started(harbour: Any, tmp_path: Path, text: str = PIPELINE) -> tuple[Runner, threading.Event, threading.Thread]:
    file = tmp_path / "pipeline.py"
    file.write_text(text)
    stopping = threading.Event()
    runner = Runner(Settings("p", file, harbour.urls, "local[1]", tmp_path / "scratch"), stopping)
    runner._open_session = lambda: None  # type: ignore[method-assign]  # as if it were still starting
    thread = threading.Thread(target=runner.run)
    thread.start()
    return runner, stopping, thread


def until(find: Any) -> Any:
    waiting = threading.Event()
    for _ in range(600):
        found = find()
        if found:
            return found
        waiting.wait(0.05)
    raise AssertionError("not in time")


def mark(harbour: Any, name: str) -> Mark | None:
    reports = harbour.portal.call(Board(harbour.stores.consensus, Rand()).reports())
    return next((m for r in reports for m in r.marks if m.name == name), None)


def test_a_pipeline_waits_for_its_capture_and_its_snapshot_and_says_so(harbour: Any, tmp_path: Path) -> None:
    runner, stopping, thread = started(harbour, tmp_path)
    try:
        found = until(lambda: (m := mark(harbour, "shard:orders")) and "not started" in m.reason and m)
        assert (found.held_by, found.position < found.target) == ("capture:shop", True)
        assert until(lambda: mark(harbour, "shard:clicks")).held_by == "topic:clicks"
        assert mark(harbour, "pipeline:p").held_by in ("shard:orders", "shard:clicks")  # type: ignore[union-attr]
        row = harbour.portal.call(harbour.stores.catalogue.get(PipelineRow, "p"))
        assert row.tables == {"orders": "capture:shop:public.orders", "clicks": "topic:clicks"}
        assert row.dead_letters == "p.dead_letters"

        topics = harbour.capture("shop", TABLES, snapshot_done=False)
        until(lambda: "snapshot" in mark(harbour, "shard:orders").reason)  # type: ignore[union-attr]
        orders = topics["public.orders"]
        harbour.produce(orders, [({"o_id": 1}, {"o_id": 1, "status": "open"})])
        harbour.mint("capture/shop", 1000, orders)
        harbour.finish_snapshot("shop")
        until(lambda: runner.tables() and any(t.upper == 1001 for t in runner.tables()))
        assert harbour.contents("orders") == [{"o_id": 1, "status": "open"}]
        until(lambda: mark(harbour, "shard:orders").position == 1001)  # type: ignore[union-attr]
        assert mark(harbour, "shard:orders").held_by == "capture:shop"  # type: ignore[union-attr]
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_table_that_the_capture_does_not_have_ends_the_pipeline_with_a_sentence(harbour: Any, tmp_path: Path) -> None:
    harbour.capture("shop", TABLES)
    file = tmp_path / "pipeline.py"
    file.write_text('def build(p):\n    p.table("x", p.capture("shop").table("public.nope"))\n')
    runner = Runner(Settings("p", file, harbour.urls, "local[1]", tmp_path / "s"), threading.Event())
    runner._open_session = lambda: None  # type: ignore[method-assign]
    with pytest.raises(Invalid, match=r"no such table: capture=shop table=public.nope"):
        runner.run()


def test_what_the_data_does_to_a_running_pipeline_is_no_fault_of_its_configuration(
    harbour: Any, tmp_path: Path
) -> None:
    """Its exit code would end every process beside it; any other is tried again. Here a binding passes its topic."""
    orders = harbour.capture("shop", TABLES)["public.orders"]
    harbour.heads[orders.topic_id][0] = 5
    harbour.mint("capture/shop", 1000, orders)
    file = tmp_path / "pipeline.py"
    file.write_text('def build(p):\n    p.table("orders", p.capture("shop").table("orders"))\n')
    runner = Runner(Settings("p", file, harbour.urls, "local[1]", tmp_path / "s"), threading.Event())
    runner._open_session = lambda: None  # type: ignore[method-assign]
    with pytest.raises(TidemillError, match="passes the log") as caught:
        runner.run()
    assert not isinstance(caught.value, Invalid)
