"""Compaction: many small consecutive batches become one, off the commit path. Thin, but real.

C1  The merged batch covers exactly [first lower, last upper), so the batches stay contiguous (S2).
C2  For every readable time the sum of updates is unchanged: only times below since move, and only up to
    min(since, upper - 1); a listener at frontier f ≤ since is stopped by its own check, every other one
    filters by time and sees nothing twice.
C3  The merge is shown only if every batch it read still stands as it was (Replace); a loser has made
    orphans and nothing else. Replaced objects are not deleted in this step: leak before lose.

`compact_once` is called by whoever has time (a pipeline between triggers, a node's background task).
Any number may call it at once; one wins a run, the others find it moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.limits import INLINE_PART_BYTES, MIB
from tidemill.objects.store import ObjectStore
from tidemill.shards.apply import batch_id
from tidemill.shards.commands import Replace
from tidemill.shards.consolidate import merged
from tidemill.shards.cpu import Cpu, inline_cpu
from tidemill.shards.front import Batch, Part
from tidemill.shards.handle import INLINE_BUDGET_BYTES, LogShard
from tidemill.shards.hashing import bucket_of, hash_rows
from tidemill.shards.parts import store_part
from tidemill.shards.schema import hash_columns, update_schema
from tidemill.shards.state import batch_sums

FAN_IN = 8
"""Batches of one size class before they are merged; each update is rewritten about log8(size) times."""

RUN_BATCHES = 512
RUN_BYTES = 128 * MIB
"""One merge reads at most this much, so its memory is bounded (decoded rows take about three times as much)."""

PART_ROWS = 1 << 20
SMALLEST_CLASS_BYTES = 64 << 10


class Compacted(msgspec.Struct, frozen=True):
    """What one merge did. `shown` False = somebody moved the batches first, and nothing changed."""

    batches: int
    rows_in: int
    rows_out: int
    bytes_in: int
    bytes_out: int
    shown: bool


def size_class(batch: Batch) -> int:
    """0 up to SMALLEST_CLASS_BYTES, then one more for every factor of FAN_IN."""
    size, out, bound = batch_sums(batch)[1], 0, SMALLEST_CLASS_BYTES
    while size > bound:
        bound *= FAN_IN
        out += 1
    return out


def choose(batches: Sequence[Batch]) -> tuple[int, int]:
    """[start, end) of the run to merge, (0, 0) = none. Pure.

    The oldest run of at least FAN_IN consecutive batches of one class or smaller, smallest class first, within
    the run limits. The newest batch is left alone while empty: idle ticks extend it, and would unseat every merge.
    """
    count = len(batches) - 1 if batches and not batches[-1].parts else len(batches)
    classes = [size_class(b) for b in batches[:count]]
    sizes = [batch_sums(b)[1] for b in batches[:count]]
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
    return 0, 0


async def compact_once(shard: LogShard, objects: ObjectStore, rand: Rand, *, cpu: Cpu = inline_cpu) -> Compacted | None:
    """Merge one run, or return None when there is nothing to do. When it raises, nothing changed."""
    await shard.frontiers()
    state = shard.state
    start, end = choose(state.batches)
    run = state.batches[start:end]
    if not run:
        return None
    lower, upper = run[0].lower, run[-1].upper
    updates = await shard.reader.read_batches(run, lower, upper)
    advance_to = min(state.since, upper - 1)
    parts: list[Part] = []
    if updates.num_rows:
        kept = await cpu(lambda: merged(shard.schema, updates, advance_to))
        for bucket, rows in await cpu(lambda: _split(shard, kept)):
            parts.append(
                await store_part(
                    objects,
                    shard.shard_id,
                    shard.schema,
                    rows,
                    writer=f"c-{shard.writer}",
                    rand=rand,
                    bucket=bucket,
                    codec="zstd",
                    inline_bytes=INLINE_PART_BYTES if state.inline_bytes < INLINE_BUDGET_BYTES else 0,
                    cpu=cpu,
                )
            )
    batch = Batch(lower, upper, tuple(parts), shard.writer, rand.nonce())
    shown = await shard.replace(Replace(tuple(batch_id(b) for b in run), batch))
    sums = [batch_sums(b) for b in run]
    out = batch_sums(batch)
    return Compacted(len(run), sum(s[0] for s in sums), out[0], sum(s[1] for s in sums), out[1], shown)


def _split(shard: LogShard, updates: pa.Table) -> list[tuple[int, pa.Table]]:
    """(bucket, rows) of the merged parts: by bucket, then by hash range, none above PART_ROWS but for one hash."""
    if updates.num_rows == 0:
        return []
    updates = updates.cast(update_schema(shard.schema))
    hashes = hash_rows(updates, hash_columns(shard.schema))
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    buckets = bucket_of(hashes, shard.schema.buckets)
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
    return [(int(buckets[a]), updates.take(pa.array(order[a:b]))) for a, b in pairwise(cuts)]
