"""Tables beside the stream: what changed in the database is noticed, and what is fresh is taken in, while all else
flows.

    every table_poll_s    the catalogue is compared with what is captured; sooner when somebody asks for a table that
                          is not (`seeks`), or finds one to be another (`look`)
    every HAZARD_POLL_S   published tables whose statements would fail, or lack old rows, are mended or taken out; by a
                          capture that is manual they are parked, and told

    new, made anew, asked for again (recopy), refused before    →  published  →  topic anew  →  copied  →  in the stream
    gone, not wanted any more     →  `dropped` at the WAL's end; topic and row go once no pipeline reads it
    its description differs       →  what is carried: in force at the WAL's end, else parked there, if the stream did
                                     not come to a row before (describing.py)
    parked for what a copy heals  →  copied again by itself (again.py)

J1  While a table is copied, nothing is confirmed to PostgreSQL beyond where the copy began: what the stream tells of
    it meanwhile is told again by the next session, which begins when the copy is done. The other tables know their
    part of that by their bindings. That holds from the start of a session that finds a copy cut off.
J2  A copy that fails is told under its table, and tried again after a pause that doubles; one that a lock kept out,
    as soon as who was named for it holds the table no more. It is gone on with where it was cut off for no fault of
    the table's, until it has not come further in so many tries (Desk); else it begins anew, and WAL is let go.
J3  A table is parked at the WAL end as of after its difference was seen, and from before that is asked for until the
    park is durable the stream's reader takes nothing more: no transaction at or above it is bound or confirmed by a
    session whose successor would not know of the park. Rows that came under the new description before were found by
    the reader (Session).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock, Rand
from tidemill.base.errors import Closed, Conflict, Fenced, Invalid, Missing, TidemillError, Unavailable, Unknown
from tidemill.base.frontier import Lsn
from tidemill.base.tasks import Restarts, is_fault, sentence
from tidemill.capture.again import Again, heals
from tidemill.capture.attributes import attributes_of
from tidemill.capture.changes import Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.copying import take_snapshot
from tidemill.capture.describing import Coming
from tidemill.capture.desk import Desk, Unrecorded, accept, recopy
from tidemill.capture.difference import against_catalogue
from tidemill.capture.entry import (
    copy_target,
    delete_topic,
    go_on_with,
    gone,
    refusal_of,
    source_of,
    start_table,
    without_taken,
)
from tidemill.capture.holders import table_holder
from tidemill.capture.progress import SnapshotProgress
from tidemill.capture.publication import LOCK_ATTEMPTS, give_back, not_full, publish, published_tables, unpublish
from tidemill.capture.tables import (
    Choice,
    Hazard,
    Refusal,
    TableInfo,
    came_with_rows,
    describe,
    hazards,
    list_partitions,
    list_tables,
    resolve,
)
from tidemill.capture.topic_writer import CapturedTable
from tidemill.capture.watch import Control
from tidemill.capture.wire.connection import Wire, identifier
from tidemill.capture.wire.errors import SqlError, may_pass
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue, PipelineRow
from tidemill.topics.front import TopicLog

log = structlog.get_logger()

HAZARD_POLL_S = 1.0
LONGEST_PAUSE_S = 300.0
LOOK_S = 0.3
"""Between two looks that somebody's asking brought about …"""

LOOK_SHARE = 10
"""… or so many times as long as such a look takes: whoever asks for tables that are not there keeps the database busy
for a tenth of the time at most."""


class Joined(Unavailable):
    """Tables were copied: the session begins anew, with them."""


class Joining:
    """`hold(True)`: from now on confirm nothing beyond what is confirmed; False: go on. `flushed()`: every
    transaction at or below it is bound. `retire(oid)`: nothing is written for this relation any more, nor under way.
    `parking`: while it is taken, the stream's reader stands. `learn`: as of Coming."""

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
        learn: Callable[[Relation], None],
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
        self._no_identity: dict[int, str] = {}
        """What kept a table from its whole identity the last time: it is tried again each second, and told once."""
        self._coming = Coming(desk, control, flushed, parking, learn)
        self._again = Again(config, control, desk, clock)
        self._pauses: dict[str, tuple[Restarts, float]] = {}
        self._wake = asyncio.Event()
        self._sought = asyncio.Event()
        self._next_look: asyncio.Future[frozenset[str] | None] | None = asyncio.get_running_loop().create_future()
        """Of a look of `take_in` that has not begun yet; None: it is over."""
        self.progress = SnapshotProgress(clock)

    @property
    def copying(self) -> tuple[str, ...]:
        """Tables that are taken in just now, or cut off in that: the confirmation is held for them."""
        return tuple(self._desk.copying) or tuple(self._desk.cut_off)

    def look(self) -> None:
        """Somebody found a captured table to be another one, or gone: look now."""
        self._wake.set()
        self._sought.set()

    async def seeks(self, name: str) -> bool | None:
        """Whether this table is taken in, now or as soon as it can be, as of a look that begins from here on: one for
        all who ask meanwhile. None: this session is over."""
        look = self._next_look
        if look is None:
            return None
        self._sought.set()
        coming = await asyncio.shield(look)
        return None if coming is None else name in coming

    def mark(self) -> None:
        """Tell what is copied, and how far it is."""
        self._desk.tell_copy(self.progress)

    # the two loops --------------------------------------------------------------------------------
    async def watch(self) -> None:
        """For ever. Raises what breaks the control connection or the catalogue."""
        while True:
            began_s = self._clock.monotonic_s()
            await self._compare()
            pause_s = self._config.table_poll_s
            next_s = self._clock.monotonic_s() + (min(pause_s, HAZARD_POLL_S) if self._coming.waits else pause_s)
            while not self._wake.is_set() and (left_s := next_s - self._clock.monotonic_s()) > 0:
                await self._mend()
                try:
                    async with asyncio.timeout(min(left_s, HAZARD_POLL_S)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(max(0.0, min(pause_s, LOOK_S) - (self._clock.monotonic_s() - began_s)))
            self._wake.clear()

    async def take_in(self) -> None:
        """Until something was taken in: then it raises Joined."""
        pause_s = self._config.table_poll_s
        try:
            while True:
                began_s = self._clock.monotonic_s()
                asked, self._next_look = self._next_look, asyncio.get_running_loop().create_future()
                self._sought.clear()
                try:
                    coming, pending = await self._pending(await self._control.ask(list_tables))
                except BaseException:
                    _tell(asked, None)
                    raise
                _tell(asked, coming)
                took_s = self._clock.monotonic_s() - began_s
                if pending and await self._copied_all(pending):
                    raise Joined(f"tables were taken in: capture={self._config.name}.")
                if not self._desk.cut_off:
                    self._hold(False)
                least_s = min(pause_s, max(LOOK_S, LOOK_SHARE * took_s))
                await asyncio.sleep(least_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s - least_s):
                        await self._sought.wait()
        finally:
            asked, self._next_look = self._next_look, None
            _tell(asked, None)

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
        for row in [row for row in self._desk.rows.values() if row.state == "parked"]:
            if row.table not in wanted and row.table not in choice.refused:
                await self._desk.gone(row.table, *gone(row, found))
        published = await self._published() or {}
        for row in [row for row in self._desk.rows.values() if row.flows]:
            if row.table in wanted and row.oid == wanted[row.table].oid and row.oid not in published:
                # Changes are missing from here on; the next session sees it, too, and has it copied again.
                raise Unavailable(f"a captured table was unpublished: table={row.table}.")
        for name, why in choice.refused.items():
            await self._desk.refuse(name, why)
        for info in found:
            await self._desk.identified(info)
        await self._prune(wanted, choice.refused, found)
        self._forget_gone(found)

    def _forget_gone(self, found: list[TableInfo]) -> None:
        """Nothing that this session remembers of a table outlives it."""
        oids, names = {table.oid for table in found}, {table.name for table in found}
        for known in (self._digests, self._no_identity):
            for oid in known.keys() - oids:
                del known[oid]
        for name in self._pauses.keys() - names:
            del self._pauses[name]

    async def _published(self) -> dict[int, str] | None:
        config = self._config
        return await self._control.ask(lambda wire: published_tables(wire, config.publication, manual=config.manual))

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
        why = await self._coming.look(name, against_catalogue(row.columns, now))
        if why:
            self._coming.forget(name)
            found = (await self._control.ask(lambda wire: attributes_of(wire, [table.oid]))).get(table.oid)
            await self._park(name, f"its description changed: {why}", accept(name), again=heals(row, found))
        elif why is not None and (table.kind != "p" or await self._same_partitions(name, table)):
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
            await self._park(name, said, again=True)
            return False
        if known != now:
            await self._desk.change(name, lambda found: _divided(found, now) if found is not None else None)
        return True

    async def _park(self, name: str, reason: str, fix: str = "", *, state: str = "parked", again: bool = False) -> None:
        """J3."""
        async with self._parking:
            found = await self._control.ask(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
            await self._desk.park(name, Lsn.parse(found or "0/0").value, reason, fix, state=state, again=again)

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
            await delete_topic(self._catalogue, row.topic)
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
        published = await self._published() or {}
        if row.oid in published:
            return False
        for oid, (relation, before) in row.identities.items():
            try:
                await self._control.ask(lambda wire, oid=oid, b=before: give_back(wire, oid, b, attempts=1))  # type: ignore[misc]
            except (SqlError, Invalid) as error:
                log.warning("an identity is not given back yet", relation=relation, cause=str(error))
                return False
        return True

    # statements of the application ----------------------------------------------------------------
    async def _mend(self) -> None:
        """No statement of the application fails because a table is published, and no row comes without its old one."""
        config = self._config
        for hazard in await self._control.ask(lambda wire: hazards(wire, config.publication, config.whole)):
            row = self._desk.by_oid(hazard.oid)
            if config.manual:
                await self._tell_hazard(hazard, row)
                continue
            if row is not None and not hazard.virtual and config.whole:
                # Noted before the connection is asked to alter it: what consensus takes is no silence of PostgreSQL's.
                earlier = await self._control.ask(lambda wire, oid=hazard.oid: not_full(wire, oid))  # type: ignore[misc]
                await self._desk.note(row.table, earlier)
                mended = await self._control.ask(lambda wire, table=hazard.table: self._full(wire, table))  # type: ignore[misc]
                if mended or not hazard.breaks:
                    continue
            if hazard.virtual or hazard.breaks:
                await self._control.ask(lambda wire, name=hazard.name: unpublish(wire, self._config, name))  # type: ignore[misc]
            if row is not None and not (hazard.virtual or hazard.breaks):
                await self._park(row.table, "its replica identity does not say its primary key", _mend_by(hazard))
            elif row is not None:
                what = "a virtual generated column" if hazard.virtual else "its replica identity, which was taken away,"
                lacks = hazard.breaks and not hazard.virtual and not config.whole
                await self._park(
                    row.table, f"{what} would make its UPDATE and DELETE fail", _mend_by(hazard) if lacks else "",
                    again=not hazard.virtual and not lacks,
                )  # fmt: skip
        if not config.manual:
            await self._unpublish_parked()

    async def _tell_hazard(self, hazard: Hazard, row: CaptureTableRow | None) -> None:
        """Of a capture that alters nothing. A table whose old rows are to be whole flows until the stream comes to one
        that is not."""
        if row is None or not (hazard.virtual or hazard.breaks or hazard.lacking):
            return
        what = "a virtual generated column" if hazard.virtual else "its replica identity"
        if hazard.virtual or hazard.breaks:
            drop = f"ALTER PUBLICATION {identifier(self._config.publication)} DROP TABLE {hazard.name}"
            await self._park(
                row.table, f"{what} makes its UPDATE and DELETE fail while it is published",
                f"Run {drop}; {recopy(row.table)}",
            )  # fmt: skip
        else:
            await self._park(row.table, f"{what} does not say its primary key", _mend_by(hazard))

    async def _full(self, wire: Wire, table: TableInfo) -> bool:
        """Give a published table, and its partitions, a whole identity again; False while others hold its lock."""
        done = await publish(wire, self._config, [table], {table.oid: ""}, attempts=1, note=self._desk.note)
        for error in done.failed.values():
            if self._no_identity.get(table.oid) != str(error):
                log.warning("a captured table has no whole identity yet", table=table.name, cause=str(error))
            self._no_identity[table.oid] = str(error)
        if not done.failed:
            self._no_identity.pop(table.oid, None)
        return not done.failed

    async def _unpublish_parked(self) -> None:
        """The stream carries nothing of them, so nothing need be decoded, or stand in the application's way.

        A copy may begin at any await, and takes tables whose rows still say parked: it publishes them after it has
        asked on this connection, so what is looked at again while the connection is ours stays so."""

        def parked() -> set[int]:
            rows = self._desk.rows.values()
            kept = {row.oid for row in rows if row.recopy or row.again_ms or row.state == "captured"}
            return {row.oid for row in rows if row.parked_lsn} - kept - {*self._desk.copying.values()}

        async def take_out(wire: Wire, oid: int, name: str) -> None:
            if oid in parked():
                await unpublish(wire, self._config, name)

        if not parked():
            return
        published = await self._published() or {}
        for oid in parked() & published.keys():
            await self._control.ask(lambda wire, oid=oid: take_out(wire, oid, published[oid]))  # type: ignore[misc]

    # taking in ------------------------------------------------------------------------------------
    async def _pending(self, found: list[TableInfo]) -> tuple[frozenset[str], list[TableInfo]]:
        """Names of the tables that are to be taken in, and those of them that can be now."""
        asked = {t.table for t in await self._catalogue.tables(self._config.name, fresh=False) if t.recopy}
        asked |= await self._again.due()
        choice = await self._choice(found)
        for name in self._desk.cut_off.keys() - {table.name for table in choice.tables}:
            await self._desk.give_up(name)
        rows = self._desk.rows
        coming, pending = set[str](), []
        for table in choice.tables:
            row = rows.get(table.name)
            fresh = row is None or row.snapshot is None or row.state == "dropped" or table.name in asked
            anew = row is not None and row.oid != table.oid and bool(row.oid)
            if fresh or anew:
                coming.add(table.name)
                if await self._due(table):
                    pending.append(table)
        # A renamed table comes after what its old name still has in the stream: both go by one oid.
        flushed = self._flushed()
        busy = {(r.oid, r.table) for r in rows.values() if r.flows or r.parked_lsn - 1 > flushed}
        free = [t for t in pending if not any(oid == t.oid and name != t.name for oid, name in busy)]
        return frozenset(coming), free

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
                await self._desk.refuse(name, why, oid, going_on=may_pass(error))
        finally:
            self._desk.copied()
        self._wait_after({table.name for table in pending} - set(done))
        return bool(done)

    async def _copy(self, pending: list[TableInfo]) -> list[str]:
        """The tables that are complete. The caller holds the confirmation."""
        log.info("tables are taken in", capture=self._config.name, tables=[t.name for t in pending])
        wire = await Wire.connect(self._config.dsn, purpose="join", capture=self._config.name)
        try:
            # Not on the connection of the copy: see _unpublish_parked.
            published = await self._published()
            if published is None:
                raise Missing("the publication is gone.")
            # One that was unpublished since is not gone on with: the stream lacks changes of it.
            cut_off = {table.oid for table in pending if table.name in self._desk.cut_off} & published.keys()
            left = await self._publish(wire, pending, published, settle=published.keys() - cut_off)
            relations = await describe(wire, [table.oid for table in left])
            taken, captured = [], {}
            for table in left:
                if table.oid not in relations:  # dropped meanwhile: what its old copy has flows on, up to there
                    continue
                row = self._desk.rows.get(table.name)
                if row is not None and row.flows:
                    # Made anew, or asked for while it flows: the running session carries nothing more of the old one.
                    await self._park(table.name, "it is copied again")
                if row is not None and row.oid:
                    await self._retire(row.oid)
                place = (self._config, self._catalogue, self._desk, table, relations[table.oid])
                topic = None
                if table.oid in cut_off:
                    topic = await go_on_with(*place)
                    if topic is None:  # it begins anew, so it is settled after all
                        await self._desk.give_up(table.name)
                        if not await self._publish(wire, [table], published, settle=published):
                            continue
                topic = topic or await start_table(*place)
                if topic is not None:
                    taken.append(table)
                    row = self._desk.rows[table.name]
                    source = source_of(self._config, row, wire.database)
                    captured[table.name] = copy_target(self._config, row, topic, source)
            return await self._copied(taken, captured) if taken else []
        finally:
            await wire.aclose()

    async def _publish(
        self, wire: Wire, tables: list[TableInfo], published: dict[int, str], *, settle: Container[int]
    ) -> list[TableInfo]:
        """Those that are published now; the others are refused."""
        done = await publish(
            wire, self._config, tables, published, attempts=LOCK_ATTEMPTS, note=self._desk.note, settle=settle
        )
        for table in [table for table in tables if table.name in done.failed]:
            error = done.failed[table.name]
            await self._desk.refuse(table.name, refusal_of(error), table.oid, going_on=may_pass(error))
        return [table for table in tables if table.name not in done.failed]

    async def _copied(self, tables: list[TableInfo], captured: dict[str, CapturedTable]) -> list[str]:
        try:
            return await take_snapshot(
                self._config, tables, captured, self._topics, self._desk, self.progress, self._clock, self._rand
            )
        except (Unavailable, Unknown, Closed, Conflict, Fenced):
            raise
        except TidemillError as error:
            for table in tables:
                await self._desk.refuse(table.name, refusal_of(error), table.oid)
            return []

    def _wait_after(self, failed: set[str]) -> None:
        """J2."""
        for name in failed:
            restarts, _ = self._pauses.get(name, (Restarts(self._config.table_poll_s, LONGEST_PAUSE_S), 0.0))
            self._pauses[name] = (restarts, self._clock.monotonic_s() + restarts.pause_s(0.0))


def _tell(asked: asyncio.Future[frozenset[str] | None] | None, coming: frozenset[str] | None) -> None:
    if asked is not None and not asked.done():
        asked.set_result(coming)


async def _resolved(wire: Wire, config: CaptureConfig, found: list[TableInfo]) -> Choice:
    return resolve(config.tables, found, wire.server_version, whole=config.whole)


def _mend_by(hazard: Hazard) -> str:
    return f"Run {hazard.lacking}; {recopy(hazard.table.name)}"


def _divided(row: CaptureTableRow, partitions: tuple[int, ...]) -> CaptureTableRow:
    """With these partitions; of those that are gone nothing is kept."""
    kept = {oid: noted for oid, noted in row.identities.items() if oid == row.oid or oid in partitions}
    return replace(row, partitions=partitions, identities=kept)
