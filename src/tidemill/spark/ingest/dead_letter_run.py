"""Run of dead letters: whether the newest records of a table, which is at its target, are all dead letters. Pure."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.shards.api import TIME
from tidemill.shards.parts.arrow_rows import int64s
from tidemill.spark.upsert.commands import ORDER, PARTITION, Commands

RUN_RECORDS_MIN = 10
"""A run of this many dead letters without a good record is no accident; for a table that holds nothing, one
suffices."""
DEAD_RUN_TEXT = "its newest records are all dead letters"
_SHIFT = 20


class StepDeadLetters:
    """Count of the dead letters of one step, which may arrive in any number of pieces; none of the pieces is
    retained."""

    def __init__(self) -> None:
        self.records = 0
        self.last = ""
        """Position and reason of the newest of them."""
        self._newest: tuple[int, int] | None = None

    def add(self, letters: pa.Table) -> None:
        if not letters.num_rows:
            return
        self.records += int((int64s(letters, "last_offset") - int64s(letters, "offset") + 1).sum())
        newest, last = _newest_of(letters)
        if self._newest is None or newest >= self._newest:
            self._newest, self.last = newest, last


class DeadLetterRun:
    """Run of dead letters of a table. `count`: dead letters after the newest good record; `last`: position and reason
    of the newest of them."""

    def __init__(self) -> None:
        self.count = 0
        self.last = ""

    def add_counted_step(self, records: int, buried: StepDeadLetters) -> None:
        """Add a step whose commands were not seen here: if it has fewer letters than records, one of them was good."""
        if buried.records < records:
            self.count = 0
        elif buried.records:
            self.count, self.last = self.count + buried.records, buried.last

    def add_step(self, commands: Commands | None, letters: pa.Table) -> None:
        """Add the result of one step, in order of time; `commands` None: no record of it was good."""
        if not letters.num_rows:
            self.count = 0 if commands else self.count
            return
        good = _newest_good(commands, letters) if commands is not None else None
        if good is not None:
            self.count = 0
        times, lasts = int64s(letters, TIME), int64s(letters, "last_offset")
        behind = np.ones(len(times), dtype=bool)
        if good is not None:
            behind = (times > good[0]) | ((times == good[0]) & (lasts > good[1]))
        self.count += int((lasts - int64s(letters, "offset") + 1)[behind].sum())
        if behind.any():
            _, self.last = _newest_of(letters)

    def sentence(self, empty: bool) -> str:
        """Return the error text, or "" if there is no run. `empty`: the table holds no row."""
        if not self.count or (self.count < RUN_RECORDS_MIN and not empty):
            return ""
        return f"{DEAD_RUN_TEXT}: count={self.count} {self.last}"


def _newest_of(letters: pa.Table) -> tuple[tuple[int, int], str]:
    """Return ((time, last offset) of the newest letter, its position and reason)."""
    times, lasts = int64s(letters, TIME), int64s(letters, "last_offset")
    at = int(np.lexsort((lasts, times))[-1])
    row = letters.slice(at, 1).select(["topic", "partition", "offset", "reason"]).to_pylist()[0]
    place = f"topic={row['topic']} partition={row['partition']} offset={row['offset']}"
    return (int(times[at]), int(lasts[at])), f"{place} reason=[{row['reason'][:200]}]"


def _newest_good(commands: Commands, letters: pa.Table) -> tuple[int, int] | None:
    """Return (time, order) of the newest record that is not a dead letter. A captured row that is one leaves a
    deletion."""
    found = [(truncate.time_ms, truncate.order) for truncate in commands.truncates]
    rows = commands.rows
    if rows.num_rows:
        dead = int64s(letters, "offset") << _SHIFT | int64s(letters, "partition")
        good = ~np.isin(int64s(rows, ORDER) << _SHIFT | int64s(rows, PARTITION), dead)
        times, orders = int64s(rows, TIME)[good], int64s(rows, ORDER)[good]
        if len(times):
            at = int(np.lexsort((orders, times))[-1])
            found.append((int(times[at]), int(orders[at])))
    return max(found, default=None)
