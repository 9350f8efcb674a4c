"""Compaction: consecutive batches become one, and updates at or below since become their sum. Off the commit path.

Invariants:

- Contiguity: the merged batch covers exactly [first lower, last upper), so the batches stay contiguous.
- Same contents: for every readable time the sum of updates is unchanged. Only times below since move, and only up to
  min(since, upper - 1). A listener at a frontier f ≤ since is stopped by its own check; every other one filters by time
  and sees nothing twice.
- Optimistic replace: the merge becomes visible only if every batch that it read is unchanged (Replace). A merge that
  loses leaves only orphaned objects, even if its input was deleted before it was read. Replaced objects become garbage
  in the same step, and are deleted later. Parts are written under the newest schema at the time when the batches were
  chosen.
- Bounded memory: RANGE_BYTES of parts, for any size of the shard. Hashes are uniform, so a merge proceeds by equal
  ranges of them.

Three reasons to merge:

    tiers   FAN_IN small neighbours: so that a shard has few batches
    space   updates that are settled (at or below since) but not yet summed with the oldest batch are as large as it:
            all of them may be dead, so this keeps the stored size within twice the live size
    schema  parts older than `oldest_version` of the schema, which lack columns that a reader needs in the files

`compact_once` is called by maintenance. Any number of processes may call it concurrently; one wins a run, the others
find that it moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.errors import MissingError
from tidemill.base.limits import INLINE_PART_BYTES, MIB
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import HASH, Batch, Part, RunCpuWork, ShardSchema, run_inline
from tidemill.shards.handle import INLINE_BUDGET_BYTES, LogShard
from tidemill.shards.parts.consolidate import merge_updates
from tidemill.shards.parts.parts import PartTarget, rows_within, store_part
from tidemill.shards.parts.row_hash import bucket_of
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.read.part_reader import PartReader
from tidemill.shards.state.apply import batch_id
from tidemill.shards.state.commands import Replace
from tidemill.shards.state.state import ShardState, batch_sums, is_garbage_full

FAN_IN = 8
"""Number of batches of one size class before they are merged; each update is rewritten about log8(size) times."""

RUN_BATCHES = 512
RUN_BYTES = 128 * MIB
"""Input limit of one merge of small neighbours."""

RANGE_BYTES = 32 * MIB
"""Encoded bytes of parts that a merge holds at a time, approximately.

Decoded rows take about three times as much, and more for texts that compress better: their size is unknown before they
are decoded.
"""

PART_ROWS = 1 << 20
SMALLEST_CLASS_BYTES = 64 << 10


class CompactionResult(msgspec.Struct, frozen=True):
    """Result of one merge. `shown` is False if another process moved the batches first; then nothing changed."""

    batches: int
    rows_in: int
    rows_out: int
    bytes_in: int
    bytes_out: int
    shown: bool


def size_class(batch: Batch) -> int:
    """Return 0 up to SMALLEST_CLASS_BYTES, then one more for every factor of FAN_IN."""
    size, out, bound = batch_sums(batch)[1], 0, SMALLEST_CLASS_BYTES
    while size > bound:
        bound *= FAN_IN
        out += 1
    return out


def choose_run(batches: Sequence[Batch], since: int = 0, oldest_version: int = 0) -> tuple[int, int]:
    """Choose the run to merge as [start, end); (0, 0) = none. Pure.

    Space comes first. Otherwise it is the oldest run of at least FAN_IN consecutive batches of one class or smaller,
    smallest class first, within the run limits. Last come batches of schema versions below `oldest_version`: one batch
    of any size, or several within the run limits. An empty newest batch is excluded: idle ticks extend it, which would
    defeat every merge.
    """
    count = len(batches) - 1 if batches and not batches[-1].parts else len(batches)
    classes = [size_class(b) for b in batches[:count]]
    sizes = [batch_sums(b)[1] for b in batches[:count]]
    settled = bisect_right(batches, since, hi=count, key=lambda b: b.upper - 1)
    if settled:
        summed = sizes[0] if batches[0].summed_to >= batches[0].upper - 1 else 0
        if sum(sizes[:settled]) - summed >= max(summed, SMALLEST_CLASS_BYTES):
            return 0, settled
    for top in sorted(set(classes)):
        start = 0
        while start < count:
            end, held = start, 0
            while end < count and classes[end] <= top and end - start < RUN_BATCHES and held + sizes[end] <= RUN_BYTES:
                held += sizes[end]
                end += 1
            if end - start >= FAN_IN:
                return start, end
            start = end + 1
    old = [bool(b.parts) and b.schema_version < oldest_version for b in batches[:count]]
    if True not in old:
        return 0, 0
    start = old.index(True)
    end, held = start + 1, sizes[start]
    while end < count and old[end] and end - start < RUN_BATCHES and held + sizes[end] <= RUN_BYTES:
        held += sizes[end]
        end += 1
    return start, end


def next_run(state: ShardState, oldest_version: int = 0) -> Sequence[Batch]:
    """Return the batches that `compact_once` would merge; none if there is nothing to do. Pure."""
    start, end = choose_run(state.batches, state.since, oldest_version)
    return () if is_garbage_full(state) else state.batches[start:end]


OldestVersion = Callable[[ShardSchema], int]
"""Function of a schema: the version below which parts are rewritten; 0 = none."""


def any_version(_: ShardSchema) -> int:
    """Rewrite no part because of its schema version."""
    return 0


async def compact_once(
    shard: LogShard,
    objects: ObjectStore,
    rand: Rand,
    *,
    cpu: RunCpuWork = run_inline,
    oldest_version: OldestVersion = any_version,
) -> CompactionResult | None:
    """Merge one run; return None if there is nothing to do. If it raises, nothing changed.

    Raises MissingError only for an object that the shard still references.
    """
    await shard.frontiers()
    state = shard.state
    run = next_run(state, oldest_version(state.schema))
    if not run:
        return None
    gone = tuple(batch_id(b) for b in run)
    try:
        batch = await _merge_run(shard, objects, rand, state, run, cpu)
        shown = await shard.replace(Replace(gone, batch, shard.part_time_ms()))
    except MissingError:
        await shard.frontiers()
        if {*gone} <= {batch_id(b) for b in shard.state.batches}:
            raise
        batch, shown = (
            Batch(run[0].lower, run[-1].upper, ()),
            False,
        )  # another process merged them, and they were deleted
    sums = [batch_sums(b) for b in run]
    out = batch_sums(batch)
    return CompactionResult(len(run), sum(s[0] for s in sums), out[0], sum(s[1] for s in sums), out[1], shown)


async def _merge_run(
    shard: LogShard, objects: ObjectStore, rand: Rand, state: ShardState, run: Sequence[Batch], cpu: RunCpuWork
) -> Batch:
    """Return the batch that may replace the run. Its parts are stored, and nothing refers to them yet."""
    lower, upper = run[0].lower, run[-1].upper
    advance_to = min(state.since, upper - 1)
    now_ms = shard.part_time_ms()
    parts: list[Part] = []
    inline_left = INLINE_BUDGET_BYTES - state.inline_bytes
    schema, reader = state.schema, shard.reader_under(state.schema)
    for low, high in hash_ranges(sum(batch_sums(b)[1] for b in run)):
        updates = await _read_hash_range(schema, reader, run, low, high, cpu)
        if not updates.num_rows:
            continue
        for bucket, rows in await cpu(partial(_merge_and_split, schema, updates, advance_to)):
            target = PartTarget(
                shard.shard_id,
                f"c-{shard.writer}",
                now_ms,
                bucket,
                codec="zstd",
                inline_bytes=INLINE_PART_BYTES if inline_left > 0 else 0,
            )
            part = await store_part(objects, schema, rows, target, rand, cpu=cpu)
            inline_left -= len(part.inline)
            parts.append(part)
    summed_to = advance_to if lower == 0 else -1
    return Batch(lower, upper, tuple(parts), shard.writer, rand.nonce(), summed_to, schema.version)


def hash_ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Return equal inclusive ranges of the 64 bits of a hash, about RANGE_BYTES of parts each."""
    count = max(1, -(-size_bytes // RANGE_BYTES))
    cuts = [(i << 64) // count for i in range(count + 1)]
    return [(a, b - 1) for a, b in pairwise(cuts)]


async def _read_hash_range(
    schema: ShardSchema, reader: PartReader, run: Sequence[Batch], low: int, high: int, cpu: RunCpuWork
) -> pa.Table:
    """Return the run's updates whose hash is in [low, high], one part at a time, so that one decoded part is held."""
    found = [part_schema(schema).empty_table()]
    for batch in run:
        for part in batch.parts:
            if part.max_hash < low or high < part.min_hash:
                continue
            rows = rows_within(await reader.read_part(part), batch.lower, batch.upper)
            if part.min_hash < low or high < part.max_hash:
                rows = await cpu(partial(_slice_hashes, rows, low, high))
            found.append(rows)
    return pa.concat_tables(found)


def _slice_hashes(rows: pa.Table, low: int, high: int) -> pa.Table:
    """Return a slice of rows sorted by hash, copied so that the other rows can be freed."""
    hashes = rows.column(HASH).to_numpy()
    start, end = np.searchsorted(hashes, np.uint64(low), "left"), np.searchsorted(hashes, np.uint64(high), "right")
    chosen = np.zeros(len(hashes), dtype=bool)
    chosen[start:end] = True
    return rows.filter(pa.array(chosen))


def _merge_and_split(schema: ShardSchema, updates: pa.Table, advance_to: int) -> list[tuple[int, pa.Table]]:
    return _split_parts(schema, merge_updates(schema, updates, advance_to))


def _split_parts(schema: ShardSchema, updates: pa.Table) -> list[tuple[int, pa.Table]]:
    """Split merged rows into (bucket, rows): by bucket, then by hash range, none above PART_ROWS except for one hash.

    `updates` are ordered as by `merged`.
    """
    hashes = updates.column(HASH).to_numpy()
    buckets = bucket_of(hashes, schema.buckets)
    cuts = [0]
    while cuts[-1] < len(hashes):
        at = cuts[-1]
        bucket_end = int(np.searchsorted(buckets, buckets[at], side="right"))
        end = min(at + PART_ROWS, bucket_end)
        if end < bucket_end:
            # Never cut inside one hash: a key's history stays in one part, in order.
            first = int(np.searchsorted(hashes, hashes[end], side="left"))
            end = first if first > at else int(np.searchsorted(hashes, hashes[end], side="right"))
        cuts.append(end)
    return [(int(buckets[a]), updates.slice(a, b - a)) for a, b in pairwise(cuts)]
