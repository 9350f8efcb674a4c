"""What a client asked for, checked against what there is: table names, columns, the where clause. Pure.

orders, public.orders, "Odd Name"   a captured table; unquoted parts fold to lower case, schema public
<database>:<table>                  the same, where several databases are captured
shard.<name>, shard:<name>          a shard, name as it is; the schema name `shard` is reserved for this
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from tidemill.base.errors import Invalid
from tidemill.capture.changes import Relation
from tidemill.shapes.live import LiveShape
from tidemill.shapes.shape import LogMode, Replica, ShapeDefinition
from tidemill.shapes.where import Type, Where, WhereError, compile_where

SHARD_SCHEMA = "shard"


class ShapeRequest(msgspec.Struct, frozen=True):
    """The parameters that define a shape, as the client sent them."""

    table: str
    where: str = ""
    params: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    log_mode: LogMode = "full"


class Plan(msgspec.Struct, frozen=True):
    """A checked request: its definition, and how to build the shape. `relation` is None for a shard."""

    definition: ShapeDefinition
    schema_json: bytes
    build: Callable[[LiveShape], Awaitable[None]]
    relation: Relation | None = None


class FieldError(Invalid):
    """A parameter is wrong; `field` names it."""

    def __init__(self, field: str, message: str, *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.field = field


def shard_name(table: str) -> str | None:
    """The shard a table parameter names, None for a table."""
    if table.startswith("shard:"):
        return table[len("shard:") :]
    if table.startswith('shard."'):
        return split_table(table)[1]
    return table[len("shard.") :] if table.startswith("shard.") else None


def split_table(text: str) -> tuple[str, str]:
    """(schema, table) of `table` or `schema.table`, parts optionally double-quoted. Raises FieldError."""
    parts: list[str] = []
    at = 0
    while True:
        if text[at : at + 1] == '"':
            end = closing_quote(text, at)
            if end < 0:
                raise FieldError("table", f"unterminated quote in table name: table={text!r}.")
            parts.append(text[at + 1 : end].replace('""', '"'))
            at = end + 1
        else:
            end = next((i for i in range(at, len(text)) if text[i] in '."'), len(text))
            parts.append(text[at:end].lower())
            at = end
        if at == len(text):
            break
        if text[at] != ".":
            raise FieldError("table", f"invalid table name: table={text!r}.", fix="Quote unusual names.")
        at += 1
    if len(parts) > 2 or not all(parts):
        raise FieldError("table", f"invalid table name: table={text!r}.", fix="Write table or schema.table.")
    return (parts[0], parts[1]) if len(parts) == 2 else ("public", parts[0])


def closing_quote(text: str, opening: int) -> int:
    """Index of the quote that ends the identifier opened at `opening`; doubled quotes are part of it; -1 = none."""
    end = opening + 1
    while (end := text.find('"', end)) >= 0 and text[end + 1 : end + 2] == '"':
        end += 2
    return end


def check_columns(wanted: tuple[str, ...], names: tuple[str, ...], key: tuple[str, ...]) -> tuple[str, ...]:
    """The wanted columns in table order; () when all are wanted. Raises FieldError."""
    if not wanted:
        return ()
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise FieldError("columns", f"The following columns are not found on the table: {', '.join(unknown)}")
    missing = ", ".join(name for name in key or names if name not in wanted)
    if missing:
        raise FieldError("columns", f"The list of columns must include all primary key columns, missing: {missing}")
    shown = tuple(name for name in names if name in wanted)
    return () if shown == names else shown


class Compiler(Protocol):
    """`compile_request`, wherever it runs: a long clause takes longer than the loop may stand still."""

    async def __call__(
        self, request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str
    ) -> Where | None: ...


MAX_PARAMS = 1_000


def compile_request(request: ShapeRequest, types: Mapping[str, Type], schema: str, table: str) -> Where | None:
    """Raises FieldError."""
    if not request.where:
        if request.params:
            raise FieldError("params", "params were given without a where clause.")
        return None
    if len(request.params) > MAX_PARAMS:
        raise FieldError("params", f"too many parameters: limit={MAX_PARAMS}.", fix="Send an array and use = ANY($1).")
    try:
        return compile_where(request.where, request.params, types, schema=schema, table=table)
    except WhereError as error:
        field = "params" if error.message.startswith("parameters must") else "where"
        raise FieldError(field, error.message, fix=error.fix) from error
