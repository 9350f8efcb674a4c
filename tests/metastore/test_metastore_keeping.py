"""The leader of domain 0 maintains checkpoint, cluster manifest and signs of life; a replaced cluster stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from support.metastore.checkpoint_world import World, damage, keys, manifest_of, persisted
from support.waiting import until
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import ClusterReplacedError, InvalidError, MissingError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.checkpoint.stages import build_checkpointer
from tidemill.maintenance.checkpoint_service import CheckpointService, check_bucket
from tidemill.maintenance.restore.restore import Restorer
from tidemill.metastore.cluster_manifest import (
    ALIVE_PREFIX,
    CLUSTER_PREFIX,
    ClusterManifest,
    Presence,
    SignOfLife,
    newest_manifest,
    signs_of_life,
    upload_manifest,
    write_sign_of_life,
)
from tidemill.metastore.metastore import Metastore
from tidemill.objects.memory import MemoryObjects
from tidemill.objects.store import ObjectMeta


def keeping(world: World, metastore: Metastore | None = None, node: str = "n1") -> CheckpointService:
    metastore = metastore or world.metastore
    return CheckpointService(
        metastore,
        Presence(world.objects, world.clock, world.rand, node, interval_s=0.05),
        build_checkpointer(
            world.consensus, world.objects, metastore, world.clock, holder=node, interval_s=0.05, tracker=world.tracker
        ),
        alive_interval_s=0.05,
    )


@pytest.mark.parametrize("domains", [1, 3])
async def test_the_cluster_manifest_and_signs_of_life_are_kept_and_old_ones_removed(domains: int) -> None:
    async with World(domains, real=True) as world:
        checkpointer = keeping(world)
        running = asyncio.ensure_future(checkpointer.run())

        async def shown() -> bool:
            return bool(await keys(world, ALIVE_PREFIX))

        await until(shown)
        found = await newest_manifest(world.objects)
        assert found is not None and found.manifest == await manifest_of(world)
        assert len(found.manifest.domains) == domains
        [first] = await keys(world, ALIVE_PREFIX)

        async def renewed() -> bool:
            return await keys(world, ALIVE_PREFIX) not in ([first], [])

        await until(renewed)
        await until(lambda: _count(world, ALIVE_PREFIX, 1))
        assert len(await keys(world, CLUSTER_PREFIX)) == 1, "an unchanged manifest is not written again"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await checkpointer.withdraw_presence()
        assert await keys(world, ALIVE_PREFIX) == []


@pytest.mark.parametrize(("answers", "kept"), [(1, True), (2, False)])
async def test_a_newer_cluster_keeps_its_sign_of_life_when_one_answer_has_flipped_bits(
    answers: int, kept: bool
) -> None:
    """An older cluster removes it only if the object itself is damaged."""
    async with World(real=True) as world:
        newer = SignOfLife("a", 2, "n1", 1_000, 1.0)
        await write_sign_of_life(world.objects, world.rand, newer)
        [name] = await keys(world, ALIVE_PREFIX)
        real, left = world.objects.get, [answers]

        async def get(key: str) -> bytes:
            data = bytes(await real(key))
            if key == name and left[0]:
                left[0] -= 1
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

        world.objects.get = get  # type: ignore[method-assign]
        await write_sign_of_life(world.objects, world.rand, SignOfLife("a", 1, "n2", 2_000, 1.0))
        assert (name in await keys(world, ALIVE_PREFIX)) == kept


async def _count(world: World, prefix: str, count: int) -> bool:
    return len(await keys(world, prefix)) == count


async def test_a_cluster_whose_manifest_is_damaged_is_not_taken_for_dead() -> None:
    """Otherwise a restore from an older manifest would be permitted while this cluster is alive."""
    async with World(real=True) as world:
        await persisted(world, 1)
        [key] = await keys(world, CLUSTER_PREFIX)
        await damage(world, key)
        running = asyncio.ensure_future(keeping(world).run())
        await until(lambda: _count(world, ALIVE_PREFIX, 1))
        assert not running.done()
        assert await keys(world, CLUSTER_PREFIX) == [key], "it may be of whoever replaced this cluster"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_manifest_that_goes_while_it_is_read_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(real=True) as world:
        await persisted(world, 1)
        get, gone = world.objects.get, 2

        async def get_or_gone(key: str, *args: int) -> bytes:
            nonlocal gone
            if key.startswith(CLUSTER_PREFIX) and gone:
                gone -= 1
                raise MissingError(f"No such object: key={key}.")
            return bytes(await get(key, *args))

        monkeypatch.setattr(world.objects, "get", get_or_gone)
        running = asyncio.ensure_future(keeping(world).run())
        await until(lambda: _count(world, ALIVE_PREFIX, 1))
        assert not gone and not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_listing_that_repeats_its_entries_removes_no_manifest_that_counts() -> None:
    class Repeating(MemoryObjects):
        async def list(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectMeta]:
            page = [meta async for meta in super().list(prefix, start_after)]
            for meta in page * 2:
                yield meta

    objects, rand = Repeating(SystemClock()), Rand(1)
    for number in range(1, 6):
        await upload_manifest(objects, rand, ClusterManifest("u", "", 1, ("d",), number), number)
        found = await newest_manifest(objects)
        assert found is not None and found.number == number
    assert len({meta.key async for meta in objects.list(CLUSTER_PREFIX)}) == 3


async def test_only_the_leader_of_domain_0_keeps_and_another_takes_over() -> None:
    async with World(real=True) as world:
        first, second = world.metastore, world.open()
        await (await first.domains())[0].wait_until_leading(10)  # type: ignore[attr-defined]
        await second.start()
        runs = [
            asyncio.ensure_future(keeping(world, first, "n1").run()),
            asyncio.ensure_future(keeping(world, second, "n2").run()),
        ]

        async def seen(node: str) -> bool:
            return any([sign.node == node async for sign, _ in signs_of_life(world.objects)])

        await until(lambda: seen("n1"))
        assert not await seen("n2")
        runs[0].cancel()
        await asyncio.gather(runs[0], return_exceptions=True)
        await first.aclose()
        await until(lambda: seen("n2"))
        runs[1].cancel()
        await asyncio.gather(runs[1], return_exceptions=True)
        await second.aclose()


async def test_a_cluster_that_was_replaced_stops_by_itself() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        running = asyncio.ensure_future(keeping(world).run())
        await asyncio.sleep(0.02)
        await until(lambda: _count(world, ALIVE_PREFIX, 1))
        # The old cluster has lost consensus but not the bucket. Its sign of life expires, and a restore begins.
        restorer = Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand)
        restored = False
        while not restored:
            for key in await keys(world, ALIVE_PREFIX):
                await world.objects.delete(key)
            with contextlib.suppress(InvalidError):
                await restorer.run()
                restored = True
        with pytest.raises(ClusterReplacedError, match="has been replaced"):
            await running


async def test_no_process_starts_on_a_bucket_of_another_cluster() -> None:
    async with World(real=True) as world:
        await check_bucket(MemoryConsensus(world.clock), world.objects)
        await persisted(world, 2)
        await check_bucket(world.consensus, world.objects)
        fresh = MemoryConsensus(world.clock)
        with pytest.raises(InvalidError, match=r"consensus has no cluster, but the bucket has one.*tidemill restore"):
            await check_bucket(fresh, world.objects)
        assert await fresh.scan("") == []
        await Restorer(fresh, world.objects, world.clock, world.rand).run()
        await check_bucket(fresh, world.objects)
        with pytest.raises(ClusterReplacedError, match="has been replaced"):
            await check_bucket(world.consensus, world.objects)
