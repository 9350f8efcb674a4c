"""`tidemill.spark.read`: a plan over the parts themselves, exact at every time, and held while it may be read."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from support.spark.pipelines import until
from support.spark.wide_table import COLUMNS, SCHEMA, append, explained, holds, merge, rows, same
from support.waiting import until as wait
from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.spark import read
from tidemill.spark import table_reader as reading

pytestmark = pytest.mark.spark

COUNT = 30_000


@pytest.fixture
def changed(harbour: Any) -> dict[str, str]:
    """Write a settled part, changes of it in parts of either sign, an insertion-only part, and a null key; uppers 10 to
    50."""
    every = np.arange(-1, COUNT)
    append(harbour, "t", 10, rows(every, 0, 5, 1))
    merge(harbour, "t", 9)
    lost = np.append(np.arange(0, COUNT, 50), -1)
    append(harbour, "t", 20, rows(lost, 0, 15, -1), rows(lost[5:], 1, 15, 1))
    append(harbour, "t", 30, rows(np.arange(COUNT, 2 * COUNT), 0, 25, 1))
    append(harbour, "t", 50, rows([0, 50], 3, 45, 1))
    return {"objects": harbour.urls.objects, "consensus": harbour.urls.consensus}


def test_the_plan_is_the_contents_at_every_time_and_columns_and_filters_are_sparks_own(
    harbour: Any, spark: Any, changed: dict[str, str]
) -> None:
    assert same(harbour, "t", read(spark, "t", as_of=9, **changed), 9) == COUNT + 1
    assert same(harbour, "t", read(spark, "t", as_of=19, **changed), 19) == COUNT - 4
    newest = read(spark, "t", **changed)
    assert same(harbour, "t", newest, 49) == newest.count() == 2 * COUNT - 2
    assert newest.columns == [c.name for c in COLUMNS]
    assert "BroadcastHashJoin LeftAnti" in explained(spark, newest.select("v"))
    plan = explained(spark, newest.select("v").where("k = 50"))
    assert "EqualTo(k,50)" in plan and "Scan parquet" in plan
    assert not [name for name in ("x", "at", "m") if f"{name}:" in plan.partition("ReadSchema: ")[2].split("\n")[0]]
    plain = explained(spark, read(spark, "t", as_of=9, **changed))
    assert "Join" not in plain and "Union" not in plain, "without a difference it is Parquet alone"


def collect_garbage(spark: Any) -> None:
    gc.collect()
    spark._jvm.System.gc()


def test_what_a_frame_reads_is_held_until_its_last_descendant_is_gone(
    harbour: Any, spark: Any, changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "USE_CHECK_S", 0.05)
    monkeypatch.setattr(reading, "LINGER_S", 0.2)
    frame = read(spark, "t", as_of=19, **changed)
    assert holds(harbour, "t") == ["dataframe"]
    descendant = frame.where("k > 3").groupBy("s").count()
    del frame
    for _ in range(3):
        collect_garbage(spark)
    assert holds(harbour, "t") == ["dataframe"]
    assert descendant.count() == 101
    del descendant

    def let_go() -> bool:
        collect_garbage(spark)
        return not holds(harbour, "t")

    until(let_go, "the hold ends")


def test_a_job_that_runs_when_the_frame_is_released_holds_what_it_reads(
    harbour: Any, spark: Any, changed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks = 0

    def count_looks(*of: Any) -> set[int]:
        nonlocal looks
        looks += 1
        return found(*of)

    found = reading._rdds_being_read
    monkeypatch.setattr(reading, "USE_CHECK_S", 0.05)
    monkeypatch.setattr(reading, "LINGER_S", 0.2)
    monkeypatch.setattr(reading, "_rdds_being_read", count_looks)
    end = str(tmp_path / "end")

    def wait_for_the_end(rows: Iterator[Any]) -> Iterator[int]:
        first = [next(rows, None)]
        while not os.path.exists(end):
            time.sleep(0.02)
        yield sum(1 for _ in rows) + len(first)

    frame = read(spark, "t", as_of=9, **changed)
    rdd = frame.select("k").rdd.coalesce(1).mapPartitions(wait_for_the_end)
    with ThreadPoolExecutor(1) as pool:
        counted = pool.submit(rdd.collect)
        try:
            until(lambda: spark.sparkContext.statusTracker().getActiveJobsIds(), "the job runs")
            del frame

            def looked_often() -> bool:
                collect_garbage(spark)
                return looks > 20

            until(looked_often, "the hold goes on for longer than it lingers")
            assert holds(harbour, "t") == ["dataframe"]
        finally:
            Path(end).touch()
        assert counted.result() == [COUNT + 1]
    until(lambda: not holds(harbour, "t"), "the hold ends")


def test_an_idle_iterator_is_held_for_a_while_unless_many_frames_were_released_after_its_own(
    harbour: Any, spark: Any, changed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "USE_CHECK_S", 0.05)
    monkeypatch.setattr(reading, "LINGERING_MAX", 10_000)  # frames of other tests may be released, too

    def readers() -> set[str]:
        shard = harbour.shard("t")
        harbour.portal.call(shard.frontiers())
        return {hold.reader for hold in shard.state.holds}

    def released(reader: str) -> bool:
        collect_garbage(spark)
        return reader in reading._lingering

    others = readers()
    rows = read(spark, "t", as_of=9, **changed).select("k").toLocalIterator()
    next(rows)
    (first,) = readers() - others
    until(lambda: released(first), "the frame is released")
    assert first in readers() and sum(1 for _ in rows) == COUNT
    frame = read(spark, "t", as_of=19, **changed)
    (second,) = readers() - others - {first}
    del frame
    until(lambda: released(second), "the other frame is released")
    assert first in readers()
    monkeypatch.setattr(reading, "LINGERING_MAX", 1)
    until(lambda: first not in readers(), "the first ends early")
    assert reading._lingering, "the last that was released goes on"
    monkeypatch.setattr(reading, "LINGERING_MAX", 0)
    until(lambda: second not in readers(), "the other ends early")


def test_a_job_that_began_before_the_frame_was_created_does_not_hold_what_it_reads(
    harbour: Any, spark: Any, changed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "USE_CHECK_S", 0.05)
    monkeypatch.setattr(reading, "LINGER_S", 0.2)
    end = str(tmp_path / "end")

    def wait_for_the_end(rows: Iterator[int]) -> Iterator[int]:
        while not os.path.exists(end):
            time.sleep(0.02)
        yield from rows

    def let_go() -> bool:
        collect_garbage(spark)
        return not holds(harbour, "t")

    other = spark.sparkContext.parallelize([7], 1).mapPartitions(wait_for_the_end)
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(other.collect)
        try:
            until(lambda: spark.sparkContext.statusTracker().getActiveJobsIds(), "the other job runs")
            frame = read(spark, "t", as_of=9, **changed)
            assert frame.count() == COUNT + 1
            del frame
            until(let_go, "the hold ends")
            assert not collected.done()
        finally:
            Path(end).touch()
        assert collected.result() == [7]


async def test_few_released_frames_are_held_for_a_job_of_that_moment_that_runs_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: set[str] = set()

    @asynccontextmanager
    async def hold(_: Any, reader: str, since: int) -> AsyncIterator[None]:
        held.add(reader)
        try:
            yield
        finally:
            held.discard(reader)

    class Shard:
        def reader_name(self, what: str) -> str:
            return f"{what}/{next(numbers)}"

        async def aclose(self) -> None:
            closed.append(self)

    for name, value in {
        "USE_CHECK_S": 0.001, "LINGER_S": 0.01, "hold_during": hold, "_holds": set(), "_lingering": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(reading, name, value)
    numbers, closed, runs = itertools.count(), list[Any](), True

    def hold_while(find_use: Callable[[], reading._Use]) -> Coroutine[Any, Any, None]:
        release: Future[Any] = Future()
        release.set_result(find_use)
        return reading._hold_while_used(Shard(), 0, Future(), release)  # type: ignore[arg-type]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(300):
            tasks.create_task(hold_while(lambda: reading._Use.JOB if runs else reading._Use.POSSIBLE))
        await wait(lambda: len(closed) == 300 - reading.LINGERING_MAX, "the others end early")
        last = {*held}
        assert len(last) == reading.LINGERING_MAX and not reading._holds
        await hold_while(lambda: reading._Use.POSSIBLE)
        assert held == last, "a frame without a job ends first"
        runs = False
    assert not held and not reading._lingering


def test_where_no_plan_can_be_exact_the_data_source_reads_and_the_log_says_so(
    harbour: Any, spark: Any, changed: dict[str, str]
) -> None:
    unkeyed = ShardSchema(COLUMNS, ())
    append(harbour, "u", 10, rows([1, 1, 2], 0, 5, 1), schema=unkeyed)
    append(harbour, "u", 20, rows([1], 0, 15, -1), schema=unkeyed)
    with capture_logs() as logs:
        frame = read(spark, "u", **changed)
    assert same(harbour, "u", frame, 19) == 2
    assert [e["because"] for e in logs if e["event"] == "read through the data source"] == [
        "it has no key, and updates that are not merged"
    ]
    harbour.portal.call(harbour.shard("u").close())
    with pytest.raises(InvalidError, match="time is not readable"):
        read(spark, "u", as_of=99, **changed)


@pytest.mark.parametrize(
    ("kind", "beside", "planned"),
    [
        ("float64", "_gone1", False),  # 0.0 and -0.0 are two keys
        ("int64", "_gone1", True),
        ("int64", "_TIME", False),
        ("int64", "_Hash", False),
        ("int64", "K", False),
    ],
)
def test_what_spark_takes_for_one_stays_two(harbour: Any, spark: Any, kind: str, beside: str, planned: bool) -> None:
    schema = ShardSchema((Column("k", kind), Column(beside, "int64"), Column("b", "binary")), ("k",))

    def some(upper: int, keys: list[float], diff: int) -> None:
        at = {TIME: [upper - 1] * len(keys), DIFF: [diff] * len(keys)}
        pads = [bytes(np.random.default_rng(7).bytes(20_000))] * len(keys)
        append(harbour, "t", upper, pa.table({"k": keys, beside: [5] * len(keys), "b": pads, **at}), schema=schema)

    zeros = [0.0, -0.0] if kind == "float64" else [0, 1]
    some(10, [*zeros, 7], 1)
    some(20, zeros[1:], -1)
    with capture_logs() as logs:
        frame = read(spark, "t", objects=harbour.urls.objects, consensus=harbour.urls.consensus)
    assert sorted(tuple(row) for row in frame.drop("b").collect()) == [(0, 5), (7, 5)]
    assert ("because" not in str(logs)) == planned


def test_a_shard_that_was_never_written_is_an_empty_frame(harbour: Any, spark: Any) -> None:
    harbour.portal.call(harbour.stores.shard("e", SCHEMA))
    frame = read(spark, "e", objects=harbour.urls.objects, consensus=harbour.urls.consensus)
    assert (frame.columns, frame.count()) == ([c.name for c in COLUMNS], 0)


def flip(harbour: Any, name: str, column: str) -> str:
    """Flip one bit of a column in the largest part. Return its key."""

    async def run() -> str:
        shard = await harbour.stores.shard(name)
        largest = max((p for b in shard.state.batches for p in b.parts), key=lambda p: p.rows)
        data = bytearray(await harbour.stores.objects.get(largest.object_key))
        metadata = pq.read_metadata(pa.BufferReader(bytes(data)))
        chunk = metadata.row_group(0).column(metadata.schema.to_arrow_schema().names.index(column))
        begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        data[begin + chunk.total_compressed_size - 9] ^= 1
        await harbour.stores.objects.delete(largest.object_key)
        await harbour.stores.objects.put(largest.object_key, bytes(data))
        return largest.object_key

    key: str = harbour.portal.call(run())
    return key


def test_a_flipped_bit_of_a_part_is_an_error_that_names_its_file_for_the_plan_and_the_data_source(
    harbour: Any, spark: Any, changed: dict[str, str]
) -> None:
    key = flip(harbour, "t", "m")
    planned = read(spark, "t", as_of=9, **changed)
    assert planned.selectExpr("sum(s)").collect(), "other columns are whole"
    with pytest.raises(Exception, match=key.rpartition("/")[2]):
        planned.selectExpr("sum(m)").collect()
    source = spark.read.format("tidemill").options(table="t", as_of="9", **changed).load()
    with pytest.raises(Exception, match=f"part is damaged: object={key}|part is unreadable: object={key}"):
        source.selectExpr("sum(m)").collect()
