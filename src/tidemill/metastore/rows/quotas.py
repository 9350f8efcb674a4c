"""Client quotas, as in Kafka.

quota      0C | "" | user text | client text | name text
           value

`user` and `client`: "" = not part of the entity, "*" = the default for names without their own quota, "=NAME" = NAME.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


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
