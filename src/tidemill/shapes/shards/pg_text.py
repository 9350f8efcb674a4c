"""Prints Arrow columns as PostgreSQL's text output, and the rows of Arrow tables as such text, a few at a time.

    bool        true / false                 date        2024-01-31, infinity
    integers    digits                       timestamp   2024-01-31 10:20:30.5+00, infinity (UTC; no +00 without
                                                         a zone)
    floats      shortest digits that read    decimal     digits with the column's scale
                back, 1e+20, NaN, Infinity   binary      \\x00ff
    string, json unchanged                   array, struct, map   as JSON (json_text.py)

Years outside 1 … 9999 are beyond Python's datetime, so dates are computed from day counts here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from tidemill.base.pgtypes.text import DAY_US
from tidemill.shards.parts.pg_columns import DATE_INFINITY, TIMESTAMP_INFINITY

if TYPE_CHECKING:
    import pyarrow as pa


def text_columns(table: pa.Table, names: Sequence[str]) -> list[list[str | None]]:
    """Return the named columns as lists of text, None for NULL."""
    return [column_text(table.column(name)) for name in names]


def column_text(array: Any) -> list[str | None]:
    """Return the values of an Arrow array, or a chunked one, as text; None for NULL."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_nested(kind):
        from tidemill.shapes.shards.json_text import nested_texts  # which prints leaves with this function

        chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
        return [text for chunk in chunks for text in nested_texts(chunk)]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return list(array.to_pylist())
    if pa.types.is_date32(kind):
        return _map_values(array.cast(pa.int32()).to_pylist(), date_text)
    if pa.types.is_timestamp(kind):
        micros = array.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        return _map_values(micros.to_pylist(), timestamp_text if kind.tz else timestamp_ntz_text)
    if pa.types.is_boolean(kind):
        return _map_values(array.to_pylist(), lambda value: "true" if value else "false")
    if pa.types.is_float32(kind):
        return _map_values(array.to_pylist(), float4_text)
    if pa.types.is_float64(kind):
        return _map_values(array.to_pylist(), float8_text)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _map_values(array.to_pylist(), lambda value: "\\x" + value.hex())
    if pa.types.is_decimal(kind):
        return _map_values(array.to_pylist(), lambda value: format(value, "f"))
    return _map_values(array.to_pylist(), str)


def _map_values(values: list[Any], function: Callable[[Any], str]) -> list[str | None]:
    return [None if value is None else function(value) for value in values]


def float8_text(value: float) -> str:
    """Return the shortest text that reads back, in PostgreSQL's layout (exponent form from 1e+15 and below 1e-04)."""
    shortest = repr(value)
    if 2.0**53 <= abs(value) < math.inf:
        beyond = math.copysign(math.inf, value)
        shortest = _avoid_midpoints(value, shortest, math.nextafter(value, 0.0), math.nextafter(value, beyond))
    return _float_text(value, shortest, 15)


def float4_text(value: float) -> str:
    """Return the text of a single precision number, whose exponent form starts at 1e+06."""
    import numpy as np

    single = np.float32(value)
    shortest = str(single)
    if 2.0**24 <= abs(value) < math.inf:
        with np.errstate(over="ignore"):
            above = float(np.nextafter(single, np.float32(np.copysign(np.inf, single))))
        shortest = _avoid_midpoints(value, shortest, float(np.nextafter(single, np.float32(0))), above)
    return _float_text(value, shortest, 6)


def _avoid_midpoints(value: float, shortest: str, below: float, above: float) -> str:
    """Add digits to a text that is exactly a midpoint between neighbors: PostgreSQL requires a text strictly between
    them.

    Only values whose neighbors are at least 2 apart have midpoints that short.
    """
    exact = int(value)
    midpoints = {exact + int(below), exact + int(above) if math.isfinite(above) else None}
    digits = len(shortest.lstrip("-").partition("e")[0].replace(".", "").strip("0"))
    while 2 * Decimal(shortest) in midpoints:
        shortest = f"{value:.{digits}e}"
        digits += 1
    return shortest


def _float_text(value: float, shortest: str, exponent_from: int) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign = "-" if shortest.startswith("-") else ""
    mantissa, _, exponent_text = shortest.lstrip("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    if fraction == "0":
        fraction = ""
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return f"{sign}0"
    point = len(whole) + int(exponent_text or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    exponent = point - 1
    if exponent < -4 or exponent >= exponent_from:
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if len(digits) <= point:
        return sign + digits + "0" * (point - len(digits))
    return f"{sign}{digits[:point]}.{digits[point:]}"


def civil_from_days(days: int) -> tuple[int, int, int]:
    """Return (year, month, day) of a day count since 1970-01-01, proleptic Gregorian; year 0 is 1 BC."""
    era, day_of_era = divmod(days + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * day_of_year + 2) // 153
    month = shifted_month + 3 if shifted_month < 10 else shifted_month - 9
    return year_of_era + era * 400 + (month <= 2), month, day_of_year - (153 * shifted_month + 2) // 5 + 1


def _day_text(days: int) -> tuple[str, str]:
    year, month, day = civil_from_days(days)
    return f"{year if year > 0 else 1 - year:04d}-{month:02d}-{day:02d}", "" if year > 0 else " BC"


def date_text(days: int) -> str:
    if abs(days) == DATE_INFINITY:
        return "infinity" if days > 0 else "-infinity"
    text, era = _day_text(days)
    return text + era


def timestamp_text(micros: int) -> str:
    return _moment_text(micros, "+00")


def timestamp_ntz_text(micros: int) -> str:
    """Return the text of a timestamp without a zone."""
    return _moment_text(micros, "")


def _moment_text(micros: int, zone: str) -> str:
    if abs(micros) == TIMESTAMP_INFINITY:
        return "infinity" if micros > 0 else "-infinity"
    days, rest = divmod(micros, DAY_US)
    text, era = _day_text(days)
    seconds, fraction = divmod(rest, 1_000_000)
    shown = f".{fraction:06d}".rstrip("0") if fraction else ""
    return f"{text} {seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{shown}{zone}{era}"


Row = dict[str, str | None]

SLICE_ROWS = 100
"""Rows converted to text together: one or two milliseconds for wide rows."""


def table_slices(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, SLICE_ROWS):
        yield table.slice(start, SLICE_ROWS)


def slice_rows(table: pa.Table, names: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a small table."""
    columns = text_columns(table, names)
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def table_rows(table: pa.Table, names: tuple[str, ...]) -> Iterator[Row]:
    for part in table_slices(table):
        yield from slice_rows(part, names)
