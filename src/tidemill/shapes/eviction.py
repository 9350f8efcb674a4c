"""Makes room for shapes, memory and disk, by ending idle shapes; never a shape in use.

A shape is idle if it was not read for `idle_s`, is not loading, and has no waiting request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from tidemill.base.clock import Clock
from tidemill.shapes.definition.definition import fixed_bytes
from tidemill.shapes.live_shape import LiveShape
from tidemill.shapes.memory_budget import OverBudgetError
from tidemill.shapes.reporting import CHECKED_PER_REPORT
from tidemill.shapes.settings import ShapeSettings


class IdleEviction:
    """`by_handle`: the live shapes, least recently used first. `end_shape(shape, reason)` removes one of them."""

    def __init__(
        self,
        settings: ShapeSettings,
        clock: Clock,
        by_handle: Mapping[str, LiveShape],
        end_shape: Callable[[LiveShape, str], None],
    ) -> None:
        self.count = 0
        self._settings = settings
        self._clock = clock
        self._by_handle = by_handle
        self._end_shape = end_shape

    def _find_idle(self) -> LiveShape | None:
        """Return the least recently used shape that was not read for `idle_s`, is not loading, and has no waiting
        request."""
        before_s = self._clock.monotonic_s() - self._settings.idle_s
        for shape in self._by_handle.values():
            if shape.used_s > before_s:
                return None
            if not shape.waiting_count and shape.state != "loading":
                return shape
        return None

    def make_room_for_shape(self, now_s: float) -> None:
        if len(self._by_handle) < self._settings.max_shapes:
            return
        idle = self._find_idle()
        if idle is not None:
            self._evict(idle)
            return
        oldest = next((s for s in islice(self._by_handle.values(), CHECKED_PER_REPORT) if not s.waiting_count), None)
        left_s = 60.0 if oldest is None else oldest.used_s + self._settings.idle_s - now_s
        raise OverBudgetError(
            f"too many shapes on this node: limit={self._settings.max_shapes}.",
            max(1, min(60, int(left_s) + 1)),
            fix="Raise shapes.max_shapes, or wait until unused shapes become idle.",
        )

    def make_memory(self, missing_bytes: int) -> None:
        while missing_bytes > 0 and (shape := self._find_idle()) is not None:
            missing_bytes -= shape.log.held_bytes + fixed_bytes(shape.definition)
            self._evict(shape)

    def make_disk(self, missing_bytes: int) -> None:
        while missing_bytes > 0 and (shape := self._find_idle()) is not None:
            missing_bytes -= shape.log.base_bytes + shape.log.log_bytes
            self._evict(shape)

    def _evict(self, shape: LiveShape) -> None:
        self.count += 1
        self._end_shape(shape, f"evicted: not read for idle_s={self._settings.idle_s}")
