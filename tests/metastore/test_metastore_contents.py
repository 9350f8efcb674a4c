"""`doctor --deep --contents`: each damaged object is a finding with its key, and an intact object is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from support.metastore.checkpoint_world import World, command, directory, keys
from support.metastore.l1 import moved
from tidemill.base.clock import Rand, SystemClock
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.check.deep_check import deep_check
from tidemill.objects.factory import open_objects
from tidemill.objects.store import ObjectStore
from tidemill.shards import handle

__all__ = ["directory"]


@pytest.fixture(autouse=True)
def every_part_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "INLINE_PART_BYTES", 0)


async def flip(objects: ObjectStore, key: str, at: int) -> None:
    data = bytearray(bytes(await objects.get(key)))
    data[at if at >= 0 else len(data) + at] ^= 8
    await objects.delete(key)
    await objects.put(key, bytes(data))


async def checked(world: World, *, consensus: Any = None) -> Any:
    known = consensus or world.consensus
    return (await deep_check(known, world.objects, world.clock, world.rand, contents=True)).findings


async def test_f529_each_damaged_object_is_named_and_what_is_whole_is_not() -> None:
    async with World(real=True) as world:
        await moved(world)
        found = await checked(world)
        assert [str(each) for each in found.broken] == []
        stored = {p: [k for k in await keys(world, p) if "/staged/" not in k] for p in ("l0/", "l1/", "shards/")}
        assert all(stored.values())
        assert {found.walked[w] for w in ("L0 objects", "L1 objects", "parts")} == {len(v) for v in stored.values()}
        for prefix, at in (("l0/", 70), ("l0/", -9), ("l1/", 70), ("l1/", -9), ("shards/", 200), ("shards/", -20)):
            key = stored[prefix][-1]
            await flip(world.objects, key, at)
            assert {each.target for each in (await checked(world)).broken} == {key}, (key, at)
            if prefix == "shards/":
                of_rows = (await checked(world, consensus=MemoryConsensus(world.clock))).broken
                assert key in {each.target for each in of_rows}, "the bucket alone says it too"
            await flip(world.objects, key, at)
        assert (await checked(world)).clean


async def test_an_unfinished_l0_object_is_a_finding_only_if_a_log_names_it() -> None:
    async with World(real=True) as world:
        await moved(world)
        in_logs = [key for led in world.topics._led.values() for key in led.state.live_objects()]
        named = min(key for key in in_logs if key.startswith("l0/"))
        whole = await world.objects.get(named)
        torn = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
        await world.objects.put("l0/00000000000000000001/gone-0badcafe-000000000007", torn)
        found = await checked(world)
        assert found.clean and found.orphans["unfinished L0 objects"] == 1
        await world.objects.delete(named)
        await world.objects.put(named, torn)
        assert {each.target for each in (await checked(world)).broken} == {named}


def test_the_command_exits_1_names_every_damaged_object_and_reads_mirrors(directory: Path) -> None:
    async def damage() -> list[str]:
        objects = await open_objects(f"file://{directory}/data/objects", SystemClock(), Rand())
        found = [meta.key async for meta in objects.list("l0/")][:2]
        for key in found:
            await flip(objects, key, 75)
        await objects.aclose()
        return found

    damaged = asyncio.run(damage())
    mirror = directory / "data" / "scratch" / "p" / "mirrors" / "t" / "run-1-1-1.arrow"
    mirror.parent.mkdir(parents=True)
    mirror.write_bytes(bytes(100))
    plain = command(directory, "doctor", "--deep")
    assert plain.returncode == 0, "what only the contents show is not looked at without them"
    done = command(directory, "doctor", "--deep", "--contents", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and not report["clean"]
    assert {each["target"] for each in report["findings"]} == {*damaged, str(mirror)}
    assert report["walked"]["mirror files"] == 1
    with contextlib.suppress(OSError):
        mirror.unlink()
