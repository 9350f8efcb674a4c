"""A dropped shard: no reads or writes succeed, its name is free, and its log is one small record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from support.shards.world import SCHEMA, FlakyConsensus, World, append, contents_of
from tidemill.base.errors import MissingError
from tidemill.consensus.api import Versioned
from tidemill.maintenance.shards.drop import drop_shard
from tidemill.shards.registry import list_created_shards, read_shards, tombstones_name


class NoPipelines:
    async def rows(self, family: Any) -> list[Any]:
        return []


async def dropped(world: World, name: str = "t", shard_id: str = "") -> str:
    consensus = world.consensus()
    metastore: Any = NoPipelines()
    done = await drop_shard(consensus, world.objects, metastore, world.wall, world.rand, name, shard_id=shard_id)
    return done.shard_id


async def test_m4405_every_handle_of_a_dropped_shard_is_refused_and_the_name_gets_a_new_shard() -> None:
    world = World()
    writer, reader = await world.open(), await world.open()
    await append(writer, 0, 10, [(1, "a", 5, 1)])
    await reader.set_hold("someone", 3, 60_000)
    listener = reader.listen(0)
    assert (await anext(listener)).upper == 10
    old = await dropped(world)
    log = await world.consensus().log_head(f"shard/{old}")
    for refused in (
        lambda: append(writer, 10, 20, [(1, "b", 15, 1)]),
        lambda: reader.snapshot(9),
        lambda: reader.frontiers(),
        lambda: reader.set_hold("another", 5, 60_000),
        lambda: anext(listener),
    ):
        with pytest.raises(MissingError):
            await refused()
    assert await world.consensus().log_head(f"shard/{old}") == log, "what is refused writes nothing"
    assert await list_created_shards(world.consensus()) == [] == await read_shards(world.consensus())
    with pytest.raises(MissingError):
        await world.open(schema=None)
    again = await world.open()
    assert again.shard_id != old
    assert await again.frontiers() == (0, 0)
    await append(again, 0, 5, [(2, "b", 1, 1)])
    assert contents_of(await again.snapshot(4)) == {(2, "b"): 1}
    with pytest.raises(MissingError):  # DS2
        await dropped(world, shard_id=old)
    assert (await again.frontiers())[1] == 5


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_drop_that_was_cut_off_is_run_again(steps: int) -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 10, [(n, "a", 5, 1) for n in range(100)])
    await shard.drop()
    if steps > 1:
        await shard.rollup()
    assert await dropped(world, shard_id=shard.shard_id) == shard.shard_id
    with pytest.raises(MissingError):
        await dropped(world)
    head = await world.consensus().log_head(f"shard/{shard.shard_id}")
    kept = (await world.consensus().read(f"shard/{shard.shard_id}", head.start)).records
    assert sum(len(record.data) for record in kept) < 400, "a dropped shard leaves next to nothing"


class Overtaken(FlakyConsensus):
    """`peer` runs between two requests of a process: before it lists the shards, or after it read a register."""

    peer: Callable[[], Awaitable[object]] | None = None
    peer_after_head: Callable[[], Awaitable[object]] | None = None

    async def head(self, key: str) -> Versioned | None:
        found = await super().head(key)
        if self.peer_after_head is not None:
            peer, self.peer_after_head = self.peer_after_head, None
            await peer()
        return found

    async def scan(self, prefix: str) -> list[tuple[str, Versioned]]:
        peer, self.peer = self.peer, None
        if peer is not None:
            await peer()
        return await super().scan(prefix)


async def test_a_shard_that_is_dropped_while_it_is_opened_is_created_or_missing_but_not_open() -> None:
    world = World()
    consensus = Overtaken(world.durable)
    for schema in (SCHEMA, None):
        old = await world.open()
        consensus.peer_after_head = partial(dropped, world)
        if schema is None:
            with pytest.raises(MissingError):
                await world.open(schema=None, consensus=consensus)
            continue
        new = await world.open(consensus=consensus)
        assert new.shard_id != old.shard_id
        await append(new, 0, 5, [(1, "a", 1, 1)])
        assert (await world.open(schema=None)).shard_id == new.shard_id


async def test_the_name_of_a_shard_whose_drop_was_cut_off_is_free_for_a_process_that_creates_it() -> None:
    world = World()
    old = await world.open()
    await old.drop()
    with pytest.raises(MissingError):
        await world.open(schema=None)
    new = await world.open()
    assert new.shard_id != old.shard_id
    await append(new, 0, 5, [(1, "a", 1, 1)])
    with pytest.raises(MissingError):
        await dropped(world, shard_id=old.shard_id)


async def test_a_drop_leaves_the_tombstones_of_a_table_that_is_created_again_in_the_meantime() -> None:
    world = World()
    consensus = Overtaken(world.durable)
    old = await world.open()
    await world.open(tombstones_name("t", old.shard_id))

    async def create_again() -> None:
        new = await world.open()
        await world.open(tombstones_name("t", new.shard_id))

    consensus.peer = create_again
    metastore: Any = NoPipelines()
    await drop_shard(consensus, world.objects, metastore, world.wall, world.rand, "t")
    assert consensus.peer is None
    names = [created.name for created in await list_created_shards(world.consensus())]
    assert names == ["t", tombstones_name("t", (await world.open()).shard_id)]


async def test_a_drop_is_settled_though_every_answer_is_lost() -> None:
    world = World()
    shard = await world.open()
    await append(shard, 0, 10, [(1, "a", 5, 1)])
    consensus = world.consensus()
    consensus.script = [(True, False)]
    metastore: Any = NoPipelines()
    await drop_shard(consensus, world.objects, metastore, world.wall, world.rand, "t")
    assert (await world.open(schema=SCHEMA)).shard_id != shard.shard_id
