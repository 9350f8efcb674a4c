"""What changed in the database is noticed: tables that are gone, others, or described otherwise, while all else flows.

gone, not wanted any more     →  `dropped` at the WAL's end; topic and row go once no pipeline reads it
its description differs       →  what is carried: in force at the WAL's end, else parked there, if the stream did
                                 not come to a row before (schema_change.py)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import structlog
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError, TidemillError, UnavailableError
from tidemill.capture.catalog.catalog_cache import CachedQuery
from tidemill.capture.catalog.columns import attributes_of
from tidemill.capture.catalog.schema_diff import against_catalogue
from tidemill.capture.catalog.table_discovery import Refusal, TableInfo, came_with_rows, describe, list_partitions
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.setup.publication import LOCKED, Entry, give_back, unpublished
from tidemill.capture.tables.auto_recopy import heals
from tidemill.capture.tables.context import SideLoopContext
from tidemill.capture.tables.publication_repair import PublicationRepair
from tidemill.capture.tables.schema_change import PendingSchema
from tidemill.capture.tables.table_setup import delete_topics, gone
from tidemill.capture.tables.table_states import accept
from tidemill.metastore.catalogue import CaptureTableRow, PipelineRow

log = structlog.get_logger()

LOOKS = 3
"""Into a partition that is new. If none comes to an end its table is copied again."""


class Watching:
    """`flushed()`: every transaction at or below it is bound."""

    def __init__(
        self, beside: SideLoopContext, mending: PublicationRepair, coming: PendingSchema, flushed: Callable[[], int]
    ) -> None:
        self._beside = beside
        self._config = beside.config
        self._control = beside.control
        self._desk = beside.desk
        self._catalogue = beside.catalogue
        self._mending = mending
        self._coming = coming
        self._flushed = flushed
        self._published = CachedQuery(beside.control, beside.ask_published)
        self._digests: dict[int, str] = {}
        self._looks: dict[int, dict[int, int]] = {}
        """By table: partitions that are new and not looked into yet, and how often that was given up."""
        self._kept_identities: dict[int, str] = {}
        """What kept an identity from being given back the last time: it is tried again each time, and told once."""

    async def compare(self) -> list[TableInfo]:
        """All tables that there are. Raises what breaks the control connection or the catalogue."""
        found = await self._beside.tables.now()
        choice = await self._beside.choice(found)
        wanted = {table.name: table for table in choice.tables}
        for oid in self._coming.outdated:
            self._digests.pop(oid, None)
        for row in [row for row in self._desk.rows.values() if row.flows]:
            table = wanted.get(row.table)
            if table is None:
                why = choice.refused.get(row.table)
                if why is not None and any((t.name, t.oid) == (row.table, row.oid) for t in found):
                    await self._beside.park_refused(row.table, why)
                else:
                    await self._beside.park(row.table, *gone(row, found), state="dropped")
            elif table.oid == row.oid and self._digests.get(row.oid) != table.digest:
                await self._look_closely(row.table, table)
        for row in [row for row in self._desk.rows.values() if not row.flows and row.state != "dropped"]:
            # A copy in progress refuses its own table. An interrupted set-up may leave a row without a table.
            ended = row.state != "captured" or row.table not in self._desk.copying
            if ended and row.table not in wanted and row.table not in choice.refused:
                await self._desk.gone(row.table, *gone(row, found))
        published = await self._published.now() or {}
        await self._look_at_followed(found, published)
        flowing = [
            row
            for row in self._desk.rows.values()
            if row.flows and row.table in wanted and row.oid == wanted[row.table].oid and altered(row, published)
        ]
        missing = [row.oid for row in flowing if row.oid not in published]
        lacking = await self._unpublished(missing)  # and not dropped since the tables were listed
        for row in flowing:
            if row.oid in published or row.oid in lacking:
                # Changes are missing from some point on; the next session sees it, too, and has it copied again.
                raise UnavailableError(f"the publication of a captured table was altered: table={row.table}.")
        for row in [row for row in self._desk.rows.values() if row.aside is not None]:
            if row.table in wanted and altered(row, published):
                await self._desk.give_up(row.table)  # what changes from here on is in no stream
        await self._desk.refuse_all(choice.refused)
        for info in found:
            await self._desk.identified(info)
        await self._prune(wanted, choice.refused, found)
        self._forget_gone(found)
        return found

    async def _look_at_followed(self, found: list[TableInfo], published: Mapping[int, Entry]) -> None:
        """Tables that are parked, or copied again, and whose stream goes on for some (unaffected_columns.py)."""
        tables = {table.oid: table for table in found}
        for oid in self._desk.following.oids:
            followed, table, entry = self._desk.following.get(oid), tables.get(oid), published.get(oid)
            if followed is None:
                continue
            if table is None or table.name != followed.table:
                self._desk.narrow(oid, None)
            elif entry is None or entry.rows != followed.publication:
                self._desk.narrow(oid, None, "the publication of its table was altered")
            elif self._digests.get(oid) != table.digest:
                now = (await self._control.ask(lambda wire, oid=oid: attributes_of(wire, [oid]))).get(oid)  # type: ignore[misc]
                self._desk.narrow(oid, now)
                self._digests[oid] = table.digest
            else:
                self._desk.still_followed(oid)

    async def _unpublished(self, oids: list[int]) -> set[int]:
        if not oids:
            return set()
        return await self._control.ask(lambda wire: unpublished(wire, self._config.publication, oids))

    def _forget_gone(self, found: list[TableInfo]) -> None:
        """Nothing that this session remembers of a table outlives it."""
        oids = {table.oid for table in found}
        for oid in self._digests.keys() - oids:
            del self._digests[oid]
        for oid in self._looks.keys() - oids:
            del self._looks[oid]
        self._coming.outdated.intersection_update(oids)
        self._mending.forget_but(oids)
        self._desk.following.forget_but(oids)
        noted = {oid for row in self._desk.rows.values() for oid in row.identities}
        for oid in self._kept_identities.keys() - noted:
            del self._kept_identities[oid]

    async def _look_closely(self, name: str, table: TableInfo) -> None:
        now = (await self._control.ask(lambda wire: describe(wire, [table.oid]))).get(table.oid)
        row = self._desk.rows[name]
        if now is None or not row.flows:
            return
        why = await self._coming.look(name, against_catalogue(row.columns, now))
        if why:
            self._coming.forget(name)
            found = (await self._control.ask(lambda wire: attributes_of(wire, [table.oid]))).get(table.oid)
            said, again = f"its description changed: {why}", heals(row, found)
            await self._beside.park(name, said, accept(name), again=again, found=found)
        elif why is not None and (table.kind != "p" or await self._same_partitions(name, table)):
            self._digests[table.oid] = table.digest

    async def _same_partitions(self, name: str, table: TableInfo) -> bool:
        """Rows that come with an attached partition, or go with a detached or dropped one, are in no message of the
        stream. A partition that began empty brings all its rows through the stream. What changed in one while it was
        detached is in none either: it may be back before anybody looks, and its attachment is another one."""
        row = self._desk.rows[name]
        known, attached = row.partitions, dict(zip(row.partitions or (), row.attached, strict=False))
        now = await self._control.ask(lambda wire: list_partitions(wire, table.oid))
        said = first = ""
        before, later = self._looks.pop(table.oid, {}), dict[int, int]()
        if known is not None and set(known) - set(now):
            said = "a partition is gone, and its rows with it, of which the stream says nothing"
        elif any(attached.get(oid, by) != by for oid, by in now.items()):
            said = "a partition was detached and attached again: what changed in it meanwhile is not in the stream"
        for oid in sorted(set(now) - set(known)) if known is not None and not said else ():
            try:
                full = await self._control.ask(lambda wire, oid=oid: came_with_rows(wire, oid))  # type: ignore[misc]
            except (SqlError, MissingError) as error:
                # One that waits keeps nobody from looking into the others.
                log.warning("a new partition is not looked into yet", table=name, partition=oid, cause=str(error))
                later[oid] = before.get(oid, 0) + _gave_up(error)
                if later[oid] == LOOKS:
                    said = f"a partition was attached, and nobody can say whether with rows in it: {error.message}"
                    break
                continue
            except InvalidError as error:
                said = f"a partition was attached, and nobody can say whether with rows in it: {error.message}"
                first = error.fix
                break
            if full:
                said = f"a partition was attached with rows in it, of which the stream says nothing: partition={full}"
                break
        if said:
            await self._beside.park(name, said, again=True, first=first)
            return False
        if later:
            self._looks[table.oid] = later
        seen = {oid: by for oid, by in now.items() if oid not in later}
        if (known, row.attached) != (tuple(seen), tuple(seen.values())):
            await self._desk.change(name, lambda found: _divided(found, seen, now) if found is not None else None)
        return not later

    async def _prune(self, wanted: dict[str, TableInfo], refused: dict[str, Refusal], found: list[TableInfo]) -> None:
        """Rows and topics of tables that are gone go when no pipeline reads them; so do reasons nobody asks for."""
        exist = {table.name for table in found}
        old = [
            row
            for row in self._desk.rows.values()
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
            if f"capture:{self._config.name}:{row.table}" in read or row.parked_lsn - 1 > self._flushed():
                continue
            if row.identities and not self._config.manual and not await self._given_back(row, wanted):
                continue
            await delete_topics(self._catalogue, row.topic)
            await self._desk.change(row.table, lambda _: None)
            log.info("a table that is gone is forgotten", capture=self._config.name, table=row.table)

    async def _given_back(self, row: CaptureTableRow, wanted: dict[str, TableInfo]) -> bool:
        """A table that the capture leaves has the identity again that it came with; False = not yet. While it is
        published it must have a whole one (publication.py, P1), and one that is taken in under another name keeps what
        it is given for that."""
        if await self._desk.hand_over(row):
            return True
        if any(table.oid == row.oid for table in wanted.values()):
            return False
        published = await self._beside.published() or {}
        if row.oid in published:
            return False
        for oid, (relation, before) in row.identities.items():
            try:
                await self._control.ask(lambda wire, oid=oid, b=before: give_back(wire, oid, b, attempts=1))  # type: ignore[misc]
            except (SqlError, InvalidError) as error:
                if self._kept_identities.get(oid) != str(error):
                    log.warning("an identity is not given back yet", relation=relation, cause=str(error))
                self._kept_identities[oid] = str(error)
                return False
            self._kept_identities.pop(oid, None)
        return True


def altered(row: CaptureTableRow, published: Mapping[int, Entry]) -> bool:
    """Not the publication that the table was copied under (publication.py, P7), be it that it says the same again."""
    entry = published.get(row.oid)
    return entry is None or (bool(row.publication) and entry.rows != row.publication)


def _gave_up(error: TidemillError) -> bool:
    """Whether a look into a new partition took too long, as the next one does too. Who holds its lock lets go of it one
    day, and what is gone is no partition any more."""
    return isinstance(error, SqlError) and error.sqlstate not in LOCKED


def _divided(row: CaptureTableRow, partitions: Mapping[int, int], there: Collection[int]) -> CaptureTableRow:
    """With these partitions; of those that are not `there` any more nothing is kept."""
    kept = {oid: noted for oid, noted in row.identities.items() if oid == row.oid or oid in there}
    return replace(row, partitions=tuple(partitions), attached=tuple(partitions.values()), identities=kept)
