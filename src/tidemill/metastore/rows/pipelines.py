"""Pipelines: their tables and the sources of these.

pipeline   04 | "" | name text
           tables map, dead_letters, derived map
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class PipelineRow(msgspec.Struct, frozen=True):
    """A pipeline. tables: shard name → its source, for `status` and `verify`. Sources: `capture:<name>:<schema.table>`,
    `topic:<name>`, `derived`. derived: derived shard → its inputs in order → the columns that group the input (none:
    the whole input); a row of an older version names none."""

    name: str
    tables: dict[str, str] = {}
    dead_letters: str = ""
    derived: dict[str, dict[str, tuple[str, ...]]] = {}


PIPELINES = Family(0x04, "pipeline", PipelineRow, Column("name", Kind.TEXT), own_entity=False)


def source_of(fed_by: str) -> str:
    """Return the source of bindings for a table's `capture:<name>:<table>` or `topic:<name>`."""
    kind, _, name = fed_by.partition(":")
    return f"{kind}/{name.partition(':')[0]}"
