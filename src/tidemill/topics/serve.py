"""Answering fetches from led partitions: choose by the state in one plain call, then materialise."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import Corrupt, TidemillError
from tidemill.base.pace import Pace
from tidemill.objects.store import ObjectStore
from tidemill.topics.fetch import choose, read_batches
from tidemill.topics.front import BatchRef, Fetched, FetchRead, OffsetOutOfRange
from tidemill.topics.l0.cache import ObjectCache
from tidemill.topics.partition.machine import LedPartition

Led = LedPartition | TidemillError
Plan = list[BatchRef] | TidemillError


BATCHES_MAX = 4_096
"""Of one answer: a topic of tiny batches would fill 16 MiB with a quarter of a million of them."""


async def plan_fetch(
    reads: Sequence[FetchRead], led: Sequence[Led], max_bytes: int, pace: Pace
) -> tuple[list[Plan], int, bool]:
    """(batches or error for each read, bytes in all, whether any failed). At least one batch if there is any."""
    plans: list[Plan] = []
    total = 0
    left = BATCHES_MAX
    failed = False
    for read, each in zip(reads, led, strict=True):
        try:
            if not isinstance(each, LedPartition):
                raise each
            refs, size = _choose_refs(each, read, max_bytes - total, left, at_least_one=total == 0)
        except TidemillError as error:
            plans.append(error)
            failed = True
        else:
            plans.append(refs)
            total += size
            left -= len(refs)
        if pace.due:
            await pace.rest()
    return plans, total, failed


def _choose_refs(
    led: LedPartition, read: FetchRead, max_bytes: int, max_count: int, *, at_least_one: bool
) -> tuple[list[BatchRef], int]:
    """Raises OffsetOutOfRange, or what the partition closed with: a closed one wakes nobody any more."""
    if led.closed_error is not None:
        raise led.closed_error
    state = led.state
    first = state.first_batch(read.offset)
    end, size = choose(state.sizes, first, min(read.max_bytes, max_bytes), max_count, at_least_one=at_least_one)
    return [state.ref(index) for index in range(first, end)], size


async def materialise(
    objects: ObjectStore, cache: ObjectCache, led: Sequence[Led], plans: Sequence[Plan], pace: Pace
) -> list[Fetched]:
    """One answer per read. The offsets are of a moment after the plan's, so no batch lies above its watermark."""
    marks = [(e.state.high_watermark, e.state.log_start) if isinstance(e, LedPartition) else (-1, -1) for e in led]
    batches = await read_batches(objects, [plan if isinstance(plan, list) else [] for plan in plans], cache)
    answers = []
    for each, (high_watermark, log_start), plan, found in zip(led, marks, plans, batches, strict=True):
        if not isinstance(plan, list):
            answers.append(Fetched(high_watermark, log_start, [], plan))
        elif not isinstance(found, list):
            answers.append(Fetched(high_watermark, log_start, [], await _told(each, plan, found)))
        else:
            answers.append(Fetched(high_watermark, log_start, found))
        if pace.due:
            await pace.rest()
    return answers


async def _told(led: Led, plan: list[BatchRef], error: TidemillError) -> TidemillError:
    """Retention may have taken the records while they were read. Whether it did only the leader knows, and one that
    was deposed may not know that yet: what it would call lost, its successor let go."""
    if not isinstance(led, LedPartition):
        return error
    if isinstance(error, Corrupt):
        try:
            await led.prove()
        except TidemillError as away:
            return away
    if led.closed_error is not None:
        return led.closed_error
    base, log_start = plan[0].base_offset, led.state.log_start
    if base < log_start:
        return OffsetOutOfRange(f"retention took the records: offset={base} log_start={log_start}.")
    return error
