"""Columns of parts by row group: only the requested bytes are fetched, and the columns last used stay in memory.

    a small part   one request for all bytes, verified by the part's checksum
    a large part   its footer, then the chunks of the requested columns and row groups, verified by their pages

Parts never change and keys are never reused, so nothing that is cached is ever stale. Invariant (bounded): all that is
cached, footers and small parts included, is counted, and what was not used for longest is dropped.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.limits import MIB, OBJECT_CONCURRENCY
from tidemill.base.runtime.memory_budget import RecentCache
from tidemill.lake.format.bounds import Bounds, bounds_of
from tidemill.lake.vectors.part_files import (
    Array,
    PartFile,
    PartSummary,
    Pieces,
    byte_ranges,
    decode_groups,
    open_file,
    places_of,
)
from tidemill.objects.reads import read_verified
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.api import HASH, Part, RunCpuWork, ShardSchema, run_inline
from tidemill.shards.parts.checksums import TAIL_BYTES, footer_bytes, open_part, read_footer
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import convert_to_schema
from tidemill.shards.parts.stored_types import hashes_of
from tidemill.shards.read.part_reader import WHOLE_FETCH_BYTES, read_part_bytes

CACHE_BYTES = 128 * MIB
"""Limit for all that one reader caches. Columns have three quarters, 8 bytes a row and column: the hashes of 12 million
rows. Footers have an eighth, and so have the bytes of small parts."""
ENTRY_BYTES = 512
"""Memory of a cached value beyond its bytes: keys and objects."""

Key = str | bytes
"""A part: the key of its object, or its inline bytes."""


class PartColumns:
    """Reader of the parts of any shards. Every read is verified."""

    def __init__(self, objects: ObjectStore, *, cpu: RunCpuWork = run_inline, cache_bytes: int = CACHE_BYTES) -> None:
        self._objects = objects
        self._cpu = cpu
        self._slots = asyncio.Semaphore(OBJECT_CONCURRENCY)
        self._files: RecentCache[Key, PartFile] = _bounded(cache_bytes // 8)
        self._small: RecentCache[str, Buffer] = _bounded(cache_bytes // 8)
        """Bytes of small parts, by the keys of their objects."""
        self._cache: RecentCache[tuple[Key, int, str], Array] = _bounded(cache_bytes * 3 // 4)
        self.fetched_bytes = 0
        """Bytes read from the store since the start."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all that is cached."""
        return self._files.weight + self._small.weight + self._cache.weight

    def clear(self) -> None:
        """Drop all that is cached."""
        for cache in (self._files, self._small, self._cache):
            cache.clear()

    async def summary(self, part: Part) -> PartSummary:
        """Return the footer's facts. Raises MissingError, CorruptError, UnavailableError."""
        return (await self._file(part)).summary

    async def bounds(self, part: Part, schema: ShardSchema) -> Bounds:
        """Return the bounds of its columns under `schema`. Raises as `summary`."""
        return bounds_of(schema, (await self._file(part)).metadata())

    async def columns(self, part: Part, groups: Sequence[int], names: Sequence[str]) -> list[dict[str, Array]]:
        """Return columns of these row groups, which are among `_hash`, `_time` and `_diff`. Raises as `summary`."""
        key = _key(part)
        out: list[dict[str, Array]] = [{} for _ in groups]
        missing: dict[str, list[int]] = {}
        for at, group in enumerate(groups):
            for name in names:
                found = self._cache.get((key, group, name))
                if found is None:
                    missing.setdefault(name, []).append(at)
                else:
                    out[at][name] = found
        for name, places in missing.items():
            tables = await self._read(part, [groups[at] for at in places], [name])
            for at, table in zip(places, tables, strict=True):
                column = table.column(name)
                out[at][name] = values = hashes_of(column) if name == HASH else np.asarray(column.to_numpy())
                self._cache.put((key, groups[at], name), values, _cost_bytes(key, values.nbytes))
        return out

    async def rows(self, part: Part, groups: Sequence[int], schema: ShardSchema) -> list[pa.Table]:
        """Return the shard's columns of these row groups, under `schema`. Raises as `summary`."""
        places = places_of((await self._file(part)).metadata())
        names = [column.name for column in schema.columns if column.name in places]
        tables = await self._read(part, groups, names)
        return [convert_to_schema(schema, table, contents_schema(schema)) for table in tables]

    async def _read(self, part: Part, groups: Sequence[int], names: Sequence[str]) -> list[pa.Table]:
        file = None if _is_small(part) else await self._file(part)

        async def read() -> list[pa.Table]:
            if file is None:
                whole = await self._whole_part(part)
                return await self._cpu(lambda: decode_groups(part, lambda: open_part(part, whole), groups, names))
            metadata = file.metadata()
            ranges = byte_ranges(metadata, groups, names)
            pieces = await self._objects.get_ranges(part.object_key, ranges)
            self.fetched_bytes += sum(map(len, pieces))
            source = Pieces({start: data for (start, _), data in zip(ranges, pieces, strict=True)})

            def opened() -> pq.ParquetFile:
                return pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True)

            return await self._cpu(lambda: decode_groups(part, opened, groups, names))

        async with self._slots:
            return await read_verified(self._objects, part.object_key, read)

    async def _file(self, part: Part) -> PartFile:
        key = _key(part)
        found = self._files.get(key)
        if found is not None:
            return found
        async with self._slots:
            if _is_small(part):
                data = await self._whole_part(part)
                footer = bytes(memoryview(data)[-footer_bytes(data) :])
            else:
                footer = await read_verified(self._objects, part.object_key, lambda: self._footer(part))
            found = await self._cpu(lambda: open_file(part, footer))
        self._files.put(key, found, _cost_bytes(key, found.memory_bytes))
        return found

    async def _whole_part(self, part: Part) -> Buffer:
        """Return the bytes of a small part, verified; again from the store if they were dropped."""
        found = self._small.get(part.object_key)
        if found is not None:
            return found
        data = await read_part_bytes(self._objects, part)
        self.fetched_bytes += len(data)
        if part.object_key:
            self._small.put(part.object_key, data, _cost_bytes(part.object_key, len(data)))
        return data

    async def _footer(self, part: Part) -> bytes:
        size = part.size_bytes
        tail = await self._objects.get(part.object_key, max(0, size - TAIL_BYTES), size)
        if footer_bytes(tail) > len(tail):
            tail = await self._objects.get(part.object_key, max(0, size - footer_bytes(tail)), size)
        self.fetched_bytes += len(tail)
        return read_footer(part, io.BytesIO(tail))


def _key(part: Part) -> Key:
    return part.object_key or part.inline


def _bounded(limit_bytes: int) -> RecentCache[Any, Any]:
    """Return a cache in which one value takes at most a quarter of the limit."""
    return RecentCache(limit_bytes, limit_bytes // 4)


def _cost_bytes(key: Key, size_bytes: int) -> int:
    """Return the memory of an entry; the key of an inline part has all of its bytes."""
    return ENTRY_BYTES + size_bytes + (len(key) if isinstance(key, bytes) else 0)


def _is_small(part: Part) -> bool:
    return not part.object_key or part.size_bytes <= WHOLE_FETCH_BYTES
