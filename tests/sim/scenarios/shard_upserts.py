"""Identical upserts of one topic: the real operator, mirror and bindings of a pipeline, as actors that may die.

Each writer reads the records that the bindings cover, from its own upper on, and other writers overtake it while it
computes. It learns of that at its append: it applies their updates and computes again. It follows the shard as
`spark/ingest/table_writer.py` does (which needs threads): by deltas, or from a snapshot if history was forgotten.

Oracle, in addition to that of the shard: the fold of the records that the winners saw, and that they left out no record
that was there; no output frontier stays below the shard's upper while the source is above it; every mirror equals the
contents of the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sim.oracles.shards import Attempt, Command, Model, check_nothing_skipped, folded, n_of
from sim.scenarios.shard_nodes import Node, Shared, build, oracle_handle, rows_of
from sim.scenarios.shard_readers import again
from sim.scenarios.shard_topic import Topic, bindings
from sim.world import Actor, Violated, World
from tidemill.base.errors import ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.shards.api import TIME, Batch, HistoryLostError, SchemaEvolvedError, ShardSchema
from tidemill.shards.bindings.remap import LogRemap
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema import arrow_type, contents_schema
from tidemill.spark.merge.commands import Commands, command_schema, filter_commands, times_of
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.operator import UpsertOperator
from tidemill.spark.merge.resolve import MirrorLookup, Resolved, resolve

FAULTS = ("restash-below-upper", "trim-batch", "drain-twice", "trust-checkpoint")


class Upserts(Shared):
    def __init__(self, world: World, fault: str) -> None:
        super().__init__(world, fault)
        self.topic = Topic(world)
        self.slow_s = world.source.choice((0.1, 0.5, 1.5))
        """Longest time in which a writer computes a batch."""
        self.checkpoints: dict[str, int] = {}
        """Writer → offset up to which it has planned batches, as in Spark's log of offsets."""

    def cast(self) -> list[Actor[Node]]:
        return [Actor(self.world, f"upsert-{i}", build) for i in range(self.world.source.choice((1, 2, 3, 4)))]

    def other_work(self) -> list[tuple[Actor[Node], Callable[[Any, Node], Awaitable[None]]]]:
        return [(Actor(self.world, f"minter-{i}", build), lambda shared, node: shared.topic.mint(node)) for i in (0, 1)]

    async def feed(self) -> None:
        await self.topic.feed()

    async def write(self, node: Node) -> None:
        writer = Writer(self, node, await bindings(node))
        if self.world.source.random() < 0.4:
            await asyncio.sleep(self.world.source.uniform(0, 3.0))  # so that it has records to catch up with
        while not await writer.step():
            pass

    async def model(self, stands: Sequence[Attempt]) -> Model:
        kept = self.topic.kept(await self.topic.bound())
        check_nothing_skipped(stands, kept)
        # Only the log decides which rows have the column, not the version that a winner knew.
        versions = (await oracle_handle(self.world)).state.versions
        evolved_at = versions[0].upper if versions else 1 << 60
        if not self.topic.gone:
            before, after = (Attempt("", lower, upper, seen=tuple(kept)) for lower, upper in
                             ((0, evolved_at), (evolved_at, 1 << 61)))  # fmt: skip
            if sorted(folded([before, after], evolved_at)) != sorted(folded(stands, evolved_at)):
                raise Violated("several writers wrote something else than one")
        return Model(folded(stands, evolved_at))


class RestashingOperator(UpsertOperator):
    """Planted fault restash-below-upper: commands below the upper stay stashed, and pin the output frontier."""

    def _drop_below(self, commands: Commands, *, lost: bool = True) -> Commands:
        return commands


class Writer:
    """One life of an upsert writer."""

    def __init__(self, shared: Upserts, node: Node, remap: LogRemap) -> None:
        self._shared = shared
        self._node = node
        self._remap = remap
        self._operator_type = RestashingOperator if shared.fault == "restash-below-upper" else UpsertOperator
        self._operator: UpsertOperator | None = None
        self._seen: set[Command] = set()
        self._skip_to = shared.checkpoints.get(node.actor.name, 0) if shared.fault == "trust-checkpoint" else 0

    @property
    def _shard(self) -> LogShard:
        return self._node.shard

    async def step(self) -> bool:
        """Do one round. Return True once everything is bound and this writer has reached the end."""
        source = self._shared.world.source
        try:
            if self._operator is None:
                await self._start_over()
            elif source.random() < 0.3:
                await self._follow()
            operator = self._operator
            assert operator is not None
            lower = operator.upper
            found = await self._remap.after(lower - 1, limit=source.choice((1, 2, 5, 1000)))
            if not found:
                await asyncio.sleep(source.uniform(0, 0.1))
                await self._follow()
                return await self._at_the_end(operator)
            base = await self._remap.at(lower - 1)
            commands = self._shared.topic.read(base, found, self._skip_to)
            (planned,) = found[-1].offsets.values()
            self._shared.checkpoints[self._node.actor.name] = planned[0]
            operator.ingest(_commands(operator.schema, commands))
            operator.advance(found[-1].time_ms + 1)
            self._seen.update(commands)
            if source.random() < 0.5:
                await asyncio.sleep(source.uniform(0, self._shared.slow_s))  # decoding and sorting take a while
            if source.random() < 0.2:
                await self._follow()
            await self._commit()
        except SchemaEvolvedError:
            self._operator = None  # its mirror and its applied updates have the older schema
            self._seen.clear()
            await again(self._node)
        except (UnavailableError, UnknownOutcomeError):
            await asyncio.sleep(0.05)
        return False

    async def _commit(self) -> None:
        operator = self._operator
        assert operator is not None
        pending = operator.drain()
        if operator.output_frontier < operator.upper < operator.source_frontier:
            raise Violated(
                f"an output frontier is pinned below the shard's upper: frontier={operator.output_frontier} "
                f"upper={operator.upper} source={operator.source_frontier}"
            )
        if pending.upper <= pending.lower:
            return
        try:
            await self._append(pending.lower, pending.upper, pending.updates)
            operator.committed(pending)
        except ConflictError as conflict:
            current = int(str(conflict.current))
            if self._shared.fault == "trim-batch" and pending.lower < current < pending.upper:
                late = pending.updates.filter(pc.greater_equal(pending.updates.column(TIME), current))
                with contextlib.suppress(ConflictError):
                    await self._append(current, pending.upper, late)
            await self._follow()

    async def _append(self, lower: int, upper: int, updates: pa.Table) -> None:
        """Append the updates. Raises ConflictError. After some UnknownOutcomeErrors its own rows return as a peer's."""
        shared, source = self._shared, self._shared.world.source
        parts = [await self._shard.write_part(updates)] if updates.num_rows else []
        seen = tuple(command for command in self._seen if lower <= command[3] < upper)
        attempt = Attempt(shared.token(), lower, upper, seen=seen)
        shared.attempts[attempt.token] = attempt
        while True:
            try:
                await self._shard.compare_and_append(lower, upper, parts, attempt.token)
                attempt.outcome = "ok"
                return
            except (ConflictError, UnavailableError, SchemaEvolvedError):
                attempt.outcome = "refused"
                raise
            except UnknownOutcomeError:
                if source.random() < 0.5:
                    raise
                await asyncio.sleep(0.05)
            finally:
                line = f"append [{lower}, {upper}) ×{updates.num_rows} {attempt.outcome}"
                shared.world.trace(f"{self._node.actor.life} {line}")

    async def _follow(self) -> None:
        operator = self._operator
        assert operator is not None
        _, upper = await self._shared.frontiers.read(self._shard)
        if upper == operator.upper:
            return
        try:
            batches: list[Batch] = await self._shard.batches(operator.upper)
            for batch in batches:
                if batch.upper > operator.upper:
                    lower = operator.upper
                    rows = await self._shard.read_batch(batch, lower, batch.upper)
                    operator.apply_peer(rows, lower, batch.upper)
        except HistoryLostError:
            await self._start_over()

    async def _start_over(self) -> None:
        schema = self._shard.schema
        while True:
            _, upper = await self._shared.frontiers.read(self._shard)
            try:
                rows = await self._shard.snapshot(upper - 1) if upper else contents_schema(schema).empty_table()
                break
            except HistoryLostError:
                continue
        kept = self._operator
        self._operator = self._operator_type(schema, Mirror.hydrate(schema, rows, upper))
        if kept is not None:
            self._shared.world.trace(f"{self._node.actor.life} started over at {upper}")
            self._operator.adopt_stash(kept)

    async def _at_the_end(self, operator: UpsertOperator) -> bool:
        latest = await self._remap.latest()
        topic = self._shared.topic
        if not topic.done or latest is None or latest.offsets != {"t": (len(topic.records),)}:
            return False
        if operator is not self._operator or operator.upper <= latest.time_ms:
            return False
        self._shared.reads.append((operator.upper - 1, rows_of(operator.mirror.live_rows())))
        return True


def _commands(schema: ShardSchema, seen: Sequence[Command]) -> Commands:
    """Decode records under this schema. Version 1 ignores their `n`."""
    columns = [
        pa.array([c[1] for c in seen], pa.string()),
        pa.array([c[2] for c in seen], pa.string()),
        *(pa.array([n_of(c[0], schema.version) for c in seen], arrow_type(n.type)) for n in schema.columns[2:]),
        pa.array([c[3] for c in seen], pa.int64()),
        pa.array([c[0] for c in seen], pa.int64()),
        pa.array([0] * len(seen), pa.int32()),
        pa.array([c[2] is not None for c in seen], pa.bool_()),
    ]
    return Commands(pa.Table.from_arrays(columns, schema=command_schema(schema)))


def drained_twice(
    schema: Any, commands: Commands, mirror: MirrorLookup, lower: int, upper: int, hasher: Any
) -> Resolved:
    """Plant the fault drain-twice: each time is drained separately, all of them against the mirror at one upper."""
    whole = resolve(schema, commands, mirror, lower, upper, hasher)
    times = times_of(commands)
    each = [
        resolve(schema, filter_commands(commands, times == t), mirror, lower, upper, hasher) for t in sorted(set(times))
    ]
    return Resolved(lower, upper, pa.concat_tables([whole.updates[:0], *(r.updates for r in each)]), whole.changes)
