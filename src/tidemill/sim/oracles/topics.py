"""What a topic must look like after any run: checked on the durable log, read without faults.

contiguous      offsets of a partition are those from its log's start on, without gap or repeat
acknowledged    every acknowledged record stands at the offset it was acknowledged with
once            a record of an idempotent producer, or of one connection, stands in the log at most once
in order        records of an idempotent producer, or of one connection, stand in the order they were sent
stable          whatever a consumer was ever given stands in the log, at that offset
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.sim.world import Violated

Place = tuple[int, int]
"""(partition, offset)"""


Log = Mapping[int, bytes]
"""offset → record, of what retention left"""


def check_log(partition: int, found: Sequence[tuple[int, bytes]], start: int = 0) -> None:
    offsets = [offset for offset, _ in found]
    if offsets != list(range(start, start + len(offsets))):
        raise Violated(f"offsets are not contiguous: partition={partition} offsets={offsets}")


def check_acknowledged(
    logs: Mapping[int, Log], acknowledged: Mapping[bytes, Place], starts: Mapping[int, int] | None = None
) -> None:
    """`starts`: where each log begins; what is below was taken by retention."""
    for value, (partition, offset) in acknowledged.items():
        standing = logs[partition].get(offset)
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


def check_stable(seen: Mapping[Place, bytes], logs: Mapping[int, Log], starts: Mapping[int, int] | None = None) -> None:
    for (partition, offset), value in seen.items():
        if offset >= (starts or {}).get(partition, 0) and logs[partition].get(offset) != value:
            raise Violated(
                f"a consumer was given what did not last: partition={partition} offset={offset} record={value!r}"
            )
