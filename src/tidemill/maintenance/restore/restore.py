"""Restore of a cluster from its bucket alone, into empty consensus (RFC 0002 §6): the parts of all rooms, in order.

    1  claim        consensus is empty, the bucket's cluster shows no sign of life while it is watched, and the bucket
                    is claimed: remaining processes of the old cluster stop, and so does any other restore
    2  domains      each continues from its newest manifest, reopened
    3  logs         partitions, bindings and shards are written back from rows, as rollups
    4  rows         state that only the old consensus could vouch for is marked to be checked again
    5  bucket       the new incarnation is published
    6  walk         every reference is checked
    7  open         nodes may start

Invariants:

- Repeatable: an interrupted run is run again. It continues with the same manifests, and every step finds what was done.
- Captures compare first: a restored capture serves no consumer before it has compared its slot with what was
  restored.
- Group offsets stay within their partitions: an offset beyond the end would skip the records that are produced next.
- Schema ids are unique: an id that was assigned after the manifest is not assigned to another schema, because records
  may contain it.
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
    begin_attempt,
    claim_for_restore,
    finish_restore,
    has_claimed_bucket,
    publish_manifest,
    read_attempt,
    reset_domain,
)
from tidemill.metastore.backup.restore_source import BucketRows, RestoreSource, check_not_alive, find_source
from tidemill.metastore.check.findings import Findings
from tidemill.metastore.check.objects import References
from tidemill.metastore.cluster import Cluster, domain_name, domain_of
from tidemill.metastore.domain.domain import Domain
from tidemill.metastore.domain.settings import DomainContext, DomainSettings
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
from tidemill.shards.bindings.remap import decode_record
from tidemill.shards.state.checkpoint import assemble_state, decode_header
from tidemill.shards.state.codec import decode_batch
from tidemill.shards.state.restore import restore_bindings, restore_shard
from tidemill.topics.lifecycle.restore import restore_partition, restore_registers
from tidemill.topics.partition.state_machine.row_codec import rebuild_state

LEAD_TIMEOUT_S = 60.0
SCHEMA_IDS_SKIPPED = 10_000
"""Number of schema ids to skip: more than a registry assigns within one persist interval."""

COMMIT_ATTEMPTS = 20
COMMIT_PAUSE_S = 0.2
SETTINGS = DomainSettings(options=Options(gc_delay_ms=24 * 3_600_000))
"""Settings under which nothing is collected while a restore runs, however long. The run, and a repeated one, read
the files of the manifest it began with, which a merge may have replaced."""
CONCURRENT_WRITES = 8

Progress = Callable[[str, int, int], None]
"""Callback with (step, done, total); a total of 0 is unknown."""


class RestoreResult(NamedTuple):
    """Result of a restore: counts of what was written back, and the findings of the walk."""

    cluster: Cluster
    attempt: Attempt
    partitions: int
    bindings: int
    shards: int
    captures_marked: int
    group_offsets_cut: int
    findings: Findings


class Restorer:
    """Restore of one cluster into the given consensus."""

    def __init__(
        self, consensus: Consensus, objects: ObjectStore, clock: Clock, rand: Rand, progress: Progress = lambda *_: None
    ) -> None:
        self._consensus = consensus
        self._objects = objects
        self._clock = clock
        self._rand = rand
        self._progress = progress

    async def find_restore_source(self, chosen: Sequence[str] = ()) -> RestoreSource:
        """Return what `run` would restore; the source of the unfinished attempt if there is one. Raises the errors
        of `find_source`, and InvalidError when consensus is not empty."""
        attempt = await read_attempt(self._consensus)
        if attempt is None:
            return await find_source(self._objects, self._rand, chosen)
        manifests = [key for key in attempt.manifests if key]
        return await find_source(self._objects, self._rand, manifests, attempt.cluster_manifest)

    async def run(self, chosen: Sequence[str] = ()) -> RestoreResult:
        """Run the restore. Raises InvalidError (consensus is not empty, or the cluster is alive),
        ClusterReplacedError (another restore was first), CorruptError (naming the object), MissingError,
        UnavailableError, UnknownOutcomeError."""
        source = await self.find_restore_source(chosen)
        if not await has_claimed_bucket(self._consensus, self._objects):
            await check_not_alive(self._objects, source, self._clock, self._progress)
        self._progress("claim", 0, 1)
        attempt = await begin_attempt(self._consensus, self._clock, self._rand, source)
        incarnation = (await claim_for_restore(self._consensus, self._objects, self._clock, self._rand)).incarnation
        async with AsyncExitStack() as stack:
            rows = await BucketRows.open(self._objects, source, self._clock, self._rand)
            stack.push_async_callback(rows.aclose)
            domains = await self._reset_domains(source, stack)
            partitions, ends = await self._restore_partitions(rows, attempt)
            bindings = await self._restore_bindings(rows, attempt)
            shards = await self._restore_shards(rows, attempt)
            await self._restore_registers(rows, incarnation)
            await self._grow_topics(rows, source, domains, ends)
            captures = await self._mark_captures(rows, source, domains, ends)
            cut = await self._cut_group_offsets(rows, source, domains, ends)
            await self._skip_schema_ids(rows, source, domains)
            cluster = await publish_manifest(self._consensus, self._objects, self._clock, self._rand, source)
            findings = await self._check_references(rows, source.cluster.incarnation)
        cluster = await finish_restore(self._consensus, self._rand)
        return RestoreResult(cluster, attempt, partitions, bindings, shards, captures, cut, findings)

    # domains --------------------------------------------------------------------------------------
    async def _reset_domains(self, source: RestoreSource, stack: AsyncExitStack) -> list[Domain]:
        domains: list[Domain] = []
        for index, domain_source in enumerate(source.domains):
            self._progress("domains", index, len(source.domains))
            domain = await Domain.open(
                DomainContext(
                    self._consensus,
                    self._objects,
                    domain_name(index),
                    holder="restore",
                    clock=self._clock,
                    rand=self._rand,
                    settings=SETTINGS,
                ),
                own_earlier_life=lambda holder: holder.startswith("restore-"),
            )
            stack.push_async_callback(domain.aclose)
            await domain.wait_until_leading(LEAD_TIMEOUT_S)
            await reset_domain(self._objects, self._rand, domain, domain_source)
            domains.append(domain)
        self._progress("domains", len(domains), len(domains))
        return domains

    # logs -----------------------------------------------------------------------------------------
    async def _restore_partitions(self, rows: BucketRows, attempt: Attempt) -> tuple[int, dict[tuple[str, int], int]]:
        """Restore the logs of partitions. Return their number, and the end of each by (topic id, partition)."""
        topics = {row.topic_id for row in await rows.rows(TOPICS)}
        wanted = [row for row in await rows.rows(PARTITIONS) if row.topic_id in topics]
        done = 0
        slots = asyncio.Semaphore(CONCURRENT_WRITES)

        async def one(row: PartitionRow) -> None:
            nonlocal done
            topic_id, partition = row.topic_id, row.partition
            async with slots:
                state = rebuild_state(
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

    async def _restore_bindings(self, rows: BucketRows, attempt: Attempt) -> int:
        count = 0
        async for source, bindings in _bindings_by_source(rows):
            await restore_bindings(self._consensus, source, bindings, attempt.nonce)
            count += len(bindings)
            self._progress("bindings", count, 0)
        return count

    async def _restore_shards(self, rows: BucketRows, attempt: Attempt) -> int:
        wanted = await rows.rows(SHARDS)
        for index, row in enumerate(wanted):
            self._progress("shards", index, len(wanted))
            batches = [decode_batch(batch.batch) async for batch in rows.iterate(SHARD_BATCHES, row.name)]
            state = assemble_state(decode_header(row.header), batches)
            await restore_shard(self._consensus, self._rand, state, attempt.nonce)
        self._progress("shards", len(wanted), len(wanted))
        return len(wanted)

    async def _restore_registers(self, rows: BucketRows, incarnation: int) -> None:
        node_ids = {row.name: row.node_id for row in await rows.rows(NODES) if row.node_id > 0}
        await restore_registers(self._consensus, self._objects, self._rand, incarnation=incarnation, node_ids=node_ids)

    # rows -----------------------------------------------------------------------------------------
    async def _grow_topics(
        self, rows: BucketRows, source: RestoreSource, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> None:
        """Add partitions to topics. Domains persist independently, so restored partitions may be unknown to the
        topic's row."""
        counts: dict[str, int] = {}
        for topic_id, partition in ends:
            counts[topic_id] = max(partition + 1, counts.get(topic_id, 0))
        for topic in await rows.rows(TOPICS):
            if counts.get(topic.topic_id, 0) > topic.partitions:
                grown = msgspec.structs.replace(topic, partitions=counts[topic.topic_id])
                await self._change_row(domains, _last_manifest_seqnos(source), *TOPICS.encode(grown))

    async def _mark_captures(
        self, rows: BucketRows, source: RestoreSource, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> int:
        """Mark captures to compare their slots first. A table whose topic came back shorter than its snapshot starts
        over."""
        before = _last_manifest_seqnos(source)
        topics = {row.name: row for row in await rows.rows(TOPICS)}
        found = await rows.rows(CAPTURES)

        def is_complete(topic_name: str, snapshot: TableSnapshot | None) -> bool:
            topic = topics.get(topic_name)
            return (
                snapshot is not None
                and topic is not None
                and all(ends.get((topic.topic_id, p), 0) >= offset for p, offset in enumerate(snapshot.offsets))
            )

        for row in found:
            marked: CaptureRow = msgspec.structs.replace(row, snapshot_done=False, restored=True, taps=())
            await self._change_row(domains, before, *CAPTURES.encode(marked))
        for table in await rows.rows(CAPTURE_TABLES):
            short = table
            if table.snapshot is not None and not is_complete(table.topic, table.snapshot):
                short = msgspec.structs.replace(table, snapshot=None)
            if table.copy is not None:  # its record of the copy may exceed what was restored of the topic
                short = msgspec.structs.replace(short, copy=None)
            if short is not table:
                await self._change_row(domains, before, *CAPTURE_TABLES.encode(short))
        return len(found)

    async def _cut_group_offsets(
        self, rows: BucketRows, source: RestoreSource, domains: Sequence[Domain], ends: dict[tuple[str, int], int]
    ) -> int:
        """Cut offsets at the ends of their partitions and return how many were cut. Groups from before head rows
        existed get one."""
        before = [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]
        heads = {row.group for row in await rows.rows(GROUPS)}
        cut = 0
        async for row in rows.iterate(GROUP_OFFSETS):
            if row.group not in heads:
                heads.add(row.group)
                await self._create_row(domains, *GROUPS.encode(GroupRow(row.group, since_ms=self._clock.now_ms())))
            end = ends.get((row.topic_id, row.partition), 0)
            if row.offset > end:
                cut += 1
                await self._change_row(domains, before, *GROUP_OFFSETS.encode(msgspec.structs.replace(row, offset=end)))
        return cut

    async def _skip_schema_ids(self, rows: BucketRows, source: RestoreSource, domains: Sequence[Domain]) -> None:
        """Skip schema ids. Rows of topics may be newer than the registry's, because they are in other domains."""
        before = [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]
        for head in await rows.rows(REGISTRY_HEADS):
            later = msgspec.structs.replace(head, next_id=head.next_id + SCHEMA_IDS_SKIPPED)
            await self._change_row(domains, before, *REGISTRY_HEADS.encode(later))

    async def _create_row(self, domains: Sequence[Domain], key: bytes, value: bytes) -> None:
        """Create a missing row; an earlier run may have created it."""
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

    async def _change_row(self, domains: Sequence[Domain], before: Sequence[int], key: bytes, value: bytes) -> None:
        """Change a row that is still as in the manifest. A seqno above the manifest's (`before`) means that an
        earlier run has changed it; the cluster may since have been opened and have changed it again."""
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
    async def _check_references(self, rows: BucketRows, incarnation: int) -> Findings:
        """Check all restored rows. `incarnation` is that of the cluster whose rows they are."""
        findings, references = Findings(self._progress), References()
        await check_rows(rows, findings, references, incarnation)
        await references.check(self._objects, findings, self._clock.now_ms())
        return findings


def _last_manifest_seqnos(source: RestoreSource) -> list[int]:
    """Return, by domain, the last seqno that its manifest holds."""
    return [domain.manifest.last_seqno if domain.manifest is not None else 0 for domain in source.domains]


async def _bindings_by_source(rows: BucketRows) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield all bindings of one source after another, oldest first, starting with the first whole one: deltas before
    it belong to a prefix that was being deleted."""
    source, bindings = "", list[bytes]()
    async for row in rows.iterate(BINDINGS):
        if row.source != source:
            if bindings:
                yield source, bindings
            source, bindings = row.source, []
        if bindings or not decode_record(row.binding).back:
            bindings.append(row.binding)
    if bindings:
        yield source, bindings
