"""A derived table computed whole and by group, in real Spark: CPU and wall time of a round in which few groups changed.

Both run over the same shards and take turns; every round's two results must be equal. CPU is of this process, its JVM
and its workers. With `--every`, two small tables in one driver instead (derived_small.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from derived_small import refresh_small
from harbour import machine
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import update_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.session.session import build_session
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from upsert_tree import Tree

CLICKS = ShardSchema((Column("click_id", "int64"), Column("product_id", "int64"), Column("ms", "int64")), ("click_id",))


def by_product(_: Any, clicks: Any) -> Any:
    from pyspark.sql import functions as f

    return clicks.groupBy("product_id").agg(f.count("*").alias("clicks"), f.max("ms").alias("last_ms"))


class Shop:
    def __init__(self, portal: BlockingPortal, stores: Stores, products: int) -> None:
        self.portal, self.products = portal, products
        self.shard = portal.call(stores.shard("clicks", CLICKS))
        self.next = self.upper = 0

    def click(self, count: int, groups: int) -> None:
        """New clicks on the first `groups` products."""
        ids = np.arange(self.next, self.next + count, dtype=np.int64)
        fixed = [np.full(count, value, dtype=np.int64) for value in (self.upper, 1)]
        rows = pa.Table.from_arrays([ids, ids % groups, ids, *fixed], schema=update_schema(CLICKS))
        part = self.portal.call(self.shard.write_part(rows))
        self.portal.call(self.shard.compare_and_append(self.upper, self.upper + 1, (part,), str(self.upper)))
        self.next, self.upper = self.next + count, self.upper + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--products", type=int, default=20_000)
    parser.add_argument("--changed", type=int, default=20, help="groups that change in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=float, default=0, help="two small tables, refreshed every so many seconds")
    parser.add_argument("--warm", type=int, default=30, help="refreshes before the measured ones, with --every")
    options = parser.parse_args()
    print(machine())
    if options.every:
        return refresh_small(options.rows, options.products, options.every, options.rounds, options.warm)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        portal = BlockingPortal("bench")
        stores = portal.call(open_stores(StoreUrls(f"file://{scratch}/objects", f"sqlite://{scratch}/consensus.db")))
        spark = build_session("bench-derived", "local[2]", scratch=scratch / "spark")
        shop = Shop(portal, stores, options.products)
        shop.click(options.rows, options.products)
        p = Pipeline("bench")
        ways: dict[str, Derivation] = {}
        for name, by in (("whole", ()), ("by_group", "product_id")):
            p.derived(name, key="product_id", inputs=("clicks",), by=by)(by_product)
            ways[name] = Derivation(portal, stores, spark, p.derived_tables[name], scratch / name / "mirrors" / name)
        tree = Tree(os.getpid())
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(options.rounds + 2):
            for name, way in ways.items():
                if way.writer is None:
                    way.open()
                tree.begin()
                began = time.monotonic()
                assert way.recompute()
                if number >= 2:  # the first is whole for both, the second meets a cold plan
                    took[name].append((time.monotonic() - began, sum(tree.spent().cpu_s.values())))
            results = [
                portal.call(w.writer.shard.snapshot(shop.upper - 1)).sort_by("product_id") for w in ways.values()
            ]
            assert results[0].equals(results[1]), "by group differs from the whole"
            verified = results[0].num_rows
            shop.click(options.changed * 5, options.changed)
        print(f"{options.rows:,} rows, {options.products:,} groups, {options.changed} changed; {verified:,} rows equal")
        median = {n: tuple(statistics.median(v) for v in zip(*t, strict=True)) for n, t in took.items()}
        for name, (wall, used) in median.items():
            print(f"{name:>9}: wall {wall:.3f} s, CPU {used:.3f} s a round")
        print(
            f"ratio, whole to by group: wall {median['whole'][0] / median['by_group'][0]:.1f}, "
            f"CPU {median['whole'][1] / median['by_group'][1]:.1f}"
        )
        spark.stop()
        portal.call(stores.aclose())
        portal.close()


if __name__ == "__main__":
    main()
