"""Keys: normalisation to one representation, and hashes of key values. Pure.

Invariant (normal keys): a key has one representation. Floats that every engine considers equal are one key: −0.0 is
0.0, and all NaNs are one NaN. All commands carry normal keys, whether they come from records, tombstones, a function's
rows or a DataFrame. Text is compared byte by byte: PostgreSQL reports a row's old key in the spelling of that row,
where its own equality is wider (citext, a nondeterministic collation, numeric without a scale, jsonb).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.numbers import decimals_to_arrow
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema

KEYS_MAX = 1_000
"""Maximum number of keys to look up by hash; more are not restricted."""


def key_hashes(schema: ShardSchema, values: Mapping[str, Sequence[Any]]) -> list[int] | None:
    """Return the sorted hashes of all keys whose columns have one of their `values`.

    None = no restriction: the result may be a superset. Only equality on every key column restricts, as hashes have no
    order.
    """
    if not schema.key or any(name not in values for name in schema.key):
        return None
    if prod(len(values[name]) for name in schema.key) > KEYS_MAX:
        return None
    combined = list(product(*(values[name] for name in schema.key)))
    try:
        columns = [
            _array([row[at] for row in combined], contents_schema(schema).field(name).type)
            for at, name in enumerate(schema.key)
        ]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, ValueError, OverflowError):
        return None  # a value that the column cannot hold; the query engine decides its meaning
    return sorted(set(hash_rows(pa.table(columns, names=list(schema.key)), schema.key).tolist()))


def normalize_keys(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the rows with normal keys; the same table if they already are."""
    for name in key:
        index = rows.schema.get_field_index(name)
        field = rows.schema.field(index)
        if pa.types.is_floating(field.type):
            column = pa.chunked_array([_normalize_floats(chunk) for chunk in rows.column(index).chunks], field.type)
            rows = rows.set_column(index, field, column)
    return rows


def has_unnormalized_keys(rows: pa.Table, key: Sequence[str]) -> bool:
    """Return whether any row has a key that `normalize_keys` would change. Lookups by normal keys miss such a row."""
    for name in key:
        if not pa.types.is_floating(rows.schema.field(name).type):
            continue
        for chunk in rows.column(name).chunks:
            bits = np.uint32 if chunk.type.bit_width == 32 else np.uint64
            was, now = (each.drop_null().to_numpy().view(bits) for each in (chunk, _normalize_floats(chunk)))
            if (was != now).any():
                return True
    return False


def _normalize_floats(array: pa.Array) -> pa.Array:
    values = array.to_numpy(zero_copy_only=False)
    strange = np.isnan(values) | ((values == 0) & np.signbit(values))  # null is NaN there
    if not strange.any():
        return array
    one = np.where(np.isnan(values), values.dtype.type(np.nan), values + values.dtype.type(0))
    return pa.array(one, array.type, mask=array.is_null().to_numpy(zero_copy_only=False), from_pandas=False)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind) and all(value is None or isinstance(value, Decimal | int) for value in values):
        return decimals_to_arrow([None if value is None else Decimal(value) for value in values], kind)
    if pa.types.is_date(kind) and any(isinstance(value, datetime) and value.tzinfo is not None for value in values):
        raise ValueError("Arrow converts it to its date there, and compares it as a date of UTC")
    return pa.array(values, kind)
