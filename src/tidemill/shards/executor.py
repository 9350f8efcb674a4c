"""Where heavy synchronous work runs: inline (simulation, Spark drivers) or on a thread pool (servers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Cpu(Protocol):
    async def __call__(self, work: Callable[[], T]) -> T: ...


async def inline_cpu(work: Callable[[], T]) -> T:
    """Run at once, on the loop's own thread: deterministic, and right where nobody else waits for the loop."""
    return work()


def pooled_cpu(executor: Executor) -> Cpu:
    """Run on `executor`, so that a server's loop goes on meanwhile. The executor stays the caller's to close."""

    async def run(work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    return run
