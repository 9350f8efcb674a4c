"""`./dev bench instances [--for S] [--seed N] [--instances N]`: identical drivers of one pipeline, killed and frozen at
random under Harbour Shop's load and a keyed topic, one of them an hour behind at the start; and one lone writer.

Method. The demo's world on one node; drivers are `tidemill pipeline run` processes.
  An hour ago (by all clocks of a first world): node, load, a driver `late` and one of the pipeline `lone`, the same
  tables under other names. Both end in order, while the load continues for a moment.
  Now: node, load, and the other drivers without scratch. When their tables are past the start of this world, `late` is
  started on its scratch of an hour ago, and the throws begin: every few seconds one driver, drawn at random, is killed
  (SIGKILL) or frozen (SIGSTOP) for longer than any lease, now and then for longer than a shard keeps history; one is
  left to work at any time. Twice a second every table's upper is read, once a second the marks, and at several times
  the contents of all tables are kept.
  At the end all continue, the load stops, everything drains; then `lone`, alone, catches up from an hour ago to the
  present.

Holds when: the contents that the many wrote equal those of the lone writer at each of the kept times, row by row; the
derived table equals another engine's result from its inputs; dead letters are the same; every count of `verify` is
zero, for both; dead letters = malformed records; no upper moved back, and none stalled for longer than STANDS_LIMIT_S
while a driver worked on it; every driver that was frozen for long enough was named with its pid; `late` caught up, and
won or lost appends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from demo.environment import Environment, prepare
from demo.runner import TABLES
from harbour import machine
from hostile import Attacked
from instances_crew import Crew, Uppers, scratch_of
from instances_lone import DERIVED, Samples
from instances_pipeline import CARTS, LONE
from support.ports import free_port
from tidemill.base.config.config import load
from tidemill.base.errors import MissingError, UnavailableError
from tidemill.shards.registry import open_remap
from tidemill.spark.ingest.fetch_decode import boot_id
from tidemill.spark.merge.mirror import Mirror

HERE = Path(__file__).parent
BEHIND_MS = 3_600_000
BEFORE_S = 10.0
"""Load of an hour ago, counted from when both drivers have every table."""
AFTER_THEM_S = 3.0
"""Duration of the load after the two drivers have ended."""
START_TIMEOUT_S = 600.0
"""A busy machine starts no worker within Spark's patience, and the derived table needs some."""
BETWEEN_S = (2.0, 8.0)
SAMPLES = 8
STANDS_LIMIT_S = 30.0
"""Maximum time for which a table's upper may stall while a driver works on it: the step of a driver that was just
frozen is repeated by another one, and on two cores a restarting JVM takes the processor for as long.
"""
KEPT = (*(name for name in TABLES if name != DERIVED), CARTS)
"""Tables whose contents at every time follow from the bindings.

The derived one is computed for other times, by Spark alone, so it stalls while every JVM starts: its stalls are
reported, not judged.
"""
MEMORY = ("--driver-memory", "512m")


class Shop(Attacked):
    """Harbour Shop with carts; `before_verify` when everything is drained."""

    def __init__(self, environment: Environment, rate: float, clicks: float, carts: float) -> None:
        super().__init__(environment, rate=rate, click_rate=clicks, crash=False)
        self.before_verify: Callable[[], Awaitable[None]] | None = None
        self.cart_counts: dict[str, int] = {}
        self._cart_rate = carts

    @property
    def malformed(self) -> int:
        return self.click_counts.get("malformed", 0) + self.cart_counts.get("malformed", 0)

    async def _start_load(self, tasks: Any) -> None:
        await super()._start_load(tasks)
        command = [sys.executable, str(HERE / "instances_carts.py"), "--brokers", self.environment.config.node.kafka]
        process = await asyncio.create_subprocess_exec(
            *command, "--rate", str(self._cart_rate), "--seed", str(self._rand.below(1 << 30)),
            stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._loads.append(process)
        tasks.spawn(self._read_counts(process, self.cart_counts), name="carts")

    async def _verify(self) -> None:
        assert self.before_verify is not None
        await self.before_verify()
        await super()._verify()


def world(directory: Path, *, fresh: bool) -> Environment:
    """Return the demo's world without a driver.

    Ports are new: another process may have taken those of the first world.
    """
    first = free_port(2)
    environment = prepare(directory, http=f"127.0.0.1:{first}", kafka=f"127.0.0.1:{first + 1}", fresh=fresh)
    text, file = environment.config_path.read_text(), HERE / "instances_pipeline.py"
    head, _, tail = text.partition("[pipeline.shop]")
    pipelines = "".join(f'[pipeline.{p}]\nfile = "{file}"\nspark.instances = 0\n' for p in ("shop", "lone"))
    topic = f"[topics.{CARTS}]\npartitions = 2\n"
    environment.config_path.write_text(head + topic + pipelines + tail[tail.index("[spark]") :])
    environment.config = load(environment.config_path)
    return environment


async def until(what: str, holds: Callable[[], Awaitable[bool]], timeout_s: float = START_TIMEOUT_S) -> None:
    """Raises TimeoutError with `what`."""
    print(f"  waits: {what}", file=sys.stderr, flush=True)
    until_s = time.monotonic() + timeout_s
    while not await holds():
        if time.monotonic() > until_s:
            raise TimeoutError(what)
        await asyncio.sleep(0.3)


async def least_upper(runner: Shop, names: list[str]) -> int:
    """0 while one is not there."""
    try:
        return min([(await (await runner._open_shard(name)).frontiers())[1] for name in names])
    except (MissingError, UnavailableError):
        return 0


async def attended(runner: Shop, seconds: float | None, body: Callable[[Crew], Awaitable[None]], seed: int = 0) -> Any:
    """The shop's report; `body` runs once the load does, and its drivers end with it."""
    crew = Crew(runner, random.Random(seed))

    async def run() -> None:
        try:
            while runner.phase == "starting":
                await asyncio.sleep(0.1)
            watching = asyncio.get_running_loop().create_task(crew.watch())
            await body(crew)
            watching.cancel()
        except Exception as error:
            runner.fail(error)
        finally:
            runner.stop()

    running = asyncio.get_running_loop().create_task(run())
    try:
        return await runner.run(seconds)
    finally:
        running.cancel()
        crew.thaw(all_of_them=True)
        await crew.stop()
        runner.environment.postgres.stop()


async def an_hour_ago(directory: Path, rate: float, clicks: float, carts: float) -> dict[str, int]:
    runner = Shop(world(directory, fresh=True), rate, clicks, carts)
    mine = [*KEPT, DERIVED, *(LONE + name for name in (*KEPT, DERIVED))]

    async def body(crew: Crew) -> None:
        await crew.start("shop", "--label", "late", *MEMORY)
        await crew.start("lone", *MEMORY)

        async def there() -> bool:
            return await least_upper(runner, mine) > 0

        await until("every table of late and lone an hour ago", there)
        await asyncio.sleep(BEFORE_S)
        await crew.stop()
        await asyncio.sleep(AFTER_THEM_S)
        await runner._stop_load()

    await attended(runner, None, body)
    return {
        "transactions": runner.load_counts.get("transactions", 0),
        "records": runner.click_counts.get("produced", 0) + runner.cart_counts.get("produced", 0),
        "malformed": runner.malformed,
    }


async def behind_s(runner: Shop, name: str) -> float:
    """Return the age of the position that the scratch of `late` has for a table. Raises MissingError without one."""
    shard = await runner._open_shard(name)
    directory = scratch_of(runner.environment.directory, "late") / "mirrors" / name
    mirror = Mirror.load(directory, shard.schema, shard.shard_id, boot_id())
    if mirror is None:
        raise MissingError(f"the driver of an hour ago left no mirror: directory={directory}.")
    return (runner._clock.now_ms() - mirror.upper) / 1000


async def now(options: argparse.Namespace, directory: Path, before: dict[str, int]) -> dict[str, Any]:
    runner = Shop(world(directory, fresh=False), options.rate, options.clicks, options.carts)
    samples = Samples(runner, directory / "samples", KEPT)
    late = "pipeline:shop:late"
    found: dict[str, Any] = {}
    failures: list[str] = []
    crews: list[Crew] = []
    marks: list[Uppers] = []

    async def body(crew: Crew) -> None:
        crews.append(crew)
        began_ms = runner._clock.now_ms()
        ages = [await behind_s(runner, name) for name in KEPT]
        found["late_behind_s"] = [round(min(ages)), round(max(ages))]
        if min(ages) < BEHIND_MS / 1000:
            failures.append(f"late is not an hour behind: {min(ages)} s")
        await crew.start("shop", "--instances", str(options.instances - 1), *MEMORY)

        async def present() -> bool:
            moved = await least_upper(runner, [*KEPT, DERIVED]) > began_ms
            return moved and len(crew.working) == options.instances - 1

        await until("the peers at the present", present)
        await crew.start("shop", "--label", "late", *MEMORY)
        started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        marks.append(Uppers(crew, (*KEPT, DERIVED)))
        watching = loop.create_task(marks[0].run())
        sampling = loop.create_task(sample(options.seconds / SAMPLES))
        while time.monotonic() < started_s + options.seconds:
            await asyncio.sleep(crew.rand.uniform(*BETWEEN_S))
            crew.throw()
            if "late_joined_s" not in found and crew.runs(late):
                found["late_joined_s"] = round(time.monotonic() - started_s, 1)
        for task in (watching, sampling):
            task.cancel()
        crew.thaw(all_of_them=True)
        runner.before_verify = alone
        runner.stop()
        await asyncio.Event().wait()

    async def sample(every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await samples.take()

    async def alone() -> None:
        async with samples.lone_held():
            stopped_ms = runner._clock.now_ms()
            carts = await open_remap(runner._consensus, runner._clock, runner._rand, f"topic/{CARTS}")

            async def drained() -> bool:
                if await least_upper(runner, [CARTS]) <= stopped_ms:
                    await carts.advance(stopped_ms)  # no other table is read with them, so no driver would advance them
                return await least_upper(runner, [*KEPT, DERIVED]) > stopped_ms

            await until("the drain of every table", drained)
            await carts.advance(await least_upper(runner, [DERIVED]))
            await samples.take()
            last_ms = samples.taken[-1].time_ms
            began_s = time.monotonic()
            await crews[0].start("lone", *MEMORY)

            async def came() -> bool:
                return await least_upper(runner, [LONE + name for name in (*KEPT, DERIVED)]) > last_ms

            await until("the lone writer", came, 600)
            found["lone_s"] = round(time.monotonic() - began_s, 1)
            found["rows_compared"], differing = await samples.compare()
            failures.extend(f"differs from the lone writer: {one}" for one in differing)

    report = await attended(runner, options.seconds + 900, body, options.seed)
    (crew,), (uppers,) = crews, marks
    letters = runner._dead_letters_before + report.dead_letters
    malformed = before["malformed"] + runner.malformed
    lives = {process: crew.lives[process] for process in sorted(crew.lives) if process.startswith("pipeline:shop")}
    judged = {
        "nothing was verified": not report.verify,
        "no sample with the derived table": not any(DERIVED in one.tables for one in samples.taken),
        f"dead letters {letters} != {malformed}": letters != malformed,
        "late never came in": not any(sum(each) for each in lives.get(late, {}).values()),
    }
    failures += [what for what, holds in judged.items() if holds]
    failures += [
        f"unequal {table} {counts}"
        for table, counts in report.verify.items()
        if any(counts[key] for key in ("missing", "extra", "different"))
    ]
    failures += [f"undrained {stuck}" for stuck in report.stuck]
    failures += [f"went back {name}" for name in uppers.back] + [f"not named {name}" for name in crew.unnamed]
    failures += [
        f"stood still {name} {stood_s:.1f} s beside a driver that worked"
        for name, stood_s in uppers.worked_s.items()
        if stood_s > STANDS_LIMIT_S and name != DERIVED
    ]
    return found | {
        "seed": options.seed,
        "seconds": options.seconds,
        "instances": options.instances,
        "thrown": dict(crew.done),
        "named": crew.named,
        "lives_won_lost": {p: [len(each), *map(sum, zip(*each.values(), strict=True))] for p, each in lives.items()},
        "transactions": before["transactions"] + report.transactions,
        "records": before["records"] + report.produced + runner.cart_counts.get("produced", 0),
        "samples": [f"{one.time_ms}{' with derived' * (DERIVED in one.tables)}" for one in samples.taken],
        "samples_lost": samples.lost,
        "rows_verified": sum(counts["rows"] for counts in report.verify.values()),
        "dead_letters": [letters, malformed],
        "stood_still_s": {name: round(stood_s, 1) for name, stood_s in uppers.longest_s.items()},
        "stood_beside_a_driver_s": {name: round(stood_s, 1) for name, stood_s in uppers.worked_s.items()},
        "failures": failures,
        "logs": str(directory / "logs"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--rate", type=float, default=50.0, help="transactions a second")
    parser.add_argument("--clicks", type=float, default=500.0, help="records a second")
    parser.add_argument("--carts", type=float, default=200.0, help="records a second of the keyed topic")
    parser.add_argument("--an-hour-ago", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instances < 2:
        parser.error("--instances must be 2 or more")
    if options.an_hour_ago:
        print(json.dumps(asyncio.run(an_hour_ago(options.an_hour_ago, options.rate, options.clicks, options.carts))))
        return 0
    print(f"instances: {machine()}", file=sys.stderr, flush=True)
    directory = Path(tempfile.mkdtemp(prefix="tidemill-instances-"))
    past = {**os.environ, "TIDEMILL_TEST_CLOCK": str(-BEHIND_MS)}
    command = [sys.executable, *sys.argv, "--an-hour-ago", str(directory)]
    before = json.loads(subprocess.run(command, env=past, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
    found = asyncio.run(now(options, directory, before))
    print(json.dumps(found))
    if found["failures"]:
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
