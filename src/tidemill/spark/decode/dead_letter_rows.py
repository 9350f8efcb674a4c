"""Dead letters: records that no table can hold, with position and reason. One row per record, or per unreadable batch.

An unreadable record does not affect its neighbours; an unreadable batch is one letter for its whole range. Both depend
on the stored bytes alone, so every writer produces the same letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.shards.parts.schema import update_schema

DEAD_LETTERS = ShardSchema(
    (
        Column("topic", "string"),
        Column("partition", "int32"),
        Column("offset", "int64"),
        Column("reason", "string"),
        Column("bytes", "binary"),
        Column("at", "timestamp"),
        Column("last_offset", "int64"),
        Column("table", "string"),
        Column("key", "string"),
    ),
    ("topic", "partition", "offset"),
)
"""`at` is the record's tidemill time. [offset, last_offset] covers several records if a batch cannot be read.
`table` and `key` (JSON of the key columns, "" = unknown) name the row that a captured table lacks because of it."""

DEAD_BYTES_MAX = 64 << 10
"""A dead letter stores at most this many bytes of the record."""
REASON_CHARS_MAX = 500


class Place(NamedTuple):
    """Position of a record, or of the first one of an unreadable batch."""

    topic: str
    partition: int
    offset: int


EXPIRED = Place("", -1, -1)
"""Place of the row that states how many letters expired: as many as its offsets cover. Its `at` is that of the newest
of them."""


class DeadLetter(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    last_offset: int
    time_ms: int
    reason: str
    data: bytes | None = b""
    table: str = ""
    key: str = ""


def places_of(rows: pa.Table) -> list[Place]:
    """Return the place of each update."""
    columns = (rows.column(name).to_pylist() for name in Place._fields)
    return [Place(*place) for place in zip(*columns, strict=True)]


def numbers_in_order(rows: pa.Table) -> list[int]:
    """Return the numbers of the updates in the order in which they apply: by time, and at equal times a retraction
    before the letter that replaces it."""
    order: list[int] = np.lexsort((int64s(rows, DIFF), int64s(rows, TIME))).tolist()
    return order


def is_letter(rows: pa.Table) -> Any:
    """Return a mask of the rows that are letters."""
    return pc.greater_equal(rows.column("offset"), 0)


def times_of(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Return the times of the records of letters, in µs."""
    times: npt.NDArray[np.int64] = rows.column("at").cast(pa.int64()).to_numpy()
    return times


def retractions(letters: pa.Table, time_ms: int) -> pa.Table:
    """Return updates that remove these letters, given with the columns of their shard."""
    for name, value in ((TIME, time_ms), (DIFF, -1)):
        letters = letters.append_column(name, pa.array(np.full(letters.num_rows, value, dtype=np.int64)))
    return letters


def dead_letter_table(letters: Sequence[DeadLetter]) -> pa.Table:
    """Return updates of the dead-letter shard, ordered by offset, each with the record's time."""
    if not letters:
        return no_dead_letters()
    letters = sorted(letters, key=lambda x: (x.topic, x.partition, x.offset))
    times = np.array([x.time_ms for x in letters], dtype=np.int64)
    arrays = [
        pa.array([x.topic for x in letters], pa.string()),
        pa.array([x.partition for x in letters], pa.int32()),
        pa.array([x.offset for x in letters], pa.int64()),
        pa.array([_to_utf8_text(x.reason)[:REASON_CHARS_MAX] for x in letters], pa.string()),
        pa.array([bytes((x.data or b"")[:DEAD_BYTES_MAX]) for x in letters], pa.binary()),
        pa.array(times * 1000, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        pa.array([x.last_offset for x in letters], pa.int64()),
        pa.array([_to_utf8_text(x.table) for x in letters], pa.string()),
        pa.array([_to_utf8_text(x.key) for x in letters], pa.string()),
        pa.array(times, pa.int64()),
        pa.array(np.ones(len(letters), dtype=np.int64)),
    ]
    return pa.Table.from_arrays(arrays, schema=update_schema(DEAD_LETTERS))


def _to_utf8_text(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: an error may quote half a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


@lru_cache(maxsize=1)
def no_dead_letters() -> pa.Table:
    return update_schema(DEAD_LETTERS).empty_table()
