"""A table in very many parts: every reader reads it, and no cost grows faster than the number of parts.

`./dev bench lake_parts` does the same with 10,000 parts.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from support.lake.readers import ForeignReader
from support.lake.world import LakeWorld, contents, rows_of
from tidemill.shards import handle
from tidemill.shards.api import DIFF, TIME, Column, ShardSchema
from tidemill.shards.handle import LogShard

pytestmark = [pytest.mark.lake, pytest.mark.processes]

SCHEMA = ShardSchema((Column("id", "int64"), Column("amount", "int64")), ("id",))
ROWS = 5
FEW, MANY = 50, 200
GROWTH_MAX = 1.08
"""Limit for the growth of the cost per part (65 to 330 calls). A call for each pair of parts would exceed it."""


@pytest.fixture(autouse=True)
def stored_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "INLINE_PART_BYTES", 0)


def rows(ids: Any, time_ms: int, diff: int) -> pa.Table:
    ids = np.asarray(ids, dtype=np.int64)
    fixed = {name: np.full(len(ids), value, dtype=np.int64) for name, value in ((TIME, time_ms), (DIFF, diff))}
    return pa.table({"id": ids, "amount": ids * 3, **fixed})


async def filled(world: LakeWorld, parts: int) -> LogShard:
    """Write these parts, and one that retracts a row of each of them."""
    shard = await world.table(schema=SCHEMA)
    written = [await shard.write_part(rows(range(n * ROWS, (n + 1) * ROWS), 1, 1)) for n in range(parts)]
    await shard.compare_and_append(0, 2, written, "")
    await shard.compare_and_append(2, 3, [await shard.write_part(rows(range(0, parts * ROWS, ROWS), 2, -1))], "")
    return shard


@pytest.mark.parametrize("name", ["pyiceberg", "duckdb"])
async def test_a_foreign_reader_reads_all_of_them(
    name: str, open_reader: Callable[[str], ForeignReader], tmp_path: Path
) -> None:
    world = LakeWorld(tmp_path)
    shard = await filled(world, MANY)
    await world.publish(await world.publisher())
    found = open_reader(name).read(await world.location())
    assert found.num_rows == MANY * (ROWS - 1) and rows_of(found) == await contents(shard, 2)


async def calls_of(operation: Callable[[], Awaitable[Any]]) -> int:
    """Return the number of calls that tidemill's code makes during the operation, on all threads."""
    number = itertools.count()

    def count(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "c_call") and "/tidemill/" in frame.f_code.co_filename:
            next(number)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        await operation()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(number)


async def costs(directory: Path, parts: int) -> dict[str, float]:
    """Return the calls per part of a read, of the first publication and of one after a small change."""
    world = LakeWorld(directory)
    shard = await filled(world, parts)
    total = (parts * ROWS * (parts * ROWS - 1) // 2 - ROWS * parts * (parts - 1) // 2) * 3

    async def read() -> None:
        assert pc.sum((await shard.snapshot(2)).column("amount")).as_py() == total

    publisher = await world.publisher()
    found = {"read": await calls_of(read), "first": await calls_of(lambda: world.publish(publisher))}
    await shard.compare_and_append(3, 4, [await shard.write_part(rows([1], 3, -1))], "")
    found["next"] = await calls_of(lambda: world.publish(publisher))
    return {name: calls / parts for name, calls in found.items()}


async def test_no_cost_grows_faster_than_the_number_of_parts(tmp_path: Path) -> None:
    _, few, many = [await costs(tmp_path / str(parts), parts) for parts in (2, FEW, MANY)]  # the first fills caches
    growth = {name: many[name] / few[name] for name in few}
    assert max(growth.values()) < GROWTH_MAX, (growth, few, many)
