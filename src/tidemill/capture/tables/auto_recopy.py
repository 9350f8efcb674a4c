"""Re-snapshot paused tables automatically if a copy resolves the cause and no reader loses a column.

    automatic     rows were rewritten, moved with a partition, or arrived without the old rows that they replace;
                  columns were added and types widened as well; or a type was replaced by another one of its name
    on request    a column was dropped, renamed, re-created under its name, narrowed, or retyped, or the key changed:
                  an operator has to accept that. A row that cannot be written, which a copy would only meet again

Invariant (durable schedule): the schedule of a re-snapshot is stored atomically with the pause, so a crash cannot lose
it.

Invariant (check before copying): a table is checked again before the copy begins. A later change may need an operator's
acceptance, and the table may have become too large to be copied automatically.

Invariant (rate): a table is re-snapshotted at most once per copy_again_pause_s, from one start to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.base.limits import MIB
from tidemill.capture.catalog.columns import TableAttributes, read_attributes
from tidemill.capture.catalog.schema_versions import (
    classify_type_change,
    describe_recreated_columns,
    is_replaced_type,
    shard_schema_of,
    targets_of_attributes,
)
from tidemill.capture.catalog.table_discovery import PARTITION_CHECK_TIMEOUT_MS
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import PgConnection
from tidemill.capture.postgres.control_connection import ControlConnection
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.tables.table_reasons import accept_instruction, recopy_instruction
from tidemill.capture.tables.table_states import TableStates
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow
from tidemill.shards.parts.schema_evolution import evolve_schema, schema_changes

log = structlog.get_logger()

CHANGED_AGAIN_REASON = "its columns have changed again since it was paused"


def can_copy_resolve(row: CaptureTableRow, found: TableAttributes | None) -> bool:
    """Return whether every shard of the table can take over a copy of the table as the database has it now. Pure."""
    if found is None or not row.columns or any(not c.attnum or not c.type_oid for c in row.columns):
        return False
    now = found.by_name
    key = [c.name for c in sorted((c for c in row.columns if c.key_index >= 0), key=lambda c: c.key_index)]
    if describe_recreated_columns(row, found) or found.key != key or any(c.name not in now for c in row.columns):
        return False
    for column in row.columns:
        old, new = (column.type_oid, column.type_mod), (now[column.name].type_oid, now[column.name].type_mod)
        if old != new and not classify_type_change(old, new)[0] and not is_replaced_type(column, now[column.name]):
            return False
    try:
        have = shard_schema_of(row.columns)
        evolve_schema(have, schema_changes(have, shard_schema_of(columns_of_copy(found))))
    except InvalidError:
        return False
    return True


def columns_of_copy(found: TableAttributes) -> list[CapturedColumn]:
    """Return the columns that a copy taken now would have."""
    keys = {c.name: c.key_index for c in found.columns}
    return [
        CapturedColumn(t.name, t.type_name, keys[t.name], t.type_oid, t.type_mod) for t in targets_of_attributes(found)
    ]


class AutoRecopy:
    """Selection of the paused tables that are due. A table that must no longer be copied automatically is changed to
    one that waits for an operator.
    """

    def __init__(self, config: CaptureConfig, control: ControlConnection, states: TableStates, clock: Clock) -> None:
        self._config = config
        self._control = control
        self._states = states
        self._clock = clock

    async def find_due_tables(self) -> set[str]:
        """Return the names of the tables to copy now, after the check of each one. Raises TableStateUnknownError, and
        the connection's errors.
        """
        names = set()
        for row in [row for row in self._states.rows.values() if row.again_ms and row.paused_lsn]:
            if self._config.copy_again and self._clock.now_ms() < row.again_ms:
                continue
            why = await self._find_obstacle(row)
            if why is None:
                names.add(row.table)
            elif why:
                await self._leave_to_operator(
                    row, why, accept_instruction if why == CHANGED_AGAIN_REASON else recopy_instruction
                )
        return names

    async def _find_obstacle(self, row: CaptureTableRow) -> str | None:
        """Return why the table must not be copied; None = it may be, "" = not known now."""
        if not self._config.copy_again:
            return "copy_again is off for this capture"
        found = (await self._control.run(lambda wire: read_attributes(wire, [row.oid]))).get(row.oid)
        if found is None:
            return ""  # dropped or renamed: the catalogue watcher reports that
        if not can_copy_resolve(row, found):
            return CHANGED_AGAIN_REASON
        try:
            size_bytes = await self._control.run(lambda wire: read_table_bytes(wire, row.oid))
        except SqlError as error:
            log.warning("the size of a table is not known yet", table=row.table, cause=str(error))
            return ""
        if size_bytes > self._config.copy_again_max_mb * MIB:
            return f"it exceeds copy_again_max_mb: {size_bytes // MIB} of {self._config.copy_again_max_mb} MiB"
        return None

    async def _leave_to_operator(
        self, row: CaptureTableRow, why: str, way: Callable[[str], str] = recopy_instruction
    ) -> None:
        def without_schedule(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or not found.again_ms or found.paused_lsn != row.paused_lsn:
                return found
            return replace(found, again_ms=0, fix=f"It is not re-snapshotted automatically: {why}. {way(row.table)}")

        log.warning("a paused table is not re-snapshotted automatically", table=row.table, cause=why)
        await self._states.update_row(row.table, without_schedule)


async def read_table_bytes(wire: PgConnection, oid: int) -> int:
    """Return the size of a table with its partitions, without indexes. Raises SqlError if a lock is not available."""
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {PARTITION_CHECK_TIMEOUT_MS}")
        found = await wire.value(
            "SELECT coalesce(sum(pg_table_size(oid)), 0)::bigint FROM"
            f" (SELECT {oid}::regclass AS oid UNION SELECT relid FROM pg_partition_tree({oid})) AS tree"
        )
    finally:
        await wire.query("ROLLBACK")
    return int(found or 0)
