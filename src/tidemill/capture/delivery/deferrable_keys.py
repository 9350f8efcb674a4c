"""Resolve rows that share a primary key inside a transaction, which a DEFERRABLE key allows until the end of the
statement or the transaction. Pure, except for the query that the caller executes.

    UPDATE t SET id = id + 1     1→2   row a leaves key 1, takes key 2
                                 2→3   row b leaves key 2: a tombstone of 2 here would delete row a

    a row leaves a key             `Change.stays`
      no row took it before          None: a tombstone
      another row has it             that row: topics get it again, in place of the tombstone
      unknown                        the row that the database has now, or None

In the example 1→2 is `over` row b, and 2→3 is `replaced`: shapes turn the first into an update of key 2, and ignore the
second. This is known for transactions of at most WAITING_BYTES.

The old tuple identifies the leaving row by its whole content, so REPLICA IDENTITY FULL is needed. Two rows of equal
content cannot be distinguished: whether key 2 of `1→2, 2→3` was free before is then known only to the database.

Invariant (stable offsets): a departure makes the same number of records regardless of what stays under the key, so a
replay assigns the same offsets (partition_writer.py).

Invariant (answers from the future): the database may answer with the row of a later transaction that changed the key
already. That change follows in the stream, hence the last record of the key is right. If the table is paused before
that change, its topic keeps the later row until the table is copied again.

Invariant (lazy decoding): nothing is decoded before a row has left a key of a table in which another row of this
transaction has taken a key.

Invariant (bounded memory): the state of a transaction is bounded. Beyond the bound each departure is queried.

Invariant (equal rows): of rows with equal content, the one that took the key counts as the one that leaves it, which
makes no difference to the row under the key. Once all rows that took it have left, the key has its earlier row again:
shapes show nothing of these changes, and the answer of the database is for the last record of the key in topics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import InvalidError, MissingError, TidemillError
from tidemill.capture.changes import ORDINAL_STEP, Change, Fragment, Relation, Row
from tidemill.capture.decode.columnar_tuples import DELETE, INSERT
from tidemill.capture.decode.row_blocks import ChangePart, LazyChanges, RowBlock, SegmentRows, parts_of
from tidemill.capture.encode.row_encoder import MINUS_ZERO, row_form
from tidemill.capture.postgres.errors import SqlError

REMEMBERED_BYTES = 32 << 20
"""Maximum size of the messages of one transaction whose rows took keys."""
WAITING_BYTES = 4 << 20
"""Maximum size of the fragments of one transaction that wait for its end, so that it is known whether another row has a
key that a row takes.
"""
ROW_BYTES = 200
"""Size of a decoded row in addition to its message."""

Key = tuple[str | None, ...]
QueryRows = Callable[[Relation, Sequence[Row]], Awaitable[list[Row | None]]]
"""ask(relation, rows): return the rows that the database has now under the primary keys of these rows."""
RefuseRelation = Callable[[Relation, Fragment, TidemillError], Awaitable[None]]
"""refuse(relation, fragment, error): PostgreSQL does not answer for this table, so its changes cannot be carried."""
_RelationPiece = Change | tuple[SegmentRows, RowBlock, int, int]


def key_of(relation: Relation, row: Row) -> Key:
    """Return the primary key of a row. −0 and 0 of a float are one key, as in records."""
    return tuple(
        "0" if row[c.name] == MINUS_ZERO and row_form(c) == "float" else row[c.name] for c in relation.key_columns
    )


class _ChangeFacts:
    """Facts about one change, by its ordinal."""

    __slots__ = ("over", "replaced", "stays")

    def __init__(self) -> None:
        self.stays: Row | None = None
        self.replaced = False
        self.over: Row | None = None

    def apply_to(self, change: Change) -> Change:
        return replace(change, stays=self.stays, replaced=self.replaced, over=self.over)


class _FactsByOrdinal(dict[int, _ChangeFacts]):
    def __missing__(self, ordinal: int) -> _ChangeFacts:
        known = self[ordinal] = _ChangeFacts()
        return known


class _KeyHolder(msgspec.Struct):
    """A row that has a key. The flag: the change that brought it already names the row that it came over."""

    row: Row
    reported: bool = False


class _KeyEvent(msgspec.Struct, frozen=True):
    """A change that took a key (`new`), left it (`left`), or did neither (both)."""

    ordinal: int
    new: Row | None
    left: bool


class _KeyState:
    """State of one key. `holders`: rows known to have the key, the newest last. `all`: no other row may have it.
    `first`: ordinal of the change that took the key, possibly over an unknown row; −1: none, or it is handed on.
    `events`: changes of the key, while `holders` may be incomplete; None: some are handed on. `unsure`: the row under
    the key is no longer known.
    """

    __slots__ = ("all", "events", "first", "holders", "unsure")

    def __init__(self, *, all_: bool) -> None:
        self.holders: list[_KeyHolder] = []
        self.all = all_
        self.first = -1
        self.events: list[_KeyEvent] | None = []
        self.unsure = False

    def index_of(self, row: Row) -> int:
        return next((n for n, holder in enumerate(self.holders) if holder.row == row), -1)

    def record_event(self, ordinal: int, new: Row | None, left: bool) -> None:
        if self.events is not None and not self.all:
            self.events.append(_KeyEvent(ordinal, new, left))


class TableKeyTracker:
    """Keys of one table, in one transaction."""

    def __init__(self, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._limit = remembered_bytes
        self._bytes = 0
        self._pieces: list[_RelationPiece] | None = []
        """Pieces since the first row took a key, as long as no row has left one."""
        self.took = False
        self._held: dict[Key, _KeyState] = {}
        self._lost = False
        self._truncated = False
        self._recent: list[_KeyState] = []

    def can_pass_unchanged(self, piece: _RelationPiece) -> bool:
        """Return whether the piece may pass unchanged, because no row has left a key that a row may have taken.
        Otherwise call `track_change` with its changes, after `decode_remembered`.
        """
        if self._pieces is None:
            return False
        took, left, size = _summarize_keys(piece)
        if left and (self.took or took):
            return False
        self.took |= took
        if self.took and not self._lost:
            self._pieces.append(piece)
            self._bytes += size
            self._lost = self._bytes > self._limit
            if self._lost:
                self._pieces.clear()
        return True

    def decode_remembered(self, found: _FactsByOrdinal) -> None:
        """Decode the stored pieces. From here on each change is fed."""
        pieces, self._pieces = self._pieces or [], None
        self._bytes = 0
        self.took = True
        for piece in pieces:
            for change in changes_of(piece):
                self.track_change(change, found)

    def forget_emitted(self) -> None:
        for held in self._recent:
            held.first, held.events = -1, None if held.holders else held.events
        self._recent.clear()

    def track_change(self, change: Change, found: _FactsByOrdinal) -> bool:
        """Note which row stays under the key that the change leaves, and which row has the key that it takes. Returns
        True if the database must be queried for the row that stays.
        """
        relation, old, new = change.relation, change.old, change.new
        ordinal = change.position.ordinal
        if change.op == "truncate":
            self._held.clear()
            self._truncated = True
            return False
        left = key_of(relation, old) if old is not None else None
        taken = key_of(relation, new) if new is not None else None
        if left is not None and left == taken:
            self._track_unchanged_key(left, change, found)
            return False
        asks = self._track_left_key(left, cast(Row, old), ordinal, found) if left is not None else False
        if taken is not None and new is not None:
            self._track_taken_key(taken, new, ordinal, found)
        return asks

    def _track_taken_key(self, key: Key, row: Row, ordinal: int, found: _FactsByOrdinal) -> None:
        held = self._key_state(key)
        over = held.holders[-1].row if held.holders and not held.unsure else None
        if over is not None:
            found[ordinal].over = over
        elif not held.all:
            held.first = ordinal
        held.holders.append(_KeyHolder(row, over is not None))
        held.record_event(ordinal, row, False)
        self._recent.append(held)

    def _track_unchanged_key(self, key: Key, change: Change, found: _FactsByOrdinal) -> None:
        held = self._held.get(key)
        if held is None:
            return
        old, new, ordinal = cast(Row, change.old), cast(Row, change.new), change.position.ordinal
        at = held.index_of(old)
        if at < 0:
            self._record_first_holder(held, old, found)
            held.holders.insert(0, _KeyHolder(new))
            at = 0
        held.holders[at].row = new
        held.record_event(ordinal, new, True)
        self._recent.append(held)
        if at < len(held.holders) - 1 and not held.unsure:
            found[ordinal].replaced, found[ordinal].over = True, new

    @staticmethod
    def _record_first_holder(held: _KeyState, row: Row, found: _FactsByOrdinal) -> None:
        """Note that this row had the key before any other took it."""
        held.all, held.events = True, None
        if held.first >= 0:
            found[held.first].over = row
            held.holders[0].reported = True
            held.first = -1

    def _track_left_key(self, key: Key, row: Row, ordinal: int, found: _FactsByOrdinal) -> bool:
        held = self._key_state(key)
        if self._lost or held.unsure:
            return True
        at = held.index_of(row)
        if at < 0:
            newest = at
            self._record_first_holder(held, row, found)
        else:
            newest = len(held.holders) - 1
            del held.holders[at]
        held.record_event(ordinal, None, True)
        self._recent.append(held)
        if held.holders:
            found[ordinal].stays = held.holders[-1].row
            found[ordinal].replaced = at != newest or (at < 0 and held.holders[-1].reported)
            return False
        if held.all:
            return False
        if held.events is None:
            held.unsure = True
            return True
        for event in held.events:
            known = found[event.ordinal]
            known.over = event.new if event.new is not None else known.over
            known.replaced |= event.left
        held.events, held.first = [], -1
        return True

    def _key_state(self, key: Key) -> _KeyState:
        held = self._held.get(key)
        if held is None:
            held = _KeyState(all_=self._truncated)
            if not self._lost:
                self._held[key] = held
                self._bytes += ROW_BYTES
                self._lost = self._bytes > self._limit
                if self._lost:
                    self._held.clear()
        return held


class DeferrableKeys:
    """Keys of all tables, in the current transaction."""

    def __init__(
        self,
        ask: QueryRows,
        refuse: RefuseRelation,
        *,
        remembered_bytes: int = REMEMBERED_BYTES,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._ask = ask
        self._refuse = refuse
        self._remembered_bytes = remembered_bytes
        self._waiting_bytes = waiting_bytes
        self._tables: dict[int, TableKeyTracker] = {}
        self._waiting: list[Fragment] = []
        self._asked: dict[int, list[Change]] = {}
        self._found = _FactsByOrdinal()

    async def resolve_fragment(self, fragment: Fragment) -> list[Fragment]:
        """Return the fragments that may be handed on now, with the rows that stay under the keys that their changes
        leave. Raises the errors of the connection.
        """
        if fragment.begins:
            self._tables.clear()
            self._waiting.clear()
        for part in parts_of(fragment.changes):
            if _has_deferrable_key(part):
                for piece in _deferrable_pieces(part):
                    for change in self._find_unresolved_changes(piece):
                        self._asked.setdefault(change.relation.oid, []).append(change)
        self._waiting.append(fragment)
        size = sum(each.size_bytes for each in self._waiting)
        if not fragment.commits and size < self._waiting_bytes and any(each.took for each in self._tables.values()):
            return []
        await self._query_remaining_rows(fragment)
        for rivals in self._tables.values():
            rivals.forget_emitted()
        waiting, found = self._waiting, self._found
        self._waiting, self._found = [], _FactsByOrdinal()
        if fragment.commits:
            self._tables.clear()
        return [_apply_facts(each, found) for each in waiting] if found else waiting

    async def _query_remaining_rows(self, fragment: Fragment) -> None:
        asked, self._asked = self._asked, {}
        for changes in asked.values():
            relation = changes[-1].relation
            try:
                rows = await self._ask(relation, [cast(Row, change.old) for change in changes])
            except (SqlError, InvalidError, MissingError) as error:
                await self._refuse(relation, fragment, error)
                continue
            for change, row in zip(changes, rows, strict=True):
                if row is not None and key_of(relation, row) == key_of(relation, cast(Row, change.old)):
                    self._found[change.position.ordinal].stays = row

    def _find_unresolved_changes(self, piece: _RelationPiece) -> list[Change]:
        """Return the changes of the piece for which the database must be queried."""
        oid = (piece if isinstance(piece, Change) else piece[1]).relation.oid
        rivals = self._tables.get(oid)
        if rivals is None:
            rivals = self._tables[oid] = TableKeyTracker(self._remembered_bytes)
        piece = piece if rivals.took else _skip_before_first_insert(piece)
        if rivals.can_pass_unchanged(piece):
            return []
        rivals.decode_remembered(self._found)
        return [change for change in changes_of(piece) if rivals.track_change(change, self._found)]


def _has_deferrable_key(part: ChangePart) -> bool:
    if isinstance(part, Change):
        return part.relation.deferrable
    return any(block.relation.deferrable for block in part.segment.blocks)


def _deferrable_pieces(part: ChangePart) -> Sequence[_RelationPiece]:
    """Return the pieces that belong to tables with a deferrable key."""
    if isinstance(part, Change):
        return [part] if part.relation.deferrable else []
    ranges = part.segment.block_ranges(part.start, part.end)
    return [(part, block, start, end) for block, start, end in ranges if block.relation.deferrable]


def changes_of(piece: _RelationPiece) -> Sequence[Change]:
    if isinstance(piece, Change):
        return [piece]
    rows, block, start, end = piece
    return [rows.decode_change_at(place) for place in block.places[start:end]]


def _skip_before_first_insert(piece: _RelationPiece) -> _RelationPiece:
    """Remove the changes before the first insert: keys that were left before one was taken do not matter, by rows or
    by columns.
    """
    if isinstance(piece, Change):
        return piece
    rows, block, start, end = piece
    (inserts,) = (block.kinds[start:end] == INSERT).nonzero()
    return (rows, block, start + int(inserts[0]), end) if len(inserts) else piece


def _summarize_keys(piece: _RelationPiece) -> tuple[bool, bool, int]:
    """Return (may a row take a key, may one leave one, bytes of the messages). A range has no UPDATE that changes its
    key.
    """
    if isinstance(piece, Change):
        old, new = piece.old, piece.new
        if piece.op == "truncate":
            return False, False, 0
        moved = old is not None and new is not None and key_of(piece.relation, old) != key_of(piece.relation, new)
        size = ROW_BYTES + sum(len(value or "") for value in (new or {}).values())
        return piece.op == "insert" or moved, piece.op == "delete" or moved, size
    rows, block, start, end = piece
    kinds, sums = block.kinds[start:end], rows.segment.sums
    size = sums[block.places[end - 1] + 1] - sums[block.places[start]]
    return bool((kinds == INSERT).any()), bool((kinds == DELETE).any()), size


def _apply_facts(fragment: Fragment, found: _FactsByOrdinal) -> Fragment:
    parts = [each for part in parts_of(fragment.changes) for each in _apply_facts_to_part(part, found)]
    return replace(fragment, changes=LazyChanges(parts))


def _apply_facts_to_part(part: ChangePart, found: _FactsByOrdinal) -> Sequence[ChangePart]:
    """Return the part with the changes decoded for which facts are known."""
    if isinstance(part, Change):
        known = found.get(part.position.ordinal)
        return [part] if known is None else [known.apply_to(part)]
    first, last = (part.shift + ORDINAL_STEP * place for place in (part.start, part.end))
    out: list[ChangePart] = []
    rest = part
    for ordinal in sorted(ordinal for ordinal in found if first <= ordinal < last):
        place = (ordinal - part.shift) // ORDINAL_STEP
        before, rest = rest.split_at(place)
        out += [before] if len(before) else []
        out.append(found[ordinal].apply_to(part.decode_change_at(place)))
        rest = rest.split_at(place + 1)[1]
    return [*out, rest] if len(rest) else out
