"""Captured databases and their tables, one row a table: no row grows with the number of something else.

capture         03 | "" | name text
                system_id, slot, publication, generation, snapshot_done, topics map, snapshot_lsn,
                snapshots map of maps, columns map of arrays of maps, restored, taps array of texts,
                given_publication, session text, epoch, history array of arrays, era, recopied text, recopied_ms
captured table  07 | "" | capture text | table text
                topic, state, reason, fix, parked_lsn, since_ms, oid, generation, snapshot map or nil,
                columns array of maps, recopy, partitions array or nil, evolved array, attributes, storage,
                identities map of arrays, again_ms, again_last_ms, accepted array of maps, envelope text,
                identity text, schemas array of arrays, copy map or nil, aside map or nil, publication array,
                attached array

The three maps of a capture's row are of the time before its tables had rows of their own: `of_old` reads them, and
the next session of the capture writes them apart and empties them.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class TableSnapshot(msgspec.Struct, frozen=True):
    """One captured table's finished initial snapshot: what the stream must skip, and where its topic began.

    xmin, xmax, xip     pg_current_snapshot() of the copying transaction (64-bit xids)
    lsn                 WAL insert position right after that snapshot: a later commit is never in it
    offsets             next offset per partition of the topic when the copy ended
    joined_lsn          0, or the position at which it joined the stream: of every commit up to it the topic has what
                        was set aside, behind the copied rows (SetAside), and `offsets` are behind that
    settled_lsn         0, or WAL insert position right after the youngest snapshot that a part of it was read in: from
                        there on the topic shows one state of the table, be it that the copy was cut off in between
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
        """Before the stream has come to it, the topic is not to be bound."""
        return max(self.lsn, self.settled_lsn)

    @property
    def told_from_lsn(self) -> int:
        """The first commit LSN of which the topic may lack something, while no binding has it."""
        return max(self.lsn, self.joined_lsn + 1)


class TableCopy(msgspec.Struct, frozen=True):
    """How far a copy that is under way has come: what a later session needs to go on with it
    (capture/snapshot/chunks.py).

    xmin, xmax, xip, lsn   of its first snapshot, as in TableSnapshot
    settled_lsn            as in TableSnapshot, of what is done
    topic_id               of the topic that has the rows
    step_blocks, count     into how many ranges of how many blocks the table was cut; the last one has no end
    done                   so many of them, from the first one on, are durable in the topic, with `rows` rows
    storage, attributes    what held the rows and how many columns there were (capture/catalog/columns.py): other ones
                           say that what was copied is not what is there
    epoch                  of its producer: grows with each session that goes on with it
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


class SetAside(msgspec.Struct, frozen=True):
    """Changes of a table since the first snapshot of its copy, in a topic of their own until the copy is complete
    (docs/rfcs/0009-changes-set-aside.md).

    topic_id          of that topic: as many partitions, and the very records that the table's topic is to have
    until_lsn         0, or the first commit LSN that is not set aside: WAL is kept from there on
    ends              next offset per partition of the table's topic when all of the copy was durable; () = it is not
    records, bytes    in it, as of a few seconds ago
    appended          of them, to the table's topic
    """

    topic_id: str
    until_lsn: int = 0
    ends: tuple[int, ...] = ()
    records: int = 0
    bytes: int = 0
    appended: int = 0


class FormerType(msgspec.Struct, frozen=True):
    """A narrower type that a column had, up to and with this version of its table's description."""

    version: int
    type_name: str
    type_oid: int
    type_mod: int


class CapturedColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """`type_name` is format_type's text; `key_index` its place in the primary key, -1 when not part of it.

    `type_oid` and `type_mod` are what the stream says of the type; 0 = not known (a row of an older version).
    `attnum`: PostgreSQL's number of it, which a rename keeps and a column made anew has not; 0 = not known.
    `version`: the version of the description that brought it, and `default` what rows of before hold, as a shard
    writes it (None = NULL). `was`: the types it had, oldest first.
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


class Accepted(msgspec.Struct, frozen=True):
    """What an operator has accepted for one shard of a table, so that it follows the table's next copy: `gone` may be
    null from then on; with `anew` it is dropped and made again where it cannot become what the table is."""

    shard_id: str
    gone: tuple[str, ...] = ()
    anew: bool = False


class CaptureRow(msgspec.Struct, frozen=True):
    """A captured database: its tables and the topic of each. `generation` grows when a snapshot starts over."""

    name: str
    system_id: str
    slot: str
    publication: str
    generation: int
    snapshot_done: bool
    topics: dict[str, str] = {}
    """schema.table → topic name"""
    snapshot_lsn: int = 0
    snapshots: dict[str, TableSnapshot] = {}
    """schema.table → its finished snapshot; a table that is captured but absent here starts over"""
    columns: dict[str, tuple[CapturedColumn, ...]] = {}
    """schema.table → its columns as of its snapshot, in table order: what a pipeline makes its shard of"""
    restored: bool = False
    """Written by a restore: the slot may be ahead of what came back. The next session compares, and clears it."""
    taps: tuple[str, ...] = ()
    """Names of what is kept beside the topics by taps that saw all that was confirmed (taps.py, X6)."""
    given_publication: bool = False
    """It was there when the capture began, as one that alters nothing (manual): `capture drop` leaves it."""
    session: str = ""
    """PostgreSQL's session of the process that captured last: its pid, and when it began"""
    epoch: int = 0
    """Grows with each session that captures; only the newest one changes the row (capture/capture_row.py)."""
    history: tuple[tuple[int, int], ...] = ()
    """Of the server that was captured last: each timeline and the LSN at which it was left, the last one with 0
    (capture/postgres/timeline.py); () = not known"""
    era: int = 0
    """How often that history was replaced by another one"""
    recopied: str = ""
    """Why tables were copied again last though nobody had asked: the database, its slot or its publication had moved"""
    recopied_ms: int = 0


class CaptureTableRow(msgspec.Struct, frozen=True):
    """One table of a captured database, by its name (capture.naming): what the stream carries of it, or why nothing.

    state        reason, fix                    parked_lsn
    captured     -, or why it is copied again   0                    it flows, or is being copied (no `snapshot` yet)
    parked       the difference; the way out    first commit not     the topic holds every commit below, none from
                                                carried              there on: only a new copy heals it
    dropped      that it is gone                same                 gone from the source, or not wanted any more
    refused      why; what to change            0                    cannot be captured as it is; tried again
    left         why; what to change            0                    a pattern names it, but it is of no such kind

    `columns`: in table order, as of its snapshot and with what was added and widened since: what a pipeline makes its
    shard of. `evolved[n]`: the commit LSN from which version n + 2 of them is in force. `generation` grows when the
    table is copied again, into a new topic. `recopy`: an operator asked for that. `again_ms`: a parked table is copied
    again by itself from then on (0 = when somebody asks), and `again_last_ms` is when that was last begun.
    `accepted`: of the shards that there were then; it holds for one copy, and what grows out of that.
    """

    capture: str
    table: str
    topic: str = ""
    state: str = "captured"
    reason: str = ""
    fix: str = ""
    parked_lsn: int = 0
    since_ms: int = 0
    oid: int = 0
    generation: int = 0
    snapshot: TableSnapshot | None = None
    columns: tuple[CapturedColumn, ...] = ()
    recopy: bool = False
    partitions: tuple[int, ...] | None = None
    """Oids of the partitions whose rows its topic has; None = not known"""
    evolved: tuple[int, ...] = ()
    attributes: int = 0
    """The highest number of a column, dropped ones too, when it was last seen as described; 0 = not known"""
    storage: str = ""
    """The files that held its rows then: other ones say that it was rewritten"""
    identities: dict[int, tuple[str, str]] = {}
    """oid of the table, or of a partition of it → how SQL named it then, and the REPLICA IDENTITY that it had before
    the capture gave it FULL. A rename keeps the oid; what is made anew under its name has never been given one."""
    again_ms: int = 0
    again_last_ms: int = 0
    accepted: tuple[Accepted, ...] = ()
    envelope: str = "row"
    """What its topic's records are: row, debezium or debezium-avro. It was so from the topic's first record on"""
    identity: str = ""
    """Its REPLICA IDENTITY when it was last looked at, as SQL writes it; of its partitions, too, where they differ"""
    schemas: tuple[tuple[int, int], ...] = ()
    """Of debezium-avro: the registry's ids of the key's and the value's schema under each version of the description"""
    copy: TableCopy | None = None
    """Of one that has no `snapshot` yet: how far its copy has come; None = nothing that could be gone on with"""
    aside: SetAside | None = None
    """Of one whose copy goes on while WAL is confirmed"""
    types: dict[int, str] = {}
    """oid of a column's type → what that was made of when the table was last seen as described
    (capture/catalog/type_dependencies.py)"""
    identities_asked: dict[int, tuple[str, str]] = {}
    """As `identities`, of those that an administrator was asked to give FULL. The capture gives none of them back; it
    says how it is done"""
    publication: tuple[int, ...] = ()
    """oid and xmin of the rows of pg_publication and pg_publication_rel that its changes since its copy were published
    under (capture/setup/publication.py); () = not known"""
    attached: tuple[int, ...] = ()
    """Of each of `partitions`, the transaction that attached it: another one may have come with other rows; () = not
    known"""

    @property
    def version(self) -> int:
        """Of its description: 1 as of its snapshot."""
        return 1 + len(self.evolved)

    @property
    def flows(self) -> bool:
        """Its topic holds it as of now, but for what is under way."""
        return self.state == "captured" and self.snapshot is not None


CAPTURES = Family(0x03, "capture", CaptureRow, Column("name", Kind.TEXT), own_entity=False)
CAPTURE_TABLES = Family(
    0x07, "captured table", CaptureTableRow, Column("capture", Kind.TEXT), Column("table", Kind.TEXT), own_entity=False
)


def of_old(row: CaptureRow) -> list[CaptureTableRow]:
    """The tables that an older version kept within the capture's row."""
    return [
        CaptureTableRow(
            row.name, table, topic, generation=row.generation, snapshot=row.snapshots.get(table),
            columns=row.columns.get(table, ()),
        )
        for table, topic in row.topics.items()
    ]  # fmt: skip
