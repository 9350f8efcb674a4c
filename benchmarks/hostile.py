"""`./dev bench hostile [--for S] [--seed N]`: every fault that reaches a cluster from outside, in random order, under
Harbour Shop's load on two nodes.

Method: the demo's world with a second schema that is captured too (`hostile.*`), two nodes and the Spark driver as
`tidemill up` starts them. One throw after another, chosen at random. Four times a second a bystander produces a record
with acks=all through each node and asks each node for its health; once a second the statuses, pids, resident memory and
the loops' longest stalls are read. At the end the load stops, everything drains, and `verify` compares every table with
its source, row by row.

Holds when: every count of verify is zero; dead letters = malformed records of the load + poison records thrown; no
process was restarted; no bystander waited longer than 2 s for a throw that was not meant for it; memory stayed below
its budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import paths  # noqa: F401
from demo.environment import Environment, prepare
from demo.runner import Runner
from harbour import machine
from hostile_throws import THROWS, Throw, World, get
from support.ports import free_port
from tidemill.base.config.config import load
from tidemill.node.supervise.processes import offset_port
from tidemill.node.supervise.supervisor import Supervisor

NODES = 2
WAIT_LIMIT_S = 2.0
PROBE_EVERY_S = 0.25
MEMORY_LIMIT_BYTES = 1536 << 20
"""Limit of a node. The driver also has a JVM, bounded by its own setting."""
WARM_UP_S = 45.0
"""The JVM starts, first batches are planned: the bystander's waits count from here."""


class Attacked(Runner):
    def _note_stuck(self) -> None:
        """Record the stages that are stuck: faults cause some on purpose, and the watch counts them by name.

        A stage that does not drain is a failure.
        """


class Bystanders:
    """Bystanders produce to a topic without faults and ask for health; each wait is recorded with the throw in
    progress.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.throw = ""
        self.waits: dict[str, list[tuple[float, str]]] = {}
        self.failed: Counter[str] = Counter()
        self._stop = threading.Event()
        jobs = [*((self._produce, a) for a in world.kafka), *((self._ask, a) for a in world.http)]
        self._threads = [threading.Thread(target=self._loop, args=job, daemon=True) for job in jobs]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _loop(self, probe: Any, address: str) -> None:
        call = probe(address)
        name = f"{probe.__name__.strip('_')} {address}"
        while not self._stop.wait(PROBE_EVERY_S):
            throw, began_s = self.throw, time.monotonic()
            if not call():
                self.failed[f"{name} during {throw}"] += 1
            self.waits.setdefault(name, []).append((time.monotonic() - began_s, throw))

    def _ask(self, address: str) -> Any:
        return lambda: get(address, "/healthz")[0] == 200

    def _produce(self, address: str) -> Any:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": address, "acks": "all", "linger.ms": 0, "log_level": 0})

        def once() -> bool:
            errors: list[object] = []
            producer.produce("bystander", b"v", on_delivery=lambda error, _: errors.append(error))
            producer.flush(30)
            return errors == [None]

        return once


class Watch:
    """Pids, memory, stalls and marks, once a second."""

    def __init__(self, runner: Runner, supervisor: Supervisor) -> None:
        self.runner = runner
        self.supervisor = supervisor
        self.memory_bytes: dict[str, int] = {}
        self.stall_ms: dict[str, float] = {}
        self.stuck: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            for name, child in self.supervisor.children.items():
                if child.pid is not None:
                    self.memory_bytes[name] = max(self.memory_bytes.get(name, 0), _resident(child.pid))
            for mark in self.runner.marks.values():
                if mark.state in ("stuck", "blind"):
                    self.stuck[f"{mark.mark.name}: {mark.mark.reason[:100]}"] += 1
            await asyncio.to_thread(self._stalls)
            await asyncio.sleep(1)

    def _stalls(self) -> None:
        status, body = get(self.runner.environment.config.node.http, "/api/status")
        if status == 200:
            for process, facts in json.loads(body).get("facts", {}).items():
                loop = facts.get("loop")
                if loop:
                    self.stall_ms[process] = max(self.stall_ms.get(process, 0.0), loop["longest_stall_cpu_ms"])


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def world_of(directory: Path) -> Environment:
    """Return the demo's world, with the schema `hostile` captured as well and two topics for the throws."""
    first = free_port(2 * NODES)
    http, kafka = f"127.0.0.1:{first}", f"127.0.0.1:{first + NODES}"
    environment = prepare(directory, http=http, kafka=kafka, fresh=True)
    import psycopg

    with psycopg.connect(environment.dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA hostile")
        connection.execute("CREATE TABLE hostile.first (id int PRIMARY KEY)")
    text = environment.config_path.read_text().replace('tables = ["public.', 'tables = ["hostile.*", "public.')
    text += "\n[topics.hostile]\npartitions = 1\n[topics.bystander]\npartitions = 1\n"
    environment.config_path.write_text(text)
    environment.config = load(environment.config_path)
    return environment


async def bench(seconds: float, seed: int, rate: float, clicks: float, only: str) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="tidemill-hostile-"))
    environment = world_of(directory)
    config = environment.config
    throws = [throw for throw in THROWS if not only or throw.name in only.split(",")]
    runner = Attacked(environment, rate=rate, click_rate=clicks, crash=False, nodes=NODES)
    world = World(
        [offset_port(config.node.http, n) for n in range(NODES)],
        [offset_port(config.node.kafka, n) for n in range(NODES)],
        environment.dsn,
        random.Random(seed),
        lambda: next((c.pid for n, c in runner.supervisor.children.items() if n.startswith("pipeline")), None),
    )
    bystanders, thrown = Bystanders(world), Counter[str]()

    async def attack() -> Watch:
        while runner.phase != "running":
            await asyncio.sleep(0.5)
        watch = Watch(runner, runner.supervisor)
        watching = asyncio.get_running_loop().create_task(watch.run())
        await asyncio.sleep(WARM_UP_S)
        bystanders.start()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            throw: Throw = world.rand.choice(throws)
            bystanders.throw = throw.name
            thrown[throw.name] += 1
            print(f"  throws {throw.name} ({throw.unit})", file=sys.stderr, flush=True)
            try:
                await asyncio.to_thread(throw.run, world)
            except Exception as error:
                world.said.append(f"{throw.name}: {error!r}"[:200])
            bystanders.throw = f"after {throw.name}"
            await asyncio.sleep(world.rand.uniform(0.2, 1.5))
        await asyncio.to_thread(bystanders.stop)
        watching.cancel()
        runner.stop()
        return watch

    try:
        attacking = asyncio.get_running_loop().create_task(attack())
        report = await runner.run(seconds + 600)
        watch = await attacking
    finally:
        environment.postgres.stop()
    waits = {
        name: sorted(((round(s, 2), throw) for s, throw in each), reverse=True)[:3]
        for name, each in bystanders.waits.items()
    }
    late = [
        f"{name}: {s:.1f} s during {throw}"
        for name, each in bystanders.waits.items()
        for s, throw in each
        if s > WAIT_LIMIT_S
    ]
    unequal = {
        table: counts
        for table, counts in report.verify.items()
        if any(counts[key] for key in ("missing", "extra", "different"))
    }
    restarts = {name: child.restarts for name, child in runner.supervisor.children.items()}
    failures = [
        *(f"unequal {table} {counts}" for table, counts in unequal.items()),
        *([] if report.verify else ["nothing was verified"]),
        *(f"restarted {name} {count}" for name, count in restarts.items() if count),
        *late,
        *(f"failed {what} {count}" for what, count in bystanders.failed.items()),
        *(f"undrained {stuck}" for stuck in report.stuck),
        *(
            f"memory {name} {used >> 20} MiB"
            for name, used in watch.memory_bytes.items()
            if name.startswith("node") and used > MEMORY_LIMIT_BYTES
        ),
    ]
    if report.dead_letters != report.malformed + world.poison_records:
        failures.append(f"dead letters {report.dead_letters} != {report.malformed} + {world.poison_records} thrown")
    return {
        "seed": seed,
        "seconds": seconds,
        "thrown": dict(thrown),
        "transactions": report.transactions,
        "records": report.produced,
        "rows_verified": sum(counts["rows"] for counts in report.verify.values()),
        "dead_letters": [report.dead_letters, report.malformed, world.poison_records],
        "restarts": restarts,
        "longest_waits_s": waits,
        "probes": {name: len(each) for name, each in bystanders.waits.items()},
        "memory_mib": {name: used >> 20 for name, used in watch.memory_bytes.items()},
        "longest_stall_cpu_ms": watch.stall_ms,
        "stuck_seconds": dict(watch.stuck.most_common(30)),
        "throws_said": world.said[:20],
        "failures": failures,
        "logs": str(environment.directory / "logs"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--for", dest="seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--clicks", type=float, default=300.0)
    parser.add_argument("--only", default="", help="names of throws, by commas")
    options = parser.parse_args()
    print(machine())
    found = asyncio.run(bench(options.seconds, options.seed, options.rate, options.clicks, options.only))
    print(json.dumps(found, indent=1))
    print("HOLDS" if not found["failures"] else f"DOES NOT HOLD: {len(found['failures'])} failures")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
