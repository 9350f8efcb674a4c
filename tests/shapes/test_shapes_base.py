"""The initial rows of a shape, as of its snapshot, despite concurrent changes to the table."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import ShapeSettings
from support.waiting import until
from tidemill.shapes.tables import initial_snapshot

pytestmark = pytest.mark.postgres

DDL = "CREATE TABLE a (id int PRIMARY KEY, v int); INSERT INTO a VALUES (1, 1), (2, 2)"
SETTINGS = ShapeSettings(long_poll_s=0.5)


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("statement", ["TRUNCATE a", "ALTER TABLE a ALTER v TYPE bigint", "DROP TABLE a"])
async def test_nobody_empties_a_table_between_the_snapshot_and_the_rows_that_are_read_in_it(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, statement: str, subset: bool
) -> None:
    """A reader with an older snapshot sees a truncated or rewritten table as empty, while the stream still delivers
    changes of its rows. World 204 of the oracle: an update of a row that the client never had."""
    tried: list[str] = []
    opened = initial_snapshot._check_identity
    async with RealWorld(postgres_dsn, DDL, SETTINGS) as world:
        await until(lambda: world.capture.streaming)

        async def meanwhile(connection: Any, relation: Any) -> None:
            await opened(connection, relation)
            async with await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True) as other:
                await other.execute("SET lock_timeout = '300ms'")
                try:
                    await other.execute(statement)  # type: ignore[arg-type]
                    tried.append("done")
                except psycopg.errors.LockNotAvailable:
                    tried.append("waits")

        monkeypatch.setattr(initial_snapshot, "_check_identity", meanwhile)
        if subset:
            answer = await world.get(table="a", subset__where="id > 0", log="changes_only", offset="now")
            rows = [item["value"] for item in answer.json["data"]]
        else:
            answer = await world.get(table="a", offset="-1")
            rows = [item["value"] for item in answer.items if "value" in item]
        assert answer.status == 200 and set(tried) == {"waits"}
        assert rows == [{"id": "1", "v": "1"}, {"id": "2", "v": "2"}]


async def test_rows_of_tables_that_inherit_are_in_neither_the_shape_nor_its_subsets(postgres_dsn: str) -> None:
    """The stream brings them under their own tables; of a partitioned one under its root."""
    ddl = f"""{DDL}; CREATE TABLE child (extra int) INHERITS (a); INSERT INTO child VALUES (9, 9, 9);
        CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
        CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (5); CREATE TABLE p1 PARTITION OF p DEFAULT;
        INSERT INTO p VALUES (1, 1), (7, 7)"""
    async with RealWorld(postgres_dsn, ddl, SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        for table, keys in (("a", {"1", "2"}), ("p", {"1", "7"})):
            client = await world.sync(table=table)
            assert {row["id"] for row in client.rows.values()} == keys
            answer = await world.get(table=table, subset__where="true", log="changes_only", offset="now")
            assert {item["value"]["id"] for item in answer.json["data"]} == keys
        client = await world.sync(table="a", where="v > 0")
        await world.db.execute("UPDATE child SET v = 10; INSERT INTO a VALUES (3, 3)")
        await client.follow_until(lambda: len(client.rows) == 3)
        assert {row["id"] for row in client.rows.values()} == {"1", "2", "3"}
