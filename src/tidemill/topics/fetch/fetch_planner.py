"""Answer fetches from led partitions: choose batches from the state in one plain call, or from L1's rows, then read
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.base.errors import CorruptError, TidemillError, UnavailableError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.metastore.rows.l1 import PREFIX as L1_PREFIX
from tidemill.topics.api import BatchRef, Fetched, FetchRead, OffsetOutOfRangeError
from tidemill.topics.batch.columns_trailer import without_trailer
from tidemill.topics.batch_reads import RangeReader, read_batches, select_batches
from tidemill.topics.l0.object_cache import ObjectCache
from tidemill.topics.l1.reader import L1Reader
from tidemill.topics.partition.leader import PartitionLeader

LeaderOrError = PartitionLeader | TidemillError
FetchPlan = list[BatchRef] | TidemillError


BATCHES_MAX = 4_096
"""Limit of batches per answer: a topic of tiny batches would fill 16 MiB with a quarter of a million of them."""

COLD_OBJECTS_MAX = 64
"""Limit of L0 objects that one answer reads from the store: waiting for thousands would time the client out."""


class CachedRanges(Protocol):
    """Source of L0 ranges that are cached or being read."""

    def has_range(self, key: str, begin: int, end: int) -> bool: ...


class _ColdReadLimit:
    """Limits how much of one answer waits for the store."""

    def __init__(self, cache: ObjectCache, shared: CachedRanges) -> None:
        self._cache = cache
        self._shared = shared
        self._keys: set[str] = set()

    def limit_refs(self, refs: list[BatchRef]) -> list[BatchRef]:
        """Return the longest prefix of `refs` within the limit."""
        for index, ref in enumerate(refs):
            key, begin = ref.object_key, ref.first_byte
            if key in self._keys or self._cache.get(key) or self._shared.has_range(key, begin, begin + ref.size_bytes):
                continue
            if len(self._keys) == COLD_OBJECTS_MAX:
                return refs[:index]
            self._keys.add(key)
        return refs


async def plan_fetch(
    reads: Sequence[FetchRead],
    led: Sequence[LeaderOrError],
    max_bytes: int,
    pace: CoopBudget,
    l1: L1Reader | None,
    cache: ObjectCache,
    shared: CachedRanges,
) -> tuple[list[FetchPlan], int, bool]:
    """Return (batches or error for each read, bytes in total, whether to answer immediately).

    Includes at least one batch if there is any. Waiting for more bytes is useless if a read failed, or if there are
    more batches than an answer may have: a limit that excludes them now would exclude them later.
    """
    cold = _ColdReadLimit(cache, shared)
    plans: list[FetchPlan] = []
    total = 0
    left = BATCHES_MAX
    at_once = False
    if l1 is not None:
        await l1.warm_indexes(
            [(r.topic_id, r.partition, r.offset) for r, each in zip(reads, led, strict=True) if _is_in_l1(each, r)]
        )
    for read, each in zip(reads, led, strict=True):
        if isinstance(each, PartitionLeader) and each.is_at_end(read.offset):
            plans.append([])
            if pace.is_used_up:
                await pace.wait_for_turn()
            continue
        try:
            if not isinstance(each, PartitionLeader):
                raise each
            room = max_bytes - total
            refs, size = await _choose_from_l1(each, read, room, left, l1, at_least_one=total == 0)
            if size < 0:
                refs, size = _choose_hot(each, read, room, left, at_least_one=total == 0)
                within = cold.limit_refs(refs)
                if within is not refs:
                    refs, size = within, sum(ref.size_bytes for ref in within)
        except TidemillError as error:
            plans.append(error)
            at_once = True
        else:
            plans.append(refs)
            total += size
            left -= len(refs)
            at_once = at_once or (total > 0 and _has_more(each, read, refs))
        if pace.is_used_up:
            await pace.wait_for_turn()
    return plans, total, at_once


def _has_more(led: PartitionLeader, read: FetchRead, refs: list[BatchRef]) -> bool:
    """Return whether there is more for the reader after the planned batches."""
    offset = refs[-1].base_offset + refs[-1].record_count if refs else read.offset
    return offset < (led.state.last_stable if read.committed else led.state.high_watermark)


def _is_in_l1(led: LeaderOrError, read: FetchRead) -> bool:
    return isinstance(led, PartitionLeader) and led.state.log_start <= read.offset < led.state.reconciled


async def _choose_from_l1(
    led: PartitionLeader, read: FetchRead, max_bytes: int, max_count: int, l1: L1Reader | None, *, at_least_one: bool
) -> tuple[list[BatchRef], int]:
    """Choose batches of L1; return them and their bytes.

    Returns ([], −1) if the offset is in the hot state, or nothing is left below the hot state when this returns. Raises
    the errors of `_choose_hot`; CorruptError, UnavailableError.
    """
    state, offset, most = led.state, read.offset, min(read.max_bytes, max_bytes)
    while led.closed_error is None and state.log_start <= offset < state.reconciled:
        if l1 is None:
            raise UnavailableError(f"this process cannot read L1: partition={led.topic_id}/{led.partition}.")
        end = state.reconciled
        try:
            refs = await l1.plan(
                led.topic_id, led.partition, offset, end,
                max_bytes=most, max_count=max_count, at_least_one=at_least_one,
            )  # fmt: skip
        except CorruptError as error:
            raise await _read_error_at(led, offset, error) from error
        if refs or not at_least_one:
            return refs, sum(ref.size_bytes for ref in refs)
        offset = end  # More may have moved to L1 during the read.
    return [], -1


def _choose_hot(
    led: PartitionLeader, read: FetchRead, max_bytes: int, max_count: int, *, at_least_one: bool
) -> tuple[list[BatchRef], int]:
    """Choose batches of the hot state; return them and their bytes.

    Raises OffsetOutOfRangeError, or the error that closed the partition: a closed partition wakes no watcher any more.
    """
    if led.closed_error is not None:
        raise led.closed_error
    state = led.state
    state.check_range(read.offset)
    # No record is left below `reconciled`: `_choose_from_l1` has checked, without an await since.
    first = state.batch_index(max(read.offset, state.reconciled))
    if read.committed:
        # Whole batches below it: the log start may be within a batch of an open transaction.
        stable = state.batch_index(max(state.last_stable, state.reconciled))
        max_count = min(max_count, max(stable - first, 0))
    end, size = select_batches(state.sizes, first, min(read.max_bytes, max_bytes), max_count, at_least_one=at_least_one)
    return [state.batch_ref(index) for index in range(first, end)], size


async def read_planned(
    l0: RangeReader,
    cache: ObjectCache,
    reads: Sequence[FetchRead],
    led: Sequence[LeaderOrError],
    plans: Sequence[FetchPlan],
    pace: CoopBudget,
    ahead: RangeReader | None = None,
) -> list[Fetched]:
    """Read the planned batches; return one answer per read.

    The offsets are taken after the plan, so no batch is above its watermark.
    """
    marks = [_offset_marks(each) for each in led]
    batches = await read_batches(l0, [plan if isinstance(plan, list) else [] for plan in plans], cache, ahead)
    answers = []
    for read, each, (high_watermark, log_start, stable), plan, found in zip(
        reads, led, marks, plans, batches, strict=True
    ):
        if not isinstance(plan, list):
            answers.append(Fetched(high_watermark, log_start, [], plan, stable))
        elif not isinstance(found, list):
            answers.append(Fetched(high_watermark, log_start, [], await read_error_of(each, plan, found), stable))
        elif read.committed and isinstance(each, PartitionLeader) and each.state.log_start > read.offset:
            # Transactions aborted below the log start are dropped, so they could not be distinguished from committed
            # ones.
            gone = OffsetOutOfRangeError(f"retention deleted the records: offset={read.offset} log_start={log_start}.")
            answers.append(Fetched(high_watermark, log_start, [], gone, stable))
        else:
            aborted = _aborted_transactions(each, plan) if read.committed else ()
            records = [without_trailer(batch) for batch in found]
            answers.append(Fetched(high_watermark, log_start, records, None, stable, aborted))
        if pace.is_used_up:
            await pace.wait_for_turn()
    return answers


def _offset_marks(led: LeaderOrError) -> tuple[int, int, int]:
    """Return high watermark, log start and last stable offset."""
    if not isinstance(led, PartitionLeader):
        return -1, -1, -1
    return led.state.high_watermark, led.state.log_start, led.state.last_stable


def _aborted_transactions(led: LeaderOrError, plan: list[BatchRef]) -> Sequence[tuple[int, int]]:
    """Return the aborted transactions of a committed read.

    All that can affect it had ended when it was planned: later ones begin after it.
    """
    if not plan or not isinstance(led, PartitionLeader) or not led.state.aborted:
        return ()
    last = plan[-1]
    return led.state.aborted.overlapping(plan[0].base_offset, last.base_offset + last.record_count)


async def read_error_of(led: LeaderOrError, plan: list[BatchRef], error: TidemillError) -> TidemillError:
    """Return the error to report for a planned batch that could not be read."""
    if not isinstance(led, PartitionLeader):
        return error
    planned_hot = not plan[0].object_key.startswith(L1_PREFIX)
    return await _read_error_at(led, plan[0].base_offset, error, planned_hot=planned_hot)


async def _read_error_at(
    led: PartitionLeader, offset: int, error: TidemillError, *, planned_hot: bool = False
) -> TidemillError:
    """Return the error to report for the records at `offset`.

    Retention may have deleted them during the read. Only the leader knows, and a deposed leader may not know yet:
    records that it would report as lost may have been deleted by its successor.
    """
    if isinstance(error, CorruptError):
        try:
            await led.prove_leadership()
        except TidemillError as away:
            return away
    if led.closed_error is not None:
        return led.closed_error
    log_start = led.state.log_start
    if offset < log_start:
        return OffsetOutOfRangeError(f"retention deleted the records: offset={offset} log_start={log_start}.")
    if planned_hot and offset < led.state.reconciled:
        return UnavailableError(f"the records moved to L1 while they were read: offset={offset}.", fix="Retry.")
    return error
