"""Record batches cut to a slice: parallel columns of what lies in [start, end), each record with its time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.spark.decode.slices import Slice
from tidemill.topics.batch import decode_columns

CONTROL_BATCH = 0x20
"""Attribute bit of transaction markers (Kafka protocol, record batch): no user records inside."""

Headers = tuple[tuple[str, bytes | None], ...]


class Records(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offsets: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]

    def __len__(self) -> int:
        return len(self.values)


def cut_records(piece: Slice, batches: Sequence[bytes]) -> Records:
    """The records of the slice, in offset order. Raises CorruptBatch."""
    offsets: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[Headers] = []
    for batch in batches:
        header, columns = decode_columns(batch)
        if header.attributes & CONTROL_BATCH:
            continue
        found = columns.offsets
        first = 0
        last = len(found)
        if found and (found[0] < piece.start or found[-1] >= piece.end):
            first = int(np.searchsorted(found, piece.start))
            last = int(np.searchsorted(found, piece.end))
        offsets += found[first:last]
        keys += columns.keys[first:last]
        values += columns.values[first:last]
        headers += columns.headers[first:last]
    positions = np.array(offsets, dtype=np.int64)
    return Records(piece.topic, piece.partition, positions, piece.times_of(positions), keys, values, headers)
