"""Columnar decoding and encoding, compared with the per-row functions: equal fragments, equal bytes, equal errors."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.capture.wire import (
    INT4,
    INT8,
    RELATIONS,
    TEXT,
    UNCHANGED,
    Log,
    Notices,
    bursts,
    encoded_tuple,
    feed,
    framed,
    message,
    value,
)
from tidemill.base.clock import Rand
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Fragment
from tidemill.capture.decode.receive_batch import RowRun, split_into_steps
from tidemill.capture.decode.row_blocks import LazyChanges, SegmentRows, first_position, group_by_relation
from tidemill.capture.decode.transaction_builder import TransactionBuilder
from tidemill.capture.encode import columnar_encoder
from tidemill.capture.encode.debezium_json import EventSource
from tidemill.capture.postgres.pgoutput import UNCHANGED as WIRE_UNCHANGED
from tidemill.capture.postgres.pgoutput import Delete, Update, decode_message
from tidemill.capture.postgres.standby_status import PAYLOAD_START
from tidemill.capture.topics import batch_builder, captured_table, partition_writer
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow


def change(rand: random.Random) -> bytes:
    relation = RELATIONS[rand.choice([1, 1, 1, 2, 2, 3, 4, 5, 5])]

    def row() -> list[Any]:
        nullable = relation.oid in (2, 5)
        return [
            None if nullable and c.key_index < 0 and rand.random() < 0.3 else value(rand, c.type_oid)
            for c in relation.columns
        ]

    kind = rand.choice("IIIUUD")
    if kind == "I":
        return message("I", relation.oid, None, row())
    old = row()
    if kind == "D":
        return message("D", relation.oid, old, None)
    new = row()
    if rand.random() < 0.8:
        new = [o if c.key_index >= 0 else n for o, n, c in zip(old, new, relation.columns, strict=True)]
    if rand.random() < 0.5:
        new[rand.choice([-1, -2]) if len(new) > 1 else -1] = UNCHANGED
    return message("U", relation.oid, old, new)


GOOD = message("I", 1, None, ["1", "2", "x"])
BROKEN = [
    message("I", 1, None, ["1", "2"]),
    message("I", 1, None, ["1", "2", b"\xff\xfe"]),
    message("I", 1, None, ["1", b"\xc3", b"\xa4"]),
    message("D", 2, [None, b"\xc3", None, "1", None, None], None),
    message("U", 1, ["1", "2", b"\xe2\x82"], ["1", "2", "x"]),
    message("U", 1, ["1", UNCHANGED, "x"], ["1", "2", "x"]),
    message("I", 1, None, ["1", UNCHANGED, "x"]),
    GOOD[:-1],
    GOOD + b"y",
    GOOD.replace(b"N", b"K", 1),
    message("U", 1, None, ["1", "2", "x"]),
    message("D", 1, ["1", "2", "x"], None).replace(b"O", b"K", 1),
    GOOD[:-5] + b"\xff\xff\xff\xffx",
    GOOD[:-5] + b"\x00\x00\x00\x7fx",
    message("I", 99, None, ["1"]),
    b"I\0",
    b"I\0\0\0\1N\0\3q",
]
LARGE = message("I", 1, None, ["7", "7", "large" * 20_000])
DESCRIBED = b"R" + struct.pack(">I", 1) + b"public\0narrow\0f" + struct.pack(">H", 3) + b"".join(
    b"\1" + name + b"\0" + struct.pack(">Ii", oid, -1) for name, oid in ((b"id", INT4), (b"n", INT8), (b"t", TEXT))
)  # fmt: skip


def transactions(rand: random.Random, *, odd: bool = False) -> list[bytes]:
    """Return the frames of a stream: transactions, keepalives in between, and truncates. `odd` adds unreadable
    messages.
    """
    out = []
    for number in range(1, rand.randint(2, 6)):
        lsn = 1_000 * number * number
        out.append(framed(lsn, b"B" + struct.pack(">qqI", lsn, 1_000_000 * number, 70 + number)))
        for _ in range(rand.choice([0, 1, 3, 40, 80])):
            payload = change(rand)
            if odd and rand.random() < 0.05:
                payload = rand.choice(BROKEN)
            elif odd and rand.random() < 0.05:
                at = rand.randrange(5, len(payload))
                payload = payload[:at] + bytes([rand.randrange(256)]) + payload[at + 1 :]
            elif rand.random() < 0.01:
                payload = LARGE
            out.append(framed(lsn, payload))
            if rand.random() < 0.03:
                out.append(b"k" + struct.pack(">qqB", lsn, 0, 0))
            if rand.random() < 0.03:
                out.append(framed(lsn, b"T" + struct.pack(">IBI", 1, 0, rand.choice([1, 2]))))
            if rand.random() < 0.02:
                out.append(framed(lsn, DESCRIBED))
        out.append(framed(lsn, b"C" + struct.pack(">Bqqq", 0, lsn, lsn + 8, 1_000_000 * number)))
    return out


def reported(fragment: Fragment) -> tuple[Any, ...]:
    changes = tuple(fragment.changes)
    assert len(changes) == len(fragment.changes)
    assert first_position(fragment.changes) == (changes[0].position if changes else None)
    if changes:
        assert fragment.changes[-1].position == fragment.last and fragment.changes[0] == changes[0]
    return (
        fragment.xid, fragment.commit_lsn, fragment.commit_time_ms, fragment.begins, fragment.commits, changes,
        fragment.last, fragment.size_bytes,
    )  # fmt: skip


@settings(max_examples=120)
@given(st.integers(0, 1 << 32), st.booleans(), st.sampled_from([1, 1, 5]))
def test_a_burst_gives_the_fragments_and_the_poison_of_its_messages_one_by_one(
    seed: int, odd: bool, least: int
) -> None:
    rand = random.Random(seed)
    frames = transactions(rand, odd=odd)
    by_rows = feed(frames, None, 1)
    by_columns = feed(frames, bursts(rand, len(frames)), least)
    assert [reported(f) for f in by_columns[0]] == [reported(f) for f in by_rows[0]]
    assert by_columns[1] == by_rows[1]
    for one, other in zip(by_columns[0], by_rows[0], strict=True):
        assert group_by_relation(one.changes, {2}) == group_by_relation(other.changes, {2})


AS_IS = {oid: replace(relation, old_rows="key") for oid, relation in RELATIONS.items()}


def less_of_old_rows(rand: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Reduce old rows to those of an identity other than FULL: the key, for partitioned tables in the form of a whole
    row, or nothing; sometimes less than the key, which is poison.
    """
    out = []
    for each in frames:
        payload = each[PAYLOAD_START:]
        if payload[:1] in (b"U", b"D") and rand.random() < 0.9:
            found = decode_message(payload)
            assert isinstance(found, Update | Delete) and found.old is not None
            keys = {at for at, c in enumerate(RELATIONS[found.oid].columns) if c.key_index >= 0}
            if rand.random() < 0.03:
                keys.pop()
            old = [each if at in keys or rand.random() < 0.1 else None for at, each in enumerate(found.old)]
            new = None
            if isinstance(found, Update):
                new = [UNCHANGED if each is WIRE_UNCHANGED else each for each in found.new]
            alone = new is not None and rand.random() < 0.6
            kind = rand.choice([b"K", b"K", b"O"])
            payload = payload[:5] + (b"" if alone else kind + encoded_tuple(old))
            payload += b"" if new is None else b"N" + encoded_tuple(new)
            each = each[:PAYLOAD_START] + payload
        out.append(each)
    return out


@settings(max_examples=120)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 1, 5]), st.sampled_from([1, 3]))
def test_rows_of_which_only_keys_are_said_are_the_same_by_columns_and_one_by_one(
    seed: int, least: int, partitions: int
) -> None:
    rand = random.Random(seed)
    frames = less_of_old_rows(rand, transactions(rand))
    by_rows = feed(frames, None, 1, relations=AS_IS)
    by_columns = feed(frames, bursts(rand, len(frames)), least, relations=AS_IS)
    assert [reported(f) for f in by_columns[0]] == [reported(f) for f in by_rows[0]]
    assert by_columns[1] == by_rows[1]
    assert write(by_columns[0], partitions, {}, {}) == write(by_rows[0], partitions, {}, {})


def test_a_flow_of_updates_and_deletes_that_say_keys_alone_is_read_by_columns() -> None:
    rows = [
        framed(50, message("U", 1, None, [str(n), "1", "x"]) if n % 2 else message("D", 1, [str(n), None, None], None))
        for n in range(200)
    ]
    rows = [each.replace(b"O\0\3", b"K\0\3", 1) for each in rows]
    found = list(split_into_steps([framed(50, b"B" + struct.pack(">qqI", 50, 0, 7)), *rows], TransactionBuilder(AS_IS)))
    assert [(step.start, step.end) for step in found if isinstance(step, RowRun)] == [(1, 201)]


AVRO = EventSource("shop", 'a "b"', tuple((version, 70_000 + version) for version in range(1, 13)))
Written = tuple[dict[tuple[str, int], list[bytes]], dict[str, list[int]], list[tuple[str, int, str]]]


def write(
    fragments: Sequence[Fragment], partitions: int, held: dict[int, int], tails: dict[int, ChangePosition],
    source: EventSource | None = None,
) -> Written:  # fmt: skip
    """Return a topic writer's output: the batches of every lane, its offsets, and the rows that it cannot write."""

    async def run() -> Written:
        log = Log()
        tables = [
            CapturedTable(
                r.name, TopicRow(name=r.name, topic_id=r.name, partitions=partitions), 5, oid=r.oid, source=source
            )
            for r in RELATIONS.values()
        ]
        faults: list[tuple[str, int, str]] = []

        async def fault(table: CapturedTable, lsn: int, error: BaseException) -> None:
            faults.append((table.name, lsn, repr(error)))
            writer.pause_table(table.oid, lsn)

        writer = TopicWriter("w", tables, log, Rand(1), lambda _: None, fault)  # type: ignore[arg-type]
        for table in tables:
            for each in table.writers:
                each.start_at(0, held.get(table.oid, 0), tails.get(table.oid))
        for fragment in fragments:
            await writer.deliver(fragment, Notices())
        await writer.wait_drained()
        await writer.aclose()
        return log.batches, {t.name: [each.next for each in t.writers] for t in tables}, faults

    return asyncio.run(run())


@settings(max_examples=250)
@given(
    st.integers(0, 1 << 32), st.sampled_from([1, 1, 3]), st.sampled_from([1, 1, 40]),
    st.sampled_from([400, 3_000, 512 << 10]), st.lists(st.sampled_from([0, 0, 3, 30]), min_size=5, max_size=5),
    st.sampled_from([None, EventSource("shop", 'a "b"'), AVRO]),
)  # fmt: skip
def test_l1_rows_written_by_columns_have_the_bytes_of_rows_written_one_by_one(
    seed: int, partitions: int, least: int, batch_bytes: int, held: list[int], source: EventSource | None
) -> None:
    """Every type, NULL, unchanged TOAST, escapes, key changes, several partitions, and lanes with earlier records; in
    topics of rows and of events, in JSON and in Avro.
    """
    rand = random.Random(seed)
    frames = transactions(rand)
    before = dict(zip(RELATIONS, held, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_builder, "MIN_COLUMNAR_ROWS", least)
        patch.setattr(partition_writer, "BATCH_BYTES", batch_bytes)
        by_rows = write(feed(frames, None, 1)[0], partitions, before, {}, source)
        by_columns = write(feed(frames, bursts(rand, len(frames)), 1)[0], partitions, before, {}, source)
    assert by_columns == by_rows


def rows_of(count: int, texts: Sequence[str], lsn: int = 50) -> list[bytes]:
    """One transaction of `count` inserts into the narrow table."""
    rows = [framed(lsn, message("I", 1, None, [str(n), "1", texts[n % len(texts)]])) for n in range(count)]
    begin = framed(lsn, b"B" + struct.pack(">qqI", lsn, 0, 7))
    return [begin, *rows, framed(lsn, b"C" + struct.pack(">Bqqq", 0, lsn, lsn + 8, 0))]


def columnar(frames: Sequence[bytes]) -> list[Fragment]:
    fragments = feed(frames, [len(frames)], 1)[0]
    assert any(isinstance(fragment.changes, LazyChanges) for fragment in fragments)
    return fragments


def test_w3_a_row_too_large_to_be_written_parks_its_table_at_its_transaction_and_no_row_of_it_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_table, "MAX_ROW_BYTES", 200)
    first, second = rows_of(60, ["x"]), rows_of(60, ["x"] * 30 + ["y" * 300], 90)
    batches, offsets, faults = write(columnar([*first, *second]), 1, {}, {})
    assert [(table, lsn) for table, lsn, _ in faults] == [("public.narrow", 90)] and "too large" in faults[0][2]
    assert write(feed([*first, *second], None, 1)[0], 1, {}, {}) == (batches, offsets, faults)


def test_l2_a_tail_that_the_rows_do_not_lead_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = rows_of(60, ["x"])
    good = write(columnar(frames), 1, {1: 31}, {1: ChangePosition(50, 60)})
    assert good[2] == [] and good[1]["public.narrow"] == [60]
    (_, _, faults) = write(columnar(frames), 1, {1: 31}, {1: ChangePosition(50, 58)})
    assert "does not match the topic's tail" in faults[0][2]


def test_rows_whose_encoding_by_columns_fails_are_written_one_by_one(
    monkeypatch: pytest.MonkeyPatch, encoder_faults: list[Exception]
) -> None:
    def fails(*_: object) -> None:
        raise OverflowError("of whatever type")

    frames = rows_of(60, ["x", "ä"])
    expected = write(columnar(frames), 1, {}, {})
    monkeypatch.setattr(columnar_encoder, "_encode_json", fails)
    assert write(columnar(frames), 1, {}, {}) == expected and expected[0] and encoder_faults
    encoder_faults.clear()


def test_events_of_inserts_updates_and_deletes_are_encoded_by_columns() -> None:
    day = ["2026-11-23", "7", "10:00:00.5", None, "2026-11-23 10:00:00.25", None, "2026-11-23 10:00:00+00", "\\x0aff"]
    moved = [*day[:1], "8", *day[2:]]
    rows = [message("I", 5, None, day), message("U", 5, day, moved), message("D", 5, moved, None)] * 20
    begin = framed(50, b"B" + struct.pack(">qqI", 50, 0, 7))
    end = framed(50, b"C" + struct.pack(">Bqqq", 0, 50, 58, 0))
    (fragment, *_) = columnar([begin, *(framed(50, row) for row in rows), end])
    (part,) = (part for part in fragment.changes.parts if isinstance(part, SegmentRows))  # type: ignore[attr-defined]
    (found,) = (
        columnar_encoder.encode_block(block, 1, 1 << 20, columnar_encoder.JsonEventFormat())
        for block in part.segment.blocks
    )
    assert found is not None
    (encoded,) = found.partitions
    moment = '"s":1795428000250000,"s3":null,"z":"2026-11-23T10:00:00Z"'
    old = f'{{"day":20780,"o":7,"t":36000500000,"t3":null,{moment},"after":"0aff"}}'
    new = old.replace('"o":7', '"o":8')
    assert [encoded.key(n) for n in range(4)] == [b'{"day":20780}'] * 4
    assert [encoded.value(n) for n in range(4)] == [
        f'{{"before":null,"after":{old}'.encode(),
        f'{{"before":{old},"after":{new}'.encode(),
        f'{{"before":{new},"after":null'.encode(),
        None,
    ]
