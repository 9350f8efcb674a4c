"""A leading node that kills itself at a named step: `CONSENSUS_URL BUCKET STEP TIMES`.

One client commits batches that only their number determines, and prints each number once its commit returned.
Flushes, manifests, merges, collections and rollups happen all the time. The steps are those of
lsm_killed_child.py for the bucket, and for the log:

    before/after-fence
    before/after-append-batch       the replication of a commit
    before/after-append-manifest    the replication of a manifest that is in the bucket already
    before/after-append-uuid        the first record of a new domain
    before/after-rollup, before/after-truncate
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the packages of tests

from support.metastore.lsm_killed_child import OPTIONS, STEPS, Deadly, Fate, batch, watch_edits
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.api import Consensus, LogHead
from tidemill.consensus.factory import open_consensus
from tidemill.consensus.state_log.replica import COMMAND
from tidemill.metastore.domain.codec import decode_command
from tidemill.metastore.domain.commands import PersistManifest, SetDomainUuid
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.metastore.lsm.compaction.inline_executor import InlineExecutor
from tidemill.objects.local import LocalObjects

SETTINGS = DomainSettings(lease_ttl_ms=500, persist_interval_s=0.05, rollup_after_records=12, options=OPTIONS)
LAST = b"zz/last"
BUCKET_STEPS = STEPS
LOG_STEPS = (
    "before-fence",
    "after-fence",
    "before-append-uuid",
    "after-append-uuid",
    "before-append-batch",
    "after-append-batch",
    "before-append-manifest",
    "after-append-manifest",
    "before-rollup",
    "after-rollup",
    "before-truncate",
    "after-truncate",
)


class DeadlyConsensus:
    """An engine whose writes to a domain's log are steps."""

    def __init__(self, inner: Consensus, fate: Fate) -> None:
        self._inner = inner
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def fence(self, log: str, term: int) -> LogHead:
        self._fate.reached("before-fence")
        head = await self._inner.fence(log, term)
        self._fate.reached("after-fence")
        return head

    async def append(self, log: str, term: int, expected_next: int, records: Sequence[bytes], nonce: str) -> LogHead:
        what = kind_of(records[0])
        self._fate.reached(f"before-{what}")
        head = await self._inner.append(log, term, expected_next, records, nonce)
        self._fate.reached(f"after-{what}")
        return head

    async def truncate(self, log: str, before: int) -> LogHead:
        self._fate.reached("before-truncate")
        head = await self._inner.truncate(log, before)
        self._fate.reached("after-truncate")
        return head


def kind_of(record: bytes) -> str:
    if record[0] != COMMAND:
        return "rollup"
    command = decode_command(record[1:])
    if isinstance(command, PersistManifest):
        return "append-manifest"
    return "append-uuid" if isinstance(command, SetDomainUuid) else "append-batch"


async def last_number(domain: Domain) -> int:
    value = await domain.get(LAST)
    return int(value) if value else 0


async def main(url: str, bucket: str, step: str, times: int) -> None:
    clock, rand, fate = SystemClock(), Rand(), Fate(step, times)
    objects = LocalObjects.open(bucket, clock, rand)
    domain = await Domain.open(
        DomainContext(
            DeadlyConsensus(await open_consensus(url, clock, rand), fate),
            Deadly(objects, "flush", fate),
            "main",
            holder="child",
            clock=clock,
            rand=rand,
            settings=SETTINGS,
            merger=InlineExecutor(Deadly(objects, "merge", fate), OPTIONS, clock),
        )
    )
    await domain.wait_until_leading(30)
    assert domain._leader is not None
    watch_edits(domain._leader.database, fate)
    await domain.sync()

    async def write() -> None:
        number = await last_number(domain)
        while True:
            number += 1
            await domain.commit([*batch(number), (LAST, b"%d" % number)])
            print(f"acked {number}", flush=True)

    async def collect() -> None:
        while True:
            assert domain._leader is not None
            await domain._leader.database.background.collect_garbage()
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(collect())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
