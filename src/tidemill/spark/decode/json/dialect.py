"""Dialect of JSON that other producers write for a declared schema, as far as Arrow and the row-by-row decoder
(stream.py) read it alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.api import Column
from tidemill.shards.nested.type_names import ArrayType, StructType, has_map, is_nested, leaf_types, nested_type
from tidemill.shards.parts.numbers import DIGITS, narrow_to_float32
from tidemill.shards.parts.schema import TIMESTAMPS, arrow_type
from tidemill.spark.decode.block_decoder import non_finite_mask, to_bool_mask
from tidemill.spark.decode.newline_text import Mask

_US_OF_DAY = 86_400_000_000
_DATE = r"^(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-\d\d-\d\d"
_CLOCK = r"T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?"
_FORMS = {
    "date": _DATE + "$",
    "timestamp": _DATE + _CLOCK + r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$",
    "timestamp_ntz": _DATE + _CLOCK + "$",
}
_PLAIN = frozenset({"string", "bool", "int16", "int32", "int64", "float32", "float64"})
_NUMBER = re.compile(rb"-?\d+$")


class DeclaredDialect:
    """Dialect of a declared schema; see block_decoder.Dialect. `us_range`: timestamps that the table may hold, in
    µs."""

    exact = False

    def __init__(self, key: Sequence[str], us_range: tuple[int, int]) -> None:
        self._key = frozenset(key)
        self._us_range = us_range

    @staticmethod
    def supports(columns: Sequence[Column]) -> bool:
        """Return whether these columns can be read in blocks."""
        leaves = {leaf for column in columns for leaf in leaf_types(column.type)}
        known = all(leaf in _PLAIN or leaf in _FORMS or leaf.startswith("decimal") for leaf in leaves)
        return known and not any(has_map(column.type) for column in columns)

    def arrow_input_type(self, column: Column, seen: bytes) -> pa.DataType:
        nested = nested_type(column.type)
        if isinstance(nested, ArrayType):
            return pa.list_(pa.field("element", self.arrow_input_type(Column("", nested.element), b"")))
        if isinstance(nested, StructType):
            return pa.struct(
                [pa.field(name, self.arrow_input_type(Column("", kind), b"")) for name, kind in nested.fields]
            )
        if column.type in _FORMS:
            return pa.int64() if column.type == "timestamp" and _NUMBER.match(seen) else pa.string()
        kind = arrow_type(column.type)
        if pa.types.is_decimal(kind):
            return pa.decimal256(DIGITS, kind.scale)  # wide enough for every product of Arrow's reader: none overflows
        return pa.float64() if column.type == "float32" else kind

    def convert(self, column: Column, array: pa.Array, odd: Mask) -> pa.Array:
        if is_nested(column.type):
            return self._convert_nested(column.type, array, odd)
        if array.null_count and column.name in self._key:
            odd |= to_bool_mask(array.is_null())
        if column.type in _FORMS:
            if pa.types.is_integer(array.type):
                return _millis_to_timestamps(array, self._us_range, odd)
            return _parse_moments(array, column.type, self._us_range, odd)
        if pa.types.is_decimal(array.type):
            return array.cast(arrow_type(column.type))
        if column.type in ("float32", "float64"):
            odd |= non_finite_mask(array)
        if column.type == "float32":
            array, beyond = narrow_to_float32(array)
            odd |= beyond
        return array

    def _convert_nested(self, type_name: str, array: pa.Array, odd: Mask) -> pa.Array:
        kind = nested_type(type_name)
        mask = array.is_null() if array.null_count else None
        if isinstance(kind, StructType):
            fields = [
                self.convert(Column("", inner), field, odd)
                for (_, inner), field in zip(kind.fields, array.flatten(), strict=True)
            ]
            return pa.StructArray.from_arrays(fields, fields=list(arrow_type(type_name)), mask=mask)
        assert isinstance(kind, ArrayType)  # `supports` excludes maps
        elements = array.flatten()
        sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=np.int64)
        odd_elements = np.zeros(len(elements), dtype=bool)
        found = self.convert(Column("", kind.element), elements, odd_elements)
        odd[np.repeat(np.arange(len(array)), sizes)[odd_elements]] = True
        places = pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())
        return pa.ListArray.from_arrays(places, found, type=arrow_type(type_name), mask=mask)


def _parse_moments(texts: pa.Array, kind: str, us_range: tuple[int, int], odd: Mask) -> pa.Array:
    """Convert ISO 8601 texts to dates or timestamps (`kind`). Texts in an unusual form, or out of range, are added to
    `odd` and become null. Raises ArrowInvalid if a text of the usual form is no valid date, e.g. the 30th of
    February."""
    if not _have_common_form(texts, kind):
        strange = pc.fill_null(pc.invert(pc.match_substring_regex(texts, _FORMS[kind])), False)
        odd |= to_bool_mask(strange)
        texts = pc.if_else(strange, None, texts)
    found = texts.cast(arrow_type(kind))
    low, high = us_range if kind in TIMESTAMPS else (us_range[0] // _US_OF_DAY, us_range[1] // _US_OF_DAY)
    return _mask_out_of_range(found, low, high, odd)


def _millis_to_timestamps(numbers: pa.Array, us_range: tuple[int, int], odd: Mask) -> pa.Array:
    """Convert integer milliseconds to timestamps. Values out of range are added to `odd` and become null."""
    found = _mask_out_of_range(numbers, us_range[0] // 1000 + 1, us_range[1] // 1000, odd)
    return pc.multiply(found, 1000).cast(arrow_type("timestamp"))


def _mask_out_of_range(array: pa.Array, low: int, high: int, odd: Mask) -> pa.Array:
    """Add values outside [low, high] to `odd` and make them null."""
    numbers = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    seen = pc.min_max(numbers)
    if not numbers.null_count < len(numbers) or (low <= seen["min"].as_py() and seen["max"].as_py() <= high):
        return array
    strange = pc.fill_null(pc.or_(pc.less(numbers, low), pc.greater(numbers, high)), False)
    odd |= to_bool_mask(strange)
    return pc.if_else(strange, None, array)


def _have_common_form(texts: pa.Array, kind: str) -> bool:
    """Return whether all texts have a common length and ending: 2026-11-22, 2026-11-22T01:02:03.5Z.

    Of such texts Arrow's cast accepts only those that the other reader accepts with the same result: neither +02 nor
    a partial time has such a length and ending.
    """
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    ends, sizes = places[1:], np.diff(places)
    if texts.null_count:
        valid = to_bool_mask(texts.is_valid())
        ends, sizes = ends[valid], sizes[valid]
    if not len(ends):
        return True
    low, high = int(sizes.min()), int(sizes.max())
    if kind == "date":
        return low == high == 10
    if kind == "timestamp_ntz":  # of 19 and more characters the cast accepts only complete times, without a zone
        return low >= 19 and high <= 26
    return low >= 20 and high <= 27 and bool((np.frombuffer(data, dtype=np.uint8)[ends - 1] == ord("Z")).all())
