"""Change events in Avro (capture/encode/debezium_avro.py) → rows and keys: by columns, and one by one.

    0x00 │ value's id │ before │ after │ source …     before and after: 0x00, or 0x02 and the row
    0x00 │ key's id   │ the key's columns

    row               its columns in the order of the description; a nullable one is 0x00, or 0x02 and its body

Each record has a cursor, and all cursors advance field by field together.
Invariant (bounds): a cursor never leaves its record, so no bytes outside of it are read. A record that does not decode
is left to the slow path, which reports what is wrong with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.base.pgtypes.avro import PREFIX_BYTES, Kind, Layout, record_prefix
from tidemill.base.pgtypes.debezium import NUMBERS
from tidemill.shards.api import Column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.block_decoder import MIN_BLOCK_VALUES, Block, JsonDialect
from tidemill.spark.decode.newline_text import Mask, Places, bytes_of_ranges
from tidemill.topics.batch import RecordColumns

_VARINT_BYTES = 10
_SIZES: dict[Kind, int] = {"float": 4, "double": 8, "boolean": 1}
_UNPACK = {"float": struct.Struct("<f"), "double": struct.Struct("<d")}


class AvroVersion(msgspec.Struct, frozen=True):
    """Schema of the records under one version of a table's description: ids of the key and value schemas, and the
    fields."""

    key_id: int
    value_id: int
    key: Layout
    row: Layout


class SchemaMismatchError(ValueError):
    """The record's schema is not that of its version."""


class FieldCursors:
    """Cursors of many records of one body, ascending."""

    def __init__(self, body: bytes, at: Places, ends: Places) -> None:
        self._body = body
        self._bytes = np.frombuffer(body, np.uint8)
        self._last = max(len(body) - 1, 0)
        self.at = at.astype(np.int64)
        self._ends = ends
        self.good = np.ones(len(at), dtype=bool)

    def match_prefix(self, expected: bytes) -> None:
        for byte in expected:
            self.good &= self._next_byte() == byte

    def read_branches(self) -> Mask:
        """Read a union branch at every cursor; return a mask of the records whose value is present."""
        found = self._next_byte()
        there: Mask = found == 2
        self.good &= there | (found == 0)
        return there

    def check_end(self) -> None:
        self.good &= self.at == self._ends

    def fields(self, layout: Layout, there: Mask) -> dict[str, FieldColumn]:
        """Read the row of each record in `there`; the other cursors do not move."""
        out = {}
        for name, kind, may_be_null in layout:
            mine = there
            if may_be_null:
                mine = there.copy()
                rows = np.flatnonzero(there)
                found = self._bytes[np.minimum(self.at[rows], self._last)]
                mine[rows] = found == 2
                self.good[rows] &= (found == 2) | (found == 0)
                self._advance(rows, 1)
            out[name] = self._read_field(kind, mine)
        return out

    def _read_field(self, kind: Kind, there: Mask) -> FieldColumn:
        rows = np.flatnonzero(there)
        if kind == "varint":
            numbers = np.zeros(len(there), np.int64)
            numbers[rows] = self._read_varints(rows)
            return FieldColumn(kind, there, self.at, self.at, numbers)
        if kind == "string":
            sizes = self._read_varints(rows)
            self.good[rows] &= sizes >= 0
            begins = self.at.copy()
            self._advance(rows, np.maximum(sizes, 0))
            return FieldColumn(kind, there, begins, self.at.copy(), None)
        begins = self.at.copy()
        self._advance(rows, _SIZES[kind])
        return FieldColumn(kind, there, begins, self.at.copy(), None)

    def _read_varints(self, rows: Places) -> npt.NDArray[np.int64]:
        values = np.zeros(len(rows), np.uint64)
        going, at = np.arange(len(rows)), self.at[rows]
        for step in range(_VARINT_BYTES):
            found = self._bytes[np.minimum(at[going], self._last)]
            values[going] |= (found & 0x7F).astype(np.uint64) << np.uint64(7 * step)
            at[going] += 1
            more = found > 0x7F
            if step == _VARINT_BYTES - 1:
                more |= found > 1  # the value exceeds 64 bits
            going = going[more]
            if not len(going):
                break
        self.good[rows[going]] = False
        self._advance_to(rows, at)
        signs = (values & np.uint64(1)).astype(np.int64)
        return (values >> np.uint64(1)).astype(np.int64) ^ -signs

    def _next_byte(self) -> npt.NDArray[np.uint8]:
        found = self._bytes[np.minimum(self.at, self._last)]
        self._advance_to(slice(None), self.at + 1)
        return found

    def _advance(self, rows: Places, by: int | npt.NDArray[np.int64]) -> None:
        self._advance_to(rows, self.at[rows] + by)

    def _advance_to(self, rows: Places | slice, at: npt.NDArray[np.int64]) -> None:
        ends = self._ends[rows]
        beyond = (at > ends) | (at < self.at[rows])
        if beyond.any():
            self.good[rows] &= ~beyond
            at = np.where(beyond, ends, at)
        self.at[rows] = at


class FieldColumn:
    """Column of many rows: for those in `there` the byte range, or the number."""

    def __init__(
        self, kind: Kind, there: Mask, begins: Places, ends: Places, numbers: npt.NDArray[np.int64] | None
    ) -> None:
        self.kind = kind
        self.there = there
        self._begins = begins
        self._ends = ends
        self._numbers = numbers

    def array(self, body: bytes, good: Mask) -> pa.Array:
        """Return the values of the good rows. Raises ArrowInvalid for strings that are not UTF-8."""
        there = self.there[good]
        mask = None if there.all() else ~there
        if self._numbers is not None:
            return pa.array(self._numbers[good], mask=mask)
        begins, ends = self._begins[good], self._ends[good]
        if self.kind == "string":
            found = bytes_of_ranges(pa.py_buffer(body), begins, ends, np.ones(len(begins), dtype=bool))
            _, offsets, data = found.buffers()
            valid = None if mask is None else pa.py_buffer(np.packbits(there, bitorder="little"))
            texts = pa.Array.from_buffers(pa.string(), len(found), [valid, offsets, data], offset=found.offset)
            texts.validate(full=True)
            return texts
        size = _SIZES[self.kind]
        places = np.where(there, begins, 0)[:, None] + np.arange(size)
        raw = np.frombuffer(body, np.uint8)[np.minimum(places, len(body) - 1)]
        if self.kind == "boolean":
            return pa.array(raw[:, 0] == 1, mask=mask)
        return pa.array(np.ascontiguousarray(raw).view(f"<f{size}")[:, 0], mask=mask)


class AvroReader:
    """Reader of the rows of one version, or of its keys (`key`): by columns as `ObjectReader.read`, and as a
    RowDecoder."""

    def __init__(
        self, layout: Layout, columns: Sequence[Column], dialect: JsonDialect, forms: Mapping[str, str],
        key: bytes = b"",
    ) -> None:  # fmt: skip
        self._layout = layout
        self._columns = columns
        self._dialect = dialect
        self._forms = forms
        self._key = key
        self._row: type = msgspec.defstruct("Row", [(f"c{i}", Any, None) for i in range(len(columns))], gc=False)

    def read(self, body: bytes, at: Places, sizes: Places, places: Places) -> tuple[list[Block], Places]:
        if len(places) < MIN_BLOCK_VALUES:
            return [], places
        walk = FieldCursors(body, at, at + sizes)
        walk.match_prefix(self._key)
        fields = walk.fields(self._layout, np.ones(len(at), dtype=bool))
        if self._key:
            walk.check_end()
        good = walk.good
        if not good.any():
            return [], places
        arrays, odd = {}, np.zeros(int(good.sum()), dtype=bool)
        try:
            for column in self._columns:
                arrays[column.name] = self._convert(column, fields[column.name].array(body, good), odd)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return [], places
        slow = np.sort(np.concatenate([places[~good], places[good][odd]]))
        kept = pa.array(~odd)
        if odd.any():
            arrays = {name: array.filter(kept) for name, array in arrays.items()}
        return [Block(places[good][~odd], arrays)], slow

    def _convert(self, column: Column, array: pa.Array, odd: Mask) -> pa.Array:
        form = self._forms.get(column.name, "")
        if pa.types.is_string(array.type) or form in NUMBERS:
            return self._dialect.convert(column, array, odd)
        return array.cast(arrow_type(column.type))

    def decode(self, data: bytes) -> Any:
        """Return the row. Raises ValueError for bytes that are not such a row."""
        return self._row(**{f"c{i}": value for i, value in enumerate(self._read_values(data).values())})

    def values(self, data: bytes) -> dict[str, Any]:
        """Return the values by column, as the JSON of the same event represents them."""
        return {c.name: v for c, v in zip(self._columns, self._read_values(data).values(), strict=True)}

    def _read_values(self, data: bytes) -> dict[str, Any]:
        if self._key and data[:PREFIX_BYTES] != self._key:
            raise SchemaMismatchError(_schema_mismatch_text(data, self._key))
        found, at = read_row(data, len(self._key), self._layout)
        if self._key and at != len(data):
            raise ValueError(f"a key has {len(data) - at} bytes after its columns")
        values = {c.name: found[c.name] for c in self._columns}
        return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}


def locate_rows(columns: RecordColumns, places: Places, version: AvroVersion) -> tuple[Places, Places, Places, Places]:
    """Locate the rows in events; see events.locate_rows."""
    if not len(places):
        return places, places, places, places
    at = columns.value_at[places]
    ends = at + columns.value_bytes[places]
    walk = FieldCursors(columns.body, at, ends)
    walk.match_prefix(record_prefix(version.value_id))
    walk.fields(version.row, walk.read_branches())
    after = walk.read_branches()
    good = walk.good & after
    gone = walk.good & ~after & (columns.key_bytes[places] >= 0)
    return walk.at[good], (ends - walk.at)[good], places[good], places[~good & ~gone]


def after_row(value: bytes, version: AvroVersion) -> bytes | None:
    """Return the event's bytes from its `after` row on; None if the row is deleted.

    Raises SchemaMismatchError, ValueError, IndexError.
    """
    if value[:PREFIX_BYTES] != record_prefix(version.value_id):
        raise SchemaMismatchError(_schema_mismatch_text(value, record_prefix(version.value_id)))
    there, at = _read_branch(value, PREFIX_BYTES)
    if there:
        _, at = read_row(value, at, version.row)
    there, at = _read_branch(value, at)
    return value[at:] if there else None


def read_row(data: bytes, at: int, layout: Layout) -> tuple[dict[str, Any], int]:
    """Return (values by column, texts as bytes; the end position). Raises ValueError."""
    out: dict[str, Any] = {}
    for name, kind, may_be_null in layout:
        try:
            there = True
            if may_be_null:
                there, at = _read_branch(data, at)
            out[name] = None
            if there:
                out[name], at = _read_value(data, at, kind)
        except (ValueError, IndexError, struct.error) as error:
            raise ValueError(f"not valid Avro of its schema: column={name} byte={at}") from error
    return out, at


def _read_value(data: bytes, at: int, kind: Kind) -> tuple[Any, int]:
    if kind == "varint":
        return _read_varint(data, at)
    if kind == "string":
        size, at = _read_varint(data, at)
        if size < 0 or at + size > len(data):
            raise ValueError(f"a text of {size} bytes, but only {len(data) - at} bytes are left")
        return data[at : at + size], at + size
    if kind == "boolean":
        return data[at] == 1, at + 1
    (number,) = _UNPACK[kind].unpack_from(data, at)
    return number, at + _SIZES[kind]


def _read_branch(data: bytes, at: int) -> tuple[bool, int]:
    if data[at] not in (0, 2):
        raise ValueError(f"not a branch of the union: {data[at]}")
    return data[at] == 2, at + 1


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for step in range(_VARINT_BYTES):
        value |= (data[at + step] & 0x7F) << 7 * step
        if data[at + step] <= 0x7F and value < 1 << 64:
            return (value >> 1) ^ -(value & 1), at + step + 1
    raise ValueError("a number that exceeds 64 bits")


def _schema_mismatch_text(data: bytes, expected: bytes) -> str:
    return f"its schema is {data[:PREFIX_BYTES].hex()}, but that of its table version is {expected.hex()}"
