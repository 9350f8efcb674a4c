"""What capture hands on: relations, changes and transaction fragments. Plain frozen data, no I/O.

P2  Within a transaction ordinals grow; a key-changing UPDATE is one Change with op "update" and
    `old` holding the previous row, and takes two ordinals (delete@n, insert@n+1 for those who split it).
P3  A fragment never shares its last position with its successor: the newest change is held back, so
    the commit fragment always carries a position of its own (electric #3726).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tidemill.base.lsn import ChangePosition
from tidemill.capture.naming import table_name

NEVER = 1 << 64
"""Above every LSN."""

ORDINAL_STEP = 2
"""Between two changes of a transaction (P2)."""

Op = Literal["insert", "update", "delete", "truncate"]

OldRows = Literal["whole", "key", "lacking"]
"""What the stream says of the row before an UPDATE or DELETE of a relation, hence what is demanded of it.

whole     every column: REPLICA IDENTITY FULL is demanded, and a row that lacks its old one is an error
key       the primary key at least (FULL, DEFAULT, an index with all its columns); an UPDATE that keeps it may say
          nothing
lacking   not even that: no UPDATE and no DELETE can be read
"""


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
    version: int = 1
    """Of its description (CaptureTableRow): what its records were written under."""
    old_rows: OldRows = "whole"
    deferrable: bool = False
    """Two rows may hold one primary key at once, inside a transaction (deferrable_keys.py)."""

    @property
    def name(self) -> str:
        return table_name(self.schema, self.table)

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(sorted((c for c in self.columns if c.key_index >= 0), key=lambda c: c.key_index))


Row = dict[str, str | None]
"""Column name → PostgreSQL's text output, or None for NULL. A column that is absent has no value in the stream."""


class Change(msgspec.Struct, frozen=True):
    """`old` has every column, or those of the primary key alone; an update that keeps its key may have none.

    `unchanged`: columns that `new` lacks. They hold what they held before, which is TOASTed and which nobody said.
    `stays`: the row that holds the old key although this one has left it. `over`: the row that holds the new key still,
    and leaves it later; `replaced`: this is that row, as its successor said (deferrable_keys.py).
    """

    relation: Relation
    op: Op
    position: ChangePosition
    new: Row | None = None
    old: Row | None = None
    unchanged: tuple[str, ...] = ()
    stays: Row | None = None
    over: Row | None = None
    replaced: bool = False


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
    changes: Sequence[Change]
    """A tuple, or `row_blocks.Changes`, whose changes are decoded for those who look at them."""
    last: ChangePosition
    markers: tuple[Marker, ...] = ()
    size_bytes: int = 0
    """Bytes of the messages it was made of, for those who bound what they keep."""
