"""Cost of a captured row by the number of rows that arrive together, without a network, in each envelope.

    ./dev bench capture_rows [--rows N] [--envelope E] [--json]

    read     frames of the stream until fragments          write    fragments until the bytes of batches

Narrow rows (int, int, short text, timestamptz), transactions of 100, one partition; the topics take everything and do
nothing. The same frames go by columns and one by one, the bytes of all batches are compared afterwards. CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import time
from collections.abc import Sequence
from typing import Any

from harbour import machine
from tidemill.base.clock import Rand
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Column, Fragment, Relation
from tidemill.capture.decode.receive_batch import RowRun, split_into_steps
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.decode.undecodable import feed_frame
from tidemill.capture.encode.debezium_json import EventSource
from tidemill.capture.postgres.replication_stream import FramedMessage
from tidemill.capture.topics import batch_builder
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.api import ProduceResult

NEVER = 1 << 60
TRANSACTION_ROWS = 100
TYPES = {"id": 23, "n": 23, "name": 25, "at": 1184}
ROWS = Relation(1, "public", "rows", tuple(Column(name, oid, -1, "", -(name != "id")) for name, oid in TYPES.items()))


def frames_of(rows: int) -> list[bytes]:
    out = []
    for first in range(0, rows, TRANSACTION_ROWS):
        lsn = 1_000_000 + 1_000 * first
        payloads = [b"B" + struct.pack(">qqI", lsn, first, 700 + first)]
        for n in range(first, min(first + TRANSACTION_ROWS, rows)):
            values = [str(n), str(n % 100), f"customer {n}", "2026-11-23 10:00:00.123456+00"]
            fields = b"".join(b"t" + struct.pack(">I", len(value)) + value.encode() for value in values)
            payloads.append(b"I" + struct.pack(">I", 1) + b"N" + struct.pack(">H", len(values)) + fields)
        payloads.append(b"C" + struct.pack(">Bqqq", 0, lsn, lsn + 8, first))
        out += [b"w" + struct.pack(">qqq", lsn, lsn, 0) + payload for payload in payloads]
    return out


class Nowhere:
    """Topics that take every batch."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self._next = 0

    def produce_nowait(self, topic_id: str, partition: int, data: bytearray, **_: Any) -> asyncio.Future[ProduceResult]:
        self.batches.append(bytes(data))
        first = self._next
        self._next += int.from_bytes(data[57:61], "big")
        future: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        future.set_result(ProduceResult(first, self._next - 1, 0))
        return future


class Nobody:
    def flushed(self, consumer: str, position: ChangePosition) -> None: ...


def read(frames: Sequence[bytes], converter: TransactionBuilder, least: int) -> list[Fragment]:
    found = []
    for step in split_into_steps(frames, converter, least):
        if isinstance(step, RowRun):
            at = step.start
            while at < step.end:
                fragment, at = converter.feed_rows(step.segment, at, step.end)
                found.append(fragment)
        elif isinstance(step, FramedMessage):
            out = feed_frame(step, converter)
            found.append(out if isinstance(out, Fragment) else None)
    return [fragment for fragment in found if fragment is not None]


SOURCES = {"row": None, "debezium": EventSource("shop", "db"), "debezium-avro": EventSource("shop", "db", ((1, 2),))}


async def measure(
    frames: list[bytes], at_once: int, least: int, source: EventSource | None
) -> tuple[float, float, list[bytes]]:
    """(CPU seconds of reading, of writing, the batches); a round is sent after each burst."""
    topics = Nowhere()
    topic = TopicRow(name="rows", topic_id="rows", partitions=1)
    table = CapturedTable("public.rows", topic, 1, oid=1, source=source)
    writer = TopicWriter("bench", [table], topics, Rand(1), lambda _: None)  # type: ignore[arg-type]
    converter = TransactionBuilder({1: ROWS})
    batch_builder.MIN_COLUMNAR_ROWS = least
    began_s = time.process_time()
    bursts = [read(frames[first : first + at_once], converter, least) for first in range(0, len(frames), at_once)]
    between_s = time.process_time()
    for fragments in bursts:
        for fragment in fragments:
            await writer.deliver(fragment, Nobody())
        await writer.wait_drained()
    ended_s = time.process_time()
    await writer.aclose()
    return between_s - began_s, ended_s - between_s, topics.batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--envelope", choices=list(SOURCES), default="row")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    frames, source = frames_of(arguments.rows), SOURCES[arguments.envelope]
    asyncio.run(measure(frames[:5_000], 1_000, 1, source))  # what is loaded or built once
    result: dict[str, object] = {"machine": machine(), "rows": arguments.rows, "envelope": arguments.envelope}
    equal = True
    for at_once in (16, 32, 48, 64, 96, 128, 256, 1_000, 2_500):
        by_rows = asyncio.run(measure(frames, at_once, NEVER, source))
        by_columns = asyncio.run(measure(frames, at_once, 1, source))
        equal &= by_rows[2] == by_columns[2]
        for name, found in (("one_by_one", by_rows), ("by_columns", by_columns)):
            costs = {"read": found[0], "write": found[1]}
            result[f"{at_once}_{name}_us"] = {k: round(s / arguments.rows * 1e6, 2) for k, s in costs.items()}
    result["equal_bytes"] = equal
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:24} {value}" for key, value in result.items()))
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
