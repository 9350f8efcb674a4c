"""Mirror: a local copy of the output shard's contents, tagged with the upper that it mirrors.

Invariant (mirror of the output): only updates that the shard accepted change it: `advance` with this writer's changes
after its append landed, `apply` with a peer's updates after the peer's append landed. Source input never does.

Runs are ordered from oldest to newest; the newest run that has a key decides. A tiered merge keeps at most RUNS_MAX.
Small runs stay in memory until `save`; large ones are memory-mapped files, so a mirror can exceed memory and another
process can open it. A mirror is a cache: any doubt about it costs a rebuild.

A mirror is built from the parts of a shard by following its batches one by one, a row group at a time. Compacted parts
are already sorted by hash and become a run unchanged. Memory holds a row group, or a batch of at most ADOPT_BYTES, and
the runs that are too small for a file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.errors import CorruptError
from tidemill.shards.api import DIFF, HASH, TIME, Batch, ShardSchema
from tidemill.shards.parts.arrow_rows import Index, combine_columns, int64s, rows_at, rows_equal
from tidemill.shards.parts.row_hash import U64, hash_rows
from tidemill.shards.parts.schema import contents_schema, part_schema
from tidemill.shards.read.hash_ranges import FetchPart, read_batch_ordered
from tidemill.spark.merge.key_grouping import group_by_key
from tidemill.spark.merge.resolve import HashRows, KeyChanges
from tidemill.spark.merge.sorted_runs import (
    SortedRun,
    convert_run,
    count_live_keys,
    cut_pieces,
    merge_runs,
    open_run,
    write_pieces,
    write_run,
)

RUNS_MAX = 6
SPILL_BYTES = 16 << 20
"""A run of at least this size is written to a file immediately."""
ADOPT_BYTES = 4 << 20
"""Encoded size of a batch. A larger batch is written into a file of the mirror piece by piece."""
MERGE_RATIO = 4
"""Ratio of a merge: with too many runs, a run joins all newer ones if it is at most this many times as long as they."""
MANIFEST = "MANIFEST.json"
_FILES = itertools.count(1)


class _Manifest(msgspec.Struct):
    """Manifest of a saved mirror. It is written last and by rename, so it only names complete runs, of this machine's
    boot."""

    shard: str
    boot: str
    upper: int
    schema: ShardSchema
    runs: list[tuple[str, int]]
    """(file name, rows), oldest first."""


class Mirror:
    def __init__(
        self, schema: ShardSchema, upper: int = 0, *, directory: Path | None = None, hasher: HashRows = hash_rows
    ) -> None:
        self.schema = schema
        self.upper = upper
        self.runs: list[SortedRun] = []
        self.merges = 0
        self._saved: dict[str, int] = {}
        """Files named by the manifest on disk, and their sizes in bytes: other processes may open them until the next
        `save`."""
        self._hasher = hasher
        self._directory = directory
        self._columns: list[str] = contents_schema(schema).names

    @classmethod
    def hydrate(
        cls,
        schema: ShardSchema,
        contents: pa.Table,
        upper: int,
        *,
        directory: Path | None = None,
        hasher: HashRows = hash_rows,
    ) -> Mirror:
        """Build a mirror from a snapshot of the shard at upper - 1. Raises CorruptError if a key has two live rows."""
        mirror = cls(schema, upper, directory=directory, hasher=hasher)
        mirror.insert(contents)
        return mirror

    def insert(self, contents: pa.Table) -> None:
        """Insert a part of a snapshot at upper - 1 whose keys are all new here. Raises CorruptError as `hydrate`."""
        if not contents.num_rows:
            return
        rows = combine_columns(contents.select(self._columns).cast(contents_schema(self.schema)))
        hashes = self._hasher(rows, self.schema.key)
        order, starts = group_by_key(rows, hashes, self.schema.key)
        if not starts.all():
            raise CorruptError(f"a key has two live rows in the table: upper={self.upper} rows={int((~starts).sum())}.")
        self._push_run(SortedRun(rows_at(rows, order), hashes[order], np.ones(len(order), dtype=bool)))

    # reading ---------------------------------------------------------------------------------------
    def lookup(self, keys: pa.Table, hashes: U64) -> tuple[pa.Table, Index]:
        """Return (live rows found, for each key its row in them or -1); `hashes` belong to `keys`, which are
        distinct."""
        found = np.full(len(hashes), -1, dtype=np.int64)
        open_keys = np.arange(len(hashes), dtype=np.int64)
        tables: list[pa.Table] = []
        taken = 0
        for run in reversed(self.runs):
            if not len(open_keys):
                break
            whole = len(open_keys) == len(hashes)
            asked = keys if whole else rows_at(keys, open_keys)
            at = run.find(asked, hashes if whole else hashes[open_keys], self.schema.key)
            known = np.nonzero(at >= 0)[0]
            live = known[run.live[at[known]]]
            found[open_keys[live]] = taken + np.arange(len(live))
            taken += len(live)
            if len(live):
                tables.append(run.rows_at(at[live]))
            open_keys = open_keys[at < 0]
        if not tables:
            return contents_schema(self.schema).empty_table(), found
        return pa.concat_tables(tables), found

    def live_rows(self, columns: tuple[str, ...] | None = None, hashes: tuple[int, int] | None = None) -> pa.Table:
        """Return the contents of the shard at upper - 1, sorted by hash.

        `columns`: only these, which include the key's. `hashes`: only keys with a hash in [lower, upper); nothing else
        is read.
        """
        runs = self.runs if hashes is None else [run.within_hashes(*hashes) for run in self.runs]
        if columns is not None:
            runs = [SortedRun(run.rows.select(list(columns)), run.hashes, run.live, run.path) for run in runs]
        if not runs:
            found = contents_schema(self.schema).empty_table()
            return found if columns is None else found.select(list(columns))
        if len(runs) == 1:
            run = runs[0]
            return run.rows if run.live.all() else run.rows.filter(pa.array(run.live))
        return merge_runs(self.schema, runs[::-1], drop_absent=True).rows

    @property
    def empty(self) -> bool:
        """True only if nothing is live."""
        return not self.runs

    @property
    def held_bytes(self) -> int:
        """Size of the runs in memory; the others are mapped files."""
        return sum(run.size_bytes for run in list(self.runs) if run.path is None)

    def __len__(self) -> int:
        """Return the number of rows in all runs: at least the number of live keys."""
        return sum(len(run) for run in self.runs)

    # following the shard ---------------------------------------------------------------------------
    def advance(self, changes: KeyChanges, lower: int, upper: int) -> None:
        """Add the changes of this writer's append [lower, upper), which landed, as the newest run."""
        self._advance_upper(lower, upper)
        self._push_run(SortedRun(changes.rows, changes.hashes, changes.live, changes.path))

    def apply(self, updates: pa.Table, lower: int, upper: int) -> None:
        """Add a delta of the shard, complete for [lower, upper), from any writer. Raises CorruptError if the delta
        leaves two live rows for a key."""
        self._advance_upper(lower, upper)
        if updates.num_rows == 0:
            return
        self._push_run(self._fold_delta(updates))

    def adopt(self, updates: Iterable[pa.Table], lower: int, upper: int) -> None:
        """Add a delta too large for memory, as `apply`. Its tables have ascending hashes and none ends within one
        hash."""
        run = self.store_run(self._fold_delta(table) for table in updates)
        self._advance_upper(lower, upper)
        self._push_run(run)

    def store_run(self, pieces: Iterable[SortedRun]) -> SortedRun:
        """Write pieces of ascending hashes to a file next to the mirror's files. `sweep` deletes it unless it becomes
        one of the mirror's runs. Memory holds one piece."""
        path = self._new_file()
        try:
            write_pieces(self.schema, pieces, path)
            run = open_run(self.schema, path, verify=False)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if not len(run):
            path.unlink()
        return run

    def count_live(self) -> int:
        """Return the number of live keys. Memory holds one piece."""
        if len(self.runs) < 2:
            return sum(int(np.count_nonzero(run.live)) for run in self.runs)
        return sum(count_live_keys(self.schema, piece) for piece in cut_pieces(self.runs[::-1]))

    def _advance_upper(self, lower: int, upper: int) -> None:
        if lower != self.upper or upper < lower:
            raise CorruptError(f"delta does not continue the mirror: mirror={self.upper} lower={lower} upper={upper}.")
        self.upper = upper

    def _fold_delta(self, updates: pa.Table) -> SortedRun:
        """Return the last state of every key in a delta: its insertion at its latest time, or its absence.

        A shard's updates are consolidated per (row, time), so at a key's latest time there are at most one
        retraction and one insertion; anything else is summed row by row.
        """
        updates = combine_columns(updates)
        rows = updates.select(self._columns).cast(contents_schema(self.schema))
        times, diffs = int64s(updates, TIME), int64s(updates, DIFF)
        if self._hasher is hash_rows and HASH in updates.column_names:
            hashes = np.asarray(updates.column(HASH).to_numpy(), dtype=np.uint64)
        else:
            hashes = self._hasher(rows, self.schema.key)
        if bool((diffs == 1).all()) and bool((hashes[1:] > hashes[:-1]).all()):
            return SortedRun(rows, hashes, np.ones(len(hashes), dtype=bool))  # compacted: no folding needed
        order, starts = group_by_key(rows, hashes, self.schema.key, times, diffs)
        key_number = np.cumsum(starts) - 1
        ends = np.append(np.nonzero(starts)[0][1:], len(order)) - 1
        last_time = times[order][ends]
        at_last = times[order] == last_time[key_number]
        inserts = np.bincount(key_number, weights=at_last & (diffs[order] > 0), minlength=len(ends))
        retracts = np.bincount(key_number, weights=at_last & (diffs[order] < 0), minlength=len(ends))
        chosen = order[ends]
        live = diffs[chosen] > 0
        suspect = (inserts > 1) | (retracts > 1) | (np.abs(diffs[chosen]) > 1)
        pairs = np.nonzero((inserts == 1) & (retracts == 1))[0]  # sorted by diff: the retraction is just before
        if len(pairs):
            suspect[pairs] |= rows_equal(rows, order[ends[pairs] - 1], rows, chosen[pairs], self._columns)
        odd = np.nonzero(suspect)[0]
        keep = np.ones(len(ends), dtype=bool)
        for number in odd.tolist():
            members = order[np.nonzero(key_number == number)[0]]
            row = self._sum_key_updates(rows, members, diffs)
            keep[number] = row is not None
            if row is not None:
                chosen[number], live[number] = row
        chosen, live = chosen[keep], live[keep]
        return SortedRun(rows_at(rows, chosen), hashes[chosen], live)

    def _sum_key_updates(self, rows: pa.Table, members: Index, diffs: Index) -> tuple[int, bool] | None:
        """Slow path: return (row, live) after summing one key's updates by row; None if they cancel out."""
        sums: list[list[int]] = []
        for member in members.tolist():
            for entry in sums:
                pair = np.array([entry[0]]), np.array([member])
                if rows_equal(rows, pair[0], rows, pair[1], self._columns)[0]:
                    entry[1] += int(diffs[member])
                    break
            else:
                sums.append([member, int(diffs[member])])
        live = [entry for entry in sums if entry[1] > 0]
        if len(live) > 1 or any(entry[1] > 1 for entry in live):
            raise CorruptError(f"a key has two live rows in the table: upper={self.upper}.")
        if live:
            return live[0][0], True
        return (sums[0][0], False) if any(entry[1] < 0 for entry in sums) else None

    # runs ------------------------------------------------------------------------------------------
    def _push_run(self, run: SortedRun) -> None:
        if not len(run):
            return
        self.runs.append(self._spill_if_large(run))
        if (first := self._merge_start()) is not None:
            old = self.runs[first:][::-1]
            large = self._directory is not None and sum(run.size_bytes for run in old) >= SPILL_BYTES
            merged = merge_runs(self.schema, old, drop_absent=first == 0, path=self._new_file() if large else None)
            self.runs[first:] = [merged] if len(merged) else []
            self.merges += 1
            for gone in old:
                if gone.path is not None and gone.path.name not in self._saved:
                    gone.path.unlink(missing_ok=True)

    @property
    def is_outdated(self) -> bool:
        """True if merged files that the manifest retains exceed half the size of the mapped runs: time for `save`,
        which deletes them. So the directory holds at most the runs, half as much again, and SPILL_BYTES."""
        mine = {run.path.name for run in self.runs if run.path is not None}
        stale = sum(size for name, size in self._saved.items() if name not in mine)
        return stale > max(SPILL_BYTES, sum(run.size_bytes for run in self.runs if run.path is not None) // 2)

    def _merge_start(self) -> int | None:
        """Return the index of the oldest run to merge with all newer ones, or None: few runs, none rewritten often."""
        if len(self.runs) <= RUNS_MAX:
            return None
        first = len(self.runs) - 2
        newer = len(self.runs[-1])
        for index in range(len(self.runs) - 2, -1, -1):
            if len(self.runs[index]) <= MERGE_RATIO * newer:
                first = index
            newer += len(self.runs[index])
        return first

    def _spill_if_large(self, run: SortedRun) -> SortedRun:
        large = self._directory is not None and run.path is None and run.size_bytes >= SPILL_BYTES
        return self._to_file(run) if large else run

    def _to_file(self, run: SortedRun) -> SortedRun:
        return write_run(self.schema, run, self._new_file())

    def _new_file(self) -> Path:
        """Return a name that no existing file has, because this process or another may have that file mapped. A pid is
        not enough: pids recur (in a container it is always 1)."""
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        while (path := self._directory / f"run-{self.upper}-{os.getpid()}-{next(_FILES)}.arrow").exists():
            pass
        return path

    # cache on disk ---------------------------------------------------------------------------------
    def save(self, shard: str, boot: str) -> None:
        """Save the mirror, so that other processes can open it as of its upper."""
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        self.runs = [run if run.path is not None else self._to_file(run) for run in self.runs]
        named = [(run.path.name, len(run)) for run in self.runs if run.path is not None]
        manifest = _Manifest(shard, boot, self.upper, self.schema, named)
        fresh = self._directory / f"{MANIFEST}.new"
        fresh.write_bytes(msgspec.json.encode(manifest))
        fresh.replace(self._directory / MANIFEST)
        self._saved = {run.path.name: run.path.stat().st_size for run in self.runs if run.path is not None}
        self.sweep()

    def sweep(self) -> None:
        """Delete run files that are not this mirror's: merged into others, or of an abandoned mirror.

        A saved mirror that loses a file is invalid, so its manifest is deleted too. No other process may be building a
        mirror in the directory. A process that has mapped one of the files keeps its contents.
        """
        if self._directory is None:
            return
        mine = {run.path.name for run in self.runs if run.path is not None}
        gone = [path for path in self._directory.glob("run-*.arrow") if path.name not in mine]
        saved = _read_manifest(self._directory)
        if saved is not None and not {path.name for path in gone}.isdisjoint(name for name, _ in saved.runs):
            (self._directory / MANIFEST).unlink(missing_ok=True)
            self._saved = {}
        for path in gone:
            path.unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: Path, schema: ShardSchema, shard: str, boot: str) -> Mirror | None:
        """Return the saved mirror, or None if it cannot be trusted: other shard, schema or boot, or a bad file.

        A mirror that was saved under an older version of the schema is converted, a run at a time.
        """
        manifest = _read_manifest(directory)
        if manifest is None or (manifest.shard, manifest.boot) != (shard, boot):
            return None
        old = manifest.schema
        if old != schema and old.version >= schema.version:
            return None  # versions of one shard succeed one another, so only a lower version precedes this one
        mirror = cls(schema, manifest.upper, directory=directory)
        try:
            for name, _ in manifest.runs:
                path = directory / name
                mirror.runs.append(
                    open_run(schema, path) if old == schema else convert_run(old, schema, path, mirror._new_file())
                )
            mirror._saved = {name: (directory / name).stat().st_size for name, _ in manifest.runs}
        except (CorruptError, OSError):
            return None
        if [len(run) for run in mirror.runs] != [rows for _, rows in manifest.runs]:
            return None
        return mirror


def _read_manifest(directory: Path) -> _Manifest | None:
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def build_mirror(
    schema: ShardSchema, batches: Sequence[Batch], upper: int, fetch: FetchPart, directory: Path
) -> Mirror:
    """Return the contents at upper - 1 of a shard; `batches` are all its batches with any time below `upper`.

    Raises CorruptError if a key has two live rows, SchemaEvolvedError, and as `fetch`.
    """
    mirror = Mirror(schema, directory=directory)
    count = 0

    def updates(batch: Batch) -> Iterator[pa.Table]:
        nonlocal count
        for table in read_batch_ordered(schema, batch, upper - 1, fetch):
            count += int(int64s(table, DIFF).sum())
            yield table

    for batch in batches:
        end = min(batch.upper, upper)
        if sum(part.size_bytes for part in batch.parts) > ADOPT_BYTES:
            mirror.adopt(updates(batch), mirror.upper, end)
        else:
            mirror.apply(pa.concat_tables([part_schema(schema).empty_table(), *updates(batch)]), mirror.upper, end)
    # A run has each key once even if the shard does not, so an insertion of a live key shows only in the sum.
    if count != (live := mirror.count_live()):
        raise CorruptError(f"a key has two live rows in the table: upper={upper} rows={count} keys={live}.")
    return mirror
