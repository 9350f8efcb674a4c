"""A table with a sequence on real shards in memory, writers that may be killed at every durable point, and two oracles.

A record is (key, sequence, value or None for a deletion, time); its place in the list is its order in the topic.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.consensus.memory import MemoryConsensus
from tidemill.metastore.backup.restore import ATTEMPT_REGISTER, Attempt
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import Column, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.registry import open_shard, read_shards, tombstones_name
from tidemill.shards.state.restore import restore_shard
from tidemill.spark.formats.record_format import RecordFormat
from tidemill.spark.ingest.sources import TopicFeed
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge.commands import Commands, Truncate, command_schema
from tidemill.spark.merge.resolve import Resolved
from tidemill.spark.stores import Stores
from tidemill.spark.tombstones import Tombstones

Record = tuple[int, tuple[Any, ...], int | None, int]


class Killed(Exception):
    """The process ends here."""


def schema_of(types: Sequence[str]) -> tuple[ShardSchema, tuple[str, ...]]:
    """Return the schema of a table whose sequence has columns of these types, and their names."""
    names = tuple(f"s{n}" for n in range(len(types)))
    columns = [Column("k", "int64"), *(Column(n, t) for n, t in zip(names, types, strict=True)), Column("v", "int64")]
    return ShardSchema(tuple(columns), ("k",)), names


def commands_of(schema: ShardSchema, records: Iterable[tuple[int, Record]], cuts: Iterable[Truncate] = ()) -> Commands:
    """Return commands of (order, record)."""
    rows = list(records)
    count = len(schema.columns) - 2
    columns: list[list[Any]] = [[r[0] for _, r in rows], *([r[1][n] for _, r in rows] for n in range(count))]
    columns += [[r[2] for _, r in rows], [r[3] for _, r in rows], [at for at, _ in rows], [0] * len(rows)]
    columns.append([r[2] is not None for _, r in rows])
    target = command_schema(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, target, strict=True)]
    return Commands(pa.Table.from_arrays(arrays, schema=target), tuple(cuts))


class SequenceWorld:
    """The stores, the topic, and the times of its bindings."""

    def __init__(
        self,
        types: Sequence[str],
        records: Sequence[Record],
        *,
        keep_s: float,
        truncates: Sequence[Truncate] = (),
        tombstones: Callable[..., Tombstones] = Tombstones,
    ) -> None:
        self.schema, names = schema_of(types)
        self.records = list(records)
        self.truncates = list(truncates)
        self.portal = BlockingPortal("sequence")
        self.clock, self.rand = SystemClock(), Rand()
        self.consensus, self.objects = MemoryConsensus(self.clock), MemoryObjects(self.clock)
        self.metastore = None
        self.consensus_life = "1"
        self.end = max([r[3] for r in records] + [t.time_ms for t in truncates], default=0) + 1
        self.feed = TopicFeed(
            "t", "id", 1, False, self.schema, record_format=RecordFormat(sequence_by=names, sequence_keep_s=keep_s)
        )
        self.make_tombstones = tombstones
        self.fuse = -1
        """Number of durable operations after which the process is killed; negative: never."""
        self._scratch = tempfile.TemporaryDirectory()
        self._count = 0

    def close(self) -> None:
        self.portal.call(self.consensus.aclose())
        self.portal.close()
        self._scratch.cleanup()

    def __enter__(self) -> SequenceWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def shard(self, name: str, schema: ShardSchema | None = None) -> LogShard:
        shard = await open_shard(self.consensus, self.objects, self.clock, self.rand, name, schema)
        append = shard.compare_and_append

        async def burning(*args: Any) -> int:
            self._burn()
            found = await append(*args)
            self._burn()
            return found

        shard.compare_and_append = burning  # type: ignore[method-assign]
        return shard

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def restore(self) -> None:
        """Lose consensus, and restore the shards into an empty one."""

        async def run() -> MemoryConsensus:
            fresh = MemoryConsensus(self.clock)
            attempt = Attempt(self.rand.nonce(), "", "", (), 0)
            await fresh.cas(ATTEMPT_REGISTER, 0, msgspec.msgpack.encode(attempt), attempt.nonce)
            for state in await read_shards(self.consensus):
                await restore_shard(fresh, self.rand, state, attempt.nonce)
            return fresh

        self.consensus = self.portal.call(run())

    def driver(self) -> Driver:
        self._count += 1
        return Driver(self, Path(self._scratch.name) / str(self._count))

    def contents(self, times: Iterable[int]) -> list[dict[int, int]]:
        """Return the contents of the table at these times."""
        updates = self.portal.call(self.portal.call(self.shard("t")).updates_until(self.end - 1, 10))
        rows = updates.select(["_time", "_diff", "k", "v"]).to_pylist()
        return [self._sum(row for row in rows if row["_time"] <= time) for time in times]

    @staticmethod
    def _sum(updates: Iterable[dict[str, int]]) -> dict[int, int]:
        counts: dict[tuple[int, int], int] = {}
        for row in updates:
            counts[row["k"], row["v"]] = counts.get((row["k"], row["v"]), 0) + row["_diff"]
        live = [row for row, count in counts.items() if count]
        assert all(counts[row] == 1 for row in live) and len({key for key, _ in live}) == len(live), counts
        return dict(live)

    def tombstones(self) -> list[tuple[Any, ...]]:
        """Return the tombstones that are stored."""
        shard = self.portal.call(self.shard("t"))
        stored = self.portal.call(self.shard(tombstones_name("t", shard.shard_id)))
        upper = self.portal.call(stored.frontiers())[1]
        rows = self.portal.call(stored.snapshot(upper - 1, 10)).to_pylist() if upper else []
        return sorted(tuple(row.values()) for row in rows)


class Driver:
    """One process that maintains the table."""

    def __init__(self, world: SequenceWorld, scratch: Path) -> None:
        self.world = world
        shard = world.portal.call(world.shard("t", world.schema))
        self.table = TableWriter(world.portal, cast(Stores, world), shard, scratch, world.feed)
        rule = world.feed.record_format.sequence_rule
        assert rule is not None and self.table.tombstones is not None
        self.table.tombstones = world.make_tombstones(world.portal, world, shard, rule, scratch)
        self.table.operator._sequence = self.table.tombstones.sequence
        self.table.hydrate()
        self.pending: Resolved | None = None

    def step(self, width: int) -> bool:
        """Process the next `width` times. Return whether there were any."""
        self.compute(width)
        found = self.pending is not None
        self.append()
        return found

    def compute(self, width: int) -> None:
        table, world = self.table, self.world
        self.pending = None
        lower = table.upper
        upper = min(lower + width, world.end)
        if upper <= lower:
            return
        mine = [(at, r) for at, r in enumerate(world.records) if lower <= r[3] < upper]
        cuts = [t for t in world.truncates if lower <= t.time_ms < upper]
        table.follow_tombstones()
        table.operator.replace_stash(commands_of(world.schema, mine, cuts))
        table.operator.advance(upper)
        self.pending = table.operator.drain()

    def append(self) -> None:
        """Append what was computed; a peer may have been first."""
        table, pending, self.pending = self.table, self.pending, None
        if pending is None:
            return
        table.put_tombstones([pending])
        parts = table.portal.call(table.write(pending.updates))
        if table.portal.call(table.append(pending.lower, pending.upper, parts)):
            table.committed(pending)
        else:
            table.follow()


def rank(sequence: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key with Spark's order of a struct: NaN is the greatest, -0.0 equals 0.0."""
    return tuple(_rank(value) for value in sequence)


def _rank(value: Any) -> Any:
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def max_by(records: Sequence[Record], as_of: int) -> dict[int, int]:
    """Return the contents of a batch job: of each key the record of greatest (sequence, order)."""
    best: dict[int, tuple[Any, int | None]] = {}
    for order, (key, sequence, value, time) in enumerate(records):
        place = (rank(sequence), order)
        if time <= as_of and (key not in best or place > best[key][0]):
            best[key] = place, value
    return {key: value for key, (_, value) in best.items() if value is not None}


def fold(records: Sequence[Record], as_of: int, keep_ms: int, truncates: Sequence[Truncate] = ()) -> dict[int, int]:
    """Return the contents after one record at a time, with tombstones that expire."""
    states: dict[int, tuple[Any, int | None, int]] = {}
    events: list[tuple[int, float, Record | None]] = [(r[3], at, r) for at, r in enumerate(records)]
    events += [(t.time_ms, t.order - 0.5, None) for t in truncates]
    for time, _, record in sorted(events, key=lambda event: event[:2]):
        if time > as_of:
            break
        if record is None:
            live = {key: state for key, state in states.items() if state[1] is not None}
            states |= {key: (sequence, None, time) for key, (sequence, _, _) in live.items()}
            continue
        key, sequence, value, _ = record
        state = states.get(key)
        expired = state is not None and state[1] is None and time >= state[2] + keep_ms
        if state is None or expired or rank(sequence) >= state[0]:
            states[key] = rank(sequence), value, time
    return {key: value for key, (_, value, _) in states.items() if value is not None}


VALUES: dict[str, list[Any]] = {
    "int64": [-2, 0, 1, 2**62],
    "float64": [-1.5, -0.0, 0.0, 2.5, math.inf, math.nan],
    "float32": [-0.0, 0.0, 1.5, math.nan],
    "decimal(12,2)": [Decimal("-1.00"), Decimal("0.00"), Decimal("99999999.99")],
    "string": ["", "Z", "a", "ä", "\uffff", "\U0001f600"],
    "bool": [False, True],
    "binary": [b"", b"a", b"\xff"],
}
"""Values of sequences by type; timestamps and dates are integers, which pyarrow takes for them."""
VALUES |= {"timestamp": [-5, 0, 1, 10**15], "date": [-1, 0, 20_000], "int16": [-3, 7]}
