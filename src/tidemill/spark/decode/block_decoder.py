"""JSON objects → Arrow columns in blocks, with the same results as a row-by-row decoder, several times faster.

    values ─► lines (newline_text.py) ─► Arrow's JSON reader ─► a dialect ─► arrays
                 └─ values that they reject, or might read differently: places for the slow path ─┘

A line that begins with { and ends with } is certainly a single object: a string cannot contain a newline, and after a
closing bracket no other one may open. Other differences between the readers:

    a duplicate field, another type, an unpaired surrogate, a number out of range        rejected by Arrow
    NaN and Infinity, nesting beyond the other reader's limit, bytes that are not UTF-8,
    exponents of decimals that Arrow does not check                                       detected in the text
    an omitted field, if it is not the same as null                                       detected by counting quotes
    rules of a column: a null key, a number that is not finite, …                         detected by the dialect
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from tidemill.shards.api import Column
from tidemill.shards.nested.values import inner_fields
from tidemill.spark.decode.newline_text import JsonLines, Mask, Places, count_quotes, cut_stretches, fields_as_strings

MIN_BLOCK_VALUES = 64
"""Fewer values than this are left to the slow path."""

MIN_BISECT_ROWS = 32
"""A range of at most this many rows is not halved further."""

REJECTIONS_MAX = 16
"""Limit of rejections in a stretch; after it, the slow path is cheaper for the rest."""

_ROW = re.compile(r"in row (\d+)$")
_NULL = msgspec.Raw(b"null")
_EXPONENT = np.uint64(0x7FF0000000000000)


class JsonDialect(Protocol):
    """Representation of columns in JSON. `exact`: an object has exactly these columns."""

    exact: bool

    def arrow_input_type(self, column: Column, seen: bytes) -> pa.DataType:
        """Return the type that Arrow shall read; `seen` is an example value of one of the objects, or b""."""
        ...

    def convert(self, column: Column, array: pa.Array, odd: Mask) -> pa.Array:
        """Convert the array that Arrow read to the column's type.

        Rows that the slow path may read differently are added to `odd`; their values are arbitrary. Raises ArrowInvalid
        if there are such rows that it cannot identify.
        """
        ...


class Block(msgspec.Struct, frozen=True):
    """Decoded rows: `places` of their records, ascending, and an array for each column."""

    places: Places
    arrays: dict[str, pa.Array]

    def before(self, place: int) -> Block:
        end = int(np.searchsorted(self.places, place))
        return Block(self.places[:end], {name: array[:end] for name, array in self.arrays.items()})


class ObjectReader:
    """Reader of objects with given columns."""

    def __init__(self, columns: Sequence[Column], dialect: JsonDialect) -> None:
        self._columns = columns
        self._dialect = dialect
        self._decimals = any(_contains_decimal(dialect.arrow_input_type(column, b"")) for column in columns)

    def read(self, body: bytes, at: Places, sizes: Places, places: Places) -> tuple[list[Block], Places]:
        """Return (decoded blocks, places that only the slow path can decide). The values are at `at` in `body`; their
        records are `places`, ascending in the same order."""
        if len(places) < MIN_BLOCK_VALUES:
            return [], places
        blocks: list[Block] = []
        slow = [places[:0]]
        for lines in cut_stretches(pa.py_buffer(body), at, sizes, places, decimals=self._decimals):
            slow.append(lines.left_out)
            if len(lines.places):
                self._read_stretch(lines, blocks, slow)
        return blocks, np.sort(np.concatenate(slow))

    def _read_stretch(self, lines: JsonLines, blocks: list[Block], slow: list[Places]) -> None:
        options = self._parse_options(lines)
        ranges, refusals = [(0, len(lines.places))], 0
        while ranges:
            first, last = ranges.pop()
            if last - first <= 0:
                continue
            places = lines.places[first:last]
            if refusals > REJECTIONS_MAX:
                slow.append(places)
                continue
            try:
                text = lines.between(first, last)
                table = _read_json_lines(text, options)
                if len(table) != last - first:
                    raise pa.ArrowInvalid("not one object per line")
                if self._dialect.exact and _omits_fields(text, table):
                    raise pa.ArrowInvalid("a field is omitted")
                arrays, odd = self._convert_columns(table)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as refused:
                refusals += 1
                if last - first <= MIN_BISECT_ROWS:
                    slow.append(places)
                    continue
                named = _ROW.search(str(refused))
                at = first + min(int(named[1]), last - first - 1) if named else (first + last) // 2
                if named:
                    slow.append(lines.places[at : at + 1])
                ranges += [(at + 1 if named else at, last), (first, at)]
                continue
            if odd.any():
                slow.append(places[odd])
                keep = pa.array(~odd)
                arrays = {name: array.filter(keep) for name, array in arrays.items()}
                places = places[~odd]
            if len(places):
                blocks.append(Block(places, arrays))

    def _parse_options(self, lines: JsonLines) -> pj.ParseOptions:
        seen: dict[str, bytes] = {}
        for at in (0, len(lines.places) // 2, len(lines.places) - 1):
            try:
                fields = msgspec.json.decode(lines.between(at, at + 1), type=dict[str, msgspec.Raw])
            except (ValueError, RecursionError):
                continue
            seen = {name: bytes(raw) for name, raw in fields.items() if raw != _NULL} | seen
        kinds = [(c.name, self._dialect.arrow_input_type(c, seen.get(c.name, b""))) for c in self._columns]
        others = "error" if self._dialect.exact else "ignore"
        return pj.ParseOptions(explicit_schema=pa.schema(kinds), unexpected_field_behavior=others)

    def _convert_columns(self, table: pa.Table) -> tuple[dict[str, pa.Array], Mask]:
        """Return the columns' arrays, and a mask of the odd rows."""
        odd = np.zeros(len(table), dtype=bool)
        arrays = {}
        for column in self._columns:
            found = table.column(column.name)
            array = found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
            arrays[column.name] = self._dialect.convert(column, array, odd)
        return arrays, odd


def read_plain_texts(
    column: Column, body: bytes, at: Places, sizes: Places, places: Places
) -> tuple[list[Block], Places]:
    """Read plain text values of one column, with the signature of `ObjectReader.read`."""
    if len(places) < MIN_BLOCK_VALUES:
        return [], places
    try:
        return [Block(places, {column.name: fields_as_strings(body, at, sizes)})], places[:0]
    except pa.ArrowInvalid:
        return [], places


def _contains_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind)) or any(_contains_decimal(field.type) for field in inner_fields(kind))


def _read_json_lines(text: pa.Buffer, options: pj.ParseOptions) -> pa.Table:
    reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
    return pj.read_json(pa.BufferReader(text), read_options=reading, parse_options=options)


def _omits_fields(text: pa.Buffer, table: pa.Table) -> bool:
    """Return whether any object omits a field.

    That is so exactly if the text has fewer strings than names and values, because no row has a duplicate name or an
    unknown one.
    """
    if not any(column.null_count for column in table.columns):
        return False
    strings = table.num_rows * table.num_columns
    strings += sum(table.num_rows - c.null_count for c in table.columns if pa.types.is_string(c.type))
    return bool(count_quotes(np.frombuffer(text, dtype=np.uint8)) != 2 * strings)


def non_finite_mask(array: pa.Array) -> Mask:
    """Return a mask of the float64s that are not finite."""
    bits = np.frombuffer(array.buffers()[1], dtype=np.uint64)[array.offset : array.offset + len(array)]
    found: Mask = (bits & _EXPONENT) == _EXPONENT
    return found & to_bool_mask(array.is_valid()) if array.null_count and found.any() else found


def to_bool_mask(array: pa.Array) -> Mask:
    """Return a copy of a boolean array without nulls."""
    bits = np.unpackbits(np.frombuffer(array.buffers()[1], dtype=np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].view(bool)


def join_blocks(blocks: Sequence[Block]) -> tuple[dict[str, pa.Array], Places]:
    """Join all blocks into one, ordered by place."""
    filled = [block for block in blocks if len(block.places)] or list(blocks[-1:])
    if len(filled) == 1:
        return filled[0].arrays, filled[0].places
    places = np.concatenate([block.places for block in filled])
    arrays = {name: pa.concat_arrays([b.arrays[name] for b in filled]) for name in filled[0].arrays}
    if (np.diff(places) > 0).all():
        return arrays, places
    order = np.argsort(places)
    taken = pa.array(order)
    return {name: array.take(taken) for name, array in arrays.items()}, places[order]
