"""Derived tables: the result of a user's PySpark function over shards at one common time, stored in a shard.

    t = min(uppers of the inputs) - 1 → the function on the contents at t → difference to the output → append

A thread computes it at intervals, so no streaming query waits for it. If no input changed, the function is not called,
but the output's upper still advances. The interval counts from the last round that advanced it: after a longer pause
the next time of the inputs is computed immediately.
Invariant (exact at computed times): at the times for which it was computed, the output is exactly the function of its
inputs; between them it does not change.

whole     the function gets all rows of every input. Spark reads them, at exactly that time, while the input is held;
          the driver stores none of them.
by group  the table names the columns that group it: the result rows of a group depend only on the inputs' rows of
          that group. The function gets the rows of the groups that changed, the difference is computed within them,
          and a result row of any other group is rejected. The first round of a process is whole, because the function
          may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import structlog

from tidemill.base.errors import InvalidError, MissingError
from tidemill.base.runtime.blocking_portal import BlockingPortal
from tidemill.shards.api import HistoryLostError, SchemaEvolvedError, ShardSchema
from tidemill.shards.handle import LogShard
from tidemill.shards.nested.type_names import is_nested
from tidemill.shards.parts.row_hash import U64
from tidemill.shards.parts.schema import check_schema, update_schema
from tidemill.spark.definition import DerivedTable
from tidemill.spark.derived.function_call import FunctionCall, FunctionFailedError
from tidemill.spark.derived.function_result import OmittedResult, OmittedRows, commands_for, stored_rows
from tidemill.spark.derived.group_mirror import NO_GROUPS, groups_of
from tidemill.spark.derived.idle_advance import LAG_MS, advance_idle
from tidemill.spark.derived.inputs import DerivedInput, GroupedInput
from tidemill.spark.ingest.table_writer import TableWriter
from tidemill.spark.merge.commands import Commands
from tidemill.spark.merge.mirror import Mirror
from tidemill.spark.merge.resolve import resolve
from tidemill.spark.stores import Stores
from tidemill.spark.types import columns_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_HASH_COMPATIBLE_TYPES = ({"int16", "int32", "int64"}, {"float32", "float64"}, {"string", "json"})
"""Types of columns of an input and the result that may identify one group. Spark has no JSON type and returns a
string."""
BUSY_SHARE_MAX = 0.5
"""Maximum share of one thread's time for recomputing: a slow function extends its interval."""
PAUSE_MIN_S = 0.05
STOP_CHECK_S = 1.0
"""Interval at which a table without demand checks whether its pipeline ends."""

log = structlog.get_logger()


class Derivation:
    """Derivation of one table. `run` is the body of its thread; `recompute` is one recomputation, callable from
    tests."""

    def __init__(
        self, portal: BlockingPortal, stores: Stores, spark: SparkSession, table: DerivedTable, mirror_dir: Path
    ) -> None:
        self.table = table
        self.target = 0
        self.error = ""
        self.waits_for = ""
        self.waits = False
        """True while it waits for the input in `waits_for`, which will reach a time that the others can be read at."""
        self._left_out = OmittedRows(table.name, table.by_output if table.by else ())
        self.rounds = 0
        """Rounds that have ended, failed ones included."""
        self.recomputed = 0
        self.took_s = 0.0
        """Duration of the last round that recomputed."""
        self.groups: int | None = None
        """Number of groups that the round computed; None = all."""
        self.whole_because = ""
        """Reason why the round computed all groups."""
        self.function = FunctionCall(portal, stores, spark, table)
        self.writer: TableWriter | None = None
        self._portal = portal
        self._stores = stores
        self._mirror_dir = mirror_dir
        self._inputs: list[DerivedInput] = []
        self._output: GroupedInput | None = None
        """The table's own contents by group."""
        self._opened = True
        """True if nothing was computed since `open`: the inputs are new."""
        self._behind: tuple[LogShard, int]
        """The input that is furthest behind, and its upper, in the last round."""

    @property
    def omitted_rows_error(self) -> str:
        """Description of the result rows without a unique key, or ""."""
        return self._left_out.sentence()

    @property
    def upper(self) -> int:
        return self.writer.upper if self.writer is not None else 0

    def run(self, stopping: threading.Event, worked: Callable[[], None] = lambda: None) -> None:
        """Run until `stopping` is set; call `worked` after every round without omitted rows.

        Waits for an input that does not exist yet. Raises any other failure: call it again later. After an exception of
        the user's function the inputs stay open; after any other they are reopened.
        """
        clock = self._stores.clock
        while not stopping.is_set():
            began_s, computed, advanced = clock.monotonic_s(), self.recomputed, True
            try:
                if self.writer is None:
                    self.open()
                advanced = self.recompute()
                self.error, self.waits = "", False
                if not self.omitted_rows_error:
                    worked()
            except (MissingError, SchemaEvolvedError) as error:
                self.error, self.waits = error.message, False
                # A shard may have been dropped, to be re-created under its name later. Or it has new columns.
                self.writer = None
            except HistoryLostError as error:
                # One input is behind the history of another: it is advanced, or its feed catches up.
                self.error = f"its inputs have no time in common that is still readable: {error.message}"
                self.waits = True
            except FunctionFailedError:
                raise
            except BaseException:
                self.writer = None
                raise
            finally:
                self.rounds += 1
            took_s = clock.monotonic_s() - began_s
            if self.recomputed > computed:
                self.took_s = took_s
            pause_s = max(self.table.every_s - took_s, took_s * (1 / BUSY_SHARE_MAX - 1), PAUSE_MIN_S)
            if advanced:
                stopping.wait(pause_s)
            elif not stopping.wait(PAUSE_MIN_S):
                self._wait_for_demand(stopping, pause_s)
        self.release_inputs()

    def _wait_for_demand(self, stopping: threading.Event, timeout_s: float) -> None:
        """Wait until the input that was behind has a newer time, but at most the timeout."""
        shard, end = self._behind
        newer = asyncio.run_coroutine_threadsafe(shard.wait_upper(end, timeout_s), self._portal.loop)
        while not newer.done() and not stopping.is_set():
            futures.wait([newer], STOP_CHECK_S)
        newer.cancel()  # an error of the wait is an error of the next round

    def open(self) -> None:
        """Open the inputs, determine the schema of the result by calling the function, and open the output.

        Raises MissingError (an input does not exist yet), InvalidError (the result does not fit a shard).
        """
        s = self._stores
        self.waits_for = ""
        self.release_inputs()
        inputs: list[DerivedInput] = []
        for name in self.table.inputs:
            self.waits_for = f"shard:{name}"
            shard = self._portal.call(s.shard(name))
            by = self.table.by.get(name)
            inputs.append(self._open_grouped(shard, by) if by else DerivedInput(self._portal, shard, s.clock))
        self.waits_for = ""
        self._inputs = inputs
        schema = check_schema(ShardSchema(columns_of(self.function.result_schema(inputs)), self.table.key))
        shard = self._portal.call(s.shard(self.table.name, schema))
        writer = TableWriter(self._portal, s, shard, self._mirror_dir)
        writer.hydrate()
        self._output = self._open_grouped(shard, self.table.by_output) if self.table.by else None
        check_groups(self.table, schema, {i.shard.name: i.shard.schema for i in inputs})
        self.writer = writer
        self._opened = True

    def _open_grouped(self, shard: LogShard, by: tuple[str, ...]) -> GroupedInput:
        directory = self._mirror_dir.parent.parent / "derived" / self.table.name / shard.name
        return GroupedInput(self._portal, shard, self._stores.clock, by, directory)

    def release_inputs(self) -> None:
        """Release the inputs and their holds."""
        inputs, self._inputs = self._inputs, []

        async def release() -> None:
            await asyncio.gather(*(one.release() for one in inputs))

        self._portal.call(release())

    def recompute(self) -> bool:
        """Advance the output to the inputs' common time; False if there was nothing to do or a peer was first."""
        assert self.writer is not None
        uppers = {i.shard.name: self._portal.call(i.shard.frontiers())[1] for i in self._inputs}
        slowest = min((i.shard for i in self._inputs), key=lambda shard: (uppers[shard.name], shard.name))
        end = uppers[slowest.name]
        self.waits_for = f"shard:{slowest.name}"
        self._behind = slowest, end
        self.target = max(self.target, end)
        newest = max(uppers.values())
        if newest - end > LAG_MS:
            s = self._stores
            self._portal.call(advance_idle(s.catalogue, s.remap, slowest, end, newest - 1))
        self._on_peer_append(self.writer.follow())
        lower = self.writer.upper
        if end <= lower:
            return False
        for one in self._inputs:
            one.move_to(end - 1)
            one.hold_from(end - 1)  # hold before anything is read there
        if not any(one.changed for one in self._inputs):
            won = self._portal.call(self.writer.append(lower, end, ()))
            if won:
                self.writer.operator.apply_peer(update_schema(self.writer.schema).empty_table(), lower, end)
            return won
        groups, because = self._changed_groups()
        commands, left_out = self._compute_whole(end) if groups is None else self._compute_groups(groups, lower, end)
        pending = resolve(self.writer.schema, commands, self.writer.operator.mirror, lower, end)
        won = self._portal.call(self._append(lower, end, pending.updates))
        if won:
            self.writer.committed(pending)
            for one in self._inputs:
                one.mark_computed()
            self.recomputed += 1
            self.groups = None if groups is None else len(groups)
            self.whole_because = because
            self._left_out.record_round(groups, left_out)
            self._opened = False
            if self.recomputed == 1:
                log.info("derived table is ready", table=self.table.name, rows=len(pending.changes.hashes))
        else:
            self._on_peer_append(self.writer.follow())
        return won

    def _on_peer_append(self, rows: bool) -> None:
        """Forget omitted rows after a peer's append of a table that is computed whole: the peer reports its own. If the
        peer appended no rows, it may have computed nothing."""
        if rows and not self.table.by:
            self._left_out.forget()

    async def _append(self, lower: int, upper: int, updates: pa.Table) -> bool:
        assert self.writer is not None
        return await self.writer.append(lower, upper, await self.writer.write(updates))

    def _changed_groups(self) -> tuple[U64 | None, str]:
        """Return the groups to compute; None = all of them, with the reason."""
        if not self.table.by:
            return None, "no by=… says which columns group it"
        if self._opened:
            return None, "it is the first round since the table was opened"
        found = NO_GROUPS
        for one in self._inputs:
            if not isinstance(one, GroupedInput):
                if one.changed:
                    return None, f"{one.shard.name}, which is given whole, changed"
                continue
            if one.touched is None:
                return None, f"what changed in {one.shard.name} is no longer in its history"
            found = np.union1d(found, one.touched)
        return found, ""

    def _compute_whole(self, end: int) -> tuple[Commands, OmittedResult | None]:
        assert self.writer is not None
        result = self._run_function(end, None)
        return commands_for(self.writer.schema, result, self.writer.operator.mirror, end - 1)

    def _compute_groups(self, groups: U64, lower: int, end: int) -> tuple[Commands, OmittedResult | None]:
        """Compute these groups. Raises InvalidError if the function returns rows of other groups."""
        assert self.writer is not None and self._output is not None
        schema = self.writer.schema
        result = self._run_function(end, groups)
        if not np.isin(groups_of(result, self.table.by_output), groups).all():
            raise InvalidError(
                f"derived function returned rows of groups that it was given no rows of: table={self.table.name}.",
                fix="Correct or remove by=…: the result may depend only on rows of the same group.",
            )
        self._output.move_to(lower - 1)
        here = Mirror.hydrate(schema, self._output.rows_of(groups), lower)
        return commands_for(schema, result, here, end - 1)

    def _run_function(self, end: int, groups: U64 | None) -> pa.Table:
        """Return the function's rows at end - 1, from the rows of these groups or of all; inputs are held while it
        runs."""
        assert self.writer is not None
        with contextlib.ExitStack() as holds:
            for one in self._inputs:
                holds.enter_context(one.renewed_hold())
            rows = self.function.result(self._inputs, end - 1, groups)
        return stored_rows(self.table.name, rows, self.writer.schema)


def check_groups(table: DerivedTable, output: ShardSchema, inputs: dict[str, ShardSchema]) -> None:
    """Raise InvalidError if a column that groups the table is missing, or its type differs from the result's."""
    kinds = {c.name: c.type for c in output.columns}
    for name, by in table.by.items():
        have = {c.name: c.type for c in inputs[name].columns}
        for column, ours in zip(by, table.by_output, strict=True):
            here, there = have.get(column), kinds.get(ours)
            if here is None or there is None:
                lacks = f"input={name} column={column}" if here is None else f"result column={ours}"
                raise InvalidError(
                    f"no such column to group by: table={table.name} {lacks}.",
                    fix="Name columns of the input and of the result in by=….",
                )
            if is_nested(here):
                raise InvalidError(
                    f"a column of a nested type cannot group a table: table={table.name} input={name} column={column}.",
                    fix="Name scalar columns in by=….",
                )
            if here != there and not any({here, there} <= alike for alike in _HASH_COMPATIBLE_TYPES):
                raise InvalidError(
                    f"a group's column has two types: table={table.name} input={name} {column} {here}, {ours} {there}.",
                    fix="Cast it in the function to the type that the input has.",
                )
