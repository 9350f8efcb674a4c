"""Immutable hash-sorted runs of a mirror: lookup in one, merge of several, and their files.

A run holds distinct keys, sorted by hash: the last known contents of each key, or its absence (`live` False).

    file   one Arrow IPC file, uncompressed, memory-mapped: the shard's columns, `_live` bool, `_hash` uint64
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill.base.errors import Corrupt
from tidemill.shards.front import HASH, ShardSchema
from tidemill.shards.schema import contents_schema
from tidemill.spark.upsert.arrays import U64, Index, Mask, group_by_key, key_tuples, one_chunk, rows_equal, to_mask
from tidemill.spark.upsert.commands import LIVE


class Run:
    """`collides`: two of its keys share a hash, so a lookup may have to look at neighbours."""

    __slots__ = ("collides", "hashes", "live", "path", "rows")

    def __init__(self, rows: pa.Table, hashes: U64, live: Mask, path: Path | None = None) -> None:
        self.rows, self.hashes, self.live, self.path = one_chunk(rows), hashes, live, path
        self.collides = bool((hashes[1:] == hashes[:-1]).any()) if len(hashes) > 1 else False

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def size_bytes(self) -> int:
        return int(self.rows.nbytes) + self.hashes.nbytes

    def find(self, keys: pa.Table, hashes: U64, key: Sequence[str]) -> Index:
        """Row of each key in this run, or -1. A hash only nominates; the real keys decide."""
        n = len(self.hashes)
        found = np.full(len(hashes), -1, dtype=np.int64)
        if n == 0 or len(hashes) == 0:
            return found
        at = np.searchsorted(self.hashes, hashes)
        hit = np.nonzero((at < n) & (self.hashes[np.minimum(at, n - 1)] == hashes))[0]
        if not len(hit):
            return found
        equal = rows_equal(keys, hit, self.rows, at[hit], key)
        found[hit[equal]] = at[hit[equal]]
        if self.collides and not equal.all():
            self._find_colliding(keys, hashes, key, hit[~equal], found)
        return found

    def _find_colliding(self, keys: pa.Table, hashes: U64, key: Sequence[str], asked: Index, found: Index) -> None:
        """Slow path: compare with every row of equal hash."""
        for row, wanted in zip(asked.tolist(), key_tuples(keys, asked, key), strict=True):
            first = int(np.searchsorted(self.hashes, hashes[row], side="left"))
            last = int(np.searchsorted(self.hashes, hashes[row], side="right"))
            candidates = np.arange(first, last, dtype=np.int64)
            for at, candidate in zip(candidates.tolist(), key_tuples(self.rows, candidates, key), strict=True):
                if candidate == wanted:
                    found[row] = at
                    break


def merge(schema: ShardSchema, runs: Sequence[Run], *, drop_absent: bool) -> Run:
    """One run with the newest state of every key; `runs` newest first. `drop_absent` when none is older."""
    rows = pa.concat_tables([run.rows for run in runs]).combine_chunks()
    hashes = np.concatenate([run.hashes for run in runs])
    live = np.concatenate([run.live for run in runs])
    order, starts = group_by_key(rows, hashes, schema.key)
    keep = order[starts]
    if drop_absent:
        keep = keep[live[keep]]
    return Run(rows.take(pa.array(keep)), hashes[keep], live[keep])


def write_run(run: Run, path: Path) -> Run:
    """Store a run and return it memory-mapped. Not synced: a mirror is a cache."""
    table = run.rows.append_column(LIVE, pa.array(run.live)).append_column(HASH, pa.array(run.hashes, pa.uint64()))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Run(run.rows, run.hashes, run.live, path)


def open_run(schema: ShardSchema, path: Path) -> Run:
    """Map a stored run. Raises Corrupt when the file is not one of this schema."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path), "rb")).read_all()
        rows = table.select(contents_schema(schema).names).cast(contents_schema(schema))
        hashes = np.asarray(table.column(HASH).to_numpy(), dtype=np.uint64)
        return Run(rows, hashes, to_mask(table.column(LIVE)), path)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise Corrupt(f"mirror run is unreadable: path={path} ({error}).", fix="It is a cache: delete it.") from error
