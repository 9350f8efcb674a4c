"""Reports of failing partitions: their age, and a few marks for thousands of partitions of an unreachable store."""

from __future__ import annotations

import asyncio

from support.waiting import until
from tidemill.base.clock import SystemClock
from tidemill.base.errors import CorruptError, UnavailableError
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.status import StatusTracker
from tidemill.topics.partition_supervisor import OWN_STATUS_MAX, SHARED_STATUS, PartitionKey, PartitionSupervisor


async def test_thousands_that_fail_at_once_are_a_few_marks_and_all_heal() -> None:
    tracker, tasks = StatusTracker(), Tasks(lambda name, error: None)
    watched = PartitionSupervisor(SystemClock(), tracker, tasks, lambda key: f"topic:{key[0]}", lambda key: None)
    keys = [(f"t{n}", p) for n in range(2_000) for p in (0, 1)]
    for key in keys:
        watched.failed(key, UnavailableError("the bucket is away."))
    assert len(tracker.report("p", 0).marks) == OWN_STATUS_MAX + 1
    assert SHARED_STATUS in watched.marks() and "topic:t0" in watched.marks()
    watched.clear_failure(("t0", 0))
    assert tracker.failure("topic:t0") is not None, "its other partition still fails"
    for key in keys:
        watched.clear_failure(key)
    assert watched.marks() == set() and tracker.failure(SHARED_STATUS) is None and tracker.failure("topic:t0") is None
    await tasks.aclose()


async def test_the_first_try_is_at_once_later_ones_wait_and_what_cannot_be_read_is_parked() -> None:
    tracker, tasks = StatusTracker(), Tasks(lambda name, error: None)
    opened: list[PartitionKey] = []
    watched = PartitionSupervisor(SystemClock(), tracker, tasks, lambda key: "topic:t", opened.append)
    watched.failed(("t", 0), UnavailableError("away."))
    watched.check_available(("t", 0))
    await until(lambda: len(opened) == 1)
    watched.failed(("t", 0), UnavailableError("away."))
    refused = False
    try:
        watched.check_available(("t", 0))
    except UnavailableError as error:
        refused = "away." in str(error)
    assert refused
    await until(lambda: len(opened) == 2)
    since_ms = tracker.failure("topic:t").since_ms  # type: ignore[union-attr]
    watched.failed(("t", 0), CorruptError("damaged."))
    failure = tracker.failure("topic:t")
    assert failure is not None and (failure.tries, failure.parked, failure.since_ms) == (3, True, since_ms)
    await asyncio.sleep(0.3)
    assert len(opened) == 2
    await tasks.aclose()
