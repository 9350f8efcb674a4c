"""Cost of reading a shard with Spark and of reading the same rows as plain Parquet, in one session, alternating.

    plain         the contents at that time, written by pyarrow as as many files as the shard has settled parts
    plan          `tidemill.spark.read`: a plan over the parts
    data source   `spark.read.format("tidemill")`

Each round creates its frame and counts it, sums one column, or scans every column (the noop sink). CPU seconds of
the whole tree (this process, the JVM, its Python workers). The rows of each way are compared first, by their number and
two sums of their hashes, with the plain files, which were written from the shard's snapshot.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harbour import machine
from positions import SCHEMA, rows
from tidemill.base.clock import Rand
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.compaction.compaction import compact_once
from tidemill.spark import build_session, read
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from upsert_tree import Tree

BATCHES = 10


async def fill(urls: StoreUrls, count: int, share: float) -> tuple[pa.Table, int, int]:
    """A shard of `count` merged rows, `share` of which changed once since: (rows, settled parts, upper)."""
    stores = await open_stores(urls)
    shard = await stores.shard("scanned", SCHEMA)

    async def append(parts: list[pa.Table]) -> None:
        upper = (await shard.frontiers())[1]
        await shard.compare_and_append(upper, upper + 10, [await shard.write_part(part) for part in parts], "")

    for n, ids in enumerate(np.array_split(np.arange(count, dtype=np.int64), BATCHES)):
        await append([rows(ids, n * 10, 1, 0)])
    await shard.downgrade_since("bench", 1, (await shard.frontiers())[1] - 1)
    while await compact_once(shard, stores.objects, Rand()) is not None:
        pass
    await shard.frontiers()
    settled = sum(len(batch.parts) for batch in shard.state.batches)
    touched = np.random.default_rng(1).choice(count, int(count * share), replace=False)
    for some in np.array_split(touched, BATCHES) if share else ():
        upper = (await shard.frontiers())[1]
        await append([rows(some, upper, -1, 0), rows(some, upper, 1, 1)])
    upper = (await shard.frontiers())[1]
    found = await shard.snapshot(upper - 1)
    await stores.aclose()
    return found, settled, upper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", default="0,0.01", help="of the rows, changed since the last merge")
    options = parser.parse_args()
    print(machine())
    root = Path(tempfile.mkdtemp(prefix="scan-"))
    spark = build_session("scan", "local[2]", scratch=root)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        for share in map(float, options.shares.split(",")):
            measure(spark, root / str(share), options.rows, share, options.rounds)
    finally:
        spark.stop()
        shutil.rmtree(root)


def measure(spark: Any, root: Path, count: int, share: float, rounds: int) -> None:
    urls = StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
    with BlockingPortal() as portal:
        want, settled, upper = portal.call(fill(urls, count, share))
    plain = root / "plain"
    plain.mkdir()
    for n in range(settled):
        piece = want.slice(n * count // settled, (n + 1) * count // settled - n * count // settled)
        pq.write_table(piece, plain / f"{n}.parquet", row_group_size=128 << 10, compression="zstd")
    where = {"objects": urls.objects, "consensus": urls.consensus}
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: spark.read.parquet(f"file://{plain}"),
        "plan": lambda: read(spark, "scanned", as_of=upper - 1, **where),
        "data source": lambda: spark.read.format("tidemill").options(table="scanned", as_of=upper - 1, **where).load(),
    }
    work: dict[str, Callable[[Any], Any]] = {
        "count": lambda frame: frame.count(),
        "one column": lambda frame: frame.agg({"amount": "sum"}).collect(),
        "all columns": lambda frame: frame.write.format("noop").mode("overwrite").save(),
    }
    written = digest(ways["plain"]())
    for way, frame in ways.items():
        assert digest(frame()) == written, f"{way} reads other rows"
    print(f"\n{count:,} rows in {settled} settled parts, {share:.0%} of them changed since; every way read them all")
    print(f"{'':>12}" + "".join(f"{way:>24}" for way in ways) + "    CPU s, × plain")
    tree = Tree(os.getpid())
    for what, do in work.items():
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, frame in ways.items():
                tree.begin()
                do(frame())
                taken[way].append(sum(tree.spent().cpu_s.values()))
        middle = {way: statistics.median(each[1:]) for way, each in taken.items()}
        reported = [
            f"{m:12.2f} {m / middle['plain']:6.2f}× ±{spread(taken[way][1:]):2.0%}" for way, m in middle.items()
        ]
        print(f"{what:>12} " + " ".join(reported))


def digest(frame: Any) -> Any:
    """Return a digest of all rows, independent of their order and number: they need not fit into the JVM."""
    hashed = frame.selectExpr("xxhash64(*) AS h")
    return hashed.selectExpr("count(*)", "sum(CAST(h AS DECIMAL(38, 0)))", "bit_xor(h)").collect()


def spread(samples: list[float]) -> float:
    return (max(samples) - min(samples)) / 2 / statistics.median(samples)


if __name__ == "__main__":
    main()
