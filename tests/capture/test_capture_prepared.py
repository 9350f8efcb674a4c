"""Prepared transactions, which have no session: the blocking one is named, with the statement that ends it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from support.capture.servers import INSTALLED, SETTINGS
from support.capture.world import World, plain
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.errors import UnavailableError
from tidemill.cli.verify import postgres as verify

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module", params=["18", "15"])
def postgres_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedPostgres]:
    binaries = None if request.param == "18" else INSTALLED / f"postgres-{request.param}" / "native" / "bin"
    if binaries is not None and not (binaries / "postgres").exists():
        pytest.skip(f"PostgreSQL {request.param} is not here: tests/clients/install")
    data_dir = tmp_path_factory.mktemp(f"prepared{request.param}") / "data"
    settings = {**SETTINGS, "max_prepared_transactions": "5"}
    with EmbeddedPostgres(data_dir, settings=settings, binaries=binaries) as server:
        yield server


def prepare(dsn: str, gid: str, statement: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(statement)
        connection.execute(f"PREPARE TRANSACTION '{gid}'")


async def test_f494_a_prepared_transaction_in_the_way_is_named_with_the_statement_that_ends_it(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "LOCK_BUDGET_S", 0.1)
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY, v int)")
        prepare(world.dsn, "it''s open", "INSERT INTO t VALUES (1, 1)")
        async with world.capture(wait=False, table_poll_s=0.1) as capture:

            async def named() -> bool:
                marks = world.tracker.report("p", world.clock.now_ms()).marks
                return any(
                    mark.held_by == "postgres-prepared:it's open" and "COMMIT PREPARED 'it''s open'" in mark.reason
                    for mark in marks
                )

            await until(named, "the set-up names what it waits for")
            await world.sql("COMMIT PREPARED 'it''s open'")
            await until(lambda: capture.streaming, "the capture streams")
            await world.flowing("t")
            # A prepared transaction that locks a table which is created later.
            await world.sql("CREATE TABLE c (id int PRIMARY KEY, v int)")
            prepare(world.dsn, "other", "INSERT INTO c VALUES (2, 2)")
            row = await world.paused("c", "gid='other'")
            assert row.state == "refused" and "COMMIT PREPARED 'other' or ROLLBACK PREPARED 'other'" in row.fix
            # `verify` meets the prepared transaction as well.
            await world.sql("CREATE TABLE d (id int PRIMARY KEY, v int)")
            with pytest.raises(UnavailableError, match="gid='other'"):
                async with verify.open_source_point(world.dsn, ["public.c"], "nonce"):
                    pass
            await world.sql("COMMIT PREPARED 'other'")
            await world.flowing("c")
            await world.caught_up()
            for table in ("t", "c"):
                assert await world.folded(table) == await plain(world, table)
