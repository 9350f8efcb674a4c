"""A capture in a process of its own, to be killed: python capture_process.py DSN NAME DIRECTORY [OPTION …].

Options: `as-is`. `again`: parked tables are copied again by themselves, however soon. `slowly`: tables are
copied in small chunks, a few thousand rows in a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
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


async def main(dsn: str, name: str, directory: Path, more: Collection[str] = ()) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    catalogue = Catalogue(metastore_on(consensus, objects, clock, rand), clock, rand)
    config = CaptureConfig(
        name=name, dsn=dsn, binding_interval_ms=10, idle_binding_ms=100, fragment_changes=5, table_poll_s=0.2,
        copy_again="again" in more, copy_again_pause_s=0.1, identity="as-is" if "as-is" in more else "full",
        copy_rows_per_s=8000 if "slowly" in more else 0, copy_chunk_blocks=4 if "slowly" in more else 2048,
    )  # fmt: skip
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
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
