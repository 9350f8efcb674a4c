"""Mutated JSON records, and record batches around them, through the real decode path of a pipeline.

    records   good objects of a stream and of a captured table with bytes changed, cut, repeated, nested, with values
              at and beyond the limits of their types, duplicate, unknown and odd fields, broken UTF-8
    batches   every codec, whole or with bytes, counts and deltas changed under a right checksum
Each block goes the whole way: batch → records → columns → resolve → a stored part → Python rows. Watches that
nothing is ever raised; that a block gives exactly the rows and dead letters that its records give one by one (the
slow exact path); that Python's own JSON reader agrees on what was accepted; memory; and the time a block takes.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import crc32c
import pyarrow as pa

from fuzz_found import Found
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.parts.parts import encode_part
from tidemill.spark.decode import block_decoder
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.records import Records, Slice, cut_blocks
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import resolve
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch
from tidemill.topics.batch.records import columns_from_fields

MEMORY_LIMIT_MIB = 300
BLOCK_LIMIT_S = 2.0
BLOCK_RECORDS = 60
TYPES = ("string", "bool", "int16", "int32", "int64", "float32", "float64", "date", "timestamp", "timestamp_ntz",
         "json",
         "decimal(6,2)", "decimal(38,10)")  # fmt: skip
STREAM = ShardSchema((Column("k", "string"), *(Column(f"c_{i}", t) for i, t in enumerate(TYPES))), ("k",))
BY_BLOCKS = ShardSchema(tuple(c for c in STREAM.columns if c.type != "json"), ("k",))
"""A stream with a column of JSON is read record by record."""
CAPTURED = ShardSchema(
    (Column("k", "int64"), Column('odd "name', "string"), *(Column(f"c_{i}", t) for i, t in enumerate(TYPES)),
     Column("raw", "binary")),
    ("k",),
)  # fmt: skip
VALUES = (
    "null", "true", "false", "0", "-0", "1", "-1", "1.5", "-0.0", "1e5", "1E400", "-1e-400", "32767", "32768",
    "-32769", "2147483648", "9223372036854775807", "9223372036854775808", "123456789012345678901234567890",
    "1234.56", "12345.678", "0.000000000000000000001", '""', '"a"', '"NaN"', '"Infinity"', '"1.5"', '"12.345"',
    '"true"', '"t"', '"2026-01-02"', '"2026-13-45"', '"2026-01-02T03:04:05Z"', '"2026-01-02 03:04:05+00"',
    '"9999-12-31T23:59:59.999999-14:00"', '"0001-01-01T00:00:00+14:00"', '"294276-12-31 00:00:00"', '"infinity"',
    '"-infinity"', '"0044-03-15 BC"', '"5874897-12-31"', '"\\\\x0aff"', '"\\\\x0"', '"\\ud800"', '"\\u0000"',
    '"ä\\n\\"\\\\"', "253402300800000", "-62135596800001", "99999999999999999999999", "[]", "{}", "[1,[2,{}]]",
    '{"a":{"b":null}}', "NaN", "Infinity", "01", "+1", "1.", ".5", '"\x01"', "tru", "'a'", "",
)  # fmt: skip


def an_object(rand: random.Random, schema: ShardSchema, *, all_columns: bool) -> bytes:
    parts = []
    for column in schema.columns:
        if column.name == "k":
            key = str(rand.randrange(40)) if column.type == "int64" else f'"k{rand.randrange(40)}"'
            value = key if rand.random() < 0.95 else rand.choice(VALUES)
        elif not all_columns and rand.random() < 0.3:
            continue
        else:
            value = rand.choice(VALUES) if rand.random() < 0.04 else good(rand, column.type)
        parts.append(f"{json.dumps(column.name)}:{value}")
    if rand.random() < 0.1:
        parts.append(
            rand.choice(('"more":[[1]]', '"k":"twice"', '"":0', '"more":' + "[" * rand.choice((3, 300, 5_000))))
        )
    rand.shuffle(parts)
    space = rand.choice(("", "", " ", "\n\t"))
    return ("{" + f",{space}".join(parts) + "}").encode("utf-8", "surrogatepass")


def good(rand: random.Random, kind: str) -> str:
    match kind:
        case "string" | "json":
            return json.dumps("x" * rand.randrange(30))
        case "bool":
            return rand.choice(("true", "false", "null"))
        case "date":
            return f'"2026-01-{rand.randrange(1, 29):02d}"'
        case "timestamp_ntz":
            return rand.choice(('"2026-01-02T03:04:05"', '"2026-01-02 03:04:05.5"', "null"))
        case "timestamp":
            return rand.choice(('"2026-01-02T03:04:05Z"', '"2026-01-02 03:04:05"', "null"))
        case "binary":
            return '"\\\\x00ff"'
        case "decimal(6,2)" | "decimal(38,10)":
            return f'"{rand.randrange(1000)}.{rand.randrange(100):02d}"'
        case _:
            return str(rand.randrange(-100, 100))


def mutate(rand: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rand.choice((0, 0, 0, 0, 1, 3))):
        at = rand.randrange(len(out) + 1)
        match rand.randrange(6):
            case 0:
                out[at : at + 1] = bytes([rand.randrange(256)])
            case 1:
                del out[at : at + rand.randrange(20)]
            case 2:
                out[at:at] = out[at : at + rand.randrange(40)]
            case 3:
                out[at:at] = rand.choice((b"[", b"{", b'"', b"\\", b"\xff", b"\x00", b"[" * 2_000, b'{"a":' * 500))
            case 4:
                out = out[:at]
            case 5:
                out[at:at] = rand.choice(VALUES).encode("utf-8", "surrogatepass")
    return bytes(out)


def records_of(values: list[bytes | None], keys: list[bytes | None]) -> Records:
    columns = columns_from_fields(keys, values)
    return Records("t", 0, columns.offsets // 10 + 1, columns)


class Decoded(Found):
    def __init__(self) -> None:
        super().__init__()
        self.records = self.accepted = self.dead = self.blocks = self.stops = self.batches = self.unread = 0


def stream_outcome(decoder: StreamDecoder, records: Records) -> tuple[list[Any], list[int]]:
    commands, dead = decoder.decode(records)
    return commands.rows.cast(commands.rows.schema).to_pylist(), dead.column("offset").to_pylist()


def one_block(rand: random.Random, found: Decoded, decoder: StreamDecoder, captured: CapturedDecoder) -> None:
    is_stream = rand.random() < 0.6
    schema = decoder.schema if is_stream else CAPTURED
    values: list[bytes | None] = []
    keys: list[bytes | None] = []
    for _ in range(rand.randrange(1, BLOCK_RECORDS)):
        value = mutate(rand, an_object(rand, schema, all_columns=not is_stream))
        tombstone = rand.random() < 0.1
        values.append(None if tombstone else value)
        key = rand.choice(
            (b'{"k":%d}' % rand.randrange(40), b"k1", b"", mutate(rand, b'{"k":"k%d"}' % rand.randrange(9)))
        )
        keys.append(None if rand.random() < 0.05 else key)
    found.blocks += 1
    found.records += len(values)
    records = records_of(values, keys)
    began_s = time.process_time()
    try:
        if is_stream:
            commands, dead = decoder.decode(records)
            stop = None
        else:
            taken = captured.decode(records)
            commands, dead, stop = taken.commands, taken.dead, taken.stop
        whole_way(schema, commands)
    except BaseException as error:
        found.fail(f"raised: {type(error).__name__}: {error}", values)
        return
    found.spent(time.process_time() - began_s, BLOCK_LIMIT_S, f"a block of {len(values)} records", values[:3])
    found.accepted += commands.rows.num_rows
    found.dead += dead.num_rows
    found.stops += stop is not None
    alike(found, decoder if is_stream else captured, records, commands.rows, dead, stop)
    if is_stream:
        agreed(found, commands.rows, values)


def whole_way(schema: ShardSchema, commands: Any) -> None:
    resolved = resolve(schema, commands, Mirror(schema), 0, 1_000)
    if resolved.updates.num_rows:
        encode_part(schema, resolved.updates)


def alike(found: Decoded, decoder: Any, records: Records, rows: pa.Table, dead: pa.Table, stop: Any) -> None:
    """Compare with the slow exact path: every record alone."""
    singles, letters = [], []
    for at in range(len(records)):
        if stop is not None and at >= stop.offset:
            break
        one = Records("t", 0, records.times[at : at + 1], records.columns.select(slice(at, at + 1)))
        got = decoder.decode(one)
        commands, more = got if isinstance(got, tuple) else (got.commands, got.dead)
        singles.append(commands.rows)
        letters += more.column("offset").to_pylist()
    by_one = pa.concat_tables(singles).sort_by("_order") if singles else rows.slice(0, 0)
    if not by_one.equals(rows.sort_by("_order").cast(by_one.schema)) and repr_rows(by_one) != repr_rows(rows):
        found.fail("a block and its records one by one give other rows", records.values)
    if sorted(letters) != sorted(dead.column("offset").to_pylist()):
        found.fail("a block and its records one by one give other dead letters", records.values)


def repr_rows(rows: pa.Table) -> list[str]:
    """NaN equals itself here."""
    plain = [pa.Table.from_arrays([c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else
                                   c.cast(pa.int32()) if pa.types.is_date(c.type) else c for c in rows.columns],
                                  names=rows.schema.names)]  # fmt: skip
    return sorted(repr(row) for row in plain[0].to_pylist())


def agreed(found: Decoded, rows: pa.Table, values: list[bytes | None]) -> None:
    """Check that every accepted value is also an object for Python's reader, with the same plain values."""
    for row in rows.select(["k", "c_1", "c_4", "_order", "_live"]).to_pylist():
        value = values[row["_order"]]
        if not row["_live"] or value is None:
            continue
        try:
            pairs: list[tuple[str, Any]] = json.loads(value, object_pairs_hook=list)
        except (ValueError, RecursionError):
            # Python refuses contents of fields that were not requested: broken UTF-8, a deep value, a lone surrogate.
            continue
        last = dict(pairs)
        if (row["k"], row["c_1"], row["c_4"]) != (last.get("k"), last.get("c_1"), last.get("c_4")):
            found.fail("Python's reader says otherwise", value)


def one_batch(rand: random.Random, found: Found) -> None:
    count = rand.randrange(1, 30)
    rows = [Record(b"k", an_object(rand, STREAM, all_columns=False), (), 0, 0) for _ in range(count)]
    codec = rand.choice(("none", "gzip", "snappy", "lz4", "zstd"))
    data = bytearray(encode_batch(rows, base_offset=5, compression=codec))
    for _ in range(rand.choice((0, 1, 1, 2, 5))):
        at = rand.choice((22, 23, 57, 58, 59, 60, rand.randrange(21, len(data))))
        data[at] = rand.randrange(256)
    if rand.random() < 0.8:
        data[17:21] = crc32c.crc32c(bytes(data[21:])).to_bytes(4, "big")
    if rand.random() < 0.1:
        del data[rand.randrange(len(data)) :]
    piece = Slice("t", "id", 0, 0, 1_000, (1_000,), (7,))
    began_s = time.process_time()
    try:
        refs = [BatchRef("o", 0, len(data), 5, count, 0)]
        blocks = list(cut_blocks([(piece, [bytes(data)], refs)]))
        for got in blocks:
            StreamDecoder(STREAM).decode(got)
    except BaseException as error:
        found.fail(f"batch raised: {type(error).__name__}: {error}", bytes(data))
        return
    found.spent(time.process_time() - began_s, BLOCK_LIMIT_S, f"a batch of {len(data)} bytes", bytes(data))
    found.batches += 1
    unread = [letter for got in blocks for letter in got.unread]
    offsets = [at for got in blocks for at in got.offsets.tolist()]
    found.unread += len(unread)
    whole = [(x.offset, x.last_offset) for x in unread] == [(5, 4 + count)] and not offsets
    if not whole and (unread or any(not 5 <= at < 5 + count for at in offsets)):
        found.fail("a batch is neither read nor one letter", bytes(data))


def run(seconds: float, seed: int) -> dict[str, Any]:
    rand, found = random.Random(seed), Decoded()
    block_decoder.MIN_BLOCK_VALUES = 2  # a block is read by blocks, each of its records alone
    decoders, captured = (StreamDecoder(STREAM), StreamDecoder(BY_BLOCKS)), CapturedDecoder(CAPTURED, "public.t")
    for _ in range(50):
        one_block(rand, found, rand.choice(decoders), captured)
    for _ in found.rounds(seconds, MEMORY_LIMIT_MIB):
        for _ in range(20):
            one_block(rand, found, rand.choice(decoders), captured)
            one_batch(rand, found)
    return {
        "blocks": found.blocks, "records": found.records, "accepted": found.accepted, "dead": found.dead,
        "stops": found.stops, "batches": found.batches, "unread_batches": found.unread,
        "longest_block_ms": round(found.longest_s * 1000, 1), "memory_mib": found.memory_mib,
        "failures": dict(found.failures), "examples": found.examples,
    }  # fmt: skip
