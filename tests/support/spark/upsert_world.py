"""A tiny model around the pure operator: one shard with compare-and-append, writers, and a sequential oracle."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tidemill.shards.api import Column, ShardSchema
from tidemill.spark.merge.commands import Commands, Truncate, command_schema
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.operator import UpsertOperator
from tidemill.spark.merge.resolve import Resolved

SCHEMA = ShardSchema((Column("k", "int64"), Column("v", "int64")), ("k",))
Set = tuple[int, int | None, int, int]
"""(key, value or None, time, order)"""
Update = tuple[int, int, int, int]
"""(key, value, time, diff)"""


def commands(sets: Iterable[Set], truncates: Iterable[Truncate] = ()) -> Commands:
    rows = list(sets)
    arrays = [
        pa.array([r[0] for r in rows], pa.int64()),
        pa.array([r[1] for r in rows], pa.int64()),
        pa.array([r[2] for r in rows], pa.int64()),
        pa.array([r[3] for r in rows], pa.int64()),
        pa.array([0] * len(rows), pa.int32()),
        pa.array([r[1] is not None for r in rows], pa.bool_()),
    ]
    return Commands(pa.Table.from_arrays(arrays, schema=command_schema(SCHEMA)), tuple(truncates))


def updates(table: pa.Table) -> list[Update]:
    found = [(r["k"], r["v"], r["_time"], r["_diff"]) for r in table.to_pylist()]
    return sorted(found, key=lambda u: (u[2], u[0], u[3], u[1]))


class ModelShard:
    """compare-and-append and nothing else. `log` holds (lower, upper, updates)."""

    def __init__(self) -> None:
        self.upper = 0
        self.log: list[tuple[int, int, pa.Table]] = []

    def append(self, lower: int, upper: int, rows: pa.Table) -> bool:
        if lower != self.upper:
            return False
        assert upper > lower
        self.log.append((lower, upper, rows))
        self.upper = upper
        return True

    def contents(self, as_of: int) -> dict[int, int]:
        """Return the contents at `as_of`; fail on two live rows of a key or a count other than one."""
        counts: dict[tuple[int, int], int] = {}
        for _, _, table in self.log:
            for key, value, time, diff in updates(table):
                if time <= as_of:
                    counts[key, value] = counts.get((key, value), 0) + diff
        live = {row: n for row, n in counts.items() if n}
        assert all(n == 1 for n in live.values()), live
        assert len({key for key, _ in live}) == len(live), live
        return dict(live.keys())


class Writer:
    """One writer on a model shard: applies what peers appended before it drains."""

    def __init__(  # type: ignore[no-untyped-def]
        self, shard: ModelShard, *, operator_type: type[UpsertOperator] = UpsertOperator, hasher=None
    ) -> None:
        more = {"hasher": hasher} if hasher else {}
        self.shard = shard
        self.seen = 0
        self.operator = operator_type(SCHEMA, Mirror(SCHEMA, **more), **more)

    def sync(self) -> None:
        for lower, upper, rows in self.shard.log[self.seen :]:
            self.operator.apply_peer(rows, lower, upper)
        self.seen = len(self.shard.log)

    def commit(self, pending: Resolved) -> bool:
        if pending.upper <= pending.lower or not self.shard.append(pending.lower, pending.upper, pending.updates):
            return False
        self.operator.committed(pending)
        self.seen += 1
        return True

    def step(self, sets: Iterable[Set], frontier: int, truncates: Iterable[Truncate] = ()) -> list[Update]:
        """Ingest, advance, drain and commit, winning the race."""
        self.sync()
        self.operator.ingest(commands(sets, truncates))
        self.operator.advance(frontier)
        pending = self.operator.drain()
        assert self.commit(pending)
        return updates(pending.updates)


def oracle(sets: Iterable[Set], as_of: int, truncates: Iterable[Truncate] = ()) -> dict[int, int]:
    """Return the contents at `as_of` for a single sequential reader of the whole topic."""
    winners: dict[tuple[int, int], tuple[int, int | None]] = {}
    rows = list(sets)
    keys = {key for key, *_ in rows}
    spelled = [(key, None, t.time_ms, t.order) for t in truncates for key in keys]
    for key, value, time, order in [*rows, *spelled]:
        if (key, time) not in winners or winners[key, time][0] < order:
            winners[key, time] = (order, value)
    live: dict[int, int] = {}
    for (key, time), (_, value) in sorted(winners.items(), key=lambda item: item[0][1]):
        if time > as_of:
            break
        if value is None:
            live.pop(key, None)
        else:
            live[key] = value
    return live
