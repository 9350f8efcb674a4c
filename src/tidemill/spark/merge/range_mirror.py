"""Mirror of one hash range of a shard, in a process that executes tasks: cached from step to step, built on a miss.

It follows the shard as a driver's mirror does, but reads of each batch only the parts that overlap the range.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import HASH, Batch, HistoryLostError, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.arrow_rows import Index, rows_at
from tidemill.shards.parts.consolidate import sum_contents
from tidemill.shards.parts.row_hash import U64, bucket_of, hash_rows
from tidemill.shards.parts.schema import part_schema
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import shared_stores

CACHE_BYTES = 256 << 20
"""Limit of the size of all range mirrors that one worker caches."""


class HashRange(msgspec.Struct, frozen=True):
    """Range `number` of `count` equal hash ranges."""

    number: int
    count: int

    @property
    def bounds(self) -> tuple[int, int]:
        """Hashes [lower, upper) of the range, as `bucket_of` cuts them."""
        lower, upper = (-(-(number << 32) // self.count) << 32 for number in (self.number, self.number + 1))
        return lower, upper

    def mask(self, hashes: U64) -> pa.Array:
        return pa.array(bucket_of(hashes, self.count) == self.number)

    def restrict_batch(self, batch: Batch) -> Batch:
        """Return the batch without the parts that have no row of the range."""
        reached = [bucket_of(np.array([p.min_hash, p.max_hash], np.uint64), self.count) for p in batch.parts]
        parts = tuple(p for p, (low, high) in zip(batch.parts, reached, strict=True) if low <= self.number <= high)
        return msgspec.structs.replace(batch, parts=parts)


def cut_by_hash(rows: pa.Table, key: tuple[str, ...], count: int) -> list[pa.Table]:
    """Return the rows of each of `count` hash ranges, in order."""
    if count == 1:
        return [rows]
    numbers = bucket_of(hash_rows(rows, key), count).astype(np.int16)
    order: Index = np.argsort(numbers, kind="stable")
    ordered = rows_at(rows, order)
    ends = np.searchsorted(numbers[order], np.arange(count + 1)).tolist()
    return [ordered.slice(ends[at], ends[at + 1] - ends[at]) for at in range(count)]


class RangeMirrorCache:
    """Cache of range mirrors of one process, for one caller at a time.

    `made` counts mirrors that were built, `followed` those that were brought up to date.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self.made = 0
        self.followed = 0
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, HashRange], Mirror] = OrderedDict()

    def mirror_at(
        self, urls: StoreUrls, table: str, shard_id: str, schema: ShardSchema, part: HashRange, upper: int
    ) -> Mirror:
        """Return the mirror as of `upper`. Raises as reading the shard."""
        portal, stores = shared_stores(urls)
        shard = portal.call(stores.shard(table))
        mirror = self._kept.pop((shard_id, part), None)
        if mirror is None or mirror.schema != schema or not self._follow(portal, shard, mirror, part, upper):
            found = portal.call(_read_range_contents(shard, part, upper - 1))
            mirror = Mirror.hydrate(schema, found, upper)
            self.made += 1
        self._kept[shard_id, part] = mirror
        while len(self._kept) > 1 and sum(m.held_bytes for m in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)
        return mirror

    def _follow(self, portal: BlockingPortal, shard: LogShard, mirror: Mirror, part: HashRange, upper: int) -> bool:
        """Advance the mirror to `upper`. False if the batches it needs no longer exist, or if it is beyond `upper`
        already."""
        if mirror.upper > upper:
            return False
        try:
            for batch in portal.call(shard.batches(mirror.upper)):
                until = min(batch.upper, upper)
                if until > mirror.upper:
                    rows = portal.call(shard.read_batch(part.restrict_batch(batch), mirror.upper, until))
                    mirror.apply(rows.filter(part.mask(rows.column(HASH).to_numpy())), mirror.upper, until)
        except HistoryLostError:
            return False
        self.followed += 1
        return mirror.upper == upper


async def _read_range_contents(shard: LogShard, part: HashRange, as_of: int) -> pa.Table:
    """Return the shard's contents in the range. Batches are read one by one, so memory holds a batch and the range."""
    async with shard.hold_during("read", as_of):
        found = [part_schema(shard.schema).empty_table()]
        for batch in await shard.batches_until(as_of):
            rows = await shard.read_batch(part.restrict_batch(batch), 0, as_of + 1)
            found.append(rows.filter(part.mask(rows.column(HASH).to_numpy())))
    return sum_contents(shard.schema, pa.concat_tables(found))


PROCESS_CACHE = RangeMirrorCache()
"""Cache of this process. When Spark ends a worker, the cache is lost, and its successor builds mirrors again."""


def open_range_mirror(
    urls: StoreUrls, table: str, shard_id: str, schema: ShardSchema, part: HashRange, upper: int, saved: Mirror | None
) -> Mirror:
    """Return the driver's saved mirror if it is on this machine and as of `upper`, else a mirror of the range."""
    if saved is not None and saved.upper == upper:
        return saved
    if upper == 0:
        return Mirror(schema)
    return PROCESS_CACHE.mirror_at(urls, table, shard_id, schema, part, upper)
