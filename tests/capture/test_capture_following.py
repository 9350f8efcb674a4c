"""Columns of a paused table that a change did not touch: the memory of tables, and its lifetime."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tidemill.capture.catalog.columns import ColumnAttributes, TableAttributes
from tidemill.capture.tables.unaffected_columns import FollowedTables, find_unaltered_columns
from tidemill.metastore.catalogue import CapturedColumn, CaptureTableRow, TableSnapshot

INT, TEXT = 23, 25
ROWS = (7,)
COPIED = TableSnapshot(1, 1, (), 1, 0, ())


def attributes(*names: str, written: str = "1") -> TableAttributes:
    columns = tuple(
        ColumnAttributes(
            name, number, INT if name == "id" else TEXT, -1, "text", 0 if name == "id" else -1, written=written
        )
        for number, name in enumerate(names, 1)
    )
    return TableAttributes(columns, len(columns), 0, "")


def row(oid: int, found: TableAttributes, **more: Any) -> CaptureTableRow:
    columns = [
        CapturedColumn(c.name, c.type_name, c.key_index, c.type_oid, c.type_mod, c.attnum) for c in found.columns
    ]
    return CaptureTableRow(
        "c", f"public.t{oid}", oid=oid, columns=tuple(columns), publication=ROWS, snapshot=COPIED, **more
    )


def test_of_tables_that_are_gone_nothing_is_remembered() -> None:
    following = FollowedTables()
    whole, less = attributes("id", "a", "x"), attributes("id", "a")
    for oid in range(10, 30):
        following.store_baseline(row(oid, whole), whole)
    following.forget_others({10, 11, 999})
    remembered = [oid for oid in range(10, 30) if following.columns_to_follow(row(oid, whole), less)]
    assert remembered == [10, 11]
    assert following.columns_to_follow(row(10, whole), less) == {"id", "a"}


def test_a_session_forgets_tables_that_have_no_row_and_a_followed_one_of_them_ends() -> None:
    following = FollowedTables()
    before, after = attributes("id", "a", "x"), attributes("id", "a")
    for oid in (10, 11):
        following.store_baseline(row(oid, before), before)
        following.record_pause(row(oid, before), following.columns_to_follow(row(oid, before), after), followed=True)
    assert following.oids == {10, 11}
    paused = replace(row(10, before), state="parked")
    assert following.begin_session([paused], {10: after, 11: after}, {10: ROWS, 11: ROWS}, -1) == {10: {"id", "a"}}
    assert following.oids == {10}
    assert not following.columns_to_follow(row(11, before), after)


def test_an_oid_that_another_table_has_by_now_is_not_followed() -> None:
    following = FollowedTables()
    before, after = attributes("id", "a", "x"), attributes("id", "a")
    following.store_baseline(row(10, before), before)
    following.record_pause(row(10, before), following.columns_to_follow(row(10, before), after), followed=True)
    other = replace(row(10, before), table="public.other", state="parked")
    assert following.begin_session([other], {10: after}, {10: ROWS}, -1) == {}
    assert not following.oids


def test_a_publication_that_lists_columns_or_was_altered_meanwhile_ends_what_is_followed() -> None:
    for rows, confirmed_lsn, goes_on in ((ROWS, -1, True), ((8,), -1, False), ((), -1, False), (ROWS, 5, False)):
        following = FollowedTables()
        before, after = attributes("id", "a", "x"), attributes("id", "a")
        following.store_baseline(row(10, before), before)
        following.record_pause(row(10, before), following.columns_to_follow(row(10, before), after), followed=True)
        paused = replace(row(10, before), state="parked")
        assert bool(following.begin_session([paused], {10: after}, {10: rows}, confirmed_lsn)) is goes_on


def test_a_column_that_was_written_again_is_another_one() -> None:
    before = attributes("id", "a", "x")
    assert find_unaltered_columns(before, before) == {"id", "a", "x"}
    assert find_unaltered_columns(before, attributes("id", "a", "x", written="2")) == frozenset()
    assert find_unaltered_columns(before, None) == frozenset()
    assert find_unaltered_columns(before, replace(before, leaves="other")) == frozenset()
