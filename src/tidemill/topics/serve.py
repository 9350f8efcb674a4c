"""Answering fetches from led partitions: choose by the state in one plain call, then materialise."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.errors import TidemillError
from tidemill.objects.store import ObjectStore
from tidemill.topics.fetch import choose, read_batches
from tidemill.topics.front import BatchRef, Fetched, FetchRead
from tidemill.topics.l0.cache import ObjectCache
from tidemill.topics.partition.machine import LedPartition

Led = LedPartition | TidemillError
Plan = list[BatchRef] | TidemillError


def plan_fetch(reads: Sequence[FetchRead], led: Sequence[Led], max_bytes: int) -> tuple[list[Plan], int, bool]:
    """(batches or error for each read, bytes in all, whether any failed). At least one batch if there is any."""
    plans: list[Plan] = []
    total = 0
    failed = False
    for read, each in zip(reads, led, strict=True):
        try:
            if not isinstance(each, LedPartition):
                raise each
            refs, size = _choose_refs(each, read, max_bytes - total, at_least_one=total == 0)
        except TidemillError as error:
            plans.append(error)
            failed = True
        else:
            plans.append(refs)
            total += size
    return plans, total, failed


def _choose_refs(
    led: LedPartition, read: FetchRead, max_bytes: int, *, at_least_one: bool
) -> tuple[list[BatchRef], int]:
    """Raises OffsetOutOfRange, or what the partition closed with: a closed one wakes nobody any more."""
    if led.closed_error is not None:
        raise led.closed_error
    state = led.state
    first = state.first_batch(read.offset)
    end, size = choose(state.sizes, first, min(read.max_bytes, max_bytes), at_least_one=at_least_one)
    return [state.ref(index) for index in range(first, end)], size


async def materialise(
    objects: ObjectStore, cache: ObjectCache, led: Sequence[Led], plans: Sequence[Plan]
) -> list[Fetched]:
    """One answer per read. The offsets are those of the plan's moment, so no batch lies above its watermark."""
    marks = [(e.state.high_watermark, e.state.log_start) if isinstance(e, LedPartition) else (-1, -1) for e in led]
    batches = await read_batches(objects, [plan if isinstance(plan, list) else [] for plan in plans], cache)
    answers = []
    for (high_watermark, log_start), plan, found in zip(marks, plans, batches, strict=True):
        if not isinstance(plan, list):
            answers.append(Fetched(high_watermark, log_start, [], plan))
        elif not isinstance(found, list):
            answers.append(Fetched(high_watermark, log_start, [], found))
        else:
            answers.append(Fetched(high_watermark, log_start, found))
    return answers
