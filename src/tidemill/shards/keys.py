"""From values of a key's columns to the hashes of the keys. Pure; says too little rather than too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import product
from math import prod
from typing import Any

import pyarrow as pa

from tidemill.shards.decimals import of_decimals
from tidemill.shards.front import ShardSchema
from tidemill.shards.hashing import hash_rows
from tidemill.shards.schema import contents_schema

KEYS_MAX = 1_000
"""More keys than this are read as all are."""


def key_hashes(schema: ShardSchema, values: Mapping[str, Sequence[Any]]) -> list[int] | None:
    """The hashes of all keys whose columns have one of their `values`, sorted; None = any key may.

    Only equality with every column of the key says something: the hash knows no order.
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
        return None  # a value that the column cannot hold; what that means is the engine's to say
    return sorted(set(hash_rows(pa.table(columns, names=list(schema.key)), schema.key).tolist()))


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind) and all(value is None or isinstance(value, Decimal | int) for value in values):
        return of_decimals([None if value is None else Decimal(value) for value in values], kind)
    return pa.array(values, kind)
