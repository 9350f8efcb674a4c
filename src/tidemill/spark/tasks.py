"""What runs where the data is: on an executor as a Spark task, or inline on the driver. The same functions.

A task reads record batches, decodes them, resolves them against the mirror, and writes a part. It needs
the bucket; consensus only if no mirror as of the right upper is found on its machine (U3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from tidemill.base.clock import Rand, SystemClock
from tidemill.base.errors import TidemillError
from tidemill.base.portal import Portal
from tidemill.objects.store import Buffer, ObjectStore
from tidemill.shards.front import TIME, Part, ShardSchema
from tidemill.shards.hashing import bucket_of, hash_rows
from tidemill.shards.parts import store_part
from tidemill.spark.decode.captured import CapturedDecoder, Stop
from tidemill.spark.decode.letters import no_dead_letters
from tidemill.spark.decode.records import Records, blocks_of
from tidemill.spark.decode.slices import Descriptor
from tidemill.spark.decode.stream import StreamDecoder
from tidemill.spark.feeds import TopicFeed
from tidemill.spark.stores import Urls, shared, shared_objects
from tidemill.spark.upsert.arrays import int64s
from tidemill.spark.upsert.commands import BEFORE_ALL, Commands, Truncate, join, no_commands, select, times_of
from tidemill.spark.upsert.mirror import Mirror
from tidemill.spark.upsert.resolve import Resolved, resolve
from tidemill.spark.upsert.runs import Run, write_run
from tidemill.topics.fetch import read_batches


class Decoded(msgspec.Struct, frozen=True):
    """Commands of some descriptors, and updates of the dead-letter shard; of a table that stops, those before it."""

    commands: Commands
    dead: pa.Table
    stop: Stop | None = None


@lru_cache(maxsize=256)
def _decoder(feed: TopicFeed) -> CapturedDecoder | StreamDecoder:
    return CapturedDecoder(feed.schema, feed.table) if feed.captured else StreamDecoder(feed.schema)


def decode(feed: TopicFeed, descriptors: Sequence[Descriptor], batches: Batches) -> Decoded:
    """`batches[i]` are the record batches of `descriptors[i]`. What cannot be read is in the result, never raised."""
    parts = list(decode_blocks(feed, descriptors, batches))
    stop = min((part.stop for part in parts if part.stop is not None), default=None)
    commands = join(feed.schema, [part.commands for part in parts])
    dead = pa.concat_tables([part.dead for part in parts]) if parts else no_dead_letters()
    if stop is not None:
        commands = select(commands, times_of(commands) < stop.time_ms)
        dead = dead.filter(pa.array(int64s(dead, TIME) < stop.time_ms))
    return Decoded(commands, dead, stop)


def decode_blocks(feed: TopicFeed, descriptors: Sequence[Descriptor], batches: Batches) -> Iterator[Decoded]:
    """The same block by block: what a block was made from is gone when the next one comes."""
    for descriptor, data in zip(descriptors, batches, strict=True):
        for records in blocks_of(descriptor.slice, data, descriptor.refs):
            yield decode_block(feed, records)
    # The table was started over in its database, on this topic: what is not in the new copy is gone. All partitions
    # at one time, whichever of them this interval has records of: equal results, however it was cut (U5).
    begins = {d.slice.begins_ms for d in descriptors if d.slice.begins_ms >= 0} if feed.captured else set()
    if begins:
        gone = tuple(Truncate(time_ms, p, BEFORE_ALL) for time_ms in begins for p in range(feed.partitions))
        yield Decoded(Commands(no_commands(feed.schema).rows, gone), no_dead_letters())


def decode_block(feed: TopicFeed, records: Records) -> Decoded:
    decoder = _decoder(feed)
    if isinstance(decoder, CapturedDecoder):
        found = decoder.decode(records)
        return Decoded(found.commands, found.dead, found.stop)
    return Decoded(*decoder.decode(records))


Batches = Sequence[Sequence[Buffer]]
"""The record batches of some descriptors, of each those of its slice."""


async def fetch(
    objects: ObjectStore, tables: Sequence[Sequence[Descriptor]]
) -> list[list[list[Buffer]] | TidemillError]:
    """The record batches of each table's descriptors, from the bucket alone; of one that cannot be read, the error.

    An object holds what came together, of many tables: it is read once for all of them.
    """
    found = iter(await read_batches(objects, [d.refs for descriptors in tables for d in descriptors]))
    out: list[list[list[Buffer]] | TidemillError] = []
    for descriptors in tables:
        mine = list(islice(found, len(descriptors)))
        error = next((one for one in mine if isinstance(one, TidemillError)), None)
        out.append(error if error is not None else [one for one in mine if not isinstance(one, TidemillError)])
    return out


def fetch_here(portal: Portal, objects: ObjectStore, descriptors: Sequence[Descriptor]) -> Batches:
    """Of one table. Raises what reading raises."""
    (found,) = portal.call(fetch(objects, [descriptors]))
    if isinstance(found, TidemillError):
        raise found
    return found


def decode_here(objects_url: str, feed: TopicFeed, descriptors: Sequence[Descriptor]) -> Decoded:
    """Fetch and decode in a worker process."""
    portal, objects = shared_objects(objects_url)
    return decode(feed, descriptors, fetch_here(portal, objects, descriptors))


PENDING = "pending-{}-{}.arrow"
"""A task's run beside the mirror, by bucket and attempt: the driver takes it in or removes it."""


# a whole task -------------------------------------------------------------------------------------------


class Task(msgspec.Struct, frozen=True):
    """One hash range (bucket of buckets) of one table for [lower, upper)."""

    table: str
    shard_id: str
    writer: str
    feed: TopicFeed
    schema: ShardSchema
    descriptors: tuple[Descriptor, ...]
    lower: int
    upper: int
    bucket: int
    buckets: int
    urls: Urls
    mirror: str
    """Directory of the driver's saved mirror, useful where it is on this machine too."""
    boot: str


class TaskResult(msgspec.Struct, frozen=True):
    """`run`: file of the pending run beside the mirror, or "" where there is none. `inline`: do it over on the driver,
    for a truncation needs every live key at once, and a stop shortens the interval."""

    table: str
    bucket: int
    part: Part | None
    rows: int
    commands: int
    run: str
    dead: bytes
    inline: bool


def run_task(payload: bytes) -> bytes:
    """A Spark task: decode, resolve, write. Parts are named per attempt; only returned ones are ever referenced."""
    task = msgspec.msgpack.decode(payload, type=Task)
    decoded = decode_here(task.urls.objects, task.feed, task.descriptors)
    dead = to_ipc(decoded.dead) if task.bucket == 0 else b""
    mirror = _mirror(task)
    truncates = any(t.order != BEFORE_ALL or not mirror.empty for t in decoded.commands.truncates)
    if truncates or decoded.stop is not None:
        return msgspec.msgpack.encode(TaskResult(task.table, task.bucket, None, 0, 0, "", dead, True))
    commands = _of_bucket(decoded.commands, task)
    resolved = resolve(task.schema, commands, mirror, task.lower, task.upper)
    part, run = None, ""
    if resolved.updates.num_rows:
        portal, objects = shared_objects(task.urls.objects)
        rand = Rand()
        now_ms = SystemClock().now_ms()
        part = portal.call(
            store_part(
                objects, task.shard_id, task.schema, resolved.updates, writer=task.writer, rand=rand, now_ms=now_ms
            )
        )
        run = _keep_run(task, resolved, rand)
    result = TaskResult(
        task.table, task.bucket, part, resolved.updates.num_rows, commands.rows.num_rows, run, dead, False
    )
    return msgspec.msgpack.encode(result)


def _of_bucket(commands: Commands, task: Task) -> Commands:
    if task.buckets == 1:
        return commands
    mine = bucket_of(hash_rows(commands.rows, task.schema.key), task.buckets) == task.bucket
    return Commands(commands.rows.filter(pa.array(mine)))


def _mirror(task: Task) -> Mirror:
    """The driver's mirror if it is here and as of `lower`, else one rebuilt from the shard."""
    found = Mirror.load(Path(task.mirror), task.schema, task.shard_id, task.boot)
    if found is not None and found.upper == task.lower:
        return found
    if task.lower == 0:
        return Mirror(task.schema)
    portal, stores = shared(task.urls)
    shard = portal.call(stores.shard(task.table))
    return Mirror.hydrate(task.schema, portal.call(shard.snapshot(task.lower - 1)), task.lower)


def _keep_run(task: Task, resolved: Resolved, rand: Rand) -> str:
    """The pending run as a file beside the mirror, if that directory is on this machine; else it is read back."""
    directory = Path(task.mirror)
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return ""
    path = directory / PENDING.format(task.bucket, rand.nonce())
    changes = resolved.changes
    write_run(task.schema, Run(changes.rows, changes.hashes, changes.live), path)
    return str(path)


def to_ipc(table: pa.Table) -> bytes:
    if table.num_rows == 0:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def from_ipc(data: bytes, empty: pa.Table) -> pa.Table:
    return pa.ipc.open_stream(data).read_all() if data else empty


def boot_id() -> str:
    """Names this boot of this machine: files that were never synced are trusted within it only."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def concat_changes(runs: Sequence[Run]) -> Run:
    """Runs of disjoint, ascending hash ranges as one."""
    rows = pa.concat_tables([run.rows for run in runs])
    return Run(rows, np.concatenate([run.hashes for run in runs]), np.concatenate([run.live for run in runs]))
