"""Shapes that must know what a row was before, over tables that are captured with the REPLICA IDENTITY they have.

A filter tells by the old row whether a row leaves the shape, and replica=full shows it. With FULL the stream says it
whole; with any other identity it does not, and such a shape is refused. What the catalogue says is looked at here, so
that nobody builds a shape that ends at its first change; that change is what decides (table_consumer.py, C4).

Of a partitioned table the stream names an old row after the root's identity and fills it after the partition's: one
that looks whole need not be, so none counts.
"""

from __future__ import annotations

from tidemill.base.errors import UnavailableError
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.planner import FieldError, ShapeRequest
from tidemill.shapes.tables.initial_snapshot import PostgresSource

LOOK_S = 5.0
"""A table is looked at once in this time, however many ask."""


def needs_old_rows(relation: Relation, request: ShapeRequest) -> bool:
    """Whether the shape must know of old rows what the relation's need not say."""
    filtered = bool(request.where) or (request.within is not None and bool(request.within.where))
    return relation.old_rows != "whole" and (filtered or request.replica == "full")


class OldRows:
    """Of one database: which of its tables say whole old rows."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._known: dict[int, tuple[bool, float]] = {}
        """oid → (its identity is FULL, until when that is believed). A table that nobody asks for is not among them."""

    async def check(self, relation: Relation, request: ShapeRequest, now_s: float) -> None:
        """Raises FieldError where the stream does not say what the shape must know; Unavailable."""
        known, until_s = self._known.get(relation.oid, (False, 0.0))
        if now_s >= until_s:
            if until_s:
                self._known[relation.oid] = (known, now_s + LOOK_S)  # one asks, the others go by what was
            self._known = {oid: seen for oid, seen in self._known.items() if now_s < seen[1]}
            try:
                known = await self._source.says_old_rows(relation)
            except UnavailableError:
                if not until_s:
                    raise
            self._known[relation.oid] = (known, now_s + LOOK_S)
        if known:
            return
        field, what = ("where", "a where clause") if request.where else ("replica", "replica=full")
        raise FieldError(
            field,
            f"{what} needs the old row of each change, and the stream does not say it: table={relation.name}.",
            fix=f"Run ALTER TABLE {relation.name} REPLICA IDENTITY FULL; of a partitioned table, capture it with"
            ' identity = "full". Or ask for the whole table.',
        )
