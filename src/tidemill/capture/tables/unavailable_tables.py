"""Report why a table currently carries no changes, to clients that request it. Pure.

parked      its changes are in no stream until it is copied, automatically or when an operator requests it
refused     its capture names it and cannot add it until the cause is gone; a client has nothing to change
passing     it is captured, but not among the relations that flow: it is just being paused, or added
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.metastore.catalogue import CaptureTableRow

MAX_RETRY_AFTER_S = 10
"""Maximum time until a client should check a paused table again: an operator may have it re-snapshotted at any moment.
"""


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
    if row.state == "refused":
        return TableUnavailability(f"the table is refused by its capture: {row.reason}", MAX_RETRY_AFTER_S)
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
