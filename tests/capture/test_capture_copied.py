"""Copied rows, decoded and encoded by columns: equal bytes and equal errors to the per-row functions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.capture.wire import RELATIONS, Log, value
from tidemill.base.clock import Rand
from tidemill.capture.changes import Relation
from tidemill.capture.decode import copy_text
from tidemill.capture.topics import batch_builder, captured_table, partition_writer
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.capture.topics.topic_writer import TopicWriter
from tidemill.metastore.catalogue import TopicRow
from tidemill.topics.batch import decode_batch

ESCAPES = str.maketrans(
    {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
)  # as PostgreSQL's CopyAttributeOutText
TEXTS = ("", "N", "\\N", "\\", "\\\\N", "\t", "a\tb\n", "\\x00ff", "\v\x01", "ä\\€")


def line_of(values: Sequence[str | None]) -> bytes:
    return ("\t".join("\\N" if v is None else v.translate(ESCAPES) for v in values) + "\n").encode()


def lines_of(rand: random.Random, relation: Relation, count: int, odd: float) -> list[bytes]:
    def one(type_oid: int, key: bool) -> str | None:
        if not key and rand.random() < odd / 2:
            return None
        if type_oid == 25 and rand.random() < odd:
            return rand.choice(TEXTS)
        return value(rand, type_oid).replace("\0", "")

    return [line_of([one(c.type_oid, c.key_index >= 0) for c in relation.columns]) for _ in range(count)]


Written = tuple[dict[tuple[str, int], list[bytes]], list[int], list[str]]


def copy(relation: Relation, bursts: Sequence[list[bytes]], partitions: int, least: int) -> Written:
    """Return the batches of every lane, the offsets after them, and the error of each burst."""

    async def run() -> Written:
        log = Log()
        topic = TopicRow(name=relation.name, topic_id=relation.name, partitions=partitions)
        table = CapturedTable(relation.name, topic, 5, oid=relation.oid)
        writer = TopicWriter("w", [table], log, Rand(1), lambda _: None)  # type: ignore[arg-type]
        raised = []
        for number, lines in enumerate(bursts):
            try:
                await writer.write_copied_rows(table, relation, lines, 1_000 + number)
            except Exception as error:
                raised.append(repr(error))
        await asyncio.wait_for(writer.wait_drained(), 20)
        await writer.aclose()
        return log.batches, [each.next for each in table.writers], raised

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_text, "MIN_COLUMNAR_LINES", least)
        return asyncio.run(run())


@settings(max_examples=100)
@given(
    st.integers(0, 1 << 32), st.sampled_from([1, 2, 3]), st.sampled_from([1, 1, 3]), st.sampled_from([0.0, 0.02, 0.4]),
    st.sampled_from([1, 40]), st.sampled_from([400, 3_000, 512 << 10]),
)  # fmt: skip
def test_p5_rows_copied_by_columns_have_the_bytes_of_rows_copied_one_by_one(
    seed: int, oid: int, partitions: int, odd: float, least: int, batch_bytes: int
) -> None:
    rand = random.Random(seed)
    relation = RELATIONS[oid]
    bursts = [lines_of(rand, relation, rand.choice([1, 3, 60, 200]), odd) for _ in range(rand.randint(1, 4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_builder, "MIN_COLUMNAR_ROWS", least)
        patch.setattr(partition_writer, "BATCH_BYTES", batch_bytes)
        by_columns = copy(relation, bursts, partitions, 1)
        assert by_columns == copy(relation, bursts, partitions, 1 << 60)
    assert by_columns[2] or sum(by_columns[1]) == sum(map(len, bursts))
    for batches in by_columns[0].values():
        records = [record for batch in batches for record in decode_batch(batch).records]
        assert [dict(r.headers)["tm.pos"] for r in records] == [b"0_%d" % n for n in range(len(records))]


def test_rows_of_a_copy_are_read_by_columns_with_every_escape() -> None:
    relation = RELATIONS[1]
    texts = [None, *TEXTS]
    lines = [line_of([str(n), None, texts[n % len(texts)]]) for n in range(200)]
    block = copy_text.decode_block(relation, lines)
    assert block is not None
    starts, sizes = block.values
    found = [
        [None if size < 0 else block.walker.body[at : at + size].decode() for at, size in zip(*row, strict=True)]
        for row in zip(starts.T.tolist(), sizes.T.tolist(), strict=True)
    ]
    assert found == [list(row.values()) for row in copy_text.decode_rows(relation, lines)]


@pytest.mark.parametrize("bad", [b"1\t2\n", b"1\t2\tx\ty\n", b"1\t2\t\xff\n", b"1\t2\n3\n", b"1\n2\tx\n", b"1\t2\tx"])
def test_p5_a_line_that_cannot_be_read_raises_the_same_either_way_and_takes_no_offset(bad: bytes) -> None:
    relation = RELATIONS[1]
    good = [line_of([str(n), "1", "x"]) for n in range(100)]
    bursts = [good, [*good, bad, *good], good]
    by_columns = copy(relation, bursts, 1, 1)
    assert by_columns == copy(relation, bursts, 1, 1 << 60)
    assert (by_columns[1], len(by_columns[2])) == (([401], 0) if bad == b"1\t2\tx" else ([200], 1))


def test_w3_a_copied_row_too_large_for_a_record_is_refused_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_table, "MAX_ROW_BYTES", 200)
    relation = RELATIONS[1]
    lines = [line_of([str(n), "1", "y" * (300 if n == 70 else 3)]) for n in range(100)]
    by_columns = copy(relation, [lines], 1, 1)
    assert by_columns == copy(relation, [lines], 1, 1 << 60)
    assert "too large" in by_columns[2][0]
    assert (by_columns[0], by_columns[1]) == ({}, [0]), "and nothing of its burst waits for ever to be sent"
