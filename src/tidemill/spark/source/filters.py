"""From filters of Spark to hashes of keys. Pure; says too little rather than too much."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import product
from math import prod
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, IsNull

from tidemill.shards.front import ShardSchema
from tidemill.shards.hashing import hash_rows
from tidemill.shards.schema import contents_schema

KEYS_MAX = 1_000
"""More keys than this are read as all are."""


def wanted_hashes(schema: ShardSchema, filters: Iterable[Filter]) -> list[int] | None:
    """The hashes of all keys that may pass every filter, sorted; None = any may.

    Only equality with every column of the key says something: the hash knows no order. Time is never asked.
    """
    found: dict[str, list[Any]] = {}
    for each in filters:
        values = _values(each)
        if values is not None and len(each.attribute) == 1:
            found.setdefault(each.attribute[0], values)  # another one of the same column is Spark's to apply
    if not schema.key or any(name not in found for name in schema.key):
        return None
    if prod(len(found[name]) for name in schema.key) > KEYS_MAX:
        return None
    combined = list(product(*(found[name] for name in schema.key)))
    try:
        columns = [
            pa.array([values[at] for values in combined], contents_schema(schema).field(name).type)
            for at, name in enumerate(schema.key)
        ]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        return None  # a value that the column cannot hold; what that means is Spark's to say
    return sorted(set(hash_rows(pa.table(columns, names=list(schema.key)), schema.key).tolist()))


def _values(filter_: Filter) -> list[Any] | None:
    """The only values of its column that may pass; None = it says nothing of that kind."""
    match filter_:
        case EqualTo(_, value):
            values = [] if value is None else [value]
        case EqualNullSafe(_, value):
            values = [value]
        case In(_, several):
            values = [value for value in several if value is not None]
        case IsNull():
            values = [None]
        case _:
            return None
    # Without a zone it is a moment that only the session knows.
    return None if any(isinstance(v, datetime) and v.tzinfo is None for v in values) else values
