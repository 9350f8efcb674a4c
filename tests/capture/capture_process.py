"""A capture in a process of its own, to be killed: python capture_process.py DSN NAME DIRECTORY."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.config import CaptureConfig
from tidemill.capture.machine import Capture
from tidemill.consensus.open import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.open import metastore_on
from tidemill.objects.open import open_objects
from tidemill.shards.remap import LogRemap
from tidemill.topics.log import LocalTopics


async def main(dsn: str, name: str, directory: Path) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    catalogue = Catalogue(metastore_on(consensus, objects, clock, rand), clock, rand)
    config = CaptureConfig(
        name=name, dsn=dsn, binding_interval_ms=10, idle_binding_ms=100, fragment_changes=5, table_poll_s=0.2
    )
    capture = Capture(
        config,
        topics=LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand),
        catalogue=catalogue,
        remap=LogRemap(consensus, f"capture/{name}", clock, rand),
        clock=clock,
        rand=rand,
    )
    print("ready", flush=True)
    await capture.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
