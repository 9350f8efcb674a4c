"""Worlds whose database fails over to a standby that is behind, and the faults planted into the reaction to that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from sim.scenarios.capture_database import WRITERS, Database
from sim.scenarios.capture_server import Server
from sim.world import swapped
from tidemill.capture.session import bootstrap
from tidemill.capture.session.continuity_check import ContinuityResult
from tidemill.shapes.tables.capture_tap import ShapeTap

FAULTS = ("unseen-fork", "kept-positions")
NARROW = ("kept-positions",)
"""Faults in shapes that outlive the failover: shapes of a table that lost nothing, in a process that survives."""


async def failing_over(
    server: Server, streams: Callable[[], bool], bound: Callable[[], int], *, narrow: bool = False
) -> None:
    """Fail over once, at some moment, to a standby that is behind, mostly behind the bound position. With `narrow` it
    is far behind, but only in one table, so that the shapes of the other tables continue."""
    world, source, db = server.world, server.world.source, server.db
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(source.choice((0.5, 30.0, 30.0, 30.0))):
            await world.until(streams)
    await asyncio.sleep(source.uniform(0, 1.0) ** 2)
    standby = db.standby()
    db.lsn += source.choice((50, 300) if narrow else (0, 0, 50, 300))  # WAL of tables that are not captured
    await _writing(db, source.randint(int(narrow), 3), "lost", db.captured[:1] if narrow else db.captured)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(source.choice((0.0, 3.0, 3.0, 3.0))):
            last_lsn = db.lsn
            await world.until(lambda: bound() >= last_lsn)
    server.fail_over(standby)
    await _writing(db, source.randint(0, 3), "found", db.captured)


async def _writing(db: Database, count: int, text: str, tables: Sequence[int]) -> None:
    """Write `count` transactions, each at a moment when no other transaction is open."""
    for number in range(count):
        await db.world.until(lambda: db.idle, every_s=0.01)
        txn = db.begin()
        db.write(txn, db.world.source.randrange(WRITERS), f"{text}.{number}", db.world.source.choice(tables))
        db.commit(txn)
        db.show(txn)


async def _nothing(*_: object) -> ContinuityResult:
    """Plant the fault unseen-fork."""
    return ContinuityResult()


@contextlib.contextmanager
def planted_fork(fault: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        match fault:
            case "unseen-fork":
                stack.enter_context(swapped(bootstrap, "check_continuity", _nothing))
            case "kept-positions":
                stack.enter_context(swapped(ShapeTap, "reset_history", lambda self: None))
        yield
