"""From filters of Spark to hashes of keys. Pure; says too little rather than too much."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, IsNull

from tidemill.shards.front import ShardSchema
from tidemill.shards.keys import key_hashes


def wanted_hashes(schema: ShardSchema, filters: Iterable[Filter]) -> list[int] | None:
    """The hashes of all keys that may pass every filter, sorted; None = any may.

    Only equality with every column of the key says something: the hash knows no order. Time is never asked.
    """
    found: dict[str, list[Any]] = {}
    for each in filters:
        values = _values(each)
        if values is not None and len(each.attribute) == 1:
            found.setdefault(each.attribute[0], values)  # another one of the same column is Spark's to apply
    return key_hashes(schema, found)


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
