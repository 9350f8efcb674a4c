"""Turns rows into log items: selects the columns, reduces an update to what changed, and writes the headers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tidemill.shapes.definition.definition import Replica
from tidemill.shapes.log.items import KeyWriter, LogItem, Operation, render_item, spell_booleans
from tidemill.shapes.log.log_offset import LogOffset

Row = Mapping[str, str | None]
Headers = dict[str, object]


class RowWriter:
    """Renders the rows of one shape.

    columns      names shown, in table order
    key_columns  names of the primary key, () = every column of the row is part of the key
    booleans     names whose text is `t`/`f`
    marks        further headers of the rows of a snapshot
    """

    def __init__(
        self,
        schema: str,
        table: str,
        columns: Sequence[str],
        key_columns: Sequence[str],
        booleans: Sequence[str] = (),
        replica: Replica = "default",
        marks: Mapping[str, object] | None = None,
    ) -> None:
        self._relation = [schema, table]
        self._columns = tuple(columns)
        self._key_columns = tuple(key_columns)
        self._booleans = tuple(booleans)
        self.full = replica == "full"
        """True if updates and deletes show the whole row, and updates also the old values."""
        self._keys = KeyWriter(schema, table, key_columns)
        self.rendering = (schema, table, self._columns, self._key_columns, tuple(booleans), replica)
        """Everything on which the items of a row depend."""
        self._base_headers: Headers = {"operation": "insert", "relation": self._relation, **(marks or {})}

    @property
    def has_key(self) -> bool:
        return bool(self._key_columns)

    def key(self, row: Row) -> str:
        return self._keys.key(row)

    def shows_any(self, columns: Collection[str]) -> bool:
        """Return whether any of these columns is shown."""
        return not set(columns).isdisjoint(self._columns)

    def _shown_values(self, row: Row, columns: tuple[str, ...]) -> Row:
        whole = tuple(row) == columns
        if whole and not self._booleans:
            return row
        shown = dict(row) if whole else {column: row[column] for column in columns if column in row}
        if self._booleans:
            spell_booleans(shown, self._booleans)
        return shown

    def render_base_row(self, row: Row) -> bytes:
        return render_item(self.key(row), self._shown_values(row, self._columns), self._base_headers)

    def insert_item(self, offset: LogOffset, row: Row, headers: Headers) -> LogItem:
        return self._render_item(offset, "insert", self.key(row), self._shown_values(row, self._columns), headers)

    def delete(self, offset: LogOffset, row: Row, headers: Headers) -> LogItem:
        columns = self._columns if self.full or not self._key_columns else self._key_columns
        return self._render_item(offset, "delete", self.key(row), self._shown_values(row, columns), headers)

    def update_item(self, offset: LogOffset, old: Row | None, new: Row, headers: Headers) -> LogItem | None:
        """Return the item of an update, or None if no shown column has changed.

        Without the old row, or if it lacks a column, the column counts as changed. Columns that `new` lacks are not
        shown: their values are unchanged.
        """
        if old is None:
            return self._render_item(offset, "update", self.key(new), self._shown_values(new, self._columns), headers)
        changed = [column for column in self._columns if column not in old or old[column] != new.get(column)]
        if not changed:
            return None
        if self.full:
            old_value = self._shown_values(old, tuple(changed))
            value = self._shown_values(new, self._columns)
            return self._render_item(offset, "update", self.key(new), value, headers, old_value)
        moved = set(changed)
        value = self._shown_values(new, tuple(c for c in self._columns if c in moved or c in self._key_columns))
        return self._render_item(offset, "update", self.key(new), value, headers)

    def _render_item(
        self,
        offset: LogOffset,
        operation: Operation,
        key: str,
        value: Row,
        headers: Headers,
        old_value: Row | None = None,
    ) -> LogItem:
        full = {"operation": operation, "relation": self._relation, **headers, "op_position": offset.op}
        return LogItem(offset, render_item(key, value, full, old_value))
