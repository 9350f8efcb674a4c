"""Values → one text with a line each, without an object per value: what Arrow's readers of text take.

    body      … │ header │ value │ header │ value │ …       places of the values by columns
    lines            value ⏎ value ⏎ …                     one copy by Arrow: of a binary array (value, gap, value, …)
                                                            the gaps are left out

The byte behind a value is never another value's (in a batch it is the header count), so the line's end takes its place.
Lines are bounded by count and bytes.
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

LINES = 5_000
SPAN_BYTES = 2 << 20
"""At most so many values at once, which lie within so many bytes (a value larger than that is alone). Measured: every
stretch is a visit to another thread for Arrow's reader, and what is larger leaves the cache."""

NESTED = 200
"""With so many brackets in it, a row may be nested as deep as only the other reader knows."""

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
_OF_NUMBERS = np.array([int.from_bytes(pair) for pair in _ESCAPED])
"""What stands behind \\u00 of a minus, an E, an e and the digits."""
_WORDS = (b"NaN", b"Inf")
_QUOTE, _ESCAPE = b'"\\'
_ESCAPES_MAX = 32


class Lines:
    """Objects that Arrow's reader may see: UTF-8, not too deep, without a number that is none; where it reads decimals,
    without an exponent that it does not check. `places[i]` is the record of line i, `left_out` those of the other
    values."""

    def __init__(self, body: pa.Buffer, at: Places, sizes: Places, places: Places, *, decimals: bool = False) -> None:
        self._checks = (_not_text, _too_deep, _no_numbers, *((_small_exponents,) if decimals else ()))
        data = np.frombuffer(body, dtype=np.uint8)
        # A byte that is looked at for too short a value is anyone's, and does not count.
        good = (sizes >= 2) & (data[at] == _OPENING) & (data[at + sizes - 1] == _CLOSING)
        self._take(of_ranges(body, at, at + sizes + 1, good))
        odd = self._odd() if good.any() else None
        if odd is not None:
            array = pa.Array.from_buffers(
                pa.binary(), len(odd), [None, pa.py_buffer(self._offsets), pa.py_buffer(self._text)]
            )
            self._take(array.filter(pa.array(~odd)))
            good[good] = ~odd
        self.places, self.left_out = places[good], places[~good]

    def between(self, first: int, last: int) -> pa.Buffer:
        return pa.py_buffer(self._text[self._offsets[first] : self._offsets[last]])

    def _take(self, array: pa.Array) -> None:
        _, offsets, data = array.buffers()
        self._offsets = np.frombuffer(offsets, dtype=np.int32)[: len(array) + 1]
        self._text = np.frombuffer(data, dtype=np.uint8)[: self._offsets[-1]].copy()  # its memory may be the batches'
        self._text[self._offsets[1:] - 1] = _LINE

    def _odd(self) -> Mask | None:
        """Which lines only the other reader may see; None where there are none."""
        found = [odd for odd in (check(self._text, self._offsets) for check in self._checks) if odd is not None]
        return np.logical_or.reduce(found) if found else None


def stretches(body: pa.Buffer, at: Places, sizes: Places, places: Places, *, decimals: bool = False) -> Iterator[Lines]:
    """The values that begin at `at`, ascending, in order."""
    ends = at + sizes
    first, most = 0, -(-len(at) // max(1, -(-len(at) // LINES)))  # all of about one size
    while first < len(at):
        reached = int(np.searchsorted(ends, at[first] + SPAN_BYTES, side="right"))
        last = min(first + most, max(reached, first + 1))
        yield Lines(body, at[first:last], sizes[first:last], places[first:last], decimals=decimals)
        first = last


def texts(body: bytes, at: Places, sizes: Places) -> pa.Array:
    """The fields that lie at `at`, ascending, as strings. Raises ArrowInvalid where one of them is no UTF-8."""
    if not len(at):
        return pa.array([], pa.string())
    found = of_ranges(pa.py_buffer(body), at, at + sizes, np.ones(len(at), dtype=bool))
    strings = pa.Array.from_buffers(pa.string(), len(found), found.buffers())
    strings.validate(full=True)
    return strings


def of_ranges(body: pa.Buffer, begins: Places, ends: Places, good: Mask) -> pa.Array:
    """The bytes of the good ones of some ranges, which ascend, as a binary array."""
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


def _not_text(text: Bytes, offsets: Offsets) -> Mask | None:
    """Rows that are no UTF-8, which Arrow would take for a string."""
    try:
        lines = pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, *map(pa.py_buffer, (offsets, text))])
        lines.validate(full=True)
        return None
    except pa.ArrowInvalid:
        odd = np.zeros(len(offsets) - 1, dtype=bool)
    for row in np.unique(_rows(offsets, np.flatnonzero(text > 0x7F))).tolist():
        try:
            bytes(text[offsets[row] : offsets[row + 1]]).decode()
        except UnicodeDecodeError:
            odd[row] = True
    return odd


def _too_deep(text: Bytes, offsets: Offsets) -> Mask | None:
    brackets = (text | 0x20) == _OPENING  # { and [ differ in this bit
    if np.count_nonzero(brackets) - len(offsets) + 1 <= NESTED:
        return None
    odd: Mask = np.add.reduceat(brackets, offsets[:-1], dtype=np.int32) > NESTED
    return odd if odd.any() else None


def _no_numbers(text: Bytes, offsets: Offsets) -> Mask | None:
    """Rows with NaN or Infinity where a value may stand: behind one of `:,[`, blanks and a sign."""
    at = np.concatenate([_found(text, word) for word in _WORDS])
    if not len(at):
        return None
    rows, before = _rows(offsets, at), at - 1  # within the row, whose first byte is none of those
    return _begun(text, rows, before, _BEFORE_VALUES, _SKIPPED, len(offsets) - 1)


def _small_exponents(text: Bytes, offsets: Offsets) -> Mask | None:
    """Rows with a number, or a text of one, that has an exponent of -10 or less: Arrow does not check the power of ten
    that it looks up for a decimal (shards/parts/decimals.py). A digit, e or - that is escaped in a string may be of
    one."""
    last = len(text) - 1
    small = np.flatnonzero(text == _MINUS) - 1  # no row begins with it
    small = small[(text[small] | 0x20) == _E]
    small = small[_DIGIT[text[np.minimum(small + 2, last)]] & _DIGIT[text[np.minimum(small + 3, last)]]]
    odd = _begun(text, _rows(offsets, small), small - 1, _BEFORE_NUMBERS, _IN_NUMBERS, len(offsets) - 1)
    escaped = _found(text, b"\\u00")
    if len(escaped):
        pairs = text[np.minimum(escaped + 4, last)].astype(np.uint16) << 8 | text[np.minimum(escaped + 5, last)]
        odd = np.zeros(len(offsets) - 1, dtype=bool) if odd is None else odd
        odd[_rows(offsets, escaped[np.isin(pairs, _OF_NUMBERS)])] = True
    return odd if odd is not None and odd.any() else None


def _begun(text: Bytes, rows: Places, before: Places, begins: Mask, skipped: Mask, count: int) -> Mask | None:
    """Rows with one of `begins` before these places, behind any of `skipped`; where that takes long to say, too."""
    odd = np.zeros(count, dtype=bool)
    for _ in range(_SKIPPED_MAX):
        if not len(rows):
            break
        odd[rows[begins[text[before]]]] = True
        go_on = skipped[text[before]]
        rows, before = rows[go_on], before[go_on] - 1
    odd[rows] = True
    return odd if odd.any() else None


def _found(text: Bytes, word: bytes) -> Places:
    """Where the word stands. The last byte of a text is a line's end."""
    at = np.flatnonzero(text[: -len(word)] == word[0])
    for further in range(1, len(word)):
        at = at[text[at + further] == word[further]]
    return at


def quotes(text: Bytes) -> int:
    """How many strings begin or end in a text of JSON; −1 where that takes long to say."""
    marks, escapes = text == _QUOTE, text == _ESCAPE
    count = int(np.count_nonzero(marks))
    before = np.flatnonzero(marks[1:] & escapes[:-1])
    for n in range(_ESCAPES_MAX):
        if not len(before):
            return count
        # One escape more: what had an even number of them has an odd one now, so it is escaped; or the reverse.
        count += -len(before) if n % 2 == 0 else len(before)
        before = before[escapes[before - 1]] - 1
    return -1


def _rows(offsets: Offsets, at: Places) -> Places:
    return np.searchsorted(offsets, at, side="right") - 1
