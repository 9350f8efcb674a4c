"""Dead letters of a pipeline as stored in their shard: read piece by piece, because letters can be large, and removed.

One row of the shard is no letter: it states how many letters expired (`EXPIRED`). It is replaced by the append that
removes expired letters, so that the count is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import DIFF, TIME, Batch
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import Index, Mask, int64s
from tidemill.shards.parts.parts import rows_within
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.read.hash_ranges import (
    HASH_MAX,
    RANGE_BYTES,
    RANGE_ROWS,
    RANGES_MAX,
    cut_ranges,
    range_between,
    read_batch_ordered,
    read_range,
)
from tidemill.spark.decode.dead_letter_rows import (
    DEAD_LETTERS,
    EXPIRED,
    DeadLetter,
    Place,
    dead_letter_table,
    is_letter,
    places_of,
    retractions,
    times_of,
)

Partition = tuple[str, int]
EXPIRED_PARTITION = (EXPIRED.topic, EXPIRED.partition)
Positions = Mapping[Partition, Index]
"""Offsets of letters in each partition."""
Changes = Mapping[Partition, tuple[Index, Index, Index]]
"""Updates in each partition: offset, time of the record in µs, diff."""
NONE: Index = np.empty(0, dtype=np.int64)


class StoredLetter(NamedTuple):
    """A letter without its bytes. `time_ms`: the record's tidemill time."""

    place: Place
    last_offset: int
    time_ms: int
    reason: str

    @property
    def order(self) -> tuple[int, Place]:
        return self.time_ms, self.place


class StoredLetters:
    """Dead letters in their shard, for a replay. Raises as reading it."""

    def __init__(self, portal: BlockingPortal, shard: LogShard, rand: Rand) -> None:
        self._portal = portal
        self._shard = shard
        self._rand = rand

    def read(self) -> list[StoredLetter]:
        """Return all letters, by time."""
        found: list[StoredLetter] = []
        for rows in read_letter_pieces(self._portal, self._shard, ("last_offset", "at", "reason")):
            fields = (rows.column(name).to_pylist() for name in ("last_offset", "at", "reason"))
            for place, last_offset, at, reason in zip(places_of(rows), *fields, strict=True):
                found.append(StoredLetter(place, last_offset, int(at.timestamp() * 1000 + 0.5), reason))
        return sorted(found, key=lambda letter: letter.order)

    def remove(self, places: Collection[Place]) -> int:
        """Remove those of these letters that are still there; return their number."""
        while places:
            lower = self._portal.call(self._shard.frontiers())[1]
            rows = letters_at(self._portal, self._shard, places)
            if not rows.num_rows:
                return 0
            if append_updates(self._portal, self._shard, retractions(rows, lower), lower, lower + 1, self._rand):
                return int(rows.num_rows)
        return 0


def append_updates(
    portal: BlockingPortal, shard: LogShard, updates: pa.Table, lower: int, upper: int, rand: Rand
) -> bool:
    """Append updates of letters; False if another process appended first: read its letters, and try again."""

    async def run() -> None:
        part = await shard.write_part(updates)
        await shard.compare_and_append(lower, upper, (part,), rand.nonce())

    try:
        portal.call(run())
    except ConflictError:
        return False
    return True


def read_updates(
    portal: BlockingPortal, shard: LogShard, batch: Batch, lower: int, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the updates of a batch from `lower` on: these columns, the key, `_time` and `_diff`. Memory holds one row
    group of them. Raises as `LogShard.read_batch`."""
    fetch = shard.fetch_through(portal)
    try:
        for rows in read_batch_ordered(shard.schema, batch, batch.upper - 1, fetch, columns):
            yield rows_within(rows, lower, batch.upper)
    except MissingError as error:
        raise portal.call(shard.explain_missing(error, [batch])) from error


def read_letter_pieces(
    portal: BlockingPortal, shard: LogShard, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield all letters, each with the columns of its place and `columns` (None: all), in ranges of their hashes.

    Each range is read at the newest time, so that a long read needs no hold. Raises as `LogShard.read_batch`.
    """
    names = None if columns is None else [*Place._fields, *columns]
    portal.call(shard.frontiers())
    parts = [part for batch in shard.state.batches for part in batch.parts]
    size_bytes, rows = sum(p.size_bytes for p in parts), sum(p.rows for p in parts)
    count = min(max(1, -(-size_bytes // RANGE_BYTES), -(-rows // RANGE_ROWS)), RANGES_MAX)
    cuts = [(i << 64) // count for i in range(count)]
    for low, high in zip(cuts, [*(cut - 1 for cut in cuts[1:]), HASH_MAX], strict=True):
        upper = portal.call(shard.frontiers())[1]
        batches = portal.call(shard.batches_until(upper - 1)) if upper else []
        try:
            chosen = range_between(batches, low, high)
            for found in read_range(shard.schema, chosen, upper - 1, shard.fetch_through(portal), names):
                letters = found.filter(is_letter(found))
                if letters.num_rows:
                    yield letters
        except MissingError as error:
            raise portal.call(shard.explain_missing(error, batches)) from error


def letters_at(portal: BlockingPortal, shard: LogShard, places: Collection[Place]) -> pa.Table:
    """Return the rows that are stored at these places. Raises as `LogShard.read_batch`."""
    out = [contents_schema(shard.schema).empty_table()]
    upper = portal.call(shard.frontiers())[1]
    if not upper or not places:
        return out[0]
    columns = zip(contents_schema(DEAD_LETTERS), zip(*places, strict=True), strict=False)
    key = pa.table({field.name: pa.array(values, field.type) for field, values in columns})
    batches, wanted = portal.call(shard.batches_until(upper - 1)), set(places)
    try:
        for chosen in cut_ranges(batches, sorted(set(hash_rows(key, Place._fields).tolist()))):
            for rows in read_range(shard.schema, chosen, upper - 1, shard.fetch_through(portal)):
                out.append(rows.filter(pa.array([place in wanted for place in places_of(rows)], pa.bool_())))
    except MissingError as error:
        raise portal.call(shard.explain_missing(error, batches)) from error
    return pa.concat_tables(out)


# positions ------------------------------------------------------------------------------------------
def by_partition(rows: pa.Table) -> list[tuple[Partition, Index, Index]]:
    """Return (topic and partition, offsets, row numbers) of each partition that has rows."""
    if not rows.num_rows:
        return []
    topics = rows.column("topic").dictionary_encode().unify_dictionaries().combine_chunks()
    names, partitions, offsets = topics.dictionary.to_pylist(), int64s(rows, "partition"), int64s(rows, "offset")
    codes = np.asarray(topics.indices.to_numpy(), dtype=np.int64) << 32 | (partitions & 0xFFFFFFFF)
    order = np.argsort(codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    return [((names[int(codes[at[0]]) >> 32], int(partitions[at[0]])), offsets[at], at) for at in groups]


def changes_of(rows: pa.Table) -> Changes:
    """Return the changes by these updates, or by letters."""
    diffs = int64s(rows, DIFF) if DIFF in rows.column_names else np.ones(rows.num_rows, dtype=np.int64)
    times = times_of(rows)
    return {partition: (offsets, times[at], diffs[at]) for partition, offsets, at in by_partition(rows)}


def positions_of(changes: Sequence[Changes]) -> Positions:
    found: dict[Partition, list[Index]] = {}
    for each in changes:
        for partition, (offsets, _, _) in each.items():
            found.setdefault(partition, []).append(offsets)
    return {partition: np.concatenate(offsets) for partition, offsets in found.items()}


def is_at(rows: pa.Table, positions: Positions) -> Mask:
    """Return a mask of the letters at these positions."""
    out = np.zeros(rows.num_rows, dtype=bool)
    for partition, offsets, at in by_partition(rows):
        out[at] = np.isin(offsets, positions.get(partition, NONE))
    return out


class _Letters(NamedTuple):
    """Letters of one partition: ascending offsets, and the time of the newest letter at each, in µs."""

    offsets: Index
    times: Index

    def find(self, offsets: Index) -> tuple[Mask, Index]:
        """Return which of the offsets have a letter, and its time."""
        at = np.minimum(np.searchsorted(self.offsets, offsets), len(self.offsets) - 1)
        return self.offsets[at] == offsets, self.times[at]


class KnownLetters:
    """Positions and times of all stored letters. Memory: 16 bytes for each letter."""

    def __init__(self) -> None:
        self._known: dict[Partition, _Letters] = {}

    def add(self, changes: Sequence[Changes], removed: set[Place] | None = None) -> None:
        """Apply updates, in any order; add the places of retractions to `removed`. A letter that a replay removed is
        unknown: its record may fail again."""
        for partition in {partition: None for each in changes for partition in each}:
            if partition == EXPIRED_PARTITION:
                continue
            found = [each[partition] for each in changes if partition in each]
            offsets, times, counts = (np.concatenate(columns) for columns in zip(*found, strict=True))
            if removed is not None:
                removed |= {Place(*partition, offset) for offset in offsets[counts < 0].tolist()}
            known = self._known.pop(partition, None)
            if known is not None:
                offsets, times = np.append(known.offsets, offsets), np.append(known.times, times)
                counts = np.append(np.ones(len(known.offsets), dtype=np.int64), counts)
            order = np.lexsort((times, offsets))
            offsets, times = offsets[order], times[order]
            starts = np.flatnonzero(np.append(True, (np.diff(offsets) != 0) | (np.diff(times) != 0)))
            live = starts[np.add.reduceat(counts[order], starts) > 0]
            if len(live):
                newest = live[np.append(np.diff(offsets[live]) != 0, True)]
                self._known[partition] = _Letters(offsets[newest], times[newest])

    def compare(self, letters: pa.Table) -> tuple[Mask, Mask]:
        """Return masks of the new letters, and of those among them at whose places there may be an older one. Two
        tables may fail on one record: of its letters only the first counts as new."""
        fresh, replacing = (np.zeros(letters.num_rows, dtype=bool) for _ in range(2))
        record_times = times_of(letters)
        for partition, offsets, at in by_partition(letters):
            _, first = np.unique(offsets, return_index=True)
            at, known = at[first], self._known.get(partition)
            if known is None:
                fresh[at] = True
                continue
            stored, times = known.find(offsets[first])
            later = times < record_times[at]
            fresh[at] = ~stored | later
            replacing[at] = stored & later
        return fresh, replacing

    def include(self, letters: pa.Table) -> Mask:
        """Return a mask of the letters that are stored with the same time."""
        out, record_times = np.zeros(letters.num_rows, dtype=bool), times_of(letters)
        for partition, offsets, at in by_partition(letters):
            known = self._known.get(partition)
            if known is not None:
                stored, times = known.find(offsets)
                out[at] = stored & (times == record_times[at])
        return out

    def older_than(self, limit_ms: int) -> Positions:
        """Return the letters whose records are older."""
        found = {partition: known.offsets[known.times < limit_ms * 1000] for partition, known in self._known.items()}
        return {partition: offsets for partition, offsets in found.items() if offsets.size}


# letters that expired -------------------------------------------------------------------------------
def expired_row(before: pa.Table, gone: pa.Table, time_ms: int) -> pa.Table:
    """Return the row with the number of expired letters, as an update at `time_ms`, after those in `gone` expired, too;
    `before` is the present row, or empty."""
    count = count_expired(before) + gone.num_rows
    until_ms = max(int(times_of(rows).max(initial=0)) for rows in (before, gone)) // 1000
    said = datetime.fromtimestamp(until_ms / 1000, UTC).isoformat(timespec="seconds")
    reason = f"{count:,} dead {'letter of a record' if count == 1 else 'letters of records'} until {said} expired"
    # Its offsets cover as many records as there were letters.
    row = dead_letter_table([DeadLetter(*EXPIRED, EXPIRED.offset + count - 1, until_ms, reason)])
    return row.set_column(row.schema.get_field_index(TIME), TIME, pa.array([time_ms], pa.int64()))


def count_expired(rows: pa.Table) -> int:
    """Return the number of expired letters according to the row EXPIRED, if it is among these rows."""
    stated = rows.filter(pc.invert(is_letter(rows)))
    return int((int64s(stated, "last_offset") - int64s(stated, "offset") + 1).sum())


class NewestOfRows:
    """The newest letter of each captured row that was ever one. `verify` needs it as long as the row is missing, so it
    does not expire. Memory: 24 bytes for each row."""

    COLUMNS = ("table", "key", "at")

    def __init__(self, pieces: Iterable[pa.Table]) -> None:
        """`pieces`: all letters, with at least COLUMNS."""
        self._found = np.empty((3, 0), dtype=np.int64)
        more: list[Index] = []
        for rows in pieces:
            more.append(self._ranks(rows)[:, self._of_row(rows)])
            if sum(each.shape[1] for each in more) > max(1 << 16, self._found.shape[1]):
                self._merge(more)
                more = []
        self._merge(more)

    def include(self, rows: pa.Table) -> Mask:
        """Return a mask of the letters that are the newest of their row."""
        ranks = self._ranks(rows)
        if not self._found.shape[1]:
            return np.zeros(rows.num_rows, dtype=bool)
        at = np.minimum(np.searchsorted(self._found[0], ranks[0]), self._found.shape[1] - 1)
        mask: Mask = self._of_row(rows) & (self._found[:, at] == ranks).all(axis=0)
        return mask

    def _merge(self, more: Sequence[Index]) -> None:
        every = np.concatenate([self._found, *more], axis=1)
        every = every[:, np.lexsort(every[::-1])]
        self._found = every[:, np.append(np.diff(every[0]) != 0, True)] if every.shape[1] else every

    @staticmethod
    def _of_row(rows: pa.Table) -> Mask:
        named = pc.and_(pc.not_equal(rows.column("table"), ""), pc.not_equal(rows.column("key"), ""))
        return np.asarray(named.fill_null(False).to_numpy(), dtype=bool)

    @staticmethod
    def _ranks(rows: pa.Table) -> Index:
        """Return (hash of table and key, time, offset) of each letter."""
        hashes = hash_rows(rows, ("table", "key")).view(np.int64)
        return np.stack([hashes, times_of(rows), int64s(rows, "offset")])
