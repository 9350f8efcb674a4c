"""Change events of Debezium, once their format is read → rows and deleted keys.

    c r u   the row in `after`; also a deletion of the key in `before`, if the update changed it
    d       deletion of the key in `before`, or else of the record's key
    t       every row is deleted
    null    a tombstone: deletion of the record's key

An event that cannot be read is a dead letter. Its key is absent, if the row or the record has it: an old value never
looks current. The next good event of the key restores it.

A value that the connector could not know, because PostgreSQL does not send a large value that an update left unchanged,
keeps its previous value (merge/toast_fill.py).

Deleted keys have the columns of the table's sequence, too: `d` those of the row before, an update of the key those of
the row after, others nulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.shards.api import Column
from tidemill.shards.parts.schema import arrow_type
from tidemill.spark.decode.block_decoder import Block, join_blocks, to_bool_mask
from tidemill.spark.decode.newline_text import Mask, Places
from tidemill.spark.decode.partial_rows import OmittedColumns
from tidemill.spark.decode.row_decoder import values_to_columns
from tidemill.spark.formats.avro.reader import Dead
from tidemill.spark.formats.conversion import SourceType, no_columns
from tidemill.spark.formats.debezium.encodings import ToArrow, find_event_conversion, is_unavailable
from tidemill.topics.batch import RecordColumns

UPSERTS, DELETE, TRUNCATE = frozenset({"c", "r", "u"}), "d", "t"
NO_EVENT = "not a change event of a row: it has no op"
Values = Mapping[str, Sequence[Any]]


class Events(NamedTuple):
    """Events of one schema. `after` and `before`: values by column where the event has that row; `before` only of the
    key and the sequence. `unavailable`: place → columns whose value is not known."""

    places: Places
    ops: Sequence[str]
    after: Values
    has_after: Mask
    before: Values
    has_before: Mask
    unavailable: Mapping[int, tuple[str, ...]] = {}


class EventPlan:
    """Conversions of the rows in events of one schema. `problem`: why they can never be rows."""

    def __init__(
        self, columns: Sequence[Column], key: Sequence[str], sources: Mapping[str, SourceType] | None, schema: str
    ) -> None:
        """Find the conversions. `sources`: types by field; None if records do not carry their schema."""
        self.columns = columns
        self.key_columns = [column for column in columns if column.name in key]
        self.problem = ""
        self._conversions: dict[str, ToArrow] = {}
        for column in columns:
            source = None if sources is None else sources.get(column.name, SourceType("null"))
            found = find_event_conversion(source, column)
            if found is None:
                assert source is not None
                self.problem = (
                    self.problem or f"column={column.name}: {schema} has {source.kind}, which is never {column.type}"
                )
            else:
                self._conversions[column.name] = found

    @property
    def has_key(self) -> bool:
        """True if the rows have a key that can be converted."""
        return bool(self.key_columns) and all(column.name in self._conversions for column in self.key_columns)

    def converts(self, column: Column) -> bool:
        return column.name in self._conversions

    def convert(self, columns: Sequence[Column], values: Values, at: Places, places: Places, dead: Dead) -> Block:
        """Convert the values at these positions; their records are `places`."""
        found = (_values_at(values[column.name], at) for column in columns)
        arrays, kept = values_to_columns(columns, found, places.tolist(), dead, self._to_arrow)
        return Block(np.array(kept, dtype=np.int64), arrays)

    def _to_arrow(self, values: Sequence[Any], column: Column) -> pa.Array:
        return self._conversions[column.name](values)


class EventRows:
    """Rows, keys and truncations of events, group by group."""

    def __init__(
        self, columns: Sequence[Column], key_columns: Sequence[Column], sequence: Sequence[Column] = ()
    ) -> None:
        self.dead: Dead = []
        self.live = [no_columns(columns)]
        self.gone = [no_columns((*key_columns, *sequence))]
        self._sequence = sequence
        self.by_record_key: list[int] = []
        """Places of deletions whose key is that of the record."""
        self.truncated: list[int] = []
        self._unavailable: dict[int, tuple[str, ...]] = {}

    def add(self, events: Events, plan: EventPlan) -> None:
        ops = np.array(events.ops, dtype=object)
        upserts = np.array([op in UPSERTS for op in events.ops], dtype=bool)
        deletes = ops == DELETE
        self.truncated += events.places[ops == TRUNCATE].tolist()
        for at in np.flatnonzero(~upserts & ~deletes & (ops != TRUNCATE)).tolist():
            self.dead.append((int(events.places[at]), f"an event with the unknown op {events.ops[at]!r}"[:200]))
        for place in events.places[upserts & ~events.has_after].tolist():
            self.dead.append((place, "an event of a row without the row: after is null"))
        upserts &= events.has_after
        if plan.problem:
            self.dead += [(place, plan.problem) for place in events.places[upserts].tolist()]
            self._add_keys(self._known_keys(events.after, events, plan, np.flatnonzero(upserts)))
        else:
            self._add_rows(events, plan, np.flatnonzero(upserts))
        self._add_deletions(events, plan, np.flatnonzero(deletes))

    def _add_rows(self, events: Events, plan: EventPlan, at: Places) -> None:
        if not len(at):
            return
        block = plan.convert(plan.columns, events.after, at, events.places[at], self.dead)
        self.live.append(block)
        self._unavailable |= events.unavailable
        if len(block.places) < len(at):
            rejected = at[~np.isin(events.places[at], block.places)]
            self._add_keys(self._known_keys(events.after, events, plan, rejected))
        at = np.flatnonzero(events.has_before & np.isin(events.places, block.places))
        if not len(at):
            return
        before = self._known_keys(events.before, events, plan, at)
        now = np.searchsorted(block.places, before.places)
        changed = np.zeros(len(before.places), dtype=bool)
        for name, keys in before.arrays.items():
            differs = pc.not_equal(keys, block.arrays[name].take(pa.array(now)))
            changed |= to_bool_mask(pc.fill_null(differs, False))
        if changed.any():
            kept = pa.array(changed)
            old = Block(before.places[changed], {n: a.filter(kept) for n, a in before.arrays.items()})
            self._add_keys(old, [block])

    def _add_deletions(self, events: Events, plan: EventPlan, at: Places) -> None:
        known = at[events.has_before[at]]
        found = self._known_keys(events.before, events, plan, known)
        places = events.places[known]
        converted = [c for c in self._sequence if plan.converts(c)]
        self._add_keys(found, [plan.convert([c], events.before, known, places, []) for c in converted])
        self.by_record_key += np.setdiff1d(events.places[at], found.places).tolist()

    def _known_keys(self, rows: Values, events: Events, plan: EventPlan, at: Places) -> Block:
        """Return the keys in `rows`, of those that have the whole key."""
        if not plan.has_key or not len(at):
            return no_columns(plan.key_columns)
        found = plan.convert(plan.key_columns, rows, at, events.places[at], [])
        whole = np.ones(len(found.places), dtype=bool)
        for array in found.arrays.values():
            whole &= to_bool_mask(array.is_valid())
        kept = pa.array(whole)
        return Block(found.places[whole], {name: array.filter(kept) for name, array in found.arrays.items()})

    def _add_keys(self, keys: Block, sequences: Sequence[Block] = ()) -> None:
        """Add deleted keys, with their sequences from the blocks that have these columns."""
        if self._sequence:
            arrays = {c.name: _take_places(c, keys.places, sequences) for c in self._sequence}
            keys = Block(keys.places, keys.arrays | arrays)
        self.gone.append(keys)

    def live_block(self) -> Block:
        arrays, places = join_blocks(self.live)
        return Block(places, arrays)

    def gone_block(self, *by_record_key: Block) -> Block:
        for keys in by_record_key:
            self._add_keys(keys)
        arrays, places = join_blocks(self.gone)
        return Block(places, arrays)

    def rejected(self, columns: RecordColumns) -> Places:
        """Return the places of the events that are dead letters so far."""
        return np.unique(np.array([at for at, _ in self.dead if columns.value_bytes[at] >= 0], dtype=np.int64))

    def partial_rows(self) -> list[OmittedColumns]:
        """Return the rows that lack values, grouped by the columns."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for place, names in sorted(self._unavailable.items()):
            groups.setdefault(names, []).append(place)
        return [
            OmittedColumns(msgspec.json.encode(names), False, np.array(places, dtype=np.int64))
            for names, places in groups.items()
        ]


def unavailable_columns(row: Mapping[str, Any], key: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a row whose value is the placeholder."""
    return tuple(sorted(name for name, value in row.items() if name not in key and is_unavailable(value)))


def _take_places(column: Column, places: Places, blocks: Sequence[Block]) -> pa.Array:
    """Return the column's values of the records at these places; null where no block has it."""
    block = next((block for block in blocks if column.name in block.arrays), None)
    if block is None or not len(block.places):
        return pa.nulls(len(places), arrow_type(column.type))
    at = np.minimum(np.searchsorted(block.places, places), len(block.places) - 1)
    return block.arrays[column.name].take(pa.array(at, mask=block.places[at] != places))


def _values_at(values: Any, at: Places) -> Any:
    if isinstance(values, pa.Array):
        return values.take(pa.array(at))
    return [values[i] for i in at.tolist()]
