"""Asyncio event loop with virtual time, whose choices all come from one seed.

Invariant (random order): one ready callback, chosen by the seed, runs at a time. First-in first-out order is a property
of asyncio's implementation, not a promise; this loop exposes code that relies on it.

Invariant (virtual time): time advances only when nothing is ready: to the next timer, or a little past it (a stall), so
that several timers are due at the same moment and race.

Invariant (no hang): nothing ready and no timer left is a Deadlock. Too many steps without an end are a Livelock.

Invariant (no threads): an executor's work runs on the loop after a virtual delay; call_soon_threadsafe is refused.

Invariant (stable hashes): tasks and futures hash by creation order, so sets of them iterate in the same order in every
process.

Invariant (death is final): callbacks of a dead life (`kill`) are dropped and never run.

The module uses private names of asyncio's base loop and handles (`_ready`, `_scheduled`, `_run_once`, `_context`,
`_cancelled`); no other file does. It runs about 300,000 steps a second.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from asyncio import events
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn

from tidemill.base.errors import CorruptError, TidemillError

STEPS_MAX = 2_000_000
STALL_PROBABILITY = 0.08
STALL_MAX_S = 0.05
EXECUTOR_DELAY_MAX_S = 0.005

Waiting = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class Deadlock(Exception):
    """Raised when nothing can happen any more although the main task is not done."""


class Livelock(Exception):
    """Raised at the step limit: something repeats without progress."""


class Life:
    """One incarnation of an actor. `alive` becomes False once and never True again."""

    __slots__ = ("alive", "frozen_until_s", "name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.alive = True
        self.frozen_until_s = 0.0

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("tidemill_sim_life", default=None)
"""Life to which a task, and everything that it starts, belongs."""


class SimTask(asyncio.Task[Any]):
    def __init__(self, coroutine: Waiting, *, loop: SimLoop, number: int, life: Life | None, **options: Any) -> None:
        self.number = number
        self.life = life
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[Any]):
    def __init__(self, *, loop: SimLoop, number: int) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self, source: random.Random, *, fifo: bool = False, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self._source = source
        self._below = source._randbelow  # type: ignore[attr-defined]  # half the cost of randrange
        self._fifo = fifo
        self._time_s = 0.0
        self._steps_max = steps_max
        self._numbers = 0
        self._discarding = False
        self._clock_resolution = 1e-9
        self._ready: list[asyncio.Handle] = []
        self._scheduled: list[asyncio.TimerHandle]
        self.steps = 0
        self.failures: list[str] = []
        self.reports: list[str] = []
        self.tasks: list[SimTask] = []
        self._prune_at = 256
        self.set_task_factory(self._make_task)
        self.set_debug(False)

    # interface required by asyncio ------------------------------------------------------------------

    def time(self) -> float:
        return self._time_s

    def create_future(self) -> SimFuture:
        self._numbers += 1
        return SimFuture(loop=self, number=self._numbers)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        if self._discarding:
            return asyncio.Handle(callback, args, self, context)
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._discarding:
            heapq.heappush(self._scheduled, handle)
            handle._scheduled = True  # type: ignore[attr-defined]
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> NoReturn:
        raise RuntimeError("the simulated loop has no threads: call_soon_threadsafe is refused")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function on the loop, after a virtual delay. The executor itself is never used."""
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._source.uniform(0, EXECUTOR_DELAY_MAX_S), run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an unhandled error. It is a bug unless its kind is expected: components may report those this way."""
        error = context.get("exception")
        said = f"{context.get('message')}: {error!r}" if error else str(context.get("message"))
        if isinstance(error, TidemillError) and not isinstance(error, CorruptError):
            self.reports.append(said)
        else:
            self.failures.append(said)

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self.is_closed() and not self._discarding:
            self.create_task(agen.aclose())

    def _make_task(self, loop: Any, coroutine: Waiting, **options: Any) -> SimTask:
        self._numbers += 1
        context = options.get("context")
        life = LIFE.get() if context is None else context.get(LIFE)
        task = SimTask(coroutine, loop=self, number=self._numbers, life=life, **options)
        task.set_name(f"task-{self._numbers}")  # asyncio's own numbers continue from world to world
        self.tasks.append(task)
        if len(self.tasks) > self._prune_at:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._prune_at = 2 * len(self.tasks) + 256
        return task

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._forget(heapq.heappop(scheduled))
        if self._timer_cancelled_count > 64 and self._timer_cancelled_count > len(scheduled) // 2:
            self._sweep()
            scheduled = self._scheduled
        if not ready:
            if not scheduled:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise Deadlock(self.who_waits())
            self._advance(scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._time_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            ready.append(handle)
        if self._fifo:
            chosen = ready.pop(0)
        else:
            at = self._below(len(ready))
            chosen, ready[at] = ready[at], ready[-1]
            ready.pop()
        if chosen._cancelled:
            return
        life = chosen._context.get(LIFE)  # type: ignore[attr-defined]
        if life is not None and not life.alive:
            return
        if life is not None and life.frozen_until_s > self._time_s:
            # In an empty context: the life is checked again at that time, and may be dead or frozen again.
            self.call_at(life.frozen_until_s, self._ready.append, chosen, context=contextvars.Context())
            return
        self.steps += 1
        if self.steps > self._steps_max:
            raise Livelock(f"no end after {self.steps} steps: time_s={self._time_s:.3f} {self.who_waits()}")
        chosen._run()

    def _advance(self, when: float) -> None:
        self._time_s = max(self._time_s, when)
        if not self._fifo and self._source.random() < STALL_PROBABILITY:
            self._time_s += self._source.uniform(0, STALL_MAX_S)

    def _forget(self, handle: asyncio.TimerHandle) -> None:
        handle._scheduled = False  # type: ignore[attr-defined]
        self._timer_cancelled_count -= 1

    def _sweep(self) -> None:
        for handle in self._scheduled:
            if handle._cancelled:
                handle._scheduled = False  # type: ignore[attr-defined]
        self._scheduled = [h for h in self._scheduled if not h._cancelled]
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = 0

    def who_waits(self) -> str:
        waiting = [task for task in self.tasks if not task.done() and (task.life is None or task.life.alive)]
        return "waiting: " + ("; ".join(_where(task) for task in waiting) or "no task")

    # interface used by the world --------------------------------------------------------------------

    def kill(self, life: Life) -> None:
        """End a life: nothing of it runs any more. Its tasks are retained, frozen, until `dispose`."""
        life.alive = False

    def dispose(self) -> None:
        """Close the remaining tasks to free memory. Callbacks that they schedule while they close are discarded."""
        self._discarding = True
        events._set_running_loop(self)
        try:
            for task in self.tasks:
                if task.done():
                    continue
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task)
        finally:
            events._set_running_loop(None)
        self.tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
        self.close()


LAST_WORDS = 20
"""Number of times that a coroutine may wait for something while it is closed."""


def _close(task: asyncio.Task[Any]) -> None:
    """End the coroutines of a task, the innermost first. A coroutine that waits in its `finally` is closed again."""
    chain: list[Any] = [task.get_coro()]
    while hasattr(deeper := getattr(chain[-1], "cr_await", None), "cr_frame"):
        chain.append(deeper)
    for coroutine in reversed(chain):
        for _ in range(LAST_WORDS):
            try:
                coroutine.close()
            except BaseException:  # errors of a coroutine that is being closed do not matter
                continue
            break


def _where(task: asyncio.Task[Any]) -> str:
    """Return the name of a task and the innermost place where it waits."""
    at: Any = task.get_coro()
    while hasattr(deeper := getattr(at, "cr_await", None), "cr_frame"):
        at = deeper
    frame = getattr(at, "cr_frame", None)
    if frame is None:
        return task.get_name()
    file = frame.f_code.co_filename.rpartition("/tidemill/")[2]
    return f"{task.get_name()} at {file}:{frame.f_lineno} in {frame.f_code.co_qualname}"
