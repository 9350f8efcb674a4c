"""ACL rules. Enum numbers are those of Kafka's protocol.

rule       0B | "" | resource u32 | pattern u32 | name text | principal text | host text | operation u32 |
           permission u32
           created_ms
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class AclRow(msgspec.Struct, frozen=True):
    resource: int
    pattern: int
    name: str
    principal: str
    host: str
    operation: int
    permission: int
    created_ms: int = 0


ACLS = Family(
    0x0B,
    "rule",
    AclRow,
    Column("resource", Kind.U32),
    Column("pattern", Kind.U32),
    Column("name", Kind.TEXT),
    Column("principal", Kind.TEXT),
    Column("host", Kind.TEXT),
    Column("operation", Kind.U32),
    Column("permission", Kind.U32),
    own_entity=False,
)
