"""Captured databases and their tables. Each table has its own row, so that no row's size grows with the number of
tables.

capture         03 | "" | name text
                system_id, slot, publication, generation, snapshot_done, four unused fields (map, integer, map,
                map), restored, taps array of texts, given_publication, session text, epoch, history array of arrays,
                era, recopied text, recopied_ms
captured table  07 | "" | capture text | table text
                topic, state, reason, fix, paused_lsn, since_ms, oid, generation, snapshot map or nil,
                columns array of maps, recopy, partitions array or nil, evolved array, attributes, storage,
                identities map of arrays, again_ms, again_last_ms, accepted array of maps, envelope text,
                identity text, schemas array of arrays, copy map or nil, side_topic map or nil, publication
                array, attached array
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class TableSnapshot(msgspec.Struct, frozen=True):
    """Finished snapshot of one captured table: what the stream must skip, and where its topic began.

    xmin, xmax, xip     pg_current_snapshot() of the copying transaction (64-bit xids)
    lsn                 WAL insert position right after that snapshot: the snapshot contains no later commit
    offsets             next offset per partition of the topic when the copy ended
    joined_lsn          0, or the position at which the table joined the stream: the topic has the changes of the side
                        topic for every commit up to it, after the copied rows (SideTopicState), and `offsets` are after
                        them
    settled_lsn         0, or WAL insert position right after the youngest snapshot in which a part of the table was
                        read: from there on the topic shows one state of the table, even if the copy was interrupted
    """

    xmin: int
    xmax: int
    xip: tuple[int, ...]
    lsn: int
    rows: int
    offsets: tuple[int, ...]
    settled_lsn: int = 0
    joined_lsn: int = 0

    @property
    def exact_lsn(self) -> int:
        """LSN that the stream must reach before the topic may be bound."""
        return max(self.lsn, self.settled_lsn)

    @property
    def may_lack_from_lsn(self) -> int:
        """First commit LSN of which the topic may lack changes, while no binding covers it."""
        return max(self.lsn, self.joined_lsn + 1)


class TableCopy(msgspec.Struct, frozen=True):
    """Progress of an unfinished copy: what a later session needs to continue it (capture/snapshot/chunks.py).

    xmin, xmax, xip, lsn   of its first snapshot, as in TableSnapshot
    settled_lsn            as in TableSnapshot, for the part that is done
    topic_id               topic that has the rows
    step_blocks, count     the table is divided into `count` ranges of `step_blocks` blocks; the last one has no end
    done                   number of ranges, from the first one on, whose `rows` rows are durable in the topic
    storage, attributes    file that held the rows, and number of columns (capture/catalog/columns.py). If these differ,
                           the copied rows no longer match the table
    epoch                  of its producer: grows with each session that continues the copy
    """

    xmin: int
    xmax: int
    xip: tuple[int, ...]
    lsn: int
    settled_lsn: int
    topic_id: str
    step_blocks: int
    count: int
    done: int
    rows: int
    storage: str
    attributes: int
    epoch: int = 0


class SideTopicState(msgspec.Struct, frozen=True):
    """Changes of a table since the first snapshot of its copy, in a side topic until the copy is complete
    (docs/rfcs/0009-changes-set-aside.md).

    topic_id          of the side topic. It has the partitions and the records that the table's topic will get
    until_lsn         0, or the first commit LSN that is not in the side topic: WAL is retained from there on
    ends              next offset per partition of the table's topic when the whole copy was durable; () = not yet
    records, bytes    size of the side topic, as of a few seconds ago
    appended          number of its records appended to the table's topic
    """

    topic_id: str
    until_lsn: int = 0
    ends: tuple[int, ...] = ()
    records: int = 0
    bytes: int = 0
    appended: int = 0


class FormerType(msgspec.Struct, frozen=True):
    """Narrower type that a column had, up to and including this version of its table's description."""

    version: int
    type_name: str
    type_oid: int
    type_mod: int


class CapturedColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Column of a captured table. `type_name` is format_type's text; `key_index` its index in the primary key, -1 if
    none.

    `type_oid` and `type_mod` are the type as the stream reports it; 0 = unknown (a row of an older version).
    `attnum`: PostgreSQL's attribute number, which a rename keeps but a re-created column does not; 0 = unknown.
    `version`: version of the description that added the column; `default`: its value in rows from before that, in the
    notation of a shard (None = NULL). `was`: its earlier types, oldest first.
    """

    name: str
    type_name: str
    key_index: int
    type_oid: int = 0
    type_mod: int = -1
    attnum: int = 0
    version: int = 1
    default: str | None = None
    was: tuple[FormerType, ...] = ()


class AcceptedSchemaChange(msgspec.Struct, frozen=True):
    """Schema change that an operator accepted for one shard of a table, so that the shard follows the table's next
    copy.

    Columns `gone` may be null from then on. With `anew` set, the shard is dropped and re-created if it cannot be
    altered to match the table.
    """

    shard_id: str
    gone: tuple[str, ...] = ()
    anew: bool = False


class CaptureRow(msgspec.Struct, frozen=True):
    """A captured database. `generation` grows when its snapshot starts over."""

    name: str
    system_id: str
    slot: str
    publication: str
    generation: int
    snapshot_done: bool
    unused_1: dict[str, int] = {}
    unused_2: int = 0
    unused_3: dict[str, int] = {}
    unused_4: dict[str, int] = {}
    """Fields that are no longer used. A row is stored as an array, so their positions remain."""
    restored: bool = False
    """Set by a restore: the slot may be ahead of the restored state. The next session compares and clears it."""
    taps: tuple[str, ...] = ()
    """Names of state stored apart from the topics, by taps that saw every confirmed change
    (capture/delivery/consumers.py)"""
    given_publication: bool = False
    """The publication existed when the capture began and is not altered (manual): `capture drop` does not drop it."""
    session: str = ""
    """PostgreSQL session of the process that captured last: its pid and start time"""
    epoch: int = 0
    """Grows with each capture session; only the newest one changes the row (capture/capture_row.py)."""
    history: tuple[tuple[int, int], ...] = ()
    """Timelines of the server that was captured last, each with the LSN at which it ended, the current one with 0
    (capture/postgres/timeline.py); () = unknown"""
    era: int = 0
    """Number of times that history was replaced by another one"""
    recopied: str = ""
    """Reason of the last automatic re-snapshot: the database, its slot or its publication had moved"""
    recopied_ms: int = 0


class CaptureTableRow(msgspec.Struct, frozen=True):
    """One table of a captured database, by its name (capture.naming): what the stream carries of it, or why nothing.

    state        reason, fix                    paused_lsn
    captured     -, or why it is re-snapshotted 0                    it flows, or is being copied (no `snapshot` yet)
    parked       the difference; the fix        first commit not     paused: the topic holds every commit below, none
                                                carried              from there on. Only a new copy repairs it
    dropped      that it is gone                same                 dropped from the source, or no longer wanted
    refused      why; what to change            0                    cannot be captured in its present state; retried
    left         why; what to change            0                    matches a pattern, but its kind is not supported

    `columns`: in table order, as of its snapshot plus those added and widened since. A pipeline creates its shard from
    them. `evolved[n]`: the first commit LSN of version n + 2 of them. `generation` grows when the table is
    re-snapshotted into a new topic. `recopy`: an operator requested that. `again_ms`: from then on a paused table is
    re-snapshotted automatically (0 = only on request); `again_last_ms`: when that last began. `accepted`: per shard
    that existed then; it applies to one copy and the schema changes that follow from it.
    """

    capture: str
    table: str
    topic: str = ""
    state: str = "captured"
    reason: str = ""
    fix: str = ""
    paused_lsn: int = 0
    since_ms: int = 0
    oid: int = 0
    generation: int = 0
    snapshot: TableSnapshot | None = None
    columns: tuple[CapturedColumn, ...] = ()
    recopy: bool = False
    partitions: tuple[int, ...] | None = None
    """Oids of the partitions whose rows its topic has; None = unknown"""
    evolved: tuple[int, ...] = ()
    attributes: int = 0
    """Highest attribute number, including dropped columns, when the table last matched the description; 0 = unknown"""
    storage: str = ""
    """Files that held its rows at that time. Different files mean that the table was rewritten"""
    identities: dict[int, tuple[str, str]] = {}
    """oid of the table, or of a partition → its SQL name then, and its REPLICA IDENTITY before the capture set FULL.
    A rename keeps the oid; a table re-created under the same name was never altered."""
    again_ms: int = 0
    again_last_ms: int = 0
    accepted: tuple[AcceptedSchemaChange, ...] = ()
    envelope: str = "row"
    """Envelope of the records of its topic: row, debezium or debezium-avro. It never changes within a topic"""
    identity: str = ""
    """REPLICA IDENTITY of the table when last checked, in SQL notation; for partitions, too, where theirs differ"""
    schemas: tuple[tuple[int, int], ...] = ()
    """Registry ids (debezium-avro) of the key and value schema under each version of the description"""
    copy: TableCopy | None = None
    """Progress of its copy while there is no `snapshot`; None = nothing that could be continued"""
    side_topic: SideTopicState | None = None
    """Side topic, if its copy runs while WAL is confirmed"""
    types: dict[int, str] = {}
    """oid of a column's type → definition of that type when the table last matched the description
    (capture/catalog/type_dependencies.py)"""
    identities_asked: dict[int, tuple[str, str]] = {}
    """Same as `identities`, for tables that an administrator was asked to set to FULL. The capture does not restore
    them; it reports the statements for that"""
    publication: tuple[int, ...] = ()
    """oid and xmin of the rows of pg_publication and pg_publication_rel under which its changes since its copy were
    published (capture/setup/publication.py); () = unknown"""
    attached: tuple[int, ...] = ()
    """Transaction, for each of `partitions`, that attached it. A different transaction may have brought other rows;
    () = unknown"""

    @property
    def version(self) -> int:
        """Version of its description: 1 as of its snapshot."""
        return 1 + len(self.evolved)

    @property
    def is_streaming(self) -> bool:
        """True if its topic follows the table."""
        return self.state == "captured" and self.snapshot is not None


CAPTURES = Family(0x03, "capture", CaptureRow, Column("name", Kind.TEXT), own_entity=False)
CAPTURE_TABLES = Family(
    0x07, "captured table", CaptureTableRow, Column("capture", Kind.TEXT), Column("table", Kind.TEXT), own_entity=False
)
