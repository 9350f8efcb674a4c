"""From a relation to the shapes that follow it. Plain dictionary by oid; indexes over where clauses come later.

R1  A consumer that is added sees changes from the next `route` on, one that is removed sees none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.shapes.consumer import TableConsumer


class Router:
    """Keyed by database and relation oid, since two databases may use one oid."""

    def __init__(self) -> None:
        self._by_relation: dict[tuple[str, int], list[TableConsumer]] = {}

    def add(self, database: str, consumer: TableConsumer) -> None:
        self._by_relation.setdefault((database, consumer.oid), []).append(consumer)

    def remove(self, database: str, consumer: TableConsumer) -> None:
        key = (database, consumer.oid)
        left = [other for other in self._by_relation.get(key, ()) if other is not consumer]
        if left:
            self._by_relation[key] = left
        else:
            self._by_relation.pop(key, None)

    def route(self, database: str, oid: int) -> Sequence[TableConsumer]:
        return self._by_relation.get((database, oid), ())

    def consumers(self, database: str) -> list[TableConsumer]:
        return [c for (name, _), found in self._by_relation.items() if name == database for c in found]
