"""Tidemill's engine as the metastore benchmark calls it: a database alone on a local directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.lsm.compaction.executor import open_executor
from tidemill.metastore.lsm.compaction.picker import pick_job
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.objects.local import LocalObjects

Rows = tuple[Sequence[bytes], Sequence[bytes]]
UUID = "00000000-0000-4000-8000-000000000003"
PREFIX = f"metastore/{UUID}/"


class Tidemill:
    epochs = 0
    """Each open is a new epoch of this process, as a new leader's would be."""

    def __init__(self) -> None:
        self._seqno = 0

    async def open(self, folder: Path, buffer_bytes: int, cache_bytes: int) -> None:
        clock, rand = SystemClock(), Rand()
        self.objects = LocalObjects.open(folder, clock, rand)
        Tidemill.epochs += 1
        files = SstFiles(self.objects, PREFIX)
        self._options = options = Options(write_buffer_bytes=buffer_bytes, cache_bytes=cache_bytes)
        self._merger = open_executor(self.objects, f"file://{folder}", options, clock)
        self.db = await Database.open(
            files,
            BucketManifests(self.objects, PREFIX, rand),
            DatabaseContext(
                domain_uuid=UUID,
                epoch=Tidemill.epochs,
                options=options,
                clock=clock,
                rand=rand,
                merger=self._merger,
            ),
        )
        self._seqno = self.db.max_applied_seqno

    @property
    def reads(self) -> int:
        """Requests for parts of files: what a bucket would bill."""
        return self.db.tables.reads

    async def put_batch(self, keys: list[bytes], values: list[bytes]) -> None:
        self._seqno += 1
        self.db.apply(self._seqno, keys, values)
        await self.db.background.stall.wait()

    async def put_each(self, keys: list[bytes], values: list[bytes]) -> None:
        apply, room, seqno = self.db.apply, self.db.background.stall.wait, self._seqno
        for key, value in zip(keys, values, strict=True):
            seqno += 1
            apply(seqno, (key,), (value,))
            await room()
        self._seqno = seqno

    async def get_each(self, keys: list[bytes]) -> list[bytes | None]:
        get = self.db.get
        return [await get(key) for key in keys]

    def peek_each(self, keys: list[bytes]) -> list[Any]:
        peek = self.db.peek
        return [peek(key) for key in keys]

    def scan(self) -> AsyncIterator[Rows]:
        return self.db.scan()

    async def walk(self) -> int:
        total = 0
        async for keys, values in self.db.scan():
            for _, value in zip(keys, values, strict=True):
                total += len(value)
        return total

    async def prefix(self, prefix: bytes) -> Rows:
        keys: list[bytes] = []
        values: list[bytes] = []
        async for chunk_keys, chunk_values in self.db.prefix(prefix):
            keys += chunk_keys
            values += chunk_values
        return keys, values

    async def flush(self) -> None:
        await self.db.flush()

    async def compact(self) -> None:
        await self.db.background.compact()

    async def settle(self) -> None:
        compactor = self.db.background.compactor
        while compactor.merging is not None or pick_job(self.db.version.levels, self._options, {}) is not None:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.db.aclose()
        await self._merger.aclose()
        await self.objects.aclose()

    def facts(self) -> dict[str, Any]:
        merged = self.db.background.compactor.stats
        flushed = self.db.background.flusher
        return {
            "levels": [len(level) for level in self.db.version.levels],
            "live_bytes": self.db.version.size_bytes,
            "flushes": flushed.flushes,
            "merges": merged.merges,
            "slowed": self.db.background.stall.slowed,
            "stopped": self.db.background.stall.stopped,
            "waited_s": round(self.db.background.stall.waited_s, 2),
            "written_bytes": flushed.file_bytes + merged.bytes_written,
        }
