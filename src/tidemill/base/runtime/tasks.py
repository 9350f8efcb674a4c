"""Task groups and supervision: `create_task` is called nowhere else in the package, and every task has an owner.

Invariant (isolation): a fault affects only its unit. `run_unit` runs one unit (a shape, a partition, a table, a
pipeline, a capture): any error of its body, of any type, ends that unit, is reported under the unit's stage status, and
the unit is retried after a pause. Nothing larger is affected.

Invariant (age of a failure): it survives retries at the same place, until the unit's position moves or it reports
recovery. An error that means "stop" (`errors.ends_process`) is not the unit's own: it is reported and raised, never
retried.

Invariant (no silent end): a task reports its failure to its owner. `Tasks` requires `on_failure`; there is no default
that only logs.

Order is decided before a task exists: `create_task` defers a coroutine's body, so a reservation in its first line is
already too late. Reserve in a plain `def`, then `spawn`.

`open_with_retry` opens stores that may be away when a process starts, and reports which store it is waiting for. A node
that ended because its bucket or consensus does not answer would be restarted forever without any message: nothing is
published before consensus is open, and nothing is served before the bucket is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

import structlog

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError, InvalidError, UnavailableError, UnknownOutcomeError, ends_process
from tidemill.base.status.status import StatusTracker

T = TypeVar("T")
FailureHandler = Callable[[str, BaseException], None]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
STEADY_RUN_S = 20.0
"""Duration of a run after which the pauses of a unit start again from the shortest."""

REPORT_PENDING_AFTER_S = 2.0
"""Duration after which a pending attempt is reported, too: a black-holed connection fails only much later."""

log = structlog.get_logger()


class Tasks:
    """Owner of background tasks for the lifetime of a component.

    Unlike asyncio.TaskGroup, a failing task does not cancel its siblings: the failure goes to `on_failure(name,
    error)`, and `aclose` cancels and awaits all running tasks.
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
        """Wait for the running tasks, at most for `timeout_s`; cancel none."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def aclose(self) -> None:
        """Cancel the running tasks and wait for them. Idempotent."""
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
    """True for every failure of a unit itself, of any type, including those that libraries derive from BaseException.

    An example of the latter is a panic of native code. False for the deliberate end of a process or a task, and for
    errors upon which this process must end (`errors.ends_process`): the caller passes those on.
    """
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    return not ends_process(error)


def is_own_fault_of_await(error: BaseException) -> bool:
    """Return `is_fault` for an error of an await: a cancellation that leaked out of the awaited work is a fault, too.

    False once this task was cancelled: an error of its clean-up then replaces the cancellation, and a caller that
    treated it as a fault and continued would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return False
    return is_fault(error) or isinstance(error, asyncio.CancelledError)


def error_sentence(error: BaseException) -> str:
    """Return an error as one line for a stage status.

    Foreign errors get their type, since their texts alone say little.
    """
    text = " ".join(str(error).split())[:500]
    if type(error).__module__.startswith("tidemill."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Backoff:
    """Pauses between retries of a failed unit: they double up to a limit, and start again after a steady run. Pure."""

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        steady_after_s: float = STEADY_RUN_S,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._steady_after_s = steady_after_s
        self._next_s = first_s

    def pause_s(self, ran_s: float, *, paused: bool = False) -> float:
        """Return the pause after a run of `ran_s`. A paused unit (`paused`) is only retried at the longest pause."""
        if ran_s > self._steady_after_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(self._longest_s, self._next_s * 2)
        return self._longest_s if paused else pause_s


def needs_operator(error: BaseException) -> bool:
    """True if a retry cannot help until an operator changes something."""
    return isinstance(error, InvalidError | CorruptError)


class RetryState:
    """Handling of a failed run, for every loop that restarts its work: log, report, and pause.

    Every fault is reported with `report(error_sentence, paused)`. Without `may_pause` no unit is paused: it is always
    retried.
    """

    def __init__(
        self,
        name: str,
        report: Callable[[str, bool], None],
        now_s: Callable[[], float],
        restarts: Backoff,
        *,
        may_pause: bool = True,
    ) -> None:
        self.name = name
        self._report = report
        self._now_s = now_s
        self._restarts = restarts
        self._may_pause = may_pause
        self._begun_s = now_s()

    def failed(self, fault: BaseException) -> float:
        """Record a fault; return the pause in seconds. The next run counts from its end."""
        paused, now_s = self._may_pause and needs_operator(fault), self._now_s()
        log.error(
            "unit failed", unit=self.name, error=error_sentence(fault), parked=paused, exc_info=not paused and fault
        )
        self._report(error_sentence(fault), paused)
        pause_s = self._restarts.pause_s(now_s - self._begun_s, paused=paused)
        self._begun_s = now_s + pause_s
        return pause_s


def _unit_retry_state(mark: str, tracker: StatusTracker, clock: Clock, restarts: Backoff | None) -> RetryState:
    def report(error: str, paused: bool) -> None:
        tracker.fail(mark, error, now_ms=clock.now_ms(), parked=paused)

    return RetryState(mark, report, clock.monotonic_s, restarts or Backoff())


async def run_with_retries(body: Callable[[], Awaitable[None]], attempts: RetryState) -> None:
    """Run `body` again after each fault, of any type, including a cancellation that leaked out of awaited work.

    Raises an error that ends the process (`ends_process`).
    """
    while True:
        try:
            return await body()
        except BaseException as error:
            if ends_process(error):
                attempts.failed(error)
                raise
            if not is_own_fault_of_await(error):
                if is_fault(error):
                    log.error(
                        "unit failed as it ended", unit=attempts.name, error=error_sentence(error), exc_info=error
                    )
                    raise asyncio.CancelledError from error
                raise
            pause_s = attempts.failed(error)
        await asyncio.sleep(pause_s)


async def run_unit(
    mark: str,
    body: Callable[[], Awaitable[None]],
    *,
    tracker: StatusTracker,
    clock: Clock,
    restarts: Backoff | None = None,
) -> None:
    """Run a unit's `body` until it returns. Any fault is reported under `mark` and retried after a pause.

    A fault that only an operator can repair (InvalidError, CorruptError) pauses the unit: blocked by `operator`,
    retried at the longest pause, so that it recovers without a restart after the repair.
    """
    await run_with_retries(body, _unit_retry_state(mark, tracker, clock, restarts))
    tracker.clear_failure(mark)


def run_unit_thread(
    mark: str,
    body: Callable[[], None],
    *,
    tracker: StatusTracker,
    clock: Clock,
    ending: threading.Event,
    restarts: Backoff | None = None,
) -> None:
    """Run the `body` of a unit that is a thread until it returns or `ending` is set; the counterpart of `run_unit`.

    A failure that is present when the process ends is retained: the last report passes it to the next process.

    Threads are not cancelled, so every error of the body is its fault, also one that a user's function raises to exit.
    Raises an error that ends the process (`ends_process`).
    """
    attempts = _unit_retry_state(mark, tracker, clock, restarts)
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
                tracker.clear_failure(mark)
            return


async def open_with_retry(
    opening: Callable[[], Awaitable[T]], clock: Clock, *, waiting: Callable[[str], None], longest_s: float = 5.0
) -> T:
    """Return the result of `opening`, retried on UnavailableError and UnknownOutcomeError.

    Each failure is reported with `waiting(sentence)`, and success with `waiting("")`. Raises errors that a retry cannot
    fix (InvalidError, CorruptError).
    """
    restarts = Backoff(0.25, longest_s)
    loop = asyncio.get_running_loop()
    while True:
        began_s = clock.monotonic_s()
        slow = loop.call_later(REPORT_PENDING_AFTER_S, waiting, f"no answer for {REPORT_PENDING_AFTER_S:g} s")
        try:
            opened = await opening()
        except (UnavailableError, UnknownOutcomeError) as error:
            cause = error_sentence(error)
        else:
            waiting("")
            return opened
        finally:
            slow.cancel()
        waiting(cause)
        log.warning("waiting for a store", cause=cause)
        await asyncio.sleep(restarts.pause_s(clock.monotonic_s() - began_s))
