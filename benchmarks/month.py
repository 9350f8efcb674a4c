"""Thirty days of a small cluster in minutes: what it stores, and what its process holds, stays level.

Real processes: `python -m tidemill.cli.serve` on SQLite and a directory, with a moved clock. Each day is a life of the
node, under load for `--day-s` seconds in which its clock runs `--rate` times as fast; then it is stopped (every third
day by SIGKILL) and started on the next day. One busy topic with twelve hours' retention, a hundred idle ones, a table
of a thousand keys that is written all day, a consumer group that comes and goes, and a topic that lives for one day.

    ./dev bench calendar [--days 30] [--day-s 13] [--rate 100]
    ./dev bench calendar --sim [--days 30]      the same month in the simulation, with a crash in every third evening

Verified: every record within retention is read back, by offset, on the last day; nothing below the log's start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

import paths  # noqa: F401
from support.ports import free_port

T = TypeVar("T")
DAY_MS = 86_400_000
FIRST_MS = time.time_ns() // 1_000_000
"""Files keep their real times: a cluster that lives in their future finds them old, as it should."""
SETTLED_DAY = 3
TOLERANCE = 0.10
SLACK = {"consensus_bytes": 128 << 10, "objects": 12, "bucket_bytes": 256 << 10, "rss_bytes": 6 << 20, "descriptors": 6}
"""Tolerance of a figure, independent of its size: between two readings a log is rolled up, or files are merged."""
IDLE_TOPICS = 100
KEYS = 1000


class Cluster:
    """One node's directories, and its lives."""

    def __init__(self, home: Path, day_s: float, rate: float) -> None:
        self.home = home
        self.day_s = day_s
        self.rate = rate
        self.http, self.kafka = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start_ms = 0
        config = {
            "node": {
                "name": "n1",
                "data": str(home),
                "http": f"127.0.0.1:{self.http}",
                "kafka": f"127.0.0.1:{self.kafka}",
            },
            "kafka": {"default_partitions": 1},
            "topics": {"busy": {"partitions": 2, "retention_ms": DAY_MS // 2}},
            "metastore": {"persist_interval_s": 10.0},
            "retention": {"collect_after_s": 30.0},
        }
        for number in range(IDLE_TOPICS):
            config["topics"][f"idle{number}"] = {"partitions": 1}
        (home / "resolved.json").write_text(json.dumps(config))

    @property
    def objects_url(self) -> str:
        return f"file://{self.home}/objects"

    @property
    def consensus_url(self) -> str:
        return f"sqlite://{self.home}/consensus.db"

    def now_ms(self) -> int:
        return self.start_ms + int((time.monotonic() - self._began_s) * 1000 * self.rate)

    def start(self, day: int) -> None:
        self.start_ms, self._began_s = FIRST_MS + day * DAY_MS, time.monotonic()
        environment = {**os.environ, "TIDEMILL_TEST_CLOCK": f"{self.start_ms}:{self.rate}", "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tidemill.cli.serve", str(self.home / "resolved.json")],
            env=environment,
            stdout=(self.home / "node.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + 60
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{self.http}/readyz", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the node did not start: {(self.home / 'node.log').read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = None

    def figures(self) -> dict[str, int]:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        rss = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))
        return {"rss_bytes": rss, "descriptors": len(os.listdir(f"/proc/{self.process.pid}/fd"))}

    def stored(self) -> dict[str, Any]:
        """Return the stored sizes after the node has stopped."""
        by_kind: Counter[str] = Counter()
        size = count = 0
        for path in (self.home / "objects").rglob("*"):
            if path.is_file():
                kind = path.relative_to(self.home / "objects").parts[0]
                by_kind[kind] += 1
                size, count = size + path.stat().st_size, count + 1
        consensus = sum(path.stat().st_size for path in self.home.glob("consensus.db*"))
        return {"consensus_bytes": consensus, "objects": count, "bucket_bytes": size, "kinds": dict(by_kind)}

    def rows(self) -> dict[str, int]:
        """Records in consensus by the first word of their logs, and registers and leases by theirs."""
        import apsw

        from tidemill.base.clock import Rand, SystemClock
        from tidemill.consensus.factory import open_consensus

        database = apsw.Connection(str(self.home / "consensus.db"), apsw.SQLITE_OPEN_READONLY)
        logs = [name for (name,) in database.execute("SELECT name FROM logs")]
        found: Counter[str] = Counter(logs=len(logs))
        for table, column in (("registers", "key"), ("leases", "name")):
            for (name,) in database.execute(f"SELECT {column} FROM {table}"):
                found[f"{table} {name.split('/')[0]}"] += 1
        database.close()

        async def records() -> None:
            consensus = await open_consensus(self.consensus_url, SystemClock(), Rand())
            for name in logs:
                head = await consensus.log_head(name)
                found[f"log {name.split('/')[0]}"] += head.next - head.start
            await consensus.aclose()

        asyncio.run(records())
        return dict(found)


def patiently(call: Callable[[], T]) -> T:
    """A client that retries what Kafka's protocol lets it retry: under a fast clock leases are short."""
    from confluent_kafka import KafkaException

    for _ in range(50):
        try:
            return call()
        except KafkaException as error:
            last = error
            time.sleep(0.2)
    raise last


def produce(cluster: Cluster, topics: list[str], count: int, first: int) -> None:
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": f"127.0.0.1:{cluster.kafka}", "enable.idempotence": True, "linger.ms": 0, "log_level": 0}
    )
    failed: list[Any] = []
    for topic, number in ((topic, number) for topic in topics for number in range(first, first + count)):
        producer.produce(
            topic,
            f"{number:010d}".encode() + b"x" * 90,
            partition=number % 2 if topic == "busy" else 0,
            timestamp=cluster.now_ms(),
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
        if number % 5 == 4:
            producer.flush(30)
    if producer.flush(60) or failed:
        raise SystemExit(f"records were not delivered: topics={topics[:2]} errors={failed[:3]}")


def consume(cluster: Cluster) -> tuple[dict[int, list[int]], dict[int, tuple[int, int]]]:
    """A consumer that comes, reads all there is from the beginning, commits and goes: offsets and watermarks."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": f"127.0.0.1:{cluster.kafka}",
            "group.id": "readers",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )

    def watermarks(partition: int) -> tuple[int, int]:
        # An answer from before a leader was known stays in librdkafka's cache until metadata are requested.
        consumer.list_topics("busy", timeout=20)
        found: tuple[int, int] = consumer.get_watermark_offsets(TopicPartition("busy", partition), timeout=20)
        return found

    marks = {partition: patiently(lambda p=partition: watermarks(p)) for partition in (0, 1)}
    # From 0: what retention took is passed over by the client's own reset.
    consumer.assign([TopicPartition("busy", partition, 0) for partition in (0, 1)])
    seen: dict[int, list[int]] = {0: [], 1: []}
    until = time.monotonic() + 60
    while any((seen[p][-1] if seen[p] else low - 1) < high - 1 for p, (low, high) in marks.items()):
        message = consumer.poll(1.0)
        if message is not None and not message.error():
            seen[message.partition()].append(message.offset())
        if time.monotonic() > until:
            raise SystemExit(f"records could not be read: marks={marks}")
    ends = [TopicPartition("busy", p, marks[p][1]) for p in marks]
    patiently(lambda: consumer.commit(offsets=ends, asynchronous=False))  # the coordinator may still be loading
    consumer.close()
    return seen, marks


async def fill_journal(cluster: Cluster) -> None:
    """SQLite's engine keeps its newest 4 MiB of records as they came: filled on the first day, not over a week."""
    from tidemill.base.clock import Rand, SystemClock
    from tidemill.consensus.factory import open_consensus

    consensus, rand = await open_consensus(cluster.consensus_url, SystemClock(), Rand()), Rand()
    for number in range(96):
        await consensus.append("calendar/fill", 1, number, [os.urandom(65_000)], rand.nonce())
        await consensus.truncate("calendar/fill", number + 1)
    await consensus.aclose()


async def write_table(cluster: Cluster, day: int, writes: int) -> None:
    """Upserts of a table, as a pipeline makes them: each retracts the row before and inserts the new one."""
    import pyarrow as pa

    from tidemill.base.clock import Rand
    from tidemill.consensus.factory import open_consensus
    from tidemill.objects.factory import open_objects
    from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
    from tidemill.shards.registry import open_shard

    class Moved:
        def now_ms(self) -> int:
            return cluster.now_ms()

        def monotonic_s(self) -> float:
            return time.monotonic()

        def boot_s(self) -> float:
            return time.monotonic()

    clock, rand = Moved(), Rand()
    objects = await open_objects(cluster.objects_url, clock, rand)
    consensus = await open_consensus(cluster.consensus_url, clock, rand)
    schema = ShardSchema((Column("k", "int64"), Column("v", "int64")), ("k",))
    shard = await open_shard(consensus, objects, clock, rand, "table", schema)
    try:
        for number in range(writes):
            upper, at = shard.state.upper, max(cluster.now_ms(), shard.state.upper)
            keys = range((number * 50) % KEYS, (number * 50) % KEYS + 50)
            serial = day * writes + number
            # The value before this one, of the same fifty keys: KEYS / 50 writes ago.
            before = serial - KEYS // 50
            ks = list(keys) * (2 if before >= 0 else 1)
            vs = [serial] * 50 + ([before] * 50 if before >= 0 else [])
            diffs = [1] * 50 + ([-1] * 50 if before >= 0 else [])
            table = pa.table(
                {"k": pa.array(ks, pa.int64()), "v": pa.array(vs, pa.int64()),
                 TIME: pa.array([at] * len(ks), pa.int64()), DIFF: pa.array(diffs, pa.int64())}
            )  # fmt: skip
            part = await shard.write_part(table)
            await shard.compare_and_append(upper, at + 1, [part], "")
            await asyncio.sleep(cluster.day_s / writes / 2)
    finally:
        await shard.aclose()
        await consensus.aclose()
        await objects.aclose()


def one_day(cluster: Cluster, day: int, records: int, *, last: bool) -> dict[str, Any]:
    cluster.start(day)
    begun = time.monotonic()
    if day == 0:
        asyncio.run(fill_journal(cluster))
        produce(cluster, [f"idle{number}" for number in range(IDLE_TOPICS)], 1, 0)
    produce(cluster, [f"day{day}"], 20, 0)
    produce(cluster, ["busy"], records, day * records)
    asyncio.run(write_table(cluster, day, 40))
    seen, marks = consume(cluster)
    for partition, (low, high) in marks.items():
        if seen[partition] != list(range(low, high)):
            raise SystemExit(f"wrong records: partition={partition} marks={marks} read={len(seen[partition])}")
        if high - low > 3 * records:
            raise SystemExit(f"retention took nothing: partition={partition} marks={marks}")
    if day:
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{cluster.kafka}", "log_level": 0})
        patiently(lambda: [f.result(20) for f in admin.delete_topics([f"day{day - 1}"]).values()])
    time.sleep(max(0.0, cluster.day_s - (time.monotonic() - begun)))
    held = cluster.figures()
    cluster.stop(signal.SIGKILL if day % 3 == 1 and not last else signal.SIGTERM)
    return {"day": day + 1, **held, **cluster.stored(), "rows": cluster.rows()}


def compare(days: list[dict[str, Any]], settled_day: int = SETTLED_DAY) -> list[str]:
    """Return the figures that grew: the last day against day 3."""
    settled, last = days[settled_day - 1], days[-1]
    return [
        f"{name}: day {settled['day']} {settled[name]:,} → day {last['day']} {last[name]:,}"
        for name, slack in SLACK.items()
        if last[name] - settled[name] > max(slack, settled[name] * TOLERANCE)
    ]


def run_processes(days: int, day_s: float, rate: float, records: int) -> list[dict[str, Any]]:
    home = Path(tempfile.mkdtemp(prefix="tidemill-calendar-"))
    cluster = Cluster(home, day_s, rate)
    found = []
    try:
        for day in range(days):
            found.append(one_day(cluster, day, records, last=day == days - 1))
            print(json.dumps(found[-1]), flush=True)
    finally:
        if cluster.process is not None:
            cluster.process.kill()
            cluster.process.wait()
        if "CALENDAR_KEEP" not in os.environ:
            shutil.rmtree(home, ignore_errors=True)
    return found


def run_simulation(days: int) -> int:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from sim import world
    from sim.cli import prepare
    from sim.scenarios import calendar

    prepare()
    evenings: list[Any] = []

    async def month(one: world.World) -> None:
        evenings.extend(await calendar.month(one, days=days, idle_topics=IDLE_TOPICS))

    begun = time.monotonic()
    with world.swapped(world, "VIRTUAL_LIMIT_S", 1e7):
        outcome = world.World(7).run(month)
    for day in (SETTLED_DAY, days):
        if evenings:
            print(json.dumps({"day": day, **evenings[day - 1]}))
    print(outcome.error or f"level: {days} days, {outcome.steps:,} steps in {time.monotonic() - begun:.1f} s")
    return 0 if outcome.ok else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--day-s", type=float, default=13.0)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--records", type=int, default=1500)
    parser.add_argument("--sim", action="store_true")
    options = parser.parse_args()
    if options.sim:
        return run_simulation(options.days)
    grown = compare(run_processes(options.days, options.day_s, options.rate, options.records))
    print("\n".join(f"GREW {line}" for line in grown) or "level: nothing grew by more than a tenth since day 3")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
