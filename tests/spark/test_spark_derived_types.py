"""Every type of a shard through a derived table in real Spark: the ends of its range, what is empty, and null."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.schema import arrow_type, contents_schema, update_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation

pytestmark = pytest.mark.spark

US, DAYS = 2**63 - 1, 2**31 - 1
"""±infinity of a captured database"""
VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int16": [-(2**15), 2**15 - 1],
    "int32": [-(2**31), 2**31 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "float32": [math.inf, -0.0],
    "float64": [math.nan, -0.0],
    "string": ["", "a\0b😀"],
    "json": ["{}", "null"],
    "binary": [b"", b"\0\xff"],
    "date": [-DAYS, DAYS],
    "timestamp": [-US, US],
    "timestamp_ntz": [-US, US],
    "decimal(38,0)": [Decimal(10**38 - 1), Decimal(1 - 10**38)],
    "decimal(4,2)": [Decimal("-0.01"), Decimal("99.99")],
    "decimal(6,6)": [Decimal("0.000001"), Decimal("-0.999999")],
}
NAMES = {kind: f"c{number}" for number, kind in enumerate(VALUES)}
SCHEMA = ShardSchema((Column("k", "int16"), *(Column(NAMES[kind], kind) for kind in VALUES)), ("k",))


def rows(keys: range) -> pa.Table:
    """Row 0, 3, …: nulls; the others: one end or the other."""
    columns: dict[str, pa.Array] = {"k": pa.array(keys, pa.int16())}
    for kind, values in VALUES.items():
        wire = {"date": pa.int32(), "timestamp": pa.int64(), "timestamp_ntz": pa.int64()}.get(kind, arrow_type(kind))
        found = pa.array([None if k % 3 == 0 else values[k % 3 - 1] for k in keys], wire)
        columns[NAMES[kind]] = found.cast(arrow_type(kind))
    return pa.table(columns, schema=contents_schema(SCHEMA))


def bits(table: pa.Table) -> list[Any]:
    """Return rows with columns in their stored form: NaN equals itself, and −0.0 differs from 0.0."""
    out = []
    for column in table.sort_by("k").columns:
        kind = column.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            column = column.cast(pa.int64() if pa.types.is_timestamp(kind) else pa.int32())
        values = column.to_pylist()
        out.append([struct.pack("<d", v) if isinstance(v, float) else v for v in values])
    return list(zip(*out, strict=True))


def test_every_value_of_every_type_passes_and_groups(spark: Any, harbour: Any, tmp_path: Path) -> None:
    call, s = harbour.portal.call, harbour.stores
    shard = call(s.shard("odd", SCHEMA))

    def append(lower: int, table: pa.Table, diff: int) -> None:
        n = table.num_rows
        updates = table.append_column(TIME, pa.array([lower] * n, pa.int64()))
        updates = updates.append_column(DIFF, pa.array([diff] * n, pa.int64())).cast(update_schema(SCHEMA))
        call(shard.compare_and_append(lower, lower + 1, (call(shard.write_part(updates)),), f"{lower}"))

    p = Pipeline("p")

    @p.derived("same", key="k", inputs=("odd",))
    def same(spark: Any, odd: Any) -> Any:
        return odd

    @p.derived("same_by_group", key="k", inputs=("odd",), by="k")
    def same_by_group(spark: Any, odd: Any) -> Any:
        return odd

    ends = [name for kind, name in NAMES.items() if kind != "json"]

    @p.derived("by_all", key=tuple(ends), inputs=("odd",), by=tuple(ends))
    def by_all(spark: Any, odd: Any) -> Any:
        return odd.where(" and ".join(f"{name} is not null" for name in ends)).groupBy(*ends).count()

    derived = {
        name: Derivation(harbour.portal, s, spark, table, tmp_path / "driver" / "mirrors" / name)
        for name, table in p.derived_tables.items()
    }
    append(0, rows(range(9)), 1)
    for one in derived.values():
        one.open()
        assert one.recompute()
    append(1, rows(range(3)), -1)
    append(2, rows(range(20, 21)), 1)
    expected = pa.concat_tables([rows(range(3, 9)), rows(range(20, 21))])
    for name, one in derived.items():
        assert one.recompute()
        assert (one.groups is None) == (name == "same")
        assert one.writer is not None
        found = call(one.writer.shard.snapshot(2))
        if name.startswith("same"):
            assert bits(found) == bits(expected), name
        else:
            assert sorted(found["count"].to_pylist()) == [2, 3], name
