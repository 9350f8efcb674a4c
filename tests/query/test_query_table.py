"""`tidemill.connect`: a table at one time as Arrow and Polars, on every kind of store, despite concurrent writes."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidemill
from support.query.world import ORDERS, World, filled, make_consensus, rows_of, until_let_go
from tidemill.base.errors import ClosedError, InvalidError, MissingError, UnavailableError
from tidemill.shards.api import Column, HistoryLostError, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema_evolution import SchemaChanges


def test_every_way_of_reading_gives_the_contents_at_that_time(everywhere: World) -> None:
    filled(everywhere)
    assert everywhere.cluster.tables() == ["orders"]
    orders = everywhere.cluster.table("orders")
    assert (orders.name, orders.key, tuple(orders.frontiers())) == ("orders", ("id",), (19, 30))
    assert orders.schema == pa.schema({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(12, 2)})
    now = orders.to_arrow()
    assert (now.schema, orders.count()) == (orders.schema, 300) and orders.count(as_of=19) == 300
    want = Counter({(i, "open", Decimal(i * 10)): 1 for i in range(300)})
    assert rows_of(orders.to_arrow(as_of=19)) == want
    del want[7, "open", Decimal(70)], want[8, "open", Decimal(80)]
    want |= Counter({(7, "paid", Decimal(70)): 1, (300, None, Decimal(3000)): 1})
    assert rows_of(now) == want
    with orders.to_batches(["status"]) as reader:
        assert reader.schema.names == ["status"] and len(everywhere.holds()) == 1
        assert Counter(reader.read_all().column("status").to_pylist()) == Counter({"open": 298, "paid": 1, None: 1})
    assert everywhere.holds() == []
    assert orders.to_arrow(["total", "id"], [("id", "=", 7)]).to_pylist() == [{"total": Decimal(70), "id": 7}]
    assert orders.count([("id", "in", [7, 8, 9])]) == 2 == orders.count(pc.field("id").isin([7, 8, 9]))
    assert orders.to_arrow(["id"], (pc.field("status") == "paid") | (pc.field("total") > Decimal(2990))).num_rows == 2
    assert orders.count([[("status", "=", "paid")], [("id", "<", 3)]]) == 4
    assert orders.to_polars(["id"]).height == 300
    lazy = orders.scan_polars()
    assert lazy.filter(pl.col("status") == "paid").select("id", "total").collect().rows() == [(7, Decimal(70))]
    assert lazy.select(pl.len()).collect().item() == 300 and lazy.head(3).collect().height == 3
    assert len(everywhere.holds()) == 1
    del lazy
    gc.collect()
    assert everywhere.portal.call(until_let_go(everywhere)) == []
    (changed,) = orders.changes(19)
    assert Counter(zip(*(changed.column(n).to_pylist() for n in ("id", "_time", "_diff")), strict=True)) == Counter(
        [(7, 29, -1), (7, 29, 1), (8, 29, -1), (300, 29, 1)]
    )
    assert list(orders.changes(29)) == [] and everywhere.holds() == []


def test_what_a_stream_reads_stays_though_it_is_merged_and_collected_after_each_choice(
    everywhere: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: a reader that chose parts before its hold would find objects deleted."""
    everywhere.append(10, [(i, "open", 1) for i in range(200)])
    everywhere.append(20, [(i, "open", 1) for i in range(200, 400)])
    orders, real = everywhere.cluster.table("orders"), LogShard.batches_until
    written = [20]

    async def then_everything_moves(shard: LogShard, *more: Any) -> Any:
        chosen = await real(shard, *more)
        monkeypatch.setattr(LogShard, "batches_until", real)
        await _everything_moves(everywhere, written, 19)
        monkeypatch.setattr(LogShard, "batches_until", then_everything_moves)
        return chosen

    monkeypatch.setattr(LogShard, "batches_until", then_everything_moves)
    reader = orders.to_batches(as_of=19)
    monkeypatch.setattr(LogShard, "batches_until", real)
    found = [reader.read_next_batch()]
    everywhere.portal.call(_everything_moves(everywhere, written, written[-1]))
    found += list(reader)
    assert sorted(pa.Table.from_batches(found).column("id").to_pylist()) == list(range(400))
    assert orders.count() == 400 - len(written) + 1
    assert everywhere.holds() == []
    everywhere.merge(written[-1] - 1)
    with pytest.raises(HistoryLostError, match="history is lost"):
        orders.to_arrow(as_of=19)


async def _everything_moves(world: World, written: list[int], since: int) -> None:
    """A writer appends. The maintenance job moves since as far as holds permit, merges, and deletes unreferenced
    objects."""
    from support.query.world import updates
    from tidemill.base.clock import Rand, SystemClock
    from tidemill.maintenance.shards.upkeep import collect_garbage
    from tidemill.shards.compaction.compaction import compact_once

    shard = await world.stores.shard("orders")
    lower, upper = (await shard.frontiers())[1], written[-1] + 10
    part = await shard.write_part(updates([(len(written), "open", -1)], upper - 1))
    await shard.compare_and_append(lower, upper, [part], "")
    written.append(upper)
    await shard.downgrade_since("keeper", 1, since)
    while await compact_once(shard, world.stores.objects, Rand()) is not None:
        pass
    await collect_garbage(shard, world.stores.objects, SystemClock(), after_ms=-1, persisted=1 << 60)
    await shard.aclose()


def test_a_stream_that_is_forgotten_lets_go(world: World) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    begun, never = orders.to_batches(), orders.to_batches(as_of=19)
    begun.read_next_batch()
    assert len(world.holds()) == 2
    del begun, never
    gc.collect()
    assert world.portal.call(until_let_go(world)) == []


def test_changes_that_are_followed_come_as_they_are_written_and_hold_what_is_to_come(world: World) -> None:
    world.append(10, [(1, "open", 1)])
    orders = world.cluster.table("orders")
    following = orders.changes("latest", follow=True)
    world.append(20, [(2, "open", 1)])
    assert next(following).column("id").to_pylist() == [2]
    world.append(30, [(3, "open", 1)])
    world.append(40, [])
    world.append(50, [(3, "open", -1)])
    world.merge(49)
    later = next(following)  # one table, because the parts were merged in between
    assert list(zip(later.column("_diff").to_pylist(), later.column("_time").to_pylist(), strict=True)) == [
        (1, 29), (-1, 49),
    ]  # fmt: skip
    following.close()
    assert world.holds() == []
    world.merge(49)
    with pytest.raises(HistoryLostError):
        next(orders.changes(10))


def test_a_row_that_repeats_is_counted_as_often_as_it_is_there(world: World) -> None:
    keyless = ShardSchema(ORDERS.columns, ())
    world.append(10, [(1, "a", 2), (2, "b", 1)], "events", keyless)
    world.append(20, [(1, "a", -1)], "events", keyless)
    events = world.cluster.table("events")
    assert (events.key, events.count(), events.count(as_of=9), events.to_arrow(["id"]).num_rows) == ((), 2, 3, 2)
    assert Counter(events.to_arrow(["status"], as_of=9).column("status").to_pylist()) == Counter("aab")


def test_a_table_that_gained_a_column_has_it_at_every_time(world: World) -> None:
    filled(world)
    orders = world.cluster.table("orders")

    async def evolve() -> None:
        shard = await world.stores.shard("orders")
        await shard.evolve(SchemaChanges((Column("note", "string", "none"),)))
        await shard.aclose()

    world.portal.call(evolve())
    assert orders.to_arrow(["note"], [("id", "<", 3)], as_of=19).to_pylist() == [{"note": "none"}] * 3
    assert orders.schema.names[-1] == "note"


def test_a_lazy_frame_keeps_the_columns_that_it_began_with(world: World) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    lazy = orders.scan_polars()
    began, before = lazy.collect_schema(), lazy.sort("id").collect()

    async def evolve() -> None:
        shard = await world.stores.shard("orders")
        await shard.evolve(SchemaChanges((Column("note", "string"),), (Column("total", "decimal(20,2)"),)))
        await shard.aclose()

    world.portal.call(evolve())
    assert orders.count() and orders.schema.names[-1] == "note"
    again = lazy.sort("id").collect()
    assert again.schema == began == before.schema and again.equals(before)
    assert lazy.filter(pl.col("total") > 20).select("id").collect().height == before.height - 3


def test_an_empty_table_and_one_that_was_never_written(world: World) -> None:
    world.portal.call(_made(world, "new"))
    new = world.cluster.table("new")
    assert (new.count(), new.to_arrow().num_rows, new.to_arrow().schema) == (0, 0, new.schema)
    assert (new.to_polars().height, new.scan_polars().collect().height, list(new.changes("latest"))) == (0, 0, [])
    assert list(new.to_batches()) == []
    world.append(10, [(1, "a", 1)], "emptied")
    world.append(20, [(1, "a", -1)], "emptied")
    emptied = world.cluster.table("emptied")
    assert (emptied.count(), emptied.count([("id", "=", 1)]), emptied.to_arrow(["id"]).num_rows) == (0, 0, 0)
    assert world.holds("emptied") == world.holds("new") == []


async def _made(world: World, name: str) -> None:
    await (await world.stores.shard(name, ORDERS)).aclose()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"columns": ["idd"]}, r"no such column: table=orders column=idd\. Did you mean id\?"),
        ({"columns": "id"}, "columns must be a list of distinct names"),
        ({"columns": []}, "columns must be a list of distinct names"),
        ({"columns": ["id", "id"]}, "columns must be a list of distinct names"),
        ({"where": [("idd", "=", 1)]}, "the filter cannot be applied"),
        ({"where": [("id", "like", 1)]}, "the filter cannot be applied"),
        ({"where": [("id", "=", "seven")]}, "the filter cannot be applied"),
        ({"where": pc.field("id") + 1}, "the filter cannot be applied"),
        ({"where": "id = 1"}, "the filter cannot be applied"),
        ({"where": pc.field(0) == 1}, "it names a column by its position"),
        ({"where": [("id", "in", 7)]}, "the filter cannot be applied"),
        ({"as_of": date(2026, 11, 22)}, "as_of is not a time"),
        ({"as_of": 9.0}, "as_of is not a time"),
        ({"as_of": True}, "as_of is not a time"),
        ({"where": 7}, "the filter cannot be applied"),
        ({"as_of": "yesterday"}, "as_of is not a time"),
        ({"as_of": -5}, "history is lost"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_held(world: World, arguments: dict[str, Any], said: str) -> None:
    world.append(10, [(1, "a", 1)])
    with pytest.raises(InvalidError, match=said):
        world.cluster.table("orders").to_batches(**arguments)
    assert world.holds() == []


def test_filters_as_pyarrow_takes_them(world: World) -> None:
    world.append(10, [(n, 'FieldPath("', 1) for n in range(5)])
    orders = world.cluster.table("orders")
    assert orders.count((("id", "=", 1),)) == 1
    assert orders.count(((("id", "=", 1),), (("id", "=", 2),))) == 2  # type: ignore[arg-type]
    assert orders.count([("id", "in", (1, 2, 9))]) == 2
    with pytest.raises(InvalidError, match="must be a list"):
        orders.count([("id", "in", (n for n in (1, 2, 9)))])
    assert orders.count(pc.field("status") == 'FieldPath("') == 5


def test_a_time_that_is_not_final_is_waited_for_as_long_as_said(world: World) -> None:
    world.append(10, [(1, "a", 1)])
    orders = world.cluster.table("orders")
    with pytest.raises(UnavailableError, match="time is not final yet"):
        orders.count(as_of=15, wait_s=0)
    reading = world.portal.call(_soon(orders, world))
    assert reading == 1


async def _soon(orders: tidemill.Table, world: World) -> int:
    """Asked before it is written."""
    import asyncio

    asked = asyncio.to_thread(orders.count, as_of=15)
    waiting = asyncio.gather(asked, asyncio.to_thread(world.append, 20, [(1, "a", -1), (1, "b", 1)]))
    return (await waiting)[0]


def test_which_cluster_is_meant_and_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidError, match="there is no cluster here"):
        tidemill.connect()
    with pytest.raises(InvalidError, match="no such configuration file"):
        tidemill.connect("nothing.toml")
    (tmp_path / "tidemill.toml").write_text('[node]\ndata = "here"\n')
    make_consensus(f"sqlite://{tmp_path}/here/consensus.db")
    with tidemill.connect() as cluster:
        assert cluster.tables() == []
        with pytest.raises(MissingError, match="no such table: table=orders"):
            cluster.table("orders")
        with pytest.raises(InvalidError, match="bad table name"):
            cluster.table("a b")
    with pytest.raises(ClosedError):
        cluster.tables()
    cluster.close()
    assert "closed" in repr(cluster)


def test_it_needs_neither_spark_nor_polars(world: World, tmp_path: Path) -> None:
    """Run an interpreter in which these modules cannot be imported. It exits with a stream open."""
    filled(world)
    program = f"""
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name in ("pyspark", "polars", "pandas", "py4j"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import tidemill
from tidemill.base.errors import TidemillError
cluster = tidemill.connect({str(tmp_path / "tidemill.toml")!r})
orders = cluster.table("orders")
stream = orders.to_batches()
stream.read_next_batch()
print(orders.count(), orders.to_arrow(where=[("id", "=", 7)]).to_pylist()[0]["status"])
try:
    orders.to_polars()
except TidemillError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "300 paid", "polars is not installed. Install it: pip install 'tidemill[polars]'",
    ], done.stderr  # fmt: skip
    assert done.returncode == 0 and world.portal.call(until_let_go(world)) == []


@pytest.mark.parametrize(
    "where",
    [
        [("id", "=", 2**70)],
        [("id", "in", [1, -(2**70)])],
        pc.divide(pc.field("id"), 0) == 1,
        pc.divide(pc.scalar(1), pc.field("id")) == 1,
        pc.match_substring_regex(pc.field("status"), "("),
        pc.field("status").cast(pa.int64()) == 1,
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_evaluated_is_invalid_for_every_reader(world: World, where: Any) -> None:
    filled(world)
    orders = world.cluster.table("orders")
    for read in (orders.to_arrow, orders.to_polars):
        with pytest.raises(InvalidError, match="the filter cannot be"):
            read(["id"], where)
    with pytest.raises(InvalidError, match="the filter cannot be"):
        orders.count(where)
    with pytest.raises(InvalidError, match="the filter cannot be"):
        orders.to_batches(None, where).read_all()
    assert world.holds() == [] and orders.count() == 300
