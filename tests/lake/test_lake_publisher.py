"""Publication: what is written again, races, crashes, holds, expiry and the sweep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.lake.world import LakeWorld, contents, rows_of
from support.shards.world import SCHEMA, append, updates
from tidemill.base.errors import ConflictError, InvalidError, MissingError, UnavailableError
from tidemill.lake.format.deletion_vectors import decode_vector
from tidemill.lake.format.manifests import DATA
from tidemill.lake.pointer import load_table, read_pointer
from tidemill.lake.publish.stored import Stored, load_stored
from tidemill.lake.publish.table_publisher import ORPHAN_MS, TablePublisher, delete_dropped, hold_period_ms
from tidemill.lake.settings import LakeSettings, base_uri
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.maintenance.shards.upkeep import collect_garbage
from tidemill.shards.api import Column, HistoryLostError, written_ms
from tidemill.shards.compaction.compaction import compact_once
from tidemill.shards.handle import LogShard
from tidemill.shards.parts.schema_evolution import SchemaChanges


async def read_snapshot(world: LakeWorld, stored: Stored, which: int = -1) -> Any:
    """Return the rows of a listed snapshot as a reader of the objects alone finds them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tidemill.lake.publish.stored import _read_groups

    stores = world.stores()
    snapshot = stored.metadata.snapshots[which]
    groups = await _read_groups(stores, snapshot)
    deletes = {path: e.file for g in groups if g.manifest.content != DATA for path, e in g.entries.items()}
    out = rows_of(updates([]).select(["k", "v"]))
    for group in groups:
        for path, entry in group.entries.items() if group.manifest.content == DATA else ():
            rows = pq.read_table(path.removeprefix("file://"))
            assert rows.num_rows == entry.file.rows
            if path in deletes:
                file = deletes.pop(path)
                assert file.offset is not None and file.length is not None
                data = await world.objects.get(stores.key_of(file.path), file.offset, file.offset + file.length)
                dead = decode_vector(data, rows.num_rows)
                assert file.rows == int(dead.sum())
                rows = rows.filter(pa.array(~dead))
            out += rows_of(rows.select(["k", "v"]))
    assert not deletes, "each vector has its data file"
    return out


def names(world: LakeWorld, stored: Stored) -> set[str]:
    """Return the names of the metadata files and vectors that a state names."""
    return {group.manifest.path for group in (*stored.data, *stored.deletes)}


async def filled(world: LakeWorld, rows: int = 2000) -> tuple[LogShard, TablePublisher]:
    shard = await world.table(schema=SCHEMA)
    await append(shard, 0, 10, [(k, f"{k}-1", 5, 1) for k in range(rows)])
    return shard, await world.publisher()


async def change(shard: LogShard, keys: range, time: int, old: int) -> None:
    _, upper = await shard.frontiers()
    rows = [(k, f"{k}-{old}", time, -1) for k in keys] + [(k, f"{k}-{time}", time, 1) for k in keys]
    await append(shard, upper, time + 1, rows)


async def listed(world: LakeWorld) -> list[str]:
    return [meta.key async for meta in world.objects.list("lake/")]


async def test_a_publication_writes_only_what_changed(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    first = await world.publish(publisher)
    assert len(await listed(world)) == 3, "a manifest, a list, the metadata"
    await change(shard, range(1000), 20, 1)
    second = await world.publish(publisher)
    assert len(await listed(world)) == 3 + 6, "and two vectors with their manifest"
    assert names(world, first) < names(world, second), "the first data manifest is listed again"
    assert await read_snapshot(world, second) == await contents(shard, 20)
    assert await read_snapshot(world, second, 0) == await contents(shard, 9)
    before = await listed(world)
    assert await world.publish(publisher) is second, "nothing changed"
    assert await listed(world) == before


async def test_another_process_continues_and_writes_nothing_if_nothing_changed(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    await change(shard, range(1000), 20, 1)
    await world.publish(publisher)
    before = await listed(world)
    other = await world.publisher()
    await world.publish(other)
    assert await listed(world) == before
    await change(shard, range(1000), 30, 20)
    third = await world.publish(other)
    assert await read_snapshot(world, third) == await contents(shard, 30)
    assert [s.sequence_number for s in third.metadata.snapshots] == [1, 2]
    assert third.metadata.next_row_id == sum(s.added_rows for s in third.metadata.snapshots)
    await change(shard, range(1000), 40, 30)
    with pytest.raises(ConflictError):
        await world.publish(publisher)
    assert await read_snapshot(world, await world.publish(publisher)) == await contents(shard, 40)


async def test_of_two_that_publish_at_once_one_wins(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, one = await filled(world)
    two = await world.publisher()
    await one.load()
    await two.load()
    winner = await world.publish(one)
    with pytest.raises(ConflictError):
        await world.publish(two)
    pointer, _ = await read_pointer(world.consensus(), shard.shard_id)
    assert pointer is not None and pointer.snapshot_id == winner.metadata.current_snapshot_id
    again = await world.publish(two)
    assert again.metadata.current_snapshot_id == pointer.snapshot_id, "the loser finds what the winner published"


async def test_a_publication_that_ends_anywhere_changes_nothing_and_its_objects_are_swept(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    first = await world.publish(publisher)
    await change(shard, range(1000), 20, 1)
    put = world.objects.put

    class Crash(Exception):
        pass

    for allowed in range(6):
        left = allowed

        async def failing(key: str, data: Any) -> None:
            nonlocal left
            if not left:
                raise Crash
            left -= 1
            await put(key, data)

        world.objects.put = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(Crash):
            await world.publish(publisher)
        world.objects.put = put  # type: ignore[method-assign]
        stored = await load_stored(world.stores(), shard.shard_id, "t", SCHEMA)
        assert stored.metadata == first.metadata
    second = await world.publish(publisher)
    assert await read_snapshot(world, second) == await contents(shard, 20)
    count = len(await listed(world))
    assert await publisher.sweep() == 0, "they are too young"
    world.clock.advance(ORPHAN_MS + 1000)
    swept = await publisher.sweep()
    assert swept and len(await listed(world)) == count - swept == 3 + 6
    for which in (0, 1):
        assert await read_snapshot(world, second, which) == await contents(shard, [9, 20][which])


async def test_a_publication_that_was_prepared_before_a_sweep_fails(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, slow = await filled(world)
    await world.publish(slow)
    await change(shard, range(1000), 20, 1)
    cas = slow._stores.consensus.cas

    async def delayed(key: str, *rest: Any) -> Any:
        if key.startswith("lake/"):
            world.clock.advance(ORPHAN_MS + 1000)
            assert await (await world.publisher()).sweep() > 0, "the objects of the slow one"
        return await cas(key, *rest)

    slow._stores.consensus.cas = delayed  # type: ignore[method-assign]
    with pytest.raises(ConflictError):
        await world.publish(slow)
    slow._stores.consensus.cas = cas  # type: ignore[method-assign]
    assert await read_snapshot(world, await world.publish(slow)) == await contents(shard, 20)


async def test_objects_of_a_listed_snapshot_stay_and_of_an_expired_one_go(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path, keep_s=600)
    shard, publisher = await filled(world)
    first = await world.publish(publisher)
    old = [part.object_key for batch in shard.state.batches for part in batch.parts]

    async def collect() -> None:
        await collect_garbage(shard, world.objects, world.clock, after_ms=120_000, persisted=1 << 60)

    await change(shard, range(2000), 20, 1)
    await shard.downgrade_since("retention", 1, 20)
    assert shard.state.since == 20, "the hold keeps no history"
    assert await compact_once(shard, world.objects, world.rand)
    second = await world.publish(publisher)
    for _ in range(5):
        world.clock.advance(119_000)
        await shard.frontiers()
        await publisher.shard.frontiers()
        await collect()
        await publisher.expire()
        await publisher.sweep()
        assert await read_snapshot(world, second, 0)
    assert await world.objects.head(old[0]) is not None
    world.clock.advance(2 * hold_period_ms(world.settings) + 120_000)
    await collect()
    await publisher.expire()
    await publisher.sweep()
    assert await world.objects.head(old[0]) is None, "the hold lapsed"
    stored = await publisher.load()
    assert len(stored.metadata.snapshots) == 1 and first.metadata.current is not None
    kept = await listed(world)
    assert publisher._stores.key_of(first.metadata.current.manifest_list) not in kept
    assert await read_snapshot(world, stored) == await contents(shard, 20)


async def test_a_table_that_is_idle_is_written_a_few_times_an_hour_and_its_parts_stay_held(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    await world.publish(publisher)
    before, version = await listed(world), shard.state.version
    for _ in range(240):
        world.clock.advance(30_000)
        await publisher.shard.frontiers()
        await world.publish(publisher)
        await publisher.expire()
        now_ms = world.clock.now_ms()
        assert any(hold.is_live(now_ms + 3_600_000) for hold in publisher.shard.state.holds if hold.expires_ms)
    assert await listed(world) == before
    await shard.frontiers()
    assert shard.state.version - version <= 6, "one hold each half hour"


async def test_a_time_outside_of_the_readable_ones_is_refused(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    _, publisher = await filled(world)
    for time in (10, 11):
        with pytest.raises(HistoryLostError, match=f"time={time} since=0 upper=10"):
            await world.publish(publisher, time)
    await world.publish(publisher, 9)
    with pytest.raises(InvalidError, match="a later time is published already"):
        await world.publish(publisher, 8)


async def test_a_dropped_table_leaves_no_object_and_is_not_published_again(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    slow = await world.publisher()
    await slow.load()
    stored = await world.publish(publisher)
    await delete_dropped(world.stores(), shard.shard_id, stored.pointer, stored.seq)
    assert await listed(world) == []
    with pytest.raises(ConflictError):
        await world.publish(slow)
    with pytest.raises(MissingError, match="the table was dropped"):
        await world.publish(await world.publisher())


async def test_another_format_or_bucket_begins_a_new_table(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard, publisher = await filled(world)
    first = await world.publish(publisher)
    other = await world.publisher(settings=LakeSettings("s3://elsewhere/x", format=2))
    found = await world.publish(other)
    assert found.metadata.table_uuid != first.metadata.table_uuid
    assert found.metadata.location == f"s3://elsewhere/x/lake/{shard.shard_id}"
    assert len(found.metadata.snapshots) == 1 and found.metadata.format_version == 2


async def test_the_newest_metadata_is_found_by_the_name_of_the_table(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    with pytest.raises(MissingError, match="no such table"):
        await load_table(world.consensus(), world.objects, "t")
    _, publisher = await filled(world)
    with pytest.raises(MissingError, match="never published"):
        await load_table(world.consensus(), world.objects, "t")
    await world.publish(publisher)
    found = await load_table(world.consensus(), world.objects, "t")
    assert Path(found.location.removeprefix("file://")).read_bytes() == found.metadata
    assert (found.pointer.time_ms, found.pointer.rows) == (9, 2000)


@pytest.mark.parametrize(
    ("url", "directory", "base"),
    [
        ("./data", "/srv/data", "file:///srv/data"),
        ("s3://bucket/prefix/?endpoint=http://x", None, "s3://bucket/prefix"),
        ("gs://bucket", None, "gs://bucket"),
        ("az://container/p?account=acme", None, "abfss://container@acme.dfs.core.windows.net/p"),
    ],
)
def test_the_base_of_uris_is_that_of_the_bucket(url: str, directory: str | None, base: str) -> None:
    assert base_uri(url, directory) == base


def test_a_store_that_others_cannot_open_is_refused() -> None:
    with pytest.raises(InvalidError, match="other programs cannot open this store"):
        base_uri("memory:", None)


async def test_a_table_that_cannot_be_published_is_refused_before_its_parts_are_read(tmp_path: Path) -> None:
    world = LakeWorld(tmp_path)
    shard = await world.table(schema=SCHEMA)
    await append(shard, 0, 10, [(i, "v", 1, 1) for i in range(3000)])
    await world.publish(await world.publisher())
    await append(shard, 10, 20, [(i, "v", 11, 1) for i in range(3000, 6000)])
    await shard.evolve(SchemaChanges(add=(Column("n", "float64", "NaN"),)))
    columns = PartColumns(world.objects)
    publisher = TablePublisher(world.stores(), columns, await world.table())
    with pytest.raises(UnavailableError, match="column=n default='nan' batches=2"):
        await world.publish(publisher)
    assert columns.fetched_bytes == 0


async def test_metadata_files_have_the_names_that_iceberg_gives_them(tmp_path: Path) -> None:
    """ClickHouse takes the version from the name, as a number of 32 bits."""
    world = LakeWorld(tmp_path)
    shard, publisher = await world.table(schema=SCHEMA), await world.publisher()
    versions = []
    for time in (1, 2, 3):
        _, upper = await shard.frontiers()
        await append(shard, upper, time * 10, [(time, "v", time * 10 - 1, 1)])
        world.clock.advance(30_000)
        key = (await world.publish(publisher)).pointer.metadata
        found = re.fullmatch(r"lake/[^/]+/metadata/(\d{5})-l@\d+-[0-9a-f]{16}\.metadata\.json", key)
        assert found is not None and written_ms(key) == world.clock.now_ms()
        versions.append(int(found[1]))
    assert versions == [1, 2, 3]
