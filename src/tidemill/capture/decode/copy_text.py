"""Rows in COPY's text format, decoded one by one and by columns. Pure.

    line     value TAB value … NEWLINE       \\N is NULL; a tab, newline or backslash within a value is escaped

So a raw tab or newline always ends a value, and one pass over many lines finds all values. The few values with an
escape are written in unescaped form behind the lines. The block becomes the same as rows of the stream (row_blocks.py,
columnar_encoder.py).

Invariant (equal results): a block has the same values as `decode_rows`, or there is no block. Input that `decode_rows`
might reject is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidemill.capture.changes import Relation, Row
from tidemill.capture.decode.columnar_tuples import INSERT, PAD_BYTES, OldTuples, TupleWalker, ValueSlices
from tidemill.capture.decode.row_blocks import MAX_COLUMNS, RowBlock
from tidemill.capture.postgres.pgoutput import not_utf8_error

MIN_COLUMNAR_LINES = 48
"""Fewer lines are decoded and encoded faster one by one."""
MAX_BLOCK_BYTES = 16 << 20
"""Maximum size of a block: joining larger lines costs more than decoding their rows."""
_TAB, _NEWLINE, _BACKSLASH, _N = b"\t\n\\N"
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_BYTES = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPES_BYTES = {name.encode(): byte.encode() for name, byte in _ESCAPES.items()}


def decode_rows(relation: Relation, lines: Sequence[bytes]) -> list[Row]:
    """Decode the lines one by one. Raises ValueError for a line with a wrong number of values, InvalidError for one
    that is not UTF-8.
    """
    names = [column.name for column in relation.columns]
    return [dict(zip(names, parse_copy_row(line), strict=True)) for line in lines]


def parse_copy_row(line: bytes) -> list[str | None]:
    """Decode one row of COPY's text format: tabs between values, \\N for NULL, backslash escapes."""
    try:
        text = line.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise not_utf8_error(error) from error
    values: list[str | None] = [*text.split("\t")]
    if "\\" not in text:
        return values
    return [None if value == "\\N" else _unescape_value(value) for value in text.split("\t")]


def _unescape_value(value: str) -> str:
    return _ESCAPED.sub(lambda m: _ESCAPES.get(m.group(1), m.group(1)), value) if "\\" in value else value


def decode_block(relation: Relation, lines: Sequence[bytes]) -> RowBlock | None:
    """Return the rows of these lines by columns, as inserts; None if `decode_rows` has to decode them."""
    columns, count = len(relation.columns), len(lines)
    if not 0 < columns <= MAX_COLUMNS or count < MIN_COLUMNAR_LINES:
        return None
    body = b"".join(lines)
    if len(body) > MAX_BLOCK_BYTES or not _is_utf8(body):
        return None
    data = np.frombuffer(body, np.uint8)
    (ends,) = np.nonzero((data == _TAB) | (data == _NEWLINE))
    if len(ends) != columns * count:
        return None
    marks = data[ends].reshape(count, columns)
    if (marks[:, :-1] != _TAB).any() or (marks[:, -1] != _NEWLINE).any():
        return None
    starts = np.empty(len(ends), np.int64)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    sizes = ends - starts
    if b"\\" in body:
        body += _append_unescaped_values(body, data, starts, ends, sizes)
    by_column = ValueSlices(
        np.ascontiguousarray(starts.reshape(count, columns).T), np.ascontiguousarray(sizes.reshape(count, columns).T)
    )
    walker = TupleWalker(body + bytes(PAD_BYTES))
    nothing = np.zeros(0, np.int64)
    old = OldTuples(nothing, ValueSlices(by_column.starts[:, nothing], by_column.sizes[:, nothing]))
    return RowBlock(relation, np.arange(count), np.full(count, INSERT, np.uint8), by_column, old, walker)


def _append_unescaped_values(body: bytes, data: Any, starts: Any, ends: Any, sizes: Any) -> bytes:
    """Return the unescaped values that had escapes, one after the other. Their places behind the body are stored in
    `starts` and `sizes`. NULL becomes the size −1.
    """
    (slashes,) = np.nonzero(data == _BACKSLASH)
    odd = np.unique(np.searchsorted(ends, slashes))
    null = (sizes[odd] == 2) & (data[starts[odd]] == _BACKSLASH) & (data[starts[odd] + 1] == _N)
    sizes[odd[null]] = -1
    written: list[bytes] = []
    at = len(body)
    for field in odd[~null].tolist():
        value = _ESCAPED_BYTES.sub(
            lambda m: _ESCAPES_BYTES.get(m.group(1), m.group(1)), body[starts[field] : ends[field]]
        )
        starts[field], sizes[field] = at, len(value)
        at += len(value)
        written.append(value)
    return b"".join(written)


def _is_utf8(body: bytes) -> bool:
    if body.isascii():
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
