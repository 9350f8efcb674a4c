"""View of a reader: layers and a version. Point reads are synchronous if everything they need is cached.

A view is replaced whenever the stack of layers or the version changes. Only the contents of the newest layer can change
within it, and not while that layer is pinned. A look-up goes by age: layers from the newest, files of level 0 from the
newest, then one file of each level. The first row found is the answer, even a tombstone; no file is skipped because of
its seqnos.

A pinned view does not change until it is released: the newest layer gets no more rows, and the version's files are not
deleted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, cast

from tidemill.metastore.lsm.block import Block
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.memtable import Layer
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import TableMeta
from tidemill.metastore.lsm.table_cache import TableCache
from tidemill.metastore.lsm.version_set import VersionSet


class Pending(Enum):
    """Result of `peek` if the answer is not in memory."""

    PENDING = "pending"

    def __bool__(self) -> Literal[False]:
        return False


PENDING: Final = Pending.PENDING


class Row(NamedTuple):
    seqno: int
    value: bytes


class View:
    """View of the database. `layers` are newest first. Asynchronous reads pin the version, so that its files are not
    deleted after a compaction. They raise MissingError, CorruptError, InvalidError (newer format), UnavailableError.
    """

    __slots__ = ("_deep", "_dicts", "_entries", "_level0", "_versions", "layers", "tables", "version")

    def __init__(self, layers: tuple[Layer, ...], versions: VersionSet, tables: TableCache) -> None:
        self.layers = layers
        self.version = versions.current
        self.tables = tables
        self._versions = versions
        self._dicts = tuple(layer.values for layer in layers)
        self._level0 = self.version.levels[0]
        self._deep = self.version.deep
        self._entries = cast("dict[Any, Any]", tables.cache.entries)  # metas by file, blocks by (file, index)

    def peek(self, key: bytes) -> bytes | Pending | None:
        """Return the live value, None if there is no live row, PENDING if something must be read to know."""
        for values in self._dicts:
            value = values.get(key)
            if value is not None:
                return value or None
        for file in self._level0:
            if file.smallest <= key <= file.largest:
                found = self._peek_file(file, key)
                if found is not None:
                    return found or (PENDING if found is PENDING else None)
        for files, largest in self._deep:
            at = bisect_left(largest, key)
            if at < len(files):
                file = files[at]
                if file.smallest <= key:
                    found = self._peek_file(file, key)
                    if found is not None:
                        return found or (PENDING if found is PENDING else None)
        return None

    def _peek_file(self, file: FileMeta, key: bytes) -> bytes | Pending | None:
        """Return the stored value, b"" for a tombstone, None if the file has no row for the key."""
        entries = self._entries
        meta: TableMeta | None = entries.get(file)
        if meta is None:
            return PENDING
        meta.hot = True
        block: Block | None = entries.get((file, bisect_left(meta.last_keys, key)))
        if block is None:
            return PENDING if meta.may_contain(key) else None
        # The only block that can hold the key is cached: it gives a certain answer, faster than the filter.
        block.hot = True
        return (block.by_key or block.index()).get(key)

    async def get(self, key: bytes) -> bytes | None:
        """Return the live value of a key for which `peek` just returned PENDING. Does not search the layers again."""
        found = await self._find(key)
        return (found[0].values[found[1]] or None) if found else None

    def peek_row(self, key: bytes) -> Row | Pending | None:
        """Return the row as `peek` does, with the seqno."""
        for layer in self.layers:
            value = layer.values.get(key)
            if value is not None:
                return Row(layer.seqnos[key], value) if value else None
        tables = self.tables
        for file in self.version.candidates(key):
            meta = tables.cached_meta(file)
            if meta is None:
                return PENDING
            if meta.may_contain(key):
                block = tables.cached_block(file, bisect_left(meta.last_keys, key))
                if block is None:
                    return PENDING
                at = block.find(key)
                if at >= 0:
                    return Row(block.seqno(at), block.values[at]) if block.values[at] else None
        return None

    async def get_row(self, key: bytes) -> Row | None:
        """Return the live row of a key for which `peek_row` just returned PENDING."""
        found = await self._find(key)
        if found is None:
            return None
        block, at = found
        return Row(block.seqno(at), block.values[at]) if block.values[at] else None

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the live value or None for each key, in order."""
        values = list(map(self.peek, keys))
        lacking = {key for key, value in zip(keys, values, strict=True) if value is PENDING}
        found = await self._find_many(sorted(lacking)) if lacking else {}
        return [
            (found.get(key) or None) if value is PENDING else value for key, value in zip(keys, values, strict=True)
        ]

    async def _find(self, key: bytes) -> tuple[Block, int] | None:
        """Return the block, and the index in it, of the newest file row for `key`, including tombstones.

        Checks the filter before any block. Needs at most one read for filter and index and one for the block, for each
        file that may hold the key.
        """
        tables = self.tables
        self._versions.pin(self.version)
        try:
            for file in self.version.candidates(key):
                meta = tables.cached_meta(file) or await tables.meta(file)
                if not meta.may_contain(key):
                    continue
                block = await tables.block(file, bisect_left(meta.last_keys, key))
                at = block.find(key)
                if at >= 0:
                    return block, at
            return None
        finally:
            self._versions.unpin(self.version)

    async def _find_many(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """Return the stored values of the file rows for these ascending keys, b"" for tombstones.

        Keys in adjacent blocks of one file share a read; the reads of one file run concurrently.
        """
        found: dict[bytes, bytes] = {}
        self._versions.pin(self.version)
        try:
            for files in self.version.runs(keys[0], keys[-1] + b"\0"):
                for file, wanted in _split_keys_by_file(files, keys):
                    await self._find_in_file(file, wanted, found)
                keys = [key for key in keys if key not in found]
            return found
        finally:
            self._versions.unpin(self.version)

    async def _find_in_file(self, file: FileMeta, keys: list[bytes], found: dict[bytes, bytes]) -> None:
        tables = self.tables
        meta = tables.cached_meta(file) or await tables.meta(file)
        wanted: dict[int, list[bytes]] = {}
        for key in filter(meta.may_contain, keys):
            wanted.setdefault(bisect_left(meta.last_keys, key), []).append(key)
        blocks: dict[int, Block] = {}
        lacking = []
        for index in wanted:
            block = tables.cached_block(file, index)
            if block is None:
                lacking.append(index)
            else:
                blocks[index] = block
        if lacking:
            spans = list(_consecutive_runs(lacking))
            for (first, _), read in zip(
                spans, await asyncio.gather(*(tables.blocks(file, *span) for span in spans)), strict=True
            ):
                blocks.update(enumerate(read, first))
        for index, here in wanted.items():
            block = blocks[index]
            for key in here:
                at = block.find(key)
                if at >= 0:
                    found[key] = block.values[at]


class ClosedView(View):
    """Replacement of the view after the database has ended, so that the fast path needs no check."""

    __slots__ = ("_check",)

    def __init__(self, view: View, check: Callable[[], None]) -> None:
        super().__init__((), view._versions, view.tables)
        self._check = check

    def peek(self, key: bytes) -> bytes | Pending | None:
        self._check()
        raise AssertionError("an ended database passed its own check")

    def peek_row(self, key: bytes) -> Row | Pending | None:
        self._check()
        raise AssertionError("an ended database passed its own check")


def _split_keys_by_file(files: tuple[FileMeta, ...], keys: list[bytes]) -> Iterator[tuple[FileMeta, list[bytes]]]:
    """Yield each of the disjoint files, in key order, with the ascending keys within its range."""
    for file in files:
        start = bisect_left(keys, file.smallest)
        end = bisect_left(keys, file.largest + b"\0", start)
        if start < end:
            yield file, keys[start:end]


def _consecutive_runs(indexes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of consecutive indexes; `indexes` ascend."""
    first = count = 0
    for index in indexes:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count


class Pin:
    """Pinned view. Created and released synchronously. `check` raises if the database may not be read any more."""

    __slots__ = ("_released", "_versions", "check", "options", "view")

    def __init__(self, view: View, versions: VersionSet, options: Options, check: Callable[[], None]) -> None:
        self.view = view
        self.options = options
        self.check = check
        self._versions = versions
        self._released = False
        if view.layers:
            view.layers[0].pins += 1
        versions.pin(view.version)

    def duplicate(self) -> Pin:
        """Return another pin of the same view."""
        return Pin(self.view, self._versions, self.options, self.check)

    def release(self) -> None:
        """Release the pin. Idempotent."""
        if not self._released:
            self._released = True
            if self.view.layers:
                self.view.layers[0].pins -= 1
            self._versions.unpin(self.view.version)

    @property
    def released(self) -> bool:
        return self._released
