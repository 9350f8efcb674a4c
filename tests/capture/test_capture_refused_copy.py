"""A table that a copy round had to leave out says so at once and for as long as it lasts, and so does one that is
parked and is to be copied again."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from capture_world import World, until
from test_capture_joining import told
from test_capture_schema import T
from test_capture_tables import GOOD, good_flows, in_world

from tidemill.base.errors import Invalid
from tidemill.base.marks import State
from tidemill.capture import joining, publication, snapshot
from tidemill.capture.topic_writer import TopicWriter

pytestmark = pytest.mark.postgres


@pytest.fixture(autouse=True)
def _tries_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (publication, snapshot):
        monkeypatch.setattr(module, "LOCK_PAUSE_S", 0.1)


@pytest.mark.parametrize("fails", ["publish", "take_snapshot", "its rows"])
def test_a_table_left_out_of_a_copy_says_so_while_its_neighbours_are_copied(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async def scenario(world: World) -> None:
        await world.sql(*GOOD)
        bursts, may_write = 0, asyncio.Event()
        write_rows, other = TopicWriter.write_rows, await psycopg.AsyncConnection.connect(world.dsn)

        async def slowly(self: TopicWriter, target: Any, *args: Any) -> None:
            nonlocal bursts
            if target.name == "public.a":
                raise Invalid("no such rows.")
            bursts += 1
            if bursts > 1:
                await may_write.wait()
            await write_rows(self, target, *args)

        async with world.capture(table_poll_s=0.1, budget_ms=1000) as capture:
            await good_flows(world)
            if fails != "its rows":
                real = getattr(joining, fails)

                async def locked(*args: Any, **settings: Any) -> Any:
                    mode = "ROW EXCLUSIVE" if fails == "publish" else "ACCESS EXCLUSIVE"
                    await other.execute(f"LOCK TABLE a IN {mode} MODE")
                    return await real(*args, **settings)

                monkeypatch.setattr(joining, fails, locked)
            monkeypatch.setattr(TopicWriter, "write_rows", slowly)
            await world.transaction(
                *T,
                "INSERT INTO t SELECT g, g, repeat('w', 500) FROM generate_series(10, 3000) g",
                "CREATE TABLE a (id int PRIMARY KEY, v int)",
                "INSERT INTO a VALUES (1, 1)",
            )

            def copied() -> bool:
                mark = told(world, capture, capture.config.table_mark("public.t"))
                return mark is not None and mark.state is State.MOVING and mark.mark.position > 0

            await until(copied, "the other one is copied")
            mark = told(world, capture, capture.config.table_mark("public.a"))
            holder = "operator" if fails == "its rows" else f"postgres-pid:{other.info.backend_pid}"
            assert mark is not None and mark.state is State.STUCK, mark
            assert mark.mark.held_by == holder, mark
            assert ("no such rows" if fails == "its rows" else "is locked by others") in mark.mark.error, mark
            await other.close()
            monkeypatch.undo()
            may_write.set()
            await world.flowing("t", "a", timeout_s=40)
            await good_flows(world)
            assert told(world, capture, capture.config.table_mark("public.a")) is None

    in_world(postgres_dsn, scenario)
