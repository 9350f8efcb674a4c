"""Two small derived tables in one driver, refreshed at an interval while few rows of their inputs move.

One is computed by group from two inputs, as in the demo; one whole from one input, as in README. Each refresh follows
an append of some rows to both inputs. CPU is that of the refresh and of the pause after it, without the appends. After
each refresh both tables are compared with the same functions in Arrow.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.schema import update_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.session.session import build_session
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from upsert_tree import KINDS, TICK_S, Tree, stat

CLICKS = ShardSchema(
    (Column("click_id", "string"), Column("product_id", "int64"), Column("customer_id", "int64")), ("click_id",)
)
LINES = ShardSchema(
    (Column("line_id", "int64"), Column("product_id", "int64"), Column("quantity", "int32"),
     Column("amount", "decimal(18,2)")),
    ("line_id",),
)  # fmt: skip
MOVED = {"clicks": 20, "order_line": 10}
"""Rows that one refresh appends to each input."""


def conversion(_: Any, clicks: Any, order_line: Any) -> Any:
    from pyspark.sql import functions as f

    seen = clicks.groupBy("product_id").agg(f.count("*").alias("clicks"))
    sold = order_line.groupBy("product_id").agg(
        f.sum("quantity").cast("long").alias("sold"), f.sum("amount").cast("decimal(18,2)").alias("revenue")
    )
    return seen.join(sold, "product_id", "full_outer").select(
        "product_id",
        f.coalesce("clicks", f.lit(0)).cast("long").alias("clicks"),
        f.coalesce("sold", f.lit(0)).cast("long").alias("sold"),
        f.coalesce("revenue", f.lit(0)).cast("decimal(18,2)").alias("revenue"),
    )


def clicks_by_product(_: Any, clicks: Any) -> Any:
    return clicks.groupBy("product_id").count()


class Input:
    """An input, and all rows that were appended to it."""

    def __init__(self, portal: BlockingPortal, stores: Stores, name: str, schema: ShardSchema, products: int) -> None:
        self._portal, self._schema, self._products = portal, schema, products
        self.shard = portal.call(stores.shard(name, schema))
        self._rand = np.random.default_rng(len(name))
        self._tables: list[pa.Table] = []
        self._next = self._upper = 0

    @property
    def rows(self) -> pa.Table:
        return pa.concat_tables(self._tables)

    def append(self, count: int) -> None:
        ids = np.arange(self._next, self._next + count, dtype=np.int64)
        products = self._rand.integers(0, self._products, count)
        columns: list[Any] = [ids, products]
        if self._schema is CLICKS:
            columns = [[f"click-{one}" for one in ids], products, ids]
        else:
            columns += [np.asarray(ids % 5 + 1, dtype=np.int32), [Decimal(int(one) % 1000) / 100 for one in ids]]
        fixed = [np.full(count, value, dtype=np.int64) for value in (self._upper, 1)]
        target = update_schema(self._schema)
        arrays = [pa.array(v, f.type) for v, f in zip([*columns, *fixed], target, strict=True)]
        rows = pa.Table.from_arrays(arrays, schema=target)
        part = self._portal.call(self.shard.write_part(rows))
        self._portal.call(self.shard.compare_and_append(self._upper, self._upper + 1, (part,), str(self._upper)))
        self._tables.append(rows)
        self._next, self._upper = self._next + count, self._upper + 1


class Meter:
    """CPU of driver, JVM and Python workers, and the number of jobs."""

    def __init__(self, spark: Any) -> None:
        self._jvm_pid = spark._jvm.java.lang.ProcessHandle.current().pid()
        self._scheduler = spark.sparkContext._jsc.sc().dagScheduler()

    def read(self) -> tuple[dict[str, float], int]:
        """Return (CPU ms by kind, jobs) since the start."""
        driver, jvm = 1000 * time.process_time(), stat(self._jvm_pid)
        ticks = [int(jvm[place]) for place in (11, 12, 13, 14)]
        cpu = dict(zip(KINDS, (driver, *(1000 * TICK_S * (a + b) for a, b in (ticks[:2], ticks[2:]))), strict=True))
        return cpu, self._scheduler.numTotalJobs()

    def since(self, before: tuple[dict[str, float], int]) -> tuple[dict[str, float], int]:
        now = self.read()
        return {kind: ms - before[0][kind] for kind, ms in now[0].items()}, now[1] - before[1]


def expected(clicks: pa.Table, lines: pa.Table) -> dict[str, pa.Table]:
    """Return both results by Arrow, sorted by product."""
    seen = clicks.group_by("product_id").aggregate([("product_id", "count")])
    sold = lines.group_by("product_id").aggregate([("quantity", "sum"), ("amount", "sum")])
    both = seen.join(sold, "product_id", join_type="full outer").sort_by("product_id")
    counts = [pc.fill_null(both[name], 0).cast(pa.int64()) for name in ("product_id_count", "quantity_sum")]
    revenue = pc.fill_null(both["amount_sum"].cast(pa.decimal128(18, 2)), Decimal("0.00"))
    whole = seen.sort_by("product_id")
    return {
        "conversion": pa.table([both["product_id"], *counts, revenue], ["product_id", "clicks", "sold", "revenue"]),
        "clicks_by_product": pa.table([whole["product_id"], whole["product_id_count"]], ["product_id", "count"]),
    }


def refresh_small(rows: int, products: int, every_s: float, rounds: int, warm: int) -> None:
    """Refresh both tables `rounds` times, one every `every_s`, after `warm` others; print their cost."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        portal = BlockingPortal("bench")
        stores = portal.call(open_stores(StoreUrls(f"file://{scratch}/objects", f"sqlite://{scratch}/consensus.db")))
        spark = build_session("bench-derived", "local[2]", scratch=scratch / "spark")
        inputs = [Input(portal, stores, n, s, products) for n, s in (("clicks", CLICKS), ("order_line", LINES))]
        p = Pipeline("bench")
        p.derived("conversion", key="product_id", inputs=("clicks", "order_line"), by="product_id")(conversion)
        p.derived("clicks_by_product", key="product_id", inputs=("clicks",))(clicks_by_product)
        for one in inputs:
            one.append(rows)
        found = [Derivation(portal, stores, spark, t, scratch / t.name / "mirrors" / t.name)
                 for t in p.derived_tables.values()]  # fmt: skip
        for way in found:
            way.open()
        meter, verified = Meter(spark), 0
        walls_s, spent, jobs = [], [], []
        for number in range(warm + rounds):
            for one in inputs:
                one.append(MOVED[one.shard.name])
            began_s, before = time.monotonic(), meter.read()
            for way in found:
                assert way.recompute()
            walls_s.append(time.monotonic() - began_s)
            if number >= warm:
                time.sleep(max(0.0, every_s - walls_s[-1]))
            cpu_ms, jobs_run = meter.since(before)
            spent.append(cpu_ms)
            jobs.append(jobs_run)
            want = expected(*(one.rows for one in inputs))
            for way in found:
                got = portal.call(way.writer.shard.snapshot(way.upper - 1)).sort_by("product_id")
                assert got.equals(want[way.table.name].cast(got.schema)), f"{way.table.name} is not exact"
                verified += got.num_rows
        workers = sum(kind == "workers" for kind in Tree(os.getpid()).kinds().values())
        cpu_ms = {kind: statistics.fmean(one[kind] for one in spent[warm:]) for kind in KINDS}
        total = sum(cpu_ms.values())
        print(f"{rows:,} rows an input, {products} products, {rounds} refreshes; {verified:,} rows verified")
        print(
            f"a refresh of both: CPU {total:.0f} ms ({', '.join(f'{k} {v:.0f}' for k, v in cpu_ms.items())}), "
            f"wall p50 {1000 * statistics.median(walls_s[warm:]):.0f} ms, {statistics.fmean(jobs[warm:]):.1f} jobs, "
            f"{workers} Python workers"
        )
        print(f"every {every_s} s: {total / every_s / 10:.1f} % of a core")
        spark.stop()
        portal.call(stores.aclose())
        portal.close()
