"""Decoding for tables: record batches to columns, and JSON of stream topics and of captured tables to command tables,
by blocks and record by record.

    python benchmarks/decode.py [--rows N] [--rounds R] [--json]

Method: one process, one thread, CPU time of the process, best of R rounds. Batches: N records of the `mixed` objects in
batches of several sizes, from bytes to columns; keys, values and offsets are verified. JSON: N objects of each schema
in batches of 1,000, from columns to a command table, by blocks and record by record, the two alternating; both tables
must be equal, row by row, without a dead letter. The limit is Arrow's reader over the same objects as one ready text.

Columns (RFC 0015): batches of several sizes whose trailer has the rows as columns, to a command table, alternating with
the same batches without trailers, that is, from their records. The commands must be equal. `written` is the cost of the
trailer in the capture.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pyarrow as pa
import pyarrow.json as pj

from tidemill.shards.api import Binding, Column, ShardSchema
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode import block_decoder
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records, SliceDescriptor, cut_blocks, cut_slices
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.ingest.fetch_decode import decode
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.types import stream_schema
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, RecordColumns, decode_opened, encode_batch, open_batch
from tidemill.topics.batch.columns_trailer import encode_trailer
from tidemill.topics.batch.row_columns import build_row_columns, encode_row_columns

COLUMN_BATCHES = (100, 400, 1_000, 4_000)
BATCHES = (5, 20, 100, 1_000, 10_000)
SCHEMAS = {
    "few strings": "click_id string, product string, page string",
    "mixed": "click_id string, product_id long, amount double, paid boolean, page string, at timestamp",
    "wide": "id long, "
    + ", ".join(
        f"n{i} long, s{i} string, f{i} double, b{i} boolean, t{i} timestamp, d{i} date, i{i} int" for i in range(3)
    ),
}
ORDERS = ShardSchema(
    (
        Column("id", "int64"),
        Column("customer", "string"),
        Column("price", "decimal(12,2)"),
        Column("at", "timestamp"),
        Column("paid", "bool"),
        Column("note", "string"),
    ),
    ("id",),
)
FEW = block_decoder.MIN_BLOCK_VALUES
FIRST = datetime(2026, 11, 22, tzinfo=UTC)


class Batching(msgspec.Struct):
    records_a_batch: int
    us_a_record: float
    verified: int


class Reading(msgspec.Struct):
    schema: str
    bytes_a_row: float
    fields: int
    blocks_us: float
    records_us: float
    arrow_us: float
    verified: int

    @property
    def ratio(self) -> float:
        return self.records_us / self.blocks_us


def best_us(rounds: int, count: int, *works: Callable[[], object]) -> list[float]:
    """µs of CPU for each of `count`, of each work; the works take turns."""
    best = [float("inf")] * len(works)
    for _, (number, work) in itertools.product(range(rounds), enumerate(works)):
        gc.collect()
        before = time.process_time()
        work()
        best[number] = min(best[number], (time.process_time() - before) / count * 1e6)
    return best


def values_of(schema: str, count: int) -> list[bytes]:
    rand = random.Random(8)
    out = []
    for n in range(count):
        at = FIRST + timedelta(milliseconds=n)
        stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        row: dict[str, object] = {"click_id": f"c{n:09d}"}
        if schema == "few strings":
            row |= {"product": f"product-{rand.randrange(5_000)}", "page": rand.choice(("/", "/cart", "/search?q=tea"))}
        elif schema == "mixed":
            row |= {"product_id": rand.randrange(5_000), "amount": round(rand.random() * 100, 2)}
            row |= {"paid": n % 3 == 0, "page": f"/p/{n % 977}", "at": stamp}
        else:
            row = {"id": n}
            for i in range(3):
                row |= {f"n{i}": rand.randrange(10**9), f"s{i}": f"text {n % 1009}", f"f{i}": rand.random()}
                row |= {f"b{i}": n % 2 == 0, f"t{i}": stamp, f"d{i}": str(at.date()), f"i{i}": n % 1000}
        out.append(json.dumps(row, separators=(",", ":")).encode())
    return out


def captured_values(count: int) -> list[bytes]:
    """Return values as capture writes rows: everything but numbers and booleans in PostgreSQL's text."""
    rand = random.Random(8)
    out = []
    for n in range(count):
        at = str(FIRST + timedelta(milliseconds=n)).replace("+00:00", "+00")
        row = {"id": n, "customer": f"customer {rand.randrange(5_000)}", "price": f"{n % 10_000}.{n % 100:02d}"}
        row |= {"at": at, "paid": n % 3 == 0, "note": None if n % 2 else "by the door"}
        out.append(json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode())
    return out


def batches_of(values: Sequence[bytes], size: int) -> list[bytes]:
    rows = [Record(b"%08d" % n, value, (), 1_763_769_600_000 + n) for n, value in enumerate(values)]
    return [encode_batch(rows[at : at + size], base_offset=at) for at in range(0, len(rows), size)]


def batching(values: Sequence[bytes], size: int, rounds: int) -> Batching:
    batches = batches_of(values, size)

    def decode() -> list[RecordColumns]:
        found = list(decode_opened(open_batch(batch) for batch in batches))
        return [part for part in found if isinstance(part, RecordColumns)]

    (us,) = best_us(rounds, len(values), decode)
    parts = decode()
    if [v for part in parts for v in part.values] != list(values):
        raise SystemExit(f"batches of {size}: other values")
    if [o for part in parts for o in part.offsets.tolist()] != list(range(len(values))):
        raise SystemExit(f"batches of {size}: other offsets")
    if [k for part in parts for k in part.keys] != [b"%08d" % n for n in range(len(values))]:
        raise SystemExit(f"batches of {size}: other keys")
    return Batching(size, us, len(values))


def reading(name: str, values: Sequence[bytes], decoder: StreamDecoder | CapturedDecoder, rounds: int) -> Reading:
    count, columns = len(values), decoder.schema.columns
    (piece,) = cut_slices(None, [Binding(7, {"id": (count,)})], "t", "id")
    blocks = list(cut_blocks([(piece, batches_of(values, 1_000), ())]))

    def read(few: int) -> Callable[[], list[pa.Table]]:
        def work() -> list[pa.Table]:
            block_decoder.MIN_BLOCK_VALUES = few
            return [rows_of(decoder, block) for block in blocks]

        return work

    def arrow() -> None:
        for text in texts:
            pj.read_json(
                pa.BufferReader(text),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(text) + 1),
                parse_options=pj.ParseOptions(explicit_schema=as_read),
            )

    texts_of = ("date", "decimal(12,2)") if isinstance(decoder, StreamDecoder) else ("timestamp", "decimal(12,2)")
    as_read = pa.schema([(c.name, pa.string() if c.type in texts_of else arrow_type(c.type)) for c in columns])
    texts = [b"\n".join(values[at : at + 2_000]) for at in range(0, count, 2_000)]
    by_blocks, by_records = read(FEW), read(1 << 62)
    blocks_us, records_us, arrow_us = best_us(rounds, count, by_blocks, by_records, arrow)
    for one, other in zip(by_blocks(), by_records(), strict=True):
        if not one.equals(other):
            raise SystemExit(f"{name}: the rows differ")
    return Reading(name, sum(map(len, values)) / count, len(columns), blocks_us, records_us, arrow_us, 2 * count)


class Trailers(msgspec.Struct):
    rows_a_batch: int
    bytes_a_row: float
    record_bytes_a_row: float
    write_us: float
    columns_us: float
    records_us: float
    verified: int


def trailers_of(values: Sequence[bytes], size: int, rounds: int) -> Trailers:
    count, batches = len(values), batches_of(values, size)
    rows = [msgspec.json.decode(value) for value in values]
    texts = [pa.array([_text_of(row[c.name]) for row in rows], pa.string()) for c in ORDERS.columns]
    whole = build_row_columns([c.name for c in ORDERS.columns], 1, [True] * count, texts)
    counts = [min(size, count - at) for at in range(0, count, size)]

    def write() -> list[bytes]:
        parts = [encode_row_columns([whole.slice(at * size, n)]) for at, n in enumerate(counts)]
        return [encode_trailer(p[0], n, p[1]) for p, n in zip(parts, counts, strict=True) if p is not None]

    def read(stored: Sequence[bytes]) -> Callable[[], pa.Table]:
        def work() -> pa.Table:
            block_decoder.MIN_BLOCK_VALUES = FEW
            return decode(feed, descriptors, [stored]).commands.rows

        return work

    feed = TopicFeed("t", "id", 1, True, ORDERS, "public.orders")
    (piece,) = cut_slices(None, [Binding(7, {"id": (count,)})], "t", "id")
    refs = [BatchRef("o", 0, len(each), at * size, counts[at], 0) for at, each in enumerate(batches)]
    descriptors = [SliceDescriptor(piece, tuple(refs))]
    trailers = write()
    by_columns, by_records = read([a + b for a, b in zip(batches, trailers, strict=True)]), read(batches)
    write_us, columns_us, records_us = best_us(rounds, count, write, by_columns, by_records)
    if not by_columns().equals(by_records()) or by_columns().num_rows != count:
        raise SystemExit(f"columns of {size}: the commands differ")
    sizes = sum(map(len, trailers)) / count, sum(map(len, batches)) / count
    return Trailers(size, *sizes, write_us, columns_us, records_us, count)


def _text_of(value: object) -> str | None:
    """Return a value of a captured row as PostgreSQL sends it."""
    return None if value is None else {True: "t", False: "f"}[value] if isinstance(value, bool) else str(value)


def rows_of(decoder: StreamDecoder | CapturedDecoder, block: Records) -> pa.Table:
    if isinstance(decoder, StreamDecoder):
        commands, dead = decoder.decode(block)
    else:
        found = decoder.decode(block)
        commands, dead = found.commands, found.dead
    if dead.num_rows or commands.rows.num_rows != len(block):
        raise SystemExit(f"dead letters among good rows: {dead.slice(0, 3).to_pylist()}")
    return commands.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    mixed = values_of("mixed", args.rows)
    batchings = [batching(mixed, size, args.rounds) for size in BATCHES]
    readings = []
    for name, ddl in SCHEMAS.items():
        decoder = StreamDecoder(stream_schema(ddl, ddl.split()[0]))
        readings.append(reading(name, values_of(name, args.rows), decoder, args.rounds))
    readings.append(reading("captured", captured_values(args.rows), CapturedDecoder(ORDERS), args.rounds))
    trailers = [trailers_of(captured_values(args.rows), size, args.rounds) for size in COLUMN_BATCHES]
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, Arrow {pa.__version__}"
    if args.json:
        found = msgspec.to_builtins({"batches": batchings, "json": readings, "columns": trailers})
        print(json.dumps({"machine": machine, **found}))
        return
    print(f"machine: {machine}; {args.rows:,} rows, best of {args.rounds}, µs of CPU")
    for one in batchings:
        print(f"batches of {one.records_a_batch:>6,}: {one.us_a_record:.3f} a record, {one.verified:,} verified")
    for row in readings:
        print(
            f"{row.schema}, {row.bytes_a_row:.0f} B, {row.fields} fields: {row.blocks_us:.2f} a row by blocks,"
            f" {row.records_us:.2f} record by record, ratio {row.ratio:.2f}; Arrow's reader alone {row.arrow_us:.2f},"
            f" {row.blocks_us / row.arrow_us:.2f} of it; {row.verified:,} verified"
        )
    for each in trailers:
        print(
            f"columns, {each.rows_a_batch:,} rows a batch: {each.bytes_a_row:.0f} B a row next to"
            f" {each.record_bytes_a_row:.0f} B of records, written {each.write_us:.3f} a row; commands from columns"
            f" {each.columns_us:.3f}, from records {each.records_us:.3f}, ratio"
            f" {each.columns_us / each.records_us:.2f}; {each.verified:,} verified"
        )


if __name__ == "__main__":
    main()
