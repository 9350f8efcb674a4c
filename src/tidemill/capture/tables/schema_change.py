"""Schema changes of a table: determines the version of its next rows, and puts the next version into force, durably.

    stream      at each description, before the first row under it: at that transaction's commit LSN
    catalogue   without a row: at the WAL end after the change was seen, once everything below is bound; followers of
                the table are informed then, as by a row

Invariant (watcher behind stream): the watcher sees changes ahead of the stream. It changes a description, and the
attributes stored with it to judge the next change, only after the stream has passed everything that was in the WAL when
the watcher looked. If there had been a row under another description, the stream would have met it. So no transaction
below has an unknown description.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from tidemill.base.errors import InvalidError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.columns import TableAttributes, read_attributes, read_type_names
from tidemill.capture.catalog.relations import describe_tables
from tidemill.capture.catalog.schema_diff import diff_against_catalogue, diff_against_stream
from tidemill.capture.catalog.schema_versions import (
    SchemaStep,
    columns_at_version,
    describe_altered_types,
    describe_recreated_columns,
    describe_replaced_types,
    find_version,
    plan_next_version,
    serialize_types,
    targets_of_attributes,
    targets_of_message,
)
from tidemill.capture.changes import Relation
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.pgoutput import RelationMessage
from tidemill.capture.setup.server_checks import emit_heartbeat
from tidemill.capture.tables.auto_recopy import can_copy_resolve
from tidemill.capture.tables.table_reasons import PauseCause, accept_instruction
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow


async def follow_description(
    states: TableStates, control: ControlConnection, message: RelationMessage, now: Relation | None, xid: int, lsn: int
) -> int:
    """Return the version of the next rows of the stream. The catalogue has a new version before this returns. If the
    new description cannot be carried, the table is paused before this transaction. The caller excludes the watcher.

    `now`: the table once transaction `xid`, which commits at `lsn`, is visible. Raises TableStateUnknownError.
    """
    row = states.find_receiving(message.oid, xid, lsn)
    if row is None:
        return 1
    said: list[str] = []
    name = Relation(message.oid, message.schema, message.table, ()).name
    if name != row.table:
        said.append(f"the table is now named {name}")
    found = (await control.run(lambda wire: read_attributes(wire, [message.oid]))).get(message.oid)
    version = find_version(row, message, lsn)
    if version:
        key = diff_against_catalogue(row.columns, now) if now is not None and now.columns else ""
        said += [
            difference
            for difference in (describe_recreated_columns(row, found), key if "primary key" in key else "")
            if difference
        ]
    else:
        asked = {(c.type_oid, c.type_mod) for c in message.columns}
        names = await control.run(lambda wire: read_type_names(wire, asked))
        step = (
            plan_next_version(row, targets_of_message(message, names), found)
            if not _is_before_newest_version(row, lsn)
            else ""
        )
        if isinstance(step, SchemaStep) and not said:
            try:
                return await states.evolve(row.table, step, lsn)
            except InvalidError as error:
                step = f"{error.message} {error.fix}"
        then = columns_at_version(row.columns, 1 + sum(at <= lsn for at in row.evolved))
        said.append(
            describe_recreated_columns(row, found)
            or diff_against_stream(then, message, now)
            or describe_replaced_types(row, found)
            or "its columns are in another order"
        )
        said += [step] if isinstance(step, str) and step else []
    if said:
        again = name == row.table and can_copy_resolve(row, found)
        said_all = "its description changed: " + "; ".join(said)
        columns = found if name == row.table else None
        cause = PauseCause(said_all, accept_instruction(row.table), again=again, found=columns)
        await states.pause_table(row.table, lsn, cause)
    return version or row.version


def _is_before_newest_version(row: CaptureTableRow, lsn: int) -> bool:
    """Return whether a transaction from before the newest version is sent again."""
    return bool(row.evolved) and lsn < row.evolved[-1]


class PendingSchema:
    """Changes that the watcher has seen and the stream has not passed yet. Every transaction at or below `flushed()` is
    bound. The stream's reader is paused while `reader_lock` is locked.
    """

    def __init__(
        self,
        states: TableStates,
        control: ControlConnection,
        flushed: Callable[[], int],
        reader_lock: asyncio.Lock,
        learn: Callable[[Relation], None],
        outdated: set[int],
    ) -> None:
        """`learn` shows a relation to the followers of the stream before a row arrives under it. `outdated` has the
        oids of relations that followers see as they were before the table's copy.
        """
        self._states = states
        self._control = control
        self._flushed = flushed
        self._reader_lock = reader_lock
        self._learn = learn
        self.outdated = outdated
        self._seen: dict[str, tuple[TableAttributes, int]] = {}

    @property
    def waits(self) -> bool:
        rows = self._states.rows
        return any(name in rows and rows[name].is_streaming for name in self._seen)

    def forget(self, name: str) -> None:
        self._seen.pop(name, None)

    async def judge_description(self, name: str, difference: str) -> str | None:
        """Judge the catalogue's description of a table that flows. Returns why it cannot be carried, "" if it matches
        the stored description, and None while the stream has not passed it. Raises TableStateUnknownError, and the
        errors of the connection.
        """
        row = self._states.rows[name]
        found = (await self._control.run(lambda wire: read_attributes(wire, [row.oid]))).get(row.oid)
        if found is None:
            return None
        self._states.following.store_baseline(row, found)
        descriptions = describe_recreated_columns, describe_altered_types, describe_replaced_types
        other = "; ".join(part for part in (describe(row, found) for describe in descriptions) if part)
        if other:
            return "; ".join(part for part in (other, difference) if part)
        step = plan_next_version(row, targets_of_attributes(found), found) if difference else ""
        if difference and not isinstance(step, SchemaStep):
            return f"{difference}; {step}" if step else difference
        if not difference and row == _with_seen_attributes(row, found) and row.oid not in self.outdated:
            self.forget(name)
            return ""
        if not await self._is_passed(name, found):
            return None
        end = self._seen.pop(name)[1]
        async with self._reader_lock:
            if self._states.rows[name].columns != row.columns:
                return None
            if isinstance(step, SchemaStep):
                try:
                    version = await self._states.evolve(name, step, end)
                except InvalidError as error:
                    return f"{difference}; {error.message} {error.fix}"
                await self._show_to_followers(row.oid, step.columns, version)
                await self._control.run(emit_heartbeat)  # a binding, which makes pipelines check the table
                return None  # the attributes are stored at the next check
            if row.oid in self.outdated:
                await self._show_to_followers(row.oid, row.columns, row.version)
                return None
            seen = _with_seen_attributes(row, found)

            def with_attributes(now: CaptureTableRow | None) -> CaptureTableRow | None:
                if now is None or now.columns != row.columns or not now.is_streaming:
                    return now
                return replace(
                    now, columns=seen.columns, attributes=seen.attributes, storage=seen.storage, types=seen.types
                )

            await self._states.update_row(name, with_attributes)
        return ""

    async def _show_to_followers(self, oid: int, columns: Sequence[CapturedColumn], version: int) -> None:
        """Show these columns to followers, if the table still has them."""
        now = (await self._control.run(lambda wire: describe_tables(wire, [oid]))).get(oid)
        if now is not None and not diff_against_catalogue(columns, now):
            self._learn(replace(now, version=version))
            self.outdated.discard(oid)

    async def _is_passed(self, name: str, found: TableAttributes) -> bool:
        """Return whether the stream has passed the WAL end at which this description was seen."""
        seen, end = self._seen.get(name, (None, 0))
        if seen != found:
            at = await self._control.run(lambda wire: wire.value("SELECT pg_current_wal_insert_lsn()"))
            self._seen[name] = (found, Lsn.parse(at or "0/0").value)
            await self._control.run(emit_heartbeat)  # so that an idle stream passes it immediately
            return False
        return self._flushed() >= end


def _with_seen_attributes(row: CaptureTableRow, found: TableAttributes) -> CaptureTableRow:
    """Return the row with the attributes that identify the next change of its table; rows of an older version get
    column numbers too.
    """
    columns, now = row.columns, found.by_name
    if all(not c.attnum for c in columns) and all(c.name in now for c in columns):
        columns = tuple(
            replace(c, attnum=now[c.name].attnum, type_oid=now[c.name].type_oid, type_mod=now[c.name].type_mod)
            for c in columns
        )
    return replace(row, columns=columns, attributes=found.count, storage=found.storage, types=serialize_types(found))
