"""Check of all rows and their references. Read-only; works on a live cluster's snapshot and on a bucket.

    topic ─► topic id            partition ─► topic           extent ─► partition, object
    capture ─► topics            pipeline ─► shards, sources  batch ─► shard, objects
    binding ─► source            group offset ─► topic        L1's rows: `l1`
    schemas: `registry`

Rows lag behind the logs they describe by up to a checkpoint interval, so no row is compared with a log. Opaque values
are examined by the `Examine` function of the package that owns them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.metastore.check.findings import Findings, RowSource
from tidemill.metastore.check.l1 import L1Check
from tidemill.metastore.check.objects import References
from tidemill.metastore.check.registry import check_registry
from tidemill.metastore.rows import (
    ALL,
    BINDINGS,
    BY_TAG,
    CAPTURE_TABLES,
    CAPTURES,
    CHECKPOINTS,
    EXTENTS,
    GROUP_OFFSETS,
    PARTITIONS,
    PIPELINES,
    SHARD_BATCHES,
    SHARDS,
    TOPIC_IDS,
    TOPICS,
)
from tidemill.metastore.rows.captures import CaptureRow, CaptureTableRow
from tidemill.metastore.rows.catalogue import PipelineRow, TopicRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.metastore.rows.row_family import Family
from tidemill.metastore.rows.shards import ShardRow

R = TypeVar("R", bound=msgspec.Struct)

Examine = Callable[[Any], str]
"""Row → the problem of its opaque part, or ""."""

RESTORE_FIX = "Restore from an older manifest, or report it with the row's key."


class Checker:
    """Check of one source of rows. `examine`: by family name. `restores`: number of restores of the cluster so far."""

    def __init__(
        self,
        rows: RowSource,
        findings: Findings,
        references: References,
        examine: Mapping[str, Examine] | None = None,
        restores: int = 0,
    ) -> None:
        self._source = rows
        self._findings = findings
        self._references = references
        self._examine = dict(examine or {})
        self._restores = restores
        self.topics: dict[str, TopicRow] = {}
        """Topics by id."""
        self.partitions: dict[tuple[str, int], PartitionRow] = {}
        self.captures: dict[str, CaptureRow] = {}
        self.captured: dict[tuple[str, str], CaptureTableRow] = {}
        self.shards: dict[str, ShardRow] = {}
        self._met: set[tuple[str, int]] = set()
        self.gathered_ms = 0
        """Time of the oldest completed checkpoint over all domains; 0 = never."""

    async def run(self) -> None:
        """Check everything. Raises UnavailableError; every other problem is a finding."""
        await self._check_tags()
        await self._check_topics()
        await self._check_partitions()
        await self._check_extents()
        await L1Check(self._decodable_rows, self._findings, self._references, self.partitions).run()
        await self._check_captures()
        await self._check_bindings()
        await self._check_shards()
        await self._check_batches()
        await self._check_pipelines()
        await self._check_groups()
        await check_registry(self._decodable_rows, self._findings)
        complete = [row.gathered_ms async for row in self._decodable_rows(CHECKPOINTS)]
        self.gathered_ms = min(complete, default=0)

    async def _decodable_rows(self, family: Family[R]) -> AsyncIterator[R]:
        """Yield the decodable rows of a family; others become findings."""
        examine = self._examine.get(family.name)
        async for keys, values in self._source.prefix(family.prefix()):
            self._findings.progress(f"{family.name} rows", self._findings.walked[family.name], 0)
            for key, value in zip(keys, values, strict=True):
                try:
                    row = family.decode(key, value)
                except (CorruptError, InvalidError) as error:
                    self._findings.add(f"{family.name} row {key.hex()}", "", error.message.rstrip("."), RESTORE_FIX)
                    continue
                self._findings.walked[family.name] += 1
                problem = examine(row) if examine is not None else ""
                if problem:
                    self._findings.add(f"{family.name} row {key.hex()}", "", problem.rstrip("."), RESTORE_FIX)
                yield row

    async def _check_tags(self) -> None:
        """Check that every key belongs to a known family (tag 0 belongs to the domains)."""
        known = {0, *BY_TAG}
        for tag in range(256):
            if tag in known:
                continue
            async for keys, _ in self._source.prefix(bytes([tag])):
                fix = "Upgrade tidemill: a newer version wrote them."
                self._findings.add(f"rows with tag {tag:02x}", "", f"{len(keys)} or more of an unknown family", fix)
                break
        assert len(ALL) == len(BY_TAG)

    # topics ---------------------------------------------------------------------------------------
    async def _check_topics(self) -> None:
        by_name: dict[str, TopicRow] = {}
        async for row in self._decodable_rows(TOPICS):
            by_name[row.name] = row
            if row.topic_id in self.topics:
                self._add_finding(
                    f"topic {row.name}", f"topic id {row.topic_id}", "another topic has this id", RESTORE_FIX
                )
            self.topics[row.topic_id] = row
        ids = {row.topic_id: row.name async for row in self._decodable_rows(TOPIC_IDS)}
        fix = "Rewrite the topic's row by changing its configuration."
        for topic_id, name in ids.items():
            if name not in by_name or by_name[name].topic_id != topic_id:
                self._add_finding(f"topic id {topic_id}", f"topic {name}", "no topic of this name has this id", fix)
        for name, row in by_name.items():
            if row.topic_id not in ids:
                self._add_finding(f"topic {name}", f"topic id {row.topic_id}", "its id row is missing", fix)

    async def _check_partitions(self) -> None:
        async for row in self._decodable_rows(PARTITIONS):
            subject = f"partition {row.topic_id}/{row.partition}"
            topic = self.topics.get(row.topic_id)
            if topic is None:
                # The next checkpoint deletes the rows of a deleted topic.
                self._findings.orphans["partition rows of deleted topics"] += 1
                continue
            if row.partition >= topic.partitions:
                # The topic grew, and the partition's domain was persisted first. A restore counts the restored rows.
                self._findings.orphans["partition rows beyond their topic's count"] += 1
            if not 0 <= row.log_start <= row.next_offset:
                problem = f"its log start {row.log_start} is beyond its next offset {row.next_offset}"
                self._add_finding(subject, "", problem, RESTORE_FIX)
            self.partitions[row.topic_id, row.partition] = row

    async def _check_extents(self) -> None:
        """Check the extents in key order, in which all extents of a partition follow each other."""
        place: tuple[str, int] | None = None
        at = 0
        async for extent in self._decodable_rows(EXTENTS):
            mine = (extent.topic_id, extent.partition)
            if mine != place:
                self._check_last_extent(place, at)
                place, at = mine, -1
            row = self.partitions.get(mine)
            if row is None:
                self._findings.orphans["extents without a partition"] += 1
                continue
            if extent.base_offset >= row.next_offset:
                continue  # written before its partition row, which will follow
            subject = f"extent {extent.topic_id}/{extent.partition}@{extent.base_offset}"
            expected = row.hot_start if at < 0 else at
            if extent.base_offset > expected or (at >= 0 and extent.base_offset != at):
                self._add_finding(subject, f"partition {extent.topic_id}/{extent.partition}",
                          f"offsets {expected} to {extent.base_offset} are in no extent", RESTORE_FIX)  # fmt: skip
            at = extent.last_offset + 1
            self._references.add(subject, extent.object_key, extent.first_byte + extent.size_bytes)
        self._check_last_extent(place, at)
        # Partitions with records but without any extent were not met above.
        for mine, row in self.partitions.items():
            if row.next_offset > row.hot_start and mine not in self._met:
                problem = f"none of its offsets {row.hot_start} to {row.next_offset} is in an extent"
                self._add_finding(f"partition {mine[0]}/{mine[1]}", "", problem, RESTORE_FIX)

    def _check_last_extent(self, place: tuple[str, int] | None, at: int) -> None:
        row = self.partitions.get(place) if place is not None else None
        if row is None or place is None:
            return
        self._met.add(place)
        if max(at, row.hot_start) != row.next_offset:
            self._add_finding(
                f"partition {place[0]}/{place[1]}",
                "",
                f"offsets {max(at, row.hot_start)} to {row.next_offset} are in no extent",
                RESTORE_FIX,
            )

    # captures and bindings ------------------------------------------------------------------------
    async def _check_captures(self) -> None:
        names = {row.name: row for row in self.topics.values()}
        async for row in self._decodable_rows(CAPTURES):
            self.captures[row.name] = row
        async for found in self._decodable_rows(CAPTURE_TABLES):
            self.captured[found.capture, found.table] = found
            if found.capture not in self.captures:
                self._findings.orphans["tables of captures that are gone"] += 1
        for table in self.captured.values():
            if table.snapshot is not None and table.state == "captured" and table.topic not in names:
                self._add_finding(f"capture {table.capture}", f"topic {table.topic}",
                          f"the topic of its table {table.table} does not exist",
                          f"Run tidemill capture resnapshot {table.table}.")  # fmt: skip

    async def _check_bindings(self) -> None:
        sources = {f"capture/{name}" for name in self.captures}
        sources |= {f"topic/{row.name}" for row in self.topics.values()}
        source, time_ms, position, begins = "", -1, -1, 0
        async for row in self._decodable_rows(BINDINGS):
            if row.source != source:
                source, time_ms, position, begins = row.source, -1, row.log_position - 1, self._restores
                if source not in sources:
                    self._findings.orphans["bindings of deleted sources"] += 1
            if row.log_position <= position and begins:
                begins -= 1  # the log of a restored cluster starts at 0, even if the earlier one had been truncated
            elif row.time_ms <= time_ms or row.log_position <= position:
                self._add_finding(
                    f"binding {source}@{row.time_ms}", "", "it does not follow the one before it", RESTORE_FIX
                )
            elif row.log_position != position + 1 and time_ms >= 0:
                self._add_finding(f"binding {source}@{row.time_ms}", "",
                          f"{row.log_position - position - 1} bindings before it are missing", RESTORE_FIX)  # fmt: skip
            time_ms, position = row.time_ms, row.log_position

    # shards ---------------------------------------------------------------------------------------
    async def _check_shards(self) -> None:
        async for row in self._decodable_rows(SHARDS):
            self.shards[row.name] = row
            if row.since and row.since >= row.upper:
                self._add_finding(
                    f"table {row.name}", "", f"since {row.since} is not below upper {row.upper}", RESTORE_FIX
                )

    async def _check_batches(self) -> None:
        reached: dict[str, int] = {}
        async for row in self._decodable_rows(SHARD_BATCHES):
            shard = self.shards.get(row.name)
            if shard is None:
                self._findings.orphans["batches without a table"] += 1
                continue
            at = reached.get(row.name, 0)
            if row.lower >= shard.upper:
                continue  # written before its shard row, which will follow
            if row.lower != at:
                self._add_finding(f"batch {row.name}@{row.lower}", f"table {row.name}",
                          f"the batch before it ends at {at}", RESTORE_FIX)  # fmt: skip
            reached[row.name] = row.upper
            for key in row.objects:
                self._references.add(f"batch {row.name}@{row.lower}", key, 1)
        for name, shard in self.shards.items():
            if reached.get(name, 0) < shard.upper:
                self._add_finding(
                    f"table {name}", "", f"times {reached.get(name, 0)} to {shard.upper} are in no batch", RESTORE_FIX
                )

    async def _check_pipelines(self) -> None:
        topics = {row.name for row in self.topics.values()}
        async for row in self._decodable_rows(PIPELINES):
            self._check_pipeline(row, topics)

    def _check_pipeline(self, row: PipelineRow, topics: set[str]) -> None:
        subject = f"pipeline {row.name}"
        for shard, source in row.tables.items():
            kind, _, name = source.partition(":")
            capture, _, table = name.partition(":")
            ready = kind == "derived"
            if kind == "capture":
                found = self.captured.get((capture, table))
                ready = found is not None and found.snapshot is not None
                if found is None:
                    problem = f"it does not capture {table}, which feeds {shard}"
                    self._add_finding(
                        subject, f"capture {capture}", problem, "Correct the capture's tables, or the pipeline."
                    )
            elif kind == "topic":
                ready = name in topics
                if not ready:
                    self._add_finding(subject, f"topic {name}", f"the topic that feeds {shard} does not exist",
                              "Create it: tidemill topic create.")  # fmt: skip
            if ready and shard not in self.shards:
                self._findings.orphans["tables of pipelines that are not stored yet"] += 1

    async def _check_groups(self) -> None:
        async for row in self._decodable_rows(GROUP_OFFSETS):
            if row.topic_id not in self.topics:
                self._findings.orphans["group offsets of deleted topics"] += 1

    def _add_finding(self, subject: str, target: str, problem: str, fix: str) -> None:
        self._findings.add(subject, target, problem, fix)
