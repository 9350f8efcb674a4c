"""Everything is killed, the consensus database is deleted, and Harbour Shop comes back from its bucket alone.

The persist interval and the signs of life are short here, so that the test need not wait for the defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from demo.environment import Environment, prepare
from support.e2e.demo import TABLES, ports, wait_until_ready
from support.waiting import DEADLINE_S, eventually, slowness
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.maintenance.restore.plan import plan_restore
from tidemill.metastore.backup.restore_source import find_source
from tidemill.objects.factory import open_objects

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "TIDEMILL_METASTORE__CHECKPOINT_INTERVAL_S": "1",
    "TIDEMILL_METASTORE__PERSIST_INTERVAL_S": "1",
    "TIDEMILL_METASTORE__ALIVE_INTERVAL_S": "1",
}


LOOK_AGAIN_S = 1.0
"""Seconds between checks. Each check reads the whole cluster, and competes with the pipeline for CPU time."""


class Shop:
    """The environment of Harbour Shop, whose processes this test starts and kills individually."""

    def __init__(self, directory: Path) -> None:
        self.http, self.kafka = ports(1)
        self.directory = directory
        self.environment: Environment = prepare(directory, http=self.http, kafka=self.kafka, fresh=False)
        self.running: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "tidemill", *arguments, "--config", str(self.environment.config_path)]
        return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **SETTINGS}, timeout=300)

    def answer(self, *arguments: str) -> Any:
        """The JSON answer of a command that must succeed."""
        done = self.command(*arguments, "--json")
        assert done.returncode == 0, (arguments, done.stdout[-4000:], done.stderr[-4000:])
        return json.loads(done.stdout.strip().splitlines()[-1])

    @contextmanager
    def up(self) -> Iterator[None]:
        line = [sys.executable, "-m", "tidemill", "up", "--config", str(self.environment.config_path)]
        with (self.directory.parent / "up.log").open("ab") as log:
            self.running = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, **SETTINGS})
        try:
            wait_until_ready(self.http)
            yield
        finally:
            self.kill_everything()

    def kill_everything(self) -> None:
        """SIGKILL to the supervisor and all of its descendants, parents first, so that nothing shuts down cleanly."""
        if self.running is None:
            return
        family = [self.running.pid]
        for pid in family:
            family += children_of(pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.running.wait()
        self.running = None
        eventually(lambda: not any(alive(pid) for pid in family), "everything is dead")

    def load(self, seconds: float) -> dict[str, int]:
        """Run shop transactions and clicks for that many seconds; return the acknowledged counts."""
        kafka = ["demo.clicks", "--brokers", self.kafka, "--rate", "200"]
        shop = ["demo.load", "--dsn", self.environment.dsn, "--rate", "60"]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", *arguments, "--seed", str(time.monotonic_ns() % 10**9)],
                stdout=subprocess.PIPE,
                cwd=ROOT,
            )
            for arguments in (shop, kafka)
        ]
        time.sleep(seconds * slowness())  # both have to start first
        counts: dict[str, int] = {}
        for process in running:
            process.terminate()
            output, _ = process.communicate(timeout=DEADLINE_S)
            counts |= json.loads(output.decode().strip().splitlines()[-1])
        assert counts["transactions"] > 0 and counts["produced"] > 0 and counts["failed"] == 0
        return counts

    def in_the_bucket(self) -> dict[str, Any]:
        """Plan a restore from the bucket alone and return its contents."""

        async def read() -> dict[str, Any]:
            clock, rand = SystemClock(), Rand()
            objects = await open_objects(self.environment.config.objects_url, clock, rand)
            try:
                return await plan_restore(objects, await find_source(objects, rand), clock, rand)
            except TidemillError as error:
                return {"shards": [], "error": str(error)}
            finally:
                await objects.aclose()

        return asyncio.run(read())

    def until_persisted(self) -> dict[str, Any]:
        """Wait until the bucket alone holds every table up to now."""
        now_ms = SystemClock().now_ms()
        found: dict[str, Any] = {}

        def covered() -> bool:
            nonlocal found
            found = self.in_the_bucket()
            uppers = {shard["name"]: shard["upper"] for shard in found["shards"]}
            return all(uppers.get(table, 0) > now_ms for table in TABLES)

        eventually(
            covered,
            lambda: f"the bucket covers the load at {now_ms}: {self.command('why').stdout[-3000:]} {found}",
            pause_s=LOOK_AGAIN_S,
        )
        return found

    def lose_consensus(self) -> None:
        lost = [path for path in self.directory.glob("consensus.db*")]
        assert lost
        for path in lost:
            path.unlink()

    def restore(self) -> Any:
        """Restore immediately after a kill. The command watches the bucket for a sign of life, and none comes."""
        return self.answer("restore", "--from", self.environment.config.objects_url)

    def verify(self) -> None:
        """Wait until every table equals its source, as long as capture and pipelines need for it."""

        def clean() -> bool:
            done = self.command("verify", "--json")
            if done.returncode not in (0, 1):
                return False
            found = json.loads(done.stdout.strip().splitlines()[-1])
            return found.keys() == TABLES and all(
                (v["missing"], v["extra"], v["different"]) == (0, 0, 0) and v["rows"] > 0 for v in found.values()
            )

        eventually(
            clean, lambda: f"verify is clean: {self.command('verify', '--json').stdout[-3000:]}", pause_s=LOOK_AGAIN_S
        )

    def consume(self, topic: str) -> list[tuple[int, int]]:
        """(partition, offset) of every record from offset 0, by a Kafka client."""
        consumer = Consumer({"bootstrap.servers": self.kafka, "group.id": "again", "enable.auto.commit": False})
        try:
            partitions = sorted(consumer.list_topics(topic, timeout=DEADLINE_S).topics[topic].partitions)
            ends = {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=DEADLINE_S) for p in partitions}
            consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
            wanted = sum(high - low for low, high in ends.values())
            found: list[tuple[int, int]] = []
            deadline_s = time.monotonic() + 60
            while len(found) < wanted and time.monotonic() < deadline_s:
                for message in consumer.consume(1000, timeout=1):
                    assert message.error() is None, message.error()
                    found.append((message.partition(), message.offset()))
            assert len(found) == wanted
            return found
        finally:
            consumer.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "demo")
    try:
        yield shop
    finally:
        shop.kill_everything()
        shop.environment.postgres.stop()


def children_of(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in thread.read_text().split()]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_harbour_shop_comes_back_from_its_bucket_alone(shop: Shop) -> None:
    with shop.up():
        counts = shop.load(6)
        persisted = shop.until_persisted()
    cluster = persisted["cluster"]["uuid"]
    assert persisted["totals"]["records"] >= counts["produced"]

    # The bucket has everything that was lost with consensus: the dry run reads all of it, and changes nothing.
    shop.lose_consensus()
    planned = shop.answer("restore", "--dry-run")
    assert planned["cluster"]["uuid"] == cluster and planned["checkpoint_age_ms"] > 0
    assert {shard["name"] for shard in planned["shards"]} >= TABLES
    restored = shop.restore()
    assert restored["findings"] == []
    assert restored["restored"]["restored_from"] == cluster
    assert restored["domains"][0]["age_ms"] > 0

    with shop.up():
        records = shop.consume("clicks")
        assert len(records) >= counts["produced"]
        assert len(set(records)) == len(records)
        shop.verify()
        [row] = shop.answer("sql", "SELECT count(*) AS n FROM payment")["rows"]
        assert int(row["n"] if isinstance(row, dict) else row[0]) > 0
        checked = shop.answer("doctor", "--deep")
        assert checked["clean"] and checked["incarnation"] == 2

        # A second disaster with work that reached no manifest: rows that Postgres has are captured again.
        before = shop.until_persisted()
        shop.load(4)
        shop.until_persisted()
    manifest = before["domains"][0]["manifest"]
    newer = [p for p in (shop.directory / "objects" / manifest).parent.iterdir() if p.name > Path(manifest).name]
    assert newer, "the load was persisted as well"
    for path in newer:
        path.unlink()
    shop.lose_consensus()
    again = shop.restore()
    assert again["findings"] == [] and again["restored"]["incarnation"] == 3
    assert again["domains"][0]["manifest"] == manifest
    with shop.up():
        shop.verify()
        assert shop.answer("doctor", "--deep")["clean"]
    assert "the slot is ahead of the restored state" in (shop.directory / "logs" / "node.log").read_text()
