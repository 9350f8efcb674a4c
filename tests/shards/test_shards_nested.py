"""Nested values: equality, normal maps, parts, sums, and what a schema may change about them."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, HASH, TIME, Column, ShardSchema
from tidemill.shards.nested.values import normalize_maps, value_numbers, value_sizes, values_equal
from tidemill.shards.parts.arrow_rows import row_sizes, rows_equal, values_at
from tidemill.shards.parts.consolidate import merge_updates, sum_contents
from tidemill.shards.parts.parts import decode_part, encode_part
from tidemill.shards.parts.schema import arrow_type, check_schema, conform_rows, contents_schema, update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges, convert_to_schema, evolve_schema, is_widening
from tidemill.shards.parts.stored_types import chunk_places, hash_bounds, leaf_paths, stored_schema

TYPE = "array<struct<a:float64,m:map<string,array<int16>>>>"
ARROW = arrow_type(TYPE)
SCHEMA = check_schema(ShardSchema((Column("v", TYPE), Column("k", "int64"), Column("m", "map<int16,string>")), ("k",)))

FLOATS = st.sampled_from([0.0, -0.0, math.nan, 1.5, None])
MAPS = st.one_of(
    st.none(),
    st.dictionaries(st.sampled_from("abé"), st.none() | st.lists(st.none() | st.integers(-3, 3), max_size=2)).map(
        lambda found: sorted(found.items())
    ),
)
STRUCTS = st.none() | st.tuples(FLOATS, MAPS).map(lambda both: {"a": both[0], "m": both[1]})
VALUES = st.none() | st.lists(STRUCTS, max_size=3)


@settings(deadline=None)
@given(
    left=st.lists(VALUES, min_size=1, max_size=6),
    right=st.lists(VALUES, min_size=1, max_size=6),
    skip=st.integers(0, 2),
)
def test_values_are_equal_bit_by_bit_on_every_level(left: list[Any], right: list[Any], skip: int) -> None:
    count = min(len(left), len(right))
    a, b = (pa.array(values[:count], ARROW).slice(skip) for values in (left, right))
    expected = [repr(x) == repr(y) for x, y in zip(left[skip:count], right[skip:count], strict=True)]
    assert values_equal(a, b).tolist() == expected
    numbers = value_numbers(pa.array(left, ARROW)).tolist()
    assert len({repr(x) for x in left}) == len(set(numbers))


@pytest.mark.parametrize("name", ["_hash", "_time", "_diff"])
def test_a_field_within_a_column_may_have_the_name_of_a_column_of_parts(name: str) -> None:
    schema = check_schema(ShardSchema((Column("k", "int64"), Column("v", f"struct<{name}:string,n:int16>")), ("k",)))
    rows = pa.table({"k": [1], "v": [{name: "x", "n": 2}], TIME: [5], DIFF: [1]}).cast(update_schema(schema))
    part = encode_part(schema, rows).to_part()
    assert decode_part(schema, part.inline, part).column("v").to_pylist() == [{name: "x", "n": 2}]


@pytest.mark.parametrize(
    ("other", "error"), [("é", "names a field twice"), ("É", "fields of a struct differ only in case")]
)
def test_fields_of_a_struct_differ_in_more_than_case(other: str, error: str) -> None:
    key = Column("k", "int64")
    with pytest.raises(InvalidError, match=error):
        check_schema(ShardSchema((key, Column("v", f"array<struct<`é`:int64,`{other}`:string>>")), ("k",)))
    check_schema(ShardSchema((key, Column("v", "struct<a:struct<A:int64>,b:struct<a:int64>>")), ("k",)))


def test_a_merged_part_tries_no_dictionary_for_hashes_and_keys() -> None:
    rows = pa.table({"v": [None], "k": [1], "m": [None], TIME: [5], DIFF: [1]}).cast(update_schema(SCHEMA))
    group = pq.ParquetFile(pa.BufferReader(encode_part(SCHEMA, rows, "zstd").data)).metadata.row_group(0)
    chunks = [group.column(at) for at in range(group.num_columns)]
    paths = [path for several in leaf_paths(stored_schema(SCHEMA)).values() for path in several]
    assert [chunk.path_in_schema for chunk in chunks] == paths
    without = [chunk.path_in_schema for chunk in chunks if "RLE_DICTIONARY" not in chunk.encodings]
    assert without == ["k", HASH] and "DELTA_BINARY_PACKED" in chunks[-1].encodings


def test_rows_with_nested_columns_are_compared_over_chunks() -> None:
    values = [[{"a": float(n % 3), "m": None}] for n in range(10_000)]
    column = pa.chunked_array([pa.array(values[:4_000], ARROW), pa.array(values[4_000:], ARROW)])
    table = pa.table({"v": column})
    at = np.arange(9_999)
    assert not rows_equal(table, at, table, at + 1, ["v"]).any()
    assert rows_equal(table, at, table, at, ["v"]).all()
    assert values_at(column, np.array([9_999, 0]), limit_bytes=64).to_pylist() == [values[9_999], values[0]]


def test_a_large_nested_value_counts_with_all_that_is_in_it() -> None:
    array = pa.array([[{"a": 1.0, "m": [("x" * 1000, [1] * 500)]}], [], None], ARROW)
    assert value_sizes(array).tolist() == [4 + 8 + 4 + 4 + 1000 + 4 + 1000, 4, 4]
    assert row_sizes(pa.table({"v": array, "n": [1, 2, 3]})).tolist() == [2032, 12, 12]


def test_maps_get_one_order_on_every_level() -> None:
    array = pa.array([[{"a": None, "m": [("é", [2]), ("b", None)]}], None, [None, {"a": 1.0, "m": []}]], ARROW)
    found = normalize_maps(array)
    found.validate(full=True)
    assert found.to_pylist() == [[{"a": None, "m": [("b", None), ("é", [2])]}], None, [None, {"a": 1.0, "m": []}]]
    assert normalize_maps(found).equals(found) and normalize_maps(array.slice(1)).to_pylist() == found.to_pylist()[1:]
    with pytest.raises(ValueError, match="a map has a key twice"):
        normalize_maps(pa.array([[{"a": None, "m": [("b", None), ("a", None), ("b", None)]}]], ARROW))


def rows(*found: tuple[Any, int, Any, int, int]) -> pa.Table:
    target = update_schema(SCHEMA)
    return pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(zip(*found, strict=True), target, strict=True)],
        schema=target,
    )


ONE, TWO = [{"a": math.nan, "m": [("x", [1])]}, None], [{"a": -0.0, "m": None}]


def test_a_part_keeps_nested_values_in_types_that_every_reader_has() -> None:
    updates = rows((ONE, 1, [(7, "b"), (-7, None)], 5, 1), (None, 2, None, 5, 1), ([], 3, [], 6, 1))
    encoded = encode_part(SCHEMA, updates)
    part = encoded.to_part()
    found = decode_part(SCHEMA, part.inline, part)
    assert found.schema.names[:3] == ["v", "k", "m"] and found.select(["v"]).schema.field(0).type == ARROW
    by_key = {row["k"]: row for row in found.to_pylist()}
    assert repr(by_key[1]["v"]) == repr(ONE) and by_key[1]["m"] == [(-7, None), (7, "b")]
    assert by_key[2]["v"] is None and by_key[3]["v"] == [] and by_key[3]["m"] == []
    file = pq.ParquetFile(io.BytesIO(part.inline))
    assert "int16" not in str(file.schema_arrow)
    assert file.schema_arrow.field("_hash").metadata == {b"PARQUET:field_id": b"1"}
    assert hash_bounds(file, 0) == (part.min_hash, part.max_hash)
    assert {name: len(at) for name, at in chunk_places(file.schema_arrow).items()} == {
        "v": 3, "k": 1, "m": 2, "_time": 1, "_diff": 1, "_hash": 1
    }  # fmt: skip


def test_equal_nested_rows_cancel_and_sum() -> None:
    updates = rows((ONE, 1, None, 1, 1), (ONE, 1, None, 2, -1), (TWO, 1, None, 2, 1), (TWO, 1, None, 3, 1))
    assert sum_contents(SCHEMA, updates).to_pylist() == 2 * [{"v": TWO, "k": 1, "m": None}]
    merged = merge_updates(SCHEMA, updates, 3)
    assert merged.select(["v", TIME, DIFF]).to_pylist() == [{"v": TWO, TIME: 3, DIFF: 2}]


def test_rows_that_are_written_keep_their_nested_types() -> None:
    target = contents_schema(SCHEMA)
    loose = pa.list_(
        pa.field("item", pa.struct([("a", pa.float64()), ("m", pa.map_(pa.string(), pa.list_(pa.int16())))]))
    )
    given_rows = pa.table(
        {"v": pa.array([ONE], loose), "k": [1], "m": pa.array([[(2, "x"), (1, "y")]], target.field("m").type)}
    )
    found = conform_rows(given_rows, target)
    assert found.schema == target and found.column("m").to_pylist() == [[(1, "y"), (2, "x")]]
    other = given_rows.set_column(2, "m", pa.array([[(2, "x")]], pa.map_(pa.int32(), pa.string())))
    with pytest.raises(InvalidError, match=r"column=m .*nested types are not cast"):
        conform_rows(other, target)
    twice = given_rows.set_column(2, "m", pa.array([[(2, "x"), (2, "y")]], target.field("m").type))
    with pytest.raises(InvalidError, match=r"column=m .*a key twice"):
        conform_rows(twice, target)


@pytest.mark.parametrize(
    ("kind", "given", "fits"),
    [
        ("timestamp", pa.timestamp("us", "America/New_York"), True),
        ("timestamp", pa.timestamp("us"), False),
        ("timestamp", pa.timestamp("ms", "UTC"), False),
        ("timestamp_ntz", pa.timestamp("us", "UTC"), False),
        ("int16", pa.int8(), True),
        ("int32", pa.int8(), False),
        ("string", pa.large_string(), True),
        ("binary", pa.large_binary(), True),
        ("binary", pa.large_string(), False),
    ],
)
def test_nested_values_are_cast_from_the_types_that_spark_has_for_them_only(
    kind: str, given: pa.DataType, fits: bool
) -> None:
    schema = check_schema(
        ShardSchema((Column("k", "int64"), Column("v", f"array<map<int32,struct<x:{kind}>>>")), ("k",))
    )
    target = contents_schema(schema)
    plain = pa.array([1, None], pa.int8()) if pa.types.is_integer(given) else pa.array(["1", None], pa.string())
    values = plain.cast(pa.int64()).cast(given) if pa.types.is_timestamp(given) else plain.cast(given)
    inner = pa.MapArray.from_arrays(
        [0, 1, 2], pa.array([7, 8], pa.int32()), pa.StructArray.from_arrays([values], ["x"])
    )
    table = pa.table({"k": [1, 2], "v": pa.ListArray.from_arrays([0, 1, 2], inner)})
    if not fits:
        with pytest.raises(InvalidError, match=r"column=v .*nested types are not cast"):
            conform_rows(table, target)
        return
    found = conform_rows(table, target)
    found.validate(full=True)
    leaf = found.column("v").chunk(0).values.items.field("x")
    assert leaf.equals(values.cast(arrow_type(kind))) and leaf.null_count == 1


def test_a_nested_column_is_added_and_retired_and_never_changed() -> None:
    added = evolve_schema(SCHEMA, SchemaChanges(add=(Column("w", "array< int32 >"),)))
    assert added.columns[-1].type == "array<int32>"
    assert evolve_schema(added, SchemaChanges(retire=("w",))).columns[-1].retired
    old = pa.table({name: [None] for name in ("v", "k", "m")}).cast(contents_schema(SCHEMA))
    (row,) = convert_to_schema(added, old, contents_schema(added)).to_pylist()
    assert row == {"v": None, "k": None, "m": None, "w": None}
    with pytest.raises(InvalidError, match="some values would change: column=w"):
        evolve_schema(added, SchemaChanges(widen=(Column("w", "array<int64>"),)))
    for kind in ("array<array<int32>>", "map<string,int32>"):
        with pytest.raises(InvalidError, match="nested type cannot have a default: column=x"):
            evolve_schema(added, SchemaChanges(add=(Column("x", kind, "{}"),)))
    assert not is_widening("array<int32>", "array<int64>") and not is_widening("array<int32>", "int64")
