"""Reasons for a table without changes, as sentences. Stage statuses and rows get the action for an operator; clients
that request the table get the time to check again. Pure.

parked      its changes are in no stream until it is copied, automatically or when an operator requests it
refused     its capture names it and cannot add it until the cause is gone; a client has nothing to change
passing     it is captured, but not among the relations that flow: it is just being paused, or added
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import TidemillError
from tidemill.base.lsn import Lsn
from tidemill.capture.catalog.columns import TableAttributes
from tidemill.capture.catalog.table_choice import Refusal
from tidemill.capture.catalog.table_discovery import TableInfo
from tidemill.capture.naming import to_readable
from tidemill.capture.postgres.errors import is_transient
from tidemill.capture.setup.publication import TableLockedError
from tidemill.metastore.catalogue import CaptureTableRow

MAX_RETRY_AFTER_S = 10
"""Maximum time until a client should check a paused table again: an operator may have it re-snapshotted at any moment.
"""


MAX_REASON_CHARS = 600
"""Length limit of a reason in a row and a stage status: a table of 1,600 columns may differ in all of them."""


class PauseCause(msgspec.Struct, frozen=True):
    """Cause of a pause of a table.

    fix      what an operator does; "" = have it re-snapshotted
    again    a copy resolves the cause (auto_recopy.py), after an operator has done what `first` says, if anything
    found    the database's description of the columns, if they are the only cause (unaffected_columns.py)
    state    of the table while it is paused: parked or dropped
    """

    reason: str
    fix: str = ""
    again: bool = False
    first: str = ""
    found: TableAttributes | None = None
    state: str = "parked"

    @classmethod
    def of_refusal(cls, why: Refusal) -> PauseCause:
        """Return the cause for a table that flows and must not be captured in its present form."""
        return cls(why.reason, again=why.again, first=why.fix if why.again else "")


def pause_reason(table: str, reason: str, lsn: int) -> str:
    return f"{to_readable(reason)[:MAX_REASON_CHARS].rstrip('.')}: table={table} parked_at={Lsn(lsn)}."


def recopy_instruction(table: str) -> str:
    return f"Run tidemill capture resnapshot '{table}': later changes are not carried, so the table is re-snapshotted."


def accept_instruction(table: str) -> str:
    return (
        f"Run tidemill capture accept '{table}': it shows the effect on each pipeline's table, and re-snapshots the"
        f" source once you agree. tidemill capture resnapshot '{table}' re-snapshots it without changing a pipeline's"
        " table that would lose data."
    )


def automatic_recopy_notice(again_ms: int, waits: bool) -> str:
    at = f" from {datetime.fromtimestamp(again_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC" if waits else ""
    return f"It is re-snapshotted automatically{at}, concurrently with the stream."


def blocked_row(row: CaptureTableRow, why: Refusal, now_ms: int) -> CaptureTableRow:
    """Return the row of a paused table whose re-snapshot cannot begin because of `why`, if it needs no operator
    otherwise. `why` replaces the reason of the pause, whose cause may be gone; `again_ms` and `recopy` stay.
    """
    if row.state != "parked" or row.copy is not None or not (row.again_ms or row.recopy) or why.state != "refused":
        return row
    fix = f"{why.fix} {automatic_recopy_notice(row.again_ms, row.again_ms > now_ms)}".strip()
    return replace(row, reason=pause_reason(row.table, why.reason, row.paused_lsn), fix=fix)


def topic_taken_refusal(topic: str) -> Refusal:
    return Refusal(
        "refused",
        f"a topic of this name belongs to Kafka producers: topic={topic}.",
        "Delete it, or rename the capture.",
    )


def refusal_for(error: TidemillError) -> Refusal:
    fix = error.fix or f"{'It' if is_transient(error) else 'Repair it; it'} is retried automatically."
    return Refusal("refused", error.message, fix, error.held_by if isinstance(error, TableLockedError) else "")


def explain_missing_table(row: CaptureTableRow, found: Iterable[TableInfo]) -> tuple[str, str]:
    """Return (reason, fix) for a table that is no longer captured."""
    drop = "remove it from its pipeline and drop the pipeline's table"
    for table in found:
        if table.name == row.table:
            return "the table is no longer captured", f"Add it to `tables` of this capture again, or {drop}."
        if table.oid == row.oid:
            return f"the table is now named {table.name}: the pipeline's table ends here", f"Rename it back, or {drop}."
    return (
        "the table was dropped from the database: the pipeline's table ends here",
        f"Re-create it, and it is re-snapshotted; or {drop}.",
    )


class TableUnavailability(NamedTuple):
    """Reason why a table is unavailable. `retry_after_s`: when to check again."""

    reason: str
    retry_after_s: int
    passing: bool = False


def unavailability_of(row: CaptureTableRow | None, now_ms: int) -> TableUnavailability | None:
    """Return None if the table flows, or its capture does not name it."""
    if row is None:
        return None
    if row.state == "captured":
        return TableUnavailability(f"the table is being added: table={row.table}.", 1, passing=True)
    if row.state in ("refused", "left"):
        verb = "refused" if row.state == "refused" else "skipped"
        return TableUnavailability(f"the table is {verb} by its capture: {row.reason}", MAX_RETRY_AFTER_S)
    if row.state != "parked":
        return None
    if row.recopy:
        return TableUnavailability(f"the table is paused until it is copied: {row.reason}", 1)
    if row.again_ms:
        left_s = max(1, -(-(row.again_ms - now_ms) // 1000))
        return TableUnavailability(
            f"the table is paused until it is copied: {row.reason}", min(MAX_RETRY_AFTER_S, left_s)
        )
    return TableUnavailability(f"the table is paused until an operator has it copied: {row.reason}", MAX_RETRY_AFTER_S)
