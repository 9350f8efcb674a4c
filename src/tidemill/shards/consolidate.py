"""Sums of updates, vectorised: what a shard holds at a time, and what a compacted batch must still say. Pure.

Two ways to one answer:
  newest   rows sorted by (hash, time, diff); per key the newest update decides. Only for shards with a key
           whose updates are ±1 and of which every key's history is present. It checks what it relies on and
           says None when something is off (a hash shared by two keys, a sum other than 0 or 1).
  general  Arrow's group-by over whole rows (bitwise equality: NaN equals NaN, 0.0 is not -0.0, null equals null).

Negative multiplicities mean that somebody retracted what was never there: Corrupt, never papered over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.errors import Corrupt
from tidemill.shards.front import DIFF, HASH, TIME, ShardSchema
from tidemill.shards.hashing import hash_rows
from tidemill.shards.parts import sort_updates
from tidemill.shards.schema import contents_schema, hash_columns, update_schema


def contents(schema: ShardSchema, updates: pa.Table) -> pa.Table:
    """The multiset that `updates` (all of them, from the beginning) sum up to: the shard's columns, in hash order.

    A row of multiplicity n appears n times. Raises Corrupt on a negative multiplicity.
    """
    if updates.num_rows == 0:
        return contents_schema(schema).empty_table()
    if schema.key:
        found = newest(schema, updates)
        if found is not None:
            return found
    summed = _group(schema, updates.drop_columns([n for n in (TIME, HASH) if n in updates.column_names]), [])
    counts = summed.column(DIFF).to_numpy()
    if (counts < 0).any():
        at = int(np.nonzero(counts < 0)[0][0])
        named = ", ".join(f"{n}={summed.column(n)[at].as_py()!r}" for n in hash_columns(schema))
        raise Corrupt(f"a row was retracted more often than inserted: {named} count={int(counts[at])}.")
    out = summed.select(contents_schema(schema).names)
    if (counts > 1).any():
        out = out.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
    order = np.argsort(hash_rows(out, hash_columns(schema)), kind="stable")
    return out.take(pa.array(order)).combine_chunks()


def merged(schema: ShardSchema, updates: pa.Table, advance_to: int) -> pa.Table:
    """Updates that mean the same from `advance_to` on: times below it become it, then equal rows are summed.

    Input and output have columns, `_time`, `_diff`; updates later than `advance_to` keep their times. Sums
    that are zero vanish; others keep their count in `_diff`.
    """
    updates = updates.select(update_schema(schema).names)
    old = pc.less_equal(updates.column(TIME), advance_to)
    early = updates.filter(old)
    if early.num_rows == 0:
        return updates
    summed = _group(schema, early.drop_columns([TIME]), [])
    times = pa.array(np.full(summed.num_rows, advance_to, dtype=np.int64))
    early = summed.add_column(len(schema.columns), pa.field(TIME, pa.int64()), times)
    late = updates.filter(pc.invert(old))
    return pa.concat_tables([early.cast(update_schema(schema)), late.cast(update_schema(schema))])


def _group(schema: ShardSchema, updates: pa.Table, extra: list[str]) -> pa.Table:
    """Whole rows (and `extra` columns) with the non-zero sum of their diffs: columns…, `_diff`."""
    names = [*contents_schema(schema).names, *extra]
    # One thread: the result's order is then the order of first appearance, the same in every run.
    summed = updates.group_by(names, use_threads=False).aggregate([(DIFF, "sum")])
    summed = summed.rename_columns([*names, DIFF] if summed.column_names[-1] == f"{DIFF}_sum" else [DIFF, *names])
    summed = summed.select([*names, DIFF])
    return summed.filter(pc.not_equal(summed.column(DIFF), 0))


def newest(schema: ShardSchema, updates: pa.Table) -> pa.Table | None:
    """`contents` by the newest update of each key, which looks at no column but the key's; None when only whole rows
    can tell: a hash that two keys share, a sum other than 0 or 1."""
    diffs = updates.column(DIFF).to_numpy()
    if not bool((np.abs(diffs) == 1).all()):
        return None
    if HASH in updates.column_names:
        hashes = updates.column(HASH).to_numpy()
    else:
        hashes = hash_rows(updates, schema.key)
    order = sort_updates(updates, hashes)
    if order is None:
        order = np.arange(len(hashes))
    hashes, diffs = hashes[order], diffs[order]
    first = np.empty(len(hashes), dtype=bool)
    first[0] = True
    np.not_equal(hashes[1:], hashes[:-1], out=first[1:])
    starts = np.nonzero(first)[0]
    if len(starts) < len(hashes) and not same_keys(schema, updates, order, np.nonzero(~first)[0]):
        return None
    last = np.append(starts[1:], len(hashes)) - 1
    live = diffs[last] == 1
    if not np.array_equal(np.add.reduceat(diffs, starts), live.astype(diffs.dtype)):
        return None
    out = updates.select(contents_schema(schema).names)
    return out.take(pa.array(order[last[live]])).combine_chunks()


def same_keys(schema: ShardSchema, updates: pa.Table, order: Any, repeats: Any) -> bool:
    """Does every row at `repeats` (sorted positions) have the key of the row before it? Nulls equal nulls."""
    here, before = pa.array(order[repeats]), pa.array(order[repeats - 1])
    for name in schema.key:
        column = updates.column(name)
        a, b = column.take(here), column.take(before)
        equal = pc.fill_null(pc.equal(a, b), False)
        if column.null_count:
            equal = pc.or_(equal, pc.and_(pc.is_null(a), pc.is_null(b)))
        if not pc.all(equal).as_py():
            return False
    return True
