"""Track how the stream of a session describes its tables: columns, version, and how much of the old row an UPDATE
carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from tidemill.capture.catalog.columns import read_attributes
from tidemill.capture.catalog.relations import describe_after
from tidemill.capture.catalog.schema_versions import find_version
from tidemill.capture.catalog.table_discovery import list_ancestors
from tidemill.capture.changes import LSN_NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import (
    RelationSeen,
    TransactionBuilder,
    includes_primary_key,
    merge_relation,
)
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.pgoutput import RelationMessage
from tidemill.capture.snapshot.side_topic import first_snapshot_of, matches_copy
from tidemill.capture.tables.schema_change import follow_description
from tidemill.capture.tables.table_reasons import PauseCause, recopy_instruction
from tidemill.capture.tables.table_states import TableStates
from tidemill.capture.topics.captured_table import is_in_snapshot

log = structlog.get_logger()


class RelationTracker:
    """The relations as the stream describes them. While `reader_lock` is locked, no other task changes what is carried
    of a table.
    """

    def __init__(
        self, config: CaptureConfig, states: TableStates, converter: TransactionBuilder, reader_lock: asyncio.Lock
    ) -> None:
        self._config = config
        self._states = states
        self._converter = converter
        self._reader_lock = reader_lock
        self._keyless: dict[int, tuple[int, ...]] = {}
        """Relations whose identity in the stream lacks the key, with the oids of their partition ancestors."""
        self.outdated: set[int] = set()
        """Oids of relations whose last description in the stream is older than their copy. Followers see its columns
        until a row arrives under the present description, or the watcher shows that one (PendingSchema.look).
        """

    async def process_description(self, seen: RelationSeen, control: ControlConnection) -> tuple[tuple[int, int], ...]:
        """Process the description of a table, which the stream sends before its first change and after every DDL on it.
        If the table's shard cannot hold the next rows, the table is paused before this transaction; NULLs in their
        place would be wrong data.

        Columns come from the stream, the rest from the catalogue. Returns the schemas of the table's records
        (CaptureTableRow), () = none.
        """
        message = seen.message
        xid, whole = self._converter.xid, message.identity == "f"
        now = await control.run(lambda wire: describe_after(wire, xid, message.oid, whole=whole))
        lsn = self._converter.commit_lsn
        async with self._reader_lock:
            version = await follow_description(self._states, control, message, now, xid, lsn)
        if self._states.following.get(message.oid) is not None:
            found = await control.run(lambda wire: read_attributes(wire, [message.oid]))
            self._states.following.update_columns(message.oid, found.get(message.oid))
        known = self._converter.relations.get(message.oid)
        described = replace(merge_relation(message, now or known, gone=now is None), version=version)
        if not self.requires_whole_rows(message.oid):
            described = await self._apply_identity(message, described, control)
        await self._check_side_topic(described, xid, lsn)
        was = (known.version, known.old_rows, known.deferrable) if known is not None else None
        if seen.changed or was != (version, described.old_rows, described.deferrable):
            self._converter.set_relation(described)
            log.info("table description changed", capture=self._config.name, table=described.name)
        row = self._states.find_carried(message.oid, lsn)
        copied = row is not None and is_in_snapshot(xid, lsn, row.snapshot)
        if row is not None and copied and not find_version(row, message, LSN_NEVER):
            self.outdated.add(message.oid)
        else:
            self.outdated.discard(message.oid)
        return row.schemas if row is not None else ()

    async def _check_side_topic(self, described: Relation, xid: int, lsn: int) -> None:
        """End the side topic of a table whose rows now have another description than its copy (side_topic.py)."""
        row = self._states.find_side_topic_table(described.oid)
        if row is None or is_in_snapshot(xid, lsn, first_snapshot_of(row, 0)):
            return
        if described.name != row.table or not matches_copy(row, described):
            async with self._reader_lock:
                await self._states.end_side_topic(row.table, lsn, "its description changed")

    def show_pending_description(self, relation: Relation) -> None:
        """Show a description that the watcher found, before any row of the stream arrives under it."""
        known = self._converter.relations.get(relation.oid)
        if known is not None:
            self._converter.set_relation(replace(relation, old_rows=known.old_rows))

    def requires_whole_rows(self, oid: int) -> bool:
        """Return whether the stream must carry whole old rows of the table. Tables whose topic has Debezium events need
        them, regardless of what the configuration asks of other tables.
        """
        rows = self._states.rows.values()
        return self._config.requires_full_identity or any(row.oid == oid and row.envelope != "row" for row in rows)

    async def _apply_identity(
        self, message: RelationMessage, relation: Relation, control: ControlConnection
    ) -> Relation:
        """Return the relation with the old-row content that its current replica identity provides. If that lacks even
        the key, the table is paused before this transaction: an UPDATE that changes the key would look like one that
        does not.

        For a partitioned table the stream also describes each partition, whose identity is the one that counts. As long
        as one partition lacks the key, no old row of the root is read, even if this transaction is in the root's copy.
        """
        if includes_primary_key(message, relation):
            self._set_root_old_rows(self._keyless.pop(message.oid, ()))
            keyless = any(message.oid in roots for roots in self._keyless.values())
            return replace(relation, old_rows="lacking" if keyless else "key")
        oids = await control.run(lambda wire: list_ancestors(wire, message.oid))
        self._keyless[message.oid] = oids
        self._set_root_old_rows(oids)
        lsn = self._converter.commit_lsn
        for oid in (message.oid, *oids):
            row = self._states.find_receiving(oid, self._converter.xid, lsn)
            if row is not None:
                async with self._reader_lock:
                    cause = PauseCause(
                        f"the replica identity of {relation.name} does not include its primary key",
                        f"Set an identity that does (DEFAULT, FULL). {recopy_instruction(row.table)}",
                    )
                    await self._states.pause_table(row.table, lsn, cause)
        return replace(relation, old_rows="lacking")

    def _set_root_old_rows(self, oids: Sequence[int]) -> None:
        """Set what is read of these partitioned tables to what all of their partitions provide."""
        for oid in oids:
            root = self._converter.relations.get(oid)
            if root is not None and not self.requires_whole_rows(oid):
                keyless = any(oid in roots for roots in self._keyless.values())
                self._converter.set_relation(replace(root, old_rows="lacking" if keyless else "key"))
