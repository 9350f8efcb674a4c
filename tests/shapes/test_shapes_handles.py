"""H1: a handle is never reused. Every end of a log gives a new one, and requests with the old one get 409."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette

from support.shapes.world import ShapeWorld
from tidemill.base.clock import ManualClock, Rand
from tidemill.node.http.server import HttpServer
from tidemill.shapes import LogLimits, ShapeService, ShapeSettings, shape_routes
from tidemill.shapes.definition.definition import HandleMint, ShapeDefinition, Source

DDL = """
CREATE TABLE item (id int PRIMARY KEY, name text);
INSERT INTO item SELECT n, 'n' || n FROM generate_series(1, 5) n;
"""
WHERES = ("", "id > 0", "id = 3", "id IN (1, 2)")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5_000, 5_000)), max_size=60), st.integers(0, 1 << 30))
def test_mints_whose_clocks_jump_and_whose_processes_come_and_go_never_make_a_handle_twice(
    steps: list[tuple[int, int]], seed: int
) -> None:
    definition = ShapeDefinition(Source("table", "main", "public", "t"))
    clocks = [ManualClock() for _ in range(3)]
    mints = [HandleMint(clock, Rand(seed + number)) for number, clock in enumerate(clocks)]
    lives, made = 3, []
    for which, jump in steps:
        if which == 3:
            mints[0] = HandleMint(clocks[0], Rand(seed + lives))
            lives += 1
            continue
        clocks[which]._now_ms = max(0, clocks[which].now_ms() + jump)
        made.append(mints[which].mint(definition))
    assert len(set(made)) == len(made)


class Jumping(ManualClock):
    """A clock whose wall time stops or goes back, while its monotonic time is the loop's."""

    def monotonic_s(self) -> float:
        import asyncio

        return asyncio.get_running_loop().time()


@pytest.mark.postgres
async def test_h1_every_end_of_a_log_is_409_to_its_handle_for_ever_and_no_handle_comes_twice(postgres_dsn: str) -> None:
    """Logs end by deletes, truncates, their size limit, captures that start over, and restarts with a clock set
    back."""
    settings = ShapeSettings(long_poll_s=0.2, allow_delete=True, limits=LogLimits(log_bytes=2_000))
    rand = random.Random(23)
    async with ShapeWorld(postgres_dsn, DDL, settings) as world:
        clock = Jumping()
        ended: dict[str, str] = {}
        """handle → its where clause"""
        now: dict[str, str] = {}

        async def restart() -> None:
            await world.service.aclose()
            await world.server.aclose()
            clock._now_ms -= rand.choice((0, 0, 5_000))
            world.service = ShapeService(clock, Rand(), world.tracker, settings)
            world.sink = world.service.add_database("main", world.dsn, lambda: world.relations.values())
            app = Starlette(routes=list(shape_routes(world.service)))
            world.server = HttpServer(app, on_failure=lambda *_: None)
            await world.server.start()

        async def look(where: str) -> None:
            params = {"table": "item", "offset": "-1", **({"where": where} if where else {})}
            answer = await world.get(**params)
            while answer.status == 409:  # it ended while it loaded
                assert answer.handle not in ended
                answer = await world.get(**params)
            assert answer.status == 200, answer.body
            old = now.get(where)
            if old is not None and answer.handle != old:
                ended[old] = where
            assert answer.handle not in ended, "a handle of an ended shape came back"
            assert all(other == where or handle != answer.handle for other, handle in now.items())
            now[where] = answer.handle

        async def end(where: str) -> None:
            ended[now.pop(where)] = where

        await restart()
        for step in range(60):
            where = rand.choice(WHERES)
            await look(where)
            kind = rand.randrange(6)
            if kind == 0:
                await world.request("/v1/shape", {"handle": now[where]}, method="DELETE")
                await end(where)
            elif kind == 1:
                for other in list(now):
                    await look(other)  # loaded, so that the snapshot is older than the truncate
                await world.db.execute("TRUNCATE item; INSERT INTO item VALUES (3, 'x')")
                handles = list(now.values())
                for handle in handles:
                    while world.service.find_by_handle(handle) is not None:
                        await world.get(table="item", offset="now")
                for other in list(now):
                    await end(other)
            elif kind == 2 and step % 2:
                await restart()
                for other in list(now):
                    await end(other)
            elif kind == 3:
                world.sink = world.service.add_database("main", world.dsn, lambda: world.relations.values())
                for other in list(now):
                    await end(other)
            elif kind == 4:
                for _ in range(8):
                    await world.db.execute("UPDATE item SET name = name || 'yyyyyyyyyyyyyyyyyyyy' WHERE id = 3")
            for handle, clause in rand.sample(sorted(ended.items()), min(3, len(ended))):
                params = {"where": clause} if clause else {}
                late = await world.get(table="item", offset="0_inf", handle=handle, **params)
                assert late.status == 409, (late.status, late.body)
                assert late.handle not in ended
                if clause in now and now[clause] != late.handle:
                    await end(clause)
                now[clause] = late.handle
        assert len(ended) > 20
