"""`timestamp` and `timestamp_ntz` are two types: they are never confused, and old shards keep theirs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.shards.world import World
from support.waiting import run
from tidemill.base.errors import InvalidError
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.parts.pg_columns import TIMESTAMP_INFINITY, cast_text, parse_column, with_existing_types
from tidemill.shards.parts.row_hash import hash_rows
from tidemill.shards.parts.schema import arrow_type, canonical_type, conform_rows
from tidemill.shards.parts.schema_evolution import SchemaChanges, evolve_schema, schema_changes

INSTANT, CLOCK = pa.timestamp("us", "UTC"), pa.timestamp("us")
ENDS = [-TIMESTAMP_INFINITY, -(2**62), -1, 0, 1, 2**62, TIMESTAMP_INFINITY, None]


def test_the_type_is_a_number_of_microseconds_without_a_zone() -> None:
    assert arrow_type("timestamp_ntz") == CLOCK and arrow_type("timestamp") == INSTANT
    assert canonical_type("timestamp_ntz") == "timestamp_ntz"


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("1970-01-01 00:00:00", 0),
        ("2026-11-21 03:43:00.123456", (datetime(2026, 11, 21, 3, 43) - datetime(1970, 1, 1)).days * 86_400_000_000
         + (3 * 60 + 43) * 60_000_000 + 123456),
        ("infinity", TIMESTAMP_INFINITY),
        ("-infinity", -TIMESTAMP_INFINITY),
        ("0001-12-31 23:59:59.5 BC", -62_135_596_800_000_000 - 500_000),
        ("10000-01-01 00:00:00", 253_402_300_800_000_000),
    ],
)  # fmt: skip
def test_postgres_text_is_read_as_its_digits(text: str, us: int) -> None:
    assert parse_column([text, None], Column("c", "timestamp_ntz")).view(pa.int64()).to_pylist() == [us, None]


@pytest.mark.parametrize(
    "text",
    ["2026-11-21 03:43:00+00", "2026-11-21 03:43:00Z", "2026-11-21 03:43:00 UTC", "0044-03-15 12:00:00+00 BC",
     "10000-01-01 00:00:00-01", "294276-12-31 23:59:59.999999", "2026-02-30 00:00:00", "tomorrow", ""],
)  # fmt: skip
def test_what_has_a_zone_or_is_beyond_the_range_is_none(text: str) -> None:
    with pytest.raises(InvalidError, match="not a timestamp_ntz: column=c"):
        parse_column(["2026-11-21 03:43:00", text], Column("c", "timestamp_ntz"))
    with pytest.raises(pa.ArrowInvalid):
        cast_text(pa.array([text]), "timestamp_ntz")


def test_a_key_has_one_hash_whichever_of_the_two_it_is() -> None:
    """Pinned by the values of `timestamp`: a shard of one type and its successor of the other have the same ranges of
    keys."""
    numbers = pa.array(ENDS, pa.int64())
    hashes = [hash_rows(pa.table({"k": numbers.cast(kind)}), ("k",)).tolist() for kind in (INSTANT, CLOCK, pa.int64())]
    assert hashes[0] == hashes[1] == hashes[2]


def schema(kind: str) -> ShardSchema:
    return ShardSchema((Column("k", kind), Column("v", kind)), ("k",))


async def test_parts_and_sums_give_back_what_was_written() -> None:
    shard = await World().open(schema=schema("timestamp_ntz"))
    numbers = pa.array(ENDS, pa.int64()).cast(CLOCK)
    times = pa.array(np.zeros(len(ENDS), np.int64))
    rows = pa.table({"k": numbers, "v": numbers, TIME: times, DIFF: pa.array([1] * len(ENDS), pa.int64())})
    await shard.compare_and_append(0, 1, [await shard.write_part(rows)], "a")
    gone = rows.slice(0, 3).set_column(3, DIFF, pa.array([-1] * 3, pa.int64()))
    gone = gone.set_column(2, TIME, pa.array([1] * 3, pa.int64()))
    await shard.compare_and_append(1, 2, [await shard.write_part(gone)], "b")
    for at, wanted in ((0, ENDS), (1, ENDS[3:])):
        found = await shard.snapshot(at)
        assert found.schema.field("v").type == CLOCK
        for name in ("k", "v"):
            assert sorted(found.column(name).cast(pa.int64()).to_pylist(), key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize(("kind", "given"), [("timestamp", CLOCK), ("timestamp_ntz", INSTANT)])
def test_rows_of_the_one_are_no_rows_of_the_other(kind: str, given: pa.DataType) -> None:
    rows = pa.table({"v": pa.array([0], given)})
    with pytest.raises(InvalidError, match=r"column does not fit: column=v .*only one of the two has a zone"):
        conform_rows(rows, pa.schema([pa.field("v", arrow_type(kind))]))
    same = pa.table({"v": pa.array([5], pa.timestamp("ms", "Europe/Berlin" if kind == "timestamp" else None))})
    found = conform_rows(same, pa.schema([pa.field("v", arrow_type(kind))]))
    assert found.column("v").cast(pa.int64()).to_pylist() == [5000]


@pytest.mark.parametrize(("old", "new"), [("timestamp", "timestamp_ntz"), ("timestamp_ntz", "timestamp")])
def test_neither_becomes_the_other(old: str, new: str) -> None:
    have = schema(old)
    for changes in (SchemaChanges(widen=(Column("v", new),)), SchemaChanges(add=(Column("v", new),))):
        with pytest.raises(InvalidError):
            evolve_schema(have, changes)
    with pytest.raises(InvalidError, match=f"difference=\\[k {old}→{new}, v {old}→{new}\\]"):
        schema_changes(have, schema(new))


def test_an_old_shard_decides_what_a_captured_column_is_and_a_new_column_is_new() -> None:
    source = (*(Column(name, "timestamp_ntz") for name in ("a", "b", "new")), Column("z", "timestamp"))
    shard = ShardSchema((Column("a", "timestamp"), Column("b", "timestamp_ntz"), Column("z", "timestamp")), ("a",))
    assert [c.type for c in with_existing_types(source, shard)] == [
        "timestamp",
        "timestamp_ntz",
        "timestamp_ntz",
        "timestamp",
    ]
    # The reverse is a difference: local timestamps do not become instants because the source's type changed.
    assert with_existing_types((Column("b", "timestamp"),), shard) == (Column("b", "timestamp"),)


def test_a_column_that_is_added_has_its_default_in_older_rows() -> None:
    async def scenario() -> list[Any]:
        world = World()
        shard = await world.open(schema=schema("timestamp"))
        rows = {name: pa.array([0], INSTANT) for name in ("k", "v")}
        rows |= {name: pa.array([number], pa.int64()) for name, number in ((TIME, 0), (DIFF, 1))}
        await shard.compare_and_append(0, 1, [await shard.write_part(pa.table(rows))], "a")
        await shard.evolve(SchemaChanges(add=(Column("w", "timestamp_ntz", "2026-01-02 03:04:05"),)))
        newer = await world.open(schema=None, writer="new")
        found: list[Any] = (await newer.snapshot(0)).to_pylist()
        return found

    zero = datetime(1970, 1, 1, tzinfo=UTC)
    assert run(scenario()) == [{"k": zero, "v": zero, "w": datetime(2026, 1, 2, 3, 4, 5)}]
