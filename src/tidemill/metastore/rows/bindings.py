"""Bindings of a source: which offsets a time covers.

    binding    42 | source text | time_ms u64
               log_position, binding bytes

`binding` belongs to `shards`, which alone reads it (layout: shards/bindings/remap).
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class BindingRow(msgspec.Struct, frozen=True):
    """`source` as the remap collection is named; `log_position`: where the binding stands in its log."""

    source: str
    time_ms: int
    log_position: int
    binding: bytes


BINDINGS = Family(0x42, "binding", BindingRow, Column("source", Kind.TEXT), Column("time_ms", Kind.U64))
