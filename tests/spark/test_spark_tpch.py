"""TPC-H under its refresh functions: derived tables equal to batch SQL by another engine after each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.workloads import tpch
from support.spark.workloads.replay import Replay, answers

pytestmark = pytest.mark.spark

SCALE, PAIRS, STREAMS = 0.005, 40, 2
"""Pairs of RF1 and RF2 between two times: at this scale a pair is 8 orders, and few of them are in Q3."""


def test_derived_tables_equal_the_batch_answers_after_every_refresh(spark: Any, harbour: Any, tmp_path: Path) -> None:
    world = tpch.World(tmp_path / "data", SCALE, PAIRS * STREAMS)
    replay = Replay(harbour, spark, tpch.declare, tmp_path)
    expected: dict[int, dict[str, list[tuple[Any, ...]]]] = {}

    def step(changes: dict[str, str], *, gone: bool = False) -> None:
        time = 10 * (len(expected) + 1)
        replay.step(time, {name: world.records(name, rows, gone=gone) for name, rows in changes.items()})
        expected[time] = answers(world.connection, tpch.SQL, replay)

    step({name: f"from {name}" for name in tpch.KEYS})
    for _ in range(STREAMS):
        step(world.insert(PAIRS))
        step(world.delete(PAIRS), gone=True)
    assert not harbour.upper("p.dead_letters") or not harbour.contents("p.dead_letters")
    by_group = {name: one.groups for name, one in replay.derived.items() if one.groups is not None}
    assert tuple(by_group) == tpch.BY_GROUP
    assert by_group["q3"] == PAIRS * world.orders_a_set, "of each order that was deleted, and no other"
    for time, queries in expected.items():
        for name, rows in queries.items():
            assert rows, name
            assert replay.rows(name, time) == rows, (time, name)
    firsts, lasts = expected[10], expected[10 * len(expected)]
    assert not [name for name in firsts if firsts[name] == lasts[name]], "the refreshes change every answer"
