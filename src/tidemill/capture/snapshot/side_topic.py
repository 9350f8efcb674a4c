"""Store the changes of a table that is being copied in a side topic, so that WAL can be confirmed during the copy
(docs/rfcs/0009-changes-set-aside.md).

    stream ─► topic writer ─► side topic  partition writers as for any table: tails, rounds, bindings; changes in the
                               │          first snapshot are skipped (captured_table.is_in_snapshot)
    copy ─────────► topic ◄────┘          appended once the copy is complete (side_topic_append.py), then the table
                                          joins

Invariant (no change lost): each change of the table that the stream sends from its slot on is either in the side topic,
in the first snapshot, or at or above `until_lsn`, where WAL is retained. A side topic is created only while nothing was
confirmed beyond the first snapshot, and changes are confirmed only once a binding includes the side topic. From then on
a binding says how far it reaches.

Invariant (offset arithmetic): record n of a partition of the side topic is record `ends` + n of that partition of the
topic. So the topic's own high watermark shows what is appended, whichever process appended it or was interrupted.

Invariant (atomic join): the table joins the stream with one write of its row, at a position up to which everything was
appended and from which on the stream sends the changes. Before that, nothing of its topic is in a binding.

Invariant (exactness): what cannot be stored exactly (another description, a row that cannot be read or written, more
bytes than allowed) is not stored. `until_lsn` is durable before that transaction is handed on, and from there on WAL is
retained as without a side topic.
"""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import ConflictError, InvalidError
from tidemill.base.runtime.coop import CoopBudget
from tidemill.capture.changes import LSN_NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.naming import side_topic_name
from tidemill.capture.setup.server_checks import SlotState
from tidemill.capture.snapshot.side_topic_append import SideTopicAppender
from tidemill.capture.tables.table_setup import delete_topic, event_source_of, relation_of_row, stream_producer_id
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import CapturedTable
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue, SideTopicState, TableSnapshot, TopicRow
from tidemill.shards.api import Binding
from tidemill.topics.api import TopicLog

log = structlog.get_logger()

MAX_RECORDS_BETWEEN_SESSIONS = 100_000
"""Maximum number of records that are appended between two sessions, while the stream is paused."""


def first_snapshot_of(row: CaptureTableRow, partitions: int) -> TableSnapshot:
    """Return the first snapshot of the copy, whose changes the stream has to skip. The side topic begins empty."""
    assert row.copy is not None
    copy = row.copy
    return TableSnapshot(copy.xmin, copy.xmax, copy.xip, copy.lsn, 0, (0,) * partitions)


def matches_copy(row: CaptureTableRow, relation: Relation) -> bool:
    """Return whether rows of this description match those of the copy."""
    as_begun = [(c.name, c.type_oid, c.type_mod, c.key_index) for c in row.columns]
    return as_begun == [(c.name, c.type_oid, c.type_mod, c.key_index) for c in relation.columns]


async def prepare_side_topic(
    config: CaptureConfig,
    catalogue: Catalogue,
    states: TableStates,
    row: CaptureTableRow,
    now: Relation | None,
    database: str,
) -> tuple[CapturedTable, Relation] | None:
    """Return a table whose copy was interrupted, as the stream has to carry it: into its side topic, which is created
    if necessary. None = WAL is retained for it. Raises TableStateUnknownError, and the catalogue's errors.
    """
    if row.copy is None or row.snapshot is not None or not row.topic:
        return None
    name = side_topic_name(row.topic)
    topic = await catalogue.get(TopicRow, name)
    # If whole rows are no longer configured, the side topic might get rows that are not whole (RFC 0008).
    if row.side_topic is not None and (
        topic is None or topic.topic_id != row.side_topic.topic_id or not config.requires_full_identity
    ):
        await states.abandon_copy(row.table)
        return None
    if row.side_topic is None:
        if now is None or not allows_side_topics(config) or row.recopy or not matches_copy(row, now):
            return None
        main = await catalogue.get(TopicRow, row.topic)
        if main is None or main.topic_id != row.copy.topic_id or (topic is not None and topic.kind != "capture"):
            return None
        topic = await _create_side_topic(catalogue, states, row, name, main.partitions)
        if topic is None:
            return None
    assert topic is not None
    row = states.rows[row.table]
    assert row.side_topic is not None
    item = CapturedTable(
        row.table, topic, stream_producer_id(config), oid=row.oid, paused_lsn=row.side_topic.until_lsn or LSN_NEVER,
        source=event_source_of(config, row, database),
    )  # fmt: skip
    item.snapshot = first_snapshot_of(row, topic.partitions)
    return item, relation_of_row(row, now)


def allows_side_topics(config: CaptureConfig) -> bool:
    """Return whether side topics are possible: the stream carries whole rows of every table at all times (chunks.py),
    and space for them is configured.
    """
    return config.requires_full_identity and config.copy_aside_max_mb > 0


async def _create_side_topic(
    catalogue: Catalogue, states: TableStates, row: CaptureTableRow, name: str, partitions: int
) -> TopicRow | None:
    """Create the side topic and record it in the row. It has no compaction, because the offset arithmetic counts
    records.
    """
    await delete_topic(catalogue, name)
    try:
        topic = await catalogue.create_topic(name, partitions, kind="capture", config={})
    except (InvalidError, ConflictError) as error:
        log.warning("WAL is retained for a copy", table=row.table, cause=str(error))
        return None
    copy = row.copy

    def with_side_topic(found: CaptureTableRow | None) -> CaptureTableRow | None:
        if found is None or found.copy != copy or found.side_topic is not None:
            return found
        return replace(found, side_topic=SideTopicState(topic.topic_id))

    now = await states.update_row(row.table, with_side_topic)
    if now is None or now.side_topic is None or now.side_topic.topic_id != topic.topic_id:
        return None
    log.info("changes of a table go to a side topic while it is copied", table=row.table, topic=name)
    return topic


def find_join_position(
    row: CaptureTableRow, latest: Binding | None, slot: SlotState
) -> tuple[int, tuple[int, ...]] | None:
    """Return, for a completely copied table, the position at which it may join (inclusive) and the offsets of its side
    topic there. None = no binding determines it yet. Pure.

    The slot may be ahead of the newest binding, by WAL without changes (postgres/standby_status.py).
    """
    side_topic = row.side_topic
    offsets = latest.offsets.get(side_topic.topic_id) if side_topic is not None and latest is not None else None
    if side_topic is None or latest is None or offsets is None or not side_topic.ends:
        return None
    if not side_topic.until_lsn:
        return max(latest.lsn, slot.confirmed_lsn - 1), offsets
    return (side_topic.until_lsn - 1, offsets) if latest.lsn >= side_topic.until_lsn - 1 else None


def is_ready_to_join(row: CaptureTableRow, latest: Binding | None) -> bool:
    """Return whether the stream is past the newest snapshot in which the copy was read, so that no other table's
    bindings wait for it, or past the end of the side topic. Pure.
    """
    assert row.side_topic is not None and row.copy is not None
    until = row.side_topic.until_lsn - 1 if row.side_topic.until_lsn else max(row.copy.lsn, row.copy.settled_lsn)
    return latest is not None and latest.lsn >= until


async def join_stream(
    catalogue: Catalogue, states: TableStates, row: CaptureTableRow, lsn: int, offsets: tuple[int, ...]
) -> bool:
    """Let the table join the stream with one write of its row. All of the side topic up to `offsets` is in the table's
    topic. Raises TableStateUnknownError.
    """
    copy, side_topic = row.copy, row.side_topic
    assert copy is not None and side_topic is not None
    taken = TableSnapshot(
        copy.xmin, copy.xmax, copy.xip, copy.lsn, copy.rows,
        tuple(end + more for end, more in zip(side_topic.ends, offsets, strict=True)),
        copy.settled_lsn if copy.settled_lsn > copy.lsn else 0, lsn,
    )  # fmt: skip

    def with_joined_snapshot(found: CaptureTableRow | None) -> CaptureTableRow | None:
        if (
            found is None
            or found.copy != copy
            or found.side_topic is None
            or found.side_topic.topic_id != side_topic.topic_id
        ):
            return found
        # A failure since the copy was complete may have refused the table; it is captured from here on.
        return replace(
            found, snapshot=taken, copy=None, side_topic=None, state="captured", reason="", fix="", since_ms=0
        )  # fmt: skip

    now = await states.update_row(row.table, with_joined_snapshot)
    if now is None or now.snapshot != taken:
        return False
    log.info("a copied table joins the stream", table=row.table, lsn=lsn, appended=sum(offsets))
    await delete_topic(catalogue, side_topic_name(row.topic))
    return True


async def join_completed_copies(
    config: CaptureConfig, catalogue: Catalogue, states: TableStates, topics: TopicLog, latest: Binding | None, slot:
    SlotState, clock: Clock,
) -> None:  # fmt: skip
    """Let completely copied tables whose side topic is almost appended join the stream that is about to begin.

    Nothing is bound or confirmed in the meantime. Raises errors of a topic and of the catalogue, and
    TableStateUnknownError.
    """
    for row in [row for row in states.rows.values() if row.copy is not None and row.snapshot is None]:
        at = find_join_position(row, latest, slot)
        topic = await catalogue.get(TopicRow, row.topic) if at is not None else None
        held = row.copy.topic_id if row.copy is not None else ""
        if at is None or topic is None or topic.topic_id != held or row.recopy:
            continue
        appending = create_appender(config, row, topics, clock)
        if sum(at[1]) - await appending.read_appended_count() <= MAX_RECORDS_BETWEEN_SESSIONS:
            await appending.append_up_to(at[1])
            await join_stream(catalogue, states, row, *at)


def create_appender(config: CaptureConfig, row: CaptureTableRow, topics: TopicLog, clock: Clock) -> SideTopicAppender:
    assert row.side_topic is not None and row.copy is not None
    own = stream_producer_id(config)
    return SideTopicAppender(
        topics, row.copy.topic_id, row.side_topic.topic_id, row.side_topic.ends, own, CoopBudget(clock)
    )


async def delete_unused_side_topics(catalogue: Catalogue, states: TableStates) -> None:
    """Delete side topics that no row refers to, because the process that created or abandoned them died."""
    rows = {side_topic_name(row.topic): row for row in states.rows.values() if row.topic}
    for topic in await catalogue.list(TopicRow):
        row = rows.get(topic.name)
        if row is not None and (row.side_topic is None or row.side_topic.topic_id != topic.topic_id):
            await delete_topic(catalogue, topic.name)
