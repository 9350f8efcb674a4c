"""A lazy frame over the files of a directory equals `to_polars`: every type, filters, and rows that were superseded."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal

from support.query.world import World, filled
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.schema import contents_schema

VALUES: dict[str, list[Any]] = {
    "bool": [True, None, False],
    "int16": [-(2**15), None, 5],
    "int32": [-(2**31), None, 5],
    "int64": [-(2**63), None, 5],
    "float32": [1.5, None, float("nan")],
    "float64": [-0.0, None, float("inf")],
    "string": ["a", None, ""],
    "binary": [b"a\0", None, b""],
    "date": [date(1, 1, 1), None, date(2026, 1, 2)],
    "decimal(38,10)": [Decimal("1.5"), None, Decimal("-3e27")],
    "decimal(5,2)": [Decimal("1.5"), None, Decimal("-999.99")],
    "timestamp": [datetime(1500, 1, 1, tzinfo=UTC), None, datetime(2026, 1, 1, tzinfo=UTC)],
    "timestamp_ntz": [datetime(1500, 1, 1), None, datetime(2026, 1, 1)],
    "json": ['{"a":1}', None, "[]"],
}
SCHEMA = ShardSchema((Column("id", "int64"), *(Column(f"of {kind}", kind) for kind in VALUES)), ("id",))


def test_every_type_is_scanned_as_it_is_read(world: World) -> None:
    async def write() -> None:
        shard = await world.stores.shard("typed", SCHEMA)
        arrow = contents_schema(SCHEMA)
        columns = {
            "id": [1, 2, 3],
            **{f"of {kind}": pa.array(found, arrow.field(f"of {kind}").type) for kind, found in VALUES.items()},
        }
        rows = pa.table(columns, schema=arrow)
        for name, number in ((TIME, 5), (DIFF, 1)):
            rows = rows.append_column(name, pa.array([number] * 3, pa.int64()))
        await shard.compare_and_append(0, 10, [await shard.write_part(rows)], "")
        await shard.aclose()

    world.portal.call(write())
    table = world.cluster.table("typed")
    assert_frame_equal(table.scan_polars().collect(), table.to_polars(), check_row_order=False)
    for kind in VALUES:
        found = table.scan_polars().filter(pl.col(f"of {kind}").is_not_null()).select("id").collect()
        assert sorted(found.to_series()) == [1, 3], kind


def test_a_file_that_is_gone_is_lost_history_and_no_error_of_the_file_system(world: World) -> None:
    filled(world)
    lazy = world.cluster.table("orders").scan_polars(as_of=19)
    assert lazy.collect().height == 300
    world.append(40, [(n, "new", 1) for n in range(400, 500)])

    async def release() -> None:
        shard = await world.stores.shard("orders")
        for hold in shard.state.holds:  # as if its process had been paused for longer than a hold lasts
            await shard.release_hold(hold.reader)
        await shard.aclose()

    world.portal.call(release())
    world.merge(39)
    with pytest.raises(Exception, match="merged and deleted in the meantime"):
        lazy.collect()


FILTERS = {
    "none": pl.lit(value=True),
    "a superseded row": pl.col("id") == 7,
    "a deleted row": pl.col("id") == 8,
    "values of superseded rows": pl.col("status") == "open",
    "values of new rows": pl.col("status").is_null() | (pl.col("status") == "paid"),
    "a column that is not selected": pl.col("total") > Decimal(2950),
}


@pytest.mark.parametrize("filtered", FILTERS)
def test_superseded_rows_are_in_no_answer(world: World, filtered: str) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    for at in (19, None):
        whole, lazy = orders.to_polars(as_of=at), orders.scan_polars(as_of=at)
        for columns in (["id"], ["status"], ["id", "status", "total"]):
            want = whole.filter(FILTERS[filtered]).select(columns)
            found = lazy.filter(FILTERS[filtered]).select(columns)
            assert_frame_equal(found.collect(), want, check_row_order=False)
            assert found.select(pl.len()).collect().item() == want.height
            assert found.head(2).collect().height == min(2, want.height)
