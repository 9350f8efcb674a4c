"""A barrier whose round fails releases all its waiters."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.base.errors import ClosedError
from tidemill.metastore.domain.read_path import Barrier


async def test_a_broken_round_is_told_to_its_callers_and_to_those_who_joined_the_next() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    going, rounds = asyncio.Event(), 0

    async def break_first() -> None:
        nonlocal rounds
        rounds += 1
        await going.wait()
        if rounds == 1:
            raise RuntimeError("a bug")

    reported_owner: list[str] = []
    barrier = Barrier(break_first, "b", lambda name, error: reported_owner.append(f"{name}: {error}"))
    early = asyncio.ensure_future(barrier.wait())
    await asyncio.sleep(0.01)
    late = asyncio.ensure_future(barrier.wait())
    await asyncio.sleep(0.01)
    going.set()
    async with asyncio.timeout(40):
        for reported in (early, late):
            with pytest.raises(ClosedError, match="failed"):
                await reported
        await barrier.wait()
    assert rounds == 2 and reported_owner == ["b: a bug"]
    await barrier.aclose()
