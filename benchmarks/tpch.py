"""TPC-H's Q1, Q3 and Q13 as derived tables under refresh streams, compared with a batch recompute of the same query.

Orders and lines change by RF1 and RF2 (tests/support/spark/workloads/tpch.py). After each the derived tables advance,
and the same functions run in the same Spark session on plain Parquet of the same rows; the order alternates. CPU is of
this process, its JVM and its workers. After each, every row of every derived table is compared with DuckDB's answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from harbour import machine
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.parts.schema import update_schema
from tidemill.spark import Pipeline
from tidemill.spark.derived.derivation import Derivation
from tidemill.spark.session.session import build_session
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import Stores, open_stores
from tidemill.spark.types import stream_schema
from upsert_tree import Tree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tpch as tests_tpch

QUERIES = {"Q1": ("q1",), "Q3": ("q3", "q3_top"), "Q13": ("q13_customers", "q13")}
"""Query → the derived tables that keep it; the last has its answer."""


class Bench:
    def __init__(self, portal: BlockingPortal, stores: Stores, spark: Any, scratch: Path, world: Any) -> None:
        self.portal, self.spark, self.world, self.scratch = portal, spark, world, scratch
        p = Pipeline("tpch")
        tests_tpch.derive(p)
        self.tables = p.derived_tables
        self.shards = {
            name: portal.call(stores.shard(name, stream_schema(schema, tests_tpch.KEYS[name])))
            for name, schema in tests_tpch.SCHEMAS.items()
        }
        self.derived = {
            name: Derivation(portal, stores, spark, table, scratch / "driver" / "mirrors" / name)
            for name, table in self.tables.items()
        }
        self.upper = 0
        self.tree = Tree(os.getpid())

    def append(self, changes: dict[str, str], diff: int) -> None:
        """All shards move by 1 ms; these rows come (1) or go (−1)."""
        lower, self.upper = self.upper, self.upper + 1
        for name, shard in self.shards.items():
            parts = []
            if name in changes:
                rows = f"select *, {lower}::bigint as t, {diff}::bigint as d from ({changes[name]})"
                found = self.world.connection.sql(rows).to_arrow_table()
                schema = update_schema(shard.schema)
                table = pa.Table.from_arrays(
                    [c.cast(f.type) for c, f in zip(found.columns, schema, strict=True)], schema=schema
                )
                parts.append(self.portal.call(shard.write_part(table)))
            self.portal.call(shard.compare_and_append(lower, self.upper, parts, str(lower)))

    def cpu_s(self, work: Callable[[], object]) -> float:
        self.tree.begin()
        work()
        return sum(self.tree.spent().cpu_s.values())

    def keep(self, name: str) -> None:
        one = self.derived[name]
        if one.writer is None:
            one.open()
        if not one.recompute():
            raise SystemExit(f"DOES NOT HOLD: nothing to do, table={name}")

    def write_plain(self) -> None:
        for name in self.shards:
            self.world.connection.execute(f"copy {name} to '{self.scratch}/{name}.parquet' (compression zstd)")

    def batch(self, name: str) -> pa.Table:
        found: pa.Table = self._frame(name).toArrow()
        return found

    def _frame(self, name: str) -> Any:
        if name in self.shards:
            return self.spark.read.parquet(f"{self.scratch}/{name}.parquet")
        table = self.tables[name]
        return table.function(self.spark, *(self._frame(each) for each in table.inputs))

    def verify(self) -> int:
        """Rows that are equal. Raises SystemExit."""
        verified = 0
        for name, sql in tests_tpch.SQL.items():
            writer = self.derived[name].writer
            assert writer is not None
            columns = [c.name for c in writer.schema.columns]
            held = self.portal.call(writer.shard.snapshot(self.upper - 1)).select(columns)
            wanted = self.world.connection.execute(f"select {', '.join(columns)} from ({sql})").fetchall()
            if set(zip(*(c.to_pylist() for c in held.columns), strict=True)) != set(wanted) or len(held) != len(wanted):
                raise SystemExit(f"DOES NOT HOLD: table={name} upper={self.upper}")
            verified += len(wanted)
        return verified


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--streams", type=int, default=3, help="pairs of RF1 and RF2 that are measured")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        world = tests_tpch.World(scratch / "data", options.scale, options.streams + 1)
        portal = BlockingPortal("bench")
        stores = portal.call(open_stores(StoreUrls(f"file://{scratch}/objects", f"sqlite://{scratch}/consensus.db")))
        spark = build_session("bench-tpch", "local[2]", scratch=scratch / "spark")
        bench = Bench(portal, stores, spark, scratch, world)
        bench.append({name: f"from {name}" for name in tests_tpch.KEYS}, 1)
        for name in bench.derived:
            bench.keep(name)
        kept: dict[str, list[float]] = {query: [] for query in QUERIES}
        anew: dict[str, list[float]] = {query: [] for query in QUERIES}
        verified = bench.verify()
        for number in range(2 * (options.streams + 1)):
            insert = number % 2 == 0
            bench.append(world.insert(1) if insert else world.delete(1), 1 if insert else -1)
            bench.write_plain()
            for query, tables in QUERIES.items():
                work = [(kept, lambda tables=tables: [bench.keep(name) for name in tables]),
                        (anew, lambda tables=tables: bench.batch(tables[-1]))]  # fmt: skip
                for into, each in work if number % 4 < 2 else work[::-1]:
                    into[query].append(bench.cpu_s(each))
            verified += bench.verify()
        orders, lines = (
            world.connection.execute(f"select count(*) from {n}").fetchone()[0] for n in ("orders", "lineitem")
        )
        print(
            f"scale {options.scale:g}: {orders:,} orders, {lines:,} lines; {world.orders_a_set} orders come or go in a"
            f" refresh; {2 * options.streams} of them after {verified:,} rows were found equal, median CPU-s"
        )
        for query, tables in QUERIES.items():
            ours, batch = (statistics.median(each[query][2:]) for each in (kept, anew))  # the first pair: cold plans
            how = ", ".join(f"{n} {'by group' if bench.tables[n].by else 'whole'}" for n in tables)
            print(f"{query:>4}: kept {ours:.2f}, batch {batch:.2f}, ratio {ours / batch:.2f}   ({how})")
        spark.stop()
        portal.call(stores.aclose())
        portal.close()


if __name__ == "__main__":
    main()
