"""Read parts: bounded parallel fetches, and a cache of decoded parts, bounded in bytes; their bytes for synchronous
readers that need some of their columns.

Parts never change and keys are never reused, so a cached part is never stale.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidemill.base.limits import MIB, OBJECT_CONCURRENCY
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.objects.reads import ObjectFile, read_verified
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.api import Batch, Part, RunCpuWork, ShardSchema, run_inline
from tidemill.shards.parts.checksums import verify_part_bytes
from tidemill.shards.parts.parts import decode_part, rows_within
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.parts.schema_evolution import check_schema_known
from tidemill.shards.read.hash_ranges import FetchPart

CACHE_BYTES = 64 * MIB
"""Limit for decoded parts in one handle's cache; feedback, listeners and compaction all read recent batches."""

WHOLE_FETCH_BYTES = 1 * MIB
"""Size up to which a part is fetched whole: its footer and columns would take several requests."""


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


async def read_part_bytes(objects: ObjectStore, part: Part) -> Buffer:
    """Return all bytes of a part, verified. Raises MissingError, CorruptError, UnavailableError."""
    if not part.object_key:
        return part.inline

    async def read() -> bytes:
        data = await objects.get(part.object_key)
        verify_part_bytes(part, data)
        return data

    return await read_verified(objects, part.object_key, read)


def fetch_through(portal: BlockingPortal, objects: ObjectStore, *, whole: bool) -> FetchPart:
    """Return a `FetchPart` through `portal`. If `whole`, all columns of a part are needed, so it makes one request."""

    def fetch(part: Part) -> Any:
        if not part.object_key:
            return part.inline
        if whole or part.size_bytes <= WHOLE_FETCH_BYTES:
            return portal.call(read_part_bytes(objects, part))
        return ObjectFile(portal, objects, part.object_key, part.size_bytes)

    return fetch
