"""Commit boundaries on their way from the stream to a binding. Pure data and one pure rule."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.base.lsn import ChangePosition
from tidemill.capture.postgres.pg_snapshot import is_xid_visible
from tidemill.metastore.catalogue import TableSnapshot


class CommitBoundary(msgspec.Struct, frozen=True):
    """The end of one transaction (or, with `commit` false, of WAL without one, from a keepalive).

    lsn       inclusive: every transaction whose commit record starts at or below it is covered
    offsets   (topic id, partition, next offset) of the partitions that it touched
    tags      contents of its markers
    """

    lsn: int
    last: ChangePosition
    commit: bool
    commit_time_ms: int = 0
    offsets: Sequence[tuple[str, int, int]] = ()
    tags: tuple[str, ...] = ()


def merge_boundaries(earlier: CommitBoundary, later: CommitBoundary) -> CommitBoundary:
    """Merge two successive boundaries, the earlier of which has no tags, to one with everything that a binding at the
    later one needs.
    """
    offsets = {(topic_id, partition): offset for topic_id, partition, offset in (*earlier.offsets, *later.offsets)}
    newest = later if later.commit else earlier
    return CommitBoundary(
        lsn=later.lsn,
        last=newest.last,
        commit=newest.commit,
        commit_time_ms=max(earlier.commit_time_ms, later.commit_time_ms),
        offsets=tuple((topic_id, partition, offset) for (topic_id, partition), offset in offsets.items()),
        tags=later.tags,
    )


def is_in_snapshot(xid: int, commit_lsn: int, snapshot: TableSnapshot | None) -> bool:
    """Return whether the stream must skip this transaction, because the snapshot contains it.

    A transaction that the snapshot sees wrote its commit record before the snapshot was taken, so a commit at or after
    `lsn` is never in it. Below `lsn` the xid decides, since commit records precede visibility. The topic of a table
    that was copied with a side topic also contains everything up to the position where the table joined.
    """
    if snapshot is None or commit_lsn <= snapshot.joined_lsn:
        return snapshot is not None
    return commit_lsn < snapshot.lsn and is_xid_visible(xid, snapshot.xmin, snapshot.xmax, snapshot.xip)
