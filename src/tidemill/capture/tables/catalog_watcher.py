"""Notice changes in the database while the stream continues: tables that were dropped, replaced, or described
differently.

dropped, no longer wanted     →  `dropped` at the WAL end; topic and row are deleted once no pipeline reads them
its description differs       →  a change that can be carried takes effect at the WAL end, any other pauses the table
                                 there, unless the stream met a row before (schema_change.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.capture.catalog.catalog_cache import CachedQuery
from tidemill.capture.catalog.columns import read_attributes
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.catalog.schema_diff import diff_against_catalogue
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.catalog.table_discovery import TableInfo, find_rows_before_attachment, list_partitions
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.publication import LOCK_SQLSTATES, PublishedTable, find_unpublished, restore_identity
from tidemill.capture.tables.auto_recopy import can_copy_resolve
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.publication_repair import PublicationRepair
from tidemill.capture.tables.schema_change import PendingSchema
from tidemill.capture.tables.table_reasons import PauseCause, accept_instruction, explain_missing_table
from tidemill.capture.tables.table_setup import delete_found_topics, find_topics, topics_of
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow

log = structlog.get_logger()

MAX_PARTITION_CHECKS = 3
"""Checks of a new partition for rows. If none of them completes, the table is re-snapshotted."""


class CatalogWatcher:
    """Comparison of the catalogue with the rows. Every transaction at or below `flushed()` is bound."""

    def __init__(
        self, context: SideLoopContext, repair: PublicationRepair, pending: PendingSchema, flushed: Callable[[], int]
    ) -> None:
        self._context = context
        self._config = context.config
        self._control = context.control
        self._states = context.states
        self._catalogue = context.catalogue
        self._repair = repair
        self._pending = pending
        self._flushed = flushed
        self._published = CachedQuery(context.control, context.query_published)
        self._digests: dict[int, str] = {}
        self._looks: dict[int, dict[int, int]] = {}
        """New partitions by table that were not checked yet, and the number of failed checks."""
        self._kept_identities: dict[int, str] = {}
        """Reason why an identity was not restored at the last attempt. It is retried each time, and logged once."""

    async def compare_catalogue(self) -> list[TableInfo]:
        """Compare the catalogue with the captured tables, and return all existing tables. Raises errors of the control
        connection and of the catalogue.
        """
        found = await self._context.tables.fetch()
        choice = await self._context.choose_tables(found)
        wanted = {table.name: table for table in choice.tables}
        for oid in self._pending.outdated:
            self._digests.pop(oid, None)
        for row in [row for row in self._states.rows.values() if row.is_streaming]:
            table = wanted.get(row.table)
            if table is None:
                why = choice.refused.get(row.table)
                if why is not None and any((t.name, t.oid) == (row.table, row.oid) for t in found):
                    cause = PauseCause.of_refusal(why)
                else:
                    cause = PauseCause(*explain_missing_table(row, found), state="dropped")
                await self._context.pause_at_wal_end(row.table, cause)
            elif table.oid == row.oid and self._digests.get(row.oid) != table.digest:
                await self._check_description(row.table, table)
        for row in [row for row in self._states.rows.values() if not row.is_streaming and row.state != "dropped"]:
            # A copy in progress refuses its own table. An interrupted set-up may leave a row without a table.
            ended = row.state != "captured" or row.table not in self._states.copying
            if ended and row.table not in wanted and row.table not in choice.refused:
                await self._states.record_dropped(row.table, *explain_missing_table(row, found))
        published = await self._published.fetch() or {}
        await self._check_followed_tables(found, published)
        flowing = [
            row
            for row in self._states.rows.values()
            if row.is_streaming
            and row.table in wanted
            and row.oid == wanted[row.table].oid
            and is_publication_altered(row, published)
        ]
        missing = [row.oid for row in flowing if row.oid not in published]
        lacking = await self._find_unpublished(missing)  # but not dropped since the tables were listed
        for row in flowing:
            if row.oid in published or row.oid in lacking:
                # Changes are missing from some point on. The next session finds the same, and re-snapshots the table.
                raise UnavailableError(f"the publication of a captured table was altered: table={row.table}.")
        for row in [row for row in self._states.rows.values() if row.side_topic is not None]:
            if row.table in wanted and is_publication_altered(row, published):
                await self._states.abandon_copy(row.table)  # what changes from here on is in no stream
        await self._states.refuse_all(choice.refused)
        for info in found:
            await self._states.store_identity(info)
        await self._prune_rows(wanted, choice.refused, found)
        self._forget_dropped_tables(found)
        return found

    async def _check_followed_tables(self, found: list[TableInfo], published: Mapping[int, PublishedTable]) -> None:
        """Check tables that are paused, or re-snapshotted, and whose stream continues for some shapes
        (unaffected_columns.py).
        """
        tables = {table.oid: table for table in found}
        for oid in self._states.following.oids:
            followed, table, entry = self._states.following.get(oid), tables.get(oid), published.get(oid)
            if followed is None:
                continue
            if table is None or table.name != followed.table:
                self._states.following.update_columns(oid, None)
            elif entry is None or entry.rows != followed.publication:
                self._states.following.update_columns(oid, None, "the publication of its table was altered")
            elif self._digests.get(oid) != table.digest:
                now = (await self._control.run(lambda wire, oid=oid: read_attributes(wire, [oid]))).get(oid)  # type: ignore[misc]
                self._states.following.update_columns(oid, now)
                self._digests[oid] = table.digest
            else:
                self._states.following.end_if_unfollowed(oid)

    async def _find_unpublished(self, oids: list[int]) -> set[int]:
        if not oids:
            return set()
        return await self._control.run(lambda wire: find_unpublished(wire, self._config.publication, oids))

    def _forget_dropped_tables(self, found: list[TableInfo]) -> None:
        """Forget what this session remembers of tables that no longer exist."""
        oids = {table.oid for table in found}
        for oid in self._digests.keys() - oids:
            del self._digests[oid]
        for oid in self._looks.keys() - oids:
            del self._looks[oid]
        self._pending.outdated.intersection_update(oids)
        self._repair.forget_others(oids)
        self._states.following.forget_others(oids)
        noted = {oid for row in self._states.rows.values() for oid in row.identities}
        for oid in self._kept_identities.keys() - noted:
            del self._kept_identities[oid]

    async def _check_description(self, name: str, table: TableInfo) -> None:
        now = (await self._control.run(lambda wire: describe_tables(wire, [table.oid]))).get(table.oid)
        row = self._states.rows[name]
        if now is None or not row.is_streaming:
            return
        why = await self._pending.judge_description(name, diff_against_catalogue(row.columns, now))
        if why:
            self._pending.forget(name)
            found = (await self._control.run(lambda wire: read_attributes(wire, [table.oid]))).get(table.oid)
            said, again = f"its description changed: {why}", can_copy_resolve(row, found)
            cause = PauseCause(said, accept_instruction(name), again=again, found=found)
            await self._context.pause_at_wal_end(name, cause)
        elif why is not None and (table.kind != "p" or await self._check_partitions(name, table)):
            self._digests[table.oid] = table.digest

    async def _check_partitions(self, name: str, table: TableInfo) -> bool:
        """Return whether the partitions are the same; otherwise pause the table. The rows that arrive with an attached
        partition, or leave with a detached or dropped one, are in no message of the stream. A partition that was empty
        when attached brings all its rows through the stream. Changes made in a partition while it was detached are in
        no message either. It may be back before the next check, but its attachment is a different one.
        """
        row = self._states.rows[name]
        known, attached = row.partitions, dict(zip(row.partitions or (), row.attached, strict=False))
        now = await self._control.run(lambda wire: list_partitions(wire, table.oid))
        said = first = ""
        before, later = self._looks.pop(table.oid, {}), dict[int, int]()
        if known is not None and set(known) - set(now):
            said = "a partition is gone, and the removal of its rows is not in the stream"
        elif any(attached.get(oid, by) != by for oid, by in now.items()):
            said = "a partition was detached and attached again: changes in between are not in the stream"
        for oid in sorted(set(now) - set(known)) if known is not None and not said else ():
            try:
                full = await self._control.run(lambda wire, oid=oid: find_rows_before_attachment(wire, oid))  # type: ignore[misc]
            except (SqlError, MissingError) as error:
                # A partition whose check has to wait must not prevent the checks of the others.
                log.warning("a new partition is not checked yet", table=name, partition=oid, cause=str(error))
                later[oid] = before.get(oid, 0) + _is_too_slow(error)
                if later[oid] == MAX_PARTITION_CHECKS:
                    said = f"a partition was attached, and it is unknown whether it had rows: {error.message}"
                    break
                continue
            except InvalidError as error:
                said = f"a partition was attached, and it is unknown whether it had rows: {error.message}"
                first = error.fix
                break
            if full:
                said = f"a partition was attached with rows that are not in the stream: partition={full}"
                break
        if said:
            await self._context.pause_at_wal_end(name, PauseCause(said, again=True, first=first))
            return False
        if later:
            self._looks[table.oid] = later
        seen = {oid: by for oid, by in now.items() if oid not in later}
        if (known, row.attached) != (tuple(seen), tuple(seen.values())):
            await self._states.update_row(
                name, lambda found: _with_partitions(found, seen, now) if found is not None else None
            )
        return not later

    async def _prune_rows(
        self, wanted: dict[str, TableInfo], refused: dict[str, Refusal], found: list[TableInfo]
    ) -> None:
        """Delete rows and topics of dropped tables that no pipeline reads, and reasons that are no longer needed."""
        exist = {table.name for table in found}
        old = [
            row
            for row in self._states.rows.values()
            if row.table not in wanted
            and row.table not in refused
            and (row.state in ("dropped", "refused", "left") or row.table not in exist)
        ]
        if not old:
            return
        read = {
            source for row in await self._catalogue.list(PipelineRow, fresh=False) for source in row.tables.values()
        }
        for row in old:
            if f"capture:{self._config.name}:{row.table}" in read or row.paused_lsn - 1 > self._flushed():
                continue
            if row.identities and not self._config.manual and not await self._restore_identities(row, wanted):
                continue
            topics = await find_topics(self._catalogue, *topics_of(row.topic))
            # A table that is being added again has written its row before it replaces these topics.
            if self._states.rows.get(row.table) != row:
                continue
            await delete_found_topics(self._catalogue, topics)
            await self._states.update_row(row.table, lambda found, row=row: None if found == row else found)  # type: ignore[misc]
            log.info("a dropped table is deleted from the catalogue", capture=self._config.name, table=row.table)

    async def _restore_identities(self, row: CaptureTableRow, wanted: dict[str, TableInfo]) -> bool:
        """Restore the original identity of a table that leaves the capture; False = not yet. While the table is
        published it must have a full one (publication.py), and a table that is added under another name keeps the
        identity that it got for that.
        """
        if await self._states.move_identities(row):
            return True
        if any(table.oid == row.oid for table in wanted.values()):
            return False
        published = await self._context.read_published() or {}
        if row.oid in published:
            return False
        for oid, (relation, before) in row.identities.items():
            try:
                await self._control.run(lambda wire, oid=oid, b=before: restore_identity(wire, oid, b, attempts=1))  # type: ignore[misc]
            except (SqlError, InvalidError) as error:
                if self._kept_identities.get(oid) != str(error):
                    log.warning("an identity is not restored yet", relation=relation, cause=str(error))
                self._kept_identities[oid] = str(error)
                return False
            self._kept_identities.pop(oid, None)
        return True


def is_publication_altered(row: CaptureTableRow, published: Mapping[int, PublishedTable]) -> bool:
    """Return whether the table is no longer published by the rows under which it was copied (publication.py), even if
    the definition is the same again.
    """
    entry = published.get(row.oid)
    return entry is None or (bool(row.publication) and entry.rows != row.publication)


def _is_too_slow(error: TidemillError) -> bool:
    """Return whether a check of a new partition took too long, as the next one would. In contrast, a lock is released
    eventually, and a dropped table is no longer a partition.
    """
    return isinstance(error, SqlError) and error.sqlstate not in LOCK_SQLSTATES


def _with_partitions(row: CaptureTableRow, partitions: Mapping[int, int], there: Collection[int]) -> CaptureTableRow:
    """Return the row with these partitions, without identities of relations that are not `there` any more."""
    kept = {oid: noted for oid, noted in row.identities.items() if oid == row.oid or oid in there}
    return replace(row, partitions=tuple(partitions), attached=tuple(partitions.values()), identities=kept)
