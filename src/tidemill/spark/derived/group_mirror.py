"""Mirror by group: finds all live rows whose columns `by` have given values, and no others.

Invariant (identity): a row's identity is (by, key). A row that changes its group leaves the old one and joins the new
one.
Invariant (hash): the upper half of a row's hash is its group's, the lower half its key's. So a group's rows are
adjacent in every run, and two groups with equal upper halves are always read, and recomputed, together.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.row_hash import U64, hash_rows
from tidemill.shards.parts.schema import contents_schema
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import HashRows
from tidemill.spark.merge.sorted_runs import SortedRun, merge_runs

_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)

NO_GROUPS: U64 = np.zeros(0, dtype=np.uint64)


def groups_of(rows: pa.Table, by: tuple[str, ...]) -> U64:
    """Return the group of each row: its hash over `by`, with the lower half zero. Shape (rows,)."""
    return hash_rows(rows, by) >> _HALF << _HALF


def _group_hasher(by: tuple[str, ...]) -> HashRows:
    def hashes(rows: pa.Table, key: tuple[str, ...]) -> U64:
        rest = tuple(name for name in key if name not in by)
        return groups_of(rows, by) | hash_rows(rows, rest) >> _HALF

    return hashes


def build_group_mirror(
    schema: ShardSchema, by: tuple[str, ...], directory: Path, contents: Iterable[pa.Table] = (), upper: int = 0
) -> Mirror:
    """Build a mirror by group of a shard's contents at upper - 1; long runs are files in `directory`.

    `contents`: tables without common keys; memory holds one of them.
    """
    mirror = Mirror(_identity_schema(schema, by), upper, directory=directory, hasher=_group_hasher(by))
    for rows in contents:
        mirror.insert(rows)
    return mirror


def find_group_rows(mirror: Mirror, groups: U64) -> pa.Table:
    """Return the live rows of `groups` (distinct, ascending) in a mirror that `build_group_mirror` built."""
    runs = []
    for run in reversed(mirror.runs):
        first = np.searchsorted(run.hashes, groups, side="left")
        counts = np.searchsorted(run.hashes, groups | _LOWER, side="right") - first
        at = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        if len(at):
            runs.append(SortedRun(run.rows_at(at), run.hashes[at], run.live[at]))
    if not runs:
        return contents_schema(mirror.schema).empty_table()
    return merge_runs(mirror.schema, runs, drop_absent=True).rows


def _identity_schema(schema: ShardSchema, by: tuple[str, ...]) -> ShardSchema:
    return ShardSchema(schema.columns, (*by, *(name for name in schema.key if name not in by)), schema.buckets)
