"""Pipelines.

pipeline   04 | "" | name text
           tables map, dead_letters, derived map
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class PipelineRow(msgspec.Struct, frozen=True):
    """tables: shard name → what feeds it, for `status` and `verify`. Sources: `capture:<name>:<schema.table>`,
    `topic:<name>`, `derived`. derived: derived shard → its inputs in their order → the input's columns that group it
    (none: given whole); a row of an older version names none of them."""

    name: str
    tables: dict[str, str] = {}
    dead_letters: str = ""
    derived: dict[str, dict[str, tuple[str, ...]]] = {}


PIPELINES = Family(0x04, "pipeline", PipelineRow, Column("name", Kind.TEXT), own_entity=False)


def source_of(fed_by: str) -> str:
    """The source of bindings that a pipeline's `capture:<name>:<table>` or `topic:<name>` names."""
    kind, _, name = fed_by.partition(":")
    return f"{kind}/{name.partition(':')[0]}"
