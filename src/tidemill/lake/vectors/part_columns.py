"""Columns of parts by row group: only the requested bytes are fetched, and hashes stay in memory.

    a small part   one request for all bytes, verified by the part's checksum
    a large part   its footer, then the chunks of the requested columns and row groups, verified by their pages

Parts never change and keys are never reused, so nothing that is cached is ever stale.
"""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.base.errors import CorruptError
from tidemill.base.limits import MIB, OBJECT_CONCURRENCY
from tidemill.lake.format.bounds import Bounds, bounds_of
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectStore
from tidemill.shards.api import DIFF, HASH, TIME, Part, RunCpuWork, ShardSchema, run_inline
from tidemill.shards.parts.checksums import TAIL_BYTES, footer_bytes, open_part, read_footer
from tidemill.shards.parts.parquet_pages import chunk_range
from tidemill.shards.parts.schema import contents_schema
from tidemill.shards.parts.schema_evolution import convert_to_schema
from tidemill.shards.parts.stored_types import bounds_of_hashes, chunk_places, hashes_of
from tidemill.shards.read.part_reader import WHOLE_FETCH_BYTES, read_part_bytes

CACHE_BYTES = 128 * MIB
"""Limit for cached columns, 8 bytes a row and column: the hashes of 16 million rows."""
ALL_HASHES = (0, (1 << 64) - 1)
FILES_MAX = 1024
"""Limit for cached footers, and for small parts whose bytes are cached with them."""

Array = npt.NDArray[Any]


class PartSummary(msgspec.Struct, frozen=True):
    """Footer of a part. `starts` are the positions of its row groups, and its number of rows.

    `low` and `high` bound the hashes of each group; `times` and `diffs` bound all rows, None without statistics.
    """

    starts: Array
    low: Array
    high: Array
    times: tuple[int, int] | None
    diffs: tuple[int, int] | None

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    @property
    def only_inserts(self) -> bool:
        """True if every row is the insertion of a single row."""
        return self.diffs == (1, 1)

    def groups_with(self, hashes: Array) -> list[int]:
        """Return the row groups that may have one of these hashes, which are sorted."""
        first = np.searchsorted(hashes, self.low, side="left")
        after = np.searchsorted(hashes, self.high, side="right")
        found: list[int] = np.flatnonzero(first < after).tolist()
        return found

    @property
    def all_groups(self) -> list[int]:
        return list(range(len(self.low)))


class _File(msgspec.Struct, frozen=True):
    """Footer of a part, and its bytes if it is small."""

    summary: PartSummary
    places: dict[str, range]
    """Chunks of a row group by column."""
    metadata: Any  # pq.FileMetaData
    data: Any  # bytes, or None


class PartColumns:
    """Reader of the parts of any shards. Every read is verified."""

    def __init__(self, objects: ObjectStore, *, cpu: RunCpuWork = run_inline, cache_bytes: int = CACHE_BYTES) -> None:
        self._objects = objects
        self._cpu = cpu
        self._slots = asyncio.Semaphore(OBJECT_CONCURRENCY)
        self._files: OrderedDict[str | bytes, _File] = OrderedDict()
        self._cache: OrderedDict[tuple[str | bytes, int, str], Array] = OrderedDict()
        self._cached_bytes = 0
        self._limit_bytes = cache_bytes
        self.fetched_bytes = 0
        """Bytes read from the store since the start."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of cached columns."""
        return self._cached_bytes

    async def summary(self, part: Part) -> PartSummary:
        """Return the footer's facts. Raises MissingError, CorruptError, UnavailableError."""
        return (await self._file(part)).summary

    async def bounds(self, part: Part, schema: ShardSchema) -> Bounds:
        """Return the bounds of its columns under `schema`. Raises as `summary`."""
        return bounds_of(schema, (await self._file(part)).metadata)

    async def columns(self, part: Part, groups: Sequence[int], names: Sequence[str]) -> list[dict[str, Array]]:
        """Return columns of these row groups, which are among `_hash`, `_time` and `_diff`. Raises as `summary`."""
        key = part.object_key or part.inline
        out: list[dict[str, Array]] = [{} for _ in groups]
        missing: dict[str, list[int]] = {}
        for at, group in enumerate(groups):
            for name in names:
                found = self._cache.get((key, group, name))
                if found is None:
                    missing.setdefault(name, []).append(at)
                else:
                    self._cache.move_to_end((key, group, name))
                    out[at][name] = found
        for name, places in missing.items():
            tables = await self._read(part, [groups[at] for at in places], [name])
            for at, table in zip(places, tables, strict=True):
                column = table.column(name)
                out[at][name] = values = hashes_of(column) if name == HASH else np.asarray(column.to_numpy())
                self._store((key, groups[at], name), values)
        return out

    async def rows(self, part: Part, groups: Sequence[int], schema: ShardSchema) -> list[pa.Table]:
        """Return the shard's columns of these row groups, under `schema`. Raises as `summary`."""
        file = await self._file(part)
        names = [column.name for column in schema.columns if column.name in file.places]
        tables = await self._read(part, groups, names)
        return [convert_to_schema(schema, table, contents_schema(schema)) for table in tables]

    async def _read(self, part: Part, groups: Sequence[int], names: Sequence[str]) -> list[pa.Table]:
        file = await self._file(part)

        async def read() -> list[pa.Table]:
            source = file.data
            if source is None:
                ranges = [each for group in groups for each in _chunks(file, group, names)]
                pieces = await self._objects.get_ranges(part.object_key, ranges)
                self.fetched_bytes += sum(map(len, pieces))
                source = _Pieces({start: data for (start, _), data in zip(ranges, pieces, strict=True)})
            return await self._cpu(lambda: _decode(part, file, source, groups, names))

        async with self._slots:
            return await read_verified(self._objects, part.object_key, read)

    async def _file(self, part: Part) -> _File:
        key = part.object_key or part.inline
        found = self._files.get(key)
        if found is not None:
            self._files.move_to_end(key)
            return found
        async with self._slots:
            if part.size_bytes <= WHOLE_FETCH_BYTES:
                data = await read_part_bytes(self._objects, part)
                self.fetched_bytes += len(data)
                found = await self._cpu(lambda: _open(part, data, data))
            else:
                footer = await read_verified(self._objects, part.object_key, lambda: self._footer(part))
                found = await self._cpu(lambda: _open(part, footer, None))
        self._files[key] = found
        while len(self._files) > FILES_MAX:
            self._files.popitem(last=False)
        return found

    async def _footer(self, part: Part) -> bytes:
        size = part.size_bytes
        tail = await self._objects.get(part.object_key, max(0, size - TAIL_BYTES), size)
        if footer_bytes(tail) > len(tail):
            tail = await self._objects.get(part.object_key, max(0, size - footer_bytes(tail)), size)
        self.fetched_bytes += len(tail)
        return read_footer(part, io.BytesIO(tail))

    def _store(self, key: tuple[str | bytes, int, str], values: Array) -> None:
        if key in self._cache or values.nbytes * 4 > self._limit_bytes:
            return
        self._cache[key] = values
        self._cached_bytes += values.nbytes
        while self._cached_bytes > self._limit_bytes:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes


def _open(part: Part, footer: Any, data: Any) -> _File:
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        columns = metadata.schema.to_arrow_schema()
        return _File(_summarize(metadata, columns), chunk_places(columns), metadata, data)
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error


def _summarize(metadata: Any, columns: pa.Schema) -> PartSummary:
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    places = {name: chunks.start for name, chunks in chunk_places(columns).items()}

    def overall(name: str) -> tuple[int, int] | None:
        found = [group.column(places[name]).statistics for group in groups]
        if not found or any(each is None or not each.has_min_max for each in found):
            return None
        return min(each.min for each in found), max(each.max for each in found)

    kind = columns.field(HASH).type
    hashes = [bounds_of_hashes(group.column(places[HASH]).statistics, kind) or ALL_HASHES for group in groups]
    starts = np.cumsum([0, *(group.num_rows for group in groups)])
    low, high = (np.array(each, dtype=np.uint64) for each in zip(*hashes, strict=True))
    return PartSummary(starts, low, high, overall(TIME), overall(DIFF))


def _chunks(file: _File, group: int, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the byte ranges of columns of a row group."""
    columns = file.metadata.row_group(group)
    return [chunk_range(columns.column(place)) for name in names for place in file.places[name]]


def _decode(part: Part, file: _File, source: Any, groups: Sequence[int], names: Sequence[str]) -> list[pa.Table]:
    try:
        if file.data is not None:
            opened = open_part(part, source)
        else:
            opened = pq.ParquetFile(source, metadata=file.metadata, page_checksum_verification=True)
        read = [opened.read_row_group(group, columns=list(names), use_threads=False) for group in groups]
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"part is unreadable: object={part.object_key or 'inline'} ({error}).") from error
    return [table.select(list(names)).combine_chunks() for table in read]


class _Pieces(io.RawIOBase):
    """File of which only these pieces are present, by their start."""

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self._starts = sorted(pieces)
        self._pieces = pieces
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self._starts[-1] + len(self._pieces[self._starts[-1]])
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        place = bisect_right(self._starts, self._at) - 1
        start = self._starts[max(place, 0)]
        offset = self._at - start
        end = None if size is None or size < 0 else offset + size
        found = self._pieces[start][offset:end] if offset >= 0 else b""
        self._at += len(found)
        return found
