"""Values of captured rows → Arrow columns: from PostgreSQL's texts, and from their JSON (captured.py).

Arrow casts ordinary values by columns. Values that only PostgreSQL writes (NaN, infinity, years of another length, BC)
are marked and read one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Column
from tidemill.shards.nested.pg_arrays import map_elements, split_arrays
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.numbers import narrow_to_float32
from tidemill.shards.parts.pg_columns import cast_text, element_type, parse_column
from tidemill.shards.parts.schema import FLOATS, TIMESTAMPS, arrow_type
from tidemill.spark.decode import events
from tidemill.spark.decode.block_decoder import non_finite_mask, to_bool_mask
from tidemill.spark.decode.newline_text import Mask

NATIVE_JSON: dict[str, Any] = {
    "int16": int | str | None,
    "int32": int | str | None,
    "int64": int | str | None,
    "float32": float | str | None,
    "float64": float | str | None,
    "bool": bool | str | None,
}


class CapturedDialect:
    """Dialect of JSON that capture writes; see block_decoder.Dialect."""

    def __init__(self, forms: Mapping[str, str], *, exact: bool) -> None:
        self.exact = exact
        self._forms = forms

    def arrow_input_type(self, column: Column, seen: bytes) -> pa.DataType:
        found = events.arrow_input_type(self._forms.get(column.name, ""))
        if found is not None:
            return found
        if column.type not in NATIVE_JSON or (column.type == "int64" and seen[:1] == b'"'):  # an oid
            return pa.string()
        return pa.float64() if column.type == "float32" else arrow_type(column.type)

    def convert(self, column: Column, array: pa.Array, odd: Mask) -> pa.Array:
        found = events.convert_form(self._forms.get(column.name, ""), column, array, odd)
        if found is not None:
            return found
        if is_nested(column.type):
            return _arrays_of_texts(array, element_type(column.type), odd)
        if pa.types.is_string(array.type):
            array, strange = _without_odd_texts(array, column.type)
            odd |= strange
            array = cast_text(array, "float64" if column.type == "float32" else column.type)
        if column.type in FLOATS:
            odd |= non_finite_mask(array)
        if column.type == "float32":
            array, beyond = narrow_to_float32(array)
            odd |= beyond
        return array


def text_to_column(column: Column, texts: pa.Array, dialect: CapturedDialect) -> pa.Array | None:
    """Convert PostgreSQL's texts to the values that the JSON of their records gives. Return None if a value does not
    fit the column, or if Arrow cannot identify a value that it rejects. The records then decide."""
    odd = np.zeros(len(texts), dtype=bool)
    try:
        array = dialect.convert(column, texts, odd)
        if not odd.any():
            return array
        others = values_to_array(texts.filter(pa.array(odd)).to_pylist(), column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, InvalidError):
        return None
    places = np.arange(len(texts))
    places[odd] = len(texts) + np.arange(len(others))
    return pa.concat_arrays([array, others]).take(pa.array(places))


def _arrays_of_texts(texts: pa.Array, element: str, odd: Mask) -> pa.Array:
    """Parse PostgreSQL's texts of arrays; see block_decoder.Dialect."""
    lists, wrong = split_arrays(texts)
    odd |= wrong

    def convert(elements: pa.Array) -> pa.Array:
        elements, strange = _without_odd_texts(elements, element)
        if strange.any():
            rows = np.repeat(np.arange(len(lists)), np.asarray(lists.value_lengths().fill_null(0)))
            odd[rows[strange]] = True
        return cast_text(elements, element)

    return map_elements(lists, convert)


def _without_odd_texts(texts: pa.Array, kind: str) -> tuple[pa.Array, Mask]:
    """Replace texts that `cast_text` may not read by null. Return the texts, and a mask of the replaced ones."""
    moment = kind == "date" or kind in TIMESTAMPS
    if not len(texts) or not (moment or kind.startswith("decimal")):
        return texts, np.zeros(len(texts), dtype=bool)
    strange = _postgres_only_mask(texts, moment=moment)
    return (pc.if_else(pa.array(strange), None, texts) if strange.any() else texts), strange


def _postgres_only_mask(texts: pa.Array, *, moment: bool) -> Mask:
    """Return a mask of texts in forms that only PostgreSQL writes: NaN, infinity, years of another length, BC."""
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if places[0] == places[-1]:
        return to_bool_mask(texts.is_valid())
    text, sizes = np.frombuffer(data, dtype=np.uint8), np.diff(places)
    begins = np.minimum(places[:-1], len(text) - 1)
    first = text[begins]
    strange: Mask = (sizes == 0) | ((first - ord("0") > 9) & (moment | (first != ord("-"))))
    if moment:
        strange |= (text[np.minimum(begins + 4, len(text) - 1)] != ord("-")) | (text[places[1:] - 1] == ord("C"))
    return strange & to_bool_mask(texts.is_valid()) if texts.null_count else strange


def values_to_array(values: Sequence[Any], column: Column) -> pa.Array:
    if column.type not in NATIVE_JSON:
        return parse_column(values, column)
    kind = "float64" if column.type == "float32" else column.type
    if any(type(v) is str for v in values):  # NaN, Infinity, an oid: text where JSON has no number
        found = parse_column([None if v is None else _value_as_text(v) for v in values], replace(column, type=kind))
    else:
        found = pa.array(values, arrow_type(kind))
    if kind == column.type:
        return found
    narrow, beyond = narrow_to_float32(found)
    if beyond.any():
        raise ValueError("beyond a float32")
    return narrow


def _value_as_text(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if isinstance(value, str) else repr(value)
