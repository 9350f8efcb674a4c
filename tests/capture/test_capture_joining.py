"""Tables copied beside the stream: what the catalogue says of them is what the running session does, and who holds a
copy back is named."""

from __future__ import annotations

from typing import Any

import pytest
from capture_world import World, until
from test_capture_tables import GOOD, good_flows, in_world, plain

from tidemill.base.errors import Unknown
from tidemill.metastore.catalogue import CaptureTableRow

pytestmark = pytest.mark.postgres


def test_a_copy_that_is_recorded_flows_though_the_next_one_cannot_be_recorded(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables are copied together; the outcome of writing the second one's snapshot is unknown, again and again."""

    async def scenario(world: World) -> None:
        await world.sql(*GOOD)
        real, broken = world.catalogue.change_table, True

        async def change_table(capture: str, table: str, change: Any) -> CaptureTableRow | None:
            wanted = change(await world.table(table))
            if broken and table == "public.y" and wanted is not None and wanted.snapshot is not None:
                raise Unknown("nobody knows whether it was written.")
            return await real(capture, table, change)

        monkeypatch.setattr(world.catalogue, "change_table", change_table)
        async with world.capture(table_poll_s=0.1):
            await world.caught_up()
            await world.transaction(
                *[f"CREATE TABLE {t} (id int PRIMARY KEY, v int)" for t in "xy"],
                *[f"INSERT INTO {t} SELECT g, g FROM generate_series(1, 10) g" for t in "xy"],
            )

            async def recorded() -> bool:
                row = await world.table("public.x")
                return row is not None and row.flows

            await until(recorded, "the first copy is recorded")
            await world.sql("INSERT INTO x VALUES (11, 11)", "DELETE FROM x WHERE id = 1")

            async def carried() -> bool:
                return await world.folded("x") == await plain(world, "x")

            await until(carried, "what flows by the catalogue is carried")
            broken = False
            await world.flowing("x", "y", timeout_s=40)
            await good_flows(world)
            for table in "xy":
                assert await world.folded(table) == await plain(world, table)
            row = await world.table("public.x")
            assert row is not None and row.generation == 0, "and is not copied a second time"

    in_world(postgres_dsn, scenario)
