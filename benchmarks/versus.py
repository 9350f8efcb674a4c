"""`./dev bench versus`: the shop's tables through tidemill, and through Debezium, Kafka, Spark and Delta or Iceberg.

    python benchmarks/versus.py [--stacks delta,tidemill] [--rates 300,30] [--warm S] [--window S] [--kill] [--fresh]
    python benchmarks/versus.py --plot FILE | --table | --publish     from the results, without a measurement

Method: one stack after the other, each with a new PostgreSQL 18 (synchronous_commit on), both cores available. The
shop of the demo without clicks and derived tables, and its load generator; an eighth table, `probe`, gets a row every
0.5 s. For each rate: warm-up, a window, then the same load until every probe of the window was seen. Then each table is
compared with SELECT, all rows and columns.

The latency of a probe row is the moment a reader in another process sees it minus the moment its INSERT returned. CPU
is that of all processes of the stack between the ends of the window, from /proc, including children that ended.
PostgreSQL (with its decoding of the WAL), load generator and reader are shown apart, and do not count. `other` is
what else ran on the machine: a run with more than a tenth of a core is marked as disturbed. Memory is read at the end
of the window: resident, and proportional (PSS). Disk is allocated blocks after the comparison. Lines are those of
configuration and code, without empty lines and comments.

With --kill, a further life of each stack: every process gets one SIGKILL under the load of the first rate, and is
restarted by its own supervisor, or else by the same command after a second. The next one is killed once a row
committed after the kill was seen. Then all tables are compared.

Results go to --out after each step. A repeated command measures only what is missing there; --fresh begins again.
`benchmarks/versus/install` fetches the peer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import paths
import versus_processes
from harbour import machine
from tidemill.base.limits import PIPELINE_FRESHNESS_MS
from versus_compare import KEYS, compare, latencies, percentiles
from versus_peer import Peer, absent
from versus_plot import plot
from versus_publish import publish
from versus_report import OUTSIDE, table
from versus_shop import Probe, Shop
from versus_stack import Stack, pids_by_role, wait_for
from versus_tidemill import Tidemill

LAKES = ("delta", "iceberg")
OUT = paths.ROOT / ".tidemill" / "versus.json"
REPORT_S = 10.0
LATE_S = 600.0
PAUSE_S = 5.0
FRESHNESS_S = PIPELINE_FRESHNESS_MS / 1000
TRIGGER_S = 0.0
COUNTS = ("rows", "missing", "extra", "different")
DISTURBED_PERCENT = 10.0


class Run:
    """One life of a stack with its source and its probe."""

    def __init__(self, stack: Stack, shop: Shop, home: Path) -> None:
        self.stack = stack
        self.shop = shop
        self.ready_s = 0.0
        self.probe = Probe(shop.dsn, stack.reader, home / "logs" / "reader.log")

    def say(self, text: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {self.stack.name}: {text}", flush=True)

    def roots(self) -> dict[int, str]:
        return self.stack.keeper.roots() | self.shop.roots() | self.probe.roots()

    def used(self) -> versus_processes.Used:
        return versus_processes.used(self.roots(), self.stack.role)

    def wait_ready(self) -> float:
        """Return after how many seconds the first probe row was seen."""
        began_s = time.monotonic()
        self.say("starts")

        def first_seen() -> bool:
            self.probe.check()
            return bool(self.probe.seen)

        wait_for("the first probe row", first_seen, self.stack.keeper)
        took_s = time.monotonic() - began_s
        self.say(f"ready after {took_s:.0f} s")
        return took_s

    def last(self, what: str, seconds: float) -> None:
        """Let `seconds` pass, with a line of progress every ten."""
        began_s = time.monotonic()
        while (passed_s := time.monotonic() - began_s) < seconds:
            time.sleep(min(REPORT_S, seconds - passed_s))
            self.check()
            passed_s = time.monotonic() - began_s
            waiting_s, done = self.probe.waiting_s(), self.shop.transactions
            self.say(f"{what} {passed_s:.0f}/{seconds:g} s, oldest unseen row {waiting_s:.1f} s, {done} transactions")

    def check(self) -> None:
        self.stack.keeper.check()
        self.shop.check()
        self.probe.check()

    def wait_seen(self, until_s: float) -> None:
        wait_for("the probe rows", lambda: self.probe.all_seen(until_s), self.stack.keeper, LATE_S)

    def measure(self, rate: float, warm_s: float, window_s: float) -> dict[str, Any]:
        """Measure one window. The load runs on until the last row of the window was seen."""
        self.shop.start_load(rate, seed=int(rate))
        self.last(f"{rate:g}/s warm-up", warm_s)
        before, from_s, from_count = self.used(), time.time(), self.shop.transactions
        self.last(f"{rate:g}/s window", window_s)
        after, until_s, count = self.used(), time.time(), self.shop.transactions - from_count
        memory = versus_processes.memory_mib(self.stack.keeper.roots(), self.stack.role)
        self.wait_seen(until_s)
        self.shop.stop_load()
        cpu = versus_processes.percent_of_a_core(before, after, until_s - from_s)
        samples = latencies(dict(self.probe.sent), self.probe.seen, from_s, until_s)
        return {
            "machine": machine(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "rate": rate,
            "warm_s": warm_s,
            "window_s": round(until_s - from_s, 1),
            "commits_per_s": round(count / (until_s - from_s), 1),
            "samples": len(samples),
            "latency_s": percentiles(samples),
            "cpu_percent": cpu,
            "cpu_total_percent": round(sum(value for role, value in cpu.items() if role not in OUTSIDE), 1),
            "disturbed": cpu["other"] + cpu["stolen"] > DISTURBED_PERCENT,
            "memory": memory,
            "lines": self.stack.lines(),
        }

    def verify(self) -> dict[str, Any]:
        """Compare all tables with SELECT, after the end of the load."""
        with self.probe.paused():
            self.wait_seen(time.time())
            self.stack.wait_drained(LATE_S)
            found, expected = self.stack.contents(), self.shop.contents()
            differences = {name: compare(expected[name], found[name], key) for name, key in KEYS.items()}
            total = {what: sum(getattr(each, what) for each in differences.values()) for what in COUNTS}
            self.say(f"compared with SELECT: {total}")
            unequal = [name for name, difference in differences.items() if not difference.equal]
            return {"verified": total, "unequal": unequal, "disk_mib": self.stack.disk_mib()}

    def kill_each(self) -> dict[str, Any]:
        """Kill every process once, and return the longest wait for a row that was seen after the kill."""
        kills = {}
        self.stack.keeper.keep()
        for role in reversed(pids_by_role(self.stack)):
            killed_s = time.time()
            for pid in pids_by_role(self.stack).get(role, []):
                os.kill(pid, signal.SIGKILL)
            self.say(f"killed {role}")
            kills[role] = self._recovery(killed_s)
            self.say(f"after the kill of {role}: {kills[role]}")
            self.last("pause", PAUSE_S)
        return {"kills": kills, "restarted_from_outside": dict(self.stack.keeper.restarts)}

    def _recovery(self, killed_s: float) -> dict[str, Any]:
        """Wait until a row that was committed after the kill was seen, and all rows before it."""
        until_s = time.monotonic() + LATE_S
        probe = self.probe

        def seen_again() -> list[float]:
            return [at_s for each, at_s in dict(probe.sent).items() if at_s > killed_s and each in probe.seen]

        while not (first := min(seen_again(), default=0.0)) and time.monotonic() < until_s:
            time.sleep(0.2)
        if first:
            wait_for("the rows before it", lambda: probe.all_seen(first), self.stack.keeper, LATE_S)
        now_s = time.time()
        waits = {at_s: probe.seen.get(each, now_s) for each, at_s in dict(probe.sent).items()}
        worst_s = max(seen_s - at_s for at_s, seen_s in waits.items() if seen_s > killed_s)
        return {"worst_row_s": round(worst_s, 1), "recovered": bool(first)}


@contextlib.contextmanager
def life(name: str, args: argparse.Namespace) -> Iterator[Run]:
    """Start a stack on an empty directory; everything ends with the context. With `--keep` the directory stays."""
    home = Path(tempfile.mkdtemp(prefix=f"versus-{name}-"))
    home.chmod(0o755)
    with contextlib.ExitStack() as stack:
        if not args.keep:
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        shop = Shop(home / "postgres")
        stack.callback(shop.close)
        side: Stack
        if name == "tidemill":
            side = Tidemill(home, shop.dsn, args.freshness)
        else:
            side = Peer(home, shop.dsn, name, args.trigger)
        stack.callback(side.stop)
        side.start()
        run = Run(side, shop, home)
        stack.callback(run.probe.stop)
        run.ready_s = run.wait_ready()
        yield run


def lane_name(stack: str, args: argparse.Namespace, what: str) -> str:
    """Return the name of a result: the stack, its pace unless it is the default, and the rate or `kill`."""
    pace = args.freshness if stack == "tidemill" else args.trigger
    usual = FRESHNESS_S if stack == "tidemill" else TRIGGER_S
    return f"{stack}{'' if pace == usual else f'@{pace:g}s'}/{what}"


def run_stack(name: str, args: argparse.Namespace, lanes: dict[str, Any]) -> None:
    rates = [rate for rate in args.rates if lane_name(name, args, f"{rate:g}") not in lanes]
    if rates:
        with life(name, args) as run:
            for rate in rates:
                found = run.measure(rate, args.warm, args.window) | run.verify() | {"ready_s": round(run.ready_s, 1)}
                keep(lanes, lane_name(name, args, f"{rate:g}"), found, args.out)
                run.say(f"{rate:g}/s: {found['latency_s']} s, CPU {found['cpu_total_percent']} % of a core")
    kill = lane_name(name, args, "kill")
    if args.kill and kill not in lanes:
        with life(name, args) as run:
            rate = args.rates[0]
            run.shop.start_load(rate, seed=int(rate))
            run.last(f"{rate:g}/s warm-up", args.warm)
            found = run.kill_each()
            run.shop.stop_load()
            keep(lanes, kill, found | {"rate": rate, "machine": machine()} | run.verify(), args.out)


def keep(lanes: dict[str, Any], name: str, found: dict[str, Any], out: Path) -> None:
    """Add a result, and replace the file."""
    lanes[name] = found
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(lanes, indent=1, sort_keys=True) + "\n")
    partial.rename(out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=LAKES, default="delta", help="the tables of the peer")
    parser.add_argument("--stacks", default="", help="some of delta, iceberg, tidemill, with commas, in this order")
    parser.add_argument("--rates", "--rate", default="300,30", help="commits per second, with commas")
    parser.add_argument("--warm", type=float, default=60, help="seconds of load before each window")
    parser.add_argument("--window", type=float, default=180, help="seconds of each window")
    parser.add_argument("--kill", action="store_true", help="also kill each process once")
    parser.add_argument("--freshness", type=float, default=FRESHNESS_S, help="freshness_s of tidemill's pipeline")
    parser.add_argument("--trigger", type=float, default=TRIGGER_S, help="trigger of the peer's queries, in s")
    parser.add_argument("--out", type=Path, default=OUT, help="the file of the results")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file has")
    parser.add_argument("--keep", action="store_true", help="keep the directories of the stacks, in the system's")
    parser.add_argument("--plot", type=Path, help="only draw the results into this SVG file")
    parser.add_argument("--table", action="store_true", help="only print the results as a table in Markdown")
    parser.add_argument("--publish", action="store_true", help="only write the results into the documentation")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    args.rates = [float(rate) for rate in args.rates.split(",")]
    args.stacks = [name for name in (args.stacks or f"tidemill,{args.peer}").split(",") if name]
    if unknown := set(args.stacks) - {*LAKES, "tidemill"}:
        parser.error(f"--stacks knows {', '.join(LAKES)} and tidemill, not {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # a context that is left ends its processes
    lanes: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.plot or args.table or args.publish:
        if args.publish:
            publish(lanes)
        if args.plot:
            args.plot.write_text(plot(lanes))
        if args.table:
            print(table(lanes))
        return 0
    for name in args.stacks:
        if name != "tidemill" and (why := absent(name)):
            print(f"versus: {name}: {why}", file=sys.stderr)
            return 2
    if args.fresh:
        again = [
            lane_name(name, args, what) for name in args.stacks for what in (*(f"{r:g}" for r in args.rates), "kill")
        ]
        lanes = {name: found for name, found in lanes.items() if name not in again}
    print(f"versus   {machine()}   results: {args.out}", flush=True)
    for name in args.stacks:
        run_stack(name, args, lanes)
    print(json.dumps(lanes) if args.json else table(lanes))
    return 1 if any(found["unequal"] for found in lanes.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
