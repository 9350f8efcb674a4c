"""Names of the catalogue's rows, and who changed each last. Written with every change, deletions included.

    name       06 | "" | kind text | name text
               attempt

A name row is never deleted, so its seqno says exactly whether a row was changed since it was read; the row itself,
when it is absent, only says that it is absent again. `attempt` is the nonce of the write: whoever was never told an
outcome finds it there, or knows that it did not land.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class NameRow(msgspec.Struct, frozen=True):
    """kind: the name of the family that the row is of."""

    kind: str
    name: str
    attempt: str


NAMES = Family(0x06, "name", NameRow, Column("kind", Kind.TEXT), Column("name", Kind.TEXT), own_entity=False)
