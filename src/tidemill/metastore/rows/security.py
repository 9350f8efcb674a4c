"""Users with their SCRAM credentials, ACL rules, and client quotas.

user       0A | "" | user text | mechanism u32 (1 = SCRAM-SHA-256, 2 = SCRAM-SHA-512, as KIP-554)
           salt, stored_key, server_key, iterations, changed_ms
rule       0B | "" | resource u32 | pattern u32 | name text | principal text | host text | operation u32 |
           permission u32
           created_ms
quota      0C | "" | user text | client text | name text
           value

A password cannot be recovered from its credentials. Enum numbers of a rule are those of Kafka's protocol. `user` and
`client` of a quota: "" = not part of the entity, "*" = the default for names without their own quota, "=NAME" = NAME.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class UserRow(msgspec.Struct, frozen=True):
    user: str
    mechanism: int
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int
    changed_ms: int = 0


USERS = Family(0x0A, "user", UserRow, Column("user", Kind.TEXT), Column("mechanism", Kind.U32), own_entity=False)


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


class QuotaRow(msgspec.Struct, frozen=True):
    user: str
    client: str
    name: str
    value: float


QUOTAS = Family(
    0x0C,
    "quota",
    QuotaRow,
    Column("user", Kind.TEXT),
    Column("client", Kind.TEXT),
    Column("name", Kind.TEXT),
    own_entity=False,
)
