"""What a topic must look like after any run: checked on the durable log, read without faults.

contiguous      offsets of a partition are those from its log's start on, without gap or repeat
acknowledged    every acknowledged record stands at the offset it was acknowledged with
once            a record of an idempotent producer, or of one connection, stands in the log at most once
in order        records of an idempotent producer, or of one connection, stand in the order they were sent
durable         whatever a client is told of stands in the log by then
stable          whatever a consumer was ever given stands in the log, at that offset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidemill.consensus.api import LogRecord
from tidemill.sim.world import Violated
from tidemill.topics.partition.state_machine.apply import apply
from tidemill.topics.partition.state_machine.codec import decode_command
from tidemill.topics.partition.state_machine.state import PartitionState

Place = tuple[int, int]
"""(partition, offset)"""


Log = Mapping[int, bytes]
"""offset → record, of what retention left"""


Gone = Callable[[bytes, Place], bool]


class Durable:
    """`landed`: of a partition, every record that its log ever took."""

    def __init__(self, landed: Callable[[int], Sequence[LogRecord]]) -> None:
        self._landed = landed
        self._states: dict[int, PartitionState] = {}

    def vouch(self, partition: int, end: int, what: str) -> None:
        """What was told of reaches up to the offset `end`: so does the log now. Raises Violated."""
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
    """`starts`: where each log begins; what is below was taken by retention. `gone`: may compaction have taken it?"""
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
    """`sent`: the producer's records for this partition in order; those in the log must be so too, each once."""
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
