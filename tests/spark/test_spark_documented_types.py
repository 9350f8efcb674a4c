"""Every type that `schema=` of a topic may name: one value alone and among a thousand others is the same, and right."""

from __future__ import annotations

import datetime
import json
import math
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.spark.sinks import sink_of, writer
from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.ddl import TYPES, parse_ddl
from tidemill.spark.decode import block_decoder as objects_module
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.ingest.feed_sink import FeedSink
from tidemill.spark.ingest.sources import stream_feed
from tidemill.spark.types import stream_schema
from tidemill.topics.batch.records import columns_from_fields

DEAD = "a dead letter"
DECIMALS = ((38, 0), (38, 18), (38, 37), (38, 38), (19, 2), (18, 18), (6, 2), (1, 0))
US = datetime.datetime(2026, 11, 22, 1, 2, 3, 123456, tzinfo=datetime.UTC)


@lru_cache(maxsize=64)
def decoder_of(kind: str) -> StreamDecoder:
    return StreamDecoder(ShardSchema((Column("k", "string"), *parse_ddl(f"v {kind}")), ("k",)))


def read(kind: str, value: str, few: int, around: str = "null", *, times: int = 3) -> Any:
    """Return the value of a field of this type with the JSON `value`, among records with the value `around`."""
    neighbours = [b'{"k":"n","v":%s}' % around.encode()] * times
    found = [*neighbours, b'{"k":"it","v":%s}' % value.encode("utf-8", "surrogatepass"), *neighbours]
    columns = columns_from_fields([b"key"] * len(found), found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects_module, "MIN_BLOCK_VALUES", few)
        commands, dead = decoder_of(kind).decode(Records("t", 0, columns.offsets + 1, columns))
    letters = [row for row in dead.to_pylist() if row["offset"] == times]
    rows = [row["v"] for row in commands.rows.to_pylist() if row["_order"] == times]
    assert len(rows) + len(letters) == 1 and commands.rows.num_rows + dead.num_rows == len(found)
    return rows[0] if rows else DEAD


def same(value: Any) -> Any:
    """Apart from 0.0, -0.0 is not equal to it; NaN is equal to itself."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def both(kind: str, value: str, around: str = "null") -> Any:
    alone, together = read(kind, value, 1 << 62, around), read(kind, value, 0, around)
    assert same(alone) == same(together), f"type={kind} value={value[:60]} alone={alone} in a batch={together}"
    return alone


EDGES: dict[str, dict[str, Any]] = {
    "string": {'""': "", '"a\\u0000\\n\\""': 'a\0\n"', '"é\\ud83d\\ude00"': "é😀", '"\\ud800"': DEAD, "1": DEAD},
    "binary": {'"aGk="': b"hi", '""': b"", "null": None, '"aGk"': DEAD, '"a-_="': DEAD, "1": DEAD},
    "boolean": {"true": True, "false": False, "null": None, "0": DEAD, '"true"': DEAD},
    "short": {"32767": 32767, "-32768": -32768, "32768": DEAD, "-32769": DEAD, "-0": 0, "1.0": DEAD, "1e2": DEAD},
    "int": {"2147483647": 2**31 - 1, "-2147483648": -(2**31), "2147483648": DEAD, "-2147483649": DEAD, '"1"': DEAD},
    "long": {
        "9223372036854775807": 2**63 - 1,
        "-9223372036854775808": -(2**63),
        "9223372036854775808": DEAD,
        "18446744073709551616": DEAD,
        "-9223372036854775809": DEAD,
    },
    "float": {
        "3.4028234663852886e38": 3.4028234663852886e38,
        "3.4028235677973366e38": DEAD,
        "-1e39": DEAD,
        "1e-46": 0.0,
        "1.401298464324817e-45": 1.401298464324817e-45,
        "16777217": 16777216.0,
        "-0": -0.0,
        "-0.0": -0.0,
        "NaN": DEAD,
        '"NaN"': DEAD,
    },
    "double": {
        "1.7976931348623157e308": 1.7976931348623157e308,
        "1.7976931348623159e308": DEAD,
        "1e309": DEAD,
        "5e-324": 5e-324,
        "1e-400": 0.0,
        "9007199254740993": 9007199254740992.0,
        "123456789012345678901234567890": 123456789012345678901234567890.0,
        "-0": -0.0,
        "Infinity": DEAD,
    },
    "date": {
        '"0001-01-01"': datetime.date(1, 1, 1),
        '"9999-12-31"': datetime.date(9999, 12, 31),
        '"2024-02-29"': datetime.date(2024, 2, 29),
        '"2023-02-29"': DEAD,
        '"0000-12-31"': DEAD,
        '"10000-01-01"': DEAD,
        "0": DEAD,
    },
    "timestamp": {
        '"2026-11-22T01:02:03.123456Z"': US,
        '"2026-11-22T03:02:03.123456+02:00"': US,
        '"2026-11-22T01:02:03.123456"': US,
        "1795309323123": US.replace(microsecond=123000),
        '"0001-01-01T00:00:00Z"': datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),
        '"0001-01-01T00:00:00+00:01"': DEAD,
        '"9999-12-31T23:59:59.999999Z"': datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=datetime.UTC),
        '"9999-12-31T23:59:59.999999-00:01"': DEAD,
        "253402300800000": DEAD,
        "9223372036854775807": DEAD,
        "1.5": DEAD,
    },
    "timestamp_ntz": {
        '"2026-11-22T01:02:03.123456"': US.replace(tzinfo=None),
        '"2026-11-22T01:02:03Z"': DEAD,
        '"9999-12-31T23:59:59.999999"': datetime.datetime(9999, 12, 31, 23, 59, 59, 999999),
        "1795309323123": DEAD,
    },
    "json": {
        "null": None,
        '{"b": [1, 2.50, null] }': '{"b": [1, 2.50, null] }',
        '"text"': '"text"',
        "1e400": "1e400",
        "123456789012345678901234567890.10": "123456789012345678901234567890.10",
        "true": "true",
        "[]": "[]",
        '"\\u00e9é"': '"\\u00e9é"',
        '{"a":1,"a":2}': '{"a":1,"a":2}',
        '"\ud800"': DEAD,
        "NaN": DEAD,
        "[1,]": DEAD,
    },
    "decimal(6,2)": {
        "9999.99": Decimal("9999.99"),
        '"-9999.99"': Decimal("-9999.99"),
        "10000": DEAD,
        "9999.995": DEAD,
        "1.230": Decimal("1.23"),
        "125e-2": Decimal("1.25"),
        '"NaN"': DEAD,
    },
    "decimal(38,18)": {
        "4e20": DEAD,
        '"4e20"': DEAD,
        "400000000000000000000.0": DEAD,
        "-400000000000000000000": DEAD,
        "99999999999999999999.999999999999999999": Decimal("99999999999999999999.999999999999999999"),
        "100000000000000000000": DEAD,
    },
    "decimal(38,37)": {"1e-400": DEAD, "1e37": DEAD, "34.1": DEAD, "-9.5": Decimal("-9.5")},
    "decimal(38,0)": {"1e37": Decimal(10**37), "1e38": DEAD, "340282366920938463463374607431768211457": DEAD},
}
AROUND = {
    "decimal": ("null", "1", '"1"', "0.1"),
    "timestamp": ("null", "1", '"2026-11-22T01:02:03Z"'),
    "json": ("null", "{}"),
}


@pytest.mark.parametrize("kind", EDGES)
def test_the_edges_of_a_type_are_the_same_alone_and_in_a_batch(kind: str) -> None:
    for around in AROUND.get(kind.partition("(")[0], ("null",)):
        for value, expected in EDGES[kind].items():
            assert same(both(kind, value, around)) == same(expected), f"type={kind} value={value} around={around}"


def test_every_documented_type_has_edges() -> None:
    assert {TYPES[kind.partition("(")[0].upper()] for kind in EDGES} == set(TYPES.values())


@pytest.mark.parametrize(
    "spelled", ["1e-2000000000", '"1E-2000000000"', '"1\\u0065-2000000000"', '"1e\\u002d77777777"']
)
@pytest.mark.parametrize("kind", ["decimal(38,37)", "decimal(6,2)"])
def test_f321_an_exponent_of_any_size_is_a_dead_letter_and_ends_no_process(kind: str, spelled: str) -> None:
    """Arrow reads beyond the end of its table of powers for such a number."""
    for around in AROUND["decimal"]:
        assert both(kind, spelled, around) == DEAD
        assert both(kind, spelled.replace("1", "0", 1), around) == Decimal(0)


def test_texts_that_look_like_exponents_are_read_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = StreamDecoder(ShardSchema((Column("k", "string"), Column("v", "decimal(12,2)")), ("k",)))
    monkeypatch.setattr(decoder, "_value", None)
    ids = [f"9b3c0a2e-41{n:02}-4c5e-92de-1234567890ab \\\\u0026 a3e-77" for n in range(100)]
    columns = columns_from_fields([b"k"] * 100, [b'{"k":"%s","v":1.50}' % one.encode() for one in ids])
    commands, dead = decoder.decode(Records("t", 0, columns.offsets + 1, columns))
    assert commands.rows.num_rows == 100 and dead.num_rows == 0


def deeper(frames: int, call: Callable[[], Any]) -> Any:
    return deeper(frames - 1, call) if frames else call()


@pytest.mark.parametrize("kind", ["json", "long"])
@pytest.mark.parametrize(("levels", "good"), [(450, True), (499, True), (500, False), (900, False), (100_000, False)])
def test_how_deep_a_value_may_be_nested_does_not_depend_on_the_caller(kind: str, levels: int, good: bool) -> None:
    """A driver decodes with another stack than a task of Spark's."""
    nested = "[" * levels + '"]]]]"' + "]" * levels
    value = nested if kind == "json" else f'1,"x":{nested}'
    wanted = DEAD if not good else nested if kind == "json" else 1
    for frames in (0, 200, 400):
        assert deeper(frames, lambda: both(kind, value)) == wanted


signs, digits = st.sampled_from(["", "-"]), st.text("0123456789", min_size=1, max_size=42)
exponents = st.just("") | st.integers(-80, 80).map("e{}".format) | st.integers(-(2**31) + 1, 2**31).map("E{}".format)
numbers = st.builds(
    lambda sign, whole, part, exponent: f"{sign}{whole.lstrip('0') or '0'}{'.' if part else ''}{part}{exponent}",
    signs, digits, st.just("") | digits, exponents,
)  # fmt: skip


@given(numbers, st.sampled_from(DECIMALS), st.booleans(), st.sampled_from(AROUND["decimal"]))
@settings(max_examples=200, deadline=None)
def test_a_decimal_is_exact_or_a_dead_letter(number: str, form: tuple[int, int], quoted: bool, around: str) -> None:
    precision, scale = form
    found = both(f"decimal({precision},{scale})", f'"{number}"' if quoted else number, "0" if around == "1" else around)
    whole = _scaled(number, scale)
    assert found == (DEAD if whole is None or abs(whole) >= 10**precision else Decimal(f"{whole}e-{scale}"))


def _scaled(number: str, scale: int) -> int | None:
    """Return number · 10^scale, computed with integers alone, or None if it is no integer."""
    body, _, exponent = number.lower().partition("e")
    whole, _, part = body.partition(".")
    value, power = int(whole + part), int(exponent or "0") - len(part) + scale
    if not value:
        return 0
    if abs(power) > 200:
        return None if power < 0 else 10**200
    return value * 10**power if power >= 0 else (value // 10**-power if value % 10**-power == 0 else None)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=200, deadline=None)
def test_floats_are_those_next_to_the_text(value: float) -> None:
    assert same(both("double", repr(value))) == same(value)
    try:
        (narrow,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        narrow = math.inf
    assert same(both("float", repr(value))) == (DEAD if math.isinf(narrow) else same(narrow))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(plain, st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_json_column_has_the_text_of_the_record(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert both("json", text) == (None if value is None else text)


def test_an_engine_reads_the_same_json_and_decimals_from_the_record_itself() -> None:
    """DuckDB takes each value from the record's own text."""
    records = [
        '{"k":"a","j":{"x": [1, 2.50]},"d":"99999999999999999999.999999999999999999"}',
        '{"k":"b","j":"text","d":"-0.000000000000000001"}',
        '{"k":"c","j":null,"d":12.5}',
    ] * 50
    schema = ShardSchema(parse_ddl("k string, j json, d decimal(38,18)"), ("k",))
    columns = columns_from_fields([None] * len(records), [r.encode() for r in records])
    commands, dead = StreamDecoder(schema).decode(Records("t", 0, columns.offsets + 1, columns))
    ours = commands.rows.sort_by("_order").select(["k", "j", "d"])
    assert dead.num_rows == 0
    asked = "SELECT r->>'$.k', json(nullif(r->'$.j', 'null')), CAST(r->>'$.d' AS DECIMAL(38,18)) FROM t ORDER BY n"
    con = duckdb.connect()
    con.execute("CREATE TABLE t (n INTEGER, r JSON)")
    con.executemany("INSERT INTO t VALUES (?, ?)", list(enumerate(records)))
    theirs = con.execute(asked).fetchall()
    again = con.from_arrow(ours).project("k, json(j), d").fetchall()
    assert again == theirs


def test_drivers_that_read_record_by_record_and_all_at_once_keep_one_table(harbour: Any, tmp_path: Path) -> None:
    """The test uses real stores and topics, and compares with DuckDB's reading of each record."""
    schema = stream_schema("k string, d decimal(38,18), r float, j json", "k")
    topic, s = harbour.create_topic("wide"), harbour.stores
    feed = harbour.portal.call(stream_feed(s.catalogue, "wide", schema))

    def sink(name: str) -> FeedSink:
        return sink_of(harbour, "topic/wide", [writer(harbour, name, schema, tmp_path, feed)])

    numbers = ("4e20", "1.5", "99999999999999999999.999999999999999999", "1e-2000000000", "-4e20", "1e20", "1e-18")
    said = [(f"good{at}", str(at), "0.5", f'{{"at": [{at}]}}') for at in range(80)]
    said += [(f"d{at}", number, "1", '"text"') for at, number in enumerate(numbers)]
    said += [("r", "0", "1e39", "null"), ("s", "0", "-3.4028234663852886e38", "null")]
    alone, together = sink("alone"), sink("together")
    for at, (k, d, r, j) in enumerate(said):
        harbour.produce(topic, [(b"", f'{{"k":"{k}","d":"{d}","r":{r},"j":{j}}}'.encode())])
        if at >= 79:
            harbour.mint("topic/wide", 1_000 + at, topic)
            alone.process(alone.latest())
    together.process(together.latest())
    assert harbour.contents("alone") == harbour.contents("together")
    assert sorted(row["offset"] for row in harbour.contents("p.dead_letters")) == [80, 83, 84, 85, 87]
    con = duckdb.connect()
    asked = "SELECT CAST(? AS DECIMAL(38,18)), CAST(? AS FLOAT), json(nullif(?, 'null'))"
    rows = {row["k"]: row for row in harbour.contents("together")}
    assert len(rows) == len(said) - 5
    for k, d, r, j in said:
        if k in rows:
            (wanted,) = con.execute(asked, [d, r, j]).fetchall()
            found = rows[k]["j"] and con.execute("SELECT json(?)", [rows[k]["j"]]).fetchall()[0][0]
            assert (rows[k]["d"], rows[k]["r"], found) == wanted
