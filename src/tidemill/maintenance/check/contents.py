"""Check of every stored byte against its checksum, for `tidemill doctor --deep --contents`.

    tables   the parts of each shard, inline ones too: from its log in consensus, else from the rows of the checkpoint
    l0       footer, and every record batch of every region
    l1       footer, indexes, and every record batch of every region

The deep check itself reads blocks of the metastore's files, manifests and rollups. A part that was written before parts
had checksums is decoded instead. An object that was collected during the walk is no finding. Neither is an L0 object
without a footer that no log names: power loss interrupted its upload (`ObjectStore.put_unpublished`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import TypeVar

import crc32c
import pyarrow as pa

from tidemill.base.errors import CorruptError, InvalidError, MissingError
from tidemill.consensus.api import Consensus
from tidemill.metastore.check.findings import Findings, RowSource
from tidemill.metastore.check.objects import FIX
from tidemill.metastore.rows import SHARD_BATCHES
from tidemill.metastore.rows.catalogue import TopicRow
from tidemill.objects.store import Buffer, ObjectMeta, ObjectStore
from tidemill.shards.api import Batch, Part
from tidemill.shards.parts.checksums import open_part
from tidemill.shards.registry import list_created_shards
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.state_machine import shard_replica
from tidemill.topics.batch import parse_header
from tidemill.topics.batch.columns_trailer import read_trailer, trailer_bytes
from tidemill.topics.batch.header import CRC_START
from tidemill.topics.l0 import format as l0
from tidemill.topics.l1 import format as l1
from tidemill.topics.partition.recovery import catch_up, partition_log
from tidemill.topics.partition.state_machine.state import PartitionState

T = TypeVar("T")

CONCURRENT_READS = 4
"""Number of objects read concurrently; memory holds this many parts and L0 objects as a whole."""
READ_BYTES = 8 << 20
"""Size of a single read of an L1 region, except for a larger batch."""


async def check_contents(
    objects: ObjectStore,
    findings: Findings,
    consensus: Consensus | None,
    rows: RowSource | None,
    topics: Collection[TopicRow],
) -> None:
    """Check the contents of tables and topics. `consensus` has the state of shards and partitions; without it `rows`
    have the state. Raises UnavailableError; damage is a finding."""
    if consensus is not None:
        await _check_shards(consensus, objects, findings)
    elif rows is not None:
        await _check_parts(objects, findings, "", [batch async for batch in _batches_from_rows(rows)])
    await _check_listed_objects(objects, findings, l0.PREFIX, "L0 object", _L0Check(consensus, topics, findings).check)
    await _check_listed_objects(objects, findings, "l1/", "L1 object", _check_l1)


# tables -----------------------------------------------------------------------------------------------


async def _check_shards(consensus: Consensus, objects: ObjectStore, findings: Findings) -> None:
    for create in await list_created_shards(consensus):
        replica = shard_replica(consensus, create.shard_id)
        try:
            await replica.catch_up()
            if replica.state is None:
                continue
            for key in await _check_parts(objects, findings, f"table {create.name}", replica.state.batches):
                await replica.catch_up()
                if any(part.object_key == key for batch in replica.state.batches for part in batch.parts):
                    findings.add(f"table {create.name}", key, "the object is missing", FIX)
        except CorruptError:
            continue  # the damaged log is a finding of `logs`


async def _batches_from_rows(rows: RowSource) -> AsyncIterator[Batch]:
    async for keys, values in rows.prefix(SHARD_BATCHES.prefix()):
        for key, value in zip(keys, values, strict=True):
            try:
                yield decode_batch(SHARD_BATCHES.decode(key, value).batch)
            except (CorruptError, InvalidError):
                continue  # a finding of `rows`


async def _check_parts(objects: ObjectStore, findings: Findings, subject: str, batches: Iterable[Batch]) -> list[str]:
    """Check parts and return the keys of those that are missing."""
    missing: list[str] = []
    parts = [part for batch in batches for part in batch.parts]

    async def check(part: Part) -> None:
        try:
            data = await objects.get(part.object_key) if part.object_key else part.inline
            await asyncio.to_thread(_check_part, part, data)
        except MissingError:
            missing.append(part.object_key)
        except CorruptError as error:
            findings.add(subject or "table", part.object_key or "inline part", error.message.rstrip("."), FIX)
        findings.walked["parts"] += 1
        findings.walked["part bytes"] += part.size_bytes
        findings.progress(f"contents of {subject or 'tables'}", findings.walked["parts"], 0)

    await _check_concurrently(parts, check)
    return missing


def _check_part(part: Part, data: Buffer) -> None:
    """Check one part. Raises CorruptError."""
    try:
        file = open_part(part, data)
        rows = file.metadata.num_rows if part.crc >= 0 else file.read(use_threads=False).num_rows
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"the part is unreadable: object={part.object_key or 'inline'} ({error}).") from error
    if rows != part.rows:
        raise CorruptError(
            f"the part has a wrong number of rows: object={part.object_key or 'inline'} rows={rows} want={part.rows}."
        )


# topics -----------------------------------------------------------------------------------------------

Check = Callable[[ObjectStore, ObjectMeta], Awaitable[None]]


async def _check_listed_objects(objects: ObjectStore, findings: Findings, prefix: str, what: str, check: Check) -> None:
    found = [meta async for meta in objects.list(prefix)]

    async def one(meta: ObjectMeta) -> None:
        try:
            await check(objects, meta)
        except MissingError:
            return  # collected during the walk; references to it are findings of `metastore.check.objects`
        except CorruptError as error:
            findings.add(what, meta.key, error.message.rstrip("."), FIX)
        findings.walked[f"{what}s"] += 1
        findings.walked[f"{what.split()[0]} bytes"] += meta.size_bytes
        findings.progress(f"contents of {what}s", findings.walked[f"{what}s"], len(found))

    await _check_concurrently(found, one)


class _L0Check:
    """Check of L0 objects, against the partitions' logs if there is consensus."""

    def __init__(self, consensus: Consensus | None, topics: Collection[TopicRow], findings: Findings) -> None:
        self._consensus = consensus
        self._topics = topics
        self._findings = findings
        self._named: set[str] | None = None
        self._lock = asyncio.Lock()

    async def check(self, objects: ObjectStore, meta: ObjectMeta) -> None:
        data = memoryview(await objects.get(meta.key))
        try:
            regions = l0.decode_footer(data)
        except CorruptError:
            if self._consensus is None or meta.key in await self._read_named(self._consensus, objects):
                raise
            self._findings.orphans["unfinished L0 objects"] += 1
            self._findings.orphan_bytes += meta.size_bytes
            return
        _check_regions(data, regions)

    async def _read_named(self, consensus: Consensus, objects: ObjectStore) -> set[str]:
        """Return the keys that logs name, read once: no log will ever name an object without a footer."""
        async with self._lock:
            if self._named is None:
                named: set[str] = set()
                for topic in self._topics:
                    for partition in range(topic.partitions):
                        log = partition_log(topic.topic_id, partition)
                        state, _ = await catch_up(consensus, objects, log, PartitionState())
                        named |= state.live_objects()
                self._named = named
            return self._named


def _check_regions(data: memoryview, regions: Iterable[l0.L0Region]) -> None:
    for region in regions:
        where = f"partition={region.topic_id}/{region.partition}"
        at, end = region.position, region.position + region.length
        while at < end:
            at += _check_batch(data[at:end], where, at)


async def _check_l1(objects: ObjectStore, meta: ObjectMeta) -> None:
    tail: Buffer = b""
    while isinstance(footer := l1.parse_tail(tail, meta.size_bytes), int):
        tail = await objects.get(meta.key, meta.size_bytes - len(tail) - footer)
    for region in footer.regions:
        where = f"partition={footer.topic_id}/{region.partition}"
        stored = await objects.get(meta.key, region.index_byte, region.index_byte + region.index_bytes)
        index = l1.decode_index(stored, region)
        ends = (index.starts + index.sizes).tolist()
        first = 0
        while first < len(index):
            start = int(index.starts[first])
            last = first
            while last + 1 < len(index) and ends[last + 1] - start <= READ_BYTES:
                last += 1
            read = await objects.get(meta.key, region.first_byte + start, region.first_byte + ends[last])
            view = memoryview(read)
            for number in range(first, last + 1):
                at = int(index.starts[number]) - start
                batch = view[at : at + int(index.sizes[number])]
                place = region.first_byte + start + at
                if _check_batch(batch, where, place) != len(batch):
                    raise CorruptError(f"the size of a record batch differs from its index: {where} byte={place}.")
                if parse_header(batch).base_offset != int(index.bases[number]):
                    raise CorruptError(f"the offset of a record batch differs from its index: {where} byte={place}.")
            first = last + 1


def _check_batch(data: memoryview, where: str, byte: int) -> int:
    """Return the size of the batch at the start of `data`, with its trailer. Raises CorruptError."""
    try:
        header = parse_header(data)
    except InvalidError as error:
        raise CorruptError(f"a record batch is unreadable: {where} byte={byte} ({error.message}).") from error
    size = header.size_bytes
    if not CRC_START < size <= len(data):
        raise CorruptError(f"a record batch has an impossible size: {where} byte={byte} bytes={size}.")
    computed = crc32c.crc32c(data[CRC_START:size])
    if computed != header.crc:
        raise CorruptError(
            f"a record batch is damaged: {where} byte={byte} stored_crc32c={header.crc:08x} "
            f"computed_crc32c={computed:08x}."
        )
    whole = size + trailer_bytes(data, size)
    if whole > size and read_trailer(data[:whole], header.record_count) is None:
        raise CorruptError(
            f"the columns of a record batch are damaged; its records are not: {where} byte={byte + size}."
        )
    return whole


async def _check_concurrently(items: Iterable[T], check: Callable[[T], Awaitable[None]]) -> None:
    """Check all items, CONCURRENT_READS at a time."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await check(item)

    await asyncio.gather(*(some() for _ in range(CONCURRENT_READS)))
