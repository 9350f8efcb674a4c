"""The job `group-offsets`: delete offsets that are not needed any more, and groups without offsets, from the metastore.

    of a deleted topic       immediately: a topic id is never reused. Groups are read first and topics afterwards, so
                             a topic to which a group has committed and that is missing now was deleted
    of a group without       after no member was in it, and nothing was committed, for `retention.group_offsets_s`, or
    members                  for the time that the commit requested (Kafka's offsets.retention.minutes)
    head rows of groups      an hour after the last member of a group without offsets left

Every deletion expects the head row and each offset as they were read: a concurrent commit of an offset, or a new
member, wins.
"""

from __future__ import annotations

from tidemill.base.errors import ConflictError, FencedError, UnknownOutcomeError
from tidemill.maintenance.scheduler import JobContext, MaintenanceJob, StepBudget
from tidemill.metastore.rows import GROUP_OFFSETS, GROUPS, TOPICS
from tidemill.metastore.rows.groups import GroupOffsetRow, GroupRow

EMPTY_GROUP_MS = 3_600_000
BATCH_ROWS = 2_000
ROWS_PER_READ = 5_000
"""Number of rows held in memory between two reads of the topics."""


class GroupOffsetsExpiry(MaintenanceJob):
    """The job `group-offsets`."""

    def __init__(self, context: JobContext) -> None:
        self._g = context
        self._dropped = self._expired = self._forgotten = 0
        self._after = ""
        """Group at which the last step ended."""

    def facts(self) -> dict[str, object]:
        return {
            "dropped_offsets": self._dropped,
            "expired_offsets": self._expired,
            "forgotten_groups": self._forgotten,
        }

    async def run(self, budget: StepBudget) -> bool:
        """Visit the groups after the last visited one. Return True when the budget ended before the last group."""
        metastore = self._g.metastore
        heads = [head for head in await metastore.rows(GROUPS) if head.group > self._after]
        while heads:
            found: list[tuple[GroupRow, list[GroupOffsetRow]]] = []
            count = 0
            while heads and count < ROWS_PER_READ:
                head = heads.pop(0)
                found.append((head, await metastore.rows(GROUP_OFFSETS, head.group, fresh=False)))
                count += 1 + len(found[-1][1])
            topics = {row.topic_id for row in await metastore.rows(TOPICS)}
            for head, offsets in found:
                await self._expire_group(head, offsets, topics)
            self._after = found[-1][0].group
            if heads and not budget.has_budget:
                return True
        self._after = ""
        return False

    async def _expire_group(self, head: GroupRow, offsets: list[GroupOffsetRow], topics: set[str]) -> None:
        now_ms = self._g.clock.now_ms()
        gone = [row for row in offsets if row.topic_id not in topics]
        old = [row for row in offsets if row.topic_id in topics and self._is_expired(row, head, now_ms)]
        going = [*gone, *old]
        for at in range(0, len(going), BATCH_ROWS):
            some = going[at : at + BATCH_ROWS]
            if not await self._commit_if_unchanged(head, some, [(GROUP_OFFSETS.key_of(row), b"") for row in some]):
                return
        self._dropped += len(gone)
        self._expired += len(old)
        if len(going) == len(offsets) and not head.members and now_ms - head.since_ms > EMPTY_GROUP_MS:
            self._forgotten += await self._commit_if_unchanged(head, [], [(GROUPS.key_of(head), b"")])

    def _is_expired(self, row: GroupOffsetRow, head: GroupRow, now_ms: int) -> bool:
        if head.members:
            return False
        if row.expire_ms:
            return row.expire_ms <= now_ms
        return now_ms - max(row.commit_ms, head.since_ms) > self._g.retention.group_offsets_ms

    async def _commit_if_unchanged(
        self, head: GroupRow, offsets: list[GroupOffsetRow], rows: list[tuple[bytes, bytes]]
    ) -> bool:
        """Write rows if the head row and these offsets are still as they were read. The next visit handles
        concurrent changes."""
        metastore = self._g.metastore
        expects: dict[bytes, int] = {}
        for key, value in [GROUPS.encode(head), *map(GROUP_OFFSETS.encode, offsets)]:
            found = await metastore.get_row(key, fresh=False)
            if found is None or found.value != value:
                return False
            expects[key] = found.seqno
        try:
            await metastore.commit(rows, expects=expects)
        except (ConflictError, FencedError, UnknownOutcomeError):
            return False
        return True
