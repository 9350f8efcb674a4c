"""Meter of the event loop's time for one coroutine: its steps count, its waiting does not."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from tidemill.base.clock import Clock

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaitable that runs `work` and measures it. Tasks and threads that it uses are not counted."""

    def __init__(self, work: Coroutine[Any, Any, T], clock: Clock) -> None:
        self._work = work
        self._clock = clock
        self.spent_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        clock, step, given = self._clock, self._work.send, None
        while True:
            began_s = clock.monotonic_s()
            try:
                wanted = step(given)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self.spent_s += clock.monotonic_s() - began_s
            step, given = self._work.send, None
            try:
                yield wanted
            except BaseException as error:
                step, given = self._work.throw, error
