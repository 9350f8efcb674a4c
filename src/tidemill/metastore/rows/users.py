"""Users and their SCRAM credentials, from which a password cannot be recovered.

user       0A | "" | user text | mechanism u32 (1 = SCRAM-SHA-256, 2 = SCRAM-SHA-512, as KIP-554)
           salt, stored_key, server_key, iterations, changed_ms
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
