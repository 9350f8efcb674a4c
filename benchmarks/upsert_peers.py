"""`./dev bench upsert_peers [--keys N] [--rounds N] [--peers delta,spark]`: a keyed table kept current, compared with
other systems.

    delta       delta-rs MERGE (`deltalake`), in a separate process
    delta_json  the same, given the records as JSON: read by Arrow, the last of each key kept
    spark       a left anti join of the table with the updates, their union, written over the table (Parquet), in a
                separate session

Method: all hold the same N rows. Each round draws `--records` updates of random keys. Tidemill gets them as JSON
records of a topic, and its whole driver is counted from bound to visible (fetch, decoding, resolution, part, append;
its JVM too). The other peers get the rows ready as columns, one row a key, in a file (Arrow for delta, Parquet for
Spark). They take turns within a round; CPU is that of each one's processes, from /proc. At the end all tables are
compared with a replay. The later merge of tidemill's parts by the maintenance job is done then, and reported
separately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.feather as feather
import pyarrow.parquet as pq

from harbour import machine
from tidemill.base.clock import Rand
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.registry import open_shard
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from upsert import Lane
from upsert_load import check, rows_of, value
from upsert_tree import Tree

HERE = Path(__file__).parent
PEERS = ("delta", "delta_json", "spark")
WARM_UP_ROUNDS = 1
FILL_ROWS = 1_000_000


class Peer:
    """A child that holds the table, and the directory of the files that it gets."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self._directory = root / name
        self._directory.mkdir()
        self._log = self._directory / "log"
        self._files = 0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "upsert_peer.py"), name, str(self._directory / "table")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.tree = Tree(self._process.pid)

    def ask(self, what: str, path: Path) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, str(path)]) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise SystemExit(f"{self.name} failed: {self._log.read_text()[-2000:]}")

    def rows(self, keys: Any, numbers: Any) -> Path:
        """A file of rows, of each key one."""
        path, rows = self._path(), rows_of(keys, numbers)
        if self.name == "spark":
            pq.write_table(rows, path)
        else:
            feather.write_feather(rows, path, compression="uncompressed")
        return path

    def updates(self, chosen: Any, last: Any) -> Path:
        """Write the updates of the keys in the order of their records, with their numbers in `last`."""
        if self.name != "delta_json":
            touched = np.unique(chosen)
            return self.rows(touched, last[touched])
        path = self._path()
        numbers = last[chosen]  # each record of a key has its last number: as many bytes as the others
        path.write_bytes(b"\n".join(value(*pair) for pair in zip(chosen.tolist(), numbers.tolist(), strict=True)))
        return path

    def _path(self) -> Path:
        self._files += 1
        return self._directory / f"{self._files}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


async def run(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    urls = StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
    stores = await open_stores(urls)
    lane = Lane(root, urls, stores, "auto", args)
    await lane.load.fill()
    await lane.start()
    peers = [Peer(name, root) for name in args.peers.split(",") if name]
    draw = np.random.default_rng(11)
    cpu_s: dict[str, list[float]] = {name: [] for name in ("tidemill", *(p.name for p in peers))}
    wall_s: dict[str, list[float]] = {name: [] for name in cpu_s}
    try:
        # Our warm-up changed some keys: peers begin with what is there now.
        keys = np.arange(args.keys, dtype=np.int64)
        for peer in peers:
            for begin in range(0, args.keys, FILL_ROWS):
                some = keys[begin : begin + FILL_ROWS]
                peer.ask("append", peer.rows(some, lane.load.last[some]))
        for number in range(WARM_UP_ROUNDS + args.rounds):
            chosen = draw.integers(0, args.keys, args.records)
            await lane.load.produce(chosen, args.records)
            files = {peer.name: peer.updates(chosen, lane.load.last) for peer in peers}
            lane.tree.begin()
            began_s = time.monotonic()
            await lane.visible(await lane.load.bind())
            taken = {"tidemill": (time.monotonic() - began_s, sum(lane.tree.spent().cpu_s.values()))}
            for peer in peers:
                peer.tree.begin()
                began_s = time.monotonic()
                await asyncio.to_thread(peer.ask, "merge", files[peer.name])
                taken[peer.name] = (time.monotonic() - began_s, sum(peer.tree.spent().cpu_s.values()))
                files[peer.name].unlink()
            if number >= WARM_UP_ROUNDS:
                for name, (wall, cpu) in taken.items():
                    wall_s[name].append(wall)
                    cpu_s[name].append(cpu)
        verified = {"tidemill": await lane.verified()}
        for peer in peers:
            path = root / f"contents-{peer.name}.parquet"
            await asyncio.to_thread(peer.ask, "contents", path)
            verified[peer.name] = check(pq.read_table(path), lane.load.last)
    finally:
        await lane.stop()
        for peer in peers:
            peer.stop()
    merging = await merge(stores, lane.load.name)
    await stores.aclose()
    return {"cpu_s": cpu_s, "wall_s": wall_s, "verified": verified, "merging": merging}


async def merge(stores: Any, name: str) -> dict[str, Any]:
    """Do the later work of the maintenance job in one run; return CPU seconds, merges, and rows that they read."""
    shard = await open_shard(stores.consensus, stores.objects, stores.clock, stores.rand, name)
    await shard.downgrade_since("bench", 1, (await shard.frontiers())[1] - 1)
    merges = rows = 0
    began_s = time.process_time()
    while (done := await compact_once(shard, stores.objects, Rand())) is not None:
        merges, rows = merges + done.shown, rows + done.rows_in
    found = {"cpu_s": round(time.process_time() - began_s, 2), "merges": merges, "rows_in": rows}
    await shard.aclose()
    return found


def tell(found: dict[str, Any], args: argparse.Namespace) -> None:
    ours = statistics.median(found["cpu_s"]["tidemill"])
    print(f"{args.records:,} updates a batch on {args.keys:,} keys, median of {args.rounds} rounds in turns")
    for name, samples in found["cpu_s"].items():
        middle = statistics.median(samples)
        ratio = "" if name == "tidemill" else f"   ours / it {ours / middle:5.3f}, it / ours {middle / ours:5.1f}"
        print(
            f"  {name:10} CPU {middle:7.2f} s ({min(samples):.2f} to {max(samples):.2f})"
            f"   wall {statistics.median(found['wall_s'][name]):7.2f} s   verified {found['verified'][name]:,}{ratio}"
        )
    merging = found["merging"]
    print(
        f"  merging ours afterwards, of {WARM_UP_ROUNDS + args.rounds} batches and a warm-up: {merging['cpu_s']} CPU-s"
        f" in {merging['merges']} merges of {merging['rows_in']:,} rows"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--records", type=int, default=100_000, help="updates a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="delta,spark", help="some of delta, delta_json, spark, with commas")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := {name for name in args.peers.split(",") if name} - set(PEERS):
        parser.error(f"--peers knows {', '.join(PEERS)}, not {', '.join(sorted(unknown))}")
    if not args.json:
        print(f"upsert_peers   {machine()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        found = asyncio.run(run(args, Path(directory)))
    if args.json:
        print(json.dumps(found))
    else:
        tell(found, args)


if __name__ == "__main__":
    main()
