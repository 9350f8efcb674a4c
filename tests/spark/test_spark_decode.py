"""Records → commands and dead letters: captured tables, stream topics, times from bindings."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import crc32c
import numpy as np
import pyarrow as pa
import pytest

from tidemill.base.errors import InvalidError
from tidemill.shards.api import Binding, Column, ShardSchema
from tidemill.spark.ddl import parse_ddl
from tidemill.spark.decode.captured import CapturedDecoder
from tidemill.spark.decode.dead_letter_rows import DEAD_BYTES_MAX
from tidemill.spark.decode.records import Records, Slice, cut_blocks, cut_slices
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.merge.commands import Truncate
from tidemill.spark.types import stream_schema
from tidemill.topics.api import BatchRef
from tidemill.topics.batch import Record, decode_columns, encode_batch


def records(
    *found: tuple[bytes | None, bytes | None], headers: dict[int, tuple[tuple[str, bytes | None], ...]] | None = None
) -> Records:
    rows = [Record(key, value, (headers or {}).get(i, ())) for i, (key, value) in enumerate(found)]
    _, columns = decode_columns(encode_batch(rows, base_offset=10))
    return Records("t", 1, columns.offsets * 100, columns)


def batch(base_offset: int, count: int) -> bytes:
    rows = [Record(b"k%d" % i, b"v%d" % (base_offset + i), (), 0, 0) for i in range(count)]
    return encode_batch(rows, base_offset=base_offset, compression="lz4")


def one_block(piece: Slice, batches: Sequence[bytes], refs: Sequence[BatchRef] = ()) -> Records:
    (found,) = cut_blocks([(piece, batches, refs)], block_records=1 << 62, block_bytes=1 << 62)
    return found


# times ------------------------------------------------------------------------------------------------


def test_a_record_gets_the_smallest_time_whose_binding_passes_its_offset() -> None:
    bindings = [Binding(1000, {"id": (3, 0)}), Binding(2000, {"id": (3, 0)}), Binding(3000, {"id": (7, 2)})]
    zero, one = cut_slices(Binding(500, {"id": (1,)}), bindings, "t", "id")
    assert (zero.start, zero.end, zero.ends, zero.times) == (1, 7, (3, 7), (1000, 3000))
    assert zero.times_of(np.array([1, 2, 3, 6])).tolist() == [1000, 1000, 3000, 3000]
    assert (one.partition, one.start, one.end, one.times) == (1, 0, 2, (3000,))


def test_no_bindings_and_idle_bindings_give_no_slices() -> None:
    base = Binding(1, {"id": (5,)})
    assert cut_slices(base, [], "t", "id") == []
    assert cut_slices(base, [Binding(2, {"id": (5,)}), Binding(3, {"other": (9,)})], "t", "id") == []


def test_a_topic_that_begins_in_an_interval_says_when_whatever_the_interval() -> None:
    bindings = [Binding(1, {"other": (1,)}), Binding(2, {"id": (0, 3)}), Binding(3, {"id": (4, 3)})]
    whole = cut_slices(Binding(0, {"other": (1,)}), bindings, "t", "id")
    assert [(s.partition, s.begins_ms) for s in whole] == [(0, 2), (1, 2)]
    (first,) = cut_slices(Binding(0, {"other": (1,)}), bindings[:2], "t", "id")
    (then,) = cut_slices(bindings[1], bindings[2:], "t", "id")
    assert (first.begins_ms, then.begins_ms) == (2, -1)
    (empty,) = cut_slices(None, [Binding(5, {"id": (0, 0)}), Binding(6, {"id": (0, 0)})], "t", "id")
    assert (empty.start, empty.end, empty.begins_ms) == (0, 0, 5)
    assert list(cut_blocks([(empty, [], ())])) == []


def test_batches_are_cut_to_the_slice() -> None:
    (piece,) = cut_slices(Binding(1, {"id": (3,)}), [Binding(2, {"id": (4,)}), Binding(3, {"id": (8,)})], "t", "id")
    found = one_block(piece, [batch(0, 5), batch(5, 5)])
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


def full(**values: Any) -> bytes:
    return json.dumps({**dict.fromkeys(c.name for c in SHOP.columns), **values}).encode()


def test_captured_rows_become_typed_columns() -> None:
    found = CapturedDecoder(SHOP).decode(records((b'{"id":7}', FULL))).commands
    (row,) = found.rows.to_pylist()
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.UTC)
    assert row == {
        "id": 7, "odd name": 'x " y', "price": Decimal("12.50"), "at": at, "ok": True, "ratio": 1.5,
        "doc": '{"a": 1}', "raw": b"\x0a\xff", "day": datetime.date(2026, 1, 2),
        "_time": 1000, "_order": 10, "_partition": 1, "_live": True,
    }  # fmt: skip


def test_captured_tombstones_truncations_and_odd_numbers() -> None:
    value = full(id=8, ratio="NaN")
    found = (
        CapturedDecoder(SHOP)
        .decode(
            records((b'{"id":7}', None), (None, None), (b'{"id":8}', value), headers={1: (("tm.op", b"truncate"),)})
        )
        .commands
    )
    assert found.truncates == (Truncate(1100, 1, 11),)
    rows = sorted(found.rows.to_pylist(), key=lambda r: r["id"])
    assert [(r["id"], r["_live"], r["_order"]) for r in rows] == [(7, False, 10), (8, True, 12)]
    assert str(rows[1]["ratio"]) == "nan"
    assert rows[1]["price"] is None


def test_a_captured_row_that_the_table_cannot_hold_is_a_dead_letter_and_its_key_is_absent() -> None:
    """numeric(8,2) may be NaN in PostgreSQL. The previous row of the key must not remain."""
    good, bad = full(id=7, price="1.00"), full(id=8, price="NaN")
    found = CapturedDecoder(SHOP, "public.shop").decode(records((b'{"id":7}', good), (b'{"id":8}', bad)))
    rows = {r["id"]: (r["_live"], r["_order"], r["price"]) for r in found.commands.rows.to_pylist()}
    assert rows == {7: (True, 10, Decimal("1.00")), 8: (False, 11, None)}
    (letter,) = found.dead.to_pylist()
    assert (letter["offset"], letter["table"], letter["key"], letter["bytes"]) == (11, "public.shop", '{"id":8}', bad)
    assert "table=public.shop" in letter["reason"] and "column=price" in letter["reason"]
    assert found.stop is None


def test_a_captured_record_that_is_no_json_is_a_dead_letter_with_what_is_known_of_its_key() -> None:
    found = CapturedDecoder(SHOP).decode(records((b'{"id":7}', b"{broken"), (None, None), (b"x", b"y")))
    assert [(r["id"], r["_live"]) for r in found.commands.rows.to_pylist()] == [(7, False)]
    assert [(r["offset"], r["key"]) for r in found.dead.to_pylist()] == [(10, '{"id":7}'), (11, ""), (12, "x")]


def test_a_key_that_outgrew_its_column_is_a_dead_letter_once() -> None:
    small = ShardSchema((Column("id", "int16"), Column("v", "string")), ("id",))
    found = CapturedDecoder(small).decode(
        records((b'{"id":70000}', b'{"id":70000,"v":"x"}'), (b'{"id":99999999999999999999}', None), (b'{"id":1}', None))
    )
    assert [(r["id"], r["_live"]) for r in found.commands.rows.to_pylist()] == [(1, False)]
    assert [r["offset"] for r in found.dead.to_pylist()] == [10, 11]


def test_column_names_that_json_escapes_are_columns_like_others() -> None:
    odd = ShardSchema((Column('a "b"', "int32"), Column("c\\d", "string")), ('a "b"',))
    value = json.dumps({'a "b"': 3, "c\\d": "x"}).encode()
    found = CapturedDecoder(odd).decode(records((b"", value), (json.dumps({'a "b"': 4}).encode(), None)))
    assert [(r['a "b"'], r["c\\d"], r["_live"]) for r in found.commands.rows.to_pylist()] == [
        (3, "x", True), (4, None, False),
    ]  # fmt: skip
    commands, dead = StreamDecoder(odd).decode(records((b"3", value), (b"5", None)))
    assert [(r['a "b"'], r["_live"]) for r in commands.rows.to_pylist()] == [(3, True), (5, False)]
    assert dead.num_rows == 0


@pytest.mark.parametrize(
    ("value", "difference"),
    [
        (b'{"id":9,"extra":1}', "+extra -at -day"),
        (b'{"extra":[{}],"id":[[1]]}', "+extra"),
    ],
)
def test_a_captured_record_with_other_columns_stops_the_table_before_its_time(value: bytes, difference: str) -> None:
    found = CapturedDecoder(SHOP, "public.shop").decode(
        records((b'{"id":7}', FULL), (b'{"id":9}', value), (b'{"id":8}', FULL))
    )
    assert found.stop is not None
    assert (found.stop.time_ms, found.stop.offset) == (1100, 11)
    assert difference in found.stop.reason and "offset=11" in found.stop.reason
    assert "resnapshot public.shop" in found.stop.fix
    assert [r["id"] for r in found.commands.rows.to_pylist()] == [7], "nothing from there on is taken"
    assert found.dead.num_rows == 0


def test_a_captured_batch_that_cannot_be_read_stops_the_table() -> None:
    """The keys of such a batch are unknown."""
    (piece,) = cut_slices(None, [Binding(5, {"id": (5,)}), Binding(6, {"id": (10,)})], "t", "id")
    torn = bytearray(batch(5, 5))
    torn[-3] ^= 0xFF
    found = CapturedDecoder(SHOP).decode(one_block(piece, [torn]))
    assert found.stop is not None and (found.stop.time_ms, found.stop.offset) == (6, 5)
    assert "offsets=5..9" in found.stop.reason


# stream -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_time", "_diff", "_hash", "_order", "_partition", "_live"])
def test_names_that_stand_beside_the_columns_of_a_table_are_refused(name: str) -> None:
    with pytest.raises(InvalidError, match=f"reserved column name: column='{name}'"):
        stream_schema(f"k long, {name} long", "k")


CLICKS = stream_schema("click_id string, product_id long, price decimal(6,2), at timestamp, n int", "click_id")


def test_ddl_is_sparks() -> None:
    columns = parse_ddl("a string, `b c` bigint,c DECIMAL(10, 2) , d timestamp,e boolean, f TIMESTAMP_NTZ")
    assert [(c.name, c.type) for c in columns] == [
        ("a", "string"), ("b c", "int64"), ("c", "decimal(10,2)"), ("d", "timestamp"), ("e", "bool"),
        ("f", "timestamp_ntz"),
    ]  # fmt: skip
    for wrong in ("a", "a strong", "a string b", "a string,, b long"):
        with pytest.raises(InvalidError):
            parse_ddl(wrong)
    with pytest.raises(InvalidError, match="key column"):
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


# what strangers send ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"click_id":"a","more":' + b"[" * 200_000, "nested deeper than 500"),
        (b'{"click_id":"a","at":"9999-12-31T23:59:59.999999-14:00"}', "years 1 and 9999"),
        (b'{"click_id":"a","at":253402300800000}', "years 1 and 9999"),
        (b'{"click_id":"a","at":99999999999999999999}', "at"),
        (b'{"click_id":"a","price":1e400}', "price"),
        (b'{"click_id":"\\ud800"}', ""),
    ],
)
def test_a_record_that_raises_whatever_it_likes_is_a_dead_letter(value: bytes, reason: str) -> None:
    good = b'{"click_id":"g","product_id":1}'
    found, dead = StreamDecoder(CLICKS).decode(records((b"g", good), (b"x", value), (b"h", good)))
    assert [r["_order"] for r in found.rows.to_pylist()] == [10, 12]
    (letter,) = dead.to_pylist()
    assert (letter["offset"], letter["last_offset"]) == (11, 11)
    assert reason in letter["reason"]


def test_an_exception_type_that_nobody_listed_is_a_dead_letter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """An exception like those of native code."""

    decoder = StreamDecoder(CLICKS)
    plain = decoder._value.decode

    class Raising:
        def decode(self, data: bytes) -> Any:
            if data == b"panic":
                raise Panic("inside")
            return plain(data)

    monkeypatch.setattr(decoder, "_value", Raising())
    found, dead = decoder.decode(records((b"g", b'{"click_id":"g"}'), (b"x", b"panic")))
    assert (found.rows.num_rows, dead.to_pylist()[0]["reason"]) == (1, "Panic: inside")


def test_a_block_of_bad_values_is_bisected_to_the_rows_that_no_column_holds() -> None:
    rows = [(b"k", json.dumps({"click_id": f"k{n}", "price": "1.234" if n % 97 == 5 else "1.25"}).encode())
            for n in range(2_000)]  # fmt: skip
    found, dead = StreamDecoder(CLICKS).decode(records(*rows))
    bad = [10 + n for n in range(2_000) if n % 97 == 5]
    assert [r["offset"] for r in dead.to_pylist()] == bad
    assert found.rows.num_rows == 2_000 - len(bad)


def test_what_a_value_is_does_not_depend_on_its_neighbours() -> None:
    """Arrow accepts a block of one spelling only; the slow reader knows only PostgreSQL's. Found by fuzzing."""
    spellings = ("2026-01-02T03:04:05Z", "2026-01-02 03:04:05", "infinity", "tomorrow", "2026-01-02 03:04:05+00")
    rows = [(b'{"id":%d}' % n, full(id=n, at=at)) for n, at in enumerate(spellings)]
    found = CapturedDecoder(SHOP).decode(records(*rows))
    live = found.commands.rows.filter(found.commands.rows.column("_live"))
    assert live.column("id").to_pylist() == [0, 1, 2, 4]
    assert [str(at) for at in live.column("at").cast(pa.int64())] == [
        "1767323045000000", "1767323045000000", str(2**63 - 1), "1767323045000000",
    ]  # fmt: skip
    assert found.dead.column("offset").to_pylist() == [13]


def forged(count: int, **header: int) -> bytes:
    """Return a malformed batch with a correct checksum."""
    whole = bytearray(batch(0, count))
    body = crc32c.crc32c
    if "records" in header:
        whole[57:61] = header["records"].to_bytes(4, "big", signed=True)
    if "junk" in header:
        whole[61:] = bytes((i * 31 + header["junk"]) & 0xFF for i in range(len(whole) - 61))
    if "codec" in header:
        whole[21:23] = header["codec"].to_bytes(2, "big")
    whole[17:21] = body(bytes(whole[21:])).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize(
    "poison",
    [
        forged(5, junk=1),
        forged(5, records=2**31 - 1),
        forged(5, records=3),
        forged(5, codec=0),
        forged(5, codec=7),
        b"\x00" * 20,
        b"",
    ],
)
def test_a_batch_that_cannot_be_read_is_one_letter_for_its_range(poison: bytes) -> None:
    (piece,) = cut_slices(None, [Binding(7, {"id": (8,)}), Binding(9, {"id": (15,)})], "t", "id")
    refs = [BatchRef("o", 0, 1, base, 5, 0) for base in (0, 5, 10)]
    found = list(cut_blocks([(piece, [batch(0, 5), poison, batch(10, 5)], refs)]))
    assert [n for block in found for n in block.offsets.tolist()] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    (letter,) = [letter for block in found for letter in block.unread]
    assert (letter.offset, letter.last_offset, letter.time_ms) == (5, 9, 7)
    _, dead = StreamDecoder(CLICKS).decode(one_block(piece, [poison], refs[1:2]))
    assert [(r["offset"], r["last_offset"]) for r in dead.to_pylist()] == [(5, 9)]


def test_a_batch_across_two_slices_is_one_letter_whatever_the_slices() -> None:
    bindings = [Binding(7, {"id": (8,)}), Binding(9, {"id": (15,)})]
    refs = [BatchRef("o", 0, 1, 5, 5, 0)]
    first = cut_slices(None, bindings[:1], "t", "id")[0]
    then = cut_slices(bindings[0], bindings[1:], "t", "id")[0]
    reported = [
        letter for piece in (first, then) for block in cut_blocks([(piece, [b"torn"], refs)]) for letter in block.unread
    ]
    assert [(x.offset, x.last_offset, x.time_ms) for x in reported] == [(5, 9, 7)]


def test_offsets_that_are_not_their_batchs_make_it_unreadable() -> None:
    (piece,) = cut_slices(None, [Binding(7, {"id": (5,)})], "t", "id")
    found = one_block(piece, [batch(0, 5)], [BatchRef("o", 0, 1, 0, 3, 0)])
    assert len(found) == 0 and "other offsets" in found.unread[0].reason


def test_blocks_hold_no_more_than_they_may_and_together_everything() -> None:
    (piece,) = cut_slices(None, [Binding(7, {"id": (30,)})], "t", "id")
    found = list(cut_blocks([(piece, [batch(n * 10, 10) for n in range(3)], ())], block_records=7, block_bytes=1 << 20))
    assert [n for block in found for n in block.offsets.tolist()] == list(range(30))
    assert max(len(block) for block in found) <= 7
    small = list(cut_blocks([(piece, [batch(0, 10)], ())], block_records=100, block_bytes=5))
    assert [n for block in small for n in block.offsets.tolist()] == list(range(10))
    assert max(len(block) for block in small) <= 3
