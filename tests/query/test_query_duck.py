"""Tables as DuckDB views: exact despite merges, held while a connection uses them, several at the same time."""

from __future__ import annotations

import gc
import math
import struct
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from support.query.world import ORDERS, World, filled, until_let_go
from tidemill.base.errors import InvalidError, UnavailableError
from tidemill.query import duckdb_views
from tidemill.shards.api import DIFF, TIME, Column, HistoryLostError, ShardSchema
from tidemill.shards.parts.schema import update_schema
from tidemill.shards.parts.schema_evolution import SchemaChanges

EVERY = "SELECT count(*), count(DISTINCT id), sum(total), count(*) FILTER (status = 'paid') FROM orders"


def test_a_view_is_the_contents_at_its_time_and_is_held_while_the_connection_has_it(everywhere: World) -> None:
    filled(everywhere)
    orders = everywhere.cluster.table("orders")
    with duckdb.connect() as connection:
        assert orders.to_duckdb(connection, as_of=19).columns == ["id", "status", "total"]
        assert connection.sql(EVERY).fetchall() == [(300, 300, Decimal(448500), 0)]
        orders.to_duckdb(connection, "now")
        assert connection.sql(EVERY.replace("orders", "now")).fetchall() == [(300, 300, Decimal(451420), 1)]
        assert connection.sql("SELECT total, id FROM now WHERE id = 7").fetchall() == [(Decimal(70), 7)]
        assert connection.sql("SELECT id FROM orders ANTI JOIN now USING (id)").fetchall() == [(8,)]
        assert len(everywhere.holds()) == 2
        everywhere.append(40, [(300, None, -1)])
        everywhere.merge(39)
        assert connection.sql(EVERY).fetchall() == [(300, 300, Decimal(448500), 0)], "what was merged stays for it"
        orders.to_duckdb(connection)
        assert connection.sql("SELECT count(*), max(id) FROM orders").fetchall() == [(299, 299)]
        gc.collect()
        assert len(everywhere.holds()) == 2, "the view of the older time is gone"
    del connection
    gc.collect()
    everywhere.portal.call(until_let_go(everywhere))


def test_a_smallint_is_one_in_every_reader_although_files_have_wider_integers(world: World) -> None:
    schema = ShardSchema((Column("id", "int64"), Column("size", "int16")), ("id",))

    async def append(time_ms: int, rows: list[tuple[int, int, int]]) -> None:
        shard = await world.stores.shard("sizes", schema)
        ids, sizes, diffs = zip(*rows, strict=True)
        types = update_schema(schema)
        table = pa.table({"id": ids, "size": sizes, TIME: [time_ms] * len(rows), DIFF: diffs}, schema=types)
        await shard.compare_and_append(time_ms, time_ms + 1, [await shard.write_part(table)], "")
        await shard.aclose()

    world.portal.call(append(0, [(number, -number, 1) for number in range(3000)]))
    world.merge(0, "sizes")
    world.portal.call(append(1, [(7, -7, -1), (7, 32767, 1)]))
    sizes = world.cluster.table("sizes")
    with duckdb.connect() as connection:
        assert sizes.to_duckdb(connection).types == ["BIGINT", "SMALLINT"]
        found = dict(connection.sql("SELECT id, size FROM sizes").fetchall())
    assert found == {number: -number for number in range(3000)} | {7: 32767}
    assert sizes.to_arrow().schema.field("size").type == pa.int16()
    assert dict(zip(*sizes.to_arrow().to_pydict().values(), strict=True)) == found


def test_where_no_plan_is_exact_the_contents_are_copied_and_nothing_stays_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyless = ShardSchema(ORDERS.columns, ())
    world.append(10, [(1, "a", 2), (2, "b", 1)], "events", keyless)
    world.append(20, [(1, "a", -1)], "events", keyless)
    events = world.cluster.table("events")
    with duckdb.connect() as connection:
        twice, once = (1, "a", Decimal(10)), (2, "b", Decimal(20))
        assert sorted(events.to_duckdb(connection, as_of=9).fetchall()) == [twice, twice, once]
        assert sorted(events.to_duckdb(connection).fetchall()) == [twice, once]
        assert world.holds("events") == []
        filled(world)
        orders = world.cluster.table("orders")

        async def evolve() -> None:
            shard = await world.stores.shard("orders")
            await shard.evolve(SchemaChanges((Column("note", "string", "none"),)))
            await shard.aclose()

        world.portal.call(evolve())
        monkeypatch.setattr("tidemill.shards.read.read_plan.DIFFERENCE_BYTES", 0)
        orders.to_duckdb(connection)
        assert connection.sql("SELECT count(*), min(note), max(note) FROM orders").fetchall() == [(300, "none", "none")]
        assert world.holds() == []
        monkeypatch.undo()
        orders.to_duckdb(connection, as_of=19)
        assert connection.sql(EVERY).fetchall() == [(300, 300, Decimal(448500), 0)]


def test_several_tables_are_read_at_the_newest_time_that_all_have(world: World) -> None:
    for name in ("a", "b"):
        world.append(10, [(1, name, 1)], name)
    world.append(20, [(1, "a", -1), (1, "later", 1)], "a")
    with duckdb.connect() as connection:
        assert world.cluster.to_duckdb(connection, ["a", "b"]) == 9
        assert connection.sql("SELECT a.status, b.status FROM a JOIN b USING (id)").fetchall() == [("a", "b")]
        world.append(30, [], "b")
        assert world.cluster.to_duckdb(connection, ["a", "b"]) == 19 == world.cluster.common_time(["a", "b"])
        assert connection.sql("SELECT a.status, b.status FROM a JOIN b USING (id)").fetchall() == [("later", "b")]
        world.append(40, [(2, "c", 1)], "c")
        world.append(50, [(3, "c", 1)], "c")
        world.merge(49, "c")
        with pytest.raises(HistoryLostError, match=r"no time in common: c is readable from 49 on, a before 20.*why a"):
            world.cluster.to_duckdb(connection, ["a", "c"])
        world.portal.call(_made(world, "new"))
        with pytest.raises(UnavailableError, match="nothing was written yet: table=new"):
            world.cluster.to_duckdb(connection, ["a", "new"])
        assert world.cluster.to_duckdb(connection, ["new"]) == -1
        assert connection.sql("SELECT count(*) FROM new").fetchall() == [(0,)]


async def _made(world: World, name: str) -> None:
    await (await world.stores.shard(name, ORDERS)).aclose()


def test_names_that_duckdb_cannot_have_are_refused_and_odd_ones_are_not(world: World) -> None:
    odd = ShardSchema((Column('we"ird', "int64"), Column("a.b", "string"), Column("select", "string")), ('we"ird',))
    rows = {'we"ird': [1, 2], "a.b": ["x", "y"], "select": [None, "z"], "_time": [9, 9], "_diff": [1, 1]}

    async def fill(name: str, schema: ShardSchema, columns: dict[str, list[object]]) -> None:
        shard = await world.stores.shard(name, schema)
        await shard.compare_and_append(0, 10, [await shard.write_part(pa.table(columns))], "")
        await shard.aclose()

    world.portal.call(fill("my-odd.shard", odd, rows))
    twice = ShardSchema((Column("id", "int64"), Column("ID", "int64")), ("id",))
    world.portal.call(fill("twice", twice, {"id": [1], "ID": [2], "_time": [9], "_diff": [1]}))
    with duckdb.connect() as connection:
        table = world.cluster.table("my-odd.shard")
        assert sorted(table.to_duckdb(connection).fetchall()) == [(1, "x", None), (2, "y", "z")]
        assert connection.sql('SELECT "a.b" FROM "my-odd.shard" WHERE "we""ird" = 2').fetchall() == [("y",)]
        with pytest.raises(InvalidError, match="DuckDB cannot distinguish two columns: table=twice columns=id,ID"):
            world.cluster.table("twice").to_duckdb(connection)
        connection.execute("CREATE TEMP TABLE taken AS SELECT 1 AS a")
        with pytest.raises(InvalidError, match="DuckDB rejects the view: name=taken"):
            table.to_duckdb(connection, "taken")
        assert connection.sql("SELECT a FROM taken").fetchall() == [(1,)]
        assert world.holds("twice") == [] and duckdb_views.quote_identifier('a"b') == '"a""b"'


def test_a_table_without_a_key_that_is_merged_is_scanned_where_it_lies(world: World) -> None:
    keyless = ShardSchema(ORDERS.columns, ())
    world.append(10, [(1, "a", 1), (2, "b", 1)], "events", keyless)
    world.append(20, [(3, "c", 1)], "events", keyless)
    world.merge(19, "events")
    with duckdb.connect() as connection:
        view = world.cluster.table("events").to_duckdb(connection)
        assert sorted(view.fetchall()) == [(n, s, Decimal(n * 10)) for n, s in ((1, "a"), (2, "b"), (3, "c"))]
        assert world.holds("events") == ["python"]


@pytest.mark.parametrize("collation", ["", "NOCASE", "NOCASE.NOACCENT"])
@pytest.mark.parametrize("key", ["_until", "k0", "s"])
def test_a_key_of_any_name_and_any_collation_of_the_connection(world: World, key: str, collation: str) -> None:
    _fill(world, 10, key, "string", [("a", 1, 1), ("A", 2, 1), ("á", 4, 1)])
    world.merge(9, "t")
    _fill(world, 20, key, "string", [("a", 1, -1), ("a", 3, 1)])
    with duckdb.connect() as connection:
        connection.execute(f"SET default_collation = '{collation}'")
        assert sorted(world.cluster.table("t").to_duckdb(connection).fetchall()) == [("A", 2), ("a", 3), ("á", 4)]


@pytest.mark.parametrize("pair", ["0000000000000000 8000000000000000", "7ff8000000000000 7ff8000000000001"])
def test_keys_that_an_engine_takes_for_one_stay_two(world: World, pair: str) -> None:
    one, other = (struct.unpack(">d", bytes.fromhex(bits))[0] for bits in pair.split())
    _fill(world, 10, "k", "float64", [(one, 1, 1), (other, 2, 1), (7.0, 3, 1)])
    world.merge(9, "t")
    _fill(world, 20, "k", "float64", [(other, 2, -1)])
    with duckdb.connect() as connection:
        view = world.cluster.table("t").to_duckdb(connection)
        assert sorted(n for _, n in view.fetchall()) == [1, 3]


def test_filters_and_aggregates_over_a_key_that_is_nan_answer_as_over_a_copy(world: World) -> None:
    """A part's statistics ignore NaN, which is the greatest value of a column."""
    _fill(world, 10, "k", "float64", [(float(n), n, 1) for n in range(3000)] + [(math.nan, 9, 1)])
    world.merge(9, "t")
    with duckdb.connect() as connection:
        world.cluster.table("t").to_duckdb(connection, "t")
        connection.execute("CREATE TEMP TABLE copied AS SELECT * FROM t")
        for asked in ("count(*) FROM {} WHERE k > 1e9", "max(k) FROM {}", "count(*) FROM {} WHERE k < 5",
                      "count(*) FROM {} WHERE k = 'nan'::DOUBLE", "count(*) FROM {} WHERE isnan(k)"):  # fmt: skip
            here, there = (connection.sql(f"SELECT {asked.format(name)}").fetchall() for name in ("t", "copied"))
            assert str(here) == str(there), asked
        assert connection.sql("SELECT count(*) FROM t WHERE k > 1e9").fetchall() == [(1,)]


def _fill(world: World, upper: int, key: str, kind: str, rows: list[tuple[Any, int, int]]) -> None:
    """(key, n, diff)"""
    schema = ShardSchema((Column(key, kind), Column("n", "int64")), (key,))

    async def append() -> None:
        shard = await world.stores.shard("t", schema)
        keys, numbers, diffs = zip(*rows, strict=True)
        found = {key: keys, "n": numbers, "_time": [upper - 1] * len(rows), "_diff": diffs}
        await shard.compare_and_append(upper - 10, upper, [await shard.write_part(pa.table(found))], "")
        await shard.aclose()

    world.portal.call(append())


def test_names_that_differ_by_case_alone_are_refused(world: World) -> None:
    world.append(10, [(1, "a", 1)], "Orders")
    world.append(10, [(2, "b", 1)], "orders")
    hidden = ShardSchema((Column("id", "int64"), Column("_TIME", "int64")), ("id",))
    world.portal.call(_hidden(world, hidden))
    with duckdb.connect() as connection:
        with pytest.raises(InvalidError, match="DuckDB cannot distinguish two tables: names=Orders,orders"):
            world.cluster.to_duckdb(connection, ["Orders", "orders"])
        with pytest.raises(InvalidError, match="columns=_TIME,_time"):
            world.cluster.table("hidden").to_duckdb(connection)


async def _hidden(world: World, schema: ShardSchema) -> None:
    await (await world.stores.shard("hidden", schema)).aclose()


def test_a_view_that_cannot_be_replaced_stays_what_it_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    with duckdb.connect() as connection:
        orders.to_duckdb(connection, as_of=19)
        before = connection.sql("SELECT * FROM orders ORDER BY id").fetchall()
        world.append(40, [(300, None, -1), (1, "new", 1)])
        for said in ("_create_view", "plan_parts"):
            with monkeypatch.context() as patched:
                patched.setattr(
                    duckdb_views, said, lambda *_: (_ for _ in ()).throw(UnavailableError("the bucket is away."))
                )
                with pytest.raises(UnavailableError):
                    orders.to_duckdb(connection)
            assert connection.sql("SELECT * FROM orders ORDER BY id").fetchall() == before
            gc.collect()
            assert len(world.holds()) == 1, "its own"
        ours = "SELECT view_name FROM duckdb_views() WHERE view_name LIKE 'tidemill %'"
        for _ in range(3):
            orders.to_duckdb(connection)
            assert len(connection.sql(ours).fetchall()) <= 2, "what the last view read is let go"
        gc.collect()
        assert len(world.holds()) == 1


def test_a_connection_that_is_collected_on_the_loop_of_its_cluster_harms_nobody(world: World) -> None:
    filled(world)

    class App:
        def __init__(self) -> None:
            self.me, self.connection = self, duckdb.connect()
            world.cluster.table("orders").to_duckdb(self.connection)

    app = App()
    assert world.holds() != []
    del app

    async def collected() -> None:
        gc.collect()

    world.portal.call(collected(), 30)
    world.portal.call(until_let_go(world), 30)
