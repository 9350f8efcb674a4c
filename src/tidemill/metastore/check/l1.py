"""Check of the L1 rows (RFC 0005 §4): extents are contiguous, adjoin the partition's own extents, and their objects
exist.

For each partition that has both rows: reconciled ≤ L1's next ≤ next offset, and L1's start ≤ log start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Protocol, TypeVar

import msgspec

from tidemill.metastore.check.findings import Findings
from tidemill.metastore.check.objects import References
from tidemill.metastore.rows import L1_EXTENTS, L1_OBJECTS, L1_PARTITIONS
from tidemill.metastore.rows.l1 import L1ExtentRow, L1PartitionRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.metastore.rows.row_family import Family

R = TypeVar("R", bound=msgspec.Struct)
Place = tuple[str, int]

FIX = "Restore from an older manifest, or report it with the row's key."


class L1RowReader(Protocol):
    def __call__(self, family: Family[R]) -> AsyncIterator[R]:
        """Yield the decodable rows of a family; others become findings."""
        ...


class L1Check:
    """L1 check. `partitions`: the rows that copy partition logs, of existing topics."""

    def __init__(
        self, each: L1RowReader, findings: Findings, references: References, partitions: Mapping[Place, PartitionRow]
    ) -> None:
        self._each = each
        self._findings = findings
        self._references = references
        self._partitions = partitions
        self._rows: dict[Place, L1PartitionRow] = {}
        self._live: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        async for row in self._each(L1_PARTITIONS):
            if (row.topic_id, row.partition) in self._partitions:
                self._rows[row.topic_id, row.partition] = row
            else:
                self._findings.orphans["L1 rows of deleted topics"] += 1
        for place, copy in self._partitions.items():
            self._check_partition(place, copy)
        await self._check_extents()
        await self._check_objects()

    def _check_partition(self, place: Place, copy: PartitionRow) -> None:
        row = self._rows.get(place)
        if row is None:
            if copy.reconciled > copy.log_start:
                self._add_finding(
                    place, f"its offsets {copy.log_start} to {copy.reconciled} are missing: L1 has no row"
                )
            return
        if not copy.reconciled <= row.next <= copy.next_offset:
            problem = f"L1 ends at {row.next}, not between {copy.reconciled} and {copy.next_offset}"
            self._add_finding(place, problem)
        if row.start > copy.log_start and copy.reconciled > copy.log_start:
            self._add_finding(place, f"L1 begins at {row.start}, after its log start {copy.log_start}")

    async def _check_extents(self) -> None:
        """Check the extents in key order, in which all extents of a partition follow each other."""
        at: dict[Place, int] = {}
        counts: Counter[Place] = Counter()
        async for extent in self._each(L1_EXTENTS):
            place = (extent.topic_id, extent.partition)
            row = self._rows.get(place)
            if row is None:
                self._findings.orphans["L1 extents without a partition"] += 1
                continue
            counts[place] += 1
            self._live[extent.topic_id, extent.object_id] += extent.weight_bytes
            expected = at.get(place, min(extent.base_offset, row.start))
            if extent.base_offset != expected:
                self._add_finding(place, f"offsets {expected} to {extent.base_offset} of L1 are in no extent")
            at[place] = extent.last_offset + 1
            self._references.add(_extent_name(extent), extent.object_key, extent.index_byte + extent.index_bytes)
        for place, row in self._rows.items():
            if at.get(place, row.start) != row.next or counts[place] != row.extent_count:
                problem = f"L1 has {counts[place]} extents to {at.get(place, row.start)}, its row says"
                self._add_finding(place, f"{problem} {row.extent_count} to {row.next}")

    async def _check_objects(self) -> None:
        topics = {topic_id for topic_id, _ in self._partitions}
        async for row in self._each(L1_OBJECTS):
            if row.topic_id not in topics or not row.registered:
                continue
            live = self._live.pop((row.topic_id, row.object_id), 0)
            if row.total_bytes - row.removed_bytes != live:
                problem = f"{live} bytes of it are referred to, its row says {row.total_bytes - row.removed_bytes}"
                self._findings.add(f"L1 object {row.topic_id}/{row.object_id}", "", problem, FIX)
        for topic_id, object_id in self._live:
            self._findings.add(f"L1 object {topic_id}/{object_id}", "", "extents refer to it but it has no row", FIX)

    def _add_finding(self, place: Place, problem: str) -> None:
        self._findings.add(f"partition {place[0]}/{place[1]}", "", problem, FIX)


def _extent_name(extent: L1ExtentRow) -> str:
    return f"L1 extent {extent.topic_id}/{extent.partition}@{extent.base_offset}"
