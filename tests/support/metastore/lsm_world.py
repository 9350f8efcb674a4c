"""A database on a store whose puts and reads a test may count, hold back and fail; and what it should hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest import Manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.scan import Scan
from tidemill.objects.local import LocalObjects
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

T = TypeVar("T")
UUID = "6f1f8a0e-0000-4000-8000-000000000001"
PREFIX = f"metastore/{UUID}/"
ANY_EPOCH = 10**9

SMALL = Options(
    write_buffer_bytes=1 << 20,
    block_bytes=128,
    file_bytes=1_000,
    cache_bytes=1 << 20,
    l0_compact=4,
    l0_slow=8,
    l0_stop=12,
    level_base_bytes=4_000,
    level_factor=4,
    slice_rows=10,
    gc_delay_ms=0,
)
"""Many files and blocks from few rows."""

Step = Callable[[str], Awaitable[None]]


class Watched:
    """A store that lists what it is asked. `before_put` and `after_put` may wait or raise."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.puts: list[str] = []
        self.reads: list[str] = []
        self.ranges: list[tuple[int, int]] = []
        self.before_put: Step | None = None
        self.after_put: Step | None = None
        self.before_read: Step | None = None

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        self.puts.append(key)
        if self.before_put is not None:
            await self.before_put(key)
        await self.inner.put(key, data)
        if self.after_put is not None:
            await self.after_put(key)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.reads.append(key)
        self.ranges.append((start, -1 if end is None else end))
        if self.before_read is not None:
            await self.before_read(key)
        return await self.inner.get(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads += [key] * len(ranges)
        self.ranges += ranges
        if self.before_read is not None:
            await self.before_read(key)
        return await self.inner.get_ranges(key, ranges)

    async def head(self, key: str) -> ObjectMeta | None:
        return await self.inner.head(key)

    def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        return self.inner.list(prefix, start_after)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


class Gate:
    """Holds calls whose key contains `part` until `open` is set."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.waiting = 0
        self.open = asyncio.Event()

    async def __call__(self, key: str) -> None:
        if self.part in key and not self.open.is_set():
            self.waiting += 1
            await self.open.wait()


def failing(part: str, error: Exception, times: int = 1) -> Step:
    """The first `times` calls whose key contains `part` raise."""
    left = times

    async def step(key: str) -> None:
        nonlocal left
        if part in key and left:
            left -= 1
            raise error

    return step


class World:
    """One bucket, the databases opened on it, and every batch applied through `put`."""

    def __init__(self, objects: ObjectStore, options: Options = SMALL) -> None:
        self.objects = Watched(objects)
        self.options = options
        self.clock = SystemClock()
        self.rand = Rand(7)
        self.files = SstFiles(self.objects, PREFIX)
        self.manifests = BucketManifests(self.objects, PREFIX, self.rand)
        self.epoch = 0
        self.seqno = 0
        self.rows: dict[bytes, bytes] = {}
        """The contents of a database that saw every batch, live rows only."""

    async def open(self, *, background: bool = False, options: Options | None = None, **more: Any) -> Database:
        """Open a writable database of the next epoch, or by `more` a reader of all epochs."""
        reader = more.get("read_only") or more.get("follower")
        if not reader:
            self.epoch += 1
        return await Database.open(
            self.files,
            self.manifests,
            DatabaseContext(
                domain_uuid=UUID,
                epoch=ANY_EPOCH if reader else self.epoch,
                options=options or self.options,
                clock=self.clock,
                rand=self.rand,
                background=background,
                **more,
            ),
        )

    def put(self, database: Database, rows: dict[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> int:
        """Apply one batch at the next seqno, and note what it means."""
        pairs = list(rows.items()) if isinstance(rows, dict) else list(rows)
        self.seqno += 1
        database.apply(self.seqno, [key for key, _ in pairs], [value for _, value in pairs])
        for key, value in pairs:
            if value:
                self.rows[key] = value
            else:
                self.rows.pop(key, None)
        return self.seqno

    async def newest_manifest(self) -> Manifest | None:
        return await self.manifests.read(10**9)

    async def sst_keys(self) -> list[str]:
        return [meta.key async for meta in self.objects.list(PREFIX + "sst/")]


async def collect(scan: Scan) -> list[tuple[bytes, bytes]]:
    """All rows of a scan; checks that no chunk is empty or ragged."""
    rows: list[tuple[bytes, bytes]] = []
    async for keys, values in scan:
        assert keys and len(keys) == len(values)
        rows += zip(keys, values, strict=True)
    return rows


def expected(
    rows: dict[bytes, bytes], lower: bytes = b"", upper: bytes | None = None, *, reverse: bool = False
) -> list[tuple[bytes, bytes]]:
    return sorted(
        ((key, value) for key, value in rows.items() if lower <= key and (upper is None or key < upper)),
        reverse=reverse,
    )


def numbered(numbers: Iterable[int], tag: str = "v") -> dict[bytes, bytes]:
    return {b"row/%06d" % number: f"{tag}{number}".encode() for number in numbers}


@pytest.fixture(params=["memory", "local"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """The two kinds of store that need nothing but this machine."""
    if request.param == "memory":
        return MemoryObjects(SystemClock())
    return LocalObjects.open(str(tmp_path / "bucket"), SystemClock(), Rand(1))
