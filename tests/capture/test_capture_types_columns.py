"""Captured rows of every type, read from the columns behind their records. PostgreSQL's own text is the reference."""

from __future__ import annotations

from typing import Any

import pytest

from support.capture.column_types import columns, filled, quoted, selected
from support.capture.types_in_tables import check_columns, expression
from support.capture.world import World
from support.spark.column_groups import ColumnGroups
from tidemill.base.errors import TidemillError
from tidemill.capture.decode import copy_text, row_blocks
from tidemill.capture.encode import columnar_encoder
from tidemill.capture.topics import batch_builder, partition_writer
from tidemill.spark.decode import column_batches
from tidemill.spark.decode.records import Slice, SliceDescriptor
from tidemill.spark.ingest.fetch_decode import decode
from tidemill.spark.ingest.sources import captured_feed
from tidemill.spark.merge.commands import LIVE
from tidemill.topics.batch.columns_trailer import read_trailer, without_trailer
from tidemill.topics.batch_reads import read_batches
from tidemill.topics.partition_reader import LogPartitionReader

pytestmark = pytest.mark.postgres


async def stored(world: World, table: str) -> tuple[list[SliceDescriptor], list[list[Any]]]:
    """Return a slice of each partition of the table's topic, and its batches with their trailers."""
    topic = await world.topic(table)
    reader = LogPartitionReader(world.consensus, world.objects)
    descriptors: list[SliceDescriptor] = []
    batches: list[list[Any]] = []
    for partition in range(topic.partitions):
        end = await reader.high_watermark(topic.topic_id, partition)
        if not end:
            continue
        refs = await reader.plan(topic.topic_id, partition, 0, end)
        (found,) = await read_batches(world.objects, [refs])
        assert not isinstance(found, TidemillError)
        piece = Slice(topic.name, topic.topic_id, partition, 0, end, (end,), (100,))
        descriptors.append(SliceDescriptor(piece, tuple(refs)))
        batches.append(list(found))
    return descriptors, batches


async def test_every_type_is_in_the_columns_what_postgres_says_it_is(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows come from the copy and from the stream. Each is a batch and a group. No value needs its record."""
    for module in (row_blocks, copy_text):
        monkeypatch.setattr(module, "MAX_COLUMNS", 200)
    monkeypatch.setattr(batch_builder, "MIN_ROWS", 1)
    monkeypatch.setattr(columnar_encoder, "MIN_BLOCK_ROWS", 1)
    monkeypatch.setattr(partition_writer, "BATCH_BYTES", 1)
    monkeypatch.setattr(column_batches, "BLOCK_RECORDS", 1)
    async with World(postgres_dsn) as world:
        await filled(world)
        names = [quoted(name) for name, _, _ in columns()]
        await world.transaction(
            *(
                f"INSERT INTO kinds (id, {name}) SELECT id + {1000 * n}, {name} FROM kinds"
                f" WHERE {name} IS NOT NULL AND id < 1000"
                for n, name in enumerate(names, 1)
            )
        )
        ((count,),) = await world.select("SELECT count(*) FROM kinds WHERE id > 1000")
        async with world.capture():
            listed = ", ".join(names)
            await world.sql(
                f"INSERT INTO kinds (id, {listed}) SELECT id + 1000000, {listed} FROM kinds WHERE id > 1000"
            )
            await world.caught_up()
            descriptors, batches = await stored(world, "kinds")
        feed = await captured_feed(world.catalogue, world.name, "public.kinds")
        groups = ColumnGroups(monkeypatch)
        found = decode(feed, descriptors, batches)
        assert found.stop is None and found.dead.num_rows == 0
        rows = found.commands.rows
        assert rows.num_rows >= 2 * count and groups.rows >= count and all(groups.decoded), (count, groups.rows)
        schema = feed.schema.columns
        wanted = await selected(world, f"SELECT {', '.join(map(expression, schema))} FROM kinds ORDER BY id")
        check_columns(rows, schema, {row[0]: row for row in wanted})
        alone = [[without_trailer(batch) for batch in some] for some in batches]
        again = decode(feed, descriptors, alone).commands.rows
        check_columns(again, schema, {row[0]: row for row in wanted})


async def test_a_large_transaction_and_a_copy_have_columns_and_small_transactions_none(postgres_dsn: str) -> None:
    """Inserted, updated and deleted rows: the columns give what SELECT gives."""
    async with World(postgres_dsn) as world:
        await world.sql(
            "CREATE TABLE t (id int PRIMARY KEY, v numeric(10,2), note text)",
            "INSERT INTO t SELECT n, n / 4.0, 'copied ' || n FROM generate_series(1, 2000) AS n",
        )
        async with world.capture():
            await world.transaction(
                "INSERT INTO t SELECT n, n, 'new' FROM generate_series(2001, 4000) AS n",
                "UPDATE t SET v = v + 1 WHERE id % 3 = 0",
                "DELETE FROM t WHERE id % 5 = 0",
            )
            await world.caught_up()
            await world.sql("INSERT INTO t VALUES (5000, 1, 'alone')")
            await world.caught_up()
            descriptors, batches = await stored(world, "t")
        sizes = [
            (ref.record_count, read_trailer(batch, ref.record_count) is not None)
            for each, some in zip(descriptors, batches, strict=True)
            for ref, batch in zip(each.refs, some, strict=True)
        ]
        assert (1, False) in sizes and sum(count for count, columns in sizes if columns) >= 4_000
        feed = await captured_feed(world.catalogue, world.name, "public.t")
        rows = decode(feed, descriptors, batches).commands.rows.sort_by(
            [("_partition", "ascending"), ("_order", "ascending")]
        )
        table: dict[int, tuple[Any, ...]] = {}
        for row in rows.to_pylist():
            table.pop(row["id"], None)
            if row[LIVE]:
                table[row["id"]] = (row["id"], row["v"], row["note"])
        assert table == {row[0]: row for row in await world.select("SELECT id, v, note FROM t")}
