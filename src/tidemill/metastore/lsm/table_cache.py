"""Open files of a database: filters, indexes and blocks, read once and cached while the budget lasts.

Concurrent readers of the same missing item share one read. The first caller reads; its failure is raised to all waiting
callers and is not cached. If it is cancelled, one of the waiting callers reads instead.

The cache drops entries that were not used recently. A hit costs one look-up and one store: it sets the entry's `hot`
and moves nothing. To make room, entries are examined from the oldest on: a hot one loses its flag and moves to the
back, any other is dropped. This is the CLOCK approximation of least recently used; a long scan, whose blocks are used
once, does not evict frequently used entries.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from tidemill.base.errors import CorruptError
from tidemill.metastore.lsm.block import Block, decode_block
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.sst import TableMeta, decode_meta
from tidemill.objects.reads import read_again, read_verified

DECODE_SLICE = 64
"""Number of blocks decoded between two yields to the event loop: about a millisecond."""

_RunningRead = asyncio.Future["Block | TableMeta | Exception | None"]
"""Running read. Its result is the item read, the failure, or None if its reader was cancelled."""


class Entry(Protocol):
    cost_bytes: int
    hot: bool


class BlockCache:
    """Cache of blocks, and of indexes with filters, by any hashable key. May serve several databases of one event
    loop."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.dropped = 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        """Entries, for look-ups on the hot path only. Code that uses an entry directly must set its `hot`."""

    def get(self, key: Hashable) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.hot = True
        return entry

    def put(self, key: Hashable, entry: Entry) -> None:
        """Add an entry and drop others until the budget holds. An entry larger than the budget is not added."""
        if key in self.entries or entry.cost_bytes > self.budget_bytes:
            return
        entries = self.entries
        # Each iteration removes an entry or clears a flag, so the loop terminates.
        while entries and self.used_bytes + entry.cost_bytes > self.budget_bytes:
            oldest, victim = next(iter(entries.items()))
            if victim.hot:
                victim.hot = False
                entries.move_to_end(oldest)
            else:
                self.remove(oldest)
                self.dropped += 1
        entries[key] = entry
        self.used_bytes += entry.cost_bytes

    def remove(self, key: Hashable) -> None:
        """Remove an entry. An absent key is not an error."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.cost_bytes


class TableCache:
    """Open files. The `cached_` methods are synchronous and fast; the others read from the bucket if they must."""

    def __init__(self, files: SstFiles, cache: BlockCache) -> None:
        self.files = files
        self.cache = cache
        self.reads = 0
        self.read_bytes = 0
        # One dictionary with entries of two types: metas by file, blocks by (file, index).
        self._entries = cast("dict[Any, Any]", cache.entries)
        self._flights: dict[Hashable, _RunningRead | None] = {}  # running reads; a future once another caller waits
        self._block_counts: dict[FileMeta, int] = {}

    def cached_meta(self, file: FileMeta) -> TableMeta | None:
        found: TableMeta | None = self._entries.get(file)
        if found is not None:
            found.hot = True
        return found

    def cached_block(self, file: FileMeta, index: int) -> Block | None:
        found: Block | None = self._entries.get((file, index))
        if found is not None:
            found.hot = True
        return found

    async def meta(self, file: FileMeta) -> TableMeta:
        """Return filter and index, by one ranged read. Raises MissingError, CorruptError, UnavailableError,
        InvalidError (newer format)."""
        while True:
            found = self.cached_meta(file)
            if found is not None:
                return found
            if file not in self._flights:
                return await self._read_meta(file)
            landed = await self._await_read(file)
            if landed is not None:
                return cast(TableMeta, landed)

    async def block(self, file: FileMeta, index: int) -> Block:
        """Return one block, see `blocks`. This is the path of a get that misses the cache, kept as short as
        possible."""
        found = self.cached_block(file, index)
        if found is not None:
            return found
        key, meta = (file, index), self.cached_meta(file)
        if meta is None or key in self._flights:
            return (await self.blocks(file, index, 1))[0]
        self._flights[key] = None
        try:
            start, end = meta.starts[index], meta.starts[index + 1]
            data = await self.files.read(file, start, end)
            self.reads += 1
            self.read_bytes += end - start
            try:
                block = decode_block(data, meta.name, start, meta.rows[index])
            except CorruptError as error:
                decoded = partial(self._read_and_decode, file, meta, [index])
                [block] = await read_again(self.files.objects, self.files.key(file), error, decoded)
        except BaseException as error:
            self._finish_read(key, error)
            raise
        self.cache.put(key, block)
        self._finish_read(key, block)
        return block

    async def blocks(self, file: FileMeta, first: int, count: int, *, fill_cache: bool = True) -> list[Block]:
        """Return `count` blocks from `first` on, a few dozen at most. Adjacent uncached blocks share one ranged read.

        `fill_cache=False` does not add to the cache: for long scans. Concurrent reads are shared in either case. Raises
        as `meta`.
        """
        meta = self.cached_meta(file) or await self.meta(file)
        wanted = range(first, first + count)
        entries, flights = self._entries, self._flights
        if not any((file, index) in entries or (file, index) in flights for index in wanted):
            return await self._read_blocks(file, meta, wanted, fill_cache)
        found: dict[int, Block] = {}
        while len(found) < count:
            # Looked up and claimed without an await in between, so two readers never claim the same block.
            mine: list[int] = []
            others: list[int] = []
            for index in wanted:
                if index not in found:
                    block = self.cached_block(file, index)
                    if block is not None:
                        found[index] = block
                    else:
                        (others if (file, index) in self._flights else mine).append(index)
            if mine:
                found.update(zip(mine, await self._read_blocks(file, meta, mine, fill_cache), strict=True))
            for index in others:
                landed = await self._await_read((file, index))
                if landed is not None:
                    found[index] = cast(Block, landed)
        return [found[index] for index in wanted]

    def drop_file(self, file: FileMeta) -> None:
        """Drop the cached items of a file that no version needs any more. A running read may still add some again."""
        self.cache.remove(file)
        for index in range(self._block_counts.pop(file, 0)):
            self.cache.remove((file, index))

    async def _read_meta(self, file: FileMeta) -> TableMeta:
        self._flights[file] = None
        try:
            key = self.files.key(file)
            meta = await read_verified(self.files.objects, key, partial(self._read_and_decode_meta, file, key))
        except BaseException as error:
            self._finish_read(file, error)
            raise
        self._block_counts[file] = len(meta.rows)
        self.cache.put(file, meta)
        self._finish_read(file, meta)
        return meta

    async def _read_and_decode_meta(self, file: FileMeta, key: str) -> TableMeta:
        data = await self.files.read(file, file.meta_start, file.size_bytes)
        self.reads += 1
        self.read_bytes += len(data)
        return decode_meta(data, file, key)

    async def _read_blocks(
        self, file: FileMeta, meta: TableMeta, indexes: Sequence[int], fill_cache: bool
    ) -> list[Block]:
        for index in indexes:
            self._flights[(file, index)] = None
        try:
            decoded = partial(self._read_and_decode, file, meta, indexes)
            blocks = await read_verified(self.files.objects, self.files.key(file), decoded)
        except BaseException as error:
            for index in indexes:
                self._finish_read((file, index), error)
            raise
        for index, block in zip(indexes, blocks, strict=True):
            if fill_cache:
                self.cache.put((file, index), block)
            self._finish_read((file, index), block)
        return blocks

    async def _read_and_decode(self, file: FileMeta, meta: TableMeta, indexes: Sequence[int]) -> list[Block]:
        starts, rows, name = meta.starts, meta.rows, meta.name
        runs = list(_consecutive_runs(indexes))
        ranges = [(starts[first], starts[end]) for first, end in runs]
        if len(ranges) == 1:
            pieces = [await self.files.read(file, *ranges[0])]
        else:
            pieces = await self.files.read_ranges(file, ranges)
        self.reads += len(ranges)
        self.read_bytes += sum(map(len, pieces))
        blocks: list[Block] = []
        for (first, end), piece in zip(runs, pieces, strict=True):
            base = starts[first]
            for index in range(first, end):
                data = piece if end - first == 1 else piece[starts[index] - base : starts[index + 1] - base]
                blocks.append(decode_block(data, name, starts[index], rows[index]))
                if len(blocks) % DECODE_SLICE == 0:
                    await asyncio.sleep(0)
        return blocks

    def _finish_read(self, key: Hashable, outcome: Block | TableMeta | BaseException) -> None:
        flight = self._flights.pop(key)
        if flight is not None:
            # Cancellation of the reader says nothing about the file: a waiting caller retries.
            lost = isinstance(outcome, BaseException) and not isinstance(outcome, Exception)
            flight.set_result(None if lost else cast("Block | TableMeta | Exception", outcome))

    async def _await_read(self, key: Hashable) -> Block | TableMeta | None:
        """Await a running read; return its item, or None if it was cancelled or has ended. Raises its failure."""
        if key not in self._flights:
            return None
        flight = self._flights[key]
        if flight is None:
            flight = self._flights[key] = asyncio.get_running_loop().create_future()
        # Shielded: cancelling one waiting caller must not cancel the future that the others await.
        outcome = await asyncio.shield(flight)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _consecutive_runs(indexes: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield half-open ranges of consecutive indexes; `indexes` ascend."""
    first = end = -1
    for index in indexes:
        if index != end:
            if first >= 0:
                yield first, end
            first = index
        end = index + 1
    if first >= 0:
        yield first, end
