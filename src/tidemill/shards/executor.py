"""Executors of heavy synchronous work: inline (simulation, Spark drivers) or on a thread pool (servers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

T = TypeVar("T")


class RunCpuWork(Protocol):
    async def __call__(self, work: Callable[[], T]) -> T: ...


async def run_inline(work: Callable[[], T]) -> T:
    """Run immediately, on the loop's thread: deterministic, and right if nothing else needs the loop."""
    return work()


def run_on_pool(executor: Executor) -> RunCpuWork:
    """Run on `executor`, so that a server's loop continues concurrently. The caller closes the executor."""

    async def run(work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    return run
