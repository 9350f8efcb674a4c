"""Batches with columns: a table's commands, dead letters and stops are those of the records alone."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.capture import wire
from support.capture.wire import Log, Notices, framed, message
from support.spark.column_groups import ColumnGroups
from tidemill.base.clock import Rand
from tidemill.capture.changes import Column as SourceColumn
from tidemill.capture.changes import Relation
from tidemill.capture.encode import columnar_encoder
from tidemill.capture.topics import batch_builder, partition_writer
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode.column_batches import find_column_batches, group_column_batches
from tidemill.spark.decode.records import Slice, SliceDescriptor
from tidemill.spark.ingest.fetch_decode import Decoded, decode
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.merge.commands import ORDER, PARTITION
from tidemill.spark.predicates.expectations import DEAD_LETTER, FAIL, Expectation, Expectations
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, encode_batch, row_columns
from tidemill.topics.batch.columns_trailer import encode_trailer
from tidemill.topics.batch.row_columns import build_row_columns, decode_row_columns, encode_row_columns

USUAL: dict[str, tuple[int, str, list[str], list[str]]] = {
    # column: (oid, type of the table, usual texts, texts that only the records decide)
    "id": (20, "int64", [str(n) for n in range(-5, 60)], []),
    "small": (21, "int16", ["-32768", "0", "7"], []),
    "int": (23, "int32", ["-2147483648", "12"], []),
    "oid": (26, "int64", ["0", "4294967295"], []),
    "real": (700, "float32", ["0.1", "-0", "3.4028235e+38", "1e-45", "1.17549435e-38"], ["NaN", "-Infinity"]),
    "double": (701, "float64", ["0.1", "-0", "1e+20", "5e-324", "1.7976931348623157e+308"], ["NaN", "Infinity"]),
    "flag": (16, "bool", ["t", "f"], []),
    "price": (1700, "decimal(12,2)", ["0.00", "-1.50", "9999999999.99"], ["NaN", "99999999999.99"]),
    "text": (25, "string", ["", "plain", "\\ \" \n\t\x01 ä€😀\u2028", "x" * 300, "null", "{}"], []),
    "json": (3802, "json", ["null", '{"a": [1, "ä"]}', "1.50"], []),
    "bytes": (17, "binary", ["\\x", "\\x00ff"], []),
    "day": (1082, "date", ["2026-11-30", "0001-01-01", "9999-12-31"], ["infinity", "10000-01-01", "0044-03-15 BC"]),
    "at": (
        1184, "timestamp", ["2026-11-30 10:00:00.123456+00", "1969-12-31 23:59:59.5+00"],
        ["infinity", "0044-03-15 00:00:00+00 BC"],
    ),
    "clock": (1114, "timestamp_ntz", ["2026-11-30 10:00:00.123", "0001-01-01 00:00:00"], ["-infinity"]),
    "time": (1083, "string", ["10:00:00", "24:00:00"], []),
    "many": (1007, "array<int32>", ["{}", "{1,NULL,3}"], ["{{1,2},{3,4}}"]),
    "words": (1009, "array<string>", ["{}", '{a,"b,c",NULL,"NULL"}'], []),
}  # fmt: skip
RELATION = Relation(
    7,
    "public",
    "t",
    tuple(SourceColumn(name, oid, -1, "", 0 if name == "id" else -1) for name, (oid, *_) in USUAL.items()),
)
SCHEMA = ShardSchema(tuple(Column(name, kind) for name, (_, kind, *_) in USUAL.items()), ("id",))


def feed_of(schema: ShardSchema = SCHEMA, **more: Any) -> TopicFeed:
    return TopicFeed("db.public.t", "t", 2, True, schema, "public.t", **more)


def row(rand: random.Random, odd: float) -> list[str | None]:
    out: list[str | None] = []
    for name, (_, _, usual, rare) in USUAL.items():
        null = name != "id" and rand.random() < 0.1
        out.append(None if null else rand.choice(rare if rare and rand.random() < odd else usual))
    return out


def changes(rand: random.Random, count: int, odd: float) -> list[bytes]:
    """Return the frames of one transaction: rows that are inserted, updated and deleted."""
    frames = [framed(50, b"B" + struct.pack(">qqI", 50, 1_000_000, 7))]
    for _ in range(count):
        kind, new = rand.choice("IIUD"), row(rand, odd)
        if kind == "U":
            payload = message("U", 7, [new[0], *row(rand, 0)[1:]], new)
        else:
            payload = message("I", 7, None, new) if kind == "I" else message("D", 7, new, None)
        frames.append(framed(50, payload))
    return [*frames, framed(50, b"C" + struct.pack(">Bqqq", 0, 50, 58, 1_000_000))]


def write(
    frames: Sequence[bytes], relation: Relation = RELATION, partitions: int = 2, bursts: Sequence[int] = ()
) -> Log:
    """Return a topic writer's batches and trailers. Bursts of fewer than 30 rows are decoded one by one, if there are
    any."""
    at_once, least = (bursts, 30) if bursts else ([len(frames)], 1)
    fragments, poisoned = wire.feed(frames, at_once, least, relations={relation.oid: relation})
    assert not poisoned

    async def run() -> Log:
        log = Log()
        table = CapturedTable("public.t", TopicRow("t", "t", partitions), 5, oid=relation.oid)
        failed: list[str] = []

        async def fault(table: CapturedTable, lsn: int, error: BaseException) -> None:
            failed.append(repr(error))

        writer = TopicWriter("w", [table], log, Rand(1), lambda _: None, fault)  # type: ignore[arg-type]
        for each in table.writers:
            each.start_at(0, 0, None)
        for fragment in fragments:
            await writer.deliver(fragment, Notices())
        await writer.wait_drained()
        await writer.aclose()
        assert not failed
        return log

    return asyncio.run(run())


def descriptors_of(log: Log, rand: random.Random) -> tuple[list[SliceDescriptor], list[list[bytes]], list[list[bytes]]]:
    """Return a slice of each partition, its batches, and the same batches with their trailers."""
    found: list[SliceDescriptor] = []
    plain: list[list[bytes]] = []
    whole: list[list[bytes]] = []
    for (_, partition), batches in sorted(log.batches.items()):
        refs: list[BatchRef] = []
        patched: list[bytes] = []
        base = 0
        for data in batches:
            count = int.from_bytes(data[57:61], "big")
            patched.append(base.to_bytes(8, "big") + data[8:])
            refs.append(BatchRef("o", 0, len(data), base, count, 0))
            base += count
        middle = rand.randint(0, base)
        start, end = rand.choice([(0, base), (0, base), (min(3, middle), base), (0, max(base - 2, middle))])
        ends = sorted({max(start, min(middle, end)), end} - {start})
        if not ends:
            continue
        piece = Slice("db.public.t", "t", partition, start, end, tuple(ends), tuple(range(100, 100 + len(ends))))
        inside = [
            at for at, ref in enumerate(refs) if ref.base_offset < end and ref.base_offset + ref.record_count > start
        ]
        found.append(SliceDescriptor(piece, tuple(refs[at] for at in inside)))
        plain.append([patched[at] for at in inside])
        trailers = log.trailers["t", partition]
        whole.append([patched[at] + trailers[at] for at in inside])
    return found, plain, whole


def told(decoded: Decoded) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any, Any]:
    """Return rows in the order of their records, with floats and times as bits."""
    rows = decoded.commands.rows.sort_by([(PARTITION, "ascending"), (ORDER, "ascending")])
    for at, field in enumerate(rows.schema):
        if pa.types.is_floating(field.type) or pa.types.is_temporal(field.type):
            bits = pa.int32() if field.type.bit_width == 32 else pa.int64()
            rows = rows.set_column(at, field.name, rows.column(at).combine_chunks().view(bits))
    return rows.to_pylist(), sorted(decoded.dead.to_pylist(), key=str), decoded.commands.truncates, decoded.stop


@pytest.fixture
def every_batch_has_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_builder, "MIN_ROWS", 1)
    monkeypatch.setattr(columnar_encoder, "MIN_BLOCK_ROWS", 1)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1 << 32), st.sampled_from([0.0, 0.0, 0.002, 0.05]), st.sampled_from([2_000, 20_000, 512 << 10]),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_columns_give_what_their_records_give(seed: int, odd: float, batch_bytes: int, partitions: int) -> None:
    """Every type, NULL, deletions, texts that only PostgreSQL writes, slices that cut batches."""
    rand = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_builder, "MIN_ROWS", 1)
        patch.setattr(columnar_encoder, "MIN_BLOCK_ROWS", 1)
        patch.setattr(partition_writer, "BATCH_BYTES", batch_bytes)
        frames = changes(rand, rand.choice([1, 5, 60, 150]), odd)
        bursts = rand.choice([[], wire.bursts(rand, len(frames))])
        log = write(frames, partitions=partitions, bursts=bursts)
        descriptors, plain, whole = descriptors_of(log, rand)
        counted = ColumnGroups(patch)
        found = told(decode(feed_of(), descriptors, whole))
        assert counted.decoded or bursts or not descriptors
        assert odd or all(counted.decoded), "usual texts need no records"
        del counted.decoded[:]
        assert found == told(decode(feed_of(), descriptors, plain))
        assert not counted.decoded


@pytest.mark.usefixtures("every_batch_has_columns")
def test_the_rows_of_a_group_that_is_left_to_its_records_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch in the middle has a text that is a dead letter; the others are decoded from columns."""
    monkeypatch.setattr(partition_writer, "BATCH_BYTES", 2_000)
    monkeypatch.setattr("tidemill.spark.decode.column_batches.BLOCK_RECORDS", 1)
    rand = random.Random(1)
    frames = changes(rand, 200, 0.0)
    strange = [*row(rand, 0.0)]
    strange[list(USUAL).index("price")] = "99999999999.99"
    frames.insert(100, framed(50, message("I", 7, None, strange)))
    descriptors, plain, whole = descriptors_of(write(frames), random.Random(0))
    counted = ColumnGroups(monkeypatch)
    found = decode(feed_of(), descriptors, whole)
    assert counted.decoded.count(False) == 1 and len(counted.decoded) > 10
    assert found.dead.num_rows == 1 and told(found) == told(decode(feed_of(), descriptors, plain))


NEWER = Relation(7, "public", "t", (*RELATION.columns, SourceColumn("more", 25, -1, "", -1)), version=2)


@pytest.mark.usefixtures("every_batch_has_columns")
@pytest.mark.parametrize(
    ("known", "groups"),
    [
        ((SCHEMA.columns,), [False]),  # the driver does not know version 2 yet: it stops
        ((SCHEMA.columns, (*SCHEMA.columns, Column("more", "string"))), [True]),
        ((SCHEMA.columns, (*SCHEMA.columns, Column("other", "string"))), [False]),  # other columns: it stops
    ],
)
def test_columns_of_another_description_are_left_to_the_records(
    monkeypatch: pytest.MonkeyPatch, known: tuple[tuple[Column, ...], ...], groups: list[bool]
) -> None:
    rand = random.Random(2)
    frames = [framed(50, message("I", 7, None, [*row(rand, 0.0), "more"])) for _ in range(120)]
    log = write([*changes(rand, 0, 0)[:1], *frames, *changes(rand, 0, 0)[1:]], NEWER, partitions=1)
    descriptors, plain, whole = descriptors_of(log, random.Random(0))
    counted = ColumnGroups(monkeypatch)
    feed = feed_of(ShardSchema(known[-1], ("id",)), known=known)
    found = decode(feed, descriptors, whole)
    assert counted.decoded == groups and (found.stop is None) == groups[0]
    assert told(found) == told(decode(feed, descriptors, plain))


@pytest.mark.usefixtures("every_batch_has_columns")
def test_an_older_description_is_read_from_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors, plain, whole = descriptors_of(write(changes(random.Random(3), 100, 0)), random.Random(0))
    wider = (*SCHEMA.columns, Column("more", "string"))
    feed, counted = feed_of(ShardSchema(wider, ("id",)), known=(SCHEMA.columns, wider)), ColumnGroups(monkeypatch)
    assert told(decode(feed, descriptors, whole)) == told(decode(feed, descriptors, plain))
    assert not any(counted.decoded)


@pytest.mark.usefixtures("every_batch_has_columns")
@pytest.mark.parametrize("on_violation", [DEAD_LETTER, FAIL])
@pytest.mark.parametrize("expression", ["small < 0", "id > -100"])
def test_rows_that_violate_an_expectation_are_read_from_their_records(
    monkeypatch: pytest.MonkeyPatch, on_violation: str, expression: str
) -> None:
    descriptors, plain, whole = descriptors_of(write(changes(random.Random(4), 150, 0)), random.Random(0))
    feed, counted = (
        feed_of(expectations=Expectations((Expectation("rule", expression),), on_violation)),
        ColumnGroups(monkeypatch),
    )
    found = decode(feed, descriptors, whole)
    assert counted.decoded, "the columns were tried"
    assert bool(found.violations or found.stop) == (expression == "small < 0")
    other = decode(feed, descriptors, plain)
    assert told(found) == told(other) and found.violations == other.violations


Damage = Callable[[bytes, bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "a flipped bit": lambda data, trailer: data + trailer[:-1] + bytes([trailer[-1] ^ 1]),
    "cut short": lambda data, trailer: data + trailer[:-5],
    "another magic": lambda data, trailer: data + b"TMC9" + trailer[4:],
    "no Arrow": lambda data, _: data + encode_trailer(bytes(40), int.from_bytes(data[57:61], "big"), 40),
    "another table's": lambda data, _: data + other_trailer(int.from_bytes(data[57:61], "big"), "other"),
    "too few rows": lambda data, _: data + other_trailer(int.from_bytes(data[57:61], "big"), *USUAL, rows=1),
    "no row": lambda data, _: data + other_trailer(int.from_bytes(data[57:61], "big"), *USUAL, rows=0),
}


def other_trailer(count: int, *names: str, rows: int | None = None) -> bytes:
    made = rows if rows is not None else count
    texts = [pa.array(["1" if name == "id" else None] * made, pa.string()) for name in names]
    columns = encode_row_columns([build_row_columns(names, 1, [True] * made, texts)])
    assert columns is not None
    return encode_trailer(columns[0], count, columns[1])


@pytest.mark.usefixtures("every_batch_has_columns")
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_columns_are_not_read(kind: str) -> None:
    log = write(changes(random.Random(5), 100, 0), partitions=1)
    descriptors, plain, _ = descriptors_of(log, random.Random(0))
    damaged = [[DAMAGES[kind](data, log.trailers["t", 0][at]) for at, data in enumerate(plain[0])]]
    found = decode(feed_of(), descriptors, damaged)
    assert found.stop is None and told(found) == told(decode(feed_of(), descriptors, plain))


def test_only_batches_of_enough_rows_have_columns() -> None:
    for count, expected in ((row_columns.MIN_ROWS - 1, False), (row_columns.MIN_ROWS, True)):
        frames = [framed(50, message("I", 7, None, [str(n), *row(random.Random(n), 0)[1:]])) for n in range(count)]
        begin, end = changes(random.Random(0), 0, 0)
        log = write([begin, *frames, end], partitions=1)
        assert [bool(each) for each in log.trailers["t", 0]] == [expected]


def test_rows_of_two_descriptions_share_no_columns() -> None:
    rows = [build_row_columns(["a"], version, [True], [pa.array(["1"])]) for version in (1, 2)]
    assert encode_row_columns(rows) is None
    found = decode_row_columns((encode_row_columns(rows[1:]) or (b"", 0))[0])
    assert found is not None and (found.version, found.texts["a"].to_pylist()) == (2, ["1"])


def test_names_of_columns_may_be_those_of_the_trailer() -> None:
    names = ["live", "tm.version"]
    made = encode_row_columns([build_row_columns(names, 1, [True], [pa.array(["1"]), pa.array(["2"])])])
    found = decode_row_columns(made[0] if made is not None else b"")
    assert found is not None and list(found.texts) == names
    assert found.live.to_pylist() == [True]


def test_groups_are_bounded_by_the_memory_of_their_columns() -> None:
    """The texts of a row may be compressed by a factor of 200."""
    names, live, texts = ["id", "text"], [True] * 2, [pa.array(["1", "2"]), pa.array(["x" * (3 << 20), "y"])]
    encoded = encode_row_columns([build_row_columns(names, 1, live, texts)])
    assert encoded is not None and len(encoded[0]) < 40_000 < 3 << 20 < encoded[1]
    data = encode_batch([Record(b"1", b"1"), Record(b"2", b"2")]) + encode_trailer(encoded[0], 2, encoded[1])
    refs = [BatchRef("o", 0, len(data), 2 * n, 2, 0) for n in range(7)]
    piece = Slice("t", "t", 0, 0, 14, (14,), (100,))
    found = find_column_batches([(piece, [data] * 7, refs)])
    assert [len(group) for group in group_column_batches(found)] == [2, 2, 2, 1]


@pytest.mark.parametrize(("version", "relation"), [(1, RELATION), (2, msgspec.structs.replace(RELATION, version=2))])
def test_rows_of_a_batch_that_were_decoded_one_by_one_have_columns_too(version: int, relation: Relation) -> None:
    """The last rows of a receive are few; they cost their batch its columns otherwise."""
    rand = random.Random(6)
    frames = changes(rand, 900, 0.05)
    log = write(frames, relation, partitions=1, bursts=[400, 20, 400, 20, 20, 60])
    assert [bool(each) for each in log.trailers["t", 0]] == [True] * len(log.trailers["t", 0])
    descriptors, plain, whole = descriptors_of(log, random.Random(0))
    feed = feed_of(known=(SCHEMA.columns,) * version)
    assert told(decode(feed, descriptors, whole)) == told(decode(feed, descriptors, plain))


@pytest.mark.usefixtures("every_batch_has_columns")
@pytest.mark.parametrize(("kind", "plain_rows"), [("key", True), ("toast", False), ("truncate", False)])
def test_a_batch_with_a_record_that_is_no_plain_row_has_no_columns(kind: str, plain_rows: bool) -> None:
    """A changed key is a deletion and an insertion."""
    rand = random.Random(7)
    frames = changes(rand, 100, 0)
    old, new = row(rand, 0), row(rand, 0)
    other = {
        "key": message("U", 7, ["1000", *old[1:]], ["1001", *new[1:]]),
        "toast": message("U", 7, None, [new[0], *([wire.UNCHANGED] * (len(new) - 1))]),
        "truncate": b"T" + struct.pack(">IBI", 1, 0, 7),
    }[kind]
    frames.insert(50, framed(50, other))
    relation = msgspec.structs.replace(RELATION, old_rows="key") if kind == "toast" else RELATION
    log = write(frames, relation, partitions=1)
    assert [bool(each) for each in log.trailers["t", 0]] == [plain_rows]
    descriptors, plain, whole = descriptors_of(log, random.Random(0))
    assert told(decode(feed_of(), descriptors, whole)) == told(decode(feed_of(), descriptors, plain))


@pytest.mark.usefixtures("every_batch_has_columns")
def test_a_version_with_the_same_names_and_narrower_types_is_read_from_its_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.1 of a real is 0.10000000149011612 as a double precision, not 0.1."""
    descriptors, plain, whole = descriptors_of(write(changes(random.Random(8), 100, 0)), random.Random(0))
    wider = tuple(Column(c.name, "float64") if c.name == "real" else c for c in SCHEMA.columns)
    feed, counted = feed_of(ShardSchema(wider, ("id",)), known=(SCHEMA.columns, wider)), ColumnGroups(monkeypatch)
    found = decode(feed, descriptors, whole)
    assert told(found) == told(decode(feed, descriptors, plain)) and not any(counted.decoded)
    assert float(np.float32("0.1")) in found.commands.rows.column("real").to_pylist()


@pytest.mark.usefixtures("every_batch_has_columns")
def test_an_exception_that_nothing_foresees_leaves_a_group_to_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors, plain, whole = descriptors_of(write(changes(random.Random(9), 100, 0)), random.Random(0))

    def fail(*_: object) -> None:
        raise ArithmeticError("unforeseen")

    monkeypatch.setattr("tidemill.spark.decode.captured.text_to_column", fail)
    assert told(decode(feed_of(), descriptors, whole)) == told(decode(feed_of(), descriptors, plain))


@pytest.mark.usefixtures("every_batch_has_columns")
def test_a_batch_whose_columns_cannot_be_encoded_is_sent_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trailer only repeats its records, so an error of it does not stop the capture."""
    frames = changes(random.Random(10), 100, 0)
    records = write(frames).batches

    def fail(*_: object) -> None:
        raise ArithmeticError("unforeseen")

    monkeypatch.setattr(batch_builder, "encode_row_columns", fail)
    log = write(frames)
    assert log.batches == records and not any(b"".join(each) for each in log.trailers.values())
