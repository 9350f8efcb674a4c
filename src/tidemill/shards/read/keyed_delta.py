"""Effect of later updates on settled rows: the recent difference of a keyed shard, vectorised. Pure.

Requires normal histories: per key at most one live row, and per (key, time) at most one retraction and one insertion,
the retraction first. Then the last update of a key decides, in whichever part the others are.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.shards.api import DIFF, HASH, TIME, ShardSchema
from tidemill.shards.parts.arrow_rows import rows_at, rows_equal
from tidemill.shards.parts.parts import sort_updates
from tidemill.shards.parts.schema import contents_schema

UNTIL_COLUMN = "_until"


def last_states(schema: ShardSchema, updates: pa.Table) -> tuple[pa.Table, pa.Table] | None:
    """Return (gone, live) of all keys that `updates` (with `_hash`) touch; None if their histories are not normal.

    gone    `_hash`, the columns of the key, `_until`: an insertion of this key elsewhere before that time is superseded
    live    the rows that result from these updates, with the shard's columns
    """
    hashes = updates.column(HASH).to_numpy()
    order = sort_updates(updates, hashes)
    if order is not None:
        updates, hashes = rows_at(updates, order), hashes[order]
    diffs = updates.column(DIFF).to_numpy()
    same = hashes[1:] == hashes[:-1]
    if not bool((np.abs(diffs) == 1).all()):
        return None
    # One key per hash, and none inserted twice without a retraction in between. (The insertion between two consecutive
    # retractions is in another part.)
    repeats = np.nonzero(same)[0] + 1
    if bool((diffs[repeats] + diffs[repeats - 1] > 1).any()):
        return None
    if not rows_equal(updates, repeats - 1, updates, repeats, schema.key).all():
        return None
    last = np.append(~same, True) if len(hashes) else np.zeros(0, dtype=bool)
    ends, left = updates.filter(pa.array(last)), diffs[last] == 1
    until = ends.column(TIME).to_numpy() + left
    gone = ends.select([HASH, *schema.key]).append_column(UNTIL_COLUMN, pa.array(until, pa.int64()))
    return gone, ends.select(contents_schema(schema).names).filter(pa.array(left))
