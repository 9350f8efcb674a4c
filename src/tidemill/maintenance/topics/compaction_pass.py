"""One compaction pass over a partition: it builds a map of the keys that are new since the last pass, rewrites every
extent below the map's end without superseded records, and finally stores how far the partition is clean.

    start          cleaned            end               next
    |--- clean ----|----- dirty -----|- not yet: last batch, too young, unread, no room in the map -|

- Extents may be rewritten in any order, or never: every removed record has a newer record of its key that stays.
- `cleaned` moves only when all of them are rewritten: only then is a tombstone below it the only record of its key.
- The last batch of L1 stays, so that a consumer that reads to the end arrives there.
- An extent is replaced only if it is unchanged since it was read (`row_transitions.replace_extents`). Only the pass
  that read `cleaned` may move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.maintenance.scheduler import JobContext, StepBudget
from tidemill.metastore.rows.l1 import L1CleanedRow, L1ExtentRow, l1_key
from tidemill.topics.api import BatchRef
from tidemill.topics.compaction.clean import CompactedBatches, PassRules, collect_keys, compact_batches
from tidemill.topics.compaction.keymap import KeyHash, KeyMap
from tidemill.topics.l1.builder import ObjectBuilder
from tidemill.topics.l1.format import RegionIndex, object_id
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.l1.row_transitions import ReplaceRequest
from tidemill.topics.partition.state_machine.transactions import AbortedIndex

SLICE_BYTES = 8 << 20
SLICE_RECORDS = 1 << 16
"""Number of records in a slice: the map's size is checked between slices."""

UNCHANGED_SHARE = 8
"""Limit for unchanged extents. An extent without removals is copied together with others only if it is at most this
part of an object."""

TOMBSTONE_ENTRIES_MAX = 16
"""Number of tombstone entries in a cleaned row. Beyond it the oldest two are merged, with the age of the younger."""

REPLACE_ATTEMPTS = 8


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of a pass. `cleaned`, as of `seqno`, is how far the partition is clean. The pass does not touch batches
    that reach beyond `below`, nor the first batch with a record later than `younger_ms` and those after it. It
    removes tombstones below `delete_below`. No reader reads replaced extents below `settled` any more.
    `markers_below`: see clean.Pass."""

    cleaned: L1CleanedRow
    seqno: int
    below: int
    younger_ms: int | None
    delete_below: int
    settled: int
    aborted: AbortedIndex
    markers_below: int = 0


class CompactionPass:
    """Pass over one partition. Call `step` until it returns False."""

    def __init__(
        self, context: JobContext, reader: L1Reader, bounds: Bounds, *, room: int, target_bytes: int,
        captured: bool = False,
    ) -> None:  # fmt: skip
        """Initialise. `room` is the number of keys in the map, `target_bytes` the size of an object, which is held
        while it is built. `captured` is set for the topic of a captured table (clean.Pass)."""
        self._captured = captured
        self._g = context
        self._reader = reader
        self._rows = reader.rows
        self._bounds = bounds
        self._target_bytes = target_bytes
        self.topic_id, self.partition = bounds.cleaned.topic_id, bounds.cleaned.partition
        self._keys = KeyMap(room)
        self._hash = KeyHash(context.rand.nonce().encode())
        self._end: int | None = None
        """End of the map, once it is built."""
        self._at = bounds.cleaned.cleaned
        self._tombstones = 0
        self._tries = 0
        self.moved = False
        """Set when the pass ended with a change."""
        self.written_bytes = 0
        self.removed_bytes = 0

    async def step(self, budget: StepBudget) -> bool:
        """Do one step. Return True while work is left. Raises CorruptError, UnavailableError, UnknownOutcomeError;
        ConflictError when another pass took over."""
        while True:
            if self._end is None:
                await self._extend_key_map(budget)
            elif self._at < self._clean_to:
                await self._rewrite_next_object(budget)
            else:
                await self._store_progress(self._end)
                return False
            if not budget.has_budget:
                return True

    @property
    def _clean_to(self) -> int:
        """End of the rewriting. Without new records only tombstones are removed."""
        assert self._end is not None
        return self._end if self._end > self._bounds.cleaned.cleaned else self._bounds.delete_below

    # the map --------------------------------------------------------------------------------------

    async def _extend_key_map(self, budget: StepBudget) -> None:
        """Add one more extent to the map, or as much of it as there is room for."""
        async for extent in self._rows.extents(self.topic_id, self.partition, self._at):
            index = await self._reader.index(extent)
            refs = await self._g.cpu(partial(_batch_refs, extent, index, self._at, self._bounds.aborted))
            allowed = self._cleanable_count(refs)
            done = 0
            while done < allowed and not self._keys.is_full:
                some = refs[done : _slice_end(refs, done, allowed)]
                data = memoryview(await self._reader.data(extent, _byte_range(extent, some)))
                await self._g.cpu(partial(_collect_keys, some, data, self._hash, self._keys, self._captured))
                budget.spend(len(data))
                done += len(some)
            if done == len(refs):
                self._at = extent.last_offset + 1
                return
            self._at = max(self._at, refs[done].base_offset)
            break
        self._end, self._at = self._at, 0

    def _cleanable_count(self, refs: Sequence[BatchRef]) -> int:
        """Return how many of these batches may be cleaned."""
        for count, ref in enumerate(refs):
            young = self._bounds.younger_ms is not None and ref.max_timestamp_ms > self._bounds.younger_ms
            if young or ref.base_offset + ref.record_count > self._bounds.below:
                return count
        return len(refs)

    # rewriting ------------------------------------------------------------------------------------

    async def _rewrite_next_object(self, budget: StepBudget) -> None:
        """Write one more object from neighbouring extents. Extents without removals are skipped."""
        row = await self._rows.partition(self.topic_id, self.partition)
        if row is None:
            raise UnavailableError(f"the partition is no longer in L1: partition={self.topic_id}/{self.partition}.")
        build, old = ObjectBuilder(self.topic_id), list[L1ExtentRow]()
        tombstones = 0
        async for extent in self._rows.extents(self.topic_id, self.partition, self._at):
            full = bool(old) and build.size_bytes + extent.size_bytes > self._target_bytes
            if full or extent.base_offset >= self._clean_to:
                break
            found = await self._clean_extent(extent)
            budget.spend(2 * extent.size_bytes)
            if not found.changed and not old:
                self._tombstones += found.tombstones
                self._at = extent.last_offset + 1
                if budget.has_budget:
                    continue
                return
            if not found.changed and extent.size_bytes > self._target_bytes // UNCHANGED_SHARE:
                break
            if not old:
                build.begin_range(self.partition, extent.base_offset)
            for batch in found.batches:
                build.add(batch.data, batch.base_offset, batch.next_offset, batch.max_timestamp_ms)
            old.append(extent)
            tombstones += found.tombstones
            if not budget.has_budget:
                break
        if not old:
            self._at = self._clean_to
            return
        build.end(old[-1].last_offset + 1)
        if await self._replace_extents(build, row.compaction_epoch):
            self._at = old[-1].last_offset + 1
            self._tombstones += tombstones
            self.written_bytes += build.size_bytes
            self.removed_bytes += sum(extent.size_bytes for extent in old) - build.size_bytes

    async def _clean_extent(self, extent: L1ExtentRow) -> CompactedBatches:
        index, data = await self._reader.index(extent), await self._reader.data(extent)
        entries = self._bounds.cleaned.tombstones
        counted_from = entries[-1][0] if entries else 0
        rules = PassRules(
            self._keys, self._hash, self._clean_to, self._bounds.delete_below, counted_from, self._captured,
            self._bounds.markers_below,
        )  # fmt: skip
        return await self._g.cpu(partial(_clean_batches, extent, index, memoryview(data), self._bounds.aborted, rules))

    async def _replace_extents(self, build: ObjectBuilder, epoch: int) -> bool:
        """Replace the extents. Return False if they have changed since they were read; they are then read again."""
        parts, footer = build.finish()
        name = object_id(self._g.clock.now_ms(), self._g.rand.nonce())
        await self._rows.register(self.topic_id, name)
        await self._g.objects.put(l1_key(self.topic_id, name), parts)
        size = sum(len(part) for part in parts)
        try:
            await self._rows.replace(ReplaceRequest(self.topic_id, name, size, footer.regions, {self.partition: epoch}))
        except InvalidError as stale:
            self._tries += 1
            if self._tries >= REPLACE_ATTEMPTS:
                raise UnavailableError(
                    f"the extents of a partition keep changing: partition={self.topic_id}/{self.partition}.",
                    fix="Retry.",
                ) from stale
            return False
        self._tries = 0
        return True

    async def _store_progress(self, end: int) -> None:
        before = self._bounds.cleaned
        entries = [each for each in before.tombstones if each[0] > self._bounds.delete_below]
        if end > before.cleaned and self._tombstones:
            entries.append((end, self._g.clock.now_ms(), self._tombstones))
        if len(entries) > TOMBSTONE_ENTRIES_MAX:
            (_, _, one), (below, at_ms, other) = entries[:2]
            entries[:2] = [(below, at_ms, one + other)]
        settled = max(before.settled, self._bounds.settled)
        row = L1CleanedRow(self.topic_id, self.partition, max(end, before.cleaned), tuple(entries), settled)
        if row != before:
            await self._rows.set_compaction_progress(row, self._bounds.seqno)
            self.moved = True


def _batch_refs(extent: L1ExtentRow, index: RegionIndex, start: int, aborted: AbortedIndex) -> list[BatchRef]:
    """Return the batches of an extent from `start` on."""
    return [
        aborted.with_aborted(index.ref(at, extent.object_key, extent.first_byte))
        for at in range(index.find(start), len(index))
    ]


def _slice_end(refs: Sequence[BatchRef], first: int, end: int) -> int:
    size = records = 0
    for at in range(first, end):
        size, records = size + refs[at].size_bytes, records + refs[at].record_count
        if size >= SLICE_BYTES or records >= SLICE_RECORDS:
            return at + 1
    return end


def _byte_range(extent: L1ExtentRow, refs: Sequence[BatchRef]) -> tuple[int, int]:
    """Return the byte range of the batches within the extent."""
    last = refs[-1]
    return refs[0].first_byte - extent.first_byte, last.first_byte + last.size_bytes - extent.first_byte


def _collect_keys(refs: Sequence[BatchRef], data: memoryview, key_hash: KeyHash, keys: KeyMap, captured: bool) -> None:
    begin = refs[0].first_byte
    views = [data[ref.first_byte - begin : ref.first_byte - begin + ref.size_bytes] for ref in refs]
    collect_keys(list(zip(refs, views, strict=True)), key_hash, keys, captured=captured)


def _clean_batches(
    extent: L1ExtentRow, index: RegionIndex, data: memoryview, aborted: AbortedIndex, rules: PassRules
) -> CompactedBatches:
    refs = _batch_refs(extent, index, 0, aborted)
    begin = extent.first_byte
    views = [data[ref.first_byte - begin : ref.first_byte - begin + ref.size_bytes] for ref in refs]
    return compact_batches(list(zip(refs, views, strict=True)), rules)
