"""Names of the catalogue's rows and the last writer of each. Written with every change, including deletions.

    name       06 | "" | kind text | name text
               attempt

A name row is never deleted, so its seqno shows exactly whether a row was changed since it was read. The row itself
cannot: it may have been deleted and re-created. `attempt` is the nonce of the write: a writer that did not learn the
outcome finds its nonce there, or knows that the write did not happen.
"""

from __future__ import annotations

import msgspec

from tidemill.metastore.rows.key_encoding import Column, Kind
from tidemill.metastore.rows.row_family import Family


class NameRow(msgspec.Struct, frozen=True):
    """Name row. kind: the name of the row's family."""

    kind: str
    name: str
    attempt: str


NAMES = Family(0x06, "name", NameRow, Column("kind", Kind.TEXT), Column("name", Kind.TEXT), own_entity=False)
