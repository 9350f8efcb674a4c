"""Data types that capture passes to its consumers: relations, changes and transaction fragments. Plain frozen data, no
I/O.

Invariant (ordinals): within a transaction ordinals grow. A key-changing UPDATE is one Change with op "update" and the
previous row in `old`, and takes two ordinals (for consumers that split it: delete@n, insert@n+1).

Invariant (distinct ends): a fragment never shares its last position with its successor. The newest change is held back,
so the commit fragment always has its own last position (electric #3726).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tidemill.base.lsn import ChangePosition
from tidemill.capture.naming import table_name

LSN_NEVER = 1 << 64
"""Above every LSN."""

ORDINAL_STEP = 2
"""Distance between two changes of a transaction."""

Op = Literal["insert", "update", "delete", "truncate"]

OldRows = Literal["whole", "key", "lacking"]
"""Part of the old row that the stream carries for an UPDATE or DELETE of a relation, hence what is required of it.

whole     every column: REPLICA IDENTITY FULL is required, and a change that lacks its old row is an error
key       at least the primary key (FULL, DEFAULT, an index with all its columns); an UPDATE that keeps it may lack the
          old row
lacking   not even that: no UPDATE and no DELETE can be read
"""


class Column(msgspec.Struct, frozen=True):
    """One column of a relation. `type_name` is format_type's text, e.g. bigint, numeric(12,2), timestamp with time
    zone.
    """

    name: str
    type_oid: int
    type_mod: int
    type_name: str
    key_index: int
    """Place in the primary key, 0-based; -1 if it is not part of it."""
    not_null: bool = False


class Relation(msgspec.Struct, frozen=True):
    oid: int
    schema: str
    table: str
    columns: tuple[Column, ...]
    version: int = 1
    """Version of its description (CaptureTableRow), under which its records are written."""
    old_rows: OldRows = "whole"
    deferrable: bool = False
    """True if two rows may share a primary key inside a transaction (deferrable_keys.py)."""

    @property
    def name(self) -> str:
        return table_name(self.schema, self.table)

    @property
    def key_columns(self) -> tuple[Column, ...]:
        return tuple(sorted((c for c in self.columns if c.key_index >= 0), key=lambda c: c.key_index))


Row = dict[str, str | None]
"""Column name → PostgreSQL's text output, or None for NULL. A column that is absent has no value in the stream."""


class Change(msgspec.Struct, frozen=True):
    """One change of a row. `old` has every column, or only those of the primary key; an update that keeps its key may
    have none.

    `unchanged`: columns that `new` lacks. They are TOASTed and unchanged, and their values are not in the stream.
    `stays`: the row that has the old key although this one has left it. `over`: the row that still has the new key, and
    leaves it later. `replaced`: this change is of the row that its successor names in `over` (deferrable_keys.py).
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
    """A transactional logical message with prefix `tidemill`, which requests a binding exactly at this commit."""

    content: str


class CommitColumns(msgspec.Struct, frozen=True, gc=False):
    """Whole transactions of a batch, by columns, in commit order. `ends`: number of changes up to the end of each."""

    xids: list[int]
    lsns: list[int]
    times_ms: list[int]
    ends: list[int]

    def __len__(self) -> int:
        return len(self.lsns)


class Fragment(msgspec.Struct, frozen=True):
    """Part of one transaction, in order. A whole transaction in one fragment has both `begins` and `commits`.

    A batch has one or more whole transactions without markers, which `batch` describes. It both `begins` and `commits`.
    Its `xid`, `commit_lsn`, `commit_time_ms` and `last` are those of its last transaction.

    `last` is the position of its last change (of the commit if it has none).
    """

    xid: int
    commit_lsn: int
    commit_time_ms: int
    begins: bool
    commits: bool
    changes: Sequence[Change]
    """A tuple, or `row_blocks.LazyChanges`, whose changes are decoded on access."""
    last: ChangePosition
    markers: tuple[Marker, ...] = ()
    size_bytes: int = 0
    """Size of the messages that it contains, for consumers that bound their memory."""
    batch: CommitColumns | None = None

    @property
    def first_lsn(self) -> int:
        """Commit LSN of its first transaction."""
        return self.commit_lsn if self.batch is None else self.batch.lsns[0]
