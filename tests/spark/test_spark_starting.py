"""A pipeline of many inputs starts as fast as one of few: one streaming query, and one Python planner, for all of
them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from support.spark.pipelines import running, until
from support.spark.running import mark, pipeline
from support.waiting import eventually
from tidemill.spark.pipeline.streaming_query import StartLimiter

TOPICS = 12


def test_so_many_queries_begin_at_once_and_the_next_when_one_has_begun_or_hangs() -> None:
    starts = StartLimiter(2, 100.0)
    assert [starts.try_start(who, 0.0) for who in "abc"] == [True, True, False]
    assert starts.try_start("a", 50.0), "it is started again: its place is its own"
    starts.end("b")
    assert starts.try_start("c", 60.0)
    assert not starts.try_start("d", 60.0)
    starts.end("d")
    assert not starts.try_start("e", 149.9) and starts.try_start("e", 150.1), "a has hung for long enough"
    assert not starts.try_start("d", 159.9)
    for who in "cae":
        starts.end(who)
    assert [starts.try_start(who, 160.0) for who in "xy"] == [True, True]


def planners(spark: Any) -> set[str]:
    """Return the ids of the session's processes that plan a stream."""
    jvm, found = spark.sparkContext._gateway.proc.pid, set()
    ahead = [str(jvm)]
    while ahead:
        here = ahead.pop()
        with contextlib.suppress(OSError):  # it has ended
            if b"python_streaming_source_runner" in Path(f"/proc/{here}/cmdline").read_bytes():
                found.add(here)
            for task in Path(f"/proc/{here}/task").iterdir():
                with contextlib.suppress(OSError):  # only this thread has ended
                    ahead += (task / "children").read_text().split()
    return found


def end_of(query: Any) -> dict[str, int]:
    """Return the offset at which the last batch of a query with one reader ended."""
    (reader,) = query.lastProgress["sources"]
    found: dict[str, int] = json.loads(reader["endOffset"])
    return found


@pytest.mark.spark
def test_f333_a_pipeline_of_many_topics_and_captures_has_one_query_with_one_planner_and_every_row(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    topics = {f"t{n}": harbour.create_topic(f"t{n}") for n in range(TOPICS)}
    del topics["t0"]  # nothing is ever bound of it
    captured = harbour.capture("shop", {"public.orders": [("o_id", "bigint", 0)]})["public.orders"]
    file = tmp_path / "pipeline.py"
    declared = [f'    p.table("{name}", p.topic("{name}", key="id", schema="id string"))\n' for name in ("t0", *topics)]
    file.write_text(
        "def build(p):\n" + "".join(declared) + '    p.table("orders", p.capture("shop").table("orders"))\n'
    )

    def come(time_ms: int) -> None:
        for name, topic in topics.items():
            harbour.produce(topic, [(b"", {"id": f"{name} at {time_ms}"})])
            harbour.mint(f"topic/{name}", time_ms, topic)
        harbour.produce(captured, [({"o_id": time_ms}, {"o_id": time_ms})])
        harbour.mint("capture/shop", time_ms, captured)

    def there(time_ms: int) -> bool:
        return all(harbour.upper(name) == time_ms + 1 for name in (*topics, "orders"))

    before, queries = planners(spark), {query.id for query in spark.streams.active}
    come(10)
    with running(harbour, spark, tmp_path / "scratch", file) as runner:
        until(runner.query.called.is_set, "Spark has brought a batch")
        until(lambda: there(10), "rows that were there")
        (query,) = [query for query in spark.streams.active if query.id not in queries]
        assert len(planners(spark) - before) == 1
        until(lambda: query.lastProgress is not None, "its first batch has ended")
        begun = query.lastProgress["batchId"]
        come(20)
        until(lambda: there(20), "rows that came")
        sources = {f"topic/{name}": 21 for name in topics} | {"topic/t0": 0, "capture/shop": 21}
        until(lambda: end_of(query) == sources, "one offset for every source")
        assert query.lastProgress["batchId"] > begun and query.exception() is None
    for name in topics:
        assert [row["id"] for row in harbour.contents(name)] == [f"{name} at 10", f"{name} at 20"]
    assert [row["o_id"] for row in harbour.contents("orders")] == [10, 20]


def test_a_pipelines_mark_says_how_many_of_its_inputs_are_started_and_their_starts_are_its_progress(
    harbour: Any, tmp_path: Path
) -> None:
    text = "def build(p):\n" + "".join(
        f'    p.table("t{n}", p.topic("t{n}", key="id", schema="id string"))\n' for n in range(3)
    )
    for n in (1, 2):
        harbour.create_topic(f"t{n}")
    with pipeline(harbour, tmp_path / "p", text):
        waits = "waiting: 2 of 3 inputs are started"
        found = eventually(lambda: (m := mark(harbour, "pipeline:p")) and m.reason == waits and m)
        assert found.held_by == "shard:t0" and found.progress >= 2
        harbour.create_topic("t0")
        eventually(lambda: (m := mark(harbour, "pipeline:p")) and not m.reason)
