"""Catching up on a captured table without Spark: from columns (RFC 0015), and from records alone, alternating.

    ./dev bench catch_up_captured [--rows N] [--rounds R] [--json]

Method: N inserted rows of six columns, encoded as the capture encodes a large transaction or a copy (512 KiB of records
a batch), wait in two topics of four partitions, once with trailers and once without. This process brings a fresh table
of one to the end, as a driver does (fetch, decode, resolve, part, append, mirror; no JVM), then of the other. Wall and
processor time of this process; the last table of each kind is compared with the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catch_up import PARTITIONS, Waiting, alternate
from harbour import machine
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.memory_budget import retain_freed_memory
from tidemill.capture.changes import Column as SourceColumn
from tidemill.capture.changes import Relation
from tidemill.capture.decode.copy_text import decode_block
from tidemill.capture.encode.columnar_encoder import encode_block
from tidemill.capture.topics.batch_builder import (
    RangeOrigin,
    RowRange,
    cut_batches,
    encode_columns_trailer,
    encode_entries_batch,
)
from tidemill.capture.topics.partition_writer import BATCH_BYTES
from tidemill.shards.api import Binding, Column, ShardSchema
from tidemill.shards.registry import open_remap
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from tidemill.topics.local_topics import LocalTopics

WAYS = ("columns", "records")
BLOCK_ROWS = 20_000
RELATION = Relation(
    1, "public", "orders",
    tuple(
        SourceColumn(name, oid, -1, "", -(name != "id"))
        for name, oid in (("id", 20), ("customer", 25), ("price", 1700), ("at", 1184), ("paid", 16), ("note", 25))
    ),
)  # fmt: skip
SCHEMA = ShardSchema(
    (
        Column("id", "int64"), Column("customer", "string"), Column("price", "decimal(12,2)"),
        Column("at", "timestamp"), Column("paid", "bool"), Column("note", "string"),
    ),
    ("id",),
)  # fmt: skip


def line(number: int) -> bytes:
    """Return a row in COPY's text format."""
    note = "\\N" if number % 2 else "by the door"
    at = f"2026-11-30 {number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}.{number % 1000:03}+00"
    price = f"{number % 10_000}.{number % 100:02}"
    return f"{number}\tcustomer {number * 7919 % 5_000}\t{price}\t{at}\t{'ft'[number % 3 == 0]}\t{note}\n".encode()


class CapturedWaiting(Waiting):
    """A topic of captured rows, with trailers or without."""

    def __init__(self, portal: BlockingPortal, stores: Stores, root: Path, rows: int, way: str) -> None:
        self.portal, self.stores, self.root, self.rows, self.schema = portal, stores, root, rows, SCHEMA
        self.bytes = {"records": 0, "trailers": 0}
        self.source = f"topic/{way}"
        portal.call(self._write(way))

    async def _write(self, way: str) -> None:
        topics = LocalTopics(
            self.stores.consensus, self.stores.objects, self.stores.catalogue, clock=SystemClock(), rand=Rand()
        )
        topic = await self.stores.catalogue.create_topic(way, PARTITIONS)
        self.remap = await open_remap(self.stores.consensus, self.stores.clock, self.stores.rand, self.source)
        self.feed = TopicFeed(way, topic.topic_id, PARTITIONS, True, SCHEMA, "public.orders")
        heads, self.end = [0] * PARTITIONS, 0
        for first in range(0, self.rows, BLOCK_ROWS):
            block = decode_block(RELATION, [line(n) for n in range(first, min(first + BLOCK_ROWS, self.rows))])
            encoded = encode_block(block, PARTITIONS, 1 << 20) if block is not None else None
            if encoded is None:
                raise SystemExit("the rows are not encoded by columns")
            pending = []
            for partition, own in enumerate(encoded.partitions):
                own.places = np.arange(len(own.rows))
                for entries, count in cut_batches(
                    [RowRange(own, 0, len(own.rows), RangeOrigin(0, 0, 0, 1), step=1)], BATCH_BYTES
                ):
                    data = encode_entries_batch(entries, count, producer_id=-1, base_sequence=-1, epoch=-1)
                    trailer = encode_columns_trailer(entries, count) if way == "columns" else b""
                    self.bytes["records"] += len(data)
                    self.bytes["trailers"] += len(trailer)
                    heads[partition] += count
                    pending.append(topics.produce_nowait(topic.topic_id, partition, bytearray(data), trailer=trailer))
            for future in pending:
                await future
            time_ms = max(self.end + 1, self.stores.clock.now_ms())
            await self.remap.mint(Binding(time_ms, {topic.topic_id: tuple(heads)}, 0, 0))
            self.end = time_ms
        self.end += 1
        await topics.aclose()

    def verify(self, rows: pa.Table) -> int:
        """Return the number of rows. Raises SystemExit if a row differs from its line."""
        numbers = rows.sort_by("id").column("id").to_numpy()
        wanted = [line(n).decode().rstrip("\n").split("\t") for n in numbers.tolist()]
        found = rows.sort_by("id")
        texts = {
            "customer": found.column("customer").to_pylist(),
            "price": [str(v) for v in found.column("price").to_pylist()],
            "paid": ["t" if v else "f" for v in found.column("paid").to_pylist()],
            "note": [v if v is not None else "\\N" for v in found.column("note").to_pylist()],
            "at": [f"{v}+00" for v in pc.strftime(found.column("at"), "%Y-%m-%d %H:%M:%S").to_pylist()],
        }
        names = [c.name for c in SCHEMA.columns]
        if numbers.tolist() != list(range(self.rows)):
            raise SystemExit("the table has other keys")
        for name, values in texts.items():
            said = [row[names.index(name)] for row in wanted]
            if name == "at":  # Arrow prints six digits, PostgreSQL as many as there are
                said, values = [v[:23] for v in said], [v[:23] for v in values]
            if said != values:
                raise SystemExit(f"the table differs from the rows: column={name}")
        return len(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    pa.set_memory_pool(pa.system_memory_pool())
    retain_freed_memory()
    with tempfile.TemporaryDirectory(prefix="catch-up-") as directory, BlockingPortal("catch-up") as portal:
        root = Path(directory)
        stores = portal.call(open_stores(StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")))
        topics = {way: CapturedWaiting(portal, stores, root, args.rows, way) for way in WAYS}
        took, verified = alternate(topics, args.rounds)
        sizes = topics["columns"].bytes
        portal.call(stores.aclose())
    middle = {way: statistics.median(one["cpu_s"] for one in rounds) * 1e6 / args.rows for way, rounds in took.items()}
    walls = {way: statistics.median(one["wall_s"] for one in rounds) for way, rounds in took.items()}
    result = {
        "cpu_us_a_row": {way: round(us, 3) for way, us in middle.items()},
        "rows_per_s": {way: round(args.rows / wall_s) for way, wall_s in walls.items()},
        "ratio": round(middle["columns"] / middle["records"], 2),
        "bytes_a_row": {name: round(size / args.rows) for name, size in sizes.items()},
        "verified": verified,
    }
    print(json.dumps(result) if args.json else f"catch_up_captured   {machine()}   {args.rows:,} rows\n  {result}")


if __name__ == "__main__":
    main()
