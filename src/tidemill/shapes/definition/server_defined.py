"""Shapes that the server defines: table, clause and columns are fixed here, and values come from where it says. Pure.

NS1  A value is a parameter of the clause, never a part of its text, whoever it comes from.
NS2  A claim that the token lacks, or that is no value, denies: no clause is ever asked with NULL in its place.
NS3  A client adds what the protocol needs, and the values that the definition asks it for. With `narrow` it may add a
     clause and columns of its own, which hold within the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tidemill.base.errors import InvalidError
from tidemill.shapes.definition.definition import LogMode, Replica
from tidemill.shapes.definition.permissions import AccessDeniedError
from tidemill.shapes.definition.planner import MAX_PARAMS, ServerBounds, ShapeRequest, shard_name, split_table
from tidemill.shapes.where import WhereError, params_of


class FromClaim(msgspec.Struct, frozen=True):
    name: str


class FromClient(msgspec.Struct, frozen=True):
    """The value that the client sends as `params[number]`."""

    number: int


Param = str | FromClaim | FromClient


class NamedShape(msgspec.Struct, frozen=True):
    """`columns` () = all; they are also all that a subset, or a client's own clause, may name."""

    name: str
    table: str
    where: str = ""
    params: tuple[Param, ...] = ()
    columns: tuple[str, ...] = ()
    replica: Replica = "default"
    narrow: bool = False

    @property
    def asks(self) -> int:
        """How many values the client sends."""
        return max((param.number for param in self.params if isinstance(param, FromClient)), default=0)

    def check(self) -> None:
        """Raises InvalidError for a definition that could never be served."""
        key = f"shape.{self.name}"
        try:
            if shard_name(self.table) is None:
                split_table(self.table)
            used = params_of(self.where) if self.where else set()
        except WhereError as error:
            raise InvalidError(
                f"bad value: {key}.where: {error.message.rstrip('.')}.", fix=f"Correct {key}.where."
            ) from error
        except InvalidError as error:
            raise InvalidError(
                f"bad value: {key}.table: {error.message.rstrip('.')}.", fix=f"Correct {key}.table."
            ) from error
        if len(self.params) > MAX_PARAMS or used != set(range(1, len(self.params) + 1)):
            raise InvalidError(
                f"{key}.where must use each of {key}.params once at least, as $1 to ${len(self.params)}:"
                f" used={sorted(used)} params={len(self.params)}.",
                fix="Give each parameter its value.",
            )

    def bind(self, claims: Mapping[str, object] | None, given: Sequence[str]) -> tuple[str, ...]:
        """Values of its clause. `claims` None = nobody proved who they are. `given`: by the client, as many as it
        `asks` for. Raises AccessDeniedError."""
        return tuple(self._value(param, claims, given) for param in self.params)

    def _value(self, param: Param, claims: Mapping[str, object] | None, given: Sequence[str]) -> str:
        if isinstance(param, str):
            return param
        if isinstance(param, FromClient):
            return given[param.number - 1]
        if claims is None:
            raise AccessDeniedError(401, "This shape needs a token that says whose rows it shows.", fix="Send one.")
        text = claim_text(claims.get(param.name))
        if text is None:
            raise AccessDeniedError(403, f"The token lacks a claim that this shape needs: claim={param.name}.")
        return text

    def fixed(self, values: tuple[str, ...], log_mode: LogMode) -> ShapeRequest:
        return ShapeRequest(self.table, self.where, values, self.columns, self.replica, log_mode, self.columns)

    def narrowed(self, values: tuple[str, ...], own: ShapeRequest) -> ShapeRequest:
        """`own`: what the client asks for, of any table. Its columns must be among `self.columns` (`hidden`)."""
        within = ServerBounds(self.where, values, self.columns)
        queryable = own.queryable or self.columns
        return ShapeRequest(
            self.table, own.where, own.params, own.columns, self.replica, own.log_mode, queryable, within
        )

    def hidden(self, columns: Iterable[str]) -> list[str]:
        """Those that a client may not name."""
        return [name for name in columns if self.columns and name not in self.columns]


def claim_text(value: object) -> str | None:
    """As the text of a parameter; a list as an array, for `= ANY($1)`. None = it is no value, or none that a text of
    PostgreSQL's could hold."""
    if isinstance(value, list):
        items = [claim_text(item) if not isinstance(item, list) else None for item in value]
        if any(item is None for item in items):
            return None
        quoted = ('"' + str(item).replace("\\", "\\\\").replace('"', '\\"') + '"' for item in items)
        return "{" + ",".join(quoted) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int | float):
        return str(value)
    return value if isinstance(value, str) and "\0" not in value else None
