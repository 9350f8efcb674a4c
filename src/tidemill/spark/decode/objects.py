"""JSON objects → Arrow columns by blocks, as the row-by-row decoder (stream.py) reads them, several times faster.

    values ─► one text, a line each ─► Arrow's JSON reader ─► arrays
                  └─ what it refuses, or could read otherwise: places for the slow path ─┘

A line is one object for certain when it begins with { and ends with }: a string cannot hold a line's end, and behind a
closing bracket no other one may open. Where the two readers differ otherwise:

    a field twice, another type, a surrogate without its pair, a number out of range     refused by Arrow
    NaN and Infinity, nesting that ends the other reader                                 looked for in the text
    bytes that are no UTF-8                                                              the text is validated
    a null key, a number that is not finite, a text in an unusual form                   looked for in the arrays
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tidemill.shards.front import Column
from tidemill.shards.schema import arrow_type
from tidemill.topics.batch import Columns

Places = npt.NDArray[np.int64]

LEAF = 32
"""So few rows are not looked at by halves."""

STRETCH = 2_048
REFUSALS = 8
"""Of so many rows at once; after so many refusals the rest of them is for the slow path, which costs less then."""

SPARSE_BYTES = 64 << 10

NESTED = 200
"""With so many brackets in it, a row may be nested as deep as only the other reader knows."""

_ROW = re.compile(r"in row (\d+)$")
_NUMBER = re.compile(rb"-?\d+$")
_PLAIN = {"string", "bool", "int16", "int32", "int64", "float32", "float64"}
_DATE = r"^(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])-\d\d-\d\d"
_FORMS = {
    "date": _DATE + "$",
    "timestamp": _DATE + r"T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$",
}
_OPENING, _CLOSING, _SPACE, _LINE = b"{} \n"
_ODD_WORDS = (b"NaN", b"Inf")


class Block(msgspec.Struct, frozen=True):
    """Rows that were read: `places` of the records, ascending, and an array for each column."""

    places: Places
    arrays: dict[str, pa.Array]


class ObjectReader:
    """Of one table. `us_range`: the timestamps that it may hold, µs."""

    def __init__(self, columns: Sequence[Column], key: Sequence[str], us_range: tuple[int, int]) -> None:
        self._columns = columns
        self._key = [c.name for c in columns if c.name in key]
        self._us_range = us_range

    @staticmethod
    def reads(columns: Sequence[Column]) -> bool:
        """Can these columns be read by blocks?"""
        return all(c.type in _PLAIN or c.type in _FORMS for c in columns)

    def read(self, records: Columns, live: Places) -> tuple[list[Block], Places]:
        """(what was read, places that only the slow path may judge) of the records at `live`, whose values are not
        null."""
        text = _Text(records, live)
        blocks: list[Block] = []
        slow = [live[~text.good]]
        millis = self._in_millis(records, text.places)
        for begin in range(0, len(text.places), STRETCH):
            self._stretch(text, begin, min(begin + STRETCH, len(text.places)), millis, blocks, slow)
        return blocks, np.sort(np.concatenate(slow))

    def _stretch(
        self, text: _Text, begin: int, end: int, millis: frozenset[str], blocks: list[Block], slow: list[Places]
    ) -> None:
        ranges, refusals = [(begin, end)], 0
        while ranges:
            first, last = ranges.pop()
            if last - first <= 0:
                continue
            places = text.places[first:last]
            if refusals > REFUSALS:
                slow.append(places)
                continue
            try:
                table = self._parse(text.between(first, last), millis)
                if len(table) != last - first:
                    raise pa.ArrowInvalid("not an object a line")
                arrays, odd = self._typed(table, millis)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as refused:
                refusals += 1
                if last - first <= LEAF:
                    slow.append(places)
                    continue
                named = _ROW.search(str(refused))
                at = first + min(int(named[1]), last - first - 1) if named else (first + last) // 2
                if named:
                    slow.append(text.places[at : at + 1])
                ranges += [(at + 1 if named else at, last), (first, at)]
                continue
            if odd.any():
                slow.append(places[odd])
                keep = pa.array(~odd)
                arrays = {name: array.filter(keep) for name, array in arrays.items()}
                places = places[~odd]
            if len(places):
                blocks.append(Block(places, arrays))

    def _in_millis(self, records: Columns, places: Places) -> frozenset[str]:
        """The timestamp columns that the first row has as numbers."""
        names = {c.name for c in self._columns if c.type == "timestamp"}
        if not names or not len(places):
            return frozenset()
        try:
            first = msgspec.json.decode(records.value(int(places[0])) or b"", type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return frozenset()
        return frozenset(n for n in names if n in first and _NUMBER.match(bytes(first[n])))

    def _parse(self, text: bytes, millis: frozenset[str]) -> pa.Table:
        fields = [(c.name, _read_as(c, millis)) for c in self._columns]
        return pj.read_json(
            pa.BufferReader(text),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=pj.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"),
        )

    def _typed(self, table: pa.Table, millis: frozenset[str]) -> tuple[dict[str, pa.Array], npt.NDArray[np.bool_]]:
        """The columns' arrays, and which rows are odd."""
        odd = np.zeros(len(table), dtype=bool)
        arrays = {}
        for column in self._columns:
            found = table.column(column.name)
            array = found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
            if column.name in self._key:
                odd |= _bools(array.is_null())
            if column.type in ("float32", "float64"):
                odd |= _bools(pc.fill_null(pc.invert(pc.is_finite(array)), False))
                # The other reader tells -0 from -0.0.
                odd |= _bools(pc.fill_null(pc.equal(array, 0.0), False)) & np.signbit(
                    array.fill_null(0.0).to_numpy(zero_copy_only=False)
                )
            elif column.type in _FORMS:
                array = self._moment(array, column, column.name in millis, odd)
            arrays[column.name] = array.cast(arrow_type(column.type), safe=column.type != "float32")
        return arrays, odd

    def _moment(self, array: pa.Array, column: Column, millis: bool, odd: npt.NDArray[np.bool_]) -> pa.Array:
        """A date or timestamp; what is in no usual form joins `odd` and is null."""
        low, high = self._us_range
        if millis:
            strange = pc.fill_null(pc.or_(pc.less(array, low // 1000 + 1), pc.greater(array, high // 1000)), False)
            odd |= _bools(strange)
            return pc.multiply(pc.if_else(strange, None, array), 1000).cast(arrow_type(column.type))
        strange = pc.fill_null(pc.invert(pc.match_substring_regex(array, _FORMS[column.type])), False)
        usual = pc.if_else(strange, None, array).cast(arrow_type(column.type))
        if column.type == "timestamp":
            us = usual.cast(pa.int64())
            strange = pc.or_(strange, pc.fill_null(pc.or_(pc.less(us, low), pc.greater(us, high)), False))
        odd |= _bools(strange)
        return usual


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


class _Text:
    """The values as lines: in place of the batches' bytes, with blanks for everything between them, or joined where
    there is more between them than they are. `good`: of the live records, those that are in it, at `places`."""

    def __init__(self, records: Columns, live: Places) -> None:
        begins, sizes = records.value_at[live], records.value_bytes[live]
        low, high = (int(begins[0]), int(begins[-1] + sizes[-1]) + 1) if len(live) else (0, 0)
        raw = records.body[low:high]
        begins -= low
        if len(raw) > 2 * int(sizes.sum()) + SPARSE_BYTES:
            raw = b"".join(
                [raw[at : at + size] + b" " for at, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
            )
            begins = np.cumsum(sizes + 1) - sizes - 1
        ends = begins + sizes
        text = np.frombuffer(raw, dtype=np.uint8).copy()
        good = sizes >= 2
        good[good] = (text[begins[good]] == _OPENING) & (text[ends[good] - 1] == _CLOSING)
        _leave_out_odd_words(raw, begins, ends, good)
        brackets = (text | 0x20) == _OPENING  # { and [ differ in this bit
        if np.count_nonzero(brackets) - np.count_nonzero(good) > NESTED:
            counts = np.add.reduceat(brackets, np.stack([begins, ends], axis=1).ravel(), dtype=np.int32)[::2]
            good &= counts <= NESTED
        _blank(text, np.concatenate([[0], ends[good]]), np.concatenate([begins[good], [len(text)]]))
        text[ends[good]] = _LINE
        _leave_out_no_text(text, begins, ends, good)
        self.good, self.places = good, live[good]
        self._begins, self._ends = begins[good], ends[good]
        self._text = text.tobytes()

    def between(self, first: int, last: int) -> bytes:
        return self._text[int(self._begins[first]) : int(self._ends[last - 1]) + 1]


def _blank(text: npt.NDArray[np.uint8], begins: Places, ends: Places) -> None:
    sizes = ends - begins
    before = np.cumsum(sizes) - sizes
    at = np.repeat((begins - before).astype(np.int32), sizes)
    at += np.arange(len(at), dtype=np.int32)
    text[at] = _SPACE


def _leave_out_odd_words(text: bytes, begins: Places, ends: Places, good: npt.NDArray[np.bool_]) -> None:
    """Rows with a number that is none in the place of a value; all rows from where they become too many to look at."""
    for word in _ODD_WORDS:
        at = text.find(word) if word[:1] in text else -1  # one letter is found many times faster
        looks = 0
        while at >= 0:
            row, looks = int(np.searchsorted(begins, at, "right")) - 1, looks + 1
            if looks > len(begins):
                good[max(row, 0) :] = False
                break
            inside = row >= 0 and at < ends[row]
            odd = inside and text[max(0, at - 64) : at].rstrip(b" \t\r\n-")[-1:] in (b":", b",", b"[", b"")
            if odd:
                good[row] = False
            at = text.find(word, int(ends[row]) if odd else at + 1)


def _leave_out_no_text(text: npt.NDArray[np.uint8], begins: Places, ends: Places, good: npt.NDArray[np.bool_]) -> None:
    """Rows that are no UTF-8, which Arrow would take for a string."""
    at, refusals = 0, 0
    while at < len(text):
        try:
            bytes(text[at:]).decode()
            return
        except UnicodeDecodeError as error:
            row, refusals = int(np.searchsorted(begins, at + error.start, "right")) - 1, refusals + 1
            last = len(begins) if refusals > REFUSALS else row + 1
            good[row:last] = False
            at = len(text) if refusals > REFUSALS else int(ends[row])
            text[int(begins[row]) : int(ends[last - 1]) + 1] = _SPACE


def _read_as(column: Column, millis: frozenset[str]) -> pa.DataType:
    if column.type in _FORMS:
        return pa.int64() if column.name in millis else pa.string()
    return pa.float64() if column.type == "float32" else arrow_type(column.type)


def _bools(array: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = array.to_numpy(zero_copy_only=False)
    return found
