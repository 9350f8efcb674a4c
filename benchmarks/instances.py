"""`./dev bench instances [--for S] [--seed N] [--instances N]`: identical drivers of one pipeline, killed and frozen at
random under Harbour Shop's load and its keyed click stream.

Method: the demo's world on one node, with N drivers of its pipeline as `tidemill up` starts them. Every few seconds one
of them, drawn at random, is killed (SIGKILL) or frozen (SIGSTOP) for longer than any lease; one is left to work at any
time, and the last one is frozen before it ever came to work and stays so for the first minute, so that it begins far
behind. Twice a second every table's upper is read, once a second the marks. At the end all go on, the load stops,
everything drains, and `verify` compares every table with its source, row by row.

Holds when: every count of verify is zero; dead letters = malformed records; no upper stood still for longer than
STANDS_LIMIT_S while a driver worked; every driver that was frozen for long enough was named with its pid.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harbour import machine
from hostile import Attacked, free_ports
from tidemill.base.errors import Missing, Unavailable
from tidemill.base.limits import MARK_BLIND_AFTER_MS
from tidemill.cli.demo.environment import prepare
from tidemill.cli.demo.runner import TABLES
from tidemill.cli.demo.shop import TABLES as SHOP
from tidemill.node.overrides import overridden

FROZEN_S = (15.0, 35.0)
"""Longer than any lease, and than the age at which a report is blind."""
BETWEEN_S = (2.0, 8.0)
BEHIND_S = 60.0
STANDS_LIMIT_S = 30.0
"""What a table's upper may stand still: the step of one that was just frozen is done over by another one, and on two
cores a restarted driver's JVM takes the processor for as long."""
DERIVED = frozenset(TABLES) - frozenset(SHOP) - {"clicks"}
"""Computed by Spark alone, so they stand while every JVM starts: reported, not judged."""


class Drivers:
    """The drivers of one run by the names of their children; says who is frozen, and freezes never the last one."""

    def __init__(self, runner: Attacked, rand: random.Random) -> None:
        self.runner = runner
        self.rand = rand
        self.frozen: dict[str, tuple[int, float, float]] = {}
        """child → (pid, when it was frozen, until when)"""
        self.done: Counter[str] = Counter()
        self.unnamed: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self.runner.supervisor.children if name.startswith("pipeline-"))

    def freeze(self, name: str, seconds: float) -> None:
        pid = self.runner.supervisor.children[name].pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            now_s = time.monotonic()
            self.frozen[name] = (pid, now_s, now_s + seconds)
            self.done["frozen"] += 1

    def thaw(self, *, all_of_them: bool = False) -> None:
        for name, (pid, since_s, until_s) in list(self.frozen.items()):
            if not all_of_them and time.monotonic() < until_s:
                continue
            process = name.replace("pipeline-", "pipeline:", 1).replace("-", ":")
            found = self.runner.marks.get(f"process:{process}")
            told = found is not None and str(found.state) == "blind" and str(pid) in found.mark.held_by
            if time.monotonic() - since_s > MARK_BLIND_AFTER_MS / 1000 + 3 and not told:
                self.unnamed.append(f"{process} pid {pid}: {found.state if found else 'no mark'}")
            del self.frozen[name]
            if self.runner.supervisor.children[name].pid == pid:
                os.kill(pid, signal.SIGCONT)

    def throw(self) -> None:
        self.thaw()
        free = [name for name in self.names if name not in self.frozen]
        if len(free) > 1 and self.rand.random() < 0.5:
            self.freeze(self.rand.choice(free), self.rand.uniform(*FROZEN_S))
        elif len(free) > 1 or self.rand.random() < 0.3:
            self.done["killed"] += self.runner.supervisor.children[self.rand.choice(free)].kill()


class Uppers:
    """How long each table's upper stood still at most; an upper that goes back is a failure by itself."""

    def __init__(self, runner: Attacked) -> None:
        self.runner = runner
        self.longest_s: dict[str, float] = {}
        self.back: list[str] = []

    async def run(self) -> None:
        last: dict[str, tuple[int, float]] = {}
        while True:
            for name in TABLES:
                try:
                    _, upper = await (await self.runner._open_shard(name)).frontiers()
                except (Missing, Unavailable):
                    continue
                before, since_s = last.get(name, (0, time.monotonic()))
                if upper < before:
                    self.back.append(f"{name}: {before} → {upper}")
                if upper != before:
                    last[name] = (upper, time.monotonic())
                elif before:
                    self.longest_s[name] = max(self.longest_s.get(name, 0.0), time.monotonic() - since_s)
            await asyncio.sleep(0.5)


async def bench(seconds: float, seed: int, instances: int, rate: float, clicks: float) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="tidemill-instances-"))
    first = free_ports(2)
    environment = prepare(directory, http=f"127.0.0.1:{first}", kafka=f"127.0.0.1:{first + 1}", fresh=True)
    environment.config = overridden(environment.config, ["shop"], instances=instances, driver_memory="512m")
    runner = Attacked(environment, rate=rate, click_rate=clicks, crash=False)
    drivers, uppers = Drivers(runner, random.Random(seed)), Uppers(runner)

    async def attack() -> None:
        while runner.phase == "starting":
            await asyncio.sleep(0.1)
        drivers.freeze(drivers.names[-1], BEHIND_S)
        watching = asyncio.get_running_loop().create_task(uppers.run())
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            await asyncio.sleep(drivers.rand.uniform(*BETWEEN_S))
            drivers.throw()
        watching.cancel()
        drivers.thaw(all_of_them=True)
        runner.stop()

    try:
        attacking = asyncio.get_running_loop().create_task(attack())
        report = await runner.run(seconds + 600)
        await attacking
    finally:
        drivers.thaw(all_of_them=True)
        environment.postgres.stop()
    failures = [
        *(
            f"unequal {table} {counts}"
            for table, counts in report.verify.items()
            if any(counts[key] for key in ("missing", "extra", "different"))
        ),
        *([] if report.verify else ["nothing was verified"]),
        *(f"undrained {stuck}" for stuck in report.stuck),
        *(f"went back {name}" for name in uppers.back),
        *(f"not named {name}" for name in drivers.unnamed),
        *(
            f"stood still {name} {stood_s:.1f} s"
            for name, stood_s in uppers.longest_s.items()
            if stood_s > STANDS_LIMIT_S and name not in DERIVED
        ),
    ]
    if report.dead_letters != report.malformed:
        failures.append(f"dead letters {report.dead_letters} != {report.malformed}")
    return {
        "seed": seed,
        "seconds": seconds,
        "instances": instances,
        "thrown": dict(drivers.done),
        "restarts": {name: runner.supervisor.children[name].restarts for name in drivers.names},
        "transactions": report.transactions,
        "records": report.produced,
        "rows_verified": sum(counts["rows"] for counts in report.verify.values()),
        "dead_letters": [report.dead_letters, report.malformed],
        "stood_still_s": {name: round(stood_s, 1) for name, stood_s in uppers.longest_s.items()},
        "failures": failures,
        "logs": str(environment.directory / "logs"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--rate", type=float, default=50.0, help="transactions a second")
    parser.add_argument("--clicks", type=float, default=500.0, help="records a second")
    options = parser.parse_args()
    if options.instances < 2:
        parser.error("--instances must be 2 or more")
    print(f"instances: {machine()}", file=sys.stderr, flush=True)
    found = asyncio.run(bench(options.seconds, options.seed, options.instances, options.rate, options.clicks))
    print(json.dumps(found))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
