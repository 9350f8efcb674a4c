"""Foreign readers return exactly the rows that the bytes of `lake.format` say, with their types."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.lake.readers import BY_SNAPSHOT, BY_TAG, READERS, Reader, reader
from support.lake.written_table import WrittenTable
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import arrow_type
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema

pytestmark = [pytest.mark.processes, pytest.mark.lake]

UTC = datetime.UTC
EVERY_TYPE: dict[str, list[Any]] = {
    "bool": [True, False],
    "int16": [-(2**15), 2**15 - 1],
    "int32": [-(2**31), 2**31 - 1],
    "int64": [-(2**63), 2**63 - 1],
    "float32": [0.10000000149011612, float("-inf")],
    "float64": [-0.0, float("nan")],
    "string": ["", "Grüße 🦉\x00'"],
    "json": ['{"a": [1, null]}', "null"],
    "binary": [b"", b"\x00\xff"],
    "date": [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    "timestamp": [datetime.datetime(1, 1, 1, tzinfo=UTC), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)],
    "timestamp_ntz": [datetime.datetime(1969, 12, 31, 23, 59, 59, 999999), datetime.datetime(2026, 3, 29, 2, 30)],
    "decimal(9,2)": [Decimal("-9999999.99"), Decimal("0.01")],
    "decimal(18,0)": [Decimal(-(10**18 - 1)), Decimal(7)],
    "decimal(38,10)": [Decimal(10**28 - 1), Decimal("-0.0000000001")],
}


@pytest.fixture(scope="module", params=READERS)
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with reader(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def same(found: pa.Table, want: pa.Table, key: str = "id") -> None:
    """Fail unless the tables have the same columns, types of the same meaning, and rows, in any order."""
    assert found.column_names == want.column_names
    for name in want.column_names:
        assert meaning(found.schema.field(name).type) == meaning(want.schema.field(name).type), name
    assert rows_of(found, key) == rows_of(want, key)


def meaning(kind: pa.DataType) -> str:
    """Text that is equal for Arrow's variants of one type of Iceberg."""
    plain = {"int16": "int32", "large_string": "string", "string_view": "string"}
    plain |= {"large_binary": "binary", "binary_view": "binary"}
    if pa.types.is_timestamp(kind):
        return f"timestamp {kind.tz is not None}"
    if pa.types.is_decimal(kind):
        return f"decimal {kind.precision} {kind.scale}"
    return plain.get(str(kind), str(kind))


def rows_of(table: pa.Table, key: str) -> list[str]:
    """Rows as text, by key: NaN equals itself, and -0.0 differs from 0.0."""
    plain = [column.cast(pa.timestamp("us", column.type.tz)) if pa.types.is_timestamp(column.type) else column
             for column in table.columns]  # fmt: skip
    values = [[_naive(value) for value in column.to_pylist()] for column in plain]
    at = table.column_names.index(key)
    return [repr(row) for row in sorted(zip(*values, strict=True), key=lambda row: row[at])]


def _naive(value: Any) -> Any:
    return value.astimezone(UTC).replace(tzinfo=None) if getattr(value, "tzinfo", None) is not None else value


def rows(first: int, end: int, text: str = "row") -> pa.Table:
    """Rows of ids and texts; every seventh text is null."""
    ids = range(first, end)
    return pa.table({"id": pa.array(ids, pa.int64()), "t": [None if i % 7 == 0 else f"{text} {i}" for i in ids]})


TEXTS = ShardSchema((Column("id", "int64"), Column("t", "string")), ("id",))


@pytest.mark.parametrize("version", [3, 2])
def test_every_type_is_read_as_what_it_is(foreign: Reader, tmp_path: Path, version: int) -> None:
    names = {kind: f"c{i}" for i, kind in enumerate(EVERY_TYPE)}
    schema = ShardSchema((Column("id", "int64"), *(Column(n, kind) for kind, n in names.items())), ("id",))
    columns = {"id": pa.array([1, 2, 3], pa.int64())}
    columns |= {names[kind]: pa.array([*values, None], arrow_type(kind)) for kind, values in EVERY_TYPE.items()}
    table = WrittenTable(tmp_path / "t", schema, version)
    want = table.add_part(pa.table(columns), 5)
    table.publish([np.zeros(3, dtype=bool)], 5)
    same(foreign.read(metadata=table.metadata), want)


@pytest.mark.parametrize("version", [3, 2])
@pytest.mark.parametrize("share", ["one", "half", "all but one", "a whole file"])
def test_rows_that_are_deleted_are_not_read(foreign: Reader, tmp_path: Path, share: str, version: int) -> None:
    table = WrittenTable(tmp_path / "t", TEXTS, version)
    parts = [table.add_part(rows(0, 3000), 5), table.add_part(rows(3000, 3100), 6)]
    masks = [np.zeros(len(part), dtype=bool) for part in parts]
    rand = np.random.default_rng(7)
    if share == "one":
        masks[0][1234] = True
    elif share == "half":
        masks = [rand.random(len(mask)) < 0.5 for mask in masks]
    elif share == "all but one":
        masks[0][:-1] = True
        masks[1][1:] = True
    else:
        masks[1][:] = True
    table.publish(masks, 6)
    want = pa.concat_tables([part.filter(pa.array(~mask)) for part, mask in zip(parts, masks, strict=True)])
    same(foreign.read(metadata=table.metadata), want)
    part_of_it = foreign.read(metadata=table.metadata, between=["id", 2500, 3050])
    ids = want["id"].to_numpy()
    same(part_of_it, want.filter(pa.array((ids >= 2500) & (ids < 3050))))


def test_a_snapshot_is_read_again_after_others_followed(foreign: Reader, tmp_path: Path) -> None:
    table = WrittenTable(tmp_path / "t", TEXTS)
    first = table.add_part(rows(0, 100), 5)
    table.publish([np.zeros(100, dtype=bool)], 5)
    second = table.add_part(rows(50, 100, "changed"), 6)
    replaced = first["id"].to_numpy() >= 50
    table.publish([replaced, np.zeros(50, dtype=bool)], 6)
    same(foreign.read(metadata=table.metadata), pa.concat_tables([first.filter(pa.array(~replaced)), second]))
    if foreign.name in BY_SNAPSHOT:
        same(foreign.read(metadata=table.metadata, snapshot=table.snapshots[0]), first)
    if foreign.name in BY_TAG:
        same(foreign.read(metadata=table.metadata, tag="t5"), first)


def test_older_files_have_the_defaults_and_the_wider_types_of_newer_schemas(foreign: Reader, tmp_path: Path) -> None:
    schema = ShardSchema((Column("id", "int64"), Column("n", "int32"), Column("d", "decimal(9,2)")), ("id",))
    table = WrittenTable(tmp_path / "t", schema)
    n, d = pa.array([7, None], pa.int32()), pa.array([Decimal("1.50"), None], pa.decimal128(9, 2))
    old = table.add_part(pa.table({"id": pa.array([1, 2], pa.int64()), "n": n, "d": d}), 5)
    table.publish([np.zeros(2, dtype=bool)], 5)
    wider = evolve_schema(schema, SchemaChanges(widen=(Column("n", "int64"), Column("d", "decimal(12,2)"))))
    wider = evolve_schema(wider, SchemaChanges(add=(Column("note", "string", "none"), Column("more", "float64"))))
    table.evolve(wider)
    new = table.add_part(
        pa.table(
            {
                "id": pa.array([3], pa.int64()),
                "n": pa.array([2**40], pa.int64()),
                "d": pa.array([Decimal("1234567890.12")], pa.decimal128(12, 2)),
                "note": ["x"],
                "more": [0.5],
            }
        ),
        6,
    )
    table.publish([np.zeros(2, dtype=bool), np.zeros(1, dtype=bool)], 6)
    old = old.set_column(1, "n", old["n"].cast(pa.int64())).set_column(2, "d", old["d"].cast(pa.decimal128(12, 2)))
    old = old.append_column("note", [["none"] * 2]).append_column("more", pa.array([None] * 2, pa.float64()))
    same(foreign.read(metadata=table.metadata), pa.concat_tables([old, new]))


def test_a_table_without_rows_is_empty(foreign: Reader, tmp_path: Path) -> None:
    table = WrittenTable(tmp_path / "t", TEXTS)
    table.publish([], 5)
    found = foreign.read(metadata=table.metadata)
    assert (found.num_rows, found.column_names) == (0, ["id", "t"])


def test_columns_named_as_metadata_columns_are_read_under_their_published_names(
    foreign: Reader, tmp_path: Path
) -> None:
    schema = ShardSchema((Column("id", "int64"), Column("_pos", "int64"), Column("_file", "string")), ("id",))
    table = WrittenTable(tmp_path / "t", schema)
    want = table.add_part(pa.table({"id": pa.array([1], pa.int64()), "_pos": [77], "_file": ["mine"]}), 5)
    table.publish([np.zeros(1, dtype=bool)], 5)
    same(foreign.read(metadata=table.metadata), want.rename_columns(["id", "_pos_", "_file_"]))
