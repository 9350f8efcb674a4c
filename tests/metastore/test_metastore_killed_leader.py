"""kill -9 of a leading node at every step of replication and of the later steps in the bucket.

Another node leads after each kill. Every acknowledged commit is present, the rows are exactly those of the last commit
in the log, each file of the replicated manifest exists, and collections leave live objects only.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from support.metastore.domain_killed_child import BUCKET_STEPS, LAST, LOG_STEPS, SETTINGS, last_number
from support.metastore.domain_world import DomainWorld, rows_of
from support.metastore.lsm_killed_child import batch, state_at
from support.waiting import DEADLINE_S, run
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.state import assert_invariants
from tidemill.metastore.lsm.file_store import SstFiles

CHILD = Path(__file__).parents[1] / "support" / "metastore" / "domain_killed_child.py"
LIMIT_S = 60.0


def live(url: str, bucket: Path, step: str, times: int) -> int:
    """Run the child until it dies at the step. Return the number of its last acknowledged commit."""
    child = subprocess.run(
        [sys.executable, str(CHILD), url, str(bucket), step, str(times)], stdout=subprocess.PIPE, timeout=LIMIT_S
    )
    assert child.returncode == -9, f"the child did not die of the step: step={step} returncode={child.returncode}"
    acked = [line for line in child.stdout.split(b"\n")[:-1] if line.startswith(b"acked ")]
    return int(acked[-1].split()[1]) if acked else 0


def check(url: str, bucket: Path, acked: int) -> None:
    async def body() -> None:
        async with DomainWorld(url, bucket) as world:
            domain = await world.node(SETTINGS)
            assert domain._leader is not None
            database = domain._leader.database
            await domain.sync()
            last = await last_number(domain)
            assert last >= acked
            expected = state_at(last) | ({LAST: b"%d" % last} if last else {})
            assert await rows_of(domain) == expected
            assert_invariants(domain.state)
            await replicated_manifest_is_in_the_bucket(domain)
            done = await database.background.collect_garbage()
            assert not done.missing

            # After this leader's first commit and manifest, the dead leader's leftovers may be deleted.
            await domain.commit([*batch(last + 1), (LAST, b"%d" % (last + 1))])
            await domain.flush(30)
            # The leader merges concurrently: repeat until the bucket holds exactly the files that the version names.
            async with asyncio.timeout(DEADLINE_S):
                while await listed(database.files) != {file.number for file in database.version.files}:
                    done = await database.background.collect_garbage()
                    assert not done.missing and not done.skipped_newer_epoch
                    await asyncio.sleep(0.01)
            assert await rows_of(domain) == state_at(last + 1) | {LAST: b"%d" % (last + 1)}

    run(body())


async def replicated_manifest_is_in_the_bucket(domain: Domain) -> None:
    """Check that the replicated manifest is in the bucket. Otherwise a restore could bring back less than was
    persisted."""
    while True:
        manifest = domain.state.manifest
        bucket = domain._context.bucket(domain.domain_uuid)
        there = {(name.epoch, name.number) async for name in bucket.list()}
        if domain.state.manifest is manifest:
            assert manifest is None or (manifest.epoch, manifest.number) in there
            return


async def listed(files: SstFiles) -> set[int]:
    return {name.number async for name in files.list()}


def dies_and_is_followed(url: str, bucket: Path, step: str) -> None:
    once_in_a_life = "uuid" in step or "fence" in step
    check(url, bucket, live(url, bucket, step, 1 if once_in_a_life else 4))


@pytest.mark.parametrize("step", [*LOG_STEPS, *BUCKET_STEPS])
def test_a_leader_killed_at_any_step_loses_nothing_acknowledged(step: str, tmp_path: Path) -> None:
    dies_and_is_followed(f"sqlite://{tmp_path}/consensus.db", tmp_path / "bucket", step)


@pytest.mark.postgres
@pytest.mark.parametrize("step", LOG_STEPS)
def test_a_leader_on_postgresql_killed_at_any_step_of_replication(step: str, tmp_path: Path, postgres_dsn: str) -> None:
    dies_and_is_followed(postgres_dsn, tmp_path / "bucket", step)
