"""Shapes over shards: base, folding of updates, multisets, where clauses, and values in PostgreSQL's text form."""

from __future__ import annotations

import json
import random
import struct
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.shapes.fake_shard import FakeShard
from support.shapes.world import ShapeWorld
from support.waiting import run, until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.objects.memory import MemoryObjects
from tidemill.shapes.definition.definition import ShapeDefinition, Source
from tidemill.shapes.definition.planner import FieldError, ShapeRequest, parse_shard_name
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.chunks import split_chunk
from tidemill.shapes.log.log import ShapeLog
from tidemill.shapes.log.log_offset import BASE_END, BEFORE_ALL
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.reporting import SourceProgress, shards_progress
from tidemill.shapes.shards.feed import ShardFeed, shard_schema_json, shard_where_types
from tidemill.shapes.shards.pg_text import (
    date_text,
    float4_text,
    float8_text,
    text_columns,
    timestamp_ntz_text,
    timestamp_text,
)
from tidemill.shapes.where import compile_where
from tidemill.shapes.where.types import WhereError
from tidemill.shards.api import Column, Shard, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges
from tidemill.shards.registry import open_shard

SCHEMA = ShardSchema((Column("id", "int32"), Column("v", "string")), ("id",))
BAG = ShardSchema((Column("id", "int32"), Column("v", "string")), ())


def live(shard: str, seen: int) -> LiveShape:
    shape = LiveShape("h", ShapeDefinition(Source("shard", "", "shard", shard)), b"{}", ShapeLog())
    shape.mark_ready()
    shape.publish(seen)
    return shape


def test_a_table_that_is_late_is_no_delay_of_the_shapes_over_it() -> None:
    """Each shape is compared with the newest one of the same table."""
    assert shards_progress([]) == SourceProgress(0, 0, "ms")
    assert shards_progress([live("fresh", 90_000), live("late", 10_000)]) == SourceProgress(90_000, 90_000, "ms")
    assert shards_progress([live("fresh", 90_000), live("late", 10_000), live("late", 7_000)]) == SourceProgress(
        87_000, 90_000, "ms"
    )


class Bench:
    def __init__(self, schema: ShardSchema = SCHEMA, where: str = "") -> None:
        self.shard = FakeShard("s", schema)
        self.shape = LiveShape("h", ShapeDefinition(Source("shard", "", "shard", "s"), where), b"{}", ShapeLog())
        compiled = compile_where(where, (), shard_where_types(schema)) if where else None
        self.feed = ShardFeed(self.shard, compiled, (), "default", "full", LoopShare(SystemClock()))

    def apply(self, upper: int, *updates: tuple[int, int, int, str]) -> None:
        rows = [(time, diff, {"id": key, "v": value}) for time, diff, key, value in updates]
        run(self.feed.apply(self.shape, self.shard.table(rows), upper))

    @property
    def base(self) -> list[dict[str, Any]]:
        return [json.loads(item)["value"] for item in split_chunk(self.shape.log.read(BEFORE_ALL).items)]

    @property
    def items(self) -> list[dict[str, Any]]:
        return [json.loads(item) for item in self.shape.log.read(BASE_END).items]

    @property
    def operations(self) -> list[tuple[str, dict[str, Any], str]]:
        return [(i["headers"]["operation"], i["value"], i["headers"]["lsn"]) for i in self.items]


def loaded(bench: Bench, upper: int = 0, *updates: tuple[int, int, int, str]) -> Bench:
    async def main() -> None:
        rows = [(time, diff, {"id": key, "v": value}) for time, diff, key, value in updates]
        if upper:
            await bench.shard.append(upper, *rows)
        await bench.feed.load(bench.shape)

    run(main())
    return bench


def test_the_base_is_the_snapshot_at_the_newest_final_time() -> None:
    bench = loaded(Bench(), 100, (5, 1, 1, "a"), (6, -1, 1, "a"), (6, 1, 1, "b"), (7, 1, 2, "c"))
    assert sorted(row["id"] for row in bench.base) == ["1", "2"]
    assert {"id": "1", "v": "b"} in bench.base
    assert bench.shape.last_seen == 99


def test_an_empty_shard_has_an_empty_base() -> None:
    assert loaded(Bench()).base == []


def test_changes_of_a_keyed_shard_are_followed_without_reading_its_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    run(bench.shard.append(10, (5, 1, {"id": 1, "v": "a"})))
    monkeypatch.setattr(bench.shard, "snapshot", None)  # a call would fail
    feed = ShardFeed(bench.shard, None, (), "default", "changes_only", LoopShare(SystemClock()))
    run(feed.load(bench.shape))
    assert bench.shape.last_seen == 9
    assert bench.shape.rows_loaded == 0


def test_a_retraction_and_an_insertion_of_one_key_at_one_time_are_one_update() -> None:
    bench = loaded(Bench(), 100, (5, 1, 1, "a"))
    bench.apply(200, (150, 1, 1, "b"), (150, -1, 1, "a"), (150, 1, 2, "x"), (160, -1, 2, "x"))
    assert bench.operations == [
        ("update", {"id": "1", "v": "b"}, "150"),
        ("insert", {"id": "2", "v": "x"}, "150"),
        ("delete", {"id": "2"}, "160"),
    ]
    assert bench.items[0]["key"] == '"shard"."s"/"1"'


def test_times_are_applied_in_order_even_when_rows_are_not() -> None:
    bench = loaded(Bench())
    bench.apply(100, (30, 1, 1, "c"), (10, 1, 1, "a"), (30, -1, 1, "b"), (20, -1, 1, "a"), (20, 1, 1, "b"))
    assert [(op, lsn) for op, _, lsn in bench.operations] == [
        ("insert", "10"),
        ("update", "20"),
        ("update", "30"),
    ]


def test_nested_values_are_json() -> None:
    columns = (Column("id", "int32"), Column("tags", "array<string>"), Column("m", "map<string,struct<x:float64>>"))
    bench = Bench(ShardSchema(columns, ("id",)))
    run(bench.feed.load(bench.shape))
    old: dict[str, Any] = {"id": 1, "tags": ['a"', None], "m": [("k", {"x": 0.5}), ("z", None)]}
    updates = [(5, 1, old), (6, -1, old), (6, 1, old | {"tags": [], "m": None})]
    target = update_schema(bench.shard.schema)
    rows = [{**row, "_time": time, "_diff": diff} for time, diff, row in updates]
    run(bench.feed.apply(bench.shape, pa.Table.from_pylist(rows, target), 10))
    assert [(op, value) for op, value, _ in bench.operations] == [
        ("insert", {"id": "1", "tags": '["a\\"",null]', "m": '{"k":{"x":0.5},"z":null}'}),
        ("update", {"id": "1", "tags": "[]", "m": None}),
    ]
    shown = json.loads(shard_schema_json(bench.shard.schema, ()))
    assert shown["tags"] == shown["m"] == {"type": "json", "dims": 0}
    with pytest.raises(WhereError, match="type json is not supported"):
        compile_where("tags = '[]'", (), shard_where_types(bench.shard.schema))


def test_progress_alone_moves_last_seen_and_adds_nothing() -> None:
    bench = loaded(Bench())
    bench.apply(500)
    assert bench.items == []
    assert bench.shape.last_seen == 499


def test_rows_enter_and_leave_the_where_clause_of_a_shard() -> None:
    bench = loaded(Bench(where="v > 'm'"), 100, (5, 1, 1, "a"), (5, 1, 2, "z"))
    assert bench.base == [{"id": "2", "v": "z"}]
    bench.apply(200, (150, -1, 1, "a"), (150, 1, 1, "n"), (150, -1, 2, "z"), (150, 1, 2, "b"))
    assert [(op, value["id"]) for op, value, _ in bench.operations] == [("insert", "1"), ("delete", "2")]


def test_a_shard_without_a_key_shows_a_row_with_its_first_copy_and_drops_it_with_its_last() -> None:
    bench = loaded(Bench(BAG), 100, (5, 1, 1, "a"), (5, 1, 1, "a"), (5, 1, 2, "b"))
    assert len(bench.base) == 2
    bench.apply(110, (101, -1, 1, "a"), (101, 1, 2, "b"), (101, 1, 3, "c"))
    assert [(op, value["id"]) for op, value, _ in bench.operations] == [("insert", "3")]
    bench.apply(120, (111, -1, 1, "a"), (112, -1, 2, "b"), (113, -1, 2, "b"))
    assert [(op, value["id"]) for op, value, _ in bench.operations[1:]] == [("delete", "1"), ("delete", "2")]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc")), max_size=6), max_size=8), st.integers(0, 8)
)
def test_base_and_log_together_are_the_shard_wherever_the_base_ends(
    steps: list[list[tuple[int, str]]], base_steps: int
) -> None:
    """Each step sets keys at one time (value c deletes); a client that replays the shape ends with the contents."""
    state: dict[int, str] = {}
    updates: list[list[tuple[int, int, int, str]]] = []
    for number, step in enumerate(steps):
        time, batch = 10 * number + 10, []
        for key, value in dict(step).items():
            if key in state:
                batch.append((time, -1, key, state.pop(key)))
            if value != "c":
                batch.append((time, 1, key, value))
                state[key] = value
        updates.append(batch)
    first, rest = updates[:base_steps], updates[base_steps:]
    upper = 10 * len(first) + 5
    bench = loaded(Bench(), upper, *[u for batch in first for u in batch])
    for number, batch in enumerate(rest):
        bench.apply(upper + 10 * (number + 1), *batch)
    rows = {row["id"]: row for row in bench.base}
    for item in bench.items:
        key = item["value"]["id"]
        if item["headers"]["operation"] == "delete":
            del rows[key]
        elif item["headers"]["operation"] == "insert":
            assert key not in rows
            rows[key] = item["value"]
        else:
            rows[key] = {**rows[key], **item["value"]}
    assert {int(key): row["v"] for key, row in rows.items()} == state


def test_table_parameters_that_name_shards() -> None:
    assert parse_shard_name("shard.orders") == "orders"
    assert parse_shard_name("shard:shop/orders by day") == "shop/orders by day"
    assert parse_shard_name('shard."Odd ""Name"""') == 'Odd "Name"'
    assert parse_shard_name("tidemill.orders") == "orders"
    assert parse_shard_name("tidemill.a.b") == "a.b"
    assert parse_shard_name('tidemill."Odd ""Name"""') == 'Odd "Name"'
    for captured in (
        "public.shard",
        "shards",
        "tidemill",
        '"tidemill".orders',
        '"shard".orders',
        "shop:tidemill.orders",
    ):
        assert parse_shard_name(captured) is None
    assert parse_shard_name("tidemill:public.orders") is None, "a capture may have this name"
    with pytest.raises(FieldError, match="unterminated quote"):
        parse_shard_name('tidemill."odd')


@pytest.mark.postgres
async def test_clauses_may_qualify_columns_with_either_schema_name_of_a_shard(postgres_dsn: str) -> None:
    shard = FakeShard("s", SCHEMA)

    async def opener(name: str) -> FakeShard:
        return shard

    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}), (10, 1, {"id": 2, "v": "b"}))
        for schema in ("tidemill", "shard"):
            client = await world.sync(table="tidemill.s", where=f"{schema}.s.id = 1")
            assert client.rows == {'"shard"."s"/"1"': {"id": "1", "v": "a"}}
            ordered = {"subset__limit": "1", "subset__order_by": f"{schema}.s.id DESC"}
            subset = await world.get(table="tidemill.s", offset="now", **ordered)
            assert subset.status == 200 and [row["value"]["id"] for row in subset.json["data"]] == ["2"]
        assert (await world.get(table="tidemill.s", where="public.s.id = 1", offset="-1")).status == 400


@pytest.mark.postgres
async def test_a_captured_schema_with_a_reserved_name_is_named_by_its_database_or_in_quotes(postgres_dsn: str) -> None:
    shard = FakeShard("s", SCHEMA)

    async def opener(name: str) -> FakeShard:
        return shard

    ddl = "".join(
        f"CREATE SCHEMA {name}; CREATE TABLE {name}.s (id int PRIMARY KEY, v text);"
        f" INSERT INTO {name}.s VALUES (7, '{name}');"
        for name in ("tidemill", "shard")
    )
    async with ShapeWorld(postgres_dsn, ddl, shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}))
        for name in ("tidemill", "shard"):
            assert (await world.sync(table=f"{name}.s")).rows == {'"shard"."s"/"1"': {"id": "1", "v": "a"}}
            for table in (f"main:{name}.s", f'"{name}".s', f'main:"{name}"."s"'):
                client = await world.sync(table=table)
                assert client.rows == {f'"{name}"."s"/"7"': {"id": "7", "v": name}}


@pytest.mark.postgres
async def test_a_shard_is_followed_over_http_and_its_feed_ends_with_the_shape(postgres_dsn: str) -> None:
    shard = FakeShard("s", SCHEMA)

    async def opener(name: str) -> FakeShard:
        if name != "s":
            raise MissingError(f"no such table: table={name}.")
        return shard

    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}))
        handles = set()
        for table in ("tidemill.s", "shard.s", "shard:s", 'tidemill."s"'):
            client = await world.sync(table=table)
            assert client.rows == {'"shard"."s"/"1"': {"id": "1", "v": "a"}}
            handles.add(client.handle)
        assert len(handles) == 1 and world.service.facts()["shapes"] == 1, "one shape and one log"
        first = await world.get(table="shard.s", offset="-1")
        assert json.loads(first.headers["electric-schema"])["id"] == {"type": "int4", "dims": 0, "pk_index": 0}
        await shard.append(2000, (1500, -1, {"id": 1, "v": "a"}), (1500, 1, {"id": 1, "v": None}))
        await client.follow_until(lambda: client.rows['"shard"."s"/"1"']["v"] is None)
        unknown = await world.get(table="tidemill.nope", offset="-1")
        assert (unknown.status, unknown.json["errors"]) == (400, {"table": ["no such table: table=nope."]})
        shape = world.service.find_by_handle(client.handle)
        assert shape is not None
        world.service.delete(shape)
        await shard.append(3000, (2500, 1, {"id": 2, "v": "b"}))
        await until(lambda: shard.listeners == 0)
        assert ShapeRequest("x").log_mode == "full"


@pytest.mark.postgres
async def test_a_shape_that_history_overtakes_starts_over_and_its_clients_refetch(postgres_dsn: str) -> None:
    """Shapes hold no history of their shard. A slow one finds that the times it needs are already merged."""
    clock, rand = SystemClock(), Rand(1)
    consensus = MemoryConsensus(clock)
    shard = await open_shard(consensus, MemoryObjects(clock), clock, rand, "s", SCHEMA)

    async def append(lower: int, upper: int, *updates: tuple[int, int, str]) -> None:
        rows = FakeShard("s", SCHEMA).table([(time, diff, {"id": 1, "v": v}) for time, diff, v in updates])
        await shard.compare_and_append(lower, upper, [await shard.write_part(rows)], rand.nonce())

    async def opener(_: str) -> Shard:
        return shard

    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opener) as world:
        await append(0, 1000, (10, 1, "a"))
        client = await world.sync(table="shard.s")
        early = client.handle
        async with world.service.share._turns:  # the shape gets no turn
            await append(1000, 2000, (1500, -1, "a"), (1500, 1, "b"))
            await append(2000, 3000, (2100, -1, "b"), (2100, 1, "c"), (2200, -1, "c"), (2200, 1, "d"))
            assert await shard.downgrade_since("keeper", 1, 2900) == 2900
            shape = world.service.find_by_handle(early)
            assert shape is not None and not shape.has_ended
        await until(lambda: world.service.find_by_handle(early) is None)
        refused = await world.get(table="shard.s", offset=client.offset, handle=early, live="true")
        assert (refused.status, refused.controls) == (409, ["must-refetch"])
        assert refused.handle != early
        await client.follow_until(lambda: client.refetches == 1 and bool(client.rows))
        assert client.rows == {'"shard"."s"/"1"': {"id": "1", "v": "d"}}
        await append(3000, 4000, (3500, -1, "d"), (3500, 1, "e"))
        await client.follow_until(lambda: client.rows['"shard"."s"/"1"']["v"] == "e")
        assert client.refetches == 1
    await shard.aclose()


@pytest.mark.postgres
async def test_a_shape_over_a_shard_that_gets_a_column_starts_over_with_it(postgres_dsn: str) -> None:
    clock, rand = SystemClock(), Rand(1)
    consensus, objects = MemoryConsensus(clock), MemoryObjects(clock)

    async def opener(_: str) -> Shard:
        return await open_shard(consensus, objects, clock, rand, "s", None if created else SCHEMA)

    async def append(shard: LogShard, lower: int, *updates: tuple[int, int, dict[str, object]]) -> None:
        rows = FakeShard("s", shard.schema).table(list(updates))
        await shard.compare_and_append(lower, lower + 1000, [await shard.write_part(rows)], rand.nonce())

    created = False
    shard = await open_shard(consensus, objects, clock, rand, "s", SCHEMA)
    created = True
    async with ShapeWorld(postgres_dsn, "SELECT 1", shards=opener) as world:
        await append(shard, 0, (10, 1, {"id": 1, "v": "a"}))
        client = await world.sync(table="shard.s")
        await shard.evolve(SchemaChanges((Column("n", "int16", "7"),)))
        later = await open_shard(consensus, objects, clock, rand, "s")
        await append(later, 1000, (1500, 1, {"id": 2, "v": "b", "n": 8}))
        await client.follow_until(lambda: client.refetches == 1 and len(client.rows) == 2)
        assert sorted(client.rows.values(), key=repr) == [
            {"id": "1", "v": "a", "n": "7"}, {"id": "2", "v": "b", "n": "8"},
        ]  # fmt: skip
        await later.aclose()
    await shard.aclose()


CLOCKS = ShardSchema(
    (Column("id", "int32"), Column("clock", "timestamp_ntz"), Column("at", "timestamp"), Column("f", "float32")),
    ("id",),
)


async def test_a_time_without_a_zone_is_postgres_timestamp_and_minus_zero_is_a_change() -> None:
    names = {name: found["type"] for name, found in json.loads(shard_schema_json(CLOCKS, ())).items()}
    assert names == {"id": "int4", "clock": "timestamp", "at": "timestamptz", "f": "float4"}
    bench = Bench(CLOCKS, "clock >= '1970-01-01 09:00:00' AND at < '1970-01-01 12:00:00+00' AND f = 0")
    nine = 9 * 3_600_000_000

    def row(key: int, us: int, f: float) -> dict[str, Any]:
        return {"id": key, "clock": us, "at": us, "f": f}

    rows = [(5, 1, row(1, nine, 0.0)), (5, 1, row(2, nine - 1, 0.0)), (5, 1, row(3, nine, 1.0))]
    await bench.shard.append(100, *rows)
    await bench.feed.load(bench.shape)
    changed = bench.shard.table([(150, -1, row(1, nine, 0.0)), (150, 1, row(1, nine, -0.0))])
    await bench.feed.apply(bench.shape, changed, 200)
    shown = {"id": "1", "clock": "1970-01-01 09:00:00", "at": "1970-01-01 09:00:00+00"}
    assert bench.base == [shown | {"f": "0"}]
    assert bench.operations == [("update", {"id": "1", "f": "-0"}, "150")]


def floats() -> list[float]:
    rand = random.Random(3)
    out = [0.0, -0.0, 1.0, -1.5, 0.1, 1e15, 1e14, 999999999999999.0, 1e-4, 1e-5, 123456.0, 1e6, 1e22, 5e-324, 1.7e308]
    out += [float("nan"), float("inf"), float("-inf"), 0.3333333333333333, 100000.0, 1234567.0, 0.00012]
    out += [struct.unpack("d", rand.randbytes(8))[0] for _ in range(2000)]
    out += [float(rand.randrange(2**53, 2**60)) for _ in range(3000)]
    return out


@pytest.mark.postgres
def test_values_are_printed_as_postgres_prints_them(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, options="-c TimeZone=UTC -c DateStyle=ISO") as connection:

        def ask(expression: str, values: list[str]) -> list[str]:
            query = f"SELECT ({expression})::text FROM unnest($1::text[]) WITH ORDINALITY u(v, n) ORDER BY n"
            return [row[0] for row in psycopg.RawCursor(connection).execute(query, [values]).fetchall()]

        doubles = floats()
        assert [float8_text(f) for f in doubles] == ask("v::float8", [repr(f) for f in doubles])
        rand = random.Random(4)
        singles = [struct.unpack("f", rand.randbytes(4))[0] for _ in range(2000)]
        singles += [0.1, 1e6, 999999.0, 1e-4, 1e-5, 16777216.0, 3.4028234663852886e38]
        singles = [struct.unpack("f", struct.pack("f", f))[0] for f in singles]
        assert [float4_text(f) for f in singles] == ask("v::float4", [repr(f) for f in singles])
        days = [rand.randrange(-2_400_000, 100_000_000) for _ in range(200)] + [0, -1, -719_529, -719_528, 2_932_896]
        assert [date_text(d) for d in days] == ask("'1970-01-01'::date + v::int", [str(d) for d in days])
        assert [date_text(2**31 - 1), date_text(1 - 2**31)] == ask("v::date", ["infinity", "-infinity"])
        micros = [rand.randrange(-(10**17), 10**17) for _ in range(200)] + [0, -1, 1, 500_000]
        moment = (
            "'1970-01-01 00:00:00+00'::timestamptz + v::bigint / 86400000000 * interval '1 day'"
            " + v::bigint % 86400000000 * interval '1 microsecond'"
        )
        assert [timestamp_text(m) for m in micros] == ask(moment, [str(m) for m in micros])
        clock = moment.replace("+00'::timestamptz", "'::timestamp")
        assert [timestamp_ntz_text(m) for m in micros] == ask(clock, [str(m) for m in micros])
        for text in (timestamp_text, timestamp_ntz_text):
            assert [text(2**63 - 1), text(1 - 2**63)] == ["infinity", "-infinity"]


def test_arrow_columns_become_text_and_null_stays_null() -> None:
    table = pa.table(
        {
            "b": pa.array([True, False, None]),
            "d": pa.array([Decimal("1.50"), Decimal("-0.01"), None], pa.decimal128(5, 2)),
            "x": pa.array([b"\x00\xff", b"", None]),
            "i": pa.array([1, -2, None], pa.int64()),
        }
    )
    assert text_columns(table, ["b", "d", "x", "i"]) == [
        ["true", "false", None],
        ["1.50", "-0.01", None],
        ["\\x00ff", "\\x", None],
        ["1", "-2", None],
    ]
