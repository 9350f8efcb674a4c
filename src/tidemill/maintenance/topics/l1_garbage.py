"""The job `topic-l1`: delete everything in L1 to which nothing refers any more (RFC 0005 §3).

    registered, never added     expired after registered_s: no add may refer to it from then on
    removed = total             collect_after_s after the row is in the bucket: the object, then its row
    below its log's start       the extents, once the checkpoint row has that start
    of a topic that is gone     collect_after_s after that is in the bucket: the rows of its partitions; its objects
                                count as removed
    in the bucket, without row  orphans_after_s after it was first seen: no add may refer to an unregistered object

- An object is deleted after the row that marks it as removed is in the newest manifest: a restore from it refers to
  nothing that is gone.
- Waits use the monotonic clock, and begin again when the row changes or another node takes over the job.
- Every commit expects the rows that it was computed from. An interrupted step is repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from tidemill.base.errors import ConflictError
from tidemill.maintenance.checkpoint.restore_horizon import RestoreHorizon
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.metastore.rows import L1_CLEANED, L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS, PARTITIONS, TOPICS
from tidemill.metastore.rows.l1 import PREFIX, L1ObjectRow, l1_key
from tidemill.topics.l1 import row_transitions
from tidemill.topics.l1.extent_store import ExtentStore

REGISTRATION_TIMEOUT_S = 3600.0
"""Time after which a registration expires. An upload and its add take seconds; a writer that was paused for longer
begins again."""
ROWS_PER_COMMIT = 1_000
LISTING_BATCH = 20_000


class L1GarbageCounters(msgspec.Struct):
    """Counters since this process started. `waiting` is what may not be deleted yet; `strange` counts
    objects that lost more than they held."""

    deleted_objects: int = 0
    deleted_bytes: int = 0
    expired: int = 0
    orphans: int = 0
    removed_topics: int = 0
    waiting: int = 0
    strange: int = 0


class L1GarbageCollector(MaintenanceJob):
    """The job `topic-l1`."""

    def __init__(self, context: JobContext, *, registered_s: float = REGISTRATION_TIMEOUT_S) -> None:
        self._g = context
        self._registered_s = registered_s
        self._persisted = RestoreHorizon(context.metastore)
        self._rows = ExtentStore(context.metastore, context.clock, context.rand)
        self._seen: dict[bytes, tuple[L1ObjectRow, float]] = {}
        """Rows that may be deleted → their contents, and since when they have them."""
        self._gone: dict[str, tuple[float, list[int]]] = {}
        """Topics without a row → since when, and what was not persisted then."""
        self._orphans: dict[str, float] = {}
        self._after = ""
        self._figures: L1GarbageCounters = L1GarbageCounters()

    async def run(self, budget: StepBudget) -> bool:
        """Check every row of L1 and one stretch of the objects. Return True while more may be deleted now."""
        topics = {row.topic_id for row in await self._g.metastore.rows(TOPICS)}
        of = await self._advance_starts()
        of |= {row.topic_id for row in await self._g.metastore.rows(L1_CLEANED)}
        seen: set[bytes] = set()
        strange = 0
        async for row in self._object_rows():
            of.add(row.topic_id)
            strange += row.removed_bytes > row.total_bytes
            if not row.registered or row_transitions.is_garbage(row):
                seen.add(await self._expire_or_delete(row))
        self._seen = {key: since for key, since in self._seen.items() if key in seen}
        more = await self._remove_deleted_topics(of - topics, budget)
        more = await self._sweep_orphans() or more
        self._figures.waiting, self._figures.strange = len(self._seen) + len(self._orphans), strange
        return more

    async def _advance_starts(self) -> set[str]:
        """Advance the starts of partitions in L1. Return the ids of the topics that have a partition in L1."""
        starts = {(row.topic_id, row.partition): row.log_start for row in await self._g.metastore.rows(PARTITIONS)}
        rows = await self._g.metastore.rows(L1_PARTITIONS)
        for row in rows:
            start = starts.get((row.topic_id, row.partition), 0)
            # The reconciler moves a start beyond the end, when it has records to add.
            if row.start < min(start, row.next):
                await self._rows.set_start(row.topic_id, row.partition, min(start, row.next))
        return {row.topic_id for row in rows}

    async def _object_rows(self) -> AsyncIterator[L1ObjectRow]:
        async for keys, values in self._g.metastore.prefix(L1_OBJECTS.prefix()):
            for key, value in zip(keys, values, strict=True):
                yield L1_OBJECTS.decode(key, value)

    async def _expire_or_delete(self, row: L1ObjectRow) -> bytes:
        key, now_s = L1_OBJECTS.key_of(row), self._g.clock.monotonic_s()
        known, since_s = self._seen.get(key, (None, now_s))
        if known != row:
            self._seen[key] = row, now_s
            since_s = now_s
        wait_s = self._g.retention.collect_after_s if row.registered else self._registered_s
        if now_s - since_s < wait_s:
            return key
        found = await self._g.metastore.get_row(key)
        if found is None or not found.value or L1_OBJECTS.decode(key, found.value) != row:
            return key
        if not row.registered:
            expired = row_transitions.expire_registration(row, self._g.clock.now_ms())
            if expired is not None and await self._commit_if_unchanged(
                [L1_OBJECTS.encode(expired)], {key: found.seqno}
            ):
                self._figures.expired += 1
        elif await self._persisted.is_row_persisted(key, found.seqno):
            await self._g.objects.delete(l1_key(row.topic_id, row.object_id))
            if await self._commit_if_unchanged([(key, b"")], {key: found.seqno}):
                self._figures.deleted_objects += 1
                self._figures.deleted_bytes += row.object_bytes
        return key

    async def _commit_if_unchanged(self, rows: list[tuple[bytes, bytes]], expects: dict[bytes, int]) -> bool:
        """Commit rows. Return False if a row changed; the next step sees it. Raises UnavailableError,
        UnknownOutcomeError, FencedError."""
        try:
            await self._g.metastore.commit(rows, expects=expects)
        except ConflictError:
            return False
        return True

    async def _remove_deleted_topics(self, gone: set[str], budget: StepBudget) -> bool:
        """Delete the rows of deleted topics. Return True while rows are left that may be deleted now."""
        now_s = self._g.clock.monotonic_s()
        self._gone = {topic_id: since for topic_id, since in self._gone.items() if topic_id in gone}
        more = False
        for topic_id in sorted(gone):
            if topic_id not in self._gone:
                self._gone[topic_id] = now_s, await self._persisted.committed_seqnos()
            since_s, horizon = self._gone[topic_id]
            if now_s - since_s < self._g.retention.collect_after_s or not await self._persisted.is_persisted_up_to(
                horizon
            ):
                continue
            if not budget.has_budget:
                return True
            more = await self._remove_topic_rows(topic_id) or more
        return more

    async def _remove_topic_rows(self, topic_id: str) -> bool:
        """Delete rows of a topic, partition rows before extents: extents without a partition are skipped, while a
        partition without extents would be a loss. Terms go before both, because nothing would find them alone."""
        for family in (L1_TERMS, L1_PARTITIONS, L1_CLEANED, L1_EXTENTS):
            async for keys, _ in self._g.metastore.prefix(family.prefix(topic_id)):
                await self._g.metastore.commit([(key, b"") for key in keys[:ROWS_PER_COMMIT]])
                return True
        at_ms = self._g.clock.now_ms()
        async for keys, values in self._g.metastore.prefix(L1_OBJECTS.prefix(topic_id)):
            rows = [L1_OBJECTS.decode(key, value) for key, value in zip(keys, values, strict=True)]
            live = [row for row in rows if row.registered and row.removed_bytes < row.total_bytes][:ROWS_PER_COMMIT]
            if live:
                removed = [msgspec.structs.replace(r, removed_bytes=r.total_bytes, updated_ms=at_ms) for r in live]
                await self._g.metastore.commit([L1_OBJECTS.encode(row) for row in removed])
                self._figures.removed_topics += 1
                return True
        return False

    async def _sweep_orphans(self) -> bool:
        """Process one stretch of the listing. Return True until its end is reached."""
        found: dict[str, int] = {}
        async for meta in self._g.objects.list(PREFIX, self._after):
            found[meta.key] = meta.size_bytes
            if len(found) >= LISTING_BATCH:
                break
        more = len(found) >= LISTING_BATCH
        self._after = max(found) if more else ""
        # Read after the listing: an object's row exists before the object does.
        registered = {l1_key(row.topic_id, row.object_id) async for row in self._object_rows()}
        now_s = self._g.clock.monotonic_s()
        for key in [key for key in self._orphans if key in registered]:
            del self._orphans[key]
        for key, size_bytes in found.items():
            if key in registered:
                continue
            if now_s - self._orphans.setdefault(key, now_s) >= self._g.retention.orphans_after_s:
                await self._g.objects.delete(key)
                del self._orphans[key]
                self._figures.orphans += 1
                self._figures.deleted_bytes += size_bytes
        return more
