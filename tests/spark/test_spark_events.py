"""A topic of change events gives a pipeline the same commands as a topic of rows, by blocks and one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.running import pipeline
from support.waiting import eventually
from tidemill.base.clock import Rand
from tidemill.base.pgtypes.avro import key_layout, row_layout
from tidemill.base.pgtypes.debezium import value_form
from tidemill.base.status.status import StatusTracker
from tidemill.capture.changes import Column as Described
from tidemill.capture.changes import Relation, Row
from tidemill.capture.config import CaptureConfig, Envelope
from tidemill.capture.encode.debezium_avro import AvroEncoder
from tidemill.capture.encode.debezium_json import OPS, SNAPSHOT_OP, EventEncoder, EventSource
from tidemill.capture.encode.row_encoder import RowEncoder
from tidemill.capture.session.capture import Capture
from tidemill.cli.verify.table import verify_captured
from tidemill.registry.registry import LocalSchemaRegistrar, Registry
from tidemill.shards.api import ShardSchema, run_inline
from tidemill.shards.parts.pg_columns import column_for
from tidemill.shards.registry import open_remap
from tidemill.spark.decode import avro as avro_module
from tidemill.spark.decode import block_decoder as objects_module
from tidemill.spark.decode.avro import AvroVersion
from tidemill.spark.decode.captured import Captured, CapturedDecoder
from tidemill.spark.decode.records import Records
from tidemill.spark.merge.commands import ORDER
from tidemill.topics.batch import Record, decode_columns, encode_batch

TYPES: dict[str, tuple[int, int, str, tuple[str, ...], tuple[str, ...]]] = {
    "id": (23, -1, "integer", ("1", "2", "3", "-4"), ()),
    "day": (1082, -1, "date", ("2026-11-23", "1969-12-31", "0001-01-01"), ("infinity", "0044-03-15 BC", "10000-01-01")),
    "o": (26, -1, "oid", ("0", "4294967295"), ()),
    "f": (701, -1, "double precision", ("1.5", "-0.25", "1e+300"), ("NaN", "-Infinity", "-0")),
    "b": (16, -1, "boolean", ("t", "f"), ()),
    "n": (1700, 786438, "numeric(12,2)", ("1.50", "-0.01"), ("NaN",)),
    "t": (1083, -1, "time without time zone", ("10:00:00", "23:59:59.999999", "00:00:00.5"), ("24:00:00",)),
    "t3": (1083, 3, "time(3) without time zone", ("10:00:00", "23:59:59.999"), ("24:00:00",)),
    "s": (1114, -1, "timestamp without time zone", ("2026-11-23 10:00:00.123456", "1969-12-31 23:59:59.5"),
          ("infinity", "-infinity", "0044-03-15 01:02:03 BC", "10000-01-01 00:00:00", "294276-12-31 00:00:00")),
    "s3": (1114, 3, "timestamp(3) without time zone", ("2026-11-23 10:00:00.123", "1969-12-31 23:59:59.999"),
           ("infinity", "-infinity", "294276-12-31 00:00:00")),
    "z": (1184, -1, "timestamp with time zone", ("2026-11-23 10:00:00.123456+00", "2026-11-23 10:00:00+00"),
          ("infinity", "-infinity", "0044-03-15 01:02:03+00 BC", "0001-01-01 00:00:00+00 BC", "10000-01-01 00:00:00+00",
           "294276-12-31 00:00:00+00")),
    "after": (17, -1, "bytea", ("\\x", "\\x00ff10"), ()),
    "tags": (1009, -1, "text[]", ("{}", '{a,NULL,"b c","q\\"}"}'), ("{{a},{b}}", "[0:0]={x}")),
    "nums": (1231, 393222, "numeric(6,2)[]", ("{1.50,NULL,-0.25}", "{}"), ("{1.50,NaN}", "{{1.00}}")),
    "ats": (1115, -1, "timestamp without time zone[]", ('{"2026-02-03 04:05:06.5",NULL}', "{}"),
            ("{infinity}", '{"0044-03-15 12:00:00 BC"}', '{"294276-12-31 23:59:59"}')),
    "source": (25, -1, "text", ("", 'x "y" \\', '},"source":{"version":', ',"after":{', ',"after":null,"source"'), ()),
}  # fmt: skip
"""oid, typmod, name, usual values, values that Arrow does not read."""

RELATION = Relation(
    7, "public", "t",
    tuple(Described(n, oid, mod, kind, 0 if n == "id" else 1 if n == "day" else -1)
          for n, (oid, mod, kind, _, _) in TYPES.items()),
)  # fmt: skip
SCHEMA = ShardSchema(tuple(column_for(n, kind) for n, (_, _, kind, _, _) in TYPES.items()), ("id", "day"))
FORMS = {name: value_form(oid, mod) for name, (oid, mod, *_) in TYPES.items()}
ROWS, EVENTS = RowEncoder(RELATION), EventEncoder(RELATION, EventSource("shop", "db"))
AVRO = AvroEncoder(RELATION, EventSource("shop", "db", ((5, 70_000),)))
WRITTEN: dict[str, tuple[EventEncoder | AvroEncoder, Sequence[AvroVersion]]] = {
    "json": (EVENTS, ()),
    "avro": (AVRO, (AvroVersion(5, 70_000, key_layout(RELATION.columns), row_layout(RELATION.columns)),)),
}


def row_of(rand: random.Random, odd: float) -> Row:
    row: Row = {}
    for name, (_, _, _, usual, strange) in TYPES.items():
        key = name in ("id", "day")
        if not key and rand.random() < 0.1:
            row[name] = None
        else:
            row[name] = rand.choice(strange if strange and not key and rand.random() < odd else usual)
    return row


def decoded(decoder: CapturedDecoder, records: list[Record]) -> Captured:
    _, columns = decode_columns(encode_batch(records))
    return decoder.decode(Records("t", 0, np.zeros(len(records), dtype=np.int64), columns))


def reported(found: Captured, place_of: list[int]) -> Any:
    """Return commands with the places of changes; an event and its tombstone are one change."""
    rows = found.commands.rows
    numbers = {"s": pa.int64(), "s3": pa.int64(), "z": pa.int64(), "day": pa.int32(), "ats": pa.list_(pa.int64())}
    for name, kind in numbers.items():
        at = rows.schema.get_field_index(name)  # Python's calendar is too short for them
        rows = rows.set_column(at, name, rows.column(name).cast(kind))
    commands = [repr(row | {ORDER: place_of[row[ORDER]]}) for row in rows.to_pylist()]
    dead = sorted(place_of[letter["offset"]] for letter in found.dead.to_pylist())
    return sorted(commands), [place_of[t.order] for t in found.commands.truncates], dead, found.stop


@settings(max_examples=60)
@given(
    st.integers(0, 1 << 32), st.sampled_from([5, 40, 200]), st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from(["json", "avro"]),
)  # fmt: skip
def test_a_topic_of_events_gives_the_commands_of_a_topic_of_rows(
    seed: int, count: int, odd: float, written: str
) -> None:
    rand = random.Random(seed)
    encoder, avro = WRITTEN[written]
    rows: list[Record] = []
    events: list[Record] = []
    places: list[int] = []
    tail = encoder.encode_tail(50, 7, 1_000)
    plain, truncate = (("tm.pos", b"1_0"), ("tm.op", b"x"), ("tm.xid", b"7")), ("tm.op", b"truncate")
    for place in range(count):
        old, new = row_of(rand, odd), row_of(rand, odd)
        op = rand.choices(["insert", "update", "delete", "truncate", "copy"], [4, 4, 3, 0.1, 1])[0]
        if op == "truncate":
            rows.append(Record(None, None, (truncate,), 1_000))
            events.append(
                Record(None, encoder.encode_head(None, None) + tail.encode(place, OPS[op]), (truncate,), 1_000)
            )
        elif op == "delete":
            rows.append(Record(ROWS.key(old), None, plain, 1_000))
            events.append(
                Record(encoder.key(old), encoder.encode_head(old, None) + tail.encode(place, OPS[op]), plain, 1_000)
            )
            places.append(place)
            events.append(Record(encoder.key(old), None, plain, 1_000))
        else:
            rows.append(Record(ROWS.key(new), ROWS.value(new), plain, 1_000))
            head = encoder.encode_head(old if op == "update" else None, new)
            events.append(Record(encoder.key(new), head + tail.encode(place, OPS.get(op, SNAPSHOT_OP)), plain, 1_000))
        places.append(place)
    expected = reported(decoded(CapturedDecoder(SCHEMA, "public.t"), rows), list(range(count)))
    assert reported(decoded(CapturedDecoder(SCHEMA, "public.t", forms=FORMS, avro=avro), events), places) == expected


@pytest.mark.parametrize("written", ["json", "avro"])
def test_usual_events_are_read_by_blocks(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, avro = WRITTEN[written]
    rand, tail, records = random.Random(1), encoder.encode_tail(50, 7, 1_000), list[Record]()
    for place in range(300):
        old, new = row_of(rand, 0), row_of(rand, 0)
        records.append(Record(encoder.key(new), encoder.encode_head(old, new) + tail.encode(place, b"u"), (), 1_000))
        records.append(Record(encoder.key(old), encoder.encode_head(old, None) + tail.encode(place, b"d"), (), 1_000))
        records.append(Record(encoder.key(old), None, (), 1_000))
    decoder = CapturedDecoder(SCHEMA, forms=FORMS, avro=avro)

    def one_by_one(*_: object) -> None:
        raise AssertionError("an event was read by itself")

    monkeypatch.setattr(decoder, "_extract_row", one_by_one)
    assert decoded(decoder, records).commands.rows.num_rows == 600
    assert objects_module.MIN_BLOCK_VALUES < 300


@pytest.mark.parametrize("value", [b"{}", b"[]", b"\xff", b'{"after":{},"op":"c"}', b'{"before":null,"op":"c"}'])
def test_what_is_no_event_is_a_dead_letter_or_stops_the_table(value: bytes) -> None:
    good = EVENTS.encode_head(None, row_of(random.Random(1), 0)) + EVENTS.encode_tail(1, 1, 1).encode(0, b"c")
    found = decoded(
        CapturedDecoder(SCHEMA, forms=FORMS), [Record(b"{}", good), Record(b"{}", value), Record(b"{}", good)]
    )
    assert found.dead.num_rows == 1 or found.stop is not None


@settings(max_examples=25)
@given(st.integers(0, 1 << 32), st.sampled_from([3, 100]))
def test_avro_that_is_damaged_in_any_way_is_read_alike_by_blocks_and_one_by_one(seed: int, count: int) -> None:
    rand, tail, records = random.Random(seed), AVRO.encode_tail(50, 7, 1_000), list[Record]()
    _, avro = WRITTEN["avro"]
    for place in range(count):
        key, value = (
            AVRO.key(row_of(rand, 0)),
            AVRO.encode_head(row_of(rand, 0), row_of(rand, 0.1)) + tail.encode(place, b"u"),
        )
        if rand.random() < 0.3:
            at = rand.randrange(5, len(value))
            value = value[:at] + bytes([rand.randrange(256)]) * rand.choice([1, 20]) + value[at + 1 :]
        if rand.random() < 0.1:
            key, value = key[: rand.randrange(5, len(key))], value[: rand.randrange(5, len(value))]
        records.append(Record(key, value if rand.random() < 0.9 else None, (), 1_000))
    found = []
    for few in (1, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(avro_module, "MIN_BLOCK_VALUES", few)
            found.append(
                reported(decoded(CapturedDecoder(SCHEMA, forms=FORMS, avro=avro), records), list(range(count)))
            )
    assert found[0] == found[1]


def test_avro_of_another_schema_stops_the_table_and_a_letter_names_its_key_as_json() -> None:
    _, avro = WRITTEN["avro"]
    rand, tail = random.Random(1), AVRO.encode_tail(50, 7, 1_000)
    good, bad = (AVRO.encode_head(None, row_of(rand, 0)) + tail.encode(0, b"c") for _ in range(2))
    key = AVRO.key({"id": "1", "day": "2026-11-23"})
    found = decoded(
        CapturedDecoder(SCHEMA, forms=FORMS, avro=avro), [Record(key, good), Record(key, bad[:40]), Record(key, good)]
    )
    assert [letter["key"] for letter in found.dead.to_pylist()] == ['{"id":1,"day":20780}']
    other = good[:4] + b"\x71" + good[5:]
    found = decoded(CapturedDecoder(SCHEMA, "t", forms=FORMS, avro=avro), [Record(key, good), Record(key, other)])
    assert found.stop is not None and found.stop.offset == 1 and "its schema is 0000011171" in found.stop.reason


COLUMNS = (
    "id int, day date, n numeric(8,2), t time, t3 time(3), s timestamp, s3 timestamp(3), z timestamptz, raw bytea,"
    " o oid, f float8, b boolean, txt text, PRIMARY KEY (id, day)"
)
INSERT = (
    "INSERT INTO things SELECT g, date '2026-11-23' + g, g / 7.0, time '01:02:03.4' + g * interval '1 s',"
    " '10:00:00.123', timestamp '1969-12-31 23:59:59.5' + g * interval '1 h', '2026-11-23 10:00:00.25',"
    " now() + g * interval '1 s',"
    " decode('00ff', 'hex'), g, g * 0.1, g % 2 = 0,"
    ' repeat(\'}},"source":{{"version":\', g % 3) FROM generate_series({}) g'
)


@pytest.mark.postgres
def test_a_pipeline_over_a_captures_topic_of_events_holds_what_verify_finds_in_postgres(
    harbour: Any, postgres_dsn: str, tmp_path: Path
) -> None:
    """Cases: copied rows, rows streamed by columns and one by one, moved keys, a truncate, a later column. One capture
    uses JSON, another one Avro."""
    s, call = harbour.stores, harbour.portal.call
    registrar = LocalSchemaRegistrar(Registry(s.metastore, s.clock, s.rand, run_inline))
    tables = {"shop": "things", "avro": "others"}
    remaps = {name: call(open_remap(s.consensus, s.clock, s.rand, f"capture/{name}")) for name in tables}
    sql = psycopg.connect(postgres_dsn, autocommit=True)
    sql.execute(f"CREATE TABLE things ({COLUMNS})")
    sql.execute(INSERT.format("1, 300"))

    async def start(name: str, envelope: Envelope) -> tuple[Capture, asyncio.Task[None]]:
        config = CaptureConfig(name, postgres_dsn, envelope=envelope, table_poll_s=0.2, binding_interval_ms=10)
        capture = Capture(
            config, topics=harbour.topics, catalogue=s.catalogue, remap=remaps[name], clock=s.clock, rand=Rand(),
            tracker=StatusTracker(), schemas=registrar,
        )  # fmt: skip
        return capture, asyncio.create_task(capture.run())

    async def stop(capture: Capture, task: asyncio.Task[None]) -> None:
        await capture.aclose()
        await asyncio.gather(task, return_exceptions=True)

    def verified(name: str) -> Any:
        shard = harbour.shard(tables[name])
        (found,) = call(verify_captured(postgres_dsn, remaps[name], [("public.things", shard)], Rand()))
        return found

    captures = [call(start("shop", "debezium")), call(start("avro", "debezium-avro"))]
    build = "".join(f'    p.table("{table}", p.capture("{name}").table("things"))\n' for name, table in tables.items())
    try:
        with pipeline(harbour, tmp_path, f"def build(p):\n{build}"):
            eventually(lambda: all(capture.streaming for capture, _ in captures))
            sql.execute("TRUNCATE things")
            sql.execute(INSERT.format("200, 500"))
            sql.execute("UPDATE things SET f = -f, z = '0044-03-15 BC', s = '-infinity' WHERE id % 10 = 0")
            sql.execute("UPDATE things SET day = day + 1 WHERE id % 10 = 1")
            sql.execute("DELETE FROM things WHERE id % 10 = 2")
            sql.execute("ALTER TABLE things ADD COLUMN later time DEFAULT '24:00:00'")
            sql.execute(INSERT.format("600, 700"))
            # A driver that opened the shard before it got the column gets an error, and opens it again.
            for name, table in tables.items():
                eventually(
                    lambda table=table: (  # type: ignore[misc]
                        harbour.upper(table) > 0
                        and "later" in [column.name for column in harbour.shard(table).schema.columns]
                    )
                )
                found = verified(name)
                assert found.clean and found.rows > 300, found
    finally:
        for capture, task in captures:
            call(stop(capture, task))
        sql.close()  # the fixture drops the slots, once the server has seen that their connections ended
    assert harbour.upper("p.dead_letters") == 0
