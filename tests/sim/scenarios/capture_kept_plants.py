"""Faults planted into the shape logs that outlive a capture process (`capture_kept`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from sim.scenarios import capture_kept, capture_shapes
from sim.world import swapped
from tidemill.base.errors import TidemillError
from tidemill.base.runtime.tasks import Tasks
from tidemill.capture.session import capture
from tidemill.capture.session.session import Session
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.log.disk_log import DiskLog
from tidemill.shapes.log.saved_shape import SavedTableShape
from tidemill.shapes.log.sqlite_file import StoredShape
from tidemill.shapes.log.store import ShapeStore
from tidemill.shapes.tables import restore
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.tables.table_shapes import TableShapes

LATE_S = 3.0


class HastyStore(ShapeStore):
    """Planted fault confirm-before-flush: the data of a flush counts as durable before it is."""

    async def flush(self) -> None:
        self.durable(self.position())
        await super().flush()


class TrustingStore(ShapeStore):
    """Planted fault trusted-file: a file counts as complete although another process captured in between."""

    def claim(self, last: Collection[str]) -> bool:
        return super().claim([*last, self.owner] if self.owner else last)


class LateSession(Session):
    """Planted fault late-name: a session that continues where another process was named writes its own names some time
    after the stream has begun."""

    async def store_tap_names(self) -> None:
        if self.streaming or not self._own.current.taps:
            await super().store_tap_names()
            return

        async def later() -> None:
            with contextlib.suppress(TidemillError):
                await asyncio.sleep(LATE_S)
                await super(LateSession, self).store_tap_names()

        self._late = Tasks(lambda *_: None)  # its failure only leaves a name unwritten
        self._late.spawn(later(), name="late names")


class HastyShapes(TableShapes):
    """Planted fault route-before-restore: changes are routed while shapes are still being restored."""

    async def restore(self, name: str, start: Callable[[StoredShape, SavedTableShape, DiskLog], LiveShape]) -> None:
        sink = self._databases[name].sink
        if sink.restoring:
            await sink.begun.wait()
            for _ in range(20):
                sink._arrived.set()
                sink.restoring = False
                await self._share.run_step(sink.run_slice)
                sink.restoring = True
                await asyncio.sleep(0.01)
        await super().restore(name, start)


class UntrimmedConsumer(TableConsumer):
    """Planted fault untrimmed-restore: a log from disk accepts changes again that it already has."""

    def __init__(self, *args: Any, has_lsn: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)


PLACES: dict[str, tuple[ModuleType, str, object]] = {
    "confirm-before-flush": (capture_kept, "ShapeStore", HastyStore),
    "trusted-file": (capture_kept, "ShapeStore", TrustingStore),
    "late-name": (capture, "Session", LateSession),
    "route-before-restore": (capture_shapes, "TableShapes", HastyShapes),
    "untrimmed-restore": (restore, "TableConsumer", UntrimmedConsumer),
}

MOVES = ("trusted-file", "late-name")
"""Faults that are visible only if another machine captured in between."""
BAD_DISK = ("confirm-before-flush",)
"""Faults that are visible only while a disk is slow and fails."""


@contextlib.contextmanager
def planted_kept(fault: str) -> Iterator[None]:
    if fault not in PLACES:
        yield
        return
    module, name, value = PLACES[fault]
    with swapped(module, name, value):
        yield
