"""Reads subsets of a captured table's shape, joined to its stream as initial rows are.

The snapshot sees every transaction that was streamed before it was opened (`must_see`), so no row is older than what a
client at the end of the log has already applied. The client drops later changes that the rows already show, by
`SubsetMetadata`.
"""

from __future__ import annotations

from collections.abc import Callable

from tidemill.shapes.definition.planner import Compiler, SubsetReader
from tidemill.shapes.definition.subset import SubsetMetadata, SubsetRequest, SubsetScope, build_subset_sql
from tidemill.shapes.definition.table_columns import TableColumns
from tidemill.shapes.log.row_writer import RowWriter
from tidemill.shapes.loop_share import LoopShare
from tidemill.shapes.response_memory import ResponseMemory
from tidemill.shapes.tables.initial_snapshot import PostgresSource
from tidemill.shapes.where import Where


def subset_reader(
    source: PostgresSource,
    info: TableColumns,
    where: Where | None,
    columns: tuple[str, ...],
    queryable: tuple[str, ...],
    compiler: Compiler,
    share: LoopShare,
    recent: Callable[[], frozenset[int]],
) -> SubsetReader:
    """Return a reader of subsets. `columns` are shown, () = all; `queryable` may be used to filter and order, () =
    all."""
    relation = info.relation
    shown = columns or info.names
    params_count = len(where.params) if where is not None else 0
    scope = SubsetScope(relation.schema, relation.table, info.where_types(), queryable, params_count)

    async def read(request: SubsetRequest, rows: ResponseMemory, mark: int) -> SubsetMetadata:
        subset = await compiler.compile_subset(request, scope)
        query = build_subset_sql(shown, info.scope, info.key, where, subset)
        marks = {"snapshot_mark": mark}
        writer = RowWriter(relation.schema, relation.table, shown, info.key, info.booleans, marks=marks)
        snapshot, lsn = await source.read_subset(info, shown, query, writer, recent(), share, rows)
        in_progress = [str(xid) for xid in sorted(snapshot.in_progress)]
        return SubsetMetadata(mark, str(snapshot.xmin), str(snapshot.xmax), in_progress, str(lsn))

    return read
