"""Tap and consumer without a database: the items of a shape that each transaction yields."""

from __future__ import annotations

from typing import Any

import pytest

from support.shapes.consumer import CLOCK, COLUMNS, OTHER, Bench, row
from tidemill.base.errors import InvalidError
from tidemill.capture.changes import Column, Relation
from tidemill.capture.postgres.pg_snapshot import PgSnapshot
from tidemill.shapes.definition.definition import Replica
from tidemill.shapes.loop_share import Turn


def test_er1_changes_of_other_relations_do_not_reach_the_shape() -> None:
    bench = Bench()
    bench.commit(5, ("insert", None, row(1), OTHER), ("insert", None, row(2)), size=1)
    assert bench.operations == ["insert 2"]
    assert bench.items[0]["headers"] == {
        "operation": "insert",
        "relation": ["public", "t"],
        "lsn": "1008",
        "txids": [5],
        "op_position": 3,
        "last": True,
    }
    assert bench.items[0]["value"] == {"id": "2", "name": "n", "open": "true"}


def test_st1_nothing_is_visible_before_the_commit() -> None:
    bench = Bench()
    fragments = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.take(fragments[0])
    assert bench.items == []
    bench.take(fragments[1])
    assert bench.operations == ["insert 1", "insert 2"]


def test_only_the_last_item_of_a_transaction_is_marked_last() -> None:
    bench = Bench()
    bench.commit(5, ("insert", None, row(1)), ("insert", None, row(2)), ("insert", None, row(3), OTHER), size=1)
    assert ["last" in item["headers"] for item in bench.items] == [False, True]


def test_h2_a_key_change_is_a_delete_and_an_insert_that_name_each_other() -> None:
    bench = Bench()
    bench.commit(5, ("update", row(1), row(9)))
    gone, come = bench.items
    assert (gone["headers"]["operation"], gone["headers"]["op_position"]) == ("delete", 1)
    assert (come["headers"]["operation"], come["headers"]["op_position"]) == ("insert", 2)
    assert gone["headers"]["key_change_to"] == come["key"] == '"public"."t"/"9"'
    assert come["headers"]["key_change_from"] == gone["key"] == '"public"."t"/"1"'


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (row(1, is_open=False), row(1), ["insert 1"]),
        (row(1), row(1, is_open=False), ["delete 1"]),
        (row(1), row(1, "x"), ["update 1"]),
        (row(1, is_open=False), row(1, "x", False), []),
        (row(1), row(1), []),
        (row(1), row(2, is_open=False), ["delete 1"]),
        (row(1, is_open=False), row(2), ["insert 2"]),
    ],
)
def test_h3_rows_enter_and_leave_the_where_clause(old: Any, new: Any, expected: list[str]) -> None:
    bench = Bench("open")
    bench.commit(5, ("update", old, new))
    assert bench.operations == expected


def test_replica_default_shows_key_and_changed_columns_and_full_shows_everything() -> None:
    slim, full = Bench(), Bench(replica="full")
    for bench in (slim, full):
        bench.commit(5, ("update", row(1), row(1, "x")), ("delete", row(1, "x"), None))
    assert [item["value"] for item in slim.items] == [{"id": "1", "name": "x"}, {"id": "1"}]
    assert full.items[0]["value"] == {"id": "1", "name": "x", "open": "true"}
    assert full.items[0]["old_value"] == {"name": "n"}
    assert full.items[1]["value"] == {"id": "1", "name": "x", "open": "true"}


def test_c8_and_c9_what_arrives_before_the_snapshot_is_known_is_replayed_through_it() -> None:
    bench = Bench(open_now=False)
    bench.commit(10, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.commit(12, ("insert", None, row(3)))
    bench.commit(11, ("update", row(3), row(3, "later")))
    bench.open(PgSnapshot(11, 13, frozenset({12}), lsn=1 << 40))
    assert bench.operations == ["insert 3"]
    bench.commit(13, ("delete", row(1), None))
    assert bench.operations == ["insert 3", "delete 1"]


def test_c8_a_transaction_under_way_when_the_snapshot_comes_is_kept_whole() -> None:
    bench = Bench(open_now=False)
    first, second = bench.fragments(20, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.take(first)
    bench.open(PgSnapshot(20, 20, frozenset(), lsn=1 << 40))
    bench.take(second)
    assert bench.operations == ["insert 1", "insert 2"]


def test_c9_a_transaction_inside_the_snapshot_is_skipped_in_all_its_fragments() -> None:
    bench = Bench(open_now=False)
    first, second, third = bench.fragments(20, *[("insert", None, row(n)) for n in range(3)], size=1)
    bench.take(first)
    bench.open(PgSnapshot(21, 21, frozenset(), lsn=1 << 40))
    bench.take(second)
    bench.take(third)
    assert bench.items == []


def test_c10_a_replayed_transaction_adds_nothing() -> None:
    bench = Bench()
    fragments = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    for fragment in [*fragments, *fragments]:
        bench.take(fragment)
    assert bench.operations == ["insert 1", "insert 2"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_k2_a_delivery_that_broke_off_and_starts_again_is_taken_once(size: int) -> None:
    """The second attempt may be cut into other fragments."""
    bench = Bench()
    changes = [("insert", None, row(n)) for n in range(4)]
    broken = bench.fragments(5, *changes, size=1)[:3]
    for fragment in broken:
        bench.take(fragment)
    for fragment in bench.fragments(5, *changes, size=size, lsn=broken[0].commit_lsn):
        bench.take(fragment)
    assert bench.operations == [f"insert {n}" for n in range(4)]


def test_c12_a_truncate_ends_the_shape_at_its_commit() -> None:
    bench = Bench()
    first, second = bench.fragments(5, ("truncate", None, None), ("insert", None, row(1)), size=1)
    bench.take(first)
    assert not bench.shape.has_ended
    bench.take(second)
    assert bench.shape.end_reason == "the table was truncated"


def test_a_truncate_that_the_snapshot_has_seen_is_skipped() -> None:
    bench = Bench(open_now=False)
    bench.commit(5, ("truncate", None, None))
    bench.open(PgSnapshot(6, 6, frozenset(), lsn=1 << 40))
    assert not bench.shape.has_ended


@pytest.mark.parametrize(
    "changed",
    [
        Relation(7, "public", "t", COLUMNS[:2]),
        Relation(7, "public", "t", (*COLUMNS, Column("more", 25, -1, "text", -1))),
        Relation(7, "public", "t", (COLUMNS[0], Column("name", 1043, -1, "varchar", -1), COLUMNS[2])),
        Relation(7, "public", "renamed", COLUMNS),
    ],
)
def test_a_changed_definition_ends_the_shape(changed: Relation) -> None:
    bench = Bench()
    bench.commit(5, ("insert", None, row(1), changed))
    assert bench.shape.end_reason == "the table's definition changed"


def test_slc12_an_equal_relation_described_again_changes_nothing() -> None:
    bench = Bench()
    bench.commit(5, ("insert", None, row(1), Relation(7, "public", "t", tuple(COLUMNS))))
    assert bench.operations == ["insert 1"]


def test_a_filter_that_fails_on_a_row_ends_the_shape_as_a_bad_request() -> None:
    bench = Bench("10 / id > 1")
    bench.commit(5, ("insert", None, row(0)))
    assert "division by zero" in bench.shape.end_reason
    assert isinstance(bench.shape.error, InvalidError)
    assert bench.sink.router.consumers() == []


def test_er4_a_removed_shape_gets_nothing_more() -> None:
    bench = Bench()
    first, second = bench.fragments(5, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.take(first)
    bench.sink.remove_consumer(bench.consumer)
    bench.shape.drop("gone")
    bench.take(second)
    assert bench.sink.router.consumers() == []
    assert bench.items == []


def test_k3_the_sink_names_the_transactions_it_delivered_the_open_one_included() -> None:
    bench = Bench()
    bench.commit(5, ("insert", None, row(1)))
    bench.take(bench.fragments(6, ("insert", None, row(2)), ("insert", None, row(3)), size=1)[0])
    assert bench.sink.recent == {5, 6}


def test_a_log_that_outgrows_its_limit_ends_the_shape() -> None:
    bench = Bench(log_bytes=2_000)
    for n in range(10):
        bench.commit(5 + n, ("insert", None, row(n)))
    assert "outgrew" in bench.shape.end_reason
    assert bench.shape.log.log_bytes == 0


def test_what_committed_while_the_snapshot_ran_is_settled_in_slices_whatever_comes_in_between() -> None:
    """Each slice moves one item. New transactions, and a delivery that starts again, arrive between slices."""
    bench = Bench(open_now=False)
    for xid in range(10, 14):
        bench.commit(xid, *[("insert", None, row(10 * xid + n)) for n in range(5)])
    broken = bench.fragments(14, ("insert", None, row(1)), ("insert", None, row(2)), size=1)
    bench.take(broken[0])
    bench.consumer.set_snapshot(PgSnapshot(11, 11, frozenset(), lsn=1 << 40))
    nothing = Turn(CLOCK, 0.0)
    assert bench.consumer.publish_waiting(nothing)
    again = bench.fragments(14, ("insert", None, row(1)), ("insert", None, row(2)), size=1, lsn=broken[0].commit_lsn)
    bench.take(again[0])
    slices = 0
    while bench.consumer.publish_waiting(nothing):
        slices += 1
        shown = len(bench.items)
        assert shown % 5 == 0, "whole transactions only"
        if slices == 7:
            bench.commit(15, ("insert", None, row(7)))
    assert slices > 10
    bench.shape.mark_ready()
    expected = [f"insert {10 * xid + n}" for xid in (11, 12, 13) for n in range(5)]
    assert bench.operations[:15] == expected
    assert bench.operations[15:] == ["insert 7"]
    bench.commit(16, ("insert", None, row(8)))
    assert bench.operations[15:] == ["insert 7", "insert 8"]
    assert bench.consumer.pending_bytes == 0
    bench.shape.drop("over")
    bench.sink.remove_consumer(bench.consumer)
    assert bench.shape.log.budget.used_bytes == 0


AS_IS = Relation(7, "public", "t", COLUMNS, old_rows="key")


@pytest.mark.parametrize(("where", "replica"), [("name = 'n'", "default"), ("", "full")])
@pytest.mark.parametrize("old", [None, {"id": "1"}])
@pytest.mark.parametrize("op", ["update", "delete"])
def test_a_shape_that_needs_old_rows_ends_at_the_first_that_is_not_whole(
    where: str, replica: Replica, old: dict[str, str | None] | None, op: str
) -> None:
    if op == "delete" and old is None:
        return  # no such change
    bench = Bench(where, replica)
    bench.commit(5, ("insert", None, row(1), AS_IS), ("update", row(1), row(1, is_open=False), AS_IS))
    assert len(bench.items) == 2 and not bench.shape.has_ended
    bench.commit(6, ("insert", None, row(2), AS_IS), (op, old, row(1) if op == "update" else None, AS_IS))
    assert bench.shape.has_ended


def test_a_verdict_on_a_row_that_the_snapshot_had_seen_is_not_taken_for_the_next_row() -> None:
    bench = Bench("1 / (id - 1) > 0", open_now=False, asks=True)
    bench.commit(5, ("insert", None, row(1)))
    bench.open(PgSnapshot(6, 6, frozenset(), lsn=1 << 40))
    bench.answer(True)
    assert bench.operations == []
    bench.commit(7, ("insert", None, row(1)))
    assert not bench.shape.has_ended, bench.shape.end_reason
    bench.answer(True)
    assert bench.operations == ["insert 1"]


@pytest.mark.parametrize("gap", [1000, (1 << 31) + 10, 3 << 30, (1 << 32) - 10])
def test_a_shape_that_was_quiet_for_billions_of_transactions_has_its_next_change(gap: int) -> None:
    """A shape receives only the changes of its table."""
    for change, what in ((("delete", row(1), None), ["delete 1"]), (("truncate", None, None), [])):
        bench = Bench(open_now=False)
        bench.open(PgSnapshot(1000, 1005, frozenset(), lsn=1005))
        bench.commit((1005 + gap) % (1 << 32), change)
        assert bench.operations == what
        assert bench.shape.state == ("live" if what else "dropped")
