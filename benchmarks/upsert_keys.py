"""`./dev bench upsert_keys [--keys 1000000,10000000] [--batches …]`: the cost of a table by its number of keys.

Method: for each count a table of that many keys, merged as the maintenance job leaves it, and a separate driver. First,
in a separate process, the mirror: built from the parts, and opened again from its files (CPU, and resident memory: all
of it, and without the pages of mapped files, which the system takes back when it wants). Then batches of updates of
random keys, one time each, bound → visible, the tables in turns. Afterwards each table is compared with a replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harbour import machine, percentile
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from tidemill.spark.types import stream_schema
from upsert import FEWEST_REPEATS, REPEATS, Lane
from upsert_load import KEY, SCHEMA

LOOK_S = 0.02


class Keys(Lane):
    """`memory`: of making the mirror, and of opening it."""

    def __init__(self, root: Path, urls: StoreUrls, stores: Any, keys: int, args: argparse.Namespace) -> None:
        asked = argparse.Namespace(**{**vars(args), "keys": keys})
        super().__init__(root, urls, stores, "auto", asked, name=f"keys{keys}")
        self.keys = keys
        self.mirror: list[dict[str, Any]] = []
        self.samples: dict[int, list[tuple[float, float]]] = {}

    async def fill(self, directory: Path) -> None:
        await self.load.fill()
        for _ in range(2):
            command = [
                sys.executable,
                __file__,
                "--mirror",
                self.load.name,
                str(directory),
                self._urls.objects,
                self._urls.consensus,
            ]
            found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            self.mirror.append(json.loads(found.stdout))

    async def one(self, records: int) -> None:
        self.tree.begin()
        wait_s = await self.batch(records)
        self.samples.setdefault(records, []).append((wait_s * 1e3, sum(self.tree.spent().cpu_s.values()) * 1e3))


def mirror(name: str, directory: Path, urls: StoreUrls) -> dict[str, Any]:
    """Hydrate in a separate process, and keep the files."""
    with BlockingPortal() as portal:
        stores = portal.call(open_stores(urls))
        shard = portal.call(stores.shard(name, stream_schema(SCHEMA, KEY)))
        table = TableWriter(portal, stores, shard, directory / name)
        peak, ended = _mib("RssAnon"), threading.Event()

        def look() -> None:
            nonlocal peak
            while not ended.wait(LOOK_S):
                peak = max(peak, _mib("RssAnon"))

        watching = threading.Thread(target=look)
        watching.start()
        before_mib, began_s = _mib("RssAnon"), time.process_time()
        table.hydrate()
        cpu_s = time.process_time() - began_s
        ended.set()
        watching.join()
        table.save()
        portal.call(stores.aclose())
        return {
            "cpu_s": round(cpu_s, 2),
            "before_mib": before_mib,
            "anonymous_peak_mib": peak,
            "peak_mib": _mib("VmHWM"),
            "rows": len(table.operator.mirror),
        }


def _mib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(name))


async def run(args: argparse.Namespace, root: Path) -> list[Keys]:
    urls = StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
    stores = await open_stores(urls)
    tables = [Keys(root, urls, stores, int(keys), args) for keys in args.keys.split(",")]
    try:
        for table in tables:
            await table.fill(root / "mirrors")
            print(f"{table.keys:12,} keys   the mirror, made {table.mirror[0]}, opened {table.mirror[1]}", flush=True)
            await table.start()
        for records in [int(n) for n in args.batches.split(",") if n]:
            for number in range(2 + REPEATS.get(records, FEWEST_REPEATS)):
                for table in tables:
                    await table.one(records)
                    if number < 2:
                        table.samples[records].pop()
            tell(tables, records)
        for table in tables:
            print(f"{table.keys:12,} keys   verified {await table.verified():,}", flush=True)
    finally:
        for table in tables:
            await table.stop()
    await stores.aclose()
    return tables


def tell(tables: list[Keys], records: int) -> None:
    least = percentile([wait for wait, _ in tables[0].samples[records]], 0.5)
    for table in tables:
        waits, cpu = zip(*table.samples[records], strict=True)
        p50, p90 = percentile(waits, 0.5), percentile(waits, 0.9)
        print(
            f"{table.keys:12,} keys   {records:8,} a batch   bound → visible p50 {p50:7.1f}, p90 {p90:7.1f} ms"
            f"   CPU {sum(cpu) / len(cpu):7.1f} ms   {p50 / least:5.2f} × of {tables[0].keys:,}   of {len(waits)}",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["--mirror"]:
        name, directory, objects, consensus = sys.argv[2:]
        print(json.dumps(mirror(name, Path(directory), StoreUrls(objects, consensus))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keys", default="1000000,10000000", help="counts with commas; the first is what others are to"
    )
    parser.add_argument("--batches", default="1000,10000,100000", help="sizes with commas; empty: none")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--master", default="local[2]")
    args = parser.parse_args()
    print(f"upsert_keys   {machine()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="keys-") as directory:
        asyncio.run(run(args, Path(directory)))


if __name__ == "__main__":
    main()
