"""What a session's stream says of its tables: columns, version, and how much of a row before it tells."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from tidemill.capture.catalog.columns import attributes_of
from tidemill.capture.catalog.schema_versions import version_of
from tidemill.capture.catalog.table_discovery import describe_after, list_ancestors
from tidemill.capture.changes import NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.decode.transaction_builder import RelationSeen, TransactionBuilder, merge_relation, says_key
from tidemill.capture.postgres.control_connection import Control
from tidemill.capture.postgres.pgoutput import RelationMessage
from tidemill.capture.snapshot.side_topic import as_copied, first_snapshot
from tidemill.capture.tables.schema_change import follow
from tidemill.capture.tables.table_states import TableStates, recopy
from tidemill.capture.topics.commit_boundaries import in_snapshot

log = structlog.get_logger()


class RelationTracker:
    """`parking`: while it is taken, nobody else changes what is carried of a table."""

    def __init__(
        self, config: CaptureConfig, desk: TableStates, converter: TransactionBuilder, parking: asyncio.Lock
    ) -> None:
        self._config = config
        self._desk = desk
        self._converter = converter
        self._parking = parking
        self._keyless: dict[int, tuple[int, ...]] = {}
        """Relations whose identity in the stream lacks the key, and those that they are partitions of."""
        self.outdated: set[int] = set()
        """Oids of relations whose last description in the stream is older than their copy. Followers see its columns
        until a row comes under the present description, or the watcher shows that (Coming.look)."""

    async def learn(self, seen: RelationSeen, control: Control) -> tuple[tuple[int, int], ...]:
        """The stream describes a table, at its first change and after every DDL on it. Where the table's shard cannot
        take the next rows it is parked before this transaction; a NULL in their place would be a lie.

        Columns come from the stream, the rest from the catalogue. What it gives are the schemas of the table's records
        (CaptureTableRow), () = none.
        """
        message = seen.message
        xid, whole = self._converter.xid, message.identity == "f"
        now = await control.ask(lambda wire: describe_after(wire, xid, message.oid, whole=whole))
        lsn = self._converter.commit_lsn
        async with self._parking:
            version = await follow(self._desk, control, message, now, xid, lsn)
        if self._desk.following.get(message.oid) is not None:
            found = await control.ask(lambda wire: attributes_of(wire, [message.oid]))
            self._desk.narrow(message.oid, found.get(message.oid))
        known = self._converter.relations.get(message.oid)
        described = replace(merge_relation(message, now or known, gone=now is None), version=version)
        if not self.whole(message.oid):
            described = await self._as_is(message, described, control)
        await self._compare_aside(described, xid, lsn)
        was = (known.version, known.old_rows, known.deferrable) if known is not None else None
        if seen.changed or was != (version, described.old_rows, described.deferrable):
            self._converter.learn(described)
            log.info("table described anew", capture=self._config.name, table=described.name)
        row = self._desk.by_oid(message.oid, lsn)
        copied = row is not None and in_snapshot(xid, lsn, row.snapshot)
        if row is not None and copied and not version_of(row, message, NEVER):
            self.outdated.add(message.oid)
        else:
            self.outdated.discard(message.oid)
        return row.schemas if row is not None else ()

    async def _compare_aside(self, described: Relation, xid: int, lsn: int) -> None:
        """Rows of another description than the copy's are not set aside (side_topic.py, Z4)."""
        row = self._desk.aside(described.oid)
        if row is None or in_snapshot(xid, lsn, first_snapshot(row, 0)):
            return
        if described.name != row.table or not as_copied(row, described):
            async with self._parking:
                await self._desk.set_aside_until(row.table, lsn, "its description changed")

    def grown(self, relation: Relation) -> None:
        """What the watcher found, and no row of the stream came under yet."""
        known = self._converter.relations.get(relation.oid)
        if known is not None:
            self._converter.learn(replace(relation, old_rows=known.old_rows))

    def whole(self, oid: int) -> bool:
        """Events tell the row before, whatever is asked of other tables, for as long as the table's topic has them."""
        rows = self._desk.rows.values()
        return self._config.whole or any(row.oid == oid and row.envelope != "row" for row in rows)

    async def _as_is(self, message: RelationMessage, relation: Relation, control: Control) -> Relation:
        """The relation with what the identity that it has from this transaction on says of old rows. Where that is not
        even the key, its table is parked before it: an UPDATE of the key would look like one that keeps it.

        Besides the root of a partitioned table the stream describes each partition, whose identity is what counts: as
        long as one lacks the key nothing of the root is read, be it that this transaction is in the root's copy.
        """
        if says_key(message, relation):
            self._keep_root(self._keyless.pop(message.oid, ()))
            keyless = any(message.oid in roots for roots in self._keyless.values())
            return replace(relation, old_rows="lacking" if keyless else "key")
        oids = await control.ask(lambda wire: list_ancestors(wire, message.oid))
        self._keyless[message.oid] = oids
        self._keep_root(oids)
        lsn = self._converter.commit_lsn
        for oid in (message.oid, *oids):
            row = self._desk.followed(oid, self._converter.xid, lsn)
            if row is not None:
                async with self._parking:
                    await self._desk.park(
                        row.table, lsn, f"the replica identity of {relation.name} does not say its primary key",
                        f"Give it one that does (DEFAULT, FULL). {recopy(row.table)}",
                    )  # fmt: skip
        return replace(relation, old_rows="lacking")

    def _keep_root(self, oids: Sequence[int]) -> None:
        """Read of these partitioned tables what all their partitions say."""
        for oid in oids:
            root = self._converter.relations.get(oid)
            if root is not None and not self.whole(oid):
                keyless = any(oid in roots for roots in self._keyless.values())
                self._converter.learn(replace(root, old_rows="lacking" if keyless else "key"))
