"""Rows that hold one primary key at once inside a transaction, which a DEFERRABLE key allows until the statement ends,
or the transaction does. Pure, but for the question that it hands to its caller.

    UPDATE t SET id = id + 1     1→2   row a leaves key 1, takes key 2
                                 2→3   row b leaves key 2: a tombstone of 2 here would delete row a

    a row leaves a key        `Change.stays`
      nobody took it before     None: a tombstone
      another row holds it      that row: topics have it once more, in the place of the tombstone
      it cannot be told         the row that the database has now, or None

    1→2 above is `over` row b, and 2→3 `replaced`: shapes make an update of key 2 of the first, and nothing of the
    second. That is known of a transaction of WAITING_BYTES at most.

The old tuple names the row that leaves by its whole content, so REPLICA IDENTITY FULL is needed. It does not tell two
rows of equal content apart: whether key 2 of `1→2, 2→3` was free before is then known to the database alone.

R1  A departure makes as many records whatever stays, so a replay assigns the same offsets (lane.py, L1).
R2  An answer may come from the future: a later transaction changed the key already. Its own change follows in the
    stream, hence the last record of the key is right.
R3  Nothing is decoded before a row has left a key of a table that another row of this transaction has taken a key of.
R4  What is remembered of a transaction is bounded. Beyond the bound each departure is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec
from msgspec.structs import replace

from tidemill.base.errors import Invalid, Missing, TidemillError
from tidemill.capture.changes import ORDINAL_STEP, Change, Fragment, Relation, Row
from tidemill.capture.segment import Block, Changes, Part, Rows, parts_of
from tidemill.capture.values import MINUS_ZERO, row_form
from tidemill.capture.walk import DELETE, INSERT
from tidemill.capture.wire.errors import SqlError

REMEMBERED_BYTES = 32 << 20
"""Messages of one transaction whose rows took keys."""
WAITING_BYTES = 4 << 20
"""Fragments of one transaction that wait for its end, so that a row that takes a key knows whether another holds it."""
ROW_BYTES = 200
"""What a row takes beside its message, once it is decoded."""

Key = tuple[str | None, ...]
Ask = Callable[[Relation, Sequence[Row]], Awaitable[list[Row | None]]]
"""ask(relation, rows): the rows that the database has now under the primary keys of these."""
Refuse = Callable[[Relation, Fragment, TidemillError], Awaitable[None]]
"""refuse(relation, fragment, error): PostgreSQL does not answer for this table; its changes are not to be carried."""
_Piece = Change | tuple[Rows, Block, int, int]


class Unsure:
    """In place of what stays: the database is to be asked."""


UNSURE = Unsure()


def key_of(relation: Relation, row: Row) -> Key:
    """−0 and 0 of a float are one key, as in records."""
    return tuple(
        "0" if row[c.name] == MINUS_ZERO and row_form(c) == "float" else row[c.name] for c in relation.key_columns
    )


class _Holder(msgspec.Struct):
    """A row that came to hold a key, with the change that brought it: −1 where that is handed on. `told`: that change
    says which row it came over."""

    row: Row
    ordinal: int
    told: bool = False


class _Held:
    """`holders`: rows known to hold the key, the newest last. `all`: no other row may hold it. `unsure`: one of them
    may have left it. `touched`: one that is not the newest was updated since another took the key."""

    __slots__ = ("all", "holders", "touched", "unsure")

    def __init__(self, *, all_: bool) -> None:
        self.holders: list[_Holder] = []
        self.all = all_
        self.unsure = self.touched = False

    def find(self, row: Row) -> int:
        return next((n for n, holder in enumerate(self.holders) if holder.row == row), -1)


class Stays(msgspec.Struct, frozen=True):
    """`row` holds the key. `came_over`: the ordinal of the change that took the key over the row that leaves; −1 where
    it said so by itself, or is handed on already."""

    row: Row
    came_over: int = -1
    replaced: bool = False


class TableRivals:
    """Of one table, in one transaction."""

    def __init__(self, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._limit = remembered_bytes
        self._bytes = 0
        self._pieces: list[_Piece] | None = []
        """What came since the first row took a key, as long as none has left one (R3)."""
        self.took = False
        self._held: dict[Key, _Held] = {}
        self._lost = False
        self._truncated = False
        self._recent: list[_Held] = []

    def passes(self, piece: _Piece) -> bool:
        """Nothing has left a key that a row may have taken, so the piece is as it came; else `feed` its changes, after
        those of `recall`."""
        if self._pieces is None:
            return False
        took, left, size = _looks(piece)
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

    def recall(self) -> None:
        """Decode what was remembered: from here on each change is fed."""
        pieces, self._pieces = self._pieces or [], None
        self._bytes = 0
        self.took = True
        for piece in pieces:
            for change in changes_of(piece):
                self.feed(change)

    def handed_on(self) -> None:
        for held in self._recent:
            for holder in held.holders:
                holder.ordinal = -1
        self._recent.clear()

    def feed(self, change: Change) -> tuple[Stays | Unsure | None, Row | None]:
        """What stays under the key that the change leaves, and which row is known to hold the key that it takes."""
        relation, old, new = change.relation, change.old, change.new
        if change.op == "truncate":
            self._held.clear()
            self._truncated = True
            return None, None
        left = key_of(relation, old) if old is not None else None
        taken = key_of(relation, new) if new is not None else None
        if left is not None and left == taken:
            assert old is not None and new is not None
            self._stays_put(left, old, new)
            return None, None
        stays = self._leaves(left, cast(Row, old)) if left is not None else None
        if taken is not None and new is not None:
            held = self._entry(taken)
            over = held.holders[-1].row if held.holders and not held.unsure else None
            held.holders.append(_Holder(new, change.position.ordinal, over is not None))
            self._recent.append(held)
            return stays, over
        return stays, None

    def _stays_put(self, key: Key, old: Row, new: Row) -> None:
        held = self._held.get(key)
        if held is None:
            return
        at = held.find(old)
        if at >= 0:
            held.holders[at].row = new
            held.touched |= at < len(held.holders) - 1
        else:
            held.holders.insert(0, _Holder(new, -1))
            held.all = held.touched = True

    def _leaves(self, key: Key, row: Row) -> Stays | Unsure | None:
        held = self._entry(key)
        if self._lost or held.unsure:
            return UNSURE
        at = held.find(row)
        first = at < 0
        if first:
            held.all = True
        elif held.all:
            del held.holders[at]
        else:
            # Either the row that took the key, or one of equal content that had it before.
            held.unsure = True
            return UNSURE
        if not held.holders:
            held.touched = False
            return None
        newest, came_over = held.holders[-1], -1
        if first and not held.holders[0].told:
            came_over = held.holders[0].ordinal
            held.holders[0].told = came_over >= 0
        replaced = newest.told and not held.touched and at < len(held.holders)
        held.touched &= len(held.holders) > 1
        return Stays(newest.row, came_over, replaced)

    def _entry(self, key: Key) -> _Held:
        held = self._held.get(key)
        if held is None:
            held = _Held(all_=self._truncated)
            if not self._lost:
                self._held[key] = held
                self._bytes += ROW_BYTES
                self._lost = self._bytes > self._limit
                if self._lost:
                    self._held.clear()
        return held


class _Found:
    """What is known of one change."""

    __slots__ = ("left", "over")

    def __init__(self) -> None:
        self.left: tuple[Row, bool] | None = None
        self.over: Row | None = None

    def of(self, change: Change) -> Change:
        stays, replaced = self.left if self.left is not None else (None, False)
        return replace(change, stays=stays, replaced=replaced, over=self.over)


class Rivals:
    """Of all tables, in the transaction at hand."""

    def __init__(
        self, ask: Ask, refuse: Refuse, *, remembered_bytes: int = REMEMBERED_BYTES, waiting_bytes: int = WAITING_BYTES
    ) -> None:
        self._ask = ask
        self._refuse = refuse
        self._remembered_bytes = remembered_bytes
        self._waiting_bytes = waiting_bytes
        self._tables: dict[int, TableRivals] = {}
        self._waiting: list[Fragment] = []
        self._asked: dict[int, list[Change]] = {}
        self._found: dict[int, _Found] = {}
        """By ordinal."""

    async def settle(self, fragment: Fragment) -> list[Fragment]:
        """The fragments that may be handed on now, with what stays under the keys that their changes leave. Raises what
        the connection raises."""
        if fragment.begins:
            self._tables.clear()
            self._waiting.clear()
        for part in parts_of(fragment.changes):
            if _may_rival(part):
                for piece in _pieces(part):
                    for change, (stays, over) in self._look(piece):
                        self._note(change, stays)
                        if over is not None:
                            self._found.setdefault(change.position.ordinal, _Found()).over = over
        self._waiting.append(fragment)
        size = sum(each.size_bytes for each in self._waiting)
        if not fragment.commits and size < self._waiting_bytes and any(each.took for each in self._tables.values()):
            return []
        await self._answer(fragment)
        for rivals in self._tables.values():
            rivals.handed_on()
        waiting, found = self._waiting, self._found
        self._waiting, self._found = [], {}
        if fragment.commits:
            self._tables.clear()
        return [_settled(each, found) for each in waiting] if found else waiting

    def _note(self, change: Change, stays: Stays | Unsure | None) -> None:
        if isinstance(stays, Unsure):
            self._asked.setdefault(change.relation.oid, []).append(change)
        elif stays is not None:
            self._found.setdefault(change.position.ordinal, _Found()).left = stays.row, stays.replaced
            if stays.came_over >= 0:
                self._found.setdefault(stays.came_over, _Found()).over = change.old

    async def _answer(self, fragment: Fragment) -> None:
        asked, self._asked = self._asked, {}
        for changes in asked.values():
            relation = changes[-1].relation
            try:
                rows = await self._ask(relation, [cast(Row, change.old) for change in changes])
            except (SqlError, Invalid, Missing) as error:
                await self._refuse(relation, fragment, error)
                continue
            for change, row in zip(changes, rows, strict=True):
                if row is not None and key_of(relation, row) == key_of(relation, cast(Row, change.old)):
                    self._found.setdefault(change.position.ordinal, _Found()).left = row, False

    def _look(self, piece: _Piece) -> list[tuple[Change, tuple[Stays | Unsure | None, Row | None]]]:
        oid = (piece if isinstance(piece, Change) else piece[1]).relation.oid
        rivals = self._tables.get(oid)
        if rivals is None:
            rivals = self._tables[oid] = TableRivals(self._remembered_bytes)
        piece = piece if rivals.took else _from_first_taken(piece)
        if rivals.passes(piece):
            return []
        rivals.recall()
        return [(change, rivals.feed(change)) for change in changes_of(piece)]


def _may_rival(part: Part) -> bool:
    if isinstance(part, Change):
        return part.relation.deferrable
    return any(block.relation.deferrable for block in part.segment.blocks)


def _pieces(part: Part) -> Sequence[_Piece]:
    """Those of tables with such a key."""
    if isinstance(part, Change):
        return [part] if part.relation.deferrable else []
    ranges = part.segment.ranges(part.start, part.end)
    return [(part, block, start, end) for block, start, end in ranges if block.relation.deferrable]


def changes_of(piece: _Piece) -> Sequence[Change]:
    if isinstance(piece, Change):
        return [piece]
    rows, block, start, end = piece
    return [rows.change(place) for place in block.places[start:end]]


def _from_first_taken(piece: _Piece) -> _Piece:
    """What left a key before one was taken is forgotten: one by one, and so by columns."""
    if isinstance(piece, Change):
        return piece
    rows, block, start, end = piece
    (inserts,) = (block.kinds[start:end] == INSERT).nonzero()
    return (rows, block, start + int(inserts[0]), end) if len(inserts) else piece


def _looks(piece: _Piece) -> tuple[bool, bool, int]:
    """(may a row take a key, may one leave one, bytes of the messages). A range has no UPDATE that changes its key."""
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


def _settled(fragment: Fragment, found: dict[int, _Found]) -> Fragment:
    parts = [each for part in parts_of(fragment.changes) for each in _with(part, found)]
    return replace(fragment, changes=Changes(parts))


def _with(part: Part, found: dict[int, _Found]) -> Sequence[Part]:
    """The part with those changes decoded of which something is known."""
    if isinstance(part, Change):
        known = found.get(part.position.ordinal)
        return [part] if known is None else [known.of(part)]
    first, last = (part.shift + ORDINAL_STEP * place for place in (part.start, part.end))
    out: list[Part] = []
    rest = part
    for ordinal in sorted(ordinal for ordinal in found if first <= ordinal < last):
        place = (ordinal - part.shift) // ORDINAL_STEP
        before, rest = rest.cut(place)
        out += [before] if len(before) else []
        out.append(found[ordinal].of(part.change(place)))
        rest = rest.cut(place + 1)[1]
    return [*out, rest] if len(rest) else out
