"""Publishers of one table as an Iceberg table, while it is written, merged, collected and evolved.

Faults: every store fault; every actor dies at any step and starts again from the stores; two publishers race; replaced
parts are collected immediately unless they are held; metadata that no listed snapshot names is swept; the table gets a
column, which is then widened.
Oracle: the files that a listed snapshot names exist, and their rows without those of the vectors are the contents of
the table at the snapshot's time and at the times of its tags; so for the snapshot that was current when a reader loaded
it, for `keep_s` after that. A publication that was acknowledged stays listed as long, and the published time never goes
back. After healing, the newest time is published.
Replay: ./dev sim --room lake --seed K --trace
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sim.oracles.shards import DEFAULT_N, Row, check_landed, check_reads
from sim.scenarios.shard_nodes import Node, build, evolve, keep, keep_up, oracle_handle
from sim.scenarios.shard_writers import Writers
from sim.world import Actor, Crew, Violated, World, swapped
from tidemill.base.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    MissingError,
    TidemillError,
    UnavailableError,
)
from tidemill.base.limits import INLINE_PART_BYTES
from tidemill.lake import pointer as pointers
from tidemill.lake.format import metadata as formats
from tidemill.lake.format.deletion_vectors import decode_vector
from tidemill.lake.format.manifests import DATA, decode_manifest, decode_manifest_list
from tidemill.lake.format.metadata import MAIN, Snapshot, TableMetadata, decode_metadata, time_of
from tidemill.lake.format.position_deletes import decode_position_deletes
from tidemill.lake.pointer import Pointer, read_pointer
from tidemill.lake.publish import manifest_groups, publication, table_publisher
from tidemill.lake.publish.manifest_groups import Group, Regrouped
from tidemill.lake.publish.stored import LakeStores
from tidemill.lake.publish.table_publisher import TablePublisher
from tidemill.lake.settings import LakeSettings
from tidemill.lake.vectors.part_columns import PartColumns
from tidemill.shards import handle
from tidemill.shards.compaction import compaction

FAULTS = ("stale-vector", "unheld-snapshot", "both-publish", "wrong-tag")
BASE = "sim://bucket"
Work = Callable[[Any, Node], Awaitable[None]]


class Lake(Writers):
    """State of the scenario outside of all actors."""

    def __init__(self, world: World, fault: str) -> None:
        super().__init__(world, fault)
        source = world.source
        self.settings = LakeSettings(
            BASE, format=source.choice((2, 3, 3)), interval_s=0.0, keep_s=source.choice((8.0, 8.0, 600.0))
        )
        self.acknowledged: dict[int, float] = {}
        """Acknowledged snapshots, with the time of the acknowledgement.

        A hold outlasts its period by another one, of half `keep_s`. So a publisher must be able to publish in less time
        than a period: `keep_s` is not shorter than the pauses of a stormy world.
        """
        self.published_time = 0
        self.heard_to = 1 << 60  # no listener limits since

    def cast(self) -> list[Actor[Node]]:
        """Return the writers. They write more than in the shards' scenario, so that vectors of merged parts change."""
        writers = super().cast()
        for writer in writers:
            self.remaining[writer.name] *= 3
        return writers

    @property
    def stores(self) -> LakeStores:
        """Stores without faults, for the oracle."""
        world = self.world
        return LakeStores(world.consensus, world.objects, world.clock, world.rand(), self.settings)


async def run(world: World, fault: str = "") -> None:
    lake, source = Lake(world, fault), world.source
    inline_bytes = source.choice((0, 0, INLINE_PART_BYTES))
    with (
        swapped(handle, "INLINE_PART_BYTES", inline_bytes),
        swapped(compaction, "INLINE_PART_BYTES", inline_bytes),
        swapped(compaction, "FAN_IN", source.choice((2, 4))),
        swapped(compaction, "SMALLEST_CLASS_BYTES", 1 << 10),
        swapped(manifest_groups, "FAN_IN", source.choice((2, 8))),
        swapped(table_publisher, "PERIOD_MIN_MS", 100),
        swapped(table_publisher, "ORPHAN_MS", source.choice((3_000, 10_000))),
        planted(fault),
    ):
        await play(world, lake)
        await check(lake)


@contextlib.contextmanager
def planted(fault: str) -> Any:
    match fault:
        case "stale-vector":
            with swapped(publication, "regroup_deletes", _any_vector):
                yield
        case "unheld-snapshot":
            with swapped(table_publisher, "hold_objects", _no_hold):
                yield
        case "both-publish":
            with swapped(publication, "move_pointer", _unchecked_move):
                yield
        case "wrong-tag":
            with swapped(formats, "tag_of", lambda time_ms: f"t{time_ms + 1}"):
                yield
        case _:
            yield


def _any_vector(groups: Sequence[Group], wanted: Mapping[str, bytes]) -> Regrouped:
    """Plant the fault stale-vector: the vector of an earlier publication is listed again, although it changed."""
    known = {path: b"" for group in groups for path in group.entries}
    same = {path: known.get(path, vector) for path, vector in wanted.items()}
    blank = [Group(group.manifest, group.entries, dict.fromkeys(group.entries, b"")) for group in groups]
    found = manifest_groups.regroup_deletes(blank, same)
    restored = {id(group.entries): group for group in groups}
    return Regrouped(tuple(restored[id(group.entries)] for group in found.kept), found.moved, found.new)


async def _no_hold(*_: Any) -> None:
    """Plant the fault unheld-snapshot: the parts of a snapshot are not held."""


async def _unchecked_move(consensus: Any, rand: Any, shard_id: str, seq: int, pointer: Pointer) -> int:
    """Plant the fault both-publish: the register is moved from any version."""
    _, current = await read_pointer(consensus, shard_id)
    return await pointers.move_pointer(consensus, rand, shard_id, current, pointer)


async def play(world: World, lake: Lake) -> None:
    source = world.source
    writers = lake.cast()
    kinds: list[tuple[str, int, Work]] = [
        ("publisher", source.choice((1, 2, 2)), publish),
        ("keeper", source.choice((1, 1, 2)), keep_up),
        # Format 2 has no defaults.
        ("evolver", source.choice((0, 0, 1)) if lake.settings.format >= 3 else 0, evolve),
    ]
    others = [(Actor(world, f"{name}-{i}", build), work) for name, count, work in kinds for i in range(count)]
    stop: asyncio.Future[None] = world.loop.create_future()
    async with Crew() as crew:
        writing = [crew.spawn(keep(lake, writer, type(lake).write, stop)) for writer in writers]
        working = [crew.spawn(keep(lake, actor, work, stop)) for actor, work in others]
        working += [crew.spawn(observe(lake, stop)) for _ in range(2)]
        for _ in range(source.choice((0, 1, 3, 6))):
            await asyncio.sleep(source.uniform(0, 0.8))
            victim = source.choice(world.actors)
            if victim.up:
                victim.crash()
        await asyncio.wait(writing, timeout=5.0)
        world.faults.heal()
        world.trace("heal")
        await asyncio.wait(writing)
        shard = await oracle_handle(world)
        _, upper = await shard.frontiers()
        while upper and lake.published_time < upper - 1:
            await asyncio.sleep(0.1)
            await load(lake, shard.shard_id)
        stop.set_result(None)
        await asyncio.wait(working)
    for actor in world.actors:
        actor.crash()


async def publish(lake: Any, node: Node) -> None:
    """Publish, expire and sweep, with one publisher per life."""
    world, source = lake.world, lake.world.source
    stores = LakeStores(node.consensus, node.objects, node.actor.clock, node.rand, lake.settings)
    publisher = TablePublisher(stores, PartColumns(node.objects), node.shard)
    while True:
        await asyncio.sleep(source.uniform(0, 0.4))
        try:
            since, upper = await node.shard.frontiers()
            if upper:
                time_ms = max(since, upper - 1 - source.choice((0, 0, 3)))
                found = await publisher.publish(time_ms)
                current = found.metadata.current
                assert current is not None
                lake.acknowledged.setdefault(current.snapshot_id, world.loop.time())
                world.trace(f"{node.actor.life} published {time_ms} as {current.snapshot_id % 10_000}")
            await publisher.expire()
            if source.random() < 0.3:
                await publisher.sweep()
        except TidemillError as error:
            if isinstance(error, CorruptError):  # above all, the rows that count are not the sum of all updates
                raise Violated(f"a publication failed: {error.message}") from error
            if not isinstance(error, UnavailableError | ConflictError | InvalidError):
                world.trace(f"{node.actor.life} publication failed {type(error).__name__} {error.message}")
            with contextlib.suppress(TidemillError):
                await node.reopen()  # under the newest schema
            publisher = TablePublisher(stores, PartColumns(node.objects), node.shard)


# oracle -------------------------------------------------------------------------------------------
async def observe(lake: Lake, stop: asyncio.Future[None]) -> None:
    """Load the table, read the snapshots that it lists, and the current one again when it may have been replaced."""
    source = lake.world.source
    while not stop.done():
        await asyncio.sleep(source.uniform(0, 0.5))
        try:
            shard = await oracle_handle(lake.world)
        except MissingError:
            continue
        metadata = await load(lake, shard.shard_id)
        if metadata is None:
            continue
        for snapshot in source.sample(metadata.snapshots, min(2, len(metadata.snapshots))):
            await record(lake, metadata, snapshot)
        assert metadata.current is not None
        await asyncio.sleep(source.uniform(0, 0.9) * min(lake.settings.keep_s, 3.0))
        await record(lake, metadata, metadata.current)


async def load(lake: Lake, shard_id: str) -> TableMetadata | None:
    """Return the newest metadata, after checks of what it lists."""
    stores = lake.stores
    pointer, _ = await read_pointer(stores.consensus, shard_id)
    if pointer is None or not pointer.metadata:
        return None
    if pointer.time_ms < lake.published_time:
        raise Violated(f"the published time went back: before={lake.published_time} now={pointer.time_ms}")
    lake.published_time = pointer.time_ms
    metadata = decode_metadata(await _get(lake, pointer.metadata, "metadata"), pointer.metadata)
    listed = {snapshot.snapshot_id for snapshot in metadata.snapshots}
    oldest_s = lake.world.loop.time() - 0.9 * lake.settings.keep_s
    for snapshot_id, acknowledged_s in lake.acknowledged.items():
        if acknowledged_s > oldest_s and snapshot_id not in listed:
            raise Violated(f"an acknowledged publication is not listed: snapshot={snapshot_id % 10_000}")
    numbers = [snapshot.sequence_number for snapshot in metadata.snapshots]
    if numbers != sorted(set(numbers)):
        raise Violated(f"sequence numbers do not increase: {numbers}")
    return metadata


async def record(lake: Lake, metadata: TableMetadata, snapshot: Snapshot) -> None:
    rows = await rows_of(lake, snapshot)
    tags = [name for name, ref in metadata.refs.items() if ref.snapshot_id == snapshot.snapshot_id and name != MAIN]
    lake.reads += [(time_ms, rows) for time_ms in (int(snapshot.summary["tidemill.time"]), *map(time_of, tags))]


async def rows_of(lake: Lake, snapshot: Snapshot) -> Counter[Row]:
    """Return the rows of a snapshot as a foreign reader finds them."""
    listed = decode_manifest_list(await _get(lake, snapshot.manifest_list, "manifest list"), snapshot.manifest_list)
    entries = [
        (manifest, entry)
        for manifest in listed
        for entry in decode_manifest(await _get(lake, manifest.path, "manifest"), manifest)
    ]
    deletes: dict[str, Any] = {}
    for manifest, entry in entries:
        if manifest.content != DATA:
            if entry.file.referenced in deletes:
                raise Violated(f"two files of deletes are about one data file: file={entry.file.referenced}")
            deletes[entry.file.referenced or ""] = entry
    out: Counter[Row] = Counter()
    seen: set[str] = set()
    for manifest, entry in entries:
        if manifest.content != DATA:
            continue
        path = entry.file.path
        if path in seen:
            raise Violated(f"a data file is listed twice: file={path}")
        seen.add(path)
        table = pq.ParquetFile(io.BytesIO(await _get(lake, path, "data file"))).read(use_threads=False)
        if table.num_rows != entry.file.rows:
            raise Violated(f"a data file has {table.num_rows} rows, and {entry.file.rows} are listed: file={path}")
        if path in deletes:
            table = table.filter(pa.array(~await _mask(lake, deletes[path], entry, table.num_rows)))
        names = table.column_names
        columns = [table.column(name).to_pylist() for name in ("k", "v")]
        columns.append(table.column("n").to_pylist() if "n" in names else [DEFAULT_N] * table.num_rows)
        out.update(zip(*columns, strict=True))
    return out


async def _mask(lake: Lake, deletes: Any, data: Any, rows: int) -> Any:
    if data.sequence > deletes.sequence:
        raise Violated(f"deletes are older than their data file: file={data.file.path}")
    stored = await _get(lake, deletes.file.path, "deletes")
    if deletes.file.file_format == "PUFFIN":
        return decode_vector(stored[deletes.file.offset : deletes.file.offset + deletes.file.length], rows)
    return decode_position_deletes(stored, rows)


async def _get(lake: Lake, uri: str, kind: str) -> bytes:
    key = uri.removeprefix(f"{BASE}/")
    try:
        return bytes(await lake.world.objects.get(key))
    except MissingError as error:
        raise Violated(f"a listed snapshot names an object that is gone: kind={kind} object={key}") from error


async def check(lake: Lake) -> None:
    world, shard = lake.world, await oracle_handle(lake.world)
    model = await lake.model(check_landed(world.consensus.landed.get(f"shard/{shard.shard_id}", []), lake.attempts))
    metadata = await load(lake, shard.shard_id)
    if metadata is not None:
        for snapshot in metadata.snapshots:
            await record(lake, metadata, snapshot)
    check_reads(lake.reads, model)
