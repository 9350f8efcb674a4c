"""The index over filters: it offers every change that a filter matches, and few others."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support.shapes.consumer import CLOCK, COLUMNS, ENDLESS, TABLE, row
from support.shapes.crowd import Crowd
from tidemill.base.lsn import ChangePosition
from tidemill.capture.changes import Change, Column, Fragment, Op, Relation
from tidemill.capture.decode.batches import BatchBuilder
from tidemill.shapes.log.log_offset import BASE_END
from tidemill.shapes.loop_share import Turn
from tidemill.shapes.tables import filter_index as router_module

FILTERS = [
    "id = {a}", "{a} = id", "id IN ({a}, {b})", "id = ANY('{{{a},{b}}}')", "id = {a} AND open", "open AND id = {a}",
    "id = {a} OR id = {b}", "id = {a} OR name = 'n'", "name = 'n{a}'", "name IN ('n', 'x')", "open = true", "open",
    "id = {a} AND name = 'n{b}'", "id > {a}", "NOT id = {a}", "id <> {a}", "id = {a}.0", "name IS NULL",
    "id IS NOT DISTINCT FROM {a}", "(id = {a} OR id = {b}) AND NOT open", "id = NULL", "id IN ({a}, NULL)",
    "id NOT IN ({a}, {b})", "name = ANY('{{n,NULL}}')", "id + 0 = {a}", "true", "10 / id = {a}",
]  # fmt: skip


def transactions(rand: random.Random, count: int, relation: Relation = TABLE) -> list[Fragment]:
    """Return transactions that insert, change and delete rows, some with odd values; some fragments are cut."""
    out: list[Fragment] = []

    def some_row() -> dict[str, str | None]:
        name = rand.choice(["n", "x", "n1", "n2", None])
        return row(rand.randint(1, 6), name, rand.random() < 0.5)

    for number in range(count):
        lsn = 1000 + 8 * number
        changes = []
        for place in range(rand.randint(0, 5)):
            op: Op = rand.choice(["insert", "update", "delete"])
            new = some_row() if op != "delete" else None
            old = some_row() if op != "insert" else None
            if op == "update" and rand.random() < 0.1:
                old = None
            changes.append(Change(relation, op, ChangePosition(lsn, 2 * place), new, old))
        cut = rand.randint(0, len(changes))
        parts = [changes[:cut], changes[cut:]] if 0 < cut < len(changes) else [changes]
        for index, part in enumerate(parts):
            last = part[-1].position if part else ChangePosition(lsn, 0)
            ends = index == len(parts) - 1
            out.append(Fragment(5 + number, lsn, 0, index == 0, ends, tuple(part), last, (), 100))
    return out


def test_shapes_found_by_the_index_get_what_they_would_get_if_all_were_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rand = random.Random(11)
    for _ in range(30):
        filters = [rand.choice(FILTERS).format(a=rand.randint(1, 6), b=rand.randint(1, 6)) for _ in range(25)]
        stream = transactions(rand, 25)
        if rand.random() < 0.3:
            changed = Relation(7, "public", "t", (*COLUMNS, Column("more", 25, -1, "text", -1)))
            insert = Change(changed, "insert", ChangePosition(9000, 0), {**row(1), "more": None})
            stream.append(Fragment(99, 9000, 0, True, True, (insert,), ChangePosition(9000, 0)))
        indexed = Crowd(filters)
        monkeypatch.setattr(router_module, "INDEXED_VALUES", -1)
        scanned = Crowd(filters)
        monkeypatch.undo()
        for crowd in (indexed, scanned):
            crowd.take(stream)
            crowd.finish()
            assert crowd.sink.held_bytes == 0
        assert indexed.outcome() == scanned.outcome(), filters


def batches_of(rand: random.Random, stream: list[Fragment]) -> list[Fragment]:
    """Return the same transactions in batches, some of which repeat earlier transactions."""
    out: list[Fragment] = []
    builder, joined = BatchBuilder(), list[Fragment]()

    def close() -> None:
        batch = builder.take_fragment()
        if batch is not None:
            out.append(batch)

    for each in stream:
        if each.begins and each.commits:
            repeated = joined[-1:] if not builder.count and rand.random() < 0.3 else []
            for one in (*repeated, each):
                builder.add(one.xid, one.commit_lsn, 0, list(one.changes), len(one.changes), one.size_bytes)
            joined.append(each)
            if rand.random() < 0.2:
                close()
        else:
            close()
            joined.clear()
            out.append(each)
    close()
    return out


def test_batches_make_the_same_logs_as_their_transactions_wherever_slices_end() -> None:
    rand = random.Random(23)
    for _ in range(30):
        filters = ["", "", "open", *(rand.choice(FILTERS).format(a=rand.randint(1, 6), b=2) for _ in range(10))]
        stream = transactions(rand, 25)
        alone, together = Crowd(filters), Crowd(filters)
        alone.take(stream)
        alone.finish()
        together.take(batches_of(rand, stream))
        over = Turn(CLOCK, 0.0)
        while together.sink.run_slice(over if rand.random() < 0.7 else ENDLESS):
            for shape in together.shapes:
                items = shape.log.read(BASE_END).items
                assert not items or b'"last":true' in items[-1], "a part of a transaction is visible"
        assert together.sink.held_bytes == 0
        assert together.outcome() == alone.outcome(), filters
        assert together.sink.recent == alone.sink.recent


def test_a_change_is_offered_only_to_the_shapes_that_its_values_name() -> None:
    crowd = Crowd([f"id = {n}" for n in range(500)] + ["id > 0"])
    crowd.take(transactions(random.Random(3), 1))
    update = Change(TABLE, "update", ChangePosition(9000, 0), row(7), row(8))
    crowd.take([Fragment(99, 9000, 0, True, True, (update,), ChangePosition(9000, 0))])
    crowd.finish()
    touched = [shape.definition.where for shape in crowd.shapes if shape.last_seen == 9000]
    assert touched == ["id = 7", "id = 8", "id > 0"]


def test_removed_shapes_leave_nothing_in_the_index() -> None:
    rand = random.Random(5)
    crowd = Crowd([rand.choice(FILTERS).format(a=1, b=2) for _ in range(60)])
    order = list(crowd.consumers)
    rand.shuffle(order)
    for consumer in order:
        crowd.sink.remove_consumer(consumer)
        crowd.sink.remove_consumer(consumer)
        crowd.take(transactions(rand, 0))
    assert not crowd.sink.router
    assert crowd.sink.router._tables == {}


def test_whole_transactions_are_shown_and_seen_never_goes_back_wherever_slices_end() -> None:
    """Each step of the evaluation has no time at all: it does one piece of work, and readers check in between."""
    rand = random.Random(17)
    for _ in range(20):
        filters = ["id = 3", "id > 0", "", "open AND id IN (1, 2, 3)", "name = 'n'"]
        crowd, whole = Crowd(filters), Crowd(filters)
        stream = transactions(rand, 12)
        whole.take(stream)
        whole.finish()
        ends = [
            {0} | {number + 1 for number, item in enumerate(shape.log._json) if b'"last":true' in item}
            for shape in whole.shapes
        ]
        seen = [0] * len(filters)
        pending = list(stream)
        more = True
        while pending or more:
            if pending and rand.random() < 0.4:
                crowd.sink.process_fragment(pending.pop(0))
            more = crowd.sink.run_slice(Turn(CLOCK, 0.0))
            for number, (shape, consumer) in enumerate(zip(crowd.shapes, crowd.consumers, strict=True)):
                shown = len(shape.log.read(BASE_END).items)
                assert shown in ends[number], "a part of a transaction was visible"
                now = crowd.sink.last_seen_by(consumer)
                assert now >= seen[number]
                seen[number] = now
                hidden = [item for item in whole.shapes[number].log._offsets[shown:] if item.tx <= now]
                assert not hidden, "seen passed a transaction that is not in the log"
        assert crowd.outcome() == whole.outcome()
        assert crowd.sink.held_bytes == 0


async def test_a_fault_of_routing_itself_ends_all_shapes_and_the_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    crowd = Crowd(["id = 1", ""])

    def broken(*_: Any) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(router_module.FilterIndex, "route", broken)
    crowd.take(transactions(random.Random(1), 3))
    with pytest.raises(RuntimeError):
        await crowd.sink.run()
    reason = "the stream of changes was interrupted: RuntimeError: defect"
    assert [shape.end_reason for shape in crowd.shapes] == [reason] * 2
    crowd.take(transactions(random.Random(1), 5))
    assert crowd.sink.held_bytes == 0


def test_where_the_database_went_back_shapes_end_and_later_ones_get_changes_below_what_was_seen() -> None:
    before = Crowd([""])
    before.take(transactions(random.Random(1), 20))
    before.finish()
    assert before.sink.taken == 1000 + 8 * 19
    before.sink.reset_history()
    assert before.shapes[0].has_ended and "earlier state" in str(before.shapes[0].end_reason)
    assert not before.sink.recent, "transaction ids are given once more"
    after = Crowd([""], sink=before.sink)
    at = ChangePosition(1000, 0)
    change = Change(TABLE, "insert", at, row(1, "n", True), None)
    after.take([Fragment(5, 1000, 0, True, True, (change,), at, (), 100)])
    after.finish()
    assert after.sink.taken == 1000
    assert len(after.outcome()[0]) == 1, "a change far below what was seen before"
