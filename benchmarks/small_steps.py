"""Small steps without Spark: processor time of the driver for a step of a few records of one table.

    ./dev bench small_steps [--keys N] [--records 1,10,1000] [--steps S] [--json]

Method: a table of N keys is at the end of its topic of four partitions. Then S times: records of random keys are
produced and bound to one time, and this process, which holds the stores too, advances the table to it as a driver does
(plan, fetch, decode, resolve, part, append, mirror). Median of the processor time of the whole process and of the wall
time, per step. After all steps the table is compared with a replay of the topic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harbour import machine
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.memory_budget import retain_freed_memory
from tidemill.base.status.histogram import StageHistograms
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from tidemill.spark.types import stream_schema
from upsert import RECORDS_PER_BINDING
from upsert_load import KEY, SCHEMA, Load

PARTITIONS = 4
WARM_UP_STEPS = 5


class SteppingTable:
    """A table of all keys, and the topic that it follows."""

    def __init__(self, portal: BlockingPortal, stores: Stores, root: Path, keys: int) -> None:
        self._portal, self._keys = portal, keys
        self._random = np.random.default_rng(7)
        self.load = Load(stores, "clicks", PARTITIONS, keys)
        portal.call(self.load.open())
        schema = stream_schema(SCHEMA, KEY)
        feed = portal.call(stream_feed(stores.catalogue, self.load.name, schema))
        shard = portal.call(stores.shard("clicks", schema))
        self.table = TableWriter(portal, stores, shard, root / "mirrors" / "clicks", feed)
        self.table.hydrate()
        source = f"topic/{self.load.name}"
        seats = TableSchedule(stores.clock, StageHistograms())
        seats.attach(self.table)
        self._sink = FeedSink(portal, stores, source, portal.call(stores.remap(source)), seats, decoders=0)
        self._advance(np.arange(keys), RECORDS_PER_BINDING)

    def step(self, records: int) -> tuple[float, float]:
        """Process one step; return its processor time and its wall time in seconds."""
        return self._advance(self._random.choice(self._keys, records, replace=False), records)

    def _advance(self, keys: Any, records_per_binding: int) -> tuple[float, float]:
        async def bind() -> int:
            await self.load.produce(keys, records_per_binding)
            return await self.load.bind() + 1

        end = self._portal.call(bind())
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self._sink.process(end)
        taken = time.process_time() - cpu_s, time.perf_counter() - wall_s
        assert self.table.upper == end and not self._sink.seats.failed, self._sink.seats.failed
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--records", default="1,10,1000")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pa.set_memory_pool(pa.system_memory_pool())
    retain_freed_memory()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="small-steps-") as directory, BlockingPortal("small-steps") as portal:
        root = Path(directory)
        stores = portal.call(open_stores(StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")))
        one = SteppingTable(portal, stores, root, args.keys)
        for records in map(int, args.records.split(",")):
            took = [one.step(records) for _ in range(WARM_UP_STEPS + args.steps)][WARM_UP_STEPS:]
            cpu_ms, wall_ms = (round(statistics.median(times) * 1e3, 1) for times in zip(*took, strict=True))
            result[str(records)] = {"cpu_ms": cpu_ms, "wall_ms": wall_ms}
        verified = one.load.verify(portal.call(one.table.shard.snapshot(one.table.upper - 1)))
        portal.call(one.load.aclose())
        portal.call(stores.aclose())
    if args.json:
        print(json.dumps({"verified": verified, **result}))
        return
    print(f"small_steps   {machine()}   {args.keys:,} keys, median of {args.steps} steps; rows verified: {verified:,}")
    for records, found in result.items():
        print(f"  {int(records):7,} records   {found['cpu_ms']:6.1f} CPU-ms   {found['wall_ms']:6.1f} ms")


if __name__ == "__main__":
    main()
