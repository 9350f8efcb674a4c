"""Objects of the bucket that rows refer to, and how much of each is still referred to.

object     20 | object_key text
           kind, total_bytes, removed_bytes, created_ms, updated_ms, registered
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.family import Family
from tidemill.metastore.rows.keys import Column, Kind


class ObjectRow(msgspec.Struct, frozen=True):
    """kind: `l0`, `l1`, `part` or `rollup`. An object is garbage when removed_bytes reaches total_bytes.

    `registered` false = announced before its upload, and not yet referred to.
    """

    object_key: str
    kind: str
    total_bytes: int
    removed_bytes: int = 0
    created_ms: int = 0
    updated_ms: int = 0
    registered: bool = True


OBJECTS = Family(0x20, "object", ObjectRow, Column("object_key", Kind.TEXT))
