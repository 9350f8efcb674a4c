"""JSON read by blocks gives the rows and the dead letters that reading it record by record gives."""

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
from tidemill.spark.decode import newline_text as lines_module
from tidemill.spark.decode.newline_text import STRETCH_LINES
from tidemill.spark.decode.records import Records
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.topics.batch import Record, decode_columns, encode_batch
from tidemill.topics.batch.records import columns_from_fields

SCHEMA = ShardSchema(
    (
        Column("k", "string"),
        Column("i", "int64"),
        Column("small", "int16"),
        Column("f", "float64"),
        Column("r", "float32"),
        Column("b", "bool"),
        Column("d", "date"),
        Column("t", "timestamp"),
        Column("z", "timestamp_ntz"),
        Column("n", "decimal(6,2)"),
    ),
    ("k",),
)
GOOD = (
    '{"k":"a","i":1,"small":-5,"f":1.5,"r":0.1,"b":true,"d":"2024-02-29","t":"2026-11-22T01:02:03.5Z","z":"2026-11-22T01:02:03.5","n":"-12.50"}',
    '{"t":"2026-11-22T01:02:03+02:00","k":"é\\u00e9\\n\\u0000","x":{"k":"other","y":[1,2,{}]},"f":-1e-300,"n":12.5}',
    '{"k":"c"}',
    ' { "k" : "d" , "f" : 12345678901234567890123 , "i" : -9223372036854775808 } ',
)
ODD = (
    '{"k":null}',
    '{"i":1}',
    "{}",
    "",
    " ",
    "null",
    "1",
    "[]",
    '"{}"',
    '{"k":"a"}{"k":"b"}',
    '{"k":"a"} x',
    '{"k":"a"',
    '{"k":"a","k":"b"}',
    '{"k":"a","x":1,"x":2}',
    '{"k":"a","i":1.0}',
    '{"k":"a","i":1e3}',
    '{"k":"a","i":"1"}',
    '{"k":"a","i":9223372036854775808}',
    '{"k":"a","small":40000}',
    '{"k":"a","f":NaN}',
    '{"k":"a","x":NaN}',
    '{"k":"a","x":[1,-Infinity]}',
    '{"k":"a","x": Inf}',
    '{"k":"a","f":1e999}',
    '{"k":"a","x":1e999}',
    '{"k":"a","r":1e39}',
    '{"k":"a","r":16777217}',
    '{"k":"a","f":-0}',
    '{"k":"a","f": -0 ,"r":-0}',
    '{"k":"a","f":0,"x":-0}',
    '{"f":-0,"k":"-0,","f":0}',
    '{"k":"a","z":"2026-11-22T01:02:03"}',
    '{"k":"a","z":"2026-11-22 01:02:03.123456"}',
    '{"k":"a","z":"2026-11-22T01:02:03.1234567"}',
    '{"k":"a","z":"2026-11-22T01:02:03Z"}',
    '{"k":"a","z":"2026-11-22T01:02:03+00:00"}',
    '{"k":"a","z":"2026-11-22T01:02:03-14:00"}',
    '{"k":"a","z":"2026-11-22T01:02"}',
    '{"k":"a","z":"2026-11-22T01:02+02:00"}',
    '{"k":"a","z":"2026-11-22"}',
    '{"k":"a","z":"2026-02-30T00:00:00"}',
    '{"k":"a","z":"0001-01-01T00:00:00"}',
    '{"k":"a","z":"0000-01-01T00:00:00"}',
    '{"k":"a","z":"9999-12-31T23:59:59.999999"}',
    '{"k":"a","z":"10000-01-01T00:00:00"}',
    '{"k":"a","z":"2026-11-22T24:00:00"}',
    '{"k":"a","z":"2026-11-22T01:02:60"}',
    '{"k":"a","z":1700000000123}',
    '{"k":"a","z":null}',
    '{"k":"a","f":-0.0}',
    '{"k":"a","f":0.1e-400}',
    '{"k":1}',
    '{"k":"\\ud800"}',
    '{"k":"a","x":"\\ud800"}',
    '{"k":"a\tb"}',
    '{"k":"a","b":1}',
    '{"k":"a","d":"2023-02-30"}',
    '{"k":"a","d":"0000-01-01"}',
    '{"k":"a","d":"0001-01-01"}',
    '{"k":"a","d":"2023-02-03T00:00:00"}',
    '{"k":"a","t":1700000000000}',
    '{"k":"a","t":-1}',
    '{"k":"a","t":1.5}',
    '{"k":"a","t":99999999999999999}',
    '{"k":"a","t":"2026-11-22T01:02:03"}',
    '{"k":"a","t":"2026-11-22 01:02:03Z"}',
    '{"k":"a","t":"2026-11-22T01:02:03.1234567Z"}',
    '{"k":"a","t":"2026-11-22T24:00:00Z"}',
    '{"k":"a","t":"2026-11-22T01:02:60Z"}',
    '{"k":"a","t":"9999-12-31T23:59:59.999999-14:00"}',
    '{"k":"a","t":"0001-01-01T00:00:00+14:00"}',
    '{"k":"a","t":"2026-02-30T01:02:03Z"}',
    '{"k":"a","t":"2026-11-22T01:02:03z"}',
    '{"k":"a","t":"2026-11-22T01:02:03+24:00"}',
    '{"K":"a"}',
    '{"\\u006b":"escaped"}',
    '{"k":"a",}',
    "{'k':1}",
    '{"k":"Information:NaN"}',
    '{"k":"a","x":' + "[" * 300 + "]" * 300 + "}",
    '{"k":"a","x":' + "[" * 5_000 + "]" * 5_000 + "}",
    '{"k":"a\n"}',
    '{"k":"a","x":"}\n{"}',
    '\ufeff{"k":"a"}',
    '{"k":"a"}\n',
    '\n{"k":"a"}',
    '{"k":"a"}\n{"k":"b"}',
)
DECIMALS = (
    "1", "-0", "-0.0", "0.1", "9999.99", "10000", "9999.995", "1.234", "1.230", "1e2", "1E+2", "125e-2", "1e-3",
    "1e400", "1e-400", "0e400", "0e-400", "00012.50", "+1", ".5", "5.", "-.5", " 1", "1 ", "1_0", "NaN", "-NaN", "sNaN",
    "Infinity", "inf", "", "-", "e5", "0x10", "1e", "1,5", "٣", "123456789012345678901234567890123456789.5", "0.000",
    "1.00000000000000000000000000000000000000000000000000", "1e99999999999999999999",
)  # fmt: skip
lines = st.sampled_from([g.encode() for g in GOOD]) | st.sampled_from([o.encode() for o in ODD])
objects = st.fixed_dictionaries(
    {},
    optional={
        "k": st.none() | st.text(max_size=5),
        "i": st.none() | st.integers(-(2**64), 2**64) | st.floats(),
        "small": st.integers(-(2**17), 2**17),
        "f": st.floats() | st.integers(),
        "r": st.floats() | st.floats(width=32),
        "b": st.booleans() | st.none(),
        "d": st.dates().map(str) | st.text(max_size=3),
        "t": st.datetimes().map(lambda d: d.isoformat() + "Z") | st.integers(-(2**62), 2**62),
        "n": st.none() | st.decimals(-10_000, 10_000, places=2).map(str) | st.sampled_from(DECIMALS) | st.floats(),
        "x": st.text() | st.none(),
    },
).map(lambda found: json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass"))
spoilt = st.tuples(objects, st.floats(0, 1), st.integers(0, 255)).map(
    lambda found: (
        found[0][: int(found[1] * len(found[0]))] + bytes([found[2]]) + found[0][int(found[1] * len(found[0])) + 1 :]
    )
)
values = st.lists(lines | objects | spoilt | st.none(), max_size=60)


def outcome(decoder: StreamDecoder, found: list[bytes | None]) -> tuple[list[Any], list[Any]]:
    columns = columns_from_fields([b"key"] * len(found), found)
    commands, dead = decoder.decode(Records("t", 0, columns.offsets + 1, columns))
    rows = commands.rows.sort_by("_order").to_pylist()
    for row in rows:
        for name in ("f", "r"):
            if row[name] is not None:
                row[name] = (row[name], math.copysign(1, row[name]))
    return rows, dead.to_pylist()


def held(found: list[bytes | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    decoder = StreamDecoder(SCHEMA)
    with monkeypatch.context() as patch:
        patch.setattr(objects_module, "MIN_BLOCK_VALUES", 1 << 62)
        alone = outcome(decoder, found)
    with monkeypatch.context() as patch:
        patch.setattr(objects_module, "MIN_BLOCK_VALUES", 0)
        together = outcome(decoder, found)
    assert together[0] == alone[0]
    assert sorted(map(repr, together[1])) == sorted(map(repr, alone[1]))
    return together


@given(values, st.integers(0, 3))
@settings(max_examples=400, deadline=None)
def test_blocks_give_what_records_give(found: list[bytes | None], good: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        held([GOOD[good].encode()] * 40 + found, patch)


KEYED = {
    "a text": ShardSchema((Column("k", "string"), Column("v", "int64")), ("k",)),
    "a number": ShardSchema((Column("k", "int64"), Column("v", "int64")), ("k",)),
    "a moment": ShardSchema((Column("k", "timestamp"), Column("v", "int64")), ("k",)),
    "a clock": ShardSchema((Column("k", "timestamp_ntz"), Column("v", "int64")), ("k",)),
    "a float": ShardSchema((Column("k", "float64"), Column("v", "int64")), ("k",)),
    "two": ShardSchema((Column("k", "string"), Column("v", "int64"), Column("i", "int32")), ("i", "k")),
    "JSON": ShardSchema((Column("k", "json"), Column("v", "int64")), ("k",)),
}
keys = st.lists(
    st.none()
    | st.binary(max_size=3)
    | st.text(max_size=3).map(str.encode)
    | st.integers(-(2**64), 2**64).map(lambda n: str(n).encode())
    | st.sampled_from(GOOD + ODD).map(str.encode)
    | st.sampled_from(
        [
            b'{"k":1,"i":2}',
            b' {"k":3}',
            b'{"k":5}',
            b'"2026-11-22T01:02:03Z"',
            b'"2026-11-22T01:02:03"',
            b"-0",
            b"-0.0",
            b'{"i":7,"k":"x"}',
        ]
    ),
    max_size=20,
)


@pytest.mark.parametrize("kind", KEYED)
@given(keys, st.lists(st.sampled_from([None, b'{"k":"a","v":1,"i":3}', b'{"k":4,"v":1}']), min_size=1))
@settings(max_examples=100, deadline=None)
def test_deletions_by_blocks_are_deletions_one_by_one(
    kind: str, keys: list[bytes | None], values: list[bytes | None]
) -> None:
    columns = columns_from_fields(keys, [values[n % len(values)] for n in range(len(keys))])
    found = []
    for few in (1 << 62, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objects_module, "MIN_BLOCK_VALUES", few)
            commands, dead = StreamDecoder(KEYED[kind]).decode(Records("t", 0, columns.offsets + 1, columns))
        found.append((commands.rows.sort_by("_order").to_pylist(), sorted(map(repr, dead.to_pylist()))))
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "key"), [("a text", b"k%d"), ("a number", b'{"k":%d}'), ("two", b'{"i":7,"k":"%d"}')])
def test_good_deletions_never_meet_the_slow_path(kind: str, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = StreamDecoder(KEYED[kind])
    monkeypatch.setattr(decoder, "_decode_key", None)
    columns = columns_from_fields([key % n for n in range(500)], [None] * 500)
    commands, dead = decoder.decode(Records("t", 0, columns.offsets + 1, columns))
    assert commands.rows.num_rows == 500 and dead.num_rows == 0


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_value_among_good_ones(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [value.encode() for value in GOOD] * 20
    rows, dead = held([*good, odd.encode(), *good, odd.encode()], monkeypatch)
    assert len(rows) + len(dead) == 2 * len(good) + 2 and len(rows) >= 2 * len(good)


def test_bytes_that_are_no_text_are_dead_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [value.encode() for value in GOOD] * 20
    _, dead = held([*good, b'{"k":"\xff"}', b'{"k":"a","x":"\xed\xa0\x80"}', *good], monkeypatch)
    assert len(dead) >= 1


@pytest.mark.parametrize("text", DECIMALS)
def test_a_decimal_in_whatever_spelling(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [value.encode() for value in GOOD] * 5
    as_number = b'{"k":"a","n":%s}' % text.encode()
    held([*good, as_number, *good, json.dumps({"k": "b", "n": text}).encode(), *good], monkeypatch)


FORMS = ("2026-11-22T01:02:03Z", "2026-11-22T01:02:03.5Z", "2026-11-22T01:02:03.123456Z")
CLOSE = (
    "2026-11-22T01:02:03.5+02", "2026-11-22T01:02:03.5+0200", "2026-11-22T01:02:03+02:00",
    "2026-11-22T01:02:03.Z", "2026-11-22T01:02:03,5Z", "2026-11-22T01:02:03 5Z", "2026-11-22T01:02:03.5z",
    "2026-11-22 01:02:03Z", "2026-11-22t01:02:03Z", "2026/11/22T01:02:03Z", "2026-11-22T01.02.03Z",
    "0000-11-22T01:02:03Z", "2026-02-30T01:02:03Z", "2026-11-22T24:00:00Z", "2026-11-22T23:59:60Z",
    "2026-11-22T1:02:03.55Z", "2026-11-22T01:02:+3Z", "2026-11-22T01:02: 3Z", "2026-11-22T01:02:03.1234567Z",
    "2026-11-22T01:02Z", "2026-11-22T01Z", "2026-11-22Z", "20261122T010203Z",
)  # fmt: skip


@pytest.mark.parametrize("text", CLOSE)
def test_a_moment_that_is_nearly_usual(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is among usual ones, for which the decoder needs no pattern."""
    usual_ones = [b'{"k":"u","t":"%s","d":"2026-11-22"}' % form.encode() for form in FORMS] * 11
    for name, found in (("t", text), ("d", text[:10])):
        held([*usual_ones, json.dumps({"k": "c", name: found}).encode(), *usual_ones], monkeypatch)


@given(st.lists(st.tuples(st.sampled_from(FORMS), st.integers(0, 26), st.sampled_from("0195+-:.TZz ")), max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_moment_of_which_one_byte_is_another(changes: list[tuple[str, int, str]]) -> None:
    found: list[bytes | None] = [b'{"k":"u","t":"%s"}' % form.encode() for form in FORMS] * 11
    for form, at, other in changes:
        changed = form[:at] + other + form[at + 1 :]
        found += [json.dumps({"k": "c", name: text}).encode() for name, text in (("t", changed), ("d", changed[:10]))]
    with pytest.MonkeyPatch.context() as patch:
        held(found, patch)


@pytest.mark.parametrize("count", [39, 45, 61, 64, 100])
def test_what_lies_behind_a_value_is_no_part_of_it(count: int) -> None:
    """The byte after a value is the count of headers, which may look like a letter, a bracket or no text."""
    rows = [Record(b'{"k":', value, (("h", b"NaN"),) * count) for value in usual(100)]
    _, columns = decode_columns(encode_batch(rows))
    decoder = StreamDecoder(SCHEMA)
    assert decoder._objects is not None
    blocks, slow = decoder._objects.read(columns.body, columns.value_at, columns.value_bytes, np.arange(100))
    assert len(slow) == 0 and [n for b in blocks for n in b.arrays["i"].to_pylist()] == list(range(100))


def test_values_of_all_sizes_are_cut_to_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "STRETCH_LINES", 100)
    monkeypatch.setattr(lines_module, "STRETCH_BYTES", 5_000)
    long = [b'{"k":"' + b"x" * size + b'"}' for size in (0, 2_500, 4_992, 5_000, 15_000)]
    rows, dead = held([*usual(101), *long, *usual(3), *long, *usual(250)], monkeypatch)
    assert len(rows) == 364 and not dead


def test_good_rows_never_meet_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts slow rows instead of measuring time: none in a good block, and only the bad rows of another."""
    slow: list[int] = []
    decoder = StreamDecoder(SCHEMA)
    by_blocks = decoder._values_by_blocks

    def counted(*arguments: Any) -> Any:
        blocks, rest = by_blocks(*arguments)
        slow.append(len(rest))
        return blocks, rest

    monkeypatch.setattr(decoder, "_values_by_blocks", counted)
    outcome(decoder, usual(1_000))
    outcome(decoder, [*usual(500), b'{"k":7}', b"no object", *usual(500)])
    outcome(decoder, [*usual(500), b'{"k":"a","i":1.0}', *usual(500)])
    assert slow[:2] == [0, 2] and slow[2] <= 40


def usual(count: int) -> list[bytes]:
    return [b'{"k":"%d","i":%d,"t":"2026-11-22T01:02:03Z"}' % (n, n) for n in range(count)]


CROWDS = {
    "a type that none has": [b'{"k":"n","i":"n"}'] * 3_000,
    "times of two forms": [v for n in range(1_500) for v in (b'{"k":"a","t":%d}' % n, *usual(1))],
    "a first time that is no number": [b'{"k":"a","t":true}', *usual(3_000)],
    "a first time in milliseconds": [b'{"k":"a","t":1}', *usual(3_000)],
    "no text": [*usual(500), *([b'{"k":"\xff"}'] * 2_500)],
    "words in strings": [b'{"k":"n","csv":"' + b"NaN," * 60 + b'"}'] * 2_000,
    "words as values": [b'{"k":"n","x":[' + b"NaN," * 20 + b"1]}"] * 2_000,
    "words in words": [b'{"k":"n","x":"' + b"Inf" * 80 + b'"}'] * 2_000,
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_block_of_odd_rows_is_not_read_again_and_again(crowd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parses: list[int] = []
    parse = objects_module._read_json_lines

    def counted(text: Any, options: Any) -> Any:
        parses.append(text.size)
        return parse(text, options)

    monkeypatch.setattr(objects_module, "_read_json_lines", counted)
    held(CROWDS[crowd], monkeypatch)
    stretches = -(-len(CROWDS[crowd]) // STRETCH_LINES)
    assert len(parses) <= stretches * (2 * objects_module.REJECTIONS_MAX + 3)


def test_how_deep_a_row_may_be_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = b'{"k":"deep","x":' + b"[" * 1_500 + b"]" * 1_500 + b"}"
    for neighbours in ([], usual(200), usual(200) + [b"1"] * 4_000):
        _, dead = held([deep, *neighbours], monkeypatch)
        assert 0 in [letter["offset"] for letter in dead]


def test_keys_that_are_larger_than_values_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_from_fields([b'{"k":"no"}' * 1_000] * 100, [b'{"k":"%d"}' % n for n in range(100)])
    commands, dead = StreamDecoder(SCHEMA).decode(Records("t", 0, columns.offsets + 1, columns))
    assert commands.rows.column("k").to_pylist() == [str(n) for n in range(100)] and dead.num_rows == 0
