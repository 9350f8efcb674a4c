"""A subset: some rows of a shape as they are now, filtered, ordered and cut by the client (notes/electric.md §3). Pure.

S1  What a client sends is compiled, and what reaches the database is printed from the checked trees: the shape's own
    clause and the subset's are both asked, so no subset shows a row that is not the shape's.
S2  A subset reads queryable columns only, also where it filters and orders: else it would tell what it may not show.
S3  A clause that may fail on a row is asked of the shape's rows only: PostgreSQL is free to ask the clauses of an AND
    in any order, and whether one failed would tell of rows that the shape does not show.
S4  Ties are ordered by the primary key, so that pages (limit and offset) neither overlap nor leave rows out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from tidemill.shapes.definition.planner import MAX_PARAMS, FieldError
from tidemill.shapes.where import Ordering, Type, Where, WhereError, both_sql, compile_order_by, compile_where
from tidemill.shapes.where.sql_printer import identifier


class SubsetRequest(msgspec.Struct, frozen=True):
    """As the client sent it; None = not given. `limit` and `offset` are counts of rows."""

    where: str = ""
    params: tuple[str, ...] = ()
    limit: int | None = None
    offset: int | None = None
    order_by: str = ""


class Subset(msgspec.Struct, frozen=True):
    """Compiled. The values of `$1 …` in `where.sql` come behind those of the shape's own clause."""

    where: Where | None
    order_by: Ordering | None
    limit: int | None
    offset: int | None


class SubsetScope(msgspec.Struct, frozen=True):
    """What a subset of one shape may read. `queryable` () = all columns; `params_count`: of the shape's own clause."""

    schema: str
    table: str
    types: Mapping[str, Type]
    queryable: Collection[str]
    params_count: int


class Metadata(msgspec.Struct, frozen=True):
    """By these the client drops the changes that the rows already show; numbers of 64 bits are text."""

    snapshot_mark: int
    xmin: str
    xmax: str
    xip_list: list[str]
    database_lsn: str


def compile_subset(request: SubsetRequest, scope: SubsetScope) -> Subset:
    """Raises FieldError, which names the parameter."""
    if request.order_by == "" and (request.limit is not None or request.offset is not None):
        raise FieldError("subset__order_by", "limit and offset need an order.", fix="Send subset__order_by.")
    if len(request.params) > MAX_PARAMS:
        raise FieldError("subset__params", f"too many parameters: limit={MAX_PARAMS}.")
    if request.params and not request.where:
        raise FieldError("subset__params", "params were given without a where clause.")
    where = _where(request, scope) if request.where else None
    order_by = _order_by(request, scope) if request.order_by else None
    return Subset(where, order_by, request.limit, request.offset)


def _where(request: SubsetRequest, scope: SubsetScope) -> Where:
    try:
        where = compile_where(
            request.where,
            request.params,
            scope.types,
            schema=scope.schema,
            table=scope.table,
            first_param=scope.params_count + 1,
        )
    except WhereError as error:
        field = "subset__params" if error.message.startswith("parameters must") else "subset__where"
        raise FieldError(field, error.message, fix=error.fix) from error
    _check_queryable("subset__where", where.columns, scope)
    return where


def _order_by(request: SubsetRequest, scope: SubsetScope) -> Ordering:
    try:
        ordering = compile_order_by(request.order_by, scope.types, schema=scope.schema, table=scope.table)
    except WhereError as error:
        raise FieldError("subset__order_by", error.message, fix=error.fix) from error
    _check_queryable("subset__order_by", ordering.columns, scope)
    return ordering


def _check_queryable(field: str, used: Collection[str], scope: SubsetScope) -> None:
    refused = sorted(name for name in used if scope.queryable and name not in scope.queryable)
    if refused:
        raise FieldError(field, f"The following columns may not be queried: {', '.join(refused)}")


def subset_sql(
    shown: Sequence[str], scope: str, key: Sequence[str], own: Where | None, subset: Subset
) -> tuple[str, tuple[str, ...]]:
    """(query, values of its parameters). `scope`: of the table (TableColumns)."""
    query = f"SELECT {', '.join(map(identifier, shown))} FROM {scope}"
    clauses = [where for where in (own, subset.where) if where is not None]
    if own is not None and subset.where is not None:
        query += f" WHERE {both_sql(own, subset.where)}"
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
