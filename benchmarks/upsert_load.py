"""Load of `upsert.py`: a topic of keyed records, bound on request, and the expected contents of the table.

Record: 110 bytes of JSON with its number, so that every write of a key differs from the previous one.
"""

from __future__ import annotations

import struct

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import DIFF, TIME, Binding
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.registry import open_remap
from tidemill.spark.stores import Stores
from tidemill.spark.types import stream_schema
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.local_topics import LocalTopics

SCHEMA = "click_id string, product_id long, at timestamp, page string"
KEY = "click_id"
AT_US = 1_767_323_045_000_000
"""2026-01-02T03:04:05Z"""
PAGE = b"/products/list?sort=price&page=" + b"x" * 20
BATCH_RECORDS = 2_000
IN_FLIGHT = 8
FIRST = 1_000_000_000
"""The first record's number: all have as many digits."""
FILLED_ROWS = 500_000
CRC_AT, CRC_FROM = 17, 21

Keys = npt.NDArray[np.int64]


class Load:
    """One topic. `last[k]` is the number of the newest record of key k, -1 without one."""

    def __init__(self, stores: Stores, name: str, partitions: int, keys: int) -> None:
        self.stores = stores
        self.name = name
        self.last = np.full(keys, -1, dtype=np.int64)
        self._partitions = partitions
        self._topics = LocalTopics(stores.consensus, stores.objects, stores.catalogue, clock=SystemClock(), rand=Rand())
        self._topic: TopicRow
        self._heads = [0] * partitions
        self._bound: tuple[int, ...] = ()
        self._marks: list[tuple[int, ...]] = []
        self._written = FIRST
        self._forms: dict[int, _Form] = {}
        self._time_ms = 0

    async def open(self) -> None:
        self._topic = await self.stores.catalogue.create_topic(self.name, self._partitions)
        self._remap = await open_remap(self.stores.consensus, self.stores.clock, self.stores.rand, f"topic/{self.name}")

    async def aclose(self) -> None:
        await self._topics.aclose()

    async def fill(self) -> None:
        """Write every key into the table itself before it is open, merged as the maintenance job does, as if its
        records were old.
        """
        shard = await self.stores.shard(self.name, stream_schema(SCHEMA, KEY))
        keys = np.arange(len(self.last), dtype=np.int64)
        self.last[:] = FIRST + keys
        for upper, begin in enumerate(range(0, len(keys), FILLED_ROWS)):
            some = keys[begin : begin + FILLED_ROWS]
            rows = rows_of(some, self.last[some])
            rows = rows.append_column(TIME, pa.array(np.full(len(some), upper)))
            rows = rows.append_column(DIFF, pa.array(np.ones(len(some), dtype=np.int64)))
            await shard.compare_and_append(upper, upper + 1, [await shard.write_part(rows)], "")
        await shard.downgrade_since("bench", 1, (await shard.frontiers())[1] - 1)
        while await compact_once(shard, self.stores.objects, Rand()) is not None:
            pass
        self._written = FIRST + len(keys)

    async def produce(self, keys: Keys, records_per_binding: int) -> None:
        """Produce a record for each key, in this order.

        A group that may be bound together ends every `records_per_binding`.
        """
        pending = []
        for begin in range(0, len(keys), BATCH_RECORDS):
            chosen = keys[begin : begin + BATCH_RECORDS]
            # A key stays in its partition: order means something within one only.
            homes = chosen % self._partitions
            numbers = np.arange(self._written, self._written + len(chosen))
            self._written += len(chosen)
            self.last[chosen] = numbers
            for partition in range(self._partitions):
                mine = homes == partition
                count = int(np.count_nonzero(mine))
                if count:
                    if count not in self._forms:
                        self._forms[count] = _Form(count)
                    self._heads[partition] += count
                    batch = self._forms[count].encode(chosen[mine], numbers[mine])
                    pending.append(self._topics.produce_nowait(self._topic.topic_id, partition, batch))
            while len(pending) > IN_FLIGHT:
                await pending.pop(0)
            end = begin + len(chosen)
            if end // records_per_binding > begin // records_per_binding or end == len(keys):
                self._marks.append(tuple(self._heads))
        for future in pending:
            await future

    async def bind(self) -> int:
        """Give everything produced its times; the last of them, ms."""
        for offsets in self._marks:
            self._time_ms = max(self._time_ms + 1, self.stores.clock.now_ms())
            await self._remap.mint(Binding(self._time_ms, {self._topic.topic_id: offsets}, 0, 0))
        self._marks.clear()
        return self._time_ms

    def verify(self, rows: pa.Table) -> int:
        return check(rows, self.last)


def check(rows: pa.Table, last: Keys) -> int:
    """The count of rows; SystemExit when they are not what a replay of the topic leaves."""
    keys = pc.cast(pc.utf8_slice_codeunits(rows.column(KEY), 1), pa.int64()).to_numpy()
    found = np.full(len(last), -1, dtype=np.int64)
    found[keys] = rows.column("product_id").to_numpy()
    pages = pc.all(pc.equal(rows.column("page"), PAGE.decode())).as_py()
    if len(keys) != int((last >= 0).sum()) or not np.array_equal(found, last) or not pages:
        differ = int((found != last).sum())
        raise SystemExit(f"the table differs from a replay: rows={len(keys)} keys_that_differ={differ}")
    return len(keys)


def rows_of(keys: Keys, numbers: Keys) -> pa.Table:
    """Return the rows of the table for these records."""
    names = pc.binary_join_element_wise("c", pc.utf8_lpad(pc.cast(pa.array(keys), pa.string()), 9, "0"), "")
    at = pa.array(np.full(len(keys), AT_US), pa.timestamp("us", tz="UTC"))
    page = pa.array([PAGE.decode()]).take(pa.array(np.zeros(len(keys), dtype=np.int64)))
    return pa.table({KEY: names, "product_id": numbers, "at": at, "page": page})


class _Form:
    """A batch of `count` records, of which only the digits change: the result of `encode_batch`, without a loop."""

    def __init__(self, count: int) -> None:
        key = b"c%09d" % 0
        data = encode_batch([Record(key, value(0, FIRST), (), 0, 0)] * count)
        self._data = np.frombuffer(data, dtype=np.uint8).copy()
        keys, numbers = _places(data, key) + 1, _places(data, b"%d" % FIRST)
        assert len(keys) == 2 * count and len(numbers) == count
        self._keys = keys[:, None] + np.arange(9)
        self._numbers = numbers[:, None] + np.arange(10)

    def encode(self, keys: Keys, numbers: Keys) -> bytes:
        self._data[self._keys] = np.repeat(_digits(keys, 9), 2, axis=0)
        self._data[self._numbers] = _digits(numbers, 10)
        batch = bytearray(self._data.tobytes())
        struct.pack_into(">I", batch, CRC_AT, crc32c.crc32c(memoryview(batch)[CRC_FROM:]))
        return bytes(batch)


def _places(data: bytes, wanted: bytes) -> Keys:
    out, at = [], data.find(wanted)
    while at >= 0:
        out.append(at)
        at = data.find(wanted, at + 1)
    return np.array(out, dtype=np.int64)


def _digits(numbers: Keys, count: int) -> npt.NDArray[np.uint8]:
    return (numbers[:, None] // 10 ** np.arange(count - 1, -1, -1) % 10 + ord("0")).astype(np.uint8)


def value(key: int, number: int) -> bytes:
    return b'{"click_id":"c%09d","product_id":%d,"at":"2026-01-02T03:04:05Z","page":"%s"}' % (key, number, PAGE)
