"""Encode the rows of a block as Avro by columns, with the same bytes as AvroEncoder row by row (see
columnar_encoder.py).

column   ──► text ──► bodies of its kind ──► one element-wise join with the branches ──► key, row
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.pgtypes.avro import NULL, PRESENT, Kind, value_kind
from tidemill.base.pgtypes.debezium import NUMBERS
from tidemill.capture.changes import Column
from tidemill.capture.decode.columnar_tuples import ValueSlices
from tidemill.capture.decode.row_blocks import RowBlock
from tidemill.capture.encode.columnar_encoder import convert_text, convert_to_numbers, iter_text_columns
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.row_encoder import event_form
from tidemill.topics.batch.encode import join_fields, value_sizes
from tidemill.topics.batch.varint import encode_varints

_FLOATS: dict[Kind, tuple[pa.DataType, int]] = {"float": (pa.float32(), 4), "double": (pa.float64(), 8)}
_EMPTY = pa.scalar(b"")


class AvroEventFormat:
    """Implementation of columnar_encoder.Events for Avro."""

    null = NULL
    after = b""

    def __init__(self, encoder: AvroEncoder) -> None:
        self.before = encoder.value_prefix
        self._key_prefix = encoder.key_prefix

    def encode_keys_and_rows(self, block: RowBlock) -> tuple[Any, Any] | None:
        bodies: dict[str, list[Any]] = {}
        rows = self._encode_row_objects(block, block.values, len(block), bodies)
        if rows is None:
            return None
        columns = block.relation.key_columns
        of_key = [piece for c in columns for piece in _normalize_minus_zero(c, bodies[c.name])]
        return join_fields(self._key_prefix, *of_key), rows

    def rows(self, block: RowBlock, rows: ValueSlices, count: int) -> Any:
        return self._encode_row_objects(block, rows, count, {})

    @staticmethod
    def _encode_row_objects(block: RowBlock, rows: ValueSlices, count: int, bodies: dict[str, list[Any]]) -> Any:
        """Encode the rows; `bodies` receives the pieces of each column."""
        pieces: list[Any] = [PRESENT]
        for column, text, sizes, _ in iter_text_columns(block, rows, count):
            nulls = text.null_count > 0
            if nulls and column.key_index >= 0:
                return None
            made = _encode_values(column, text, bool((sizes == 0).any()))
            if made is None:
                return None
            bodies[column.name] = made
            if nulls:
                pieces.append(pc.binary_join_element_wise(PRESENT, *made, _EMPTY).fill_null(NULL))
            else:
                pieces += made if column.key_index >= 0 else [PRESENT, *made]
        return join_fields(*pieces)


def _encode_values(column: Column, text: Any, empty: bool) -> list[Any] | None:
    """Return the pieces of each value, null where it is null. None, or ArrowInvalid: the per-row functions have to
    encode them.
    """
    form, kind = event_form(column), value_kind(column.type_oid, column.type_mod)
    if kind == "string":
        found = convert_text(form, text)
        if found is None:
            return None
        data = found.view(pa.binary())
        return [
            _with_nulls_of(encode_varints(value_sizes(data.fill_null(b"") if data.null_count else data)), data),
            data,
        ]
    if kind == "boolean":
        return None if empty else [pc.if_else(pc.starts_with(text, "t"), pa.scalar(b"\x01"), pa.scalar(b"\x00"))]
    if kind == "varint":
        numbers = convert_to_numbers(form, text) if form in NUMBERS else text
        return [_with_nulls_of(encode_varints(np.asarray(numbers.cast(pa.int64()).fill_null(0))), text)]
    dtype, size = _FLOATS[kind]
    values = np.asarray(text.cast(dtype).fill_null(0))
    offsets = np.arange(0, size * (len(values) + 1), size, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values.tobytes())]
    return [_with_nulls_of(pa.Array.from_buffers(pa.binary(), len(values), buffers), text)]


def _with_nulls_of(made: Any, text: Any) -> Any:
    """Return `made` with nulls where the text is null."""
    return pc.if_else(text.is_valid(), made, pa.scalar(None, pa.binary())) if text.null_count else made


def _normalize_minus_zero(column: Column, pieces: list[Any]) -> list[Any]:
    kind = value_kind(column.type_oid, column.type_mod)
    if kind not in _FLOATS:
        return pieces
    (piece,), size = pieces, _FLOATS[kind][1]
    zero, minus = bytes(size), bytes(size - 1) + b"\x80"
    return [pc.if_else(pc.equal(piece, pa.scalar(minus)), pa.scalar(zero), piece)]
