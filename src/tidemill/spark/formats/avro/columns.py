"""Avro records → Arrow arrays, by columns: each record has a cursor, and all cursors advance field by field together.

Numbers, texts, bytes, nested records and unions with null are read this way. A record with anything else in front of a
needed field, or one that does not decode, is left to the reader of single values (values.py).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.spark.decode.avro import FieldCursors
from tidemill.spark.decode.newline_text import Mask, Places, bytes_of_ranges
from tidemill.spark.formats.avro.schema import AvroType

FLAT_TYPES_MAX = 2_000
"""Limit of the types in a schema that is read by columns."""
_SIZES = {"float": 4, "double": 8, "boolean": 1}


class FlatColumn:
    """Values of one type in many records: those in `there`. A record has `fields`; other types are in `data`."""

    def __init__(self, kind: AvroType, there: Mask, begins: Places, ends: Places) -> None:
        self.kind = kind
        self.there = there
        self.begins = begins
        self.ends = ends
        self.numbers: Places | None = None
        self.fields: dict[str, FlatColumn] = {}

    def array(self, body: bytes, good: Mask) -> pa.Array:
        """Return the raw values of the good records. Raises ArrowInvalid for texts that are not UTF-8."""
        there = self.there[good]
        mask = None if there.all() else ~there
        kind = self.kind.kind
        if self.numbers is not None:
            found = pa.array(self.numbers[good], mask=mask)
            if kind != "enum":
                return found
            return pa.array(self.kind.symbols, pa.string()).take(found)
        begins, ends = self.begins[good], self.ends[good]
        if kind == "null":
            return pa.nulls(len(begins))
        if kind in ("string", "bytes", "fixed"):
            return _texts(body, begins, ends, mask, pa.string() if kind == "string" else pa.binary())
        size = _SIZES[kind]
        places = np.where(there, begins, 0)[:, None] + np.arange(size)
        raw = np.frombuffer(body, np.uint8)[np.minimum(places, len(body) - 1)]
        if kind == "boolean":
            return pa.array(raw[:, 0] == 1, mask=mask)
        return pa.array(np.ascontiguousarray(raw).view(f"<f{size}")[:, 0], mask=mask)


def _texts(body: bytes, begins: Places, ends: Places, mask: Mask | None, kind: pa.DataType) -> pa.Array:
    if not len(begins):
        return pa.array([], kind)
    found = bytes_of_ranges(pa.py_buffer(body), begins, ends, np.ones(len(begins), dtype=bool))
    _, offsets, data = found.buffers()
    valid = None if mask is None else pa.py_buffer(np.packbits(~mask, bitorder="little"))
    texts = pa.Array.from_buffers(kind, len(found), [valid, offsets, data], offset=found.offset)
    texts.validate(full=True)
    return texts


class FlatCursors(FieldCursors):
    """Cursors that read any flat type."""

    def read_type(self, kind: AvroType, there: Mask) -> FlatColumn:
        """Read a value of the type at the cursor of each record in `there`; the others do not move."""
        if kind.kind == "union":
            return self._read_union(kind, there)
        rows = np.flatnonzero(there)
        begins = self.at.copy()
        found = FlatColumn(kind, there, begins, begins)
        if kind.kind == "record":
            found.fields = {name: self.read_type(part, there) for name, part in kind.fields}
        elif kind.kind in ("int", "long", "enum"):
            found.numbers = np.zeros(len(there), np.int64)
            found.numbers[rows] = self._read_varints(rows)
            if kind.kind == "enum":
                known = (found.numbers >= 0) & (found.numbers < len(kind.symbols))
                self.good &= known | ~there
                found.numbers[~known] = 0
        elif kind.kind in ("string", "bytes"):
            sizes = self._read_varints(rows)
            self.good[rows] &= sizes >= 0
            found.begins = self.at.copy()
            self._advance(rows, np.maximum(sizes, 0))
        elif kind.kind != "null":
            self._advance(rows, kind.size if kind.kind == "fixed" else _SIZES[kind.kind])
            if kind.kind == "boolean":
                self.good[rows] &= self._bytes[np.minimum(begins[rows], self._last)] <= 1
        found.ends = self.at.copy()
        return found

    def _read_union(self, kind: AvroType, there: Mask) -> FlatColumn:
        rows = np.flatnonzero(there)
        branches = np.full(len(there), -1, dtype=np.int64)
        branches[rows] = self._read_varints(rows)
        inner = kind.without_null()
        assert inner is not None
        at = next(place for place, branch in enumerate(kind.branches) if branch is inner)
        self.good[rows] &= (branches[rows] >= 0) & (branches[rows] < len(kind.branches))
        return self.read_type(inner, there & (branches == at))


def is_flat(kind: AvroType) -> bool:
    """Return whether cursors can read the type."""
    open_types, count = [kind], 0
    while open_types:
        one = open_types.pop()
        count += 1
        inner = one.without_null()
        if count > FLAT_TYPES_MAX or inner is None or (one.kind == "union" and len(one.branches) > 2):
            return False  # also a type that contains itself
        if inner.kind in ("array", "map", "union"):
            return False
        open_types += [part for _, part in inner.fields]
    return True
