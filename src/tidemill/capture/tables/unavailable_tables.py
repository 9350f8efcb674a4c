"""What the desk says of a table that carries nothing just now, for those who ask for it. Pure.

parked      its changes are in no stream until it is copied, by itself or when an operator asks for it
refused     its capture names it and cannot take it in until the cause is gone; a client has nothing to change
passing     it is captured, but not among the relations that flow: it is just being parked, or taken in
"""

from __future__ import annotations

from typing import NamedTuple

from tidemill.metastore.catalogue import CaptureTableRow

LOOK_AGAIN_S = 10
"""A parked table is worth another question after so long at most: an operator may have it copied any moment."""


class Standing(NamedTuple):
    """`retry_after_s`: when to ask again."""

    reason: str
    retry_after_s: int
    passing: bool = False


def standing_of(row: CaptureTableRow | None, now_ms: int) -> Standing | None:
    """None: the table flows, or its capture does not name it."""
    if row is None:
        return None
    if row.state == "captured":
        return Standing(f"the table is being taken in: table={row.table}.", 1, passing=True)
    if row.state == "refused":
        return Standing(f"the table is refused by its capture: {row.reason}", LOOK_AGAIN_S)
    if row.state != "parked":
        return None
    if row.recopy:
        return Standing(f"the table is parked until it is copied: {row.reason}", 1)
    if row.again_ms:
        left_s = max(1, -(-(row.again_ms - now_ms) // 1000))
        return Standing(f"the table is parked until it is copied: {row.reason}", min(LOOK_AGAIN_S, left_s))
    return Standing(f"the table is parked until an operator has it copied: {row.reason}", LOOK_AGAIN_S)
