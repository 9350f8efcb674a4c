"""Checks whether a shape that needs old rows can be served over a table that is captured with its own REPLICA IDENTITY.

A filter needs the old row to decide whether a row leaves the shape, and replica=full shows it. With FULL the stream
carries the whole old row; with any other identity it does not, and such a shape is rejected. The catalog is checked
here, so that no shape is built that would end at its first change; the change itself decides (table_consumer.py).

For a partitioned table the stream announces old rows by the root's identity, but fills them by the partition's. A row
that looks whole need not be, so partitioned tables never count as FULL.
"""

from __future__ import annotations

from tidemill.base.errors import UnavailableError
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.planner import FieldError, ShapeRequest
from tidemill.shapes.tables.initial_snapshot import PostgresSource

IDENTITY_INTERVAL_S = 5.0
"""Interval at which a table's identity is read again, however many requests need it."""


def needs_old_rows(relation: Relation, request: ShapeRequest) -> bool:
    """Return whether the shape needs old rows that the stream of the relation need not carry."""
    filtered = bool(request.where) or (request.within is not None and bool(request.within.where))
    return relation.old_rows != "whole" and (filtered or request.replica == "full")


class OldRowCache:
    """Cache of which tables of one database have whole old rows in the stream."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._known: dict[int, tuple[bool, float]] = {}
        """oid → (its identity is FULL, time until which that is valid). Tables without recent requests are removed."""

    async def check_old_rows(self, relation: Relation, request: ShapeRequest, now_s: float) -> None:
        """Raise FieldError if the stream does not carry what the shape needs, UnavailableError if that is unknown."""
        known, until_s = self._known.get(relation.oid, (False, 0.0))
        if now_s >= until_s:
            if until_s:
                self._known[relation.oid] = (
                    known,
                    now_s + IDENTITY_INTERVAL_S,
                )  # one request queries, the others use the old value
            self._known = {oid: seen for oid, seen in self._known.items() if now_s < seen[1]}
            try:
                known = await self._source.has_old_rows(relation)
            except UnavailableError:
                if not until_s:
                    raise
            self._known[relation.oid] = (known, now_s + IDENTITY_INTERVAL_S)
        if known:
            return
        field, what = ("where", "a where clause") if request.where else ("replica", "replica=full")
        raise FieldError(
            field,
            f"{what} needs the old row of each change, which the stream does not carry: table={relation.name}.",
            fix=f"Run ALTER TABLE {relation.name} REPLICA IDENTITY FULL; capture a partitioned table with"
            ' identity = "full". Or request the whole table.',
        )
