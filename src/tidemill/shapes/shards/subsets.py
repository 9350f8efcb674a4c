"""Reading subsets of a shape over a shard: its rows at the newest final time, filtered, ordered and cut here.

Times stand for transactions and LSNs: an item names its time as `txids` and `lsn`, and a subset read at time t says
that it shows every transaction below t + 1, at LSN t + 1. So a client drops the changes that its rows already show, as
it does for a table: until the first one that is not below.

O1  Text is ordered by code points, as where clauses over shards do. Ties are ordered by the key's text.
O2  With a limit only as many rows are held as may still be in the answer, and what is held is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cmp_to_key
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.planner import FieldError
from tidemill.shapes.definition.subset import Subset
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare, Turn
from tidemill.shapes.memory_budget import Budget
from tidemill.shapes.response_memory import ResponseMemory
from tidemill.shapes.shards.rows import row_slices
from tidemill.shapes.where import EvaluationError, Where

if TYPE_CHECKING:
    import pyarrow as pa

RUN_ROWS = 500
LEAST_RUN_ROWS = 16
"""Sorted at once by one key; by several, which rows may be equal in but for the last, so many fewer: milliseconds."""

FAN = 32
"""Runs merged at once."""

ROW_BYTES = 400
"""What a row that waits for its place takes beside its JSON."""


class SubsetRows:
    """`work` reads one table's rows into `rows`. Raises FieldError when the order is one that only a database has."""

    def __init__(self, names: tuple[str, ...], writer: RowWriter, own: Where | None, subset: Subset) -> None:
        self._names = names
        self._writer = writer
        self._wheres = [where for where in (own, subset.where) if where is not None]
        self._subset = subset
        self._order = None
        if subset.order_by is not None:
            if subset.order_by.keys is None:
                raise FieldError("subset__order_by", "a shard is not ordered by a column of this type.")
            self._order = subset.order_by.keys
        self._run_rows = max(LEAST_RUN_ROWS, RUN_ROWS // max(1, len(self._order or ())))
        self._first = subset.offset or 0
        self._most = None if subset.limit is None else self._first + subset.limit

    async def work(self, table: pa.Table, rows: ResponseMemory, share: LoopShare) -> None:
        """Raises InvalidError where a clause fails on a row, or the rows are too many; Full."""
        budget = rows.budget
        held = _Held(budget)
        steps = self._ordered(table, rows, held) if self._order is not None else self._plain(table, rows)

        def step(turn: Turn) -> bool:
            return any(turn.over for _ in steps)

        size = table.nbytes
        budget.take(size)
        try:
            await share.work(step)
        except EvaluationError as error:
            raise InvalidError(str(error)) from error
        finally:
            held.give_all()
            budget.give(size)

    def _matching(self, table: pa.Table) -> Iterator[dict[str, str | None] | None]:
        """None: go on. The subset's clause is asked of the shape's own rows only (subset.py, S3). A shard without a
        key may hold a row more than once: it is shown once."""
        seen: set[str] | None = None if self._writer.keyed else set()
        for row in row_slices(table, self._names):
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

    def _plain(self, table: pa.Table, rows: ResponseMemory) -> Iterator[None]:
        """Without an order there is neither limit nor offset."""
        some: list[bytes] = []
        for row in self._matching(table):
            yield
            if row is not None:
                some.append(self._writer.base_row(row))
            if len(some) >= RUN_ROWS:
                rows.add(some)
                some = []
        rows.add(some)

    def _ordered(self, table: pa.Table, rows: ResponseMemory, held: _Held) -> Iterator[None]:
        assert self._order is not None
        place = cmp_to_key(self._before)
        run: list[tuple[Any, bytes]] = []
        runs: list[list[tuple[Any, bytes]]] = []
        waiting = 0
        for row in self._matching(table):
            yield
            if row is None:
                continue
            item = self._writer.base_row(row)
            held.take(len(item) + ROW_BYTES)
            run.append((place(([key.evaluate(row) for key in self._order], self._writer.key(row))), item))
            if len(run) >= self._run_rows:
                runs.append(self._sorted(run, held))
                waiting += len(runs[-1])
                run = []
                if self._most is not None and waiting > 2 * self._most + 8 * RUN_ROWS:
                    yield from _fewer(runs)
                    kept: list[tuple[Any, bytes]] = []
                    for number, each in enumerate(merge(*runs, key=_place)):
                        yield
                        if number < self._most:
                            kept.append(each)
                        else:
                            held.give(len(each[1]) + ROW_BYTES)
                    runs, waiting = [kept], len(kept)
        runs.append(self._sorted(run, held))
        yield from _fewer(runs)
        some: list[bytes] = []
        for _, item in islice(merge(*runs, key=_place), self._first, self._most):
            yield
            some.append(item)
            if len(some) >= RUN_ROWS:
                rows.add(some)
                some = []
        rows.add(some)

    def _sorted(self, run: list[tuple[Any, bytes]], held: _Held) -> list[tuple[Any, bytes]]:
        run.sort(key=_place)
        if self._most is not None and len(run) > self._most:
            for _, item in run[self._most :]:
                held.give(len(item) + ROW_BYTES)
            del run[self._most :]
        return run

    def _before(self, a: tuple[list[Any], str], b: tuple[list[Any], str]) -> int:
        assert self._order is not None
        for key, left, right in zip(self._order, a[0], b[0], strict=True):
            found: int = key.compare(left, right)
            if found:
                return found
        return (a[1] > b[1]) - (a[1] < b[1])


def _fewer(runs: list[list[tuple[Any, bytes]]]) -> Iterator[None]:
    """Merge until there are at most FAN: the first step of a merge looks at them all."""
    while len(runs) > FAN:
        joined: list[list[tuple[Any, bytes]]] = []
        for first in range(0, len(runs), FAN):
            one: list[tuple[Any, bytes]] = []
            for each in merge(*runs[first : first + FAN], key=_place):
                yield
                one.append(each)
            joined.append(one)
        runs[:] = joined


def _place(entry: tuple[Any, bytes]) -> Any:
    return entry[0]


class _Held:
    """Bytes of rows that wait for their place."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = 0

    def take(self, size_bytes: int) -> None:
        """Raises Full."""
        self._budget.take(size_bytes)
        self._bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        self._budget.give(size_bytes)
        self._bytes -= size_bytes

    def give_all(self) -> None:
        self.give(self._bytes)
