"""Nodes that lead, follow and die over one domain of the metastore, and one restore of it from the bucket alone.

Faults: every store fault; every node dies at any step; leases are short, so that two nodes may believe to lead at the
same time; an old manifest is proposed again late; the log rejects some manifests; a collection that a dead leader had
begun ends after its death; in some worlds consensus fails over to a standby that is behind, and loses its newest
commits; in some worlds consensus is lost halfway and the domain continues from its bucket.
Oracle: the log alone, replayed by rules without faults, gives the rows (`oracles.metastore`). After all leaders died
and one came back, the rows are exactly these; the rows of a restore are exactly those of the manifest. The history of
each key is linearizable, including outcomes that were never learned; rows written together are read together; a flush
that was acknowledged is in a manifest that the log accepted; every file that the replicated manifest names exists.
Replay: ./dev sim --room metastore --seed K --trace
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import msgspec

from sim.oracles.linearizable import Call, linearizable
from sim.oracles.metastore import Shadow
from sim.scenarios.metastore_plants import NEWER_EPOCH, Rule, planted, rule_of
from sim.world import Actor, Crew, Down, Engine, Violated, World, swapped
from tidemill.base.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidError,
    StoreRolledBackError,
    UnavailableError,
    UnknownOutcomeError,
)
from tidemill.consensus.state_log.replica import COMMAND
from tidemill.metastore.domain import domain as domain_module
from tidemill.metastore.domain import follower as follower_module
from tidemill.metastore.domain import leader as leader_module
from tidemill.metastore.domain import persist_loop
from tidemill.metastore.domain.apply import apply
from tidemill.metastore.domain.codec import decode_command
from tidemill.metastore.domain.commands import PersistManifest
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.replicated_manifest import ANY_EPOCH
from tidemill.metastore.domain.settings import DomainContext, DomainSettings, prefix_of
from tidemill.metastore.domain.state import DomainState
from tidemill.metastore.lsm import gc as gc_module
from tidemill.metastore.lsm.file_store import SstFiles
from tidemill.metastore.lsm.gc import GarbageCollector, Roots
from tidemill.metastore.lsm.manifest import decode_manifest
from tidemill.metastore.lsm.manifest_store import BucketManifests
from tidemill.metastore.lsm.options import Options

NAME = "d"
LOG = f"metastore/{NAME}"
KEYS = (b"k/0", b"k/1", b"k/2")
PAIR = (b"p/a", b"p/b")
"""Keys that are always written together with one value."""

Found = tuple[int, bytes]
"""(seqno, value) of a live row, (0, b"") for none."""

NO_ROW: Found = (0, b"")
LATE_PUTS_S = 10.0
"""Time within which calls of a dead process arrive; a restore waits longer."""


class Shared:
    def __init__(self, world: World, fault: str) -> None:
        self.world = world
        self.fault = fault
        self.calls: dict[bytes, list[Call]] = {key: [] for key in (*KEYS, PAIR[0])}
        self.initial: dict[bytes, Found] = {}
        self.flushed: list[int] = []
        self.numbers = 0
        self.moments = 0
        self.refuses = world.source.choice((0, 0, 3, 5))
        self.options = drawn_options(world, fault)
        self.moves = random.Random(f"moves {world.seed}")
        """Separate random source, so that the other worlds keep their histories."""
        self.moves_back = fault == "moved-head" or (not fault and self.moves.random() < 0.25)
        self.histories = 0
        """Number of times that commits were lost: earlier calls say little about the rows after that."""
        if self.moves_back:
            # A standby is never further behind than the delay of the garbage collection.
            self.options = msgspec.structs.replace(self.options, gc_delay_ms=60_000)

    def value(self, size: int = 0) -> bytes:
        self.numbers += 1
        return f"v{self.numbers}.".encode() + self.world.filler[:size].encode()

    def moment(self) -> int:
        self.moments += 1
        return self.moments

    def moved(self, rows: dict[bytes, Found], since: int) -> None:
        """Record that consensus has `rows` again, as of the moment `since`. Writes in flight then may land again."""
        self.histories += 1
        self.flushed = []
        for key, calls in self.calls.items():
            self.initial[key] = rows.get(key, NO_ROW)
            self.calls[key] = [
                Call(call.client, ("put", cast("tuple[Any, ...]", call.operation)[-1]), self.moment())
                for call in calls
                if cast("tuple[str, ...]", call.operation)[0] != "read" and (not call.known or call.end > since)
            ]

    def rule(self, state: DomainState, data: bytes, position: int, term: int, rule: Rule = apply) -> DomainState:
        """Apply the rules of the log, and reject the manifest at some positions, the same ones in every replica."""
        if self.refuses and position % self.refuses == 0:
            command = decode_command(data)
            if isinstance(command, PersistManifest):
                raise ConflictError("the scenario rejects this manifest.", current=state.manifest)
        return rule(state, data, position, term)


def drawn_options(world: World, fault: str) -> Options:
    source = world.source
    return Options(
        write_buffer_bytes=source.choice((1_500, 4_000, 1 << 20)),
        block_bytes=200,
        file_bytes=source.choice((600, 4_000)),
        cache_bytes=source.choice((0, 3_000, 1 << 20)),
        l0_compact=source.choice((1, 2, 4)),
        l0_slow=6,
        l0_stop=9,
        level_base_bytes=2_000,
        level_factor=2,
        levels=4,
        slice_rows=8,
        gc_delay_ms=source.choice((0, 0, 0) if fault == NEWER_EPOCH else (0, 0, 400)),
        manifests_kept=source.choice((1, 1, 1) if fault == NEWER_EPOCH else (1, 1, 3)),
    )


async def run(world: World, fault: str = "") -> None:
    shared = Shared(world, fault)
    world.blind = fault == "moved-head"
    with ExitStack() as stack:
        stack.enter_context(planted(fault))
        stack.enter_context(swapped(domain_module, "apply", partial(shared.rule, rule=rule_of(fault))))
        stack.enter_context(swapped(gc_module, "PAUSE_MIN_S", 0.1))
        stack.enter_context(swapped(persist_loop, "RETRY_MAX_S", 1.0))
        stack.enter_context(swapped(leader_module, "REPLAY_ROWS", 3))
        stack.enter_context(swapped(follower_module, "APPLY_ROWS", 3))
        start = await half(shared, {})
        if fault == "forget-delta" or world.source.random() < 0.4:
            restored = await lose_consensus(shared, start)
            await half(shared, restored)


def nodes(shared: Shared) -> list[Actor[Domain]]:
    world, source = shared.world, shared.world.source
    settings = DomainSettings(
        lease_ttl_ms=source.choice((300, 300) if shared.fault == NEWER_EPOCH else (300, 1_000)),
        persist_interval_s=source.choice((0.2, 1.0, 5.0)),
        flush_timeout_s=5.0,
        request_timeout_s=3.0,
        follow_pause_s=source.choice((0.0, 0.05)),
        linger_s=0.5,
        volatile_bytes=source.choice((3_000, 1 << 20)),
        rollup_after_records=source.choice((4, 64)),
        options=shared.options,
    )
    tool = DomainSettings(**{name: getattr(settings, name) for name in settings.__struct_fields__} | {"lead": False})

    def builder(reported: DomainSettings) -> Callable[[Actor[Domain]], Awaitable[Domain]]:
        async def build(actor: Actor[Domain]) -> Domain:
            return await Domain.open(
                DomainContext(
                    actor.consensus(),
                    actor.objects(),
                    NAME,
                    holder=actor.name,
                    clock=actor.clock,
                    rand=world.rand(),
                    settings=reported,
                )
            )

        return build

    made = [Actor(world, f"node-{i}", builder(settings)) for i in range(source.randint(2, 3))]
    if source.random() < 0.5:
        made.append(Actor(world, "tool", builder(tool)))
    return made


async def half(shared: Shared, start: dict[bytes, Found]) -> dict[bytes, Found]:
    """Work under faults, heal, let every leader die again, and compare. Return the rows according to the log."""
    world, source = shared.world, shared.world.source
    actors = nodes(shared)
    shared.calls = {key: [] for key in shared.calls}
    shared.initial, shared.flushed = {key: start.get(key, NO_ROW) for key in shared.calls}, []
    stop: asyncio.Future[None] = world.loop.create_future()
    for actor in actors:
        await actor.start()
    async with Crew() as crew:
        working = [crew.spawn(client(shared, actors, f"client-{i}")) for i in range(source.randint(2, 4))]
        meanwhile = [crew.spawn(keep_up(shared, actor, stop)) for actor in actors]
        if source.random() < 0.6:
            meanwhile.append(crew.spawn(late_manifests(shared, stop)))
        if shared.moves_back:
            meanwhile.append(crew.spawn(fail_over(shared, start)))
        for _ in range(source.choice((0, 1, 2, 4))):
            await asyncio.sleep(source.uniform(0, 1.5))
            victim = source.choice(actors)
            if victim.up:
                leave_collection(shared, victim)
                victim.crash()
        await asyncio.wait(working, timeout=6.0)
        world.faults.heal()
        world.trace("heal")
        await asyncio.wait(working)
        stop.set_result(None)
        await asyncio.wait(meanwhile)
        for task in (*working, *meanwhile):
            task.result()
    for actor in actors:
        actor.crash()
    rows = await compare(shared, actors[0], start)
    for actor in actors:
        actor.crash()
        world.actors.remove(actor)
    return rows


async def keep_up(shared: Shared, actor: Actor[Domain], stop: asyncio.Future[None]) -> None:
    """Start dead nodes again after a while, as a supervisor."""
    while not stop.done():
        if actor.up and actor.ended:
            actor.crash()
        if not actor.up:
            await asyncio.sleep(shared.world.source.choice((0.0, 0.2, 1.0)))
            if not stop.done():
                await actor.start()
        await asyncio.sleep(0.1)


# clients ----------------------------------------------------------------------------------------


async def client(shared: Shared, actors: list[Actor[Domain]], name: str) -> None:
    source = shared.world.source
    seen: dict[bytes, Found] = {}
    history = shared.histories
    for _ in range(source.randint(4, 12)):
        act = source.choice((read, read, write, write, swap, swap, pair, pair_read, flush))
        while True:
            actor = source.choice(actors)
            if not actor.up:
                await asyncio.sleep(0.1)
                continue
            if shared.histories != history:
                history = shared.histories
                seen.clear()  # the process of this client has ended
            try:
                await act(shared, actor, name, seen)
                break
            except (UnavailableError, FencedError, Down, ClosedError):
                # The call certainly did not happen, or only a read was lost (see `call`).
                await asyncio.sleep(source.uniform(0, 0.3))
        await asyncio.sleep(source.uniform(0, 0.2) if source.random() < 0.4 else 0)


async def call(
    shared: Shared, actor: Actor[Domain], key: bytes, entry: Call, work: Callable[[Domain], Awaitable[Any]]
) -> Any:
    """Enter the call into the history of `key`, and remove it if it certainly did not happen.

    A connection that broke (Down) says nothing about a write, so it stands in the history as never learned.
    """
    entry.start, history = shared.moment(), shared.histories
    shared.calls[key].append(entry)
    shared.world.trace(f"{entry.client} {actor.life} asks {entry.operation}")
    try:
        result = await actor.enter(work)
    except (UnavailableError, FencedError, ClosedError):
        if shared.histories == history:
            shared.calls[key].remove(entry)
        raise
    except (UnknownOutcomeError, Down):
        return None
    except ConflictError as conflict:
        if shared.histories != history:
            return None
        current = cast("dict[bytes, Any]", conflict.current)
        result = ("conflict", found_of(current[key]))
    if shared.histories != history:
        return None
    match result:
        case ("ok", int()):
            learned: Any = "ok"
        case ("conflict", (_, value)):
            learned = ("conflict", value)
        case (_, value):
            learned = value
    entry.end, entry.result, entry.known = shared.moment(), learned, True
    shared.world.trace(f"{entry.client} {actor.life} heard {learned}")
    return result


def found_of(row: Any) -> Found:
    return (row.seqno, row.value) if row is not None else NO_ROW


async def read(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    key = shared.world.source.choice(KEYS)

    async def work(domain: Domain) -> Found:
        await domain.sync()
        return found_of(await domain.get_row(key))

    result = await call(shared, actor, key, Call(name, ("read",), 0), work)
    if result is not None:
        seen[key] = result


async def write(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    """Write without a precondition; sometimes delete."""
    source = shared.world.source
    key = source.choice(KEYS)
    value = b"" if source.random() < 0.2 else shared.value(source.choice((0, 0, 300)))
    await call(shared, actor, key, Call(name, ("put", value), 0), committing([(key, value)]))


async def swap(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    key = shared.world.source.choice(KEYS)
    (seqno, expected), value = seen.get(key, NO_ROW), shared.value()
    result = await call(
        shared, actor, key, Call(name, ("swap", expected, value), 0), committing([(key, value)], {key: seqno})
    )
    if result is not None and result[0] == "conflict":
        seen[key] = result[1]


async def pair(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    value = shared.value(shared.world.source.choice((0, 200)))
    await call(shared, actor, PAIR[0], Call(name, ("put", value), 0), committing([(key, value) for key in PAIR]))


async def pair_read(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    reverse = shared.world.source.random() < 0.5

    async def work(domain: Domain) -> Found:
        await domain.sync()
        rows: dict[bytes, bytes] = {}
        async for keys, values in domain.prefix(b"p/", reverse=reverse):
            rows.update(zip(keys, values, strict=True))
        if len({rows.get(key, b"") for key in PAIR}) != 1:
            raise Violated(f"rows written together were not read together: rows={rows}")
        return (-1, rows.get(PAIR[0], b""))

    await call(shared, actor, PAIR[0], Call(name, ("read",), 0), work)


async def flush(shared: Shared, actor: Actor[Domain], name: str, seen: dict[bytes, Found]) -> None:
    try:
        shared.flushed.append(await actor.enter(lambda domain: domain.flush(2.0)))
    except (UnknownOutcomeError, ConflictError, InvalidError):
        return


def committing(rows: list[tuple[bytes, bytes]], expects: dict[bytes, int] | None = None) -> Any:
    async def work(domain: Domain) -> tuple[str, int]:
        return ("ok", await domain.commit(rows, expects=expects or {}))

    return work


def row_model(state: Any, operation: Any) -> tuple[Any, Any]:
    """State: the row's value, b"" for none. No value is written twice, so values identify seqnos."""
    match operation:
        case ("read",):
            return state, state
        case ("put", bytes(value)):
            return value, "ok"
        case ("swap", bytes(expected), bytes(value)):
            return (value, "ok") if state == expected else (state, ("conflict", state))
    raise AssertionError(f"unknown operation: {operation}")


async def fail_over(shared: Shared, start: dict[bytes, Found]) -> None:
    """Set consensus back to an earlier state, some times."""
    world, moves = shared.world, shared.moves
    for _ in range(moves.choice((1, 1, 2))):
        await asyncio.sleep(moves.uniform(0.05, 1.5))
        standby, since = world.consensus.snapshot(), shared.moment()
        await asyncio.sleep(moves.uniform(0.05, 1.0))
        world.consensus.lose_commits(standby)
        rows = Shadow(world.consensus.placed.get(LOG, []), shared.rule).rows(start)
        shared.moved(rows, since)
        world.trace(f"consensus failed over: head={standby.heads.get(LOG)}")


# other events -----------------------------------------------------------------------------------


async def late_manifests(shared: Shared, stop: asyncio.Future[None]) -> None:
    """Deliver an old proposal of a manifest in the current term: the log must reject it."""
    world, source, rand = shared.world, shared.world.source, shared.world.rand()
    while not stop.done():
        await asyncio.sleep(source.uniform(0.1, 0.8))
        records = world.consensus.placed.get(LOG, [])
        old = [r.data for r in records if r.data[0] == COMMAND and is_manifest(r.data[1:])]
        if not old:
            continue
        data = source.choice(old)
        try:
            head = await world.consensus.log_head(LOG)
            await world.consensus.append(LOG, head.term, head.next, [data], rand.nonce())
        except (
            ConflictError,
            FencedError,
            StoreRolledBackError,
        ):  # the last one: consensus failed over during the call
            continue
        world.trace(f"a late manifest stands at {head.next}")


def is_manifest(data: bytes) -> bool:
    return isinstance(decode_command(data), PersistManifest)


def leave_collection(shared: Shared, victim: Actor[Domain]) -> None:
    """Collect garbage as a fenced leader that never learns of it, from its state when the node died."""
    world, source = shared.world, shared.world.source
    leader = victim.node._leader if victim.ready else None
    if leader is None or leader.has_ended or source.random() < 0.4:
        return
    roots: Roots = leader.database.background.roots()
    prefix = prefix_of(victim.node.domain_uuid)
    collector = GarbageCollector(
        SstFiles(world.objects, prefix), BucketManifests(world.objects, prefix, world.rand()),
        shared.options, world.clock,
    )  # fmt: skip
    pauses_s = [source.uniform(0, 0.3) for _ in range(source.choice((1, 12, 25)))]

    async def collect() -> None:
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            done = await collector.collect(lambda: roots)
            world.trace(f"a left-over collection of epoch {roots.epoch}: {done}")

    world.background(collect())


async def lose_consensus(shared: Shared, rows: dict[bytes, Found]) -> dict[bytes, Found]:
    """Lose consensus and reset the domain to the newest manifest in the bucket. Return its rows, by the old log."""
    world = shared.world
    before = Shadow(world.consensus.placed[LOG], shared.rule)
    uuid = before.state.domain_uuid
    await asyncio.sleep(LATE_PUTS_S)
    world.consensus = Engine(world.clock)
    world.trace("consensus is lost")
    bucket = BucketManifests(world.objects, prefix_of(uuid), world.rand())
    name = await bucket.newest(ANY_EPOCH)
    shared.refuses = 0
    if name is None:
        return {}
    newest = await bucket.load(name.key)
    if shared.moves_back and (newest.epoch, newest.last_seqno) not in before.persisted:
        # Nothing was persisted after commits were lost: the newest manifest belongs to the lost history.
        return {}
    domain = await Domain.open(
        DomainContext(
            world.consensus,
            world.objects,
            NAME,
            holder="restorer",
            clock=world.clock,
            rand=world.rand(),
            settings=DomainSettings(lease_ttl_ms=1_000, options=shared.options),
        )
    )
    try:
        await domain.reset(uuid, newest)
        kept = before.rows({}, newest.last_seqno)
        await same_rows(domain, kept, f"after a restore at seqno {newest.last_seqno}")
    finally:
        await domain.aclose()
    return kept


# the oracle -------------------------------------------------------------------------------------


async def compare(shared: Shared, actor: Actor[Domain], start: dict[bytes, Found]) -> dict[bytes, Found]:
    world = shared.world
    for key, calls in shared.calls.items():
        if not linearizable(calls, shared.initial[key][1], row_model):
            shown = "; ".join(f"{c.client} {c.operation} [{c.start}, {c.end}] → {c.result}" for c in calls)
            raise Violated(f"not linearizable: key={key!r} initial={shared.initial[key]} history={shown}")
    await actor.start()

    await insist(actor, lead)
    while True:
        # A request without a waiting client may still be executed: compare when none was executed in between.
        shadow = Shadow(world.consensus.placed[LOG], shared.rule)
        rows = shadow.rows(start)
        try:
            await insist(actor, partial(same_rows, wanted=rows, when="after the last leader died"))
            break
        except Violated:
            if Shadow(world.consensus.placed[LOG], shared.rule).rows(start) == rows:
                raise
    persisted = max((seqno for _, seqno in shadow.persisted), default=0)
    if shared.flushed and max(shared.flushed) > persisted:
        raise Violated(f"a flush was acknowledged that no manifest holds: told={max(shared.flushed)} {persisted=}")
    await insist(actor, lambda domain: domain.flush(30.0))
    # Merges and collections continue while the node lives, so check the last state after its end.
    actor.crash()
    manifest = Shadow(world.consensus.placed[LOG], shared.rule).state.manifest
    if manifest is not None:
        files = SstFiles(world.objects, prefix_of(shadow.state.domain_uuid))
        for level in decode_manifest(manifest.data).levels:
            for file in level:
                if await world.objects.head(files.key(file)) is None:
                    raise Violated(f"a file of the replicated manifest was deleted: {files.key(file)}")
    return rows


async def lead(domain: Domain) -> None:
    await domain.wait_until_leading(60.0)
    await domain.sync()


async def insist(actor: Actor[Domain], work: Callable[[Domain], Awaitable[Any]]) -> None:
    """Repeat the work until it is done: a rejected manifest ends a term, and the process leads again soon after."""
    while True:
        try:
            await actor.enter(work)
            return
        except (FencedError, UnavailableError, UnknownOutcomeError, ClosedError, ConflictError):
            await asyncio.sleep(0.1)


async def same_rows(domain: Domain, wanted: dict[bytes, Found], when: str) -> None:
    found: dict[bytes, Found] = {}
    async for keys, _ in domain.scan():
        for key in keys:
            found[key] = found_of(await domain.get_row(key))
    mine = {key: row for key, row in wanted.items() if row != NO_ROW}
    if found != mine:
        extra = {k: v for k, v in found.items() if mine.get(k) != v}
        lost = {k: v for k, v in mine.items() if found.get(k) != v}
        raise Violated(f"rows differ {when}: lost={lost} instead={extra}")
