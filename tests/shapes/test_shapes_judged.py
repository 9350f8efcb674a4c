"""Rows on which only our evaluator fails: PostgreSQL decides, and the shape continues."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from support.shapes.world import ShapeWorld
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.capture.changes import Relation
from tidemill.shapes import ShapeSettings
from tidemill.shapes.tables import remote_evaluation
from tidemill.shapes.tables.initial_snapshot import MAX_LOOKUPS, TableReplacedError

pytestmark = pytest.mark.postgres

DDL = """
CREATE TYPE size AS ENUM ('small', 'large');
CREATE TABLE item (id int PRIMARY KEY, weight numeric, size size, d date);
ALTER TABLE item REPLICA IDENTITY FULL;
INSERT INTO item VALUES (1, 1, 'large', '2024-01-01');
"""


async def test_f125_a_row_that_only_our_evaluator_refuses_is_asked_of_the_database(postgres_dsn: str) -> None:
    """The product has more digits than our evaluator computes. Later rows keep their order."""
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5)) as world:
        client = await world.sync(table="item", where="item.weight * 1e9000 > 10 AND id < 100")
        async with world.db.transaction():
            await world.db.execute("INSERT INTO item VALUES (2, 1e9000), (3, -1e9000), (4, 1), (101, 1e9000)")
            await world.db.execute("UPDATE item SET weight = 1e9001 WHERE id = 2")
            await world.db.execute("DELETE FROM item WHERE id = 4")
        await world.db.execute("INSERT INTO item VALUES (5, 2)")
        await client.follow_until(lambda: '"public"."item"/"5"' in client.rows)
        rows = await (
            await world.db.execute("SELECT id, weight::text FROM item WHERE weight * 1e9000 > 10 AND id < 100")
        ).fetchall()
        assert {row["id"]: row["weight"] for row in client.rows.values()} == {str(id): w for id, w in rows}
        assert {id for id, _ in rows} == {1, 2, 5}


async def test_enums_are_ordered_by_their_labels_also_by_one_that_came_later(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5)) as world:
        client = await world.sync(table="item", where="size >= 'large'")
        await world.db.execute("INSERT INTO item VALUES (2, 1, 'small'), (3, 1, 'large')")
        await world.db.execute("ALTER TYPE size ADD VALUE 'medium' BEFORE 'large'")
        await world.db.execute("ALTER TYPE size ADD VALUE 'huge'")
        await world.db.execute("INSERT INTO item VALUES (4, 1, 'medium'), (5, 1, 'huge'), (6, 1, 'large')")
        await client.follow_until(lambda: '"public"."item"/"6"' in client.rows)
        cursor = await world.db.execute("SELECT id::text FROM item WHERE size >= 'large'")
        assert {row["id"] for row in client.rows.values()} == {id for (id,) in await cursor.fetchall()}
        assert len(client.rows) == 4


async def test_a_shape_starts_over_with_the_labels_that_an_enum_has_got_and_asks_no_more(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[remote_evaluation.EvaluationRequest] = []

    async def counted(
        connection: Any, question: remote_evaluation.EvaluationRequest
    ) -> list[remote_evaluation.Verdict]:
        asked.append(question)
        return await judge(connection, question)

    judge = remote_evaluation.evaluate_rows
    monkeypatch.setattr(remote_evaluation, "evaluate_rows", counted)
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5)) as world:
        where = "size >= 'large' OR weight * 1e9000 < 0"
        client, other = await world.sync(table="item", where=where), await world.sync(table="item")
        await world.db.execute("ALTER TYPE size ADD VALUE 'medium' BEFORE 'large'")
        await world.db.execute("ALTER TYPE size ADD VALUE 'huge'")
        for id_ in range(2, 12):
            size = "medium" if id_ % 2 else "huge"
            await world.db.execute(f"INSERT INTO item VALUES ({id_}, 1, '{size}')")
        await client.follow_until(lambda: '"public"."item"/"10"' in client.rows)
        assert client.refetches == 1
        for id_ in range(12, 22):
            await world.db.execute(f"INSERT INTO item VALUES ({id_}, 1, 'huge')")
        await client.follow_until(lambda: '"public"."item"/"21"' in client.rows)
        assert {row["id"] for row in client.rows.values()} == {
            row[0] for row in await world.select("item", "size >= 'large'")
        }
        assert asked == [], "the look came first"
        await world.db.execute("INSERT INTO item VALUES (22, -1e9000, 'small'), (23, 1, 'large')")
        await client.follow_until(lambda: '"public"."item"/"23"' in client.rows)
        assert '"public"."item"/"22"' in client.rows
        assert len(asked) == 1 and client.refetches == 1, "no label is missing, so the shape stays"
        await other.catch_up()
        assert other.refetches == 0


async def test_questions_that_come_one_after_the_other_share_a_connection(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5)) as world:
        client = await world.sync(table="item", where="item.weight * 1e9000 > 10")
        connect, opened = psycopg.AsyncConnection.connect, list[str]()

        async def counted(*args: Any, **named: Any) -> Any:
            opened.append(named.get("application_name", ""))
            return await connect(*args, **named)

        monkeypatch.setattr(psycopg.AsyncConnection, "connect", counted)
        for id_ in range(2, 22):
            await world.db.execute(f"INSERT INTO item VALUES ({id_}, 1e9000)")
            await client.follow_until(lambda id_=id_: f'"public"."item"/"{id_}"' in client.rows)
        assert set(opened) == {"tidemill shapes"}
        assert len(opened) <= 5, "more than one where a second passes between two rows"


LETTERS = """
CREATE SCHEMA "Odd";
CREATE COLLATION "Odd"."Own" (provider = libc, locale = 'C');
CREATE TABLE letter (id int PRIMARY KEY, n numeric, a text COLLATE "C", b varchar(9) COLLATE "Odd"."Own", c text,
                     d name);
"""


async def test_a_question_is_asked_of_columns_with_their_own_collations(postgres_dsn: str) -> None:
    """Letters beyond ASCII have a single case in collation C, and two in that of the database."""
    async with ShapeWorld(postgres_dsn, LETTERS, ShapeSettings(long_poll_s=5)) as world:
        for column in "abcd":
            where = f"n * 1e9000 > 10 AND lower({column}) = 'É' OR id = 2"
            client = await world.sync(table="letter", where=where)
            await world.db.execute("INSERT INTO letter VALUES (1, 1e9000, 'É', 'É', 'É', 'É')")
            await world.db.execute("INSERT INTO letter VALUES (2, 1, 'x', 'x', 'x', 'x')")
            wanted = {row[0] for row in await world.select("letter", where)}
            assert wanted == ({"1", "2"} if column != "c" else {"2"})
            await client.follow_until(lambda client=client: '"public"."letter"/"2"' in client.rows)
            assert {row["id"] for row in client.rows.values()} == wanted, column
            await world.db.execute("DELETE FROM letter")


async def test_a_shape_whose_question_the_database_answers_with_an_error_ends(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=20)) as world:
        client = await world.sync(table="item", where="weight * 1e9000 > 10 OR 1 / id > 5")
        params = {"table": "item", "where": "weight * 1e9000 > 10 OR 1 / id > 5", "handle": client.handle}
        poll = asyncio.ensure_future(world.get(**params, offset=client.offset, live="true"))
        await until(lambda: any(shape["waiting"] for shape in world.service.shapes()))
        await world.db.execute("INSERT INTO item VALUES (0, -1)")
        answer = await poll
        assert answer.status == 400, answer.body
        assert "division by zero" in answer.json["errors"]["where"][0]


async def test_a_question_that_the_database_does_not_answer_holds_up_no_other(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do look-ups of the catalogue."""
    judge, blocked, answered = remote_evaluation.evaluate_rows, list[str](), list[str]()

    async def picky(connection: Any, question: remote_evaluation.EvaluationRequest) -> list[remote_evaluation.Verdict]:
        if question.where.sql in (blocked or [question.where.sql]):
            blocked.append(question.where.sql)
            raise UnavailableError("it takes too long.")
        answered.append(question.where.sql)
        return await judge(connection, question)

    monkeypatch.setattr(remote_evaluation, "evaluate_rows", picky)
    async with ShapeWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=5)) as world:
        for most in (100, 200, 300):
            await world.sync(table="item", where=f"item.weight * 1e9000 > 10 AND id < {most}")
        lookups = world.service._tables._databases["main"].source._lookups
        for _ in range(MAX_LOOKUPS):
            await lookups.acquire()
        await world.db.execute("INSERT INTO item VALUES (2, 1e9000)")
        await until(lambda: len(answered) == 2)
        assert blocked[0] not in answered


async def test_refusals_that_come_at_once_share_a_look_that_began_after_them(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        database = world.service._tables._databases["main"]
        (relation,) = world.relations.values()
        columns, looks, going = database.source.columns, list[int](), asyncio.Event()

        async def slow(of: Relation) -> dict[str, bool]:
            found = await columns(of)
            looks.append(len(found))
            await going.wait()
            return found

        database.source.columns = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(database.check_definition_current(relation, 0.0))
        await until(lambda: looks == [4])
        await world.db.execute("ALTER TABLE item ADD COLUMN later int")
        checks = [asyncio.ensure_future(database.check_definition_current(relation, 0.0)) for _ in range(40)]
        await asyncio.sleep(0)
        going.set()
        await first
        found = await asyncio.gather(*checks, return_exceptions=True)
        assert {type(each) for each in found} == {TableReplacedError}
        assert looks == [4, 5]
