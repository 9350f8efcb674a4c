"""Records → commands and dead letters: captured tables, stream topics, times from bindings."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pytest

from tidemill.base.errors import Corrupt, Invalid
from tidemill.shards.front import Binding, Column, ShardSchema
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.ddl import parse_ddl, stream_schema
from tidemill.spark.decode.records import Records, cut_records
from tidemill.spark.decode.slices import cut
from tidemill.spark.decode.stream import DEAD_BYTES_MAX, StreamDecoder
from tidemill.spark.upsert.commands import Truncate
from tidemill.topics.batch import Record, encode_batch


def records(
    *found: tuple[bytes | None, bytes | None], headers: dict[int, tuple[tuple[str, bytes | None], ...]] | None = None
) -> Records:
    n = len(found)
    offsets = np.arange(10, 10 + n, dtype=np.int64)
    extra = [(headers or {}).get(i, ()) for i in range(n)]
    return Records("t", 1, offsets, offsets * 100, [k for k, _ in found], [v for _, v in found], extra)


def batch(base_offset: int, count: int) -> bytes:
    rows = [Record(b"k%d" % i, b"v%d" % (base_offset + i), (), 0, 0) for i in range(count)]
    return encode_batch(rows, base_offset=base_offset, compression="lz4")


# times ------------------------------------------------------------------------------------------------


def test_a_record_gets_the_smallest_time_whose_binding_passes_its_offset() -> None:
    bindings = [Binding(1000, {"id": (3, 0)}), Binding(2000, {"id": (3, 0)}), Binding(3000, {"id": (7, 2)})]
    zero, one = cut(Binding(500, {"id": (1,)}), bindings, "t", "id")
    assert (zero.start, zero.end, zero.ends, zero.times) == (1, 7, (3, 7), (1000, 3000))
    assert zero.times_of(np.array([1, 2, 3, 6])).tolist() == [1000, 1000, 3000, 3000]
    assert (one.partition, one.start, one.end, one.times) == (1, 0, 2, (3000,))


def test_no_bindings_and_idle_bindings_give_no_slices() -> None:
    base = Binding(1, {"id": (5,)})
    assert cut(base, [], "t", "id") == []
    assert cut(base, [Binding(2, {"id": (5,)}), Binding(3, {"other": (9,)})], "t", "id") == []


def test_a_topic_that_begins_in_an_interval_says_when_whatever_the_interval() -> None:
    bindings = [Binding(1, {"other": (1,)}), Binding(2, {"id": (0, 3)}), Binding(3, {"id": (4, 3)})]
    whole = cut(Binding(0, {"other": (1,)}), bindings, "t", "id")
    assert [(s.partition, s.begins_ms) for s in whole] == [(0, 2), (1, 2)]
    (first,) = cut(Binding(0, {"other": (1,)}), bindings[:2], "t", "id")
    (then,) = cut(bindings[1], bindings[2:], "t", "id")
    assert (first.begins_ms, then.begins_ms) == (2, -1)
    (empty,) = cut(None, [Binding(5, {"id": (0, 0)}), Binding(6, {"id": (0, 0)})], "t", "id")
    assert (empty.start, empty.end, empty.begins_ms) == (0, 0, 5)
    assert len(cut_records(empty, []).values) == 0


def test_batches_are_cut_to_the_slice() -> None:
    (piece,) = cut(Binding(1, {"id": (3,)}), [Binding(2, {"id": (4,)}), Binding(3, {"id": (8,)})], "t", "id")
    found = cut_records(piece, [batch(0, 5), batch(5, 5)])
    assert found.values == [b"v3", b"v4", b"v5", b"v6", b"v7"]
    assert found.offsets.tolist() == [3, 4, 5, 6, 7]
    assert found.times.tolist() == [2, 3, 3, 3, 3]


# captured ---------------------------------------------------------------------------------------------

SHOP = ShardSchema(
    (
        Column("id", "int64"),
        Column("odd name", "string"),
        Column("price", "decimal(8,2)"),
        Column("at", "timestamp"),
        Column("ok", "bool"),
        Column("ratio", "float64"),
        Column("doc", "json"),
        Column("raw", "binary"),
        Column("day", "date"),
    ),
    ("id",),
)
FULL = (
    b'{"id":7,"odd name":"x \\" y","price":"12.50","at":"2026-01-02 03:04:05.678+00","ok":true,'
    b'"ratio":1.5,"doc":"{\\"a\\": 1}","raw":"\\\\x0aff","day":"2026-01-02"}'
)


def test_captured_rows_become_typed_columns() -> None:
    found = CapturedDecoder(SHOP).decode(records((b'{"id":7}', FULL)))
    (row,) = found.rows.to_pylist()
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.UTC)
    assert row == {
        "id": 7, "odd name": 'x " y', "price": Decimal("12.50"), "at": at, "ok": True, "ratio": 1.5,
        "doc": '{"a": 1}', "raw": b"\x0a\xff", "day": datetime.date(2026, 1, 2),
        "_time": 1000, "_order": 10, "_partition": 1, "_live": True,
    }  # fmt: skip


def test_captured_tombstones_truncations_and_odd_numbers() -> None:
    value = b'{"id":8,"ratio":"NaN","ok":null,"unknown":1}'
    found = CapturedDecoder(SHOP).decode(
        records((b'{"id":7}', None), (None, None), (b'{"id":8}', value), headers={1: (("tm.op", b"truncate"),)})
    )
    assert found.truncates == (Truncate(1100, 1, 11),)
    rows = sorted(found.rows.to_pylist(), key=lambda r: r["id"])
    assert [(r["id"], r["_live"], r["_order"]) for r in rows] == [(7, False, 10), (8, True, 12)]
    assert str(rows[1]["ratio"]) == "nan"
    assert rows[1]["price"] is None


def test_a_captured_value_that_the_table_cannot_hold_is_corrupt_and_names_its_place() -> None:
    """numeric(8,2) may be NaN. Invalid would mean the configuration, and end every process beside the pipeline."""
    with pytest.raises(Corrupt, match=r"topic=t partition=1 offsets=10\.\.11 .*column=price value='NaN'"):
        CapturedDecoder(SHOP).decode(records((b'{"id":7}', FULL), (b'{"id":8}', b'{"id":8,"price":"NaN"}')))


def test_an_unreadable_captured_record_is_corrupt_and_named() -> None:
    with pytest.raises(Corrupt, match="topic=t partition=1 offset=10"):
        CapturedDecoder(SHOP).decode(records((b'{"id":7}', b"{broken")))
    with pytest.raises(Corrupt, match="neither key nor value"):
        CapturedDecoder(SHOP).decode(records((None, None)))


# stream -----------------------------------------------------------------------------------------------

CLICKS = stream_schema("click_id string, product_id long, price decimal(6,2), at timestamp, n int", "click_id")


def test_ddl_is_sparks() -> None:
    columns = parse_ddl("a string, `b c` bigint,c DECIMAL(10, 2) , d timestamp,e boolean")
    assert [(c.name, c.type) for c in columns] == [
        ("a", "string"), ("b c", "int64"), ("c", "decimal(10,2)"), ("d", "timestamp"), ("e", "bool"),
    ]  # fmt: skip
    for wrong in ("a", "a strong", "a string b", "a string,, b long"):
        with pytest.raises(Invalid):
            parse_ddl(wrong)
    with pytest.raises(Invalid, match="key column"):
        stream_schema("a string", "b")


def test_stream_rows_become_typed_columns() -> None:
    found, dead = StreamDecoder(CLICKS).decode(
        records(
            (b"a", b'{"click_id":"a","product_id":5,"price":"1.25","at":1700000000123,"n":1,"more":[1]}'),
            (b"b", b'{"click_id":"b","price":2.5,"at":"2026-01-02T03:04:05Z"}'),
            (b"a", None),
        )
    )
    assert dead.num_rows == 0
    a, b, gone = found.rows.to_pylist()
    assert (a["click_id"], a["product_id"], a["price"], a["n"]) == ("a", 5, Decimal("1.25"), 1)
    assert a["at"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=datetime.UTC)
    assert (b["product_id"], b["price"]) == (None, Decimal("2.50"))
    assert (gone["click_id"], gone["_live"], gone["_order"], gone["at"]) == ("a", False, 12, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"click_id": broken', "malformed"),
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[1]", "Expected `object`"),
        (b'{"product_id":5}', "key column"),
        (b'{"click_id":null}', "key column"),
        (b'{"click_id":"a","product_id":"5"}', "product_id"),
        (b'{"click_id":"a","product_id":9223372036854775808}', "product_id"),
        (b'{"click_id":"a","n":2147483648}', "n"),
        (b'{"click_id":"a","price":"12345.678"}', "price"),
        (b'{"click_id":"a","at":"yesterday"}', "at"),
    ],
)
def test_a_malformed_record_is_a_dead_letter_and_the_others_go_on(value: bytes, reason: str) -> None:
    good = b'{"click_id":"g","product_id":1}'
    found, dead = StreamDecoder(CLICKS).decode(records((b"g", good), (b"x", value), (b"h", good)))
    assert [r["_order"] for r in found.rows.to_pylist()] == [10, 12]
    (letter,) = dead.to_pylist()
    assert (letter["topic"], letter["partition"], letter["offset"], letter["bytes"]) == ("t", 1, 11, value)
    assert (letter["_time"], letter["_diff"]) == (1100, 1)
    assert reason in letter["reason"]


def test_a_huge_dead_letter_is_cut() -> None:
    _, dead = StreamDecoder(CLICKS).decode(records((b"x", b"x" * (DEAD_BYTES_MAX * 2))))
    assert len(dead.column("bytes")[0].as_py()) == DEAD_BYTES_MAX


def test_deletions_of_a_stream_find_their_key() -> None:
    two = stream_schema("a long, b string, v long", "a, b")
    found, dead = StreamDecoder(two).decode(records((b'{"a":1,"b":"x"}', None), (b'{"a":1}', None), (None, None)))
    assert [(r["a"], r["b"], r["_live"]) for r in found.rows.to_pylist()] == [(1, "x", False)]
    assert [r["offset"] for r in dead.to_pylist()] == [11, 12]
    number = StreamDecoder(stream_schema("a long", "a"))
    found, dead = number.decode(records((b"5", None), (b'{"a":6}', None), (b"x", None)))
    assert [r["a"] for r in found.rows.to_pylist()] == [5, 6]
    assert dead.num_rows == 1
