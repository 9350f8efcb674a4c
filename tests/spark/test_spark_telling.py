"""A driver reports its state once a second, even if feeds, tables or stores fail."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.spark.running import mark, pipeline, started
from support.waiting import eventually
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.status.status import RESTARTS_MAX, StageState, StageStatus, derive_status, times_ahead_reason
from tidemill.consensus.status.board import StatusBoard
from tidemill.metastore.catalogue import PipelineRow
from tidemill.spark.pipeline import runner as runner_module

PIPELINE = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))
    p.table("orders", p.capture("shop").table("orders"))
"""
DERIVED = """
def build(p):
    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))

    @p.derived("counted", key="click_id", inputs=("clicks",))
    def counted(spark, clicks):
        return clicks
"""
TABLES = {"public.orders": [("o_id", "bigint", 0)]}
BINDINGS = "pipeline:p:capture/shop:bindings"


def reported(harbour: Any, name: str, process: str) -> StageStatus | None:
    reports = harbour.portal.call(StatusBoard(harbour.stores.consensus, Rand()).reports())
    return next((m for r in reports if r.process == process for m in r.marks if m.name == name), None)


@pytest.mark.parametrize("fault", ["corrupt", "recursion", "waits"])
def test_f312_bindings_that_cannot_be_read_are_told_and_the_driver_is_not_blind(
    harbour: Any, tmp_path: Path, fault: str
) -> None:
    clicks, orders = harbour.create_topic("clicks"), harbour.capture("shop", TABLES)["public.orders"]
    harbour.produce(clicks, [(b"a", {"click_id": "a"})])
    harbour.produce(orders, [({"o_id": 1}, {"o_id": 1})])
    harbour.mint("topic/clicks", 1000, clicks)
    harbour.mint("capture/shop", 1000, orders)
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    released = asyncio.Event()
    try:
        eventually(lambda: all((m := mark(harbour, f"shard:{n}")) and m.position == 1001 for n in ("clicks", "orders")))
        assert mark(harbour, BINDINGS) is None
        sink = next(feed.sink for feed in runner.feeds if feed.source == "capture/shop")
        assert sink is not None
        works = sink.remap.latest

        async def latest() -> Any:
            if fault == "waits":
                await released.wait()
                return await works()
            raise CorruptError("half a record.") if fault == "corrupt" else RecursionError("deep")

        sink.remap.latest = latest  # type: ignore[method-assign]
        found = eventually(lambda: (m := mark(harbour, BINDINGS)) and m.error and m)
        assert {"corrupt": "half a record", "recursion": "RecursionError", "waits": "no answer"}[fault] in found.error
        held = eventually(lambda: (m := mark(harbour, "shard:orders")) and m.held_by == BINDINGS and m)
        assert held.position < held.target, "whether there is more is not known"
        harbour.produce(clicks, [(b"b", {"click_id": "b"})])
        harbour.mint("topic/clicks", 2000, clicks)
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.position == 2001)

        sink.remap.latest = works  # type: ignore[method-assign]
        runner.portal.loop.call_soon_threadsafe(released.set)
        eventually(lambda: mark(harbour, BINDINGS) is None)
        eventually(lambda: (m := mark(harbour, "shard:orders")) and m.position == m.target)
    finally:
        runner.portal.loop.call_soon_threadsafe(released.set)
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_mark_that_cannot_be_computed_fails_with_why_and_the_others_are_told(harbour: Any, tmp_path: Path) -> None:
    clicks, orders = harbour.create_topic("clicks"), harbour.capture("shop", TABLES)["public.orders"]
    harbour.mint("topic/clicks", 1000, clicks)
    harbour.mint("capture/shop", 1000, orders)
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    try:
        eventually(lambda: all((m := mark(harbour, f"shard:{n}")) and m.position == 1001 for n in ("clicks", "orders")))
        writer = next(unit.writer for feed in runner.feeds for unit in feed.units if unit.name == "orders")
        assert writer is not None
        progress, writer.progress = writer.progress, None  # type: ignore[assignment]
        found = eventually(lambda: (m := mark(harbour, "shard:orders")) and "cannot be computed" in m.error and m)
        assert "AttributeError" in found.error
        harbour.mint("topic/clicks", 2000, clicks)
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.position == 2001)
        assert mark(harbour, "pipeline:p").held_by == "shard:orders"  # type: ignore[union-attr]
        writer.progress = progress
        eventually(lambda: (m := mark(harbour, "shard:orders")) and not m.error)
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_driver_tells_how_its_own_stores_are_and_asks_one_that_failed_until_it_works(
    harbour: Any, tmp_path: Path
) -> None:
    harbour.create_topic("clicks")
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    try:
        for name in ("objects", "consensus", "metastore"):
            found = eventually(lambda: reported(harbour, name, "pipeline:p"))  # noqa: B023
            assert (found.position, found.error) == (1, "")
        inner = runner.stores.objects.inner
        works = inner.put

        async def full(key: str, data: Any) -> None:
            raise UnavailableError(f"no space left: key={key}.")

        inner.put = full  # type: ignore[method-assign]
        putting = asyncio.run_coroutine_threadsafe(runner.stores.objects.put("x/1", b"x"), runner.portal.loop)
        eventually(lambda: "no space left" in reported(harbour, "objects", "pipeline:p").error)  # type: ignore[union-attr]
        putting.cancel()
        inner.put = works  # type: ignore[method-assign]
        eventually(lambda: not reported(harbour, "objects", "pipeline:p").error)  # type: ignore[union-attr]
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_driver_that_ends_in_life_after_life_before_it_has_begun_is_not_moving_for_ever(
    harbour: Any, tmp_path: Path
) -> None:
    since, before = [], 0
    for life in range(RESTARTS_MAX + 2):
        _, stopping, thread = started(harbour, tmp_path, DERIVED)
        try:
            # Spark's start counts as progress, in every life: seen when it is another than its predecessor's last.
            eventually(
                lambda: (m := mark(harbour, "pipeline:p")) and m.restarts == life and m.progress not in (0, before)  # noqa: B023
            )
        finally:
            stopping.set()
            thread.join(30)
        assert not thread.is_alive()
        last = mark(harbour, "pipeline:p")
        assert last is not None
        since.append(last.since_ms)
        before = last.progress
    assert since == sorted(since) and len(set(since)) == RESTARTS_MAX
    assert since[RESTARTS_MAX - 1] == since[RESTARTS_MAX] == since[RESTARTS_MAX + 1]


def test_a_row_that_was_deleted_under_a_living_driver_is_there_again(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pipeline delete` treats a driver that was frozen, or has another clock, as dead."""
    monkeypatch.setattr(runner_module, "REGISTRATION_CHECK_S", 0.05)
    _, stopping, thread = started(harbour, tmp_path, PIPELINE)

    def row() -> PipelineRow | None:
        found: PipelineRow | None = harbour.portal.call(harbour.stores.catalogue.get(PipelineRow, "p"))
        return found

    try:
        first = eventually(row)
        harbour.portal.call(harbour.stores.catalogue.delete(PipelineRow, "p"))
        assert eventually(row) == first
    finally:
        stopping.set()
        thread.join()


def test_a_driver_that_ends_in_order_saves_the_mirrors_of_derived_tables_whose_thread_has_ended(
    harbour: Any, tmp_path: Path
) -> None:
    """The next driver would read everything again without them."""
    runner, stopping, thread = started(harbour, tmp_path, PIPELINE)
    saved: list[str] = []

    class Writer:
        def __init__(self, name: str) -> None:
            self.name = name

        def save(self) -> None:
            saved.append(self.name)

    try:
        eventually(lambda: runner.feeds)
        runner.tables = list  # no other code uses these writers
        for name in ("revenue", "late"):
            runner.derivations[name] = SimpleNamespace(writer=Writer(name))  # type: ignore[assignment]
        released = threading.Event()
        runner._start_thread("derived-late", released.wait)  # in the middle of a round
    finally:
        stopping.set()
        thread.join(30)
        released.set()
    assert saved == ["revenue"]


def test_a_table_whose_times_are_ahead_of_the_clock_is_fresh_and_says_so(harbour: Any, tmp_path: Path) -> None:
    """A binding of a node whose clock was ahead. `why` prints the reason of the table."""
    clicks = harbour.create_topic("clicks")
    harbour.produce(clicks, [(b"a", {"click_id": "a"})])
    ahead_ms = SystemClock().now_ms() + 3_600_000
    harbour.mint("topic/clicks", ahead_ms, clicks)
    text = 'def build(p):\n    p.table("clicks", p.topic("clicks", key="click_id", schema="click_id string"))\n'
    with pipeline(harbour, tmp_path, text):
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.position == m.target == ahead_ms + 1)
        found = mark(harbour, "shard:clicks")
        assert found is not None and re.match(r"its newest time is 3,(600|5\d\d) s ahead of the clock", found.reason)
        assert derive_status(found, "pipeline:p", found.since_ms, found.since_ms).state is StageState.IDLE
    assert times_ahead_reason(11_001, 1_000) == "" != times_ahead_reason(11_002, 1_000)


def test_a_table_that_gathers_records_says_so_and_is_not_stuck(harbour: Any, tmp_path: Path) -> None:
    clicks = harbour.create_topic("clicks")
    harbour.produce(clicks, [(b"a", {"click_id": "a"})])
    harbour.mint("topic/clicks", 1000, clicks)
    # Both tables begin immediately, whichever is opened first.
    text = PIPELINE.replace(
        'p.capture("shop").table("orders")', 'p.topic("clicks", key="click_id", schema="click_id string")'
    )
    _, stopping, thread = started(harbour, tmp_path, text, freshness_ms=60_000, budget_ms=1)
    try:
        eventually(lambda: all((m := mark(harbour, f"shard:{n}")) and m.position == 1001 for n in ("clicks", "orders")))
        harbour.produce(clicks, [(b"b", {"click_id": "b"})])
        harbour.mint("topic/clicks", 2000, clicks)
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.target == 2001)
        found = mark(harbour, "shard:clicks")
        assert found is not None and found.position == 1001 and found.budget_ms > 60_000
        assert found.reason == "gathers records for 60 s (freshness_s)"
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()


def test_a_derived_table_whose_session_cannot_start_is_held_by_it_and_tables_go_on(
    harbour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    clicks = harbour.create_topic("clicks")
    harbour.produce(clicks, [(b"a", {"click_id": "a"})])
    harbour.mint("topic/clicks", 1000, clicks)
    _, stopping, thread = started(harbour, tmp_path, DERIVED, session=True)
    try:
        eventually(lambda: (m := mark(harbour, "shard:clicks")) and m.position == 1001)
        eventually(lambda: (m := mark(harbour, "shard:counted")) and m.held_by == "pipeline:p:spark")
        found = mark(harbour, "pipeline:p:spark")
        assert found is not None and "no bash" in found.error and found.parked
    finally:
        stopping.set()
        thread.join(30)
    assert not thread.is_alive()
