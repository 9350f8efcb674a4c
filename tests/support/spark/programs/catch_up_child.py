"""A process that catches up with what waits in a topic: prints its steps and its peak memory as one JSON line.

python catch_up_child.py OBJECTS_URL CONSENSUS_URL SCRATCH
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.base.runtime.daemon_threads import exit_now
from tidemill.base.status.histogram import StageHistograms
from tidemill.spark.decode.dead_letter_rows import DEAD_LETTERS
from tidemill.spark.ingest.dead_letters import DeadLetterWriter
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.ingest.table_schedule import TableSchedule
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.settings import StoreUrls
from tidemill.spark.stores import open_stores
from tidemill.spark.types import stream_schema

SCHEMA = stream_schema("click_id string, product_id long, at timestamp, page string", "click_id")


def main(objects: str, consensus: str, scratch: Path) -> None:
    portal = BlockingPortal("child")
    stores = portal.call(open_stores(StoreUrls(objects, consensus)))
    feed = portal.call(stream_feed_of(stores))
    table = TableWriter(portal, stores, portal.call(stores.shard("clicks", SCHEMA)), scratch / "mirrors/clicks", feed)
    table.hydrate()
    dead = DeadLetterWriter(portal, lambda: portal.call(stores.shard("p.dead_letters", DEAD_LETTERS)), stores.rand)
    remap = portal.call(stores.remap("topic/clicks"))
    seats = TableSchedule(stores.clock, StageHistograms())
    seats.attach(table)
    sink = FeedSink(portal, stores, "topic/clicks", remap, seats, dead)
    start_kb = peak_memory_kb()
    seen: set[int] = set()
    waiting, ended = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            seen.add(table.progress.read)

    threading.Thread(target=look, daemon=True).start()
    end = sink.latest()
    while table.upper < end:
        assert not sink.seats.failed, sink.seats.failed
        sink.process(end)
        waiting.wait(0.05)
    ended.set()
    peak_kb = peak_memory_kb()
    print(json.dumps({
        "won": table.won, "read": table.progress.read, "to_go": table.progress.to_go, "looks": len(seen),
        "start_mib": start_kb >> 10, "peak_mib": peak_kb >> 10, "upper": table.upper,
    }))  # fmt: skip
    exit_now(0)  # as the driver does: threads that read ahead have nothing to lose


def peak_memory_kb() -> int:
    """Return the peak of this program; getrusage's figure is inherited from its parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


async def stream_feed_of(stores):  # type: ignore[no-untyped-def]
    return await stream_feed(stores.catalogue, "clicks", SCHEMA)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
