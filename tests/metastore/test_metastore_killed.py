"""kill -9 of a real process at every step of flush, merge, manifest and collection.

After each kill, every acknowledged row is present, the state is exactly that of the persisted seqno, and no live object
is missing. Once the next process has written a manifest, a collection leaves live objects only.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.metastore.lsm_killed_child import OPTIONS, PREFIX, STEPS, UUID, batch, state_at
from support.metastore.lsm_world import collect
from support.waiting import run
from tidemill.base.clock import Rand, SystemClock
from tidemill.metastore.lsm.database import Database, DatabaseContext
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.objects.local import LocalObjects

CHILD = Path(__file__).parents[1] / "support" / "metastore" / "lsm_killed_child.py"
LIMIT_S = 60.0


def live(path: Path, epoch: int, step: str, times: int, *, seconds: float | None = None) -> int:
    """Run the child until it dies, or kill it after `seconds`. Return the last seqno that it acknowledged."""
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(epoch), step, str(times)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    acked = 0
    first = child.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        child.kill()
    for line in [first, *child.stdout]:
        if line.endswith("\n") and line.startswith("acked "):
            acked = int(line.split()[1])
    assert child.wait(LIMIT_S) == -9, f"the child did not die of the step: step={step}"
    return acked


async def check(path: Path, epoch: int, acked: int) -> None:
    """Open the database as the next leader would, in a new epoch, and continue to write."""
    clock, rand = SystemClock(), Rand()
    objects = LocalObjects.open(str(path), clock, rand)
    files, manifests = SstFiles(objects, PREFIX), BucketManifests(objects, PREFIX, rand)
    database = await Database.open(
        files,
        manifests,
        DatabaseContext(
            domain_uuid=UUID,
            epoch=epoch,
            options=OPTIONS,
            clock=clock,
            rand=rand,
            background=False,
        ),
    )
    persisted = database.max_persisted_seqno
    assert persisted >= acked
    there = {name.number async for name in files.list()}
    assert {file.number for file in database.version.files} <= there
    expected = state_at(persisted)
    assert dict(await collect(database.scan())) == expected
    for key in list(expected)[:20]:
        assert await database.get(key) == expected[key]

    # Before this epoch has a manifest nothing of the dead one's is swept.
    before = {files.key(name) async for name in files.list()}
    done = await database.background.collect_garbage()
    assert done.deleted_files == 0 and not done.missing
    assert {files.key(name) async for name in files.list()} == before

    rows = batch(persisted + 1)
    database.apply(persisted + 1, [key for key, _ in rows], [value for _, value in rows])
    await database.flush()
    done = await database.background.collect_garbage()
    assert not done.missing and done.skipped_newer_epoch == 0
    assert {files.key(name) async for name in files.list()} == {files.key(file) for file in database.version.files}
    assert dict(await collect(database.scan())) == state_at(persisted + 1)
    await database.aclose()
    await objects.aclose()


def lives(path: Path, deaths: list[tuple[str, int, float | None]]) -> None:
    for at, (step, times, seconds) in enumerate(deaths):
        acked = live(path, 2 * at + 1, step, times, seconds=seconds)
        run(check(path, 2 * at + 2, acked))


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_the_first_and_at_a_later_time(step: str, tmp_path: Path) -> None:
    lives(tmp_path, [(step, 1, None), (step, 9, None)])


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)
    lives(tmp_path, [("never", 1, source.uniform(0.0, 0.5)) for _ in range(2)])
