"""Tables that are copied again by themselves: they are parked for what a copy makes good, and no reader loses a column.

    by itself     rows were written anew, moved with a partition, or came without the old ones they replace; columns
                  were added and types widened besides
    when asked    a column is gone, renamed, made anew under its name, narrowed, retyped; the key is another: that is
                  for somebody to accept. A row that cannot be written, which a copy would only meet again

A1  That a table is, and from when on, is written together with its park: who dies in between copies it all the same.
A2  It is looked at once more before the copy begins. What has happened since may be somebody's to accept, and the
    table may have become too large to be copied unasked.
A3  One table not more often than every copy_again_pause_s, from one beginning to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec.structs import replace

from tidemill.base.clock import Clock
from tidemill.base.errors import InvalidError
from tidemill.base.limits import MIB
from tidemill.capture.catalog.columns import Attributes, attributes_of
from tidemill.capture.catalog.schema_versions import anew, schema_of, targets_of, widens
from tidemill.capture.catalog.table_discovery import LOOK_TIMEOUT_MS
from tidemill.capture.config import CaptureConfig
from tidemill.capture.postgres.connection import Wire
from tidemill.capture.postgres.control_connection import Control
from tidemill.capture.postgres.errors import SqlError
from tidemill.capture.tables.table_states import TableStates, accept, recopy
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow
from tidemill.shards.parts.schema_evolution import changes_to, evolved

log = structlog.get_logger()

CHANGED = "its columns have changed once more since it was parked"


def heals(row: CaptureTableRow, found: Attributes | None) -> bool:
    """Whether a copy of the table, as the database has it now, is one that every shard of it takes over. Pure."""
    if found is None or not row.columns or any(not c.attnum or not c.type_oid for c in row.columns):
        return False
    now = found.by_name
    key = [c.name for c in sorted((c for c in row.columns if c.key_index >= 0), key=lambda c: c.key_index)]
    if anew(row, found) or found.key != key or any(c.name not in now for c in row.columns):
        return False
    for column in row.columns:
        old, new = (column.type_oid, column.type_mod), (now[column.name].type_oid, now[column.name].type_mod)
        if old != new and not widens(old, new)[0]:
            return False
    try:
        have = schema_of(row.columns)
        evolved(have, changes_to(have, schema_of(columns_found(found))))
    except InvalidError:
        return False
    return True


def columns_found(found: Attributes) -> list[CapturedColumn]:
    """What a copy made now would have as its columns."""
    keys = {c.name: c.key_index for c in found.columns}
    return [CapturedColumn(t.name, t.type_name, keys[t.name], t.type_oid, t.type_mod) for t in targets_of(found)]


class AutoRecopy:
    """Which parked tables are due. One that is not to be copied unasked any more is told to be so."""

    def __init__(self, config: CaptureConfig, control: Control, desk: TableStates, clock: Clock) -> None:
        self._config = config
        self._control = control
        self._desk = desk
        self._clock = clock

    async def due(self) -> set[str]:
        """A2, A3. Raises Unrecorded, and what the connection raises."""
        names = set()
        for row in [row for row in self._desk.rows.values() if row.again_ms and row.parked_lsn]:
            if self._config.copy_again and self._clock.now_ms() < row.again_ms:
                continue
            why = await self._why_not(row)
            if why is None:
                names.add(row.table)
            elif why:
                await self._leave(row, why, accept if why == CHANGED else recopy)
        return names

    async def _why_not(self, row: CaptureTableRow) -> str | None:
        """None = it may be copied; "" = that cannot be told just now."""
        if not self._config.copy_again:
            return "copy_again is off for this capture"
        found = (await self._control.ask(lambda wire: attributes_of(wire, [row.oid]))).get(row.oid)
        if found is None:
            return ""  # gone or renamed: who compares the tables says so
        if not heals(row, found):
            return CHANGED
        try:
            size_bytes = await self._control.ask(lambda wire: table_bytes(wire, row.oid))
        except SqlError as error:
            log.warning("the size of a table is not known yet", table=row.table, cause=str(error))
            return ""
        if size_bytes > self._config.copy_again_max_mb * MIB:
            return f"it is larger than is copied unasked: {size_bytes // MIB} of {self._config.copy_again_max_mb} MiB"
        return None

    async def _leave(self, row: CaptureTableRow, why: str, way: Callable[[str], str] = recopy) -> None:
        def left(found: CaptureTableRow | None) -> CaptureTableRow | None:
            if found is None or not found.again_ms or found.parked_lsn != row.parked_lsn:
                return found
            return replace(found, again_ms=0, fix=f"It is not copied by itself: {why}. {way(row.table)}")

        log.warning("a parked table is not copied by itself", table=row.table, cause=why)
        await self._desk.change(row.table, left)


async def table_bytes(wire: Wire, oid: int) -> int:
    """Of a table with its partitions, without indexes. Raises SqlError when a lock cannot be had just now."""
    await wire.query("BEGIN")
    try:
        await wire.query(f"SET LOCAL lock_timeout = {LOOK_TIMEOUT_MS}")
        found = await wire.value(
            "SELECT coalesce(sum(pg_table_size(oid)), 0)::bigint FROM"
            f" (SELECT {oid}::regclass AS oid UNION SELECT relid FROM pg_partition_tree({oid})) AS tree"
        )
    finally:
        await wire.query("ROLLBACK")
    return int(found or 0)
