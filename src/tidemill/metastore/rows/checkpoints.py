"""Owner and progress of the checkpoint: one row per domain, changed by every commit of a checkpoint.

checkpoint   60 | slot text
             holder, round, gathered_ms, complete

`slot` is chosen so that the row belongs to its domain (`metastore.backup.checkpoint.slot_of`).
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class CheckpointRow(msgspec.Struct, frozen=True):
    """State of one domain's checkpoint. `gathered_ms`: the rows are at least as new as this; 0 = unknown. `complete`:
    no round is being written."""

    slot: str
    holder: str
    round: int
    gathered_ms: int
    complete: bool = False


CHECKPOINTS = Family(0x60, "checkpoint", CheckpointRow, Column("slot", Kind.TEXT))
