"""Nexmark as derived tables in real Spark, equal to batch SQL by another engine at several times, read afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from support.spark.workloads import nexmark
from support.spark.workloads.replay import Replay, answers
from tidemill.shards.parts.schema import contents_schema

pytestmark = pytest.mark.spark

EVENTS, EVERY = 600, 150


def test_nexmark_equals_its_batch_answers_at_every_time(spark: Any, harbour: Any, tmp_path: Path) -> None:
    replay = Replay(harbour, spark, nexmark.build, tmp_path)
    held: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in nexmark.STREAMS}
    expected: dict[int, dict[str, list[tuple[Any, ...]]]] = {}
    waiting: dict[str, list[tuple[bytes, Any]]] = {name: [] for name in nexmark.STREAMS}
    for number, (stream, key, row) in enumerate(nexmark.events(7, EVENTS), 1):
        waiting[stream].append((b"%d" % key, row))
        if row is None:
            held[stream].pop(key)
        else:
            held[stream][key] = row
        if number % EVERY:
            continue
        replay.step(number, waiting)
        waiting = {name: [] for name in nexmark.STREAMS}
        with duckdb.connect() as connection:
            for name, rows in held.items():
                schema = contents_schema(replay.streams[name].schema)
                connection.register(name, pa.Table.from_pylist(list(rows.values()), schema))
            expected[number] = answers(connection, nexmark.SQL, replay)
    by_group = [name for name, one in replay.derived.items() if one.groups is not None]
    assert by_group == ["q0", "q1", "q2"], "by group"
    for number, queries in expected.items():
        for name, rows in queries.items():
            assert replay.rows(name, number) == rows, (number, name)
            assert rows or number == EVERY, name
