"""Reads subsets of a shape over a shard: its rows at the newest final time, filtered, ordered and limited locally.

Times take the place of transactions and LSNs: an item has its time as `txids` and `lsn`, and the metadata of a subset
read at time t state that it shows every transaction below t + 1, at LSN t + 1. So a client drops the changes that its
rows already show, as it does for a table.

Invariant (deterministic order): text is ordered by code points, as in where clauses over shards. Ties are ordered by
the key's text.

Invariant (bounded memory): with a limit, only rows that may still be in the result are held in memory (within a factor
of about two), and their bytes are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cmp_to_key
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.planner import FieldError
from tidemill.shapes.definition.subset import Subset
from tidemill.shapes.log.chunks import ResponseMemory
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.shards.pg_text import table_rows
from tidemill.shapes.where import EvaluationError, Where

if TYPE_CHECKING:
    import pyarrow as pa

RUN_ROWS = 500
MIN_RUN_ROWS = 16
"""Rows sorted in one call. With several keys the number is divided by the number of keys, since rows may be equal in
all but the last key: a call takes milliseconds."""

MERGE_FAN_IN = 32
"""Runs merged in one step."""

ROW_BYTES = 400
"""Memory of a row that waits for its position, apart from its JSON and the values by which it is ordered."""

_Waiting = tuple[Any, bytes, int]
"""A row that waits for its position: its sort key, its JSON and its memory in bytes."""


class SubsetRowReader:
    """Reads the rows of one subset. Raises FieldError if only a database has the requested order."""

    def __init__(self, names: tuple[str, ...], writer: RowWriter, own: Where | None, subset: Subset) -> None:
        self._names = names
        self._writer = writer
        self._wheres = [where for where in (own, subset.where) if where is not None]
        self._subset = subset
        self._order = None
        if subset.order_by is not None:
            if subset.order_by.keys is None:
                raise FieldError("subset__order_by", "a table cannot be ordered by a column of this type.")
            self._order = subset.order_by.keys
        self._run_rows = max(MIN_RUN_ROWS, RUN_ROWS // max(1, len(self._order or ())))
        self._first = subset.offset or 0
        self._most = None if subset.limit is None else self._first + subset.limit

    async def read_rows(self, table: pa.Table, rows: ResponseMemory, share: LoopShare) -> None:
        """Read a table's rows into `rows`.

        Raises InvalidError if a clause fails on a row, or the result is too large; OverBudgetError.
        """
        budget = rows.budget
        held = _HeldBytes(budget)
        steps = self._read_ordered(table, rows, held) if self._order is not None else self._read_unordered(table, rows)

        def step(turn: Turn) -> bool:
            return any(turn.is_over for _ in steps)

        size = table.nbytes
        budget.reserve(size)
        try:
            await share.run_step(step)
        except EvaluationError as error:
            raise InvalidError(str(error)) from error
        finally:
            held.release_all()
            budget.release(size)

    def _matching_rows(self, table: pa.Table) -> Iterator[dict[str, str | None] | None]:
        """Yield the matching rows; None: no row, but a place to pause.

        The subset's clause is evaluated on the shape's own rows only, so that its errors reveal nothing (subset.py). A
        shard without a key may have several copies of a row; it is yielded once.
        """
        seen: set[str] | None = None if self._writer.has_key else set()
        for row in table_rows(table, self._names):
            if not all(where.matches(row) for where in self._wheres):
                yield None
                continue
            if seen is not None:
                key = self._writer.key(row)
                if key in seen:
                    yield None
                    continue
                seen.add(key)
            yield row

    def _read_unordered(self, table: pa.Table, rows: ResponseMemory) -> Iterator[None]:
        """Read without an order, and so without limit and offset."""
        some: list[bytes] = []
        for row in self._matching_rows(table):
            yield
            if row is not None:
                some.append(self._writer.render_base_row(row))
            if len(some) >= RUN_ROWS:
                rows.add(some)
                some = []
        rows.add(some)

    def _read_ordered(self, table: pa.Table, rows: ResponseMemory, held: _HeldBytes) -> Iterator[None]:
        assert self._order is not None
        place = cmp_to_key(self._compare)
        run: list[_Waiting] = []
        runs: list[list[_Waiting]] = []
        waiting = 0
        for row in self._matching_rows(table):
            yield
            if row is None:
                continue
            item = self._writer.render_base_row(row)
            values = [key.evaluate(row) for key in self._order]
            size = len(item) + ROW_BYTES + sum(map(sys.getsizeof, values))
            held.reserve(size)
            run.append((place((values, self._writer.key(row))), item, size))
            if len(run) >= self._run_rows:
                runs.append(self._sort_run(run, held))
                waiting += len(runs[-1])
                run = []
                if self._most is not None and waiting > 2 * self._most + 8 * RUN_ROWS:
                    yield from _reduce_runs(runs)
                    kept: list[_Waiting] = []
                    for number, each in enumerate(merge(*runs, key=_sort_key)):
                        yield
                        if number < self._most:
                            kept.append(each)
                        else:
                            held.release(each[2])
                    runs, waiting = [kept], len(kept)
        runs.append(self._sort_run(run, held))
        yield from _reduce_runs(runs)
        some: list[bytes] = []
        for _, item, _ in islice(merge(*runs, key=_sort_key), self._first, self._most):
            yield
            some.append(item)
            if len(some) >= RUN_ROWS:
                rows.add(some)
                some = []
        rows.add(some)

    def _sort_run(self, run: list[_Waiting], held: _HeldBytes) -> list[_Waiting]:
        run.sort(key=_sort_key)
        if self._most is not None and len(run) > self._most:
            for *_, size in run[self._most :]:
                held.release(size)
            del run[self._most :]
        return run

    def _compare(self, a: tuple[list[Any], str], b: tuple[list[Any], str]) -> int:
        assert self._order is not None
        for key, left, right in zip(self._order, a[0], b[0], strict=True):
            found: int = key.compare(left, right)
            if found:
                return found
        return (a[1] > b[1]) - (a[1] < b[1])


def _reduce_runs(runs: list[list[_Waiting]]) -> Iterator[None]:
    """Merge until at most FAN runs are left: the first step of a merge reads from all of them."""
    while len(runs) > MERGE_FAN_IN:
        joined: list[list[_Waiting]] = []
        for first in range(0, len(runs), MERGE_FAN_IN):
            one: list[_Waiting] = []
            for each in merge(*runs[first : first + MERGE_FAN_IN], key=_sort_key):
                yield
                one.append(each)
            joined.append(one)
        runs[:] = joined


def _sort_key(entry: _Waiting) -> Any:
    return entry[0]


class _HeldBytes:
    """Counts the bytes of rows that wait for their position."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Count bytes. Raises OverBudgetError."""
        self._budget.reserve(size_bytes)
        self._bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self._budget.release(size_bytes)
        self._bytes -= size_bytes

    def release_all(self) -> None:
        self.release(self._bytes)
