"""Tuples by columns: find every value of many rows with one step per column. Pure.

    message   'I' oid 'N' new      'D' oid 'O' old      'U' oid 'O' old 'N' new
                                   'D' oid 'K' old      'U' oid 'N' new          if keys suffice (row_tuples.py)
    tuple     int16 n   n × ('n' null | 'u' unchanged TOAST | 't' int32 length, text)

A tuple has C columns, so C vectorised steps over all rows read the kind and the length of column c and move every row's
cursor past it. A cursor never leaves the buffer: no input makes it read outside.

Invariant (whole rows): `whole` is True only if the per-row functions (row_tuples.py) can read the row without an error,
and its key did not change. In doubt a row is not whole: it is decoded by the per-row functions, which report what is
wrong with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

PAD_BYTES = 8
"""Padding behind the last message, so that a kind and a length can be read at its end."""
KIND_AT, OID_AT, MARK_AT, TUPLE_AT = 0, 1, 5, 6
"""Offsets in the message of a change."""
INSERT, UPDATE, DELETE = b"IUD"
_NEW, _OLD, _KEY = b"NOK"
_TEXT, _NULL, _UNCHANGED = b"tnu"


class ValueSlices(NamedTuple):
    """Values of one tuple of every row, [column, row]: the start of a value, and its number of bytes; −1 is NULL."""

    starts: Int64s
    sizes: Int64s


class OldTuples(NamedTuple):
    """Old values of the rows of UPDATEs, whose numbers `rows` are ascending."""

    rows: Int64s
    values: ValueSlices

    def select_whole(self, whole: Bools) -> OldTuples:
        """Return the old values restricted to, and numbered by, the rows that are whole."""
        kept = whole[self.rows]
        places = np.cumsum(whole) - 1
        values = ValueSlices(self.values.starts[:, kept], self.values.sizes[:, kept])
        return OldTuples(places[self.rows[kept]], values)


class WalkResult(NamedTuple):
    """Result of a walk. `rows`: the row that each message leaves in the table, or the one that it deletes. `kinds`:
    kinds of the messages.
    """

    rows: ValueSlices
    kinds: Bytes
    whole: Bools
    old: OldTuples


class TupleWalker:
    """One buffer of messages, with PAD_BYTES behind the last."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.bytes: Bytes = np.frombuffer(body, np.uint8)
        self._words = np.ndarray((len(body) - 3,), ">u4", body, strides=(1,))
        self._halves = np.ndarray((len(body) - 1,), ">u2", body, strides=(1,))
        self._last = len(body) - PAD_BYTES
        self._high: npt.NDArray[np.int32] | None = None

    def relation_oids(self, starts: Int64s) -> Int64s:
        """Return the relation oid of each message."""
        return self._words[starts + OID_AT].astype(np.int64)

    def read_changes(
        self, starts: Int64s, ends: Int64s, columns: int, keys: list[int], *, keys_suffice: bool = False
    ) -> WalkResult:
        """Read the changes at [start, end), of a relation with this number of columns; `keys` are those of its key.
        `keys_suffice`: a DELETE need not carry more of its old row, and an UPDATE that keeps its key nothing.
        """
        kinds = self.bytes[starts]
        marks = self.bytes[starts + MARK_AT]
        whole = marks == np.where(kinds == INSERT, _NEW, _OLD)
        alone = np.zeros(len(kinds), np.bool_)
        if keys_suffice:
            alone = (kinds == UPDATE) & (marks == _NEW)
            whole |= alone | ((kinds == DELETE) & (marks == _KEY))
        rows, unchanged, at = self._read_tuples(starts + TUPLE_AT, columns, whole)
        # Only an UPDATE can fill an unchanged value from its old tuple, and only in its second tuple.
        whole &= ~unchanged.any(axis=0)
        if keys_suffice:
            whole &= (kinds != DELETE) | (rows.sizes[keys] >= 0).all(axis=0)
        (updates,) = np.nonzero((kinds == UPDATE) & ~alone)
        old = ValueSlices(rows.starts[:, updates], rows.sizes[:, updates])
        if len(updates):
            fine = self.bytes[at[updates]] == _NEW
            second, unchanged, at[updates] = self._read_tuples(np.minimum(at[updates] + 1, self._last), columns, fine)
            new = ValueSlices(
                np.where(unchanged, old.starts, second.starts), np.where(unchanged, old.sizes, second.sizes)
            )
            rows.starts[:, updates], rows.sizes[:, updates] = new
            fine &= whole[updates]
            fine &= ~(unchanged & (old.sizes < 0)).any(axis=0)  # such a value is never NULL: the old row is not whole
            fine &= ~self._find_changed_keys(old, new, keys, fine)
            fine[self._find_non_utf8_rows(old, fine)] = False
            whole[updates] = fine
        whole &= at == ends
        whole[self._find_non_utf8_rows(rows, whole)] = False
        return WalkResult(rows, kinds, whole, OldTuples(updates, old))

    def _read_tuples(self, at: Int64s, columns: int, fine: Bools) -> tuple[ValueSlices, Bools, Int64s]:
        """Return the values of the tuple that begins at `at` in every row, which of them are unchanged, and the end of
        the tuple. `fine` becomes False for a wrong number of columns or an unknown kind of value.
        """
        fine &= self._halves[at] == columns
        at = np.minimum(at + 2, self._last)
        starts = np.empty((columns, len(at)), np.int64)
        sizes = np.empty((columns, len(at)), np.int64)
        unchanged = np.zeros((columns, len(at)), np.bool_)
        for column in range(columns):
            kinds = self.bytes[at]
            texts = kinds == _TEXT
            if texts.all():
                sizes[column] = self._words[at + 1]
                starts[column] = at + 5
                at = starts[column] + sizes[column]
            else:
                unchanged[column] = kinds == _UNCHANGED
                fine &= texts | unchanged[column] | (kinds == _NULL)
                sizes[column] = np.where(texts, self._words[at + 1].astype(np.int64), -1)
                starts[column] = np.where(texts, at + 5, at)
                at = np.where(texts, starts[column] + sizes[column], at + 1)
            inside = at <= self._last
            if not inside.all():
                fine &= inside
                at = np.minimum(at, self._last)
        return ValueSlices(starts, sizes), unchanged, at

    def _find_changed_keys(self, old: ValueSlices, new: ValueSlices, keys: list[int], whole: Bools) -> Bools:
        """Return the rows in which any column of `keys` differs in `new`. The result for rows that are not whole is
        undefined.
        """
        differ = np.zeros(len(whole), np.bool_)
        for key in keys:
            other = old.sizes[key] != new.sizes[key]
            same = np.nonzero(whole & ~other & (old.starts[key] != new.starts[key]) & (new.sizes[key] > 0))[0]
            if len(same):
                sizes = new.sizes[key][same]
                offsets = np.cumsum(sizes) - sizes
                steps = np.arange(int(sizes.sum())) - np.repeat(offsets, sizes)
                there = np.minimum(np.repeat(old.starts[key][same], sizes) + steps, self._last)
                here = np.minimum(np.repeat(new.starts[key][same], sizes) + steps, self._last)
                unequal = self.bytes[there] != self.bytes[here]
                if unequal.any():
                    other[same[np.unique(np.repeat(np.arange(len(same)), sizes)[unequal])]] = True
            differ |= other
        return differ

    def _find_non_utf8_rows(self, values: ValueSlices, whole: Bools) -> Int64s:
        """Return the whole rows with a value that is not UTF-8. Checks only values with a byte above 0x7F."""
        if self._high is None:
            self._high = np.zeros(len(self.bytes) + 1, np.int32)
            np.cumsum(self.bytes >> 7, out=self._high[1:])
        high = self._high
        ends = np.minimum(values.starts + np.maximum(values.sizes, 0), self._last)
        columns, rows = np.nonzero((high[ends] != high[np.minimum(values.starts, self._last)]) & whole)
        if not len(rows):
            return rows
        starts = values.starts[columns, rows]
        sizes = values.sizes[columns, rows]
        data, offsets = gather_slices(self.body, self.bytes, starts, sizes)
        texts = build_string_array(data, offsets, None)
        try:
            texts.validate(full=True)
        except pa.ArrowInvalid:
            return np.array(
                [
                    row
                    for row, text in zip(rows.tolist(), texts.view(pa.binary()), strict=True)
                    if not _is_utf8(text.as_py())
                ],
                dtype=np.int64,
            )
        return rows[:0]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


SLICING_THRESHOLD_BYTES = 24
"""Values with a higher average length are sliced one by one: copying a slice is cheaper than one step per byte."""


def gather_slices(
    body: bytes, values: Bytes, starts: Int64s, sizes: Int64s
) -> tuple[bytes | Bytes, npt.NDArray[np.int32]]:
    """Return the bytes at [start, start + size) back to back, and the offsets between them; no size is below 0."""
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    total = int(offsets[-1])
    if total > SLICING_THRESHOLD_BYTES * len(sizes):
        ends = starts + sizes
        return b"".join([body[at:end] for at, end in zip(starts.tolist(), ends.tolist(), strict=True)]), offsets
    at = np.repeat(starts - offsets[:-1], sizes)
    at += np.arange(total)
    return values.take(at), offsets


def build_string_array(data: bytes | Bytes, offsets: npt.NDArray[np.int32], valid: Bools | None) -> pa.Array:
    """Return a column of texts. A False in `valid` is NULL; `valid` None: no NULL."""
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [bitmap, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(data)]
    return pa.StringArray.from_buffers(len(offsets) - 1, buffers[1], buffers[2], buffers[0])
