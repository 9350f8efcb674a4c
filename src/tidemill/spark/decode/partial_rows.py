"""Partial rows: records of a captured table that omit columns whose values did not change, identified by their headers.

tm.unchanged   JSON array of the columns: TOASTed values that an UPDATE left unchanged, under an identity that does not
               include the old row (capture/topics/record_writer.py)
tm.was         the key of the row before, if it changed as well

Only records with more headers than their version has are checked; those that omit the same columns are decoded
together, by columns. The values of the columns are resolved with the mirror (upsert/toast_fill.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.spark.decode.newline_text import Places
from tidemill.spark.merge.commands import RECORD_KEY, UNCHANGED
from tidemill.topics.batch import RecordColumns

UNCHANGED_HEADER, WAS_HEADER = "tm.unchanged", "tm.was"


class OmittedColumns(msgspec.Struct, frozen=True):
    """Records that omit the same columns. `names`: the header's bytes; `moved`: their keys changed."""

    names: bytes
    moved: bool
    places: Places


def split_partial_rows(columns: RecordColumns, valued: Places, plain: int) -> tuple[Places, list[OmittedColumns]]:
    """Separate the records with all columns from the others. `plain`: the number of headers of a record with all
    columns."""
    more = columns.header_counts[valued] > plain
    if not more.any():
        return valued, []
    found: dict[tuple[bytes, bool], list[int]] = {}
    for at in valued[more].tolist():
        headers = dict(columns.headers_of(at))
        names = headers.get(UNCHANGED_HEADER)
        if names is not None:
            found.setdefault((names, WAS_HEADER in headers), []).append(at)
    leaving = [OmittedColumns(*kind, np.array(places, dtype=np.int64)) for kind, places in found.items()]
    if not leaving:
        return valued, []
    return np.setdiff1d(valued, np.concatenate([some.places for some in leaving]), assume_unique=True), leaving


def add_unchanged_columns(
    table: pa.Table, live_at: Places, leaving: Sequence[OmittedColumns], columns: RecordColumns
) -> pa.Table:
    """Add the columns of partial rows to commands, the first of which are those of the records at `live_at`.

    A partial record that is not among them became a dead letter.
    """
    row_of = {place: row for row, place in enumerate(live_at.tolist())}
    names: list[bytes | None] = [None] * table.num_rows
    keys: list[bytes | None] = [None] * table.num_rows
    for some in leaving:
        for place in some.places.tolist():
            row = row_of.get(place)
            if row is not None:
                names[row], keys[row] = some.names, columns.key(place)
    table = table.append_column(UNCHANGED, pa.array(names, pa.binary()))
    return table.append_column(RECORD_KEY, pa.array(keys, pa.binary()))
