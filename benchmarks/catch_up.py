"""Catching up without Spark: the cost of the driver's share, with and without decoding helpers, alternating.

    ./dev bench catch_up [--rows N] [--rounds R] [--give-back] [--json]

Method: N records of 110 bytes, each with a different key, wait in a topic of four partitions, bound 25,000 at a time.
This process brings a fresh table of it to the end, as a driver does (fetch, decode, resolve, part, append, mirror; no
JVM), then another one, in turns: the step read ahead decoded by one thread, and helped by others. Wall, processor time
and page faults of this process; the last table of each kind is compared with a replay of the topic.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harbour import machine
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.memory_budget import retain_freed_memory
from tidemill.base.status.histogram import StageHistograms
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.fetch_decode import DECODERS
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from tidemill.spark.types import stream_schema
from upsert import RECORDS_PER_BINDING
from upsert_load import KEY, SCHEMA, Load

PARTITIONS = 4
WAYS = ("alone", "helped")


class Waiting:
    """A topic that has everything, and tables that have nothing yet."""

    def __init__(self, portal: BlockingPortal, stores: Stores, root: Path, rows: int) -> None:
        self.portal, self.stores, self.root, self.rows = portal, stores, root, rows
        self.source = "topic/clicks"
        self.load = portal.call(self._made())
        self.schema = stream_schema(SCHEMA, KEY)
        self.feed = portal.call(stream_feed(stores.catalogue, self.load.name, self.schema))
        self.remap = portal.call(stores.remap(self.source))

    async def _made(self) -> Load:
        load = Load(self.stores, "clicks", PARTITIONS, self.rows)
        await load.open()
        chosen = np.arange(self.rows)
        np.random.default_rng(7).shuffle(chosen)
        await load.produce(chosen, RECORDS_PER_BINDING)
        self.end = await load.bind() + 1
        await load.aclose()
        return load

    def caught_up(self, way: str, number: int) -> tuple[TableWriter, dict[str, float]]:
        scratch = self.root / f"{way}-{number}"
        shard = self.portal.call(self.stores.shard(f"{way}_{number}", self.schema))
        table = TableWriter(self.portal, self.stores, shard, scratch / "mirrors" / "clicks", self.feed)
        table.hydrate()
        seats = TableSchedule(self.stores.clock, StageHistograms())
        seats.attach(table)
        decoders = DECODERS if way == "helped" else 0
        sink = FeedSink(self.portal, self.stores, self.source, self.remap, seats, decoders=decoders)
        before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        sink.process(self.end)
        wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
        assert table.upper == self.end and not sink.seats.failed, sink.seats.failed
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return table, {"wall_s": wall_s, "cpu_s": cpu_s, "faults": after.ru_minflt - before.ru_minflt}

    def verify(self, rows: pa.Table) -> int:
        return self.load.verify(rows)


def alternate(topics: Mapping[str, Waiting], rounds: int) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Catch up in every way in turns. Return the figures of each way without the first round, and the number of rows
    that were verified in the last."""
    took: dict[str, list[dict[str, float]]] = {way: [] for way in topics}
    verified = 0
    for number in range(rounds + 1):
        for way in list(topics) if number % 2 else list(topics)[::-1]:
            table, found = topics[way].caught_up(way, number)
            if number:
                took[way].append(found)
            if number == rounds:
                verified += topics[way].verify(topics[way].portal.call(table.shard.snapshot(table.upper - 1)))
    return took, verified


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--give-back", action="store_true", help="without retain_freed_memory: what that brings")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pa.set_memory_pool(pa.system_memory_pool())
    if not args.give_back:
        retain_freed_memory()
    with tempfile.TemporaryDirectory(prefix="catch-up-") as directory, BlockingPortal("catch-up") as portal:
        root = Path(directory)
        stores = portal.call(open_stores(StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")))
        took, verified = alternate(dict.fromkeys(WAYS, Waiting(portal, stores, root, args.rows)), args.rounds)
        portal.call(stores.aclose())
    result: dict[str, Any] = {"verified": verified}
    for way, rounds in took.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        result[way] = {
            "rows_per_s": round(args.rows / middle["wall_s"]),
            "best_rows_per_s": round(args.rows / min(one["wall_s"] for one in rounds)),
            "cpu_s_per_million": round(middle["cpu_s"] * 1e6 / args.rows, 2),
            "faults_per_1000": round(middle["faults"] * 1e3 / args.rows, 1),
        }
    if args.json:
        print(json.dumps(result))
        return
    print(f"catch_up   {machine()}   {args.rows:,} rows, median of {args.rounds}; rows verified: {verified:,}")
    for way in WAYS:
        print(f"  {way:7} {result[way]}")


if __name__ == "__main__":
    main()
