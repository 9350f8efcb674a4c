"""Tables beside the stream: what changed in the database is noticed, and what is fresh is taken in, while all else
flows.

    every table_poll_s    the catalogue is compared with what is captured
    every HAZARD_POLL_S   published tables whose statements would fail, or lack old rows, are mended or taken out

    new, made anew, asked for again (recopy), refused before    →  published  →  topic anew  →  copied  →  in the stream
    gone, not wanted any more     →  `dropped` at the WAL's end; topic and row go once no pipeline reads it
    its description differs       →  parked at the WAL's end, if the stream did not come to a row before

J1  While a table is copied, nothing is confirmed to PostgreSQL beyond where the copy began: what the stream tells of
    it meanwhile is told again by the next session, which begins when the copy is done. The other tables know their
    part of that by their bindings.
J2  A copy that fails is told under its table, and tried again after a pause that doubles; one that a lock kept out,
    as soon as who was named for it holds the table no more.
J3  A table is parked at the WAL end as of after its difference was seen, and from before that is asked for until the
    park is durable the stream's reader takes nothing more: no transaction at or above it is bound or confirmed by a
    session whose successor would not know of the park. Rows that came under the new description before were found by
    the reader (Session).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Conflict, Fenced, Invalid, Missing, TidemillError, Unavailable, Unknown
from tidemill.base.frontier import Lsn
from tidemill.base.tasks import Restarts, is_fault, sentence
from tidemill.capture.config import CaptureConfig
from tidemill.capture.copying import take_snapshot
from tidemill.capture.desk import Desk, Unrecorded
from tidemill.capture.difference import against_catalogue
from tidemill.capture.entry import delete_topic, gone, producer_id, refusal_of, start_table, without_taken
from tidemill.capture.holders import table_holder
from tidemill.capture.publication import LOCK_ATTEMPTS, publish, published_tables, unpublish
from tidemill.capture.snapshot import SnapshotProgress
from tidemill.capture.tables import (
    Choice,
    Refusal,
    TableInfo,
    came_with_rows,
    describe,
    hazards,
    list_partitions,
    list_tables,
    resolve,
)
from tidemill.capture.topic_writer import CapturedTable, TopicWriter
from tidemill.capture.watch import Control
from tidemill.capture.wire.connection import Wire
from tidemill.capture.wire.errors import SqlError
from tidemill.metastore.catalogue import Catalogue, PipelineRow
from tidemill.topics.front import TopicLog

log = structlog.get_logger()

HAZARD_POLL_S = 1.0
LONGEST_PAUSE_S = 300.0


class Joined(Unavailable):
    """Tables were copied: the session begins anew, with them."""


class Joining:
    """`hold(True)`: from now on confirm nothing beyond what is confirmed; False: go on. `flushed()`: every
    transaction at or below it is bound. `retire(oid)`: nothing is written for this relation any more, nor under way.
    `parking`: while it is taken, the stream's reader stands."""

    def __init__(
        self,
        config: CaptureConfig,
        control: Control,
        desk: Desk,
        *,
        topics: TopicLog,
        catalogue: Catalogue,
        clock: Clock,
        rand: Rand,
        hold: Callable[[bool], None],
        flushed: Callable[[], int],
        retire: Callable[[int], Awaitable[None]],
        parking: asyncio.Lock,
    ) -> None:
        self._config = config
        self._control = control
        self._desk = desk
        self._topics = topics
        self._catalogue = catalogue
        self._clock = clock
        self._rand = rand
        self._hold = hold
        self._flushed = flushed
        self._retire = retire
        self._parking = parking
        self._digests: dict[int, str] = {}
        self._pauses: dict[str, tuple[Restarts, float]] = {}
        self._wake = asyncio.Event()
        self.progress = SnapshotProgress(clock)

    @property
    def copying(self) -> tuple[str, ...]:
        """Tables that are taken in just now: the confirmation is held for them."""
        return tuple(self._desk.copying)

    def look(self) -> None:
        """Somebody asks for a table that is not known: look now."""
        self._wake.set()

    def mark(self) -> None:
        """Tell what is copied, and how far it is."""
        self._desk.tell_copy(self.progress)

    # the two loops --------------------------------------------------------------------------------
    async def watch(self) -> None:
        """For ever. Raises what breaks the control connection or the catalogue."""
        while True:
            await self._compare()
            next_s = self._clock.monotonic_s() + self._config.table_poll_s
            while not self._wake.is_set() and (left_s := next_s - self._clock.monotonic_s()) > 0:
                await self._mend()
                try:
                    async with asyncio.timeout(min(left_s, HAZARD_POLL_S)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            self._wake.clear()

    async def take_in(self) -> None:
        """Until something was taken in: then it raises Joined."""
        while True:
            found = await self._control.ask(list_tables)
            pending = await self._pending(found)
            if pending and await self._copied_all(pending):
                raise Joined(f"tables were taken in: capture={self._config.name}.")
            await asyncio.sleep(self._config.table_poll_s)

    # what changed ---------------------------------------------------------------------------------
    async def _compare(self) -> None:
        found = await self._control.ask(list_tables)
        choice = await self._choice(found)
        wanted = {table.name: table for table in choice.tables}
        for row in [row for row in self._desk.rows.values() if row.flows]:
            table = wanted.get(row.table)
            if table is None:
                why = choice.refused.get(row.table)
                if why is not None and any((t.name, t.oid) == (row.table, row.oid) for t in found):
                    await self._park(row.table, why.reason)
                else:
                    await self._park(row.table, *gone(row, found), state="dropped")
            elif table.oid == row.oid and self._digests.get(row.oid) != table.digest:
                await self._look_closely(row.table, table)
        published = await self._control.ask(lambda wire: published_tables(wire, self._config.publication)) or {}
        for row in [row for row in self._desk.rows.values() if row.flows]:
            if row.table in wanted and row.oid == wanted[row.table].oid and row.oid not in published:
                # Changes are missing from here on; the next session sees it, too, and has it copied again.
                raise Unavailable(f"a captured table was unpublished: table={row.table}.")
        for name, why in choice.refused.items():
            await self._desk.refuse(name, why)
        await self._prune(wanted, choice.refused, found)

    async def _choice(self, found: list[TableInfo]) -> Choice:
        try:
            choice = await self._control.ask(lambda wire: _resolved(wire, self._config, found))
        except Missing:
            return Choice((), {})
        rows = self._desk.rows
        fresh = tuple(t for t in choice.tables if t.name not in rows or rows[t.name].snapshot is None)
        checked = await without_taken(self._config, self._catalogue, Choice(fresh, choice.refused))
        taken = set(checked.refused) - set(choice.refused)
        return Choice(tuple(t for t in choice.tables if t.name not in taken), checked.refused)

    async def _look_closely(self, name: str, table: TableInfo) -> None:
        now = (await self._control.ask(lambda wire: describe(wire, [table.oid]))).get(table.oid)
        row = self._desk.rows[name]
        if now is None or not row.flows:
            return
        difference = against_catalogue(row.columns, now)
        if difference:
            await self._park(name, f"its description changed: {difference}")
        elif table.kind != "p" or await self._same_partitions(name, table):
            self._digests[table.oid] = table.digest

    async def _same_partitions(self, name: str, table: TableInfo) -> bool:
        """Rows that come with an attached partition, or go with a detached or dropped one, are in no message of the
        stream. A partition that began empty brings all its rows through the stream."""
        known = self._desk.rows[name].partitions
        now = await self._control.ask(lambda wire: list_partitions(wire, table.oid))
        said = ""
        if known is not None and set(known) - set(now):
            said = "a partition is gone, and its rows with it, of which the stream says nothing"
        for oid in sorted(set(now) - set(known)) if known is not None and not said else ():
            try:
                full = await self._control.ask(lambda wire, oid=oid: came_with_rows(wire, oid))  # type: ignore[misc]
            except (SqlError, Invalid) as error:
                log.warning("a new partition is not looked into yet", table=name, partition=oid, cause=str(error))
                return False
            if full:
                said = f"a partition was attached with rows in it, of which the stream says nothing: partition={full}"
                break
        if said:
            await self._park(name, said)
            return False
        if known != now:
            await self._desk.change(name, lambda found: replace(found, partitions=now) if found is not None else None)
        return True

    async def _park(self, name: str, reason: str, fix: str = "", *, state: str = "parked") -> None:
        """J3."""
        async with self._parking:
            found = await self._control.ask(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
            await self._desk.park(name, Lsn.parse(found or "0/0").value, reason, fix, state=state)

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
            await delete_topic(self._catalogue, row.topic)
            await self._desk.change(row.table, lambda _: None)
            log.info("a table that is gone is forgotten", capture=self._config.name, table=row.table)

    # statements of the application ----------------------------------------------------------------
    async def _mend(self) -> None:
        """No statement of the application fails because a table is published, and no row comes without its old one."""
        for hazard in await self._control.ask(lambda wire: hazards(wire, self._config.publication)):
            row = self._desk.by_oid(hazard.oid)
            if row is not None and not hazard.virtual:
                mended = await self._control.ask(lambda wire, table=hazard.table: _full(wire, self._config, table))  # type: ignore[misc]
                if mended or not hazard.breaks:
                    continue
            if hazard.virtual or hazard.breaks:
                await self._control.ask(lambda wire, name=hazard.name: unpublish(wire, self._config, name))  # type: ignore[misc]
            if row is not None:
                what = "a virtual generated column" if hazard.virtual else "its replica identity, which was taken away,"
                await self._park(row.table, f"{what} would make its UPDATE and DELETE fail")
        await self._unpublish_parked()

    async def _unpublish_parked(self) -> None:
        """The stream carries nothing of them, so nothing need be decoded, or stand in the application's way.

        A copy may begin at any await, and takes tables whose rows still say parked: it publishes them after it has
        asked on this connection, so what is looked at again while the connection is ours stays so."""

        def parked() -> set[int]:
            rows = self._desk.rows.values()
            kept = {row.oid for row in rows if row.recopy or row.state == "captured"}
            return {row.oid for row in rows if row.parked_lsn} - kept - {*self._desk.copying.values()}

        async def take_out(wire: Wire, oid: int, name: str) -> None:
            if oid in parked():
                await unpublish(wire, self._config, name)

        if not parked():
            return
        published = await self._control.ask(lambda wire: published_tables(wire, self._config.publication)) or {}
        for oid in parked() & published.keys():
            await self._control.ask(lambda wire, oid=oid: take_out(wire, oid, published[oid]))  # type: ignore[misc]

    # taking in ------------------------------------------------------------------------------------
    async def _pending(self, found: list[TableInfo]) -> list[TableInfo]:
        asked = {t.table for t in await self._catalogue.tables(self._config.name, fresh=False) if t.recopy}
        choice = await self._choice(found)
        rows = self._desk.rows
        pending = []
        for table in choice.tables:
            row = rows.get(table.name)
            fresh = row is None or row.snapshot is None or row.state == "dropped" or table.name in asked
            anew = row is not None and row.oid != table.oid and bool(row.oid)
            if (fresh or anew) and await self._due(table):
                pending.append(table)
        # A renamed table comes after what its old name still has in the stream: both go by one oid.
        flushed = self._flushed()
        busy = {(r.oid, r.table) for r in rows.values() if r.flows or r.parked_lsn - 1 > flushed}
        return [t for t in pending if not any(oid == t.oid and name != t.name for oid, name in busy)]

    async def _due(self, table: TableInfo) -> bool:
        """J2."""
        if self._clock.monotonic_s() >= self._pauses.get(table.name, (None, 0.0))[1]:
            return True
        held_by = self._desk.held_by(table.name)
        if not held_by:
            return False
        holder = await self._control.ask(lambda wire: table_holder(wire, table.oid))
        return holder is None or holder.name != held_by

    async def _copied_all(self, pending: list[TableInfo]) -> bool:
        """Publish and copy these tables; True when at least one is complete. What fails, of whatever type, is these
        tables' failure, not the session's (J2), but for what may be in the catalogue (Desk, D4): that ends it, and
        nothing is confirmed before."""
        done: list[str] = []
        self._desk.copying = {table.name: table.oid for table in pending}
        self.progress = SnapshotProgress(self._clock)
        self._hold(True)
        try:
            done = await self._copy(pending)
        except BaseException as error:
            if not is_fault(error) or isinstance(error, Unrecorded):
                raise
            log.warning("tables were not taken in", capture=self._config.name, cause=sentence(error))
            why = Refusal("refused", f"the table is not copied yet: {sentence(error)}", "It is tried again by itself.")
            for name, oid in [*self._desk.copying.items()]:
                await self._desk.refuse(name, why, oid)
        finally:
            self._desk.copied()
        self._wait_after({table.name for table in pending} - set(done))
        if not done:
            self._hold(False)
        return bool(done)

    async def _copy(self, pending: list[TableInfo]) -> list[str]:
        """The tables that are complete. The caller holds the confirmation."""
        log.info("tables are taken in", capture=self._config.name, tables=[t.name for t in pending])
        wire = await Wire.connect(self._config.dsn, purpose=f"join {self._config.name}")
        try:
            # Not on the connection of the copy: see _unpublish_parked.
            published = await self._control.ask(lambda wire: published_tables(wire, self._config.publication))
            if published is None:
                raise Unavailable("the publication is gone.")
            result = await publish(wire, self._config, pending, published, attempts=LOCK_ATTEMPTS)
            relations = await describe(wire, [table.oid for table in pending])
            taken, captured = [], {}
            for table in pending:
                if table.name in result.failed:
                    await self._desk.refuse(table.name, refusal_of(result.failed[table.name]), table.oid)
                    continue
                if table.oid not in relations:  # dropped meanwhile: what its old copy has flows on, up to there
                    continue
                row = self._desk.rows.get(table.name)
                if row is not None and row.flows:
                    # Made anew, or asked for while it flows: the running session carries nothing more of the old one.
                    await self._park(table.name, "it is copied again")
                if row is not None and row.oid:
                    await self._retire(row.oid)
                topic = await start_table(self._config, self._catalogue, self._desk, table, relations[table.oid])
                if topic is not None:
                    taken.append(table)
                    captured[table.name] = CapturedTable(table.name, topic, producer_id(self._config), oid=table.oid)
            return await self._copied(taken, captured) if taken else []
        finally:
            await wire.aclose()

    async def _copied(self, tables: list[TableInfo], captured: dict[str, CapturedTable]) -> list[str]:
        writer = TopicWriter(
            f"{self._config.mark}/copy", captured.values(), self._topics, self._rand, lambda boundaries: None
        )
        try:
            await writer.open({}, 0)
            return await take_snapshot(self._config, tables, captured, writer, self._desk, self.progress, self._clock)
        except (Unavailable, Unknown, Closed, Conflict, Fenced):
            raise
        except TidemillError as error:
            for table in tables:
                await self._desk.refuse(table.name, refusal_of(error), table.oid)
            return []
        finally:
            await writer.aclose()

    def _wait_after(self, failed: set[str]) -> None:
        """J2."""
        for name in failed:
            restarts, _ = self._pauses.get(name, (Restarts(self._config.table_poll_s, LONGEST_PAUSE_S), 0.0))
            self._pauses[name] = (restarts, self._clock.monotonic_s() + restarts.pause_s(0.0))


async def _resolved(wire: Wire, config: CaptureConfig, found: list[TableInfo]) -> Choice:
    return resolve(config.tables, found, wire.server_version)


async def _full(wire: Wire, config: CaptureConfig, table: TableInfo) -> bool:
    """Give a published table, and its partitions, a whole identity again; False while others hold its lock."""
    done = await publish(wire, config, [table], {table.oid: ""}, attempts=1)
    for error in done.failed.values():
        log.warning("a captured table has no whole identity yet", table=table.name, cause=str(error))
    return not done.failed
