"""A database in a separate process that kills itself at a named step: `OBJECTS EPOCH STEP TIMES`.

Writes batches that only their seqno determines, and prints each seqno once it is flushed. Flushes, merges,
manifests and collections happen all the time. At the TIMES-th time that STEP is reached it dies by SIGKILL;
STEP "never" leaves that to the parent.

    before/after-flush-put      the file of a flush
    before/after-merge-put      the file of a merge
    mid-merge                   a read of a merge's input
    before/after-manifest-put   a manifest, of a flush or a merge
    before/after-merge-edit     the commit of a merge: its files durable; its manifest written and the version swapped
    before/after-flush-edit     the commit of a flush
    before/after-delete-manifest, before/after-delete-file, mid-gc (a listing)
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.lsm.version import Edit
from tidemill.objects.local import LocalObjects
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore

UUID = "00000000-0000-4000-8000-00000000dead"
PREFIX = f"metastore/{UUID}/"
STEPS = (
    "before-flush-put",
    "after-flush-put",
    "before-merge-put",
    "after-merge-put",
    "mid-merge",
    "before-manifest-put",
    "after-manifest-put",
    "before-merge-edit",
    "after-merge-edit",
    "before-flush-edit",
    "after-flush-edit",
    "before-delete-manifest",
    "after-delete-manifest",
    "before-delete-file",
    "after-delete-file",
    "mid-gc",
)
OPTIONS = Options(
    write_buffer_bytes=4_000,
    block_bytes=200,
    file_bytes=2_000,
    cache_bytes=20_000,
    l0_compact=2,
    l0_slow=4,
    l0_stop=6,
    level_base_bytes=6_000,
    level_factor=3,
    slice_rows=10,
    gc_delay_ms=0,
    manifests_kept=1,
)
KEYS = 300


def batch(seqno: int) -> list[tuple[bytes, bytes]]:
    """Return the rows of batch `seqno`: a few, some of them tombstones."""
    source = random.Random(seqno)
    rows = {b"row/%03d" % source.randrange(KEYS): source.randbytes(source.randrange(40)) for _ in range(8)}
    return sorted(rows.items())


def state_at(seqno: int) -> dict[bytes, bytes]:
    """The live rows after all batches up to `seqno`."""
    rows: dict[bytes, bytes] = {}
    for at in range(1, seqno + 1):
        rows.update(batch(at))
    return {key: value for key, value in rows.items() if value}


class Fate:
    def __init__(self, step: str, times: int) -> None:
        self._step = step
        self._left = times

    def reached(self, step: str) -> None:
        if step == self._step:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """A store whose calls are steps. `who` is "flush" or "merge": whose files its puts are."""

    def __init__(self, inner: ObjectStore, who: str, fate: Fate) -> None:
        self._inner = inner
        self._who = who
        self._fate = fate

    async def put(self, key: str, data: Buffer | Sequence[Buffer]) -> None:
        what = "manifest" if "/manifest/" in key else self._who
        self._fate.reached(f"before-{what}-put")
        await self._inner.put(key, data)
        self._fate.reached(f"after-{what}-put")

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._fate.reached(f"mid-{self._who}")
        return await self._inner.get(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return await self._inner.get_ranges(key, ranges)

    async def head(self, key: str) -> ObjectMeta | None:
        return await self._inner.head(key)

    async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
        if "/sst/" in prefix:
            self._fate.reached("mid-gc")
        async for found in self._inner.list(prefix, start_after):
            yield found

    async def delete(self, key: str) -> None:
        what = "manifest" if "/manifest/" in key else "file"
        self._fate.reached(f"before-delete-{what}")
        await self._inner.delete(key)
        self._fate.reached(f"after-delete-{what}")

    async def aclose(self) -> None:
        await self._inner.aclose()


def watch_edits(database: Database, fate: Fate) -> None:
    commit = database.versions.commit

    async def watched(edit: Edit, installed: Callable[[], None]) -> None:
        what = "merge" if edit.removed else "flush"
        fate.reached(f"before-{what}-edit")
        await commit(edit, installed)
        fate.reached(f"after-{what}-edit")

    database.versions.commit = watched  # type: ignore[method-assign]


async def main(path: str, epoch: int, step: str, times: int) -> None:
    clock, rand, fate = SystemClock(), Rand(), Fate(step, times)
    objects = LocalObjects.open(path, clock, rand)
    store = Deadly(objects, "flush", fate)
    database = await Database.open(
        SstFiles(store, PREFIX),
        BucketManifests(store, PREFIX, rand),
        DatabaseContext(
            domain_uuid=UUID,
            epoch=epoch,
            options=OPTIONS,
            clock=clock,
            rand=rand,
            merger=InlineExecutor(Deadly(objects, "merge", fate), OPTIONS, clock),
        ),
    )
    watch_edits(database, fate)

    async def write() -> None:
        seqno = database.max_persisted_seqno
        while True:
            await database.background.stall.wait()
            seqno += 1
            rows = batch(seqno)
            database.apply(seqno, [key for key, _ in rows], [value for _, value in rows])
            if seqno % 7 == 0:
                print(f"acked {await database.flush()}", flush=True)
            await asyncio.sleep(0)

    async def collect() -> None:
        while True:
            await database.background.collect_garbage()
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(collect())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
