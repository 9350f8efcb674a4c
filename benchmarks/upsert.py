"""Catching up and following: a keyed topic into an exact table, through a pipeline's own driver process.

    ./dev bench upsert [--rows N] [--keys K] [--by auto,inline,tasks] [--waiting inserts,updates]
                       [--batches 1000,10000,100000] [--json]

Method: a driver (with a JVM and workers, if Spark computes the steps) runs next to this process, which only produces
and binds. First N records with K distinct keys, then N updates of random keys wait in the topic, unbound; all are bound
together, 25,000 records per binding, and the clock runs until the shard has the last time. Then batches of random
updates, one time each: bound → visible. CPU is that of the driver and everything below it, from /proc; resident memory
is each process's own peak within the phase. `--by` selects where a step is computed: in the driver (inline), in Spark
tasks, or as the product chooses (auto); each has a separate topic and driver. After every phase the table is compared
with a replay of the topic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harbour import machine, open_created, percentile
from tidemill.shards.parts.consolidate import merge_updates, sum_contents
from tidemill.shards.parts.schema import part_schema
from tidemill.shards.registry import open_shard
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from upsert_load import KEY, SCHEMA, Load
from upsert_tree import Tree

HERE = Path(__file__).parent
INLINE_ROWS = {"auto": -1, "inline": 1 << 60, "tasks": 0}
RECORDS_PER_BINDING = 25_000
WARM_UP_RECORDS = 1_000
WARM_UP_S = 0.3
DEADLINE_S = 900.0
REPEATS = {1_000: 30, 10_000: 15}
FEWEST_REPEATS = 7
SUMMED_AT_ONCE = 2_000_000

PIPELINE = """
def build(p):
    p.table({name!r}, p.topic({name!r}, key={key!r}, schema={schema!r}))
"""


class Lane:
    """One topic, one table, one driver."""

    def __init__(
        self,
        root: Path,
        urls: StoreUrls,
        stores: Any,
        by: str,
        args: argparse.Namespace,
        text: str = PIPELINE,
        name: str = "clicks",
    ) -> None:
        self.by, self._args, self._urls, self._stores = by, args, urls, stores
        self.load = Load(stores, f"{name}_{by}", args.partitions, args.keys)
        self._root = root
        self._text = text
        self._draw = np.random.default_rng(7)
        self._driver: subprocess.Popen[bytes]
        self._log = root / f"driver-{name}-{by}.log"

    async def start(self) -> None:
        """Wait until the pipeline runs, and Spark's batches where Spark computes the steps."""
        await self.load.open()
        name = self.load.name
        file = self._root / f"{name}.py"
        file.write_text(self._text.format(name=name, key=KEY, schema=SCHEMA))
        command = [
            sys.executable, str(HERE / "upsert_driver.py"), str(INLINE_ROWS[self.by]),
            "--objects", self._urls.objects, "--consensus", self._urls.consensus, "--pipeline", str(file),
            "--name", f"bench-{name}", "--master", self._args.master, "--scratch", str(self._root / f"s-{name}"),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = self._driver.pid
        self.tree = Tree(self.pid)
        until_s = time.monotonic() + DEADLINE_S
        runs = "query runs" if self.by == "tasks" else "pipeline runs"
        while runs not in self._log.read_text():
            if self._driver.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the driver did not start: {self._log.read_text()[-2000:]}")
            await self._produce(WARM_UP_RECORDS)
            await self.load.bind()
            await asyncio.sleep(WARM_UP_S)
        await self.batch(RECORDS_PER_BINDING)

    async def stop(self) -> None:
        await self.load.aclose()
        self._driver.terminate()
        await asyncio.to_thread(self._driver.wait)

    async def visible(self, time_ms: int) -> None:
        s = self._stores
        until_s = time.monotonic() + DEADLINE_S
        shard = await open_created(s.consensus, s.objects, s.clock, s.rand, self.load.name, until_s)
        while await shard.wait_upper(time_ms, 1.0) <= time_ms:
            if self._driver.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the table did not come there: {self._log.read_text()[-2000:]}")
        await shard.aclose()

    async def verified(self) -> int:
        """Sum batch after batch, as compaction does: all updates together would be gigabytes."""
        s = self._stores
        shard = await open_shard(s.consensus, s.objects, s.clock, s.rand, self.load.name)
        _, upper = await shard.frontiers()
        held, rows = [part_schema(shard.schema).empty_table()], 0
        for batch in await shard.batches_until(upper - 1):
            held.append(await shard.read_batch(batch, batch.lower, batch.upper))
            rows += held[-1].num_rows
            if rows > SUMMED_AT_ONCE:
                held, rows = (
                    [await asyncio.to_thread(merge_updates, shard.schema, pa.concat_tables(held), batch.upper - 1)],
                    0,
                )
        count = self.load.verify(sum_contents(shard.schema, pa.concat_tables(held)))
        await shard.aclose()
        return count

    async def catch_up(self, what: str) -> dict[str, Any]:
        rows, keys = self._args.rows, self._args.keys
        chosen = np.arange(rows) % keys if what == "inserts" else self._draw.integers(0, keys, rows)
        if what == "inserts":
            self._draw.shuffle(chosen)
        await self.load.produce(chosen, RECORDS_PER_BINDING)
        self.tree.begin()
        began_s = time.monotonic()
        await self.visible(await self.load.bind())
        wall_s = time.monotonic() - began_s
        spent = self.tree.spent()
        return {
            "by": self.by,
            "what": what,
            "rows": rows,
            "cpu_s_per_million": {name: round(cpu_s * 1e6 / rows, 2) for name, cpu_s in spent.cpu_s.items()},
            "rows_per_s": round(rows / wall_s),
            "peak_mib": spent.peak_mib,
            "verified": await self.verified(),
        }

    async def _produce(self, records: int) -> None:
        await self.load.produce(self._draw.integers(0, self._args.keys, records), records)

    async def batch(self, records: int) -> float:
        """Seconds from bound to visible."""
        await self._produce(records)
        began_s = time.monotonic()
        await self.visible(await self.load.bind())
        return time.monotonic() - began_s

    async def batches(self, records: int) -> dict[str, Any]:
        for _ in range(2):
            await self.batch(records)
        waits_ms: list[float] = []
        cpu_ms: list[float] = []
        for _ in range(REPEATS.get(records, FEWEST_REPEATS)):
            self.tree.begin()
            waits_ms.append(await self.batch(records) * 1e3)
            cpu_ms.append(sum(self.tree.spent().cpu_s.values()) * 1e3)
        return {
            "by": self.by,
            "records": records,
            "p50_ms": round(percentile(waits_ms, 0.5), 1),
            "p90_ms": round(percentile(waits_ms, 0.9), 1),
            "cpu_ms": round(sum(cpu_ms) / len(cpu_ms), 1),
            "repeats": len(waits_ms),
            "verified": await self.verified(),
        }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    out: dict[str, Any] = {"catch_up": [], "batches": []}
    with tempfile.TemporaryDirectory(prefix="upsert-") as directory:
        root = Path(directory)
        urls = StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
        stores = await open_stores(urls)
        for by in args.by.split(","):
            lane = Lane(root, urls, stores, by, args)
            await lane.start()
            try:
                for what in args.waiting.split(",") if args.rows else ():
                    out["catch_up"].append(await lane.catch_up(what))
                    tell(out["catch_up"][-1:], [], args)
                for records in [int(n) for n in args.batches.split(",") if n]:
                    out["batches"].append(await lane.batches(records))
                    tell([], out["batches"][-1:], args)
            finally:
                await lane.stop()
        await stores.aclose()
    return out


def tell(catch_up: list[dict[str, Any]], batches: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        return
    for r in catch_up:
        cpu, peak = r["cpu_s_per_million"], r["peak_mib"]
        print(
            f"{r['by']:7} {r['what']:8} {sum(cpu.values()):6.2f} CPU-s per million {cpu}   {r['rows_per_s']:9,} rows/s"
            f"   peak MiB {peak}   verified {r['verified']:,}",
            flush=True,
        )
    for r in batches:
        print(
            f"{r['by']:7} {r['records']:8,} a batch   bound → visible p50 {r['p50_ms']:7.1f}, p90 {r['p90_ms']:7.1f} ms"
            f"   CPU {r['cpu_ms']:7.1f} ms   of {r['repeats']}   verified {r['verified']:,}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="waiting, of inserts and of updates each; 0: none")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--waiting", default="inserts,updates", help="what waits, in turn")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--by", default="auto", help="some of auto, inline, tasks, with commas")
    parser.add_argument("--batches", default="1000,10000,100000", help="sizes with commas; empty: none")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.by.split(",")) - set(INLINE_ROWS):
        parser.error(f"--by knows {', '.join(INLINE_ROWS)}, not {', '.join(sorted(unknown))}")
    if unknown := set(args.waiting.split(",")) - {"inserts", "updates"}:
        parser.error(f"--waiting knows inserts and updates, not {', '.join(sorted(unknown))}")
    if not args.json:
        print(f"upsert   {machine()}   {args.keys:,} keys, {args.partitions} partitions", flush=True)
    result = asyncio.run(run(args))
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
