"""JSON objects → Arrow columns by blocks, as the row-by-row decoder (stream.py) reads them, several times faster.

    values ─► lines (lines.py) ─► Arrow's JSON reader ─► arrays
                 └─ what it refuses, or could read otherwise: places for the slow path ─┘

A line is one object for certain when it begins with { and ends with }: a string cannot hold a line's end, and behind a
closing bracket no other one may open. Where the two readers differ otherwise:

    a field twice, another type, a surrogate without its pair, a number out of range     refused by Arrow
    NaN and Infinity, nesting that ends the other reader, bytes that are no UTF-8         looked for in the text
    a null key, a number that is not finite, a text in an unusual form                   looked for in the arrays
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from tidemill.shards.front import Column
from tidemill.shards.schema import arrow_type
from tidemill.spark.decode.forms import MOMENTS, bools, millis, moments
from tidemill.spark.decode.lines import Lines, Mask, Places, stretches
from tidemill.topics.batch import Columns

LEAF = 32
"""So few rows are not looked at by halves."""

REFUSALS = 8
"""Of a stretch; after so many the rest of it is for the slow path, which costs less then."""

_ROW = re.compile(r"in row (\d+)$")
_NUMBER = re.compile(rb"-?\d+$")
_PLAIN = {"string", "bool", "int16", "int32", "int64", "float32", "float64"}
_EXPONENT, _MINUS_ZERO = np.uint64(0x7FF0000000000000), np.uint64(1 << 63)


class Block(msgspec.Struct, frozen=True):
    """Rows that were read: `places` of the records, ascending, and an array for each column."""

    places: Places
    arrays: dict[str, pa.Array]


class ObjectReader:
    """Of one table. `us_range`: the timestamps that it may hold, µs."""

    def __init__(self, columns: Sequence[Column], key: Sequence[str], us_range: tuple[int, int]) -> None:
        self._columns = columns
        self._key = {c.name for c in columns if c.name in key}
        self._us_range = us_range
        self._types = {c.name: arrow_type(c.type) for c in columns}

    @staticmethod
    def reads(columns: Sequence[Column]) -> bool:
        """Can these columns be read by blocks?"""
        return all(c.type in _PLAIN or c.type in MOMENTS for c in columns)

    def read(self, records: Columns, live: Places) -> tuple[list[Block], Places]:
        """(what was read, places that only the slow path may judge) of the records at `live`, whose values are not
        null."""
        blocks: list[Block] = []
        slow: list[Places] = []
        for lines in stretches(pa.py_buffer(records.body), records.value_at[live], records.value_bytes[live], live):
            slow.append(lines.left_out)
            if len(lines.places):
                self._stretch(lines, blocks, slow)
        return blocks, np.sort(np.concatenate(slow)) if slow else live

    def _stretch(self, lines: Lines, blocks: list[Block], slow: list[Places]) -> None:
        options = self._options(lines.between(0, 1))
        ranges, refusals = [(0, len(lines.places))], 0
        while ranges:
            first, last = ranges.pop()
            if last - first <= 0:
                continue
            places = lines.places[first:last]
            if refusals > REFUSALS:
                slow.append(places)
                continue
            try:
                table = _parse(lines.between(first, last), options)
                if len(table) != last - first:
                    raise pa.ArrowInvalid("not an object a line")
                arrays, odd = self._typed(table)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as refused:
                refusals += 1
                if last - first <= LEAF:
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

    def _options(self, first_line: pa.Buffer) -> pj.ParseOptions:
        """What Arrow is to read. Timestamps that the first line has as numbers are read as numbers."""
        try:
            first = msgspec.json.decode(first_line, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            first = {}
        fields = []
        for column in self._columns:
            kind = self._types[column.name]
            if column.type == "float32":
                kind = pa.float64()
            elif column.type in MOMENTS:
                number = column.type == "timestamp" and _NUMBER.match(bytes(first.get(column.name, b"")))
                kind = pa.int64() if number else pa.string()
            fields.append((column.name, kind))
        return pj.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore")

    def _typed(self, table: pa.Table) -> tuple[dict[str, pa.Array], Mask]:
        """The columns' arrays, and which rows are odd."""
        odd = np.zeros(len(table), dtype=bool)
        arrays = {}
        for column in self._columns:
            found = table.column(column.name)
            array = found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
            if array.null_count and column.name in self._key:
                odd |= bools(array.is_null())
            if column.type in ("float32", "float64"):
                odd |= _strange(array)
            elif column.type in MOMENTS:
                if pa.types.is_integer(array.type):
                    array = millis(array, self._us_range, odd)
                else:
                    array = moments(array, column.type, self._us_range, odd)
            if column.type == "float32":
                array = array.cast(pa.float32(), safe=False)
            arrays[column.name] = array
        return arrays, odd


def _parse(text: pa.Buffer, options: pj.ParseOptions) -> pa.Table:
    reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
    return pj.read_json(pa.BufferReader(text), read_options=reading, parse_options=options)


def _strange(array: pa.Array) -> Mask:
    """Which are not finite, or −0, which the other reader tells from −0.0."""
    bits = np.frombuffer(array.buffers()[1], dtype=np.uint64)[array.offset : array.offset + len(array)]
    found: Mask = ((bits & _EXPONENT) == _EXPONENT) | (bits == _MINUS_ZERO)
    return found & bools(array.is_valid()) if array.null_count and found.any() else found


def in_order(blocks: Sequence[Block]) -> tuple[dict[str, pa.Array], Places]:
    """All blocks as one, by place."""
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
