"""Who keeps the checkpoint, and how far it is: one row a domain, changed by every commit of a checkpoint.

checkpoint   60 | slot text
             holder, round, gathered_ms, complete

`slot` is chosen so that the row lies in its domain (`metastore.checkpoint.slot_of`).
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class CheckpointRow(msgspec.Struct, frozen=True):
    """`gathered_ms`: what the rows hold is at least as new as this; 0 = not known yet. `complete`: no round is being
    written."""

    slot: str
    holder: str
    round: int
    gathered_ms: int
    complete: bool = False


CHECKPOINTS = Family(0x60, "checkpoint", CheckpointRow, Column("slot", Kind.TEXT))
