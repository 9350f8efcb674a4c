"""Values of a writer's types → columns of declared types: by columns, exact or an error.

A reader of a format gives the values of one field as an Arrow array of the field's raw type; a number stays a number
even if its type means a date. The pair of types decides once how that array becomes the column.

    bool int uint float double string bytes    unchanged
    null                                       null in every record
    json                                       text of a JSON value
    decimal                                    two's complement, big-endian, of the unscaled number
    date, millis micros nanos, local_…         days or units since 1970; an instant, or a local date and time
    clock_millis clock_micros clock_nanos      units since midnight
    uuid_bytes                                 16 bytes

Text becomes a date, a timestamp or a decimal by the rules of JSON topics (decode/stream.py), and a plain integer
becomes a timestamp as the milliseconds that it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.pgtypes.debezium import clock_text
from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.numbers import decimals_to_arrow, narrow_to_float32
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.block_decoder import Block, to_bool_mask
from tidemill.spark.decode.row_decoder import values_to_columns
from tidemill.spark.decode.stream import FIRST_US, LAST_US, convert_plain_values
from tidemill.spark.formats.nested_conversion import Parts, nested_conversion

Convert = Callable[[Any], pa.Array]
"""Conversion of one field's raw values: an array, or for a nested column a list of decoded values.

Raises ValueError or ArrowInvalid if the column cannot hold one of them.
"""


class SourceType(NamedTuple):
    """Type of a writer's field. `scale`: of a decimal; `parts`: inside of an array, a map or a record, of kind json."""

    kind: str
    scale: int = 0
    parts: Callable[[], Parts] | None = None

    def __str__(self) -> str:
        return self.parts().kind if self.parts is not None else self.kind


RAW_TYPES: dict[str, pa.DataType] = {
    "null": pa.null(), "bool": pa.bool_(), "uint": pa.uint64(), "float": pa.float32(), "double": pa.float64(),
    "string": pa.string(), "json": pa.string(), "bytes": pa.binary(), "decimal": pa.binary(),
    "uuid_bytes": pa.binary(),
}  # fmt: skip
_INTEGERS = frozenset({"int16", "int32", "int64"})
_FLOATS = frozenset({"float32", "float64"})
_INT64_BYTES, _INT64_DIGITS = 8, 18
_DAY_US = 86_400_000_000
_FIRST_DAY, _LAST_DAY = FIRST_US // _DAY_US, LAST_US // _DAY_US
_UNITS_PER_MS = {"millis": 1, "micros": 1_000, "nanos": 1_000_000}


def raw_type(source: SourceType) -> pa.DataType:
    """Return the Arrow type of the field's raw values; all other kinds are integers."""
    return RAW_TYPES.get(source.kind, pa.int64())


def find_conversion(source: SourceType, column: Column) -> Convert | None:
    """Return the conversion, or None if no value of the source can be one of the column."""
    kind, target = source.kind, column.type
    if is_nested(target):
        return nested_conversion(source, target, _find_leaf_conversion)
    if kind == "null":
        return partial(_cast, column)
    if raw_type(source) == pa.int64() and target in _INTEGERS:
        return partial(_cast, column)  # also days and units, as the numbers that they are
    if kind in ("int", "uint"):
        return _from_integers(column)
    if kind in ("float", "double"):
        return partial(_floats, column) if target in _FLOATS else None
    if kind == "string":
        return _from_texts(column)
    if kind == "decimal":
        return partial(_decimals, source.scale, column) if target == "string" or _is_decimal(column) else None
    if kind == "uuid_bytes" and target == "string":
        return _uuid_texts
    if kind.startswith("clock_"):
        return partial(_clock_texts, kind.removeprefix("clock_")) if target == "string" else None
    moments = {"date": "date"} | dict.fromkeys(_UNITS_PER_MS, "timestamp")
    moments |= {f"local_{unit}": "timestamp_ntz" for unit in _UNITS_PER_MS}
    if kind in moments:
        if moments[kind] != target:
            return None
        return _dates if kind == "date" else partial(_timestamps, kind.removeprefix("local_"), column)
    same = {"bool": "bool", "bytes": "binary", "uuid_bytes": "binary", "json": "json"}
    return _unchanged if same.get(kind) == target else None


def _find_leaf_conversion(source: SourceType, column: Column) -> Convert | None:
    """Return the conversion of decoded values inside of a nested value."""
    found = find_conversion(source, column)
    return None if found is None else lambda values: found(pa.array(values, raw_type(source)))


def _unchanged(array: pa.Array) -> pa.Array:
    return array


def _is_decimal(column: Column) -> bool:
    return column.type.startswith("decimal")


def _cast(column: Column, array: pa.Array) -> pa.Array:
    return array.cast(arrow_type(column.type))


def _from_integers(column: Column) -> Convert | None:
    if column.type in _INTEGERS:
        return partial(_cast, column)
    if column.type in _FLOATS:
        return lambda array: _floats(column, array.cast(pa.float64(), safe=False))
    if _is_decimal(column):
        kind = arrow_type(column.type)
        return lambda array: decimals_to_arrow([None if v is None else Decimal(v) for v in array.to_pylist()], kind)
    return partial(_timestamps, "millis", column) if column.type == "timestamp" else None


def _from_texts(column: Column) -> Convert | None:
    if column.type == "string":
        return _unchanged
    if column.type == "json":
        return _json_texts
    if column.type in ("date", "timestamp", "timestamp_ntz") or _is_decimal(column):
        return lambda array: convert_plain_values(array.to_pylist(), column)
    return None


def _json_texts(array: pa.Array) -> pa.Array:
    for text in array.to_pylist():
        if text is not None:
            msgspec.json.decode(text)
    return array


def _floats(column: Column, array: pa.Array) -> pa.Array:
    if column.type == "float64" or pa.types.is_float32(array.type):
        return array.cast(arrow_type(column.type))
    found, beyond = narrow_to_float32(array)
    if beyond.any():
        raise ValueError("beyond a float32")
    return found


def _decimals(scale: int, column: Column, array: pa.Array) -> pa.Array:
    kind = arrow_type(column.type)
    if pa.types.is_decimal(kind) and kind.scale == scale and kind.precision <= _INT64_DIGITS:
        found = _small_decimals(array, kind)
        if found is not None:
            return found
    values = [None if v is None else unscaled_decimal(v, scale) for v in array.to_pylist()]
    if column.type == "string":
        return pa.array([None if v is None else f"{v:f}" for v in values], pa.string())
    return decimals_to_arrow(values, arrow_type(column.type))


def _small_decimals(array: pa.Array, kind: pa.Decimal128Type) -> pa.Array | None:
    """Return decimals of at most 8 bytes without an object per value; None if one is larger, or has too many digits."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    sizes = np.diff(bounds)
    if not len(array) or data is None or int(sizes.max()) > _INT64_BYTES:
        return None
    text = np.frombuffer(data, dtype=np.int8)
    numbers = np.zeros(len(array), dtype=np.int64)
    if not len(text):
        return None
    for place in range(int(sizes.max())):
        at = np.minimum(bounds[:-1] + place, len(text) - 1)
        low = text[at].astype(np.int64) if place == 0 else (numbers << 8) | text[at].view(np.uint8)
        numbers = np.where(place < sizes, low, numbers)
    limit = 10**kind.precision
    if ((numbers <= -limit) | (numbers >= limit)).any():
        return None
    words = np.empty((len(array), 2), dtype=np.int64)
    words[:, 0], words[:, 1] = numbers, numbers >> 63
    valid = (
        None if not array.null_count else pa.py_buffer(np.packbits(to_bool_mask(array.is_valid()), bitorder="little"))
    )
    return pa.Array.from_buffers(kind, len(array), [valid, pa.py_buffer(words)])


def unscaled_decimal(data: bytes, scale: int) -> Decimal:
    """Return the number whose unscaled value is the two's complement `data`. It is exact."""
    number = int.from_bytes(data, "big", signed=True)
    return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale))


def _uuid_texts(array: pa.Array) -> pa.Array:
    return pa.array([None if v is None else str(UUID(bytes=v)) for v in array.to_pylist()], pa.string())


def _clock_texts(unit: str, array: pa.Array) -> pa.Array:
    values = array.to_pylist()
    return pa.array([None if v is None else clock_text(_to_micros(v, unit)) for v in values], pa.string())


def _to_micros(value: int, unit: str) -> int:
    nanos = value * (1_000_000 // _UNITS_PER_MS[unit])
    if nanos % 1_000:
        raise ValueError("finer than a microsecond; declare the column as bigint")
    return nanos // 1_000


def _dates(array: pa.Array) -> pa.Array:
    _check_range(array, _FIRST_DAY, _LAST_DAY)
    return array.cast(pa.int32()).view(pa.date32())


def _timestamps(unit: str, column: Column, array: pa.Array) -> pa.Array:
    array = array.cast(pa.int64())
    if unit == "nanos":
        micros = pc.divide(array, 1_000)  # towards zero, which the comparison does not mind
        if not pc.all(pc.equal(pc.multiply(micros, 1_000), array), min_count=0).as_py():
            raise ValueError("finer than a microsecond; declare the column as bigint")
        array = micros
    elif unit == "millis":
        _check_range(array, FIRST_US // 1_000, LAST_US // 1_000)
        array = pc.multiply(array, 1_000)
    _check_range(array, FIRST_US, LAST_US)
    return array.cast(arrow_type(column.type))


def _check_range(array: pa.Array, low: int, high: int) -> None:
    seen = pc.min_max(array)
    if array.null_count < len(array) and not (low <= seen["min"].as_py() and seen["max"].as_py() <= high):
        raise ValueError("not between the years 1 and 9999 in UTC")


class ColumnPlan:
    """Conversions of the fields that one schema has to columns. `problem`: why its records cannot be rows, "" = they
    can."""

    def __init__(self, columns: Sequence[Column], sources: Mapping[str, SourceType], schema: str) -> None:
        """Find the conversions. `sources`: types of the fields, by name; `schema`: its name in messages."""
        self.columns = columns
        self.problem = ""
        self._conversions: dict[str, Convert] = {}
        for column in columns:
            source = sources.get(column.name)
            source = source if source is not None else SourceType("null")
            found = find_conversion(source, column)
            if found is None:
                self.problem = self.problem or (
                    f"column={column.name}: {schema} has {source}, which is never {column.type}"
                )
            else:
                self._conversions[column.name] = found

    def convert(
        self, arrays: Mapping[str, Any], places: Sequence[int], dead: list[tuple[int, str]]
    ) -> tuple[dict[str, pa.Array], list[int]]:
        """Return (columns of the valid records, their places); the others are added to `dead`. A column without an
        array is null."""
        found = (arrays[c.name] if c.name in arrays else pa.nulls(len(places)) for c in self.columns)
        return values_to_columns(self.columns, found, list(places), dead, self._to_arrow)

    def _to_arrow(self, values: Any, column: Column) -> pa.Array:
        return self._conversions[column.name](values)


def no_columns(columns: Sequence[Column]) -> Block:
    """Return a block without rows."""
    return Block(np.zeros(0, dtype=np.int64), {c.name: pa.nulls(0, arrow_type(c.type)) for c in columns})
