"""Writers, readers, and a keeper that merges, collects and sweeps, on one real shard.

Faults: every store fault; every actor dies at any step and starts again from the stores; several writers
race for every upper. A writer that hears Unknown repeats the append with its token until it knows.
Oracle: replaying the log, acknowledged appends stand once and refused ones never, bounds contiguous;
contents at every time ever read equal the sequential model and never change; a listener sees every update
once; compaction changes nothing readable; what was chosen under a live hold is there until it ends, whatever
was collected and swept meanwhile; after healing every writer is done and every object named is there.
Replay: python -m tidemill.sim --room shards --seed K --trace
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pyarrow as pa

from tidemill.base.clock import Rand
from tidemill.base.errors import Conflict, Invalid, Missing, Unavailable, Unknown
from tidemill.consensus import staterecords
from tidemill.keeper.collection import collect
from tidemill.keeper.grounds import Grounds, Retention
from tidemill.keeper.jobs import Budget
from tidemill.keeper.orphans import Orphans
from tidemill.shards import apply as apply_rules
from tidemill.shards import compaction, machine, reading
from tidemill.shards.apply import Rejected, apply
from tidemill.shards.codec import decode_command
from tidemill.shards.commands import Append
from tidemill.shards.compaction import compact_once
from tidemill.shards.consolidate import contents
from tidemill.shards.front import DIFF, TIME, Column, HistoryLost, Part, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.open import open_shard
from tidemill.shards.parts import decode_part
from tidemill.shards.state import Garbage, ShardState, check_whole
from tidemill.sim.world import Actor, Crew, Down, Violated, World, swapped

SCHEMA = ShardSchema((Column("k", "string"), Column("v", "string")), ("k",))
NAME = "t"
OWNER = "keeper"
HOLD_MS = 10**9

Row = tuple[str, str]
Update = tuple[str, str, int, int]
"""k, v, time, diff"""


class Attempt(msgspec.Struct):
    """outcome: `running` (its writer died, or never learned), `ok`, or `refused`."""

    token: str
    lower: int
    upper: int
    updates: tuple[Update, ...]
    outcome: str = "running"


class Shared:
    """What the scenario knows from outside: attempts, what was read, how far the listener durably got."""

    def __init__(self, world: World, fault: str) -> None:
        self.world = world
        self.fault = fault
        self.attempts: dict[str, Attempt] = {}
        self.remaining: dict[str, int] = {}
        self.rows: dict[str, list[Update]] = {}
        """Insertions of each writer that are acknowledged and not retracted."""
        self.reads: list[tuple[int, Counter[Row]]] = []
        self.heard: Counter[Update] = Counter()
        self.frontier = 0
        self.numbers = 0

    def token(self) -> str:
        self.numbers += 1
        return f"token-{self.numbers}"


class Node:
    """One process with a handle on the shard."""

    def __init__(self, actor: Actor[Any], shard: LogShard, rand: Rand, objects: Any, consensus: Any) -> None:
        self.actor = actor
        self.shard = shard
        self.rand = rand
        self.objects = objects
        self.consensus = consensus


async def write(shared: Shared, node: Node) -> None:
    """Append until this writer's quota is done."""
    world, source, name = shared.world, shared.world.source, node.actor.name
    while shared.remaining[name] > 0:
        fresh = source.random() < 0.6
        try:
            _, lower = await node.shard.frontiers(fresh=fresh)
            upper = lower + source.randint(1, 20)
            attempt = Attempt(shared.token(), lower, upper, _updates(shared, name, lower, upper))
            parts = [await node.shard.write_part(_table(attempt.updates))] if attempt.updates else []
        except (Unavailable, Unknown):
            await asyncio.sleep(0.05)
            continue
        shared.attempts[attempt.token] = attempt
        while True:
            try:
                await node.shard.compare_and_append(lower, upper, parts, attempt.token)
            except Conflict as conflict:
                attempt.outcome = "refused"
                if not isinstance(conflict.current, int) or (conflict.current <= lower and fresh):
                    raise Violated(f"a conflict does not say what is there: current={conflict.current}") from conflict
                if shared.fault == "stranded-rows":
                    lower, upper = conflict.current, conflict.current + 5
                    attempt = Attempt(shared.token(), lower, upper, attempt.updates)
                    shared.attempts[attempt.token] = attempt
                    continue
            except Unknown:
                await asyncio.sleep(0.05)
                continue
            except Unavailable:
                attempt.outcome = "refused"
                await asyncio.sleep(0.05)
            else:
                attempt.outcome = "ok"
                _settle(shared, name, attempt)
            break
        world.trace(f"{node.actor.life} append [{lower}, {upper}) ×{len(attempt.updates)} {attempt.outcome}")
        await asyncio.sleep(source.uniform(0, 0.1) if source.random() < 0.5 else 0)


def _updates(shared: Shared, name: str, lower: int, upper: int) -> tuple[Update, ...]:
    """New rows, some large enough to become objects, and retractions of this writer's own."""
    source = shared.world.source
    out: list[Update] = []
    for _ in range(source.choice((0, 1, 1, 2, 4))):
        shared.numbers += 1
        value = shared.world.filler if source.random() < 0.15 else "v"
        out.append((f"{name}-{shared.numbers}", value, source.randrange(lower, upper), 1))
    if shared.rows[name] and source.random() < 0.4:
        # Forgotten at once, whatever becomes of the append: a row must not be retracted twice.
        key, value, _, _ = shared.rows[name].pop(source.randrange(len(shared.rows[name])))
        out.append((key, value, source.randrange(lower, upper), -1))
    return tuple(out)


def _settle(shared: Shared, name: str, attempt: Attempt) -> None:
    shared.remaining[name] -= 1
    shared.rows[name] += [update for update in attempt.updates if update[3] > 0]


def _deaf(state: ShardState, before_ms: int, now_ms: int) -> tuple[Garbage, ...]:
    """Plants collect-held: everything that was replaced goes."""
    return state.garbage


def _table(updates: Iterable[Update]) -> pa.Table:
    listed = list(updates)
    return pa.table(
        {
            "k": pa.array([u[0] for u in listed], pa.string()),
            "v": pa.array([u[1] for u in listed], pa.string()),
            TIME: pa.array([u[2] for u in listed], pa.int64()),
            DIFF: pa.array([u[3] for u in listed], pa.int64()),
        }
    )


def _rows(table: pa.Table) -> Counter[Row]:
    return Counter(zip(table.column("k").to_pylist(), table.column("v").to_pylist(), strict=True))


async def read(shared: Shared, node: Node) -> None:
    """Snapshots at random readable times."""
    source = shared.world.source
    while True:
        await asyncio.sleep(source.uniform(0, 0.6))
        try:
            since, upper = await node.shard.frontiers()
            if upper > since:
                as_of = source.randrange(since, upper)
                shared.reads.append((as_of, _rows(await node.shard.snapshot(as_of, timeout_s=1.0))))
        except (Unavailable, Unknown, Invalid):
            continue


async def read_long(shared: Shared, node: Node) -> None:
    """Chooses under a hold and reads much later: the objects must still be there."""
    source = shared.world.source
    while True:
        await asyncio.sleep(source.uniform(0, 0.4))
        shared.numbers += 1
        reader = f"long-{shared.numbers}"
        try:
            since, upper = await node.shard.frontiers()
            if upper <= since:
                continue
            as_of = source.randrange(since, upper)
            if shared.fault == "choose-before-hold":
                chosen = await node.shard.batches_until(as_of)
                await asyncio.sleep(source.uniform(0, 1.0))
                await node.shard.hold(reader, as_of, HOLD_MS)
            else:
                await node.shard.hold(reader, as_of, HOLD_MS)
                chosen = await node.shard.batches_until(as_of)
        except (Unavailable, Unknown, Invalid):
            continue
        while True:
            await asyncio.sleep(source.uniform(0, 0.8))
            try:
                updates = await node.shard.reader.read_batches(chosen, 0, as_of + 1)
                shared.reads.append((as_of, _rows(contents(SCHEMA, updates))))
                if source.random() < 0.7:
                    await node.shard.release(reader)  # the others lapse some time
                break
            except Missing as error:
                raise Violated(f"an object went under a hold: as_of={as_of} {error.message}") from error
            except (Unavailable, Unknown):
                continue


async def listen(shared: Shared, node: Node) -> None:
    """From where the last life of this listener durably was; progress and rows are kept in one step."""
    while True:
        try:
            async for delta in node.shard.listen(shared.frontier):
                if delta.lower != shared.frontier:
                    raise Violated(f"a listener was given [{delta.lower}, {delta.upper}) at {shared.frontier}")
                columns = [delta.rows.column(name).to_pylist() for name in ("k", "v", TIME, DIFF)]
                shared.heard.update(zip(*columns, strict=True))
                shared.frontier = delta.upper
        except (Unavailable, Unknown, HistoryLost):
            # Without a hold what it chose may be collected; since stays behind it, so it may choose again.
            await asyncio.sleep(0.05)


async def keep_up(shared: Shared, node: Node) -> None:
    """Let history go up to where the listener is, merge runs, collect what was replaced, sweep orphans."""
    source, epoch = shared.world.source, node.actor.life.number
    metastore: Any = None  # there is no other shard, and no restore
    retention = Retention(orphans_after_s=source.choice((0.1, 1.0)))
    orphans = Orphans(Grounds(node.consensus, node.objects, metastore, node.actor.clock, node.rand, retention))
    while True:
        await asyncio.sleep(source.uniform(0, 0.3))
        try:
            if shared.frontier > 1 and source.random() < 0.5:
                since = source.randrange(shared.frontier)
                await node.shard.downgrade_since(OWNER, epoch, min(since, shared.frontier - 1))
            await compact_once(node.shard, node.objects, node.rand)
            if source.random() < 0.7:
                await collect(
                    node.shard, node.objects, node.actor.clock, after_ms=source.choice((-1, 100)), persisted=1 << 60
                )
            if source.random() < 0.2:
                await orphans.run(Budget(node.actor.clock, epoch))
        except (Unavailable, Unknown, Conflict):
            continue


async def keep(shared: Shared, actor: Actor[Node], work: Any, stop: asyncio.Future[None]) -> None:
    """Run `work` in the actor, again after every death, until it ends or the scenario stops."""
    while not stop.done():
        if not actor.up:
            await actor.start()
            continue
        working = actor.enter(lambda node: work(shared, node))
        await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return
        try:
            working.result()
            return
        except Down:
            await asyncio.sleep(shared.world.source.choice((0.0, 0.1, 1.0)))


async def run(world: World, fault: str = "") -> None:
    shared = Shared(world, fault)
    decoded: dict[str | bytes, pa.Table] = {}

    def decode_once(schema: ShardSchema, data: Any, part: Part) -> pa.Table:
        """Parts never change, so all the handles of a world may share one decoding: half the cost of a seed."""
        key = part.object_key or part.inline
        if key not in decoded:
            decoded[key] = decode_part(schema, data, part)
        return decoded[key]

    with (
        swapped(machine, "ROLLUP_AFTER_RECORDS", world.source.choice((5, 512))),
        swapped(compaction, "FAN_IN", world.source.choice((2, 4, 8))),
        swapped(compaction, "SMALLEST_CLASS_BYTES", world.source.choice((1 << 10, 64 << 10))),
        swapped(reading, "decode_part", decode_once),
        swapped(apply_rules, "collectable", _deaf if fault == "collect-held" else apply_rules.collectable),
    ):
        await play(world, shared)
        await check(shared)


async def play(world: World, shared: Shared) -> None:
    source = world.source

    async def build(actor: Actor[Node]) -> Node:
        consensus, objects, rand = actor.consensus(), actor.objects(), world.rand()
        shard = await open_shard(
            consensus, objects, actor.clock, rand, NAME, SCHEMA, writer=str(actor.life).replace("#", ".")
        )
        return Node(actor, shard, rand, objects, consensus)

    writers = [Actor(world, f"writer-{i}", build) for i in range(source.randint(1, 3))]
    names = ("reader", "long-reader", "listener", "keeper")
    reader, long_reader, listener, keeper = (Actor(world, name, build) for name in names)
    for writer in writers:
        shared.remaining[writer.name] = source.randint(2, 6)
        shared.rows[writer.name] = []
    stop: asyncio.Future[None] = world.loop.create_future()
    async with Crew() as crew:
        writing = [crew.spawn(keep(shared, writer, write, stop)) for writer in writers]
        others = [
            crew.spawn(keep(shared, reader, read, stop)),
            crew.spawn(keep(shared, long_reader, read_long, stop)),
            crew.spawn(keep(shared, listener, listen, stop)),
        ]
        if source.random() < 0.7:
            others.append(crew.spawn(keep(shared, keeper, keep_up, stop)))
        for _ in range(source.choice((0, 1, 3))):
            await asyncio.sleep(source.uniform(0, 0.8))
            victim = source.choice(world.actors)
            if victim.up:
                victim.crash()
        await asyncio.wait(writing, timeout=5.0)
        world.faults.heal()
        world.trace("heal")
        await asyncio.wait(writing)
        _, upper = await (await oracle_handle(world)).frontiers()
        await world.until(lambda: shared.frontier >= upper)
        stop.set_result(None)
        await asyncio.wait(others)


async def oracle_handle(world: World) -> LogShard:
    return await open_shard(world.consensus, world.objects, world.clock, Rand(0), NAME)


async def check(shared: Shared) -> None:
    shard = await oracle_handle(shared.world)
    landed = replay(shared.world, f"shard/{shard.shard_id}")
    model: list[Update] = []
    for token, attempt in shared.attempts.items():
        count = landed.count(token)
        if count > 1 or (attempt.outcome == "ok") > count or (attempt.outcome == "refused" and count):
            raise Violated(f"an append stands {count} times: attempt={attempt.outcome} token={token}")
        if count:
            model += attempt.updates
    state = shard.state
    check_whole(state)
    for key in {part.object_key for batch in state.batches for part in batch.parts if part.object_key}:
        if await shared.world.objects.head(key) is None:
            raise Violated(f"an object of the shard is gone: object={key}")

    def at(as_of: int) -> Counter[Row]:
        out: Counter[Row] = Counter()
        for key, value, time, diff in model:
            if time <= as_of:
                out[key, value] += diff
        return Counter({row: count for row, count in out.items() if count})

    probes = sorted(
        {state.since, state.upper - 1, (state.since + state.upper) // 2} & {*range(state.since, state.upper)}
    )
    final = [(as_of, _rows(await shard.snapshot(as_of))) for as_of in probes]
    for as_of, found in shared.reads + final:
        if found != at(as_of):
            raise Violated(f"contents differ from the model: as_of={as_of} {_difference(found, at(as_of))}")
    wanted = Counter(update for update in model if update[2] < shared.frontier)
    if shared.heard != wanted:
        raise Violated(f"a listener missed or repeated updates: {_difference(shared.heard, wanted)}")


def replay(world: World, log: str) -> list[str]:
    """Tokens of the appends in the log, in order, by a replay of every record that ever landed."""
    state: ShardState | None = None
    landed: list[str] = []
    for data in world.consensus.landed.get(log, []):
        if data[0] != staterecords.COMMAND:
            continue
        command = decode_command(data[1:])
        result = apply(state, command)
        if isinstance(result, Rejected):
            continue
        state = result
        if isinstance(command, Append):
            landed.append(command.batch.token)
    return landed


def _difference(found: Counter[Any], wanted: Counter[Any]) -> str:
    return f"missing={_short(wanted - found)} extra={_short(found - wanted)}"


def _short(rows: Counter[Any]) -> str:
    return str([str(row)[:60] for row in list(rows.elements())[:5]])
