"""Changes that arrived together, found by columns: the rows of one receive between two descriptions of relations.

    frames ──► one buffer ──► per relation a Block: each row's values ──► Rows, a range of them in a fragment

A place is the number of a frame in its burst. In a range of Rows every place is a change, so the ordinal of place p is
`shift` + ORDINAL_STEP · p. The rows of a block are in the order of the stream, so a range of places is a range of its
rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import ORDINAL_STEP, Change, Relation
from tidemill.capture.decode.columnar_tuples import Bytes, Int64s, OldTuples, TupleWalker, ValueSlices
from tidemill.capture.decode.row_tuples import decode_change

MAX_COLUMNS = 128
"""Maximum number of columns: a step per column costs some ten microseconds, however few the rows, so wider tables would
block the event loop.
"""


class RowBlock:
    """The rows of one relation in a segment. `places`: numbers of their frames. `kinds`: kinds of their messages.
    `old`: old values of the updated rows.

    `encoded` is the topic writer's encoding of them, made once for all the transactions to which they belong.
    """

    __slots__ = ("encoded", "kinds", "old", "places", "relation", "values", "walker")

    def __init__(
        self, relation: Relation, places: Int64s, kinds: Bytes, values: ValueSlices, old: OldTuples, walker: TupleWalker
    ) -> None:
        self.relation = relation
        self.old = old
        self.places: list[int] = places.tolist()
        self.kinds = kinds
        self.values = values
        self.walker = walker
        self.encoded: object | None = None

    def __len__(self) -> int:
        return len(self.places)


class RowSegment:
    """Row changes of a burst. `starts`, `ends`: of the messages of all frames in the walker's body. `places`: frames
    that may be row changes.

    A relation with fewer than `least` rows here, or that `columnar` does not admit, is left to the per-row functions.
    """

    def __init__(
        self,
        walker: TupleWalker,
        starts: Int64s,
        ends: Int64s,
        places: Int64s,
        relations: Mapping[int, Relation],
        columnar: Callable[[int], bool],
        least: int,
    ) -> None:
        self._walker = walker
        self._starts: list[int] = starts.tolist()
        self._ends: list[int] = ends.tolist()
        self.blocks: list[RowBlock] = []
        owners = np.full(len(starts), -1, np.int32)
        ranks = np.zeros(len(starts), np.int32)
        oids = walker.relation_oids(starts[places])
        alike = bool((oids == oids[0]).all())
        for oid in oids[:1].tolist() if alike else np.unique(oids).tolist():
            relation = relations.get(oid)
            mine = places if alike else places[oids == oid]
            if (
                relation is None
                or not 0 < len(relation.columns) <= MAX_COLUMNS
                or len(mine) < least
                or not columnar(oid)
            ):
                continue
            keys = [at for at, column in enumerate(relation.columns) if column.key_index >= 0]
            rows, kinds, whole, old = walker.read_changes(
                starts[mine], ends[mine], len(relation.columns), keys, keys_suffice=relation.old_rows == "key"
            )
            if not whole.all():
                mine, kinds = mine[whole], kinds[whole]
                rows, old = ValueSlices(rows.starts[:, whole], rows.sizes[:, whole]), old.select_whole(whole)
            owners[mine] = len(self.blocks)
            ranks[mine] = np.arange(len(mine))
            self.blocks.append(RowBlock(relation, mine, kinds, rows, old, walker))
        self.whole = owners >= 0
        """Flag by place: True if the row is in a block."""
        self._owners: list[int] = owners.tolist()
        self._ranks: list[int] = ranks.tolist()
        sums = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(ends - starts, out=sums[1:])
        self.sums: list[int] = sums.tolist()
        """Total size of the messages before each place."""

    @property
    def oids(self) -> list[int]:
        return [block.relation.oid for block in self.blocks]

    def message_at(self, place: int) -> bytes:
        return self._walker.body[self._starts[place] : self._ends[place]]

    def relation(self, place: int) -> Relation:
        return self.blocks[self._owners[place]].relation

    def block_ranges(self, start: int, end: int) -> Iterator[tuple[RowBlock, int, int]]:
        """Yield the rows at the places [start, end) as ranges of blocks, each block's rows in the order of
        the stream.
        """
        if end - start > 4 * len(self.blocks):
            for block in self.blocks:
                first = bisect_left(block.places, start)
                last = bisect_left(block.places, end, first)
                if first < last:
                    yield block, first, last
            return
        while start < end:
            owner, first = self._owners[start], self._ranks[start]
            last = first
            while start < end and self._owners[start] == owner:
                start, last = start + 1, last + 1
            yield self.blocks[owner], first, last


class SegmentRows:
    """The changes at the places [start, end) of a segment, as part of a transaction."""

    __slots__ = ("commit_lsn", "end", "segment", "shift", "start")

    def __init__(self, segment: RowSegment, start: int, end: int, commit_lsn: int, shift: int) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        self.commit_lsn = commit_lsn
        self.shift = shift

    def __len__(self) -> int:
        return self.end - self.start

    def split_at(self, place: int) -> tuple[SegmentRows, SegmentRows]:
        """Return the changes before the place, and those from it on."""
        rest = (self.commit_lsn, self.shift)
        return SegmentRows(self.segment, self.start, place, *rest), SegmentRows(self.segment, place, self.end, *rest)

    def position(self, place: int) -> ChangePosition:
        return ChangePosition(self.commit_lsn, self.shift + ORDINAL_STEP * place)

    def decode_change_at(self, place: int) -> Change:
        """Decode a change; not cached."""
        return decode_change(self.segment.relation(place), self.segment.message_at(place), self.position(place))

    def changes_of_relations(self, oids: Collection[int]) -> Iterator[Change]:
        """Yield the changes of these relations in order; only they are decoded."""
        for place in range(self.start, self.end):
            if self.segment.relation(place).oid in oids:
                yield self.decode_change_at(place)


ChangePart = Change | SegmentRows


class LazyChanges(Sequence[Change]):
    """The changes of a fragment, some of which are decoded only on access."""

    __slots__ = ("_count", "parts")

    def __init__(self, parts: Iterable[ChangePart]) -> None:
        self.parts = tuple(parts)
        self._count = sum(len(part) if isinstance(part, SegmentRows) else 1 for part in self.parts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Change]:
        for part in self.parts:
            if isinstance(part, SegmentRows):
                yield from map(part.decode_change_at, range(part.start, part.end))
            else:
                yield part

    @overload
    def __getitem__(self, index: int) -> Change: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Change, ...]: ...
    def __getitem__(self, index: int | slice) -> Change | tuple[Change, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        at = index + self._count if index < 0 else index
        if 0 <= at < self._count:
            for part in self.parts:
                size = len(part) if isinstance(part, SegmentRows) else 1
                if at < size:
                    return part.decode_change_at(part.start + at) if isinstance(part, SegmentRows) else part
                at -= size
        raise IndexError(f"no such change: index={index} changes={self._count}")


def parts_of(changes: Sequence[Change]) -> Iterable[ChangePart]:
    return changes.parts if isinstance(changes, LazyChanges) else changes


def first_position(changes: Sequence[Change]) -> ChangePosition | None:
    """Return the position of the first change, without decoding it."""
    for part in parts_of(changes):
        return part.position(part.start) if isinstance(part, SegmentRows) else part.position
    return None


def count_by_relation(changes: Sequence[Change]) -> Counter[int]:
    """Return the number of changes of each relation, by oid; none is decoded."""
    found: Counter[int] = Counter()
    for part in parts_of(changes):
        if isinstance(part, SegmentRows):
            for block, first, last in part.segment.block_ranges(part.start, part.end):
                found[block.relation.oid] += last - first
        else:
            found[part.relation.oid] += 1
    return found


def changes_of_relations(changes: Sequence[Change], oids: Collection[int]) -> Iterator[Change]:
    """Yield the changes of these relations, in order; no others are decoded."""
    for part in parts_of(changes):
        if isinstance(part, SegmentRows):
            yield from part.changes_of_relations(oids)
        elif part.relation.oid in oids:
            yield part


def group_by_relation(changes: Sequence[Change], oids: Collection[int]) -> dict[int, list[Change]]:
    """Return the changes of each of these relations, in order; no others are decoded."""
    found: dict[int, list[Change]] = {}
    for change in changes_of_relations(changes, oids):
        found.setdefault(change.relation.oid, []).append(change)
    return found
