"""Checks the parameters of a request against the table: its name, columns, and the where clause. Pure.

orders, public.orders, "Odd Name"   a captured table; A to Z fold to lower case in unquoted parts, schema public
<database>:<table>                  the same, if several databases are captured
tidemill.<name>                     a table that pipelines maintain, name taken literally
shard.<name>, shard:<name>          its earlier spellings; every spelling is the same shape

The schema names `tidemill` and `shard` are reserved for this. A captured schema of such a name is written with its
database, or quoted: "tidemill".orders.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.capture.changes import Relation
from tidemill.shapes.definition.definition import LogMode, Replica, ShapeDefinition, Source
from tidemill.shapes.where import Type, Where, WhereError, combine, compile_where

if TYPE_CHECKING:
    from tidemill.shapes.definition.subset import Subset, SubsetMetadata, SubsetRequest, SubsetScope
    from tidemill.shapes.live_shape import LiveShape
    from tidemill.shapes.log.chunks import ResponseMemory

SHARD_SCHEMA = "shard"
"""Schema in keys and definitions of shapes over shards: stored in shape logs, and part of handles and signatures."""

SHARD_PREFIXES = ("tidemill.", "shard.", "shard:")

SERVER_CLAUSE_FIELD = "shape"
"""Field name in errors of the server's own clause."""


class ServerBounds(msgspec.Struct, frozen=True):
    """Rows and columns that the server defines, and a client may only narrow.

    Other rows and columns do not exist for the client, nor for its clause. `columns` () = all.
    """

    where: str
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


class ShapeRequest(msgspec.Struct, frozen=True):
    """The parameters that define a shape, as sent by the client or as defined by the server (`permissions`)."""

    table: str
    where: str = ""
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    log_mode: LogMode = "full"
    queryable: tuple[str, ...] = ()
    within: ServerBounds | None = None


def build_definition(
    request: ShapeRequest, source: Source, columns: tuple[str, ...], where: Where | None
) -> ShapeDefinition:
    """Return the definition of a checked request, with the `columns` and `where` that the check returned."""
    return ShapeDefinition(
        source,
        request.where,
        where.given if where else (),
        columns,
        request.replica,
        request.log_mode,
        request.within.where if request.within is not None else "",
    )


class SubsetReader(Protocol):
    """Reads a subset into `rows`, each row marked with `mark`.

    Raises FieldError, InvalidError, OverBudgetError or UnavailableError.
    """

    async def __call__(self, request: SubsetRequest, rows: ResponseMemory, mark: int) -> SubsetMetadata: ...


class Plan(msgspec.Struct, frozen=True):
    """A checked request: its definition, how to build the shape, and how to `read` a subset of its rows. `relation` is
    None for a shard."""

    definition: ShapeDefinition
    schema_json: bytes
    build: Callable[[LiveShape], Awaitable[None]]
    read: SubsetReader
    relation: Relation | None = None


class FieldError(InvalidError):
    """A parameter is invalid; `field` is its name."""

    def __init__(self, field: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.field = field


def parse_shard_name(table: str) -> str | None:
    """Return the shard that a table parameter names, None for a captured table. Raises FieldError."""
    prefix = next((each for each in SHARD_PREFIXES if table.startswith(each)), None)
    if prefix is None:
        return None
    name = table[len(prefix) :]
    return parse_table_name(table)[1] if name.startswith('"') and prefix != "shard:" else name


def parse_table_name(text: str) -> tuple[str, str]:
    """Return (schema, table) of `table` or `schema.table`, with parts optionally double-quoted. Raises FieldError."""
    parts: list[str] = []
    at = 0
    while True:
        if text[at : at + 1] == '"':
            end = find_closing_quote(text, at)
            if end < 0:
                raise FieldError("table", f"unterminated quote in table name: table={text!r}.")
            parts.append(text[at + 1 : end].replace('""', '"'))
            at = end + 1
        else:
            end = next((i for i in range(at, len(text)) if text[i] in '."'), len(text))
            parts.append(fold_identifier(text[at:end]))
            at = end
        if at == len(text):
            break
        if text[at] != ".":
            raise FieldError("table", f"invalid table name: table={text!r}.", fix="Quote unusual names.")
        at += 1
    if len(parts) > 2 or not all(parts):
        raise FieldError("table", f"invalid table name: table={text!r}.", fix="Write table or schema.table.")
    return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])


_FOLDED = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def fold_identifier(name: str) -> str:
    """Return a name without quotes as PostgreSQL stores it: only A to Z are folded, except in databases with an
    encoding of one byte per character, which also fold by their locale."""
    return name.lower() if name.isascii() else name.translate(_FOLDED)


def find_closing_quote(text: str, opening: int) -> int:
    """Return the index of the quote that ends the identifier opened at `opening`, -1 if none does. Doubled quotes are
    part of it."""
    end = opening + 1
    while (end := text.find('"', end)) >= 0 and text[end + 1 : end + 2] == '"':
        end += 2
    return end


def check_columns(request: ShapeRequest, names: tuple[str, ...], key: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns to show, in table order; () = all. They must be queryable; the default is all queryable
    columns.

    Raises FieldError.
    """
    queryable = check_queryable_columns(request, names, key)
    columns = _check_existing("columns", request.columns, names, key)
    refused = ", ".join(name for name in request.columns if queryable and name not in queryable)
    if refused:
        raise FieldError("columns", f"columns are not among queryable_columns: {refused}")
    return columns if request.columns else queryable


def check_queryable_columns(request: ShapeRequest, names: tuple[str, ...], key: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that the shape may show, and a subset may filter and order by; () = all. Raises FieldError."""
    return _check_existing("queryable_columns", request.queryable, names, key)


def _check_existing(
    field: str, wanted: tuple[str, ...], names: tuple[str, ...], key: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the wanted columns in table order, () if none are named. Naming all columns is not the same: columns added
    later are not included."""
    if not wanted:
        return ()
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise FieldError(field, f"The following columns are not found on the table: {', '.join(unknown)}")
    missing = ", ".join(name for name in key or names if name not in wanted)
    if missing:
        raise FieldError(field, f"The list of columns must include all primary key columns, missing: {missing}")
    return tuple(name for name in names if name in wanted)


class Compiler(Protocol):
    """`compile_request` and `compile_subset`, possibly on another thread: a long clause would block the event loop."""

    async def __call__(
        self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str
    ) -> Where | None: ...

    async def compile_subset(self, request: SubsetRequest, scope: SubsetScope) -> Subset: ...


MAX_PARAMS = 1_000


def compile_request(request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
    """Compile the client's clause within the server's. Raises FieldError."""
    within = request.within
    if within is None:
        return _compile_client_clause(request, types, schema, table, 1)
    outer = _compile_server_clause(within, types, schema, table)
    seen = {name: type_ for name, type_ in types.items() if not within.columns or name in within.columns}
    inner = _compile_client_clause(request, seen, schema, table, len(outer.params) + 1 if outer is not None else 1)
    return outer or inner if outer is None or inner is None else combine(outer, inner)


def _compile_server_clause(within: ServerBounds, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
    if not within.where:
        return None
    try:
        return compile_where(within.where, within.params, types, schema=schema, table=table)
    except WhereError as error:
        raise FieldError(SERVER_CLAUSE_FIELD, error.message, fix=error.fix) from error


def _compile_client_clause(
    request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str, first_param: int
) -> Where | None:
    if not request.where:
        if request.params:
            raise FieldError("params", "params were given without a where clause.")
        return None
    if len(request.params) > MAX_PARAMS:
        raise FieldError("params", f"too many parameters: limit={MAX_PARAMS}.", fix="Send an array and use = ANY($1).")
    try:
        return compile_where(request.where, request.params, types, schema=schema, table=table, first_param=first_param)
    except WhereError as error:
        field = "params" if error.message.startswith("parameters must") else "where"
        raise FieldError(field, error.message, fix=error.fix) from error
