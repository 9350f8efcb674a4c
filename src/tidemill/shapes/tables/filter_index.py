"""Maps a change to the shapes that it can match: the shapes of one database by relation, and by the values that their
filters require.

- Invariant (registration): a consumer is offered changes from the next `route` after it was added until it is removed.
- Invariant (complete): a consumer is offered, in order, every change whose old or new row can match its filter. A
  filter that requires one column to have one of some values (`Equality`) is found by value; the others see every change
  of their relation.
- Invariant (conservative): in doubt a change is offered: a value that cannot be parsed, an update without its old row,
  a truncate, and the first change after a relation's columns changed, which ends shapes that cannot follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tidemill.base.runtime.tasks import is_fault
from tidemill.capture.changes import Change, Relation
from tidemill.capture.decode.row_blocks import group_by_relation
from tidemill.shapes.tables.table_consumer import TableConsumer
from tidemill.shapes.where import Equality, Value

INDEXED_VALUES = 1_000
"""A filter that lists more values of a column is evaluated for each change instead."""

Consumers = dict[TableConsumer, None]
"""An ordered set."""


class _ColumnIndex:
    """The filters that require this column to have one of some values."""

    def __init__(self, equality: Equality) -> None:
        self._read = equality.read
        self._by_value: dict[Value, Consumers] = {}
        self.members: dict[TableConsumer, frozenset[Value]] = {}

    def add(self, consumer: TableConsumer, values: frozenset[Value]) -> None:
        self.members[consumer] = values
        for value in values:
            self._by_value.setdefault(value, {})[consumer] = None

    def remove(self, consumer: TableConsumer) -> None:
        for value in self.members.pop(consumer, ()):
            found = self._by_value[value]
            del found[consumer]
            if not found:
                del self._by_value[value]

    def find_consumers(self, change: Change) -> Iterable[TableConsumer]:
        if change.stays is not None or change.over is not None:
            return self.members  # a third row is involved
        try:
            if change.new is None or change.old is None:
                if change.op == "update":
                    return self.members
                row = change.new if change.new is not None else change.old
                return self._by_value.get(self._read(row), ()) if row is not None else self.members
            new, old = self._read(change.new), self._read(change.old)
        except BaseException as error:
            if not is_fault(error):
                raise
            return self.members  # each filter fails separately, and ends its own shape
        if new == old:
            return self._by_value.get(new, ())
        return {**self._by_value.get(new, {}), **self._by_value.get(old, {})}


class _TableIndex:
    """The shapes of one relation."""

    def __init__(self, relation: Relation) -> None:
        self._relation = relation
        self._columns: dict[tuple[str, str], _ColumnIndex] = {}
        self.scanned: Consumers = {}
        self.members: Consumers = {}

    def add(self, consumer: TableConsumer) -> None:
        self.members[consumer] = None
        equality = consumer.equality
        if equality is None or len(equality.values) > INDEXED_VALUES:
            self.scanned[consumer] = None
            return
        column = self._columns.setdefault((equality.column, equality.kind), _ColumnIndex(equality))
        column.add(consumer, equality.values)

    def remove(self, consumer: TableConsumer) -> None:
        del self.members[consumer]
        self.scanned.pop(consumer, None)
        for key, column in list(self._columns.items()):
            column.remove(consumer)
            if not column.members:
                del self._columns[key]

    def match_indexed(self, changes: Sequence[Change]) -> dict[TableConsumer, list[Change]]:
        hits: dict[TableConsumer, list[Change]] = {}
        columns = list(self._columns.values())
        for change in changes:
            everyone = change.op == "truncate"
            if change.relation is not self._relation:
                everyone = everyone or change.relation != self._relation
                self._relation = change.relation
            for column in columns:
                for consumer in column.members if everyone else column.find_consumers(change):
                    hits.setdefault(consumer, []).append(change)
        return hits

    @property
    def has_index(self) -> bool:
        return bool(self._columns)


class FilterIndex:
    def __init__(self) -> None:
        self._tables: dict[int, _TableIndex] = {}

    def __bool__(self) -> bool:
        return bool(self._tables)

    def add(self, consumer: TableConsumer) -> None:
        self._tables.setdefault(consumer.oid, _TableIndex(consumer.relation)).add(consumer)

    def remove(self, consumer: TableConsumer) -> None:
        """Remove a consumer. Idempotent."""
        table = self._tables.get(consumer.oid)
        if table is None or consumer not in table.members:
            return
        table.remove(consumer)
        if not table.members:
            del self._tables[consumer.oid]

    def route(self, changes: Sequence[Change]) -> Iterator[tuple[Iterable[TableConsumer], Sequence[Change]]]:
        """Yield groups of consumers, and the changes that each consumer of the group is offered."""
        for oid, found in group_by_relation(changes, self._tables).items():
            table = self._tables[oid]
            if table.scanned:
                yield table.scanned, found
            if table.has_index:
                for consumer, matched in table.match_indexed(found).items():
                    yield (consumer,), matched

    def consumers(self) -> list[TableConsumer]:
        return [consumer for table in self._tables.values() for consumer in table.members]

    @property
    def oids(self) -> list[int]:
        """Oids of the relations that have consumers."""
        return list(self._tables)

    def consumers_of(self, oid: int) -> list[TableConsumer]:
        """Return the consumers of this relation."""
        table = self._tables.get(oid)
        return list(table.members) if table is not None else []
