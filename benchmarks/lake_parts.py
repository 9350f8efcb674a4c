"""`./dev bench lake_parts`: reads and publications of a table in very many parts, at three numbers of parts.

Each part has a few rows, of which a later part retracts every tenth. All readers read all rows; their number and a sum
are compared with what was written. CPU is that of this process. A foreign reader, where `tests/lake/readers/install`
brought it, is a separate process, so only its elapsed time counts. The last column is the growth of the cost per part
from the smallest table to the largest: about 1 if the cost is linear.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidemill
from harbour import machine
from support.lake.readers import ForeignReader
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.lake.pointer import load_table
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import TablePublisher
from tidemill.lake.settings import LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.shards import handle
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores

SCHEMA = ShardSchema((Column("id", "int64"), Column("amount", "int64")), ("id",))
ROWS = 20
BATCH_PARTS = 100
RETRACTED = 10


def rows(ids: np.ndarray, time_ms: int, diff: int) -> pa.Table:
    fixed = {name: np.full(len(ids), value, dtype=np.int64) for name, value in ((TIME, time_ms), (DIFF, diff))}
    return pa.table({"id": ids, "amount": ids * 3, **fixed})


async def fill(stores: Stores, parts: int) -> None:
    """Write each part as an object. Add a part that retracts every tenth row."""
    shard = await stores.shard("t", SCHEMA)
    for start in range(0, parts, BATCH_PARTS):
        upper = (await shard.frontiers())[1]
        some = [
            await shard.write_part(rows(np.arange(n * ROWS, (n + 1) * ROWS, dtype=np.int64), upper, 1))
            for n in range(start, min(parts, start + BATCH_PARTS))
        ]
        await shard.compare_and_append(upper, upper + 1, some, "")
    await append(stores, rows(np.arange(0, parts * ROWS, RETRACTED, dtype=np.int64), 0, -1))


async def append(stores: Stores, found: pa.Table) -> None:
    shard = await stores.shard("t")
    upper = (await shard.frontiers())[1]
    found = found.set_column(found.column_names.index(TIME), TIME, pa.array(np.full(found.num_rows, upper)))
    await shard.compare_and_append(upper, upper + 1, [await shard.write_part(found)], "")


def measure(parts: int, foreign: dict[str, ForeignReader]) -> dict[str, tuple[float, float]]:
    """Return CPU and elapsed seconds of each reader and publication."""
    taken: dict[str, tuple[float, float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        found = call()
        taken[name] = (time.process_time() - began_cpu_s, time.monotonic() - began_s)
        return found

    with tempfile.TemporaryDirectory(prefix="lake-parts-") as directory, BlockingPortal() as portal:
        urls = StoreUrls(f"file://{directory}/objects", f"sqlite://{directory}/consensus.db")
        stores = portal.call(open_stores(urls))
        timed("write", lambda: portal.call(fill(stores, parts)))
        with tidemill.connect(objects=urls.objects, consensus=urls.consensus) as cluster:
            table = cluster.table("t")
            check(parts, timed("Arrow", table.to_arrow), "Arrow")
            with duckdb.connect() as connection:
                timed("DuckDB view", lambda: table.to_duckdb(connection, "t"))
                check(
                    parts, timed("DuckDB view, all rows", lambda: connection.sql("FROM t").to_arrow_table()), "DuckDB"
                )
        settings = LakeSettings(urls.objects)
        lake = LakeStores(stores.consensus, stores.objects, stores.clock, stores.rand, settings)

        async def publish(publisher: TablePublisher) -> None:
            _, upper = await publisher.shard.frontiers()
            await publisher.publish(upper - 1)

        publisher = TablePublisher(lake, PartColumns(stores.objects), portal.call(stores.shard("t")))
        timed("first publication", lambda: portal.call(publish(publisher)))
        portal.call(append(stores, rows(np.array([5, 15], dtype=np.int64), 0, -1)))
        portal.call(append(stores, rows(np.array([5, 15], dtype=np.int64), 0, 1)))
        timed("next publication", lambda: portal.call(publish(publisher)))
        metadata = portal.call(load_table(stores.consensus, stores.objects, "t")).location
        for name, reader in foreign.items():
            check(parts, timed(name, lambda reader=reader: reader.read(metadata)), name)
        portal.call(stores.aclose())
    return taken


def check(parts: int, found: pa.Table, who: str) -> None:
    ids = np.arange(parts * ROWS, dtype=np.int64)
    want = ids[ids % RETRACTED != 0]
    total = pc.sum(found.column("amount")).as_py()
    assert (found.num_rows, total) == (len(want), int(want.sum()) * 3), f"{who} reads other rows"


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench lake_parts", description=__doc__)
    parser.add_argument("--parts", type=int, nargs="*", default=[2_500, 5_000, 10_000])
    parser.add_argument("--readers", nargs="*", default=["pyiceberg", "duckdb"])
    options = parser.parse_args()
    handle.INLINE_PART_BYTES = 0  # type: ignore[attr-defined]
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lake-readers-") as scratch:
        foreign = {}
        for name in options.readers:
            try:
                foreign[name] = ForeignReader(name, Path(scratch))
            except pytest.skip.Exception as why:
                print(why)
        found = {parts: measure(parts, foreign) for parts in options.parts}
        for reader in foreign.values():
            reader.close()
    print(f"{'':>24}" + "".join(f"{f'{parts:,} parts':>22}" for parts in found) + "   growth")
    first, last = min(found), max(found)
    for name in found[first]:
        costs = "".join(f"{cpu:12.2f} {elapsed:9.2f}" for cpu, elapsed in (each[name] for each in found.values()))
        unit = int(name in foreign)
        growth = (found[last][name][unit] / last) / (found[first][name][unit] / first)
        print(f"{name:>24}{costs} {growth:8.2f}")
    print("CPU and elapsed seconds; every reader read the rows that were written")


if __name__ == "__main__":
    main()
