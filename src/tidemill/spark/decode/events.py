"""Change events (capture's Debezium envelope) → position of the row in each; and values in their forms → shard columns.

    {"before":…,"after":{row},"source":{…},…"op":"c|u|r",…}   the row after the change
    {"before":…,"after":null,…"op":"d",…}                     nothing: the tombstone after it carries the deletion
    {"before":null,"after":null,…"op":"t",…}                  every live key of the table is deleted; the key is absent

Events are located by pattern, many at a time: a quote within a JSON string is escaped, and no column's value is an
object, so the patterns occur only where the envelope has them. An ambiguous event is parsed individually.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.pgtypes.debezium import (
    CLOCKS,
    DATE_INFINITY,
    INFINITY,
    MILLIS,
    MINUS_INFINITY,
    NUMBERS,
    clock_text,
    zoned_text,
)
from tidemill.shards.api import Column
from tidemill.shards.parts.pg_columns import TIMESTAMP_INFINITY, cast_text, parse_column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.newline_text import Mask, Places, bytes_of_ranges
from tidemill.topics.batch import RecordColumns

TRUNCATED, DELETED = "t", "d"
_AFTER, _GONE, _SOURCE = b',"after":{', b',"after":null,"source":{"version":', b'},"source":{"version":'
_DAY_US = 86_400_000_000


class Event(msgspec.Struct, frozen=True):
    """Fields that are read of an event. Decoding raises msgspec's errors for values that are not events."""

    op: str
    after: msgspec.Raw


read_event = msgspec.json.Decoder(Event).decode


def locate_rows(columns: RecordColumns, places: Places) -> tuple[Places, Places, Places, Places]:
    """Locate the rows in the events at `places`: return (starts, sizes, places, places of events that must be parsed).

    Deletions are in neither.
    """
    if not len(places):
        return places, places, places, places
    at, sizes = columns.value_at[places], columns.value_bytes[places]
    values = bytes_of_ranges(pa.py_buffer(columns.body), at, at + sizes, np.ones(len(at), dtype=bool))
    begins, ends = _find_pattern(values, _AFTER), _find_pattern(values, _SOURCE)
    good = (begins >= 0) & (ends > begins)
    gone = ~good & (columns.key_bytes[places] >= 0) & (_find_pattern(values, _GONE) >= 0)
    starts = begins[good] + len(_AFTER) - 1
    return at[good] + starts, ends[good] + 1 - starts, places[good], places[~good & ~gone]


def _find_pattern(values: pa.Array, pattern: bytes) -> Places:
    return np.asarray(pc.find_substring(values, pattern), dtype=np.int64)


def arrow_input_type(form: str) -> pa.DataType | None:
    """Return the type that Arrow shall read; None for a form that needs no conversion."""
    return pa.int64() if form in NUMBERS else None


def convert_form(form: str, column: Column, array: pa.Array, odd: Mask) -> pa.Array | None:
    """Convert an array of a form; see block_decoder.Dialect. None for a form that needs no conversion."""
    if form == "hex":
        return cast_text(pc.binary_join_element_wise("\\x", array, ""), column.type)
    if form not in NUMBERS:
        return None
    numbers = np.asarray(array.fill_null(0))
    low, high = _LIMITS[form]
    strange = (numbers <= low) | (numbers >= high)
    odd |= strange
    numbers = np.where(strange, 0, numbers) * (1_000 if form in MILLIS else 1)
    mask = np.asarray(array.is_null())
    if form == "days":
        return pa.array(numbers.astype(np.int32), mask=mask).view(pa.date32())
    micros = pa.array(numbers, mask=mask)
    if form not in CLOCKS:
        return micros.view(arrow_type(column.type))
    # Arrow prints six fractional digits; PostgreSQL omits trailing zeros.
    return pc.utf8_rtrim(pc.utf8_rtrim(micros.view(pa.time64("us")).cast(pa.string()), "0"), ".")


def convert_values(form: str, values: Sequence[Any], column: Column) -> pa.Array | None:
    """Convert value by value, as `convert_form`. None for a form that needs no conversion. Raises ValueError,
    InvalidError, ArrowInvalid."""
    if form == "hex":
        return parse_column([None if v is None else f"\\x{v}" for v in values], column)
    if form == "zoned":
        return parse_column([None if v is None else zoned_text(v) for v in values], column)
    if form not in NUMBERS:
        return None
    found = [None if v is None else _NUMBER[form](_integer(v)) for v in values]
    if form in CLOCKS:
        return pa.array(found, pa.string())
    if form == "days":
        return pa.array(found, pa.int32()).view(pa.date32())
    return pa.array(found, pa.int64()).view(arrow_type(column.type))


def _integer(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"not a number: {value!r}"[:80])
    return value


def _days(days: int) -> int:
    return max(-DATE_INFINITY, min(days, DATE_INFINITY))


def _micros(micros: int) -> int:
    if micros in (INFINITY, MINUS_INFINITY):
        return TIMESTAMP_INFINITY if micros > 0 else -TIMESTAMP_INFINITY
    if abs(micros) >= TIMESTAMP_INFINITY:
        raise ValueError("out of range")
    return micros


def _millis(millis: int) -> int:
    if millis in (INFINITY // 1_000, MINUS_INFINITY // 1_000):
        return TIMESTAMP_INFINITY if millis > 0 else -TIMESTAMP_INFINITY
    return _micros(millis * 1_000)


_NUMBER: dict[str, Any] = {
    "days": _days,
    "micros": _micros,
    "millis": _millis,
    "clock_micros": clock_text,
    "clock_millis": lambda millis: clock_text(millis * 1_000),
}
_LIMITS = {
    "days": (-DATE_INFINITY, DATE_INFINITY),
    "micros": (MINUS_INFINITY, INFINITY),
    "millis": (MINUS_INFINITY // 1_000, INFINITY // 1_000),
    "clock_micros": (-1, _DAY_US),
    "clock_millis": (-1, _DAY_US // 1_000),
}
"""Exclusive range in which values need no special handling."""
