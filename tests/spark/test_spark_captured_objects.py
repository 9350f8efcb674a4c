"""Captured tables read by blocks give the commands, dead letters and stops that reading them record by record gives."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.decode import block_decoder as objects_module
from tidemill.spark.decode.captured import Captured, CapturedDecoder
from tidemill.spark.decode.newline_text import count_quotes
from tidemill.spark.decode.records import Records
from tidemill.topics.batch import Record, decode_columns, encode_batch

SCHEMA = ShardSchema(
    (
        Column("id", "int64"),
        Column("small", "int16"),
        Column("oid", "int64"),
        Column("f", "float64"),
        Column("r", "float32"),
        Column("ok", "bool"),
        Column("name", "string"),
        Column("doc", "json"),
        Column("raw", "binary"),
        Column("day", "date"),
        Column("at", "timestamp"),
        Column("clock", "timestamp_ntz"),
        Column("price", "decimal(8,2)"),
        Column("wide", "decimal(38,18)"),
    ),
    ("id", "name"),
)
USUAL = {
    "id": 7, "small": -3, "oid": "12345", "f": 1.5, "r": 0.1, "ok": True, "name": 'x "y" \\ é', "doc": '{"a": [1]}',
    "raw": "\\x0aFf", "day": "2026-11-22", "at": "2026-11-22 01:02:03.5+00", "price": "-12.50",
    "clock": "2026-11-22 01:02:03.5", "wide": "-99999999999999999999.999999999999999999",
}  # fmt: skip
ODD: dict[str, tuple[Any, ...]] = {
    "id": (None, "8", 2**63, 1.0, True, "x", [1]),
    "small": (None, 40_000, "5", "40000", 1e3),
    "oid": (None, 5, "-1", "x", ""),
    "f": (None, 2, -0.0, 12345678901234567890123, "NaN", "-Infinity", "1e5", "x", float("nan"), float("inf")),
    "r": (None, 1e39, 16777217, "NaN", 1e-50, "1e39", "-Infinity", 3.4028235677973366e38, "3.4028235677973366e38"),
    "ok": (None, False, "t", "f", "yes", 1),
    "name": (None, "", "\n\t\x00", '":null,"', "NaN", 5, "\ud800", "\\" * 40 + '"', '\\"', "\\"),
    "doc": (None, "null", "", {"a": 1}, "[" * 300),
    "raw": (None, "\\x", "\\x0", "\\x0 a", "abc", "", "\\xzz"),
    "day": (None, "infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "2026-02-30", "", "2026-11-2", "22.11.2026"),
    "at": (None, "infinity", "-infinity", "0044-03-15 01:02:03+00 BC", "10000-01-01 00:00:00+00", "2026-11-22 01:02:03",
           "2026-11-22T01:02:03Z", "294276-12-31 00:00:00+00", "2026-11-22 24:00:00+00", "", "x", "2026-11-22"),
    "clock": (None, "infinity", "-infinity", "0044-03-15 01:02:03 BC", "10000-01-01 00:00:00", "2026-11-22 01:02:03+00",
              "2026-11-22T01:02:03Z", "294276-12-31 00:00:00", "0044-03-15 01:02:03+00 BC", "", "x", "2026-11-22"),
    "price": (None, "NaN", "Infinity", "1.234", "1234567.00", "5", "-.5", "+1", "", "1e2", 5),
    "wide": (None, "4e20", "400000000000000000000", "-400000000000000000000.0", "100000000000000000000",
             "1e-2000000000", "0.0000000000000000001", "1.0000000000000000000000",
             "99999999999999999999.9999999999999999999", "1_0"),
}  # fmt: skip
KEY = b'{"id":7,"name":"x"}'
HEADERS = (("tm.pos", b"1_0"), ("tm.op", b"delete"))
Rows = list[Record]


def row(**changes: Any) -> bytes:
    return json.dumps(USUAL | changes, ensure_ascii=False).encode("utf-8", "surrogatepass")


def usual(count: int) -> Rows:
    return [Record(KEY, row(id=n), HEADERS) for n in range(count)]


def read(decoder: CapturedDecoder, rows: Rows) -> Captured:
    _, columns = decode_columns(encode_batch(rows, base_offset=10))
    return decoder.decode(Records("t", 1, columns.offsets * 100, columns))


def reported(found: Captured) -> tuple[Any, ...]:
    rows = found.commands.rows
    for name, kind in (
        ("at", "int64"),
        ("clock", "int64"),
        ("day", "int32"),
    ):  # Python's calendar is too short for them
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, name, rows.column(name).cast(kind))
    rows = rows.sort_by([("_order", "ascending"), ("_live", "ascending")]).to_pylist()
    for one in rows:
        for name in ("f", "r"):
            if one[name] is not None:
                one[name] = (repr(one[name]), math.copysign(1, one[name]))
    return rows, found.commands.truncates, found.dead.to_pylist(), found.stop


def held(rows: Rows) -> tuple[Any, ...]:
    decoder = CapturedDecoder(SCHEMA, "public.t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects_module, "MIN_BLOCK_VALUES", 1 << 62)
        alone = reported(read(decoder, rows))
        patch.setattr(objects_module, "MIN_BLOCK_VALUES", 0)
        together = reported(read(decoder, rows))
    assert together == alone
    return together


changes = st.dictionaries(st.sampled_from(list(USUAL)), st.none(), max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(ODD[name]) for name in names})
)
values = changes.map(lambda found: row(**found))
left_out = st.tuples(changes, st.sampled_from(list(USUAL))).map(
    lambda found: json.dumps({n: v for n, v in (USUAL | found[0]).items() if n != found[1]}).encode("utf-8", "replace")
)
other = st.sampled_from(
    [
        *(row(more=1), b"{}", b"[]", b"", b"{", b"\xff", row(name="é").replace(b"\xc3", b""), row()[:-1] + b" }\n"),
        *(row()[:-1] + b',"id":5}', row()[:-1] + b',"ok":null}', row(ok=None).replace(b'"ok"', b'"\\u006fk"')),
    ]
)
keys = st.sampled_from(
    [KEY, b'{"id":1}', b'{"id":"x","name":null}', b"{", b"", None, b'{"id":2,"name":"\\u0022","x":[]}']
)
headers = st.sampled_from(
    [(), HEADERS, (("tm.op", b"truncate"),), (("tm.op", None), ("x", b"truncate")), (("tm.op", b"truncates"),)]
)
records = st.builds(Record, key=keys, value=values | st.none(), headers=headers)
differing = st.builds(Record, key=keys, value=left_out | other, headers=headers)


@given(st.lists(records, max_size=30), st.lists(differing, max_size=3), st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_blocks_give_what_records_give(found: Rows, strange: Rows, at: int) -> None:
    held([*usual(5), *found[:at], *strange, *found[at:], *usual(5)])


@pytest.mark.parametrize("number", [b"-0", b"-0.0", b"1e999", b"-1e999", b"1e-999", b"NaN", b" -Infinity"])
def test_a_number_that_is_hardly_one(number: bytes) -> None:
    odd = row().replace(b'"f": 1.5', b'"f": ' + number).replace(b'"r": 0.1', b'"r": ' + number)
    held([*usual(20), Record(KEY, odd), *usual(20)])


@pytest.mark.parametrize("few", [0, 1 << 62])
def test_minus_zero_keeps_its_sign_but_in_a_key_where_it_is_zero(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL prints -0; its unique indexes have one key for both."""
    monkeypatch.setattr(objects_module, "MIN_BLOCK_VALUES", few)
    columns = (Column("k", "float64"), Column("f", "float64"), Column('r "', "float32"), Column("note", "string"))
    decoder = CapturedDecoder(ShardSchema(columns, ("k",)))
    value = b'{"k":%s,"f":%s,"r \\"":%s,"note":"-0,"}'
    zeros = [(b"-0", b"-0", b"-0"), (b"0", b"0", b"0"), (b"-0", b"0", b"-0"), (b"1", b"-1e-0", b"-0 ")]
    rows = [Record(b'{"k":%s}' % k, value % (k, f, r)) for k, f, r in zeros]
    rows.append(Record(b'{"k":-0}', None, HEADERS))
    found = read(decoder, rows).commands.rows.sort_by("_order")
    signs = [[math.copysign(1, v) for v in found.column(name).to_pylist()[:4]] for name in ("k", "f", 'r "')]
    assert signs == [[1, 1, 1, 1], [-1, 1, 1, -1], [-1, 1, -1, -1]]
    assert math.copysign(1, found.column("k").to_pylist()[4]) == 1, "a deletion finds its row"


@pytest.mark.parametrize("column", ODD)
def test_an_odd_value_among_usual_ones(column: str) -> None:
    for value in ODD[column]:
        rows, *_ = held([*usual(20), Record(KEY, row(**{column: value})), *usual(20)])
        assert sum(one["_live"] for one in rows) >= 40


@pytest.mark.parametrize("few", [0, 1 << 62])
@pytest.mark.parametrize(
    ("name", "value"),
    [("wide", "400000000000000000000"), ("wide", "1e-2000000000"), ("r", 1e39), ("r", "1e39"), ("f", "1e999")],
)
def test_a_number_beyond_its_column_is_a_dead_letter_and_its_key_absent(
    few: int, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "MIN_BLOCK_VALUES", few)
    found = read(CapturedDecoder(SCHEMA, "public.t"), [*usual(20), Record(KEY, row(**{name: value}))])
    (letter,) = found.dead.to_pylist()
    assert letter["offset"] == 30 and f"column={name}" in letter["reason"]
    (last,) = (one for one in found.commands.rows.select(["id", "_live", "_order"]).to_pylist() if one["_order"] == 30)
    assert last == {"id": 7, "_live": False, "_order": 30}


@pytest.mark.parametrize("name", USUAL)
def test_a_field_that_is_left_out_is_not_null(name: str) -> None:
    """A missing field is recognised next to other nulls, and next to texts that look like it."""
    without = {n: v for n, v in USUAL.items() if n != name} | ({"doc": f'","{name}":null,"'} if name != "doc" else {})
    nulls = [Record(KEY, row(ok=None, price=None), HEADERS)] * 10
    for tail in ([], usual(70)):
        rows, _, dead, stop = held([*nulls, *usual(70), Record(KEY, json.dumps(without).encode(), HEADERS), *tail])
        assert stop is not None and f"-{name}]" in stop.reason and len(rows) == 80 and not dead


@given(st.dictionaries(st.text(), st.text() | st.text('\\\\"', max_size=40) | st.none() | st.integers()))
@settings(max_examples=200, deadline=None)
def test_quotes_that_are_escaped_begin_and_end_nothing(found: dict[str, Any]) -> None:
    text = np.frombuffer(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"), dtype=np.uint8)
    strings = len(found) + sum(isinstance(value, str) for value in found.values())
    assert count_quotes(text) == 2 * strings or any(isinstance(v, str) and "\\" * 16 in v for v in found.values())


def slow_of(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of records that were read one by one."""
    decoder, seen = CapturedDecoder(SCHEMA), list[bytes]()

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def decode(self, data: bytes) -> Any:
            seen.append(data)
            return self._inner.decode(data)

    under = decoder._generations[1]
    monkeypatch.setattr(under, "value", Counting(under.value))
    monkeypatch.setattr(under, "key", Counting(under.key))
    found = read(decoder, rows)
    assert len(found.commands) + found.dead.num_rows >= len(rows)
    return len(seen)


def deletions(count: int) -> Rows:
    return [Record(b'{"id":%d,"name":"x"}' % n, None, HEADERS) for n in range(count)]


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (usual(500), 0),
        ([Record(KEY, row(**dict.fromkeys(list(USUAL)[1:])), HEADERS), *usual(500)], 0),
        ([*deletions(500), *usual(500)], 0),
        ([*usual(500), *deletions(500)], 1),
        ([*usual(500), Record(KEY, row(at="infinity")), Record(KEY, row(price="NaN")), *usual(500)], 3),
        ([*usual(500), Record(None, None, (("tm.op", b"truncate"),)), *usual(500)], 0),
    ],
)
def test_usual_rows_never_meet_the_slow_path(rows: Rows, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow_of(rows, monkeypatch) <= most
