"""Steps over a table whose newest records are all dead letters leave the same table, however they are cut."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from support.spark.upsert_world import SCHEMA
from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table
from tidemill.spark.ingest.dead_letters import RUN_RECORDS_MIN, DeadLetterRun, StepDeadLetters
from tidemill.spark.merge.commands import Commands, Truncate, command_schema, no_commands


def commands(*orders: int, partition: int = 0) -> Commands:
    rows = [
        {"k": order, "v": order, "_time": 1000 + order, "_order": order, "_partition": partition, "_live": True}
        for order in orders
    ]
    return Commands(pa.Table.from_pylist(rows, schema=command_schema(SCHEMA)))


def letters(*offsets: int, partition: int = 0) -> pa.Table:
    return dead_letter_table([DeadLetter("t", partition, o, o, 1000 + o, "malformed") for o in offsets])


def buried(*pieces: pa.Table) -> StepDeadLetters:
    found = StepDeadLetters()
    for piece in pieces:
        found.add(piece)
    return found


@given(st.lists(st.booleans(), max_size=40), st.data())
def test_steps_of_any_length_count_the_letters_behind_the_newest_good_record(
    good: list[bool], data: st.DataObject
) -> None:
    run, at = DeadLetterRun(), 0
    while at < len(good):
        end = data.draw(st.integers(at + 1, len(good)))
        mine = range(at, end)
        run.add_step(commands(*(n for n in mine if good[n])), letters(*(n for n in mine if not good[n])))
        at = end
    behind = next((n for n, well in enumerate(reversed(good)) if well), len(good))
    assert run.count == behind
    assert bool(run.sentence(empty=False)) == (behind >= RUN_RECORDS_MIN) and bool(run.sentence(empty=True)) == (
        behind > 0
    )


def test_the_deletion_that_a_captured_dead_letter_leaves_is_no_good_record() -> None:
    run = DeadLetterRun()
    for order in range(RUN_RECORDS_MIN):
        run.add_step(commands(order), letters(order))
    assert run.count == RUN_RECORDS_MIN and f"offset={RUN_RECORDS_MIN - 1} reason=[malformed]" in run.sentence(
        empty=False
    )
    run.add_step(commands(3, partition=1), letters(40))
    assert run.count == 1, "another partition's record of the same offset is one"
    run.add_step(Commands(no_commands(SCHEMA).rows, (Truncate(2000, 0, 50),)), letters())
    assert run.count == 0


def test_a_step_that_was_computed_elsewhere_counts_by_its_letters() -> None:
    run = DeadLetterRun()
    run.add_counted_step(12, buried(letters(*range(7)), letters(), letters(*range(7, 12))))
    assert run.count == 12 and "offset=11 " in run.last
    run.add_counted_step(12, buried(letters(*range(12, 23))))
    assert run.count == 0
    run.add_counted_step(0, buried(letters()))
    assert run.sentence(empty=True) == ""


def test_letters_of_a_step_that_are_written_are_not_held() -> None:
    """Once a step over a whole topic that cannot be read kept up to 64 KiB of each record until its end."""
    found, before = StepDeadLetters(), pa.total_allocated_bytes()
    for at in range(0, 2_000, 50):
        found.add(
            dead_letter_table(
                [DeadLetter("t", 0, o, o, 1000 + o, "malformed", b"x" * 2_000) for o in range(at, at + 50)]
            )
        )
    assert found.records == 2_000 and "offset=1999 " in found.last
    assert pa.total_allocated_bytes() - before < 1 << 20
