"""L1's rows in the metastore: read them, and commit the changes that `row_transitions` computes.

Invariant (optimistic commits): a commit expects the rows from which it was computed. If one has changed, the change is
computed again from the current rows.

Invariant (resolved outcomes): an unknown outcome is resolved by reading the rows, never guessed. Only one commit can
register an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.api import VersionedRow
from tidemill.metastore.lsm.version import prefix_end
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import L1_CLEANED, L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS, L1_TERMS, PARTITIONS
from tidemill.metastore.rows.l1 import L1CleanedRow, L1ExtentRow, L1ObjectRow, L1PartitionRow, L1TermRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.metastore.rows.row_family import Family
from tidemill.topics.l1 import row_transitions
from tidemill.topics.l1.row_transitions import AddRequest, ReadRows, ReplaceRequest

COMMIT_TRIES = 8
PAUSE_S = 0.05
TRIM_EXTENTS_MAX = 1_000
"""Limit of extents that one commit removes."""

R = TypeVar("R", bound=msgspec.Struct)


class PartitionRows(msgspec.Struct, frozen=True):
    """Rows of a partition: its L1 row, and its checkpoint row, which shows how far the checkpoint has come."""

    l1: L1PartitionRow | None
    checkpoint: PartitionRow | None


class ExtentStore:
    def __init__(self, metastore: Metastore, clock: Clock, rand: Rand) -> None:
        self._metastore = metastore
        self._clock = clock
        self._rand = rand

    # reading --------------------------------------------------------------------------------------

    async def partition(self, topic_id: str, partition: int, *, fresh: bool = True) -> L1PartitionRow | None:
        return await self._metastore.get(L1_PARTITIONS, topic_id, partition, fresh=fresh)

    async def partition_rows(self, topic_id: str, partitions: Sequence[int]) -> dict[int, PartitionRows]:
        """Return both rows of each of these partitions, read after one sync."""
        if not partitions:
            return {}
        # Read the checkpoint rows first: an L1 row that is read later is not behind them (RFC 0005, X1).
        copies = [PARTITIONS.key(topic_id, partition) for partition in partitions]
        keys = [L1_PARTITIONS.key(topic_id, partition) for partition in partitions]
        found = await self._metastore.get_rows([*copies, *keys])
        count = len(partitions)
        return {
            partition: PartitionRows(
                _decode_row(L1_PARTITIONS, keys[i], found[count + i]), _decode_row(PARTITIONS, copies[i], found[i])
            )
            for i, partition in enumerate(partitions)
        }

    async def hot_partitions(self) -> list[tuple[str, int]]:
        """List the partitions whose checkpoint row has batches that are not in L1."""
        rows = await self._metastore.rows(PARTITIONS, fresh=False)
        return [(row.topic_id, row.partition) for row in rows if row.next_offset > row.hot_start]

    async def extents(
        self, topic_id: str, partition: int, offset: int = 0, *, fresh: bool = True
    ) -> AsyncIterator[L1ExtentRow]:
        """Yield extents in order, from the one that holds `offset`, or the first one after it."""
        for _ in range(COMMIT_TRIES):
            begin = await self._at_or_below(topic_id, partition, offset, fresh=fresh)
            lower, upper = L1_EXTENTS.key(topic_id, partition, begin or 0), self._extents_end(topic_id, partition)
            first = begin
            async for keys, values in self._metastore.scan(lower, upper, fresh=False):
                for key, value in zip(keys, values, strict=True):
                    extent = L1_EXTENTS.decode(key, value)
                    if first is not None and extent.base_offset != first:
                        break  # It was replaced or deleted between the two reads.
                    first = None
                    if extent.last_offset >= offset:
                        yield extent
                if first is not None:
                    break
            if first is None:
                return
        raise UnavailableError(
            f"the extents of a partition change too often: partition={topic_id}/{partition}.", fix="Retry."
        )

    async def first_extents(
        self, topic_id: str, partition: int, offset: int, count: int, *, fresh: bool = True
    ) -> list[L1ExtentRow]:
        """Return the first `count` of `extents`."""
        found: list[L1ExtentRow] = []
        async for extent in self.extents(topic_id, partition, offset, fresh=fresh):
            found.append(extent)
            if len(found) == count:
                break
        return found

    async def extents_stamp(self, topic_id: str, partition: int, *, fresh: bool = True) -> object:
        """Return a stamp of the partition's extents.

        Equal stamps mean that no extent was added, deleted or replaced.
        """
        return await self._metastore.change_stamp(L1_EXTENTS.prefix(topic_id, partition), fresh=fresh)

    async def extent_for_time(self, topic_id: str, partition: int, timestamp_ms: int) -> L1ExtentRow | None:
        """Return the first extent with a record at or after `timestamp_ms`, or None.

        Bisects over `highest_timestamp_ms`, which may count extents that are deleted; the extents that follow are then
        scanned.
        """
        row = await self.partition(topic_id, partition)
        if row is None or row.highest_timestamp_ms < timestamp_ms:
            return None
        low, high, found = row.start, row.next, None
        while low < high:
            middle = await self._extent_covering(topic_id, partition, (low + high) // 2)
            if middle is None:
                low = (low + high) // 2 + 1  # Deleted during the search, as the oldest are.
            elif middle.highest_timestamp_ms >= timestamp_ms:
                found, high = middle, middle.base_offset
            else:
                low = middle.last_offset + 1
        if found is None:
            return None
        async for extent in self.extents(topic_id, partition, found.base_offset, fresh=False):
            if extent.max_timestamp_ms >= timestamp_ms:
                return extent
        return None

    async def newest_timestamp_ms(self, topic_id: str, partition: int, start: int) -> int | None:
        """Return the greatest timestamp of the extents from `start`, or None without extents.

        Takes a few reads while the extent with the greatest timestamp of all time still exists, otherwise reads all
        extents.
        """
        row = await self.partition(topic_id, partition)
        found = await self.extent_for_time(topic_id, partition, row.highest_timestamp_ms) if row is not None else None
        if found is not None and found.last_offset >= start:
            return found.max_timestamp_ms
        newest: int | None = None
        async for extent in self.extents(topic_id, partition, start, fresh=False):
            newest = extent.max_timestamp_ms if newest is None else max(newest, extent.max_timestamp_ms)
        return newest

    async def terms(self, topic_id: str, partition: int) -> list[L1TermRow]:
        return await self._metastore.rows(L1_TERMS, topic_id, partition)

    async def compaction_progress(self, topic_id: str, partition: int) -> tuple[L1CleanedRow, int]:
        """Return how far the partition has been compacted, and the seqno of that row (0: no row yet)."""
        key = L1_CLEANED.key(topic_id, partition)
        found = await self._metastore.get_row(key)
        if found is None or not found.value:
            return L1CleanedRow(topic_id, partition, 0), 0
        return L1_CLEANED.decode(key, found.value), found.seqno

    async def _extent_covering(self, topic_id: str, partition: int, offset: int) -> L1ExtentRow | None:
        async for extent in self.extents(topic_id, partition, offset, fresh=False):
            return extent if extent.base_offset <= offset else None
        return None

    def _extents_end(self, topic_id: str, partition: int) -> bytes | None:
        return prefix_end(L1_EXTENTS.prefix(topic_id, partition))

    async def _at_or_below(self, topic_id: str, partition: int, offset: int, *, fresh: bool) -> int | None:
        """Return the base offset of the last extent that begins at or below `offset`."""
        lower, upper = L1_EXTENTS.prefix(topic_id, partition), L1_EXTENTS.key(topic_id, partition, offset + 1)
        async for keys, _ in self._metastore.scan(lower, upper, reverse=True, fresh=fresh):
            for key in keys:
                return int(L1_EXTENTS.decode_key(key)[-1])
        return None

    # writing --------------------------------------------------------------------------------------

    async def register(self, topic_id: str, object_id: str) -> None:
        """Register an object that is about to be uploaded.

        Raises UnavailableError, UnknownOutcomeError: its id must then never be used.
        """
        await self._metastore.commit(
            [L1_OBJECTS.encode(row_transitions.new_object_row(topic_id, object_id, self._clock.now_ms()))]
        )

    async def add(self, request: AddRequest) -> dict[int, int]:
        """Commit a reference to an object that was registered and uploaded.

        Return the next offset of each of its partitions (`row_transitions.AddResult`).

        Raises InvalidError if its registration has expired, UnavailableError if the commit did not happen,
        UnknownOutcomeError if that cannot be determined yet.
        """
        partitions = sorted({region.partition for region in request.regions})
        doubtful: UnknownOutcomeError | None = None
        for _ in range(COMMIT_TRIES):
            held, expects = await self._read_rows(request.topic_id, partitions, [request.object_id])
            if doubtful is not None and row_transitions.was_added(held.objects.get(request.object_id)):
                return {partition: held.partitions[partition].next for partition in partitions}
            added = row_transitions.add_object(held, request, self._clock.now_ms())
            try:
                await self._metastore.commit(added.rows, expects=expects)
                return added.next
            except UnknownOutcomeError as unknown:
                doubtful = unknown
            except (ConflictError, FencedError):
                pass  # This attempt did not happen; the rows show the outcome of an earlier one.
            await self._pause_before_retry()
        raise doubtful or UnavailableError(
            f"the rows of a topic change too often: topic_id={request.topic_id}.", fix="Retry."
        )

    async def replace(self, request: ReplaceRequest) -> tuple[int, ...]:
        """Replace the extents that an object was built from by references to it.

        Return the partitions that were left out because their extents changed (`row_transitions.replace_extents`).
        Raises the errors of `add`.
        """
        spans: dict[int, tuple[int, int]] = {}
        for region in request.regions:
            first = spans.get(region.partition, (region.base_offset, 0))[0]
            spans[region.partition] = first, region.last_offset
        doubtful: UnknownOutcomeError | None = None
        for _ in range(COMMIT_TRIES):
            held, expects = await self._read_rows(request.topic_id, sorted(spans), [])
            # Read after the partition rows, which change with every extent: expecting them guards the extents.
            standing = {p: await self._extents_between(request.topic_id, p, *span) for p, span in spans.items()}
            names = {extent.object_id for extents in standing.values() for extent in extents}
            of, of_objects = await self._read_rows(request.topic_id, [], sorted({request.object_id, *names}))
            if doubtful is not None and row_transitions.was_added(of.objects.get(request.object_id)):
                return ()
            whole = ReadRows(held.partitions, {}, of.objects)
            replaced = row_transitions.replace_extents(whole, standing, request, self._clock.now_ms())
            try:
                await self._metastore.commit(replaced.rows, expects=expects | of_objects)
                return replaced.stale
            except UnknownOutcomeError as unknown:
                doubtful = unknown
            except (ConflictError, FencedError):
                pass  # This attempt did not happen; the rows show the outcome of an earlier one.
            await self._pause_before_retry()
        raise doubtful or UnavailableError(
            f"the rows of a topic change too often: topic_id={request.topic_id}.", fix="Retry."
        )

    async def _extents_between(self, topic_id: str, partition: int, first: int, last: int) -> list[L1ExtentRow]:
        """Return the extents with an offset in [first, last]."""
        found: list[L1ExtentRow] = []
        async for extent in self.extents(topic_id, partition, first):
            if extent.base_offset > last:
                break
            found.append(extent)
        return found

    async def set_start(self, topic_id: str, partition: int, start: int) -> None:
        """Set the start completely, in as many commits as necessary; see `row_transitions.set_start`. Idempotent.

        Raises UnavailableError, UnknownOutcomeError: call again.
        """
        tries = 0
        more = True
        while more:
            held, expects = await self._read_rows(topic_id, [partition], [])
            row = held.partitions.get(partition)
            if row is None:
                return
            # Read after the partition row, which changes with every extent: expecting it guards the extents.
            oldest = await self.first_extents(topic_id, partition, 0, TRIM_EXTENTS_MAX)
            names = sorted({extent.object_id for extent in oldest if extent.last_offset < start})
            charged, of_objects = await self._read_rows(topic_id, [], names)
            expects |= of_objects
            change = row_transitions.set_start(row, start, oldest, charged.objects, self._clock.now_ms())
            more = change.more
            if not change.rows:
                return
            try:
                await self._metastore.commit(change.rows, expects=expects)
                tries = 0
            except (ConflictError, FencedError) as refused:
                more, tries = True, tries + 1
                if tries >= COMMIT_TRIES:
                    raise UnavailableError(
                        f"the rows of a partition change too often: partition={topic_id}/{partition}.", fix="Retry."
                    ) from refused
                await self._pause_before_retry()

    async def set_compaction_progress(self, row: L1CleanedRow, seqno: int) -> None:
        """Write the row in place of the one read at `seqno`.

        Raises ConflictError if another one was written since, UnavailableError, UnknownOutcomeError.
        """
        await self._metastore.commit([L1_CLEANED.encode(row)], expects={L1_CLEANED.key_of(row): seqno})

    async def _read_rows(
        self, topic_id: str, partitions: Sequence[int], objects: Sequence[str]
    ) -> tuple[ReadRows, dict[bytes, int]]:
        """Read the rows that a change is computed from, and the seqnos to expect for them."""
        if not partitions and not objects:
            return ReadRows({}, {}, {}), {}
        keys = [L1_PARTITIONS.key(topic_id, partition) for partition in partitions]
        keys += [L1_OBJECTS.key(topic_id, name) for name in objects]
        found = await self._metastore.get_rows(keys)
        rows = [row if row is not None and row.value else None for row in found]
        expects = {key: row.seqno if row is not None else 0 for key, row in zip(keys, rows, strict=True)}
        known: dict[int, L1PartitionRow] = {}
        stored: dict[str, L1ObjectRow] = {}
        for key, row in zip(keys, rows, strict=True):
            if row is None:
                continue
            if key[0] == L1_PARTITIONS.tag:
                partition_row = L1_PARTITIONS.decode(key, row.value)
                known[partition_row.partition] = partition_row
            else:
                object_row = L1_OBJECTS.decode(key, row.value)
                stored[object_row.object_id] = object_row
        terms: dict[int, L1TermRow] = {}
        for partition in known:
            async for term_keys, values in self._metastore.prefix(
                L1_TERMS.prefix(topic_id, partition), reverse=True, fresh=False
            ):
                terms[partition] = L1_TERMS.decode(term_keys[0], values[0])
                break
        return ReadRows(known, terms, stored), expects

    async def _pause_before_retry(self) -> None:
        await asyncio.sleep(self._rand.uniform(PAUSE_S / 2, PAUSE_S * 1.5))


def _decode_row(family: Family[R], key: bytes, found: VersionedRow | None) -> R | None:
    return family.decode(key, found.value) if found is not None and found.value else None
