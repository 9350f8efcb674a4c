"""Cost of reading a shard from Python and of reading the same rows as plain Parquet: in one process, alternating.

    DuckDB      the same query over a view of the shard (`Table.to_duckdb`, created each time) and over plain files
    Arrow       `Table.to_arrow` and `Table.count`, and `pyarrow.parquet`
    Polars      the same query over `Table.scan_polars` and over `polars.scan_parquet`
    commands    `tidemill sql`, and a Python that only queries DuckDB over the plain files, in separate processes

CPU seconds, medians; of commands with all their threads and start-up. Every way's answer is compared first.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow.parquet as pq

import tidemill
from harbour import machine
from scan import fill, spread
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.spark.settings import StoreUrls

QUERIES = {
    "count": "SELECT count(*) FROM {}",
    "sum of one column": "SELECT sum(amount) FROM {}",
    "all columns": "SELECT max(id), max(note), sum(amount) FROM {}",
}

POLARS: dict[str, Callable[[polars.LazyFrame], polars.LazyFrame]] = {
    "count": lambda frame: frame.select(polars.len()),
    "sum of one column": lambda frame: frame.select(polars.col("amount").sum()),
    "filter": lambda frame: frame.filter(polars.col("id") < "1").select(polars.col("note").max()),
    "all columns": lambda frame: frame.select(polars.all().max()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", default="0,0.01", help="of the rows, changed since the last merge")
    options = parser.parse_args()
    print(machine())
    root = Path(tempfile.mkdtemp(prefix="scan-"))
    try:
        for share in map(float, options.shares.split(",")):
            measure(root / str(share), options.rows, share, options.rounds)
    finally:
        shutil.rmtree(root)


def measure(root: Path, count: int, share: float, rounds: int) -> None:
    root.mkdir()
    (root / "tidemill.toml").write_text(f'[node]\ndata = "{root}"\n')
    with BlockingPortal() as portal:
        filled = fill(StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db"), count, share)
        want, settled, _ = portal.call(filled)
    plain = root / "plain.parquet"
    pq.write_table(want, plain, row_group_size=128 << 10, compression="zstd")
    print(f"\n{count:,} rows in {settled} settled parts, {share:.0%} of them changed since; every way read them all")
    print(f"{'':>28}{'plain':>20}{'tidemill':>28}    CPU s, × plain")
    with tidemill.connect(root / "tidemill.toml") as cluster, duckdb.connect() as connection:
        table = cluster.table("scanned")
        found = table.to_arrow().sort_by("id")
        assert found.equals(want.sort_by("id")) and table.count() == count, "other rows"

        def viewed(query: str) -> Any:
            table.to_duckdb(connection)
            return connection.sql(query.format("scanned")).fetchall()

        def over(query: str) -> Any:
            return connection.sql(query.format(f"read_parquet('{plain}')")).fetchall()

        for what, query in QUERIES.items():
            assert viewed(query) == over(query), what
            show(f"DuckDB, {what}", rounds, own, lambda q=query: over(q), lambda q=query: viewed(q))
        show("Arrow, count", rounds, own, lambda: pq.ParquetFile(plain).metadata.num_rows, table.count)
        for what, columns in (("one column", ["amount"]), ("all columns", None)):
            read = lambda c=columns: pq.ParquetFile(plain).read(columns=c, use_threads=False)  # noqa: E731
            show(f"Arrow, {what}", rounds, own, read, lambda c=columns: table.to_arrow(c))
        for what, ask in POLARS.items():
            over_file = lambda a=ask: a(polars.scan_parquet(plain)).collect()  # noqa: E731
            over_table = lambda a=ask: a(table.scan_polars()).collect()  # noqa: E731
            assert over_file().equals(over_table()), what
            show(f"Polars, {what}", rounds, own, over_file, over_table)
    query, files = QUERIES["count"], f"read_parquet('{plain}')"
    program = f"import duckdb; print(duckdb.sql({query.format(files)!r}).fetchall())"
    asked = ["-m", "tidemill", "sql", query.format("scanned"), "--json", "--config", f"{root}/tidemill.toml"]
    show("command, count", rounds, of_children, lambda: run("-c", program), lambda: run(*asked))


def show(what: str, rounds: int, clock: Callable[[], float], *ways: Callable[[], Any]) -> None:
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 1):
        for times, do in zip(taken, ways, strict=True):
            before = clock()
            do()
            times.append(clock() - before)
    plain, ours = (statistics.median(times[1:]) for times in taken)
    beside = f"{ours:14.4f} {ours / plain:6.2f}× ±{spread(taken[1][1:]):4.0%}"
    print(f"{what:>28}{plain:14.4f} ±{spread(taken[0][1:]):4.0%}{beside}")


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
