"""Processes around one metastore that die while clients call them, and the history of those calls. The scenarios
`catalogue` and `registry` share this. The order in which random choices are drawn defines the history of a seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

from sim.oracles.linearizable import Call
from sim.world import Actor, Crew, Down, World
from tidemill.base.clock import Rand
from tidemill.base.errors import ClosedError, ConflictError, UnavailableError, UnknownOutcomeError
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.factory import create_metastore
from tidemill.metastore.metastore import Metastore

LAST_TRIES = 8

Process = TypeVar("Process")
Answer = TypeVar("Answer")


class Guessing:
    """Planted fault: a commit with unknown outcome is treated as one that did not happen."""

    def __init__(self, metastore: Metastore) -> None:
        self._metastore = metastore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metastore, name)

    async def commit(self, rows: Sequence[tuple[bytes, bytes]], *, expects: Mapping[bytes, int]) -> int:
        try:
            return await self._metastore.commit(rows, expects=expects)
        except UnknownOutcomeError as error:
            raise ConflictError("guessed.", current=dict(expects)) from error


def drawn_settings(source: Random) -> DomainSettings:
    return DomainSettings(
        lease_ttl_ms=source.choice((300, 1_000)),
        persist_interval_s=source.choice((0.5, 5.0)),
        flush_timeout_s=5.0,
        request_timeout_s=source.choice((1.0, 5.0)),
        linger_s=0.5,
        rollup_after_records=source.choice((4, 64)),
    )


def opening(
    world: World,
    settings: DomainSettings,
    *,
    lead: bool,
    domains: int,
    process: Callable[[Metastore, Actor[Process], Rand], Process],
) -> Callable[[Actor[Process]], Awaitable[Process]]:
    """Return the builder of a process that leads domains, or with `lead` False only calls leaders."""
    reported = {name: getattr(settings, name) for name in settings.__struct_fields__} | {"lead": lead}

    async def build(actor: Actor[Process]) -> Process:
        rand = world.rand()
        metastore = create_metastore(
            actor.consensus(), actor.objects(), actor.clock, rand, domains=domains,
            settings=DomainSettings(**reported), holder=f"{actor.name}/{actor.life.number}",
        )  # fmt: skip
        await metastore.start()
        return process(metastore, actor, rand)

    return build


async def under_crashes(
    world: World, actors: Sequence[Actor[Process]], client: Callable[[str], Coroutine[Any, Any, None]]
) -> None:
    """Run clients while processes die; then heal everything."""
    source = world.source
    for actor in actors:
        await actor.start()
    async with Crew() as crew:
        working = [crew.spawn(client(f"client-{i}")) for i in range(source.randint(2, 4))]
        for _ in range(source.choice((0, 1, 2, 4))):
            await asyncio.sleep(source.uniform(0, 2.0))
            victim = source.choice(actors)
            if victim.up:
                victim.crash()
                await asyncio.sleep(source.choice((0.0, 0.3, 2.0)))
                await victim.start()
        await asyncio.wait(working, timeout=5.0)
        await world.heal()


async def through_any(
    world: World, actors: Sequence[Actor[Process]], act: Callable[[Actor[Process]], Awaitable[None]]
) -> None:
    """Make one call, repeated until it may have happened."""
    source = world.source
    while True:
        up = [actor for actor in actors if actor.up]
        if up:
            try:
                await act(source.choice(up))
                break
            except (UnavailableError, ClosedError):
                pass  # it certainly did not happen, or only a read was lost (see `recorded`)
        await asyncio.sleep(source.uniform(0, 0.3))
    await asyncio.sleep(source.uniform(0, 0.3) if source.random() < 0.5 else 0)


async def recorded(
    world: World,
    calls: list[Call],
    entry: Call,
    actor: Actor[Process],
    work: Callable[[Process], Awaitable[Answer]],
    *,
    moment: Callable[[], int],
    about: str = "",
) -> None:
    """Enter the call into a history, and remove it if it certainly did not happen."""
    entry.start = moment()
    calls.append(entry)
    world.trace(f"{entry.client} {actor.life} asks {entry.operation}{about}")
    try:
        result = await actor.enter(work)
    except (UnavailableError, ClosedError) as error:
        world.trace(f"{entry.client} did not: {type(error).__name__}")
        calls.remove(entry)
        raise
    except (UnknownOutcomeError, Down) as error:
        world.trace(f"{entry.client} does not know: {type(error).__name__}")
        return
    entry.end, entry.result, entry.known = moment(), result, True
    world.trace(f"{entry.client} {actor.life} heard {result}")


async def soon(work: Callable[[], Awaitable[Answer]]) -> Answer:
    """Do the work, with retries: calls from before the healing may delay it for a while, but not indefinitely."""
    for _ in range(LAST_TRIES - 1):
        try:
            return await work()
        except UnavailableError:
            await asyncio.sleep(0.5)
    return await work()
