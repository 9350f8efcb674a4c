"""The tables of one session: which flow, which are parked and why. One place that changes a table's state, durably.

D1  Parking is made durable before the transaction that made it necessary is handed on, so before it can be
    confirmed: a table is parked at one position, in this life and the next. The lowest position counts.
D2  What is parked stays so until it is copied again: changes at and above its position are in no topic.
D3  A table's failure is told under `table:<capture>/<schema.table>`, parked, and never ends the capture.
D4  A change that may not have been written ends the session (`TableStateUnknownError`): the next one begins from what
    is durable, so no table flows by the catalogue and is carried by nobody, or the other way round.
D6  A table that is to be parked before the stream has come to where its copy is exact (TableSnapshot.exact_lsn) shows
    no state of the database there, and nothing of its topic is bound yet. So it is copied anew, by a session that
    carries nothing of it (`RecopyRequiredError`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import UnavailableError, UnknownOutcomeError
from tidemill.base.lsn import Lsn
from tidemill.base.pgtypes.avro import AVRO, Described
from tidemill.base.status.status import StatusTracker
from tidemill.capture.catalog.columns import Attributes
from tidemill.capture.catalog.schema_versions import Step
from tidemill.capture.catalog.table_discovery import Refusal, TableInfo
from tidemill.capture.changes import NEVER
from tidemill.capture.config import CaptureConfig
from tidemill.capture.encode.schema_registration import NoSchemas, Schemas, registered
from tidemill.capture.naming import readable
from tidemill.capture.setup.publication import Identities
from tidemill.capture.tables.copy_progress import SnapshotProgress
from tidemill.capture.tables.unaffected_columns import Following
from tidemill.capture.topics.commit_boundaries import in_snapshot
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue

log = structlog.get_logger()

REASON_CHARS = 600
"""Of a reason in a row and a mark: a table of 1,600 columns may differ in all of them."""


def recopy(table: str) -> str:
    return f"Run tidemill capture recopy '{table}': changes from here on are not carried, so it is copied again."


def accept(table: str) -> str:
    return (
        f"Run tidemill capture accept '{table}': it shows what becomes of its shards, and copies it again once you"
        f" agree. tidemill capture recopy '{table}' copies it, and changes no shard that would lose something."
    )


def by_itself(again_ms: int, waits: bool) -> str:
    at = f" from {datetime.fromtimestamp(again_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC on" if waits else ""
    return f"It is copied again by itself{at}, beside the stream of the others."


FRUITLESS_TRIES = 10
"""Of a copy that was cut off: without one more chunk in so many, WAL is kept for it no longer."""


class TableStateUnknownError(UnknownOutcomeError):
    """What the catalogue holds of a table is not known (D4)."""


class RecopyRequiredError(UnavailableError):
    """What was copied of a table is no state of it (D6)."""


def asked_of(row: CaptureTableRow, identities: Identities) -> CaptureTableRow:
    """With what an administrator is asked to replace by FULL; what the capture was to give back anyhow stays that."""
    new = {oid: noted for oid, noted in identities.items() if oid not in row.identities}
    return replace(row, identities_asked={**row.identities_asked, **new})


class TableStates:
    """`on_park(oid, lsn, columns)`: nothing of this relation is carried at or above the LSN from now on, but for those
    who follow these columns alone; whether there are any. `on_narrow(oid, reason, columns)`: of those who follow a
    parked table only these are left, and whether there are any. Both are plain calls."""

    def __init__(
        self,
        config: CaptureConfig,
        catalogue: Catalogue,
        clock: Clock,
        tracker: StatusTracker,
        on_park: Callable[[int, int, frozenset[str]], bool] = lambda *_: False,
        schemas: Schemas | None = None,
    ) -> None:
        self._schemas = schemas or NoSchemas()
        self._config = config
        self._catalogue = catalogue
        self._clock = clock
        self._tracker = tracker
        self.history = ("", 0)
        """A failover, or a return to an earlier state, found by the newest session, and the time (ms); "" = none."""
        self._on_park = on_park
        self._on_narrow: Callable[[int, str, frozenset[str]], bool] = lambda *_: False
        self.following = Following()
        self._changing = asyncio.Lock()
        self.rows: dict[str, CaptureTableRow] = {}
        self.changes = 0
        """Of `rows`, ever."""
        self.copying: dict[str, int] = {}
        """Tables that are copied beside the stream just now, and their oids. One that is refused is none of them: what
        is told of it is not how the others move."""
        self._told: set[str] = set()
        self._refusals: dict[str, Refusal] = {}
        """What the last try to take a table in ended with, until it is past that."""
        self._fruitless: dict[str, tuple[str, int, int]] = {}
        """Of a copy that was cut off: its topic, what was done then (chunks, and records that were appended behind
        them), and how often it was since."""

    def connect(
        self,
        on_park: Callable[[int, int, frozenset[str]], bool],
        on_narrow: Callable[[int, str, frozenset[str]], bool] = lambda *_: False,
    ) -> None:
        self._on_park, self._on_narrow = on_park, on_narrow

    def narrow(self, oid: int, found: Attributes | None, reason: str = "its table's definition changed") -> None:
        """What the database says of a table that is followed while it is parked, None = the stream lacks changes."""
        if self.following.get(oid) is not None:
            self.following.narrowed(oid, found)
            self.still_followed(oid, reason)

    def still_followed(self, oid: int, reason: str = "") -> None:
        """A table that nobody follows any more is parked as any other."""
        if not self._on_narrow(oid, reason, self.following.columns(oid)):
            self.following.end(oid)

    @property
    def now_ms(self) -> int:
        return self._clock.now_ms()

    def know(self, rows: dict[str, CaptureTableRow]) -> None:
        """The rows as they are now; marks follow."""
        self.rows = dict(rows)
        self.changes += 1
        for name in [*self._told]:
            if name not in rows or rows[name].flows:
                self._heal(name)
        for row in rows.values():
            self._tell(row)

    def by_oid(self, oid: int, lsn: int = NEVER) -> CaptureTableRow | None:
        """The table that is carried under this oid, as of a transaction at `lsn` (default: any to come)."""
        return next((row for row in self.rows.values() if row.oid == oid and _carried(row, lsn)), None)

    def followed(self, oid: int, xid: int, lsn: int) -> CaptureTableRow | None:
        """The table that takes what this transaction of the stream does under this oid: none where its snapshot holds
        the transaction. PostgreSQL may tell one again after a crash, with a description that was copied away since."""
        row = self.by_oid(oid, lsn)
        return None if row is None or in_snapshot(xid, lsn, row.snapshot) else row

    def served(self) -> set[int]:
        """Oids of the relations whose followers may be told that they are captured."""
        return {row.oid for row in self.rows.values() if row.state == "captured" and row.aside is None}

    def held_by(self, name: str) -> str:
        """Who kept the table out when it was to be taken in last, "" = nobody."""
        why = self._refusals.get(name)
        return why.held_by if why is not None else ""

    # changing -------------------------------------------------------------------------------------
    async def park(
        self,
        name: str,
        lsn: int,
        reason: str,
        fix: str = "",
        *,
        state: str = "parked",
        again: bool = False,
        first: str = "",
        found: Attributes | None = None,
    ) -> None:
        """Carry no transaction of the table at or above `lsn` (D1). `again`: a copy makes it good (auto_recopy.py),
        once somebody has done what `first` says, if it says anything. `found`: what the database says of its columns,
        where it parks for nothing but these (unaffected_columns.py). Raises TableStateUnknownError,
        RecopyRequiredError."""
        row = self.rows.get(name)
        if row is None or (row.parked_lsn and row.parked_lsn <= lsn):
            return
        reason = f"{readable(reason)[:REASON_CHARS].rstrip('.')}: table={name} parked_at={Lsn(lsn)}."
        now_ms, pause_ms = self._clock.now_ms(), int(self._config.copy_again_pause_s * 1000)
        void = row.snapshot is not None and lsn < row.snapshot.exact_lsn
        columns = self.following.parking(row, found) if not void else frozenset[str]()
        self.following.parked(row, columns, self._on_park(row.oid, lsn, columns))

        def parked(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or (found.parked_lsn and found.parked_lsn <= lsn) or found.generation != row.generation:
                return found
            since_ms = found.since_ms if found.state == state and found.since_ms else now_ms
            if void:
                return replace(
                    found, state="refused", reason=reason, fix="It is copied anew by itself.", since_ms=now_ms,
                    snapshot=None, copy=None, aside=None, again_ms=0,
                )  # fmt: skip
            # At most one pause from now: the clock may have gone wrong when it was begun last.
            from_ms = now_ms + max(0, min(pause_ms, found.again_last_ms + pause_ms - now_ms))
            again_ms = from_ms if again and self._config.copy_again else 0
            said = by_itself(again_ms, again_ms > now_ms) if again_ms else fix or recopy(name)
            said = f"{first} {said}".strip()
            return replace(
                found, state=state, reason=reason, fix=said, parked_lsn=lsn, since_ms=since_ms, again_ms=again_ms
            )

        log.error("a table is parked", capture=self._config.name, table=name, reason=reason)
        self._refusals.pop(name, None)
        await self.change(name, parked)
        if void:
            raise RecopyRequiredError(f"a copied table is no state of the database where it would park: table={name}.")

    async def gone(self, name: str, reason: str, fix: str) -> None:
        """Record that a table without a stream was dropped or is no longer wanted. The shard of a parked table ends
        where it was parked. The former reason and its fix are void."""

        def ended(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.flows or found.state == "dropped":
                return found
            parked_at = f" parked_at={Lsn(found.parked_lsn)}" if found.parked_lsn else ""
            said = f"{reason}: table={name}{parked_at}."
            return replace(found, state="dropped", reason=said, fix=fix, since_ms=self._clock.now_ms(), again_ms=0)

        self._refusals.pop(name, None)
        await self.change(name, ended)

    async def refuse(self, name: str, why: Refusal, oid: int = 0, *, going_on: bool = False) -> None:
        """Say why a table is not captured. One that flows or is parked keeps its row; where it was to be copied again,
        its mark says why it was not. `going_on`: for no fault of its own, so a copy that came part of the way is gone
        on with, if it does not stand (FRUITLESS_TRIES)."""
        known = self.rows.get(name)
        going_on = going_on and known is not None and self._comes_further(known)

        def refused(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None:
                found = CaptureTableRow(self._config.name, name)
            elif found.snapshot is not None or found.parked_lsn:
                return found
            since_ms = found.since_ms if found.state == why.state and found.since_ms else self._clock.now_ms()
            return replace(
                found, state=why.state, reason=why.reason[:REASON_CHARS], fix=why.fix, since_ms=since_ms, oid=oid,
                copy=found.copy if going_on else None, aside=found.aside if going_on else None,
            )  # fmt: skip

        tried = self.copying.pop(name, None) is not None
        kept = known is not None and (known.snapshot is not None or known.parked_lsn)
        if tried or not kept:
            self._refusals[name] = why
        told = (known.state, known.reason, known.fix) if known is not None else None
        given_up = known is not None and known.copy is not None and not going_on
        if not kept and (given_up or told != (why.state, why.reason[:REASON_CHARS], why.fix)):
            await self.change(name, refused)
        elif tried and known is not None:
            self._tell(known)

    async def refuse_all(self, refused: Mapping[str, Refusal]) -> None:
        """`refuse` each table of a choice, by its name."""
        for name, why in refused.items():
            await self.refuse(name, why)

    def _comes_further(self, row: CaptureTableRow) -> bool:
        """A try to go on with its copy ended: whether there is to be another one."""
        if row.copy is None:
            return False
        topic_id, done, tries = self._fruitless.get(row.table, ("", 0, 0))
        now = row.copy.done + (row.aside.appended if row.aside is not None else 0)
        tries = tries + 1 if (topic_id, done) == (row.copy.topic_id, now) else 1
        self._fruitless[row.table] = (row.copy.topic_id, now, tries)
        return tries < FRUITLESS_TRIES

    async def note(self, name: str, identities: Identities) -> None:
        """What a table and its partitions had before they are given REPLICA IDENTITY FULL (publication.py, P5)."""

        def noted(found: CaptureTableRow | None) -> CaptureTableRow:
            found = found or CaptureTableRow(self._config.name, name)
            return replace(found, identities={**found.identities, **identities})

        known = self.rows.get(name)
        if known is None or noted(known) != known:
            await self.change(name, noted)

    async def asked(self, name: str, identities: Identities) -> None:
        """What a table and its partitions have before an administrator is asked to give them REPLICA IDENTITY FULL."""

        def noted(found: CaptureTableRow | None) -> CaptureTableRow:
            return asked_of(found or CaptureTableRow(self._config.name, name), identities)

        known = self.rows.get(name)
        if known is None or noted(known) != known:
            await self.change(name, noted)

    async def identified(self, table: TableInfo) -> None:
        """What the database says of a table's REPLICA IDENTITY now, for whoever lists the tables."""
        identity = readable(table.identity)  # a name of an index in it need not be UTF-8, and the catalogue's is

        def known(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.oid != table.oid:
                return found
            return replace(found, identity=identity)

        row = self.rows.get(table.name)
        if row is not None and row.oid == table.oid and row.identity != identity:
            await self.change(table.name, known)

    async def hand_over(self, row: CaptureTableRow) -> bool:
        """What was noted of a table under an earlier name goes to the row of its present one; False = it has none."""
        others = [r for r in self.rows.values() if r.oid == row.oid and r.table != row.table]
        heir = next(iter(others), None) if row.oid else None  # 0: it has not been taken in yet
        if heir is not None and row.identities:
            await self.note(heir.table, row.identities)
        return heir is not None

    async def evolve(self, name: str, step: Step, lsn: int) -> int:
        """From the transaction that commits at `lsn` on the table has the description that `step` ends in; its version.
        Before the first record under it is written this is in the catalogue. Raises TableStateUnknownError; Invalid
        where its schema is refused, and nothing has changed then."""
        row = self.rows[name]
        try:
            ids = await self.registered(row.envelope, row.topic, step.columns)
        except (UnavailableError, UnknownOutcomeError) as error:
            raise TableStateUnknownError(
                f"a schema may not be registered: topic={row.topic} cause={error.message!r}."
            ) from error

        def evolved(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.columns != step.of or found.generation != row.generation:
                return found
            return replace(
                found, columns=step.columns, evolved=(*found.evolved, lsn), attributes=step.attributes,
                storage=step.storage, schemas=(*found.schemas, *ids),
            )  # fmt: skip

        log.info("a table's description grows", capture=self._config.name, table=name, by=str(step), at=str(Lsn(lsn)))
        now = await self.change(name, evolved)
        if now is None or now.columns != step.columns:
            raise TableStateUnknownError(f"somebody else changes what is known of a table: table={name}.")
        return now.version

    async def registered(self, envelope: str, topic: str, columns: Sequence[Described]) -> tuple[tuple[int, int], ...]:
        """The ids of the schemas that records of these columns have, none where they have none. Raises Invalid where
        one is refused, UnavailableError or UnknownOutcomeError where the registry does not answer: asked again it gives
        the same."""
        return (await registered(self._schemas, topic, columns),) if envelope == AVRO else ()

    async def change(
        self, name: str, change: Callable[[CaptureTableRow | None], CaptureTableRow | None]
    ) -> CaptureTableRow | None:
        """Durably. Raises TableStateUnknownError, and Invalid where nothing was written."""
        async with self._changing:
            try:
                row = await self._catalogue.change_table(self._config.name, name, change)
            except (UnavailableError, UnknownOutcomeError) as error:
                what = f"a table's state may not be written: table={name} cause={error.message!r}."
                raise TableStateUnknownError(what) from error
        self.changes += 1
        old = self.rows.get(name)
        if row is None:
            self.rows.pop(name, None)
            self._heal(name)
        else:
            self.rows[name] = row
            # A refused one that is tried again is not well yet; one that was parked is past that.
            if row.flows or (row.state == "captured" and old is not None and old.parked_lsn):
                self._heal(name)
            self._tell(row)
        return row

    @property
    def cut_off(self) -> dict[str, int]:
        """Tables that wait for their copy to be gone on with, and how many chunks are done: WAL is kept for them."""
        return {row.table: row.copy.done for row in self.rows.values() if row.copy is not None}

    def aside(self, oid: int) -> CaptureTableRow | None:
        """The table whose changes under this oid are set aside."""
        return next((row for row in self.rows.values() if row.aside is not None and row.oid == oid), None)

    def keeps_wal(self) -> set[str]:
        """Tables for whose copy WAL is kept, under way or cut off: they are not set aside, or not any further."""
        found = {name for name in self.copying if (row := self.rows.get(name)) is None or row.aside is None}
        for row in self.rows.values():
            if row.copy is not None and (row.aside is None or row.aside.until_lsn):
                found.add(row.table)
        return found

    async def set_aside_until(self, name: str, lsn: int, reason: str) -> None:
        """Set no transaction of the table aside at or above `lsn`, for this reason: its WAL is kept, and told again
        once the table has joined the stream there. As durable as a park, and before what is (D1). Raises
        TableStateUnknownError."""
        row = self.rows.get(name)
        if row is None or row.aside is None or 0 < row.aside.until_lsn <= lsn:
            return
        log.warning("WAL is kept for a copy", capture=self._config.name, table=name, at=str(Lsn(lsn)), cause=reason)
        topic_id = row.aside.topic_id
        self._on_park(row.oid, lsn, self.following.columns(row.oid))

        def ended(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or found.aside is None or found.aside.topic_id != topic_id:
                return found
            return replace(found, aside=replace(found.aside, until_lsn=lsn))

        await self.change(name, ended)

    async def give_up(self, name: str) -> None:
        """A copy that was cut off is not gone on with. Raises TableStateUnknownError."""
        await self.change(name, lambda found: replace(found, copy=None, aside=None) if found is not None else None)

    # marks ----------------------------------------------------------------------------------------
    def heal_capture(self) -> None:
        """The capture's positions are of another history than those it failed at (base/status/status.py, M5)."""
        for name in (self._config.mark, f"{self._config.mark}/topics"):
            self._tracker.heal(name)
            self._tracker.remove(name)

    def tell_copy(self, progress: SnapshotProgress) -> None:
        """Tables that are copied beside the stream: they move with its rows. What one was refused for before is told
        until they do (M5)."""
        for name in self.copying:
            self._tracker.set(
                self._config.table_mark(name), progress.moved, max(progress.expected, progress.moved + 1),
                now_ms=self._clock.now_ms(), held_by=progress.held_by, reason=self._sentence(name, progress),
                budget_ms=self._config.budget_ms, unit="rows",
                progress=progress.moved + progress.chunks_done + progress.steps.count,
            )  # fmt: skip
            self._told.add(name)

    def _sentence(self, name: str, progress: SnapshotProgress) -> str:
        row = self.rows.get(name)
        return f"{progress.sentence}; {row.reason}" if row is not None and row.reason else progress.sentence

    def copied(self) -> None:
        """The copy ended, however."""
        names, self.copying = [*self.copying], {}
        for name in names:
            self._tracker.remove(self._config.table_mark(name))
            self._told.discard(name)
            if name in self.rows:
                self._tell(self.rows[name])

    def _tell(self, row: CaptureTableRow) -> None:
        why = self._refusals.get(row.table)
        if row.state == "left" or (row.state == "captured" and (why is None or not row.flows)):
            return
        mark = self._config.table_mark(row.table)
        failure = self._tracker.failure(mark)
        if why is None or row.state == "refused":
            text = f"{row.reason} {row.fix}".strip()
        else:
            text = f"{row.reason} {why.reason[:REASON_CHARS]} {why.fix}".strip()
        self._tracker.set(mark, row.parked_lsn, row.parked_lsn + 1, now_ms=row.since_ms, unit="lsn",
            upstream=f"{self._config.mark}/topics")  # fmt: skip
        if failure is None or failure.error != text:
            # What goes on by itself is nobody's to mend, unless it takes too long.
            parked = not row.flows and not row.again_ms
            self._tracker.fail(mark, text, now_ms=row.since_ms or self._clock.now_ms(), parked=parked,
                held_by=why.held_by if why is not None else "")  # fmt: skip
        self._told.add(row.table)

    def _heal(self, name: str) -> None:
        mark = self._config.table_mark(name)
        self._refusals.pop(name, None)
        self._fruitless.pop(name, None)
        self._tracker.heal(mark)
        self._tracker.remove(mark)
        self._told.discard(name)

    def close(self) -> None:
        """Nothing is told any more: another process may capture on."""
        for name in [*self._told]:
            self._heal(name)


def _carried(row: CaptureTableRow, lsn: int) -> bool:
    return row.flows or (row.snapshot is not None and lsn < row.parked_lsn)
