"""Topics on durable stores: SQLite and a local directory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.topics.world import batch, values_of
from support.waiting import DEADLINE_S, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.topics.api import NotLeaderError
from tidemill.topics.local_topics import LocalTopics
from tidemill.topics.membership import Membership, NodeInfo
from tidemill.topics.partition_reader import LogPartitionReader

PARTITIONS = 3
SCRIPT = Path(__file__).parents[1] / "support" / "topics" / "killed_producer.py"


async def create_topic(directory: Path) -> str:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite:{directory / 'consensus.db'}", clock, rand)
    objects = await open_objects(str(directory / "objects"), clock, rand)
    metastore = create_metastore(consensus, objects, clock, rand)
    row = await Catalogue(metastore, clock, rand).create_topic("t", PARTITIONS)
    await metastore.aclose()
    await consensus.aclose()
    await objects.aclose()
    return row.topic_id


async def read_back(directory: Path, topic_id: str) -> list[list[tuple[int, str]]]:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite:{directory / 'consensus.db'}", clock, rand)
    objects = await open_objects(str(directory / "objects"), clock, rand)
    reader = LogPartitionReader(consensus, objects)
    logs = []
    for partition in range(PARTITIONS):
        end = await reader.high_watermark(topic_id, partition)
        logs.append(values_of(await reader.read(await reader.plan(topic_id, partition, 0, end))))
    await consensus.aclose()
    await objects.aclose()
    return logs


def test_nothing_acknowledged_is_lost_and_nothing_is_doubled_when_the_process_is_killed(tmp_path: Path) -> None:
    topic_id = asyncio.run(create_topic(tmp_path))
    acknowledged: dict[tuple[int, int], str] = {}
    for life in range(3):
        command = [sys.executable, str(SCRIPT), str(tmp_path), topic_id, str(PARTITIONS), str(life)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(150):
            partition, offset, value = process.stdout.readline().split()
            acknowledged[int(partition), int(offset)] = value
        process.kill()
        rest = process.stdout.read()
        process.wait()
        for line in rest.splitlines():
            fields = line.split()
            if len(fields) == 3 and line in rest.splitlines()[:-1]:
                acknowledged[int(fields[0]), int(fields[1])] = fields[2]
    logs = asyncio.run(read_back(tmp_path, topic_id))
    for partition, log in enumerate(logs):
        assert [offset for offset, _ in log] == list(range(len(log)))
        values = [value for _, value in log]
        assert len(set(values)) == len(values)
        for life in range(3):
            numbers = [int(v.split(".")[1]) for v in values if v.startswith(f"{life}.")]
            assert numbers == list(range(len(numbers)))
        for (where, offset), value in acknowledged.items():
            if where == partition:
                assert log[offset] == (offset, value)
    assert len(acknowledged) >= 450


async def two_nodes(dsn: str, directory: Path) -> None:
    """Two nodes on separate connections share partitions by lease. After one leaves, the other has all of them."""
    clock, rand = SystemClock(), Rand()
    stores: list[Any] = []
    nodes, members = [], []
    for name in ("a", "b"):
        consensus = await open_consensus(dsn, clock, rand)
        objects = await open_objects(str(directory / "objects"), clock, rand)
        membership = Membership(consensus, name, NodeInfo(), clock, rand, poll_s=0.05)
        await membership.start()
        metastore = create_metastore(consensus, objects, clock, rand)
        catalogue = Catalogue(metastore, clock, rand)
        stores += [metastore, consensus, objects]
        members.append(membership)
        nodes.append(LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand, assignment=membership))
    row = await catalogue.create_topic("t", 16)
    await until(lambda: all(len(m.members()) == 2 for m in members))

    async def produce(partition: int, number: int) -> None:
        while True:
            leader = nodes[("a", "b").index(members[1].leader_of(row.topic_id, partition))]
            data = batch(f"{partition}.{number}", pid=partition + 1, seq=number)
            try:
                result = await leader.produce_nowait(row.topic_id, partition, data)
                assert result.base_offset == number
                return
            except NotLeaderError:
                await asyncio.sleep(0.01)

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(produce(p, 0) for p in range(16)))
        assert {members[0].leader_of(row.topic_id, p) for p in range(16)} == {"a", "b"}
        await nodes[0].aclose()
        await members[0].aclose()
        await asyncio.gather(*(produce(p, 1) for p in range(16)))
        reader = LogPartitionReader(consensus, objects)
        for partition in range(16):
            refs = await reader.plan(row.topic_id, partition, 0, 2)
            assert values_of(await reader.read(refs)) == [(0, f"{partition}.0"), (1, f"{partition}.1")]
    await nodes[1].aclose()
    await members[1].aclose()
    for store in stores:
        await store.aclose()


@pytest.mark.postgres
def test_two_nodes_on_postgresql_hand_partitions_over(postgres_dsn: str, tmp_path: Path) -> None:
    asyncio.run(two_nodes(postgres_dsn, tmp_path))


def test_two_nodes_on_sqlite_hand_partitions_over(tmp_path: Path) -> None:
    asyncio.run(two_nodes(f"sqlite:{tmp_path / 'consensus.db'}", tmp_path))
