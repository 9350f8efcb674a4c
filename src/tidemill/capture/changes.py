"""What capture hands on: relations, changes and transaction fragments. Plain frozen data, no I/O.

P2  Within a transaction ordinals grow; a key-changing UPDATE is one Change with op "update" and
    `old` holding the previous row, and takes two ordinals (delete@n, insert@n+1 for those who split it).
P3  A fragment never shares its last position with its successor: the newest change is held back, so
    the commit fragment always carries a position of its own (electric #3726).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.base.frontier import ChangePosition
from tidemill.capture.naming import table_name

NEVER = 1 << 64
"""Above every LSN."""

Op = Literal["insert", "update", "delete", "truncate"]


class Column(msgspec.Struct, frozen=True):
    """`type_name` is format_type's text, e.g. bigint, numeric(12,2), timestamp with time zone."""

    name: str
    type_oid: int
    type_mod: int
    type_name: str
    key_index: int
    """Place in the primary key, 0-based; -1 when not part of it."""
    not_null: bool = False


class Relation(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]

    @property
    def name(self) -> str:
        return table_name(self.schema, self.table)

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(sorted((c for c in self.columns if c.key_index >= 0), key=lambda c: c.key_index))


Row = dict[str, str | None]
"""Column name → PostgreSQL's text output, or None for NULL. Unchanged TOAST is already filled in."""


class Change(msgspec.Struct, frozen=True):
    relation: Relation
    op: Op
    position: ChangePosition
    new: Row | None = None
    old: Row | None = None


class Marker(msgspec.Struct, frozen=True):
    """A transactional logical message with prefix `tidemill`: asks for a binding exactly at this commit."""

    content: str


class Fragment(msgspec.Struct, frozen=True):
    """Part of one transaction, in order. A whole transaction in one fragment has both `begins` and `commits`.

    `last` is the position of the last change in it (of the commit when it has none).
    """

    xid: int
    commit_lsn: int
    commit_time_ms: int
    begins: bool
    commits: bool
    changes: tuple[Change, ...]
    last: ChangePosition
    markers: tuple[Marker, ...] = ()
    size_bytes: int = 0
    """Bytes of the messages it was made of, for those who bound what they keep."""
