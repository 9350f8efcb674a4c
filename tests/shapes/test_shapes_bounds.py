"""Bounds of shapes: places, memory, backlog, time on the loop. Tests of requests refused, shapes ended, and others
unaffected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.shapes.fake_shard import FakeShard
from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.errors import InvalidError, MissingError
from tidemill.shapes import LogLimits, ShapeSettings
from tidemill.shapes.definition.definition import SHAPE_BYTES
from tidemill.shapes.definition.plan_cache import INVALID_S, RejectionCache
from tidemill.shapes.tables.backlog import BacklogLimits
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shards.api import Column, ShardSchema

pytestmark = pytest.mark.postgres

DDL = """
CREATE TABLE item (id int PRIMARY KEY, grp int NOT NULL, name text, weight numeric);
INSERT INTO item SELECT n, n % 10, 'n' || n, 1 FROM generate_series(1, 100) n;
"""


class Panic(BaseException):
    """An exception like those of native code, which are no subclasses of Exception."""


async def follow(world: ShapeWorld, **params: str) -> dict[str, str]:
    client = await world.sync(table="item", **params)
    return {"table": "item", **params, "offset": client.offset, "handle": client.handle, "live": "true"}


async def insert(world: ShapeWorld, key: int, weight: str = "1") -> None:
    await world.db.execute(f"INSERT INTO item VALUES ({key}, {key % 10}, 'new', {weight})")  # type: ignore[arg-type]


async def test_f101_a_clause_that_fails_on_a_row_ends_its_shape_with_400_and_nothing_else(postgres_dsn: str) -> None:
    """PostgreSQL, which is asked before, fails on the same values. Otherwise the client would refetch forever."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        healthy = await world.sync(table="item")
        for key, where, weight in ((201, "1 / weight > 0", "0"), (202, "weight::int > 1", "1e12")):
            poll = asyncio.ensure_future(world.get(**await follow(world, where=where)))
            await until(lambda: any(s["waiting"] for s in world.service.shapes()))
            await insert(world, key, weight)
            answer = await poll
            assert answer.status == 400, answer.body
            assert "failed on a row" in answer.json["errors"]["where"][0]
            again = await world.get(table="item", where=where, offset="-1")
            assert again.status == 400
            await world.db.execute(f"DELETE FROM item WHERE id = {key}")  # type: ignore[arg-type]
        at_once = await world.get(table="item", where="1e30000/id > 0", offset="-1")
        assert at_once.status == 400
        await insert(world, 300)
        await healthy.follow_until(lambda: '"public"."item"/"300"' in healthy.rows)
        assert healthy.refetches == 0
        assert [s["where"] for s in world.service.shapes()] == [""]
        assert world.service.facts()["refused"] == 2
        assert not [m for m in world.tracker.report("p", 0).marks if m.error], "a bad clause is no trouble of ours"


@pytest.mark.parametrize("fault", [RuntimeError("x"), RecursionError(), MemoryError(), Panic("native")])
async def test_f102_whatever_evaluation_raises_ends_that_shape_only_and_is_told(
    postgres_dsn: str, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TableConsumer.evaluate

    def evaluate(self: TableConsumer, turn: Any) -> bool:
        if self.shape.definition.where:
            raise fault
        return real(self, turn)

    async with ShapeWorld(postgres_dsn, DDL) as world:
        healthy = await world.sync(table="item")
        poll = asyncio.ensure_future(world.get(**await follow(world, where="id > 0")))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        monkeypatch.setattr(TableConsumer, "evaluate", evaluate)
        await insert(world, 201)
        assert (await poll).status == 503
        await healthy.follow_until(lambda: '"public"."item"/"201"' in healthy.rows)
        assert healthy.refetches == 0
        (failed,) = [m for m in world.tracker.report("p", 0).marks if m.name.startswith("shape:")]
        assert type(fault).__name__ in failed.error
        monkeypatch.undo()


SCHEMA = ShardSchema((Column("id", "int32"), Column("v", "string")), ("id",))


@pytest.mark.parametrize("fault", [RuntimeError("x"), Panic("native"), asyncio.CancelledError()])
async def test_f103_a_feed_over_a_shard_that_fails_ends_its_shape_and_is_told(
    postgres_dsn: str, fault: BaseException
) -> None:
    """The shape must never stay live with stale rows."""

    class Failing(FakeShard):
        armed = False

        async def frontiers(self, *, fresh: bool = True) -> tuple[int, int]:
            return await super().frontiers(fresh=fresh)

        async def listen(self, lower: int) -> Any:
            async for delta in super().listen(lower):
                if self.armed:
                    raise fault
                yield delta

    shard, other = Failing("s", SCHEMA), FakeShard("t", SCHEMA)

    async def opener(name: str) -> FakeShard:
        return shard if name == "s" else other

    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=20), shards=opener) as world:
        for each in (shard, other):
            await each.append(1000, (10, 1, {"id": 1, "v": "a"}))
        healthy = await world.sync(table="shard.t")
        client = await world.sync(table="shard.s")
        params = {"table": "shard.s", "offset": client.offset, "handle": client.handle, "live": "true"}
        poll = asyncio.ensure_future(world.get(**params))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        shard.armed = True
        await shard.append(2000, (1500, 1, {"id": 2, "v": "b"}))
        assert (await poll).status == 503
        assert [s["source"] for s in world.service.shapes()] == ["shard:t"]
        assert [m.error for m in world.tracker.report("p", 0).marks if m.name.startswith("shape:")]
        await other.append(2000, (1500, 1, {"id": 2, "v": "b"}))
        await healthy.follow_until(lambda: len(healthy.rows) == 2)
        assert healthy.refetches == 0

        def reported() -> list[str]:
            return [m.error for m in world.tracker.report("p", 0).marks if m.name.startswith("shape:")]

        assert reported()
        shard.armed = False
        await until(lambda: _served(world, table="shard.s"))
        await until(lambda: not reported())  # the mark disappears once the same shape is served again


async def test_a_shape_that_has_its_rows_is_not_told_as_loading(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes over a shard must be covered: their loading task continues to follow the shard."""
    monkeypatch.setattr("tidemill.shapes.reporting.LOADING_SHOWN_S", 1.0)
    shard = FakeShard("s", SCHEMA)

    async def opener(name: str) -> FakeShard:
        return shard

    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(), shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}))
        for table in ("shard.s", "item"):
            await world.sync(table=table)

        def said() -> list[str]:
            return [m.reason for m in world.tracker.report("p", 0).marks if " of them loading" in m.reason]

        await until(lambda: len(said()) == 2 and all("1 shapes, 0 of them" in reason for reason in said()))
        await asyncio.sleep(2.5)  # two more intervals of reporting
        assert not [m for m in world.tracker.report("p", 0).marks if m.name.startswith("shape:")]


async def _served(world: ShapeWorld, **params: str) -> bool:
    return (await world.get(offset="-1", **params)).status == 200


async def test_a_clause_that_fails_on_a_row_of_a_shard_is_400_at_first_and_later(postgres_dsn: str) -> None:
    shard = FakeShard("s", SCHEMA)

    async def opener(name: str) -> FakeShard:
        return shard

    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=20), shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}))
        assert (await world.get(table="shard.s", where="1 / (id - 1) > 0", offset="-1")).status == 400
        client = await world.sync(table="shard.s", where="1 / (id - 2) < 5")
        params = {**client.params, "offset": client.offset, "handle": client.handle, "live": "true"}
        poll = asyncio.ensure_future(world.get(**params))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        await shard.append(2000, (1500, 1, {"id": 2, "v": "b"}))
        answer = await poll
        assert answer.status == 400, answer.body
        assert "division by zero" in answer.json["errors"]["where"][0]


@pytest.mark.parametrize("where", ["weight::int > 0", "weight::float8 > 0", "weight + 1e-9000 > 0 AND weight * 0 = 0"])
async def test_a_clause_that_the_database_refuses_on_a_row_is_a_bad_request(postgres_dsn: str, where: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        await world.db.execute("INSERT INTO item VALUES (500, 0, 'n', 'NaN'), (501, 0, 'n', 1e1000)")
        answer = await world.get(table="item", offset="-1", where=where)
        assert answer.status in (200, 400), answer.body
        assert answer.status == 400 or "0 = 0" in where


async def test_f104_a_shape_too_many_is_refused_and_none_in_use_ends_for_it(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(max_shapes=3, idle_s=1.0)) as world:
        handles = [(await world.get(table="item", offset="-1", where=f"id = {n}")).handle for n in range(3)]
        refused = await world.get(table="item", offset="-1", where="id = 3")
        assert refused.status == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "limit=3" in refused.json["message"]
        assert {str(s["handle"]) for s in world.service.shapes()} == set(handles)

        async def refreshed() -> bool:
            """Request two shapes repeatedly, so that only the third becomes idle."""
            for n in (0, 2):
                assert (await world.get(table="item", offset="-1", where=f"id = {n}")).handle == handles[n]
            return (await world.get(table="item", offset="-1", where="id = 3")).status == 200

        await until(refreshed)
        left = {str(s["handle"]) for s in world.service.shapes()}
        assert handles[0] in left and handles[2] in left and handles[1] not in left
        assert world.service.facts()["evicted_idle"] == 1


async def test_with_default_settings_memory_is_the_limit_and_ten_thousand_short_shapes_fit(postgres_dsn: str) -> None:
    settings = ShapeSettings()
    assert settings.memory_bytes < settings.max_shapes * SHAPE_BYTES
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        for n in range(3):
            assert (await world.get(table="item", offset="-1", where=f"id = {n}")).status == 200
        assert world.service.budget.used_bytes // 3 * 10_000 < settings.memory_bytes


async def test_f105_shapes_together_stay_within_their_memory_and_give_all_of_it_back(postgres_dsn: str) -> None:
    settings = ShapeSettings(memory_bytes=2 * SHAPE_BYTES + 25_000)
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        budget = world.service.budget
        one = await world.sync(table="item")
        refused = await world.get(table="item", offset="-1", where="id > 0")
        assert (refused.status, refused.headers["retry-after"]) == (503, "10")
        assert "have reached the memory limit" in refused.json["message"]
        assert budget.used_bytes <= budget.limit_bytes
        small = await world.sync(table="item", where="id < 3")
        await insert(world, 201)
        await one.follow_until(lambda: len(one.rows) == 101)
        assert one.refetches == 0
        await world.db.execute("UPDATE item SET name = repeat('x', 200)")
        await until(lambda: one.handle not in {s["handle"] for s in world.service.shapes()})
        assert budget.used_bytes <= budget.limit_bytes
        await small.follow_until(lambda: all(len(row["name"]) == 200 for row in small.rows.values()))
        assert small.refetches == 0
        for shape in list(world.service.shapes()):
            found = world.service.find_by_handle(str(shape["handle"]))
            assert found is not None
            world.service.delete(found)
        assert budget.used_bytes == 0


async def test_a_change_without_room_ends_the_shape_whose_log_has_grown_not_the_one_that_asks_last(
    postgres_dsn: str,
) -> None:
    """The budget is filled as if the evaluation of the large shape had paused just below the limit."""
    async with ShapeWorld(postgres_dsn, DDL) as world:
        budget = world.service.budget
        grown = await world.sync(table="item", where="id >= 3")
        small = await world.sync(table="item", where="id < 3")
        await insert(world, 201)
        await grown.follow_until(lambda: len(grown.rows) == 99)
        budget.reserve(budget.limit_bytes - budget.used_bytes - 100)
        await world.db.execute("UPDATE item SET name = 'x' WHERE id = 1")
        await small.follow_until(lambda: "x" in [row["name"] for row in small.rows.values()])
        assert small.refetches == 0
        assert grown.handle not in {s["handle"] for s in world.service.shapes()}


async def test_f106_a_shape_that_falls_behind_ends_and_the_stream_and_other_shapes_go_on(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change costs the expensive shape 20 ms; it gets half of the loop's time, and the others share the rest."""
    real = TableConsumer._convert_change

    def dear(self: TableConsumer, *arguments: Any) -> None:
        if "dear" in self.shape.definition.where:
            clock = world_clock[0]
            until_s = clock.monotonic_s() + 0.02
            while clock.monotonic_s() < until_s:
                pass
        real(self, *arguments)

    world_clock: list[Any] = []
    settings = ShapeSettings(backlog=BacklogLimits(age_s=1.0))
    async with ShapeWorld(postgres_dsn, DDL, settings, fragment_changes=20) as world:
        world_clock.append(world.service.clock)
        healthy = await world.sync(table="item")
        poll = asyncio.ensure_future(world.get(**await follow(world, where="name <> 'dear'")))
        monkeypatch.setattr(TableConsumer, "_convert_change", dear)
        await world.db.execute("INSERT INTO item SELECT n, 1, 'n', 1 FROM generate_series(1001, 1500) n")
        await healthy.follow_until(lambda: len(healthy.rows) == 600)
        assert healthy.refetches == 0
        assert (await poll).status == 409
        assert world.service.facts()["fell_behind"] == 1
        await until(lambda: world.sink.held_bytes == 0)
        monkeypatch.undo()


async def test_a_backlog_over_its_bytes_ends_who_holds_it(postgres_dsn: str) -> None:
    settings = ShapeSettings(backlog=BacklogLimits(size_bytes=100_000))
    async with ShapeWorld(postgres_dsn, DDL, settings, fragment_changes=10) as world:
        client = await world.sync(table="item")
        await world.db.execute("INSERT INTO item SELECT n, 1, 'n', 1 FROM generate_series(1001, 9000) n")
        await client.follow_until(lambda: len(client.rows) == 8100)
        assert world.sink.held_bytes == 0


async def test_a_transaction_larger_than_the_log_may_be_ends_the_shape_before_it_is_whole(postgres_dsn: str) -> None:
    settings = ShapeSettings(limits=LogLimits(log_bytes=50_000))
    async with ShapeWorld(postgres_dsn, DDL, settings, fragment_changes=20) as world:
        client = await world.sync(table="item", log="changes_only")
        async with world.db.transaction():
            await world.db.execute("INSERT INTO item SELECT n, 1, 'n', 1 FROM generate_series(1001, 2000) n")
        answer = await world.get(**client.params, offset=client.offset, handle=client.handle, live="true")
        assert answer.status == 409
        shape = world.service.find_by_handle(answer.handle)
        assert shape is not None
        await until(lambda: world.service.budget.used_bytes < 2 * SHAPE_BYTES)


async def test_a_shard_too_large_to_be_read_whole_is_refused_with_what_to_do(postgres_dsn: str) -> None:
    shard = FakeShard("s", SCHEMA)
    shard.stored_bytes = 1 << 30

    async def opener(name: str) -> FakeShard:
        return shard

    async with ShapeWorld(postgres_dsn, DDL, shards=opener) as world:
        await shard.append(1000, (10, 1, {"id": 1, "v": "a"}))
        answer = await world.get(table="shard.s", offset="-1")
        assert answer.status == 400
        assert "Derive a smaller table" in answer.json["errors"]["table"][0]


async def test_a_shard_that_was_dropped_ends_its_shapes_and_its_name_may_mean_another_at_once(
    postgres_dsn: str,
) -> None:
    class Dropped(FakeShard):
        async def listen(self, lower: int) -> Any:
            async for delta in super().listen(lower):
                if delta.upper >= 2000:
                    raise MissingError("no such shard: it was dropped.")
                yield delta

    shards: list[FakeShard] = [Dropped("s", SCHEMA)]
    opened = 0

    async def opener(name: str) -> FakeShard:
        nonlocal opened
        opened += 1
        return shards[-1]

    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=20), shards=opener) as world:
        await shards[0].append(1000, (10, 1, {"id": 1, "v": "a"}))
        client = await world.sync(table="shard.s")
        for n in range(20):
            await world.get(table="shard.s", offset="-1", where=f"id = {n}")
        assert opened == 1, "one handle serves all who ask within ten seconds"
        poll = asyncio.ensure_future(client.step(live=True))
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        shards.append(FakeShard("s", SCHEMA))
        await shards[1].append(5000, (10, 1, {"id": 7, "v": "new"}))
        await shards[0].append(2000)
        assert (await poll).status == 409
        assert opened == 2
        await client.follow_until(lambda: [row["id"] for row in client.rows.values()] == ["7"])


async def test_f107_shapes_of_a_table_that_is_not_captured_any_more_leave_memory_and_marks(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL + "CREATE TABLE other (id int PRIMARY KEY)") as world:
        poll = asyncio.ensure_future(world.get(**await follow(world, where="id > 0")))
        keeps = await world.sync(table="other")
        await until(lambda: any(s["waiting"] for s in world.service.shapes()))
        await until(lambda: [m.name for m in world.tracker.report("p", 0).marks] == ["shapes:main"])
        world.relations = {oid: r for oid, r in world.relations.items() if r.table != "item"}
        answer = await poll
        assert answer.status in (400, 409)
        assert (await world.get(table="item", offset="-1")).status == 400
        await until(lambda: [s["source"] for s in world.service.shapes()] == ["public.other"])
        await world.db.execute("INSERT INTO other VALUES (1)")
        await keeps.follow_until(lambda: len(keeps.rows) == 1)
        shape = world.service.find_by_handle(keeps.handle)
        assert shape is not None
        world.service.delete(shape)
        await until(lambda: not world.tracker.report("p", 0).marks)
        assert world.service.budget.used_bytes == 0


async def test_marks_do_not_grow_with_the_number_of_shapes(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        for n in range(60):
            assert (await world.get(table="item", offset="-1", where=f"id = {n}")).status == 200
        await until(lambda: [m.name for m in world.tracker.report("p", 0).marks] == ["shapes:main"])
        (mark,) = world.tracker.report("p", 0).marks
        await until(lambda: "60 shapes" in world.tracker.report("p", 0).marks[0].reason)
        assert mark.position == mark.target
        largest = world.service.facts()["largest"]
        assert isinstance(largest, list) and len(largest) == 5


def test_refusals_end_and_are_bounded() -> None:
    from tidemill.shapes.definition.definition import ShapeDefinition, Source

    refusals = RejectionCache()
    definitions = [ShapeDefinition(Source("table", "m", "s", "t"), f"id = {n}") for n in range(3_000)]
    for definition in definitions:
        refusals.add(definition, InvalidError("no"), 100.0)
    refusals.raise_if_rejected(definitions[0], 100.0)
    with pytest.raises(InvalidError):
        refusals.raise_if_rejected(definitions[-1], 100.0)
    refusals.raise_if_rejected(definitions[-1], 100.0 + INVALID_S)
    refusals.raise_if_rejected(definitions[-1], 100.0)
