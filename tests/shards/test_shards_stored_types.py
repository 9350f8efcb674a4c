"""A part's file has types that every Parquet reader knows, and reads as the shard has it; so does an earlier part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, HASH, TIME, Column, Part, ShardSchema
from tidemill.shards.parts.parts import EncodedPart, decode_part, encode_part, sort_updates
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import part_schema, update_schema
from tidemill.shards.parts.stored_types import hash_bounds, hashes_of
from tidemill.shards.read.deletion_vectors import deletion_vectors
from tidemill.shards.read.planned_rows import read_planned
from tidemill.shards.read.read_plan import _read_insertion_times, last_states

SCHEMA = ShardSchema((Column("k", "int16"), Column("v", "int16")), ("k",))
KEYS = st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=40, unique=True)


def insertions(keys: list[int], value: int = 1, time_ms: int = 1) -> pa.Table:
    count = len(keys)
    columns = {"k": keys, "v": [value] * count, TIME: [time_ms] * count, DIFF: [1] * count}
    return pa.table(columns, schema=update_schema(SCHEMA))


def encode_earlier(rows: pa.Table) -> EncodedPart:
    """Encode a part as earlier versions did: with the types that it has in memory."""
    hashes = hash_rows(rows, SCHEMA.key)
    order = sort_updates(rows, hashes)
    if order is not None:
        rows, hashes = rows.take(order), hashes[order]
    sink = pa.BufferOutputStream()
    pq.write_table(rows.append_column(HASH, pa.array(hashes)), sink)
    return EncodedPart(sink.getvalue(), rows.num_rows, int(hashes[0]), int(hashes[-1]))


FORMS = [lambda rows: encode_part(SCHEMA, rows), encode_earlier]


def test_no_column_of_a_file_is_unsigned_or_smaller_than_32_bits_and_the_file_is_in_the_order_of_its_hash() -> None:
    encoded = encode_part(SCHEMA, insertions(list(range(2_000))))
    file = pq.ParquetFile(pa.BufferReader(encoded.data))
    types = [(each.physical_type, each.logical_type.type) for each in (file.schema.column(i) for i in range(5))]
    assert types == [("INT32", "NONE")] * 2 + [("INT64", "NONE")] * 3
    stored = file.read().column(HASH).to_numpy()
    assert (np.diff(stored) > 0).all() and stored[0] < 0 < stored[-1]
    assert hash_bounds(file, 0) == (encoded.min_hash, encoded.max_hash)


@given(KEYS)
def test_both_forms_of_a_part_read_the_same(keys: list[int]) -> None:
    now, earlier = (encode(insertions(keys)) for encode in FORMS)
    assert (now.min_hash, now.max_hash) == (earlier.min_hash, earlier.max_hash)
    read = [decode_part(SCHEMA, each.data, each.to_part()) for each in (now, earlier)]
    assert read[0].schema.equals(part_schema(SCHEMA))
    assert read[0].equals(read[1])
    files = [pq.ParquetFile(pa.BufferReader(each.data)) for each in (now, earlier)]
    assert hash_bounds(files[0], 0) == hash_bounds(files[1], 0) == (now.min_hash, now.max_hash)
    assert (hashes_of(files[0].read().column(HASH)) == hash_rows(read[0], SCHEMA.key)).all()


@pytest.mark.parametrize("encode", FORMS)
@given(keys=KEYS, changed=st.sets(st.integers(0, 39), max_size=10))
def test_a_planned_read_has_the_types_of_the_table_and_skips_the_superseded_rows(
    encode: Any, keys: list[int], changed: set[int]
) -> None:
    again = [keys[at] for at in sorted(changed) if at < len(keys)]
    part = encode(insertions(keys)).to_part(object_key="a")
    data = {"a": encode(insertions(keys)).data}

    def fetch(wanted: Part) -> pa.Buffer:
        return data[wanted.object_key]

    assert _read_insertion_times(part, SCHEMA, fetch) == (1, 1), "a plan is possible"
    gone = insertions(again, 1, 2).set_column(3, DIFF, pa.array([-1] * len(again), pa.int64()))
    rest = pa.concat_tables([insertions(again, 2, 2), gone])
    plan = last_states(SCHEMA, rest.append_column(HASH, pa.array(hash_rows(rest, SCHEMA.key))))
    assert plan is not None
    plan = plan._replace(settled=[part])
    pieces = list(read_planned(plan, deletion_vectors(plan, SCHEMA, fetch), fetch, ["v", "k"]))
    rows = pa.concat_tables(pieces)
    assert rows.schema.types == [pa.int16(), pa.int16()]
    found = dict(zip(rows.column("k").to_pylist(), rows.column("v").to_pylist(), strict=True))
    assert found == {key: 2 if key in again else 1 for key in keys}
    assert rows.num_rows == len(keys)


def test_a_number_that_the_column_cannot_hold_is_damage() -> None:
    wide = ShardSchema((Column("k", "int16"), Column("v", "int32")), ("k",))
    rows = pa.table({"k": [1], "v": [70_000], TIME: [1], DIFF: [1]}, schema=update_schema(wide))
    encoded = encode_part(wide, rows)
    with pytest.raises(CorruptError, match="too large: column=v"):
        decode_part(SCHEMA, encoded.data, encoded.to_part())
