"""Records whose rows violate an expectation, among decoded commands.

    stream              the record is skipped, as one that cannot be read is: the key keeps its row
    captured, Debezium  the key becomes absent, as for a value that no column can hold: an old value never looks current
    fail                the table stops before the time of the first such record

Invariant (record alone): whether a record violates an expectation depends on the record alone, except where it leaves
columns unchanged: then on the row before (merge/toast_fill.py). So every reader decides alike, however steps are cut.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.shards.api import TIME
from tidemill.shards.parts.arrow_rows import int64s, to_mask
from tidemill.spark.decode.captured import Stop
from tidemill.spark.decode.dead_letter_rows import DeadLetter, dead_letter_table, no_dead_letters
from tidemill.spark.decode.records import Records
from tidemill.spark.merge.commands import LIVE, ORDER, PARTITION, UNCHANGED, Commands
from tidemill.spark.predicates.expectations import (
    DEAD_LETTER,
    FAIL,
    ExpectationCheck,
    Expectations,
    Violations,
    count_violations,
)

FIX = (
    "Correct the expectation, or set on_violation to dead_letter, and restart the pipeline. Or correct the row of a"
    " captured table at its source, and copy it again: tidemill capture resnapshot."
)
_SHIFT = 20


class Checked(msgspec.Struct, frozen=True):
    """Commands without the violating rows, their dead letters and counts, and the place where the table stops."""

    commands: Commands
    dead: pa.Table
    violations: tuple[Violations, ...] = ()
    stop: Stop | None = None


def check_commands(
    check: ExpectationCheck,
    records: Records,
    commands: Commands,
    key_of: Callable[[int], tuple[str, str]] | None,
    *,
    absent: bool,
) -> Checked:
    """Check the commands that were decoded from `records`, except those that leave columns unchanged.

    `key_of` returns the captured table, and the key as JSON, of the record at a place; None for a stream. `absent`:
    the key of a violating row becomes absent; otherwise it keeps its row.
    """
    rows = commands.rows
    whole = to_mask(rows.column(LIVE))
    if UNCHANGED in rows.column_names:
        whole &= to_mask(rows.column(UNCHANGED).is_null())
    violated = check.violated(rows) & whole
    bad = violated.any(axis=0)
    if not bad.any():
        return Checked(commands, no_dead_letters())
    expectations = check.expectations
    found, rules = rows.filter(pa.array(bad)).select([TIME, ORDER, PARTITION]), violated[:, bad]
    if expectations.on_violation == FAIL:
        return Checked(commands, no_dead_letters(), stop=_first_stop(expectations, records.topic, found, rules))
    if absent:
        live = pa.array(to_mask(rows.column(LIVE)) & ~bad)
        kept = rows.set_column(rows.column_names.index(LIVE), LIVE, live)
    else:
        kept = rows.filter(pa.array(~bad))
    dead = no_dead_letters()
    if expectations.on_violation == DEAD_LETTER:
        dead = _letters(expectations, records, found, rules, key_of)
    counts = count_violations(int64s(found, TIME), rules)
    return Checked(Commands(kept, commands.truncates), dead, counts)


def violation_stop(
    expectations: Expectations, topic: str, place: tuple[int, int, int], violated: npt.NDArray[np.int64]
) -> Stop:
    """Return the stop at (time, partition, offset)."""
    time_ms, partition, offset = place
    said = "; ".join(
        f"expectation={expectations.rules[n].name} expression=[{expectations.rules[n].line}]" for n in violated
    )
    return Stop(
        time_ms,
        partition,
        offset,
        f"a record violates an expectation: {said} topic={topic} partition={partition} offset={offset}.",
        FIX,
    )


def _first_stop(expectations: Expectations, topic: str, found: pa.Table, rules: npt.NDArray[np.bool_]) -> Stop:
    times, orders, partitions = (int64s(found, name) for name in (TIME, ORDER, PARTITION))
    at = int(np.lexsort((orders, partitions, times))[0])
    place = int(times[at]), int(partitions[at]), int(orders[at])
    return violation_stop(expectations, topic, place, np.flatnonzero(rules[:, at]))


def _letters(
    expectations: Expectations,
    records: Records,
    found: pa.Table,
    rules: npt.NDArray[np.bool_],
    key_of: Callable[[int], tuple[str, str]] | None,
) -> pa.Table:
    """Return a letter for each row, with the bytes of its record."""
    times, orders, partitions = (int64s(found, name) for name in (TIME, ORDER, PARTITION))
    wanted = orders << _SHIFT | partitions
    codes = records.offsets << _SHIFT | records.partitions_at(np.arange(len(records))).astype(np.int64)
    places = {int(codes[at]): at for at in np.flatnonzero(np.isin(codes, wanted)).tolist()}
    out = []
    for number, code in enumerate(wanted.tolist()):
        at = places[code]
        table, key = key_of(at) if key_of is not None else ("", "")
        offset = int(orders[number])
        out.append(
            DeadLetter(
                records.topic,
                int(partitions[number]),
                offset,
                offset,
                int(times[number]),
                expectations.reason(np.flatnonzero(rules[:, number]).tolist()),
                records.columns.value(at),
                table,
                key,
            )
        )
    return dead_letter_table(out)
