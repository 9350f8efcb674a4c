"""Nodes and tools that create, delete and replace rows of one catalogue concurrently, and die while they do.

Faults: every store fault; every process dies at any step, leaders too; leases are short, so that two processes may
believe to lead at the same time; answers are lost, and a request may be executed when no client waits for it any more.
Oracle: the history of each name is linearizable, including outcomes that were never learned: a creation counts once
however often it was tried, and a deleted row never comes back. In the end every process reads the same rows, and the
rows of topics by name and by id are the same.
Replay: ./dev sim --room catalogue --seed K --trace
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, cast

from sim.oracles.linearizable import Call, linearizable
from sim.scenarios.callers import Guessing, drawn_settings, opening, recorded, soon, through_any, under_crashes
from sim.world import Actor, Violated, World
from tidemill.base.clock import Rand
from tidemill.base.errors import ConflictError, MissingError
from tidemill.metastore.catalogue import Catalogue, PipelineRow, TopicRow
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import TOPIC_IDS, TOPICS

NAMES = ("a", "b")
PIPELINE = "p"


class Process(NamedTuple):
    metastore: Metastore
    catalogue: Catalogue


class Shared:
    """Shared state. `calls` is the history of every name; a topic's state is the token of its creator, or ""."""

    def __init__(self, world: World, fault: str) -> None:
        source = world.source
        self.world = world
        self.fault = fault
        self.domains = source.choice((1, 1, 3))
        self.calls: dict[str, list[Call]] = {name: [] for name in (*NAMES, PIPELINE)}
        self.numbers = 0
        self.moments = 0
        self.settings = drawn_settings(source)

    def token(self) -> str:
        self.numbers += 1
        return f"t{self.numbers}"

    def moment(self) -> int:
        self.moments += 1
        return self.moments

    def build(self, lead: bool) -> Callable[[Actor[Process]], Awaitable[Process]]:
        def process(metastore: Metastore, actor: Actor[Process], rand: Rand) -> Process:
            used: Any = Guessing(metastore) if self.fault == "guessed-outcome" else metastore
            return Process(metastore, Catalogue(used, actor.clock, rand))

        return opening(self.world, self.settings, lead=lead, domains=self.domains, process=process)


async def run(world: World, fault: str = "") -> None:
    shared, source = Shared(world, fault), world.source
    actors = [Actor(world, f"node-{i}", shared.build(lead=True)) for i in range(source.randint(0, 2))]
    actors += [Actor(world, f"tool-{i}", shared.build(lead=False)) for i in range(source.randint(1, 2))]
    await under_crashes(world, actors, partial(client, shared, actors))
    await compare(shared, actors)
    for name, calls in shared.calls.items():
        if not linearizable(calls, "", model):
            raise Violated(f"no order of the calls explains their results: name={name} calls={calls}")


async def client(shared: Shared, actors: list[Actor[Process]], name: str) -> None:
    source = shared.world.source
    for _ in range(source.randint(3, 9)):
        act = source.choice((create, create, delete, delete, get, get, put, drop, read))
        await through_any(shared.world, actors, partial(act, shared, client_name=name))


async def call(
    shared: Shared, actor: Actor[Process], name: str, entry: Call, work: Callable[[Catalogue], Awaitable[Any]]
) -> None:
    """Enter the call into the history of `name`."""
    calls, about = shared.calls[name], f" of {name}"
    await recorded(
        shared.world, calls, entry, actor, lambda process: work(process.catalogue), moment=shared.moment, about=about
    )


async def create(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    token = shared.token()
    name = shared.world.source.choice(NAMES)

    async def work(catalogue: Catalogue) -> tuple[str, str]:
        try:
            row = await catalogue.create_topic(name, 1, config={"token": token})
        except ConflictError as conflict:
            taken = cast("TopicRow", conflict.current)
            return ("taken", taken.config["token"])
        return ("made", row.config["token"])

    await call(shared, actor, name, Call(client_name, ("create", token), 0), work)


async def delete(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    name = shared.world.source.choice(NAMES)
    await call(shared, actor, name, Call(client_name, ("delete",), 0), deleting(TopicRow, name))


async def drop(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    await call(shared, actor, PIPELINE, Call(client_name, ("delete",), 0), deleting(PipelineRow, PIPELINE))


def deleting(kind: Any, name: str) -> Callable[[Catalogue], Awaitable[str]]:
    async def work(catalogue: Catalogue) -> str:
        try:
            await catalogue.delete(kind, name)
        except MissingError:
            return "missing"
        return "deleted"

    return work


async def put(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    token = shared.token()

    async def work(catalogue: Catalogue) -> str:
        await catalogue.put(PipelineRow(PIPELINE, dead_letters=token))
        return "put"

    await call(shared, actor, PIPELINE, Call(client_name, ("put", token), 0), work)


async def get(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    name = shared.world.source.choice(NAMES)

    async def work(catalogue: Catalogue) -> str:
        row = await catalogue.get(TopicRow, name)
        return row.config["token"] if row is not None else ""

    await call(shared, actor, name, Call(client_name, ("read",), 0), work)


async def read(shared: Shared, actor: Actor[Process], client_name: str) -> None:
    async def work(catalogue: Catalogue) -> str:
        rows = await catalogue.list(PipelineRow)
        return rows[0].dead_letters if rows else ""

    await call(shared, actor, PIPELINE, Call(client_name, ("read",), 0), work)


def model(state: Any, operation: Any) -> tuple[Any, Any]:
    match operation:
        case ("read",):
            return state, state
        case ("create", str(token)):
            return (state, ("taken", state)) if state else (token, ("made", token))
        case ("put", str(token)):
            return token, "put"
        case ("delete",):
            return "", ("deleted" if state else "missing")
    raise AssertionError(f"unknown operation: {operation}")


async def compare(shared: Shared, actors: list[Actor[Process]]) -> None:
    """Check after healing: one more write through every process, and all processes read the same rows."""
    seen: list[Any] = []
    for actor in actors:
        await soon(partial(put, shared, actor, f"last-{actor.name}"))
    for actor in actors:
        seen.append(await soon(partial(actor.enter, everything)))
    if any(rows != seen[0] for rows in seen):
        raise Violated(f"processes read different rows: {seen}")
    by_name, by_id, pipelines = seen[0]
    if {(row.topic_id, row.name) for row in by_name} != {(row.topic_id, row.name) for row in by_id}:
        raise Violated(f"topics by name and by id differ: by_name={by_name} by_id={by_id}")
    tokens = {row.name: row.config["token"] for row in by_name} | {row.name: row.dead_letters for row in pipelines}
    for name, calls in shared.calls.items():
        now = shared.moment()
        calls.append(Call("end", ("read",), now, shared.moment(), tokens.get(name, ""), True))


async def everything(process: Process) -> tuple[list[Any], list[Any], list[Any]]:
    metastore = process.metastore
    topics, ids = await metastore.rows(TOPICS), await metastore.rows(TOPIC_IDS)
    return topics, ids, await process.catalogue.list(PipelineRow)
