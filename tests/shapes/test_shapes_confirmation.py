"""A thousand dear shapes: capture, tables and the confirmation of LSNs do not wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import psycopg
import pytest

from support.shapes.real_world import DDL, RealWorld, equal_in_the_end
from support.waiting import until
from tidemill.capture.changes import Fragment
from tidemill.shapes import ShapeSettings, ShapeTap

pytestmark = pytest.mark.postgres

SHAPES = 1_000
ROWS_PER_S = 2_000
LOAD_S = 5.0
DELAY_LIMIT_S = 2.0
"""Measured on two cores: 0.15 s at most; it was 31 s when shapes were evaluated on capture's turn."""


async def test_f435_a_thousand_dear_shapes_do_not_delay_the_confirmation_of_lsns(postgres_dsn: str) -> None:
    ddl = "CREATE TABLE t (id int PRIMARY KEY, grp int, v text)"
    async with RealWorld(postgres_dsn, ddl, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        places = asyncio.Semaphore(8)

        async def shape(number: int) -> None:
            async with places:
                # Not an equality that an index finds: every clause is evaluated on every row.
                answer = await world.get(table="t", offset="-1", where=f"grp % 1000 + 0 = {number}")
                assert answer.status == 200, answer

        await asyncio.gather(*(shape(number) for number in range(SHAPES)))
        written: list[tuple[float, int]] = []
        loading = asyncio.ensure_future(asyncio.to_thread(load, postgres_dsn, written))
        delays: list[float] = []
        probe = await psycopg.AsyncConnection.connect(postgres_dsn, autocommit=True)
        ends_s = time.monotonic() + LOAD_S + 4 * DELAY_LIMIT_S
        while (not loading.done() or written) and time.monotonic() < ends_s:
            cursor = await probe.execute(
                "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = %s", (world.slot,)
            )
            found = await cursor.fetchone()
            assert found is not None
            while written and written[0][1] <= found[0]:
                delays.append(time.monotonic() - written.pop(0)[0])
            await asyncio.sleep(0.02)
        await loading
        await probe.close()
        assert not written, "not confirmed at all"
        assert max(delays) < DELAY_LIMIT_S
        # The tap's own share of capture's turns is small: it only queues.
        busy_ms = world.capture.facts()["tap_busy_ms"]
        assert isinstance(busy_ms, float) and busy_ms < LOAD_S * 1000 * 0.1


class NobodyListed(BaseException):
    """An exception like those of native code, which are no subclasses of Exception."""


async def test_f425_shapes_start_over_when_their_tap_breaks_and_capture_does_not_notice(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real tap, with a fault in it: clients refetch and end equal, in the same session of the capture."""
    async with RealWorld(postgres_dsn, DDL, ShapeSettings(long_poll_s=0.5)) as world:
        await until(lambda: world.capture.streaming)
        client = await world.sync(table="stock", where="w = 1")
        session, real, breaks = world.capture._session, ShapeTap.process_fragment, 3

        def take(self: ShapeTap, fragment: Fragment) -> Collection[str]:
            nonlocal breaks
            owing = real(self, fragment)
            if fragment.changes and breaks:
                breaks -= 1
                raise NobodyListed("in the middle")
            return owing

        monkeypatch.setattr(ShapeTap, "process_fragment", take)
        for quantity in range(5):
            await world.db.execute("UPDATE stock SET qty = %s WHERE i < 20", (quantity,))
        await equal_in_the_end(world, client, "w = 1")
        facts = world.capture.facts()
        assert facts["tap_failures"] == 3 and facts["tap_error"] == "NobodyListed: in the middle"
        assert world.capture._session is session


def load(dsn: str, written: list[tuple[float, int]]) -> None:
    """Rows at a steady rate; (when, WAL position) some times a second."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        started_s, rows = time.monotonic(), 0
        while time.monotonic() - started_s < LOAD_S:
            series = "generate_series(%s::int, %s::int) g"
            connection.execute(f"INSERT INTO t SELECT g, g, 'x' FROM {series}", (rows, rows + 19))
            rows += 20
            if rows % 400 == 0:
                found = connection.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone()
                assert found is not None
                written.append((time.monotonic(), int(found[0])))
            time.sleep(max(0.0, started_s + rows / ROWS_PER_S - time.monotonic()))
