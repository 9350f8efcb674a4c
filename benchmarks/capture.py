"""Capture: rows per second from WAL to durable, bound topics, compared with pg_recvlogical on the same WAL.

    python benchmarks/capture.py [--rows N] [--json]

Method: two slots are made on an embedded Postgres 18 (fsync off: the source is not what is measured), N narrow rows
(int, int, short text, timestamptz) are inserted in transactions of 1,000. The limit is pg_recvlogical writing the first
slot's pgoutput messages to /dev/null until the end of the WAL. The subject is a capture on SQLite and a directory (both
syncing) that starts at the second slot, from connecting to the binding of a marker after the last row. CPU is that of
the capturing process (all threads, user and system): it shows the cost of a row even if other work shares the cores.
Rows are verified after the run: the topic's high watermark must be N.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

import paths  # noqa: F401
from harbour import machine
from support.postgres import EmbeddedPostgres, find_binaries
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.config import CaptureConfig
from tidemill.capture.session.capture import Capture
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue, TopicRow
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.shards.api import Binding, Remap
from tidemill.shards.registry import open_remap
from tidemill.topics.local_topics import LocalTopics

NAME = "bench"
RAW_SLOT = "raw"
TRANSACTION_ROWS = 1_000


async def tagged(remap: Remap, tag: str) -> Binding:
    seen_ms = 0
    while True:
        for binding in await remap.after(seen_ms):
            seen_ms = binding.time_ms
            if binding.tag == tag:
                return binding
        await remap.wait(seen_ms, 5.0)


async def run_capture(dsn: str, directory: Path, tag: str) -> tuple[float, float, int]:
    """(seconds until the marker is bound, or all is set up if none was before; CPU seconds; high watermark)."""
    clock, rand = SystemClock(), Rand()
    consensus = await open_consensus(f"sqlite://{directory}/consensus.db", clock, rand)
    objects = await open_objects(f"file://{directory}/objects", clock, rand)
    metastore = create_metastore(consensus, objects, clock, rand)
    catalogue = Catalogue(metastore, clock, rand)
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand)
    remap = await open_remap(consensus, clock, rand, f"capture/{NAME}")
    capture = Capture(
        CaptureConfig(NAME, dsn, ("rows",)), topics=topics, catalogue=catalogue, remap=remap, clock=clock, rand=rand
    )
    async with Tasks(print) as tasks:
        started_s, before_s = clock.monotonic_s(), time.process_time()
        tasks.spawn(capture.run(), name="capture")
        await asyncio.wait_for(tagged(remap, tag), 600)
        took_s, spent_s = clock.monotonic_s() - started_s, time.process_time() - before_s
        await capture.aclose()
    row = await catalogue.get(TopicRow, f"{NAME}.public.rows")
    assert row is not None
    high_watermark = (await topics.offsets(row.topic_id, 0)).high_watermark
    await topics.aclose()
    await metastore.aclose()
    await consensus.aclose()
    await objects.aclose()
    return took_s, spent_s, high_watermark


def mark(connection: psycopg.Connection, tag: str) -> None:
    connection.execute("SELECT pg_logical_emit_message(true, 'tidemill', %s)", (tag,))


def receive_raw(dsn: str, end: str) -> float:
    clock = SystemClock()
    started_s = clock.monotonic_s()
    subprocess.run(
        [
            str(find_binaries() / "pg_recvlogical"), "-d", dsn, "--slot", RAW_SLOT, "--start", "-f", "/dev/null",
            "--endpos", end, "-o", "proto_version=1", "-o", f"publication_names=tidemill_{NAME}", "--no-loop",
        ],
        check=True,
    )  # fmt: skip
    return clock.monotonic_s() - started_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name:
        Path(name).chmod(0o755)
        settings = {"fsync": "off", "shared_buffers": "128MB"}
        with EmbeddedPostgres(Path(name) / "pg", settings=settings) as server:
            result = measure(server.dsn, Path(name), arguments.rows)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    return 0 if result["rows_verified"] == arguments.rows else 1


def measure(dsn: str, directory: Path, rows: int) -> dict[str, object]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE rows (id int PRIMARY KEY, n int, name text, at timestamptz DEFAULT now())")
        # The first session makes publication, slot and topic; the marker is bound when all is set up.
        connection.execute("CREATE TABLE unrelated (id int)")

        async def set_up() -> None:
            async with Tasks(print) as tasks:
                running = tasks.spawn(run_capture(dsn, directory, "set up"), name="set up")
                while not connection.execute(
                    f"SELECT FROM pg_replication_slots WHERE slot_name = 'tidemill_{NAME}' AND active"
                ).fetchall():
                    await asyncio.sleep(0.05)
                mark(connection, "set up")
                await running

        asyncio.run(set_up())
        connection.execute(f"SELECT pg_create_logical_replication_slot('{RAW_SLOT}', 'pgoutput')")
        for first in range(0, rows, TRANSACTION_ROWS):
            last = min(first + TRANSACTION_ROWS, rows)
            connection.execute(
                f"INSERT INTO rows SELECT g, g % 100, 'customer ' || g FROM generate_series({first}, {last - 1}) g"
            )
        mark(connection, "end")
        end = str(connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()[0])  # type: ignore[index]
        mark(connection, "beyond")
        raw_s = receive_raw(dsn, end)
    capture_s, spent_s, verified = asyncio.run(run_capture(dsn, directory, "end"))
    return {
        "machine": machine(),
        "rows": rows,
        "rows_verified": verified,
        "capture_cpu_us_per_row": round(spent_s / rows * 1e6, 2),
        "capture_rows_per_s": round(rows / capture_s),
        "pg_recvlogical_rows_per_s": round(rows / raw_s),
        "ratio": round(raw_s / capture_s, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main())
