"""A sink or a derived function that always or sometimes raises: one query continues, and the other tables keep pace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.spark.pipelines import running, until
from support.spark.running import mark
from support.waiting import eventually

pytestmark = pytest.mark.spark

TABLES = tuple(f"t{n}" for n in range(5))
PIPELINE = """
import pathlib
from pyspark.sql.functions import rand

RAISES = pathlib.Path("{raises}")
calls = 0

def build(p):
    def counted(table):
        @p.derived("of_" + table, key="v", inputs=(table,), every_s=0.2)
        def count(spark, rows):
            global calls
            calls += 1
            if table == "t0" and RAISES.exists() and (RAISES.read_text() == "always" or calls % 2):
                raise LookupError("no such thing")
            # A random number prevents a prepared plan, so the function is called in every round.
            return rows.where(rand() >= 0).groupBy("v").count()

    for n in range(5):
        p.table(f"t{{n}}", p.topic(f"t{{n}}", key="id", schema="id long, v long"))
    for table in ("t0", "t1"):
        counted(table)
"""


class Pace:
    """Produces rows of every topic, one time after another."""

    def __init__(self, harbour: Any) -> None:
        self.harbour = harbour
        self.topics = {name: harbour.create_topic(name) for name in TABLES}
        self.time_ms = 0

    def come(self, times: int) -> None:
        for _ in range(times):
            self.time_ms += 10
            for name, topic in self.topics.items():
                self.harbour.produce(topic, [(b"", {"id": self.time_ms, "v": self.time_ms % 3})])
                self.harbour.mint(f"topic/{name}", self.time_ms, topic)

    def there(self, *tables: str) -> None:
        until(lambda: all(self.harbour.upper(name) == self.time_ms + 1 for name in tables), f"rows of {tables}")


@contextmanager
def raising(sink: Any) -> Iterator[None]:
    """Let every round of the sink raise an error that names no table."""
    whole = sink.steps.run_round

    def broken(*_: Any) -> None:
        raise RuntimeError("this sink is broken")

    sink.steps.run_round = broken
    try:
        yield
    finally:
        sink.steps.run_round = whole


def test_f334_a_sink_or_function_that_raises_ends_no_query_and_delays_no_other_table(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    pace, raises = Pace(harbour), tmp_path / "raises"
    file = tmp_path / "pipeline.py"
    file.write_text(PIPELINE.format(raises=raises))
    queries = {query.id for query in spark.streams.active}
    others = [*TABLES[1:], "of_t1"]
    pace.come(1)
    with running(harbour, spark, tmp_path / "scratch", file) as runner:
        until(runner.query.called.is_set, "Spark has brought a batch")
        pace.there(*TABLES, "of_t0", "of_t1")
        (query,) = [query for query in spark.streams.active if query.id not in queries]
        for how in ("always", "sometimes"):
            raises.write_text(how)
            pace.come(3)
            pace.there(*others)
            if how == "always":
                eventually(lambda: (found := mark(harbour, "shard:of_t0")) and "LookupError" in found.error)
        pace.there("of_t0")  # tried again until it works
        raises.unlink()

        sink = next(feed.sink for feed in runner.feeds if feed.source == "topic/t0")
        with raising(sink):
            for _ in range(3):
                pace.come(1)
                pace.there(*others)
            eventually(lambda: (found := mark(harbour, "pipeline:p:topic/t0")) and "is broken" in found.error)
            held = eventually(lambda: (found := mark(harbour, "shard:t0")) and found.held_by and found)
            assert held.held_by == "pipeline:p:topic/t0"
            assert "is broken" in held.reason
            brought = query.lastProgress["batchId"]
            until(lambda: query.lastProgress["batchId"] >= brought, "batches come")
        pace.come(1)
        pace.there(*TABLES, "of_t0", "of_t1")
        eventually(lambda: not runner.tracker.failures("pipeline:p"))
        assert [active.runId for active in spark.streams.active if active.id not in queries] == [query.runId]
        assert query.exception() is None
    for name in TABLES:
        assert len(harbour.contents(name)) == pace.time_ms // 10
    assert threading.active_count() < 500
