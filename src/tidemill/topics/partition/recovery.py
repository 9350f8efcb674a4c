"""Bring a partition's state up to date with its log. Used by new leaders and by readers in other processes."""

from __future__ import annotations

from tidemill.base.errors import CorruptError, MissingError, UnavailableError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.consensus.api import Consensus, LogHead
from tidemill.objects.reads import read_verified
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import decode_command, decode_state
from tidemill.topics.partition.state_machine.commands import Rollup
from tidemill.topics.partition.state_machine.state import PartitionState

RESTARTS_LIMIT = 8
"""Number of times a replay restarts because the log was truncated, or a rollup replaced, during it."""


LOG_PREFIX = "topic/"


def partition_log(topic_id: str, partition: int) -> str:
    return f"{LOG_PREFIX}{topic_id}/{partition}"


def parse_log_name(name: str) -> tuple[str, int]:
    """Parse the name of a partition's log, without its prefix, as (topic id, partition)."""
    topic_id, _, partition = name.rpartition("/")
    return topic_id, int(partition)


async def catch_up(
    consensus: Consensus, objects: ObjectStore, log: str, state: PartitionState, seen: LogHead | None = None,
    *, pace: CoopBudget | None = None,
) -> tuple[PartitionState, LogHead]:  # fmt: skip
    """Apply the log up to its head. Return the state (a new one if a rollup was loaded) and the head of the last read.

    `seen`: a recent head, if the caller has one. If it shows an empty log, nothing is read.
    `pace`: budget for yielding to other tasks of the loop. The caller must not share the state until this returns.
    With `pace`, records appended during the replay are not waited for.
    Raises CorruptError if a truncated log starts with anything but a rollup, UnavailableError if the log is truncated
    faster than it can be read.
    """
    if seen is not None and seen.next == state.applied == 0:
        return state, seen
    for _ in range(RESTARTS_LIMIT):
        try:
            return await _replay(consensus, objects, log, state, seen, pace)
        except MissingError:
            state, seen = PartitionState(), None
    raise UnavailableError(f"a partition log is truncated faster than it is read: log={log}.", fix="Try again.")


async def _replay(
    consensus: Consensus,
    objects: ObjectStore,
    log: str,
    state: PartitionState,
    seen: LogHead | None,
    pace: CoopBudget | None,
) -> tuple[PartitionState, LogHead]:
    goal: int | None = None
    while True:
        if state.applied == 0:
            head = seen if seen is not None else await consensus.log_head(log)
            if head.start > 0:
                state = await _load_rollup(consensus, objects, log, head.start)
        found = await consensus.read(log, state.applied)
        if goal is None or pace is None:
            goal = found.head.next
        for record in found.records:
            if pace is not None and pace.is_used_up:
                await pace.wait_for_turn()
            apply(state, decode_command(record.data), record.position, record.term)
        if state.applied >= goal:
            return state, found.head


async def _load_rollup(consensus: Consensus, objects: ObjectStore, log: str, start: int) -> PartitionState:
    """Load the state at the first record of a truncated log, a rollup. Raises MissingError if it was replaced."""
    found = await consensus.read(log, start, limit_records=1)
    command = decode_command(found.records[0].data) if found.records else None
    if not isinstance(command, Rollup):
        raise CorruptError(f"a truncated partition log does not start with a rollup: log={log} start={start}.")
    key = command.object_key

    async def read() -> PartitionState:
        return decode_state(await objects.get(key), key)

    state = await read_verified(objects, key, read)
    for placed in command.tail:
        apply(state, placed, state.applied, found.records[0].term)
    if state.applied != start:
        raise CorruptError(f"a rollup has another position: log={log} start={start} applied={state.applied}.")
    return state
