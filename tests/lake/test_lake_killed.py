"""A publisher that is killed at any moment: the next one publishes exactly, and the sweep leaves no orphan."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.lake import publisher_child
from support.lake.publisher_child import consensus_url
from support.lake.readers import ForeignReader
from support.lake.world import contents, rows_of
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.lake.pointer import load_table, read_pointer
from tidemill.lake.publish import table_publisher
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import TablePublisher
from tidemill.lake.settings import PREFIX, LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.objects.factory import open_objects
from tidemill.shards.registry import open_shard

pytestmark = [pytest.mark.lake, pytest.mark.processes]

LIVES = 6


def live_and_die(directory: Path, life: int, after_s: float) -> int:
    """Run a publisher, kill it some time after its first publication, and return the last time it acknowledged."""
    command = [sys.executable, publisher_child.__file__, str(directory), str(life)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline()]
        time.sleep(after_s)  # any moment will do: it publishes without a pause
        process.kill()
        acknowledged += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return int([line for line in acknowledged if line.endswith("\n")][-1])


async def test_a_publisher_that_is_killed_loses_no_acknowledged_publication_and_leaves_nothing(
    tmp_path: Path, open_reader: Callable[[str], ForeignReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, clock, rand, choose = open_reader("duckdb"), SystemClock(), Rand(), Rand(7)
    for life in range(LIVES):
        acknowledged = live_and_die(tmp_path, life, choose.uniform(0.0, 1.0))
        consensus = await open_consensus(consensus_url(tmp_path), clock, rand)
        objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
        shard = await open_shard(consensus, objects, clock, rand, "t")
        pointer, _ = await read_pointer(consensus, shard.shard_id)
        assert pointer is not None and pointer.time_ms >= acknowledged
        location = (await load_table(consensus, objects, "t")).location
        assert rows_of(reader.read(location)) == await contents(shard, pointer.time_ms)
        await consensus.aclose()
        await objects.aclose()
    monkeypatch.setattr(table_publisher, "ORPHAN_MS", -1000)
    consensus = await open_consensus(consensus_url(tmp_path), clock, rand)
    objects = await open_objects(f"file://{tmp_path}/objects", clock, rand)
    shard = await open_shard(consensus, objects, clock, rand, "t")
    stores = LakeStores(consensus, objects, clock, rand, LakeSettings(f"file://{tmp_path}/objects"))
    publisher = TablePublisher(stores, PartColumns(objects), shard)
    _, upper = await shard.frontiers()
    await publisher.publish(upper - 1)
    await publisher.sweep()
    left = {meta.key async for meta in objects.list(PREFIX)}
    named = await publisher._named_objects(await publisher.load())
    assert left == {key for key in named if key.startswith(PREFIX)}
    location = (await load_table(consensus, objects, "t")).location
    assert rows_of(reader.read(location)) == await contents(shard, upper - 1)
    for each in (shard, consensus, objects):
        await each.aclose()
