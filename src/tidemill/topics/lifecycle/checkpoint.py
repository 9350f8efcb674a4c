"""Keep the rows of partitions up to date with their logs (RFC 0002 §6), by writing what changed since the last round.

The log of a partition is in consensus. Its rows are in the bucket and hold the same state (`state_machine.row_codec`).
Extents are written before the partition row, so an interrupted write leaves only extents that the partition row does
not reach yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container, Mapping, Set
from typing import Protocol

from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import CorruptError, TidemillError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.consensus.api import Consensus
from tidemill.consensus.change_journal import ChangedLogs
from tidemill.metastore.backup.checkpoint import Group, Unit, gather_readable
from tidemill.metastore.metastore import Metastore
from tidemill.metastore.rows import ABORTED, EXTENTS, PARTITIONS, TOPICS
from tidemill.metastore.rows.partitions import ExtentRow, PartitionRow
from tidemill.objects.store import ObjectStore
from tidemill.topics.partition.recovery import LOG_PREFIX, catch_up, parse_log_name, partition_log
from tidemill.topics.partition.state_machine.row_codec import build_aborted_rows, build_extents, build_partition_row
from tidemill.topics.partition.state_machine.state import PartitionState

CONCURRENT_FOLLOWERS = 16
"""Limit of partition logs that are read concurrently."""

IDLE_ROUNDS_MAX = 60
"""Rounds without a change after which a partition's state is dropped; its next change reads the rollup again."""

SLICE_ROWS = 200
"""Limit of rows in one group, which is written atomically."""

LOOP_SLICE_S = 0.002
"""Time in one turn of the loop for all partitions together: a checkpoint can wait, other tasks of the loop cannot."""

PartitionKey = tuple[str, int]


class RowScan(Protocol):
    def __call__(self, prefix: bytes, *, reverse: bool = False) -> AsyncIterator[tuple[list[bytes], list[bytes]]]:
        """Yield chunks of live rows (keys, values) with the key prefix, ascending, or descending if `reverse`."""
        ...


class PartitionsStage:
    """All partitions of all topics in the catalogue. Implements `metastore.backup.checkpoint.Stage`.

    A round examines only the partitions whose logs changed since they were last written.
    """

    name = "partitions"

    def __init__(self, consensus: Consensus, objects: ObjectStore, metastore: Metastore, clock: Clock) -> None:
        self._pace = CoopBudget(clock, LOOP_SLICE_S)
        self._consensus = consensus
        self._objects = objects
        self._metastore = metastore
        self._logs = ChangedLogs(consensus, LOG_PREFIX)
        self._followers: dict[PartitionKey, PartitionFollower] = {}
        """Followers by partition, the longest idle first."""
        self._gathered: list[PartitionKey] = []
        self._rows: dict[PartitionKey, PartitionRow] = {}
        """Rows found by `load` for partitions that no round has written yet."""
        self._stored: set[str] = set()
        """Ids of topics that have rows."""
        self._gone: set[str] = set()
        self._round = 0
        self.unreadable: dict[str, TidemillError] = {}

    async def load(self) -> None:
        """Start from the stored rows."""
        self._followers.clear()
        self._logs.reset()
        self._rows = {(row.topic_id, row.partition): row for row in await self._metastore.rows(PARTITIONS)}
        self._stored = {topic_id for topic_id, _ in self._rows}

    async def gather(self) -> dict[str, Unit]:
        """Return the rows to write, by `<topic id>/<partition>`, and by topic id for deleted topics.

        Raises UnavailableError.
        """
        self._round += 1
        counts = {row.topic_id: row.partitions for row in await self._metastore.rows(TOPICS)}
        self._gathered = await self._changed_partitions(counts)
        slots = asyncio.Semaphore(CONCURRENT_FOLLOWERS)

        async def follow(follower: PartitionFollower) -> Unit:
            async with slots:
                return await follower.gather(self._metastore.prefix)

        self.unreadable = {}
        for place in self._gathered:
            follower = self._followers.pop(place, None)
            if follower is None:
                row = self._rows.get(place) or await self._metastore.get(PARTITIONS, *place, fresh=False)
                follower = self._follower(*place, row)
            follower.round = self._round
            self._followers[place] = follower
        live = {f"{at[0]}/{at[1]}": follow(self._followers[at]) for at in self._gathered}
        units = await gather_readable(live, self.unreadable)
        self._gone = self._stored - counts.keys()
        for topic_id in sorted(self._gone):
            units[topic_id] = await self._deletions(topic_id)
        return units

    async def _changed_partitions(self, counts: Mapping[str, int]) -> list[PartitionKey]:
        """Return the partitions to examine. `counts` must be read before the logs."""
        places = {place for place in self._rows if place[0] in counts}

        def exists(name: str) -> bool:
            topic_id, partition = parse_log_name(name)
            return partition < counts.get(topic_id, 0)

        silent: list[str] = []
        for name, head in (await self._logs.next_changed(exists)).items():
            if head.next == 0 and parse_log_name(name) not in places:
                silent.append(name)  # Opened, but without any record.
            else:
                places.add(parse_log_name(name))
        self._logs.done(silent)
        return sorted(places)

    def late_things(self, before: Set[str]) -> set[str]:
        """Return the unreadable partitions and the ids of their topics."""
        return {name for thing in self.unreadable for name in (thing, thing.rpartition("/")[0])}

    def mark_written(self, late: Set[str]) -> None:
        for place in self._gathered:
            name, follower = f"{place[0]}/{place[1]}", self._followers[place]
            if name in late:
                # It may have replayed only part of the changes, so the next follower starts from the row.
                self._followers[place] = self._follower(*place, follower.row)
                continue
            follower.written()
            self._logs.done([name])
            self._rows.pop(place, None)
            if follower.row is not None:
                self._stored.add(place[0])
        self._stored -= self._gone
        for place in [at for at in self._followers.keys() | self._rows.keys() if at[0] in self._gone]:
            self._followers.pop(place, None)
            self._rows.pop(place, None)
        self._gone = set()
        self._drop_idle_followers()

    def _drop_idle_followers(self) -> None:
        for place, follower in list(self._followers.items()):
            if follower.round > self._round - IDLE_ROUNDS_MAX:
                break
            del self._followers[place]

    def _follower(self, topic_id: str, partition: int, row: PartitionRow | None) -> PartitionFollower:
        return PartitionFollower(self._consensus, self._objects, topic_id, partition, row, self._pace)

    async def _deletions(self, topic_id: str) -> Unit:
        """Return the deletions of a topic's rows.

        Partition rows are emptied first: a row that counts offsets without extents would be a loss. They are deleted
        last: `load` finds an interrupted deletion by them alone.
        """
        emptied: Group = []
        ended: Group = []
        async for keys, values in self._metastore.prefix(PARTITIONS.prefix(topic_id)):
            for key, value in zip(keys, values, strict=True):
                row = PARTITIONS.decode(key, value)
                empty = replace(
                    row, log_start=row.next_offset, size_bytes=0, terms=(), producers=b"", transactions=b""
                )  # fmt: skip
                emptied.append(PARTITIONS.encode(empty))
                ended.append((key, b""))
        groups = _slice_rows(emptied)
        for family in (EXTENTS, ABORTED):
            async for keys, _ in self._metastore.prefix(family.prefix(topic_id)):
                groups.append([(key, b"") for key in keys])
        return groups + _slice_rows(ended)


class PartitionFollower:
    """Follows one partition's log and computes the missing rows. Batches that are written are released from memory.

    `row` is the partition row in the metastore, or None; `mark_written` updates it.
    """

    def __init__(
        self, consensus: Consensus, objects: ObjectStore, topic_id: str, partition: int, row: PartitionRow | None,
        pace: CoopBudget,
    ) -> None:  # fmt: skip
        self._pace = pace
        self.topic_id = topic_id
        self.partition = partition
        self._consensus = consensus
        self._objects = objects
        self._log = partition_log(topic_id, partition)
        self.row = row
        self.round = 0
        """Round of the stage in which it last changed."""
        self._state = PartitionState()
        self._next_row: PartitionRow | None = row
        self._swept = self._next_swept = False

    async def gather(self, scan: RowScan) -> Unit:
        """Return the groups of rows to write, in this order, each atomically; [] if nothing changed since
        `mark_written`.

        Reads only what was appended to the log. Raises CorruptError (also if the log holds less than the rows),
        UnavailableError.
        """
        pace = self._pace
        self._state, _ = await catch_up(self._consensus, self._objects, self._log, self._state, pace=pace)
        row = self.row or PartitionRow(self.topic_id, self.partition, 0, 0, log_position=-1)
        new = build_partition_row(self._state, self.topic_id, self.partition)
        if new.next_offset < row.next_offset or new.log_start < row.log_start or new.reconciled < row.reconciled:
            # This is another incarnation of the topic id. Rows that may be all that is left of the earlier one are not
            # overwritten.
            raise CorruptError(
                f"a partition's log holds less than its rows: partition={self.topic_id}/{self.partition}"
                f" next_offset={new.next_offset} row={row.next_offset}.",
                fix="Restore consensus (it was replaced without `tidemill restore`), or start with an empty bucket.",
            )
        fresh: list[ExtentRow] = []
        written: list[Group] = []
        for extent in build_extents(self._state, self.topic_id, self.partition, row.next_offset):
            fresh.append(extent)
            written.append([EXTENTS.encode(extent)])
            if pace.is_used_up:
                await pace.wait_for_turn()  # Safe: only this call changes the state.
        new = replace(
            new,
            size_bytes=row.size_bytes + sum(extent.size_bytes for extent in fresh),
            compaction_epoch=row.compaction_epoch,
        )
        if replace(new, log_position=row.log_position) == row:
            return []
        # The row lists transactions as open that a restore ended; they ended at the row's last offset, without a
        # marker.
        aborted_from = row.next_offset - 1 if row.transactions else row.next_offset
        aborted = build_aborted_rows(self._state, self.topic_id, self.partition, aborted_from)
        written += _slice_rows([ABORTED.encode(each) for each in aborted])
        standing = {key for group in written for key, _ in group}
        groups = await self._stale_rows(scan, row.next_offset, standing) if fresh else []
        groups += written
        self._next_swept = self._swept or bool(fresh)
        remembered, before = (max(each.log_start, each.aborted_start) for each in (new, row))
        if new.hot_start > row.hot_start or remembered > before:
            gone = await self._expired_extents(scan, new.hot_start)
            new = replace(new, size_bytes=new.size_bytes - sum(extent.size_bytes for extent in gone))
            # Before its extents are deleted: a partition row never counts an offset that no extent row holds.
            groups.append([PARTITIONS.encode(new)])
            groups += [[(EXTENTS.key_of(extent), b"")] for extent in gone]
            groups += _slice_rows(await self._expired_transactions(scan, remembered))
        else:
            groups.append([PARTITIONS.encode(new)])
        self._next_row = new
        return groups

    def written(self) -> None:
        """Note that the result of the last `gather` is committed."""
        self.row = self._next_row
        self._swept = self._next_swept
        _drop_batches(self._state)

    async def _stale_rows(self, scan: RowScan, next_offset: int, standing: Container[bytes]) -> list[Group]:
        """Return deletions of rows beyond the partition row, once, before the row reaches them.

        Within one incarnation of a log such rows are simply overwritten, because runs are always cut in the same way.
        But a manifest may hold extents and aborted transactions without their partition row, and the log that was
        restored from it continues with other batches.
        """
        if self._swept:
            return []
        stale: Group = []
        for family in (EXTENTS, ABORTED):
            async for keys, _ in scan(family.prefix(self.topic_id, self.partition), reverse=True):
                past = [key for key in keys if key >= family.key(self.topic_id, self.partition, next_offset)]
                stale += [(key, b"") for key in past if key not in standing]
                if len(past) < len(keys):
                    break
        return _slice_rows(stale)

    async def _expired_extents(self, scan: RowScan, start: int) -> list[ExtentRow]:
        """Return the stored extents that are wholly below `start`."""
        found: list[ExtentRow] = []
        async for keys, values in scan(EXTENTS.prefix(self.topic_id, self.partition)):
            for key, value in zip(keys, values, strict=True):
                extent = EXTENTS.decode(key, value)
                if extent.last_offset >= start:
                    return found
                found.append(extent)
        return found

    async def _expired_transactions(self, scan: RowScan, start: int) -> Group:
        """Return deletions of the transactions that were aborted wholly below `start`."""
        found: Group = []
        async for keys, values in scan(ABORTED.prefix(self.topic_id, self.partition)):
            for key, value in zip(keys, values, strict=True):
                if ABORTED.decode(key, value).last_offset >= start:
                    return found
                found.append((key, b""))
        return found


def _slice_rows(rows: Group) -> list[Group]:
    return [rows[at : at + SLICE_ROWS] for at in range(0, len(rows), SLICE_ROWS)]


def _drop_batches(state: PartitionState) -> None:
    """Drop the batches: for later commands `apply` needs only the high watermark and the open transactions."""
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
    state.aborted.clear()
