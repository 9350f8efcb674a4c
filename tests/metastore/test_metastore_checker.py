"""The deep check: no finding on an intact cluster, and one line for every broken reference."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.metastore.checkpoint_world import World, damage, keys, persisted
from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import MissingError
from tidemill.consensus.memory import MemoryConsensus
from tidemill.maintenance.check import deep_check as deep_check_module
from tidemill.maintenance.check.deep_check import DeepCheckResult, deep_check
from tidemill.maintenance.check.rows import check_rows
from tidemill.metastore.catalogue import CaptureRow, CaptureTableRow, PipelineRow, TableSnapshot
from tidemill.metastore.check.checker import Checker
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.check.objects import References
from tidemill.metastore.rows import (
    BINDINGS,
    CAPTURE_TABLES,
    CAPTURES,
    EXTENTS,
    PARTITIONS,
    PIPELINES,
    SHARD_BATCHES,
    SHARDS,
    TOPIC_IDS,
    TOPICS,
)
from tidemill.metastore.rows.catalogue import TopicIdRow
from tidemill.objects.memory import MemoryObjects
from tidemill.shards.api import DIFF, TIME


async def check(world: World, consensus: Any = None) -> DeepCheckResult:
    return await deep_check(consensus or world.consensus, world.objects, world.clock, world.rand)


async def lines(world: World) -> list[str]:
    return [str(finding) for finding in (await check(world)).findings.broken]


async def large_part(world: World) -> str:
    """Append a part that is an object. Return its key."""
    import pyarrow as pa

    _, upper = await world.table.frontiers()
    end = (await world.bind()).time_ms + 1
    rows = {"k": list(range(40_000)), "v": [i * 7919 % 100_003 for i in range(40_000)]}
    part = await world.table.write_part(pa.table(rows | {TIME: [upper] * 40_000, DIFF: [1] * 40_000}))
    assert part.object_key
    await world.table.compare_and_append(upper, end, [part], "")
    return part.object_key


@pytest.mark.parametrize("domains", [1, 2])
async def test_a_whole_cluster_has_no_findings(domains: int) -> None:
    async with World(real=True, domains=domains) as world:
        await large_part(world)
        await persisted(world, 10)
        await world.compact(world.table)
        await persisted(world, 10)
        found = await check(world)
        assert found.findings.broken == []
        walked = found.findings.walked
        for kind in (
            "files",
            "manifests",
            "cluster manifests",
            "extent",
            "partition",
            "shard batch",
            "binding",
            "objects",
        ):
            assert walked[kind] > 0, kind
        assert found.checkpoint_age_ms is not None and found.checkpoint_age_ms < 60_000


async def test_it_works_while_the_cluster_moves_on() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        moving = asyncio.ensure_future(world.move_on())
        checkpointer = world.checkpointer()

        async def keep() -> None:
            while True:
                await checkpointer.round()
                await world.metastore.flush(30)

        keeping = asyncio.ensure_future(keep())
        for _ in range(5):
            assert await lines(world) == []
            await asyncio.sleep(0.05)
        for task in (moving, keeping):
            task.cancel()
        await asyncio.gather(moving, keeping, return_exceptions=True)


@pytest.mark.parametrize("moves_on", [True, False])
async def test_rows_are_walked_again_when_a_file_was_collected_under_the_walk(
    moves_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        walks = 0

        async def collected_once(*args: Any) -> Checker:
            nonlocal walks
            walks += 1
            if walks > 1:
                return await check_rows(*args)
            args[1].add("told", "", "by the walk that was cut off", "")
            if moves_on:
                await world.catalogue.create_topic("more", 1)
                await world.metastore.flush(10)
            raise MissingError("The file was collected.")

        monkeypatch.setattr(deep_check_module, "check_rows", collected_once)
        found = await lines(world)
        if moves_on:
            assert not found and walks == 2
        else:
            assert [line for line in found if "not all rows can be read" in line] and walks == 1
            assert [line for line in found if "cut off" in line], "what was found before it stays"


async def test_the_bucket_alone_is_walked_where_consensus_is_gone() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        found = await check(world, MemoryConsensus(world.clock))
        said = (
            f"cluster {found.cluster_uuid}: consensus has no cluster, but the bucket has one. Run `tidemill restore`."
        )
        assert [str(f) for f in found.findings.broken] == [f"consensus → {said}"]
        assert found.findings.walked["extent"] > 0 and not found.from_consensus


def test_nothing_at_all_is_said_as_such() -> None:
    clock = SystemClock()
    with pytest.raises(MissingError, match="there is no cluster"):
        asyncio.run(deep_check(MemoryConsensus(clock), MemoryObjects(clock), clock, Rand()))


def only(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0], (part, found[0])


async def test_a_missing_l0_object_is_named_by_what_refers_to_it() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        [key, *_] = await keys(world, "l0/")
        await world.objects.delete(key)
        only(await lines(world), f"extent {world.topic.topic_id}/", key, "the object is missing", "copy of the bucket")


async def test_an_l0_object_that_is_too_short_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        [key, *_] = await keys(world, "l0/")
        await world.objects.delete(key)
        await world.objects.put(key, b"short")
        only(await lines(world), key, "has 5 bytes")


async def test_a_missing_part_of_a_shard_is_named() -> None:
    async with World(real=True) as world:
        key = await large_part(world)
        await persisted(world, 1)
        await world.objects.delete(key)
        only(await lines(world), "batch table@0", key, "the object is missing")


async def test_a_missing_a_damaged_and_a_truncated_file_of_a_domain_are_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 30)
        uuid = (await world.metastore.domains())[0].domain_uuid  # type: ignore[attr-defined]
        [file, *_] = await keys(world, f"metastore/{uuid}/sst/")
        data = await world.objects.get(file)
        for spoiled in (data[: len(data) // 2], bytes([data[10] ^ 1]) + data[1:], None):
            await world.objects.delete(file)
            if spoiled is not None:
                await world.objects.put(file, spoiled)
            found = await lines(world)
            assert any(line.startswith("manifest ") and file in line for line in found), found
            if spoiled is not None and len(spoiled) != len(data):
                assert any(f"the object has {len(spoiled)} bytes, the manifest says {len(data)}" in x for x in found)
        assert any("missing" in line for line in found)


async def test_a_damaged_manifest_and_a_damaged_cluster_manifest_are_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        uuid = (await world.metastore.domains())[0].domain_uuid  # type: ignore[attr-defined]
        await persisted(world, 3)
        [manifest, *_] = await keys(world, f"metastore/{uuid}/manifest/")
        await damage(world, manifest)
        only(await lines(world), f"domain {uuid}", manifest, "damaged")


async def break_rows(world: World, *rows: tuple[bytes, bytes]) -> list[str]:
    await world.metastore.commit(list(rows))
    return await lines(world)


async def test_a_hole_in_a_partition_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 12)
        extents = await world.metastore.rows(EXTENTS, world.topic.topic_id, 0)
        gone = extents[2]
        found = await break_rows(world, (EXTENTS.key_of(gone), b""))
        only(found, f"offsets {gone.base_offset} to {gone.last_offset + 1} are in no extent")
        found = await break_rows(world, (EXTENTS.key_of(extents[-1]), b""))
        assert any(f"offsets {extents[-1].base_offset} to {extents[-1].last_offset + 1}" in line for line in found)


async def test_a_partition_without_any_extent_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 4)
        extents = await world.metastore.rows(EXTENTS, world.topic.topic_id, 0)
        found = await break_rows(world, *[(EXTENTS.key_of(extent), b"") for extent in extents])
        only(found, f"partition {world.topic.topic_id}/0", "none of its offsets")


async def test_a_hole_in_a_shard_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 6)
        batches = await world.metastore.rows(SHARD_BATCHES, "table")
        found = await break_rows(world, (SHARD_BATCHES.key("table", batches[2].lower), b""))
        only(found, f"batch table@{batches[3].lower}", f"ends at {batches[2].lower}")
        found = await break_rows(world, (SHARD_BATCHES.key("table", batches[-1].lower), b""))
        assert any(f"times {batches[-1].lower} to {batches[-1].upper} are in no batch" in line for line in found)


async def test_a_missing_binding_and_one_that_is_ahead_are_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 6)
        bindings = await world.metastore.rows(BINDINGS, "topic/clicks")
        only(await break_rows(world, (BINDINGS.key_of(bindings[2]), b"")), "1 bindings before it are missing")
        await world.metastore.commit([BINDINGS.encode(bindings[2])])
        assert await lines(world) == []
        row = await world.metastore.get(PARTITIONS, world.topic.topic_id, 0)
        extents = await world.metastore.rows(EXTENTS, world.topic.topic_id, 0)
        from msgspec.structs import replace

        assert row is not None
        shorter = replace(row, next_offset=extents[-1].base_offset)
        only(await break_rows(world, PARTITIONS.encode(shorter)), "beyond the partition's end", "older manifest")


async def test_bindings_count_anew_once_for_each_restore() -> None:
    """The log of a restored cluster holds the restored bindings from position 0; the log before it had truncated its
    first ones."""
    async with World(real=True) as world:
        from msgspec.structs import replace

        await persisted(world, 6)
        bindings = await world.metastore.rows(BINDINGS, "topic/clicks")
        assert len(bindings) > 4
        moved = [replace(row, log_position=row.log_position + 1000) for row in bindings[:3]]
        await world.metastore.commit([BINDINGS.encode(row) for row in moved])
        for incarnation, broken in ((1, 1), (2, 0), (3, 0)):
            findings = Findings()
            await check_rows(world.metastore, findings, References(), incarnation)
            assert len(findings.broken) == broken, findings.broken
        await world.metastore.commit([BINDINGS.encode(replace(bindings[4], log_position=0))])
        findings = Findings()
        await check_rows(world.metastore, findings, References(), 2)
        assert any("does not follow" in str(each) for each in findings.broken)


async def test_a_shard_ahead_of_its_bindings_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 6)
        bindings = await world.metastore.rows(BINDINGS, "topic/clicks")
        found = await break_rows(world, *[(BINDINGS.key_of(binding), b"") for binding in bindings[-2:]])
        only(found, "table table", "bindings of topic/clicks", "beyond the newest binding")


async def test_references_of_the_catalogue_are_followed() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        capture = CaptureRow("shop", "1", "s", "p", 1, True)
        table = CaptureTableRow(
            "shop", "public.a", "shop.public.a", snapshot=TableSnapshot(1, 2, (), 3, 0, (0,))
        )  # fmt: skip
        pipeline = PipelineRow("bad", {"t": "topic:nowhere", "u": "capture:shop:public.zzz"})
        found = await break_rows(
            world, CAPTURES.encode(capture), CAPTURE_TABLES.encode(table), PIPELINES.encode(pipeline)
        )
        assert len(found) == 3
        assert any("capture shop → topic shop.public.a" in line for line in found)
        assert any("pipeline bad → topic nowhere" in line for line in found)
        assert any("pipeline bad → capture shop: it does not capture public.zzz" in line for line in found)
        gone = [CAPTURES.key("shop"), CAPTURE_TABLES.key("shop", "public.a"), PIPELINES.key("bad")]
        await world.metastore.commit([(key, b"") for key in gone])
        only(await break_rows(world, (TOPIC_IDS.key(world.topic.topic_id), b"")), "its id row is missing")
        found = await break_rows(world, TOPIC_IDS.encode(TopicIdRow(world.topic.topic_id, "other")))
        assert any("no topic of this name" in line for line in found)


async def test_rows_of_deleted_topics_are_orphans_and_no_findings() -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        await world.catalogue.delete(type(world.topic), "clicks")
        await world.metastore.commit([(PIPELINES.key("p"), b"")])
        found = (await check(world)).findings
        assert found.broken == []
        assert found.orphans["partition rows of deleted topics"] == 2
        assert found.orphans["extents without a partition"] > 0


async def test_objects_that_nothing_refers_to_are_counted_once_they_are_old() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        await world.objects.put("l0/00000000000000000001/lost-1", b"12345")
        assert (await check(world)).findings.orphans["objects"] == 0
        world.clock = Later()  # type: ignore[assignment]
        found = (await check(world)).findings
        assert (found.orphans["objects"], found.broken) == (1, [])
        assert found.orphan_bytes >= 5


class Later(SystemClock):
    def now_ms(self) -> int:
        return super().now_ms() + 7_200_000


@pytest.mark.parametrize("family", [TOPICS, PARTITIONS, EXTENTS, SHARDS, SHARD_BATCHES, BINDINGS])
async def test_a_row_that_does_not_decode_is_named(family: Any) -> None:
    async with World(real=True) as world:
        await persisted(world, 3)
        async for found, _ in world.metastore.prefix(family.prefix()):
            key = found[0]
            break
        lines_found = await break_rows(world, (key, b"\x01\xc1"))
        assert any(f"{family.name} row {key.hex()}" in line for line in lines_found), lines_found


async def test_opaque_parts_are_examined_by_their_rooms() -> None:
    async with World(real=True) as world:
        from msgspec.structs import replace

        await persisted(world, 3)
        shard = await world.metastore.get(SHARDS, "table")
        [batch, *_] = await world.metastore.rows(SHARD_BATCHES, "table")
        [extent, *_] = await world.metastore.rows(EXTENTS, world.topic.topic_id, 0)
        assert shard is not None
        found = await break_rows(
            world,
            SHARDS.encode(replace(shard, header=b"nothing")),
            SHARD_BATCHES.encode(replace(batch, batch=b"nothing")),
            EXTENTS.encode(replace(extent, batches=b"nothing")),
        )
        assert len(found) == 3, found


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_partition_whose_rollup_is_gone_is_named(how: str) -> None:
    async with World(real=True, rollup_records=8) as world:
        for _ in range(30):
            await world.produce()
        await persisted(world, 1)
        assert await lines(world) == []
        [key] = await keys(world, f"rollup/topic/{world.topic.topic_id}/0/")
        await (world.objects.delete(key) if how == "missing" else damage(world, key))
        only(await lines(world), f"log topic/{world.topic.topic_id}/0 → its rollup", key, "restore the cluster")


async def test_a_shard_whose_log_is_unreadable_is_named() -> None:
    async with World(real=True) as world:
        await persisted(world, 2)
        log = f"shard/{world.table.shard_id}"
        head = await world.consensus.log_head(log)
        await world.consensus.append(log, head.term, head.next, [b"\x07nonsense"], "n")
        only(await lines(world), f"table table → log {log}", "unknown kind")


async def test_a_cluster_replaced_in_its_bucket_is_told() -> None:
    async with World(real=True) as world:
        from tidemill.maintenance.restore.restore import Restorer

        await persisted(world, 2)
        await Restorer(MemoryConsensus(world.clock), world.objects, world.clock, world.rand).run()
        assert any("restored as incarnation 2" in line for line in await lines(world))
