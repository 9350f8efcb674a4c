"""Permanent ids of a table's columns, and of the fields within nested ones, as Iceberg knows them.

    1 `_hash`, 2 `_time`, 3 `_diff`
    4 …                    the columns, in their order
    100,000 + 1,000 n …    elements, keys, values and fields within the nth column, counted from 0; all of one level
                           precede the fields within them

Columns are only ever appended (RFC 0003), and a nested type never changes, so the ids need no storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa

from tidemill.shards.nested.type_names import FIELDS_MAX

HASH_ID, TIME_ID, DIFF_ID = 1, 2, 3
FIRST_ID = 4
NESTED_ID = 100_000
NESTED_IDS = 1_000
assert FIELDS_MAX < NESTED_IDS

_PARQUET_ID = "PARQUET:field_id"


def ids_within(place: int) -> Iterator[int]:
    """Yield the ids of the fields within a column, in the order of their assignment."""
    return itertools.count(NESTED_ID + place * NESTED_IDS)


def with_field_ids(field: pa.Field, number: int, ids: Iterator[int]) -> pa.Field:
    """Return the field with its id for Parquet, and with those of the fields within it."""
    return field.with_type(_type_with_ids(field.type, ids)).with_metadata({_PARQUET_ID: str(number)})


def _type_with_ids(kind: pa.DataType, ids: Iterator[int]) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(with_field_ids(kind.value_field, next(ids), ids))
    if pa.types.is_map(kind):
        key, value = next(ids), next(ids)
        return pa.map_(with_field_ids(kind.key_field, key, ids), with_field_ids(kind.item_field, value, ids))
    if pa.types.is_struct(kind):
        numbers = [next(ids) for _ in range(kind.num_fields)]
        return pa.struct([with_field_ids(field, each, ids) for field, each in zip(kind, numbers, strict=True)])
    return kind
