"""Small builders for pure tests of capture."""

from __future__ import annotations

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Column, Fragment, Marker, Relation


def relation(name: str = "t", oid: int = 1, columns: tuple[str, ...] = ("id", "v")) -> Relation:
    described = tuple(Column(c, 23 if i == 0 else 25, -1, "", 0 if i == 0 else -1) for i, c in enumerate(columns))
    return Relation(oid, "public", name, described)


T = relation()
OTHER = relation("other", 2)


def at(lsn: int, ordinal: int = 0) -> ChangePosition:
    return ChangePosition(lsn, ordinal)


def change(lsn: int, ordinal: int = 0, table: Relation = T) -> Change:
    return Change(table, "insert", at(lsn, ordinal), {"id": str(ordinal), "v": "x"})


def fragment(
    lsn: int,
    *changes: Change,
    begins: bool = True,
    commits: bool = True,
    last: ChangePosition | None = None,
    markers: tuple[str, ...] = (),
) -> Fragment:
    """A transaction, whole unless said otherwise; `last` defaults to its last change, or the commit."""
    if last is None:
        last = changes[-1].position if changes else at(lsn)
    return Fragment(
        xid=lsn,
        commit_lsn=lsn,
        commit_time_ms=lsn,
        begins=begins,
        commits=commits,
        changes=changes,
        last=last,
        markers=tuple(Marker(m) for m in markers),
    )
