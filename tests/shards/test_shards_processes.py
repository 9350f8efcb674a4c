"""Writers in separate processes, on SQLite and a directory: racing, and killed between upload and append."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.shards.world import SCHEMA, append, contents_of
from support.waiting import DEADLINE_S
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.factory import open_consensus
from tidemill.objects.factory import open_objects
from tidemill.shards.registry import open_shard, read_shards
from tidemill.shards.state.state import check_invariants

CHILD = Path(__file__).parents[1] / "support" / "shards" / "writer_child.py"


def urls(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "objects").mkdir(exist_ok=True)
    return f"sqlite://{tmp_path}/consensus.db", f"file://{tmp_path}/objects"


def child(tmp_path: Path, name: str, until: int, mode: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, str(CHILD), *urls(tmp_path), name, str(until), mode]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_four_racing_processes_write_every_interval_exactly_once(tmp_path: Path) -> None:
    count = 40
    children = [child(tmp_path, f"w{i}", count, "race") for i in range(4)]
    try:
        assert [line(c) for c in children] == ["ready"] * 4
        for c in children:
            assert c.stdin is not None
            c.stdin.write("\n")
            c.stdin.flush()
        printed = [c.communicate(timeout=DEADLINE_S)[0].split("\n") for c in children]
    finally:
        for c in children:
            c.kill()
    assert [c.returncode for c in children] == [0] * 4
    won = {int(text.split()[1]): f"w{i}" for i, lines in enumerate(printed) for text in lines if text}
    assert sum(len([x for x in lines if x]) for lines in printed) == count
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(urls(tmp_path)[0], clock, rand)
    objects = await open_objects(urls(tmp_path)[1], clock, rand)
    shard = await open_shard(consensus, objects, clock, rand, "t")
    assert await shard.frontiers() == (0, count)
    check_invariants(shard.state)
    rows = await shard.snapshot(count - 1)
    assert contents_of(rows) == {(k, w): 1 for k, w in won.items()}
    assert [(i.name, i.upper, i.rows) for i in await read_shards(consensus)] == [("t", count, count)]
    await consensus.aclose()
    await objects.aclose()


async def test_a_writer_killed_between_upload_and_append_leaves_an_orphan_and_nothing_else(tmp_path: Path) -> None:
    clock, rand = SystemClock(), Rand()
    objects = await open_objects(urls(tmp_path)[1], clock, rand)
    consensus = await open_consensus(urls(tmp_path)[0], clock, rand)
    shard = await open_shard(consensus, objects, clock, rand, "t", SCHEMA)
    await append(shard, 0, 5, [(1, "before", 3, 1)])
    process = child(tmp_path, "victim", 0, "hang")
    try:
        said = line(process)
        assert said.startswith("stored shards/")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    orphan = said.split()[1]
    assert await objects.head(orphan) is not None
    assert await shard.frontiers() == (0, 5)
    await append(shard, 5, 8, [(2, "after", 6, 1)])
    fresh = await open_shard(consensus, objects, clock, rand, "t")
    assert contents_of(await fresh.snapshot(7)) == {(1, "before"): 1, (2, "after"): 1}
    assert all(p.object_key != orphan for b in fresh.state.batches for p in b.parts)
    await consensus.aclose()
    await objects.aclose()
