"""Cost of reading a shard with Spark and of reading the same rows as plain Parquet, in one session, alternating.

    plain         the contents at that time, written by pyarrow as as many files as the shard has settled parts
    plan          `tidemill.spark.read`: a plan over the parts
    data source   `spark.read.format("tidemill")`

Each round creates its frame and counts it, sums one column, filters a hundredth, or scans every column (the noop
sink). CPU seconds of the whole tree (this process, the JVM, its Python workers). The rows of each way are compared
first, by their number and two sums of their hashes, with the plain files, which were written from the shard's snapshot.

With `--store s3` the table and the plain files are in one bucket of an S3 server on this machine (moto's, whose CPU is
included), and Spark reads both with the same connector, which tests/clients/install brings. The elapsed time is shown,
too. × is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from harbour import machine
from kafka_broker import BUCKET, start_emulator
from positions import SCHEMA, rows
from support.spark.connector import EXTRA, HAS_S3
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
    parser.add_argument("--ways", default="plan,plain,data source")
    parser.add_argument("--store", choices=("directory", "s3"), default="directory")
    options = parser.parse_args()
    if options.store == "s3" and not HAS_S3:
        parser.error("no connector for S3 here: tests/clients/install brings it")
    print(machine())
    root = Path(tempfile.mkdtemp(prefix="scan-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        endpoint = start_emulator(stack) if options.store == "s3" else ""
        spark = build_session("scan", "local[2]", scratch=root, extra=EXTRA if endpoint else None)
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")
        for share in map(float, options.shares.split(",")):
            measure(spark, root / str(share), endpoint, share, options)


def measure(spark: Any, root: Path, endpoint: str, share: float, options: argparse.Namespace) -> None:
    root.mkdir()
    count: int = options.rows
    keys = "access_key_id=test&secret_access_key=test"
    bucket = f"s3://{BUCKET}/{root.name}?endpoint={endpoint}&{keys}" if endpoint else f"file://{root}/objects"
    urls = StoreUrls(bucket, f"sqlite://{root}/consensus.db")
    with BlockingPortal() as portal:
        want, settled, upper = portal.call(fill(urls, count, share))
    plain = write_plain(root, endpoint, want, settled)
    where = {"objects": urls.objects, "consensus": urls.consensus}
    ways: dict[str, Callable[[], Any]] = {
        "plan": lambda: read(spark, "scanned", as_of=upper - 1, **where),
        "plain": lambda: spark.read.parquet(plain),
        "data source": lambda: spark.read.format("tidemill").options(table="scanned", as_of=upper - 1, **where).load(),
    }
    ways = {way: ways[way] for way in options.ways.split(",")}
    work: dict[str, Callable[[Any], Any]] = {
        "count": lambda frame: frame.count(),
        "one column": lambda frame: frame.agg({"amount": "sum"}).collect(),
        "filter": lambda frame: frame.where(f"amount < {31 * count // 100}").agg({"note": "max"}).collect(),
        "all columns": lambda frame: frame.write.format("noop").mode("overwrite").save(),
    }
    found = {way: digest(frame()) for way, frame in ways.items()}  # the plan first: it opens the bucket
    assert all(each == found["plain"] for each in found.values()), "a way reads other rows"
    print(f"\n{count:,} rows in {settled} settled parts, {share:.0%} of them changed since; every way read them all")
    tree, spent = Tree(os.getpid()), {}
    for what, do in work.items():
        spent[what] = taken = {way: ([], []) for way in ways}
        for _ in range(options.rounds + 1):
            for way, frame in ways.items():
                tree.begin()
                began_s = time.monotonic()
                do(frame())
                taken[way][1].append(time.monotonic() - began_s)
                taken[way][0].append(sum(tree.spent().cpu_s.values()))
    for place, unit in enumerate(("CPU s", "elapsed s") if endpoint else ("CPU s",)):
        print(f"{'':>12}" + "".join(f"{way:>24}" for way in ways) + f"    {unit}, × plain")
        for what, taken in spent.items():
            report(what, {way: each[place][1:] for way, each in taken.items()})


def report(what: str, taken: dict[str, list[float]]) -> None:
    """Print the median of each way, and the median of its ratios to plain Parquet within a round."""
    shown = []
    for each in taken.values():
        ratio = statistics.median(mine / plain for mine, plain in zip(each, taken["plain"], strict=True))
        shown.append(f"{statistics.median(each):12.2f} {ratio:6.2f}× ±{spread(each):2.0%}")
    print(f"{what:>12} " + " ".join(shown))


def write_plain(root: Path, endpoint: str, want: pa.Table, files: int) -> str:
    """Write the rows as plain Parquet next to the table. Return where Spark finds it."""
    store: pyarrow.fs.FileSystem = pyarrow.fs.LocalFileSystem()
    directory = f"{root}/plain"
    if endpoint:
        directory = f"{BUCKET}/{root.name}/plain"
        store = pyarrow.fs.S3FileSystem(
            access_key="test", secret_key="test", endpoint_override=endpoint, region="us-east-1"
        )
    store.create_dir(directory)
    cuts = [n * want.num_rows // files for n in range(files + 1)]
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        pq.write_table(
            want.slice(start, end - start), f"{directory}/{n}.parquet",
            row_group_size=128 << 10, compression="zstd", filesystem=store,
        )  # fmt: skip
    return f"s3a://{directory}" if endpoint else f"file://{directory}"


def digest(frame: Any) -> Any:
    """Return a digest of all rows, independent of their order and number: they need not fit into the JVM."""
    hashed = frame.selectExpr("xxhash64(*) AS h")
    return hashed.selectExpr("count(*)", "sum(CAST(h AS DECIMAL(38, 0)))", "bit_xor(h)").collect()


def spread(samples: list[float]) -> float:
    return (max(samples) - min(samples)) / 2 / statistics.median(samples)


if __name__ == "__main__":
    main()
