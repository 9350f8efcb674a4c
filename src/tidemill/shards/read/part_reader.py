"""Read parts: bounded parallel fetches, and a cache of decoded parts, bounded in bytes.

Parts never change and keys are never reused, so a cached part is never stale.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import pyarrow as pa

from tidemill.base.limits import MIB, OBJECT_CONCURRENCY
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import Batch, Part, ShardSchema
from tidemill.shards.executor import RunCpuWork, run_inline
from tidemill.shards.parts.parts import decode_part, rows_within
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.parts.schema_evolution import check_schema_known
from tidemill.shards.read.part_bytes import read_part_bytes

CACHE_BYTES = 64 * MIB
"""Limit for decoded parts in one handle's cache; feedback, listeners and compaction all read recent batches."""


class PartReader:
    """Reader of the parts of one shard that needs only the bucket, so that executors use it, too."""

    def __init__(
        self, objects: ObjectStore, schema: ShardSchema, *, cache_bytes: int = CACHE_BYTES, cpu: RunCpuWork = run_inline
    ) -> None:
        self._objects = objects
        self._schema = schema
        self._cpu = cpu
        self._slots = asyncio.Semaphore(OBJECT_CONCURRENCY)
        self._cache: OrderedDict[str | bytes, pa.Table] = OrderedDict()
        self._cached_bytes = 0
        self._limit_bytes = cache_bytes

    async def read_part(self, part: Part) -> pa.Table:
        """Return all rows of a part with `_time`, `_diff`, `_hash`, sorted.

        Raises MissingError, CorruptError, UnavailableError.
        """
        key = part.object_key or part.inline
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        async with self._slots:
            data = await read_part_bytes(self._objects, part)
            table = await self._cpu(lambda: decode_part(self._schema, data, part))
        self._cache_part(key, table)
        return table

    async def read_batch(self, batch: Batch, lower: int, upper: int) -> pa.Table:
        """Return the rows of the batch with lower ≤ `_time` < upper, within the batch's own bounds; part after part.

        A batch may be registered with narrower bounds than those under which its parts were written: rows outside are
        hidden. Also raises SchemaEvolvedError.
        """
        lower, upper = max(lower, batch.lower), min(upper, batch.upper)
        if not batch.parts or lower >= upper:
            return part_schema(self._schema).empty_table()
        check_schema_known(self._schema, batch)
        tables = await asyncio.gather(*(self.read_part(p) for p in batch.parts))
        return pa.concat_tables([rows_within(t, lower, upper) for t in tables])

    async def read_batches(self, batches: Sequence[Batch], lower: int, upper: int) -> pa.Table:
        """Return the rows of several batches within [lower, upper), in batch order."""
        tables = await asyncio.gather(*(self.read_batch(b, lower, upper) for b in batches))
        return pa.concat_tables([part_schema(self._schema).empty_table(), *tables])

    def _cache_part(self, key: str | bytes, table: pa.Table) -> None:
        size = table.nbytes + (len(key) if isinstance(key, bytes) else 0)
        if key in self._cache or size * 4 > self._limit_bytes:
            return
        self._cache[key] = table
        self._cached_bytes += size
        while self._cached_bytes > self._limit_bytes:
            gone, old = self._cache.popitem(last=False)
            self._cached_bytes -= old.nbytes + (len(gone) if isinstance(gone, bytes) else 0)
