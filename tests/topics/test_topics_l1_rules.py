"""Rules of L1's rows: single cases, then random sequences of them against a list of the offsets to cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill.base.errors import InvalidError
from tidemill.metastore.rows import BY_TAG, L1_OBJECTS
from tidemill.metastore.rows.l1 import (
    NO_TIMESTAMP,
    L1ExtentRow,
    L1ObjectRow,
    L1PartitionRow,
    L1TermRow,
)
from tidemill.topics.l1 import row_transitions
from tidemill.topics.l1.format import L1Region
from tidemill.topics.l1.row_transitions import AddRequest, ReadRows, ReplaceRequest, RowWrites

T = "topic"


def region(partition: int, base: int, last: int, *, size: int = 100, max_ms: int = 0, index: int = 10) -> L1Region:
    return L1Region(partition, 0, size, base, last, max_ms, 1, 0, index)


class Table:
    """Rows as a metastore would hold them after the given commits."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Any] = {}

    def write(self, written: RowWrites) -> None:
        for key, value in written:
            if value:
                self.rows[key] = BY_TAG[key[0]].decode(key, value)
            else:
                del self.rows[key]

    def of(self, kind: type[Any]) -> list[Any]:
        return [row for _, row in sorted(self.rows.items()) if type(row) is kind]

    def extents(self, partition: int) -> list[L1ExtentRow]:
        return [row for row in self.of(L1ExtentRow) if row.partition == partition]

    def partition(self, partition: int) -> L1PartitionRow | None:
        return next((row for row in self.of(L1PartitionRow) if row.partition == partition), None)

    def object(self, name: str) -> L1ObjectRow:
        return self.held().objects[name]

    def held(self) -> ReadRows:
        terms = {row.partition: row for row in self.of(L1TermRow)}  # ascending: the newest stays
        partitions = {row.partition: row for row in self.of(L1PartitionRow)}
        return ReadRows(partitions, terms, {row.object_id: row for row in self.of(L1ObjectRow)})

    def register(self, name: str) -> None:
        self.write([L1_OBJECTS.encode(row_transitions.new_object_row(T, name, 1))])

    def add(
        self, name: str, *regions: L1Region, terms: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> dict[int, int]:
        self.register(name)
        return self.add_registered(name, *regions, terms=terms)

    def add_registered(
        self, name: str, *regions: L1Region, terms: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> dict[int, int]:
        if terms is None:
            terms = {each.partition: [(1, each.base_offset)] for each in reversed(regions)}
        added = row_transitions.add_object(self.held(), AddRequest(T, name, 1000, regions, terms), 5)
        self.write(added.rows)
        return added.next

    def start(self, partition: int, start: int, page: int = 100) -> bool:
        row = self.partition(partition)
        assert row is not None
        done = row_transitions.set_start(row, start, self.extents(partition)[:page], self.held().objects, 6)
        self.write(done.rows)
        return done.more


def test_an_object_that_was_not_registered_cannot_be_added() -> None:
    with pytest.raises(InvalidError, match="unregistered"):
        Table().add_registered("o", region(0, 0, 9))


def test_an_object_is_added_once() -> None:
    table = Table()
    assert table.add("o", region(0, 0, 9)) == {0: 10}
    with pytest.raises(InvalidError, match="unregistered"):
        table.add_registered("o", region(0, 10, 19))
    assert row_transitions.was_added(table.object("o"))


def test_an_object_whose_registration_expired_cannot_be_added_and_is_garbage() -> None:
    table = Table()
    table.register("o")
    assert not row_transitions.is_garbage(table.object("o"))
    expired = row_transitions.expire_registration(table.object("o"), 7)
    assert expired is not None and row_transitions.is_garbage(expired) and not row_transitions.was_added(expired)
    table.write([L1_OBJECTS.encode(expired)])
    with pytest.raises(InvalidError, match="expired=True"):
        table.add_registered("o", region(0, 0, 9))
    table.add("p", region(0, 0, 9))
    assert row_transitions.expire_registration(table.object("p"), 7) is None


def test_a_partition_begins_at_its_first_extent_and_goes_on_where_it_ends() -> None:
    table = Table()
    assert table.add("o", region(0, 50, 59, size=7, max_ms=3), region(0, 60, 69, size=8, max_ms=2)) == {0: 70}
    assert table.add("p", region(0, 70, 70, size=9, max_ms=1), region(1, 0, 0), terms={0: [(1, 70)], 1: [(1, 0)]}) == {
        0: 71,
        1: 1,
    }
    assert table.partition(0) == L1PartitionRow(T, 0, 50, 71, 24, 3, 0, 3)
    assert [row.highest_timestamp_ms for row in table.extents(0)] == [3, 3, 3]
    assert (table.object("o").total_bytes, table.object("o").removed_bytes) == (7 + 8 + 20, 0)


@pytest.mark.parametrize("base", [0, 5, 11, 500])
def test_extents_that_do_not_go_on_where_the_partition_ends_are_left_out_and_corrected(base: int) -> None:
    """F15: two leaders reconcile concurrently; the object's other partitions are accepted."""
    table = Table()
    table.add("o", region(0, 0, 9))
    before = table.partition(0)
    assert table.add("p", region(0, base, base + 9), region(1, 0, 4)) == {0: 10, 1: 5}
    assert table.partition(0) == before and len(table.extents(0)) == 1
    assert (table.object("p").total_bytes, table.object("p").removed_bytes) == (220, 110)
    assert table.add("q", region(0, 10, 19)) == {0: 20}


def test_an_object_of_which_every_extent_was_left_out_is_garbage() -> None:
    table = Table()
    table.add("o", region(0, 0, 9))
    assert table.add("p", region(0, 0, 9)) == {0: 10}
    assert row_transitions.is_garbage(table.object("p")) and row_transitions.was_added(table.object("p"))


@pytest.mark.parametrize(
    "regions",
    [
        (),
        (region(0, 9, 8),),
        (region(0, 0, 9), region(0, 11, 19)),
        (region(0, 0, 9), region(0, 9, 19)),
        (region(0, 0, 9), region(1, 0, 9), region(0, 10, 19)),
        (region(0, 0, 9, index=0),),
    ],
    ids=["none", "inverted", "gap", "overlap", "interleaved", "without an index"],
)
def test_a_request_that_contradicts_itself_changes_nothing(regions: tuple[L1Region, ...]) -> None:
    table = Table()
    table.register("o")
    with pytest.raises(InvalidError):
        table.add_registered("o", *regions)
    assert len(table.rows) == 1


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {0: []},
        {0: [(1, 1)]},
        {0: [(1, 0), (1, 5)]},
        {0: [(2, 0), (1, 5)]},
        {0: [(1, 0), (2, 0)]},
        {0: [(1, 0), (2, 10)]},
    ],
    ids=["none", "empty", "late", "twice", "falling", "one offset", "beyond the extents"],
)
def test_terms_must_be_those_of_the_extents(terms: dict[int, list[tuple[int, int]]]) -> None:
    with pytest.raises(InvalidError, match="terms"):
        Table().add("o", region(0, 0, 9), terms=terms)


def test_terms_follow_the_stored_ones_and_an_equal_one_is_not_written_again() -> None:
    table = Table()
    table.add("o", region(0, 0, 9), terms={0: [(3, 0), (5, 4)]})
    with pytest.raises(InvalidError, match="do not follow"):
        table.add("p", region(0, 10, 19), terms={0: [(4, 10)]})
    table.add("q", region(0, 10, 19), terms={0: [(5, 10), (6, 15)]})
    assert [(row.term, row.first_offset) for row in table.of(L1TermRow)] == [(3, 0), (5, 4), (6, 15)]


def test_a_start_drops_what_lies_wholly_below_and_counts_it_as_removed() -> None:
    table = Table()
    table.add("o", region(0, 0, 9), region(0, 10, 19), region(1, 0, 9))
    assert not table.start(0, 15)
    assert [row.base_offset for row in table.extents(0)] == [10]
    assert table.partition(0) == L1PartitionRow(T, 0, 15, 20, 100, 1, 0, 0)
    assert table.object("o").removed_bytes == 110
    assert not table.start(0, 20)
    assert table.extents(0) == [] and table.object("o").removed_bytes == 220
    assert not row_transitions.is_garbage(table.object("o")), "the other partition's extent lives"
    table.start(1, 10)
    assert row_transitions.is_garbage(table.object("o"))


def test_a_start_never_goes_back_and_made_again_changes_nothing() -> None:
    table = Table()
    table.add("o", region(0, 0, 9), region(0, 10, 19))
    table.start(0, 10)
    before = dict(table.rows)
    for start in (0, 9, 10):
        assert not table.start(0, start)
    assert table.rows == before


def test_an_emptied_partition_keeps_its_last_term_and_goes_on_at_the_new_start() -> None:
    table = Table()
    table.add("o", region(0, 0, 9), terms={0: [(3, 0)]})
    table.start(0, 30)
    assert table.partition(0) == L1PartitionRow(T, 0, 30, 30, 0, 0, 0, 0)
    assert [row.term for row in table.of(L1TermRow)] == [3]
    assert table.add("p", region(0, 10, 29)) == {0: 30}
    assert table.add("q", region(0, 30, 31), terms={0: [(3, 30)]}) == {0: 32}


def test_many_extents_go_in_bounded_steps_each_of_which_is_whole() -> None:
    table = Table()
    table.add("o", *[region(0, i, i) for i in range(10)], terms={0: [(1, 0)]})
    assert table.start(0, 8, page=3)
    assert (table.partition(0).start, len(table.extents(0))) == (8, 7)  # type: ignore[union-attr]
    assert table.start(0, 8, page=3)
    assert not table.start(0, 8, page=3) and len(table.extents(0)) == 2
    assert table.object("o").removed_bytes == 880


def test_an_object_that_lost_more_than_it_held_is_left_alone() -> None:
    assert not row_transitions.is_garbage(L1ObjectRow(T, "o", 100, 101, registered=True))


def replaced(table: Table, name: str, *regions: L1Region, epochs: Mapping[int, int] | None = None) -> tuple[int, ...]:
    table.register(name)
    held = table.held()
    standing = {
        p: [
            extent
            for extent in table.extents(p)
            if any(r.partition == p and r.base_offset <= extent.last_offset for r in regions)
            and any(r.partition == p and extent.base_offset <= r.last_offset for r in regions)
        ]
        for p in {r.partition for r in regions}
    }
    if epochs is None:
        epochs = {p: held.partitions[p].compaction_epoch for p in standing}
    done = row_transitions.replace_extents(held, standing, ReplaceRequest(T, name, 1000, regions, epochs), 9)
    table.write(done.rows)
    return done.stale


def test_extents_are_replaced_whole_and_the_epoch_of_their_partition_rises() -> None:
    table = Table()
    table.add("o", *[region(0, 10 * i, 10 * i + 9, max_ms=m) for i, m in enumerate((5, 9, 2, 3))], terms={0: [(1, 0)]})
    assert replaced(table, "p", region(0, 10, 29, size=150, max_ms=9)) == ()
    spans = [(e.base_offset, e.last_offset, e.highest_timestamp_ms, e.object_id) for e in table.extents(0)]
    assert spans == [(0, 9, 5, "o"), (10, 29, 9, "p"), (30, 39, 9, "o")]
    assert table.partition(0) == L1PartitionRow(T, 0, 0, 40, 350, 3, 1, 9)
    assert (table.object("o").removed_bytes, table.object("p").total_bytes) == (220, 160)
    assert replaced(table, "q", region(0, 0, 29), region(0, 30, 39)) == ()
    assert [e.object_id for e in table.extents(0)] == ["q", "q"]
    assert row_transitions.is_garbage(table.object("o")) and row_transitions.is_garbage(table.object("p"))


@pytest.mark.parametrize(("base", "last"), [(0, 18), (1, 19), (5, 9), (0, 25), (30, 39)])
def test_what_does_not_stand_for_whole_extents_replaces_nothing(base: int, last: int) -> None:
    table = Table()
    table.add("o", region(0, 0, 9), region(0, 10, 19))
    before = dict(table.rows)
    with pytest.raises(InvalidError, match="have changed"):
        replaced(table, "p", region(0, base, last))
    del table.rows[L1_OBJECTS.key(T, "p")]
    assert table.rows == before


def test_f19_what_was_made_before_another_replacement_or_a_start_that_moved_is_left_out() -> None:
    table = Table()
    table.add("o", region(0, 0, 9), region(0, 10, 19), region(1, 0, 9), region(1, 10, 19))
    table.start(1, 12)
    with pytest.raises(InvalidError, match="have changed"):
        replaced(table, "p", region(0, 0, 19), epochs={0: 4})
    assert replaced(table, "q", region(0, 0, 19), region(1, 0, 19)) == (1,)
    assert [e.base_offset for e in table.extents(1)] == [10]
    assert (table.object("q").total_bytes, table.object("q").removed_bytes) == (220, 110)


class Rows(RuleBasedStateMachine):
    """Two partitions; adders that begin where the partition ends, or elsewhere; starts that move; replacements."""

    @initialize()
    def begin(self) -> None:
        self.table = Table()
        self.count = 0
        self.next: dict[int, int] = {}
        self.start: dict[int, int] = {}

    @rule(
        pieces=st.lists(st.tuples(st.integers(-2, 3), st.integers(1, 4)), min_size=1, max_size=2),
        cuts=st.integers(1, 3),
        max_ms=st.integers(0, 50),
    )
    def add(self, pieces: list[tuple[int, int]], cuts: int, max_ms: int) -> None:
        regions: list[L1Region] = []
        terms: dict[int, list[tuple[int, int]]] = {}
        for partition, (away, count) in enumerate(pieces):
            base = max(0, self.next.get(partition, 3) + away)
            terms[partition] = [(1, base)]
            regions += [
                region(partition, base + i * count, base + (i + 1) * count - 1, max_ms=max_ms + i) for i in range(cuts)
            ]
        self.count += 1
        nexts = self.table.add(f"o{self.count}", *regions, terms=terms)
        for partition, (_, count) in enumerate(pieces):
            base = terms[partition][0][1]
            if partition not in self.next:
                self.start[partition], self.next[partition] = base, base
            if base == self.next[partition]:
                self.next[partition] = base + cuts * count
            assert nexts[partition] == self.next[partition]

    @rule(partition=st.integers(0, 1), data=st.data())
    def replace(self, partition: int, data: st.DataObject) -> None:
        extents = self.table.extents(partition)
        if extents:
            first = data.draw(st.integers(0, len(extents) - 1))
            run = extents[first : data.draw(st.integers(first + 1, len(extents)))]
            newest = max(extent.max_timestamp_ms for extent in run)
            self.count += 1
            merged = region(partition, run[0].base_offset, run[-1].last_offset, size=7, max_ms=newest)
            assert replaced(self.table, f"o{self.count}", merged) == ()

    @rule(partition=st.integers(0, 1), away=st.integers(-3, 12), page=st.integers(1, 4))
    def move(self, partition: int, away: int, page: int) -> None:
        if partition in self.start:
            start = self.start[partition] + away
            while self.table.start(partition, start, page):
                pass
            self.start[partition] = max(self.start[partition], start)
            self.next[partition] = max(self.next[partition], self.start[partition])

    @invariant()
    def rows_add_up(self) -> None:
        if not hasattr(self, "table"):
            return
        live: dict[str, int] = {}
        for partition, start in self.start.items():
            row, extents = self.table.partition(partition), self.table.extents(partition)
            assert row is not None and (row.start, row.next) == (start, self.next[partition])
            assert (row.extent_count, row.size_bytes) == (len(extents), sum(each.size_bytes for each in extents))
            at = extents[0].base_offset if extents else start
            assert at <= start, "E1: from the start on there is no gap"
            highest = NO_TIMESTAMP
            for each in extents:
                assert each.base_offset == at and each.last_offset >= start
                assert each.highest_timestamp_ms >= max(highest, each.max_timestamp_ms), "found by bisection"
                highest = each.highest_timestamp_ms
                at = each.last_offset + 1
                live[each.object_id] = live.get(each.object_id, 0) + each.weight_bytes
            assert at == row.next or not extents
        for row in self.table.of(L1ObjectRow):
            assert row.total_bytes - row.removed_bytes == live.get(row.object_id, 0), "E2"


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
