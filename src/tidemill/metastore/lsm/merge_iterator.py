"""Merge of many sorted runs, forward and backward, in chunks.

Each run has a window of rows in memory. The smallest of the windows' last keys (of runs that have more rows) bounds how
far all of them can advance. The rows up to it are put into one dict, oldest run first, so that the newest row of each
key remains, and sorted: timsort merges ascending runs in linear time. All of these loops run in C. If only one run has
rows, they are passed on unchanged. Backward is the same from the other end.

Filling a run from the cache is synchronous; the scan waits only if something must be read.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from itertools import compress

from tidemill.metastore.lsm.block import Block
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.memtable import Layer
from tidemill.metastore.lsm.sst import TableMeta
from tidemill.metastore.lsm.table_cache import TableCache

Rows = tuple[list[bytes], list[bytes]]

LAYER_ROWS = 1_024
"""Rows in a layer's window."""

WINDOW_BLOCKS = 16
"""Limit of blocks in one window: about a thousand rows. More would not stay in the processor's cache during the
merge."""

READ_BLOCKS = 64
"""Limit of blocks in one read: half a MiB before compression, to limit the number of requests to a distant bucket."""

READ_BYTES = 512 << 10
"""Limit of bytes in one read of several blocks: blocks with large values are larger than others."""

FEW_BLOCKS = 4
"""A range of at most this many blocks is read whole; for a longer one the reads begin with one block and double."""


FREE_SHARE = 0.75
"""Share of the cache below which scans put everything they read into it."""


class SortedRun:
    """One sorted run within [lower, upper). The window is `keys[start:end]`, ascending, with the same slice of
    `values`."""

    __slots__ = ("done", "end", "keys", "start", "values")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.start = self.end = 0
        self.done = False
        """True if no row follows the window (or precedes it, when going backward)."""

    def refill(self) -> bool:
        """Fill an empty window with the next rows, or set `done`. Return False if `read` must be awaited first."""
        raise NotImplementedError

    async def read(self) -> None:
        """Read what `refill` was missing."""
        raise NotImplementedError


class LayerRun(SortedRun):
    """Run over a pinned layer, which does not change. Its keys may have to be sorted first, in steps."""

    __slots__ = ("_at", "_layer", "_lower", "_reverse", "_sorted", "_stop", "_upper")

    def __init__(self, layer: Layer, lower: bytes, upper: bytes | None, reverse: bool) -> None:
        super().__init__()
        self._layer = layer
        self._lower = lower
        self._upper = upper
        self._reverse = reverse
        self._sorted: list[bytes] | None = None
        self._at = self._stop = 0

    def refill(self) -> bool:
        keys = self._sorted
        if keys is None:
            layer = self._layer
            keys = layer.sorted_keys
            if keys is None:
                if not layer.sort_step():
                    return False
                keys = layer.sorted_keys
                assert keys is not None
            self._sorted = keys
            self._at = bisect_left(keys, self._lower) if self._lower else 0
            self._stop = len(keys) if self._upper is None else max(self._at, bisect_left(keys, self._upper))
        if self._reverse:
            end = self._stop
            start = self._stop = max(self._at, end - LAYER_ROWS)
        else:
            start = self._at
            end = self._at = min(self._stop, start + LAYER_ROWS)
        self.done = self._at >= self._stop
        self.keys = keys = keys[start:end]
        self.values = list(map(self._layer.values.__getitem__, keys))
        self.start, self.end = 0, len(keys)
        return True

    async def read(self) -> None:
        await sort_layer(self._layer)


async def sort_layer(layer: Layer) -> None:
    """Sort the keys of an unchanging layer, step by step."""
    sorted_now = layer.sort_step()
    while not sorted_now:
        await asyncio.sleep(0)
        sorted_now = layer.sort_step()


class FilesRun(SortedRun):
    """Run over disjoint files in key order, each opened when the scan reaches it. Adjacent blocks are read together."""

    __slots__ = (
        "_ahead",
        "_fill_blocks",
        "_first",
        "_got",
        "_last",
        "_left",
        "_lower",
        "_meta",
        "_reverse",
        "_right",
        "_tables",
        "_todo",
        "_upper",
    )

    def __init__(
        self,
        tables: TableCache,
        files: tuple[FileMeta, ...],
        lower: bytes,
        upper: bytes | None,
        reverse: bool,
        fill_blocks: int,
    ) -> None:
        super().__init__()
        self._tables = tables
        self._todo = list(files if reverse else reversed(files))  # the last one is being read
        self._lower = lower
        self._upper = upper
        self._reverse = reverse
        self._fill_blocks = fill_blocks  # number of blocks that may still be put into the cache
        self._ahead = 1
        self._meta: TableMeta | None = None
        self._got: list[Block] = []  # read but not in a window yet
        self._left = self._right = 0  # remaining blocks: [left, right)
        self._first = self._last = 0  # blocks in which the range begins and ends

    def refill(self) -> bool:
        meta = self._meta
        if meta is None:
            meta = self._tables.cached_meta(self._todo[-1])
            if meta is None:
                return False
            self._open_next_file(meta)
        blocks = self._got or self._cached_blocks()
        if not blocks:
            return False
        # More blocks may have been read than fit in a window; the rest stays for the next one.
        if self._reverse:
            self._got = blocks[:-WINDOW_BLOCKS]
            self._set_window(blocks[-WINDOW_BLOCKS:])
        else:
            self._got = blocks[WINDOW_BLOCKS:]
            self._set_window(blocks[:WINDOW_BLOCKS])
        return True

    async def read(self) -> None:
        file = self._todo[-1]
        if self._meta is None:
            # Retained here too: with a cache that has no room, refill and read would loop forever.
            self._open_next_file(await self._tables.meta(file))
            self._got = self._cached_blocks()
            if self._got:
                return
        first, count = self._next_read()
        cache = self._tables.cache
        # A scan may fill unused room in the cache with everything it reads.
        fill = self._fill_blocks > 0 or cache.used_bytes < cache.budget_bytes * FREE_SHARE
        if count == 1 and fill:
            self._got = [await self._tables.block(file, first)]
        else:
            self._got = await self._tables.blocks(file, first, count, fill_cache=fill)
        self._fill_blocks -= count

    def _open_next_file(self, meta: TableMeta) -> None:
        """Open the next file and determine which of its blocks may hold keys of the range."""
        last_keys, lower, upper = meta.last_keys, self._lower, self._upper
        self._meta = meta
        self._left = self._first = bisect_left(last_keys, lower) if lower else 0
        count = len(last_keys)
        self._right = count if upper is None else min(bisect_left(last_keys, upper, self._left) + 1, count)
        self._last = self._right - 1

    def _next_block_count(self) -> int:
        count = self._right - self._left
        return count if count <= FEW_BLOCKS else min(self._ahead, count)

    def _next_read(self) -> tuple[int, int]:
        """Return the first block and the number of blocks to read next: up to READ_BYTES, but at least one block."""
        assert self._meta is not None
        starts, count = self._meta.starts, self._next_block_count()
        if self._reverse:
            end = self._right
            first = max(end - count, bisect_left(starts, starts[end] - READ_BYTES))
            first = min(first, end - 1)
            return first, end - first
        first = self._left
        end = min(first + count, bisect_right(starts, starts[first] + READ_BYTES) - 1)
        return first, max(end, first + 1) - first

    def _cached_blocks(self) -> list[Block]:
        """Return the next blocks, in key order, up to the first one that is not cached."""
        find, file, blocks = self._tables.cached_block, self._todo[-1], []
        if self._reverse:
            for index in range(self._right - 1, self._right - 1 - min(self._next_block_count(), WINDOW_BLOCKS), -1):
                block = find(file, index)
                if block is None:
                    break
                blocks.append(block)
            blocks.reverse()
        else:
            for index in range(self._left, self._left + min(self._next_block_count(), WINDOW_BLOCKS)):
                block = find(file, index)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def _set_window(self, blocks: list[Block]) -> None:
        """Make these blocks, cut to the range, the window, and advance past them."""
        if len(blocks) == 1:
            keys, values = blocks[0].keys, blocks[0].values  # the cache's lists: rows are passed on as slices of them
        else:
            keys, values = [], []
            for block in blocks:
                keys += block.keys
                values += block.values
        start, end = 0, len(keys)
        if self._reverse:
            shown_right = self._right
            shown_left = self._right = shown_right - len(blocks)
        else:
            shown_left = self._left
            shown_right = self._left = shown_left + len(blocks)
        if shown_left == self._first and self._lower:
            start = bisect_left(keys, self._lower)
        if shown_right > self._last and self._upper is not None:
            end = bisect_left(keys, self._upper, start)
        self.keys, self.values, self.start, self.end = keys, values, start, end
        self._ahead = min(2 * self._ahead, READ_BLOCKS)
        if self._left >= self._right:
            self._meta = None
            self._todo.pop()
            self.done = not self._todo


def merge_next_rows(runs: list[SortedRun], reverse: bool) -> Rows:
    """Return the next rows of all runs without tombstones, ascending, or descending if `reverse`. May be empty.

    `runs` are oldest first, and each has a window or is done. The returned lists belong to the caller.
    """
    if reverse:
        return _merge_backward(runs)
    bound = None
    live = []
    for run in runs:
        if run.start < run.end:
            live.append(run)
            if not run.done:
                last = run.keys[run.end - 1]
                if bound is None or last < bound:
                    bound = last
    parts = []
    for run in live:
        start = run.start
        end = run.end if bound is None else bisect_right(run.keys, bound, start, run.end)
        if start < end:
            run.start = end
            parts.append((run.keys[start:end], run.values[start:end]))
    return _merge_parts(parts, reverse=False)


def _merge_backward(runs: list[SortedRun]) -> Rows:
    bound = None
    live = []
    for run in runs:
        if run.start < run.end:
            live.append(run)
            if not run.done:
                first = run.keys[run.start]
                if bound is None or first > bound:
                    bound = first
    parts = []
    for run in live:
        end = run.end
        start = run.start if bound is None else bisect_left(run.keys, bound, run.start, end)
        if start < end:
            run.end = start
            parts.append((run.keys[start:end], run.values[start:end]))
    return _merge_parts(parts, reverse=True)


def _merge_parts(parts: list[Rows], *, reverse: bool) -> Rows:
    """Merge parts, oldest first: the last part's row of each key wins. Drops tombstones."""
    if not parts:
        return [], []
    keys, values = parts[0]
    if len(parts) > 1:
        merged: dict[bytes, bytes] = {}
        for keys, values in parts:
            merged.update(zip(keys, values, strict=True))
        keys = sorted(merged, reverse=reverse)
        values = list(map(merged.__getitem__, keys))
    elif reverse:
        keys.reverse()
        values.reverse()
    if all(values):
        return keys, values
    return list(compress(keys, values)), list(filter(None, values))
