"""Stores that return to an earlier state, or belong to another cluster: real nodes over a real failover, a freeze, and
a race to start first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from support.faults.cluster import Cluster, until
from support.lagging_standby import Pair
from support.waiting import eventually

pytestmark = pytest.mark.postgres

TOPIC = "records"
QUICK = """
[metastore]
persist_interval_s = 1
checkpoint_interval_s = 1
alive_interval_s = 0.5

[topics.records]
partitions = 1
"""


@contextmanager
def started(directory: Path, toml: str, name: str = "n1") -> Iterator[Cluster]:
    cluster = Cluster(directory, toml, name=name)
    cluster.up()
    try:
        yield cluster
    finally:
        if cluster.running:
            freeze(cluster, signal.SIGCONT)
        cluster.close()


def freeze(cluster: Cluster, number: int) -> None:
    """Send SIGSTOP or SIGCONT to `up` and all its descendants, as a paused machine would."""
    assert cluster._process is not None
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    parents = dict(zip(map(int, listed[::2]), map(int, listed[1::2]), strict=True))
    family = [cluster._process.pid]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    for pid in family:
        os.kill(pid, number)


def produce(cluster: Cluster, values: list[str], timeout_s: float = 60.0) -> list[str]:
    """The values that were acknowledged."""
    acknowledged: list[str] = []

    def reported(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.append((message.value() or b"").decode())

    producer = Producer({"bootstrap.servers": cluster.kafka, "message.timeout.ms": int(timeout_s * 1000)})
    for value in values:
        producer.produce(TOPIC, value, on_delivery=reported)
    producer.flush(timeout_s + 5)
    return acknowledged


def consume(cluster: Cluster) -> list[str]:
    consumer = Consumer({"bootstrap.servers": cluster.kafka, "group.id": "g", "enable.partition.eof": True})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    found: list[str] = []
    while True:
        message = consumer.poll(30)
        assert message is not None
        error = message.error()
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            consumer.close()
            return found
        assert error is None, error
        found.append((message.value() or b"").decode())


def test_f521_a_failover_of_consensus_that_lost_commits_restarts_the_node_which_goes_on_with_what_exists(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    try:
        with started(tmp_path / "n1", f'{QUICK}\n[consensus]\nurl = "{pair.url}"\n') as cluster:
            cluster.ready()
            kept = [f"kept {i}" for i in range(20)]
            assert produce(cluster, kept) == kept
            pair.caught_up()
            pair.cut_off()
            lost = [f"lost {i}" for i in range(20)]
            assert produce(cluster, lost) == lost
            before = cluster.children()["node"]
            pair.fail_over()
            until(lambda: cluster.children().get("node", before) != before, lambda: cluster.said)
            until(lambda: "consensus returned to an earlier state" in cluster.said, lambda: cluster.said)
            [said] = [line for line in cluster.said.splitlines() if "returned to an earlier state" in line][:1]
            assert (
                f"consensus=postgresql://postgres@127.0.0.1,127.0.0.1:{pair.primary.port},{pair.standby.port}" in said
            )
            assert "seen=term" in said
            assert "found=term" in said
            assert "synchronous_standby_names" in said
            cluster.ready()
            new = [f"new {i}" for i in range(20)]
            assert produce(cluster, new) == new
            found = consume(cluster)
            assert found[: len(kept)] == kept
            assert found[-len(new) :] == new
            # Nothing of the lost records remains in the middle: consensus has one consistent state, that of the moment
            # of the disconnection.
            assert found == kept + new
    finally:
        pair.close()


def objects_in(bucket: Path) -> set[Path]:
    """List the objects, without the temporary files of writes that the freeze interrupted."""
    return {path for path in bucket.rglob("*") if path.is_file() and ".tmp" not in path.parts}


def test_f522_a_frozen_cluster_that_was_replaced_meanwhile_acknowledges_and_deletes_nothing_and_ends(
    tmp_path: Path,
) -> None:
    with started(tmp_path / "old", QUICK) as old:
        old.ready()
        records = [f"old {i}" for i in range(20)]
        assert produce(old, records) == records
        bucket = old.data / "objects"
        new = tmp_path / "new" / "consensus.db"
        new.parent.mkdir()

        def restored() -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "tidemill", "restore", "--json", "--config", str(old.config)]
            return subprocess.run(
                [*line, "--consensus", f"sqlite:///{new}"], capture_output=True, text=True, timeout=120, env=old.environ
            )

        until(lambda: any((bucket / "metastore" / "cluster").glob("*")), lambda: "the cluster is in the bucket")
        refused = restored()
        assert refused.returncode == 2, refused
        assert "cluster is alive" in refused.stderr

        freeze(old, signal.SIGSTOP)
        acknowledged: list[str] = []
        late = threading.Thread(target=lambda: acknowledged.extend(produce(old, ["late"], 15.0)))
        late.start()
        done = restored()
        assert done.returncode == 0, done.stderr
        before = objects_in(bucket)
        freeze(old, signal.SIGCONT)
        statuses = []
        while old.running:
            statuses.append(old.get("/readyz")[0])
        assert 200 not in statuses
        assert "the bucket belongs to another cluster" in old.said
        for asked in (
            lambda: old.why("node:n1")[1].get("chain"),
            lambda: old.command("status", "--json")[1].get("rows"),
        ):
            rows = {row["name"]: row for row in eventually(asked, lambda: old.said)}
            assert "the bucket belongs to another cluster" in rows["node:n1"]["reason"]
        late.join()
        assert acknowledged == []
        assert before - objects_in(bucket) == set()


def test_f523_of_two_clusters_that_begin_on_one_empty_bucket_one_serves_and_the_other_ends(tmp_path: Path) -> None:
    bucket = f'\n[objects]\nurl = "{tmp_path / "bucket"}"\n'
    with (
        started(tmp_path / "one", QUICK + bucket, "n1") as one,
        started(tmp_path / "two", QUICK + bucket, "n1") as two,
    ):
        clusters = [one, two]
        until(lambda: not (one.running and two.running), lambda: one.said + two.said)
        [winner] = [cluster for cluster in clusters if cluster.running]
        [loser] = [cluster for cluster in clusters if not cluster.running]
        winner.ready()
        assert produce(winner, ["first"]) == ["first"]
        assert winner.running
        said = [line for line in loser.said.splitlines() if "bucket" in line]
        assert any("another cluster" in line or "claimed the bucket" in line or "has one" in line for line in said), (
            loser.said
        )
