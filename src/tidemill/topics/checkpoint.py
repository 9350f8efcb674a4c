"""Keeping the rows of partitions up to date with their logs (RFC 0002 §6): what changed since they were written.

The log of a partition lives in consensus; its rows live in the bucket and hold the same state (`partition.rowform`).
The extents go first and the partition row after them, so rows that were cut off only hold extents that their
partition row does not reach yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Set
from typing import Protocol

from msgspec.structs import replace

from tidemill.base.errors import Corrupt, TidemillError
from tidemill.consensus.api import Consensus
from tidemill.metastore.checkpoint import Group, Unit, each_readable
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import EXTENTS, PARTITIONS, TOPICS
from tidemill.metastore.rows.extents import ExtentRow
from tidemill.metastore.rows.partitions import PartitionRow
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.replay import catch_up, partition_log
from tidemill.topics.partition.rowform import extents, partition_row
from tidemill.topics.partition.state import PartitionState

FOLLOWED_AT_ONCE = 16
"""Partition logs read at the same time."""

SLICE_ROWS = 200
"""Rows made between two turns of the loop: a few milliseconds."""


class Scan(Protocol):
    def __call__(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Key prefix → chunks of live rows (keys, values), ascending, or descending when `reverse`."""
        ...


class PartitionsStage:
    """All partitions of all topics in the catalogue. Implements `metastore.checkpoint.Stage`."""

    name = "partitions"

    def __init__(self, consensus: Consensus, objects: ObjectStore, metastore: Metastore) -> None:
        self._consensus = consensus
        self._objects = objects
        self._metastore = metastore
        self._followers: dict[tuple[str, int], PartitionFollower] = {}
        self._rows: dict[str, dict[int, PartitionRow]] = {}
        """topic id → partition → its row, of partitions nobody follows yet"""
        self._gone: set[str] = set()
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        """Begin from what the rows say."""
        self._followers.clear()
        self._rows.clear()
        for row in await self._metastore.rows(PARTITIONS):
            self._rows.setdefault(row.topic_id, {})[row.partition] = row

    async def gather(self) -> dict[str, Unit]:
        """By `<topic id>/<partition>`, and by topic id where the topic is gone. Raises Unavailable."""
        topics = {row.topic_id: row for row in await self._metastore.rows(TOPICS)}
        for topic in topics.values():
            known = self._rows.pop(topic.topic_id, {})
            for partition in range(topic.partitions):
                place = (topic.topic_id, partition)
                if place not in self._followers:
                    self._followers[place] = self._follower(*place, known.get(partition))
        slots = asyncio.Semaphore(FOLLOWED_AT_ONCE)

        async def follow(follower: PartitionFollower) -> Unit:
            async with slots:
                return await follower.gather(self._metastore.prefix)

        self.unreadable = {}
        live = {f"{at[0]}/{at[1]}": follow(follower) for at, follower in self._followers.items() if at[0] in topics}
        units = await each_readable(live, self.unreadable)
        followed = {topic_id for topic_id, _ in self._followers}
        self._gone = (followed | self._rows.keys()) - topics.keys()
        for topic_id in sorted(self._gone):
            units[topic_id] = await self._deletions(topic_id)
        return units

    def late(self, before: Set[str]) -> set[str]:
        """Unreadable partitions and the ids of their topics."""
        return {name for thing in self.unreadable for name in (thing, thing.rpartition("/")[0])}

    def written(self, late: Set[str]) -> None:
        for place, follower in list(self._followers.items()):
            if place[0] in self._gone:
                del self._followers[place]
            elif f"{place[0]}/{place[1]}" in late:
                # What it has replayed may be half of something: the next one begins from the row.
                self._followers[place] = self._follower(*place, follower.row)
            else:
                follower.written()
        for topic_id in self._gone:
            self._rows.pop(topic_id, None)
        self._gone = set()

    def _follower(self, topic_id: str, partition: int, row: PartitionRow | None) -> PartitionFollower:
        return PartitionFollower(self._consensus, self._objects, topic_id, partition, row)

    async def _deletions(self, topic_id: str) -> Unit:
        """Partition rows first: extents without one are passed over, one without its extents would be a loss (K1)."""
        groups: Unit = []
        for family in (PARTITIONS, EXTENTS):
            async for keys, _ in self._metastore.prefix(family.prefix(topic_id)):
                groups.append([(key, b"") for key in keys])
        return groups


class PartitionFollower:
    """Follows one partition's log and says what its rows lack. Batches that are written leave memory again.

    `row` is the partition row as the metastore holds it, None when there is none; changed by `written`.
    """

    def __init__(
        self, consensus: Consensus, objects: ObjectStore, topic_id: str, partition: int, row: PartitionRow | None
    ) -> None:
        self.topic_id = topic_id
        self.partition = partition
        self._consensus = consensus
        self._objects = objects
        self._log = partition_log(topic_id, partition)
        self.row = row
        self._state = PartitionState()
        self._next_row: PartitionRow | None = row
        self._swept = self._next_swept = False

    async def gather(self, scan: Scan) -> Unit:
        """Groups of rows to write in this order, each group at once; [] when nothing changed since `written`.

        Reads only what the log gained. Raises Corrupt (also when the log holds less than the rows), Unavailable.
        """
        self._state, _ = await catch_up(self._consensus, self._objects, self._log, self._state)
        row = self.row or PartitionRow(self.topic_id, self.partition, 0, 0, log_position=-1)
        new = partition_row(self._state, self.topic_id, self.partition)
        if new.next_offset < row.next_offset or new.log_start < row.log_start:
            # Another life of this topic id: rows that may be all that is left of it are not overwritten.
            raise Corrupt(
                f"a partition's log holds less than its rows: partition={self.topic_id}/{self.partition}"
                f" next_offset={new.next_offset} row={row.next_offset}.",
                fix="Consensus was replaced without `tidemill restore`: restore it, or start with an empty bucket.",
            )
        fresh: list[ExtentRow] = []
        written: list[Group] = []
        for extent in extents(self._state, self.topic_id, self.partition, row.next_offset):
            fresh.append(extent)
            written.append([EXTENTS.encode(extent)])
            if len(fresh) % SLICE_ROWS == 0:
                await asyncio.sleep(0)  # only this call changes the state
        await asyncio.sleep(0)  # many small partitions are as long as a large one
        new = replace(
            new,
            size_bytes=row.size_bytes + sum(extent.size_bytes for extent in fresh),
            compaction_epoch=row.compaction_epoch,
        )
        if replace(new, log_position=row.log_position) == row:
            return []
        groups = await self._sweep(scan, row.next_offset, {group[0][0] for group in written}) if fresh else []
        groups += written
        self._next_swept = self._swept or bool(fresh)
        if new.log_start > row.log_start:
            gone = await self._forgotten(scan, new.log_start)
            new = replace(new, size_bytes=new.size_bytes - sum(extent.size_bytes for extent in gone))
            groups.append([PARTITIONS.encode(new)])  # before its extents go: K1
            groups += [[(EXTENTS.key_of(extent), b"")] for extent in gone]
        else:
            groups.append([PARTITIONS.encode(new)])
        self._next_row = new
        return groups

    def written(self) -> None:
        """What the last `gather` returned is committed."""
        self.row = self._next_row
        self._swept = self._next_swept
        _forget_batches(self._state)

    async def _sweep(self, scan: Scan, next_offset: int, standing: Container[bytes]) -> list[Group]:
        """Deletions of extents past the partition row, once, before the row reaches them.

        In one life of a log they are only written again (K2). But a manifest may hold extents without their partition
        row, and the log that was restored from it goes on with other batches.
        """
        if self._swept:
            return []
        stale: Group = []
        async for keys, values in scan(EXTENTS.prefix(self.topic_id, self.partition), reverse=True):
            for key, value in zip(keys, values, strict=True):
                if EXTENTS.decode(key, value).base_offset < next_offset:
                    return _sliced(stale)
                if key not in standing:
                    stale.append((key, b""))
        return _sliced(stale)

    async def _forgotten(self, scan: Scan, log_start: int) -> list[ExtentRow]:
        """The written extents that lie wholly below the log's start."""
        found: list[ExtentRow] = []
        async for keys, values in scan(EXTENTS.prefix(self.topic_id, self.partition)):
            for key, value in zip(keys, values, strict=True):
                extent = EXTENTS.decode(key, value)
                if extent.last_offset >= log_start:
                    return found
                found.append(extent)
        return found


def _sliced(rows: Group) -> list[Group]:
    return [rows[at : at + SLICE_ROWS] for at in range(0, len(rows), SLICE_ROWS)]


def _forget_batches(state: PartitionState) -> None:
    """What `apply` needs of earlier batches is the high watermark alone."""
    for column in (
        state.bases,
        state.objects,
        state.first_bytes,
        state.sizes,
        state.max_timestamps,
        state.highest_timestamps,
    ):
        del column[:]
    state.object_keys.clear()
