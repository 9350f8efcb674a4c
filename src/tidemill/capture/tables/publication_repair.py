"""Repair the publication: no statement of the application fails because a table is published, and no row arrives
without its old one.

Published tables whose statements would fail, or that lack old rows, are repaired or removed from the publication. A
manual capture pauses them and reports the statement to run. A paused table is removed from the publication. If another
publication makes statements fail, the identity that the capture set is withdrawn (identity_withdrawal.py).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Container
from contextlib import suppress

import structlog

from tidemill.base.errors import UnavailableError
from tidemill.capture.catalog.catalog_cache import CachedQuery
from tidemill.capture.catalog.foreign_publications import Objections
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.catalog.table_discovery import Hazard, TableInfo, find_hazards
from tidemill.capture.naming import has_invalid_bytes
from tidemill.capture.postgres.connection import PgConnection, identifier
from tidemill.capture.setup.identity_withdrawal import find_unwanted_full_identities, withdraw_identity
from tidemill.capture.setup.publication import PublishRequest, find_partial_identities, publish_tables, unpublish_table
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.table_reasons import PauseCause, recopy_instruction
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()


class PublicationRepair:
    def __init__(self, context: SideLoopContext) -> None:
        self._context = context
        self._config = context.config
        self._control = context.control
        self._states = context.states
        self._hazards = CachedQuery(context.control, self._query_hazards)
        self._no_identity: dict[int, str] = {}
        """Reason why a table did not get a full replica identity at the last attempt, which is repeated each second.
        Logged once.
        """

    def forget_others(self, oids: Container[int]) -> None:
        for oid in [oid for oid in self._no_identity if oid not in oids]:
            del self._no_identity[oid]

    async def repair(self) -> None:
        """Repair all published tables whose statements would fail, or whose rows lack the old one."""
        config = self._config
        objected = await self._context.fetch_objections()
        await self.withdraw_identities(objected)
        for hazard in await self._hazards.fetch():
            row = self._states.find_carried(hazard.oid)
            objection = objected.get(hazard.oid)
            if objection is not None and objection.refuses and not (hazard.virtual or hazard.breaks):
                continue  # it must not have a full replica identity
            if config.manual:
                await self._pause_for_hazard(hazard, row)
                continue
            if row is not None and not hazard.virtual and config.requires_full_identity and objection is None:
                # Noted before the connection is asked to alter it: the time that consensus takes must not look like a
                # silent server.
                earlier = await self._control.run(lambda wire, oid=hazard.oid: find_partial_identities(wire, oid))  # type: ignore[misc]
                mended = False
                # An identity that cannot be noted is not altered: a table is paused for a name that is not UTF-8
                # (table_discovery.py).
                if not any(has_invalid_bytes(name) for noted in earlier.values() for name in noted):
                    await self._states.store_identities(row.table, earlier)
                    repair = functools.partial(self._set_full_identity, table=hazard.table)
                    mended = await self._control.run(repair)
                if mended or not hazard.breaks:
                    continue
            if hazard.virtual or hazard.breaks:
                await self._control.run(lambda wire, name=hazard.name: unpublish_table(wire, self._config, name))  # type: ignore[misc]
                self._states.following.update_columns(hazard.oid, None, "its table is no longer published")
            if row is not None and not (hazard.virtual or hazard.breaks):
                said = "its replica identity does not include its primary key"
                await self._context.pause_at_wal_end(row.table, PauseCause(said, _repair_instruction(hazard)))
            elif row is not None:
                what = "a virtual generated column" if hazard.virtual else "its replica identity, which was removed,"
                lacks = hazard.breaks and not hazard.virtual and not config.requires_full_identity
                cause = PauseCause(
                    f"{what} would make its UPDATE and DELETE fail",
                    _repair_instruction(hazard) if lacks else "",
                    again=not hazard.virtual and not lacks,
                )
                await self._context.pause_at_wal_end(row.table, cause)
        if not config.manual:
            await self._unpublish_paused()

    async def guard_identities(self, ended: asyncio.Event, every_s: float) -> None:
        """Check identities until the stream begins, whose watch then takes over: no identity may make the application's
        statements fail.
        """
        while not ended.is_set():
            await self.withdraw_identities(await self._context.fetch_objections(), streams=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await ended.wait()

    async def withdraw_identities(self, objected: Objections, *, streams: bool = True) -> None:
        """Withdraw identities that publications object to, and pause or refuse their tables. `streams`: False while no
        stream runs; then a table is not paused here but at the first row that lacks its old one. Raises
        UnavailableError if a copy blocks the withdrawal: the next session begins with it (identity_withdrawal.py).
        """
        if not objected:
            return
        rows, left = self._states.rows, set()
        for one in await self._control.run(
            lambda wire: find_unwanted_full_identities(wire, self._config, rows.values(), objected)
        ):
            if not await self._control.run(lambda wire, one=one: withdraw_identity(wire, self._config, one)):  # type: ignore[misc]
                left.add(one.row.table)
        for row in [row for row in rows.values() if row.oid in objected and objected[row.oid].refuses]:
            why = Refusal("refused", objected[row.oid].reason, objected[row.oid].fix, again=True)
            if row.is_streaming and streams:
                await self._context.pause_at_wal_end(row.table, PauseCause.of_refusal(why))
            elif row.snapshot is None and row.state == "captured":
                await self._states.refuse_table(row.table, why, row.oid)
                if row.table in left:
                    raise UnavailableError(f"a copy blocks the replica identity that a table must have: {why.reason}")

    async def _query_hazards(self, wire: PgConnection) -> list[Hazard]:
        return await find_hazards(wire, self._config.publication, self._config.requires_full_identity)

    async def _pause_for_hazard(self, hazard: Hazard, row: CaptureTableRow | None) -> None:
        """Pause a table of a manual capture, which alters nothing. A table whose old rows must be whole flows until the
        stream meets a row that is not.
        """
        if row is None or not (hazard.virtual or hazard.breaks or hazard.lacking):
            return
        what = "a virtual generated column" if hazard.virtual else "its replica identity"
        if hazard.virtual or hazard.breaks:
            drop = f"ALTER PUBLICATION {identifier(self._config.publication)} DROP TABLE {hazard.name}"
            cause = PauseCause(
                f"{what} makes its UPDATE and DELETE fail while it is published",
                f"Run {drop}; {recopy_instruction(row.table)}",
            )
        else:
            cause = PauseCause(f"{what} does not include its primary key", _repair_instruction(hazard))
        await self._context.pause_at_wal_end(row.table, cause)

    async def _set_full_identity(self, wire: PgConnection, table: TableInfo) -> bool:
        """Set a published table and its partitions to a full replica identity again. Returns False while others hold
        its lock.
        """
        done = await publish_tables(wire, self._config, PublishRequest([table], {table.oid}), self._states)
        for error in done.failed.values():
            if self._no_identity.get(table.oid) != str(error):
                log.warning("a captured table has no full replica identity yet", table=table.name, cause=str(error))
            self._no_identity[table.oid] = str(error)
        if not done.failed:
            self._no_identity.pop(table.oid, None)
        return not done.failed

    async def _unpublish_paused(self) -> None:
        """Remove paused tables from the publication: the stream carries nothing of them, so PostgreSQL need not decode
        them, and they must not block the application. A table that shapes still follow is carried
        (unaffected_columns.py).

        A copy may begin at any await, and may copy tables whose rows still say parked. It publishes them after it has
        used this connection, so a check while this task has the connection remains valid.
        """

        def paused_oids() -> set[int]:
            rows = self._states.rows.values()
            kept = {row.oid for row in rows if row.recopy or row.again_ms or row.state == "captured"}
            kept |= self._states.following.oids
            return {row.oid for row in rows if row.paused_lsn} - kept - {*self._states.copying.values()}

        async def unpublish_if_paused(wire: PgConnection, oid: int, name: str) -> None:
            if oid in paused_oids():
                await unpublish_table(wire, self._config, name)

        if not paused_oids():
            return
        published = await self._context.read_published() or {}
        for oid in paused_oids() & published.keys():
            await self._control.run(lambda wire, oid=oid: unpublish_if_paused(wire, oid, published[oid].name))  # type: ignore[misc]


def _repair_instruction(hazard: Hazard) -> str:
    return f"Run {hazard.lacking}; {recopy_instruction(hazard.table.name)}"
