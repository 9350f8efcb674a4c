"""A role that captures without privileges on the tables."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.capture.world import World
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.capture.setup.privileges import check_capture

NAMED_TABLES = (
    "CREATE TABLE a (id int PRIMARY KEY, v text)",
    "INSERT INTO a VALUES (1, 'x')",
    'CREATE SCHEMA "Other one"',
    'CREATE TABLE "Other one".b (id int PRIMARY KEY, v text)',
    "CREATE TABLE split (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE split_low PARTITION OF split FOR VALUES FROM (0) TO (100)",
)

NAMED = ("public.*", "Other one.*")


@asynccontextmanager
async def reader_of(world: World) -> AsyncIterator[str]:
    """The DSN of a role with LOGIN and REPLICATION; the world captures as this role, and its SQL stays the owner's."""
    role, owner = f"reader_{world.name}", world.dsn
    await world.sql(f"CREATE ROLE {role} LOGIN REPLICATION")
    world.dsn = owner.replace("postgres@", f"{role}@")
    try:
        yield world.dsn
    finally:
        world.dsn = owner
        await until(world.slot_dropped, "the slot is dropped")
        await world.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def missing(world: World, **settings: Any) -> list[str]:
    """The statements that doctor prints."""
    try:
        await check_capture(world.config(tables=NAMED, **settings))
    except InvalidError as error:
        return statements_in(error.fix)
    return []


def statements_in(fix: str) -> list[str]:
    """Return the statements for an administrator, without the statements that undo them."""
    head, _, rest = fix.partition("Have an administrator run:\n")
    assert rest, head
    return [line.strip().rstrip(";") for line in itertools.takewhile(lambda line: line[:2] == "  ", rest.split("\n"))]
