"""Writers, readers, and maintenance that merges, collects and sweeps, on one real shard.

Faults: every store fault; every actor dies at any step and starts again from the stores; several writers race for
every upper; holds expire during reads; the shard gets a column during all that, which is then widened. In half of the
worlds the writers append separate rows, in the others they are identical upserts of one topic (shard_upserts.py).
Oracle: in a replay of the log, acknowledged appends are there once and refused ones never, with contiguous bounds;
since and upper never go back; the contents read at any time equal the sequential model and never change, and so do the
stored contents at every readable time; a listener sees every update once; objects that were chosen under a live hold
exist until the hold ends, in spite of collection and sweeps; no writer's frontier stops while its topic continues;
after healing every writer is done and every named object exists.
Replay: ./dev sim --room shards --seed K --trace
"""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sim.oracles.shards import check_heard, check_landed, check_reads, check_stored
from sim.scenarios import shard_upserts
from sim.scenarios.shard_nodes import Shared, build, evolve, keep, keep_up, oracle_handle, rows_of, updates_of
from sim.scenarios.shard_readers import listen, read, read_long
from sim.scenarios.shard_writers import Writers
from sim.world import Actor, Crew, Violated, World, swapped
from tidemill.base.limits import INLINE_PART_BYTES
from tidemill.shards import handle
from tidemill.shards.api import TIME, Part, ShardSchema
from tidemill.shards.compaction import compaction
from tidemill.shards.parts import consolidate
from tidemill.shards.parts.parts import decode_part
from tidemill.shards.read import part_reader
from tidemill.shards.state import apply as apply_rules
from tidemill.shards.state import state_machine
from tidemill.shards.state.state import Garbage, ShardState
from tidemill.spark.merge import operator, resolve


async def run(world: World, fault: str = "") -> None:
    # Both kinds of writers meet both kinds of object stores, which the last bit selects (Actor.objects).
    upserting = fault in shard_upserts.FAULTS or (fault != "stranded-rows" and world.seed // 2 % 2 == 1)
    shared: Shared = shard_upserts.Upserts(world, fault) if upserting else Writers(world, fault)
    decoded: dict[tuple[int, str | bytes], pa.Table] = {}

    def decode_once(schema: ShardSchema, data: Any, part: Part) -> pa.Table:
        """Decode a part once for all handles of a world: parts never change, and this halves the cost of a seed."""
        key = schema.version, part.object_key or part.inline
        if key not in decoded:
            decoded[key] = decode_part(schema, data, part)
        return decoded[key]

    inline_bytes = world.source.choice((0, INLINE_PART_BYTES))
    with (
        swapped(handle, "INLINE_PART_BYTES", inline_bytes),
        swapped(compaction, "INLINE_PART_BYTES", inline_bytes),
        swapped(state_machine, "ROLLUP_AFTER_RECORDS", world.source.choice((5, 512))),
        swapped(compaction, "FAN_IN", world.source.choice((2, 4, 8))),
        swapped(compaction, "SMALLEST_CLASS_BYTES", world.source.choice((1 << 10, 64 << 10))),
        swapped(compaction, "RANGE_BYTES", world.source.choice((4 << 10, 32 << 20))),
        swapped(compaction, "PART_ROWS", world.source.choice((3, 1 << 20))),
        swapped(part_reader, "decode_part", decode_once),
        swapped(
            apply_rules, "collectable_garbage", _deaf if fault == "collect-held" else apply_rules.collectable_garbage
        ),
        swapped(operator, "resolve", shard_upserts.drained_twice if fault == "drain-twice" else resolve.resolve),
        swapped(
            compaction, "merge_updates", _eager if fault == "consolidate-above-since" else consolidate.merge_updates
        ),
    ):
        await play(world, shared)
        await check(shared)


def _deaf(state: ShardState, before_ms: int, now_ms: int, seen: int = 0) -> tuple[Garbage, ...]:
    """Plant the fault collect-held: every replaced object is collected."""
    return state.garbage


def _eager(schema: ShardSchema, updates: pa.Table, advance_to: int) -> pa.Table:
    """Plant the fault consolidate-above-since: all merged times are summed, although readers distinguish them."""
    return consolidate.merge_updates(schema, updates, max(advance_to, pc.max(updates.column(TIME)).as_py()))


async def play(world: World, shared: Shared) -> None:
    source = world.source
    writers = shared.cast()
    other_work = shared.other_work()
    other_work += [(Actor(world, f"evolver-{i}", build), evolve) for i in range(source.choice((0, 0, 1, 2)))]
    names = ("reader", "long-reader", "listener")
    reader, long_reader, listener = (Actor(world, name, build) for name in names)
    maintainers = [Actor(world, f"keeper-{i}", build) for i in range(source.choice((0, 1, 1, 2)))]
    stop: asyncio.Future[None] = world.loop.create_future()
    async with Crew() as crew:
        writing = [crew.spawn(keep(shared, writer, type(shared).write, stop)) for writer in writers]
        writing.append(crew.spawn(shared.feed()))
        others = [
            crew.spawn(keep(shared, reader, read, stop)),
            crew.spawn(keep(shared, long_reader, read_long, stop)),
            crew.spawn(keep(shared, listener, listen, stop)),
            *(crew.spawn(keep(shared, maintainer, keep_up, stop)) for maintainer in maintainers),
            *(crew.spawn(keep(shared, actor, work, stop)) for actor, work in other_work),
        ]
        for _ in range(source.choice((0, 1, 3, 6))):
            await asyncio.sleep(source.uniform(0, 0.8))
            victim = source.choice(writers if source.random() < 0.5 else world.actors)
            if victim.up:
                victim.crash()
        await asyncio.wait(writing, timeout=5.0)
        world.faults.heal()
        world.trace("heal")
        await asyncio.wait(writing)
        _, upper = await (await oracle_handle(world)).frontiers()
        await world.until(lambda: shared.heard_to >= upper)
        stop.set_result(None)
        await asyncio.wait(others)
    for actor in world.actors:
        actor.crash()  # the data must not change while the oracle reads


async def check(shared: Shared) -> None:
    world, shard = shared.world, await oracle_handle(shared.world)
    stands = check_landed(world.consensus.landed.get(f"shard/{shard.shard_id}", []), shared.attempts)
    for key in {part.object_key for batch in shard.state.batches for part in batch.parts if part.object_key}:
        if await world.objects.head(key) is None:
            raise Violated(f"an object of the shard is gone: object={key}")
    model = await shared.model(stands)
    check_reads(shared.reads, model)
    since, upper = await shared.frontiers.read(shard)
    if upper:
        stored = await shard.updates_until(upper - 1)
        check_stored(updates_of(stored), since, model)
        check_reads([(as_of, rows_of(await shard.snapshot(as_of))) for as_of in {since, upper - 1}], model)
    check_heard(shared.heard, shared.heard_to, model)
