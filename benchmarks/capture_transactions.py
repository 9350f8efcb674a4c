"""Cost of a small transaction, from the frames of the stream to its confirmation and to the followers of shapes.

    ./dev bench capture_transactions [--transactions N] [--rate R] [--rows K] [--shapes S] [--linger-ms L]
                                        [--json]

One process without sockets: a recorded stream, the real reader, collector, topic writer, binder, tap and shapes, on
topics, consensus and objects in memory. N transactions of K narrow rows arrive at R transactions a second, or without a
pause if R is 0. Each of S shapes has one follower, which reads its log whenever it is woken.

CPU time of the process per transaction, and as a multiple of `sum(range(1000))`, which runs in between and is not
counted: both depend equally on other load. Verified afterwards: the topic's high watermark, the confirmed LSN, the
bound offsets, and the number of items of every follower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import struct
import time
import traceback
from typing import Any

import structlog

from harbour import machine
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.lsn import ChangePosition
from tidemill.base.runtime.gc_tuning import install_gc_tuning
from tidemill.base.runtime.tasks import Tasks
from tidemill.base.status.histogram import StageHistograms
from tidemill.capture.changes import Column, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.delivery.collector import Collector
from tidemill.capture.delivery.consumers import TapRegistry
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.capture.postgres.standby_status import ReplicationStatus
from tidemill.capture.session.stream_reader import StreamHandlers, StreamReader
from tidemill.capture.topics.batch_sender import SendPace
from tidemill.capture.topics.binder import Binder
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.consensus.factory import open_consensus
from tidemill.metastore.catalogue import Catalogue
from tidemill.metastore.factory import create_metastore
from tidemill.objects.factory import open_objects
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.tables.capture_tap import ShapeTap
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shards.registry import open_remap
from tidemill.topics.local_topics import LocalTopics

NAMES = ("id", "n", "name", "at")
ROWS = Relation(
    1,
    "public",
    "rows",
    tuple(Column(name, oid, -1, "", -(name != "id")) for name, oid in zip(NAMES, (23, 23, 25, 1184), strict=True)),
)
WRITER = "topics"
FIRST_LSN = 1_000_000
LSN_STEP = 1_000
LINGER_MS = CaptureConfig("bench", "").linger_ms
UNITS_AT_ONCE = 20
UNIT_PAUSE_S = 0.02
PACE_S = 0.001
"""Interval at which the server of this benchmark writes to its stream."""


def record_stream(transactions: int, rows: int) -> list[list[bytes]]:
    """Return the frames of each transaction."""
    stream = []
    for number in range(transactions):
        lsn = FIRST_LSN + LSN_STEP * number
        payloads = [b"B" + struct.pack(">qqI", lsn, number, 700 + number)]
        for row in range(number * rows, (number + 1) * rows):
            values = [str(row), str(row % 100), f"customer {row}", "2026-11-23 10:00:00.123456+00"]
            fields = b"".join(b"t" + struct.pack(">I", len(value)) + value.encode() for value in values)
            payloads.append(b"I" + struct.pack(">I", 1) + b"N" + struct.pack(">H", len(values)) + fields)
        payloads.append(b"C" + struct.pack(">Bqqq", 0, lsn, lsn + 8, number))
        stream.append([b"w" + struct.pack(">qqq", lsn, lsn, 0) + payload for payload in payloads])
    return stream


class RecordedStream:
    """Replacement of ReplicationStream: transactions become available at a rate. At the end it waits."""

    def __init__(self, stream: list[list[bytes]], rate: float, at_once: int) -> None:
        self._stream = stream
        self._rate = rate
        self._at_once = at_once
        self._sent = 0
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic_s()

    async def receive(self) -> list[bytes]:
        if self._sent == len(self._stream):
            await asyncio.Event().wait()
        first = self._sent
        while self._rate and (due := int((self._clock.monotonic_s() - self._began_s) * self._rate)) <= first:
            await asyncio.sleep(PACE_S)
        if not self._rate:
            await asyncio.sleep(0)
            due = first + self._at_once
        self._sent = min(due, len(self._stream))
        return [frame for frames in self._stream[first : self._sent] for frame in frames]


class UnwatchedStream:
    """Replacement of StreamWatch."""

    def record_wait(self) -> None: ...

    def record_message(self) -> None: ...


class UnitMeter:
    """Measures the unit again and again, during the run."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.count = 0

    async def run(self) -> None:
        while True:
            before_s = time.thread_time()
            for _ in range(UNITS_AT_ONCE):
                sum(range(1000))
            self.spent_s += time.thread_time() - before_s
            self.count += UNITS_AT_ONCE
            await asyncio.sleep(UNIT_PAUSE_S)

    @property
    def unit_us(self) -> float:
        return self.spent_s / self.count * 1e6


class Follower:
    """Client of one shape, without HTTP."""

    def __init__(self, shape: LiveShape) -> None:
        self._shape = shape
        self.items = 0
        self.wakes = 0

    async def run(self) -> None:
        offset = BASE_END
        while True:
            news = self._shape.subscribe()
            chunk = await self._shape.fetch(offset)
            self.items += len(chunk.items)
            offset = chunk.end
            if chunk.items:
                news.cancel()
                continue
            await news
            self.wakes += 1


def open_shapes(tap: ShapeTap, count: int, clock: SystemClock) -> list[LiveShape]:
    shapes = []
    for number in range(count):
        definition = ShapeDefinition(Source("table", "main", "public", "rows"), "")
        shape = LiveShape(f"h{number}", definition, b"{}", ShapeLog())
        shape.log.seal_base()
        consumer = TableConsumer(shape, ROWS, None, RowWriter("public", "rows", NAMES, ["id"]))
        tap.router.add(consumer)
        consumer.set_snapshot(PgSnapshot(1, 1, frozenset()))
        consumer.publish_waiting(Turn(clock, float("inf")))
        shape.mark_ready()
        shapes.append(shape)
    return shapes


def _show_failure(name: str, error: BaseException) -> None:
    traceback.print_exception(error)


async def measure(
    transactions: int, rate: float, rows: int, shapes: int, at_once: int, linger_ms: int
) -> dict[str, Any]:
    clock, rand = SystemClock(), Rand(1)
    consensus, objects = await open_consensus("memory:", clock, rand), await open_objects("memory:", clock, rand)
    catalogue = Catalogue(create_metastore(consensus, objects, clock, rand), clock, rand)
    row = await catalogue.create_topic("bench", 1)
    topics = LocalTopics(consensus, objects, catalogue, clock=clock, rand=rand)
    remap = await open_remap(consensus, clock, rand, "capture/bench")
    stream = record_stream(transactions, rows)
    taps, tap = TapRegistry(clock), ShapeTap(clock, LoopShare(clock))
    live = open_shapes(tap, shapes, clock)
    followers = [Follower(shape) for shape in live]
    collector: Collector

    def report_bound(position: ChangePosition) -> None:
        collector.report_flushed(WRITER, position)

    stages = StageHistograms()
    binder = Binder(remap, clock, report_bound, stages=stages)
    await binder.open()
    binder.start_at({row.topic_id: [0]}, 0)
    table = CapturedTable("public.rows", row, 1, oid=1)
    writer = TopicWriter(WRITER, [table], topics, rand, binder.add_durable, pace=SendPace(linger_ms / 1000))
    await writer.open_tables({}, 0)
    status = ReplicationStatus(0)
    collector = Collector([writer], status, clock, taps=taps)
    taps.add(tap)
    taps.begin_session(())

    async def process_nothing(_: object) -> None: ...

    handlers = StreamHandlers(
        TransactionBuilder({1: ROWS}), None, None, asyncio.Lock(), process_nothing, lambda: None  # type: ignore[arg-type]
    )  # fmt: skip
    last_lsn = FIRST_LSN + LSN_STEP * (transactions - 1)
    meter = UnitMeter()
    async with Tasks(_show_failure) as tasks:
        tasks.spawn(meter.run(), name="meter")
        tasks.spawn(collector.run(), name="collector")
        tasks.spawn(binder.run(), name="binder")
        tasks.spawn(tap.run(), name="shapes")
        for follower in followers:
            tasks.spawn(follower.run(), name="follower")
        began_s, before_s = time.perf_counter(), time.process_time()
        source: Any = RecordedStream(stream, rate, at_once)
        watch: Any = UnwatchedStream()
        tasks.spawn(StreamReader(source, collector, watch, handlers, stages, clock).run(), name="reader")
        while status.flushed < last_lsn or any(each.items < transactions * rows for each in followers):
            await asyncio.sleep(0.02)
        spent_s, took_s = time.process_time() - before_s - meter.spent_s, time.perf_counter() - began_s
        await writer.aclose()
    high_watermark = (await topics.offsets(row.topic_id, 0)).high_watermark
    bound = binder.latest
    found = (
        high_watermark,
        bound.offsets[row.topic_id][0] if bound else 0,
        *(each.items for each in followers),
    )
    if set(found) != {transactions * rows}:
        raise SystemExit(f"DOES NOT HOLD: rows={transactions * rows} found={found}")
    await topics.aclose()
    wakes = sum(each.wakes for each in followers)
    cpu_us = spent_s / transactions * 1e6
    return {"cpu_us": cpu_us, "unit_us": meter.unit_us, "per_s": transactions / took_s, "wakes": wakes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=20_000)
    parser.add_argument("--rate", type=float, default=1_500)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shapes", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16, help="transactions in one receive, if the rate is 0")
    parser.add_argument("--linger-ms", type=int, default=LINGER_MS, help="capture.NAME.linger_ms")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    install_gc_tuning()  # as `tidemill serve` does
    found = asyncio.run(
        measure(
            options.transactions, options.rate, options.rows, options.shapes, options.at_once, options.linger_ms
        )
    )  # fmt: skip
    result = {
        "machine": machine(),
        "transactions_verified": options.transactions,
        "rows": options.rows,
        "shapes": options.shapes,
        "linger_ms": options.linger_ms,
        "unit_us": round(found["unit_us"], 1),
        "cpu_us_per_transaction": round(found["cpu_us"], 1),
        "units_per_transaction": round(found["cpu_us"] / found["unit_us"], 2),
        "transactions_per_s": round(found["per_s"]),
        "follower_wakes_per_transaction": round(found["wakes"] / options.transactions, 2),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{key:32} {value}" for key, value in result.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
