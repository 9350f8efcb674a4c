"""Bindings of a source: a time and the offsets that it covers.

    binding    42 | source text | time_ms u64
               log_position, binding bytes

`binding` belongs to `shards`, the only reader (layout: shards/bindings/remap).
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class BindingRow(msgspec.Struct, frozen=True):
    """One binding. `source` as the remap shard is named; `log_position`: position of the binding in its log."""

    source: str
    time_ms: int
    log_position: int
    binding: bytes


BINDINGS = Family(0x42, "binding", BindingRow, Column("source", Kind.TEXT), Column("time_ms", Kind.U64))
