"""Check of a pipeline file without Spark and without a cluster: every problem, each with its line.

    file ─► build(p) with a collector in place of the pipeline ─► declarations ─► problems
                                                     catalogue, shards ─► more problems (check_cluster)

A driver stops at the first wrong declaration. The collector reports it and continues with a stand-in, so that one
mistake hides no other and causes no second report. The functions of derived tables are not called: they need data.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import msgspec

from tidemill.base.errors import AS_RETAINED, InvalidError, drop_table_command, unknown_name_fix
from tidemill.metastore.catalogue import CaptureRow, Catalogue, PipelineRow, TopicRow, check_topic_name
from tidemill.shards.api import ShardSchema
from tidemill.shards.parts.pg_columns import with_existing_types
from tidemill.shards.parts.schema import describe_difference
from tidemill.shards.parts.schema_evolution import evolve_schema, schema_changes
from tidemill.shards.registry import check_shard_name, read_shard
from tidemill.spark.definition import (
    AnyTable,
    CapturedTable,
    DerivedFunction,
    DerivedTable,
    HistoryTable,
    Input,
    Inputs,
    Pipeline,
    StreamTopic,
    Table,
    load_pipeline,
)
from tidemill.spark.derived.version_changes import history_schema, tracked_columns
from tidemill.spark.formats.record_format import TopicOptions
from tidemill.spark.ingest.sources import SourceNotReadyError, as_text_error, captured_feed
from tidemill.spark.ingest.table_ownership import changed_tables, find_refused
from tidemill.spark.predicates.expectations import DEAD_LETTER, Expectations, expectation_check

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from tidemill.consensus.api import Consensus
    from tidemill.spark.types import Names

UNKNOWN = ShardSchema((), ())
"""Schema of a topic whose declaration is wrong."""


class Problem(msgspec.Struct, frozen=True):
    """One problem. `line`: of the file; 0 if it concerns no line."""

    message: str
    fix: str
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.message} {self.fix}".rstrip()


class CheckedPipeline(Pipeline):
    """Collector of a file's declarations and problems."""

    def __init__(self, name: str, file: Path) -> None:
        super().__init__(name)
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {}
        """Line of each table's declaration."""
        self._file = str(file)
        self._broken: set[str] = set()
        """Tables whose declaration is wrong."""

    def report(self, error: InvalidError, line: int) -> None:
        self.problems.append(Problem(error.message, error.fix, line))

    def topic(self, name: str, *, key: Names, schema: str | StructType, **options: Unpack[TopicOptions]) -> StreamTopic:
        try:
            check_topic_name(name)
            return super().topic(name, key=key, schema=schema, **options)
        except InvalidError as error:
            self.report(error, self._line())
            return StreamTopic(name, UNKNOWN)

    def table(
        self,
        name: str,
        source: Input,
        *,
        expect: Mapping[str, str] | None = None,
        on_violation: str = DEAD_LETTER,
    ) -> Table:
        self._declare(name)
        try:
            if isinstance(source, StreamTopic) and source.schema is UNKNOWN:
                expect = None  # its columns are unknown
            return super().table(name, source, expect=expect, on_violation=on_violation)
        except InvalidError as error:
            self.report(error, self._line())
            self._broken.add(name)
            return Table(name, source)

    def derived(
        self,
        name: str = "",
        *,
        key: Names,
        inputs: Inputs | None = None,
        every_s: float = 2.0,
        by: Names | Mapping[str, Names] = (),
    ) -> Callable[[DerivedFunction], DerivedTable]:
        line = self._line()

        def declare(function: DerivedFunction) -> DerivedTable:
            called = name or function.__name__
            self._declare(called, line)
            try:
                return super(CheckedPipeline, self).derived(name, key=key, inputs=inputs, every_s=every_s, by=by)(
                    function
                )
            except InvalidError as error:
                self.report(error, line)
                self._broken.add(called)
                return DerivedTable(called, (), (), every_s, function)

        return declare

    def history(self, name: str, *, of: str | AnyTable, track: Names = ()) -> HistoryTable:
        self._declare(name)
        try:
            return super().history(name, of=of, track=track)
        except InvalidError as error:
            self.report(error, self._line())
            self._broken.add(name)
            return HistoryTable(name, "")

    def check(self) -> None:
        try:
            if not self._broken:
                super().check()
        except InvalidError as error:
            self.report(error, 0)

    def check_inputs(self, reads: Collection[str]) -> None:
        """Check what derived tables read; `reads`: tables that exist elsewhere."""
        known = {*self.all_tables, *self._broken, self.dead_letters, *reads} - {""}
        for history in self.histories.values():
            if history.of not in known:
                self.report(_no_such_table(history.name, history.of, known), self.lines[history.name])
            self._check_tracked_columns(history)
        for table in self.derived_tables.values():
            line = self.lines[table.name]
            for one in table.inputs:
                if one not in known:
                    self.report(_no_such_table(table.name, one, known), line)
            try:
                inspect.signature(table.function).bind(None, *table.inputs)
            except TypeError as why:
                error = InvalidError(
                    f"the function cannot be called with its inputs: table={table.name}"
                    f" inputs={','.join(table.inputs)} error={why}.",
                    fix="Give it the session and one parameter for each input.",
                )
                self.report(error, line)
            for one, columns in table.by.items():
                self._check_group_columns(table, one, columns)

    def _check_tracked_columns(self, table: HistoryTable) -> None:
        if table.of in self.histories:
            error = InvalidError(
                f"a history can have no history: table={table.name} input={table.of}.",
                fix=f"Keep another history of {self.histories[table.of].of}, or derive a table first.",
            )
            self.report(error, self.lines[table.name])
        source = self.tables.get(table.of)
        if not isinstance(source, StreamTopic) or source.schema is UNKNOWN:
            return  # its columns are not in the file
        try:
            history_schema(table.of, source.schema)
            tracked_columns(table.of, source.schema, table.track)
        except InvalidError as error:
            self.report(error, self.lines[table.name])

    def _check_group_columns(self, table: DerivedTable, name: str, columns: tuple[str, ...]) -> None:
        source = self.tables.get(name)
        if not isinstance(source, StreamTopic) or source.schema is UNKNOWN:
            return  # its columns are not in the file
        have = [c.name for c in source.schema.columns]
        for one in columns:
            if one not in have:
                error = InvalidError(
                    f"the input has no such column: table={table.name} input={name} column={one}.",
                    fix=unknown_name_fix(one, have),
                )
                self.report(error, self.lines[table.name])

    def _declare(self, name: str, line: int = 0) -> None:
        line = line or self._line()
        self.lines.setdefault(name, line)
        try:
            check_shard_name(name)
        except InvalidError as error:
            self.report(error, line)

    def _line(self) -> int:
        """Return the line of the file that is calling; 0 if none is."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_lineno if frame.f_code.co_filename == self._file else 0


def _no_such_table(name: str, wanted: str, known: set[str]) -> InvalidError:
    return InvalidError(
        f"the pipeline has no such table: table={name} input={wanted}.",
        fix=f"{unknown_name_fix(wanted, sorted(known - {name}))} If another pipeline maintains it, add"
        f" --reads {wanted}, or --cluster.",
    )


def check_file(file: Path, name: str, reads: Collection[str] | None = ()) -> CheckedPipeline:
    """Return the pipeline with its problems. `reads`: tables of other pipelines that it may read; None if inputs are
    checked later (`check_cluster`)."""
    found = CheckedPipeline(name, file)
    try:
        load_pipeline(file, name, found)
    except InvalidError as error:
        found.report(error, 0)
    if reads is not None:
        found.check_inputs(reads)
    return found


async def check_cluster(
    found: CheckedPipeline,
    catalogue: Catalogue,
    consensus: Consensus,
    reads: Collection[str],
    captures: Collection[str] = (),
) -> None:
    """Add the problems of the pipeline on this cluster: topics, captured tables and inputs that do not exist, schemas
    that differ, and tables of other pipelines. `captures`: those of the configuration, which may not have started yet.
    Raises UnavailableError."""
    rows = await catalogue.list(PipelineRow)
    others = {table for row in rows for table in (*row.tables, row.dead_letters)}
    derived_tables = (found.derived_tables | found.histories).values()
    wanted = {one for table in derived_tables for one in table.inputs} - others
    stored = {one for one in sorted(wanted) if await read_shard(consensus, one) is not None}
    found.check_inputs({*reads, *others, *stored})
    for name, source in found.tables.items():
        error = await _source_problem(name, source, found.expectations.get(name), catalogue, consensus, captures)
        error = error or await _schema_problem(name, source, consensus)
        if error is not None:
            found.report(error, found.lines.get(name, 0))
    for derived in found.derived_tables.values():
        state = await read_shard(consensus, derived.name)
        if state is not None and state.schema.key != derived.key:  # its columns are those of the result
            wanted_schema = msgspec.structs.replace(state.schema, key=derived.key)
            error = _rebuild_error(derived.name, describe_difference(state.schema, wanted_schema))
            found.report(error, found.lines.get(derived.name, 0))
    row = PipelineRow(found.name, found.fed_by(), found.dead_letters, found.inputs(), found.formats())
    own = next((r for r in rows if r.name == found.name), None)
    changed = changed_tables(row, own) if own is not None else ()
    shards = {table for table in changed if await read_shard(consensus, table) is not None}
    for table, why in find_refused(row, own, rows, shards).items():
        found.report(InvalidError(why), found.lines.get(table, 0))


async def _source_problem(
    name: str,
    source: Input,
    expectations: Expectations | None,
    catalogue: Catalogue,
    consensus: Consensus,
    captures: Collection[str],
) -> InvalidError | None:
    if isinstance(source, StreamTopic):
        if await catalogue.get(TopicRow, source.topic) is not None:
            return None
        return InvalidError(
            f"there is no such topic: table={name} topic={source.topic}.",
            fix=f"Correct the name, or create it: tidemill topic create {source.topic}",
        )
    if await catalogue.get(CaptureRow, source.capture) is None:
        if source.capture in captures:
            return None  # it starts with the next `tidemill up`, and the pipeline waits for it
        known = {*captures, *(row.name for row in await catalogue.list(CaptureRow))}
        return InvalidError(
            f"there is no such capture: table={name} capture={source.capture}.",
            fix=f"Use one of: {', '.join(sorted(known))}." if known else f"Configure it: [capture.{source.capture}]",
        )
    try:
        schema = (await captured_feed(catalogue, source.capture, source.table, source.as_text)).schema
        state = await read_shard(consensus, name)
        if state is not None:
            if (error := as_text_error(name, source.as_text, state.schema)) is not None:
                return error
            columns = with_existing_types(schema.columns, state.schema)
            schema = msgspec.structs.replace(schema, columns=columns)
        expectation_check(schema, expectations)
    except SourceNotReadyError:  # the pipeline waits for it
        row = await catalogue.table(source.capture, source.table)
        if row is None or row.state not in NOT_CAPTURED:
            return None
        return InvalidError(
            f"the table is not captured: table={name} capture={source.capture}, because {row.reason.rstrip('.')}.",
            fix=row.fix or "See `tidemill capture list`.",
        )
    except InvalidError as error:
        return error
    return None


NOT_CAPTURED = ("left", "refused")
"""States of tables that stay empty until a user acts."""


async def _schema_problem(name: str, source: Input, consensus: Consensus) -> InvalidError | None:
    """Return why the existing table cannot have the declared schema, or None."""
    if isinstance(source, CapturedTable) or source.schema is UNKNOWN:
        return None
    state = await read_shard(consensus, name)
    if state is None:
        return None
    try:
        evolve_schema(state.schema, schema_changes(state.schema, source.schema))
    except InvalidError:
        return _rebuild_error(name, describe_difference(state.schema, source.schema))
    return None


def _rebuild_error(name: str, difference: str) -> InvalidError:
    return InvalidError(
        f"table exists with another schema: table={name} difference=[{difference}].",
        fix=f"Use another table, or re-create it, {AS_RETAINED}: {drop_table_command(name)}",
    )
