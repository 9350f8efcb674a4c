"""Keys whose equality is wider than their text: a captured table has each row once, spelled as SELECT spells it."""

from __future__ import annotations

import random

import pytest

from support.capture.column_types import selected
from support.capture.stored_shard import Stored, decoded, schema_of
from support.capture.world import World
from tidemill.shapes.shards.pg_text import text_columns

pytestmark = pytest.mark.postgres

SPELLINGS = {
    "numeric": ("'1'", "'1.0'", "'1.00'", "'01.000'", "'2'", "'NaN'"),
    "char(6)": ("'a'", "'a  '", "'a     '", "'b'"),
    "citext": ("'key'", "'KEY'", "'Key'", "'other'"),
    "jsonb": ("'[1, 2]'", "'[1.0, 2]'", "'[1.00,2.0]'", "'{}'"),
    "interval": ("'1 mon'", "'30 days'", "'720:00'", "'1 s'"),
    "timetz": ("'00:00+00'", "'12:00+12'", "'12:00+00'"),
    "float8": ("'0'", "'-0'", "'NaN'", "'1'"),
    "real": ("'0'", "'-0'", "'NaN'", "'0.1'"),
    "float8[]": ("'{0}'", "'{-0}'", "'{0,1}'", "'{NaN}'"),
    "numrange": ("'[1,2)'", "'[1.0,2.00)'", "'[1,3)'"),
}


def changes(seed: int) -> list[str]:
    """Rows that are inserted, deleted and re-spelled in their key, partly in one transaction."""
    rng, out = random.Random(seed), list[str]()
    for number, (kind, spellings) in enumerate(SPELLINGS.items()):
        for _ in range(12):
            old, new = (f"{rng.choice(spellings)}::{kind}" for _ in range(2))
            out.append(
                rng.choice(
                    (
                        f"INSERT INTO k{number} VALUES ({new}, {rng.randrange(9)}) ON CONFLICT DO NOTHING",
                        f"INSERT INTO k{number} VALUES ({new}, 0) ON CONFLICT (k) DO UPDATE SET k = excluded.k, v = 9",
                        f"UPDATE k{number} SET k = {new}, v = v + 1 WHERE k = {new}",
                        f"UPDATE k{number} SET k = {new} WHERE k = {old} AND NOT EXISTS"
                        f" (SELECT FROM k{number} WHERE k = {new})",
                        f"DELETE FROM k{number} WHERE k = {old}",
                    )
                )
            )
    rng.shuffle(out)
    return out


async def test_a_key_that_is_spelled_otherwise_is_the_same_row(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE EXTENSION IF NOT EXISTS citext")
        for number, (kind, spellings) in enumerate(SPELLINGS.items()):
            await world.sql(f"CREATE TABLE k{number} (k {kind} PRIMARY KEY, v int)")
            await world.sql(f"INSERT INTO k{number} VALUES ({spellings[0]}, 1), ({spellings[-1]}, 2)")
        async with world.capture(partitions=4):
            for at in range(0, len(said := changes(7)), 5):
                await world.transaction(*said[at : at + 5])
            await world.caught_up()
            for number, kind in enumerate(SPELLINGS):
                table = f"k{number}"
                stored = await Stored.of(world, table, await schema_of(world, table))
                _, captured = await decoded(world, table, await world.records(table))
                assert captured.dead.num_rows == 0 and captured.stop is None
                await stored.step(captured.commands)
                found = sorted(zip(*text_columns(await stored.contents(), ["k", "v"]), strict=True))
                zeroed = "CASE WHEN k = 0 THEN '0' ELSE k::text END" if kind in ("float8", "real") else "k"
                wanted = [tuple(row) for row in await selected(world, f"SELECT {zeroed}, v FROM {table}")]
                assert found == sorted(wanted), f"type={kind}"
