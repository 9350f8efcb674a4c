"""Task groups: no bare `create_task` anywhere else in the package.

Ordering is decided before a task exists: `create_task` defers a coroutine's body, so a reservation
on its first line is already too late (seed 000). Reserve in a plain `def`, then `spawn`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

FailureHandler = Callable[[str, BaseException], None]


class Tasks:
    """Owns background tasks for the lifetime of a component.

    Unlike asyncio.TaskGroup one failing task does not cancel its siblings: the failure goes to
    `on_failure(name, error)`, and `aclose` cancels and awaits whatever still runs.
    """

    def __init__(self, on_failure: FailureHandler | None = None) -> None:
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
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)
        else:
            context = {"message": f"background task failed: {task.get_name()}", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

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
