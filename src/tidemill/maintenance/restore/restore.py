"""A cluster brought back from its bucket alone, into empty consensus (RFC 0002 §6): all rooms' parts in order.

    1  claim        consensus is empty, the bucket's cluster shows no sign of life while it is watched, and the bucket
                    is claimed: what is left of the old cluster stops, and any other restore
    2  domains      each goes on from its newest manifest, reopened
    3  logs         partitions, bindings and shards are written back from rows, as rollups
    4  rows         what only the old consensus could vouch for is marked to be looked at again
    5  bucket       the new incarnation is shown
    6  walk         every reference is checked
    7  open         nodes may start

RE1  A run that was cut off is run again: it goes on with the same manifests, and every step finds what was done.
RE2  A restored capture serves nobody before it has compared its slot with what was restored (capture.prepare).
RE3  No committed group offset is beyond its partition's end: what is produced next would be skipped.
RE4  A schema's id that was given after the manifest is not given to another schema: records may hold it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

import msgspec

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import ConflictError, FencedError, UnavailableError, UnknownOutcomeError
from tidemill.consensus.api import Consensus
from tidemill.maintenance.check.rows import check_rows
from tidemill.metastore.backup.restore import (
    Attempt,
    begin,
    finish,
    has_claim,
    read_attempt,
    reset_domain,
    take_bucket,
    take_claim,
)
from tidemill.metastore.backup.restore_source import BucketRows, Source, check_not_alive, find_source
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.check.objects import References
from tidemill.metastore.cluster import Cluster, domain_name, domain_of
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainSettings
from tidemill.metastore.lsm.options import Options
from tidemill.metastore.rows import (
    ABORTED,
    BINDINGS,
    CAPTURE_TABLES,
    CAPTURES,
    EXTENTS,
    GROUP_OFFSETS,
    GROUPS,
    NODES,
    PARTITIONS,
    REGISTRY_HEADS,
    SHARD_BATCHES,
    SHARDS,
    TOPICS,
)
from tidemill.metastore.rows.captures import CaptureRow, TableSnapshot
from tidemill.metastore.rows.groups import GroupRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.objects.store import ObjectStore
from tidemill.shards.bindings.remap import decode_stored
from tidemill.shards.state.checkpoint import assemble, decode_header
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.restore import restore_bindings, restore_shard
from tidemill.topics.lifecycle.restore import restore_partition, restore_registers
from tidemill.topics.partition.row_codec import partition_state

LEAD_TIMEOUT_S = 60.0
SCHEMA_IDS_LEFT_OUT = 10_000
"""More than a registry gives within one persist interval (RE4)."""

COMMIT_ATTEMPTS = 20
COMMIT_PAUSE_S = 0.2
SETTINGS = DomainSettings(options=Options(gc_delay_ms=24 * 3_600_000))
"""Nothing is collected while a restore runs, however long: it, and a second run of it, read the files of the manifest
it began with, and a merge may have replaced them.
"""
WRITTEN_AT_ONCE = 8

Progress = Callable[[str, int, int], None]
"""(what, done, total); total 0 = unknown."""


class Restored(NamedTuple):
    cluster: Cluster
    attempt: Attempt
    partitions: int
    bindings: int
    shards: int
    captures_marked: int
    group_offsets_cut: int
    findings: Findings


class Restorer:
    def __init__(
        self, consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, progress: Progress = lambda *_: None
    ) -> None:
        self._consensus = consensus
        self._objects = objects
        self._clock = clock
        self._rand = rand
        self._progress = progress

    async def source(self, chosen: Sequence[str] = ()) -> Source:
        """What `run` would restore: of the attempt under way if there is one (RE1). Raises as `find_source`, Invalid
        when consensus is not empty."""
        attempt = await read_attempt(self._consensus)
        if attempt is None:
            return await find_source(self._objects, self._rand, chosen)
        manifests = [key for key in attempt.manifests if key]
        return await find_source(self._objects, self._rand, manifests, attempt.cluster_manifest)

    async def run(self, chosen: Sequence[str] = ()) -> Restored:
        """Raises Invalid (not empty, alive), Replaced (another restore was first), Corrupt (naming the object),
        Missing, UnavailableError, UnknownOutcomeError."""
        source = await self.source(chosen)
        if not await has_claim(self._consensus, self._objects):
            await check_not_alive(self._objects, source, self._clock, self._progress)
        self._progress("claim", 0, 1)
        attempt = await begin(self._consensus, self._clock, self._rand, source)
        incarnation = (await take_claim(self._consensus, self._objects, self._clock)).incarnation
        async with AsyncExitStack() as stack:
            rows = await BucketRows.open(self._objects, source, self._clock, self._rand)
            stack.push_async_callback(rows.aclose)
            domains = await self._reset(source, stack)
            partitions, ends = await self._partitions(rows, attempt)
            bindings = await self._bindings(rows, attempt)
            shards = await self._shards(rows, attempt)
            await self._registers(rows, incarnation)
            await self._grow_topics(rows, source, domains, ends)
            captures = await self._mark_captures(rows, source, domains, ends)
            cut = await self._groups(rows, source, domains, ends)
            await self._schema_ids(rows, source, domains)
            cluster = await take_bucket(self._consensus, self._objects, self._clock, self._rand, source)
            findings = await self._walk(rows, source.cluster.incarnation)
        cluster = await finish(self._consensus, self._rand)
        return Restored(cluster, attempt, partitions, bindings, shards, captures, cut, findings)

    # domains --------------------------------------------------------------------------------------
    async def _reset(self, source: Source, stack: AsyncExitStack) -> list[Domain]:
        domains: list[Domain] = []
        for index, domain_source in enumerate(source.domains):
            self._progress("domains", index, len(source.domains))
            domain = await Domain.open(
                self._consensus,
                self._objects,
                domain_name(index),
                holder="restore",
                clock=self._clock,
                rand=self._rand,
                settings=SETTINGS,
                own_earlier_life=lambda holder: holder.startswith("restore-"),
            )
            stack.push_async_callback(domain.aclose)
            await domain.until_leading(LEAD_TIMEOUT_S)
            await reset_domain(self._objects, self._rand, domain, domain_source)
            domains.append(domain)
        self._progress("domains", len(domains), len(domains))
        return domains

    # logs -----------------------------------------------------------------------------------------
    async def _partitions(self, rows: BucketRows, attempt: Attempt) -> tuple[int, dict[tuple[str, int], int]]:
        """How many, and the end of each by (topic id, partition)."""
        topics = {row.topic_id for row in await rows.rows(TOPICS)}
        wanted = [row for row in await rows.rows(PARTITIONS) if row.topic_id in topics]
        done = 0
        slots = asyncio.Semaphore(WRITTEN_AT_ONCE)

        async def one(row: PartitionRow) -> None:
            nonlocal done
            topic_id, partition = row.topic_id, row.partition
            async with slots:
                state = partition_state(
                    row,
                    await rows.rows(EXTENTS, topic_id, partition),
                    await rows.rows(ABORTED, topic_id, partition),
                )
                await restore_partition(
                    self._consensus, self._objects, self._rand, topic_id, partition, state, attempt.nonce
                )
            done += 1
            self._progress("partitions", done, len(wanted))

        ends = {(row.topic_id, row.partition): row.next_offset for row in wanted}
        await asyncio.gather(*(one(row) for row in wanted))
        return len(wanted), ends

    async def _bindings(self, rows: BucketRows, attempt: Attempt) -> int:
        count = 0
        async for source, bindings in _by_source(rows):
            await restore_bindings(self._consensus, source, bindings, attempt.nonce)
            count += len(bindings)
            self._progress("bindings", count, 0)
        return count

    async def _shards(self, rows: BucketRows, attempt: Attempt) -> int:
        wanted = await rows.rows(SHARDS)
        for index, row in enumerate(wanted):
            self._progress("shards", index, len(wanted))
            batches = [decode_batch(batch.batch) async for batch in rows.each(SHARD_BATCHES, row.name)]
            state = assemble(decode_header(row.header), batches)
            await restore_shard(self._consensus, self._rand, state, attempt.nonce)
        self._progress("shards", len(wanted), len(wanted))
        return len(wanted)

    async def _registers(self, rows: BucketRows, incarnation: int) -> None:
        node_ids = {row.name: row.node_id for row in await rows.rows(NODES) if row.node_id > 0}
        await restore_registers(self._consensus, self._objects, self._rand, incarnation=incarnation, node_ids=node_ids)

    # rows -----------------------------------------------------------------------------------------
    async def _grow_topics(
        self, rows: BucketRows, source: Source, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> None:
        """Domains persist on their own: partitions may come back of which the topic's row does not know yet."""
        counts: dict[str, int] = {}
        for topic_id, partition in ends:
            counts[topic_id] = max(partition + 1, counts.get(topic_id, 0))
        for topic in await rows.rows(TOPICS):
            if counts.get(topic.topic_id, 0) > topic.partitions:
                grown = msgspec.structs.replace(topic, partitions=counts[topic.topic_id])
                await self._commit(domains, _manifests_end(source), *TOPICS.encode(grown))

    async def _mark_captures(
        self, rows: BucketRows, source: Source, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> int:
        """RE2. A table whose topic came back shorter than its snapshot starts over."""
        before = _manifests_end(source)
        topics = {row.name: row for row in await rows.rows(TOPICS)}
        found = await rows.rows(CAPTURES)

        def whole(topic_name: str, snapshot: TableSnapshot | None) -> bool:
            topic = topics.get(topic_name)
            return (
                snapshot is not None
                and topic is not None
                and all(ends.get((topic.topic_id, p), 0) >= offset for p, offset in enumerate(snapshot.offsets))
            )

        for row in found:
            kept = {t: s for t, s in row.snapshots.items() if whole(row.topics.get(t, ""), s)}
            marked: CaptureRow = msgspec.structs.replace(
                row, snapshots=kept, snapshot_done=False, restored=True, taps=()
            )
            await self._commit(domains, before, *CAPTURES.encode(marked))
        for table in await rows.rows(CAPTURE_TABLES):
            short = table
            if table.snapshot is not None and not whole(table.topic, table.snapshot):
                short = msgspec.structs.replace(table, snapshot=None)
            if table.copy is not None:  # what it says of the topic may be more than what came back
                short = msgspec.structs.replace(short, copy=None)
            if short is not table:
                await self._commit(domains, before, *CAPTURE_TABLES.encode(short))
        return len(found)

    async def _groups(
        self, rows: BucketRows, source: Source, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> int:
        """RE3. How many offsets were cut. Groups of the time before head rows get one."""
        before = [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]
        heads = {row.group for row in await rows.rows(GROUPS)}
        cut = 0
        async for row in rows.each(GROUP_OFFSETS):
            if row.group not in heads:
                heads.add(row.group)
                await self._create(domains, *GROUPS.encode(GroupRow(row.group, since_ms=self._clock.now_ms())))
            end = ends.get((row.topic_id, row.partition), 0)
            if row.offset > end:
                cut += 1
                await self._commit(domains, before, *GROUP_OFFSETS.encode(msgspec.structs.replace(row, offset=end)))
        return cut

    async def _schema_ids(self, rows: BucketRows, source: Source, domains: Sequence[Domain]) -> None:
        """RE4. Rows of topics may be newer than the registry's: they are in other domains."""
        before = [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]
        for head in await rows.rows(REGISTRY_HEADS):
            later = msgspec.structs.replace(head, next_id=head.next_id + SCHEMA_IDS_LEFT_OUT)
            await self._commit(domains, before, *REGISTRY_HEADS.encode(later))

    async def _create(self, domains: Sequence[Domain], key: bytes, value: bytes) -> None:
        """A row where none is; another run may have been here."""
        domain = domains[domain_of(key, len(domains))]
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                await domain.commit([(key, value)], expects={key: 0})
                return
            except ConflictError:
                return
            except (UnavailableError, UnknownOutcomeError, FencedError):
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(COMMIT_PAUSE_S)

    async def _commit(self, domains: Sequence[Domain], before: Sequence[int], key: bytes, value: bytes) -> None:
        """Change a row that is as the manifest has it: once it has a seqno above the manifest's (`before`), another run
        has changed it, and the cluster may have been opened since and gone on."""
        index = domain_of(key, len(domains))
        domain = domains[index]
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                await domain.sync()
                row = await domain.get_row(key)
                if row is None or row.seqno > before[index]:
                    return
                await domain.commit([(key, value)], expects={key: row.seqno})
                return
            except (UnavailableError, UnknownOutcomeError, FencedError, ConflictError):
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(COMMIT_PAUSE_S)

    # verifying ------------------------------------------------------------------------------------
    async def _walk(self, rows: BucketRows, incarnation: int) -> Findings:
        """`incarnation`: whose rows they are."""
        findings, references = Findings(self._progress), References()
        await check_rows(rows, findings, references, incarnation)
        await references.check(self._objects, findings, self._clock.now_ms())
        return findings


def _manifests_end(source: Source) -> list[int]:
    """By domain, the last seqno that its manifest holds."""
    return [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]


async def _by_source(rows: BucketRows) -> AsyncIterator[tuple[str, list[bytes]]]:
    """All bindings of one source after another, oldest first, from the first whole one on: those before it were being
    deleted."""
    source, bindings = "", list[bytes]()
    async for row in rows.each(BINDINGS):
        if row.source != source:
            if bindings:
                yield source, bindings
            source, bindings = row.source, []
        if bindings or not decode_stored(row.binding).back:
            bindings.append(row.binding)
    if bindings:
        yield source, bindings
