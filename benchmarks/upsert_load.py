"""What `upsert.py` feeds a table with: a topic of keyed records, bound when told, and what the table must then hold.

Record: 110 bytes of JSON; its number is in it, so that every write of a key differs from the one before it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.front import Binding
from tidemill.shards.open import open_remap
from tidemill.spark.stores import Stores
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.log import LocalTopics

SCHEMA = "click_id string, product_id long, at timestamp, page string"
KEY = "click_id"
PAGE = b"/products/list?sort=price&page=" + b"x" * 20
BATCH_RECORDS = 2_000
IN_FLIGHT = 8

Keys = npt.NDArray[np.int64]


class Load:
    """One topic. `last[k]` is the number of the newest record of key k, -1 where there is none."""

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
        self._written = 0
        self._time_ms = 0

    async def open(self) -> None:
        self._topic = await self.stores.catalogue.create_topic(self.name, self._partitions)
        self._remap = await open_remap(self.stores.consensus, self.stores.clock, self.stores.rand, f"topic/{self.name}")

    async def aclose(self) -> None:
        await self._topics.aclose()

    async def produce(self, keys: Keys, records_per_binding: int) -> None:
        """A record for each key, in this order. What may be bound together ends every `records_per_binding`."""
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
                pairs = zip(chosen[mine].tolist(), numbers[mine].tolist(), strict=True)
                records = [Record(b"c%09d" % key, _value(key, number), (), 0, 0) for key, number in pairs]
                if records:
                    self._heads[partition] += len(records)
                    pending.append(self._topics.produce_nowait(self._topic.topic_id, partition, encode_batch(records)))
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
        """The count of rows; SystemExit when they are not what a replay of the topic leaves."""
        keys = pc.cast(pc.utf8_slice_codeunits(rows.column(KEY), 1), pa.int64()).to_numpy()
        found = np.full(len(self.last), -1, dtype=np.int64)
        found[keys] = rows.column("product_id").to_numpy()
        pages = pc.all(pc.equal(rows.column("page"), PAGE.decode())).as_py()
        if len(keys) != int((self.last >= 0).sum()) or not np.array_equal(found, self.last) or not pages:
            differ = int((found != self.last).sum())
            raise SystemExit(f"the table differs from a replay: rows={len(keys)} keys_that_differ={differ}")
        return len(keys)


def _value(key: int, number: int) -> bytes:
    return b'{"click_id":"c%09d","product_id":%d,"at":"2026-01-02T03:04:05Z","page":"%s"}' % (key, number, PAGE)
