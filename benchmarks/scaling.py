"""Capacity of one driver, one metastore domain and one consensus log, by measured unit costs: a model, not a
measurement.

Every unit cost names the command that measured it (docs/reference/benchmarks.md). Its input is a load: changes per
second, their bytes, and the number of tables. Its result is the number of each component, the first limit, and the
bucket's bill for a million changes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from harbour import machine

FILL = 0.5
"""Share of a part that a plan may use: at a half, what waits is about as long as what works."""


@dataclass(frozen=True)
class Unit:
    """`per_s`: what one of it carries alone, on the machine that measured it."""

    name: str
    per_s: float
    measured_by: str


CONSENSUS = Unit("consensus appends, one PostgreSQL", 13_883, "./dev bench consensus (postgres, append, 64 clients)")
CONSENSUS_SQLITE = Unit("consensus appends, SQLite", 26_517, "./dev bench consensus (sqlite, append, 64 clients)")
DOMAIN = Unit("metastore commits, one domain", 18_135, "./dev bench metastore_commits (postgres, 64 × 1, slower hours)")
NODE_MB = Unit("produced MB, one core of a node", 1000 / 4.2, "./dev bench produce (4.2 CPU-s a GB, 1 MB batches)")
CAPTURE = Unit("captured changes, one capture", 20_751, "python benchmarks/capture.py --rows 100000")
DRIVER_INSERTS_US, DRIVER_UPDATES_US = 2.0, 2.2
"""CPU µs a row of a driver with its JVM and workers (./dev bench upsert)."""

DRIVER = "driver cores, all tables"

PUT_USD, GET_USD, GB_MONTH_USD = 5e-6, 0.4e-6, 0.023
"""Standard object storage, list price of the large vendors."""

HYDRATE_US = 0.2
"""CPU µs a row to make a mirror from a merged shard: 1.7 to 2.0 CPU s for 10 M keys of 100 B."""
MIRROR_SHARE = 1.5
"""Mirror files are Arrow without compression, with hash and liveness, and up to six runs."""

PACE_S = 0.06
"""A busy table appends at most this often (PACE_MS of spark/source); an idle one in the same driver, once a second."""
IDLE_MOVE_S = 1.0
INLINE_BYTES = 16 << 10
"""A part below it travels in the log record: no object."""
COMPACTION_REWRITES = 8
"""FAN_IN of shards/compaction/compaction.py: each update is rewritten about log8(size) times."""


@dataclass(frozen=True)
class Load:
    changes_per_s: float
    bytes_per_change: int
    tables: int
    busy: int
    live_gb: float
    updates: float
    linger_s: float
    nodes: int


def appends_per_s(load: Load) -> float:
    """Return the appends of shards, bindings and partitions: each is a record of a fenced log."""
    flushes = flushes_per_s(load)
    steps = min(1 / PACE_S, flushes)
    shards = load.busy * steps + (load.tables - load.busy) / IDLE_MOVE_S
    partitions = load.busy * flushes
    bindings = min(1 / 0.05, flushes)
    return shards + partitions + bindings


def flushes_per_s(load: Load) -> float:
    """L0 objects of all nodes: by time, or by size where that is sooner."""
    by_time = 1 / max(load.linger_s, 0.01)
    by_size = load.changes_per_s * load.bytes_per_change / (4 << 20)
    return load.nodes * max(min(by_time, load.changes_per_s / load.nodes), by_size / load.nodes)


def driver_cores(load: Load, insert_us: float, update_us: float) -> float:
    return load.changes_per_s * (load.updates * update_us + (1 - load.updates) * insert_us) / 1e6


def bill(load: Load) -> tuple[float, float, float]:
    """Return the bill of a million changes: (puts, gets, USD)."""
    for_s = 1e6 / load.changes_per_s
    l0 = flushes_per_s(load) * for_s
    step_bytes = load.changes_per_s / load.busy * PACE_S * load.bytes_per_change * (1 + load.updates)
    parts = min(1 / PACE_S, flushes_per_s(load)) * load.busy * for_s if step_bytes > INLINE_BYTES else 0.0
    size = max(8.0, 1e6 * load.bytes_per_change / (64 << 10))
    merges = parts / 8 + math.log(size, 8)
    puts, gets = l0 + parts + merges, l0 + parts + merges * COMPACTION_REWRITES
    return puts, gets, puts * PUT_USD + gets * GET_USD


def tell(load: Load, insert_us: float, update_us: float) -> None:
    mb = load.changes_per_s * load.bytes_per_change / 1e6
    uses = {
        CONSENSUS.name: appends_per_s(load) / (CONSENSUS.per_s * FILL),
        DOMAIN.name: (load.tables / 60 + flushes_per_s(load) / 60) / (DOMAIN.per_s * FILL),
        NODE_MB.name: mb / (NODE_MB.per_s * FILL),
        CAPTURE.name: load.changes_per_s / (CAPTURE.per_s * FILL),
        DRIVER: driver_cores(load, insert_us, update_us) / FILL,
    }
    puts, gets, usd = bill(load)
    print(
        f"\n{load.changes_per_s:,.0f} changes/s of {load.bytes_per_change} B, {load.busy:,} busy of {load.tables:,} "
        f"tables, {load.live_gb:g} GB live, {load.updates:.0%} updates, linger {load.linger_s:g} s, {load.nodes} nodes"
    )
    for name, share in sorted(uses.items(), key=lambda item: -item[1]):
        print(f"  {name:36} {share:8.2f} of one at half load → {math.ceil(share)}")
    first = max(uses, key=lambda name: uses[name])
    print(f"  first full: {first}")
    rows = load.live_gb * 1e9 / load.bytes_per_change
    print(
        f"  {rows / 1e6:,.0f} M live rows: {load.live_gb * MIRROR_SHARE:.0f} GB of mirror files beside the driver, "
        f"made anew on another machine in {rows * HYDRATE_US / 1e6:,.0f} CPU s"
    )
    print(
        f"  a million changes: {puts:,.0f} puts, {gets:,.0f} gets, {usd:.3f} USD; "
        f"the live data: {load.live_gb * 2 * GB_MONTH_USD:.2f} USD a month (at most twice what lives)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--insert-us", type=float, default=DRIVER_INSERTS_US)
    parser.add_argument("--update-us", type=float, default=DRIVER_UPDATES_US)
    options = parser.parse_args()
    print(machine())
    for unit in (CONSENSUS, CONSENSUS_SQLITE, DOMAIN, NODE_MB, CAPTURE):
        print(f"{unit.name:36} {unit.per_s:10,.0f}/s   {unit.measured_by}")
    loads = (
        Load(1_000, 200, 10, 8, 1, 0.8, 0.0, 1),
        Load(1_000, 200, 10, 8, 1, 0.8, 0.25, 1),
        Load(20_000, 200, 100, 50, 100, 0.8, 0.25, 2),
        Load(20_000, 200, 2_000, 200, 100, 0.8, 0.25, 2),
        Load(200_000, 200, 100, 50, 100, 0.5, 0.25, 4),
    )
    for load in loads:
        tell(load, options.insert_us, options.update_us)


if __name__ == "__main__":
    main()
