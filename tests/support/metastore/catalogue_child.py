"""A node to be killed: leads every domain of the metastore and creates topics and offsets without end.

usage: catalogue_child.py DIRECTORY HOLDER TTL_MS      prints "leading", then each name whose creation returned
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from msgspec.structs import replace

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.status.logging import configure_logs
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.factory import NODE, create_metastore
from tidemill.metastore.rows import GROUP_OFFSETS
from tidemill.metastore.rows.groups import GroupOffsetRow
from tidemill.objects.factory import open_objects

DOMAINS = 3


async def main(directory: Path, holder: str, ttl_ms: int) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite:{directory / 'consensus.db'}", clock, rand)
    objects = await open_objects(str(directory / "objects"), clock, rand)
    settings = replace(NODE, lease_ttl_ms=ttl_ms, persist_interval_s=0.2)
    metastore = create_metastore(
        consensus, objects, clock, rand, domains=DOMAINS, settings=settings, holder=holder
    )  # fmt: skip
    await metastore.start()
    for domain in await metastore.domains():
        assert isinstance(domain, Domain)
        await domain.wait_until_leading(30.0)
    print("leading", flush=True)
    catalogue = Catalogue(metastore, clock, rand)
    life = holder.replace("/", "-")
    for number in range(1_000_000):
        name = f"{life}-{number}"
        row = await catalogue.create_topic(name, 1)
        await metastore.commit([GROUP_OFFSETS.encode(GroupOffsetRow(name, row.topic_id, 0, number))])
        print(name, flush=True)


if __name__ == "__main__":
    configure_logs("error")  # to stderr: stdout is for names
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
