"""Every type that a column may have, through capture: the records equal SELECT, and so does the shard
(test_capture_types_shard.py). PostgreSQL's own text and arithmetic are the reference, not `verify`'s.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.capture.column_types import BUILT_IN, columns, filled, quoted, selected
from support.capture.world import World
from tidemill.topics.batch import Record

pytestmark = pytest.mark.postgres

NUMBERS = ("smallint", "integer", "bigint", "real", "double precision")

NO_INPUT = {
    "gtsvector", "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary",
    "pg_brin_minmax_multi_summary",
}  # fmt: skip
"""Types for the server's own use: their input functions reject everything."""
NO_XML = {"xml"}
"""Type that the server of these tests is built without."""


class Number(str):
    """A number with the digits that it has in the JSON text."""


def said(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.value or b"", parse_int=Number, parse_float=Number)
    return found


def as_json(text: str | None, kind: str) -> Any:
    """Return the JSON value that the format promises for a text that PostgreSQL prints."""
    if text is None:
        return None
    if kind == "boolean":
        return {"t": True, "f": False}[text]
    return Number(text) if kind in NUMBERS and text.lstrip("-")[0].isdigit() else text


async def test_no_type_of_the_server_is_missing_here(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        here = ", ".join(f"'{kind}'::regtype" for kind in BUILT_IN if kind != '"char"')
        rows = await world.select(
            "SELECT t.typname::text FROM pg_type t WHERE t.typnamespace = 'pg_catalog'::regnamespace"
            f" AND t.typtype IN ('b', 'r', 'm') AND t.typcategory <> 'A' AND t.oid NOT IN ({here})"
        )
        assert {name for (name,) in rows} == NO_INPUT | NO_XML | {"char"}


async def test_every_type_is_in_the_topic_as_select_prints_it_from_the_copy_and_from_the_stream(
    postgres_dsn: str,
) -> None:
    async with World(postgres_dsn) as world:
        count = await filled(world)
        async with world.capture():
            names = ", ".join(quoted(name) for name, _, _ in columns())
            await world.sql(f"INSERT INTO kinds (id, {names}) SELECT id + 100, {names} FROM kinds")
            await world.sql("UPDATE kinds SET id = id + 100 WHERE id >= 100")
            await world.caught_up()
            records = await world.records("kinds")
        kinds = ["integer", *(kind for _, kind, _ in columns())]
        expected = {
            int(row[0] or 0): [as_json(text, kind) for text, kind in zip(row, kinds, strict=True)]
            for row in await selected(world, "SELECT * FROM kinds")
        }
        assert len(expected) == 2 * count
        found = {int(value["id"]): value for value in map(said, (r for r in records if r.value is not None))}
        for at, row in expected.items():
            for (name, kind), wanted in zip([("id", "integer"), *((n, k) for n, k, _ in columns())], row, strict=True):
                got = found[at][name]
                assert (got, type(got)) == (wanted, type(wanted)), (at, name, kind)
            # Copied, inserted, updated: the same value has one text.
            assert {**found[at], "id": ""} == {**found[at % 100], "id": ""}
            assert at < 100 or {**found[at - 100], "id": ""} == {**found[at], "id": ""}
        assert len(records) == 4 * count
