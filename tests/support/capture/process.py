"""A capture in a separate process, which a test kills: python process.py DSN NAME DIRECTORY [OPTION …].

Options: `as-is`. `again`: paused tables are re-snapshotted without a minimum time between two copies. `slowly`: tables
are copied in small chunks, a few thousand rows per second. `aside`: side topics begin early and are appended slowly;
`appending` is printed when that begins.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tidemill.base.clock import Rand, SystemClock
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session import table_adder
from tidemill.capture.session.capture import Capture
from tidemill.capture.snapshot import side_topic, side_topic_append, wal_hold
from tidemill.capture.snapshot.side_topic_append import SideTopicAppender
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.shards.bindings.remap import LogRemap
from tidemill.topics.local_topics import LocalTopics


async def main(dsn: str, name: str, directory: Path, more: Collection[str] = ()) -> None:
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    catalogue = Catalogue(create_metastore(consensus, objects, clock, rand), clock, rand)
    config = CaptureConfig(
        name=name, dsn=dsn, linger_ms=10, binding_interval_ms=10, idle_binding_ms=100, fragment_changes=5,
        table_poll_s=0.2, copy_again="again" in more, copy_again_pause_s=0.1,
        identity="as-is" if "as-is" in more else "full",
        copy_rows_per_s=8000 if "slowly" in more else 0, copy_chunk_blocks=4 if "slowly" in more else 2048,
        copy_aside_after_s=0.3 if "aside" in more else 30.0,
    )  # fmt: skip
    if "aside" in more:
        append_slowly()
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


def append_slowly() -> None:
    whole, to = SideTopicAppender._fetch_batches, SideTopicAppender.append_up_to

    async def read(self: Any, partition: int, at: int) -> Any:
        await asyncio.sleep(0.02)
        return await whole(self, partition, at)

    async def reported(self: Any, *args: Any) -> int:
        print("appending", flush=True)
        return await to(self, *args)

    side_topic_append.READ_BYTES = 2048
    side_topic.MAX_RECORDS_BETWEEN_SESSIONS, table_adder.MAX_REMAINING_RECORDS = 100, 5
    wal_hold.RECORD_S = 0.2
    SideTopicAppender._fetch_batches, SideTopicAppender.append_up_to = read, reported  # type: ignore[method-assign]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
