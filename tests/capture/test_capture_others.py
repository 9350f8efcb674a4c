"""Effect of publications on a table's UPDATE and DELETE: predictions from the catalogue, compared with PostgreSQL."""

from __future__ import annotations

import asyncio
import random

import psycopg
import pytest

from support.capture.servers import postgres_server as postgres_server
from tidemill.capture.catalog.foreign_publications import find_identity_failures, find_objections
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection

pytestmark = pytest.mark.postgres

PUBLICATIONS = 40
"""Number of publications, which a seed chooses one or two at a time."""


TABLES = (
    "CREATE SCHEMA apart",
    "CREATE TABLE plain (id int PRIMARY KEY, v int NOT NULL, w int)",
    "CREATE UNIQUE INDEX plain_v ON plain (v) INCLUDE (w)",
    "CREATE TABLE made (id int NOT NULL, v int NOT NULL, g int GENERATED ALWAYS AS (id * 2) STORED NOT NULL,"
    " PRIMARY KEY (id))",
    "CREATE UNIQUE INDEX made_g ON made (g)",
    "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, v int NOT NULL)",
    "CREATE TABLE keyless (id int, v int)",
    "CREATE TABLE root (w int, id int PRIMARY KEY, v int NOT NULL) PARTITION BY RANGE (id)",
    # Partitions with another column order, in another schema, and one more level.
    "CREATE TABLE apart.low (v int NOT NULL, id int NOT NULL, w int, PRIMARY KEY (id))",
    "ALTER TABLE root ATTACH PARTITION apart.low FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE high PARTITION OF root FOR VALUES FROM (100) TO (1000) PARTITION BY RANGE (id)",
    "CREATE TABLE higher PARTITION OF high FOR VALUES FROM (100) TO (500)",
    "CREATE UNIQUE INDEX low_v ON apart.low (v)",
)
IDENTITIES = {
    "plain": ("USING INDEX plain_v",),
    "made": ("USING INDEX made_g",),
    "late": (),
    "keyless": (),
    "apart.low": ("USING INDEX low_v",),
    "higher": (),
}
HELD = ("plain", "made", "late", "keyless", "root", "apart.low", "high", "higher")
COLUMNS = {"made": ("id", "v", "g"), "late": ("id", "v"), "keyless": ("id", "v")}


def publication(rng: random.Random, name: str, version: int) -> str:
    options = [f"publish_via_partition_root = {rng.choice(('true', 'false'))}"]
    options.append(f"publish = '{rng.choice(('insert, update, delete', 'update', 'delete', 'insert, truncate'))}'")
    if version >= 180_000:
        options.append(f"publish_generated_columns = {rng.choice(('none', 'stored'))}")
    what = rng.choices(("tables", "all", "schema"), (8, 1, 1))[0]
    if what == "all":
        return f"CREATE PUBLICATION {name} FOR ALL TABLES WITH ({', '.join(options)})"
    if what == "schema":
        schema = rng.choice(("public", "apart"))
        return f"CREATE PUBLICATION {name} FOR TABLES IN SCHEMA {schema} WITH ({', '.join(options)})"
    parts = []
    for table in rng.sample(HELD, rng.randint(1, 3)):
        columns = COLUMNS.get(table, ("id", "v", "w"))
        some = rng.sample(columns, rng.randint(1, len(columns)))
        part = table
        if rng.random() < 0.5:
            part += f" ({', '.join(some)})"
        if rng.random() < 0.5:
            part += f" WHERE ({rng.choice([c for c in columns if c != 'g'])} > 5)"
        parts.append(part)
    return f"CREATE PUBLICATION {name} FOR TABLE {', '.join(parts)} WITH ({', '.join(options)})"


FAILS = """
CREATE FUNCTION fails(target text, identity text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER TABLE %s REPLICA IDENTITY %s', target, identity);
    EXECUTE format('UPDATE ONLY %s SET id = DEFAULT WHERE false', target);
    EXECUTE format('DELETE FROM ONLY %s WHERE false', target);
    RETURN false;
EXCEPTION WHEN invalid_column_reference OR object_not_in_prerequisite_state THEN
    RETURN true;
END $$
"""
"""SQL function that returns whether PostgreSQL rejects an UPDATE or a DELETE under an identity."""


def test_the_catalogue_says_which_identity_makes_update_and_delete_fail(postgres_dsn: str) -> None:
    rng = random.Random(7)

    async def compared(connection: psycopg.Connection) -> dict[str, int]:
        wire = await PgConnection.connect(postgres_dsn, purpose="test")
        causes: dict[str, int] = {}
        try:
            oids = {t: int((await wire.value(f"SELECT '{t}'::regclass::oid")) or 0) for t in IDENTITIES}
            names = {oid: table for table, oid in oids.items()}
            asked = [(t, i) for t, more in IDENTITIES.items() for i in ("FULL", "DEFAULT", "NOTHING", *more)]
            for _ in range(PUBLICATIONS):
                statements = []
                for name in ("one", "two")[: rng.randint(1, 2)]:
                    statement = publication(rng, name, wire.server_version)
                    try:
                        connection.execute(statement)
                    except psycopg.Error:
                        continue  # such as a column list on a root that is not published as one
                    statements.append(statement)
                found = await find_objections(wire, CaptureConfig("none", postgres_dsn))
                withheld = {oid for each in found.values() for oid in each.relations}
                said: dict[tuple[str, str], set[str]] = {}
                for each in await find_identity_failures(wire, [(oids[table], identity) for table, identity in asked]):
                    said.setdefault((names[each.oid], each.identity), set()).add(each.publication)
                    causes[each.cause] = causes.get(each.cause, 0) + 1
                did = connection.execute(
                    "SELECT t, i FROM unnest(%s::text[], %s::text[]) AS a(t, i) WHERE fails(t, i)",
                    ([table for table, _ in asked], [identity for _, identity in asked]),
                ).fetchall()
                assert set(said) == set(did), statements
                assert {names[oid] for oid in withheld} == {table for table, identity in did if identity == "FULL"}
                assert {name for found in said.values() for name in found} <= {"one", "two"}
                for statement in statements:
                    connection.execute(f"DROP PUBLICATION {statement.split()[2]}")
        finally:
            await wire.aclose()
        return causes

    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        for statement in (*TABLES, FAILS):
            connection.execute(statement)
        causes = asyncio.run(compared(connection))
        expected = {"column list", "row filter", "identity"}
        if connection.info.server_version >= 180_000:
            expected.add("generated column")
        assert set(causes) == expected and min(causes.values()) >= 5, causes
