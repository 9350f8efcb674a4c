"""The tables of one session: which flow, which are parked and why. One place that changes a table's state, durably.

D1  Parking is made durable before the transaction that made it necessary is handed on, so before it can be
    confirmed: a table is parked at one position, in this life and the next. The lowest position counts.
D2  What is parked stays so until it is copied again: changes at and above its position are in no topic.
D3  A table's failure is told under `table:<capture>/<schema.table>`, parked, and never ends the capture.
D4  A change that may not have been written ends the session (`Unrecorded`): the next one begins from what is durable,
    so no table flows by the catalogue and is carried by nobody, or the other way round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import Unavailable, Unknown
from tidemill.base.frontier import Lsn
from tidemill.base.marks import Tracker
from tidemill.capture.boundaries import in_snapshot
from tidemill.capture.changes import NEVER, Relation
from tidemill.capture.config import CaptureConfig
from tidemill.capture.difference import against_catalogue, against_stream
from tidemill.capture.snapshot import SnapshotProgress
from tidemill.capture.tables import Refusal
from tidemill.capture.wire.pgoutput import RelationMessage
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue

log = structlog.get_logger()

REASON_CHARS = 600
"""Of a reason in a row and a mark: a table of 1,600 columns may differ in all of them."""


def recopy(table: str) -> str:
    return f"Run tidemill capture recopy '{table}': changes from here on are not carried, so it is copied again."


class Unrecorded(Unknown):
    """What the catalogue holds of a table is not known (D4)."""


class Desk:
    """`on_park(oid, lsn)`: nothing of this relation is carried at or above the LSN from now on (plain call)."""

    def __init__(
        self,
        config: CaptureConfig,
        catalogue: Catalogue,
        clock: Clock,
        tracker: Tracker,
        on_park: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._config = config
        self._catalogue = catalogue
        self._clock = clock
        self._tracker = tracker
        self._on_park = on_park
        self._changing = asyncio.Lock()
        self.rows: dict[str, CaptureTableRow] = {}
        self.copying: dict[str, int] = {}
        """Tables that are copied beside the stream just now, and their oids. One that is refused is none of them: what
        is told of it is not how the others move."""
        self._told: set[str] = set()
        self._refusals: dict[str, Refusal] = {}
        """What the last try to take a table in ended with, until it is past that."""

    def connect(self, on_park: Callable[[int, int], None]) -> None:
        self._on_park = on_park

    def know(self, rows: dict[str, CaptureTableRow]) -> None:
        """The rows as they are now; marks follow."""
        self.rows = dict(rows)
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

    def serves(self, oid: int) -> bool:
        """Whether followers of this relation may be told that it is captured."""
        return any(row.oid == oid and row.state == "captured" for row in self.rows.values())

    def held_by(self, name: str) -> str:
        """Who kept the table out when it was to be taken in last, "" = nobody."""
        why = self._refusals.get(name)
        return why.held_by if why is not None else ""

    # changing -------------------------------------------------------------------------------------
    async def park(self, name: str, lsn: int, reason: str, fix: str = "", *, state: str = "parked") -> None:
        """Carry no transaction of the table at or above `lsn` (D1). Raises Unrecorded."""
        row = self.rows.get(name)
        if row is None or (row.parked_lsn and row.parked_lsn <= lsn):
            return
        reason = f"{reason[:REASON_CHARS].rstrip('.')}: table={name} parked_at={Lsn(lsn)}."
        self._on_park(row.oid, lsn)

        def parked(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or (found.parked_lsn and found.parked_lsn <= lsn) or found.generation != row.generation:
                return found
            since_ms = found.since_ms if found.state == state and found.since_ms else self._clock.now_ms()
            return replace(
                found, state=state, reason=reason, fix=fix or recopy(name), parked_lsn=lsn, since_ms=since_ms
            )

        log.error("a table is parked", capture=self._config.name, table=name, reason=reason)
        self._refusals.pop(name, None)
        await self.change(name, parked)

    async def refuse(self, name: str, why: Refusal, oid: int = 0) -> None:
        """Say why a table is not captured. One that flows or is parked keeps its row; where it was to be copied again,
        its mark says why it was not."""

        def refused(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None:
                found = CaptureTableRow(self._config.name, name)
            elif found.snapshot is not None or found.parked_lsn:
                return found
            since_ms = found.since_ms if found.state == why.state and found.since_ms else self._clock.now_ms()
            return replace(
                found, state=why.state, reason=why.reason[:REASON_CHARS], fix=why.fix, since_ms=since_ms, oid=oid
            )

        tried = self.copying.pop(name, None) is not None
        known = self.rows.get(name)
        kept = known is not None and (known.snapshot is not None or known.parked_lsn)
        if tried or not kept:
            self._refusals[name] = why
        told = (known.state, known.reason, known.fix) if known is not None else None
        if not kept and told != (why.state, why.reason[:REASON_CHARS], why.fix):
            await self.change(name, refused)
        elif tried and known is not None:
            self._tell(known)

    async def change(
        self, name: str, change: Callable[[CaptureTableRow | None], CaptureTableRow | None]
    ) -> CaptureTableRow | None:
        """Durably. Raises Unrecorded, and Invalid where nothing was written."""
        async with self._changing:
            try:
                row = await self._catalogue.change_table(self._config.name, name, change)
            except (Unavailable, Unknown) as error:
                what = f"a table's state may not be written: table={name} cause={error.message!r}."
                raise Unrecorded(what) from error
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

    # looking --------------------------------------------------------------------------------------
    def differs_in_stream(
        self, message: RelationMessage, now: Relation | None, xid: int, lsn: int
    ) -> tuple[str, str] | None:
        """(table, difference) where the stream goes on with what cannot be carried; None = nothing to say.

        `xid`, `lsn`: of the transaction at hand. The catalogue is ahead of the stream: of it only the key is asked,
        which no message tells.
        """
        row = self.followed(message.oid, xid, lsn)
        if row is None:
            return None
        said = []
        name = Relation(message.oid, message.schema, message.table, ()).name
        if name != row.table:
            said.append(f"the table is now named {name}")
        columns = against_stream(row.columns, message, now)
        if columns:
            said.append(columns)
        elif now is not None and now.columns:
            key = against_catalogue(row.columns, now)
            if "primary key" in key:
                said.append(key)
        return (row.table, "its description changed: " + "; ".join(said)) if said else None

    # marks ----------------------------------------------------------------------------------------
    def tell_copy(self, progress: SnapshotProgress) -> None:
        """Tables that are copied beside the stream: they move with its rows. What one was refused for before is told
        until they do (M5)."""
        for name in self.copying:
            self._tracker.set(
                self._config.table_mark(name), progress.rows, max(progress.expected, progress.rows + 1),
                now_ms=self._clock.now_ms(), held_by=progress.held_by, reason=progress.sentence,
                budget_ms=self._config.budget_ms, unit="rows",
            )  # fmt: skip
            self._told.add(name)

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
            self._tracker.fail(mark, text, now_ms=row.since_ms or self._clock.now_ms(), parked=not row.flows,
                held_by=why.held_by if why is not None else "")  # fmt: skip
        self._told.add(row.table)

    def _heal(self, name: str) -> None:
        mark = self._config.table_mark(name)
        self._refusals.pop(name, None)
        self._tracker.heal(mark)
        self._tracker.remove(mark)
        self._told.discard(name)

    def close(self) -> None:
        """Nothing is told any more: another process may capture on."""
        for name in [*self._told]:
            self._heal(name)


def _carried(row: CaptureTableRow, lsn: int) -> bool:
    return row.flows or (row.snapshot is not None and lsn < row.parked_lsn)
