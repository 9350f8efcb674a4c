"""`./dev bench steady [--for S] [--rate N] [--keys K]`: one keyed table under a steady load; what it costs stays level.

Method: a node and a pipeline's driver as `tidemill up` starts them (directory and SQLite, one table, topic retention of
five minutes, everything else as the product has it). A Kafka client sends `--rate` updates a second of random keys,
110 B each. Once a minute: bytes and objects of the bucket, bytes of consensus, each process's peak of resident memory
within the minute, processor time, and bound → visible, taken a few times a second from the shard itself. At the end
the load stops, the table drains and is compared with a replay of what was sent.

Holds when no figure of the last minutes is more than a tenth above that of the minutes from `--settled` on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import numpy as np

import paths  # noqa: F401
from harbour import machine, open_created, percentile
from kafka_load import producer
from support.ports import free_port
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.config.config import parse
from tidemill.consensus.factory import open_consensus
from tidemill.node.supervise.processes import start_all
from tidemill.node.supervise.supervisor import Supervisor
from tidemill.objects.factory import open_objects
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_remap
from upsert import PIPELINE
from upsert_load import KEY, SCHEMA, check, value
from upsert_tree import Tree

NAME = "clicks"
PARTITIONS = 4
RETENTION_MS = 300_000
TICK_S = 0.02
START_S = 180.0
DRAIN_S = 300.0
WINDOW = 10
"""Minutes that are averaged on either side: the bucket goes up and down with merges and collections."""
TOLERANCE = 0.10
SLACK = {"bucket_mb": 4.0, "objects": 100.0, "consensus_mb": 1.0, "cpu_s": 2.0, "p50_ms": 10.0} | dict.fromkeys(
    ("driver_mib", "jvm_mib", "workers_mib", "node_mib"), 16.0
)
"""Tolerance of a figure, independent of its size."""


class Cluster:
    """A node and a driver in one directory, and this process's own way into its stores."""

    def __init__(self, home: Path) -> None:
        self.home = home
        first = free_port(2)
        file = home / "pipeline.py"
        file.write_text(PIPELINE.format(name=NAME, key=KEY, schema=SCHEMA))
        self.kafka = f"127.0.0.1:{first + 1}"
        values = {
            "node": {"data": str(home), "http": f"127.0.0.1:{first}", "kafka": self.kafka},
            "topics": {NAME: {"partitions": PARTITIONS, "retention_ms": RETENTION_MS}},
            "pipeline": {"steady": {"file": str(file)}},
            "spark": {"master": "local[2]"},
        }
        self.config = parse(values, origin="")
        self.supervisor: Supervisor
        self.shard: LogShard

    async def start(self) -> None:
        """Wait until the pipeline runs and its table exists."""
        failed: list[BaseException] = []
        self.supervisor = start_all(self.config, SystemClock(), failed.append)
        log = self.home / "logs" / "pipeline-steady.log"
        until_s = time.monotonic() + START_S
        while not log.exists() or "pipeline runs" not in log.read_text():
            if failed or time.monotonic() > until_s:
                raise SystemExit(f"the pipeline did not start: {failed or log}")
            await asyncio.sleep(0.2)
        clock, rand = SystemClock(), Rand()
        self._objects = await open_objects(self.config.objects_url, clock, rand)
        self._consensus = await open_consensus(self.config.consensus_url, clock, rand)
        self.shard = await open_created(self._consensus, self._objects, clock, rand, NAME, until_s)
        self.remap = await open_remap(self._consensus, clock, rand, f"topic/{NAME}")
        self.trees = {name: Tree(self.pid(child)) for name, child in CHILDREN.items()}

    def pid(self, child: str) -> int:
        pid = self.supervisor.children[child].pid
        if pid is None:
            raise SystemExit(f"{child} has ended: {self.home}/logs/{child}.log")
        return pid

    @property
    def restarts(self) -> dict[str, int]:
        return {name: child.restarts for name, child in self.supervisor.children.items() if child.restarts}

    async def aclose(self) -> None:
        await self.supervisor.stop()
        await self.shard.aclose()
        await self._consensus.aclose()
        await self._objects.aclose()

    def stored(self) -> dict[str, Any]:
        size: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for path in (self.home / "objects").rglob("*"):
            try:
                if path.is_file():
                    kind = path.relative_to(self.home / "objects").parts[0]
                    size[kind] += path.stat().st_size
                    count[kind] += 1
            except FileNotFoundError:
                continue  # collected in the meantime
        consensus = sum(path.stat().st_size for path in self.home.glob("consensus.db*"))
        return {
            "bucket_mb": round(size.total() / 1e6, 2),
            "objects": count.total(),
            "consensus_mb": round(consensus / 1e6, 2),
            "kinds": {kind: [count[kind], round(size[kind] / 1e6, 2)] for kind in sorted(count)},
        }

    def spent(self) -> dict[str, Any]:
        """Return the use since the last call: CPU seconds in total, the peak of each kind of process in MiB, and
        resident memory.
        """
        out: dict[str, Any] = {"cpu_s": 0.0}
        for name, tree in self.trees.items():
            spent = tree.spent()
            tree.begin()
            out["cpu_s"] = round(out["cpu_s"] + sum(spent.cpu_s.values()), 1)
            for kind, peak_mib in spent.peak_mib.items():
                if peak_mib:
                    out[f"{name if kind == 'driver' else kind}_mib"] = peak_mib
        return out


CHILDREN = {"node": "node", "driver": "pipeline-steady"}


class Sent:
    """The load: `last[k]` is the number of the newest record of key k that was handed to the client."""

    def __init__(self, address: str, keys: int) -> None:
        self.last = np.full(keys, -1, dtype=np.int64)
        self.count = 0
        self.failed: list[str] = []
        self._client: ck.Producer = producer(address, 1 << 20, linger_ms=20)
        self._draw = np.random.default_rng(7)

    def send(self, records: int) -> None:
        for key in self._draw.integers(0, len(self.last), records).tolist():
            number, self.count = self.count, self.count + 1
            self.last[key] = number
            self._client.produce(
                NAME, value(key, number), b"c%09d" % key, partition=key % PARTITIONS, on_delivery=self._reported
            )
        self._client.poll(0)

    def all_keys(self) -> None:
        for key in range(len(self.last)):
            number, self.count = self.count, self.count + 1
            self.last[key] = number
            self._client.produce(NAME, value(key, number), b"c%09d" % key, partition=key % PARTITIONS)
            if key % 1_000 == 0:
                self._client.poll(0)
        self.flush()

    def flush(self) -> None:
        if self._client.flush(120) or self.failed:
            raise SystemExit(f"records were not delivered: {self.failed[:3]}")

    def _reported(self, error: Any, _: Any) -> None:
        if error is not None:
            self.failed.append(str(error))


async def watch(cluster: Cluster, waits_ms: list[float]) -> None:
    """Bound → visible, of the newest binding there is each time."""
    clock = SystemClock()
    while True:
        latest = await cluster.remap.latest()
        if latest is not None and cluster.shard.state.upper <= latest.time_ms:
            while await cluster.shard.wait_upper(latest.time_ms, 1.0) <= latest.time_ms:
                pass
            waits_ms.append(clock.now_ms() - latest.time_ms)
        await asyncio.sleep(0.2)


async def load(sent: Sent, rate: float) -> None:
    began_s, before = time.monotonic(), sent.count
    while True:
        due = int((time.monotonic() - began_s) * rate) - (sent.count - before)
        if due > 0:
            sent.send(min(due, int(rate)))
        await asyncio.sleep(TICK_S)


async def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    home = Path(args.home or tempfile.mkdtemp(prefix="steady-"))
    home.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(home)
    samples: list[dict[str, Any]] = []
    try:
        await cluster.start()
        sent = Sent(cluster.kafka, args.keys)
        await asyncio.to_thread(sent.all_keys)
        waits_ms: list[float] = []
        tasks = [asyncio.create_task(load(sent, args.rate)), asyncio.create_task(watch(cluster, waits_ms))]
        began_s = time.monotonic()
        cluster.spent()
        before = sent.count
        while time.monotonic() - began_s < args.seconds:
            await asyncio.sleep(max(0.0, began_s + (len(samples) + 1) * args.every - time.monotonic()))
            for task in tasks:
                if task.done():
                    task.result()
            samples.append(sample(cluster, round((time.monotonic() - began_s) / 60, 1), waits_ms))
            samples[-1]["sent_per_s"] = round((sent.count - before) / args.every)
            before = sent.count
            tell(samples[-1], args)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sent.flush()
        verified = await verify(cluster, sent)
        if cluster.restarts:
            raise SystemExit(f"a process was restarted: {cluster.restarts}")
    finally:
        await cluster.aclose()
        if not args.home:
            shutil.rmtree(home)
    return samples, verified


def sample(cluster: Cluster, minute: float, waits_ms: list[float]) -> dict[str, Any]:
    waits, found = list(waits_ms), {"minute": minute, "load": round(os.getloadavg()[0], 1)}
    waits_ms.clear()
    if waits:
        found |= {"p50_ms": round(percentile(waits, 0.5)), "p99_ms": round(percentile(waits, 0.99))}
    state = cluster.shard.state
    return found | cluster.spent() | cluster.stored() | {"batches": len(state.batches), "garbage": len(state.garbage)}


async def verify(cluster: Cluster, sent: Sent) -> int:
    """Rows, once the table has everything that was sent. SystemExit when it is not what a replay leaves."""
    until_s = time.monotonic() + DRAIN_S
    while True:
        latest = await cluster.remap.latest()
        bound = sum(sum(offsets) for offsets in latest.offsets.values()) if latest is not None else 0
        if (
            latest is not None
            and bound == sent.count
            and await cluster.shard.wait_upper(latest.time_ms, 1.0) > latest.time_ms
        ):
            break
        if time.monotonic() > until_s:
            raise SystemExit(f"it does not drain: sent={sent.count} bound={bound}")
        await asyncio.sleep(0.2)
    _, upper = await cluster.shard.frontiers()
    return check(await cluster.shard.snapshot(upper - 1), sent.last)


def compare(samples: list[dict[str, Any]], settled_min: float) -> dict[str, tuple[float, float, bool]]:
    """{figure: (settled, last, grew)}: means of WINDOW samples from `settled_min` on, and of the last ones."""
    after = [s for s in samples if s["minute"] >= settled_min]
    window = min(WINDOW, len(after) // 2)
    if not window:
        return {}
    out = {}
    for name, slack in SLACK.items():
        first, last = (statistics.mean(s.get(name, 0.0) for s in some) for some in (after[:window], after[-window:]))
        out[name] = (round(first, 2), round(last, 2), last - first > max(slack, first * TOLERANCE))
    return out


def tell(s: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(s), flush=True)
        return
    mib = " ".join(f"{name} {s.get(f'{name}_mib', 0):4}" for name in ("driver", "jvm", "workers", "node"))
    print(
        f"{s['minute']:5.1f} min  bucket {s['bucket_mb']:7.2f} MB in {s['objects']:5}  consensus"
        f" {s['consensus_mb']:6.2f} MB  MiB {mib}  CPU {s['cpu_s']:5.1f} s  bound → visible p50"
        f" {s.get('p50_ms', 0):4} p99 {s.get('p99_ms', 0):5} ms  {s['sent_per_s']}/s  load {s['load']}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=3600.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--settled", type=float, default=10.0, help="minutes after which nothing may grow")
    parser.add_argument("--rate", type=float, default=1_000.0, help="updates a second")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--home", default="", help="a directory that is kept, with its logs; default: one that is not")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(
            f"steady   {machine()}   {args.rate:g} updates/s on {args.keys:,} keys for {args.seconds:g} s", flush=True
        )
    samples, verified = asyncio.run(run(args))
    found = compare(samples, args.settled)
    grew = [name for name, (_, _, more) in found.items() if more]
    if args.json:
        print(json.dumps({"compared": found, "verified": verified}))
    for name, (first, last, more) in found.items() if not args.json else ():
        print(f"{'GREW ' if more else 'level'} {name:14} {first:10} → {last:10}")
    if not args.json:
        print(f"verified {verified:,} rows")
    return 1 if grew else 0


if __name__ == "__main__":
    raise SystemExit(main())
