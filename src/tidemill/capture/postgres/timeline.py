"""The history of a PostgreSQL server: the timelines of its WAL, and where it left each of them.

A server that is promoted, or recovered to a point in time, begins a new timeline at the position where it stopped
following the old one. Two histories are equal up to a position, the fork. Beyond it the same LSN is another commit.

    IDENTIFY_SYSTEM       system identifier, timeline, end of the WAL
    TIMELINE_HISTORY n    a line for each timeline before n: its number and the LSN at which it was left
    (https://www.postgresql.org/docs/current/protocol-replication.html)
"""

from __future__ import annotations

import msgspec

from tidemill.base.errors import CorruptError, InvalidError
from tidemill.base.lsn import Lsn
from tidemill.capture.postgres.connection import PgConnection

TimelineHistory = tuple[tuple[int, int], ...]
"""(timeline, LSN at which it was left), the current one last and with 0."""


class Timeline(msgspec.Struct, frozen=True):
    """Identity and history of a server. `wal_end`: everything below is flushed."""

    system_id: str
    history: TimelineHistory
    wal_end: int

    @property
    def number(self) -> int:
        return self.history[-1][0]


async def identify_timeline(wire: PgConnection) -> Timeline:
    """Return the timeline of the server behind a replication connection. Raises CorruptError, UnavailableError."""
    ((system_id, number, wal_end, *_),) = await wire.query("IDENTIFY_SYSTEM")
    earlier: TimelineHistory = ()
    if int(number or 0) > 1:
        ((_, content),) = await wire.query(f"TIMELINE_HISTORY {number}")
        earlier = parse_history(content or "")
    return Timeline(system_id or "", (*earlier, (int(number or 0), 0)), Lsn.parse(wal_end or "0/0").value)


def parse_history(text: str) -> TimelineHistory:
    """Parse a timeline history file: `timeline TAB LSN TAB reason`, oldest first. Raises CorruptError."""
    found = []
    for line in text.splitlines():
        words = line.split(None, 2)
        if not words or words[0].startswith("#"):
            continue
        try:
            found.append((int(words[0]), Lsn.parse(words[1]).value))
        except (IndexError, ValueError, InvalidError) as error:
            raise CorruptError(f"a line of a timeline history cannot be read: line={line[:80]!r}.") from error
    return tuple(found)


def find_fork(known: TimelineHistory, now: TimelineHistory) -> int | None:
    """Return the LSN up to which both histories are the same, exclusive; None = they are equal. Pure."""
    shared = 0
    for (old, old_end), (new, new_end) in zip(known, now, strict=False):
        if old != new:
            return shared
        if old_end != new_end:
            return min(end for end in (old_end, new_end) if end)
        shared = old_end
    return None
