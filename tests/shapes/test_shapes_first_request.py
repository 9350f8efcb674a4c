"""A table is served at its first request, with any name and immediately after its creation. DROP ends its shapes, and
dropped tables leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import Client, ShapeWorld
from support.waiting import until
from tidemill.metastore.catalogue import TopicRow
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE first (id int PRIMARY KEY)"
NAMES = (
    ("public", 'a "quoted" one'),
    ("public", "dots.in.it"),
    ("public", "dots_x2ein_x2eit"),
    ("public", "Upper And Space"),
    ("public", "upper and space"),
    ("public", "n" * 63),
    ("public", "naïve ☃ 表"),
    ("public", "slash/amp&eq=plus+pct%20"),
    ("Sch.\"ema", "t:able"),
    ("shard", "not_a_shard"),
)  # fmt: skip


class Patient(RealWorld):
    """A world in which polling finds no table."""

    table_poll_s = 600.0
    tables = ("*", "shard.*", '"Sch.""ema".*')


def quoted(*parts: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


async def test_a_table_that_was_made_a_moment_ago_is_served_at_its_first_request_whatever_its_name(
    postgres_dsn: str,
) -> None:
    async with Patient(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        for number, (schema, table) in enumerate(NAMES):
            await world.db.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")
            await world.db.execute(f"CREATE TABLE {quoted(schema, table)} (id int PRIMARY KEY, v text)")
            await world.db.execute(f"INSERT INTO {quoted(schema, table)} VALUES (1, 'row of {number}')")
        clients = await asyncio.gather(*(world.sync(table=quoted(*name)) for name in NAMES))
        for number, client in enumerate(clients):
            assert [row["v"] for row in client.rows.values()] == [f"row of {number}"]
            await world.db.execute(f"UPDATE {quoted(*NAMES[number])} SET v = 'later {number}'")
        for number, client in enumerate(clients):
            await client.follow_until(lambda n=number, c=client: _values(c) == [f"later {n}"])
            assert client.refetches == 0


async def test_a_request_that_comes_before_the_capture_knows_its_tables_waits_for_it(postgres_dsn: str) -> None:
    async with Patient(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        assert not world.capture.streaming
        answer = await world.get(table="first", offset="-1")
        assert answer.status == 200, answer.body


async def test_a_table_that_is_not_there_is_refused_by_one_look_for_all_who_ask(postgres_dsn: str) -> None:
    async with Patient(postgres_dsn, DDL) as world:
        await until(lambda: world.capture.streaming)
        await world.db.execute("CREATE TABLE keyless (v text)")
        looks = _count_looks(world)
        names = [f"absent_{n}" for n in range(40)]
        *answers, keyless = await asyncio.gather(*(world.get(table=name, offset="-1") for name in [*names, "keyless"]))
        assert {answer.status for answer in answers} == {400}
        assert all(answer.json["errors"].keys() == {"table"} for answer in answers)
        assert keyless.status == 503 and "needs a primary key" in keyless.body.decode(), keyless.body
        assert looks() < 20, "requests come over six threads, and whoever is in time shares a look"


async def test_a_table_made_anew_under_its_name_is_409_to_who_has_the_old_rows_and_never_shows_them_again(
    postgres_dsn: str,
) -> None:
    async with Patient(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        await world.db.execute("CREATE TABLE again (id int PRIMARY KEY, v text); INSERT INTO again VALUES (1, 'old')")
        client = await world.sync(table="again")
        await world.db.execute("DROP TABLE again")
        await world.db.execute("CREATE TABLE again (id int PRIMARY KEY, v text); INSERT INTO again VALUES (2, 'new')")
        # Another shape of that name reads the rows of the new table and reports it to the capture, which then checks.
        await until(lambda: _status(world, table="again", where="id > 0", offset="-1", wanted=200))
        fresh = await world.sync(table="again", where="id > 0")
        assert _values(fresh) == ["new"]
        await client.follow_until(lambda: _values(client) == ["new"])
        assert client.refetches >= 1
        assert [i["value"] for i in client.seen if i["headers"]["operation"] != "delete"].count(
            {"id": "1", "v": "old"}
        ) == 1


MADE = "CREATE TABLE made (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)"


@pytest.mark.parametrize("carried", [True, False])
async def test_a_mistake_is_400_beside_generated_columns_and_a_column_that_was_just_added_503(
    carried: bool, postgres_dsn: str
) -> None:
    """Stored ones are carried where they are published, by PostgreSQL 18 and later."""
    async with ShapeWorld(postgres_dsn, MADE) as world:
        if not carried:
            world.relations = {
                oid: msgspec.structs.replace(each, columns=tuple(c for c in each.columns if c.name != "g"))
                for oid, each in world.relations.items()
            }
        for _ in range(2):
            answer = await world.get(table="made", where="nope = 1", offset="-1")
            assert answer.status == 400, answer.body
        await world.db.execute("ALTER TABLE made ADD COLUMN extra int")
        assert (await world.get(table="made", where="extra = 1", offset="-1")).status == 503
        world.learn()
        assert (await world.get(table="made", where="extra = 1", offset="-1")).status == 200


class Eager(RealWorld):
    table_poll_s = 0.2


async def test_many_tables_that_come_are_asked_for_and_go_leave_nothing_behind(postgres_dsn: str) -> None:
    async with Eager(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        await world.sync(table="first")

        async def churn(round_: int, count: int) -> None:
            names = [f"Come and Go {round_}.{n}" for n in range(count)]
            for name in names:
                await world.db.execute(f"CREATE TABLE {quoted(name)} (id int PRIMARY KEY)")
                await world.db.execute(f"INSERT INTO {quoted(name)} VALUES (1)")
            clients = await asyncio.gather(*(world.sync(table=quoted(name)) for name in names))
            assert all(len(client.rows) == 1 for client in clients)
            for name in names:
                await world.db.execute(f"DROP TABLE {quoted(name)}")
            await until(lambda: len(world.service.shapes()) == 1)
            await until(lambda: _captured(world, 1))

        await churn(0, 5)
        before = await _left(world)
        for round_ in range(1, 3):
            await churn(round_, 40)
        try:
            await until(lambda: _not_more(world, before))
        except AssertionError:
            assert await _left(world) == before


async def _not_more(world: RealWorld, before: dict[str, int]) -> bool:
    return all(count <= before[name] for name, count in (await _left(world)).items())


def _values(client: Client) -> list[str]:
    return sorted(row["v"] for row in client.rows.values())


async def _status(world: ShapeWorld, wanted: int, **params: str) -> bool:
    return (await world.get(**params)).status == wanted


def _count_looks(world: RealWorld) -> Callable[[], int]:
    session = world.capture._session
    assert session is not None
    joining = session.adder
    assert joining is not None
    whole, found = joining._find_tables_to_add, []

    async def counted(tables: Any) -> Any:
        found.append(1)
        return await whole(tables)

    joining._find_tables_to_add = counted  # type: ignore[method-assign]
    return lambda: len(found)


async def _captured(world: RealWorld, count: int) -> bool:
    return len(await world.catalogue.all_tables()) == count


async def _left(world: RealWorld) -> dict[str, int]:
    """Return the sizes of all structures in which an existing table leaves a trace."""
    service, capture = world.service, world.capture
    session = capture._session
    assert session is not None
    joining = session.adder
    assert joining is not None
    database = service._tables._databases[capture.config.name]
    slots = await (await world.db.execute("SELECT count(*) FROM pg_publication_tables")).fetchall()
    return {
        "catalogue rows": len(await world.catalogue.all_tables()),
        "topics": len(await world.catalogue.list(TopicRow)),
        "published": slots[0][0],
        "rows of the desk": len(capture._states.rows),
        "relations": len(capture.relations()),
        "marks of tables": len([m for m in world.tracker.report("p", 0).marks if m.name.startswith("table:")]),
        "shapes": len(service.shapes()),
        "consumers": len(service._tables._consumers),
        "runners": len(service._live._runners),
        "descriptions": len(database.infos),
        "memory": service.budget.used_bytes,
        "digests": len(joining.watcher._digests),
        "plans": len(service._live.plans),
        "tasks": len(asyncio.all_tasks()),
    }
