"""Waiting in tests: one generous deadline for all, scaled in one place.

A test that passes never waits until its deadline, so the deadline is long enough for a busy machine. A limit that the
product promises is a separate assertion, not a deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

SCALE = float(os.environ.get("TIDEMILL_TEST_PATIENCE", "1"))
"""Raise it on a machine on which everything is slower."""
DEADLINE_S = 240.0 * SCALE
"""Deadline for one condition, or one answer of another process."""
SCENARIO_S = 800.0 * SCALE
"""Deadline for a whole scenario of many waits; below pytest's timeout."""


PIECE_S = 0.005
"""Seconds that a piece of `slowness` takes on an idle machine of the slower kind."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.05
"""Pauses between two checks, growing: a condition that soon holds is seen soon, and a long wait costs little."""


def _pauses(pause_s: float = FIRST_PAUSE_S) -> Iterator[float]:
    while True:
        yield pause_s
        pause_s = max(pause_s, min(pause_s * 1.5, LAST_PAUSE_S))


def eventually(
    check: Callable[[], T],
    otherwise: str | Callable[[], object] = "",
    within_s: float = DEADLINE_S,
    pause_s: float = FIRST_PAUSE_S,
) -> T:
    """The first true result of `check`. Fails after the deadline with the last result and with `otherwise`. `pause_s`:
    the first pause between two looks, for looks that cost much."""
    until_s, pauses = time.monotonic() + within_s, _pauses(pause_s)
    while not (result := check()):
        if time.monotonic() > until_s:
            raise AssertionError(_failure(within_s, result, otherwise))
        time.sleep(next(pauses))
    return result


async def until(
    check: Callable[[], T | Awaitable[T]],
    otherwise: str | Callable[[], object] = "",
    within_s: float = DEADLINE_S,
) -> T:
    """`eventually` on the loop; `check` may be a coroutine function."""
    loop = asyncio.get_running_loop()
    until_s, pauses = loop.time() + within_s, _pauses()
    while True:
        found = check()
        result: Any = await found if inspect.isawaitable(found) else found
        if result:
            return result  # type: ignore[no-any-return]
        if loop.time() > until_s:
            raise AssertionError(_failure(within_s, result, otherwise))
        await asyncio.sleep(next(pauses))


def run(scenario: Coroutine[Any, Any, T], within_s: float = SCENARIO_S) -> T:
    """Run on a new loop, within the time of a scenario."""

    async def bounded() -> T:
        async with asyncio.timeout(within_s):
            return await scenario

    return asyncio.run(bounded())


def slowness() -> float:
    """Return how many times longer Python takes than on an idle machine, at least 1: by the wall-clock time of a piece
    now, and by the processes that wanted a core during the last minute.

    A limit that the product promises for an idle machine is multiplied by it, because a busy machine slows the product
    down equally. The piece alone shows a slower processor, but seldom other processes: the kernel prefers a process
    that has just slept.
    """
    began_s = time.monotonic()
    for _ in range(20):
        sum(range(200_000))
    piece = (time.monotonic() - began_s) / 20 / PIECE_S
    return max(1.0, piece, os.getloadavg()[0] / (os.cpu_count() or 1))


def _failure(within_s: float, result: object, otherwise: str | Callable[[], object]) -> str:
    said = otherwise() if callable(otherwise) else otherwise
    return f"not within {within_s:.0f} s: {said} last={result!r}"
