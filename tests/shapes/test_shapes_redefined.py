"""Requests between a column change in the database and the moment when the capture notices it: 503, and served after
that.
"""

from __future__ import annotations

import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import Answer, ShapeWorld
from support.waiting import until
from tidemill.capture.tables import recopy_requests
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE t (id int PRIMARY KEY, v text, n int); INSERT INTO t VALUES (1, 'a', 5), (2, 'b', 6)"


class Late(RealWorld):
    """A world in which polling finds no change."""

    table_poll_s = 600.0


async def subset(world: ShapeWorld, where: str, **shape: str) -> Answer:
    return await world.post({"where": where, "order_by": "id"}, table="t", **shape)


def says_redefined(answer: Answer, column: str) -> bool:
    return (
        answer.status == 503 and "retry-after" in answer.headers and f"redefined: table=public.t columns={column}"
        in answer.json["message"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "column", "after"),
    [
        ("RENAME v TO v2", "v", "v2 = 'a'"),
        ("DROP v", "v", "n = 5"),
        ("ALTER n TYPE text", "n", "n = '5'"),
        ("ALTER n TYPE numeric(8,2)", "n", "n = 5"),
    ],
)
async def test_f128_a_changed_column_is_503_until_the_capture_has_noticed_and_no_400_is_remembered(
    postgres_dsn: str, change: str, column: str, after: str
) -> None:
    """Regression: PostgreSQL's message about the clause was a 400, for a minute."""
    async with Late(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t")
        await world.db.execute(f"ALTER TABLE t {change}")  # type: ignore[arg-type]
        asked = {"table": "t", "where": "n > 1" if column == "n" else "id > 0", "offset": "-1"}
        assert says_redefined(await world.get(**asked), column)

        async def paused() -> bool:
            rows = await world.catalogue.tables(world.capture.config.name)
            return [row.state for row in rows] == ["parked"]

        async def served(where: str) -> bool:
            world.capture.check_tables_soon()
            return (await world.get(table="t", where=where, offset="-1")).status == 200

        await until(paused, "the request made the capture look")
        await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, "public.t")
        await until(lambda: served(after), "the table is re-snapshotted")
        if column == "v":
            await until(lambda: served("id > 0"), "the same request is served, within seconds", 10.0)
        found = await world.sync(table="t", where=after)
        assert [row["id"] for row in found.rows.values()] == ["1"]
        await client.follow_until(lambda: len(client.rows) == 2 and client.refetches == 1)


async def test_f128_an_enum_that_was_replaced_under_its_name_is_noticed_without_a_row(postgres_dsn: str) -> None:
    """Regression: the capture compared the names of types, so such requests were 503 until the next row."""
    ddl = "CREATE TYPE status AS ENUM ('new', 'old'); CREATE TABLE t (id int PRIMARY KEY, s status)"
    async with RealWorld(postgres_dsn, f"{ddl}; INSERT INTO t VALUES (1, 'new')") as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t")
        await world.db.execute(
            "ALTER TYPE status RENAME TO status_old; CREATE TYPE status AS ENUM ('new', 'done');"
            " ALTER TABLE t ALTER s TYPE status USING s::text::status; DROP TYPE status_old"
        )

        async def served() -> bool:
            return (await world.get(table="t", where="s >= 'new' AND s < 'done'", offset="-1")).status == 200

        await until(served, "the table is re-snapshotted")
        await client.follow_until(lambda: client.refetches == 1 and len(client.rows) == 1)


async def test_f128_a_subset_needs_only_the_columns_that_it_uses(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        world.hold()
        await world.sync(table="t")
        await world.sync(table="t", columns="id,n")
        await world.db.execute("ALTER TABLE t RENAME v TO v2")
        await world.db.execute("ALTER TABLE t ADD more int")
        assert says_redefined(await subset(world, "n > 0"), "v")
        found = await subset(world, "n > 5", columns="id,n")
        assert [row["value"]["id"] for row in found.json["data"]] == ["2"], found.body
        await world.db.execute("ALTER TABLE t ALTER n TYPE numeric(8,2)")
        for where in ("n > 5", "id > 0"):
            assert says_redefined(await subset(world, where, columns="id,n"), "n")


async def test_a_column_that_became_wider_is_served_before_the_capture_has_noticed(postgres_dsn: str) -> None:
    # Its values are the same, and the capture may be far behind.
    async with ShapeWorld(postgres_dsn, "CREATE TABLE t (id int PRIMARY KEY, v varchar(2), n int)") as world:
        await world.db.execute("INSERT INTO t VALUES (1, 'a', 5)")
        world.hold()
        await world.sync(table="t", where="n > 4")
        await world.db.execute("ALTER TABLE t ALTER n TYPE bigint")
        await world.db.execute("ALTER TABLE t ALTER v TYPE text")
        found = await world.sync(table="t", where="n > 3 AND v LIKE 'a%'")
        assert [row["id"] for row in found.rows.values()] == ["1"]
        assert [row["value"]["id"] for row in (await subset(world, "n > 4")).json["data"]] == ["1"]
        # The former type does not have this value: the request is right as soon as the wider one is known.
        beyond = await world.get(table="t", where="n = $1", offset="-1", **{"params[1]": "3000000000"})
        assert beyond.status == 503 and "redefined" in beyond.json["message"]


async def test_f128_a_clause_for_the_new_type_of_a_column_is_503_until_the_type_is_known(postgres_dsn: str) -> None:
    async with ShapeWorld(postgres_dsn, DDL) as world:
        world.hold()
        await world.sync(table="t")
        asked = {"table": "t", "where": "n LIKE '5%'", "offset": "-1"}
        assert (await world.get(**asked)).status == 400
        await world.db.execute("ALTER TABLE t ALTER n TYPE text")
        assert "redefined" in (await world.get(**asked)).json["message"]
        world.learn()
        assert (await world.get(**asked)).status == 200
