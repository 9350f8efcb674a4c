"""Nodes and tools that register, delete and look up schemas of one registry concurrently, and die while they do.

Faults: every store fault; every process dies at any step, leaders too; leases are short, so that two processes may
believe to lead at the same time; answers are lost, and a request may be executed when no client waits for it any more.
Oracle: the history of the whole registry is linearizable, including outcomes that were never learned: equal schemas
have one id, no id is assigned twice, a registration creates one version and a deletion counts once. In the end the deep
check of the registry's rows finds nothing, and every process reads the same.
Replay: ./dev sim --room registry --seed K --trace
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import structs

from sim.oracles.linearizable import Call, linearizable
from sim.scenarios.callers import Guessing, drawn_settings, opening, recorded, soon, through_any, under_crashes
from sim.world import Actor, Violated, World
from tidemill.base.clock import Rand
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import DIGESTS, REGISTRY_HEADS, SCHEMAS, USES, VERSIONS
from tidemill.registry.errors import RegistryError
from tidemill.registry.registry import Registry
from tidemill.registry.schema import SubmittedSchema
from tidemill.shards.api import run_inline

SUBJECTS = ("s", "t")
TEXTS = ('{"type":"string","doc":"1"}', '{"type":"string","doc":"2"}', '{"type":"bytes"}')
"""Schemas that can read each other."""


class Process(NamedTuple):
    metastore: Metastore
    registry: Registry


class Blind(Guessing):
    """Planted fault blind-head: the head is overwritten even if another process changed it."""

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int]) -> int:
        return await self._metastore.commit(rows)


FAULTS: dict[str, type[Guessing]] = {"guessed-change": Guessing, "blind-head": Blind}


class State(NamedTuple):
    """State of the model. `ids`: (text, id) of the used schemas; `versions`: (subject, version, text, deleted)."""

    next_id: int = 1
    ids: tuple[tuple[str, int], ...] = ()
    versions: tuple[tuple[str, int, str, bool], ...] = ()


class Shared:
    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.fault = fault
        self.calls: list[Call] = []
        self.moments = 0
        self.settings = drawn_settings(source)

    def moment(self) -> int:
        self.moments += 1
        return self.moments

    def build(self, lead: bool) -> Callable[[Actor[Process]], Awaitable[Process]]:
        def process(metastore: Metastore, actor: Actor[Process], rand: Rand) -> Process:
            used: Any = FAULTS[self.fault](metastore) if self.fault else metastore
            return Process(metastore, Registry(used, actor.clock, rand, run_inline))

        return opening(self.world, self.settings, lead=lead, domains=1, process=process)


async def run(world: World, fault: str = "") -> None:
    shared, source = Shared(world, fault), world.source
    if fault == "guessed-change":
        world.faults.rates = structs.replace(
            world.faults.rates, lost_answer=0.3
        )  # without it there is nothing to guess
    actors = [Actor(world, f"node-{i}", shared.build(lead=True)) for i in range(source.randint(1, 2))]
    actors += [Actor(world, f"tool-{i}", shared.build(lead=False)) for i in range(source.randint(0, 2))]
    await under_crashes(world, actors, partial(client, shared, actors))
    await compare(shared, actors)
    if not linearizable(shared.calls, State(), model):
        raise Violated(f"no order of the calls explains their results: calls={shared.calls}")


async def client(shared: Shared, actors: list[Actor[Process]], name: str) -> None:
    for _ in range(shared.world.source.randint(2, 7)):
        operation = chosen(shared)
        await through_any(shared.world, actors, partial(call, shared, client_name=name, operation=operation))


def chosen(shared: Shared) -> tuple[Any, ...]:
    source = shared.world.source
    subject = source.choice(SUBJECTS)
    match source.choice(("register", "register", "register", "delete", "purge", "read")):
        case "register":
            return ("register", subject, source.choice(TEXTS))
        case "read":
            return ("read", subject)
        case kind:
            return (kind, subject)


async def call(shared: Shared, actor: Actor[Process], client_name: str, operation: tuple[Any, ...]) -> None:
    await recorded(
        shared.world,
        shared.calls,
        Call(client_name, operation, 0),
        actor,
        lambda process: performed(process.registry, operation),
        moment=shared.moment,
    )


async def performed(registry: Registry, operation: tuple[Any, ...]) -> Any:
    try:
        match operation:
            case ("register", subject, text):
                row = (await registry.register(subject, SubmittedSchema("AVRO", text))).version
                return (row.id, row.version)
            case ("delete" | "purge" as kind, subject):
                return tuple(await registry.delete(subject, None, permanent=kind == "purge"))
            case ("read", subject):
                rows = await registry.book.versions(subject, fresh=True)
                return tuple((row.version, row.id, row.deleted) for row in rows)
    except RegistryError as refused:
        return refused.code
    raise AssertionError(f"unknown operation: {operation}")


def model(state: Any, operation: Any) -> tuple[Any, Any]:
    ids = dict(state.ids)
    match operation:
        case ("read", subject):
            return state, tuple((v, ids[text], gone) for s, v, text, gone in state.versions if s == subject)
        case ("register", subject, text):
            return _registered(state, subject, text)
        case ("delete", subject):
            mine = [row for row in state.versions if row[0] == subject]
            alive = tuple(version for _, version, _, gone in mine if not gone)
            if not alive:
                return state, 40404 if mine else 40401
            after = tuple((s, v, text, gone or s == subject) for s, v, text, gone in state.versions)
            return state._replace(versions=after), alive
        case ("purge", subject):
            mine = [row for row in state.versions if row[0] == subject]
            if not mine:
                return state, 40401
            if any(not gone for _, _, _, gone in mine):
                return state, 40405
            left = tuple(row for row in state.versions if row[0] != subject)
            used = {text for _, _, text, _ in left}
            kept = tuple((text, one) for text, one in state.ids if text in used)
            return State(state.next_id, kept, left), tuple(version for _, version, _, _ in mine)
    raise AssertionError(f"unknown operation: {operation}")


def _registered(state: State, subject: str, text: str) -> tuple[State, Any]:
    ids = dict(state.ids)
    mine = [(version, one, gone) for s, version, one, gone in state.versions if s == subject]
    there = [version for version, one, gone in mine if one == text and not gone]
    if there:
        return state, (ids[text], there[-1])
    schema_id = ids.get(text, state.next_id)
    version = max((version for version, _, _ in mine), default=0) + 1
    after = State(
        max(state.next_id, schema_id + 1),
        tuple(sorted({**ids, text: schema_id}.items())),
        tuple(sorted((*state.versions, (subject, version, text, False)))),
    )
    return after, (schema_id, version)


async def compare(shared: Shared, actors: list[Actor[Process]]) -> None:
    """Check after healing: register through every process, compare their reads, and check that the rows agree."""
    for actor in actors:
        operation = ("register", "s", TEXTS[0])
        await soon(partial(call, shared, actor, f"last-{actor.name}", operation))
    seen = [await soon(partial(actor.enter, everything)) for actor in actors]
    if any(rows != seen[0] for rows in seen):
        raise Violated(f"processes read different rows: {seen}")
    schemas, versions, uses, digests, heads = seen[0]
    ids = {row.id for row in schemas}
    if {row.id for row in versions} != ids or {row.digest: row.id for row in schemas} != {
        r.digest: r.id for r in digests
    }:
        raise Violated(f"schemas, versions and digests do not agree: {seen[0]}")
    if {(row.id, row.subject, row.version) for row in versions} != {(u.id, u.subject, u.version) for u in uses}:
        raise Violated(f"versions and uses do not agree: {seen[0]}")
    [head] = heads
    counted = (len(schemas), len({row.subject for row in versions}), len(versions))
    if (head.schemas, head.subjects, head.versions) != counted or head.next_id <= max(ids):
        raise Violated(f"the head has wrong counts: head={head} counted={counted}")


async def everything(process: Process) -> tuple[list[Any], ...]:
    families: tuple[Any, ...] = (SCHEMAS, VERSIONS, USES, DIGESTS, REGISTRY_HEADS)
    return tuple([await process.metastore.rows(family) for family in families])
