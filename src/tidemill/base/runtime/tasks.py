"""Task groups and supervision: no bare `create_task` anywhere else in the package, and no task without an owner.

    U1  A fault is as large as its unit. `keep` runs one unit (a shape, a partition, a table, a pipeline, a capture):
        whatever its body raises, of whatever type, ends that unit, is told under the unit's mark with the error of
        the last try, and is tried again after a pause. Nothing larger notices.
    U2  The age of a failure survives retries at the same place: it heals when the unit's position moves, or says so.
        An error that means "stop" (`errors.ends_process`) is not a unit's own: it is told and raised, never retried.
    U3  A task tells its owner how it ended. `Tasks` asks for `on_failure`; there is no default that only logs.

Ordering is decided before a task exists: `create_task` defers a coroutine's body, so a reservation
on its first line is already too late (seed 000). Reserve in a plain `def`, then `spawn`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError, InvalidError, ends_process
from tidemill.base.status.status import StatusTracker

FailureHandler = Callable[[str, BaseException], None]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STEADY_AFTER_S = 20.0
"""A unit that ran this long before it failed starts its pauses over."""

log = structlog.get_logger()


class Tasks:
    """Owns background tasks for the lifetime of a component.

    Unlike asyncio.TaskGroup one failing task does not cancel its siblings: the failure goes to
    `on_failure(name, error)`, and `aclose` cancels and awaits whatever still runs.
    """

    def __init__(self, on_failure: FailureHandler) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self._closed = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"task group is closed: task={name}")
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._on_failure(task.get_name(), error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what runs now, at most so long; cancels nothing."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def aclose(self) -> None:
        """Cancel what runs and wait for it. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def is_fault(error: BaseException) -> bool:
    """True for everything that is a unit's own failure: also types that nobody listed, and those that libraries derive
    from BaseException (a panic of native code). False for what ends a process or a task on purpose, and for errors that
    say that this process must end (`errors.ends_process`): who asks this passes them on."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    return not ends_process(error)


def is_own_fault(error: BaseException) -> bool:
    """As `is_fault`, around an await: a cancellation that leaked out of what was awaited is a fault too.

    Nothing is one once this task was cancelled: what its clean-up raises then stands in the cancellation's place, and
    who took it for a fault and went on would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return False
    return is_fault(error) or isinstance(error, asyncio.CancelledError)


def sentence(error: BaseException) -> str:
    """One line for a mark: our own errors as they speak, others with their type, for their texts say little alone."""
    text = " ".join(str(error).split())[:500]
    if type(error).__module__.startswith("tidemill."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Backoff:
    """When a failed unit is tried again: pauses double to a limit, and start over after a steady run. Pure."""

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        steady_after_s: float = STEADY_AFTER_S,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._steady_after_s = steady_after_s
        self._next_s = first_s

    def pause_s(self, ran_s: float, *, parked: bool = False) -> float:
        """How long to wait after a run of `ran_s`. A parked unit is looked at again at the longest pause only."""
        if ran_s > self._steady_after_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(self._longest_s, self._next_s * 2)
        return self._longest_s if parked else pause_s


def parks(error: BaseException) -> bool:
    """True where trying again cannot help before somebody changes something."""
    return isinstance(error, InvalidError | CorruptError)


class RetryState:
    """What follows a run that failed, for every loop that keeps something running: it is logged, told, and paused for.

    `tell(sentence, parked)` hears of every fault. Without `may_park` nothing is parked: trying again is all there is.
    """

    def __init__(
        self,
        name: str,
        tell: Callable[[str, bool], None],
        now_s: Callable[[], float],
        restarts: Backoff,
        *,
        may_park: bool = True,
    ) -> None:
        self.name = name
        self._tell = tell
        self._now_s = now_s
        self._restarts = restarts
        self._may_park = may_park
        self._begun_s = now_s()

    def failed(self, fault: BaseException) -> float:
        """How long to wait, in seconds; the next run is taken to begin after that."""
        parked, now_s = self._may_park and parks(fault), self._now_s()
        log.error("unit failed", unit=self.name, error=sentence(fault), parked=parked, exc_info=not parked and fault)
        self._tell(sentence(fault), parked)
        pause_s = self._restarts.pause_s(now_s - self._begun_s, parked=parked)
        self._begun_s = now_s + pause_s
        return pause_s


def _of_a_unit(mark: str, tracker: StatusTracker, clock: Clock, restarts: Backoff | None) -> RetryState:
    def tell(error: str, parked: bool) -> None:
        tracker.fail(mark, error, now_ms=clock.now_ms(), parked=parked)

    return RetryState(mark, tell, clock.monotonic_s, restarts or Backoff())


async def until_it_returns(body: Callable[[], Awaitable[None]], attempts: RetryState) -> None:
    """Run `body` again after each fault, of whatever type; a cancellation that leaked out of what it awaits is one.

    Raises an error that ends the process (`ends_process`).
    """
    while True:
        try:
            return await body()
        except BaseException as error:
            if ends_process(error):
                attempts.failed(error)
                raise
            if not is_own_fault(error):
                if is_fault(error):
                    log.error("unit failed as it ended", unit=attempts.name, error=sentence(error), exc_info=error)
                    raise asyncio.CancelledError from error
                raise
            pause_s = attempts.failed(error)
        await asyncio.sleep(pause_s)


async def keep(
    mark: str,
    body: Callable[[], Awaitable[None]],
    *,
    tracker: StatusTracker,
    clock: Clock,
    restarts: Backoff | None = None,
) -> None:
    """Run a unit's `body` until it returns. Any fault is told under `mark` and tried again after a pause (U1, U2).

    What only an operator can mend (Invalid, Corrupt) is parked: held by `operator`, tried at the longest pause, so
    that it heals without a restart once it was mended.
    """
    await until_it_returns(body, _of_a_unit(mark, tracker, clock, restarts))
    tracker.heal(mark)


def keep_thread(
    mark: str,
    body: Callable[[], None],
    *,
    tracker: StatusTracker,
    clock: Clock,
    ending: threading.Event,
    restarts: Backoff | None = None,
) -> None:
    """The twin of `keep` for a unit that is a thread: run its `body` until it returns or `ending` is set.

    A failure that stands when the process ends is kept: its last report hands it to the next process.

    Nobody cancels a thread, so whatever its body raises is its fault, also what a user's function raises to leave.
    Raises an error that ends the process (`ends_process`).
    """
    attempts = _of_a_unit(mark, tracker, clock, restarts)
    while not ending.is_set():
        try:
            body()
        except BaseException as fault:
            if ending.is_set():
                return
            pause_s = attempts.failed(fault)
            if ends_process(fault):
                raise
            ending.wait(pause_s)
        else:
            if not ending.is_set():
                tracker.heal(mark)
            return
