"""Publisher of one table: holds, publications, expiry, and the deletion of what no listed snapshot names.

Invariant (held before chosen): the batches of a snapshot are read from a state after a hold of this period was set. It
lasts until every snapshot that was current in the period has been replaced for `keep_s`, and was dropped from the list.

Invariant (fenced sweep): the pointer moves between the choice of objects to delete and their deletion, so a publication
that was prepared before names none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

import msgspec
from msgspec.structs import replace

from tidemill.base.limits import OBJECT_CONCURRENCY
from tidemill.lake.format.manifests import decode_manifest
from tidemill.lake.format.metadata import Snapshot
from tidemill.lake.pointer import Pointer, move_pointer
from tidemill.lake.publish.publication import Contents, is_published, publish, publish_expiry
from tidemill.lake.publish.stored import LakeStores, Stored, load_stored, own_objects, read_manifests
from tidemill.lake.settings import PREFIX, LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.shards.api import HistoryLostError, written_ms
from tidemill.shards.handle import LogShard
from tidemill.shards.read.holds import OBJECTS_ONLY

ORPHAN_MS = 900_000
"""Age from which an object that no listed snapshot names is deleted. A shorter publication never loses one."""
PERIOD_MIN_MS = 60_000


def hold_period_ms(settings: LakeSettings) -> int:
    """Return the time between two holds of a table. Each outlasts its period by `keep_s` and another period."""
    return max(settings.keep_ms // 2, PERIOD_MIN_MS)


async def hold_objects(shard: LogShard, stores: LakeStores) -> None:
    """Hold the objects of the shard's state for snapshots that are current in this period.

    One write a period. Raises UnavailableError, UnknownOutcomeError.
    """
    now_ms, period_ms = stores.clock.now_ms(), hold_period_ms(stores.settings)
    period = now_ms // period_ms
    reader = f"{PREFIX}{period}"
    if any(hold.reader == reader and hold.is_live(now_ms) for hold in shard.state.holds):
        return
    ends_ms = (period + 2) * period_ms + stores.settings.keep_ms
    await shard.set_hold(reader, OBJECTS_ONLY, ends_ms - now_ms)


class SweepCounters(msgspec.Struct):
    deleted_objects: int = 0
    deleted_bytes: int = 0


class TablePublisher:
    """Publisher of the table of `shard`, whose state the caller refreshes. `stored` is None until something is loaded.

    Any number of processes may publish one table; one of those that race wins, the others raise ConflictError.
    """

    def __init__(self, stores: LakeStores, columns: PartColumns, shard: LogShard) -> None:
        self._stores = stores
        self._columns = columns
        self.shard = shard
        self.stored: Stored | None = None
        self.swept = SweepCounters()
        self._named: dict[int, frozenset[str]] = {}
        """Keys below `lake/` that a listed snapshot names, by its id."""

    async def load(self) -> Stored:
        """Return what is published, loaded at most once until a publication fails. Raises as `load_stored`."""
        if self.stored is None:
            shard = self.shard
            self.stored = await load_stored(self._stores, shard.shard_id, shard.name, shard.state.schema)
        return self.stored

    async def publish(self, time_ms: int, summary: Mapping[str, str] | None = None) -> Stored:
        """Publish the contents at `time_ms`: a snapshot, or a tag if nothing changed. Raises as `publication.publish`,
        and HistoryLostError unless since ≤ time_ms < upper."""
        stored = await self.load()
        await hold_objects(self.shard, self._stores)
        state = self.shard.state
        if not state.since <= time_ms < state.upper:
            raise HistoryLostError(
                f"the time cannot be published: table={state.name} time={time_ms} since={state.since}"
                f" upper={state.upper}."
            )
        contents = Contents(state.shard_id, state.name, state.schema, state.batches, time_ms, summary or {})
        return await self._store_publication(publish(self._stores, self._columns, stored, contents))

    async def differs(self, time_ms: int) -> bool:
        """Return whether the contents at `time_ms` may differ from the published ones. Raises as `load`."""
        state = self.shard.state
        stored = await self.load()
        contents = Contents(state.shard_id, state.name, state.schema, state.batches, time_ms, {})
        return not is_published(stored, contents)

    async def hold_published(self) -> None:
        """Hold what is published for the present period. Raises as `hold_objects`."""
        await hold_objects(self.shard, self._stores)

    async def expire(self) -> None:
        """Drop snapshots that a table without publications should not list any more. Raises as `publish`."""
        overdue_ms = self._stores.settings.keep_ms // 4
        stored = await self.load()
        await self._store_publication(publish_expiry(self._stores, stored, self.shard.shard_id, overdue_ms))

    async def _store_publication(self, publication: Awaitable[Stored]) -> Stored:
        try:
            self.stored = found = await publication
        except BaseException:
            self.stored = None  # the next call reads what happened
            raise
        current = found.metadata.current
        if current is not None and current.snapshot_id not in self._named and found.evaluation is not None:
            named = own_objects(self._stores, found.data + found.deletes)
            self._named[current.snapshot_id] = frozenset({*named, self._stores.key_of(current.manifest_list)})
        return found

    # deletion ---------------------------------------------------------------------------------------
    async def sweep(self) -> int:
        """Delete objects that no listed snapshot names; return their number. Raises as `publish`."""
        stored, stores = await self.load(), self._stores
        prefix = f"{PREFIX}{self.shard.shard_id}/"
        found = [meta async for meta in stores.objects.list(prefix)]
        named = await self._named_objects(stored)
        limit_ms = stores.clock.now_ms() - ORPHAN_MS
        gone = [meta for meta in found if meta.key not in named and 0 <= written_ms(meta.key) < limit_ms]
        if not gone or not stored.seq:
            return 0
        pointer = replace(stored.pointer, swept_ms=max(limit_ms, stored.pointer.swept_ms))
        await self._store_publication(self._fence(stored, pointer))
        await _delete(stores, [meta.key for meta in gone])
        self.swept.deleted_objects += len(gone)
        self.swept.deleted_bytes += sum(meta.size_bytes for meta in gone)
        return len(gone)

    async def _fence(self, stored: Stored, pointer: Pointer) -> Stored:
        stores = self._stores
        seq = await move_pointer(stores.consensus, stores.rand, self.shard.shard_id, stored.seq, pointer)
        return replace(stored, seq=seq, pointer=pointer)

    async def _named_objects(self, stored: Stored) -> set[str]:
        snapshots = stored.metadata.snapshots
        self._named = {s.snapshot_id: self._named[s.snapshot_id] for s in snapshots if s.snapshot_id in self._named}
        for snapshot in snapshots:
            if snapshot.snapshot_id not in self._named:
                self._named[snapshot.snapshot_id] = await self._read_named(snapshot)
        logged = {self._stores.key_of(entry.metadata_file) for entry in stored.metadata.metadata_log}
        return logged.union({stored.pointer.metadata}, *self._named.values())

    async def _read_named(self, snapshot: Snapshot) -> frozenset[str]:
        stores = self._stores
        manifests = await read_manifests(stores, snapshot)
        named = {stores.key_of(snapshot.manifest_list), *(stores.key_of(manifest.path) for manifest in manifests)}
        for manifest in manifests:
            data = await stores.objects.get(stores.key_of(manifest.path))
            named |= {stores.key_of(entry.file.path) for entry in decode_manifest(data, manifest)}
        return frozenset(named)


async def delete_dropped(stores: LakeStores, shard_id: str, pointer: Pointer, seq: int) -> int:
    """Mark the pointer of a dropped table and delete its objects; return their number.

    Parts are deleted by maintenance. While the marked pointer has metadata, objects may remain. Repeat after any error.
    Raises ConflictError, UnavailableError, UnknownOutcomeError.
    """
    if not pointer.dropped:
        pointer = replace(pointer, dropped=True)
        seq = await move_pointer(stores.consensus, stores.rand, shard_id, seq, pointer)
    keys = [meta.key async for meta in stores.objects.list(f"{PREFIX}{shard_id}/")]
    await _delete(stores, keys)
    await move_pointer(stores.consensus, stores.rand, shard_id, seq, Pointer(pointer.name, dropped=True))
    return len(keys)


async def delete_unknown(stores: LakeStores, known: frozenset[str]) -> int:
    """Delete old objects of tables other than `known`, by their ids; return their number.

    An id is never used again, and a table is known before it is published. Raises UnavailableError,
    UnknownOutcomeError.
    """
    limit_ms = stores.clock.now_ms() - ORPHAN_MS
    keys = [
        meta.key
        async for meta in stores.objects.list(PREFIX)
        if meta.key.split("/")[1] not in known and 0 <= written_ms(meta.key) < limit_ms
    ]
    await _delete(stores, keys)
    return len(keys)


async def _delete(stores: LakeStores, keys: list[str]) -> None:
    slots = asyncio.Semaphore(OBJECT_CONCURRENCY)

    async def delete(key: str) -> None:
        async with slots:
            await stores.objects.delete(key)

    await asyncio.gather(*(delete(key) for key in keys))
