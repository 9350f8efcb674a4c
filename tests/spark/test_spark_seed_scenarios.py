"""The upsert scenarios through real Spark: streaming queries, foreachBatch, tasks.

One captured database has a table per scenario, so that a few queries run them all; each test checks its own table.
    at 0   every table's first rows, by a query
    then   peers move some of the shards, and rows at 1, 2, 3, 5, 7 and 10 are bound: the source frontier is 11
    at 10  a second query of the same driver, which has not yet seen the peers' appends

All of it runs twice, because both flavours must give equal output: computed by Spark tasks, and inline on the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from support.spark.harbour import Harbour
from support.spark.sinks import clicks_sink, shop_sink
from support.waiting import DEADLINE_S
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.bindings.minter import BindingMinter
from tidemill.shards.registry import open_remap
from tidemill.spark.ingest.feed_sink import FeedSink

pytestmark = pytest.mark.spark

Update = tuple[int, int, int, int]
"""k, v, time, diff"""
WIDE = 1_500

ROWS: dict[str, list[tuple[int, int, int | None]]] = {
    # table: (time, k, v or None = deleted), in the order of the topic
    "lagging": [(5, 0, 1), (7, 1, 2)],
    "overtaken": [(5, 0, 1), (7, 1, 2), (10, 2, 3)],
    "gh_9160": [(0, 0, 0), (2, 1, None), (3, 0, 1), (3, 0, 2)],
    "rehydrated": [(1, 42, 200)],
    "multi_batch": [(1, 1, 30)],
    "existing": [(0, 1, 77), (1, 1, None)],
    "nonexistent": [(1, 1, None)],
    "reinserted": [(0, 1, 10), (1, 1, None), (2, 1, 20)],
    "idempotent": [(0, 1, 50), (1, 1, 50)],
    "out_of_order": [(0, 99, 1), (1, 1, 2), (2, 1, 3), (2, 99, 4)],
    "wide": [(0, k, k) for k in range(WIDE)] + [(1, k, k + 1) for k in range(WIDE)],
    "idle": [],
    "half": [(2, 1, 2), (7, 1, 7)],
}
PEERS: dict[str, list[tuple[int, int, Sequence[Update]]]] = {
    # appends of a peer between the two queries: lower, upper, rows
    "lagging": [(1, 10, ())],
    "overtaken": [(1, 10, [(0, 1, 5, 1), (1, 2, 7, 1)])],
    "gh_9160": [(1, 3, ())],
    "half": [(1, 5, [(1, 2, 2, 1)])],
}
HELD_BEFORE: dict[str, list[Sequence[Update]]] = {
    # parts of [0, 1) of a shard that the driver finds
    "rehydrated": [[(42, 100, 0, 1)]],
    "multi_batch": [[(1, 10, 0, 1)], [(1, 10, 0, -1)], [(1, 20, 0, 1)]],
}


def append(harbour: Any, table: str, lower: int, upper: int, parts: list[Sequence[Update]]) -> None:
    shard = harbour.shard(table)

    async def run() -> None:
        names = ("k", "v", "_time", "_diff")
        tables = [pa.table({n: pa.array([r[i] for r in p], pa.int64()) for i, n in enumerate(names)}) for p in parts]
        written = [await shard.write_part(t) for t in tables if t.num_rows]
        await shard.compare_and_append(lower, upper, written, f"{table}-{upper}")

    harbour.portal.call(run())


def query(harbour: Any, spark: Any, sink: FeedSink, checkpoint: Path) -> None:
    """A streaming query of the feed as a pipeline has it, until everything bound now is processed."""
    frame = (
        spark.readStream.format("tidemill")
        .options(objects=harbour.urls.objects, consensus=harbour.urls.consensus)
        .options(source=sink.source, rows="false", start=str(max(t.upper for t in sink.seats.tables)))
    )
    from tidemill.spark.pipeline.streaming_query import batch_function
    from tidemill.spark.source import DESCRIPTOR_COLUMNS
    from tidemill.spark.types import spark_schema

    batches = threading.Event()

    def failed(_: str, error: BaseException) -> None:
        raise error

    done = (
        frame.schema(spark_schema(DESCRIPTOR_COLUMNS))
        .load()
        .writeStream.option("checkpointLocation", str(checkpoint))
        .foreachBatch(batch_function(checkpoint, {sink.source: sink}.get, failed, batches.set))
        .trigger(availableNow=True)
        .start()
    )
    assert done.awaitTermination(DEADLINE_S)
    assert batches.is_set() and not sink.seats.failed


def produce(harbour: Any, topics: dict[str, TopicRow], time: int) -> None:
    for table, rows in ROWS.items():
        at = [({"k": k}, None if v is None else {"k": k, "v": v}) for t, k, v in rows if t == time]
        if at:
            harbour.produce(topics[f"public.{table}"], at)
    harbour.mint("capture/shop", time, *topics.values())


@pytest.fixture(scope="module", params=["tasks", "inline"])
def played(request: pytest.FixtureRequest, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    harbour, scratch = Harbour(tmp_path_factory.mktemp("seed")), tmp_path_factory.mktemp("seed-scratch")
    columns = [("k", "bigint", 0), ("v", "bigint", -1)]
    topics = harbour.capture("shop", {f"public.{table}": columns for table in ROWS})
    shop_sink(harbour, scratch / "makes-the-shards", list(ROWS))
    for table, parts in HELD_BEFORE.items():
        append(harbour, table, 0, 1, parts)
    produce(harbour, topics, 0)
    sink = shop_sink(harbour, scratch / "s", list(ROWS))
    sink.steps.use_spark(spark.sparkContext, inline_rows=0 if request.param == "tasks" else 1_000_000)
    query(harbour, spark, sink, scratch / "c1")
    at_first = {t.name: t.upper for t in sink.seats.tables}
    for table, appended in PEERS.items():
        for lower, upper, rows in appended:
            append(harbour, table, lower, upper, [rows])
    for time in (1, 2, 3, 5, 7, 10):
        produce(harbour, topics, time)
    query(harbour, spark, sink, scratch / "c2")
    tables = {t.name: t for t in sink.seats.tables}
    yield SimpleNamespace(harbour=harbour, at_first=at_first, tables=tables, inline=request.param == "inline")
    harbour.close()


def history(harbour: Any, table: str) -> list[Update]:
    """Every update of the shard, by (time, key, diff, value)."""
    shard = harbour.shard(table)
    rows = harbour.portal.call(shard.updates_until(shard.state.upper - 1)).to_pylist()
    return sorted(((r["k"], r["v"], r["_time"], r["_diff"]) for r in rows), key=lambda u: (u[2], u[0], u[3], u[1]))


def batches(harbour: Any, table: str) -> list[tuple[int, int, int]]:
    """lower, upper, rows"""
    return [(b.lower, b.upper, sum(p.rows for p in b.parts)) for b in harbour.shard(table).state.batches]


def test_every_table_came_to_the_source_frontier(played: Any) -> None:
    assert set(played.at_first.values()) == {1}
    assert {name: table.upper for name, table in played.tables.items()} == dict.fromkeys(ROWS, 11)
    assert {name: played.harbour.upper(name) for name in ROWS} == dict.fromkeys(ROWS, 11)


def test_m4101_spark_lagging_replacement_below_upper_strands_data(played: Any) -> None:
    assert history(played.harbour, "lagging") == []
    assert batches(played.harbour, "lagging")[-1] == (0, 11, 0)
    assert played.tables["lagging"].lost == 1
    if played.inline:
        assert (played.tables["lagging"].operator.dropped, played.tables["lagging"].operator.output_frontier) == (2, 11)


def test_m4102_spark_lagging_replacement_below_upper_is_dropped(played: Any) -> None:
    assert history(played.harbour, "overtaken") == [(0, 1, 5, 1), (1, 2, 7, 1), (2, 3, 10, 1)]
    assert batches(played.harbour, "overtaken")[-1] == (10, 11, 1)
    assert played.tables["overtaken"].lost == 1


def test_m4103_spark_gh_9160_repro(played: Any) -> None:
    assert history(played.harbour, "gh_9160") == [(0, 0, 0, 1), (0, 0, 3, -1), (0, 2, 3, 1)]


def test_m4104_spark_rehydration_then_update(played: Any) -> None:
    assert history(played.harbour, "rehydrated") == [(42, 100, 0, 1), (42, 100, 1, -1), (42, 200, 1, 1)]


def test_m4105_spark_multi_batch_rehydration(played: Any) -> None:
    assert history(played.harbour, "multi_batch")[-2:] == [(1, 20, 1, -1), (1, 30, 1, 1)]
    assert len(history(played.harbour, "multi_batch")) == 5


def test_m4106_spark_delete_existing_key(played: Any) -> None:
    assert history(played.harbour, "existing") == [(1, 77, 0, 1), (1, 77, 1, -1)]


def test_m4107_spark_delete_nonexistent_key(played: Any) -> None:
    assert history(played.harbour, "nonexistent") == []


def test_m4108_spark_reinsert_after_delete(played: Any) -> None:
    assert history(played.harbour, "reinserted") == [(1, 10, 0, 1), (1, 10, 1, -1), (1, 20, 2, 1)]


def test_m4109_spark_idempotent_update(played: Any) -> None:
    assert history(played.harbour, "idempotent") == [(1, 50, 0, 1)]


def test_m4110_spark_out_of_order_keys_across_timestamps(played: Any) -> None:
    pairs = [(1, 2, 2, -1), (1, 3, 2, 1), (99, 1, 2, -1), (99, 4, 2, 1)]
    assert history(played.harbour, "out_of_order") == [(99, 1, 0, 1), (1, 2, 1, 1), *pairs]


def test_m4111_spark_drain_crosses_probe_window(played: Any) -> None:
    pairs = [update for k in range(WIDE) for update in ((k, k, 1, -1), (k, k + 1, 1, 1))]
    assert history(played.harbour, "wide") == [(k, k, 0, 1) for k in range(WIDE)] + pairs


def test_m4112_spark_drain_reads_what_lies_in_files(played: Any) -> None:
    mirror_dir = played.tables["wide"].mirror_dir
    assert played.inline or list(mirror_dir.glob("run-*.arrow")), "tasks read the mirror from its files"
    live = played.tables["wide"].operator.mirror.live_rows().to_pylist()
    assert {r["k"]: r["v"] for r in live} == {k: k + 1 for k in range(WIDE)}


def test_m4302_spark_a_table_without_rows_gets_no_part(played: Any) -> None:
    assert batches(played.harbour, "idle") == [(0, 11, 0)]


def test_m4306_spark_what_a_peer_appended_is_told_as_the_upper_whoever_won(played: Any) -> None:
    table = played.tables["half"]
    assert (table.lost, table.upper) == (1, 11)
    assert history(played.harbour, "half") == [(1, 2, 2, 1), (1, 2, 7, -1), (1, 7, 7, 1)]
    assert [b[:2] for b in batches(played.harbour, "half")] == [(0, 1), (1, 5), (5, 11)]


def intervals(harbour: Any, spark: Any, scratch: Path, rows: list[tuple[int, int]], ends: Sequence[int]) -> Any:
    """A keyed topic of (time, n), by Spark tasks to each of `ends`; the shard's batches then."""
    topic = harbour.create_topic("clicks")
    for time in sorted({t for t, _ in rows}):
        harbour.produce(topic, [(b"", {"click_id": f"c{n}", "product_id": n}) for t, n in rows if t == time])
        harbour.mint("topic/clicks", time, topic)
    sink = clicks_sink(harbour, scratch)
    sink.steps.use_spark(spark.sparkContext, inline_rows=0)
    for end in ends:
        sink.process(end)
    found = {int(row["product_id"]) for row in harbour.contents("clicks")}
    assert found == {n for _, n in rows}
    return batches(harbour, "clicks")


def test_m4301_spark_six_intervals_are_six_batches_with_their_own_rows(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    found = intervals(harbour, spark, tmp_path, [(t, t) for t in range(12)], range(2, 13, 2))
    assert found == [(t, t + 2, 2) for t in range(0, 12, 2)]


SNAPSHOT = [(1, n) for n in range(4)] + [(2 + n, 10 + n) for n in range(16)]


def test_m4303_spark_a_snapshot_and_sixteen_later_times_are_one_batch_each(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    found = intervals(harbour, spark, tmp_path, SNAPSHOT, range(2, 19))
    assert found == [(0, 2, 4)] + [(t, t + 1, 1) for t in range(2, 18)]


def test_m4304_spark_the_same_at_once_is_one_batch(harbour: Any, spark: Any, tmp_path: Path) -> None:
    assert intervals(harbour, spark, tmp_path, SNAPSHOT, [18]) == [(0, 18, 20)]


def times(harbour: Any, spark: Any, name: str, checkpoint: Path) -> dict[tuple[int, int], int]:
    """(partition, offset) → time of every record, as a streaming DataFrame of the topic has them."""
    rows = (
        spark.readStream.format("tidemill")
        .options(objects=harbour.urls.objects, consensus=harbour.urls.consensus, source=f"topic/{name}")
        .options(schema="n long", key="n")
        .load()
    )
    table = f"times_{checkpoint.name}"
    started = rows.writeStream.format("memory").queryName(table).option("checkpointLocation", str(checkpoint))
    assert started.trigger(availableNow=True).start().awaitTermination(DEADLINE_S)
    return {(r._partition, r._order): r._time for r in spark.table(table).collect()}


def mint_as_two_nodes(harbour: Any, topic: TopicRow, *said: tuple[int, int]) -> None:
    """Mint each (now_ms, next offset) by a separate minter; all are opened before the first mints."""

    async def run() -> None:
        s = harbour.stores
        clocks = [SimpleNamespace(now_ms=lambda t=t: t, monotonic_s=lambda t=t: t / 1000) for t, _ in said]
        minters: list[BindingMinter] = []
        for clock in clocks:
            remap = await open_remap(s.consensus, s.clock, s.rand, f"topic/{topic.name}")
            minters.append(BindingMinter(remap, clock, interval_ms=1000))  # type: ignore[arg-type]
            await minters[-1].open()
        for minter, (_, offset) in zip(minters, said, strict=True):
            assert await minter.mint_missing({topic.topic_id: (offset,)}, 0)

    harbour.portal.call(run())


def test_m4504_m4506_spark_a_record_has_one_time_whoever_binds_it_and_however_often_it_is_read(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("t")
    harbour.produce(topic, [(b"", {"n": n}) for n in range(5)])
    mint_as_two_nodes(harbour, topic, (1000, 3), (11_000, 5))
    found = times(harbour, spark, "t", tmp_path / "one")
    assert found == {(0, 0): 1000, (0, 1): 1000, (0, 2): 1000, (0, 3): 11_000, (0, 4): 11_000}
    assert times(harbour, spark, "t", tmp_path / "two") == found


def test_m4501_m4503_spark_partitions_that_are_bound_one_after_the_other(
    harbour: Any, spark: Any, tmp_path: Path
) -> None:
    topic = harbour.create_topic("t", 2)
    for partition, time in ((0, 1000), (1, 2000)):
        harbour.produce(topic, [(b"", {"n": n}) for n in range(10)], partition)
        harbour.mint("topic/t", time, topic)
    found = times(harbour, spark, "t", tmp_path / "three")
    assert found[0, 1] == found[0, 3] == 1000
    assert found == {(p, n): (1000, 2000)[p] for p in range(2) for n in range(10)}
