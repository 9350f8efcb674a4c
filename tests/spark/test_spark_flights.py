"""Three days of real flights with a blizzard, replayed with late updates, deletes and nulls. Derived tables equal batch
SQL of another engine over all records, at several times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.spark.workloads import flights
from support.spark.workloads.replay import Replay, answers

pytestmark = pytest.mark.spark

FIRST, LAST = "2013-02-07", "2013-02-09"
TIMES = ("02-07 15:00", "02-08 14:00", "02-09 03:00", "02-09 13:00", "02-11 00:00")


def test_derived_tables_equal_the_batch_answers_over_all_that_was_told(
    spark: Any, harbour: Any, tmp_path: Path
) -> None:
    world = flights.World(tmp_path, FIRST, LAST)
    replay = Replay(harbour, spark, flights.build, tmp_path)
    expected: dict[int, dict[str, list[tuple[Any, ...]]]] = {}
    start, rounds, reported = f"{FIRST} 00:00Z", dict.fromkeys(flights.SQL, 0), 0
    for number, time in enumerate(TIMES, 1):
        end = f"2013-{time}Z"
        records = {name: world.records(name, start, end) for name in flights.KEYS}
        reported += len(records["flights"])
        replay.step(10 * number, records)
        world.until(end)
        expected[10 * number] = answers(world.connection, flights.SQL, replay)
        for name, one in replay.derived.items():
            rounds[name] += one.groups is not None
        start = end
    assert not harbour.upper("p.dead_letters") or not harbour.contents("p.dead_letters")
    assert reported > 6000 and all(rounds[name] for name in flights.BY_GROUP), rounds
    assert not rounds["worst_carrier"]
    for time, queries in expected.items():
        for name, rows in queries.items():
            assert rows, (time, name)
            assert replay.rows(name, time) == rows, (time, name)
