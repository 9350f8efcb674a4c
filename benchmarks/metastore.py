"""Metastore engine: Tidemill's LSM compared with RocksDB (rocksdict) and SlateDB (slatedb), paired in one run.

    python benchmarks/metastore.py [--keys N] [--rounds N] [--parts rates,bounded] [--dir DIR] [--json]
                                   [--engines tidemill,rocksdict,slatedb] [--bounded-engines tidemill,rocksdict]

Rates: each engine in a separate process on a local directory, no log (WAL off for all), the same rows in the
same shuffled order: 28 B keys, 100 B values, batches of 1,000. Step by step the engines take turns within seconds
of each other; reads run ours, peers, ours again, and writes change the order every round. A ratio is taken within
a round, ours over the peer's; the table holds the median of the rounds, and after ± half the spread of the ratio.
`cpu` is the same ratio per processor second, which other work on the machine does not touch.

    put batch     all rows into a write buffer that holds them; the flush is timed apart
    put single    a tenth of the rows again, one call each
    flush         until durable as far as the engine goes (SlateDB's local store never syncs)
    compact       all rows and two overlapping fifths into one run (SlateDB's package cannot ask for it)
    get hot       20,000 neighbouring rows in a block cache of 32 MiB; `peek`: our plain call, not async
    get spread    anywhere, with that cache, far smaller than the data
    missing       absent keys between the others; outside: behind the last
    scan          every row touched; prefix: 20 rows each, anywhere, or (hot) as get hot
    open, cold    a fresh open (operating system's cache warm), then gets anywhere, object reads counted

Bounded: a fresh database with write buffers and cache of 64 MiB together loads all rows with its flushes and merges
going on, settles, reopens, is scanned and read anywhere. The parent samples the resident memory of the process, and
of its workers, every 10 ms; a ticker in the event loop records the longest gap between two turns, on the wall and in
the thread's own processor time (`stall_cpu_ms`: what another process on the core cannot lengthen); bytes written
over bytes given is the write amplification.

After each part every row is compared (digest over a full scan, 2,000 gets); every get's value is compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from metastore_child import Child, table
from metastore_rows import key, value

SELF = "tidemill"
MIB = 1 << 20
ROOMY = {"buffer_bytes": 4096 * MIB, "cache_bytes": 32 * MIB}
BUDGET = {"buffer_bytes": 8 * MIB, "cache_bytes": 48 * MIB}  # one buffer fills while another is flushed
BUDGET_BYTES = 64 * MIB
ALLOWANCE_BYTES = 64 * MIB
TARGETS: dict[str, dict[str, float]] = {
    "put_batch": {"rocksdict": 3.0, "slatedb": 30.0},
    "get_hot": {"rocksdict": 1.0},
    "get_missing": {"rocksdict": 0.3},
    "get_outside": {"rocksdict": 0.3},
    "scan": {"rocksdict": 1.0},
    "prefix_hot": {"rocksdict": 0.3},
    "prefix": {"rocksdict": 0.3},
    "get_cold": {"slatedb": 4.0},
}
COLD_READS = 2
STALL_MS = 20


# rates -------------------------------------------------------------------------------------------


class Rates:
    """Results of each step, by round and engine: processed per second of wall and of processor time."""

    def __init__(self, engines: list[str]) -> None:
        self.engines = engines
        self.rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
        self.extra: dict[str, Any] = {}

    def add(self, step: str, engine: str, results: list[dict[str, Any]]) -> None:
        n = sum(result["n"] for result in results)
        per_s, per_cpu_s = n / sum(r["s"] for r in results), n / max(1e-9, sum(r["cpu_s"] for r in results))
        self.rows.setdefault(step, {}).setdefault(engine, []).append((per_s, per_cpu_s))

    def ratio(self, step: str, peer: str, which: int = 0) -> tuple[float, float]:
        """Median over the rounds, and half the spread."""
        pairs = zip(self.rows[step][SELF], self.rows[step][peer], strict=True)
        ratios = [ours[which] / theirs[which] for ours, theirs in pairs]
        return statistics.median(ratios), (max(ratios) - min(ratios)) / 2

    def per_s(self, step: str, engine: str) -> float:
        return statistics.median(per_s for per_s, _ in self.rows[step][engine])


def one_round(number: int, engines: list[str], count: int, folder: Path, rates: Rates) -> None:
    order = engines if number % 2 == 0 else engines[::-1]
    with ExitStack() as stack:
        children = {engine: Child(engine, count, folder) for engine in engines}
        for child in children.values():
            stack.callback(child.close)

        def once(step: str, engines: list[str] = order, *, keep: bool = True, **arguments: Any) -> None:
            for engine in engines:
                result = children[engine].call(step, **arguments)
                if keep:
                    rates.add(step, engine, [result])

        def again(step: str, **arguments: Any) -> None:
            """Ours, the peers, ours again."""
            ours = [children[SELF].call(step, **arguments)] if SELF in children else []
            for engine in engines:
                if engine != SELF:
                    rates.add(step, engine, [children[engine].call(step, **arguments)])
            if ours:
                ours.append(children[SELF].call(step, **arguments))
                rates.add(step, SELF, ours)
                for name in ("reads_max", "reads_mean"):
                    if name in ours[0]:
                        rates.extra[name] = max(rates.extra.get(name, 0), *(result[name] for result in ours))

        once("open", keep=False, **ROOMY)
        once("put_batch", start=0, end=count, version=0)
        once("put_each", start=0, end=count // 10, version=1)
        once("flush")
        for version in (2, 3):
            start = count // 5 * version
            once("put_batch", keep=False, start=start, end=start + count // 5, version=version)
            once("flush", keep=False)
        native = [engine for engine in order if engine != "slatedb"]
        once("compact", native, rows=count + 2 * (count // 5))
        once("settle", keep=False)
        once("reopen")
        again("get_cold", calls=5000)
        again("get_spread", calls=20_000)
        again("get_hot", calls=200_000)
        if SELF in children:
            rates.add("peek_hot", SELF, [children[SELF].call("peek_hot", calls=200_000)])
        again("get_missing", calls=100_000)
        again("get_outside", calls=100_000)
        again("scan")
        again("prefix", calls=5000)
        again("prefix_hot", calls=5000)
        for engine in order:
            found = children[engine].call("verify")
            rates.extra["verified_rows"] = rates.extra.get("verified_rows", 0) + found["verified_rows"]
            rates.extra[f"{engine} MB on disk"] = round(children[engine].call("facts")["disk_bytes"] / 1e6, 1)
        once("close", keep=False)


def print_rates(rates: Rates) -> None:
    peers = [engine for engine in rates.engines if engine != SELF]
    lines = [["step", *(f"{engine}/s" for engine in rates.engines)]]
    if SELF in rates.engines:
        for peer in peers:
            lines[0] += [f"to {peer}", "cpu", "target", ""]
    for step, by_engine in rates.rows.items():
        line = [step.replace("_", " ")]
        line += [f"{rates.per_s(step, e):,.4g}" if e in by_engine else "-" for e in rates.engines]
        for peer in peers if SELF in by_engine else []:
            if peer not in by_engine:
                line += ["-", "", "", ""]
                continue
            ratio, spread = rates.ratio(step, peer)
            target = TARGETS.get(step, {}).get(peer)
            line += [f"{ratio:.2f} ±{spread:.2f}", f"{rates.ratio(step, peer, 1)[0]:.2f}"]
            line += ["", ""] if target is None else [f"{target:g}", "pass" if ratio >= target else "MISS"]
        lines.append(line)
    table(lines)
    if "reads_max" in rates.extra:
        verdict = "pass" if rates.extra["reads_max"] <= COLD_READS else "MISS"
        print(f"object reads of one cold get: at most {rates.extra['reads_max']}, target {COLD_READS}: {verdict}")
    print(" ".join(f"{name}={fact}" for name, fact in rates.extra.items()))


# bounded -----------------------------------------------------------------------------------------


def bounded(engine: str, count: int, folder: Path) -> dict[str, Any]:
    child = Child(engine, count, folder, watch=True)
    try:
        opened = child.call("open", **BUDGET)
        begun = time.perf_counter()
        load = child.call("load")
        facts = child.call("facts")
        ended = time.perf_counter()
        reopened = child.call("reopen")
        spread = child.call("get_spread", calls=20_000)
        scan = child.call("scan")
        read = time.perf_counter()
        verified = child.call("verify")
        rss = child.call("facts") and child.samples[-1][1]
        child.call("close")
    finally:
        child.close()
    during = [(own, workers) for at, own, workers in child.samples if begun <= at <= ended]
    reading = [own for at, own, _ in child.samples if ended < at <= read]
    steady = [own for own, _ in during[len(during) * 9 // 10 :]]
    given = count * (len(key(0)) + len(value(0, 0)))
    written = facts.get("written_bytes") or facts["process_written_bytes"]
    peak = max(own for own, _ in during)
    return {
        "engine": engine,
        "keys": count,
        "load_rows_per_s": round(count / load["loaded_s"]),
        "settled_rows_per_s": round(count / (load["loaded_s"] + load["settle_s"])),
        "write_amplification": round(written / given, 2),
        "live_mb": round(facts.get("live_bytes", facts["disk_bytes"]) / 1e6, 1),
        "disk_mb": round(facts["disk_bytes"] / 1e6, 1),
        "files_by_level": facts.get("levels", facts.get("files")),
        "waited_s": facts.get("waited_s", 0),
        "base_mib": round(child.base_bytes / MIB, 1),
        "load_peak_mib": round(peak / MIB, 1),
        "load_steady_mib": round(statistics.median(steady) / MIB, 1),
        "with_workers_peak_mib": round(max(own + workers for own, workers in during) / MIB, 1),
        "read_peak_mib": round(max(reading) / MIB, 1),
        "end_mib": round(rss / MIB, 1),
        "memory": "pass" if max(peak, max(reading)) <= BUDGET_BYTES + ALLOWANCE_BYTES else "MISS",
        "stall_ms": load["stall_ms"],
        "stall_cpu_ms": load["stall_cpu_ms"],
        "stalls_over_20_ms": load["over_20_ms"],
        "cpu_stalls_over_20_ms": load["cpu_over_20_ms"],
        "stall": "pass" if max(load["stall_cpu_ms"], reopened["stall_cpu_ms"]) <= STALL_MS else "MISS",
        "first_open_ms": round(opened["s"] * 1000, 1),
        "open_ms": round(reopened["s"] * 1000, 1),
        "open_stall_ms": reopened["stall_ms"],
        "open_stall_cpu_ms": reopened["stall_cpu_ms"],
        "get_spread_per_s": round(spread["n"] / spread["s"]),
        "scan_rows_per_s": round(count / scan["s"]),
        **verified,
    }


# the run -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="tidemill,rocksdict,slatedb")
    parser.add_argument("--bounded-engines", default="tidemill,rocksdict", help="slatedb takes minutes per million")
    parser.add_argument("--parts", default="rates,bounded")
    parser.add_argument("--dir", default=None, help="directory on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engines, parts = options.engines.split(","), options.parts.split(",")
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "keys": options.keys,
    }
    if not options.json:
        print(__doc__)
        print("machine: " + " ".join(f"{name}={fact}" for name, fact in machine.items()), flush=True)
    rates, bounds = Rates(engines), []
    for number in range(options.rounds if "rates" in parts else 0):
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            one_round(number, engines, options.keys, Path(scratch), rates)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    if rates.rows and not options.json:
        print_rates(rates)
    for engine in options.bounded_engines.split(",") if "bounded" in parts else []:
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            bounds.append(bounded(engine, options.keys, Path(scratch)))
    if bounds and not options.json:
        print("\nbounded:")
        table([[name, *(str(bound[name]) for bound in bounds)] for name in bounds[0]])
    if options.json:
        print(json.dumps({"benchmark": "metastore", "machine": machine, "rates": rates.rows, "bounded": bounds}))


if __name__ == "__main__":
    main()
