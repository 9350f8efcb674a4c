"""Values → one text with one value per line, without an object per value: the input of Arrow's text readers.

    body      … │ header │ value │ header │ value │ …       places of the values by columns
    lines            value ⏎ value ⏎ …                     one copy by Arrow: the gaps of a binary array
                                                            (value, gap, value, …) are filtered out

The byte after a value never belongs to another value (in a batch it is the header count), so the newline replaces it.
The number of lines and their bytes are limited.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Places = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

STRETCH_LINES = 5_000
STRETCH_BYTES = 2 << 20
"""Limits of a stretch: its number of values, and the bytes in which they are (a larger value is alone). Measured: every
stretch costs a handover to another thread for Arrow's reader, and a larger one exceeds the CPU cache."""

BRACKETS_MAX = 200
"""A row with more brackets than this may exceed the nesting limit of the other reader."""

_OPENING, _CLOSING, _LINE = b"{}\n"
_BEFORE_VALUES = np.zeros(256, dtype=bool)
_BEFORE_VALUES[list(b":,[")] = True
_SKIPPED = np.zeros(256, dtype=bool)
_SKIPPED[list(b" \t\r\n-")] = True
_SKIPPED_MAX = 64
_MINUS, _E = b"-e"
_DIGIT = np.zeros(256, dtype=bool)
_DIGIT[list(b"0123456789")] = True
_IN_NUMBERS = _DIGIT.copy()
_IN_NUMBERS[list(b"+-.")] = True
_BEFORE_NUMBERS = _BEFORE_VALUES.copy()
_BEFORE_NUMBERS[list(b'" \t\r\n')] = True
_ESCAPED = (b"2d", b"2D", b"45", b"65", *(b"3%d" % digit for digit in range(10)))
_ESCAPED_NUMBER_CHARS = np.array([int.from_bytes(pair) for pair in _ESCAPED])
"""Characters after \\u00 of an escaped minus, E, e or digit."""
_NON_FINITE_WORDS = (b"NaN", b"Inf")
_QUOTE, _ESCAPE = b'"\\'
_ESCAPES_MAX = 32


class JsonLines:
    """Objects that may be passed to Arrow's reader: UTF-8, not too deep, without NaN or Infinity; for decimals, without
    exponents that Arrow does not check. `places[i]` is the record of line i, `left_out` those of the other values."""

    def __init__(self, body: pa.Buffer, at: Places, sizes: Places, places: Places, *, decimals: bool = False) -> None:
        self._checks = (
            _invalid_utf8_rows,
            _deeply_nested_rows,
            _non_finite_rows,
            *((_small_exponent_rows,) if decimals else ()),
        )
        data = np.frombuffer(body, dtype=np.uint8)
        # For a value that is too short the bytes belong to other data, and the size check rejects it.
        good = (sizes >= 2) & (data[at] == _OPENING) & (data[at + sizes - 1] == _CLOSING)
        self._load(bytes_of_ranges(body, at, at + sizes + 1, good))
        odd = self._odd_lines() if good.any() else None
        if odd is not None:
            array = pa.Array.from_buffers(
                pa.binary(), len(odd), [None, pa.py_buffer(self._offsets), pa.py_buffer(self._text)]
            )
            self._load(array.filter(pa.array(~odd)))
            good[good] = ~odd
        self.places, self.left_out = places[good], places[~good]

    def between(self, first: int, last: int) -> pa.Buffer:
        return pa.py_buffer(self._text[self._offsets[first] : self._offsets[last]])

    def _load(self, array: pa.Array) -> None:
        _, offsets, data = array.buffers()
        self._offsets = np.frombuffer(offsets, dtype=np.int32)[: len(array) + 1]
        self._text = np.frombuffer(data, dtype=np.uint8)[: self._offsets[-1]].copy()  # it may share the batches' memory
        self._text[self._offsets[1:] - 1] = _LINE

    def _odd_lines(self) -> Mask | None:
        """Return a mask of the lines that only the other reader may read; or None."""
        found = [odd for odd in (check(self._text, self._offsets) for check in self._checks) if odd is not None]
        return np.logical_or.reduce(found) if found else None


def cut_stretches(
    body: pa.Buffer, at: Places, sizes: Places, places: Places, *, decimals: bool = False
) -> Iterator[JsonLines]:
    """Yield the values that start at `at`, ascending, as lines in order."""
    ends = at + sizes
    first, most = 0, -(-len(at) // max(1, -(-len(at) // STRETCH_LINES)))  # stretches of about equal size
    while first < len(at):
        reached = int(np.searchsorted(ends, at[first] + STRETCH_BYTES, side="right"))
        last = min(first + most, max(reached, first + 1))
        yield JsonLines(body, at[first:last], sizes[first:last], places[first:last], decimals=decimals)
        first = last


def fields_as_strings(body: bytes, at: Places, sizes: Places) -> pa.Array:
    """Return the fields that start at `at`, ascending, as strings. Raises ArrowInvalid if one is not UTF-8."""
    if not len(at):
        return pa.array([], pa.string())
    found = bytes_of_ranges(pa.py_buffer(body), at, at + sizes, np.ones(len(at), dtype=bool))
    strings = pa.Array.from_buffers(pa.string(), len(found), found.buffers())
    strings.validate(full=True)
    return strings


def bytes_of_ranges(body: pa.Buffer, begins: Places, ends: Places, good: Mask) -> pa.Array:
    """Return the bytes of the good ranges as a binary array; the ranges ascend."""
    count, low = len(begins), int(begins[0])
    offsets = np.empty(2 * count + 1, dtype=np.int32)
    offsets[0:-1:2] = begins - low
    offsets[1::2] = ends - low
    offsets[-1] = ends[-1] - low
    buffers = [None, pa.py_buffer(offsets), body.slice(low, int(offsets[-1]))]
    with_gaps = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
    mask = np.zeros(2 * count, dtype=bool)
    mask[::2] = good
    return with_gaps.filter(pa.array(mask))


def _invalid_utf8_rows(text: Bytes, offsets: Offsets) -> Mask | None:
    """Return a mask of rows that are not UTF-8, which Arrow would accept as a string; None if all are."""
    try:
        lines = pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, *map(pa.py_buffer, (offsets, text))])
        lines.validate(full=True)
        return None
    except pa.ArrowInvalid:
        odd = np.zeros(len(offsets) - 1, dtype=bool)
    for row in np.unique(_rows_at(offsets, np.flatnonzero(text > 0x7F))).tolist():
        try:
            bytes(text[offsets[row] : offsets[row + 1]]).decode()
        except UnicodeDecodeError:
            odd[row] = True
    return odd


def _deeply_nested_rows(text: Bytes, offsets: Offsets) -> Mask | None:
    brackets = (text | 0x20) == _OPENING  # { and [ differ in this bit
    if np.count_nonzero(brackets) - len(offsets) + 1 <= BRACKETS_MAX:
        return None
    odd: Mask = np.add.reduceat(brackets, offsets[:-1], dtype=np.int32) > BRACKETS_MAX
    return odd if odd.any() else None


def _non_finite_rows(text: Bytes, offsets: Offsets) -> Mask | None:
    """Return a mask of rows with NaN or Infinity at the place of a value: after one of `:,[`, blanks and a sign."""
    at = np.concatenate([_find_word(text, word) for word in _NON_FINITE_WORDS])
    if not len(at):
        return None
    rows, before = _rows_at(offsets, at), at - 1  # within the row, whose first byte is {
    return _rows_preceded_by(text, rows, before, _BEFORE_VALUES, _SKIPPED, len(offsets) - 1)


def _small_exponent_rows(text: Bytes, offsets: Offsets) -> Mask | None:
    """Return a mask of rows with a number, also within a string, whose exponent is -10 or less.

    Arrow does not check the power of ten that it looks up for a decimal (shards/parts/numbers.py). An escaped digit, e
    or - in a string may belong to such a number.
    """
    last = len(text) - 1
    small = np.flatnonzero(text == _MINUS) - 1  # a minus is never the first byte of a row
    small = small[(text[small] | 0x20) == _E]
    small = small[_DIGIT[text[np.minimum(small + 2, last)]] & _DIGIT[text[np.minimum(small + 3, last)]]]
    odd = _rows_preceded_by(text, _rows_at(offsets, small), small - 1, _BEFORE_NUMBERS, _IN_NUMBERS, len(offsets) - 1)
    escaped = _find_word(text, b"\\u00")
    if len(escaped):
        pairs = text[np.minimum(escaped + 4, last)].astype(np.uint16) << 8 | text[np.minimum(escaped + 5, last)]
        odd = np.zeros(len(offsets) - 1, dtype=bool) if odd is None else odd
        odd[_rows_at(offsets, escaped[np.isin(pairs, _ESCAPED_NUMBER_CHARS)])] = True
    return odd if odd is not None and odd.any() else None


def _rows_preceded_by(
    text: Bytes, rows: Places, before: Places, begins: Mask, skipped: Mask, count: int
) -> Mask | None:
    """Return a mask of rows where one of `begins` precedes these places, with any of `skipped` in between; rows where
    the search takes too many steps are included."""
    odd = np.zeros(count, dtype=bool)
    for _ in range(_SKIPPED_MAX):
        if not len(rows):
            break
        odd[rows[begins[text[before]]]] = True
        go_on = skipped[text[before]]
        rows, before = rows[go_on], before[go_on] - 1
    odd[rows] = True
    return odd if odd.any() else None


def _find_word(text: Bytes, word: bytes) -> Places:
    """Return the places of the word. The last byte of a text is a newline."""
    at = np.flatnonzero(text[: -len(word)] == word[0])
    for further in range(1, len(word)):
        at = at[text[at + further] == word[further]]
    return at


def count_quotes(text: Bytes) -> int:
    """Return the number of unescaped quotes in a JSON text; −1 if counting takes too many steps."""
    marks, escapes = text == _QUOTE, text == _ESCAPE
    count = int(np.count_nonzero(marks))
    before = np.flatnonzero(marks[1:] & escapes[:-1])
    for n in range(_ESCAPES_MAX):
        if not len(before):
            return count
        # One more backslash: quotes after an even number of them now have an odd number, so they are escaped; or
        # reverse.
        count += -len(before) if n % 2 == 0 else len(before)
        before = before[escapes[before - 1]] - 1
    return -1


def _rows_at(offsets: Offsets, at: Places) -> Places:
    return np.searchsorted(offsets, at, side="right") - 1
