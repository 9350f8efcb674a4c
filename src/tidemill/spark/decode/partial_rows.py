"""Records of a captured table whose values lack columns, which the row has from before: found by their headers.

tm.unchanged   JSON array of the columns: TOASTed values that an UPDATE left as they were, under an identity that does
               not say the old row (capture/topics/topic_writer.py)
tm.was         the key that the row had before, where that changed as well

Only a record with more headers than its version has is looked at, and those of one set of columns are read together,
by columns. What the columns come to is resolved beside the mirror (upsert/toast_fill.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.spark.decode.newline_text import Places
from tidemill.spark.upsert.commands import RECORD_KEY, UNCHANGED
from tidemill.topics.batch import Columns

UNCHANGED_HEADER, WAS_HEADER = "tm.unchanged", "tm.was"


class OmittedColumns(msgspec.Struct, frozen=True):
    """Records that leave the same columns. `names`: the header as it is; `moved`: their keys changed."""

    names: bytes
    moved: bool
    places: Places


def set_aside(columns: Columns, valued: Places, plain: int) -> tuple[Places, list[OmittedColumns]]:
    """Of the records at these places those that have all columns, and the others. `plain`: the headers of one that has
    all."""
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


def with_leaving(table: pa.Table, live_at: Places, leaving: Sequence[OmittedColumns], columns: Columns) -> pa.Table:
    """Commands, of which the first ones are those of the records at `live_at`, with what the records leave. One that is
    not among them turned out to be a dead letter."""
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
