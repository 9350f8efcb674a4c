"""Altered types of columns: SELECT prints old values differently, and no row is in the stream."""

from __future__ import annotations

import pytest

from support.capture.world import GOOD, World, good_flows
from support.waiting import until
from tidemill.capture.catalog.type_dependencies import is_compatible_type, serialize_type

MADE = (
    "CREATE TYPE inner_t AS (a int, b text)",
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TYPE addr AS (street text, i inner_t, m mood)",
    "CREATE DOMAIN home AS addr",
    "CREATE DOMAIN homes AS addr[]",
    "CREATE TYPE moods AS RANGE (subtype = mood, multirange_type_name = multimoods)",
    "CREATE TABLE kept (x int, y text)",
)
COLUMNS = {
    "plain": ("addr", "ROW('s', ROW(1, 'b'), 'ok')"),
    "arrays": ("addr[]", "ARRAY[ROW('s', ROW(1, 'b'), 'ok')]::addr[]"),
    "domained": ("home", "ROW('s', ROW(1, 'b'), 'ok')"),
    "nested": ("homes", "ARRAY[ROW('s', ROW(1, 'b'), 'ok')]::homes"),
    "enums": ("mood", "'ok'"),
    "enum_arrays": ("mood[]", "'{sad,ok}'"),
    "ranges": ("moods", "'[sad,ok]'"),
    "multiranges": ("multimoods", "'{[sad,ok]}'"),
    "row_types": ("kept", "ROW(1, 'y')"),
    "others": ("text", "'t'"),
}
ALTERED: dict[str, set[str]] = {
    "ALTER TYPE addr ADD ATTRIBUTE zip int": {"plain", "arrays", "domained", "nested"},
    "ALTER TYPE inner_t DROP ATTRIBUTE b": {"plain", "arrays", "domained", "nested"},
    "ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'": set(COLUMNS) - {"row_types", "others"},
    "ALTER TABLE kept ADD COLUMN z int": {"row_types"},
    "ALTER TYPE mood ADD VALUE 'glad' BEFORE 'fine'": set(),
    "ALTER TYPE addr RENAME ATTRIBUTE zip TO code": set(),
}

REPLACED = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TABLE t (id int PRIMARY KEY, v mood)",
    "INSERT INTO t VALUES (1, 'ok')",
)
REPLACE = (
    "ALTER TYPE mood RENAME TO former",
    "CREATE TYPE mood AS ENUM ('ok', 'glad')",
    "ALTER TABLE t ALTER v TYPE mood USING v::text::mood",
    "DROP TYPE former",
)


async def exact(world: World, table: str) -> bool:
    await world.caught_up()
    rows = {f'{{"id":{i}}}': v for i, v in await world.select(f"SELECT id, v::text FROM {table}")}
    return {key: row["v"] for key, row in (await world.folded(table)).items()} == rows


async def is_copied_again(world: World, generation: int) -> bool:
    row = await world.table("public.t")
    return row is not None and row.generation > generation


@pytest.mark.postgres
async def test_f489_a_type_that_is_altered_below_a_column_has_its_tables_alone_copied_again(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *MADE)
        for name, (kind, value) in COLUMNS.items():
            await world.sql(
                f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})", f"INSERT INTO {name} VALUES (1, {value})"
            )
        settings = {"copy_again": True, "copy_again_pause_s": 0.0, "table_poll_s": 0.1, "tables": ("*", "!kept")}

        async def generations() -> dict[str, int]:
            return {name.removeprefix("public."): row.generation for name, row in (await world.tables()).items()}

        async def altered(statement: str) -> None:
            """Alter a type. The tables that depend on it, and no others, are copied again."""
            before = await generations()
            await world.sql(statement)

            async def copied() -> bool:
                now = await generations()
                return all(now[name] > before[name] for name in ALTERED[statement])

            await until(copied, f"tables are copied again: {statement}")
            await world.flowing(*COLUMNS)
            for name in COLUMNS:
                assert await exact(world, name), (statement, name)
            now = await generations()
            assert {name for name in COLUMNS if now[name] > before[name]} == ALTERED[statement], statement

        async def settled() -> bool:
            rows = await world.tables()
            return all(bool(rows[f"public.{name}"].types) for name in set(COLUMNS) - {"others"})

        *first, while_down = list(ALTERED)[:4]
        async with world.capture(**settings):
            await world.flowing(*COLUMNS)
            await until(settled, "the types are known")
            for statement in [*first, *list(ALTERED)[4:]]:
                await altered(statement)
        await world.sql("INSERT INTO others VALUES (2, 'x')")
        async with world.capture(**settings):
            await altered(while_down)
            await good_flows(world)


@pytest.mark.postgres
@pytest.mark.parametrize("noticed", ["by the watcher", "after a restart"])
async def test_f489_a_table_is_copied_again_if_another_type_of_the_same_name_replaced_that_of_a_column(
    postgres_dsn: str, noticed: str
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *REPLACED)
        settings = {"copy_again": True, "copy_again_pause_s": 0.0, "table_poll_s": 0.1, "tables": ("t", "good")}
        async with world.capture(**settings):
            await world.flowing("t")
            generation = (await world.tables())["public.t"].generation
            if noticed == "by the watcher":
                await world.transaction(*REPLACE)
                await until(lambda: is_copied_again(world, generation), "the table is copied again")
        if noticed == "after a restart":
            await world.transaction(*REPLACE)
        async with world.capture(**settings):
            await until(lambda: is_copied_again(world, generation), "the table is copied again")
            await world.flowing("t")
            assert await exact(world, "t")
            await world.sql("INSERT INTO t VALUES (2, 'glad')")
            assert await exact(world, "t")


@pytest.mark.postgres
async def test_f489_a_row_of_another_type_of_the_same_name_pauses_its_table_with_that_reason(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(*GOOD, *REPLACED)
        async with world.capture(table_poll_s=60.0, tables=("t", "good")):
            await world.flowing("t")
            await world.transaction(*REPLACE, "INSERT INTO t VALUES (2, 'glad')")
            row = await world.paused("t")
            assert "the type of column 'v' was replaced by another one of the same name: mood" in row.reason


def test_more_labels_read_alike_and_other_ones_do_not() -> None:
    enum = {7: ["e sad", "e ok"], 9: ["a 1 25 -1", "a 2 7 -1"]}
    stored = serialize_type(enum)
    assert is_compatible_type(stored, enum)
    assert is_compatible_type(stored, {**enum, 7: ["e sad", "e ok", "e glad"]})
    assert not is_compatible_type(stored, {**enum, 7: ["e sad", "e fine"]})
    assert not is_compatible_type(stored, {**enum, 7: ["e sad"]})
    assert not is_compatible_type(stored, {**enum, 9: ["a 1 25 -1"]})
    assert not is_compatible_type(stored, {9: enum[9]})
    assert is_compatible_type(serialize_type({9: enum[9]}), {9: enum[9]})
