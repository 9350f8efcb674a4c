"""Shapes: the definition behind each handle.

shape      50 | shape_id text
           handle, kind, database, schema, table, where, params array, columns array, replica, log_mode,
           created_ms
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class ShapeRow(msgspec.Struct, frozen=True):
    """A shape. kind: `table` (`schema`.`table` of a captured database) or `shard` (`table` is the shard's name).

    `shape_id` is the digest of the definition; `handle` identifies the current log of the shape.
    """

    shape_id: str
    handle: str
    kind: str
    database: str
    schema: str
    table: str
    where: str = ""
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    replica: str = "default"
    log_mode: str = "full"
    created_ms: int = 0


SHAPES = Family(0x50, "shape", ShapeRow, Column("shape_id", Kind.TEXT))
