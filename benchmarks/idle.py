"""Idle: the cost of an idle driver, and the time of the first batch after a pause.

    ./dev bench idle [--lanes shop,1,20,20/5,apart,together,captured/500] [--seconds S] [--threads N] [--json]

Method: a lane is brought to its newest time and left alone for `--settle` seconds; then the processor time of every
process is read from /proc over `--seconds`, in per cent of one core, and how often its threads left the processor by
themselves, which is how often they woke up. `shop` is the demo: node, Postgres, driver, JVM, all its tables, after a
load of `--load` seconds. `20` is a driver of twenty tables that one stream topic feeds, `20/5` of twenty that five
feed; there the sequencer runs in this process. Only the driver of `shop` has a JVM, because of its derived table.
`apart` is two pipelines of one table in a driver each, `together` the same two in one; `captured/500` a node without a
driver that captures five hundred tables: afterwards each gets a row, and shapes of some of them are read. Memory is
proportional, of which a page that n processes map is an n-th in each, after the pause. Then batches of 1,000 records
are bound one after another: the first after the pause, and the median of the next (for lanes that are a number of
tables only). Rows are compared with a replay after that (`shop`: not). `--threads N` names the N threads that used
most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

import paths
from demo.environment import prepare
from harbour import harbour, machine, percentile
from support.ports import free_port
from threads import Threads, Used
from tidemill.base.clock import SystemClock
from tidemill.base.config.config import parse
from tidemill.node.supervise.processes import driver_spec as driver_of
from tidemill.node.supervise.processes import group_by_driver, start_all
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from upsert import DEADLINE_S, Lane
from upsert_load import KEY, SCHEMA, Load
from upsert_tree import Tree

BATCH_RECORDS = 1_000
WARM_BATCHES = 9
PAIRS = ("apart", "together")
KEYS = 20_000

PIPELINE = """
def build(p):
    for number in range({tables}):
        topic = {name!r} + ("_" + str(number % {topics}) if number % {topics} else "")
        name = {name!r} + ("_" + str(number) if number else "")
        p.table(name, p.topic(topic, key={key!r}, schema={schema!r}))
"""


def measured(roots: Sequence[tuple[str, int]], sequencer: int, args: argparse.Namespace) -> dict[str, Any]:
    """Per cent of a core and wake-ups a second, by process; `driver` and `jvm` are what the target is about."""
    kinds = {os.getpid(): "sequencer"} if sequencer else {}
    for name, root in roots:
        kinds |= {pid: name if kind == "driver" else kind for pid, kind in Tree(root).kinds().items()}
    threads = Threads(kinds)
    began_s = time.monotonic()
    time.sleep(args.seconds)
    passed_s = time.monotonic() - began_s
    percent: Counter[str] = Counter()
    wakes: Counter[str] = Counter()
    busiest: list[Used] = []
    for process in threads.spent():
        mine, cpu_s = process.threads, process.cpu_s
        if process.kind == "sequencer":  # one thread of this process
            mine = [one for one in mine if one.tid == sequencer]
            cpu_s = sum(one.cpu_s for one in mine)
        percent[process.kind] += 100 * cpu_s / passed_s
        wakes[process.kind] += sum(one.wakes for one in mine) / passed_s
        busiest += mine
    busiest.sort(key=lambda one: -one.cpu_s)
    mib: Counter[str] = Counter()
    for pid, kind in kinds.items():
        if pid != os.getpid():
            mib[kind] += proportional_mib(pid)
    return {
        "mib": dict(mib),
        "percent_of_a_core": {kind: round(value, 2) for kind, value in percent.items()},
        "wakes_per_s": {kind: round(value, 1) for kind, value in wakes.items()},
        "driver_and_jvm_percent": round(percent["driver"] + percent["jvm"], 2),
        "threads": [
            {"percent": round(100 * o.cpu_s / passed_s, 2), "wakes_per_s": round(o.wakes / passed_s, 1), "who": o.who}
            for o in busiest[: args.threads]
        ],
    }


def proportional_mib(pid: int) -> int:
    """0 of a process that ended, or is another user's."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("Pss:")), 0)


async def small(lane: str, args: argparse.Namespace) -> dict[str, Any]:
    """A driver of some tables, fed by this process."""
    tables, _, topics = lane.partition("/")
    with tempfile.TemporaryDirectory(prefix="idle-") as directory:
        root = Path(directory)
        urls = StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db")
        stores = await open_stores(urls)
        asked = argparse.Namespace(partitions=4, keys=KEYS, master=args.master)
        text = PIPELINE.replace("{tables}", tables).replace("{topics}", topics or "1")
        driver = Lane(root, urls, stores, "auto", asked, text)
        for number in range(1, int(topics or "1")):
            await stores.catalogue.create_topic(f"{driver.load.name}_{number}", 4)
        await driver.start()
        try:
            await asyncio.sleep(args.settle)
            sequencer = next(t for t in threading.enumerate() if t.name == "tidemill-sequencer").native_id or 0
            found = await asyncio.to_thread(measured, [("driver", driver.pid)], sequencer, args)
            first_s = await driver.batch(BATCH_RECORDS)
            warm_s = [await driver.batch(BATCH_RECORDS) for _ in range(WARM_BATCHES)]
            found["first_ms"], found["warm_ms"] = round(first_s * 1e3, 1), round(percentile(warm_s, 0.5) * 1e3, 1)
            found["verified"] = await driver.verified()
        finally:
            await driver.stop()
        await stores.aclose()
    return found


async def pair(lane: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure two pipelines of one table each, with separate topics, as `up` starts their drivers."""
    with tempfile.TemporaryDirectory(prefix="idle-") as directory:
        root = Path(directory)
        stores = await open_stores(StoreUrls(f"file://{root}/objects", f"sqlite://{root}/consensus.db"))
        loads = [Load(stores, name, 4, KEYS) for name in ("one", "two")]
        pipelines: dict[str, Any] = {}
        for each in loads:
            await each.open()
            file = root / f"{each.name}.py"
            text = PIPELINE.replace("{tables}", "1").replace("{topics}", "1")
            file.write_text(text.format(name=each.name, key=KEY, schema=SCHEMA))
            driver = "small" if lane == "together" else ""
            pipelines[each.name] = {"file": str(file), "driver": driver, "spark": {"master": args.master}}
        urls = {"objects": {"url": stores.urls.objects}, "consensus": {"url": stores.urls.consensus}}
        config = parse({"node": {"data": str(root)}, "pipeline": pipelines, **urls}, origin="")
        found = [driver_of(config, names) for names in group_by_driver(config)]
        logs = [root / f"{spec.name}.log" for spec in found]
        processes = []
        for spec, path in zip(found, logs, strict=True):
            with path.open("wb") as log:
                environ = {**os.environ, **spec.environ}
                processes.append(subprocess.Popen(spec.command, env=environ, stdout=log, stderr=log))
        try:
            until_s = time.monotonic() + DEADLINE_S
            while sum(path.read_text().count("pipeline runs") for path in logs) < len(loads):
                if time.monotonic() > until_s:
                    raise SystemExit(f"the drivers did not start: {[path.read_text()[-1000:] for path in logs]}")
                for each in loads:
                    await each.produce(np.arange(BATCH_RECORDS), BATCH_RECORDS)
                    await each.bind()
                await asyncio.sleep(1)
            await asyncio.sleep(args.settle)
            sequencer = next(t for t in threading.enumerate() if t.name == "tidemill-sequencer").native_id or 0
            roots = [("driver", process.pid) for process in processes]
            out = await asyncio.to_thread(measured, roots, sequencer, args)
            out["verified"] = 0
            for each in loads:
                shard = await stores.shard(each.name)
                _, upper = await shard.frontiers()
                out["verified"] += each.verify(await shard.snapshot(upper - 1))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                await asyncio.to_thread(process.wait)
            for each in loads:
                await each.aclose()
            await stores.aclose()
    return out


@contextlib.asynccontextmanager
async def load(dsn: str, seconds: float) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "demo.load",
        "--dsn",
        dsn,
        "--rate",
        "20",
        stdout=asyncio.subprocess.DEVNULL,
        cwd=paths.ROOT,
    )
    try:
        await asyncio.sleep(seconds)
        yield
    finally:
        process.terminate()
        await process.wait()


async def shop(args: argparse.Namespace) -> dict[str, Any]:
    """The whole demo without its load."""
    async with harbour(pipeline=True) as environment:
        log = environment.directory / "logs" / "pipeline-shop.log"
        until_s = time.monotonic() + DEADLINE_S
        while not log.exists() or "derived table is ready" not in log.read_text():
            if time.monotonic() > until_s:
                raise SystemExit(f"the driver did not start: {log}")
            await asyncio.sleep(0.5)
        async with load(environment.dsn, args.load):
            pass
        await asyncio.sleep(args.settle)
        return await asyncio.to_thread(measured, _children(), 0, args)


async def captured(count: int, args: argparse.Namespace) -> dict[str, Any]:
    """A node and PostgreSQL: a database of `count` tables in which nothing happens."""
    names = [f"many.t{number}" for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="idle-") as directory:
        http, kafka = (f"127.0.0.1:{free_port()}" for _ in range(2))
        environment = prepare(Path(directory) / "demo", http=http, kafka=kafka, fresh=True)
        try:
            with psycopg.connect(environment.dsn, autocommit=True) as connection:
                connection.execute("CREATE SCHEMA many")
                for name in names:
                    connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, note text)")
                section = environment.config.capture["shop"].model_copy(update={"tables": ["many.*"]})
                config = environment.config.model_copy(update={"pipeline": {}, "capture": {"shop": section}})
                failed: list[BaseException] = []
                supervisor = start_all(config, SystemClock(), failed.append)
                try:
                    some = [*names[:: max(1, count // 5)], names[-1]]
                    places = [(await _followed(http, f"table={name}&offset=-1"))[0] for name in some]
                    await asyncio.sleep(args.settle)
                    found = await asyncio.to_thread(measured, _children(), 0, args)
                    for name in names:
                        connection.execute(f"INSERT INTO {name} VALUES (1, 'one')")
                    for place in places:
                        _, rows = await _followed(http, place)
                        if rows != 1:
                            raise SystemExit(f"a row did not come: at={place} rows={rows}")
                    found["verified"] = len(some)
                finally:
                    await supervisor.stop()
                if failed:
                    raise failed[0]
        finally:
            await asyncio.to_thread(environment.postgres.stop)
    return found


async def _followed(http: str, place: str) -> tuple[str, int]:
    """Ask a shape at a place of its log until it answers: (the next place, rows in the answer)."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{http}/v1/shape?{place}")
            rows = sum("key" in item for item in json.loads(answer.read() or b"[]"))
            table = place.partition("&")[0]
            at = f"handle={answer.headers['electric-handle']}&offset={answer.headers['electric-offset']}"
            return f"{table}&{at}&live=true", rows
        except OSError as error:
            if time.monotonic() > until_s:
                raise SystemExit(f"a shape is not served: at={place} error={error}") from error
        await asyncio.sleep(0.5)


def _children() -> list[tuple[str, int]]:
    """`driver`, `node` and `postgres` of a shop that this process started."""
    known = {"tidemill.spark.pipeline.driver": "driver", "tidemill.cli.serve": "node", "postgres": "postgres"}
    found = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_text()
        found += [(name, int(pid)) for mark, name in known.items() if mark in words]
    return found


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    out = []
    for lane in args.lanes.split(","):
        kind, _, count = lane.partition("/")
        if kind == "captured":
            found = {"lane": lane} | await captured(int(count or 500), args)
        else:
            run_lane = shop(args) if lane == "shop" else pair(lane, args) if lane in PAIRS else small(lane, args)
            found = {"lane": lane} | await run_lane
        out.append(found)
        if not args.json:
            tell(found)
    return out


def tell(found: dict[str, Any]) -> None:
    print(f"{found['lane']:8} driver and JVM together {found['driver_and_jvm_percent']:.2f} % of a core")
    print(f"       % of a core {found['percent_of_a_core']}")
    print(f"       proportional MiB {found['mib']}, together {sum(found['mib'].values()):,}")
    print(f"       wake-ups a second {found['wakes_per_s']}")
    if "first_ms" in found:
        print(f"       first batch {found['first_ms']} ms, warm {found['warm_ms']} ms")
    if "verified" in found:
        print(f"       verified {found['verified']:,}")
    for one in found["threads"]:
        print(f"       {one['percent']:6.2f} % {one['wakes_per_s']:8.1f}/s  {one['who']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="shop,1,20")
    parser.add_argument("--seconds", type=float, default=75, help="a Python worker of Spark ends after a minute")
    parser.add_argument("--settle", type=float, default=10)
    parser.add_argument("--load", type=float, default=10)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for lane in args.lanes.split(","):
        tables, slash, topics = lane.partition("/")
        if tables == "captured" and (topics.isdecimal() or not slash):
            continue
        if lane not in ("shop", *PAIRS) and not (tables.isdecimal() and int(tables) > 0 and (topics or not slash)):
            known = "shop, apart, together, captured/TABLES, TABLES and TABLES/TOPICS"
            parser.error(f"--lanes knows {known}, not {lane!r}")
    if not args.json:
        print(f"idle   {machine()}   over {args.seconds:g} s", flush=True)
    found = asyncio.run(run(args))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
