"""A flipped bit of a stored part is a CorruptError with the object's key for every reader, and never another value."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidemill
from support.query.world import ORDERS, World, filled, rows_of
from tidemill.base.errors import CorruptError
from tidemill.query import verified_paths
from tidemill.query.table import Table
from tidemill.shards.api import Part
from tidemill.shards.parts import parts

SUM = "SELECT sum(total) FROM orders"


def stored(world: World, name: str = "orders") -> list[Part]:
    async def run() -> list[Part]:
        shard = await world.stores.shard(name)
        found = [p for b in await shard.batches_until((await shard.frontiers())[1] - 1) for p in b.parts]
        await shard.aclose()
        return found

    return world.portal.call(run())


def flip(world: World, part: Part, at: Callable[[bytes], int], bit: int = 0) -> None:
    """Flip one bit of the object without the store's notice."""
    data = bytearray(bytes(world.portal.call(world.stores.objects.get(part.object_key))))
    data[at(bytes(data))] ^= 1 << bit
    world.portal.call(world.stores.objects.delete(part.object_key))
    world.portal.call(world.stores.objects.put(part.object_key, bytes(data)))


def in_column(name: str) -> Callable[[bytes], int]:
    """Return a position near the end of the first chunk of a column."""

    def at(data: bytes) -> int:
        metadata = pq.read_metadata(pa.BufferReader(data))
        names = [metadata.schema.column(i).name for i in range(metadata.num_columns)]
        chunk = metadata.row_group(0).column(names.index(name))
        begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        return int(begin + chunk.total_compressed_size - 9)

    return at


def in_footer(data: bytes) -> int:
    return len(data) - 20


def total(table: Table) -> Any:
    return sum(row["total"] for row in table.to_arrow(["total"]).to_pylist())


READERS: dict[str, Callable[[Table], Any]] = {
    "arrow": lambda t: t.to_arrow(),
    "arrow, a column": total,
    "batches": lambda t: t.to_batches(["total"]).read_all(),
    "polars": lambda t: t.to_polars(),
    "polars, lazily": lambda t: t.scan_polars().select("total").collect(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_a_column_is_corrupt_with_the_objects_key(world: World, reader: str) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    before = rows_of(orders.to_arrow())
    largest = max(stored(world), key=lambda p: p.rows)
    flip(world, largest, in_column("total"))
    with pytest.raises(Exception, match="object=" + largest.object_key) as raised:
        READERS[reader](orders)
    assert isinstance(raised.value, CorruptError) or "polars" in reader
    flip(world, largest, in_column("total"))
    assert rows_of(orders.to_arrow()) == before, "nothing of the damage stays"


def test_changes_that_lie_in_a_damaged_part_are_corrupt(world: World) -> None:
    filled(world)
    newest = stored(world)[-1]
    flip(world, newest, in_column("status"))
    with pytest.raises(CorruptError, match=newest.object_key):
        list(world.cluster.table("orders").changes(19))


def test_a_flipped_bit_of_a_footer_is_corrupt_also_for_a_count(world: World) -> None:
    filled(world)
    largest = max(stored(world), key=lambda p: p.rows)
    flip(world, largest, in_footer)
    for read in (Table.count, total):
        with pytest.raises(CorruptError, match=largest.object_key):
            read(world.cluster.table("orders"))


def test_duckdb_reads_no_damaged_value_from_a_file_or_an_object(everywhere: World) -> None:
    filled(everywhere)
    orders = everywhere.cluster.table("orders")
    largest = max(stored(everywhere), key=lambda p: p.rows)
    with duckdb.connect() as connection:
        before = orders.to_duckdb(connection).aggregate("sum(total)").fetchall()
        assert before == [(total(orders),)]
    flip(everywhere, largest, in_column("total"))
    duck_forgets()
    with duckdb.connect() as connection, pytest.raises(Exception, match=largest.object_key):
        summed(orders, connection)
    flip(everywhere, largest, in_column("total"))
    with duckdb.connect() as connection:
        assert orders.to_duckdb(connection).aggregate("sum(total)").fetchall() == before


def summed(orders: Table, connection: duckdb.DuckDBPyConnection) -> Any:
    orders.to_duckdb(connection)
    return connection.sql(SUM).fetchall()


def duck_forgets() -> None:
    """Simulate another process, which has verified nothing yet."""

    verified_paths._verified.clear()


def test_a_copy_of_a_bucket_is_verified_although_its_parts_have_the_same_keys(world: World, tmp_path: Path) -> None:
    filled(world)
    whole = rows_of(world.cluster.table("orders").scan_polars().collect().to_arrow())
    shutil.copytree(tmp_path / "data", tmp_path / "copy" / "data", ignore=shutil.ignore_patterns("*.sock"))
    (tmp_path / "copy" / "tidemill.toml").write_text(f'[node]\ndata = "{tmp_path}/copy/data"\n')
    with tidemill.connect(tmp_path / "copy" / "tidemill.toml") as cluster:
        copy = World(cluster)
        flip(copy, max(stored(copy), key=lambda p: p.rows), in_column("total"))
        with pytest.raises(Exception, match="part is damaged"):
            cluster.table("orders").scan_polars().collect()
    assert rows_of(world.cluster.table("orders").scan_polars().collect().to_arrow()) == whole


def test_a_merge_refuses_a_damaged_part_and_changes_nothing(world: World) -> None:
    filled(world)
    before = stored(world)
    damaged = before[0]
    flip(world, damaged, in_column("status"))
    with pytest.raises(CorruptError, match=damaged.object_key):
        world.merge(29)
    assert stored(world) == before


def test_a_damaged_inline_part_is_corrupt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inline part is stored in the table's state, which a faulty metadata database can damage as well."""
    encoded = parts.encode_part(ORDERS, _one_order())
    part = encoded.to_part()
    damaged = bytearray(part.inline)
    damaged[in_column("total")(part.inline)] ^= 1
    with pytest.raises(CorruptError, match="object=inline"):
        parts.decode_part(ORDERS, bytes(damaged), part)
    assert parts.decode_part(ORDERS, part.inline, part).num_rows == 1


def test_parts_without_checksums_stay_readable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "checksums_of", lambda data: (-1, -1))
    filled(world)
    assert {(p.crc, p.footer_crc) for p in stored(world)} == {(-1, -1)}
    orders = world.cluster.table("orders")
    assert orders.count() == len(orders.to_arrow()) == 300
    with duckdb.connect() as connection:
        assert orders.to_duckdb(connection).aggregate("sum(total)").fetchall() == [(total(orders),)]


def _one_order() -> pa.Table:
    from support.query.world import updates

    return updates([(1, "new", 1)], 5)
