"""The role of shapes may not read a table, or not all its rows: an operator ends that, and no client is at fault."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.shapes.world import Answer, ShapeWorld
from support.waiting import until

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a'), (2, 'b')"
HIDDEN = "ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY one_row ON t USING (id = 1)"


@asynccontextmanager
async def as_reader(world: ShapeWorld, attributes: str = "") -> AsyncIterator[str]:
    """A role that may read `t`, with which shapes connect; its name."""
    role = f"reads_{world.slot}"
    await world.db.execute(f"CREATE ROLE {role} LOGIN {attributes}")  # type: ignore[arg-type]
    await world.db.execute(f"GRANT SELECT ON t TO {role}")  # type: ignore[arg-type]
    source = world.service._tables._databases["main"].source
    source._dsn = world.dsn.replace("postgres@", f"{role}@")
    try:
        yield role
    finally:
        source._dsn = world.dsn
        await world.db.execute(f"DROP OWNED BY {role}")  # type: ignore[arg-type]
        await world.db.execute(f"DROP ROLE {role}")  # type: ignore[arg-type]


async def subset(world: ShapeWorld) -> Answer:
    return await world.post({"where": "id > 0", "order_by": "id"}, table="t")


async def status_of(world: ShapeWorld, wanted: int, **params: str) -> bool:
    return (await world.get(table="t", offset="-1", **params)).status == wanted


@pytest.mark.parametrize("taken", ["SELECT ON t", "USAGE ON SCHEMA public"])
async def test_f127_a_table_that_the_role_may_not_read_is_503_until_it_may(postgres_dsn: str, taken: str) -> None:
    ddl = f"{DDL}; REVOKE ALL ON SCHEMA public FROM public"
    async with ShapeWorld(postgres_dsn, ddl) as world, as_reader(world) as role:
        await world.db.execute(f"GRANT USAGE ON SCHEMA public TO {role}")  # type: ignore[arg-type]
        client = await world.sync(table="t")
        await world.db.execute(f"REVOKE {taken} FROM {role}")  # type: ignore[arg-type]
        for answer in (await world.get(table="t", offset="-1", where="id > 0"), await subset(world)):
            assert answer.status == 503 and answer.headers["retry-after"], answer.body
            assert "permission denied" in answer.json["message"] and "Grant it" in answer.json["message"]
        await world.db.execute(f"GRANT {taken} TO {role}")  # type: ignore[arg-type]
        await until(lambda: status_of(world, 200, where="id > 0"), "it is served")
        assert len((await subset(world)).json["data"]) == len(client.rows) == 2


async def test_f423_no_row_is_hidden_from_a_shape_by_row_level_security(postgres_dsn: str) -> None:
    """Regression: initial rows and subsets lacked the rows that a policy hides, and the stream had them."""
    async with ShapeWorld(postgres_dsn, DDL) as world, as_reader(world, "BYPASSRLS") as role:
        await world.db.execute(HIDDEN)
        client = await world.sync(table="t")
        assert len(client.rows) == 2
        await world.db.execute(f"ALTER ROLE {role} NOBYPASSRLS")  # type: ignore[arg-type]
        for answer in (await world.get(table="t", offset="-1", where="id > 0"), await subset(world)):
            assert answer.status == 503, answer.body
            assert "row-level security" in answer.json["message"] and "BYPASSRLS" in answer.json["message"]
        await world.db.execute(f"ALTER ROLE {role} BYPASSRLS")  # type: ignore[arg-type]
        await until(lambda: status_of(world, 200, where="id > 0"), "it is served")
        assert len((await world.sync(table="t", where="id > 0")).rows) == len((await subset(world)).json["data"]) == 2
