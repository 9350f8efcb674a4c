"""A table's description grows while it flows: new columns are in its topic, and the values that older rows have in them
are known.
"""

from __future__ import annotations

from typing import Any

import psycopg
import psycopg.sql
import pytest
from msgspec.structs import replace

from support.capture.evolving import equal, folded, selected, version
from support.capture.world import GOOD, World, good_flows
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.columns import read_attributes
from tidemill.capture.postgres.connection import PgConnection
from tidemill.shards.bindings.remap import LogRemap

pytestmark = pytest.mark.postgres

COLUMNS = "id int PRIMARY KEY, v int, w varchar(4), n numeric(6,2), r real"
ROWS = "(1, 1, 'a', 1.5, 0.1), (2, 2, 'b', 2.5, 0.2), (3, 3, 'c', NULL, NULL)"
T = (f"CREATE TABLE t ({COLUMNS})", f"INSERT INTO t VALUES {ROWS}")

GROWS = {
    "nullable": ("ALTER TABLE t ADD x int", "x", None),
    "constant": ("ALTER TABLE t ADD x int DEFAULT 5", "x", "5"),
    "quotes": ("ALTER TABLE t ADD x text NOT NULL DEFAULT 'it''s \"a\", {b}'", "x", 'it\'s "a", {b}'),
    "backslash": ("ALTER TABLE t ADD x text DEFAULT E'a\\\\b, \\nNULL'", "x", "a\\b, \nNULL"),
    "box": ("ALTER TABLE t ADD x box DEFAULT '(1,1),(0,0)'", "x", "(1,1),(0,0)"),
    "boxes": ("ALTER TABLE t ADD x box[] DEFAULT '{(1,1),(0,0);(2,2),(1,1)}'", "x", "{(1,1),(0,0);(2,2),(1,1)}"),
    "list": ("ALTER TABLE t ADD x int[] DEFAULT '{1,2}'", "x", "{1,2}"),
    "stable": ("ALTER TABLE t ADD x date DEFAULT date '2026-01-02' + 1", "x", "2026-01-03"),
    "taken_away": ("ALTER TABLE t ADD x int DEFAULT 7; ALTER TABLE t ALTER x DROP DEFAULT", "x", "7"),
    "int8": ("ALTER TABLE t ALTER v TYPE bigint", "v", "integer"),
    "varchar": ("ALTER TABLE t ALTER w TYPE varchar(9)", "w", "character varying(4)"),
    "text": ("ALTER TABLE t ALTER w TYPE text", "w", "character varying(4)"),
    "numeric": ("ALTER TABLE t ALTER n TYPE numeric(9,2)", "n", "numeric(6,2)"),
    "float8": ("ALTER TABLE t ALTER r TYPE double precision", "r", "real"),
    "key": ("ALTER TABLE t ALTER id TYPE bigint", "id", "integer"),
}
"""Statements on a table, the column that they affect, and its default or its former type."""

PARKS = {
    "volatile": ("ALTER TABLE t ADD x float DEFAULT random()", "were rewritten"),
    "identity": ("ALTER TABLE t ADD x int GENERATED ALWAYS AS IDENTITY", "were rewritten"),
    "volatile_hidden": (
        "ALTER TABLE t ADD x float DEFAULT random(); ALTER TABLE t ALTER x DROP DEFAULT", "were rewritten",
    ),
    "made_anew": ("ALTER TABLE t DROP r; ALTER TABLE t ADD r real", "is now a different column"),
    "renamed": ("ALTER TABLE t RENAME r TO x; ALTER TABLE t ADD r real", "column 'r' is now a different column"),
    "exchanged": (
        "ALTER TABLE t RENAME v TO z; ALTER TABLE t RENAME n TO v; ALTER TABLE t RENAME z TO n", "a different column",
    ),
    "narrower": ("ALTER TABLE t ALTER n TYPE numeric(5,2)", "was numeric(6,2)"),
    "other_scale": ("ALTER TABLE t ALTER n TYPE numeric(8,3)", "was numeric(6,2)"),
    "no_decimal": ("ALTER TABLE t ALTER n TYPE numeric", "was numeric(6,2)"),
    "by_expression": ("ALTER TABLE t ALTER w TYPE varchar(9) USING upper(w)", "were rewritten"),
    "with_a_rewrite": ("ALTER TABLE t ADD x int, ALTER v TYPE bigint", "were rewritten"),
    "dimensions": ("ALTER TABLE t ADD x int[] DEFAULT '{{1}}'", "its default cannot be carried: an array of more"),
    "reserved": ("ALTER TABLE t ADD _time int", "reserved"),
}  # fmt: skip


async def make(world: World, kinds: dict[str, Any]) -> None:
    await world.sql(*GOOD)
    for name in kinds:
        await world.sql(f'CREATE TABLE "{name}" ({COLUMNS})', f'INSERT INTO "{name}" VALUES {ROWS}')


def on(name: str, statements: str) -> list[str]:
    return statements.replace("TABLE t ", f'TABLE "{name}" ').split("; ")


async def test_f460_what_loses_nothing_flows_on_within_the_transaction_that_changes_it(postgres_dsn: str) -> None:
    """Rows come before, in and after the DDL's transaction; then a restart; then a replay from before it."""
    async with World(postgres_dsn) as world:
        await make(world, GROWS)
        async with world.capture(table_poll_s=60, fragment_changes=2):
            await world.caught_up()
            for name, (statements, column, was) in GROWS.items():
                await world.transaction(
                    f'UPDATE "{name}" SET v = 99 WHERE id = 1', *on(name, statements),
                    f'INSERT INTO "{name}" (id, v, r) VALUES (8, 8, 0.7)', f'UPDATE "{name}" SET v = 7 WHERE id = 2',
                )  # fmt: skip
                await world.sql(f'UPDATE "{name}" SET r = 0.3 WHERE id = 8')
                await until(lambda name=name: grown(world, name), name)  # type: ignore[misc]
                row = await world.table(f"public.{name}")
                assert row is not None
                found = next(c for c in row.columns if c.name == column)
                assert was == (found.was[0].type_name if found.was else found.default), name
            await equal(world, *GROWS)
        async with world.capture(table_poll_s=60):
            await world.sql(*[f'UPDATE "{name}" SET v = v + 1 WHERE id < 3' for name in GROWS])
            await good_flows(world)
            await equal(world, *GROWS)


DEFAULTS = {
    "box": "(2,2),(-0,1e-7)",
    "box[]": "{(1,1),(0,0);(2,2),(1,1)}",
    "point": "(1,-2)",
    "point[]": '{"(1,2)","(3,4)"}',
    "line": "{1,-1,0}",
    "lseg": "[(0,0),(1,1)]",
    "path": "[(0,0),(1,1),(2,0)]",
    "path[]": '{"((0,0),(1,1))","[(0,0),(1,1)]"}',
    "polygon": "((0,0),(1,1),(2,0))",
    "circle": "<(0,0),1>",
    "text": '\t"q",\\ {NULL}\n',
    "text[]": '{"a,b","\\"\\\\",NULL,"NULL",""}',
    "varchar(9)": "",
    "char(5)": "a",
    "jsonb": '{"a": ["\\\\", "\\""], "b": null}',
    "bytea": "\\x00ff",
    "int4range": "[1,9)",
    "boxes": '("(1,1),(0,0)","{(1,1),(0,0);(2,2),(1,1)}","a ""q"" \\\\")',
    "a_box": "(1,1),(0,0)",
}
"""Types, and a constant of each."""


@pytest.mark.parametrize("strings", ["on", "off"])
async def test_the_value_that_older_rows_lack_is_read_as_select_shows_it(postgres_dsn: str, strings: str) -> None:
    """Regression: the value of a box, whose arrays have another delimiter, ended at its first comma."""
    async with World(postgres_dsn) as world:
        await world.sql(
            f"ALTER DATABASE {world.name} SET standard_conforming_strings = {strings}",
            "CREATE TYPE boxes AS (one box, more box[], t text)", "CREATE DOMAIN a_box AS box",
            "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)",
        )  # fmt: skip
        await world.sql(*[
            f"ALTER TABLE t ADD c{n} {type_} DEFAULT {psycopg.sql.Literal(text).as_string()}::{type_}"
            for n, (type_, text) in enumerate(DEFAULTS.items())
        ])  # fmt: skip
        wire = await PgConnection.connect(world.dsn, purpose="test")
        try:
            ((oid,),) = await wire.query("SELECT 't'::regclass::oid")
            (shown,) = await wire.query("SELECT * FROM t")
            (found,) = (await read_attributes(wire, [int(oid or 0)])).values()
        finally:
            await wire.aclose()
        assert [column.missing for column in found.columns[1:]] == list(shown[1:])


async def grown(world: World, name: str) -> bool:
    return await version(world, name) == 2


async def test_f461_without_any_row_a_description_grows_within_seconds(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await make(world, GROWS)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            for name, (statements, _, _) in GROWS.items():
                await world.sql(*on(name, statements))
            for name in GROWS:
                await until(lambda name=name: grown(world, name), name)  # type: ignore[misc]
            await equal(world, *GROWS)
            await world.sql(*[f'UPDATE "{name}" SET v = v + 1 WHERE id < 3' for name in GROWS])
            await equal(world, *GROWS)
            for name in GROWS:
                assert await version(world, name) == 2, "its first row says nothing new"


@pytest.mark.parametrize("with_rows", [True, False])
async def test_f462_where_older_rows_cannot_be_known_the_table_parks_alone(postgres_dsn: str, with_rows: bool) -> None:
    async with World(postgres_dsn) as world:
        await make(world, PARKS)
        async with world.capture(table_poll_s=60 if with_rows else 0.1):
            await world.caught_up()
            await world.sql(*[f'UPDATE "{name}" SET v = 50 WHERE id = 1' for name in PARKS])
            binding = await world.caught_up()
            at = await world.wal_end()
            want = {}
            for name in PARKS:
                row = await world.table(f"public.{name}")
                assert row is not None
                want[name] = await selected(world, row)
            for name, (statements, _) in PARKS.items():
                await world.sql(*on(name, statements))
                if with_rows:
                    await world.sql(f'DELETE FROM "{name}" WHERE id = 1')
            for name, (_, words) in PARKS.items():
                row = await world.paused(name)
                assert words in row.reason and "resnapshot" in row.fix, (name, row.reason)
                assert row.paused_lsn >= at and str(Lsn(row.paused_lsn)) in row.reason
            await good_flows(world)
            binding = await world.caught_up()
            for name in PARKS:
                row = await world.table(f"public.{name}")
                assert row is not None
                end = sum(binding.offsets[await world.topic_id(name)])
                assert folded(row, await world.records(name, end)) == want[name], name


SEVERAL = (
    "INSERT INTO t VALUES (10, 1, 'x', 1, 1)", "ALTER TABLE t ADD x int DEFAULT 5", "INSERT INTO t (id) VALUES (11)",
    "UPDATE t SET v = 3 WHERE id = 10", "ALTER TABLE t ADD y text, ALTER w TYPE varchar(20)",
    "INSERT INTO t (id, w, x, y) VALUES (12, 'longer than 4', NULL, 'y')", "UPDATE t SET x = 6 WHERE id = 1",
    "ALTER TABLE t ADD z numeric(4,1) DEFAULT 1.5, ALTER n TYPE numeric(20,2)",
    "INSERT INTO t (id, n) VALUES (13, 1e15)", "UPDATE t SET n = n * 2 WHERE id > 1",
    "ALTER TABLE t ALTER z TYPE numeric(9,1), ALTER w TYPE text", "INSERT INTO t (id, z) VALUES (14, 12345.6)",
)  # fmt: skip


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("behind", [True, False])
async def test_f463_several_changes_with_rows_between_are_versions_also_of_a_stream_that_is_told_again(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, at_once: bool, behind: bool
) -> None:
    """The changes are in one transaction or in several. The capture streams them as they happen, or was away and finds
    the catalogue ahead. Nothing is bound at first, so the next session replays everything under the description of that
    time.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture(table_poll_s=60):
            await world.caught_up()
        mint = LogRemap.mint

        async def refused(*_: Any, **__: Any) -> Any:
            raise UnavailableError("the remap is down.")

        async def change() -> None:
            await (world.transaction(*SEVERAL) if at_once else world.sql(*SEVERAL))

        if behind:
            await change()
        monkeypatch.setattr(LogRemap, "mint", refused)
        async with world.capture(wait=False, table_poll_s=60):
            if not behind:
                await change()

            async def all_known() -> bool:
                return await version(world, "t") == 5

            await until(all_known, "all of it is known")
        confirmed = await world.confirmed()
        monkeypatch.setattr(LogRemap, "mint", mint)
        row = await world.table("public.t")
        assert row is not None and all(confirmed <= lsn for lsn in row.evolved)
        assert len(set(row.evolved)) == (1 if at_once else 4)
        async with world.capture(table_poll_s=0.1):
            await world.sql("DELETE FROM t WHERE id = 2")
            await equal(world, "t")
            assert await version(world, "t") == 5
            await good_flows(world)


async def test_f464_a_catalogue_that_is_ahead_by_what_it_cannot_vouch_for_parks_at_the_first_row_in_doubt(
    postgres_dsn: str,
) -> None:
    """A column was added, written, dropped and added again under its name. The values that older rows had in the first
    one are unknown.
    """
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *T)
        async with world.capture():
            await world.caught_up()
        await world.sql("INSERT INTO t (id) VALUES (20)")
        row = await world.table("public.t")
        assert row is not None
        want = await selected(world, row)
        await world.sql(
            "ALTER TABLE t ADD x int DEFAULT 1", "INSERT INTO t (id, x) VALUES (21, 5)",
            "ALTER TABLE t DROP x", "ALTER TABLE t ADD x int DEFAULT 2", "INSERT INTO t (id) VALUES (22)",
        )  # fmt: skip
        for _ in range(2):
            async with world.capture():
                row = await world.paused("t")
                assert "added and dropped in the meantime" in row.reason
                await good_flows(world)
                binding = await world.caught_up()
                end = sum(binding.offsets[await world.topic_id("t")])
                assert folded(row, await world.records("t", end)) == want


async def test_f465_a_partitioned_table_grows_and_a_row_of_an_older_tidemill_is_completed_first(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD, *T, f"CREATE TABLE p ({COLUMNS}) PARTITION BY RANGE (id)",
            "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)", f"INSERT INTO p VALUES {ROWS}",
        )  # fmt: skip
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
        await world.catalogue.change_table(
            world.name, "public.t",
            lambda row: replace(row, attributes=0, storage="",
                                columns=tuple(replace(c, attnum=0) for c in row.columns)),  # type: ignore[union-attr]
        )  # fmt: skip
        async with world.capture(table_poll_s=0.1):

            async def completed() -> bool:
                row = await world.table("public.t")
                return row is not None and bool(row.attributes) and all(c.attnum for c in row.columns)

            await until(completed, "it is completed")
            await world.sql("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)")
            await until(lambda: partitions(world, 2), "the partition is known")
            await world.sql("ALTER TABLE p ADD x int DEFAULT 5", "ALTER TABLE t ADD x int DEFAULT 5, ADD y text")
            await world.sql("INSERT INTO p (id) VALUES (50), (150)", "INSERT INTO t (id) VALUES (50)")
            await equal(world, "p", "t")
            assert [await version(world, t) for t in "pt"] == [2, 2]


async def partitions(world: World, count: int) -> bool:
    row = await world.table("public.p")
    return row is not None and len(row.partitions or ()) == count
