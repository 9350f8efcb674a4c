"""Cached queries of the database's catalogue: they find every change that a full query finds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from tidemill.base.clock import SystemClock
from tidemill.capture.catalog import catalog_cache
from tidemill.capture.catalog.catalog_cache import CachedQuery, TableList
from tidemill.capture.catalog.table_discovery import TableInfo, find_hazards, list_tables, list_tables_if_changed
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection, OpenQueries
from tidemill.capture.setup.publication import read_published_tables

pytestmark = pytest.mark.postgres

SET_UP = (
    "CREATE SCHEMA other",
    "CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL, w text, u int NOT NULL)",
    "ALTER TABLE t REPLICA IDENTITY FULL",
    "CREATE UNIQUE INDEX t_v ON t (v)",
    "CREATE UNIQUE INDEX t_key ON t (id, u)",
    "CREATE TABLE keyless (id int NOT NULL)",
    "CREATE TABLE p (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE p_low PARTITION OF p FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id)",
    "CREATE TABLE p_low_1 PARTITION OF p_low FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE p_new (id int PRIMARY KEY, v int)",
    *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("p", "p_low", "p_low_1")),
    "CREATE PUBLICATION of_looks WITH (publish_via_partition_root, publish_generated_columns = stored)",
    "ALTER PUBLICATION of_looks ADD TABLE ONLY t, p",
)
CHANGES: dict[str, tuple[str, str]] = {
    # statement → the queries (tables, published, hazards) whose result changes
    "a new table": ("CREATE TABLE made (id int PRIMARY KEY)", "t"),
    "a table without a key": ("CREATE TABLE made (id int)", "t"),
    "an unlogged table": ("CREATE UNLOGGED TABLE made (id int PRIMARY KEY)", "t"),
    "set unlogged": ("ALTER TABLE keyless SET UNLOGGED", "t"),
    "a partition set unlogged": ("ALTER TABLE p_low_1 SET UNLOGGED", "t"),
    "dropped": ("DROP TABLE t", "tp"),
    "made anew": ("DROP TABLE keyless; CREATE TABLE keyless (id int NOT NULL)", "t"),
    "truncated": ("TRUNCATE t", "t"),
    "a partition truncated": ("TRUNCATE p_low_1", "t"),
    "rewritten": ("VACUUM FULL t", "t"),
    "renamed": ("ALTER TABLE t RENAME TO s", "tp"),
    "two renamed in a circle": (
        "ALTER TABLE t RENAME TO x; ALTER TABLE keyless RENAME TO t; ALTER TABLE x RENAME TO keyless", "tp",
    ),
    "another schema": ("ALTER TABLE t SET SCHEMA other", "tp"),
    "a schema renamed": ("ALTER TABLE t SET SCHEMA other; ALTER SCHEMA other RENAME TO third", "tp"),
    "a column added": ("ALTER TABLE t ADD x int", "t"),
    "a column added with a default": ("ALTER TABLE t ADD x int DEFAULT 7", "t"),
    "a column dropped": ("ALTER TABLE t DROP w", "t"),
    "a column dropped and made anew": ("ALTER TABLE t DROP w; ALTER TABLE t ADD w text", "t"),
    "a column added and dropped": ("ALTER TABLE t ADD x int; ALTER TABLE t DROP x", "t"),
    "a column renamed": ("ALTER TABLE t RENAME w TO x", "t"),
    "a column retyped": ("ALTER TABLE t ALTER w TYPE varchar(9)", "t"),
    "a column widened": ("ALTER TABLE t ALTER u TYPE bigint", "t"),
    "a generated column": ("ALTER TABLE t ADD x int GENERATED ALWAYS AS (v + 1) STORED", "t"),
    "a virtual column": ("ALTER TABLE keyless ADD x int GENERATED ALWAYS AS (id + 1) VIRTUAL", "t"),
    "the key dropped": ("ALTER TABLE t DROP CONSTRAINT t_pkey", "t"),
    "a key made": ("ALTER TABLE keyless ADD PRIMARY KEY (id)", "t"),
    "another key": ("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)", "t"),
    "another key of a partitioned table": ("ALTER TABLE p DROP CONSTRAINT p_pkey, ADD PRIMARY KEY (id, v)", "t"),
    "identity by default": ("ALTER TABLE t REPLICA IDENTITY DEFAULT", "th"),
    "identity nothing": ("ALTER TABLE t REPLICA IDENTITY NOTHING", "th"),
    "identity by an index": ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_v", "th"),
    "identity by an index with the key": ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_key", "th"),
    "the index of the identity renamed": (
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_v; ALTER INDEX t_v RENAME TO t_w", "th",
    ),
    "the index of the identity dropped": ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_v; DROP INDEX t_v", "th"),
    "identity of a partition": ("ALTER TABLE p_low_1 REPLICA IDENTITY NOTHING", "th"),
    "the key dropped under the identity": (
        "ALTER TABLE t REPLICA IDENTITY DEFAULT; ALTER TABLE t DROP CONSTRAINT t_pkey", "th",
    ),
    "a partition made": ("CREATE TABLE p_high PARTITION OF p FOR VALUES FROM (100) TO (200)", "th"),
    "a partition below a partition": ("CREATE TABLE p_low_2 PARTITION OF p_low FOR VALUES FROM (50) TO (60)", "th"),
    "a partition attached": ("ALTER TABLE p ATTACH PARTITION p_new FOR VALUES FROM (100) TO (200)", "th"),
    "a partition detached": ("ALTER TABLE p_low DETACH PARTITION p_low_1", "t"),
    "a partition dropped": ("DROP TABLE p_low_1", "t"),
    "published": ("ALTER PUBLICATION of_looks ADD TABLE keyless", "ph"),
    "unpublished": ("ALTER PUBLICATION of_looks DROP TABLE ONLY t", "p"),
    "another table published instead": ("ALTER PUBLICATION of_looks SET TABLE ONLY p_new", "ph"),
    "the publication renamed": ("ALTER PUBLICATION of_looks RENAME TO gone", "p"),
    "the publication dropped": ("DROP PUBLICATION of_looks", "p"),
}  # fmt: skip
LETTERS = {"t": 0, "p": 1, "h": 2}
Looks = Callable[[], Awaitable[tuple[Any, Any, Any]]]


@asynccontextmanager
async def opened_looks(dsn: str) -> AsyncIterator[tuple[Looks, Looks, psycopg.Connection[Any]]]:
    """Yield all three queries, cached and uncached."""
    wire = await PgConnection.connect(dsn, purpose="test")
    control = ControlConnection(wire, OpenQueries(SystemClock()))

    async def published(wire: PgConnection) -> Any:
        return await read_published_tables(wire, "of_looks")

    async def hazardous(wire: PgConnection) -> Any:
        return await find_hazards(wire, "of_looks", True)

    kept = (TableList(control), CachedQuery(control, published), CachedQuery(control, hazardous))

    async def looks() -> tuple[Any, Any, Any]:
        return await kept[0].fetch(), await kept[1].fetch(), await kept[2].fetch()

    async def whole() -> tuple[Any, Any, Any]:
        return await list_tables(wire), await published(wire), await hazardous(wire)

    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in SET_UP:
                connection.execute(statement)
            yield looks, whole, connection
    finally:
        await wire.aclose()


@pytest.mark.parametrize("change", CHANGES)
async def test_each_kind_of_change_that_a_whole_look_finds_is_found_by_a_kept_one(
    postgres_dsn: str, change: str
) -> None:
    statements, says = CHANGES[change]
    async with opened_looks(postgres_dsn) as (kept, whole, connection):
        before = await kept()
        assert before == await whole()
        for statement in statements.split("; "):
            connection.execute(statement)
        after = await kept()
        assert after == await whole()
        changed = "".join(letter for letter, at in LETTERS.items() if before[at] != after[at])
        assert set(changed) == set(says), changed


async def test_changes_are_found_whatever_the_order_in_which_transactions_begin_and_end(postgres_dsn: str) -> None:
    """One transaction begins first and ends last; one changes in a subtransaction; one is rolled back, wholly or in
    part.
    """
    async with opened_looks(postgres_dsn) as (kept, whole, connection):

        def columns(tables: list[TableInfo]) -> str:
            return next(table.digest for table in tables if table.table == "t")

        with psycopg.connect(postgres_dsn) as first, psycopg.connect(postgres_dsn) as second:
            seen = columns((await kept())[0])
            first.execute("ALTER TABLE t ADD first int")
            second.execute("CREATE TABLE second (id int PRIMARY KEY)")
            second.execute("SAVEPOINT part")
            second.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
            second.execute("RELEASE part")
            assert columns((await kept())[0]) == seen
            second.commit()
            found = await kept()
            assert found == await whole() and any(table.table == "second" for table in found[0])
            assert next(table for table in found[0] if table.table == "keyless").has_key
            assert columns(found[0]) == seen
            connection.execute("INSERT INTO second VALUES (1)")
            assert columns((await kept())[0]) == seen
            first.commit()
            assert columns((await kept())[0]) != seen, "it is told by no other transaction that it has ended"
            second.execute("SAVEPOINT part")
            second.execute("ALTER TABLE t ADD second int")
            second.execute("ROLLBACK TO part")
            second.execute("ALTER TABLE keyless ADD second int")
            second.commit()
            first.execute("ALTER TABLE t ADD never int")
            first.rollback()
            assert await kept() == await whole()


async def test_while_nobody_writes_nothing_is_read_and_while_others_write_only_a_hash(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def counted(wire: PgConnection, known: str, tables: list[TableInfo]) -> tuple[str, list[TableInfo]]:
        asked.append(known)
        return await list_tables_if_changed(wire, known, tables)

    monkeypatch.setattr(catalog_cache, "list_tables_if_changed", counted)
    async with opened_looks(postgres_dsn) as (kept, _, connection):
        first = await kept()
        for _ in range(3):
            again = await kept()
            assert all(one is other for one, other in zip(first, again, strict=True))
        assert asked == [""]
        connection.execute("INSERT INTO t VALUES (1, 1, '', 1)")
        connection.execute("ANALYZE t")
        assert (await kept())[0] is first[0]
        assert len(asked) == 2 and asked[1]


async def test_what_is_changed_while_a_look_is_under_way_and_changed_back_after_it_is_no_gap(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_looks(postgres_dsn) as (kept, whole, connection):
        before = await kept()
        there: list[str] = ["ALTER TABLE t REPLICA IDENTITY NOTHING"]

        async def late(wire: PgConnection, known: str, tables: list[TableInfo]) -> tuple[str, list[TableInfo]]:
            while there:
                connection.execute(there.pop())
            return await list_tables_if_changed(wire, known, tables)

        connection.execute("INSERT INTO t VALUES (1, 1, '', 1)")
        monkeypatch.setattr(catalog_cache, "list_tables_if_changed", late)
        during = await kept()
        assert during[0] != before[0] and during == await whole()
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL")
        after = await kept()
        assert after == before and after == await whole()


async def test_a_look_that_fails_is_made_again(postgres_dsn: str) -> None:
    wire = await PgConnection.connect(postgres_dsn, purpose="test")
    tries: list[int] = []

    async def question(wire: PgConnection) -> list[int]:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ValueError("odd")
        return tries

    kept = CachedQuery(ControlConnection(wire, OpenQueries(SystemClock())), question)
    try:
        with pytest.raises(ValueError, match="odd"):
            await kept.fetch()
        assert await kept.fetch() is tries and await kept.fetch() == [0, 1]
    finally:
        await wire.aclose()


async def test_a_database_without_a_table_is_seen_as_such_and_so_is_its_first(new_database: Callable[[], str]) -> None:
    dsn = new_database()
    wire = await PgConnection.connect(dsn, purpose="test")
    tables = TableList(ControlConnection(wire, OpenQueries(SystemClock())))
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert await tables.fetch() == []
            connection.execute("CREATE TABLE one (id int PRIMARY KEY)")
            assert [table.name for table in await tables.fetch()] == ["public.one"]
            connection.execute("DROP TABLE one")
            assert await tables.fetch() == []
    finally:
        await wire.aclose()
