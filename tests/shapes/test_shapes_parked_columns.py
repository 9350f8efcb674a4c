"""A table's description changes. Shapes of unaffected columns continue, exactly and under their handle, while the table
is parked and copied again. Shapes of affected columns start over."""

from __future__ import annotations

from typing import Any

import pytest

from support.shapes.real_world import RealWorld
from support.shapes.world import Client
from support.waiting import until
from tidemill.capture.tables import recopy_requests
from tidemill.shapes import ShapeSettings

pytestmark = pytest.mark.postgres

SETTINGS = ShapeSettings(long_poll_s=0.5)
COLUMNS = "(id int PRIMARY KEY, a text, b int, x int)"

CHANGES = {
    "dropped": "ALTER TABLE dropped DROP COLUMN x",
    "renamed": "ALTER TABLE renamed RENAME x TO y",
    "replaced": "ALTER TABLE replaced DROP COLUMN x, ADD COLUMN x int",
    "retyped": "ALTER TABLE retyped ALTER x TYPE text USING x || '!'",
    "widened": "ALTER TABLE widened ALTER x TYPE bigint",
    "added": "ALTER TABLE added ADD COLUMN z int",
    "constant": "ALTER TABLE constant ADD COLUMN z int DEFAULT 5",
    "volatile": "ALTER TABLE volatile ADD COLUMN z float DEFAULT random()",
    "parted": "ALTER TABLE parted DROP COLUMN x",
}
COPIED_BY_AN_OPERATOR = ("dropped", "renamed", "replaced", "retyped", "parted")
PARTED = "CREATE TABLE parted0 PARTITION OF parted FOR VALUES FROM (0) TO (50);" + (
    "CREATE TABLE parted1 PARTITION OF parted FOR VALUES FROM (50) TO (1000)"
)


class Polled(RealWorld):
    table_poll_s = 0.2


class SetAside(Polled):
    """A copy takes seconds, and concurrent changes go to a side topic immediately."""

    more = {"copy_aside_after_s": 0.2, "copy_rows_per_s": 700, "copy_chunk_blocks": 4}


class Unpolled(RealWorld):
    """A world whose tables are checked once at the start, and later only on request."""

    table_poll_s = 600.0


def ddl(*names: str) -> str:
    made = [
        f"CREATE TABLE {name} {COLUMNS}{' PARTITION BY RANGE (id)' if name == 'parted' else ''};"
        + (PARTED if name == "parted" else "")
        for name in names
    ]
    filled = [f"INSERT INTO {name} SELECT i, 'a' || i, i, i FROM generate_series(1, 90) i" for name in names]
    return ";".join([*made, *filled])


async def follows(world: RealWorld, client: Client, where: str = "true") -> None:
    """Wait until the client has the rows that SELECT gives. It must not start over."""
    columns, handle = client.params["columns"], client.handle
    cursor = await world.db.execute(f"SELECT {columns} FROM {client.params['table']} WHERE {where}")  # type: ignore[arg-type]
    wanted = {tuple(None if v is None else str(v) for v in row) for row in await cursor.fetchall()}

    def same() -> bool:
        return {tuple(row[name] for name in columns.split(",")) for row in client.rows.values()} == wanted

    await client.follow_until(lambda: same() or client.refetches > 0)
    assert (client.refetches, client.handle) == (0, handle), client.params
    assert same()


async def flows(world: RealWorld, name: str) -> bool:
    rows = {row.table: row for row in await world.catalogue.all_tables()}
    return rows[f"public.{name}"].is_streaming


async def parks(world: RealWorld, name: str) -> bool:
    rows = {row.table: row for row in await world.catalogue.all_tables()}
    return rows[f"public.{name}"].state == "parked"


async def ends(client: Client) -> bool:
    if client.refetches == 0:
        answer = await client.world.get(**client.params, handle=client.handle, offset=client.offset)
        assert answer.status in (200, 409), answer.body
        client.refetches += answer.status == 409
    return client.refetches > 0


async def write(world: RealWorld, name: str, number: int) -> None:
    """One transaction: rows come, change, move between filters, get other keys and go."""
    async with world.db.transaction():
        await world.db.execute(f"INSERT INTO {name} (id, a, b) VALUES ({100 + number}, 'new', {number})")
        await world.db.execute(f"UPDATE {name} SET a = a || '.{number}' WHERE id % 7 = {number % 7}")
        await world.db.execute(f"UPDATE {name} SET b = 90 - b WHERE id % 5 = {number % 5}")
        await world.db.execute(f"UPDATE {name} SET id = {200 + number} WHERE id = {number}")
        await world.db.execute(f"DELETE FROM {name} WHERE id = {40 + number}")


async def test_f126_a_shape_without_the_changed_column_goes_on_while_its_table_is_parked_and_copied_again(
    postgres_dsn: str,
) -> None:
    async with Polled(postgres_dsn, ddl(*CHANGES), SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        clients: list[tuple[Client, str]] = []
        for name in CHANGES:
            for more in ({}, {"where": "b > 30"}, {"replica": "full"}):
                client = await world.sync(table=name, columns="id,a", **more)
                clients.append((client, more.get("where", "true")))
        ended = [await world.sync(table=name) for name in CHANGES]
        ended += [await world.sync(table=n, columns="id,a", where="x > 3") for n in ("dropped", "renamed")]
        ended += [await world.sync(table="retyped", columns="id,x")]

        for number, (name, change) in enumerate(CHANGES.items(), 1):
            await write(world, name, 1)
            if number % 2:  # the stream comes to it first, or the catalogue
                async with world.db.transaction():
                    await write(world, name, 2)
                    await world.db.execute(change)  # type: ignore[arg-type]
                    await write(world, name, 3)
            else:
                await world.db.execute(change)  # type: ignore[arg-type]
        for client in ended:
            await until(lambda client=client: ends(client))
        for name in CHANGES:
            await write(world, name, 4)
        for client, where in clients:
            await follows(world, client, where)

        for name in COPIED_BY_AN_OPERATOR:
            assert await parks(world, name)
            answer = await world.get(table=name, columns="id,b", offset="-1")
            assert answer.status == 503, "nobody follows this shape yet"
        await world.break_stream()
        for number in (5, 6):
            for name in CHANGES:
                await write(world, name, number)
            for client, where in clients:
                await follows(world, client, where)

        for name in COPIED_BY_AN_OPERATOR:
            await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, f"public.{name}")
        world.capture.check_tables_soon()
        for number, name in enumerate([*CHANGES, *CHANGES], 7):
            await write(world, name, number % 30)
        for name in CHANGES:
            await until(lambda name=name: flows(world, name))
            await write(world, name, 38)
        for client, where in clients:
            await follows(world, client, where)
            answer = await world.get(**client.params, offset="-1")
            assert (answer.status, answer.handle) == (200, client.handle)


ENDING = {
    "swapped": "ALTER TABLE swapped RENAME a TO t; ALTER TABLE swapped RENAME c TO a;"
    " ALTER TABLE swapped RENAME t TO c",
    "computed": "ALTER TABLE computed DROP COLUMN x, ALTER a TYPE int USING a + 1",
    "returned": "ALTER TABLE returned DROP COLUMN a, DROP COLUMN x; ALTER TABLE returned ADD COLUMN a int DEFAULT 5",
    "keyless": "ALTER TABLE keyless DROP COLUMN x, DROP CONSTRAINT keyless_pkey",
    "unkeyed": "ALTER TABLE unkeyed DROP COLUMN id",
    "moved": "ALTER TABLE moved DROP COLUMN x; ALTER TABLE moved RENAME TO elsewhere",
    "emptied": "ALTER TABLE emptied DROP COLUMN x; TRUNCATE emptied",
}
"""Each has the same names and types as before in the columns (id, a), or a key that is another."""
LATER = {
    "swapped_later": "ALTER TABLE swapped_later RENAME a TO t; ALTER TABLE swapped_later RENAME c TO a;"
    " ALTER TABLE swapped_later RENAME t TO c",
    "unpublished": "",
    "listed": "",
    "divided": "CREATE TABLE divided2 (id int PRIMARY KEY, c int, a int); INSERT INTO divided2 VALUES (1001, 1, 1);"
    " ALTER TABLE divided ATTACH PARTITION divided2 FOR VALUES FROM (1000) TO (2000)",
}
"""Changes to a parked table that concern a column outside the shape."""


def ending_ddl() -> str:
    said = []
    for name in [*ENDING, *LATER]:
        parted = " PARTITION BY RANGE (id)" if name == "divided" else ""
        said.append(f"CREATE TABLE {name} (id int PRIMARY KEY, c int, a int, x int){parted}")
        if parted:
            said.append(f"CREATE TABLE {name}1 PARTITION OF {name} FOR VALUES FROM (0) TO (1000)")
        said.append(f"INSERT INTO {name} SELECT i, 1000 + i, i, i FROM generate_series(1, 9) i")
    return ";".join(said)


async def test_a_shape_starts_over_where_its_own_columns_may_be_others(postgres_dsn: str) -> None:
    async with Polled(postgres_dsn, ending_ddl(), SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        clients = {name: await world.sync(table=name, columns="id,a") for name in [*ENDING, *LATER]}
        for name in LATER:
            await world.db.execute(f"ALTER TABLE {name} DROP COLUMN x")
            await until(lambda name=name: parks(world, name))
            await follows(world, clients[name])
        publication = f'ALTER PUBLICATION "{world.capture.config.publication}"'
        await world.db.execute(f"{publication} DROP TABLE unpublished")
        await world.db.execute(f"{publication} DROP TABLE listed; {publication} ADD TABLE listed (id, c)")
        for said in [*ENDING.values(), *LATER.values()]:
            if said:
                await world.db.execute(said)  # type: ignore[arg-type]
        for client in clients.values():
            await until(lambda client=client: ends(client))


async def test_a_swap_of_columns_that_only_the_stream_tells_is_found_before_its_first_row(postgres_dsn: str) -> None:
    """The tables are not checked in between. Afterwards the names are as before."""
    names = "id int PRIMARY KEY, c int, a int, x int"
    made = f"CREATE TABLE t ({names}); INSERT INTO t VALUES (1, 10, 100, 0)"
    async with Unpolled(postgres_dsn, made, SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="t", columns="id,a")
        await world.db.execute("ALTER TABLE t DROP COLUMN x")
        await world.db.execute("INSERT INTO t VALUES (2, 20, 200)")
        await follows(world, client)
        swap = "ALTER TABLE t RENAME a TO t; ALTER TABLE t RENAME c TO a; ALTER TABLE t RENAME t TO c"
        await world.db.execute(f"{swap}; INSERT INTO t VALUES (3, 30, 300); {swap}")
        seen: list[Any] = []

        async def over() -> bool:
            answer = await client.step()
            seen.extend(row["a"] for row in client.rows.values())
            return answer.status == 409

        await until(over)
        assert not {"30", "10", "20"} & set(seen)


GENERATED = {
    "g_dropped": "ALTER TABLE g_dropped DROP COLUMN g",
    "g_added": "ALTER TABLE g_added ADD COLUMN h int GENERATED ALWAYS AS (b + 1) STORED",
    "g_plain": "ALTER TABLE g_plain ALTER g DROP EXPRESSION",
    "g_other": "ALTER TABLE g_other DROP COLUMN g, ADD COLUMN g int GENERATED ALWAYS AS (b * 3) STORED",
    "g_beside": "ALTER TABLE g_beside DROP COLUMN x",
}


async def test_a_shape_beside_generated_columns_continues_while_these_and_other_columns_change(
    postgres_dsn: str,
) -> None:
    made = "id int PRIMARY KEY, a text, b int, x int, g int GENERATED ALWAYS AS (b * 2) STORED"
    ddl = ";".join(
        f"CREATE TABLE {name} ({made});"
        f"INSERT INTO {name} (id, a, b, x) SELECT i, 'a' || i, i, i FROM generate_series(1, 90) i"
        for name in GENERATED
    )
    async with Polled(postgres_dsn, ddl, SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        clients = {name: await world.sync(table=name, columns="id,a", where="b > 30") for name in GENERATED}
        for name, change in GENERATED.items():
            await write(world, name, 1)
            await world.db.execute(change)  # type: ignore[arg-type]
            await write(world, name, 2)
        await world.break_stream()
        for name, client in clients.items():
            await write(world, name, 3)
            await follows(world, client, "b > 30")
        for name in ("g_beside", "g_dropped", "g_other"):
            await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, f"public.{name}")
        world.capture.check_tables_soon()
        for name, client in clients.items():
            await until(lambda name=name: flows(world, name))
            await write(world, name, 4)
            await follows(world, client, "b > 30")
            answer = await world.get(**client.params, offset="-1")
            assert (answer.status, answer.handle) == (200, client.handle)


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_shape_continues_while_its_table_is_copied_again_and_what_changes_is_set_aside(
    postgres_dsn: str, given_up: bool
) -> None:
    """`given_up`: the stream breaks after the copy of the only table was abandoned, so nothing is copied or carried."""
    async with SetAside(postgres_dsn, ddl("dropped"), SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        where = "b < 300"
        client = await world.sync(table="dropped", columns="id,a", where=where)
        await world.db.execute("INSERT INTO dropped SELECT i, 'a' || i, i, i FROM generate_series(1001, 5000) i")
        await write(world, "dropped", 1)
        await world.db.execute(CHANGES["dropped"])  # type: ignore[arg-type]
        await until(lambda: parks(world, "dropped"))
        await write(world, "dropped", 2)
        await follows(world, client, where)
        await recopy_requests.request_recopy(world.catalogue, world.capture.config.name, "public.dropped")
        world.capture.check_tables_soon()

        async def set_aside() -> bool:
            """Rows change all the while."""
            await world.db.execute("UPDATE dropped SET a = a || '.' WHERE id < 20")
            (row,) = await world.catalogue.all_tables()
            return row.side_topic is not None

        await until(set_aside)
        await write(world, "dropped", 3)
        await follows(world, client, where)
        # From here on there is no side topic, and WAL is kept for the table.
        await world.db.execute("ALTER TABLE dropped ADD COLUMN z int")
        await write(world, "dropped", 4)
        await follows(world, client, where)
        if given_up:
            await world.capture._session.states.abandon_copy("public.dropped")  # type: ignore[union-attr]
        await world.break_stream()
        await write(world, "dropped", 5)
        await follows(world, client, where)
        await until(lambda: flows(world, "dropped"))
        await write(world, "dropped", 6)
        await follows(world, client, where)
        answer = await world.get(**client.params, offset="-1")
        assert (answer.status, answer.handle) == (200, client.handle)


async def test_what_nobody_follows_of_a_parked_table_is_not_published_any_more(postgres_dsn: str) -> None:

    async def _not(found: Any) -> bool:
        return not await found()

    async with Polled(postgres_dsn, ddl("dropped"), SETTINGS) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="dropped", columns="id,a")
        await world.db.execute(CHANGES["dropped"])  # type: ignore[arg-type]
        await until(lambda: parks(world, "dropped"))
        await write(world, "dropped", 1)
        await follows(world, client)

        async def published() -> bool:
            cursor = await world.db.execute("SELECT FROM pg_publication_tables WHERE tablename = 'dropped'")
            return bool(await cursor.fetchall())

        assert await published()
        shape = world.service.find_by_handle(client.handle)
        assert shape is not None
        world.service.delete(shape)
        await until(lambda: _not(published))
        assert (await world.get(**client.params, handle=client.handle, offset=client.offset)).status == 409
        assert (await world.get(**client.params, offset="-1")).status == 503
