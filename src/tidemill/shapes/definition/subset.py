"""A subset: current rows of a shape, filtered, ordered and limited by the client (Electric's subset snapshots). Pure.

- Invariant (within the shape): the client's text is compiled, and the database query is printed from the checked trees.
  The shape's own clause and the subset's both apply, so a subset shows only rows of the shape.
- Invariant (queryable columns only): a subset uses only queryable columns, also to filter and order. Otherwise it could
  reveal values that it may not show. To its clauses other columns do not exist, so errors reveal no names or types.
- Invariant (no leak by errors): a clause that may fail on a row is evaluated on the shape's rows only. PostgreSQL may
  evaluate the clauses of an AND in any order, and an error would reveal rows that the shape does not show.
- Invariant (stable pages): ties are ordered by the primary key, so that pages (limit and offset) neither overlap nor
  skip rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from tidemill.shapes.definition.planner import MAX_PARAMS, FieldError
from tidemill.shapes.where import Ordering, Type, Where, WhereError, combined_sql, compile_order_by, compile_where
from tidemill.shapes.where.sql_tree import identifier


class SubsetRequest(msgspec.Struct, frozen=True):
    """Parameters as the client sent them; None = not given. `limit` and `offset` are numbers of rows."""

    where: str = ""
    params: tuple[str, ...] = ()
    limit: int | None = None
    offset: int | None = None
    order_by: str = ""


class Subset(msgspec.Struct, frozen=True):
    """A compiled subset. Its parameters follow those of the shape's own clause in the numbering of `where.sql`."""

    where: Where | None
    order_by: Ordering | None
    limit: int | None
    offset: int | None


class SubsetScope(msgspec.Struct, frozen=True):
    """Columns that a subset of one shape may read.

    `queryable` () = all columns; `params_count`: number of parameters of the shape's own clause.
    """

    schema: str
    table: str
    types: Mapping[str, Type]
    queryable: Collection[str]
    params_count: int

    @property
    def queryable_types(self) -> dict[str, Type]:
        return {name: type_ for name, type_ in self.types.items() if not self.queryable or name in self.queryable}


class SubsetMetadata(msgspec.Struct, frozen=True):
    """Information for the client about which changes the rows already show, so that it can drop them. 64-bit numbers
    are text."""

    snapshot_mark: int
    xmin: str
    xmax: str
    xip_list: list[str]
    database_lsn: str


def compile_subset(request: SubsetRequest, scope: SubsetScope) -> Subset:
    """Compile a subset request. Raises FieldError with the name of the parameter."""
    if request.order_by == "" and (request.limit is not None or request.offset is not None):
        raise FieldError("subset__order_by", "limit and offset need an order.", fix="Send subset__order_by.")
    if len(request.params) > MAX_PARAMS:
        raise FieldError("subset__params", f"too many parameters: limit={MAX_PARAMS}.")
    if request.params and not request.where:
        raise FieldError("subset__params", "params were given without a where clause.")
    where = _compile_subset_where(request, scope) if request.where else None
    order_by = _compile_subset_order(request, scope) if request.order_by else None
    return Subset(where, order_by, request.limit, request.offset)


def _compile_subset_where(request: SubsetRequest, scope: SubsetScope) -> Where:
    try:
        return compile_where(
            request.where,
            request.params,
            scope.queryable_types,
            schema=scope.schema,
            table=scope.table,
            first_param=scope.params_count + 1,
        )
    except WhereError as error:
        field = "subset__params" if error.message.startswith("parameters must") else "subset__where"
        raise FieldError(field, error.message, fix=error.fix) from error


def _compile_subset_order(request: SubsetRequest, scope: SubsetScope) -> Ordering:
    try:
        return compile_order_by(request.order_by, scope.queryable_types, schema=scope.schema, table=scope.table)
    except WhereError as error:
        raise FieldError("subset__order_by", error.message, fix=error.fix) from error


def build_subset_sql(
    shown: Sequence[str], scope: str, key: Sequence[str], own: Where | None, subset: Subset
) -> tuple[str, tuple[str, ...]]:
    """Return (query, values of its parameters). `scope`: the table for FROM (TableColumns)."""
    query = f"SELECT {', '.join(map(identifier, shown))} FROM {scope}"
    clauses = [where for where in (own, subset.where) if where is not None]
    if own is not None and subset.where is not None:
        query += f" WHERE {combined_sql(own, subset.where)}"
    elif clauses:
        query += f" WHERE ({clauses[0].sql})"
    if subset.order_by is not None:
        ties = [identifier(name) for name in key if name not in subset.order_by.plain]
        query += " ORDER BY " + ", ".join([subset.order_by.sql, *ties])
    if subset.limit is not None:
        query += f" LIMIT {subset.limit:d}"
    if subset.offset is not None:
        query += f" OFFSET {subset.offset:d}"
    return query, tuple(value for where in clauses for value in where.params)
