"""`./dev bench lake_reads`: other engines read a published table, compared with plain Parquet of the same rows.

A table of N keys in parts of a million rows, published in format 3, and its rows as plain Parquet files of a million
rows with the defaults of the library. `merged` is the table as a merge leaves it. `waiting` is the table after a tenth
of its keys were updated: the old rows are in deletion vectors. The plain files have the same rows in both.

Each engine is a process that has started. A query counts the rows, and adds the amounts and the lengths of the texts.
The two forms take turns, after one query of each that does not count. Elapsed time includes the planning of the query.
All results are compared with what was written.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harbour import machine
from lake import PART_ROWS, SCHEMA, rows, update
from support.lake.readers import ForeignReader
from support.lake.world import LakeWorld
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import contents_schema

ENGINES = ("duckdb", "spark")
WAITING = 0.1
QUERIES = {
    "count": "count(*) AS n, 0 AS amounts, 0 AS lengths",
    "sum of one column": "count(*) AS n, CAST(sum(amount) AS BIGINT) AS amounts, 0 AS lengths",
    "all columns": "count(*) AS n, CAST(sum(amount + id) AS BIGINT) AS amounts,"
    " CAST(sum(length(note)) AS BIGINT) AS lengths",
}


async def write_plain(shard: LogShard, directory: Path) -> None:
    """Write the newest contents as plain Parquet."""
    directory.mkdir()
    _, upper = await shard.frontiers()
    table = (await shard.snapshot(upper - 1)).select(contents_schema(SCHEMA).names)
    for at, start in enumerate(range(0, table.num_rows, PART_ROWS)):
        pq.write_table(table.slice(start, PART_ROWS), directory / f"{at}.parquet", compression="zstd")


async def fill(world: LakeWorld, amounts: np.ndarray) -> LogShard:
    """Write the table, and merge it."""
    shard = await world.table(schema=SCHEMA)
    for start in range(0, len(amounts), PART_ROWS):
        ids = np.arange(start, min(len(amounts), start + PART_ROWS), dtype=np.int64)
        _, upper = await shard.frontiers()
        await shard.compare_and_append(
            upper, upper + 1, [await shard.write_part(rows(ids, amounts[ids], upper, 1))], ""
        )
    _, upper = await shard.frontiers()
    await shard.downgrade_since("retention", 1, upper - 1)
    while await compact_once(shard, world.objects, world.rand) is not None:
        pass
    return shard


def compare(engine: ForeignReader, metadata: str, plain: Path, amounts: np.ndarray, turns: int) -> None:
    """Print the times of each query on both forms. Assert that they return what was written."""
    ids = np.arange(len(amounts))
    digits = 41  # of a note: "n", and the amount padded to 40
    want = {
        "count": (len(amounts), 0, 0),
        "sum of one column": (len(amounts), int(amounts.sum()), 0),
        "all columns": (len(amounts), int(amounts.sum() + ids.sum()), len(amounts) * digits),
    }
    for name, select in QUERIES.items():
        taken: dict[str, list[float]] = {"plain": [], "published": []}
        for turn in range(turns + 1):
            for form in taken:
                source = {"metadata": metadata} if form == "published" else {"parquet": str(plain)}
                began = time.monotonic()
                (found,) = engine.ask({**source, "select": select}).to_pylist()
                if turn:
                    taken[form].append(time.monotonic() - began)
                assert tuple(found.values()) == want[name], (engine.name, form, name, found, want[name])
        ratios = [b / a for a, b in zip(taken["plain"], taken["published"], strict=True)]
        medians = {form: statistics.median(each) for form, each in taken.items()}
        print(
            f"  {engine.name:>8} {name:>18}  plain {medians['plain']:.3f} s, published {medians['published']:.3f} s:"
            f" {statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


async def measure(options: argparse.Namespace, engines: list[ForeignReader]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-lake-reads-") as directory:
        world, draw = LakeWorld(Path(directory) / "bucket"), np.random.default_rng(1)
        amounts = np.arange(options.keys, dtype=np.int64)
        shard = await fill(world, amounts)
        for state in ("merged", "waiting"):
            if state == "waiting":
                chosen = draw.choice(options.keys, int(options.keys * WAITING), replace=False)
                await update(shard, amounts, chosen)
            stored = await world.publish(await world.publisher())
            dead = sum(each.dead for each in stored.evaluation.states.values()) if stored.evaluation else 0
            print(f"{state}: {options.keys:,} rows, {len(shard.state.batches)} batches, {dead:,} rows in vectors")
            plain = Path(directory) / state
            await write_plain(shard, plain)
            for engine in engines:
                compare(engine, await world.location(), plain, amounts, options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench lake_reads", description=__doc__)
    parser.add_argument("--keys", type=int, default=4_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lake-engines-") as scratch:
        engines = []
        for name in options.engines:
            try:
                engines.append(ForeignReader(name, Path(scratch)))
            except pytest.skip.Exception as why:
                print(why)
        asyncio.run(measure(options, engines))
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
