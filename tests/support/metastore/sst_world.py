"""Files of the metastore on their own: rows to write, and a store that counts, fails and waits on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tidemill.base.clock import ManualClock, Rand, SystemClock
from tidemill.metastore.lsm.block import decode_block
from tidemill.metastore.lsm.manifest import FileMeta
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.sst import SstSummary, SstWriter, decode_meta
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

PREFIX = "metastore/11111111-2222-4333-8444-555555555555/"

Rows = tuple[list[bytes], list[bytes], list[int]]

seqnos = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
keys = st.one_of(st.binary(max_size=12), st.binary(max_size=3).map(b"metastore/extent/".__add__))


@st.composite
def row_sets(draw: st.DrawFn, max_size: int = 60) -> Rows:
    """Sorted unique keys, values of which some are tombstones, seqnos in any order."""
    rows = draw(st.dictionaries(keys, st.tuples(st.binary(max_size=40), seqnos), min_size=1, max_size=max_size))
    ordered = sorted(rows)
    return ordered, [rows[key][0] for key in ordered], [rows[key][1] for key in ordered]


def numbered_rows(count: int, *, first: int = 0, value_bytes: int = 40, seqno: int = 1) -> Rows:
    numbers = range(first, first + count)
    return (
        [b"row/%08d" % number for number in numbers],
        [(b"%08d" % number * (value_bytes // 8 + 1))[:value_bytes] for number in numbers],
        [seqno + number for number in numbers],
    )


def write_sst(rows: Rows, *, chunk: int = 2_000, options: Options | None = None) -> tuple[bytes, SstSummary]:
    writer = SstWriter(options or Options())
    for at in range(0, len(rows[0]), chunk):
        writer.add(*(column[at : at + chunk] for column in rows))
    buffers, summary = writer.finish()
    return b"".join(buffers), summary


def read_sst(data: bytes, file: FileMeta) -> Rows:
    meta = decode_meta(data[file.meta_start :], file, "f")
    read: Rows = ([], [], [])
    for index, rows in enumerate(meta.rows):
        start, end = meta.starts[index : index + 2]
        block = decode_block(data[start:end], "f", start, rows)
        for column, more in zip(read, (block.keys, block.values, block.seqnos()), strict=True):
            column.extend(more)  # type: ignore[attr-defined]
    return read


class Watched:
    """A store that keeps a list of its reads. `gate` holds them back; `failure` makes the next ones fail."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.reads: list[tuple[int, int]] = []
        self.gate: asyncio.Event | None = None
        self.failure: Exception | None = None

    async def _read(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.reads += ranges
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        await self._read([(start, -1 if end is None else end)])
        return await self.inner.get(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        await self._read(ranges)
        return await self.inner.get_ranges(key, ranges)

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        await self.inner.put(key, data)

    async def head(self, key: str) -> ObjectMeta | None:
        return await self.inner.head(key)

    def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        return self.inner.list(prefix, start_after)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


OpenObjects = Callable[[], "asynccontextmanager[ObjectStore]"]  # type: ignore[type-arg]


def opener(kind: str, folder: Path) -> OpenObjects:
    """Opens memory or local directory objects."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[ObjectStore]:
        if kind == "memory":
            yield MemoryObjects(ManualClock())
            return
        store = LocalObjects.open(folder / "objects", SystemClock(), Rand())
        yield store
        await store.aclose()

    return opened  # type: ignore[return-value]


on_memory_and_local = pytest.mark.parametrize("kind", ["memory", "local"])
