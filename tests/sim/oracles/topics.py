"""Rules that a topic must satisfy after any run, checked on the durable log, read without faults.

contiguous      offsets of a partition begin at its log start, without gap or repetition
acknowledged    every acknowledged record is at the offset with which it was acknowledged
once            a record of an idempotent producer, or of one connection, is in the log at most once
in order        records of an idempotent producer, or of one connection, are in the order in which they were sent
durable         every offset that a client learns of is durable at that moment
stable          every record that a consumer received is in the log, at that offset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sim.world import Violated
from tidemill.consensus.api import LogRecord
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import decode_command
from tidemill.topics.partition.state_machine.state import PartitionState

Place = tuple[int, int]
"""(partition, offset)."""


Log = Mapping[int, bytes]
"""Offset → record, without the records that retention removed."""


Gone = Callable[[bytes, Place], bool]


class Durable:
    """Durable ends of partitions. `landed` returns every record that the log of a partition ever accepted."""

    def __init__(self, landed: Callable[[int], Sequence[LogRecord]]) -> None:
        self._landed = landed
        self._states: dict[int, PartitionState] = {}

    def vouch(self, partition: int, end: int, what: str) -> None:
        """Check that the log reaches up to the offset `end`, which a client has learned of. Raises Violated."""
        state = self._states.setdefault(partition, PartitionState())
        if end <= state.high_watermark:
            return
        for record in self._landed(partition)[state.applied :]:
            apply(state, decode_command(record.data), record.position, record.term)
        if end > state.high_watermark:
            raise Violated(f"{what} before it is durable: {partition=} {end=} durable={state.high_watermark}")


def never(value: bytes, place: Place) -> bool:
    return False


def check_log(partition: int, found: Sequence[tuple[int, bytes]], start: int = 0) -> None:
    offsets = [offset for offset, _ in found]
    if offsets != list(range(start, start + len(offsets))):
        raise Violated(f"offsets are not contiguous: partition={partition} offsets={offsets}")


def check_acknowledged(
    logs: Mapping[int, Log],
    acknowledged: Mapping[bytes, Place],
    starts: Mapping[int, int] | None = None,
    gone: Gone = never,
) -> None:
    """Check the acknowledged records. `starts` are the log starts, below which retention removed everything. `gone`
    returns whether compaction may have removed a record."""
    for value, (partition, offset) in acknowledged.items():
        standing = logs[partition].get(offset)
        if standing is None and gone(value, (partition, offset)):
            continue
        if standing != value and offset >= (starts or {}).get(partition, 0):
            raise Violated(
                f"an acknowledged record is lost: record={value!r} partition={partition} offset={offset} "
                f"found={standing!r}"
            )


def check_producer(producer: str, sent: Sequence[bytes], log: Sequence[tuple[int, bytes]]) -> None:
    """Check that the producer's records in the log are in the order of `sent`, each once."""
    position = {value: index for index, value in enumerate(sent)}
    standing = [position[value] for _, value in log if value in position]
    if len(set(standing)) != len(standing):
        raise Violated(f"a record stands twice: producer={producer} order={standing}")
    if standing != sorted(standing):
        raise Violated(f"records of a producer are out of order: producer={producer} order={standing}")


def check_stable(
    seen: Mapping[Place, bytes],
    logs: Mapping[int, Log],
    starts: Mapping[int, int] | None = None,
    gone: Gone = never,
) -> None:
    for (partition, offset), value in seen.items():
        if offset not in logs[partition] and gone(value, (partition, offset)):
            continue
        if offset >= (starts or {}).get(partition, 0) and logs[partition].get(offset) != value:
            raise Violated(
                f"a consumer was given what did not last: partition={partition} offset={offset} record={value!r}"
            )
