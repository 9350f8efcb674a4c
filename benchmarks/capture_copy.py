"""`./dev bench capture_copy`: rows per second of the first copy of a table, compared with COPY by the same client.

    python benchmarks/capture_copy.py [--rows N] [--connections N] [--json]

Method: N narrow rows (int, int, short text, timestamptz) are in a table of an embedded Postgres 18 (fsync off: the
source is not what is measured). The limit is COPY … TO STDOUT over the capture's own connection class, each line
counted and dropped. The subject is a new capture on SQLite and a directory (both syncing): its own count of rows and
seconds, from the first row to the last one durable. CPU is that of the whole process over the run, set-up and binding
included. Rows are verified after the run: the topic, read back and decoded, must hold each id once, and the sum of
another column.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import psycopg

import paths  # noqa: F401
from capture import NAME, mark, tagged
from harbour import machine
from support.postgres import EmbeddedPostgres
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.session.capture import Capture
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.shards.registry import open_remap
from tidemill.topics.api import FetchRead, TopicLog
from tidemill.topics.batch import decode_batch
from tidemill.topics.local_topics import LocalTopics


async def read_raw(dsn: str) -> tuple[float, float, int]:
    """(seconds, CPU seconds, rows) of the COPY alone."""
    wire = await PgConnection.connect(dsn, purpose="bench")
    clock = SystemClock()
    started_s, before_s, rows = clock.monotonic_s(), time.process_time(), 0
    async for burst in wire.copy_out("COPY (SELECT id, n, name, at FROM ONLY public.rows) TO STDOUT"):
        rows += len(burst)
    took = clock.monotonic_s() - started_s, time.process_time() - before_s, rows
    await wire.aclose()
    return took


async def verified(topics: TopicLog, topic_id: str) -> tuple[int, int]:
    """(distinct ids, sum of n) of what the topic holds; a repeated id counts as none."""
    high, at, total = (await topics.offsets(topic_id, 0)).high_watermark, 0, 0
    ids: set[int] = set()
    while at < high:
        read = FetchRead(topic_id, 0, at, 8 << 20)
        (fetched,) = await topics.fetch([read], max_wait_s=1, min_bytes=1, max_bytes=8 << 20)
        for batch in fetched.batches:
            for record in decode_batch(batch).records:
                if record.offset == at:
                    row = json.loads(record.value or b"{}")
                    ids.add(row["id"])
                    total, at = total + row["n"], at + 1
    return (len(ids) if len(ids) == high else -1), total


async def copy(dsn: str, directory: Path, settings: dict[str, int]) -> tuple[float, float, float, int, int]:
    """(rows/s as the capture counts them, CPU seconds, seconds from nothing to the first binding, ids, sum)."""
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    metastore = create_metastore(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand)
    remap = await open_remap(consensus, clock, rand, f"capture/{NAME}")
    config = CaptureConfig(NAME, dsn, ("rows",), **settings)
    capture = Capture(config, topics=topics, catalogue=catalogue, remap=remap, clock=clock, rand=rand)
    async with Tasks(print) as tasks:
        started_s, before_s = clock.monotonic_s(), time.process_time()
        tasks.spawn(capture.run(), name="capture")
        while not capture.streaming:
            await asyncio.sleep(0.01)
        rows_per_s = float(str(capture.facts()["snapshot_rows_per_s"]))
        with psycopg.connect(dsn, autocommit=True) as connection:
            mark(connection, "copied")
        await asyncio.wait_for(tagged(remap, "copied"), 600)
        took_s, spent_s = clock.monotonic_s() - started_s, time.process_time() - before_s
        await capture.aclose()
    row = await catalogue.get(TopicRow, f"{NAME}.public.rows")
    assert row is not None
    ids, total = await verified(topics, row.topic_id)
    await topics.aclose()
    await metastore.aclose()
    await consensus.aclose()
    await objects.aclose()
    return rows_per_s, spent_s, took_s, ids, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, default=CaptureConfig("bench", "").copy_connections)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = arguments.rows
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        Path(name).chmod(0o755)
        settings = {"fsync": "off", "shared_buffers": "128MB"}
        with EmbeddedPostgres(Path(name) / "pg", settings=settings) as server:
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute("CREATE TABLE rows (id int PRIMARY KEY, n int, name text, at timestamptz)")
                connection.execute(
                    f"INSERT INTO rows SELECT g, g % 100, 'customer ' || g, now() FROM generate_series(1, {rows}) g"
                )
                connection.execute("VACUUM ANALYZE rows")
                total = connection.execute("SELECT sum(n) FROM rows").fetchone()[0]  # type: ignore[index]
            raw_s, raw_spent_s, raw_rows = asyncio.run(read_raw(server.dsn))
            rows_per_s, spent_s, took_s, ids, found = asyncio.run(
                copy(server.dsn, Path(name), {"copy_connections": arguments.connections})
            )
    good = ids == rows == raw_rows and found == total
    result = {
        "machine": machine(),
        "rows": rows,
        "rows_verified": good,
        "copy_rows_per_s": round(rows_per_s),
        "copy_cpu_us_per_row": round(spent_s / rows * 1e6, 2),
        "nothing_to_bound_s": round(took_s, 2),
        "copy_out_rows_per_s": round(rows / raw_s),
        "copy_out_cpu_us_per_row": round(raw_spent_s / rows * 1e6, 2),
        "ratio": round(rows_per_s / (rows / raw_s), 3),
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
