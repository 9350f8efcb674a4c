"""A node of the failover tests: `domain_child.py CONSENSUS_URL BUCKET TTL_MS`; leads, commits without end, reports
each.

Prints JSON lines: {"leading": term}, then {"key": …, "seqno": …} after every commit that returned.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import FencedError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
from tidemill.metastore.lsm.options import Options
from tidemill.objects.local import LocalObjects

SETTINGS = dict(persist_interval_s=0.1, rollup_after_records=16, options=Options(write_buffer_bytes=64 << 10))
"""Flushes, manifests, merges, rollups all the time: the kill falls into any of them."""


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def main(url: str, bucket: str, ttl_ms: str) -> None:
    clock, rand = SystemClock(), Rand()
    settings = DomainSettings(lease_ttl_ms=int(ttl_ms), **SETTINGS)  # type: ignore[arg-type]
    consensus = await open_consensus(url, clock, rand)
    objects = LocalObjects.open(bucket, clock, rand)
    domain = await Domain.open(
        DomainContext(consensus, objects, "main", holder="child", clock=clock, rand=rand, settings=settings)
    )
    await domain.wait_until_leading(30)
    say(leading=domain.term)

    async def write(client: int) -> None:
        number = 0
        while True:
            key = f"{domain.term:04d}-{client}-{number:06d}"
            number += 1
            try:
                seqno = await domain.commit([(key.encode(), b"x" * 200), (b"last %d" % client, key.encode())])
            except (FencedError, UnavailableError, UnknownOutcomeError):
                await asyncio.sleep(0.05)
                continue
            say(key=key, seqno=seqno)

    await asyncio.gather(*[write(client) for client in range(4)])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
