"""Reads of the bucket in a round: each object once, even if several tables have records in it."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.base.clock import ManualClock
from tidemill.base.errors import CorruptError
from tidemill.objects.memory import MemoryObjects
from tidemill.spark.decode.records import Slice, SliceDescriptor
from tidemill.spark.ingest.fetch_decode import fetch_batches
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch


class Counting(MemoryObjects):
    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.reads: list[str] = []

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads.append(key)
        return await super().get_ranges(key, ranges)


def descriptor(topic: str, refs: Sequence[BatchRef]) -> SliceDescriptor:
    return SliceDescriptor(Slice(topic, topic, 0, 0, len(refs), (len(refs),), (1,)), tuple(refs))


async def stored(objects: Counting, tables: int, keys: Sequence[str]) -> list[list[SliceDescriptor]]:
    """Store one batch of each table in each object, and return their slices."""
    batches = [encode_batch([Record(b"k", b"%d" % table, (), 1, 0)], base_offset=0) for table in range(tables)]
    starts = [sum(map(len, batches[:table])) for table in range(tables)]
    for key in keys:
        await objects.put(key, b"".join(batches))
    return [
        [
            descriptor(
                f"t{table}", [BatchRef(key, starts[table], len(batches[table]), n, 1, 1) for n, key in enumerate(keys)]
            )
        ]
        for table in range(tables)
    ]


async def test_an_object_that_many_tables_share_is_read_once() -> None:
    objects, keys = Counting(), [f"l0/{n}" for n in range(5)]
    found = await fetch_batches(objects, await stored(objects, 7, keys))
    assert sorted(objects.reads) == keys
    for table, descriptors in enumerate(found):
        assert isinstance(descriptors, list)
        assert [bytes(batch)[-2:-1] for batch in descriptors[0]] == [b"%d" % table] * 5


async def test_a_table_whose_object_is_gone_fails_alone() -> None:
    objects = Counting()
    tables = [*await stored(objects, 1, ["l0/a"]), *await stored(objects, 1, ["l0/b"])]
    await objects.delete("l0/b")
    kept, lost = await fetch_batches(objects, tables)
    assert isinstance(kept, list)
    assert isinstance(lost, CorruptError)
