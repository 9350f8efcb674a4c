"""Every PostgreSQL version that capture supports, except the newest, on which all other tests run. Tests from other
files run again on servers of versions 14 to 17 (`tests/clients/install` fetches them).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.capture.on_every_server import (
    test_a_key_change_is_a_tombstone_then_an_upsert_at_the_next_ordinal as test_key_change,
)
from support.capture.on_every_server import (
    test_a_large_transaction_of_several_tables_is_one_boundary as test_large_transaction,
)
from support.capture.on_every_server import test_all_that_a_capture_changed_is_as_it_was as test_drop
from support.capture.on_every_server import test_an_unchanged_toasted_value_is_filled_in_from_the_old_row as test_toast
from support.capture.on_every_server import (
    test_an_unchanged_toasted_value_is_named_and_left_out_and_each_identity_is_right_when_it_is_switched as test_as_is,
)
from support.capture.on_every_server import test_captures_cut_off_at_random_moments_resume_exactly_once as test_resume
from support.capture.on_every_server import (
    test_f402_tables_that_cannot_be_captured_are_told_and_stop_nothing_now_or_later as test_refused,
)
from support.capture.on_every_server import test_f406_a_table_whose_identity_is_taken_away_gets_it_back as test_identity
from support.capture.on_every_server import (
    test_f486_keys_that_move_within_a_statement_leave_the_topic_as_select_has_the_table as test_rivals,
)
from support.capture.on_every_server import (
    test_h14_a_transaction_open_across_the_set_up_is_not_lost as test_open_writer,
)
from support.capture.on_every_server import test_partitions_of_a_table_are_captured_as_their_root as test_partitions
from support.capture.on_every_server import (
    test_truncate_is_one_record_without_key_and_empties_the_table as test_truncate,
)
from support.capture.on_every_server import (
    test_what_doctor_prints_is_all_that_an_administrator_has_to_run as test_rights,
)
from support.capture.servers import INSTALLED, SETTINGS
from support.capture.world import GOOD, World, good_flows, plain
from support.postgres import EmbeddedPostgres
from support.waiting import until
from tidemill.base.errors import InvalidError
from tidemill.capture.setup.privileges import check_capture

pytestmark = pytest.mark.postgres

__all__ = [
    "test_as_is", "test_drop", "test_identity", "test_key_change", "test_large_transaction", "test_open_writer",
    "test_partitions", "test_refused", "test_resume", "test_rights", "test_rivals", "test_toast", "test_truncate",
]  # fmt: skip


@pytest.fixture(scope="module", params=["14", "15", "16", "17"])
def postgres_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedPostgres]:
    """The server of `new_database` and `postgres_dsn`, in place of the newest."""
    binaries = INSTALLED / f"postgres-{request.param}" / "native" / "bin"
    if not (binaries / "postgres").exists():
        pytest.skip(f"PostgreSQL {request.param} is not here: tests/clients/install")
    data_dir = tmp_path_factory.mktemp(f"postgres{request.param}") / "data"
    with EmbeddedPostgres(data_dir, settings=SETTINGS, binaries=binaries) as server:
        yield server


async def test_a_failover_slot_is_refused_before_17(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql("CREATE TABLE t (id int PRIMARY KEY)")
        (version,) = (await world.select("SHOW server_version_num"))[0]
        config = world.config(failover=True)
        if int(version) >= 170_000:
            await check_capture(config)
        else:
            with pytest.raises(InvalidError, match="no failover slots"):
                await check_capture(config)


async def test_f424_generated_columns_are_not_carried_and_nothing_fails(postgres_dsn: str) -> None:
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD,
            "CREATE TABLE stored (id int PRIMARY KEY, v int, d int GENERATED ALWAYS AS (v * 2) STORED)",
            "INSERT INTO stored VALUES (1, 1)",
        )
        async with world.capture(table_poll_s=0.1):
            await world.sql(
                "UPDATE stored SET v = 5", "INSERT INTO stored VALUES (2, 2)", "DELETE FROM stored WHERE id = 1"
            )
            await good_flows(world)
            assert await world.folded("stored") == {'{"id":2}': {"id": 2, "v": 2}}
            await world.sql("ALTER TABLE good RENAME v TO x", "INSERT INTO good VALUES (50, 50)")
            await world.paused("good", "'x'")
            await world.sql("ALTER TABLE stored REPLICA IDENTITY NOTHING")

            async def full() -> bool:
                return await world.select("SELECT relreplident FROM pg_class WHERE relname = 'stored'") == [("f",)]

            await until(full, "the identity is whole again", 4.0)


GENERATED_KEY = (
    *GOOD,
    "CREATE TABLE docs (id int, lang text, tag text GENERATED ALWAYS AS (lower(lang)) STORED, body text,"
    " PRIMARY KEY (id, tag))",
    "INSERT INTO docs (id, lang, body) VALUES (1, 'EN', 'first'), (1, 'DE', 'second')",
)


@pytest.mark.parametrize("tables", [("public.*",), ("good", "docs")])
async def test_f437_a_table_with_a_generated_key_column_is_refused_until_the_column_is_an_ordinary_one(
    postgres_dsn: str, tables: tuple[str, ...]
) -> None:
    """Regression: the table was captured with the rest of its key, under which its rows replaced one another."""
    async with World(postgres_dsn) as world:
        await world.sql(
            *GENERATED_KEY,
            # An included column does not make the key unique.
            "CREATE TABLE wide (id int, v int, d int GENERATED ALWAYS AS (v * 2) STORED, PRIMARY KEY (id) INCLUDE (d))",
            "INSERT INTO wide VALUES (1, 1)",
        )
        async with world.capture(tables=(*tables, "wide"), table_poll_s=0.1):
            await good_flows(world)
            assert await world.folded("wide") == await plain(world, "wide")
            row = (await world.tables())["public.docs"]
            assert row.state == ("refused" if "docs" in tables else "left")
            assert "column=tag" in row.reason and "DROP EXPRESSION" in row.fix
            assert await world.select("SELECT relreplident FROM pg_class WHERE relname = 'docs'") == [("d",)]
            await world.sql("ALTER TABLE docs ALTER tag DROP EXPRESSION")
            await world.flowing("docs")
            await world.sql("INSERT INTO docs VALUES (1, 'FR', 'fr', 'third')")
            await world.caught_up()
            found = await world.folded("docs")
            assert [(row["tag"], row["body"]) for _, row in sorted(found.items())] == [
                ("de", "second"), ("en", "first"), ("fr", "third"),
            ]  # fmt: skip


@pytest.mark.parametrize("poll_s", [0.1, 30.0])
async def test_f437_a_table_whose_key_gets_a_generated_column_is_parked(postgres_dsn: str, poll_s: float) -> None:
    """Either the catalogue shows the key, or the first row after the change."""
    async with World(postgres_dsn) as world:
        await world.sql(
            *GOOD, "CREATE TABLE t (id int PRIMARY KEY, v int, d int GENERATED ALWAYS AS (v * 2) STORED NOT NULL)",
            "INSERT INTO t VALUES (1, 1)",
        )  # fmt: skip
        async with world.capture(table_poll_s=poll_s):
            await world.flowing("t")
            await world.sql("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, d)")
            if poll_s > 1:
                await world.sql("INSERT INTO t VALUES (1, 2)")
            row = await world.paused("t", "primary key")
            assert row.state == "parked"
            assert await world.folded("t") == {'{"id":1}': {"id": 1, "v": 1}}
            await good_flows(world)
