"""Captured rows of every type in a shard, and values that its columns cannot hold: through the decoder, the upsert, a
part and a snapshot. PostgreSQL's own text and arithmetic are the reference.
"""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from support.capture.column_types import columns, filled, quoted, selected
from support.capture.stored_shard import Stored, decoded, schema_of
from support.capture.types_in_tables import (
    check_columns,
    elements,
    expression,
)
from support.capture.world import World
from tidemill.shapes.shards.pg_text import text_columns
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.pg_columns import element_type

pytestmark = pytest.mark.postgres


def shown(name: str, kind: str) -> str:
    """SQL for what a shape over the table shows."""
    if not is_nested(kind):
        return quoted(name)
    if element_type(kind) == "string":
        return elements(quoted(name), f"{quoted(name)}[n]")
    return f"to_json({quoted(name)}{'::bigint[]' if kind == 'array<int64>' else ''})"


async def test_every_type_is_in_the_shard_what_postgres_says_it_is(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        count = await filled(world)
        async with world.capture():
            names = ", ".join(quoted(name) for name, _, _ in columns())
            await world.sql(f"INSERT INTO kinds (id, {names}) SELECT id + 100, {names} FROM kinds")
            await world.caught_up()
            records = await world.records("kinds")
        for times in (1, 20):  # record by record, and by blocks
            schema, captured = await decoded(world, "kinds", records * times)
            assert captured.dead.num_rows == 0 and captured.stop is None
            rows = captured.commands.rows
            assert rows.num_rows == 2 * count * times
            wanted = await selected(world, f"SELECT {', '.join(map(expression, schema))} FROM kinds ORDER BY id")
            at = {row[0]: row for row in wanted}
            check_columns(rows, schema, at)
        types = {column.type for column in schema}
        assert types >= {"timestamp", "date", "binary", "bool", "json", "decimal(12,2)", "float32", "int16", "string"}
        assert "timestamp_ntz" in types
        assert {f"array<{kind}>" for kind in types - {"json"} if not is_nested(kind)} <= types
        # The shard returns the values, from its part; and a shape over it prints them.
        stored = await Stored.of(world, "kinds", await schema_of(world, "kinds"))
        await stored.step(captured.commands)
        contents = await stored.contents()
        assert contents.num_rows == 2 * count
        check_columns(contents, schema, at)
        named = ", ".join(shown(column.name, column.type) for column in schema)
        texts = {row[0]: row for row in await selected(world, f"SELECT {named} FROM kinds")}
        reported = zip(*text_columns(contents, [column.name for column in schema]), strict=True)
        for row in reported:
            for column, value, text in zip(schema, row, texts[row[0]], strict=True):
                if column.type == "bool":
                    text = {"t": "true", "f": "false"}.get(text or "")
                assert value == text, (column, row[0])
        # A second run changes nothing: every value equals itself.
        assert (await stored.step(captured.commands)).num_rows == 0


BAD = {
    "price": ("numeric(6,2)", "NaN"),
    "at": ("timestamp without time zone", "294276-12-31 23:59:59.999999"),
    "zoned": ("timestamp with time zone", "294276-12-31 23:59:59.999999+00"),
    "third": ("timestamp(3) without time zone", "294247-01-10 04:00:54.776"),
    "prices": ("numeric(6,2)[]", "{1.50,NaN}"),
    "ats": ("timestamp without time zone[]", '{infinity,"294276-12-31 23:59:59.999999"}'),
    "cells": ("integer[]", "{{1,2},{3,4}}"),
    "words": ("text[]", '[0:0][2:3]={{a,"b c"}}'),
}
"""The third timestamp is the first millisecond beyond 2⁶³ µs."""


async def test_a_value_that_its_column_cannot_hold_is_a_dead_letter_and_a_good_one_heals_its_row(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(f"CREATE TABLE t (id int PRIMARY KEY, {', '.join(f'{n} {k}' for n, (k, _) in BAD.items())})")
        async with world.capture():
            await world.sql("INSERT INTO t VALUES (0)")
            for at, (name, (_, value)) in enumerate(BAD.items(), 1):
                await world.sql(f"INSERT INTO t (id, {name}) VALUES ({at}, '{value}')")
            await world.caught_up()
            bad = await world.records("t")
            for at, name in enumerate(BAD, 1):
                await world.sql(f"UPDATE t SET {name} = NULL WHERE id = {at}")
            await world.caught_up()
            healed = (await world.records("t"))[len(bad) :]
        _, first = await decoded(world, "t", bad)
        _, by_blocks = await decoded(world, "t", bad * 20)
        assert by_blocks.dead.num_rows == 20 * first.dead.num_rows
        assert {*by_blocks.dead.column("reason").to_pylist()} == {*first.dead.column("reason").to_pylist()}
        letters = first.dead.to_pylist()
        assert [(x["offset"], x["table"], x["key"]) for x in letters] == [
            (at, "public.t", f'{{"id":{at}}}') for at in range(1, len(BAD) + 1)
        ]
        for letter, name in zip(letters, BAD, strict=True):
            assert f"table=public.t column={name}:" in letter["reason"]
            more = "more than one dimension" in letter["reason"] and f"as_text={name!r}" in letter["reason"]
            assert more is (name in ("cells", "words"))
        live = {r["id"]: r["_live"] for r in first.commands.rows.to_pylist()}
        assert live == {0: True} | dict.fromkeys(range(1, len(BAD) + 1), False), "no old value stays as if current"
        _, second = await decoded(world, "t", healed)
        assert second.dead.num_rows == 0
        assert {r["id"]: r["_live"] for r in second.commands.rows.to_pylist()} == dict.fromkeys(
            range(1, len(BAD) + 1), True
        )


async def test_minus_zero_is_a_value_of_its_own_and_in_a_key_the_same_as_zero(postgres_dsn: str) -> None:
    """An update from 0 to -0 is a change. As a key, PostgreSQL holds one of the two, however it is printed: its records
    are in one partition, in order, and form one row.
    """
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE z (id float8 PRIMARY KEY, f float8, r real)")
        async with world.capture(partitions=8):
            await world.sql("INSERT INTO z SELECT n * 0.5, 0, 0 FROM generate_series(-4, 4) n")
            await world.caught_up()
            first = await world.records("z")
            await world.sql("UPDATE z SET f = '-0', r = '-0' WHERE id = 0")
            await world.sql("UPDATE z SET id = '-0' WHERE id = 0", "UPDATE z SET id = 0 WHERE id = 0")
            await world.sql("UPDATE z SET id = '-0' WHERE id = 0", "DELETE FROM z WHERE id = 2")
            await world.caught_up()
            known = {record.headers for record in first}
            later = [record for record in await world.records("z") if record.headers not in known]
        assert len(later) == 5, "an update from one zero to the other is one record: no key goes"
        assert {r.key for r in later} == {b'{"id":0}', b'{"id":2}'}
        assert b'{"id":-0,"f":-0,"r":-0}' in {r.value for r in later}
        stored = await Stored.of(world, "z", await schema_of(world, "z"))
        for records in (first, later):
            _, captured = await decoded(world, "z", records)
            updates = await stored.step(captured.commands)
        changed = updates.filter(pc.equal(updates.column("id"), 0.0)).to_pylist()
        assert [(str(row["f"]), str(row["r"]), row["_diff"]) for row in changed] == [
            ("0.0", "0.0", -1),
            ("-0.0", "-0.0", 1),
        ]
        contents = (await stored.contents()).sort_by("id")
        found = list(zip(*text_columns(contents, ["id", "f", "r"]), strict=True))
        wanted = [tuple(row) for row in await selected(world, "SELECT id + 0, f, r FROM z ORDER BY id")]
        assert found == wanted and ("0", "-0", "-0") in found
        assert await selected(world, "SELECT id FROM z WHERE id = 0") == [["-0"]], "which the shard has as 0"
