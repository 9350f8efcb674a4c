"""States of the tables of one capture: which of them flow, which are paused, and why. This module is the only one that
changes the state of a table, durably. `parked` is the stored name of the state "paused".

Invariant (durable pause): a pause is durable before the transaction that made it necessary is handed on, hence before
that transaction can be confirmed. So a table is paused at the same position after a restart. The lowest position
counts.

Invariant (no gap): a paused table stays paused until it is re-snapshotted, because changes at and above its position
are in no topic.

Invariant (isolated failures): a table's failure is reported under `table:<capture>/<schema.table>`, pauses that table,
and never ends the capture.

Invariant (catalogue and stream agree): a change with an unknown outcome ends the session (`TableStateUnknownError`).
The next session starts from durable state, so no table flows according to the catalogue without being carried by the
stream, or the other way round.

Invariant (exact copies): the topic of a table that would be paused before the position at which its copy is exact
(TableSnapshot.exact_lsn) shows no state of the database there, and nothing of it is bound yet. So a session that
carries nothing of the table copies it again (`RecopyRequiredError`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import Lsn
from tidemill.base.pgtypes.avro import AVRO, ColumnDescription
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.schema_versions import SchemaStep
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.changes import LSN_NEVER
from tidemill.capture.config import CaptureConfig
from tidemill.capture.encode.avro_schemas import NoSchemaRegistrar, SchemaRegistrar, register_schemas
from tidemill.capture.naming import to_readable
from tidemill.capture.setup.publication import Identities, with_asked_identities
from tidemill.capture.tables.copy_progress import CopyAttempts, SnapshotProgress
from tidemill.capture.tables.table_reasons import (
    MAX_REASON_CHARS,
    PauseCause,
    automatic_recopy_notice,
    blocked_row,
    pause_reason,
    recopy_instruction,
)
from tidemill.capture.tables.table_statuses import TableStatuses
from tidemill.capture.tables.unaffected_columns import FollowedTables
from tidemill.capture.topics.captured_table import is_in_snapshot
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue

log = structlog.get_logger()


class TableStateUnknownError(UnknownOutcomeError):
    """The catalogue's content for a table is unknown."""


class RecopyRequiredError(UnavailableError):
    """The copy of a table is not a state of the database."""


class TableStates:
    """The states of a capture's tables; outlives its sessions.

    `on_park(oid, lsn, columns)`: nothing of this relation is carried at or above the LSN from now on, except for shapes
    of only these columns; returns whether there are any. Synchronous; each session sets it.
    """

    def __init__(
        self,
        config: CaptureConfig,
        catalogue: Catalogue,
        clock: Clock,
        tracker: StatusTracker,
        schemas: SchemaRegistrar | None = None,
    ) -> None:
        self._schemas = schemas or NoSchemaRegistrar()
        self._config = config
        self._catalogue = catalogue
        self.clock = clock
        self.statuses = TableStatuses(config, clock, tracker)
        self.history = ("", 0)
        """Description and time (ms) of a failover, or a return to an earlier state, that the newest session found; "" =
        none.
        """
        self.on_park: Callable[[int, int, frozenset[str]], bool] = lambda *_: False
        self.following = FollowedTables()
        self._changing = asyncio.Lock()
        self.rows: dict[str, CaptureTableRow] = {}
        self.changes = 0
        """Version counter of `rows`."""
        self.copying: dict[str, int] = {}
        """Tables that are being copied concurrently with the stream, and their oids. A refused table is not among them,
        because its status does not show the progress of the copy.
        """
        self._attempts = CopyAttempts()

    def replace_rows(self, rows: dict[str, CaptureTableRow]) -> None:
        """Replace the rows by the current ones; stage statuses follow."""
        self.rows = dict(rows)
        self.changes += 1
        self.statuses.publish_all(rows)

    def find_carried(self, oid: int, lsn: int = LSN_NEVER) -> CaptureTableRow | None:
        """Return the table that is carried under this oid, as of a transaction at `lsn` (default: any future one)."""
        return next((row for row in self.rows.values() if row.oid == oid and _is_carried(row, lsn)), None)

    def find_receiving(self, oid: int, xid: int, lsn: int) -> CaptureTableRow | None:
        """Return the table that receives this transaction's changes under this oid, or None if its snapshot contains
        the transaction. PostgreSQL may send such a transaction again after a crash, with an outdated description.
        """
        row = self.find_carried(oid, lsn)
        return None if row is None or is_in_snapshot(xid, lsn, row.snapshot) else row

    def served_oids(self) -> set[int]:
        """Return the oids of the relations that followers may treat as captured."""
        return {row.oid for row in self.rows.values() if row.state == "captured" and row.side_topic is None}

    # changes of state -----------------------------------------------------------------------------
    async def pause_table(self, name: str, lsn: int, cause: PauseCause) -> None:
        """Pause a table durably: carry none of its transactions at or above `lsn`. Raises TableStateUnknownError,
        RecopyRequiredError.
        """
        row = self.rows.get(name)
        if row is None or (row.paused_lsn and row.paused_lsn <= lsn):
            return
        reason = pause_reason(name, cause.reason, lsn)
        now_ms, pause_ms = self.clock.now_ms(), int(self._config.copy_again_pause_s * 1000)
        void = row.snapshot is not None and lsn < row.snapshot.exact_lsn
        columns = self.following.columns_to_follow(row, cause.found) if not void else frozenset[str]()
        self.following.record_pause(row, columns, self.on_park(row.oid, lsn, columns))

        def as_paused(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or (found.paused_lsn and found.paused_lsn <= lsn) or found.generation != row.generation:
                return found
            since_ms = found.since_ms if found.state == cause.state and found.since_ms else now_ms
            if void:
                return replace(
                    found, state="refused", reason=reason, fix="It is re-snapshotted automatically.", since_ms=now_ms,
                    snapshot=None, copy=None, side_topic=None, again_ms=0,
                )  # fmt: skip
            # At most one pause from now: the clock may have been wrong when the last pause began.
            from_ms = now_ms + max(0, min(pause_ms, found.again_last_ms + pause_ms - now_ms))
            again_ms = from_ms if cause.again and self._config.copy_again else 0
            if again_ms:
                fix = automatic_recopy_notice(again_ms, again_ms > now_ms)
            else:
                fix = cause.fix or recopy_instruction(name)
            return replace(
                found, state=cause.state, reason=reason, fix=f"{cause.first} {fix}".strip(), paused_lsn=lsn,
                since_ms=since_ms, again_ms=again_ms,
            )  # fmt: skip

        log.error("a table is paused", capture=self._config.name, table=name, reason=reason)
        self.statuses.forget_refusal(name)
        await self.update_row(name, as_paused)
        if void:
            raise RecopyRequiredError(f"a table would be paused at a position before its copy is exact: table={name}.")

    async def record_dropped(self, name: str, reason: str, fix: str) -> None:
        """Record that a table without a stream was dropped or is no longer wanted. The shard of a paused table ends
        where it was paused. The former reason and its fix are void.
        """

        def as_dropped(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.is_streaming or found.state == "dropped":
                return found
            paused_at = f" parked_at={Lsn(found.paused_lsn)}" if found.paused_lsn else ""
            said = f"{reason}: table={name}{paused_at}."
            return replace(found, state="dropped", reason=said, fix=fix, since_ms=self.clock.now_ms(), again_ms=0)

        self.statuses.forget_refusal(name)
        await self.update_row(name, as_dropped)

    async def refuse_table(self, name: str, why: Refusal, oid: int = 0, *, going_on: bool = False) -> None:
        """Record why a table is not captured. A table that flows or is paused keeps its row; if a re-snapshot of it
        failed, its stage status says why. If the re-snapshot cannot begin, `why` replaces the reason of the pause: the
        former cause may be gone. `going_on`: the table is not at fault, so a partial copy is resumed as long as it
        makes progress (MAX_FRUITLESS_ATTEMPTS).
        """
        known = self.rows.get(name)
        going_on = going_on and known is not None and self._attempts.count(known)

        def as_refused(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None:
                found = CaptureTableRow(self._config.name, name)
            elif found.snapshot is not None or found.paused_lsn:
                return found
            since_ms = found.since_ms if found.state == why.state and found.since_ms else self.clock.now_ms()
            return replace(
                found, state=why.state, reason=why.reason[:MAX_REASON_CHARS], fix=why.fix, since_ms=since_ms, oid=oid,
                copy=found.copy if going_on else None, side_topic=found.side_topic if going_on else None,
            )  # fmt: skip

        tried = self.copying.pop(name, None) is not None
        kept = known is not None and (known.snapshot is not None or known.paused_lsn)
        if tried or not kept:
            self.statuses.record_refusal(name, why)
        reported = (known.state, known.reason, known.fix) if known is not None else None
        given_up = known is not None and known.copy is not None and not going_on
        if not kept and (given_up or reported != (why.state, why.reason[:MAX_REASON_CHARS], why.fix)):
            await self.update_row(name, as_refused)
        elif tried and known is not None:
            self.statuses.publish(known)
        elif known is not None and blocked_row(known, why, now_ms := self.clock.now_ms()).reason != known.reason:
            self.statuses.forget_refusal(name)
            await self.update_row(name, lambda row: blocked_row(row, why, now_ms) if row is not None else None)

    async def refuse_all(self, refused: Mapping[str, Refusal]) -> None:
        """Refuse each table of a choice, by name."""
        for name, why in refused.items():
            await self.refuse_table(name, why)

    async def store_identities(self, name: str, identities: Identities) -> None:
        """Store the replica identities of a table and its partitions before they become FULL (publication.py)."""

        await self._store_identities(name, lambda row: replace(row, identities={**row.identities, **identities}))

    async def store_asked_identities(self, name: str, identities: Identities) -> None:
        """Store the replica identities that a table and its partitions have before an administrator is asked to set
        them to FULL.
        """

        await self._store_identities(name, lambda row: with_asked_identities(row, identities))

    async def _store_identities(self, name: str, change: Callable[[CaptureTableRow], CaptureTableRow]) -> None:
        empty = CaptureTableRow(self._config.name, name)
        known = self.rows.get(name)
        if known is None or change(known) != known:
            await self.update_row(name, lambda found: change(found or empty))

    async def store_identity(self, table: TableInfo) -> None:
        """Store the current REPLICA IDENTITY of a table, for listings of tables."""
        identity = to_readable(table.identity)  # an index name in it need not be UTF-8, but a catalogue value must be

        def with_identity(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.oid != table.oid:
                return found
            return replace(found, identity=identity)

        row = self.rows.get(table.name)
        if row is not None and row.oid == table.oid and row.identity != identity:
            await self.update_row(table.name, with_identity)

    async def move_identities(self, row: CaptureTableRow) -> bool:
        """Move the identities noted under an earlier name of a table to the row of its present name. Returns whether
        there is such a row.
        """
        others = [r for r in self.rows.values() if r.oid == row.oid and r.table != row.table]
        heir = next(iter(others), None) if row.oid else None  # 0: it has not been added yet
        if heir is not None and row.identities:
            await self.store_identities(heir.table, row.identities)
        return heir is not None

    async def evolve(self, name: str, step: SchemaStep, lsn: int) -> int:
        """Give the table the description that `step` ends in, from the transaction that commits at `lsn` on; return the
        new version. The catalogue has it before the first record under it is written. Raises TableStateUnknownError, or
        InvalidError if its schema is rejected, in which case nothing has changed.
        """
        row = self.rows[name]
        try:
            ids = await self.register_schemas(row.envelope, row.topic, step.columns)
        except (UnavailableError, UnknownOutcomeError) as error:
            raise TableStateUnknownError(
                f"a schema is possibly not registered: topic={row.topic} cause={error.message!r}."
            ) from error

        def as_evolved(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.columns != step.of or found.generation != row.generation:
                return found
            return replace(
                found, columns=step.columns, evolved=(*found.evolved, lsn), attributes=step.attributes,
                storage=step.storage, schemas=(*found.schemas, *ids),
            )  # fmt: skip

        log.info("a table's description evolves", capture=self._config.name, table=name, by=str(step), at=str(Lsn(lsn)))
        now = await self.update_row(name, as_evolved)
        if now is None or now.columns != step.columns:
            raise TableStateUnknownError(f"another process changed a table's description: table={name}.")
        return now.version

    async def register_schemas(
        self, envelope: str, topic: str, columns: Sequence[ColumnDescription]
    ) -> tuple[tuple[int, int], ...]:
        """Return the ids of the schemas of records with these columns; empty if their envelope has no schemas. Raises
        InvalidError if a schema is rejected, UnavailableError or UnknownOutcomeError if the registry does not answer.
        Idempotent.
        """
        return (await register_schemas(self._schemas, topic, columns),) if envelope == AVRO else ()

    async def update_row(
        self, name: str, change: Callable[[CaptureTableRow | None], CaptureTableRow | None]
    ) -> CaptureTableRow | None:
        """Change a table's row durably. Raises TableStateUnknownError, or InvalidError if nothing was written."""
        async with self._changing:
            try:
                row = await self._catalogue.change_table(self._config.name, name, change)
            except (UnavailableError, UnknownOutcomeError) as error:
                what = f"a table's state is possibly not written: table={name} cause={error.message!r}."
                raise TableStateUnknownError(what) from error
        self.changes += 1
        old = self.rows.get(name)
        if row is None:
            self.rows.pop(name, None)
            self.statuses.remove(name)
        else:
            self.rows[name] = row
            # A refused table that is retried has not recovered yet; a table that was paused has.
            if row.is_streaming or (row.state == "captured" and old is not None and old.paused_lsn):
                self.statuses.remove(name)
            self.statuses.publish(row)
        return row

    @property
    def interrupted_copies(self) -> dict[str, int]:
        """Tables whose interrupted copy waits to be resumed, and their completed chunks. WAL is retained for them."""
        return {row.table: row.copy.done for row in self.rows.values() if row.copy is not None}

    def find_side_topic_table(self, oid: int) -> CaptureTableRow | None:
        """Return the table whose changes under this oid go to a side topic."""
        return next((row for row in self.rows.values() if row.side_topic is not None and row.oid == oid), None)

    def tables_retaining_wal(self) -> set[str]:
        """Return the tables for whose running or interrupted copy WAL is retained, because they have no side topic, or
        theirs has ended.
        """
        found = {name for name in self.copying if (row := self.rows.get(name)) is None or row.side_topic is None}
        for row in self.rows.values():
            if row.copy is not None and (row.side_topic is None or row.side_topic.until_lsn):
                found.add(row.table)
        return found

    async def end_side_topic(self, name: str, lsn: int, reason: str) -> None:
        """End the side topic of a table: add no transaction at or above `lsn` to it, for this reason. The WAL from
        there on is retained, and sent again once the table has joined the stream there. As durable as a pause, and
        durable before that transaction is handed on. Raises TableStateUnknownError.
        """
        row = self.rows.get(name)
        if row is None or row.side_topic is None or 0 < row.side_topic.until_lsn <= lsn:
            return
        log.warning("WAL is retained for a copy", capture=self._config.name, table=name, at=str(Lsn(lsn)), cause=reason)
        topic_id = row.side_topic.topic_id
        self.on_park(row.oid, lsn, self.following.columns(row.oid))

        def with_ended_side_topic(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.side_topic is None or found.side_topic.topic_id != topic_id:
                return found
            # The reader ends it at a row, and another task at its limit, at the same time: the earlier end counts.
            if 0 < found.side_topic.until_lsn <= lsn:
                return found
            return replace(found, side_topic=replace(found.side_topic, until_lsn=lsn))

        await self.update_row(name, with_ended_side_topic)

    async def abandon_copy(self, name: str) -> None:
        """Abandon an interrupted copy. Raises TableStateUnknownError."""
        await self.update_row(
            name, lambda found: replace(found, copy=None, side_topic=None) if found is not None else None
        )

    # copies ---------------------------------------------------------------------------------------
    def publish_copy_status(self, progress: SnapshotProgress) -> None:
        """Publish the statuses of the tables that are copied concurrently with the stream."""
        for name in self.copying:
            row = self.rows.get(name)
            self.statuses.publish_copy(name, row.reason if row is not None else "", progress)

    def finish_copy(self) -> None:
        """Clear the tables of a copy that ended, successfully or not."""
        names, self.copying = [*self.copying], {}
        for name in names:
            self.statuses.end_copy(name)
            if name in self.rows:
                self.statuses.publish(self.rows[name])


def _is_carried(row: CaptureTableRow, lsn: int) -> bool:
    return row.is_streaming or (row.snapshot is not None and lsn < row.paused_lsn)
