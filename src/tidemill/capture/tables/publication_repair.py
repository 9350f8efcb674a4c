"""Statements of the application: none fails because a table is published, and no row comes without its old one.

Published tables whose statements would fail, or that lack old rows, are mended or taken out; by a capture that is
manual they are parked, and told. What is parked is taken out of the publication. Where somebody else's publication
makes them fail, the identity that the capture gave is taken back (identity_withdrawal.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

import structlog

from tidemill.base.errors import UnavailableError
from tidemill.capture.catalog.catalog_cache import CachedQuery
from tidemill.capture.catalog.foreign_publications import Objections
from tidemill.capture.catalog.table_discovery import Hazard, Refusal, TableInfo, hazards
from tidemill.capture.naming import odd
from tidemill.capture.postgres.connection import Wire, identifier
from tidemill.capture.setup.publication import not_full, publish, unpublish
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.identity_withdrawal import withdraw, withheld
from tidemill.capture.tables.table_states import recopy
from tidemill.metastore.catalogue import CaptureTableRow

log = structlog.get_logger()


class PublicationRepair:
    def __init__(self, beside: SideLoopContext) -> None:
        self._beside = beside
        self._config = beside.config
        self._control = beside.control
        self._desk = beside.desk
        self._hazards = CachedQuery(beside.control, self._ask_hazards)
        self._no_identity: dict[int, str] = {}
        """What kept a table from its whole identity the last time: it is tried again each second, and told once."""

    def forget_but(self, oids: Container[int]) -> None:
        for oid in [oid for oid in self._no_identity if oid not in oids]:
            del self._no_identity[oid]

    async def mend(self) -> None:
        """No statement of the application fails because a table is published, and no row comes without its old one."""
        config = self._config
        objected = await self._beside.objections()
        await self.withdraw(objected)
        for hazard in await self._hazards.now():
            row = self._desk.by_oid(hazard.oid)
            objection = objected.get(hazard.oid)
            if objection is not None and objection.refuses and not (hazard.virtual or hazard.breaks):
                continue  # it must not have a whole identity
            if config.manual:
                await self._tell_hazard(hazard, row)
                continue
            if row is not None and not hazard.virtual and config.whole and objection is None:
                # Noted before the connection is asked to alter it: what consensus takes is no silence of PostgreSQL's.
                earlier = await self._control.ask(lambda wire, oid=hazard.oid: not_full(wire, oid))  # type: ignore[misc]
                mended = False
                # What cannot be noted is left as it is: the table is parked for the name that is not UTF-8
                # (table_discovery.py).
                if not any(odd(name) for noted in earlier.values() for name in noted):
                    await self._desk.note(row.table, earlier)
                    mended = await self._control.ask(lambda wire, table=hazard.table: self._full(wire, table))  # type: ignore[misc]
                if mended or not hazard.breaks:
                    continue
            if hazard.virtual or hazard.breaks:
                await self._control.ask(lambda wire, name=hazard.name: unpublish(wire, self._config, name))  # type: ignore[misc]
                self._desk.narrow(hazard.oid, None, "its table is not published any more")
            if row is not None and not (hazard.virtual or hazard.breaks):
                said = "its replica identity does not say its primary key"
                await self._beside.park(row.table, said, _mend_by(hazard))
            elif row is not None:
                what = "a virtual generated column" if hazard.virtual else "its replica identity, which was taken away,"
                lacks = hazard.breaks and not hazard.virtual and not config.whole
                await self._beside.park(
                    row.table, f"{what} would make its UPDATE and DELETE fail", _mend_by(hazard) if lacks else "",
                    again=not hazard.virtual and not lacks,
                )  # fmt: skip
        if not config.manual:
            await self._unpublish_parked()

    async def guard(self, ended: asyncio.Event, every_s: float) -> None:
        """Until the stream begins, whose watch does it then: no identity may make the application's statements fail."""
        while not ended.is_set():
            await self.withdraw(await self._beside.objections(), streams=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await ended.wait()

    async def withdraw(self, objected: Objections, *, streams: bool = True) -> None:
        """`streams`: else nobody would know of a park, and the first row that lacks its old one brings it about. Raises
        UnavailableError where a copy is in the way: the next session begins with it (identity_withdrawal.py, W1)."""
        if not objected:
            return
        rows, left = self._desk.rows, set()
        for one in await self._control.ask(lambda wire: withheld(wire, self._config, rows.values(), objected)):
            if not await self._control.ask(lambda wire, one=one: withdraw(wire, self._config, one)):  # type: ignore[misc]
                left.add(one.row.table)
        for row in [row for row in rows.values() if row.oid in objected and objected[row.oid].refuses]:
            why = Refusal("refused", objected[row.oid].reason, objected[row.oid].fix, again=True)
            if row.flows and streams:
                await self._beside.park_refused(row.table, why)
            elif row.snapshot is None and row.state == "captured":
                await self._desk.refuse(row.table, why, row.oid)
                if row.table in left:
                    raise UnavailableError(
                        f"a copy stands in the way of the identity that a table must have: {why.reason}"
                    )

    async def _ask_hazards(self, wire: Wire) -> list[Hazard]:
        return await hazards(wire, self._config.publication, self._config.whole)

    async def _tell_hazard(self, hazard: Hazard, row: CaptureTableRow | None) -> None:
        """Of a capture that alters nothing. A table whose old rows are to be whole flows until the stream comes to one
        that is not."""
        if row is None or not (hazard.virtual or hazard.breaks or hazard.lacking):
            return
        what = "a virtual generated column" if hazard.virtual else "its replica identity"
        if hazard.virtual or hazard.breaks:
            drop = f"ALTER PUBLICATION {identifier(self._config.publication)} DROP TABLE {hazard.name}"
            await self._beside.park(
                row.table, f"{what} makes its UPDATE and DELETE fail while it is published",
                f"Run {drop}; {recopy(row.table)}",
            )  # fmt: skip
        else:
            await self._beside.park(row.table, f"{what} does not say its primary key", _mend_by(hazard))

    async def _full(self, wire: Wire, table: TableInfo) -> bool:
        """Give a published table, and its partitions, a whole identity again; False while others hold its lock."""
        done = await publish(wire, self._config, [table], {table.oid}, attempts=1, note=self._desk.note)
        for error in done.failed.values():
            if self._no_identity.get(table.oid) != str(error):
                log.warning("a captured table has no whole identity yet", table=table.name, cause=str(error))
            self._no_identity[table.oid] = str(error)
        if not done.failed:
            self._no_identity.pop(table.oid, None)
        return not done.failed

    async def _unpublish_parked(self) -> None:
        """The stream carries nothing of them, so nothing need be decoded, or stand in the application's way. One that
        somebody still follows is carried (unaffected_columns.py).

        A copy may begin at any await, and takes tables whose rows still say parked: it publishes them after it has
        asked on this connection, so what is looked at again while the connection is ours stays so."""

        def parked() -> set[int]:
            rows = self._desk.rows.values()
            kept = {row.oid for row in rows if row.recopy or row.again_ms or row.state == "captured"}
            kept |= self._desk.following.oids
            return {row.oid for row in rows if row.parked_lsn} - kept - {*self._desk.copying.values()}

        async def take_out(wire: Wire, oid: int, name: str) -> None:
            if oid in parked():
                await unpublish(wire, self._config, name)

        if not parked():
            return
        published = await self._beside.published() or {}
        for oid in parked() & published.keys():
            await self._control.ask(lambda wire, oid=oid: take_out(wire, oid, published[oid].name))  # type: ignore[misc]


def _mend_by(hazard: Hazard) -> str:
    return f"Run {hazard.lacking}; {recopy(hazard.table.name)}"
